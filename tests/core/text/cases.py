"""Texts, templates and conversations that several test files use."""

from hypothesis import strategies as st
from making import CHAT_TEMPLATE, config_fields, refusal

from mlx_llama.core.errors import TemplateError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.gguf_tokenizer import load_gguf_tokenizer
from mlx_llama.core.text.hf_tokenizer import load_tokenizer
from mlx_llama.core.text.template import ChatTemplate, read_template

# Tokenizers

VOCABULARIES = ("llama-spm", "llama-bpe", "deepseek-coder")  # llama.cpp's own, in tests/data
KINDS = ("sentencepiece", "llama2", "bytelevel")
TEXTS = [
    "Hello world",
    " leading space",
    "  two leading",
    "trailing ",
    "a  b   c",
    "Once upon a time\nthere was\n\n\ta llama.\r\n",
    "çà ñandú Straße 你好世界 สวัสดี 🦙🤖 👩‍👩‍👧‍👦 e\u0301",
    "numbers 1234567 3.14 and symbols <|>[]{}~^",
    "\u2581 the visible space \u2581\u2581 itself",
    "\x00 \x7f \ufeff \u200d \ufffd",
    "def f(x):\n    return x + 1\n",
    " ",
    "\n",
    "don't I'LL we've",
]


def any_text(*pieces):
    """Texts that a user may type, rich in characters that break tokenizers."""
    rich = [*" \n\t🦙é你<>|_/s", "  ", "Hello", " world", "<0x41>", *pieces]
    return st.lists(
        st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(rich)), max_size=30
    ).map("".join)


def load_folder(folder, **fields):
    """The tokenizer of a folder, for a config.json with these fields."""
    return load_tokenizer(folder, LlamaConfig.from_dict(config_fields(**fields)))


def load_vocabulary(metadata, **fields):
    """A tokenizer from GGUF metadata, `fields` of tokenizer.ggml.* replaced (None: left out)."""
    metadata = metadata | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    return load_gguf_tokenizer(
        metadata, LlamaConfig.from_dict(config_fields(vocab_size=128256)), "toy.gguf"
    )


def has_wide_space(text):
    """True if llama.cpp and deepseek's own tokenizer.json split a text differently: see
    core/text/pre_tokenizers.py.
    """
    return any(char.isspace() and char >= "\u0800" for char in text)


# Templates

# As the hub's models carry them, some shortened
TEMPLATES = {
    "toy": CHAT_TEMPLATE,
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set " "system_message = "
        "messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set " "system_message = false %}{% endif %}"
        "{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % " "2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate " "user/assistant/user/assistant/...') }}{% endif %}"
        "{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + " "system_message + "
        "'\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = " "message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' " "[/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = " "'<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' " "%}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if " "add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama-3.1": (
        "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools " "%}\n{%- endif %}\n"
        "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
        '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n'
        '        {%- set date_string = "26 Jul 2024" %}\n    {%- endif %}\n{%- endif %}\n'
        "{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = " "messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = " "\"\" %}\n{%- endif %}\n"
        '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n{%- if tools is not none %}\n'
        '    {{- "Environment: ipython\\n" }}\n    {%- for t in tools %}\n        {{- t | ' 'tojson(indent=4) }}\n'
        '    {%- endfor %}\n{%- endif %}\n{{- "Cutting Knowledge Date: December 2023\\n" }}\n'
        '{{- "Today Date: " + date_string + "\\n\\n" }}\n{{- system_message }}\n{{- ' '"<|eot_id|>" }}\n'
        "{%- for message in messages %}\n"
        "    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' " "in message) %}\n"
        "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ " "message['content'] | trim + "
        "'<|eot_id|>' }}\n    {%- elif 'tool_calls' in message %}\n        {%- if not " "message.tool_calls|length == 1 %}\n"
        '            {{- raise_exception("This model only supports single tool-calls at ' 'once!") }}\n'
        "        {%- endif %}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != " "(loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate " "user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% " "endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + " "message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + " "message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] " "+ eos_token }}\n{% endif %}"
        "\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif " "%}\n{% endfor %}"
    ),
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' " "%}{{ '<|im_start|>system\nYou "
        "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% " "endif %}{{'<|im_start|>' + "
        "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if " "add_generation_prompt %}"
        "{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "namespace": (
        "{%- set ns = namespace(found=false, text='') -%}{%- for m in messages -%}{%- if " "m.role == 'assistant' -%}"
        "{%- set ns.found = true -%}{%- continue -%}{%- endif -%}{%- set ns.text = ns.text ~ " "m.content ~ '|' -%}"
        "{%- endfor -%}{{ bos_token ~ ns.text ~ ns.found }}{% for i in range(3) %}{% if i == 2 " "%}{% break %}{% endif %}"
        "{{ i }}{% endfor %}"
    ),
    "macro": (
        "{% macro turn(m, mark='#') %}{{ mark }}{{ m['role']|upper }}: {{ " "m['content']|replace('a', 'b') }}\n{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% generation %}{{ loop.index }}{% endgeneration %}"
        "{{ m | tojson }}{% endfor %}{{ messages | map(attribute='role') | join(', ') }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ " "messages[::-1][0]['content'][:5] }}"
        "{{ dict(a=1)['a'] + 2 * 3 ** 2 }}{{ '%s-%d' % ('x', 3) }}{{ 'é<&' | tojson }}"
    ),
    "blocks": (
        "{% set text %}{% for m in messages %}<{{ m.content.split(' ')[0] }}>{% endfor %}{% endset %}{{ text | trim }}\n"
        "   {% if tools is none %}no tools{% endif %}\n  {# a comment #}\n{% filter upper " "%}abc{% endfilter %}\n"
        "{{ pad_token is defined }} {{ unk_token }} {{ [1, 2] + [3] }} {{ {'k': 'v'}.items() | " "list }}\n"
        "{{ 'loop' if messages|length > 1 else 'one' }} {{ " "messages[-1].content.startswith('x') }}\n"
    ),
}  # fmt: skip


def conversation(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


USER = conversation([("user", "Hi")])


def plain(name="t", source=CHAT_TEMPLATE, **variables):
    return ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>", **variables})


def load_template(folder, tokenizer):
    """A folder's template, or None."""
    template = read_template(folder)
    return template and ChatTemplate(template.source, template.name, tokenizer.named)


def run_hostile(source, messages=USER, **variables) -> str:
    """Render a template that must fail, in one line; returns that line."""
    render = lambda: ChatTemplate(source, "evil.jinja", variables).render(messages)  # noqa: E731
    message = refusal(render, kind=TemplateError)
    assert message.startswith("evil.jinja: ") and message.isprintable() and len(message) < 600
    return message
