"""Storms: many clients, some of them gone or hostile, and the server is afterwards as it was
before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
import time
from collections import Counter
from unittest.mock import Mock

import httpx
import psutil
import pytest

from mlx_llama import load

from .conftest import events

WORDS = "once upon a time there was a little llama who lived on a hill and could speak".split()
HOSTILE = (
    b"{",
    b'{"prompt": 5}',
    b"[" * 3000,
    b'{"prompt": "x", "max_tokens": "many"}',
    b'{"prompt": "x", "tools": []}',
    b"\xff" * 99,
)


def storm(url: str, clients: int, requests: int, seed: int, most_tokens: int) -> Counter:
    """`requests` from `clients` threads: a third leaves at random, some are hostile, busy answers
    are tried again.

    Returns how they ended. Raises if an accepted answer has no reason for its end.
    """
    numbers, ends, faults = itertools.count(), Counter(), []
    lock = threading.Lock()

    def client(number: int) -> None:
        draw = random.Random(seed * 1000 + number)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            while (i := next(numbers)) < requests:
                try:
                    end = request_at_random(http, draw, i)
                except httpx.HTTPError as error:
                    end = f"broken: {error!r}"
                    faults.append(end)
                with lock:
                    ends[end] += 1

    def request_at_random(http: httpx.Client, draw: random.Random, i: int) -> str:
        if i % 23 == 0:
            assert http.get("/live").status_code == 200
        if i % 19 == 0:
            done = http.post("/v1/completions", content=draw.choice(HOSTILE))
            assert done.status_code == 400, done.text
            return "hostile"
        prompt = " ".join(draw.choices(WORDS, k=draw.choice((1, 3, 20, 80))))
        body = {
            "prompt": prompt,
            "max_tokens": draw.randint(1, most_tokens),
            "temperature": draw.choice((0, 1)),
            "stream": draw.random() < 0.7,
        }
        if draw.random() < 1 / 3:
            return leave(http, draw, body)
        for _ in range(200):
            done = http.post("/v1/completions", json=body)
            if done.status_code != 503:
                break
            time.sleep(0.05)
        assert done.status_code == 200, done.text
        if not body["stream"]:
            [choice] = done.json()["choices"]
            assert choice["finish_reason"] in ("stop", "length")
            return choice["finish_reason"]
        *_, (_, last), (_, end) = events(done.text)
        assert end == "[DONE]"
        return json.loads(last)["choices"][0]["finish_reason"]

    def leave(http: httpx.Client, draw: random.Random, body: dict) -> str:
        asked = {"json": body, "timeout": draw.choice((0.02, 0.1, 30))}
        with contextlib.suppress(httpx.TimeoutException):
            with http.stream("POST", "/v1/completions", **asked) as response:
                for _ in zip(range(draw.randint(0, 9)), response.iter_lines()):
                    pass
        return "left"

    threads = [threading.Thread(target=client, args=[number]) for number in range(clients)]
    for act in (threading.Thread.start, lambda thread: thread.join(240)):
        for thread in threads:
            act(thread)
    assert not any(thread.is_alive() for thread in threads), "a request hangs"
    assert not faults, faults[:3]
    return ends


@pytest.mark.slow
def test_a_storm(serve, toy):
    flags = "--parallel 16 --queue 24 --quiet --strict"
    server, clients, requests = serve("--model", toy, *flags.split()), 48, 800
    judge = {"prompt": "once upon a time there was", "max_tokens": 20}
    before = server.ask("/v1/completions", **judge)["choices"]
    storm(server.url, clients, 4 * clients, seed=1, most_tokens=12)  # warm-up
    server.wait_idle()
    memory = psutil.Process(server.process.pid).memory_info().rss
    cache = server.metric("cache_bytes")
    ends = storm(server.url, clients, requests, seed=2, most_tokens=12)
    server.wait_idle()
    assert sum(ends.values()) == requests, ends
    assert ends["left"] > requests / 6 and ends["hostile"] > 0, ends
    assert ends["length"] + ends["stop"] > requests / 3
    assert server.metric("cache_bytes") <= max(2 * cache, 64 << 20)
    assert psutil.Process(server.process.pid).memory_info().rss < memory + (128 << 20)
    assert server.ask("/v1/completions", **judge)["choices"] == before


def test_a_failing_step_is_reported_and_others_go_on(inside, toy):
    """A row whose step raises ends with an error; the server does not."""
    server = inside(lambda: load(toy, backend="cpu")).ready()
    model = server.holder.llm.model
    step = model.step
    model.step = Mock(side_effect=RuntimeError("a kernel failed"))
    asked = {"prompt": "hello", "max_tokens": 5}
    done = server.post("/v1/completions", **asked)
    assert done.status_code == 500 and done.json()["error"]["code"] == "generation_failed"
    assert "a kernel failed" in server.post("/v1/completions", **asked, stream=True).text
    model.step = step
    assert server.ask("/v1/completions", **asked)
    server.wait(server.is_idle)
