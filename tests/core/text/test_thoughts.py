"""Thoughts: split off at every size of the pieces, in the templates of the models that have
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from mlx_llama.core.text.thoughts import FORMATS, Thought, ThoughtParser, find_thoughts
from mlx_llama.core.text.thoughts.marks import Marks

MARKS = [form for form in FORMATS if isinstance(form, Marks)]
GRANITE = MARKS[0]
TEMPLATES = Path(__file__).resolve().parents[2] / "data/thought-templates"


def split(parser: ThoughtParser, pieces) -> tuple[str, str]:
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.push(
        "", is_last=True
    )
    assert all(parts)
    return "".join(part.text for part in parts if isinstance(part, Thought)), "".join(
        part for part in parts if isinstance(part, str)
    )


# (answer, whether the prompt opened the thought, thought, text): inputs of vLLM's tests of
# reasoning parsers
CASES = [
    (
        "<think>This is a reasoning section</think>This is the rest",
        False,
        "This is a reasoning section",
        "This is the rest",
    ),
    (
        "This is a reasoning section</think>This is the rest",
        True,
        "This is a reasoning section",
        "This is the rest",
    ),
    (
        "<think>\nThis is a reasoning section\n</think>\n\nThis is the rest",
        False,
        "This is a reasoning section",
        "This is the rest",
    ),
    ("This is content", False, "", "This is content"),
    ("<think>This is\nThat", False, "This is\nThat", ""),
    ("</think>This is the rest", True, "", "This is the rest"),
    ("<think></think>This is the rest", False, "", "This is the rest"),
    ("  <think>a</think> b <think>c</think>", False, "a", "b <think>c</think>"),
    ("<thinking is no mark", False, "", "<thinking is no mark"),
    ("a < b </think> c", False, "", "a < b </think> c"),
    ("<think>x </thi </think>y", False, "x </thi", "y"),
    ("<think>hm</think><response>Yes.</response>", False, "hm", "Yes."),
    (" begins with a space", False, "", " begins with a space"),
]


@pytest.mark.parametrize("answer, is_open, thought, text", CASES)
def test_splits_at_every_size_of_the_pieces(answer, is_open, thought, text):
    for size in range(1, len(answer) + 1):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        parser = GRANITE.parser("thought" if is_open else "before")
        assert split(parser, pieces) == (thought, text), size


@given(
    st.lists(
        st.sampled_from(
            ["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a", "<response>", "[THINK]"]
        ),
        max_size=9,
    ),
    st.sampled_from(MARKS),
    st.sampled_from(["before", "thought"]),
)
def test_pieces_make_no_difference_and_lose_nothing(pieces, form, state):
    whole = "".join(pieces)
    parts = split(form.parser(state), pieces)
    assert parts == split(form.parser(state), [whole]) == split(form.parser(state), list(whole))
    marks = (form.start, form.end, *form.answer)

    def letters(text: str) -> str:
        while any(mark in text for mark in marks):  # what is left may be a mark again
            for mark in marks:
                text = text.replace(mark, "")
        return "".join(text.split())

    assert letters("".join(parts)) == letters(whole)


def test_only_granite_has_marks_around_its_answer():
    source = "{{ '<think></think>' }} {{ '<response></response>' }}"
    assert find_thoughts(source) is GRANITE
    other = find_thoughts("<think>")
    assert split(other.parser(), ["<think>a</think>\n\n<response>b"]) == ("a", "<response>b")


def test_templates_of_models_that_think():
    assert {
        path.stem: find_thoughts(path.read_text()).start for path in TEMPLATES.glob("*.jinja")
    } == {"qwen3": "<think>", "r1": "<think>", "ministral": "[THINK]"}
    starts = {
        path.stem: form.start
        for path in (TEMPLATES.parent / "tool-templates").glob("*")
        if (form := find_thoughts(path.read_text()))
    }
    assert starts == {
        "apertus": "<|inner_prefix|>",
        "gpt-oss": "<|channel|>analysis<|message|>",
    }
