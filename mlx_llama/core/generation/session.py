"""A conversation: its messages. Each turn starts from the prefix that a row of the cache still holds."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import Unpack

from mlx_llama.core.errors import ContextError, OptionsError, SessionError
from mlx_llama.core.text.template import ChatTemplate
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import ToolParser, find_format

from .cache_file import Identity, cache_path, read_cache, write_cache
from .completion import Completion
from .engine import Engine
from .options import Options, Resolved, resolve, validate
from .request import Handle, Request
from .scheduler import Scheduler
from .session_file import expand_path, read_session, write_session
from .tool_use import ROUNDS, Toolbox, ToolLoop, ToolPrompt, ToolStream, encode_with_tools


class Stream:
    """Pieces of text as they are generated; `completion` grows with them and is final after the last.

    One thread reads at a time; any thread may close it. Computing begins with the first piece.
    """

    def __init__(self, handle: Handle | ToolLoop, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None):
        """begin: called before the first piece, may raise. end: called once the answer is over."""
        self._handle = handle
        self._begin, self._end = begin, end
        self._is_begun = self._is_closed = False
        self._ending = threading.Lock()

    @property
    def completion(self) -> Completion:
        """Of the answer; with tools, of the newest answer to the question."""
        return self._handle.completion

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

    messages: the whole conversation, tool calls and their results included; old turns leave the context, never this list.
    options: the user's, by name. Threads that `send` wait for their turn; other calls raise SessionError while another
    thread reads an answer.
    """

    def __init__(self, scheduler: Scheduler, template: ChatTemplate, generation_config: dict[str, Any], model: str,
                 system: str | None = None, options: Mapping[str, Any] | None = None,
                 identify_cache: Callable[[], Identity] | None = None, toolbox: Toolbox = Toolbox(), rounds: int = ROUNDS):
        """identify_cache: of the files that `save` writes with the cache, None: it cannot. toolbox: functions that an answer
        may call. rounds: most answers to one question. Raises OptionsError.
        """
        self.scheduler = scheduler
        self.template = template
        self.generation_config = generation_config
        self.model = model
        self.identify_cache = identify_cache
        self.toolbox, self.rounds = toolbox, rounds
        self.system = system
        self.options = {name: value for name, value in (options or {}).items() if value is not None}
        self.messages: list[dict[str, Any]] = []
        self.dropped = 0  # messages at the front that no longer fit the context
        self.last: Completion | None = None
        self._turn = 0  # counts changes of the conversation
        self._open: Stream | None = None  # the newest stream
        self._reader: threading.Thread | None = None  # began the newest stream, which has not ended
        self._text: list[int] = []  # prompt and answer of the last turn
        self._sending, self._lock = threading.RLock(), threading.RLock()
        self._speculate: str | None = None  # the option of the newest answer
        self.resolve()  # report bad options now, not at the first question
        toolbox.check_functions()
        if toolbox.offered:
            find_format(template.source, self._tokenizer)

    @property
    def engine(self) -> Engine:
        """The model and its checks."""
        return self.scheduler.engine

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None  # a session has a template, so a text
        return self.engine.tokenizer

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
        self.engine.check_rule(resolved.options)
        self.toolbox.check(resolved.options)
        self.engine.check_rule(resolved.options)
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
            start = _find_turns(self.messages)[-1]
            return self._ask(self.messages[:start], self.messages[start]["content"], resolved)

    def _ask(self, before: list[dict[str, Any]], text: str, resolved: Resolved) -> Stream:
        asked = [*before, {"role": "user", "content": text}]
        dropped, prompt = self.dropped, ToolPrompt([])

        def prepare(messages: Sequence[Mapping[str, Any]], box: Toolbox, notices: Sequence[str]) -> Handle:
            nonlocal dropped, prompt
            prompt, dropped = self._fit(messages, resolved, box, dropped)
            if dropped > self.dropped:
                notices = [*notices, self._describe_dropped(dropped)]
            return self.scheduler.prepare(Request(prompt.tokens, resolved, notices=notices, rule=prompt.rule,
                                                  shown=prompt.shown))

        def ask(messages: Sequence[Mapping[str, Any]], is_first: bool) -> ToolStream:
            box = self.toolbox if is_first else replace(self.toolbox, choice="auto")
            handle = prepare(messages, box, notices if is_first else ())
            return ToolStream(handle, ToolParser(prompt.form, [tool.name for tool in box.offered]),
                              resolved.options.schema)

        def end() -> None:
            completion = answer.completion
            added = answer.messages[len(asked):] if isinstance(answer, ToolLoop) else []
            if not added or added[-1]["role"] != "assistant":
                added = [*added, {"role": "assistant", "content": "" if added else completion.text}]
            self._end(completion, asked, added, prompt.tokens, dropped)

        notices = [] if self.last else list(resolved.notices)
        if not self.last or self._speculate != resolved.options.speculate:
            notices += self.engine.choose_speculation(resolved.options)[1]
        self._speculate = resolved.options.speculate
        answer: Handle | ToolLoop
        if self.toolbox.offered:
            answer = ToolLoop(ask, asked, self.toolbox.offered, self.rounds)
        else:
            answer = prepare(asked, self.toolbox, notices)
        turn = self._turn
        self._open = Stream(answer, lambda: self._begin(turn), end)
        return self._open

    def _describe_dropped(self, dropped: int) -> str:
        return (f"the conversation outgrew the context of {self.engine.context} tokens: the oldest {dropped} messages are no "
                "longer seen by the model" + (", the system prompt stays" if self.system else ""))

    def _begin(self, turn: int) -> None:
        with self._lock:
            if turn != self._turn:
                raise SessionError("the conversation went on before this answer was begun: ask again")
            self._reader = threading.current_thread()

    def _end(self, completion: Completion, asked: list[dict[str, Any]], added: list[dict[str, Any]], prompt: list[int],
             dropped: int) -> None:
        with self._lock:
            self._reader = None
            self._turn += 1
            # An answer that ends before its first character, by an interrupt or an error, changes nothing.
            is_empty = len(added) == 1 and not added[0]["content"]
            if not is_empty or completion.finish_reason not in ("interrupted", "error"):
                self.messages, self.dropped = [*asked, *added], dropped
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

    def save(self, path: str | os.PathLike, cache: bool = False) -> None:
        """Write the conversation as JSON, whole or not at all. Raises SessionError.

        cache: write the keys and values beside it, to PATH.safetensors, with which `load` goes on at once.
        """
        if cache:
            assert self.identify_cache is not None
            write_cache(cache_path(path), self.scheduler.export(self._text), self.identify_cache())
        options = json.loads(validate(self.options).model_dump_json(include=set(self.options)))
        write_session(expand_path(path), model=self.model, system=self.system, options=options, messages=self.messages,
                      dropped=self.dropped)

    def load(self, path: str | os.PathLike) -> list[str]:
        """Continue a saved conversation, from its keys and values where they were saved with it; returns notices.

        Raises SessionError, and then changes nothing. Keys and values that cannot be used are a notice.
        """
        saved = read_session(expand_path(path))
        try:
            options = resolve(saved.options, self.generation_config).options
            self.engine.check_options(options)
            self.engine.check_rule(options)
        except OptionsError as error:
            raise SessionError(f"{path}: {error}") from None
        notices = []
        if saved.model != self.model:
            notices.append(f"this conversation was held with {saved.model!r}, it goes on with {self.model!r}")
        with self._lock:
            self._settle()
            self.messages, self.dropped = [message.model_dump() for message in saved.messages], saved.dropped
            self.system, self.options, self.last = saved.system, saved.options, None
        if self.identify_cache and os.path.lexists(cache_path(path)):
            try:
                state = read_cache(cache_path(path), self.identify_cache())
                self.scheduler.install(state)
                self._text = state["tokens"].tolist()
            except (SessionError, ContextError) as error:
                notices.append(f"without its cache: {error}")
        return notices

    def _fit(self, messages: Sequence[Mapping[str, Any]], resolved: Resolved, box: Toolbox,
             first: int) -> tuple[ToolPrompt, int]:
        """Drop the oldest turns until the prompt fits; returns it and the number of dropped messages.

        first: messages that are dropped already.
        """
        # Keep a quarter of the context free for the answer, or max_tokens if that is less.
        room = self.engine.context - max(1, min(resolved.options.max_tokens, self.engine.context // 4))
        turns = _find_turns(messages)
        first = first if first <= turns[-1] else 0
        system = [{"role": "system", "content": self.system}] if self.system else []
        for dropped in [first, *(start for start in turns if start > first)]:
            prompt = encode_with_tools(self._tokenizer, self.template, [*system, *messages[dropped:]], box,
                                       resolved.options.schema)
            # Drop to three quarters at once: after each drop, all remaining turns are prefilled again.
            if len(prompt.tokens) <= (room if dropped == first else room * 3 // 4):
                return prompt, dropped
        # The newest question alone may use the answer's room but for one token.
        if len(prompt.tokens) >= self.engine.context:
            raise ContextError(f"this message makes a prompt of {len(prompt.tokens)} tokens and the context holds "
                               f"{self.engine.context}, answer included: shorten it{self.engine.suggest_context()}")
        return prompt, dropped


def _find_turns(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the questions: each begins a turn of calls, results and an answer."""
    return [place for place, message in enumerate(messages) if message.get("role") == "user"]
