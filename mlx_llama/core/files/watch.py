"""Notice that a loaded model's files are overwritten or truncated in place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.system.machine import FileMap, Guard

from .tensor import Mapped

LOOK_SECONDS = 1.0  # between two looks at the times of modification


class FileWatch:
    """The files of loaded tensors, some of which stay mapped.

    A page beyond the end of a truncated file kills the process (SIGBUS) when it is touched, or is
    zeros with a guard, and an overwritten one gives other weights. A file that another one replaces
    by its name is not noticed and need not be: the mapped one stays as it was.
    """

    def __init__(self, models: Iterable[Mapping[str, Mapped]] = (), guard: Guard | None = None):
        tensors: Iterable[Mapped] = (tensor for model in models for tensor in model.values())
        maps = (mapped for tensor in tensors for mapped, _, _ in tensor.pages)
        self._maps: list[FileMap] = list({id(mapped): mapped for mapped in maps}.values())
        self._guard, self._next, self._fault = guard, 0.0, ""
        if guard:
            guard.install()
            for mapped in self._maps:
                mapped.protect(guard)

    def check(self) -> None:
        """Raise CheckpointError from the first change on. Truncated files are noticed at each call,
        before what was computed with them is used; others once a second.
        """
        for mapped in self._maps:
            if mapped.cut is None:
                is_damaged = mapped.size() < len(mapped)
            else:  # where a file ends within the last page, zeros follow, and no page is missing
                is_damaged = mapped.cut[0] != 0 or mapped[mapped.last] != mapped.byte
            if is_damaged:
                self._fault = (
                    self._fault or f"{os.path.basename(mapped.path)} {_describe_damage(mapped)}"
                )
        if (now := time.monotonic()) >= self._next:
            self._next = now + LOOK_SECONDS
            self._fault = self._fault or self._find_overwritten()
        if self._fault:
            raise CheckpointError(f"the model's file changed: {self._fault}: load the model again")

    def _find_overwritten(self) -> str:
        if self._guard:
            self._guard.install()
        for mapped in self._maps:
            if mapped.is_overwritten():
                return f"{os.path.basename(mapped.path)} was overwritten after it was loaded"
        return ""


def _describe_damage(mapped: FileMap) -> str:
    if mapped.is_truncated():
        return "was truncated after it was loaded"
    if mapped.is_overwritten():
        return "was overwritten after it was loaded"
    return "could not be read"
