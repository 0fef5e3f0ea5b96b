"""Streamed Markdown: prints finished blocks once and redraws the last one until it is finished.
A thought before it is dimmed, and folded to a line at its end.

So an answer may be longer than the screen, and no printed text is overwritten or lost.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control, ControlType
from rich.segment import Segment, SegmentLines
from rich.table import Table
from rich.text import Text

from mlx_llama.core.text.controls import show_controls

from .view import describe_progress, rewraps_lines

# An empty line before one that is not indented, and a line that may close a code fence
_BORDER = re.compile(r"^[ \t]*\n(?= {0,3}\S)|^ {0,3}(?:`{3,}|~{3,})[ \t]*\n", re.M)
_ENTITY = re.compile(r"&#?\w+;")
_FRAMES_PER_SECOND = 15
_THOUGHT_LINES = 8  # on the screen


class _Table(markdown.TableElement):
    """rich's table with long words folded; rich would truncate them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            if isinstance(table, Table):
                for column in table.columns:
                    column.overflow = "fold"
            yield table


class _Markdown(markdown.Markdown):
    """rich's Markdown with the parts that rich omits: HTML, addresses, line breaks."""

    elements = {**markdown.Markdown.elements, "table_open": _Table}
    parser = MarkdownIt("commonmark", {"html": False})
    parser.enable(["strikethrough", "table"]).disable(["reference", "image"])

    def __init__(self, text: str):
        # Print addresses: a hyperlink would carry a model's text in an invisible escape sequence.
        super().__init__("", hyperlinks=False)
        self.parsed = self.parser.parse(text)
        # Letters that must appear: all but code languages, link titles and entities like &amp;
        self.letters = _count_letters(text) - sum(map(_count_letters, _ENTITY.findall(text)))
        for token in self.parsed:
            self.letters -= _count_letters(token.info)
            for leaf in token.children or []:
                self.letters -= _count_letters(str(leaf.attrs.get("title", "")))
                if leaf.type == "softbreak":
                    leaf.type = "hardbreak"


class Blocks:
    """Cuts streamed Markdown between top-level blocks, by whole lines: after an empty line, and
    after a code fence. Finished blocks and `rest` are the text.
    """

    def __init__(self):
        self.rest = ""  # the text after the last finished block
        self._scanned = 0  # characters of `rest` in lines that were examined

    def push(self, piece: str) -> list[str]:
        """Append `piece`; returns the blocks that it completes."""
        self.rest += piece
        end = self.rest.rfind("\n") + 1
        start = self.rest.rfind("\n", 0, max(0, self._scanned - 1)) + 1
        borders = {match.end() for match in _BORDER.finditer(self.rest, start, end)}
        blocks, at = [], 0
        for border in sorted(borders & _find_borders(self.rest[:end]) if borders else ()):
            if self.rest[at:border].strip():
                blocks.append(self.rest[at:border])
                at = border
        self.rest, self._scanned = self.rest[at:], end - at
        return blocks


def _find_borders(text: str) -> set[int]:
    """Positions at which top-level blocks begin or closed code fences end."""
    text = show_controls(text)
    lines = [0, *(match.end() for match in re.finditer("\n", text))]
    tokens: list[Token] = []
    _Markdown.parser.block.parse(text, _Markdown.parser, {}, tokens)
    borders = set()
    for token in tokens:
        if token.map and not token.level:
            first, last = token.map
            borders.add(lines[first])
            if token.type == "fence" and last - first == token.content.count("\n") + 2:
                borders.add(lines[last])
    return borders


class Rendered:
    """Markdown without control characters. tail: only the last lines that fit the screen."""

    def __init__(self, text: str, gap: bool = False, tail: bool = False):
        self.text = show_controls(text)
        self.gap = gap
        self.tail = tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = self._lines(console, options)
        if self.gap:
            lines.insert(0, [])
        most = max(1, console.height - 2) if self.tail else len(lines)
        yield SegmentLines(lines[-most:], new_lines=True)

    def _lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        try:
            shown = _Markdown(self.text)
            lines = console.render_lines(shown, options, pad=False)
        except Exception:  # the libraries may fail on odd Markdown; show its plain text
            is_complete = False
        else:
            # rich omits columns on a narrow screen, the parser whole sentences in deep nesting.
            letters = sum(_count_letters(segment.text) for line in lines for segment in line)
            is_complete = letters >= shown.letters
        if not is_complete:
            lines = console.render_lines(Text(self.text.strip("\n")), options, pad=False)
        lines = [_trim(line) for line in lines]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            del lines[0]
        return lines


def _trim(line: list[Segment]) -> list[Segment]:
    """Remove control characters, and padding at the end unless it has a background colour."""
    line = [Segment(show_controls(text), style) for text, style, control in line if not control]
    while line and not (line[-1].style and line[-1].style.bgcolor):
        text, style, _ = line.pop()
        if text := text.rstrip():
            line.append(Segment(text, style))
            break
    return line


def _count_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


class Frame:
    """Lines below the printed text that are erased and redrawn."""

    def __init__(self, console: Console):
        self.console = console
        self._widths: list[int] = []  # cells of each line that is on the screen
        self._wraps = rewraps_lines()
        self._lock = threading.RLock()

    def __enter__(self) -> Frame:
        self._lock.acquire()
        self.console.__enter__()  # one write, no flicker
        return self

    def __exit__(self, *error: object) -> None:
        self.console.__exit__(None, None, None)
        self._lock.release()

    def draw(self, content: Rendered | Thinking | Text) -> None:
        """Replace the lines of the frame by `content`."""
        with self:
            self.erase()
            lines = self.console.render_lines(content, pad=False) if content else []
            self._widths = [Segment.get_line_length(line) for line in lines]
            for line in lines:
                text = Text("").join(Text(text, style or "") for text, style, _ in line)
                self.console.print(text, overflow="ignore", no_wrap=True, crop=False)

    def erase(self) -> None:
        """Erase the lines, in as many rows as the terminal wraps them into at its present width."""
        width = max(1, self.console.width)
        rows = sum(max(1, -(-cells // width)) if self._wraps else 1 for cells in self._widths)
        self._widths = []
        codes: list[Any] = [ControlType.CARRIAGE_RETURN]
        for _ in range(min(rows, self.console.height - 1)):
            codes += [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
        if rows:
            self.console.control(Control(*codes))


class Thinking:
    """The last lines of a thought, dimmed."""

    def __init__(self, text: str):
        self.text = Text(show_controls(text.strip("\n")), style="dim italic")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.text, options, pad=False)
        most = max(1, min(_THOUGHT_LINES, console.height - 2))
        yield SegmentLines(lines[-most:], new_lines=True)


class MarkdownView:
    """An answer as rendered Markdown."""

    def __init__(self, console: Console):
        self.console = console
        self.blocks = Blocks()
        self.gap = False  # a block was printed: separate the next one
        self.due = 0.0  # time of the next frame
        self.thought = ""
        self.frame = Frame(console)

    def __enter__(self) -> MarkdownView:
        self.console.show_cursor(False)
        self.frame.draw(Text("…", style="dim"))
        return self

    def begin(self, text: str) -> None:
        """Redraw the last block of `text`, which the pieces continue."""
        self.blocks.push(text)
        if self.blocks.rest.strip():
            self.frame.draw(self._draw(self.blocks.rest))

    def wait(self, done: int, total: int) -> None:
        if not self.blocks.rest.strip():
            self.frame.draw(Text(describe_progress(done, total), style="dim"))

    def think(self, piece: str) -> None:
        self.thought += piece
        self._draw_now_and_then(Thinking(self.thought))

    def fold(self, remark: str) -> None:
        with self.frame as frame:
            frame.erase()
            self.console.print(Text(f"({remark})", style="dim"))
        self.thought, self.gap, self.due = "", True, 0.0

    def push(self, piece: str) -> None:
        if finished := self.blocks.push(piece):
            with self.frame as frame:
                frame.erase()
                for block in finished:
                    self._print(block)
        self._draw_now_and_then(self._draw(self.blocks.rest))

    def _draw_now_and_then(self, content: Rendered | Thinking | Text) -> None:
        now = time.monotonic()
        if now >= self.due:
            self.frame.draw(content)
            # A long block takes long to draw; spend at most a quarter of the time on drawing.
            self.due = now + max(1 / _FRAMES_PER_SECOND, 4 * (time.monotonic() - now))

    def __exit__(self, *error: object) -> None:
        with self.frame as frame:
            frame.erase()
            self._print(self.blocks.rest)
        self.console.show_cursor(True)

    def _draw(self, text: str) -> Rendered | Text:
        return Rendered(text, self.gap, tail=True) if text.strip() else Text("")

    def _print(self, block: str) -> None:
        if block.strip():
            self.console.print(Rendered(block, self.gap))
            self.gap = True
