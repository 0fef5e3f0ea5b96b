"""Questions that people may ask, and how near another question is to each."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from typing import NamedTuple

# Weights of words, of pairs and of parts; of those that no question has, relative to the rarest
KINDS = {"1": 1.0, "2": 0.5, "3": 0.3}
UNSEEN = 0.5


class Subject(NamedTuple):
    """A text as a model sees it, by the first token of its answer."""

    doubt: float  # probability that the answer is "I do not know"
    likely: dict[int, float]  # square roots of the other tokens' probabilities, of sum 1

    @property
    def confidence(self) -> float:
        """Probability of the likeliest token that does not begin "I do not know"."""
        return (1 - self.doubt) * max(self.likely.values()) ** 2

    def agree(self, other: Subject) -> float:
        """Bhattacharyya coefficient: 0 for other subjects, 1 for the same."""
        return sum(root * self.likely.get(token, 0.0) for token, root in other.likely.items())


class Questions:
    """Questions as people type them, each with the passage that answers it (document expansion,
    Nogueira et al., 2019), compared by words, pairs and parts of words: cosines of tf-idf.
    """

    def __init__(self, text: str, subjects: Iterable[Subject] = ()):
        """text: lines "= PAGE", "# BEGINNING" of a passage of that page, without marks, and then
        its questions, one a line. subjects: of each question, or none.
        """
        self.texts: list[str] = []
        self.answers: list[tuple[str, str]] = []  # page and beginning of a passage, of each
        page = beginning = ""
        for line in text.splitlines():
            if line.startswith("= "):
                page = line[2:]
            elif line.startswith("# "):
                beginning = line[2:]
            elif line:
                self.texts.append(line)
                self.answers.append((page, beginning))
        self._subjects = list(subjects)
        self._rows: dict[str, list[int]] = {}
        for row, line in enumerate(self.texts):
            for feature in list_features(line):
                self._rows.setdefault(feature, []).append(row)
        squares = [0.0] * len(self.texts)
        for feature, rows in self._rows.items():
            square = self._weigh(feature) ** 2
            for row in rows:
                squares[row] += square
        self._norms = list(map(math.sqrt, squares))

    def _weigh(self, feature: str) -> float:
        many = len(self._rows.get(feature, ()))
        weight = math.log((len(self.texts) + 1) / (many + 0.5)) * KINDS[feature[0]]
        return weight if many else weight * UNSEEN

    def compare(self, question: str) -> list[float]:
        """Cosine of a question with each of these."""
        weights = {feature: self._weigh(feature) for feature in list_features(question)}
        norm = math.sqrt(sum(weight**2 for weight in weights.values())) or 1.0
        products = [0.0] * len(self.texts)
        for feature, weight in weights.items():
            for row in self._rows.get(feature, ()):
                products[row] += weight**2
        return [product / norm / length for product, length in zip(products, self._norms)]

    def agree(self, subject: Subject | None) -> list[float]:
        """Agreement of a question's subject with each of these."""
        if subject is None or not self._subjects:
            return [0.0] * len(self.texts)
        return [subject.agree(other) for other in self._subjects]


def list_features(text: str) -> set[str]:
    """List the stems of a question's words, pairs of them, and the words' parts of four letters."""
    words = re.findall(r"[a-z0-9_]+", text.lower())
    stems = list(map(stem_word, words))
    pairs = (f"2{first} {second}" for first, second in itertools.pairwise(stems))
    marked = (f"<{word}>" for word in set(words))
    parts = (f"3{word[i : i + 4]}" for word in marked for i in range(len(word) - 3))
    return {*(f"1{stem}" for stem in stems), *pairs, *parts}


def stem_word(word: str) -> str:
    """The first six letters of a word without its ending: "stop" of "stops" and "stopped"."""
    stem = re.sub(r"(?<=[a-z]{3})(ing|ed|es|s|e)$", "", word) if not word.endswith("ss") else word
    return re.sub(r"([^lsz])\1$", r"\1", stem)[:6]
