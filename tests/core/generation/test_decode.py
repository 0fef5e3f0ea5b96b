"""The decode loop on a model of one line, and on real ones against transformers."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from machine import device_of

from mlx_llama import load
from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.generation.decode import Decode, Request
from mlx_llama.core.generation.options import resolve

PROMPT = [3, 1, 4]


def next_token(text: list[int]) -> int:
    """The model: any function of the text."""
    return (7 * sum(text) + len(text) ** 2) % 10


def plain_decoding(count: int, eos: int) -> list[int]:
    """The definition: one token after the other."""
    tokens: list[int] = []
    while len(tokens) < count and eos not in tokens:
        tokens.append(next_token(PROMPT + tokens))
    return tokens


class ToyCache:
    def __init__(self):
        self.text: list[int] = []
        self.tokens = np.zeros((1, 0), np.int32)

    @property
    def length(self) -> int:
        return len(self.text)

    def arrays(self):
        return [self.tokens]

    def check_memory(self, batch, end):
        assert batch == 1 and end == len(PROMPT)

    def trim(self, length):
        assert 0 <= length <= self.length
        del self.text[length:]


class ToyModel:
    """Computes at once, as an eager backend does; the loop learns a token only by reading it."""

    config = SimpleNamespace(rope=SimpleNamespace(type="default"), max_position_embeddings=1000)
    verify_width = 16

    def forward(self, tokens, index_pos, cache):
        return self.verify(tokens, index_pos, cache, None)

    def step(self, tokens, index_pos, cache, sampler):
        return self.verify(tokens, index_pos, cache, sampler)[:, -1:]

    def verify(self, tokens, index_pos, cache, sampler):
        assert index_pos == cache.length
        sampled = []
        for token in np.asarray(tokens)[0].tolist():
            cache.text.append(token)
            sampled.append(next_token(cache.text))
        return np.array([sampled], np.int32)


class ToyBackend:
    def __init__(self, runs_ahead: bool):
        self.runs_ahead = runs_ahead
        self.events: list[str] = []

    def sampler(self, options):
        return None

    def launch(self, *arrays):
        self.events.append("launch")

    def read(self, token):
        assert token.shape == (1, 1)
        return self.read_all(token)[0]

    def read_all(self, *tokens):
        self.events.append("read")
        return [token for array in tokens for token in array[0].tolist()]


class Guesses:
    """Drafts from a list of guesses, right or wrong, and none when the list is used up."""

    kind, max_drafts = "prompt", 8

    def __init__(self, guesses: list[list[int]]):
        self.guesses = guesses
        self.heard: list[int] = []

    def push(self, token):
        self.heard.append(token)

    def may_draft_next(self):
        return bool(self.guesses)

    def draft(self, count, steps):
        return self.guesses.pop()[:count] if self.guesses else []


def decode(count: int, eos: int, runs_ahead: bool, drafter=None, chunk: int = 512):
    backend, completion, cache = ToyBackend(runs_ahead), Completion(), ToyCache()
    options = resolve({"max_tokens": count, "prefill_step_size": chunk}).options
    request = Request(PROMPT, cache, options, count, frozenset({eos}), completion, drafter)
    return Decode(backend, ToyModel(), request), backend.events


@given(st.integers(1, 12), st.integers(0, 10), st.booleans(), st.integers(1, 4))
@settings(deadline=None)
def test_one_launch_and_one_read_per_token(count, eos, runs_ahead, chunk):
    loop, events = decode(count, eos, runs_ahead, chunk=chunk)
    completion, cache = loop.request.completion, loop.cache
    wanted, seen = plain_decoding(count, eos), []
    for token in loop.tokens():
        seen.append(token)
        assert completion.tokens == seen
        assert cache.text[:len(PROMPT) + len(seen) - 1] == (PROMPT + seen)[:-1]  # the cache may be ahead
    assert seen == wanted
    assert completion.finish_reason == ("eos" if wanted[-1] == eos else "length")
    before, each = ["launch"] * ((len(PROMPT) - 1) // chunk + 1), ["launch", "read"]
    surplus = runs_ahead and len(wanted) < count  # a step ran ahead of the end token
    steps = each * (len(wanted) - 1) + ["launch"] * surplus if runs_ahead else ["read", "launch"] * (len(wanted) - 1)
    assert events == before + steps + ["read"]
    assert (completion.waits, completion.launches) == (len(wanted), len(wanted) + surplus)
    assert completion.read_bytes == 4 * len(wanted)


@given(st.integers(1, 12), st.integers(0, 10), st.booleans(), st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6),
       st.booleans())
@settings(deadline=None, max_examples=300)
def test_drafts_change_the_number_of_steps_and_nothing_else(count, eos, runs_ahead, guesses, right):
    wanted = plain_decoding(count, eos)
    if right:  # correct guesses only
        guesses = [plain_decoding(count + 9, -1)[n:n + 4] for n in reversed(range(1, count, 5))]
    drafter = Guesses([list(guess) for guess in guesses])
    loop, events = decode(count, eos, runs_ahead, drafter)
    assert list(loop.tokens()) == wanted == loop.request.completion.tokens
    completion = loop.request.completion
    assert drafter.heard[:len(wanted)] == wanted and completion.accepted <= completion.drafted
    assert loop.cache.text[:len(PROMPT) + len(wanted) - 1] == (PROMPT + wanted)[:-1]
    assert completion.waits <= len(wanted) and completion.launches - completion.waits in (0, 1)
    if right and eos not in wanted:
        assert completion.accepted == completion.drafted and completion.waits == 1 + -(-(count - 1) // 5)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_device_works_while_the_consumer_looks_and_an_eager_one_shows_first(runs_ahead):
    loop, events = decode(4, 10, runs_ahead)
    tokens = loop.tokens()
    next(tokens)
    assert events == (["launch", "launch", "read"] if runs_ahead else ["launch", "read"])
    loop, events = decode(4, 10, runs_ahead, Guesses([[0], [0], [0]]))
    next(loop.tokens())
    assert events == (["launch", "read", "launch"] if runs_ahead else ["launch", "read"])


def test_nothing_runs_without_room_for_a_token():
    loop, events = decode(0, 10, True)
    assert list(loop.tokens()) == [] and events == ["launch"] and loop.request.completion.tokens == []


# Real models


@pytest.fixture(scope="module")
def llm(toy):
    return load(toy, backend="cpu")


def test_greedy_tokens_are_those_of_transformers(toy, backend):
    import torch
    from transformers import AutoModelForCausalLM

    ours = load(toy, backend=backend.name, device=device_of(backend), dtype="float32")
    peer = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    for prompt in ([1, 50, 60, 70], [1], [7, 7, 7], list(range(3, 90))):
        with torch.no_grad():
            wanted = peer.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0,
                                   eos_token_id=2)[0, len(prompt):].tolist()
        got = ours.generate(prompt, max_tokens=40, prefill_step_size=32)
        assert got.tokens == wanted
        assert got.finish_reason == ("eos" if wanted[-1] == 2 else "length")


def test_time_away_from_the_engine_is_not_decoding(llm):
    for piece in (stream := llm.stream("Once", max_tokens=6)):
        time.sleep(0.05)
    assert stream.completion.decode_seconds < 0.2


def test_sampled_text_has_the_same_bits_in_every_run(backend, toy):
    ours = load(toy, backend=backend.name, device=device_of(backend))
    options = dict(max_tokens=60, temperature=1.1, top_p=0.95, top_k=100, repetition_penalty=1.1, seed=11)
    runs = [ours.generate("Once upon", **options).tokens for _ in range(4)]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_length(llm):
    done = llm.generate("Once", max_tokens=5)
    assert (len(done.tokens), done.finish_reason) == (5, "length")
    done = llm.generate("Once", max_tokens=0)
    assert (done.tokens, done.text, done.finish_reason) == ([], "", "length")


def test_context(backend, toy):
    llm = load(toy, backend=backend.name, device=device_of(backend), dtype="float32")
    prompt = [1] + [60] * 249
    done = llm.generate(prompt, max_tokens=1000)
    assert (len(done.tokens), done.finish_reason) == (256 - 250, "context")


def test_prefill_is_one_launch_per_chunk(llm, monkeypatch):
    launches, calls = [], []
    forward, launch = type(llm.model).forward, llm.backend.runtime.launch
    monkeypatch.setattr(type(llm.model), "forward", lambda self, tokens, *a, **k: (
        calls.append(len(tokens[0])), forward(self, tokens, *a, **k))[1])
    monkeypatch.setattr(llm.backend.runtime, "launch", lambda *a: (launches.append(len(calls)), launch(*a))[1])
    llm.generate([1] * 50, max_tokens=3, prefill_step_size=16)
    assert calls == [16, 16, 16, 2, 1, 1] and launches == [1, 2, 3, 4, 5, 6]


def test_prefill_in_chunks_gives_the_same_tokens(llm):
    prompt = np.random.default_rng(0).integers(3, 384, 100).tolist()
    runs = [llm.generate(prompt, max_tokens=20, prefill_step_size=size).tokens for size in (1, 7, 99, 100, 512)]
    assert all(run == runs[0] for run in runs)
