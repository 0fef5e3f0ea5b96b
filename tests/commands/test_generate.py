"""python -m mlx_llama.generate: stdout, stderr, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from launching import run_python

from mlx_llama import generate
from mlx_llama.__main__ import COMMANDS, main

HELLO = [{"role": "user", "content": "hello"}]


def run_process(*arguments: object, **options) -> subprocess.CompletedProcess:
    return run_python("-m", "mlx_llama.generate", *arguments, timeout=120, **options)


@pytest.fixture
def run(door, toy):
    """run(*arguments, stdin=b""): the command in this process, by default with the toy."""
    return lambda *arguments, **more: door(generate.main, "--model", toy, *arguments, **more)


def test_the_answer_goes_to_stdout_and_nothing_else_does(toy, llm):
    done = run_process(*f"--model {toy} --backend cpu -p hello -m 12 --stats".split())
    assert done.returncode == 0 and done.stdout == llm.generate(HELLO, max_tokens=12).text + "\n"
    assert "evaluations per token: 1 " in done.stderr and "reused" in done.stderr


def test_prompts_of_standard_input_and_files_system_prompts_and_plain_continuations(
    llm, run, tmp_path
):
    (tmp_path / "prompt.txt").write_text("hello", encoding="utf-8")
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "Vögel"}]
    for prompt, flags in (
        (messages, ("-p", "-", "-sys", "be kind")),
        ("Once upon", ("-p", "Once upon", "--ignore-chat-template")),
        (HELLO, ("-f", tmp_path / "prompt.txt")),
    ):
        done = run(*flags, "-n", "9", stdin="Vögel".encode())
        assert done.out == llm.generate(prompt, max_tokens=9).text + "\n", flags


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals like these")
@pytest.mark.parametrize("command", [[], ["-n", "-1"], ["-n", "3"]])
def test_an_answer_ends_with_the_context(command, run):
    """As llama.cpp's -n -1, its default."""
    done = run("-p", "hello", "--logit-bias", "2=-100", "--jsonl", *command)
    receipt = json.loads(done.out.splitlines()[-1])["receipt"]
    count = receipt["prompt_tokens"] + len(receipt["tokens"])
    assert receipt["finish_reason"] == ("length" if "3" in command else "context")
    assert (count == 256) == ("3" not in command)
    assert receipt["origins"]["max_tokens"] == ("user" if command else "default")


@pytest.mark.slow
def test_an_answer_does_not_command_the_terminal(toy):
    import pty

    arguments = ["--model", str(toy), "-p", "hello", "--regex", "\x1b\\[2J"]
    assert run_process(*arguments).stdout == "\x1b[2J\n"  # a pipe gets the bytes
    command = [sys.executable, "-m", "mlx_llama.generate", *arguments]
    ours, theirs = pty.openpty()
    subprocess.run(command, stdout=theirs, timeout=120, check=True)
    os.close(theirs)
    assert os.read(ours, 999).decode().strip() == "\u241b[2J"
    os.close(ours)


def test_jsonl_is_pieces_and_a_receipt(llm, run):
    done = run(*"-p hello -m 10 --jsonl --temp 0.7 --seed 5".split())
    *pieces, last = [json.loads(line) for line in done.out.splitlines()]
    wanted = llm.generate(HELLO, max_tokens=10, temperature=0.7, seed=5)
    assert "".join(piece["text"] for piece in pieces) == wanted.text
    assert last["receipt"]["tokens"] == wanted.tokens and last["receipt"]["seed"] == 5
    assert last["receipt"]["origins"]["temperature"] == "user"


def test_a_prompt_that_is_no_text(run):
    done = run("-p", "-", stdin=b"\xff\xfeoops")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: standard input: is not UTF-8 (byte 0")


@pytest.mark.slow
def test_threads_and_activation_bits_reach_the_model(guide_q8, run):
    from cpu_fallback import kernels

    if kernels.find_target()[0] is None:
        pytest.skip(f"the compiled path is unavailable here: {kernels.find_target()[1]}")
    arguments = ["--model", str(guide_q8), "--backend", "cpu", "-p", "Who are you?", "-m", "20"]
    plain, other = run(*arguments), run(*arguments, "--threads", "1", "--activation-bits", "32")
    assert other.code == 0 and other.out == plain.out, other.err


def test_no_gpu_here_says_so(run):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = run("-p", "hi", "--backend", "cuda", "--device", "gpu")
    assert done.code == 2 and "no CUDA GPU" in done.err
    done = run("-p", "hi", "--backend", "cuda")
    assert done.code == 2 and "--device cpu" in done.err


def test_a_reader_that_leaves_is_no_error(toy):
    done = subprocess.run(
        f"{sys.executable} -m mlx_llama.generate --model {toy} -p hi -m 200 --jsonl | head -1",
        shell=True,
        capture_output=True,
        timeout=120,
    )
    assert done.stderr == b"" and json.loads(done.stdout)


def test_the_commands_are_listed(capsys):
    done = run_python("-m", "mlx_llama")
    assert all(f"mlx_llama {name}" in done.stdout for name in COMMANDS)
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "--model" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name, remedy", [("chatt", "did you mean chat?"), ("zzz", "choose one of chat, generate")]
)
def test_a_command_that_is_unknown_is_one_line(name, remedy, capsys):
    assert main([name]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and remedy in err
