"""TeX formulas in Markdown, as MathML, which browsers draw without a library.

`$x$`, `\\(x\\)`, `$$x$$` and `\\[x\\]`; anything else stays text.
"""

from __future__ import annotations

import functools
import re
from html import escape, unescape
from typing import Any
from xml.etree.ElementTree import Element

CLOSINGS = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}
BLOCKS = ("$$", r"\[")
MAX_CHARACTERS = 3000  # characters of a formula
MOST_STEPS = 100_000  # places of a text where markup is looked for; each takes some 30 microseconds
FORMULA_STEPS = 10  # as long as a formula takes, besides a step for each of these characters
STEP_CHARACTERS = 4
# MathML without elements that load, link or style.
TAGS = frozenset(
    "math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms "
    "mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none".split()
)
ATTRIBUTES = frozenset(
    "accent accentunder columnalign columnlines depth display displaystyle fence form height "
    "linethickness lspace mathcolor mathvariant maxsize minsize notation rowlines rspace "
    "scriptlevel separator stretchy width".split()
)
# Environments of amsmath that latex2mathml does not align; arrays replace them.
ALIGNED = re.compile(r"\\(begin|end)\{(?:aligned|align|alignat|split|eqnarray)\*?\}")
GATHERED = re.compile(r"\\(begin|end)\{(?:gathered|gather|equation|multline)\*?\}")


class TooIntricate(Exception):
    """A text has too much markup to be drawn at once."""


def count_steps(state: Any, steps: int = 1) -> None:
    """Count steps of a text. Raises TooIntricate."""
    state.env["steps"] = state.env.get("steps", 0) + steps
    if state.env["steps"] > MOST_STEPS:
        raise TooIntricate


def push_formula(state: Any, tex: str, mark: str) -> Any:
    """Add a formula to a parser's tokens. Raises TooIntricate."""
    count_steps(state, FORMULA_STEPS + len(tex) // STEP_CHARACTERS)
    token = state.push("formula", "math", 0)
    token.content, token.markup = tex, mark
    return token


def add_formulas(markdown: Any) -> None:
    """Add the rules for formulas to a Markdown parser."""
    markdown.inline.ruler.before("escape", "formula", read_inline)
    options = {"alt": ["paragraph", "blockquote", "list"]}
    markdown.block.ruler.before("fence", "formula_block", read_block, options)

    def render(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
        tex, mark = tokens[i].content, tokens[i].markup
        shown = write_formula(tex, mark in BLOCKS) or escape(f"{mark}{tex}{CLOSINGS[mark]}")
        return f"<p>{shown}</p>\n" if tokens[i].block else shown

    markdown.add_render_rule("formula", render)


def read_inline(state: Any, silent: bool) -> bool:
    """Read a formula within a paragraph. Raises TooIntricate."""
    count_steps(state)
    text, start = state.src, state.pos
    mark = next((mark for mark in CLOSINGS if text.startswith(mark, start)), None)
    if mark is None:
        return False
    begin, closing = start + len(mark), CLOSINGS[mark]
    end = text.find(closing, begin, begin + MAX_CHARACTERS)
    while mark == "$" and end > 0 and text[end - 1] == "\\":  # an escaped dollar
        end = text.find(closing, end + 1, begin + MAX_CHARACTERS)
    tex = text[begin : max(begin, end)]
    # pandoc's rule, so that sums of money are not formulas
    is_money = mark == "$" and (tex != tex.strip() or text[end + 1 : end + 2].isdecimal())
    if not tex.strip() or is_money:
        return False
    if not silent:
        push_formula(state, tex, mark)
    state.pos = end + len(closing)
    return True


def read_block(state: Any, start: int, end: int, silent: bool) -> bool:
    """Read a formula that begins a line and ends another. Raises TooIntricate."""
    begin = state.bMarks[start] + state.tShift[start]
    mark = next((mark for mark in BLOCKS if state.src.startswith(mark, begin)), None)
    if mark is None or state.is_code_block(start):
        return False
    begin, closing = begin + len(mark), CLOSINGS[mark]
    stop = state.src.find(closing, begin, begin + MAX_CHARACTERS)
    last = start
    while last + 1 < end and state.eMarks[last] < stop:
        last += 1
    tex = state.src[begin : max(begin, stop)]
    if not tex.strip() or state.src[stop + len(closing) : state.eMarks[last]].strip():
        return False
    if not silent:
        token = push_formula(state, tex, mark)
        token.block, token.map = True, [start, last + 1]
        state.line = last + 1
    return True


@functools.lru_cache(maxsize=1024)
def write_formula(tex: str, is_block: bool) -> str | None:
    """Write TeX as MathML; None if it cannot be parsed."""
    from latex2mathml.converter import convert_to_element

    tex = ALIGNED.sub(lambda match: rf"\{match[1]}{{array}}" + "{rl}" * (match[1] == "begin"), tex)
    tex = GATHERED.sub(lambda match: rf"\{match[1]}{{matrix}}", tex)
    try:
        return write_element(convert_to_element(tex, display="block" if is_block else "inline"))
    except Exception:  # many kinds: the library's, the tree's, recursion that is too deep
        return None


def write_element(element: Element) -> str:
    """Write an element of MathML as HTML. Raises ValueError if it is not allowed."""
    if element.tag not in TAGS:
        raise ValueError(element.tag)
    names = {name: value for name, value in element.attrib.items() if name in ATTRIBUTES}
    attributes = "".join(f' {name}="{escape(value)}"' for name, value in names.items())
    text = escape(unescape(element.text or ""))  # the library writes entities
    tag = "mo" if text in ("±", "∓") else element.tag  # the library makes them identifiers
    return f"<{tag}{attributes}>{text}{''.join(map(write_element, element))}</{tag}>"
