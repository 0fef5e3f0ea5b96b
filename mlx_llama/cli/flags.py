"""Flags made from core's tables of options, and suggestions for flags of other tools."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection
from typing import Any, NoReturn

from mlx_llama.core.backends.load_options import TABLE, LoadOptions
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.generation.options import ENDLESS, FIELDS, MAX_GRAMMAR
from mlx_llama.core.generation.schema import MAX_CHARACTERS

from .spelling import FLAGS, flag_of

# Flags of llama.cpp, vLLM and mlx-lm -> those with the same purpose here.
FOREIGN_FLAGS = {
    "-m": "--model",
    "-hf": "--model",
    "--hf-repo": "--model",
    "-hfr": "--model",
    "-md": "--draft-model",
    "-t": "--threads",
    "-ngl": "--device",
    "--n-gpu-layers": "--device",
    "--gpu-layers": "--device",
    "--max-model-len": "--ctx-size",
    "--lora-modules": "--adapters",
    "--lora-scaled": "--adapters",
    "-ctk": "--cache-bits",
    "--cache-type-k": "--cache-bits",
    "--kv-cache-dtype": "--cache-bits",
    "--max-new-tokens": "--max-tokens",
    "--max-num-seqs": "--max-rows",
    "--extra-eos-token": "--stop-token-ids",
    "--hf-path": "--model",
}
# -1 as in llama.cpp: no limit, or a new seed each time.
_MINUS_ONE = {"max_tokens": str(ENDLESS), "seed": None, "repetition_context_size": "65536"}
# As in llama.cpp: the model's context, and a number of threads chosen by us.
_UNSET = {"ctx_size": "0", "threads": "-1"}


class Parser(argparse.ArgumentParser):
    """argparse that raises OptionsError, so that all commands print errors alike, in one line, and
    that suggests known flags.
    """

    def __init__(self, command: str = "", description: str = ""):
        super().__init__(
            prog=f"python -m mlx_llama.{command}", description=description, allow_abbrev=False
        )
        self.add_argument("--debug", action="store_true", help="show tracebacks")

    def parse_known_args(self, args=None, namespace=None):
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._arguments, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = [
            argument.partition("=")[0] for argument in self._arguments if self._is_unknown(argument)
        ]
        suggestions = {name: near for name in unknown if (near := self._suggest(name))}
        if suggestions:
            raise OptionsError(
                "; ".join(
                    f"there is no flag {name} (did you mean {near}?)"
                    for name, near in suggestions.items()
                )
            )
        raise OptionsError(f"{message} (see --help)")

    def _is_unknown(self, argument: str) -> bool:
        name = argument.partition("=")[0]
        if not re.match(r"--?[A-Za-z]", name) or name in self._option_string_actions:
            return False
        return name in FOREIGN_FLAGS or name[:2] not in self._option_string_actions  # -m5 is -m 5

    def _suggest(self, flag: str) -> str:
        """The flag that was probably meant, "" for none."""
        if FOREIGN_FLAGS.get(flag) in self._option_string_actions:
            return FOREIGN_FLAGS[flag]
        return next(
            iter(difflib.get_close_matches(flag.replace("_", "-"), self._option_string_actions, 1)),
            "",
        )


def flags_of(name: str, aliases: Collection[str]) -> list[str]:
    """All flags of an option, the preferred one first."""
    plain = [] if name in FLAGS else [name]
    spelled = [
        ("-" if len(alias) < 3 else "--") + alias.replace("_", "-") for alias in (*plain, *aliases)
    ]
    extra = ["--temperature"] if name == "temperature" else []
    return list(dict.fromkeys([flag_of(name), *spelled, *extra]))


def option_flags(name: str) -> list[str]:
    """All flags of a generation option, the preferred one first."""
    extra: Any = FIELDS[name].json_schema_extra
    return flags_of(name, extra["aliases"])


def add_generation_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag per option. Values stay text, so that one check reports all bad ones."""
    group = parser.add_argument_group("generation options")
    for name, field in FIELDS.items():
        repeats = name in ("stop", "stop_token_ids", "logit_bias", "dry_sequence_breakers")
        default = f" (default: {field.default})" if field.default not in (None, (), {}) else ""
        if name == "max_tokens":
            default = " (default: -1, no limit but the context)"
        group.add_argument(
            *option_flags(name),
            dest=f"option:{name}",
            default=argparse.SUPPRESS,
            action="append" if repeats else "store",
            metavar=name.split("_")[-1].upper(),
            help=(field.description + field.json_schema_extra["flag_help"]).replace("%", "%%")
            + default,
        )


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The generation options on a command line, by name. Reads files of schema and grammar.

    Raises OptionsError for a file that cannot be read.
    """
    values = {
        name.removeprefix("option:"): value
        for name, value in vars(arguments).items()
        if name.startswith("option:")
    }
    if re.search(r"[/\\]|\.gguf$", values.get("max_tokens", "")):
        raise OptionsError(
            f"-m {values['max_tokens']!r:.200}: is --max-tokens here, a number: did you mean "
            "--model?"
        )
    for name in ("schema", "grammar"):
        if name in values:
            values[name] = _read_file(name, values[name])
    for name, meaning in _MINUS_ONE.items():
        if values.get(name) == "-1":
            values[name] = meaning
    return {name: value for name, value in values.items() if value is not None}


def _read_file(name: str, value: str) -> str:
    """The text of a file, or `value` itself if it is a schema (starts with a brace) or a grammar
    (has rules).
    """
    if (
        value.lstrip().startswith("{")
        if name == "schema"
        else re.search(r"\bstart\s*:|\broot\s*::=", value)
    ):
        return value
    try:
        with open(os.path.expanduser(value), encoding="utf-8") as file:
            # one more than allowed, for the check of the length
            return file.read(max(MAX_CHARACTERS, MAX_GRAMMAR) + 1)
    except (OSError, ValueError) as error:
        reason = (
            "it is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else getattr(error, "strerror", None) or error
        )
        raise OptionsError(
            f"option `{name}`: the file {value!r:.200} cannot be read ({reason}): check its name"
        ) from None


def add_load_flags(
    parser: argparse.ArgumentParser,
    without: Collection[str] = ("max_rows",),
    only: Collection[str] = (),
) -> None:
    """Add flags for load options: all but `without`, or those of `only`. Values stay text until
    Limits.check.
    """
    group = parser.add_argument_group("model")
    for name, field in TABLE.items():
        about = field.metadata
        if not about["is_flag"] or name in without or (only and name not in only):
            continue
        kwargs: dict[str, Any] = {
            "metavar": about["metavar"] or f"{{{','.join(map(str, about['choices']))}}}"
        }
        if about["is_negatable"]:
            kwargs = {"action": argparse.BooleanOptionalAction}
        elif "bool" in str(field.type):
            kwargs = {"action": "store_true"}
        elif name == "adapters":
            kwargs["action"] = "append"
        group.add_argument(
            *flags_of(name, about["aliases"]),
            dest=name,
            default=field.default,
            help=about["help"] + about["flag_help"],
            **kwargs,
        )


def parse_number(
    flag: str, text: str | None, minimum: float, maximum: float, is_whole: bool = True
) -> Any:
    """The number of a flag, None without the flag. Raises OptionsError."""
    try:
        value = text if text is None else int(text) if is_whole else float(text)
    except ValueError:
        value = maximum + 1
    if text is not None and not (
        text.isascii() and "_" not in text and minimum <= value <= maximum
    ):
        raise OptionsError(
            f"{flag} {text!r:.40}: must be a {'whole ' if is_whole else ''}number, {minimum:.9g} "
            f"to {maximum:.9g}"
        )
    return value


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """The load options on a command line; those without a flag have their defaults."""
    values = {name: value for name, value in vars(arguments).items() if name in TABLE}
    return LoadOptions(
        **values | {name: None for name, unset in _UNSET.items() if values.get(name) == unset}
    )
