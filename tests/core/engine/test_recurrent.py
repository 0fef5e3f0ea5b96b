"""Models with a recurrent state, which can be cut at checkpoints alone: an answer is the one that a
loop gives to the request alone, whatever was reused, drafted, preempted or tried again.
"""

import numpy as np
import pytest
from cases.engine import POSITION_NBYTES, VOCABULARY, ToyError, alone, make, request

from mlx_llama.core.backends.positions import CHECKPOINT

MODEL = dict(is_recurrent=True)
RNG = np.random.default_rng(0)


def text(count):
    return RNG.integers(0, VOCABULARY - 1, count).tolist()


def answers(loop, prompts, **options):
    handles = [loop.submit(request(prompt, **options)) for prompt in prompts]
    return [handle.finish().tokens for handle in handles]


def judged(prompts, **options):
    return [alone(prompt, model=MODEL, **options).tokens for prompt in prompts]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(runs_ahead):
    prompts = [text(count) for count in (3, 700, 41, 256, 257, 1)]
    _, loop = make(runs_ahead, model=MODEL)
    assert answers(loop, prompts, max_tokens=30) == judged(prompts, max_tokens=30)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_conversation_computes_what_follows_its_last_checkpoint(runs_ahead):
    """A turn that repeats the text goes on from its end, or, where a surplus step ran ahead, from
    the end of the prompt; another answer from the end of the prompt; an edit from a multiple."""
    backend, loop = make(runs_ahead, model=MODEL, eos=())
    prompt = text(600)
    (answer,) = answers(loop, [prompt], max_tokens=20)
    turns = [
        (prompt + answer + text(10), 10 + (21 if runs_ahead else 1)),
        (prompt + text(10), 10),
        (prompt[:530] + text(10), 540 - 2 * CHECKPOINT),
    ]
    for turn, computed in turns:
        backend.clear()
        assert answers(loop, [turn], max_tokens=1) == judged([turn], max_tokens=1, eos=())
        assert backend.positions <= computed + runs_ahead


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("period", [0, 3])
def test_drafts_change_no_token(runs_ahead, period):
    model, prompt = MODEL | {"period": period}, [1, 2, 3] * 30 + text(3) + [1, 2, 3] * 4
    backend, loop = make(runs_ahead, model=model, eos=())
    done = loop.submit(request(prompt, max_tokens=60, speculate="prompt")).finish()
    assert done.tokens == alone(prompt, model=model, eos=(), max_tokens=60).tokens
    assert not period or done.accepted > 40


def test_a_draft_model_with_a_recurrent_state():
    backend, loop = make(model=MODEL, draft=MODEL | {"salt": 1}, eos=())
    prompt = text(300)
    done = loop.submit(request(prompt, max_tokens=40, speculate="model")).finish()
    assert done.tokens == alone(prompt, model=MODEL, eos=(), max_tokens=40).tokens


def test_preempted_requests_end_as_alone():
    prompts = [text(count) for count in (300, 280, 260, 300)]
    _, loop = make(model=MODEL, eos=(), memory=1500 * POSITION_NBYTES)
    assert answers(loop, prompts, max_tokens=300) == judged(prompts, max_tokens=300, eos=())
    assert loop.preemptions


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_failure_that_passes_costs_nothing(runs_ahead):
    backend, loop = make(runs_ahead, model=MODEL, eos=())
    calls = []

    def fail_sometimes(cache, rows):
        calls.append(rows)
        if len(rows) > 1 and len(calls) % 7 == 3:
            raise ToyError("broken")

    backend.late_fault = fail_sometimes
    prompts = [text(count) for count in (30, 280, 26)]
    assert answers(loop, prompts, max_tokens=40) == judged(prompts, max_tokens=40, eos=())


def test_an_exported_row_goes_on_elsewhere():
    _, loop = make(model=MODEL, eos=())
    prompt = text(500)
    (answer,) = answers(loop, [prompt], max_tokens=20)
    state = loop.scheduler.rows.export(None, 0)
    whole = (prompt + answer)[: len(state["tokens"])]
    assert len(whole) > 500 and state["tokens"].tolist() == whole
    part = loop.scheduler.rows.export(whole[:400], 0)  # as far as a checkpoint
    assert len(part["tokens"]) == CHECKPOINT
    for saved in (state, part):
        backend, other = make(model=MODEL, eos=())
        other.scheduler.rows.install(saved)
        turn = prompt + answer + text(5)
        assert answers(other, [turn], max_tokens=5) == judged([turn], max_tokens=5, eos=())
        assert backend.positions <= len(turn) - len(saved["tokens"]) + 5


def test_checkpoints_are_few_and_counted():
    _, loop = make(model=MODEL, eos=(), context=9000)
    answers(loop, [text(8000)], max_tokens=3)
    cache = loop.scheduler.cache
    (row,) = loop.scheduler.rows.kept
    kept = cache.checkpoints[row]
    assert 0 < len(kept) <= 8 and max(kept) == 8000 and 31 * CHECKPOINT in kept
    assert cache.taken(row) == cache.allocated[row] * POSITION_NBYTES + 8 * (len(kept) + 2)
