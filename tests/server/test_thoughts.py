"""Thoughts of reasoning models over HTTP, judged by the clients of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import json

import ollama
import pytest
from cases.thinker import ANSWER, TEXT, THOUGHT, make_thinker

from .conftest import QUESTION, join

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    with make_thinker("qwen3", tmp_path_factory.mktemp("thoughts") / "m") as thinker:
        yield thinker


@pytest.fixture
def r1(tmp_path):
    with make_thinker("r1", tmp_path / "m") as thinker:
        yield thinker


def test_chat_completions(qwen):
    with qwen.script(ANSWER, ANSWER):
        done, chunks = qwen.create(), qwen.chat(stream=True)
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == (TEXT, THOUGHT)
    assert 0 < done.usage.completion_tokens_details.reasoning_tokens < done.usage.completion_tokens
    thoughts = [getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thoughts) == THOUGHT and len(list(filter(None, thoughts))) > 3
    assert join(chunks) == TEXT


def test_an_answer_begun_within_its_thought_goes_on_with_it(qwen):
    for begun, thought in (("<think>\nThey", "greet me."), ("<think>\n\n</think>\n\nOh.", None)):
        messages = [*QUESTION, {"role": "assistant", "content": begun}]
        with qwen.script("greet me.</think>\n\nHello" if thought else "<think> Hello"):
            message = qwen.chat(messages=messages).message
        assert getattr(message, "reasoning_content", None) == thought
        assert message.content == ("Hello" if thought else "<think> Hello")


def test_responses(qwen):
    with qwen.script(ANSWER, ANSWER):
        done = qwen.respond(reasoning={"effort": "low"})
        events = qwen.respond(stream=True)
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output_text == TEXT
    assert done.output[0].content[0].text == THOUGHT
    assert done.usage.output_tokens_details.reasoning_tokens > 0
    deltas = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in deltas) == THOUGHT
    assert events[-1].response.output_text == TEXT
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


def test_messages(qwen):
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    with qwen.script(ANSWER):
        done = qwen.message(**asked)
    assert [block.type for block in done.content] == ["thinking", "text"]
    assert (done.content[0].thinking, done.content[1].text) == (THOUGHT, TEXT)
    body = {"model": "m", "max_tokens": 200, "messages": QUESTION, **asked}
    with qwen.script(ANSWER), qwen.claude.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert (final.content[0].thinking, final.content[1].text) == (THOUGHT, TEXT)
    blocks = [block.model_dump() for block in done.content]
    with qwen.script("Hi.") as script:
        messages = [*QUESTION, {"role": "assistant", "content": blocks}, *QUESTION]
        qwen.message(**asked, messages=messages)
    assert "greet" not in script.prompts[0]


def test_jobs(qwen):
    """Thoughts are events of their own, also when a stream is taken up again."""
    with qwen.script(ANSWER):
        url = qwen.ask("/v1/jobs", messages=QUESTION)["jsonl_url"]
        lines = [json.loads(line) for line in qwen.http.get(url).text.splitlines()]
    texts = {
        name: "".join(x["t"] for x in lines if x["event"] == name) for name in ("thought", "token")
    }
    assert texts == {"thought": THOUGHT, "token": TEXT}
    assert 0 < lines[-1]["reasoning_tokens"] < lines[-1]["tokens_out"]
    last = next(line["id"] for line in lines if line["event"] == "thought") + 2
    again = qwen.http.get(url, headers={"Last-Event-ID": str(last)}).text.splitlines()
    assert list(map(json.loads, again)) == lines[last + 1 :]
    assert lines[last + 1]["event"] == "thought"


def test_jobs_without_thoughts(qwen):
    with qwen.script(TEXT) as script:
        made = qwen.post("/v1/jobs", messages=QUESTION, enable_thinking=False, max_tokens=4)
        lines = qwen.http.get(made.json()["jsonl_url"]).text
    assert "x-mlx-llama-noted" not in made.headers
    assert script.prompts[0].endswith("<think>\n\n</think>\n\n") and '"thought"' not in lines
    raw = qwen.post("/v1/jobs", prompt="x", enable_thinking=False)
    assert "enable_thinking" in raw.headers["x-mlx-llama-noted"]


def test_the_log_has_no_rate_of_tokens_that_came_at_once(qwen, caplog):
    with caplog.at_level("INFO", "mlx_llama.server"):
        with qwen.script(ANSWER):  # forced, all of them
            qwen.ask(CHAT, messages=QUESTION)
        qwen.ask("/v1/completions", prompt="x", max_tokens=3)
        qwen.post("/live")  # after the lines of the answers
    forced, free = (text for text in caplog.messages if "tokens=" in text)
    assert "tps=" not in forced and "tps=" in free and "tps=0.0" not in free


def test_ollamas_chat(qwen):
    client = ollama.Client(qwen.url, trust_env=False)
    with qwen.script(ANSWER, ANSWER):
        message = client.chat("m", QUESTION).message
        pieces = list(client.chat("m", QUESTION, stream=True, think=True))
    assert (message.content, message.thinking) == (TEXT, THOUGHT)
    assert "".join(piece.message.thinking or "" for piece in pieces) == THOUGHT


def test_thinking_is_switched_off_where_the_template_has_a_switch(qwen):
    for field in (
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
    ):
        with qwen.script("Hi.") as script:
            done = qwen.post(CHAT, messages=QUESTION, **field)
        assert done.status_code == 200, done.text
        assert script.prompts[0].endswith("<think>\n\n</think>\n\n")
        assert "x-mlx-llama-noted" not in done.headers
        assert done.json()["choices"][0]["message"]["content"] == "Hi."
    with qwen.script("Hi."):
        variables = {"mood": "good", "messages": []}
        done = qwen.post(CHAT, messages=QUESTION, chat_template_kwargs=variables)
    noted = "chat_template_kwargs.mood, chat_template_kwargs.messages"
    assert done.headers["x-mlx-llama-noted"] == noted


def test_a_thought_that_the_template_opens(r1):
    with r1.script(f"{THOUGHT}\n</think>\n\n{TEXT}") as script:
        message = r1.chat().message
    assert script.prompts[0].endswith("<think>\n")
    assert (message.content, message.reasoning_content) == (TEXT, THOUGHT)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    budget = {"thinking_budget_tokens": 5}
    message = r1.chat(response_format=form, extra_body=budget).message
    # a schema is the answer's
    assert message.content == "{}" and message.reasoning_content


def test_raw_leaves_thoughts_in_the_text(tmp_path, qwen):
    with make_thinker("qwen3", tmp_path / "m", options={"reasoning": "raw"}) as raw:
        with raw.script(ANSWER):
            assert raw.chat().message.content == ANSWER
    with qwen.script(ANSWER):  # as llama-server
        message = qwen.chat(extra_body={"reasoning_format": "none"}).message
    assert message.content == ANSWER


def test_budgets_of_every_api_end_a_thought(r1):
    """A random model under R1's template thinks for ever."""
    judge = r1.llm.generate(QUESTION, max_tokens=40, reasoning_budget=9)
    # ours, llama-server's, vLLM's
    for field in ("reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"):
        done = r1.create(max_tokens=40, extra_body={field: 9})
        message = done.choices[0].message
        assert (message.content, message.reasoning_content) == (judge.text, judge.reasoning)
        tokens = done.usage.completion_tokens_details.reasoning_tokens
        assert tokens == judge.reasoning_tokens
    thinking = {"type": "enabled", "budget_tokens": 9}
    blocks = r1.message(max_tokens=40, thinking=thinking).content
    assert (blocks[0].thinking, blocks[1].text) == (judge.reasoning, judge.text)
    # no switch in the template: the end of the thought is part of the prompt
    off = r1.llm.generate(QUESTION, max_tokens=40, reasoning="off")
    assert off.prompt_tokens > judge.prompt_tokens
    asked = {"messages": QUESTION, "max_tokens": 40}
    for field in (
        {"reasoning": "off"},
        {"reasoning_budget": 0},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
    ):
        done = r1.post(CHAT, **asked, **field)
        message = done.json()["choices"][0]["message"]
        assert message["content"] == off.text and "reasoning_content" not in message, field
        assert "x-mlx-llama-noted" not in done.headers, field
    assert r1.refuse(CHAT, **asked, reasoning_budget=-2) == ["reasoning_budget"]
