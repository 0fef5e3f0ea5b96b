"""Calls on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def on_threads(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Call `call(i)` on as many threads; returns results and exceptions."""
    results: list[Any] = [None] * count

    def run(i: int) -> None:
        try:
            results[i] = call(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
