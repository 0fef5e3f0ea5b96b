"""The host's side of a cache: rooms, masks and refusals. The backends' caches are
tests/backends/test_cache.py's.
"""

import numpy as np
import pytest
from making import config_fields

from mlx_llama.core.backends.positions import (
    GROWTH,
    CallView,
    Positions,
    Span,
    checked_tokens,
    position_nbytes,
)
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Window

CONFIG = LlamaConfig.from_dict(config_fields())


class Cache(Positions):
    """Storage that only counts."""

    def __init__(self, capacity: int = 1000, rows: int = 1, free: int | None = None):
        super().__init__(CONFIG, capacity, rows=rows)
        self.position_nbytes = 4
        self.free, self.grown = free, []

    def free_memory(self):
        return self.free

    def _grow(self, ends) -> None:
        self.grown.append(dict(ends))
        for row, end in ends.items():
            self.allocated[row] = self.storage_for(end)


def test_a_view_commits_on_success_alone():
    cache = Cache()
    with CallView(cache, 1, 7, 0) as view:
        assert view.spans == (Span(0, 0, 7),)
        assert view.count == 7 and view.batch == 1 and cache.length == 0
    assert cache.length == 7 and cache.allocated == [GROWTH]
    with pytest.raises(KeyboardInterrupt), CallView(cache, 1, 3, 7):
        raise KeyboardInterrupt
    assert cache.lengths == [7]
    for index_pos, count, message in (
        (6, 1, "index_pos is 6 but the cache holds 7"),
        (7, 0, "at least one token"),
        (7, 994, "1001 positions do not fit the cache's capacity of 1000"),
    ):
        with pytest.raises(ContextError, match=message):
            CallView(cache, 1, count, index_pos)
    assert cache.length == 7


def test_a_view_of_rows_commits_all_or_none():
    cache = Cache(1000, 4)
    with CallView(cache, 2, 5, 0, [3, 1]):
        pass
    with CallView(cache, 3, 2, [5, 0, 5], rows=[1, 0, 3]) as view:
        assert [(span.row, span.start, span.end) for span in view.spans] == [
            (1, 5, 7),
            (0, 0, 2),
            (3, 5, 7),
        ]
    assert cache.lengths == [2, 7, 0, 7] and cache.length == 2
    for batch, index_pos, rows, message in (
        (2, [7, 6], [1, 3], "index_pos is 6 but row 3 holds 7"),
        (2, 7, [3, 3], "a row occurs twice"),
        (1, 0, [4], "row 4 does not exist: the cache has 4"),
        (1, 0, [-1], "row -1 does not exist"),
        (2, 7, [3], "needs 2 rows, not 1"),
        (2, [7], [1, 3], "2 sequences need 2 positions"),
    ):
        with pytest.raises(ContextError, match=message):
            CallView(cache, batch, 1, index_pos, rows)
    assert cache.lengths == [2, 7, 0, 7] and cache.allocated == [GROWTH, GROWTH, 0, GROWTH]


def test_rows_grow_together_and_only_if_memory_allows():
    cache = Cache(10**6, 3, free=4 * 300_000)
    cache.reserve({0: 10, 2: 300})
    cache.reserve({0: GROWTH, 2: 2 * GROWTH})
    assert cache.grown == [{0: 10, 2: 300}] and cache.allocated == [GROWTH, 0, 2 * GROWTH]
    with pytest.raises(ContextError, match=r"keys and values of \d+ positions take 0.00 GB"):
        cache.reserve({0: 150_000, 1: 170_000})
    assert cache.allocated == [GROWTH, 0, 2 * GROWTH]
    cache.reserve({0: 150_000})
    assert cache.nbytes_for(0) == 0 and cache.nbytes_for(1) == 4 * GROWTH


def test_rows_refuse_what_does_not_fit_them():
    cache = Cache(10, 2)
    cache.lengths = [4, 0]
    for call, message in (
        (lambda: cache.check_trim(5, 0), "cannot trim to 5 positions"),
        (lambda: cache.check_trim(0, 2), "row 2 does not exist"),
        (lambda: cache.check_copy(0, 1, 5), "cannot trim to 5"),
        (lambda: cache.check_copy(1, 0, 0), "row 0 is not empty"),
        (lambda: cache.check_copy(1, 1, 0), "row 1 is not empty"),
        (lambda: Cache(0), "at least 1"),
        (lambda: Cache(10, 0), "0 rows"),
    ):
        with pytest.raises(ContextError, match=message):
            call()
    shape = (CONFIG.num_hidden_layers, CONFIG.num_key_value_heads, 3, CONFIG.head_dim)
    state = {"tokens": np.zeros(3, np.int32), "keys": np.zeros(shape), "values": np.zeros(shape)}
    cache.check_state(state, 1)
    with pytest.raises(ContextError, match="saved by another model"):
        cache.check_state(state | {"values": np.zeros((1, *shape))}, 1)
    with pytest.raises(ContextError, match="at most 2"):
        Cache(2).check_state(state, 0)


@pytest.mark.parametrize("window", [None, 1, 3, 100, "chunks of 3"])
@pytest.mark.parametrize("index_pos, count", [(0, 5), (4, 3), (9, 1)])
def test_masks_are_those_of_transformers(index_pos, count, window):
    torch = pytest.importorskip("torch")
    from transformers import masking_utils

    span = Span(0, index_pos, count)
    judge = masking_utils.causal_mask_function
    if window == "chunks of 3":
        judge = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.int64))
        window = Window(3, is_chunk=True)
    elif window:
        judge = masking_utils.sliding_window_causal_mask_function(window)
        window = Window(window)
    wanted = np.array(
        [
            [bool(judge(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(span.end)]
            for q in range(index_pos, span.end)
        ]
    )
    first, mask = span.first_visible(window), span.visible(window)
    assert not wanted[:, :first].any()
    np.testing.assert_array_equal(
        np.ones((1, span.end - first), bool) if mask is None else mask, wanted[:, first:]
    )


def test_bytes_of_a_position():
    heads = 2 * 2 * 2  # keys and values, layers, key-value heads
    assert position_nbytes(CONFIG, 2) == heads * 16 * 2  # head_dim, bytes
    assert position_nbytes(CONFIG, 2, 8) == heads * (16 + 2)  # codes, one scale


def test_tokens_of_the_host_are_checked():
    assert checked_tokens([[1, 2]], 10).dtype == np.int32
    device = object()
    assert checked_tokens(device, 10) is device
    for tokens, message in (
        ([[]], "must be integers"),
        ([[1], [2, 3]], "same length"),
        ([[10]], "token id 10 is outside"),
        ([[-1]], "token id -1"),
        ([1, 2], "of shape"),
        ([[True]], "must be integers"),
    ):
        with pytest.raises(ContextError, match=message):
            checked_tokens(tokens, 10)
