"""Calls that a model's own template prints are read back, whatever the pieces.

Tested are the shortened templates in tests/data, templates without tools, our templates of the
formats that no published file prints back, and with MLX_LLAMA_TEMPLATES (the folder
models/templates of llama.cpp's source) all of llama.cpp's.
"""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases.texts import TEMPLATES, TOOL_TEMPLATES

from mlx_llama.core.errors import TemplateError
from mlx_llama.core.text.template import ChatTemplate
from mlx_llama.core.text.thoughts import find_thoughts
from mlx_llama.core.text.tools import FORMATS, Tool, ToolFormat, find_format
from mlx_llama.core.text.tools.formats import GEMMA_4, HARMONY
from mlx_llama.core.text.tools.literals import QUOTE

from .reading import read

FOLDER = os.environ.get("MLX_LLAMA_TEMPLATES")
UNKNOWN = "{% if tools %}call @{name}{% endif %}"
# vLLM's template of Phi-4 mini prints calls of the history without their mark.
LISTED = """{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}OPENS[{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}{{ "" if loop.last else ", " }}{% endfor %}]\
CLOSES{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
OURS = TOOL_TEMPLATES | {name: TEMPLATES[name] for name in ("smollm2", "zephyr", "llama-2")}
OURS |= {f"unknown-{name}": UNKNOWN + OURS[name] for name in ("smollm2", "gemma-2")}
OURS |= {
    "listed-tool_call": LISTED.replace("OPENS", "<tool_call>").replace("CLOSES", "</tool_call>"),
    "listed-functools": LISTED.replace("OPENS", "functools").replace("CLOSES", ""),
}
THEIRS = {path.name: path for path in sorted(Path(FOLDER).glob("*.jinja"))} if FOLDER else {}
NAMES = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
BEGINS = "Let me see."
USER = {"role": "user", "content": "Go on."}

SCHEMAS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "place": {"$ref": "#/$defs/place"},
    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "unit": {"enum": ["celsius", "5", "true"]},
}
PARAMETERS = {"type": "object", "properties": SCHEMAS, "additionalProperties": False}
PARAMETERS["$defs"] = {"place": {"type": "object"}}
TOOLS = [Tool(name, f"Does {name}.", PARAMETERS) for name in ("add", "look_up", "files.read-2")]
# Marks of all formats, and what JSON and tags must escape
FRAGMENTS = [
    *("a", "Zürich ", "\U0001f999", "\n", "\n\n", " ", "\t", '"', "'", "\\", "\\n", *"{}[]<>"),
    *("5", "5.0", "true", "null", "None", ": ", ", ", "; ", "</", "<b>bold</b>", "```"),
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=text>"),
    *("</parameter>", "</arg_value>", "<arg_key>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|tool_call|>", ">>>", ">>>add", "functools[", "<code>", '{"name": "add"}'),
    *("<invoke name=", "</invoke>", "<|tool_call>call:", "<tool_call|>", "<|tool_call_end|>"),
    *('<|"|>', "')", '="'),
]


def make_text(source: random.Random) -> str:
    return "".join(source.choices(FRAGMENTS, k=source.randint(0, 6)))


def make_values(source: random.Random, form: ToolFormat) -> dict:
    """Random arguments of every type. Strings of tagged formats do not contain what ends them."""
    ends = [mark for mark in form.marks if mark.startswith("</") or mark == QUOTE]

    def text() -> str:
        made = make_text(source)
        return made if not any(end in made for end in ends) else text()

    made = {
        "text": text(),
        "count": source.randint(-(10**12), 10**12),
        "share": source.choice([0.5, -1e30, 7.0, 3, 1e-7]),
        "deep": source.random() < 0.5,
        "names": [text() for _ in range(source.randint(0, 3))],
        "place": {"a b": text(), "at": [source.randint(0, 9), None, True, {"x": text()}]},
        "limit": source.choice([None, 5]),
        "unit": source.choice(SCHEMAS["unit"]["enum"]),
    }
    return {name: made[name] for name in source.sample(list(made), source.randint(0, len(made)))}


def render_answer(template: ChatTemplate, form: ToolFormat, message: dict) -> str:
    """The text that a model would write for a message, without thoughts and what ends its turn."""
    thoughts = find_thoughts(template.source)

    def render(*messages, add_generation_prompt=False):
        offered, extras = form.offer([USER, *messages], TOOLS)
        extras |= {"enable_thinking": True} if form is GEMMA_4 else {}
        return template.render(offered, add_generation_prompt, **extras)

    prompt, whole = render(add_generation_prompt=True), render(message)
    plain = render({"role": "assistant", "content": BEGINS})
    end = len(plain) - plain.rindex(BEGINS) - len(BEGINS)
    if whole.endswith("<|tool_response>"):
        end = len("<|tool_response>")
    begin = whole.rfind(BEGINS) if message["content"] and not form.is_open else -1
    if begin < 0:  # a template that drops it
        begin = len(prompt)
        assert whole.startswith(prompt)
    state = "before"
    if form is HARMONY:  # another mark ends a call
        end, state = len(form.closes) * whole.endswith(form.closes), "text"
    answer = whole[begin : len(whole) - end]
    if not thoughts:
        return answer
    is_open = begin == len(prompt) and prompt.rstrip().endswith(thoughts.start)
    if is_open and thoughts.closing.strip() in answer:
        state = "thought"
    parts = thoughts.parser(state).push(answer, is_last=True)
    return "".join(part for part in parts if isinstance(part, str))


def test_every_format_has_a_template():
    tokenizer = SimpleNamespace(added_ids=())
    assert {find_format(source, tokenizer) for source in OURS.values()} == set(FORMATS)


@pytest.mark.slow_for("more")
@pytest.mark.parametrize("name", [*OURS, *THEIRS])
@pytest.mark.parametrize("numbers", [range(40), range(40, 100)], ids=["some", "more"])
def test_calls_of_the_template_are_read(numbers, name):
    """A hundred answers of each, the last 60 in the slow part."""
    is_ours = name in OURS
    source = OURS[name] if is_ours else THEIRS[name].read_text(encoding="utf-8")
    template = ChatTemplate(source, name, NAMES)
    form = find_format(source, SimpleNamespace(added_ids=()))
    prompt, extras = form.offer([USER], TOOLS)
    try:
        text = template.render(prompt, **extras)
    except TemplateError as error:
        pytest.skip(f"the sandbox refuses this template: {error}")
    assert all(tool.name in text for tool in TOOLS)
    chance = random.Random(f"{name} {numbers.start}")
    for number in numbers:
        count = 1 if form.calls_once else chance.randint(1, 3)
        calls = [(chance.choice(TOOLS).name, make_values(chance, form)) for _ in range(count)]
        # Gemma 4's templates print no text before calls in the same turn
        is_silent = form.is_bare or form is GEMMA_4 or (is_ours and number % 2)
        message = {
            "role": "assistant",
            "content": "" if is_silent else BEGINS,
            "tool_calls": [
                {"id": f"abcdefgh{at}", "function": {"name": name, "arguments": values}}
                for at, (name, values) in enumerate(calls)
            ],
        }
        answer = render_answer(template, form, message)
        for seed in (0, 1, 2, 3, 4 + number):
            parser = read(form, answer, TOOLS, seed)
            assert all(call.is_complete for call in parser.calls), answer
            dump = functools.partial(json.dumps, sort_keys=form is GEMMA_4)  # which sorts them
            assert [(call.name, dump(call.values())) for call in parser.calls] == [
                (name, dump(values)) for name, values in calls
            ], answer
            assert not is_ours or parser.text.strip() in ("", message["content"]), answer
