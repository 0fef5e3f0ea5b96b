from __future__ import annotations

import pytest

from cpu_fallback.kernels.target import Target, available, target as target_by_name


@pytest.fixture(scope="session", params=available())
def target(request) -> Target:
    """Every instruction set that this machine can execute."""
    return target_by_name(request.param)
