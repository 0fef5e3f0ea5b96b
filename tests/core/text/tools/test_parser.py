"""Calls in text: every format, in any pieces."""

from __future__ import annotations

import json
import random

import pytest
from mlx_lm.tool_parsers import json_tools, mistral as mistral_tools

from mlx_llama.core.text.tools import FORMATS, Tool, ToolParser
from mlx_llama.core.text.tools.formats import HERMES, LLAMA3, MISTRAL, MISTRAL_HEADERS, SMOLLM2

CASES = [
    (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": '
        '[1]}}\n</tool_call>\n<tool_call>\n{"name": "g", '
        '"arguments": {}}\n</tool_call>',
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
        HERMES,
        'a <tool_call> b <tool_call>{"x": 1}</tool_call> c <tool_',
        'a <tool_call> b <tool_call>{"x": 1}</tool_call> c <tool_',
        [],
    ),
    (HERMES, '<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": f}</tool_call>', []),
    (HERMES, '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
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
    (MISTRAL_HEADERS, "[TOOL_CALLS] no call", "[TOOL_CALLS] no call", []),
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
    (
        LLAMA3,
        '{"name": "Ada", "parameters": {"a": 1}}',
        '{"name": "Ada", "parameters": {"a": 1}}',
        [],
    ),
    (LLAMA3, '{"answer": {"name": "f"}} ok', '{"answer": {"name": "f"}} ok', []),
    (LLAMA3, 'Say { "name": ', 'Say { "name": ', []),
    (LLAMA3, "  {", "  {", []),
]


def read(form, text, source=None):
    """The parser after the text in random pieces, or whole; checks that its news are its state."""
    tools = [Tool(name, "", {"properties": {}}) for name in ("f", "g", "python")]
    parser, news, at = ToolParser(form, tools), [], 0
    while at < len(text):
        count = source.randint(1, 5) if source else len(text)
        news += parser.push(text[at : at + count])
        at += count
    news += parser.finish()
    assert "".join(one for one in news if isinstance(one, str)) == parser.text
    for index, call in enumerate(parser.calls):
        first, *others = [one for one in news if not isinstance(one, str) and one.index == index]
        assert (
            (first.id, first.name, first.arguments) == (call.id, call.name, "")
            and len(call.id) == 9
            and call.id.isalnum()
        )
        assert "".join(one.arguments for one in others) == call.arguments and not any(
            one.id or one.name for one in others
        )
    return parser


@pytest.mark.parametrize("form, text, rest, calls", CASES, ids=range(len(CASES)))
def test_calls_are_read_in_any_pieces(form, text, rest, calls):
    for seed in (None, *range(25)):
        parser = read(form, text, None if seed is None else random.Random(seed))
        assert parser.text == rest
        assert [(call.name, call.values()) for call in parser.calls] == calls and all(
            call.is_complete for call in parser.calls
        )


@pytest.mark.parametrize(
    "form, text, rest, calls",
    [case for case in CASES if case[0] in (HERMES, MISTRAL, MISTRAL_HEADERS) and case[3]],
)
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
    assert (
        not found
        or not read_alike
        or [(one["name"], given) for one, given in zip(found, arguments)] == calls
    )


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
    assert [(call.name, call.arguments, call.is_complete) for call in parser.calls] == [
        ("f", '{"a": "unfin', False)
    ]
    with pytest.raises(ValueError):
        parser.calls[0].values()
    assert read(HERMES, '<tool_call>\n{"name": "f"').text == '<tool_call>\n{"name": "f"'


def test_a_further_call_that_is_cut_before_its_name_is_no_text():
    for form, text in (
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name"'),
        (SMOLLM2, '<tool_call>[{"name": "f"}, '),
        (LLAMA3, '{"name": "f", "parameters": {}}; {"na'),
    ):
        parser = read(form, text)
        assert (
            parser.text == ""
            and [call.name for call in parser.calls] == ["f"]
            and parser.calls[0].is_complete
        )


def test_arguments_arrive_while_they_are_written():
    parser = ToolParser(HERMES)
    parser.push('<tool_call>{"name": "f", "arguments": {"text": "once')
    assert [one.arguments for one in parser.push(" upon")] == [" upon"]
    assert [one.arguments for one in parser.push(' a time"}')] == [' a time"}']
    assert parser.push("}</tool_call>") == [] and parser.calls[0].is_complete


def test_hostile_text_takes_linear_time():
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + '\\"{[<tool_call>' * 20000
    assert len(read(HERMES, text).calls[0].arguments) > 200000
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


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "f[ARGS]",
    "<|python_tag|>",
    "python.call(a=1)",
    '{"name": "f", ',
    '"a": "}"',
    '"arguments": {',
    '"parameters": {',
    '{"name": "g"}',
    "}",
    "[",
    "]",
    ", ",
    "; ",
    " \n",
    '"',
    "\\",
    "text",
    "<tool",
    '"id": "x", ',
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)
def test_pieces_do_not_matter(form):
    """Neither for broken calls nor for text around them."""
    source = random.Random(3)
    for _ in range(400):
        text = "".join(source.choices(FRAGMENTS, k=source.randint(2, 9)))
        whole, pieces = read(form, text), read(form, text, source)
        assert whole.text == pieces.text, text
        assert [(call.name, call.arguments, call.is_complete) for call in whole.calls] == [
            (call.name, call.arguments, call.is_complete) for call in pieces.calls
        ], text
