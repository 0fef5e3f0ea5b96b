"""GGUF vocabularies: SentencePiece ("llama"), byte-level BPE ("gpt2") and BPE of text ("gemma4").

Ids are those of llama.cpp (src/llama-vocab.cpp, src/unicode.cpp). Encoding uses libraries:
sentencepiece with a model built in memory, tokenizers with the file's vocabulary, merges and
pre-tokenizer. Differences from llama.cpp, on purpose:

- User text never becomes a control token, which llama.cpp's merges can produce from its spelling.
- Some pre-tokenizers follow the models' tokenizer.json (see pre_tokenizers.py).
- `decode` returns the encoded text, while llama.cpp may drop spaces before punctuation
  (clean_spaces).
- add_eos_token is ignored: a prompt to be continued must not end.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_llama.core.errors import TokenizerError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.forks import cached_property

from . import sentencepiece_model as spm
from .infill import FIM_ENDS, FIM_NAMES
from .pre_tokenizers import ADD_BOS, BY_MERGES, IGNORE_MERGES, PRE_TOKENIZERS, build_pre_tokenizer
from .tokenizer import (
    SPACE,
    Piece,
    Tokenizer,
    byte_alphabet,
    decode_byte_level,
    encode_by_library,
    least_shares,
    library_faults,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    import sentencepiece
    import tokenizers

_NO_ID = 0xFFFFFFFF  # -1 as an unsigned number: "none" in some files
_KEY = "tokenizer.ggml."
_AGAIN = "fetch the file again, or convert the model again"
_OTHER_FILES = "use the model's folder with its tokenizer files instead"

# Control tokens that llama.cpp recognises by their text, whatever their type in the file
# (llama-vocab.cpp, llama_vocab::impl::load); these end an answer. Those for fill-in-the-middle
# (FIM_NAMES) count only if the metadata lacks their keys.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)
_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}  # as the format spells them
_OLD_FIM = {"pre": "prefix_token_id", "suf": "suffix_token_id", "mid": "middle_token_id"}
_NAMED = {
    f"{name}_token": f"{_KEYS.get(name, name)}_token_id"
    for name in "bos eos unk sep pad cls mask".split()
}

# Special tokens of Gemma 4 that files call user-defined, so that llama.cpp prints them
# (conversion/gemma.py)
SHOWN_SPECIALS = frozenset(
    "<|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|>".split()
) | {'<|"|>'}

_NEEDED = ("bos_token", "eos_token")  # without them prompts and answers would be others

# Bytes that a vocabulary may lack: UTF-8 text never has them, or only in unassigned characters and
# C0 controls.
_RARE_BYTES = frozenset(
    [*range(9), 11, 12, *range(14, 32), 127, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)]
)


def load_gguf_tokenizer(
    metadata: Mapping[str, Any], config: LlamaConfig, source: str
) -> GGUFTokenizer:
    """Load the tokenizer in a GGUF file's metadata.

    Args:
        metadata: {key: value}, arrays as NumPy arrays or sequences of text (`GGUFFile.metadata`).
        config: the model's; its vocabulary may be larger than the tokenizer's.
        source: the file to name in errors.

    Raises TokenizerError: an unsupported kind or pre-tokenizer; a field that is missing, of the
    wrong type, out of range or in conflict with another; more tokens than the model has embeddings.
    """
    fields = _Fields(metadata, source)
    kind = fields.text("model")
    if kind == "gpt2" and metadata.get(f"{_KEY}pre") == "gemma4":
        kind = "gemma4"
    kinds: dict[str, Callable[[_Fields, LlamaConfig], GGUFTokenizer]] = {
        "llama": SentencePieceVocabulary,
        "gpt2": ByteLevelVocabulary,
        "gemma4": TextBPEVocabulary,
    }
    if kind not in kinds:
        expected = 'expected "llama" (SentencePiece), "gpt2" (byte-level BPE) or "gemma4"'
        raise fields.error("model", kind, expected, _OTHER_FILES)
    tokenizer = kinds[kind](fields, config)
    tokenizer.notices = tuple(fields.notices)
    return tokenizer


class _Fields:
    """Reads tokenizer.ggml.*, checking types."""

    def __init__(self, metadata: Mapping[str, Any], source: str):
        self.metadata, self.source = metadata, source
        self.notices: dict[str, None] = {}  # for the user

    def notice(self, name: str, text: str) -> None:
        self.notices[f"{self.source}: {_KEY}{name} {text}"] = None

    def error(self, name: str, value: Any, expected: str, remedy: str = _AGAIN) -> TokenizerError:
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            value = list(value[:4])  # a lazily decoded array has no useful repr
        shown = "missing" if value is None else show(value)
        return self.fault(name, f"is {shown}, {expected}", remedy)

    def fault(self, name: str, text: str, remedy: str = _AGAIN) -> TokenizerError:
        return TokenizerError(f"{self.source}: {_KEY}{name} {text}; {remedy}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.metadata.get(_KEY + name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "expected text")
        return value

    def flag(self, name: str) -> bool | None:
        """A boolean; None if missing."""
        value = self.metadata.get(_KEY + name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise self.error(name, value, "expected true or false")
        return None if value is None else bool(value)

    def id(self, name: str, count: int) -> int | None:
        """A token id; None if missing."""
        value = self.metadata.get(_KEY + name)
        is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if value is None or (is_number and value == _NO_ID):
            return None
        if not is_number or not 0 <= value < count:
            raise self.error(name, value, f"expected a token id from 0 to {count - 1}")
        return int(value)

    def spare_id(self, name: str, count: int) -> int | None:
        """A token id that no prompt or answer needs. As in llama.cpp, one outside the vocabulary is
        ignored, with a notice.
        """
        value: Any = self.metadata.get(_KEY + name)
        is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if is_number and value != _NO_ID and not 0 <= value < count:
            self.notice(name, f"is {value}, ignored: the vocabulary ends at {count - 1}")
            return None
        return self.id(name, count)

    def strings(self, name: str) -> list[str]:
        value = self.metadata.get(_KEY + name)
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.error(name, value, "expected an array of texts")
        texts = list(value)
        if not texts:
            raise self.error(name, texts, "expected at least one text")
        if set(map(type, texts)) != {str}:
            i = next(i for i, text in enumerate(texts) if type(text) is not str)
            raise self.error(f"{name}[{i}]", texts[i], "expected text")
        return texts

    def numbers(self, name: str, count: int, kinds: str, expected: str) -> npt.NDArray[Any]:
        """An array [count] of numbers whose NumPy kind is among `kinds`."""
        value = self.metadata.get(_KEY + name)
        if value is None:
            raise self.error(name, None, f"expected {expected}, one per token ({count})")
        try:
            array: npt.NDArray[Any] = np.asarray(value)
        except ValueError:  # nested lists of different lengths
            array = np.empty(())
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.error(name, value, f"expected {expected}, one per token")
        if len(array) != count:
            raise self.fault(name, f"holds {len(array)} values, expected {count}, one per token")
        return array


class GGUFTokenizer(Tokenizer):
    """Tokens, their types, and the search for special tokens in a text, as in llama.cpp."""

    _DEFAULTS: Mapping[str, int] = {}  # ids of named tokens that a file may leave out
    tokens: list[str]  # texts by id
    # put a space before the first word of a text, and before the first word after a special token
    space_prefix = False

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(Path(fields.source), config)
        self._read_tokens(fields, config)
        self._read_types(fields)
        count = self.vocab_size
        named = {
            name: (fields.id if name in _NEEDED else fields.spare_id)(key, count)
            for name, key in _NAMED.items()
        }
        for name, token in self._DEFAULTS.items():
            is_special = token < count and self._file_types[token] in (spm.CONTROL, spm.UNKNOWN)
            if named[name] is None and is_special:
                named[name] = token
        self.bos_id = named["bos_token"]
        self.named = {
            name: self.tokens[token] for name, token in named.items() if token is not None
        }
        self._find_control_tokens(fields, named["eos_token"])

        self.special_ids = self._ids_of_types(spm.CONTROL, spm.UNKNOWN)
        self.added_ids = self._ids_of_types(spm.CONTROL, spm.UNKNOWN, spm.USER_DEFINED)
        self._specials = frozenset(self.special_ids.values())
        # Literals to search for, the longest first: all of them, and those that also count in plain
        # text.
        literals = sorted(self.added_ids.items(), key=lambda item: -len(item[0].encode()))
        self._parsed_literals = literals
        self._plain_literals = [item for item in literals if item[1] not in self._specials]
        self._stripping = self._find_stripping_tokens(fields)

        add_bos = fields.flag("add_bos_token")
        if add_bos and self.bos_id is None:
            raise fields.error(
                "bos_token_id", None, "expected a token id, since add_bos_token is true"
            )
        if add_bos is None:
            add_bos = self._adds_bos_by_default(fields)
        self.adds_bos = self.bos_id is not None and add_bos
        fields.flag("add_eos_token")

    def _adds_bos_by_default(self, fields: _Fields) -> bool:
        """True if texts begin with BOS when the file lacks add_bos_token."""
        return True

    def _read_tokens(self, fields: _Fields, config: LlamaConfig) -> None:
        texts = fields.strings("tokens")
        if len(texts) > config.vocab_size:
            text = f"holds {len(texts)} tokens, the model's embedding {config.vocab_size} rows"
            remedy = "the tokenizer does not match the model, fetch the file again"
            raise fields.fault("tokens", text, remedy)
        if "" in texts:
            # as llama.cpp names it
            texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        ids = {text: i for i, text in enumerate(texts)}
        if len(ids) != len(texts):
            i = next(i for i, text in enumerate(texts) if ids[text] != i)
            twice = f"{show(texts[i])} twice, as {i} and as {ids[texts[i]]}"
            raise fields.fault("tokens", f"holds {twice}, expected each token once")
        self.tokens, self._id_of, self.vocab_size = texts, ids, len(texts)

    def _read_types(self, fields: _Fields) -> None:
        types = fields.numbers("token_type", self.vocab_size, "iu", "integers")
        if types.min() < spm.UNDEFINED or types.max() > spm.BYTE:
            i = int(np.flatnonzero((types < spm.UNDEFINED) | (types > spm.BYTE))[0])
            raise fields.error(
                f"token_type[{i}]", int(types[i]), f"expected {spm.UNDEFINED} to {spm.BYTE}"
            )
        self._file_types = types  # int [vocab_size]

    def _find_control_tokens(self, fields: _Fields, eos: int | None) -> None:
        """Set end tokens and final types, by metadata and by texts that llama.cpp recognises."""

        def find(texts: Iterable[str]) -> list[int]:
            return [self._id_of[text] for text in texts if text in self._id_of]

        count = self.vocab_size
        ends = [eos, *(fields.id(f"{name}_token_id", count) for name in ("eot", "eom"))]
        end_texts = _ENDS
        if "<|tool_response>" in self._id_of:  # of Gemma 4, to which </s> is a tag of HTML
            end_texts -= {"</s>"}
        by_text = find(end_texts)
        for name, texts in FIM_NAMES.items():
            token = fields.spare_id(f"fim_{name}_token_id", count)
            if token is None and name in _OLD_FIM:
                token = fields.spare_id(_OLD_FIM[name], count)
            matches = find(texts) if token is None else []
            by_text += matches
            ids = matches if token is None else [token]
            self.fim_ids |= zip([name], ids)
            ends += ids if name in FIM_ENDS else []
        ends += sorted(find(end_texts))
        self.eos_ids = tuple(token for token in dict.fromkeys(ends) if token is not None)
        self._types = self._file_types.copy()  # int [vocab_size]
        self._types[by_text] = spm.CONTROL

    def _ids_of_types(self, *types: int) -> dict[str, int]:
        return {self.tokens[i]: int(i) for i in np.flatnonzero(np.isin(self._types, types))}

    def _find_stripping_tokens(self, fields: _Fields) -> frozenset[int]:
        """Special tokens that absorb the white space after them: those of Phi-3, recognised by its
        name.
        """
        name = fields.metadata.get("general.name")
        if not isinstance(name, str) or not any(phi in name.lower() for phi in ("phi-3", "phi3")):
            return frozenset()
        others = ("<unk>", "<s>", "<|endoftext|>")
        return frozenset(token for text, token in self.added_ids.items() if text not in others)

    # Encoding

    def _encode(self, text: str, parse_special: bool, starts_text: bool = True) -> list[int]:
        literals = self._parsed_literals if parse_special else self._plain_literals
        ids: list[int] = []
        prefix = self.space_prefix and starts_text
        for part in self._split_at(text, literals):
            if isinstance(part, int):
                ids.append(part)
                prefix = self.space_prefix
            else:
                ids += self._encode_text(" " + part if prefix else part)
                prefix = False
        return ids

    def _split_at(self, text: str, literals: Sequence[tuple[str, int]]) -> list[str | int]:
        """Split a text at literals, which become ids, in their order (llama-vocab.cpp,
        tokenizer_st_partition).
        """
        parts: list[str | int] = [text]
        for literal, token in literals:
            if literal not in text:
                continue
            split: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    split.append(part)
                    continue
                for i, segment in enumerate(part.split(literal)):
                    if i:
                        split.append(token)
                    if i and token in self._stripping:
                        segment = segment.lstrip(" \t\n\v\f\r")
                    if segment:
                        split.append(segment)
            parts = split
        return parts

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Encode a text without special tokens."""

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        tokens = [self._decode_normal(text) for text in self.tokens]
        tokens += [text.encode() for text in self.added_ids]
        # Stripped white space has no tokens, and neither have bytes that the vocabulary lacks.
        without = set(b" \t\n\v\f\r" if self._stripping else b"")
        if self.byte_level:
            alphabet = byte_alphabet()
            without |= {alphabet[char] for char in alphabet.keys() - self._id_of.keys()}
        return least_shares(tokens, without)

    # Decoding

    def _make_piece(self, token: int) -> Piece | None:
        if token >= self.vocab_size:
            return None
        text, kind = self.tokens[token], self._types[token]
        if kind in (spm.UNUSED, spm.UNDEFINED):
            return None
        if kind == spm.BYTE:
            return Piece.of_byte(text)
        if kind == spm.NORMAL:
            return Piece(self._decode_normal(text))
        return Piece(text.encode(), is_special=token in self._specials, keeps_space=True)

    def _decode_normal(self, text: str) -> bytes:
        """The bytes of a normal token."""
        return text.replace(SPACE, " ").encode()

    def _check_byte_tokens(self, fields: _Fields) -> None:
        expected = {f"<0x{byte:02X}>" for byte in range(256)}
        texts = {self.tokens[i] for i in np.flatnonzero(self._file_types == spm.BYTE)}
        if texts != expected:
            text = min(texts - expected or expected - texts)
            problem = "not one of" if texts - expected else "missing among"
            raise fields.fault(
                f"tokens: byte token {show(text)}",
                f"is {problem} the 256 from <0x00> to <0xFF>, each expected once, with token_type "
                f"{spm.BYTE}",
            )


class SentencePieceVocabulary(GGUFTokenizer):
    """tokenizer.ggml.model "llama": pieces with scores, merged best score first, and byte tokens
    for the rest.
    """

    _DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(fields, config)
        with np.errstate(over="ignore"):
            scores = fields.numbers("scores", self.vocab_size, "fiu", "numbers").astype("<f4")
        if not np.isfinite(scores).all():
            i = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise fields.error(f"scores[{i}]", float(scores[i]), "expected a finite number")
        self._check_byte_tokens(fields)
        space_prefix = fields.flag("add_space_prefix")
        fields.flag("remove_extra_whitespaces")  # only for unigram models (t5), as in llama.cpp
        self.space_prefix = space_prefix is not False
        self.dropped_space = "single" if self.space_prefix else None
        self.special_ends_bytes = True
        # Adds no space before a text
        self.library: sentencepiece.SentencePieceProcessor = self._build_library(fields, scores)

    def _build_library(self, fields: _Fields, scores: npt.NDArray[Any]) -> Any:
        import sentencepiece

        types = self._file_types.copy()
        # User-defined tokens are found before the library sees the text; to the library they are
        # normal pieces.
        types[(types == spm.USER_DEFINED) | (types == spm.UNDEFINED)] = spm.NORMAL
        # The library expects exactly one unknown token, and no text encodes to it or to control
        # tokens. Gemma's files have <unk> among those.
        named = self._id_of.get(self.named.get("unk_token", ""))
        special = np.flatnonzero((types == spm.UNKNOWN) | (types == spm.CONTROL)).tolist()
        special.sort(key=lambda token: (types[token] != spm.UNKNOWN, token != named))
        types[special] = spm.CONTROL
        types[special[:1]] = spm.UNKNOWN
        pieces = list(zip(self.tokens, scores.tolist(), types.tolist(), strict=True))
        if not special:
            spare = "<unk>"
            while spare in self._id_of:
                spare += ">"
            pieces.append((spare, 0.0, spm.UNKNOWN))
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=spm.build_bpe_model(pieces))
        except Exception as e:
            text = f"is no SentencePiece vocabulary ({show(str(e))})"
            raise fields.fault("tokens", text) from None

    def _encode_text(self, text: str) -> list[int]:
        return self.library.encode(text)


class _BPEVocabulary(GGUFTokenizer):
    """Merges by rank, by the tokenizers library.

    library: vocabulary, merges and pre-tokenizer, without special tokens.
    """

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(fields, config)
        # Control tokens of the file, which merges must not produce. Other end tokens may be
        # ordinary text ("</s>" in HTML).
        control = np.isin(self._file_types, (spm.CONTROL, spm.UNKNOWN))
        self._unmergeable = frozenset(
            int(i) for i in np.flatnonzero(control) if len(self.tokens[i]) > 1
        )
        self.library: tokenizers.Tokenizer = self._build_library(fields)

    @abstractmethod
    def _build_library(self, fields: _Fields) -> tokenizers.Tokenizer:
        """Build the library's tokenizer."""

    def _build_model(self, fields: _Fields, **options: bool) -> tokenizers.Tokenizer:
        """The library's tokenizer with vocabulary and merges alone."""
        import tokenizers
        from tokenizers import models

        texts = dict.fromkeys(fields.strings("merges"))
        merges = [(left, right) for left, _, right in (text.partition(" ") for text in texts)]
        wrong = next((text for text in texts if text.count(" ") != 1), None)
        if wrong is not None:
            text = f"holds {show(wrong)}, expected two tokens and a space between"
            raise fields.fault("merges", text)
        try:
            return tokenizers.Tokenizer(models.BPE(self._id_of, merges, **options))
        except Exception as e:  # the library raises bare Exception
            for left, right in merges:
                for text in (left, right, left + right):
                    if text not in self._id_of:
                        raise fields.fault(
                            "merges",
                            f"holds {show(f'{left} {right}')}, but {show(text)} is no token, "
                            f"expected both parts and the whole among {_KEY}tokens",
                        ) from None
            raise fields.fault("merges", f"cannot be used ({show(str(e))})") from None

    def _encode_text(self, text: str) -> list[int]:
        with library_faults(self.path):
            ids = encode_by_library(self.library, text)
        if self._unmergeable.isdisjoint(ids):
            return ids
        spelled = (self._spell(i) if i in self._unmergeable else (i,) for i in ids)
        return list(itertools.chain.from_iterable(spelled))

    def _spell(self, token: int) -> list[int]:
        """Encode a token's text with other tokens: its first character and the rest, or the bytes
        of a single character.
        """
        data = self._decode_normal(self.tokens[token])
        text = data.decode("utf-8", "ignore")
        if len(text) > 1 and text.encode() == data:
            return self._encode_text(text[0]) + self._encode_text(text[1:])
        return [self._id_of[char] for char in self.tokens[token] if char in self._id_of]


class TextBPEVocabulary(_BPEVocabulary):
    """tokenizer.ggml.model "gemma4": characters of the whole text are merged by rank; byte tokens
    for the rest.
    """

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(fields, config)
        if fields.flag("add_bos_token") is False:
            fields.notice("add_bos_token", "is false, ignored as in llama.cpp: texts need BOS here")
        self.adds_bos = self.bos_id is not None

    def _read_types(self, fields: _Fields) -> None:
        super()._read_types(fields)
        shown = [self._id_of[text] for text in SHOWN_SPECIALS if text in self._id_of]
        types = self._file_types.copy()
        types[shown] = np.where(types[shown] == spm.USER_DEFINED, spm.CONTROL, types[shown])
        self._file_types = types

    def _build_library(self, fields: _Fields) -> tokenizers.Tokenizer:
        from tokenizers import normalizers

        self._check_byte_tokens(fields)
        library = self._build_model(fields, byte_fallback=True)
        library.normalizer = normalizers.Replace(" ", SPACE)
        return library


class ByteLevelVocabulary(_BPEVocabulary):
    """tokenizer.ggml.model "gpt2": regular expressions split a text into words, whose bytes are
    merged by rank.
    """

    byte_level = True

    def _pre(self, fields: _Fields) -> str:
        name = fields.text("pre", "default")
        if name not in PRE_TOKENIZERS:
            expected = f"expected one of {', '.join(PRE_TOKENIZERS)}"
            raise fields.error("pre", name, expected, _OTHER_FILES)
        if name != "default":
            return name
        # Early conversions lack the name.
        digest = hashlib.sha256("\n".join(fields.strings("merges")).encode()).hexdigest()
        name = BY_MERGES.get(digest[:16], name)
        written = "default" if _KEY + "pre" in fields.metadata else "missing"
        advice = f"the merges are those of {name}, which is taken"
        if name == "default":
            advice = "words may be split differently than in training; convert the model again"
        fields.notice("pre", f"is {written}; {advice}")
        return name

    def _adds_bos_by_default(self, fields: _Fields) -> bool:
        return self._pre(fields) in ADD_BOS

    def _build_library(self, fields: _Fields) -> tokenizers.Tokenizer:
        for name in ("add_space_prefix", "remove_extra_whitespaces"):
            fields.flag(name)  # for SentencePiece; llama.cpp ignores them here too
        alphabet = byte_alphabet()
        missing = {alphabet[char] for char in alphabet.keys() - self._id_of.keys()} - _RARE_BYTES
        if missing:
            count = f" ({len(missing)} are missing)" if len(missing) > 1 else ""
            expected = f"expected one for every byte of a text{count}"
            raise fields.fault(
                "tokens", f"holds no token for byte 0x{min(missing):02X}, {expected}"
            )
        for i in np.flatnonzero(self._file_types == spm.BYTE):
            if Piece.of_byte(text := self.tokens[i]) is None:
                expected = "expected <0x00> to <0xFF> for a byte token"
                raise fields.error(f"tokens[{i}]", text, expected)
        name = self._pre(fields)
        library = self._build_model(fields, ignore_merges=name in IGNORE_MERGES)
        library.pre_tokenizer = build_pre_tokenizer(PRE_TOKENIZERS[name])
        return library

    def _decode_normal(self, text: str) -> bytes:
        return decode_byte_level(text)
