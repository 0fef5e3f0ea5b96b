"""A request, its state while it is served, and the answer that its consumer reads."""

from __future__ import annotations

import enum
import itertools
import math
import queue
import threading
from collections import abc, deque
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from mlx_llama.core.answers.completion import Completion, Token, Writer
from mlx_llama.core.answers.dry import Dry
from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.answers.hooks import Hooks
from mlx_llama.core.answers.thinking import AnyConstraint, Thinking
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import NumericalError, SessionError
from mlx_llama.core.options import GenerationOptions, Resolved
from mlx_llama.core.system.forks import make_lock
from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import (
    Tool,
    ToolCall,
    ToolDelta,
    ToolFormat,
    ToolParser,
    write_answer,
)

from .drafts import Speculation

NO_ROW = -1
Piece = str | Thought | ToolDelta  # a part of an answer
Shown = TypeVar("Shown")  # the pieces of an answer beside thoughts: str, or ToolDelta too


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
    form: ToolFormat | None = None  # the format of calls; None if no tools are offered
    tools: abc.Sequence[Tool] = ()  # on offer
    must_call: bool = False  # the answer is a call: an unfinished one is no text
    reuses: bool = True  # cached prefixes of the prompt
    # time limit from the first token, applied once the text has a line break
    decode_seconds: float | None = None
    hooks: Hooks = Hooks()
    thinking: Thinking | None = None  # thoughts of the answer; None: all is text
    begun: int = 0  # last tokens of the prompt that are the beginning of the answer
    # most likely tokens to report at each position of the prompt; None: no log-probabilities of it
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
    parser: ToolParser | None = None  # splits off calls, in the thread that reads
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
    row: int = NO_ROW  # in the cache
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
    def is_over(self) -> bool:
        """True once no token follows."""
        return self.status is Status.ENDED or self.is_cancelled

    def has(self, count: float) -> bool:
        """True once the answer has `count` tokens or is over."""
        is_over = self.status is Status.ENDED or self.is_cancelled
        return is_over or len(self.writer.completion.tokens) >= count

    @property
    def text(self) -> str:
        """The answer's text without calls, as far as it was read."""
        return self.parser.text if self.parser else self.writer.completion.text

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that were read; the last may be unfinished."""
        return self.parser.calls if self.parser else []

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
    """The loop, as an answer uses it."""

    def enqueue(self, sequence: Sequence) -> None: ...
    # runs or awaits ticks unless it has so many tokens
    def advance(self, sequence: Sequence, count: float) -> None: ...
    def sweep(self) -> None: ...  # ends cancelled requests soon


class Turn:
    """A conversation's part in an answer; this one is none."""

    makes_calls = False  # calls are made by `go_on`, so they are no pieces

    def start(self) -> None:
        """Called before the first piece; its errors are raised there."""

    def go_on(self, answer: Answer) -> Sequence | None:
        """Make the calls of a round that has ended; the next round, None if there is none."""
        return None

    def finish(self, answer: Answer) -> None:
        """Called once, when the answer has ended or is closed."""


class Answer(Generic[Shown]):
    """An answer as it is generated: an iterator of pieces of text, and of parts of calls where the
    caller makes them. `pieces` has the thoughts, too. `completion` grows with the pieces and is
    final after the last; after calls that the answer makes itself it is another one.

    One thread reads at a time; any thread may close it. Computing begins with the first piece, or
    `begin`. An answer that is dropped ends its request. Raises the request's error, and
    SessionError in a thread that reads while another one does.
    """

    def __init__(self, sequence: Sequence, loop: Ticker, turn: Turn | None = None):
        self._take(sequence)
        self._loop, self._turn = loop, turn or Turn()
        self._pieces: deque[Any] = deque()  # that were not handed out
        self._reading = threading.Lock()
        self._ending = make_lock()
        self.is_begun = self.is_closed = False

    def _take(self, sequence: Sequence) -> None:
        """Begin a round."""
        self._sequence = sequence
        self.count = 0  # tokens of the round that were split into pieces
        self._is_split = False  # all of it

    @property
    def completion(self) -> Completion:
        """The completion so far; with tools, that of the newest answer to the question."""
        return self._sequence.writer.completion

    @property
    def text(self) -> str:
        """The text so far without calls; with tools, that of the newest answer."""
        return self._sequence.text

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far; the last may be unfinished."""
        return self._sequence.calls

    def messages(self) -> list[dict[str, Any]]:
        """The answer as messages. Arguments that are no JSON object become {}."""
        return [write_answer(self.text, self.completion.reasoning, self.calls)]

    @property
    def done(self) -> bool:
        """True once the answer is complete, closed or failed."""
        return self._sequence.is_over

    @property
    def error(self) -> Exception | None:
        """The exception that ended the request; None if it did not fail."""
        return self._sequence.error

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens of the prompt that are computed or being computed, reused ones included, and all
        of them.
        """
        return self._sequence.processed, self._sequence.prompt_length

    def begin(self) -> Answer[Shown]:
        """Queue the request, once."""
        if not self.is_begun:
            self._turn.start()
            self.is_begun = True
            self._loop.enqueue(self._sequence)
        return self

    def __iter__(self) -> abc.Iterator[Shown]:
        return self

    def __next__(self) -> Shown:
        while isinstance(piece := self.read(), Thought):
            pass
        if piece is None:
            raise StopIteration
        return piece

    def pieces(self) -> abc.Iterator[Shown | Thought]:
        """All pieces, those of a thought as `Thought`."""
        return iter(self.read, None)

    def finish(self) -> Completion:
        """Generate to the end and return the completion, whose text still contains the calls."""
        self._read(math.inf)
        return self.completion

    def tokens(self) -> abc.Iterator[Token]:
        """The tokens as they come, from the first one on, for an answer without text."""
        for count in itertools.count(1):
            self._read(count)
            if count > len(self.completion.tokens):
                return
            yield self.completion.tokens[count - 1]

    def read(self) -> Shown | Thought | None:
        """The next piece; None at the end."""
        return self._read(0)

    def _read(self, most: float) -> Any:
        """The next piece, or None at the end. most: 0, or None once there are so many tokens."""
        if not self._reading.acquire(blocking=False):
            raise SessionError("another thread is reading this answer: use one request per thread")
        try:
            while not self.is_closed:
                if self._pieces and not most:
                    return self._pieces.popleft()
                sequence, count = self._sequence, self.count
                is_last = sequence.is_over  # read before the tokens, so that none is missed
                tokens = sequence.writer.completion.tokens
                if len(tokens) >= most > 0:
                    return None
                if not self.is_begun:
                    self.begin()
                if count < len(tokens):
                    self._pieces += self._split(tokens[count])
                elif not is_last:
                    self._loop.advance(sequence, most or count + 1)
                elif sequence.error:
                    raise sequence.error
                elif not self._is_split:
                    self._pieces += self._split(None)
                else:
                    self._go_on()
            return None
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C
                self.close()
            elif self.done:
                self._settle()
            raise
        finally:
            self._reading.release()

    def steps(self, count: int, is_last: bool) -> abc.Iterator[tuple[Token | None, list[Piece]]]:
        """Each of the first `count` tokens, which are there, that was not split, with the pieces
        that it completes; and None with the rest if these are all. Does not wait.
        """
        while self.count < count:
            token = self.completion.tokens[self.count]
            yield token, self._split(token)
        if is_last and not self._is_split:
            yield None, self._split(None)

    def _split(self, token: Token | None) -> list[Piece]:
        """Pieces that the next token completes. None: those that are left at the end."""
        parser, pieces = self._sequence.parser, list[Piece]()
        if token is None:
            self._is_split = True
            pieces += parser.finish() if parser else ()
            if not self.calls:
                self.completion.schema = self._sequence.options.schema
        else:
            self.count += 1
            if token.thought:
                pieces.append(Thought(token.thought))
            if token.text:
                pieces += parser.push(token.text) if parser else (token.text,)
        if self._turn.makes_calls:
            pieces = [piece for piece in pieces if not isinstance(piece, ToolDelta)]
        return pieces

    def _go_on(self) -> None:
        """Begin the next round, or end."""
        try:
            sequence = self._turn.go_on(self)
        except BaseException:
            self.close()
            raise
        if sequence is None:
            self.is_closed = True
            self._settle()
            return
        self._take(sequence)
        self._loop.enqueue(sequence)
        if self.is_closed:  # by another thread in between
            self.close()

    def close(self) -> None:
        """Stop generating, from any thread, any number of times. The text and the rounds so far
        stay; a function that runs is not stopped.
        """
        self.is_closed = True
        sequence = self._sequence
        with sequence.lock:
            sequence.is_cancelled = True
            sequence.writer.interrupt()
        if news := sequence.news:
            news.put(None)
        if self.is_begun:
            self._loop.sweep()
            self._settle()

    cancel = close

    def _settle(self) -> None:
        with self._ending:
            turn, self._turn = self._turn, Turn()
        turn.finish(self)

    def __del__(self) -> None:
        self._sequence.is_cancelled = True  # only this: __del__ may run inside a tick
