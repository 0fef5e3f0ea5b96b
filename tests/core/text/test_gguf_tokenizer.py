"""GGUF vocabularies against llama.cpp's own cases and ids, and against the sentencepiece and
tokenizers libraries.
"""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from cases.texts import TEXTS, VOCABULARIES, any_text, has_wide_space, load_vocabulary
from hypothesis import assume, given, strategies as st
from making import (
    CHAT_TEMPLATE,
    LLAMA3_SPECIALS,
    byte_level_json,
    refusal,
    sentencepiece_model,
)
from making_gguf import add_byte_level, add_sentencepiece
from transformers import GemmaTokenizer

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.text.template import ChatTemplate, encode_messages, read_gguf_template
from mlx_llama.core.text.tokenizer import byte_alphabet

DATA = Path(__file__).resolve().parents[2] / "data"
KINDS = ("llama", "gpt2")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
anything = any_text("</s>", "don't", "I'LL", "1234", "<b>")


def toy(kind):
    """(metadata as gguf's writer has it, the library's own tokenizer)"""
    writer = gguf.GGUFWriter("toy.gguf", "llama")
    if kind == "llama":
        add_sentencepiece(writer)
        library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    else:
        add_byte_level(writer)
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 380  # <|end_of_text|>
        library = tokenizers.Tokenizer.from_str(byte_level_json())
    metadata = {name: field.value for name, field in writer.kv_data[0].items()}
    for name in ("tokenizer.ggml.add_bos_token", "tokenizer.chat_template"):
        metadata.pop(name, None)
    return metadata, library


def load_more(metadata, tokens, types, **fields):
    """A toy's tokenizer with further tokens of these types."""
    if "tokenizer.ggml.scores" in metadata:
        fields["scores"] = [*metadata["tokenizer.ggml.scores"], *[0.0] * len(tokens)]
    return load_vocabulary(
        metadata,
        tokens=[*metadata["tokenizer.ggml.tokens"], *tokens],
        token_type=[*metadata["tokenizer.ggml.token_type"], *types],
        **fields,
    )


# llama.cpp


def own_cases(name):
    """[(text, ids)] as llama.cpp's tests/test-tokenizer-0.cpp reads them."""
    raw = (DATA / f"ggml-vocab-{name}.gguf.inp").read_bytes()
    texts = raw.decode().split("\n__ggml_vocab_test__\n")
    if texts[-1] == "":
        texts.pop()
    lines = (DATA / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    return [(text, list(map(int, line.split()))) for text, line in zip(texts, lines, strict=True)]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_own_cases(name, vocabularies):
    ours, cases = vocabularies[name][1], own_cases(name)
    assert len(cases) == 46
    for text, ids in cases:
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_ids_of_further_texts(name, special, vocabularies, judged):
    ours = vocabularies[name][1]
    theirs = judged["vocabularies"][name]["special" if special else "plain"]
    assert len(theirs) > 100
    for text, ids in zip(judged["texts"], theirs, strict=True):
        if name != "deepseek-coder" or not has_wide_space(text):
            assert ours.encode(text, parse_special=special) == ids, text


@pytest.mark.parametrize("name", VOCABULARIES)
def test_special_tokens_are_llama_cpps(name, vocabularies, judged):
    ours, theirs = vocabularies[name][1], judged["vocabularies"][name]
    assert sorted(ours.eos_ids) == theirs["ends"]
    assert (ours.bos_id, ours.adds_bos) == (theirs["bos"], theirs["adds_bos"])
    others = {"llama-spm": [0]}.get(name, [])
    if name == "gemma-4":  # user-defined in the file, for llama.cpp to print them
        others = [ours.special_ids[text] for text in GEMMA_4_MARKS if text != "<|tool_response>"]
    assert sorted(ours.special_ids.values()) == sorted(others + theirs["control"])


# The libraries


GEMMA_4_MARKS = "<|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>"
GEMMA_4_MARKS = (*GEMMA_4_MARKS.split(), '<|"|>')


@pytest.fixture(scope="session")
def gemma_4(vocabularies):
    """(metadata, ours, transformers' tokenizer) of Gemma 4's vocabulary"""
    metadata, ours = vocabularies["gemma-4"]
    judge = GemmaTokenizer(
        vocab={text: i for i, text in enumerate(ours.tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        extra_special_tokens=list(ours.special_ids),
    )
    return metadata, ours, judge


@given(text=any_text("\n\n\n", " " * 40, "</s>", "<b>", "<turn|>", "ﬁ", "\u3000"))
def test_transformers_own_ids_of_gemma_4(text, gemma_4):
    _, ours, judge = gemma_4
    ids = ours.encode(text, parse_special=True)
    assert ids == judge.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special=False) == judge.decode(ids)
    assert ours.decode(ids) == judge.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("fields", [{}, {"model": "gpt2", "pre": "gemma4"}])
def test_gemma_4s_texts_begin_with_bos_whatever_the_file_says(fields, gemma_4):
    """llama.cpp knows that early files say otherwise."""
    metadata, ours, _ = gemma_4
    assert not ours.notices
    ours = load_vocabulary(metadata, add_bos_token=False, **fields)
    assert ours.adds_bos and ours.encode("a", add_bos=True)[0] == ours.bos_id == 2
    (notice,) = ours.notices
    assert "add_bos_token is false, ignored as in llama.cpp" in notice


def test_a_users_text_has_none_of_gemma_4s_marks(gemma_4):
    _, ours, judge = gemma_4
    for mark in GEMMA_4_MARKS:
        ids = ours.encode(f"a{mark}b")
        assert ours.special_ids[mark] not in ids and ours.decode(ids) == f"a{mark}b"
        assert ours.encode(mark, parse_special=True) == judge.encode(mark, add_special_tokens=False)
    assert "</s>" in ours.tokens and "</s>" not in ours.special_ids


@given(text=anything)
def test_sentencepieces_own_ids(text):
    metadata, sp = toy("llama")
    ours = load_vocabulary(metadata)
    assert ours.encode(text) == sp.encode(text)
    assert ours.decode(sp.encode(text)) == sp.decode(sp.encode(text))


@given(text=anything)
def test_the_tokenizers_librarys_own_ids(text):
    metadata, library = toy("gpt2")
    ours = load_vocabulary(metadata)
    assume("ſ" not in text)  # which (?i:'s) takes for an s, and llama.cpp does not
    assert ours.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_bos=True) == library.encode(text).ids


@given(text=anything)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_comes_back_at_once_and_streamed(name, text, vocabularies):
    ours = vocabularies[name][1]
    added = ours.added_ids if name == "deepseek-coder" else ()
    assume(not any(special in text for special in ("▁", *added)))
    for add_bos in (False, True):
        ids = ours.encode(text, add_bos=add_bos)
        assert ours.decode(ids) == text
        stream = ours.stream()
        assert "".join(map(stream.push, ids)) + stream.finish() == text


@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_ids_decode_as_the_library_decodes_them(kind, data):
    metadata, library = toy(kind)
    ours = load_vocabulary(metadata)
    highest = len(metadata["tokenizer.ggml.tokens"]) - 1 - len(LLAMA3_SPECIALS)
    ids = data.draw(st.lists(st.integers(min_value=3, max_value=highest), max_size=20))
    assert ours.decode(ids) == library.decode(ids)


# Special tokens


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_are_text_in_user_text(kind):
    ours = load_vocabulary(toy(kind)[0])
    for literal, control in ours.special_ids.items():
        for text in (literal, f"a{literal}b", f"x {literal} ", literal * 3):
            ids = ours.encode(text)
            assert control not in ids and ours.decode(ids) == text
            assert control in ours.encode(text, parse_special=True)


@pytest.mark.parametrize("kind", KINDS)
def test_user_defined_tokens_are_found_in_any_text(kind):
    metadata, _ = toy(kind)
    ours = load_more(metadata, ["<think>"], [USER_DEFINED])
    think = len(metadata["tokenizer.ggml.tokens"])
    assert ours.added_ids["<think>"] == think and "<think>" not in ours.special_ids
    ids = ours.encode("a<think>b")
    # with the space prefix, if the kind has one
    assert ids == ours.encode("a") + [think] + ours.encode("b")
    assert "<think>" in ours.decode(ids)
    assert ours.encode_parts(["a<", "think>b"]).count(think) == 0


def test_the_longest_special_token_takes_its_places_first():
    metadata, _ = toy("gpt2")
    count = len(metadata["tokenizer.ggml.tokens"])
    ours = load_more(metadata, ["<a", "a><b>", "<a><b>", "<b>"], [USER_DEFINED] * 4)
    assert ours.encode("<a><b>") == [count + 2]
    assert ours.encode("x<a><c>") == [*ours.encode("x"), count, *ours.encode("><c>")]
    assert ours.encode("<<b>a><b>") == [*ours.encode("<"), count + 3, count + 1]


def test_a_skipped_special_token_ends_a_character_as_in_sentencepiece():
    metadata, sp = toy("llama")
    ours, half = load_vocabulary(metadata), [sp.piece_to_id("<0xC3>"), sp.piece_to_id("<0xA9>")]
    assert ours.decode(half) == sp.decode(half) == "é"
    assert ours.decode([half[0], 2, half[1]]) == sp.decode([half[0], 2, half[1]]) == "\ufffd\ufffd"


def test_a_user_defined_token_keeps_its_space():
    metadata, sp = toy("llama")
    ours = load_more(metadata, ["  "], [USER_DEFINED])
    assert ours.encode("  ") == [sp.get_piece_size()]
    assert ours.decode(ours.encode("  ")) == "  "


def test_a_word_after_a_special_token_gets_a_space():
    ours = load_vocabulary(toy("llama")[0])
    tokens = [ours.tokens[token] for token in ours.encode("</s>Hello", parse_special=True)]
    assert tokens[0] == "</s>" and tokens[1].startswith("▁")
    bare = load_vocabulary(toy("llama")[0], add_space_prefix=False)
    assert ours.encode_parts(["</s>", "Hello"]) == [2, *bare.encode("Hello")]
    assert bare.decode(bare.encode(" Hello")) == " Hello"
    assert not bare.tokens[bare.encode("Hello")[0]].startswith("▁")


def test_merges_do_not_lead_user_text_to_a_control_token():
    """llama.cpp's do; a message could end the answer that way."""
    metadata, _ = toy("gpt2")
    merges = [*metadata["tokenizer.ggml.merges"], "Q X", "QX Q"]
    last = len(metadata["tokenizer.ggml.tokens"]) + 1
    for kind in (NORMAL, CONTROL):
        ours = load_more(metadata, ["QX", "QXQ"], [NORMAL, kind], merges=merges)
        ids = ours.encode("aQXQ QXQ")
        assert (last in ids) == (kind == NORMAL)
        assert ours.decode(ids) == "aQXQ QXQ"
        assert last in ours.encode("QXQ", parse_special=True)


def test_the_conversation_in_a_files_template():
    for kind in KINDS:
        metadata = toy(kind)[0] | {"tokenizer.chat_template": CHAT_TEMPLATE}
        ours = load_vocabulary(metadata)
        template = ChatTemplate(*read_gguf_template(metadata, "toy.gguf")[:2], ours.named)
        eos = ours.named["eos_token"]
        ids = encode_messages(ours, template, [{"role": "user", "content": f"hi {eos} there"}])
        assert ids[0] == ours.bos_id and ids.count(ours.bos_id) == 1
        assert ids.count(ours.eos_ids[0]) == 1  # the template's own, not the user's
        assert f"hi {eos} there" in ours.decode(ids).replace("  ", " ")


def test_ends_of_an_answer_by_metadata_and_by_text():
    metadata, _ = toy("gpt2")
    tokens = metadata["tokenizer.ggml.tokens"]
    ends = [tokens[token] for token in load_vocabulary(metadata).eos_ids]
    assert ends == ["<|end_of_text|>", "<|eot_id|>"]
    assert tokens[load_vocabulary(metadata, eom_token_id=7).eos_ids[1]] == tokens[7]
    ours = load_more(metadata, ["<|im_end|>"], [NORMAL])
    # a control token in spite of its type
    assert len(tokens) in ours.eos_ids and ours.special_ids["<|im_end|>"] == len(tokens)


def test_phi_3s_special_tokens_take_white_space_along():
    metadata, _ = toy("gpt2")
    ours = load_vocabulary(metadata)
    phi = load_vocabulary(metadata | {"general.name": "Phi-3 mini"})
    marked = "<|eot_id|>\n a"
    assert phi.encode(marked, parse_special=True) == ours.encode("<|eot_id|>a", parse_special=True)
    assert len(ours.encode(marked, parse_special=True)) > 2


@pytest.mark.parametrize("pre", [None, "default"])
@pytest.mark.parametrize("name", ["llama-bpe", "deepseek-coder"])
def test_a_known_vocabulary_without_its_pre_tokenizer(name, pre, vocabularies):
    ours = load_vocabulary(vocabularies[name][0], pre=pre)
    assert ours.adds_bos == vocabularies[name][1].adds_bos
    assert all(ours.encode(text) == ids for text, ids in own_cases(name))
    assert len(ours.notices) == 1 and f"merges are those of {name}" in ours.notices[0]
    assert not vocabularies[name][1].notices


@pytest.mark.parametrize("pre", [None, "default"])
def test_an_unknown_vocabulary_without_its_pre_tokenizer(pre):
    ours = load_vocabulary(toy("gpt2")[0], pre=pre)
    assert "tokenizer.ggml.pre is " in ours.notices[0] and "convert" in ours.notices[0]


@pytest.mark.parametrize(
    ("pre", "fields", "adds"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("qwen2", {}, False),
        ("default", {}, False),
        (None, {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {"add_bos_token": True}, True),
        ("llama-bpe", {"bos_token_id": None}, False),
        ("llama-bpe", {"bos_token_id": 0xFFFFFFFF}, False),
    ],
)
def test_whether_texts_begin_with_bos(pre, fields, adds):
    assert load_vocabulary(toy("gpt2")[0], pre=pre, **fields).adds_bos is adds


def test_missing_fields_of_a_sentencepiece_file_have_llama_cpps_defaults():
    ours = load_vocabulary(
        toy("llama")[0], bos_token_id=None, eos_token_id=None, unknown_token_id=None
    )
    assert (ours.bos_id, ours.eos_ids, ours.adds_bos) == (1, (2,), True)
    assert ours.named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


SPARE = "unknown seperator padding cls mask fim_pre fim_suf fim_mid fim_pad fim_rep fim_sep"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [384, 32000, -1, 1 << 33])
@pytest.mark.parametrize("name", [*SPARE.split(), "prefix"])
def test_an_id_outside_the_vocabulary_that_no_text_needs_is_ignored(name, value, kind):
    """llama.cpp: "bad special token ..., using default id"."""
    key, metadata = f"{name}_token_id", toy(kind)[0]
    ours, without = (load_vocabulary(metadata, **{key: x}) for x in (value, None))
    notice = f"toy.gguf: tokenizer.ggml.{key} is {value}, ignored: the vocabulary ends at 383"
    assert {*ours.notices} == {notice, *without.notices}
    assert (ours.named, ours.fim_ids) == (without.named, without.fim_ids)
    assert ours.eos_ids == without.eos_ids
    assert ours.encode("<unk>Hello</s>") == without.encode("<unk>Hello</s>")


def test_unused_and_empty_tokens():
    metadata, sp = toy("llama")
    count = sp.get_piece_size()
    ours = load_more(metadata, ["", "", "[PAD]x", "<unk2>"], [UNUSED, NORMAL, UNUSED, UNKNOWN])
    assert ours.encode("Hello world") == sp.encode("Hello world")
    assert ours.decode([count, count + 2]) == ""
    assert ours.decode([count + 1]) == f"[EMPTY_{count + 1}]"
    assert ours.decode([count + 3]) == ""
    assert ours.decode([count + 3], skip_special=False) == "<unk2>"
    assert ours.encode("<unk2>", parse_special=True) == [count + 3]


@pytest.mark.parametrize("other", [NORMAL, CONTROL])
def test_a_file_without_an_unknown_token(other):
    """As Gemma's, whose <unk> is a control token. A folder's tokenizer.model has no room for one
    more.
    """
    metadata, sp = toy("llama")
    types = np.array(metadata["tokenizer.ggml.token_type"])
    ours = load_vocabulary(metadata, token_type=np.where(types == UNKNOWN, other, types))
    assert ours.encode("Hello world") == sp.encode("Hello world")
    assert ours.library.get_piece_size() == sp.get_piece_size()
    assert ours.library.is_unknown({NORMAL: 1, CONTROL: 0}[other])


def test_a_user_defined_token_with_a_visible_space_does_not_match_a_space():
    """llama.cpp looks for it in the text as it is; sentencepiece would, after spaces were made
    visible.
    """
    metadata, _ = toy("llama")
    ours = load_more(metadata, ["zq▁x"], [USER_DEFINED])
    added = len(metadata["tokenizer.ggml.tokens"])
    assert added in ours.encode("a zq▁x") and added not in ours.encode("a zq x")


def test_the_first_of_two_equal_merges_counts():
    metadata, _ = toy("gpt2")
    tokens = metadata["tokenizer.ggml.tokens"]
    ours = load_more(metadata, ["QX", "XZ"], [NORMAL] * 2, merges=["Q X", "X Z", "Q X"])
    assert ours.encode("QXZ") == [len(tokens), tokens.index("Z")]


def test_bytes_of_no_text_may_lack_a_token():
    metadata, library = toy("gpt2")
    at = metadata["tokenizer.ggml.tokens"].index("õ")  # 0xF5
    ours = load_vocabulary(metadata, tokens=changed("gpt2", "tokens", at, "QQQ"))
    assert ours.encode("Hello 🦙") == library.encode("Hello 🦙", add_special_tokens=False).ids


# Bad input


def changed(kind, name, at, value):
    """A field with one element replaced."""
    values = list(toy(kind)[0][f"tokenizer.ggml.{name}"])
    values[at] = value
    return values


def types(at, value):
    return {"token_type": changed("llama", "token_type", at, value)}


BAD_LLAMA = [
    ({"model": None}, "model is missing"),
    ({"model": "t5"}, "model is 't5'"),
    ({"model": 3}, "model is 3"),
    ({"tokens": None}, "tokens is missing"),
    ({"tokens": []}, "tokens is [], expected at least one"),
    ({"tokens": "abc"}, "tokens is 'abc'"),
    ({"tokens": np.arange(384)}, "tokens is array"),
    ({"tokens": list(range(384))}, "tokens[0] is 0"),
    ({"tokens": changed("llama", "tokens", 300, "<s>")}, "'<s>' twice, as 1 and as 300"),
    ({"tokens": changed("llama", "tokens", 68, "<0x1>")}, "'<0x1>' is not one of the 256"),
    (types(68, NORMAL), "'<0x41>' is missing among the 256"),
    ({"token_type": None}, "token_type is missing"),
    ({"token_type": ["a"] * 384}, "token_type is ['a'"),
    ({"token_type": [1.5] * 384}, "token_type is [1.5"),
    ({"token_type": [1] * 383}, "token_type holds 383 values, expected 384"),
    (types(9, 7), "token_type[9] is 7, expected 0 to 6"),
    (types(9, -1), "token_type[9] is -1"),
    ({"scores": None}, "scores is missing"),
    ({"scores": [0.0] * 385}, "scores holds 385 values"),
    ({"scores": ["0"] * 384}, "scores is ['0'"),
    ({"scores": "none"}, "scores is 'none'"),
    ({"scores": [[0.0], [0.0, 1.0]]}, "scores is [[0.0], "),
    ({"scores": np.full(384, 1e300)}, "scores[0] is inf"),
    ({"scores": changed("llama", "scores", 5, float("nan"))}, "scores[5] is nan"),
    ({"bos_token_id": 384}, "bos_token_id is 384, expected a token id from 0 to 383"),
    ({"eos_token_id": -1}, "eos_token_id is -1"),
    ({"eot_token_id": "2"}, "eot_token_id is '2'"),
    ({"padding_token_id": True}, "padding_token_id is True"),
    ({"fim_pad_token_id": "9"}, "fim_pad_token_id is '9'"),
    ({"add_bos_token": 1}, "add_bos_token is 1"),
    ({"add_eos_token": "no"}, "add_eos_token is 'no'"),
    ({"add_space_prefix": 0.0}, "add_space_prefix is 0.0"),
    ({"remove_extra_whitespaces": []}, "remove_extra_whitespaces is []"),
]
BAD_GPT2 = [
    ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id is missing"),
    ({"pre": "kimi-k2"}, "pre is 'kimi-k2', expected one of default"),
    ({"pre": 5}, "pre is 5"),
    ({"merges": None}, "merges is missing"),
    ({"merges": [1, 2]}, "merges[0] is 1"),
    ({"merges": ["a"]}, "merges holds 'a', expected two tokens"),
    ({"merges": ["a b c"]}, "merges holds 'a b c', expected two tokens"),
    ({"merges": ["a QQ"]}, "merges holds 'a QQ', but 'QQ' is no token"),
    ({"merges": ["Q Q"]}, "merges holds 'Q Q', but 'QQ' is no token"),
    ({"tokens": changed("gpt2", "tokens", 0, "QQ"), "merges": ["H e"]}, "no token for byte 0x21"),
    ({"token_type": changed("gpt2", "token_type", 70, BYTE)}, "tokens[70] is "),
    ({"model": "gemma4"}, "byte token '<0x00>' is missing among the 256"),
]
BAD = [("llama", *case) for case in BAD_LLAMA] + [("gpt2", *case) for case in BAD_GPT2]


@pytest.mark.parametrize(
    ("kind", "fields", "message"), BAD, ids=[f"{kind}-{text}" for kind, _, text in BAD]
)
def test_bad_vocabularies_are_told_in_one_line(kind, fields, message):
    text = refusal(lambda: load_vocabulary(toy(kind)[0], **fields), kind=TokenizerError)
    assert text.startswith("toy.gguf: tokenizer.ggml.") and message in text
    assert "; " in text  # the remedy


def test_more_tokens_than_embeddings():
    metadata, _ = toy("llama")
    with pytest.raises(TokenizerError, match="384 tokens, the model's embedding 383 rows"):
        load_vocabulary(metadata, rows=383)
    ours = load_vocabulary(metadata, rows=400)
    assert ours.decode([399]) == ""
    with pytest.raises(TokenizerError, match="outside the vocabulary"):
        ours.decode([400])


# Control tokens of few characters, long texts


@pytest.mark.parametrize("text", ["é", "\x80\x81", "éa", "aé", "éé"])
def test_a_control_token_of_few_characters_is_spelt_with_others(text):
    """Its merge exists, so that an ordinary text produces it; the text keeps its bytes."""
    metadata, _ = toy("gpt2")
    alphabet = {byte: char for char, byte in byte_alphabet().items()}
    whole = "".join(alphabet[byte] for byte in text.encode("utf-8"))
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = list(metadata["tokenizer.ggml.merges"])
    types = list(metadata["tokenizer.ggml.token_type"])
    for end in range(2, len(whole) + 1):
        if whole[:end] not in tokens:
            tokens.append(whole[:end])
            types.append(CONTROL)
        merges.insert(end - 2, f"{whole[: end - 1]} {whole[end - 1]}")
    ours = load_vocabulary(
        metadata, tokens=tokens, token_type=np.array(types, np.int32), merges=merges
    )
    for content in (text, f"x{text}y", text * 3):
        ids = ours.encode(content)
        assert not set(ids) & set(range(len(metadata["tokenizer.ggml.tokens"]), len(tokens)))
        assert ours.decode(ids) == content
    # its spelling in the file is not the text
    assert len(tokens) in ours.encode(text, parse_special=True) or whole != text


def test_a_text_that_the_library_panics_over(monkeypatch, vocabularies):
    ours = vocabularies["llama-bpe"][1]

    class PanicException(BaseException):
        pass

    panic = PanicException("called `Result::unwrap()`: BacktrackLimitExceeded\nmore")
    library = SimpleNamespace(encode=Mock(side_effect=panic))
    monkeypatch.setattr(ours, "library", library)
    assert "Result::unwrap" in refusal(ours.encode, "x", kind=TokenizerError)


@pytest.mark.parametrize(
    "text",
    [" " * 150_000, "\n" * 150_000, "a" * 150_000, "</s>" * 40_000, "é" * 110_000, "x \t" * 50_000],
    ids=lambda text: ascii(text[:4]),
)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_long_text_has_at_least_so_many_tokens(name, text, vocabularies):
    ours = vocabularies[name][1]
    assert 0 < ours.count_at_least(text) <= len(ours.encode(text))
    assert ours.count_at_least(text) >= len(text.encode()) // 256


def test_bytes_that_a_vocabulary_lacks_have_no_tokens():
    metadata, _ = toy("gpt2")
    tokens = [text if text != "Ā" else "ĀĀ" for text in metadata["tokenizer.ggml.tokens"]]
    ours = load_vocabulary(metadata, tokens=tokens)
    assert ours.count_at_least("\0" * 200_000) == 0 and ours.encode("\0" * 1000) == []
    for text in ("a" * 200_000, "a\0" * 100_000):
        assert 0 < ours.count_at_least(text) <= len(ours.encode(text))


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_long_text_has_the_ids_of_the_library(name, vocabularies):
    """Long texts are encoded in another way than short ones, without Python's lock."""
    ours = vocabularies[name][1]
    for text in TEXTS:
        if any(literal in text for literal in ours.added_ids):
            continue
        for length in (9_999, 10_000):
            long = (text * 10_000)[:length]
            spelled = " " * ours.space_prefix + long
            theirs = ours.library.encode(spelled)
            assert ours.encode(long) == getattr(theirs, "ids", theirs), text
