"""Shares of a checkpoint for the processes of a tensor-parallel run (Shoeybi et al. 2019, arXiv
1909.08053), and what they do with their part of the vocabulary.

Query heads go with their key-value heads; gate and up are split by rows, the matrices behind them,
output and down, by columns; embedding and head by vocabulary. A share is a checkpoint of a smaller
model with the same stream, so a backend's weights.py fuses and packs it like any other.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.llama import Embedding
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.ops import Array, Probe

Span = tuple[int, int]

# checkpoints [B, heads, T, D], of a process's own heads
HEAD_PROBES = ("query", "key", "value", "query_rope", "key_rope")


@dataclass(frozen=True)
class Share:
    """One process's part of a model."""

    checkpoint: Checkpoint  # its tensors and sizes, but the vocabulary of the whole
    # token ids whose rows of embedding and head each process has, first and last + 1
    vocabulary: tuple[Span, ...]
    summed: frozenset[str]  # modules whose outputs are this process's summand


class Ranks(Protocol):
    """The processes of a run, of a backend's ranks.py. All make the same calls in one order."""

    rank: int  # this process's
    size: int
    sent: int  # bytes summed or gathered by this process; a traced or captured step counts once

    # the sum of all processes' x, of any shape, which it may overwrite
    def sum(self, x: Array) -> Array: ...
    # all processes' x, of one shape, in the order of ranks: [size, *x.shape]
    def gather(self, x: Array) -> Array: ...
    # along an axis that may have another width in each process
    def concatenate(self, x: Array, axis: int, widths: Sequence[int] | None = None) -> Array: ...
    # x where the condition holds, else 0
    def select(self, condition: Array, x: Array) -> Array: ...
    # bytes of one rank on all, uint8 [n]; rank 0 need not wait until the others have them
    def broadcast(self, data: np.ndarray, root: int) -> np.ndarray: ...


@dataclass(frozen=True)
class ShareEmbedding(Embedding):
    """The rows of the tokens `span`, first and last + 1; weight: [last - first + 1, E]."""

    span: Span
    ranks: Ranks

    def __call__(self, tokens: Array) -> Array:
        first, last = self.span
        local, ranks = tokens - first, self.ranks
        is_here = (local >= 0) & (local < last - first)
        rows = super().__call__(ranks.select(is_here, local))
        return ranks.sum(ranks.select(is_here[..., None], rows))


class Vocabulary:
    """The vocabulary over all processes. spans: the tokens of each, first and last + 1."""

    def __init__(self, ranks: Ranks, spans: Sequence[Span]):
        self.ranks, self.spans = ranks, tuple(spans)
        self.first = self.spans[ranks.rank][0]  # token of this process

    def gather(self, logits: Array) -> Array:
        """Logits [..., V] of this process's [..., V']."""
        return self.ranks.concatenate(logits, -1, [last - first for first, last in self.spans])

    def choose(self, words: Any, scores: Array) -> Array:
        """The token of the largest score, the first of equals: int32 [B, 1].

        scores: float32 [B, V'], of this process; words: see core.sample.Words.
        """
        best = words.int32(words.best(scores)[1])
        bits = words.to_bits(words.gather(scores, best))
        pairs = list(self.ranks.gather(words.concatenate([bits, best + self.first])))
        scores = words.concatenate([words.from_bits(pair[:, :1]) for pair in pairs])
        tokens = words.concatenate([pair[:, 1:] for pair in pairs])
        return words.gather(tokens, words.best(scores)[1])

    def gather_probes(self, probe: Probe) -> Probe:
        """`probe` with the heads and logits of all processes."""

        def show(name: str, array: Array) -> None:
            if name == "logits":
                array = self.gather(array)
            elif name.rpartition(".")[2] in HEAD_PROBES:
                array = self.ranks.concatenate(array, 1)
            probe(name, array)

        return show


def take_share(checkpoint: Checkpoint, rank: int, size: int) -> Share:
    """The share of process `rank` of `size`; reads no weights. Raises BackendError."""
    config, tensors = checkpoint.config, checkpoint.tensors
    _check(checkpoint, size)
    hidden = _span(config.intermediate_size, _unit(checkpoint, "down_proj"), rank, size)
    vocabulary = tuple(_span(config.vocab_size, 1, part, size) for part in range(size))

    tables = ["model.embed_tokens", config.head_name]
    tables += [config.inputs.embedding] if config.inputs else []
    rows: dict[str, Span] = dict.fromkeys(tables, vocabulary[rank])
    columns: dict[str, Span] = {}
    for layer in config.layers:
        mixer, mlp = layer.attention, layer.mlp
        assert mixer and mlp  # _check_layout has seen them
        widths = (heads // size * mixer.head_dim for heads in (mixer.heads, mixer.key_value_heads))
        queries, keys = ((rank * width, (rank + 1) * width) for width in widths)
        rows |= zip(mixer.qkv, (queries, keys, keys))
        times = mlp.size // config.intermediate_size  # some layers are wider in Gemma 4
        units = hidden[0] * times, hidden[1] * times
        rows |= dict.fromkeys(mlp.gate_up, units)
        columns |= {mixer.out: queries, mlp.down: units}
    taken: dict[str, Tensor | AffineWeight] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if module in rows:
            taken[name] = tensor.part(name, *rows[module])
        elif module in columns and part == "weight":
            taken[name] = tensor.columns(*columns[module])
        elif module not in columns or rank == 0:  # the bias of a sum is added once
            taken[name] = tensor
    groups = {  # of some layers, where a family has several numbers
        name: value // size
        for name, value in config.own.items()
        if name.endswith("key_value_heads")
    }
    share = dataclasses.replace(
        config,
        num_attention_heads=config.num_attention_heads // size,
        num_key_value_heads=config.num_key_value_heads // size,
        intermediate_size=hidden[1] - hidden[0],
        own={**config.own, **groups},
    )
    nbytes = sum(tensor.nbytes for tensor in taken.values())
    smaller = dataclasses.replace(checkpoint, config=share, tensors=taken, nbytes=nbytes)
    return Share(smaller, vocabulary, frozenset(columns))


def working_sizes(checkpoint: Checkpoint) -> list[int]:
    """Numbers of processes that the model can be split over, 1 included."""
    config = checkpoint.config
    blocks = config.intermediate_size // _unit(checkpoint, "down_proj")
    unit, heads = _unit(checkpoint, "o_proj"), config.num_attention_heads
    sizes = range(1, min([blocks, *(kind.heads for kind in config.kinds)]) + 1)
    return [
        size
        for size in sizes
        if not any(kind.heads % size for kind in config.kinds)
        and not any(heads // size * kind.head_dim % unit for kind in config.kinds)
    ]


def _check(checkpoint: Checkpoint, size: int) -> None:
    _check_layout(checkpoint.config, checkpoint)
    working = working_sizes(checkpoint)
    if size in working:
        return
    config = checkpoint.config
    unit = max(_unit(checkpoint, "o_proj"), _unit(checkpoint, "down_proj"))
    blocks = f" and blocks of {unit} weights" if unit > 1 else ""
    several = f"{' or '.join(map(str, working[1:]))} processes" if working[1:] else "one process"
    groups = " or ".join(dict.fromkeys(str(kind.heads) for kind in config.kinds))
    raise BackendError(
        f"{checkpoint.name} cannot be split evenly over {size} processes: it has "
        f"{groups} key-value heads, {config.intermediate_size} hidden units"
        f"{blocks}; start {several}"
    )


def _check_layout(config: LlamaConfig, checkpoint: Checkpoint) -> None:
    """Raise BackendError for matrices that this split does not know."""
    known = {"model.embed_tokens", config.final_norm, config.head_name}
    if inputs := config.inputs:
        known |= {inputs.embedding, inputs.projection, inputs.norm}
    for layer in config.layers:
        mixer, mlp = layer.attention, layer.mlp
        if not mixer or layer.experts or not mlp or len(mlp.gate_up) != 2:
            raise BackendError(
                f"{checkpoint.name}: layers with fused projections, with experts or without a "
                "gate are not split over several processes: start one"
            )
        known |= {*itertools.chain(*layer.linears()), *layer.norms}
        for name in filter(None, (mixer.query_norm, mixer.key_norm)):
            if checkpoint.tensors[f"{name}.weight"].shape == (mixer.head_dim,):
                known.add(name)
    scalars = {layer.scalar for layer in config.layers}
    keys = (key for key in checkpoint.tensors if key not in scalars)
    unknown = next((key for key in keys if key.rpartition(".")[0] not in known), None)
    if unknown:
        raise BackendError(
            f"{checkpoint.name}: {unknown} is not split over several processes: start one"
        )


def _unit(checkpoint: Checkpoint, name: str) -> int:
    """Columns that are split together of the layers' matrices of that name."""
    modules = itertools.chain(
        *(group for layer in checkpoint.config.layers for group in layer.linears())
    )
    names = (f"{module}.weight" for module in modules if module.endswith(name))
    return math.lcm(*{checkpoint.tensors[name].column_unit for name in names})


def _span(count: int, unit: int, rank: int, size: int) -> Span:
    """Share `rank` of 0 .. count - 1 in whole units, as even as they allow."""
    units = -(-count // unit)
    first, last = (min(units * edge // size * unit, count) for edge in (rank, rank + 1))
    return first, last
