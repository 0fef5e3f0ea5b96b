"""Tools: their descriptions, the calls in a model's text, and grammars that enforce a call.

Models write calls in the format that their template taught them. `find_format` recognises it, `ToolParser` reads it from
streamed text, `call_grammar` spells it for tool_choice. A template that knows no tools gets them in its system message: one in ChatML with
SmolLM2's words (https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct), others with fewer.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import secrets
import string
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.models.config import show

from .template import check_messages
from .tokenizer import Tokenizer

MAX_TOOLS = 1024  # as OpenAI's API
MAX_CHARACTERS = 1 << 16  # of all tools as JSON
# Of llguidance: JSON as json.dumps writes it. They replace a schema's own "x-guidance", which could switch checks off.
JSON_OPTIONS = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "whitespace_pattern": None,
    "lenient": False, "coerce_one_of": False, "json_allowed_escapes": None, "json_allow_general_unicode_escapes": False,
}  # fmt: skip
_NAME = re.compile(r"[\w.:/@-]{1,128}", re.ASCII)


# Descriptions


class ArgumentsError(ValueError):
    """Arguments of a call do not fit its function."""


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    parameters: JSON schema of an object. function: runs the call, None if the caller does. model: the pydantic model of its
    arguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Callable[..., Any] | None = None
    model: Any = None

    @classmethod
    def of(cls, value: Any) -> Tool:
        """Build from a Python function, or from OpenAI's {"type": "function", "function": {...}}.

        Raises OptionsError that names the part which is missing or wrong.
        """
        if isinstance(value, Tool):
            return value
        if callable(value):
            return _from_function(value)
        inner = value.get("function", value) if isinstance(value, Mapping) else None
        if not isinstance(inner, Mapping) or value.get("type", "function") != "function":
            raise OptionsError(f'tools: {show(value)} is neither a function nor {{"type": "function", "function": {{...}}}}')
        name, description = inner.get("name"), inner.get("description") or ""
        parameters = inner.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise OptionsError(f"tools: name is {show(name)}, expected 1 to 128 letters, digits and characters of _-.:/@")
        if not isinstance(description, str) or not isinstance(parameters, Mapping):
            raise OptionsError(f"tools: {name} has a description that is no text, or parameters that are no JSON schema")
        if parameters.get("type", "object") != "object":
            raise OptionsError(f"tools: {name} has parameters of type {show(parameters['type'])}, expected object: a call has "
                               "named arguments")
        return cls(name, description, dict(parameters))

    def as_dict(self) -> dict[str, Any]:
        """The description that templates print, in OpenAI's form."""
        inner = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": inner}

    def run(self, arguments: str) -> str:
        """Call the function with arguments as JSON; its result as text, which is JSON unless it is a text.

        Raises OptionsError without a function, ArgumentsError for arguments that do not fit, and what the function raises.
        """
        from pydantic import ValidationError

        if self.function is None:
            raise OptionsError(f"tools: {self.name} is only described: give the function itself")
        try:
            values = self.model.model_validate_json(arguments or "{}")
        except ValidationError as e:
            faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'all'}: {fault['msg']}" for fault in e.errors()[:8])
            raise ArgumentsError(f"the arguments of {self.name} do not fit: {faults}") from None
        result = self.function(**{name: getattr(values, name) for name in type(values).model_fields})
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def read_tools(values: Sequence[Any]) -> list[Tool]:
    """Build tools. Raises OptionsError as `Tool.of`, and for two of one name, too many or too long ones."""
    if not isinstance(values, (list, tuple)):
        raise OptionsError(f"tools: {show(values)} is not a list")
    tools = [Tool.of(value) for value in values]
    names = [tool.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise OptionsError(f"tools: {', '.join(sorted(twice))} is there twice: give each a name of its own")
    try:
        characters = len(json.dumps([tool.as_dict() for tool in tools], allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise OptionsError(f"tools: not JSON: {show(str(e))}") from None
    if len(tools) > MAX_TOOLS or characters > MAX_CHARACTERS:
        raise OptionsError(f"tools: {len(tools)} tools of {characters} characters, expected at most {MAX_TOOLS} tools and "
                           f"{MAX_CHARACTERS} characters")
    return tools


def _from_function(function: Callable[..., Any]) -> Tool:
    """Describe a function by its signature, its type hints and its docstring."""
    from typing import get_type_hints

    from pydantic import ConfigDict, Field, create_model
    from pydantic.errors import PydanticUserError

    name = getattr(function, "__name__", type(function).__name__)
    if not _NAME.fullmatch(name):
        raise OptionsError(f"tools: a function called {show(name)} cannot be named by a model: give it a name with def")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise OptionsError(f"tools: {name} is async, and its result would never be awaited: give a plain function")
    summary, texts = _read_docstring(inspect.getdoc(function) or "")
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as e:
        raise OptionsError(f"tools: the type hints of {name} cannot be read ({e}): import their names") from None
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise OptionsError(f"tools: {name} takes {parameter}: only named parameters can be described")
        if parameter.name not in hints:
            raise OptionsError(f"tools: {name} has no type hint for {parameter.name}: add one, as in {parameter.name}: int")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], Field(default, description=texts.get(parameter.name)))
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        schema = _remove_titles(model.model_json_schema())
    except (PydanticUserError, NameError) as e:
        raise OptionsError(f"tools: {name} has a parameter that has no JSON schema ({show(str(e))})") from None
    schema.setdefault("properties", {})
    return Tool(name, summary, schema, function, model)


_SECTION = re.compile(r"(args|arguments|parameters|returns?|raises|yields|examples?|notes?):?", re.IGNORECASE)
_ENTRY = re.compile(r"(?::param\s+)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the sections, and each parameter's: of Google's "Args:", of Sphinx' ":param x:"."""
    lines = text.splitlines()
    summary: list[str] = []
    found: dict[str, str] = {}
    section, indent, current = "", 0, ""
    for line in lines:
        stripped = line.strip()
        heading = _SECTION.fullmatch(stripped)
        if heading and stripped.endswith(":") and line[:1] not in (" ", "\t"):
            section, indent, current = heading[1].lower(), 0, ""
        elif stripped.startswith(":"):
            section = "sphinx"
            entry = _ENTRY.fullmatch(stripped) if stripped.startswith(":param") else None
            current = entry[1] if entry else ""
            if entry:
                found[current] = entry[2]
        elif section in ("args", "arguments", "parameters") and stripped:
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            entry = _ENTRY.fullmatch(stripped) if depth <= indent else None
            if entry:
                current = entry[1]
                found[current] = entry[2]
            elif current:
                found[current] += " " + stripped
        elif section == "sphinx" and stripped and current:
            found[current] += " " + stripped
        elif not section:
            summary.append(stripped)
    return "\n".join(summary).strip(), {name: entry.strip() for name, entry in found.items()}


def _remove_titles(schema: Any) -> Any:
    """Remove the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_remove_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: {key: _remove_titles(inner) for key, inner in value.items()} if name in ("properties", "$defs")
        else value if name in ("default", "const", "enum", "examples") else _remove_titles(value)
        for name, value in schema.items() if name != "title" or not isinstance(value, str)
    }


# Formats


_SMOLLM2 = """You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function call is needed, please make \
the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""

# For models that were trained on no words of their own.
_BRIEF = """You may call these functions:
<tools>{tools}</tools>
To call, write nothing else than <tool_call>[{{"name": name, "arguments": {{...}}}}]</tool_call>"""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    opens, closes: around a call; "" where there is nothing. arguments: the key of the arguments. is_bare: an answer that
    begins with a brace may be a call. lists: whether the template shows calls as a JSON list. has_headers: name[ARGS]{...}
    instead of one JSON object. variable: of the template, that takes the tools. in_system: words for the system message
    where the template knows no tools.
    """

    name: Literal["llama3", "mistral", "hermes", "smollm", "none"]
    opens: str
    closes: str = ""
    arguments: str = "arguments"
    is_bare: bool = False
    lists: bool = False
    has_headers: bool = False
    variable: str = "tools"
    in_system: str = ""


LLAMA3 = ToolFormat("llama3", "<|python_tag|>", arguments="parameters", is_bare=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", lists=True)
MISTRAL_HEADERS = ToolFormat("mistral", "[TOOL_CALLS]", has_headers=True)
HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")  # Qwen's too
SMOLLM2 = ToolFormat("smollm", "<tool_call>", "</tool_call>", lists=True)
SMOLLM3 = ToolFormat("smollm", "<tool_call>", "</tool_call>", variable="xml_tools")
NO_TOOLS = ToolFormat("none", "")
IN_SYSTEM = ToolFormat("smollm", "<tool_call>", "</tool_call>", lists=True, in_system=_SMOLLM2)
BRIEF = ToolFormat("smollm", "<tool_call>", "</tool_call>", lists=True, in_system=_BRIEF)


def find_format(source: str, tokenizer: Tokenizer) -> ToolFormat:
    """Recognise the format of tool calls by a template's source and by the vocabulary.

    Raises OptionsError for a template that has tools in a format which is not supported.
    """
    if "[TOOL_CALLS]" in source:
        return MISTRAL_HEADERS if "[ARGS]" in source else MISTRAL
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source and "arguments" in source:
        if "xml_tools" in source:
            return SMOLLM3
        return SMOLLM2 if re.search(r"<tool_call>\s*\[", source) else HERMES
    if not re.search(r"\b(tools|functions)\b", source):
        return IN_SYSTEM if "<|im_start|>" in source else BRIEF
    # Llama 3.1 to 3.3: the words of the prompt, or the token of their vocabulary
    if '"parameters": dictionary of argument name' in source or "<|python_tag|>" in tokenizer.added_ids:
        return LLAMA3
    raise OptionsError("tools: this model's template writes calls in a format that is not supported; supported are those of "
                       "Llama 3, Mistral, Hermes, Qwen 2.5 and 3, and SmolLM: take another model, or ask without tools")


def shown_specials(form: ToolFormat, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that a decoder must show to the parser, such as [TOOL_CALLS]."""
    marks = (form.opens, form.closes, "[ARGS]", "[CALL_ID]")
    return frozenset(tokenizer.special_ids[mark] for mark in marks if mark in tokenizer.special_ids)


def fold_tools(words: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: their descriptions in the system message, calls and results as text.

    words: of the system message, with a place for the tools.
    """
    listed = json.dumps([tool.as_dict() for tool in tools], ensure_ascii=False)
    folded: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if calls := message.get("tool_calls"):
            written = json.dumps([call["function"] for call in calls], ensure_ascii=False)
            content += f"<tool_call>{written}</tool_call>"
        rest = {name: message[name] for name in ("name", "reasoning_content") if name in message}
        if message["role"] == "tool":
            folded.append({"role": "user", "content": f"<tool_response>{content}</tool_response>"})
        else:
            folded.append({"role": message["role"], "content": content, **rest})
    if tools:
        system = words.format(tools=listed)
        if folded and folded[0]["role"] == "system":
            folded[0]["content"] += "\n\n" + system
        else:
            folded.insert(0, {"role": "system", "content": system})
    return folded


def mentions_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a conversation has calls or results. Malformed messages have none."""
    return any(isinstance(message, Mapping) and (message.get("role") == "tool" or message.get("tool_calls"))
               for message in messages)


def split_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages for a template that prints one call a message, each with its result."""
    split: list[dict[str, Any]] = []
    waiting = check_messages(messages)[::-1]
    while waiting:
        message = waiting.pop()
        calls = message.get("tool_calls", ())
        results: dict[Any, list[dict[str, Any]]] = {}
        while calls and waiting and waiting[-1]["role"] == "tool":
            results.setdefault(waiting[-1].get("tool_call_id"), []).append(waiting.pop())
        for number, call in enumerate(calls):
            split.append({**message, "content": "" if number else message["content"], "tool_calls": [call]})
            split += results.pop(call.get("id"), ())
        split += [result for several in results.values() for result in several] if calls else [message]
    return split


def add_tools(
    form: ToolFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Messages and extra variables for `encode_messages` that offer tools to the model.

    Raises TemplateError for malformed messages.
    """
    if form.in_system:
        return fold_tools(form.in_system, check_messages(messages), tools), {}
    if form.name == "llama3":
        messages = split_calls(messages)
    return messages, {form.variable: [tool.as_dict() for tool in tools]} if tools else {}


def call_grammar(
    form: ToolFormat, tools: Sequence[Tool], tokenizer: Tokenizer, *, many: bool = False, answer: dict[str, Any] | None = None
) -> str:
    """A Lark grammar of one call of one of the tools, or of several in a row (`many`), in the model's own format.

    answer: a JSON schema that an answer without calls fits; None: there must be a call.
    """
    if not tools:
        raise OptionsError("tool_choice: there is no tool to call: give tools")

    def mark(text: str) -> str:
        return f"<[{tokenizer.special_ids[text]}]>" if text in tokenizer.special_ids else json.dumps(text)

    def words(*texts: str) -> str:
        return json.dumps("".join(texts), ensure_ascii=False)

    calls, rules = [], []
    for number, tool in enumerate(tools):
        name = json.dumps(tool.name)
        if form.has_headers:
            calls.append(f'{words(tool.name)} {mark("[ARGS]")} arguments_{number}')
        else:
            calls.append(f'{words("{", chr(34), "name", chr(34), ": ", name, ", ", chr(34), form.arguments, chr(34), ": ")} '
                         f'arguments_{number} "}}"')
        schema = {"additionalProperties": False, **tool.parameters, "type": "object", "x-guidance": JSON_OPTIONS}
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    call = "call: " + "\n    | ".join(calls)
    if form.name == "llama3":
        start = 'call ("; " call)*' if many else "call"
    elif form.has_headers:
        start = f"({mark(form.opens)} call)+" if many else f"{mark(form.opens)} call"
    elif form.lists:
        start = f'{mark(form.opens)} "[" call{" (" + words(", ") + " call)*" if many else ""} "]"'
        start += f" {mark(form.closes)}" if form.closes else ""
    else:
        one = f'{mark(form.opens)} "\\n" call "\\n" {mark(form.closes)}'
        start = f'{one} ("\\n" {one})*' if many else one
    if answer is None:
        return "\n".join([f"start: {start}", call, *rules])
    rules.append(f"answer: %json {json.dumps({**answer, 'x-guidance': JSON_OPTIONS})}")
    return "\n".join(["start: calls | answer", f"calls: {start}", call, *rules])


# Calls in text


def new_call_id() -> str:
    """An id of a call: nine letters and digits, the form that Mistral's templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass
class ToolCall:
    """A call that a model made.

    arguments: JSON as the model wrote it; unfinished or invalid JSON where generation was cut or no grammar was in force.
    """

    name: str
    arguments: str = ""
    id: str = field(default_factory=new_call_id)
    is_complete: bool = False

    def values(self) -> dict[str, Any]:
        """The arguments. Raises ValueError unless they are a JSON object."""
        found = json.loads(self.arguments)
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {self.name} are {show(found)}, expected an object")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The entry of a message's tool_calls, in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ToolDelta:
    """News of a call. index: of the call in the answer. The first has id and name; arguments grow."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class _NoCall(Exception):
    """The text is no call."""


class _Scanner:
    """Reads one JSON object as it grows, to its end or its arguments' end, and finds a call's name and arguments in it.

    name: of the call, once read. start, end: of the arguments in `text`, where they are an object.
    """

    def __init__(self, ends_with_arguments: bool = False) -> None:
        self.text = ""
        self.name: str | None = None
        self._ends_with_arguments = ends_with_arguments
        self.start: int | None = None
        self.end: int | None = None
        self.is_done = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._expects: Literal["key", "colon", "value", "comma"] = "key"  # on the outermost level
        self._key = ""
        self._string = 0  # where the last string of the outermost level began

    def feed(self, piece: str) -> int:
        """Read more text; returns the characters used, fewer than all of them at the object's end.

        Raises _NoCall where the JSON of a call cannot go on like this.
        """
        first = len(self.text)
        self.text += piece
        for at in range(first, len(self.text)):
            self._read(self.text[at], at)
            if self.is_done:
                self.text = self.text[:at + 1]
                return at + 1 - first
        return len(piece)

    def _read(self, character: str, at: int) -> None:
        outermost = self._depth == 1
        if self._in_string:
            if self._escaped or character == "\\":
                self._escaped = not self._escaped
            elif character == '"':
                self._in_string = False
                if outermost:
                    self._end_string(at)
        elif character == '"':
            self._in_string = True
            if outermost:
                self._require("key", "value")
                self._string = at
        elif character in "{[":
            if outermost:
                self._require("value")
                if character == "{" and self._key in ("arguments", "parameters"):
                    self.start = at
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1:
                self._expects = "comma"
                if self.start is not None and self.end is None:
                    self.end = at + 1
            self.is_done = self._depth == 0 or self._ends_with_arguments and self.end is not None
        elif not outermost or character.isspace():
            pass
        elif character == ":":
            self._require("colon")
            self._expects = "value"
        elif character == ",":
            self._require("comma", "value")
            self._expects = "key"
        else:
            self._require("value")  # a number or a word

    def _require(self, *expected: str) -> None:
        if self._expects not in expected:
            raise _NoCall

    def _end_string(self, at: int) -> None:
        try:
            value = json.loads(self.text[self._string:at + 1])
        except ValueError:
            raise _NoCall from None
        if self._expects == "value":
            self._expects = "comma"
            if self._key == "name":
                self.name = value
            return
        self._key, self._expects = value, "colon"
        if value not in ("name", "arguments", "parameters", "type", "function", "id"):
            raise _NoCall

    def whole(self) -> tuple[str, str]:
        """Name and arguments of a finished object in any form that models use. Raises _NoCall."""
        try:
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            raise _NoCall from None
        inner = found.get("function")
        found = inner if isinstance(inner, dict) else found
        name, arguments = found.get("name", found.get("function")), found.get("arguments", found.get("parameters", {}))
        if not isinstance(name, str):
            raise _NoCall
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


_HEADER = re.compile(r"([\w.-]{1,64})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?(?:\[ARGS\]\s*)?(?=\{)", re.ASCII)
_HEADER_LENGTH = 200  # characters before the brace
_CODE_TOOLS = ("code_interpreter", "python", "ipython")
_CODE_LENGTH = 1 << 14  # characters of code that are read as a call


class ToolParser:
    """Separates the calls in a model's streamed text from the rest.

    text: without calls, so far. calls: so far; the last may be unfinished. Text that begins like a call and turns out to be
    none is text again. White space after a call is dropped unless text follows.

    form: None where no tools are offered: all is text. names: of the tools on offer; a bare JSON object with another name is
    text.
    """

    def __init__(self, form: ToolFormat | None, names: Collection[str] = ()):
        self.names = frozenset(names)
        self.form = form or NO_TOOLS
        self.text = ""
        self.calls: list[ToolCall] = []
        self._states = {"text": self._read_text, "opened": self._read_opened, "call": self._read_call,
                        "after": self._read_after, "code": self._read_code}
        self._state = "text"
        self._buffer = ""  # not read yet
        self._given = ""  # read, to be given back if it is no call
        self._space = ""  # after a call
        self._in_list = self._is_bare = self._is_next = self._has_name = False
        self._scanner, self._sent = _Scanner(), 0
        self._deltas: list[str | ToolDelta] = []

    def push(self, piece: str) -> list[str | ToolDelta]:
        """Read a piece of text; returns text and news of calls, in order."""
        self._buffer += piece
        while self._buffer and self._states[self._state]():
            pass
        return self._take()

    def finish(self) -> list[str | ToolDelta]:
        """End the text; returns what was withheld. An unfinished call stays in `calls`, with is_complete False."""
        if self._state == "code":
            self._end_code()
        elif self._state != "after" and not (self._state == "call" and self._has_name):
            self._consume(len(self._buffer))
            if self._is_next:  # a further call, cut before its name
                self._given = ""
            self._give_back()
        return self._take()

    def _take(self) -> list[str | ToolDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # States. Each reads from the buffer and returns whether the next one may go on; False: more text is needed.

    def _read_text(self) -> bool:
        start = self._buffer.lstrip()
        if self.form.is_bare and not self.text.strip() and not self.calls:
            if not start:
                return False
            if start[0] == "{":
                return self._open("", bare=True)
        opens = self.form.opens
        at = self._buffer.find(opens) if opens else -1
        if at >= 0:
            self._emit(self._buffer[:at])
            self._buffer = self._buffer[at:]
            return self._open(opens, bare=False)
        keep = next((n for n in range(len(opens) - 1, 0, -1) if self._buffer.endswith(opens[:n])), 0)
        self._emit(self._buffer[:len(self._buffer) - keep])
        self._buffer = self._buffer[len(self._buffer) - keep:]
        return False

    def _open(self, marker: str, bare: bool) -> bool:
        self._state, self._is_bare, self._in_list, self._given = "opened", bare, False, ""
        self._consume(len(marker))
        return True

    def _read_opened(self) -> bool:
        rest = self._skip_space()
        if not rest:
            return False
        if rest[0] == "{":
            return self._begin(is_header=False)
        if self._in_list and rest[0] == "]":
            return self._end_list()
        if rest[0] == "[" and self.form.name != "llama3" and not self._in_list:
            self._consume(1)
            self._in_list = True
            return True
        if self.form.name == "mistral" and not self._in_list:
            if header := _HEADER.match(rest):
                self._consume(header.end())
                self._begin(is_header=True)
                self._scanner.feed(f'{{"name": "{header[1]}", "arguments": ')
                return True
            if len(rest) < _HEADER_LENGTH and "{" not in rest:
                return False
        if self.form.name == "llama3" and not self._is_bare and not self.calls:
            self._state = "code"
            return True
        return self._give_back()

    def _begin(self, is_header: bool) -> bool:
        self._state, self._scanner, self._sent = "call", _Scanner(ends_with_arguments=is_header), 0
        self._has_name = False
        return True

    def _read_call(self) -> bool:
        scanner = self._scanner
        try:
            used = scanner.feed(self._buffer)
        except _NoCall:
            self._consume(len(self._buffer))
            return self._fail()
        self._consume(used)
        try:
            self._tell()
            if scanner.is_done:
                self._end_call()
        except _NoCall:
            return self._fail()
        return True

    def _fail(self) -> bool:
        """End what cannot be a call, or can no longer be one."""
        if not self._has_name:
            return self._give_back()
        self.calls[-1].is_complete = self._scanner.end is not None
        self._state, self._given = "text", ""
        return True

    def _tell(self) -> None:
        """Report a call's name once its arguments begin, and the arguments so far."""
        scanner = self._scanner
        if scanner.name is None or scanner.start is None:
            return
        if not self._has_name:
            self._name_call(scanner.name)
            self._sent = scanner.start
        end = len(scanner.text) if scanner.end is None else scanner.end
        self._add_arguments(scanner.text[self._sent:end])
        self._sent = end

    def _name_call(self, name: str) -> None:
        if self._is_bare and name not in self.names:
            raise _NoCall
        self._has_name, self._is_next, self._given, self._space = True, False, "", ""
        self.calls.append(ToolCall(name))
        self._deltas.append(ToolDelta(len(self.calls) - 1, self.calls[-1].id, name))

    def _add_arguments(self, arguments: str) -> None:
        if arguments:
            self.calls[-1].arguments += arguments
            self._deltas.append(ToolDelta(len(self.calls) - 1, arguments=arguments))

    def _end_call(self) -> None:
        if not self._has_name:
            name, arguments = self._scanner.whole()
            self._name_call(name)
            self._add_arguments(arguments)
        self.calls[-1].is_complete = True
        self._state, self._given = "after", ""

    def _end_list(self) -> bool:
        self._consume(1)
        self._state, self._in_list, self._given = "after", False, ""
        return True

    def _read_after(self) -> bool:
        rest, closes = self._buffer.lstrip(), self.form.closes
        if not rest:
            return False
        if self._in_list and rest[0] == "]":
            self._buffer = rest
            return self._end_list()
        if self._in_list and rest[0] == "," or self.form.name == "llama3" and rest[0] == ";":
            self._buffer, self._state, self._given, self._is_next = rest[1:], "opened", rest[0], True
            return True
        if closes and closes.startswith(rest) and rest != closes:
            return False
        if closes and rest.startswith(closes):
            self._buffer = rest[len(closes):]
        self._state = "text"
        return True

    def _read_code(self) -> bool:
        self._consume(len(self._buffer))
        return False

    def _end_code(self) -> None:
        """Read text after <|python_tag|>: name.call(key="value") of a built-in tool, else code for an interpreter."""
        code = self._given.removeprefix(self.form.opens).strip()
        interpreter = next((name for name in _CODE_TOOLS if name in self.names), None)
        call = _read_builtin(code) or (interpreter and (interpreter, {"code": code}))
        if not call:
            self._give_back()
            return
        self._name_call(call[0])
        self._add_arguments(json.dumps(call[1], ensure_ascii=False))
        self.calls[-1].is_complete = True

    def _skip_space(self) -> str:
        rest = self._buffer.lstrip()
        self._consume(len(self._buffer) - len(rest))
        return rest

    def _consume(self, count: int) -> None:
        self._given += self._buffer[:count]
        self._buffer = self._buffer[count:]

    def _give_back(self) -> bool:
        text, self._given, self._state, self._is_next = self._given, "", "text", False
        self._emit(text)
        return True

    def _emit(self, text: str) -> None:
        if self.calls:
            text = self._space + text
            shown = text.rstrip()
            text, self._space = shown, text[len(shown):]
        if text:
            self.text += text
            self._deltas.append(text)


def _read_builtin(code: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of name.call(key="value", ...); None for anything else."""
    if len(code) > _CODE_LENGTH or not re.match(r"\w+\.call\(", code):
        return None
    try:
        call = ast.parse(code, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
            if call.func.attr == "call" and not call.args and all(word.arg for word in call.keywords):
                return call.func.value.id, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return None
