"""Tools, formats and log-probabilities as OpenAI's APIs write them; answers taken apart into text
and calls.
"""

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
from .fields import Body

TOOL_NAME = r"^[\w.:/@-]{1,128}$"


def build_toolbox(described: Sequence[Mapping[str, Any]], choice: str, many: bool) -> Toolbox:
    """Check tools and the choice among them. Raises Refusal."""
    try:
        tools = tuple(read_tools(list(described)))
    except OptionsError as error:
        raise bad_field("tools", "tools", str(error)) from None
    names = [tool.name for tool in tools]
    if choice not in ("none", "auto") and not tools:
        raise bad_field(
            "tool_choice", "tools", "tool_choice: there is no tool to call: give tools", choice
        )
    if choice not in ("none", "auto", "required", *names):
        raise bad_field(
            "tool_choice",
            f"one of {', '.join(names)}",
            f"tool_choice: there is no tool {choice!r:.100}",
            choice,
        )
    return Toolbox(tools, choice, many and choice not in names)


def check_rule(box: Toolbox, options: Mapping[str, Any], form: str) -> None:
    """Refuse a rule for the text of an answer that must be a call. form: the field that gave the
    schema, "" for schema.

    Raises Refusal.
    """
    rule = next(
        (name for name in ("schema", "regex", "grammar") if options.get(name) is not None), None
    )
    if box.forced and rule:
        field = form or rule
        raise bad_field(
            field,
            "tool_choice auto or none",
            f"{field}: an answer that must be a call has no text to fit it: leave "
            "it out, or choose tool_choice auto",
        )


Piece = str | Thought | ToolDelta


class Reader:
    """Takes the streamed text of one answer apart: thoughts, text, calls.

    An answer that must be a call has no text: the beginning of a call that was cut is dropped.
    thought_tokens: tokens that were thoughts.
    """

    def __init__(self, answers: Answers, index: int, toolbox: Toolbox):
        llm = answers.llm
        self.parser: ToolParser | None = None
        self.thought_tokens = 0
        self._thoughts = self._find_thoughts(answers, index)
        self._is_forced = bool(toolbox.forced)
        if toolbox.offered:
            form = tool_format(llm)
            self.parser = ToolParser(form, [tool.name for tool in toolbox.offered])

    @staticmethod
    def _find_thoughts(answers: Answers, index: int) -> ThoughtParser | None:
        llm = answers.llm
        form = (
            find_thoughts(llm.template.source)
            if llm.template and answers.settings.reasoning != "raw"
            else None
        )
        return (
            ThoughtParser(form, form.is_open(llm.tokenizer, answers.prompts[index]))
            if form
            else None
        )

    @property
    def may_think(self) -> bool:
        """True if the answer may begin with a thought."""
        return self._thoughts is not None

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far."""
        return self.parser.calls if self.parser else []

    def push(self, text: str, is_last: bool = False) -> list[Piece]:
        """Read a token's text; returns thoughts and texts that are not empty, and news of calls."""
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
    """The format in which the model writes calls. Raises OptionsError."""
    return find_format(llm.require_template().source, llm.tokenizer)


class Parts(NamedTuple):
    """A whole answer, taken apart."""

    text: str
    calls: list[ToolCall]
    thought: str
    thought_tokens: int


def read_answer(answers: Answers, index: int, toolbox: Toolbox) -> Parts:
    """Thoughts, text and calls of a whole answer."""
    reader, completion = Reader(answers, index, toolbox), answers.completions[index]
    pieces = [
        piece for token in completion.tokens for piece in reader.push(token.text)
    ] + reader.push("", is_last=True)
    return Parts(
        "".join(piece for piece in pieces if isinstance(piece, str)),
        reader.calls,
        "".join(piece.text for piece in pieces if isinstance(piece, Thought)),
        reader.thought_tokens,
    )


def are_complete(calls: Sequence[ToolCall]) -> bool:
    """True if there are calls and all of them may be made: none was cut by a stop string or a
    limit.
    """
    return bool(calls) and all(call.is_complete for call in calls)


def finish_reason(completion: Completion, calls: Sequence[ToolCall] = ()) -> str:
    """OpenAI's word for the end of an answer."""
    if completion.finish_reason in ("length", "context"):
        return "length"
    return "tool_calls" if are_complete(calls) else "stop"


# Bodies


class FunctionBody(Body):
    """A function that the model may call."""

    name: str = Field(pattern=TOOL_NAME)
    description: str = Field("", max_length=1 << 18)
    parameters: dict[str, Any] = Field(
        {"type": "object", "properties": {}}, description="JSON schema of an object"
    )
    strict: bool | None = Field(
        None, description="has no effect: a required call always fits its schema"
    )

    def described(self) -> dict[str, Any]:
        """The tool as core reads it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


class FunctionTool(Body):
    """A tool of the kind function."""

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
    index: int = Field(0, ge=0, description="has no effect: calls are in their order")
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
    """Kind of the answer: any text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(
        default=None, alias="schema", description="of json_object, as llama-server has it"
    )

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for the type json_schema, which needs it")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("schema is for the type json_object")
        if self.schema_ is not None:
            check_schema(self.schema_)
        return self

    def options(self) -> dict[str, Any]:
        """The option that enforces the format."""
        if self.type == "text":
            return {}
        if self.json_schema is not None:
            form = self.json_schema
            # strict: nothing is relaxed
            return {"schema": Schema.of(form.schema_) if form.strict else form.schema_}
        return {"schema": {"type": "object"} if self.schema_ is None else self.schema_}


def check_schema(value: Any) -> None:
    """Raise ValueError for a schema that is too long, too deep, or none."""
    Schema.of(value)


# Log-probabilities


def write_token(llm: LLM, token: int, logprob: float) -> dict[str, Any]:
    """A token and its log-probability."""
    piece = llm.tokenizer.piece(token)
    data = piece.data if piece else b""
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(data),
    }


def write_logprobs(llm: LLM, tokens: Sequence[Token]) -> dict[str, Any]:
    """OpenAI's logprobs of tokens; end tokens are left out."""
    return {"content": list_logprobs(llm, tokens), "refusal": None}


def list_logprobs(llm: LLM, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """The entries of `write_logprobs`."""
    return [
        write_token(llm, token, token.logprobs.logprob)
        | {"top_logprobs": [write_token(llm, other, value) for other, value in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None and token not in llm.engine.eos
    ]
