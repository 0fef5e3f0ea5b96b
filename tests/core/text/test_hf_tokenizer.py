"""Tokenizers of a Hugging Face folder against their libraries and transformers."""

import base64
import io
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import sentencepiece
from cases.texts import KINDS, TEXTS, any_text, load_folder
from hypothesis import assume, given
from making import (
    LLAMA3_SPECIALS,
    config_fields,
    edit_json,
    make_tokenizer,
    refusal,
    sentencepiece_model,
)
from transformers import AutoTokenizer

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.text import hf_tokenizer
from mlx_llama.core.text.hf_tokenizer import has_tokenizer
from mlx_llama.core.text.tokenizer import encode_by_library

anything = any_text("▁", "▁▁")


def auto(folder, **fields):
    (folder / "config.json").write_text(json.dumps(config_fields(**fields)))
    return AutoTokenizer.from_pretrained(folder)


def library_ids(case, text):
    if case.kind == "sentencepiece":
        return case.library.encode(text)
    return case.library.encode(text, add_special_tokens=False).ids


# Encoding


def rebuilt(kind, text):
    """True if transformers' LlamaTokenizer, and so this package, encodes a text in another way than
    the file.
    """
    return kind == "llama2" and text.startswith((" ", "\u2581"))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_has_the_librarys_ids(kind, made):
    case = made[kind]
    for text in TEXTS:
        if not rebuilt(kind, text):
            assert case.ours.encode(text) == library_ids(case, text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=anything)
def test_any_text_has_the_librarys_ids(kind, text, made):
    case = made[kind]
    assume(not any(special in text for special in case.ours.added_ids) and not rebuilt(kind, text))
    assert case.ours.encode(text) == library_ids(case, text)


def check_special(ours, theirs, *texts):
    """Check the ids of texts with special tokens, and their texts with and without those."""
    for text in texts:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids), text


FLAG = (None, True, False)
SETTINGS = [
    (kind, {"add_prefix_space": space, "legacy": legacy}, {})
    for kind, space, legacy in itertools.product(("sentencepiece", "llama2"), FLAG, FLAG)
]
SETTINGS += [("bytelevel", {}, {})]
# as DeepSeek's distilled Llamas declare it
SETTINGS += [("bytelevel", {"tokenizer_class": "LlamaTokenizerFast"}, {})]
for kind in (
    "llama2",
    "bytelevel",
):  # without LlamaTokenizer, and in Mistral, the file counts as it is
    SETTINGS += [(kind, {"tokenizer_class": "PreTrainedTokenizerFast"}, {})]
    SETTINGS += [(kind, {}, {"architectures": ["MistralForCausalLM"]})]


@pytest.mark.parametrize(("kind", "settings", "fields"), SETTINGS)
def test_special_tokens_are_parsed_as_transformers_parses_them(kind, settings, fields, tmp_path):
    folder = make_tokenizer(tmp_path, kind, **settings)
    ours, theirs = load_folder(folder, **fields), auto(folder, **fields)
    bos, eos = theirs.bos_token, theirs.eos_token
    for text in TEXTS:
        middle = f"{text}{eos} {text}{eos}\n{text}"
        marked = (text, bos + text, f"{bos}{text}{eos}", middle, f"{eos}{eos} {text}")
        check_special(ours, theirs, *marked)


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_plain_text_are_text(kind, made):
    ours = made[kind].ours
    for special, control in ours.special_ids.items():
        for text in (special, f"a{special}b", f"x {special} ", special * 3):
            if special == "<unk>":
                continue
            ids = ours.encode(text)
            assert control not in ids
            assert ours.decode(ids) == ours.decode(ids, skip_special=False) == text
            assert control in ours.encode(text, parse_special=True)


@pytest.mark.parametrize("kind", KINDS)
def test_bos(kind, made):
    ours = made[kind].ours
    expected = {"sentencepiece": 1, "llama2": 1, "bytelevel": 379}[kind]
    assert ours.bos_id == expected and ours.adds_bos
    assert ours.encode("Hi", add_bos=True) == [expected, *ours.encode("Hi")]
    assert ours.encode("", add_bos=True) == [expected] and ours.encode("") == []
    theirs = auto(made[kind].folder)
    assert ours.encode("Hi there", add_bos=True) == theirs("Hi there")["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_that_adds_no_bos(kind, tmp_path):
    folder = make_tokenizer(tmp_path, kind, add_bos_token=False)
    if kind != "sentencepiece":  # the file's own post-processor decides, not the settings beside it
        edit_json(folder / "tokenizer.json", post_processor=None)
    ours, theirs = load_folder(folder), auto(folder)
    assert not ours.adds_bos and ours.bos_id is not None
    assert ours.encode("Hi", add_bos=True) == theirs("Hi")["input_ids"] == ours.encode("Hi")
    assert ours.encode("", add_bos=True) == [ours.bos_id]


def test_null_bos_is_none(tmp_path):
    folder = make_tokenizer(tmp_path, "bytelevel")
    edit_json(folder / "tokenizer_config.json", bos_token=None)
    ours = load_folder(folder)
    assert ours.bos_id is None and not ours.adds_bos and ours.encode("", add_bos=True) == []


@pytest.mark.parametrize("kind", KINDS)
def test_settings_may_be_missing_altogether(kind, tmp_path):
    folder = make_tokenizer(tmp_path, kind)
    (folder / "tokenizer_config.json").unlink()
    fields = {"bos_token_id": 379, "eos_token_id": [380, 383]} if kind == "bytelevel" else {}
    ours = load_folder(folder, **fields)
    assert (ours.bos_id, ours.eos_ids) == ((379, (380, 383)) if kind == "bytelevel" else (1, (2,)))
    assert ours.named["bos_token"] == (LLAMA3_SPECIALS[0] if kind == "bytelevel" else "<s>")


def test_tokens_may_be_objects_and_stand_in_the_map(tmp_path):
    folder = make_tokenizer(tmp_path, "bytelevel")
    bos, eos = ({"content": LLAMA3_SPECIALS[i], "lstrip": False} for i in (1, 3))
    edit_json(folder / "tokenizer_config.json", bos_token=bos, eos_token=...)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    ours = load_folder(folder)
    assert ours.bos_id == 380 and ours.eos_ids == (382,)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers(kind, made):
    ours, library = made[kind].ours, made[kind].library
    size = library.get_piece_size() if kind == "sentencepiece" else library.get_vocab_size()
    assert ours.vocab_size == size == 384
    specials = LLAMA3_SPECIALS if kind == "bytelevel" else ("<unk>", "<s>", "</s>")
    assert set(ours.special_ids) == set(specials)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text, shown", [("\ud800", "\ufffd"), ("ok \udfff", "ok \ufffd"), ("\ud83e\udd99", "🦙")]
)
def test_lone_surrogates_are_replaced(kind, text, shown, made):
    case = made[kind]
    ids = library_ids(case, shown)
    assert case.ours.encode(text) == case.ours.encode(text, parse_special=True) == ids
    assert case.ours.encode_parts([text]) == ids


# Added tokens beside tokenizer.model

ADDED = {"<|im_start|>": 384, "<|im_end|>": 385, "<tool>": 386}


FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_added_tokens_above_the_vocabulary(kind, tmp_path):
    tokens = {
        str(token): FLAGS | {"content": text, "special": text != "<tool>"}
        for text, token in ADDED.items()
    }
    folder = make_tokenizer(tmp_path, kind, added_tokens_decoder=tokens, eos_token="<|im_end|>")
    ours, theirs = load_folder(folder, vocab_size=400), auto(folder, vocab_size=400)
    assert ours.vocab_size == 387 and ours.eos_ids == (385,)
    assert {text: ours.special_ids.get(text) for text in ADDED} == ADDED | {"<tool>": None}
    assert ours.added_ids["<tool>"] == 386
    texts = "<|im_start|>user\nHello<|im_end|>\n", "a <tool> b<tool>c", "x<|im_end|> y"
    check_special(ours, theirs, *texts)
    plain = ours.encode("<|im_end|> <tool>")
    # a token that is added but not special counts in any text, as in the library
    assert 385 not in plain and 386 in plain


@pytest.mark.parametrize("kind", ["control", "user_defined"])
def test_symbols_of_sentencepiece(kind, tmp_path):
    symbols = ("<|user|>", "<|end|>")
    folder = make_tokenizer(tmp_path, "sentencepiece")
    proto = sentencepiece_model(**{kind: symbols})
    (folder / "tokenizer.model").write_bytes(proto)
    ours, theirs = load_folder(folder), auto(folder)
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    known = ours.special_ids if kind == "control" else ours.added_ids
    assert {text: known.get(text) for text in symbols} == {
        text: library.piece_to_id(text) for text in symbols
    }
    for text in ("<s><|user|>Hello<|end|> x", "a <|user|> b", "<|user|>"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids
        if kind == "user_defined":
            assert ours.encode(text) == library.encode(text)
            continue
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert not set(ours.encode(text)) & set(ours.special_ids.values())


@pytest.mark.parametrize("wings", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_added_tokens_that_swallow_spaces(kind, wings, tmp_path):
    token = FLAGS | {"content": "<|end|>", "special": True, "lstrip": wings[0], "rstrip": wings[1]}
    folder = make_tokenizer(tmp_path, kind, added_tokens_decoder={"384": token})
    ours, theirs = load_folder(folder, vocab_size=400), auto(folder, vocab_size=400)
    texts = "a <|end|> b", "a  <|end|>\n\tb <|end|>", "<|end|>  <|end|> ", " <|end|>"
    check_special(ours, theirs, *texts)


def test_single_word_is_refused_beside_sentencepiece(tmp_path):
    token = {"content": "<x>", "single_word": True}
    folder = make_tokenizer(tmp_path, "sentencepiece", added_tokens_decoder={"384": token})
    assert "single_word" in refused(folder, vocab_size=400)


def test_added_tokens_json(tmp_path):
    folder = make_tokenizer(
        tmp_path, "sentencepiece", additional_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    (folder / "added_tokens.json").write_text(json.dumps(ADDED))
    ours = load_folder(folder, vocab_size=387)
    assert ours.encode("<|im_start|>a<tool>", parse_special=True)[0] == 384
    assert "<|im_end|>" in ours.special_ids and "<tool>" not in ours.special_ids
    assert "<tool>" in ours.added_ids


def add_to_json(folder, *tokens):
    """Add tokens to tokenizer.json."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["added_tokens"] += tokens
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("kind", ["llama2", "bytelevel"])
def test_an_added_token_just_above_the_model_is_spelled(kind, tmp_path):
    """Gemma 3 1B's <image_soft_token> has the id 262144, and the model 262144 rows."""
    token = FLAGS | {"content": "<image>", "special": True}
    plain = load_folder(make_tokenizer(tmp_path / "plain", kind))
    folder = make_tokenizer(tmp_path / "m", kind, added_tokens_decoder={"384": token})
    add_to_json(folder, token | {"id": 384})
    ours, theirs = load_folder(folder), auto(folder)
    assert theirs.convert_tokens_to_ids("<image>") == 384 and ours.vocab_size == 384
    for text in ("Hello world", "a <image> b<image>"):
        ids = ours.encode(text, parse_special=True)
        assert ids == plain.encode(text, parse_special=True) and max(ids) < 384
        assert ours.decode(ids) == text
        if "<" not in text:
            assert ids == theirs(text, add_special_tokens=False)["input_ids"]
    add_to_json(folder, token | {"id": 385, "content": "<more>"})
    assert "up to 385" in refused(folder)


@pytest.mark.parametrize(
    "listed",
    [
        {"384": {"content": "<x>", "special": True, "lstrip": True}},
        {"384": {"content": "<y>"}, "385": {"content": "<x>", "special": True}},
        {"399": {"content": "<x>", "rstrip": True}},
        {"385": {"content": "<y>", "special": False}},
        {"384": {"content": "<x>"}},
    ],
)
def test_added_tokens_of_both_files_that_differ(listed, tmp_path):
    listed = {token: FLAGS | fields for token, fields in listed.items()}
    folder = make_tokenizer(tmp_path, "bytelevel", added_tokens_decoder=listed)
    add_to_json(folder, FLAGS | {"id": 384, "content": "<x>"})
    add_to_json(folder, FLAGS | {"id": 385, "content": "<y>", "special": True})
    ours, theirs = load_folder(folder, vocab_size=400), auto(folder, vocab_size=400)
    check_special(ours, theirs, "a <x> b", "a <y> b", "<x><y>")
    differs = listed != {"384": FLAGS | {"content": "<x>"}}
    assert len(ours.notices) == differs and all("<" in notice for notice in ours.notices)


# Bad files


def refused(folder, **fields) -> str:
    message = refusal(lambda: load_folder(folder, **fields), kind=TokenizerError)
    assert str(folder) in message
    return message


def test_no_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    message = refused(tmp_path)
    assert "tokenizer.json" in message and "tokenizer.model" in message


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff\xff", b'{"model": {"type": "Magic"}}', b"\x0a\xff\xff\xff"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_broken_file(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert name in refused(tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_truncated_sentencepiece_model(cut, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model()[:-cut])
    assert "tokenizer.model" in refused(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_larger_than_the_model(kind, made):
    message = refused(made[kind].folder, vocab_size=383, bos_token_id=1)
    assert "383" in message and "vocab_size" in message
    assert load_folder(made[kind].folder, vocab_size=384).vocab_size == 384


def add_tokens(folder, tokens):
    make_tokenizer(folder, "sentencepiece")
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    return folder


def test_an_added_token_beyond_the_model(tmp_path):
    message = refused(add_tokens(tmp_path, {"[PAD]": 384}))
    assert "384" in message and "vocab_size" in message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings_", "word"),
    [
        ({"bos_token": "<nowhere>"}, "<nowhere>"),
        ({"eos_token": 7}, "eos_token"),
        ({"bos_token": ["<s>"]}, "bos_token"),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"5": {"text": "a"}}}, "added_tokens_decoder"),
        ({"added_tokens_decoder": {"5": {"content": "<other>"}}}, "<other>"),
        ({"additional_special_tokens": [3]}, "additional_special_tokens"),
        ({"additional_special_tokens": 5}, "additional_special_tokens"),
        ({"additional_special_tokens": "<s>"}, "additional_special_tokens"),
        ({"additional_special_tokens": ["\ud800"]}, "additional_special_tokens"),
        ({"bos_token": "\ud800"}, "bos_token"),
        ({"eos_token": {"content": "a\udfff"}}, "eos_token"),
        ({"added_tokens_decoder": {"500": {"content": "\udc00"}}}, "added_tokens_decoder"),
    ],
    ids=str,
)
def test_broken_settings(kind, settings_, word, tmp_path):
    folder = make_tokenizer(tmp_path, kind, **settings_)
    if word is None:
        load_folder(folder)
        return
    message = refused(folder)
    assert word in message and "tokenizer_config.json" in message


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
)
def test_settings_that_are_not_json(name, text, tmp_path):
    folder = make_tokenizer(tmp_path, "sentencepiece")
    (folder / name).write_text(text, encoding="latin-1")
    assert name in refused(folder)


def test_added_tokens_json_with_a_lone_surrogate(tmp_path):
    assert "ud800" in refused(add_tokens(tmp_path, {"\ud800": 384}), vocab_size=400)


@pytest.mark.parametrize("value", [-1, "5", True, 1.5, None, 2**40])
def test_added_tokens_json_with_bad_ids(value, tmp_path):
    assert "added_tokens.json" in refused(add_tokens(tmp_path, {"<x>": value}))


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


FUSE, BYTES = {"type": "Fuse"}, {"type": "ByteFallback"}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [FUSE, BYTES]},
        {"type": "Sequence", "decoders": [replace({"String": "_"}, " "), BYTES, FUSE]},
    ],
    ids=str,
)
def test_a_decoder_of_another_family_is_refused(decoder, tmp_path):
    message = refused(write_json(tmp_path, "bytelevel", decoder=decoder))
    assert "decoder" in message and "tokenizer.json" in message


# tokenizer.json that its library accepts, and panics or aborts over


def write_json(folder, kind, escape=False, **changes):
    """A folder with a tokenizer.json whose parts are replaced; of `model` only the fields given.
    escape: in its keys.
    """
    folder = make_tokenizer(folder, kind)
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text(encoding="utf-8"))
    for name, value in changes.items():
        parts[name] = {**parts[name], **value} if name == "model" and "type" not in value else value
    text = json.dumps(parts)
    path.write_text(
        text.replace("precompiled", "\\u0070recompiled") if escape else text, encoding="utf-8"
    )
    return folder


def charsmap(data):
    encoded = base64.b64encode(data).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded}}


def in_sequence(*steps):
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


HUGE = b"\xfc\xff\xff\xff" + bytes(64)  # a trie of four gigabytes
WORDS = {"type": "WordPiece", "unk_token": "u", "vocab": {"a": 0}}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}
BROKEN = {
    "charsmap empty": charsmap(b""),
    "charsmap short": charsmap(b"abc"),
    "charsmap huge": charsmap(HUGE),
    "charsmap of a broken trie": charsmap(b"\x04\0\0\0" + b"\xff" * 8),
    "charsmap no base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!" * 12}},
    "charsmap without a trie": charsmap(b"\x03\0\0\0" + b"abcdefgh"),
    "growing": in_sequence(*[replace({"String": "a"}, "aaaaaaaaaa")] * 30),
    "growing at once": in_sequence(*[replace({"String": "a"}, "a" * 100_000)] * 3),
    "growing by a pattern": in_sequence(*[replace({"Regex": "x*"}, "a")] * 60),
    "growing by prefixes": in_sequence(*[{"type": "Prepend", "prepend": "a" * 100_000}] * 3),
    "matches nothing": {"normalizer": replace({"Regex": ""}, "b")},
    "replaces nothing": {"normalizer": replace({"String": ""}, "b")},
    "words without unknown": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "u"}},
    "pieces without unknown": {
        "model": WORDS | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    },
    "unigram without unknown": {
        "model": UNIGRAM | {"unk_id": None, "vocab": [["a", 0.0], ["b", -1.0]]}
    },
    "prefix longer than tokens": {"model": {"continuing_subword_prefix": "zzzzzzzzzz"}},
    "parts of no length": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "unknown special token": {
        "post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
        | {"single": [{"SpecialToken": {"id": "nope", "type_id": 0}}]}
    },
}


# Without byte level, patterns without text are harmless.
HARMLESS = [("llama2", "matches nothing"), ("llama2", "replaces nothing")]
CASES = set(itertools.product(("llama2", "bytelevel"), BROKEN)) - set(HARMLESS)


@pytest.mark.parametrize(("kind", "name"), sorted(CASES))
def test_a_json_that_its_library_panics_over(kind, name, tmp_path):
    """Bare exceptions, panics and aborts of the library are TokenizerError, at loading or at the
    first text.
    """
    # Other classes: LlamaTokenizer would replace the normalizer.
    folder = write_json(tmp_path, kind, **BROKEN[name])
    (folder / "tokenizer_config.json").write_text("{}")

    def use():
        ours = load_folder(folder, vocab_size=100_000)
        for text in ("Hello", "a", "é🦙", "xyz" * 100):
            ours.encode(text)

    assert str(folder) in refusal(use, kind=TokenizerError)


def test_a_huge_charsmap_is_refused_however_its_key_is_spelled(tmp_path):
    for escape in (False, True):
        folder = write_json(tmp_path / str(escape), "bytelevel", escape, **charsmap(HUGE))
        assert "a trie of 4294967292 bytes in" in refused(folder)


def test_a_whole_charsmap_is_taken(tmp_path):
    """sentencepiece's own, which normalises full-width letters."""
    model, words = io.BytesIO(), iter(["a b c d e f g h"] * 10)
    how = dict(vocab_size=14, model_type="unigram", hard_vocab_limit=False, minloglevel=2)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=words, model_writer=model, normalization_rule_name="nmt_nfkc", **how
    )
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf().ModelProto.FromString(model.getvalue())
    changes = charsmap(proto.normalizer_spec.precompiled_charsmap)
    ours = load_folder(write_json(tmp_path, "bytelevel", **changes))
    plain = load_folder(make_tokenizer(tmp_path / "plain", "bytelevel"))
    assert ours.encode("Ｈello") == plain.encode("Hello")


@pytest.mark.parametrize("size", [3, 1 << 62])
def test_sizes_in_the_file_are_not_applied(size, tmp_path):
    right = {"direction": "Right"}
    truncation = right | {"max_length": size, "strategy": "LongestFirst", "stride": size - 1}
    padding = right | {"strategy": {"Fixed": size}, "pad_to_multiple_of": size}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    folder = write_json(tmp_path, "bytelevel", truncation=truncation, padding=padding)
    plain = load_folder(make_tokenizer(tmp_path / "plain", "bytelevel"))
    for text in ("a", "a much longer text than three tokens"):
        assert load_folder(folder).encode(text) == plain.encode(text)


def test_many_tokens_of_the_settings(tmp_path):
    folder = make_tokenizer(tmp_path, "bytelevel")
    known = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    first = max(token["id"] for token in known) + 1
    extra = {first + i: FLAGS | {"content": f"<extra_{i}>", "special": True} for i in range(500)}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=extra)
    refused = refusal(load_folder, folder, kind=TokenizerError)
    assert f"token ids up to {first + 499}, config.json's vocab_size is 384" in refused
    ours, theirs = load_folder(folder, vocab_size=1000), auto(folder, vocab_size=1000)
    check_special(ours, theirs, "a<extra_7>b<extra_499>", "<extra_0> c")


def with_added_tokens(tmp_path, count) -> tuple[Path, int]:
    """(a folder whose tokenizer.json has so many more, the first one's id)"""
    folder = make_tokenizer(tmp_path, "bytelevel")
    raw = json.loads((folder / "tokenizer.json").read_text())
    first = max(token["id"] for token in raw["added_tokens"]) + 1
    raw["added_tokens"] += [
        FLAGS | {"id": first + i, "content": f"<extra_{i}>", "special": True} for i in range(count)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder, first


@pytest.mark.parametrize("count", [500, 10_000])
def test_added_tokens_outside_the_vocabulary(count, tmp_path, monkeypatch):
    """Many are refused before the library reads them, which takes seconds for 200,000."""
    folder, first = with_added_tokens(tmp_path, count)
    if count == 10_000:
        monkeypatch.setattr("tokenizers.Tokenizer", None)
    refused = refusal(load_folder, folder, kind=TokenizerError)
    assert f"token ids up to {first + count - 1}, config.json's vocab_size is 384" in refused


def test_added_tokens_are_listed_once(tmp_path):
    """Each list of 200,000 takes the library a second."""
    folder, first = with_added_tokens(tmp_path, 12_000)
    calls = []
    sys.setprofile(lambda frame, event, function: calls.append((event, function)))
    try:
        ours = load_folder(folder, vocab_size=first + 12_000)
    finally:
        sys.setprofile(None)
    names = [function.__name__ for event, function in calls if event == "c_call"]
    assert names.count("get_added_tokens_decoder") == 1 and names.count("from_str") == 1
    assert ours.encode("a<extra_11999>", parse_special=True)[-1] == first + 11_999


# The bound of tokens


LONG = [" " * 150_000, "\n" * 150_000, "a" * 150_000, "llama " * 30_000, "</s>" * 30_000]
LONG += [
    "▁" * 120_000,
    "0123456789" * 12_000,
    "é" * 120_000,
    "e\u0301" * 60_000,
    "\x00" * 120_000,
    "<|eot_id|>" * 12_000,
    "🦙" * 110_000,
]


@pytest.mark.parametrize("text", LONG, ids=lambda text: ascii(text[:6]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_at_least_so_many_tokens(kind, text, made):
    ours = made[kind].ours
    for parse_special in (False, True):
        assert ours.count_at_least(text) <= len(ours.encode(text, parse_special=parse_special))
    # most tokens are short, and a visible space of three bytes counts as a space
    assert ours.count_at_least(text) >= len(text.replace("▁", " ").encode()) // 50


def test_a_short_text_is_not_counted(made):
    assert made["bytelevel"].ours.count_at_least("a" * 99_999) == 0


REMOVED, BOTH_SIDES = {"behavior": "Removed", "invert": False}, {"lstrip": True, "rstrip": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, **REMOVED}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": replace({"Regex": " +"}, " ")},
        {"normalizer": replace({"String": "  "}, " ")},
        {"model": UNIGRAM},
        {"added_tokens": [FLAGS | {"id": 378, "content": "<z>", "special": True} | BOTH_SIDES]},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_tokenizers_that_drop_text_have_no_bound(changes, tmp_path):
    folder = write_json(tmp_path, "bytelevel", **changes)
    (folder / "tokenizer_config.json").write_text("{}")
    assert load_folder(folder, vocab_size=1000).count_at_least(" " * 200_000) == 0


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_the_longest_token_with_a_character_bounds_texts_of_it(kind, made):
    """Digits are tokens of their own, whatever the length of other tokens."""
    assert made[kind].ours.count_at_least("0123456789" * 12_000) == 120_000


@given(text=anything)
@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_text_has_at_least_so_many_tokens(kind, text, made):
    ours, long = made[kind].ours, (text or "a") * (100_000 // max(1, len(text)) + 1)
    assert ours.count_at_least(long) <= len(ours.encode(long, parse_special=True))


@pytest.mark.parametrize("length", [9_999, 10_000])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_librarys_ids(kind, length, made):
    """A long one is encoded in another way."""
    for text in TEXTS:
        if not rebuilt(kind, text):
            long = (text * 10_000)[:length]
            assert made[kind].ours.encode(long) == library_ids(made[kind], long)


def test_a_long_text_is_encoded_without_pythons_lock(made, monkeypatch):
    """The library's `encode` holds it, so that all other threads stop; a batch does not."""
    library = Mock(spec=["encode_batch_fast"])
    library.encode_batch_fast.return_value = [SimpleNamespace(ids=[1, 2])]
    assert encode_by_library(library, "1234567890" * 1_000) == [1, 2]
    library.encode_batch_fast.assert_called_once()
    monkeypatch.setattr(hf_tokenizer, "encode_by_library", lambda *_: [7])
    for kind in ("llama2", "bytelevel"):
        assert made[kind].ours.encode("a") == [7]


def test_nfc_may_compose(tmp_path):
    ours = load_folder(write_json(tmp_path, "bytelevel", normalizer={"type": "NFC"}))
    digits, no_nfc = "0123456789" * 12_000, load_folder(write_json(tmp_path, "bytelevel"))
    assert ours.count_at_least("é" + digits) >= no_nfc.count_at_least(digits) > 0
    for letter in ("e\u0301", "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345"):
        text = letter * 60_000
        assert 0 < ours.count_at_least(text) <= len(ours.encode(text))
