"""A progress bar on a terminal's stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mlx_llama.core.system import progress


@contextmanager
def Bar(label: str, patience: float = 1.0) -> Iterator[None]:
    """Show the progress of the work in the block (core.system.progress), after `patience` seconds,
    on a terminal's stderr. Disappears when the work is done.
    """
    due, show = time.monotonic() + patience, None
    with ExitStack() as stack:

        def report(done: int, total: int) -> None:
            nonlocal due, show
            if time.monotonic() >= due:
                if show is None:
                    from rich.progress import DownloadColumn

                    show = stack.enter_context(progress.draw(label, total, DownloadColumn(), False))
                show(done)
                due = time.monotonic() + 0.1

        if progress.moves_cursor(sys.stderr):
            stack.enter_context(progress.reported(report))
        yield
