"""Chat templates: messages to the text, and the token ids, that a model was trained on.

A template is a program from a stranger. It runs in Jinja's immutable sandbox, with transformers' additions
(utils/chat_template_utils.py) and with a meter: every loop step, call and filter counts, and nothing may grow far
beyond the conversation itself, so that an endless loop or a giant string ends in an error and not in a dead machine.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_llama.core.errors import TemplateError
from mlx_llama.core.models.config import read_json, show

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

MAX_STEPS = 1_000_000  # loop steps, calls and filters in one rendering; real templates take some hundred per message
MAX_SECONDS = 5.0
MAX_GROWTH = 1 << 20  # characters a value may have beyond 16 times the conversation
MAX_NUMBER = 100_000  # widths, counts and sizes handed to string methods and filters; also range(), in the sandbox
_SOURCE_LIMIT = 1 << 18  # characters of a template; the longest in use have some 20 000

Message = Mapping[str, str]


class ChatTemplate:
    """A compiled chat template.

    source: Jinja text. name: the file or built-in to name in errors. variables: what the template sees besides
    `messages` and `add_generation_prompt`; normally the texts of the tokenizer's named tokens (bos_token, ...).

    Raises:
        TemplateError: not valid Jinja.
    """

    def __init__(self, source: str, name: str, variables: Mapping[str, Any] | None = None):
        self.source, self.name, self.variables = source, name, dict(variables or {})
        if len(source) > _SOURCE_LIMIT:
            raise TemplateError(f"{name}: the template has {len(source)} characters, expected at most {_SOURCE_LIMIT}")
        import jinja2

        try:
            self._environment = _environment()
            self._compiled = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise TemplateError(
                f"{name}: the template is not valid Jinja, line {e.lineno}: {_line(e.message)}; {_REMEDY}"
            ) from None
        except (RecursionError, MemoryError, OverflowError, ValueError, SyntaxError, jinja2.TemplateError) as e:
            raise TemplateError(f"{name}: the template cannot be compiled ({_line(e)}); {_REMEDY}") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **extras: Any) -> str:
        """The conversation as the model's text.

        Args:
            messages: {"role": str, "content": str} each.
            add_generation_prompt: end with the header of the assistant's next message.
            extras: further variables for the template; they win over `variables`.

        Raises:
            TemplateError: malformed messages; the template refuses the conversation, fails, tries what the sandbox
                forbids, or takes too long.
        """
        check_messages(messages)
        import jinja2

        total = sum(len(message["content"]) for message in messages)
        values = {"tools": None, "documents": None, **self.variables, **extras}
        meter = _Meter(MAX_GROWTH + 16 * (total + len(self.source)))
        token = _METER.set(meter)
        try:
            return meter.collect(
                self._compiled.generate(
                    messages=[dict(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    **values,
                )
            )
        except _Refused as e:
            raise TemplateError(f"{self.name}: the template refuses this conversation: {_line(e)}") from None
        except _Exceeded as e:
            raise TemplateError(f"{self.name}: the template was stopped: {e}; {_REMEDY}") from None
        except jinja2.sandbox.SecurityError as e:
            raise TemplateError(
                f"{self.name}: the template tried what the sandbox forbids: {_line(e)}; {_REMEDY}"
            ) from None
        except Exception as e:  # whatever a stranger's program may raise
            raise TemplateError(
                f"{self.name}: the template failed: {type(e).__name__}: {_line(e)}; {_REMEDY}"
            ) from None
        finally:
            _METER.reset(token)


_REMEDY = "check the file, or give another one with --template"


def check_messages(messages: Sequence[Message]) -> None:
    """Refuses what is not a list of {"role": str, "content": str}.

    Raises:
        TemplateError: naming the message and the field.
    """
    if not isinstance(messages, (list, tuple)):
        raise TemplateError(f"messages is {show(messages)}, expected a list of {{'role', 'content'}}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            found = sorted(map(str, message)) if isinstance(message, Mapping) else message
            raise TemplateError(f"messages[{i}] has {show(found)}, expected the fields role and content")
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not re.fullmatch(r"[A-Za-z][\w-]{0,63}", role, re.ASCII):
            raise TemplateError(
                f"messages[{i}].role is {show(role)}, expected a word such as system, user or assistant"
            )
        if not isinstance(content, str):
            raise TemplateError(f"messages[{i}].content is {show(content)}, expected a string")


def load_template(folder: str | os.PathLike, tokenizer: Tokenizer) -> ChatTemplate | None:
    """A model's own template: chat_template.jinja, else tokenizer_config.json's; None where it has none.

    Raises:
        TemplateError: there is one, but it cannot be read or is not valid Jinja.
    """
    folder = Path(folder)
    if (folder / "chat_template.jinja").exists():
        path = folder / "chat_template.jinja"
        return ChatTemplate(_read(path), str(path), tokenizer.named)
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    value = read_json(path, TemplateError).get("chat_template")
    if isinstance(value, list):  # several named ones
        named = {one.get("name"): one.get("template") for one in value if isinstance(one, dict)}
        if "default" not in named:
            raise TemplateError(
                f"{path}: chat_template has {show(list(named))}, expected one named 'default'; give one with --template"
            )
        value = named["default"]
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise TemplateError(f"{path}: chat_template is {show(value)}, expected Jinja text; give one with --template")
    return ChatTemplate(value, f"{path} (chat_template)", tokenizer.named)


def gguf_template(metadata: Mapping[str, Any], source: str, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in a GGUF file's metadata, None where it has none; `source` is the file to name in errors.

    Further templates under names of their own (tokenizer.chat_template.NAME, for tools) are not the chat's.

    Raises:
        TemplateError: there is one, but it is not text or not valid Jinja.
    """
    value = metadata.get("tokenizer.chat_template", "")
    if not isinstance(value, str):
        raise TemplateError(
            f"{source}: tokenizer.chat_template is {show(value)}, expected Jinja text; give one with --template"
        )
    return ChatTemplate(value, f"{source} (tokenizer.chat_template)", tokenizer.named) if value else None


def builtin_template(name_or_path: str, tokenizer: Tokenizer) -> ChatTemplate:
    """The template behind `--template`: one of `BUILTIN` by name, or a Jinja file.

    Raises:
        TemplateError: neither a name nor a file, or not valid Jinja.
    """
    if name_or_path in BUILTIN:
        return ChatTemplate(BUILTIN[name_or_path], f"template {name_or_path}", tokenizer.named)
    path = Path(os.path.expanduser(name_or_path))
    if not os.path.isfile(path):
        raise TemplateError(
            f"template {show(name_or_path)}: not a file and not a known name; known are {', '.join(BUILTIN)}"
        )
    return ChatTemplate(_read(path), str(path), tokenizer.named)


def missing_template(name: str) -> str:
    """What to tell the user of a model that has no template."""
    return (
        f"model {name} has no chat template; name the format it was trained on with --template NAME_OR_FILE "
        f"({', '.join(BUILTIN)}, or a .jinja file), or continue plain text with python -m mlx_llama.generate --ignore-chat-template"
    )


def encode_messages(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    add_generation_prompt: bool = True,
    **extras: Any,
) -> list[int]:
    """Token ids of a conversation.

    Special tokens that the template writes are control; the same characters inside a message are text. So are other
    added tokens that the template writes, except in the assistant's messages, where the model itself wrote them
    (<think>). BOS stands at the start exactly once, for a tokenizer that starts texts with one, whether or not the
    template writes it. For messages that spell no such token these are the ids of transformers' apply_chat_template
    (and BOS).

    Raises:
        TemplateError: as `ChatTemplate.render`.
        TokenizerError: a message cannot be encoded.
    """
    check_messages(messages)
    parts = _render_parts(tokenizer, template, messages, add_generation_prompt, extras)
    ids = tokenizer.encode_parts(parts)
    if tokenizer.adds_bos and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _render_parts(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], prompt: bool, extras: dict[str, Any]
) -> list[str]:
    """The rendered conversation, cut inside every control literal that a message spells.

    The cuts travel through the template as a character that nothing else uses. One goes after the first character of
    every literal in a message; an edge goes to a message's end where part of a literal stands there, which the
    template's or the next message's text could complete. Edges that nothing completes are taken out again, so that
    harmless text stays whole.
    """
    special = [text for text in tokenizer.special_ids if len(text) > 1]
    # whitespace aside, which templates write as ordinary text (as transformers' sanitize_control_tokens)
    added = [text for text in tokenizer.added_ids if len(text) > 1 and text in template.source and not text.isspace()]
    literals = list(dict.fromkeys(special + added))
    if not literals:
        return [template.render(messages, prompt, **extras)]
    heads, tails = _halves(tuple(literals))
    longest = max(map(len, literals))

    used = template.source + "".join(message["content"] for message in messages)
    free = [chr(c) for c in range(0xF0000, 0xF0100) if chr(c) not in used]
    if len(free) < 2:
        raise TemplateError("messages use all characters from U+F0000 to U+F00FF, which stand for nothing; remove some")
    cut, edge = free[:2]

    marked = []
    for message in messages:
        content = message["content"]
        body = content.strip()  # templates often strip, and an edge outside of the spaces would keep them
        inner = any(body in text for text in literals) if body else False
        starts = inner or any(body[:n] in tails for n in range(1, longest))
        ends = inner or any(body[-n:] in heads for n in range(1, min(longest, len(body) + 1)))
        at = _occurrences(special if message["role"] == "assistant" else literals, body)
        body = cut.join(body[a:b] for a, b in zip([0, *at], [*at, len(body)], strict=True))
        left, right = len(content) - len(content.lstrip()), len(content.rstrip())
        text = content[:left] + edge * starts + body + edge * ends + content[max(left, right) :]
        marked.append({"role": message["role"], "content": text})
    if marked != list(messages):
        rendered = template.render(marked, prompt, **extras)
        parts = [part for stretch in rendered.split(cut) for part in _uncut(stretch, edge, literals) if part]
        if len(parts) > 1:
            return parts
    # nothing to keep apart: as the messages are, for templates that look at how a message begins
    return [template.render(messages, prompt, **extras)]


def _occurrences(literals: Sequence[str], text: str) -> list[int]:
    """Where to cut: after the first character of every literal in the text, overlapping ones too."""
    found = set()
    for one in literals:
        at = text.find(one)
        while at >= 0:
            found.add(at + 1)
            at = text.find(one, at + 1)
    return sorted(found)


@functools.lru_cache(maxsize=8)
def _halves(literals: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """All beginnings and all ends of the literals, themselves left out."""
    heads = frozenset(text[:n] for text in literals for n in range(1, len(text)))
    return heads, frozenset(text[n:] for text in literals for n in range(1, len(text)))


def _uncut(stretch: str, edge: str, literals: Sequence[str]) -> list[str]:
    """The stretch without its edges, split at those that lie within a literal."""
    pieces = stretch.split(edge)
    text, parts, start, border = "".join(pieces), [], 0, 0
    for piece in pieces[:-1]:
        border += len(piece)
        if any(text.find(one, max(0, border - len(one) + 1), border + len(one) - 1) >= 0 for one in literals):
            parts.append(text[start:border])
            start = border
    return [*parts, text[start:]]


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as e:
        raise TemplateError(f"{path}: not UTF-8 at byte {e.start}; give another template with --template") from None
    except OSError as e:
        raise TemplateError(f"{path}: cannot be read ({e.strerror or e}); check its permissions") from None


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]


# The meter


class _Refused(Exception):
    """The template called raise_exception."""


class _Exceeded(Exception):
    """The template used up its steps, its time or its room."""


class _Meter:
    """Steps, time and room of one rendering. `room` counts characters and elements of any one value."""

    def __init__(self, room: int):
        self.room, self.steps, self.deadline = room, 0, time.monotonic() + MAX_SECONDS

    def tick(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise _Exceeded(f"more than {MAX_STEPS} steps")
        if self.steps % 64 == 0:
            self.look()

    def look(self) -> None:
        if time.monotonic() > self.deadline:
            raise _Exceeded(f"more than {MAX_SECONDS:g} seconds")

    def collect(self, chunks: Iterable[str]) -> str:
        parts, length = [], 0
        for chunk in chunks:
            parts.append(chunk)
            length += len(chunk)
            self.fits(length)
            self.tick()
        return "".join(parts)

    def fits(self, size: int) -> None:
        if size > self.room:
            raise _Exceeded(f"a text or list of more than {self.room} characters or elements")
        if size > 10_000:  # long work between two looks at the clock
            self.look()


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


def _meter() -> _Meter:
    return _METER.get() or _Meter(MAX_GROWTH)  # constants are folded while compiling, outside of any rendering


_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def _weight(value: Any, room: int) -> int:
    """Characters and elements of a value, counted as often as they would be printed, up to a bit over `room`."""
    total, stack = 0, [value]
    while stack and total <= room:
        one = stack.pop()
        total += 1
        if isinstance(one, (str, bytes)):
            total += len(one)
        elif isinstance(one, int):
            total += one.bit_length() // 3
        elif isinstance(one, (list, tuple, set, frozenset, *_VIEWS)):
            stack.extend(one)
        elif isinstance(one, dict):
            stack.extend(one.keys())
            stack.extend(one.values())
    return total


def _bounded(value: Any) -> Any:
    """The value itself, when it is not too large."""
    if not isinstance(value, str) or len(value) > 1000:
        meter = _meter()
        meter.fits(_weight(value, meter.room))
    return value


def _cost(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """An upper bound for the length of what a string method or filter makes: args[0] is the string or list."""
    subject, rest = args[0], [*args[1:], *kwargs.values()]
    numbers = [abs(one) for one in rest if isinstance(one, int)]
    texts = [len(one) for one in rest if isinstance(one, str)]
    if any(number > MAX_NUMBER for number in numbers):
        raise _Exceeded(f"{name}() with a number above {MAX_NUMBER}")
    meter = _meter()
    size = _weight(subject, meter.room) + sum(_weight(one, meter.room) for one in rest)
    if name == "replace":
        return size + len(str(subject) if isinstance(subject, str) else "") * (max(texts, default=0) + 1)
    if name == "join":
        # "sep".join(list) or list|join("sep")
        count = max([len(one) for one in args if isinstance(one, (list, tuple, str, dict))], default=0)
        return size + count * max([len(one) for one in [subject, *rest] if isinstance(one, str)], default=0)
    if name in ("indent", "expandtabs", "wordwrap", "tojson"):
        lines = (
            size if name == "tojson" else 1 + sum(map(str(subject).count, "\n\t")) if isinstance(subject, str) else size
        )
        return size + lines * max([8, *numbers, *texts])
    if name == "pprint":
        return 20 * size  # slow, rather than long
    if name in ("format", "format_map", "mod"):
        if isinstance(subject, str) and re.search(r"\d{6}|\{[^}]*\{|%[^%a-z]*\*", subject):
            raise _Exceeded("a format with a width that is too large or computed")
        holes = subject.count("{") + subject.count("%") if isinstance(subject, str) else 0
        widest = 0
        if isinstance(subject, str):
            widest = max([0, *map(int, re.findall(r"\d{1,5}", subject))])
        return size + holes * (size + widest)
    return size + sum(numbers)


# Filters that make text of what they get; the others pass elements on, at no cost in room
_TEXTUAL = {
    "batch", "capitalize", "center", "e", "escape", "filesizeformat", "forceescape", "format", "indent", "join",
    "lower", "pprint", "replace", "round", "safe", "slice", "string", "striptags", "sum", "title", "tojson", "trim",
    "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr",
}  # fmt: skip
_STRING_METHODS = {
    "center",
    "expandtabs",
    "format",
    "format_map",
    "join",
    "ljust",
    "replace",
    "rjust",
    "to_bytes",
    "zfill",
}


def _metered_filter(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter = _meter()
        meter.tick()
        passed = args[1:] if getattr(function, "jinja_pass_arg", None) is not None else args
        if name in _TEXTUAL and passed:
            if isinstance(passed[0], Iterator):  # a generator from another filter: look at it before it is used
                first = list(passed[0])
                args = tuple(first if one is passed[0] else one for one in args)
                passed = (first, *passed[1:])
            meter.fits(_cost(name, passed, kwargs))
        return function(*args, **kwargs)

    return run


def _metered(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _meter().tick()
        yield value


@functools.cache
def _environment() -> Any:
    """transformers' environment for chat templates (chat_template_utils.py, _cached_compile_jinja_template), metered."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Instrument(NodeTransformer):
        """Puts the meter where Jinja itself leaves no hook: loops, `~`, and literals of lists and dicts."""

        def visit_For(self, node: nodes.For) -> nodes.Node:
            self.generic_visit(node)
            node.iter = wrap(node.iter, "_metered")
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return wrap(nodes.List(node.nodes, lineno=node.lineno), "_concat")

        def visit_List(self, node: nodes.List) -> nodes.Node:
            self.generic_visit(node)
            return wrap(node, "_bounded") if node.items else node

        def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
            self.generic_visit(node)
            return wrap(node, "_bounded") if node.items else node

        def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
            self.generic_visit(node)
            return wrap(node, "_bounded") if node.ctx == "load" and node.items else node

    def wrap(node: nodes.Expr, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the assistant's text for training; here it is only a block."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**", "+", "%"))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            return Instrument().visit(super()._parse(source, name, filename))

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise jinja2.sandbox.SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            meter = _meter()
            meter.tick()
            number = isinstance(left, (int, float)) and isinstance(right, (int, float))
            if operator == "**" and number and abs(right) * max(abs(left), 2).__int__().bit_length() > 4096:
                raise _Exceeded("a power with a result of more than 4096 bits")
            if operator == "*" and number:
                if isinstance(left, int) and isinstance(right, int) and (left.bit_length() + right.bit_length()) > 8192:
                    raise _Exceeded("a product of more than 8192 bits")
            elif operator == "*":
                times = left if isinstance(left, int) else right if isinstance(right, int) else 1
                meter.fits(max(times, 0) * _weight(right if isinstance(left, int) else left, meter.room))
            elif operator == "+" and not number:
                meter.fits(_weight(left, meter.room) + _weight(right, meter.room))
            elif operator == "%" and isinstance(left, str):
                meter.fits(_cost("mod", (left, right), {}))
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            meter = _meter()
            meter.tick()
            bound = getattr(function, "__wrapped__", function)  # Jinja wraps str.format in its own sandboxed one
            name, owner = getattr(bound, "__name__", ""), getattr(bound, "__self__", None)
            if isinstance(owner, (str, bytes, int, float)):
                if name in ("translate", "maketrans"):
                    raise jinja2.sandbox.SecurityError(f"a call of {name}()")
                if name in _STRING_METHODS:
                    if args and isinstance(args[0], Iterator):
                        args = (list(args[0]), *args[1:])
                    meter.fits(_cost(name, (owner, *args), kwargs))
            return super().call(context, function, *args, **kwargs)

    def concat(parts: Iterable[Any]) -> str:
        parts = [part if isinstance(part, str) else str(_bounded(part)) for part in parts]
        _meter().fits(sum(map(len, parts)))
        return "".join(parts)

    def raise_exception(message: str) -> None:
        raise _Refused(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # Jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(form: str) -> str:
        from datetime import datetime

        if not isinstance(form, str) or len(form) > 1000 or re.search(r"\d{3}", form):
            raise _Exceeded("a date format that is too long")
        return datetime.now().strftime(form)

    class TemplateDict:
        """dict() without the type itself."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return _bounded(dict(*args, **kwargs))

    class TemplateNamespace(jinja2.utils.Namespace):
        """namespace() that keeps no underscored names, which could reach into CPython."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                TemplateNamespace._check(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            TemplateNamespace._check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        def __repr__(self) -> str:
            return "<Namespace>"  # Jinja's own prints all it holds, however often

        @staticmethod
        def _check(name: Any) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.sandbox.SecurityError(f"a namespace attribute {name!r}")

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], finalize=_bounded
    )
    environment.concat = concat
    environment.filters["tojson"] = tojson
    environment.filters = {name: _metered_filter(name, one) for name, one in environment.filters.items()}
    environment.filters |= {"_metered": _metered, "_bounded": _bounded, "_concat": concat}
    environment.globals.pop("lipsum")
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals |= {"dict": TemplateDict(), "namespace": TemplateNamespace}
    return environment


# Formats for models that come without a template, by the names that `--template` takes

_ALTERNATE = (
    "{% if messages and messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate: user, assistant, user, assistant, ...') }}{% endif %}"
)

BUILTIN: dict[str, str] = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        _ALTERNATE + "{% if loop.index0 == 0 and system %}"
        "{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}"
        "{% else %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}" + _ALTERNATE + "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + (system + '\n\n' if system and loop.last else '') + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "zephyr": (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
