"""Turns of a conversation: drop the oldest ones until the prompt fits the context, then the
oldest rounds of calls in the last one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.errors import ContextError

from .tool_use import Conversation, ToolPrompt

# Tokens of a long paragraph. Small contexts keep that much free for an answer, at most half.
_ANSWER_ROOM = 256
_Message = TypeVar("_Message", bound=Mapping[str, Any])


def find_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the questions: each begins a turn of calls, results and an answer."""
    return [place for place, message in enumerate(messages) if message.get("role") == "user"]


def keep_from(messages: Sequence[_Message], start: int) -> list[_Message]:
    """The messages from a place on; a place within a turn keeps the turn's question, too."""
    asked = find_turns(messages[:start])[-1:]
    if asked and messages[start].get("role") == "user":
        asked = []
    return [*(messages[place] for place in asked), *messages[start:]]


class Fit(NamedTuple):
    """A prompt that lost the oldest messages of its conversation."""

    prompt: ToolPrompt  # may be too long with the newest question and round alone
    first: int  # see `keep_from`; no leading system message counts
    dropped: int  # number of messages


def fit_turns(talk: Conversation, engine: RequestBuilder, first: int = 0, begun: int = 0) -> Fit:
    """Drop the oldest turns, but no leading system message, until the prompt leaves room for an
    answer. If the last turn alone leaves none, drop its oldest rounds too: the calls of an answer
    with their results. Raises as `Conversation.encode`.

    first: of an earlier prompt. begun: tokens of the answer after the prompt.
    """
    context, max_tokens = engine.context, talk.options.max_tokens
    # Keep a quarter of the context free for the answer (up to half of a short context), or
    # max_tokens if that is less.
    room = context - max(1, min(max_tokens, max(context // 4, min(context // 2, _ANSWER_ROOM))))
    limit = context - 1 if begun else room  # an answer that goes on may fill the context
    lead = int(talk.messages[0].get("role") == "system")
    system, messages = talk.messages[:lead], talk.messages[lead:]
    turns = find_turns(messages) or [0]
    rounds = [
        place
        for place in range(turns[-1] + 2, len(messages))
        if messages[place].get("role") == "assistant"
    ]
    starts = [*turns, *rounds]
    first = first if first <= turns[-1] or first in rounds else 0
    prompts: dict[int, ToolPrompt] = {}

    def fits(start: int, limit: int) -> bool:
        try:
            if start not in prompts:
                kept = replace(talk, messages=[*system, *keep_from(messages, start)])
                prompts[start] = kept.encode(engine.check_count)
        except ContextError:
            if start >= starts[-1]:
                raise
            return False
        return len(prompts[start].tokens) + begun <= limit

    for places in (turns, rounds):
        later = [start for start in places if start > first]
        if not later or fits(first, limit):
            continue
        # Drop to three quarters at once, but not the turn that this one follows: after each drop,
        # all remaining turns are prefilled again. Bisect: a client may send thousands of turns.
        place = bisect_left(later, True, key=lambda start: fits(start, room * 3 // 4))
        if place > len(later) - 2 >= 0 and fits(later[-2], room):
            place = len(later) - 2
        first = later[min(place, len(later) - 1)]
    fits(first, limit)
    return Fit(prompts[first], first, len(messages) - len(keep_from(messages, first)))
