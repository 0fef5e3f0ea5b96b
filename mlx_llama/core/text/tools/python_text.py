"""Python's parser, for the threads of a server."""

from __future__ import annotations

import ast
import threading

# In Python 3.11 and 3.12 all threads share one counter of a tree's depth: at times two at once end
# in a SystemError (https://github.com/python/cpython/issues/106905).
_ALONE = threading.Lock()


def parse_python(text: str) -> ast.Module:
    """The syntax tree. Raises SyntaxError, ValueError, RecursionError or MemoryError."""
    with _ALONE:
        return ast.parse(text)


def read_literal(text: str) -> object:
    """The value of a Python literal. Raises as `ast.literal_eval`."""
    with _ALONE:
        tree = ast.parse(text, mode="eval")
    return ast.literal_eval(tree)
