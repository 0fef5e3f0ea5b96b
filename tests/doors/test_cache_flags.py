"""--cache-bits, --cache-memory and --max-rows: honoured by the doors that take them, one clear line
for bad values.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlx_llama import generate, load
from mlx_llama.bench import command as bench_command
from mlx_llama.chat import repl as chat
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import ContextError
from mlx_llama.parity import command as parity_command

PROMPT = ("-p", "Once upon a time", "-m", "4")


@pytest.fixture
def models(monkeypatch):
    """The models that were loaded."""
    made, original = [], Backend.build
    monkeypatch.setattr(
        Backend, "build", lambda *args, **named: made.append(original(*args, **named)) or made[-1]
    )
    return made


@pytest.mark.parametrize(
    "main, arguments, stdin",
    [
        (generate.main, PROMPT, b""),
        (chat.main, ("-m", "4"), b"hello\n"),
        (bench_command.main, ("-p", "4", "-n", "2", "-r", "1", "-o", "md"), b""),
    ],
)
def test_bits_reach_the_model(main, arguments, stdin, door, toy, models):
    for flags, wanted in (((), None), (("--cache-bits", "8"), 8), (("--kv-bits", "16"), 16)):
        done = door(main, "--model", toy, "--backend", "cpu", *arguments, *flags, stdin=stdin)
        assert done.code == 0, done.err
        assert models[-1].cache_bits == wanted


@pytest.mark.parametrize(
    "main, arguments",
    [
        (generate.main, ("--backend", "cpu", *PROMPT)),
        (bench_command.main, ("--backend", "cpu", "-p", "4", "-n", "2", "-r", "1")),
        (parity_command.main, ("--backends", "cpu", "--tokens", "16", "--batch", "2")),
    ],
)
def test_batch_invariance_reaches_the_model(main, arguments, door, toy, monkeypatch):
    from cpu_fallback.model import Llama

    asked, load = [], Llama.load

    def noted(checkpoint, options, *rest):
        asked.append(options.batch_invariant)
        return load(checkpoint, replace(options, batch_invariant=False), *rest)

    monkeypatch.setattr(Llama, "load", noted)
    for flags in ((), ("--batch-invariant",)):
        done = door(main, "--model", toy, *arguments, *flags)
        assert done.code == 0, done.err
    assert asked == [False, True]


@pytest.mark.parametrize("mode", [(), ("--batch", "2"), ("--verify-cache",), ("--repeat", "2")])
def test_8_bits_reach_the_models_of_a_comparison_but_the_reference(mode, door, toy, models):
    flags = f"--model {toy} --backends cpu --tokens 16 --cache-bits 8 --json"
    done = door(parity_command.main, *flags.split(), *mode)
    assert done.code == 0, done.out + done.err
    assert [model.cache_bits for model in models] == ([8] if mode else [None, 8])


def test_a_cache_without_memory_for_a_prompt_is_refused_with_the_numbers(door, toy):
    flags = ("--model", toy, "--backend", "cpu", "--cache-memory", "1kB")
    done = door(generate.main, *flags, *PROMPT)
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert "tokens take 0." in done.err and "raise --cache-memory" in done.err
    done = door(chat.main, *flags, stdin=b"hello\n")
    assert done.code == 2 and "raise --cache-memory" in done.err
    with pytest.raises(ContextError, match="raise `cache_memory`"):
        load(toy, backend="cpu", cache_memory=1000).generate("Once upon a time")
    llm = load(toy, backend="cpu", cache_memory="3MB", max_rows=5)
    assert llm.loop.scheduler.rows.budget == 3_000_000 and llm.loop.max_rows == 5
    assert len(llm.generate("Once upon a time", max_tokens=4).tokens) == 4


WRONG = [
    (generate.main, (*PROMPT, "--cache-bits", "4"), "--cache-bits '4': must be 8 or 16"),
    (
        generate.main,
        (*PROMPT, "--cache-memory", "lots"),
        "--cache-memory 'lots': must be a size such as 2GB",
    ),
    (chat.main, ("--cache-bits", "32"), "--cache-bits '32': must be 8 or 16"),
    (chat.main, ("--cache-memory", "0"), "--cache-memory '0': must be a size"),
    # a conversation is one request
    (chat.main, ("--max-rows", "2"), "there is no flag --max-rows"),
    (bench_command.main, ("--cache-bits", "x"), "--cache-bits 'x': must be 8 or 16"),
    (bench_command.main, ("--cache-memory", "1GB"), "there is no flag --cache-memory"),
    (parity_command.main, ("--cache-bits", "4"), "--cache-bits '4': must be 8 or 16"),
    (
        parity_command.main,
        ("--record", "x.json", "--batch-invariant"),
        "--batch-invariant has no meaning with --record",
    ),
]


@pytest.mark.parametrize("main, arguments, part", WRONG)
def test_a_bad_value_is_one_line_before_loading(main, arguments, part, door, models):
    done = door(main, *arguments)
    assert done.code == 2 and done.out == "" and part in done.err and done.err.count("\n") == 1
    assert models == []


def test_the_number_of_rows_at_the_door(door, tmp_path, models):
    (tmp_path / "in").write_text(json.dumps({"prompt": "a"}))
    flags = f"--prompts {tmp_path}/in -o {tmp_path}/out --max-rows 0"
    done = door(generate.main, *flags.split())
    assert done.code == 2 and "--max-rows '0': must be a whole number, 1 to 512" in done.err
    assert models == []
