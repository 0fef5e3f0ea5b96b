"""Fixtures of several folders: models, backends, machines; commands through `main`, through a pipe,
and in a pseudo-terminal.
"""

from __future__ import annotations

import io
import itertools
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from machine import device_of
from making import make_checkpoint
from making_adapters import write_random

from cuda_fallback import facts as cuda
from mlx_llama import cli
from mlx_llama.api.llm import LLM
from mlx_llama.bench.measure import HostMemory
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.system import machine

SMALL = dict(num_hidden_layers=3, max_position_embeddings=256)
FIXED = ("NO_COLOR", "COLUMNS", "LINES")  # variables that change what terminals show


@pytest.fixture(scope="session")
def roomy(tmp_path_factory):
    """A toy with a large context, so that its answers last until they are stopped."""
    return make_checkpoint(
        tmp_path_factory.mktemp("roomy") / "roomy", max_position_embeddings=100_000
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """(a checkpoint named toy, [its adapters sea and sky])."""
    folder = tmp_path_factory.mktemp("adapters")
    fields = {"intermediate_size": 128, "max_position_embeddings": 512}
    base, names = make_checkpoint(folder / "toy", **fields), enumerate(("sea", "sky"))
    return base, [write_random(base, folder / name, seed) for seed, name in names]


@pytest.fixture
def known_memory(monkeypatch):
    """The bench's probe of the memory takes no time and gives speeds of one state."""
    rates = itertools.cycle((1e9, 1.1e9, 1.2e9))
    monkeypatch.setattr(HostMemory, "__init__", lambda self: None)
    monkeypatch.setattr(HostMemory, "bandwidth", lambda self: next(rates))


@pytest.fixture
def door(monkeypatch, capsys):
    """door(main, *arguments, stdin=b""): run a door in this process; returns .code, .out and
    .err.
    """

    def run(main, *arguments, stdin: bytes = b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = cli.run(main, [str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


@pytest.fixture
def terminal(tmp_path):
    """terminal(*arguments of python, **environment): run a program in a pseudo-terminal of 80
    columns and 24 rows. Its output is in .logfile_read."""
    pexpect = pytest.importorskip(
        "pexpect", reason="pseudo-terminals need pexpect, which Windows has not"
    )
    started = []

    def spawn(*arguments, **environment):
        env = {name: value for name, value in os.environ.items() if name not in FIXED}
        env |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        env |= {"XDG_STATE_HOME": str(tmp_path / "state")} | environment
        # Ctrl-C drops pending output, sometimes half a character
        coding = {"encoding": "utf-8", "codec_errors": "replace"}
        words = [str(argument) for argument in arguments]
        child = pexpect.spawn(
            sys.executable, words, env=env, dimensions=(24, 80), timeout=20, **coding
        )
        child.delaybeforesend = 0.02
        child.logfile_read = io.StringIO()
        started.append(child)
        return child

    yield spawn
    for child in started:
        child.close(force=True)


@pytest.fixture(params=[False, True])
def runs_ahead(request) -> bool:
    """Whether the toy backend works by itself, as a GPU does."""
    return request.param


@pytest.fixture(scope="session")
def where(backend) -> dict[str, str]:
    """Options of load: this backend, at float32."""
    return dict(backend=backend.name, device=device_of(backend), dtype="float32")


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """smi(script): a driver in sight, and a nvidia-smi that is this shell script."""

    def install(script):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text("#!/bin/sh\n" + script)
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(machine, "has_gpu_driver", lambda: True)
        monkeypatch.setattr(cuda, "_torch_has_gpus", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """A random float32 checkpoint of three layers for 256 positions."""
    return make_checkpoint(tmp_path_factory.mktemp("small") / "small", **SMALL)


@pytest.fixture(scope="session")
def open_llm(small):
    """open_llm(backend=the cpu's, **options of load): the small model at float32."""

    def opened(backend=None, **how) -> LLM:
        backend, checkpoint = backend or select("cpu"), open_checkpoint(small)
        return LLM(
            checkpoint,
            backend,
            backend.load(checkpoint, "float32", **how),
            checkpoint.template,
            256,
        )

    return opened
