"""Clients that leave, read slowly or wait: rows are free within a tick, and others do not feel
it.
"""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mlx_llama import load

from .conftest import QUESTION

ROUTE = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 90_000}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


def begin(server):
    """A context in which an answer streams until it is left."""
    return server.http.stream("POST", ROUTE, json={**LONG, "stream": True})


def test_a_stream_that_is_left_frees_its_row(endless):
    before = endless.metric('requests_total{outcome="gone"}')
    for _ in range(3):
        with begin(endless) as response:
            lines = response.iter_lines()
            for _ in range(9):
                next(lines)
            assert endless.metric("rows_running") >= 1
        endless.wait_idle()
    assert endless.metric('requests_total{outcome="gone"}') == before + 3


def test_a_request_without_a_stream_that_is_left_frees_its_row(endless):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90_000, "n": 3}
    for path, body in ((ROUTE, LONG), ("/completion", LONG), ("/v1/chat/completions", chat)):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(endless.url + path, json=body, timeout=0.5, trust_env=False)
        endless.wait_idle()


@pytest.fixture(scope="module")
def narrow(roomy):
    """A model with one row."""
    return lambda: load(roomy, backend="cpu", max_rows=1)


def test_a_request_that_waits_is_left_too(inside, narrow):
    server = inside(narrow, queue=3).ready()
    with begin(server) as first:
        lines = first.iter_lines()  # kept: closing it would leave
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + ROUTE, json=LONG, timeout=0.4, trust_env=False)
        server.wait(lambda: server.admission.active == 1)
        # the next tick sees it
        server.wait(lambda: not server.holder.llm.loop.scheduler.waiting)
    server.wait(server.is_idle)


@pytest.mark.slow
def test_a_full_queue_says_when_to_retry(inside, narrow):
    server = inside(narrow, queue=2).ready()
    with begin(server) as first:
        lines = first.iter_lines()  # kept: closing it would leave
        next(lines)
        with ThreadPoolExecutor(2) as pool:
            for _ in range(2):
                pool.submit(server.http.post, ROUTE, json=LONG, timeout=1)
            server.wait(lambda: server.admission.active == 3)
            done = server.post(ROUTE, prompt="x")
            assert done.status_code == 503 and int(done.headers["retry-after"]) >= 1
            assert done.json()["error"]["code"] == "queue_full"
            assert server.http.get("/live").status_code == 200
    server.wait(server.is_idle)
    assert server.ask(ROUTE, prompt="x", max_tokens=2)


@pytest.mark.slow
def test_time_of_a_request_is_bounded(inside, narrow):
    server = inside(narrow, timeout=0.6).ready()
    done = server.post(ROUTE, **LONG)
    assert done.status_code == 504 and done.json()["error"]["code"] == "timeout"
    assert "0.6 seconds" in done.text
    text = server.post(ROUTE, **LONG, stream=True).text
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["code"] == "timeout" and text.count("data: ") > 5
    asked = {"messages": QUESTION, "max_tokens": 90_000, "stream": True}
    text = server.post("/v1/messages", **asked).text
    assert "event: error" in text and "timeout" in text
    server.wait(server.is_idle)


@pytest.mark.slow
def test_a_slow_reader_holds_neither_others_nor_its_row(inside, roomy):
    server = inside(lambda: load(roomy, backend="cpu"), send_timeout=0.5).ready()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        body = json.dumps({**LONG, "stream": True, "n": 8}).encode()
        slow.sendall(HEAD % len(body) + body)
        server.wait(lambda: server.admission.active == 8)
        assert server.post(ROUTE, prompt="x", max_tokens=5).status_code == 200
        assert server.admission.active == 8  # it did not wait for them
        server.wait(server.is_idle, 30)  # it never read
        assert "slow" in server.http.get("/metrics").text


def test_a_client_that_sends_half_a_request_holds_nothing(guide):
    with socket.socket() as half:
        half.connect(("127.0.0.1", guide.port))
        half.sendall(HEAD % 500 + b'{"prompt"')
        assert guide.post(ROUTE, prompt="x", max_tokens=2).status_code == 200
        assert guide.metric("active") == 0
