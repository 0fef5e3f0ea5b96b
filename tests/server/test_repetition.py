"""An answer that repeats itself is ended in each API that asks for it, as at a limit of tokens."""

from __future__ import annotations

import pytest
from cases.jobs import lines_of

from .conftest import QUESTION

LOOP = {"logit_bias": {"300": 99}, "max_tokens": 60}
ASKS = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": QUESTION},
    "/v1/responses": {"input": "Who are you?"},
    "/completion": {"prompt": "a"},
    "/api/chat": {"messages": QUESTION, "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
}


def end_of(done: dict) -> tuple[object, int]:
    """How an answer ended, and its number of tokens."""
    usage = done.get("usage", {})
    choice = done.get("choices", [{}])[0]
    details = done.get("incomplete_details") or {}
    names = "stop_reason", "done_reason", "stop_type"
    reason = choice.get("finish_reason") or details.get("reason")
    reason = reason or next(done[name] for name in names if name in done)
    counts = usage.get("completion_tokens"), usage.get("output_tokens")
    more = done.get("eval_count"), done.get("tokens_predicted")
    return reason, next(count for count in (*counts, *more) if count)


@pytest.mark.parametrize("path", ASKS)
def test_an_answer_that_repeats_itself_ends_as_at_a_limit(path, lenient):
    at_limit = end_of(lenient.ask(path, **ASKS[path], **LOOP))
    assert at_limit[1] == 60  # off unless it is asked for
    ended = end_of(lenient.ask(path, **ASKS[path], **LOOP, repetition_limit=40))
    assert ended == (at_limit[0], 40)


def test_a_job_tells_the_length_of_the_passage(lenient):
    job = lenient.ask("/v1/jobs", messages=QUESTION, **LOOP, repetition_limit=40)
    *_, end = lines_of(lenient, job)
    assert (end["stop_reason"], end["tokens_out"], end["repeated"]) == ("MAX_TOKENS", 40, 1)
    job = lenient.ask("/v1/jobs", messages=QUESTION, **LOOP)
    assert "repeated" not in lines_of(lenient, job)[-1]
