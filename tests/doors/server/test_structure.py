"""Structured output, tools and log-probabilities over HTTP, with the clients' own helpers."""

from __future__ import annotations

import json
import math
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict

jsonschema = pytest.importorskip("jsonschema")

QUESTION = [{"role": "user", "content": "Who are you?"}]


class Animal(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["llama", "penguin", "dragon"]
    legs: Literal[2, 4]
    friend: Literal["Molly", "Iris"]


WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER},
}
OTHER = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def client(guide):
    return openai.OpenAI(base_url=f"{guide.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(guide):
    return anthropic.Anthropic(base_url=guide.url, api_key="none", max_retries=0)


# Structured output


def test_json_schema(client, llm):
    completion = client.chat.completions.parse(
        model="guide", messages=QUESTION, response_format=Animal, max_tokens=200
    )
    assert isinstance(completion.choices[0].message.parsed, Animal)
    assert completion.choices[0].finish_reason == "stop"
    wanted = llm.generate(QUESTION, schema=Animal.model_json_schema(), max_tokens=200)
    assert json.loads(wanted.text) == json.loads(completion.choices[0].message.content)
    stream = client.chat.completions.create(
        model="guide",
        messages=QUESTION,
        max_tokens=200,
        stream=True,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": Animal.model_json_schema()},
        },
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted.text


def test_json_object_and_rules_of_the_table(client, guide, llm):
    completion = client.chat.completions.create(
        model="guide", messages=QUESTION, response_format={"type": "json_object"}, max_tokens=60
    )
    text = completion.choices[0].message.content
    assert text == llm.generate(QUESTION, schema={"type": "object"}, max_tokens=60).text
    assert text.startswith("{")
    completion = guide.post(
        "/v1/chat/completions", messages=QUESTION, regex="(yes|no), [0-9]{3}"
    ).json()
    assert (
        completion["choices"][0]["message"]["content"]
        == llm.generate(QUESTION, regex="(yes|no), [0-9]{3}").text
    )
    completion = guide.post("/completion", prompt="Is it?", grammar='root ::= "yes" | "no"').json()
    assert completion["content"] in ("yes", "no")
    completion = guide.post("/completion", prompt="Is it?", json_schema={"enum": ["a", "b"]}).json()
    assert json.loads(completion["content"]) in ("a", "b")


def test_formats_of_messages(claude, llm):
    message = claude.messages.create(
        model="guide",
        max_tokens=200,
        messages=QUESTION,
        output_config={"format": {"type": "json_schema", "schema": Animal.model_json_schema()}},
    )
    assert (
        message.content[0].text
        == llm.generate(QUESTION, schema=Animal.model_json_schema(), max_tokens=200).text
    )
    Animal.model_validate_json(message.content[0].text)
    assert isinstance(
        claude.messages.parse(
            model="guide", max_tokens=200, messages=QUESTION, output_format=Animal
        ).parsed_output,
        Animal,
    )
    with pytest.raises(anthropic.BadRequestError, match="output_config.effort"):
        claude.messages.create(
            model="guide", max_tokens=2, messages=QUESTION, output_config={"effort": "low"}
        )


def test_formats_of_responses(client):
    response = client.responses.parse(model="guide", input="Who are you?", text_format=Animal)
    assert isinstance(response.output_parsed, Animal)
    assert client.responses.create(
        model="guide", input="x", max_output_tokens=20, text={"format": {"type": "json_object"}}
    ).output_text.startswith("{")


@pytest.mark.parametrize(
    "body, field",
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "pattern": "(?=x)"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
            "response_format.json_schema",
        ),
        (
            {
                "tools": [TOOL],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"pattern": "(?=x)"}},
                },
            },
            "response_format.json_schema.schema",
        ),
        ({"regex": "(?<=x)y"}, "regex"),
        ({"grammar": "start: nope"}, "grammar"),
        ({"schema": {"type": "nope"}}, "schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"regex": "a", "grammar": 'start: "a"'}, "grammar"),
        ({"schema": {"enum": ["x" * 70_000]}}, "schema"),
        ({"regex": "a" * 9000}, "regex"),
    ],
)
def test_a_rule_that_is_not_taken_is_refused_before_anything_is_computed(body, field, guide):
    before = guide.metric("prompt_tokens_total")
    done = guide.post("/v1/chat/completions", messages=QUESTION, **body)
    assert done.status_code == 400 and [fault["field"] for fault in done.json()["errors"]] == [
        field
    ], done.text
    assert guide.metric("prompt_tokens_total") == before


# Tools


def call_of(message) -> tuple[str, dict]:
    [call] = message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


@pytest.mark.parametrize(
    "choice, tools",
    [("required", [TOOL]), ({"type": "function", "function": {"name": "weather"}}, [OTHER, TOOL])],
)
def test_a_required_call_fits_its_schema(choice, tools, endless):
    client = openai.OpenAI(base_url=f"{endless.url}/v1", api_key="none", max_retries=0)
    asked = {
        "model": "toy",
        "messages": QUESTION,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 120,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    name, arguments = call_of(answer.message)
    assert name == "weather" and answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    jsonschema.validate(arguments, WEATHER)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert deltas[0].function.name == "weather" and deltas[0].id and deltas[0].type == "function"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


CALLING = [
    (
        "/v1/chat/completions",
        "stop",
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    (
        "/v1/messages",
        "stop_sequences",
        {
            "tools": [{"name": "weather", "input_schema": WEATHER}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    (
        "/v1/responses",
        "stop",
        {
            "tools": [{"type": "function", "name": "weather", "parameters": WEATHER}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
    ),
]


def ask_for_a_call(guide, path: str, limit: int, **body) -> tuple[str, list[str], str]:
    """The reason of the end, the calls' arguments, and the text."""
    if path == "/v1/responses":
        answer = guide.post(path, input="hi", max_output_tokens=limit, **body).json()
        calls = [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
        return (
            answer["status"],
            calls,
            "".join(part["text"] for item in answer["output"] for part in item.get("content", ())),
        )
    answer = guide.post(path, model="guide", messages=QUESTION, max_tokens=limit, **body).json()
    if path == "/v1/messages":
        calls = [
            json.dumps(block["input"]) for block in answer["content"] if block["type"] == "tool_use"
        ]
        return (
            answer["stop_reason"],
            calls,
            "".join(block["text"] for block in answer["content"] if block["type"] == "text"),
        )
    [choice] = answer["choices"]
    message = choice["message"]
    return (
        choice["finish_reason"],
        [call["function"]["arguments"] for call in message.get("tool_calls", ())],
        message["content"] or "",
    )


@pytest.mark.parametrize("path, name, body", CALLING)
def test_a_rule_of_a_text_beside_a_required_call_is_refused(path, name, body, guide):
    asked = (
        {"input": "hi"}
        if path == "/v1/responses"
        else {"model": "guide", "messages": QUESTION, "max_tokens": 9}
    )
    schema = {"type": "json_schema", "schema": {"enum": ["a"]}}
    field, value = {
        "/v1/responses": ("text", {"format": {**schema, "name": "a"}}),
        "/v1/messages": ("output_config", {"format": schema}),
        "/v1/chat/completions": ("response_format", {"type": "json_object"}),
    }[path]
    for rule, text, named in (
        ("regex", "a", "regex"),
        ("schema", True, "schema"),
        (field, value, field if "chat" in path else f"{field}.format"),
    ):
        done = guide.post(path, **asked, **body, **{rule: text})
        assert done.status_code == 400 and done.json()["errors"][0]["field"] == named, done.text
        assert f"{named}: " in done.json()["error"]["message"]


@pytest.mark.parametrize("path, name, body", CALLING)
def test_stop_strings_do_not_cut_a_required_call(path, name, body, guide):
    for stop in (["city"], ["name"], ["tool_call"]):  # in its arguments, its head, its mark
        reason, [arguments], text = ask_for_a_call(guide, path, 120, **body, **{name: stop})
        assert reason in ("tool_calls", "tool_use", "completed") and text == ""
        jsonschema.validate(json.loads(arguments), WEATHER)


@pytest.mark.parametrize("path, name, body", CALLING)
def test_a_required_call_that_is_cut_is_no_text(path, name, body, guide):
    seen = set()
    for limit in range(1, 40, 3):
        reason, calls, text = ask_for_a_call(guide, path, limit, **body)
        is_cut = reason in ("length", "max_tokens", "incomplete")
        assert text == "" and (is_cut or reason in ("tool_calls", "tool_use", "completed")), (
            limit,
            text,
        )
        seen.add((is_cut, len(calls)))
    assert {(True, 0), (True, 1)} <= seen


def test_a_call_and_its_result_come_back(client, llm):
    first = (
        client.chat.completions.create(
            model="guide",
            messages=QUESTION,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=120,
        )
        .choices[0]
        .message
    )
    again = [
        *QUESTION,
        first.model_dump(),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sunny."},
    ]
    completion = client.chat.completions.create(model="guide", messages=again, max_tokens=12)
    assert completion.choices[0].message.content
    assert completion.usage.prompt_tokens > len(llm.encode(QUESTION)) + 10


def test_tools_that_need_not_be_called(client, llm):
    plain = llm.generate(QUESTION, max_tokens=12).text
    completion = client.chat.completions.create(
        model="guide", messages=QUESTION, tools=[TOOL], tool_choice="none", max_tokens=12
    )
    assert completion.choices[0].message.content == plain
    assert not completion.choices[0].message.tool_calls
    completion = client.chat.completions.create(
        model="guide", messages=QUESTION, tools=[TOOL], max_tokens=12
    )
    assert completion.usage.prompt_tokens > 100 and completion.choices[0].message.content
    stream = client.chat.completions.create(
        model="guide", messages=QUESTION, tools=[TOOL], max_tokens=12, stream=True
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        == completion.choices[0].message.content
    )


def called(arguments: str) -> list[dict]:
    return [{"id": "a", "function": {"name": "b", "arguments": arguments}}]


@pytest.mark.parametrize(
    "body, field",
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
            "tool_choice",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "x" * 129}}]},
            "tools[0].function.name",
        ),
        ({"tools": [TOOL], "regex": "a"}, "regex"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": called("{}")}]},
            "messages[0]",
        ),
    ],
)
def test_bad_tools_are_refused_by_name(body, field, guide):
    done = guide.post("/v1/chat/completions", **({"messages": QUESTION} | body))
    assert done.status_code == 400 and field in {
        fault["field"] for fault in done.json()["errors"]
    }, done.text


# Log-probabilities


def test_logprobs_of_a_chat(client, llm):
    wanted = llm.generate(QUESTION, max_tokens=8, logprobs=3)
    asked = {
        "model": "guide",
        "messages": QUESTION,
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 3,
    }
    entries = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx(
        [token.logprobs.logprob for token in wanted.tokens], abs=1e-6
    )
    assert "".join(entry.token for entry in entries) == wanted.text
    assert bytes(sum((entry.bytes for entry in entries), [])).decode() == wanted.text
    assert all(
        len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob >= entry.logprob
        for entry in entries
    )
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in entries]
    assert (
        client.chat.completions.create(model="guide", messages=QUESTION, max_tokens=2)
        .choices[0]
        .logprobs
        is None
    )


def test_logprobs_join_to_the_text_before_a_stop_string(client, guide, llm):
    text = llm.generate(QUESTION, max_tokens=12).text
    for stop in (text[9:16], text[20:21], text[2:5]):
        asked = {"model": "guide", "messages": QUESTION, "max_tokens": 12, "logprobs": True}
        whole = client.chat.completions.create(**asked, stop=stop).choices[0]
        chunks = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(**asked, stop=stop, stream=True)
        ]
        assert whole.message.content == text[: text.index(stop)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
        streamed = sum((chunk.logprobs.content for chunk in chunks if chunk.logprobs), [])
        for entries in (whole.logprobs.content, streamed):
            assert (
                bytes(sum((entry.bytes for entry in entries), [])).decode() == whole.message.content
            )
        old = client.completions.create(
            model="guide", prompt="Once upon", max_tokens=12, logprobs=0, stop=stop, echo=False
        ).choices[0]
        assert "".join(old.logprobs.tokens) == old.text
    done = guide.post("/completion", prompt="Once upon", n_predict=9, n_probs=1, stop=["a"]).json()
    assert "".join(entry["token"] for entry in done["completion_probabilities"]) == done["content"]


def test_probabilities_after_the_samplers_on_every_route(guide, lenient, llm):
    """As Python's option gives them; by llama-server's names."""
    asked = {"post_sampling_probs": True, "temperature": 0.7, "top_k": 4, "seed": 3}
    wanted = llm.generate("Once upon", max_tokens=5, logprobs=3, **asked).tokens
    probs = [math.exp(token.logprobs.logprob) for token in wanted]
    tops = [[math.exp(value) for _, value in token.logprobs.top] for token in wanted]
    assert all(0 < prob <= 1 for prob in probs) and any(prob < 1 for prob in probs)
    raw = llm.generate(
        "Once upon", max_tokens=5, logprobs=3, **asked | {"post_sampling_probs": False}
    )
    assert list(map(int, raw.tokens)) == list(map(int, wanted))
    assert [math.exp(token.logprobs.logprob) for token in raw.tokens] != probs
    prompt = {"prompt": "Once upon", **asked}
    native = guide.post("/completion", **prompt, n_predict=5, n_probs=3).json()
    assert native["generation_settings"]["post_sampling_probs"] is True
    old = guide.post("/v1/completions", **prompt, max_tokens=5, logprobs=3).json()["choices"][0]
    for entries in (native["completion_probabilities"], old["logprobs"]["content"]):
        assert [entry["id"] for entry in entries] == list(map(int, wanted))
        assert [entry["prob"] for entry in entries] == probs
        assert [[top["prob"] for top in entry["top_probs"]] for entry in entries] == tops
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **asked}
    chat |= {"logprobs": True, "top_logprobs": 20}
    whole = guide.post("/v1/chat/completions", **chat).json()["choices"][0]
    for entry in whole["logprobs"]["content"]:
        assert "logprob" not in entry and 0 < entry["prob"] <= 1
        assert sum(top["prob"] for top in entry["top_probs"]) == pytest.approx(1, abs=1e-5)
        assert len(entry["top_probs"]) <= 4
    # Without probabilities to report, and for a prompt that is repeated, it cannot do anything.
    for body in (prompt, {**prompt, "echo": True, "logprobs": 2}):
        done = lenient.post("/v1/completions", **body, max_tokens=2)
        assert done.headers["x-mlx-llama-noted"] == "post_sampling_probs"
        assert "content" not in (done.json()["choices"][0]["logprobs"] or {})


def test_logprobs_of_the_other_apis(client, guide, llm):
    wanted = llm.generate("Once upon", max_tokens=5, logprobs=2)
    logprobs = (
        client.completions.create(model="guide", prompt="Once upon", max_tokens=5, logprobs=2)
        .choices[0]
        .logprobs
    )
    assert logprobs.token_logprobs == pytest.approx(
        [token.logprobs.logprob for token in wanted.tokens], abs=1e-6
    )
    assert "".join(logprobs.tokens) == wanted.text
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 5
    assert [
        wanted.text[at : at + len(text)] for at, text in zip(logprobs.text_offset, logprobs.tokens)
    ] == logprobs.tokens
    done = guide.post("/completion", prompt="Once upon", n_predict=5, n_probs=2).json()[
        "completion_probabilities"
    ]
    assert [entry["id"] for entry in done] == list(map(int, wanted.tokens))
    assert len(done[0]["top_logprobs"]) == 2
    assert (
        "completion_probabilities"
        not in guide.post("/completion", prompt="x", n_predict=2, n_probs=0).json()
    )


def test_logprobs_of_responses(client):
    """As the chat's; deltas, the end of the text and the whole answer tell the same."""
    included = ["message.output_text.logprobs"]
    chat = client.chat.completions.create(
        model="guide", messages=QUESTION, max_tokens=9, logprobs=True, top_logprobs=3
    )
    wanted = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    asked = {
        "model": "guide",
        "input": QUESTION,
        "max_output_tokens": 9,
        "include": included,
        "top_logprobs": 3,
    }
    for tools in ([], [{"type": "function", "name": "weather", "parameters": WEATHER}]):
        response = client.responses.create(**asked, tools=tools)
        part = response.output[0].content[0]
        logprobs = [entry.model_dump() for entry in part.logprobs]
        assert (logprobs == wanted or tools) and len(logprobs) == 9 and response.top_logprobs == 3
        assert bytes(sum((entry.bytes for entry in part.logprobs), [])).decode() == part.text
        events = list(client.responses.create(**asked, tools=tools, stream=True))
        deltas = [
            entry
            for event in events
            if event.type == "response.output_text.delta"
            for entry in event.logprobs
        ]
        [done] = [event for event in events if event.type == "response.output_text.done"]
        for streamed in (deltas, done.logprobs):
            assert [
                (entry.token, entry.logprob, [top.token for top in entry.top_logprobs])
                for entry in streamed
            ] == [
                (entry["token"], entry["logprob"], [top["token"] for top in entry["top_logprobs"]])
                for entry in logprobs
            ]
        assert [
            entry.model_dump() for entry in events[-1].response.output[0].content[0].logprobs
        ] == logprobs
    stopped = client.chat.completions.create(
        model="guide", messages=QUESTION, stop=" small", logprobs=True
    ).choices[0]
    response = client.responses.create(
        model="guide", input=QUESTION, include=included, extra_body={"stop": " small"}
    )
    assert [entry.token for entry in response.output[0].content[0].logprobs] == [
        entry.token for entry in stopped.logprobs.content
    ]
    plain = client.responses.create(model="guide", input=QUESTION, max_output_tokens=2)
    assert plain.output[0].content[0].logprobs == [] and plain.top_logprobs == 0
    response = client.responses.create(
        model="guide", input=QUESTION, max_output_tokens=9, include=included
    )
    assert (
        client.responses.create(
            model="guide", input=QUESTION, max_output_tokens=2, include=included
        )
        .output[0]
        .content[0]
        .logprobs
    )
    turns = [
        *QUESTION,
        *[item.model_dump() for item in response.output],
        {"role": "user", "content": "A story?"},
    ]
    assert client.responses.create(model="guide", input=turns, max_output_tokens=2).output_text


@pytest.mark.parametrize(
    "body, field",
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"include": "message.output_text.logprobs"}, "include"),
    ],
)
def test_bad_logprobs_of_responses(body, field, guide):
    done = guide.post("/v1/responses", input="x", **body)
    assert done.status_code == 400 and done.json()["errors"][0]["field"] == field
    assert "logprobs" in done.text


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": False, "top_logprobs": 3},
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": 3},
        {"logprobs": True, "top_logprobs": -1},
    ],
)
def test_bad_logprobs(body, guide):
    assert guide.post("/v1/chat/completions", messages=QUESTION, **body).status_code == 400
