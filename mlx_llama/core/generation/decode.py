"""Prefill and decode of one request: the only loop that launches and reads.

A token costs one step, one launch and one read. A device that works by itself receives step n+1 before step n is read,
so that it never waits for the host; the surplus step at the end is trimmed from the cache by the caller. Speculation
(speculate.py) yields several tokens per launch and read, the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mlx_llama.core.backends.interface import Array, Cache, Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.models import rope

from .completion import Completion
from .options import GenerationOptions
from .speculate import Drafter, Speculation
from .steps import Steps


@dataclass
class Request:
    """A prompt and the conditions of its answer."""

    prompt: list[int]  # continues the tokens in the cache
    cache: Cache
    options: GenerationOptions
    limit: int  # most tokens to generate: max_tokens, or what the context has room for
    eos: frozenset[int]  # end tokens
    completion: Completion  # filled while tokens come
    drafter: Drafter | None = None  # knows the text up to the prompt's end


@dataclass
class Step:
    """A launched step."""

    sampled: Array  # int32 [1, T], on the device: the next token after each position
    drafts: list[int] = field(default_factory=list)  # guesses that the step verifies: T - 1 of them


class Clock:
    """Times of a completion. Time that the consumer spends on a token is `away` and does not count."""

    def __init__(self, completion: Completion):
        self.completion = completion
        self.started = time.perf_counter()
        self.first: float | None = None
        self.away = 0.0

    def note_read(self) -> None:
        """A token was read just now."""
        now = time.perf_counter()
        if self.first is None:
            self.first = now
            self.completion.prefill_seconds = now - self.started
        self.completion.decode_seconds = now - self.first - self.away


class Decode:
    """Decodes one request. The cache may end up ahead of the tokens yielded: trim it to those."""

    def __init__(self, backend: Backend, model: Model, request: Request):
        self.backend = backend
        self.model = model
        self.request = request
        self.cache = request.cache
        self.sampler = backend.sampler(request.options)
        self.steps = Steps(backend, request.completion)
        self.speculation = Speculation(request.drafter, request.eos, request.completion, model.verify_width)
        self.left = request.limit  # tokens that may still be read
        self.is_finished = request.limit < 1

    def tokens(self) -> Iterator[int]:
        """Generated token ids, until an end token or the limit. Sets the completion's finish_reason.

        Raises ContextError where memory has no room for the prompt.
        """
        step: Step | None = self.prefill()
        while step and not self.is_finished:
            following = self.run_ahead(step)
            tokens = self.read(step)
            if self.backend.runs_ahead:  # the device works while the consumer looks at the tokens
                following = following or self.launch_next()
            yield from self.show(tokens)
            step = following or self.launch_next()

    def prefill(self) -> Step:
        """Launch the whole prompt; the returned step holds the first token."""
        prompt, cache = self.request.prompt, self.cache
        cache.check_memory(1, cache.length + len(prompt))  # before a minute of prefill, not after it
        self.clock = Clock(self.request.completion)
        chunk = self.choose_chunk()
        # Sample in the last chunk's step, which saves one pass over the weights.
        rest = (len(prompt) - 1) // chunk * chunk
        self.steps.prefill(self.model, prompt[:rest], cache, chunk)
        return Step(self.steps.launch(self.model, np.array([prompt[rest:]], np.int32), cache, self.sampler))

    def choose_chunk(self) -> int:
        """Prompt tokens per evaluation."""
        config, length = self.model.config, len(self.request.prompt)
        if rope.length_dependent(config) and self.cache.length + length > config.max_position_embeddings:
            return length  # each chunk would be rotated for another length
        return self.request.options.prefill_step_size

    def run_ahead(self, step: Step) -> Step | None:
        """Launch the step after `step`, which is not read yet; None where that cannot be."""
        # A launched step cannot be cancelled, so do not run ahead of a possible draft.
        if not self.backend.runs_ahead or step.drafts or self.left == 1 or self.speculation.may_draft_next():
            return None
        return Step(self.steps.launch(self.model, step.sampled, self.cache, self.sampler))

    def read(self, step: Step) -> list[int]:
        """Wait for `step`; returns the token or, after a verification, the tokens that it gave."""
        sampled = self.steps.read_all(step.sampled) if step.drafts else [self.steps.read(step.sampled)]
        self.clock.note_read()
        tokens = self.speculation.accept(step.drafts, sampled)
        self.last, self.last_on_device = tokens[-1], step.sampled
        if step.drafts:
            self.cache.trim(self.cache.length - len(sampled) + len(tokens))
            self.last_on_device = step.sampled[:, len(tokens) - 1:len(tokens)]
        self.left -= len(tokens)
        self.is_finished = self.left == 0 or self.last in self.request.eos
        return tokens

    def launch_next(self) -> Step | None:
        """Launch the step after the last token read, with drafts if there are any; None after the end."""
        if self.is_finished:
            return None
        if drafts := self.speculation.draft(self.left - 1, self.steps):
            tokens = [self.last, *drafts]
            return Step(self.steps.launch_verification(self.model, tokens, self.cache, self.sampler), drafts)
        return Step(self.steps.launch(self.model, self.last_on_device, self.cache, self.sampler))

    def show(self, tokens: list[int]) -> Iterator[int]:
        """Yield `tokens` and record them in the completion."""
        completion, request = self.request.completion, self.request
        for token in tokens:
            completion.tokens.append(token)
            if token in request.eos:
                completion.finish_reason = "eos"
            elif len(completion.tokens) == request.limit:
                completion.finish_reason = "length" if request.limit == request.options.max_tokens else "context"
            shown = time.perf_counter()
            yield token
            self.clock.away += time.perf_counter() - shown
