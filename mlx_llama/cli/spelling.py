"""Options in core's messages, spelled as flags.

Core writes names in backticks, as in Python: `ctx_size`, `device='cpu'`, `compile=False`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# Options whose flag is not their name with dashes.
FLAGS = {"adapter": "--use-adapter", "schema": "--json-schema", "temperature": "--temp"}
_NAME = re.compile(r"`([a-z][a-z_]*)(?:=([^`]*))?`")


def flag_of(name: str) -> str:
    """The preferred flag of an option."""
    return FLAGS.get(name) or "--" + name.replace("_", "-")


def spell_flags(text: str) -> str:
    """Replace names of options by flags: "`device='cpu'`" by "--device cpu", "`compile=False`" by
    "--no-compile".
    """

    def spell(match: re.Match[str]) -> str:
        flag, value = flag_of(match[1]), match[2]
        if value is None or value == "True":
            return flag
        return f"--no-{flag[2:]}" if value == "False" else f"{flag} " + value.strip("'\"")

    return _NAME.sub(spell, text)


def spell_options(options: Mapping[str, Any]) -> list[str]:
    """Options by name as words of a command line; None is omitted, a tuple repeats its flag."""
    words: list[str] = []
    for name, value in options.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
            continue
        for part in value if isinstance(value, (list, tuple)) else [] if value is None else [value]:
            words += [f"{flag}={part}"] if str(part).startswith("-") else [flag, str(part)]
    return words


def spell_command(command: str, words: Sequence[str], options: Mapping[str, Any]) -> str:
    """A command line for a shell; options as for `spell_options`."""
    return " ".join(
        ["python -m mlx_llama." + command, *map(shlex.quote, [*words, *spell_options(options)])]
    )
