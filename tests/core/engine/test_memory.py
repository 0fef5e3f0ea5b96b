"""Memory of keys and values; what short memory does to requests is in test_scheduler.py."""

from __future__ import annotations

from mlx_llama.core.engine.memory import default_budget


def test_a_tenth_or_256_mib_stay_free():
    assert default_budget(10 << 30) == 9 << 30
    assert default_budget(1 << 30) == (1 << 30) - (256 << 20)
    assert default_budget(256 << 20) == default_budget(1000) == default_budget(-5) == 0
