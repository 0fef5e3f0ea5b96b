"""Jobs: events, lines, resuming, cancelling."""

from __future__ import annotations

import gc
import json
import time
import weakref

import pytest
from cases.jobs import lines_of

from mlx_llama import load

from .conftest import QUESTION, events, text_of


def test_events_of_a_job(guide, llm):
    made = guide.post("/v1/jobs", prompt="Once upon", max_tokens=6)
    assert made.status_code == 201
    streamed = events(guide.http.get(made.json()["sse_url"]).text)
    assert [name for name, _ in streamed] == ["started", *["token"] * 6, "end", None]
    assert streamed[-1][1] == "[DONE]"
    tokens = [json.loads(data) for name, data in streamed if name == "token"]
    assert "".join(token["t"] for token in tokens) == llm.generate("Once upon", max_tokens=6).text
    assert [token["i"] for token in tokens] == list(range(6))
    end = json.loads(streamed[-2][1])
    assert end["tokens_out"] == 6 and end["stop_reason"] == "MAX_TOKENS"
    assert end["decode_time_ms"] > 0


def test_lines_of_json(guide):
    job = guide.ask("/v1/jobs", messages=QUESTION, stop=["small"])
    accept = {"Accept": "application/x-ndjson"}
    for url, headers in ((job["jsonl_url"], {}), (job["sse_url"], accept)):
        done = guide.http.get(url, headers=headers)
        assert done.headers["content-type"].startswith("application/x-ndjson")
        lines = [json.loads(line) for line in done.text.splitlines()]
        text = "".join(line["t"] for line in lines if line["event"] == "token")
        assert text == "I am the mlx_llama guide: a "
        assert lines[-1]["stop_reason"] == "STOP_SEQUENCE"
        assert [line["id"] for line in lines] == list(range(len(lines)))


def test_a_stream_is_taken_up_again_after_the_last_event(endless):
    asked = {"prompt": "hello", "max_tokens": 300}
    job = endless.ask("/v1/jobs", **asked)
    with endless.http.stream("GET", job["jsonl_url"]) as response:  # the connection breaks
        streamed = [json.loads(line) for _, line in zip(range(7), response.iter_lines())]
    headers = {"Last-Event-ID": str(streamed[-1]["id"])}
    rest = endless.http.get(job["jsonl_url"], headers=headers).text.splitlines()
    streamed += map(json.loads, rest)
    assert [event["id"] for event in streamed] == list(range(len(streamed)))
    whole = text_of(endless.ask("/v1/completions", **asked))
    assert "".join(event.get("t", "") for event in streamed) == whole
    assert streamed[-1]["tokens_out"] == 300


def test_a_cancelled_job_frees_its_row_and_notifies_its_readers(endless):
    job = endless.ask("/v1/jobs", prompt="hello", max_tokens=90_000)
    with endless.http.stream("GET", job["sse_url"]) as response:
        lines = response.iter_lines()
        for _ in range(12):
            next(lines)
        assert endless.http.delete(f"/v1/jobs/{job['job_id']}").json()["stop_reason"] == "CANCELLED"
        rest = "\n".join(lines)
    assert '"stop_reason":"CANCELLED"' in rest and rest.rstrip().endswith("[DONE]")
    endless.wait_idle()


def test_a_job_without_a_reader_is_cancelled(endless):
    body = {"prompt": "hello", "max_tokens": 90_000}
    unread, read = (
        endless.ask("/v1/jobs", **body, abandon_seconds=seconds) for seconds in (0.5, 2)
    )
    count, ended = 0, f"job {unread['job_id']} CANCELLED"
    with endless.http.stream("GET", read["sse_url"]) as response:
        lines = response.iter_lines()
        endless.wait(lambda: next(lines) is not None and ended in endless.text())
        assert '"CANCELLED"' in endless.http.get(unread["sse_url"]).text
        until = time.monotonic() + 1
        while time.monotonic() < until:
            count += next(lines).startswith("data:")
    assert count > 10
    endless.wait_idle(20)
    assert lines_of(endless, read)[-1]["stop_reason"] == "CANCELLED"


def test_a_job_drops_the_oldest_turns(guide):
    messages = [{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "yes"}]
    body = {"messages": [*messages * 8, {"role": "user", "content": "Who are you?"}]}
    assert guide.post("/v1/jobs", **body).status_code == 400
    job = guide.post("/v1/jobs", **body, truncation="auto")
    chat = guide.post("/v1/chat/completions", **body, truncation="auto")
    assert job.headers["x-mlx-llama-noted"] == chat.headers["x-mlx-llama-noted"]
    text = "".join(line.get("t", "") for line in lines_of(guide, job.json()))
    assert text == text_of(chat.json())


def test_unknown_jobs_say_why(guide):
    known = guide.ask("/v1/jobs", prompt="hi", max_tokens=1)["job_id"].split("-")[0]
    for name, reason in (
        (f"{known}-0000", "or never existed"),
        ("invented", "it is not a job id"),
        (f"01234567-{'0' * 16}", "restart of the server"),
    ):
        done = guide.http.get(f"/v1/jobs/{name}/stream")
        assert done.status_code == 404 and reason in done.json()["error"]["message"]
        assert ("restart of the server" in done.text) == (reason == "restart of the server")
    assert guide.http.delete("/v1/jobs/x").status_code == 404


def test_a_job_has_one_prompt(guide):
    for body in ({}, {"prompt": "a", "messages": QUESTION}):
        done = guide.post("/v1/jobs", **body)
        assert done.status_code == 400
        assert "either prompt or messages" in done.json()["error"]["message"]
    assert guide.http.get("/v1/jobs/x/stream", headers={"Last-Event-ID": "x"}).status_code == 404
    job = guide.ask("/v1/jobs", prompt="hi", max_tokens=1)
    assert guide.http.get(job["sse_url"], headers={"Last-Event-ID": "1e9"}).status_code == 400


@pytest.mark.slow
def test_an_ended_job_does_not_keep_the_model(inside, toy):
    models = []

    def remember():
        models.append(load(toy, backend="cpu"))
        return models[0]

    server = inside(remember, idle_unload=0.5).ready()
    model = weakref.ref(models.pop())
    job = server.post("/v1/jobs", prompt="hello", max_tokens=3).json()
    assert '"tokens_out":3' in server.http.get(job["sse_url"]).text
    server.wait(lambda: server.holder.state == "idle")
    # the request's own task may still be ending
    server.wait(lambda: gc.collect() >= 0 and model() is None)
    assert '"tokens_out":3' in server.http.get(job["sse_url"]).text  # the events are kept


def test_an_ended_job_is_forgotten_in_time_though_no_other_comes(inside, toy):
    server = inside(lambda: load(toy, backend="cpu"), job_seconds=0.2).ready()
    job = server.post("/v1/jobs", prompt="hello", max_tokens=3).json()
    server.wait(lambda: server.http.get(job["sse_url"]).status_code == 404, 20)
    assert "it ended more than 0.2 s ago" in server.http.get(job["sse_url"]).text


def test_the_log_has_the_receipt_of_a_job_when_it_ends(serve):
    server = serve("--log-prompts")
    job = server.post("/v1/jobs", prompt="a-secret-word", max_tokens=3)
    server.http.get(job.json()["sse_url"])
    lines = server.text().splitlines()
    made = next(line for line in lines if f" {job.headers['x-request-id']} POST" in line)
    ended = next(line for line in lines if f"job {job.json()['job_id']} MAX_TOKENS" in line)
    assert "end=" not in made and "tokens=3 " in ended and "end=length" in ended
    assert "a-secret-word" in ended


def test_events_have_logprobs(guide, llm):
    job = guide.ask("/v1/jobs", prompt="Once upon", max_tokens=4, logprobs=2)
    tokens = [line for line in lines_of(guide, job) if line["event"] == "token"]
    answer = llm.generate("Once upon", max_tokens=4, logprobs=2)
    wanted = [token.logprobs for token in answer.tokens]
    assert [token["logprob"] for token in tokens] == [entry.logprob for entry in wanted]
    for token, entry in zip(tokens, wanted):
        tops = [other["logprob"] for other in token["top_logprobs"]]
        assert tops == [value for _, value in entry.top]
        assert token["token"] == token["top_logprobs"][0]["token"]  # greedy
