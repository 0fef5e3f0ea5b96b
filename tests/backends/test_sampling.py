"""Sampling on every backend: filters of transformers, penalties of mlx-lm, the exact noise of
core.generation.rng.
"""

from __future__ import annotations

import importlib
import math

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

from mlx_llama.core.backends.logprobs import unpack
from mlx_llama.core.backends.selection import select
from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import resolve

V = 1000


@pytest.fixture(scope="module")
def arrays(backend):
    """Convert NumPy arrays to this backend's."""
    if backend.name == "mlx":
        import mlx.core as mx

        return mx.array
    if backend.name == "cuda":
        import torch

        return lambda array: torch.from_numpy(np.array(array)).to(backend.device)
    return lambda array: array


@pytest.fixture(scope="module")
def sampler(backend):
    """Sampling for one row with the given options; `rows`: for several, a dict of options each."""
    return lambda *rows, **options: backend.sampling_batch(
        [resolve({"seed": 1, **settings}).options for settings in rows or [options]]
    )


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
def test_filters_are_those_of_transformers(options, seed, sampler, arrays, backend):
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    wanted = filter_as_transformers(logits(seed), options)
    got = backend.runtime.to_numpy(sampler(**options).processed(arrays(logits(seed)[None])))[0]
    assert (np.isneginf(got) == np.isneginf(wanted)).all()
    kept = np.isfinite(wanted)
    np.testing.assert_allclose(got[kept], wanted[kept], rtol=1e-6)


def test_penalties_and_bias_are_those_of_mlx_lm(sampler, arrays, backend):
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.sample_utils import make_logits_processors

    history = np.array([5, 7, 7, 900, 3, 3, 3, 0], np.int32)
    bias = {0: 2.5, 999: -4.0}
    with mx.stream(mx.cpu):
        wanted = mx.array(logits())[None]
        for judge in make_logits_processors(
            logit_bias=bias,
            repetition_penalty=1.3,
            repetition_context_size=6,
            presence_penalty=0.4,
            presence_context_size=6,
            frequency_penalty=0.2,
            frequency_context_size=6,
        ):
            wanted = judge(mx.array(history), wanted)
        wanted = np.array(wanted[0])
    chosen = sampler(
        logit_bias=bias,
        repetition_penalty=1.3,
        repetition_context_size=6,
        presence_penalty=0.4,
        frequency_penalty=0.2,
    )
    assert chosen.window == 6
    got = backend.runtime.to_numpy(
        chosen.processed(arrays(logits()[None]), arrays(history[None, -6:]))
    )[0]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_missing_history_is_no_token(sampler, arrays, backend):
    chosen = sampler(repetition_penalty=2.0, frequency_penalty=1.0, repetition_context_size=4)
    got = backend.runtime.to_numpy(
        chosen.processed(arrays(logits()[None]), arrays(np.full((1, 4), -1, np.int32)))
    )
    np.testing.assert_array_equal(got[0], logits())


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 0xDEADBEEF12345678, 2**64 - 1])
@pytest.mark.parametrize("position", [1, 77, 131071])
def test_noise_is_equal_to_the_bit(seed, position, sampler, arrays, backend):
    gumbel = getattr(importlib.import_module(type(sampler()).__module__), "gumbel", None)
    if gumbel is None:  # NumPy has no noise of its own: check its sampler
        flat = sampler(temperature=1.0, seed=seed)
        assert (
            backend.read(flat(np.zeros((1, V), np.float32), [position]))
            == rng.gumbel(seed, position, V).argmax()
        )
        return
    indices = np.arange(V, dtype=np.uint32 if backend.name == "mlx" else np.int32)
    got = backend.runtime.to_numpy(
        gumbel(seed, position, arrays(rng.gumbel_table()), arrays(indices))
    )
    assert got.tobytes() == rng.gumbel(seed, position, V).tobytes()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_definitions(temperature, sampler, arrays, backend):
    """Tokens are the argmax of the processed logits plus the noise of their position."""
    for position in range(1, 20):
        scores = logits(position)
        wanted = (
            scores
            if not temperature
            else scores / np.float32(temperature) + rng.gumbel(1, position, V)
        )
        token = sampler(temperature=temperature)(arrays(scores[None]), [position])
        assert tuple(token.shape) == (1, 1)
        assert backend.read(token) == int(np.argmax(wanted))


@pytest.mark.parametrize("probability", [0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.7])
def test_xtc_is_the_definition(probability, temperature, sampler, arrays, backend):
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
        if rng.draw_chance(1, position) < probability * 2**24 and len(likely) > 1:
            scores[likely[raw[likely] > raw[likely].min()]] = -np.inf
            drops += 1
        wanted = int(np.argmax(scores + rng.gumbel(1, position, V)))
        assert backend.read(sampler(**options)(arrays(raw[None]), [position])) == wanted
    assert 0.5 * probability * 60 < drops and (probability == 1 or drops < 40)


def test_chances_are_even():
    chances = [rng.draw_chance(7, position) / 2**24 for position in range(4000)]
    assert 0.48 < np.mean(chances) < 0.52 and 0.23 < np.mean(np.array(chances) < 0.25) < 0.27


def test_dry_is_subtracted_after_the_penalties(sampler, arrays, backend):
    """Columns of penalties behind the words of masks; a row without them is as before."""
    raw, penalty = logits(), np.zeros((2, V), np.float32)
    best = int(raw.argmax())
    penalty[0, best] = 0.75 * raw[best]
    words = np.concatenate([masks(None, None)(), penalty.view(np.int32)], axis=1)
    for options in (
        dict(repetition_penalty=1.1),
        dict(temperature=0.8, repetition_penalty=1.1, logprobs=1),
    ):
        recent = arrays(np.full((2, 20), best, np.int32))
        rows = [{**options, "dry_multiplier": 1.0}, options]
        drawn = sampler(*rows)(arrays(np.stack([raw, raw])), [9, 9], recent, lambda: words)
        scores = raw.copy()
        scores[best] /= np.float32(1.1)
        for row, token in enumerate(backend.runtime.to_numpy(drawn)[:, 0]):
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
def test_the_ends_of_the_ranges_agree(options, sampler, arrays, backend, recwarn):
    wanted = select("cpu").sampling_batch(
        [resolve({"seed": 1, "temperature": 1.0, **options}).options]
    )
    ours = sampler(**{"temperature": 1.0, **options})
    for position in range(1, 30):
        scores = logits(position)[None]
        assert backend.read(ours(arrays(scores), [position])) == wanted(scores, [position])[0, 0]
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
def test_a_row_draws_what_it_would_draw_alone(order, sampler, arrays, backend):
    rows = [MIXED[i] for i in order]
    batch = sampler(*rows)
    assert len(batch.options) == len(rows)
    for trial in range(20):
        scores = np.stack([logits(100 * trial + i) for i in range(len(rows))])
        positions = [3 + 7 * trial + i for i in range(len(rows))]
        history = np.random.default_rng(trial).integers(0, V, (len(rows), 6)).astype(np.int32)
        history[0, :4] = -1
        recent = arrays(history[:, 6 - batch.window :]) if batch.window else None
        together = batch(arrays(scores), positions, recent)
        assert tuple(together.shape) == (len(rows), 1)
        processed = backend.runtime.to_numpy(batch.processed(arrays(scores), recent))
        for i, (options, drawn) in enumerate(zip(rows, backend.read_all(together))):
            alone = sampler(options)
            history_alone = arrays(history[i : i + 1, 6 - alone.window :]) if alone.window else None
            single = arrays(scores[i : i + 1]), history_alone
            assert drawn == backend.read(alone(single[0], positions[i : i + 1], single[1])), (
                trial,
                options,
            )
            if options.get("temperature"):
                wanted = backend.runtime.to_numpy(alone.processed(*single))[0]
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


def test_a_masked_row_draws_as_if_other_tokens_had_no_probability(sampler, arrays, backend):
    """As from logits of which only the allowed ones are left, and its neighbours draw as they would
    without it.
    """
    recent = arrays(np.array([[-1] * 17 + [7, 31, 999]], np.int32))
    for options in MASKED:
        for seed in range(8):
            tokens = np.random.default_rng(seed).choice(V, 1 + seed * 9, replace=False).tolist() + [
                31,
                32,
                999,
            ]
            raw = logits(seed)
            left = np.full(V, -np.inf, np.float32)
            left[tokens] = raw[tokens]
            draw = sampler(**options, seed=seed)
            wanted = backend.read(draw(arrays(left[None]), [50], recent if draw.window else None))
            assert wanted in tokens
            assert (
                backend.read(
                    draw(arrays(raw[None]), [50], recent if draw.window else None, masks(tokens))
                )
                == wanted
            )
            free = sampler(temperature=1.0, seed=3)
            alone = backend.read(free(arrays(raw[None]), [9]))
            both = sampler({**options, "seed": seed}, {"temperature": 1.0, "seed": 3})
            twice = arrays(np.stack([raw, raw]))
            rows = (
                None
                if not both.window
                else arrays(np.concatenate([np.array([[-1] * 17 + [7, 31, 999]], np.int32)] * 2))
            )
            assert backend.read_all(both(twice, [50, 9], rows, masks(tokens, None))) == [
                wanted,
                alone,
            ]


def test_a_mask_is_computed_once_and_of_one_token_leaves_no_choice(sampler, arrays, backend):
    calls = []

    def once():
        calls.append(1)
        return masks([V - 1])()

    assert backend.read(sampler(temperature=2.0)(arrays(logits()[None]), [1], None, once)) == V - 1
    assert calls == [1]


def test_log_probabilities_are_those_of_the_logits(sampler, arrays, backend):
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
    batch = sampler(*rows)
    assert batch.logprobs == 4 and sampler({}, {"seed": 2}).logprobs is None
    packed = np.array(backend.read_all(batch(arrays(raw), [5, 6, 7, 8])), np.int32).reshape(4, -1)
    assert packed.shape == (4, 10)
    for row, options in enumerate(rows):
        entry = unpack(packed[row].tolist(), options.get("logprobs"))
        plain = sampler(**{**options, "logprobs": None})
        assert packed[row, 0] == backend.read(plain(arrays(raw[row : row + 1]), [5 + row]))
        if entry is None:
            continue
        wanted = torch.log_softmax(torch.tensor(raw[row], dtype=torch.float64), 0).numpy()
        assert entry.logprob == pytest.approx(wanted[packed[row, 0]], abs=2e-5)
        ids = np.argsort(-raw[row], kind="stable")[: options["logprobs"]]
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(wanted[ids], abs=2e-5)
        alone = backend.read_all(sampler(**options)(arrays(raw[row : row + 1]), [5 + row]))
        assert unpack(alone, options["logprobs"]) == entry


def test_probabilities_after_the_samplers_are_those_of_the_draw(sampler, arrays, backend):
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
    arguments = arrays(raw), list(range(5, 11)), None, masks(*allowed)
    packed = np.array(backend.read_all(sampler(*rows)(*arguments)), np.int32).reshape(6, -1)
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


def test_among_equals_the_lower_id_comes_first(sampler, arrays, backend):
    flat = np.zeros((1, V), np.float32)
    flat[0, [5, 900]] = 1
    entry = unpack(backend.read_all(sampler(logprobs=6)(arrays(flat), [1])), 6)
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
    options, damage, sampler, arrays, backend, recwarn
):
    rows = np.stack([logits(seed) for seed in range(3)])
    recent = arrays(np.array([[-1, 4], [4, 5], [8, 9]], np.int32))
    wanted = backend.runtime.to_numpy(
        sampler(options, options, options)(arrays(rows), [5, 6, 7], recent)
    )
    for place, value in DAMAGE[damage]:
        rows[1, place] = value
    got = backend.runtime.to_numpy(
        sampler(options, options, options)(arrays(rows), [5, 6, 7], recent)
    )
    assert got[1, 0] == -1
    assert (got[[0, 2]] == wanted[[0, 2]]).all() and (wanted[:, 0] >= 0).all()
    assert not recwarn.list


def test_tokens_that_are_forbidden_are_no_fault(sampler, arrays, backend):
    few = np.full((1, V), -np.inf, np.float32)
    few[0, [3, 8]] = 1.0, 2.0
    for options in EVERY_KIND:
        assert backend.runtime.to_numpy(
            sampler(**options)(arrays(few), [5], arrays(np.array([[-1]], np.int32)))
        )[0, 0] in (3, 8)
