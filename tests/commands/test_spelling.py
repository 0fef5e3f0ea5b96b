"""Core names options as Python does; a command spells them as flags, a request as fields."""

from __future__ import annotations

import argparse
import ast
import importlib
import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest

from mlx_llama import cli
from mlx_llama.__main__ import COMMANDS, HOMES
from mlx_llama.cli.running import spell_command, spell_flags, spell_options
from mlx_llama.core.errors import OptionsError, plain

ROOT = Path(__file__).resolve().parents[2]
NEUTRAL = ("mlx_llama/core", "mlx_llama/mlx_native", "cpu_fallback", "cuda_fallback")
# commands that are not ours
FOREIGN = ("mlx.launch", "mlx_lm.convert", "pip download", "--query-gpu", "--format=csv")


# As core writes it | a command's flags | a request's fields
SPELLINGS = """
`ctx_size` 0: toy takes 1 to 256|--ctx-size 0: toy takes 1 to 256|ctx_size 0: toy takes 1 to 256
use `device='cpu'`, or so|use --device cpu, or so|use device='cpu', or so
`compile=False` asks for it|--no-compile asks for it|compile=False asks for it
option `adapter`: `adapters`|option --use-adapter: --adapters|option adapter: adapters
option `schema`, option `seed`|option --json-schema, option --seed|option schema, option seed
`cache_bits=8` has room|--cache-bits 8 has room|cache_bits=8 has room
run `hf auth login`, or `Name`|run `hf auth login`, or `Name`|run `hf auth login`, or `Name`
"""


@pytest.mark.parametrize("line", SPELLINGS.strip().splitlines())
def test_spelling(line):
    core, flags, fields = line.split("|")
    assert spell_flags(core) == flags and plain(core) == fields


def test_a_command_spells_errors_and_notices(capsys):
    def main(arguments):
        cli.say("(shorten the prompt, or raise `cache_memory`)")
        raise OptionsError("`max_rows` 0: must be a whole number")

    assert cli.run(main, []) == 2
    assert capsys.readouterr().err == (
        "(shorten the prompt, or raise --cache-memory)\n"
        "error: --max-rows 0: must be a whole number\n"
    )


def test_a_command_line_gives_back_its_options():
    from mlx_llama import generate
    from mlx_llama.cli import flags

    options = {"model": "a b", "ctx_size": 9, "compile": False, "batch_invariant": True}
    options |= {"adapters": ("x", "y=2"), "revision": None}
    line = spell_command("generate", (), options | {"prompt": "-hi"})
    args = generate.parser().parse_args(shlex.split(line)[3:])
    assert line.startswith("python -m mlx_llama.generate --model 'a b' ") and args.prompt == "-hi"
    loaded = flags.load_options(args)
    wanted = options | {"ctx_size": "9", "adapters": ["x", "y=2"]}
    assert {name: getattr(loaded, name) for name in options} == wanted
    assert spell_options({"bits": 4}) == ["--bits", "4"]


def strings(file: Path) -> list[str]:
    """All string literals of a file; the parts of an f-string are literals of their own."""
    return [
        node.value
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("folder", NEUTRAL)
def test_core_knows_no_command_line(folder):
    """No argparse, and no flag in a literal or a comment."""
    for file in (ROOT / folder).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        imported = [
            name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in (getattr(node, "module", None), *(alias.name for alias in node.names))
        ]
        assert "argparse" not in imported, file
        comments = [
            token.string
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT
        ]
        for part in (*strings(file), *comments):
            if not any(name in part for name in FOREIGN):
                assert not re.search(r"(?<![\w-])--[a-z][a-z-]+", part), (file, part)


def test_names_in_cores_messages_are_options_of_commands():
    known: set[str] = set()
    for name in COMMANDS:
        home = importlib.import_module(f"mlx_llama.{HOMES.get(name, name)}")
        parser: argparse.ArgumentParser = home.parser()
        known |= {action.dest for action in parser._actions}
    messages = [
        text
        for folder in NEUTRAL
        for file in (ROOT / folder).rglob("*.py")
        for text in strings(file)
        if "\n" not in text and not text.endswith(".")
    ]  # no docstrings
    named = {name for text in messages for name in re.findall(r"`([a-z][a-z_]*)(?:=[^`]*)?`", text)}
    assert "cache_memory" in named and named <= known


def test_a_chat_names_options_as_set_takes_them(toy, capsys):
    """Generation options by their names, load options by their flags."""
    from mlx_llama import load
    from mlx_llama.chat.dialogue import Chat

    chat = Chat(load(toy, backend="cpu").chat())
    words = "option `temperature`: 'hot'; option `speculate`: load it with `draft_model`"
    chat.complain(OptionsError(words))
    words = "option temperature: 'hot'; option speculate: load it with --draft-model"
    assert capsys.readouterr().err == f"error: {words}\n"
    chat.take("/system Say `threads`.")
    chat.take("/system")
    # the user's words stay
    assert capsys.readouterr().err.splitlines()[-1] == "system prompt: Say `threads`."
