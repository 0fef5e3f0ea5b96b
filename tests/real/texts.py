"""Texts that judge real checkpoints: eight for logits, 200 of all scripts for tokenizers."""

from __future__ import annotations

LOGITS = (
    "Hi",
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, "
    "a + b\n    return a\n\n\nclass Stack:\n",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1; -- "
    '{"key": [1, 2.5e-3, null]}',
    "Zażółć gęślą jaźń — «Ünïcödé» 日本語のテキスト, текст, नमस्ते, שלום, 🦙👩‍👩‍👧 and e\u0301\u200d.",  # noqa: E501
    "\n\n\t  leading space, 1234567890 3.14159 -42 0x1F, ALL CAPS, camelCase, snake_case, "
    "don't, I'LL",
    "Once upon a time there was a little llama who lived on a hill. "
    + "Every day she walked down to the river, drank, looked at "
    "the clouds in the water, and walked up again, thinking of what the old alpaca had said. " * 8,
    " ".join(f"{number}: {number * number} is the square of {number}." for number in range(1, 33)),
)
GREEDY = (
    "Once upon a time",
    "The three primary colours are",
    "import numpy as np\n\ndef softmax(x):\n",
    "Liste de courses :",
)
CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Give me three tips for learning to cook.",
)

_SENTENCES = (
    "All human beings are born free and equal in dignity and rights.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos, ¿verdad?",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności.",
    "Všichni lidé se rodí svobodní a sobě rovní co do důstojnosti a práv.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar; İstanbul'da.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm.",
    "Allir menn eru bornir frjálsir og jafnir öðrum að virðingu og réttindum.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "Усі люди народжуються вільними і рівними у своїй гідності та правах.",
    "Բոլոր մարդիկ ծնվում են ազատ ու հավասար.",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "تمام انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔",
    "سبھی انسان می‌توانند آزاد باشند.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।",
    "ਸਾਰਾ ਮਨੁੱਖੀ ਪਰਿਵਾਰ ਆਪਣੀ ਮਹਿਮਾ, ਸ਼ਾਨ ਅਤੇ ਹੱਕਾਂ ਦੇ ਪੱਖੋਂ ਜਨਮ ਤੋਂ ਹੀ ਆਜ਼ਾਦ ਹੈ।",
    "பிறப்புரிமையில் மனிதர்கள் எல்லோரும் சுதந்திரமானவர்கள்.",
    "ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులు.",
    "മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടുകൂടി ജനിച്ചവരാണ്.",
    "සියලු මනුෂ්‍යයෝ නිදහස්ව උපත ලබා ඇත.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "ມະນຸດເກີດມາມີສິດເສລີພາບ.",
    "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသည်။",
    "មនុស្សទាំងអស់កើតមកមានសេរីភាព។",
    "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་ཆེ་མཐོངས་དང་།",
    "ሰብኣዊ ፍጡራን ሁሉ ነጻ ሆነው ተወለዱ።",
    "人人生而自由,在尊严和权利上一律平等。",
    "人人生而自由,在尊嚴和權利上一律平等。「繁體」",
    "すべての人間は、生まれながらにして自由であり、カタカナも平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "ᠬᠦᠮᠦᠨ ᠪᠦᠷ ᠲᠥᠷᠥᠵᠦ ᠮᠡᠨᠳᠡᠯᠡᠬᠦ",
    "ᏂᎦᏓ ᎠᏂᏴᏫ",
    "ᐃᓄᓕᒫᑦ",
    "ⴰⵔ ⴷ ⵜⵜⵍⴰⵍⵏ",
    "𐌰𐌻𐌻𐌰𐌹 𐌼𐌰𐌽𐌽𐌰𐌽𐍃",
    "𒀀𒈾",
    "𓀀𓂀 hieroglyphs",
    "🦙 🇨🇭👩🏽‍🚀❤️‍🔥 emoji #️⃣ ☃︎",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋ ≠ ½ · 10⁻³ µm → ∞",
    "e\u0301 vs é, n\u0303, ﬁ ligature, ｆｕｌｌｗｉｄｔｈ, Ⅷ, ²³",
    "zero\u200bwidth\u200djoin\u2060er soft\u00adhyphen no\u00a0break ideographic\u3000space",
    "\u202eright to left override\u202c and \ufeff a mark",
    "line\r\nends\rof\nall\u2028kinds\u2029\x0b\x0c\x85.",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }  // C",
    "def f(x):\n\treturn x**2 if x > 0 else -x\n\n\n\n",
    '<div class="a">&amp; &lt;b&gt;</div>\n<!-- comment -->',
    '{"a": [1, 2, {"b": null}], "c": "\\u00e9\\n"}',
    "$ ls -la ~/models | grep '\\.gguf$' && echo \"done\" >> /tmp/log 2>&1",
    "\\begin{align} E &= mc^2 \\\\ \\int_0^\\infty \\end{align}",
    "1 22 333 4444 55555 666666 7777777 88888888 999999999 1,000,000.00 12:34:56 2026-11-25 "
    "+1-202-555-0100",
    "I'm you're he'll WE'VE they'd it's DON'T ’tis o’clock rock'n'roll",
    "https://example.org/a?b=c&d=%20#e user@example.org",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "          ten spaces",
    "trailing   \n   \n\t\t\n  x   ",
    "a",
    " ",
    "\n",
    "\t",
    "",
    "<s> </s> <unk> <|im_start|> <start_of_turn> <bos> <eos> [INST] <0x0A> <|endoftext|>",
    "SuperCaliFragilisticExpiAlidocious",
)


def make_tokenizer_texts() -> list[str]:
    """200 texts: each sentence, pairs of different scripts, and sentences cut, joined and spaced in
    other ways.
    """
    count, texts = len(_SENTENCES), list(_SENTENCES)
    for i in range(count):
        first, second = _SENTENCES[i], _SENTENCES[(7 * i + 13) % count]
        texts.append(first[: len(first) // 2] + second[len(second) // 3 :])
        texts.append(
            ("  ", "\n\n", "\t", " 12", "—", "")[i % 6].join((first, second, first[:5].upper()))
        )
    return texts[:200]
