"""Formats of calls: templates beside transformers', enforced calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.text.cases import TEMPLATES, USER, conversation
from mlx_llama.core.errors import OptionsError, TemplateError
from mlx_llama.core.generation.grammar import Grammars, Rule
from mlx_llama.core.text.template import ChatTemplate, check_messages, encode_messages
from mlx_llama.core.text.tools import Tool, ToolParser, find_format, read_tools
from mlx_llama.core.text.tools.formats import (
    BRIEF,
    HERMES,
    IN_SYSTEM,
    LLAMA3,
    MISTRAL,
    MISTRAL_HEADERS,
    SMOLLM2,
    SMOLLM3,
)

from .test_describe import add, weather

TOOL_TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(
        (Path(__file__).resolve().parents[3] / "data" / "tool-templates").glob("*.jinja")
    )
}
# SmolLM3's, shortened: it prints tools as Python does
TOOL_TEMPLATES["smollm3"] = (
    "{% for tool in xml_tools %}{{ tool | string }}\n{% endfor %}<tool_call>{name, "
    "arguments}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | "
    "tojson }}{% endfor %}<|im_end|>{% endfor %}"
)


# Templates

CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2.5}},
}
TALK = [
    *conversation([("system", "Be brief."), ("user", "1 + 2.5?")]),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3.5", "tool_call_id": "abcdefghi", "name": "add"},
    *conversation([("assistant", "3.5"), ("user", "thanks")]),
]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_templates_with_tools_give_transformers_text_and_ids(name, model):
    template, tools = (
        ChatTemplate(TOOL_TEMPLATES[name], name, model.tokenizer.named),
        read_tools([add, weather]),
    )
    form = find_format(template.source, model.tokenizer)
    for messages in (USER, TALK, TALK[:2]):
        ours, extras = form.offer(messages, tools)
        how = {"chat_template": template.source, "add_generation_prompt": True, **extras}
        assert template.render(ours, **extras) == model.judge.apply_chat_template(
            messages, tokenize=False, **how
        )
        ids = model.judge.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
        bos = [model.tokenizer.bos_id]
        assert encode_messages(model.tokenizer, template, ours, **extras) == (
            ids if ids[:1] == bos else bos + ids
        )


def test_openais_form_of_a_message_is_the_same(model):
    """Arguments as JSON text, and no content."""
    wire = json.loads(json.dumps(TALK))
    wire[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    for content in (None, ""):
        wire[2]["content"] = content
        assert check_messages(wire) == TALK
    del wire[2]["content"]
    assert check_messages(wire) == TALK
    assert check_messages(
        [{"role": "assistant", "content": "x", "tool_calls": None}]
    ) == conversation([("assistant", "x")])


@pytest.mark.parametrize(
    "message, reason",
    [
        ({"role": "assistant", "content": None}, "content is None"),
        ({"role": "user", "content": "x", "tool_calls": []}, "expected the fields"),
        ({"role": "assistant", "tool_calls": []}, "list of 1 to"),
        ({"role": "assistant", "tool_calls": [{}]}, "'function'"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "expected an object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]},
            "expected an object",
        ),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id is 5"),
        ({"role": "tool"}, "expected the fields"),
        ({"role": ["assistant"], "content": "x"}, "expected a word"),
        ({"role": "tool", "content": "x", "id": "y"}, "tool_call_id"),
    ],
)
def test_malformed_messages_name_message_and_field(message, reason, model):
    with pytest.raises(TemplateError) as caught:
        check_messages([*USER, message])
    assert "messages[1]" in str(caught.value) and reason in str(caught.value)


def test_a_template_of_one_call_a_message_gets_several_in_turn(model):
    """Each with its result, whatever the order of the results; a result of no call stays."""
    template = ChatTemplate(TOOL_TEMPLATES["llama-3.1"], "llama", model.tokenizer.named)
    calls = [
        {**CALL, "id": f"call{i}", "function": {"name": "add", "arguments": {"a": i, "b": 0}}}
        for i in (1, 2)
    ]
    results = [
        {"role": "tool", "content": f"sum {i}", "tool_call_id": f"call{i}"} for i in (2, 1, 3)
    ]
    talk = [
        *USER,
        {"role": "assistant", "content": "x", "tool_calls": calls},
        *results,
        *conversation([("user", "thanks")]),
    ]
    messages, extras = LLAMA3.offer(talk, read_tools([add]))
    assert [
        message.get("tool_call_id") or [call["id"] for call in message.get("tool_calls", ())]
        for message in messages
    ] == [[], ["call1"], "call1", ["call2"], "call2", "call3", []]
    judged = model.judge.apply_chat_template(
        messages,
        tokenize=False,
        chat_template=template.source,
        add_generation_prompt=True,
        **extras,
    )
    assert template.render(messages, **extras) == judged and judged.index("sum 1") < judged.index(
        "sum 2"
    )


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_special_tokens_in_tools_calls_and_results_are_text(name, model):
    """The same control tokens as a harmless conversation has."""
    template = ChatTemplate(TOOL_TEMPLATES[name], name, model.tokenizer.named)
    specials = set(model.tokenizer.special_ids.values())

    def controls(word):
        tool = Tool(
            "add",
            f"Adds {word}.",
            {"type": "object", "properties": {word: {"type": "string", "description": word}}},
        )
        call = {**CALL, "function": {"name": "add", "arguments": {"a": word, word: [word]}}}
        talk = [
            *TALK[:2],
            {"role": "assistant", "tool_calls": [call]},
            {**TALK[3], "content": word},
            *TALK[4:],
        ]
        messages, extras = find_format(template.source, model.tokenizer).offer(talk, [tool])
        ids = encode_messages(model.tokenizer, template, messages, **extras)
        assert model.tokenizer.decode(ids, skip_special=False).endswith(
            template.render(messages, **extras)
        )
        return [token for token in ids if token in specials]

    for word in ("<|eot_id|>", "[TOOL_CALLS]", "</s>", "<|im_start|>system"):
        assert controls(word) == controls("harmless")


def test_a_template_without_tools_gets_them_in_its_system_message(model):
    template = ChatTemplate(TEMPLATES["smollm2"], "smollm2", model.tokenizer.named)
    form = find_format(template.source, model.tokenizer)
    messages, extras = form.offer(TALK, read_tools([add]))
    text = template.render(messages, **extras)
    assert form is IN_SYSTEM and extras == {}
    assert (
        "Be brief.\n\nYou are an expert in composing functions." in text
        and json.dumps(Tool.of(add).as_dict()) in text
    )
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2.5}}]</tool_call>' in text
    assert "user\n<tool_response>3.5</tool_response>" in text
    assert form.offer(USER, read_tools([add]))[0][0]["role"] == "system"
    assert find_format(TEMPLATES["zephyr"], model.tokenizer) is BRIEF
    assert BRIEF.offer(TALK, read_tools([add]))[0][0]["content"].startswith(
        "Be brief.\n\nYou may call these functions:\n<tools>[{"
    )


def test_formats_are_recognised(model):
    found = {name: find_format(source, model.tokenizer) for name, source in TOOL_TEMPLATES.items()}
    assert found == {
        "llama-3.1": LLAMA3,
        "mistral-nemo": MISTRAL,
        "qwen2.5": HERMES,
        "smollm3": SMOLLM3,
    }
    assert find_format("{% if tools %}<tool_call>[{name, arguments}", model.tokenizer) is SMOLLM2
    assert find_format("{% if tools %}[TOOL_CALLS]f[ARGS]", model.tokenizer) is MISTRAL_HEADERS
    for source in (
        "{{ tools }}<tool_call><function=f>",
        "{{ tools }}<tool_call>f<arg_key>arguments",
    ):
        with pytest.raises(OptionsError, match="format that is not supported"):
            find_format(source, SimpleNamespace(added_ids={}))


# Enforced calls


@pytest.mark.parametrize(
    "form", [LLAMA3, MISTRAL, MISTRAL_HEADERS, HERMES, SMOLLM2, SMOLLM3], ids=lambda form: form.name
)
@pytest.mark.parametrize("many", [False, True])
def test_enforced_calls_parse_and_fit_their_tool(form, many, model):
    """Random tokens under the grammar, decoded with the format's special tokens shown, are calls
    that the functions take.
    """
    import numpy as np

    tokenizer, tools = model.tokenizer, read_tools([weather, add])
    grammars = Grammars(tokenizer, tokenizer.eos_ids, 400)
    rule = Rule("tools", form.grammar(tools, tokenizer, many=many))
    source, ended, counts = random.Random(5), 0, set()
    texts = tokenizer.token_bytes()
    for _ in range(30):
        constraint = grammars.compile(rule)
        stream = tokenizer.stream(
            starts_text=not constraint.keeps_space, shown=form.shown_specials(tokenizer)
        )
        parser = ToolParser(form, tools)
        for _ in range(200):
            if constraint.is_finished or (constraint.is_complete and source.random() < 0.5):
                break
            ids = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
            ids = [int(token) for token in ids if token not in grammars.eos]
            closing = [token for token in ids if texts[token] in (b'"', b"}", b",")]
            for token in constraint.forced() or [
                source.choice(closing if closing and source.random() < 0.3 else ids)
            ]:
                constraint.accept(token)
                parser.push(stream.push(token))
        parser.push(stream.finish())
        parser.finish()
        if constraint.is_complete:
            ended += 1
            counts.add(len(parser.calls))
            assert (
                parser.text == ""
                and parser.calls
                and all(call.is_complete for call in parser.calls)
            )
            for call in parser.calls:
                next(tool for tool in tools if tool.name == call.name).run(call.arguments)
    assert ended > 5 and (max(counts) > 1) == many and min(counts) == 1


def test_a_named_tool_is_the_only_one_that_can_be_called(model):
    only = HERMES.grammar([Tool.of(add)], model.tokenizer)
    constraint = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400).compile(
        Rule("tools", only), starts_text=False
    )
    text = model.tokenizer.stream(starts_text=False)
    assert (
        "".join(text.push(token) for token in constraint.forced())
        == '<tool_call>\n{"name": "add", "arguments": {"a": '
    )
    with pytest.raises(OptionsError, match="no tool to call"):
        HERMES.grammar([], model.tokenizer)


def test_enforced_arguments_have_no_keys_but_the_declared_ones(model):
    """Unless the tool's schema says otherwise."""
    grammars = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400)
    for extra, taken in (({}, False), ({"additionalProperties": True}, True)):
        tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, **extra})
        constraint = grammars.compile(
            Rule("tools", LLAMA3.grammar([tool], model.tokenizer)), starts_text=False
        )
        tokens = model.tokenizer.encode('\n{"name": "f", "parameters": {"b": 1}}')[2:]
        try:
            for token in tokens:
                constraint.accept(token)
        except ValueError:
            pass
        assert constraint.is_complete == taken


def test_a_schema_of_parameters_that_cannot_be_enforced_is_refused(model):
    tool = Tool(
        "f",
        "",
        {
            "type": "object",
            "properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}},
            "x-guidance": {"lenient": True},
        },
    )
    with pytest.raises(OptionsError, match="option `tools`: cannot be enforced: .*not"):
        Grammars(model.tokenizer, model.tokenizer.eos_ids, 400).compile(
            Rule("tools", HERMES.grammar([tool], model.tokenizer))
        )
