"""DRY against its description in oobabooga/text-generation-webui's pull request 5677.

tests/test_llama_cpp.py compares with llama.cpp's sampler.
"""

from __future__ import annotations

import numpy as np
import pytest

from mlx_llama.core import options
from mlx_llama.core.answers import dry
from mlx_llama.core.answers.dry import Breakers, Dry
from mlx_llama.core.errors import OptionsError


def resolve(**chosen):
    return options.resolve({"dry_multiplier": 0.5, **chosen}).options


def describe(tokens, o, heads):
    """Penalties by the description: for each token that followed the text's end somewhere before,
    by the longest such end, none across a breaker.
    """
    text = tokens if o.dry_penalty_last_n < 0 else tokens[-o.dry_penalty_last_n :]
    start = 0  # of the text after the last breaker
    for at in range(len(text) - 1, -1, -1):
        tails = [t for t in heads.get(text[at], ()) if tuple(text[at + 1 : at + 1 + len(t)]) == t]
        if tails:
            start = at + 1 + max(map(len, tails))
            break
    penalties = {}
    for length in range(o.dry_allowed_length, len(text) - start + 1):
        end = text[len(text) - length :]
        for at in range(0 if length else 1, len(text) - length):
            token = text[at + length]
            if text[at : at + length] == end and () not in heads.get(token, ()):
                penalties[token] = o.dry_multiplier * o.dry_base ** (length - o.dry_allowed_length)
    return penalties


HEADS = [{}, {3: {()}}, {0: {(1,), (1, 2)}, 4: {(2, 2)}}, {2: {(), (1,)}, 1: {(0, 0, 0)}}]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
@pytest.mark.parametrize("window", [-1, 1, 7, 64])
def test_penalties_are_those_of_the_description(heads, allowed, window):
    random = np.random.default_rng(allowed + 10 * (window + 1))
    o = resolve(dry_allowed_length=allowed, dry_penalty_last_n=window, dry_base=1.3)
    for trial in range(60):
        tokens = random.integers(0, 2 + trial % 5, random.integers(1, 60)).tolist()
        wanted = describe(tokens, o, heads)
        penalties = Dry(o, heads, tokens).penalties()
        assert penalties == pytest.approx(wanted, rel=1e-5), tokens


def test_a_penalty_stays_finite_and_reads_the_growing_text():
    tokens = [5, 6] * 400
    dry = Dry(resolve(dry_base=1.75, dry_penalty_last_n=-1), {}, tokens)
    assert list(dry.penalties()) == [5] and np.isfinite(dry.penalties()[5])
    tokens.append(5)
    assert list(dry.penalties()) == [6]
    tokens.append(7)
    assert dry.penalties() == {}


def test_breakers_are_tokens_that_hold_or_begin_the_text(llm):
    tokenizer = llm.tokenizer
    [comma] = tokenizer.encode(",", add_bos=False)[-1:]
    heads = Breakers(tokenizer).find([","])
    assert () in heads[comma]
    assert all(b"," in tokenizer.piece(token).data for token in heads)
    ends = Breakers(tokenizer).find(["e, th"])
    [e] = tokenizer.encode("e", add_bos=False)[-1:]
    assert ends[e] == {tuple(tokenizer.encode(", th", add_bos=False))}


def test_options(llm):
    assert resolve(dry_sequence_breakers="none").dry_sequence_breakers == ()
    assert resolve(dry_sequence_breakers=["a", "b"]).dry_sequence_breakers == ("a", "b")
    for bad in ({"dry_base": 0.5}, {"dry_sequence_breakers": [""]}, {"xtc_probability": 1.1}):
        with pytest.raises(OptionsError, match=next(iter(bad))):
            resolve(**bad)


REPEATING = [1] + [60, 61, 62, 63, 64] * 6


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_row_with_dry_answers_as_alone_and_no_row_waits_for_more(temperature, llm):
    """Rows with and without DRY, alone and together; a token is one read."""
    rows = [
        dict(dry_multiplier=5.0, dry_base=3.0),
        {},
        dict(dry_multiplier=5.0, dry_base=3.0, dry_sequence_breakers="none", regex="[a-z ]{20}"),
        dict(xtc_probability=0.7, xtc_threshold=0.004),
        dict(dry_multiplier=1.0, repetition_penalty=1.2, xtc_probability=0.5),
    ]
    common = dict(max_tokens=12, temperature=temperature, seed=5)
    alone = [llm.generate(REPEATING, **common, **row) for row in rows]
    handles = [llm.submit(REPEATING, **common, **row) for row in rows]
    together = [handle.finish() for handle in handles]
    assert [done.tokens for done in together] == [done.tokens for done in alone]
    changed = alone[3] if temperature else alone[0]
    assert changed.tokens != alone[1].tokens
    assert all(done.waits == len(done.tokens) for done in (alone[0], alone[3]))
    # the penalties on the host, from the model's logits
    text = list(REPEATING)
    if temperature == 0:
        dry = Dry(resolve(**rows[0]), Breakers(llm.tokenizer).find(["\n", ":", '"', "*"]), text)
        for token in alone[0].tokens:
            scores = llm.logits(text)[-1].copy()
            for other, penalty in dry.penalties().items():
                scores[other] -= penalty
            assert scores.argmax() == token
            text.append(token)


def test_breakers_of_many_requests_are_not_all_kept(llm, monkeypatch):
    monkeypatch.setattr(dry, "KEPT", 2)
    breakers = Breakers(llm.tokenizer)
    heads = [breakers.find([text]) for text in "abcab"]
    assert heads[:2] == heads[3:] and breakers.find("abcab") == breakers.find("bca")
    assert breakers._find_text.cache_info().currsize == 2
