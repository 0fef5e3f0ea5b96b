"""Bag-of-words classifier of questions into facts, the teacher in the training of the guide's
network.

A mean of embeddings of words, pairs of words and parts of words, and a linear layer, as fastText
(Joulin et al. 2016, arXiv 1607.01759; Bojanowski et al. 2016, arXiv 1607.04606). It learns a
subject from some hundred lines better than a small network does, and knows a misspelt word by its
parts. Its probabilities are distilled into the network (Hinton et al. 2015, arXiv 1503.02531),
whose embeddings are initialised from its own.
"""

import functools
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from . import talk

OTHERS = ("scope", "small talk")  # classes after the facts
CLASSES = {name: number for number, name in enumerate((*talk.FACTS, *OTHERS))}
RATE, BATCH = 5e-3, 256
DROPPED = 0.15  # share of a question's features that are left out in training
MIN_COUNT = 4  # questions that must have a feature
# Answers of all classes but small talk
ANSWERS = [*(fact.answer for fact in talk.FACTS.values()), talk.SCOPE_ANSWER]
_CLASS_OF = {answer: number for number, answer in enumerate(ANSWERS)}
_WORD = re.compile(r"--?[a-z][a-z-]*|/[a-z]+|[a-z]+|\d+|[^\sa-z\d]")


def class_of(answer: str) -> int:
    return _CLASS_OF.get(answer, CLASSES["small talk"])


@functools.lru_cache(100_000)
def ngrams(word: str) -> tuple[str, ...]:
    """The word, and its parts of 3 to 5 letters if it is longer than three; `<` and `>` mark its
    ends, `\\0` a part.
    """
    if len(word) < 4:
        return (word,)
    marked = f"<{word}>"
    return (
        word,
        *(
            f"{marked[at : at + size]}\0"
            for size in (3, 4, 5)
            for at in range(len(marked) - size + 1)
        ),
    )


def features(question: str) -> list[str]:
    words = _WORD.findall(question.lower())
    return [part for word in words for part in ngrams(word)] + [
        f"{first} {two}" for first, two in itertools.pairwise(words)
    ]


class Teacher:
    """known: {feature: row of embedding}. embedding float32 [F, D], weight [C, D], bias [C], for
    the C `CLASSES`.
    """

    def __init__(
        self,
        known: dict[str, int],
        embedding: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
    ):
        self.known, self.embedding, self.weight, self.bias = known, embedding, weight, bias

    def rows(self, question: str) -> list[int]:
        return [self.known[name] for name in features(question) if name in self.known] or [0]

    def logits(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """[N, C] of N questions, given as `rows`."""
        starts = torch.tensor([0, *map(len, rows)]).cumsum(0)[:-1]
        flat = torch.tensor([row for question_rows in rows for row in question_rows])
        means = functional.embedding_bag(flat, self.embedding, starts, mode="mean", sparse=True)
        return functional.linear(means, self.weight, self.bias)

    @torch.no_grad()
    def probabilities(self, questions: Sequence[str]) -> torch.Tensor:
        """Probabilities of `ANSWERS`, float32 [N, A]; small talk is left out."""
        return self.logits([self.rows(question) for question in questions])[
            :, : CLASSES["small talk"]
        ].softmax(-1)

    def embed_piece(self, piece: str) -> torch.Tensor | None:
        """Embed a piece of the vocabulary, float32 [D], by its parts; None if none is known."""
        places = [self.known[part] for part in ngrams(piece.lower()) if part in self.known]
        return self.embedding[places].sum(0) / (1 + len(places) ** 0.5) if places else None

    def state(self) -> dict:
        return {
            "known": self.known,
            "embedding": self.embedding,
            "weight": self.weight,
            "bias": self.bias,
        }


def draw_questions(count: int, seed: int) -> Iterator[tuple[str, int]]:
    rng = random.Random(f"{seed} teacher")
    for _ in range(count):
        (_, question), (_, answer) = (
            talk.long_question(rng) if rng.random() < 0.1 else talk.one_question(rng)
        )
        yield question, class_of(answer)


def train(count: int, width: int, seed: int, say, epochs: int = 3) -> Teacher:
    """Train a teacher on `count` questions, with embeddings of `width`."""
    begin = time.monotonic()
    questions = list(draw_questions(count, seed))
    seen = Counter(
        name
        for question, _ in questions[: count // 2]
        for name in dict.fromkeys(features(question))
    )
    known = {
        name: row
        for row, name in enumerate(name for name, times in seen.items() if times >= MIN_COUNT)
    }
    torch.manual_seed(seed)
    weights = [
        torch.randn(len(known), width) * 0.1,
        torch.randn(len(CLASSES), width) * 0.05,
        torch.zeros(len(CLASSES)),
    ]
    teacher = Teacher(known, *(w.requires_grad_() for w in weights))
    rows = [teacher.rows(question) for question, _ in questions]
    classes = torch.tensor([number for _, number in questions])
    optimizers = (
        torch.optim.SparseAdam(weights[:1], lr=RATE),
        torch.optim.Adam(weights[1:], lr=RATE),
    )
    held = [(question, CLASSES[fact.name]) for fact, question in talk.HELD_OUT.values() if fact]
    rng, steps, step = random.Random(seed), epochs * (count // BATCH), 0
    for epoch in range(epochs):
        order = rng.sample(range(count), count)
        for at in range(0, count - BATCH + 1, BATCH):
            batch = order[at : at + BATCH]
            kept = [
                [row for row in rows[pick] if rng.random() > DROPPED] or rows[pick]
                for pick in batch
            ]
            loss = functional.cross_entropy(teacher.logits(kept), classes[batch])
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps)
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            step += 1
        with torch.no_grad():
            guesses = (
                teacher.logits([teacher.rows(question) for question, _ in held]).argmax(-1).tolist()
            )
        right = sum(pick == wanted for pick, (_, wanted) in zip(guesses, held)) / max(1, len(held))
        say(
            f"teacher: {epoch + 1} of {epochs}, {len(known):,} features, {right:.1%} of the "
            "held-out questions, "
            f"{time.monotonic() - begin:.0f} s"
        )
    return Teacher(known, *(w.detach() for w in weights))
