"""Measure the importance of each matrix's columns on a text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.api.llm import LLM
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.quantize.importance import Importance

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

    def experts(self, *arguments: Any) -> np.ndarray:
        return self._ops.mix_experts(self, *arguments)

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

    for block, spec in zip(decoder.blocks, config.layers):
        if spec.qkv:
            add(spec.qkv, block.attention.qkv.weight)
            add((spec.out,), block.attention.out.weight)
        if experts := spec.experts:
            mlp, count = block.mlp, experts.count
            add((experts.router,), mlp.router.weight)
            for modules, stack in zip((experts.gate, experts.up, experts.down), mlp.stacks):
                add(modules, stack, count)
            if experts.shared:
                add(experts.shared[:2], mlp.shared.gate_up.weight)
                add(experts.shared[2:], mlp.shared.down.weight)
        elif spec.down:
            add(spec.gate_up, block.mlp.gate_up.weight)
            add((spec.down,), block.mlp.down.weight)
    return places
