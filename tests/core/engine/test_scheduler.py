"""The loop on a toy backend whose answers change with any mix-up, and real models against
transformers.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import tracemalloc
from unittest.mock import Mock

import pytest
import torch
from cases.engine import (
    EOS,
    POSITION_NBYTES,
    ToyBackend,
    ToyCache,
    ToyError,
    ToyModel,
    alone,
    alone_tokens,
    check_rows,
    make,
    make_prompts,
    request,
    serve,
)
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM

from mlx_llama import load
from mlx_llama.core.engine import scheduler as scheduling
from mlx_llama.core.engine.request import Sequence
from mlx_llama.core.errors import ContextError, OptionsError
from mlx_llama.core.system import machine

PROMPT = [3, 1, 4]
MIXED = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"presence_penalty": 1.0},
    {"logit_bias": {7: 1.5}},
    {"temperature": 0.7, "seed": 9, "presence_penalty": 0.5, "repetition_context_size": 3},
]
RULED = [
    {"regex": "[a-f]{3}forced(x|y)[a-c]{2}z"},
    {"regex": "(once|twice)uponatime", "logprobs": 2},
    {"logprobs": 5},
    {"regex": "[A-W]{1,4}(end|fin)", "temperature": 0.8, "seed": 3},
]


def finish_all(handles):
    return [handle.finish().tokens for handle in handles]


def assert_same(done, wanted):
    assert done.tokens == wanted.tokens and done.text == wanted.text
    assert done.finish_reason == wanted.finish_reason


def assert_idle(loop):
    assert not loop.scheduler.running and not loop.scheduler.waiting
    assert not loop.scheduler.rows.used
    check_rows(loop)


# One request: launches, reads, times


@given(st.integers(1, 12), st.integers(0, 49), st.booleans(), st.integers(1, 4))
def test_one_launch_and_one_read_per_token(count, eos, runs_ahead, chunk):
    wanted = alone(PROMPT, max_tokens=count, eos=(eos,)).tokens
    backend, loop = make(runs_ahead, eos=(eos,))
    handle, seen = loop.submit(request(PROMPT, max_tokens=count, prefill_step_size=chunk)), []
    completion, cache = handle.completion, loop.scheduler.cache
    for token in handle.tokens():
        seen.append(token)
        assert completion.tokens == seen
        row = max(range(cache.rows), key=lambda row: cache.lengths[row])
        known = (PROMPT + seen)[:-1]
        assert cache.tokens[row][: len(known)].tolist() == known  # the cache may be ahead
    assert seen == wanted
    assert completion.finish_reason == ("eos" if wanted[-1] == eos else "length")
    before, each = ["launch"] * ((len(PROMPT) - 1) // chunk + 1), ["launch", "read"]
    surplus = runs_ahead and len(wanted) < count  # a step ran ahead of the end token
    each = each if runs_ahead else each[::-1]
    steps = each * (len(wanted) - 1) + ["launch"] * surplus
    assert backend.events == before + steps + ["read"]
    assert (completion.waits, completion.launches) == (len(wanted), len(wanted) + surplus)
    assert completion.read_bytes == 4 * len(wanted) == sum(backend.read_sizes)
    check_rows(loop)
    loop.tick()  # the surplus step is forgotten
    assert not loop.scheduler.launched and backend.events[-1] == "read"


def test_a_chunk_is_no_wider_than_a_model_takes_in_a_short_time():
    backend, loop = make(False)
    loop.engine.model.prefill_width = 3
    handle = loop.submit(request(list(range(1, 11)), max_tokens=1, prefill_step_size=8))
    handle.finish()
    assert backend.events == ["launch"] * 4 + ["read"]


def test_a_device_works_while_the_consumer_looks_and_an_eager_one_shows_first(runs_ahead):
    for kind in ("none", "prompt"):  # the prompt has no repetition to draft from
        backend, loop = make(runs_ahead)
        next(loop.submit(request(PROMPT, max_tokens=4, speculate=kind)))
        assert backend.events == ["launch", *["launch"] * runs_ahead, "read"]
    # repeats itself, so the text offers drafts
    backend, loop = make(runs_ahead, model={"period": 3})
    next(loop.submit(request([1, 2, 3, 1, 2, 3, 1, 2], max_tokens=8, speculate="prompt")))
    assert backend.events == (["launch", "read", "launch"] if runs_ahead else ["launch", "read"])


def test_nothing_runs_without_a_token_to_generate():
    backend, loop = make()
    done = loop.submit(request(PROMPT, max_tokens=0)).finish()
    assert (done.tokens, done.finish_reason, backend.events) == ([], "length", [])


def test_time_away_from_the_loop_is_not_decoding(monkeypatch):
    now = [0.0]  # seconds that were slept
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    backend, loop = make()
    backend.step_seconds = 0.01
    handle = loop.submit(request(PROMPT, max_tokens=5))
    time.sleep(0.1)
    for _ in handle:
        time.sleep(0.05)
    done = handle.completion
    assert (done.prefill_seconds, done.decode_seconds) == (pytest.approx(0.01), pytest.approx(0.04))
    seconds = [token.seconds for token in done.tokens]
    # the consumer's own clock
    assert seconds == sorted(seconds) and seconds[0] > 0.1 and seconds[-1] > 0.3


def test_tokens_have_the_text_that_appears_with_them():
    done = alone(PROMPT, eos=(), max_tokens=30, temperature=1.0)
    assert "".join(token.text for token in done.tokens) == done.text and len(done.text) == 30
    stop = done.text[10:13]
    backend, loop = make(eos=())
    handle = loop.submit(request(PROMPT, max_tokens=30, temperature=1.0, stop=stop))
    assert "".join(handle) == done.text[: done.text.index(stop)]
    assert (handle.completion.stop, handle.completion.finish_reason) == (stop, "stop")
    assert "".join(token.text for token in handle.completion.tokens) == handle.completion.text
    withheld = alone(PROMPT, eos=(), max_tokens=12, temperature=1.0, stop=stop + "?")
    assert withheld.text == done.text[:12]  # released at the end


def test_context_and_options_end_an_answer():
    done = alone([1] * 990, max_tokens=1000)
    assert len(done.tokens) == 10 and done.finish_reason == "context"
    assert alone([1] * 990, max_tokens=10).finish_reason == "length"


# Batches


ranges = [st.integers(*ends) for ends in ((0, 9), (1, 70), (1, 25), (0, 8))]
requests = st.lists(st.tuples(*ranges, st.booleans()), min_size=1, max_size=9)


@given(
    requests,
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([1, 7, 512]),
    st.sampled_from([None, 2, 3]),
    st.data(),
)
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(
    drawn, runs_ahead, max_rows, chunk, memory, data
):
    """Any prompts, options, chunks, rows and memory; requests join and leave at any time; some are
    cancelled.
    """
    prompts = [
        [shared, 1, 2, 3, 4, 5, 6, 7, 8, 9, *range(length)][: length + 10]
        for shared, length, *_ in drawn
    ]
    prompts = [[token % EOS for token in prompt] for prompt in prompts]
    memory = memory and memory * 256 * POSITION_NBYTES
    backend, loop = make(runs_ahead, max_rows=max_rows, memory=memory, kept_rows=2)
    handles = []
    for (_, _, count, kind, cancels), prompt in zip(drawn, prompts):
        options = {**[*MIXED, *RULED][kind], "max_tokens": count, "prefill_step_size": chunk}
        handles.append((loop.submit(request(prompt, **options)), prompt, options, cancels))
        for _ in range(data.draw(st.integers(0, 6))):
            loop.tick()
            check_rows(loop)
        if cancels:
            handles[-1][0].cancel()
    for handle, prompt, options, cancels in handles:
        done, wanted = handle.finish(), alone(prompt, **options)
        if cancels and done.finish_reason == "interrupted":
            assert done.tokens == wanted.tokens[: len(done.tokens)]
        else:
            assert_same(done, wanted)
            logprobs = [token.logprobs for token in wanted.tokens]
            assert [token.logprobs for token in done.tokens] == logprobs
    loop.tick()
    assert_idle(loop)


def test_one_step_and_one_read_serve_all_rows(runs_ahead):
    backend, loop = make(runs_ahead, eos=())
    handles = serve(loop, make_prompts(8), max_tokens=40)
    while len(loop.scheduler.running) < 8:
        loop.tick()
    loop.tick()
    backend.clear()
    for _ in range(10):
        loop.tick()
    assert backend.calls == [(8, 1)] * 10 and backend.events == ["launch", "read"] * 10
    # the options' arrays are made once
    assert backend.read_sizes == [8 * 4] * 10 and backend.batches == 0
    assert finish_all(handles) == alone_tokens(make_prompts(8), max_tokens=40, eos=())


def test_a_long_prompt_delays_others_by_one_chunk_per_token(runs_ahead):
    backend, loop = make(runs_ahead, context=6000, eos=())
    first, other = serve(loop, make_prompts(2), max_tokens=200)
    next(first), next(other)
    long = loop.submit(request([5, 6] * 2000, max_tokens=3, prefill_step_size=4096))
    while not long.completion.tokens:
        before = (len(first.completion.tokens), len(other.completion.tokens))
        positions = backend.positions
        loop.tick()
        assert len(first.completion.tokens) == before[0] + 1
        assert len(other.completion.tokens) == before[1] + 1
        assert backend.positions - positions <= scheduling.SHARED_CHUNK + 4
    assert len(first.completion.tokens) >= 4000 / 512
    assert long.finish().tokens == alone([5, 6] * 2000, context=6000, eos=(), max_tokens=3).tokens


def test_first_come_first_served():
    backend, loop = make(max_rows=2)
    handles = serve(loop, make_prompts(6), max_tokens=5)
    begun = []
    while not all(handle.done for handle in handles):
        loop.tick()
        shown = [i for i, handle in enumerate(handles) if handle.completion.tokens]
        begun += [i for i in shown if i not in begun]
        assert len(loop.scheduler.running) <= 2
    assert begun == list(range(6))


def test_a_row_that_drafts_delays_itself_alone():
    """On a device that works by itself, the others' next step is launched before the drafts are
    read.
    """
    backend, loop = make(True, model={"period": 3}, eos=())
    plain = serve(loop, [[7, 8, 9], [4, 5, 6]], max_tokens=60)
    drafting = loop.submit(request([1, 2, 3] * 4, max_tokens=60, speculate="prompt"))
    while not drafting.completion.drafted:
        loop.tick()
    backend.clear()
    for _ in range(4):
        loop.tick()
        # the batch runs ahead
        assert backend.calls[0] == (2, 1) and backend.events[:2] == ["launch", "read"]
        backend.clear()
    assert drafting.finish().tokens == [int(t) for t in ([1, 2, 3] * 20)]
    assert drafting.completion.accepted > 30
    assert finish_all(plain) == [[7, 8, 9] * 20, [4, 5, 6] * 20]


# Memory


@pytest.mark.slow
def test_64_requests_through_memory_for_5_end_as_alone(runs_ahead):
    backend, loop = make(runs_ahead, eos=(), memory=5 * 512 * POSITION_NBYTES)
    prompts = make_prompts(64, seed=3, longest=200)
    all_options = [{**MIXED[i % len(MIXED)], "max_tokens": 150 + 10 * (i % 30)} for i in range(64)]
    handles = [
        loop.submit(request(prompt, **options)) for prompt, options in zip(prompts, all_options)
    ]
    most = 0
    while not all(handle.done for handle in handles):
        loop.tick()
        most = max(most, len(loop.scheduler.running))
        assert loop.scheduler.cache.nbytes <= loop.scheduler.rows.budget
    assert loop.preemptions > 5 and 5 <= most <= 10
    for handle, prompt, options in zip(handles, prompts, all_options):
        done, wanted = handle.finish(), alone(prompt, eos=(), **options)
        assert_same(done, wanted)
    check_rows(loop)


def test_memory_that_the_device_refuses_is_treated_alike():
    """No budget; the cache itself finds memory short, as when another process takes it."""
    backend, loop = make()
    backend.memory = 3 * 256 * POSITION_NBYTES
    prompts = make_prompts(6, longest=200)
    handles = serve(loop, prompts, max_tokens=300)
    assert finish_all(handles) == alone_tokens(prompts, max_tokens=300)


def test_the_youngest_is_preempted_and_goes_first_again():
    backend, loop = make(memory=4 * 256 * POSITION_NBYTES, eos=())
    old, young, last = serve(loop, [[1] * 20, [2] * 20, [3] * 20], max_tokens=600)
    while len(old.completion.tokens) < 480:
        loop.tick()
    assert len(young.completion.tokens) > 470 and len(loop.scheduler.running) == 2
    assert len(loop.scheduler.waiting) == 1
    while not old.done:
        loop.tick()
        if 500 < len(old.completion.tokens) < 600:
            waiting = [sequence.request.prompt[0] for sequence in loop.scheduler.waiting]
            assert waiting == [2, 3]
    assert len(last.completion.tokens) < 256  # it was set aside first
    prompts = [[2] * 20, [3] * 20]
    assert finish_all([young, last]) == alone_tokens(prompts, max_tokens=600, eos=())


def test_a_request_that_could_never_fit_is_refused_at_once_with_the_numbers():
    backend, loop = make(memory=256 * POSITION_NBYTES)
    sizes = (
        r"the prompt's 300 tokens takes 0.5 MB, and the cache may take 0.3 MB: .* `cache_memory`"
    )
    with pytest.raises(ContextError, match=sizes):
        loop.submit(request([1] * 300))
    assert not backend.events and loop.scheduler.cache.nbytes == 0


def test_the_only_answer_that_cannot_grow_ends_with_a_notice():
    backend, loop = make(memory=256 * POSITION_NBYTES, eos=())
    done = loop.submit(request([1] * 250, max_tokens=100)).finish()
    assert done.finish_reason == "context"
    assert "the KV cache is full" in done.notices[-1]
    assert done.tokens == alone([1] * 250, max_tokens=100, eos=()).tokens[: len(done.tokens)]
    assert len(done.tokens) == 7
    assert loop.submit(request([2] * 9, max_tokens=5)).finish().finish_reason == "length"


def test_a_prompt_beside_the_running_ones_waits_for_memory():
    backend, loop = make(memory=2 * 256 * POSITION_NBYTES, eos=())
    first, second = serve(loop, [[1] * 200, [2] * 200], max_tokens=100)
    third = loop.submit(request([3] * 100, max_tokens=10))
    for _ in range(20):
        loop.tick()
    # two rows of 512 positions do not fit
    assert len(loop.scheduler.running) == 1 and len(loop.scheduler.waiting) == 2
    assert [len(handle.finish().tokens) for handle in (first, second, third)] == [100, 100, 10]


GB = 1 << 30


def test_the_default_budget_is_half_of_what_is_free_and_8_gb():
    for free, budget in (
        (None, None),
        (100 * GB, 8 * 10**9),
        (10 * GB, 5 * GB),
        (GB, GB // 2),
        (400 << 20, 144 << 20),  # 256 MiB stay free
        (1000, 0),
    ):
        backend, loop = make()
        backend.free = free
        assert loop.scheduler.rows.budget == budget


def test_the_default_budget_is_measured_again_when_rows_grow():
    backend, loop = make(eos=())
    backend.free = 2 * GB
    first = loop.submit(request([1] * 20, max_tokens=600))
    loop.tick()
    rows = loop.scheduler.rows
    budgets = {rows.budget}
    assert max(budgets) <= GB
    backend.free = 12 * GB  # another program ended
    while not first.done:
        loop.tick()
        budgets.add(rows.budget)
    assert max(budgets) > 5 * GB
    backend.free = GB  # a smaller half, but there is room for what was promised
    loop.submit(request([2] * 20, max_tokens=5)).finish()
    assert rows.budget > GB // 2 and rows.kept


def test_prefixes_go_when_the_system_is_short_or_after_idle_minutes(monkeypatch):
    backend, loop = make()
    trim = Mock()
    monkeypatch.setattr(machine, "trim_memory", trim)
    backend.free = 2 * GB
    rows = loop.scheduler.rows

    def fill():
        loop.submit(request([1] * 400, max_tokens=5)).finish()
        assert rows.kept

    fill()
    rows.rest()
    assert rows.kept and not trim.called  # neither
    backend.free = 1000
    rows.rest()
    assert not rows.kept
    backend.free = 2 * GB
    fill()
    monkeypatch.setattr("mlx_llama.core.engine.rows.IDLE_SECONDS", -1)
    monkeypatch.setattr("mlx_llama.core.engine.rows.TRIM_BYTES", 100 * POSITION_NBYTES)
    rows.rest()
    assert not rows.kept and trim.call_count == 1


def test_a_chosen_budget_keeps_its_prefixes():
    backend, loop = make(memory=10**9)
    backend.free = 1000
    loop.submit(request([1] * 40, max_tokens=5)).finish()
    loop.scheduler.rows.rest()
    assert loop.scheduler.rows.kept and loop.scheduler.rows.budget == 10**9


def test_a_thread_without_work_looks_after_its_memory(monkeypatch):
    backend, loop = make()
    backend.free = 2 * GB
    loop.start()
    loop.submit(request([1] * 40, max_tokens=5)).finish()
    looked = threading.Event()
    monkeypatch.setattr(loop.scheduler.rows, "rest", looked.set)
    loop.close()
    monkeypatch.setattr("mlx_llama.core.engine.loop.REST_SECONDS", 0.01)
    loop.start()
    assert looked.wait(20)
    loop.close()


@pytest.mark.slow
def test_1000_requests_in_and_out_leave_nothing(runs_ahead):
    backend, loop = make(runs_ahead)
    prompts = make_prompts(20, longest=40)

    def run(number):
        handles = [
            loop.submit(request(prompts[(number + i) % 20], max_tokens=1 + i)) for i in range(5)
        ]
        handles[3].cancel()
        for handle in handles[:3]:
            handle.finish()
        next(handles[4], None)  # and leave

    for number in range(2):
        run(number)
    loop.tick()
    tracemalloc.start()
    after_ten, taken = None, loop.scheduler.cache.nbytes
    for number in range(200):
        run(number)
        backend.clear()
        if number == 10:
            loop.tick()
            gc.collect()
            after_ten = tracemalloc.get_traced_memory()[0]
    loop.tick()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - after_ten
    tracemalloc.stop()
    assert loop.scheduler.cache.nbytes <= taken and grown < 30_000
    assert_idle(loop)


# Prefixes


def test_a_prefix_of_a_finished_or_running_row_is_not_computed_again(runs_ahead):
    backend, loop = make(runs_ahead, eos=())
    system = [token % EOS for token in range(300)]
    first = loop.submit(request([*system, 1, 2, 3], max_tokens=50))
    next(first)
    backend.clear()
    second = loop.submit(request([*system, 4, 5], max_tokens=20))  # from a running row
    done = second.finish()
    assert done.reused_tokens == 300
    assert done.tokens == alone([*system, 4, 5], max_tokens=20, eos=()).tokens
    assert (1, 2) in backend.calls and max(count for _, count in backend.calls) == 2
    first.finish()
    third = loop.submit(request([*system, 1, 2, 3], max_tokens=5)).finish()  # from a finished row
    assert third.reused_tokens == 302 and third.tokens == first.completion.tokens[:5]
    fourth = loop.submit(request([9, *system], max_tokens=5)).finish()
    assert fourth.reused_tokens == 0
    assert fourth.tokens == alone([9, *system], max_tokens=5, eos=()).tokens
    check_rows(loop)


def test_a_system_prompt_shared_by_all_is_computed_once():
    backend, loop = make()
    system = [token % EOS for token in range(400)]
    prompts = [[*system, *prompt] for prompt in make_prompts(20, longest=9)]
    handles = serve(loop, prompts, max_tokens=10)
    assert finish_all(handles) == alone_tokens(prompts, max_tokens=10)
    assert backend.positions < 400 + sum(map(len, prompts)) - 20 * 400 + 20 * 10 + 20
    assert [handle.completion.reused_tokens >= 400 for handle in handles] == [False] + [True] * 19


def test_a_row_that_is_wholly_used_is_taken_over_and_another_one_copied():
    backend, loop = make(eos=())
    done = loop.submit(request([1] * 100, max_tokens=10)).finish()
    follow = [1] * 100 + done.tokens + [2, 3]
    backend.clear()
    again = loop.submit(request(follow, max_tokens=10)).finish()
    assert again.reused_tokens == 109 and loop.scheduler.cache.copied == 0
    assert len(loop.scheduler.rows.kept) == 1
    assert again.tokens == alone(follow, max_tokens=10, eos=()).tokens
    loop.submit(request([1] * 100 + [7], max_tokens=3)).finish()
    assert loop.scheduler.cache.copied == 100 and len(loop.scheduler.rows.kept) == 2
    check_rows(loop)


def test_the_least_recently_used_prefix_goes_first():
    backend, loop = make(memory=3 * 256 * POSITION_NBYTES, eos=())
    a, b, c = ([n] * 20 for n in (1, 2, 3))
    for prompt in (a, b, c):
        loop.submit(request(prompt, max_tokens=3)).finish()
    assert len(loop.scheduler.rows.kept) == 3
    # copies, so b goes
    assert loop.submit(request([*a, 7], max_tokens=3)).finish().reused_tokens == 20
    assert [tokens[0] for tokens in loop.scheduler.rows.kept.values()] == [3, 1, 1]
    assert loop.submit(request(b, max_tokens=3)).finish().reused_tokens == 0
    assert [tokens[0] for tokens in loop.scheduler.rows.kept.values()] == [1, 1, 2]


def test_short_memory_takes_over_a_prefix_that_it_cannot_copy():
    backend, loop = make(memory=256 * POSITION_NBYTES, eos=())
    loop.submit(request([1] * 50, max_tokens=9)).finish()
    done = loop.submit(request([1] * 50 + [2], max_tokens=9)).finish()
    assert done.reused_tokens == 50 and loop.scheduler.cache.copied == 0
    assert done.tokens == alone([1] * 50 + [2], max_tokens=9, eos=()).tokens


def test_dynamic_rope_reuses_nothing_beyond_its_trained_length_and_says_so(runs_ahead):
    model = {"rope": "dynamic", "context": 64}
    how = dict(model=model, eos=(), context=256)
    backend, loop = make(runs_ahead, **how, memory=256 * 2 * POSITION_NBYTES)
    short, long = [1] * 30, [1] * 80

    def wanted(prompt, count):
        return alone(prompt, **how, max_tokens=count).tokens

    loop.submit(request(short, max_tokens=5)).finish()
    done = loop.submit(request([*short, 3], max_tokens=60)).finish()
    assert done.reused_tokens == 30 and done.tokens == wanted([*short, 3], 60)
    assert all(loop.scheduler.cache.lengths[row] <= 64 for row in loop.scheduler.rows.kept)
    done = loop.submit(request(long, max_tokens=5)).finish()
    assert done.reused_tokens == 0 and done.tokens == wanted(long, 5)
    assert "no prefix is reused" in done.notices[-1]
    # Set aside and resumed beyond the trained length
    backend, loop = make(runs_ahead, **how)
    handle, other = serve(loop, [[1] * 50, [2] * 90], max_tokens=40)
    while len(other.completion.tokens) < 20:
        loop.tick()
    loop.scheduler.forget_steps()
    for sequence in list(loop.scheduler.running):
        loop.scheduler.preempt(sequence)
    assert handle.finish().tokens == wanted([1] * 50, 40)
    assert other.finish().tokens == wanted([2] * 90, 40)


def test_an_exported_row_goes_on_elsewhere():
    backend, loop = make(eos=())
    loop.submit(request([1] * 60, max_tokens=9)).finish()
    state = loop.export()
    assert len(state["tokens"]) == 68
    for tokens in ([1] * 20 + [5], [1] * 60):
        part = loop.export(tokens)
        length = len(part["tokens"])
        assert length in (20, 60) and part["keys"].shape == (1, 1, length, 2)
    backend, other = make(eos=())
    other.install(state)
    done = other.submit(request([1] * 60 + [4], max_tokens=5)).finish()
    assert done.reused_tokens == 60
    assert done.tokens == alone([1] * 60 + [4], max_tokens=5, eos=()).tokens
    assert make()[1].export() == {} == loop.export([9, 9])
    check_rows(other)


# Speculation


@pytest.mark.parametrize("period", [0, 3])
@pytest.mark.parametrize("kind", ["prompt", "right model", "wrong model"])
def test_drafts_change_the_number_of_steps_and_nothing_else(kind, runs_ahead, period):
    """Drafting rows beside each other and beside plain ones, with set-asides."""
    model, memory = {"period": period}, 9 * 256 * POSITION_NBYTES
    draft = None if kind == "prompt" else model | {"salt": int(kind == "wrong model")}
    backend, loop = make(runs_ahead, model=model, draft=draft, memory=memory, kept_rows=2)
    prompts = [(prompt * 40)[: 30 + 20 * i] for i, prompt in enumerate(make_prompts(9, longest=6))]
    handles = []
    for i, prompt in enumerate(prompts):
        options = {**MIXED[i % len(MIXED)], "max_tokens": 60}
        speculate = "none" if i % 3 == 0 else "prompt" if kind == "prompt" else "model"
        handle = loop.submit(request(prompt, speculate=speculate, **options))
        handles.append((handle, prompt, options))
    drafted = accepted = 0
    for handle, prompt, options in handles:
        done = handle.finish()
        wanted = alone(prompt, model=model, speculate="none", **options)
        assert_same(done, wanted)
        drafted, accepted = drafted + done.drafted, accepted + done.accepted
        assert done.accepted <= done.drafted
        if done.speculation_ended:
            assert 24 <= done.drafted < 40 and "drafted tokens were right" in done.notices[-1]
    if kind == "right model":
        assert accepted == drafted > 100
    elif kind == "prompt":
        assert accepted > 60 if period else drafted
    elif not period:
        assert any(handle.completion.speculation_ended for handle, *_ in handles)
    check_rows(loop)


@given(
    st.integers(1, 30),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1000, *range(18, 30)]),
)
def test_speculation_alone_saves_reads_and_keeps_the_tokens(
    count, eos, runs_ahead, by_model, context
):
    model, prompt = {"period": 4}, [0, 1, 2, 3] * 3
    how = dict(model=model, eos=(eos,), context=context)
    wanted = alone(prompt, **how, max_tokens=count)
    backend, loop = make(runs_ahead, draft=model if by_model else None, **how)
    speculate = "model" if by_model else "prompt"
    handle = loop.submit(request(prompt, max_tokens=count, speculate=speculate))
    assert list(handle.tokens()) == wanted.tokens
    done = handle.completion
    assert done.text == wanted.text and done.finish_reason == wanted.finish_reason
    assert done.accepted == done.drafted and not done.notices
    assert by_model or done.waits <= len(done.tokens)
    assert sum(backend.read_sizes) == done.read_bytes
    assert backend.events.count("launch") == done.launches + by_model  # the draft model's prompt
    if not by_model:
        steps = 1 + -(-(len(done.tokens) - 1) // 5)
        assert done.launches == done.waits == steps or len(done.tokens) > 6 or eos < 4
    check_rows(loop)


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_a_stop_string_inside_a_verification_ends_there(kind):
    model = {"period": 6}
    for stop in ("cd", "ea", "bcd"):
        backend, loop = make(model=model, eos=(), draft=model if kind == "model" else None)
        prompt = [0, 1, 2, 3, 4, 0]
        how = dict(max_tokens=40, speculate=kind, stop=stop)
        done = loop.submit(request(prompt * 3, **how)).finish()
        wanted = alone(prompt * 3, model=model, eos=(), max_tokens=40, stop=stop)
        assert (done.tokens, done.text, done.stop) == (wanted.tokens, wanted.text, stop)
        check_rows(loop)
        row = next(iter(loop.scheduler.rows.kept))
        assert loop.scheduler.cache.lengths[row] <= 18 + len(done.tokens)


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_an_answer_that_ends_among_its_drafts_leaves_none_of_them(kind, runs_ahead, monkeypatch):
    """It is cancelled, or taking a token fails, after each of its tokens."""
    model, prompt, accepted, take = {"period": 4}, [0, 1, 2, 3] * 3, 0, Sequence.take
    for count, fails in itertools.product(range(15), (False, True)):
        backend, loop = make(
            runs_ahead, model=model, eos=(), draft=model if kind == "model" else None
        )

        def end(sequence, token, *rest, count=count, fails=fails):
            if len(sequence.writer.completion.tokens) == count:
                if fails:
                    raise ToyError("no token")
                sequence.is_cancelled = True
            return take(sequence, token, *rest)

        handle = loop.submit(request(prompt, max_tokens=15, speculate=kind))
        with monkeypatch.context() as patch, contextlib.suppress(ToyError):
            patch.setattr(Sequence, "take", end)
            handle.finish()
        assert handle.completion.tokens == (prompt * 2)[:count]
        accepted += handle.completion.accepted
        check_rows(loop)
        again = loop.submit(request([*prompt, 0, 1, 5], max_tokens=9, speculate=kind)).finish()
        assert again.tokens == alone([*prompt, 0, 1, 5], model=model, eos=(), max_tokens=9).tokens
        check_rows(loop)
    assert accepted > 10


def test_dynamic_rope_is_not_speculated_with_and_says_so():
    how = dict(model={"rope": "dynamic", "context": 64}, eos=(), context=256)
    done = make(**how)[1].submit(request([5, 6] * 20, max_tokens=60, speculate="prompt")).finish()
    assert done.tokens == alone([5, 6] * 20, **how, max_tokens=60).tokens
    assert (done.drafted, done.options["speculate"]) == (0, "none")
    assert any("no speculation: this model's dynamic rope" in notice for notice in done.notices)


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_a_draft_model_reads_long_prompts_in_chunks_and_stops_at_its_trained_length(rope):
    for length in range(50, 70, 3):
        prompt = [token % EOS for token in range(length)]
        backend, loop = make(draft={"context": 64, "rope": rope}, eos=())
        done = loop.submit(request(prompt, max_tokens=30, prefill_step_size=16)).finish()
        assert done.tokens == alone(prompt, max_tokens=30, eos=()).tokens
        assert (done.drafted > 0) == (length < 64) and done.accepted == done.drafted
        assert max(count for _, count in backend.calls) <= 16
        check_rows(loop)


def test_a_draft_model_that_fails_is_not_missed():
    backend, loop = make(draft={"salt": 1})

    def fault(model, tokens, view):
        if model.salt and view.count == 1 and view.spans[0].start > 20:
            raise ToyError("no drafts any more")

    backend.fault = fault
    done = loop.submit(request([1, 2, 3] * 5, max_tokens=40)).finish()
    wanted = alone([1, 2, 3] * 5, max_tokens=40)
    assert done.tokens == wanted.tokens and done.speculation_ended is not None
    is_given_up = "drafted tokens were right" in done.notices[0]
    assert is_given_up or done.notices == ["speculation was switched off: no drafts any more"]


def test_a_verification_that_fails_is_not_missed(runs_ahead):
    """It fails after its tokens were stored."""
    backend, loop = make(runs_ahead, model={"period": 3})

    def late_fault(cache, rows):
        if backend.calls[-1][1] > 1 and cache.lengths[rows[0]] > 20:
            raise ToyError("no verification")

    backend.late_fault = late_fault
    done = loop.submit(request([1, 2, 3] * 4, max_tokens=40, speculate="prompt")).finish()
    assert done.tokens == [1, 2, 3] * 13 + [1]
    assert done.notices == ["speculation was switched off: no verification"] and done.accepted > 0


def test_a_draft_models_row_keeps_its_prefix():
    backend, loop = make(draft={"salt": 0}, eos=())
    done = loop.submit(request([1] * 100, max_tokens=10)).finish()
    backend.clear()
    loop.submit(request([1] * 100 + done.tokens + [5, 6], max_tokens=1)).finish()
    assert backend.positions < 20


# Failures


@pytest.mark.parametrize("where", ["step", "late", "prompt"])
def test_a_step_that_fails_ends_only_its_requests(runs_ahead, where):
    backend, loop = make(runs_ahead, eos=())
    prompts = make_prompts(5, longest=30)
    prompts[2] = [48] * 12  # the bad one
    handles = serve(loop, prompts, max_tokens=20)
    failures = []

    def is_bad(row):
        return loop.scheduler.cache.tokens[row][:12].tolist() == [48] * 12

    def fail(count):
        failures.append(count)
        raise ToyError("row 2 is bad")

    def fault(model, tokens, view):
        bad = [span for span in view.spans if is_bad(span.row)]
        is_prompt = where == "prompt" and tokens[0].tolist() == [48] * 12
        if is_prompt or (where == "step" and bad and bad[0].start >= 16):
            fail(view.batch)

    def late_fault(cache, rows):
        if any(cache.lengths[row] >= 17 and is_bad(row) for row in rows):
            fail(len(rows))

    if where == "late":
        backend.late_fault = late_fault
    else:
        backend.fault = fault
    for i, (handle, prompt) in enumerate(zip(handles, prompts)):
        if i == 2:
            with pytest.raises(ToyError, match="row 2 is bad"):
                handle.finish()
            assert handle.completion.finish_reason == "error"
            assert handle.completion.error == "row 2 is bad"
            wanted = alone(prompt, max_tokens=20, eos=()).tokens
            assert handle.completion.tokens == wanted[: len(handle.completion.tokens)]
            assert where == "prompt" or len(handle.completion.tokens) >= 4
        else:
            assert handle.finish().tokens == alone(prompt, max_tokens=20, eos=()).tokens
    assert failures and (where == "prompt" or failures[0] > 1)
    check_rows(loop)
    assert loop.submit(request([48] * 3, max_tokens=4)).finish().finish_reason == "length"


@given(
    st.booleans(),
    st.sampled_from(["fault", "late_fault", "read_fault"]),
    st.sets(st.integers(1, 60), max_size=6),
    st.sampled_from(["plain", "drafts", "rules"]),
)
def test_a_failure_that_passes_costs_a_batch_nothing(runs_ahead, where, calls, kind):
    """The n-th calls fail. Rows computed together are computed again; a row alone ends with the
    error.
    """
    model = {"period": 3 if kind == "drafts" else 0}
    shared = {"max_tokens": 15, "speculate": "prompt" if kind == "drafts" else "none"}
    all_options = [shared | (RULED[i] if kind == "rules" else {}) for i in range(4)]
    backend, loop = make(runs_ahead, model=model)
    prompts = [(prompt * 5)[:20] for prompt in make_prompts(4, longest=5)]
    handles = [
        loop.submit(request(prompt, prefill_step_size=9, **options))
        for prompt, options in zip(prompts, all_options)
    ]
    count = [0]

    def fail(*_):
        count[0] += 1
        if count[0] in calls:
            raise ToyError("now and then")

    setattr(backend, where, fail)
    failed = 0
    for handle, prompt, options in zip(handles, prompts, all_options):
        wanted = alone(prompt, model=model, **options).tokens
        try:
            assert handle.finish().tokens == wanted
        except ToyError:
            failed += 1
            assert handle.completion.tokens == wanted[: len(handle.completion.tokens)]
    assert failed <= len(calls)
    check_rows(loop)


def test_a_defect_of_the_loop_ends_the_running_requests_and_not_the_loop(monkeypatch):
    backend, loop = make()
    handle = loop.submit(request(PROMPT, max_tokens=9))
    next(handle)
    with monkeypatch.context() as patch:
        patch.setattr(loop.scheduler, "_launch", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            handle.finish()
    again = loop.submit(request(PROMPT, max_tokens=9)).finish()
    assert again.tokens == alone(PROMPT, max_tokens=9).tokens
    check_rows(loop)


# Each call of the backend


CALLS = [
    (ToyModel, "forward step verify"),
    (ToyCache, "reserve copy_prefix trim reset"),
    (ToyBackend, "launch read sampling_batch"),
]


def serve_six(runs_ahead: bool, error: Exception | None = None, at: int = 0):
    """Six requests, the last two after the first ones ran, in memory for four; the call of number
    `at` raises. Returns the number of calls, the handles and the loop."""
    count = 0
    memory = 5 * 256 * POSITION_NBYTES
    _, loop = make(runs_ahead, memory=memory, max_rows=5, model={"period": 7}, eos=())
    shared = [*range(40)] * 6  # storage grows at 256 positions, beyond what memory has for all
    prompts = [[*shared, *range(1, 9 + i)] for i in range(4)] + [[5] * 4, [*shared, 1, 2, 3]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "PORTION", 1)

        def counted(call):
            def run(*args, **named):
                nonlocal count
                count += 1
                if count == at:
                    raise error
                return call(*args, **named)

            return run

        handles = []
        for number, prompt in enumerate(prompts):
            options = MIXED[number % 5] | {"max_tokens": 16 + 9 * (number == 1)}
            options |= {"prefill_step_size": 128, "speculate": "prompt" if number == 2 else "none"}
            handles.append(loop.submit(request(prompt, **options)))
            if number == 0:
                for owner, names in CALLS:
                    for name in names.split():
                        patch.setattr(owner, name, counted(getattr(owner, name)))
            if number == 3:
                for _ in range(12):
                    loop.tick()
        for _ in range(1000):
            if not loop.tick() and not loop.scheduler.waiting:
                return count, handles, loop
    pytest.fail("the loop does not end")


@pytest.mark.slow_for("*-2", "*-3")
@pytest.mark.parametrize("first", [1, 2, 3])  # every third call; 2 and 3 are slow tests
@pytest.mark.parametrize("error", [ToyError("broken"), MemoryError()], ids=["error", "memory"])
def test_a_call_that_fails_ends_at_most_the_request_that_it_concerns(error, first, runs_ahead):
    count, handles, loop = serve_six(runs_ahead)
    wanted = [handle.completion.tokens for handle in handles]
    assert loop.preemptions and all(len(tokens) in (16, 25) for tokens in wanted)
    ended = 0
    for at in range(first, count + 1, 3):
        _, handles, loop = serve_six(runs_ahead, error, at)
        failed = [handle for handle in handles if handle.completion.error]
        assert len(failed) <= 1 and all(handle.done for handle in handles), at
        for handle, tokens in zip(handles, wanted):
            assert handle.completion.tokens == tokens or handle in failed, at
        check_rows(loop)
        ended += len(failed)
    assert ended < count / 24 if isinstance(error, MemoryError) else ended


# Bad input


@pytest.mark.parametrize(
    "prompt, options, error, message",
    [
        ([], {}, ContextError, "the prompt is empty"),
        ([1] * 1000, {}, ContextError, "the prompt has 1000 tokens and the context holds 1000"),
        ([1, 50], {}, ContextError, "token id 50 is outside the vocabulary of 50"),
        ([-1, 1], {}, ContextError, "token id -1 is outside"),
        ([1], {"logit_bias": {50: 1.0}}, OptionsError, "token id 50 is outside the vocabulary"),
        ([1], {"speculate": "model"}, OptionsError, "'model' needs a draft model"),
        ([1], {"stop": "x", "text": False}, OptionsError, "option `stop`: needs text"),
    ],
)
def test_bad_requests_are_refused_at_once_and_others_go_on(prompt, options, error, message):
    backend, loop = make()
    running = loop.submit(request(PROMPT, max_tokens=9))
    next(running)
    with pytest.raises(error, match=message):
        loop.submit(request(prompt, **options))
    assert running.finish().tokens == alone(PROMPT, max_tokens=9).tokens
    with pytest.raises(OptionsError, match="no tokenizer"):
        make(text=False)[1].submit(request([1]))


# Real models


@pytest.mark.slow_for("cuda")
def test_greedy_tokens_are_those_of_transformers(toy, where):
    ours = load(toy, **where)
    peer = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    prompts = [[1, 50, 60, 70], [1], [7, 7, 7], list(range(3, 90))]
    together = ours.batch(prompts, max_tokens=40, prefill_step_size=32)
    for prompt, in_company in zip(prompts, together):
        with torch.no_grad():
            how = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=2)
            wanted = peer.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        got = ours.generate(prompt, max_tokens=40, prefill_step_size=32)
        assert got.tokens == wanted == in_company.tokens
        assert got.finish_reason == ("eos" if wanted[-1] == 2 else "length")
