"""Live servers, each a process on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest


class Live:
    """A running server: `url`, `http` (a client), `process`, and its log."""

    def __init__(self, log: Path, *arguments: str, ready: bool = True, **environment: str):
        import os

        self.log = log
        with log.open("w") as file:
            command = [
                sys.executable,
                *"-m mlx_llama.server --backend cpu --port 0".split(),
                *map(str, arguments),
            ]
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment
            )
        address = self.wait(
            lambda: re.search(r"listening on (https?://[^\s;]+:(\d+))", self.text())
        )
        self.url, self.port = address[1].rstrip(";"), int(address[2])
        self.http = httpx.Client(base_url=self.url, timeout=300, trust_env=False)
        if ready:
            self.wait(lambda: self.http.get("/ready").status_code == 200)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, condition, seconds: float = 60):
        """The first true value of `condition`."""
        end = time.monotonic() + seconds
        while not (result := condition()):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, f"waited {seconds} s\n{self.text()}"
            time.sleep(0.02)
        return result

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        match = re.search(
            rf"^mlx_llama_{re.escape(name)} (\S+)$", self.http.get("/metrics").text, re.M
        )
        return float(match[1]) if match else 0.0

    def wait_idle(self, seconds: float = 120) -> None:
        """Wait until no request runs or waits."""
        self.wait(
            lambda: (
                self.metric("active") == 0
                and self.metric("rows_running") == 0
                and self.metric("queue") == 0
            ),
            seconds,
        )

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


@pytest.fixture(scope="session")
def guide(tmp_path_factory):
    """A strict server of the guide model, for tests that leave it as it was."""
    server = Live(
        tmp_path_factory.mktemp("server") / "log", "--max-body", "1MB", "--queue", "100", "--strict"
    )
    yield server
    server.close()
    assert "Traceback" not in server.text(), server.text()


@pytest.fixture(scope="session")
def lenient(tmp_path_factory):
    """The same, started as users start it."""
    server = Live(tmp_path_factory.mktemp("server") / "log", "--max-body", "1MB", "--queue", "100")
    yield server
    server.close()
    assert "Traceback" not in server.text(), server.text()


@pytest.fixture(scope="session")
def endless(tmp_path_factory, roomy):
    """A server of a toy whose answers last until they are stopped."""
    server = Live(tmp_path_factory.mktemp("server") / "log", "--model", roomy, "--alias", "toy")
    yield server
    server.close()
    assert "Traceback" not in server.text(), server.text()


@pytest.fixture
def serve(tmp_path):
    """serve(*arguments, **environment): another server, ended with the test."""
    started = []

    def start(*arguments, **environment) -> Live:
        started.append(Live(tmp_path / f"log{len(started)}", *arguments, **environment))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="session")
def llm():
    """The guide in this process: the judge of texts."""
    from mlx_llama import load

    return load(backend="cpu")


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


class Inside:
    """A server in a thread of this process, for tests that reach into it: `desk`, `keeper`,
    `settings`.
    """

    def __init__(self, load, **settings):
        import threading

        import uvicorn

        from mlx_llama.server.app import make_app
        from mlx_llama.server.serving import bind, make_config
        from mlx_llama.server.settings import Settings

        self.settings = Settings(**{"port": 0, "shutdown_seconds": 1, **settings})
        self.app = make_app(self.settings, load)
        listening = bind(self.settings)
        self.port = listening.getsockname()[1]
        self.server = uvicorn.Server(make_config(self.app, self.settings))
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [listening]}, daemon=True
        )
        self.thread.start()
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=300, trust_env=False
        )
        self.wait(lambda: self.http.get("/live").status_code == 200)
        self.desk, self.keeper = self.app.state.desk, self.app.state.keeper

    def wait(self, condition, seconds: float = 120):
        end = time.monotonic() + seconds
        while not (result := condition()):
            assert time.monotonic() < end, f"waited {seconds} s"
            time.sleep(0.01)
        return result

    def ready(self) -> Inside:
        self.wait(lambda: self.http.get("/ready").status_code == 200)
        return self

    def post(self, path: str, **body) -> httpx.Response:
        return self.http.post(path, json=body)

    def is_idle(self) -> bool:
        loop = self.keeper.llm.loop
        return (
            self.desk.active == 0
            and not loop.scheduler.queues.running
            and not loop.scheduler.queues.waiting
            and not loop.scheduler.queues.prefilling
        )

    def close(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def inside():
    """inside(load, **settings): another server in a thread, ended with the test."""
    started = []

    def start(load, **settings) -> Inside:
        started.append(Inside(load, **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()
