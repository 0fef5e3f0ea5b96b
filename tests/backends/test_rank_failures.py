"""Processes of a run that end, stall or are interrupted: all others end within ten seconds, with
the reason.
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
from launching import end, find_ranks, launch
from machine import missing
from making import make_checkpoint

LIMIT = 10  # seconds
ENDLESS = [
    *"-m mlx_llama.generate --device cpu --dtype float32 --ignore-chat-template".split(),
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
        ("mlx", "SIGSTOP", 1, 2),
        ("mlx", "SIGINT", 0, 2),
        ("mlx", "SIGKILL", 2, 4),
        ("cuda", "SIGSTOP", 1, 2),
        ("cuda", "SIGINT", 0, 2),
        ("cuda", "SIGKILL", 0, 2),
    ],
)
def test_all_others_end(backend, way, victim, size, tmp_path):
    if reason := missing(backend):
        pytest.skip(reason)
    command = [*ENDLESS, "--backend", backend]
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
        if way == "SIGSTOP":
            os.kill(ranks[victim], signal.SIGKILL)
        last = time.monotonic() + 30  # the launcher hands the last lines on
        while time.monotonic() < last:
            errors.seek(0)
            said = errors.read().decode(errors="replace")
            if way == "SIGINT" or f"rank {victim} has" in said:
                break
            time.sleep(0.1)
        if way == "SIGINT":
            # torchrun tells of a process that it did not end itself, in a traceback of its own.
            unwanted = "error: ", "/mlx_llama/", "KeyboardInterrupt"
            assert not any(text in said for text in unwanted), said
        else:
            # mlx.launch may end the others before they have said it, and says it then.
            launcher_said = f"Node with rank {victim} exited with code -9" in said
            ending = "been silent" if way == "SIGSTOP" else "ended"
            is_said = f"error: rank {victim} has {ending}" in said
            assert is_said or (way == "SIGKILL" and launcher_said), said
    finally:
        end(process)
        errors.close()
