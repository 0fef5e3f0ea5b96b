"""Tokenizers of a folder: tokenizer.json, tekken.json, or tokenizer.model (sentencepiece)."""

from __future__ import annotations

import base64
import json
import os
import re
from abc import abstractmethod
from collections.abc import Container, Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeGuard

import numpy as np
import numpy.typing as npt

from mlx_llama.core.errors import TokenizerError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.files import read_file, read_json, read_text, reading
from mlx_llama.core.system.forks import cached_property

from .infill import FIM_NAMES
from .sentencepiece_model import (
    NORMALIZER,
    TRAINER,
    read_settings,
    set_space_prefix,
    user_defined_ids,
)
from .tekken import NAMED, read_tekken
from .tokenizer import (
    SPACE,
    WHITE_BYTES,
    Piece,
    Tokenizer,
    byte_alphabet,
    decode_byte_level,
    encode_by_library,
    find_uncovered,
    least_shares,
    library_faults,
)

_JSON, _TEKKEN, _MODEL = "tokenizer.json", "tekken.json", "tokenizer.model"
MOST_BYTES = 1 << 28  # maximum size of a file; the largest in use have 40 million
_NAMED = "bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
_LISTED = ("additional_special_tokens", "extra_special_tokens")

_MANY_TOKENS = 10_000  # added ones, of a tokenizer.json that is counted before its library reads it
_MAX_GROWTH = 1000  # times the length of a text, after normalizing it

PrefixScheme = Literal["first", "always", "never"]


def has_tokenizer(folder: str | os.PathLike[str]) -> bool:
    return any((Path(folder) / name).exists() for name in (_JSON, _TEKKEN, _MODEL))


def load_tokenizer(folder: str | os.PathLike[str], config: LlamaConfig) -> Tokenizer:
    """Load a folder's tokenizer: tokenizer.json, else tekken.json, else tokenizer.model.

    Raises TokenizerError: no such file, unreadable for its library, malformed settings beside it,
    or ids beyond `config.vocab_size`.
    """
    folder = Path(folder)
    for name in (_JSON, _TEKKEN):
        if (folder / name).exists():
            return _FastTokenizer(folder / name, config)
    if (folder / _MODEL).exists():
        return _SentencePieceTokenizer(folder, config)
    raise TokenizerError(
        f"{folder}: contains no {_JSON}, {_TEKKEN} or {_MODEL}; fetch the model again, tokenizer "
        "included"
    )


class _Settings:
    """tokenizer_config.json over special_tokens_map.json. Raises TokenizerError if malformed."""

    def __init__(self, folder: Path):
        self.path = folder / "tokenizer_config.json"
        self.values: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).exists():
                self.values |= read_json(folder / name, TokenizerError)
        # {"bos_token": its text, ...}
        self.named = {
            name: self._text(name, value)
            for name in _NAMED
            if _content(value := self.values.get(name)) is not None
        }
        # texts of further special tokens
        self.listed = [self._text(name, value) for name in _LISTED for value in self._list(name)]
        # [(id, {"content", "special", ...})] of added_tokens_decoder, by id
        self.added = self._read_added()

    def set_default(self, name: str, text: str) -> None:
        """Set a named token that the settings lack."""
        if name not in self.values:
            self.values[name] = self.named[name] = text

    @property
    def prefix_scheme(self) -> PrefixScheme:
        """Words that get a space in front: the "first" word, "always" those after special tokens
        too, or "never".

        As transformers 5's LlamaTokenizer derives it.
        """
        if self.values.get("add_prefix_space") is False:
            return "never"
        return "always" if self.values.get("legacy") is True else "first"

    def _unexpected(self, field: str, value: Any, expected: str) -> TokenizerError:
        return TokenizerError(f"{self.path}: {field} is {show(value)}, expected {expected}")

    def _text(self, field: str, value: Any) -> str:
        text = _content(value)
        if not _is_text(text) or (not text and field in _NAMED):
            raise self._unexpected(field, value, "a token's text")
        return text

    def _list(self, field: str) -> list[Any]:
        values = self.values.get(field) or []
        if not isinstance(values, (list, dict)):
            raise self._unexpected(field, values, "a list of tokens' texts")
        return list(values.values()) if isinstance(values, dict) else values

    def _read_added(self) -> list[tuple[int, dict[str, Any]]]:
        tokens = self.values.get("added_tokens_decoder") or {}
        if not isinstance(tokens, dict):
            raise self._unexpected("added_tokens_decoder", tokens, "{id: token}")
        for key, token in tokens.items():
            field = f"added_tokens_decoder[{show(key)}]"
            if not isinstance(token, dict) or not re.fullmatch(r"\d{1,9}", key):
                raise self._unexpected(field, token, "a token")
            self._text(field, token)
        return sorted(((int(key), token) for key, token in tokens.items()), key=itemgetter(0))


def _content(value: Any) -> Any:
    """A token's text, which stands alone or in an object."""
    return value.get("content") if isinstance(value, dict) else value


def _is_text(value: Any) -> TypeGuard[str]:
    """True for text without lone surrogates, which UTF-8 cannot express."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


class _FolderTokenizer(Tokenizer):
    """BOS, end tokens and vocabulary size, for both kinds of tokenizer."""

    @abstractmethod
    def _id_of(self, text: str) -> int | None:
        """The id of a token's text."""

    @abstractmethod
    def _text_of(self, token: int) -> str | None:
        """The text of a token's id."""

    def _set_ends(self, settings: _Settings, config: LlamaConfig) -> None:
        """Set bos_id and eos_ids from the settings, or from config.json where they lack them."""
        self.named = settings.named

        def find(name: str) -> int | None:
            if name not in self.named:
                return None
            token = self._id_of(self.named[name])
            if token is None:
                raise TokenizerError(
                    f"{settings.path}: {name} is {show(self.named[name])}, which {self.path.name} "
                    "does not contain; take both files from the same model"
                )
            return token

        self.bos_id = find("bos_token")
        if "bos_token" not in settings.values and config.bos_token_id is not None:
            text = self._text_of(config.bos_token_id)
            if text is not None:
                self.bos_id, self.named["bos_token"] = config.bos_token_id, text
        eos = find("eos_token")
        self.eos_ids = () if eos is None else (eos,)
        if "eos_token" not in settings.values:
            texts = {token: self._text_of(token) for token in config.eos_token_ids}
            known = {token: text for token, text in texts.items() if text is not None}
            self.eos_ids = tuple(known)
            if known:
                self.named["eos_token"] = next(iter(known.values()))
        for kind, names in {**FIM_NAMES, "eot": ["▁<EOT>"]}.items():
            self.fim_ids |= zip(
                [kind], [i for name in names if (i := self._id_of(name)) is not None]
            )

    def _check_size(self, highest: int, config: LlamaConfig) -> None:
        if highest >= config.vocab_size:
            raise TokenizerError(
                f"{self.path}: has token ids up to {highest}, config.json's vocab_size is "
                f"{config.vocab_size}; the tokenizer does not match the model, fetch "
                "both again"
            )


class _FastTokenizer(_FolderTokenizer):
    """tokenizer.json or tekken.json through the tokenizers library."""

    def __init__(self, path: Path, config: LlamaConfig):
        super().__init__(path, config)
        settings, unused = _Settings(path.parent), None
        if path.name == _TEKKEN:
            library = read_tekken(path)
            added = library.get_added_tokens_decoder()
            for name, text in NAMED.items():
                if library.token_to_id(text) is not None:
                    settings.set_default(name, text)
        else:
            library, added, unused = self._read_json(settings, config)
        self._check_growth(library)
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._follow_llama_class(settings, config)
        if self._add_special_tokens(settings, unused, config, added):
            added = library.get_added_tokens_decoder()
        self._plain = _make_plain(library, added)
        self._has_byte_tokens = False
        self._set_decoder()
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        self.added_ids = {token.content: i for i, token in added.items()}
        self.special_ids = {token.content: i for i, token in added.items() if token.special}
        self._specials = frozenset(self.special_ids.values())
        # Ids may have gaps: the highest is not always the count minus 1.
        self._check_size(max(self.vocab_size - 1, max(added, default=0)), config)
        self._set_ends(settings, config)
        # As in transformers, the file's post-processor decides, not add_bos_token in the settings.
        with library_faults(self.path):
            starts = library.encode("", add_special_tokens=True).ids[:1]
        self.adds_bos = self.bos_id is not None and starts == [self.bos_id]
        self._newline = self._encode("\n", parse_special=True)

    def _read_json(
        self, settings: _Settings, config: LlamaConfig
    ) -> tuple[Any, dict[int, Any], str | None]:
        """(the library's tokenizer, its added tokens by id, the text of one to leave out) of
        tokenizer.json.
        """
        import tokenizers

        with reading(self.path, TokenizerError):
            text = read_text(self.path, MOST_BYTES)
        with library_faults(self.path, "not a tokenizer.json", "fetch the file again"):
            _check_charsmaps(text)
            if text.count('"content"') > _MANY_TOKENS:  # the library takes seconds
                self._check_count(_count_tokens(text), config)
            library = tokenizers.Tokenizer.from_str(text)
            self._check_count(library.get_vocab_size(with_added_tokens=True), config)
            added = library.get_added_tokens_decoder()  # takes a second for 200,000
            unused = _find_unused(library, added, settings, config.vocab_size)
            if unused is not None:  # without it the library spells its text
                raw = json.loads(text)
                raw["added_tokens"] = [t for t in raw["added_tokens"] if t["content"] != unused]
                library = tokenizers.Tokenizer.from_str(json.dumps(raw))
                del added[config.vocab_size]
        return library, added, unused

    def _check_count(self, count: int, config: LlamaConfig) -> None:
        """Refuse more tokens than the model has, of which one may be unused."""
        if count > config.vocab_size + 1:
            self._check_size(count - 1, config)

    def _id_of(self, text: str) -> int | None:
        return self._library.token_to_id(text)

    def _text_of(self, token: int) -> str | None:
        return self._library.id_to_token(token)

    def _follow_llama_class(self, settings: _Settings, config: LlamaConfig) -> None:
        """Rebuild everything but vocabulary and merges if transformers 5's LlamaTokenizer does.

        Text after a special token then gets a space only if `legacy`.
        """
        library, declared = self._library, settings.values.get("tokenizer_class")
        steps = [step.__getstate__() for step in (library.pre_tokenizer, library.decoder) if step]
        if (
            config.architecture != "LlamaForCausalLM"
            or declared not in ("LlamaTokenizer", "LlamaTokenizerFast")
            or type(library.model).__name__ != "BPE"
            or any(b'"ByteLevel"' in step for step in steps)
        ):
            return
        from tokenizers import decoders, pre_tokenizers

        scheme = settings.prefix_scheme
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
        library.model.fuse_unk = library.model.byte_fallback = True
        strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
        library.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )

    def _add_special_tokens(
        self,
        settings: _Settings,
        unused: str | None,
        config: LlamaConfig,
        added: Mapping[int, Any],
    ) -> bool:
        """Add tokens that only the settings declare, or declare special; returns whether there are
        any. added: the library's by id.

        Where both files have a token, transformers takes its id from tokenizer.json and its flags
        from the settings; a token that either calls special is. unused: the text
        of a token to leave out.
        """
        from tokenizers import AddedToken

        library = self._library
        known = {token.content: token for token in added.values()}
        different, new, changed = [], dict[str, int](), dict[str, Any]()
        for token, fields in settings.added:
            text = fields["content"]
            if text == unused:
                continue
            names = ("single_word", "lstrip", "rstrip", "special", "normalized")
            flags = {name: bool(fields.get(name)) for name in names}
            before, old = new.get(text, library.token_to_id(text)), known.get(text)
            if old is not None:
                flags = {name: bool(fields.get(name, getattr(old, name))) for name in names}
            has_changed = old and any(getattr(old, name) != flags[name] for name in names)
            if old is None or has_changed:
                flags["special"] |= bool(old and old.special)
                known[text] = changed[text] = AddedToken(text, **flags)
            if has_changed or before not in (None, token):
                different.append(text)
            if before is None:
                new[text] = token
        self._check_size(max(new.values(), default=0), config)
        if changed:  # at once: each call takes time for all tokens
            library.add_tokens(list(changed.values()))
        for text, token in new.items():
            if library.token_to_id(text) != token:
                raise TokenizerError(
                    f"{settings.path}: added_tokens_decoder gives {show(text)} the id {token}, "
                    f"{_JSON} gives it {library.token_to_id(text)}; take both files from the same "
                    "model"
                )
        if different:
            self.notices = (
                f"{settings.path}: added_tokens_decoder differs from {_JSON} in "
                f"{show(', '.join(dict.fromkeys(different)))}; using the ids of {_JSON} and the "
                "flags of the settings, as transformers does",
            )
        special = [
            AddedToken(text, normalized=False, special=True)
            for text in dict.fromkeys([*settings.named.values(), *settings.listed])
            if text not in known and library.token_to_id(text) is not None
        ]
        if special:
            library.add_special_tokens(special)
        return bool(changed or special)

    def _check_growth(self, library: Any) -> None:
        """Refuse a normalizer that may exhaust memory, since the library then aborts."""
        growth = 1
        for step in _steps(library.normalizer, "normalizers"):
            content = step.get("content", step.get("prepend", ""))
            if len(content) > 1 or "Regex" in step.get("pattern", {}):
                growth *= 1 + len(content)
        if growth > _MAX_GROWTH:
            raise TokenizerError(
                f"{self.path}: its normalizer can make a text {growth} times as long, supported is "
                f"{_MAX_GROWTH}; use another model"
            )

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        """Known if every step is one of those that keep the text, or drop white space."""
        library, without = self._library, set[int]()
        model, added = library.model, library.get_added_tokens_decoder().values()
        shown_space = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        is_known = type(model).__name__ in ("BPE", "Unigram")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            is_known &= not getattr(model, name, None)
        for step in _steps(library.normalizer, "normalizers"):
            is_known &= step["type"] in ("NFC", "Prepend") or step == shown_space
        for step in _steps(library.pre_tokenizer, "pretokenizers"):
            if step["type"] in ("WhitespaceSplit", "Whitespace"):
                without |= WHITE_BYTES
            elif step.get("behavior") == "Removed":
                is_known &= "String" in step["pattern"]
                without |= {*step["pattern"].get("String", "").encode()}
            else:
                is_known &= step["type"] in ("Split", "ByteLevel", "Metaspace", "Digits")
        if not is_known:
            return np.zeros(256)
        if any(token.lstrip or token.rstrip for token in added):
            without |= WHITE_BYTES
        vocabulary: dict[str, int] = library.get_vocab(with_added_tokens=False)
        texts = [token.content.encode() for token in added]
        if self.byte_level:
            alphabet = byte_alphabet()
            without |= {alphabet[char] for char in alphabet.keys() - vocabulary.keys()}
            texts += map(decode_byte_level, vocabulary)
        else:
            without |= find_uncovered(vocabulary, getattr(model, "byte_fallback", False))
            is_merged = not getattr(model, "ignore_merges", True)
            texts += (
                text.replace(SPACE, " ").encode()
                for text in vocabulary
                if not (is_merged and _spells_byte_only(text, vocabulary))
            )
        return least_shares(texts, without)

    @cached_property
    def _composes(self) -> bool:
        steps = _steps(self._library.normalizer, "normalizers")
        return any(step["type"] == "NFC" for step in steps)

    def _set_decoder(self) -> None:
        """Recognise tokenizer.json's decoder: byte level, Metaspace, or Llama 2's fallback."""
        steps = _steps(self._library.decoder, "decoders")
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self.byte_level = True
        elif kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
            self.dropped_space = None if steps[0].get("prepend_scheme") == "never" else "run"
        elif kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
            replaced = steps[0].get("pattern"), steps[0].get("content")
            no_strip = {"content": " ", "start": 0, "stop": 0}
            strip: dict[str, Any] = steps[3] if kinds[3:] else no_strip
            stripped = strip["content"], strip["stop"]
            if (replaced, stripped) != (({"String": SPACE}, " "), (" ", 0)) or strip["start"] > 1:
                raise TokenizerError(
                    f"{self.path}: decoder is {show(steps)}, expected Llama's; use a model with a "
                    "supported one"
                )
            self.dropped_space = "single" if strip["start"] else None
            self._has_byte_tokens = True
        else:
            raise TokenizerError(
                f"{self.path}: decoder is {show(kinds)}, supported are ByteLevel, Metaspace and "
                "Llama's sequence of Replace, ByteFallback, Fuse and Strip; use another model"
            )

    def _encode(self, text: str, parse_special: bool, starts_text: bool = True) -> list[int]:
        if not starts_text and not self.byte_level:
            # As transformers does: a word after a newline gets no space. Cut the newline off.
            ids = self._encode("\n" + text, parse_special)
            if ids[: len(self._newline)] == self._newline:
                return ids[len(self._newline) :]
        with library_faults(self.path):
            return encode_by_library(self._library if parse_special else self._plain, text)

    def _make_piece(self, token: int) -> Piece | None:
        text = self._library.id_to_token(token)
        if text is None:
            return None
        is_special = token in self._specials
        if self.byte_level:
            return Piece(decode_byte_level(text), is_special=is_special)
        if self._has_byte_tokens and (piece := Piece.of_byte(text, is_special)):
            return piece
        return Piece(text.replace(SPACE, " ").encode("utf-8", "replace"), is_special=is_special)


def _find_unused(
    library: Any, added: Mapping[int, Any], settings: _Settings, vocab_size: int
) -> str | None:
    """The text of a single added token just above the model's vocabulary, as Gemma 3 1B's
    <image_soft_token>; None for none, or a named one.
    """
    is_above = max(added, default=0) == vocab_size
    if not is_above or library.get_vocab_size(with_added_tokens=False) > vocab_size:
        return None
    text: str = added[vocab_size].content
    return None if text in settings.named.values() else text


def _spells_byte_only(text: str, vocabulary: Container[str]) -> bool:
    """True for a token like <0xE2> that no merge can make of this text."""
    pairs = ((text[:i], text[i:]) for i in range(1, len(text)))
    return Piece.of_byte(text) is not None and not any(
        left in vocabulary and right in vocabulary for left, right in pairs
    )


def _make_plain(library: Any, added: Mapping[int, Any]) -> Any:
    """The same tokenizer, to which special tokens are text. The flag belongs to the library's
    object, which threads share; both have one model. added: its added tokens by id.
    """
    plain = type(library)(library.model)
    plain.normalizer, plain.pre_tokenizer = library.normalizer, library.pre_tokenizer
    plain.add_tokens([added[token] for token in sorted(added)])
    plain.encode_special_tokens = True
    return plain


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """Settings of the steps of a normalizer, pre-tokenizer or decoder, with sequences flattened."""
    steps, waiting = [], [json.loads(component.__getstate__())] if component is not None else []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting = [*step[name], *waiting]
        else:
            steps.append(step)
    return steps


def _count_tokens(text: str) -> int:
    """Tokens of a tokenizer.json, 0 for one of another form, which the library refuses."""
    try:
        raw = json.loads(text)
        vocabulary = raw["model"]["vocab"]  # {text: id}, or [[text, score], ...]
        texts = {token if isinstance(token, str) else token[0] for token in vocabulary}
        return len(texts.union(token["content"] for token in raw["added_tokens"]))
    except (KeyError, IndexError, TypeError, ValueError, RecursionError):
        return 0


def _check_charsmaps(text: str) -> None:
    """Check the sizes inside a Precompiled normalizer: the library trusts them, and aborts if
    memory runs out.

    Raises ValueError: a charsmap is truncated.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        for key, value in pairs:
            if key == "precompiled_charsmap" and isinstance(value, str):
                head, nbytes = value[:8] + "=" * (-len(value[:8]) % 4), len(value) * 3 // 4
                size = int.from_bytes(base64.b64decode(head)[:4], "little")
                if not 0 < size + 4 <= nbytes:
                    raise ValueError(
                        f"precompiled_charsmap: a trie of {size} bytes in {nbytes}, truncated"
                    )

    # Parsing a large file takes 0.1 s, so parse only if the key may occur, perhaps with escapes.
    if "precompiled_charsmap" in text or re.search(r"\\u00[2-7]", text):
        json.loads(text, object_pairs_hook=check)


class _SentencePieceTokenizer(_FolderTokenizer):
    """tokenizer.model through the sentencepiece library, plus tokens of Hugging Face's files."""

    def __init__(self, folder: Path, config: LlamaConfig):
        super().__init__(folder / _MODEL, config)
        import sentencepiece

        with reading(self.path, TokenizerError):
            model = read_file(self.path, MOST_BYTES)
        with library_faults(self.path, "not a sentencepiece model", "fetch the file again"):
            make = sentencepiece.SentencePieceProcessor
            library = make(model_proto=model)
            self._without_prefix = make(model_proto=set_space_prefix(model, False))
        self._library = library
        self._size: int = library.get_piece_size()
        if self._size == 0:
            raise TokenizerError(f"{self.path}: contains no pieces; fetch the file again")
        settings = _Settings(folder)
        if library.bos_id() >= 0:
            settings.set_default("bos_token", library.id_to_piece(library.bos_id()))
        if library.eos_id() >= 0:
            settings.set_default("eos_token", library.id_to_piece(library.eos_id()))
        self._scheme = settings.prefix_scheme
        drops = self._scheme != "never" and library.decode([library.piece_to_id(SPACE)]) == ""
        self.dropped_space = "single" if drops else None
        self.special_ends_bytes = True

        control = filter(library.is_control, range(self._size))
        self.special_ids = {library.id_to_piece(i): i for i in control}
        user_defined = {library.id_to_piece(i): i for i in user_defined_ids(model)}
        self.added_ids = self.special_ids | user_defined
        self._extra: dict[int, str] = {}  # tokens above the sentencepiece vocabulary
        self._lstrip: set[str] = set()  # added tokens that absorb the white space before them
        self._rstrip: set[str] = set()  # or after them
        self._add_tokens(folder, settings)
        self.vocab_size = max([self._size - 1, *self._extra]) + 1
        self._check_size(self.vocab_size - 1, config)
        self._set_ends(settings, config)
        for text in [*self.named.values(), *settings.listed]:
            token = self._id_of(text)
            if token is not None:
                self.special_ids[text] = self.added_ids[text] = token
        self._specials = frozenset(self.special_ids.values())
        adds_bos = settings.values.get("add_bos_token", True) is not False
        self.adds_bos = adds_bos and self.bos_id is not None
        self._parsed_pattern = self._build_pattern(self.added_ids)
        above = {text for text, i in self.added_ids.items() if i >= self._size}
        ordinary = above - self.special_ids.keys()
        self._plain_pattern = self._build_pattern(ordinary) if ordinary else None

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        """Known for BPE and unigram models without rules that change characters."""
        library = self._library
        model = library.serialized_model_proto()
        trainer, normalizer = (read_settings(model, part) for part in (TRAINER, NORMALIZER))
        if trainer.get(3, 1) not in (1, 2) or normalizer.get(2):  # model_type, precompiled_charsmap
            return np.zeros(256)
        pieces = [library.id_to_piece(token) for token in range(self._size)]
        without = find_uncovered({*pieces}, bool(trainer.get(35)))  # byte_fallback
        if normalizer.get(4, 1) or self._lstrip or self._rstrip:  # remove_extra_whitespaces
            without |= WHITE_BYTES
        found = [text for token, text in enumerate(pieces) if not library.is_byte(token)]
        texts = (text.replace(SPACE, " ").encode() for text in [*found, *self.added_ids])
        return least_shares(texts, without)

    def _id_of(self, text: str) -> int | None:
        if text in self.added_ids:
            return self.added_ids[text]
        token: int = self._library.piece_to_id(text)
        return token if self._library.id_to_piece(token) == text else None

    def _text_of(self, token: int) -> str | None:
        if token in self._extra:
            return self._extra[token]
        return self._library.id_to_piece(token) if token < self._size else None

    def _build_pattern(self, texts: Iterable[str]) -> re.Pattern[str]:
        """Match added tokens, the longest first, with the white space that they absorb."""
        tokens = []
        for text in sorted(texts, key=len, reverse=True):
            before, after = (r"\s*" * (text in strip) for strip in (self._lstrip, self._rstrip))
            tokens.append(f"{before}({re.escape(text)}){after}")
        return re.compile("|".join(tokens) or "(?!)")

    def _add_tokens(self, folder: Path, settings: _Settings) -> None:
        """Add tokens of added_tokens.json and added_tokens_decoder to the vocabulary."""
        special = {*settings.named.values(), *settings.listed}
        path = folder / "added_tokens.json"
        if path.exists():
            for text, token in read_json(path, TokenizerError).items():
                is_id = type(token) is int and 0 <= token < 1 << 30
                if not is_id or not text or not _is_text(text):
                    raise TokenizerError(
                        f"{path}: {show(text)} is {show(token)}, expected a token id"
                    )
                self._add_token(text, token, text in special, path)
        for token, fields in settings.added:
            text = fields["content"]
            if fields.get("single_word"):
                raise TokenizerError(
                    f"{settings.path}: added_tokens_decoder[{token}] has single_word, which is not "
                    f"supported beside {_MODEL}; use a model with {_JSON}"
                )
            if not text:
                continue
            is_special = fields.get("special") is True or text in special
            self._add_token(text, token, is_special, settings.path)
            self._lstrip |= {text} if fields.get("lstrip") else set()
            self._rstrip |= {text} if fields.get("rstrip") else set()

    def _add_token(self, text: str, token: int, is_special: bool, source: Path) -> None:
        if token < self._size and self._library.id_to_piece(token) != text:
            raise TokenizerError(
                f"{source}: gives {show(text)} the id {token}, which {_MODEL} gives "
                f"{show(self._library.id_to_piece(token))}; take both files from the same model"
            )
        self.added_ids[text] = token
        if is_special:
            self.special_ids[text] = token
        if token >= self._size:
            self._extra[token] = text

    def _encode(self, text: str, parse_special: bool, starts_text: bool = True) -> list[int]:
        """Split at added tokens, and encode the text between them.

        As in transformers' LlamaTokenizer, segments get a leading space by the prefix scheme.
        """
        pattern = self._parsed_pattern if parse_special else self._plain_pattern
        if pattern is None:
            whole = self._without_prefix if self._scheme == "never" else self._library
            return whole.encode(text)
        ids: list[int] = []

        def encode_segment(segment: str, start: int) -> None:
            if segment:
                follows = start > 0  # another segment or an added token of this text
                wanted = (self._scheme == "always" and (starts_text or follows)) or (
                    self._scheme == "first" and starts_text and not follows
                )
                prefix = wanted and segment[0] not in (" ", SPACE)
                ids.extend((self._library if prefix else self._without_prefix).encode(segment))

        start = 0
        for match in pattern.finditer(text):
            encode_segment(text[start : match.start()], start)
            ids.append(self.added_ids[match[match.lastindex or 0]])
            start = match.end()
        encode_segment(text[start:], start)
        return ids

    def _make_piece(self, token: int) -> Piece | None:
        is_special = token in self._specials
        if token in self._extra:
            return Piece(self._extra[token].encode("utf-8", "replace"), is_special=is_special)
        if token >= self._size:
            return None
        text = self._library.id_to_piece(token)
        if self._library.is_byte(token):
            return Piece.of_byte(text)
        if self._library.is_unknown(token):
            return Piece(self._library.decode([token]).encode("utf-8"), keeps_space=True)
        return Piece(text.replace(SPACE, " ").encode("utf-8", "replace"), is_special=is_special)
