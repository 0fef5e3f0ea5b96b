"""Processes of a run that end, fail or are interrupted: all others end soon, with the reason."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest
from launching import end, find_ranks, finish, launch
from machine import missing
from making import make_checkpoint

LIMIT = 30  # seconds; the ring tries for some eight to reach a process that ended
ENDLESS = [
    *"--device cpu --dtype float32 --ignore-chat-template".split(),
    "-p",
    "Once upon a time",
    *"--max-tokens 480 --logit-bias 6=-100 --logit-bias 2=-100".split(),
]


def read_some(process, seconds=180) -> bytes:
    """The first bytes of an answer."""
    os.set_blocking(process.stdout.fileno(), False)
    text, last = b"", time.monotonic() + seconds
    while len(text) < 20 and process.poll() is None and time.monotonic() < last:
        text += process.stdout.read() or b""
        time.sleep(0.05)
    return text


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_end(pids, seconds) -> list[int]:
    """Those of `pids` that still run after a time."""
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        pids = [pid for pid in pids if is_running(pid)]
        if not pids:
            break
        time.sleep(0.05)
    return pids


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, way, victim, size",
    [
        ("mlx", "SIGINT", 0, 2),
        ("mlx", "SIGKILL", 2, 4),
        ("cuda", "SIGINT", 0, 2),
        ("cuda", "SIGKILL", 0, 2),
    ],
)
def test_all_others_end(backend, way, victim, size, tmp_path):
    """The launcher ends the others of a process that is killed, and may do so before they have said
    the reason."""
    if reason := missing(backend):
        pytest.skip(reason)
    command = ["-m", "mlx_llama.generate", *ENDLESS, "--backend", backend]
    if size == 4:
        toy = make_checkpoint(tmp_path / "toy", num_key_value_heads=4, max_position_embeddings=4096)
        command += ["--model", str(toy)]
    errors = open(tmp_path / "errors", "w+b")
    process = launch(backend, size, *command, text=False, stderr=errors)
    try:
        assert len(read_some(process)) >= 20, errors.seek(0) or errors.read()[-3000:]
        ranks = find_ranks(process)
        assert sorted(ranks) == list(range(size))
        os.kill(ranks[victim], getattr(signal, way))
        others = [other for rank, other in ranks.items() if rank != victim or way == "SIGINT"]
        # Interrupted ranks finish their steps first, which takes long on a busy machine.
        assert await_end(others, 120 if way == "SIGINT" else LIMIT) == []
        assert process.wait(30) is not None  # the launcher hands the last lines on
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        if way == "SIGINT":
            # torchrun tells of a process that it did not end itself, in a traceback of its own.
            unwanted = "error: ", "/mlx_llama/", "KeyboardInterrupt"
            assert not any(text in said for text in unwanted), said
        else:
            assert f"rank {victim} exited with code -9" in said or "exitcode  : -9" in said, said
    finally:
        end(process)
        errors.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mlx", "cuda"])
@pytest.mark.parametrize(
    "way, speaker, reason",
    [
        # gloo's words, or ours, since the ring may wait without end
        ("leaves", 0, "gloo|another rank has not answered for 20 s"),
        ("raises", 1, "ValueError: planted"),
        ("cannot load", None, "rank 1: the disk of this machine is gone"),
    ],
)
def test_a_failure_is_one_line_of_its_rank(backend, way, speaker, reason):
    """Rank 0 of a rank that left says that it is lost; one that raises names itself, and rank 0 may
    add its own line before the launcher ends it."""
    if unavailable := missing(backend):
        pytest.skip(unavailable)
    command = ["tests/backends/failing_ranks.py", way, *ENDLESS, "--backend", backend]
    _, out, error = finish(launch(backend, 2, *command), 120)
    # mlx.launch may write a mark of its own before a line of a process
    lines = [line[line.find("error: ") :] for line in error.splitlines() if "error: " in line]
    if speaker is None:
        assert lines == [f"error: {reason}"] and not out.strip(), error
    else:
        lines = [line for line in lines if line.startswith(f"error: rank {speaker}: ")]
        assert (
            len(lines) == 1 and re.search(reason, lines[0]) and lines[0].endswith("start it again")
        ), error
    assert "mlx_llama/" not in error.replace("mlx_llama.generate", ""), error  # no traceback
