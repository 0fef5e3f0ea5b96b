"""Models of random weights in memory for measure_gpu.py, at real models' shapes, and as files for
llama.cpp.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import make_random_checkpoint
import ml_dtypes
import numpy as np
from make_random_checkpoint import SHAPES, write_tokenizer

from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.fit import split
from mlx_llama.core.files.quantized import GGUF_FORMATS, AffineWeight, GGUFWeight, MLXWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.quantize import gguf_export
from mlx_llama.quantize.gguf_types import choose_type

FEW_LAYERS = 4  # of a model that does not fit
MODELS = {
    "tiny": SHAPES["tiny"],
    "1.1b": SHAPES["tinyllama"],
    "8b": SHAPES["llama-3-8b"],
    "8b-4": SHAPES["llama-3-8b"] | {"num_hidden_layers": FEW_LAYERS},
}  # by --shapes
# bytes per weight, about
FORMATS = {"bf16": 2.0, "4-bit": 0.5 + 4 / 64, "q8_0": 34 / 32, "q4_k_m": 0.62}

# offsets of the float16 scales in GGUF blocks
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_MINIMUM = 7.5  # of Q4_K's two scales, the second over the first: codes of 0 to 15 around 0


# Random weights: "bf16", types of GGUF files, and MLX's "affine BITS/GROUP", as in "affine 4/64"


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bit patterns of bfloat16, uint16."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def block_size(kind: str) -> int:
    """Weights of a block."""
    if kind in GGUF_FORMATS:
        return GGUF_FORMATS[kind].block_size
    return 1 if kind == "bf16" else int(kind.partition("/")[2])


def random_blocks(
    kind: str, count: int, rng: np.random.Generator, spread: float
) -> list[np.ndarray]:
    """Arrays [count, ...] of a matrix's parts: random codes, and scales that give its weights a
    deviation of `spread`.
    """
    if kind == "bf16":
        return [bfloat16_bits(rng.standard_normal(count, np.float32) * spread)]
    factors = rng.uniform(0.5, 1.5, count).astype(np.float32)
    if kind not in GGUF_FORMATS:
        bits, group = map(int, kind.removeprefix("affine ").split("/"))
        words = rng.integers(0, 1 << 32, (count, group * bits // 32), np.uint32)
        # a deviation of 2**bits / sqrt(12) is that of uniform codes
        scales = factors * (spread * 12**0.5 / 2**bits)
        return [words, bfloat16_bits(scales), bfloat16_bits(-scales * (2**bits - 1) / 2)]
    blocks = rng.integers(0, 256, (count, GGUF_FORMATS[kind].nbytes), np.uint8)

    def scale(blocks: np.ndarray, scales: np.ndarray) -> None:
        if kind == "Q8_K":  # the one with a float32 scale
            blocks[:, :4] = scales[:, None].view(np.uint8)
        if kind == "MXFP4":  # and the one with a power of two
            blocks[:, 0] = 127 + np.log2(scales).round().astype(int)
        if kind == "NVFP4":
            codes = scales.astype(ml_dtypes.float8_e4m3fn)[:, None]
            blocks[:, :4] = codes.view(np.uint8)
        for at in _HALVES.get(kind, ()):
            factor = _MINIMUM if (kind, at) == ("Q4_K", 2) else 1
            blocks[:, at : at + 2] = (factor * scales).astype(np.float16)[:, None].view(np.uint8)

    sample = blocks[:256].copy()
    scale(sample, factors[:256] / 16)
    values = assemble(kind, kind, (1, len(sample) * block_size(kind)), [sample]).float32()
    scale(blocks, factors * (spread / values.std() / 16))
    return [blocks]


def assemble(
    kind: str, name: str, dims: tuple[int, int], parts: list[np.ndarray]
) -> Tensor | AffineWeight:
    """A matrix of the parts that random_blocks gives."""
    parts = [part.reshape(dims[0], -1) for part in parts]
    if kind == "bf16":
        return Tensor(name, "bfloat16", dims, *parts)
    if kind in GGUF_FORMATS:
        return GGUFWeight(name, kind, dims, *parts)
    return MLXWeight(name, *map(int, kind.removeprefix("affine ").split("/")), *parts)


def random_weight(kind: str, rows: int, columns: int) -> AffineWeight:
    """A low-bit matrix, the same in every process."""
    rng = np.random.default_rng(sum(kind.encode()))
    return assemble(
        kind,
        kind,
        (rows, columns),
        random_blocks(kind, rows * columns // block_size(kind), rng, 0.02),
    )


class Pool:
    """Random blocks for all matrices of a kind, which are views at different offsets: 8 billion
    take a second, not minutes.

    The blocks repeat until the `longest` matrix fits, after an odd number, so that rows of a matrix
    differ.
    """

    def __init__(self, kind: str, longest: int, rng: np.random.Generator, spread: float):
        self.kind, self.size, self.taken = kind, block_size(kind), 0
        self.period = min(1 << 22, longest) // self.size | 1
        self.parts = [
            np.resize(part, (longest // self.size + self.period, *part.shape[1:]))
            for part in random_blocks(kind, self.period, rng, spread)
        ]
        for part in self.parts:
            part.flags.writeable = False

    def take(self, name: str, dims: tuple[int, int]) -> Tensor | AffineWeight:
        """A matrix; the same sequence of calls gives the same."""
        step = 64 if self.size == 1 else 8
        start = self.taken * 4099 % (self.period // step) * step
        self.taken += 1
        return assemble(
            self.kind,
            name,
            dims,
            [part[start : start + math.prod(dims) // self.size] for part in self.parts],
        )


def config_fields(shape: str) -> dict[str, Any]:
    """The fields of a model's config.json. shape: of `MODELS` or SHAPES."""
    return make_random_checkpoint.config_fields(MODELS.get(shape) or SHAPES[shape], "bfloat16")


def make_config(shape: str) -> LlamaConfig:
    """The config of one of `MODELS` or SHAPES."""
    return LlamaConfig.from_dict(config_fields(shape), "config.json")


def random_checkpoint(shape: str, form: str, seed: int = 0) -> Checkpoint:
    """A checkpoint in memory, the same in every process. shape: of `MODELS` or SHAPES. form: one of
    `FORMATS`, or of GGUF files, in lower case.

    Weights have a standard deviation of 1 / sqrt(hidden_size), so that activations stay finite
    through all layers.
    """
    config, rng = make_config(shape), np.random.default_rng(seed)
    family, kinds = FAMILIES[config.architecture], {"bf16": "bf16", "4-bit": "affine 4/64"}
    shapes = config.tensor_shapes() if family.splits else config.stored_shapes()
    pools: dict[str, Pool] = {}
    stored: dict[str, Tensor | AffineWeight] = {}
    for name, dims in shapes.items():
        if len(dims) < 2:
            values = (1 + 0.1 * rng.standard_normal(dims)).astype(np.float32)
            stored[name] = (
                Tensor(name, "bfloat16", dims, bfloat16_bits(values))
                if form in kinds
                else Tensor(name, "float32", dims, values)
            )
            continue
        kind = kinds.get(form) or choose_type(
            family.names.gguf(name), dims, form.upper(), config, family.gguf
        )
        if kind in ("F32", "BF16"):  # of a router, and of Gemma 4's inputs of layers
            values = rng.standard_normal(dims, np.float32) * dims[1] ** -0.5
            stored[name] = Tensor(name, "float32", dims, values)
            if kind == "BF16":
                stored[name] = Tensor(name, "bfloat16", dims, bfloat16_bits(values))
            continue
        if kind not in pools:
            pools[kind] = Pool(
                kind, max(map(math.prod, shapes.values())), rng, config.hidden_size**-0.5
            )
        stored[name] = pools[kind].take(name, dims)
    return Checkpoint(
        f"random {shape} {form}",
        Path("random"),
        config,
        split(stored, config),
        {},
        sum(tensor.nbytes for tensor in stored.values()),
        stored=stored,
    )


def write_gguf(path: Path, shape: str, form: str, seed: int = 0) -> None:
    """Write a random checkpoint as a file for llama.cpp, with a vocabulary of made-up pieces."""
    checkpoint = random_checkpoint(shape, form, seed)
    path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), checkpoint.config.vocab_size)
        checkpoint = dataclasses.replace(checkpoint, path=Path(folder))
        gguf_export.write_gguf(checkpoint, path, form.upper())


def low_bit_kinds() -> list[str]:
    """All low-bit formats that this package reads, the common ones first."""
    first = ["affine 4/64", "Q8_0", "Q4_K", "Q6_K", "Q4_0"]
    return list(
        dict.fromkeys(
            [
                *first,
                *GGUF_FORMATS,
                *(
                    f"affine {bits}/{group}"
                    for bits in (2, 3, 4, 5, 6, 8)
                    for group in (32, 64, 128)
                ),
            ]
        )
    )


def prompt_weights(config: LlamaConfig) -> int:
    """Weights multiplied per token of a prompt: only its last token is projected to the
    vocabulary.
    """
    return sum(
        math.prod(dims)
        for name, dims in config.tensor_shapes().items()
        if name.startswith("model.layers.") and len(dims) == 2
    )


def needed_bytes(shape: str, form: str, prompt: int) -> int:
    """Approximate bytes of a model on its device: weights, and a prompt's keys, values and widest
    activations.
    """
    config = make_config(shape)
    counts = [math.prod(dims) for dims in config.tensor_shapes().values()]
    # the pool may lie in the same memory
    weights, block = sum(counts) * FORMATS[form], max(counts) * FORMATS[form]
    kept = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * prompt
    # Low-bit formats are unpacked in slabs of rows; scales of 16 bits may become float32.
    widest = 12 * prompt * config.intermediate_size
    return int(weights * (1.02 if form == "bf16" else 1.2) + block + kept + widest + (1 << 28))
