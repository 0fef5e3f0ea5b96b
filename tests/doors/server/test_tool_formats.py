"""Calls in the formats of Llama 3, Mistral, Qwen and SmolLM over HTTP: read, streamed, answered,
judged by the clients.
"""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import openai
import pytest
from scripting import Script, make_scripted_checkpoint, tool_formats

from mlx_llama import load

from .conftest import Inside

jsonschema = pytest.importorskip("jsonschema")

QUESTION = [{"role": "user", "content": "1 + 2, and the time?"}]
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": schema, "strict": True},
    }
    for name, text, schema in (("add", "Add two numbers.", SUM), ("time", "Tell the time.", EMPTY))
]
WANTED = [("add", {"a": 1, "b": 2}), ("time", {})]
RESULTS = ("3", "noon")


class Scripted:
    """A server of a model with the template of a family. opening: text before calls, where the
    format allows it.
    """

    def __init__(self, name: str, folder):
        template, self.calls = tool_formats()[name]
        self.name, self.opening = name, "" if name == "llama-3.1" else "Let me see."
        self.llm = load(make_scripted_checkpoint(folder, template), backend="cpu")
        self.server = Inside(lambda: self.llm, alias="m").ready()
        url = f"http://127.0.0.1:{self.server.port}"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def script(self, *answers: str) -> Script:
        return Script(self.llm, *(answers or [self.opening + self.calls]))


@pytest.fixture(scope="module", params=["llama-3.1", "mistral-nemo", "qwen2.5", "smollm2"])
def model(request, tmp_path_factory):
    server = Scripted(request.param, tmp_path_factory.mktemp("formats") / "m")
    yield server
    server.server.close()


def test_chat_completions(model):
    asked = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200}
    with model.script() as script:
        [choice] = model.openai.chat.completions.create(**asked).choices
    assert "Add two numbers." in script.prompts[0]
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == WANTED
    assert choice.finish_reason == "tool_calls" and (choice.message.content or "") == model.opening
    with model.script():
        chunks = [
            chunk.choices[0] for chunk in model.openai.chat.completions.create(**asked, stream=True)
        ]
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    for index, (name, arguments) in enumerate(WANTED):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert (first.function.name, first.type) == (name, "function") and first.id
        assert first.id != calls[index].id
        assert json.loads("".join(delta.function.arguments for delta in others)) == arguments
        assert not any(delta.id or delta.function.name for delta in others)
    assert len(deltas) > 8  # arguments arrive as they are written
    assert "".join(chunk.delta.content or "" for chunk in chunks) == model.opening
    assert chunks[-1].finish_reason == "tool_calls"
    with model.script(), model.openai.chat.completions.stream(**asked) as stream:
        [judged] = stream.get_final_completion().choices
    assert [
        (call.function.name, call.function.parsed_arguments) for call in judged.message.tool_calls
    ] == WANTED
    again = [
        *QUESTION,
        choice.message.model_dump(),
        *(
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(calls, RESULTS)
        ),
    ]
    with model.script("It is 3 at noon.") as script:
        last = model.openai.chat.completions.create(**asked | {"messages": again}).choices[0]
    assert last.message.content == "It is 3 at noon." and last.finish_reason == "stop"
    assert not last.message.tool_calls
    assert '"b": 2' in script.prompts[0]
    assert script.prompts[0].index('"b": 2') < script.prompts[0].index("noon")


def test_responses(model):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "m", "input": QUESTION, "tools": tools, "max_output_tokens": 200}
    with model.script():
        response = model.openai.responses.create(**asked)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments), call.status) for call in calls] == [
        (*call, "completed") for call in WANTED
    ]
    assert response.output_text == model.opening and len(response.output) == 2 + bool(model.opening)
    with model.script(), model.openai.responses.stream(**asked) as stream:
        streamed, judged = list(stream), stream.get_final_response()
    kinds = [event.type for event in streamed]
    assert (
        kinds.count("response.output_item.added")
        == kinds.count("response.output_item.done")
        == len(response.output)
    )
    assert kinds.count("response.function_call_arguments.delta") > 6
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
    assert judged.output_text == model.opening
    assert [
        (item.name, json.loads(item.arguments))
        for item in judged.output
        if item.type == "function_call"
    ] == WANTED
    again = [
        *QUESTION,
        *(item.model_dump(exclude_none=True) for item in response.output),
        *(
            {"type": "function_call_output", "call_id": call.call_id, "output": result}
            for call, result in zip(calls, RESULTS)
        ),
    ]
    with model.script("It is 3 at noon.") as script:
        assert (
            model.openai.responses.create(**asked | {"input": again}).output_text
            == "It is 3 at noon."
        )
    assert '"b": 2' in script.prompts[0]
    assert script.prompts[0].index('"b": 2') < script.prompts[0].index("noon")


def test_logprobs_of_responses_are_those_of_the_text(model):
    """Not those of the calls after it; those of tokens without a text of their own included."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {
        "model": "m",
        "input": QUESTION,
        "tools": tools,
        "include": ["message.output_text.logprobs"],
    }
    if model.opening:
        with model.script():
            [part] = model.openai.responses.create(**asked, max_output_tokens=200).output[0].content
        assert "".join(entry.token for entry in part.logprobs).strip() == model.opening
    if model.name == "qwen2.5":
        with model.script(model.opening + model.calls + "\n\U0001f999 Done."):
            output = model.openai.responses.create(**asked, max_output_tokens=200).output
        assert [item.type for item in output] == [
            "message",
            "function_call",
            "function_call",
            "message",
        ]
        [part] = output[-1].content
        assert (
            bytes(sum((entry.bytes for entry in part.logprobs), [])).decode().strip()
            == part.text.strip()
            == "\U0001f999 Done."
        )
        assert len({item.id for item in output}) == 4
    for most, text in ((3, ""), (60, "\U0001f999")):
        with model.script("\U0001f999"):
            [part] = (
                model.openai.responses.create(**asked, max_output_tokens=most).output[0].content
            )
        data = bytes(sum((entry.bytes for entry in part.logprobs), [])).strip()
        assert part.text.rstrip("\ufffd") == text and "\U0001f999".encode().startswith(data)
        assert len(part.logprobs) == 3 if most == 3 else len(data) == 4


def test_a_call_that_a_stop_string_cuts_is_not_to_be_made(model):
    """The model need not call: a stop string holds in its text and in its calls."""
    cut = '"b"'  # in the arguments of the first call
    asked = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, "stop": [cut]}
    # the latter in the second call
    for stop, calls in ((cut, model.calls), ("5", model.calls.replace("{}", '{"a": 5}'))):
        with model.script(model.opening + calls):
            [choice] = model.openai.chat.completions.create(**asked | {"stop": [stop]}).choices
        assert choice.finish_reason == "stop"
    with model.script():
        assert (
            list(model.openai.chat.completions.create(**asked, stream=True))[-1]
            .choices[0]
            .finish_reason
            == "stop"
        )
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in TOOLS
    ]
    with model.script():
        answer = model.claude.messages.create(
            model="m", max_tokens=200, messages=QUESTION, tools=tools, stop_sequences=[cut]
        )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", cut)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with model.script():
        answer = model.openai.responses.create(
            model="m", input=QUESTION, tools=tools, extra_body={"stop": [cut]}
        )
    assert answer.status == "incomplete" and answer.output[-1].status == "incomplete"


def test_messages(model):
    tools = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"]["description"],
            "input_schema": tool["function"]["parameters"],
        }
        for tool in TOOLS
    ]
    asked = {"model": "m", "max_tokens": 200, "messages": QUESTION, "tools": tools}
    with model.script():
        message = model.claude.messages.create(**asked)
    counted = model.claude.messages.count_tokens(model="m", messages=QUESTION, tools=tools)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    blocks = [block for block in message.content if block.type == "tool_use"]
    assert [(block.name, block.input) for block in blocks] == WANTED
    assert message.stop_reason == "tool_use"
    assert "".join(block.text for block in message.content if block.type == "text") == model.opening
    with model.script(), model.claude.messages.stream(**asked) as stream:
        streamed, judged = list(stream), stream.get_final_message()
    assert [block.type for block in judged.content] == [block.type for block in message.content]
    assert [
        (block.name, block.input) for block in judged.content if block.type == "tool_use"
    ] == WANTED
    deltas = [
        event
        for event in streamed
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert len(deltas) > 6 and judged.stop_reason == "tool_use"
    again = [
        *QUESTION,
        {
            "role": "assistant",
            "content": [block.model_dump(exclude_none=True) for block in message.content],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": result}
                for block, result in zip(blocks, RESULTS)
            ],
        },
    ]
    with model.script("It is 3 at noon.") as script:
        last = model.claude.messages.create(**asked | {"messages": again})
    assert last.content[0].text == "It is 3 at noon." and last.stop_reason == "end_turn"
    assert '"b": 2' in script.prompts[0]
    assert script.prompts[0].index('"b": 2') < script.prompts[0].index("noon")


def test_a_required_call_in_the_format_of_the_model(model):
    """Of a random model: a grammar makes it write the call."""
    choose = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": choose}}
    asked = {
        "model": "m",
        "messages": QUESTION,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 100,
        "temperature": 1,
        "seed": 3,
    }
    [choice] = model.openai.chat.completions.create(**asked).choices
    [call] = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), choose)
    assert call.function.name == "weather" and choice.finish_reason == "tool_calls"
    assert choice.message.content is None


def test_text_that_begins_like_a_call_is_text(model):
    answer = {
        "llama-3.1": '{"answer": 3}',
        "mistral-nemo": "[TOOL] 3",
        "qwen2.5": "<tool_use> 3",
        "smollm2": "<tool_call 3",
    }[model.name]
    asked = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 60, "logprobs": True}
    with model.script(answer):
        choice = model.openai.chat.completions.create(**asked).choices[0]
    with model.script(answer):
        chunks = [
            chunk.choices[0] for chunk in model.openai.chat.completions.create(**asked, stream=True)
        ]
    assert (
        choice.message.content == answer == "".join(chunk.delta.content or "" for chunk in chunks)
    )
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
    folder = Path(__file__).resolve().parents[2] / "data" / "tool-templates"
    template = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    llm = load(make_scripted_checkpoint(tmp_path / "m", template), backend="cpu")
    server = Inside(lambda: llm, alias="m").ready()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")
    asked = {"model": "m", "messages": QUESTION, "tools": TOOLS, "max_tokens": 300}
    try:
        with Script(llm, answer), client.chat.completions.stream(**asked) as stream:
            [choice] = stream.get_final_completion().choices
    finally:
        server.close()
    calls = choice.message.tool_calls
    assert [(call.function.name, call.function.parsed_arguments) for call in calls] == WANTED
    assert choice.message.content.strip() == "Let me see." and choice.finish_reason == "tool_calls"
    assert '"a": 1, "b": 2' in calls[0].function.arguments


def test_a_template_is_chosen_by_the_request(tmp_path):
    """Of a checkpoint with several templates. The format of calls is that of the one for tools."""
    template, calls = tool_formats()["qwen2.5"]
    folder = make_scripted_checkpoint(
        tmp_path / "m", "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(template, encoding="utf-8")
    rag = "{% for d in documents %}<{{ d.title }}: {{ d.text }}>{% endfor %}{{ messages[-1].content }}"  # noqa: E501
    (folder / "additional_chat_templates/rag.jinja").write_text(rag)
    llm = load(folder, backend="cpu")
    server = Inside(lambda: llm, alias="m").ready()
    try:
        asked = {"messages": QUESTION, "max_tokens": 200}
        with Script(llm, calls, "Hello", calls) as script:
            done = server.post("/v1/chat/completions", **asked, tools=TOOLS).json()
            server.post("/v1/chat/completions", **asked)
            claude = [{**t["function"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
            for tool in claude:
                del tool["parameters"]
            blocks = server.post("/v1/messages", **asked, tools=claude).json()["content"]
        made = [call["function"] for call in done["choices"][0]["message"]["tool_calls"]]
        assert [(call["name"], json.loads(call["arguments"])) for call in made] == WANTED
        assert [(block["name"], block["input"]) for block in blocks] == WANTED
        assert ["<tools>" in prompt for prompt in script.prompts] == [True, False, True]
        assert script.prompts[1].endswith(f"[{QUESTION[0]['content']}]")
        shown = server.post("/apply-template", messages=QUESTION, tools=TOOLS).json()["prompt"]
        assert "<tools>" in shown
        shown = server.post("/apply-template", messages=QUESTION).json()["prompt"]
        assert shown == f"[{QUESTION[0]['content']}]"
        brought = {"documents": [{"title": "A", "text": "b"}]}
        variables = {"chat_template_kwargs": brought}
        with Script(llm, *["Hello"] * 3) as script:
            for more in (brought, variables):
                done = server.post("/v1/chat/completions", **asked, **more)
                assert "x-mlx-llama-noted" not in done.headers
            done = server.post("/v1/chat/completions", **asked, **brought, tools=TOOLS)
            assert done.headers["x-mlx-llama-noted"] == "documents"  # no place in this template
        wanted = f"<A: b>{QUESTION[0]['content']}"
        assert [prompt.endswith(wanted) for prompt in script.prompts] == [True, True, False]
        shown = server.post("/apply-template", messages=QUESTION, **brought).json()["prompt"]
        assert shown == wanted
    finally:
        server.close()


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
    with model.script() as script:
        model.server.post("/v1/chat/completions", **asked).raise_for_status()
    with model.script() as again:
        job = model.server.post("/v1/jobs", **asked).raise_for_status().json()
        lines = model.server.http.get(job["jsonl_url"]).text.splitlines()
    assert again.prompts == script.prompts
    shown = model.server.post("/apply-template", **asked).json()["prompt"]
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
