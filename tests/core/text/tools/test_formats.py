"""Formats of calls: templates beside transformers', enforced calls."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
from cases.texts import TEMPLATES, TOOL_TEMPLATES, USER, conversation
from cases.tools import add, weather
from making import refusal

from mlx_llama.core.answers.grammar import Grammars, Rule
from mlx_llama.core.errors import OptionsError, TemplateError
from mlx_llama.core.text.template import ChatTemplate, check_messages, encode_messages
from mlx_llama.core.text.tools import FORMATS, Tool, ToolParser, find_format, formats, read_tools
from mlx_llama.core.text.tools.formats import (
    BRIEF,
    FUNCTIONARY_31,
    FUNCTIONARY_32,
    GLM,
    GRANITE_3,
    HARMONY,
    HERMES,
    IN_SYSTEM,
    LLAMA3,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_HEADERS,
    MISTRAL_IDS,
    PHI_4_MINI,
    QWEN_CODER,
    SEED_OSS,
    SMOLLM3,
)

from .reading import read

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
    template = ChatTemplate(TOOL_TEMPLATES[name], name, model.tokenizer.named)
    tools = read_tools([add, weather])
    form = find_format(template.source, model.tokenizer)
    for messages in (USER, TALK, TALK[:2]):
        ours, extras = form.offer(messages, tools)
        # what the template does not print, or takes as text, is ours to write
        is_ours = form.folds or form is FUNCTIONARY_32 or name == "gemma-4-interleaved"
        messages = ours if is_ours else messages
        how = {"chat_template": template.source, "add_generation_prompt": True, **extras}
        assert template.render(ours, **extras) == model.judge.apply_chat_template(
            messages, tokenize=False, **how
        )
        ids = model.judge.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
        bos = [model.tokenizer.bos_id]
        written = form.written_marks()
        assert encode_messages(model.tokenizer, template, ours, written=written, **extras) == (
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
    empty = [{"role": "assistant", "content": "x", "tool_calls": None}]
    assert check_messages(empty) == conversation([("assistant", "x")])


def calling(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    "message, reason",
    [
        ({"role": "assistant", "content": None}, "content is None"),
        ({"role": "user", "content": "x", "tool_calls": []}, "expected the fields"),
        ({"role": "assistant", "tool_calls": []}, "list of 1 to"),
        ({"role": "assistant", "tool_calls": [{}]}, "'function'"),
        (calling("{"), "expected an object"),
        (calling([1]), "expected an object"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "tool_call_id is 5"),
        ({"role": "tool"}, "expected the fields"),
        ({"role": ["assistant"], "content": "x"}, "expected a word"),
        ({"role": "tool", "content": "x", "id": "y"}, "tool_call_id"),
        (calling({}) | {"tool_responses": 5}, "tool_responses is 5"),
        (calling({}) | {"tool_responses": [{"name": "f"}]}, "list of {'name', 'response'}"),
    ],
)
def test_malformed_messages_name_message_and_field(message, reason):
    refusal(check_messages, [*USER, message], kind=TemplateError, words=["messages[1]", reason])


def test_a_template_of_one_call_a_message_gets_several_in_turn(model):
    """Each with its result, whatever the order of the results; a result of no call stays."""
    template = ChatTemplate(TOOL_TEMPLATES["llama-3.1"], "llama", model.tokenizer.named)
    functions = [{"name": "add", "arguments": {"a": i, "b": 0}} for i in (1, 2)]
    calls = [CALL | {"id": f"call{i}", "function": f} for i, f in enumerate(functions, 1)]
    results = [
        {"role": "tool", "content": f"sum {i}", "tool_call_id": f"call{i}"} for i in (2, 1, 3)
    ]
    calling = {"role": "assistant", "content": "x", "tool_calls": calls}
    talk = [*USER, calling, *results, *conversation([("user", "thanks")])]
    messages, extras = LLAMA3.offer(talk, read_tools([add]))
    order = [
        message.get("tool_call_id") or [call["id"] for call in message.get("tool_calls", ())]
        for message in messages
    ]
    assert order == [[], ["call1"], "call1", ["call2"], "call2", "call3", []]
    how = dict(chat_template=template.source, add_generation_prompt=True, **extras)
    judged = model.judge.apply_chat_template(messages, tokenize=False, **how)
    assert template.render(messages, **extras) == judged
    assert judged.index("sum 1") < judged.index("sum 2")


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_special_tokens_in_tools_calls_and_results_are_text(name, model):
    """The same control tokens as a harmless conversation has."""
    template = ChatTemplate(TOOL_TEMPLATES[name], name, model.tokenizer.named)
    specials = set(model.tokenizer.special_ids.values())

    def controls(word):
        properties = {word: {"type": "string", "description": word}}
        tool = Tool("add", f"Adds {word}.", {"type": "object", "properties": properties})
        call = {**CALL, "function": {"name": "add", "arguments": {"a": word, word: [word]}}}
        calling = {"role": "assistant", "tool_calls": [call]}
        talk = [*TALK[:2], calling, TALK[3] | {"content": word}, *TALK[4:]]
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
    assert "Be brief.\n\nYou are an expert in composing functions." in text
    assert json.dumps(Tool.of(add).as_dict()) in text
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2.5}}]</tool_call>' in text
    assert "user\n<tool_response>3.5</tool_response>" in text
    assert form.offer(USER, read_tools([add]))[0][0]["role"] == "system"
    assert find_format(TEMPLATES["zephyr"], model.tokenizer) is BRIEF
    assert BRIEF.offer(TALK, read_tools([add]))[0][0]["content"].startswith(
        "Be brief.\n\nYou may call these functions:\n<tools>[{"
    )


def test_formats_are_recognised(model):
    bare = SimpleNamespace(added_ids=())
    recognised = {name: find_format(source, bare) for name, source in TOOL_TEMPLATES.items()}
    assert recognised == {
        **{"apertus": formats.APERTUS, "apriel": formats.APRIEL, "devstral": MISTRAL_HEADERS},
        **{"firefunction-2": formats.FIREFUNCTION, "functionary-3.1": FUNCTIONARY_31},
        **{"functionary-3.2": FUNCTIONARY_32, "gemma-2": formats.IN_USER, "glm-4.6": GLM},
        **{"gemma-4": formats.GEMMA_4, "gemma-4-interleaved": formats.GEMMA_4},
        **{"lfm2": formats.LFM2, "lfm2.5": formats.LFM2, "lfm2.5-a1b": formats.LFM2},
        **{"gpt-oss": HARMONY, "granite-3.3": GRANITE_3, "hermes-2-pro": HERMES},
        **{"llama-3.1": LLAMA3, "minimax-m2": MINIMAX_M2, "mistral-nemo": MISTRAL},
        **{"mistral-small-3.2": MISTRAL_IDS, "nemotron-nano-2": formats.NEMOTRON},
        **{"phi-4-mini": PHI_4_MINI, "qwen2.5": HERMES, "qwen3-coder": QWEN_CODER},
        **{"qwen3.5": QWEN_CODER, "seed-oss": SEED_OSS, "smollm3": SMOLLM3},
    }
    assert find_format(TEMPLATES["llama-2"], model.tokenizer) is BRIEF


def test_an_unknown_format_of_tools_is_told(tmp_path):
    """They are described as for a template without tools."""
    source = "{% if tools %}call @{name}{% endif %}{{ messages[0].role + messages[0].content }}"
    template, bare = ChatTemplate(source, "t"), SimpleNamespace(added_ids=())
    for text, role in ((source + "{# system #}", "system"), (source, "user")):
        form = find_format(text, bare)
        messages, extras = form.offer(USER, read_tools([add]))
        assert "unknown" in form.notice
        shown = template.render(messages, **extras)
        assert shown.startswith(role + "You may call these functions") and "call @" not in shown


def test_builtin_tools_of_llama_are_named(model):
    """The model knows their parameters; others are described."""
    query = {"type": "object", "properties": {"query": {"type": "string"}}}
    tools = [Tool("brave_search", "Searches.", query), Tool("wolfram_alpha", "Odd.", {})]
    tools.append(Tool.of(add))
    template = ChatTemplate(TOOL_TEMPLATES["llama-3.1"], "llama", model.tokenizer.named)
    messages, extras = LLAMA3.offer(USER, tools)
    text = template.render(messages, **extras)
    assert "Tools: brave_search\n" in text and '"brave_search"' not in text
    assert '"wolfram_alpha"' in text and '"add"' in text
    function = {"name": "brave_search", "arguments": {"query": 'a "b"\n'}}
    call = {"id": "abcdefghi", "function": function}
    talk = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages, extras = LLAMA3.offer(talk, tools)
    text = template.render(messages, add_generation_prompt=False, **extras)
    written = text[text.rindex("<|python_tag|>") : text.rindex("<|eom_id|>")]
    [call] = read(LLAMA3, written, tools).calls
    assert (call.name, call.values()) == ("brave_search", {"query": 'a "b"\n'})


def test_an_interpreter_of_smollm3_is_offered_for_code(model):
    tools = read_tools([add, {"type": "function", "function": {"name": "python"}}])
    _, extras = SMOLLM3.offer(USER, tools)
    offered = [extras[name][0]["function"]["name"] for name in ("xml_tools", "python_tools")]
    assert offered == ["add", "python"]


def test_marks_of_folded_calls_are_the_models_tokens(model):
    """In the assistant's messages alone."""
    template = ChatTemplate(TOOL_TEMPLATES["granite-3.3"], "granite", model.tokenizer.named)
    messages, extras = GRANITE_3.offer(TALK, read_tools([add]))
    token = model.tokenizer.special_ids["<|tool_call|>"]

    def count(messages):
        how = {"written": GRANITE_3.written_marks()} | extras
        return encode_messages(model.tokenizer, template, messages, **how).count(token)

    assert count(messages) == 1
    spelled = [{**message, "content": "<|tool_call|>"} for message in messages]
    assert count(spelled) == sum(message["role"] == "assistant" for message in spelled)


# Enforced calls


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
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
            assert parser.text == "" and parser.calls
            assert all(call.is_complete for call in parser.calls)
            for call in parser.calls:
                next(tool for tool in tools if tool.name == call.name).run(call.arguments)
    assert ended > 5 and (max(counts) > 1) == many and min(counts) == 1


def test_a_named_tool_is_the_only_one_that_can_be_called(model):
    only = HERMES.grammar([Tool.of(add)], model.tokenizer)
    grammars = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400)
    constraint = grammars.compile(Rule("tools", only), starts_text=False)
    text = model.tokenizer.stream(starts_text=False)
    forced = "".join(text.push(token) for token in constraint.forced())
    assert forced == '<tool_call>\n{"name": "add", "arguments": {"a": '
    with pytest.raises(OptionsError, match="no tool to call"):
        HERMES.grammar([], model.tokenizer)


def test_enforced_arguments_have_no_keys_but_the_declared_ones(model):
    """Unless the tool's schema says otherwise."""
    grammars = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400)
    for extra, taken in (({}, False), ({"additionalProperties": True}, True)):
        tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}, **extra})
        rule = Rule("tools", LLAMA3.grammar([tool], model.tokenizer))
        constraint = grammars.compile(rule, starts_text=False)
        tokens = model.tokenizer.encode('\n{"name": "f", "parameters": {"b": 1}}')[2:]
        try:
            for token in tokens:
                constraint.accept(token)
        except ValueError:
            pass
        assert constraint.is_complete == taken


def test_a_schema_of_parameters_that_cannot_be_enforced_is_refused(model):
    lenient = {"x-guidance": {"lenient": True}}
    schema = {"type": "object", "properties": {"a": {"not": {}, **lenient}}, **lenient}
    tool = Tool("f", "", schema)
    grammars = Grammars(model.tokenizer, model.tokenizer.eos_ids, 400)
    rule = Rule("tools", HERMES.grammar([tool], model.tokenizer))
    with pytest.raises(OptionsError, match="option `tools`: cannot be enforced: .*not"):
        grammars.compile(rule)
