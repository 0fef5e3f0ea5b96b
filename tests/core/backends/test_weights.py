"""The rules of weights.py, apart from any backend."""

import itertools

import pytest

from mlx_llama.core.backends.weights import check_memory, group_runs
from mlx_llama.core.errors import OutOfMemoryError


def test_weights_that_do_not_fit_are_refused_with_the_numbers():
    check_memory(10, lambda: 10, "a card")
    check_memory(10**15, lambda: None, "a card")
    with pytest.raises(
        OutOfMemoryError, match="the weights take 3.00 GB, and a card has 2.00 GB free"
    ):
        check_memory(3 * 10**9, lambda: 2 * 10**9, "a card")


def test_a_dropped_model_is_collected_before_it_counts():
    answers = iter([5, 20])
    check_memory(10, lambda: next(answers), "a card")
    assert next(answers, None) is None  # asked twice


@pytest.mark.parametrize("items", ["", "a", "aab", "abba", "aAbBBa"])
def test_runs_are_those_of_itertools(items):
    same = lambda first, other: first.lower() == other.lower()  # noqa: E731
    assert group_runs(items, same) == [list(run) for _, run in itertools.groupby(items, str.lower)]
