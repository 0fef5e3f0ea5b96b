"""The checked reader of foreign fields: those of config.json and of GGUF metadata. Errors name the
file, the field, the value in the file and the values allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.errors import ConfigError, Report, refuse, show

_DECIMAL = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,3})?")
REQUIRED = object()  # in place of a default: the file must have the field


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Field:
    """A number or flag that LlamaConfig takes from a file."""

    name: str  # LlamaConfig's name
    json: str = ""  # its name in config.json, "" if config.json lacks it
    # its key in GGUF metadata, without the architecture's prefix; "" if GGUF lacks it
    gguf: str = ""
    kind: type = int  # int, float or bool
    low: float = 1  # an int is at least `low`, a float above it
    # above all existing models; the size of a tensor in bytes still fits 64 bits
    high: float = 1 << 30
    default: Any = REQUIRED  # in config.json
    gguf_default: Any = REQUIRED
    nullable: bool = False  # null in config.json means that LlamaConfig's default applies
    zero: bool = False  # 0 in GGUF metadata means the same
    skips_zeros: bool = False  # 0 in a list by layer means a layer without
    takes_first: bool = False  # of a list by layer, whose other numbers the family reads
    decode: Callable[[Any], Any] = same  # from a file's value to LlamaConfig's
    encode: Callable[[Any], Any] = same  # and back
    alias: str = ""  # another name in config.json
    placeholder: Any = None  # stands for a value that failed: by default `high`, 1.0 or False


class Reader:
    """Typed access to raw fields. prefix: before each name in errors. report: called with the error
    of a bad field. If it returns, the field gets a placeholder, and its name enters `failed`.
    """

    def __init__(
        self,
        raw: Any,
        source: str,
        prefix: str = "",
        report: Report = refuse,
        is_gguf: bool = False,
    ):
        if not isinstance(raw, dict):
            name = prefix.removesuffix(".") or "config"
            expected = "expected an object with named fields"
            raise ConfigError(f"{source}: {name} is {show(raw)}, {expected}")
        self.raw, self.source, self.prefix, self.is_gguf = raw, source, prefix, is_gguf
        self.remedy = "correct the file, or take the model's own"
        if is_gguf:
            self.remedy = "take another conversion of the model"
        self.report: Report = report
        self.shapes: Mapping[str, tuple[int, ...]] = {}  # of a GGUF file's tensors, by name here
        self.failed: set[str] = set()
        self.notices: list[str] = []  # shared with inner readers

    def inner(self, raw: Any, prefix: str = "") -> Reader:
        """A reader of fields inside, with the same notices and failures."""
        reader = Reader(raw, self.source, prefix, self.report)
        reader.notices, reader.failed = self.notices, self.failed
        return reader

    def part(self, name: str) -> Reader:
        """A reader of the object in a field."""
        return self.inner(self.get(name), f"{self.prefix}{name}.")

    def fail(self, name: str, value: object, expected: str) -> None:
        fault = f"{self.prefix}{name} is {show(value)}, expected {expected}"
        self.report(ConfigError(f"{self.source}: {fault}; {self.remedy}"))

    def get(self, name: str, default: Any = REQUIRED) -> Any:
        value = self.raw.get(name, default)
        if value is REQUIRED:
            raise ConfigError(f"{self.source}: field {self.prefix}{name} is missing; {self.remedy}")
        return value

    def attempt(self, function: Callable[[], Any], otherwise: Any, needs: str = "") -> Any:
        """function(); `otherwise` if it fails, or the field `needs` has failed."""
        if needs in self.failed:
            return otherwise
        report, self.report = self.report, refuse
        try:
            return function()
        except ConfigError as error:
            failure = error
        finally:
            self.report = report
        report(failure)
        return otherwise

    def name(self, field: Field) -> str:
        """The field's name in this file, "" for none."""
        if self.is_gguf:
            return field.gguf
        has_alias = field.alias and field.alias in self.raw and field.json not in self.raw
        return field.alias if has_alias else field.json

    def field(self, field: Field, defaults: Mapping[str, Any]) -> Any:
        """The field's value, None for LlamaConfig's. defaults: before the field's."""
        name = self.name(field)
        if self.is_gguf and field.zero and self.raw.get(name, 1) == 0:
            return None
        default = field.gguf_default if self.is_gguf else defaults.get(field.json, field.default)
        value = self._value(name, field, default, field.nullable and not self.is_gguf)
        return None if value is None else field.decode(value)

    def integer(
        self, name: str, default: Any = REQUIRED, low: int = 1, *, nullable: bool = False
    ) -> Any:
        return self._value(name, Field(name, low=low, placeholder=1), default, nullable)

    def number(
        self, name: str, default: Any = REQUIRED, low: float = 0.0, high: float = 1e12
    ) -> Any:
        """A finite number with low < value <= high; None where the default is."""
        field = Field(name, kind=float, low=low, high=high)
        return self._value(name, field, default, nullable=default is None)

    def boolean(self, name: str, default: bool) -> bool:
        return self._value(name, Field(name, kind=bool), default)

    def refuse(self, name: str, neutral: Sequence[Any], reason: str) -> None:
        """Refuse a field of unsupported arithmetic unless it is null or leaves it out."""
        value = self.raw.get(name)
        if value is not None and not any(
            (type(value) is bool, value) == (type(x) is bool, x) for x in neutral
        ):
            self.fail(name, value, f"{' or '.join(map(json.dumps, neutral))}, since {reason}")

    def tokens(
        self, name: str, default: Any, vocab: int, is_single: bool = False
    ) -> tuple[int, ...]:
        """Token ids from an int, a list or null; in order, without duplicates."""
        return self.attempt(lambda: self._tokens(name, default, vocab, is_single), otherwise=())

    def token(self, name: str, default: Any, vocab: int) -> int | None:
        return next(iter(self.tokens(name, default, vocab, is_single=True)), None)

    def _value(self, name: str, field: Field, default: Any, nullable: bool = False) -> Any:
        failed = object()
        value = self.attempt(lambda: self._check(name, field, default, nullable), failed)
        if value is failed:
            self.failed.add(field.name)
            placeholders: dict[type, float] = {float: 1.0, bool: False}
            usual = placeholders.get(field.kind, field.high)
            return usual if field.placeholder is None else field.placeholder
        return value

    def _check(self, name: str, field: Field, default: Any, nullable: bool) -> Any:
        value, kind, low, high = self.get(name, default), field.kind, field.low, field.high
        if self.is_gguf and kind is int and isinstance(value, list) and value:
            numbers = [x for x in value if x] if field.skips_zeros else value
            if any(other != numbers[0] for other in numbers) and not field.takes_first:
                self.fail(name, value, "the same number for all layers")
            value = numbers[0] if numbers else value[0]
        if value is None and (nullable or name not in self.raw):
            return None
        written = value
        if not self.is_gguf:
            value = self._convert(name, value, kind)
        fits, expected = isinstance(value, bool), "true or false"
        if kind is int:
            fits = type(value) is int and low <= value <= high
            expected = f"a whole number from {low} to {high}"
        elif kind is float:
            fits = type(value) in (int, float) and low < value <= high
            expected = f"a number above {low:g}, up to {high:g}"
        if not fits:
            self.fail(name, written, expected + (" or null" if nullable else ""))
        return float(value) if kind is float else value

    def _convert(self, name: str, value: Any, kind: type) -> Any:
        """256.0 for an int, and "1e-5" for a float, as numbers, with a notice."""
        number = value
        if kind is int and type(value) is float and value.is_integer():
            number = int(value)
        elif kind is float and type(value) is str and _DECIMAL.fullmatch(value):
            number = float(value)
        if number is not value:
            notice = f"{self.source}: {self.prefix}{name} is {show(value)}, read as {number}"
            if notice not in self.notices:
                self.notices.append(notice)
        return number

    def _tokens(self, name: str, default: Any, vocab: int, is_single: bool) -> tuple[int, ...]:
        value = self.get(name, default)
        if is_single and isinstance(value, list):
            self.fail(name, value, "one token id or null")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            is_known = type(token) is int and (0 <= token < vocab or name not in self.raw)
            # -1 means no token in some early conversions.
            if not is_known and (token != -1 or isinstance(token, bool)):
                expected = f"token ids from 0 to {vocab - 1} (vocab_size - 1), or null"
                self.fail(name, value, expected)
        return tuple(dict.fromkeys(token for token in ids if 0 <= token < vocab))
