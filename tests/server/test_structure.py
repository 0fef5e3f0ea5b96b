"""Structured output, tools and log-probabilities over HTTP, with the clients' own helpers."""

from __future__ import annotations

import json
import math
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel, ConfigDict

from .conftest import QUESTION, join, text_of

jsonschema = pytest.importorskip("jsonschema")
CHAT = "/v1/chat/completions"


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["llama", "penguin", "dragon"]
    legs: Literal[2, 4]
    friend: Literal["Molly", "Iris"]


FIELDS = {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}}
WEATHER = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
WEATHER["additionalProperties"] = False
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER},
}
OTHER = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}


def json_form(**schema) -> dict:
    return {"type": "json_schema", "json_schema": schema}


# Structured output


def test_json_schema(guide, llm):
    schema = Animal.model_json_schema()
    wanted = llm.generate(QUESTION, schema=schema, max_tokens=200).text
    asked = {"model": "guide", "messages": QUESTION, "max_tokens": 200}
    completion = guide.openai.chat.completions.parse(**asked, response_format=Animal)
    assert isinstance(completion.choices[0].message.parsed, Animal)
    assert completion.choices[0].finish_reason == "stop"
    assert json.loads(wanted) == json.loads(completion.choices[0].message.content)
    form = json_form(name="a", schema=schema)
    assert join(guide.chat(max_tokens=200, stream=True, response_format=form)) == wanted
    claude = {"type": "json_schema", "schema": schema}
    message = guide.message(output_config={"format": claude})
    assert message.content[0].text == wanted
    parsed = guide.claude.messages.parse(**asked, output_format=Animal)
    assert isinstance(parsed.parsed_output, Animal)
    with pytest.raises(anthropic.BadRequestError, match="output_config.effort"):
        guide.message(output_config={"effort": "low"})
    asked = {"model": "guide", "input": "Who are you?"}
    response = guide.openai.responses.parse(**asked, text_format=Animal)
    assert isinstance(response.output_parsed, Animal)


def test_json_object_and_rules_of_the_table(guide, llm):
    text = guide.chat(response_format={"type": "json_object"}, max_tokens=60).message.content
    assert text == llm.generate(QUESTION, schema={"type": "object"}, max_tokens=60).text
    assert text.startswith("{")
    response = guide.respond(max_output_tokens=20, text={"format": {"type": "json_object"}})
    assert response.output_text.startswith("{")
    answer = guide.ask(CHAT, messages=QUESTION, regex="(yes|no), [0-9]{3}")
    assert text_of(answer) == llm.generate(QUESTION, regex="(yes|no), [0-9]{3}").text
    for rule in ({"grammar": 'root ::= "yes" | "no"'}, {"json_schema": {"enum": ["yes", "no"]}}):
        answer = guide.ask("/completion", prompt="Is it?", **rule)
        assert answer["content"].strip('"') in ("yes", "no")


# Tools


@pytest.mark.parametrize(
    "choice, tools",
    [("required", [TOOL]), ({"type": "function", "function": {"name": "weather"}}, [OTHER, TOOL])],
)
def test_a_required_call_fits_its_schema(choice, tools, endless):
    asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 120}
    answer = endless.chat(**asked)
    [call] = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    jsonschema.validate(arguments, WEATHER)
    chunks = endless.chat(**asked, stream=True)
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert deltas[0].function.name == "weather" and deltas[0].id and deltas[0].type == "function"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments
    assert not join(chunks) and chunks[-1].finish_reason == "tool_calls"


CALLING = {
    CHAT: {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "/v1/messages": {
        "tools": [{"name": "weather", "input_schema": WEATHER}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
    "/v1/responses": {
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}


def ask_for_a_call(guide, path: str, limit: int, **body) -> tuple[str, list[str], str]:
    """The reason of the end, the calls' arguments, and the text."""
    body |= CALLING[path]
    if path == "/v1/responses":
        answer = guide.ask(path, input="hi", max_output_tokens=limit, **body)
        calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
        return answer["status"], calls, text_of(answer)
    answer = guide.ask(path, messages=QUESTION, max_tokens=limit, **body)
    if path == "/v1/messages":
        blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
        calls = [json.dumps(block["input"]) for block in blocks]
        return answer["stop_reason"], calls, text_of(answer)
    [choice] = answer["choices"]
    calls = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    return choice["finish_reason"], calls, text_of(answer)


@pytest.mark.parametrize("path", CALLING)
def test_a_rule_of_a_text_beside_a_required_call_is_refused(path, guide):
    asked = {"messages": QUESTION, "max_tokens": 9}
    asked = ({"input": "hi"} if path == "/v1/responses" else asked) | CALLING[path]
    schema = {"type": "json_schema", "schema": {"enum": ["a"]}}
    field, value = {
        "/v1/responses": ("text", {"format": {**schema, "name": "a"}}),
        "/v1/messages": ("output_config", {"format": schema}),
        CHAT: ("response_format", {"type": "json_object"}),
    }[path]
    for rule, text, named in (
        ("regex", "a", "regex"),
        ("schema", True, "schema"),
        (field, value, field if path == CHAT else f"{field}.format"),
    ):
        assert guide.refuse(path, **asked, **{rule: text})[0] == named


@pytest.mark.parametrize("path", CALLING)
def test_stop_strings_do_not_cut_a_required_call(path, guide):
    name = "stop_sequences" if path == "/v1/messages" else "stop"
    for stop in (["city"], ["name"], ["tool_call"]):  # in its arguments, its head, its mark
        reason, [arguments], text = ask_for_a_call(guide, path, 120, **{name: stop})
        assert reason in ("tool_calls", "tool_use", "completed") and text == ""
        jsonschema.validate(json.loads(arguments), WEATHER)


@pytest.mark.parametrize("path", CALLING)
def test_a_required_call_that_is_cut_is_no_text(path, guide):
    seen = set()
    for limit in range(1, 40, 3):
        reason, calls, text = ask_for_a_call(guide, path, limit)
        is_cut = reason in ("length", "max_tokens", "incomplete")
        assert is_cut or reason in ("tool_calls", "tool_use", "completed"), limit
        assert text == "", limit
        seen.add((is_cut, len(calls)))
    assert {(True, 0), (True, 1)} <= seen


def test_tools_that_need_not_be_called(guide, llm):
    plain = guide.chat(tools=[TOOL], tool_choice="none", max_tokens=12).message
    assert plain.content == llm.generate(QUESTION, max_tokens=12).text and not plain.tool_calls
    completion = guide.create(tools=[TOOL], max_tokens=12)
    text = completion.choices[0].message.content
    assert completion.usage.prompt_tokens > 100 and text
    assert join(guide.chat(tools=[TOOL], max_tokens=12, stream=True)) == text


# Log-probabilities


def text_of_entries(entries) -> str:
    return b"".join(bytes(entry.bytes) for entry in entries).decode()


def test_logprobs_of_a_chat(guide, llm):
    wanted = llm.generate(QUESTION, max_tokens=8, logprobs=3)
    rates = pytest.approx([token.logprobs.logprob for token in wanted.tokens], abs=1e-6)
    asked = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    entries = guide.chat(**asked).logprobs.content
    assert [entry.logprob for entry in entries] == rates
    assert "".join(entry.token for entry in entries) == wanted.text == text_of_entries(entries)
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob >= entry.logprob
    chunks = guide.chat(**asked, stream=True)
    assert sum((chunk.logprobs.content for chunk in chunks if chunk.logprobs), []) == entries
    assert guide.chat(max_tokens=2).logprobs is None


def test_logprobs_join_to_the_text_before_a_stop_string(guide, llm):
    text = llm.generate(QUESTION, max_tokens=12).text
    for stop in (text[9:16], text[20:21], text[2:5]):
        asked = {"max_tokens": 12, "logprobs": True, "stop": stop}
        whole, chunks = guide.chat(**asked), guide.chat(**asked, stream=True)
        assert whole.message.content == text[: text.index(stop)] == join(chunks)
        streamed = sum((chunk.logprobs.content for chunk in chunks if chunk.logprobs), [])
        for entries in (whole.logprobs.content, streamed):
            assert text_of_entries(entries) == whole.message.content
        asked |= {"prompt": "Once upon", "logprobs": 0}
        [old] = guide.openai.completions.create(model="guide", **asked).choices
        assert "".join(old.logprobs.tokens) == old.text
    done = guide.ask("/completion", prompt="Once upon", n_predict=9, n_probs=1, stop=["a"])
    assert "".join(entry["token"] for entry in done["completion_probabilities"]) == done["content"]


def test_probabilities_after_the_samplers_on_every_route(guide, lenient, llm):
    """As Python's option gives them; by llama-server's names."""
    asked = {"post_sampling_probs": True, "temperature": 0.7, "top_k": 4, "seed": 3}
    wanted = llm.generate("Once upon", max_tokens=5, logprobs=3, **asked).tokens
    probs = [math.exp(token.logprobs.logprob) for token in wanted]
    tops = [[math.exp(value) for _, value in token.logprobs.top] for token in wanted]
    assert all(0 < prob <= 1 for prob in probs) and any(prob < 1 for prob in probs)
    prompt = {"prompt": "Once upon", **asked}
    native = guide.ask("/completion", **prompt, n_predict=5, n_probs=3)
    assert native["generation_settings"]["post_sampling_probs"] is True
    [old] = guide.ask("/v1/completions", **prompt, max_tokens=5, logprobs=3)["choices"]
    for entries in (native["completion_probabilities"], old["logprobs"]["content"]):
        assert [entry["id"] for entry in entries] == list(map(int, wanted))
        assert [entry["prob"] for entry in entries] == probs
        assert [[top["prob"] for top in entry["top_probs"]] for entry in entries] == tops
    chat = {"messages": QUESTION, "max_tokens": 4, "logprobs": True, "top_logprobs": 20, **asked}
    for entry in guide.ask(CHAT, **chat)["choices"][0]["logprobs"]["content"]:
        assert "logprob" not in entry and 0 < entry["prob"] <= 1
        assert sum(top["prob"] for top in entry["top_probs"]) == pytest.approx(1, abs=1e-5)
        assert len(entry["top_probs"]) <= 4
    # Without probabilities to report, and for a prompt that is repeated, it cannot do anything.
    for body in (prompt, {**prompt, "echo": True, "logprobs": 2}):
        done = lenient.post("/v1/completions", **body, max_tokens=2)
        assert done.headers["x-mlx-llama-noted"] == "post_sampling_probs"
        assert "content" not in (done.json()["choices"][0]["logprobs"] or {})


def test_logprobs_of_the_other_apis(guide, llm):
    wanted = llm.generate("Once upon", max_tokens=5, logprobs=2)
    asked = {"model": "guide", "prompt": "Once upon", "max_tokens": 5, "logprobs": 2}
    logprobs = guide.openai.completions.create(**asked).choices[0].logprobs
    rates = pytest.approx([token.logprobs.logprob for token in wanted.tokens], abs=1e-6)
    assert logprobs.token_logprobs == rates and "".join(logprobs.tokens) == wanted.text
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 5
    done = guide.ask("/completion", prompt="Once upon", n_predict=5, n_probs=2)
    assert [entry["logprob"] for entry in done["completion_probabilities"]] == rates
    done = guide.ask("/completion", prompt="x", n_predict=2, n_probs=0)
    assert "completion_probabilities" not in done


def test_logprobs_of_responses(guide):
    """As the chat's; deltas, the end of the text and the whole answer tell the same."""
    chat = guide.chat(max_tokens=9, logprobs=True, top_logprobs=3)
    wanted = [entry.model_dump() for entry in chat.logprobs.content]
    included = {"include": ["message.output_text.logprobs"]}
    asked = {"max_output_tokens": 9, "top_logprobs": 3, **included}

    def brief(entries) -> list:
        return [(e.token, e.logprob, [top.token for top in e.top_logprobs]) for e in entries]

    for tools in ([], [{"type": "function", "name": "weather", "parameters": WEATHER}]):
        response = guide.respond(**asked, tools=tools)
        [part] = response.output[0].content
        logprobs = [entry.model_dump() for entry in part.logprobs]
        assert (logprobs == wanted or tools) and len(logprobs) == 9 and response.top_logprobs == 3
        assert text_of_entries(part.logprobs) == part.text
        events = guide.respond(**asked, tools=tools, stream=True)
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        [done] = [event for event in events if event.type == "response.output_text.done"]
        for streamed in (sum((event.logprobs for event in deltas), []), done.logprobs):
            assert brief(streamed) == brief(part.logprobs)
        assert events[-1].response.output[0].content[0].logprobs == part.logprobs
    stopped = guide.chat(stop=" small", logprobs=True).logprobs.content
    response = guide.respond(**included, extra_body={"stop": " small"})
    [part] = response.output[0].content
    assert [entry.token for entry in part.logprobs] == [entry.token for entry in stopped]
    plain = guide.respond(max_output_tokens=2)
    assert plain.output[0].content[0].logprobs == [] and plain.top_logprobs == 0
    turns = [*QUESTION, *[item.model_dump() for item in response.output], *QUESTION]
    assert guide.respond(input=turns, max_output_tokens=2).output_text
