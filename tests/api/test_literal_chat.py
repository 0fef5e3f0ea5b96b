"""A toy Gemma 4, LFM2.5 and Qwen 3.5 think and call tools by their published templates."""

from __future__ import annotations

import json

import pytest
from cases.texts import TOOL_TEMPLATES
from scripting import Script, make_scripted_checkpoint

from mlx_llama import load

GEMMA = '<|turn> <turn|> <|channel> <channel|> <|tool_call> <tool_call|> <|"|> <|tool_response>'
LFM = "<|im_start|> <|im_end|> <think> </think> <|tool_call_start|> <|tool_call_end|>"
QWEN = "<|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call>"
# special tokens; a thought, a call of each of two functions, and the prompt with their results
MODELS = {
    "gemma-4": (
        GEMMA,
        "<|channel>thought\nA sum.\n<channel|>",
        "<|tool_call>call:add{a:3,b:4}<tool_call|>"
        '<|tool_call>call:say{text:<|"|>a "b"\nc<|"|>}<tool_call|>',
        '<|tool_response>response:add{value:<|"|>7<|"|>}<tool_response|>',
    ),
    "lfm2.5-a1b": (
        LFM,
        "<think>A sum.</think>",
        '<|tool_call_start|>[add(a=3, b=4), say(text="a \\"b\\"\\nc")]<|tool_call_end|>',
        "<|im_start|>tool\n7<|im_end|>",
    ),
    "qwen3.5": (
        QWEN,
        "A sum.\n</think>\n\n",
        "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=say>\n<parameter=text>\na \"b\"\nc\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_response>\n7\n</tool_response>",
    ),
}  # fmt: skip


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def say(text: str) -> str:
    """Say a text."""
    return text


def toggle(on: bool) -> None:
    """Switch on or off."""


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """The name and the model."""
    folder = make_scripted_checkpoint(
        tmp_path_factory.mktemp("literal") / "m",
        TOOL_TEMPLATES[request.param],
        MODELS[request.param][0].split(),
    )
    return request.param, load(folder, backend="cpu")


def test_functions_are_called_after_a_thought(model):
    name, llm = model
    _, thought, calls, result = MODELS[name]
    chat = llm.chat(tools=[add, say], max_tokens=300, reasoning="on")
    done = f"{thought}Done." if name == "qwen3.5" else "Done."
    with Script(llm, thought + calls, done) as script:
        stream = chat.stream("3 + 4?")
        assert "".join(stream) == "Done."
    roles = [message["role"] for message in chat.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert chat.messages[1]["reasoning_content"] == "A sum."
    assert [message["content"] for message in chat.messages[2:4]] == ["7", 'a "b"\nc']
    first, second = script.prompts
    assert "Add two numbers." in first
    assert thought + calls in second and result in second
    assert second.index(calls) < second.index(result)


def test_a_call_is_forced_after_a_thought(model):
    """A random model's thought ends at its budget, and then a call must follow."""
    name, llm = model
    limits = dict(max_tokens=200, reasoning="on", reasoning_budget=6, temperature=1.5)
    question = [{"role": "user", "content": "Hi"}]
    for seed in range(2):
        answer = llm.respond(question, [toggle], "required", parallel=False, seed=seed, **limits)
        pieces = list(answer)
        assert [piece.name for piece in pieces if piece.name] == ["toggle"]
        values = json.loads("".join(piece.arguments for piece in pieces))
        assert isinstance(values.pop("on"), bool) and not values
        assert (name == "qwen3.5") <= bool(answer.completion.reasoning)
