"""Health, readiness, loading, metrics, idleness, signals, crashes."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time

import httpx
import pytest
from launching import run_python
from prometheus_client.parser import text_string_to_metric_families

from mlx_llama import CheckpointError, load

from .conftest import Live, events

QUESTION = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 3}


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
    for path, method in (
        ("/ready", "GET"),
        ("/health", "GET"),
        ("/v1/chat/completions", "POST"),
        ("/props", "GET"),
    ):
        done = server.http.request(
            method, path, json=QUESTION | {"model": "toy"} if method == "POST" else None
        )
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
    assert server.post("/v1/chat/completions", **QUESTION).status_code == 200


def test_a_model_that_fails_to_load_says_so(inside):
    def broken():
        raise CheckpointError("the file is cut off")

    server = inside(broken)
    server.wait(lambda: server.keeper.state == "failed")
    done = server.http.get("/ready")
    assert done.status_code == 503 and "the file is cut off" in done.json()["error"]["message"]
    name, data = events(server.http.get("/v1/loading/progress").text)[-1]
    assert name == "end" and json.loads(data)["state"] == "failed"


def test_an_idle_model_is_given_back_and_loaded_again(inside, toy):
    server = inside(lambda: load(toy, backend="cpu"), idle_unload=0.3).ready()
    first = server.post("/v1/completions", prompt="hello", max_tokens=5).json()["choices"][0][
        "text"
    ]
    server.wait(lambda: server.keeper.state == "idle")
    assert server.keeper.llm is None and server.http.get("/ready").json()["state"] == "idle"
    props = server.http.get("/props").json()
    assert props.pop("is_sleeping") is True and server.keeper.state == "idle"
    assert server.keeper.loads == 1
    slots = server.http.get("/slots")
    assert slots.status_code == 503 and slots.json()["error"]["code"] == "model_idle"
    assert server.keeper.state == "idle"
    responses = []
    threads = [
        threading.Thread(
            target=lambda: responses.append(
                httpx.post(
                    f"http://127.0.0.1:{server.port}/v1/completions",
                    json={"prompt": "hello", "max_tokens": 5},
                    trust_env=False,
                )
            )
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [response.json()["choices"][0]["text"] for response in responses] == [first] * 4
    assert server.keeper.loads == 2
    assert server.http.get("/props").json() == {**props, "is_sleeping": False}
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("mlx_llama scheduler") <= 1


def test_a_model_that_cannot_be_loaded_again_is_tried_at_the_next_request(inside, toy):
    failures: list[Exception] = []

    def sometimes():
        if failures:
            raise failures.pop()
        return load(toy, backend="cpu")

    server = inside(sometimes, idle_unload=0.2).ready()
    server.wait(lambda: server.keeper.state == "idle")
    failures.append(CheckpointError("the disk is gone"))
    done = server.post("/v1/completions", prompt="x", max_tokens=2)
    assert done.status_code == 503 and "the disk is gone" in done.json()["error"]["message"]
    assert server.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


def test_a_server_for_others_without_a_key_warns(serve):
    assert "reach this server without a key" in serve("--host", "0.0.0.0").text()
    assert (
        "reach this server without a key"
        not in serve("--host", "0.0.0.0", "--api-key", "x").text() + serve().text()
    )


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
    first, used = [
        guide.post(
            "/v1/completions", prompt=prompt, max_tokens=90, logit_bias={"2": -100, "6": -100}
        ).json()["usage"]
        for _ in "12"
    ]
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
    assert (
        after["queue",]
        == after["rows_running",]
        == after["active",]
        == after["set_asides_total",]
        == 0
    )


def test_metrics_count_set_asides_and_rows(inside, roomy):
    """Memory for one long answer and a half: the younger of two is set aside."""
    memory = load(roomy, backend="cpu").loop.scheduler.rows.nbytes_for(3 * 256)
    server = inside(
        lambda: load(roomy, backend="cpu", cache_memory=memory), idle_unload=0.2
    ).ready()
    assert scrape(server)["set_asides_total",] == 0
    ask = threading.Thread(
        target=server.post,
        args=["/v1/completions"],
        kwargs={"prompt": "hello", "max_tokens": 520, "n": 3},
    )
    ask.start()
    server.wait(
        lambda: (figures := scrape(server))["rows_running",] >= 1 and figures["queue",] >= 1
    )
    ask.join()
    count = scrape(server)["set_asides_total",]
    assert count >= 1 and scrape(server)["requests_total", "done"] == 3
    server.wait(lambda: server.keeper.state == "idle")
    assert scrape(server)["set_asides_total",] == count  # counters never fall


def test_flags_set_defaults_of_requests(serve, llm):
    server = serve(
        *"--n-predict 6 --temp 0.8 --seed 3 --alias pet --no-slots --no-metrics --no-page".split()
    )
    wanted = llm.generate("Once upon", max_tokens=6, temperature=0.8, seed=3).text
    body = server.post("/v1/completions", model="pet", prompt="Once upon").json()
    assert body["choices"][0]["text"] == wanted and body["model"] == "pet"
    assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == ["pet"]
    assert (
        server.post("/v1/completions", prompt="Once upon", max_tokens=2).json()["usage"][
            "completion_tokens"
        ]
        == 2
    )
    for path in ("/slots", "/metrics", "/", "/page/app.js"):
        status = 501 if path == "/slots" else 404
        assert server.http.get(path).status_code == status, path


def test_a_rule_of_the_server_is_replaced_or_lifted_by_a_request(inside):
    server = inside(
        lambda: load(backend="cpu"), options={"schema": {"enum": ["yes", "no"]}, "max_tokens": 8}
    ).ready()

    def ask(path="/v1/completions", **body):
        done = server.post(
            path,
            **(
                {"prompt": "Once upon"}
                if "messages" not in body and path != "/v1/responses"
                else {}
            ),
            **body,
        )
        assert done.status_code == 200, done.text
        answer = done.json()
        if "output" in answer:
            return answer["output"][0]["content"][0]["text"]
        return (
            answer["content"]
            if "content" in answer
            else answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
        )

    words = ('"yes"', '"no"')
    free = load(backend="cpu").generate("Once upon", max_tokens=8).text
    assert ask() in words and ask("/completion") in words
    assert ask(regex="[x-z]{4}").strip("xyz") == "" and ask(schema={"const": 5}) == "5"
    assert ask(grammar='start: "ab"') == "ab"
    assert ask(schema=None) == free and ask("/completion", json_schema=None) == free
    question = {"messages": QUESTION["messages"]}
    assert ask("/v1/chat/completions", **question) in words
    assert ask("/v1/chat/completions", **question, response_format={"type": "text"}) not in words
    assert (
        ask("/v1/responses", input="Who are you?", text={"format": {"type": "text"}}) not in words
    )


@pytest.mark.parametrize(
    "flags, message",
    [(("--regex", "("), "option --regex"), (("--logit-bias", "999999=1"), "option --logit-bias")],
)
def test_options_that_no_request_could_use_end_the_server(flags, message):
    done = run_python("-m", "mlx_llama.server", "--port", "0", "--backend", "cpu", *flags)
    assert done.returncode == 2 and f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(tmp_path, roomy):
    server = Live(tmp_path / "log", "--model", roomy)
    seen: dict = {}

    def read():
        with httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json={"prompt": "hello", "max_tokens": 1500, "stream": True},
            timeout=60,
            trust_env=False,
        ) as response:
            seen["begun"] = True
            seen["text"] = response.read().decode()

    thread = threading.Thread(target=read)
    thread.start()
    server.wait(lambda: "begun" in seen)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    with pytest.raises(httpx.HTTPError):
        assert server.http.get("/ready").status_code != 503
        raise httpx.HTTPError("refused")  # a kept connection may still answer
    thread.join(60)
    assert seen["text"].rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in seen["text"]
    server.process.wait(20)
    assert "Traceback" not in server.text(), server.text()


def test_a_request_that_was_half_sent_at_sigterm_is_refused(tmp_path, roomy):
    server = Live(tmp_path / "log", "--model", roomy, "--shutdown-seconds", "5")
    # keeps the server alive for its grace
    job = server.post("/v1/jobs", prompt="hello", max_tokens=90_000).json()
    reader = threading.Thread(
        target=lambda: httpx.get(server.url + job["sse_url"], timeout=60, trust_env=False).read()
    )
    reader.start()
    body = b'{"prompt": "hello", "max_tokens": 3}'
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        half.sendall(body)
        answer = b""
        while piece := half.recv(4000):
            answer += piece
    assert (
        b" 503 " in answer.split(b"\r\n")[0]
        and b"shutting_down" in answer
        and b"retry-after" in answer.lower()
    ), answer
    reader.join(30)
    server.process.wait(20)


def test_sigterm_stops_those_that_run_too_long(tmp_path, roomy):
    server = Live(tmp_path / "log", "--model", roomy, "--shutdown-seconds", "1")
    job = server.post("/v1/jobs", prompt="hello", max_tokens=90_000).json()
    answers: dict = {}

    def read(name, method, path, **body):
        with httpx.stream(
            method, server.url + path, json=body or None, timeout=60, trust_env=False
        ) as response:
            answers[name] = response.read().decode(), response.status_code

    threads = [
        threading.Thread(
            target=read,
            args=("stream", "POST", "/v1/completions"),
            kwargs={"prompt": "hello", "max_tokens": 90_000, "stream": True},
        ),
        threading.Thread(
            target=read,
            args=("whole", "POST", "/v1/completions"),
            kwargs={"prompt": "hello", "max_tokens": 90_000},
        ),
        threading.Thread(target=read, args=("job", "GET", job["sse_url"])),
    ]
    for thread in threads:
        thread.start()
    server.wait(lambda: server.metric("rows_running") == 3)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(30)
    server.process.wait(20)
    assert "shutting_down" in answers["stream"][0].split("data: ")[-1]
    assert answers["whole"][1] == 503 and "shutting down" in answers["whole"][0]
    assert '"stop_reason":"CANCELLED"' in answers["job"][0]
    assert "Traceback" not in server.text(), server.text()


def test_killed_in_the_middle_and_started_again_on_the_same_port(tmp_path, roomy):
    server = Live(tmp_path / "log", "--model", roomy)
    job = server.post("/v1/jobs", prompt="hello", max_tokens=90_000).json()["job_id"]

    def read():
        try:
            with httpx.stream(
                "POST",
                f"{server.url}/v1/completions",
                json={"prompt": "hello", "max_tokens": 90_000, "stream": True},
                timeout=60,
                trust_env=False,
            ) as stream:
                stream.read()
        except httpx.HTTPError:
            pass

    threads = [threading.Thread(target=read) for _ in range(32)]
    for thread in threads:
        thread.start()
    server.wait(lambda: server.metric("active") == 33)
    server.process.kill()
    server.process.wait()
    again = Live(tmp_path / "log2", "--model", roomy, "--port", str(server.port))
    try:
        assert again.port == server.port
        assert again.post("/v1/completions", prompt="hello", max_tokens=3).status_code == 200
        done = again.http.get(f"/v1/jobs/{job}/stream")
        assert done.status_code == 404
        assert "a restart of the server ends" in done.json()["error"]["message"]
        for thread in threads:
            thread.join(20)
    finally:
        again.close()


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
    server = Live(
        tmp_path / "log", "--ssl-key-file", key, "--ssl-cert-file", certificate, ready=False
    )
    assert server.url.startswith("https://")
    with httpx.Client(
        verify=ssl.create_default_context(cafile=certificate), trust_env=False
    ) as client:
        assert client.get(f"https://localhost:{server.port}/live").json() == {"status": "ok"}
    server.close()
