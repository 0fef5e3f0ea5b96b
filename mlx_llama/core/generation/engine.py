"""One loaded model, ready to generate: checks of a request, the choice of speculation, tokens and text."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_llama.core.backends.interface import Cache, Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import ContextError, OptionsError
from mlx_llama.core.models import rope
from mlx_llama.core.text.tokenizer import Tokenizer

from .completion import Completion
from .decode import Decode, Request
from .options import GenerationOptions, Resolved
from .speculate import Drafter
from .steps import Steps
from .stops import Stops


class Engine:
    """One model on one backend, perhaps with a draft model. Holds no sequence state: that is the caller's cache."""

    def __init__(self, backend: Backend, model: Model, tokenizer: Tokenizer | None, eos: frozenset[int], context: int,
                 draft: Model | None = None):
        self.backend = backend
        self.model = model
        self.tokenizer = tokenizer  # None: tokens only, no text
        self.eos = eos
        self.context = context  # positions, prompt and answer together
        self.draft = draft

    def check_prompt(self, tokens: list[int]) -> None:
        """Raises ContextError for an empty prompt, a prompt that leaves no room for an answer, and foreign token ids."""
        if not tokens:
            raise ContextError("the prompt is empty and this model has no BOS token to start from: give some text")
        if len(tokens) >= self.context:
            raise ContextError(f"the prompt has {len(tokens)} tokens and the context holds {self.context}, answer "
                               f"included: shorten the prompt{self.suggest_context()}")
        vocabulary = self.model.config.vocab_size
        foreign = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if foreign is not None:
            raise ContextError(f"token id {foreign} is outside the vocabulary of {vocabulary}")

    def suggest_context(self) -> str:
        """Rest of a message about a full context: how to ask for a larger one, "" at the model's maximum."""
        return ", or raise --ctx-size" if self.context < rope.max_context(self.model.config) else ""

    def check_options(self, options: GenerationOptions) -> None:
        """Raises OptionsError for a logit bias outside the vocabulary, and for a draft model that was not loaded."""
        vocabulary = self.model.config.vocab_size
        foreign = next((token for token in options.logit_bias if token >= vocabulary), None)
        if foreign is not None:
            raise OptionsError(f"option logit_bias: token id {foreign} is outside the vocabulary of {vocabulary}")
        if options.speculate == "model" and self.draft is None:
            raise OptionsError("option speculate: 'model' needs a draft model: load one with --draft-model, or choose "
                               "'prompt'")

    def choose_speculation(self, options: GenerationOptions) -> tuple[str, list[str]]:
        """The kind of speculation in force ("none", "prompt" or "model") and notices about the choice."""
        kind = options.speculate or ("none" if self.draft is None else "model")
        if kind != "none" and rope.length_dependent(self.model.config):
            return "none", ["no speculation: this model's dynamic rope rotates keys by angles that depend on the length, "
                            "so several positions in one step would differ from single steps"]
        if kind == "prompt" and self.draft is not None:
            return kind, ["the draft model is not used: the option speculate asks for 'prompt'"]
        return kind, []

    def prefill(self, tokens: list[int], cache: Cache, chunk: int) -> None:
        """Append `tokens` to the cache, `chunk` per evaluation."""
        Steps(self.backend, Completion()).prefill(self.model, tokens, cache, chunk)

    def tokens(self, prompt: list[int], cache: Cache, resolved: Resolved, completion: Completion,
               drafter: Drafter | None = None) -> Iterator[int]:
        """Token ids after `prompt`, which continues the tokens in the cache.

        Ends after an end token, after max_tokens, or when the context is full, and sets completion.finish_reason.
        The cache may hold more positions than the tokens yielded: trim it to those. drafter: knows the text up to the
        prompt's end; its drafts are verified and do not change the tokens. Raises ContextError where memory is short.
        """
        options = resolved.options
        limit = min(options.max_tokens, self.context - cache.length - len(prompt))
        request = Request(prompt, cache, options, limit, self.eos, completion, drafter)
        return Decode(self.backend, self.model, request).tokens()

    def pieces(self, prompt: list[int], cache: Cache, resolved: Resolved, completion: Completion,
               starts_text: bool = True, drafter: Drafter | None = None) -> Iterator[str]:
        """Text after `prompt`, in pieces of whole characters, without stop strings. Fills `completion`.

        starts_text: the answer is a text of its own, so the space that sentencepiece puts before a text is dropped;
        False where it continues one, and " a time" keeps its space. drafter: as in `tokens`.
        """
        self._describe_run(completion, resolved, drafter)
        if resolved.options.max_tokens == 0:
            completion.finish_reason = "length"
            return
        decoder, stops = self.tokenizer.stream(starts_text=starts_text), Stops(resolved.options.stop)
        try:
            for token in self.tokens(prompt, cache, resolved, completion, drafter):
                yield from _record(stops.push("" if token in self.eos else decoder.push(token)), stops, completion)
                if stops.matched:
                    return
        finally:
            self._note(completion)  # compiling or capturing a step may have added notices
        tail = stops.push(decoder.finish())
        yield from _record(tail if stops.matched else tail + stops.finish(), stops, completion)

    def _describe_run(self, completion: Completion, resolved: Resolved, drafter: Drafter | None) -> None:
        completion.backend, completion.device = self.backend.name, self.backend.device_name
        completion.dtype = self.backend.runtime.dtype_name(self.model.dtype)
        completion.seed, completion.options = resolved.options.seed, resolved.options.model_dump()
        completion.options["speculate"] = drafter.kind if drafter else "none"
        completion.origins = dict(resolved.origins)
        self._note(completion)

    def _note(self, completion: Completion) -> None:
        completion.notices.extend(notice for notice in self.model.notices if notice not in completion.notices)


def _record(piece: str, stops: Stops, completion: Completion) -> Iterator[str]:
    """Yield `piece` unless it is empty; the completion is up to date before."""
    if stops.matched:
        completion.finish_reason, completion.stop = "stop", stops.matched
    if piece:
        completion.text += piece
        yield piece
