"""Chunks of prompts by the measured pace: a tick takes about four steps' time, whatever the
machine.
"""

import pytest
from cases.engine import alone, make, serve

from mlx_llama.core.engine.scheduler import STEPS, TILE, Chunks


@pytest.mark.parametrize("step, token", [(0.1, 0.004), (0.02, 0.0001), (0.3, 0.02), (0.001, 0.01)])
def test_a_tick_takes_as_long_as_a_few_steps(step, token):
    """Each machine's ticks: a step, and `token` seconds for each token of a prompt."""
    chunks = Chunks(512)
    assert chunks.choose() == TILE  # nothing is known
    chunks.note(100 * token, 100, is_stepping=False)
    for _ in range(30):
        chunks.note(step, 0, is_stepping=True)
        size = chunks.choose()
        chunks.note(step + size * token, size, is_stepping=True)
    assert size % TILE == 0 and TILE <= size <= 512
    assert size == TILE or step + size * token <= STEPS * step * 1.01
    assert size == 512 or step + (size + TILE) * token > STEPS * step * 0.99


def test_only_models_whose_bits_do_not_depend_on_chunks_are_paced(monkeypatch):
    prompts, sizes = [[5] * 20, [7] * 300], {}
    monkeypatch.setattr(Chunks, "choose", lambda self: 64)
    for is_invariant in (False, True):
        backend, loop = make()
        loop.engine.model.is_batch_invariant = is_invariant
        first, second = serve(loop, prompts, max_tokens=40)
        assert second.finish().tokens == alone(prompts[1], max_tokens=40).tokens
        assert first.finish().tokens == alone(prompts[0], max_tokens=40).tokens
        sizes[is_invariant] = [count for _, count in backend.calls if count > 1]
    assert sizes == {False: [20, 300], True: [20, 64, 64, 64, 64, 44]}
