"""Text to token ids and back: the interface of all tokenizers, and streaming decode.

Libraries encode (hf_tokenizer.py, gguf_tokenizer.py). This file decodes, one token at a time, so that streamed and decoded
text are the same by construction. The tests compare both with the libraries' decoders.
"""

from __future__ import annotations

import codecs
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from mlx_llama.core.errors import LlamaError, TokenizerError
from mlx_llama.core.models.config import LlamaConfig, show

SPACE = "▁"  # U+2581, sentencepiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONG = 100_000  # characters: shorter texts are encoded in no time


class Piece(NamedTuple):
    """The bytes of one token id, before its neighbours are considered."""

    data: bytes  # UTF-8 of a text, or part of it
    is_byte: bool = False  # one raw byte of a byte-fallback vocabulary
    is_special: bool = False
    keeps_space: bool = False  # never loses a leading space


class Tokenizer(ABC):
    """Text to ids and back.

    path: the tokenizer's file.
    vocab_size: ids that the tokenizer knows; at most the model's, whose embedding may be padded.
    bos_id, eos_ids: begin of text, or None; ends of text, none to several.
    adds_bos: whether the tokenizer's own library puts BOS before a text.
    special_ids: control tokens, text -> id. added_ids: these and other tokens found in a text before it is tokenised.
    named: texts of bos_token, eos_token, ..., for templates.

    How ids decode:
    byte_level: every token is raw bytes in GPT-2's alphabet; else text, with tokens like <0xE2> for single bytes.
    dropped_space: of the space before the first word, a "single" one is dropped, the first token's whole "run", or None.
    special_ends_bytes: whether a skipped special token ends a run of byte tokens.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    special_ids: dict[str, int]
    added_ids: dict[str, int]
    named: dict[str, str]
    byte_level: bool = False
    dropped_space: Literal["single", "run"] | None = None
    special_ends_bytes: bool = False

    def __init__(self, path: Path, config: LlamaConfig):
        self.path, self._model_vocab = path, config.vocab_size
        self._pieces: dict[int, Piece | None] = {}
        self.texts: dict[int, str] = {}  # of tokens whose text is the same anywhere but at the start or after an unfinished one

    # Encoding

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        """Encode a text as token ids.

        Args:
            text: any text; the empty one has no tokens.
            add_bos: put BOS first if the tokenizer does (`adds_bos`). An empty text gets any BOS that exists, since a
                model needs a token to start from.
            parse_special: read special tokens in the text as such; else they are text.

        Raises:
            TokenizerError: the text holds a lone surrogate, which UTF-8 cannot express.
        """
        _check(text)
        bos = [self.bos_id] if add_bos and self.bos_id is not None and (self.adds_bos or not text) else []
        if not text:
            return bos
        return bos + (self._encode_parsed(text) if parse_special else self._encode_plain(text))

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Encode consecutive parts of one text, special tokens parsed within each part but not across two.

        Raises:
            TokenizerError: as `encode`.
        """
        ids: list[int] = []
        for part in parts:
            _check(part)
            if part:
                ids += self._encode_continued(part) if ids else self._encode_parsed(part)
        return ids

    def count_at_least(self, text: str) -> int:
        """A lower bound of a long text's number of tokens, without encoding it; 0 for a short text, or if none is known."""
        if len(text) < _LONG or not self._longest_token:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self._longest_token)

    @functools.cached_property
    def _longest_token(self) -> int:
        """The most bytes of a text that become one token; 0 if there is no such number, or it is not known."""
        return 0

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """Encode a text whose special tokens are text."""

    @abstractmethod
    def _encode_parsed(self, text: str) -> list[int]:
        """Encode a text whose special tokens are control."""

    @abstractmethod
    def _encode_continued(self, text: str) -> list[int]:
        """As `_encode_parsed`, without the space before the first word: the text continues another."""

    # Decoding

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decode token ids. Bytes that are not UTF-8 become U+FFFD; the space before the first word is dropped.

        Raises:
            TokenizerError: an id outside the model's vocabulary.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(
        self, *, skip_special: bool = True, starts_text: bool = True, shown: frozenset[int] = frozenset()
    ) -> StreamDecoder:
        """Make a decoder for ids that arrive one by one.

        Args:
            skip_special: special tokens yield no text.
            starts_text: the first id begins a text, so its leading space is dropped; False to continue another text.
            shown: special tokens that yield text all the same, such as those that open a tool call.
        """
        return StreamDecoder(self, skip_special, starts_text, shown)

    def piece(self, token: int) -> Piece | None:
        """The bytes of a token id; None for padding of the model's vocabulary.

        Raises:
            TokenizerError: an id outside the model's vocabulary.
        """
        if token not in self._pieces:
            if not 0 <= token < max(self._model_vocab, self.vocab_size):
                raise TokenizerError(
                    f"token id {show(token)} is outside the vocabulary, expected 0 to {self._model_vocab - 1}"
                )
            self._pieces[token] = self._make_piece(int(token))
        return self._pieces[token]

    def token_bytes(self) -> list[bytes | None]:
        """The bytes that each id adds to a text, by id; None for special and unknown tokens and for padding."""
        specials, added = set(self.special_ids.values()), set(self.added_ids.values())
        pieces = [self.piece(token) for token in range(max(self._model_vocab, self.vocab_size))]
        return [
            # Of the tokens that keep their space, only added ones can be written: not sentencepiece's unknown.
            None if piece is None or piece.is_special or token in specials or piece.keeps_space and token not in added
            else piece.data
            for token, piece in enumerate(pieces)
        ]

    @abstractmethod
    def _make_piece(self, token: int) -> Piece | None:
        """Build the piece of an id of the vocabulary."""


class StreamDecoder:
    """Decodes ids one by one into whole characters; all pieces together are the text of `Tokenizer.decode`.

    A character spread over several tokens appears with the last of them. The cost of a token does not depend on the
    number of tokens before it.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, starts_text: bool, shown: frozenset[int] = frozenset()
    ):
        self._tokenizer, self._skip_special, self._shown = tokenizer, skip_special, shown
        self._started = not starts_text
        self._pending = b""  # byte fallback: up to three bytes of a character
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # byte level

    def push(self, token: int) -> str:
        """Decode one more token; returns "" while a character is unfinished.

        Raises:
            TokenizerError: an id outside the model's vocabulary.
        """
        tokenizer = self._tokenizer
        if self._started and not self._pending and (known := tokenizer.texts.get(token)) is not None:
            return known
        piece = tokenizer.piece(token)
        if piece is None:
            return ""
        if piece.is_special and self._skip_special and token not in self._shown:
            return self._drop_space(self._take_pending(final=True)) if tokenizer.special_ends_bytes else ""
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

    def finish(self) -> str:
        """End the stream; returns U+FFFD for an unfinished character, else ""."""
        text = self._utf8.decode(b"", final=True) if self._tokenizer.byte_level else self._take_pending(final=True)
        return self._drop_space(text, of_bytes=True)

    def _drop_space(self, text: str, of_bytes: bool = False) -> str:
        """Drop the space that encoding put before the first word."""
        if self._started or not text:
            return text
        self._started = True
        # sentencepiece keeps a first space that byte tokens spell.
        kept = of_bytes and self._tokenizer.special_ends_bytes
        return text[1:] if self._tokenizer.dropped_space == "single" and text[0] == " " and not kept else text

    def _take_pending(self, final: bool) -> str:
        """Take whole characters out of the pending bytes; each byte that cannot be part of one becomes U+FFFD."""
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


@contextmanager
def library_faults(path: Path) -> Iterator[None]:
    """Turn what the tokenizers library raises while it encodes into TokenizerError.

    It raises bare Exception, and PanicException, which is a BaseException.
    """
    try:
        yield
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException" or isinstance(e, (LlamaError, MemoryError)):
            raise
        raise TokenizerError(
            f"{path}: its tokenizer cannot encode this text ({show(str(e))}); shorten long runs of one character, or fetch "
            "the tokenizer again"
        ) from None


def parse_byte_token(text: str) -> int | None:
    """The byte that a token like <0xE2> stands for; None for other tokens."""
    match = _BYTE_TOKEN.fullmatch(text)
    return int(match[1], 16) if match else None


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes (openai/gpt-2, encoder.py): character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decode_byte_level(text: str) -> bytes:
    """The bytes of a byte-level token.

    A token with any character outside the alphabet is text as it stands (tokenizers, ByteLevel decoder).
    """
    alphabet = byte_alphabet()
    if all(char in alphabet for char in text):
        return bytes(alphabet[char] for char in text)
    return text.encode("utf-8", "replace")


def _check(text: str) -> None:
    if not isinstance(text, str):
        raise TokenizerError(f"text is {show(text)}, expected a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise TokenizerError(
            f"text holds {show(text[e.start])} at character {e.start}, half of a surrogate pair, which UTF-8 cannot "
            "express; remove it"
        ) from None
