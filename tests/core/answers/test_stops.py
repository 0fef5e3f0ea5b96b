"""Stop strings in text that is split into any pieces."""

from __future__ import annotations

from hypothesis import example, given, strategies as st

from mlx_llama.core.answers.stops import Stops

text = st.text("ab<|", max_size=30)


@given(st.lists(text, max_size=8), st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=3))
@example(["aa", "b"], ["aab"])
def test_any_split_is_cut_before_the_earliest_stop_string(pieces, stops):
    matcher, shown = Stops(tuple(stops)), ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert not any(stop in shown for stop in stops)
        if matcher.matched:
            break
    else:
        shown += matcher.finish()
    whole = "".join(pieces)
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    if matcher.matched:
        assert matcher.matched in stops and whole.startswith(shown + matcher.matched)
    else:
        assert shown == whole and not cuts
    if len(pieces) == 1:
        assert shown == whole[: min(cuts, default=len(whole))]


def test_text_is_withheld_no_longer_than_needed():
    matcher = Stops(("<|end|>",))
    assert matcher.push("hello <") == "hello "
    assert matcher.push("|e") == ""
    assert matcher.push("x") == "<|ex"
    assert matcher.push("<|end") + matcher.finish() == "<|end"


def test_a_stop_string_may_be_as_long_as_a_page():
    long = "x" * 1_000_000  # all of its beginnings would not fit in memory
    matcher = Stops((long,))
    assert matcher.push("ax") == "a" and matcher.push(long[:-2]) == ""
    assert matcher.push("x") == "" and matcher.matched == long


class Counted(str):
    """A text that counts how often it is looked at."""

    looks = 0

    def __lt__(self, other):
        Counted.looks += 1
        return str.__lt__(self, other)

    def __gt__(self, other):
        Counted.looks += 1
        return str.__gt__(self, other)

    def startswith(self, *arguments):
        Counted.looks += 1
        return str.startswith(self, *arguments)


def test_a_character_meets_few_of_thousands_of_stop_strings():
    stops = [Counted(f"a{number:05}" + "x" * (number % 100)) for number in range(10_000)]
    matcher, text = Stops(stops), "banana a0 a12 a999 " * 10
    Counted.looks = 0
    assert "".join(map(matcher.push, text)) + matcher.finish() == text
    assert Counted.looks < 40 * len(text)
    assert matcher.push("a0") + matcher.push("1200 ") == "" and matcher.matched == "a01200"
