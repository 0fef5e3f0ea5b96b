"""Models whose layers keep what their windows see: an answer is the one that a loop gives to the
request alone, whatever was reused, drafted, preempted or tried again.
"""

import numpy as np
import pytest
from cases.engine import POSITION_NBYTES, VOCABULARY, ToyError, alone, make, request

from mlx_llama.core.backends.positions import SLACK, Positions

MODEL = dict(window=20)
RNG = np.random.default_rng(0)


def text(count):
    return RNG.integers(0, VOCABULARY - 1, count).tolist()


def answers(loop, prompts, **options):
    handles = [loop.submit(request(prompt, **options)) for prompt in prompts]
    return [handle.finish().tokens for handle in handles]


def judged(prompts, **options):
    """By a cache that keeps all positions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Positions, "slide", lambda self, span: None)
        return [alone(prompt, model=MODEL, **options).tokens for prompt in prompts]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_an_answer_does_not_depend_on_the_rest_of_the_batch(runs_ahead):
    prompts = [text(count) for count in (3, 700, 41, 256, 257, 1)]
    _, loop = make(runs_ahead, model=MODEL, eos=())
    assert answers(loop, prompts, max_tokens=30) == judged(prompts, max_tokens=30, eos=())


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_conversation_computes_what_its_windows_lack(runs_ahead):
    """A turn that repeats the text goes on from its end; one that was cut by less than SLACK, from
    there; another answer, from the end of the prompt; other texts, from the start.
    """
    backend, loop = make(runs_ahead, model=MODEL, eos=(), context=3000)
    prompt = text(600)
    (answer,) = answers(loop, [prompt], max_tokens=700)
    (row,) = loop.scheduler.rows.kept
    assert loop.scheduler.cache.oldest[row] > 600
    end = 1300 - SLACK // 2
    turns = [
        (prompt + answer + text(10), 11),
        ((prompt + answer)[:end] + text(10), 10),
        (prompt + answer[:50] + text(10), 60),
        (prompt[:400] + text(10), 410),
    ]
    for turn, computed in turns:
        backend.clear()
        assert answers(loop, [turn], max_tokens=1) == judged(
            [turn], max_tokens=1, eos=(), context=3000
        )
        assert backend.positions <= computed + runs_ahead


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_drafts_change_no_token(runs_ahead):
    model, prompt = MODEL | {"period": 3}, [1, 2, 3] * 100 + text(3) + [1, 2, 3] * 4
    backend, loop = make(runs_ahead, model=model, eos=())
    done = loop.submit(request(prompt, max_tokens=400, speculate="prompt")).finish()
    assert done.tokens == alone(prompt, model=model, eos=(), max_tokens=400).tokens
    assert done.accepted > 200


def test_a_draft_model_with_windows():
    backend, loop = make(model=MODEL, draft=MODEL | {"salt": 1}, eos=())
    prompt = text(400)
    done = loop.submit(request(prompt, max_tokens=40, speculate="model")).finish()
    assert [done.tokens] == judged([prompt], eos=(), max_tokens=40)


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
    prompts = [text(count) for count in (30, 480, 326)]
    assert answers(loop, prompts, max_tokens=40) == judged(prompts, max_tokens=40, eos=())


def test_an_exported_row_goes_on_elsewhere():
    _, loop = make(model=MODEL, eos=(), context=3000)
    prompt = text(600)
    (answer,) = answers(loop, [prompt], max_tokens=700)
    state = loop.scheduler.rows.export(None, 0)
    whole = (prompt + answer)[: len(state["tokens"])]
    assert len(whole) > 1290 and state["tokens"].tolist() == whole and state["keys"].shape[2] == 19
    part = loop.scheduler.rows.export(whole[:700], 0)  # as far as the end of the prompt
    assert len(part["tokens"]) == 600
    for saved in (state, part):
        backend, other = make(model=MODEL, eos=(), context=3000)
        other.scheduler.rows.install(saved)
        turn = prompt + answer + text(5)
        wanted = judged([turn], max_tokens=400, eos=(), context=3000)
        assert answers(other, [turn], max_tokens=400) == wanted
        assert backend.positions <= len(turn) - len(saved["tokens"]) + 400
