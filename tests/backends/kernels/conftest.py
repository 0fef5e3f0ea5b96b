from __future__ import annotations

import pytest

from cpu_fallback.kernels.target import Target, available, build_target


@pytest.fixture(scope="session", params=available())
def target(request) -> Target:
    """Each target that this machine can execute."""
    return build_target(request.param)
