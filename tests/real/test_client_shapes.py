"""Requests as well-known clients send them, against llama-server's recorded answers: what it serves
is served here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from server.conftest import Live

SHAPES = json.loads((Path(__file__).parents[1] / "data/client_shapes.json").read_text())
AREAS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/")  # "/": all others
# Served by llama-server and refused here, with the reason
REFUSED = {
    "chat: msg: messages []": "there is no question to answer",
    "resp: input []": "there is no question to answer",
    "comp: suffix": "llama-server ignores the text that the answer must lead to",
    "resp: background true": "the client would wait for a response that is not kept",
    "POST from Origin localhost:3000": "pages are served where an API key is set",
    "GET models Origin localhost:3000": "pages are served where an API key is set",
    "GET models Origin file://": "pages are served where an API key is set",
    "GET models Origin vscode-webview": "pages are served where an API key is set",
    "GET models Origin chrome-extension": "pages are served where an API key is set",
}


@pytest.fixture(scope="module")
def server(smollm2, tmp_path_factory):
    log = tmp_path_factory.mktemp("shapes") / "log"
    flags = "--max-tokens 8 --threads 2".split()
    live = Live(log, "--model", smollm2, "--alias", smollm2.name, *flags)
    yield live
    live.close()
    assert "Traceback" not in live.text(), live.text()


@pytest.mark.slow_for("/v1/chat")
@pytest.mark.parametrize("area", AREAS)
def test_what_llama_server_serves_is_served(area, server):
    shapes = [
        shape for shape in SHAPES if next(name for name in AREAS if name in shape["path"]) == area
    ]
    assert len(shapes) > 30
    refused = {}
    for shape in shapes:
        content = shape.get("raw", "").encode("utf-8", "replace")
        content = base64.b64decode(shape.get("raw_base64", "")) or content
        sent = {"content": content} if content else {}
        sent = {"json": shape["body"]} if "body" in shape else sent
        # httpx sends no other
        headers = {name: value.strip() for name, value in shape.get("headers", {}).items()}
        done = server.http.request(shape["method"], shape["path"], headers=headers, **sent)
        assert done.status_code < 500 or done.status_code == 501, (shape["name"], done.text)
        if shape["status"] < 300 and done.status_code >= 300:
            refused[shape["name"]] = done.text[:300]
    assert refused.keys() == {
        name for name in REFUSED if name in {shape["name"] for shape in shapes}
    }, refused


def test_ignored_fields_are_noted_in_the_answer_and_the_log(server):
    messages = [{"role": "user", "content": "hi", "timestamp": 1}]
    asked = {"model": "gpt-4o", "store": True, "reasoning_effort": "low", "max_tokens": 1}
    done = server.post("/v1/chat/completions", messages=messages, **asked)
    noted = {"messages[].timestamp", "reasoning_effort", "store", "model"}
    assert set(done.headers["x-mlx-llama-noted"].split(", ")) == noted
    identity = done.headers["x-request-id"]
    line = server.wait(
        lambda: next((line for line in server.text().splitlines() if identity in line), None)
    )
    assert "noted=" in line and "reasoning_effort" in line


def test_the_beginning_of_an_answer_is_continued(server):
    question = {"role": "user", "content": "What is the capital of France?"}
    begun = [question, {"role": "assistant", "content": "The capital of France is"}]
    request = dict(model="x", messages=begun, temperature=0, max_tokens=4)
    chat, message = (
        server.post(path, **request).json() for path in ("/v1/chat/completions", "/v1/messages")
    )
    assert chat["choices"][0]["message"]["content"].startswith(" Paris"), chat
    assert message["content"][0]["text"].startswith(" Paris"), message


def test_a_rendered_template_is_its_chat(server):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = server.post("/apply-template", messages=messages).json()["prompt"]
    raw = server.post("/completion", prompt=text, temperature=0, n_predict=8).json()
    asked = {"messages": messages, "temperature": 0, "max_tokens": 8}
    chat = server.ask("/v1/chat/completions", **asked)
    assert raw["content"] == chat["choices"][0]["message"]["content"]
    assert raw["tokens_evaluated"] == chat["usage"]["prompt_tokens"]
