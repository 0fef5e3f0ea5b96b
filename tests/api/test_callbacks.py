"""Callbacks that call back: each public method of a model, a conversation and a stream, in each
callback, works or raises SessionError; none waits for ever.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from types import SimpleNamespace

import pytest
from making import make_checkpoint

from mlx_llama import load
from mlx_llama.api.llm import LLM
from mlx_llama.api.session import Session
from mlx_llama.core.engine.request import Answer
from mlx_llama.core.errors import SessionError

PROMPT, QUESTION = "Once upon a time", [{"role": "user", "content": "hi"}]
SHORT = {"max_tokens": 2}
SECONDS = 30  # a callback that waits longer waits for ever


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


async def read(pieces):
    return [piece async for piece in pieces]


# Calls that work inside a tick. `x` has the model, a stream that another thread may read, the
# conversation and stream whose callback this is, another conversation and a folder.
WORKING = {
    LLM: {
        "chat": lambda x: x.llm.chat(),
        "encode": lambda x: x.llm.encode(QUESTION),
        "identify_cache": lambda x: x.llm.identify_cache(),
        "logits": lambda x: x.llm.logits([1, 2, 3]),
        "look_up": lambda x: x.llm.look_up("hi"),
        "require_template": lambda x: x.llm.require_template(),
        "respond": lambda x: x.llm.respond(QUESTION, [double]),
        "save_cache": lambda x: x.llm.save_cache(x.folder / "cache"),
        "stream": lambda x: x.llm.stream(PROMPT),
        "submit": lambda x: x.llm.submit(PROMPT, **SHORT),
    },
    Session: {
        "adapter": lambda x: x.chat.adapter,
        "cached_tokens": lambda x: x.chat.cached_tokens,
        "last_question": lambda x: x.other.last_question,
        "resolve": lambda x: x.chat.resolve(),
        "save": lambda x: x.other.save(x.folder / "talk", cache=True),
        "engine": lambda x: repr(x.chat),
        "seen": lambda x: x.chat.seen,
        "tokenizer": lambda x: x.chat.tokenizer,
    },
    Answer: {
        "begin": lambda x: (x.handle.begin(), x.stream.begin()),
        "calls": lambda x: x.stream.calls,
        "cancel": lambda x: x.handle.cancel(),
        "close": lambda x: x.stream.close(),
        "completion": lambda x: x.stream.completion,
        "done": lambda x: x.handle.done,
        "error": lambda x: x.handle.error,
        "messages": lambda x: x.stream.messages(),
        "pieces": lambda x: x.stream.pieces(),
        "progress": lambda x: x.stream.progress,
        "steps": lambda x: list(x.handle.steps(0, False)),
        "text": lambda x: x.stream.text,
    },
}
# Calls that would wait for the answer, or change what the tick works with.
REFUSED = {
    LLM: {
        "aask": lambda x: asyncio.run(x.llm.aask("hi", **SHORT)),
        "agenerate": lambda x: asyncio.run(x.llm.agenerate(PROMPT, **SHORT)),
        "ask": lambda x: x.llm.ask("hi", **SHORT),
        "astream": lambda x: asyncio.run(read(x.llm.astream(PROMPT, **SHORT))),
        "batch": lambda x: x.llm.batch([PROMPT, PROMPT], **SHORT),
        "close": lambda x: x.llm.close(),
        "generate": lambda x: x.llm.generate(PROMPT, **SHORT),
        "load_cache": lambda x: x.llm.load_cache(x.folder / "saved"),
        "prompt_logprobs": lambda x: x.llm.prompt_logprobs(PROMPT),
        "run_tools": lambda x: x.llm.run_tools("hi", [double], **SHORT),
    },
    Session: {
        "clear": lambda x: x.chat.clear(),
        "edit": lambda x: x.chat.edit("you", **SHORT),
        "load": lambda x: x.chat.load(x.folder / "before"),
        "regenerate": lambda x: x.other.regenerate(**SHORT),
        "resume": lambda x: x.other.resume(**SHORT),
        "send": lambda x: x.chat.send("hi", **SHORT),
        "stream": lambda x: x.chat.stream("hi", **SHORT),
        "undo": lambda x: x.chat.undo(),
    },
    Answer: {
        "finish": lambda x: [answer.finish() for answer in (x.fresh, x.handle)],
        "read": lambda x: [x.handle.read() for _ in range(99)],
        "tokens": lambda x: list(x.handle.tokens()),
    },
}
ENDING = {(Answer, "close")}  # these end the answer whose callback it is
CALLS = [
    pytest.param(kind, name, works, id=f"{kind.__name__}.{name}")
    for table, works in ((WORKING, True), (REFUSED, False))
    for kind, calls in table.items()
    for name in calls
]
CALLBACKS = {
    "on_piece": lambda call: {"on_piece": lambda text, kind: call()},
    "on_progress": lambda call: {"on_progress": lambda done, total: call()},
    "logits_processor": lambda call: {"logits_processor": lambda tokens, logits: call(logits)},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory, where):
    folder = make_checkpoint(tmp_path_factory.mktemp("calls") / "toy", max_position_embeddings=2048)
    return load(folder, **where | {"device": "cpu"})


def within(function):
    """The result of a function on a thread of its own, which must end."""
    results = []

    def run():
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        pytest.exit("a callback waits for ever", 1)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_the_tables_have_every_public_method():
    others = {"aclose", "defaults", "guide", "infill", "loop"}
    for kind in WORKING:
        names = {
            name
            for name, member in inspect.getmembers_static(kind)
            if name[0] != "_" and (inspect.isroutine(member) or not isinstance(member, str))
        }
        fields = set(getattr(kind, "__dataclass_fields__", ()))
        known = WORKING[kind].keys() | REFUSED[kind].keys()
        assert names - fields - others - known <= {"engine"}, kind


@pytest.mark.parametrize("kind, name, works", CALLS)
def test_a_call_in_a_callback_works_or_is_refused(kind, name, works, llm, tmp_path):
    call = (WORKING if works else REFUSED)[kind][name]
    other, options = llm.chat(), {"max_tokens": 4, "prefill_step_size": 8}
    wanted = within(lambda: llm.chat().send("What is a llama?", **options)).tokens
    other.send("hi", max_tokens=3)
    other.save(tmp_path / "before")
    llm.save_cache(tmp_path / "saved")
    for callback in CALLBACKS:
        outcomes = []
        x = SimpleNamespace(llm=llm, chat=llm.chat(), other=other, folder=tmp_path)

        def note(logits=None):
            if not outcomes:
                outcomes.append(None)
                try:
                    outcomes[0] = call(x)
                except Exception as error:
                    outcomes[0] = error
            return logits

        x.handle, x.fresh = llm.submit(PROMPT, max_tokens=99), llm.stream(PROMPT, **SHORT)
        x.stream = x.chat.stream("What is a llama?", **options, **CALLBACKS[callback](note))
        done = within(x.stream.finish)
        assert len(outcomes) == 1, callback
        if works:
            assert not isinstance(outcomes[0], Exception), (callback, outcomes)
        else:
            assert isinstance(outcomes[0], SessionError), (callback, outcomes)
        if (kind, name) not in ENDING:
            assert done.tokens == wanted and done.error is None, callback
    assert within(lambda: llm.chat().send("What is a llama?", **options)).tokens == wanted


@pytest.mark.parametrize("kind, name, works", CALLS)
def test_a_call_in_a_tool_ends(kind, name, works, llm, tmp_path):
    """A tool runs in the thread that reads the answer, between two answers: nothing is held."""
    if (kind, name) == (LLM, "close"):
        return
    call = (WORKING if works else REFUSED)[kind][name]
    other, outcomes = llm.chat(), []
    other.send("hi", max_tokens=3)
    other.save(tmp_path / "before")
    llm.save_cache(tmp_path / "saved")

    def use(yes: bool) -> str:
        """Use it."""
        if not outcomes:
            outcomes.append(None)
            try:
                outcomes[0] = call(x)
            except Exception as error:
                outcomes[0] = error
        return "done"

    chat = llm.chat(tools=[use], tool_choice="use", parallel=False, rounds=2, max_tokens=60)
    x = SimpleNamespace(llm=llm, chat=chat, other=other, folder=tmp_path)
    x.handle, x.fresh = llm.submit(PROMPT, max_tokens=99), llm.stream(PROMPT, **SHORT)
    x.stream = chat.stream("hi")
    within(x.stream.finish)
    assert len(outcomes) == 1
    assert isinstance(outcomes[0], SessionError) or not isinstance(outcomes[0], Exception)
    assert len(within(lambda: llm.generate(PROMPT, max_tokens=3)).tokens) == 3
