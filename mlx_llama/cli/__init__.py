"""Parts that all commands share.

running: errors in one line, exit codes, robust standard streams. flags: made from core's tables of
options. spelling: options in core's messages as flags. progress: a bar on a terminal.
"""

from __future__ import annotations

from .progress import Bar
from .running import announce, clean_up_when_terminated, read_text, run, say, show

__all__ = ["Bar", "announce", "clean_up_when_terminated", "read_text", "run", "say", "show"]
