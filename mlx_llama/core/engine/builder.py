"""One loaded model: checks of its requests, and their state before the first tick."""

from __future__ import annotations

import functools
from collections import abc
from dataclasses import dataclass, field

from mlx_llama.core.answers.completion import Completion, Writer
from mlx_llama.core.answers.dry import Breakers, Dry
from mlx_llama.core.answers.grammar import Constraint, Grammars, Rule
from mlx_llama.core.answers.stops import Stops
from mlx_llama.core.answers.thinking import AnyConstraint, ThoughtConstraint
from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.selection import Backend
from mlx_llama.core.errors import ContextError, OptionsError, Report, refuse
from mlx_llama.core.files.adapters import BASE
from mlx_llama.core.files.tensor import FileWatch
from mlx_llama.core.models import rope
from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.sample import uses_dry
from mlx_llama.core.system.forks import cached_property
from mlx_llama.core.text.tokenizer import StreamDecoder, Tokenizer
from mlx_llama.core.text.tools import ToolParser

from .drafts import PromptLookup, Speculation
from .request import Request, Sequence


class PromptTooLong(ContextError):
    """A prompt leaves no room for an answer."""

    count = 0  # its tokens, or a lower bound


@dataclass
class RequestBuilder:
    """One model on one backend, perhaps with a draft model."""

    backend: Backend
    model: Model
    tokenizer: Tokenizer | None  # None: tokens only, no text
    eos: frozenset[int]
    context: int  # positions, prompt and answer together
    draft: Model | None = None
    notices: tuple[str, ...] = ()  # about the model's tokenizer and template
    files: FileWatch = field(default_factory=FileWatch)  # those that have the weights

    # From a request to a sequence

    def check(self, request: Request) -> None:
        """Raise ContextError or OptionsError for a bad request, and CheckpointError if the model's
        file has changed. `begin` checks its rule.
        """
        self.files.check()
        options = request.options.options
        self.check_options(options)
        self.check_prompt(request.prompt, options)
        if request.wants_text and self.tokenizer is None:
            raise OptionsError("this model has no tokenizer: ask for token ids (wants_text=False)")
        if options.stop and not request.wants_text:
            raise OptionsError("option `stop`: needs text, and this request asks for token ids")

    def begin(self, request: Request) -> Sequence:
        """The state of a checked request. Raises OptionsError if its rule cannot be enforced."""
        options, thinking = request.options.options, request.thinking
        rule = request.rule or Rule.of(options)
        constraint = self._constrain(request, rule)
        kind, notices = self.choose_speculation(
            options, rule is not None or bool(request.hooks.processors) or uses_dry(options)
        )
        completion = Completion(
            prompt_tokens=len(request.prompt), schema=None if request.rule else options.schema
        )
        completion.backend, completion.device = self.backend.name, self.backend.device_name
        completion.dtype = self.model.dtype_name
        completion.seed = options.seed or 0  # Defaults.resolve draws a missing seed
        completion.options = options.model_dump() | {"speculate": kind}
        completion.origins = dict(request.options.origins)
        if request.prompt_logprobs is not None:
            completion.prompt_logprobs = [None]
        limit = min(options.max_tokens, self.context - len(request.prompt))
        eos = self.eos if request.eos is None else request.eos
        decoder, stops = self._decode(request, constraint), Stops(options.stop)
        is_split = thinking and thinking.is_split
        thoughts = thinking.form.parser(thinking.state) if thinking and is_split else None
        # structured answers may repeat themselves
        is_free = rule is None and request.form is None
        repetition = options.repetition_limit if is_free else 0
        writer = Writer(
            completion,
            max_tokens=options.max_tokens,
            repetition_limit=repetition,
            limit=limit,
            eos=eos,
            decoder=decoder,
            stops=stops,
            stop_tokens=options.stop_token_ids,
            thoughts=thoughts,
            decode_seconds=request.decode_seconds,
        )
        writer.add_notices(self.notices)
        writer.add_notices(
            [*request.options.notices, *notices] if request.notices is None else request.notices
        )
        if rule and constraint and constraint.relaxed:
            writer.add_notices(
                [f"`{rule.option}`: not enforced as it is written: {constraint.relaxed}"]
            )
        if request.begun and writer.decoder:
            writer.resume(_find_begun(request))
        tokens, parser = list(request.prompt), None  # the answer is appended
        if request.form:
            parser = ToolParser(request.form, request.tools, request.must_call)
            writer.add_notices([request.form.notice] if request.form.notice else ())
        lookup = PromptLookup(tokens) if kind == "prompt" else None
        speculation = Speculation(lookup, writer, self.model.verify_width, kind)
        dry = None
        if uses_dry(options):
            dry = Dry(options, self.breakers.find(options.dry_sequence_breakers), tokens)
        return Sequence(
            request=request,
            tokens=tokens,
            limit=limit,
            writer=writer,
            speculation=speculation,
            parser=parser,
            constraint=constraint,
            dry=dry,
            adapter=self.find_adapter(options),
        )

    def _constrain(self, request: Request, rule: Rule | None) -> AnyConstraint | None:
        answer = None
        if rule is not None:
            seconds, starts = request.compile_seconds, request.starts_text
            answer = self.grammars.compile(rule, starts_text=starts, seconds=seconds)
        constraint = self._admit_thoughts(request, answer)
        if constraint is None:
            return None
        try:
            for token in _find_begun(request):
                constraint.accept(token)
        except ValueError:
            assert rule is not None  # a thought is any text
            raise OptionsError(
                f"option `{rule.option}`: the answer so far does not match it: ask again instead"
            ) from None
        return constraint

    def _admit_thoughts(self, request: Request, answer: Constraint | None) -> AnyConstraint | None:
        """Let a thought precede the answer of a constraint, within its budget."""
        thinking, tokenizer = request.thinking, self.tokenizer
        if thinking is None or tokenizer is None:
            return answer
        if not thinking.precedes_rule if answer else thinking.budget < 0:
            return answer
        size = self.model.config.vocab_size
        starts = request.starts_text and not (answer and answer.keeps_space)
        return ThoughtConstraint(thinking, tokenizer, size, self.eos, answer, starts)

    def _decode(self, request: Request, constraint: AnyConstraint | None) -> StreamDecoder | None:
        """The decoder of the answer's text; None for token ids alone."""
        if self.tokenizer is None or not request.wants_text:
            return None
        starts_text = request.starts_text and not (constraint and constraint.keeps_space)
        shown = request.shown
        if request.thinking:
            shown |= self.tokenizer.find_special(request.thinking.form.marks)
        return self.tokenizer.stream(starts_text=starts_text, shown=shown)

    # Checks

    def check_prompt(self, tokens: abc.Sequence[int], options: GenerationOptions) -> None:
        """Raise ContextError for a prompt that is empty or too long, or has foreign token ids."""
        if not tokens:
            raise ContextError(
                "the prompt is empty and this model has no BOS token to start from: give some text"
            )
        self.count_checker(options)(len(tokens), "")
        vocabulary = self.model.config.vocab_size
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= vocabulary:
            raise ContextError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocabulary}"
            )

    def count_checker(self, options: GenerationOptions) -> abc.Callable[..., None]:
        """`check_count` for these options. A prompt without an answer may fill the context."""
        return functools.partial(self.check_count, room=min(1, options.max_tokens))

    def check_count(self, count: int, bound: str = "at least ", room: int = 1) -> None:
        """Raise PromptTooLong if `count` tokens leave no room for an answer. bound: its prefix.
        room: tokens that the answer needs.
        """
        if count + room > self.context:
            error = PromptTooLong(
                f"the prompt has {bound}{count} tokens and the context holds {self.context}, "
                f"answer included: shorten the prompt{self.suggest_context()}"
            )
            error.count = count
            raise error

    def suggest_context(self) -> str:
        """End of a message: the option for a larger context, "" at the model's maximum."""
        return ", or raise `ctx_size`" if self.context < rope.max_context(self.model.config) else ""

    @cached_property
    def breakers(self) -> Breakers:
        """Finds the tokens of DRY's breakers."""
        return Breakers(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """The compiler of rules for answers. Raises OptionsError without a tokenizer."""
        if self.tokenizer is None:
            raise OptionsError("options schema, regex and grammar need a model with a tokenizer")
        return Grammars(self.tokenizer, sorted(self.eos), self.model.config.vocab_size)

    def check_options(self, options: GenerationOptions, report: Report = refuse) -> None:
        """Raise or report an OptionsError for foreign tokens, or no such draft model or adapter."""
        size = self.model.config.vocab_size
        for name in ("logit_bias", "stop_token_ids"):
            foreign = next((token for token in getattr(options, name) if token >= size), None)
            if foreign is not None:
                text = f"option `{name}`: token id {foreign} is outside the vocabulary of {size}"
                report(OptionsError(text))
        try:
            self.find_adapter(options)
        except OptionsError as error:
            report(error)
        if options.speculate == "model" and self.draft is None:
            text = "'model' needs a draft model: load one with `draft_model`, or choose 'prompt'"
            report(OptionsError(f"option `speculate`: {text}"))

    @property
    def default_adapter(self) -> int:
        """Number of the adapter for requests without the option: the first, 0 without adapters."""
        return min(1, len(self.model.adapters))

    def find_adapter(self, options: GenerationOptions) -> int:
        """Number of the requested adapter, 0 for none. Raises OptionsError if it was not loaded."""
        names = self.model.adapters
        if options.adapter is None:
            return self.default_adapter
        if options.adapter == BASE:
            return 0
        if options.adapter not in names:
            known = f"there are {', '.join([*names, BASE])}"
            known = known if names else "none was loaded: load it with `adapters`"
            raise OptionsError(
                f"option `adapter`: {options.adapter!r:.100} is not among the model's "
                f"adapters: {known}"
            )
        return 1 + names.index(options.adapter)

    def check_rule(self, options: GenerationOptions) -> None:
        """Compile the rule for a conversation's answers. Raises OptionsError."""
        if rule := Rule.of(options):
            self.grammars.compile(rule)

    def choose_speculation(
        self, options: GenerationOptions, is_constrained: bool = False
    ) -> tuple[str, list[str]]:
        """The kind of speculation in force ("none", "prompt", "model") and notices about it."""
        kind = options.speculate or ("none" if self.draft is None else "model")
        if kind != "none" and (is_constrained or options.logprobs is not None):
            return "none", [
                "no speculation: verifying several positions in one step does not support "
                "grammars, logits processors, DRY or log-probabilities"
            ]
        if kind != "none" and rope.length_dependent(self.model.config):
            return "none", [
                "no speculation: this model's dynamic rope rotates keys by angles that depend on "
                "the length, so several positions in one step would differ from single steps"
            ]
        if kind == "prompt" and self.draft is not None:
            return kind, ["the draft model is not used: `speculate` asks for 'prompt'"]
        return kind, []


def _find_begun(request: Request) -> abc.Sequence[int]:
    """Tokens of the prompt that begin the answer."""
    return request.prompt[len(request.prompt) - request.begun :]
