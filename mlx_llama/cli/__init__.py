"""Parts that all commands share.

running: errors in one line, exit codes, robust standard streams, progress bars; options in core's
messages as flags. flags: made from core's table of options.
"""

from __future__ import annotations

from .running import Bar, announce, clean_up_when_terminated, read_text, run, say, show

__all__ = ["Bar", "announce", "clean_up_when_terminated", "read_text", "run", "say", "show"]
