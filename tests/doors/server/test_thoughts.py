"""Thoughts of reasoning models over HTTP, judged by the clients of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import httpx
import ollama
import openai
import pytest
from scripting import Script, make_scripted_checkpoint

from mlx_llama import load

from .conftest import Inside

TEMPLATES = Path(__file__).resolve().parents[2] / "data/thought-templates"
QUESTION = [{"role": "user", "content": "Hello?"}]
THOUGHT, TEXT = "They greet me.\nI greet them.", "Hello, and <think> well.</think>"
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}"


class Thinker:
    """A server of a scripted model whose template thinks."""

    def __init__(self, template: str, folder, **settings):
        self.llm = load(
            make_scripted_checkpoint(folder, (TEMPLATES / template).read_text()), backend="cpu"
        )
        self.server = Inside(lambda: self.llm, alias="m", **settings).ready()
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.claude = anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0)

    def script(self, *answers: str) -> Script:
        return Script(self.llm, *(answers or (ANSWER,)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    thinker = Thinker("qwen3.jinja", tmp_path_factory.mktemp("thoughts") / "m")
    yield thinker
    thinker.server.close()


def test_chat_completions(qwen):
    with qwen.script():
        done = qwen.openai.chat.completions.create(model="m", messages=QUESTION)
    message = done.choices[0].message
    assert (message.content, message.reasoning_content) == (TEXT, THOUGHT)
    assert 0 < done.usage.completion_tokens_details.reasoning_tokens < done.usage.completion_tokens
    with qwen.script():
        chunks = list(
            qwen.openai.chat.completions.create(model="m", messages=QUESTION, stream=True)
        )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    thoughts = [
        delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)
    ]
    assert "".join(thoughts) == THOUGHT and len(thoughts) > 3
    assert "".join(delta.content or "" for delta in deltas) == TEXT


def test_an_answer_begun_within_its_thought_goes_on_with_it(qwen):
    for begun, thought in (("<think>\nThey", "greet me."), ("<think>\n\n</think>\n\nOh.", None)):
        messages = [*QUESTION, {"role": "assistant", "content": begun}]
        with qwen.script("greet me.</think>\n\nHello" if thought else "<think> Hello"):
            done = qwen.openai.chat.completions.create(model="m", messages=messages)
        message = done.choices[0].message
        assert getattr(message, "reasoning_content", None) == thought
        assert message.content == ("Hello" if thought else "<think> Hello")


def test_responses(qwen):
    with qwen.script():
        done = qwen.openai.responses.create(model="m", input="Hello?", reasoning={"effort": "low"})
    assert [item.type for item in done.output] == ["reasoning", "message"]
    assert done.output_text == TEXT
    assert done.output[0].content[0].text == THOUGHT
    assert done.usage.output_tokens_details.reasoning_tokens > 0
    with qwen.script(), qwen.openai.responses.stream(model="m", input="Hello?") as stream:
        events = list(stream)
    assert (
        "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        == THOUGHT
    )
    assert events[-1].response.output_text == TEXT
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


def test_messages(qwen):
    asked = {
        "model": "m",
        "max_tokens": 200,
        "messages": QUESTION,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with qwen.script():
        done = qwen.claude.messages.create(**asked)
    assert [block.type for block in done.content] == ["thinking", "text"]
    assert (done.content[0].thinking, done.content[1].text) == (THOUGHT, TEXT)
    with qwen.script(), qwen.claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (final.content[0].thinking, final.content[1].text) == (THOUGHT, TEXT)
    again = [
        *QUESTION,
        {"role": "assistant", "content": [block.model_dump() for block in done.content]},
        *QUESTION,
    ]
    with qwen.script("Hi.") as script:
        qwen.claude.messages.create(**asked | {"messages": again})
    assert "greet" not in script.prompts[0] and TEXT[:5] in script.prompts[0]


def test_jobs(qwen):
    """Thoughts are events of their own, also when a stream is taken up again."""
    with qwen.script():
        made = httpx.post(f"{qwen.url}/v1/jobs", json={"messages": QUESTION}).json()
        url = qwen.url + made["jsonl_url"]
        lines = [json.loads(line) for line in httpx.get(url).text.splitlines()]
    texts = {
        name: "".join(x["t"] for x in lines if x["event"] == name) for name in ("thought", "token")
    }
    assert texts == {"thought": THOUGHT, "token": TEXT}
    assert 0 < lines[-1]["reasoning_tokens"] < lines[-1]["tokens_out"]
    last = next(line["id"] for line in lines if line["event"] == "thought") + 2
    again = httpx.get(url, headers={"Last-Event-ID": str(last)}).text.splitlines()
    assert list(map(json.loads, again)) == lines[last + 1 :]
    assert lines[last + 1]["event"] == "thought"


def test_jobs_without_thoughts(qwen):
    body = {"messages": QUESTION, "enable_thinking": False, "max_tokens": 4}
    with qwen.script(TEXT) as script:
        made = httpx.post(f"{qwen.url}/v1/jobs", json=body)
        lines = httpx.get(qwen.url + made.json()["jsonl_url"]).text.splitlines()
    assert "x-mlx-llama-noted" not in made.headers
    assert script.prompts[0].endswith("<think>\n\n</think>\n\n")
    assert not any(json.loads(line)["event"] == "thought" for line in lines)
    raw = httpx.post(f"{qwen.url}/v1/jobs", json={"prompt": "x", "enable_thinking": False})
    assert "enable_thinking" in raw.headers["x-mlx-llama-noted"]


def test_the_log_has_no_rate_of_tokens_that_came_at_once(qwen, caplog):
    with caplog.at_level("INFO", "mlx_llama.server"):
        with qwen.script():  # forced, all of them
            qwen.server.post("/v1/chat/completions", messages=QUESTION)
        qwen.server.post("/v1/completions", prompt="x", max_tokens=3)
        qwen.server.post("/live")  # after the lines of the answers
    forced, free = (text for text in caplog.messages if "tokens=" in text)
    assert "tps=" not in forced and "tps=" in free and "tps=0.0" not in free


def test_ollamas_chat(qwen):
    client = ollama.Client(qwen.url, trust_env=False)
    with qwen.script():
        message = client.chat("m", QUESTION).message
    assert (message.content, message.thinking) == (TEXT, THOUGHT)
    with qwen.script():
        pieces = list(client.chat("m", QUESTION, stream=True, think=True))
    assert "".join(piece.message.thinking or "" for piece in pieces) == THOUGHT


def test_thinking_is_switched_off_where_the_template_has_a_switch(qwen):
    for field in (
        {"reasoning_effort": "none"},
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"thinking": {"type": "disabled"}},
    ):
        with qwen.script("Hi.") as script:
            done = qwen.server.post("/v1/chat/completions", messages=QUESTION, **field)
        assert done.status_code == 200 and script.prompts[0].endswith("<think>\n\n</think>\n\n"), (
            done.text
        )
        assert "x-mlx-llama-noted" not in done.headers
        assert done.json()["choices"][0]["message"]["content"] == "Hi."
    with qwen.script("Hi."):
        done = qwen.server.post(
            "/v1/chat/completions",
            messages=QUESTION,
            chat_template_kwargs={"mood": "good", "messages": []},
        )
    assert (
        done.headers["x-mlx-llama-noted"]
        == "chat_template_kwargs.mood, chat_template_kwargs.messages"
    )


def test_a_thought_that_the_template_opens(tmp_path):
    r1 = Thinker("r1.jinja", tmp_path / "m")
    try:
        with r1.script(f"{THOUGHT}\n</think>\n\n{TEXT}") as script:
            message = (
                r1.openai.chat.completions.create(model="m", messages=QUESTION).choices[0].message
            )
        assert script.prompts[0].endswith("<think>\n")
        assert (message.content, message.reasoning_content) == (TEXT, THOUGHT)
        form = {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {"type": "object", "properties": {}, "additionalProperties": False},
            },
        }
        message = (
            r1.openai.chat.completions.create(
                model="m",
                messages=QUESTION,
                response_format=form,
                extra_body={"thinking_budget_tokens": 5},
            )
            .choices[0]
            .message
        )
        # a schema is the answer's
        assert message.content == "{}" and message.reasoning_content
    finally:
        r1.server.close()


def test_raw_leaves_thoughts_in_the_text(tmp_path, qwen):
    raw = Thinker("qwen3.jinja", tmp_path / "m", options={"reasoning": "raw"})
    try:
        with raw.script():
            assert (
                raw.openai.chat.completions.create(model="m", messages=QUESTION)
                .choices[0]
                .message.content
                == ANSWER
            )
    finally:
        raw.server.close()
    with qwen.script():
        done = qwen.server.post(
            "/v1/chat/completions", messages=QUESTION, reasoning_format="none"
        )  # as llama-server
    assert done.json()["choices"][0]["message"]["content"] == ANSWER


def test_budgets_of_every_api_end_a_thought(tmp_path):
    """A random model under R1's template thinks for ever."""
    r1 = Thinker("r1.jinja", tmp_path / "m")
    asked = {"model": "m", "messages": QUESTION, "max_tokens": 40}
    judge = r1.llm.generate(QUESTION, max_tokens=40, reasoning_budget=9)
    try:
        message = (
            r1.openai.chat.completions.create(**asked, extra_body={"reasoning_budget": 9})
            .choices[0]
            .message
        )
        assert (message.content, message.reasoning_content) == (judge.text, judge.reasoning)
        for field in ("thinking_budget_tokens", "thinking_token_budget"):  # llama-server's, vLLM's
            done = r1.openai.chat.completions.create(**asked, extra_body={field: 9})
            assert done.choices[0].message == message
            tokens = done.usage.completion_tokens_details.reasoning_tokens
            assert tokens == judge.reasoning_tokens
        blocks = r1.claude.messages.create(
            **asked, thinking={"type": "enabled", "budget_tokens": 9}
        ).content
        assert (blocks[0].thinking, blocks[1].text) == (judge.reasoning, judge.text)
        # no switch in the template: the end of the thought is part of the prompt
        off = r1.llm.generate(QUESTION, max_tokens=40, reasoning="off")
        assert off.prompt_tokens > judge.prompt_tokens
        for field in (
            {"reasoning": "off"},
            {"reasoning_budget": 0},
            {"enable_thinking": False},
            {"reasoning_effort": "none"},
        ):
            done = r1.server.post("/v1/chat/completions", **asked, **field)
            message = done.json()["choices"][0]["message"]
            assert message["content"] == off.text and "reasoning_content" not in message, field
            assert "x-mlx-llama-noted" not in done.headers, field
        done = r1.server.post("/v1/chat/completions", **asked, reasoning_budget=-2)
        assert done.status_code == 400 and "reasoning_budget" in done.text
    finally:
        r1.server.close()
