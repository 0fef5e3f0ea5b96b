"""Progress, from any thread to one display."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from mlx_llama.core.system import progress


def test_every_part_is_reported_once_whatever_the_thread():
    seen, alone = [], threading.Lock()

    def report(done, total):
        assert alone.acquire(blocking=False)  # one call at a time
        seen.append((done, total))
        alone.release()

    sizes = list(range(1, 201))
    with progress.reported(report):
        advance = progress.meter(sum(sizes))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(advance, sizes))
    done = [count for count, _ in seen]
    assert done == sorted(done) and done[-1] == sum(sizes) and len(set(done)) == len(sizes)
    assert {total for _, total in seen} == {sum(sizes)}


def test_without_a_display_nothing_is_reported():
    seen = []
    with contextlib.suppress(KeyError), progress.reported(lambda *args: seen.append(args)):
        raise KeyError
    progress.meter(10)(10)
    assert seen == []


def test_two_pieces_of_work_count_apart():
    seen = []
    with progress.reported(lambda *args: seen.append(args)):
        first, second = progress.meter(10), progress.meter(20)
        first(3), second(5), first(7)
    assert seen == [(3, 10), (5, 20), (10, 10)]


def test_a_display_is_not_seen_by_other_threads():
    """Work that another thread starts has its own display, or none."""
    seen = []
    with progress.reported(lambda *args: seen.append(args)), ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: progress.meter(1)(1)).result()
    assert seen == []


# Displays of calls from Python


class Screen:
    """A stream that may be a terminal."""

    def __init__(self, is_terminal):
        self.isatty = lambda: is_terminal


def test_bars_need_a_terminal_that_moves_its_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert progress.moves_cursor(Screen(True)) and not progress.moves_cursor(Screen(False))
    assert not progress.moves_cursor(None)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert not progress.moves_cursor(Screen(True))
    monkeypatch.delenv("JPY_PARENT_PID")
    monkeypatch.setenv("TERM", "dumb")
    assert not progress.moves_cursor(Screen(True))


def test_outside_of_a_notebook_a_load_shows_nothing(capfd):
    assert not progress.in_notebook()
    with progress.show_bytes("loading", patience=0):
        progress.meter(3)(3)
    assert capfd.readouterr() == ("", "")
