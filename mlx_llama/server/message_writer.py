"""Answers of Anthropic's Messages: blocks and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_llama.core.answers.completion import Completion, Token
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolCall, ToolDelta

from .faults import Refusal, write_anthropic
from .replies import Events, Writer, event
from .slots import Task
from .tooling import text_of


class MessagesWriter(Writer):
    """Writes messages: blocks of thoughts, text and calls."""

    prefix = "msg_"
    index: int | None = None  # the open block's; None before the first token
    kind = ""  # the open block's

    def encode(self, value: Any) -> bytes:
        return event(value, value["type"])

    def fail(self, refusal: Refusal) -> bytes:
        return event(write_anthropic(refusal), "error")

    def message(self, content: list[Any], ending: dict[str, Any], usage: Any) -> dict[str, Any]:
        """Write a message. ending: stop_reason and stop_sequence."""
        head = {"id": self.identity, "type": "message", "role": "assistant", "model": self.name}
        return {**head, "content": content, **ending, "usage": usage}

    def whole(self, tasks: Sequence[Task]) -> dict[str, Any]:
        task = tasks[0]
        task.answer.finish()
        content = (
            [write_block("thinking", task.completion.reasoning)]
            if task.completion.reasoning
            else []
        )
        if task.answer.text or not task.answer.calls:
            content.append(write_block("text", task.answer.text))
        content += [write_call(call.id, call.name, read_values(call)) for call in task.answer.calls]
        return self.message(content, write_ending(task), write_usage(task.completion))

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        if self.index is None:  # the first event counts the reused tokens, known only now
            self.index = -1
            usage = write_usage(task.completion) | {"output_tokens": 0}
            ending = {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": self.message([], ending, usage)}
            yield {"type": "ping"}
        for piece in pieces:
            if isinstance(piece, ToolDelta):
                if piece.name is not None:
                    yield from self.open(write_call(piece.id, piece.name, {}))
                if piece.arguments:
                    yield self.delta("input_json_delta", "partial_json", piece.arguments)
                continue
            kind = "thinking" if isinstance(piece, Thought) else "text"
            if kind != self.kind:
                yield from self.open(write_block(kind, ""))
            yield self.delta(f"{kind}_delta", kind, text_of(piece))

    def open(self, block: dict[str, Any]) -> Events:
        """Open a block, and close the one before."""
        if self.kind:
            yield {"type": "content_block_stop", "index": self.index}
        self.index, self.kind = (self.index or 0) + 1 if self.kind else 0, block["type"]
        yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def delta(self, kind: str, field: str, text: Any) -> dict[str, Any]:
        """Write a part of the open block."""
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def end(self, task: Task) -> Events:
        if not self.kind:  # an empty answer still has a block
            yield from self.open(write_block("text", ""))
        yield {"type": "content_block_stop", "index": self.index}
        usage = write_usage(task.completion)
        yield {"type": "message_delta", "delta": write_ending(task), "usage": usage}
        yield {"type": "message_stop"}


def write_block(kind: str, text: str) -> dict[str, Any]:
    """Write a block of text or of a thought."""
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def write_call(identity: str | None, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Write a block with a call."""
    return {"type": "tool_use", "id": identity, "name": name, "input": values}


def read_values(call: ToolCall) -> dict[str, Any]:
    """Parse the arguments of a call; {} if they are unfinished."""
    try:
        return call.values()
    except ValueError:
        return {}


_REASONS = {
    "eos": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
}


def write_ending(task: Task) -> dict[str, Any]:
    """Write the reason of an answer's end, and the stop string that matched."""
    reason = _REASONS.get(task.completion.finish_reason or "", "end_turn")
    if task.has_called and task.completion.finish_reason in ("eos", "stop"):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": task.stop_string}


def write_usage(completion: Completion) -> dict[str, int]:
    """Write Anthropic's usage, whose input_tokens exclude reused ones."""
    return {
        "input_tokens": completion.prompt_tokens - completion.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": completion.reused_tokens,
        "output_tokens": len(completion.tokens),
    }
