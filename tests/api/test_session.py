"""Conversations: prefix reuse, a full context, interruption at any point, saving and loading."""

from __future__ import annotations

import itertools
import json
import os
import threading
from unittest.mock import Mock

import pytest
from cases.sessions import GOOD, add, check_consistency, rendered, roles
from cases.texts import TEMPLATES
from cases.threads import on_threads
from making import fail_at, make_checkpoint
from scripting import Script, make_scripted_checkpoint, tool_formats

from mlx_llama import LLM, load
from mlx_llama.api.session_file import read_session
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import ContextError, OptionsError, SessionError
from mlx_llama.core.options import resolve
from mlx_llama.core.text.template import encode_messages


@pytest.fixture(scope="module")
def loaded(where, tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("session") / "m", max_position_embeddings=512)
    return load(folder, **where)


@pytest.fixture
def llm(loaded):
    """With an empty cache."""
    parts = loaded.checkpoint, loaded.backend, loaded.model, loaded.template
    return LLM(*parts, loaded.engine.context)


def cold(llm, prompt, **options):
    """The answer from an empty cache."""
    loop = Loop(llm.backend, llm.model, llm.tokenizer, llm.engine.eos, llm.engine.context)
    return loop.submit(Request(prompt, resolve(options))).finish()


def check_next(llm, session, question="next", **options):
    """Check the session's state, and that its next answer is that of an empty cache."""
    check_consistency(session)
    wanted = cold(llm, rendered(llm, session, question), **session.options | options)
    done = session.send(question, **options)
    assert (done.tokens, done.text) == (wanted.tokens, wanted.text)
    return done


def contents(messages):
    return [message["content"] for message in messages]


def test_the_second_turn_reuses_the_common_prefix(llm):
    chat = llm.chat(system="be kind", max_tokens=12)
    first = chat.send("hello")
    assert first.reused_tokens == 0
    assert first.prompt_tokens == len(rendered(llm, llm.chat(system="be kind"), "hello"))
    cached = chat.cached_tokens
    prompt = rendered(llm, chat, "and then?")
    common = len(os.path.commonprefix([cached, prompt]))
    second = chat.send("and then?")
    assert second.reused_tokens == common > first.prompt_tokens - 5
    assert second.prompt_tokens == len(prompt)


def test_a_reused_cache_gives_the_tokens_of_a_cold_one(llm):
    chat = llm.chat(system="be kind", max_tokens=16, temperature=0.9, seed=4)
    for question in ("hello", "tell me more", "Ein Vogel saß auf dem Dach", "bye"):
        warm = check_next(llm, chat, question)
    assert warm.reused_tokens > 0


@pytest.mark.slow_for("cuda", "mlx")
def test_the_oldest_turns_leave_the_context_the_system_prompt_stays(llm):
    chat = llm.chat(system="SYSTEM", max_tokens=40)
    noticed = drops = dropped = 0
    for turn in range(14):
        done = chat.send(f"question number {turn}, please answer", temperature=1.0, seed=turn)
        assert done.prompt_tokens < 512
        said = any(
            "oldest" in notice and "system prompt stays" in notice for notice in done.notices
        )
        # Random answers tokenise differently from their generation; at least the turn before is
        # reused.
        assert chat.dropped > dropped or turn == 0 or done.reused_tokens > 60
        noticed += said
        drops += chat.dropped > dropped
        dropped = chat.dropped
    assert noticed == 1 < drops <= 7 and len(chat.messages) == 28
    text = llm.tokenizer.decode(chat.cached_tokens, skip_special=False)
    assert "SYSTEM" in text and "number 0" not in text and "number 13" in text


@pytest.mark.slow_for("c*-2", "cuda", "mlx")
@pytest.mark.parametrize(
    ("max_tokens", "room"), [(40, 512 - 40), (200, 512 - 200), (400, 512 // 2)]
)
def test_a_short_context_keeps_up_to_half_of_itself_for_the_answer(llm, max_tokens, room):
    """The turn before the question stays where it fits in the rest, however many older ones
    leave.
    """

    def turn(text):
        return [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}]

    def prompt(words):
        chat = llm.chat(max_tokens=max_tokens)
        chat.messages = turn("old " * 300) + turn("a " * words)
        messages = [*chat.messages[2:], {"role": "user", "content": "b"}]
        return len(encode_messages(llm.tokenizer, llm.template, messages)), chat

    length, chat = next(
        made for made in map(prompt, itertools.count(1)) if room * 3 // 4 < made[0] <= room
    )
    done = chat.send("b", seed=1)
    assert (done.prompt_tokens, chat.dropped) == (length, 2)
    words = next(words for words in itertools.count(1) if prompt(words)[0] > room)
    chat = prompt(words)[1]
    chat.send("b", seed=1)
    assert chat.dropped == 4


def test_a_turn_too_long_to_be_encoded_leaves_the_context(tmp_path, monkeypatch):
    """As of a session that was saved with another model."""
    llm = load(make_checkpoint(tmp_path / "m", tokenizer="bytelevel"), backend="cpu")
    chat = llm.chat(max_tokens=4)
    long = {"role": "user", "content": "x" * 3_000_000}
    chat.messages = [long, {"role": "assistant", "content": "y"}]
    encode = Mock(wraps=llm.tokenizer._encode)
    monkeypatch.setattr(llm.tokenizer, "_encode", encode)
    assert chat.send("hello").finish_reason in ("length", "eos")
    assert chat.dropped == 2
    assert max(len(call.args[0]) for call in encode.call_args_list) < 1000


def test_a_question_that_can_never_fit_changes_nothing(llm):
    chat = llm.chat(max_tokens=4)
    chat.send("hello")
    before = (list(chat.messages), chat.dropped)
    with pytest.raises(ContextError, match="the context holds 512"):
        chat.send("word " * 2000)
    assert (chat.messages, chat.dropped) == before
    assert chat.send("hello again").finish_reason in ("length", "eos")


@pytest.mark.slow_for("cuda")
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
        assert stream.completion.text.startswith(shown)
        assert stream.completion.finish_reason == "interrupted"
    else:
        assert chat.messages == messages
    check_next(llm, chat)


@pytest.mark.slow_for("cuda")
@pytest.mark.parametrize("call", range(1, 8))
def test_an_interrupt_inside_any_call_leaves_a_session_that_goes_on(call, llm, monkeypatch):
    """Ctrl-C during the n-th launch or read."""
    chat = llm.chat(max_tokens=6, temperature=1.0, seed=2)
    chat.send("hello")
    runtime, interrupted = llm.backend.runtime, fail_at(call, KeyboardInterrupt)
    with monkeypatch.context() as patch:
        for name in ("launch", "read"):
            patch.setattr(runtime, name, interrupted(getattr(runtime, name)))
        with pytest.raises(KeyboardInterrupt):
            chat.send("go on", max_tokens=30)
    check_next(llm, chat)


@pytest.mark.parametrize("rounds", [0, "2"])
def test_a_chat_without_a_number_of_rounds(rounds, llm):
    with pytest.raises(OptionsError, match="rounds: "):
        llm.chat(rounds=rounds)


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


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "stop": ["zzz"]}]
)
def test_an_answer_that_goes_on_is_the_one_that_was_never_cut(options, llm):
    options = options | {"logit_bias": {2: -100}}  # token 2 would end it
    whole = llm.chat(**options).send("hello", max_tokens=30)
    chat = llm.chat(**options)
    stream = chat.stream("hello", max_tokens=30)
    next(stream)
    stream.close()
    parts = [list(map(int, chat.last.tokens))]
    while sum(map(len, parts)) < 30:
        completion = chat.resume(max_tokens=min(11, 30 - sum(map(len, parts)))).finish()
        parts.append(list(map(int, completion.tokens)))
    assert sum(parts, []) == whole.tokens and len(parts) >= 4
    assert chat.messages == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": whole.text},
    ]
    assert completion.text == whole.text
    assert completion.reused_tokens >= completion.prompt_tokens - 1
    check_consistency(chat)


def test_a_file_knows_that_its_last_answer_was_cut(llm, tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    for max_tokens in (3, 60):
        chat, other = llm.chat(), llm.chat()
        chat.send("Who are you?", max_tokens=max_tokens)
        chat.save(first)
        other.load(first)
        other.save(second)
        is_cut = chat.last.finish_reason == "length"
        assert [read_session(path).is_cut for path in (first, second)] == [is_cut] * 2


@pytest.mark.slow_for("cuda")
def test_an_answer_goes_on_in_a_full_context(llm):
    """It fills the context; then the oldest turns make room for it."""
    chat = llm.chat(system="be kind", max_tokens=60, logit_bias={2: -100})
    for question in ("first", "second", "third"):
        chat.send(question)
    while chat.last.finish_reason != "context":
        chat.resume().finish()
    assert chat.dropped == 0 and len(chat.cached_tokens) >= llm.engine.context - 1
    text = chat.messages[-1]["content"]
    completion = chat.resume().finish()
    assert chat.dropped > 0 and "no longer seen by the model" in completion.notices[0]
    assert chat.messages[-1]["content"].startswith(text.rstrip("\ufffd"))
    assert len(chat.messages) == 6
    with pytest.raises(ContextError, match="holds 512"):  # in time the answer alone is too long
        for _ in range(10):
            chat.resume().finish()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_an_answer_from_a_file_goes_on_where_the_template_has_it(name, tmp_path):
    llm = load(make_scripted_checkpoint(tmp_path / "m", TEMPLATES[name]), backend="cpu")
    chat = llm.chat(max_tokens=4)
    for answer in ("The answer is", "Once upon a time, ça va"):
        chat.messages = talk = [
            {"role": "user", "content": "really?"},
            {"role": "assistant", "content": answer},
        ]
        chat.resume().finish()
        prompt = chat.cached_tokens[: chat.last.prompt_tokens]
        text = llm.tokenizer.decode(prompt, skip_special=False)
        assert text.endswith(answer) and text.count(answer) == 1
        whole = encode_messages(llm.tokenizer, llm.template, talk, add_generation_prompt=False)
        # Three templates end a question otherwise before an answer than before nothing.
        assert whole[: len(prompt)] == prompt or name in ("blocks", "macro", "namespace")
        assert chat.messages[-1]["content"].startswith(answer)


def test_undo_and_edit(llm):
    chat = llm.chat(max_tokens=6)
    for call in (chat.undo, chat.regenerate, chat.resume, lambda: chat.edit("x")):
        with pytest.raises(SessionError, match="ask something first|is empty"):
            call()
    chat.send("hello")
    first = list(chat.messages)
    chat.send("again")
    chat.edit("other").finish()
    assert chat.messages[:2] == first and chat.messages[2]["content"] == "other"
    assert len(chat.messages) == 4
    stream = chat.edit("never begun")
    stream.close()
    assert chat.undo()[0] == {"role": "user", "content": "other"} and chat.messages == first
    with pytest.raises(SessionError, match="moved on before this answer started"):
        stream = chat.edit("third")
        chat.undo()
        next(stream)
    assert chat.messages == []


def test_save_and_load(llm, tmp_path):
    chat = llm.chat(
        system="be kind", max_tokens=8, temperature=0.5, seed=3, stop=["zzz"], logit_bias={5: 1.0}
    )
    chat.send("hello \U0001f999")
    chat.save(tmp_path / "chat.json")
    other = llm.chat()
    assert other.load(tmp_path / "chat.json") == []
    assert (other.messages, other.system) == (chat.messages, chat.system)
    assert other.resolve().options == chat.resolve().options
    assert other.send("go on").tokens == chat.send("go on").tokens
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


def test_an_interrupt_right_after_the_rename_is_an_interrupt(llm, tmp_path, monkeypatch):
    chat = llm.chat(max_tokens=2)
    chat.send("hello")
    rename = os.replace

    def rename_and_stop(*paths):
        rename(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", rename_and_stop)
    with pytest.raises(KeyboardInterrupt):
        chat.save(tmp_path / "chat.json")
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    other = llm.chat()
    assert other.load(tmp_path / "chat.json") == [] and other.messages == chat.messages


@pytest.mark.parametrize(
    "damage", ["[]", {"options": {"top_p": 9}}, {"options": {"logit_bias": {"99999": 1}}}]
)
def test_loading_a_damaged_session_loses_nothing(damage, llm, tmp_path):
    chat = llm.chat(system="mine", max_tokens=3)
    chat.send("hello")
    before = (list(chat.messages), chat.system, dict(chat.options), chat.dropped)
    file = tmp_path / "bad.json"
    file.write_text(damage if isinstance(damage, str) else json.dumps(GOOD | damage))
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


def test_a_new_question_ends_the_answer_that_is_still_coming(llm):
    chat = llm.chat(temperature=1.0, seed=3)
    first = chat.stream("one", max_tokens=30)
    shown = next(first)
    done = chat.send("two", max_tokens=6)
    assert list(first) == [] and first.completion.finish_reason == "interrupted"
    assert contents(chat.messages) == ["one", first.completion.text, "two", done.text]
    assert first.completion.text.startswith(shown)
    check_consistency(chat)
    first.close()
    check_next(llm, chat, max_tokens=6)


def test_a_stream_begun_too_late_says_so(llm):
    chat = llm.chat(max_tokens=5)
    late, chosen = chat.stream("never begun"), chat.stream("chosen")
    chosen.finish()
    with pytest.raises(SessionError, match="ask again"):
        next(late)
    assert contents(chat.messages)[:1] == ["chosen"] and len(chat.messages) == 2
    again = chat.regenerate()
    chat.send("b")
    with pytest.raises(SessionError, match="ask again"):
        again.finish()
    assert contents(chat.messages)[::2] == ["chosen", "b"]
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


def test_a_repr_is_one_short_line(llm):
    chat = llm.chat(max_tokens=3)
    chat.send("hello")
    state = f"2 messages, {len(chat.cached_tokens)} of 512 positions"
    assert repr(chat) == f"Session({chat.model!r}, {state})"


# Threads


def test_threads_that_send_have_their_turn(llm):
    chat = llm.chat(max_tokens=6, temperature=1.0, seed=2)
    answers = on_threads(4, lambda i: chat.send(f"question {i}"))
    assert all(done.finish_reason in ("length", "eos") for done in answers)
    asked = contents(chat.messages[::2])
    assert sorted(asked) == [f"question {i}" for i in range(4)]
    assert contents(chat.messages[1::2]) == [answers[int(text[-1])].text for text in asked]
    check_next(llm, chat)


def test_another_thread_may_close_an_answer_but_not_ask(llm):
    chat = llm.chat(max_tokens=200, temperature=1.0, seed=1)
    stream = chat.stream("one")
    next(stream)
    for act in (
        lambda i: chat.stream("two"),
        lambda i: chat.send("two"),
        lambda i: chat.clear(),
        lambda i: chat.regenerate(),
    ):
        (refused,) = on_threads(1, act)
        assert isinstance(refused, SessionError)
        assert "another thread is reading an answer" in str(refused)
    assert on_threads(1, lambda i: stream.close()) == [None]
    assert chat.messages[1]["content"] == stream.completion.text and list(stream) == []
    assert chat.send("two", max_tokens=3).tokens
    check_consistency(chat)


def test_threads_that_use_one_session_in_every_way_get_a_session_error_at_most(llm, tmp_path):
    chat = llm.chat(max_tokens=4, temperature=1.0, seed=1)
    chat.send("first")
    chat.save(tmp_path / "chat.json")

    acts = [
        lambda i: chat.send(f"question {i}"),
        lambda i: list(chat.stream(f"question {i}")),
        lambda i: chat.clear(),
        lambda i: chat.regenerate().finish(),
        lambda i: chat.save(tmp_path / f"{i}.json"),
        lambda i: chat.load(tmp_path / "chat.json"),
    ]

    def act(i):
        errors = 0
        for turn in range(6):
            try:
                acts[(i + turn) % 6](i)
            except SessionError:
                errors += 1
        return errors

    errors = on_threads(6, act)
    assert all(isinstance(item, int) for item in errors), errors
    check_consistency(chat)
    assert chat.send("last").tokens


# Tools


def time() -> str:
    """Tell the time."""
    return "noon"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """A model with Qwen's template, for scripts."""
    folder = make_scripted_checkpoint(
        tmp_path_factory.mktemp("caller"),
        tool_formats()["qwen2.5"][0],
        max_position_embeddings=2048,
    )
    return load(folder, backend="cpu")


@pytest.mark.parametrize("name", ["llama-3.1", "mistral-nemo", "qwen2.5", "smollm2"])
def test_functions_are_called_and_the_conversation_keeps_it(name, tmp_path):
    template, calls = tool_formats()[name]
    llm = load(make_scripted_checkpoint(tmp_path / "m", template), backend="cpu")
    chat = llm.chat(system="be kind", tools=[add, time], max_tokens=200)
    with Script(llm, calls, "It is 3 at noon.", "You are welcome.") as script:
        stream = chat.stream("1 + 2, and the time?")
        assert "".join(stream) == "It is 3 at noon." == stream.completion.text
        assert stream.completion.finish_reason == "eos"
        assert roles(chat.messages) == ["user", "assistant", "tool", "tool", "assistant"]
        made = chat.messages[1]["tool_calls"]
        assert [call["function"]["name"] for call in made] == ["add", "time"]
        assert [(item["content"], item["tool_call_id"]) for item in chat.messages[2:4]] == [
            ("3", made[0]["id"]),
            ("noon", made[1]["id"]),
        ]
        done = chat.send("thanks")
    check_consistency(chat)
    # The descriptions of the tools at least; Mistral's template moves them to the last question.
    assert done.reused_tokens > 150 or name == "mistral-nemo"
    assert "Add two numbers." in script.prompts[0]
    assert script.prompts[1].rindex("noon") > script.prompts[1].rindex('"a": 1')
    assert "It is 3 at noon." in script.prompts[2]
    assert script.prompts[2].index("noon") < script.prompts[2].index("It is 3")
    chat.save(tmp_path / "s.json")
    other = llm.chat()
    assert other.load(tmp_path / "s.json") == [] and other.messages == chat.messages
    with Script(llm, "Fine.") as script:  # a session without tools still tells of the calls
        assert other.send("and you?").text == "Fine." and '"b": 2' in script.prompts[0]
    with Script(llm, "Well.") as script:  # and so does a prompt of messages
        talk = [*chat.messages, {"role": "user", "content": "and you?"}]
        assert llm.generate(talk).text == "Well." and '"b": 2' in script.prompts[0]


def test_a_turn_with_calls_is_regenerated_and_dropped_as_one(caller):
    llm = caller
    chat = llm.chat(tools=[add], max_tokens=200)
    with Script(llm, CALL, "Seven.", CALL, "7", "Done.", CALL, "Again seven.") as script:
        long = "word " * (2048 // 12)
        chat.send(f"3 + 4? {long}")
        stream = chat.regenerate()
        assert stream.finish().text == "7" and len(chat.messages) == 4
        with pytest.raises(ContextError):
            chat.send(long * 8)
        assert chat.send("thanks").text == "Done." and chat.dropped == 0
        done = chat.send(f"and {long}")
        assert chat.dropped == 4
        assert any("the oldest 4 messages" in notice for notice in done.notices)
        assert done.text == "Again seven." and "3 + 4?" not in script.prompts[-1]
        assert len(chat.messages) == 10


def test_a_long_loop_of_calls_loses_its_oldest_rounds_and_keeps_its_question(caller, tmp_path):
    def read(page: int) -> str:
        """Read a page."""
        return f"<{page}> " + "word " * 100

    calls = [
        CALL.replace("add", "read").replace('"a": 3, "b": 4', f'"page": {i}') for i in range(9)
    ]
    chat = caller.chat(tools=[read], max_tokens=200, rounds=20)
    with Script(caller, *calls, "Done.", "Fine.") as script:
        done = chat.send("Which page?")
        assert done.text == "Done." and len(chat.messages) == 2 + 2 * 9
        told = [notice for notice in done.notices if "no longer seen by the model" in notice]
        assert len(told) == 1
        *_, last = script.prompts
        pages = [i for i in range(9) if f"<{i}>" in last]
        # whole rounds, the newest
        assert pages == list(range(9 - len(pages), 9)) and 1 < len(pages) < 9
        assert [i for i in range(9) if f'"page": {i}' in last] == pages
        assert "Which page?" in last and len(chat.seen) == 2 + 2 * len(pages)
        chat.save(tmp_path / "s.json")
        other = caller.chat()
        assert other.load(tmp_path / "s.json") == [] and other.seen == chat.seen
        assert chat.send("And?").text == "Fine." and "And?" in script.prompts[-1]
    assert chat.undo() and chat.seen == chat.messages and chat.undo() and chat.seen == []


def test_a_turn_with_calls_is_taken_back_as_one(caller):
    llm = caller
    chat = llm.chat(tools=[add], max_tokens=200)
    with Script(llm, CALL, "Seven."):
        chat.send("3 + 4?")
    with pytest.raises(
        SessionError, match="an answer in a conversation with tools cannot be continued"
    ):
        chat.resume()
    assert roles(chat.undo()) == ["user", "assistant", "tool", "assistant"]
    assert chat.messages == []


@pytest.mark.parametrize("pieces", range(4))
def test_leaving_between_calls_leaves_a_session_that_goes_on(pieces, caller):
    chat = caller.chat(tools=[add], max_tokens=200)
    with Script(caller, "a" + CALL, "bc", "next"):
        stream = chat.stream("go")
        shown = "".join(itertools.islice(stream, pieces))
        stream.close()
        assert len(chat.messages) == (0, 2, 4, 4)[pieces]
        whole = ["user", "assistant", "tool", "assistant"]
        assert roles(chat.messages) == whole[: len(chat.messages)]
        assert "abc".startswith(shown)
        check_consistency(chat)
        chat.messages or chat.send("go")
        assert chat.messages[-1]["role"] == "assistant"


def test_a_function_may_ask_its_own_session(caller):
    """A new question ends the unfinished answer, as anywhere else."""

    def ask() -> str:
        """Ask."""
        return chat.send("inner").text

    chat = caller.chat(tools=[ask], max_tokens=200)
    with Script(caller, '<tool_call>{"name": "ask", "arguments": {}}</tool_call>', "inner answer"):
        chat.send("outer")
    assert contents(chat.messages) == ["outer", "", "inner", "inner answer"]


def test_another_thread_may_close_an_answer_while_a_function_runs(caller):
    begun, over = threading.Event(), threading.Event()

    def wait() -> str:
        """Wait."""
        begun.set()
        over.wait(20)
        return "late"

    chat = caller.chat(tools=[wait], max_tokens=200)
    with Script(caller, 'a<tool_call>{"name": "wait", "arguments": {}}</tool_call>'):
        stream = chat.stream("go")
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        assert begun.wait(20)
        with pytest.raises(SessionError, match="another thread is reading"):
            next(stream)
        stream.close()
        assert chat.messages[1:] == [{"role": "assistant", "content": "a"}]
        over.set()
        reader.join(20)
    assert not reader.is_alive() and len(chat.messages) == 2


def test_half_of_a_character_is_replaced_and_told(llm, tmp_path):
    """The same tokens as U+FFFD has, also of earlier messages, and a file that can be written."""
    asked, shown = [{"role": "user", "content": text} for text in ("cut \ud83e", "cut \ufffd")]
    answer = {"role": "assistant", "content": "well"}
    texts = [llm.chat(messages=[one, answer]) for one in (asked, shown)]
    done = [
        chat.send(one["content"], max_tokens=4, seed=1) for chat, one in zip(texts, (asked, shown))
    ]
    assert done[0].text == done[1].text and texts[0].messages == texts[1].messages
    told = [[notice for notice in one.notices if "U+FFFD" in notice] for one in done]
    assert len(told[0]) == 1 and not told[1]
    texts[0].save(tmp_path / "s.json")
    for prompt in ("cut \ud83e", [asked]):
        assert any("U+FFFD" in notice for notice in llm.generate(prompt, max_tokens=1).notices)


def test_contents_may_be_lists_of_texts(llm):
    """As OpenAI's clients write them."""

    def write(*texts):
        return [{"type": "text", "text": text} for text in texts]

    plain = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    plain.append({"role": "assistant", "content": "you"})
    parts = [{**message, "content": write(*message["content"])} for message in plain]
    chat = llm.chat(messages=parts)
    assert (chat.system, chat.messages) == ("Be kind.", llm.chat(messages=plain).messages)
    assert (
        chat.send("hi", max_tokens=4).text == llm.chat(messages=plain).send("hi", max_tokens=4).text
    )
    parts[1]["content"] = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(SessionError, match=r"messages\[0\].content"):
        llm.chat(messages=parts)
