"""OpenAI's Responses: text in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from .conversations import (
    FunctionBody,
    NamedSchema,
    OpenAIFields,
    adapt_parts,
    format_options,
    is_forced,
    is_rule,
    plain_call,
    plain_message,
    write_arguments,
)
from .fields import (
    RULES,
    Body,
    ModelName,
    Note,
    OptionFields,
    list_places,
)
from .kept import KeptResponses
from .replies import Json, check_model, count_prompt, reply
from .response_writer import ResponseWriter
from .schemas import serves

router = APIRouter(tags=["OpenAI"])


class InputPart(Body):
    """A text part of an item, from a question or an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] = Field([], max_length=0)
    logprobs: list[Any] = Field([], description="has no effect")


# Fields that an item of a type has
_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": (),
}
_MAY_BE_EMPTY = ("content", "output", "arguments")


class InputItem(Body):
    """A message, a call or its result in the input."""

    type: Literal["message", "function_call", "function_call_output", "item_reference"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str = Field(default="", max_length=512)
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    call_id: str = Field(default="", max_length=4096)
    name: str = Field(default="", max_length=64)
    arguments: str | None = None
    output: str | list[InputPart] | None = None

    @model_validator(mode="after")
    def _check_type(self):
        needed, missing = _ITEMS[self.type], []
        for name in needed:
            value = getattr(self, name)
            if value is None or (value == "" and name not in _MAY_BE_EMPTY):
                missing.append(name)
        if missing:
            raise ValueError(f"{self.type} needs {', '.join(missing)}")
        fields = {name for names in _ITEMS.values() for name in names}
        if foreign := sorted((fields & self.model_fields_set) - set(needed)):
            raise ValueError(f"{self.type} cannot have {', '.join(foreign)}")
        return self


class TextFormat(NamedSchema):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("the type json_schema needs a schema, and others have none")
        return self


class TextConfig(Body):
    """Format of the answer."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: Literal["medium"] = "medium"  # others are not supported

    def as_dict(self) -> dict[str, Any]:
        """Write the format as a response repeats it."""
        form = self.format.model_dump()
        form["description"] = form["description"] or None
        if self.format.type != "json_schema":
            form = {"type": form["type"]}
        return {"format": form, "verbosity": self.verbosity}


class Reasoning(Body):
    """No reasoning."""

    effort: Literal["none"] = "none"


class ResponsesTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class ResponsesChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    name: str


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(OptionFields, OpenAIFields):
    """POST /v1/responses."""

    renamed: ClassVar = OptionFields.renames(max_output_tokens="max_tokens", json_schema="schema")
    places: ClassVar[Mapping[str, Sequence[str]]] = {"schema": ("text.format.schema",)}
    noted: ClassVar = list_places(
        "reasoning store truncation include service_tier metadata user safety_identifier "
        "prompt_cache_key text.verbosity parallel_tool_calls top_logprobs "
        "input.content.annotations input.content.logprobs input.status input.id tools.strict"
    )
    refused: ClassVar[Mapping[str, str]] = {
        "conversation": "use previous_response_id, or send the conversation as input",
        "prompt": "prompts are not kept: send instructions and input",
    }
    prompt_field: ClassVar = "input"
    format_field: ClassVar = "text.format"

    input: str | list[InputItem] = Field(min_length=1)
    instructions: str = ""
    model: ModelName = None
    stream: bool = False
    text: TextConfig = TextConfig()
    tools: list[ResponsesTool] = []
    tool_choice: Literal["none", "auto", "required"] | ResponsesChoice = Field(
        "auto", description="stop strings do not end a required call"
    )
    background: Literal[False] = False
    reasoning: Reasoning = Reasoning()  # type: ignore[assignment]  # in place of the option
    previous_response_id: str | None = Field(
        None,
        max_length=512,
        description="continue this response, which is kept in memory for an hour; its instructions "
        "do not carry over",
    )
    store: bool = Field(True, description="keep the response for previous_response_id")
    include: list[Literal["message.output_text.logprobs"]] = []
    metadata: dict[str, str] = Field({}, max_length=16, description="returned with the answer")

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        if isinstance(tools := values.get("tools"), list):
            values["tools"] = _adapt_tools(tools, values.get("tool_choice"), note)
        if values.get("tool_choice") == "none" and not values.get("tools"):
            del values["tool_choice"]
        text: Any = values.get("text")
        is_ruled = isinstance(text, dict) and is_rule(text.get("format"))
        if is_ruled and is_forced(values.get("tool_choice")):
            values["text"] = {name: value for name, value in text.items() if name != "format"}
            note("text.format")
        if LOGPROBS not in (values.get("include") or ()) and values.pop("top_logprobs", None):
            note("top_logprobs")
        if isinstance(items := values.get("input"), list):
            values["input"] = [item for item in map(_adapt_item, items) if item is not None]
            if len(values["input"]) < len(items):
                note("input[]")

    @model_validator(mode="after")
    def _check_options(self):
        if self.form() and any(getattr(self, name) is not None for name in RULES):
            raise ValueError("text: cannot be combined with schema, regex or grammar")
        if self.top_logprobs is not None and not self.include:
            raise ValueError(f'top_logprobs: only with include: ["{LOGPROBS}"]')
        return self

    def items(self, kept: KeptResponses) -> list[InputItem]:
        """Return the conversation: the kept items, and the input. Raises Refusal."""
        previous, items = self.previous_response_id, self.input
        if isinstance(items, str):
            items = [InputItem(role="user", content=items)]
        earlier = kept.get(previous, "previous_response_id").items if previous else ()
        conversation = [InputItem.model_validate(item) for item in earlier]
        for item in items:
            if item.type == "item_reference":
                item = InputItem.model_validate(kept.find_item(item.id))
            conversation.append(item)
        return conversation

    def translate(self, conversation: Sequence[InputItem]) -> list[dict[str, Any]]:
        """Convert a conversation to messages for templates."""
        plain: list[dict[str, Any]] = []
        for item in conversation:
            if item.type == "function_call":
                # text and calls share a message of the assistant
                if not plain or plain[-1]["role"] != "assistant":
                    plain.append(plain_message("assistant", ""))
                call = plain_call(item.call_id, item.name, item.arguments)
                plain[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                plain.append(plain_message("tool", item.output, tool_call_id=item.call_id))
            else:
                plain.append(plain_message(item.role, item.content))
        system = [plain_message("system", self.instructions)] if self.instructions else []
        return [*system, *plain]

    def form(self) -> dict[str, Any]:
        form = self.text.format
        return format_options(form.type, form.schema_, form.strict)

    def requested_options(self) -> dict[str, Any]:
        logprobs = {"logprobs": self.top_logprobs or 0} if self.include else {}
        form = self.text.format
        lifts = "format" in self.text.model_fields_set and form.type == "text"
        lifted = dict.fromkeys(RULES) if lifts else {}
        options = super().requested_options()
        options.pop("reasoning", None)  # OpenAI's object, not the option
        return logprobs | lifted | options | self.form()

    def choice(self) -> tuple[str, bool]:
        choice = self.tool_choice
        return choice if isinstance(choice, str) else choice.name, self.parallel_tool_calls


def _adapt_tools(tools: list[Any], choice: Any, note: Note) -> list[Any]:
    """Pick the functions among tools, including those of namespaces. Drop tools that run on
    OpenAI's servers, unless the choice requires them.
    """
    functions: list[Any] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        is_chosen = isinstance(choice, dict) and choice.get("type") == kind
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            functions += _adapt_tools(tool["tools"], choice, note)
        elif kind == "function" and isinstance(tool.get("function"), dict):
            # in the format of chat completions
            functions.append({"type": "function", **tool["function"]})
        elif kind in (None, "function") or is_chosen:
            functions.append(tool)
        else:
            note(f"tools[].{kind!s:.40}")
    return functions


def _adapt_item(item: Any) -> Any:
    """Convert an input item; None for thoughts, and for calls that ran on OpenAI's servers."""
    if not isinstance(item, dict):
        return item
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message")
    if kind == "reasoning" or (kind.endswith("_call") and kind != "function_call"):
        return None
    if kind == "function_call" and "arguments" in item:
        item["arguments"] = write_arguments(item["arguments"])
    for name in ("content", "output"):
        adapt_parts(item, name, "input_text")
    return item


@serves(router, ResponsesRequest, "/v1/responses", "/responses")
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    writer = ResponseWriter(request, body)
    ask = body.ask(body.translate(writer.conversation))
    return await reply(request, [ask], writer, body.stream)


class InputTokensRequest(ResponsesRequest):
    """POST /v1/responses/input_tokens."""


@serves(router, InputTokensRequest, "/v1/responses/input_tokens")
async def count_input(request: Request, body: InputTokensRequest) -> Response:
    """Count the tokens of an input, as the model sees it."""
    check_model(request, body.model)
    ask = body.prompt_ask(body.translate(body.items(request.app.state.kept_responses)))
    counted = await count_prompt(request, ask)
    return Json({"object": "response.input_tokens", "input_tokens": counted})
