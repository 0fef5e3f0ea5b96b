"""Tools: descriptions and templates beside transformers', calls in every format, streamed in any pieces, enforced calls."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional

import pytest
from making import config_fields, make_tokenizer
from mlx_lm.tool_parsers import json_tools, mistral as mistral_tools
from pydantic import BaseModel
from scripting import SPECIALS
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from mlx_llama.core.errors import OptionsError, TemplateError
from mlx_llama.core.generation.grammar import Grammars, Rule
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.hf_tokenizer import load_tokenizer
from mlx_llama.core.text.template import ChatTemplate, check_messages, encode_messages
from mlx_llama.core.text.tools import (
    BRIEF,
    HERMES,
    IN_SYSTEM,
    LLAMA3,
    MISTRAL,
    MISTRAL_HEADERS,
    SMOLLM2,
    SMOLLM3,
    Tool,
    ToolParser,
    add_tools,
    call_grammar,
    find_format,
    read_tools,
    shown_specials,
)

from .cases import TEMPLATES, USER, conversation

TOOL_TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).resolve().parents[2] / "data" / "tool-templates").glob("*.jinja"))
}
# SmolLM3's, shortened: it prints tools as Python does
TOOL_TEMPLATES["smollm3"] = (
    "{% for tool in xml_tools %}{{ tool | string }}\n{% endfor %}<tool_call>{name, arguments}{% for m in messages %}<|im_start|>"
    "{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endfor %}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer with the special tokens of all formats, and transformers' of the same files."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added = {str(384 + i): {"content": text, **flags} for i, text in enumerate(SPECIALS)}
    folder = make_tokenizer(tmp_path_factory.mktemp("tools"), "sentencepiece", added_tokens_decoder=added)
    (folder / "config.json").write_text(json.dumps(config_fields(vocab_size=400)))
    ours = load_tokenizer(folder, LlamaConfig.from_file(folder))
    return SimpleNamespace(tokenizer=ours, judge=AutoTokenizer.from_pretrained(folder))


# Descriptions


def weather(place: str, days: int = 3, unit: Literal["celsius", "fahrenheit"] = "celsius"):
    """Forecast the weather.

    Looks it up.

    Args:
        place: City and country,
            such as "Paris, France".
        days: Days to look ahead.
        unit: Scale of the temperatures.

    Returns:
        The forecast: one line a day.
    """
    return {"place": place, "days": days, "unit": unit}


def add(a: float, b: float) -> str:
    """Add two numbers.

    Args:
        a: First number
        b: Second number
    """
    return str(a + b)


def tags(names: list[str], flags: dict[str, bool], strict: bool):
    """Tag things.

    Args:
        names: The names.
        flags: Switches by name.
        strict: Whether to fail.
    """


@pytest.mark.parametrize("function", [weather, add, tags], ids=lambda function: function.__name__)
def test_a_function_is_described_as_transformers_does(function):
    """But for defaults, which transformers leaves out, and keys of no others, which it allows."""
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    ours = Tool.of(function).as_dict()
    assert ours["function"]["parameters"].pop("additionalProperties") is False
    for schema in ours["function"]["parameters"]["properties"].values():
        schema.pop("default", None)
    ours["function"]["parameters"]["properties"].get("flags", {}).pop("additionalProperties", None)
    expected["function"]["parameters"]["properties"].get("flags", {}).pop("additionalProperties", None)
    assert ours == expected


class Point(BaseModel):
    title: str
    x: int = 0


def draw(points: list[Point], name: Optional[str] = None) -> str:
    """Draw.

    :param points: the points,
        in order
    :param name: of the picture
    """
    return f"{points[0].title} {points[0].x} {name}"


def test_models_optional_values_and_sphinx_docstrings_are_described():
    tool = Tool.of(draw)
    assert tool.description == "Draw."
    properties = tool.parameters["properties"]
    assert properties["points"]["description"] == "the points, in order" and properties["name"]["description"] == "of the picture"
    assert "title" in tool.parameters["$defs"]["Point"]["properties"] and "title" not in tool.parameters["$defs"]["Point"]
    assert tool.run('{"points": [{"title": "a", "x": 2}]}') == "a 2 None"


def test_a_call_runs_with_checked_arguments():
    tool = Tool.of(weather)
    assert json.loads(tool.run('{"place": "Oslo"}')) == {"place": "Oslo", "days": 3, "unit": "celsius"}
    for bad in ('{"place": 5}', "{}", '{"place": "x", "town": 1}', "[", '{"place": "x", "unit": "kelvin"}'):
        with pytest.raises(ValueError):
            tool.run(bad)
    with pytest.raises(OptionsError, match="weather is only described"):
        Tool.of(tool.as_dict()).run("{}")


def untyped(a):
    """No hints."""


def variadic(*numbers: int):
    """Any number."""


async def later(a: int):
    """Answer later."""


def opaque(x: object, y: "random.Random"):
    """A parameter without a schema."""


@pytest.mark.parametrize("value, reason", [
    (untyped, "untyped has no type hint for a"), (variadic, "takes \\*numbers"), (later, "later is async"), (opaque, "no JSON schema"), (5, "neither a function"),
    ({"name": "f", "parameters": {"type": "string"}}, "parameters of type 'string', expected object"),
    ({"name": "f", "parameters": {"type": ["object", "null"]}}, "expected object"),
    (lambda x: x, "cannot be named"), ({"type": "retrieval"}, "neither a function"), ({"function": {"name": "a b"}}, "name is 'a b'"),
    ({"function": {"name": "f", "parameters": []}}, None), ({"function": {"name": "f", "parameters": "x"}}, "no JSON schema"),
])  # fmt: skip
def test_bad_tools_are_refused(value, reason):
    if reason is None:
        assert read_tools([value])[0].parameters == {"type": "object", "properties": {}}
        return
    with pytest.raises(OptionsError, match=reason):
        read_tools([value])


def test_lists_of_tools_are_bounded():
    for values, reason in (([add, add], "add is there twice"), ("add", "not a list"),
                           ([{"function": {"name": f"f{i}"}} for i in range(200)], "200 tools"),
                           ([{"function": {"name": "f", "parameters": {"enum": ["x" * 70000]}}}], "65536 characters"),
                           ([{"function": {"name": "f", "parameters": {"a": {1}}}}], "not JSON")):
        with pytest.raises(OptionsError, match=reason):
            read_tools(values)


# Templates

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2.5}}}
TALK = [*conversation([("system", "Be brief."), ("user", "1 + 2.5?")]), {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3.5", "tool_call_id": "abcdefghi", "name": "add"},
        *conversation([("assistant", "3.5"), ("user", "thanks")])]


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_templates_with_tools_give_transformers_text_and_ids(name, model):
    template, tools = ChatTemplate(TOOL_TEMPLATES[name], name, model.tokenizer.named), read_tools([add, weather])
    form = find_format(template.source, model.tokenizer)
    for messages in (USER, TALK, TALK[:2]):
        ours, extras = add_tools(form, messages, tools)
        how = {"chat_template": template.source, "add_generation_prompt": True, **extras}
        assert template.render(ours, **extras) == model.judge.apply_chat_template(messages, tokenize=False, **how)
        ids = model.judge.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
        bos = [model.tokenizer.bos_id]
        assert encode_messages(model.tokenizer, template, ours, **extras) == (ids if ids[:1] == bos else bos + ids)


def test_openais_form_of_a_message_is_the_same(model):
    """Arguments as JSON text, and no content."""
    wire = json.loads(json.dumps(TALK))
    wire[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    for content in (None, ""):
        wire[2]["content"] = content
        assert check_messages(wire) == TALK
    del wire[2]["content"]
    assert check_messages(wire) == TALK
    assert check_messages([{"role": "assistant", "content": "x", "tool_calls": None}]) == conversation([("assistant", "x")])


@pytest.mark.parametrize("message, reason", [
    ({"role": "assistant", "content": None}, "content is None"), ({"role": "user", "content": "x", "tool_calls": []}, "expected the fields"),
    ({"role": "assistant", "tool_calls": []}, "list of 1 to"), ({"role": "assistant", "tool_calls": [{}]}, "'function'"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "expected an object"),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}, "expected an object"),
    ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id is 5"), ({"role": "tool"}, "expected the fields"),
    ({"role": ["assistant"], "content": "x"}, "expected a word"), ({"role": "tool", "content": "x", "id": "y"}, "tool_call_id"),
])  # fmt: skip
def test_malformed_messages_name_message_and_field(message, reason, model):
    with pytest.raises(TemplateError) as caught:
        check_messages([*USER, message])
    assert "messages[1]" in str(caught.value) and reason in str(caught.value)


def test_a_template_of_one_call_a_message_gets_several_in_turn(model):
    """Each with its result, whatever the order of the results; a result of no call stays."""
    template = ChatTemplate(TOOL_TEMPLATES["llama-3.1"], "llama", model.tokenizer.named)
    calls = [{**CALL, "id": f"call{i}", "function": {"name": "add", "arguments": {"a": i, "b": 0}}} for i in (1, 2)]
    results = [{"role": "tool", "content": f"sum {i}", "tool_call_id": f"call{i}"} for i in (2, 1, 3)]
    talk = [*USER, {"role": "assistant", "content": "x", "tool_calls": calls}, *results, *conversation([("user", "thanks")])]
    messages, extras = add_tools(LLAMA3, talk, read_tools([add]))
    assert [message.get("tool_call_id") or [call["id"] for call in message.get("tool_calls", ())] for message in messages] == [
        [], ["call1"], "call1", ["call2"], "call2", "call3", []]
    judged = model.judge.apply_chat_template(messages, tokenize=False, chat_template=template.source, add_generation_prompt=True, **extras)
    assert template.render(messages, **extras) == judged and judged.index("sum 1") < judged.index("sum 2")


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_special_tokens_in_tools_calls_and_results_are_text(name, model):
    """The same control tokens as a harmless conversation has."""
    template = ChatTemplate(TOOL_TEMPLATES[name], name, model.tokenizer.named)
    specials = set(model.tokenizer.special_ids.values())

    def controls(word):
        tool = Tool("add", f"Adds {word}.", {"type": "object", "properties": {word: {"type": "string", "description": word}}})
        call = {**CALL, "function": {"name": "add", "arguments": {"a": word, word: [word]}}}
        talk = [*TALK[:2], {"role": "assistant", "tool_calls": [call]}, {**TALK[3], "content": word}, *TALK[4:]]
        messages, extras = add_tools(find_format(template.source, model.tokenizer), talk, [tool])
        ids = encode_messages(model.tokenizer, template, messages, **extras)
        assert model.tokenizer.decode(ids, skip_special=False).endswith(template.render(messages, **extras))
        return [token for token in ids if token in specials]

    for word in ("<|eot_id|>", "[TOOL_CALLS]", "</s>", "<|im_start|>system"):
        assert controls(word) == controls("harmless")


def test_a_template_without_tools_gets_them_in_its_system_message(model):
    template = ChatTemplate(TEMPLATES["smollm2"], "smollm2", model.tokenizer.named)
    form = find_format(template.source, model.tokenizer)
    messages, extras = add_tools(form, TALK, read_tools([add]))
    text = template.render(messages, **extras)
    assert form is IN_SYSTEM and extras == {}
    assert "Be brief.\n\nYou are an expert in composing functions." in text and json.dumps(Tool.of(add).as_dict()) in text
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2.5}}]</tool_call>' in text
    assert "user\n<tool_response>3.5</tool_response>" in text
    assert add_tools(form, USER, read_tools([add]))[0][0]["role"] == "system"
    assert find_format(TEMPLATES["zephyr"], model.tokenizer) is BRIEF
    assert add_tools(BRIEF, TALK, read_tools([add]))[0][0]["content"].startswith("Be brief.\n\nYou may call these functions:\n<tools>[{")


def test_formats_are_recognised(model):
    found = {name: find_format(source, model.tokenizer) for name, source in TOOL_TEMPLATES.items()}
    assert found == {"llama-3.1": LLAMA3, "mistral-nemo": MISTRAL, "qwen2.5": HERMES, "smollm3": SMOLLM3}
    assert find_format("{% if tools %}<tool_call>[{name, arguments}", model.tokenizer) is SMOLLM2
    assert find_format("{% if tools %}[TOOL_CALLS]f[ARGS]", model.tokenizer) is MISTRAL_HEADERS
    for source in ("{{ tools }}<tool_call><function=f>", "{{ tools }}<tool_call>f<arg_key>arguments"):
        with pytest.raises(OptionsError, match="format that is not supported"):
            find_format(source, SimpleNamespace(added_ids={}))


# Calls in text

CASES = [
    (HERMES, 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1]}}\n</tool_call>\n<tool_call>\n{"name": "g", '
     '"arguments": {}}\n</tool_call>', "Sure.\n", [("f", {"a": 'x}"', "b": [1]}), ("g", {})]),
    (HERMES, '<think>\n{"a"}\n</think>\n\n<tool_call>\n{"arguments": {"a": 1}, "name": "f"}\n</tool_call>\n',
     '<think>\n{"a"}\n</think>\n\n', [("f", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> after', " after", [("f", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>  b <tool_call>{"name": "g"}</tool_call>\n', "  b", [("f", {}), ("g", {})]),
    (HERMES, 'a <tool_call> b <tool_call>{"x": 1}</tool_call> c <tool_', 'a <tool_call> b <tool_call>{"x": 1}</tool_call> c <tool_', []),
    (HERMES, '<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": f}</tool_call>', []),
    (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    (SMOLLM2, '<tool_call>[\n{"name": "f", "arguments": {"a": 1}},\n{"name": "g", "arguments": {"b": {"c": "é"}}}\n]</tool_call>', "",
     [("f", {"a": 1}), ("g", {"b": {"c": "é"}})]),
    (SMOLLM2, "<tool_call>[]</tool_call>", "", []),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"arguments": {"b": 2}, "name": "g"}]', "",
     [("f", {"a": 1}), ("g", {"b": 2})]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}]', "", [("f", {"a": "]"})]),
    (MISTRAL_HEADERS, 'So: [TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[CALL_ID]x12[ARGS]{}', "So: ", [("f", {"a": {"b": 1}}), ("g", {})]),
    (MISTRAL_HEADERS, '[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
    (MISTRAL_HEADERS, "[TOOL_CALLS] no call", "[TOOL_CALLS] no call", []),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (LLAMA3, '\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "", [("f", {"a": 1}), ("g", {})]),
    (LLAMA3, '{"type": "function", "name": "f", "parameters": {"a": null}}', "", [("f", {"a": None})]),
    (LLAMA3, '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', "", [("f", {"a": 1})]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (LLAMA3, '<|python_tag|>brave_search.call(query="llamas \\"x\\"")', "", [("brave_search", {"query": 'llamas "x"'})]),
    (LLAMA3, "<|python_tag|>print(1)\nx = 2", "", [("python", {"code": "print(1)\nx = 2"})]),
    (LLAMA3, '{"name": "Ada", "parameters": {"a": 1}}', '{"name": "Ada", "parameters": {"a": 1}}', []),
    (LLAMA3, '{"answer": {"name": "f"}} ok', '{"answer": {"name": "f"}} ok', []),
    (LLAMA3, 'Say { "name": ', 'Say { "name": ', []),
    (LLAMA3, "  {", "  {", []),
]  # fmt: skip


def read(form, text, source=None):
    """The parser after the text in random pieces, or whole; checks that its news are its state."""
    parser, news, at = ToolParser(form, ("f", "g", "python")), [], 0
    while at < len(text):
        count = source.randint(1, 5) if source else len(text)
        news += parser.push(text[at:at + count])
        at += count
    news += parser.finish()
    assert "".join(one for one in news if isinstance(one, str)) == parser.text
    for index, call in enumerate(parser.calls):
        first, *others = [one for one in news if not isinstance(one, str) and one.index == index]
        assert (first.id, first.name, first.arguments) == (call.id, call.name, "") and len(call.id) == 9 and call.id.isalnum()
        assert "".join(one.arguments for one in others) == call.arguments and not any(one.id or one.name for one in others)
    return parser


@pytest.mark.parametrize("form, text, rest, calls", CASES, ids=range(len(CASES)))
def test_calls_are_read_in_any_pieces(form, text, rest, calls):
    for seed in (None, *range(25)):
        parser = read(form, text, None if seed is None else random.Random(seed))
        assert parser.text == rest
        assert [(call.name, call.values()) for call in parser.calls] == calls and all(call.is_complete for call in parser.calls)


@pytest.mark.parametrize("form, text, rest, calls", [case for case in CASES if case[0] in (HERMES, MISTRAL, MISTRAL_HEADERS) and case[3]])
def test_mlx_lm_reads_the_same_calls(form, text, rest, calls):
    if form is HERMES:
        bodies = [part.split("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
        found = [json_tools.parse_tool_call(body) for body in bodies]
    else:
        parts = text.split("[TOOL_CALLS]")[1:]
        found = [one for part in parts for one in as_list(parse_or_skip(part))]
    arguments = [one.get("arguments", {}) for one in found]
    arguments = [json.loads(one) if isinstance(one, str) else one for one in arguments]
    read_alike = "[CALL_ID]" not in text  # mlx-lm takes the call's id for the name
    assert not found or not read_alike or [(one["name"], given) for one, given in zip(found, arguments)] == calls


def parse_or_skip(text):
    try:
        return mistral_tools.parse_tool_call(text)
    except ValueError:  # the header without [ARGS], which it does not know
        assert "[ARGS]" not in text and not text.strip().startswith("[")
        return []


def as_list(value):
    return value if isinstance(value, list) else [value]


def test_a_call_that_is_cut_short_is_kept_as_far_as_it_came():
    parser = read(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "unfin')
    assert [(call.name, call.arguments, call.is_complete) for call in parser.calls] == [("f", '{"a": "unfin', False)]
    with pytest.raises(ValueError):
        parser.calls[0].values()
    assert read(HERMES, '<tool_call>\n{"name": "f"').text == '<tool_call>\n{"name": "f"'


def test_a_further_call_that_is_cut_before_its_name_is_no_text():
    for form, text in ((MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name"'), (SMOLLM2, '<tool_call>[{"name": "f"}, '),
                       (LLAMA3, '{"name": "f", "parameters": {}}; {"na')):
        parser = read(form, text)
        assert parser.text == "" and [call.name for call in parser.calls] == ["f"] and parser.calls[0].is_complete


def test_arguments_arrive_while_they_are_written():
    parser = ToolParser(HERMES)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "once')
    assert [one.arguments for one in parser.push(" upon")] == [" upon"]
    assert [one.arguments for one in parser.push(' a time"}')] == [' a time"}']
    assert parser.push("}</tool_call>") == [] and parser.calls[0].is_complete


def test_hostile_text_takes_linear_time():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"{[<tool_call>' * 20000
    assert len(read(HERMES, text).calls[0].arguments) > 200000
    for form, hostile in ((HERMES, "<tool_call>" * 20000), (LLAMA3, "<|python_tag|>" + "f.call(" * 20000), (HERMES, "<tool_call>[" * 9000),
                          (MISTRAL, "[TOOL_CALLS]" * 20000), (LLAMA3, '{"name":' * 20000), (HERMES, "<tool_call>{" + "[" * 100000)):
        parser = ToolParser(form)
        for at in range(0, len(hostile), 997):
            parser.push(hostile[at:at + 997])
        parser.finish()
        assert parser.text == hostile and not parser.calls


# Enforced calls


@pytest.mark.parametrize("form", [LLAMA3, MISTRAL, MISTRAL_HEADERS, HERMES, SMOLLM2, SMOLLM3], ids=lambda form: form.name)
@pytest.mark.parametrize("many", [False, True])
def test_enforced_calls_parse_and_fit_their_tool(form, many, model):
    """Random tokens under the grammar, decoded with the format's special tokens shown, are calls that the functions take."""
    import numpy as np

    tokenizer, tools = model.tokenizer, read_tools([weather, add])
    grammars = Grammars(tokenizer, tokenizer.eos_ids, 400)
    rule = Rule("tools", call_grammar(form, tools, tokenizer, many=many))
    source, ended, counts = random.Random(5), 0, set()
    texts = tokenizer.token_bytes()
    for _ in range(30):
        constraint = grammars.compile(rule)
        stream = tokenizer.stream(starts_text=not constraint.keeps_space, shown=shown_specials(form, tokenizer))
        parser = ToolParser(form, [tool.name for tool in tools])
        for _ in range(200):
            if constraint.is_finished or constraint.is_complete and source.random() < 0.5:
                break
            ids = np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))
            ids = [int(token) for token in ids if token not in grammars.eos]
            closing = [token for token in ids if texts[token] in (b'"', b"}", b",")]
            for token in constraint.forced() or [source.choice(closing if closing and source.random() < 0.3 else ids)]:
                constraint.accept(token)
                parser.push(stream.push(token))
        parser.push(stream.finish())
        parser.finish()
        if constraint.is_complete:
            ended += 1
            counts.add(len(parser.calls))
            assert parser.text == "" and parser.calls and all(call.is_complete for call in parser.calls)
            for call in parser.calls:
                next(tool for tool in tools if tool.name == call.name).run(call.arguments)
    assert ended > 5 and (max(counts) > 1) == many and min(counts) == 1


def test_a_named_tool_is_the_only_one_that_can_be_called(model):
    only = call_grammar(HERMES, [Tool.of(add)], model.tokenizer)
    constraint = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400).compile(Rule("tools", only), starts_text=False)
    text = model.tokenizer.stream(starts_text=False)
    assert "".join(text.push(token) for token in constraint.forced()) == '<tool_call>\n{"name": "add", "arguments": {"a": '
    with pytest.raises(OptionsError, match="no tool to call"):
        call_grammar(HERMES, [], model.tokenizer)


def test_enforced_arguments_have_no_keys_but_the_declared_ones(model):
    """Unless the tool's schema says otherwise."""
    grammars = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400)
    for extra, taken in (({}, False), ({"additionalProperties": True}, True)):
        tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, **extra})
        constraint = grammars.compile(Rule("tools", call_grammar(LLAMA3, [tool], model.tokenizer)), starts_text=False)
        tokens = model.tokenizer.encode('\n{"name": "f", "parameters": {"b": 1}}')[2:]
        try:
            for token in tokens:
                constraint.accept(token)
        except ValueError:
            pass
        assert constraint.is_complete == taken


def test_a_schema_of_parameters_that_cannot_be_enforced_is_refused(model):
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}}, "x-guidance": {"lenient": True}})
    with pytest.raises(OptionsError, match="option `tools`: cannot be enforced: .*not"):
        Grammars(model.tokenizer, model.tokenizer.eos_ids, 400).compile(Rule("tools", call_grammar(HERMES, [tool], model.tokenizer)))
