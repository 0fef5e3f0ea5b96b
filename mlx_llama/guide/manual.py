"""The package's pages, searched by their words and by questions that lead to them: BM25 (Robertson
and Zaragoza, 2009) over sentences, rows of tables and lines of code.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .questions import Questions, Subject, stem_word

PACKAGE = Path(__file__).resolve().parents[1]
# A wheel has the pages within the package (see setup.py), a checkout beside it.
FOLDERS = (PACKAGE / "guide" / "pages", PACKAGE.parent)
# Beside it are the questions' subjects, as the guide sees them: the likeliest first tokens, and
# the square roots of their probabilities in steps of 1 / ROOTS: uint16 [questions, LIKELIEST, 2].
QUESTIONS = PACKAGE / "guide" / "questions.txt"
ROOTS, LIKELIEST = 65535, 4
# Figures match any question with a number.
LEFT_OUT = ("figures", "design")
OTHERS = "Beside "  # begins the titles of sections on other programs

# BM25's usual constants. Those below were tuned on examples/training/evaluation.
K1, B = 1.2, 0.75
LONGEST = 1000  # characters of a question that are searched for
SIMILAR = 0.8  # least similarity of a misspelt word and a word of the pages, as difflib's ratio
UNKNOWN = 0.75  # weight of a word that no page has, relative to the rarest words'
SECTION = 0.3  # weight of the section's score, added to the passage's
HELP = 1.2  # factor of the pages of error messages and of commands
HELP_PAGES = ("troubleshooting.md", "commands.md", "coming-from.md")
INSIDE = 0.7  # factor of the pages of how it is built
INSIDE_PAGES = ("backends.md", "numerics.md", "more-than-one-machine.md")
FIRST = 2  # further times that a row's first cell counts, which names its subject
AGREEMENT = 0.4  # weight of agreeing subjects, relative to the cosine
OTHER_ASKED, OTHERS_ASKED = 0.15, 3  # weight and number of a passage's further questions
RELEVANCE, MAX_RELEVANCE = 0.03, 30.0  # weight of the passage's text, and its maximum
# Least score to show, and how much is added to it where the model doubts, and where it is sure of
# another subject
MIN_SCORE, DOUBTED, DISAGREED = 0.6, 0.6, 0.5
POINTERS, NEAR = 3, 0.55  # maximum number to show; least score as a share of the best one's
MAX_CELLS = 4  # maximum number in a row; longer rows are figures
PASSAGE = 120  # characters after which a paragraph is split at the next sentence
QUOTED, QUOTED_LATER = 300, 160  # maximum characters to show of the best passage, of others

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
    macbook computer machine pc phone tablet; second sec; gibberish garbage nonsense garbled babbles
    sense; long longest length limit maximum max most cap; old outdated newer; webpage website web
    ui gui interface browser page; convert shrink compress quantize quantise quantisation; close
    quit exit leave leaves; internet offline online network wifi; delete remove erase rm clear rid
    uninstall; download pull fetch; http api rest server; json schema regex grammar; apple mac
    macbook; rtx geforce nvidia; password key; broken corrupt corrupted damaged truncated; stops
    breaks cut; sentence text; occupied busy taken already; wife colleague friend mate another;
    reach connect connection listens; load open run; train finetune fine-tuning; picture image
    photo; function tool; ignored effect; nan infinite finite; vocabulary tokenizer; parse parsed
    stays; timed timeout longer; first starting start; reply answer response; login account licence;
    restart reboot; overwrite overwritten exists; incomplete half halfway cut
"""


class Passage(NamedTuple):
    """A few sentences, a row of a table or a line of code."""

    page: str  # path from the folder, such as docs/server.md
    title: str  # the heading above it
    text: str  # Markdown
    wording: str = ""  # the beginning of the text of a row, one of several of its first cell

    @property
    def remedy(self) -> str:
        """The text without its wording."""
        return self.text.removeprefix(self.wording)

    @property
    def plain(self) -> str:
        """The text without marks of links, code, bold type and lists."""
        text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", self.text)
        return text.replace("`", "").replace("**", "").removeprefix("- ")

    def quote(self, length: int = QUOTED) -> str:
        """The address and the beginning of the text."""
        text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", self.text)  # links lead nowhere here
        text = text.replace("\\|", "|")  # escaped in a table's cell
        if len(text) > length:
            text = text[:length].rsplit(" ", 1)[0]
            text += "` ..." if text.count("`") % 2 else " ..."  # close code that was cut
        return f"{self.page}, {self.title}: {text}"


class Match(NamedTuple):
    """A passage that may answer a question."""

    passage: Passage
    score: float
    agreement: float  # the best of the question's subject with those of the passage's questions


class Index:
    """Texts ranked by BM25."""

    def __init__(self, texts: Iterable[str]):
        self._counts = [Counter(list_stems(text)) for text in texts]
        self._lengths = [sum(count.values()) for count in self._counts]
        self._mean = sum(self._lengths) / max(1, len(self._lengths))
        self._frequency = Counter(stem for count in self._counts for stem in count)

    def correct(self, stems: set[str]) -> set[str]:
        """Replace a word that no text has by the most similar one, if there is one."""
        if stems & self._frequency.keys():
            return stems
        close = (
            difflib.get_close_matches(stem, self._frequency, 1, SIMILAR)
            for stem in stems
            if len(stem) > 4  # shorter ones resemble too many
        )
        return {match for matches in close for match in matches} or stems

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

    def __init__(self, pages: Iterable[tuple[str, str]], questions: Questions | None = None):
        """pages: (path to show, Markdown) each."""
        self.passages = [passage for page, text in pages for passage in split_page(page, text)]
        sections: dict[tuple[str, str], list[str]] = {}
        for page, title, text, _ in self.passages:
            sections.setdefault((page, title), [page, title]).append(text)
        self._place = {key: index for index, key in enumerate(sections)}
        self._sections = Index(map(" ".join, sections.values()))
        self._passages = Index(
            f"{title} {text}" + FIRST * f" {wording or text.partition(': ')[0]}"
            for _, title, text, wording in self.passages
        )
        self._questions = questions or Questions("")
        answers = {
            (page, beginning): self.locate(page, beginning)
            for page, beginning in dict.fromkeys(self._questions.answers)
        }
        self._answers = [answers[place] for place in self._questions.answers]
        # A page may have been edited since: its questions are passed over.
        self.lost = [place for place, passage in answers.items() if passage is None]

    def locate(self, page: str, beginning: str) -> Passage | None:
        """The passage of a page whose text, without marks, begins so; None if there is none."""
        for passage in self.passages:
            if passage.page == page and passage.plain.startswith(beginning):
                return passage
        return None

    def find(self, question: str, subject: Subject | None = None) -> list[Match]:
        """Find passages that help with a question, the best first; none if it is about something
        else. subject: the question's, as a model sees it; None: by words alone.
        """
        matches = self.rank(question[:LONGEST], subject)[:POINTERS]
        least = NEAR * matches[0].score if matches else 0.0
        doubt, confidence = (subject.doubt, subject.confidence) if subject else (1.0, 0.0)
        least = max(least, MIN_SCORE + DOUBTED * max(0.0, doubt - 0.5))
        return [
            match
            for match in matches
            if match.score > max(least, MIN_SCORE + DISAGREED * confidence * (1 - match.agreement))
        ]

    def rank(self, question: str, subject: Subject | None) -> list[Match]:
        """Rate all passages that share a word or a subject with a question, the best first."""
        by_words: dict[str, tuple[float, Passage]] = {}
        for relevance, passage in self._rate(question):
            if passage.remedy not in by_words or relevance > by_words[passage.remedy][0]:
                by_words[passage.remedy] = relevance, passage
        asked: dict[str, list[tuple[float, float]]] = {}
        near, agreed = self._questions.compare(question), self._questions.agree(subject)
        for answer, cosine, agreement in zip(self._answers, near, agreed):
            if answer is None:
                continue
            total = cosine + AGREEMENT * agreement
            asked.setdefault(answer.remedy, []).append((total, agreement))
            by_words.setdefault(answer.remedy, (0.0, answer))
        matches = []
        for remedy, (relevance, passage) in by_words.items():
            best, *others = sorted(asked.get(remedy, [(0.0, 0.0)]), reverse=True)[
                : OTHERS_ASKED + 1
            ]
            score = best[0] + OTHER_ASKED * sum(total for total, _ in others)
            score += RELEVANCE * min(relevance, MAX_RELEVANCE)
            agreement = max((agreement for _, agreement in asked.get(remedy, ())), default=0.0)
            matches.append(Match(passage, score, agreement))
        return sorted(matches, key=lambda match: -match.score)

    def _rate(self, question: str) -> Iterator[tuple[float, Passage]]:
        """Rate passages by their words alone."""
        wanted = [self._passages.correct(stems) for stems in list_meanings(question)]
        sections = self._sections.score(wanted)
        for passage, (score, covered) in zip(self.passages, self._passages.score(wanted)):
            whole, all_covered = sections[self._place[passage.page, passage.title]]
            if score:
                factor = HELP if passage.page.endswith(HELP_PAGES) else 1.0
                factor = INSIDE if passage.page.endswith(INSIDE_PAGES) else factor
                yield factor * (score + SECTION * whole) * (covered + all_covered) / 2, passage


def write_pointers(passages: Sequence[Passage]) -> str:
    """Quote the best passage, and the beginnings of the others; "" for none."""
    later = [f"- Or {passage.quote(QUOTED_LATER)}" for passage in passages[1:]]
    return "\n".join([*(f"See {passage.quote()}" for passage in passages[:1]), *later])


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
        parts: list[tuple[str, str]] = []  # texts, of rows with a wording of the first cell
        if is_fence or is_row or heading or not line.strip() or line.startswith("- "):
            parts, paragraph = [(part, "") for part in split_sentences(" ".join(paragraph))], []
        if code and code != "text" and not is_fence:
            parts = [(line.strip(), "")]
        elif is_row and not is_rule(line) and not is_rule(following):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if len(cells) <= MAX_CELLS and re.search(r"[A-Za-z]{3}", "".join(cells[1:])):
                parts += [
                    (": ".join(filter(None, [wording, *cells[1:]])), wording)
                    for wording in cells[0].split("; ")
                ]
        elif not code and not is_fence and not heading and not is_row and line.strip():
            paragraph.append(line.strip())
        # Skip lines without words of a question, such as a bracket or a call of `print`.
        if not title.startswith(OTHERS):
            yield from (
                Passage(page, title, text=part, wording=wording)
                for part, wording in parts
                if len(list_stems(part)) > 1
            )
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
    """Load the pages of this package and the questions; none if neither folder has the pages."""
    folder = next((folder for folder in FOLDERS if (folder / "docs").is_dir()), None)
    if folder is None:
        return Manual([])
    paths = [folder / "README.md", *sorted((folder / "docs").glob("*.md"))]
    pages = (
        (path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
        if path.is_file() and path.stem not in LEFT_OUT
    )
    subjects = (
        Subject(0.0, {int(token): float(root) / ROOTS for token, root in line if root})
        for line in np.load(QUESTIONS.with_suffix(".npy"))
    )
    return Manual(pages, Questions(QUESTIONS.read_text(encoding="utf-8"), subjects))
