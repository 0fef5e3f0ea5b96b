"""--cache-bits, --cache-memory and --max-rows: honoured by the doors that take them, one clear line
for bad values.
"""

from __future__ import annotations

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


@pytest.mark.slow_for("main-arguments2")
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


@pytest.mark.slow_for("mode3")
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
    assert "tokens takes 0." in done.err and "raise --cache-memory" in done.err
    done = door(chat.main, *flags, stdin=b"hello\n")
    assert done.code == 2 and "raise --cache-memory" in done.err
    with pytest.raises(ContextError, match="raise `cache_memory`"):
        load(toy, backend="cpu", cache_memory=1000).generate("Once upon a time")
    llm = load(toy, backend="cpu", cache_memory="3MB", max_rows=5)
    assert llm.loop.scheduler.rows.budget == 3_000_000 and llm.loop.max_rows == 5
    assert len(llm.generate("Once upon a time", max_tokens=4).tokens) == 4
