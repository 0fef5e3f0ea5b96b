"""Rows: claims, copies, takeovers and what is dropped, against a list of what should be known."""

from __future__ import annotations

import os.path
from unittest.mock import Mock

import pytest
from cases.engine import POSITION_NBYTES, ToyBackend, ToyModel
from hypothesis import given, strategies as st

from mlx_llama.core.engine.rows import MIN_COPY, Rows, common_prefix
from mlx_llama.core.errors import ContextError

BLOCK = 256 * POSITION_NBYTES


def make_rows(count=4, budget=None, max_kept=4, drafts=False):
    backend = ToyBackend()
    model = ToyModel(backend)
    cache = model.make_cache(1000, count)
    return Rows(
        model.config,
        cache,
        model.make_cache(100, count) if drafts else None,
        budget,
        max_kept,
        lambda error: False,
    )


def fill(rows, row, tokens):
    """Compute the rest of a row."""
    start = rows.cache.lengths[row]
    rows.cache.model.forward([tokens[start:]], start, rows.cache, rows=[row])


def put(rows, tokens):
    """A row with tokens, kept; returns (row, reused)."""
    row, reused = rows.claim(list(tokens), len(tokens))
    fill(rows, row, tokens)
    rows.keep(row)
    return row, reused


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 5), st.booleans()),
        max_size=25,
    ),
    st.sampled_from([None, 2 * BLOCK, 4 * BLOCK]),
)
def test_any_order_of_claims_and_ends_keeps_the_books(steps, budget):
    rows, running = make_rows(count=5, budget=budget, max_kept=3), []
    for family, length, variant, ends in steps:
        text = ([family] * 40 + [variant] * 40)[: length + 10]
        known = {
            row: tuple(tokens[: rows.cache.lengths[row]])
            for row, tokens in [*rows.kept.items(), *rows.used.items()]
        }
        claimed = rows.claim(text, len(text)) if len(running) < 2 else None
        if claimed:
            row, reused = claimed
            best = max(
                (
                    next(
                        (i for i, (a, b) in enumerate(zip(tokens, text)) if a != b),
                        min(len(tokens), len(text)),
                    )
                    for tokens in known.values()
                ),
                default=0,
            )
            best = min(best, len(text) - 1)
            assert reused == best or (reused == 0 and best < MIN_COPY) or budget
            assert rows.cache.tokens[row][:reused].tolist() == text[:reused]
            assert rows.cache.lengths[row] == reused
            assert rows.cache.allocated[row] >= len(text)
            fill(rows, row, text)
            running.append(row)
        if running and (ends or not claimed):
            rows.keep(running.pop(0))
        assert len(rows.kept) <= 3
        assert sorted([*rows.free, *rows.used, *rows.kept]) == list(range(5))
        assert budget is None or rows.nbytes <= budget
        for row, tokens in rows.kept.items():
            assert rows.cache.tokens[row][: rows.cache.lengths[row]].tolist() == tokens
        assert all(rows.cache.allocated[row] == 0 for row in rows.free)


def test_a_short_prefix_is_not_copied_and_the_last_token_is_always_computed():
    rows = make_rows()
    put(rows, [1] * 20)
    assert rows.claim([1] * (MIN_COPY - 1) + [2], 9)[1] == 0
    assert rows.claim([1] * MIN_COPY + [2], 9)[1] == MIN_COPY
    assert rows.claim([1] * 15, 15)[1] == 14


def test_a_copy_that_memory_refuses_is_computed(monkeypatch):
    rows = make_rows()
    put(rows, [1] * 20)
    refuse = Mock(side_effect=ContextError("no memory"))
    monkeypatch.setattr(rows.cache, "copy_prefix", refuse)
    row, reused = rows.claim([1] * 15 + [2], 16)
    assert reused == rows.cache.lengths[row] == 0


def test_bytes_of_the_draft_models_rows_count():
    rows = make_rows(drafts=True, budget=3 * BLOCK)
    assert rows.nbytes_for(200) == BLOCK + 100 * POSITION_NBYTES  # the draft model holds 100
    rows.claim([1] * 50, 200)
    rows.drafts.reserve({0: 50, 1: 50, 2: 50, 3: 50})
    assert rows.nbytes == BLOCK + 400 * POSITION_NBYTES
    assert rows.claim([2] * 50, 200) is None or rows.nbytes <= rows.budget


def test_reserving_drops_prefixes_and_nothing_else():
    rows = make_rows(budget=3 * BLOCK)
    running, _ = rows.claim([9] * 250, 250)
    fill(rows, running, [9] * 250)
    put(rows, [1] * 20)
    put(rows, [2] * 20)
    assert rows.reserve({running: 256}) and len(rows.kept) == 2
    assert rows.reserve({running: 257}) and [tokens[0] for tokens in rows.kept.values()] == [2]
    assert rows.reserve({running: 600}) and not rows.kept
    assert not rows.reserve({running: 900}) and rows.cache.lengths[running] == 250


def test_a_saved_row_needs_room():
    rows = make_rows(budget=2 * BLOCK, count=2)
    rows.claim([1] * 300, 300)
    with pytest.raises(ContextError, match="raise `cache_memory`"):
        rows.install({"tokens": [2] * 100})
    assert not rows.kept


TOKENS = st.lists(st.integers(0, 2), max_size=8)


@given(TOKENS, TOKENS, st.sampled_from([0, 55, 63, 64, 128, 400]))
def test_the_length_is_that_of_the_common_prefix(first, other, count):
    first, other = [7] * count + first, [7] * count + other
    assert common_prefix(first, other) == len(os.path.commonprefix([first, other]))
