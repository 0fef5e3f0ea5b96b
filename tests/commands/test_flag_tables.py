"""Flags made from core's tables of options; flags of other tools."""

from __future__ import annotations

import inspect
import re
import shlex
import sys

import pytest

from mlx_llama.__main__ import COMMANDS, main
from mlx_llama.cli import flags as flag_tables, running
from mlx_llama.cli.running import flag_of
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import FIELDS, LOAD_FIELDS, resolve


def flags(*words: str) -> dict:
    parser = flag_tables.Parser()
    flag_tables.add_generation_flags(parser)
    return flag_tables.generation_options(parser.parse_args(list(words)))


def test_flags_are_the_options():
    assert flags() == {}
    words = (
        "--temp 0.5 -m 9 --repeat-penalty 1.1 --stop a --stop b -s 3 --logit-bias 15=1.5 "
        "--logit-bias 16-2 --logit-bias 17+3 --logit-bias 18=-1e2"
    )
    parsed = flags(*words.split())
    assert parsed["temperature"] == "0.5"
    o = resolve(parsed).options
    assert o.temperature == 0.5 and o.max_tokens == 9 and o.repetition_penalty == 1.1
    assert o.stop == ("a", "b") and o.seed == 3
    assert o.logit_bias == {15: 1.5, 16: -2.0, 17: 3.0, 18: -100.0}
    assert flags("-n", "9", "--predict", "8")["max_tokens"] == "8"


MEANT = """
--temprature 1 | there is no flag --temprature (did you mean --temperature?)
--max_tokens=5 | there is no flag --max_tokens (did you mean --max-tokens?)
-ngl 99 -ctk q8_0 | there is no flag -ctk (did you mean --cache-bits?)
-hf org/name | there is no flag -hf (did you mean --model?)
-t 4 --max-model-len 9 | there is no flag -t (did you mean --threads?); there is no flag --max-mo
-t 4 --max-model-len 9 | there is no flag --max-model-len (did you mean --ctx-size?)
--load PATH | there is no flag --load (did you mean --model?)
--ctx 512 | there is no flag --ctx (did you mean --ctx-size?)
--max 5 | there is no flag --max (did you mean --max-tokens?)
--model-path-of x | there is no flag --model-path-of (did you mean --model?)
--history h.txt | unrecognized arguments: --history h.txt (see --help)
--zzz | unrecognized arguments: --zzz (see --help)
-f x.txt | unrecognized arguments: -f x.txt (see --help)
--seed | argument --seed/-s: expected one argument (see --help)
-m a/b.gguf | -m 'a/b.gguf': is --max-tokens here, a number: did you mean --model?
-m llama.gguf | did you mean --model?
"""  # -f is not -fa


@pytest.mark.parametrize("line", MEANT.strip().splitlines())
def test_flags_that_were_meant_are_suggested(line):
    words, _, meant = line.partition(" | ")
    parser = flag_tables.Parser()
    flag_tables.add_load_flags(parser)
    flag_tables.add_generation_flags(parser)
    with pytest.raises(OptionsError) as caught:
        flag_tables.generation_options(parser.parse_args(words.split()))
    assert meant in str(caught.value)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", [*(f for f in flag_tables.FOREIGN_FLAGS if f != "-m"), "-hp"])
def test_a_flag_of_other_tools_is_no_cluster_of_short_flags(command, flag, capsys):
    """As in llama.cpp, and other than argparse, for which -hf is -h and -f."""
    prompt = {"generate": ["-p", "hi"]}.get(command, [])
    code = main([command, *prompt, flag, "x/y"])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"there is no flag {flag} (did you mean" in err or f"arguments: {flag}" in err


@pytest.mark.parametrize("flag, count", [("-ngl", 1), ("-fa", 0), ("-fa", 1), ("--mlock", 0)])
def test_flags_of_llama_cpp_that_are_not_needed_are_accepted_and_told(flag, count, capsys):
    parser = flag_tables.Parser()
    flag_tables.add_load_flags(parser)
    parsed = parser.parse_args([flag, *["on"] * count, "--model", "x"])
    assert parsed == parser.parse_args(["--model", "x"])
    assert capsys.readouterr().err.startswith(f"({flag} is not needed: ")


def test_help_lists_common_options_first_and_ends_with_examples(monkeypatch):
    from mlx_llama import generate

    text = generate.parser().format_help()
    assert re.findall(r"^[a-z].*:$", text, re.M)[0] == "common options:"
    common, _, others = text.partition("\noptions:")
    assert "--temp " in common and "--top-k" in others
    monkeypatch.setenv("COLUMNS", "60")
    usage, _, narrow = generate.parser().format_help().partition("\nexamples:")
    assert all(len(line) < 60 for line in usage.splitlines() if not line.startswith("  -"))
    assert narrow == text.partition("\nexamples:")[2]
    for line in text.partition("examples:")[2].split("\n  "):
        generate.parser().parse_args(shlex.split(line)[3:] or ["-p", ""])


def test_messages_on_a_terminal_break_between_words(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for text in ("error: " + "a wide word " * 9, "(" + "a notice " * 9 + "\nand more)"):
        running.show(text)
        shown = capsys.readouterr().err
        assert shown.split() == text.split() and max(map(len, shown.splitlines())) <= 40


def test_flags_of_other_tools_lead_to_flags_that_some_door_has():
    from mlx_llama import generate

    known = generate.parser()._option_string_actions
    assert set(flag_tables.FOREIGN_FLAGS.values()) <= set(known)
    assert not set(flag_tables.FOREIGN_FLAGS) - {"-m"} & set(known)


def test_schema_and_grammar_are_files_on_the_command_line_or_text(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "é"\n', encoding="utf-8")
    for words in (["--json-schema", str(schema)], ["-j", '{"type": "integer"}']):
        assert resolve(flags(*words)).options.schema.as_dict() == {"type": "integer"}
    for words in (["--grammar", str(grammar)], ["--grammar", 'start: "é"\n']):
        assert resolve(flags(*words)).options.grammar == 'start: "é"\n'
    assert flags("--grammar", 'root ::= "a"')["grammar"] == 'root ::= "a"'
    assert flags("--regex", "a+")["regex"] == "a+"
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, reason in (("missing", "No such file"), ("latin", "not UTF-8"), (".", "directory")):
        words = f"option `grammar`: the file .* cannot be read .*{reason}"
        with pytest.raises(OptionsError, match=words):
            flags("--grammar", str(tmp_path / name))
    # A value from elsewhere (HTTP, Python) is never a file's name.
    with pytest.raises(OptionsError, match="valid JSON"):
        resolve({"schema": str(schema)})


def test_load_flags_are_the_parameters_of_load():
    """The table's fields, each of which but the callback has a flag with the table's help."""
    from mlx_llama import load

    parser = flag_tables.Parser()
    flag_tables.add_load_flags(parser, without=())
    parsed = parser.parse_args("--kv-bits 8 --cache-memory 2GB -np 4 --adapter a --lora b".split())
    options = flag_tables.load_options(parsed)
    assert options.cache_bits == "8" and options.cache_memory == "2GB" and options.max_rows == "4"
    assert options.adapters == ["a", "b"]
    assert list(inspect.signature(load).parameters) == list(LOAD_FIELDS)
    assert vars(parsed).keys() == LOAD_FIELDS.keys() - {"on_progress"} | {"debug"}
    helps = {action.dest: action.help for action in parser._actions}
    for name, field in LOAD_FIELDS.items():
        assert f"\n    {name}: " in load.__doc__
        assert field.description in helps.get(name, field.description)


def test_every_option_has_a_flag():
    for name in FIELDS:
        first, *_ = flag_tables.flags_of(name)
        assert first == flag_of(name)
        assert len(set(flag_tables.flags_of(name))) == len(flag_tables.flags_of(name))
