"""A toy gpt-oss talks, thinks and calls tools by its published template."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripting import Script, make_scripted_checkpoint

from mlx_llama import load

DATA = Path(__file__).resolve().parents[1] / "data" / "tool-templates"
SPECIALS = tuple(
    f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "end", "return", "call")
)
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}"
CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_scripted_checkpoint(
        tmp_path_factory.mktemp("harmony") / "m",
        (DATA / "gpt-oss.jinja").read_text(encoding="utf-8"),
        SPECIALS,
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        attention_bias=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        eos_token_id=[2, 384 + SPECIALS.index("<|return|>"), 384 + SPECIALS.index("<|call|>")],
    )
    return load(folder, backend="cpu")


def test_a_conversation_with_thoughts(llm):
    chat = llm.chat(system="Be kind.", max_tokens=200)
    with Script(llm, ANALYSIS.format("They greet.") + FINAL.format("Hello!"), "Bye.") as script:
        stream = chat.stream("Hi")
        assert "".join(stream) == "Hello!"
        assert stream.completion.reasoning == "They greet."
        chat.send("That is all.")
    first, second = script.prompts
    assert "Reasoning: medium" in first and "# Instructions\n\nBe kind." in first
    assert first.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert "<|start|>assistant<|channel|>final<|message|>Hello!<|end|><|start|>user" in second
    assert "They greet." not in second


def test_a_function_is_called(llm):
    chat = llm.chat(tools=[add], max_tokens=200)
    call = CALL.format('{"a": 3, "b": 4}')
    with Script(llm, ANALYSIS.format("A sum.") + call, FINAL.format("Seven.")) as script:
        assert chat.send("3 + 4?").text == "Seven."
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "tool", "assistant"]
    [made] = chat.messages[1]["tool_calls"]
    assert (made["function"]["name"], chat.messages[2]["content"]) == ("add", "7")
    first, second = script.prompts
    assert "// Add two numbers.\ntype add = (_: {" in first
    assert 'to=functions.add<|channel|>commentary json<|message|>{"a": 3, "b": 4}<|call|>' in second
    assert '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"7"<|end|>' in second
