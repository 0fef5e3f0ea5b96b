"""The package's pages, searched by words: BM25 (Robertson and Zaragoza, 2009) over sentences, rows
of tables and lines of code.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2]
# A wheel has the pages within the package (see setup.py), a checkout beside it.
FOLDERS = (PACKAGE / "guide" / "pages", PACKAGE.parent)
# Figures match any question with a number.
LEFT_OUT = ("figures", "design")

# BM25's usual constants. Those below were tuned on examples/training/evaluation.
K1, B = 1.2, 0.75
UNKNOWN = 0.75  # weight of a word that no page has, relative to the rarest words'
SECTION = 0.3  # weight of the section's score, added to the passage's
ANSWER = 0.6  # weight of the answer's first words, added to the question's
HELP = 1.2  # factor of the pages of error messages and of commands
HELP_PAGES = ("troubleshooting.md", "commands.md", "coming-from.md")
FIRST = 2  # further times that a row's first cell counts, which names its subject
MIN_RELEVANCE = 9.0  # score times the covered part of the question
MAX_CELLS = 4  # of a row; longer ones are figures
PASSAGE = 120  # characters after which a paragraph is split at the next sentence
QUOTED = 300  # maximum number of characters to show

STOP_WORDS = frozenset(
    """a about again all also am an and any are as at be because been but by can cannot could did do
    does doing don for from get gets getting give given go goes got had happen happens has have he
    help here how i if in into is it its just keep know let like llama may me mean means model
    more much my need no nor not now of ok on one only or other our out own please s same say
    says see she should show so some such t tell than thank thanks that the their them then there
    these they thing things this those to too try up us use used uses using very want was way we
    were what when where whether which while who why will with without would yes you your
    error exception message python hello hi something anything everything
    really""".split()
)
# Synonyms in questions and pages, in groups
SAME = """
    gpu graphics card; memory ram; slow fast speed; crash crashed killed kills; laptop notebook
    computer machine pc phone tablet; gibberish garbage nonsense garbled babbles sense; long longest
    length limit maximum max most cap; old outdated newer; webpage website web ui gui interface
    browser page; convert shrink compress quantize quantise quantisation; close quit exit leave
    leaves; internet offline online network wifi; delete remove erase rm clear rid uninstall;
    download pull fetch; http api rest server; json schema regex grammar; apple mac macbook; rtx
    geforce nvidia; password key; broken corrupt corrupted damaged truncated; stops breaks cut;
    sentence text; occupied busy taken already; wife colleague friend mate another; reach connect
    connection listens; load open run; train finetune fine-tuning; picture image photo; function
    tool; ignored effect; nan infinite finite; vocabulary tokenizer; parse parsed stays; timed
    timeout longer; first starting start; reply answer response; login account licence; restart
    reboot; overwrite overwritten exists; incomplete half halfway cut
"""


class Passage(NamedTuple):
    """A few sentences, a row of a table or a line of code."""

    page: str  # path from the folder, such as docs/server.md
    title: str  # the heading above it
    text: str  # Markdown

    def __str__(self) -> str:
        text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", self.text)  # links lead nowhere here
        if len(text) > QUOTED:
            text = f"{text[:QUOTED].rsplit(' ', 1)[0]} ..."
        return f"See {self.page}, {self.title}: {text}"


class Index:
    """Texts ranked by BM25."""

    def __init__(self, texts: Iterable[str]):
        self._counts = [Counter(list_stems(text)) for text in texts]
        self._lengths = [sum(count.values()) for count in self._counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths))
        self._frequency = Counter(stem for count in self._counts for stem in count)

    def score(self, wanted: Sequence[set[str]]) -> list[tuple[float, float]]:
        """Return (BM25, covered share of the question's weight) of each text.

        wanted: a set of stems for each word of the question, synonyms included.
        """
        total = len(self._counts)
        most = [max(self._frequency[stem] for stem in stems) for stems in wanted]
        weights = [
            math.log(1 + (total - many + 0.5) / (many + 0.5)) * (1 if many else UNKNOWN)
            for many in most
        ]
        scores = []
        for count, length in zip(self._counts, self._lengths):
            flat = K1 * (1 - B + B * length / self._mean)
            matches = [
                (weight, many)
                for weight, stems in zip(weights, wanted)
                if (many := max(count[stem] for stem in stems))
            ]
            score = sum(weight * many * (K1 + 1) / (many + flat) for weight, many in matches)
            covered = sum(weight for weight, _ in matches) / (sum(weights) or 1.0)
            scores.append((score, covered))
        return scores


class Manual:
    """Pages in Markdown. The score of a passage includes its section's."""

    def __init__(self, pages: Iterable[tuple[str, str]]):
        """pages: (path to show, Markdown) each."""
        self.passages = [passage for page, text in pages for passage in split_page(page, text)]
        sections: dict[tuple[str, str], list[str]] = {}
        for page, title, text in self.passages:
            sections.setdefault((page, title), [page, title]).append(text)
        self._place = {key: index for index, key in enumerate(sections)}
        self._sections = Index(map(" ".join, sections.values()))
        self._passages = Index(
            f"{title} {text}" + FIRST * f" {text.partition(': ')[0]}"
            for _, title, text in self.passages
        )

    def find(self, question: str, answer: str = "") -> Passage | None:
        """Find the passage that helps with a question; None if none has enough of its words.

        answer: the model's, whose first words may name the subject.
        """
        wanted, topic = list_meanings(question), list_meanings(re.split(r"[.:] ", answer)[0])
        if not wanted:
            return None
        sections, agreed = self._sections.score(wanted), self._passages.score(topic)
        best, relevance = None, MIN_RELEVANCE
        for index, (score, covered) in enumerate(self._passages.score(wanted)):
            passage = self.passages[index]
            whole, all_covered = sections[self._place[passage.page, passage.title]]
            score += (SECTION * whole if score else 0.0) + ANSWER * agreed[index][0]
            factor = HELP if passage.page.endswith(HELP_PAGES) else 1.0
            rated = factor * score * (covered + all_covered) / 2
            if rated > relevance:
                best, relevance = passage, rated
        return best


def list_meanings(text: str) -> list[set[str]]:
    """List the stem of each word with those of its synonyms."""
    return [SYNONYMS.get(stem, {stem}) for stem in dict.fromkeys(list_stems(text))]


def list_stems(text: str) -> list[str]:
    """List the stem of each word, without stop words and short numbers."""
    return [
        stem_word(word)
        for word in re.findall(r"mlx_llama|[a-z0-9]+", text.lower())
        if word not in STOP_WORDS and len(word) > (2 if word.isdecimal() else 1)
    ]


def stem_word(word: str) -> str:
    """The first six letters of a word without its ending: "stop" of "stops" and "stopped"."""
    stem = re.sub(r"(?<=[a-z]{3})(ing|ed|es|s|e)$", "", word) if not word.endswith("ss") else word
    return re.sub(r"([^lsz])\1$", r"\1", stem)[:6]


def group_synonyms(groups: str) -> dict[str, set[str]]:
    """Map each stem to the stems of the same meaning, itself included."""
    result: dict[str, set[str]] = {}
    for group in groups.split(";"):
        stems = set(list_stems(group))
        for stem in stems:
            result[stem] = result.get(stem, set()) | stems
    return result


SYNONYMS = group_synonyms(SAME)


def split_page(page: str, text: str) -> Iterator[Passage]:
    """Split a page in Markdown into passages, without heads of tables and recorded output."""
    title, code, paragraph = "", "", list[str]()
    lines = [*text.splitlines(), ""]
    for line, following in zip(lines, [*lines[1:], ""]):
        is_fence, is_row = line.startswith("```"), line.startswith("|")
        heading = None if code else re.match(r"#+ (.*)", line)
        parts: list[str] = []
        if is_fence or is_row or heading or not line.strip() or line.startswith("- "):
            parts, paragraph = split_sentences(" ".join(paragraph)), []
        if code and code != "text" and not is_fence:
            parts = [line.strip()]
        elif is_row and not is_rule(line) and not is_rule(following):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) <= MAX_CELLS:  # a passage for each wording of the first cell
                parts += [
                    ": ".join(filter(None, [first, *cells[1:]])) for first in cells[0].split("; ")
                ]
        elif not code and not is_fence and not heading and not is_row and line.strip():
            paragraph.append(line.strip())
        # Skip lines without words of a question, such as a bracket or a call of `print`.
        yield from (Passage(page, title, part) for part in parts if len(list_stems(part)) > 1)
        if is_fence:
            code = "" if code else line[3:].strip() or "text"
        if heading:
            title = heading[1]


def is_rule(line: str) -> bool:
    """True for the line below the head of a table."""
    return line.startswith("|-")


def split_sentences(text: str) -> list[str]:
    """Split a paragraph into parts of whole sentences."""
    parts = [""]
    for sentence in re.split(r"(?<=[.;:]) (?=[A-Z`/*])", text):
        if len(parts[-1]) > PASSAGE and len(sentence) > PASSAGE / 2:
            parts.append("")
        parts[-1] = f"{parts[-1]} {sentence}".strip()
    return parts


@functools.cache
def load_manual() -> Manual:
    """Load the pages of this package; none if neither folder has them."""
    folder = next((folder for folder in FOLDERS if (folder / "docs").is_dir()), FOLDERS[1])
    paths = [folder / "README.md", *sorted((folder / "docs").glob("*.md"))]
    return Manual(
        (path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
        if path.is_file() and path.stem not in LEFT_OUT
    )
