"""Ollama's API, judged by Ollama's own client."""

from __future__ import annotations

import ollama
import pytest

from .conftest import QUESTION

GREEDY = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def client(lenient):
    return ollama.Client(lenient.url, trust_env=False)


def test_answers_are_those_of_python(client, llm):
    judge = llm.generate(QUESTION, temperature=0)
    done = client.chat("guide", QUESTION, options=GREEDY)
    assert done.message.content == judge.text and done.message.role == "assistant" and done.done
    assert done.done_reason == "stop" and done.prompt_eval_count == judge.prompt_tokens
    assert done.eval_count == len(judge.tokens)
    assert done.total_duration > 0 and done.eval_duration > 0
    pieces = list(client.chat("guide", QUESTION, options=GREEDY, stream=True))
    assert len(pieces) > 3 and "".join(piece.message.content for piece in pieces) == judge.text
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == len(judge.tokens)
    asked = client.generate("guide:latest", QUESTION[0]["content"], options=GREEDY)
    assert asked.response == judge.text
    raw = client.generate("guide", "Once upon", raw=True, options={**GREEDY, "num_predict": 8})
    assert raw.response == llm.generate("Once upon", temperature=0, max_tokens=8).text
    assert raw.done_reason == "length"


def test_formats_and_options(client, lenient):
    form = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    form["additionalProperties"] = False
    text = client.chat("guide", QUESTION, format=form, options=GREEDY).message.content
    assert text.startswith('{"age": ')
    options = {"num_predict": 60, **GREEDY}
    assert client.generate("guide", "x", format="json", options=options).response.startswith("{")
    options = {"num_predict": 2, "num_ctx": 4096, "mirostat": 0}
    asked = {"model": "llama3.2", "messages": QUESTION, "stream": False, "options": options}
    done = lenient.post("/api/chat", **asked, keep_alive="5m", think=False)
    assert done.json()["eval_count"] == 2 and done.json()["model"] == "guide"
    noted = set(done.headers["x-mlx-llama-noted"].split(", "))
    assert noted == {"keep_alive", "think", "options.num_ctx", "options.mirostat", "model"}


def test_the_model(client, lenient):
    [model] = client.list().models
    assert model.model == "guide:latest"
    assert [model.model for model in client.ps().models] == ["guide:latest"]
    shown = client.show("guide")
    assert shown.capabilities == ["completion"] and shown.details.format == "safetensors"
    assert shown.template
    assert client.generate("guide").done_reason == "load"
    assert lenient.http.get("/api/version").json()["version"]


def test_what_cannot_be_done_is_refused(client):
    for words, ask in (
        ("describe it", lambda: client.generate("guide", "what is this?", images=[b"1234"])),
        ("text only", lambda: client.chat("guide", [{**QUESTION[0], "images": [b"1234"]}])),
        ("embeddings are not supported", lambda: client.embed("guide", "text")),
        ("--model", lambda: client.pull("llama3.2")),
        ("temperature", lambda: client.chat("guide", QUESTION, options={"temperature": -1})),
    ):
        with pytest.raises(ollama.ResponseError, match=words):
            ask()
