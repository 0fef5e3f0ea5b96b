"""Speculative decoding: guess the next tokens cheaply, let the model verify several positions in one step.

A step is bound by reading the weights, whether for one position or a few, so every right guess saves most of a step
(Leviathan, Kalman and Matias 2023, arXiv 2211.17192). Guesses come from what the conversation already says (Saxena
2023, "Prompt Lookup Decoding"; transformers' `prompt_lookup_num_tokens`) or from a smaller model with the same
vocabulary.

What is generated does not depend on the guesses, with or without temperature: sampling here is argmax(logits + noise),
the noise a function of seed and position (core.rng), so the token at a position is settled by the tokens before it. A
guess is accepted only where it is that very token, which takes the place of the paper's rejection sampling. The one
reservation is rounding: a product over several positions may round otherwise than that over one, and turn a tie in the
last bits. On the CPU's compiled path both have the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Model, Sampler

if TYPE_CHECKING:
    from mlx_llama.core.files.checkpoint import Checkpoint

    from .engine import Completion

LONGEST, SHORTEST = 3, 2  # tokens at the end of the text that must have stood in it before
LOOKED_UP, MODELLED = 8, 4  # drafts at most per verification, by kind: looking up costs nothing, a model its steps
FIRST, FEWEST = 4, 2  # drafts of the first verification, and after wrong ones
WATCHED = 24  # drafted tokens that are looked back at
# Share of them that must be right. On a CPU 3 positions cost 1.3 to 1.6 times what one does (AVX2, TinyLlama's shapes),
# and with two drafts of which 0.3 are right they give 1.6 tokens; where memory alone is the limit, any share pays.
LEAST = 0.3
SAMPLED_PIECES = 4096  # pieces of two vocabularies that are compared


class Steps(Protocol):
    """How the engine launches and reads, counted in the completion."""

    def prefill(self, model: Model, tokens: list[int], cache: Cache, chunk: int) -> None: ...
    def launch(self, model: Model, token: Array, cache: Cache, sampler: Sampler) -> Array: ...
    def read_all(self, *tokens: Array) -> list[int]: ...


class Drafter(Protocol):
    """Where guesses come from. It is told every token of the text by `push`, the prompt's too."""

    kind: str  # as the option speculate names it
    most: int  # drafts at most per verification

    def push(self, token: int) -> None: ...
    def may_follow(self) -> bool: ...  # whether there may be a draft after the next token, whatever it is
    def draft(self, most: int, steps: Steps) -> list[int]: ...  # guesses of what follows, 0 to `most`


class PromptLookup:
    """Drafts what followed the last time that the text's last tokens, three or else two, stood in it."""

    kind, most = "prompt", LOOKED_UP

    def __init__(self, tokens: Sequence[int]):
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of what followed its last occurrence
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """The text goes on with `token`."""
        at = len(self.tokens)
        for n in range(SHORTEST - 1, min(LONGEST, at) + 1):
            self._after[tuple(self.tokens[at - n:])] = at
        self.tokens.append(token)

    def may_follow(self) -> bool:
        """False where no token can end an n-gram that is known, since what stands before it was never followed."""
        return tuple(self.tokens[1 - SHORTEST:]) in self._after

    def draft(self, most: int, steps: Steps | None = None) -> list[int]:
        """Up to `most` tokens; where the source runs into the text's end it goes on with the draft itself, so that a
        repeated phrase is drafted as often as it takes."""
        text = list(self.tokens[-LONGEST:])
        start = next((self._after[gram] for n in range(min(LONGEST, len(text)), SHORTEST - 1, -1)
                      if (gram := tuple(text[-n:])) in self._after), None)
        if start is None:
            return []
        drafts: list[int] = []
        for source in range(start, start + most):
            beyond = source - len(self.tokens)
            drafts.append(self.tokens[source] if beyond < 0 else drafts[beyond])
        return drafts


class ModelDrafts:
    """Drafts of a smaller model, with the cache it needs: as the main cache, one per conversation.

    The draft model samples with the same noise as the main one, and so guesses well at a temperature, too. Its cache
    takes in the prompt when the first draft is asked for, after the first token was read; that counts as decoding.
    """

    kind, most = "model", MODELLED

    def __init__(self, model: Model, context: int):
        self.model = model
        # Past the positions that it was made for its guesses would be bad, and under dynamic rope could not be trimmed.
        self.cache = model.make_cache(min(context, model.config.max_position_embeddings))
        self.held: list[int] = []  # the text; the cache's rows are of its beginning, then of `_guesses`
        self._guesses: list[int] = []
        self._sampler: Sampler | None = None
        self._chunk = 1

    def begin(self, tokens: Sequence[int], sampler: Sampler, chunk: int) -> None:
        """Another text, of which the cache keeps what it has in common with the last. chunk: prompt tokens at once."""
        common = 0
        for held, wanted in zip(self.held, tokens):
            if held != wanted:
                break
            common += 1
        self.cache.trim(min(self.cache.length, common))
        self.held, self._guesses = list(tokens), []
        self._sampler, self._chunk = sampler, chunk

    def push(self, token: int) -> None:
        """The text goes on with `token`: if that was guessed, what the cache knows of it stays."""
        position = len(self.held)
        if self._guesses[:1] == [token]:
            del self._guesses[0]
        else:
            self._guesses = []
            self.cache.trim(min(self.cache.length, position))
        self.held.append(token)

    def may_follow(self) -> bool:
        """A model has always something to say, as long as its context lasts."""
        return len(self.held) < self.cache.capacity

    def draft(self, most: int, steps: Steps) -> list[int]:
        """Up to `most` tokens, one step of the draft model each and one wait for all of them."""
        most = min(most, self.cache.capacity - len(self.held) + 1)
        if most < 1:
            return []
        feed = self.held[self.cache.length:]
        whole = (len(feed) - 1) // self._chunk * self._chunk
        steps.prefill(self.model, feed[:whole], self.cache, self._chunk)
        drafts = [steps.launch(self.model, np.array([feed[whole:]], np.int32), self.cache, self._sampler)]
        while len(drafts) < most:
            drafts.append(steps.launch(self.model, drafts[-1], self.cache, self._sampler))
        self._guesses = steps.read_all(*drafts)
        return list(self._guesses)


class Pace:
    """How many tokens to draft, and when to stop drafting, from how many were right.

    All right: twice as many the next time; otherwise one more than were right, so that a wrong track costs little.
    """

    def __init__(self, most: int):
        self.most = most
        self.next = min(FIRST, most)
        self._recent: deque[tuple[int, int]] = deque()  # (drafted, right) of the last verifications

    def count(self, drafted: int, right: int) -> str | None:
        """Take a verification into account; returns why to stop, or None to go on."""
        self.next = min(self.most, 2 * self.next if right == drafted else max(FEWEST, right + 1))
        self._recent.append((drafted, right))
        while sum(drafted for drafted, _ in self._recent) - self._recent[0][0] >= WATCHED:
            self._recent.popleft()
        drafted, right = (sum(column) for column in zip(*self._recent))
        if drafted < WATCHED or right >= LEAST * drafted:
            return None
        return f"speculation was switched off: {right} of the last {drafted} drafted tokens were right"


class Speculation:
    """One answer's drafts and what became of them, counted in its completion. Without a drafter there are none.

    ends: end tokens. width: positions of a verification at most.
    """

    def __init__(self, drafter: Drafter | None, ends: frozenset[int], completion: Completion, width: int = 16):
        self.drafter = drafter
        self.ends = ends
        self.completion = completion
        self.pace = Pace(min(drafter.most, width - 1)) if drafter else None

    def may_follow(self) -> bool:
        """Whether there may be drafts after the next token, whatever it is."""
        return self.drafter is not None and self.drafter.may_follow()

    def draft(self, room: int, steps: Steps) -> list[int]:
        """Guesses of what follows, at most `room`: a verification gives one token more than it is given drafts."""
        if self.drafter is None or room < 1:
            return []
        return self._until_end(self.drafter.draft(min(self.pace.next, room), steps))

    def accepted(self, drafts: list[int], sampled: list[int]) -> list[int]:
        """The tokens that the text goes on with: as many of `sampled` as follow from tokens of the text.

        sampled: the token after the text and after each of `drafts`; the first always counts, the next as long as the
        draft before it is what was sampled there.
        """
        right = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
        fresh = self._until_end(sampled[:right + 1])
        for token in fresh if self.drafter else ():
            self.drafter.push(token)
        if drafts:
            self.completion.drafted += len(drafts)
            self.completion.accepted += right
            if reason := self.pace.count(len(drafts), right):
                self.completion.notices.append(reason)
                self.completion.speculation_ended = len(self.completion.tokens) + len(fresh)
                self.drafter = None
        return fresh

    def _until_end(self, tokens: list[int]) -> list[int]:
        # What follows an end token is never shown.
        return next((tokens[:i + 1] for i, token in enumerate(tokens) if token in self.ends), tokens)


def difference(draft: Checkpoint, main: Checkpoint) -> str:
    """In what the vocabularies of two models differ, "" if in nothing that was looked at: sizes, and pieces spread over
    them. A difference that goes unseen costs speed only, since the main model verifies."""
    sizes = [(one.tokenizer.vocab_size, one.config.vocab_size) for one in (draft, main)]
    if sizes[0] != sizes[1]:
        return "{} tokens in {} rows and not {} in {}".format(*sizes[0], *sizes[1])
    for token in range(0, sizes[0][0], max(1, sizes[0][0] // SAMPLED_PIECES)):
        pieces = [one.tokenizer.decode([token], skip_special=False) for one in (draft, main)]
        if pieces[0] != pieces[1]:
            return f"token {token} is {pieces[0]!r:.40} and not {pieces[1]!r:.40}"
    return ""
