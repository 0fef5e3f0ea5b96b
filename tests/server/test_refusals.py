"""Bodies that are refused: every fault at once, in one shape, and never a 5xx."""

from __future__ import annotations

import json
import re

import pytest

from mlx_llama.core.options import FIELDS

CHAT = "/v1/chat/completions"
ROUTES = (
    "/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/messages/count_tokens "
    "/completion /infill /tokenize /detokenize /apply-template /v1/jobs /page/render /page/session"
).split()
QUESTION = [{"role": "user", "content": "hi"}]


def test_every_fault_is_reported_with_field_constraint_and_value(guide):
    body = {"max_tokens": -2, "temperature": "warm", "top_p": 7, "stop": [3], "logit_bias": 3}
    body |= {"seed": -5, "stream": "yes", "tempreature": 1, "audio": {}, "n": 99}
    turns = [{"role": "robot", "content": 3}, {"role": "user", "reasoning_content": "x"}]
    body["messages"] = turns
    done = guide.post(CHAT, **body)
    faults = {fault["field"]: fault for fault in done.json()["errors"]}
    assert done.status_code == 400
    places = {"messages[0].role", "messages[0].content", "messages[1]"}
    assert set(faults) == places | (set(body) - {"messages"})
    message = "max_tokens: must be >= -1"
    assert faults["max_tokens"] == dict(
        field="max_tokens", constraint=">= -1", message=message, value=-2
    )
    assert faults["top_p"]["constraint"] == "<= 1.0" and "as sent" in faults["seed"]["message"]
    assert faults["messages[0].content"]["constraint"] == "string or array"
    assert "did you mean temperature" in faults["tempreature"]["message"]
    assert "not supported" in faults["audio"]["message"]
    error = done.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] in faults
    assert error["code"] == "invalid_value"


def test_a_fault_has_the_name_that_the_request_used(guide):
    done = guide.post(CHAT, messages=QUESTION, max_completion_tokens=-2)
    [fault] = done.json()["errors"]
    assert fault["field"] == "max_completion_tokens" and "max_tokens" not in fault["message"]
    limits = {"max_completion_tokens": 2, "max_tokens": 3}
    done = guide.post(CHAT, messages=QUESTION, **limits)
    assert done.status_code == 400 and "contradicts" in done.text
    assert guide.ask(CHAT, messages=QUESTION, **limits | {"max_tokens": 2})


HOSTILE = [b"", b"\xff\xfe", b"{}" * 3, b"[" * 5000, b'{"a":' * 5000, b'{"messages":' + b"[" * 300]
HOSTILE += b'{ [] null 3 "x"'.split()
PROMPTS = rb"""[[]] [] [1,"a",[]] [-1] [100000000] [1.5] [[1],"a"] {} Infinity "\udfff" """.split()
HOSTILE += [b'{"prompt": %s}' % value for value in PROMPTS]
HOSTILE += [
    b'{"prompt": "x", %s}' % fields
    for fields in (
        b'"max_tokens": ' + b"9" * 5000,
        b'"seed": 18446744073709551616',
        b'"logit_bias": {"99999999": 1}',
        b'"logit_bias": {"-1": 1}',
        b'"logit_bias": {"\xd9\xa3": 1}',
        b'"stop": [' + b'"a",' * 99 + b'"b"]',
        b'"stop": "' + b"s" * 5000 + b'"',
        b'"stream_options": {"include_usage": true}',
        b'"__class__": 1, "": 2, "a.b[0]": 3',
        b'"prompt": null',
    )
]
HOSTILE += rb"""
{"messages": [{"role": "user", "content": "\ud800"}]}
{"content": "\ud83d"}
{"temperature": NaN, "messages": []}
{"max_tokens": 1e999, "prompt": "x"}
{"tokens": [99999999999999999999]}
{"tokens": [-5]}
{"tokens": ["a"]}
{"content": 5}
{"messages": []}
{"messages": [[]]}
{"messages": [{}]}
{"messages": [{"role": "user", "content": []}]}
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]}
{"messages": [{"role": "tool", "content": "x"}]}
{"messages": [{"role": "user", "content": "x", "name": "n"}]}
{"text": "{\"format\": \"mlx_llama session\"}"}
{"input": []}
{"input": [{"role": "user"}]}
{"input": "x", "text": {"format": {"type": "json_object"}}}
{"job_id": 3}
""".strip().splitlines()
HOSTILE += [b'{"text": "' + letter * 20000 + b'"}' for letter in (b"`", b"[")]


@pytest.mark.slow_for("*/j", "*/r")
@pytest.mark.parametrize("path", ROUTES)
def test_hostile_bodies(path, guide):
    for raw in HOSTILE:
        done = guide.http.post(path, content=raw)
        assert done.status_code == 400 or done.status_code < 300, (raw[:80], done.text[:300])
        if done.status_code == 400:
            body = done.json()
            assert body["error"]["message"] and isinstance(body["errors"], list), raw[:80]
            assert len(done.content) < 20_000
    guide.wait_idle()


def test_nulls_count_as_left_out(guide):
    nulls = dict.fromkeys([*FIELDS, "tools", "audio", "response_format", "user"])
    assert guide.ask(CHAT, **nulls | {"messages": QUESTION, "max_tokens": 2})


def test_a_whole_number_may_be_written_as_json_allows(guide):
    for number, status in (("2.0", 200), ("2.5", 400), ("true", 400), ('"2"', 400), ("1e300", 400)):
        body = f'{{"prompt": "x", "max_tokens": {number}, "seed": 1e3, "top_k": 5}}'
        assert guide.http.post("/v1/completions", content=body).status_code == status, number


def test_limits(guide):
    done = guide.post(CHAT, messages=QUESTION * 3000)
    assert done.status_code == 400 and "messages: must have at most 2048 items" in done.text
    assert guide.refuse("/v1/completions", prompt=["a"] * 8, n=3) == ["n"]
    assert guide.refuse("/v1/completions", prompt=["a"] * 17) == ["prompt"]
    done = guide.post("/v1/completions", prompt={"x": "y" * 100_000})  # a value is shortened
    assert len(done.content) < 2000 and done.json()["errors"][0]["value"].endswith("...")


def test_routes_that_are_not_there(guide):
    for method, path, status in (
        ("GET", "/v2", 404),
        ("GET", "/v1/completions", 405),
        ("PUT", "/health", 405),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/page/../settings.py", 404),
        ("GET", "/page/%2e%2e%2fsettings.py", 404),
        ("DELETE", "/v1/jobs/nope", 404),
    ):
        done = guide.http.request(method, path)
        assert done.status_code == status and done.json()["error"]["message"], path


# As the APIs' own references have them, beside the table's.
NAMES = {
    "ChatRequest": "max_completion_tokens max_tokens",
    "CompletionRequest": "",
    "JobRequest": "",
    "MessagesRequest": "stop_sequences max_tokens",
    "ResponsesRequest": "max_output_tokens",
    "LlamaCompletionRequest": "n_predict repeat_penalty repeat_last_n json_schema n_probs n_cmpl",
}


def test_the_document_has_the_limits_of_the_table(guide):
    schemas = guide.http.get("/openapi.json").json()["components"]["schemas"]
    for schema, names in NAMES.items():
        fields = schemas[schema]["properties"]
        assert set(names.split()) <= set(fields), schema
        if schema == "LlamaCompletionRequest":
            assert fields["n_predict"]["minimum"] == -1
            continue
        assert set(FIELDS) <= set(fields), schema
        assert (fields["top_p"]["minimum"], fields["top_p"]["maximum"]) == (1e-6, 1), schema
        assert fields["min_p"]["description"] == FIELDS["min_p"].description
        for name in FIELDS:
            words = fields[name].get("description", "").lower()
            assert not re.search("file|flag|token_id=", words), (schema, name, words)
    for schema, described in schemas.items():
        for name, field in described.get("properties", {}).items():
            words = field.get("description", "").replace(">=", "")
            assert not re.search("FILE|flag|=", words), (schema, name)  # of a command line
    docs = guide.http.get("/docs").text
    assert "repetition_context_size" in docs and "<script" not in docs and "http://" not in docs


def faults_of(guide, path=CHAT, **body):
    """Faults by field; each has a constraint and a message that begins with the field."""
    done = guide.post(path, **body)
    assert done.status_code == 400, done.text
    faults = {fault["field"]: fault for fault in done.json()["errors"]}
    assert len(faults) == len(done.json()["errors"]), done.text
    for field, fault in faults.items():
        assert fault["message"].startswith(f"{field}: ") and "_type" not in str(fault), fault
        assert re.search(" |^(?!.*(_|[eE]rror))", fault["constraint"]), fault
    return faults


def test_faults_of_several_fields_together_are_reported_with_the_others(guide):
    body = {"messages": [], "stream_options": {"include_usage": True}, "top_logprobs": 3}
    body |= {"model": "nope", "regex": "(", "logit_bias": {"99999": 1}, "speculate": "model"}
    faults = faults_of(guide, **body, logprobs=False)
    assert set(faults) == set(body)
    assert faults["regex"]["value"] == "(" and faults["logit_bias"]["value"] == '{"99999": 1}'
    assert faults["stream_options"]["value"] == '{"include_usage": true}'
    assert set(faults_of(guide, "/v1/jobs", temperature=-1)) == {"prompt", "temperature"}


def test_faults_that_the_model_reveals_are_reported_together(guide):
    faults = faults_of(guide, messages=QUESTION, regex="(", logit_bias={"99999": 1})
    assert set(faults) == {"regex", "logit_bias"}
    assert faults["logit_bias"]["constraint"] == "token ids of the vocabulary"
    done = guide.post(CHAT, messages=QUESTION, model="nope")
    assert done.status_code == 404 and done.json()["error"]["code"] == "model_not_found"


# TOOL: a sound one. UNSOUND: a schema that cannot be enforced
REFUSED = """
chat {"response_format": {"type": "json_schema"}} | response_format
chat {"response_format": {"type": "xml"}} | response_format.type
chat {"response_format": {"type": "json_schema", "json_schema": NEVER}} | response_format
chat {"tools": [TOOL], "response_format": FORM} | response_format.json_schema.schema
chat {"regex": "(?<=x)y"} | regex
chat {"regex": "LONG"} | regex
chat {"grammar": "start: nope"} | grammar
chat {"schema": {"type": "nope"}} | schema
chat {"schema": {"enum": ["LONG"]}} | schema
chat {"regex": "a", "response_format": {"type": "json_object"}} | response_format
chat {"regex": "a", "grammar": "start: 'a'"} | grammar
chat {"tool_choice": "required"} | tool_choice
chat {"tools": [TOOL, TOOL]} | tools
chat {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}} | tool_choice
chat {"tools": [{"type": "web_search"}]} | tools[0].type
chat {"tools": [{"type": "function"}]} | tools[0].function
chat {"tools": [{"type": "function", "function": {"name": "a b"}}]} | tools[0].function.name
chat {"tools": [{"type": "function", "function": {"name": "LONG"}}]} | tools[0].function.name
chat {"tools": [TOOL], "regex": "a"} | regex
chat {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]} | messages[0]
chat {"logprobs": false, "top_logprobs": 3} | top_logprobs
chat {"logprobs": true, "top_logprobs": 21} | top_logprobs
chat {"logprobs": true, "top_logprobs": -1} | top_logprobs
chat {"logprobs": 3} | logprobs
chat {"audio": {"voice": "x"}} | audio
chat {"modalities": ["text", "audio"]} | modalities
chat {"store": true} | store
chat {"service_tier": "flex"} | service_tier
chat {"functions": 5} | functions
responses {"background": true} | background
responses {"truncation": "middle"} | truncation
responses {"top_logprobs": 3} | top_logprobs
responses {"include": ["message.output_text.logprobs"], "top_logprobs": 21} | top_logprobs
responses {"include": ["reasoning.encrypted_content"]} | include[0]
responses {"include": "message.output_text.logprobs"} | include
completions {"suffix": "x"} | suffix
completions {"best_of": 2} | best_of
native {"mirostat": 2} | mirostat
native {"typical_p": 0.5} | typical_p
native {"xtc_probability": 1.5} | xtc_probability
native {"dry_multiplier": -0.8} | dry_multiplier
native {"dynatemp_range": 1.0} | dynatemp_range
native {"id_slot": -2} | id_slot
native {"n_keep": -2} | n_keep
native {"lora": [{"id": 0, "scale": 1.0}]} | lora
native {"samplers": ["top_k"]} | samplers
native {"min_keep": 2} | min_keep
native {"t_max_predict_ms": -1} | t_max_predict_ms
native {"post_sampling_probs": true} | post_sampling_probs
native {"n_indent": 4} | n_indent
native {"n_cmpl": 0} | n_cmpl
native {"top_n_sigma": 1.0} | top_n_sigma
native {"adaptive_target": 0.5} | adaptive_target
native {"reasoning_format": "deepseek"} | reasoning_format
native {"n_cache_reuse": 256} | n_cache_reuse
native {"sse_ping_interval": -2} | sse_ping_interval
native {"prompt": {"prompt_string": "x", "multimodal_data": ["AA=="]}} | prompt
"""
UNSOUND = {"type": "string", "pattern": "^(?!a)"}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNSOUND}}
TEXT_FORM = {"type": "json_schema", "schema": UNSOUND}
PARTS = {
    "TOOL": json.dumps({"type": "function", "function": {"name": "weather"}}),
    "CALL": json.dumps({"id": "a", "function": {"name": "b", "arguments": "{}"}}),
    "FORM": json.dumps(FORM),
    "NEVER": '{"schema": false}',
    "LONG": "x" * 70_000,
}
BODIES = {
    "chat": (CHAT, {"messages": QUESTION}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "native": ("/completion", {"prompt": "hi"}),
}


def with_text(text: str) -> dict[str, dict]:
    """A body with a text, for each route that answers one."""
    messages = [{"role": "user", "content": text}]
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    item = {"role": "user", "content": [{"type": "input_text", "text": text}]}
    return {
        CHAT: {"messages": messages},
        f"{CHAT} parts": {"messages": parts},
        "/v1/messages": {"messages": messages},
        "/v1/messages parts": {"messages": parts},
        "/v1/messages system": {"messages": [{"role": "user", "content": "hi"}], "system": text},
        "/v1/responses": {"input": text},
        "/v1/responses item": {"input": [item]},
        "/v1/responses instructions": {"input": "hi", "instructions": text},
        "/v1/completions": {"prompt": text},
        "/completion": {"prompt": text},
        "/api/chat": {"messages": messages, "stream": False},
        "/api/generate": {"prompt": text, "stream": False},
        "/v1/jobs": {"prompt": text},
    }


@pytest.mark.parametrize("way", with_text(""))
def test_the_context_alone_limits_a_text(way, guide, endless):
    path, body = way.split()[0], with_text("ab " * 4000)[way]
    limit = {"options": {"num_predict": 1}} if "/api" in path else {"max_tokens": 1}
    limit = {"max_output_tokens": 1} if "responses" in path else limit
    done = endless.post(path, **body, **limit)
    assert done.status_code < 300, done.text[:300]
    refused = guide.post(path, **body, **limit)
    assert refused.status_code == 400 and "context" in refused.text, refused.text[:300]


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_a_field_that_makes_no_sense_is_refused_by_name_before_anything_is_computed(line, guide):
    body, _, field = line.partition(" | ")
    name, _, body = body.partition(" ")
    for part, text in PARTS.items():
        body = body.replace(part, text)
    (path, sound), before = BODIES[name], guide.metric("prompt_tokens_total")
    fields = guide.refuse(path, **sound | json.loads(body))
    assert any(each.startswith(field) for each in fields), fields
    assert guide.metric("prompt_tokens_total") == before


@pytest.mark.parametrize(
    "path, field, body",
    [
        (CHAT, "response_format.json_schema.schema", {"response_format": FORM}),
        ("/v1/responses", "text.format.schema", {"text": {"format": {**TEXT_FORM, "name": "x"}}}),
        ("/v1/messages", "output_config.format.schema", {"output_config": {"format": TEXT_FORM}}),
        ("/completion", "json_schema", {"prompt": "hi", "json_schema": UNSOUND}),
        (CHAT, "schema", {"schema": UNSOUND}),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_reported_at_its_place(path, field, body, guide):
    asked = {"/v1/responses": {"input": "hi"}, "/completion": {}}.get(path, {"messages": QUESTION})
    asked |= {"max_tokens": 3} if path == "/v1/messages" else {}
    for more in ({}, {"temperature": -1}):
        faults = faults_of(guide, path, **asked, **body, **more)
        assert set(faults) == {field, *more} and '"pattern": "^(?!a)"' in faults[field]["value"]
        assert faults[field]["constraint"] == "a schema that can be enforced"


def test_a_schema_that_grows_too_complex_is_the_requests_fault(guide):
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    asked = {"messages": QUESTION, "max_tokens": 400}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    done = guide.post(CHAT, **asked, response_format=form)
    [fault] = done.json()["errors"]
    assert done.status_code == 400 and fault["field"] == "response_format.json_schema.schema"
    assert "too complex" in fault["message"]
    text = guide.post(CHAT, **asked, response_format=form, stream=True).text
    *_, error = (line for line in text.splitlines() if '"error"' in line)
    assert '"param":"response_format.json_schema.schema"' in error.replace(" ", "")


def test_a_required_field_that_is_null(guide):
    part, function = {"type": "text", "text": None}, {"name": None}
    messages = [{"role": "user", "content": [part]}]
    faults = faults_of(
        guide, messages=messages, tools=[{"type": "image_generation", "function": function}]
    )
    assert {"messages[0].content[0].text", "tools[0].function.name", "tools[0].type"} <= set(faults)
    assert faults["tools[0].type"]["constraint"] == "'function'"


def test_a_part_that_is_no_text_is_the_only_fault_of_its_list(guide):
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    messages = [{"role": "user", "content": content}, {"role": "user", "content": 3}]
    faults = faults_of(guide, messages=messages)
    assert {"messages[0].content[0].type", "messages[1].content"} <= set(faults)
    assert "messages[0].content" not in faults


@pytest.mark.parametrize(
    "path, part",
    [
        ("/v1/chat/completions", {"type": "image_url", "image_url": {"url": "data:,"}}),
        ("/v1/chat/completions", {"type": "input_audio", "input_audio": {}}),
        ("/v1/messages", {"type": "image", "source": {"type": "base64", "data": ""}}),
        ("/v1/responses", {"type": "input_image", "image_url": "data:,"}),
    ],
)
def test_parts_that_are_no_text_say_what_to_do(path, part, guide):
    turns = [{"role": "user", "content": [part]}]
    asked = {"input": turns} if path == "/v1/responses" else {"messages": turns, "max_tokens": 3}
    [fault] = faults_of(guide, path, **asked).values()
    wanted = f"is {part['type']}, but this package reads text only: leave the "
    assert wanted in fault["message"] and fault["constraint"] == "text"


@pytest.mark.parametrize(
    "item, message",
    [
        ({"role": "user"}, "message needs content"),
        ({"content": "hi"}, "message needs role"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "function_call needs arguments"),
        ({"type": "function_call_output", "output": "x"}, "function_call_output needs call_id"),
        ({"role": "user", "content": "hi", "output": "x"}, "message cannot have output"),
    ],
)
def test_an_input_item_has_the_fields_of_its_type(item, message, guide):
    done = guide.post("/v1/responses", input=[item])
    assert done.status_code == 400 and message in done.json()["error"]["message"]


def test_a_type_that_is_no_text_and_an_include_that_is_no_list_are_refused(guide):
    item = {"type": 5, "role": "user", "content": "hi"}
    faults = faults_of(guide, "/v1/responses", input=[item], include=5)
    assert set(faults) == {"input[0].type", "include"}


def test_values_and_constraints_are_written_as_json(guide):
    tools = [{"type": "function", "function": {"name": "a b"}}]
    faults = faults_of(guide, messages=QUESTION, tools=tools, max_tokens={"a": 1})
    assert faults["max_tokens"]["value"] == '{"a": 1}'
    assert faults["tools[0].function.name"]["constraint"].startswith("matches ^")


@pytest.mark.slow
def test_faults_are_bounded_in_number_and_found_soon(guide):
    keys = {f"presence_penalty_repetition_{i}": 1 for i in range(20_000)}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}] * 8000}]
    for path, body in (
        (CHAT, {"messages": parts}),
        ("/v1/completions", {"prompt": [None] * 100_000}),
        (CHAT, {**keys, "messages": []}),
    ):
        done = guide.post(path, **body)
        assert done.status_code == 400 and len(done.json()["errors"]) <= 33
        assert len(done.content) < 50_000
    assert done.json()["errors"][0]["field"] == "messages"
    assert done.json()["errors"][-1]["message"] == "and errors in 19969 more fields"
    for body in (
        {"messages": [1] * 40_000},
        {f"k{i}": 1 for i in range(40_000)},
        {"messages": [{"x": [[1] * 20_000] * 2}]},
    ):
        done = guide.post(CHAT, **body)
        assert done.status_code == 400 and "more than 32768 values" in done.text
        assert len(done.content) < 2000


def test_more_answers_than_the_server_ever_takes_are_refused_for_good(inside, toy):
    from mlx_llama import load

    server = inside(lambda: load(toy, backend="cpu", max_rows=2), queue=1).ready()
    assert server.ask("/v1/completions", prompt="hello", n=3, max_tokens=2)
    for field, path, body in (
        ("n", "/v1/completions", {"prompt": "hello", "n": 4}),
        ("prompt", "/completion", {"prompt": ["a", "b", "c", "d"]}),
    ):
        done = server.post(path, **body, max_tokens=2)
        assert done.status_code == 400 and done.json()["errors"][0]["field"] == field
        assert "--max-rows" in done.text


def test_anthropics_errors_have_the_code(guide):
    question = [{"role": "user", "content": "word " * 3000}]
    error = guide.post("/v1/messages", max_tokens=3, messages=question).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["n_prompt_tokens"] > error["n_ctx"]


DIGITS = "1234567890" * 20_000
TALK = {"messages": [{"role": "user", "content": DIGITS}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", TALK),
        ("/v1/completions", {"prompt": DIGITS}),
        ("/v1/messages", TALK | {"model": "default", "max_tokens": 9}),
        ("/v1/messages/count_tokens", TALK | {"model": "default"}),
        ("/v1/responses/input_tokens", {"input": DIGITS}),
        ("/tokenize", {"content": DIGITS}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(path, body, guide):
    """Each digit is a token; "at least" tells that none was made."""
    done = guide.post(path, **body)
    message = done.json()["error"]["message"]
    assert done.status_code == 400 and "the prompt has at least 20000" in message, done.text
