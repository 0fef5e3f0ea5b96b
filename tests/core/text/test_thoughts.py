"""Thoughts: split off at every size of the pieces, in the templates of the models that have
them.
"""

from __future__ import annotations

import pytest
from cases.texts import THOUGHT_TEMPLATES, TOOL_TEMPLATES, check_pieces, split
from hypothesis import given, strategies as st

from mlx_llama.core.text.thoughts import FORMATS, find_thoughts
from mlx_llama.core.text.thoughts.marks import Marks

MARKS = [form for form in FORMATS if isinstance(form, Marks)]
GRANITE = MARKS[0]


# Inputs of vLLM's tests of reasoning parsers: (answer, thought, text), and those of an answer whose
# thought the prompt opened
REST = "This is the rest"
CASES = [
    (f"<think>Let me see</think>{REST}", "Let me see", REST),
    (f"<think>\nLet me see\n</think>\n\n{REST}", "Let me see", REST),
    ("This is content", "", "This is content"),
    ("<think>This is\nThat", "This is\nThat", ""),
    (f"<think></think>{REST}", "", REST),
    ("  <think>a</think> b <think>c</think>", "a", "b <think>c</think>"),
    ("<thinking is no mark", "", "<thinking is no mark"),
    ("a < b </think> c", "", "a < b </think> c"),
    ("<think>x </thi </think>y", "x </thi", "y"),
    ("<think>hm</think><response>Yes.</response>", "hm", "Yes."),
    (" begins with a space", "", " begins with a space"),
]
OPENED = [(f"Let me see</think>{REST}", "Let me see", REST), (f"</think>{REST}", "", REST)]


@pytest.mark.parametrize("answer, thought, text", CASES + OPENED)
def test_splits_at_every_size_of_the_pieces(answer, thought, text):
    state = "thought" if (answer, thought, text) in OPENED else "before"
    check_pieces(lambda: GRANITE.parser(state), answer, (thought, text))


# Inputs of llama.cpp's tests of Gemma 4, and others
THOUGHT = "<|channel>thought\nI'm\nthinking<channel|>"
EMPTY = "<|channel>thought\n<channel|>"
CHANNELS = [
    (f"{THOUGHT}{REST}", "I'm\nthinking", REST),
    (f"<|channel>thought<channel|>{REST}", "", REST),
    (REST, "", REST),
    (f"{EMPTY}{REST}<channel|>", "", REST),
    (f"{EMPTY}{REST}{EMPTY}", "", REST),
    (f"{EMPTY}{REST}{EMPTY}<channel|>", "", REST),
    (f"<|channel>{EMPTY}{REST}", "", REST),
    (
        f"{THOUGHT}<|tool_call>call:f{{}}<tool_call|>",
        "I'm\nthinking",
        "<|tool_call>call:f{}<tool_call|>",
    ),
    (f"a {THOUGHT} b {THOUGHT}", "I'm\nthinking" * 2, "a b "),
    ("<|channel>thought\nI am cut ", "I am cut", ""),
    (" <|channel > < chan", "", " <|channel > < chan"),
]


@pytest.mark.parametrize("answer, thought, text", CHANNELS)
def test_gemma_4_thinks_at_any_place(answer, thought, text):
    form = find_thoughts(TOOL_TEMPLATES["gemma-4"])
    check_pieces(form.parser, answer, (thought, text))
    if answer.startswith(THOUGHT):  # templates open a thought after a tool's result
        opened = answer.removeprefix(form.start)
        check_pieces(lambda: form.parser("thought"), opened, (thought, text))


FRAGMENTS = ["<think>", "</think>", "<th", "ink>", "</", " ", "\n", "a", "<response>", "[THINK]"]
FRAGMENTS += ["<|channel>", "thought", "<channel|>", "<|chan"]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=9),
    st.sampled_from(MARKS),
    st.sampled_from(["before", "thought"]),
)
def test_pieces_make_no_difference_and_lose_nothing(pieces, form, state):
    whole = "".join(pieces)
    parts = split(form.parser(state), pieces)
    assert parts == split(form.parser(state), [whole]) == split(form.parser(state), list(whole))
    marks = (form.start, form.end, *form.answer, *form.marks)

    def letters(text: str) -> str:
        while any(mark in text for mark in marks):  # what is left may be a mark again
            for mark in marks:
                text = text.replace(mark, "")
        return "".join(text.split())

    shown, wanted = letters("".join(parts)), letters(whole)
    if "<|channel>" in form.marks:  # whose thoughts may follow a text
        shown, wanted = sorted(shown), sorted(wanted)
    assert shown == wanted


def test_only_granite_has_marks_around_its_answer():
    source = "{{ '<think></think>' }} {{ '<response></response>' }}"
    assert find_thoughts(source) is GRANITE
    other = find_thoughts("<think>")
    assert split(other.parser(), ["<think>a</think>\n\n<response>b"]) == ("a", "<response>b")


def test_templates_of_models_that_think():
    sources = THOUGHT_TEMPLATES | TOOL_TEMPLATES
    forms = {name: find_thoughts(source) for name, source in sources.items()}
    assert {name: form.start for name, form in forms.items() if form} == {
        **{"qwen3": "<think>", "r1": "<think>", "ministral": "[THINK]"},
        **{"apertus": "<|inner_prefix|>", "gpt-oss": "<|channel|>analysis<|message|>"},
        **{"gemma-4": "<|channel>thought", "gemma-4-interleaved": "<|channel>thought"},
        **{"lfm2.5": "<think>", "lfm2.5-a1b": "<think>", "qwen3.5": "<think>"},
    }
