"""Conversations, adapted to templates that would refuse them or leave out a text.

What a template takes is found out by rendering probes: short conversations with known texts. A
message's place depends on messages before it only, so that prompts of later turns begin alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_llama.core.errors import TemplateError

# A conversation that shows how a template takes the contents of a role. "call" stands for an
# assistant's message with a call.
_PROBES = {
    "user": ("user",),
    "system": ("system", "user"),
    "assistant": ("user", "assistant", "user"),
    "tool": ("user", "call", "tool"),
}
_CALL = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {}}}

_IN_TURN = "the chat template takes questions and answers in turn: "
NO_SYSTEM = "the chat template has no system role: the system message precedes the first question"
ONE_SYSTEM = "the chat template takes one system message: those at the beginning were joined"
LATE_SYSTEM = "the chat template takes no later system message: it became part of a question"
NO_QUESTION = "the chat template needs a question: the system message became one"
QUESTIONS = f"{_IN_TURN}consecutive questions were joined"
ANSWERS = f"{_IN_TURN}consecutive answers were joined"
AFTER_RESULT = f"{_IN_TURN}a question after a tool's result was added to the result"
GREETING = f"{_IN_TURN}an empty question precedes the first answer"


class PartsText(str):
    """The text of a content that came as a list of parts, which may have further fields."""

    parts: list[dict[str, Any]]

    def __new__(cls, parts: Sequence[Mapping[str, Any]]) -> PartsText:
        self = super().__new__(cls, "".join(part["text"] for part in parts))
        self.parts = [dict(part) for part in parts]
        return self


class Habits:
    """What a template takes. Each probe is rendered once, when its answer is needed."""

    def __init__(self, render: Callable[[list[dict[str, Any]]], str]):
        """render: messages as the template takes them; raises TemplateError."""
        self._render = render
        self._taken: dict[tuple[str, ...], bool] = {}
        self._takes_parts: dict[str, bool | None] = {}

    def takes(self, *roles: str) -> bool:
        """True if the template shows each text of a conversation with these roles."""
        if roles not in self._taken:
            self._taken[roles] = self._shows(roles)
        return self._taken[roles]

    def takes_parts(self, role: str) -> bool | None:
        """True if contents of a role must be lists of parts, False for texts. None if a probe shows
        neither, as for parts that need further fields.
        """
        role = role if role in _PROBES else "user"
        if role not in self._takes_parts:
            forms = [False, True]
            if role != "user":  # as the user's, if possible
                as_users = self.takes_parts("user")
                forms = [True, False] if as_users else []
            shown = (form for form in forms if self._shows(_PROBES[role], {role: form}))
            self._takes_parts[role] = next(shown, None if role == "user" else as_users)
        return self._takes_parts[role]

    def shape(
        self, messages: Sequence[Mapping[str, Any]], known: Mapping[str, bool] | None = None
    ) -> list[dict[str, Any]]:
        """Checked messages with contents of the kind that the template takes. known: kinds by role
        that need no probe.
        """
        shaped = []
        for message in messages:
            role, content = message["role"], message["content"]
            parts = getattr(content, "parts", [{"type": "text", "text": content}])
            takes_parts = known[role] if known and role in known else self.takes_parts(role)
            if takes_parts is None:
                takes_parts = isinstance(content, PartsText)
            shaped.append({**message, "content": parts if takes_parts else str(content)})
        return shaped

    def _shows(self, roles: Sequence[str], known: Mapping[str, bool] | None = None) -> bool:
        messages: list[dict[str, Any]] = []
        for number, role in enumerate(roles):
            more: dict[str, Any] = {"content": f"probe-{number}-text"}
            if role == "call":
                role, more = "assistant", {"content": "", "tool_calls": [_CALL]}
            elif role == "tool":
                more |= {"tool_call_id": _CALL["id"], "name": "probe"}
            messages.append({"role": role, **more})
        try:
            text = self._render(self.shape(messages, known))
        except TemplateError:
            return False
        return all(message["content"] in text for message in messages)


# Neighbours that templates in turn refuse: such a conversation, one that they take, the notice
_BREAKS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...], str]] = {
    ("user", "user"): (("user", "user"), ("user",), QUESTIONS),
    ("assistant", "assistant"): (
        ("user", "assistant", "assistant", "user"),
        ("user", "assistant", "user"),
        ANSWERS,
    ),
    ("tool", "user"): (("user", "call", "tool", "user"), ("user", "call", "tool"), AFTER_RESULT),
    ("system", "assistant"): (("assistant", "user"), ("user",), GREETING),
}


def adapt_messages(
    messages: Sequence[Mapping[str, Any]], habits: Habits
) -> tuple[list[dict[str, Any]], list[str]]:
    """Adapt checked messages where the template demands it. Returns them, and a notice of each kind
    of change.
    """
    adapted: list[dict[str, Any]] = []
    notices: dict[str, None] = {}
    leading = len(list(itertools.takewhile(lambda message: message["role"] == "system", messages)))
    is_moved = False  # the last message has only texts of system messages
    for number, message in enumerate(map(dict, messages)):
        last = adapted[-1] if adapted else {"role": "system", "content": ""}
        was_moved, is_moved = is_moved, False
        notice = ""
        if message["role"] == "system":
            alone = leading == len(messages)
            notice = _find_fault(number, leading, alone, habits)
            is_moved = notice in (NO_SYSTEM, LATE_SYSTEM, NO_QUESTION)
        if is_moved:
            message = {"role": "user", "content": message["content"]}
        roles = last["role"], message["role"]
        is_joined = notice == ONE_SYSTEM or (roles == ("user", "user") and (is_moved or was_moved))
        if not is_joined and roles in _BREAKS and not last.get("tool_calls"):
            refused, taken, break_notice = _BREAKS[roles]
            if habits.takes(*taken) and not habits.takes(*refused):
                notices[break_notice] = None
                is_joined = break_notice != GREETING
                if break_notice == GREETING:
                    adapted.append({"role": "user", "content": ""})
        if notice:
            notices[notice] = None
        if is_joined:
            _join(last, message)
            is_moved = is_moved and was_moved
        else:
            adapted.append(message)
    return adapted, list(notices)


def _find_fault(number: int, leading: int, is_alone: bool, habits: Habits) -> str:
    """The notice of a system message that the template does not take in its place; "" if it does.

    number: of the message. leading: number of system messages that begin the conversation.
    is_alone: there are no other messages.
    """
    takes, plain = habits.takes, ("user", "assistant", "user")
    if number >= leading:  # some templates show the last system message only
        is_taken = takes("system", *plain[:2], "system", "user")
        return LATE_SYSTEM if takes(*plain) and not is_taken else ""
    if is_alone and takes("user") and not takes("system"):
        return NO_QUESTION
    if not takes("system", "user"):
        return NO_SYSTEM if takes("user") else ""
    return ONE_SYSTEM if number and not takes("system", "system", "user") else ""


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Add a message to the one before it."""
    if last["role"] == message["role"]:  # a name, calls
        last |= {name: value for name, value in message.items() if name not in last}
    last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))
