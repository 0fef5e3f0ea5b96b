"""Calls of Gemma 4 and LFM2, whose arguments are no JSON, and of Qwen 3.5: read beside mlx-lm's and
transformers' parsers, enforced, and printed back.
"""

from __future__ import annotations

import gc
import json
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from cases.schemas import random_schema
from cases.texts import TOOL_TEMPLATES, USER, conversation
from mlx_lm.tool_parsers import gemma4, pythonic
from scripting import make_scripted_checkpoint
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing.response_parser import parse_response

from mlx_llama.core.answers.grammar import Grammars, Rule
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.hf_tokenizer import load_tokenizer
from mlx_llama.core.text.template import ChatTemplate
from mlx_llama.core.text.thoughts import Thought, find_thoughts
from mlx_llama.core.text.tools import Tool, ToolParser, find_format
from mlx_llama.core.text.tools.formats import GEMMA_4, LFM2, QWEN_CODER
from mlx_llama.core.text.tools.literals import write_value
from mlx_llama.core.text.tools.python_calls import parse_calls

from .reading import read

BARE = SimpleNamespace(added_ids=())
TOOLS = [Tool(name, "", {"properties": {}}) for name in ("f", "g", "Calendar.add")]
Q = '<|"|>'

# (format, what is between its marks, calls). Some are inputs of llama.cpp's tests.
CASES = [
    (GEMMA_4, f"call:f{{city:{Q}San Francisco{Q}}}", [("f", {"city": "San Francisco"})]),
    (GEMMA_4, "call:f{}", [("f", {})]),
    (GEMMA_4, "call:f{a:42,b:-7,c:3.14,d:1.5e10}", [("f", dict(a=42, b=-7, c=3.14, d=1.5e10))]),
    (GEMMA_4, "call:f{a:true,b:false,c:null}", [("f", {"a": True, "b": False, "c": None})]),
    (GEMMA_4, f"call:f{{a:[{Q}x{Q},{Q}y, z{Q}],b:[]}}", [("f", {"a": ["x", "y, z"], "b": []})]),
    (
        GEMMA_4,
        f"call:f{{a:{{b:{Q}dark{Q},c:{{}},d:[{{e:3}},[1]]}}}}",
        [("f", {"a": {"b": "dark", "c": {}, "d": [{"e": 3}, [1]]}})],
    ),
    (
        GEMMA_4,
        f'call:f{{a:{Q}"quoted" \'it\' \\n <b> }}\n{{k:[é 🦙 <|" |{Q}}}',
        [("f", {"a": '"quoted" \'it\' \\n <b> }\n{k:[é 🦙 <|" |'})],
    ),
    (LFM2, '[f(city="Paris")]', [("f", {"city": "Paris"})]),
    (LFM2, "[f()]", [("f", {})]),
    (LFM2, "[f(a=1, b=-2.5, c='x'), g(a=True, b=None)]", [
        ("f", {"a": 1, "b": -2.5, "c": "x"}), ("g", {"a": True, "b": None}),
    ]),
    (
        LFM2,
        '[Calendar.add(who=["Al", "Bo"], data={"top": true, "n": {"x": null}})]',
        [("Calendar.add", {"who": ["Al", "Bo"], "data": {"top": True, "n": {"x": None}}})],
    ),
    (LFM2, "[f(a={'b': (1, 'c'), 'd': [True]})]", [("f", {"a": {"b": (1, "c"), "d": [True]}})]),
    (
        LFM2,
        r"""[f(a="two\nlines\t\"q\" 'it' \\n \x41\u00e9\U0001f999\101", b='it\'s', c="é🦙, )")]""",
        [("f", {"a": "two\nlines\t\"q\" 'it' \\n Aé\U0001f999A", "b": "it's", "c": "é🦙, )"})],
    ),
    (LFM2, '[f(a="""x "y"\nz""", b=\'\')]', [("f", {"a": 'x "y"\nz', "b": ""})]),
]  # fmt: skip


def wrap(form, *bodies):
    return "".join(f"{form.opens}{body}{form.closes}" for body in bodies)


def calls_of(parser):
    assert all(call.is_complete for call in parser.calls)
    return [(call.name, call.values()) for call in parser.calls]


def plain(calls):
    """Calls with lists for tuples."""
    return json.loads(json.dumps(calls))


def check_splits(form, text, rest, calls):
    """At every place, and character by character."""
    for at in range(len(text)):
        parser = ToolParser(form, TOOLS)
        news = parser.push(text[:at]) + parser.push(text[at:]) + parser.finish()
        assert "".join(new for new in news if isinstance(new, str)) == parser.text == rest
        assert plain(calls_of(parser)) == plain(calls), at
    for seed in range(1, 9):
        parser = read(form, text, TOOLS, seed)
        assert parser.text == rest and plain(calls_of(parser)) == plain(calls)


@pytest.mark.parametrize("form, body, calls", CASES, ids=range(len(CASES)))
def test_calls_are_read_in_every_split(form, body, calls):
    check_splits(form, f"Well. {wrap(form, body)}", "Well. ", calls)
    several = [*calls, *calls]
    bodies = [body, body] if form is GEMMA_4 else [f"{body[:-1]}, {body[1:]}"]
    parser = read(form, wrap(form, *bodies), TOOLS, 3)
    assert plain(calls_of(parser)) == plain(several) and parser.text == ""


@pytest.mark.parametrize("form, body, calls", CASES, ids=range(len(CASES)))
def test_mlx_lm_reads_the_same_calls(form, body, calls):
    theirs = (gemma4 if form is GEMMA_4 else pythonic).parse_tool_call(body)
    theirs = theirs if isinstance(theirs, list) else [theirs]
    assert plain([(call["name"], call["arguments"]) for call in theirs]) == plain(calls)


@pytest.mark.parametrize(
    "form, text, calls",
    [
        # None as Gemma 4's templates print it, and spaces
        (
            GEMMA_4,
            wrap(GEMMA_4, "call:f{ a : None , b b:[ 1 , 2 ] }"),
            [("f", {"a": None, "b b": [1, 2]})],
        ),
        # quotation marks of JSON
        (GEMMA_4, '<|tool_call>call:f{"a":"x\\n"}<tool_call|>', [("f", {"a": "x\n"})]),
        (GEMMA_4, "<|tool_call>call:f{a:1}", [("f", {"a": 1})]),
        # as the template of LFM2.5 8B prints it
        (LFM2, wrap(LFM2, "[f(a='it's \"a\" b', b='')]"), [("f", {"a": 'it\'s "a" b', "b": ""})]),
        (LFM2, wrap(LFM2, '[ f( a = "x" ) , g() ]'), [("f", {"a": "x"}), ("g", {})]),
        (LFM2, wrap(LFM2, '[{"name": "f", "arguments": {"a": 1}}]'), [("f", {"a": 1})]),
        (LFM2, wrap(LFM2, '[f(a="\\ud83e\\udd99\\0")]'), [("f", {"a": "\U0001f999\0"})]),
        (
            LFM2,
            wrap(LFM2, r"[f(a=NaN, b=word, c='\d')]"),
            [("f", {"a": "NaN", "b": "word", "c": r"\d"})],
        ),
        (LFM2, wrap(LFM2, "[]"), []),
    ],
)
def test_what_models_write_beside_their_format_is_read(form, text, calls):
    check_splits(form, text, "", calls)


@pytest.mark.parametrize(
    "form, text",
    [
        (GEMMA_4, "See <|tool_call> and <|tool_call>f{}"),
        (GEMMA_4, "<|tool_call>call:f without"),
        (LFM2, "The [link](url) of f(a=1)"),
        (LFM2, "<|tool_call_start|>f(a=1)<|tool_call_end|>"),
        (LFM2, "<|tool_call_start|>[a b(c=1)]"),
    ],
)
def test_other_text_is_no_call(form, text):
    for seed in range(9):
        parser = read(form, text, TOOLS, seed)
        assert parser.text == text and not parser.calls


@pytest.mark.parametrize(
    "form, text, arguments",
    [
        (GEMMA_4, f"<|tool_call>call:f{{a:{Q}unfin", '{"a": "unfin'),
        (GEMMA_4, "<|tool_call>call:f{a:[1,2", '{"a": [1, '),
        (GEMMA_4, "<|tool_call>call:f{a:" + "[" * 500, '{"a": ' + "[" * 64),
        (LFM2, '<|tool_call_start|>[f(a="x\\', '{"a": "x'),
        (LFM2, '<|tool_call_start|>[f("positional")]', '{"positional"'),
    ],
)
def test_a_broken_call_is_kept_as_far_as_it_came(form, text, arguments):
    for seed in range(9):
        [call] = read(form, text, TOOLS, seed).calls
        assert (call.name, call.arguments, call.is_complete) == ("f", arguments, False)


def test_a_string_arrives_while_it_is_written():
    for form, before in ((GEMMA_4, f"<|tool_call>call:f{{a:{Q}"), (LFM2, f'{LFM2.opens}[f(a="')):
        parser = ToolParser(form, TOOLS)
        parser.push(before + "once")
        assert [new.arguments for new in parser.push(" upon\n")] == [" upon\\n"]
        assert [new.arguments for new in parser.push("a time")] == ["a time"]


def test_hostile_text_takes_linear_time():
    for form, before in ((GEMMA_4, f"<|tool_call>call:f{{a:{Q}"), (LFM2, f'{LFM2.opens}[f(a="')):
        for hostile in ('\\"' * 9_000, '" ' * 9_000, '<|"|' * 9_000, '<|"' * 9_000):
            parser = ToolParser(form, TOOLS)
            text = before + hostile
            for at in range(0, len(text), 997):
                parser.push(text[at : at + 997])
            parser.finish()
            assert len(parser.calls) == 1


# Whole answers, beside transformers' parsers

JUDGES = {
    name: next(value for kinds, value in _RESPONSE_TEMPLATE_FALLBACKS.items() if name in kinds)
    for name in ("gemma4", "qwen3_5")
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "deep": {"type": "boolean"},
        "names": {"type": "array", "items": {"type": "string"}},
        "place": {"type": "object"},
    },
}
WORDS = ["Zürich", "🦙", 'a "b"', "it's", "two\nlines", "{x: [1]}", "</b>", "\\n", "a, b", "=", ""]


def make_answer(template, form, thoughts, source):
    """A random message, its prompt, and the answer as the template prints it."""
    text = lambda: " ".join(source.choices(WORDS, k=source.randint(1, 3))).strip()  # noqa: E731
    values = lambda: {  # noqa: E731
        "text": text(), "count": source.randint(-9, 9), "deep": source.random() < 0.5,
        "names": [text() for _ in range(source.randint(0, 2))],
        "place": {"x": text(), "y": [source.randint(0, 9), {"z": text()}]},
    }  # fmt: skip
    calls = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "look_up", "arguments": values()},
        }
        for number in range(source.randint(1, 3))
    ]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    message["reasoning_content"] = source.choice(["First\nthis, then 'that'.", "{", "a < b"])
    tools = [Tool("look_up", "Looks up.", PARAMETERS)]

    def render(messages, adds_prompt):
        offered, extras = form.offer(messages, tools)
        return template.render(offered, adds_prompt, enable_thinking=True, **extras)

    prompt, whole = render(USER, True), render([*USER, message], False)
    assert whole.startswith(prompt)
    return message, prompt, whole[len(prompt) :]


@pytest.mark.parametrize("judge, name", [("gemma4", "gemma-4"), ("qwen3_5", "qwen3.5")])
def test_transformers_splits_answers_alike(judge, name):
    """Thoughts and several calls, as the model's own template prints them."""
    template = ChatTemplate(TOOL_TEMPLATES[name], name, {"bos_token": "<bos>"})
    form, thoughts = find_format(template.source, BARE), find_thoughts(template.source)
    source = random.Random(7)
    tool = Tool("look_up", "Looks up.", PARAMETERS)
    for number in range(12):
        message, prompt, answer = make_answer(template, form, thoughts, source)
        theirs = parse_response(answer, JUDGES[judge], prefix=prompt, tools=[tool.as_dict()])
        state = "thought" if prompt.rstrip().endswith(thoughts.start) else "before"
        splitter, parser, thought = thoughts.parser(state), ToolParser(form, [tool]), ""
        size = number % 7 + 1
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        for piece in [*pieces, ""]:
            for part in splitter.push(piece, is_last=not piece):
                if isinstance(part, Thought):
                    thought += part.text
                else:
                    parser.push(part)
        parser.finish()
        wanted = [("look_up", call["function"]["arguments"]) for call in message["tool_calls"]]
        assert thought == theirs["reasoning_content"].strip() == message["reasoning_content"]
        judged = [call["function"] for call in theirs["tool_calls"]]
        assert calls_of(parser) == wanted, answer
        assert [(call["name"], call["arguments"]) for call in judged] == wanted, answer


# Histories

CALLS = [
    {"id": f"c{name}", "type": "function", "function": {"name": name, "arguments": values}}
    for name, values in (("f", {"a": "x\"y'\n", "b": [1, None, True]}), ("g", {"o": {"k": "é"}}))
]
TALK = [
    *conversation([("system", "Be brief."), ("user", "Go on.")]),
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": CALLS},
    {"role": "tool", "content": "second", "tool_call_id": "cg"},
    {"role": "tool", "content": "first", "tool_call_id": "cf"},
]
ENDED = [*TALK, *conversation([("assistant", "Done."), ("user", "Thanks.")])]


def render(name, messages, judge=None):
    """The prompt, with transformers' text beside it. judge: messages for transformers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(TOOL_TEMPLATES[name], name, {"bos_token": "<bos>"})
    offered, extras = find_format(template.source, BARE).offer(messages, TOOLS)
    text = template.render(offered, **extras)
    [theirs], _ = render_jinja_template(
        [judge or offered], chat_template=template.source, add_generation_prompt=True,
        bos_token="<bos>", **extras,
    )  # fmt: skip
    assert text == theirs
    return text


def test_gemma_4s_histories_are_those_of_its_current_template():
    """From the older one, too, which takes results only in the message of their calls."""
    for talk in (TALK, ENDED):
        current = render("gemma-4", talk, judge=talk).partition("<|turn>user")[2]
        older = render("gemma-4-interleaved", talk).partition("<|turn>user")[2]
        older = older.replace("Hm.<channel|>", "Hm.\n<channel|>")
        assert older.removesuffix("<|channel>thought\n<channel|>") == current.removesuffix(
            "<|channel>thought\n<channel|>"
        )
        assert "<|tool_response>response:g{value:" + f"{Q}second{Q}}}<tool_response|>" in current
    assert ("Hm." in render("gemma-4", TALK)) and ("Hm." not in render("gemma-4", ENDED))


def test_gemma_4s_text_before_calls_stays_there():
    """The template alone prints it after the results, and then no turn of the model."""
    talk = [*TALK[:2], TALK[2] | {"content": "I look."}, *TALK[3:]]
    for name in ("gemma-4", "gemma-4-interleaved"):
        text = render(name, talk)
        assert text.index("I look.") < text.index("<|tool_call>") < text.index("second")
        assert text.removesuffix("<|channel>thought\n<channel|>").endswith("<tool_response|>")


@pytest.mark.parametrize("name", ["lfm2", "lfm2.5", "lfm2.5-a1b"])
def test_lfm2s_histories_have_the_calls_as_the_model_writes_them(name):
    for talk in (TALK, ENDED):
        text = render(name, talk)
        written = text[text.index(LFM2.opens) : text.index(LFM2.closes) + len(LFM2.closes)]
        wanted = [(call["function"]["name"], call["function"]["arguments"]) for call in CALLS]
        assert calls_of(read(LFM2, written, TOOLS)) == wanted
        assert [
            (call["name"], call["arguments"]) for call in pythonic.parse_tool_call(written)
        ] == wanted
        assert text.index(LFM2.closes) < text.index("second") < text.index("first")
    assert "<think>Hm.</think><|tool_call_start|>" in render(name, TALK)


def test_qwen_35s_history_has_the_thoughts_of_its_last_turn():
    text = render("qwen3.5", TALK, judge=TALK)
    assert "<think>\nHm.\n</think>\n\n<tool_call>\n<function=f>" in text
    assert "Hm." not in render("qwen3.5", ENDED, judge=ENDED)
    assert find_format(TOOL_TEMPLATES["qwen3.5"], BARE) is QWEN_CODER


# Enforced calls

NESTED = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "when": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
        "done": {"type": "boolean"},
        "kind": {"enum": ["a b", "c", 5]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "tree": {"$ref": "#/$defs/tree"},
        "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
        "Any": {},
    },
    "required": ["title", "tree", "kind"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "leaf": {"type": ["string", "null"]},
                "next": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
MARKED = [GEMMA_4.opens, GEMMA_4.closes, Q, LFM2.opens, LFM2.closes]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """With the marks as special tokens."""
    folder = tmp_path_factory.mktemp("literal") / "m"
    make_scripted_checkpoint(folder, "", specials=MARKED)
    return load_tokenizer(folder, LlamaConfig.from_file(folder))


def generate(grammars, tokenizer, form, rule, source):
    """Random text under a rule; None if it does not end."""
    constraint = grammars.compile(rule)
    shown = form.shown_specials(tokenizer)
    stream = tokenizer.stream(starts_text=not constraint.keeps_space, shown=shown)
    texts, text = tokenizer.token_bytes(), ""
    ends = {tokenizer.special_ids.get(Q), tokenizer.special_ids.get(form.closes)}
    closing = {byte.encode() for byte in '<"},]):'}
    for _ in range(300):
        if constraint.is_finished or (constraint.is_complete and source.random() < 0.5):
            return text + stream.finish()
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
        ids = [int(token) for token in np.flatnonzero(bits) if token not in grammars.eos]
        mark = next(n for n in range(len(Q) - 1, -1, -1) if text.endswith(Q[:n]))
        wanted = {Q[mark].encode()} if mark else closing
        ending = [token for token in ids if token in ends or texts[token] in wanted]
        some = ending if ending and source.random() < (0.9 if mark else 0.4) else ids
        for token in constraint.forced() or [source.choice(some)]:
            constraint.accept(token)
            text += stream.push(token)
    return None


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("form", [GEMMA_4, LFM2], ids=["gemma4", "lfm2"])
def test_enforced_nested_arguments_fit_their_schema(form, special, tokenizer, model):
    """Whether marks are special tokens or text."""
    import jsonschema

    tokenizer = tokenizer if special else model.tokenizer
    tools = [Tool("plan", "", NESTED), Tool("stop", "", {"type": "object", "properties": {}})]
    grammars = Grammars(tokenizer, tokenizer.eos_ids, 400)
    rule = Rule("tools", form.grammar(tools, tokenizer, many=True))
    source, ended, keys = random.Random(11), 0, set()
    for _ in range(80):
        text = generate(grammars, tokenizer, form, rule, source)
        if text is None:  # still within a value
            continue
        calls = calls_of(read(form, text, tools, source.randint(0, 9)))
        assert calls and text.startswith(form.opens) and text.endswith(form.closes)
        for name, values in calls:
            ended += name == "plan"
            keys |= set(values)
            jsonschema.validate(values, NESTED if name == "plan" else {"maxProperties": 0})
        if ended > 4:
            break
    assert ended > 4 and len(keys) > 5


def write_call(form, value):
    """A call of f with this value of `a`, as the model writes it."""
    if form is LFM2:
        return wrap(form, f"[f(a={json.dumps(value, ensure_ascii=False)})]")
    if form is QWEN_CODER:
        text = value if isinstance(value, str) else json.dumps(value)
        return f"<tool_call>\n<function=f>\n{tag('a', text)}</function>\n</tool_call>"
    return wrap(form, f"call:f{{a:{write_literal(value)}}}")


def tag(key, text):
    return f"<parameter={key}>\n{text}\n</parameter>\n"


def write_literal(value):
    if isinstance(value, str):
        return f"{Q}{value}{Q}"
    if isinstance(value, list):
        return f"[{','.join(map(write_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{write_literal(value[key])}' for key in sorted(value))}}}"
    return json.dumps(value)


def allows(grammars, rule, text):
    """True if a rule allows a text, byte by byte but for special tokens."""
    constraint, tokenizer = grammars.compile(rule), grammars.tokenizer
    bytes_of = tokenizer.token_bytes()
    ids = {data: i for i, data in enumerate(bytes_of) if data and len(data) == 1}
    for part in re.split(f"({'|'.join(map(re.escape, MARKED))})", text):
        known = tokenizer.special_ids.get(part)
        for token in [ids[bytes([byte])] for byte in part.encode()] if known is None else [known]:
            try:
                constraint.accept(token)
            except ValueError:
                return False
    return constraint.is_complete


A, B = {"type": "integer"}, {"type": "boolean"}
PAIR = {"type": "object", "properties": {"x": A, "y": A}}
KEYWORDS = [  # (schema, what it allows, what it forbids, what is told)
    ({"type": "string", "pattern": r"^[A-Z]{2}-\d+$"}, ["AB-1"], ["ab-1", "AB-1 ", "xAB-1"], ""),
    ({"type": "string", "pattern": "b"}, ["abc", "b", "\nb\n"], ["ac", ""], ""),
    ({"type": "string", "pattern": "^(a|b/)"}, ["a", "b/ c"], ["ca", "b"], ""),
    ({"type": "string", "pattern": "^a|b$"}, ["a", "c"], [], "pattern"),
    ({"type": "string", "pattern": "(?=a)b"}, ["c"], [], "pattern"),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["é<", "a\nb"], ["a", "abcd"], ""),
    ({"type": "string", "maxLength": 0}, [""], ["a"], ""),
    ({"type": "string", "maxLength": 1 << 20}, ["abc"], [], "maxLength"),
    ({"type": "string", "minLength": 2, "pattern": "^a*$"}, ["aa"], ["a", "ab"], ""),
    ({"type": "string", "format": "date", "minLength": 1}, ["abc"], [""], "format"),
    ({"items": A, "type": "array", "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1] * 3], ""),
    ({"type": "array", "items": A, "maxItems": 1}, [[], [1]], [[1, 2]], ""),
    (
        {"type": "array", "prefixItems": [A, B], "minItems": 2, "maxItems": 2},
        [[1, True]], [[1], [True, 1], [1, True, 2]], "",
    ),
    ({"type": "array", "items": A, "contains": {"const": 1}}, [[2]], [], "contains"),
    ({**PAIR, "required": ["y", "z"]}, [{"y": 1, "z": 2}], [{"y": 1}, {"x": 1}], ""),
    ({**PAIR, "minProperties": 1}, [{"y": 1}, {}], [], "minProperties"),
    ({"anyOf": [{"required": ["x"]}, {"required": ["y"]}], **PAIR}, [{"x": 1}, {"y": 1}], [{}], ""),
    ({"anyOf": [A, {"type": "null"}], "maximum": 5}, [5, None], [6, True], ""),
    ({"allOf": [{"$ref": "#/$defs/low"}, {"maximum": 3}]}, [2], [1, 4], ""),
    ({"$ref": "#/$defs/low", "maximum": 3}, [2], [1, 4], ""),
    ({"allOf": [{"$ref": "#/$defs/low"}, {"minimum": 3}]}, [2, 3], [1], "allOf"),
    ({"type": ["integer", "null"], "enum": [1, "a", None]}, [1, None], ["a"], ""),
    ({"type": "integer", "not": {"const": 3}}, [3], [], "not"),
    ({"properties": {"x": A}, "required": ["x"]}, [{"x": 1}], [{}], ""),
]  # fmt: skip
# that hold for text in tags, where all but strings is JSON
IN_TAGS = [case for case in KEYWORDS if case[0].get("type") == "string"]
AT_ROOT = [  # of the parameters themselves, which always are an object's members
    ({"required": ["b"]}, "", False),
    ({"minProperties": 1}, "minProperties", True),
    ({"anyOf": [{"required": ["b"]}, {"required": ["a"]}]}, "anyOf", True),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired", True),
]


@pytest.mark.parametrize("special", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "form, case",
    [(GEMMA_4, case) for case in KEYWORDS] + [(QWEN_CODER, case) for case in IN_TAGS],
    ids=lambda value: json.dumps(value[0]) if isinstance(value, tuple) else value.name,
)
def test_keywords_of_schemas_are_enforced_or_told(form, case, special, tokenizer, model):
    import jsonschema

    schema, good, bad, told = case
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    parameters["$defs"] = {"low": {"type": "integer", "minimum": 2}}
    tokenizer = tokenizer if special else model.tokenizer
    grammars = Grammars(tokenizer, tokenizer.eos_ids, 400)
    rule = Rule("tools", form.grammar([Tool("f", "", parameters)], tokenizer))
    assert grammars.compile(rule).relaxed == told
    validator = jsonschema.Draft202012Validator(parameters)
    for value in good:
        assert allows(grammars, rule, write_call(form, value)), value
        assert told or validator.is_valid({"a": value})
    for value in bad:
        assert not allows(grammars, rule, write_call(form, value)), value
        assert not validator.is_valid({"a": value})


@pytest.mark.parametrize("form", [GEMMA_4, LFM2, QWEN_CODER], ids=lambda form: form.name)
def test_keywords_of_the_parameters_are_enforced_or_told(form, tokenizer):
    grammars = Grammars(tokenizer, tokenizer.eos_ids, 400)
    for keywords, told, is_allowed in AT_ROOT:
        parameters = {"type": "object", "properties": {"a": A}, **keywords}
        rule = Rule("tools", form.grammar([Tool("f", "", parameters)], tokenizer))
        assert told in grammars.compile(rule).relaxed.split(", ")
        assert allows(grammars, rule, write_call(form, 1)) == is_allowed, keywords


@pytest.mark.parametrize("form", [GEMMA_4, LFM2, QWEN_CODER], ids=lambda form: form.name)
@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 300), marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_arguments_of_random_schemas_fit_but_for_what_is_told(seeds, form, tokenizer):
    import jsonschema

    grammars, checked = Grammars(tokenizer, tokenizer.eos_ids, 400), 0
    for seed in seeds:
        source = random.Random(seed)
        schema = random_schema(source, source.randint(0, 2))
        definitions = schema.pop("$defs", {})
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        tool = Tool("f", "", {**parameters, "$defs": definitions})
        rule = Rule("tools", form.grammar([tool], tokenizer), is_lenient=True)
        try:
            told = set(grammars.compile(rule).relaxed.split(", "))
        except OptionsError as error:
            assert form is not GEMMA_4 or "nsatisfiable" in str(error), seed
            continue
        if form is QWEN_CODER and '"enum"' in json.dumps(
            tool.parameters
        ):  # a number and its digits are the same there
            continue
        text = generate(grammars, tokenizer, form, rule, source)
        if text is None or re.search(r"\d[eE]", text):  # a number may be infinite
            continue
        [(_, values)] = calls_of(read(form, text, [tool], source.randint(0, 9)))
        try:
            errors = list(jsonschema.Draft202012Validator(tool.parameters).iter_errors(values))
        except RecursionError:  # a reference to itself
            continue
        for error in errors:
            inner = [error, *(error.context or ())]
            words = {word for part in inner for word in (*part.absolute_schema_path,)}
            assert words & told, (seed, text, error.message)
        checked += not errors
    assert checked > len(seeds) / 4


def test_threads_read_calls_at_the_same_time():
    """CPython's syntax trees share a counter: without a lock, threads meet SystemErrors."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    calls = [("f", {"x": [1, {"y": [2, 3]}], "z": "t"})] * 20

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            sum(range(50))

    def read(_):
        for _ in range(40):
            Cycle()
            assert parse_calls("\n".join(["f(x=[1, {'y': [2, 3]}], z='t')"] * 20)) == calls
            assert write_value("{'a': [1, (2, 3)]}", frozenset(["object"])) == '{"a": [1, [2, 3]]}'

    sys.setswitchinterval(1e-5)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(read, range(4)))
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
