"""OpenAI's Responses: text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field, Tag, model_validator
from starlette.requests import Request
from starlette.responses import Response

from .conversations import (
    MESSAGES,
    FunctionBody,
    NamedSchema,
    OpenAIFields,
    format_options,
    plain_call,
    plain_message,
)
from .fields import BY_TYPE, HIDDEN, Body, Likeliest, Note, Noted, Notes, Text, spell, unavailable
from .items import InputItem, KeptResponses, is_passed_over
from .replies import count_prompt, reply
from .response_writer import ResponseWriter
from .schemas import serves

router = APIRouter(tags=["OpenAI"])


class TextFormat(NamedSchema):
    """Format of the answer: text, JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # type: ignore[assignment]

    @model_validator(mode="after")
    def _check(self):
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("type json_schema needs a schema; other types have none")
        return self


class TextConfig(Body):
    """Format of the answer."""

    format: TextFormat = TextFormat.model_validate({})
    verbosity: Noted[Literal["medium"]] = "medium"  # others are not supported

    def as_dict(self) -> dict[str, Any]:
        """Write the format as a response repeats it."""
        is_schema = self.format.type == "json_schema"
        form = self.format.model_dump() if is_schema else {"type": self.format.type}
        return {"format": form, "verbosity": self.verbosity}


class ResponsesTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest(OpenAIFields):
    """POST /v1/responses."""

    model_config = spell(max_tokens="max_output_tokens")
    schema_places: ClassVar[Sequence[str]] = ("text.format.schema",)
    prompt_field: ClassVar = "input"
    format_field: ClassVar = "text.format"

    background: Annotated[
        Any,
        unavailable([False], "responses are not computed in the background: POST /v1/jobs is"),
        HIDDEN,
    ] = False
    conversation: Annotated[
        Any, unavailable([], "use previous_response_id, or send the conversation as input"), HIDDEN
    ] = None
    prompt: Annotated[
        Any, unavailable([], "prompts are not kept: send instructions and input"), HIDDEN
    ] = None
    input: Annotated[
        Annotated[Text, Field(min_length=1)]
        | Annotated[list[InputItem], MESSAGES, Tag("as:array")],
        BY_TYPE,
    ]
    instructions: str = ""
    text: TextConfig = TextConfig()
    tools: list[ResponsesTool] = []
    previous_response_id: str | None = Field(
        None,
        max_length=512,
        description="continue this response, which is kept in memory for an hour; its instructions "
        "do not carry over",
    )
    store: Noted[bool] = Field(True, description="keep the response for previous_response_id")
    include: Noted[list[Literal["message.output_text.logprobs"]]] = []
    top_logprobs: Noted[Likeliest] = None
    metadata: Noted[dict[str, str]] = Field(
        {}, max_length=16, description="returned with the answer"
    )
    user: Noted[str | None] = Field(None, max_length=512, description="returned with the answer")

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        if values.get("reasoning") == {}:
            del values["reasoning"]
        super().adapt(values, notes)
        if isinstance(tools := values.get("tools"), list):
            values["tools"] = _adapt_tools(tools, values.get("tool_choice"), notes.note)
        if values.get("tool_choice") == "none" and not values.get("tools"):
            del values["tool_choice"]
        include = values.get("include")
        if isinstance(include, list) and not notes.is_strict:
            values["include"] = [name for name in include if name == LOGPROBS]
            for _ in include[len(values["include"]) :]:
                notes.note("include[]")
        has_logprobs = isinstance(include, list) and LOGPROBS in include
        if not has_logprobs and values.pop("top_logprobs", None):
            notes.note("top_logprobs")
        if isinstance(items := values.get("input"), list):
            values["input"] = [item for item in items if not is_passed_over(item, notes)]

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
        thought = ""
        for item in conversation:
            if item.type == "reasoning":
                thought += str(item.content)
                continue
            if item.type == "function_call":
                # text and calls share a message of the assistant
                if thought or not plain or plain[-1]["role"] != "assistant":
                    plain.append(plain_message("assistant", ""))
                call = plain_call(item.call_id, item.name, item.arguments)
                plain[-1].setdefault("tool_calls", []).append(call)
            elif item.type == "function_call_output":
                plain.append(plain_message("tool", item.output, tool_call_id=item.call_id))
            else:
                plain.append(plain_message(item.role, item.content))
            if thought and plain[-1]["role"] == "assistant":
                plain[-1].setdefault("reasoning_content", thought)
            thought = ""
        system = [plain_message("system", self.instructions)] if self.instructions else []
        return [*system, *plain]

    def form(self) -> dict[str, Any]:
        form, is_set = self.text.format, "format" in self.text.model_fields_set
        return format_options(form.type, form.schema_, form.strict) if is_set else {}

    def requested_options(self) -> dict[str, Any]:
        logprobs = {"logprobs": self.top_logprobs or 0} if self.include else {}
        return logprobs | super().requested_options()


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


@serves(router, ResponsesRequest, "/v1/responses", "/responses")
async def respond(request: Request, body: ResponsesRequest) -> Response:
    """Answer an input."""
    writer = ResponseWriter(request, body)
    ask = body.ask(body.translate(writer.conversation))
    return await reply(request, [ask], writer, body.stream)


@serves(router, ResponsesRequest, "/v1/responses/input_tokens")
async def count_input(request: Request, body: ResponsesRequest) -> Response:
    """Count the tokens of an input, as the model sees it."""
    ask = body.ask(body.translate(body.items(request.app.state.kept_responses)))
    return await count_prompt(request, body.model, ask, object="response.input_tokens")
