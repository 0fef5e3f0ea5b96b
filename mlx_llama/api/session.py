"""A conversation. Each turn reuses the prefix that a row of the cache still holds."""

from __future__ import annotations

import json
import os
import threading
from collections import abc
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Unpack

from mlx_llama.core.answers.completion import Aside, Completion
from mlx_llama.core.answers.hooks import Hooks, split_hooks
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Answer, Sequence
from mlx_llama.core.errors import ContextError, OptionsError, SessionError, plain
from mlx_llama.core.options import Defaults, GenerationOptions, Options, Resolved, validate
from mlx_llama.core.system.forks import make_lock
from mlx_llama.core.text.adapting import join_parts
from mlx_llama.core.text.controls import find_notices, mend
from mlx_llama.core.text.template import ChatTemplate, encode_messages
from mlx_llama.core.text.thoughts import find_thoughts
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import write_answer

from .cache_file import Identity, cache_path, read_cache, write_cache
from .session_file import check_turns, expand_path, read_session, write_session
from .tool_use import (
    ROUNDS,
    Conversation,
    Fit,
    Rounds,
    Toolbox,
    ToolPrompt,
    check_rounds,
    find_turns,
    fit_turns,
    keep_from,
)

Messages = abc.Sequence[abc.Mapping[str, Any]]


@dataclass(eq=False, repr=False)
class Session:
    """A chat with one model. Threads that `send` wait for their turn; other calls raise
    SessionError while another thread reads an answer, and those that change the conversation in a
    callback of a request. Raises OptionsError, and SessionError for messages that are not questions
    and answers in turn.
    """

    loop: Loop
    template: ChatTemplate
    defaults: Defaults
    model: str  # the checkpoint's name
    system: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # the user's, by name
    # identity of the cache files of `save`, by adapter; None: none are written
    identify_cache: abc.Callable[[int], Identity] | None = None
    toolbox: Toolbox = Toolbox()  # functions that an answer may call
    rounds: int = ROUNDS  # maximum number of answers to a question
    # all, with tool calls and results; old turns leave the context, never this list
    messages: list[dict[str, Any]] = field(default_factory=list)
    look_up: abc.Callable[[str], list[Aside]] = lambda question: []  # see LLM.look_up

    def __post_init__(self) -> None:
        rest, self.hooks = split_hooks(self.options)  # for questions without hooks
        self.options = {name: value for name, value in rest.items() if value is not None}
        first = next(iter(self.messages), None)
        if isinstance(first, abc.Mapping) and first.get("role") == "system" and self.system is None:
            self.system, self.messages = join_parts(first.get("content")), self.messages[1:]
        self.messages = check_turns(self.messages)
        self.dropped = 0  # messages at the front that no longer fit the context: see `seen`
        self.last: Completion | None = None
        self._turn = 0  # counts changes of the conversation
        self._open: Answer[str] | None = None  # the newest one
        self._reader: threading.Thread | None = None  # began the newest stream, which has not ended
        self._text: list[int] = []  # prompt and answer of the last turn
        self._sending, self._lock = make_lock(), make_lock()
        self._speculate: str | None = None  # the option of the newest answer
        self._told: set[str] = set()  # notices about the messages, each said once
        # the last answer: text, tokens, finish reason
        self._answer: tuple[str, list[int] | None, str | None] = "", None, ""
        # the last answer's prompt and options
        self._asked: tuple[list[int], GenerationOptions] | None = None
        # the newest stream has the last answer's prompt and options, so it gives its tokens
        self.is_repeating = False
        self.resolve()  # report bad options now, not at the first question
        self.toolbox.check_functions()
        check_rounds(self.rounds)

    @property
    def engine(self) -> RequestBuilder:
        """The model and the checks of its requests."""
        return self.loop.engine

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None  # a session has a template, which needs text
        return self.engine.tokenizer

    @property
    def cached_tokens(self) -> list[int]:
        """The prefix of the last turn's prompt and answer that a row of the cache still holds."""
        return self._text[: self.loop.count_known(self._text, self.adapter)]

    @property
    def adapter(self) -> int:
        """Number of the adapter that answers, 0 for none."""
        return self.engine.find_adapter(self.defaults.resolve(self.options).options)

    @property
    def seen(self) -> list[dict[str, Any]]:
        """The messages that still fit the context: those after the dropped ones, and the question
        of a turn that lost only calls and results.
        """
        return keep_from(self.messages, self.dropped)

    def __repr__(self) -> str:
        used = f"{len(self.cached_tokens)} of {self.engine.context} positions"
        return f"Session({self.model!r}, {len(self.messages)} messages, {used})"

    def resolve(self, **options: Any) -> Resolved:
        """The current options with `options` added. Raises OptionsError."""
        resolved = self.defaults.resolve({**self.options, **options})
        self.engine.check_options(resolved.options)
        self.toolbox.check(resolved.options)
        self.engine.check_rule(resolved.options)
        return resolved

    def send(self, text: str, **options: Unpack[Options]) -> Completion:
        """Ask and wait for the whole answer; threads wait for their turn. Raises as `stream`."""
        self.loop.refuse_callback("ask")
        with self._sending:
            return self.stream(text, **options).finish()

    def stream(self, text: str, **options: Unpack[Options]) -> Answer[str]:
        """Ask; the answer comes in pieces. The turn joins `messages` when the stream ends or is
        closed.

        A session gives one answer at a time. A new question ends an unfinished answer, whose text
        stays, and invalidates a stream that was not begun: it raises SessionError. Raises
        OptionsError, TemplateError or ContextError before any computing, and SessionError while
        another thread reads an answer.
        """
        resolved, hooks = self._resolve_all(options)
        with self._changing():
            return self._ask(self.messages, text, resolved, hooks)

    def regenerate(self, **options: Unpack[Options]) -> Answer[str]:
        """Answer the last question again, as `edit` without a text. Raises as `edit`."""
        return self.edit(None, **options)

    def edit(self, text: str | None, **options: Unpack[Options]) -> Answer[str]:
        """Ask `text` in place of the last question, None: the question itself. The old turn stays
        until the new answer has begun. Raises SessionError without a question, and as `stream`.
        """
        resolved, hooks = self._resolve_all(options)
        with self._changing():
            if text is None and not self.messages:
                raise SessionError("there is no answer to generate again: ask something first")
            question = self.last_question  # raises without one
            before = self.messages[: find_turns(self.messages)[-1]]
            return self._ask(before, question if text is None else text, resolved, hooks)

    @property
    def last_question(self) -> str:
        """The newest message of the user. Raises SessionError without one."""
        if not self.messages:
            raise SessionError("there is no question yet: ask something first")
        return self.messages[find_turns(self.messages)[-1]]["content"]

    def undo(self) -> list[dict[str, Any]]:
        """Take back the last question and its answer; returns their messages."""
        with self._changing():
            if not self.messages:
                raise SessionError("there is nothing to undo: the conversation is empty")
            start = find_turns(self.messages)[-1]
            taken, self.messages = self.messages[start:], self.messages[:start]
            self.dropped = self.dropped if self.dropped < start else 0
            return taken

    def resume(self, **options: Unpack[Options]) -> Answer[str]:
        """Continue the last answer after its last token; its message grows by the pieces.

        With the same options and seed, the text equals that of an answer that was never cut.
        Raises SessionError without an answer, for one that ended by itself and in a conversation
        with tools, and as `stream`.
        """
        resolved, hooks = self._resolve_all(options)
        with self._changing():
            if not self.messages:
                raise SessionError("there is no answer to continue: ask something first")
            if self.toolbox.offered:
                raise SessionError(
                    "an answer in a conversation with tools cannot be continued: ask again"
                )
            text, tokens, reason = self._answer
            # read from a file, or written by another model
            if tokens is None or text != self.messages[-1]["content"]:
                tokens, reason = self._encode_answer(), ""
            if reason in ("eos", "stop"):
                raise SessionError(
                    "the last answer is complete and cannot be continued: ask something, or "
                    "regenerate it"
                )
            return self._answer_to(self.messages[:-1], resolved, hooks, tokens)

    def _encode_answer(self) -> list[int]:
        """Tokens of the last answer, as the template encodes it after the question."""
        text, shown, ended = self.messages[-1]["content"], "", list[int]()
        system = [{"role": "system", "content": self.system}] if self.system else []
        talk = [*system, *self.seen]
        before = encode_messages(self.tokenizer, self.template, talk[:-1])
        whole = encode_messages(self.tokenizer, self.template, talk, add_generation_prompt=False)
        decoder, answer = self.tokenizer.stream(), whole[len(before) :]
        if form := find_thoughts(self.template.source):
            parser = form.parser("thought" if form.is_open(self.tokenizer, before) else "before")
            decoder = self.tokenizer.stream(shown=self.tokenizer.find_special(form.marks))
            ended = form.encode(self.tokenizer, form.closing) if parser.is_thinking else []
        for count, token in enumerate(answer if whole[: len(before)] == before else []):
            if shown == text:
                return answer[:count]
            piece = decoder.push(token)
            parts = parser.push(piece) if form else [piece]
            shown += "".join(part for part in parts if isinstance(part, str))
        return [*ended, *self.tokenizer.encode(text)]

    def _resolve_all(self, options: abc.Mapping[str, Any]) -> tuple[Resolved, Hooks]:
        rest, hooks = split_hooks(options)
        return self.resolve(**rest), hooks.over(self.hooks)

    def _ask(
        self, before: list[dict[str, Any]], text: str, resolved: Resolved, hooks: Hooks
    ) -> Answer[str]:
        notices = find_notices(self.system, text)
        asked = [*before, {"role": "user", "content": mend(text)}]
        return self._answer_to(asked, resolved, hooks, notices=notices)

    def _answer_to(
        self,
        asked: list[dict[str, Any]],
        resolved: Resolved,
        hooks: Hooks,
        begun: abc.Sequence[int] = (),
        notices: abc.Sequence[str] = (),
    ) -> Answer[str]:
        """The answer to messages. begun: its first tokens, of an answer that was cut. notices:
        about the question.
        """
        notices = [*notices, *(() if self.last else resolved.notices)]
        if not self.last or self._speculate != resolved.options.speculate:
            notices += self.engine.choose_speculation(resolved.options)[1]
        self._speculate = resolved.options.speculate
        turn = SessionTurn(self, asked, resolved, hooks, begun, notices)
        answer = Answer[str](turn.begin(), self.loop, turn)
        answer.completion.asides = turn.asides = self.look_up(asked[-1]["content"])
        conditions, before = (turn.prompt.tokens, resolved.options), self._asked
        self.is_repeating = not begun and before is not None and _is_same(before, conditions)
        self._open = answer
        return answer

    def _describe_dropped(self, dropped: int) -> str:
        return (
            f"the conversation outgrew the context of {self.engine.context} tokens: the oldest "
            f"{dropped} messages are no longer seen by the model"
            + (", the system prompt stays" if self.system else "")
        )

    @contextmanager
    def _changing(self) -> abc.Iterator[None]:
        """Hold the conversation for a change, without an unfinished answer. Raises SessionError."""
        # On mlx callbacks have a thread of their own, and the reading one may hold the lock.
        self.loop.refuse_callback("change a conversation")
        with self._lock:
            self._settle()
            yield

    def _settle(self) -> None:
        """End an unfinished answer and invalidate streams that were not begun."""
        if self._reader is not None and self._open is not None:
            if self._reader is not threading.current_thread() and self._reader.is_alive():
                raise SessionError(
                    "another thread is reading an answer of this session: wait for it to end, "
                    "close its stream, or use one session per thread"
                )
            self._open.close()
        self._turn += 1

    def clear(self) -> None:
        """Forget the conversation, but not the system prompt and the options."""
        with self._changing():
            self.messages, self.dropped, self.last = [], 0, None

    def save(self, path: str | os.PathLike, cache: bool = False) -> None:
        """Write the conversation as JSON, atomically. cache: write the keys and values too, to
        PATH.safetensors, for `load`. Raises SessionError.
        """
        if cache:
            assert self.identify_cache is not None
            state = self.loop.export(self._text, self.adapter)
            write_cache(cache_path(path), state, self.identify_cache(self.adapter))
        options = json.loads(validate(self.options).model_dump_json(include=set(self.options)))
        fields = {name: getattr(self, name) for name in ("model", "system", "messages", "dropped")}
        text, _, reason = self._answer
        is_last = text in [message["content"] for message in self.messages[-1:]]
        fields["is_cut"] = is_last and reason in ("length", "context", "interrupted", "error")
        write_session(expand_path(path), options=options, **fields)

    def load(self, path: str | os.PathLike) -> list[str]:
        """Continue a saved conversation, from its cache if that was saved; returns notices. Raises
        SessionError, and then changes nothing. Unusable keys and values give a notice.
        """
        saved = read_session(expand_path(path))
        try:
            options = self.defaults.resolve(saved.options).options
            self.engine.check_options(options)
            self.engine.check_rule(options)
        except OptionsError as error:
            raise SessionError(f"{path}: {plain(str(error))}") from None
        notices = []
        if saved.model != self.model:
            notices.append(
                f"this conversation was held with {saved.model!r} and continues with {self.model!r}"
            )
        with self._changing():
            self.messages = [message.model_dump() for message in saved.messages]
            self.dropped, self.last = saved.dropped, None
            text = self.messages[-1]["content"] if self.messages else ""
            self._answer = (text, None, "length") if saved.is_cut else ("", None, "")
            self.system, self.options = saved.system, saved.options
        if self.identify_cache and os.path.lexists(cache_path(path)):
            try:
                state = read_cache(cache_path(path), self.identify_cache(self.adapter))
                self.loop.install(state, self.adapter)
                self._text = state["tokens"].tolist()
            except (SessionError, ContextError) as error:
                notices.append(f"without its cache: {error}")
        return notices

    def _fit(
        self, messages: Messages, resolved: Resolved, box: Toolbox, first: int, begun: int = 0
    ) -> Fit:
        """Drop the oldest turns until the prompt fits. Arguments and result as of fit_turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        talk = Conversation(
            self.tokenizer,
            self.template,
            messages=[*system, *messages],
            box=box,
            options=resolved.options,
        )
        fit = fit_turns(talk, self.engine, first, begun)
        # The newest question alone may use the answer's room but for one token.
        if (length := len(fit.prompt.tokens) + begun) >= self.engine.context:
            raise ContextError(
                f"this message makes a prompt of {length} tokens and the context holds "
                f"{self.engine.context}, answer included: shorten it{self.engine.suggest_context()}"
            )
        return fit


class SessionTurn(Rounds):
    """A question of a session and its answers."""

    def __init__(
        self,
        session: Session,
        asked: list[dict[str, Any]],
        resolved: Resolved,
        hooks: Hooks,
        begun: abc.Sequence[int],
        notices: abc.Sequence[str],
    ):
        """begun: tokens that begin the answer. notices: of the first answer."""
        super().__init__(asked, session.toolbox, session.rounds)
        self.prompt = ToolPrompt([])  # the newest answer's
        self.asides: list[Aside] = []
        self._session, self._resolved, self._hooks = session, resolved, hooks
        self._begun, self._notices, self._number = begun, list(notices), session._turn
        self._count, self._dropped = len(asked), session.dropped

    def ask(self, messages: Messages, box: Toolbox) -> Sequence:
        session, resolved, had_all = self._session, self._resolved, not self._dropped
        self.prompt, self._dropped, count = session._fit(
            messages, resolved, box, self._dropped, len(self._begun)
        )
        notices, self._notices = self._notices, []
        if self._dropped and had_all:  # said once
            notices.append(session._describe_dropped(count))
        notices += [new for new in self.prompt.notices if new not in session._told]
        session._told.update(self.prompt.notices)
        return session.loop.prepare(
            self.prompt.request(resolved, self._begun, notices=notices, hooks=self._hooks)
        )

    def start(self) -> None:
        session = self._session
        session.loop.refuse_callback("wait for an answer")
        with session._lock:
            if self._number != session._turn:
                raise SessionError(
                    "the conversation moved on before this answer started: ask again"
                )
            session._reader = threading.current_thread()

    def finish(self, answer: Answer) -> None:
        """Add the turn to the conversation."""
        session, completion, begun = self._session, answer.completion, self._begun
        completion.asides = self.asides
        messages = self.messages
        if messages[-1]["role"] != "assistant":  # calls of the last permitted answer
            messages.append(write_answer(""))
        with session._lock:
            session._reader = None
            session._turn += 1
            tokens, reason = [*begun, *map(int, completion.tokens)], completion.finish_reason
            is_cut = reason in ("interrupted", "error")
            # An answer that is cut before its first character changes nothing.
            is_empty = len(messages) == self._count + 1 and not messages[-1]["content"]
            if not (is_empty and is_cut) or completion.reasoning:
                session.messages, session.dropped = messages, self._dropped
                session._answer = messages[-1]["content"], tokens, reason
                # A stopped or resumed answer is not what its prompt and options give.
                is_new = not begun and not is_cut
                session._asked = (self.prompt.tokens, self._resolved.options) if is_new else None
            session.last, session._text = completion, [*self.prompt.tokens, *tokens]


def _is_same(
    first: tuple[list[int], GenerationOptions], second: tuple[list[int], GenerationOptions]
) -> bool:
    """True if two prompts with options give the same tokens. Greedy ones ignore the seed."""

    def normalize(options: GenerationOptions) -> GenerationOptions:
        return options.model_copy(update={"seed": None}) if options.temperature == 0 else options

    return first[0] == second[0] and normalize(first[1]) == normalize(second[1])
