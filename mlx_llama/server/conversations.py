"""Conversations in any API: messages, tools, choices and formats, translated for core."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, Tag, create_model, model_validator

from mlx_llama.api.tool_use import Toolbox
from mlx_llama.core.answers.schema import Schema
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import FIELDS
from mlx_llama.core.text.tools import read_tools

from .admission import PromptRequest
from .faults import MEDIA, Fault, Refusal, bad_field
from .fields import (
    BY_TYPE,
    HIDDEN,
    NOTED,
    RULES,
    AdapterScales,
    Body,
    Likeliest,
    Note,
    Noted,
    Notes,
    OptionFields,
    SchemaValue,
    TextOr,
    look_up,
    spellings,
    unavailable,
)

MESSAGES = Field(min_length=1, max_length=2048)
ToolName = Annotated[str, Field(pattern=r"^[\w.:/@-]{1,128}$")]


# Messages


class Part(Body):
    """A part of a message. One that is no text has no other fault."""

    text: str

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if isinstance(kind := values.get("type"), str) and MEDIA.search(kind):
            values.clear()
            values |= {"type": kind, "text": ""}


class TextPart(Part):
    """A part of a message."""

    type: Literal["text"]


class OpenPart(Part):
    """A part that may have further fields for the chat template."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]


class CallFunction(Body):
    """Name and arguments of a call."""

    name: str = Field(max_length=128)
    arguments: str

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        values["arguments"] = adapt_arguments(values.get("arguments", {}))


class Call(Body):
    """A call that an assistant made."""

    id: str = Field("", max_length=4096)
    index: int = Field(0, ge=0, description="has no effect: calls are listed in order")
    type: Noted[Literal["function"]] = "function"
    function: CallFunction

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if values.get("type") == "custom" and isinstance(call := values.pop("custom", None), dict):
            values |= {"type": "function", "function": adapt_custom(call)}


class Message(Body):
    """A message of a conversation. Those of older and other clients may lack ids of calls, have
    arguments as objects, the role function, no content, and parts that are no text.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOr[list[OpenPart]] = ""
    name: Noted[str] = Field("", max_length=256, description="for templates that show it")
    reasoning_content: Noted[str] = Field(
        "", description="an assistant's thought, for templates that show it"
    )
    tool_calls: list[Call] = Field([], max_length=128)
    tool_call_id: str = Field("", max_length=4096)
    refusal: Noted[Literal[""]] = ""  # clients send answers back with these, empty
    annotations: Noted[list[Any]] = Field([], max_length=0)

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if isinstance(call := values.pop("function_call", None), dict):
            values.setdefault("tool_calls", [{"function": call}])
        if values.get("role") == "function":
            values["role"] = "tool"
        if values.get("role") == "assistant":
            _move_thoughts(values, notes)
        is_sent = values.get("role") not in ("assistant", "tool")
        adapt_parts(values, "content", "text", None if is_sent else notes)

    @model_validator(mode="after")
    def _check_role(self):
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only the assistant can have tool_calls")
        if self.reasoning_content and self.role != "assistant":
            raise ValueError("only the assistant can have reasoning_content")
        if self.tool_call_id and self.role != "tool":
            raise ValueError("role tool needs tool_call_id; other roles have none")
        return self


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert a conversation for templates, with ids for calls and results that have none."""
    plain = []
    waiting: list[str] = []  # ids of calls without a result
    for number, message in enumerate(messages):
        calls = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
        for i, call in enumerate(calls):
            call["id"] = call["id"] or f"call_{number}_{i}"
        waiting = [call["id"] for call in calls] or waiting
        identity = message.tool_call_id
        if message.role == "tool" and not identity:
            identity = waiting[0] if waiting else f"call_{number}"
        waiting = [other for other in waiting if other != identity]
        fields = {
            "tool_calls": calls,
            "tool_call_id": identity,
            "name": message.name,
            "reasoning_content": message.reasoning_content,
        }
        present = {name: value for name, value in fields.items() if value}
        plain.append(plain_message(message.role, message.content, **present))
    return plain


def plain_message(role: str | None, content: Any, **more: Any) -> dict[str, Any]:
    """Return a message for templates. content: a text, or text parts, which stay parts if they have
    further fields.
    """
    role = "system" if role == "developer" else role
    if not isinstance(content, str):
        is_open = any(part.model_extra for part in content)
        parts = [part.model_dump() for part in content] if is_open else None
        content = parts or "".join(part.text for part in content)
    return {"role": role, "content": content, **more}


def plain_call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def adapt_custom(call: dict[str, Any]) -> dict[str, Any]:
    """Turn the call of a custom tool, whose input is a text, into that of a function."""
    rest = {name: value for name, value in call.items() if name != "input"}
    return {**rest, "arguments": adapt_arguments({"input": call.get("input", "")})}


# Fields of an assistant's message, and types of parts, that hold a thought
_THOUGHT_FIELDS = ("reasoning", "thinking")
_THOUGHT_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")


def _move_thoughts(message: dict[str, Any], notes: Notes) -> None:
    """Move the thoughts of an assistant's message into its reasoning_content, unless it has one."""
    thoughts = [message.pop(name) for name in _THOUGHT_FIELDS if _is_text(message.get(name))][:1]
    if isinstance(parts := message.get("content"), list):
        kept = []
        for part in parts:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _THOUGHT_PARTS:
                kept.append(part)
                continue
            name = next((name for name in ("thinking", "reasoning", "text") if name in part), "")
            if text := join_texts(part.get(name)):
                thoughts.append(text)
            for other in part.keys() - {"type", name}:  # such as a signature
                notes.note(f"content[].{kind if other == 'data' else other[:40]}")
        message["content"] = kept
    thought = "\n".join(thoughts)
    if thoughts and message.setdefault("reasoning_content", thought) != thought:
        notes.note("reasoning")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def join_texts(value: Any, between: str = "") -> str:
    """Join a text, or a list of text parts."""
    parts = value if isinstance(value, list) else [{"text": value}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return between.join(text for text in texts if isinstance(text, str))


def adapt_arguments(arguments: Any) -> Any:
    """Write the arguments of a call as JSON of an object. Templates get the text of an unfinished
    call as {"raw": text}.
    """
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = arguments if isinstance(parsed, dict) else {"raw": arguments}
    is_object = isinstance(arguments, dict)
    return json.dumps(arguments, ensure_ascii=False) if is_object else arguments


def adapt_parts(owner: dict[str, Any], name: str, kind: str, notes: Notes | None = None) -> None:
    """Turn the text parts of all APIs in a list `owner[name]` into parts of the type `kind`.

    notes: drop thoughts, put a short text in the place of other parts, and report their types.
    """
    if not isinstance(parts := owner.get(name), list):
        return
    adapted = owner[name] = []
    for part in parts:
        form = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            adapted.append({"type": kind, "text": part})
        elif form in ("text", "input_text", "output_text", "refusal"):
            text = part.get("text", part.get("refusal"))
            adapted.append({**part, "type": kind, "text": text})
        elif isinstance(part, dict) and notes:
            notes.note(f"{name}[].{str(part.get('type', 'part'))[:40]}")
            if form not in _THOUGHT_PARTS:
                adapted.append({"type": kind, "text": _leave_out(part)})
        else:
            adapted.append(part)


def _leave_out(part: dict[str, Any]) -> str:
    """Return a text for the place of a part that is no text."""
    kind = str(part.get("type", "part"))[:40]
    name = next(
        (part[name] for name in ("filename", "title", "name") if _is_text(part.get(name))), ""
    )
    media = MEDIA.search(kind)
    shown = " ".join(filter(None, [media[0] if media else kind, name[:200]]))
    return f"[{shown}: left out, this model reads text only]"


# Tools


def build_toolbox(described: Sequence[Mapping[str, Any]], choice: str, many: bool) -> Toolbox:
    """Check tools. many: allow several calls; a named tool is called once. Raises Refusal."""
    try:
        tools = tuple(read_tools(list(described)))
    except OptionsError as error:
        raise Refusal(400, "invalid_value", [Fault("tools", "tools", str(error))]) from None
    return Toolbox(tools, choice, many and choice not in [tool.name for tool in tools])


class FunctionBody(Body):
    """A function that the model may call."""

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = Field(
        {"type": "object", "properties": {}}, description="JSON schema of an object"
    )
    strict: Noted[bool | None] = Field(
        None, description="has no effect: a required call always fits its schema"
    )

    def described(self) -> dict[str, Any]:
        """Describe the tool for core."""
        names = {"name", "description", "parameters"}
        return {"type": "function", "function": self.model_dump(include=names, by_alias=False)}


class FunctionTool(Body):
    """A function as a tool."""

    type: Literal["function"]
    function: FunctionBody

    def described(self) -> dict[str, Any]:
        """Describe the tool for core."""
        return self.function.described()


def adapt_allowed_tools(values: dict[str, Any]) -> None:
    """Keep only the tools that a tool_choice of type allowed_tools lists."""
    choice: Any = values.get("tool_choice")
    tools = values.get("tools")
    is_list = isinstance(choice, dict) and choice.get("type") == "allowed_tools"
    allowed = choice.get("allowed_tools", choice) if is_list else None
    if not isinstance(allowed, dict) or not isinstance(tools, list):
        return
    if isinstance(listed := allowed.get("tools"), list):
        names = [_tool_name(tool) for tool in listed]
        values["tools"] = [tool for tool in tools if _tool_name(tool) in names]
        values["tool_choice"] = allowed.get("mode", "auto")


def _tool_name(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


# Formats


class SchemaBody(Body):
    """A format with a JSON schema."""

    schema_: SchemaValue | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _check_schema(self):
        """Raise ValueError for an invalid schema, or one that is too long or too deep."""
        if self.schema_ is not None:
            Schema.of(self.schema_)
        return self


class NamedSchema(SchemaBody):
    """A JSON schema with a name."""

    name: str = Field("", max_length=64)
    description: str | None = Field(None, max_length=1 << 16, description="has no effect")
    schema_: SchemaValue = Field({}, alias="schema")
    strict: bool | None = Field(
        None, description="true: refuse a schema that cannot be fully enforced"
    )


def format_options(kind: str, schema: Any, is_strict: bool | None = False) -> dict[str, Any]:
    """Return the option that enforces a format; text lifts the server's rule. is_strict: relax
    nothing of the schema.
    """
    if kind == "text":
        return dict.fromkeys(RULES)
    schema = {"type": "object"} if schema is None else schema
    return {"schema": Schema.of(schema) if is_strict else schema}


def is_rule(form: Any) -> bool:
    """True for a format that demands more than text."""
    return isinstance(form, dict) and form.get("type") != "text"


def prefer_call(values: dict[str, Any], place: str, note: Note) -> None:
    """Drop the format at a place of an answer that must be a call."""
    choice: Any = values.get("tool_choice")
    may_choose = isinstance(choice, dict) and choice.get("type") in ("auto", "none")
    is_forced = choice == "required" or (isinstance(choice, dict) and not may_choose)
    if is_forced and is_rule(look_up(values, place)):
        owner, _, name = place.rpartition(".")
        if owner:
            values[owner] = {key: part for key, part in values[owner].items() if key != name}
        else:
            del values[name]
        note(place)


# Thoughts


def adapt_thinking(values: dict[str, Any], note: Note) -> None:
    """Turn the fields by which APIs control thinking into options and variables of the template."""
    if values.get("reasoning_format") == "none":
        values["reasoning"] = values.get("reasoning") or "raw"
        del values["reasoning_format"]
    variables = values.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        return
    chosen: dict[str, Any] = {}
    if isinstance(effort := values.pop("reasoning_effort", None), str):
        chosen = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    elif effort is not None:
        note("reasoning_effort")
    if (thinking := values.pop("thinking", None)) is not None:
        parts = thinking if isinstance(thinking, dict) else {"": thinking}
        if parts.get("type") in ("enabled", "adaptive", "disabled"):
            chosen["enable_thinking"] = parts["type"] != "disabled"
        budgets = {"reasoning_budget", "thinking_budget_tokens", "thinking_token_budget"}
        if isinstance(budget := parts.get("budget_tokens"), int) and budgets.isdisjoint(values):
            values["reasoning_budget"] = budget
        read = set() if budgets.isdisjoint(values) else {"budget_tokens"}
        for name in parts.keys() - read - ({"type"} if "enable_thinking" in chosen else set()):
            note(f"thinking.{name}")
    if (wanted := values.pop("enable_thinking", None)) is not None:
        chosen["enable_thinking"] = wanted
    if chosen or variables:
        values["chat_template_kwargs"] = chosen | variables


# Requests


_SAMPLERS = [
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature".split(),
]
_SWITCHES_OFF: dict[str, tuple[Any, ...]] = {
    "samplers": (*_SAMPLERS,),
    "n_keep": (0, -1),
    **dict.fromkeys(
        "min_keep n_indent n_discard n_cache_reuse dynatemp_range mirostat".split(), (0,)
    ),
    **dict.fromkeys("image_data grammar_triggers preserved_tokens".split(), ([],)),
    **dict.fromkeys(("dynatemp_exponent", "typical_p"), (1,)),
    "grammar_lazy": (False,),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "adaptive_decay": (0.9,),
    "mirostat_tau": (5,),
    "mirostat_eta": (0.1,),
}
# llama-server's samplers and hints that are not available. The order of samplers is fixed:
# penalties, dry, temperature, top_k, top_p, min_p, xtc; either of its default lists stands for it.
UnavailableFields: Any = create_model(
    "UnavailableFields",
    __base__=Body,
    **dict[str, Any](
        (name, (Annotated[Any, NOTED, unavailable(values), HIDDEN], values[0]))
        for name, values in _SWITCHES_OFF.items()
    ),
)


class AnswerFields(OptionFields, UnavailableFields):
    """Fields of the routes that answer."""

    model_config = OptionFields.model_config
    prompt_field: ClassVar[str] = "prompt"

    stream: bool = False
    ignore_eos: bool = Field(False, description="continue after end tokens")
    cache_prompt: bool = Field(
        True, description="reuse cached prefixes; false: compute the whole prompt"
    )
    lora: AdapterScales | None = None

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        super().adapt(values, notes)
        if values.get("reasoning") not in (None, *get_args(FIELDS["reasoning"].annotation)):
            cls.adapt_reasoning(values, notes)

    @classmethod
    def adapt_reasoning(cls, values: dict[str, Any], notes: Notes) -> None:
        """Translate a field `reasoning` of other servers."""
        del values["reasoning"]
        notes.note("reasoning")

    def ask(self, prompt: Any, **more: Any) -> PromptRequest:
        """Translate for core. prompt: messages as templates take them, or a text to continue.
        more: further fields. Raises Refusal.
        """
        switches: Any = {"reuses": self.cache_prompt, "ignores_eos": self.ignore_eos}
        switches |= {"lora": self.lora, **more}
        field = switches.pop("field", self.prompt_field)
        return PromptRequest(prompt, field, self.requested_options(), **switches)


class Conversing(AnswerFields):
    """A request with a conversation. Bodies of APIs say where its parts are."""

    prompt_field: ClassVar[str] = "messages"
    format_field: ClassVar[str] = ""  # place of the answer's format

    truncation: Noted[Literal["auto", "disabled"] | None] = Field(
        None,
        description="auto: drop the oldest turns of a conversation that outgrew the context, and "
        "keep the system message; default: the server's --truncation",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables of the chat template, such as enable_thinking"
    )
    documents: list[dict[str, Any]] = Field(
        [], max_length=2048, description="texts to answer from, for templates that show them"
    )
    tools: Sequence[Any]  # with a method `described`

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        super().adapt(values, notes)
        adapt_thinking(values, notes.note)

    @classmethod
    def adapt_reasoning(cls, values: dict[str, Any], notes: Notes) -> None:
        reasoning = values.pop("reasoning")
        parts = reasoning if isinstance(reasoning, dict) else {"": reasoning}
        values.setdefault("reasoning_effort", parts.get("effort"))
        for name in parts.keys() - {"effort"}:
            notes.note(f"reasoning.{name}")

    @classmethod
    def check_together(cls, values: Mapping[str, Any], notes: Notes) -> None:
        form, names = look_up(values, cls.format_field), spellings(cls)
        rules = ", ".join(
            rule
            for rule in RULES
            if any(names.get(name) == rule and values[name] is not None for name in values)
        )
        if is_rule(form) and rules:
            field, text = cls.format_field.partition(".")[0], f"cannot be combined with {rules}"
            notes.refuse(field, "at most one rule", text, form)

    def choice(self) -> tuple[str, bool]:
        """Return auto, none, required or a tool's name; and whether several calls are allowed."""
        return "auto", True

    def form(self) -> dict[str, Any]:
        """Return the option that enforces the answer's format."""
        return {}

    def requested_options(self) -> dict[str, Any]:
        options, form = super().requested_options(), self.form()
        return form | options | {name: rule for name, rule in form.items() if rule is not None}

    def ask(self, prompt: Any, **more: Any) -> PromptRequest:
        choice, many = self.choice()
        documents = {"documents": self.documents} if self.documents else {}
        ask = super().ask(
            prompt,
            toolbox=build_toolbox([tool.described() for tool in self.tools], choice, many),
            truncates=None if self.truncation is None else self.truncation == "auto",
            variables={**self.chat_template_kwargs, **documents},
            **more,
        )
        rules = [name for name in RULES if ask.options.get(name) is not None]
        if ask.toolbox.forced and rules:
            field = rules[0] if self.form().get("schema") is None else self.format_field
            text = "does not apply to an answer that must be a call: use tool_choice auto"
            raise bad_field(field, "tool_choice auto or none", text)
        return ask


class NamedChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


class OpenAIFields(Conversing):
    """Fields that chat completions and responses share."""

    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("as:string")]
        | Annotated[NamedChoice, Tag("as:object")],
        BY_TYPE,
    ] = Field("auto", description="stop strings do not end a required call")
    parallel_tool_calls: Noted[bool] = True
    top_logprobs: Likeliest = None

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        super().adapt(values, notes)
        adapt_allowed_tools(values)
        choice: Any = values.get("tool_choice")
        if isinstance(choice, dict) and isinstance(choice.get("function"), dict):
            # in the format of chat completions
            rest = {name: value for name, value in choice.items() if name != "function"}
            values["tool_choice"] = rest | choice["function"]
        prefer_call(values, cls.format_field, notes.note)

    def choice(self) -> tuple[str, bool]:
        choice = self.tool_choice
        return choice if isinstance(choice, str) else choice.name, self.parallel_tool_calls
