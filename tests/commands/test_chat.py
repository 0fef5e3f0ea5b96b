"""The chat: commands, scripts, the terminal, Markdown."""

import copy
import io
import json
import os
import re
import signal
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
from cases.texts import THOUGHT_TEMPLATES
from hypothesis import example, given, strategies as st
from launching import run_python
from making import make_checkpoint
from markdown_it import MarkdownIt
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.cells import cell_len
from rich.console import Console
from scripting import Script, make_scripted_checkpoint

from mlx_llama import generate, load
from mlx_llama.chat import (
    commands as chat_commands,
    dialogue,
    repl,
    terminal as chat_terminal,
    view as chat_view,
)
from mlx_llama.chat.markdown import Blocks, MarkdownView, Rendered
from mlx_llama.core.answers.completion import Completion, Writer
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Answer
from mlx_llama.core.errors import LlamaError
from mlx_llama.core.text.controls import show_controls

PROMPT = ">>> "
ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>78]|\([A-Z0-9])")


def plain(text):
    """`text` without escape sequences and carriage returns."""
    return ESCAPES.sub("", text).replace("\r", "")


@pytest.fixture(scope="module")
def model(toy):
    return load(toy, backend="cpu")


@pytest.fixture
def session(model):
    """A session after two turns."""
    session = model.chat(system="Be kind.", max_tokens=4)
    session.send("hello")
    session.send("once upon a time")
    return session


def command(session, line):
    """Run a command, and generate its answer to the end."""
    outcome = chat_commands.run(session, line)
    return outcome.finish() if isinstance(outcome, Answer) else outcome


@pytest.fixture
def talk(door, toy):
    """talk(lines, *flags, model): a script's run in this process."""

    def run(lines: str | bytes, *flags, model=toy):
        stdin = lines if isinstance(lines, bytes) else lines.encode()
        flags = ("--model", model, "--backend", "cpu", "-m", "3", *flags)
        return door(repl.main, *flags, stdin=stdin)

    return run


def state(session):
    return copy.deepcopy((session.messages, session.system, session.options, session.dropped))


def seen(session):
    """The text in the cache."""
    return session.engine.tokenizer.decode(session.cached_tokens)


# Commands


@pytest.mark.parametrize(
    "line, words",
    [
        ("/hlep", "there is no command '/hlep' (did you mean /help?)"),
        ("/", "there is no command '/' (/help lists them"),
        ("/frobnicate \x1b[31m", "'/frobnicate'"),
        ("/clear all", "/clear takes no argument"),
        ("/save", "/save needs an argument: /save FILE"),
        ("/load /nowhere/at all", "/nowhere/at all: cannot be read"),
        ("/load /", "/: is not a file"),
        ("/load ~nobodyhere/x", "cannot be read"),
        ("/read a\0b", "is not the name of a file"),
        ("/read /nowhere", "/nowhere: cannot be read"),
        ("/save /nowhere/at/all", "/nowhere/at/all: cannot be written"),
        ("/set temprature 1", "there is no option 'temprature' (did you mean 'temperature'?)"),
        ("/set temperature hot", "option `temperature`: 'hot' is not allowed"),
        ("/set temperature -1", "at least 0"),
        ("/set temperature nan", "option `temperature`"),
        ("/set top_p 0", "at least 1e-06"),
        ("/set max_tokens 1.5", "option `max_tokens`"),
        ("/set logit_bias 999999=1", "outside the vocabulary"),
        ("/set logit_bias x", "option `logit_bias`"),
        ("/set stop 'open", "is not a list of words"),
        ("/set stop ''", "not an empty one"),
    ],
)
def test_a_bad_command_is_one_line_and_changes_nothing(session, line, words):
    before = state(session)
    with pytest.raises(LlamaError) as caught:
        command(session, line)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()
    assert state(session) == before


def test_set_shows_sets_and_resets(session):
    def change(line: str) -> str:
        return command(session, f"/set {line}")

    everything = command(session, "/set")
    assert re.search(r"max_tokens +4 +user", everything)
    assert re.search(r"seed +random +default", everything)
    assert change("temp") == "temperature = 0 (default): softmax temperature; 0 is greedy"
    assert change("temp 0.7") == "temperature = 0.7 (user)"
    assert session.resolve().options.temperature == 0.7
    assert change("--temp default") == "temperature = 0 (default)"
    assert change("n 9") == "max_tokens = 9 (user)"
    assert change("seed 5") == "seed = 5 (user)"
    for unset in ("random", "-1"):
        assert change(f"seed {unset}") == "seed = random (default)"
    # as it must be typed
    for name in ("speculate", "logprobs", "schema", "regex", "grammar"):
        assert re.search(rf"{name} +none +default", everything)
        origin = "user" if name == "speculate" else "default"
        assert change(f"{name} none") == f"{name} = none ({origin})"
    session.defaults.lift_limit()
    assert change("max_tokens none") == "max_tokens = none (default)"
    assert change("max_tokens -1") == "max_tokens = none (user)"
    change("max_tokens default")
    assert change("regex a+") == "regex = a+ (user)"
    assert change("regex none") == "regex = none (default)"
    assert change('schema {"type": "integer"}') == 'schema = {"type": "integer"} (user)'
    change("schema default")
    assert change(r"stop 'a b' \n") == r"stop = 'a b' n (user)"
    assert change(r"stop '\n\n' User:") == r"stop = '\n\n' User: (user)"
    assert session.resolve().options.stop == ("\n\n", "User:")
    assert change("logit_bias 5=-2 7+1") == "logit_bias = 5=-2 7=1 (user)"
    assert session.resolve().options.logit_bias == {5: -2, 7: 1}


def test_the_system_prompt_is_seen_by_the_model(session):
    command(session, "/clear")  # keeps it
    assert session.messages == []
    session.send("hi")
    assert "Be kind." in seen(session) and "once upon" not in seen(session)
    assert command(session, "/system") == "system prompt: Be kind."
    command(session, "/system Be a llama.")
    session.send("hi")
    assert "Be a llama." in seen(session) and "Be kind." not in seen(session)
    command(session, "/system none")
    assert "no system prompt" in command(session, "/system")
    session.send("hi")
    assert "llama." not in seen(session)


def test_regen_replaces_the_last_answer(session):
    before = copy.deepcopy(session.messages)
    completion = command(session, "/regen")
    assert session.messages == before  # greedy
    assert "the same answer again" in completion.notices[0]
    command(session, "/set temperature 2")
    assert "same answer" not in str(command(session, "/regen").notices)
    assert session.messages[:-1] == before[:-1] and session.messages[-1] != before[-1]


@pytest.mark.parametrize(
    "change",
    ["/set max_tokens 5", "/set seed 7", "/set temp 0", "/system Be a llama.", "/continue"],
)
def test_regen_says_the_same_answer_only_where_it_comes(session, change):
    command(session, "/set temp 1")
    command(session, "/set seed 3")
    first = command(session, "/regen")
    again = command(session, "/regen")
    assert again.text == first.text and "the same answer again" in again.notices[0]
    command(session, change)
    assert "same answer" not in str(command(session, "/regen").notices)


# Cut answers


def test_continue_of_a_character_that_was_cut(model):
    """An answer of the two halves of a character, cut between them: é is two byte tokens."""
    assert len(model.tokenizer.encode("aé")) >= 3, "no cut inside the character"
    session = model.chat(grammar='start: "aé and b"')
    cut = session.send("hello", max_tokens=2).text
    text = cut + command(session, "/continue").text[len(cut) :]
    assert session.messages[-1]["content"] == "aé and b" and text.endswith(" and b")


def test_a_complete_answer_does_not_go_on(session):
    command(session, '/set grammar start: "yes"')
    session.send("really?")
    before = state(session)
    with pytest.raises(LlamaError, match="is complete"):
        command(session, "/continue")
    command(session, "/clear")
    with pytest.raises(LlamaError, match="ask something first"):
        command(session, "/continue")
    assert before[0][-1]["content"] == "yes"


def test_continue_follows_the_grammar_and_refuses_another(session):
    command(session, "/set max_tokens 3")
    command(session, "/set regex [ab]{6}")
    cut = session.send("spell").text
    assert re.fullmatch("[ab]{1,5}", cut)
    while session.last.finish_reason == "length":
        command(session, "/continue")
    assert re.fullmatch("[ab]{6}", session.messages[-1]["content"])
    command(session, "/set regex [ab]{9}")
    session.send("spell")
    command(session, "/set regex [0-9]+")
    with pytest.raises(LlamaError, match="option `regex`: the answer so far does not match"):
        command(session, "/continue")


# Undo, another model


def test_undo_shows_what_was_dropped_again(model):
    session = model.chat(max_tokens=4)
    while not session.dropped:
        session.send("once upon a time there was a little llama " * 3)
    while session.messages:
        command(session, "/undo")
        assert session.dropped == 0 or session.messages[session.dropped]["role"] == "user"
    assert session.dropped == 0
    with pytest.raises(LlamaError, match="nothing to undo"):
        command(session, "/undo")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model with another vocabulary, context and template."""
    return make_checkpoint(
        tmp_path_factory.mktemp("other") / "other",
        tokenizer="bytelevel",
        hidden_size=48,
        max_position_embeddings=300,
    )


@pytest.mark.slow
def test_another_model_goes_on_with_the_conversation(session, other, capsys):
    chat = dialogue.Chat(session, load=lambda name: load(name, backend="cpu"))
    chat.take("/model")
    chat.take(f"/model '{other}'")
    assert f"{other} on cpu" in capsys.readouterr().err
    assert state(chat.session)[:3] == state(session)[:3] and chat.session is not session
    chat.take("what is next?")
    for words in ("Be kind.", "once upon a time", "what is next?"):
        assert words in seen(chat.session)
    chat.take("/continue")
    chat.take("/undo")
    assert len(chat.session.messages) == 4


@pytest.mark.parametrize("name, words", [("/nowhere", "/nowhere"), ("", "hub id")])
def test_a_model_that_fails_keeps_the_old_one(session, name, words, tmp_path):
    (tmp_path / "empty").mkdir()
    chat = dialogue.Chat(session, load=lambda name: load(name, backend="cpu"))
    before = state(session)
    with pytest.raises(LlamaError):
        chat.take(f"/model {name or tmp_path / 'empty'}")
    assert chat.session is session and state(session) == before


def test_options_that_another_model_refuses_keep_the_old_one(session, other):
    session.options["logit_bias"] = {383: 1.0}
    chat = dialogue.Chat(session, load=lambda name: load(other, backend="cpu"))
    chat.take("/model other")  # both have 384 tokens
    small = chat.session
    small.options["logit_bias"] = {383: 1.0, 10**6: 1.0}
    with pytest.raises(LlamaError, match="outside the vocabulary"):
        chat.take("/model other")
    assert chat.session is small


def test_the_memory_of_the_old_model_is_free(toy, other):
    old = load(toy, backend="cpu")
    chat = dialogue.Chat(old.chat(max_tokens=2), load=lambda name: load(other, backend="cpu"))
    chat.take("hello")
    model = weakref.ref(old.model)
    del old
    chat.take("/model other")
    assert model() is None


def test_names_from_other_programs(session):
    for line in ("/bye", "/quit", "/exit"):
        with pytest.raises(chat_commands.Leave):
            command(session, line)
    text = command(session, "/?")
    assert text == command(session, "/help") and "/bye" in text and "/quit" in text
    assert all(f"/{name} " in text for name in chat_commands.COMMANDS)


def test_regen_of_a_stopped_answer_of_none_and_regen_never_begun(session):
    stream = session.stream("hi")
    next(stream)
    stream.close()
    assert "same answer" not in str(command(session, "/regen").notices)
    before = state(session)
    chat_commands.run(session, "/regen").close()
    assert state(session) == before
    command(session, "/clear")
    with pytest.raises(LlamaError, match="ask something first"):
        command(session, "/regen")


def test_stats_have_the_notices_of_the_model(session, monkeypatch):
    monkeypatch.setattr(
        type(session.engine.model), "notices", property(lambda model: ("a word about this model",))
    )
    command(session, "/clear")
    assert "no answer yet\nnote: a word about this model\n" in command(session, "/stats")
    session.send("hi")
    assert command(session, "/stats").count("note: a word about this model") == 1


def test_stats_tell_speed_reuse_and_evaluations(session):
    text = command(session, "/stats")
    context = session.engine.context
    for words in ("tokens/s", "evaluations per token: 1 ", "MiB", "4 messages"):
        assert words in text
    assert f"of {context} tokens cached" in text
    assert int(re.search(r"(\d+) reused", text)[1]) > 0
    assert "no answer yet" in command(session, "/clear") + command(session, "/stats")


def test_read_sends_a_file_as_one_message(session, tmp_path):
    (tmp_path / "my text.txt").write_bytes("\ufefffirst\n/second\n".encode())
    command(session, f"/read '{tmp_path}/my text.txt'")
    assert session.messages[-2]["content"] == "first\n/second\n"
    before = state(session)
    for name, data in (("empty", b" \n"), ("latin", b"\xe9t\xe9")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(LlamaError, match="is empty|is not UTF-8"):
            command(session, f"/read {tmp_path / name}")
    assert state(session) == before


def test_save_and_load(session, model, tmp_path):
    assert "saved 4 messages" in command(session, f"/save {tmp_path}/a b.json")
    other = model.chat()
    chat, shown = dialogue.Chat(other), []
    chat.say, chat.recall = shown.append, lambda *exchange: shown.append(exchange)
    chat.take(f"/load {tmp_path}/a b.json")
    assert shown == [
        "(loaded 4 messages, a system prompt, max_tokens = 4)",
        ("once upon a time", session.messages[-1]["content"]),
    ]
    assert state(other) == state(session)
    command(other, f"/save {tmp_path}/a b.json")  # replaces a saved session
    for precious in ("notes.txt", "other.json"):
        (tmp_path / precious).write_text('{"not": "a session"}')
        with pytest.raises(LlamaError, match="exists already"):
            command(session, f"/save {tmp_path / precious}")
        assert (tmp_path / precious).read_text() == '{"not": "a session"}'


def test_completion(session, tmp_path):
    (tmp_path / "notes.txt").touch()
    completer = chat_terminal.CommandCompleter(dialogue.Chat(session))

    def offered(text):
        return [
            text[: len(text) + each.start_position] + each.text
            for each in completer.get_completions(Document(text), CompleteEvent())
        ]

    # with a space before an argument, where the next Tab completes it
    assert offered("/s") == ["/system ", "/set ", "/show ", "/save ", "/stats"]
    assert len(offered("/")) == len(chat_commands.COMMANDS)
    assert offered("/set top") == ["/set top_k ", "/set top_p "]
    assert offered("/set n ") == ["/set n 4", "/set n default"]
    assert offered("/set regex ") == ["/set regex none", "/set regex default"]
    assert offered(f"/read {tmp_path}/no") == [f"/read {tmp_path}/notes.txt"]
    assert offered("/mo") == ["/model "]
    assert offered(f"/model {tmp_path}/no") == [f"/model {tmp_path}/notes.txt"]
    assert offered("hello") == offered("/frob x") == offered("/clear ") == offered("text\n/s") == []


# Scripts


def test_a_script_prints_answers_and_nothing_else(model, talk, tmp_path):
    saved = tmp_path / "saved.json"
    lines = f"""\ufeffhello
/system Be kind.

two\\
lines
//usr
/save {saved}
/set logit_bias 2=99
nothing
/exit
never"""
    result = talk(lines.replace("\n", "\r\n"), "-m", "6", "--stats")
    session = model.chat(max_tokens=6)
    answers = [session.send("hello").text]
    session.system = "Be kind."
    # the last begins with the end token
    answers += [session.send(text).text for text in ("two\nlines", "/usr")] + [""]
    assert result.out == "".join(answer + "\n" for answer in answers)
    assert contents(saved)[::2] == ["hello", "two\nlines", "/usr"]
    assert result.err.count("evaluations per token: 1 ") == 4
    assert "cut off after 6 tokens" in result.err
    assert result.code == 0


def test_an_answer_that_repeats_itself_is_ended(talk, door, toy):
    """By default in a chat, not of one prompt on the command line."""
    lines = "/set repetition_limit\nhello\n/set repetition_limit 40\n/clear\nhello\n/resume\n/stats"
    options = "-m", "210", "--logit-bias", "229=99"
    result = talk(lines, *options)
    assert "repetition_limit = 200 (default)" in result.err
    cut = [line for line in result.err.splitlines() if "because the answer repeats" in line]
    assert [re.search(r"stopped after (\d+) tokens", line)[1] for line in cut] == [
        "200",
        "40",
        "40",
    ]
    assert "/resume continues it, /set repetition_limit 0 lets all answers go on" in cut[0]
    assert "note: the answer was ended because it repeats the same token" in result.err
    result = talk("/set repetition_limit 0\nhello", *options)
    assert "repeats" not in result.err and "cut off after 210 tokens" in result.err
    one = ["--model", toy, "--backend", "cpu", "-p", "hello", *options]
    assert "repeats" not in door(generate.main, *one).err
    said = door(generate.main, *one, "--repetition-limit", "40").err
    assert "repeats the same token again and again: --repetition-limit 0 lets it go on" in said


def test_a_failing_line_is_told_and_the_rest_still_runs(talk):
    result = talk(f"/frob\n/load /nowhere\n{'once upon a time ' * 100}\nhello\\")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [error.split(":")[1] for error in errors] == [" line 1", " line 2", " line 3"]
    assert "the context holds 256" in errors[2]
    assert result.out.strip() and result.code == 2


def test_text_that_is_no_utf8_is_one_line_and_exit_code_2(talk):
    result = talk(b"hello\nfine\xff\n")
    *_, last = result.err.splitlines()
    assert last.startswith("error: standard input, line 2: is not UTF-8 (byte 4")
    assert result.err.count("error: ") == 1 and result.code == 2


def test_a_byte_of_a_flag_that_is_no_utf8_is_replaced_and_told(talk):
    result = talk("hello\n", "-sys", "a\udcff")
    assert result.code == 0 and "was replaced by U+FFFD" in result.err
    assert result.out == talk("hello\n", "-sys", "a\ufffd").out


def test_a_model_without_template_is_told_before_anything_is_asked(talk, tmp_path):
    bare = make_checkpoint(tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    result = talk("hello\n", model=bare)
    assert (result.code, result.out) == (2, "")
    assert "no chat template" in result.err and "--template" in result.err
    assert result.err.count("\n") == 1


def test_a_pipe_needs_neither_prompt_toolkit_nor_rich(toy):
    program = (
        "import sys; from mlx_llama import cli; from mlx_llama.chat import repl; "
        "sys.exit(cli.run(repl.main) or not {'rich', 'prompt_toolkit'}.isdisjoint(sys.modules))"
    )
    flags = f"--model {toy} --backend cpu -m 2".split()
    result = run_python("-c", program, *flags, input="hello\n")
    assert result.returncode == 0 and result.stdout.strip(), result.stderr


def interrupt_after(count):
    """A view with Ctrl-C after so many pieces, and the pieces that it has shown."""
    shown = []

    class View(dialogue.Plain):
        def push(self, piece):
            shown.append(piece)
            if len(shown) == count:
                signal.raise_signal(signal.SIGINT)

        think = push

    return View, shown


def test_ctrl_c_in_a_script_ends_it(roomy, talk, monkeypatch):
    view, shown = interrupt_after(3)
    monkeypatch.setattr(dialogue.Plain, "push", view.push)
    result = talk("hello\nagain\n", "-m", "90000", model=roomy)
    assert result.code == 130 and len(shown) == 3
    assert result.err.splitlines() == ["(stopped)"]


# Ctrl-C


def test_ctrl_c_keeps_the_text_so_far(session):
    view, shown = interrupt_after(2)
    session.options["max_tokens"] = 100
    stream = session.stream("hi")
    with pytest.raises(KeyboardInterrupt):
        dialogue.Chat(session, view).show(stream)
    assert session.messages[-2:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "".join(shown)},
    ]
    assert len(shown) == 2
    # An empty cache gives the same next answer.
    session.options["max_tokens"] = 8
    warm = session.send("and then?").text
    cold = copy.copy(session)
    engine = session.engine
    cold.messages = session.messages[:-2]
    cold.loop = Loop(engine.backend, engine.model, engine.tokenizer, engine.eos, engine.context)
    assert cold.send("and then?").text == warm


class Pieces:
    """An answer that gives the pieces of a generator."""

    def __init__(self, pieces):
        self.left, self.completion, self.progress = pieces, Completion(), (0, 0)

    def pieces(self):
        return self.left

    def close(self):
        self.completion.finish_reason = self.completion.finish_reason or "interrupted"


@pytest.mark.parametrize(
    "pieces, shown",
    [
        (["^C", "never shown"], ""),
        (["shown", "^C", ", whole", ", never shown"], "shown, whole\n"),
        (["shown", "^C", "^C", ", never shown"], "shown\n"),
    ],
    ids=["at once", "the model finishes its step", "a second does not wait for a piece"],
)
def test_ctrl_c_between_pieces(pieces, shown, session, capsys):
    before = state(session)

    def press():
        for piece in pieces:
            if piece == "^C":
                signal.raise_signal(signal.SIGINT)
            else:
                yield piece

    with pytest.raises(KeyboardInterrupt):
        dialogue.Chat(session).show(Pieces(press()))
    assert capsys.readouterr() == (shown, "(stopped)\n")
    assert state(session) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_during_the_last_step_is_not_lost(session, capsys):
    def pieces():
        yield "shown"
        signal.raise_signal(signal.SIGINT)

    class Whole(Pieces):
        def close(self):
            super().close()
            signal.raise_signal(signal.SIGINT)  # and another one while the stream is closed

    for kind in (Pieces, Whole):
        handle = kind(pieces())
        handle.completion.finish_reason = "eos"
        handle.completion.text = "shown"
        with pytest.raises(KeyboardInterrupt):
            dialogue.Chat(session).show(handle)
        assert capsys.readouterr() == ("shown\n", "")


def test_ctrl_c_during_the_last_step_of_a_script_ends_it(model, talk, monkeypatch):
    take, ends = Writer.push, []

    def push(self, *args):
        take(self, *args)
        if self.is_finished:
            ends.append(self.completion.finish_reason)
            signal.raise_signal(signal.SIGINT)

    # An answer whose last step brings no text
    end = int(model.chat().send("hello", max_tokens=12).tokens[8])
    monkeypatch.setattr(Writer, "push", push)
    result = talk("hello\nagain\n", "-m", "12", "--stop-token-ids", end)
    assert result.code == 130 and result.out.strip() and ends == ["stop"], result.err


# Progress of a prompt


def test_a_view_is_told_how_much_of_the_prompt_is_processed(session, monkeypatch):
    monkeypatch.setattr(dialogue, "PROGRESS_SECONDS", 0.001)
    called, calls = threading.Event(), []

    class Slow(Pieces):
        def __init__(self, pieces):
            super().__init__(pieces)
            self.progress = 512, 2000

    class View(dialogue.Plain):
        def wait(self, done, total):
            calls.append((done, total))
            called.set()

        def push(self, piece):
            calls.append(piece)

    def pieces():
        assert called.wait(20)
        yield "one"
        yield "two"

    dialogue.Chat(session, View).show(Slow(pieces()))
    assert calls[0] == (512, 2000) and calls[-2:] == ["one", "two"]


def test_progress_of_a_stream(roomy):
    llm = load(roomy, backend="cpu")
    stream = llm.chat().stream("once upon a time " * 60, max_tokens=2, prefill_step_size=64)
    total = stream.completion.prompt_tokens
    seen = [stream.progress]
    while stream.progress[0] < total:
        llm.loop.tick() if seen[1:] else stream.begin()
        seen.append(stream.progress)
    stream.close()
    assert seen[0] == (0, total) and len(set(seen)) > 3 and seen == sorted(seen)


def test_the_progress_is_drawn_and_erased():
    screen = console()
    with MarkdownView(screen) as view:
        view.wait(512, 2000)
        assert on_screen(screen.file.getvalue())[0] == "reading the prompt: 512 of 2000 tokens"
        view.wait(1024, 2000)
        assert on_screen(screen.file.getvalue())[0] == "reading the prompt: 1024 of 2000 tokens"
        view.push("done")
    assert "reading" not in "".join(on_screen(screen.file.getvalue()))


def test_plain_progress_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr(chat_view, "NEWS_SECONDS", 0.0)
    chat_view.Plain(clean=True).wait(512, 2000)
    chat_view.Plain().wait(512, 2000)  # to a file or pipe
    assert capsys.readouterr() == ("", "(reading the prompt: 512 of 2000 tokens)\n")


# Markdown, block by block

LINES = st.sampled_from(
    (
        "¶¶¶text¶more *text*¶- item¶  below¶1. one¶12) twelve¶   deep¶```¶```python¶~~~¶"
        "    indented¶  ```¶- ```¶> quote¶> ```¶# title¶---¶===¶| a | b |¶|---|---|¶<b>¶*¶`x`¶"
        "```x``` y¶\t- tab¶+ ¶````¶- - nested"
    ).split("¶")
)
MARKDOWN = st.lists(LINES, max_size=14).map("\n".join)
PARSER = MarkdownIt("commonmark", {"html": False}).enable("table").disable("reference")


def cut(text, sizes=(1,)):
    blocks, finished, at, turn = Blocks(), [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        finished += blocks.push(text[at : at + size])
        at, turn = at + size, turn + 1
    return finished, blocks.rest


@given(
    MARKDOWN | st.text("-*`~ \n\t\rab1.|#>\u2028", max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_blocks_of_any_pieces_are_the_text(text, sizes):
    finished, rest = cut(text, sizes)
    assert "".join(finished) + rest == text
    assert (finished, rest) == cut(text, [len(text) or 1])


@given(MARKDOWN)
@example("- ```\n  x\n  ```\n\n```\ncode\n\nmore\n```")
@example("- ```\n````\n\n```\n")
@example("- a\n  ```\nb\n\n```\nc\n\nd\n```")
@example("```\n\ncode\n\n    ```\n\nmore\n```\nend")
@example("    ```\n\nfoo\n\n```\ncode\n\nmore\n```")
def test_a_cut_changes_no_meaning(text):
    def meaning(source):
        return [(token.type, token.content, token.info) for token in PARSER.parse(source)]

    finished, rest = cut(text)
    assert [each for block in [*finished, rest] for each in meaning(block)] == meaning(text)


def test_blocks_finish_soon():
    blocks = ["one\n\n", "two\n```\na\n\nb\n```\n"]
    assert cut("".join(blocks) + "three") == (blocks, "three")
    assert cut("- a\n\n  more\n\n- b\n\nend\n") == (["- a\n\n  more\n\n- b\n\n"], "end\n")


# Markdown on the screen


def console(width=60, height=20):
    kind = dict(force_terminal=True, color_system="truecolor", _environ={"TERM": "xterm-256color"})
    kind |= dict(highlight=False, legacy_windows=False)
    return Console(file=io.StringIO(), width=width, height=height, **kind)


def rendered(text, width=60):
    screen = console(width)
    screen.print(Rendered(text))
    return screen.file.getvalue()


def on_screen(output, height=20):
    """Final lines of MarkdownView's output, scrolled ones included. Fails for unexpected control
    sequences.
    """
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\n|\r|[^\x1b\n\r]+", output):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1])
            assert row >= max(0, len(lines) - height), "the cursor went above the screen"
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part[0] not in "\x1b\r":
            lines[row] += part
        else:
            assert part == "\r" or part[-1] in "mhl", part
    return [line.rstrip() for line in lines]


SAMPLE = (
    """# A title

A [link](http://a.b/c?d=1 "t"), [bold red]markup[/], <b>html</b>, ![alt](img.png), :smile:
a second line with **bold** and `code <x>`

[1]: http://ref.example

- one

  more
- two

"""
    + "```python\n"
    + "\n".join(f"line_{i} = {i}\n" for i in range(30))
    + """```
after

| a | b |
|---|--:|
| """
    + "verylongword" * 9
    + """ | 2 |

<script>alert(1)</script>

the *end"""
)


def test_markdown_is_rendered_and_nothing_is_left_out():
    shown = plain(rendered(SAMPLE))
    words = (
        "link (http://a.b/c?d=1)¶[bold red]markup[/]¶<b>html</b>¶img.png¶:smile:\n¶"
        "with bold and code <x>\n¶http://ref.example¶• one\n¶• two¶<script>alert(1)</script>¶"
        "the *end"
    )
    for part in words.split("¶"):
        assert part in shown, part
    assert "```" not in shown and "**" not in shown
    assert shown.count("verylongword") + len(re.findall("veryl?o?n?g?w?o?r?\n", shown)) >= 8
    code = rendered("```python\ndef f(): pass\n```")
    assert re.search(r"\x1b\[[0-9;]*m *def", code), "no colours"


def test_text_from_a_model_is_data():
    hostile = (
        "a\x1b[31mb\x07c\x9b2Jd\re\x7f &#27;[2J &#x9b; `\x1b]0;t\x07` [x](http://a.b/\x1b\\)\n\n"
        "```\n\x1bcode\x08\n```"
    )
    for output in (re.sub(r"\x1b\[[0-9;]*m", "", rendered(hostile)), show_controls(hostile)):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", output), repr(output)
        assert "␛[31mb␇c" in output


@given(MARKDOWN | st.text(max_size=80), st.sampled_from([3, 20, 60]))
@example("|a|b|c|d|e|f|\n|-|-|-|-|-|-|\n|1x|2x|3x|4x|5x|6x|", 3)
@example("> " * 30 + "deep", 20)
def test_every_letter_of_any_text_appears(text, width):
    # entities, escapes, addresses, info strings aside
    text = re.sub(r"[&\\\[\]<>`~](?=\w)|python", "", text)
    output = plain(rendered(text, width))
    letters = Counter(filter(str.isalpha, text))
    assert not letters - Counter(output)


@pytest.mark.parametrize("size", [3, 50, 5000])
def test_a_streamed_answer_stays_on_the_screen_once(size):
    screen = console(height=12)
    view = MarkdownView(screen)
    with view:
        for at in range(0, len(SAMPLE), size):
            view.due = 0.0  # draw every frame
            view.push(SAMPLE[at : at + size])
    lines = on_screen(screen.file.getvalue(), height=12)
    finished, rest = cut(SAMPLE)
    wanted = "\n".join(plain(rendered(block)) for block in [*finished, rest])
    shown, wanted = "\n".join(lines).strip().splitlines(), wanted.strip().splitlines()
    assert [line.strip() for line in shown] == [line.strip() for line in wanted]
    assert re.findall(r"\x1b\[\?25[hl]", screen.file.getvalue())[-1][-1] == "h"  # not hidden


def test_a_frame_is_drawn_while_the_block_is_unfinished_and_a_finished_one_once():
    screen = console(height=12)
    with MarkdownView(screen) as view:
        view.push("first\n")
        view.due = float("inf")  # no frame until the end
        view.push("\nsecond\n")
        assert on_screen(screen.file.getvalue()).count("first") == 1
    screen = console(height=12)
    with MarkdownView(screen) as view:
        view.push("un**finished**")
        assert "unfinished" in on_screen(screen.file.getvalue())[0]
        view.due = 0.0
        view.push("\n" + "\n".join(f"line {i}  " for i in range(40)))
        assert "line 39" in plain(screen.file.getvalue()), "the newest line must be in sight"


def test_an_answer_that_goes_on_shows_its_last_block_again():
    screen = console()
    with MarkdownView(screen) as view:
        view.begin("first\n\n```python\ncut = ")
        assert "cut =" in "".join(on_screen(screen.file.getvalue()))
        view.push("5\n```\nend")
    lines = [line.strip() for line in on_screen(screen.file.getvalue()) if line.strip()]
    assert lines == ["cut = 5", "end"]


@pytest.mark.parametrize("width, rows", [(60, 3), (30, 6), (20, 9), (61, 3), (200, 3)])
def test_a_frame_is_erased_in_the_rows_of_a_resized_terminal(width, rows):
    """A terminal that becomes narrower wraps a line of 50 cells into more rows."""
    screen = console(60)
    with MarkdownView(screen) as view:
        view.due = 0.0
        view.push("x" * 50 + "\n" + "y" * 50 + "\n" + "z" * 50)
        screen.width, view.due = width, 0.0
        before = len(screen.file.getvalue())
        view.push("!")
        assert screen.file.getvalue()[before:].count("\x1b[1A\x1b[2K") == rows


def test_a_thought_is_dimmed_and_folded_to_a_line():
    screen = console(height=12)
    with MarkdownView(screen) as view:
        view.due = 0.0
        view.think("\n".join(f"step {i} \x1b[31m" for i in range(30)))
        shown = on_screen(screen.file.getvalue(), height=12)
        assert shown[0].startswith("step 22") and "step 29 ␛[31m" in "".join(shown)
        assert "\x1b[2;3m" in screen.file.getvalue()
        view.fold("thought for 90 tokens")
        view.push("The **answer**.")
    shown = on_screen(screen.file.getvalue(), height=12)[:3]
    assert shown == ["(thought for 90 tokens)", "", "The answer."]


def make_thinker(folder, template):
    """A model with the template of a reasoning model."""
    folder = make_scripted_checkpoint(folder / "m", THOUGHT_TEMPLATES[template])
    return load(folder, backend="cpu")


def test_thoughts_are_folded_shown_and_turned_off(tmp_path, session, capsys):
    thinker = make_thinker(tmp_path, "qwen3")
    chat = dialogue.Chat(thinker.chat(), lambda: dialogue.Plain(clean=True))
    with Script(thinker, "<think>\nThey greet.\n</think>\n\nHello.", "Hi.") as script:
        chat.take("Hello?")
        out, err = capsys.readouterr()
        tokens = chat.session.last.reasoning_tokens
        assert (out, err) == ("Hello.\n", f"(thought for {tokens} tokens: /show thoughts)\n")
        assert command(chat.session, "/show thoughts") == "They greet."
        assert command(chat.session, "/think") == "(thoughts: auto)"
        assert command(chat.session, "/think off") == "(thoughts: off)"
        chat.take("Hello?")
    assert capsys.readouterr() == ("Hi.\n", "")
    assert script.prompts[1].endswith("<think>\n\n</think>\n\n")
    assert command(chat.session, "/show thoughts") == "(the last answer has no thought)"
    for where, line, words in (
        (chat.session, "/think maybe", "/think needs on or off"),
        (chat.session, "/show answers", "/show shows thoughts"),
        (session, "/think on", "has no thoughts"),
    ):
        with pytest.raises(LlamaError, match=words):
            command(where, line)


def test_ctrl_c_in_a_thought_keeps_it_for_resume(tmp_path, capsys):
    view, shown = interrupt_after(3)
    chat = dialogue.Chat(make_thinker(tmp_path, "r1").chat(), view)  # random: thinks for ever
    with pytest.raises(KeyboardInterrupt):
        chat.take("Hello?")
    assert capsys.readouterr() == ("", "(stopped)\n")
    thought = "".join(shown)
    last = {"role": "assistant", "content": "", "reasoning_content": thought}
    assert thought and chat.session.messages[-1] == last
    longer = chat.session.resume(max_tokens=5).finish().reasoning
    assert longer.startswith(thought) and len(longer) > len(thought)


# Lines for the user


@given(
    st.lists(st.text("abc漢-/.", min_size=1, max_size=12), max_size=12),
    st.integers(30, 90),
    st.sampled_from(["", "  "]),
)
def test_lines_wrap_between_words(words, width, margin):
    line = margin + " ".join(words)
    parts = chat_terminal.wrap(line, width)
    assert " ".join(parts).split() == line.split()
    assert all(cell_len(part) <= width for part in parts)


def test_columns_of_a_list_stay_where_they_fit():
    line = "  /load FILE   continue a saved conversation, from its cache if it was saved"
    assert chat_terminal.wrap(line, 40) == [
        "  /load FILE   continue a saved",
        "               conversation, from its",
        "               cache if it was saved",
    ]
    assert chat_terminal.wrap(line, 24) == [
        "  /load FILE  continue a",
        "    saved conversation,",
        "    from its cache if it",
        "    was saved",
    ]
    assert chat_terminal.wrap("word " * 3 + "x" * 30, 20) == ["word word word", "x" * 20, "x" * 10]
    assert chat_terminal.wrap("", 20) == [""]
    assert chat_terminal.wrap("  /exit" + " " * 20 + "leave", 30) == ["  /exit  leave"]


# In a terminal

# A model that always answers with the text in $ANSWER.
PARROT = """
import os, sys, time
from mlx_llama import cli
from mlx_llama.chat import repl
from mlx_llama.core.engine.request import Answer

def read(self):
    self.begin()
    self.left = getattr(self, "left", None) or iter(os.environ["ANSWER"])
    for piece in self.left:
        time.sleep(float(os.environ.get("PAUSE", 0)))
        self.completion.text += piece
        return piece
    self.completion.finish_reason = "eos"
    self.close()  # the turn joins the conversation

Answer.read = read
sys.exit(cli.run(repl.main))
"""


def parrot(terminal, toy, **environment):
    """A chat with it, at the prompt."""
    child = terminal("-c", PARROT, "--model", toy, "--backend", "cpu", **environment)
    child.expect_exact(PROMPT)
    return child


def press(child, keys, *shown):
    """Send keys; the texts appear, then the prompt."""
    child.send(keys)
    for text in (*shown, PROMPT):
        child.expect_exact(text)


def contents(path: Path) -> list[str]:
    """The texts of a saved conversation."""
    return [message["content"] for message in json.loads(path.read_text())["messages"]]


def leave(child, keys="\x04"):
    """Press Ctrl-D, or other keys that leave; returns all output."""
    child.send(keys)
    child.read()
    child.close()
    assert child.exitstatus == 0
    return child.logfile_read.getvalue()


def test_a_chat_in_a_terminal(terminal, roomy, tmp_path):
    child = terminal(
        *f"-m mlx_llama.chat --model {roomy} --backend cpu -m 99999 --logit-bias 2=-100".split(),
        *("--repetition-limit", "0"),
    )  # token 2 would end the answer
    child.expect_exact("context 100000 tokens")
    child.expect_exact("Ctrl-D leaves")
    child.expect_exact(PROMPT)
    # stop an endless answer; the session goes on
    child.send("hello\r")
    child.expect_exact("\x1b[?25l")
    child.expect(r"(?s).{2000}")
    child.send("xyzzy")  # no echo inside the answer
    child.expect(r"(?s).{2000}")
    child.sendintr()
    child.expect_exact("(stopped)")
    child.expect_exact(PROMPT)
    assert "Ctrl-D" not in child.before
    child.send("/set max_tokens 5\r")
    child.expect_exact("max_tokens = 5 (user)")
    # Ctrl-C clears the line, and an empty line gets a hint
    child.expect_exact(PROMPT)
    child.send("rubbish")
    child.expect_exact("rubbish")
    child.sendcontrol("c")
    press(child, "second\\\rline\x1b\rthird\r", "cut off after 5 tokens")
    child.sendcontrol("c")
    child.expect_exact("(Ctrl-D leaves)")
    # a paste is one message; Tab completes
    child.expect_exact(PROMPT)
    child.send("\x1b[200~pasted\nlines\x1b[201~")
    press(child, "\r", "cut off after 5 tokens")
    press(child, "/hlep\r", "did you mean /help?")
    child.send("/sta\t\r")
    child.expect(r"[1-9]\d* reused")
    child.expect_exact(PROMPT)
    press(child, f"/save {tmp_path}/saved.json\r", "saved 6 messages")
    assert "xyzzy" not in leave(child)
    texts = contents(tmp_path / "saved.json")
    assert texts[::2] == ["hello", "second\nline\nthird", "pasted\nlines"]
    assert texts[1]  # the text before Ctrl-C


@pytest.mark.slow
def test_keys_typed_during_an_answer_wait_for_the_prompt(terminal, toy, tmp_path):
    child = parrot(terminal, toy, ANSWER="so slow", PAUSE="0.1")
    child.send("hello\r")
    child.expect_exact("so")
    child.send(f"typed ahead\r/save {tmp_path}/saved.json\r\x04")
    child.read()
    texts = contents(tmp_path / "saved.json")
    assert texts == ["hello", "so slow", "typed ahead", "so slow"]


@pytest.mark.slow
def test_history_across_runs(terminal, toy, tmp_path):
    for keys in ("a line to remember\r", "\x1b[A"):
        child = terminal("-m", "mlx_llama.chat", "--model", toy, "--backend", "cpu", "-m", "1")
        child.expect_exact(PROMPT)
        child.send(keys)
        child.expect_exact("a line to remember")
        if keys.endswith("\r"):
            child.expect_exact("cut off")
            child.expect_exact(PROMPT)
            leave(child)
    path = tmp_path / "state" / "mlx_llama" / "history"
    assert path.stat().st_mode & 0o077 == 0


def test_a_user_without_a_home_has_no_history(monkeypatch, capsys):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    history = chat_terminal.History(chat_terminal.history_path())
    assert "the history is kept for this run only" in capsys.readouterr().err
    assert history.is_writable
    history.store_string("a line")
    assert list(history.load_history_strings()) == []


def test_a_history_that_cannot_be_written_is_told_once(tmp_path, capsys):
    (tmp_path / "file").touch()
    history = chat_terminal.History(tmp_path / "file" / "history")
    for line in ("hello", "again"):
        history.append_string(line)
    assert history.get_strings() == ["hello", "again"]
    assert capsys.readouterr().err.count("the history is kept for this run only") == 1


@pytest.mark.slow_for("environment1")
@pytest.mark.parametrize(
    "environment, markdown, leaving",
    [({}, True, "exit\r"), ({"NO_COLOR": "1"}, False, "Quit\r"), ({"TERM": "dumb"}, False, "\x04")],
)
def test_markdown_in_a_terminal_and_plain_text_on_request(
    terminal, toy, environment, markdown, leaving
):
    """A word of other programs leaves, too."""
    answer = "some **bold** text\x1b[2J\n\n- item\x07\n\nend."
    child = parrot(terminal, toy, **environment, ANSWER=answer)
    press(child, "hello\r", "end.")
    output = leave(child, leaving)
    shown = output[output.index("some ") : output.rindex("end.")]
    for words, is_rendered in (
        ("some bold text␛[2J", True),
        ("• item␇", True),
        ("some **bold** text␛[2J", False),
        ("- item␇", False),
    ):
        assert (words in plain(shown)) == (is_rendered == markdown), words
    assert "\x1b[2J" not in shown and "\x07" not in shown


def test_commands_in_a_terminal(terminal, toy, tmp_path):
    child = parrot(terminal, toy, ANSWER="an *answer*")
    press(child, "Help\r", "(/help: ")
    child.send(" exit\r")  # a message
    child.expect_exact("answer")
    child.expect_exact(PROMPT)
    press(child, f"/save {tmp_path}/saved.json\r", "saved 2 messages")
    # the last message, in the line editor
    child.send("/edit\r")
    child.expect_exact("edit> ")
    child.expect_exact("exit")
    press(child, ", or stay\r", "answer")
    # Ctrl-C clears the line, and leaves an empty one; unchanged
    for leaving in ("\x03\x03", "\x03\r", "\r"):
        child.send("/edit\r")
        child.expect_exact("edit> ")
        child.expect_exact("stay")
        press(child, leaving, "(the message stays as it was)")
    press(child, "/undo\r", "(took back 'exit, or stay' and its answer; the conversation is empty)")
    # what was said before
    child.send(f"/lo\t{tmp_path}/saved.json\r")
    child.expect_exact("(loaded 2 messages)")  # without an option that nobody set
    child.expect_exact(">>>  exit")
    child.expect(r"an .*answer")
    child.expect_exact(PROMPT)
    press(child, f"/model {tmp_path}/nowhere\r", "error: ")
    press(child, "/model guide\r", "context 512 tokens", "(2 messages are kept)")
    leave(child, "/bye\r")


@pytest.mark.slow
def test_a_dumb_terminal_gets_no_escape_sequences(terminal, toy):
    child = parrot(terminal, toy, ANSWER="an *answer*", TERM="dumb")
    press(child, "/help\n", "/bye and /quit")
    child.sendline("two\\")
    child.expect_exact("... ")
    press(child, "lines\n", "an *answer*")
    child.sendline("/edit")
    child.expect_exact("(the message was: two")
    child.expect_exact("edit> ")
    press(child, "one line\n", "an *answer*")
    press(child, "/undo\n", "(took back 'one line'")
    assert "\x1b" not in leave(child)


@pytest.mark.slow
def test_lines_wrap_in_a_narrow_terminal(terminal, toy):
    child = parrot(terminal, toy, ANSWER="answer")
    child.setwinsize(24, 40)
    child.send("/help\r")
    child.expect_exact("// sends a text that begins with /.")
    shown = plain(child.before).split("(Ctrl-D", 1)[-1]
    lines = shown[shown.index("  /help") :].split("\n")
    assert max(map(len, lines)) <= 40
    words = " ".join(lines).split()
    assert words == chat_commands.COMMANDS["help"].run(None, "").split()[: len(words)]
    child.expect_exact(PROMPT)
    leave(child)


@pytest.mark.slow_for("100")
@pytest.mark.parametrize("columns, up", [(30, 2), (100, 0)])
def test_a_typed_line_is_erased_in_the_rows_of_a_resized_terminal(terminal, toy, columns, up):
    child = parrot(terminal, toy, ANSWER="answer")
    child.send("a line of sixty-four characters, which a narrow screen must wrap")
    child.expect_exact("wrap")
    child.setwinsize(24, columns)
    erased = r"\x1b\[%dA(?:\x1b\[\d*D)?\x1b\[J"  # what is below is erased, from the first row on
    if up:
        child.expect(erased % up)  # the new size must be seen before the keys
    child.sendcontrol("c")
    child.sendcontrol("c")
    child.expect_exact("(Ctrl-D leaves)")
    assert not re.search(erased.replace("%d", r"\d*"), child.before)
    child.expect_exact(PROMPT)
    leave(child)


def test_a_pipe_gets_no_escape_sequences(talk, tmp_path):
    files = f"/save {tmp_path}/s.json\n/load {tmp_path}/s.json\n"
    result = talk(f"hello\n/set\n/continue\n/undo\n/undo\n/model guide\n{files}/edit\n/help")
    assert "\x1b" not in result.out + result.err
    assert "(loaded 0 messages, max_tokens = 3)" in result.err
    assert "needs the new text" not in result.err


def test_edit_in_a_script_needs_its_text(talk):
    result = talk("hello\n/edit\n/edit ho\n")
    assert result.err.count("error: ") == 1
    assert "/edit needs the new text here: /edit TEXT" in result.err
    assert result.out.count("\n") >= 2 and result.code == 2


def test_a_prompt_cache_of_another_model_is_not_saved(talk, other, tmp_path):
    path = tmp_path / "cache.safetensors"
    result = talk(f"hello\n/model {other}\nhello\n", "--prompt-cache", path)
    assert result.code == 0 and "is not saved: /model chose another model" in result.err
    assert not path.exists()
