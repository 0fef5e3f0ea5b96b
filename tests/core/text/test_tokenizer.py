"""Decoding against the libraries, at once and streamed."""

import itertools
import json

import pytest
import tokenizers
from cases.texts import KINDS, any_text, load_folder
from hypothesis import assume, given, strategies as st
from making import llama2_json, make_tokenizer
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.text.tokenizer import Piece, byte_alphabet, decode_byte_level

anything = any_text("▁", "▁▁")


def ids_for(draw_special=True):
    """Ids with many byte tokens among them (3 to 258 are bytes in the toy sentencepiece
    vocabulary).
    """
    return st.lists(
        st.one_of(st.integers(0, 383), st.integers(3, 258), st.sampled_from([0, 1, 2, 379, 383])),
        max_size=30,
    )


def stream(ours, ids, **how):
    decoder = ours.stream(**how)
    return [*[decoder.push(token) for token in ids], decoder.finish()]


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(ids=ids_for())
def test_streamed_pieces_are_the_decoded_text(kind, skip_special, ids, made):
    ours = made[kind].ours
    how = {"skip_special": skip_special}
    assert "".join(stream(ours, ids, **how)) == ours.decode(ids, **how)


@given(ids=ids_for())
def test_sentencepiece_decodes_any_ids_alike(ids, made):
    """Invalid UTF-8 included: one U+FFFD per byte, as the library."""
    case = made["sentencepiece"]
    assert case.ours.decode(ids) == case.library.decode(ids)


@given(ids=ids_for())
def test_byte_level_decodes_any_ids_alike(ids, made):
    case = made["bytelevel"]
    for skip in (True, False):
        assert case.ours.decode(ids, skip) == case.library.decode(ids, skip_special_tokens=skip)


@given(ids=ids_for())
def test_byte_fallback_json_decodes_valid_ids_alike(ids, made):
    """In a run of bytes that is not UTF-8, only the bad bytes become U+FFFD.

    The library replaces the whole run, with the good characters in it. A stream cannot take back a
    shown character.
    """
    case = made["llama2"]
    for skip in (True, False):
        expected = case.library.decode(ids, skip_special_tokens=skip)
        if "\ufffd" not in expected:
            assert case.ours.decode(ids, skip_special=skip) == expected
        else:
            assert "\ufffd" in case.ours.decode(ids, skip_special=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=anything)
def test_text_comes_back(kind, text, made):
    ours = made[kind].ours
    # sentencepiece's visible space is a space to all tokenizers that use it, and the first one may
    # be the prefix
    assume(kind == "bytelevel" or not ("\u2581" in text or text.startswith(" ") or "<0x" in text))
    assert ours.decode(ours.encode(text)) == text
    pieces = stream(ours, ours.encode(text))
    assert "".join(pieces) == text


@pytest.mark.parametrize("kind", KINDS)
@given(text=anything)
def test_no_half_characters(kind, text, made):
    """A character appears whole, with its last token: no U+FFFD that is not in the text, nothing
    held back at the end.
    """
    ours = made[kind].ours
    pieces = stream(ours, ours.encode(text))
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert pieces[-1] == ""


def test_a_character_of_four_tokens(made):
    for kind in KINDS:
        ours = made[kind].ours
        pieces = stream(ours, ours.encode("🦙!"))
        assert pieces[-3:] == ["🦙", "!", ""] and set(pieces[:-3]) == {""}


def test_an_unfinished_character_ends_in_a_replacement(made):
    ids = made["sentencepiece"].ours.encode("🦙")[:-1]
    pieces = stream(made["sentencepiece"].ours, ids)
    assert "".join(pieces[:-1]) == "" and pieces[-1] == "\ufffd" * 3
    case = made["bytelevel"]
    ids = case.ours.encode("🦙")[:-1]
    assert stream(case.ours, ids)[-1] == case.library.decode(ids) == "\ufffd"


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2"])
def test_continuing_a_text_keeps_the_first_space(kind, made):
    ours = made[kind].ours
    ids = ours.encode("Hello world")
    world = ids[len(ours.encode("Hello")) :]
    assert "".join(stream(ours, world)) == "world"
    assert "".join(stream(ours, world, starts_text=False)) == " world"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_the_metaspace_decoder(scheme, tmp_path):
    """The other way to write a sentencepiece vocabulary as tokenizer.json."""
    raw = json.loads(llama2_json(scheme))
    raw["decoder"] = {"type": "Metaspace", "replacement": "▁", "split": False}
    raw["decoder"]["prepend_scheme"] = scheme
    folder = make_tokenizer(tmp_path, "llama2", tokenizer_class="PreTrainedTokenizerFast")
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    ours = load_folder(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("Hello world", "  two", "a</s> b", "</s> b"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip), text
            assert "".join(stream(ours, ids, skip_special=skip)) == ours.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_never_held_back_for_more_than_a_character(kind, made):
    """Nor for the space before a text. Also of bytes that never make a character."""
    ours = made[kind].ours
    for ids in (ours.encode("llama ") * 500, ours.encode("🦙" * 200), [200] * 2000):
        runs = itertools.groupby(stream(ours, ids)[:-1], bool)
        assert max((len(list(run)) for is_text, run in runs if not is_text), default=0) <= 4


@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_the_padding_have_no_text(kind, made):
    ours = load_folder(made[kind].folder, vocab_size=400)
    assert ours.decode([399, *ours.encode("a"), 390]) == "a"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad_id", [-1, 384, 10**20])
def test_ids_outside_the_vocabulary_are_refused(kind, bad_id, made):
    with pytest.raises(TokenizerError, match=str(bad_id)):
        made[kind].ours.decode([bad_id])


# Byte tokens


def test_the_byte_alphabet_is_gpt2s():
    assert byte_alphabet() == {char: byte for byte, char in bytes_to_unicode().items()}


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_level_text_comes_back(text):
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    assert b"".join(decode_byte_level(word) for word, _ in split) == text.encode()


def test_a_token_outside_the_alphabet_is_text():
    assert decode_byte_level("你 a") == "你 a".encode()


def test_byte_tokens():
    for text, byte in (("<0x00>", 0), ("<0xe2>", 0xE2), ("<0xE2>", 0xE2)):
        assert Piece.of_byte(text) == Piece(bytes([byte]), is_byte=True)
    for text in ("<0x1>", "<0x123>", "a"):
        assert Piece.of_byte(text) is None
