"""Chat templates: from messages to the text, and the token ids, that a model was trained on.

A template is an untrusted program. This file loads and applies it; sandbox.py runs it, within the
limits of template_process.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mlx_llama.core.errors import TemplateError, show
from mlx_llama.core.system.files import read_json, read_text, reading

from .adapting import Habits, PartsText, adapt_messages, split_parts
from .controls import one_line
from .template_process import PROCESS, Stopped, is_known
from .tokenizer import Tokenizer

# {"role", "content"}; of an assistant also "tool_calls", and then the content may be None, and
# "tool_responses", [{"name", "response"}], for templates that take results there (Gemma 4); of a
# tool also "tool_call_id" and "name". A content is a text, or a list of {"type": "text", "text"},
# perhaps with further fields for templates that take lists.
Message = Mapping[str, Any]

_FIELDS = {
    "assistant": {"tool_calls", "tool_responses", "name", "reasoning_content"},
    "tool": {"tool_call_id", "name"},
    "user": {"name"},
    "system": {"name", "tools"},  # Phi-4 mini takes tools here, as text
}
MAX_CALLS = 128  # in one message
MOST_BYTES = 1 << 20  # maximum size of a file; the largest in use have 50 thousand
# names of the templates for requests with tools and with documents, as transformers has them
TOOL_USE, RAG = NAMES = "tool_use", "rag"
NAMED_FILE = "additional_chat_templates/{}.jinja"  # beside chat_template.jinja
# template variables that hold descriptions of tools
TOOLS = ("tools", "xml_tools", "python_tools", "functions")


class JsonText(str):
    """A call's arguments for a template that takes them as text."""


_REMEDY = "check the file, or choose another template with `template`"


class ChatTemplate:
    """A chat template. Unknown ones render in a process with limited time and memory."""

    def __init__(self, source: str, name: str, variables: Mapping[str, Any] | None = None):
        """Compile a template.

        source: Jinja text. name: of the file or built-in, for errors. variables: of the template,
        besides `messages` and `add_generation_prompt`; normally the texts of the tokenizer's named
        tokens (bos_token, ...).

        Raises TemplateError: too long, or not valid Jinja.
        """
        # A byte order mark would be in every prompt.
        self.source = source = source.removeprefix("\ufeff")
        self.name, self.variables = name, dict(variables or {})
        self.notice = ""  # for the user
        self.is_plain = False  # plain text that the user chose
        self.named: dict[str, ChatTemplate] = {}  # templates for NAMES, used where they apply
        self._is_known = _is_known(source)
        self._habits = Habits(self._probe)
        self._run(None)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **extras: Any
    ) -> str:
        """Render a conversation as the model's text, with contents of the kind that the template
        takes.

        messages: see `Message`. add_generation_prompt: end with the header of the assistant's next
        message. extras: further variables of JSON's types, such as tools (`Tool.as_dict` each);
        they override `variables`.

        Raises TemplateError: malformed messages; the template refuses the conversation, fails,
        violates the sandbox, or exceeds a limit.
        """
        values = {**extras, "add_generation_prompt": add_generation_prompt}
        return self._run(self._name_values(self.shape(messages, extras), values))

    def _probe(self, messages: list[dict[str, Any]]) -> str | None:
        """The text of messages; None if the template refuses them or fails. Raises TemplateError if
        it exceeds a limit.
        """
        kind, text = self._answer(self._name_values(messages, {"add_generation_prompt": True}))
        return text if kind == "text" else None

    def _name_values(
        self, messages: list[dict[str, Any]], extras: Mapping[str, Any]
    ) -> dict[str, Any]:
        values = {"tools": None, "documents": None, **self.variables, **extras}
        return {**values, "messages": messages}

    def shape(self, messages: Sequence[Message], extras: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Checked messages, with contents as texts or as lists of parts, as the template takes
        them. extras: as of `render`. Raises TemplateError.
        """
        variables = {name: extras[name] for name in extras.keys() - {*TOOLS, "documents"}}
        fields = self._habits.find_fields(variables)
        return self._habits.shape(check_messages(messages), fields)

    def adapt(self, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[str]]:
        """Adapt a conversation that the template would refuse: system messages in places where it
        takes none, roles that do not alternate. Returns checked messages, and a notice of each kind
        of change. Raises TemplateError.
        """
        return adapt_messages(check_messages(messages), self._habits)

    def check_shown(self, messages: Sequence[Message], text: str) -> None:
        """Raise TemplateError if `text`, of these messages, lacks a question, for a template that
        failed in the probes. One of plain text, which its notice told of, is used as it is.
        """
        if self.is_plain or self._habits.takes_parts("user") is not None:
            return
        questions = (message["content"] for message in messages if message["role"] == "user")
        parts = itertools.chain.from_iterable(map(split_parts, questions))
        if not all(part["text"].strip() in text for part in parts):
            raise TemplateError(
                f"{self.name}: the template shows a question's text neither from a string nor from "
                f"a list of parts; {_REMEDY}"
            )

    def choose(self, has_tools: bool, has_documents: bool = False) -> ChatTemplate:
        """The template for a request that offers tools or brings documents, or neither."""
        other = self.named.get(TOOL_USE) if has_tools else None
        return other or (self.named.get(RAG) if has_documents else None) or self

    def _run(self, values: dict[str, Any] | None) -> str:
        """Render, or only compile (values None)."""
        kind, text = self._answer(values)
        if kind == "text":
            return text
        fault = f"{one_line(text)}; {_REMEDY}"
        if kind == "refusal":
            fault = f"the template refuses this conversation: {one_line(text)}"
        raise TemplateError(f"{self.name}: {fault}")

    def _answer(self, values: dict[str, Any] | None) -> tuple[str, str]:
        """As sandbox.answer. Raises TemplateError if the template exceeds a limit."""
        if self._is_known:
            from . import sandbox  # imports Jinja

            return sandbox.answer(self.source, values)
        try:
            return PROCESS.request(self.source, values)
        except Stopped as e:
            raise TemplateError(f"{self.name}: the template was stopped: {e}; {_REMEDY}") from None
        except (TypeError, ValueError, RecursionError) as e:
            return "fault", f"its variables cannot be expressed as JSON: {e}"


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check messages; returns them with contents as text (of several parts: `PartsText`) and
    arguments of calls as objects.

    Raises TemplateError that names the malformed message and field.
    """
    if not isinstance(messages, (list, tuple)):
        raise _unexpected("messages", messages, "a list of {'role', 'content'}")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message: Any, where: str) -> dict[str, Any]:
    fields = dict(message) if isinstance(message, Mapping) else {}
    role = fields.get("role")
    extra = _FIELDS.get(role, set()) if isinstance(role, str) else set()
    needed = {"role"} if "tool_calls" in fields and role == "assistant" else {"role", "content"}
    if not needed <= fields.keys() <= {"role", "content"} | extra:
        present = sorted(map(str, fields)) if isinstance(message, Mapping) else message
        more = f", optionally {' and '.join(sorted(extra))}" if extra else ""
        raise TemplateError(
            f"{where} has {show(present)}, expected the fields role and content{more}"
        )
    if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][\w-]{0,63}", role, re.ASCII):
        raise _unexpected(f"{where}.role", role, "a word such as system, user or assistant")
    calls = fields.pop("tool_calls", None)
    if calls is not None:
        fields["tool_calls"] = _check_calls(calls, f"{where}.tool_calls")
    responses = fields.get("tool_responses", ())
    if not isinstance(responses, (list, tuple)) or not all(map(_is_response, responses)):
        expected = "a list of {'name', 'response'}"
        raise _unexpected(f"{where}.tool_responses", responses, expected)
    fields["content"] = "" if calls and fields.get("content") is None else fields.get("content")
    if isinstance(fields["content"], (list, tuple)):
        fields["content"] = _check_parts(fields["content"], f"{where}.content")
    for name in ("content", "tool_call_id", "name", "reasoning_content", "tools"):
        if name in fields and not isinstance(fields[name], str):
            raise _unexpected(f"{where}.{name}", fields[name], "a string")
    return fields


def _is_response(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("name"), str) and "response" in value


def _check_parts(parts: Sequence[Any], where: str) -> PartsText:
    if not all(isinstance(part, Mapping) for part in parts):
        raise _unexpected(where, parts, "a string, or a list of {'type': 'text', 'text'}")
    for i, part in enumerate(parts):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _unexpected(f"{where}[{i}]", part, "{'type': 'text', 'text': a string}")
    return PartsText(parts)


def _unexpected(place: str, value: object, expected: str) -> TemplateError:
    return TemplateError(f"{place} is {show(value)}, expected {expected}")


def _check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Check a message's calls; returns their arguments as objects, which print as JSON."""
    if not isinstance(calls, (list, tuple)) or not 1 <= len(calls) <= MAX_CALLS:
        raise _unexpected(where, calls, f"a list of 1 to {MAX_CALLS} calls")
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = "{'id', 'type', 'function': {'name', 'arguments'}}"
            raise _unexpected(f"{where}[{i}]", call, form)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            place, expected = f"{where}[{i}].function.arguments", "an object, or JSON text of one"
            raise _unexpected(place, function["arguments"], expected)
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        text = function.get("arguments")
        inner = {
            "name": function["name"],
            "arguments": text if isinstance(text, JsonText) else dict(arguments),
        }
        checked.append({**identity, "type": "function", "function": inner})
    return checked


class TemplateText(NamedTuple):
    source: str
    name: str  # the file's name, for errors
    notice: str = ""  # about the choice among several
    named: Mapping[str, str] = MappingProxyType({})  # sources of the templates for NAMES

    def with_named(self, values: Mapping[str, Any], source: str | Path, field: str) -> TemplateText:
        """Add further templates by name. Raises TemplateError for a value that is not text."""
        texts = {name: _check_text(value, source, field) for name, value in values.items()}
        return self._replace(named={name: text.source for name, text in texts.items() if text})

    def compile(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Compile. Raises TemplateError, as ChatTemplate."""
        template = ChatTemplate(self.source, self.name, variables)
        template.notice = self.notice
        for name, source in self.named.items():
            template.named[name] = ChatTemplate(source, f"{self.name}, {name}", variables)
        return template


def read_template(folder: str | os.PathLike[str]) -> TemplateText | None:
    """Read a folder's template: chat_template.jinja, else tokenizer_config.json's, else
    chat_template.json's. None if it has none.

    Of several with names, take "default", else the first that is not "tool_use". See NAMES for the
    others; beside chat_template.jinja they are in additional_chat_templates.

    Raises TemplateError: there is one, but it cannot be read.
    """
    folder = Path(folder)
    if (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        files = {name: folder / NAMED_FILE.format(name) for name in NAMES}
        named = {name: _read(file) for name, file in files.items() if file.exists()}
        return TemplateText(_read(path), str(path), named=named)
    paths = (folder / name for name in ("tokenizer_config.json", "chat_template.json"))
    texts = (_read_field(path) for path in paths if path.exists())
    return next((text for text in texts if text is not None), None)


def _read_field(path: Path) -> TemplateText | None:
    value = read_json(path, TemplateError).get("chat_template")
    if not isinstance(value, list):
        return _check_text(value, path, "chat_template")
    # named templates: [{"name", "template"}]
    entries = [entry for entry in value if isinstance(entry, dict) and entry.get("template")]
    named = {str(entry.get("name")): entry["template"] for entry in entries}
    if not named:
        return _check_text(value, path, "chat_template")
    name = min(named, key=lambda name: (name != "default", name == TOOL_USE))
    text = _check_text(named[name], path, "chat_template")
    others = {other: named.get(other) for other in NAMES if other != name}
    text = text and text.with_named(others, path, "chat_template")
    if text is None or name == "default":
        return text
    notice = f"{path}: chat_template has {show(list(named))} and no 'default'; using {show(name)}"
    return text._replace(notice=notice)


def read_gguf_template(metadata: Mapping[str, Any], source: str) -> TemplateText | None:
    """Read the template in a GGUF file's metadata, None for none. source: the file, for errors.

    Further templates, of NAMES, are tokenizer.chat_template.NAME.

    Raises TemplateError: there is one, but it is not text.
    """
    key = "tokenizer.chat_template"
    text = _check_text(metadata.get(key), source, key)
    others = {name: metadata.get(f"{key}.{name}") for name in NAMES}
    return text and text.with_named(others, source, key)


def _check_text(value: Any, source: str | Path, field: str) -> TemplateText | None:
    if value is not None and not isinstance(value, str):
        expected = "Jinja text; choose a template with `template`"
        raise _unexpected(f"{source}: {field}", value, expected)
    return TemplateText(value, f"{source} ({field})") if value else None


def start_early(text: TemplateText) -> None:
    """Start the process that `text` needs while other files load."""
    if not all(map(_is_known, (text.source, *text.named.values()))):
        PROCESS.start()


def _is_known(source: str) -> bool:
    return is_known(source) or source in _named_templates().values()


@functools.cache
def _named_templates() -> Mapping[str, str]:
    """Sources by name: BUILTIN, and the others that llama.cpp has (src/llama-chat.cpp)."""
    text = Path(__file__).with_name("llama_cpp_templates.json").read_text(encoding="utf-8")
    return {**json.loads(text), **BUILTIN}


def load_builtin_template(value: str, tokenizer: Tokenizer | None = None) -> ChatTemplate:
    """Load the value of `template`: a name in `BUILTIN` or of llama.cpp's, a Jinja file, or Jinja
    text.

    tokenizer: its named tokens become variables of the template; None only checks the value.

    Raises TemplateError: none of the three, or not valid Jinja.
    """
    named = tokenizer.named if tokenizer else {}
    if source := _named_templates().get(value):
        return ChatTemplate(source, f"template {value}", named)
    if "{{" in value or "{%" in value:
        return ChatTemplate(value, "`template`", named)
    path = Path(os.path.expanduser(value))
    if not os.path.isfile(path):
        if re.search(r"\s", value) and not re.search(r"[/\\]|\.\w+$", value):
            template = ChatTemplate(value, "`template`", named)
            template.notice = f"`template` {show(value)} is plain text: it shows no message"
            template.is_plain = True
            return template
        raise TemplateError(
            f"template {show(value)}: neither a file, nor Jinja text, nor a known name; known "
            f"are {', '.join(BUILTIN)} and the names that llama.cpp has, such as command-r"
        )
    return ChatTemplate(_read(path), str(path), named)


def missing_template(name: str) -> str:
    return (
        f"model {name} has no chat template; choose the format that it was trained on with "
        f"`template` ({', '.join(BUILTIN)}, or a .jinja file), or continue plain text: "
        "`ignore_chat_template` in the command generate"
    )


def encode_messages(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    check_count: Callable[[int], None] | None = None,
    written: Collection[str] = (),
    **extras: Any,
) -> list[int]:
    """Encode a conversation as token ids, adapted as by `ChatTemplate.adapt`.

    Special tokens of the template are parsed, but are text inside a message. The same holds for its
    other added tokens, except in the assistant's messages, where the model wrote them (<think>). If
    the tokenizer adds BOS, the ids start with exactly one BOS. Otherwise, for messages that spell
    no such token, the ids are those of transformers' apply_chat_template.

    written: special tokens that the assistant's messages may write, as the marks of its calls.
    check_count: called with a lower bound of their number before encoding; may raise.

    Raises:
        TemplateError: as `ChatTemplate.render`.
        TokenizerError: a message cannot be encoded.
    """
    adapted, _ = template.adapt(messages)
    shaped = template.shape(adapted, extras)
    parts = _render_parts(tokenizer, template, shaped, add_generation_prompt, extras, written)
    template.check_shown(adapted, "".join(parts))
    if check_count is not None:
        check_count(tokenizer.count_at_least("".join(parts)))
    ids = tokenizer.encode_parts(parts)
    if tokenizer.adds_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


# A message that spells a control token must not become one: its text is split inside the token, and
# the parts are encoded separately. Marks carry the splits through the template. They are rare but
# printable characters, so that a template that prints tools as Python (SmolLM3) does not escape
# them.


def _render_parts(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    prompt: bool,
    extras: dict[str, Any],
    written: Collection[str],
) -> list[str]:
    """Render a conversation, split inside each control token that a message spells."""
    special = [text for text in tokenizer.special_ids if len(text) > 1]
    # Templates write white space as ordinary text (as transformers' sanitize_control_tokens).
    added = [
        text
        for text in tokenizer.added_ids
        if len(text) > 1 and text in template.source and not text.isspace()
    ]
    literals = tuple(dict.fromkeys(special + added))
    if literals:
        cut, edge = _pick_marks(template, messages, extras)
        marked = []
        unwritten = [text for text in special if text not in written]
        for message in messages:
            to_cut = unwritten if message["role"] == "assistant" else literals
            content = message["content"]
            if isinstance(content, str):
                content = _mark_content(content, to_cut, literals, cut, edge)
            else:
                content = [
                    {
                        **_cut_nested(part, to_cut, cut),
                        "text": _mark_content(part["text"], to_cut, literals, cut, edge),
                    }
                    for part in content
                ]
            rest = {
                name: _cut_nested(message[name], to_cut, cut)
                for name in ("tool_calls", "tool_responses", "name", "reasoning_content", "tools")
                if name in message
            }
            marked.append({**message, "content": content, **rest})
        cut_extras = {
            name: _cut_nested(value, literals, cut) if name in TOOLS else value
            for name, value in extras.items()
        }
        if marked != list(messages) or cut_extras != extras:
            rendered = template.render(marked, prompt, **cut_extras)
            # Some templates escape JSON to ASCII.
            rendered = rendered.replace(json.dumps(cut)[1:-1], cut)
            chunks = (_resolve_edges(chunk, edge, literals) for chunk in rendered.split(cut))
            parts = [part for chunk in chunks for part in chunk if part]
            if len(parts) > 1:
                return parts
    # Nothing to split: render without marks, since templates may test how a message begins.
    return [template.render(messages, prompt, **extras)]


def _cut_nested(value: Any, literals: Sequence[str], cut: str) -> Any:
    """Put `cut` inside every literal in the texts of a value, keys included."""
    if isinstance(value, str):
        return type(value)(_cut(value, literals, cut))
    if isinstance(value, (list, tuple)):
        return [_cut_nested(item, literals, cut) for item in value]
    if isinstance(value, Mapping):
        return {
            _cut_nested(key, literals, cut): _cut_nested(item, literals, cut)
            for key, item in value.items()
        }
    return value


def _pick_marks(
    template: ChatTemplate, messages: Sequence[Message], extras: Mapping[str, Any]
) -> tuple[str, str]:
    """Two musical symbols that neither the template nor a message or tool contains."""
    values = [messages, *(extras.get(name) for name in TOOLS)]
    used = template.source + json.dumps(values, ensure_ascii=False, default=str)
    free = [chr(code) for code in range(0x1D000, 0x1D0F6) if chr(code) not in used]
    if len(free) < 2:
        raise TemplateError("messages use all characters from U+1D000 to U+1D0F5; remove some")
    return free[0], free[1]


def _mark_content(
    content: str, to_cut: Sequence[str], literals: tuple[str, ...], cut: str, edge: str
) -> str:
    """Put `cut` inside literals, and `edge` at ends that may become part of one."""
    prefixes, suffixes = _prefixes_and_suffixes(literals)
    longest = max(map(len, literals))
    body = content.strip()  # edges stay inside outer spaces, so that templates can strip these
    inside = bool(body) and any(body in literal for literal in literals)
    starts = inside or any(body[:n] in suffixes for n in range(1, longest))
    ends = any(body[-n:] in prefixes for n in range(1, min(longest, len(body) + 1)))
    body = _cut(body, to_cut, cut)
    left, right = len(content) - len(content.lstrip()), len(content.rstrip())
    return content[:left] + edge * starts + body + edge * ends + content[max(left, right) :]


def _cut(text: str, literals: Sequence[str], cut: str) -> str:
    """Put `cut` after the first character of every literal in the text, which may overlap."""
    cuts = set()
    for literal in literals:
        at = text.find(literal)
        while at >= 0:
            cuts.add(at + 1)
            at = text.find(literal, at + 1)
    bounds = [0, *sorted(cuts), len(text)]
    return cut.join(text[a:b] for a, b in itertools.pairwise(bounds))


@functools.lru_cache(maxsize=8)
def _prefixes_and_suffixes(literals: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """All proper prefixes and all proper suffixes of the literals."""
    splits = [(text[:n], text[n:]) for text in literals for n in range(1, len(text))]
    return frozenset(prefix for prefix, _ in splits), frozenset(suffix for _, suffix in splits)


def _resolve_edges(chunk: str, edge: str, literals: Sequence[str]) -> list[str]:
    """Remove the edges, and split the chunk at those that lie within a literal."""
    pieces = chunk.split(edge)
    text, parts, start, border = "".join(pieces), [], 0, 0
    for piece in pieces[:-1]:
        border += len(piece)
        if any(
            text.find(x, max(0, border - len(x) + 1), border + len(x) - 1) >= 0 for x in literals
        ):
            parts.append(text[start:border])
            start = border
    return [*parts, text[start:]]


def _read(path: Path) -> str:
    with reading(path, TemplateError):
        return read_text(path, MOST_BYTES)


# Templates for models without one, by their names in `template`

_ALTERNATE = (
    "{% if messages and messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
    "{% endif %}{% for message in turns %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, user, assistant, ...') }}"
    "{% endif %}"
)

BUILTIN: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        _ALTERNATE + "{% if loop.index0 == 0 and system %}"
        "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}{% else %}"
        "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}{% else %}"
        "{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
        "message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}" + _ALTERNATE + "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if system and loop.last else '') + "
        "message['content'] + ' [/INST]' }}{% else %}"
        "{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}"
        "{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
