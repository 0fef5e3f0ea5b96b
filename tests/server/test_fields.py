"""Every field of the clients' own request types is done here, noted, or refused by
name.
"""

from __future__ import annotations

import json
import typing
from decimal import Decimal
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel, SecretStr
from starlette.requests import Request

from mlx_llama.server.anthropic import MessagesRequest
from mlx_llama.server.completions import CompletionRequest
from mlx_llama.server.fields import HIDDEN, NOTED as MARK, note, spellings
from mlx_llama.server.openai import ChatRequest
from mlx_llama.server.responses import ResponsesRequest

QUESTION = [{"role": "user", "content": "hi"}]
CHAT, TEXT = ("/v1/chat/completions", {"messages": QUESTION}), ("/v1/completions", {"prompt": "hi"})
RESPONSES = ("/v1/responses", {"input": "hi"})
MESSAGES = ("/v1/messages", {"model": "guide", "max_tokens": 2, "messages": QUESTION})
COUNT = ("/v1/messages/count_tokens", {"model": "guide", "messages": QUESTION})
TYPES = [
    (CHAT, ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
    (CHAT, ChatRequest, chat_create_params.CompletionCreateParamsNonStreaming),
    (TEXT, CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    (RESPONSES, ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
    (MESSAGES, MessagesRequest, message_create_params.MessageCreateParamsStreaming),
    (COUNT, MessagesRequest, message_count_tokens_params.MessageCountTokensParams),
]

# Fields that are accepted and change nothing; others are noted.
NO_EFFECT = {
    "FunctionBody": {"strict"},
    "ResponsesTool": {"strict"},
    "AnthropicTool": {"strict"},
    "NamedSchema": {"description"},
    "TextFormat": {"description"},
    # in answers of ours that are sent back
    "InputPart": {"logprobs"},
    "Call": {"index"},
}
FREE = set(
    "metadata parameters input_schema input schema schema_ logit_bias chat_template_kwargs "
    "documents".split()
)


def refused(body: type[BaseModel]) -> set[str]:
    """Fields that name a feature that is not available, and must not be passed over."""
    fields = body.model_fields.items()
    return {
        name for name, info in fields if HIDDEN in info.metadata and MARK not in info.metadata
    } | ({"thread"} if body is MessagesRequest else set())


def each_route(names: str, cases):
    return pytest.mark.parametrize(names, cases, ids=lambda case: getattr(case, "__name__", None))


@each_route("route, body, theirs", TYPES)
def test_every_other_field_of_the_client_is_ignored_and_noted(route, body, theirs, lenient):
    path, base = route
    fields = set(typing.get_type_hints(theirs)) | {"a_field_of_next_year"}
    known = set(spellings(body)) | refused(body)
    assert len(fields & known) > 5
    for name in fields - known - {"functions", "function_call"}:
        done = lenient.post(path, **base, **{name: {"some": ["value"]}})
        assert done.status_code == 200, (name, done.text)
        assert name in done.headers["x-mlx-llama-noted"]


@each_route("route, body", [(route, body) for route, body, _ in TYPES[1:]])
def test_a_noted_field_with_a_value_that_does_not_fit_is_listed(route, body, lenient):
    path, base = route
    noted = {name for name, info in body.model_fields.items() if MARK in info.metadata}
    assert len(noted) > 15
    for name in sorted(noted):
        done = lenient.post(path, **base, **{name: {"no": "such value"}})
        assert done.status_code == 200, (name, done.text)
        noted = done.headers.get("x-mlx-llama-noted", "")
        assert name in noted or is_free(body.model_fields[name].annotation), name


@each_route("route, body", [(route, body) for route, body, _ in TYPES[1:]])
def test_refused_fields_are_refused_by_name(route, body, guide, lenient):
    path, base = route
    for name in refused(body) - {"image_data"}:
        for value in ({}, "x", 1, [1], True):
            for server in (guide, lenient):
                done = server.post(path, **base, **{name: value})
                [fault] = done.json()["errors"]
                assert done.status_code == 400 and fault["field"] == name
                assert fault["constraint"] == "unsupported"
    assert guide.refuse(path, **base, a_field_of_next_year=1) == ["a_field_of_next_year"]


def test_hints_and_identities_inside_of_messages_are_noted(lenient):
    """None of them is dropped in silence, and all else of the body counts."""
    cached = {"cache_control": {"type": "ephemeral"}}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": "3",
        "is_error": False,
        **cached,
    }
    body = {
        "max_tokens": 2,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, **cached}],
        "metadata": {"user_id": "a"},
    }
    done = lenient.post("/v1/messages", **body)
    assert done.status_code == 200, done.text
    assert set(done.headers["x-mlx-llama-noted"].split(", ")) == {
        "metadata",
        "tools[].cache_control",
        "messages[].content[].cache_control",
        "messages[].content[].caller",
        "messages[].content[].is_error",
    }
    answer = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": []}
    chat = {"messages": [*QUESTION, answer, *QUESTION], "user": "a", "max_tokens": 2}
    done = lenient.post("/v1/chat/completions", **chat)
    assert done.headers["x-mlx-llama-noted"] == "user"


def test_values_that_switch_off_what_is_not_here_are_taken(guide, lenient):
    off = {"mirostat": 0, "typical_p": 1.0, "samplers": [], "n_keep": 0, "lora": []}
    for path, base in (CHAT, TEXT, ("/completion", {"prompt": "hi"})):
        done = lenient.post(path, **base, **off, max_tokens=2)
        assert done.headers["x-mlx-llama-noted"] == "samplers", path  # no list that stands for ours
        del off["samplers"]
        assert guide.post(path, **base, **off, max_tokens=2).status_code == 200
        off["samplers"] = []
    for field in ("lora", "image_data"):
        assert lenient.refuse("/completion", prompt="hi", **{field: [{"id": 0}]}) == [field]


def models_of(kind, models: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """All models that a type reaches, by name."""
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__name__ not in models:
        models[kind.__name__] = kind
        for field in kind.model_fields.values():
            models_of(field.annotation, models)
    for inner in typing.get_args(kind):
        models_of(inner, models)
    return models


def is_free(kind) -> bool:
    """True if a type takes objects with any keys."""
    return typing.get_origin(kind) in (dict, typing.get_origin(typing.Mapping[str, int])) or any(
        map(is_free, typing.get_args(kind))
    )


def test_nothing_is_dropped_inside_a_field_either():
    """Each model knows which fields it does not know. Objects of any keys, and fields without an
    effect, are these and no others.
    """
    models: dict[str, type[BaseModel]] = {}
    for _, body, _ in TYPES:
        models_of(body, models)
    some = "Message FunctionTool InputItem ToolResult ResponseFormat StreamOptions"
    assert set(some.split()) <= set(models)
    idle = {}
    for name, model in models.items():
        # Further fields of a part are for the chat template.
        assert model.model_config.get("extra") == ("allow" if name == "OpenPart" else "forbid"), (
            name
        )
        for field, info in model.model_fields.items():
            assert not is_free(info.annotation) or field in FREE, (name, field)
            if "has no effect" in (info.description or ""):
                idle.setdefault(name, set()).add(field)
    assert idle == NO_EFFECT


def test_options_of_the_table_that_an_api_cannot_express_are_refused(guide):
    done = guide.post("/v1/messages", **MESSAGES[1], logprobs=2)
    assert done.status_code == 400 and "logprobs: not available in this API" in done.text
    form = {"type": "json_schema", "schema": {}}
    for (path, base), name, value in (
        (MESSAGES, "output_config", {"format": form}),
        (RESPONSES, "text", {"format": {"type": "json_object"}}),
    ):
        done = guide.post(path, **base, regex="a", **{name: value})
        assert done.status_code == 400 and f"{name}: cannot be combined with" in done.text


def test_strange_names_of_fields_are_noted_in_a_header_of_ascii(lenient):
    path, base = CHAT
    done = lenient.post(
        path, **base, max_tokens=1, **{"a\r\nSet-Cookie: x\x00": 1, "ü🦙": 2, "x" * 3000: 3}
    )
    assert done.status_code == 200 and "set-cookie" not in done.headers, done.text
    assert "a??Set-Cookie: x?" in done.headers["x-mlx-llama-noted"]
    assert len(done.headers["x-mlx-llama-noted"]) < 3000


@pytest.mark.parametrize(
    "names",
    [
        ["x "],
        [" x"],
        ["\t"],
        [""],
        [" "],
        ["\ud7ff\u2028\x7f"],
        [f"x{i}" for i in range(1000)],  # cut at a space
        ["🦙" * 2000],
        [f"{i}{'y' * 300}" for i in range(2000)],
    ],
    ids=range(9),
)
def test_names_of_fields_leave_the_header_legal(names, lenient):
    """Judged by h11 on both sides, as in httpx."""
    path, base = CHAT
    done = lenient.post(path, **base, max_tokens=1, **dict.fromkeys(names, 1))
    assert done.status_code == 200, done.text
    assert len(done.headers["x-mlx-llama-noted"]) <= 1024


def test_a_request_keeps_few_short_names_of_ignored_fields():
    request = Request({"type": "http"})
    for number in range(1000):
        note(request, f"{number}{'x' * 9000}")
    assert len(request.scope["noted"]) <= 256
    assert max(map(len, request.scope["noted"])) <= 200


def test_a_client_s_ignored_field_is_in_the_log_once(lenient):
    path, body = CHAT
    for agent, field in (("a/1", "x_new"), ("a/1", "x_new"), ("b/1", "x_new"), ("a/1", "x_other")):
        fields = {**body, "max_tokens": 1, field: 1}
        lenient.http.post(path, json=fields, headers={"User-Agent": agent}).raise_for_status()
    lenient.wait(lambda: "x_other" in lenient.text())
    lines = [line for line in lenient.text().splitlines() if "ignored in requests of" in line]
    warned = [line.split("requests of ")[1] for line in lines if "/1: x_" in line]
    assert warned == [
        f"127.0.0.1, {client}" for client in ("a/1: x_new", "b/1: x_new", "a/1: x_other")
    ]


@pytest.mark.parametrize(
    "route, sent, place, meant",
    [
        (CHAT, {"max_token": 2}, "max_token", "max_tokens"),
        (CHAT, {"maxTokens": 2}, "maxTokens", "max_tokens"),
        (CHAT, {"stream_options": {"include_usag": 1}, "stream": True}, None, "include_usage"),
        (TEXT, {"temprature": 0}, "temprature", "temperature"),
        (RESPONSES, {"max_output_token": 2}, "max_output_token", "max_output_tokens"),
        (MESSAGES, {"stop_sequence": ["a"]}, "stop_sequence", "stop_sequences"),
        (
            ("/api/chat", CHAT[1]),
            {"options": {"num_predicts": 2}},
            "options.num_predicts",
            "num_predict",
        ),
        (CHAT, {"min_tokens": 2}, "min_tokens", ""),
        (CHAT, {"safety_identifier": "x"}, "safety_identifier", ""),
    ],
)
def test_the_log_suggests_a_field_for_an_ignored_one(route, sent, place, meant, lenient):
    """The request is served, and its header names the field as it was sent."""
    path, base = route
    place = place or "stream_options.include_usag"
    agent = {"User-Agent": f"suggest/{place}{path}"}
    done = lenient.http.post(path, json={"max_tokens": 2, **base, **sent}, headers=agent)
    assert done.status_code == 200 and place in done.headers["x-mlx-llama-noted"].split(", ")
    wanted = f", {agent['User-Agent']}: "
    lenient.wait(lambda: wanted in lenient.text())
    [line] = [line for line in lenient.text().splitlines() if wanted in line]
    hint = f" (did you mean {meant}?)" if meant else ""
    assert f"{place}{hint}" in line and line.count("did you mean") == bool(meant)


def test_a_strict_server_translates_and_refuses_what_would_be_ignored(guide):
    """Also where only the model's template tells that a field has no effect."""
    path, body = CHAT
    tools = {"functions": [{"name": "f"}], "function_call": "none"}
    for more in (tools, {"stop": "", "top_k": -1, "seed": -1}, {"reasoning_effort": None}):
        assert guide.post(path, **body, **more, max_tokens=2).status_code == 200
    options = {"num_predict": 2, "temperature": 0}
    done = guide.post("/api/chat", **body, options=options, stream=False)
    assert done.status_code == 200 and done.json()["eval_count"] == 2
    for field, value in (("reasoning_effort", "low"), ("stream_options", {"include_usage": True})):
        [fault] = guide.post(path, **body, **{field: value}).json()["errors"]
        assert (fault["field"], fault["constraint"]) == (field, "unsupported")
    assert guide.refuse("/api/chat", **body, options={"num_ctx": 9}) == ["options.num_ctx"]


CUT = '{"a": 1, "b'  # arguments of a call that was cut
CALLED = {"id": "t", "type": "function", "function": {"name": "f", "arguments": CUT}}
HISTORY = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALLED]}]
HISTORY += [{"role": "tool", "tool_call_id": "t", "content": "3"}, *QUESTION]
ITEMS = [{"type": "function_call", "call_id": "t", "name": "f", "arguments": CUT}]
ITEMS = [*QUESTION, *ITEMS, {"type": "function_call_output", "call_id": "t", "output": "3"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOL = {"type": "function", "function": FUNCTION}
RESULT = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
SEARCH = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, RESULT]
THOUGHT = {"type": "thinking", "thinking": "?", "signature": ""}
PAPER = {"type": "document", "source": {"type": "text", "data": "It rains."}, "title": "Now"}
PAPER |= {"context": "x"}
CONTEXT = "messages[].content[].context"
CLAUDE = {"name": "f", "input_schema": FUNCTION["parameters"]}
FOUND = {"type": "search_result", "source": "x", "content": [{"type": "text", "text": "Dry."}]}
PAPERS = {"type": "document", "source": {"type": "content", "content": FOUND["content"]}}
USED = {"type": "tool_use", "id": "t", "name": "f", "input": CUT}
BROUGHT = {"type": "tool_result", "tool_use_id": "t", "content": [PAPER, FOUND]}
PARTS = [*QUESTION, {"role": "assistant", "content": [USED, {**USED, "id": "u", "input": None}]}]
PARTS += [{"role": "user", "content": [BROUGHT, PAPERS, FOUND]}]
FORCED = {"tools": [CLAUDE], "tool_choice": {"type": "any"}}
FORM = {"type": "json_schema", "schema": {"type": "object"}}
BLOCKS = [
    *QUESTION,
    {"role": "assistant", "content": [THOUGHT, {"type": "redacted_thinking", "data": ""}, *SEARCH]},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [PAPER]},
]
HINTS = dict(eager_input_streaming=True, defer_loading=True, allowed_callers=["direct"])
HINTS |= dict(input_examples=[{"a": 1}], cache_control={"type": "ephemeral"})
AGENT = dict(context_management={"edits": []}, mcp_servers=[], betas=["x"], metadata={"a": [{}]})
AGENT |= dict(thinking={"type": "adaptive"}, output_config={"effort": "low"})
AGENT_NOTED = "context_management mcp_servers betas metadata thinking output_config.effort"
SERVERS = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "local_shell"}]
SPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}
CODEX = dict(include=["reasoning.encrypted_content"], client_metadata={"a": "b"}, store=True)
CODEX |= dict(reasoning={"effort": "low", "summary": "auto"}, tools=[SPACE, *SERVERS])
CODEX_NOTED = "include[] client_metadata reasoning reasoning.summary"
HARMLESS = dict(reasoning_effort="low", verbosity="low", store=True, service_tier="flex")
HARMLESS |= dict(prompt_cache_retention="24h", prediction={"content": "x"}, metadata={"a": [{}]})
LLAMA = dict(ignore_eos=True, cache_prompt=True, repeat_penalty=1.1, mirostat=0, typical_p=1)
LLAMA |= dict(dry_multiplier=0.5, xtc_probability=0.1, json_schema={"type": "object"})
SENT = [  # by a client, whose other fields are done -> the noted ones
    (CHAT, {"messages": HISTORY, "tools": [TOOL]}, ""),
    (RESPONSES, {"input": ITEMS}, ""),
    (RESPONSES, CODEX, f"{CODEX_NOTED} tools[].web_search tools[].custom tools[].local_shell"),
    (MESSAGES, {"tools": [CLAUDE | HINTS]}, " ".join(f"tools[].{name}" for name in HINTS)),
    (MESSAGES, AGENT, AGENT_NOTED),
    (COUNT, AGENT, AGENT_NOTED),
    (
        MESSAGES,
        {"messages": BLOCKS},
        CONTEXT.join(
            f" messages[].content[].{kind} "
            for kind in ("signature", "redacted_thinking", "server_tool_use", RESULT["type"])
        ),
    ),
    *[(route, {"messages": PARTS}, CONTEXT) for route in (MESSAGES, COUNT)],
    (MESSAGES, {**FORCED, "output_format": FORM}, "output_config.format"),
    (
        RESPONSES,
        {"tools": [TOOL], "tool_choice": "required", "text": {"format": {**FORM, "name": "x"}}},
        "text.format",
    ),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    *[
        (route, {"reasoning": {"effort": "low"}}, "reasoning")
        for route in (CHAT, RESPONSES, TEXT, ("/completion", TEXT[1]))
    ],
    *[(route, {"grammar": ""}, "") for route in (CHAT, TEXT, RESPONSES, MESSAGES)],
    (COUNT, {"tools": [CLAUDE | {"name": f"{i:0128}"} for i in range(130)]}, ""),
    (COUNT, {"tools": [CLAUDE | {"description": "word " * 80_000}]}, ""),
    (CHAT, HARMLESS, " ".join(HARMLESS)),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    (CHAT, {"seed": -1, "top_k": -1, "top_p": 0, "max_tokens": -1, "stop": ""}, ""),
    (CHAT, {"max_tokens": 500, "max_completion_tokens": 2}, "max_tokens"),
    (CHAT, {"model": "GUIDE.gguf"}, ""),
    (CHAT, {"model": "gpt-4o"}, "model"),
    *[(route, LLAMA, "") for route in (CHAT, TEXT, RESPONSES, MESSAGES)],
    *[(route, {"mirostat": 2, "typical_p": 0.5}, "mirostat typical_p") for route in (CHAT, TEXT)],
]


@pytest.mark.parametrize("route, more, noted", SENT)
def test_shapes_of_agents_and_frontends_are_served(route, more, noted, lenient):
    """Every ignored field is in the header, and no other."""
    path, base = route
    done = lenient.post(path, **{"max_tokens": 2, **base, **more})
    assert done.status_code == 200, done.text[:500]
    places = set(filter(None, done.headers.get("x-mlx-llama-noted", "").split(", ")))
    expected = set(noted.split())
    assert places - {"max_tokens"} == expected - {"max_tokens"}


def test_tools_of_servers_that_are_forced_and_threads_are_refused(lenient):
    for tool in SERVERS[1:]:
        forced = {"tools": [tool], "tool_choice": tool}
        assert lenient.post("/v1/responses", input="hi", **forced).status_code == 400
    done = lenient.post("/v1/messages", **MESSAGES[1], thread={"id": "x"})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert done.status_code == 400 and done.json()["error"]["details"] == details


class Strange(BaseModel):
    tags: set[str]
    data: bytes
    path: Path
    secret: SecretStr
    net: IPv4Network
    price: Decimal


def test_schemas_of_ordinary_types_are_relaxed_and_noted(lenient):
    path, base = CHAT
    schema = Strange.model_json_schema()
    schema["properties"] |= {
        "ahead": {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        "choice": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "form": {"type": "string", "format": "strange"},
    }
    for is_strict in (False, True):
        named = {"name": "x", "schema": schema, "strict": is_strict}
        form = {"response_format": {"type": "json_schema", "json_schema": named}}
        done = lenient.post(path, **base, **form, max_tokens=20)
        if is_strict:
            assert done.status_code == 400 and "cannot be enforced" in done.text, done.text
        else:
            relaxed = done.headers["x-mlx-llama-noted"]
            assert relaxed == "schema: format, oneOf, pattern, uniqueItems", done.text
            assert done.json()["choices"][0]["message"]["content"].startswith("{")


MCP_TOOLS = json.loads((Path(__file__).parents[1] / "data" / "mcp_tools.json").read_text("utf-8"))
# Written in their style, with what those do not have
MCP = {
    "list_issues": {
        "labels": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "since": {"type": "string", "format": "iso-date"},
        "page": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "perPage": {"type": "number", "minimum": 1, "maximum": 100},
    },
    "read_rows": {  # of a database, by numbers of Go and Rust
        "offset": {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1},
        "shift": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        "ratio": {"type": "number", "minimum": -3.4028234663852886e38},
        "name": {"type": "string", "maxLength": 2**32},
        "where": {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {},
        },
    },
    "send": {  # zod's unions and look-ahead
        "to": {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "^(?!bot)"}]},
        "sets": {"type": "object", "propertyNames": {"format": "strange"}},
    },
}
NOTED = {
    "list_issues": "format, uniqueItems",
    "read_rows": "maxLength, maximum, minimum",
    "send": "format, oneOf, pattern, propertyNames",
}


@pytest.mark.parametrize("name", MCP)
def test_forced_tools_are_relaxed_and_noted_as_schemas_are(name, lenient):
    path, base = CHAT
    parameters = {"type": "object", "properties": MCP[name], "required": [*MCP[name]][:1]}
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    forced = {"tools": [tool], "tool_choice": "required", "max_tokens": 3}
    done = lenient.post(path, **{**base, **forced})
    assert done.status_code == 200, done.text
    assert f"tools: {NOTED[name]}" in done.headers["x-mlx-llama-noted"]
    path, base = MESSAGES
    tool = {"name": name, "input_schema": parameters}
    done = lenient.post(path, **{**base, "tools": [tool], "tool_choice": {"type": "any"}})
    assert done.status_code == 200, done.text
    assert f"tools: {NOTED[name]}" in done.headers["x-mlx-llama-noted"]


@pytest.mark.parametrize("server", MCP_TOOLS)
def test_tools_of_mcp_servers_are_enforced_as_they_are_listed(server, guide):
    """By a strict server, so that nothing in them is relaxed."""
    for listed in MCP_TOOLS[server]:
        name, text, schema = listed["name"], listed["description"], listed["inputSchema"]
        path, base = CHAT
        tool = {"name": name, "description": text, "parameters": schema}
        forced = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
        done = guide.post(path, **base, **forced, max_tokens=1)
        assert done.status_code == 200, (name, done.text)
        path, base = MESSAGES
        tool = {"name": name, "description": text, "input_schema": schema}
        done = guide.post(path, **base, tools=[tool], tool_choice={"type": "any"})
        assert done.status_code == 200, (name, done.text)


def test_refused_schemas_of_forced_tools_name_tool_and_property(lenient):
    path, base = CHAT
    fine = {"name": "fine", "parameters": {"type": "object", "properties": {"a": {}}}}
    for part, reason in (
        ({"$ref": "#/$defs/Gone"}, "does not exist"),
        ({"type": "object", "properties": {"id": {"not": {}}}}, "not"),
        ({"type": "integer", "minimum": 2**64}, f"minimum {2**64}"),
        ({"type": "string", "pattern": "(a{1003}){991}"}, "counts"),
        ({"allOf": [{"enum": [2**60 + 1, 3]}, {"enum": [2**60 + 1]}]}, f"{2**60 + 1}"),
    ):
        bad = {"name": "bad_one", "parameters": {"type": "object", "properties": {"wrong": part}}}
        tools = [{"type": "function", "function": function} for function in (fine, bad)]
        done = lenient.post(path, **base, tools=tools, tool_choice="required")
        message = done.json()["error"]["message"]
        assert done.status_code == 400 and reason in message, done.text
        assert "bad_one.wrong" in message and " at " not in message.split("expected")[0]


@pytest.mark.parametrize("number", [175928847299117063, -(2**63), 2**64 - 1])
def test_large_numbers_of_schemas_and_calls_are_exact(number, lenient):
    path, base = CHAT
    schema = {"type": "object", "properties": {"id": {"enum": [number]}}, "required": ["id"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    done = lenient.post(path, **{**base, "response_format": form, "max_tokens": 60})
    assert json.loads(done.json()["choices"][0]["message"]["content"]) == {"id": number}
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    forced = {"tools": [tool], "tool_choice": "required", "max_tokens": 90}
    done = lenient.post(path, **{**base, **forced, "parallel_tool_calls": False})
    (call,) = done.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"id": number}


def test_a_strict_server_refuses_forced_tools_that_would_be_relaxed(guide):
    path, base = CHAT
    parameters = {"type": "object", "properties": {"labels": MCP["list_issues"]["labels"]}}
    tool = {"type": "function", "function": {"name": "list_issues", "parameters": parameters}}
    done = guide.post(path, **base, tools=[tool], tool_choice="required")
    assert done.status_code == 400
    assert (
        'list_issues.labels: Unimplemented keys: ["uniqueItems"]' in done.json()["error"]["message"]
    )
