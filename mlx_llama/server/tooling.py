"""Tools, formats and log-probabilities of OpenAI's APIs; answers split into text and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.generation.completion import Completion, Token
from mlx_llama.core.generation.llm import LLM
from mlx_llama.core.generation.schema import Schema
from mlx_llama.core.generation.tool_use import Toolbox
from mlx_llama.core.text.thoughts import Thought, ThoughtParser, find_thoughts
from mlx_llama.core.text.tools import (
    ToolCall,
    ToolDelta,
    ToolFormat,
    ToolParser,
    find_format,
    read_tools,
)

from .answers import Answers
from .faults import bad_field
from .fields import RULES, Body, Strict

TOOL_NAME = r"^[\w.:/@-]{1,128}$"


def build_toolbox(described: Sequence[Mapping[str, Any]], choice: str, many: bool) -> Toolbox:
    """Check tools and the choice among them. many: allow several calls. Raises Refusal."""
    try:
        tools = tuple(read_tools(list(described)))
    except OptionsError as error:
        raise bad_field("tools", "tools", str(error)) from None
    names = [tool.name for tool in tools]
    if choice not in ("none", "auto") and not tools:
        raise bad_field("tool_choice", "tools", "tool_choice: needs tools", choice)
    if choice not in ("none", "auto", "required", *names):
        raise bad_field(
            "tool_choice",
            f"one of {', '.join(names)}",
            f"tool_choice: there is no tool {choice!r:.100}",
            choice,
        )
    return Toolbox(tools, choice, many and choice not in names)


def check_rule(box: Toolbox, options: Mapping[str, Any], form: str) -> None:
    """Refuse a rule for the text of an answer that must be a call.

    form: the field with the schema, "" for schema itself.
    """
    rule = next((name for name in RULES if options.get(name) is not None), None)
    if box.forced and rule:
        field = form or rule
        raise bad_field(
            field,
            "tool_choice auto or none",
            f"{field}: does not apply to an answer that must be a call: leave it out, "
            "or use tool_choice auto",
        )


Piece = str | Thought | ToolDelta


class Reader:
    """Splits the streamed text of an answer into thoughts, text and calls.

    An answer that must be a call has no text: the start of an unfinished call is dropped.
    """

    def __init__(self, answers: Answers, index: int, toolbox: Toolbox):
        llm = answers.llm
        self.parser: ToolParser | None = None
        self.thought_tokens = 0  # tokens of thoughts so far
        self._thoughts = self._find_thoughts(answers, index)
        self._is_forced = bool(toolbox.forced)
        if toolbox.offered:
            form = tool_format(llm)
            self.parser = ToolParser(form, toolbox.offered)

    @staticmethod
    def _find_thoughts(answers: Answers, index: int) -> ThoughtParser | None:
        llm = answers.llm
        if llm.template is None or answers.settings.reasoning == "raw":
            return None
        form = find_thoughts(llm.template.source)
        is_open = form is not None and form.is_open(llm.tokenizer, answers.prompts[index])
        return ThoughtParser(form, is_open) if form else None

    @property
    def may_think(self) -> bool:
        """True if the answer may begin with a thought."""
        return self._thoughts is not None

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far."""
        return self.parser.calls if self.parser else []

    def read(self, tokens: Sequence[Token], is_last: bool) -> list[Piece]:
        """Push the tokens, and the end if they are the last."""
        pieces = [piece for token in tokens for piece in self.push(token.text)]
        return pieces + (self.push("", is_last=True) if is_last else [])

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        """Read a token's text; return new thoughts, text and parts of calls, none empty."""
        pieces: list[Piece] = []
        if self._thoughts is not None:
            self.thought_tokens += self._thoughts.is_thinking and not is_last
            parts = self._thoughts.push(text, is_last)
            pieces += [part for part in parts if isinstance(part, Thought)]
            text = "".join(part for part in parts if isinstance(part, str))
        if self.parser is None:
            return [*pieces, text] if text else pieces
        news = self.parser.push(text) + (self.parser.finish() if is_last else [])
        return pieces + (
            [piece for piece in news if not isinstance(piece, str)] if self._is_forced else news
        )


def tool_format(llm: LLM) -> ToolFormat:
    """Return the format in which the model writes calls. Raises OptionsError."""
    return find_format(llm.require_template().source, llm.tokenizer)


class Parts(NamedTuple):
    """The parts of a whole answer."""

    text: str
    calls: list[ToolCall]
    thought: str
    thought_tokens: int


def read_answer(answers: Answers, index: int, toolbox: Toolbox) -> Parts:
    """Split a whole answer into thoughts, text and calls."""
    reader, completion = Reader(answers, index, toolbox), answers.completions[index]
    pieces = reader.read(completion.tokens, is_last=True)
    return Parts(
        "".join(piece for piece in pieces if isinstance(piece, str)),
        reader.calls,
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        reader.thought_tokens,
    )


def are_complete(calls: Sequence[ToolCall]) -> bool:
    """True if there are calls, none of them cut by a stop string or a limit."""
    return bool(calls) and all(call.is_complete for call in calls)


def finish_reason(completion: Completion, calls: Sequence[ToolCall] = ()) -> str:
    """Return OpenAI's finish_reason."""
    if completion.finish_reason in ("length", "context"):
        return "length"
    return "tool_calls" if are_complete(calls) else "stop"


# Bodies


def describe_function(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a tool for core."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class FunctionBody(Body):
    """A function that the model may call."""

    name: str = Field(pattern=TOOL_NAME)
    description: str = Field("", max_length=1 << 18)
    parameters: dict[str, Any] = Field(
        {"type": "object", "properties": {}}, description="JSON schema of an object"
    )
    strict: Strict = None

    def described(self) -> dict[str, Any]:
        """Describe the tool for core."""
        return describe_function(self.name, self.description, self.parameters)


class FunctionTool(Body):
    """A function as a tool."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class CallFunction(Body):
    """Name and arguments of a call."""

    name: str = Field(max_length=128)
    arguments: str


class Call(Body):
    """A call that an assistant made."""

    id: str = Field(max_length=4096)
    index: int = Field(0, ge=0, description="has no effect: calls are listed in order")
    type: Literal["function"] = "function"
    function: CallFunction


class NamedSchema(Body):
    """A JSON schema with a name."""

    name: str = Field("", max_length=64)
    description: str = Field("", max_length=1 << 16, description="has no effect")
    schema_: dict[str, Any] | bool = Field({}, alias="schema")
    strict: bool | None = Field(None, description="has no effect: the schema is always enforced")

    @model_validator(mode="after")
    def _check(self):
        check_schema(self.schema_)
        return self


class ResponseFormat(Body):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="for json_object, as in llama-server"
    )

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema needs json_schema, and others have none")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("only the type json_object has a schema")
        if self.schema_ is not None:
            check_schema(self.schema_)
        return self

    def options(self) -> dict[str, Any]:
        """Return the option that enforces the format."""
        if self.type == "text":
            return {}
        if self.json_schema is not None:
            form = self.json_schema
            # strict: relax nothing
            return {"schema": Schema.of(form.schema_) if form.strict else form.schema_}
        return {"schema": {"type": "object"} if self.schema_ is None else self.schema_}


def check_schema(value: Any) -> None:
    """Raise ValueError for an invalid schema, or one that is too long or too deep."""
    Schema.of(value)


# Log-probabilities


def write_token(llm: LLM, token: int, logprob: float) -> dict[str, Any]:
    """Write a token and its log-probability."""
    piece = llm.tokenizer.piece(token)
    data = piece.data if piece else b""
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(data),
    }


def write_logprobs(llm: LLM, tokens: Sequence[Token]) -> dict[str, Any]:
    """Write OpenAI's logprobs, without end tokens."""
    return {"content": list_logprobs(llm, tokens), "refusal": None}


def list_logprobs(llm: LLM, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the entries of `write_logprobs`."""
    return [
        write_token(llm, token, token.logprobs.logprob)
        | {"top_logprobs": [write_token(llm, other, value) for other, value in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None and token not in llm.engine.eos
    ]
