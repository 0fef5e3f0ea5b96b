"""The pages, searched by words: every message of the troubleshooting page leads to its row."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_llama.guide.manual import (
    LIKELIEST,
    QUESTIONS as QUESTIONS_FILE,
    Manual,
    Passage,
    list_stems,
    load_manual,
    split_page,
    write_pointers,
)
from mlx_llama.guide.questions import Questions, Subject

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples/training"))

from guide_data import read_lines  # noqa: E402

PATH = "docs/troubleshooting.md"
PAGE = (ROOT / PATH).read_text(encoding="utf-8")
SYMPTOMS = [
    wording
    for row in re.findall(r"^\| (.+?) \| .+ \|$", PAGE, re.M)
    if row not in ("message", "what you see")
    for wording in row.split("; ")
]

EXAMPLE = """# A page

First sentence. It has a [link](x.md) and
goes on.

## Rows

| message | what to do |
|---|---|
| `port in use`; port 80 is taken | take another port |

```sh
run --port 8081   # another port
```

```text
recorded output with many words
```
"""


def test_a_page_in_passages():
    passages = list(split_page("docs/page.md", EXAMPLE))
    assert [(title, text) for _, title, text, _ in passages] == [
        ("A page", "First sentence. It has a [link](x.md) and goes on."),
        ("Rows", "`port in use`: take another port"),
        ("Rows", "port 80 is taken: take another port"),
        ("Rows", "run --port 8081   # another port"),
    ]
    manual = Manual([("docs/page.md", EXAMPLE)])
    assert manual.find("what is the meaning of life") == manual.find("") == []
    assert Manual([]).find("port in use") == []


def test_messages_find_their_rows():
    """Nearly every wording of a message leads to its row."""
    asked = [symptom for symptom in SYMPTOMS if len(list_stems(symptom)) > 1]
    remedies = {passage.wording: passage.remedy for passage in load_manual().passages}
    missed = [
        symptom
        for symptom in asked
        if load_manual().rank(symptom.replace("`", ""), None)[0].passage.remedy != remedies[symptom]
    ]
    assert len(asked) >= 200 and len(missed) <= 0.05 * len(asked), missed


ROWS = """# Page

| message | what to do |
|---|---|
| the template is old; an old template | fetch it again |
| the template is slow | wait for it |
"""


QUESTIONS = """= a.md
# the template is old
is there a newer form
how do I renew it
# the template is slow
why does it take an hour
"""


def test_questions_lead_to_their_passages():
    """Also misspelt ones, and by words of the page alone. A row is shown once."""
    manual = Manual([("a.md", ROWS)], Questions(QUESTIONS))
    old, slow = ": fetch it again", ": wait for it"

    def rank(question: str) -> list[str]:
        return [match.passage.remedy for match in manual.rank(question, None)]

    for asked in ("how do i renew that?", "it's not renewwed", "a newer form"):
        assert rank(asked) == [old, slow], asked
    assert rank("it takes an hour, why") == [slow, old]
    assert [match.passage.remedy for match in manual.find("how do I renew it")] == [old]
    assert not manual.find("what is the meaning of life") and not manual.find("")
    edited = Manual([("a.md", ROWS)], Questions(QUESTIONS.replace("is old", "is new")))
    assert edited.lost == [("a.md", "the template is new")]
    assert edited.rank("it takes an hour, why", None)[0].passage.remedy == slow


def test_a_model_ranks_passages_by_their_subjects():
    old, slow = Subject(0.0, {1: 0.8, 2: 0.6}), Subject(0.0, {2: 1.0})
    manual = Manual([("a.md", ROWS)], Questions(QUESTIONS, [old, old, slow]))
    asked = "an hour of the newer one"
    shown = [manual.rank(asked, subject)[0] for subject in (old, slow)]
    assert [match.passage.remedy for match in shown] == [": fetch it again", ": wait for it"]
    assert [match.agreement for match in shown] == pytest.approx([1.0, 1.0])
    # The model doubts, or is sure of another subject.
    asked = "how should I renew it"
    assert manual.find(asked, old) and not manual.find(asked, Subject(0.0, {3: 1.0}))
    assert not manual.find(asked, Subject(0.99, {3: 1.0}))
    lines = write_pointers([match.passage for match in shown]).splitlines()
    assert lines[0].startswith("See a.md, Page:") and lines[1].startswith("- Or a.md, Page:")


def test_every_question_has_its_passage_and_its_subject():
    """No address is out of date, none is there twice, and no question has two answers."""
    lines = QUESTIONS_FILE.read_text(encoding="utf-8").splitlines()
    questions = Questions("\n".join(lines))
    assert load_manual().lost == []  # else their lines in questions.txt follow the page
    assert len(questions.texts) == len(set(map(str.lower, questions.texts))) > 3000
    assert len(set(questions.answers)) == sum(line.startswith("# ") for line in lines)
    subjects = np.load(QUESTIONS_FILE.with_suffix(".npy"))
    assert subjects.dtype == np.uint16 and subjects.shape == (len(questions.texts), LIKELIEST, 2)
    assert QUESTIONS_FILE.stat().st_size < 250_000


def test_questions_of_the_evaluation_are_no_questions_of_the_pages():
    asked = {
        plain(json.loads(line)["question"])
        for name in ("questions", "questions2", "trouble", "tuning")
        for line in read_lines(f"evaluation/{name}.jsonl")
    }
    texts = Questions(QUESTIONS_FILE.read_text(encoding="utf-8")).texts
    assert not [text for text in texts if len(text.split()) > 2 and plain(text) in asked]


def plain(text: str) -> str:
    return " ".join(re.findall("[a-z0-9]+", text.lower()))


def test_other_subjects_find_nothing():
    questions = [
        row["question"]
        for name in ("questions", "questions2")
        for row in map(json.loads, read_lines(f"evaluation/{name}.jsonl"))
        if row["kind"] == "off-topic"
    ]
    shown = [question for question in questions if load_manual().find(question)]
    assert len(questions) == 50 and len(shown) <= 6, shown


def test_a_long_passage_is_shortened():
    shown = Passage("a.md", "A", "words of a long sentence " * 40).quote()
    assert shown.startswith("a.md, A: words of a long") and shown.endswith(" ...")
    assert len(shown) < 330
    shown = Passage("a.md", "A", "words of `code " + "words " * 80).quote()
    assert shown.endswith("words` ...")
