"""Arguments in tags, as Qwen3-Coder's <tool_call><function=name><parameter=key>value</parameter>
</function></tool_call>, and others in the table below.

Values are plain text, whose types are those of the tool's schema. A value ends at its tag if the
tag of another one, or of the call's end, follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from mlx_llama.core.text.json_schema import find_limits, follow, list_properties
from mlx_llama.core.text.tools.calls import CallText, NoCall
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.literals import resolve_types, write_value

from .base import Spell, ToolFormat, note_unenforced, quote, spell_part, spell_string

_STRING = frozenset(["string"])
_NAME = re.compile(r"[\w.:/@-]+", re.ASCII)
_WITHHELD = re.compile(r"\n?<|\n\Z")  # the end of a value may begin here


class Tagged(ToolFormat):
    """Marks are written as templates print them, white space included."""

    call = "<function=", ">\n", "</function>"  # before and after its name, and at its end
    key = "<parameter=", ">\n"  # before and after it
    end = "\n</parameter>\n"  # after a value
    is_group = False  # several calls are between one pair of marks

    def __init__(self) -> None:
        self.marks = tuple(mark.strip() for mark in (*self.call, *self.key, self.end))

    def _find_ends(self, tool: Tool | None) -> tuple[re.Pattern[str], int]:
        """The end of a value, and the length of the longest one with what must follow it."""
        stops = [re.escape(stop.strip()) for stop in (self.key[0], self.call[2] or self.closes)]
        ends = [rf"{re.escape(self.end.strip())}(?=\s{{0,8}}(?:{'|'.join(stops)}))"]
        keys = [self.key[0] + key + self.key[1] for key in _properties(tool)]
        if self.end.startswith("\n"):
            ends[0] = "\n?" + ends[0]
            if keys:  # models forget the end before the next one, or the last
                ends.append(
                    rf"\n(?={'|'.join(map(re.escape, keys))}|{stops[1]}\s{{0,8}}</tool_call>)"
                )
        longest = max(map(len, (*keys, self.key[0] + self.end, self.call[2] + self.closes)))
        return re.compile("|".join(ends)), longest + len(self.end) + 8

    def read(self, text: CallText) -> Generator[None]:
        begins, ends = self.call[0].strip(), self.call[2].strip() or self.closes
        if begins and text.mark not in self.others and not (yield from text.skip(begins)):
            raise NoCall
        while True:
            mark = self.call[1].strip()
            name = (yield from text.until(mark or "<")).strip()
            if not _NAME.fullmatch(name):
                raise NoCall
            text.take(len(mark))
            text.begin(name)
            text.add("{")
            yield from self._read_arguments(text, text.tools.get(name))
            if not (yield from text.skip(ends)):
                raise NoCall
            text.add("}")
            text.end()
            if not begins or not (yield from text.skip(begins)):
                break
        if ends != self.closes:
            yield from text.skip(self.closes)

    def _read_arguments(self, text: CallText, tool: Tool | None) -> Generator[None]:
        separator, (ends, longest) = "", self._find_ends(tool)
        while (yield from text.skip(self.key[0].strip())):
            closes, *opens = self.key[1].split()
            key = (yield from text.until(closes)).strip()
            text.take(len(closes))
            for mark in opens:  # before the value
                if not (yield from text.skip(mark)):
                    raise NoCall
            while not text.rest:
                yield from text.wait()
            if self.key[1].endswith("\n") and text.rest[0] == "\n":
                text.take(1)
            types: frozenset[str] = frozenset()
            if tool:
                schema = _properties(tool).get(key, {"type": "string"})
                types = resolve_types(schema, tool.parameters)
            text.add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            if types == _STRING:
                yield from _read_string(text, ends, longest)
            else:
                yield from _read_value(text, types, ends, longest)
            separator = ", "

    def rules(self, tools: Sequence[Tool], mark: Spell, many: bool) -> list[str]:
        opens, closes = f"{mark(self.opens)} {quote(self.gap)}", mark(self.closes)
        calls = f"{opens} call {quote(self.gap)} {closes}"
        if many:
            calls = f"{opens} call+ {closes}" if self.is_group else f'{calls} ("\\n" {calls})*'
        names = " | ".join(f"call_{number}" for number in range(len(tools)))
        rules = [
            f"calls: {calls}",
            f"call: {names}",
            f"text[suffix={quote(self.end.strip())}]: /(?s:.*)/",
        ]
        for number, tool in enumerate(tools):
            parts = [quote(self.call[0] + tool.name + self.call[1])]
            root, required = tool.parameters, tool.parameters.get("required") or ()
            rules += note_unenforced(find_limits(root, "object"))
            for at, (key, schema) in enumerate(list_properties(root).items()):
                value = f"value_{number}_{at}"
                spelled, end = self._spell_value(value, schema, root, f"{tool.name}.{key}")
                rules += spelled
                part = f"{quote(key.join(self.key))} {value} {quote(end)}"
                parts.append(part if key in required else f"({part})?")
            rules.append(" ".join([f"call_{number}:", *parts, quote(self.call[2])]))
        return rules

    def _spell_value(
        self, rule: str, schema: Any, root: dict[str, Any], place: str
    ) -> tuple[list[str], str]:
        """The rules of a value, and the text behind it. place: tool and parameter, for errors."""
        types = resolve_types(schema, root)
        if "string" not in types:
            return [f"{rule}: {spell_part(schema, root, place)}"], self.end
        schema = follow(schema, root)
        choices = [schema["const"]] if "const" in schema else schema.get("enum", ())
        if choices:
            texts = (value if isinstance(value, str) else json.dumps(value) for value in choices)
            return [f"{rule}: {' | '.join(map(quote, texts))}"], self.end
        patterns, unenforced = list[str](), find_limits(schema, "string")
        if types == _STRING:
            patterns, unenforced = spell_string(schema, "\\n" * self.end.startswith("\n"))
        notes, behind = note_unenforced(unenforced), self.end[self.end.index(">") + 1 :]
        if not patterns:
            return [f"{rule}: text", *notes], behind
        head = f"{rule}[suffix={quote(self.end.strip())}]"
        return [f"{head}: {' & '.join(patterns)}", *notes], behind


def _properties(tool: Tool | None) -> dict[str, Any]:
    return tool.parameters.get("properties") or {} if tool else {}


def _read_string(text: CallText, ends: re.Pattern[str], longest: int) -> Generator[None]:
    """Read a string; its text is added while it arrives."""
    text.add('"')
    while True:
        end = ends.search(text.rest)
        withheld = end or _WITHHELD.search(text.rest, max(0, len(text.rest) - longest))
        piece = text.take(withheld.start() if withheld else len(text.rest))
        text.add(json.dumps(piece, ensure_ascii=False)[1:-1])
        if end:
            break
        yield from text.wait()
    text.take(len(end[0]))
    text.add('"')


def _read_value(
    text: CallText, types: frozenset[str], ends: re.Pattern[str], longest: int
) -> Generator[None]:
    start = 0
    while not (end := ends.search(text.rest, start)):
        start = max(0, len(text.rest) - longest)
        yield from text.wait()
    text.add(write_value(text.take(end.start()), types))
    text.take(len(end[0]))


class QwenCoder(Tagged):
    """Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5."""

    name = "qwen3-coder"
    cue = r"(?s)<tool_call>.*<function=.*<parameter="
    others = ("<function=",)  # the model forgets the mark before it


class SeedOss(Tagged):
    name = "seed-oss"
    cue = "<seed:tool_call>"
    opens, closes = "<seed:tool_call>", "</seed:tool_call>"
    key = "<parameter=", ">"
    end = "</parameter>\n"


class MiniMaxM2(Tagged):
    name = "minimax-m2"
    cue = "<minimax:tool_call>"
    opens, closes = "<minimax:tool_call>", "</minimax:tool_call>"
    call = '<invoke name="', '">\n', "</invoke>\n"
    key = '<parameter name="', '">'
    end = "</parameter>\n"
    is_group = True


class Glm(Tagged):
    """GLM 4.5 to 4.7, Laguna, Ling 3, Spark 2.5."""

    name = "glm"
    cue = "<arg_key>"
    gap = ""
    call = "", "\n", ""
    key = "<arg_key>", "</arg_key>\n<arg_value>"
    end = "</arg_value>\n"


QWEN_CODER, SEED_OSS, MINIMAX_M2, GLM = QwenCoder(), SeedOss(), MiniMaxM2(), Glm()
