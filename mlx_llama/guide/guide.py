"""The guide, the model in the package: passages of the pages beside its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlx_llama.core.answers.completion import Aside
from mlx_llama.guide.manual import load_manual, write_pointers
from mlx_llama.guide.questions import Subject

if TYPE_CHECKING:
    from mlx_llama.api.llm import LLM

# Its answers to questions are wrong mostly where their first token is less likely.
SURE = 0.45
SMALL_TALK = 0.1  # about the highest doubt in small talk
UNSURE = "I am not sure of my answer. These pages may help:"
INSTEAD = "These pages may help:"
INDEX = "See docs/troubleshooting.md, and By task in docs/commands.md."
LIKELY = 16  # first tokens that tell a text's subject


def read_subject(llm: LLM, text: str) -> Subject:
    """The subject of a text."""
    tokens = llm.encode([{"role": "user", "content": text}])[-llm.engine.context :]
    logits = llm.logits(tokens)[-1]
    shares = np.exp(logits - logits.max())
    sorry = llm.encode("Sorry")[-1]  # begins all its doubts
    doubt = float(shares[sorry] / shares.sum())
    shares[sorry] = 0.0
    roots = np.sqrt(shares / shares.sum())
    return Subject(doubt, {int(i): float(roots[i]) for i in roots.argsort()[-LIKELY:]})


def find_passages(llm: LLM, question: str) -> list[Aside]:
    """Passages about a question, with their addresses. They come before an answer that is probably
    wrong.
    """
    subject = read_subject(llm, question)
    likeliest = max(subject.likely, key=subject.likely.__getitem__)
    if likeliest == llm.encode("Once")[-1] and subject.confidence > subject.doubt:
        return []  # the answer is a tale
    matches = load_manual().find(question, subject)
    pointers = write_pointers([match.passage for match in matches])
    is_unsure = subject.doubt < subject.confidence < SURE
    if is_unsure and (pointers or subject.doubt > SMALL_TALK):
        return [Aside(f"{UNSURE}\n{pointers or INDEX}", is_first=True)]
    if not pointers:
        return []
    if subject.doubt > subject.confidence:
        return [Aside(f"{INSTEAD}\n{pointers}", is_first=True)]
    return [Aside(pointers)]
