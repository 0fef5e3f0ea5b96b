"""Parts of answers that several APIs write: tools, pieces of text, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_llama.api.llm import LLM
from mlx_llama.api.tool_use import Toolbox
from mlx_llama.core.answers.completion import Token
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import read_tools

from .faults import Fault, Refusal
from .slots import Task

LEAST_LOGPROB = -9999.0  # OpenAI's number for minus infinity


def build_toolbox(described: Sequence[Mapping[str, Any]], choice: str, many: bool) -> Toolbox:
    """Check tools. many: allow several calls; a named tool is called once. Raises Refusal."""
    try:
        tools = tuple(read_tools(list(described)))
    except OptionsError as error:
        raise Refusal(400, "invalid_value", [Fault("tools", "tools", str(error))]) from None
    return Toolbox(tools, choice, many and choice not in [tool.name for tool in tools])


def text_of(piece: str | Thought) -> str:
    """Return the text of a piece of text or of a thought."""
    return piece.text if isinstance(piece, Thought) else piece


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
    """Write the most likely tokens of a position, with ids."""
    pieces = [(token, llm.tokenizer.piece(token), value) for token, value in logprobs.top]
    return [
        {"id": token, **write_rate(piece.data if piece else b"", value, are_probs)}
        for token, piece, value in pieces
    ]


def list_logprobs(task: Task, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Write OpenAI's entries of the text that `tokens` completed."""
    entries = list_entries(task, tokens)
    for entry in [] if task.are_probs else entries:
        for token in (entry, *entry["top_logprobs"]):
            del token["id"]
    return entries


def list_entries(task: Task, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the entries of `list_logprobs` with token ids."""
    are_probs, top = task.are_probs, "top_probs" if task.are_probs else "top_logprobs"
    return [
        {
            "id": entry.id,
            **write_rate(entry.data, entry.logprobs.logprob, are_probs),
            top: write_likeliest(task.llm, entry.logprobs, are_probs),
        }
        for token in tokens
        for entry in token.entries
        if entry.logprobs
    ]
