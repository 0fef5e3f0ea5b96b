"""The Triton kernels against gguf's and MLX's dequantisers: on a GPU if there is one, else in
Triton's interpreter.

The interpreter runs a kernel on the CPU through NumPy. It must be chosen before triton is imported,
so it runs in a process of its own. test_machine_code.py has the code that the compiler makes of
them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys

import numpy as np
import pytest
from making_gguf import LOW_BIT, dequantise, make_gguf, random_blocks

from mlx_llama.core.backends.load_options import LoadOptions
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import FloatWeight, GGUFWeight, MLXWeight, Rows

torch = pytest.importorskip("torch")

from backends.triton_process import DEVICE, HAS_GPU, call, computing  # noqa: F401
from cuda_fallback import kernels, quantized
from cuda_fallback.model import Llama
from cuda_fallback.quantized import QuantizedMatrix

BITS = (2, 3, 4, 5, 6, 8)


class Made:
    """A low-bit matrix of random codes in any form of AffineWeight."""

    mode, table = "affine", ""

    def __init__(self, bits: int, group_size: int, has_biases: bool, shape: tuple[int, int]):
        rng = np.random.default_rng(bits * group_size)
        self.bits, self.group_size, self.has_biases = bits, group_size, has_biases
        self.shape = shape
        self.offset = 0 if has_biases else 1 << (bits - 1)
        self.two_level, self.scale_dtype = False, "float16"
        groups = (shape[0], shape[1] // group_size)
        self.codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
        self.codes[0], self.codes[-1] = 0, (1 << bits) - 1
        self.scales, self.biases = rng.standard_normal((2, *groups)).astype(np.float16)

    def rows(self, start: int, stop: int) -> Rows:
        biases = self.biases[start:stop].astype(np.float32) if self.has_biases else None
        return Rows(
            self.codes[start:stop], self.scales[start:stop].astype(np.float32), biases, self.offset
        )

    def release(self) -> None:
        pass

    def float64(self) -> np.ndarray:
        scales, biases = (
            np.repeat(part.astype(np.float64), self.group_size, 1)
            for part in (self.scales, self.biases)
        )
        values = scales * (self.codes.astype(np.float64) - self.offset)
        return values + biases if self.has_biases else values


def packed(weights, dtype: str = "float32"):
    from cuda_fallback.kernels import packed as kernels

    assert HAS_GPU or type(kernels._multiply).__name__ == "InterpretedFunction"
    return QuantizedMatrix.pack(weights, getattr(torch, dtype), DEVICE, kernels)


def multiplied(
    weights, batches: tuple[int, ...], dtype: str = "float32"
) -> list[tuple[np.ndarray, np.ndarray]]:
    """[(x float32 [M, K], its product float32 [M, N])] for M in `batches`; each computed twice, to
    the same bits.
    """
    matrix, results = packed(weights, dtype), []
    for M in batches:
        x = torch.from_numpy(
            np.random.default_rng(M).standard_normal((M, matrix.shape[1]), np.float32)
        )
        x = x.to(DEVICE, matrix.dtype)
        by_kernel = M <= matrix.kernels.MOST_ROWS
        product = matrix.matmul(x)
        again = matrix.kernels.multiply(matrix, x) if by_kernel else matrix.matmul(x)
        assert product.dtype == x.dtype and torch.equal(product, again)
        if by_kernel and M > 1:  # a row has the same bits alone
            assert torch.equal(product[-1:], matrix.kernels.multiply(matrix, x[-1:]))
        results.append((x.float().cpu().numpy(), product.float().cpu().numpy()))
    return results


def multiplied_by_six_programs(weights) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `multiplied`, of a row; programs have several steps of long rows."""
    from cuda_fallback.kernels import packed as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "PROGRAMS", 6)
        return multiplied(weights, (1,))


def dequantised(weights, ids: list[int], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows but the first and the last, and the rows `ids`, as the kernel gives them,
    float32.
    """
    matrix = packed(weights)
    N = matrix.shape[0]
    rows = matrix.rows(torch.tensor([ids], dtype=getattr(torch, kind), device=DEVICE))
    return matrix.dequantize(slice(1, N - 1), torch.float32).cpu().numpy(), rows[0].cpu().numpy()


def check_products(results, wanted: np.ndarray, bound: float = 1e-6) -> None:
    """Check errors relative to sums of absolute values, which bound the rounding of products and
    sums.
    """
    for x, product in results:
        x, w = x.astype(np.float64), wanted.astype(np.float64)
        assert product.shape == (len(x), len(w))
        assert (np.abs(product - x @ w.T) / (np.abs(x) @ np.abs(w).T)).max() < bound


# test_mlx and test_gguf have the common ones
@pytest.mark.slow_for("3", "5", "6", "8")
@pytest.mark.parametrize(
    "bits, group_size, has_biases",
    [
        (2, 16, True),
        (2, 128, False),
        (3, 16, False),
        (3, 64, True),
        (5, 16, True),
        (6, 128, False),
        (8, 16, False),
        (8, 128, True),
    ],
)
def test_every_width_and_group(bits, group_size, has_biases, call):
    weight = Made(bits, group_size, has_biases, (9, 3 * group_size))
    check_products(call(multiplied, [weight], (1, 3)), weight.float64())


def test_float32_scales_of_whole_steps(call):
    """As of a float32 checkpoint: a scale fills a word, and is no part of one."""
    weight = Made(8, 32, True, (9, 128))
    weight.scales, weight.biases = (
        part.astype(np.float32) / 3 for part in (weight.scales, weight.biases)
    )
    weight.scale_dtype = "float32"
    check_products(call(multiplied, [weight], (1, 3)), weight.float64(), 1e-5)


@pytest.mark.slow_for("I", "M", "Q2", "Q3", "Q4_", "Q5_", "Q8_K")
@pytest.mark.parametrize("kind", LOW_BIT)
def test_gguf(kind, call):
    blocks = random_blocks(kind, 11, 512, np.random.default_rng(0))
    weight, judge = GGUFWeight("w", kind, (11, 512), blocks), dequantise(blocks, kind)
    check_products(call(multiplied, [weight], (2,)), judge)
    rows, picked = call(dequantised, [weight], [7, 0, 10, 7], "int32")
    np.testing.assert_array_equal(rows, judge[1:-1])
    np.testing.assert_array_equal(picked, judge[[7, 0, 10, 7]])


@pytest.mark.slow_for("2", "3", "4-1", "4-3", "5", "6")
@pytest.mark.parametrize("bits, group_size", [*((bits, 64) for bits in BITS), (4, 32), (4, 128)])
def test_mlx(bits, group_size, call):
    mx = pytest.importorskip("mlx.core")
    with mx.stream(mx.cpu):
        w = mx.array(np.random.default_rng(0).standard_normal((6, 256), np.float32)).astype(
            mx.bfloat16
        )
        parts = mx.quantize(w, group_size, bits)
        judge = np.array(
            mx.dequantize(
                parts[0], *(part.astype(mx.float32) for part in parts[1:]), group_size, bits
            )
        )
    packed_codes, scales, biases = (
        np.array(part if i == 0 else part.view(mx.uint16)) for i, part in enumerate(parts)
    )
    weight = MLXWeight("w", bits, group_size, packed_codes, scales, biases)
    check_products(call(multiplied, [weight], (1,)), judge)
    rows, picked = call(dequantised, [weight], [5, 1], "int64")
    np.testing.assert_array_equal(rows, judge[1:-1])
    np.testing.assert_array_equal(picked, judge[[5, 1]])


@pytest.mark.slow_for("mxfp4")
@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_floating_point_codes(mode, call):
    """At their width; every second row of the file."""
    mx = pytest.importorskip("mlx.core")
    rng = np.random.default_rng(0)
    with mx.stream(mx.cpu):
        parts = mx.quantize(mx.array(rng.standard_normal((22, 480), np.float32)), mode=mode)[:2]
        judge = np.array(mx.dequantize(*parts, mode=mode, dtype=mx.float32))[::2]
    weight = FloatWeight("w", mode, *map(np.array, parts), np.arange(0, 22, 2))
    check_products(call(multiplied, [weight], (1, 3)), judge)
    for dtype, bound in (("float16", 1e-3), ("bfloat16", 8e-3)):
        check_products(call(multiplied, [weight], (2,), dtype), judge, bound)
    rows, picked = call(dequantised, [weight], [5, 1], "int64")
    np.testing.assert_array_equal(rows, judge[1:-1])
    np.testing.assert_array_equal(picked, judge[[5, 1]])


@pytest.mark.slow
def test_every_batch(call):
    weight = Made(4, 32, False, (3, 96))
    check_products(call(multiplied, [weight], (2, 3, 8, 9, 16, 17, 32, 33)), weight.float64())


@pytest.mark.slow
@pytest.mark.parametrize(
    "bits, shape",
    [(4, (1, 32)), (8, (4, 32)), (3, (3, 992)), (4, (66, 1056)), (3, (2, 2208))],
    ids=str,
)
def test_ragged_sizes_and_rows_that_are_cut(bits, shape, call):
    weight = Made(bits, 32, True, shape)
    check_products(call(multiplied_by_six_programs, [weight]), weight.float64())


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("dtype, bound", [("float16", 1e-3), ("bfloat16", 8e-3)])
def test_sixteen_bit_activations(dtype, bound, bits, call):
    weight = Made(bits, 32, True, (7, 160))
    check_products(call(multiplied, [weight], (1, 4, 17), dtype), weight.float64(), bound)


def test_several_matrices_as_one(call):
    weights = [Made(6, 16, False, (n, 256)) for n in (3, 1, 8)]
    judge = np.concatenate([weight.float64() for weight in weights])
    check_products(call(multiplied, weights, (1, 5)), judge)


def logits(path, use_kernels: bool) -> np.ndarray:
    """Logits after a prompt of two tokens and after a decoded token, float32 [2, V]."""
    from cuda_fallback.kernels import packed

    packed.try_out(DEVICE)
    with computing(use_kernels):
        llama = Llama.load(open_checkpoint(path), LoadOptions(dtype="float32"), DEVICE)
        assert (llama.decoder.head.weight.kernels is packed) is use_kernels
        cache = llama.make_cache(8)
        steps = [llama.forward(tokens, at, cache) for tokens, at in (([[3, 7]], 0), ([[9]], 2))]
    return torch.cat(steps).cpu().numpy()


@pytest.mark.slow
def test_a_model_of_mixed_formats(call, tmp_path):
    """The kernels agree with torch's own operations, which test_quantized.py tests."""
    others = {"v_proj": "Q6_K", "k_proj": "Q3_K", "o_proj": "Q8_0", "down_proj": "Q5_1"}
    path = tmp_path / "m.gguf"
    make_gguf(
        path,
        kinds=lambda name: others.get(name.split(".")[-2], "Q4_K"),
        tokenizer=None,
        num_hidden_layers=1,
        hidden_size=256,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
        vocab_size=64,
    )
    plain = call(logits, path, False)
    # In float32 the kernels' codes have a constant added, which the sums lose again: some bits.
    assert np.abs(call(logits, path, True) - plain).max() < 3e-5 * np.abs(plain).max()


def test_without_triton_torch_computes_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels.find_kernels(torch.device("cpu")) == (None, None, ())
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("decode", "packed"):
        monkeypatch.delitem(sys.modules, f"cuda_fallback.kernels.{module}", raising=False)
        monkeypatch.delattr(kernels, module, raising=False)
    kernels_here = kernels.find_kernels.__wrapped__(torch.device("cuda"))
    assert (kernels_here.decode, kernels_here.packed) == (None, None)
    (notice,) = kernels_here.notices
    assert "triton" in notice and "pip install triton" in notice and "\n" not in notice
    assert "not captured" in notice


def test_a_gpu_older_than_8_0_computes_by_torchs_operations_and_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    kernels_here = kernels.find_kernels.__wrapped__(torch.device("cuda"))
    assert (kernels_here.decode, kernels_here.packed) == (None, None)
    assert "need compute capability 8.0, and this GPU has 7.5" in kernels_here.notices[0]


def test_windows_has_triton_under_another_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    spec = importlib.util.spec_from_file_location(kernels.__name__, kernels.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.TRITON == "triton-windows"


def test_without_kernels_a_gpu_takes_few_launches(monkeypatch):
    """An 8B model has some 225 such products, of up to 8 blocks each."""
    from cases.machine_code import low_bit
    from cases.watch import Watch

    monkeypatch.setitem(quantized._BLOCK, "meta", quantized._BLOCK["cuda"])
    matrix = low_bit("Q4_0", 28672, 4096)
    matrix = dataclasses.replace(
        matrix, low=torch.empty((28672, 2048), dtype=torch.uint8, device="meta")
    )
    with Watch() as watch:
        product = matrix.matmul(torch.empty((1, 4096), device="meta"))
    assert product.shape == (1, 28672) and not watch.faults
    assert watch.operations - watch.views <= 8 * 17
