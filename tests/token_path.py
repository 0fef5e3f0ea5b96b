"""Count the files, classes, functions and calls that one decoded token crosses in steady state.

    python tests/token_path.py                    # the cpu backend
    python tests/token_path.py --backend mlx -v   # and each function, in order of its first call

`sys.setprofile` sees a streamed chat answer of the packaged model, on every thread, from one token
to the next. Only frames of the package count. Tokens whose text is held back take the same path.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("mlx_llama", "cpu_fallback", "cuda_fallback"))
QUESTION = "Which backends are there?"
WARM_UP = 16  # tokens before those that are counted
TOKENS = 3  # of which the shortest path counts: once a second there is a look at the model's files


@dataclass
class TokenPath:
    """The calls of one decoded token."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    threads: set[int] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    is_counting: bool = False

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function, see sys.setprofile."""
        code = frame.f_code
        if not self.is_counting or event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        self.calls[code] += 1
        self.threads.add(threading.get_ident())
        owner = find_class(frame)
        if owner:
            self.classes.add(owner)

    def clear(self) -> None:
        self.calls.clear()
        self.threads.clear()
        self.classes.clear()

    @property
    def files(self) -> list[str]:
        """Paths below the root, in the order of their first calls."""
        paths = (str(Path(code.co_filename).relative_to(ROOT)) for code in self.calls)
        return list(dict.fromkeys(paths))

    def __str__(self) -> str:
        return (
            f"{len(self.files)} files, {len(self.classes)} classes, {len(self.calls)} functions, "
            f"{self.calls.total()} calls, {len(self.threads)} threads"
        )


def find_class(frame: FrameType) -> str:
    """The class of the object whose method runs: "" for functions of a module."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] not in ("self", "cls"):
        return ""
    owner = frame.f_locals.get(code.co_varnames[0])
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"


def trace_token(backend: str = "cpu", device: str | None = None) -> TokenPath:
    """The path of one token of a chat with the packaged model, greedy, without its pages."""
    from mlx_llama import load

    path, paths = TokenPath(), list[TokenPath]()
    threading.setprofile(path.note)  # of the threads that start from now on
    llm = load(backend=backend, device=device)
    try:
        chat = llm.chat(temperature=0.0, max_tokens=64)
        chat.send(QUESTION)  # fills caches, such as that of the tokens' texts
        stream = chat.regenerate()
        tokens = stream.completion.tokens
        pieces = iter(stream)
        while len(tokens) < WARM_UP:
            next(pieces)
        sys.setprofile(path.note)
        while len(paths) < TOKENS:
            before, path.is_counting = len(tokens), True
            next(pieces)
            if llm.backend.runtime.HAS_ONE_THREAD:
                time.sleep(0.05)  # the tick goes on for a moment
            path.is_counting = False
            if len(tokens) == before + 1:  # a piece may take several tokens
                paths.append(deepcopy(path))
            path.clear()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        llm.close()
    return min(paths, key=lambda path: len(path.calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu", choices=("cpu", "mlx", "cuda"))
    parser.add_argument("--device", help="cpu or gpu; by default the backend's choice")
    parser.add_argument("-v", "--verbose", action="store_true", help="print each function")
    arguments = parser.parse_args()
    path = trace_token(arguments.backend, arguments.device)
    if arguments.verbose:
        for code, count in path.calls.items():
            file = Path(code.co_filename).relative_to(ROOT)
            name = getattr(code, "co_qualname", code.co_name)
            print(f"{count:4} {file}:{code.co_firstlineno} {name}")
    print(f"{arguments.backend}: {path}")


if __name__ == "__main__":
    main()
