"""Profile of compiled programs, run by an interpreter that reads the clock after each operation.

The seconds of a run are averaged over its threads, by operation: work, and waiting at the barrier.
The rest of a run is spent on waking threads and in the caller.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_llama.core.backends import profile as common
from mlx_llama.core.backends.profile import Profile, matrix_parts

from .program import Code, Program
from .records import CONTEXT
from .runner import Runner
from .team import Team

WAKING = "waking threads and the caller"
_CALIBRATION = 0.05  # seconds
_NAMES = {
    "rotate": common.ROPE,
    "attend": common.ATTENTION,
    "norm_heads": common.HEAD_NORMS,
    "norm_values": common.HEAD_NORMS,
    "scale_heads": common.HEAD_NORMS,
    "rotate_queries": common.ROPE,
    "layer_inputs": "inputs of layers",
    "adjust": "norm or scale after a product",
    "softcap": "softcap",
    "experts": common.EXPERTS,
    "route": "choice of experts",
    "gather": "packing for experts",
    "combine": "sum of experts",
    "gate_output": "gate",
    "select": common.ADAPTERS,
    "convolve": common.CONVOLUTION,
    "gated_delta": common.GATED_DELTA,
}
_PACKED = {"norm": "norm, packing", "plain": "packing"}  # else the activation


@dataclass(frozen=True)
class Run:
    """A run of a program's operations from `first` on."""

    program: Program
    tokens: int
    ticks: np.ndarray  # int64 [threads, 1 + 2 operations], see interpreter.py
    seconds: float  # spent in Team.run
    first: int = 0


class ClockedTeam:
    """A team that clocks its runs."""

    def __init__(self, team: Team):
        self.team, self.threads = team, team.threads
        self.runs: list[Run] = []

    def run(
        self, program: Program, context: np.ndarray, first: int = 0, last: int | None = None
    ) -> None:
        last = len(program) if last is None else last
        ticks = np.zeros((self.threads, 1 + 2 * (last - first)), np.int64)
        started = time.perf_counter()
        self.team.run(program, context, first, last, ticks)
        seconds = time.perf_counter() - started
        self.runs.append(Run(program, int(context[CONTEXT["tokens"]]), ticks, seconds, first))


@contextmanager
def clock_programs(runner: Runner, named: list[tuple[str, Any]]) -> Iterator[Profile]:
    """Clock a model's programs until the context ends. named: of name_matrices."""
    note = "the compiled program as it runs, with a clock read after each operation"
    profile = Profile(slower=0.0, note=note)
    team, second = runner.team, measure_clock(runner.code)
    clocked = runner.team = ClockedTeam(team)

    def embed(tokens: np.ndarray) -> None:
        started = time.perf_counter()
        Runner.embed(runner, tokens)
        before = profile.lost.get(common.EMBEDDING, 0.0)
        profile.lost[common.EMBEDDING] = before + time.perf_counter() - started

    runner.embed = embed
    try:
        yield profile
    finally:
        runner.team = team
        del runner.embed
    parts = [(name, part) for name, matrix in named for part in matrix_parts(matrix)]
    matrices = {part.address: (name, part) for name, part in parts}
    for run in clocked.runs:
        _add(profile, run, matrices, second)


def measure_clock(code: Code) -> float:
    """Ticks of the clock per second."""

    def read() -> tuple[float, int]:
        ticks, context = np.zeros(1, np.int64), np.zeros(len(CONTEXT), np.int64)
        code.run_clocked(0, 0, 0, 1, context.ctypes.data, ticks.ctypes.data)
        return time.perf_counter(), int(ticks[0])

    (before, first), _, (after, last) = read(), time.sleep(_CALIBRATION), read()
    return (last - first) / (after - before)


def _add(profile: Profile, run: Run, matrices: dict, second: float) -> None:
    ticks = run.ticks / second
    # seconds [threads, operations]
    begun, done, released = ticks[:, :-1:2], ticks[:, 1::2], ticks[:, 2::2]
    spent, waited = (released - begun).mean(axis=0), (released - done).mean(axis=0)
    described = run.program.operations
    for index in range(spent.size):
        kind, operands = described[run.first + index]
        name, nbytes, flops = _name(run.first + index, described, matrices), 0, 0
        if kind.startswith("product"):
            if operands["weights"] in matrices:
                panels = matrices[operands["weights"]][1]
                nbytes, flops = panels.nbytes, 2 * run.tokens * math.prod(panels.shape)
            else:  # an adapter's matrix
                nbytes = operands["items"] * operands["panel_bytes"]
                flops = 2 * run.tokens * nbytes // 4
        # several tokens of a prompt may choose an expert
        elif kind.startswith("experts") and run.tokens == 1:
            parts = -(-operands["panels"] // operands["part"])
            nbytes = operands["items"] // parts * operands["panels"] * operands["panel_bytes"]
        profile.add(name, float(spent[index]), float(waited[index]), nbytes, flops)
        if operands["wait"]:
            profile.slower += float((done[:, index].max() - done[:, index]).mean())
    walked = float((ticks[:, -1] - ticks[:, 0]).mean())
    profile.lost[WAKING] = profile.lost.get(WAKING, 0.0) + run.seconds - walked


def _name(index: int, described: list[tuple[str, dict[str, int]]], matrices: dict) -> str:
    """The name of an operation; packing is named after its product."""
    kind = described[index][0].split()
    if kind[0] in _NAMES:
        return _NAMES[kind[0]]
    product = next(operands for other, operands in described[index:] if other.startswith("product"))
    if product["weights"] not in matrices:
        return common.ADAPTERS
    name = matrices[product["weights"]][0]
    if kind[0] == "product":
        return name
    return f"{_PACKED.get(kind[1], f'{kind[1]}, packing')} for {name}"
