"""Calls read out of text in pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from mlx_llama.core.text.tools import Tool, ToolDelta, ToolFormat, ToolParser


def make_sizes(seed: int) -> Iterator[int]:
    """Sizes of pieces: the whole text for seed 0, all alike for 1 to 3, and random ones."""
    source = random.Random(seed)
    while True:
        yield seed if 0 < seed < 4 else source.randint(1, 9) if seed else 1 << 20


def read(form: ToolFormat, text: str, tools: Sequence[Tool], seed: int = 0) -> ToolParser:
    """The parser after the text in pieces; checks that its news are its state."""
    parser, news, at, sizes = ToolParser(form, tools), [], 0, make_sizes(seed)
    while at < len(text):
        size = next(sizes)
        news += parser.push(text[at : at + size])
        at += size
    news += parser.finish()
    assert "".join(new for new in news if isinstance(new, str)) == parser.text
    for index, call in enumerate(parser.calls):
        deltas = [new for new in news if isinstance(new, ToolDelta) and new.index == index]
        first, *others = deltas
        assert (first.id, first.name, first.arguments) == (call.id, call.name, "")
        assert len(call.id) == 9 and call.id.isalnum()
        assert "".join(delta.arguments for delta in others) == call.arguments
        assert not any(delta.id or delta.name for delta in others)
    return parser
