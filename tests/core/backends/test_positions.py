"""The host's side of a cache: rooms, masks and refusals. The backends' caches are tests/backends/test_cache.py's."""

import numpy as np
import pytest
from making import config_fields

from mlx_llama.core.backends.positions import GROWTH, CallView, Positions, checked_tokens, position_nbytes
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig

CONFIG = LlamaConfig.from_dict(config_fields())


class Cache(Positions):
    """Storage that only counts."""

    tokens = None

    def __init__(self, capacity: int = 1000):
        super().__init__(CONFIG, capacity, 4)
        self.allocated = 0

    def free_memory(self):
        return None

    def _grow(self, batch: int, allocated: int) -> None:
        self.allocated = allocated


def test_a_view_commits_on_success_alone():
    cache = Cache()
    with CallView(cache, 1, 7, 0) as view:
        assert (view.count, view.index_pos, view.end, cache.length) == (7, 0, 7, 0)
    assert cache.length == 7 and cache.allocated == GROWTH
    with pytest.raises(KeyboardInterrupt):
        with CallView(cache, 1, 3, 7):
            raise KeyboardInterrupt
    assert cache.length == 7
    for index_pos, count, message in ((6, 1, "index_pos is 6 but the cache holds 7"), (7, 0, "at least one token"),
                                      (7, 994, "1001 positions do not fit the cache's capacity of 1000")):
        with pytest.raises(ContextError, match=message):
            CallView(cache, 1, count, index_pos)
    assert cache.length == 7


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("index_pos, count", [(0, 5), (4, 3), (9, 1)])
def test_masks_are_those_of_transformers(index_pos, count, window):
    torch = pytest.importorskip("torch")
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    cache = Cache()
    cache.length = index_pos
    view = CallView(cache, 1, count, index_pos)
    judge = sliding_window_causal_mask_function(window) if window else causal_mask_function
    wanted = np.array([[bool(judge(0, 0, torch.tensor(q), torch.tensor(k))) for k in range(view.end)]
                       for q in range(index_pos, view.end)])
    first, mask = view.first_visible(window), view.visible(window)
    assert not wanted[:, :first].any()
    np.testing.assert_array_equal(np.ones((1, view.end - first), bool) if mask is None else mask, wanted[:, first:])


def test_bytes_of_a_position():
    assert position_nbytes(CONFIG, 2) == 2 * 2 * 2 * 16 * 2  # keys and values, layers, key-value heads, head_dim, bytes


def test_tokens_of_the_host_are_checked():
    assert checked_tokens([[1, 2]], 10).dtype == np.int32
    device = object()
    assert checked_tokens(device, 10) is device
    for tokens, message in (([[]], "must be integers"), ([[1], [2, 3]], "same length"), ([[10]], "token id 10 is outside"),
                            ([[-1]], "token id -1"), ([1, 2], "of shape"), ([[True]], "must be integers")):
        with pytest.raises(ContextError, match=message):
            checked_tokens(tokens, 10)
