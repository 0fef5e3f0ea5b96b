"""Health, readiness, loading, metrics, idleness, signals, crashes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_llama import CheckpointError, load

from .conftest import QUESTION, Live, events, text_of

ROUTE = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 90_000}


def fetch(server, method: str, path: str, **body) -> tuple[int, str]:
    """Status and text of an answer over a connection of its own; (0, "") if it breaks."""
    with contextlib.suppress(httpx.HTTPError):
        asked = {"json": body or None, "timeout": 60, "trust_env": False}
        done = httpx.request(method, server.url + path, **asked)
        return done.status_code, done.text
    return 0, ""


def test_alive_at_once_and_ready_when_the_model_answers(inside, toy):
    gate = threading.Event()

    def slowly():
        from mlx_llama.core.system import progress

        advance = progress.meter(100)
        advance(40)
        assert gate.wait(20)
        return load(toy, backend="cpu")

    server = inside(slowly)
    assert server.http.get("/live").json() == {"status": "ok"}
    asked = {"messages": QUESTION, "max_tokens": 3}
    for path in ("/ready", "/health", "/props", "/v1/chat/completions"):
        done = server.post(path, **asked) if "/v1" in path else server.http.get(path)
        assert done.status_code == 503 and done.json()["error"]["code"] == "model_loading"
        assert done.headers["retry-after"] == "1"
    states = []
    with server.http.stream("GET", "/v1/loading/progress") as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                states.append(json.loads(line[6:]))
                gate.set()
    assert states[0] == {"state": "loading", "done": 40, "total": 100, "progress": 0.4}
    assert states[-1]["state"] == "ready"
    assert server.http.get("/ready").status_code == 200
    assert server.ask("/v1/chat/completions", **asked)


def test_a_model_that_fails_to_load_says_so(inside):
    server = inside(Mock(side_effect=CheckpointError("the file is cut off")))
    server.wait(lambda: server.holder.state == "failed")
    done = server.http.get("/ready")
    assert done.status_code == 503 and "the file is cut off" in done.json()["error"]["message"]
    name, data = events(server.http.get("/v1/loading/progress").text)[-1]
    assert name == "end" and json.loads(data)["state"] == "failed"


def test_an_idle_model_is_given_back_and_loaded_again(inside, toy):
    server = inside(lambda: load(toy, backend="cpu"), idle_unload=0.3).ready()
    asked = {"prompt": "hello", "max_tokens": 5}
    first = text_of(server.ask(ROUTE, **asked))
    server.wait(lambda: server.holder.state == "idle")
    assert server.holder.llm is None and server.http.get("/ready").json()["state"] == "idle"
    props = server.http.get("/props").json()
    assert props.pop("is_sleeping") is True and server.holder.state == "idle"
    assert server.holder.loads == 1
    slots = server.http.get("/slots")
    assert slots.status_code == 503 and slots.json()["error"]["code"] == "model_idle"
    assert server.holder.state == "idle"
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda _: fetch(server, "POST", ROUTE, **asked)[1], range(4))
        assert [text_of(json.loads(text)) for text in texts] == [first] * 4
    assert server.holder.loads == 2
    assert server.http.get("/props").json() == {**props, "is_sleeping": False}
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("mlx_llama scheduler") <= 1


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_again_is_tried_at_the_next_request(inside, toy):
    failures: list[Exception] = []

    def sometimes():
        if failures:
            raise failures.pop()
        return load(toy, backend="cpu")

    server = inside(sometimes, idle_unload=0.2).ready()
    server.wait(lambda: server.holder.state == "idle")
    failures.append(CheckpointError("the disk is gone"))
    done = server.post("/v1/completions", prompt="x", max_tokens=2)
    assert done.status_code == 503 and "the disk is gone" in done.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


@pytest.mark.slow
def test_a_server_for_others_without_a_key_warns(serve, guide):
    warning = "reach this server without a key"
    assert warning in serve("--host", "0.0.0.0").text() and warning not in guide.text()
    assert warning not in serve("--host", "0.0.0.0", "--api-key", "x").text()


def scrape(server) -> dict[tuple, float]:
    """Samples by name and labels, but those of histograms' buckets."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {
        (sample.name.removeprefix("mlx_llama_"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_of_one_request(guide):
    prompt = f"Once upon a time {time.time()} there was"  # not in the cache yet
    before = scrape(guide)
    guide.wait_idle()
    asked = {"prompt": prompt, "max_tokens": 90, "logit_bias": {"2": -100, "6": -100}}
    first, used = [guide.ask(ROUTE, **asked)["usage"] for _ in "12"]
    assert first["completion_tokens"] == used["completion_tokens"] == 90
    guide.http.post("/v1/completions", content=b"{")
    guide.wait_idle()
    after = scrape(guide)

    def grown(*name):
        return after[name] - before.get(name, 0)

    assert grown("requests_total", "done") == 2 and grown("http_responses_total", "400") == 1
    assert grown("prompt_tokens_total") == 2 * used["prompt_tokens"]
    assert grown("generated_tokens_total") == 180
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, used)]
    assert grown("prefix_hits_total") == sum(count > 0 for count in cached)
    assert cached[1] > 8 and grown("prompt_tokens_reused_total") == sum(cached)
    assert grown("first_token_seconds_count") == 2
    # tokens that come with the first are not counted
    assert 0 < grown("between_tokens_seconds_count") <= 178
    assert 0 < grown("between_tokens_seconds_sum") < 60
    assert 0 < grown("first_token_seconds_sum") < 60
    assert after["rows",] == 32 and after["ready",] == 1
    assert 0 < after["cache_bytes",] <= after["cache_budget_bytes",]
    for name in ("queue", "rows_running", "active", "preemptions_total"):
        assert after[name,] == 0, name


@pytest.mark.slow
def test_metrics_count_preemptions_and_rows(inside, roomy):
    """Memory for one long answer and a half: the younger of two is set aside."""
    memory = load(roomy, backend="cpu").loop.scheduler.rows.nbytes_for(3 * 256)
    opened = lambda: load(roomy, backend="cpu", cache_memory=memory)  # noqa: E731
    server = inside(opened, idle_unload=0.2).ready()
    assert scrape(server)["preemptions_total",] == 0
    with ThreadPoolExecutor(1) as pool:
        pool.submit(server.post, ROUTE, prompt="hello", max_tokens=520, n=3)
        server.wait(
            lambda: (figures := scrape(server))["rows_running",] >= 1 and figures["queue",] >= 1
        )
    count = scrape(server)["preemptions_total",]
    assert count >= 1 and scrape(server)["requests_total", "done"] == 3
    server.wait(lambda: server.holder.state == "idle")
    assert scrape(server)["preemptions_total",] == count  # counters never fall


def test_flags_set_defaults_of_requests(serve, llm):
    flags = "--n-predict 6 --temp 0.8 --seed 3 --alias pet --no-slots --no-metrics --no-page"
    server = serve(*flags.split())
    wanted = llm.generate("Once upon", max_tokens=6, temperature=0.8, seed=3).text
    answer = server.ask(ROUTE, model="pet", prompt="Once upon")
    assert text_of(answer) == wanted and answer["model"] == "pet"
    assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == ["pet"]
    usage = server.ask(ROUTE, prompt="Once upon", max_tokens=2)["usage"]
    assert usage["completion_tokens"] == 2
    for path, status in (("/slots", 501), ("/metrics", 404), ("/", 404), ("/page/app.js", 404)):
        assert server.http.get(path).status_code == status, path


def test_a_rule_of_the_server_is_replaced_or_lifted_by_a_request(inside, llm):
    options = {"schema": {"enum": ["yes", "no"]}, "max_tokens": 8}
    server = inside(lambda: load(backend="cpu"), options=options).ready()

    def ask(path=ROUTE, **body) -> str:
        return text_of(server.ask(path, **body))

    prompt, question = {"prompt": "Once upon"}, {"messages": QUESTION}
    words, text = ('"yes"', '"no"'), {"type": "text"}
    free = llm.generate("Once upon", max_tokens=8).text
    assert ask(**prompt) in words and ask("/completion", **prompt) in words
    assert ask(**prompt, regex="[x-z]{4}").strip("xyz") == ""
    assert (
        ask(**prompt, schema={"const": 5}) == "5" and ask(**prompt, grammar='start: "ab"') == "ab"
    )
    assert ask(**prompt, schema=None) == ask("/completion", **prompt, json_schema=None) == free
    assert ask("/v1/chat/completions", **question) in words
    assert ask("/v1/chat/completions", **question, response_format=text) not in words
    assert ask("/v1/responses", input="Who are you?", text={"format": text}) not in words


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_running_requests_end_and_refuses_new_ones(number, tmp_path, roomy):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and children inherit
    try:
        live = Live(tmp_path / "log", "--model", roomy)
    finally:
        signal.signal(signal.SIGHUP, before)
    with live as server, ThreadPoolExecutor(1) as pool:
        asked = {"prompt": "hello", "max_tokens": 1500, "stream": True}
        running = pool.submit(fetch, server, "POST", ROUTE, **asked)
        server.wait(lambda: server.metric("rows_running") == 1)
        server.process.send_signal(number)
        time.sleep(0.3)
        if number == signal.SIGHUP:  # of the shell and of the terminal
            server.process.send_signal(number)

        def refuses():
            try:
                return server.http.get("/ready").status_code == 503
            except httpx.HTTPError:  # the port is closed; a kept connection may still answer
                return True

        server.wait(refuses)
        text = running.result()[1]
        assert text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text
        assert server.process.wait(20) == -number  # as a shell and a supervisor expect


def test_a_hangup_is_ignored_under_nohup(tmp_path, toy):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the child inherits it
    try:
        server = Live(tmp_path / "log", "--model", toy)
    finally:
        signal.signal(signal.SIGHUP, before)
    with server:
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert server.http.get("/ready").status_code == 200


@pytest.mark.slow
def test_a_request_that_was_half_sent_at_sigterm_is_refused(tmp_path, roomy):
    body = b'{"prompt": "hello", "max_tokens": 3}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with (
        Live(tmp_path / "log", "--model", roomy, "--shutdown-seconds", "2") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        job = server.ask("/v1/jobs", **LONG)  # keeps the server alive for its grace
        pool.submit(fetch, server, "GET", job["sse_url"])
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(head % len(body))
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            half.sendall(body)
            answer = b"".join(iter(lambda: half.recv(4000), b""))
    assert b" 503 " in answer.split(b"\r\n")[0], answer
    assert b"shutting_down" in answer and b"retry-after" in answer.lower()


@pytest.mark.slow
def test_sigterm_stops_those_that_run_too_long(tmp_path, roomy):
    with (
        Live(tmp_path / "log", "--model", roomy, "--shutdown-seconds", "1") as server,
        ThreadPoolExecutor(3) as pool,
    ):
        job = server.ask("/v1/jobs", **LONG)
        stream = pool.submit(fetch, server, "POST", ROUTE, **LONG, stream=True)
        whole = pool.submit(fetch, server, "POST", ROUTE, **LONG)
        kept = pool.submit(fetch, server, "GET", job["sse_url"])
        server.wait(lambda: server.metric("rows_running") == 3)
        server.process.send_signal(signal.SIGTERM)
        assert "shutting_down" in stream.result()[1].split("data: ")[-1]
        assert whole.result()[0] == 503 and "shutting down" in whole.result()[1]
        assert '"stop_reason":"CANCELLED"' in kept.result()[1]
        server.process.wait(20)


def test_a_second_signal_ends_all_at_once(tmp_path, roomy):
    with Live(tmp_path / "log", "--model", roomy) as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(fetch, server, "POST", ROUTE, **LONG, stream=True)
        server.wait(lambda: server.metric("rows_running") == 1)
        server.process.send_signal(signal.SIGINT)
        server.wait(lambda: "force quit" in server.text())
        server.process.send_signal(signal.SIGINT)
        server.process.wait(20)
        stream.exception()


@pytest.mark.slow
def test_killed_in_the_middle_and_started_again_on_the_same_port(tmp_path, roomy):
    with Live(tmp_path / "log", "--model", roomy) as server, ThreadPoolExecutor(32) as pool:
        job = server.ask("/v1/jobs", **LONG)["job_id"]
        for _ in range(32):
            pool.submit(fetch, server, "POST", ROUTE, **LONG, stream=True)
        server.wait(lambda: server.metric("active") == 33)
        server.process.kill()
        server.process.wait()
        again = Live(tmp_path / "log2", "--model", roomy, "--port", str(server.port))
    with again:
        assert again.port == server.port
        assert again.ask(ROUTE, prompt="hello", max_tokens=3)
        done = again.http.get(f"/v1/jobs/{job}/stream")
        assert done.status_code == 404
        assert "a restart of the server ends" in done.json()["error"]["message"]


@pytest.mark.slow
def test_https(tmp_path):
    import shutil
    import ssl
    import subprocess

    if not shutil.which("openssl"):
        pytest.skip("no openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = (
        f"req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -days 1 -subj "
        "/CN=localhost "
        "-addext subjectAltName=DNS:localhost"
    )
    subprocess.run(["openssl", *made.split()], check=True, capture_output=True)
    flags = ("--ssl-key-file", key, "--ssl-cert-file", certificate)
    context = ssl.create_default_context(cafile=certificate)
    with Live(tmp_path / "log", *flags, ready=False) as server:
        assert server.url.startswith("https://")
        with httpx.Client(verify=context, trust_env=False) as client:
            live = client.get(f"https://localhost:{server.port}/live")
            assert live.json() == {"status": "ok"}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("change", ["truncated", "overwritten"])
def test_a_model_file_that_changes_is_told_and_ends_no_server(change, tmp_path, roomy):
    weights = shutil.copytree(roomy, tmp_path / "m") / "model.safetensors"
    with Live(tmp_path / "log", "--model", tmp_path / "m") as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(fetch, server, "POST", ROUTE, **LONG, stream=True)
        server.wait(lambda: server.metric("rows_running") == 1)
        if change == "truncated":
            os.truncate(weights, 0)
        else:
            with open(weights, "r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"nan.")
        text = running.result()[1]  # ends within a second
        message = "the model's file changed: model.safetensors was "
        assert message in text and "[DONE]" not in text.split(message)[0]
        for path, body in (
            (ROUTE, {"prompt": "hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
            ("/v1/responses", {"input": "hi"}),
            ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}),
            ("/tokenize", {"content": "hi"}),
        ):
            done = server.post(path, **body)
            assert done.status_code == 503 and message in done.text, done.text
            assert str(tmp_path) not in done.text
        with pytest.raises(openai.InternalServerError, match="model's file changed") as caught:
            server.chat()
        assert caught.value.status_code == 503
        assert server.http.get("/health").status_code == 503
        assert server.http.get("/live").status_code == 200
