"""Text to token ids and back: tokenizer.json (tokenizers) and tokenizer.model (sentencepiece) behind one Tokenizer.

Encoding is the libraries' own. Decoding is this file's, one token at a time, so that a streamed answer and a decoded
one are the same text by construction; the tests hold it against the libraries' decoders.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.models.config import LlamaConfig, read_json, show

_JSON, _MODEL = "tokenizer.json", "tokenizer.model"
_SPACE = "▁"  # U+2581, sentencepiece's visible space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")


def has_tokenizer(folder: str | os.PathLike) -> bool:
    """Whether a model's folder holds tokenizer files at all."""
    return (Path(folder) / _JSON).exists() or (Path(folder) / _MODEL).exists()


def load_tokenizer(folder: str | os.PathLike, config: LlamaConfig) -> Tokenizer:
    """The tokenizer of a model's folder: tokenizer.json where there is one, else tokenizer.model.

    Raises:
        TokenizerError: no such file, not readable by its library, a settings file beside it malformed, or ids beyond
            `config.vocab_size`.
    """
    folder = Path(folder)
    if (folder / _JSON).exists():
        return _FastTokenizer(folder, config)
    if (folder / _MODEL).exists():
        return _SentencePieceTokenizer(folder, config)
    raise TokenizerError(f"{folder}: holds neither {_JSON} nor {_MODEL}; fetch the model again, tokenizer included")


class _Piece(NamedTuple):
    """What one token id decodes to, before what stands around it is looked at."""

    data: bytes  # UTF-8 of a text, or part of it
    is_byte: bool  # one raw byte of a byte-fallback vocabulary
    special: bool
    opaque: bool = False  # never loses a leading space


class Tokenizer(ABC):
    """Text to ids and back.

    vocab_size: ids the tokenizer knows; at most the model's, whose embedding may be padded.
    bos_id, eos_ids: begin of text or None; ends of text, none to several.
    adds_bos: whether this tokenizer's own call puts BOS before a plain text.
    special_ids: control tokens, text -> id. added_ids: these and other tokens found in a text before it is tokenised.
    named: texts of bos_token, eos_token, ... as the settings name them, for templates.
    """

    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    special_ids: dict[str, int]
    added_ids: dict[str, int]
    named: dict[str, str]

    def __init__(self, path: Path, config: LlamaConfig):
        self.path, self._model_vocab = path, config.vocab_size
        self._pieces: dict[int, _Piece | None] = {}
        self._byte_level = False  # every token is raw bytes (GPT-2's alphabet), not text with byte fallback
        self._strip: str | None = None  # which leading space decoding drops: "one", "token" (all of token 0) or None
        self._fallback = False  # tokens like <0xE2> stand for one byte
        self._special_breaks = False  # whether a skipped special token ends a run of byte tokens

    # encoding

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; the empty one has no tokens.
            add_bos: put BOS in front where this tokenizer's own call does (`adds_bos`), and for an empty text
                wherever there is a BOS, since a model must start from something.
            parse_special: special tokens spelled out in the text count as such; otherwise they are text.

        Raises:
            TokenizerError: the text holds lone surrogates, which no encoding of Unicode can express.
        """
        _check(text)
        bos = [self.bos_id] if add_bos and self.bos_id is not None and (self.adds_bos or not text) else []
        if not text:
            return bos
        if parse_special:
            return bos + self._encode_marked(text)
        return bos + self._encode_plain(text)

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Token ids of consecutive parts of one text, special tokens parsed within each part, none across a border.

        Raises:
            TokenizerError: as `encode`.
        """
        ids: list[int] = []
        for part in parts:
            _check(part)
            if part:
                ids += self._encode_rest(part) if ids else self._encode_marked(part)
        return ids

    @abstractmethod
    def _encode_plain(self, text: str) -> list[int]:
        """A text whose special tokens are text."""

    @abstractmethod
    def _encode_marked(self, text: str) -> list[int]:
        """A text whose special tokens are control."""

    @abstractmethod
    def _encode_rest(self, text: str) -> list[int]:
        """As `_encode_marked`, for a part that does not begin the text: without the space put before a first word."""

    # decoding

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids. Bytes that are not UTF-8 become U+FFFD; the space that encoding puts before the
        first word goes.

        Raises:
            TokenizerError: an id outside the model's vocabulary.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([stream.push(one) for one in ids]) + stream.finish()

    def stream(self, *, skip_special: bool = True, starts_text: bool = True) -> StreamDecoder:
        """A decoder for ids that arrive one by one.

        Args:
            skip_special: special tokens yield no text.
            starts_text: the first id begins a text, so its leading space goes; False to continue another text.
        """
        return StreamDecoder(self, skip_special, starts_text)

    def _piece(self, one: int) -> _Piece | None:
        """What an id stands for; None for the padding of the model's vocabulary."""
        if one not in self._pieces:
            if not 0 <= one < max(self._model_vocab, self.vocab_size):
                raise TokenizerError(
                    f"token id {show(one)} is outside the vocabulary, expected 0 to {self._model_vocab - 1}"
                )
            self._pieces[one] = self._make_piece(int(one))
        return self._pieces[one]

    @abstractmethod
    def _make_piece(self, one: int) -> _Piece | None:
        """What an id of the vocabulary stands for."""

    # settings shared by both kinds

    def _read_settings(self, folder: Path) -> dict[str, Any]:
        """tokenizer_config.json, completed by special_tokens_map.json; `named` filled with the tokens' texts."""
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).exists():
                settings |= read_json(folder / name, TokenizerError)
        self._source = folder / "tokenizer_config.json"
        self.named = {}
        for name in _NAMED:
            value = settings.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None:
                if not isinstance(text, str) or not text:
                    raise TokenizerError(f"{self._source}: {name} is {show(value)}, expected a token's text or null")
                self.named[name] = text
        return settings

    def _listed(self, settings: Mapping[str, Any]) -> list[str]:
        """Texts of the further special tokens that the settings list."""
        texts = []
        for name in _LISTED:
            value = settings.get(name) or []
            for one in value.values() if isinstance(value, dict) else value:
                text = one.get("content") if isinstance(one, dict) else one
                if not isinstance(text, str):
                    raise TokenizerError(f"{self._source}: {name} holds {show(one)}, expected a token's text")
                texts.append(text)
        return texts

    def _added_decoder(self, settings: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
        """added_tokens_decoder: [(id, {"content", "special", ...})], by id."""
        value = settings.get("added_tokens_decoder") or {}
        if not isinstance(value, dict):
            raise TokenizerError(f"{self._source}: added_tokens_decoder is {show(value)}, expected {{id: token}}")
        found = []
        for key, token in value.items():
            if (
                not re.fullmatch(r"\d{1,9}", key)
                or not isinstance(token, dict)
                or not isinstance(token.get("content"), str)
            ):
                raise TokenizerError(
                    f"{self._source}: added_tokens_decoder[{show(key)}] is {show(token)}, expected a token with its text"
                )
            found.append((int(key), token))
        return sorted(found, key=lambda item: item[0])

    def _resolve(self, settings: Mapping[str, Any], config: LlamaConfig, id_of: Any, text_of: Any) -> None:
        """bos_id and eos_ids from the settings; from config.json where the settings do not speak of them."""

        def one(name: str) -> int | None:
            if name not in self.named:
                return None
            found = id_of(self.named[name])
            if found is None:
                raise TokenizerError(
                    f"{self._source}: {name} is {show(self.named[name])}, which {self.path.name} does not know; "
                    "take both files from the same model"
                )
            return found

        self.bos_id = one("bos_token")
        if "bos_token" not in settings and config.bos_token_id is not None and text_of(config.bos_token_id) is not None:
            self.bos_id = config.bos_token_id
            self.named["bos_token"] = text_of(self.bos_id)
        eos = one("eos_token")
        self.eos_ids = () if eos is None else (eos,)
        if "eos_token" not in settings:
            self.eos_ids = tuple(one for one in config.eos_token_ids if text_of(one) is not None)
            if self.eos_ids:
                self.named["eos_token"] = text_of(self.eos_ids[0])

    def _check_size(self, highest: int, config: LlamaConfig) -> None:
        if highest >= config.vocab_size:
            raise TokenizerError(
                f"{self.path}: has token ids up to {highest}, config.json's vocab_size is {config.vocab_size}; "
                "the tokenizer and the model do not belong together, fetch both again"
            )


class StreamDecoder:
    """Decodes ids one by one into whole characters; all pieces together are what `Tokenizer.decode` gives.

    A character spread over several tokens appears with the last of them. The cost of a token does not depend on how
    many came before it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, starts_text: bool):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._begun = not starts_text
        self._pending = b""  # byte fallback: up to three bytes of a character
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is whole with this token; "" while a character is unfinished.

        Raises:
            TokenizerError: an id outside the model's vocabulary.
        """
        tokenizer = self._tokenizer
        piece = tokenizer._piece(token)
        if piece is None:
            return ""
        if piece.special and self._skip:
            return self._lead(self._drain(final=True)) if tokenizer._special_breaks else ""
        if tokenizer._byte_level:
            return self._lead(self._utf8.decode(piece.data))
        if piece.is_byte:
            self._pending += piece.data
            return self._lead(self._drain(final=False), byte=True)
        before = self._lead(self._drain(final=True), byte=True)
        text = piece.data.decode("utf-8", "replace")
        if piece.opaque:
            self._begun = True
        if tokenizer._strip == "token" and not self._begun:
            text = text.lstrip(" ")
            self._begun = True
        return before + self._lead(text)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was never finished, else ""."""
        text = self._utf8.decode(b"", final=True) if self._tokenizer._byte_level else self._drain(final=True)
        return self._lead(text, byte=True)

    def _lead(self, text: str, byte: bool = False) -> str:
        """Drops the space that encoding put before the first word."""
        if self._begun or not text:
            return text
        self._begun = True
        strip = self._tokenizer._strip
        if strip == "one" and text[0] == " " and not (byte and self._tokenizer._special_breaks):
            return text[1:]
        return text

    def _drain(self, final: bool) -> str:
        """Whole characters out of the pending bytes; every byte that cannot be part of one becomes U+FFFD."""
        text = ""
        while self._pending:
            try:
                good, used = codecs.utf_8_decode(self._pending, "strict", final)
            except UnicodeDecodeError as e:
                text += self._pending[: e.start].decode("utf-8") + "\ufffd"
                self._pending = self._pending[e.start + 1 :]
                continue
            self._pending = self._pending[used:]
            return text + good
        return text


class _FastTokenizer(Tokenizer):
    """tokenizer.json through the tokenizers library."""

    def __init__(self, folder: Path, config: LlamaConfig):
        super().__init__(folder / _JSON, config)
        import tokenizers

        try:
            raw = (folder / _JSON).read_bytes().decode("utf-8")
            library = tokenizers.Tokenizer.from_str(raw)
        except UnicodeDecodeError as e:
            raise TokenizerError(f"{self.path}: not UTF-8 at byte {e.start}; fetch the file again") from None
        except OSError as e:
            raise TokenizerError(f"{self.path}: cannot be read ({e.strerror or e}); check its permissions") from None
        except Exception as e:  # the library raises bare Exception
            raise TokenizerError(f"{self.path}: not a tokenizer.json ({show(str(e))}); fetch the file again") from None
        library.no_truncation()
        library.no_padding()
        settings = self._read_settings(folder)
        self._library, self._lock = library, threading.Lock()
        self._follow_llama_class(settings, config)
        self._add_special(settings)
        self._set_decoder()
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self.added_ids = {token.content: one for one, token in added.items()}
        self.special_ids = {token.content: one for one, token in added.items() if token.special}
        self._specials = frozenset(self.special_ids.values())
        # ids may have holes, so that the highest is not the count less one
        highest = max(self.vocab_size - 1, max(added, default=0))
        self._check_size(highest, config)
        self._resolve(settings, config, library.token_to_id, library.id_to_token)
        # the file's post-processor decides, as in transformers, whatever add_bos_token says beside it
        starts = library.encode("", add_special_tokens=True).ids[:1]
        self.adds_bos = self.bos_id is not None and starts == [self.bos_id]
        self._newline = self._ids("\n", True)

    def _follow_llama_class(self, settings: Mapping[str, Any], config: LlamaConfig) -> None:
        """What transformers 5's LlamaTokenizer does to a tokenizer.json: it keeps vocabulary and merges and rebuilds
        the rest, which changes what follows a special token (no space is put there unless `legacy`)."""
        library, declared = self._library, settings.get("tokenizer_class")
        if config.architecture != "LlamaForCausalLM" or not isinstance(declared, str):
            return
        if declared.removesuffix("Fast") != "LlamaTokenizer" or type(library.model).__name__ != "BPE":
            return
        if any(b'"ByteLevel"' in one.__getstate__() for one in (library.pre_tokenizer, library.decoder) if one):
            return
        from tokenizers import decoders, pre_tokenizers

        scheme = prefix_scheme(settings)
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
        library.model.fuse_unk = library.model.byte_fallback = True
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        library.decoder = decoders.Sequence(steps + ([] if scheme == "never" else [decoders.Strip(" ", 1, 0)]))

    def _add_special(self, settings: Mapping[str, Any]) -> None:
        """Tokens that the settings call special and tokenizer.json only has in its vocabulary, or not at all."""
        from tokenizers import AddedToken

        library = self._library
        known = {token.content for token in library.get_added_tokens_decoder().values()}
        for one, token in self._added_decoder(settings):
            if token["content"] in known:
                continue
            flags = {key: bool(token.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
            library.add_tokens([AddedToken(token["content"], normalized=bool(token.get("normalized", False)), **flags)])
            known.add(token["content"])
            if library.token_to_id(token["content"]) != one:
                raise TokenizerError(
                    f"{self._source}: added_tokens_decoder gives {show(token['content'])} the id {one}, {_JSON} gives it "
                    f"{library.token_to_id(token['content'])}; take both files from the same model"
                )
        for text in [*self.named.values(), *self._listed(settings)]:
            if text not in known and library.token_to_id(text) is not None:
                library.add_special_tokens([AddedToken(text, normalized=False, special=True)])

    def _set_decoder(self) -> None:
        """Which of the two families of Llama decoders this is, from tokenizer.json's own description."""
        decoder = json.loads(self._library.decoder.__getstate__()) if self._library.decoder is not None else {}
        steps = decoder.get("decoders", [decoder])
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_level = True
        elif kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE:
            self._strip = None if steps[0].get("prepend_scheme") == "never" else "token"
        elif kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            strip = {**steps[-1]} if kinds[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
            if (
                steps[0].get("pattern") != {"String": _SPACE}
                or steps[0].get("content") != " "
                or strip["content"] != " "
                or strip["start"] not in (0, 1)
                or strip["stop"] != 0
            ):
                raise TokenizerError(
                    f"{self.path}: decoder is {show(decoder)}, expected Llama's; this one is not supported"
                )
            self._strip = "one" if strip["start"] else None
            self._fallback = True
        else:
            raise TokenizerError(
                f"{self.path}: decoder is {show(kinds)}, supported are ByteLevel, Metaspace and Llama's sequence of "
                "Replace, ByteFallback, Fuse and Strip; use another model"
            )

    def _ids(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:  # the flag belongs to the library's object, which threads may share
            self._library.encode_special_tokens = not parse_special
            return self._library.encode(text, add_special_tokens=False).ids

    def _encode_plain(self, text: str) -> list[int]:
        return self._ids(text, False)

    def _encode_marked(self, text: str) -> list[int]:
        return self._ids(text, True)

    def _encode_rest(self, text: str) -> list[int]:
        if not self._byte_level:
            # transformers' way: after a newline no space is put before the first word; then drop the newline
            ids = self._ids("\n" + text, True)
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        return self._ids(text, True)

    def _make_piece(self, one: int) -> _Piece | None:
        text = self._library.id_to_token(one)
        if text is None:
            return None
        special = one in self._specials
        if self._byte_level:
            table = _byte_alphabet()
            # a token with any character outside the alphabet is text as it stands (tokenizers, ByteLevel decoder)
            if all(c in table for c in text):
                return _Piece(bytes(table[c] for c in text), False, special)
            return _Piece(text.encode("utf-8", "replace"), False, special)
        match = _BYTE.fullmatch(text) if self._fallback else None
        if match:
            return _Piece(bytes([int(match[1], 16)]), True, special)
        return _Piece(text.replace(_SPACE, " ").encode("utf-8", "replace"), False, special)


class _SentencePieceTokenizer(Tokenizer):
    """tokenizer.model through the sentencepiece library, with the tokens that Hugging Face's files add to it."""

    def __init__(self, folder: Path, config: LlamaConfig):
        super().__init__(folder / _MODEL, config)
        import sentencepiece

        try:
            blob = self.path.read_bytes()
            sp = sentencepiece.SentencePieceProcessor(model_proto=blob)
            # two serialised messages, one after the other, are their union, the last value winning (protobuf): this
            # appends normalizer_spec { add_dummy_prefix: false }
            self._bare = sentencepiece.SentencePieceProcessor(model_proto=blob + b"\x1a\x02\x18\x00")
        except OSError as e:
            raise TokenizerError(f"{self.path}: cannot be read ({e.strerror or e}); check its permissions") from None
        except Exception as e:
            raise TokenizerError(
                f"{self.path}: not a sentencepiece model ({show(str(e))}); fetch the file again"
            ) from None
        self._sp = sp
        size = sp.get_piece_size()
        if size == 0:
            raise TokenizerError(f"{self.path}: holds no pieces; fetch the file again")
        settings = self._read_settings(folder)
        if "bos_token" not in settings and sp.bos_id() >= 0:
            self.named["bos_token"] = settings["bos_token"] = sp.id_to_piece(sp.bos_id())
        if "eos_token" not in settings and sp.eos_id() >= 0:
            self.named["eos_token"] = settings["eos_token"] = sp.id_to_piece(sp.eos_id())
        self._scheme = prefix_scheme(settings)
        strips = self._scheme != "never" and sp.decode([sp.piece_to_id(_SPACE)]) == ""
        self._strip = "one" if strips else None
        self._special_breaks = True

        self.special_ids = {sp.id_to_piece(i): i for i in range(size) if sp.is_control(i)}
        self.added_ids = dict(self.special_ids)
        self.added_ids.update((sp.id_to_piece(i), i) for i in _user_defined(blob))
        self._extra: dict[int, str] = {}  # ids above the sentencepiece vocabulary
        self._swallow_left: set[str] = set()
        self._swallow_right: set[str] = set()
        self._add_tokens(folder, settings, size)
        self.vocab_size = max([size - 1, *self._extra]) + 1
        self._check_size(self.vocab_size - 1, config)
        self._specials = frozenset(self.special_ids.values())

        def id_of(text: str) -> int | None:
            return self.added_ids.get(text, self._base_id(text))

        def text_of(one: int) -> str | None:
            return self._extra.get(one) or (sp.id_to_piece(one) if one < size else None)

        self._resolve(settings, config, id_of, text_of)
        for text in [*self.named.values(), *self._listed(settings)]:
            if id_of(text) is not None:
                self.special_ids[text] = self.added_ids[text] = id_of(text)
        self._specials = frozenset(self.special_ids.values())
        self.adds_bos = self.bos_id is not None and settings.get("add_bos_token", True) is not False
        self._split = self._pattern(self.added_ids)
        ordinary = [text for text, one in self.added_ids.items() if text not in self.special_ids and one >= size]
        self._split_plain = self._pattern(ordinary) if ordinary else None

    def _pattern(self, texts: Iterable[str]) -> re.Pattern[str]:
        """Finds added tokens, the longest first, with the spaces beside them that they swallow (lstrip, rstrip)."""
        wings = {
            text: (r"\s*" if text in self._swallow_left else "", r"\s*" if text in self._swallow_right else "")
            for text in sorted(texts, key=len, reverse=True)
        }
        return re.compile("|".join(f"{a}({re.escape(text)}){b}" for text, (a, b) in wings.items()) or "(?!)")

    def _base_id(self, text: str) -> int | None:
        one = self._sp.piece_to_id(text)
        return one if self._sp.id_to_piece(one) == text else None

    def _add_tokens(self, folder: Path, settings: Mapping[str, Any], size: int) -> None:
        """Tokens of added_tokens.json and added_tokens_decoder, on top of the sentencepiece vocabulary or in it."""

        def add(text: str, one: int, special: bool, source: Path) -> None:
            if one < size and self._sp.id_to_piece(one) != text:
                raise TokenizerError(
                    f"{source}: gives {show(text)} the id {one}, which {_MODEL} gives {show(self._sp.id_to_piece(one))}; "
                    "take both files from the same model"
                )
            self.added_ids[text] = one
            if special:
                self.special_ids[text] = one
            if one >= size:
                self._extra[one] = text

        named = set(self.named.values()) | set(self._listed(settings))
        path = folder / "added_tokens.json"
        if path.exists():
            for text, one in read_json(path, TokenizerError).items():
                if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 1 << 30 or not text:
                    raise TokenizerError(f"{path}: {show(text)} is {show(one)}, expected a token id")
                add(text, one, text in named, path)
        for one, token in self._added_decoder(settings):
            text = token["content"]
            if token.get("single_word"):
                raise TokenizerError(
                    f"{self._source}: added_tokens_decoder[{one}] has single_word, which is not supported beside {_MODEL}; "
                    "use a model with tokenizer.json"
                )
            if text:
                add(text, one, token.get("special") is True or text in named, self._source)
                self._swallow_left |= {text} if token.get("lstrip") else set()
                self._swallow_right |= {text} if token.get("rstrip") else set()

    def _encode_plain(self, text: str) -> list[int]:
        if self._split_plain is not None:
            return self._encode_split(text, self._split_plain, self._scheme)
        return (self._bare if self._scheme == "never" else self._sp).encode(text)

    def _encode_marked(self, text: str) -> list[int]:
        return self._encode_split(text, self._split, self._scheme)

    def _encode_rest(self, text: str) -> list[int]:
        return self._encode_split(text, self._split, self._scheme, begins=False)

    def _encode_split(self, text: str, pattern: re.Pattern[str], scheme: str, begins: bool = True) -> list[int]:
        """Splits at added tokens, then encodes what stands between; the space before a first word as transformers'
        LlamaTokenizer puts it: before the text's first segment ("first"), before each ("always"), or never, and not
        where a space is already."""
        ids: list[int] = []
        start = 0

        def segment(part: str, at: int) -> None:
            if part:
                wants = (scheme == "always" and (begins or at > 0)) or (scheme == "first" and begins and at == 0)
                prefix = wants and part[0] not in (" ", _SPACE)
                ids.extend((self._sp if prefix else self._bare).encode(part))

        for match in pattern.finditer(text):
            segment(text[start : match.start()], start)
            ids.append(self.added_ids[match[match.lastindex]])
            start = match.end()
        segment(text[start:], start)
        return ids

    def _make_piece(self, one: int) -> _Piece | None:
        if one in self._extra:
            return _Piece(self._extra[one].encode("utf-8", "replace"), False, one in self._specials)
        if one >= self._sp.get_piece_size():
            return None
        text = self._sp.id_to_piece(one)
        if self._sp.is_byte(one):
            return _Piece(bytes([int(_BYTE.fullmatch(text)[1], 16)]), True, False)
        if self._sp.is_unknown(one):
            return _Piece(self._sp.decode([one]).encode("utf-8"), False, False, opaque=True)
        return _Piece(text.replace(_SPACE, " ").encode("utf-8", "replace"), False, one in self._specials)


def prefix_scheme(settings: Mapping[str, Any]) -> str:
    """Where a space is put before words: "first" (of the text), "always" (also after special tokens), "never".

    As transformers 5's LlamaTokenizer derives it from `add_prefix_space` and `legacy`.
    """
    if settings.get("add_prefix_space") is False:
        return "never"
    return "always" if settings.get("legacy") is True else "first"


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


def _user_defined(blob: bytes) -> list[int]:
    """Ids of the user-defined symbols of a serialised sentencepiece model, which the library's Python API hides.

    ModelProto begins with its pieces (field 1), each ending with its type (field 3) where that is not NORMAL;
    USER_DEFINED is 4 (sentencepiece_model.proto).
    """
    ids: list[int] = []
    if b"\x18\x04" not in blob:
        return ids
    at = count = 0
    while at < len(blob) and blob[at] == 0x0A:
        length = shift = 0
        at += 1
        while True:
            length |= (blob[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if blob[at - 1] < 0x80:
                break
        at += length
        if blob[at - 2 : at] == b"\x18\x04":
            ids.append(count)
        count += 1
    return ids


_ALPHABET: dict[str, int] = {}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py): character -> byte."""
    if not _ALPHABET:
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [b for b in range(256) if b not in printable]
        _ALPHABET.update({chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)})
    return _ALPHABET
