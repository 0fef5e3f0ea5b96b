"""A request, its state while it is served, and the handle that its consumer holds."""

from __future__ import annotations

import enum
import itertools
import math
import queue
import threading
from collections import abc
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_llama.core.answers.completion import Completion, Writer
from mlx_llama.core.answers.dry import Dry
from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.answers.hooks import Hooks
from mlx_llama.core.answers.thinking import AnyConstraint, Thinking
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import NumericalError, SessionError
from mlx_llama.core.options import GenerationOptions, Resolved
from mlx_llama.core.system.forks import make_lock
from mlx_llama.core.text.thoughts import TextPieces, Thought

from .drafts import Speculation

NO_ROW = -1
TWO_READERS = "another thread is reading this answer: use one request per thread"


@dataclass(frozen=True)
class Request:
    """A prompt and the parameters of its answer."""

    prompt: abc.Sequence[int]
    options: Resolved
    # drop the space that sentencepiece puts before a text; False where the answer continues one
    starts_text: bool = True
    eos: frozenset[int] | None = None  # end tokens, None for the model's
    wants_text: bool = True  # False where token ids suffice
    # notices of its completion; None: those about options and speculation
    notices: abc.Sequence[str] | None = None
    # Called in the thread that computes, after each chunk of the prompt, each token and at the end.
    # Its exceptions end the request.
    notify: abc.Callable[[], None] | None = None
    # called as `notify` whenever it gets a row, with its growing list of tokens
    on_admit: abc.Callable[[abc.Sequence[int]], None] | None = None
    rule: Rule | None = None  # for the answer; None: the rule of the options
    # maximum time to compile the rule; None for trusted requests
    compile_seconds: float | None = None
    # special tokens to show in the text, such as the start of a tool call
    shown: frozenset[int] = frozenset()
    may_call: bool = False  # True if tools are offered
    reuses: bool = True  # cached prefixes of the prompt
    # time limit from the first token, applied once the text has a line break
    decode_seconds: float | None = None
    hooks: Hooks = Hooks()
    thinking: Thinking | None = None  # thoughts of the answer; None: all is text
    begun: int = 0  # last tokens of the prompt that are the beginning of the answer
    # likeliest tokens to report at each position of the prompt; None: no log-probabilities of it
    prompt_logprobs: int | None = None


class Status(enum.Enum):
    """The stage of a request. Only the loop changes it, in scheduler.py and `Sequence.finish`."""

    WAITING = enum.auto()  # for a row: new, or preempted while memory is short
    PREFILLING = enum.auto()  # its prompt is computed chunk by chunk
    RUNNING = enum.auto()  # its first step was launched
    ENDED = enum.auto()


@dataclass(eq=False)
class Sequence:
    """The state of a request. Only ticks change it, except for the last fields."""

    request: Request
    # prompt and answer as known on the host; shared with readers, never copied
    tokens: list[int]
    limit: int  # maximum number of tokens of the answer
    writer: Writer
    speculation: Speculation
    # its state is that after `tokens`
    constraint: AnyConstraint | None = None
    dry: Dry | None = None  # reads `tokens`
    sampling: Any = None  # SamplingBatch of this sequence alone
    number: int = 0  # order of submission
    adapter: int = 0  # number of the adapter that computes it, 0 for none
    processed: int = 0  # tokens of the prompt whose chunk was launched, reused ones included
    reported: int = 0  # `processed` at the last call of on_progress
    handed: int = 0  # tokens whose text on_piece got
    status: Status = Status.WAITING
    row: int = NO_ROW  # of the cache
    error: Exception | None = None
    is_cancelled: bool = False  # set by any thread; the next tick ends the request
    awaited: float = 0  # tokens of the answer that a consumer on another thread waits for
    news: queue.SimpleQueue[None] | None = None  # wakes it
    # held to append a token and to cancel
    lock: Any = field(default_factory=make_lock)

    def __post_init__(self) -> None:
        # The caller's processors change the logits: each step waits for them.
        self.needs_logits = bool(self.request.hooks.processors)

    @property
    def options(self) -> GenerationOptions:
        return self.request.options.options

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def needs_token(self) -> bool:
        """True if the host may compute masks or penalties from the last token before a step."""
        return self.dry is not None or (self.constraint is not None and self.constraint.free < 2)

    @property
    def unconstrained_ahead(self) -> float:
        """Number of next tokens that are certainly not constrained."""
        return self.constraint.free if self.constraint else math.inf

    @property
    def logprob_prompt_tokens(self) -> int:
        """Tokens at the beginning of the prompt whose chunks also give log-probabilities."""
        return 0 if self.request.prompt_logprobs is None else self.prompt_length - 1

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.limit + len(self.request.prompt) - len(self.tokens)

    def has(self, count: float) -> bool:
        """True once the answer has `count` tokens or is over."""
        is_over = self.is_cancelled or self.status is Status.ENDED
        return is_over or len(self.writer.completion.tokens) >= count

    def take(self, token: int, now: float, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a token read at busy second `now` (Scheduler); False if the answer ends here.
        Raises NumericalError for -1, by which a step reports logits that are not finite.
        """
        if token < 0:
            raise NumericalError(self._describe_numbers())
        with self.lock:
            if self.is_cancelled:
                return False
            is_last = False
            if self.constraint:
                self.constraint.accept(token)
                is_last = self.constraint.is_finished
            self.tokens.append(token)
            self.writer.push(token, now, is_last, logprobs)
        return not self.writer.is_finished

    def take_all(self, tokens: abc.Sequence[int], now: float) -> bool:
        """Append tokens in order; False if the answer ends with one of them."""
        return all(self.take(token, now) for token in tokens)

    def _describe_numbers(self) -> str:
        cause = "a weight is NaN or infinite, or the activations overflow their width"
        if self.needs_logits:
            cause += ", or the function logits_processor masked every token"
        return (
            f"the model's logits are not finite after {len(self.tokens)} tokens: {cause}; fetch "
            "the model again, or try `dtype='float32'`"
        )

    def tell(self) -> None:
        """Wake the consumer, and call the callbacks unless it has left. Raises their errors."""
        on_progress = self.request.hooks.on_progress
        if on_progress and not self.is_cancelled and self.reported != self.processed:
            self.reported = self.processed
            on_progress(self.processed, self.prompt_length)
        if on_piece := self.request.hooks.on_piece:
            for token in self.writer.completion.tokens[self.handed :]:
                self.handed += 1
                for text, kind in ((token.thought, "thought"), (token.text, "text")):
                    if text and not self.is_cancelled:
                        on_piece(text, kind)
        if (news := self.news) and self.has(self.awaited):
            news.put(None)
        if self.request.notify:
            self.request.notify()

    def finish(self, error: Exception | None = None) -> None:
        """End the request, after an error or once its answer has ended, and wake the consumer."""
        if error is not None:
            self.error = error
            self.writer.fail(error)
        self.status = Status.ENDED
        try:
            self.tell()
        except Exception as raised:
            self.error = self.error or raised


class Ticker(Protocol):
    """The loop, as a handle uses it."""

    def enqueue(self, sequence: Sequence) -> None: ...
    # runs or awaits ticks unless it has so many tokens
    def advance(self, sequence: Sequence, count: float) -> None: ...
    def sweep(self) -> None: ...  # ends cancelled requests soon


class Handle(TextPieces):
    """A streamed answer: an iterator of pieces of text. `completion` grows, and is final after the
    last piece. `read` returns the thoughts, too.

    One thread reads at a time; any thread may cancel. A handle that is dropped cancels its request.
    Raises the request's error, and SessionError in a thread that reads while another one does.
    """

    def __init__(self, sequence: Sequence, loop: Ticker):
        self._sequence = sequence
        self._loop = loop
        self._shown = 0  # tokens whose text was handed out
        self._text = ""  # of the last of them, after its thought
        self._reading = threading.Lock()
        self.completion: Completion = sequence.writer.completion
        self.is_begun = False

    def begin(self) -> Handle:
        """Queue the request, once."""
        if not self.is_begun:
            self.is_begun = True
            self._loop.enqueue(self._sequence)
        return self

    def read(self) -> str | Thought | None:
        while True:
            if text := self._text:
                self._text = ""
                return text
            self._await(self._shown + 1)
            tokens = self.completion.tokens
            if self._shown == len(tokens):
                return None
            token = tokens[self._shown]
            self._shown += 1
            self._text = token.text
            if token.thought:
                return Thought(token.thought)

    def tokens(self) -> abc.Iterator[int]:
        """Token ids instead of text, from the first one on."""
        for count in itertools.count():
            self._await(count + 1)
            if count == len(self.completion.tokens):
                return
            yield self.completion.tokens[count]

    def until_error(self) -> abc.Iterator[int]:
        """As `tokens`, but stop where the request fails: `completion.error` has the reason."""
        try:
            yield from self.tokens()
        except Exception:
            if self._sequence.error is None:
                raise

    def finish(self) -> Completion:
        self._await(math.inf)
        return self.completion

    @property
    def done(self) -> bool:
        """True once the answer is complete, cancelled or failed."""
        return self._sequence.status is Status.ENDED or self._sequence.is_cancelled

    @property
    def error(self) -> Exception | None:
        """The exception that ended the request; None if it did not fail."""
        return self._sequence.error

    @property
    def processed(self) -> int:
        """Tokens of the prompt that are computed or being computed, reused ones included."""
        return self._sequence.processed

    def cancel(self) -> None:
        """End the request, from any thread, any number of times. The completion keeps its text."""
        sequence = self._sequence
        with sequence.lock:
            sequence.is_cancelled = True
            sequence.writer.interrupt()
        if news := sequence.news:
            news.put(None)
        if self.is_begun:
            self._loop.sweep()

    close = cancel

    def __del__(self) -> None:
        self._sequence.is_cancelled = True  # only this: __del__ may run inside a tick

    def _await(self, count: float) -> None:
        """Return once there are `count` tokens or the request is over. Raises its error."""
        if not self._reading.acquire(blocking=False):
            raise SessionError(TWO_READERS)
        try:
            self.begin()
            sequence = self._sequence
            while not sequence.has(count):
                self._loop.advance(sequence, count)
            if sequence.error and len(self.completion.tokens) < count:
                raise sequence.error
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                self.cancel()
            raise
        finally:
            self._reading.release()
