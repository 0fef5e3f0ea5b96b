"""Text to token ids and back: the interface of all tokenizers, and streaming decode.

Libraries encode (hf_tokenizer.py, gguf_tokenizer.py). This file decodes token by token, so that
streamed and decoded text are equal by construction. Tests compare both with the libraries'.
"""

from __future__ import annotations

import codecs
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from mlx_llama.core.errors import LlamaError, TokenizerError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.forks import cached_property

from .controls import replace_surrogates

SPACE = "▁"  # U+2581, sentencepiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONG = 100_000  # characters: shorter texts are encoded in no time
_PART = 1 << 16  # bytes of a text that are counted at once
_UNLOCKED = 10_000  # characters: for shorter texts Python's lock may be held
# Bytes of UTF-8 that white space may have
WHITE_BYTES = frozenset([*range(9, 14), *range(28, 33), *range(0x80, 0xC0), 0xC2, 0xE1, 0xE2, 0xE3])
# ASCII that composes with no mark: all but letters and <=>
_STABLE = [byte for byte in range(128) if not chr(byte).isalpha() and chr(byte) not in "<=>"]


class Piece(NamedTuple):
    """The bytes of a token id, regardless of its neighbours."""

    data: bytes  # UTF-8 of a text, or part of it
    is_byte: bool = False  # a raw byte of a byte-fallback vocabulary
    is_special: bool = False
    keeps_space: bool = False  # never loses a leading space

    @classmethod
    def of_byte(cls, text: str, is_special: bool = False) -> Piece | None:
        """The piece of a token like <0xE2>; None for other tokens."""
        match = _BYTE_TOKEN.fullmatch(text)
        return cls(bytes.fromhex(match[1]), is_byte=True, is_special=is_special) if match else None


class Tokenizer(ABC):
    path: Path  # the tokenizer's file
    # ids that the tokenizer knows; at most the model's, whose embedding may be padded
    vocab_size: int
    bos_id: int | None  # begin of text
    eos_ids: tuple[int, ...]  # ends of text
    adds_bos: bool  # the tokenizer's library puts BOS before a text
    special_ids: dict[str, int]  # control tokens: text -> id
    added_ids: dict[str, int]  # these, and other tokens that are found before a text is tokenised
    fim_ids: dict[str, int]  # tokens for fill-in-the-middle, by the names in infill.py
    named: dict[str, str]  # texts of bos_token, eos_token, ..., for templates
    notices: tuple[str, ...] = ()  # for the user, about the choices that were made
    # Decoding
    # tokens are bytes in GPT-2's alphabet; else text, with tokens like <0xE2> for single bytes
    byte_level: bool = False
    # before the first word: one space, or all of the first token's
    dropped_space: Literal["single", "run"] | None = None
    special_ends_bytes: bool = False  # a skipped special token ends a run of byte tokens

    def __init__(self, path: Path, config: LlamaConfig):
        self.path, self._model_vocab = path, config.vocab_size
        self.fim_ids = {}
        self._pieces: dict[int, Piece | None] = {}
        # texts of tokens that read the same anywhere but at the start or after an unfinished one
        self.texts: dict[int, str] = {}

    # Encoding

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        """Encode a text as token ids.

        add_bos: put BOS first if the tokenizer does (`adds_bos`). An empty text always gets BOS, to
        start from. parse_special: parse special tokens; else they are text. A lone surrogate is
        encoded as U+FFFD.
        """
        text = _check(text)
        bos: list[int] = []
        if add_bos and self.bos_id is not None and (self.adds_bos or not text):
            bos = [self.bos_id]
        return bos + self._encode(text, parse_special) if text else bos

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Encode consecutive parts of a text; special tokens are parsed within a part alone."""
        ids: list[int] = []
        for part in map(_check, parts):
            if part:
                ids += self._encode(part, parse_special=True, starts_text=not ids)
        return ids

    def count_at_least(self, text: str) -> int:
        """A lower bound of a long text's tokens, without encoding it; 0 if short or unknown."""
        if len(text) < _LONG:
            return 0
        shares = self._shares
        if self._composes and not text.isascii():
            # A letter and its marks may become one character, of at least a third of their bytes.
            composed = np.full(256, shares.min() / 3)
            composed[_STABLE] = shares[_STABLE]
            shares = composed
        spelled = text if self.byte_level else text.replace(SPACE, " ")
        data = np.frombuffer(spelled.encode("utf-8", "surrogatepass"), np.uint8)
        # NumPy widens bytes to words: parts stay in the processor's cache
        parts = (data[at : at + _PART] for at in range(0, len(data), _PART))
        return int(sum(np.bincount(part, minlength=256) for part in parts) @ shares)

    # Each byte of a text is within a token, and takes a share of it: a token of n bytes has n
    # shares of 1/n.

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        """The least share of a token that each byte of a text takes: [256]; 0 if it may take none,
        or if this is unknown. Texts are spelled without `SPACE`.
        """
        return np.zeros(256)

    @cached_property
    def _composes(self) -> bool:
        """True if NFC comes first: `_shares` are those of the text after it."""
        return False

    @abstractmethod
    def _encode(self, text: str, parse_special: bool, starts_text: bool = True) -> list[int]:
        """Encode a text. starts_text: False for a continuation: no space comes first."""

    # Decoding

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode token ids. Bytes that are not UTF-8 become U+FFFD; the first word loses its space.

        Raises TokenizerError: an id outside the model's vocabulary.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(
        self,
        *,
        skip_special: bool = True,
        starts_text: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> StreamDecoder:
        """Make a decoder of streamed ids.

        skip_special: drop special tokens. starts_text: the first id begins a text, so drop its
        leading space; False to continue a text. shown: special tokens that are never dropped, such
        as those that open a tool call.
        """
        return StreamDecoder(self, skip_special, starts_text, shown)

    def piece(self, token: int) -> Piece | None:
        """The bytes of a token id; None for padding of the model's vocabulary.

        Raises TokenizerError: an id outside the model's vocabulary.
        """
        if token not in self._pieces:
            if not 0 <= token < max(self._model_vocab, self.vocab_size):
                raise TokenizerError(
                    f"token id {show(token)} is outside the vocabulary, expected 0 to "
                    f"{self._model_vocab - 1}"
                )
            self._pieces[token] = self._make_piece(int(token))
        return self._pieces[token]

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id adds to a text; None for special, unknown and padding ids."""
        specials, added = set(self.special_ids.values()), set(self.added_ids.values())

        def find(token: int) -> bytes | None:
            piece = self.piece(token)
            if piece is None or piece.is_special or token in specials:
                return None
            # sentencepiece's unknown token keeps its space, but is no added token
            return None if piece.keeps_space and token not in added else piece.data

        return [find(token) for token in range(max(self._model_vocab, self.vocab_size))]

    def find_special(self, marks: Iterable[str]) -> frozenset[int]:
        """Ids of those marks that are special tokens."""
        return frozenset(self.special_ids[mark] for mark in marks if mark in self.special_ids)

    @abstractmethod
    def _make_piece(self, token: int) -> Piece | None:
        """Build the piece of an id of the vocabulary."""


@dataclass(eq=False)
class StreamDecoder:
    """Decodes streamed ids to whole characters; the joined pieces equal `Tokenizer.decode`.

    A character that spans several tokens appears with the last of them. The cost per token is
    constant.
    """

    tokenizer: Tokenizer
    skip_special: bool
    starts_text: InitVar[bool]
    shown: frozenset[int] = frozenset()  # special tokens that are not dropped

    def __post_init__(self, starts_text: bool) -> None:
        self._started = not starts_text
        self._pending = b""  # byte fallback: up to three bytes of a character
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # byte level

    def push(self, token: int) -> str:
        """Decode a token; returns "" while a character is unfinished.

        Raises TokenizerError: an id outside the model's vocabulary.
        """
        tokenizer = self.tokenizer
        known = tokenizer.texts.get(token) if self._started and not self._pending else None
        if known is not None:
            return known
        piece = tokenizer.piece(token)
        if piece is None:
            return ""
        if piece.is_special and self.skip_special and token not in self.shown:
            ends_bytes = tokenizer.special_ends_bytes
            return self._drop_space(self._take_pending(final=True)) if ends_bytes else ""
        if tokenizer.byte_level:
            return self._drop_space(self._utf8.decode(piece.data))
        if piece.is_byte:
            self._pending += piece.data
            return self._drop_space(self._take_pending(final=False), of_bytes=True)
        before = self._drop_space(self._take_pending(final=True), of_bytes=True)
        text = piece.data.decode("utf-8", "replace")
        if not piece.is_special:
            tokenizer.texts[token] = text
        if piece.keeps_space:
            self._started = True
        if tokenizer.dropped_space == "run" and not self._started:
            text = text.lstrip(" ")
            self._started = True
        return before + self._drop_space(text)

    @property
    def is_within_character(self) -> bool:
        """True if the next token continues a character."""
        return bool(self._pending or self._utf8.getstate()[0])

    def data(self, token: int) -> bytes:
        piece = self.tokenizer.piece(token)
        return piece.data if piece else b""

    def finish(self) -> str:
        """End the stream; returns U+FFFD for an unfinished character, else ""."""
        is_byte_level = self.tokenizer.byte_level
        text = self._utf8.decode(b"", final=True) if is_byte_level else self._take_pending(True)
        return self._drop_space(text, of_bytes=True)

    def _drop_space(self, text: str, of_bytes: bool = False) -> str:
        """Drop the space that encoding added before the first word."""
        if self._started or not text:
            return text
        self._started = True
        # sentencepiece keeps a first space that is spelled by byte tokens.
        kept = of_bytes and self.tokenizer.special_ends_bytes
        drops = self.tokenizer.dropped_space == "single" and not kept
        return text.removeprefix(" ") if drops else text

    def _take_pending(self, final: bool) -> str:
        """Take whole characters from the pending bytes; stray bytes become U+FFFD."""
        text = ""
        while self._pending:
            try:
                decoded, used = codecs.utf_8_decode(self._pending, "strict", final)
            except UnicodeDecodeError as e:
                text += self._pending[: e.start].decode("utf-8") + "\ufffd"
                self._pending = self._pending[e.start + 1 :]
                continue
            self._pending = self._pending[used:]
            return text + decoded
        return text


def encode_by_library(library: Any, text: str) -> list[int]:
    """Ids by the tokenizers library. A long text leaves Python's lock to other threads: `encode`
    holds it all the time, a batch does not.
    """
    if len(text) < _UNLOCKED:
        ids: list[int] = library.encode(text, add_special_tokens=False).ids
        return ids
    (encoding,) = library.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)


def find_uncovered(vocabulary: Container[str], has_bytes: bool) -> set[int]:
    """Bytes of characters that may be unknown to a vocabulary of text, which joins them to one
    token. has_bytes: it spells unknown characters with tokens like <0xE2>.
    """

    def covers(char: str) -> bool:
        spelled = (f"<0x{byte:02X}>" in vocabulary for byte in char.encode())
        return char in vocabulary or (has_bytes and all(spelled))

    covered = {byte for byte in range(128) if covers(chr(byte))}
    if not covers(SPACE):
        covered -= {ord(" ")}
    if has_bytes and all(f"<0x{byte:02X}>" in vocabulary for byte in range(128, 256)):
        covered |= set(range(128, 256))
    return set(range(256)) - covered


def least_shares(tokens: Iterable[bytes], without: Iterable[int] = ()) -> npt.NDArray[np.float64]:
    """`Tokenizer._shares` of a vocabulary. without: bytes that may take no token."""
    by_length: dict[int, list[bytes]] = {}
    for data in tokens:
        by_length.setdefault(len(data), []).append(data)
    longest = np.ones(256)
    for length in sorted(filter(None, by_length)):
        longest[list(set(b"".join(by_length[length])))] = length
    shares = 1 / longest
    shares[list(without)] = 0
    return shares


@contextmanager
def library_faults(
    path: Path,
    fault: str = "its tokenizer cannot encode this text",
    remedy: str = "shorten long runs of one character, or fetch the tokenizer again",
) -> Iterator[None]:
    """Turn the tokenizers library's errors, a PanicException too, into TokenizerError."""
    try:
        yield
    except (LlamaError, MemoryError):
        raise
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{path}: {fault} ({show(str(e))}); {remedy}") from None


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters of the 256 bytes (openai/gpt-2, encoder.py), by byte."""
    printable = [*range(ord("!"), 0x7F), *range(ord("¡"), 0xAD), *range(ord("®"), 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def decode_byte_level(text: str) -> bytes:
    """The bytes of a byte-level token.

    A token with any character outside the alphabet is plain text (tokenizers, ByteLevel decoder).
    """
    alphabet = byte_alphabet()
    if all(char in alphabet for char in text):
        return bytes(alphabet[char] for char in text)
    return text.encode("utf-8", "replace")


def _check(text: str) -> str:
    if not isinstance(text, str):
        raise TokenizerError(f"text is {show(text)}, expected a string")
    return replace_surrogates(text)
