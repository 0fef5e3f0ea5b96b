"""One loaded model and what it can answer: checks of a request, the choice of speculation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import ContextError, OptionsError, Report, refuse
from mlx_llama.core.models import rope
from mlx_llama.core.text.tokenizer import Tokenizer

from .grammar import Grammars, Rule
from .options import GenerationOptions


@dataclass
class Engine:
    """One model on one backend, perhaps with a draft model."""

    backend: Backend
    model: Model
    tokenizer: Tokenizer | None  # None: tokens only, no text
    eos: frozenset[int]
    context: int  # positions, prompt and answer together
    draft: Model | None = None

    def check_prompt(self, tokens: Sequence[int]) -> None:
        """Raises ContextError for an empty prompt, a prompt that leaves no room for an answer, and foreign token ids."""
        if not tokens:
            raise ContextError("the prompt is empty and this model has no BOS token to start from: give some text")
        if len(tokens) >= self.context:
            raise ContextError(f"the prompt has {len(tokens)} tokens and the context holds {self.context}, answer "
                               f"included: shorten the prompt{self.suggest_context()}")
        vocabulary = self.model.config.vocab_size
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocabulary:
            raise ContextError(f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary}")

    def suggest_context(self) -> str:
        """Rest of a message about a full context: how to ask for a larger one, "" at the model's maximum."""
        return ", or raise --ctx-size" if self.context < rope.max_context(self.model.config) else ""

    @functools.cached_property
    def grammars(self) -> Grammars:
        """Compiles what answers must match. Raises OptionsError without a tokenizer."""
        if self.tokenizer is None:
            raise OptionsError("options schema, regex and grammar need a model with a tokenizer")
        return Grammars(self.tokenizer, sorted(self.eos), self.model.config.vocab_size)

    def check_options(self, options: GenerationOptions, report: Report = refuse) -> None:
        """Raises OptionsError, or reports it: for a logit bias outside the vocabulary, and for a draft model that was not
        loaded."""
        vocabulary = self.model.config.vocab_size
        foreign = next((token for token in options.logit_bias if token >= vocabulary), None)
        if foreign is not None:
            report(OptionsError(f"option logit_bias: token id {foreign} is outside the vocabulary of {vocabulary}"))
        if options.speculate == "model" and self.draft is None:
            report(OptionsError("option speculate: 'model' needs a draft model: load one with --draft-model, or choose "
                                "'prompt'"))

    def check_rule(self, options: GenerationOptions) -> None:
        """Compile what a conversation's answers must match; raises OptionsError if it cannot be enforced."""
        if rule := Rule.of(options):
            self.grammars.compile(rule)

    def choose_speculation(self, options: GenerationOptions, is_constrained: bool = False) -> tuple[str, list[str]]:
        """The kind of speculation in force ("none", "prompt" or "model") and notices about the choice."""
        kind = options.speculate or ("none" if self.draft is None else "model")
        if kind != "none" and (is_constrained or options.logprobs is not None):
            return "none", ["no speculation: it verifies several positions in one step, which knows neither grammars nor "
                            "log-probabilities"]
        if kind != "none" and rope.length_dependent(self.model.config):
            return "none", ["no speculation: this model's dynamic rope rotates keys by angles that depend on the length, "
                            "so several positions in one step would differ from single steps"]
        if kind == "prompt" and self.draft is not None:
            return kind, ["the draft model is not used: the option speculate asks for 'prompt'"]
        return kind, []
