"""Conversations: prefix reuse, a full context, interruption at any point, saving and loading."""

from __future__ import annotations

import itertools
import json
import threading

import pytest
from machine import device_of
from making import make_checkpoint

from mlx_llama import LLM, load
from mlx_llama.core.errors import ContextError, OptionsError, SessionError, TemplateError
from mlx_llama.core.generation.options import resolve
from mlx_llama.core.generation.request import Request
from mlx_llama.core.generation.scheduler import Scheduler


@pytest.fixture(scope="module")
def loaded(backend, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("session") / "m", max_position_embeddings=512)
    return load(folder, backend=backend.name, device=device_of(backend), dtype="float32")


@pytest.fixture
def llm(loaded):
    """With an empty cache."""
    return LLM(loaded.checkpoint, loaded.backend, loaded.model, loaded.template, loaded.engine.context)


def cold(llm, prompt, **options):
    """The answer from an empty cache."""
    scheduler = Scheduler(llm.backend, llm.model, llm.tokenizer, llm.engine.eos, llm.engine.context)
    return scheduler.submit(Request(prompt, resolve(options))).finish()


def check_consistency(session):
    """Compare the bookkeeping with the device's record of the tokens."""
    scheduler = session.scheduler
    assert not scheduler.rows.used
    for row, tokens in scheduler.rows.kept.items():
        assert scheduler.cache.lengths[row] == len(tokens)
        assert scheduler.cache.state(row)["tokens"].tolist() == tokens


def rendered(llm, session, question):
    system = [{"role": "system", "content": session.system}] if session.system else []
    return llm.encode([*system, *session.messages, {"role": "user", "content": question}])


def test_the_second_turn_reuses_the_common_prefix(llm):
    chat = llm.chat(system="be kind", max_tokens=12)
    first = chat.send("hello")
    assert first.reused_tokens == 0 and first.prompt_tokens == len(rendered(llm, llm.chat(system="be kind"), "hello"))
    cached = chat.cached_tokens
    prompt = rendered(llm, chat, "and then?")
    common = next((i for i, (a, b) in enumerate(zip(cached, prompt)) if a != b), min(len(cached), len(prompt)))
    second = chat.send("and then?")
    assert second.reused_tokens == common > first.prompt_tokens - 5
    assert second.prompt_tokens == len(prompt)


def test_a_reused_cache_gives_the_tokens_of_a_cold_one(llm):
    chat = llm.chat(system="be kind", max_tokens=16, temperature=0.9, seed=4)
    for question in ("hello", "tell me more", "Ein Vogel saß auf dem Dach", "bye"):
        prompt = rendered(llm, chat, question)
        wanted = cold(llm, prompt, max_tokens=16, temperature=0.9, seed=4)
        warm = chat.send(question)
        assert warm.tokens == wanted.tokens and warm.text == wanted.text
    assert warm.reused_tokens > 0


def test_the_oldest_turns_leave_the_context_the_system_prompt_stays(llm):
    chat = llm.chat(system="SYSTEM", max_tokens=40)
    noticed = 0
    for turn in range(14):
        done = chat.send(f"question number {turn}, please answer", temperature=1.0, seed=turn)
        assert done.prompt_tokens < 512
        said = any("oldest" in notice and "system prompt stays" in notice for notice in done.notices)
        # Random answers tokenise differently from their generation; at least the turn before is reused.
        assert said or turn == 0 or done.reused_tokens > 60
        noticed += said
    assert 1 <= noticed <= 7 and chat.dropped > 0 and len(chat.messages) == 28
    text = llm.tokenizer.decode(chat.cached_tokens, skip_special=False)
    assert "SYSTEM" in text and "number 0" not in text and "number 13" in text


def test_a_question_that_can_never_fit_changes_nothing(llm):
    chat = llm.chat(max_tokens=4)
    chat.send("hello")
    before = (list(chat.messages), chat.dropped)
    with pytest.raises(ContextError, match="the context holds 512"):
        chat.send("word " * 2000)
    assert (chat.messages, chat.dropped) == before
    assert chat.send("hello again").finish_reason in ("length", "eos")


@pytest.mark.parametrize("steps", range(6))
def test_leaving_after_any_piece_leaves_a_session_that_goes_on(steps, llm):
    chat = llm.chat(max_tokens=6, temperature=1.0, seed=2)
    chat.send("hello")
    messages = list(chat.messages)
    stream = chat.stream("go on", max_tokens=30)
    shown = "".join(itertools.islice(stream, steps))
    stream.close()
    if steps:
        assert chat.messages[-1]["content"] == stream.completion.text
        assert stream.completion.text.startswith(shown) and stream.completion.finish_reason == "interrupted"
    else:
        assert chat.messages == messages
    check_consistency(chat)
    prompt = rendered(llm, chat, "next")
    assert chat.send("next").tokens == cold(llm, prompt, max_tokens=6, temperature=1.0, seed=2).tokens


@pytest.mark.parametrize("call", range(1, 8))
def test_an_interrupt_inside_any_call_leaves_a_session_that_goes_on(call, llm, monkeypatch):
    """Ctrl-C during the n-th launch or read."""
    chat = llm.chat(max_tokens=6, temperature=1.0, seed=2)
    chat.send("hello")
    runtime, count = llm.backend.runtime, [0]
    with monkeypatch.context() as patch:
        for name in ("launch", "read"):
            original = getattr(runtime, name)

            def interrupted(*args, original=original):
                count[0] += 1
                if count[0] == call:
                    raise KeyboardInterrupt
                return original(*args)

            patch.setattr(runtime, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.send("go on", max_tokens=30)
    check_consistency(chat)
    prompt = rendered(llm, chat, "next")
    assert chat.send("next").tokens == cold(llm, prompt, max_tokens=6, temperature=1.0, seed=2).tokens


def test_regenerate_replaces_the_answer(llm):
    chat = llm.chat(max_tokens=8, temperature=1.0)
    with pytest.raises(SessionError, match="no answer"):
        chat.regenerate()
    chat.send("hello", seed=1)
    first = chat.messages[-1]["content"]
    done = chat.regenerate(seed=2).finish()
    assert len(chat.messages) == 2 and chat.messages[-1]["content"] == done.text != first
    assert done.reused_tokens > 0
    before = list(chat.messages)
    stream = chat.regenerate(seed=3)
    stream.close()
    assert chat.messages == before
    with pytest.raises(OptionsError):
        chat.regenerate(top_p=9)
    assert chat.messages == before


def test_save_and_load(llm, tmp_path):
    chat = llm.chat(system="be kind", max_tokens=8, temperature=0.5, seed=3, stop=["zzz"], logit_bias={5: 1.0})
    chat.send("hello \U0001f999")
    chat.save(tmp_path / "chat.json")
    other = llm.chat()
    assert other.load(tmp_path / "chat.json") == []
    assert (other.messages, other.system) == (chat.messages, chat.system)
    assert other.resolve().options == chat.resolve().options
    assert other.send("go on").tokens == chat.send("go on").tokens
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_a_failed_save_leaves_the_old_file(llm, tmp_path):
    chat = llm.chat(max_tokens=2)
    chat.send("hello")
    with pytest.raises(SessionError, match="cannot be written"):
        chat.save(tmp_path / "no" / "such" / "folder.json")
    file = tmp_path / "chat.json"
    chat.save(file)
    old = file.read_text()
    chat.messages.append({"role": "user", "content": object()})  # cannot be JSON
    with pytest.raises(Exception):
        chat.save(file)
    assert file.read_text() == old and [path.name for path in tmp_path.iterdir()] == ["chat.json"]


GOOD = {"format": "mlx_llama session", "version": 1, "model": "m", "system": None, "options": {}, "dropped": 0,
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize("damage", [b"[]", {"options": {"top_p": 9}}, {"options": {"logit_bias": {"99999": 1}}}])
def test_loading_a_damaged_session_loses_nothing(damage, llm, tmp_path):
    chat = llm.chat(system="mine", max_tokens=3)
    chat.send("hello")
    before = (list(chat.messages), chat.system, dict(chat.options), chat.dropped)
    file = tmp_path / "bad.json"
    file.write_bytes(damage if isinstance(damage, bytes) else json.dumps(GOOD | damage).encode())
    with pytest.raises(SessionError, match=str(file)):
        chat.load(file)
    assert (chat.messages, chat.system, chat.options, chat.dropped) == before


def test_loading_says_when_another_model_held_the_conversation(llm, tmp_path):
    file = tmp_path / "s.json"
    file.write_text(json.dumps(GOOD))
    chat = llm.chat(max_tokens=3)
    assert "held with 'm'" in chat.load(file)[0]
    with pytest.raises(SessionError, match="cannot be read"):
        chat.load(tmp_path / "missing.json")


def test_a_model_without_a_template_says_how_to_give_one(tmp_path, backend):
    folder = make_checkpoint(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    raw = json.loads(config.read_text())
    del raw["chat_template"]
    config.write_text(json.dumps(raw))
    options = dict(backend=backend.name, device=device_of(backend))
    llm = load(folder, **options)
    with pytest.raises(TemplateError, match="with template"):
        llm.chat()
    assert load(folder, template="chatml", **options).chat().send("hi", max_tokens=2).tokens


def test_a_new_question_ends_the_answer_that_is_still_coming(llm):
    chat = llm.chat(temperature=1.0, seed=3)
    first = chat.stream("one", max_tokens=30)
    shown = next(first)
    done = chat.send("two", max_tokens=6)
    assert list(first) == [] and first.completion.finish_reason == "interrupted"
    assert [m["content"] for m in chat.messages] == ["one", first.completion.text, "two", done.text]
    assert first.completion.text.startswith(shown)
    check_consistency(chat)
    first.close()
    prompt = rendered(llm, chat, "three")
    assert chat.send("three", max_tokens=6).tokens == cold(llm, prompt, max_tokens=6, temperature=1.0, seed=3).tokens


def test_a_stream_begun_too_late_says_so(llm):
    chat = llm.chat(max_tokens=5)
    late, chosen = chat.stream("never begun"), chat.stream("chosen")
    chosen.finish()
    with pytest.raises(SessionError, match="ask again"):
        next(late)
    assert [m["content"] for m in chat.messages][:1] == ["chosen"] and len(chat.messages) == 2
    again = chat.regenerate()
    chat.send("b")
    with pytest.raises(SessionError, match="ask again"):
        again.finish()
    assert [m["content"] for m in chat.messages][::2] == ["chosen", "b"]
    check_consistency(chat)


def test_clear_and_load_during_an_answer(llm, tmp_path):
    chat = llm.chat(max_tokens=30, temperature=1.0, seed=1)
    stream = chat.stream("one")
    next(stream)
    chat.clear()
    stream.close()
    assert chat.messages == []
    (tmp_path / "s.json").write_text(json.dumps(GOOD))
    stream = chat.stream("one")
    next(stream)
    chat.load(tmp_path / "s.json")
    stream.close()
    assert chat.messages == GOOD["messages"]
    chat.messages.clear()
    chat.dropped = 4
    assert chat.send("fresh", max_tokens=2).tokens


def test_dynamic_rope_reuses_only_keys_of_the_right_length(backend, tmp_path):
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=64,
                             rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    llm = load(folder, backend=backend.name, device=device_of(backend), dtype="float32",
               ctx_size=256)
    chat = llm.chat(max_tokens=6, temperature=1.0, seed=5)
    for question in ("hello", "a long question " * 8, "short"):
        prompt = rendered(llm, chat, question)
        assert chat.send(question).tokens == cold(llm, prompt, max_tokens=6, temperature=1.0, seed=5).tokens
    chat.clear()
    prompt = rendered(llm, chat, "a long question " * 9)
    done = chat.send("a long question " * 9)
    assert len(prompt) > 64 and done.reused_tokens == 0
    assert done.tokens == cold(llm, prompt, max_tokens=6, temperature=1.0, seed=5).tokens


def test_names_no_file_system_takes(llm):
    chat = llm.chat(max_tokens=None, temperature=None)
    assert chat.options == {}
    for name in ("~nosuchuser/x", "a\0b", "/"):
        for act in (chat.save, chat.load):
            with pytest.raises(SessionError, match="cannot be"):
                act(name)


def test_a_repr_is_one_short_line(llm):
    chat = llm.chat(max_tokens=3)
    chat.send("hello")
    assert repr(chat) == f"Session({chat.model!r}, 2 messages, {len(chat.cached_tokens)} of 512 positions)"


# Threads


def on_threads(count, call):
    """Call `call(i)` on as many threads; returns results and exceptions."""
    found = [None] * count

    def run(i):
        try:
            found[i] = call(i)
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_threads_that_send_have_their_turn(llm):
    chat = llm.chat(max_tokens=6, temperature=1.0, seed=2)
    found = on_threads(4, lambda i: chat.send(f"question {i}"))
    assert all(done.finish_reason in ("length", "eos") for done in found)
    asked = [message["content"] for message in chat.messages[::2]]
    assert sorted(asked) == [f"question {i}" for i in range(4)]
    assert [message["content"] for message in chat.messages[1::2]] == [found[int(text[-1])].text for text in asked]
    check_consistency(chat)
    prompt = rendered(llm, chat, "next")
    assert chat.send("next").tokens == cold(llm, prompt, max_tokens=6, temperature=1.0, seed=2).tokens


def test_threads_that_stream_have_their_turn_or_a_session_error(llm):
    for seed in range(5):
        chat = llm.chat(max_tokens=12, temperature=1.0, seed=seed)
        found = on_threads(4, lambda i: "".join(chat.stream(f"question {i}")))
        assert all(isinstance(one, (str, SessionError)) for one in found), found
        answers = [message["content"] for message in chat.messages[1::2]]
        assert sorted(answers) == sorted(one for one in found if isinstance(one, str))
        check_consistency(chat)


def test_another_thread_may_close_an_answer_but_not_ask(llm):
    chat = llm.chat(max_tokens=200, temperature=1.0, seed=1)
    stream = chat.stream("one")
    next(stream)
    for act in (lambda i: chat.stream("two"), lambda i: chat.send("two"), lambda i: chat.clear(), lambda i: chat.regenerate()):
        (refused,) = on_threads(1, act)
        assert isinstance(refused, SessionError) and "another thread is reading an answer" in str(refused)
    assert on_threads(1, lambda i: stream.close()) == [None]
    assert chat.messages[1]["content"] == stream.completion.text and list(stream) == []
    assert chat.send("two", max_tokens=3).tokens
    check_consistency(chat)
