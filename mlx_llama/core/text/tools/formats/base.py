"""The interface of a format of tool calls."""

from __future__ import annotations

import json
import re
from abc import ABC
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.text.json_schema import DEFINITIONS, find_limits
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools.calls import CallText, fold_calls, split_calls
from mlx_llama.core.text.tools.describe import Tool
from mlx_llama.core.text.tools.json_calls import FUNCTION, read_function, read_json_calls

Messages = Sequence[Mapping[str, Any]]
Offer = tuple[Messages, dict[str, Any]]  # messages, and variables of the template
Spell = Callable[[str], str]  # spells a mark in a grammar, as a token if it is a special one
# llguidance's options: JSON as json.dumps writes it. They replace a schema's own "x-guidance",
# which could switch checks off.
JSON_OPTIONS = {
    "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False,
    "whitespace_pattern": None, "lenient": False, "coerce_one_of": False,
    "json_allowed_escapes": None, "json_allow_general_unicode_escapes": False,
}  # fmt: skip

UNENFORCED = "// not enforced: "  # begins a comment in a grammar, which becomes a notice
_LONGEST = 10_000  # characters of a string that a grammar counts
_PART = r"\\[^bBAZz\d]|\[\^?\]?(?:\\.|[^\]\\])*\]"  # an escape or a class of a pattern
# A pattern without look-around, and anchors only at its ends
_PATTERN = re.compile(rf"(?s)(\^?)((?:{_PART}|\((?:\?:)?(?!\?)|[^\\^$(\[])*)(\$?)")


class ToolFormat(ABC):
    """A format of tool calls. By default, calls are JSON objects between two marks."""

    name: str
    cue = ""  # regular expression that the format's templates match
    opens = "<tool_call>"  # mark before a call
    closes = "</tool_call>"  # mark after a call, "" for none
    # marks that may begin a call as well, if the name of a tool follows
    others: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()  # further marks that the parser needs to see
    arguments = "arguments"  # key of the arguments
    gap = "\n"  # between a mark and its call
    is_list = False  # calls are a JSON list between one pair of marks
    variable = "tools"  # the template's variable for the descriptions
    is_bare = False  # an answer that begins with a brace may be a call
    is_open = False  # the prompt ends with the opening mark
    calls_once = False  # trained on one call a message, which is all that templates print
    folds = False  # templates print no calls: they become text of their messages
    notice = ""  # about answers with tools

    # Offering tools

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        """True if a template writes calls in this format. Called in the order of `FORMATS`."""
        return re.search(self.cue, source) is not None

    def offer(self, messages: Messages, tools: Sequence[Tool]) -> Offer:
        """Messages and further variables for `encode_messages` that offer tools to the model.

        Raises TemplateError for malformed messages.
        """
        if self.folds:
            messages = fold_calls(messages, self.write)
        if self.calls_once:
            messages = split_calls(messages)
        return messages, {self.variable: [tool.as_dict() for tool in tools]} if tools else {}

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """The text of calls, each with its name and arguments, as the model writes them."""
        texts = [
            f'{{"name": {json.dumps(call["name"])}, "{self.arguments}": '
            f"{json.dumps(call['arguments'], ensure_ascii=False)}}}"
            for call in calls
        ]
        if self.is_list:
            return f"{self.opens}[{', '.join(texts)}]{self.closes}"
        return "\n".join(f"{self.opens}{self.gap}{text}{self.gap}{self.closes}" for text in texts)

    # Reading calls

    def read(self, text: CallText) -> Generator[None]:
        """Read the calls that begin here, behind `opens`; see `CallText`."""
        if text.mark == FUNCTION:
            return read_function(text)
        return read_json_calls(text, self.closes)

    def shown_specials(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that a decoder must show to the parser, such as [TOOL_CALLS]."""
        return tokenizer.find_special((self.opens, self.closes, *self.others, *self.marks))

    def written_marks(self) -> tuple[str, ...]:
        """Special tokens that `write` puts into the text of the assistant's messages."""
        return (self.opens, self.closes) if self.folds else ()

    # Enforcing calls

    def grammar(
        self,
        tools: Sequence[Tool],
        tokenizer: Tokenizer,
        *,
        many: bool = False,
        answer: dict[str, Any] | None = None,
    ) -> str:
        """A Lark grammar of one call of one of the tools, or of several in a row (`many`).

        answer: a JSON schema that an answer without calls fits; None: there must be a call.
        """
        if not tools:
            raise OptionsError("tool_choice: there is no tool to call: give tools")

        def mark(text: str) -> str:
            token = tokenizer.special_ids.get(text)
            return quote(text) if token is None else f"<[{token}]>"

        rules = [
            "start: calls" + (" | answer" if answer is not None else ""),
            *self.rules(tools, mark, many),
        ]
        if answer is not None:
            rules.append(f"answer: {spell_json(answer)}")
        return "\n".join(rules)

    def rules(self, tools: Sequence[Tool], mark: Spell, many: bool) -> list[str]:
        """Lark rules of `calls`. mark: spells a mark, as a token if it is a special one."""
        calls, rules = list[str](), [f"calls: {self.spell_calls(mark, many)}"]
        for number, tool in enumerate(tools):
            rules += self.spell_arguments(tool, f"arguments_{number}", mark)
            calls.append(self.spell_call(tool.name, f"arguments_{number}", mark))
        return [*rules, "call: " + "\n    | ".join(calls)]

    def spell_arguments(self, tool: Tool, rule: str, mark: Spell) -> list[str]:
        """Lark rules of one tool's arguments. rule: the name of the first."""
        schema = {"additionalProperties": False, **tool.parameters, "type": "object"}
        return [f"{rule}: {spell_json(schema, tool.name)}"]

    def spell_call(self, name: str, arguments: str, mark: Spell) -> str:
        """The rule of one tool's call. arguments: the rule of its arguments."""
        head = f'{{"name": {json.dumps(name)}, "{self.arguments}": '
        return f'{quote(head)} {arguments} "}}"'

    def spell_calls(self, mark: Spell, many: bool) -> str:
        """The rule of one `call` or of several, with the marks around them."""
        if self.is_list:
            calls = 'call (", " call)*' if many else "call"
            return f'{mark(self.opens)} "[" {calls} "]" {mark(self.closes)}'
        gap = quote(self.gap)
        call = f"{mark(self.opens)} {gap} call {gap} {mark(self.closes)}"
        return f'{call} ("\\n" {call})*' if many else call


def spell_json(schema: Mapping[str, Any], place: str = "") -> str:
    """A JSON schema as a Lark grammar spells it. place: tool and parameter, for errors."""
    note = {"$comment": place} if place else {}
    return f"%json {json.dumps({**schema, **note, 'x-guidance': JSON_OPTIONS})}"


def spell_part(schema: Mapping[str, Any], root: Mapping[str, Any], place: str) -> str:
    """Part of a schema as `spell_json` does. root: has the definitions."""
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    return spell_json({**definitions, **schema}, place)


def spell_string(schema: Mapping[str, Any], after: str = "") -> tuple[list[str], set[str]]:
    """(regular expressions that a string and the text `after` it must match, as a Lark grammar
    spells them; keywords of the schema that they do not enforce)
    """
    unenforced, bodies = find_limits(schema, "string"), list[str]()
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    counts = [least] if most == "" else [least, most]
    is_counted = all(isinstance(count, int) and count <= _LONGEST for count in counts)
    if is_counted and (least or most != ""):
        bodies.append(f".{{{least},{most}}}")
        unenforced -= {"minLength", "maxLength"}
    if (body := _spell_pattern(schema.get("pattern"))) is not None:
        bodies.append(body)
        unenforced.discard("pattern")
    return [f"/(?s:{body}){after}/" for body in bodies], unenforced


def _spell_pattern(pattern: Any) -> str | None:
    """A pattern that matches a whole text, for Lark; None if a grammar cannot have it."""
    import llguidance

    match = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if match is None:
        return None
    begins, body, ends = match.groups()
    outer, inner = "", re.sub(_PART, "", body)
    while outer != inner:
        outer, inner = inner, re.sub(r"\([^()]*\)", "", inner)
    if "|" in outer and (begins or ends):  # of which the anchors hold for one choice
        return None
    body = llguidance.regex_to_lark(body.replace(r"\/", "/"), "dw")
    body = f"{'' if begins else '.*'}(?-s:{body}){'' if ends else '.*'}"
    lark = llguidance.LLMatcher.grammar_from_lark(f"start: /(?s:{body})/")
    return None if llguidance.LLMatcher.validate_grammar(lark, None) else body


def spell_list(
    item: str, separator: str, least: int = 0, most: int | None = None, first: Sequence[str] = ()
) -> str:
    """A list of `least` to `most` items after the `first` ones, without its brackets."""

    def repeat(low: int, high: int | None) -> str:
        count = f"{{{max(0, low)},{'' if high is None else high}}}"
        return "" if high == 0 else f"({separator} {item}){count}"

    if first:
        return f"{f' {separator} '.join(first)} {repeat(least, most)}"
    if most == 0:
        return ""
    rest = f"{item} {repeat(least - 1, most and most - 1)}"
    return rest if least else f"({rest})?"


def note_unenforced(keywords: Collection[str]) -> list[str]:
    """The comment in a grammar for keywords of its tools' schemas."""
    return [UNENFORCED + ", ".join(sorted(keywords))] if keywords else []


def spell_members(
    rule: str, members: Mapping[str, str], required: Collection[str], separator: str
) -> list[str]:
    """Lark rules of the members of an object, in their order, with separators between them.

    rule: the name of the first. members: what each key's is spelled as.
    """
    ends = [f'{rule}_{kind}_{len(members)}: ""' for kind in ("first", "next")]
    rules = [f"{rule}: {rule}_first_0", *ends]
    for number, (key, member) in enumerate(members.items()):
        for kind, before in (("first", ""), ("next", separator)):
            skipped = "" if key in required else f" | {rule}_{kind}_{number + 1}"
            after = f"{rule}_next_{number + 1}"
            rules.append(f"{rule}_{kind}_{number}: {quote(before)} {member} {after}{skipped}")
    return rules


def quote(text: str) -> str:
    """A text as a Lark grammar spells it."""
    return json.dumps(text, ensure_ascii=False)
