"""Names, words and numbers to repeat, at once or later. Most are made up, so that copying is
learned and not a list.
"""

import random
import re
from functools import cache

from . import read_text
from .facts import PHRASES

Message = tuple[str, str]

NAMES = """Mia Lily Anna Ella Nina Rosa Ida Luna Ruby Clara Daisy Greta Nora Tilly Emma Sophie Zoe
Alice Maya Eva Kate Julia Laura Sara Lena Amy Iris Olga Maria Ana Carla Elena Yuki Mei Fatima Leila
Priya Astrid Freya Ingrid Chloe Hannah Molly Bella Martha Vera Tom Ben Max Sam Leo Finn Otto Pip
Milo Oscar Theo Hugo Felix Jack Paul Oliver Noah Lucas Henry Jonas Adam Simon Peter Mark David
Daniel Karl Bruno Ivan Pedro Luis Marco Kenji Chen Ali Omar Ravi Arjun Sven Lars Erik Pierre Bob
George Walter Frank""".split()
ONSETS = """b c d f g h j k l m n p r s t v w z b d f g k l m n p r s t v bl br ch cl cr dr dw fl fr gl gn gr kh kj kl kn kr kw lh ll mb
ng nd ph pl pr ps qu rh sc sch sh shr sk sl sm sn sp spr st str sv sw sz th thr tr ts tsch tw vl vr wh wr x xh y zb zd zh zw""".split()
VOWELS = (
    "a e i o u a e i o u a e i o u y aa ae ai ao au ay ea ee ei eo eu ey ia ie io iu oa oe oi oo "
    "ou oy ua ue ui uo yo".split()
)
CODAS = [
    "",
    "",
    "",
    "",
    *"b ck d f g h k l ld ll lt m mp n nd ng nk nn nt p r rd rg rk rm rn rs rt s sh ss st t th "
    "tt v w x z tz".split(),
]
ACCENTS = {
    "a": "áàâäåã",
    "e": "éèêë",
    "i": "íî",
    "o": "óöôø",
    "u": "úüû",
    "c": "çć",
    "n": "ñń",
    "s": "šś",
    "z": "žż",
    "l": "ł",
}

SAY = PHRASES["SAY"]
NAMED = PHRASES["NAMED"]
WHO = PHRASES["WHO"]
# {k}: what it is, such as "word" or "lucky number"; {x}: the thing.
TOLD = PHRASES["TOLD"]
ASKED = PHRASES["ASKED"]
# (statements about the user, questions for them, kind of {x}): each has questions of its own,
# unlike TOLD and ASKED.
FREE = [tuple(part.split(" ; ") for part in line.split(" => ")) for line in PHRASES["FREE"]]
WORDS = """word secret word code word magic word password|colour|city|town|street|animal|dog's name|cat's name|team|project's name
favourite word|favourite colour|favourite food|favourite animal|favourite city|village|hero|nickname|keyword|term|term of the day|user name
boat's name|friend's name|planet""".replace("\n", "|").replace(
    "word secret word code word magic word", "word|word|word|secret word|code word|magic word"
)
NUMBERS = (
    "number|number|number|lucky number|room number|code|secret number|pin|age|year|score|house "
    "number|order number|favourite number|amount"
)
CODES = "code|order code|key|ticket|number plate|reference|serial number"


@cache
def english() -> list[str]:
    """Words of the users' questions."""
    text = " ".join(
        read_text(f"guide_data/{name}")
        for name in ("newcomers.txt", "newcomers2.txt", "offtopic.txt")
    )
    return sorted(set(re.findall(r"(?<![\w{/`-])[a-z]{3,11}(?![\w}/`-])", text)))


def made_up(rng: random.Random, most: int = 3) -> str:
    kind = rng.random()
    if kind < 0.6:
        return "".join(
            rng.choice(ONSETS + [""]) + rng.choice(VOWELS) + rng.choice(CODAS)
            for _ in range(rng.randint(1, most))
        )
    if kind < 0.85:  # halves of two words
        first, two = rng.choice(english()), rng.choice(english())
        return first[: rng.randint(1, 4)] + two[-rng.randint(2, 5) :]
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))


def any_name(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(NAMES)
    name = made_up(rng).capitalize() + rng.choice(("", "", "", "n", "s", "l", "r", "a", "o"))
    if rng.random() < 0.06:
        name = "".join(
            rng.choice(ACCENTS[letter]) if letter in ACCENTS and rng.random() < 0.5 else letter
            for letter in name
        )
    if rng.random() < 0.1:
        name += rng.choice((" ", " ", "-")) + made_up(rng, 2).capitalize()
    return name if rng.random() < 0.9 else name.lower()


def any_number(rng: random.Random) -> str:
    digits = "".join(
        rng.choice("0123456789") for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8)))
    )
    if rng.random() < 0.1 and len(digits) > 2:
        at = rng.randrange(1, len(digits))
        return digits[:at] + rng.choice(".,:-/ ") + digits[at:]
    return digits if rng.random() < 0.1 else digits.lstrip("0") or "0"


def any_word(rng: random.Random) -> str:
    word = rng.choice(english()) if rng.random() < 0.45 else made_up(rng)
    return (
        word.capitalize() if rng.random() < 0.15 else word.upper() if rng.random() < 0.05 else word
    )


def any_code(rng: random.Random) -> str:
    text = "".join(
        rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(rng.randint(2, 7))
    )
    at = rng.randrange(1, len(text))
    return text if rng.random() < 0.6 else text[:at] + "-" + text[at:]


def any_text(rng: random.Random) -> str:
    """One to six things."""
    kinds = (any_word, any_word, any_word, any_name, any_number, any_code)
    return " ".join(rng.choice(kinds)(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6))))


def written(
    text: str, thing: str, rng: random.Random, ends: tuple[str, ...] = ("", "", ".", "!")
) -> str:
    """The text with or without a capital and an end; the thing stays."""
    if rng.random() < 0.6 and not text.startswith(thing):
        text = text[:1].upper() + text[1:]
    return text.replace(" i ", rng.choice((" i ", " I "))) + rng.choice(ends)


def introduction(rng: random.Random) -> tuple[str, str, str]:
    """The user tells a name: (text, answer, name)."""
    name = any_name(rng)
    return (
        written(rng.choice(NAMED).format(name), name, rng, ("", ".", ".", "!")),
        f"Nice to meet you, {name}! What would you like to know?",
        name,
    )


def echo(rng: random.Random) -> tuple[list[Message], str]:
    """(messages, text to repeat). The answer has the text after a space, as questions do: the same
    pieces stand for it.
    """
    said = any_text(rng)
    if rng.random() < 0.3:
        quotes = rng.choice(('""', '""', "''", "``", "()"))
        said = quotes[0] + said + quotes[1]
    return [
        ("user", written(rng.choice(SAY).format(said), said, rng, ("",))),
        ("assistant", f"Here you go: {said}"),
    ], said


def told(rng: random.Random) -> tuple[str, str, str, str, str]:
    """Something to remember: (statement, reply to it, question for it, reply to that, thing)."""
    kind = rng.random()
    if kind < 0.4:
        text, answer, name = introduction(rng)
        return text, answer, rng.choice(WHO), f"Your name is {name}.", name
    if rng.random() < 0.45:
        statements, questions, (what,) = rng.choice(FREE)
        thing = {
            "word": rng.choice((any_word, any_word, any_name)),
            "name": any_name,
            "number": any_number,
            "code": any_code,
        }[what](rng)
        text = written(rng.choice(statements).replace("{x}", thing), thing, rng)
        return (
            text,
            f"I will remember it: {thing}.",
            rng.choice(questions),
            f"It was {thing}.",
            thing,
        )
    names, make = (
        (WORDS, rng.choice((any_word, any_word, any_name)))
        if kind < 0.68
        else (NUMBERS, any_number)
        if kind < 0.93
        else (CODES, any_code)
    )
    what, thing = rng.choice(names.split("|")), make(rng)
    text = written(rng.choice(TOLD).format(k=what, x=thing), thing, rng)
    return (
        text,
        f"I will remember it: {thing}.",
        rng.choice(ASKED).format(k=what),
        f"It was {thing}.",
        thing,
    )


def memory(rng: random.Random, between: list[Message]) -> tuple[list[Message], str]:
    """The user tells one or two things and asks for one, at once or some turns later: (messages,
    that thing).
    """
    first, two = told(rng), told(rng)
    if rng.random() < 0.05:  # told nothing
        ask, said = first[2], first[3]
        answer = (
            "You have not told me your name yet."
            if said.startswith("Your")
            else "You have not told me that yet."
        )
        return [*between, ("user", written(ask, "\n", rng, ("?", "")))] + [
            ("assistant", answer)
        ], ""
    several = (
        rng.random() < 0.3
        and first[3].split(" is ")[0] != two[3].split(" is ")[0]
        and first[1].split(":")[0] != two[1].split(":")[0]
    )
    statements = [first, two] if several else [first]
    statement, _, ask, recalled, thing = rng.choice(statements)
    ask = written(ask, "\n", rng, ("?", "?", "?", "", "."))
    if rng.random() < 0.2:
        texts = [text.rstrip(".!") for text, *_ in statements]
        text = (
            f"{' and '.join(texts)}."
            if rng.random() < 0.4
            else " ".join(f"{text}." for text in texts)
        )
        return [("user", f"{text} {ask}"), ("assistant", recalled)], thing
    messages = [
        message
        for text, reply, *_ in statements
        for message in (("user", text), ("assistant", reply))
    ]
    return [*messages, *between, ("user", ask), ("assistant", recalled)], thing
