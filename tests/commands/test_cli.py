"""Shared by doors: errors in one line, streams, the progress bar."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from launching import run_python

from mlx_llama import cli
from mlx_llama.__main__ import COMMANDS, main
from mlx_llama.cli import running
from mlx_llama.core.errors import LlamaError


def fail(error: BaseException):
    def main(arguments):
        raise error

    return main


@pytest.mark.parametrize(
    "error, code, message",
    [
        (LlamaError("two\nlines: use --device cpu"), 2, "error: two lines: use --device cpu\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_is_one_line_and_a_code(error, code, message, door):
    done = door(fail(error))
    assert (done.code, done.out, done.err) == (code, "", message)


def test_an_error_commands_no_terminal_and_is_short(door):
    done = door(fail(LlamaError("\x1b[2J\x9b\r\x07 " + "x" * 1_000_000)))
    assert done.err.startswith("error: ␛[2J\ufffd␍␇ xxx") and done.err.endswith("xxx...\n")
    assert len(done.err) == 4001


def test_notices_keep_their_lines_and_command_no_terminal(capsys):
    cli.say("(two\nlines \x1b]0;x\x07" + "y" * 5000 + ")")
    assert capsys.readouterr().err == "(two\nlines ␛]0;x␇" + "y" * 5000 + ")\n"


def test_debug_shows_the_traceback_and_other_errors_are_not_caught(door):
    with pytest.raises(LlamaError):
        door(fail(LlamaError("x")), "--debug")
    with pytest.raises(ZeroDivisionError):
        door(fail(ZeroDivisionError()))
    with pytest.raises(PermissionError):
        door(fail(OSError(errno.EACCES, "no")))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line():
    code = (
        "import sys; from mlx_llama import cli; sys.exit(cli.run(lambda arguments: print('x' * "
        "9999, flush=True)))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.fixture
def left_pipe():
    """The writing end of a pipe whose reader left, as of `| true`."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("flag", ["--help", "--version"])
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_a_reader_that_left_is_no_error(command, flag, left_pipe, monkeypatch, capsys):
    with open(left_pipe, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            assert main([flag] if command is None else [command, flag]) == 0
        except SystemExit as end:
            assert end.code == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [[], ["--version"], ["models", "--help"], ["nope"]])
def test_a_reader_that_left_sees_no_traceback(words, unbuffered, left_pipe):
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "mlx_llama", *words]
    done = subprocess.run(command, stdout=left_pipe, stderr=subprocess.PIPE, env=env, timeout=60)
    assert done.returncode == 2 * (words == ["nope"])
    assert done.stderr.count(b"\n") == (words == ["nope"])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=left_pipe, env=env, timeout=60)
    assert done.returncode == 2 * (words == ["nope"])


def test_an_error_keeps_its_code_where_no_one_reads(left_pipe, monkeypatch, capsys):
    with open(left_pipe, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)

        def fail_after_a_word(arguments):
            print("a word")
            raise LlamaError("x")

        assert cli.run(fail_after_a_word, []) == 2
    assert capsys.readouterr().err == "error: x\n"


@pytest.mark.parametrize(
    "data, message", [(b"a\xffb", "is not UTF-8 (byte 1: "), (None, "cannot be read: No such file")]
)
def test_a_text_that_cannot_be_read(data, message, tmp_path):
    file = tmp_path / "text"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(LlamaError) as caught:
        cli.read_text(str(file))
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="/dev/zero is not Windows's")
def test_a_text_without_an_end(monkeypatch):
    monkeypatch.setattr(running, "MAX_CHARACTERS", 1000)
    with pytest.raises(LlamaError, match="/dev/zero: is longer than 1000 characters"):
        cli.read_text("/dev/zero")


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("gen", "did you mean generate?"),
        ("serve", "did you mean server?"),
        ("run", "did you mean chat?"),
        ("pull", "did you mean models pull?"),
        ("x", "choose one of chat, "),
        ("", "choose one of chat, "),
    ],
)
def test_an_unknown_command_is_told_the_nearest(name, remedy, capsys):
    assert main([name]) == 2
    error = f"error: there is no command {name!r}: {remedy}"
    assert capsys.readouterr().err.startswith(error)


# The progress bar

WORK = """
import sys, time
from mlx_llama import cli
from mlx_llama.__main__ import COMMANDS
from mlx_llama.core.system import progress
with cli.Bar("loading [b]x[/b]", patience=float(sys.argv[1])):
    advance = progress.meter(200_000_000)
    for _ in range(4):
        advance(50_000_000)
        time.sleep(0.15)
print("done")
"""


def test_a_terminal_shows_progress_and_then_no_more(terminal):
    child = terminal("-c", WORK, "0")
    child.expect("done")
    child.expect_exact("\r\n")
    seen = child.logfile_read.getvalue()
    assert "loading [b]x[/b]" in seen and "100.0/200.0 MB" in seen and "200.0/200.0 MB" in seen
    assert "\x1b[2K" in seen.split("200.0/200.0 MB")[-1]  # the line is cleared


@pytest.mark.parametrize(
    "patience, environment", [("60", {}), ("0", {"TERM": "dumb"}), ("0", {"JPY_PARENT_PID": "7"})]
)
def test_no_bar_for_work_that_is_soon_done_nor_where_it_cannot_move(
    terminal, patience, environment
):
    child = terminal("-c", WORK, patience, **environment)
    child.expect("done")
    assert child.logfile_read.getvalue().strip() == "done"


def test_a_pipe_sees_no_progress():
    done = run_python("-c", WORK, "0")
    assert (done.stdout, done.stderr) == ("done\n", "")


# Ctrl-C while a command is imported

STOP = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize(
    "command",
    [["-m", "mlx_llama", "generate"], *(["-m", f"mlx_llama.{name}"] for name in COMMANDS)],
)
def test_an_interrupt_during_imports_is_130_without_a_traceback(command, tmp_path):
    """A module that every command imports sends the signal."""
    (tmp_path / "pydantic.py").write_text(STOP)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_python(*command, "-h", env={**os.environ, "PYTHONPATH": path})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
