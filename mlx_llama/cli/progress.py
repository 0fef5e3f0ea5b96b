"""A progress bar on a terminal's stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from mlx_llama.core.system import progress


class Bar:
    """A progress bar for the work in its block (core.system.progress), on a terminal's stderr.

    Appears after `patience` seconds and disappears when the work is done.
    """

    def __init__(self, label: str, patience: float = 1.0):
        self.label = label
        self.patience = patience

    def __enter__(self) -> Bar:
        self._stack = ExitStack()
        self._show: Callable[[int], Any] | None = None
        self._due = time.monotonic() + self.patience
        if progress.moves_cursor(sys.stderr):
            self._stack.enter_context(progress.reported(self._report))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _report(self, done: int, total: int) -> None:
        if time.monotonic() < self._due:
            return
        if self._show is None:
            self._show = self._open(total)
        self._show(done)
        self._due = time.monotonic() + 0.1

    def _open(self, total: int) -> Callable[[int], Any]:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        shown = self._stack.enter_context(
            Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False)
        )
        task = shown.add_task(self.label, total=total)
        return lambda done: shown.update(task, completed=done, refresh=True)
