"""Servers to ask: each a process on a free port, or a thread of this process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from scripting import Script, make_scripted_checkpoint

QUESTION = [{"role": "user", "content": "Who are you?"}]


class Server:
    """A server that runs: `url`, `port` and `http`, a client. Closed at the end of a `with`."""

    def connect(self, url: str) -> None:
        self.url, self.port = url, int(url.rpartition(":")[2])
        self.http = httpx.Client(base_url=url, timeout=300, trust_env=False)

    def check(self) -> None:
        """Raise if the server has ended."""

    def wait(self, condition, seconds: float = 120):
        """The first true value of `condition`."""
        end = time.monotonic() + seconds
        while not (result := condition()):
            self.check()
            assert time.monotonic() < end, f"waited {seconds} s"
            time.sleep(0.02)
        return result

    def ready(self):
        self.wait(lambda: self.http.get("/ready").status_code == 200)
        return self

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def ask(self, path: str, **body) -> dict:
        """The answer to a request that is not refused."""
        done = self.post(path, **body)
        assert done.status_code < 300, done.text
        return done.json()

    def stream(self, path: str, **body) -> list[dict]:
        """The data of a stream's events, but for its [DONE]."""
        text = self.post(path, **body, stream=True).text
        return [json.loads(data) for _, data in events(text) if data != "[DONE]"]

    def refuse(self, path: str, status: int = 400, **body) -> list[str]:
        """The fields to which a refusal objects."""
        done = self.post(path, **body)
        assert done.status_code == status, done.text
        return [fault["field"] for fault in done.json()["errors"]]

    @functools.cached_property
    def openai(self):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @functools.cached_property
    def claude(self):
        import anthropic

        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    def create(self, **asked):
        """A chat completion by OpenAI's client: the whole, or the chunks of a stream."""
        asked = {"model": "default", "messages": QUESTION} | asked
        done = self.openai.chat.completions.create(**asked)
        return list(done) if asked.get("stream") else done

    def chat(self, **asked):
        """Its only choice, or those of the chunks."""
        done = self.create(**asked)
        return [chunk.choices[0] for chunk in done] if asked.get("stream") else done.choices[0]

    def message(self, **asked):
        """A message by Anthropic's client."""
        asked = {"model": "default", "max_tokens": 200, "messages": QUESTION} | asked
        return self.claude.messages.create(**asked)

    def respond(self, **asked):
        """A response by OpenAI's client: the whole, or the events of a stream."""
        asked = {"model": "default", "input": QUESTION} | asked
        done = self.openai.responses.create(**asked)
        return list(done) if asked.get("stream") else done

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Live(Server):
    """A process of the command, and its log."""

    def __init__(self, log: Path, *arguments: str, ready: bool = True, **environment: str):
        self.log = log
        flags = "--backend cpu --port 0 --threads 1".split()  # more would wait beside other tests
        command = [sys.executable, "-m", "mlx_llama.server", *flags, *map(str, arguments)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
            )
        address = self.wait(lambda: re.search(r"listening on (https?://[^\s;]+:\d+)", self.text()))
        self.connect(address[1])
        if ready:
            self.ready()

    def check(self) -> None:
        assert self.process.poll() is None, self.text()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text
        match = re.search(rf"^mlx_llama_{re.escape(name)} (\S+)$", lines, re.M)
        return float(match[1]) if match else 0.0

    def wait_idle(self, seconds: float = 120) -> None:
        """Wait until no request runs or waits."""
        self.wait(lambda: not any(map(self.metric, ("active", "rows_running", "queue"))), seconds)

    def close(self) -> int:
        """End it as a supervisor does; returns the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __exit__(self, *_) -> None:
        self.close()
        assert "Traceback" not in self.text(), self.text()


LIMITS = ("--max-body", "1MB", "--queue", "100")


@pytest.fixture(autouse=True)
def interruptible(ctrl_c):
    """Restore Ctrl-C, here and for child processes: a shell ignores SIGINT in its background
    jobs.
    """


@pytest.fixture(scope="session")
def guide(tmp_path_factory):
    """A strict server of the guide model, for tests that leave it as it was."""
    with Live(tmp_path_factory.mktemp("server") / "log", *LIMITS, "--strict") as server:
        yield server


@pytest.fixture(scope="session")
def lenient(tmp_path_factory):
    """The same, started as users start it."""
    with Live(tmp_path_factory.mktemp("server") / "log", *LIMITS) as server:
        yield server


@pytest.fixture(scope="session")
def endless(tmp_path_factory, roomy):
    """A server of a toy whose answers last until they are stopped."""
    log = tmp_path_factory.mktemp("server") / "log"
    with Live(log, "--model", roomy, "--alias", "toy") as server:
        yield server


@pytest.fixture
def serve(tmp_path):
    """serve(*arguments, **environment): another server, ended with the test."""
    with contextlib.ExitStack() as started:
        numbers = iter(range(99))
        yield lambda *arguments, **environment: started.enter_context(
            Live(tmp_path / f"log{next(numbers)}", *arguments, **environment)
        )


@pytest.fixture(scope="session")
def llm():
    """The guide in this process: the judge of texts."""
    from mlx_llama import load

    return load(backend="cpu", threads=1)


def events(text: str) -> list[tuple[str | None, str]]:
    """Names and data of server-sent events."""
    pairs = []
    for block in text.split("\n\n"):
        lines = dict(
            line.split(": ", 1)
            for line in block.splitlines()
            if ": " in line and not line.startswith(":")
        )
        if "data" in lines:
            pairs.append((lines.get("event"), lines["data"]))
    return pairs


def text_of(answer: dict) -> str:
    """The text of an answer in any API."""
    if "choices" in answer:
        [choice, *_] = answer["choices"]
        return choice["text"] if "text" in choice else choice["message"]["content"] or ""
    if "output" in answer:
        parts = (part for item in answer["output"] for part in item.get("content", ()))
        return "".join(part["text"] for part in parts)
    content = answer["message"]["content"] if "message" in answer else answer["content"]
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if block["type"] == "text")


def join(chunks) -> str:
    """The text of a chat completion's choices in chunks."""
    return "".join(chunk.delta.content or "" for chunk in chunks)


class Inside(Server):
    """A server in a thread of this process, for tests that reach into it: `admission`, `holder`,
    `settings`.
    """

    def __init__(self, load, **settings):
        import uvicorn

        from mlx_llama.server.app import bind, make_app, make_config
        from mlx_llama.server.settings import Settings

        self.settings = Settings(**{"port": 0, "shutdown_seconds": 1, **settings})
        self.app = make_app(self.settings, load)
        listening = bind(self.settings)
        self.server = uvicorn.Server(make_config(self.app, self.settings))
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [listening]}, daemon=True
        )
        self.thread.start()
        self.connect(f"http://127.0.0.1:{listening.getsockname()[1]}")
        self.wait(lambda: self.http.get("/live").status_code == 200)
        self.admission, self.holder = self.app.state.admission, self.app.state.holder

    def is_idle(self) -> bool:
        scheduler = self.holder.llm.loop.scheduler
        return not (
            self.admission.active or scheduler.running or scheduler.waiting or scheduler.prefilling
        )

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def inside():
    """inside(load, **settings): another server in a thread, ended with the test."""
    with contextlib.ExitStack() as started:
        yield lambda load, **settings: started.enter_context(Inside(load, **settings))


class Scripted(Inside):
    """A server of a model that says what a test wants, under the template `source`."""

    def __init__(self, source: str, folder: Path, **settings):
        from mlx_llama import load

        self.llm = load(make_scripted_checkpoint(folder, source), backend="cpu")
        super().__init__(lambda: self.llm, alias="m", **settings)
        self.ready()

    def script(self, *answers: str) -> Script:
        return Script(self.llm, *answers)
