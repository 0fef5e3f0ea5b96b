"""Shared by doors: errors in one line, streams, the progress bar."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from mlx_llama import cli
from mlx_llama.core.errors import LlamaError


def fail(error: BaseException):
    def main(arguments):
        raise error

    return main


@pytest.mark.parametrize("error, code, message", [
    (LlamaError("two\nlines: use --device cpu"), 2, "error: two lines: use --device cpu\n"), (KeyboardInterrupt(), 130, ""),
])
def test_an_error_is_one_line_and_a_code(error, code, message, door):
    done = door(fail(error))
    assert (done.code, done.out, done.err) == (code, "", message)


def test_debug_shows_the_traceback_and_other_errors_are_not_caught(door):
    with pytest.raises(LlamaError):
        door(fail(LlamaError("x")), "--debug")
    with pytest.raises(ZeroDivisionError):
        door(fail(ZeroDivisionError()))
    with pytest.raises(PermissionError):
        door(fail(OSError(errno.EACCES, "no")))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line():
    code = "import sys; from mlx_llama import cli; sys.exit(cli.run(lambda arguments: print('x' * 9999, flush=True)))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("data, message", [(b"a\xffb", "is not UTF-8 (byte 1: "), (None, "cannot be read: No such file")])
def test_a_text_that_cannot_be_read(data, message, tmp_path):
    file = tmp_path / "text"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(LlamaError) as caught:
        cli.read_text(str(file))
    assert str(caught.value).startswith(f"{file}: {message}")


# The progress bar

WORK = """
import sys, time
from mlx_llama import cli
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


def test_work_that_is_soon_done_shows_nothing(terminal):
    child = terminal("-c", WORK, "60")
    child.expect("done")
    assert child.logfile_read.getvalue().strip() == "done"


def test_a_pipe_sees_no_progress():
    done = subprocess.run([sys.executable, "-c", WORK, "0"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("done\n", "")
