"""Conversations that other servers and models began: what they hold is served, or passed over and
noted, so that a session goes on. The clients of OpenAI, Anthropic and Ollama send them.
"""

from __future__ import annotations

import json
import typing

import ollama
import pytest
from anthropic.types import ContentBlockParam
from anthropic.types.beta import BetaContentBlockParam
from cases.texts import THOUGHT_TEMPLATES
from openai.types.responses import ResponseInputItemParam

from .conftest import QUESTION, Scripted

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NOTED = "x-mlx-llama-noted"
LEFT_OUT = "left out, this model reads text only]"
PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A model whose template shows thoughts, calls and results."""
    folder = tmp_path_factory.mktemp("histories") / "m"
    with Scripted(THOUGHT_TEMPLATES["qwen3"], folder) as server:
        yield server


def see(server: Scripted, path: str, **body) -> tuple[str, set[str]]:
    """The prompt of a request that is served, and what is noted."""
    with server.script("Yes.") as script:
        done = server.post(path, max_tokens=20, stream=False, **body)
    assert done.status_code == 200, done.text
    return script.prompts[0], set(filter(None, done.headers.get(NOTED, "").split(", ")))


def called(result, **more) -> list[dict]:
    """A question, the call of a function with a thought, and a result of any content."""
    function = {"name": "look", "arguments": '{"at": "it"}'}
    call = {"id": "c1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call], **more}
    return [*QUESTION, answer, {"role": "tool", "tool_call_id": "c1", "content": result}]


# Lone surrogates


@pytest.mark.parametrize(
    "path, fields",
    [
        (CHAT, lambda text: {"messages": called(text)}),
        (CHAT, lambda text: {"messages": [{"role": "user", "content": [text]}]}),
        (CHAT, lambda text: {"messages": QUESTION, "stop": [text], "tools": [tool(text)]}),
        (RESPONSES, lambda text: {"input": text, "instructions": text}),
        (MESSAGES, lambda text: {"messages": [{"role": "user", "content": text}], "system": text}),
        ("/api/chat", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/api/generate", lambda text: {"prompt": text, "system": text}),
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/completion", lambda text: {"prompt": text}),
    ],
)
def test_lone_surrogates_become_u_fffd(path, fields, qwen):
    """The same prompt as that of the text as a browser encodes it."""
    for lone, shown in (
        ("half \ud83e", "half \ufffd"),
        ("\udd99", "\ufffd"),
        ("\ud83e\udd99", "🦙"),
    ):
        expected, _ = see(qwen, path, **fields(shown))
        body = {"max_tokens": 20, "stream": False, **fields(lone)}
        escaped = json.dumps(body).encode()
        bare = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        for raw in (escaped, bare):
            with qwen.script("Yes.") as script:
                done = qwen.http.post(path, content=raw)
            assert done.status_code == 200 and script.prompts == [expected], done.text
            is_whole = shown == "🦙" and raw == escaped  # two escapes in a row are a character
            assert (done.headers.get(NOTED) == "lone surrogates") is not is_whole


def tool(text: str) -> dict:
    return {"type": "function", "function": {"name": "f", "description": text}}


def test_lone_surrogates_within_the_text_of_arguments_and_names(qwen):
    """Escaped twice, they appear when the arguments are read for the template."""
    prompts = []
    for text in ("\ud83e", "\ufffd"):
        messages = called("3")
        messages[1]["tool_calls"][0]["function"]["arguments"] = json.dumps({"at": text})
        prompts.append(see(qwen, CHAT, messages=messages)[0])
    assert prompts[0] == prompts[1]
    assert qwen.http.post(CHAT, content=rb'{"messages": "\ud83e}').status_code == 400


def test_a_strict_server_refuses_lone_surrogates(guide):
    body = json.dumps({"messages": [{"role": "user", "content": "\ud83e"}]})
    done = guide.http.post(CHAT, content=body)
    assert done.status_code == 400 and "surrogate" in done.text


# Thoughts

THOUGHT = "I look at it."


@pytest.mark.parametrize(
    "parts, noted",
    [
        ([{"type": "thinking", "thinking": THOUGHT, "signature": "x"}], {"signature"}),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]}], set()),
        ([{"type": "reasoning", "text": THOUGHT}], set()),
        ([{"type": "reasoning_text", "text": THOUGHT}], set()),
        (
            [{"type": "thinking", "thinking": THOUGHT}, {"type": "redacted_thinking", "data": "x"}],
            {"redacted_thinking"},
        ),
    ],
)
def test_thoughts_among_the_parts_of_an_answer_are_its_reasoning(parts, noted, qwen):
    expected, _ = see(qwen, CHAT, messages=called("3", reasoning_content=THOUGHT))
    assert f"<think>\n{THOUGHT}\n</think>" in expected
    prompt, places = see(qwen, CHAT, messages=called("3", content=parts))
    assert prompt == expected
    assert places == {f"messages[].content[].{name}" for name in noted}


def test_thoughts_in_other_clients_fields_are_reasoning_too(qwen):
    expected, _ = see(qwen, CHAT, messages=called("3", reasoning_content=THOUGHT))
    for name in ("reasoning", "thinking"):
        assert see(qwen, CHAT, messages=called("3", **{name: THOUGHT})) == (expected, set())
    both = {"reasoning": "no", "reasoning_content": THOUGHT}
    assert see(qwen, CHAT, messages=called("3", **both)) == (expected, {"messages[].reasoning"})
    with qwen.script("Yes.") as script:
        client = ollama.Client(host=qwen.url)
        message = ollama.Message(role="assistant", content="", thinking=THOUGHT)
        message.tool_calls = [{"function": {"name": "look", "arguments": {"at": "it"}}}]
        client.chat("m", [*QUESTION, message, {"role": "tool", "content": "3"}])
    assert script.prompts == [expected]


def test_thoughts_of_claude_and_of_responses_are_reasoning(qwen):
    expected, _ = see(qwen, CHAT, messages=called("3", reasoning_content=THOUGHT))
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "it"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
    thought = {"type": "thinking", "thinking": THOUGHT, "signature": "x"}
    turns = [
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result]},
    ]
    prompt, noted = see(qwen, MESSAGES, messages=[*QUESTION, *turns])
    assert (prompt, noted) == (expected, {"messages[].content[].signature"})
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "it"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    for parts in ({"content": [{"type": "reasoning_text", "text": THOUGHT}]}, {}):
        summary = [{"type": "summary_text", "text": THOUGHT}]
        item = {"type": "reasoning", "id": "r", "summary": summary, **parts}
        assert see(qwen, RESPONSES, input=[*QUESTION, item, call, output]) == (expected, set())


def test_a_thought_of_a_kept_response_is_reasoning(qwen):
    expected, _ = see(qwen, CHAT, messages=called("3", reasoning_content=THOUGHT))
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    with qwen.script(f"<think>\n{THOUGHT}\n</think>\n\n{call}", "Yes.") as script:
        done = qwen.ask(RESPONSES, input=QUESTION, tools=[look])
        identity = next(item for item in done["output"] if item["type"] == "function_call")
        output = {"type": "function_call_output", "call_id": identity["call_id"], "output": "3"}
        qwen.ask(RESPONSES, input=[output], previous_response_id=done["id"])
    assert (
        script.prompts[1].partition("<|im_start|>assistant")[2]
        == (expected.partition("<|im_start|>assistant")[2])
    )


# Items of Responses

ITEMS: dict[str, dict] = {  # by type: an item; "" for those of a session that all servers know
    "message": {"role": "assistant", "content": "Well."},
    "function_call": {"call_id": "c", "name": "f", "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": "3"},
    "custom_tool_call": {"call_id": "c", "name": "apply_patch", "input": "*** Begin Patch"},
    "custom_tool_call_output": {"call_id": "c", "output": "Done."},
    "local_shell_call": {"id": "i", "call_id": "c", "action": {"command": ["ls", "-l"]}},
    "local_shell_call_output": {"id": "c", "output": "a.txt"},
    "shell_call": {"call_id": "c", "action": {"commands": ["ls"]}},
    "shell_call_output": {
        "call_id": "c",
        "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    "apply_patch_call": {
        "call_id": "c",
        "status": "completed",
        "operation": {"type": "delete_file", "path": "a.txt"},
    },
    "apply_patch_call_output": {"call_id": "c", "status": "failed", "output": "no such file"},
    "computer_call": {"call_id": "c", "id": "i", "action": {"type": "screenshot"}},
    "computer_call_output": {
        "call_id": "c",
        "output": {"type": "computer_screenshot", "image_url": PNG},
    },
    "compaction": {"id": "i", "encrypted_content": "gAAA"},
    "reasoning": {"id": "i", "summary": [], "encrypted_content": "gAAA"},
}
SHOWN = {  # by type: a text of the prompt
    "message": "Well.",
    "function_call": '"name": "f"',
    "function_call_output": "<tool_response>\n3\n",
    "custom_tool_call": '"apply_patch", "arguments": {"input": "*** Begin Patch"}',
    "custom_tool_call_output": "<tool_response>\nDone.\n",
    "local_shell_call": '"local_shell", "arguments": {"action": {"command": ["ls", "-l"]}}',
    "local_shell_call_output": "<tool_response>\na.txt\n",
    "shell_call": '"shell", "arguments": {"action": {"commands": ["ls"]}}',
    "shell_call_output": '{"stdout": "a.txt", "stderr": "", ',
    "apply_patch_call": '"apply_patch", "arguments": {"operation": {"type": "delete_file"',
    "apply_patch_call_output": "no such file",
    "computer_call": '"computer", "arguments": {"action": {"type": "screenshot"}}',
    "computer_call_output": f"[screenshot: {LEFT_OUT}",
}
TYPES = {
    typing.get_args(hint)[0]
    for item in typing.get_args(ResponseInputItemParam)
    for hint in [typing.get_type_hints(item)["type"]]
    if isinstance(typing.get_args(hint)[0], str)
}


@pytest.mark.parametrize("kind", sorted(TYPES | {"item_reference"}))
def test_each_item_that_openais_client_knows_is_served_or_noted(kind, qwen):
    if kind == "item_reference":
        return  # of a response that is kept here, or refused
    # Others have no text for the model.
    item = {"type": kind, **ITEMS.get(kind, {"id": "i", "call_id": "c"})}
    prompt, noted = see(qwen, RESPONSES, input=[*QUESTION, item, *QUESTION])
    if kind in SHOWN:
        assert SHOWN[kind] in prompt
        assert noted <= {"input[].output[].computer_screenshot", "input[].status"}
    else:
        assert (prompt, noted) == (
            see(qwen, RESPONSES, input=[*QUESTION, *QUESTION])[0],
            {f"input[].{kind}"},
        )


def test_a_session_of_codex_goes_on(qwen):
    """The call of a custom tool and its output are a call and its result."""
    kinds = ("compaction", "reasoning", "custom_tool_call", "custom_tool_call_output")
    items = [{"type": kind, **ITEMS[kind]} for kind in kinds]
    with qwen.script("Done.") as script:
        done = qwen.respond(input=[*QUESTION, *items])
        assert done.output_text == "Done."
    function = {"name": "apply_patch", "arguments": json.dumps({"input": "*** Begin Patch"})}
    same = called("Done.")
    same[1]["tool_calls"][0]["function"] = function
    assert script.prompts == [see(qwen, CHAT, messages=same)[0]]
    # in chat completions
    custom = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch"}}
    custom["custom"]["input"] = "*** Begin Patch"
    assert see(qwen, CHAT, messages=called("Done.", tool_calls=[custom])) == (
        script.prompts[0],
        set(),
    )


def test_outputs_that_are_objects_and_thoughts_in_answers(qwen):
    """Older versions of Codex send the former, gateways the latter."""
    output = {"content": "a.txt", "success": True}
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    prompt, noted = see(qwen, RESPONSES, input=[*QUESTION, result, *QUESTION])
    assert json.dumps(output) in prompt and not noted
    parts = [{"type": "reasoning_text", "text": THOUGHT}, {"type": "output_text", "text": "Well."}]
    answer = {"type": "message", "role": "assistant", "content": parts}
    prompt, noted = see(qwen, RESPONSES, input=[*QUESTION, answer, *QUESTION])
    assert "assistant\nWell.<" in prompt and THOUGHT not in prompt
    assert noted == {"input[].content[].reasoning_text"}


def test_an_item_of_no_known_type_is_refused(guide):
    assert guide.refuse(RESPONSES, input=[*QUESTION, {"type": "call"}]) == ["input[1].type"]


# Results that are no text


@pytest.mark.parametrize(
    "part, shown",
    [
        ({"type": "image_url", "image_url": {"url": PNG}}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "audio"),
        ({"type": "file", "file": {"file_data": ""}}, "file"),
        ({"type": "image", "data": "", "mimeType": "image/png"}, "image"),
    ],
)
def test_a_part_of_a_result_that_is_no_text_is_left_out(part, shown, qwen):
    content = [{"type": "text", "text": "Seen: "}, part]
    prompt, noted = see(qwen, CHAT, messages=called(content))
    assert prompt == see(qwen, CHAT, messages=called(f"Seen: [{shown}: {LEFT_OUT}"))[0]
    assert noted == {f"messages[].content[].{part['type']}"}
    done = qwen.post(CHAT, messages=[{"role": "user", "content": content}])
    assert done.status_code == 400 and "reads text only" in done.text


def test_results_of_claude_and_of_responses_are_left_out_too(qwen):
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    paper = {"type": "document", "title": "a.pdf", "source": {**source, "media_type": "x/pdf"}}
    expected = f"[image: {LEFT_OUT}[document a.pdf: {LEFT_OUT}"
    prompt, _ = see(qwen, CHAT, messages=called(expected))
    content = [{"type": "image", "source": source}, paper]
    use = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "it"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    with qwen.script("Yes.") as script:
        raw = qwen.claude.messages.with_raw_response.create(
            model="m", max_tokens=20, messages=[*QUESTION, *turns]
        )
    assert script.prompts == [prompt] and raw.parse().content[0].text == "Yes."
    place = "messages[].content[].content[]"
    assert raw.headers[NOTED] == f"{place}.image, {place}.document"
    items = [
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "it"}'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [
                {"type": "input_image", "image_url": PNG},
                {"type": "input_file", "file_data": "", "filename": "a.pdf"},
            ],
        },
    ]
    prompt, noted = see(qwen, RESPONSES, input=[*QUESTION, *items])
    assert f"[image: {LEFT_OUT}[file a.pdf: {LEFT_OUT}" in prompt
    assert noted == {"input[].output[].input_image", "input[].output[].input_file"}


def test_an_image_in_a_result_for_ollama_is_left_out(qwen):
    expected, _ = see(qwen, CHAT, messages=called(f"Seen.[image: {LEFT_OUT}"))
    messages = called("Seen.")
    del messages[2]["tool_call_id"]
    with qwen.script("Yes.") as script:
        client = ollama.Client(host=qwen.url)
        messages[1]["tool_calls"][0]["function"]["arguments"] = {"at": "it"}
        client.chat("m", [*messages[:2], {**messages[2], "images": [b"1234"]}])
    assert script.prompts == [expected]


BLOCKS = {
    kind
    for union in (ContentBlockParam, BetaContentBlockParam)
    for block in typing.get_args(union)
    if hasattr(block, "__annotations__")
    for kind in typing.get_args(typing.get_type_hints(block).get("type"))
}


@pytest.mark.parametrize("kind", sorted(BLOCKS - {"text", "image", "document", "tool_result"}))
def test_blocks_of_answers_of_other_servers_are_served_or_noted(kind, qwen):
    block = {"id": "c", "name": "f", "input": {}} if kind == "tool_use" else {"content": []}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Well."}]}
    answer["content"].append({"type": kind, **block})
    prompt, noted = see(qwen, MESSAGES, messages=[*QUESTION, answer, *QUESTION])
    assert "Well." in prompt and (kind in str(noted) or kind in ("tool_use", "search_result"))


def test_a_summary_of_claude_is_text(qwen):
    block = {"type": "compaction", "content": "They greeted."}
    turns = [*QUESTION, {"role": "assistant", "content": [block]}, *QUESTION]
    same = [*QUESTION, {"role": "assistant", "content": "They greeted."}, *QUESTION]
    assert see(qwen, MESSAGES, messages=turns) == see(qwen, MESSAGES, messages=same)


# Further fields of parts

TRANSLATES = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if c is string or c | length != 1 or 'source_lang_code' not in c[0] %}"
    "{{ raise_exception('content must be one part with source_lang_code') }}{% endif %}"
    "From {{ c[0].source_lang_code }}: {{ c[0].text }}{% endfor %}"
)


def test_fields_of_parts_reach_a_template_that_reads_them(tmp_path, qwen, guide):
    part = {"type": "text", "text": "Hallo", "source_lang_code": "de", "hint": 1}
    messages = [{"role": "user", "content": [part]}]
    with Scripted(TRANSLATES, tmp_path / "m") as server:
        prompt, noted = see(server, CHAT, messages=messages)
    assert "From de: Hallo" in prompt and noted == {"messages[].content[].hint"}
    prompt, noted = see(qwen, CHAT, messages=messages)
    assert prompt == see(qwen, CHAT, messages=[{"role": "user", "content": "Hallo"}])[0]
    assert noted == {f"messages[].content[].{name}" for name in ("hint", "source_lang_code")}
    done = guide.post(CHAT, messages=messages)
    assert done.status_code == 400 and "messages[].content[].hint" in done.text


# Stop strings


@pytest.mark.parametrize(
    "path, fields, name",
    [
        (CHAT, {"messages": QUESTION}, "stop"),
        (RESPONSES, {"input": QUESTION}, "stop"),
        (MESSAGES, {"messages": QUESTION}, "stop_sequences"),
        ("/v1/completions", {"prompt": "x"}, "stop"),
        ("/completion", {"prompt": "x"}, "stop"),
    ],
)
def test_hundreds_of_stop_strings(path, fields, name, qwen):
    stops = [f"stop{i:03}" for i in range(500)] + ["x" * 5000]
    with qwen.script("Go on. stop123 no"):
        done = qwen.ask(path, max_tokens=50, **fields, **{name: stops})
    assert "Go on." in str(done) and "stop123 no" not in str(done)
