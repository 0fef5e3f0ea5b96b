"""Questions to try, of a model's card."""

from __future__ import annotations

import pytest

from mlx_llama.core.files.checkpoint import GUIDE_PATH
from mlx_llama.core.files.hub import read_examples


@pytest.mark.parametrize(
    "text, questions",
    [
        ("---\nwidget:\n- text: Who?\n- text: Why?\n  example_title: b\n---\n", ["Who?", "Why?"]),
        ("---\nwidget:\n- messages:\n  - role: user\n    content: Hi there\n---\n", ["Hi there"]),
        ("---\nwidget:\n- src: a.png\n- text: [1]\n- text: " + "x" * 300 + "\n---\n", []),
        ("---\nwidget: !!python/object/apply:os.system [ls]\n---\n", []),
        ("---\nwidget: 5\n---\n", []),
        ("---\nwidget: [\n---\n", []),
        ("# widget:\n- text: a", []),
    ],
)
def test_a_card(text, questions, tmp_path):
    (tmp_path / "README.md").write_text(text)
    assert read_examples(tmp_path) == questions
    assert read_examples(tmp_path / "model.gguf") == questions  # a file beside it


def test_no_card(tmp_path):
    assert read_examples(tmp_path) == []
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert read_examples(tmp_path) == []


def test_the_card_of_the_guide_has_four():
    assert len(read_examples(GUIDE_PATH)) == 4
