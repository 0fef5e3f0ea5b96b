"""GGUF's K types as MLX's GPU holds them: bytes against the file's, numbers against gguf's
dequantiser, and the Metal kernels, run as MLX would hand them to Metal (tests/metal.py)."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import shutil
import tempfile
from pathlib import Path

import metal
import numpy as np
import pytest
from cases.mixed import MIXED, SHAPE
from machine import open_backend
from making_gguf import HALVES, dequantise, make_gguf, random_blocks

from backends.conftest import in_chunks, matrices_of, relative_rms
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import AffineWeight, GGUFWeight
from mlx_llama.core.options import resolve
from mlx_llama.core.system.machine import Gpus

mx = pytest.importorskip("mlx.core")

from mlx_llama.mlx_native import facts, quantized, runtime, weights
from mlx_llama.mlx_native.kernels import two_level

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
TWO_LEVEL = (*K_TYPES, "IQ4_XS")
# rows that fill no SIMD group, columns that fill no round of its lanes
SHAPES = [(11, 256), (24, 2816), (64, 1024)]


@pytest.fixture(scope="module")
def mlx():
    return open_backend("mlx")


@pytest.fixture
def gpu_layout(mlx, monkeypatch):
    """Matrices packed as for a GPU, on MLX's CPU device, multiplied by plain operations."""
    monkeypatch.setattr(quantized, "lays_for_gpu", lambda device: True)
    return quantized


@pytest.fixture
def kernels(gpu_layout, monkeypatch):
    """The same, multiplied by the Metal kernels."""
    if shutil.which("g++") is None:
        pytest.skip("g++ compiles the Metal kernels here, and is not installed")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal.metal_kernel)
    use_kernels(gpu_layout, monkeypatch)
    forget_kernels(monkeypatch)
    return gpu_layout


def use_kernels(quantized, monkeypatch):
    pack = quantized.TwoLevelMatrix.pack
    monkeypatch.setattr(
        quantized.TwoLevelMatrix,
        "pack",
        lambda *args: dataclasses.replace(pack(*args), has_kernel=True),
    )


def forget_kernels(monkeypatch):
    for name in ("_kernel", "find_fault"):
        monkeypatch.setattr(two_level, name, functools.cache(getattr(two_level, name).__wrapped__))


def weight(kind: str, rows: int, columns: int, scales=None) -> tuple[GGUFWeight, np.ndarray]:
    """(a random matrix, its numbers by gguf). scales: makes the float16 scales of `count`
    blocks.
    """
    blocks = random_blocks(kind, rows, columns, np.random.default_rng(rows))
    if scales is not None:
        every = blocks.reshape(rows * columns // 256, -1)
        for at in HALVES[kind]:
            every[:, at : at + 2] = scales(len(every)).astype(np.float16)[:, None].view(np.uint8)
    return GGUFWeight("w", kind, (rows, columns), blocks), dequantise(blocks, kind)


def product(matrix, x: np.ndarray) -> np.ndarray:
    return np.array(matrix.matmul(mx.array(x)), np.float64)


def product_error(matrix, x: np.ndarray, judge: np.ndarray) -> float:
    """Relative error of `x` times the matrix, whose numbers are `judge`'s."""
    return relative_rms(product(matrix, x), x.astype(np.float64) @ judge.T.astype(np.float64))


# Bytes


@functools.cache
def model_file(kind: str) -> Path:
    path = Path(tempfile.mkdtemp()) / "m.gguf"
    make_gguf(path, kinds=MIXED.get(kind, kind), **SHAPE)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TWO_LEVEL, "Q4_K_M", "Q5_K_M", "Q2_K mix"])
def test_a_gpu_holds_at_most_1_15_times_the_files_bytes(kind, mlx, gpu_layout):
    """Of all tensors, embedding and head included, by MLX's own count, which rounds arrays up to a
    fraction of a page.
    """
    checkpoint = open_checkpoint(model_file(kind))
    matrices = sum(
        tensor.nbytes for tensor in checkpoint.tensors.values() if isinstance(tensor, AffineWeight)
    )
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model = mlx.load(checkpoint)
    held = mx.get_active_memory() - before
    weights = [*matrices_of(model), model.decoder.embedding.weight]
    assert sum(weight.nbytes for weight in weights) <= 1.04 * matrices
    assert held <= 1.15 * matrices
    planned = facts.weights_nbytes(checkpoint.tensors.values(), "float16", True)
    assert planned <= held <= 1.02 * planned + 20000


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q6_K"])
def test_the_doctor_counts_on_the_kernels_where_there_is_metal(kind, monkeypatch):
    monkeypatch.setattr(facts.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(facts.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(facts, "_metal_memory", lambda: 16 << 30)
    on_mac = facts.describe({"mlx": "0.32.4"}, Gpus())
    # an NVIDIA GPU, where mx.fast.metal_kernel raises
    elsewhere = dataclasses.replace(on_mac, kernels=None)
    checkpoint = open_checkpoint(model_file(kind))
    mac, nvidia = (facts.plan_weights(checkpoint, each) for each in (on_mac, elsewhere))
    assert mac.low_bit_operand == nvidia.low_bit_operand == "float16"
    assert mac.nbytes <= 1.05 * checkpoint.nbytes
    assert 1.1 * checkpoint.nbytes < nvidia.nbytes <= 1.25 * checkpoint.nbytes


# Numbers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", TWO_LEVEL)
def test_the_layout_has_the_bits_of_gguf(kind, shape, mlx, gpu_layout):
    """Dequantised in float32, whole and by row; two matrices concatenated."""
    first, second = weight(kind, *shape), weight(kind, shape[0] + 1, shape[1])
    matrix = gpu_layout.pack([first[0], second[0]], mx.float32, mlx.device)
    assert isinstance(matrix, gpu_layout.TwoLevelMatrix)
    assert matrix.shape == (2 * shape[0] + 1, shape[1])
    judge = np.concatenate([first[1], second[1]])
    rows = np.array([[0, 2 * shape[0]], [shape[0], 3]], np.int32)
    np.testing.assert_array_equal(np.array(matrix.rows(mx.array(rows))), judge[rows])
    x = np.random.default_rng(0).standard_normal((2, 3, shape[1])).astype(np.float32)
    assert product_error(matrix, x, judge) < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", TWO_LEVEL)
def test_the_metal_kernels_read_what_gguf_reads(kind, shape, mlx, kernels):
    """Of a token, of a few rows and of a prompt. Products round operands to nothing, and results to
    x's dtype.
    """
    stored, judge = weight(kind, *shape)
    for dtype, bound in (("float32", 2e-6), ("float16", 4e-4)):
        matrix = kernels.pack([stored], getattr(mx, dtype), mlx.device)
        assert matrix.has_kernel
        for count in (1, 3, 20):
            x = np.random.default_rng(count).standard_normal((count, shape[1])).astype(dtype)
            assert product_error(matrix, x, judge) < bound

    in_16_bits = two_level.dequantise(matrix.layout, matrix.parts, mx.float16)
    np.testing.assert_array_equal(np.array(in_16_bits), judge.astype(np.float16))
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        assert two_level.find_fault(matrix.layout, dtype) == ""


SPREADS = {
    "smallest": lambda count: np.full(count, 2.0**-24),
    "subnormal": lambda count: np.random.default_rng(1).uniform(2.0**-24, 2.0**-14, count),
    "every magnitude": lambda count: 2.0 ** np.random.default_rng(2).uniform(-24, 5, count),
    "one large": lambda count: np.where(np.arange(count) == 3, 8.0, 2.0**-20),
    "large": lambda count: np.full(count, 60000.0),
    "zero": lambda count: np.where(np.arange(count) % 2, 0.0, 1e-4),
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("kind", K_TYPES)
def test_any_scales_that_a_file_may_hold(kind, spread, mlx, kernels, monkeypatch):
    """With the kernels, and with MLX's own product instead, whose scales are rounded to 16 bits or
    kept in 32.
    """
    stored, judge = weight(kind, 24, 512, SPREADS[spread])
    x = np.random.default_rng(3).standard_normal((24, 512)).astype(np.float32)
    wanted = x.astype(np.float64) @ judge.T.astype(np.float64)
    matrix = kernels.pack([stored], mx.float16, mlx.device)
    assert max(product_error(matrix, part, judge) for part in (x[:2], x)) < 2e-6
    plain = kernels.pack([stored], mx.float16, mlx.device, has_kernel=False)
    assert isinstance(plain, kernels.QuantizedMatrix)
    assert product_error(as_float32(plain), x, judge) < 1e-3
    # dequantised for a prompt on a GPU
    chosen = kernels._product_dtype(stored, mx.float16, mlx.device, np.abs(judge).max())
    rounded = judge.astype(np.float16 if chosen == mx.float16 else np.float32).astype(np.float64)
    assert relative_rms(x.astype(np.float64) @ rounded.T, wanted) < 5e-4


def as_float32(matrix):
    """A QuantizedMatrix with its scales widened, since MLX's CPU device sums 16-bit products in 16
    bits.
    """
    return dataclasses.replace(
        matrix,
        scalings=tuple(tuple(part.astype(mx.float32) for part in pair) for pair in matrix.scalings),
        product=mx.float32,
    )


# Metal's dialect


@pytest.fixture
def sources(mlx, gpu_layout):
    """A function: (format, dtype, "multiply" or "dequantise") -> Metal source as MLX generates
    it.
    """
    if shutil.which("clang") is None:
        pytest.skip(
            "clang compiles the Metal source with its address spaces here, and is not installed"
        )

    def make(kind: str, dtype: str, kernel: str) -> str:
        matrix = gpu_layout.pack([weight(kind, 11, 256)[0]], mx.float32, mlx.device)

        def call(x, *parts):
            parts, kept = two_level.Parts(*parts), getattr(mx, dtype)
            return (
                two_level.multiply(matrix.layout, parts, x)
                if kernel == "multiply"
                else two_level.dequantise(matrix.layout, parts, kept)
            )

        records = metal.exported(call, mx.zeros((2, 256), getattr(mx, dtype)), *matrix.parts)
        (source,) = [
            record["arguments"][1] for record in records if record["name"] == "CustomKernel"
        ]
        return source

    return make


@pytest.mark.parametrize("kind", TWO_LEVEL)
def test_kernels_are_metal_and_shift_few_codes(kind, sources):
    """A compiler with Metal's address spaces takes them. Of a weight's operations, shifts wait
    longest on Apple's GPUs.
    """
    for dtype in ("float32", "float16", "bfloat16"):
        for kernel, codes in (("multiply", 4 * 32), ("dequantise", 32)):
            code = metal.compile_as_metal(sources(kind, dtype, kernel))
            shifts = len(re.findall(r" = (?:lshr|shl|ashr) ", code))
            assert shifts <= codes * (3 if kind == "IQ4_XS" else 0.2)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("const float16_t* p = supers;", "with an lvalue of type 'device float16_t const"),
        ("supers[0] = float16_t(0);", "read-only"),
        ("float y = x[0];", "cannot initialize a variable of type 'float'"),
        ("float y = 1.0f; y = y * 1.5 + 1;", "increases floating-point precision"),
        ("uint y = 1u << 32;", "shift count"),
    ],
)
def test_source_that_metal_would_refuse_is_refused(line, reason, sources):
    source = sources("Q4_K", "bfloat16", "multiply")
    with pytest.raises(ValueError, match=reason):
        metal.compile_as_metal(
            source.replace("sums[4] = {0, 0, 0, 0};", "sums[4] = {0, 0, 0, 0}; " + line)
        )


# Models


def logits(mlx, path: Path, dtype: str, length: int = 7) -> np.ndarray:
    tokens = np.random.default_rng(1).integers(3, 384, (1, length)).astype(np.int32)
    return in_chunks(
        mlx.load(open_checkpoint(path), dtype), mlx.runtime.to_numpy, tokens, (0, length)
    )


@pytest.mark.parametrize("kind", ["Q6_K", "Q4_K_M", "Q2_K mix", "IQ4_XS"])
def test_a_models_logits_do_not_depend_on_the_layout(kind, mlx, monkeypatch, request):
    """The CPU device's own layout is judged by transformers in test_quantized.py. Activations in
    float16 change more.
    """
    path = model_file(kind)
    wanted, in_16_bits = logits(mlx, path, "float32"), logits(mlx, path, "auto")
    request.getfixturevalue("kernels")
    assert relative_rms(logits(mlx, path, "float32"), wanted) < 1e-5
    # more rows than the kernel takes
    assert relative_rms(logits(mlx, path, "float32", 20)[:, :7], wanted) < 1e-5
    bound = 1.2 * relative_rms(in_16_bits, wanted) + 1e-4
    assert relative_rms(logits(mlx, path, "auto"), wanted) <= bound


def test_a_product_is_one_primitive_of_a_decode_step(mlx, kernels, monkeypatch):
    """As MLX would hand the step to Metal: groups of 16 too read their codes once, and nothing is
    dequantised but a row.
    """
    names = {}
    for kind in ("Q4_0", "Q6_K", "Q4_K"):
        model = mlx.load(open_checkpoint(model_file(kind)))
        cache = model.make_cache(64)
        sampling = mlx.sampling_batch([resolve({"temperature": 0}).options])
        model.forward([[1, 2, 3]], 0, cache)
        token = model.step(np.array([[5]], np.int32), 3, cache, sampling)
        mx.eval(token)
        monkeypatch.setattr(mx.fast, "metal_kernel", metal._metal_kernel)
        forget_kernels(monkeypatch)
        names[kind] = [
            record["name"]
            for record in metal.exported(lambda token: model.step(token, 4, cache, sampling), token)
        ]
        monkeypatch.setattr(mx.fast, "metal_kernel", metal.metal_kernel)
        forget_kernels(monkeypatch)
    products = names["Q4_0"].count("QuantizedMatmul")
    assert products == names["Q6_K"].count("CustomKernel") == names["Q4_K"].count("CustomKernel")
    assert "QuantizedMatmul" not in names["Q6_K"] + names["Q4_K"]
    rows = 40  # operations that dequantise the embedding's row
    assert max(len(names["Q6_K"]), len(names["Q4_K"])) <= len(names["Q4_0"]) + rows


# Kernels that cannot be used


@pytest.fixture
def gpu(kernels, mlx, monkeypatch):
    """A device that says it is a GPU, and streams of which are the CPU's."""

    class Device:
        type = mx.gpu

    device, stream = Device(), mx.stream
    monkeypatch.setattr(
        mx, "stream", lambda wanted: stream(mlx.device if wanted is device else wanted)
    )
    return device


def no_metal(**settings):
    def call(**arguments):
        raise RuntimeError("[metal_kernel] No Metal back-end.\nnor any other")

    return call


def wrong_numbers(**settings):
    kernel = metal.metal_kernel(**settings)
    return lambda **arguments: [array * 1.01 for array in kernel(**arguments)]


@pytest.mark.parametrize(
    "kernel, reason",
    [
        (no_metal, "RuntimeError: [metal_kernel] No Metal back-end."),
        (wrong_numbers, "their results differ from plain operations"),
    ],
)
def test_kernels_that_fail_their_trial_are_not_used(kernel, reason, mlx, gpu, kernels, monkeypatch):
    monkeypatch.setattr(runtime, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(weights, "_free_memory", lambda device: None)
    checkpoint = open_checkpoint(model_file("Q4_K_M"))
    weights_here = weights.Weights(checkpoint, mx.float16, gpu)
    assert weights_here.notices == ()
    assert kernels.find_faults(low_bit(checkpoint), mx.float16, mlx.device) == {}
    monkeypatch.setattr(mx.fast, "metal_kernel", kernel)
    forget_kernels(monkeypatch)
    weights_here = weights.Weights(checkpoint, mx.float16, gpu)
    assert [reason in notice for notice in weights_here.notices] == [True, True]  # Q4_K and Q6_K
    assert "Q6_K" in weights_here.notices[0] + weights_here.notices[1]
    matrix = weights_here.linear(["model.layers.0.self_attn.o_proj"]).weight
    assert isinstance(matrix, kernels.QuantizedMatrix) and matrix.scalings[0][0].dtype == mx.float16
    head, embedding = "lm_head", "model.embed_tokens"
    for name, held in (
        ("model.layers.0.self_attn.o_proj", matrix),
        (head, weights_here.linear([head]).weight),
        (embedding, weights_here.embedding(embedding).weight),
    ):
        tensor = checkpoint.tensors[f"{name}.weight"]
        assert held.nbytes == facts.tensor_nbytes(tensor, "float16", True, False)


def low_bit(checkpoint):
    return [tensor for tensor in checkpoint.tensors.values() if isinstance(tensor, AffineWeight)]


@pytest.mark.parametrize("kind", K_TYPES)
def test_without_kernels_16_bit_scales_are_close_enough(kind, mlx, gpu_layout):
    stored, judge = weight(kind, 64, 2048)
    matrix = gpu_layout.pack([stored], mx.float16, mlx.device, has_kernel=False)
    assert matrix.scalings[0][0].dtype == mx.float16
    values = product(as_float32(matrix), np.eye(2048, dtype=np.float32)).T
    # 2.1e-4 by rounding scales alone, 2.3e-4 to 2.8e-4 if biases added to it
    assert relative_rms(values, judge) < 2.15e-4
    if stored.group_size == 32:
        assert matrix.nbytes <= 1.15 * stored.nbytes
