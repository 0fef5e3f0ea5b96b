"""The generator against published test vectors, the noise against its distribution."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_llama.core import rng

# Random123's kat_vectors for threefry2x32, 20 rounds: counter, key, first output word.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), 0x6B200159),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), 0x1CB996FC),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), 0xC4923A9C),
]


@pytest.mark.parametrize("counter, key, wanted", KNOWN)
def test_threefry_gives_the_published_words(counter, key, wanted):
    assert rng.threefry2x32(key, np.array([counter[0]], np.uint32), counter[1])[0] == wanted


def test_every_word_has_a_place_in_the_table_and_noise_rises_as_the_word_falls():
    words = np.unique(
        np.r_[np.arange(70000), np.linspace(0, 2**32 - 1, 200000).astype(np.int64)]
    ).astype(np.uint32)
    index = rng.table_index(words)
    assert index.min() == 0 and index.max() == len(rng.gumbel_table()) - 1
    noise = rng.gumbel_table()[index]
    assert np.isfinite(noise).all() and (np.diff(noise) <= 0).all()
    exact = -np.log(-np.log1p(-((words >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24))
    # the lowest 2.5 % of the noise, which hardly ever wins, lies in coarser buckets
    body = exact > -1.3
    assert np.abs(noise - exact)[body].max() < 2e-3


def test_noise_is_gumbel():
    """Kolmogorov-Smirnov distance to exp(-exp(-x)) below the 1e-3 quantile for this many draws."""
    draws = np.sort(
        np.concatenate([rng.gumbel(7, position, 4096) for position in range(50)]).astype(np.float64)
    )
    empirical = (np.arange(len(draws)) + 0.5) / len(draws)
    assert np.abs(np.exp(-np.exp(-draws)) - empirical).max() < 1.95 / np.sqrt(len(draws))


@pytest.mark.slow
def test_argmax_of_noisy_logits_draws_from_softmax():
    logits = np.array([2.0, 1.0, 0.0, -1.0, -4.0, 2.0], np.float32)
    shares = np.exp(logits) / np.exp(logits).sum()
    n = 40000
    counts = np.bincount(
        [np.argmax(logits + rng.gumbel(seed, 3, 6)) for seed in range(n)], minlength=6
    )
    chi_squared = ((counts - n * shares) ** 2 / (n * shares)).sum()
    assert chi_squared < 20.5  # 5 degrees of freedom, p = 0.001


def test_seeds_positions_and_words_of_the_seed_all_matter():
    base = rng.gumbel(1, 1, 1000)
    for other in (rng.gumbel(2, 1, 1000), rng.gumbel(1, 2, 1000), rng.gumbel(1 + 2**32, 1, 1000)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.12
