"""Logits processors and progress: judged by mlx-lm's processors and by the package's own options,
on every backend.
"""

from __future__ import annotations

import difflib

import numpy as np
import pytest
from cases.engine import alone, check_rows, make, request

from mlx_llama import load
from mlx_llama.core.answers.hooks import NAMES, Hooks, split_hooks
from mlx_llama.core.errors import ContextError, NumericalError, OptionsError
from mlx_llama.core.options import FIELDS

PROMPT = "Once upon a time"
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def llm(toy, where):
    return load(toy, **where | {"device": "cpu"})


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}], ids=str)
def test_mlx_lms_processors_give_what_the_options_give(options, llm):
    mx, sample_utils = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.sample_utils")
    theirs = sample_utils.make_logits_processors(
        {7: 4.0, 9: 4.0}, repetition_penalty=3.0, repetition_context_size=20
    )

    def adapt(processor):
        return lambda tokens, logits: processor(mx.array(tokens), mx.array(logits))

    wanted = llm.generate(
        PROMPT, max_tokens=20, repetition_penalty=3.0, logit_bias={7: 4.0, 9: 4.0}, **options
    )
    got = llm.generate(PROMPT, max_tokens=20, logits_processor=list(map(adapt, theirs)), **options)
    assert got.tokens == wanted.tokens
    assert got.tokens != llm.generate(PROMPT, max_tokens=20, **options).tokens


def test_a_processor_sees_prompt_and_answer_and_logits(llm):
    calls = []

    def note(tokens, logits):
        calls.append((tokens.tolist(), logits.copy()))
        return logits

    plain = llm.generate(PROMPT, max_tokens=6)
    done = llm.generate(PROMPT, max_tokens=6, logits_processor=note)
    assert done.tokens == plain.tokens
    prompt = llm.encode(PROMPT)
    assert [tokens for tokens, _ in calls] == [[*prompt, *plain.tokens[:i]] for i in range(6)]
    wanted = llm.logits([*prompt, *plain.tokens[:5]])[len(prompt) - 1 :]
    for (_, logits), judge in zip(calls, wanted, strict=True):
        assert logits.dtype == np.float32 and logits.shape == (1, len(judge))
        assert np.abs(logits[0] - judge).max() < 1e-4 * np.abs(judge).max()
    assert (done.evaluations_per_token, plain.evaluations_per_token) == (2.0, 1.0)


def test_processors_with_prefixes_grammars_and_logprobs(llm):
    tokens = range(llm.checkpoint.config.vocab_size)
    digits = [token for token in tokens if any(map(str.isdigit, llm.tokenizer.decode([token])))]

    def no_digits(tokens, logits):
        logits[:, digits] = -np.inf
        return logits

    def only(token):
        scores = np.where(np.equal(tokens, token), np.float32(0), -np.inf)[None]
        return lambda text, logits: scores

    how = dict(regex="[0-9]{4}|[a-c]{8}", max_tokens=20)
    done = llm.generate(PROMPT, logits_processor=no_digits, **how)
    assert done.finish_reason == "eos" and len(done.text) == 8 and set(done.text) <= set("abc")
    noted = llm.generate(PROMPT, logits_processor=no_digits, logprobs=2, max_tokens=4)
    assert all(token.logprobs for token in noted.tokens)
    chat = llm.chat(logits_processor=only(9))
    assert set(chat.send("hi", max_tokens=3).tokens) == {9}
    assert set(chat.send("and?", max_tokens=3).tokens) == {9}
    assert set(chat.send("now?", max_tokens=2, logits_processor=only(8)).tokens) == {8}
    with pytest.raises(NumericalError, match="masked every token"):
        llm.generate(PROMPT, logits_processor=lambda tokens, logits: logits - np.inf)


@pytest.mark.parametrize(
    "returned, message",
    [
        (lambda logits: logits[0], r"float32 \[384\]"),
        (lambda logits: None, r"object \[\]"),
        (lambda logits: logits.argmax(1), r"int64 \[1\]"),
    ],
)
def test_a_result_of_another_shape_ends_the_request(returned, message, llm):
    said = f"logits_processor: returned {message}, it must return its logits, float32"
    with pytest.raises(OptionsError, match=said):
        llm.generate(PROMPT, logits_processor=lambda tokens, logits: returned(logits))


def test_an_exception_of_a_hook_is_the_callers(llm):
    def fail(*args):
        raise ZeroDivisionError("mine")

    for hook in ({"logits_processor": fail}, {"on_progress": fail}, {"on_piece": fail}):
        with pytest.raises(ZeroDivisionError, match="mine"):
            llm.generate(PROMPT, **hook)
    assert len(llm.generate(PROMPT, max_tokens=3).tokens) == 3


@pytest.mark.parametrize(
    "hooks",
    [
        *({"logits_processor": 5}, {"logits_processor": ["x"]}, {"on_progress": True}),
        *({"on_piece": 1}, {"on_piece": lambda text: None}, {"logits_processor": [len]}),
    ],
)
def test_hooks_are_functions(hooks, llm):
    with pytest.raises(OptionsError, match="is not a function"):
        llm.stream(PROMPT, **hooks)
    with pytest.raises(OptionsError, match="is not a function"):
        llm.chat(**hooks)


def test_the_name_of_mlx_lm_is_told_ours(llm):
    said = "there is no option 'logits_processors' .did you mean 'logits_processor'"
    with pytest.raises(OptionsError, match=said):
        llm.stream(PROMPT, logits_processors=[turn])
    assert not any(difflib.get_close_matches(name, NAMES, 1, 0.8) for name in FIELDS)


def test_hooks_are_apart_from_options():
    options, hooks = split_hooks({"max_tokens": 3, "logits_processor": None, "on_progress": print})
    assert (options, hooks) == ({"max_tokens": 3}, Hooks((), print))


# Batches


def turn(tokens, logits):
    """Depends on the newest token."""
    return np.roll(logits, int(tokens[-1]), axis=1)


def test_a_row_with_a_processor_delays_itself_alone(runs_ahead):
    """The others' tokens, launches and reads are as without it."""
    backend, loop = make(runs_ahead, eos=())
    others = [loop.submit(request([7 + i, 8], max_tokens=30, temperature=0.5)) for i in range(3)]
    odd = loop.submit(request(TEXT, max_tokens=12, hooks=Hooks((turn,))))
    answers = [answer.finish() for answer in (*others, odd)]
    for i, answer in enumerate(answers[:3]):
        assert answer.tokens == alone([7 + i, 8], eos=(), max_tokens=30, temperature=0.5).tokens
        assert answer.waits == 30
    assert answers[3].tokens == alone(TEXT, eos=(), max_tokens=12, hooks=Hooks((turn,))).tokens
    assert answers[3].tokens != alone(TEXT, eos=(), max_tokens=12).tokens
    assert (answers[3].waits, answers[3].launches) == (24, 12)
    assert backend.events.count("logits") == 12
    check_rows(loop)


def test_speculation_is_off_beside_a_processor():
    done = alone(TEXT, eos=(), max_tokens=12, speculate="prompt", hooks=Hooks((turn,)))
    assert done.tokens == alone(TEXT, eos=(), max_tokens=12, hooks=Hooks((turn,))).tokens
    assert done.drafted == 0 and "processors" in done.notices[0]


# Progress


def test_progress_of_a_prompt_goes_to_its_end(llm):
    seen = []
    note = lambda *progress: seen.append(progress)  # noqa: E731
    llm.generate(list(range(3, 103)), max_tokens=3, prefill_step_size=40, on_progress=note)
    assert seen == [(40, 100), (80, 100), (100, 100)]
    seen.clear()
    llm.chat(on_progress=note).send("hi", max_tokens=2)
    assert len(seen) == 1 and seen[0][0] == seen[0][1]


def test_progress_of_a_load_goes_to_its_end(toy, where):
    seen = []
    load(
        toy,
        backend=where["backend"],
        device="cpu",
        on_progress=lambda *progress: seen.append(progress),
    )
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


# The whole context


def test_a_prompt_without_an_answer_may_fill_the_context(llm):
    """Its log-probabilities are those of `logits`, judged by NumPy's softmax."""
    context, vocabulary = llm.engine.context, llm.checkpoint.config.vocab_size
    tokens = np.random.default_rng(0).integers(3, vocabulary, context).tolist()
    logits = llm.logits(tokens).astype(np.float64)
    wanted = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
    wanted -= logits.max(1, keepdims=True)
    first, *rates = llm.prompt_logprobs(tokens, top=1)
    assert first is None and len(rates) == context - 1
    for row, token, rate in zip(wanted, tokens[1:], rates):
        assert rate.logprob == pytest.approx(row[token], abs=2e-3)
    for nothing in (llm.generate(tokens, max_tokens=0), llm.batch([tokens], max_tokens=0)[0]):
        assert (nothing.text, nothing.finish_reason) == ("", "length")
    text = llm.tokenizer.decode(tokens[: context // 2])
    assert len(llm.prompt_logprobs(text)) == len(llm.encode(text))
    for call in (lambda: llm.generate(tokens, max_tokens=1), lambda: llm.generate(tokens)):
        with pytest.raises(ContextError, match=f"the prompt has {context} tokens and the context"):
            call()
    for call in (llm.prompt_logprobs, llm.logits):
        with pytest.raises(ContextError, match=f"{context + 1} tokens"):
            call([*tokens, 5])
