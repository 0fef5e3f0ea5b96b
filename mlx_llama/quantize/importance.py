"""llama.cpp's importance matrices: mean squares of inputs, to weigh quantising's errors. Two file
formats (llama.cpp, tools/imatrix/README.md and common/imatrix-loader.cpp): GGUF, and the older
".dat", a sequence of int32 numbers and float32 sums.
"""

from __future__ import annotations

import ast
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.api.llm import LLM
from mlx_llama.core.errors import CheckpointError, OptionsError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.system.files import read_file, reading, write_file, writing

from .writing import swap_heads

_LIMIT = 1 << 30  # bytes of a file
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Importance:
    """Sums of squares of inputs, by the matrices' GGUF names. Stacks have a row for each expert."""

    sums: Mapping[str, np.ndarray]  # float32 [1 or experts, K]
    counts: Mapping[str, np.ndarray]  # tokens seen, float32 [1 or experts]
    datasets: tuple[str, ...] = ()  # names of the texts
    chunks: int = 1
    chunk_size: int = 512  # tokens

    def find(self, name: str, count: int, columns: int) -> np.ndarray | None:
        """Mean squares float32 [count, columns] of a matrix or stack, ones for an expert that no
        token used; None if the file lacks it. Raises CheckpointError: the file was measured on
        another model, or is not finite.
        """
        if name not in self.sums:
            return None
        sums, counts = self.sums[name], self.counts[name]
        if sums.size == count * columns and len(sums) == 1 != count:
            sums = sums.reshape(count, columns)
        if sums.shape[1] != columns or len(sums) not in (1, count):
            raise CheckpointError(
                f"the importance matrix has {list(sums.shape)} inputs for {name}, expected "
                f"{[count, columns]}: it was measured on another model"
            )
        with np.errstate(all="ignore"):
            means = sums / counts[:, None]
        means = np.where(counts[:, None] > 0, means, np.float32(1)).astype(np.float32)
        if not np.isfinite(means).all():
            raise CheckpointError(f"the importance of {name} is not finite; measure it again")
        return np.broadcast_to(means, (count, columns))


def read_importance(path: str | os.PathLike) -> Importance:
    """Read a file of either format. Raises CheckpointError if it is missing or damaged."""
    path = Path(path)
    with reading(path, CheckpointError, "make it with `calibrate`, or with llama-imatrix"):
        content = read_file(path, _LIMIT)
    try:
        return _read_gguf(path) if content[:4] == b"GGUF" else _read_legacy(content)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise CheckpointError(
            f"{path}: is not an importance matrix ({show(str(error))}); make it again"
        ) from None


def write_importance(importance: Importance, path: str | os.PathLike) -> None:
    """Write GGUF, or the older format for a name that ends in .dat. Raises CheckpointError."""
    path = Path(path)
    with writing(path, CheckpointError):
        if path.suffix == ".dat":
            write_file(path, _pack_legacy(importance))
        else:
            _write_gguf(importance, path)


def _read_gguf(path: Path) -> Importance:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    arrays = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
    names = [name.removesuffix(_SUMS) for name in arrays if name.endswith(_SUMS)]
    if not names:
        raise ValueError(f"no tensor ends in {_SUMS}")

    def field(name: str, default: Any) -> Any:
        return reader.fields[name].contents() if name in reader.fields else default

    counts = {name: arrays[name + _COUNTS].reshape(-1) for name in names}
    sums = {name: arrays[name + _SUMS].reshape(len(counts[name]), -1) for name in names}
    return Importance(
        sums,
        counts,
        datasets=tuple(field("imatrix.datasets", ())),
        chunks=int(field("imatrix.chunk_count", 1)),
        chunk_size=int(field("imatrix.chunk_size", 512)),
    )


def _write_gguf(importance: Importance, path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "imatrix")
    del writer.kv_data[0]["general.architecture"]  # the file is not a model
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", list(importance.datasets) or ["text"])
    writer.add_uint32("imatrix.chunk_count", importance.chunks)
    writer.add_uint32("imatrix.chunk_size", importance.chunk_size)
    for name in sorted(importance.sums):
        writer.add_tensor(name + _SUMS, np.ascontiguousarray(importance.sums[name], np.float32))
        counts = np.ascontiguousarray(importance.counts[name], np.float32)
        writer.add_tensor(name + _COUNTS, counts[:, None])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _read_legacy(content: bytes) -> Importance:
    """Parse entries of (name, calls, sums of means over the calls)."""
    at, sums, counts = 0, {}, {}

    def take(nbytes: int) -> bytes:
        nonlocal at
        if not 0 <= nbytes <= len(content) - at:
            raise ValueError(f"{nbytes} bytes at {at} of {len(content)}")
        at += nbytes
        return content[at - nbytes : at]

    def number() -> int:
        return int.from_bytes(take(4), "little", signed=True)

    entries = number()
    if not 0 < entries <= len(content) // 12:
        raise ValueError(f"{entries} entries")
    for _ in range(entries):
        name = take(number()).decode()
        calls, values = number(), number()
        sums[name] = np.frombuffer(take(4 * values), "<f4").reshape(1, -1)
        counts[name] = np.array([max(calls, 1)], np.float32)
        if not values:
            raise ValueError(f"no values of {name}")
    chunks, datasets = 1, tuple[str, ...]()
    if at < len(content):
        chunks, datasets = number(), (take(number()).decode(),)
    return Importance(sums, counts, datasets, chunks)


def _pack_legacy(importance: Importance) -> bytes:
    parts = [struct.pack("<i", len(importance.sums))]
    for name in sorted(importance.sums):
        count, sums = importance.counts[name], importance.sums[name]
        # rounded up, so that no entry has zero calls
        calls = max(1, -(-int(count.max()) // importance.chunk_size))
        means = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], 1)
        text, values = name.encode(), (means * calls).astype("<f4")
        parts += [struct.pack("<i", len(text)), text, struct.pack("<ii", calls, values.size)]
        parts.append(values.tobytes())
    dataset = (importance.datasets or ("text",))[-1].encode()
    parts += [struct.pack("<ii", importance.chunks, len(dataset)), dataset]
    return b"".join(parts)


# Measured on a text

WINDOW = 512  # tokens that are computed together
WINDOWS = 32  # maximum number, for this package's documentation
PACKAGE = Path(__file__).parents[1]


def read_docs() -> str:
    """Join the docstrings of this package's modules, classes and functions."""
    texts = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes))
        texts.append("\n\n".join(filter(None, docs)))
    return "\n\n".join(filter(None, texts))


def measure_importance(
    llm: LLM,
    tokens: Sequence[int],
    dataset: str,
    window: int = WINDOW,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Importance:
    """Measure mean squares of the inputs of all layers' matrices over windows of a text, as
    llama-imatrix does: BOS takes the place of each window's first token if the tokenizer adds it.

    llm: on the cpu backend, without compiled kernels. Raises OptionsError for a shorter text.
    """
    window = min(window, llm.engine.context)
    count = len(tokens) // window
    if not count:
        raise OptionsError(
            f"the text to calibrate with has {len(tokens)} tokens, expected at least {window}; "
            "choose a longer text"
        )
    bos = [llm.tokenizer.bos_id] if llm.tokenizer.adds_bos else []
    recorder, model, decoder = _Recorder(llm), llm.model, llm.model.decoder
    model.decoder = decoder.over(recorder)
    try:
        for i in range(count):
            part = [*bos, *map(int, tokens[i * window + len(bos) : (i + 1) * window])]
            model.forward([part], 0, model.make_cache(window), all_positions=True)
            progress(i + 1, count)
    finally:
        model.decoder = decoder
    sums = {name: total.astype(np.float32) for name, total in recorder.sums.items()}
    family = FAMILIES[llm.checkpoint.config.architecture]
    for name, (_, columns) in swap_heads(llm.checkpoint.config, family.tiles).items():
        if columns is not None:
            sums[family.names.gguf(name)] = sums[family.names.gguf(name)][:, columns]
    return Importance(sums, recorder.counts, (dataset,), count, window)


class _Recorder:
    """NumPy's operations, which also sum the squares of the inputs of known matrices."""

    def __init__(self, llm: LLM):
        self._ops = llm.model.ops
        self._places = _name_matrices(llm.model.decoder, llm.checkpoint.config)
        self.sums: dict[str, np.ndarray] = {}  # float64 [1 or experts, K]
        self.counts: dict[str, np.ndarray] = {}  # float32 [1 or experts]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: np.ndarray, weight: Any, bias: Any = None) -> np.ndarray:
        self._record(x, weight)
        return self._ops.linear(x, weight, bias)

    def gated_linear(
        self, x: np.ndarray, weight: Any, bias: Any = None, activation: str = "silu"
    ) -> np.ndarray:
        self._record(x, weight)
        return self._ops.gated_linear(x, weight, bias, activation)

    def experts(self, x: np.ndarray, scores: np.ndarray, stacks: Any) -> np.ndarray:
        return self._ops.mix_experts(self, x, scores, stacks)

    def _record(self, x: np.ndarray, weight: Any) -> None:
        parts = weight if isinstance(weight, tuple) else (weight,)
        places = {self._places[id(part)] for part in parts if id(part) in self._places}
        if not places:
            return
        rows = x.reshape(-1, x.shape[-1]).astype(np.float64)
        squares = np.einsum("tk,tk->k", rows, rows)
        for name, expert, experts in places:
            sums = self.sums.setdefault(name, np.zeros((experts, rows.shape[1])))
            counts = self.counts.setdefault(name, np.zeros(experts, np.float32))
            sums[expert] += squares
            counts[expert] += len(rows)


def _name_matrices(decoder: Any, config: LlamaConfig) -> dict[int, tuple[str, int, int]]:
    """{id of a layer's matrix: (its GGUF name, number of the expert, number of experts)}."""
    family = FAMILIES[config.architecture]
    names, parts = family.names, {} if family.splits else config.fused_parts()
    places: dict[int, tuple[str, int, int]] = {}

    def add(modules: Sequence[str], weight: Any, count: int = 1) -> None:
        matrices = weight if isinstance(weight, tuple) else (weight,)
        for i, (module, matrix) in enumerate(zip(modules, matrices, strict=True)):
            stored = parts.get(f"{module}.weight", (f"{module}.weight",))[0]
            places[id(matrix)] = names.gguf(stored), i if count > 1 else 0, count

    for block, layer in zip(decoder.blocks, config.layers):
        if mixer := layer.mixer:
            for modules, linear in zip(mixer.modules, block.mixer.products):
                add(modules, linear.weight)
        mlp = block.mlp
        if experts := layer.experts:
            add((experts.router.module,), mlp.router.weight)
            if experts.shared_gate:
                add((experts.shared_gate,), mlp.shared_gate.weight)
            for modules, stack in zip((experts.gate, experts.up, experts.down), mlp.stacks):
                add(modules, stack, experts.count)
            mlp = mlp.shared
        if layer.mlp:
            add(layer.mlp.gate_up, mlp.gate_up.weight)
            add((layer.mlp.down,), mlp.down.weight)
        if part := layer.input:
            add((part.gate,), block.input.gate.weight)
            add((part.projection,), block.input.projection.weight)
    return places
