"""Golden traces: what a float32 NumPy run gave, in a small file that any machine can check itself against.

A file is one JSON object. Per probe (core.parity) and position it holds the values' projections on DIRECTIONS random
sign vectors and their norm, as little-endian float32 in base64: the projections of a difference have its norm as their
root mean square on average (Johnson and Lindenstrauss 1984), so a run is judged without the arrays. Of the logits it
holds the likeliest tokens with their values and the logarithm of the sum of exponentials.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import TraceError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.generation.rng import threefry2x32

from . import parity

FORMAT, VERSION = "mlx_llama trace", 1
DIRECTIONS = 8
TOP = 8  # likeliest tokens that are kept
MOST_BYTES = 1 << 28  # of a file that is read at all
_SAMPLED = 64  # rows of each tensor that go into a checkpoint's hash


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 over the config and, of every tensor, its name, shape, format and up to 64 rows spread over it.

    Not over all bytes: a checkpoint of any size is known in a moment, and other weights differ in rows everywhere.
    """
    found = hashlib.sha256()
    found.update(json.dumps(checkpoint.config.__dict__, sort_keys=True, default=str).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        rows = np.unique(np.linspace(0, tensor.shape[0] - 1, min(_SAMPLED, tensor.shape[0])).astype(np.int64))
        if isinstance(tensor, Tensor):
            kind, parts = tensor.dtype, [tensor.bits[rows]]
        else:
            kind, parts = tensor.format, [tensor.take(rows)]
        found.update(f"{name} {list(tensor.shape)} {kind}".encode())
        for part in parts:
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()


def signs(width: int) -> np.ndarray:
    """The sign vectors that values of a width are projected on: float64 [width, DIRECTIONS], the same everywhere."""
    words = threefry2x32((width, 0), np.arange(width * DIRECTIONS, dtype=np.uint32), 0)
    return ((words >> 31).astype(np.float64) * 2 - 1).reshape(width, DIRECTIONS)


def sketch(values: np.ndarray) -> np.ndarray:
    """Projections and norm of each row: float32 [T, width] -> float32 [T, DIRECTIONS + 1]."""
    values = values.astype(np.float64)
    return np.concatenate([values @ signs(values.shape[1]), np.linalg.norm(values, axis=1)[:, None]], 1).astype(np.float32)


@dataclass
class Trace:
    """model: the checkpoint's name; hash: see checkpoint_hash. tokens: ids, of which the last `decoded` are run one by one.

    sketches: by probe, float32 [T, DIRECTIONS + 1]. widths: by probe. top_ids, top_values: of the likeliest tokens
    [T, TOP]; logsumexp: [T]. greedy: tokens that the engine decodes after the prompt.
    """

    model: str
    hash: str
    tokens: list[int]
    decoded: int
    greedy: list[int]
    widths: dict[str, int]
    sketches: dict[str, np.ndarray]
    top_ids: np.ndarray
    top_values: np.ndarray
    logsumexp: np.ndarray

    def save(self, path: str | os.PathLike) -> None:
        """Raises TraceError when the file cannot be written."""
        held = {
            "format": FORMAT, "version": VERSION, "model": self.model, "hash": self.hash, "tokens": self.tokens,
            "decoded": self.decoded, "greedy": self.greedy, "widths": self.widths,
            "sketches": {name: _packed(array) for name, array in self.sketches.items()},
            "top_ids": self.top_ids.tolist(), "top_values": _packed(self.top_values), "logsumexp": _packed(self.logsumexp),
        }
        try:
            Path(path).expanduser().write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
        except (OSError, ValueError, RuntimeError) as error:
            raise TraceError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def record(checkpoint: Checkpoint, tokens: list[int], decoded: int, probes: dict[str, np.ndarray],
           greedy: list[int]) -> Trace:
    """The trace of a run whose probes core.parity.collect gave."""
    logits = probes["logits"]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    name = Path(checkpoint.name).name if os.path.exists(checkpoint.name) else checkpoint.name  # no path of this machine
    return Trace(name, checkpoint_hash(checkpoint), list(tokens), decoded, list(greedy),
                 {name: array.shape[1] for name, array in probes.items()},
                 {name: sketch(array) for name, array in probes.items()}, order.astype(np.int32),
                 np.take_along_axis(logits, order, 1).astype(np.float32), _logsumexp(logits))


def load(path: str | os.PathLike) -> Trace:
    """Read a trace. Raises TraceError that names the file and the field."""
    def fail(text: str) -> TraceError:
        return TraceError(f"{path}: {text}: record it again with --record")

    try:
        file = Path(path).expanduser()
        if file.stat().st_size > MOST_BYTES:
            raise fail(f"is no trace: {file.stat().st_size} bytes")
        held = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise fail("is no trace (nested too deeply)") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user's home
        raise TraceError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:  # JSON, UTF-8, a NUL in the name
        raise fail(f"is no trace ({error})") from None
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise fail(f'is no trace: its field "format" is not {FORMAT!r}')
    if held.get("version") != VERSION:
        raise fail(f"field \"version\" is {held.get('version')!r:.40}, this package reads {VERSION}")

    def ids(name: str, least: int) -> list[int]:
        value = held.get(name)
        if not isinstance(value, list) or len(value) < least or not all(
                type(one) is int and 0 <= one < 1 << 31 for one in value):
            raise fail(f'field "{name}" must be a list of at least {least} token ids')
        return value

    def array(name: str, text: Any, shape: tuple[int, ...]) -> np.ndarray:
        try:
            found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
        except (binascii.Error, ValueError, TypeError):
            raise fail(f'field "{name}" is not float32 in base64') from None
        if found.size != math.prod(shape) or not np.isfinite(found).all():
            raise fail(f'field "{name}" must hold {math.prod(shape)} finite numbers, it has {found.size}')
        return found.reshape(shape).astype(np.float32)

    for name in ("model", "hash"):
        if not isinstance(held.get(name), str):
            raise fail(f'field "{name}" must be a text')
    tokens, greedy = ids("tokens", 2), ids("greedy", 0)
    decoded = held.get("decoded")
    if type(decoded) is not int or not 0 < decoded < len(tokens):
        raise fail(f'field "decoded" is {decoded!r:.40}, must be 1 to {len(tokens) - 1}')
    widths, sketches = held.get("widths"), held.get("sketches")
    if not isinstance(widths, dict) or not all(type(one) is int and 0 < one < 1 << 24 for one in widths.values()):
        raise fail('field "widths" must give each probe\'s width')
    if not isinstance(sketches, dict) or sketches.keys() != widths.keys() or "logits" not in widths:
        raise fail('fields "sketches" and "widths" must name the same probes, logits among them')
    T, top = len(tokens), held.get("top_ids")
    kept = min(TOP, widths["logits"])
    if not isinstance(top, list) or len(top) != T or not all(
            isinstance(row, list) and len(row) == kept and all(type(one) is int and 0 <= one < widths["logits"] for one in row)
            for row in top):
        raise fail(f'field "top_ids" must have {T} lists of {kept} token ids')
    return Trace(held["model"], held["hash"], tokens, decoded, greedy, widths,
                 {name: array(f"sketches.{name}", text, (T, DIRECTIONS + 1)) for name, text in sketches.items()},
                 np.array(top, np.int32), array("top_values", held.get("top_values"), (T, kept)),
                 array("logsumexp", held.get("logsumexp"), (T,)))


def require_same(trace: Trace, checkpoint: Checkpoint, path: str | os.PathLike) -> None:
    """Raises TraceError when the trace was recorded from another checkpoint."""
    found = checkpoint_hash(checkpoint)
    if found != trace.hash:
        raise TraceError(f"{path}: was recorded from {trace.model} (hash {trace.hash[:12]}), and this is {checkpoint.name} "
                         f"(hash {found[:12]}): give that model with --model, or record this one with --record")


@dataclass
class Checked:
    """A run against a trace. errors: by probe in the order of computation, relative error at each position (estimated,
    see above), float64 [T]. top: share of the trace's likeliest tokens whose logits agree."""

    errors: dict[str, np.ndarray]
    tolerance: float
    greedy: list[int]
    first_greedy: int | None
    missing: list[str] = field(default_factory=list)

    @property
    def first_bad(self) -> str | None:
        """The first probe that is off somewhere."""
        return next((name for name, values in self.errors.items() if not values.max() <= self.tolerance), None)


def check(trace: Trace, probes: dict[str, np.ndarray], greedy: list[int], tolerance: float, order: list[str]) -> Checked:
    """probes, greedy: of a run over the trace's tokens; order: all probes' names as they are computed."""
    errors: dict[str, np.ndarray] = {}
    for name in order:
        if name not in trace.sketches or name not in probes:
            continue
        wanted, found = trace.sketches[name].astype(np.float64), probes[name]
        if found.shape[1] != trace.widths[name]:
            errors[name] = np.full(len(found), math.inf)
            continue
        floor = parity.floored(wanted[:, -1])
        apart = np.abs(sketch(found).astype(np.float64) - wanted)
        apart[~np.isfinite(apart)] = math.inf
        # A norm is one more look at the difference: it may not be larger than that.
        errors[name] = np.maximum(np.sqrt(np.mean(apart[:, :-1] ** 2, axis=1)), apart[:, -1]) / floor
    logits = probes["logits"].astype(np.float64)
    if logits.shape[1] == trace.widths["logits"] and "logits" in errors:
        values = np.take_along_axis(logits, trace.top_ids.astype(np.int64), 1)
        spread = np.sqrt(np.mean(logits**2, axis=1)) + 1e-30
        off = np.maximum(np.abs(values - trace.top_values).max(1), np.abs(_logsumexp(logits) - trace.logsumexp)) / spread
        # A single logit may be off by some times what all are on average.
        errors["logits"] = np.maximum(errors["logits"], np.where(np.isfinite(off), off, math.inf) / 8)
    first = next((i for i, pair in enumerate(zip(greedy, trace.greedy)) if pair[0] != pair[1]), None)
    return Checked(errors, tolerance, greedy, first, [name for name in order if name not in errors])


def _packed(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    top = logits.max(axis=1)
    return (top + np.log(np.exp(logits - top[:, None]).sum(axis=1))).astype(np.float32)
