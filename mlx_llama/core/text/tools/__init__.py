"""Tools: their descriptions, the calls in a model's text, and grammars that enforce a call.

A model writes calls in the format that its template taught it. `find_format` recognises the format,
`ToolParser` reads calls from streamed text, `ToolFormat.grammar` spells a call for tool_choice.
"""

from .calls import NoCall, ToolCall, ToolDelta, mentions_tools, write_answer
from .describe import ArgumentsError, Tool, read_tools
from .formats import FORMATS, JSON_OPTIONS, UNENFORCED, ToolFormat, find_format, spell_list
from .parser import ToolParser

__all__ = [
    "FORMATS", "JSON_OPTIONS", "UNENFORCED", "ArgumentsError", "NoCall", "Tool", "ToolCall",
    "ToolDelta", "ToolFormat", "ToolParser", "find_format", "mentions_tools", "read_tools",
    "spell_list", "write_answer",
]  # fmt: skip
