"""Processes on this machine: one of Python, and several by the ecosystem's launchers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def run_python(*words, timeout: float = 60, **options) -> subprocess.CompletedProcess:
    """The finished process of `python WORDS`, with its output as text. options: of run."""
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free, below those that the system hands
    out.
    """
    for port in range(random.randrange(12000, 30000), 60000, count):
        sockets = []
        try:
            for free in range(port, port + count):
                sockets.append(socket.create_server(("127.0.0.1", free)))
            return port
        except OSError:
            continue
        finally:
            for free in sockets:
                free.close()
    raise OSError("no free ports")


def launch(backend: str, size: int, *command: str, **options) -> subprocess.Popen:
    """Start `size` processes of `python COMMAND` in a session of their own, by mlx.launch or
    torchrun. options: of Popen.
    """
    if backend == "mlx":
        flags = f"-n {size} --backend ring --starting-port {free_ports(size)} --"
        starter = [BIN / "mlx.launch", *flags.split(), sys.executable]
    else:
        flags = f"--nproc-per-node {size} --master-addr 127.0.0.1 --master-port {free_ports(1)}"
        starter = [sys.executable, "-m", "torch.distributed.run", *flags.split()]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    programs = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": programs}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    settings = {"text": True, "cwd": ROOT, "env": env, "start_new_session": True}
    return subprocess.Popen([*starter, *command], **settings | pipes | options)


def finish(process: subprocess.Popen, seconds: float = 240) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a launcher; its processes are ended after a time."""
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end(process)
        out, error = process.communicate()
        raise AssertionError(
            f"still running after {seconds} s: {out[-2000:]} {error[-4000:]}"
        ) from None
    finally:
        end(process)
    return process.returncode, out, error


def members(process: subprocess.Popen) -> Sequence[int]:
    """A launcher's session and its descendants, which torchrun gives sessions of their own."""
    import psutil

    pids = {process.pid} if process.poll() is None else set()
    with contextlib.suppress(psutil.NoSuchProcess):
        pids |= {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    for child in psutil.pids():
        try:
            if os.getsid(child) == process.pid:
                pids.add(child)
        except ProcessLookupError:
            pass
    return sorted(pids)


def find_ranks(process: subprocess.Popen) -> dict[int, int]:
    """{rank: process id} of a launcher's processes."""
    import psutil

    ranks = {}
    for pid in members(process):
        try:
            env, name = psutil.Process(pid).environ(), psutil.Process(pid).name()
        except psutil.Error:
            continue
        rank = env.get("MLX_RANK", env.get("RANK"))
        if rank is not None and "python" in name:
            ranks[int(rank)] = pid
    return ranks


def end(process: subprocess.Popen) -> None:
    """Kill what is left of a launcher's session."""
    for pid in members(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
