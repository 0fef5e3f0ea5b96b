"""Features and numbers that the backends' samplers share."""

from __future__ import annotations

import math

import pytest

from mlx_llama.core import options
from mlx_llama.core.generation.sampling import BatchOptions, Kind, RowNumbers, round_up

FILTERS = dict(top_k=5, top_p=0.5, min_p=0.1)


def resolve(**chosen):
    return options.resolve(chosen).options


def test_a_greedy_row_has_neutral_numbers_whatever_its_filters():
    greedy = RowNumbers.of(resolve(temperature=0, **FILTERS))
    assert (greedy.is_random, greedy.temperature, greedy.top_k) == (False, 1, 0)
    assert (greedy.top_p, greedy.min_p) == (math.inf, -math.inf)
    drawn = RowNumbers.of(resolve(temperature=0.5, **FILTERS))
    assert (drawn.is_random, drawn.temperature, drawn.top_k, drawn.top_p) == (True, 0.5, 5, 0.5)
    assert math.exp(drawn.min_p) == pytest.approx(0.1)


def test_a_seed_has_64_bits():
    assert RowNumbers.of(resolve(seed=(7 << 32) + 5)).seed == (5, 7)


def test_the_kind_is_that_of_the_largest_row_rounded_up():
    rows = [
        resolve(),
        resolve(temperature=1, top_k=5),
        resolve(presence_penalty=1, repetition_context_size=20, logit_bias={1: 1, 2: 1, 3: 1}),
        resolve(temperature=0, min_p=0.1, logprobs=2),
        resolve(logprobs=3),
    ]
    assert Kind.of(rows) == Kind(True, 8, False, False, 32, 4, 3)
    assert Kind.of([resolve(repetition_context_size=50)]) == Kind()  # no penalty looks at them
    assert [round_up(count) for count in (0, 1, 2, 3, 4, 5, 1023)] == [0, 1, 2, 4, 4, 8, 1024]


@pytest.mark.parametrize(
    "chosen",
    [
        dict(temperature=1, top_k=3),
        dict(presence_penalty=1),
        dict(logit_bias={1: 1.0}),
        dict(logprobs=0),
    ],
)
def test_only_greedy_and_plainly_sampled_rows_need_the_best_score_alone(chosen):
    assert Kind.of([resolve(), resolve(temperature=1)]).needs_best
    assert not Kind.of([resolve(**chosen)]).needs_best and not Kind(has_masks=True).needs_best


def test_a_repeated_batch_is_kept():
    batch = BatchOptions([resolve(presence_penalty=1)], "device")
    three = batch.repeat(3)
    assert three.options == batch.options * 3 and three.device == "device"
    assert three.window == batch.window
    assert batch.repeat(3) is three and len(batch.repeat(2).options) == 2
