"""Numbers, counts and names in schemas: what ends by itself is valid for jsonschema, which reads
exact integers, or the schema is refused in one line.
"""

from __future__ import annotations

import enum
import json
import random
import signal
from decimal import Decimal
from typing import Literal

import jsonschema
import pytest
from cases.schemas import llama as llama, walk
from pydantic import BaseModel

from mlx_llama.core.answers import compiler_process
from mlx_llama.core.answers.compiler_process import CompilerFault, check_rule
from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import resolve
from mlx_llama.core.text.tools import Tool
from mlx_llama.core.text.tools.formats import FORMATS

SNOWFLAKE = 175928847299117063  # an id of a chat service; its double is ...056
INT64, UINT64 = 2**63, 2**64
FLOAT32, FLOAT64 = 3.4028234663852886e38, 1.7976931348623157e308


def write_texts(grammars, schema, count=12) -> tuple[list[str], str]:
    """Texts of a schema, checked, and its relaxed keywords."""
    wanted = Rule("schema", json.dumps(schema))
    relaxed = grammars.compile(wanted).relaxed
    texts = [walk(grammars, wanted, random.Random(seed), longest=300) for seed in range(count)]
    ended = [text for text in texts if text is not None]
    for text in ended:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    assert ended
    return ended, relaxed


@pytest.mark.parametrize(
    "value",
    [
        SNOWFLAKE, -SNOWFLAKE, 2**53 + 1, INT64 - 1, INT64, -INT64, -INT64 - 1, UINT64 - 1,
        10**30, -1e19, 5.945754293322873e-10, 6.966031489251212e18, 1e300, 0.1, 12, 2**53,
        {"id": [SNOWFLAKE, 'é"\\/\n']},
    ],
)  # fmt: skip
def test_a_constant_is_written_exactly(value, llama):
    for schema in ({"const": value}, {"enum": [value]}):
        texts, relaxed = write_texts(llama, schema, 1)
        assert [json.loads(text) for text in texts] == [value] and not relaxed


@pytest.mark.parametrize(
    "schema, values",
    [
        ({"allOf": [{"type": "integer"}, {"const": SNOWFLAKE}]}, [SNOWFLAKE]),
        ({"type": "integer", "allOf": [{"enum": [SNOWFLAKE, "x"]}]}, [SNOWFLAKE]),
        ({"allOf": [{"enum": [SNOWFLAKE, 1]}, {"const": 1, "title": "One"}]}, [1]),
        (
            {
                "type": "object",
                "properties": {"a": {"const": -INT64}, "b": {"const": 1}},
                "required": ["a"],
                "minProperties": 1,
            },
            [{"a": -INT64}, {"a": -INT64, "b": 1}],
        ),
    ],
)
def test_constants_beside_keywords_that_add_nothing_are_written_exactly(schema, values, llama):
    schema = {**schema, **({"additionalProperties": False} if "properties" in schema else {})}
    texts, relaxed = write_texts(llama, schema)
    assert all(json.loads(text) in values for text in texts) and not relaxed


class Color(enum.IntEnum):
    RED = SNOWFLAKE
    GREEN = -(2**63)


class Order(BaseModel):
    id: Literal[SNOWFLAKE, 9007199254740993]  # type: ignore[valid-type]
    note: str | None = None
    colors: list[Color]
    again: Color | None = None


def test_constants_within_types_are_written_exactly(llama):
    schema = resolve({"schema": Order}).options.schema
    seen = set()
    for seed in range(60):
        text = walk(llama, Rule("schema", schema.text), random.Random(seed))
        if text is not None:
            order = schema.parse(text)
            assert isinstance(order, Order)
            jsonschema.Draft202012Validator(schema.as_dict()).validate(json.loads(text))
            seen |= {order.id, order.again, order.note is None, *order.colors}
    assert seen >= {SNOWFLAKE, 9007199254740993, Color.RED, Color.GREEN, None, True, False}


def test_lists_of_exact_constants_have_their_lengths(llama):
    items = {"enum": [SNOWFLAKE, "x", None]}
    for least, most in ((0, 2), (1, None), (2, 3), (0, 0), (3, 3)):
        schema = {"type": "array", "items": items, "minItems": least}
        schema |= {} if most is None else {"maxItems": most}
        lengths = {len(json.loads(text)) for text in write_texts(llama, schema, 40)[0]}
        assert min(lengths) == least and (most is None or max(lengths) == most)


@pytest.mark.parametrize(
    "more, changed",
    [
        ({"minimum": -INT64, "maximum": INT64 - 1}, "maximum, minimum"),
        ({"minimum": 0, "maximum": UINT64 - 1}, "maximum"),
        ({"minimum": 2**53 + 1}, "minimum"),
        ({"exclusiveMaximum": -(2**53) - 1}, "exclusiveMaximum"),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 9}, "maximum, minimum"),
        ({"minimum": 10**18}, "maximum"),
        ({"maximum": -(10**18)}, "minimum"),
        ({"minimum": -FLOAT64, "maximum": FLOAT64}, "maximum, minimum"),
        ({"minimum": -FLOAT32, "maximum": FLOAT32}, "maximum, minimum"),
        ({"minimum": -(2**53), "maximum": 2**53}, ""),
        ({"exclusiveMinimum": True, "minimum": 5}, ""),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_stay_within_large_bounds(kind, more, changed, llama):
    if more.get("exclusiveMinimum") is True:  # of draft 4
        wanted = Rule("schema", json.dumps({"type": kind, **more}))
        text = walk(llama, wanted, random.Random(0))
        jsonschema.Draft4Validator({"type": kind, **more}).validate(json.loads(text))
        return
    assert write_texts(llama, {"type": kind, **more}, 20)[1] == changed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": INT64},
        {"type": "integer", "minimum": -INT64, "maximum": -INT64},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1},
        {"allOf": [{"type": "integer"}, {"minimum": -1e19, "maximum": -1e19}]},
        {"allOf": [{"enum": [SNOWFLAKE, 1]}, {"enum": [SNOWFLAKE]}]},
        {"type": "integer", "allOf": [{"type": "number"}, {"const": SNOWFLAKE}]},
        {"type": "object", "properties": {"a": {"const": -INT64}}, "minProperties": 1},
        {"type": "integer", "multipleOf": SNOWFLAKE},
        {"type": "integer", "multipleOf": 2**32 - 1},
        {"type": "integer", "allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]},
        {"type": "string", "const": SNOWFLAKE},
    ],
)
def test_numbers_that_cannot_be_written_exactly_are_refused(schema, llama):
    with pytest.raises(OptionsError) as caught:
        llama.compile(Rule("schema", json.dumps(schema)))
    message = str(caught.value)
    assert "cannot be enforced" in message and "\n" not in message and len(message) < 400


def test_multiples_are_multiples(llama):
    for step in (7, 0.01, 2.5):
        wanted = Rule("schema", json.dumps({"type": "number", "multipleOf": step}))
        texts = [walk(llama, wanted, random.Random(seed), longest=60) for seed in range(8)]
        for text in filter(None, texts):
            assert Decimal(text) % Decimal(str(step)) == 0


def test_counts_that_no_answer_reaches_are_dropped(llama):
    for kind, name in (("string", "maxLength"), ("array", "maxItems"), ("object", "maxProperties")):
        for count in (2**32, 2**70):
            assert write_texts(llama, {"type": kind, name: count})[1] == name
    texts, relaxed = write_texts(llama, {"type": "string", "maxLength": 2.0})
    assert max(map(len, texts)) <= 4 and not relaxed  # 2.0 is an integer in JSON


@pytest.mark.parametrize(
    "names",
    [
        True, {"type": "string"}, {"type": "string", "title": "Key"}, {"enum": ["a", "b"]},
        {"const": "a"}, {"pattern": "^[ab]{2}$"}, {"minLength": 2, "maxLength": 3},
        {"$ref": "#/$defs/Key"},
    ],
)  # fmt: skip
def test_names_of_properties_are_enforced(names, llama):
    values = {"type": "object", "propertyNames": names, "$defs": {"Key": {"enum": ["r", "g"]}}}
    for more in ({"additionalProperties": {"type": "integer"}}, {}):
        assert not write_texts(llama, {**values, **more}, 20)[1]
    if names == {"enum": ["a", "b"]}:
        known = {"properties": {"b": {"const": 1}, "c": {}}, "required": ["b"]}
        texts, _ = write_texts(llama, {**values, **known}, 20)
        assert any("a" in json.loads(text) for text in texts)


def test_names_that_cannot_be_enforced_are_noted_or_refused(llama):
    schema = json.dumps({"type": "object", "propertyNames": {"format": "strange"}})
    assert "propertyNames" in llama.compile(Rule("schema", schema, is_lenient=True)).relaxed
    with pytest.raises(OptionsError, match="propertyNames: Unknown format: strange"):
        llama.compile(Rule("schema", schema))


# Nested counts


@pytest.mark.parametrize(
    "option, text",
    [
        ("regex", "(a{1003}){991}"),
        ("regex", "((a{100}){100}){100}"),
        ("regex", "a{1000}{1000}"),
        ("regex", "(?:[^\\]({]{1,999}|b){2,999}"),
        ("regex", "a" * 800 + "([[a])]b{1003}){991}"),
        ("regex", "a{99999999999999999999}"),
        ("schema", json.dumps({"type": "string", "pattern": "^(a{1003}){991}$"})),
        ("schema", json.dumps({"patternProperties": {"(a{1003}){991}": {}}})),
        ("schema", json.dumps({"propertyNames": {"pattern": "(a{1003}){991}"}})),
        ("grammar", "start: /(a{1003}){991}/"),
        ("grammar", 'start: A\nA[lazy]: B{1000}\nB.1: C{1,1000}\nC: "a"'),
        ("grammar", 'start: A\nA: (B ~ 1000 "x") ~ 1..1000\nB: /[ab]/'),
        ("grammar", 'start: %json {"type": "string", "pattern": "(a{1003}){991}"}'),
    ],
)
def test_nested_counts_are_refused_before_they_are_expanded(option, text, llama, monkeypatch):
    monkeypatch.setattr(llama, "_match", None)  # nothing is compiled
    with pytest.raises(OptionsError, match=f"option `{option}`: .*counts written out"):
        llama.compile(Rule(option, text), seconds=None)


@pytest.mark.parametrize(
    "option, text",
    [
        ("regex", "([ab]{300}){300}"),
        ("regex", "[ab]{100000}"),
        ("regex", r"\d{4}-\d{2}-\d{2}(\{a{1003}\}|[(]b{991})"),
        ("grammar", 'root ::= "a"{100000}'),
        ("grammar", 'start: ("a{1000}b"{1003}){991} // (a{1003}){991}'),
        ("schema", json.dumps({"items": {"minItems": 1000}, "minItems": 1000})),
    ],
)
def test_other_counts_are_compiled(option, text, llama):
    llama.compile(Rule(option, text))


# The process that compiles


def test_a_compiler_that_died_is_told_from_one_that_is_slow():
    segfault = {"json_schema": {"const": -INT64}}
    with pytest.raises(CompilerFault, match=r"ended the process that compiled it \(SIGSEGV\)"):
        check_rule(segfault, 20)
    check_rule({"lark_grammar": "start: /a/"}, 20)  # a new process
    child = compiler_process._child
    assert child is not None and child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    check_rule({"lark_grammar": "start: /a/"}, 20)


# Tools


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_forced_calls_carry_exact_numbers(form, llama):
    """The constraint takes the number, and not its double."""
    parameters = {
        "type": "object",
        "properties": {"id": {"enum": [SNOWFLAKE]}, "to": {"$ref": "#/$defs/To"}},
        "required": ["id", "to"],
        "$defs": {"To": {"type": "object", "properties": {"x": {"const": -INT64}}}},
    }
    grammar = form.grammar([Tool("send", "", parameters)], llama.tokenizer)
    text = walk(llama, Rule("tools", grammar), random.Random(1))
    assert text is not None and f"{SNOWFLAKE}" in text


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_schemas_of_forced_tools_are_relaxed_or_refused_by_name(form, llama):
    tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    inner = {"type": "object", "properties": {"tags": tags}}
    good = Tool("good", "", {"type": "object", "properties": {"a": {"type": "integer"}}})
    tools = [good, Tool("label", "", {"type": "object", "properties": {"filter": inner}})]
    grammar = form.grammar(tools, llama.tokenizer)
    assert llama.compile(Rule("tools", grammar, is_lenient=True)).relaxed == "uniqueItems"
    if form.name == "gemma4":  # whose values are not JSON
        assert llama.compile(Rule("tools", grammar)).relaxed == "uniqueItems"
        return
    with pytest.raises(OptionsError, match=r"label\W+filter\.tags: Unimplemented keys"):
        llama.compile(Rule("tools", grammar))
    missing = Tool("find", "", {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}})
    tools = [good, missing]
    if "value_" not in (grammar := form.grammar(tools, llama.tokenizer)):  # free text otherwise
        with pytest.raises(OptionsError, match=r"find\W+a: Pointer .* does not exist"):
            llama.compile(Rule("tools", grammar, is_lenient=True))
