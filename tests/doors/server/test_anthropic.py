"""Anthropic's API, driven by its own client."""

from __future__ import annotations

import anthropic
import pytest

from .conftest import events

QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def client(guide):
    return anthropic.Anthropic(base_url=guide.url, api_key="none", max_retries=0)


def test_a_message(client, llm):
    wanted = llm.generate(QUESTION, max_tokens=20)
    message = client.messages.create(model="guide", max_tokens=20, messages=QUESTION)
    assert message.content[0].text == wanted.text and message.stop_reason == "max_tokens"
    assert message.role == "assistant"
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted.prompt_tokens
    assert usage.output_tokens == 20
    assert (
        client.messages.create(model="guide", max_tokens=200, messages=QUESTION).stop_reason
        == "end_turn"
    )


def test_a_stream_in_its_order(client, guide, llm):
    wanted = llm.generate([{"role": "system", "content": "Be kind."}, *QUESTION], max_tokens=20)
    with client.messages.stream(
        model="guide", max_tokens=20, messages=QUESTION, system="Be kind."
    ) as stream:
        assert "".join(stream.text_stream) == wanted.text
        assert stream.get_final_message().usage.output_tokens == len(wanted.tokens)
    text = guide.post(
        "/v1/messages", model="guide", max_tokens=3, messages=QUESTION, stream=True
    ).text
    assert [name for name, _ in events(text)] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_stop_sequences_and_blocks(client):
    blocks = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Who are you?"}],
        }
    ]
    message = client.messages.create(
        model="guide", max_tokens=50, messages=blocks, stop_sequences=["small", "zebra"]
    )
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == "small"
    assert message.content[0].text == "I am the mlx_llama guide: a "


def test_count_of_tokens(client, llm):
    asked = {"model": "guide", "messages": QUESTION, "system": "Be kind. " * 9}
    counted = client.messages.count_tokens(**asked).input_tokens
    assert counted == len(llm.encode([{"role": "system", "content": asked["system"]}, *QUESTION]))
    _, usage = (client.messages.create(**asked, max_tokens=1).usage for _ in range(2))
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_errors_are_anthropics(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model="guide",
            max_tokens=-2,
            messages=[],
            extra_body={"top_p": 3},
        )
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert {fault["field"] for fault in body["errors"]} >= {
        "max_tokens",
        "messages",
        "top_p",
    }
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    assert caught.value.body["error"]["type"] == "not_found_error"
