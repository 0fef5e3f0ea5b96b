"""Conversations that a template would refuse, or of which it would leave out a text: each message
is shown, judged by transformers' apply_chat_template.

With MLX_LLAMA_TEMPLATES (the folder models/templates of llama.cpp's source), all of llama.cpp's
templates are tested.
"""

import itertools
import os
import re
from pathlib import Path

import pytest
from cases.texts import TEMPLATES, THOUGHT_TEMPLATES, TOOL_TEMPLATES, load_folder, plain
from making import make_tokenizer, refusal
from transformers import AutoTokenizer

from mlx_llama.api.tool_use import Conversation, Toolbox
from mlx_llama.core.errors import TemplateError
from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.text.adapting import (
    AFTER_RESULT,
    ANSWERS,
    FORGETS,
    GREETING,
    LATE_SYSTEM,
    NO_QUESTION,
    NO_SYSTEM,
    ONE_SYSTEM,
    QUESTIONS,
    Habits,
)
from mlx_llama.core.text.template import (
    BUILTIN,
    ChatTemplate,
    check_messages,
    encode_messages,
    load_builtin_template,
)
from mlx_llama.core.text.tools import read_tools

# Kimi's and others' rule, in Qwen3.5's words
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ALL = {
    **TEMPLATES,
    **TOOL_TEMPLATES,
    **THOUGHT_TEMPLATES,
    **{f"built-in {name}": source for name, source in BUILTIN.items()},
    "first-only": FIRST_ONLY,
}
if folder := os.environ.get("MLX_LLAMA_TEMPLATES"):
    ALL |= {file.stem: file.read_text(encoding="utf-8") for file in Path(folder).glob("*.jinja")}
# Some templates fail without tools; ours named namespace skips answers.
SKIPPED = re.compile("namespace|.*(firefunction|command-r-plus|Hermes-[23]-.*-tool_use)")
ALL = {name: text for name, text in ALL.items() if not SKIPPED.match(name)}
ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "call", "t": "tool"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tokenizer(tmp_path_factory.mktemp("j"), "bytelevel"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_folder(make_tokenizer(tmp_path_factory.mktemp("t"), "bytelevel"), vocab_size=400)


def talk(roles: str) -> list[dict]:
    """A conversation by the first letters of its roles, c for a call and t for its result."""
    messages = []
    for number, role in enumerate(roles):
        message = {"role": ROLES[role], "content": f"text-{number}"}
        if role == "c":
            message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        elif role == "t":
            message |= {"tool_call_id": CALL["id"], "name": "add"}
        messages.append(message)
    return messages


def apply(judge, source: str, messages: list[dict], **variables) -> str:
    how = {"chat_template": source, "tokenize": False, "add_generation_prompt": True}
    return judge.apply_chat_template(messages, **how, **variables)


# Every conversation with every template

TALKS = "u s su ssu uau uu suu uuu uauu us uasu usu uas suasu suasuas uaau au sau uaasuu".split()
WITH_CALLS = "uct uctu uctau uctuau suctuau uctsu uctuu uctasu".split()


@pytest.mark.parametrize("name", ALL)
def test_every_template_shows_every_text(name, judge):
    template, names = plain(name, ALL[name]), {"bos_token": "<s>", "eos_token": "</s>"}
    for roles in [*TALKS, *(WITH_CALLS if shows_results(template) else ())]:
        messages = talk(roles)
        adapted, notices = template.adapt(messages)
        text = template.render(adapted)
        assert all(message["content"] in text for message in messages), roles
        assert template.adapt(adapted) == (adapted, []), roles  # there is nothing left to do
        if not notices:
            assert adapted == check_messages(messages)
            assert text == apply(judge, ALL[name], messages, **names), roles


def shows_results(template: ChatTemplate) -> bool:
    try:
        return "text-2" in template.render(talk("uct"))
    except TemplateError:
        return False


@pytest.mark.parametrize("name", ALL)
def test_a_turn_that_follows_leaves_earlier_messages_where_they_were(name):
    """Else the keys and values of their prefix could not be used again."""
    template = plain(name, ALL[name])
    for roles in ("suasuasuauua", "uasuausauau", "ssuaasuua", "auasua", "usaua"):
        answered = [number for number, role in enumerate(roles) if role == "a"]
        prompts = [template.adapt(talk(roles[:number]))[0] for number in answered]
        for earlier, later in itertools.pairwise(prompts):
            begins = earlier == later[: len(earlier)]
            # an answer that follows an answer joins it
            assert begins or earlier[-1]["role"] == "assistant", roles


# Adapted conversations

GEMMA, NEMO = TOOL_TEMPLATES["gemma-2"], TOOL_TEMPLATES["mistral-nemo"]
CASES = [  # template, conversation, what it becomes, notices
    (GEMMA, "su", [("user", "01")], [NO_SYSTEM]),
    (GEMMA, "suau", [("user", "01"), ("assistant", "2"), ("user", "3")], [NO_SYSTEM]),
    (GEMMA, "ssu", [("user", "012")], [NO_SYSTEM]),
    (GEMMA, "s", [("user", "0")], [NO_QUESTION]),
    (GEMMA, "sau", [("user", "0"), ("assistant", "1"), ("user", "2")], [NO_SYSTEM]),
    (GEMMA, "uu", [("user", "01")], [QUESTIONS]),
    (GEMMA, "uaau", [("user", "0"), ("assistant", "12"), ("user", "3")], [ANSWERS]),
    (GEMMA, "au", [("user", ""), ("assistant", "0"), ("user", "1")], [GREETING]),
    (GEMMA, "uasu", [("user", "0"), ("assistant", "1"), ("user", "23")], [LATE_SYSTEM]),
    (NEMO, "suu", [("system", "0"), ("user", "12")], [QUESTIONS]),
    (NEMO, "ssu", [("system", "01"), ("user", "2")], [ONE_SYSTEM]),
    (NEMO, "uctu", [("user", "0"), ("assistant", ""), ("tool", "23")], [AFTER_RESULT]),
    (FIRST_ONLY, "suasu", None, [LATE_SYSTEM]),
    (FIRST_ONLY, "suu", None, []),
    (TOOL_TEMPLATES["gpt-oss"], "usu", [("user", "01"), ("user", "2")], [LATE_SYSTEM]),
    (TOOL_TEMPLATES["llama-3.1"], "suusaau", None, []),
]


@pytest.mark.parametrize(("source", "roles", "wanted", "notices"), CASES)
def test_messages_move_and_join(source, roles, wanted, notices):
    adapted, told = plain(source=source).adapt(messages := talk(roles))
    assert told == notices and messages == talk(roles)
    if wanted is not None:
        texts = ["\n\n".join(f"text-{digit}" for digit in digits) for _, digits in wanted]
        assert [m["content"] for m in adapted] == texts
        assert [m["role"] for m in adapted] == [role for role, _ in wanted]
    assert all(message.isascii() and "," not in message for message in told)  # a header's items


def test_the_system_message_of_gemma_2_precedes_its_first_question(judge, tokenizer):
    """The same text and ids as of a question that begins with it."""
    template = ChatTemplate(GEMMA, "gemma-2", tokenizer.named)
    messages = talk("suau")
    one = {"role": "user", "content": "text-0\n\ntext-1"}
    wanted = apply(judge, GEMMA, [one, *messages[2:]])
    conversation = Conversation(tokenizer, template, messages, Toolbox(), GenerationOptions())
    assert conversation.render() == wanted
    prompt = conversation.encode()
    assert prompt.notices == (NO_SYSTEM,)
    assert prompt.tokens == encode_messages(tokenizer, template, messages)
    assert tokenizer.decode(prompt.tokens, skip_special=False) == wanted


def test_a_template_that_forgets_is_told_of():
    template = plain(source="{{ messages[-1].content }}")
    assert template.adapt(talk("u"))[1] == []
    assert template.adapt(talk("uau"))[1] == [FORGETS]


def test_calls_and_names_stay_with_the_messages_that_are_joined():
    template = plain(source=GEMMA)
    question = {"role": "user", "content": "a", "name": "Ada"}
    answers = [{"role": "assistant", "content": "b"}, {**talk("uc")[1], "reasoning_content": "hm"}]
    adapted, _ = template.adapt([question, {"role": "user", "content": ""}, *answers])
    assert adapted[0] == question
    wanted = {"content": "b", "tool_calls": [CALL], "reasoning_content": "hm"}
    assert adapted[1] == {"role": "assistant", **wanted}
    assert template.adapt(called := talk("uca"))[0] == check_messages(called)


def test_tools_of_a_template_without_a_system_role_precede_the_question(tokenizer):
    """The template may word its refusal in any way."""
    source = GEMMA.replace("System role not supported", "no, sorry")
    template = ChatTemplate(source, "gemma", tokenizer.named)
    tools = read_tools([{"type": "function", "function": {"name": "the_time", "parameters": {}}}])
    how = Toolbox(tuple(tools)), GenerationOptions()
    conversation = Conversation(tokenizer, template, talk("su"), *how)
    text = conversation.render()
    assert text.index("the_time") < text.index("text-0\n\ntext-1") and "system\n" not in text
    assert tokenizer.decode(conversation.encode().tokens, skip_special=False) == text


# Contents as parts

IMAGES_FIRST = (  # as LLaVA's and Llama Guard 3's
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}"
    "{% endfor %}"
)
IN_PARTS = {
    "select": IMAGES_FIRST,
    "first": "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}",
    "joined": "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content | map(attribute='text') | join }}{% endfor %}",
    "loop": "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}"
    "{% if c.type == 'text' %}{{ c.text | trim }}{% endif %}{% endfor %}{% endfor %}",
    "refused": "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}"
    "{{ raise_exception('a list of parts, please') }}{% endif %}{{ m.content[0]['text'] }}"
    "{% endfor %}",
    "answers are strings": "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{{ m.content + '' }}{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}",
}


def in_parts(messages: list[dict], source: str) -> list[dict]:
    strings = ("assistant",) if "'assistant'" in source else ()
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if m["role"] not in strings
        else m
        for m in messages
    ]


@pytest.mark.parametrize("source", IN_PARTS.values(), ids=IN_PARTS)
def test_a_template_of_parts_gets_parts(source, judge, tokenizer):
    template = ChatTemplate(source, "parts", tokenizer.named)
    for roles in ("u", "su", "suau"):
        messages = talk(roles)
        wanted = apply(judge, source, in_parts(messages, source))
        assert all(m["content"] in wanted for m in messages)
        assert template.render(messages) == template.render(in_parts(messages, source)) == wanted
        ids = encode_messages(tokenizer, template, messages)
        assert tokenizer.decode(ids) == wanted
    text = "a{bos_token}b{eos_token}".format(**tokenizer.named)  # stays text
    ids = encode_messages(tokenizer, template, [{"role": "user", "content": text}])
    assert not set(tokenizer.special_ids.values()) & set(ids[1:]) and text in tokenizer.decode(ids)


def test_a_template_of_strings_gets_strings(judge):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    for name in ("llama-3", "smollm2"):
        wanted = apply(
            judge, TEMPLATES[name], [{"role": "user", "content": "one two"}], bos_token=""
        )
        for given in (parts, "one two"):
            messages = [{"role": "user", "content": given}]
            assert plain(source=TEMPLATES[name], bos_token="").render(messages) == wanted


TRANSLATE = (  # as TranslateGemma's
    "{% for m in messages %}{% set c = m.content %}"
    "{% if c is string or c | length != 1 or 'source_lang_code' not in c[0] %}"
    "{{ raise_exception('content must be one part with source_lang_code') }}{% endif %}"
    "From {{ c[0].source_lang_code }}: {{ c[0].text }}{% endfor %}"
)


def test_fields_of_parts_reach_the_template(judge, tokenizer):
    template = ChatTemplate(TRANSLATE, "translate", tokenizer.named)
    end = tokenizer.named["eos_token"]
    part = {"type": "text", "text": "Hallo", "source_lang_code": f"de{end}"}
    messages = [{"role": "user", "content": [part]}]
    wanted = apply(judge, TRANSLATE, messages)
    assert wanted == f"From de{end}: Hallo" == template.render(messages)
    ids = encode_messages(tokenizer, template, messages)
    assert tokenizer.special_ids[end] not in ids
    assert tokenizer.decode(ids).endswith(wanted)
    text = refusal(lambda: encode_messages(tokenizer, template, talk("u")), kind=TemplateError)
    assert "refuses this conversation: content must be one part" in text
    # as llama-server's clients send it
    given = {"source_lang_code": f"de{end}"}
    messages = [{"role": "user", "content": "Hallo"}]
    how = Toolbox(), GenerationOptions(), given
    conversation = Conversation(tokenizer, template, messages, *how)
    assert conversation.render() == wanted and conversation.encode().tokens == ids


@pytest.mark.parametrize(
    "source",
    [
        "Hello.",
        "{% for m in messages %}<{{ m.role }}>{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{{ c.value }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content[0].parts.text }}{% endfor %}",
    ],
)
def test_a_template_that_shows_no_text_is_refused(source, tokenizer):
    template = ChatTemplate(source, "mute.jinja", tokenizer.named)
    talks = Conversation(tokenizer, template, talk("u"), Toolbox(), GenerationOptions())
    for call in (
        lambda: encode_messages(tokenizer, template, talk("u")),
        talks.encode,
        talks.render,
    ):
        text = refusal(call, kind=TemplateError)
        assert text.startswith("mute.jinja: ") and "\n" not in text


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ("x", "content is"),
        (7, "content is"),
        ({"text": "x"}, "content[1] is"),
        ({"type": "image"}, "content[1] is"),
        ({"type": "text", "text": 7}, "content[1] is"),
    ],
)
def test_malformed_parts_are_named(part, place):
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    text = refusal(lambda: plain().render(messages), kind=TemplateError)
    assert text.startswith(f"messages[0].{place} ")


# Probes


def test_a_probe_is_rendered_once_and_a_plain_question_needs_one():
    rendered = []

    def render(messages):
        rendered.append([message["role"] for message in messages])
        return " ".join(message["content"] for message in messages)

    habits = Habits(render)
    for _ in range(2):
        habits.shape(talk("u"), {})
    assert rendered == [["user"]]
    for _ in range(2):
        assert not habits.refuses(("user",), ("system", "user"))
    assert rendered == [["user"], ["system", "user"]]


def test_plain_text_that_the_user_chose_is_a_template():
    """As llama-server takes it, with a notice: its tests ask for that."""
    template = load_builtin_template("This is not a chat template, it is")
    messages = [{"role": "user", "content": "hello"}]
    template.check_shown(messages, template.render(messages))
    assert "shows no message" in template.notice
