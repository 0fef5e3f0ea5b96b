"""Grammars: what ends by itself matches, judged by jsonschema, re and regex; what cannot be
enforced is refused.
"""

from __future__ import annotations

import json
import lzma
import random
import re

import jsonschema
import numpy as np
import pytest
import regex
from cases.schemas import DATA, allowed, llama, random_schema, walk  # noqa: F401
from cases.texts import KINDS, load_folder
from making import make_tokenizer, refusal
from pydantic import BaseModel

from mlx_llama.core.answers import grammar
from mlx_llama.core.answers.grammar import Constraint, Grammars, Rule, choice
from mlx_llama.core.answers.schema import MAX_DEPTH, Schema
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import resolve


@pytest.fixture(scope="module", params=KINDS)
def toy_grammars(request, tmp_path_factory):
    """Small vocabularies of each kind, padded by the model."""
    tokenizer = load_folder(
        make_tokenizer(tmp_path_factory.mktemp(request.param), request.param), vocab_size=403
    )
    # two, as Llama 3.1 has three
    return Grammars(tokenizer, (*(tokenizer.eos_ids or (2,)), tokenizer.bos_id), 403)


def rule(**options) -> Rule:
    built = Rule.of(resolve(options).options)
    assert built is not None
    return built


# What ends by itself matches


@pytest.mark.slow
def test_texts_of_500_random_schemas_validate(llama):
    ended = refused = 0
    for seed in range(500):
        source = random.Random(seed)
        schema = random_schema(source)
        validator = jsonschema.Draft202012Validator(schema)
        validator.check_schema(schema)
        try:
            wanted = rule(schema=schema)
            llama.compile(wanted)
        except OptionsError as error:
            assert "option `schema`: cannot be enforced: " in str(error)
            refused += 1
            continue
        for _ in range(2):
            text = walk(llama, wanted, source)
            if text is not None:
                ended += 1
                validator.validate(json.loads(text))
    assert ended > 800 and refused < 60


def test_the_json_schema_test_suite_finds_nothing_taken_that_is_invalid(llama):
    """Of each schema that llguidance takes, the suite's valid instances may be refused (order of
    properties), invalid ones are.
    """
    suite = json.loads(lzma.decompress((DATA / "json-schema-test-suite.json.xz").read_bytes()))
    taken = accepted = valid_ones = 0
    for _, _, schema, tests in suite:
        try:
            wanted = rule(schema=schema)
            llama.compile(wanted, starts_text=False)
        except OptionsError:
            continue
        taken += 1
        for instance, valid in tests:
            constraint = llama.compile(wanted, starts_text=False)
            matches = spell(constraint, llama, json.dumps(instance, ensure_ascii=False))
            assert valid or not matches, (schema, instance)
            accepted += matches
            valid_ones += valid
    assert taken > 150 and accepted > 0.9 * valid_ones


def spell(constraint: Constraint, grammars: Grammars, text: str) -> bool:
    """True if the constraint accepts exactly this text, token by token."""
    for token in grammars.tokenizer.encode("\n" + text)[2:]:  # a text after a newline gets no space
        if constraint.is_finished or token not in allowed(constraint, grammars):
            return False
        constraint.accept(token)
    return constraint.is_complete


REGEXES = [r"(yes|no)", r" (yes| no)\n", r"[ ]{0,3}x", r"[0-9]{3}-[a-f]+", r"(a|b)*abb"]
REGEXES += [r'"[^"\n]*"/\\', r" ?[a-z]+ [a-z]+", r"é{2}[🦙ü]?", r"</s><s>( </s>)?"]


@pytest.mark.parametrize("starts_text", [True, False])
def test_texts_match_their_regular_expression_on_every_tokenizer(toy_grammars, starts_text):
    """Leading spaces included, which some decoders drop."""
    source, ended = random.Random(0), 0
    for pattern in REGEXES:
        for forces in (True, False):
            for _ in range(8):
                how = dict(starts_text=starts_text, forces=forces)
                text = walk(toy_grammars, rule(regex=pattern), source, **how)
                assert text is None or re.fullmatch(pattern, text), (pattern, text)
                ended += text is not None
    assert ended > 0.9 * len(REGEXES) * 16


@pytest.mark.parametrize(
    "pattern",
    ["(yes|no|nothing)", "[a-z ]{3,5}[.]", "Once( upon a time)* the", r"[0-9]+(\.[0-9]+)?"],
)
def test_a_mask_holds_exactly_the_tokens_that_can_go_on(pattern, toy_grammars):
    """Judged by the package regex, which matches partially. Of tokens with the same text (a and
    <0x61>) one is enough.
    """
    source, texts = random.Random(pattern), toy_grammars.tokenizer.token_bytes()
    ascii_texts = {
        token: text.decode() for token, text in enumerate(texts) if text and text.isascii()
    }
    for _ in range(5):
        constraint, text = toy_grammars.compile(rule(regex=pattern), starts_text=False), ""
        for _ in range(8):
            ids = [int(i) for i in allowed(constraint, toy_grammars) if i not in toy_grammars.eos]
            expected = {
                more
                for more in ascii_texts.values()
                if regex.fullmatch(pattern, text + more, partial=True)
            }
            if forced := constraint.forced():
                # of the ways to write what is certain, the tokenizer's own
                expected = {ascii_texts[forced[0]]}
            assert {ascii_texts[token] for token in ids} == expected
            if not ids:
                break
            token = source.choice(ids)
            constraint.accept(token)
            text += ascii_texts[token]


def test_a_choice_and_both_kinds_of_grammars_say_the_same(toy_grammars):
    texts = ["red", "dark red", 'a "quote"\n', " é"]
    gbnf = 'root ::= "red" | "dark " colour | "a \\"quote\\"\\n" | " é"\ncolour ::= "red"'
    source = random.Random(3)
    for wanted in (choice(texts), gbnf):
        written = {walk(toy_grammars, rule(grammar=wanted), source) for _ in range(40)}
        assert written == set(texts)


def test_json_is_written_as_json_dumps_does(llama):
    instance = {"name": "x", "list": [1, {"a": None}], "n": 2.5}
    schema = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in instance.items()},
        "required": list(instance),
        "additionalProperties": False,
    }
    assert walk(llama, rule(schema=schema), random.Random(0)) == json.dumps(instance)


def test_any_object_parses(llama):
    written = [
        walk(llama, Rule("schema", '{"type": "object"}'), random.Random(seed)) for seed in range(40)
    ]
    ended = [json.loads(text) for text in written if text is not None]
    assert len(ended) > 10 and all(isinstance(value, dict) for value in ended)


# Forced stretches


def test_forced_tokens_are_the_tokenizers_own(toy_grammars):
    """The whole text where there is one way only, split as the tokenizer splits it."""
    tokenizer = toy_grammars.tokenizer
    text = "Once upon a time there was a llama"
    constraint = toy_grammars.compile(rule(regex=text), starts_text=False)
    forced = constraint.forced()
    assert b"".join(tokenizer.token_bytes()[token] for token in forced) == text.encode()
    start = tokenizer.encode("\n") if not tokenizer.byte_level else []
    assert start + forced == tokenizer.encode(text if tokenizer.byte_level else "\n" + text)
    assert not constraint.is_finished
    for token in forced:
        constraint.accept(token)
    assert constraint.is_finished and constraint.is_complete and constraint.forced() == []
    assert set(allowed(constraint, toy_grammars)) <= set(toy_grammars.eos)


def test_control_tokens_in_forced_text_are_text(toy_grammars):
    tokenizer = toy_grammars.tokenizer
    name = next(name for name, token in tokenizer.special_ids.items() if token in toy_grammars.eos)
    constraint = toy_grammars.compile(rule(schema={"const": f"a{name}b"}), starts_text=False)
    forced = constraint.forced()
    assert forced and not set(forced) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(forced).strip() == f'"a{name}b"'


def test_special_and_unknown_tokens_and_padding_are_never_allowed(toy_grammars):
    tokenizer = toy_grammars.tokenizer
    ids = set(allowed(toy_grammars.compile(rule(regex="(?s:.)*")), toy_grammars))
    never = set(tokenizer.special_ids.values()) | set(range(tokenizer.vocab_size, 403))
    assert ids & never == set(toy_grammars.eos)
    texts = tokenizer.token_bytes()
    assert {texts[token] for token in ids} >= {text for text in texts if text and text.isascii()}


def test_a_grammar_may_name_special_tokens(toy_grammars):
    """And gets these, not the model's padding."""
    specials = toy_grammars.tokenizer.special_ids.items()
    name, token = next(item for item in specials if item[1] not in toy_grammars.eos)
    wanted = rule(grammar=f'start: <[{token}]> | "b" "c"?')
    constraint = toy_grammars.compile(wanted, starts_text=False)
    texts = toy_grammars.tokenizer.token_bytes()
    ids = [int(token_id) for token_id in allowed(constraint, toy_grammars)]
    others = {texts[token_id] for token_id in ids if token_id != token}
    assert token in ids and len(ids) > 1 and others <= {b"b", b"bc"}, name


# State


def test_constraints_of_one_rule_do_not_share_state(llama):
    first, second = llama.compile(rule(regex="(ab|cd)e")), llama.compile(rule(regex="(ab|cd)e"))
    before = allowed(second, llama)
    first.accept(int(before[0]))
    assert np.array_equal(allowed(second, llama), before)
    assert not np.array_equal(allowed(first, llama), before)


def test_a_token_that_is_not_allowed_is_an_error(llama):
    constraint = llama.compile(rule(regex="yes"))
    with pytest.raises(ValueError, match="token 5000 after 0 others does not match the regex"):
        constraint.accept(5000)


def test_compiled_rules_are_kept_up_to_their_memory(llama, monkeypatch):
    """Many small rules, or few large ones; the newest stays."""
    small = [rule(regex=f"kept{number}") for number in range(12)]
    large = rule(schema={"enum": [f"text {number}" for number in range(3000)]})
    for wanted in small:
        llama.compile(wanted)
    assert {key for key, _ in llama.compiled} >= set(small)
    monkeypatch.setattr(grammar, "KEPT_BYTES", 3 << 20)
    llama.compile(large)
    assert [key for key, _ in llama.compiled][-1] == large
    assert llama.compiled_bytes <= 3 << 20 and small[0] not in {key for key, _ in llama.compiled}
    monkeypatch.setattr(grammar, "KEPT_BYTES", 1 << 20)
    llama.compile(large)
    assert [key for key, _ in llama.compiled] == [large]


# Refusals


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"schema": {"uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]: leave that out'),
        ({"schema": {"not": {}, "x-guidance": {"lenient": True}}}, 'Unimplemented keys: ["not"]'),
        ({"schema": {"type": "intege"}}, "Invalid type: intege"),
        ({"schema": {"$ref": "http://example.org/x"}}, "http://example.org/x"),
        ({"schema": {"$ref": "file:///etc/passwd"}}, "file:///etc/passwd"),
        ({"schema": {"type": "integer", "minimum": 5, "maximum": 2}}, "Unsatisfiable"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "a("}, "unclosed group"),
        ({"regex": r"[^\s\S]"}, "no text matches"),
        ({"grammar": "root ::= ("}, "Expected ')'"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": "root ::= " + "(" * 5000}, "GBNF"),
        ({"grammar": "just a text"}, "a rule start"),
        ({"grammar": '{"grammars": []}'}, "a rule start"),
        ({"regex": "(" * 4000 + ")" * 4000}, "option `regex`"),
    ],
)
def test_a_rule_that_cannot_be_enforced_is_refused_with_reason_and_remedy(options, reason, llama):
    message = refusal(lambda: llama.compile(rule(**options)), kind=OptionsError)
    assert reason in message and f"option `{next(iter(options))}`: cannot be enforced: " in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"schema": 5}, "must be a JSON schema (an object)"),
        ({"schema": "{"}, "must be valid JSON"),
        ({"schema": object()}, "pydantic"),
        ({"schema": {"a": {1}}}, "JSON values only: set is none"),
        ({"schema": False}, "false allows none"),
        ({"schema": [1]}, "an object"),
        ({"schema": {"enum": ["x" * 70000]}}, "at most 65536 characters"),
        ({"schema": "[" * 100000}, "at most 65536 characters"),
        ({"schema": {"const": float("nan")}}, "JSON values only"),
        ({"schema": {"const": "\ud800"}}, "valid Unicode"),
        ({"regex": ""}, "1 to 8192 characters"),
        ({"regex": "x" * 9000}, "1 to 8192 characters, not 9000"),
        ({"grammar": "x" * 17000}, "1 to 16384 characters"),
        ({"regex": 5}, "string"),
        ({"schema": {}, "regex": "a"}, "the only constraint on the answer: schema is given too"),
        ({"regex": "a", "grammar": "b"}, "regex is given too"),
        ({"schema": {}, "grammar": "b"}, "schema is given too"),
    ],
)
def test_bad_options_are_refused_before_anything_is_compiled(options, reason):
    with pytest.raises(OptionsError) as caught:
        resolve(options)
    message = str(caught.value)
    assert reason in message and "\n" not in message and len(message) < 400


def test_a_deep_schema_is_refused():
    deep: dict = {}
    for _ in range(MAX_DEPTH - 1):
        deep = {"items": deep}
    assert resolve({"schema": deep}).options.schema is not None
    with pytest.raises(OptionsError, match=f"at most {MAX_DEPTH} levels deep, not {MAX_DEPTH + 1}"):
        resolve({"schema": {"items": deep}})
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(OptionsError, match="levels deep"):
        resolve({"schema": deep})


def test_a_rule_that_takes_long_to_compile_is_refused_in_time(llama):
    slow = {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 60)]}
    with pytest.raises(OptionsError, match="cannot be compiled within 0.3 s"):
        llama.compile(rule(schema=slow), seconds=0.3)
    llama.compile(rule(regex="quick"), seconds=20)  # a new process


def test_a_rule_that_grows_too_complex_ends_with_an_error(llama):
    # A schema without instances, all of whose text is forced
    inner = {"type": "object", "properties": {"b": {"$ref": "#/$defs/a"}}, "required": ["b"]}
    endless = {"$ref": "#/$defs/a", "$defs": {"a": inner}}
    message = "option `schema`: became too complex after 1 tokens .*: simplify it"
    with pytest.raises(OptionsError, match=message):
        walk(llama, rule(schema=endless), random.Random(0))


def test_a_model_without_end_token_cannot_be_constrained(llama):
    with pytest.raises(OptionsError, match="need a model with an end token"):
        Grammars(llama.tokenizer, (), 32000).compile(rule(regex="a"))
    with pytest.raises(OptionsError, match="a choice of no texts"):
        choice([])


# Python values


class Person(BaseModel):
    name: str
    age: int | None = None


class Open(BaseModel, extra="allow"):
    properties: dict[str, Person] = {"properties": Person(name="x")}


CLOSED = {**Person.model_json_schema(), "additionalProperties": False}


def test_a_type_allows_no_keys_that_it_would_ignore():
    schema = Schema.of(Open).as_dict()
    assert schema["additionalProperties"] is True and schema["$defs"]["Person"] == CLOSED
    wanted = Open.model_json_schema()["properties"]
    assert schema["properties"]["properties"] == wanted["properties"]


def test_a_pydantic_model_gives_schema_and_instance(llama):
    schema = resolve({"schema": Person}).options.schema
    assert schema.as_dict() == CLOSED
    text = walk(llama, Rule("schema", schema.text), random.Random(1))
    assert isinstance(schema.parse(text), Person)
    assert schema.parse('{"name": "Ada", "age": 36}') == Person(name="Ada", age=36)
    with pytest.raises(ValueError):
        schema.parse('{"name": "Ada", "age": ')


def test_other_types_and_json_text_are_schemas():
    assert Schema.of(list[int]).as_dict() == {"type": "array", "items": {"type": "integer"}}
    assert Schema.of(list[Person]).parse('[{"name": "a"}]') == [Person(name="a")]
    assert Schema.of('{"type": "null"}').parse("null") is None
    assert Schema.of(True).text == "{}" and Schema.of(Schema.of({})).text == "{}"
    assert Schema.of({"a": 1}) == Schema.of('{"a": 1}') != Schema.of({"a": 2})


def test_a_receipt_of_options_holds_the_schema_as_json():
    dumped = json.loads(json.dumps(resolve({"schema": Person}).options.model_dump()))
    assert dumped["schema"] == CLOSED
    assert resolve({"schema": dumped["schema"]}).options.schema.as_dict() == dumped["schema"]
