"""Commands can be interrupted."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def interruptible(ctrl_c):
    """Restore Ctrl-C, here and for child processes: a shell ignores SIGINT in its background
    jobs.
    """
