"""Chat templates: transformers' apply_chat_template is the judge; hostile templates and hostile messages."""

import itertools
import json
import threading
import time
from types import SimpleNamespace

import jinja2
import pytest
from hypothesis import given, settings, strategies as st
from making import CHAT_TEMPLATE, config_fields, make_tokenizer, sentencepiece_model
from transformers import AutoTokenizer

from mlx_llama.core.errors import TemplateError, TokenizerError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text import template as template_module
from mlx_llama.core.text.template import (
    BUILTIN,
    ChatTemplate,
    builtin_template,
    encode_messages,
    load_template,
    missing_template,
)
from mlx_llama.core.text.tokenizer import load_tokenizer

# As the hub's models carry them, some shortened
TEMPLATES = {
    "toy": CHAT_TEMPLATE,
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = "
        "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
        "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + "
        "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama-3.1": (
        "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n"
        "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
        '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
        '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
        "{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = \"\" %}\n{%- endif %}\n"
        '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n{%- if tools is not none %}\n'
        '    {{- "Environment: ipython\\n" }}\n    {%- for t in tools %}\n        {{- t | tojson(indent=4) }}\n'
        '    {%- endfor %}\n{%- endif %}\n{{- "Cutting Knowledge Date: December 2023\\n" }}\n'
        '{{- "Today Date: " + date_string + "\\n\\n" }}\n{{- system_message }}\n{{- "<|eot_id|>" }}\n'
        "{%- for message in messages %}\n"
        "    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}\n"
        "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
        "'<|eot_id|>' }}\n    {%- elif 'tool_calls' in message %}\n        {%- if not message.tool_calls|length == 1 %}\n"
        '            {{- raise_exception("This model only supports single tool-calls at once!") }}\n'
        "        {%- endif %}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}"
        "\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
        "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
        "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "namespace": (
        "{%- set ns = namespace(found=false, text='') -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        "{%- set ns.found = true -%}{%- continue -%}{%- endif -%}{%- set ns.text = ns.text ~ m.content ~ '|' -%}"
        "{%- endfor -%}{{ bos_token ~ ns.text ~ ns.found }}{% for i in range(3) %}{% if i == 2 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}"
    ),
    "macro": (
        "{% macro turn(m, mark='#') %}{{ mark }}{{ m['role']|upper }}: {{ m['content']|replace('a', 'b') }}\n{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% generation %}{{ loop.index }}{% endgeneration %}"
        "{{ m | tojson }}{% endfor %}{{ messages | map(attribute='role') | join(', ') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ messages[::-1][0]['content'][:5] }}"
        "{{ dict(a=1)['a'] + 2 * 3 ** 2 }}{{ '%s-%d' % ('x', 3) }}{{ 'é<&' | tojson }}"
    ),
    "blocks": (
        "{% set text %}{% for m in messages %}<{{ m.content.split(' ')[0] }}>{% endfor %}{% endset %}{{ text | trim }}\n"
        "   {% if tools is none %}no tools{% endif %}\n  {# a comment #}\n{% filter upper %}abc{% endfilter %}\n"
        "{{ pad_token is defined }} {{ unk_token }} {{ [1, 2] + [3] }} {{ {'k': 'v'}.items() | list }}\n"
        "{{ 'loop' if messages|length > 1 else 'one' }} {{ messages[-1].content.startswith('x') }}\n"
    ),
}  # fmt: skip

CONVERSATIONS = {
    "one": [("user", "Hello world")],
    "turns": [("user", "Hello"), ("assistant", "hi there"), ("user", "and a llama?")],
    "spaces": [("user", "  two  spaces \n"), ("assistant", " leading"), ("user", "\n\nnew\tlines\n")],
    "unicode": [("user", "你好 🦙 çà"), ("assistant", "e\u0301 👩‍👩‍👧"), ("user", "ñ <|not|> [INST] <tag> </tag>")],
    "empty": [("user", ""), ("assistant", ""), ("user", "x")],
    "jinja": [("user", "{{ 7 * 7 }} {% raw %}"), ("assistant", "{#"), ("user", "a < b > c & d ' \"")],
    "system": [("system", "You are a helpful assistant."), ("user", "What is the capital of France?")],
    "edges": [("user", "<"), ("assistant", "<|"), ("user", "x <")],
}
KINDS = ("sentencepiece", "llama2", "bytelevel")


def conversation(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def setup(folder, kind, source, **settings_):
    """(our tokenizer, our template, transformers' tokenizer)"""
    make_tokenizer(folder, kind, chat_template=source, **settings_)
    (folder / "config.json").write_text(json.dumps(config_fields(vocab_size=400)))
    ours = load_tokenizer(folder, LlamaConfig.from_file(folder))
    return SimpleNamespace(
        tokenizer=ours, template=load_template(folder, ours), judge=AutoTokenizer.from_pretrained(folder)
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: setup(tmp_path_factory.mktemp(kind), kind, CHAT_TEMPLATE) for kind in KINDS}


def plain(name="t", source=CHAT_TEMPLATE, **variables):
    return ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>", **variables})


USER = conversation([("user", "Hi")])


# Against transformers


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_and_ids_are_transformers(kind, name, models):
    model, refused = models[kind], set()
    template = ChatTemplate(TEMPLATES[name], name, model.tokenizer.named)
    for talk, prompt in itertools.product(CONVERSATIONS, (True, False)):
        messages = conversation(CONVERSATIONS[talk])
        how = {"chat_template": TEMPLATES[name], "add_generation_prompt": prompt}
        try:
            expected = model.judge.apply_chat_template(messages, tokenize=False, **how)
        except jinja2.TemplateError as e:
            with pytest.raises(TemplateError, match="refuses") as caught:
                template.render(messages, prompt)
            assert str(e) in str(caught.value)
            refused.add(talk)
            continue
        assert template.render(messages, prompt) == expected, talk
        ids = model.judge.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
        bos = [model.tokenizer.bos_id]
        ours = encode_messages(model.tokenizer, template, messages, prompt)
        assert ours == (ids if ids[:1] == bos else bos + ids), talk
    assert refused == ({"system"} if name == "mistral" else set())


def test_extras_reach_the_template(models):
    model = models["sentencepiece"]
    source = "{{ bos_token }}{{ date }}{{ tools | tojson if tools }}{{ messages[0].content }}"
    template = ChatTemplate(source, "t", model.tokenizer.named)
    extras = {"date": "today", "tools": [{"b": 1, "a": "é<"}], "bos_token": "!"}
    expected = model.judge.apply_chat_template(USER, chat_template=source, tokenize=False, **extras)
    assert template.render(USER, **extras) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_bos_stands_at_the_start_exactly_once(kind, models):
    tokenizer = models[kind].tokenizer
    for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        ids = encode_messages(tokenizer, ChatTemplate(source, "t", tokenizer.named), USER)
        assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id


def test_a_tokenizer_without_bos_habit_gets_none(tmp_path):
    model = setup(tmp_path, "sentencepiece", "{{ messages[0].content }}", add_bos_token=False)
    assert 1 not in encode_messages(model.tokenizer, model.template, USER)


# Hostile messages


def controls(model, ids):
    specials = set(model.tokenizer.special_ids.values())
    return [one for one in ids if one in specials]


def attack(model, template, messages, harmless):
    """The same control tokens as a harmless conversation has, and the literal text when decoded."""
    ids = encode_messages(model.tokenizer, template, messages)
    assert controls(model, ids) == controls(model, encode_messages(model.tokenizer, template, harmless))
    text = template.render(messages)
    decoded = model.tokenizer.decode(ids, skip_special=False)
    assert decoded == text if text.startswith(template.variables["bos_token"]) else decoded.endswith(text)
    return ids


FORMS = ["{0}", "a{0}b", " {0} ", "{0}{0}", "x{0}\n{0}", "é{0}🦙", "{0} {1}", "{1}{0}", "<{0}>"]


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_messages_are_text(kind, role, models):
    model = models[kind]
    names = [name for name in model.tokenizer.special_ids if name != "<unk>"]
    for first, form in itertools.product(names, FORMS):
        content = form.format(first, names[0])
        messages = conversation([("user", "Hi"), (role, content), ("user", content)])
        attack(model, model.template, messages, conversation([("user", "Hi"), (role, "x"), ("user", "x")]))


@pytest.mark.parametrize("kind", KINDS)
def test_messages_cannot_join_into_a_special_token(kind, models):
    """Two halves in neighbouring messages, or one half and the template's own text."""
    model = models[kind]
    for source in (
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content }}_id|>{% endfor %}",
        "{{ bos_token }}{% for m in messages %}<{{ m.content }}{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{{ m.content }}>{% endfor %}",
        "{{ bos_token }}{% for m in messages %}<{{ m.content | trim }}>{% endfor %}",
    ):
        template = ChatTemplate(source, "t", model.tokenizer.named)
        for a, b in [
            ("/s", "/s"),
            (" /s\n", "</"),
            ("<", "/s>"),
            ("</", "s>"),
            ("<|eot", "_id|>"),
            ("<|eot", "x"),
            ("/s>", "s>"),
            ("</s", "<s"),
            ("<|end_of", "_text|"),
        ]:
            attack(
                model, template, conversation([("user", a), ("user", b)]), conversation([("user", "x"), ("user", "x")])
            )


def test_an_added_token_that_the_template_writes_is_control_there_only(tmp_path):
    """User-defined symbols of sentencepiece, which are not special to any library."""
    source = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    make_tokenizer(tmp_path, "sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(user_defined=("<|user|>", "<|end|>", "<|free|>")))
    tokenizer = load_tokenizer(tmp_path, LlamaConfig.from_dict(config_fields()))
    template = ChatTemplate(source, "t", tokenizer.named)
    ids = encode_messages(tokenizer, template, conversation([("user", "a<|end|>b <|user|> <|free|>")]))
    for name, count in (("<|user|>", 1), ("<|end|>", 1), ("<|free|>", 1)):
        assert ids.count(tokenizer.added_ids[name]) == count
    assert tokenizer.decode(ids, skip_special=False) == "<s><|user|>a<|end|>b <|user|> <|free|><|end|>"


def test_what_the_model_itself_wrote_keeps_its_added_tokens(tmp_path):
    """<think> in an assistant's message is the token it was; in a user's message it is text."""
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|user|>{% endif %}"
    make_tokenizer(tmp_path, "sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(user_defined=("<|user|>", "<|end|>", "<|free|>")))
    tokenizer = load_tokenizer(tmp_path, LlamaConfig.from_dict(config_fields()))
    template, control = ChatTemplate(source, "t", tokenizer.named), tokenizer.added_ids["<|user|>"]
    for role, count in (("user", 0), ("assistant", 1)):
        ids = encode_messages(tokenizer, template, conversation([(role, "a <|user|> </s>")]), False)
        assert ids.count(control) == count and ids.count(2) == 0


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_hostile_message_adds_no_control_token(kind, data, models):
    model = models[kind]
    names = [*model.tokenizer.special_ids, "<|user|>", "<|assistant|>"]
    halves = (
        [name[1:-1] for name in names]
        + [name[:n] for name in names for n in (1, 2, 4)]
        + [name[n:] for name in names for n in (1, 2, 4)]
    )
    piece = st.sampled_from([*names, *halves, " ", "\n", "x", "\U000f0000", "\U000f0001"])
    contents = data.draw(st.lists(st.lists(piece, max_size=6).map("".join), min_size=1, max_size=3))
    if any("<unk>" in content for content in contents):
        return
    messages = conversation([("user", content) for content in contents])
    attack(model, model.template, messages, conversation([("user", "x")] * len(contents)))


@pytest.mark.parametrize("kind", KINDS)
def test_harmless_edges_leave_the_ids_alone(kind, models):
    """A message that ends like the beginning of a special token, and completes none, stays in one piece."""
    model = models[kind]
    for content in ("<", "a <", "<|", "x</", "|>", ">", "s>"):
        messages = conversation([("user", content)])
        ids = model.judge.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
        assert encode_messages(model.tokenizer, model.template, messages) == ids


def test_lone_surrogates_in_a_message(models):
    with pytest.raises(TokenizerError, match="surrogate"):
        encode_messages(models["bytelevel"].tokenizer, models["bytelevel"].template, conversation([("user", "\ud83e")]))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hi", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": "x", "name": "y"}], "messages[0]"),
        ([*USER, {"role": "user", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": 7, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user</s>", "content": "x"}], "messages[0].role"),
        ([{"role": "user\n", "content": "x"}], "messages[0].role"),
    ],
    ids=str,
)
def test_malformed_messages_are_named(messages, field, models):
    for call in (
        lambda: plain().render(messages),
        lambda: encode_messages(models["llama2"].tokenizer, models["llama2"].template, messages),
    ):
        with pytest.raises(TemplateError) as caught:
            call()
        assert field in str(caught.value) and "\n" not in str(caught.value)


def test_the_callers_messages_stay_as_they_are():
    messages = conversation([("user", "</s>")])
    before = json.dumps(messages)
    plain().render(messages)
    assert json.dumps(messages) == before


# Where templates come from


def test_the_jinja_file_comes_first(tmp_path, models):
    make_tokenizer(tmp_path, "sentencepiece", chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new {{ eos_token }}", encoding="utf-8")
    template = load_template(tmp_path, models["sentencepiece"].tokenizer)
    assert template.render(USER) == "new </s>" and "chat_template.jinja" in template.name


def test_of_several_the_default(tmp_path, models):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    make_tokenizer(tmp_path, "sentencepiece", chat_template=named)
    assert load_template(tmp_path, models["sentencepiece"].tokenizer).render(USER) == "chat"
    make_tokenizer(tmp_path, "sentencepiece", chat_template=named[:1])
    with pytest.raises(TemplateError, match="tool_use"):
        load_template(tmp_path, models["sentencepiece"].tokenizer)


@pytest.mark.parametrize("value", [None, "", False])
def test_none_at_all(value, tmp_path, models):
    make_tokenizer(tmp_path, "sentencepiece", chat_template=value or None)
    assert load_template(tmp_path, models["sentencepiece"].tokenizer) is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_template(tmp_path, models["sentencepiece"].tokenizer) is None
    text = missing_template("m")
    assert "--template" in text and all(name in text for name in BUILTIN)


@pytest.mark.parametrize("value", [7, {"a": 1}, [1], [{"name": 3}]])
def test_a_template_of_the_wrong_type(value, tmp_path, models):
    make_tokenizer(tmp_path, "sentencepiece", chat_template=value)
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json: chat_template"):
        load_template(tmp_path, models["sentencepiece"].tokenizer)


def test_a_jinja_file_that_is_not_text(tmp_path, models):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(TemplateError, match="not UTF-8"):
        load_template(tmp_path, models["sentencepiece"].tokenizer)


@pytest.mark.parametrize("name", BUILTIN)
@pytest.mark.parametrize("kind", KINDS)
def test_builtin_templates(kind, name, models):
    tokenizer = models[kind].tokenizer
    template = builtin_template(name, tokenizer)
    talk = conversation([("user", "Hello"), ("assistant", "Hi!"), ("user", "Bye")])
    for messages in (talk, [{"role": "system", "content": "Be brief."}, *talk]):
        text = template.render(messages)
        places = [text.index(message["content"]) for message in messages if message["role"] != "system"]
        assert places == sorted(places)
        assert all(message["content"] in text for message in messages)
        ids = encode_messages(tokenizer, template, messages)
        assert ids[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("name", "reference"),
    [("llama2", "llama-2"), ("llama3", "llama-3"), ("zephyr", "zephyr")],
)
def test_builtin_templates_write_what_the_models_own_do(name, reference):
    talk = conversation([("user", " Hello"), ("assistant", "Hi! "), ("user", "Bye")])
    system = conversation([("system", "Be brief.")])
    for messages in (talk, system + talk):
        assert (
            plain(source=BUILTIN[name]).render(messages).rstrip()
            == plain(source=TEMPLATES[reference]).render(messages).rstrip()
        )


@pytest.mark.parametrize("name", ["llama2", "mistral"])
def test_builtin_templates_that_must_alternate(name):
    with pytest.raises(TemplateError, match="alternate"):
        plain(source=BUILTIN[name]).render(conversation([("user", "a"), ("user", "b")]))


def test_a_template_file_by_path(tmp_path, models):
    path = tmp_path / "mine.jinja"
    path.write_text("X{{ messages[0].content }}", encoding="utf-8")
    assert builtin_template(str(path), models["llama2"].tokenizer).render(USER) == "XHi"
    with pytest.raises(TemplateError) as caught:
        builtin_template("nowhere.jinja", models["llama2"].tokenizer)
    assert "nowhere.jinja" in str(caught.value) and "chatml" in str(caught.value)


# Hostile templates


def stopped(source, messages=USER, **variables) -> str:
    start = time.monotonic()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, "evil.jinja", variables).render(messages)
    assert time.monotonic() - start < template_module.MAX_SECONDS + 2
    message = str(caught.value)
    assert message.startswith("evil.jinja: ") and "\n" not in message and len(message) < 600
    return message


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__class__ }}",
        "{{ (messages|attr('__class__')).x }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ dict.__class__ }}",
        "{{ namespace.__init__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '%s'|format(messages).__class__ }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages.clear() }}",
        "{{ 'a'.translate({97: 'b'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_escapes_are_refused(source):
    stopped(source)


ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "silent": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
    "filtered": "{% for i in range(99999) if range(99999)|list|length < 0 %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "wide loop": "{% set a = range(99999)|list %}{% for x in a recursive %}{{ loop(a) }}{% endfor %}",
    "multiply": "{{ 'a' * 10**10 }}",
    "multiply list": "{{ ([0] * 10**10)|length }}",
    "multiply twice": "{{ 'a' * 1000000 * 1000000 }}",
    "constant": "{{ ('a' * 100000000000)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of float": "{{ 2.0 ** 100000 }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "adding": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "adding lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "squaring": "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "blocks": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "nesting": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "nesting views": "{% set ns = namespace(s={}) %}{% for i in range(60) %}"
    "{% set ns.s = {'a': ns.s.items(), 'b': ns.s.values()} %}{% endfor %}{{ ns.s }}",
    "pretty": "{% set ns = namespace(s=[1]) %}{% for i in range(17) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
    "{{ ns.s | pprint | length }}",
    "nesting dicts": "{% set ns = namespace(s={}) %}{% for i in range(60) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s }}",
    "nesting tuples": "{% set ns = namespace(s=()) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ ns.s == 1 }}",
    "nesting calls": "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s }}",
    "printing": "{% set s = 'x' * 100000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "join": "{% set s = 'x' * 500000 %}{{ range(90000)|join(s) }}",
    "join method": "{% set s = 'x' * 500000 %}{{ s.join('y' * 500000) }}",
    "replace": "{% set s = 'x' * 500000 %}{{ s|replace('x', s) }}",
    "replace method": "{% set s = 'x' * 500000 %}{{ s.replace('', s) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "center filter": "{{ 'x'|center(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 500000).expandtabs(100000) }}",
    "indent": "{{ ('\n' * 500000)|indent(100000) }}",
    "indent text": "{% set s = 'x' * 500000 %}{{ ('\n' * 500000)|indent(s) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format computed": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format many": "{% set s = 'x' * 500000 %}{{ ('{0}' * 100000).format(s) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent computed": "{{ '%*d' % (10000000000, 1) }}",
    "percent many": "{% set s = 'x' * 500000 %}{{ ('%(a)s' * 100000) % {'a': s} }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "tojson indent": "{{ range(90000)|list|tojson(indent=100000) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list|length }}",
    "slice": "{% for x in [1]|slice(10**10) %}{% endfor %}",
    "sum": "{{ ([range(99999)|list] * 9)|sum(start=[])|length }}{{ ([range(99999)|list] * 99999)|sum(start=[])|length }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "string": "{% set s = ['x' * 500000] * 500000 %}{{ s|string|length }}",
    "copies": "{% set s = ['x' * 500000] * 50000 %}{{ s }}",
    "namespaces": "{% set ns = namespace(s=namespace(s=1)) %}{% for i in range(60) %}{% set ns.s = namespace(a=ns.s, b=ns.s) %}"
    "{% endfor %}{{ ns }}{{ ns.s }}{{ 1 // 0 }}",
    "copies by a filter": "{% set s = 'x' * 500000 %}{{ ([''] * 90000) | map('default', s, true) | list }}",
    "copies in a tilde": "{% set s = 'x' * 500000 %}{{ 'a' ~ ([''] * 90000) | map('default', s, true) | list }}",
    "copies in a block": "{% set s = 'x' * 500000 %}{% set t %}{% for i in range(90000) %}{{ s }}{% endfor %}{% endset %}",
    "tilde": "{% set s = ['x' * 500000] * 50000 %}{{ '' ~ s }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_is_stopped(name, monkeypatch):
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.2)
    assert "MemoryError" not in stopped(ENDLESS[name])  # before the machine suffers


def test_the_clock_stops_what_the_counter_does_not(monkeypatch):
    monkeypatch.setattr(template_module, "MAX_STEPS", 10**12)
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.2)
    assert "seconds" in stopped(ENDLESS["silent"])


def test_the_meter_works_on_any_thread():
    found = []
    threads = [threading.Thread(target=lambda: found.append(stopped(ENDLESS["nested"]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all("steps" in message for message in found)


def test_a_long_conversation_is_not_endless():
    talk = conversation([("user", "word " * 200), ("assistant", "word " * 200)] * 1000)
    for name, source in TEMPLATES.items():
        if name != "macro":
            assert len(plain(source=source).render(talk)) > 1000
    big = conversation([("user", "x" * 5_000_000)])
    assert len(plain().render(big)) > 5_000_000


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% for %}", "line 1"),
        ("\n\n{{ x", "line 3"),
        ("{{ x | nofilter }}", "nofilter"),
        ("{% unknown %}", "unknown"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ missing() }}", "missing"),
        (
            "{{ raise_exception('System role not supported\nhere') }}",
            "refuses this conversation: System role not supported here",
        ),
        ("{{ '" + "(" * 3 + "' }}{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", ""),
        ("x" * (1 << 19), "characters"),
    ],
    ids=["tag", "open", "filter", "unknown", "undefined", "zero", "call", "refusal", "deep", "long"],
)
def test_a_failing_template_says_where(source, word):
    assert word in stopped(source)
