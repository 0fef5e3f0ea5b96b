"""The pages, searched by words: every message of the troubleshooting page leads to its row."""

import json
import re
from pathlib import Path

from mlx_llama.core.text.manual import (
    Manual,
    Passage,
    Subject,
    list_stems,
    load_manual,
    split_page,
    write_pointers,
)

ROOT = Path(__file__).resolve().parents[3]
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
    passages = [load_manual().find(symptom.replace("`", "")) for symptom in asked]
    missed = [
        symptom
        for symptom, matches in zip(asked, passages)
        if not (matches and matches[0].text.startswith(symptom))
    ]
    assert len(asked) >= 200 and len(missed) <= 0.05 * len(asked), missed


ROWS = """# Page

| message | what to do |
|---|---|
| the template is old; an old template | fetch it again |
| the template is slow | wait for it |
"""


def test_a_model_ranks_passages_by_their_subjects():
    """A row is shown once, a misspelt word finds its row, and doubt hides all."""
    manual = Manual([("a.md", ROWS)])

    def read(text: str) -> Subject:
        return Subject(0.0, {1: 0.8, 2: 0.6} if "old" in text else {2: 1.0})

    shown = [passage.text for passage in manual.find("old tenplate", read)]
    assert shown == ["the template is old: fetch it again", "the template is slow: wait for it"]
    asked = "tenplate"
    assert manual.find(asked, read)[0].remedy == ": wait for it"
    assert write_pointers(manual.find(asked, read)).splitlines()[1].startswith("- Or a.md, Page:")
    assert not manual.find(asked, lambda text: Subject(0.99, {1: 1.0}))
    # The other rows' subject is another.
    subjects = {asked: {3: 1.0}}
    manual = Manual([("a.md", ROWS)])
    assert not manual.find(asked, lambda text: Subject(0.0, subjects.get(text, {1: 1.0})))


def test_other_subjects_find_nothing():
    folder = ROOT / "examples" / "training" / "evaluation"
    questions = [
        row["question"]
        for name in ("questions.jsonl", "questions2.jsonl")
        for row in map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())
        if row["kind"] == "off-topic"
    ]
    shown = [question for question in questions if load_manual().find(question)]
    assert len(questions) == 50 and len(shown) <= 6, shown


def test_a_long_passage_is_shortened():
    shown = Passage("a.md", "A", "words of a long sentence " * 40).quote()
    assert shown.startswith("a.md, A: words of a long") and shown.endswith(" ...")
    assert len(shown) < 330
