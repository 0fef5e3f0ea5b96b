"""Answers with tools on a model: enforced calls, their stream, the loop that runs them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import pytest
from cases.sessions import add, roles
from making import make_checkpoint

from mlx_llama import load
from mlx_llama.api.tool_use import Rounds, Toolbox
from mlx_llama.core.answers.completion import Completion, Token, Writer
from mlx_llama.core.engine.request import Answer, Request, Sequence, Status
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import resolve
from mlx_llama.core.text.tools import ToolDelta, ToolParser, read_tools
from mlx_llama.core.text.tools.formats import HERMES

USER = [{"role": "user", "content": "1 + 2?"}]


def count(a: Literal[1, 2, 3], b: Literal[4, 5]) -> int:
    """Add two small numbers."""
    return a + b


def fail(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("tools") / "toy", max_position_embeddings=4096)
    return load(folder, backend="cpu")


def test_a_required_call_is_made_and_streamed(llm):
    """A random model calls the function with arguments of its types."""
    stream = llm.respond(USER, [count], "required", False, max_tokens=300, temperature=1.0, seed=3)
    news = list(stream)
    assert stream.completion.finish_reason == "eos" and stream.text == "" and len(stream.calls) == 1
    [call] = stream.calls
    assert call.name == "count"
    assert call.values()["a"] in (1, 2, 3) and call.values()["b"] in (4, 5)
    assert isinstance(news[0], ToolDelta) and news[0].name == "count"
    assert "".join(delta.arguments for delta in news) == call.arguments
    assert stream.completion.text.startswith("<tool_call>[")


def test_the_loop_runs_calls_and_goes_on(llm):
    completion, messages = llm.run_tools(
        "1 + 2?", [count], "required", False, max_tokens=300, temperature=1.0, seed=3
    )
    call = messages[1]["tool_calls"][0]
    assert messages[2]["role"] == "tool" and messages[2]["tool_call_id"] == call["id"]
    assert 5 <= int(messages[2]["content"]) <= 8
    assert messages[-1]["role"] == "assistant"
    assert messages[-1]["content"].strip() == completion.text.strip()


def test_choices(llm):
    named = llm.respond(USER, [add, fail], "fail", max_tokens=80)
    named.finish()
    assert named.completion.text.startswith('<tool_call>[{"name": "fail", "arguments": {"why": "')
    none = llm.respond(USER, [add], "none", max_tokens=5)
    assert none.finish().prompt_tokens == len(llm.encode(USER))
    assert none.completion.text == none.text
    assert none.completion.tokens == llm.generate(USER, max_tokens=5).tokens
    auto = llm.respond(USER, [add], max_tokens=5)
    assert auto.finish().prompt_tokens > none.completion.prompt_tokens + 100
    for tools, choice, options, reason in (
        ([add], "sub", {}, "'sub' is none of auto, none, required"),
        ([], "required", {}, "'required' needs tools, and there are none"),
        ([add], "auto", {"regex": "a"}, "option `regex`: forbids every call"),
    ):
        with pytest.raises(OptionsError, match=reason):
            llm.respond(USER, tools, choice, **options)


class Scripted(Rounds):
    """Rounds of a model that gives these answers; what it was asked."""

    def __init__(self, tools, *answers, rounds=8):
        super().__init__(USER, Toolbox(tuple(read_tools(tools)), "any"), rounds)
        self.left, self.asked = list(answers), []

    def ask(self, messages, box):
        self.asked.append(list(messages))
        assert box.choice == ("any" if len(self.asked) == 1 else "auto")
        completion, text = Completion(finish_reason="eos"), self.left.pop(0)
        for letter in text:
            completion.tokens.append(Token(len(completion.tokens)))
            completion.tokens[-1].text = letter
        asked = Request([], resolve({}), form=HERMES)
        parser = ToolParser(HERMES, self.toolbox.tools)
        sequence = Sequence(asked, [], 99, Writer(completion), None, parser)
        sequence.status = Status.ENDED
        return sequence


def begin(turn):
    """The answer of scripted rounds."""
    loop = SimpleNamespace(enqueue=lambda sequence: None, sweep=lambda: None)
    return Answer(turn.begin(), loop, turn)


def test_results_and_errors_reach_the_model():
    turn = Scripted(
        [add, fail],
        'I add.<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        '<tool_call>{"name": "fail", "arguments": {"why": "broken"}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>'
        '<tool_call>{"name": "no", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>',
        "Three.",
    )
    answer = begin(turn)
    assert "".join(answer) == "I add.Three."
    messages = turn.messages
    assert roles(messages) == ["user", "assistant", *["tool"] * 5, "assistant"]
    assert messages[1]["content"] == "I add." and len(messages[1]["tool_calls"]) == 5
    results = [message["content"] for message in messages[2:7]]
    assert results[0] == "3" and results[1] == "error: RuntimeError: broken"
    assert results[2] == (
        "error: the arguments of add do not fit: a: Input should be a valid integer, unable to "
        "parse string as an integer; b: Field required"
    )
    assert results[3] == "error: there is no tool no, there are add, fail"
    assert results[4].startswith("error: the arguments of add do not fit: all: Invalid JSON")
    # templates print objects only
    assert messages[1]["tool_calls"][4]["function"] == {"name": "add", "arguments": "{}"}
    assert (
        messages[-1] == {"role": "assistant", "content": "Three."}
        and turn.asked[1] == messages[:-1]
    )
    assert answer.completion.notices == []


def test_the_loop_ends_after_its_rounds_and_at_a_call_that_was_cut():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    turn = Scripted([add], call, call, call, rounds=2)
    answer = begin(turn)
    assert list(answer) == [] and len(turn.asked) == 2
    assert "raise rounds for more answers" in answer.completion.notices[0]
    assert roles(turn.messages) == ["user", "assistant", "tool", "assistant", "tool"]
    turn = Scripted([add], '<tool_call>{"name": "add", "arguments": {"a": 1')
    answer = begin(turn)
    assert list(answer) == [] and turn.messages == [*USER, {"role": "assistant", "content": ""}]
    assert len(turn.asked) == 1
    assert answer.completion.notices == [
        "the call of add is incomplete and was not made: raise `max_tokens` if it was cut"
    ]
    for rounds in (0, "2"):
        with pytest.raises(OptionsError, match="rounds: "):
            Rounds(USER, Toolbox(), rounds)


def test_a_loop_that_is_cancelled_while_a_function_runs_keeps_complete_rounds():
    def stop() -> str:
        """Stop the loop."""
        answer.close()
        return "stopped"

    call = 'a<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    last = 'b<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    turn = Scripted([add, stop], call, last, "never")
    answer = begin(turn)
    assert "".join(answer) == "ab" and len(turn.asked) == 2 and answer.done
    assert roles(turn.messages) == ["user", "assistant", "tool", "assistant"]
    assert turn.messages[-1] == {"role": "assistant", "content": "b"}

    def leave() -> str:
        """Be interrupted."""
        raise KeyboardInterrupt

    turn = Scripted([leave], '<tool_call>{"name": "leave", "arguments": {}}</tool_call>')
    answer = begin(turn)
    with pytest.raises(KeyboardInterrupt):
        list(answer)
    assert answer.done and turn.messages == [*USER, {"role": "assistant", "content": ""}]


def test_tools_of_the_loop_are_functions(llm):
    described = {"type": "function", "function": {"name": "f"}}
    for call in (lambda: llm.run_tools("x", [described]), lambda: llm.chat(tools=[described])):
        said = "tools: f is only described: pass the function itself"
        with pytest.raises(OptionsError, match=said):
            call()
    for tools, choice, reason in (
        ([add], "sub", "'sub' is none of"),
        ([], "required", "needs tools"),
        ([5], "auto", "neither a function"),
    ):
        with pytest.raises(OptionsError, match=reason):
            llm.chat(tools=tools, tool_choice=choice)
    with pytest.raises(OptionsError, match="option `regex`: forbids every call"):
        llm.chat(tools=[add], regex="a")


def test_an_answer_with_tools_and_a_schema_is_a_call_or_fits_it(llm):
    """Of a random model: whichever it begins."""
    kind = {
        "type": "object",
        "properties": {"kind": {"enum": ["llama", "dragon"]}},
        "required": ["kind"],
        "additionalProperties": False,
    }
    mark, counts = llm.tokenizer.encode("<")[-1], [0, 0]
    for seed in range(10):
        drawn = dict(temperature=1.0, seed=seed, logit_bias={mark: 5.0 * (seed % 2)})
        stream = llm.respond(USER, [count], schema=kind, parallel=False, max_tokens=200, **drawn)
        completion = stream.finish()
        assert completion.finish_reason == "eos" and len(stream.calls) <= 1
        if stream.calls:
            assert stream.calls[0].values()["a"] in (1, 2, 3) and completion.parsed is None
            assert stream.text == ""
        else:
            assert completion.parsed in ({"kind": "llama"}, {"kind": "dragon"})
        counts[bool(stream.calls)] += 1
    assert min(counts) > 0
    forced = llm.respond(USER, [count], "required", False, schema=kind, max_tokens=200)
    assert forced.finish().finish_reason == "eos" and len(forced.calls) == 1
    plain = llm.respond(USER, [count], "none", schema=kind, max_tokens=200)
    assert plain.finish().parsed["kind"] in ("llama", "dragon")
