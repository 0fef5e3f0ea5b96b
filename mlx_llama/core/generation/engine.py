"""Prefill and decode: the only caller of `launch` and `read`, and the one place that decides when to stop.

Per decoded token there is exactly one step, one launch and one read. On a device that works by itself, step n+1 is
launched before token n is read; the one step too many at the end leaves no trace, because the caller's cache is trimmed
to the tokens that were shown. With speculation (core.speculate) one launch and one read may give several tokens, which
are the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mlx_llama.core.backends.interface import Cache, Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import ContextError, OptionsError
from mlx_llama.core.models import rope
from mlx_llama.core.text.tokenizer import Tokenizer

from . import speculate
from .options import GenerationOptions, Resolved


@dataclass
class Completion:
    """An answer and its receipt. Times in seconds.

    finish_reason: "eos" (an end token), "stop" (a stop string), "length" (max_tokens), "context" (the context is
    full), "interrupted" (the consumer left).
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)  # generated ids, the end token included
    finish_reason: str = "interrupted"
    stop: str | None = None  # the stop string that matched
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, already in the cache
    prefill_seconds: float = 0.0  # until the first token was read
    decode_seconds: float = 0.0  # from the first token to the last, without the time the consumer took
    launches: int = 0  # steps launched; one more than tokens where a step ran ahead of an end token
    waits: int = 0  # times the device was waited for, to read one token or a verified run of them
    read_bytes: int = 0  # that came from the device by these reads
    drafted: int = 0  # tokens that speculation guessed and the model verified
    accepted: int = 0  # of these, the right ones
    speculation_ended: int | None = None  # tokens generated when speculation was switched off; None: it was not
    backend: str = ""
    device: str = ""
    dtype: str = ""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # per option: "user", "checkpoint" or "default"
    notices: list[str] = field(default_factory=list)

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens processed (not reused) per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds and len(self.tokens) > 1 else 0.0

    @property
    def evaluations_per_token(self) -> float:
        """Waits for the device per token generated; the engine aims at exactly 1."""
        return self.waits / len(self.tokens) if self.tokens else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes that came from the device per token generated; a token id has 4."""
        return self.read_bytes / len(self.tokens) if self.tokens else 0.0

    def __str__(self) -> str:
        return self.text

    def receipt(self) -> dict[str, Any]:
        """Everything but the text, for `--jsonl` and `--stats`."""
        fields = {name: value for name, value in asdict(self).items() if name != "text"}
        rates = ("prompt_tps", "decode_tps", "evaluations_per_token", "bytes_per_token")
        return fields | {name: round(getattr(self, name), 3) for name in rates}

    def _speculated(self) -> str:
        kind = self.options.get("speculate")
        if kind in (None, "none"):
            return ""
        ended = "" if self.speculation_ended is None else f", switched off after {self.speculation_ended} tokens"
        return f"speculation ({kind}): {self.accepted} of {self.drafted} drafted tokens accepted{ended}\n"

    def summary(self) -> str:
        """A few lines for people."""
        return (
            f"prompt: {self.prompt_tokens} tokens, {self.reused_tokens} reused, {self.prompt_tps:.1f} tokens/s, "
            f"first token after {self.prefill_seconds:.3f} s\n"
            f"decode: {len(self.tokens)} tokens, {self.decode_tps:.1f} tokens/s, finish reason {self.finish_reason}\n"
            f"evaluations per token: {round(self.evaluations_per_token, 3):g} ({self.launches} launched, {self.waits} read, "
            f"{round(self.bytes_per_token, 2):g} bytes per token)\n"
            f"{self._speculated()}backend: {self.backend} ({self.device}, {self.dtype}), seed {self.seed}"
            + "".join(f"\nnote: {notice}" for notice in self.notices)
        )


class Stops:
    """Finds stop strings in streamed text and holds back what might be the start of one."""

    def __init__(self, stops: tuple[str, ...]):
        self.stops = stops
        self.held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Text that is safe to show; once `matched` is set, the text before the earliest stop string."""
        text = self.held + piece
        found = [(at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self.held = ""
            return text[:at]
        keep = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def finish(self) -> str:
        """What was held back and never became a stop string."""
        held, self.held = self.held, ""
        return held


class Steps:
    """Launches and reads of one completion, counted in it."""

    def __init__(self, backend: Backend, completion: Completion):
        self.backend = backend
        self.completion = completion

    def prefill(self, model: Model, tokens: list[int], cache: Cache, chunk: int) -> None:
        """Append `tokens` to the cache in chunks, one evaluation each; nothing is projected to the vocabulary on a
        lazy device, one row per chunk on an eager one."""
        for start in range(0, len(tokens), chunk):
            model.forward(np.array([tokens[start:start + chunk]], np.int32), cache.length, cache)
            self.backend.launch(*cache.arrays())

    def launch(self, model: Model, token: Any, cache: Cache, sampler: Any) -> Any:
        """One step over `token` [1, T]; the token that follows, int32 [1, 1], still on the device."""
        return self._launched(model.step(token, cache.length, cache, sampler), cache)

    def launch_verification(self, model: Model, tokens: list[int], cache: Cache, sampler: Any) -> Any:
        """One step over `tokens`; what follows each, int32 [1, T], still on the device."""
        return self._launched(model.verify(np.array([tokens], np.int32), cache.length, cache, sampler), cache)

    def read(self, token: Any) -> int:
        value = self.backend.read(token)
        self._count(token)
        return value

    def read_all(self, *tokens: Any) -> list[int]:
        values = self.backend.read_all(*tokens)
        self._count(*tokens)
        return values

    def _count(self, *tokens: Any) -> None:
        self.completion.waits += 1
        self.completion.read_bytes += sum(token.nbytes for token in tokens)

    def _launched(self, following: Any, cache: Cache) -> Any:
        # The cache's tokens are part of the launch, or their updates would pile up as a graph nobody evaluates.
        self.backend.launch(following, cache.tokens)
        self.completion.launches += 1
        return following


class Engine:
    """One model on one backend, and perhaps a draft model. Holds no sequence state: that is the caller's cache."""

    def __init__(self, backend: Backend, model: Model, tokenizer: Tokenizer, eos: frozenset[int], context: int,
                 draft: Model | None = None):
        self.backend = backend
        self.model = model
        self.tokenizer = tokenizer
        self.eos = eos
        self.context = context  # positions, prompt and answer together
        self.draft = draft

    def check_prompt(self, tokens: list[int]) -> None:
        """Raises ContextError for an empty prompt, one that leaves no room for an answer, and foreign token ids."""
        if not tokens:
            raise ContextError("the prompt is empty and this model has no BOS token to start from: give some text")
        if len(tokens) >= self.context:
            raise ContextError(f"the prompt has {len(tokens)} tokens and the context holds {self.context}, answer "
                               f"included: shorten the prompt{self.more_context()}")
        vocabulary = self.model.config.vocab_size
        foreign = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if foreign is not None:
            raise ContextError(f"token id {foreign} is outside the vocabulary of {vocabulary}")

    def more_context(self) -> str:
        """How a message about a full context goes on where a larger one can be asked for."""
        return ", or raise --ctx-size" if self.context < rope.longest(self.model.config) else ""

    def check_options(self, options: GenerationOptions) -> None:
        """Raises OptionsError for a logit bias outside the vocabulary, and a draft model that is not there."""
        vocabulary = self.model.config.vocab_size
        foreign = next((token for token in options.logit_bias if token >= vocabulary), None)
        if foreign is not None:
            raise OptionsError(f"option logit_bias: token id {foreign} is outside the vocabulary of {vocabulary}")
        if options.speculate == "model" and self.draft is None:
            raise OptionsError("option speculate: 'model' needs a draft model: load one with --draft-model, or choose "
                               "'prompt'")

    def speculation(self, options: GenerationOptions) -> tuple[str, list[str]]:
        """The kind of speculation in force ("none", "prompt" or "model") and what a user should know of the choice."""
        kind = options.speculate or ("none" if self.draft is None else "model")
        if kind != "none" and rope.length_dependent(self.model.config):
            return "none", ["no speculation: this model's dynamic rope turns keys by angles that depend on the length, "
                            "so that several positions in one step would not be those of single steps"]
        if kind == "prompt" and self.draft is not None:
            return kind, ["the draft model is not used: the option speculate asks for 'prompt'"]
        return kind, []

    def prefill(self, tokens: list[int], cache: Cache, chunk: int) -> None:
        """As Steps.prefill, for this model."""
        Steps(self.backend, Completion()).prefill(self.model, tokens, cache, chunk)

    def tokens(self, prompt: list[int], cache: Cache, resolved: Resolved, completion: Completion,
               drafter: speculate.Drafter | None = None) -> Iterator[int]:
        """Token ids that follow `prompt`, which continues what the cache holds.

        Stops after an end token, after max_tokens, or when the context is full, and sets completion.finish_reason.
        The cache may hold more positions than the tokens yielded: trim it to what was shown.
        drafter: knows the text up to the prompt's end; what it drafts is verified, and does not change the tokens.
        """
        options = resolved.options
        sampler = self.backend.sampler(options)
        limit = min(options.max_tokens, self.context - cache.length - len(prompt))
        config, chunk = self.model.config, options.prefill_step_size
        if rope.length_dependent(config) and cache.length + len(prompt) > config.max_position_embeddings:
            chunk = len(prompt)  # in chunks, each would be rotated for another length
        # The last chunk and the first token are one step, so that no weights are read twice.
        rest = (len(prompt) - 1) // chunk * chunk
        cache.check_memory(1, cache.length + len(prompt))  # before a minute of prefill, not after
        started, away = time.perf_counter(), 0.0
        steps = Steps(self.backend, completion)
        steps.prefill(self.model, prompt[:rest], cache, chunk)
        pending = steps.launch(self.model, np.array([prompt[rest:]], np.int32), cache, sampler)
        speculation = speculate.Speculation(drafter, self.eos, completion, self.model.verify_width)
        drafts: list[int] = []  # what `pending` verifies

        def follow(token: int, on_device: Any, room: int) -> tuple[Any, list[int]]:
            if drafts := speculation.draft(room, steps):
                return steps.launch_verification(self.model, [token, *drafts], cache, sampler), drafts
            return steps.launch(self.model, on_device, cache, sampler), []

        count = 0
        while count < limit:
            current, pending = pending, None
            # A step cannot be taken back once launched: none runs ahead of a token after which there may be a draft,
            # since the verification would have to stand in its place.
            if self.backend.runs_ahead and not drafts and count + 1 < limit and not speculation.may_follow():
                pending = steps.launch(self.model, current, cache, sampler)
            sampled = steps.read_all(current) if drafts else [steps.read(current)]
            now = time.perf_counter()
            if count == 0:
                completion.prefill_seconds, first = now - started, now
            completion.decode_seconds = now - first - away
            fresh = speculation.accepted(drafts, sampled)
            if drafts:
                cache.trim(cache.length - len(sampled) + len(fresh))
                current = current[:, len(fresh) - 1:len(fresh)]
            left = limit - count - len(fresh)
            ended = fresh[-1] in self.eos or left == 0
            drafts = []
            # A device that works by itself does so while the consumer looks; an eager one shows the tokens first.
            if pending is None and self.backend.runs_ahead and not ended:
                pending, drafts = follow(fresh[-1], current, left - 1)
            for token in fresh:
                count += 1
                completion.tokens.append(token)
                if token in self.eos:
                    completion.finish_reason = "eos"
                elif count == limit:
                    completion.finish_reason = "length" if limit == options.max_tokens else "context"
                shown = time.perf_counter()
                yield token
                away += time.perf_counter() - shown
            if ended:
                return
            if pending is None:
                pending, drafts = follow(token, current, left - 1)

    def pieces(self, prompt: list[int], cache: Cache, resolved: Resolved, completion: Completion,
               starts_text: bool = True, drafter: speculate.Drafter | None = None) -> Iterator[str]:
        """Text that follows `prompt`, in pieces of whole characters, stop strings never shown. Fills `completion`.

        starts_text: the answer is a text of its own, so that the space sentencepiece puts before a text is not shown;
        False where it continues one, and " a time" keeps its space. drafter: as in `tokens`.
        """
        options = resolved.options
        completion.backend, completion.device = self.backend.name, self.backend.device_name
        completion.dtype = str(self.model.dtype).split(".")[-1]
        completion.seed, completion.options = options.seed, options.model_dump()
        completion.options["speculate"] = drafter.kind if drafter else "none"
        completion.origins = dict(resolved.origins)
        self._note(completion)
        decoder, stops = self.tokenizer.stream(starts_text=starts_text), Stops(options.stop)
        if options.max_tokens == 0:
            completion.finish_reason = "length"
            return
        try:
            for token in self.tokens(prompt, cache, resolved, completion, drafter):
                piece = stops.push(decoder.push(token) if token not in self.eos else "")
                if stops.matched:
                    completion.finish_reason, completion.stop = "stop", stops.matched
                if piece:
                    completion.text += piece
                    yield piece
                if stops.matched:
                    return
        finally:
            self._note(completion)  # what it took to compile or capture a step is known now
        tail = stops.push(decoder.finish())
        if stops.matched:
            completion.finish_reason, completion.stop = "stop", stops.matched
        else:
            tail += stops.finish()
        if tail:
            completion.text += tail
            yield tail

    def _note(self, completion: Completion) -> None:
        completion.notices.extend(notice for notice in self.model.notices if notice not in completion.notices)
