"""Batch invariance is proven where it holds, and each way of breaking it is found."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cases.batches import Counting
from rows_toy import ToyBackend, ToyCache, ToyModel

from mlx_llama.parity import batches
from mlx_llama.parity.batches import STARTS, BatchResult, compare_batches, make_prompts

TOKENS = list(range(3, 43))
PROMPTS = make_prompts(TOKENS, 32, 256)


def run(model, promise="bits", sizes=(2, 3, 8)) -> dict[tuple[int, str], BatchResult]:
    return {
        (result.rows, result.start): result
        for result in compare_batches(ToyBackend(), model, PROMPTS, promise, 1e-4, sizes)
    }


def test_prompts_differ_and_begin_alike():
    assert len(PROMPTS) == len(set(map(tuple, PROMPTS))) == 32
    assert {tuple(prompt[:20]) for prompt in PROMPTS} == {tuple(TOKENS[:20])}
    assert len({len(prompt) for prompt in PROMPTS}) > 10
    assert all(len(prompt) + batches.STEPS + 1 <= 30 for prompt in make_prompts(TOKENS, 32, 30))
    assert all(set(prompt) <= {7, 8} for prompt in make_prompts([7, 8], 5, 256))


def test_rows_that_do_not_depend_on_others_keep_every_promise():
    model = ToyModel()
    results = run(model, sizes=batches.SIZES)
    assert list(results) == [(rows, start) for rows in (2, 3, 8, 32) for start in STARTS]
    for result in results.values():
        assert result.is_kept and result.relative == 0
        assert result.same_bits == result.same_tokens == result.rows
    # Batches were run: steps of every size, rows of different lengths in one, and rows that joined
    # others at work.
    sizes = {shape[0] for shape, _, _ in model.calls if shape[1] == 1}
    assert set(range(1, 33)) >= sizes >= {1, 2, 3, 8, 16, 24, 32}
    assert any(len(set(starts)) > 2 for shape, starts, _ in model.calls if shape == (8, 1))
    assert any(rows[:2] == [7, 6] for _, _, rows in model.calls)
    counts = {shape[1] for shape, _, _ in model.calls if shape[0] == 1}
    assert counts >= {batches.CHUNK, max(map(len, PROMPTS))}


class Crowded(ToyModel):
    """Computes other tokens in a batch of eight."""

    def mix(self, ids, batch, count):
        return np.random.default_rng([*ids, batch >= 8])


class Chunked(ToyModel):
    """Keys and values depend on the size of a prompt's chunk, by their last bits."""

    def forward(self, tokens, index_pos, cache, *, rows=None, **named):
        logits = super().forward(tokens, index_pos, cache, rows=rows, **named)
        if np.shape(tokens)[1] == batches.CHUNK:
            last = cache.keys[rows[0]][cache.lengths[rows[0]] - 1]
            last[...] = np.nextafter(last, np.float32(9))
        return logits


class Leaking(ToyCache):
    """copy_prefix mixes up two positions."""

    def copy_prefix(self, source, target, length):
        super().copy_prefix(source, target, length)
        self.keys[target][:2] = self.keys[target][1::-1].copy()


def test_another_bit_is_found_and_allowed_where_only_tokens_are_promised():
    bits, tokens = (run(Counting(), promise) for promise in ("bits", "tokens"))
    for (rows, start), result in bits.items():
        assert result.same_tokens == rows
        assert result.is_kept == (rows != 3) == (result.same_bits == rows)
        assert (0 < result.relative < 1e-6) == (rows == 3)
    assert all(result.is_kept for result in tokens.values())


def test_other_tokens_are_found():
    for promise in ("bits", "tokens"):
        results = run(Crowded(), promise)
        broken = {key for key, result in results.items() if not result.is_kept}
        assert broken == {(8, start) for start in STARTS}
        assert all(result.same_tokens < 8 for (rows, _), result in results.items() if rows == 8)
    # Without that promise the numbers must be near all the same, and these are not.
    assert not run(Crowded(), "tolerance")[8, "at once"].is_kept


def test_chunks_that_show_are_found():
    results = run(Chunked())
    assert not any(result.is_kept for result in results.values())
    assert all(result.same_bits < result.rows for result in results.values())
    assert all(result.is_kept for result in run(Chunked(), "tokens").values())


def test_a_wrong_copy_is_found_where_a_prefix_was_copied(monkeypatch):
    make = lambda self, capacity, rows=1: Leaking(capacity, rows)  # noqa: E731
    monkeypatch.setattr(ToyModel, "make_cache", make)
    for promise in ("bits", "tokens", "tolerance"):
        results = run(ToyModel(), promise)
        broken = {start for (_, start), result in results.items() if not result.is_kept}
        assert broken == {"from a prefix"}


def test_the_promise_of_a_model():
    kernels = SimpleNamespace(is_batch_invariant=True)
    others = SimpleNamespace(is_batch_invariant=False)
    assert {batches.promise_of(kernels, dtype) for dtype in ("float32", "bfloat16")} == {"bits"}
    for dtype, promise in (
        ("float32", "tokens"),
        ("bfloat16", "tolerance"),
        ("float16", "tolerance"),
    ):
        assert batches.promise_of(others, dtype) == promise


@pytest.mark.parametrize(
    "promise, same_tokens, same_bits, relative, is_kept",
    [
        ("bits", 8, 8, 0.0, True),
        ("bits", 8, 7, 0.0, False),
        ("tokens", 8, 0, 9e-5, True),
        ("tokens", 8, 0, 2e-4, False),
        ("tokens", 7, 7, 0.0, False),
        ("tolerance", 0, 0, 9e-5, True),
        ("tolerance", 8, 8, 2e-4, False),
    ],
)
def test_promises(promise, same_tokens, same_bits, relative, is_kept):
    result = BatchResult(8, "at once", same_tokens, same_bits, relative, promise, 1e-4)
    assert result.is_kept is is_kept
