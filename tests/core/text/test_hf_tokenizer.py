"""Tokenizers of a Hugging Face folder against their libraries and transformers."""

import itertools
import json

import pytest
import sentencepiece
import tokenizers
from hypothesis import assume, given, settings
from making import LLAMA3_SPECIALS, byte_level_json, config_fields, make_tokenizer, sentencepiece_model
from transformers import AutoTokenizer

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.text.hf_tokenizer import has_tokenizer

from .cases import KINDS, TEXTS, any_text, load_folder

anything = any_text("▁", "▁▁")


def auto(folder, **fields):
    (folder / "config.json").write_text(json.dumps(config_fields(**fields)))
    return AutoTokenizer.from_pretrained(folder)


def library_ids(one, text):
    if one.kind == "sentencepiece":
        return one.library.encode(text)
    return one.library.encode(text, add_special_tokens=False).ids


# Encoding


def rebuilt(kind, text):
    """True if transformers' LlamaTokenizer, and so this package, encodes a text in another way than the file."""
    return kind == "llama2" and text.startswith((" ", "\u2581"))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_text_has_the_librarys_ids(kind, made):
    one = made[kind]
    for text in TEXTS:
        if not rebuilt(kind, text):
            assert one.ours.encode(text) == library_ids(one, text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=anything)
@settings(max_examples=80, deadline=None)
def test_any_text_has_the_librarys_ids(kind, text, made):
    one = made[kind]
    assume(not any(special in text for special in one.ours.added_ids) and not rebuilt(kind, text))
    assert one.ours.encode(text) == library_ids(one, text)


@pytest.mark.parametrize("kind", ["llama2", "bytelevel"])
def test_a_json_without_class_has_its_own_librarys_ids(kind, made, tmp_path):
    """Unless the settings name LlamaTokenizer, the file counts as it is: leading spaces and special tokens too."""
    folder = make_tokenizer(tmp_path, kind, tokenizer_class="PreTrainedTokenizerFast")
    ours, one = load_folder(folder), made[kind]
    for text in TEXTS:
        assert ours.encode(text) == library_ids(one, text)
        eos = list(ours.special_ids)[-1]
        marked = f"{eos}{text}{eos} {text}"
        assert ours.encode(marked, parse_special=True) == library_ids(one, marked)


SPACES = list(itertools.product(("sentencepiece", "llama2"), (None, True, False), (None, False, True)))


@pytest.mark.parametrize(("kind", "add_prefix_space", "legacy"), [*SPACES, ("bytelevel", None, None)])
def test_special_tokens_are_parsed_as_transformers_parses_them(kind, add_prefix_space, legacy, tmp_path):
    folder = make_tokenizer(tmp_path, kind, legacy=legacy, add_prefix_space=add_prefix_space)
    ours, theirs = load_folder(folder), auto(folder)
    bos, eos = theirs.bos_token, theirs.eos_token
    for text in TEXTS:
        for marked in (text, bos + text, f"{bos}{text}{eos}", f"{text}{eos} {text}{eos}\n{text}", f"{eos}{eos} {text}"):
            expected = theirs(marked, add_special_tokens=False)["input_ids"]
            assert ours.encode(marked, parse_special=True) == expected, marked
            assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
            assert ours.decode(expected, skip_special=False) == theirs.decode(expected, skip_special_tokens=False)


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
        raw = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(raw | {"post_processor": None}))
    ours, theirs = load_folder(folder), auto(folder)
    assert not ours.adds_bos and ours.bos_id is not None
    assert ours.encode("Hi", add_bos=True) == theirs("Hi")["input_ids"] == ours.encode("Hi")
    assert ours.encode("", add_bos=True) == [ours.bos_id]


def test_null_bos_is_none(tmp_path):
    folder = make_tokenizer(tmp_path, "bytelevel")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
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
    folder = make_tokenizer(tmp_path, "bytelevel", bos_token={"content": LLAMA3_SPECIALS[1], "lstrip": False})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": LLAMA3_SPECIALS[3]}}))
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
@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ud83e"])
def test_lone_surrogates_are_refused(kind, text, made):
    with pytest.raises(TokenizerError, match="surrogate"):
        made[kind].ours.encode(text)
    with pytest.raises(TokenizerError, match="surrogate"):
        made[kind].ours.encode(text, parse_special=True)


# Added tokens beside tokenizer.model

ADDED = {"<|im_start|>": 384, "<|im_end|>": 385, "<tool>": 386}


def add_tokens(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    decoder = {
        str(one): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                   "special": text != "<tool>"}
        for text, one in ADDED.items()
    }  # fmt: skip
    config |= {"added_tokens_decoder": decoder, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_added_tokens_above_the_vocabulary(kind, tmp_path):
    folder = make_tokenizer(tmp_path, kind)
    add_tokens(folder)
    ours, theirs = load_folder(folder, vocab_size=400), auto(folder, vocab_size=400)
    assert ours.vocab_size == 387 and ours.eos_ids == (385,)
    assert {text: ours.special_ids.get(text) for text in ADDED} == ADDED | {"<tool>": None}
    assert ours.added_ids["<tool>"] == 386
    for text in ("<|im_start|>user\nHello<|im_end|>\n", "a <tool> b<tool>c", "x<|im_end|> y"):
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == expected
        assert ours.decode(expected, skip_special=False) == theirs.decode(expected)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    plain = ours.encode("<|im_end|> <tool>")
    # a token that is added but not special counts in any text, as in the library
    assert 385 not in plain and 386 in plain


def test_control_symbols_of_sentencepiece(tmp_path):
    symbols = ("<|user|>", "<|end|>")
    folder = make_tokenizer(tmp_path, "sentencepiece")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(control=symbols))
    ours, theirs = load_folder(folder), auto(folder)
    assert all(ours.special_ids[text] == theirs.convert_tokens_to_ids(text) for text in symbols)
    for text in ("<s><|user|>Hello<|end|> x", "a <|user|> b", "<|user|>"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert not set(ours.encode(text)) & set(ours.special_ids.values())


@pytest.mark.parametrize("wings", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_added_tokens_that_swallow_spaces(kind, wings, tmp_path):
    token = {"content": "<|end|>", "lstrip": wings[0], "rstrip": wings[1], "normalized": False, "single_word": False,
             "special": True}  # fmt: skip
    folder = make_tokenizer(tmp_path, kind, added_tokens_decoder={"384": token})
    ours, theirs = load_folder(folder, vocab_size=400), auto(folder, vocab_size=400)
    for text in ("a <|end|> b", "a  <|end|>\n\tb <|end|>", "<|end|>  <|end|> ", " <|end|>"):
        assert ours.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"]


def test_single_word_is_refused_beside_sentencepiece(tmp_path):
    token = {"content": "<x>", "single_word": True}
    folder = make_tokenizer(tmp_path, "sentencepiece", added_tokens_decoder={"384": token})
    assert "single_word" in refusal(folder, vocab_size=400)


def test_a_byte_level_json_ignores_the_class_llama(tmp_path):
    """As DeepSeek's distilled Llamas declare LlamaTokenizerFast."""
    folder = make_tokenizer(tmp_path, "bytelevel", tokenizer_class="LlamaTokenizerFast")
    ours, theirs = load_folder(folder), auto(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("kind", ["llama2", "bytelevel"])
def test_mistral_takes_the_json_as_it_is(kind, tmp_path):
    fields = {"architectures": ["MistralForCausalLM"]}
    folder = make_tokenizer(tmp_path, kind)
    ours, theirs = load_folder(folder, **fields), auto(folder, **fields)
    eos = theirs.eos_token
    for text in TEXTS:
        marked = f"{eos}{text}{eos} {text}"
        assert ours.encode(marked, parse_special=True) == theirs(marked, add_special_tokens=False)["input_ids"]


def test_added_tokens_json(tmp_path):
    folder = make_tokenizer(tmp_path, "sentencepiece", additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    (folder / "added_tokens.json").write_text(json.dumps(ADDED))
    ours = load_folder(folder, vocab_size=387)
    assert ours.encode("<|im_start|>a<tool>", parse_special=True)[0] == 384
    assert "<|im_end|>" in ours.special_ids and "<tool>" not in ours.special_ids and "<tool>" in ours.added_ids


def test_user_defined_symbols_of_sentencepiece(tmp_path):
    symbols = ("<|user|>", "<|end|>")
    folder = make_tokenizer(tmp_path, "sentencepiece")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(user_defined=symbols))
    ours, theirs = load_folder(folder), auto(folder)
    library = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(user_defined=symbols))
    assert {text: ours.added_ids.get(text) for text in symbols} == {text: library.piece_to_id(text) for text in symbols}
    for text in ("<s><|user|>Hello<|end|> x", "a <|user|> b", "<|user|>"):
        assert ours.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == library.encode(text)


# Bad files


def refusal(folder, **fields) -> str:
    with pytest.raises(TokenizerError) as caught:
        load_folder(folder, **fields)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_no_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    message = refusal(tmp_path)
    assert "tokenizer.json" in message and "tokenizer.model" in message


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]", b"\xff\xff", b'{"model": {"type": "Magic"}}', b"\x0a\xff\xff\xff"]
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_broken_file(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    assert name in refusal(tmp_path)


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_truncated_sentencepiece_model(cut, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model()[:-cut])
    assert "tokenizer.model" in refusal(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_larger_than_the_model(kind, made):
    message = refusal(made[kind].folder, vocab_size=383, bos_token_id=1)
    assert "383" in message and "vocab_size" in message
    assert load_folder(made[kind].folder, vocab_size=384).vocab_size == 384


def test_an_added_token_beyond_the_model(tmp_path):
    folder = make_tokenizer(tmp_path, "sentencepiece")
    (folder / "added_tokens.json").write_text('{"[PAD]": 384}')
    message = refusal(folder)
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
    ],
    ids=str,
)
def test_broken_settings(kind, settings_, word, tmp_path):
    folder = make_tokenizer(tmp_path, kind, **settings_)
    if word is None:
        load_folder(folder)
        return
    message = refusal(folder)
    assert word in message and "tokenizer_config.json" in message


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_settings_that_are_not_json(name, text, tmp_path):
    folder = make_tokenizer(tmp_path, "sentencepiece")
    (folder / name).write_text(text, encoding="latin-1")
    assert name in refusal(folder)


@pytest.mark.parametrize("value", [-1, "5", True, 1.5, None, 2**40])
def test_added_tokens_json_with_bad_ids(value, tmp_path):
    folder = make_tokenizer(tmp_path, "sentencepiece")
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": value}))
    assert "added_tokens.json" in refusal(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
        {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "_"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    ],
    ids=str,
)  # fmt: skip
def test_a_decoder_of_another_family_is_refused(decoder, tmp_path):
    raw = json.loads(byte_level_json())
    folder = make_tokenizer(tmp_path, "bytelevel")
    (folder / "tokenizer.json").write_text(json.dumps(raw | {"decoder": decoder}))
    message = refusal(folder)
    assert "decoder" in message and "tokenizer.json" in message


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    library = tokenizers.Tokenizer.from_str(byte_level_json())
    library.enable_truncation(3)
    library.enable_padding(length=8)
    folder = make_tokenizer(tmp_path, "bytelevel")
    library.save(str(folder / "tokenizer.json"))
    text = "a much longer text than three tokens"
    assert load_folder(folder).decode(load_folder(folder).encode(text)) == text
