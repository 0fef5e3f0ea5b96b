"""Calls in text: every format, in any pieces."""

from __future__ import annotations

import json
import random

import pytest
from mlx_lm.tool_parsers import json_tools, mistral as mistral_tools

from mlx_llama.core.text.tools import FORMATS, Tool, ToolParser
from mlx_llama.core.text.tools.formats import (
    APERTUS,
    FIREFUNCTION,
    FUNCTIONARY_31,
    FUNCTIONARY_32,
    FUNCTOOLS,
    GLM,
    GRANITE_3,
    HARMONY,
    HERMES,
    LLAMA3,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_HEADERS,
    PHI_4_MINI,
    QWEN_CODER,
    SMOLLM2,
    SMOLLM3,
)

from .reading import read

CASES = [
    (
        HARMONY,
        "I look.<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": [1]}<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>'
        "{}<|call|>",
        "I look.",
        [("f", {"a": [1]}), ("g", {})],
    ),
    (
        HARMONY,
        '<|channel|>analysis to=functions.f code<|message|>{"a": "x"}',
        "",
        [("f", {"a": "x"})],
    ),
    (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "Sure.\n",
        [("f", {"a": 'x}"', "b": [1]}), ("g", {})],
    ),
    (
        HERMES,
        '<think>\n{"a"}\n</think>\n\n<tool_call>\n{"arguments": {"a": 1}, "name": '
        '"f"}\n</tool_call>\n',
        '<think>\n{"a"}\n</think>\n\n',
        [("f", {"a": 1})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call> after',
        " after",
        [("f", {"a": 1})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f"}</tool_call>  b <tool_call>{"name": "g"}</tool_call>\n',
        "  b",
        [("f", {}), ("g", {})],
    ),
    (
        SMOLLM2,
        '<tool_call>[\n{"name": "f", "arguments": {"a": 1}},\n{"name": "g", "arguments": {"b": '
        '{"c": "é"}}}\n]</tool_call>',
        "",
        [("f", {"a": 1}), ("g", {"b": {"c": "é"}})],
    ),
    (SMOLLM2, "<tool_call>[]</tool_call>", "", []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"arguments": '
        '{"b": 2}, "name": "g"}]',
        "",
        [("f", {"a": 1}), ("g", {"b": 2})],
    ),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}]', "", [("f", {"a": "]"})]),
    (
        MISTRAL_HEADERS,
        'So: [TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[CALL_ID]x12[ARGS]{}',
        "So: ",
        [("f", {"a": {"b": 1}}), ("g", {})],
    ),
    (MISTRAL_HEADERS, '[TOOL_CALLS]f{"a": 1}', "", [("f", {"a": 1})]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (
        LLAMA3,
        '\n{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (
        LLAMA3,
        '{"type": "function", "name": "f", "parameters": {"a": null}}',
        "",
        [("f", {"a": None})],
    ),
    (
        LLAMA3,
        '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}',
        "",
        [("f", {"a": 1})],
    ),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (
        LLAMA3,
        '<|python_tag|>brave_search.call(query="llamas \\"x\\"")',
        "",
        [("brave_search", {"query": 'llamas "x"'})],
    ),
    (LLAMA3, "<|python_tag|>print(1)\nx = 2", "", [("python", {"code": "print(1)\nx = 2"})]),
    # Inputs of the tests of llama.cpp, vLLM and mlx-lm, changed
    (HERMES, 'a <function=f>{"a": 1}</function> b', "a  b", [("f", {"a": 1})]),
    (LLAMA3, '<function=f>{"a": 1}</function>', "", [("f", {"a": 1})]),
    (
        FUNCTIONARY_31,
        'So: <function=f>{"a": 1}</function><function=g>{}</function>',
        "So: ",
        [("f", {"a": 1}), ("g", {})],
    ),
    (FUNCTIONARY_31, '<|python_tag|>{"code": "x = 1"}', "", [("python", {"code": "x = 1"})]),
    (FUNCTIONARY_31, '<|python_tag|>{"code": NaN}', "", [("python", {"code": '{"code": NaN}'})]),
    (FUNCTIONARY_31, "<|python_tag|>f(a=1)", "", [("f", {"a": 1})]),
    (FUNCTIONARY_32, "all\nHello,\n>>> x", "Hello,\n>>> x", []),
    (FUNCTIONARY_32, 'f\n{"a": 1}', "", [("f", {"a": 1})]),
    (FUNCTIONARY_32, 'all\nHm.>>>f\n{"a": 1}>>>g\n{}', "Hm.", [("f", {"a": 1}), ("g", {})]),
    (FUNCTIONARY_32, "python\nprint(1)\nf(a=2)", "", [("python", {"code": "print(1)\nf(a=2)"})]),
    (FUNCTIONARY_32, 'Hm.>>>f\n{"a": 1}', "Hm.", [("f", {"a": 1})]),
    (FIREFUNCTION, ' functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    (
        FUNCTOOLS,
        'functools[{"name": "f", "arguments": {}}, {"name": "g"}]',
        "",
        [("f", {}), ("g", {})],
    ),
    (
        APERTUS,
        'So <|tools_prefix|>[{"f": {"a": 1}}, {"g": {"b": {"c": "}"}}}]<|tools_suffix|>',
        "So ",
        [("f", {"a": 1}), ("g", {"b": {"c": "}"}})],
    ),
    (APERTUS, '<|tools_prefix|>[{"f": {}}', "", [("f", {})]),
    (PHI_4_MINI, 'functools[{"name": "f", "arguments": {}}]', "", [("f", {})]),
    (PHI_4_MINI, '<|tool_call|>[{"name": "f"}]<|/tool_call|>', "", [("f", {})]),
    (GRANITE_3, '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})]),
    (
        SMOLLM3,
        "<code>\nx = f(a=[1, None])\nprint(g())\n</code>",
        "",
        [("f", {"a": [1, None]}), ("g", {})],
    ),
    (SMOLLM3, "<code>f(a=b)</code> ok", " ok", [("python", {"code": "f(a=b)"})]),
    # Raw line breaks in strings
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny\\\tz"}}</tool_call>',
        "",
        [("f", {"a": "x\ny\tz"})],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\ny\\"}"}</tool_call>',
        "",
        [("f", {"a": "x\ny"})],
    ),
    (
        LLAMA3,
        '<|python_tag|>brave_search.call(query="a "b"\nc")',
        "",
        [("brave_search", {"query": 'a "b"\nc'})],
    ),
]
# No call: all is text
CASES += [
    (form, text, text, [])
    for form, text in (
        (HARMONY, "It goes to=functions.none of<|message|>{}, <|channel|>commentary<|message|>so."),
        (HERMES, 'a <tool_call> b <tool_call>{"x": 1}</tool_call> c <tool_'),
        (HERMES, '<tool_call>{"name": f}</tool_call>'),
        (HERMES, '{"name": "f", "arguments": {}}'),
        (MISTRAL_HEADERS, "[TOOL_CALLS] no call"),
        (LLAMA3, '{"name": "Ada", "parameters": {"a": 1}}'),
        (LLAMA3, '{"answer": {"name": "f"}} ok'),
        (LLAMA3, 'Say { "name": '),
        (LLAMA3, "  {"),
        (HERMES, 'a <function=h>{"a": 1}</function>'),
        (HERMES, "<function="),
        (FUNCTIONARY_31, "<function=f> no call"),
        (FUNCTIONARY_32, "no recipient"),
        (APERTUS, "<|tools_prefix|>no call"),
        (FUNCTOOLS, "import functools\n[1]"),
        (GRANITE_3, '<tool_call>[{"name": "h", "arguments": {}}]'),
        (SMOLLM3, "Use <code>"),
    )
]

TOOLS = [Tool(name, "", {"properties": {}}) for name in ("f", "g", "python")]
KINDS = {"n": "integer", "x": "number", "on": "boolean", "s": "string", "o": "object"}
PROPERTIES = {name: {"type": kind} for name, kind in KINDS.items()}
PROPERTIES |= {"u": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "any": {}}
TYPED = Tool("f", "", {"type": "object", "properties": PROPERTIES})


def tags(**values):
    """Parameters as Qwen's models write them."""
    return "\n".join(f"<parameter={name}>\n{text}\n</parameter>" for name, text in values.items())


@pytest.mark.parametrize(
    "form, text, values",
    [
        (QWEN_CODER, tags(n="5.0", x="5.0"), {"n": 5, "x": 5.0}),
        (QWEN_CODER, tags(n="many"), {"n": "many"}),
        (QWEN_CODER, tags(s="5", u="null"), {"s": "5", "u": None}),
        (QWEN_CODER, tags(u="5", any="[1]"), {"u": "5", "any": [1]}),
        (QWEN_CODER, tags(o="{'a': [True, None]}"), {"o": {"a": [True, None]}}),
        (QWEN_CODER, tags(o="{1, 2}"), {"o": "{1, 2}"}),
        (QWEN_CODER, tags(x="NaN"), {"x": "NaN"}),
        (QWEN_CODER, tags(new="5"), {"new": "5"}),
        (QWEN_CODER, tags(s='\n <b>"</parameter> </b>\n'), {"s": '\n <b>"</parameter> </b>\n'}),
        (
            QWEN_CODER,
            "<parameter=n>5</parameter><parameter=on>True</parameter>",
            {"n": 5, "on": True},
        ),
        (QWEN_CODER, "<parameter=s>\nDallas\n<parameter=n>\n5\n", {"s": "Dallas", "n": 5}),
        (QWEN_CODER, "", {}),
        (
            GLM,
            "<arg_key>n</arg_key>\n<arg_value>5</arg_value><arg_key>s</arg_key><arg_value>a\n</arg_value>",
            {"n": 5, "s": "a\n"},
        ),
        (
            MINIMAX_M2,
            '<parameter name="s">\n</parameter><parameter name="on">false</parameter>',
            {"s": "\n", "on": False},
        ),
    ],
)
def test_values_in_tags_have_the_types_of_their_tool(form, text, values):
    before, after, end = (mark.strip() for mark in form.call)
    text = f"{form.opens}{before}f{after}\n{text}{end}{form.closes} ok"
    for seed in range(20):
        parser = read(form, text, [TYPED], seed)
        assert [json.dumps(call.values()) for call in parser.calls] == [json.dumps(values)]
        assert parser.calls[0].is_complete and parser.text == " ok"


def test_a_string_in_tags_arrives_while_it_is_written():
    parser = ToolParser(QWEN_CODER, [TYPED])
    parser.push("<tool_call><function=f><parameter=s>\nonce")
    assert [new.arguments for new in parser.push(" upon\n")] == [" upon"]
    assert [new.arguments for new in parser.push("a time")] == ["\\na time"]
    assert parser.push("\n</parameter>") == [] and not parser.calls[0].is_complete


def test_the_mark_before_a_function_may_be_missing():
    body = "<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>"
    parser = read(QWEN_CODER, f"Hm. {body}\n<tool_call>\n{body}", [TYPED])
    assert [call.values() for call in parser.calls] == [{"s": "a"}] * 2 and parser.text == "Hm. "
    assert not read(QWEN_CODER, body, []).calls  # no such tool


def test_an_id_of_the_model_is_kept_once():
    text = "[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{}" * 2 + "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}"
    first, second, third = read(MISTRAL_HEADERS, text, TOOLS).calls
    assert first.id == "abcdefgh1" and len({first.id, second.id, third.id}) == 3


@pytest.mark.parametrize("form, text, rest, calls", CASES, ids=range(len(CASES)))
def test_calls_are_read_in_any_pieces(form, text, rest, calls):
    for seed in range(26):
        parser = read(form, text, TOOLS, seed)
        assert parser.text == rest
        assert [(call.name, call.values()) for call in parser.calls] == calls
        assert all(call.is_complete for call in parser.calls)


@pytest.mark.parametrize(
    "form, text, rest, calls",
    [case for case in CASES[:15] if case[0] in (HERMES, MISTRAL) and case[3]],
)
def test_mlx_lm_reads_the_same_calls(form, text, rest, calls):
    if form is HERMES:
        bodies = [part.split("</tool_call>")[0] for part in text.split("<tool_call>")[1:]]
        theirs = [json_tools.parse_tool_call(body) for body in bodies]
    else:
        theirs = mistral_tools.parse_tool_call(text.removeprefix("[TOOL_CALLS]"))
        theirs = theirs if isinstance(theirs, list) else [theirs]
    arguments = [call.get("arguments", {}) for call in theirs]
    arguments = [json.loads(call) if isinstance(call, str) else call for call in arguments]
    assert [(call["name"], values) for call, values in zip(theirs, arguments)] == calls


def test_a_call_that_is_cut_short_is_kept_as_far_as_it_came():
    parser = read(HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "unfin', TOOLS)
    assert [(call.name, call.arguments, call.is_complete) for call in parser.calls] == [
        ("f", '{"a": "unfin', False)
    ]
    with pytest.raises(ValueError):
        parser.calls[0].values()
    text = '<tool_call>\n{"name": "f"'
    assert read(HERMES, text, TOOLS).text == text


def test_a_further_call_that_is_cut_before_its_name_is_no_text():
    for form, text in (
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name"'),
        (SMOLLM2, '<tool_call>[{"name": "f"}, '),
        (LLAMA3, '{"name": "f", "parameters": {}}; {"na'),
    ):
        parser = read(form, text, TOOLS)
        assert parser.text == "" and [call.name for call in parser.calls] == ["f"]
        assert parser.calls[0].is_complete


def test_arguments_arrive_while_they_are_written():
    parser = ToolParser(HERMES)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "once')
    assert [delta.arguments for delta in parser.push(" upon")] == [" upon"]
    assert [delta.arguments for delta in parser.push(' a time"}')] == [' a time"}']
    assert parser.push("}</tool_call>") == [] and parser.calls[0].is_complete


def test_hostile_text_takes_linear_time():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"{[<tool_call>' * 20000
    assert len(read(HERMES, text, TOOLS).calls[0].arguments) > 200000
    for form, hostile in (
        (HERMES, "<tool_call>" * 20000),
        (LLAMA3, "<|python_tag|>" + "f.call(" * 20000),
        (HERMES, "<tool_call>[" * 9000),
        (MISTRAL, "[TOOL_CALLS]" * 20000),
        (LLAMA3, '{"name":' * 20000),
        (HERMES, "<tool_call>{" + "[" * 100000),
    ):
        parser = ToolParser(form)
        for at in range(0, len(hostile), 997):
            parser.push(hostile[at : at + 997])
        parser.finish()
        assert parser.text == hostile and not parser.calls


FRAGMENTS = (
    "<tool_call> </tool_call> [TOOL_CALLS] f[ARGS] <|python_tag|> python.call(a=1) } [ ] text "
    "<tool <function=f> </function> </parameter> <code>f(a=1) </code> functools[ <|tool_call|> "
    "<arg_key>a</arg_key> <arg_value>1 </arg_value>"
).split()
FRAGMENTS += ['{"name": "f", ', '"a": "}"', '"arguments": {', '"parameters": {', '{"name": "g"}']
FRAGMENTS += ["<|tool_call>call:f{", "a:", '<|"|>', "<tool_call|>", "<|tool_call_start|>[f("]
FRAGMENTS += ["a='", "')]", "<|tool_call_end|>", "True"]
FRAGMENTS += [", ", "; ", " \n", '"', "\\", '"id": "x", ', "\n<parameter=a>", ">>>f\n", "f\n"]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
def test_pieces_do_not_matter(form):
    """Neither for broken calls nor for text around them."""
    source = random.Random(3)
    for _ in range(400):
        text = "".join(source.choices(FRAGMENTS, k=source.randint(2, 9)))
        whole, pieces = read(form, text, TOOLS), read(form, text, TOOLS, source.randint(1, 99))
        assert whole.text == pieces.text, text
        assert [(call.name, call.arguments, call.is_complete) for call in whole.calls] == [
            (call.name, call.arguments, call.is_complete) for call in pieces.calls
        ], text
