"""Triton's kernels of adapters, and captured steps of rows with different ones."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from making import make_checkpoint
from making_adapters import write_random

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import resolve

torch = pytest.importorskip("torch")

from backends.triton_process import (
    DEVICE,
    HAS_GPU,
    call,  # noqa: F401
    computing,
)
from cuda_fallback.arrays import SamplingBatch
from cuda_fallback.kernels.state import ADAPTER, new_state


def adapted(dtype, K: int, N: int, R: int) -> tuple[float, bool]:
    """Largest error of rows with the adapters 2, 0, 1, 2, relative to the largest value; whether
    other rows change no bit.
    """
    from cuda_fallback.kernels import decode

    numbers = torch.Generator().manual_seed(K)
    made = lambda *shape: (torch.randn(shape, generator=numbers) * 0.3).to(DEVICE, dtype)  # noqa: E731
    x, product, a, b = made(4, 1, K), made(4, 1, N), made(3, R, K), made(3, N, R)
    order = [2, 0, 1, 2]

    def run(rows: list[int]) -> torch.Tensor:
        state = new_state()
        state[ADAPTER, : len(rows)] = [order[row] for row in rows]
        return decode.adapt(
            torch.from_numpy(state).to(DEVICE), product[rows].clone(), x[rows], a, b
        )

    together = run([0, 1, 2, 3])
    wide = product.double()
    for row, adapter in enumerate(order):
        if adapter:
            wide[row] += (x[row].double() @ a[adapter].double().T) @ b[adapter].double().T
    is_same = all(torch.equal(run([row])[0], together[row]) for row in range(4)) and torch.equal(
        run([3, 1])[0], together[3]
    )
    assert torch.equal(together[1], product[1])
    return float((together.double() - wide).abs().max() / wide.abs().max()), is_same


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(64, 48, 8), (100, 33, 24), (1500, 70, 40)], ids=str)
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 3e-6), (torch.float16, 2e-3)], ids=["float32", "float16"]
)
def test_rows_add_their_adapters_and_others_change_no_bit(dtype, bound, shape, call):
    error, is_same = call(adapted, dtype, *shape)
    assert error < bound and is_same


def stepped(path: Path, adapters: list[Path]) -> tuple[list, list, list]:
    """Tokens of three steps of rows with adapters 1, 0, 2, 1 by kernels, captured, together and
    alone, and by torch's own operations."""
    from cases.captured import loaded

    order, prompt = [1, 0, 2, 1], [[3, 4, 5, 6, 7]]
    logits = []
    for by_kernels in (True, False):
        with computing(by_kernels):
            checkpoint = open_checkpoint(path, adapters=adapters)
            model = loaded(checkpoint, dtype="float32", by_kernels=by_kernels)

            def run(rows: list[int]) -> list[list[int]]:
                cache = model.make_cache(32, len(rows))
                cache.adapters[:] = [order[row] for row in rows]
                tokens = np.array(prompt * len(rows), np.int32)
                sampling = SamplingBatch(
                    [resolve({"temperature": 0.0}).options] * len(rows), DEVICE
                )
                drawn, steps = tokens[:, -1:], []
                model.forward(tokens[:, :-1], 0, cache)
                for at in range(3):
                    drawn = model.step(drawn, 4 + at, cache, sampling)
                    steps.append(drawn[:, 0].tolist())
                assert not by_kernels or HAS_GPU or model.runner.ready
                return [list(row) for row in zip(*steps)]

            together = run([0, 1, 2, 3])
            alone = [run([row])[0] for row in range(4)] if by_kernels else []
            logits += [together, alone] if by_kernels else [together]
    return tuple(logits)


@pytest.mark.slow
def test_captured_steps_of_rows_with_different_adapters(call):
    folder = Path(tempfile.mkdtemp())
    base = make_checkpoint(folder / "m", tokenizer=False, max_position_embeddings=512)
    together, alone, plain = call(
        stepped, base, [write_random(base, folder / name, seed) for seed, name in enumerate("ab")]
    )
    assert together == alone == plain
    assert together[0] == together[3] and together[0] != together[1] and together[0] != together[2]
