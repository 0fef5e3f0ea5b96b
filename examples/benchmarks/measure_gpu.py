"""Check and measure this package on a machine with a GPU: one command, no downloads, one Markdown table.

    python examples/benchmarks/measure_gpu.py                    (NVIDIA with torch; MLX with CUDA or Metal)
    python examples/benchmarks/measure_gpu.py --backends mlx     (a Mac)
    python examples/benchmarks/measure_gpu.py --device cpu --shapes tiny --minutes 4    (all parts on CPUs, to try it)

First checks: kernels, low-bit products and a small model's logits and steps against float32; the same bits in every run;
the same tokens compiled and not. Then speed at real models' shapes with random weights, in bfloat16, MLX's 4 bits, Q8_0 and
Q4_K_M: this package and the peers that are installed, each in a process of its own, one after the other: transformers with
a static cache, eager and compiled; vLLM; mlx-lm's way; llama.cpp, by its llama-bench and llama-batched-bench where
they are on the search path, else by llama-cpp-python. All decode greedily after the same number of tokens. Decoding reads
every weight once per token: its rate is a share of the bytes per second that a copy on the device reads and writes. A prompt
takes 2 operations per weight and token: its rate is a share of a large bfloat16 product's. Rows are sequences that are
decoded together: their rate is that of all tokens. "ours invariant" computes prompts by the kernels of decoded tokens
(batch_invariant): the same bits with any chunks, and slower. Of 8b, 4 layers are measured where it does not fit the device.
Where there are two GPUs, torchrun splits a model over them, which must give the tokens of one process (on CPUs with
--processes 2). A part that fails prints its reason in one line, the others go on, and the exit code is 1. Ctrl-C shows the
results so far.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import math
import os
import platform
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

if importlib.util.find_spec("mlx_llama") is None:  # run from a repository that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import make_random_gguf
from make_random_checkpoint import SHAPES, write
from peers_checkpoint import prompt_tokens
from peers_gguf import LLAMA_BENCH, LlamaBench, Peer

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.gguf import row_order
from mlx_llama.core.files.gguf_types import choose_type
from mlx_llama.core.files.quantized import GGUF_FORMATS, AffineWeight, GGUFWeight, MLXWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.gguf_names import LLAMA

FEW_LAYERS = 4  # of a model that does not fit
MODELS = {"tiny": SHAPES["tiny"], "1.1b": SHAPES["tinyllama"], "8b": SHAPES["llama-3-8b"],
          "8b-4": SHAPES["llama-3-8b"] | {"num_hidden_layers": FEW_LAYERS}}  # by --shapes
FORMATS = {"bf16": 2.0, "4-bit": 0.5 + 4 / 64, "q8_0": 34 / 32, "q4_k_m": 0.62}  # bytes per weight, about
PACKAGES = {"cuda": "torch", "mlx": "mlx"}
# {(backend, format): peers}
PEERS = {("cuda", "bf16"): ("transformers static", "transformers compiled", "vllm"), ("mlx", "bf16"): ("mlx-lm",),
         ("mlx", "4-bit"): ("mlx-lm",),
         **{(name, form): ("llama.cpp",) for name in PACKAGES for form in ("q8_0", "q4_k_m")}}
PEER_PACKAGES = {"transformers": "transformers", "vllm": "vllm", "mlx-lm": "mlx_lm", "llama.cpp": "llama_cpp"}
DEPTH = 128  # tokens of the prompt before decoding
ROUNDS = 5  # repetitions at most
BATCHES = (8, 32)  # rows decoded together
BATCH_COUNT = 64  # tokens of each at most
PEER_LIMIT = 300  # seconds for a peer to load, or to compile
# Bounds of errors. Of a product: largest difference over the root mean square of the right results. A result of 4 times
# that, rounded to bfloat16, is off by 0.016, and a library may round partial sums too. Of a model: norm of all differences
# over norm of the logits; 16-bit activations are rounded some ten times per layer.
PRODUCT_BOUNDS = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
LOGIT_BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
SAME_MODEL = 0.2  # largest difference of a peer's logits, both in 16 bits; above it, the peer runs another model

# offsets of the float16 scales in GGUF blocks, and scales that make random codes as large as a model's weights
_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
           "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
_SCALES = {"Q2_K": 2e-3, "Q3_K": 1e-3, "Q4_K": 8e-5, "Q5_K": 4e-5, "Q6_K": 2e-5, "Q8_K": 3e-4, "Q8_0": 3e-4,
           "IQ4_NL": 4e-4, "IQ4_XS": 2e-5}
_SPREADS = {"Q8_0": 77, "Q4_K": 268, "Q6_K": 1414}  # standard deviations of random blocks' weights, for scales of 1
_MINIMUM = 7.5  # of Q4_K's two scales, the second over the first: codes of 0 to 15 around 0


# Random weights


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> bit patterns of bfloat16, uint16."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


class RandomBlock:
    """Random values for all tensors, which are views at different offsets: 8 billion take a second, not minutes.

    values: [n, ...], repeated until the `longest` view fits. n is odd, so that rows of a matrix differ.
    """

    def __init__(self, values: np.ndarray, longest: int):
        self.period, self.taken = len(values), 0
        self.values = np.resize(values, (longest + self.period, *values.shape[1:]))
        self.values.flags.writeable = False

    def take(self, count: int) -> np.ndarray:
        """A view of `count` values; the same sequence of calls gives the same views."""
        step = 64 if self.values.ndim == 1 else 8  # blocks are few and need no alignment
        start = self.taken * 4099 % (self.period // step) * step
        self.taken += 1
        return self.values[start:start + count]


def make_config(shape: str) -> LlamaConfig:
    """The config of one of `MODELS`."""
    return LlamaConfig.from_dict(config_fields(shape), "config.json")


def config_fields(shape: str) -> dict[str, Any]:
    """The fields of a model's config.json."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
            "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, **MODELS[shape]}


def random_checkpoint(shape: str, form: str) -> Checkpoint:
    """A checkpoint in memory: "bf16", "4-bit" (MLX's, groups of 64), or with a GGUF file's types. The same in every process.

    Weights have a standard deviation of 1 / sqrt(hidden_size), so that activations stay finite through all layers.
    """
    config, rng = make_config(shape), np.random.default_rng(0)
    shapes = config.tensor_shapes()
    longest, spread = max(math.prod(dims) for dims in shapes.values()), config.hidden_size**-0.5
    period = min(1 << 22, longest) | 1
    norms = RandomBlock((1 + 0.1 * rng.standard_normal(1 << 16 | 1)).astype(np.float32), config.hidden_size)
    if form == "bf16":
        plain = RandomBlock(bfloat16_bits(rng.standard_normal(period, np.float32) * spread), longest)
    elif form == "4-bit":
        words = RandomBlock(rng.integers(0, 1 << 32, period, np.uint32), longest // 8)
        # codes of 0 to 15 spread by 4.6
        some = (rng.uniform(0.5, 1.5, 1 << 16 | 1) * spread / 4.6).astype(np.float32)
        scales, biases = (RandomBlock(bfloat16_bits(values), longest // 64) for values in (some, -7.5 * some))
    else:
        kinds = {name: choose_type(LLAMA.gguf(name), dims, form.upper(), config, "llama") for name, dims in shapes.items()}
        blocks = {}
        for kind in sorted(set(kinds.values()) - {"F32"}):
            size = GGUF_FORMATS[kind].block_size
            values = random_blocks(kind, period // size | 1, rng, spread / _SPREADS[kind])
            blocks[kind] = RandomBlock(values, longest // size)

    def weight(name: str, dims: tuple[int, ...]) -> Tensor | AffineWeight:
        if len(dims) == 1:
            values = norms.take(dims[0])
            return Tensor(name, "bfloat16", dims, bfloat16_bits(values)) if form in ("bf16", "4-bit") \
                else Tensor(name, "float32", dims, values)
        rows, columns = dims
        count = rows * columns
        if form == "bf16":
            return Tensor(name, "bfloat16", dims, plain.take(count).reshape(dims))
        if form == "4-bit":
            scaling = (part.take(count // 64).reshape(rows, -1) for part in (scales, biases))
            return MLXWeight(name, 4, 64, words.take(count // 8).reshape(rows, -1), *scaling)
        kind = kinds[name]
        return GGUFWeight(name, kind, dims, blocks[kind].take(count // GGUF_FORMATS[kind].block_size).reshape(rows, -1))

    tensors = {name: weight(name, dims) for name, dims in shapes.items()}
    return Checkpoint(f"random {shape} {form}", Path("random"), config, tensors, {},
                      sum(tensor.nbytes for tensor in tensors.values()))


def random_blocks(kind: str, count: int, rng: np.random.Generator, scale: float) -> np.ndarray:
    """uint8 [count, block bytes] with random codes, and scales around `scale`."""
    blocks = rng.integers(0, 256, (count, GGUF_FORMATS[kind].nbytes), np.uint8)
    scales = (rng.uniform(0.5, 1.5, count) * scale).astype(np.float32)
    if kind == "Q8_K":  # the one with a float32 scale
        blocks[:, :4] = scales[:, None].view(np.uint8)
    for at in _HALVES.get(kind, ()):
        factor = _MINIMUM if (kind, at) == ("Q4_K", 2) else 1
        blocks[:, at:at + 2] = (factor * scales).astype(np.float16)[:, None].view(np.uint8)
    return blocks


def write_gguf(path: Path, shape: str, form: str) -> None:
    """Write a model's random checkpoint as a file for llama.cpp."""
    import gguf

    checkpoint = random_checkpoint(shape, form)
    config, fields = checkpoint.config, config_fields(shape)
    file = make_random_gguf.start_file(path, fields, {"q8_0": 7, "q4_k_m": 15}[form])
    for name, weight in checkpoint.tensors.items():
        kind = gguf.GGMLQuantizationType[weight.format if isinstance(weight, GGUFWeight) else "F32"]
        file.add_tensor_info(LLAMA.gguf(name), weight.shape, np.float32, weight.nbytes, kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    for name, weight in checkpoint.tensors.items():
        values = weight.blocks if isinstance(weight, GGUFWeight) else weight.float32()
        is_permuted = LLAMA.is_permuted(name)
        file.write_tensor_data(values[np.argsort(row_order(len(values), config.head_dim))] if is_permuted else values)
    file.close()


def random_weight(kind: str, rows: int, columns: int) -> AffineWeight:
    """A matrix of a GGUF type, or of MLX's "affine BITS/GROUP", as in "affine 4/64"."""
    rng = np.random.default_rng(sum(kind.encode()))
    if kind in GGUF_FORMATS:
        count = rows * columns // GGUF_FORMATS[kind].block_size
        blocks = random_blocks(kind, count, rng, _SCALES.get(kind, 3e-3))
        return GGUFWeight(kind, kind, (rows, columns), blocks.reshape(rows, -1))
    bits, group = map(int, kind.removeprefix("affine ").split("/"))
    packed = rng.integers(0, 1 << 32, (rows, columns * bits // 32), np.uint32)
    scales = (rng.uniform(0.5, 1.5, (rows, columns // group)) * 0.05 / 2**bits).astype(np.float32)
    biases = -scales * np.float32(2 ** (bits - 1))
    return MLXWeight(kind, bits, group, packed, bfloat16_bits(scales), bfloat16_bits(biases))


def low_bit_kinds() -> list[str]:
    """All low-bit formats that this package reads, the common ones first."""
    first = ["affine 4/64", "Q8_0", "Q4_K", "Q6_K", "Q4_0"]
    kinds = [*GGUF_FORMATS, *(f"affine {bits}/{group}" for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128))]
    return first + [kind for kind in kinds if kind not in first]


def prompt_weights(config: LlamaConfig) -> int:
    """Weights multiplied per token of a prompt: only its last token is projected to the vocabulary."""
    return sum(math.prod(dims) for name, dims in config.tensor_shapes().items()
               if name.startswith("model.layers.") and len(dims) == 2)


def needed_bytes(shape: str, form: str, prompt: int) -> int:
    """Approximate bytes of a model on its device: weights, and a prompt's keys, values and widest activations."""
    config = make_config(shape)
    counts = [math.prod(dims) for dims in config.tensor_shapes().values()]
    weights, block = sum(counts) * FORMATS[form], max(counts) * FORMATS[form]  # the block may lie in the same memory
    kept = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * prompt
    # Low-bit formats are unpacked in slabs of rows; scales of 16 bits may become float32.
    widest = 12 * prompt * config.intermediate_size
    return int(weights * (1.02 if form == "bf16" else 1.2) + block + kept + widest + (1 << 28))


# Workers: one process per program; requests are lines of JSON


class Clocked:
    """A backend and its model for the scheduler, with clocks in step() and launch() and a count of waits."""

    def __init__(self, backend: Any, model: Any):
        self.backend, self.model = backend, model
        self.seconds: dict[str, list[float]] = {"step": [], "launch": []}
        self.waits = 0
        self.as_backend, self.as_model = _View(backend, self), _View(model, self)

    def step(self, *arguments: Any, **named: Any) -> Any:
        return self._timed("step", lambda *given: self.model.step(*given, **named), arguments)

    def launch(self, *arrays: Any) -> None:
        self._timed("launch", self.backend.launch, arrays)

    def read(self, token: Any) -> int:
        self.waits += 1
        return self.backend.read(token)

    def read_all(self, *tokens: Any) -> list[int]:
        self.waits += 1
        return self.backend.read_all(*tokens)

    def _timed(self, name: str, call: Callable, arguments: Sequence) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self.seconds[name].append(time.perf_counter() - started)
        return result

    def host_seconds(self) -> float:
        """Median seconds of host time per decoded token, without the prompt's launches."""
        tokens = min(map(len, self.seconds.values())) - 1
        pairs = zip(*(times[len(times) - tokens:] for times in self.seconds.values()))
        return statistics.median(map(sum, pairs)) if tokens > 0 else 0.0


class _View:
    def __init__(self, real: Any, clocked: Clocked):
        self._real, self._clocked = real, clocked

    def __getattr__(self, name: str) -> Any:
        watched = name in ("step", "launch", "read", "read_all")
        return getattr(self._clocked if watched else self._real, name)


class Program:
    """Base of the programs that workers run. Operations are methods named op_*; results return as JSON."""

    def __init__(self, name: str, device: str):
        self.name, self.wanted = name, device

    def free(self) -> None:
        """Release the model's memory."""
        gc.collect()
        if self.name == "cuda":
            import torch

            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        else:
            import mlx.core as mx

            mx.clear_cache()


class Ours(Program):
    """This package's backend behind the scheduler of all doors."""

    def __init__(self, name: str, device: str):
        super().__init__(name, device)
        from mlx_llama.core.backends.selection import select

        self.backend = select(name, device)
        self.device = self.backend.device
        self.model = None
        self.on_gpu = device == "gpu"
        if name == "mlx":
            import mlx.core as mx

            mx.set_default_device(self.device)

    def op_hello(self) -> dict[str, Any]:
        """Names and versions; the reason for missing low-bit kernels, or ""."""
        versions = {"python": platform.python_version(), PACKAGES[self.name]: _version(PACKAGES[self.name])}
        notice = ""
        if self.name == "cuda":
            from cuda_fallback.kernels import find_kernels

            found = find_kernels(self.device)
            versions["triton"] = _version("triton")
            notice = "" if found.packed else (found.notices or ("torch's own operations on the CPU device",))[0]
        return {"device": self.backend.device_name, "versions": versions, "no_kernels": notice}

    def op_free_bytes(self) -> dict[str, Any]:
        return {"bytes": self.backend.runtime.free_memory(self.device)}

    def op_bounds(self) -> dict[str, float]:
        """Bytes per second that a copy on the device reads and writes; operations per second of a bfloat16 product."""
        nbytes, size = (1 << 29, 8192 if self.name == "cuda" else 4096) if self.on_gpu else (1 << 26, 512)
        if self.name == "cuda":
            import torch

            source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            left = torch.full((size, size), 0.5, dtype=torch.bfloat16, device=self.device)
            wait = torch.cuda.synchronize if self.on_gpu else lambda: None
            copy, product = lambda: target.copy_(source), lambda: left @ left.T
        else:
            import mlx.core as mx

            source, left = mx.zeros(nbytes // 4, mx.float32), mx.full((size, size), 0.5, mx.bfloat16)
            mx.eval(source, left)
            made: list[Any] = []

            def wait() -> None:
                mx.eval(made)
                made.clear()

            def copy() -> None:
                made[:] = [mx.async_eval(array := source + 1) or array]

            def product() -> None:
                made[:] = [mx.async_eval(array := left @ left.T) or array]

        def best(call: Callable, times: int) -> float:
            taken = []
            for _ in range(4):
                wait()
                started = time.perf_counter()
                for _ in range(times):
                    call()
                wait()
                taken.append((time.perf_counter() - started) / times)
            return min(taken[1:])

        times = 5 if self.on_gpu else 1
        found = {"copy": 2 * nbytes / best(copy, times), "product": 2 * size**3 / best(product, times)}
        source = left = target = None
        self.free()
        return found

    # Proofs

    def product_error(self, judge: AffineWeight, weight: AffineWeight | None = None, dtype: str = "") -> float:
        """Largest error of this backend's products with `weight` (None: `judge` itself) against judge.float32().

        Relative to the root mean square of the right results; of one token, a few, a prompt's, and of single rows.
        dtype: of the activations; "" for the format's own.
        """
        dtype, weight = dtype or judge.dtype, weight or judge
        chosen = self.backend.runtime.pick_dtype(dtype, dtype, self.device)
        quantized = importlib.import_module(self.backend.model.__package__ + ".quantized")
        extra = ()
        if self.name == "cuda":
            from cuda_fallback.kernels import find_kernels

            extra = (find_kernels(self.device).packed,)
        pack = quantized.pack if self.name == "mlx" else quantized.QuantizedMatrix.pack
        matrix = pack([weight], chosen, self.device, *extra)
        dense, rng, errors = judge.float32().astype(np.float64), np.random.default_rng(2), []
        for count in (1, 5, 40):
            x = self._array(rng.standard_normal((count, dense.shape[1]), np.float32), chosen)
            right = self._numpy(x).astype(np.float64) @ dense.T
            errors.append(_worst(self._numpy(matrix.matmul(x)), right))
        ids = np.array([[0, len(dense) - 1, 7]], np.int32)
        errors.append(_worst(self._numpy(matrix.rows(self._array(ids)))[0], dense[ids[0]]))
        return max(errors)

    def op_check_products(self, seconds: float) -> dict[str, Any]:
        """Check every low-bit format; list those skipped for lack of time."""
        until, found, skipped = time.perf_counter() + seconds, [], []
        # 264 rows are few enough for a kernel to split K; common formats are also checked with more rows.
        jobs = [(kind, 264) for kind in low_bit_kinds()]
        jobs[3:3] = [(kind, 2056) for kind, _ in jobs[:3]]
        for kind, rows in jobs:
            if time.perf_counter() > until:
                skipped.append(kind)
                continue
            judge = random_weight(kind, rows, 7168 if self.on_gpu else 512)
            error, bound = self.product_error(judge), PRODUCT_BOUNDS[judge.dtype]
            found.append({"name": f"{kind} x{rows}", "dtype": judge.dtype, "error": error, "bound": bound,
                          "ok": error <= bound})
        return {"found": found, "skipped": skipped}

    def logits(self, model: Any, tokens: Sequence[int]) -> np.ndarray:
        """Logits float32 [T, V]: all but 8 tokens as a prompt, the rest one by one, as in decoding."""
        cache, start = model.make_cache(len(tokens)), len(tokens) - 8
        parts = [model.forward(np.array([tokens[:start]], np.int32), 0, cache, all_positions=True)]
        for at in range(start, len(tokens)):
            parts.append(model.forward(np.array([tokens[at:at + 1]], np.int32), at, cache, all_positions=True))
        return np.concatenate([self._numpy(part)[0] for part in parts])

    def logit_error(self, checkpoint: Checkpoint, dtype: str, judge: Checkpoint | None = None) -> tuple[float, bool]:
        """(relative error of the logits, a second run gives the same bits).

        The judge is the cpu backend at float32, of the checkpoint `judge` (None: the same).
        """
        from mlx_llama.core.backends.selection import select

        tokens = prompt_tokens(48, checkpoint.config.vocab_size)
        reference = select("cpu")
        exact = reference.load(judge or checkpoint, "float32", compile=False)
        right = exact.forward(np.array([tokens], np.int32), 0, exact.make_cache(len(tokens)), all_positions=True)
        right = reference.runtime.to_numpy(right)[0].astype(np.float64)
        model = self.backend.load(checkpoint, dtype)
        first, second = self.logits(model, tokens), self.logits(model, tokens)
        error = float(np.linalg.norm(first - right) / np.linalg.norm(right))
        return _finite(error), first.tobytes() == second.tobytes()

    def op_check_logits(self, form: str) -> dict[str, Any]:
        """Check the tiny model at float32 and at its stored width."""
        checkpoint, found = random_checkpoint("tiny", form), []
        for dtype in ("float32", "auto"):
            error, same = self.logit_error(checkpoint, dtype)
            bound = LOGIT_BOUNDS[checkpoint.dtype if dtype == "auto" else dtype]
            found.append({"name": f"{form} {dtype}", "error": error, "bound": bound, "ok": error <= bound,
                          "same": same})
        return {"found": found}

    def op_check_kernels(self) -> dict[str, Any]:
        """Check the cuda backend's kernels of a step, and measure their read rates."""
        import gpu_kernels

        return {"found": gpu_kernels.check(), "rates": gpu_kernels.rates()}

    def op_check_tokens(self, form: str, dtype: str) -> dict[str, Any]:
        """Sample tokens of the tiny model in two runs, and compiled.

        compiled: None, with the reason in `refused`, on a backend without a compiled step. apart: relative error of the
        cached keys and values against the cpu backend's at float32 for the same tokens.
        """
        from mlx_llama.core.backends.selection import select

        checkpoint, refused, compiled = random_checkpoint("tiny", form), "", None
        plain, state = self._sampled(self.backend.load(checkpoint, dtype, compile=False))
        again, _ = self._sampled(self.backend.load(checkpoint, dtype, compile=False))
        try:
            model = self.backend.load(checkpoint, dtype, compile=True)
            compiled = self._sampled(model)[0] == plain and not self._uncaptured(model)
            refused = self._uncaptured(model)
        except BackendError as error:
            refused = str(error)
        exact = select("cpu").load(checkpoint, "float32", compile=False)
        cache = exact.make_cache(len(state["tokens"]))
        exact.forward(state["tokens"][None], 0, cache)
        right = cache.state()
        error = max(float(np.linalg.norm(state[part] - right[part]) / np.linalg.norm(right[part]))
                    for part in ("keys", "values"))
        bound = LOGIT_BOUNDS[checkpoint.dtype if dtype == "auto" else dtype]
        return {"same": plain == again, "compiled": compiled, "refused": refused, "tokens": len(plain),
                "apart": _finite(error), "bound": bound}

    def _uncaptured(self, model: Any) -> str:
        """The reason that a model does not decode by a captured graph as asked, or ""."""
        if self.name != "cuda" or any("captured as a CUDA graph" in notice for notice in model.notices):
            return ""
        return "; ".join(model.notices) or "no step was captured"

    def _sampled(self, model: Any) -> tuple[list[int], dict[str, np.ndarray]]:
        clocked, completion = self._run(model, prompt_tokens(20, model.config.vocab_size), 24, temperature=0.8)
        return list(completion.tokens), clocked.cache.state()

    # Speed

    def op_load(self, shape: str, form: str, compile: bool, batch_invariant: bool = False) -> dict[str, Any]:
        """Load a model. Returns the bytes of its weights (read: of those that a token reads) and some logits after a short
        prompt; or the reason in `refused`."""
        started = time.perf_counter()
        checkpoint = random_checkpoint(shape, form)
        self._reset_peak()
        try:
            self.model = self.backend.load(checkpoint, "auto", compile=compile, batch_invariant=batch_invariant)
        except BackendError as error:
            return {"refused": str(error)}
        self.nbytes = checkpoint.nbytes
        peak = self._peak(0)
        tokens = prompt_tokens(16, checkpoint.config.vocab_size)
        logits = self._numpy(self.model.forward(np.array([tokens], np.int32), 0, self.model.make_cache(16)))[0]
        if not np.isfinite(logits).all():
            raise ArithmeticError(f"{int((~np.isfinite(logits)).sum())} of {logits.size} logits are not finite")
        return {"nbytes": self.nbytes, "seconds": time.perf_counter() - started, "logits": logits[:1000].tolist(),
                "peak": peak, "read": self.nbytes - checkpoint.tensors["model.embed_tokens.weight"].nbytes}

    def op_unload(self) -> dict[str, Any]:
        self.model = None
        self.free()
        return {}

    def _run(self, model: Any, tokens: list[int], count: int, **given: Any) -> tuple[Clocked, Any]:
        from mlx_llama.core.generation import options
        from mlx_llama.core.generation.request import Request
        from mlx_llama.core.generation.scheduler import Scheduler

        clocked = Clocked(self.backend, model)
        scheduler = Scheduler(clocked.as_backend, clocked.as_model, None, frozenset(), len(tokens) + count, max_rows=1)
        resolved = options.resolve({"max_tokens": count, "temperature": 0.0, "seed": 7, **given})
        clocked.cache = scheduler.cache
        return clocked, scheduler.submit(Request(tokens, resolved, wants_text=False)).finish()

    def op_decode(self, depth: int, count: int, compile: bool = False) -> dict[str, Any]:
        """Decode `count` tokens after `depth` tokens and a first one. compile: as given to op_load."""
        self._reset_peak()
        clocked, completion = self._run(self.model, prompt_tokens(depth, self.model.config.vocab_size), count + 1)
        if compile and count > 2 and (reason := self._uncaptured(self.model)):
            raise RuntimeError(f"what was to be captured ran step by step: {reason}")
        return {"rate": completion.decode_tps, "host": clocked.host_seconds(),
                "waits": clocked.waits / len(completion.tokens), "peak": self._peak(clocked.cache.nbytes)}

    def op_prefill(self, count: int, compile: bool = False) -> dict[str, Any]:
        """Process a prompt of `count` tokens and decode one."""
        self._reset_peak()
        clocked, completion = self._run(self.model, prompt_tokens(count, self.model.config.vocab_size), 1)
        return {"rate": completion.prompt_tps, "peak": self._peak(clocked.cache.nbytes)}

    def op_rows(self, depth: int, count: int, batch: int, compile: bool = False) -> dict[str, Any]:
        """Decode `count` tokens of each of `batch` rows, all after `depth` tokens; a step is launched before the last one is
        read."""
        from mlx_llama.core.generation import options

        draw = self.backend.sampling_batch([options.resolve({"temperature": 0.0}).options] * batch)
        cache = self.model.make_cache(depth + count + 4, batch)
        self.model.forward(np.array([prompt_tokens(depth, self.model.config.vocab_size)], np.int32), 0, cache, rows=[0])
        for row in range(1, batch):
            cache.copy_prefix(0, row, depth)
        tokens: Any = np.full((batch, 1), 5, np.int32)

        def launch() -> Any:
            after = self.model.step(tokens, list(cache.lengths), cache, draw, rows=range(batch))
            self.backend.launch(after, *cache.arrays())
            return after

        for _ in range(3):  # compile, capture, replay
            tokens = launch()
            self.backend.read_all(tokens)
        if compile and (reason := self._uncaptured(self.model)):
            raise RuntimeError(f"what was to be captured ran step by step: {reason}")
        started = time.perf_counter()
        for _ in range(count):
            before, tokens = tokens, launch()
            self.backend.read_all(before)
        self.backend.read_all(tokens)
        return {"rate": batch * count / (time.perf_counter() - started)}

    def op_operations(self) -> dict[str, int]:
        """Primitives in MLX's graph of one step."""
        import mlx.core as mx

        from mlx_llama.core.generation import options

        draw = self.backend.sampling_batch([options.resolve({"temperature": 0.0}).options])
        cache = self.model.make_cache(64)
        token = self.model.step(np.array([[1, 2, 3]], np.int32), 0, cache, draw)
        mx.eval(token, cache.arrays())
        token = self.model.step(token, 3, cache, draw)
        return {"count": count_primitives(token, *cache.arrays())}

    def _reset_peak(self) -> None:
        if self.name == "mlx":
            import mlx.core as mx

            mx.reset_peak_memory()
        elif self.on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self, cache_bytes: int) -> float | None:
        """Peak bytes allocated per byte of weights and cache; None on torch's CPU device, which has no counter."""
        if self.name == "cuda" and not self.on_gpu:
            return None
        return self.backend.runtime.peak_memory(self.device) / (self.nbytes + cache_bytes)

    def _numpy(self, array: Any) -> np.ndarray:
        return self.backend.runtime.to_numpy(array)

    def _array(self, values: np.ndarray, dtype: Any = None) -> Any:
        if self.name == "cuda":
            import torch

            return torch.from_numpy(values).to(self.device, dtype)
        import mlx.core as mx

        array = mx.array(values)
        return array if dtype is None else array.astype(dtype)


class Transformers(Program):
    """transformers' generate with a static cache, the forward of one token eager, or compiled as on a GPU."""

    def __init__(self, name: str, device: str):
        super().__init__(name, device)
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "gpu" else torch.device("cpu")
        self.model = self.last = None

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        import torch
        from transformers import LlamaConfig as Config, LlamaForCausalLM

        started = time.perf_counter()
        config = Config(**config_fields(shape) | {"eos_token_id": None})
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.to_empty(device=self.device)
        # Buffers outside the checkpoint; to_empty does not initialise them.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(self.device)
        tensors = random_checkpoint(shape, form).tensors
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # copied: torch warns of read-only arrays
                parameter.copy_(torch.from_numpy(tensors[name].bits.copy()).view(torch.bfloat16))
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self.model = model.eval()
        ids = torch.tensor([prompt_tokens(16, config.vocab_size)], device=self.device)
        with torch.inference_mode():
            logits = self.model(ids).logits[0, -1].float().cpu().numpy()
        return {"nbytes": sum(parameter.nbytes for parameter in model.parameters()),
                "seconds": time.perf_counter() - started, "logits": logits[:1000].tolist()}

    def _generate(self, prompt: int, count: int, compile: bool, batch: int = 1) -> tuple[float, float]:
        """(seconds to the first token, seconds from it to the last)."""
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        first: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids, scores, **others):
                if not first:
                    wait()
                    first.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        given: dict[str, Any] = {"disable_compile": not compile}
        if compile and self.device.type == "cpu":
            from transformers.generation import CompileConfig

            settings = CompileConfig()
            settings._compile_all_devices = True
            given["compile_config"] = settings
        ids = torch.tensor([prompt_tokens(prompt, self.model.config.vocab_size)] * batch, device=self.device)
        wait()
        started = time.perf_counter()
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                                  cache_implementation="static", stopping_criteria=StoppingCriteriaList([Clock()]),
                                  **given)
        wait()
        ended = time.perf_counter()
        if out.shape[1] != prompt + count:
            raise ArithmeticError(f"transformers gave {out.shape[1] - prompt} tokens of {count}")
        return first[0] - started, ended - first[0]

    def _begin(self, kind: tuple) -> None:
        if self.last != kind:  # a longer cache of an earlier run would be reused, and attended to in full
            for name in ("_previous_max_cache_length", "_cache"):
                self.model.__dict__.pop(name, None)
        self.last = kind

    def op_decode(self, depth: int, count: int, compile: bool = False) -> dict[str, Any]:
        self._begin(("decode", depth + count))
        return {"rate": count / self._generate(depth, count + 1, compile)[1]}

    def op_prefill(self, count: int, compile: bool = False) -> dict[str, Any]:
        self._begin(("prefill", count))
        return {"rate": count / self._generate(count, 1, False)[0]}

    def op_rows(self, depth: int, count: int, batch: int, compile: bool = False) -> dict[str, Any]:
        self._begin(("rows", batch))
        self._generate(depth, 2, compile, batch)
        return {"rate": batch * count / self._generate(depth, count + 1, compile, batch)[1]}


class VLLM(Program):
    """vLLM with a model's config and random weights of its own."""

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        import torch
        from vllm import LLM

        started, config = time.perf_counter(), make_config(shape)
        (Path(folder) / "config.json").write_text(json.dumps(config_fields(shape)))
        length = config.max_position_embeddings
        share = needed_bytes(shape, form, length) / torch.cuda.get_device_properties(0).total_memory
        self.vocabulary = config.vocab_size
        self.llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=length,
                       max_num_seqs=max(BATCHES), enable_prefix_caching=False, gpu_memory_utilization=min(0.9, 1.3 * share),
                       dtype="bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16")
        return {"nbytes": int(2 * sum(math.prod(dims) for dims in config.tensor_shapes().values())),
                "seconds": time.perf_counter() - started}

    def _seconds(self, depth: int, count: int, batch: int = 1) -> float:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt_tokens(depth, self.vocabulary)}] * batch
        options = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, options, use_tqdm=False)
        seconds = time.perf_counter() - started
        if any(len(output.outputs[0].token_ids) != count for output in outputs):
            raise ArithmeticError(f"vLLM gave other numbers of tokens than {count}")
        return seconds

    def op_decode(self, depth: int, count: int, compile: bool = False) -> dict[str, Any]:
        return self.op_rows(depth, count, 1)

    def op_prefill(self, count: int, compile: bool = False) -> dict[str, Any]:
        return {"rate": count / self._seconds(count, 1)}

    def op_rows(self, depth: int, count: int, batch: int, compile: bool = False) -> dict[str, Any]:
        return {"rate": batch * count / (self._seconds(depth, count + 1, batch) - self._seconds(depth, 1, batch))}


class LlamaCpp(Program):
    """llama.cpp on a GGUF file of the same weights: its own benchmarks if they are on the search path, else its library."""

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        self.path, self.layers = Path(folder) / f"{form}.gguf", 99 if self.wanted == "gpu" else 0
        write_gguf(self.path, shape, form)
        started, nbytes = time.perf_counter(), self.path.stat().st_size
        self.bench = self.peer = None
        if binary := shutil.which(LLAMA_BENCH):
            self.bench = LlamaBench(binary, str(self.path), 1, None, self.layers > 0, self.layers)
            return {"nbytes": nbytes, "seconds": 0.0}
        import llama_cpp

        if self.layers and not llama_cpp.llama_supports_gpu_offload():
            raise RuntimeError("this llama-cpp-python was built without a GPU")
        room = max(make_config(shape).max_position_embeddings, DEPTH + (BATCH_COUNT + 2) * max(BATCHES))
        self.peer = Peer(str(self.path), room, 1, [None] * 3, self.layers, max(BATCHES))
        self.peer.logits(16, f"{self.path}.npy")
        logits = np.load(f"{self.path}.npy")[-1]
        return {"nbytes": nbytes, "seconds": time.perf_counter() - started, "logits": logits[:1000].tolist()}

    def op_decode(self, depth: int, count: int, compile: bool = False) -> dict[str, Any]:
        return {"rate": count / (self.bench.ask("decode", depth, count) if self.bench else self.peer.decode(depth, count))}

    def op_prefill(self, count: int, compile: bool = False) -> dict[str, Any]:
        return {"rate": count / (self.bench.ask("prompt", count) if self.bench else self.peer.prompt(count))}

    def op_rows(self, depth: int, count: int, batch: int, compile: bool = False) -> dict[str, Any]:
        if self.peer:
            return {"rate": batch * count / self.peer.decode_rows(depth, count, batch)}
        binary = shutil.which("llama-batched-bench")
        if binary is None:
            return {"rate": None}
        command = [binary, "-m", self.path, "-ngl", self.layers, "-t", 1, "-c", batch * (depth + count + 1), "-npp", depth,
                   "-ntg", count, "-npl", batch, "-pps", "--output-format", "jsonl"]
        for _ in range(5):  # it may end before its logging thread has printed the line
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    return {"rate": json.loads(line)["speed_tg"]}
        raise RuntimeError(f"{binary} printed no result")


class MLXLM(Program):
    """mlx-lm's model, driven as in its generate_step: step n + 1 is launched before token n is read."""

    def __init__(self, name: str, device: str):
        super().__init__(name, device)
        import mlx.core as mx
        import mlx_lm.models.llama  # noqa: F401

        self.device = mx.Device(mx.gpu if device == "gpu" else mx.cpu)
        mx.set_default_device(self.device)

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        import mlx.core as mx
        import mlx.nn as nn
        from mlx_lm.models.llama import Model, ModelArgs

        started = time.perf_counter()
        self.config = make_config(shape)
        model = Model(ModelArgs.from_dict(config_fields(shape)))
        if form == "4-bit":
            nn.quantize(model, group_size=64, bits=4)

        def array(values: np.ndarray) -> mx.array:
            found = mx.array(values)
            found = found.view(mx.bfloat16) if found.dtype == mx.uint16 else found
            mx.eval(found)
            return found

        arrays = []
        for name, weight in random_checkpoint(shape, form).tensors.items():
            if isinstance(weight, MLXWeight):
                stem = name.removesuffix("weight")
                parts = {"weight": weight.packed, "scales": weight.scales, "biases": weight.biases}
                arrays += [(stem + part, array(values)) for part, values in parts.items()]
            else:
                arrays.append((name, array(weight.bits)))
        model.load_weights(arrays, strict=True)
        model.eval()
        self.model = model
        logits = model(mx.array([prompt_tokens(16, self.config.vocab_size)]))[0, -1].astype(mx.float32)
        return {"nbytes": sum(one.nbytes for _, one in arrays), "seconds": time.perf_counter() - started,
                "logits": np.array(logits)[:1000].tolist()}

    def _step(self, tokens: Any, cache: Any) -> tuple[Any, Any]:
        import mlx.core as mx

        logits = self.model(tokens, cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.argmax(logprobs, axis=-1), logprobs

    def _prompt(self, count: int, batch: int = 1) -> tuple[Any, Any, Any]:
        """(cache, the first tokens [B] and their logprobs, launched)."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        tokens = mx.array([prompt_tokens(count, self.config.vocab_size)] * batch)
        cache, at = make_prompt_cache(self.model), 0
        while count - at > 1:
            size = min(2048, count - at - 1)
            self.model(tokens[:, at:at + size], cache=cache)
            mx.eval([one.state for one in cache])
            mx.clear_cache()
            at += size
        token, logprobs = self._step(tokens[:, at:], cache)
        mx.async_eval(token, logprobs)
        return cache, token, logprobs

    def op_decode(self, depth: int, count: int, compile: bool = False) -> dict[str, Any]:
        return self.op_rows(depth, count, 1)

    def op_rows(self, depth: int, count: int, batch: int, compile: bool = False) -> dict[str, Any]:
        import mlx.core as mx

        cache, token, _ = self._prompt(depth, batch)
        host, started = [], 0.0
        for n in range(count + 1):
            if n < count:
                before = time.perf_counter()
                following, logprobs = self._step(token[:, None], cache)
                mx.async_eval(following, logprobs)
                host.append(time.perf_counter() - before)
            token.tolist()
            if n == 0:
                started = time.perf_counter()
            token = following
        return {"rate": batch * count / (time.perf_counter() - started), "host": statistics.median(host), "waits": 1.0}

    def op_prefill(self, count: int, compile: bool = False) -> dict[str, Any]:
        started = time.perf_counter()
        self._prompt(count)[1].tolist()
        return {"rate": count / (time.perf_counter() - started)}

    def op_operations(self) -> dict[str, int]:
        import mlx.core as mx

        cache, token, _ = self._prompt(3)
        mx.eval(token)
        following, _ = self._step(token[:, None], cache)
        return {"count": count_primitives(following)}


PROGRAMS = {"ours": Ours, "transformers": Transformers, "vllm": VLLM, "mlx-lm": MLXLM, "llama.cpp": LlamaCpp}


def count_primitives(*arrays: Any) -> int:
    """Primitives in the unevaluated MLX graph of `arrays`."""
    import mlx.core as mx

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "graph.dot")
        mx.export_to_dot(path, *arrays)
        return len(re.findall(r"shape ?= ?rectangle", Path(path).read_text(encoding="utf-8", errors="replace")))


def _worst(found: np.ndarray, right: np.ndarray) -> float:
    """Largest difference over the root mean square of `right`."""
    return _finite(float(np.abs(found - right).max() / np.sqrt((right * right).mean())))


def _finite(error: float) -> float:
    """The error, or the largest float for infinity and NaN: valid JSON and above every bound."""
    return error if math.isfinite(error) else sys.float_info.max


def _version(package: str) -> str:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version({"llama_cpp": "llama_cpp_python"}.get(package, package))
    return "none"


def one_line(error: BaseException) -> str:
    """An exception's message in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if not isinstance(error, BackendError) else text[:300]


def serve(name: str, side: str, device: str) -> None:
    """Answer requests {"op", ...} on stdin by one line of JSON each, until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries' output is no answer
    program = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            program = program or PROGRAMS[side](name, device)
            answer = getattr(program, "op_" + request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001: any error is this part's reason
            answer = {"error": one_line(error), "trace": traceback.format_exc()[-3000:]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


# The command: asks the workers, keeps to the time, shows the results


def serve_processes(folder: str, name: str, device: str, count: str) -> None:
    """Decode `count` greedy tokens with the model in `folder`, in one process or in each of a launcher's, and print a JSON
    object: tokens at float32, and tokens per second at the stored width."""
    from mlx_llama.core.backends.following import follow_leader

    if follow_leader():
        return
    from mlx_llama.core.backends.selection import select
    from mlx_llama.core.files.checkpoint import open_checkpoint
    from mlx_llama.core.generation.options import resolve
    from mlx_llama.core.generation.request import Request
    from mlx_llama.core.generation.scheduler import Scheduler

    backend, checkpoint, found = select(name, device), open_checkpoint(folder), {}
    for dtype in ("float32", "auto"):
        scheduler = Scheduler(backend, backend.load(checkpoint, dtype), None, frozenset(), 512)
        options = resolve({"temperature": 0.0, "max_tokens": int(count), "seed": 0})
        for _ in range(3):  # compile, capture, replay
            handle = scheduler.submit(Request(prompt_tokens(64, checkpoint.config.vocab_size), options, wants_text=False))
            tokens = [int(token) for token in handle.tokens()]
        found |= {"tokens": tokens} if dtype == "float32" else {"rate": handle.completion.decode_tps}
        del scheduler
        gc.collect()
    print(json.dumps(found))


class PartError(Exception):
    """A part that failed: its reason in one line, and the worker's traceback if there is one."""

    def __init__(self, reason: str, trace: str = ""):
        super().__init__(reason)
        self.trace = trace


class NoTime(PartError):
    """The command's time ended before a part."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Worker:
    """A process that runs one Program. It is killed after a timeout and started again when needed."""

    def __init__(self, name: str, side: str, device: str):
        self.log = tempfile.TemporaryFile()
        # On shared cores, threads of one operation wait longer than they work.
        own = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        # MLX reads it once, at its first product.
        own |= {"MLX_ENABLE_TF32": "0"}
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", name, side, device], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, text=True, encoding="utf-8", start_new_session=True,
            env={**os.environ, **own})
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def send(self, op: str, **given: Any) -> None:
        with contextlib.suppress(OSError):  # it died: receive() has the reason
            self.process.stdin.write(json.dumps({"op": op, **given}) + "\n")
            self.process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any]:
        """The answer. Raises PartError and kills the worker: an error may leave a GPU's context unusable."""
        try:
            line = self.answers.get(timeout=max(seconds, 0.1))
        except queue.Empty:
            self.close()
            raise PartError(f"did not end within {seconds:.0f} s") from None
        if line is None:
            code = self.process.wait()
            self.log.seek(0)
            last = self.log.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
            raise PartError(f"its process ended with code {code}: {last[0][:200]}")
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise PartError(answer["error"], answer["trace"])
        return answer

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                if os.name == "posix":
                    os.killpg(self.process.pid, signal.SIGKILL)  # with its compilers
                else:
                    self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may delay its end
                self.process.wait(5)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@dataclasses.dataclass
class Slot:
    """A part's time: starts nothing new after `soft`, is killed at `hard` (time.perf_counter's seconds)."""

    soft: float
    hard: float

    @property
    def soft_left(self) -> float:
        return self.soft - time.perf_counter()

    @property
    def hard_left(self) -> float:
        return self.hard - time.perf_counter()


class Budget:
    """The command's time, divided by weight among the remaining parts."""

    def __init__(self, minutes: float):
        seconds = 60 * minutes
        self.end = time.perf_counter() + seconds - min(3, seconds / 10)
        self.weights = 0.0

    def slot(self, weight: float) -> Slot:
        """Raises NoTime."""
        now, share = time.perf_counter(), weight / self.weights
        self.weights -= weight
        left = self.end - now
        if left < 1:
            raise NoTime("no time left")
        # leave time for others after a part that hangs
        return Slot(now + left * share, now + left * min(1, max(3 * share, 0.15)))


class Measurement:
    """Runs all parts in turn; `result` is printed by --json."""

    def __init__(self, given: argparse.Namespace, backends: list[str], explicit: bool):
        self.given, self.explicit, self.backends = given, explicit, backends
        self.started = time.perf_counter()
        self.budget = Budget(given.minutes)
        self.workers: dict[tuple[str, str], Worker] = {}
        self.result: dict[str, Any] = {
            "device": given.device, "shapes": given.shapes, "depth": DEPTH, "machine": {}, "bounds": {}, "checks": [],
            "kernel_rates": {}, "rows": [], "processes": [], "left_out": [], "failed": [], "interrupted": False,
            "seconds": 0.0}

    def run(self) -> None:
        there = [name for name in self.backends if self._is_there(name)]
        if not there and not self.result["failed"]:
            self.fail("all", "there is no backend to measure here")
        plan = [(name, self._parts(name)) for name in there]
        self.budget.weights = sum(weight for _, parts in plan for weight, _, _ in parts)
        for name, parts in plan:
            for number, (weight, label, call) in enumerate(parts):
                try:
                    call(self.budget.slot(weight))
                except PartError as error:
                    self.lose(label, error)
                    if number == 0:  # it does not even start
                        self.budget.weights -= sum(weight for weight, _, _ in parts[1:])
                        break
                except Exception as error:  # noqa: BLE001: a fault in this file must not end the other parts
                    self.lose(label, PartError(one_line(error), traceback.format_exc()))
            self.close()

    def _is_there(self, name: str) -> bool:
        """A backend's package is installed and has the device. Reports the reason otherwise."""
        reason = f"the package {PACKAGES[name]} is not installed"
        if importlib.util.find_spec(PACKAGES[name]) is not None:
            code = ("import torch; print(torch.cuda.is_available())" if name == "cuda"
                    else "import mlx.core as mx; print(mx.is_available(mx.gpu))")
            # In another process: a broken library may crash it.
            asked = "print(True)" if self.given.device == "cpu" else code
            try:
                done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True,
                                      timeout=min(120, max(1, self.budget.end - time.perf_counter())))
            except subprocess.TimeoutExpired:
                done = None
            if done and done.stdout.strip() == "True":
                return True
            reason = f"{PACKAGES[name]} sees no GPU here"
            if done is None or done.returncode:
                last = done.stderr.strip().splitlines()[-1:] if done else ["no answer in time"]
                reason = f"{PACKAGES[name]} does not start: {(last or ['no reason given'])[0]}"
        (self.fail if self.explicit else self.leave_out)(name, reason)
        return False

    def _parts(self, name: str) -> list[tuple[float, str, Callable[[Slot], None]]]:
        """(weight, label, call) of a backend's parts; the first opens the backend."""
        parts: list[tuple[float, str, Callable[[Slot], None]]] = [
            (1, name, lambda slot: self.open(name, slot)),
            (4 if self.given.device == "gpu" else 2, f"{name} low-bit products",
             lambda slot: self.products(name, slot)),
            (1, f"{name} logits", lambda slot: self.logits(name, slot)),
            (1, f"{name} tokens", lambda slot: self.tokens(name, slot))]
        if name == "cuda" and self.given.processes != 1:
            parts.append((2, f"{name} processes", lambda slot: self.processes(name, slot)))
        if name == "cuda" and self.given.device == "gpu":
            parts.insert(1, (2, f"{name} kernels", lambda slot: self.kernels(name, slot)))
        for shape in self.given.shapes:
            for form in FORMATS:
                weight = {"tiny": 1, "1.1b": 2, "8b-4": 2, "8b": 4}[shape] * (2 if form == "bf16" else 1)
                parts.append((weight, f"{name} {shape} {form}",
                              lambda slot, shape=shape, form=form: self.measure(name, shape, form, slot)))
        return parts

    def fail(self, part: str, reason: str, trace: str = "") -> None:
        say(f"{part}: FAILED: {reason}\n{trace}".rstrip())
        self.result["failed"].append({"part": part, "reason": reason, "trace": trace})

    def lose(self, part: str, error: PartError) -> None:
        """Record a part as left out for lack of time, else as failed."""
        if isinstance(error, NoTime):
            self.leave_out(part, str(error))
        else:
            self.fail(part, str(error), error.trace)

    def leave_out(self, part: str, reason: str) -> None:
        say(f"{part}: left out: {reason}")
        self.result["left_out"].append({"part": part, "reason": reason})

    def worker(self, name: str, side: str) -> Worker:
        worker = self.workers.get((name, side))
        if worker is None or not worker.alive:
            worker = self.workers[name, side] = Worker(name, side, self.given.device)
        return worker

    def ask(self, name: str, side: str, slot: Slot, op: str, limit: float = math.inf, **given: Any) -> dict[str, Any]:
        """Raises PartError."""
        if time.perf_counter() > self.budget.end:
            raise NoTime("no time left")
        worker = self.worker(name, side)
        worker.send(op, **given)
        try:
            return worker.receive(min(slot.hard_left, limit))
        except PartError as error:
            ended = time.perf_counter() > self.budget.end
            # Give CPUs more time; a silent GPU hangs.
            slow = self.given.device == "cpu" and slot.hard_left <= 0
            if ended or slow:
                raise NoTime(f"no time left ({error})") from None
            raise

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    # Proofs

    def open(self, name: str, slot: Slot) -> None:
        """Start the backend, and report peers that are missing."""
        found = self.ask(name, "ours", slot, "hello")
        self.result["machine"][name] = found
        peers = [peer for (backend, _), some in PEERS.items() if backend == name for peer in some]
        for peer in dict.fromkeys(map(_program, peers)):
            if reason := self._find_missing(peer):
                self.leave_out(f"{name} beside {peer}", reason)
            else:
                has_bench = peer == "llama.cpp" and shutil.which(LLAMA_BENCH)
                found["versions"][peer] = LLAMA_BENCH if has_bench else _version(PEER_PACKAGES[peer])
        say(f"{name}: {found['device']}, {', '.join(f'{key} {value}' for key, value in found['versions'].items())}")
        if found["no_kernels"] and self.given.device == "gpu":
            (self.fail if self.explicit else self.leave_out)(f"{name} kernels", found["no_kernels"])

    def _find_missing(self, peer: str) -> str:
        """Reason why a peer cannot run here, or ""."""
        if peer == "vllm" and self.given.device == "cpu":
            return "it is measured on GPUs only"
        package = PEER_PACKAGES[peer]
        if importlib.util.find_spec(package) or (peer == "llama.cpp" and shutil.which(LLAMA_BENCH)):
            return ""
        return f"the package {package} is not installed" + (f", nor {LLAMA_BENCH}" if peer == "llama.cpp" else "")

    def check(self, name: str, what: str, found: list[dict[str, Any]]) -> None:
        for one in found:
            self.result["checks"].append({"backend": name, "what": what, **one})
        bad = [one for one in found if not one["ok"]]
        if bad:
            self.fail(f"{name} {what}", "; ".join(f"{one['name']}: {one['error']:.2g}, allowed {one['bound']:.2g}"
                                                  if "error" in one else one["name"] for one in bad))
        say(f"{name} {what}: {len(found) - len(bad)} of {len(found)} as they should be")

    def kernels(self, name: str, slot: Slot) -> None:
        if self.result["machine"][name]["no_kernels"]:
            return  # `open` has said why
        answer = self.ask(name, "ours", slot, "check_kernels")
        self.check(name, "kernels", answer["found"])
        self.result["kernel_rates"][name] = answer["rates"]

    def products(self, name: str, slot: Slot) -> None:
        answer = self.ask(name, "ours", slot, "check_products", seconds=slot.soft_left)
        self.check(name, "low-bit products", answer["found"])
        if answer["skipped"]:
            self.leave_out(f"{name} low-bit products", f"no time left for {', '.join(answer['skipped'])}")

    def logits(self, name: str, slot: Slot) -> None:
        for form in FORMATS:
            found = self.ask(name, "ours", slot, "check_logits", form=form)["found"]
            self.check(name, "logits", found)
            self.check(name, "same bits", [{"name": one["name"], "ok": one["same"]} for one in found])

    def tokens(self, name: str, slot: Slot) -> None:
        refused = ""
        for form, dtype in (("bf16", "float32"), ("bf16", "auto"), ("4-bit", "auto"), ("q8_0", "auto")):
            if self.given.device == "cpu" and name == "mlx" and dtype == "auto" and form != "bf16":
                continue  # MLX's CPU device calls a C++ compiler for every kernel
            answer = self.ask(name, "ours", slot, "check_tokens", form=form, dtype=dtype)
            self.check(name, "steps", [{"name": f"{form} {dtype}", "error": answer["apart"], "bound": answer["bound"],
                                        "ok": answer["apart"] <= answer["bound"]}])
            found = [{"name": f"{form} {dtype} twice", "ok": answer["same"]}]
            if answer["compiled"] is not None:
                found.append({"name": f"{form} {dtype} compiled", "ok": answer["compiled"]})
            refused = answer["refused"]
            self.check(name, "same tokens", found)
        if refused:
            self.leave_out(f"{name} compiled step", refused)

    def processes(self, name: str, slot: Slot) -> None:
        """A model over several processes, a GPU each: the same tokens as in one, and the rate of both."""
        size, label = self.given.processes, f"{name} processes"
        if self.given.device == "gpu":
            import torch

            there = torch.cuda.device_count()
            if there < (size or 2):
                return self.leave_out(label, f"there is {there} GPU, and each process needs one")
        size = size or 2
        shape = next((one for one in ("1.1b", "tiny") if one in self.given.shapes), "tiny")
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), {"1.1b": "tinyllama"}.get(shape, shape), "float32", 0)
            run = [str(Path(__file__).resolve()), "--processes-worker", folder, name, self.given.device, str(self.given.generate)]
            starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
            answers = [self._run_processes([*prefix, *run], slot) for prefix in ([sys.executable], starter)]
        alone, together = answers
        self.check(name, "same tokens", [{"name": f"{size} processes", "ok": alone["tokens"] == together["tokens"]}])
        self.result["processes"].append({"backend": name, "shape": shape, "size": size, "rate": together["rate"],
                                         "alone": alone["rate"]})

    def _run_processes(self, command: list[str], slot: Slot) -> dict[str, Any]:
        """The JSON object that a command prints. Raises PartError."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            out, errors = process.communicate(timeout=max(1, slot.hard_left))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes
            process.wait(30)
            raise NoTime("no time left") from None
        if process.returncode:
            raise PartError((errors.strip().splitlines() or ["no reason given"])[-1], errors)
        return json.loads(out.strip().splitlines()[-1])

    # Speed

    def measure(self, name: str, shape: str, form: str, slot: Slot) -> None:
        """Measure one model: ours compiled and not, then its peers."""
        config, label = make_config(shape), f"{name} {shape} {form}"
        prompt = min(self.given.prompt, config.max_position_embeddings - 1)
        need, free = needed_bytes(shape, form, prompt), self.ask(name, "ours", slot, "free_bytes")["bytes"]
        if free is not None and need > free:
            self.leave_out(label, f"it takes {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
            if shape == "8b" and "8b-4" not in self.given.shapes:
                self.measure(name, "8b-4", form, slot)
            return
        bounds = self.ask(name, "ours", slot, "bounds")
        self.result["bounds"].setdefault(name, []).append(bounds)
        count = min(self.given.generate, config.max_position_embeddings - DEPTH - 1)
        taken = Taken(name, shape, form, count, prompt, bounds)
        sides = self._sides(name, shape, form)
        for number, side in enumerate(sides):
            if number and slot.soft_left < 1:
                self.leave_out(f"{label} {side.variant}", "no time left")
                continue
            until = time.perf_counter() + slot.soft_left / (len(sides) - number)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    self._measure_side(side, taken, until, slot, folder)
                except PartError as error:
                    if side.program == "ours":
                        self.lose(f"{label} {side.variant}", error)
                    else:  # no fault of this package
                        self.leave_out(f"{label} {side.variant}", str(error))
                if side.program != "ours" and (worker := self.workers.pop((name, side.program), None)):
                    worker.close()
        if "ours" in taken.logits and len(taken.logits) > 1:
            self.check(name, "peers' logits", taken.compare_logits())

    def _sides(self, name: str, shape: str, form: str) -> list[Side]:
        """The lines of a model in the table."""
        compiled, eager = Side("ours compiled", "ours", True), Side("ours eager", "ours", False)
        sides = [compiled, eager]
        if self.given.device == "cpu" and name == "mlx" and (shape, form) != ("tiny", "bf16"):
            sides = [eager]  # as in `tokens`
        if name == "cuda":
            sides.append(Side("ours invariant", "ours", True, ("batch_invariant",)))
        peers = [Side(peer, _program(peer), "compiled" in peer) for peer in PEERS.get((name, form), ())]
        if self.given.device == "cpu":  # where torch.compile takes a minute, and so does mlx-lm in 4 bits
            peers = [peer for peer in peers if not peer.compile and (peer.program, form) != ("mlx-lm", "4-bit")]
        return sides + [peer for peer in peers if not self._find_missing(peer.program)]

    def _measure_side(self, side: Side, taken: Taken, until: float, slot: Slot, folder: str) -> None:
        """Add a line to the table: a few runs of each kind until `until`, one run in any case."""
        def ask(op: str, limit: float = math.inf, **given: Any) -> dict[str, Any]:
            return self.ask(taken.backend, side.program, slot, op, limit, **given)

        began, is_ours = time.perf_counter(), side.program == "ours"
        limit = math.inf if is_ours else PEER_LIMIT
        more = dict.fromkeys(side.options, True) if is_ours else {"folder": folder}
        loaded = ask("load", limit, shape=taken.shape, form=taken.form, compile=side.compile, **more)
        if "refused" in loaded:
            return say(f"{taken.label} {side.variant}: not there: {loaded['refused']}")
        say(f"{taken.label} {side.variant}: {loaded['nbytes'] / 1e9:.2f} GB, loaded in {loaded['seconds']:.1f} s")
        if "logits" in loaded:
            taken.logits.setdefault(side.program, loaded["logits"])
        taken.read = loaded.get("read", taken.read)
        row: dict[str, Any] = {"backend": taken.backend, "shape": taken.shape, "form": taken.form, "side": side.variant,
                               **dict.fromkeys((*RATES, *FIGURES))}
        self.result["rows"].append(row)
        if taken.backend == "mlx" and side.program != "llama.cpp":
            row["operations"] = ask("operations")["count"]
        if is_ours and not taken.is_fitted:  # a slow machine gets fewer tokens, not none
            ask("decode", count=2, depth=8)
            rate, share = ask("decode", count=8, depth=8)["rate"], (until - began) / 12
            taken.count = max(8, min(taken.count, int(rate * share)))
            rate = ask("prefill", count=min(256, taken.prompt))["rate"]
            taken.prompt = max(min(256, taken.prompt), min(taken.prompt, int(rate * share)))
            taken.is_fitted = True
        answers: dict[str, list[dict[str, Any]]] = {}
        for kind, part in (("decode", 0.5), ("prefill", 0.8)):
            given = {"depth": DEPTH, "count": taken.count} if kind == "decode" else {"count": taken.prompt}
            ask(kind, limit, compile=side.compile, **given)  # warm
            answers[kind] = [ask(kind, compile=side.compile, **given)]
            while len(answers[kind]) < ROUNDS and time.perf_counter() < began + part * (until - began):
                answers[kind].append(ask(kind, compile=side.compile, **given))
            row[kind + "_all"] = [answer["rate"] for answer in answers[kind]]
            row[kind] = statistics.median(row[kind + "_all"])
        row["decode_share"] = row["decode"] * taken.read / taken.bounds["copy"] if taken.read else None
        row["prefill_share"] = row["prefill"] * 2 * prompt_weights(make_config(taken.shape)) / taken.bounds["product"]
        for key in ("host", "waits"):
            row[key] = statistics.median(values) if (values := _present(answers["decode"], key)) else None
        row["peak"] = max(_present([loaded, *answers["decode"], *answers["prefill"]], "peak"), default=None)
        if not (side.program == "transformers" and side.compile):  # which would compile anew for each number of rows
            for batch in BATCHES:
                row[f"{batch} rows"] = ask("rows", depth=DEPTH, count=min(BATCH_COUNT, taken.count), batch=batch,
                                           compile=side.compile)["rate"]
        if is_ours:
            ask("unload")
        say(markdown_row(row, {}))


@dataclasses.dataclass(frozen=True)
class Side:
    """One line of the table ("ours compiled", "mlx-lm" ...), the program that runs it, and its options."""

    variant: str
    program: str
    compile: bool
    options: tuple[str, ...] = ()  # of Backend.load besides


def _program(peer: str) -> str:
    """The program of a peer: "transformers" of "transformers compiled"."""
    return peer.split()[0]


def _present(answers: list[dict[str, Any]], key: str) -> list[float]:
    return [answer[key] for answer in answers if answer.get(key) is not None]


@dataclasses.dataclass
class Taken:
    """What the sides of one model share.

    count, prompt: tokens to decode and of the prompt; is_fitted: they fit the time. bounds: of op_bounds. read: bytes of
    weights that a token reads, 0 if unknown. logits: some, by program.
    """

    backend: str
    shape: str
    form: str
    count: int
    prompt: int
    bounds: dict[str, float]
    read: int = 0
    is_fitted: bool = False
    logits: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.backend} {self.shape} {self.form}"

    def compare_logits(self) -> list[dict[str, Any]]:
        """Differences of the peers' logits from ours, as checks: a peer may compute another model."""
        ours, found = np.array(self.logits["ours"]), []
        for program, logits in self.logits.items():
            error = _finite(float(np.linalg.norm(ours - np.array(logits)) / np.linalg.norm(ours)))
            if program != "ours":
                found.append({"name": f"{self.label} {program}", "error": error, "bound": SAME_MODEL,
                              "ok": error <= SAME_MODEL})
        return found


FIGURES = ("decode_share", "prefill_share", "host", "waits", "peak", "operations")
RATES = ("decode", *(f"{batch} rows" for batch in BATCHES), "prefill")
HEADER = ("model", "program", "decode, tokens/s", "of a copy", *(f"{batch} rows" for batch in BATCHES), "prompt, tokens/s",
          "of a product", "host us", "waits", "peak", "operations")


def markdown_row(row: dict[str, Any], best: dict[str, float]) -> str:
    """Format a row as a line under HEADER, rates with their ratio to `best`."""

    def cell(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def rate(key: str) -> str:
        ratio = f" ({row[key] / best[key]:.2f})" if row[key] is not None and key in best else ""
        return cell(row[key], ".1f") + ratio

    host = None if row["host"] is None else 1e6 * row["host"]
    cells = [f"{row['backend']} {row['shape']} {row['form']}", row["side"], rate("decode"), cell(row["decode_share"], ".0%"),
             *map(rate, RATES[1:]), cell(row["prefill_share"], ".0%"), cell(host, ".0f"), cell(row["waits"], ".4g"),
             cell(row["peak"], ".2f"), cell(row["operations"], "d")]
    return f"| {' | '.join(cells)} |"


def table(result: dict[str, Any]) -> str:
    """The results in Markdown: devices and checks, one table, and the parts that are not in it."""
    lines = [f"{name}: {found['device']}; " + ", ".join(f"{key} {value}" for key, value in found["versions"].items())
             for name, found in result["machine"].items()]
    for name, found in result["bounds"].items():
        copy, product = (statistics.median(one[key] for one in found) for key in ("copy", "product"))
        lines.append(f"{name}: a copy reads and writes {copy / 1e9:.0f} GB/s, a bfloat16 product does "
                     f"{product / 1e12:.3g} TFLOP/s")
    for name, kernels in result["kernel_rates"].items():
        rates = (f"{kernel} {one['ours'] / 1e9:.0f}" + (f" ({one['torch'] / 1e9:.0f})" if "torch" in one else "")
                 for kernel, one in kernels.items())
        lines.append(f"{name} kernels read, GB/s (torch's own): " + ", ".join(rates))
    for name, what in dict.fromkeys((one["backend"], one["what"]) for one in result["checks"]):
        found = [one for one in result["checks"] if (one["backend"], one["what"]) == (name, what)]
        line = f"{name} {what}: {sum(one['ok'] for one in found)} of {len(found)} right"
        if "error" in found[0]:
            worst = max(found, key=lambda one: one["error"] / one["bound"])
            line += f"; nearest to its bound: {worst['name']}, {worst['error']:.2g} of {worst['bound']:.2g}"
        lines.append(line)
    lines += [f"{one['backend']} {one['shape']} float32 weights: {one['size']} processes decode {one['rate']:.1f} tokens/s, one "
              f"{one['alone']:.1f}" for one in result["processes"]]
    lines += [f"FAILED {one['part']}: {one['reason']}" for one in result["failed"]]
    lines += [f"left out: {one['part']}: {one['reason']}" for one in result["left_out"]]
    lines.append(f"{result['seconds']:.0f} s" + (", interrupted" if result["interrupted"] else "")
                 + "; in parentheses: ratios to the fastest peer of the same model")
    lines = [f"- {line}" for line in lines]
    if result["rows"]:
        lines += ["", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for row in result["rows"]:
        model = (row["backend"], row["shape"], row["form"])
        peers = [one for one in result["rows"] if (one["backend"], one["shape"], one["form"]) == model
                 and not one["side"].startswith("ours")] if row["side"].startswith("ours") else []
        lines.append(markdown_row(row, {key: max(rates) for key in RATES if (rates := _present(peers, key))}))
    return "\n".join(lines)


def listed(text: str, known: Sequence[str]) -> list[str]:
    """Parse comma-separated names. Raises ArgumentTypeError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(known)}, separated by commas")
    return list(dict.fromkeys(names))


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a parser of numbers above 0."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < 1e6:
            raise argparse.ArgumentTypeError(f"{text}: must be above 0")
        return value

    return parse


def main() -> int:
    """Parse the command line, measure, show. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=lambda text: listed(text, list(MODELS)), default=["1.1b", "8b"],
                        help="some of tiny, 1.1b, 8b-4 (4 layers of 8b) and 8b (default: 1.1b,8b)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--backends", type=lambda text: listed(text, list(PACKAGES)),
                        help="some of cuda, mlx; a named one must be installed (default: all that are)")
    parser.add_argument("--prompt", type=positive(int), help="tokens of the long prompt (default: 2048, on CPUs 128)")
    parser.add_argument("--generate", type=positive(int), help="tokens to decode (default: 128, on CPUs 32)")
    parser.add_argument("--processes", type=positive(int),
                        help="torch processes of one model, a GPU each; 1: none of it (default: 2 where there are as many GPUs)")
    parser.add_argument("--minutes", type=positive(float), default=20.0, help="for the whole command (default: 20)")
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")
    given = parser.parse_args()
    on_gpu = given.device == "gpu"
    given.processes = given.processes or (None if on_gpu else 1)
    given.prompt = max(2, given.prompt or (2048 if on_gpu else 128))
    given.generate = given.generate or (128 if on_gpu else 32)
    measurement = Measurement(given, given.backends or list(PACKAGES), given.backends is not None)
    result = measurement.result

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        measurement.run()
    except KeyboardInterrupt:
        result["interrupted"] = True
    finally:
        measurement.close()
        signal.signal(signal.SIGTERM, before)
    result["seconds"] = round(time.perf_counter() - measurement.started, 1)
    print(json.dumps(result) if given.json else table(result))
    return 130 if result["interrupted"] else 1 if result["failed"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["--processes-worker"]:
        serve_processes(*sys.argv[2:])
    else:
        sys.exit(main())
