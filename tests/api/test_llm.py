"""Prompts of every kind, the size of the context, logits."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
import torch
from backends.conftest import transformers_logits
from cases.texts import conversation
from making import config_fields, edit_json, make_checkpoint, random_tensors, refusal
from transformers import AutoModelForCausalLM

from mlx_llama import load
from mlx_llama.api.llm import PLAIN
from mlx_llama.core import options
from mlx_llama.core.errors import (
    ContextError,
    NumericalError,
    OptionsError,
    SessionError,
    TemplateError,
)


def test_numpy_prompts(llm):
    wanted = llm.generate([1, 50, 60], max_tokens=4).tokens
    assert llm.generate(np.array([1, 50, 60]), max_tokens=4).tokens == wanted
    assert llm.generate([np.int64(1), 50, np.int32(60)], max_tokens=4).tokens == wanted
    assert llm.generate((1, 50, 60), max_tokens=4).tokens == wanted


def test_the_context_may_be_smaller_and_stretched_rope_larger(tmp_path, toy):
    assert len(load(toy, backend="cpu", ctx_size=10).generate([1] * 7, max_tokens=99).tokens) == 3
    for bad in (0, 4.7, True, "x", -5):
        with pytest.raises(ContextError, match="1 to 256"):
            load(toy, backend="cpu", ctx_size=bad)
    folder = make_checkpoint(tmp_path / "m", rope_scaling={"type": "linear", "factor": 4.0})
    assert load(folder, backend="cpu").engine.context == 256
    assert load(folder, backend="cpu", ctx_size=1024).engine.context == 1024


@pytest.mark.parametrize("size", [257, "100000"])
def test_a_context_beyond_the_trained_length_is_lowered_with_a_notice(size, toy):
    """As in llama.cpp, which warns."""
    llm = load(toy, backend="cpu", ctx_size=size)
    assert llm.engine.context == 256
    notices = llm.generate([1, 5], max_tokens=1).notices
    text = f"`ctx_size` {size}: {toy} takes 1 to 256 positions; the context has 256"
    assert notices.count(text) == 1, notices


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ctx": 5}, "there is no option 'ctx' (did you mean 'ctx_size'?)"),
        ({"adapter": "x"}, "did you mean 'adapters'?"),
        ({"modle": "x"}, "did you mean 'model'?"),
        ({"max_tokens": 5}, "'max_tokens' is an option of ask, chat, generate and stream"),
        ({"nothing": 5}, "there is no option 'nothing': help(mlx_llama.load)"),
        ({"model": 5}, "`model` 5: must be a path or a name"),
        ({"draft_model": b"x"}, "`draft_model` b'x': must be a path or a name"),
        ({"template": 5}, "`template` 5: must be a path or a name"),
        ({"compile": "no"}, "`compile` 'no': must be True or False"),
        ({"adapters": [5]}, "`adapters` [5]: must be a folder or a list of folders"),
        ({"on_progress": lambda: None}, "must take two numbers"),
    ],
)
def test_options_of_load_that_cannot_be(options, message):
    assert message in refusal(lambda: load(**options), kind=OptionsError)


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([1] * 256, "the prompt has 256 tokens and the context holds 256"),
        ([384], "token id 384 is outside"),
        ([-1], "token id -1 is outside"),
        ([], "a prompt is a text, messages or token ids, not nothing"),
        (b"Once", "not bytes"),
        (None, "not NoneType"),
        (5, "not int"),
        (iter([1]), "not list_iterator"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_before_any_work(prompt, message, llm, monkeypatch):
    monkeypatch.setattr(type(llm.model), "forward", lambda *a, **k: pytest.fail("work was done"))
    with pytest.raises(ContextError, match=message):
        llm.stream(prompt)


def test_other_things_than_lists_are_refused(llm):
    for bad in (None, 5, "Once"):
        with pytest.raises(ContextError, match="batch takes a list of prompts, not "):
            llm.batch(bad)
        with pytest.raises(ContextError, match="logits takes token ids, not "):
            llm.logits(bad)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(tmp_path, monkeypatch):
    """12 MB of spaces, over which the tokenizers library takes a minute, and panics."""
    llm = load(make_checkpoint(tmp_path / "m", tokenizer="bytelevel"), backend="cpu")
    spaces = " " * 12_000_000
    monkeypatch.setattr(llm.tokenizer, "_encode", lambda *rest: pytest.fail("it was encoded"))
    chat = llm.chat()
    for ask in (
        lambda: llm.stream(spaces),
        lambda: llm.stream([{"role": "user", "content": spaces}]),
        lambda: llm.respond([{"role": "user", "content": spaces}], []),
        lambda: chat.send(spaces),
    ):
        with pytest.raises(ContextError, match=r"has at least \d{4,} tokens and the context holds"):
            ask()
    assert chat.messages == []


def test_an_empty_text_starts_from_bos(llm, tmp_path):
    assert llm.generate("", max_tokens=3).tokens == llm.generate([1], max_tokens=3).tokens
    folder = make_checkpoint(tmp_path / "m", tokenizer="bytelevel", bos_token_id=None)
    edit_json(folder / "tokenizer_config.json", bos_token=...)
    with pytest.raises(ContextError, match="no BOS"):
        load(folder, backend="cpu").generate("")


def test_logits_are_those_of_transformers(toy, llm):
    ids = [1, 40, 50, 60]
    wanted, got = transformers_logits(toy, np.array([ids]))[0], llm.logits(ids)
    assert got.dtype == np.float32 and got.shape == (4, 384)
    assert np.abs(got - wanted).max() / np.abs(wanted).max() < 1e-4
    for bad in ([], [384], [1] * 257):
        with pytest.raises(ContextError):
            llm.logits(bad)


def test_a_repr_is_one_short_line(llm):
    assert repr(llm).startswith(f"LLM({llm.checkpoint.name!r}, backend='cpu', device='CPU")
    assert "dtype='float32', context=256)" in repr(llm) and "\n" not in repr(llm)


# Questions


def test_a_question_goes_through_the_template(llm):
    messages, asked = [{"role": "user", "content": "hi"}], llm.ask("hi", max_tokens=5).tokens
    assert asked == llm.generate(messages, max_tokens=5).tokens
    assert asked == llm.chat().send("hi", max_tokens=5).tokens
    assert asked != llm.generate("hi", max_tokens=5).tokens
    drawn = dict(max_tokens=5, temperature=0.7, seed=1)
    answer = llm.ask("hi", system="Be brief.", **drawn)
    assert answer.tokens == llm.chat("Be brief.").send("hi", **drawn).tokens
    with pytest.raises(
        ContextError, match=r"questions\[0\]: a question is a text, not dict: gener"
    ):
        llm.ask(messages)
    with pytest.raises(ContextError, match="a question is a text, not int: generate takes mess"):
        llm.ask(5)
    with pytest.raises(OptionsError, match="no option 'max_tokenz' .did you mean 'max_tokens'"):
        llm.ask("hi", max_tokenz=5)


def test_a_list_of_questions_gets_an_answer_each(llm):
    """Each as alone, through the template, in rows of the same steps."""
    questions, options = ["hi", "What is a llama?", "hi"], {"max_tokens": 6, "seed": 1}
    for system in (None, "Be brief."):
        alone = [llm.ask(question, system, **options) for question in questions]
        for asked in (questions, tuple(questions)):
            answers = llm.ask(asked, system=system, **options)
            assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
        answers = asyncio.run(llm.aask(questions, system, **options))
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in alone]
    for ask in (llm.ask, lambda asked: asyncio.run(llm.aask(asked))):
        with pytest.raises(ContextError, match=r"questions\[1\]: a question is a text, not None"):
            ask(["hi", None])
        with pytest.raises(ContextError, match="at least one"):
            ask([])
    with pytest.raises(ContextError, match=r"prompts\[1\]: the prompt has"):
        llm.ask(["hi", "once upon a time " * 100])


def test_a_continued_text_is_told_once_where_a_template_exists(toy):
    llm = load(toy, backend="cpu")
    silent = [
        *(llm.ask("hi", max_tokens=2), llm.chat().send("hi", max_tokens=2)),
        llm.generate([{"role": "user", "content": "hi"}], max_tokens=2),
        *(llm.generate([5, 6], max_tokens=2), llm.generate("", max_tokens=2)),
    ]
    told, *others = llm.batch(["a", "b"], max_tokens=2)
    others += [llm.generate("a", max_tokens=2), llm.stream("a", max_tokens=2).finish()]
    assert told.notices[0] == PLAIN and "ask" in told.summary()
    assert not any(PLAIN in answer.notices for answer in [*silent, *others])
    other = load(toy, backend="cpu")
    assert other.stream("a").completion.notices[0] == PLAIN


def test_a_model_without_a_template_continues_texts_and_refuses_questions(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    edit_json(folder / "tokenizer_config.json", chat_template=...)
    plain = load(folder, backend="cpu")
    done = plain.generate("hi", max_tokens=2)
    assert len(done.tokens) == 2 and PLAIN not in done.notices
    for ask in (lambda: plain.ask("hi"), plain.chat):
        with pytest.raises(TemplateError, match="with `template`"):
            ask()
    assert load(folder, backend="cpu", template="chatml").chat().send("hi", max_tokens=2).tokens


def test_options_of_a_request_are_checked_once(llm, monkeypatch):
    chat, calls, check = llm.chat(), [], options.validate
    monkeypatch.setattr(options, "validate", lambda *args: calls.append(args) or check(*args))
    for ask in (
        lambda: llm.generate("hi", max_tokens=1),
        lambda: chat.send("hi", max_tokens=1),
        lambda: llm.submit([5, 6], max_tokens=1).finish(),
    ):
        calls.clear()
        ask()
        assert len(calls) == 1


# Stop tokens


def test_stop_tokens_end_an_answer_without_their_text(llm):
    whole = llm.generate("Once", max_tokens=12)
    token = whole.tokens[6]
    cut = whole.tokens.index(token)
    for stop_ids in ([int(token)], int(token), np.array([int(token)]), f"383,{int(token)}"):
        done = llm.generate("Once", max_tokens=12, stop_token_ids=stop_ids)
        assert (done.finish_reason, done.stop) == ("stop", int(token))
        assert done.tokens == whole.tokens[: cut + 1] and whole.text.startswith(done.text)
        assert llm.generate("Once", max_tokens=cut).text.startswith(done.text.rstrip("\ufffd"))
    assert json.loads(json.dumps(done.receipt()))["stop"] == int(token)
    outside = "option `stop_token_ids`: token id 384 is outside the vocabulary of 384"
    with pytest.raises(OptionsError, match=outside):
        llm.generate("Once", stop_token_ids=[384])
    with pytest.raises(OptionsError, match="`stop`: .* texts; token ids are for stop_token_ids"):
        llm.generate("Once", stop=["a", 5])


def test_stop_tokens_are_those_of_transformers(toy, llm):
    ids, stops = llm.encode("Once upon"), [int(llm.generate("Once upon", max_tokens=8).tokens[5])]
    model = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    wanted = model.generate(
        torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=stops, pad_token_id=0
    )[0, len(ids) :]
    assert llm.generate("Once upon", max_tokens=8, stop_token_ids=stops).tokens == wanted.tolist()


# Weights that are damaged


NOT_FINITE = "logits are not finite after 3 tokens: a weight is NaN or infinite.*`dtype='float32'`"


def put_nan(weight):
    weight[7, 3] = np.nan
    return weight


@pytest.mark.parametrize(
    "name, change",
    [
        ("model.layers.0.mlp.down_proj.weight", put_nan),
        ("lm_head.weight", put_nan),
        ("model.norm.weight", lambda w: np.full_like(w, 3e38)),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_p": 0.9, "seed": 1}, {"logprobs": 1}, {"speculate": "prompt"}],
    ids=str,
)
def test_numbers_that_are_not_finite_are_one_error(name, change, options, where, tmp_path):
    """Without another launch or read, in a batch too, and the model can be asked again."""
    tensors = random_tensors(config_fields())
    tensors[name] = change(tensors[name])
    folder = make_checkpoint(tmp_path / "m", tensors=tensors)
    broken = load(folder, **where | {"device": "cpu"})
    for _ in range(2):
        stream = broken.stream([1, 5, 6], max_tokens=5, **options)
        with pytest.raises(NumericalError, match=NOT_FINITE):
            stream.finish()
        assert stream.completion.waits == 1 and stream.completion.finish_reason == "error"
        assert not stream.completion.tokens
    for done in broken.batch([[1, 5], [1, 6, 7]], max_tokens=3, **options):
        assert done.finish_reason == "error" and "not finite" in done.error and done.launches <= 2


def test_asyncio_gives_what_the_blocking_calls_give(llm):
    async def both():
        first, second = await asyncio.gather(
            llm.agenerate("Once upon", max_tokens=5), llm.aask("hi", system="Be kind", max_tokens=5)
        )
        return first.text, second.text

    wanted = llm.generate("Once upon", max_tokens=5), llm.ask("hi", system="Be kind", max_tokens=5)
    assert asyncio.run(both()) == tuple(answer.text for answer in wanted)


def test_cancelling_asked_questions_ends_their_answers(llm):
    pieces, started, goes_on = [], threading.Event(), threading.Event()

    def on_piece(text, kind):
        pieces.append(text)
        started.set()
        assert goes_on.wait(60)

    async def ask():
        endless = {"max_tokens": 50, "logit_bias": dict.fromkeys(llm.tokenizer.eos_ids, -100.0)}
        asked = asyncio.create_task(llm.aask(["hi", "hello"], on_piece=on_piece, **endless))
        assert await asyncio.to_thread(started.wait, 60)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        goes_on.set()

    asyncio.run(ask())
    assert len(pieces) < 9


def test_a_conversation_may_begin_elsewhere(llm):
    chat = llm.chat(system="Be kind")
    first = chat.send("hello", max_tokens=5)
    talk = [("system", "Be kind"), ("user", "hello"), ("assistant", first.text)]
    said = conversation(talk)
    other = llm.chat(messages=said)
    assert other.send("and?", max_tokens=5).text == chat.send("and?", max_tokens=5).text
    assert other.messages == chat.messages
    with pytest.raises(SessionError, match=r"messages\[0\] needs the role 'user'"):
        llm.chat(messages=said[2:])
    with pytest.raises(SessionError, match="ending with an answer"):
        llm.chat(messages=said[:2])
    with pytest.raises(SessionError, match=r"messages\[0\] is 'hello'"):
        llm.chat(messages=["hello"])


def test_a_model_is_a_context_manager(toy):
    with load(toy, backend="cpu") as llm:
        handle = llm.submit("Once upon", max_tokens=100000)
    assert handle.done


def test_choices_about_files_are_told_with_each_answer(tmp_path):
    named = [{"name": "rag", "template": "{{ messages[0]['content'] }}"}]
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=256.0)
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    answer = load(folder, backend="cpu").generate("a", max_tokens=1)
    notices = "\n".join(answer.notices)
    assert "max_position_embeddings is 256.0" in notices and "using 'rag'" in notices
