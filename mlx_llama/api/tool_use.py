"""Answers with tools: the prompt, the stream that splits off calls, the loop that runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mlx_llama.core.answers.completion import Completion
from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.answers.schema import Schema
from mlx_llama.core.answers.thinking import Thinking, set_switches
from mlx_llama.core.engine.request import TWO_READERS, Handle, Request
from mlx_llama.core.errors import OptionsError, SessionError, show
from mlx_llama.core.options import GenerationOptions, Resolved
from mlx_llama.core.text.template import ChatTemplate, encode_messages
from mlx_llama.core.text.thoughts import Pieces, TextPieces, Thought
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import (
    ArgumentsError,
    Tool,
    ToolCall,
    ToolDelta,
    ToolFormat,
    ToolParser,
    find_format,
    mentions_tools,
)

ROUNDS = 8  # maximum number of answers to a question

Message = Mapping[str, Any]


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
    form: ToolFormat | None = None  # of the calls in the answer; None if no tools are offered
    rule: Rule | None = None
    shown: frozenset[int] = frozenset()  # special tokens of the calls
    thinking: Thinking | None = None  # thoughts of the answer
    notices: tuple[str, ...] = ()  # about messages that were adapted to the template

    def request(self, resolved: Resolved, begun: Sequence[int] = (), **more: Any) -> Request:
        """The request of an answer. begun: its first tokens. more: further fields of Request."""
        fields: Any = {"rule": self.rule, "shown": self.shown, "thinking": self.thinking}
        fields |= {"begun": len(begun), "may_call": self.form is not None}
        resolved = replace(resolved, notices=(*resolved.notices, *self.notices))
        return Request([*self.tokens, *begun], resolved, **fields, **more)


class _Offer(NamedTuple):
    """The template, messages and tool format of a prompt."""

    template: ChatTemplate
    messages: Sequence[Message]
    variables: Mapping[str, Any]  # of the template
    form: ToolFormat | None  # of the calls; None for a conversation without tools
    notices: tuple[str, ...]  # about messages that were adapted to the template


@dataclass(frozen=True)
class Conversation:
    """Messages, which may contain tool calls and results, with all that renders their prompt.

    options: their schema is that of an answer without calls, where tools are offered; without tools
    the options enforce it. Their thoughts are switched in the template.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    messages: Sequence[Message]
    box: Toolbox
    options: GenerationOptions
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template, beside tools

    def encode(self, check_count: Callable[[int], None] | None = None) -> ToolPrompt:
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
        return ToolPrompt(tokens, form, rule, form.shown_specials(tokenizer), thinking, notices)

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


def write_answer(text: str, completion: Completion) -> dict[str, Any]:
    """An answer as a message. Its template decides whether later prompts contain the thought."""
    thought = {"reasoning_content": completion.reasoning} if completion.reasoning else {}
    return {"role": "assistant", "content": text, **thought}


class ToolStream(Pieces[str | ToolDelta]):
    """A streamed answer: pieces of text and of calls. `completion`, `text` and `calls` are final at
    the end. `read` returns the thoughts, too.
    """

    def __init__(self, handle: Handle, parser: ToolParser, schema: Schema | None = None):
        """schema: of an answer without calls."""
        self.handle, self.parser, self._schema = handle, parser, schema
        self.completion = handle.completion
        if parser.form and parser.form.notice:
            self.completion.notices.append(parser.form.notice)
        self._waiting: list[str | ToolDelta] = []
        self._has_ended = False

    def read(self) -> str | ToolDelta | Thought | None:
        while not self._waiting:
            if self._has_ended:
                return None
            piece = self.handle.read()
            if isinstance(piece, Thought):
                return piece
            self._has_ended = piece is None
            self._waiting = self.parser.finish() if piece is None else self.parser.push(piece)
            if self._has_ended and not self.calls:
                self.completion.schema = self._schema
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
        """The answer as messages. Arguments that are no JSON object become {}."""
        calls = []
        for call in self.calls:
            try:
                call.values()
                calls.append(call.as_dict())
            except ValueError:
                calls.append(replace(call, arguments="{}").as_dict())
        answer = write_answer(self.text, self.completion)
        return [{**answer, "tool_calls": calls} if calls else answer]


def check_rounds(rounds: int) -> None:
    """Raises OptionsError."""
    if not isinstance(rounds, int) or rounds < 1:
        raise OptionsError(f"rounds: {show(rounds)} is not a number of answers: use 1 or more")


class ToolLoop(TextPieces):
    """The answer to a conversation, with calls of Python functions in between: an iterator of the
    pieces of all texts.

    A failed call returns its error to the model, which may try again. One thread reads at
    a time; any thread may cancel, which does not stop a function that runs.
    """

    def __init__(
        self,
        ask: Callable[[Sequence[Message], bool], ToolStream],
        messages: Sequence[Message],
        tools: Sequence[Tool],
        rounds: int = ROUNDS,
    ):
        """ask(messages, is_first): prepares an answer. rounds: maximum number of answers."""
        check_rounds(rounds)
        self._ask, self._tools, self._rounds = ask, tools, rounds
        first = ask(list(messages), True)
        # complete messages and the answer after them, assigned together for other threads
        self._talk: tuple[list[dict[str, Any]], ToolStream | None]
        self._talk = list(map(dict, messages)), first
        self._newest = first
        self._reading = threading.Lock()
        self._is_cancelled = self.done = False

    @property
    def completion(self) -> Completion:
        """The completion of the newest answer."""
        return self._newest.completion

    @property
    def text(self) -> str:
        """The newest answer's text without calls."""
        return self._newest.text

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, up to the answer's text, or calls at the last round."""
        messages, answer = self._talk
        text = [] if answer is None else [write_answer(answer.text, answer.completion)]
        return [*messages, *text]

    def read(self) -> str | Thought | None:
        if not self._reading.acquire(blocking=False):
            raise SessionError(TWO_READERS)
        try:
            while not self.done:
                while (piece := self._newest.read()) is not None:
                    if isinstance(piece, (str, Thought)):
                        return piece
                self.done = not self._go_on()
            return None
        except BaseException:
            self.cancel()
            self.done = True
            raise
        finally:
            self._reading.release()

    def cancel(self) -> None:
        """End the answer, from any thread, any number of times. Complete rounds stay."""
        self._is_cancelled = True
        self._newest.close()

    def _go_on(self) -> bool:
        """Run the calls of the last answer; True if another answer is prepared."""
        messages, answer = self._talk
        if answer is None or self._is_cancelled or not answer.calls:
            return False
        notices = answer.completion.notices
        if not answer.calls[-1].is_complete:
            notices.append(
                f"the call of {answer.calls[-1].name} is incomplete and was not made: raise "
                "`max_tokens` if it was cut"
            )
            return False
        results: list[dict[str, Any]] = []
        for call in answer.calls:
            results.append(self._run(call))
            if self._is_cancelled:
                return False
        messages = [*messages, *answer.messages(), *results]
        self._talk = messages, None
        self._rounds -= 1
        if not self._rounds:
            notices.append(
                "the model still calls tools and the loop of calls has ended: raise rounds for "
                "more answers"
            )
            return False
        self._newest = self._ask(messages, False)
        again = self._newest.completion.notices
        again[:0] = [notice for notice in notices if notice not in again]
        self._talk = messages, self._newest
        return not self._is_cancelled

    def _run(self, call: ToolCall) -> dict[str, Any]:
        """The message with the result of a call."""
        tools = {tool.name: tool for tool in reversed(self._tools)}
        try:
            if call.name not in tools:
                names = ", ".join(tool.name for tool in self._tools)
                raise ArgumentsError(f"there is no tool {call.name}, there are {names}")
            result = tools[call.name].run(call.arguments)
        except ArgumentsError as error:
            result = f"error: {error}"
        except Exception as error:
            result = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "content": result, "tool_call_id": call.id, "name": call.name}
