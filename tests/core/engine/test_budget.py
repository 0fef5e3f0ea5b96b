"""The default budget leaves a reserve."""

from __future__ import annotations

from mlx_llama.core.engine.budget import default_budget


def test_a_tenth_or_256_mib_stay_free():
    assert default_budget(10 << 30) == 9 << 30
    assert default_budget(1 << 30) == (1 << 30) - (256 << 20)
    assert default_budget(256 << 20) == default_budget(1000) == default_budget(-5) == 0
