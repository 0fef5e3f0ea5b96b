"""Profile of a model's operations: names, and a clock around the calls of a backend's `ops`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

EMBEDDING, ROPE, ATTENTION = "embedding", "rope, store keys and values", "attention"
HEAD_NORMS, EXPERTS, ADAPTERS = "norm of heads", "experts", "adapters"
CONVOLUTION, GATED_DELTA = "convolution", "gated delta rule"
# {word of `ops`: its name in a profile}; a product has the name of its matrix
_PRODUCTS = ("linear", "gated_linear")
_WORDS = {
    "embed": EMBEDDING,
    "add_rms_norm": "add, norm",
    "add": "add",
    "scale": "scale",
    "softcap": "softcap",
    "norm_heads": HEAD_NORMS,
    "scale_heads": HEAD_NORMS,
    "rms_norm": "norm after a product",
    "rope_and_store": ROPE,
    "attend": ATTENTION,
    "experts": EXPERTS,
    "adapt": ADAPTERS,
    "gate": "gate",
    "gate_output": "gate",
    "xielu": "gate",
    "short_conv": CONVOLUTION,
    "gated_delta": GATED_DELTA,
    **dict.fromkeys(_PRODUCTS, "product"),
}


@dataclass
class Spent:
    """Totals of one operation over all its calls."""

    calls: int = 0
    seconds: float = 0.0  # from the end of the operation before it, a mean over threads
    waiting: float = 0.0  # part of them in which a thread waits for others
    nbytes: int = 0  # weights that were read
    flops: int = 0  # multiplications and additions of products


@dataclass
class Profile:
    """Seconds of a model's operations."""

    operations: dict[str, Spent] = field(default_factory=dict)  # by name, in the model's order
    lost: dict[str, float] = field(default_factory=dict)  # outside of operations, by reason
    # seconds of `waiting` for threads with more to do, not for the barriers; None: unknown
    slower: float | None = None
    note: str = ""  # how the figures were taken

    def add(
        self, name: str, seconds: float, waiting: float = 0.0, nbytes: int = 0, flops: int = 0
    ) -> None:
        spent = self.operations.setdefault(name, Spent())
        spent.calls += 1
        spent.seconds += seconds
        spent.waiting += waiting
        spent.nbytes += nbytes
        spent.flops += flops


def name_matrices(model: Any) -> list[tuple[str, Any]]:
    """(name in a profile, matrix or tuple of matrices) of each product of a model."""
    named: list[tuple[str, Any]] = []
    for block in model.decoder.blocks:
        if block.mixer:
            kinds = ["query, key, value", "attention output"]
            if not block.spec.attention:
                kinds = ["convolution input", "convolution output"]
            elif block.mixer.gate:
                kinds.insert(1, "gate of attention")
            named += zip(kinds, block.mixer.products)
        if block.spec.experts:
            named.append(("router", block.mlp.router))
            if block.mlp.shared_gate:
                named.append(("gate of the shared expert", block.mlp.shared_gate))
        mlp = block.mlp.shared if block.spec.experts else block.mlp
        if mlp is not None:
            named += [("gate, up", mlp.gate_up), ("down", mlp.down)]
        if block.input:
            named.append(("gate of the layer's input", block.input.gate))
            named.append(("layer's input", block.input.projection))
    if model.decoder.inputs:
        named.append(("inputs of layers", model.decoder.inputs.projection))
    return [(name, linear.weight) for name, linear in (*named, ("head", model.decoder.head))]


def matrix_parts(matrix: Any) -> tuple[Any, ...]:
    """The matrices of a product; each has shape (N, K) and nbytes."""
    return matrix if isinstance(matrix, tuple) else (matrix,)


@contextmanager
def clock_ops(
    model: Any, modules: Sequence[ModuleType], finish: Callable[[Any], object], note: str
) -> Iterator[Profile]:
    """Clock each call of the vocabulary's `modules` in the block; a call inside another counts for
    the outer one. finish(results): wait until they are computed.
    """
    profile, inside = Profile(note=note), False
    names = {id(matrix): name for name, matrix in name_matrices(model)}

    def clock(word: str, function: Callable) -> Callable:
        def clocked(x: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal inside
            if inside:
                return function(x, *arguments, **named)
            inside, started = True, time.perf_counter()
            try:
                results = function(x, *arguments, **named)
                finish(results)
            finally:
                inside = False
            seconds = time.perf_counter() - started
            if word in _PRODUCTS:
                matrices = matrix_parts(arguments[0])
                weights = sum(math.prod(matrix.shape) for matrix in matrices)
                flops = 2 * math.prod(results.shape[:-1]) * weights
                nbytes = sum(matrix.nbytes for matrix in matrices)
                name = names.get(id(arguments[0]), _WORDS[word])
                profile.add(name, seconds, nbytes=nbytes, flops=flops)
            else:
                profile.add(_WORDS[word], seconds)
            return results

        return clocked

    former = [(ops, word, getattr(ops, word)) for ops in modules for word in _WORDS]
    for ops, word, function in former:
        setattr(ops, word, clock(word, function))
    try:
        yield profile
    finally:
        for ops, word, function in former:
            setattr(ops, word, function)
