"""A request, its state while it is served, and the handle that its consumer holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence as Several
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import NumericalError, SessionError

from .completion import Completion, Writer
from .grammar import Constraint, Rule
from .hooks import Hooks
from .options import GenerationOptions, Resolved
from .speculate import Speculation

NO_ROW = NO_SLOT = -1


@dataclass(frozen=True)
class Request:
    """A prompt and the conditions of its answer.

    starts_text: the answer is a text of its own, so the space that sentencepiece puts before a text is dropped; False
    where it continues one, and " a time" keeps its space. eos: end tokens, None for the model's. wants_text: False where
    token ids suffice. notices: of its completion, None for those of the options and the speculation. notify: called
    after each chunk of the prompt and each new token and at the end, in the thread that computes; its exceptions end the request. rule: what the answer
    must match, None for what the options say. compile_seconds: most time to compile it, None for a request that is trusted.
    shown: special tokens that appear in the text, such as those that open a tool call. reuses: known prefixes of the prompt.
    decode_seconds: of the answer, which then ends after its next token if it has a line break; None for any. hooks: of the
    caller. begun: tokens at the prompt's end that begin the answer, which goes on from them.
    """

    prompt: Several[int]
    options: Resolved
    starts_text: bool = True
    eos: frozenset[int] | None = None
    wants_text: bool = True
    notices: Several[str] | None = None
    notify: Callable[[], None] | None = None
    rule: Rule | None = None
    compile_seconds: float | None = None
    shown: frozenset[int] = frozenset()
    reuses: bool = True
    decode_seconds: float | None = None
    hooks: Hooks = Hooks()
    begun: int = 0


@dataclass(eq=False)
class Sequence:
    """A request being served. Only ticks change it, but for the flags at the end.

    text: the tokens known on the host, prompt and answer. limit: most tokens of the answer. number: order of submission.
    row: of the cache, NO_ROW while it waits. slot: see Slots, NO_SLOT until it runs.
    """

    request: Request
    text: list[int]
    limit: int
    writer: Writer
    speculation: Speculation
    constraint: Constraint | None = None  # its state is that after `text`
    sampling: Any = None  # SamplingBatch of this sequence alone
    number: int = 0
    adapter: int = 0  # number of the adapter that computes it, 0 for none
    processed: int = 0  # tokens of the prompt whose chunk was launched, reused ones included
    told: int = 0  # `processed` as the caller knows it
    row: int = NO_ROW
    slot: int = NO_SLOT
    is_over: bool = False
    error: Exception | None = None
    is_cancelled: bool = False  # set by any thread
    is_awaited: bool = False  # a consumer waits for `news`
    news: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)  # a cancelled sequence takes no more tokens

    @property
    def options(self) -> GenerationOptions:
        return self.request.options.options

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def needs_logits(self) -> bool:
        """True if each step waits for its logits, which a function of the caller changes."""
        return bool(self.request.hooks.processors)

    def process(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits float32 [1, V] of the next token as the caller's functions leave them. Raises what they raise."""
        return self.request.hooks.process(self.text, logits)

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.limit - (len(self.text) - len(self.request.prompt))

    def take(self, token: int, now: float, logprobs: TokenLogprobs | None = None) -> bool:
        """Append a generated token; False if the answer ends here. now: busy seconds (see Clock).

        Raises NumericalError for -1, which a step gives where no logit is finite, or one is NaN or infinite.
        """
        if token < 0:
            raise NumericalError(self._describe_numbers())
        with self.lock:
            if self.is_cancelled:
                return False
            if self.constraint:
                self.constraint.accept(token)
            self.text.append(token)
            is_late = self.request.decode_seconds is not None and self.writer.is_late(now, self.request.decode_seconds)
            self.writer.push(token, now, self.constraint is not None and self.constraint.is_finished, logprobs, is_late)
        return not self.writer.is_finished

    def _describe_numbers(self) -> str:
        cause = "a weight is NaN or infinite, or the activations overflow their width"
        if self.needs_logits:
            cause += ", or the function logits_processor forbade every token"
        return (f"the model's logits are not finite after {len(self.text)} tokens: {cause}; fetch the model again, or try "
                "`dtype='float32'`")

    def tell(self) -> None:
        """Wake the consumer. Raises what the request's callbacks raise."""
        on_progress = self.request.hooks.on_progress
        if on_progress and self.told != self.processed:
            self.told = self.processed
            on_progress(self.processed, self.prompt_length)
        if self.is_awaited:
            self.news.set()
        if self.request.notify:
            self.request.notify()


class Loop(Protocol):
    """The part of the scheduler that a handle calls."""

    def enqueue(self, sequence: Sequence) -> None: ...
    def advance(self, sequence: Sequence, has_news: Callable[[], bool]) -> None: ...  # runs or awaits a tick
    def sweep(self) -> None: ...  # ends cancelled requests soon


class Handle:
    """An answer as it comes: an iterator of pieces of text. `completion` grows, and is final after the last piece.

    One thread reads at a time; any thread may cancel. A handle that is dropped cancels its request. Raises the request's
    error, and SessionError in a thread that reads while another one does.
    """

    def __init__(self, sequence: Sequence, loop: Loop):
        self._sequence = sequence
        self._loop = loop
        self._shown = 0  # tokens whose text was handed out
        self._reading = threading.Lock()
        self.completion: Completion = sequence.writer.completion
        self.is_begun = False

    def begin(self) -> Handle:
        """Queue the request, once."""
        if not self.is_begun:
            self.is_begun = True
            self._loop.enqueue(self._sequence)
        return self

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            self._await(self._shown + 1)
            tokens = self.completion.tokens
            if self._shown == len(tokens):
                raise StopIteration
            text = tokens[self._shown].text
            self._shown += 1
            if text:
                return text

    def tokens(self) -> Iterator[int]:
        """Token ids instead of text, from the first one on."""
        count = 0
        while True:
            self._await(count + 1)
            if count == len(self.completion.tokens):
                return
            count += 1
            yield self.completion.tokens[count - 1]

    def until_error(self) -> Iterator[int]:
        """`tokens` that end where the request fails: `completion.error` says why."""
        try:
            yield from self.tokens()
        except Exception:
            if self._sequence.error is None:
                raise

    def finish(self) -> Completion:
        """Generate to the end and return the completion."""
        for _ in self.tokens():
            pass
        return self.completion

    @property
    def done(self) -> bool:
        """True once the answer is complete, cancelled or failed."""
        return self._sequence.is_over or self._sequence.is_cancelled

    @property
    def slot(self) -> int:
        """Its number among the running requests, which others may have had since; -1 until it runs."""
        return self._sequence.slot

    @property
    def processed(self) -> int:
        """Tokens of the prompt that are computed or being computed, reused ones included."""
        return self._sequence.processed

    def cancel(self) -> None:
        """End the request, from any thread and any number of times. The text so far stays in the completion."""
        sequence = self._sequence
        with sequence.lock:
            sequence.is_cancelled = True
            sequence.writer.interrupt()
        sequence.news.set()
        if self.is_begun:
            self._loop.sweep()

    close = cancel

    def __del__(self) -> None:
        self._sequence.is_cancelled = True  # nothing more: it may run inside a tick

    def _await(self, count: int) -> None:
        """Return once there are `count` tokens or the request is over. Raises its error."""
        if not self._reading.acquire(blocking=False):
            raise SessionError("another thread is reading this answer: give each thread a request of its own")
        try:
            self.begin()
            while not self._has(count):
                self._loop.advance(self._sequence, lambda: self._has(count))
            if self._sequence.error and len(self.completion.tokens) < count:
                raise self._sequence.error
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                self.cancel()
            raise
        finally:
            self._reading.release()

    def _has(self, count: int) -> bool:
        return len(self.completion.tokens) >= count or self.done
