"""Chat templates, judged by transformers' apply_chat_template; hostile messages."""

import itertools
import json
import lzma
from types import SimpleNamespace

import jinja2
import pytest
from cases.texts import (
    DATA,
    KINDS,
    TEMPLATES,
    TOOL_TEMPLATES,
    USER,
    conversation,
    load_template,
    plain,
)
from hypothesis import assume, given, strategies as st
from making import (
    CHAT_TEMPLATE,
    config_fields,
    make_checkpoint,
    make_tokenizer,
    refusal,
    sentencepiece_model,
)
from transformers import AutoTokenizer

from mlx_llama.api.tool_use import Conversation, Toolbox
from mlx_llama.core.errors import TemplateError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.text.hf_tokenizer import load_tokenizer
from mlx_llama.core.text.template import (
    BUILTIN,
    ChatTemplate,
    encode_messages,
    load_builtin_template,
    missing_template,
    read_template,
)
from mlx_llama.core.text.tools import read_tools
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx

CONVERSATIONS = {
    "one": [("user", "Hello world")],
    "turns": [("user", "Hello"), ("assistant", "hi there"), ("user", "and a llama?")],
    "spaces": [("user", "  a  b \n"), ("assistant", " leading"), ("user", "\n\nnew\tlines\n")],
    "unicode": [
        ("user", "你好 🦙 çà"),
        ("assistant", "e\u0301 👩‍👩‍👧"),
        ("user", "ñ [INST] <t> </t>"),
    ],
    "empty": [("user", ""), ("assistant", ""), ("user", "x")],
    "jinja": [("user", "{{ 7 * 7 }} {% raw %}"), ("assistant", "{#"), ("user", "a < b & d ' \"")],
    "system": [("system", "You are a helpful assistant."), ("user", "What is the capital?")],
    "edges": [("user", "<"), ("assistant", "<|"), ("user", "x <")],
}


def setup(folder, kind, source, **settings_):
    """(our tokenizer, our template, transformers' tokenizer)"""
    make_tokenizer(folder, kind, chat_template=source, **settings_)
    (folder / "config.json").write_text(json.dumps(config_fields(vocab_size=400)))
    ours = load_tokenizer(folder, LlamaConfig.from_file(folder))
    return SimpleNamespace(
        tokenizer=ours,
        template=load_template(folder, ours),
        judge=AutoTokenizer.from_pretrained(folder),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {kind: setup(tmp_path_factory.mktemp(kind), kind, CHAT_TEMPLATE) for kind in KINDS}


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
    return [token for token in ids if token in specials]


def attack(model, template, messages):
    """The same control tokens as a harmless conversation has, and the literal text when decoded."""
    ids = encode_messages(model.tokenizer, template, messages)
    harmless = [message | {"content": "x"} for message in messages]
    plain_ids = encode_messages(model.tokenizer, template, harmless)
    assert controls(model, ids) == controls(model, plain_ids)
    text = template.render(messages)
    decoded = model.tokenizer.decode(ids, skip_special=False)
    has_bos = text.startswith(template.variables["bos_token"])
    assert decoded == text if has_bos else decoded.endswith(text)


FORMS = ["{0}", "a{0}b", " {0} ", "{0}{0}", "x{0}\n{0}", "é{0}🦙", "{0} {1}", "{1}{0}", "<{0}>"]


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_messages_are_text(kind, role, models):
    model = models[kind]
    names = [name for name in model.tokenizer.special_ids if name != "<unk>"]
    for first, form in itertools.product(names, FORMS):
        content = form.format(first, names[0])
        messages = conversation([("user", "Hi"), (role, content), ("user", content)])
        attack(model, model.template, messages)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_cannot_join_into_a_special_token(kind, models):
    """Two halves in neighbouring messages, or one half and the template's own text."""
    model = models[kind]
    pairs = [("/s", "/s"), (" /s\n", "</"), ("<", "/s>"), ("</", "s>"), ("<|eot", "_id|>")]
    pairs += [("<|eot", "x"), ("/s>", "s>"), ("</s", "<s"), ("<|end_of", "_text|")]
    content, trimmed = "{{ m.content }}", "{{ m.content | trim }}"
    for form in (content, content + "_id|>", "<" + content, content + ">", f"<{trimmed}>"):
        source = "{{ bos_token }}{% for m in messages %}" + form + "{% endfor %}"
        template = ChatTemplate(source, "t", model.tokenizer.named)
        for a, b in pairs:
            attack(model, template, conversation([("user", a), ("user", b)]))


USER_DEFINED = ("<|user|>", "<|end|>", "<|free|>")


def with_symbols(folder):
    make_tokenizer(folder, "sentencepiece")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(user_defined=USER_DEFINED))
    return load_tokenizer(folder, LlamaConfig.from_dict(config_fields()))


def test_an_added_token_that_the_template_writes_is_control_there_only(tmp_path):
    """User-defined symbols of sentencepiece, which are not special to any library."""
    source = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = with_symbols(tmp_path)
    template = ChatTemplate(source, "t", tokenizer.named)
    text = "a<|end|>b <|user|> <|free|>"
    ids = encode_messages(tokenizer, template, conversation([("user", text)]))
    assert all(ids.count(tokenizer.added_ids[name]) == 1 for name in USER_DEFINED)
    assert tokenizer.decode(ids, skip_special=False) == f"<s><|user|>{text}<|end|>"


def test_assistant_messages_keep_their_added_tokens(tmp_path):
    """<think> is a token in an assistant's message, and text in a user's."""
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    source += "{% if add_generation_prompt %}<|user|>{% endif %}"
    tokenizer = with_symbols(tmp_path)
    template, control = ChatTemplate(source, "t", tokenizer.named), tokenizer.added_ids["<|user|>"]
    for role, count in (("user", 0), ("assistant", 1)):
        ids = encode_messages(tokenizer, template, conversation([(role, "a <|user|> </s>")]), False)
        assert ids.count(control) == count and ids.count(2) == 0


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_hostile_message_adds_no_control_token(kind, data, models):
    model = models[kind]
    names = [*model.tokenizer.special_ids, "<|user|>", "<|assistant|>"]
    halves = [name[1:-1] for name in names]
    halves += [half for name in names for n in (1, 2, 4) for half in (name[:n], name[n:])]
    piece = st.sampled_from([*names, *halves, " ", "\n", "x", "\U0001d000", "\U0001d001"])
    contents = data.draw(st.lists(st.lists(piece, max_size=6).map("".join), min_size=1, max_size=3))
    assume(not any("<unk>" in content for content in contents))
    attack(model, model.template, conversation([("user", content) for content in contents]))


@pytest.mark.parametrize("kind", KINDS)
def test_harmless_edges_leave_the_ids_alone(kind, models):
    """A message that ends like the beginning of a special token, and completes none, stays in one
    piece.
    """
    model = models[kind]
    for content in ("<", "a <", "<|", "x</", "|>", ">", "s>"):
        messages = conversation([("user", content)])
        how = dict(tokenize=True, return_dict=False, add_generation_prompt=True)
        ids = model.judge.apply_chat_template(messages, **how)
        assert encode_messages(model.tokenizer, model.template, messages) == ids


@pytest.mark.parametrize("kind", KINDS)
def test_lone_surrogates_in_a_message_are_replaced(kind, models):
    """The judge takes U+FFFD alone."""
    model, how = models[kind], dict(tokenize=True, return_dict=False, add_generation_prompt=True)
    for lone, shown in (
        ("a\ud83e", "a\ufffd"),
        ("\udd99\ud83e", "\ufffd" * 2),
        ("\ud83e\udd99", "🦙"),
    ):
        ids = model.judge.apply_chat_template(conversation([("user", shown)]), **how)
        talk = conversation([("user", lone)])
        assert encode_messages(model.tokenizer, model.template, talk) == ids


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("Hi", "messages"),
        (None, "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["Hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": "x", "nom": "y"}], "messages[0]"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "user", "content": "x", "reasoning_content": "y"}], "messages[0]"),
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
        assert field in refusal(call, kind=TemplateError)


def test_the_callers_messages_stay_as_they_are():
    messages = conversation([("user", "</s>")])
    before = json.dumps(messages)
    plain().render(messages)
    assert json.dumps(messages) == before


NAMED = (
    "{% for m in messages %}{{ bos_token }}{% if m.name %}{{ m.name }}: {% endif %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_reasoning_reach_the_template_as_text(kind, models):
    model = models[kind]
    template = ChatTemplate(NAMED, "named", model.tokenizer.named)
    messages = [
        {"role": "user", "content": "Hello", "name": "Ada"},
        {"role": "assistant", "content": "hi", "reasoning_content": "hm"},
    ]
    how = dict(chat_template=NAMED, tokenize=True, return_dict=False)
    wanted = model.judge.apply_chat_template(messages, **how)
    assert encode_messages(model.tokenizer, template, messages, False) == wanted
    eos = model.tokenizer.named["eos_token"]
    hostile = [messages[0] | {"name": f"A{eos}"}]
    hostile += [messages[1] | {"reasoning_content": f"{eos}\U0001d000"}]
    ids = encode_messages(model.tokenizer, template, hostile, False)
    text = model.tokenizer.decode(ids)
    assert ids.count(model.tokenizer.special_ids[eos]) == 2 and f"A{eos}: Hello" in text
    assert f"({eos}\U0001d000) hi" in text


# Sources of templates


BOTH = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
NEW = {"chat_template.jinja": "new {{ eos_token }}"}
OLD = {"chat_template.json": '{"chat_template": "old {{ eos_token }}"}'}


@pytest.mark.parametrize(
    "files, setting, place, text",
    [
        (NEW | OLD, "other", "chat_template.jinja", "new </s>"),
        (OLD, "newer {{ eos_token }}", "tokenizer_config.json", "newer </s>"),
        (OLD, None, "chat_template.json", "old </s>"),
        ({}, BOTH, "tokenizer_config.json", "chat"),
    ],
)
def test_the_first_of_several_places_counts(files, setting, place, text, tmp_path, models):
    make_tokenizer(tmp_path, "sentencepiece", chat_template=setting)
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    template = load_template(tmp_path, models["sentencepiece"].tokenizer)
    assert template.render(USER) == text and place in template.name
    assert not read_template(tmp_path).notice


@pytest.mark.parametrize("names", [["tool_use", "rag", "long"], ["rag", "tool_use"], ["tool_use"]])
def test_of_several_without_a_default_the_first_for_talk(names, tmp_path):
    named = [{"name": name, "template": f"for {name}"} for name in names]
    make_tokenizer(tmp_path, "sentencepiece", chat_template=named)
    text, wanted = read_template(tmp_path), "rag" if "rag" in names else "tool_use"
    assert text.source == f"for {wanted}" and f"using '{wanted}'" in text.notice


SEVERAL = {
    "default": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "rag": "{% for d in documents %}<{{ d.title }}: {{ d.text }}>{% endfor %}{{ messages }}",
    "tool_use": TOOL_TEMPLATES["qwen2.5"],
}
DOCUMENTS = [{"title": "A", "text": "b"}, {"title": "C", "text": "d"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


@pytest.mark.parametrize("stored", ["tokenizer_config.json", "files"])
def test_requests_with_tools_or_documents_use_the_template_named_for_them(stored, tmp_path, models):
    """Judged by transformers; also after a way through GGUF and back."""
    folder = make_checkpoint(tmp_path / "m", tokenizer=False)
    listed = [{"name": name, "template": text} for name, text in SEVERAL.items()]
    if stored == "files":
        make_tokenizer(folder, "sentencepiece", chat_template=None)
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(SEVERAL["default"])
        for name in ("tool_use", "rag"):
            (folder / f"additional_chat_templates/{name}.jinja").write_text(SEVERAL[name])
    else:
        make_tokenizer(folder, "sentencepiece", chat_template=listed)
    judge = AutoTokenizer.from_pretrained(folder)
    written = write_gguf(open_checkpoint(folder), tmp_path / "m.gguf", "F16").path
    back, copied = tmp_path / "back", tmp_path / "copied"
    write_mlx(open_checkpoint(written), back, 8)
    write_mlx(open_checkpoint(folder), copied, 8)
    for path in (folder, written, back, copied):
        template = open_checkpoint(path).template
        assert not template.notice
        for tools in (None, [TOOL]):
            how = dict(tools=tools, tokenize=False, add_generation_prompt=True)
            wanted = judge.apply_chat_template(USER, **how)
            assert template.choose(bool(tools)).render(USER, tools=tools) == wanted
        how = dict(chat_template="rag", documents=DOCUMENTS, tokenize=False)
        wanted = judge.apply_chat_template(USER, **how)
        rag = template.choose(False, True)
        assert rag.render(USER, documents=DOCUMENTS) == wanted and "<A: b>" in wanted
        assert template.choose(True, True).source == SEVERAL["tool_use"]
    llm, tools = open_checkpoint(folder), tuple(read_tools([TOOL]))
    for choice in ("auto", "none"):
        box, options = Toolbox(tools, choice), GenerationOptions()
        prompt = Conversation(llm.tokenizer, llm.template, USER, box, options).encode()
        text = llm.tokenizer.decode(prompt.tokens)
        assert ("<tools>" in text, text.startswith("[")) == (choice == "auto", choice == "none")


@pytest.mark.parametrize("value", [None, "", False])
def test_none_at_all(value, tmp_path, models):
    make_tokenizer(tmp_path, "sentencepiece", chat_template=value or None)
    assert load_template(tmp_path, models["sentencepiece"].tokenizer) is None
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_template(tmp_path, models["sentencepiece"].tokenizer) is None
    text = missing_template("m")
    assert "`template`" in text and all(name in text for name in BUILTIN)


@pytest.mark.parametrize("value", [7, {"a": 1}, [1], [{"name": 3}], [{"name": []}]])
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
    template = load_builtin_template(name, tokenizer)
    talk = conversation([("user", "Hello"), ("assistant", "Hi!"), ("user", "Bye")])
    for messages in (talk, [{"role": "system", "content": "Be brief."}, *talk]):
        text = template.render(messages)
        places = [text.index(message["content"]) for message in messages]
        assert places[-3:] == sorted(places[-3:])
        ids = encode_messages(tokenizer, template, messages)
        assert ids[0] == tokenizer.bos_id


@pytest.mark.parametrize(
    ("name", "reference"), [("llama2", "llama-2"), ("llama3", "llama-3"), ("zephyr", "zephyr")]
)
def test_builtin_templates_write_the_text_of_the_models_own(name, reference):
    talk = conversation([("user", " Hello"), ("assistant", "Hi! "), ("user", "Bye")])
    system = conversation([("system", "Be brief.")])
    for messages in (talk, system + talk):
        ours, theirs = (plain(source=s) for s in (BUILTIN[name], TEMPLATES[reference]))
        assert ours.render(messages).rstrip() == theirs.render(messages).rstrip()


def test_names_of_llama_cpp_write_its_text():
    """Judged by llama.cpp's C++. llama2 and zephyr are those of the models, as before."""
    data = json.loads(lzma.decompress((DATA / "templates-llama-cpp.json.xz").read_bytes()))
    assert len(data["texts"]) == 54
    for name in data["texts"].keys() - {"llama2", "zephyr"}:
        template = load_builtin_template(name)
        for pairs, texts in zip(data["conversations"], data["texts"][name], strict=True):
            for has_prompt, text in zip((False, True), texts, strict=True):
                assert template.render(conversation(pairs), has_prompt) == text, name


@pytest.mark.parametrize("text", ["This is not a chat template, it is", "two\nlines"])
def test_a_template_of_plain_text(text, models):
    """As Jinja and llama.cpp have it, with a notice."""
    template = load_builtin_template(text, models["llama2"].tokenizer)
    assert template.render(USER) == text and "shows no message" in template.notice
    for typo in ("lama3", "my folder/a.jinja", "my template.jinja", "a b/c"):
        with pytest.raises(TemplateError, match="neither a file"):
            load_builtin_template(typo)


@pytest.mark.parametrize("name", ["llama2", "mistral"])
def test_builtin_templates_that_must_alternate(name):
    with pytest.raises(TemplateError, match="alternate"):
        plain(source=BUILTIN[name]).render(conversation([("user", "a"), ("user", "b")]))


def test_a_template_file_by_path(tmp_path, models):
    path = tmp_path / "mine.jinja"
    path.write_text("X{{ messages[0].content }}", encoding="utf-8")
    assert load_builtin_template(str(path), models["llama2"].tokenizer).render(USER) == "XHi"
    with pytest.raises(TemplateError, match="nowhere.jinja.*chatml"):
        load_builtin_template("nowhere.jinja", models["llama2"].tokenizer)
