"""Processes forked after a model was loaded: they answer alike, or refuse; none of them waits for
threads it lacks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import run_python
from machine import open_backend

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

# in_child(f): what f returns in a forked process, or its error. The answer of `model` is
# `expected`.
SETUP = """
import multiprocessing, os, sys, threading, warnings
import mlx_llama
from mlx_llama.core.backends.selection import select

warnings.simplefilter("ignore")  # Python warns of forks beside threads
backend, model = sys.argv[1:]
options = {"backend": backend, "device": "cpu"} | ({"threads": 2} if backend == "cpu" else {})
load = lambda: mlx_llama.load(model, **options)
ask = lambda llm: llm.generate("Once upon", max_tokens=8, temperature=0).text

def in_child(function):
    def report(pipe):
        try:
            pipe.send(function())
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=report, args=(theirs,), daemon=True)
    child.start()
    if not ours.poll(60):
        child.kill()
        sys.exit("the forked process hangs")
    answer = ours.recv()
    child.join()
    return answer
"""


@pytest.fixture
def run(toy):
    """run(backend, script): execute SETUP and the script in a process of its own."""

    def start(backend, script: str) -> None:
        done = run_python(
            "-c", SETUP + script, backend.name, toy, timeout=200, cwd=Path(__file__).parents[2]
        )
        assert done.returncode == 0, done.stderr

    return start


@pytest.mark.slow_for("cuda")
def test_a_fork_after_a_load(run, backend):
    """The NumPy backend starts new threads; a framework's own cannot be started again."""
    run(
        backend,
        """
llm = load()
expected = ask(llm)
answers = [in_child(lambda: ask(llm)), in_child(lambda: ask(load()))]
if backend == "cpu":
    assert answers == [expected] * 2, answers
else:
    assert all(text.startswith(f"BackendError: the {backend} backend had loaded a model when") for text in answers), answers
assert ask(llm) == expected
""",  # noqa: E501
    )


def test_every_call_in_a_fork_answers_or_raises(run, backend):
    """Calls that compute raise the same error on mlx and cuda; on cpu they give the same values."""
    run(
        backend,
        """
llm = load()
chat = llm.chat(max_tokens=3)
chat.send("hi")
calls = [
    lambda: llm.logits([1, 2, 3]).tolist(),
    lambda: llm.prompt_logprobs([1, 2, 3]),
    lambda: llm.batch(["a"], max_tokens=2)[0].text,
    lambda: chat.send("you", max_tokens=2).text,
    lambda: llm.loop.erase([1]),
    lambda: len(chat.cached_tokens),
]
for number, call in enumerate(calls):
    answer = in_child(call)
    if backend != "cpu":
        assert answer.startswith(f"BackendError: the {backend} backend had loaded"), (number, answer)
    elif number in (0, 2):
        assert answer == call(), (number, answer)
""",  # noqa: E501
    )


@pytest.mark.slow_for("cuda", "mlx")
def test_a_fork_before_the_first_load(run, backend):
    run(
        backend,
        """
select(backend, "cpu")
answers = [in_child(lambda: ask(load())) for _ in range(2)]
assert answers == [ask(load())] * 2, answers
""",
    )


@pytest.mark.slow
def test_a_fork_while_other_threads_compute(run):
    """Locks that they hold and requests that they serve stay behind."""
    run(
        open_backend("cpu"),
        """
llm = load()
expected = ask(llm)
llm.loop.start()
stop = threading.Event()

def work():
    while not stop.is_set():
        ask(llm)

threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(5):
    answers = in_child(lambda: ask(llm))
    assert answers == expected, answers
assert in_child(lambda: [llm.loop.close(), ask(llm)][1]) == expected
stop.set()
for thread in threads:
    thread.join()
llm.loop.close()
""",
    )


def test_requests_go_on_in_the_first_process_alone(run):
    run(
        open_backend("cpu"),
        """
llm = load()
answer = llm.stream("Once upon", max_tokens=8, temperature=0)
first = next(answer)
answers = in_child(lambda: [ask(llm), list(answer)])
assert answers == "SessionError: this request was lost: submit it again", answers
assert first + "".join(answer) == ask(llm) == in_child(lambda: ask(llm))
""",
    )


def test_a_fork_while_a_lock_is_held_and_a_property_computed(run):
    """Before Python 3.12, functools.cached_property locks all instances together."""
    run(
        open_backend("cpu"),
        """
from mlx_llama.core.system.forks import cached_property, make_lock

entered, leave, lock = threading.Event(), threading.Event(), make_lock()

class Slow:
    waits = False

    @cached_property
    def answer(self):
        if self.waits:
            with lock:
                entered.set()
                leave.wait()
        return 42

def take():
    with lock:
        return second.answer

first, second = Slow(), Slow()
first.waits = True
thread = threading.Thread(target=lambda: first.answer)
thread.start()
entered.wait()
assert in_child(take) == 42
leave.set()
thread.join()
assert vars(first) == {"waits": True, "answer": 42}
""",
    )


def test_a_fork_while_a_session_answers_and_after_a_file_was_written(run):
    run(
        open_backend("cpu"),
        """
import tempfile
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf

llm, begun, leave = load(), threading.Event(), threading.Event()
chat = llm.chat(max_tokens=8, temperature=0)

def wait(piece, kind):
    begun.set()
    leave.wait()

thread = threading.Thread(target=lambda: chat.send("hello", on_piece=wait))
thread.start()
assert begun.wait(60)
answer = in_child(lambda: [chat.clear(), chat.send("hello").text][1])
leave.set()
thread.join()
assert answer == chat.messages[1]["content"], answer

with tempfile.TemporaryDirectory() as folder:
    write = lambda name: write_gguf(open_checkpoint(model), f"{folder}/{name}.gguf", "Q8_0").path
    assert write("ours").read_bytes() == in_child(lambda: write("theirs").read_bytes())
""",
    )
