"""Answers with tools: the request that offers them, the stream that tells calls from text, the loop that runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.models.config import show
from mlx_llama.core.text.template import ChatTemplate, encode_messages
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import (
    LLAMA3,
    Tool,
    ToolCall,
    ToolDelta,
    ToolParser,
    add_tools,
    call_grammar,
    find_format,
    shown_specials,
)

from .completion import Completion
from .grammar import Rule
from .options import Resolved
from .request import Handle, Request

ROUNDS = 8  # answers with calls, before the loop ends

Message = Mapping[str, Any]


def make_request(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool],
                 tool_choice: str, resolved: Resolved, *, many: bool = True,
                 compile_seconds: float | None = None) -> tuple[Request, ToolParser]:
    """A request for an answer to `messages` that may call tools, and the parser of its text.

    tool_choice: "auto", "none" (no tool is offered), "required" or a tool's name; the last two are enforced by a grammar.
    many: several calls in one answer are allowed.

    Raises OptionsError for a choice that is not possible, and TemplateError and TokenizerError as `encode_messages`.
    """
    offered = [] if tool_choice == "none" else list(tools)
    form = find_format(template.source, tokenizer) if offered else None
    chosen = _choose(offered, tool_choice)
    given = next((name for name in ("schema", "regex", "grammar") if getattr(resolved.options, name) is not None), None)
    if offered and given:
        raise OptionsError(f"option {given}: forbids every call of a tool: leave it out, or choose tool_choice 'none'")
    if form is None:
        prompt: Sequence[Message] = messages
        extras: dict[str, Any] = {}
    else:
        prompt, extras = add_tools(form, messages, offered)
    ids = encode_messages(tokenizer, template, prompt, **extras)
    several = many and form is not LLAMA3  # whose templates print one call a message
    rule = Rule("tools", call_grammar(form, chosen, tokenizer, many=several)) if form and chosen else None
    shown = shown_specials(form, tokenizer) if form else frozenset()
    request = Request(ids, resolved, rule=rule, shown=shown, compile_seconds=compile_seconds)
    return request, ToolParser(form, [tool.name for tool in offered])


def _choose(tools: Sequence[Tool], tool_choice: str) -> list[Tool]:
    """The tools of which one must be called."""
    if tool_choice in ("auto", "none"):
        return []
    chosen = [tool for tool in tools if tool_choice in ("required", tool.name)]
    if not chosen:
        names = ", ".join(tool.name for tool in tools) or "no tools"
        raise OptionsError(f"tool_choice: {show(tool_choice)} is none of auto, none, required and the tools' names "
                           f"({names})")
    return chosen


class ToolStream:
    """An answer as it comes: text, and news of calls. Final after the last one: `completion`, `text`, `calls`."""

    def __init__(self, handle: Handle, parser: ToolParser):
        self.handle, self.parser = handle, parser
        self.completion = handle.completion
        self._waiting: list[str | ToolDelta] = []
        self._has_ended = False

    def __iter__(self) -> ToolStream:
        return self

    def __next__(self) -> str | ToolDelta:
        while not self._waiting:
            if self._has_ended:
                raise StopIteration
            piece = next(self.handle, None)
            self._has_ended = piece is None
            self._waiting = self.parser.finish() if piece is None else self.parser.push(piece)
        return self._waiting.pop(0)

    def finish(self) -> Completion:
        """Generate to the end and return the completion, whose text still contains the calls."""
        for _ in self:
            pass
        return self.completion

    def close(self) -> None:
        """End the answer."""
        self.handle.cancel()

    @property
    def text(self) -> str:
        """The answer's text without calls."""
        return self.parser.text

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the last may be unfinished."""
        return self.parser.calls

    def messages(self) -> list[dict[str, Any]]:
        """The answer as messages: one, but for formats that take one call a message."""
        calls = [call.as_dict() for call in self.calls if call.is_complete]
        groups = [[call] for call in calls] if self.parser.form is LLAMA3 else [calls]
        found = [{"role": "assistant", "content": "", "tool_calls": group} for group in groups if group]
        if self.text or not found:
            found[:1] = [{**(found[0] if found else {"role": "assistant"}), "content": self.text}]
        return found


def run_tools(ask: Callable[[list[Message], bool], ToolStream], messages: Sequence[Message], tools: Sequence[Tool],
              rounds: int = ROUNDS) -> tuple[Completion, list[Message]]:
    """Answer, run the calls, and go on until an answer has none.

    ask: begins the answer to a conversation; True for the first. Returns the last completion and the whole conversation,
    calls and results included. A call that fails has its error for a result, so that the model may mend it.
    """
    conversation = list(messages)
    for number in range(rounds):
        stream = ask(conversation, number == 0)
        completion = stream.finish()
        for message in stream.messages():
            conversation.append(message)
            conversation += [_run(call, tools) for call in message.get("tool_calls", ())]
        if not stream.calls or not stream.calls[-1].is_complete:
            return completion, conversation
    completion.notices.append(f"the loop of tool calls ended after {rounds} answers: raise rounds for more")
    return completion, conversation


def _run(call: Mapping[str, Any], tools: Sequence[Tool]) -> dict[str, Any]:
    """The message with the result of a call."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        result = f"error: there is no tool {name}, there are {', '.join(tool.name for tool in tools)}"
    else:
        try:
            result = tool.run(arguments)
        except OptionsError:
            raise
        except Exception as error:
            result = f"error: {type(error).__name__}: {error}"
    return {"role": "tool", "content": result, "tool_call_id": call["id"], "name": name}
