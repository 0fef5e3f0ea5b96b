"""Descriptions of tools, beside transformers'."""

from __future__ import annotations

import json
import random

import pytest
from cases.tools import add, weather
from pydantic import BaseModel
from transformers.utils import get_json_schema

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.text.tools import Tool, read_tools


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
    for tool in (ours, expected):
        flags = tool["function"]["parameters"]["properties"].get("flags", {})
        flags.pop("additionalProperties", None)
    assert ours == expected


class Point(BaseModel):
    title: str
    x: int = 0


def draw(points: list[Point], name: str | None = None) -> str:
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
    assert properties["points"]["description"] == "the points, in order"
    assert properties["name"]["description"] == "of the picture"
    assert "title" in tool.parameters["$defs"]["Point"]["properties"]
    assert "title" not in tool.parameters["$defs"]["Point"]
    assert tool.run('{"points": [{"title": "a", "x": 2}]}') == "a 2 None"


def test_a_call_runs_with_checked_arguments():
    tool = Tool.of(weather)
    made = json.loads(tool.run('{"place": "Oslo"}'))
    assert made == {"place": "Oslo", "days": 3, "unit": "celsius"}
    place = '{"place": "x", '
    for bad in ('{"place": 5}', "{}", "[", place + '"town": 1}', place + '"unit": "kelvin"}'):
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


def opaque(x: object, y: random.Random):
    """A parameter without a schema."""


@pytest.mark.parametrize(
    "value, reason",
    [
        (untyped, "untyped has no type hint for a"),
        (variadic, "takes \\*numbers"),
        (later, "later is async"),
        (opaque, "without a JSON schema"),
        (5, "neither a function"),
        (
            {"name": "f", "parameters": {"type": "string"}},
            "parameters of type 'string', expected object",
        ),
        ({"name": "f", "parameters": {"type": ["object", "null"]}}, "expected object"),
        (lambda x: x, "cannot be named"),
        ({"type": "retrieval"}, "neither a function"),
        ({"function": {"name": "a b"}}, "name is 'a b'"),
        ({"function": {"name": "f", "parameters": []}}, None),
        ({"function": {"name": "f", "parameters": "x"}}, "not a JSON schema"),
    ],
)
def test_bad_tools_are_refused(value, reason):
    if reason is None:
        assert read_tools([value])[0].parameters == {"type": "object", "properties": {}}
        return
    with pytest.raises(OptionsError, match=reason):
        read_tools([value])


def test_lists_of_tools_are_bounded():
    for values, reason in (
        ([add, add], "add occurs twice"),
        ("add", "not a list"),
        ([{"function": {"name": f"f{i}"}} for i in range(1025)], "1025 tools"),
        (
            [{"function": {"name": "f", "parameters": {"enum": ["x" * 600000]}}}],
            "524288 characters",
        ),
        ([{"function": {"name": "f", "parameters": {"a": {1}}}}], "not JSON"),
    ):
        with pytest.raises(OptionsError, match=reason):
            read_tools(values)
