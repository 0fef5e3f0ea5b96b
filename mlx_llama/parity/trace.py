"""Golden traces: a small file with the probes of a float32 NumPy run, for checks on other machines.

A file is a JSON object. For each probe (see parity) and position it holds the values' projections
on DIRECTIONS random sign vectors and their norm, as little-endian float32 in base64. The
projections of a difference have its norm as their root mean square on average (Johnson and
Lindenstrauss 1984), so a run can be checked without the arrays. Of the logits, the file holds the
most likely tokens with their values and the log of the sum of exponentials.
"""

from __future__ import annotations

import base64
import codecs
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from mlx_llama.core.errors import TraceError, show
from mlx_llama.core.files.checkpoint import Checkpoint, checkpoint_hash
from mlx_llama.core.rng import threefry2x32
from mlx_llama.core.system.files import read_file, reading, write_file, writing

from .differences import clamp_norms, first_other

DIRECTIONS = 8
TOP = 8  # most likely tokens in a trace
MOST_BYTES = 1 << 28  # largest file


def signs(width: int) -> np.ndarray:
    """Sign vectors for values of a width: float64 [width, DIRECTIONS], equal on every machine."""
    words = threefry2x32((width, 0), np.arange(width * DIRECTIONS, dtype=np.uint32), 0)
    return ((words >> 31).astype(np.float64) * 2 - 1).reshape(width, DIRECTIONS)


def sketch(values: np.ndarray) -> np.ndarray:
    """Projections and norm of each row: float32 [T, width] -> float32 [T, DIRECTIONS + 1]."""
    values = values.astype(np.float64)
    return np.concatenate(
        [values @ signs(values.shape[1]), np.linalg.norm(values, axis=1)[:, None]], 1
    ).astype(np.float32)


def _unpack(value: Any) -> np.ndarray:
    """Decode float32 [n] from base64; arrays pass unchanged."""
    if isinstance(value, np.ndarray):
        return value
    try:
        array = np.frombuffer(base64.b64decode(value, validate=True), "<f4")
    except (ValueError, TypeError):
        raise ValueError("must be float32 numbers in base64") from None
    if not np.isfinite(array).all():
        raise ValueError("must hold finite numbers")
    return array.astype(np.float32)


def _pack(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode()


Floats = Annotated[np.ndarray, BeforeValidator(_unpack), PlainSerializer(_pack)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Trace(BaseModel):
    """The file's schema, with arrays instead of base64."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    format: Literal["mlx_llama trace"]
    version: Literal[1]
    model: str  # the checkpoint's name
    hash: str  # the checkpoint's, see core.files.checkpoint
    tokens: Annotated[list[TokenId], Field(min_length=2)]
    decoded: Annotated[int, Field(ge=1)]  # number of tokens at the end that run one by one
    greedy: list[TokenId]  # decoded by the engine after the prompt
    widths: dict[str, Annotated[int, Field(ge=1, lt=1 << 24)]]  # by probe
    sketches: dict[str, Floats]  # by probe, [T, DIRECTIONS + 1]
    top_ids: list[list[TokenId]]  # most likely tokens at each position, [T][TOP]
    top_values: Floats  # their logits, [T, TOP]
    logsumexp: Floats  # [T]

    @model_validator(mode="after")
    def _check_shapes(self) -> Trace:
        T = len(self.tokens)
        if self.decoded >= T:
            raise ValueError(f"decoded is {self.decoded}, must be 1 to {T - 1}")
        if self.sketches.keys() != self.widths.keys() or "logits" not in self.widths:
            raise ValueError("sketches and widths must name the same probes, logits among them")
        top = min(TOP, self.widths["logits"])
        are_ids = all(len(x) == top and max(x) < self.widths["logits"] for x in self.top_ids)
        if len(self.top_ids) != T or not are_ids:
            raise ValueError(f"top_ids must have {T} lists of {top} ids of the vocabulary")
        self.sketches = {
            name: _reshape(f"sketches.{name}", array, T, DIRECTIONS + 1)
            for name, array in self.sketches.items()
        }
        self.top_values = _reshape("top_values", self.top_values, T, top)
        self.logsumexp = _reshape("logsumexp", self.logsumexp, T)
        return self

    def save(self, path: str | os.PathLike) -> None:
        """Write the file. Raises TraceError."""
        content = self.model_dump_json(indent=1) + "\n"
        with writing(path, TraceError):
            write_file(os.path.expanduser(path), content.encode())


def _reshape(name: str, array: np.ndarray, *shape: int) -> np.ndarray:
    if array.size != math.prod(shape):
        raise ValueError(f"{name} must hold {math.prod(shape)} numbers, not {array.size}")
    return array.reshape(shape)


def record(
    checkpoint: Checkpoint,
    tokens: list[int],
    decoded: int,
    probes: dict[str, np.ndarray],
    greedy: list[int],
) -> Trace:
    """Make the trace of a run. probes: from parity.collect."""
    logits = probes["logits"]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    # hide this machine's path
    name = Path(checkpoint.name).name if os.path.exists(checkpoint.name) else checkpoint.name
    run: Any = {"model": name, "hash": checkpoint_hash(checkpoint), "tokens": tokens}
    run |= {"decoded": decoded, "greedy": greedy, "top_ids": order.tolist()}
    run["widths"] = {name: array.shape[1] for name, array in probes.items()}
    run["sketches"] = {name: sketch(array) for name, array in probes.items()}
    run["top_values"] = np.take_along_axis(logits, order, 1).astype(np.float32)
    return Trace(format="mlx_llama trace", version=1, logsumexp=_logsumexp(logits), **run)


def load(path: str | os.PathLike) -> Trace:
    """Read a trace. Raises TraceError that names the file and the field."""
    with reading(path, TraceError, "check its name"):
        content = read_file(os.path.expanduser(path), MOST_BYTES)
    try:
        return Trace.model_validate_json(content.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        reason = _describe(error.errors(include_url=False)[0])
        raise TraceError(
            f"{path}: is not a trace of this version ({reason}): record it again with `record`"
        ) from None


def _describe(error: ErrorDetails) -> str:
    """The field and its fault, in one line."""
    text = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return text
    is_named = error["type"] in ("missing", "value_error")
    value = "" if is_named else f", found {show(error['input'], 40)}"
    return f"field {'.'.join(map(str, error['loc']))}: {text}{value}"


def require_same(trace: Trace, checkpoint: Checkpoint, path: str | os.PathLike) -> None:
    """Raise TraceError if the trace was recorded from another checkpoint."""
    if (identity := checkpoint_hash(checkpoint)) != trace.hash:
        raise TraceError(
            f"{path}: was recorded from {trace.model} (hash {trace.hash[:12]}), and this is "
            f"{checkpoint.name} (hash {identity[:12]}): choose that model with `model`, or record "
            "this model with `record`"
        )


@dataclass
class Checked:
    """A run compared with a trace."""

    # estimated relative error at each position, float64 [T], by probe in their order
    errors: dict[str, np.ndarray]
    tolerance: float
    greedy: list[int]
    first_greedy: int | None  # index of the first greedy token that differs
    missing: list[str] = field(default_factory=list)  # probes that were not compared

    @property
    def first_bad(self) -> str | None:
        """The first probe that exceeds the tolerance at any position."""
        return next(
            (name for name, values in self.errors.items() if not values.max() <= self.tolerance),
            None,
        )


def check(
    trace: Trace,
    probes: dict[str, np.ndarray],
    greedy: list[int],
    tolerance: float,
    order: list[str],
) -> Checked:
    """Compare a run over the trace's tokens. order: names of all probes, as computed."""
    errors: dict[str, np.ndarray] = {}
    for name in order:
        if name not in trace.sketches or name not in probes:
            continue
        expected, actual = trace.sketches[name].astype(np.float64), probes[name]
        if actual.shape[1] != trace.widths[name]:
            errors[name] = np.full(len(actual), math.inf)
            continue
        apart = np.abs(sketch(actual).astype(np.float64) - expected)
        apart[~np.isfinite(apart)] = math.inf
        # The difference of the norms is a second lower bound of the norm of the difference.
        norms = np.maximum(np.sqrt(np.mean(apart[:, :-1] ** 2, axis=1)), apart[:, -1])
        errors[name] = norms / clamp_norms(expected[:, -1])
    logits = probes["logits"].astype(np.float64)
    if logits.shape[1] == trace.widths["logits"] and "logits" in errors:
        values = np.take_along_axis(logits, np.array(trace.top_ids), 1)
        spread = np.sqrt(np.mean(logits**2, axis=1)) + 1e-30
        top = np.abs(values - trace.top_values).max(1)
        off = np.maximum(top, np.abs(_logsumexp(logits) - trace.logsumexp)) / spread
        off[~np.isfinite(off)] = math.inf
        # A single logit may be off by several times the average.
        errors["logits"] = np.maximum(errors["logits"], off / 8)
    first = first_other(greedy, trace.greedy)
    return Checked(errors, tolerance, greedy, first, [name for name in order if name not in errors])


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    top = logits.max(axis=1)
    return (top + np.log(np.exp(logits - top[:, None]).sum(axis=1))).astype(np.float32)
