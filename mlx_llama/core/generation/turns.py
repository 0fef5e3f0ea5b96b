"""Turns of a conversation: drop the oldest ones until the prompt fits the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.errors import ContextError

from .tool_use import Conversation, ToolPrompt

# Tokens of a long paragraph. Small contexts keep that much free for an answer, at most half.
_ANSWER_ROOM = 256


def find_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the questions: each begins a turn of calls, results and an answer."""
    return [place for place, message in enumerate(messages) if message.get("role") == "user"]


def fit_turns(
    talk: Conversation, engine: RequestBuilder, first: int = 0, begun: int = 0
) -> tuple[ToolPrompt, int]:
    """Drop the oldest turns, but no leading system message, until the prompt leaves room for an
    answer. Returns the prompt, which may be too long with the newest question alone, and the number
    of dropped messages. Raises as `Conversation.encode`.

    first: number of messages dropped already. begun: tokens of the answer after the prompt.
    """
    context, max_tokens = engine.context, talk.options.max_tokens
    # Keep a quarter of the context free for the answer (up to half of a short context), or
    # max_tokens if that is less.
    room = context - max(1, min(max_tokens, max(context // 4, min(context // 2, _ANSWER_ROOM))))
    lead = int(talk.messages[0].get("role") == "system")
    system, messages = talk.messages[:lead], talk.messages[lead:]
    turns = find_turns(messages) or [0]
    first = first if first <= turns[-1] else 0
    prompts: dict[int, ToolPrompt] = {}

    def fits(dropped: int, limit: int) -> bool:
        try:
            kept = replace(talk, messages=[*system, *messages[dropped:]])
            prompts[dropped] = kept.encode(engine.check_count)
        except ContextError:
            if dropped >= turns[-1]:
                raise
            return False
        return len(prompts[dropped].tokens) + begun <= limit

    # An answer that goes on may fill the context.
    later = [start for start in turns if start > first]
    if fits(first, context - 1 if begun else room) or not later:
        return prompts[first], first
    # Drop to three quarters at once, but not the turn that this one follows: after each drop, all
    # remaining turns are prefilled again. Bisect: a client may send thousands of turns.
    place = bisect_left(later, True, key=lambda start: fits(start, room * 3 // 4))
    if place > len(later) - 2 >= 0 and fits(later[-2], room):
        place = len(later) - 2
    dropped = later[min(place, len(later) - 1)]
    return prompts[dropped], dropped
