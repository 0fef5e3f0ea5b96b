"""Answers that repeat themselves are ended at the option's length, in the same tokens however they
are computed; structured answers are not.
"""

from __future__ import annotations

import re

import pytest
from cases.engine import alone, make, request
from hypothesis import given, strategies as st
from making import make_checkpoint

from mlx_llama import load
from mlx_llama.core.answers.stops import MAX_PERIOD, MIN_TIMES, find_period

LIMIT = 40


def judge(tokens: list[int], limit: int) -> bool:
    """Python's regular expressions: a passage, repeated, and the beginning of it."""
    text = "".join(chr(0x100 + token) for token in reversed(tokens))
    for period in range(1, MAX_PERIOD + 1):
        count = max(limit, MIN_TIMES * period)
        times, rest = divmod(count, period)
        pattern = rf"(?s)((.{{{rest}}}).{{{period - rest}}})\1{{{times - 1}}}\2"
        if count <= len(text) and re.match(pattern, text):
            return True
    return False


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("loops") / "toy", max_position_embeddings=512)
    return load(folder, backend="cpu")


@given(
    st.lists(st.integers(0, 3), max_size=9),
    st.lists(st.integers(0, 3), min_size=1, max_size=MAX_PERIOD + 6),
    st.integers(1, 300),
    st.integers(1, 60),
)
def test_a_repetition_is_found_where_regular_expressions_find_one(start, passage, count, limit):
    tokens = [*start, *(passage * count)[:count]]
    found = find_period(tokens[:-1], tokens[-1], limit)
    assert bool(found) == judge(tokens, limit)
    if found:
        assert tokens[-limit:][found:] == tokens[-limit:][:-found] or limit <= found


@pytest.mark.parametrize("period", [1, 3, 10, MAX_PERIOD])
def test_an_answer_is_ended_when_its_repetition_has_the_length(period, runs_ahead):
    prompt = [1 + i % 40 + i // 40 for i in range(period)]
    model, length = {"period": period}, max(LIMIT, MIN_TIMES * period)
    done = alone(prompt, model=model, max_tokens=400, repetition_limit=LIMIT)
    assert (done.finish_reason, done.repeated, len(done.tokens)) == ("length", period, length)
    assert done.receipt()["repeated"] == period
    assert "`repetition_limit` 0 lets it go on" in done.notices[-1]
    whole = alone(prompt, model=model, max_tokens=400)
    assert (len(whole.tokens), whole.repeated, whole.notices) == (400, 0, [])
    assert done.tokens == whole.tokens[:length] and whole.text.startswith(done.text)
    # however it is computed, and in company
    _, loop = make(runs_ahead, model=model)
    asked = dict(max_tokens=400, repetition_limit=LIMIT)
    handles = [loop.submit(request(prompt, **asked, **more)) for more in ({}, {"logprobs": 2})]
    handles.append(loop.submit(request(prompt, **asked, speculate="prompt")))
    handles.append(loop.submit(request(prompt, **asked | {"repetition_limit": 2 * LIMIT})))
    for handle in handles[:3]:
        assert handle.finish().tokens == done.tokens and handle.completion.repeated == period
    assert len(handles[3].finish().tokens) == max(2 * LIMIT, MIN_TIMES * period)


def test_longer_passages_and_ends_before_are_no_repetition():
    prompt = [1 + i % 40 + i // 40 for i in range(MAX_PERIOD + 1)]
    long = alone(prompt, model={"period": MAX_PERIOD + 1}, max_tokens=400, repetition_limit=LIMIT)
    assert len(long.tokens) == 400 and not long.repeated
    first = alone([3], model={"period": 1}, max_tokens=LIMIT, repetition_limit=LIMIT)
    assert first.finish_reason == "length" and not first.repeated and not first.notices


@pytest.mark.parametrize("rule", [{"regex": "[a-z]+"}, {"grammar": "start: /[a-z]+/"}], ids=str)
def test_structured_answers_may_repeat_themselves(rule):
    done = alone([3], model={"period": 1}, max_tokens=90, repetition_limit=LIMIT, **rule)
    assert len(done.tokens) == 90 and not done.repeated


def loop_of(llm) -> dict:
    """Options with which a model repeats a token."""
    return {"logit_bias": {llm.encode("a")[-1]: 1e6}, "max_tokens": 90, "repetition_limit": LIMIT}


def test_a_conversation_resumes_the_answer(llm):
    chat = llm.chat(**loop_of(llm))
    done = chat.send("hi")
    assert done.repeated == 1 and len(done.tokens) == LIMIT
    more = chat.resume().finish()
    assert more.repeated == 1 and len(more.tokens) == LIMIT
    assert chat.messages[-1]["content"] == more.text and len(more.text) > len(done.text)
    assert len(chat.resume(repetition_limit=0).finish().tokens) == 90


def test_json_and_calls_of_tools_may_repeat_themselves(llm):
    def call(number: int) -> int:
        """Call it."""
        return number

    question = [{"role": "user", "content": "hi"}]
    numbers = {"type": "array", "items": {"const": 0}, "minItems": 60}
    done = llm.generate(question, schema=numbers, max_tokens=150, repetition_limit=LIMIT)
    places = range(1, len(done.tokens))
    assert any(find_period(done.tokens[:i], done.tokens[i], LIMIT) for i in places)
    assert not done.repeated
    options = loop_of(llm)
    assert llm.generate(question, **options).repeated == 1
    assert llm.respond(question, [call], "none", **options).finish().repeated == 1
    assert not llm.respond(question, [call], **options | {"max_tokens": 60}).finish().repeated
