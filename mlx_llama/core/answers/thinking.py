"""Thoughts of an answer: switched by its options, and bounded before the answer's rule applies."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.text.thoughts import State, ThoughtFormat, find_thoughts
from mlx_llama.core.text.tokenizer import Tokenizer

from .grammar import Constraint

SWITCHES = ("enable_thinking", "thinking")  # variables of templates: Qwen3's, Granite's
# The second is a word of other templates' texts, too: look for a condition.
_SWITCH = re.compile(r"\benable_thinking\b|\{%-?\s*(?:el)?if\b[^%'\"]*(?<!\.)\bthinking\b")


def has_switch(source: str) -> bool:
    """True if a chat template can turn thoughts on and off."""
    return find_thoughts(source) is not None and _SWITCH.search(source) is not None


def is_off(options: GenerationOptions) -> bool:
    """True if the options ask for answers without thoughts."""
    return options.reasoning == "off" or options.reasoning_budget == 0


def set_switches(
    source: str, options: GenerationOptions, variables: Mapping[str, Any]
) -> dict[str, Any]:
    """Variables with a template's switch as the options want it, unless they set it. "auto" sets
    the switch that llama.cpp's copies of templates always expect.
    """
    is_guarded = re.search(r"enable_thinking\s*(is\b|=|\|)", source)
    if options.reasoning == "on" or is_off(options):
        wanted = not is_off(options)
        variables = {**{name: wanted for name in SWITCHES if name in source}, **variables}
    elif "not enable_thinking" in source and not is_guarded:
        variables = {"enable_thinking": True, **variables}
    return dict(variables)


@dataclass(frozen=True)
class Thinking:
    """The thoughts of an answer to messages."""

    form: ThoughtFormat
    state: State  # at the beginning of the answer, as the prompt left it
    budget: int = -1  # maximum number of tokens of a thought; -1: unlimited
    is_split: bool = True  # into Completion.reasoning; else the thought stays in the text
    precedes_rule: bool = True  # a rule applies to the answer after the thought

    @classmethod
    def begin(
        cls,
        tokenizer: Tokenizer,
        source: str,
        tokens: list[int],
        options: GenerationOptions,
        has_rule: bool,
    ) -> tuple[list[int], Thinking | None]:
        """The prompt, perhaps with the end of a thought added, and the thoughts of its answer, if
        any. source: of the template, which made `tokens`. has_rule: for the answer.
        """
        form = find_thoughts(source)
        if form is None:
            return tokens, None
        is_raw, is_unwanted = options.reasoning == "raw", is_off(options)
        state: State = "thought" if form.is_open(tokenizer, tokens) else "before"
        ending = form.closing if state == "thought" else form.bypass
        if (is_unwanted or (is_raw and has_rule)) and ending:
            tokens, state = [*tokens, *form.encode(tokenizer, ending)], "text"
        budget = options.reasoning_budget
        if is_unwanted:  # a model that thinks all the same is stopped where there is no switch
            budget = -1 if state == "text" or has_switch(source) else 0
        # The answer follows the end of a thought that the template or we wrote.
        precedes = not is_raw and not (is_unwanted and budget < 0)
        return tokens, cls(form, state, budget, not is_raw, precedes)

    def follow(self, text: str) -> Thinking:
        """The thoughts of an answer that goes on after `text`, its beginning."""
        parser = self.form.parser(self.state)
        parser.push(text)
        return replace(self, state=parser.state)


@dataclass(eq=False)
class ThoughtConstraint:
    """Lets a thought pass, forces its end at its budget, then applies an answer's constraint."""

    thinking: Thinking
    tokenizer: Tokenizer
    size: int  # tokens in the vocabulary
    eos: frozenset[int]
    answer: Constraint | None  # None: the answer is any text
    starts_text: bool

    def __post_init__(self) -> None:
        form, answer, tokenizer = self.thinking.form, self.answer, self.tokenizer
        self._parser = form.parser(self.thinking.state)
        self._decoder = tokenizer.stream(skip_special=False, starts_text=self.starts_text)
        self._closing = form.encode(tokenizer, form.closing)
        self._tail = form.encode(tokenizer, form.tail)
        # Beginnings of an answer, as far as they are not written yet: of a thought, and of none.
        starts = [form.start] if form.bypass is None else [form.start, form.bypass]
        self._starts = [tokenizer.encode(start, parse_special=True) for start in starts]
        # the answer's constraint as long as it is not known whether a thought begins
        self._probe = answer.copy() if answer and form.bypass is None else None
        self._queue: list[int] = []  # tokens that must come next
        self._spent = 0  # tokens of the thought
        self.keeps_space = answer is not None and answer.keeps_space
        self.relaxed = answer.relaxed if answer else ""

    @property
    def free(self) -> float:
        """Number of next tokens that are certainly not constrained."""
        if self.answer or self._queue:
            return 0
        budget = self.thinking.budget
        return math.inf if self._parser.state == "text" or budget < 0 else budget - self._spent

    def mask(self) -> npt.NDArray[np.int32]:
        """Allowed tokens, as Constraint.mask."""
        state = self._parser.state
        if self._queue:
            return self._allow(self._queue[:1])
        if self.answer is None:
            return np.full(-(-self.size // 32), -1, np.int32)
        if state == "text":
            return self.answer.mask()
        if state == "thought":  # an end token would leave no answer
            return ~self._allow(self.eos)
        bits = self._allow([start[0] for start in self._starts if start])
        if self._probe:
            return bits | self._probe.mask()
        return bits if bits.any() else ~bits

    def _allow(self, tokens: list[int] | frozenset[int]) -> npt.NDArray[np.int32]:
        bits = np.zeros(-(-self.size // 32), np.uint32)
        for token in tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)
        return bits.view(np.int32)

    def accept(self, token: int) -> None:
        """Advance by a token. Raises as Constraint.accept."""
        before = self._parser.state
        if self._queue and self._queue[0] == token:
            self._queue.pop(0)
            self._parser.push(self._decoder.push(token))
            return
        self._queue = []
        if before == "text":
            if self.answer:
                self.answer.accept(token)
            return
        text = self._decoder.push(token)
        self._parser.push(text)
        after = self._parser.state
        if before == "before":
            self._begin(token, after)
        elif after != "thought" and self.answer and text == text.rstrip():
            self._queue = list(self._tail)
        self._spent += before == "thought"
        is_spent = 0 <= self.thinking.budget <= self._spent
        if after == "thought" and is_spent and not self._decoder.is_within_character:
            self._queue = list(self._closing)

    def _begin(self, token: int, state: State) -> None:
        """Note a token that may begin a thought or the answer. state: of the parser after it."""
        self._starts = [start[1:] for start in self._starts if start[:1] == [token]]
        if self._probe:
            try:
                self._probe.accept(token)
            except ValueError:
                self._probe = None
            if state == "text":
                self.answer = self._probe

    def forced(self) -> list[int]:
        """The next tokens where there is no choice; not accepted yet."""
        if self._queue:
            return list(self._queue)
        is_answer = self._parser.state == "text"
        return self.answer.forced() if self.answer and is_answer else []

    @property
    def is_finished(self) -> bool:
        """True if nothing may follow but an end token, or one was accepted."""
        state = self._parser.state
        answer = self.answer if state == "text" else self._probe if state == "before" else None
        return answer is not None and answer.is_finished


AnyConstraint = Constraint | ThoughtConstraint
