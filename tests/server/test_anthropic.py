"""Anthropic's API, driven by its own client."""

from __future__ import annotations

import anthropic
import pytest

from .conftest import QUESTION, events


def test_a_message(guide, llm):
    wanted = llm.generate(QUESTION, max_tokens=20)
    message = guide.message(max_tokens=20)
    assert message.content[0].text == wanted.text and message.stop_reason == "max_tokens"
    assert message.role == "assistant"
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == wanted.prompt_tokens
    assert usage.output_tokens == 20
    assert guide.message().stop_reason == "end_turn"


def test_a_stream_in_its_order(guide, llm):
    wanted = llm.generate([{"role": "system", "content": "Be kind."}, *QUESTION], max_tokens=20)
    asked = {"model": "guide", "messages": QUESTION}
    with guide.claude.messages.stream(**asked, max_tokens=20, system="Be kind.") as stream:
        assert "".join(stream.text_stream) == wanted.text
        assert stream.get_final_message().usage.output_tokens == len(wanted.tokens)
    text = guide.post("/v1/messages", **asked, max_tokens=3, stream=True).text
    names = "message_start ping content_block_start D D D content_block_stop message_delta"
    wanted = names.replace("D", "content_block_delta").split() + ["message_stop"]
    assert [name for name, _ in events(text)] == wanted


def test_stop_sequences_and_blocks(guide):
    content = [{"type": "text", "text": "Who are you?"}]
    messages = [{"role": "user", "content": content}]
    message = guide.message(messages=messages, stop_sequences=["small", "zebra"])
    assert message.stop_reason == "stop_sequence" and message.stop_sequence == "small"
    assert message.content[0].text == "I am the mlx_llama guide: a "


def test_count_of_tokens(guide, llm):
    asked = {"model": "guide", "messages": QUESTION, "system": "Be kind. " * 9}
    counted = guide.claude.messages.count_tokens(**asked).input_tokens
    assert counted == len(llm.encode([{"role": "system", "content": asked["system"]}, *QUESTION]))
    _, usage = (guide.message(**asked, max_tokens=1).usage for _ in range(2))
    assert usage.cache_read_input_tokens > 0
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_errors_are_anthropics(guide):
    with pytest.raises(anthropic.BadRequestError) as caught:
        guide.message(max_tokens=-2, messages=[], extra_body={"top_p": 3})
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert {fault["field"] for fault in body["errors"]} >= {"max_tokens", "messages", "top_p"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        guide.message(model="claude")
    assert caught.value.body["error"]["type"] == "not_found_error"
