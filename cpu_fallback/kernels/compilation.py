"""Choice of an instruction set for compiled kernels. Imports llvmlite lazily."""

from __future__ import annotations

import importlib.util
import os
import platform
from typing import TYPE_CHECKING

from mlx_llama.core.errors import BackendError

if TYPE_CHECKING:
    from .target import Target

VARIABLE = "MLX_LLAMA_CPU_TARGET"


def find_target() -> tuple[Target | None, str]:
    """The best target of this machine, or the target named by MLX_LLAMA_CPU_TARGET; or None and the
    reason.

    Raises BackendError if the variable names a target that this machine lacks.
    """
    requested = os.environ.get(VARIABLE, "")
    if requested == "numpy":
        return None, f"{VARIABLE} asks for it"
    if importlib.util.find_spec("llvmlite") is None:
        if requested:
            raise BackendError(
                f"{VARIABLE}={requested} needs the package 'llvmlite', which is not installed: "
                "pip install llvmlite"
            )
        return None, "the package 'llvmlite' is not installed (pip install llvmlite)"
    from . import target

    names = target.available()
    if requested and requested not in names:
        raise BackendError(
            f"{VARIABLE}={requested} is unavailable on this machine: choose "
            f"{', '.join([*names, 'numpy'])}, or leave it unset"
        )
    if not names:
        return None, f"there are no kernels for this processor ({platform.machine() or 'unknown'})"
    return target.build_target(requested or names[0]), ""
