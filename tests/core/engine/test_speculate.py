"""Drafting, acceptance and giving up, without a model; the option, the flag and their errors."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, strategies as st
from making import make_checkpoint, refusal

from mlx_llama import cli, generate, load
from mlx_llama.core.answers.completion import Completion, Writer
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.engine.drafts import (
    MAX_LOOKUP_DRAFTS,
    MIN_ACCEPTANCE,
    RATED_DRAFTS,
    Pace,
    PromptLookup,
    Speculation,
)
from mlx_llama.core.errors import OptionsError, SessionError

texts = st.lists(st.integers(0, 3), max_size=40)


def looked_up(text: list[int], most: int) -> list[int]:
    """The definition, by search: copy the tokens after the latest earlier occurrence of the last
    three, or else two.
    """
    for n in (3, 2):
        for at in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[at - n : at] == text[-n:]:
                copy = list(text)
                for source in range(at, at + most):
                    copy.append(copy[source])
                return copy[len(text) :]
    return []


@given(texts, texts, st.integers(1, 12))
def test_the_lookup_is_its_definition_by_search(prompt, answer, most):
    text = list(prompt)
    lookup = PromptLookup(text)
    text += answer
    assert lookup.draft(most) == looked_up(text, most)
    assert lookup.may_draft_next() == any(looked_up([*text, token], 1) for token in range(4))


class Fixed:
    """A drafter of constant drafts."""

    kind, max_drafts = "prompt", MAX_LOOKUP_DRAFTS

    def __init__(self, drafts=()):
        self.drafts = list(drafts)

    def may_draft_next(self):
        return True

    def draft(self, most, writer):
        return self.drafts[:most]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_accepted_tokens_depend_on_the_text_alone(drafts, data):
    """A plain decoder maps text to token; `sampled` is its token after each draft, right or
    wrong.
    """
    says = {n: data.draw(st.integers(0, 3)) for n in range(9)}
    plain, wrong = [says[n] for n in range(9)], False
    sampled = []
    for n in range(len(drafts) + 1):
        sampled.append(data.draw(st.integers(0, 3)) if wrong else says[n])
        wrong = wrong or (n < len(drafts) and drafts[n] != says[n])
    completion = Completion()
    fresh = Speculation(Fixed(), Writer(completion, eos=frozenset({3}))).accept(drafts, sampled)
    right = next((n for n in range(len(drafts)) if drafts[n] != plain[n]), len(drafts))
    until = plain.index(3) + 1 if 3 in plain else 9
    assert fresh == plain[: min(right + 1, until)]
    assert (completion.drafted, completion.accepted) == (len(drafts), right)


def test_drafts_keep_to_the_room_and_end_with_an_end_token():
    writer = Writer(Completion(), eos=frozenset({2}))
    speculation = Speculation(Fixed([5, 6, 2, 7, 8, 9, 10, 11]), writer)
    for room, count in ((-1, 0), (0, 0), (1, 1), (2, 2), (3, 3), (9, 3)):
        assert speculation.draft(room) == [5, 6, 2][:count]
    assert Speculation(None, Writer(Completion())).draft(9) == []


def test_the_pace_quickens_and_slackens():
    pace = Pace(8)
    steps = ((4, 4, 8), (8, 8, 8), (8, 3, 4), (4, 0, 2), (2, 1, 2), (2, 2, 4), (4, 4, 8))
    for drafted, right, following in steps:
        assert pace.next == drafted and pace.update(drafted, right) is None
        assert pace.next == following
    assert Pace(3).next == 3


@pytest.mark.parametrize("right, given_up", [(7, True), (8, False)])
def test_drafting_is_given_up_below_the_least_share(right, given_up):
    assert (7 < MIN_ACCEPTANCE * RATED_DRAFTS < 8) and RATED_DRAFTS == 24
    pace, reasons = Pace(8), []
    for number in range(12):
        reasons.append(pace.update(2, 1 if number < right else 0))
    assert reasons[:11] == [None] * 11
    said = "speculation was switched off: 7 of the last 24 drafted tokens were right"
    assert reasons[11] == (said if given_up else None)


def test_only_the_last_drafts_are_looked_back_at():
    pace = Pace(8)
    for _ in range(100):
        assert pace.update(8, 8) is None
    reasons = [pace.update(2, 0) for _ in range(12)]
    # of 8 + 20 drafted 8 were right: 28.6 %
    assert next(number for number, reason in enumerate(reasons) if reason) == 9
    completion = Completion(tokens=[1, 2, 3])
    speculation = Speculation(Fixed(), Writer(completion))
    for _ in range(6):
        speculation.accept([5, 5, 5, 5], [4, 0, 0, 0, 0])
    assert speculation.drafter is None and not speculation.may_draft_next()
    assert speculation.draft(9) == []
    said = "speculation was switched off: 0 of the last 24 drafted tokens were right"
    assert completion.notices == [said]
    assert (completion.drafted, completion.accepted, completion.speculation_ended) == (24, 0, 4)


# The option and the flag


@pytest.fixture(scope="module")
def drafting(toy):
    return load(toy, backend="cpu", draft_model=toy)


@pytest.mark.parametrize("bad", ["yes", "", 1, True, "Prompt", ["prompt"]])
def test_another_kind_is_refused_with_those_there_are(bad, llm):
    said = refusal(lambda: llm.stream("x", speculate=bad), kind=OptionsError)
    assert re.search("option `speculate`: .* must be 'none', 'prompt' or 'model'", said)


def test_the_kind_in_force_and_its_notices(llm, drafting):
    def seen(llm, **options):
        done = llm.generate([5, 6, 7, 8] * 5, max_tokens=12, **options)
        notices = [said for said in done.notices if "draft" in said or "specul" in said]
        return done.options["speculate"], notices

    assert seen(llm) == seen(llm, speculate="none") == ("none", [])
    assert seen(drafting, speculate="none") == ("none", [])
    assert seen(llm, speculate="prompt") == ("prompt", [])
    assert seen(drafting) == seen(drafting, speculate="model") == ("model", [])
    unused = "the draft model is not used: `speculate` asks for 'prompt'"
    assert seen(drafting, speculate="prompt") == ("prompt", [unused])
    needed = "'model' needs a draft model: load one with `draft_model`"
    with pytest.raises(OptionsError, match=needed):
        llm.stream("x", speculate="model")
    with pytest.raises(OptionsError, match="needs a draft model"):
        llm.chat(speculate="model")


def test_a_model_that_drafts_for_itself_is_always_right(drafting):
    for drawn in ({}, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}):
        done = drafting.generate([1, 50, 60], max_tokens=41, **drawn)
        assert done.accepted == done.drafted > 20 and len(done.tokens) == 41
        # One token of the prompt; then five for every verification, with its drafts' steps.
        assert done.waits < 25 and done.launches > done.waits
        said = f"speculation (model): {done.accepted} of {done.drafted} drafted tokens accepted\n"
        assert said in done.summary()
        receipt = done.receipt()
        assert receipt["drafted"] == done.drafted and receipt["accepted"] == done.accepted
        assert receipt["speculation_ended"] is None
        assert receipt["evaluations_per_token"] < 0.6


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"vocab_size": 400}, "384 tokens in 400 rows and not 384 in 384"),
        ({"tokenizer": "bytelevel"}, "token 0 is '!' and not '"),
    ],
)
def test_another_vocabulary_is_refused_before_the_weights_are_read(
    fields, words, toy, tmp_path, monkeypatch
):
    other = make_checkpoint(tmp_path / "stranger", **fields)
    monkeypatch.setattr(Backend, "build", lambda *a, **k: pytest.fail("weights were read"))
    said = refusal(lambda: load(toy, backend="cpu", draft_model=other), kind=OptionsError)
    start = f"^`draft_model` .*stranger: its vocabulary is not that of .*toy, {words}.*: "
    assert re.search(start + "choose a smaller model of the same family$", said)


def test_the_notice_of_a_session_comes_once_and_when_the_option_changes(drafting):
    chat = drafting.chat(max_tokens=3)
    said = lambda done: [notice for notice in done.notices if "not used" in notice]  # noqa: E731
    for kind, is_told in ((None, 0), ("prompt", 1), ("prompt", 0), (None, 0), ("prompt", 1)):
        options = {"speculate": kind} if kind else {}
        assert bool(said(chat.send("a", **options))) == is_told


def test_a_saved_session_keeps_the_option_and_asks_for_the_draft_model(llm, drafting, tmp_path):
    chat = llm.chat(max_tokens=3, speculate="prompt")
    chat.send("hello")
    chat.save(tmp_path / "a.json")
    other = drafting.chat()
    other.load(tmp_path / "a.json")
    assert other.resolve().options.speculate == "prompt"
    other.options["speculate"] = "model"
    other.save(tmp_path / "b.json")
    with pytest.raises(SessionError, match="needs a draft model"):
        chat.load(tmp_path / "b.json")


def test_the_door(toy, tmp_path, capsys):
    words = f"--model {toy} --backend cpu --ignore-chat-template -m 30 -p".split()
    words.append("once once once once")
    assert cli.run(generate.main, words) == 0
    wanted = capsys.readouterr().out
    assert cli.run(generate.main, [*words, "--speculate", "prompt", "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out == wanted and "speculation (prompt): " in err
    assert cli.run(generate.main, [*words, "--draft-model", str(toy), "--jsonl"]) == 0
    receipt = json.loads(capsys.readouterr().out.splitlines()[-1])["receipt"]
    assert receipt["options"]["speculate"] == "model"
    assert receipt["accepted"] == receipt["drafted"] > 0
    other = make_checkpoint(tmp_path / "other", vocab_size=400)
    assert cli.run(generate.main, [*words, "--draft-model", str(other)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.run(generate.main, [*words, "--speculate", "maybe"]) == 2
    said = "option --speculate: 'maybe' is not allowed, it must be 'none', 'prompt' or 'model'"
    assert capsys.readouterr().err == f"error: {said}\n"
