"""The same server on every backend: a chat, its stream, log-probabilities, a schema."""

from __future__ import annotations

import json

import openai
import pytest
from machine import device_of

from mlx_llama import load

from .conftest import Inside

QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def served(backend):
    """A model on the backend, and its server in this process."""
    llm = load(backend=backend.name, device=device_of(backend), dtype="float32")
    server = Inside(lambda: llm).ready()
    yield (
        llm,
        openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0),
    )
    server.close()


def test_a_chat_a_stream_and_logprobs(served, llm):
    ours, client = served
    wanted = llm.generate(QUESTION, max_tokens=20, logprobs=2)
    asked = {
        "model": "guide",
        "messages": QUESTION,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content == wanted.text
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == wanted.text
    assert len(chunks) > 15
    for entries in (
        choice.logprobs.content,
        [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content],
    ):
        assert [entry.logprob for entry in entries] == pytest.approx(
            [token.logprobs.logprob for token in wanted.tokens], abs=1e-3
        )
        assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_a_schema_is_enforced(served):
    ours, client = served
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["llama", "dragon"]}, "legs": {"enum": [2, 4]}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    choice = client.chat.completions.create(
        model="guide", messages=QUESTION, response_format=form, max_tokens=60
    ).choices[0]
    value = json.loads(choice.message.content)
    assert set(value) == {"kind", "legs"} and value["kind"] in ("llama", "dragon")
    assert value["legs"] in (2, 4)
    stream = client.chat.completions.create(
        model="guide", messages=QUESTION, response_format=form, max_tokens=60, stream=True
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in stream) == choice.message.content
    )
