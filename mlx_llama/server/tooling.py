"""Answers as they are read: toolboxes, text split into thoughts and calls, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlx_llama.api.llm import LLM
from mlx_llama.api.tool_use import Toolbox
from mlx_llama.core.answers.completion import Completion, Token
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.text.thoughts import Thought, find_thoughts
from mlx_llama.core.text.tools import ToolCall, ToolDelta, ToolParser, find_format, read_tools

from .admission import Answers, choose_template
from .faults import Fault, Refusal

LEAST_LOGPROB = -9999.0  # OpenAI's number for minus infinity


def build_toolbox(described: Sequence[Mapping[str, Any]], choice: str, many: bool) -> Toolbox:
    """Check tools. many: allow several calls; a named tool is called once. Raises Refusal."""
    try:
        tools = tuple(read_tools(list(described)))
    except OptionsError as error:
        raise Refusal(400, "invalid_value", [Fault("tools", "tools", str(error))]) from None
    return Toolbox(tools, choice, many and choice not in [tool.name for tool in tools])


Piece = str | Thought | ToolDelta


def text_of(piece: str | Thought) -> str:
    """Return the text of a piece of text or of a thought."""
    return piece.text if isinstance(piece, Thought) else piece


class Reader:
    """Splits the streamed text of an answer into thoughts, text and calls.

    An answer that must be a call has no text: the start of an unfinished call is dropped.
    """

    def __init__(self, answers: Answers, index: int, splits: bool = True):
        """splits: False for an answer that is all text."""
        self.answers, self.index, self.llm = answers, index, answers.llm
        self.ask, self.task = answers.asks[index], answers.tasks[index]
        self.prompt: Sequence[int] = self.task.request.prompt
        toolbox = self.toolbox = self.ask.toolbox
        self.completion: Completion = self.task.handle.completion
        self.text = self.thought = ""  # so far
        self.count = 0  # tokens so far
        self.processed = -1  # tokens of the prompt that were reported
        self.parser: ToolParser | None = None
        source = choose_template(self.llm, self.ask).source
        self.may_think = bool(find_thoughts(source))  # the answer may begin with a thought
        self._is_forced = bool(toolbox.forced)
        if splits and toolbox.offered:
            form = find_format(source, self.llm.tokenizer)
            self.parser = ToolParser(form, toolbox.offered)

    @property
    def calls(self) -> list[ToolCall]:
        """Calls so far."""
        return self.parser.calls if self.parser else []

    @property
    def are_probs(self) -> bool:
        """True if probabilities after the samplers are reported instead of log-probabilities."""
        return self.completion.options.get("post_sampling_probs", False)

    @property
    def is_cut(self) -> bool:
        """True if a limit ended the answer."""
        return self.completion.finish_reason in ("length", "context")

    @property
    def has_called(self) -> bool:
        """True if there are calls, none of them cut by a stop string or a limit."""
        calls = self.calls
        return bool(calls) and all(call.is_complete for call in calls)

    @property
    def stop_string(self) -> str | None:
        """The stop string that matched, or None."""
        return self.completion.stop if isinstance(self.completion.stop, str) else None

    def steps(
        self, tokens: Sequence[Token], is_last: bool
    ) -> Iterator[tuple[Token | None, list[Piece]]]:
        """Push tokens; yield each with its pieces, and None with those of the end."""
        for token in tokens:
            self.count += 1
            yield token, self.push(token.text, token.thought)
        if is_last:
            yield None, self.push("", is_last=True)

    def finish(self) -> Reader:
        """Push all tokens of a completed answer."""
        for _ in self.steps(self.completion.tokens, is_last=True):
            pass
        return self

    def push(self, text: str, thought: str = "", is_last: bool = False) -> list[Piece]:
        """Read a token's text; return new thoughts, text and parts of calls, none empty."""
        pieces: list[Piece] = [Thought(thought)] if thought else []
        if self.parser is None:
            pieces += [text] if text else []
        else:
            news = self.parser.push(text) + (self.parser.finish() if is_last else [])
            pieces += [piece for piece in news if not (self._is_forced and isinstance(piece, str))]
        self.text += "".join(piece for piece in pieces if isinstance(piece, str))
        self.thought += "".join(piece.text for piece in pieces if isinstance(piece, Thought))
        return pieces


# Log-probabilities; or probabilities after the samplers, by llama-server's names


def write_rate(data: bytes, logprob: float, are_probs: bool) -> dict[str, Any]:
    """Write the text of a token and its log-probability, or its probability."""
    name, value = "logprob", max(logprob, LEAST_LOGPROB)
    if are_probs:
        name, value = "prob", math.exp(logprob)
    return {"token": data.decode("utf-8", "replace"), name: value, "bytes": list(data)}


def write_likeliest(
    llm: LLM, logprobs: TokenLogprobs, are_probs: bool = False
) -> list[dict[str, Any]]:
    """Write the likeliest tokens of a position, with ids."""
    pieces = [(token, llm.tokenizer.piece(token), value) for token, value in logprobs.top]
    return [
        {"id": token, **write_rate(piece.data if piece else b"", value, are_probs)}
        for token, piece, value in pieces
    ]


def list_logprobs(reader: Reader, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Write OpenAI's entries of the text that `tokens` completed."""
    entries = list_entries(reader, tokens)
    for entry in [] if reader.are_probs else entries:
        for token in (entry, *entry["top_logprobs"]):
            del token["id"]
    return entries


def list_entries(reader: Reader, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the entries of `list_logprobs` with token ids."""
    are_probs, top = reader.are_probs, "top_probs" if reader.are_probs else "top_logprobs"
    return [
        {
            "id": entry.id,
            **write_rate(entry.data, entry.logprobs.logprob, are_probs),
            top: write_likeliest(reader.llm, entry.logprobs, are_probs),
        }
        for token in tokens
        for entry in token.entries
        if entry.logprobs
    ]
