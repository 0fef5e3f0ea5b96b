"""Calls in the formats of Llama 3, Mistral, Qwen and SmolLM over HTTP: read, streamed, answered,
judged by the clients.
"""

from __future__ import annotations

import json

import pytest
from cases.texts import TOOL_TEMPLATES
from scripting import Script, make_scripted_checkpoint, tool_formats

from mlx_llama import load

from .conftest import Inside, Scripted, join

QUESTION = [{"role": "user", "content": "1 + 2, and the time?"}]
EMPTY = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
INTEGER = {"type": "integer"}
SUM = EMPTY | {"properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"]}
FUNCTIONS = [
    {"name": name, "description": text, "parameters": schema}
    for name, text, schema in (("add", "Add two numbers.", SUM), ("time", "Tell the time.", EMPTY))
]
# in the APIs' own forms
TOOLS = [{"type": "function", "function": {**tool, "strict": True}} for tool in FUNCTIONS]
RESPONSES = [{"type": "function", **tool, "strict": True} for tool in FUNCTIONS]
CLAUDES = [
    {"input_schema": tool["parameters"], "name": tool["name"], "description": tool["description"]}
    for tool in FUNCTIONS
]
WANTED = [("add", {"a": 1, "b": 2}), ("time", {})]
RESULTS = ("3", "noon")
CHAT = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
LAST = "It is 3 at noon."


@pytest.fixture(scope="module", params=["llama-3.1", "mistral-nemo", "qwen2.5", "smollm2"])
def model(request, tmp_path_factory):
    """A server of a model with the template of a family. opening: text before calls, where the
    format allows it; answer: that and the calls.
    """
    template, calls = tool_formats()[request.param]
    with Scripted(template, tmp_path_factory.mktemp("formats") / "m") as server:
        server.name, server.calls = request.param, calls
        server.opening = "" if server.name == "llama-3.1" else "Let me see."
        server.answer = server.opening + calls
        yield server


def calls_of(message) -> list[tuple[str, dict]]:
    """Names and arguments of a chat's calls."""
    functions = [call.function for call in message.tool_calls]
    return [(function.name, json.loads(function.arguments)) for function in functions]


def check_order(prompt: str) -> None:
    """The calls stand before their results."""
    assert 0 < prompt.index('"b": 2') < prompt.index("noon")


@pytest.mark.slow_for("smollm2")
def test_chat_completions(model):
    with model.script(model.answer, model.answer) as script:
        choice, chunks = model.chat(**CHAT), model.chat(**CHAT, stream=True)
    assert "Add two numbers." in script.prompts[0]
    assert calls_of(choice.message) == WANTED
    assert choice.finish_reason == "tool_calls" and (choice.message.content or "") == model.opening
    calls = choice.message.tool_calls
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    for index, (name, arguments) in enumerate(WANTED):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert (first.function.name, first.type) == (name, "function") and first.id
        assert first.id != calls[index].id
        assert json.loads("".join(delta.function.arguments for delta in others)) == arguments
        assert not any(delta.id or delta.function.name for delta in others)
    assert len(deltas) > 8  # arguments arrive as they are written
    assert join(chunks) == model.opening and chunks[-1].finish_reason == "tool_calls"
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": result}
        for call, result in zip(calls, RESULTS)
    ]
    with model.script(LAST) as script:
        messages = [*QUESTION, choice.message.model_dump(), *results]
        last = model.chat(**CHAT | {"messages": messages})
    assert last.message.content == LAST and last.finish_reason == "stop"
    assert not last.message.tool_calls
    check_order(script.prompts[0])


def test_responses(model):
    asked = {"input": QUESTION, "tools": RESPONSES, "max_output_tokens": 200}
    with model.script(model.answer):
        response = model.respond(**asked)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == WANTED
    assert [call.status for call in calls] == ["completed"] * 2
    assert response.output_text == model.opening and len(response.output) == 2 + bool(model.opening)
    body = {"model": "m", **asked}
    with model.script(model.answer), model.openai.responses.stream(**body) as stream:
        streamed, judged = list(stream), stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in streamed]
    assert kinds.count("output_item.added") == kinds.count("output_item.done")
    assert kinds.count("output_item.added") == len(response.output)
    assert kinds.count("function_call_arguments.delta") > 6
    assert kinds.count("function_call_arguments.done") == 2
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    assert judged.output_text == model.opening
    made = [item for item in judged.output if item.type == "function_call"]
    assert [(item.name, json.loads(item.arguments)) for item in made] == WANTED
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": result}
        for call, result in zip(calls, RESULTS)
    ]
    items = [item.model_dump(exclude_none=True) for item in response.output]
    with model.script(LAST) as script:
        last = model.respond(**asked | {"input": [*QUESTION, *items, *results]})
    assert last.output_text == LAST
    check_order(script.prompts[0])


def test_logprobs_of_responses_are_those_of_the_text(model):
    """Not those of the calls after it; those of tokens without a text of their own included."""
    included = {"include": ["message.output_text.logprobs"]}
    asked = {"input": QUESTION, "tools": RESPONSES, **included}

    def respond(answer: str, most: int = 200) -> list:
        with model.script(answer):
            return model.respond(**asked, max_output_tokens=most).output

    def data_of(part) -> bytes:
        return b"".join(bytes(entry.bytes) for entry in part.logprobs).strip()

    if model.opening:
        [part] = respond(model.answer)[0].content
        assert "".join(entry.token for entry in part.logprobs).strip() == model.opening
    if model.name == "qwen2.5":
        output = respond(model.answer + "\n\U0001f999 Done.")
        kinds = [item.type for item in output]
        assert kinds == ["message", "function_call", "function_call", "message"]
        [part] = output[-1].content
        assert data_of(part).decode() == part.text.strip() == "\U0001f999 Done."
        assert len({item.id for item in output}) == 4
    for most, text in ((3, ""), (60, "\U0001f999")):
        [part] = respond("\U0001f999", most)[0].content
        data = data_of(part)
        assert part.text.rstrip("\ufffd") == text and "\U0001f999".encode().startswith(data)
        assert len(part.logprobs) == 3 if most == 3 else len(data) == 4


def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(model):
    """The model need not call: a stop string holds in its text and in its calls."""
    cut = '"b"'  # in the arguments of the first call
    # the latter in the second call
    for stop, calls in ((cut, model.calls), ("5", model.calls.replace("{}", '{"a": 5}'))):
        with model.script(model.opening + calls):
            assert model.chat(**CHAT, stop=[stop]).finish_reason == "stop"
    with model.script(*[model.answer] * 3):
        assert model.chat(**CHAT, stop=[cut], stream=True)[-1].finish_reason == "stop"
        answer = model.message(messages=QUESTION, tools=CLAUDES, stop_sequences=[cut])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", cut)
        answer = model.respond(input=QUESTION, tools=RESPONSES, extra_body={"stop": [cut]})
    assert answer.status == "incomplete" and answer.output[-1].status == "incomplete"


def test_messages(model):
    asked = {"model": "m", "messages": QUESTION, "tools": CLAUDES}
    with model.script(model.answer):
        message = model.message(**asked)
    usage, counted = message.usage, model.claude.messages.count_tokens(**asked)
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    blocks = [block for block in message.content if block.type == "tool_use"]
    assert [(block.name, block.input) for block in blocks] == WANTED
    assert message.stop_reason == "tool_use"
    assert "".join(block.text for block in message.content if block.type == "text") == model.opening
    body = {**asked, "max_tokens": 200}
    with model.script(model.answer), model.claude.messages.stream(**body) as stream:
        streamed, judged = list(stream), stream.get_final_message()
    assert [block.type for block in judged.content] == [block.type for block in message.content]
    made = [block for block in judged.content if block.type == "tool_use"]
    assert [(block.name, block.input) for block in made] == WANTED
    deltas = [event.delta.type for event in streamed if event.type == "content_block_delta"]
    assert deltas.count("input_json_delta") > 6 and judged.stop_reason == "tool_use"
    again = [block.model_dump(exclude_none=True) for block in message.content]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": result}
        for block, result in zip(blocks, RESULTS)
    ]
    turns = [{"role": "assistant", "content": again}, {"role": "user", "content": results}]
    with model.script(LAST) as script:
        last = model.message(**asked | {"messages": [*QUESTION, *turns]})
    assert last.content[0].text == LAST and last.stop_reason == "end_turn"
    check_order(script.prompts[0])


def test_text_that_begins_like_a_call_is_text(model):
    answer = {
        "llama-3.1": '{"answer": 3}',
        "mistral-nemo": "[TOOL] 3",
        "qwen2.5": "<tool_use> 3",
        "smollm2": "<tool_call 3",
    }[model.name]
    asked = {**CHAT, "logprobs": True}
    with model.script(answer, answer):
        choice, chunks = model.chat(**asked), model.chat(**asked, stream=True)
    assert choice.message.content == answer == join(chunks)
    assert choice.finish_reason == chunks[-1].finish_reason == "stop"
    assert not choice.message.tool_calls
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in choice.logprobs.content]


@pytest.mark.parametrize(
    "name, answer",
    [
        (
            "qwen3-coder",
            "Let me see.\n<tool_call>\n<function=add>\n<parameter=a>\n1.0\n</parameter>\n"
            "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>\n"
            "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        ),
        ("functionary-3.2", 'all\nLet me see.>>>add\n{"a": 1, "b": 2}>>>time\n{}'),
    ],
)
def test_formats_that_need_the_tools_or_the_prompt(name, answer, tmp_path):
    """Types of arguments are the tool's; the prompt ends with a mark."""
    with Scripted(TOOL_TEMPLATES[name], tmp_path / "m") as server, server.script(answer):
        body = {"model": "m", **CHAT, "max_tokens": 300}
        with server.openai.chat.completions.stream(**body) as stream:
            [choice] = stream.get_final_completion().choices
    assert calls_of(choice.message) == WANTED
    assert choice.message.content.strip() == "Let me see." and choice.finish_reason == "tool_calls"
    assert '"a": 1, "b": 2' in choice.message.tool_calls[0].function.arguments


def test_a_template_is_chosen_by_the_request(tmp_path):
    """Of a checkpoint with several templates. The format of calls is that of the one for tools."""
    template, calls = tool_formats()["qwen2.5"]
    plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    folder = make_scripted_checkpoint(tmp_path / "m", plain)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(template, encoding="utf-8")
    documents = "{% for d in documents %}<{{ d.title }}: {{ d.text }}>{% endfor %}"
    rag = documents + "{{ messages[-1].content }}"
    (folder / "additional_chat_templates/rag.jinja").write_text(rag)
    llm = load(folder, backend="cpu")
    path, asked, text = "/v1/chat/completions", {"messages": QUESTION}, QUESTION[0]["content"]
    brought = {"documents": [{"title": "A", "text": "b"}]}
    with Inside(lambda: llm, alias="m").ready() as server:
        with Script(llm, calls, "Hello", calls) as script:
            assert calls_of(server.chat(**CHAT).message) == WANTED
            server.ask(path, **asked)
            blocks = server.message(messages=QUESTION, tools=CLAUDES).content
        assert [(block.name, block.input) for block in blocks] == WANTED
        assert ["<tools>" in prompt for prompt in script.prompts] == [True, False, True]
        assert script.prompts[1].endswith(f"[{text}]")
        for more, wanted in (({}, f"[{text}]"), (brought, f"<A: b>{text}")):
            assert server.ask("/apply-template", **asked, **more)["prompt"] == wanted
        assert "<tools>" in server.ask("/apply-template", **asked, tools=TOOLS)["prompt"]
        with Script(llm, *["Hello"] * 3) as script:
            for more in (brought, {"chat_template_kwargs": brought}):
                done = server.post(path, **asked, **more)
                assert "x-mlx-llama-noted" not in done.headers
            done = server.post(path, **asked, **brought, tools=TOOLS)
            assert done.headers["x-mlx-llama-noted"] == "documents"  # no place in this template
        ends = [prompt.endswith(f"<A: b>{text}") for prompt in script.prompts]
        assert ends == [True, True, False]


LOOSE = [  # forms of older clients, and of answers that are sent back
    {"role": "system", "content": [{"type": "input_text", "text": "Be brief."}, " Be kind."]},
    {"role": "developer", "content": "Use tools."},
    *QUESTION,
    {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": {"a": 1}}},
    {"role": "function", "name": "add", "content": "3"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "time", "arguments": "{}"}}]},
    {"role": "tool", "content": [{"type": "text", "text": "noon"}]},
    {"role": "assistant", "content": "It is"},
]


@pytest.mark.parametrize("messages", [LOOSE, LOOSE[:-1], LOOSE[2:3]])
def test_routes_of_a_conversation_take_the_same_forms(model, messages):
    """Chat's, jobs' and the rendered template."""
    tools = {"functions": [tool["function"] for tool in TOOLS], "function_call": "auto"}
    asked = {"messages": messages, **tools, "max_tokens": 200}
    if model.name == "mistral-nemo":  # takes ids of nine letters only
        asked["messages"] = [m for m in messages if m["role"] in ("developer", "user")]
    with model.script(model.answer) as script:
        model.post("/v1/chat/completions", **asked).raise_for_status()
    with model.script(model.answer) as again:
        job = model.post("/v1/jobs", **asked).raise_for_status().json()
        lines = model.http.get(job["jsonl_url"]).text.splitlines()
    assert again.prompts == script.prompts
    shown = model.post("/apply-template", **asked).json()["prompt"]
    # an encoded text of its own may begin with a space
    computed = script.prompts[0].removeprefix("<s>").replace(" It is", "It is")
    assert shown.removeprefix("<s>") == computed
    events = [json.loads(line) for line in lines]
    deltas = [event["tool_calls"][0] for event in events if event["event"] == "call"]
    assert [delta["function"]["name"] for delta in deltas if "id" in delta] == ["add", "time"]
    arguments = "".join(delta["function"]["arguments"] for delta in deltas if not delta["index"])
    assert json.loads(arguments) == WANTED[0][1]
    texts = "".join(event["t"] for event in events if event["event"] == "token")
    assert texts.strip() == model.opening
