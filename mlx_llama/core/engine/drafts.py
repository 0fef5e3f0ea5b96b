"""Speculative decoding: guess the next tokens, and verify several positions in one step.

A step is bound by reading the weights, for one position or for a few, so every correct guess saves
most of a step (Leviathan, Kalman and Matias 2023, arXiv 2211.17192). Guesses come from the text so
far (Saxena 2023, "Prompt Lookup Decoding"; transformers' `prompt_lookup_num_tokens`) or from a
smaller model with the same vocabulary.

Guesses do not change the text, with or without temperature: sampling is argmax(logits + noise), the
noise a function of seed and position (rng.py), so the tokens before a position determine its token.
A guess is accepted only if it equals that token; this replaces the paper's rejection sampling. The
exception is rounding: a product over several positions may round differently from a product over
a single position and flip a tie in the last bits. The CPU's compiled kernels are bit-identical.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_llama.core.answers.completion import Writer
from mlx_llama.core.backends.interface import Array, Cache, Model, Runtime, SamplingBatch
from mlx_llama.core.files.checkpoint import Checkpoint

from .rows import common_prefix

MAX_NGRAM, MIN_NGRAM = 3, 2  # tokens at the end of the text that are looked up in it
# per verification; a lookup costs nothing, a draft model a step per draft
MAX_LOOKUP_DRAFTS, MAX_MODEL_DRAFTS = 8, 4
FIRST_DRAFTS, MIN_DRAFTS = 4, 2  # drafts of the first verification, and at least after wrong ones
RATED_DRAFTS = 24  # latest drafts that decide whether speculation goes on
# Required share of correct drafts. On a CPU 3 positions cost 1.3 to 1.6 times as much as one (AVX2,
# TinyLlama's shapes), and two drafts with a share of 0.3 give 1.6 tokens. Where memory bandwidth is
# the only limit, any share pays.
MIN_ACCEPTANCE = 0.3
COMPARED_PIECES = 4096  # pieces of two vocabularies that are compared


class PromptLookup:
    """Drafts the tokens after the latest earlier occurrence of the last three tokens, or two."""

    kind, max_drafts = "prompt", MAX_LOOKUP_DRAFTS

    def __init__(self, tokens: Sequence[int]):
        self.tokens = tokens
        # n-gram -> index of the token after its latest occurrence
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # tokens whose n-grams are in `_after`
        self._index()

    def _index(self) -> None:
        tokens = self.tokens
        for at in range(self._indexed, len(tokens)):
            for n in range(MIN_NGRAM - 1, min(MAX_NGRAM, at) + 1):
                self._after[tuple(tokens[at - n : at])] = at
        self._indexed = len(tokens)

    def may_draft_next(self) -> bool:
        """False where no next token can complete a known n-gram."""
        self._index()
        return tuple(self.tokens[1 - MIN_NGRAM :]) in self._after

    def draft(self, count: int, writer: Writer | None = None) -> list[int]:
        """Up to `count` tokens. The source continues in the draft, which repeats a phrase."""
        self._index()
        after, tokens = self._after, self.tokens
        start = after.get(tuple(tokens[-MAX_NGRAM:])) or after.get(tuple(tokens[-MIN_NGRAM:]))
        drafts: list[int] = []
        for source in range(start, start + count) if start else ():
            beyond = source - len(tokens)
            drafts.append(tokens[source] if beyond < 0 else drafts[beyond])
        return drafts


class ModelDrafts:
    """Drafts of a smaller model for a row, in a cache of its own with the same rows. It samples
    with the main model's noise, and prefills the prompt with it, chunk by chunk.
    """

    kind, max_drafts = "model", MAX_MODEL_DRAFTS

    def __init__(self, runtime: Runtime, model: Model, cache: Cache, row: int):
        self.runtime, self.model, self.cache, self.row = runtime, model, cache, row
        self.tokens: Sequence[int] = ()  # the row holds their beginning, then `_guesses`
        self._guesses: list[int] = []
        self._start = 0  # position of the first guess
        self._sampling: SamplingBatch | None = None
        self._chunk = 1

    @property
    def length(self) -> int:
        """Positions that the draft model's row holds."""
        return self.cache.lengths[self.row]

    def begin(self, tokens: Sequence[int], sampling: SamplingBatch, chunk: int) -> None:
        """Replace the text; the row keeps the common prefix. chunk: tokens per evaluation."""
        self.trim_guesses()
        self._trim(common_prefix(self.tokens, tokens))
        self.tokens, self._sampling, self._chunk = tokens, sampling, chunk

    def prefill(self, end: int) -> None:
        """Prefill the text up to position `end`, without the last token."""
        end = min(end, len(self.tokens) - 1, self.cache.capacity)
        for start in range(self.length, end, self._chunk):
            ids = np.array([self.tokens[start : min(start + self._chunk, end)]], np.int32)
            self.model.forward(ids, start, self.cache, rows=[self.row])
            self.runtime.launch(self.cache.arrays())

    def may_draft_next(self) -> bool:
        """True until the draft model's context is full."""
        return len(self.tokens) < self.cache.capacity

    def draft(self, count: int, writer: Writer) -> list[int]:
        """Up to `count` tokens: a step of the draft model for each, one read for all."""
        count = min(count, self.cache.capacity - len(self.tokens) + 1)
        if count < 1 or self._sampling is None:
            return []
        self.trim_guesses()
        whole = (len(self.tokens) - 1 - self.length) // self._chunk * self._chunk
        self.prefill(self.length + whole)
        feed, drafts = np.array([self.tokens[self.length :]], np.int32), list[Array]()
        while len(drafts) < count:
            feed = self.model.step(feed, self.length, self.cache, self._sampling, rows=[self.row])
            self.runtime.launch([feed])
            drafts.append(feed)
        writer.completion.launches += count
        writer.count_read(sum(array.nbytes for array in drafts))
        self._start, self._guesses = len(self.tokens), self.runtime.read(drafts)
        return self._guesses

    def trim_guesses(self) -> None:
        """Keep the guesses that became text, without the last token, which a step needs."""
        end = len(self.tokens) - 1
        if self._guesses:
            end = min(end, self._start + common_prefix(self._guesses, self.tokens[self._start :]))
            self._guesses = []
        self._trim(max(0, end))

    def _trim(self, length: int) -> None:
        self.cache.trim(min(self.length, length), self.row)


class Pace:
    """The number of tokens to draft, and when to give up: twice as many after drafts that were all
    correct, else one more than were, so that wrong guesses stay cheap.
    """

    def __init__(self, maximum: int):
        self.maximum = maximum
        self.next = min(FIRST_DRAFTS, maximum)
        # (drafted, accepted) of the latest verifications
        self._recent: deque[tuple[int, int]] = deque()

    def update(self, drafted: int, accepted: int) -> str | None:
        """Account for a verification; returns the reason to give up, or None to go on."""
        self.next = min(
            self.maximum, 2 * self.next if accepted == drafted else max(MIN_DRAFTS, accepted + 1)
        )
        self._recent.append((drafted, accepted))
        while sum(drafted for drafted, _ in self._recent) - self._recent[0][0] >= RATED_DRAFTS:
            self._recent.popleft()
        drafted, accepted = (sum(column) for column in zip(*self._recent))
        if drafted < RATED_DRAFTS or accepted >= MIN_ACCEPTANCE * drafted:
            return None
        share = f"{accepted} of the last {drafted} drafted tokens were right"
        return f"speculation was switched off: {share}"


@dataclass(eq=False)
class Speculation:
    """Drafts of one answer, if it has a drafter; its completion counts the accepted ones."""

    drafter: PromptLookup | ModelDrafts | None
    writer: Writer
    width: int = 16  # maximum positions of a verification
    kind: str = "none"  # "none", "prompt" or "model", as requested

    def __post_init__(self) -> None:
        most = MAX_MODEL_DRAFTS
        if self.drafter:
            self.kind, most = self.drafter.kind, self.drafter.max_drafts
        self.pace = Pace(min(most, self.width - 1))

    @property
    def wants_model(self) -> bool:
        """True if drafts of a model are requested and not switched off."""
        return self.kind == "model" and self.writer.completion.speculation_ended is None

    def leave_row(self) -> None:
        """Drop a drafter that belongs to a row."""
        if self.kind == "model":
            self.drafter = None

    def prefill(self, end: int) -> None:
        """Compute the draft model's part of a prompt, up to position `end`."""
        if isinstance(self.drafter, ModelDrafts):
            self.drafter.prefill(end)

    def may_draft_next(self) -> bool:
        """False: no drafts after the next token, whatever it is."""
        return self.drafter is not None and self.drafter.may_draft_next()

    def draft(self, room: int) -> list[int]:
        """At most `room` guesses; a verification gives one token more."""
        if self.drafter is None or room < 1:
            return []
        return self._cut_after_eos(self.drafter.draft(min(self.pace.next, room), self.writer))

    def begin(
        self, drafts: ModelDrafts, tokens: Sequence[int], sampling: SamplingBatch, chunk: int
    ) -> None:
        """Draft with the smaller model. See ModelDrafts.begin."""
        try:
            drafts.begin(tokens, sampling, chunk)
            self.drafter = drafts
        except Exception as error:
            self.end(error)

    def end(self, error: Exception) -> None:
        """Continue without drafts, which does not change the text."""
        self.writer.end_speculation(
            f"speculation was switched off: {error}", len(self.writer.completion.tokens)
        )
        self.drafter = None

    def accept(self, drafts: list[int], sampled: list[int]) -> list[int]:
        """The prefix of `sampled`, the tokens after the text and after each of `drafts`, that
        continues the text: each draft before it was the token sampled in its place.
        """
        if not drafts:
            return sampled
        correct = common_prefix(drafts, sampled)
        tokens = self._cut_after_eos(sampled[: correct + 1])
        self.writer.completion.drafted += len(drafts)
        self.writer.completion.accepted += correct
        if reason := self.pace.update(len(drafts), correct):
            self.writer.end_speculation(reason, len(self.writer.completion.tokens) + len(tokens))
            self.drafter = None
        return tokens

    def _cut_after_eos(self, tokens: list[int]) -> list[int]:
        eos = self.writer.eos
        return next((tokens[: i + 1] for i, token in enumerate(tokens) if token in eos), tokens)


def compare_vocabularies(draft: Checkpoint, main: Checkpoint) -> str:
    """The first difference between two vocabularies' sizes and a sample of pieces, "" for none."""
    sizes = [(model.tokenizer.vocab_size, model.config.vocab_size) for model in (draft, main)]
    if sizes[0] != sizes[1]:
        (tokens, rows), (main_tokens, main_rows) = sizes
        return f"{tokens} tokens in {rows} rows and not {main_tokens} in {main_rows}"
    for token in range(0, sizes[0][0], max(1, sizes[0][0] // COMPARED_PIECES)):
        pieces = [model.tokenizer.decode([token], skip_special=False) for model in (draft, main)]
        if pieces[0] != pieces[1]:
            return f"token {token} is {pieces[0]!r:.40} and not {pieces[1]!r:.40}"
    return ""
