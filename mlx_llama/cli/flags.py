"""Flags made from core's table of options, and suggestions for flags of other tools."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from mlx_llama import __version__
from mlx_llama.core.answers.schema import MAX_CHARACTERS
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import FIELDS, LOAD_FIELDS, MAX_GRAMMAR, LoadOptions, about

from .running import FLAGS, flag_of, say

# Flags of llama.cpp, vLLM, Ollama and mlx-lm, and guesses -> those with the same purpose here.
FOREIGN_FLAGS = {
    foreign: ours
    for ours, names in {
        "--model": "-m -hf --hf-repo -hfr --hf-path --load --path --model-path --checkpoint",
        "--draft-model": "-md",
        "--threads": "-t",
        "--ctx-size": "--max-model-len --num-ctx",
        "--adapters": "--lora-modules --lora-scaled",
        "--cache-bits": "-ctk -ctv --cache-type-k --cache-type-v --kv-cache-dtype",
        "--max-tokens": "--max-new-tokens",
        "--max-rows": "--max-num-seqs",
        "--device": "--gpu",
        "--stop-token-ids": "--extra-eos-token",
        "--system-prompt": "--system",
        "--cache-memory": "--cache-ram",
        "--ignore-chat-template": "-no-cnv --no-conversation",
    }.items()
    for foreign in names.split()
}
# Flags of llama.cpp and mlx-lm that are accepted and change nothing: names, nargs, reason.
_DEVICE = "the whole model runs on the device that --backend and --device choose"
_FILES = "the operating system's page cache holds the file"
NEEDLESS_FLAGS: tuple[tuple[Sequence[str], int | str, str], ...] = (
    (("-ngl", "--gpu-layers", "--n-gpu-layers"), 1, _DEVICE),
    (("-sm", "--split-mode"), 1, _DEVICE),
    (("-mg", "--main-gpu"), 1, _DEVICE),
    (("-fa", "--flash-attn"), "?", "attention is always fused where a kernel exists"),
    (("--no-mmap", "--mmap"), 0, _FILES),
    (("--mlock",), 0, _FILES),
    (("--numa",), 1, "threads stay on the cores that the operating system chooses"),
    (("-cb", "--cont-batching", "-kvu", "--kv-unified"), 0, "requests are always batched"),
    (("-cnv", "--conversation"), 0, "chat is a conversation, generate one prompt"),
    (
        ("--jinja", "--no-jinja", "--use-default-chat-template"),
        0,
        "the model's chat template is always used",
    ),
    (("--no-warmup",), 0, "there is no warm-up"),
    (("--no-display-prompt",), 0, "the prompt is never printed"),
    (("-co", "--color", "--simple-io", "--log-disable"), 0, "stdout holds the answer alone"),
    (("--trust-remote-code",), 0, "code from a checkpoint never runs"),
)
SIMILAR = 0.8  # minimum difflib ratio for a suggested flag, dashes included
# Listed first in --help.
COMMON = "model backend ctx_size max_tokens temperature top_p seed system_prompt prompt".split()
PROMPT_CACHE = "start from the keys and values in this file, if it exists, and save them at the end"
_REPEATED = ("stop", "stop_token_ids", "logit_bias", "dry_sequence_breakers", "adapters")
# As in llama.cpp: the model's context, and a number of threads chosen by us.
_UNSET = {"ctx_size": "0", "threads": "-1"}


class _Needless(argparse.Action):
    """Say why a flag of another tool is not needed, and go on."""

    def __call__(self, parser, namespace, values, option_string=None):
        say(f"({option_string} is not needed: {self.const})")


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps the description, and leaves the examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:") else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """argparse that raises OptionsError, so that all commands print errors alike, in one line, and
    that suggests known flags.
    """

    def __init__(
        self, command: str = "", description: str = "", examples: str = "", arguments: str = ""
    ):
        prog = f"python -m mlx_llama.{command}"
        super().__init__(
            prog=prog,
            usage=f"%(prog)s [options]{arguments and ' ' + arguments}",
            description=description,
            epilog="".join(f"\n  {prog} {line}" for line in examples.split("\n") if line),
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.common = self.add_argument_group("common options")
        self.others = self.add_argument_group("options")
        self.add_argument("-h", "--help", action="help", help="show this help and exit")
        self.add_argument("--version", action="version", version=f"mlx_llama {__version__}")
        self.add_argument("--debug", action="store_true", help="show tracebacks")
        if examples:
            self.epilog = "examples:" + self.epilog

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        """Add a flag to the common options or to the others, a positional argument before both."""
        is_flag = names[0].startswith("-")
        group = self.group_of(names[0], self.others) if is_flag else super()
        return group.add_argument(*names, **settings)

    def group_of(self, name: str, group: argparse._ArgumentGroup) -> argparse._ArgumentGroup:
        """The common options for an option of COMMON, else `group`."""
        return self.common if name.lstrip("-").replace("-", "_") in COMMON else group

    def parse_known_args(self, args=None, namespace=None):
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._arguments, namespace)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse takes -f for -fa, with allow_abbrev=False too, and -hf for -h -f
        if not self._has_value(option_string):
            return []
        matches: list[Any] = super()._get_option_tuples(option_string)
        return [match for match in matches if not match[1].startswith(option_string)]

    def _has_value(self, argument: str) -> bool:
        """True for a short flag and its value in one word, as in -m5."""
        action = self._option_string_actions.get(argument[:2])
        is_foreign = argument.partition("=")[0] in FOREIGN_FLAGS
        return action is not None and action.nargs != 0 and not is_foreign

    def error(self, message: str) -> NoReturn:
        unknown = [
            argument.partition("=")[0] for argument in self._arguments if self._is_unknown(argument)
        ]
        suggestions = {name: near for name in unknown if (near := self._suggest(name))}
        if suggestions:
            parts = [
                f"there is no flag {n} (did you mean {near}?)" for n, near in suggestions.items()
            ]
            raise OptionsError("; ".join(parts))
        if unknown and "unrecognized" not in message:
            message = f"unrecognized arguments: {' '.join(unknown)}"
        raise OptionsError(f"{message} (see --help)")

    def _is_unknown(self, argument: str) -> bool:
        name = argument.partition("=")[0]
        if not re.match(r"--?[A-Za-z]", name) or name in self._option_string_actions:
            return False
        return not self._has_value(name)

    def _suggest(self, flag: str) -> str:
        """The flag that was probably meant, "" for none."""
        if FOREIGN_FLAGS.get(flag) in self._option_string_actions:
            return FOREIGN_FLAGS[flag]
        name, known = flag.replace("_", "-"), self._option_string_actions
        if len(name) < 4:
            return ""

        def is_near(other: str) -> bool:
            is_longer = other.startswith(name) or other.endswith(name[1:])
            return is_longer or (len(other) > 3 and name.startswith(other))

        def rank(other: str) -> tuple[bool, int]:  # names before aliases, long ones first
            return known[other].option_strings[0] != other, -len(other)

        near = difflib.get_close_matches(name, known, 1, SIMILAR)
        near += sorted(filter(is_near, known), key=rank)
        return near[0] if near else ""


def flags_of(name: str) -> list[str]:
    """All flags of an option of either table, the preferred one first."""
    names = [
        *([] if name in FLAGS else [name]),
        *about(FIELDS.get(name) or LOAD_FIELDS[name])["aliases"],
    ]
    spelled = [("-" if len(alias) < 3 else "--") + alias.replace("_", "-") for alias in names]
    extra = ["--temperature"] if name == "temperature" else []
    return list(dict.fromkeys([flag_of(name), *spelled, *extra]))


def _add_option(
    parser: Parser, group: argparse._ArgumentGroup, name: str, default: Any, told: str = ""
) -> None:
    """Add the flag of an option of either table, whose value stays text. told: more help."""
    entry = FIELDS.get(name) or LOAD_FIELDS[name]
    known, kind = about(entry), entry.annotation
    settings: dict[str, Any] = {"action": "append" if name in _REPEATED else "store"}
    if known.get("is_negatable"):
        settings["action"] = argparse.BooleanOptionalAction
    elif kind is bool or kind == bool | None:
        settings["action"] = "store_true"
    else:
        choices = ",".join(map(str, known.get("choices", ())))
        last = name.split("_")[-1].upper()
        settings["metavar"] = known.get("metavar") or (f"{{{choices}}}" if choices else last)
    help = f"{entry.description}{known['flag_help']}".replace("%", "%%") + told
    add = parser.group_of(name, group).add_argument
    add(*flags_of(name), dest=name, default=default, help=help, **settings)


def add_generation_flags(parser: Parser) -> None:
    """Add a flag per option, so that one check reports all bad ones."""
    group = parser.add_argument_group("generation options")
    for name, entry in FIELDS.items():
        told = f" (default: {entry.default})" if entry.default not in (None, (), {}) else ""
        if name == "max_tokens":
            told = " (default: -1, no limit but the context)"
        _add_option(parser, group, name, argparse.SUPPRESS, told)


def generation_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The generation options on a command line, by name, with files read. Raises OptionsError."""
    values = {name: value for name, value in vars(arguments).items() if name in FIELDS}
    if re.search(r"[/\\]|\.gguf$", values.get("max_tokens", "")):
        raise OptionsError(
            f"-m {values['max_tokens']!r:.200}: is --max-tokens here, a number: did you mean "
            "--model?"
        )
    for name in ("schema", "grammar"):
        if name in values:
            values[name] = _read_file(name, values[name])
    return values


def _read_file(name: str, value: str) -> str:
    """The text of a file, or `value` if it is a schema (has a brace) or grammar (has rules)."""
    if re.match(r"\s*{" if name == "schema" else r"(?s).*(\bstart\s*:|\broot\s*::=)", value):
        return value
    try:
        with open(os.path.expanduser(value), encoding="utf-8-sig") as file:
            # one more than allowed, for the check of the length
            return file.read(max(MAX_CHARACTERS, MAX_GRAMMAR) + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else reason
        raise OptionsError(
            f"option `{name}`: the file {value!r:.200} cannot be read ({reason}): check its name"
        ) from None


def add_load_flags(
    parser: Parser, without: Collection[str] = ("max_rows",), only: Collection[str] = ()
) -> None:
    """Add load flags, all but `without` or `only` some, with text for numbers."""
    group = parser.add_argument_group("model")
    for name, entry in LOAD_FIELDS.items():
        if not about(entry)["is_flag"] or name in without or (only and name not in only):
            continue
        _add_option(parser, group, name, entry.default)
    if not only:
        add_needless_flags(parser, NEEDLESS_FLAGS)


def add_needless_flags(
    parser: Parser, table: Sequence[tuple[Sequence[str], int | str, str]]
) -> None:
    """Accept flags of other tools that change nothing: names, nargs, reason."""
    hidden: Any = dict.fromkeys(("dest", "default", "help"), argparse.SUPPRESS)
    for names, count, reason in table:
        parser.add_argument(*names, action=_Needless, nargs=count, const=reason, **hidden)


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
    values = {name: value for name, value in vars(arguments).items() if name in LOAD_FIELDS}
    return LoadOptions(
        **values | {name: None for name, unset in _UNSET.items() if values.get(name) == unset}
    )
