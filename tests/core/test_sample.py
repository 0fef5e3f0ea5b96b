"""Options of rows as sampling reads them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_llama.core import options
from mlx_llama.core.sample import SamplingBatch, SamplingFeatures, arrange, round_up

FILTERS = dict(top_k=5, top_p=0.5, min_p=0.1)


def resolve(**chosen):
    return options.resolve(chosen).options


def test_a_greedy_row_has_neutral_numbers_whatever_its_filters():
    rows = [resolve(temperature=0, **FILTERS), resolve(temperature=0.5, **FILTERS)]
    numbers = {name: x.tolist() for name, x in arrange(SamplingFeatures.of(rows), rows).items()}
    assert numbers["is_random"] == [[0], [1]] and numbers["temperature"] == [[1], [0.5]]
    assert numbers["top_k"] == [[0], [5]] and numbers["top_p"] == [[math.inf], [0.5]]
    (greedy,), (drawn,) = numbers["min_p"]
    assert greedy == -math.inf and math.exp(drawn) == pytest.approx(0.1)


def test_a_seed_has_64_bits():
    rows = [resolve(temperature=1, seed=(7 << 32) + 5)]
    numbers = arrange(SamplingFeatures.of(rows), rows)
    assert (numbers["seed_low"], numbers["seed_high"]) == (5, 7)


def test_biases_are_padded_with_what_changes_no_score():
    rows = [resolve(logit_bias={3: 1.5, 4: -2, 5: 0.5}), resolve(logit_bias={7: 4}), resolve()]
    numbers = arrange(SamplingFeatures.of(rows), rows)
    assert numbers["bias_ids"].tolist() == [[3, 4, 5, 0], [7, 0, 0, 0], [0] * 4]
    assert numbers["bias"].tolist() == [[1.5, -2, 0.5, 0], [4, 0, 0, 0], [0] * 4]
    assert np.signbit(numbers["bias"])[1:, 1:].all()  # -0: adding 0 would change a score of -0


def test_features_are_those_of_the_largest_row_rounded_up():
    rows = [
        resolve(),
        resolve(temperature=1, top_k=5),
        resolve(presence_penalty=1, repetition_context_size=20, logit_bias={1: 1, 2: 1, 3: 1}),
        resolve(temperature=0, min_p=0.1, logprobs=2),
        resolve(logprobs=3),
    ]
    assert SamplingFeatures.of(rows) == SamplingFeatures(True, 8, False, False, 32, 4, 3)
    no_penalty = resolve(repetition_context_size=50)
    assert SamplingFeatures.of([no_penalty]) == SamplingFeatures()
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
    assert SamplingFeatures.of([resolve(), resolve(temperature=1)]).needs_best
    assert (
        not SamplingFeatures.of([resolve(**chosen)]).needs_best
        and not SamplingFeatures(has_masks=True).needs_best
    )


def test_a_repeated_batch_is_kept():
    batch = SamplingBatch([resolve(presence_penalty=1)], "device")
    three = batch.repeat(3)
    assert three.options == batch.options * 3 and three.device == "device"
    assert three.window == batch.window
    assert batch.repeat(3) is three and len(batch.repeat(2).options) == 2
