"""Every way of filling a cache gives the rows of one call, and a cache that forgets is found."""

from __future__ import annotations

import pytest

from mlx_llama.parity.batches import compare_ways

TOKENS = [1, *range(300, 340)]


@pytest.mark.slow_for("cuda")
@pytest.mark.parametrize("count", [8, 41])
def test_every_way_is_within(count, backend, open_llm):
    ways = list(compare_ways(open_llm(backend), TOKENS[:count], 1e-5))
    assert len({way.way for way in ways}) == len(ways) == 7
    assert all(way.within for way in ways), ways


def test_the_compiled_cpu_path_gives_the_same_bits(open_llm):
    llm = open_llm()
    if "threads" not in " ".join(llm.model.notices):
        pytest.skip("there are no compiled kernels here")
    assert all(way.same_bits for way in compare_ways(llm, TOKENS, 1e-5))


STALE = {"trim": "after trim", "restore": "after save and load"}


@pytest.mark.slow_for("cuda")
@pytest.mark.parametrize("what", STALE)
def test_a_cache_that_forgets_is_found(what, backend, open_llm, monkeypatch):
    """A row that trim or restore leaves wrong shows in the way that needs it, and not in those that
    do not.
    """
    cache = backend.model.Cache
    original, restore = getattr(cache, what), cache.restore

    def wrong(self, saved, row=0):
        result = original(self, saved, row)
        if self.lengths[row] > 3:
            state = {name: array.copy() for name, array in self.state(row).items()}
            state["keys"][0][:, 2] = state["keys"][0][:, 1]  # [layers, G, n, D]
            restore(self, state, row)
        return result

    monkeypatch.setattr(cache, what, wrong)
    ways = {way.way: way.within for way in compare_ways(open_llm(backend), TOKENS, 1e-4)}
    assert not ways[STALE[what]] and ways["in chunks of 8"] and ways["token by token"]
