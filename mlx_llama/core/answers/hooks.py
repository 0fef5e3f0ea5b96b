"""Callbacks of a request: logits processors, progress and pieces of the answer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_llama.core.errors import OptionsError

# f(tokens int32 [T], logits float32 [1, V]) -> logits [1, V]; names and order are mlx-lm's
LogitsProcessor = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], Any]
OnProgress = Callable[[int, int], object]  # f(tokens of the prompt so far, all of them)
OnPiece = Callable[[str, str], object]  # f(text, kind); kind: "text" or "thought"


@dataclass(frozen=True)
class Hooks:
    """Functions called on the computing thread; their exceptions end the request."""

    # change the logits before each token; one more wait for the device per token
    processors: tuple[LogitsProcessor, ...] = ()
    on_progress: OnProgress | None = None  # called after each chunk of the prompt
    on_piece: OnPiece | None = None  # called with each piece of the answer and of its thought

    def over(self, others: Hooks) -> Hooks:
        """These functions, and others where there is none."""
        mine = {name: function for name, function in vars(self).items() if function}
        return replace(others, **mine)

    def process(
        self, tokens: list[int], logits: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float32]:
        """Apply the processors to logits [1, V], perhaps in place. Raises OptionsError."""
        known, shape = np.array(tokens, np.int32), logits.shape
        for processor in self.processors:
            logits = np.asarray(processor(known, logits))
            if logits.shape != shape or logits.dtype.kind != "f":
                raise OptionsError(
                    f"logits_processor: returned {logits.dtype} {list(logits.shape)}, it must "
                    f"return its logits, float32 {list(shape)}"
                )
        return logits.astype(np.float32, copy=False)


def takes_two(function: Any) -> bool:
    """True if a function can be called with two arguments, as far as Python knows."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:  # also what cannot be called
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


NAMES = ("logits_processor", "on_progress", "on_piece")


def split_hooks(options: Mapping[str, Any]) -> tuple[dict[str, Any], Hooks]:
    """Options without hooks, and the hooks. Raises OptionsError for bad or misspelled ones."""
    for name in options:
        if name not in NAMES and (near := difflib.get_close_matches(name, NAMES, 1, 0.8)):
            raise OptionsError(f"there is no option {name!r} (did you mean {near[0]!r}?)")
    processors, on_progress, on_piece = (options.get(name) for name in NAMES)
    processors = () if processors is None else (processors,) if callable(processors) else processors
    if not isinstance(processors, (list, tuple)) or not all(map(takes_two, processors)):
        raise OptionsError(
            f"logits_processor: {processors!r:.60} is not a function of tokens and logits, or "
            "a list of them"
        )
    arguments = ("two numbers", "a text and its kind")
    for name, function, takes in zip(NAMES[1:], (on_progress, on_piece), arguments):
        if function is not None and not takes_two(function):
            raise OptionsError(f"{name}: {function!r:.60} is not a function of {takes}")
    rest = {name: value for name, value in options.items() if name not in NAMES}
    return rest, Hooks(tuple(processors), on_progress, on_piece)
