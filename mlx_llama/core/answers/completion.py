"""The result of a generation (text, tokens, timings, counts) and the class that writes it."""

from __future__ import annotations

import codecs
import html
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import IncompleteAnswerError, shorten
from mlx_llama.core.text.thoughts import Thought, ThoughtParser
from mlx_llama.core.text.tokenizer import StreamDecoder, Tokenizer

from .schema import Schema
from .stops import Stops, find_period

RATES = ("prompt_tps", "decode_tps", "evaluations_per_token", "bytes_per_token")
_CUTS = {  # reasons why an answer ends early: what happened, and the remedy
    "length": ("reached `max_tokens`", "raise `max_tokens`, or ask for less"),
    "context": ("filled the context", "raise `ctx_size`, or shorten the prompt"),
    "stop": ("reached a stop string or token", "leave `stop` and `stop_token_ids` out"),
    "interrupted": ("was interrupted", "read it to the end"),
    "error": ("ended with an error", "see its error"),
}
SHOWN_CHARACTERS = 40  # text in a repr


class Token(int):
    """A token id with its text and time."""

    text: str = ""  # that it completed; "" where a character or a stop string may be unfinished
    thought: str = ""  # the same of a thought
    seconds: float = 0.0  # since the request was submitted
    logprobs: TokenLogprobs | None = None  # None unless the option asks for them
    # log-probabilities of the tokens that `text` completed, end tokens excluded
    entries: tuple[Entry, ...] = ()


class Aside(NamedTuple):
    """A text to show beside an answer."""

    text: str
    is_first: bool = False  # shown before the answer


@dataclass(repr=False)
class Completion:
    """An answer and its receipt. Times in seconds."""

    # the whole answer; if it continues an earlier one (Request.begun), with that text
    text: str = ""
    # generated ids with text and times, the end token included
    tokens: list[Token] = field(default_factory=list)
    # None while it is being generated, then "eos" (an end token, or the end of its grammar), "stop"
    # (a stop string or token), "length" (max_tokens, or see `repeated`), "context" (the context or
    # the memory of the cache is full), "interrupted" (by the consumer) or "error" (see `error`)
    finish_reason: str | None = None
    stop: str | int | None = None  # the stop string that matched, or the id of the stop token
    # tokens of the passage that its end repeats, if it was ended for that (repetition_limit), or 0
    repeated: int = 0
    error: str | None = None  # message of the error that ended it
    reasoning: str = ""  # the thought before the answer, which is no part of the text
    reasoning_tokens: int = 0  # tokens of the thought and of its end
    prompt_tokens: int = 0
    reused_tokens: int = 0  # tokens of the prompt that were in the cache already
    prefill_seconds: float = 0.0  # from its first chunk until the first token was read
    decode_seconds: float = 0.0  # from the first token to the last, without the consumer's time
    # steps launched for it; one more than tokens if a step ran ahead of an end token
    launches: int = 0
    waits: int = 0  # reads from the device that brought its tokens
    read_bytes: int = 0  # bytes of its tokens
    drafted: int = 0  # tokens that speculation guessed and the model verified
    accepted: int = 0  # correct ones among them
    # tokens generated when speculation was switched off; None: it was not
    speculation_ended: int | None = None
    backend: str = ""
    device: str = ""
    dtype: str = ""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    # per option: "user", "checkpoint" or "default"
    origins: dict[str, str] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    # one per token of the prompt, None for the first; [] unless the request asks for them
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    schema: Schema | None = None  # that the answer satisfies if it ended by itself
    asides: list[Aside] = field(default_factory=list)  # by the model's `on_question`

    @property
    def parsed(self) -> Any:
        """The answer as a Python value: of the type passed as schema, else as JSON gives it. None
        without a schema, and while the answer is generated. Raises IncompleteAnswerError for an
        answer that was cut, pydantic's ValidationError if the type is stricter than its schema.
        """
        if self.schema is None or self.finish_reason is None:
            return None
        if self.finish_reason == "eos":
            return self.schema.parse(self.text)
        reason = self.finish_reason
        cause, remedy = _CUTS.get(reason, (f"was ended ({reason})", "ask again"))
        raise IncompleteAnswerError(
            f"parsed: the answer {cause} after {len(self.tokens)} tokens, before its JSON was "
            f"complete: {remedy}"
        )

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens processed (not reused) per second."""
        count, seconds = self.prompt_tokens - self.reused_tokens, self.prefill_seconds
        return count / seconds if seconds else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first."""
        count, seconds = len(self.tokens) - 1, self.decode_seconds
        return count / seconds if seconds and count > 0 else 0.0

    @property
    def evaluations_per_token(self) -> float:
        """Reads from the device per generated token: 1 without speculation, less with it."""
        return self.waits / len(self.tokens) if self.tokens else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes read from the device per generated token: 4, the size of a token id."""
        return self.read_bytes / len(self.tokens) if self.tokens else 0.0

    @property
    def see_also(self) -> str:
        """The texts beside the answer."""
        return "\n\n".join(aside.text for aside in self.asides)

    def __str__(self) -> str:
        first = [aside.text for aside in self.asides if aside.is_first]
        last = [aside.text for aside in self.asides if not aside.is_first]
        return "\n\n".join([*first, self.text, *last])

    def __repr__(self) -> str:
        text, reason = shorten(self.text, SHOWN_CHARACTERS), self.finish_reason
        return f"Completion({text!r}, tokens={len(self.tokens)}, finish_reason={reason!r})"

    def _repr_html_(self) -> str:
        """The text, a passage beside it and a line of figures, for notebooks."""
        text = f'<div style="white-space: pre-wrap">{html.escape(str(self))}</div>'
        return f"{text}<small>{html.escape(self._describe_decode())}</small>"

    def _describe_decode(self, thought: str = "") -> str:
        speed = f"{self.decode_tps:.1f} tokens/s"
        return f"{len(self.tokens)} tokens{thought}, {speed}, finish reason {self.finish_reason}"

    def receipt(self) -> dict[str, Any]:
        """All fields but the texts, the rates, and log-probabilities if there are any."""
        others = ("text", "reasoning", "prompt_logprobs", "schema", "asides")
        names = [field.name for field in fields(self) if field.name not in others]
        receipt = {name: getattr(self, name) for name in names}
        receipt |= {"tokens": list(map(int, self.tokens)), **self.tell_logprobs()}
        return receipt | {name: round(getattr(self, name), 3) for name in RATES}

    def tell_logprobs(self) -> dict[str, Any]:
        """tokens and logprobs ([its own, [id, log-probability] of the most likely] each), or {}."""
        known = [token.logprobs for token in self.tokens]
        pairs = [logprobs and [logprobs.logprob, logprobs.top] for logprobs in known]
        return {"tokens": list(map(int, self.tokens)), "logprobs": pairs} if any(pairs) else {}

    def describe_logprobs(self, tokenizer: Tokenizer) -> str:
        """A line per token: its log-probability and the most likely ones'; "" without any."""

        def name(token: int) -> str:
            piece = tokenizer.piece(token)
            return repr(piece.data.decode("utf-8", "backslashreplace")) if piece else f"<{token}>"

        def describe(token: int, logprobs: TokenLogprobs) -> str:
            top = ", ".join(f"{name(other)} {value:.4f}" for other, value in logprobs.top)
            return f"{name(token)} {logprobs.logprob:.4f}" + (f"  of {top}" if top else "")

        return "\n".join(describe(token, token.logprobs) for token in self.tokens if token.logprobs)

    def describe_repetition(self) -> str:
        """A notice about an answer that was ended since it repeats itself; "" for others."""
        if not self.repeated:
            return ""
        passage = "token" if self.repeated == 1 else f"{self.repeated} tokens"
        return (
            f"the answer was ended because it repeats the same {passage} again and again: "
            "`repetition_limit` 0 lets it go on"
        )

    def summary(self) -> str:
        """Speed, counts and notices in a few lines."""
        thought = f" ({self.reasoning_tokens} of a thought)" if self.reasoning_tokens else ""
        return (
            f"prompt: {self.prompt_tokens} tokens, {self.reused_tokens} reused, "
            f"{self.prompt_tps:.1f} tokens/s, first token after {self.prefill_seconds:.3f} "
            f"s\ndecode: {self._describe_decode(thought)}\nevaluations per token: "
            f"{round(self.evaluations_per_token, 3):g} ({self.launches} launched, {self.waits} "
            f"read, {round(self.bytes_per_token, 2):g} bytes per "
            f"token)\n{self._summarize_speculation()}backend: {self.backend} ({self.device}, "
            f"{self.dtype}), seed {self.seed}"
            + "".join(f"\nnote: {notice}" for notice in self.notices)
        )

    def _summarize_speculation(self) -> str:
        kind, end = self.options.get("speculate"), self.speculation_ended
        if kind in (None, "none"):
            return ""
        ended = "" if end is None else f", switched off after {end} tokens"
        counts = f"{self.accepted} of {self.drafted} drafted tokens accepted"
        return f"speculation ({kind}): {counts}{ended}\n"


@dataclass(eq=False)
class Writer:
    """Writes a completion as its tokens are read. Times are busy seconds (see `Scheduler.tick`)."""

    completion: Completion
    max_tokens: int = 2**31  # by the option
    repetition_limit: int = 0  # by the option; 0: the answer may repeat itself
    limit: int = 2**31  # by the context too
    eos: frozenset[int] = frozenset()
    decoder: StreamDecoder | None = None  # None without text
    # strings and tokens that also end the answer
    stops: Stops = field(default_factory=lambda: Stops(()))
    stop_tokens: Collection[int] = ()
    thoughts: ThoughtParser | None = None  # splits them off the text; None: all is text
    decode_seconds: float | None = None  # limit after the first token, from a line break on

    def __post_init__(self) -> None:
        self.stop_tokens = frozenset(self.stop_tokens) - self.eos
        self.submitted = time.perf_counter()
        self.is_finished = False
        self._started: float | None = None
        self._first = 0.0
        self._entries: Entries | None = None  # until a token has log-probabilities

    def resume(self, tokens: Sequence[int]) -> None:
        """Take the tokens that begin the answer, and begin `completion.text` with their text."""
        assert self.decoder is not None
        text = self._split("".join(map(self.decoder.push, tokens)))
        shown = self.stops.push(text)
        if self.stops.matched:  # by a stop string that was set later
            self.stops.forget()
            shown = text
        self.completion.text = shown

    def start(self, now: float, reused: int) -> None:
        """Note the first chunk and the `reused` tokens of the prompt. Later calls do nothing."""
        if self._started is None:
            self._started = now
            self.completion.reused_tokens = reused

    def tell_prefill(self, now: float) -> None:
        """Note that a chunk of the prompt was launched at `now`."""
        self.completion.prefill_seconds = now - (self._started or 0.0)

    def push(
        self, token: int, now: float, is_last: bool = False, logprobs: TokenLogprobs | None = None
    ) -> None:
        """Append a token read at `now`. is_last: its grammar ends."""
        completion, seconds = self.completion, self.decode_seconds
        is_old = seconds is not None and bool(completion.tokens) and now - self._first > seconds
        is_late = is_old and "\n" in completion.text
        if not completion.tokens:
            self._first = now
            completion.prefill_seconds = now - (self._started or 0.0)
        completion.decode_seconds = now - self._first
        if is_last or token in self.eos:
            self._finish("eos")
        elif token in self.stop_tokens:
            self.completion.stop = int(token)
            self._finish("stop")
        elif len(completion.tokens) + 1 == self.limit:
            self._finish("length" if self.limit == self.max_tokens else "context")
        elif is_late:
            self._finish("length")
        elif limit := self.repetition_limit:
            if period := find_period(completion.tokens, token, limit):
                completion.repeated = period
                self.end("length", completion.describe_repetition())
        completion.reasoning_tokens += self.thoughts is not None and self.thoughts.is_thinking
        thought = len(completion.reasoning)
        text = self._decode(token, logprobs) if self.decoder else ""
        completion.text += text
        seconds, is_cut = time.perf_counter() - self.submitted, self.stops.matched is not None
        entries: tuple[Entry, ...] = ()
        if self._entries:
            entries = self._entries.take(len(completion.text), self.is_finished, is_cut)
        read = Token(token)
        read.text, read.seconds, read.logprobs = text, seconds, logprobs
        read.entries, read.thought = entries, completion.reasoning[thought:]
        completion.tokens.append(read)

    def _decode(self, token: int, logprobs: TokenLogprobs | None) -> str:
        """The text that appears with a token. Ends the answer at a stop string."""
        assert self.decoder is not None
        is_end = token in self.eos or token in self.stop_tokens
        decoded = "" if is_end else self.decoder.push(token)
        if logprobs is not None and not is_end:
            if self._entries is None:
                self._entries = Entries(len(self.completion.text) + len(self.stops.withheld))
            self._entries.push(token, logprobs, self.decoder.data(token), decoded)
        text = self._show(decoded)
        if self.is_finished and not self.stops.matched:
            text += self._show(self.decoder.finish(), is_last=True)
            if not self.stops.matched:
                text += self.stops.finish()
        if self.stops.matched:
            self.completion.stop = self.stops.matched
            self._finish("stop")
        return text

    def _show(self, decoded: str, is_last: bool = False) -> str:
        """The text that a decoded piece lets appear, without thoughts and up to a stop string."""
        left = self._split(decoded, is_last) if self.thoughts else decoded
        text = self.stops.push(left) if self.stops.texts else left
        if self._entries:
            self._entries.pair(left, self.thoughts, is_cut=self.stops.matched is not None)
        return text

    def _split(self, text: str, is_last: bool = False) -> str:
        """Move the thoughts of a piece to the completion; returns the rest."""
        if self.thoughts is None:
            return text
        parts = self.thoughts.push(text, is_last)
        for part in parts:
            if isinstance(part, Thought):
                self.completion.reasoning += part.text
        return "".join([part for part in parts if isinstance(part, str)])

    def _finish(self, reason: str) -> None:
        self.completion.finish_reason = reason
        self.is_finished = True

    def end(self, reason: str, notice: str = "") -> None:
        """End the answer without a token."""
        self._finish(reason)
        if notice:
            self.add_notices([notice])

    def interrupt(self) -> None:
        """End the answer for a consumer that left, unless it is complete."""
        self.completion.finish_reason = self.completion.finish_reason or "interrupted"

    def fail(self, error: BaseException) -> None:
        self.completion.error = f"{error}" or type(error).__name__
        self._finish("error")

    def add_notices(self, notices: Sequence[str]) -> None:
        """Add notices, each once."""
        self.completion.notices.extend(
            notice for notice in notices if notice not in self.completion.notices
        )

    def count_read(self, nbytes: int) -> None:
        self.completion.waits += 1
        self.completion.read_bytes += nbytes

    def end_speculation(self, reason: str, tokens: int) -> None:
        """Note that speculation was switched off after `tokens` tokens."""
        self.add_notices([reason])
        self.completion.speculation_ended = tokens


# Log-probabilities beside the text that an answer returns


class Entry(NamedTuple):
    """A token whose text is part of the returned text, and its log-probabilities."""

    id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt
    data: bytes  # its part of the text; of the last token before a stop string, cut there
    start: int  # characters of the text before it


class Entries:
    """Pairs tokens with the returned text, which has no thoughts and marks and may end within a
    token at a stop string.

    A token waits until it is known to be text, and then until its text is returned: it may begin a
    mark, a stop string or a character. So the data of all entries joins to the text, but for bytes
    that are not UTF-8.
    """

    def __init__(self, length: int = 0):
        """length: characters of the text before the first token."""
        self._length = length
        # tokens that may be of a thought or a mark, with the characters that they completed
        self._unsure: list[tuple[int, TokenLogprobs | None, bytes, str]] = []
        self._left = ""  # the text that is left of them so far
        self._waiting: list[tuple[Entry, str]] = []  # to be returned

    def push(self, token: int, logprobs: TokenLogprobs | None, data: bytes, text: str) -> None:
        """Add a token. data: its bytes in the vocabulary; text: characters that it completed."""
        self._unsure.append((token, logprobs, data, text))

    def pair(self, left: str, thoughts: ThoughtParser | None = None, is_cut: bool = False) -> None:
        """Note the text that is left of the newest tokens without thoughts and marks. thoughts: the
        parser that split them off. is_cut: the text ends here, at a stop string.
        """
        self._length += len(left)
        if not self._unsure:
            return
        tokens, left = self._unsure, self._left + left
        self._unsure, self._left = [], ""
        if thoughts and thoughts.is_thinking:
            return
        if thoughts and (thoughts.state == "before" or thoughts.waiting) and not is_cut:
            self._unsure, self._left = tokens, left  # a thought or a mark may begin
            return
        whole = "".join(text for *_, text in tokens)
        if not whole.endswith(left):  # a mark within it was dropped: all is the last token's
            token, logprobs, *_ = tokens[-1]
            tokens, whole = [(token, logprobs, left.encode(), left)], left
        dropped, start = len(whole) - len(left), self._length - len(left)
        for token, logprobs, data, text in tokens:
            mark, text = text[:dropped], text[dropped:]
            is_mark, dropped = dropped > len(mark), dropped - len(mark)
            begun = mark.encode()
            data = data.removeprefix(begun) if data.startswith(begun) else text.encode()
            if is_mark or (mark and not data):
                continue
            try:
                decoded = data.decode()
            except UnicodeDecodeError:  # it begins or ends within a character
                decoded = text
            if decoded != text and decoded.endswith(text):  # a dropped space, or a hidden token
                data = text.encode()
            self._waiting.append((Entry(token, logprobs, data, start), text))
            start += len(text)

    def take(self, length: int, is_last: bool, is_cut: bool) -> tuple[Entry, ...]:
        """Entries of tokens that the text shows now. length: its characters. is_last: the text ends
        here; is_cut: at a stop string.
        """
        waiting, count = self._waiting, 0
        for number, (entry, text) in enumerate(waiting, 1):
            if entry.start >= length if is_cut else entry.start + len(text) > length:
                break
            is_within = _count_begun(entry.data) or (entry.data and not text)  # a character
            if is_last or not is_within:
                count = number
        taken, self._waiting = waiting[:count], waiting[count:]
        if is_cut and taken:
            entry, text = taken[-1]
            rest = text[length - entry.start :].encode()
            if rest and (at := entry.data.rfind(rest)) >= 0:
                taken[-1] = entry._replace(data=entry.data[:at]), text
            elif not rest:
                data = entry.data[: len(entry.data) - _count_begun(entry.data)]
                taken[-1] = entry._replace(data=data), text
        return tuple(entry for entry, _ in taken)


def _count_begun(data: bytes) -> int:
    """Number of bytes at the end that begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def pair_prompt(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[Entry, ...]:
    """Entries of a prompt's tokens, whose data joins to its text without special tokens."""
    decoder, entries, length = tokenizer.stream(starts_text=True), Entries(), 0
    for token, rate in zip(tokens, logprobs, strict=True):
        text = decoder.push(token)
        entries.push(token, rate, decoder.data(token), text)
        entries.pair(text)
        length += len(text)
    return entries.take(length, is_last=True, is_cut=False)
