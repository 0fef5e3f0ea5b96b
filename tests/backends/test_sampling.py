"""Sampling on every backend: filters of transformers, penalties of mlx-lm, the exact noise of
core.rng.
"""

from __future__ import annotations

import math
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mlx_llama.core import rng
from mlx_llama.core.backends.logprobs import unpack
from mlx_llama.core.backends.selection import select
from mlx_llama.core.options import resolve
from mlx_llama.core.sample import process as process_scores

V = 1000


@pytest.fixture(scope="module")
def arrays(backend):
    """Convert NumPy arrays to this backend's; None stays."""
    if backend.name == "cpu":
        return lambda array: array
    if backend.name == "mlx":
        convert = pytest.importorskip("mlx.core").array
    else:
        convert = lambda array: torch.from_numpy(np.array(array)).to(backend.device)  # noqa: E731
    return lambda array: None if array is None else convert(array)


@pytest.fixture(scope="module")
def sampler(backend):
    """Sampling for rows, a dict of options each."""
    return lambda *rows: backend.sampling_batch(
        [resolve({"seed": 1, **options}).options for options in rows]
    )


@pytest.fixture(scope="module")
def draw(sampler, arrays, backend):
    """draw(rows, scores [B, V], positions, recent [B, n], masks): what `sampler` draws, as NumPy's
    array.
    """

    def run(rows, scores, positions, recent=None, masks=None):
        batch = sampler(*rows)
        recent = recent[:, -batch.window :] if batch.window else None
        return backend.runtime.to_numpy(batch(arrays(scores), positions, arrays(recent), masks))

    return run


@pytest.fixture(scope="module")
def process(sampler, arrays, backend):
    """process(rows, scores [B, V], recent [B, n]): the processed scores, as NumPy's array."""

    def run(rows, scores, recent=None):
        batch = sampler(*rows)
        recent = recent[:, -batch.window :] if batch.window else None
        given = arrays(scores), arrays(recent), batch.arrange()
        return backend.runtime.to_numpy(process_scores(batch.words, batch.features, *given))

    return run


def logits(seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(V)).astype(np.float32)


FILTERS = [
    dict(temperature=0.7),
    dict(top_k=5),
    dict(top_k=1),
    dict(top_k=V + 5),
    dict(top_p=0.9),
    dict(top_p=0.01),
    dict(min_p=0.05),
    dict(min_p=1.0),
    dict(temperature=1.7, top_k=50, top_p=0.8, min_p=0.02),
    dict(temperature=0.3, top_k=3, top_p=0.5),
]


def filter_as_transformers(raw: np.ndarray, options: dict) -> np.ndarray:
    """transformers' scores, float32 [V]: -inf where its filters drop a token."""
    o = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    judges = LogitsProcessorList([TemperatureLogitsWarper(o["temperature"])])
    judges += [TopKLogitsWarper(o["top_k"])] if o["top_k"] else []
    judges += [TopPLogitsWarper(o["top_p"])] if o["top_p"] < 1 else []
    judges += [MinPLogitsWarper(o["min_p"])] if o["min_p"] else []
    return judges(None, torch.from_numpy(raw)[None])[0].numpy()


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_filters_are_those_of_transformers(options, seed, process):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    wanted = filter_as_transformers(logits(seed), options)
    got = process([options], logits(seed)[None])[0]
    assert (np.isneginf(got) == np.isneginf(wanted)).all()
    kept = np.isfinite(wanted)
    np.testing.assert_allclose(got[kept], wanted[kept], rtol=1e-6)


def test_penalties_and_bias_are_those_of_mlx_lm(process, sampler):
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.sample_utils import make_logits_processors

    history = np.array([5, 7, 7, 900, 3, 3, 3, 0], np.int32)
    options = dict(logit_bias={0: 2.5, 999: -4.0}, repetition_context_size=6)
    options |= dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    more = dict(presence_context_size=6, frequency_context_size=6)
    with mx.stream(mx.cpu):
        wanted = mx.array(logits())[None]
        for judge in make_logits_processors(**options, **more):
            wanted = judge(mx.array(history), wanted)
        wanted = np.array(wanted[0])
    assert sampler(options).window == 6
    got = process([options], logits()[None], history[None])[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_missing_history_is_no_token(process):
    options = dict(repetition_penalty=2.0, frequency_penalty=1.0, repetition_context_size=4)
    got = process([options], logits()[None], np.full((1, 4), -1, np.int32))
    np.testing.assert_array_equal(got[0], logits())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 0xDEADBEEF12345678, 2**64 - 1])
@pytest.mark.parametrize("position", [1, 77, 131071])
def test_noise_is_equal_to_the_bit(seed, position, sampler, arrays, backend):
    batch = sampler(dict(temperature=1.0, seed=seed), {})
    at = batch.words.send(np.array([[position]] * 2, np.uint32), backend.device)

    def add_noise(count: int, first: int) -> np.ndarray:
        zeros = arrays(np.zeros((2, count), np.float32))
        noisy = batch.words.add_noise(zeros, at, batch.arrange(), first)
        return backend.runtime.to_numpy(noisy)

    noise = add_noise(V, 0)
    assert noise[0].tobytes() == rng.gumbel(seed, position, V).tobytes()
    assert not noise[1].any()  # a greedy row
    assert add_noise(100, 77).tobytes() == noise[:, 77:177].tobytes()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_definitions(temperature, sampler, arrays, backend):
    """Tokens are the argmax of the processed logits plus the noise of their position."""
    for position in range(1, 20):
        wanted = scores = logits(position)
        if temperature:
            wanted = scores / np.float32(temperature) + rng.gumbel(1, position, V)
        token = sampler(dict(temperature=temperature))(arrays(scores[None]), [position])
        assert tuple(token.shape) == (1, 1)
        assert backend.runtime.read([token]) == [int(np.argmax(wanted))]


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_xtc_is_the_definition(probability, temperature, draw):
    """All likely tokens but the least likely of them are dropped, in a share of the positions."""
    options = dict(
        temperature=temperature, top_k=40, xtc_probability=probability, xtc_threshold=0.04
    )
    drops = 0
    for position in range(60):
        raw = logits(position)
        shares = np.where(raw < np.sort(raw)[-40], 0, np.exp(raw.astype(np.float64)))
        shares /= shares.sum()  # before the temperature
        likely = np.flatnonzero(shares >= 0.04)
        scores = np.where(shares > 0, raw / np.float32(temperature), -np.inf)
        if draw_chance(1, position) < probability * 2**24 and len(likely) > 1:
            scores[likely[raw[likely] > raw[likely].min()]] = -np.inf
            drops += 1
        wanted = int(np.argmax(scores + rng.gumbel(1, position, V)))
        assert draw([options], raw[None], [position]) == wanted
    assert 0.5 * probability * 60 < drops and (probability == 1 or drops < 40)


def draw_chance(seed: int, position: int) -> int:
    """The number below 2**24 that decides of XTC at a position."""
    words = rng.threefry2x32(rng.split_seed(seed), np.array([rng.CHANCE], np.uint32), position)
    return int(words[0]) >> 8


def test_chances_are_even():
    chances = [draw_chance(7, position) / 2**24 for position in range(4000)]
    assert 0.48 < np.mean(chances) < 0.52 and 0.23 < np.mean(np.array(chances) < 0.25) < 0.27


def test_dry_is_subtracted_after_the_penalties(draw):
    """Columns of penalties behind the words of masks; a row without them is as before."""
    raw, penalty = logits(), np.zeros((2, V), np.float32)
    best = int(raw.argmax())
    penalty[0, best] = 0.75 * raw[best]
    words = np.concatenate([masks(None, None)(), penalty.view(np.int32)], axis=1)
    for options in (
        dict(repetition_penalty=1.1),
        dict(temperature=0.8, repetition_penalty=1.1, logprobs=1),
    ):
        recent = np.full((2, 20), best, np.int32)
        rows = [{**options, "dry_multiplier": 1.0}, options]
        drawn = draw(rows, np.stack([raw, raw]), [9, 9], recent, lambda: words)
        scores = raw.copy()
        scores[best] /= np.float32(1.1)
        for row, token in enumerate(drawn[:, 0]):
            left = scores - penalty[row]
            if "temperature" in options:
                left = left / np.float32(0.8) + rng.gumbel(1, 9, V)
            assert token == left.argmax()


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=1e-4, top_p=1e-6),
        dict(temperature=1e-4, min_p=1.0),
        dict(temperature=100.0, top_p=0.999999),
        dict(logit_bias={5: 1e6}, top_p=0.5),
        dict(logit_bias=dict.fromkeys(range(V), -1000000.0), top_p=0.5),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_agree(options, draw, recwarn):
    options = {"seed": 1, "temperature": 1.0, **options}
    wanted = select("cpu").sampling_batch([resolve(options).options])
    for position in range(1, 30):
        scores = logits(position)[None]
        assert draw([options], scores, [position]) == wanted(scores, [position])
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


MIXED = [
    {},
    dict(temperature=0.8, seed=3),
    dict(temperature=1.2, top_k=7, seed=2**63),
    dict(temperature=0.9, top_p=0.7, min_p=0.01),
    dict(repetition_penalty=1.4, repetition_context_size=3),
    dict(logit_bias={5: 30.0, 17: -4.0}),
    dict(
        temperature=1.0,
        top_k=2,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_context_size=6,
        logit_bias={900: 2.0},
        seed=11,
    ),
    dict(temperature=0.5, min_p=0.2, seed=4),
    dict(temperature=1.5, min_p=0.02, xtc_probability=0.5, xtc_threshold=0.01, seed=5),
]


@pytest.mark.parametrize("order", [range(9), [6, 0, 8, 1], [4, 2], [5, 5, 0]], ids=str)
def test_a_row_draws_what_it_would_draw_alone(order, draw, process, sampler):
    rows = [MIXED[i] for i in order]
    assert len(sampler(*rows).options) == len(rows)
    for trial in range(20):
        scores = np.stack([logits(100 * trial + i) for i in range(len(rows))])
        positions = [3 + 7 * trial + i for i in range(len(rows))]
        history = np.random.default_rng(trial).integers(0, V, (len(rows), 6)).astype(np.int32)
        history[0, :4] = -1
        together = draw(rows, scores, positions, history)
        assert together.shape == (len(rows), 1)
        processed = process(rows, scores, history)
        for i, options in enumerate(rows):
            alone = scores[i : i + 1], history[i : i + 1]
            drawn = draw([options], alone[0], positions[i : i + 1], alone[1])
            assert together[i] == drawn, (trial, options)
            if options.get("temperature"):
                wanted = process([options], *alone)[0]
                np.testing.assert_array_equal(processed[i], wanted, err_msg=str(options))


# Grammars and log-probabilities


def masks(*allowed):
    """Masks of rows that may draw these tokens; None: any."""
    words = np.full((len(allowed), -(-V // 32)), -1, np.int32)
    for row, tokens in enumerate(allowed):
        if tokens is not None:
            bits = np.zeros(words.shape[1] * 32, np.uint8)
            bits[list(tokens)] = 1
            words[row] = np.packbits(bits, bitorder="little").view(np.int32)
    return lambda: words


MASKED = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {
        "temperature": 0.9,
        "logit_bias": {7: 9.0, 999: 4.0},
        "presence_penalty": 1.0,
        "repetition_penalty": 1.2,
    },
]


def test_a_masked_row_draws_as_if_other_tokens_had_no_probability(draw):
    """As from logits of which only the allowed ones are left, and its neighbours draw as they would
    without it.
    """
    recent, free = np.array([[-1] * 17 + [7, 31, 999]], np.int32), {"temperature": 1.0, "seed": 3}
    for seed in range(8):
        drawn = np.random.default_rng(seed).choice(V, 1 + seed * 9, replace=False)
        tokens, raw = [*drawn.tolist(), 31, 32, 999], logits(seed)[None]
        left = np.full((1, V), -np.inf, np.float32)
        left[0, tokens] = raw[0, tokens]
        alone = draw([free], raw, [9])[0, 0]
        for options in ({**options, "seed": seed} for options in MASKED):
            wanted = draw([options], left, [50], recent)[0, 0]
            assert wanted in tokens
            assert draw([options], raw, [50], recent, masks(tokens)) == wanted
            twice = np.repeat(raw, 2, axis=0), [50, 9], np.repeat(recent, 2, axis=0)
            both = draw([options, free], *twice, masks(tokens, None))
            assert both[:, 0].tolist() == [wanted, alone]


def test_a_mask_is_computed_once_and_of_one_token_leaves_no_choice(draw):
    once = Mock(side_effect=masks([V - 1]))
    assert draw([{"temperature": 2.0}], logits()[None], [1], None, once) == V - 1
    once.assert_called_once()


def test_log_probabilities_are_those_of_the_logits(sampler, draw):
    """Judged by torch, in float64; the same bits alone and beside others, and the same token as
    without them.
    """
    rows = [
        {"temperature": 0.5, "top_k": 3, "logprobs": 4},
        {"logit_bias": {3: 50.0}, "logprobs": 0},
        {"temperature": 1.0},
        {"temperature": 0.0, "logprobs": 2},
    ]
    raw = np.stack([logits(seed) for seed in range(4)])
    assert sampler(*rows).logprobs == 4 and sampler({}, {"seed": 2}).logprobs is None
    packed = draw(rows, raw, [5, 6, 7, 8])
    assert packed.shape == (4, 10)
    for row, options in enumerate(rows):
        entry = unpack(packed[row].tolist(), options.get("logprobs"))
        single = raw[row : row + 1], [5 + row]
        assert packed[row, 0] == draw([{**options, "logprobs": None}], *single)
        if entry is None:
            continue
        wanted = torch.log_softmax(torch.tensor(raw[row], dtype=torch.float64), 0).numpy()
        assert entry.logprob == pytest.approx(wanted[packed[row, 0]], abs=2e-5)
        ids = np.argsort(-raw[row], kind="stable")[: options["logprobs"]]
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(wanted[ids], abs=2e-5)
        assert unpack(draw([options], *single)[0].tolist(), options["logprobs"]) == entry


def test_probabilities_after_the_samplers_are_those_of_the_draw(draw):
    """Judged by transformers' filters; a greedy token is certain, and rows without the option have
    the model's probabilities.
    """
    drawn = {"logprobs": 20, "post_sampling_probs": True}
    rows = [
        {"temperature": 0.6, "top_k": 6, **drawn},
        {"temperature": 1.3, "top_k": 0, "top_p": 0.8, "min_p": 0.02, **drawn},
        {"temperature": 0.0, **drawn},
        {"temperature": 0.6, "top_k": 6, "logprobs": 20},
        {"temperature": 1.0, "post_sampling_probs": True},  # asks for no probabilities
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.02, **drawn},
    ]
    raw = np.stack([logits(seed) for seed in range(6)])
    allowed = [None, range(0, V, 2), None, None, None, None]
    packed = draw(rows, raw, list(range(5, 11)), None, masks(*allowed))
    for row, options in enumerate(rows[:4]):
        result = unpack(packed[row].tolist(), options["logprobs"])
        scores = raw[row].copy()
        if row == 1:
            scores[1::2] = -np.inf
        if options["temperature"] == 0:
            scores[:] = -np.inf
            scores[packed[row, 0]] = 0
        elif "post_sampling_probs" in options:
            scores = filter_as_transformers(scores, options)
        wanted = torch.log_softmax(torch.tensor(scores, dtype=torch.float64), 0).numpy()
        assert result.logprob == pytest.approx(wanted[packed[row, 0]], abs=2e-5)
        ids = [token for token in np.argsort(-wanted, kind="stable")[:20] if wanted[token] > -1e9]
        assert [token for token, _ in result.top] == ids
        assert [value for _, value in result.top] == pytest.approx(wanted[ids], abs=2e-5)
    assert unpack(packed[4].tolist(), None) is None
    excluded = unpack(packed[5].tolist(), 20)
    shares = np.exp(raw[5] - raw[5].max()) / np.exp(raw[5] - raw[5].max()).sum()
    likely = sorted(np.flatnonzero(shares >= 0.02), key=lambda token: shares[token])
    assert len(likely) > 1 and excluded.top[0][0] == likely[0]  # the least likely of them stays
    rest = 1 - shares[likely[1:]].sum()
    assert math.exp(excluded.top[0][1]) == pytest.approx(shares[likely[0]] / rest, rel=1e-4)


def test_among_equals_the_lower_id_comes_first(draw):
    flat = np.zeros((1, V), np.float32)
    flat[0, [5, 900]] = 1
    entry = unpack(draw([{"logprobs": 6}], flat, [1])[0].tolist(), 6)
    assert [token for token, _ in entry.top] == [5, 900, 0, 1, 2, 3]


DAMAGE = {
    "NaN": [(3, np.nan)],
    "infinity": [(3, np.inf)],
    "minus infinity alone": [(slice(None), -np.inf)],
    "all NaN": [(slice(None), np.nan)],
    "NaN and infinities": [(3, np.nan), (5, np.inf), (7, -np.inf)],
}
EVERY_KIND = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=0.7, top_k=5),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=0.7, min_p=0.1),
    dict(repetition_penalty=1.3, logit_bias={9: 1.0}),
    dict(logprobs=2),
    dict(temperature=1.0, xtc_probability=1.0),
    dict(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, logprobs=3),
]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("options", EVERY_KIND, ids=str)
def test_logits_that_are_not_finite_give_minus_one_and_other_rows_their_tokens(
    options, damage, draw, recwarn
):
    scores = np.stack([logits(seed) for seed in range(3)])
    recent = np.array([[-1, 4], [4, 5], [8, 9]], np.int32)
    wanted = draw([options] * 3, scores, [5, 6, 7], recent)
    for place, value in DAMAGE[damage]:
        scores[1, place] = value
    got = draw([options] * 3, scores, [5, 6, 7], recent)
    assert got[1, 0] == -1
    assert (got[[0, 2]] == wanted[[0, 2]]).all() and (wanted[:, 0] >= 0).all()
    assert not recwarn.list


def test_tokens_that_are_forbidden_are_no_fault(draw):
    few = np.full((1, V), -np.inf, np.float32)
    few[0, [3, 8]] = 1.0, 2.0
    for options in EVERY_KIND:
        assert draw([options], few, [5], np.array([[-1]], np.int32))[0, 0] in (3, 8)
