"""The same server on every backend: a chat, its stream, log-probabilities, a schema."""

from __future__ import annotations

import json

import pytest
from machine import device_of

from mlx_llama import load

from .conftest import QUESTION, Inside, join


@pytest.fixture(scope="module")
def server(backend):
    """A server in this process of a model on the backend."""
    llm = load(backend=backend.name, device=device_of(backend), dtype="float32")
    with Inside(lambda: llm).ready() as server:
        yield server


@pytest.mark.slow_for("cuda")
def test_a_chat_a_stream_and_logprobs(server, llm):
    wanted = llm.generate(QUESTION, max_tokens=20, logprobs=2)
    rates = pytest.approx([token.logprobs.logprob for token in wanted.tokens], abs=1e-3)
    asked = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    choice, chunks = server.chat(**asked), server.chat(**asked, stream=True)
    assert choice.message.content == join(chunks) == wanted.text and len(chunks) > 15
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    for entries in (choice.logprobs.content, streamed):
        assert [entry.logprob for entry in entries] == rates
        assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.slow_for("cuda")
def test_a_schema_is_enforced(server):
    fields = {"kind": {"enum": ["llama", "dragon"]}, "legs": {"enum": [2, 4]}}
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    asked = {"response_format": form, "max_tokens": 60}
    text = server.chat(**asked).message.content
    value = json.loads(text)
    assert set(value) == {"kind", "legs"} and value["kind"] in ("llama", "dragon")
    assert value["legs"] in (2, 4)
    assert join(server.chat(**asked, stream=True)) == text
