"""A conversation: its messages. Each turn starts from the prefix that a row of the cache still holds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from typing_extensions import Unpack

from mlx_llama.core.errors import ContextError, OptionsError, SessionError
from mlx_llama.core.text.template import ChatTemplate, encode_messages

from .completion import Completion
from .engine import Engine
from .options import Options, Resolved, resolve, validate
from .request import Handle, Request
from .scheduler import Scheduler
from .session_file import expand_path, read_session, write_session


class Stream:
    """Pieces of text as they are generated; `completion` grows with them and is final after the last.

    One thread reads at a time; any thread may close it. Computing begins with the first piece.
    """

    def __init__(self, handle: Handle, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None):
        """begin: called before the first piece, may raise. end: called once the answer is over."""
        self._handle = handle
        self._begin, self._end = begin, end
        self._is_begun = self._is_closed = False
        self._ending = threading.Lock()
        self.completion = handle.completion

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._is_closed:
            raise StopIteration
        if not self._is_begun:
            self._begin()
            self._is_begun = True
        try:
            return next(self._handle)
        except StopIteration:
            self._settle()
            raise
        except BaseException:
            if self._handle.done:  # another thread's reading is no end
                self._settle()
            raise

    def close(self) -> None:
        """Stop generating; the text so far stays in the conversation. Any thread may call it, any number of times."""
        self._handle.cancel()
        if self._is_begun:
            self._settle()
        self._is_closed = True

    def finish(self) -> Completion:
        """Generate to the end and return the completion."""
        for _ in self:
            pass
        return self.completion

    def _settle(self) -> None:
        with self._ending:
            end, self._end = self._end, lambda: None
        end()
        self._is_closed = True


class Session:
    """A chat with one model.

    messages: the whole conversation; old turns leave the context, never this list. options: the user's, by name. Threads
    that `send` wait for their turn; other calls raise SessionError while another thread reads an answer.
    """

    def __init__(self, scheduler: Scheduler, template: ChatTemplate, generation_config: dict[str, Any], model: str,
                 system: str | None = None, options: Mapping[str, Any] | None = None):
        self.scheduler = scheduler
        self.template = template
        self.generation_config = generation_config
        self.model = model
        self.system = system
        self.options = {name: value for name, value in (options or {}).items() if value is not None}
        self.messages: list[dict[str, str]] = []
        self.dropped = 0  # messages at the front that no longer fit the context
        self.last: Completion | None = None
        self._turn = 0  # counts changes of the conversation
        self._open: Stream | None = None  # the newest stream
        self._reader: threading.Thread | None = None  # began the newest stream, which has not ended
        self._text: list[int] = []  # prompt and answer of the last turn
        self._sending, self._lock = threading.Lock(), threading.RLock()
        self._speculate: str | None = None  # the option of the newest answer
        self.resolve()  # report bad options now, not at the first question

    @property
    def engine(self) -> Engine:
        """The model and its checks."""
        return self.scheduler.engine

    @property
    def cached_tokens(self) -> list[int]:
        """The beginning of the last turn's prompt and answer that a row of the cache still holds."""
        return self._text[:self.scheduler.count_known(self._text)]

    def __repr__(self) -> str:
        used = f"{len(self.cached_tokens)} of {self.engine.context} positions"
        return f"Session({self.model!r}, {len(self.messages)} messages, {used})"

    def resolve(self, **options: Any) -> Resolved:
        """The options in force, `options` added. Raises OptionsError."""
        resolved = resolve({**self.options, **options}, self.generation_config)
        self.engine.check_options(resolved.options)
        return resolved

    def send(self, text: str, **options: Unpack[Options]) -> Completion:
        """Ask and wait for the whole answer, after those that other threads asked for. Raises as `stream`."""
        with self._sending:
            return self.stream(text, **options).finish()

    def stream(self, text: str, **options: Unpack[Options]) -> Stream:
        """Ask; the answer comes in pieces. The turn joins `messages` when the stream ends or is closed.

        A session gives one answer at a time. A new question ends an unfinished answer, whose text stays; a stream that
        was not begun by then raises SessionError later. Raises OptionsError, TemplateError or ContextError before
        any computing, and SessionError while another thread reads an answer.
        """
        resolved = self.resolve(**options)
        with self._lock:
            self._settle()
            return self._ask(self.messages, text, resolved)

    def regenerate(self, **options: Unpack[Options]) -> Stream:
        """Answer the last question again. The old answer stays until the new one has begun.

        Raises SessionError without a question, and as `stream`.
        """
        resolved = self.resolve(**options)
        with self._lock:
            self._settle()
            if not self.messages:
                raise SessionError("there is no answer to generate again: ask something first")
            return self._ask(self.messages[:-2], self.messages[-2]["content"], resolved)

    def _ask(self, before: list[dict[str, str]], text: str, resolved: Resolved) -> Stream:
        question = {"role": "user", "content": text}
        prompt, dropped = self._fit([*before, question], resolved)
        notices = [] if self.last else list(resolved.notices)
        if not self.last or self._speculate != resolved.options.speculate:
            notices += self.engine.choose_speculation(resolved.options)[1]
        self._speculate = resolved.options.speculate
        if dropped > self.dropped:
            notices.append(
                f"the conversation outgrew the context of {self.engine.context} tokens: the oldest "
                f"{dropped} messages are no longer seen by the model" + (", the system prompt stays" if self.system else ""))
        handle, turn = self.scheduler.prepare(Request(prompt, resolved, notices=notices)), self._turn
        self._open = Stream(handle, lambda: self._begin(turn), lambda: self._end(handle, [*before, question], prompt, dropped))
        return self._open

    def _begin(self, turn: int) -> None:
        with self._lock:
            if turn != self._turn:
                raise SessionError("the conversation went on before this answer was begun: ask again")
            self._reader = threading.current_thread()

    def _end(self, handle: Handle, asked: list[dict[str, str]], prompt: list[int], dropped: int) -> None:
        completion = handle.completion
        with self._lock:
            self._reader = None
            self._turn += 1
            # An answer that ends before its first character, by an interrupt or an error, changes nothing.
            if completion.text or completion.finish_reason not in ("interrupted", "error"):
                self.messages = [*asked, {"role": "assistant", "content": completion.text}]
                self.dropped = dropped
            self.last, self._text = completion, [*prompt, *map(int, completion.tokens)]

    def _settle(self) -> None:
        """End an unfinished answer and invalidate streams that were not begun."""
        if self._reader is not None and self._open is not None:
            if self._reader is not threading.current_thread() and self._reader.is_alive():
                raise SessionError("another thread is reading an answer of this session: wait for its end, close its stream, "
                                   "or give each thread a session of its own")
            self._open.close()
        self._turn += 1

    def clear(self) -> None:
        """Forget the conversation; the system prompt and the options stay. Raises SessionError as `stream`."""
        with self._lock:
            self._settle()
            self.messages, self.dropped, self.last = [], 0, None

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation as JSON, whole or not at all. Raises SessionError."""
        options = json.loads(validate(self.options).model_dump_json(include=set(self.options)))
        write_session(expand_path(path), model=self.model, system=self.system, options=options, messages=self.messages,
                      dropped=self.dropped)

    def load(self, path: str | os.PathLike) -> list[str]:
        """Continue a saved conversation; returns notices. Raises SessionError, and then changes nothing."""
        saved = read_session(expand_path(path))
        try:
            self.engine.check_options(resolve(saved.options, self.generation_config).options)
        except OptionsError as error:
            raise SessionError(f"{path}: {error}") from None
        notices = []
        if saved.model != self.model:
            notices.append(f"this conversation was held with {saved.model!r}, it goes on with {self.model!r}")
        with self._lock:
            self._settle()
            self.messages, self.dropped = [message.model_dump() for message in saved.messages], saved.dropped
            self.system, self.options, self.last = saved.system, saved.options, None
        return notices

    def _fit(self, messages: list[dict[str, str]], resolved: Resolved) -> tuple[list[int], int]:
        """Drop the oldest turns until the prompt fits; returns its tokens and the number of dropped messages."""
        # Keep a quarter of the context free for the answer, or max_tokens if that is less.
        room = self.engine.context - max(1, min(resolved.options.max_tokens, self.engine.context // 4))
        first = self.dropped if self.dropped < len(messages) else 0
        system = [{"role": "system", "content": self.system}] if self.system else []
        for dropped in range(first, len(messages), 2):
            prompt = encode_messages(self.engine.tokenizer, self.template, system + messages[dropped:])
            # Drop to three quarters at once: after each drop, all remaining turns are prefilled again.
            if len(prompt) <= (room if dropped == first else room * 3 // 4):
                return prompt, dropped
        # The newest question alone may use the answer's room but for one token.
        if len(prompt) >= self.engine.context:
            raise ContextError(f"this message makes a prompt of {len(prompt)} tokens and the context holds "
                               f"{self.engine.context}, answer included: shorten it{self.engine.suggest_context()}")
        return prompt, dropped

