"""Rows with a grammar, and rows with log-probabilities, in the scheduler: alone, in a batch, short
of memory, with faults.
"""

from __future__ import annotations

import json
import random
import re
from unittest.mock import Mock

import numpy as np
import pytest
import regex
import torch
from cases.engine import (
    EOS,
    LETTERS,
    VOCABULARY,
    alone,
    check_rows,
    letter,
    make,
    make_prompts,
    request,
)
from pydantic import BaseModel

from mlx_llama import load
from mlx_llama.core.answers import grammar
from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import IncompleteAnswerError, OptionsError
from mlx_llama.core.options import resolve

PATTERNS = [
    "(once|twice)uponatime",
    "[a-f]{3}forced(x|y)z",
    "a+b",
    "startofalongforcedstretchwithoutchoices",
    "[A-W]{1,4}(end|fin)",
    "(abc){2,3}",
    "q",
]


def greedy(prompt, pattern, runs=1000):
    """The judge: the likeliest letter that keeps a partial match by the package regex, one position
    after the other.
    """
    backend, loop = make()
    model, cache = loop.engine.model, loop.engine.model.make_cache(1000)
    logits, text = model.forward(np.array([prompt], np.int32), 0, cache), ""
    for _ in range(runs):
        scores = logits[0][-1].copy()
        for token in range(VOCABULARY):
            goes_on = token != EOS and regex.fullmatch(pattern, text + letter(token), partial=True)
            ends = token == EOS and regex.fullmatch(pattern, text)
            scores[token] = scores[token] if goes_on or ends else -np.inf
        token = int(scores.argmax())
        if token == EOS:
            return text
        text += letter(token)
        if not any(regex.fullmatch(pattern, text + more, partial=True) for more in LETTERS[:-1]):
            return text
        logits = model.forward(np.array([[token]], np.int32), cache.length, cache)
    raise AssertionError("the judge found no end")


# Alone


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_answers_are_the_likeliest_that_match(pattern, runs_ahead):
    for prompt in make_prompts(5, seed=3):
        backend, loop = make(runs_ahead)
        done = loop.submit(request(prompt, regex=pattern)).finish()
        assert (done.text, done.finish_reason) == (greedy(prompt, pattern), "eos")
        assert re.fullmatch(pattern, done.text)
        check_rows(loop)


def test_a_forced_stretch_is_one_step(runs_ahead):
    backend, loop = make(runs_ahead)
    done = loop.submit(request([1, 2, 3], regex="[ab]thisisforced[cd]andthis")).finish()
    # The prompt with the first letter, the stretch with the choice after it; what follows that
    # needs no step at all.
    assert backend.calls == [(1, 3), (1, 13)] and backend.events == ["launch", "read"] * 2
    assert (done.launches, done.waits, len(done.tokens)) == (2, 2, 21)
    assert re.fullmatch("[ab]thisisforced[cd]andthis", done.text)
    # The row stays as a prefix, as far as it was computed.
    again = loop.submit(request([1, 2, 3, *done.tokens, 5], max_tokens=1)).finish()
    assert again.reused_tokens == 3 + 13
    assert again.tokens == alone([1, 2, 3, *done.tokens, 5], max_tokens=1).tokens


def test_a_long_stretch_is_computed_in_chunks():
    text = "".join(random.Random(0).choices(LETTERS[:-1], k=700))
    backend, loop = make()
    done = loop.submit(request([1], regex=text + "[ab]" + "c", max_tokens=900)).finish()
    assert done.text[:700] == text and done.text[700] in "ab" and done.text[701:] == "c"
    assert backend.calls == [(1, 1), (1, 512), (1, 188)]
    assert done.text == greedy([1], text + "[ab]c")


@pytest.mark.parametrize("limit", [1, 3, 8, 12, 13, 14])
def test_an_answer_that_is_cut_says_so_and_is_not_parsed(limit):
    pattern = "(one|two)forced[xy]abc"
    done = make()[1].submit(request([1], regex=pattern, max_tokens=limit)).finish()
    whole = greedy([1], pattern)
    assert done.text == whole[:limit] and len(done.tokens) == min(limit, 13)
    assert done.finish_reason == ("length" if limit < 13 else "eos")


def test_a_stop_string_ends_a_forced_stretch():
    done = make()[1].submit(request([1], regex="[ab]thisisforced", stop="isf")).finish()
    assert done.text[1:] == "this" and done.finish_reason == "stop" and done.stop == "isf"


# Batches


def test_rows_with_grammars_share_steps_and_do_not_delay_others():
    """On a device that works by itself: others run ahead, one step each a tick; those with a
    grammar share theirs.
    """
    backend, loop = make(True)
    never = {"logit_bias": {EOS: -1000}}
    free = [loop.submit(request([i], max_tokens=40, **never)) for i in range(3)]
    bound = [loop.submit(request([i], regex="[a-z]{40}", max_tokens=40)) for i in range(3, 6)]
    for _ in range(12):
        loop.tick()
    backend.clear()
    for _ in range(10):
        loop.tick()
    assert backend.calls == [(3, 1)] * 20 and backend.events.count("read") == 20
    assert all(len(handle.finish().tokens) == 40 for handle in [*free, *bound])


@pytest.mark.slow_for("True")
def test_a_request_that_is_preempted_goes_on_in_its_grammar(runs_ahead):
    pattern = "[a-z]{20}forced[A-F]{450}tail[xy][A-F]{60}"
    prompts = make_prompts(4, seed=2, longest=40)
    expected = [greedy(prompt, pattern) for prompt in prompts]
    backend, loop = make(runs_ahead, memory=1_100_000)
    handles = [loop.submit(request(prompt, regex=pattern, max_tokens=700)) for prompt in prompts]
    assert [handle.finish().text for handle in handles] == expected
    assert loop.preemptions
    check_rows(loop)


# Failures


def test_a_rule_that_cannot_be_enforced_is_refused_before_anything_is_queued():
    backend, loop = make()
    for options, reason in (
        ({"regex": "(?=a)"}, "look-around"),
        ({"schema": {"not": {}}}, "Unimplemented"),
        ({"regex": "é"}, "no text"),
    ):
        with pytest.raises(OptionsError, match=f"cannot be enforced: .*{reason}"):
            loop.submit(request([1], **options))
    with pytest.raises(OptionsError, match="cannot be enforced: .*unknown name"):
        loop.submit(request([1], rule=Rule("tools", "start: missing")))
    assert not loop.tick() and backend.positions == 0
    with pytest.raises(OptionsError, match="need a model with a tokenizer"):
        make(text=False)[1].submit(request([1], text=False, regex="a"))


def test_a_request_compiles_its_rule_once_and_never_beyond_its_time(llm, monkeypatch):
    compiled, build = [], grammar.Grammars._build
    check_time = Mock(wraps=grammar.check_rule)

    def note_build(*args):
        compiled.append(args[1])
        return build(*args)

    monkeypatch.setattr(grammar.Grammars, "_build", note_build)
    monkeypatch.setattr(grammar, "check_rule", check_time)
    for prompt, pattern in (("Once", "[ab]{3}"), ([{"role": "user", "content": "x"}], "[cd]{3}")):
        compiled.clear()
        assert re.fullmatch(pattern, llm.generate(prompt, regex=pattern).text.strip())
        # the caller is trusted
        assert [rule.text for rule in compiled] == [pattern]
        check_time.assert_not_called()
    slow = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 60)]}
    asked = Request(llm.encode("Once"), resolve({"schema": slow}), compile_seconds=0.3)
    said = "^option `schema`: cannot be enforced: it cannot be compiled within 0.3 s: [^\n]*$"
    for _ in range(2):
        with pytest.raises(OptionsError, match=said):
            llm.loop.submit(asked)
    assert [call.args[-1] for call in check_time.call_args_list] == [0.3, 0.3]
    assert len(compiled) == 1


def test_a_grammar_that_grows_too_complex_ends_only_its_own_request(monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "max_lexer_states", 40)
    backend, loop = make()
    options = dict(regex="[a-f]*a([a-f]{12})[x-z]", temperature=1.0, max_tokens=300)
    bad = loop.submit(request([1], **options))
    good = loop.submit(request([2], regex="(once|twice)uponatime"))
    with pytest.raises(OptionsError, match="became too complex after [0-9]+ tokens"):
        bad.finish()
    assert bad.completion.finish_reason == "error"
    assert good.finish().text == greedy([2], "(once|twice)uponatime")
    check_rows(loop)


def test_speculation_is_off_with_a_notice_where_it_was_asked_for():
    for options in ({"regex": "abc[de]"}, {"logprobs": 1}):
        asked = request([1, 2, 3], speculate="prompt", max_tokens=5, **options)
        done = make()[1].submit(asked).finish()
        assert done.options["speculate"] == "none"
        assert any("no speculation" in notice for notice in done.notices)
    assert make()[1].submit(request([1], regex="abc[de]")).finish().notices == []


# Log-probabilities


def log_softmax(scores):
    return torch.log_softmax(torch.tensor(np.asarray(scores), dtype=torch.float64), -1).numpy()


def test_log_probabilities_are_of_the_models_own_logits():
    """Logprobs are of the raw logits, before penalties, biases, filters and grammars; one read a
    step.
    """
    for runs_ahead in (False, True):
        backend, loop = make(runs_ahead)
        options = dict(logit_bias={3: 5.0}, temperature=0.7, presence_penalty=1.5)
        options["regex"] = "[a-z]{2}for[a-z]"
        done = loop.submit(request([1, 2], logprobs=3, **options)).finish()
        assert backend.events.count("read") == 6 and done.tokens == alone([1, 2], **options).tokens
        model, text = loop.engine.model, [1, 2]
        for token in done.tokens:
            logits = model.forward(np.array([text]), 0, model.make_cache(50))[0][-1]
            expected = log_softmax(logits.astype(np.float32))
            assert token.logprobs.logprob == pytest.approx(expected[token], abs=1e-5)
            ids = np.argsort(-expected, kind="stable")[:3]
            assert [id for id, _ in token.logprobs.top] == ids.tolist()
            values = [value for _, value in token.logprobs.top]
            assert values == pytest.approx(expected[ids], abs=1e-5)
            text.append(int(token))
        receipt = json.loads(json.dumps(done.receipt()))
        assert receipt["logprobs"][0][0] == done.tokens[0].logprobs.logprob


# On a real model


class Person(BaseModel):
    name: str
    age: int


def test_a_pydantic_model_is_parsed(llm):
    people = [
        llm.generate("x", schema=Person, max_tokens=400, temperature=1.0, seed=seed, logit_bias={})
        for seed in range(6)
    ]
    parsed = [answer.parsed for answer in people if answer.finish_reason == "eos"]
    assert parsed and all(isinstance(answer, Person) for answer in parsed)
    assert all(answer.text[:10] == '{"name": "' for answer in people)
    assert "schema" in people[0].receipt()["options"] and json.dumps(people[0].receipt())


def test_a_conversation_may_have_a_schema_which_its_file_keeps(llm, tmp_path):
    chat = llm.chat(schema={"enum": ["red", "green", "dark blue"]}, max_tokens=30)
    assert chat.send("colour?").parsed in ("red", "green", "dark blue")
    other = llm.chat(schema=Person, temperature=1.0, seed=1)
    with pytest.raises(IncompleteAnswerError, match="reached `max_tokens` after 3 tokens"):
        print(other.send("who?", max_tokens=3).parsed)
    chat.save(tmp_path / "session.json")
    again = llm.chat()
    assert again.load(tmp_path / "session.json") == []
    assert again.send("another?").parsed in ("red", "green", "dark blue")
    with pytest.raises(OptionsError, match="cannot be enforced"):
        llm.chat(regex="(?=a)")
    with pytest.raises(OptionsError, match="schema is given too"):
        chat.send("x", regex="a")


def test_the_cpu_backends_log_probabilities_are_torchs(llm):
    prompt = llm.encode("Once upon a time")
    done = llm.generate(prompt, max_tokens=6, logprobs=5, temperature=0.8, seed=2, top_k=5)
    expected = log_softmax(llm.logits([*prompt, *done.tokens]))[len(prompt) - 1 : -1]
    for token, values in zip(done.tokens, expected):
        assert token.logprobs.logprob == pytest.approx(values[token], abs=1e-4)
        assert [value for _, value in token.logprobs.top] == pytest.approx(
            np.sort(values)[::-1][:5], abs=1e-4
        )
    plain = llm.generate(prompt, max_tokens=6, temperature=0.8, seed=2, top_k=5)
    assert plain.tokens == done.tokens and plain.tokens[0].logprobs is None
    assert plain.read_bytes == 4 * len(plain.tokens)
    alone_, beside = (
        [token.logprobs for token in llm.batch(prompts, max_tokens=6, logprobs=5, seed=2)[0].tokens]
        for prompts in ([prompt], [prompt, "a", "The"])
    )
    assert alone_ == beside


@pytest.mark.slow_for("cuda")
def test_every_backend_keeps_to_the_grammar_and_gives_the_cpus_answer(where, toy, llm):
    """In a batch, with forced stretches, at float32; and its own log-probabilities."""
    other = load(toy, **where | {"device": "cpu"})
    prompts = ["Once", "The llama", "x"]
    for options in (
        {"schema": Person, "temperature": 1.0, "seed": 4, "max_tokens": 60},
        {"regex": "(Hello|World)[a-z ]{1,20}[.]"},
        {"logprobs": 3, "max_tokens": 8, "temperature": 0.7, "seed": 1},
    ):
        answers, wanted = other.batch(prompts, **options), llm.batch(prompts, **options)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in wanted]
        assert [done.finish_reason for done in answers] == [done.finish_reason for done in wanted]
        for ours, judge in zip(answers, wanted):
            for token, same in zip(ours.tokens, judge.tokens):
                is_none = "logprobs" not in options
                assert (token.logprobs is None) == (same.logprobs is None) == is_none
                if token.logprobs:
                    assert token.logprobs.logprob == pytest.approx(same.logprobs.logprob, abs=1e-3)
                    assert [i for i, _ in token.logprobs.top] == [i for i, _ in same.logprobs.top]
