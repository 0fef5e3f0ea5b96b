"""GGUF vocabularies behind `Tokenizer`: SentencePiece's kind ("llama") and byte-level BPE ("gpt2").

Ids are llama.cpp's (src/llama-vocab.cpp, src/unicode.cpp); the libraries do the work: sentencepiece on a model built in
memory, tokenizers on vocabulary, merges and the pre-tokenizer that the file names. Three things differ on purpose:

- User text never becomes a control token. llama.cpp's merges can arrive at one whose spelling they pass through.
- Pre-tokenizers that C++'s regular expressions cannot express are those of the models' own tokenizer.json: "tekken" and
  "gpt-4o" split words by Unicode's letter cases and keep combining marks (llama.cpp makes É, COLE out of ÉCOLE), the
  "deepseek" ones have ideographic and wide spaces in their character ranges.
- `decode` gives back what was encoded; llama.cpp may drop spaces before punctuation (clean_spaces). Nor is
  add_eos_token obeyed: a prompt that is to be continued must not end.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.models.config import LlamaConfig, show

from .tokenizer import _BYTE as _BYTE_TOKEN, _SPACE, Tokenizer, _byte_alphabet, _Piece

# llama.h, llama_token_type; sentencepiece_model.proto numbers 1 to 6 the same
_UNDEFINED, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(7)
_NO_ID = 0xFFFFFFFF  # how some writers say "none": -1 as an unsigned number
_KEY = "tokenizer.ggml."
_AGAIN = "fetch the file again, or convert the model again"

# Tokens that llama.cpp knows by their text (llama-vocab.cpp, llama_vocab::impl::load): control tokens whatever the file
# says, and those of the first two lists end an answer. The fill-in-the-middle ones unless the metadata names another.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> "
    "[e~[".split()
)
_MIDDLE_ENDS = {
    "fim_pad_token_id": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split(),
    "fim_rep_token_id": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split(),
    "fim_sep_token_id": ["<|file_sep|>"],
}
_MIDDLE = {
    "fim_pre_token_id":
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>".split(),
    "fim_suf_token_id":
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>".split(),
    "fim_mid_token_id":
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>".split(),
}  # fmt: skip
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so spelled in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}

# Pre-tokenizers by the names that tokenizer.ggml.pre has for them (llama-vocab.cpp, llm_tokenizer_bpe): regular
# expressions, each applied to what those before it left whole. A match is a piece, and so is what lies between two.
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
# deepseek-llm's letters, as its tokenizer.json lists them
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_DIGITS_GPT2 = (r"\p{N}", *_GPT2)
_LLAMA3 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}",)
_QWEN2 = (rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_OTHER}",)
_TEKKEN = (rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHER_SLASH}",)
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_CASED}{_UPPER}+{_LOWER}*{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}|{_OTHER_SLASH}",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, r"[0-9][0-9][0-9]"),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "smaug-bpe", "dbrx",
         "chatglm-bpe", "glm4"), _LLAMA3,
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2
    ),
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_OTHER}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_OTHER}"),
    "seed-coder": (
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "trillion", "granite-docling", "exaone4", "a.x-4.0",
         "mellum"), _GPT2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}  # fmt: skip
_STARTED = frozenset(  # texts begin with BOS unless add_bos_token says otherwise
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
)
_WHOLE_WORDS = _STARTED | {"minicpm5", "glm4"}  # a piece that is a token is taken as it is, its merges not looked at

# Bytes that a vocabulary may lack: parts of no UTF-8 text, or only of unassigned characters and C0 controls
_RARE_BYTES = frozenset([*range(9), 11, 12, *range(14, 32), 127, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])


def load_gguf_tokenizer(metadata: Mapping[str, Any], config: LlamaConfig, source: str) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata.

    Args:
        metadata: {key: value}, arrays as NumPy arrays or sequences of text (`GGUFFile.metadata`).
        config: the model's; its vocabulary may be larger than the tokenizer's.
        source: the file, to be named in errors.

    Raises:
        TokenizerError: a kind or pre-tokenizer that is not supported; a field that is missing, of the wrong type, out
            of range or at odds with another; more tokens than the model has embeddings.
    """
    fields = _Fields(metadata, source)
    kind = fields.text("model")
    if kind == "llama":
        return _SentencePieceVocabulary(fields, config)
    if kind == "gpt2":
        return _ByteLevelVocabulary(fields, config)
    raise fields.wrong("model", kind, 'expected "llama" (SentencePiece) or "gpt2" (byte-level BPE)',
                       "use the model's folder with its own tokenizer files instead")  # fmt: skip


class _Fields:
    """tokenizer.ggml.*, each read with a check of its type."""

    def __init__(self, metadata: Mapping[str, Any], source: str):
        self.metadata, self.source = metadata, source

    def wrong(self, name: str, value: Any, expected: str, remedy: str = _AGAIN) -> TokenizerError:
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            value = list(value[:4])  # a lazily decoded array says nothing by itself
        found = "missing" if value is None else show(value)
        return TokenizerError(f"{self.source}: {_KEY}{name} is {found}, {expected}; {remedy}")

    def text(self, name: str, default: str | None = None) -> str:
        value = self.metadata.get(_KEY + name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "expected text")
        return value

    def flag(self, name: str) -> bool | None:
        """A truth value; None where the file has none."""
        value = self.metadata.get(_KEY + name)
        if value is not None and not isinstance(value, (bool, np.bool_)):
            raise self.wrong(name, value, "expected true or false")
        return None if value is None else bool(value)

    def id(self, name: str, count: int) -> int | None:
        """A token id; None where the file has none."""
        value = self.metadata.get(_KEY + name)
        if value is None or (isinstance(value, (int, np.integer)) and value == _NO_ID):
            return None
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not 0 <= value < count:
            raise self.wrong(name, value, f"expected a token id from 0 to {count - 1}")
        return int(value)

    def strings(self, name: str) -> list[str]:
        value = self.metadata.get(_KEY + name)
        if value is None:
            raise self.wrong(name, None, "expected an array of texts")
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            raise self.wrong(name, value, "expected an array of texts")
        found = list(value)
        if not found:
            raise self.wrong(name, found, "expected at least one text")
        if set(map(type, found)) != {str}:
            i = next(i for i, one in enumerate(found) if type(one) is not str)
            raise self.wrong(f"{name}[{i}]", found[i], "expected text")
        return found

    def numbers(self, name: str, count: int, kinds: str, expected: str) -> np.ndarray:
        """An array [count] of numbers whose NumPy kind is among `kinds`."""
        value = self.metadata.get(_KEY + name)
        if value is None:
            raise self.wrong(name, None, f"expected {expected}, one for each of the {count} tokens")
        try:
            array = np.asarray(value)
        except ValueError:  # lists of different lengths within a list
            array = np.empty(())
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.wrong(name, value, f"expected {expected}, one for each token")
        if len(array) != count:
            raise TokenizerError(
                f"{self.source}: {_KEY}{name} holds {len(array)} values, expected {count}, one for each token; {_AGAIN}"
            )
        return array


class _Vocabulary(Tokenizer):
    """What both kinds share: tokens, their types, special tokens found in a text as llama.cpp finds them.

    _tokens: texts by id. _types: int [vocab_size], _CONTROL for what is control whatever the file says.
    _file_types: the same as the file has them. _DEFAULTS: ids of named tokens where the file has none.
    """

    _DEFAULTS: Mapping[str, int] = {}

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(Path(fields.source), config)
        texts = fields.strings("tokens")
        count = len(texts)
        if count > config.vocab_size:
            raise TokenizerError(
                f"{self.path}: {_KEY}tokens holds {count} tokens, the model's embedding {config.vocab_size} rows; the "
                "tokenizer and the model do not belong together, fetch the file again"
            )
        if "" in texts:
            texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]  # llama.cpp's name for it
        ids = {text: i for i, text in enumerate(texts)}
        if len(ids) != count:
            i = next(i for i, text in enumerate(texts) if ids[text] != i)
            raise TokenizerError(
                f"{self.path}: {_KEY}tokens holds {show(texts[i])} twice, as {i} and as {ids[texts[i]]}, expected each "
                f"token once; {_AGAIN}"
            )
        types = fields.numbers("token_type", count, "iu", "integers")
        if types.min() < _UNDEFINED or types.max() > _BYTE:
            i = int(np.flatnonzero((types < _UNDEFINED) | (types > _BYTE))[0])
            raise fields.wrong(f"token_type[{i}]", int(types[i]), f"expected {_UNDEFINED} to {_BYTE}")
        self._tokens, self._id_of, self._file_types = texts, ids, types
        self.vocab_size = count

        named = {name: fields.id(key, count) for name, key in _NAMED.items()}
        for name, one in self._DEFAULTS.items():
            if named[name] is None and one < count and types[one] in (_CONTROL, _UNKNOWN):
                named[name] = one
        ends, known = self._known(fields, named)
        self._types = types.copy()
        self._types[known] = _CONTROL
        self.bos_id = named["bos_token"]
        self.eos_ids = tuple(ends)
        self.named = {name: texts[one] for name, one in named.items() if one is not None}
        self.special_ids = self._of_type(_CONTROL, _UNKNOWN)
        self.added_ids = self._of_type(_CONTROL, _UNKNOWN, _USER_DEFINED)
        self._specials = frozenset(self.special_ids.values())
        by_length = sorted(self.added_ids.items(), key=lambda item: -len(item[0].encode()))
        self._marked = by_length
        self._plain = [(text, one) for text, one in by_length if one not in self._specials]
        self._swallowing = self._swallow_spaces(fields)

        starts = fields.flag("add_bos_token")
        if starts and self.bos_id is None:
            raise fields.wrong("bos_token_id", None, "expected a token id, since add_bos_token is true")
        self.adds_bos = self.bos_id is not None and (self._starts(fields) if starts is None else starts)
        fields.flag("add_eos_token")
        self._prefix = False  # whether a space goes before the text's first word and the first after a special token

    @abstractmethod
    def _starts(self, fields: _Fields) -> bool:
        """Whether texts begin with BOS where the file does not say."""

    def _of_type(self, *types: int) -> dict[str, int]:
        return {self._tokens[i]: int(i) for i in np.flatnonzero(np.isin(self._types, types))}

    def _known(self, fields: _Fields, named: Mapping[str, int | None]) -> tuple[list[int], list[int]]:
        """(ids that end an answer, eos first; ids that are control because of their texts), as llama.cpp finds them."""
        ends = [named["eos_token"], *(fields.id(f"{name}_token_id", self.vocab_size) for name in ("eot", "eom"))]
        known = [self._id_of[text] for text in _ENDS if text in self._id_of]
        for key, texts in {**_MIDDLE_ENDS, **_MIDDLE}.items():
            one = fields.id(key, self.vocab_size)
            found = [self._id_of[text] for text in texts if text in self._id_of] if one is None else [one]
            known += found if one is None else []
            ends += found if key in _MIDDLE_ENDS else []
        ends += sorted(self._id_of[text] for text in _ENDS if text in self._id_of)
        return [one for one in dict.fromkeys(ends) if one is not None], known

    def _swallow_spaces(self, fields: _Fields) -> frozenset[int]:
        """Special tokens that take the white space after them along: Phi-3's, known by the model's name alone."""
        name = fields.metadata.get("general.name")
        if not isinstance(name, str) or not any(one in name.lower() for one in ("phi-3", "phi3")):
            return frozenset()
        kept = ("<unk>", "<s>", "<|endoftext|>")
        return frozenset(one for text, one in self.added_ids.items() if text not in kept)

    # encoding

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode_split(text, self._plain)

    def _encode_marked(self, text: str) -> list[int]:
        return self._encode_split(text, self._marked)

    def _encode_rest(self, text: str) -> list[int]:
        return self._encode_split(text, self._marked, begins=False)

    def _encode_split(self, text: str, literals: list[tuple[str, int]], begins: bool = True) -> list[int]:
        ids: list[int] = []
        prefix = self._prefix and begins
        for part in self._partition(text, literals):
            if isinstance(part, int):
                ids.append(part)
                prefix = self._prefix
            else:
                ids += self._encode_text(" " + part if prefix else part)
                prefix = False
        return ids

    def _partition(self, text: str, literals: list[tuple[str, int]]) -> list[str | int]:
        """The text as stretches without the literals, and these as ids; the longest literal takes its places first
        (llama-vocab.cpp, tokenizer_st_partition)."""
        parts: list[str | int] = [text]
        for literal, one in literals:
            if literal not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                for i, stretch in enumerate(part.split(literal)):
                    if i:
                        cut.append(one)
                        stretch = stretch.lstrip(" \t\n\v\f\r") if one in self._swallowing else stretch
                    if stretch:
                        cut.append(stretch)
            parts = cut
        return parts

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Ids of a text without special tokens."""

    # decoding

    def _make_piece(self, one: int) -> _Piece | None:
        if one >= self.vocab_size:
            return None
        text, kind = self._tokens[one], self._types[one]
        if kind in (_UNUSED, _UNDEFINED):
            return None
        if kind == _BYTE:
            return _Piece(bytes([_byte(text)]), True, False)
        if kind == _NORMAL:
            return _Piece(self._text_bytes(text), False, False)
        return _Piece(text.encode(), False, one in self._specials, opaque=True)

    @abstractmethod
    def _text_bytes(self, text: str) -> bytes:
        """What a normal token stands for."""


class _SentencePieceVocabulary(_Vocabulary):
    """tokenizer.ggml.model "llama": pieces with scores, merged best score first; bytes for what is no piece."""

    _DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(fields, config)
        with np.errstate(over="ignore"):
            scores = fields.numbers("scores", self.vocab_size, "fiu", "numbers").astype("<f4")
        if not np.isfinite(scores).all():
            i = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise fields.wrong(f"scores[{i}]", float(scores[i]), "expected a finite number")
        self._check_bytes(fields)
        prefix = fields.flag("add_space_prefix")
        fields.flag("remove_extra_whitespaces")  # of the unigram kind (t5); llama.cpp does not look at it here either
        self._prefix = True if prefix is None else prefix
        self._strip = "one" if self._prefix else None
        self._special_breaks = True
        self._sp = self._build(scores)

    def _starts(self, fields: _Fields) -> bool:
        return True

    def _check_bytes(self, fields: _Fields) -> None:
        expected = {f"<0x{byte:02X}>" for byte in range(256)}
        found = {self._tokens[i] for i in np.flatnonzero(self._file_types == _BYTE)}
        if found != expected:
            one = min(found - expected or expected - found)
            what = "not one of" if found - expected else "missing among"
            raise TokenizerError(
                f"{fields.source}: {_KEY}tokens: byte token {show(one)} is {what} the 256 from <0x00> to <0xFF>, each "
                f"expected once, with token_type {_BYTE}; {_AGAIN}"
            )

    def _build(self, scores: np.ndarray) -> Any:
        """A sentencepiece model as its trainer would have written it (sentencepiece_model.proto)."""
        import sentencepiece

        types = self._file_types.copy()
        # found in the text before the library sees it, and pieces like others where their spaces were made visible
        types[(types == _USER_DEFINED) | (types == _UNDEFINED)] = _NORMAL
        unknown = np.flatnonzero(types == _UNKNOWN)
        types[unknown[1:]] = _CONTROL  # the library wants exactly one, and text becomes neither
        texts, values, kinds = self._tokens, scores.tolist(), types.tolist()
        if not len(unknown):
            spare = "<unk>"
            while spare in self._id_of:
                spare += ">"
            texts, values, kinds = [*texts, spare], [*values, 0.0], [*kinds, _UNKNOWN]
        pieces = []
        for text, score, kind in zip(texts, values, kinds, strict=True):
            data = text.encode()
            body = b"\x0a" + _varint(len(data)) + data + b"\x15" + _FLOAT(score) + b"\x18" + bytes([kind])
            pieces.append(_message(1, body))  # piece = 1, score = 2, type = 3
        trainer = b"\x18\x02\x98\x02\x01"  # model_type = BPE, byte_fallback = true
        normalizer = b"\x18\x00\x20\x00\x28\x01"  # no dummy prefix, spaces kept as many as they are, and made visible
        model = b"".join(pieces) + _message(2, trainer) + _message(3, normalizer)
        try:
            return sentencepiece.SentencePieceProcessor(model_proto=model)
        except Exception as e:
            raise TokenizerError(
                f"{self.path}: {_KEY}tokens is no SentencePiece vocabulary ({show(str(e))}); {_AGAIN}"
            ) from None

    def _encode_text(self, text: str) -> list[int]:
        return self._sp.encode(text)

    def _text_bytes(self, text: str) -> bytes:
        return text.replace(_SPACE, " ").encode()


class _ByteLevelVocabulary(_Vocabulary):
    """tokenizer.ggml.model "gpt2": text in pieces, split by regular expressions, whose bytes merge in a given order."""

    def __init__(self, fields: _Fields, config: LlamaConfig):
        super().__init__(fields, config)
        self._byte_level = True
        for name in ("add_space_prefix", "remove_extra_whitespaces"):
            fields.flag(name)  # SentencePiece's; llama.cpp does not look at them here either
        alphabet = _byte_alphabet()
        missing = [byte for char, byte in alphabet.items() if char not in self._id_of and byte not in _RARE_BYTES]
        if missing:
            raise TokenizerError(
                f"{fields.source}: {_KEY}tokens holds no token for byte 0x{missing[0]:02X}, expected one for every "
                f"byte of a text{f' ({len(missing)} are missing)' if len(missing) > 1 else ''}; {_AGAIN}"
            )
        for i in np.flatnonzero(self._file_types == _BYTE):
            if _byte(self._tokens[i]) is None:
                raise fields.wrong(f"tokens[{i}]", self._tokens[i], "expected <0x00> to <0xFF> for a byte token")
        # text that merges into one of these is spelled another way; other ends may be ordinary text ("</s>" in HTML)
        guarded = np.isin(self._file_types, (_CONTROL, _UNKNOWN))
        self._guarded = frozenset(int(i) for i in np.flatnonzero(guarded) if len(self._tokens[i]) > 1)
        self._library = self._build(fields)

    def _pre(self, fields: _Fields) -> str:
        name = fields.text("pre", "default")
        if name not in _PRE_TOKENIZERS:
            raise fields.wrong("pre", name, f"expected one of {', '.join(_PRE_TOKENIZERS)}",
                               "use the model's folder with its own tokenizer files instead")  # fmt: skip
        return name

    def _starts(self, fields: _Fields) -> bool:
        return self._pre(fields) in _STARTED

    def _build(self, fields: _Fields) -> Any:
        import tokenizers
        from tokenizers import models, pre_tokenizers

        name = self._pre(fields)
        merges = [tuple(merge.split(" ")) for merge in dict.fromkeys(fields.strings("merges"))]
        if set(map(len, merges)) != {2}:
            merge = next(" ".join(merge) for merge in merges if len(merge) != 2)
            raise TokenizerError(
                f"{fields.source}: {_KEY}merges holds {show(merge)}, expected two tokens and a space between; {_AGAIN}"
            )
        try:
            model = models.BPE(self._id_of, merges, ignore_merges=name in _WHOLE_WORDS)
        except Exception as e:
            for left, right in merges:
                for text in (left, right, left + right):
                    if text not in self._id_of:
                        raise TokenizerError(
                            f"{fields.source}: {_KEY}merges holds {show(f'{left} {right}')}, but {show(text)} is no "
                            f"token, expected both parts and the whole among {_KEY}tokens; {_AGAIN}"
                        ) from None
            raise TokenizerError(f"{fields.source}: {_KEY}merges cannot be used ({show(str(e))}); {_AGAIN}") from None
        library = tokenizers.Tokenizer(model)
        splits = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in _PRE_TOKENIZERS[name]]
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        return library

    def _encode_text(self, text: str) -> list[int]:
        ids = self._library.encode(text, add_special_tokens=False).ids
        if self._guarded.isdisjoint(ids):
            return ids
        return [id for one in ids for id in (self._spell(one) if one in self._guarded else (one,))]

    def _spell(self, one: int) -> Iterable[int]:
        """A token's text as other tokens: its first character and the rest apart."""
        text = self._text_bytes(self._tokens[one]).decode("utf-8", "replace")
        return self._encode_text(text[:1]) + self._encode_text(text[1:])

    def _text_bytes(self, text: str) -> bytes:
        table = _byte_alphabet()
        # with any character outside the alphabet it is text as it stands (tokenizers, ByteLevel decoder)
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


_FLOAT = struct.Struct("<f").pack


def _byte(text: str) -> int | None:
    """The byte that <0x..> stands for."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


def _varint(value: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    if value < 0x80:
        return bytes((value,))
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7)


def _message(number: int, body: bytes) -> bytes:
    """A protobuf field that is a message."""
    return bytes((number << 3 | 2,)) + _varint(len(body)) + body
