"""Conversations, adapted to templates that would refuse them or leave out a text.

What a template takes is found out by rendering probes: short conversations with known texts. A
message's place depends on messages before it only, so that prompts of later turns begin alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
FORGETS = "the chat template leaves out texts of earlier questions or answers"
GREETING = f"{_IN_TURN}an empty question precedes the first answer"


class PartsText(str):
    """The text of a content that came as a list of parts, which may have further fields."""

    parts: list[dict[str, Any]]

    def __new__(cls, parts: Sequence[Mapping[str, Any]]) -> PartsText:
        self = super().__new__(cls, "".join(part["text"] for part in parts))
        self.parts = [dict(part) for part in parts]
        return self


def split_parts(content: str) -> list[dict[str, Any]]:
    """The parts of a content, one for a text that came as such."""
    if isinstance(content, PartsText):
        return content.parts
    return [{"type": "text", "text": content}]


class Habits:
    """The messages that a template accepts. Each probe is rendered once, when it is needed."""

    def __init__(self, render: Callable[[list[dict[str, Any]]], str | None]):
        """render: the text of a conversation, None if the template refuses it."""
        self._render = render
        self._taken: dict[tuple[str, ...], bool] = {}
        self._takes_parts: dict[str, bool | None] = {}

    def refuses(self, taken: tuple[str, ...], refused: tuple[str, ...]) -> bool:
        """True if the template shows each text of a conversation with the roles `taken`, and not of
        one with the roles `refused`.
        """
        for roles in (refused, taken):
            if roles not in self._taken:
                self._taken[roles] = self._shows(roles)
        return self._taken[taken] and not self._taken[refused]

    def takes_parts(self, role: str) -> bool | None:
        """True if contents of a role must be lists of parts, False for texts. None if a probe shows
        neither, as for parts that need further fields.
        """
        role = role if role in _PROBES else "user"
        if role != "user" and not (as_users := self.takes_parts("user")):
            return as_users
        if role not in self._takes_parts:
            shown = (form for form in (False, True) if self._shows_as(role, form))
            self._takes_parts[role] = next(shown, None if role == "user" else True)
        return self._takes_parts[role]

    def _shows_as(self, role: str, takes_parts: bool) -> bool:
        shows = self._shows(_PROBES[role], {role: takes_parts})
        self._taken[_PROBES[role]] = shows
        return shows

    def find_fields(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """The variables of a template that reads them as fields of parts, as TranslateGemma's; else
        none. For one that shows no text without them.
        """
        if not variables or self.takes_parts("user") is not None:
            return {}
        return variables if self._shows(("user",), {"user": True}, variables) else {}

    def shape(
        self,
        messages: Sequence[Mapping[str, Any]],
        fields: Mapping[str, Any],
        known: Mapping[str, bool] | None = None,
    ) -> list[dict[str, Any]]:
        """Checked messages with contents of the kind that the template takes.

        fields: of `find_fields`. known: kinds by role that need no probe.
        """
        shaped = []
        for message in messages:
            role, content = message["role"], message["content"]
            takes_parts = known[role] if known and role in known else self.takes_parts(role)
            if takes_parts is None:
                takes_parts = isinstance(content, PartsText) or bool(fields)
            parts = [{**fields, **part} for part in split_parts(content)]
            shaped.append({**message, "content": parts if takes_parts else str(content)})
        return shaped

    def _shows(
        self,
        roles: Sequence[str],
        known: Mapping[str, bool] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> bool:
        messages: list[dict[str, Any]] = []
        for number, role in enumerate(roles):
            more: dict[str, Any] = {"content": f"probe-{number}-text"}
            if role == "call":
                role, more = "assistant", {"content": "", "tool_calls": [_CALL]}
            elif role == "tool":
                more |= {"tool_call_id": _CALL["id"], "name": "probe"}
            messages.append({"role": role, **more})
        text = self._render(self.shape(messages, fields or {}, known))
        return text is not None and all(message["content"] in text for message in messages)


# Roles of neighbours -> a conversation without them that templates in turn take, one that they
# refuse, the notice
_Roles = tuple[str, ...]
_BREAKS: dict[tuple[str, str], tuple[_Roles, _Roles, str]] = {
    ("system", "assistant"): (("user",), ("assistant", "user"), GREETING),
    ("user", "user"): (("user",), ("user", "user"), QUESTIONS),
    ("assistant", "assistant"): (
        ("user", "assistant", "user"),
        ("user", "assistant", "assistant", "user"),
        ANSWERS,
    ),
    ("tool", "user"): (("user", "call", "tool"), ("user", "call", "tool", "user"), AFTER_RESULT),
}


def adapt_messages(
    messages: Sequence[Mapping[str, Any]], habits: Habits
) -> tuple[list[dict[str, Any]], list[str]]:
    """Adapt checked messages where the template demands it. Returns them, and a notice of each kind
    of change.
    """
    adapted: list[dict[str, Any]] = []
    notices: dict[str, None] = {}  # each once
    leading = len(list(itertools.takewhile(lambda message: message["role"] == "system", messages)))
    is_moved = False  # the last message has only texts of system messages
    for number, message in enumerate(map(dict, messages)):
        last = adapted[-1] if adapted else {"role": "system"}
        was_moved, is_moved = is_moved, False
        fault = broken = ""  # notices of this message
        if message["role"] == "system":
            fault = _find_fault(number, leading, leading == len(messages), habits)
            if is_moved := fault not in ("", ONE_SYSTEM):
                message = {"role": "user", "content": message["content"]}
        are_questions = last["role"] == message["role"] == "user"
        joins = fault == ONE_SYSTEM or (are_questions and (is_moved or was_moved))
        if not joins:
            broken = _find_break(last, message, habits)
            joins = broken not in ("", GREETING)
        notices |= dict.fromkeys(filter(None, (fault, broken)))
        if joins:
            _join(last, message)
            is_moved = is_moved and was_moved
        else:
            question = {"role": "user", "content": ""}
            adapted += [question, message] if broken == GREETING else [message]
    questions = [message for message in adapted if message["role"] == "user"]
    if len(questions) > 1 and habits.refuses(("user",), ("user", "assistant", "user")):
        notices[FORGETS] = None
    return adapted, list(notices)


def _find_fault(number: int, leading: int, is_alone: bool, habits: Habits) -> str:
    """The notice of a system message that the template does not take in its place; "" if it does.

    number: of the message. leading: number of system messages that begin the conversation.
    is_alone: there are no other messages.
    """
    if number >= leading:  # some templates show the last system message only
        plain = ("user", "assistant", "user")
        late = ("system", "user", "assistant", "system", "user")
        return LATE_SYSTEM if habits.refuses(plain, late) else ""
    if is_alone and habits.refuses(("user",), ("system",)):
        return NO_QUESTION
    if habits.refuses(("user",), ("system", "user")):
        return NO_SYSTEM
    several = ("system", "system", "user")
    return ONE_SYSTEM if number and habits.refuses(several[1:], several) else ""


def _find_break(last: Mapping[str, Any], message: Mapping[str, Any], habits: Habits) -> str:
    """The notice of two neighbours whose roles the template does not take in this order; "" if it
    does.
    """
    taken, refused, notice = _BREAKS.get((last["role"], message["role"]), ((), (), ""))
    is_call = last.get("tool_calls")
    return notice if notice and not is_call and habits.refuses(taken, refused) else ""


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    """Add a message to the one before it."""
    if last["role"] == message["role"]:  # a name, calls
        last |= {name: value for name, value in message.items() if name not in last}
    last["content"] = "\n\n".join(filter(None, (last["content"], message["content"])))


def join_parts(content: Any) -> Any:
    """The text of a list of {"type": "text", "text": ...}; any other content as it is."""
    if not isinstance(content, (list, tuple)) or not content:
        return content
    are_texts = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    texts: list[Any] = [part.get("text") for part in content] if are_texts else [None]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content
