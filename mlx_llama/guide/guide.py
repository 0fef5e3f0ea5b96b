"""The guide, the model in the package: passages of the pages beside its answers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mlx_llama.core.answers.completion import INSTEAD, UNSURE
from mlx_llama.guide.manual import load_manual, write_pointers
from mlx_llama.guide.questions import Subject

from .story import begin_story

# Its answers to questions are wrong mostly where their first token is less likely.
SURE = 0.45
SMALL_TALK = 0.1  # about the highest doubt in small talk
INDEX = "See docs/troubleshooting.md, and By task in docs/commands.md."
LIKELY = 16  # first tokens that tell a text's subject


class Guide:
    """Passages of the pages for questions, and how sure the guide is of its answers."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        encode_question: Callable[[str], list[int]],
        compute: Callable[[list[int]], npt.NDArray[np.float32]],
    ):
        """encode_question: by the chat template. compute: logits [V] after tokens."""
        self._encode_question = encode_question
        self._compute = compute
        self._sorry = encode("Sorry")[-1]  # begins all its doubts
        self._once = encode("Once")[-1]  # begins all its stories

    def read(self, text: str) -> Subject:
        """The subject of a text."""
        logits = self._compute(self._encode_question(text))
        shares = np.exp(logits - logits.max())
        doubt = float(shares[self._sorry] / shares.sum())
        shares[self._sorry] = 0.0
        roots = np.sqrt(shares / shares.sum())
        return Subject(doubt, {int(i): float(roots[i]) for i in roots.argsort()[-LIKELY:]})

    def look_up(self, question: str) -> str:
        """Passages about a question, with their addresses; "" if there are none."""
        if begin_story(question):
            return ""
        subject = self.read(question)
        likeliest = max(subject.likely, key=subject.likely.__getitem__)
        if likeliest == self._once and subject.confidence > subject.doubt:
            return ""
        pointers = write_pointers(
            [match.passage for match in load_manual().find(question, subject)]
        )
        is_unsure = subject.doubt < subject.confidence < SURE
        if is_unsure and (pointers or subject.doubt > SMALL_TALK):
            return f"{UNSURE}\n{pointers or INDEX}"
        declines = subject.doubt > subject.confidence
        return f"{INSTEAD}\n{pointers}" if declines and pointers else pointers
