"""Answers with tools: the prompt, and the rounds of calls of Python functions."""

from __future__ import annotations

from bisect import bisect_left
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.answers.thinking import Thinking, set_switches
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.engine.request import Answer, Request, Sequence, Turn
from mlx_llama.core.errors import ContextError, OptionsError, show
from mlx_llama.core.options import GenerationOptions, Resolved
from mlx_llama.core.text.template import ChatTemplate, encode_messages
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import (
    ArgumentsError,
    Tool,
    ToolCall,
    ToolFormat,
    find_format,
    mentions_tools,
    write_answer,
)

ROUNDS = 8  # maximum number of answers to a question

Message = abc.Mapping[str, Any]


@dataclass(frozen=True)
class Toolbox:
    """Tools of a request."""

    tools: tuple[Tool, ...] = ()
    # or "none" (no tool is offered), "required" or a tool's name; a grammar enforces the last two
    choice: str = "auto"
    many: bool = True  # an enforced answer may have several calls

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Tools in the prompt."""
        return () if self.choice == "none" else self.tools

    @property
    def forced(self) -> tuple[Tool, ...]:
        """Tools of which the answer must call one; () if it need not."""
        if self.choice in ("none", "auto"):
            return ()
        return tuple(tool for tool in self.tools if self.choice in ("required", tool.name))

    def check(self, options: GenerationOptions) -> None:
        """Raise OptionsError for a choice that names no tool, and for options that forbid calls."""
        if self.choice not in ("none", "auto") and not self.forced:
            known = "auto, none, required and the tools' names"
            names = ", ".join(tool.name for tool in self.tools)
            problem = (
                f"is none of {known} ({names})" if names else "needs tools, and there are none"
            )
            raise OptionsError(f"tool_choice: {show(self.choice)} {problem}")
        for name in ("regex", "grammar") if self.offered else ():
            if getattr(options, name) is not None:
                raise OptionsError(
                    f"option `{name}`: forbids every call of a tool: leave it out, or choose "
                    "tool_choice 'none'"
                )

    def check_functions(self) -> None:
        """Raise OptionsError for a tool without a function, which a loop of calls cannot run."""
        if described := next((tool for tool in self.tools if tool.function is None), None):
            raise OptionsError(
                f"tools: {described.name} is only described: pass the function itself"
            )


@dataclass(frozen=True)
class ToolPrompt:
    """A prompt and the fields that its Request needs."""

    tokens: list[int]
    form: ToolFormat | None = None  # the format of calls; None if no tools are offered
    box: Toolbox = Toolbox()
    rule: Rule | None = None
    shown: frozenset[int] = frozenset()  # special tokens of the calls
    thinking: Thinking | None = None  # thoughts of the answer
    notices: tuple[str, ...] = ()  # about messages that were adapted to the template

    def request(self, resolved: Resolved, begun: abc.Sequence[int] = (), **more: Any) -> Request:
        """The request of an answer. begun: its first tokens. more: further fields of Request."""
        return Request(
            [*self.tokens, *begun],
            replace(resolved, notices=(*resolved.notices, *self.notices)),
            rule=self.rule,
            shown=self.shown,
            form=self.form,
            tools=self.box.offered,
            must_call=bool(self.box.forced),
            thinking=self.thinking,
            begun=len(begun),
            **more,
        )


class _Offer(NamedTuple):
    """The template, messages and tool format of a prompt."""

    template: ChatTemplate
    messages: abc.Sequence[Message]
    variables: abc.Mapping[str, Any]  # for the template
    form: ToolFormat | None  # the format of calls; None without any
    notices: tuple[str, ...]  # about messages that were adapted to the template


@dataclass(frozen=True)
class Conversation:
    """Messages, which may contain tool calls and results, with all that renders their prompt.

    options: their schema is that of an answer without calls, where tools are offered; without tools
    the options enforce it. Their thoughts are switched in the template.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    messages: abc.Sequence[Message]
    box: Toolbox
    options: GenerationOptions
    variables: abc.Mapping[str, Any] = field(default_factory=dict)  # for the template, beside tools

    def encode(self, check_count: abc.Callable[[int], None] | None = None) -> ToolPrompt:
        """Encode the prompt. check_count: as for `encode_messages`, whose errors it raises."""
        tokenizer, box, options = self.tokenizer, self.box, self.options
        template, messages, variables, form, notices = self._offer()
        written = form.written_marks() if form else ()
        more: Any = {"check_count": check_count, "written": written, **variables}
        tokens = encode_messages(tokenizer, template, messages, **more)
        has_rule = bool(box.forced) or Rule.of(options) is not None
        tokens, thinking = Thinking.begin(tokenizer, template.source, tokens, options, has_rule)
        if form is None or not box.offered:
            return ToolPrompt(tokens, thinking=thinking, notices=notices)
        rule, many = None, box.many and not form.calls_once
        if box.forced or options.schema:
            schema = None if box.forced else options.schema
            answer = None if schema is None else schema.as_dict()
            text = form.grammar(box.forced or box.offered, tokenizer, many=many, answer=answer)
            rule = Rule("tools", text, is_lenient=schema is None or schema.is_lenient)
        shown = form.shown_specials(tokenizer)
        return ToolPrompt(
            tokens,
            form=form,
            box=box,
            rule=rule,
            shown=shown,
            thinking=thinking,
            notices=notices,
        )

    def render(self, adds_prompt: bool = True) -> str:
        """The text that `encode` encodes. adds_prompt: with the beginning of the answer."""
        template, messages, variables, *_ = self._offer()
        text = template.render(messages, adds_prompt, **variables)
        template.check_shown(messages, text)
        if adds_prompt:  # the end of a thought that is not wanted
            tokens = self.tokenizer.encode(text, parse_special=True)
            source = template.source
            closed, _ = Thinking.begin(self.tokenizer, source, tokens, self.options, False)
            text += self.tokenizer.decode(closed[len(tokens) :], skip_special=False)
        return text

    def _offer(self) -> _Offer:
        """Choose the template; adapt the messages to it, and write the tools into them and the
        variables, in its format.
        """
        template = self.template.choose(bool(self.box.offered))
        variables = set_switches(template.source, self.options, self.variables)
        messages, notices = template.adapt(self.messages)
        if not self.box.offered and not mentions_tools(messages):
            return _Offer(template, messages, variables, None, tuple(notices))
        form = find_format(template.source, self.tokenizer)
        offered, extras = form.offer(messages, self.box.offered)
        # The format may have added questions and a system message.
        adapted, _ = template.adapt(offered)
        return _Offer(template, adapted, {**variables, **extras}, form, tuple(notices))


def check_rounds(rounds: int) -> None:
    """Raises OptionsError."""
    if not isinstance(rounds, int) or rounds < 1:
        raise OptionsError(f"rounds: {show(rounds)} is not a number of answers: use 1 or more")


class Rounds(Turn):
    """Calls of Python functions between the answers to a question.

    A failed call returns its error to the model, which may try again.
    """

    def __init__(self, messages: abc.Sequence[Message], toolbox: Toolbox, rounds: int = ROUNDS):
        """messages: up to the question. rounds: maximum number of answers."""
        check_rounds(rounds)
        self.toolbox, self.makes_calls = toolbox, bool(toolbox.offered)
        self._asked, self._rounds = list(map(dict, messages)), rounds
        # complete messages and the answer after them, assigned together for other threads
        self._talk: tuple[list[dict[str, Any]], Sequence | None] = self._asked, None

    def ask(self, messages: abc.Sequence[Message], box: Toolbox) -> Sequence:
        """Prepare an answer."""
        raise NotImplementedError

    def begin(self) -> Sequence:
        """Prepare the first answer."""
        first = self.ask(self._asked, self.toolbox)
        self._talk = self._asked, first
        return first

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, up to the answer's text, or calls at the last round."""
        messages, last = self._talk
        if last is None:
            return list(messages)
        return [*messages, write_answer(last.text, last.writer.completion.reasoning)]

    def go_on(self, answer: Answer) -> Sequence | None:
        messages, calls, notices = self._talk[0], answer.calls, answer.completion.notices
        if not calls:
            return None
        if not calls[-1].is_complete:
            notices.append(
                f"the call of {calls[-1].name} is incomplete and was not made: raise "
                "`max_tokens` if it was cut"
            )
            return None
        results: list[dict[str, Any]] = []
        for call in calls:
            results.append(self._run(call))
            if answer.is_closed:
                return None
        messages = [*messages, *answer.messages(), *results]
        self._talk = messages, None
        self._rounds -= 1
        if not self._rounds:
            notices.append(
                "the model still calls tools and the loop of calls has ended: raise rounds for "
                "more answers"
            )
            return None
        following = self.ask(messages, replace(self.toolbox, choice="auto"))
        again = following.writer.completion.notices
        again[:0] = [notice for notice in notices if notice not in again]
        self._talk = messages, following
        return following

    def _run(self, call: ToolCall) -> dict[str, Any]:
        """The message with the result of a call."""
        tools = {tool.name: tool for tool in reversed(self.toolbox.offered)}
        try:
            if call.name not in tools:
                names = ", ".join(tool.name for tool in self.toolbox.offered)
                raise ArgumentsError(f"there is no tool {call.name}, there are {names}")
            result = tools[call.name].run(call.arguments)
        except ArgumentsError as error:
            result = f"error: {error}"
        except Exception as error:
            result = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name}


# Turns of a conversation: the oldest ones are dropped until the prompt fits the context, then the
# oldest rounds of calls in the last one.

# Tokens of a long paragraph. Small contexts keep that much free for an answer, at most half.
_ANSWER_ROOM = 256
_Message = TypeVar("_Message", bound=abc.Mapping[str, Any])


def find_turns(messages: abc.Sequence[abc.Mapping[str, Any]]) -> list[int]:
    """Indices of the questions: each begins a turn of calls, results and an answer."""
    return [place for place, message in enumerate(messages) if message.get("role") == "user"]


def keep_from(messages: abc.Sequence[_Message], start: int) -> list[_Message]:
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
