"""The compiled interpreter of programs."""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from . import filling, team
from .emit import Function, Module, Value, Variable, i64, kernel
from .operations import operations
from .recipe import Recipe
from .records import COMMON, CONTEXT, WORDS


def write_module(recipe: Recipe) -> Module:
    module = Module()
    module.triple = recipe.target.triple
    for layout, source in recipe.sources:
        filling.fill(module, layout, source, public=True)
    filling.checksum(module, public=True)
    for layout, source in recipe.embeddings:
        filling.embed(module, recipe.target, layout, source, public=True)
    functions = [write(module, name) for name, write in operations(recipe).items()]
    for name in ("run", "run_clocked"):
        _write_interpreter(module, name, functions, clocked=name == "run_clocked")
    team.write(module)
    return module


def _write_interpreter(module: Module, name: str, functions: list[Function], clocked: bool) -> None:
    """Write the function that executes a program's records.

    clocked: it also writes the clock to `times`, int64 [1 + 2 count]: at the start, then for each
    record after its items and after its barrier.
    """
    barrier = _barrier(module)
    f = Function(module, name, team.WALK, public=True)
    sync, tokens = (f.load_word(f.context, CONTEXT[name]) for name in ("sync", "tokens"))
    at = {name: index for index, name in enumerate(COMMON)}
    if clocked:
        f.store(_read_clock(f), f.times)
    with f.loop(f.count) as i:
        op = f.program + i * (8 * WORDS)
        items = f.load_word(op, at["items"])
        items = f.load_word(op, at["per_token"]).compare("!=", 0).select(items * tokens, items)
        common = (f.load_word(op, at[name]) for name in ("portion", "kind", "counters"))
        portion, kind, counters = common
        # A thread starts with its share of the items, which stays in its caches, then helps others.
        with f.loop(f.threads) as turn:
            owner = (f.thread + turn) % f.threads
            begin, end = owner * items // f.threads, (owner + 1) * items // f.threads
            with f.forever() as break_if:
                lo = begin + f.atomic_add(counters + owner * 64, portion)
                break_if(lo.compare(">=", end))
                hi = (lo + portion).minimum(end)
                f.switch(
                    kind,
                    [partial(f.call, run, op, lo, hi, f.thread, f.context) for run in functions],
                )
        if clocked:
            f.store(_read_clock(f), f.times, i * 16 + 8)
        with f.if_then(f.load_word(op, at["wait"]).compare("!=", 0)):
            f.call(barrier, sync, f.threads)
        if clocked:
            f.store(_read_clock(f), f.times, i * 16 + 16)
    f.finish()


@kernel
def _barrier(f: Function, sync, threads) -> None:
    """Wait for all threads. sync: two i64 on two cache lines, the number of arrivals and the round.

    On weakly ordered processors (Arm) an operation sees all stores made before the barrier: each
    arrival releases its thread's stores and acquires those of earlier arrivals; the last arrival
    starts the new round, which releases all of them.
    """
    round_at = sync + 64
    before = f.atomic_load(round_at)
    arrived = f.atomic_add(sync, 1)
    with f.if_else((arrived + 1).compare("==", threads)) as (last, others):
        with last:
            f.atomic_store(sync, 0)
            f.atomic_add(round_at, 1)
        with others:
            polls = Variable(f, f.constant(i64, 0))
            with f.forever() as break_if:
                break_if(f.atomic_load(round_at).compare("!=", before))
                team.wait(f, polls)


def _read_clock(f: Function) -> Value:
    """Ticks of the processor's constant clock, which profile.py calibrates."""
    if "aarch64" in f.module.triple or "arm64" in f.module.triple:
        name = f.module.add_metadata([ir.MetaDataString(f.module, "cntvct_el0")])
        kind = ir.FunctionType(i64, [ir.MetaDataType()])
        intrinsic = "llvm.read_volatile_register.i64"
        read = f.module.globals.get(intrinsic) or ir.Function(f.module, kind, intrinsic)
        return Value(f, f.builder.call(read, [name]))
    return f.intrinsic("llvm.readcyclecounter", i64)
