"""mlx_llama: Llama-family models from Python, on MLX, NumPy and torch.

    from mlx_llama import load

    llm = load("DIR_OR_HUB_ID")
    print(llm.generate("Once upon", max_tokens=40))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.errors import LlamaError
    from .core.generation.engine import Completion
    from .core.generation.llm import LLM, load
    from .core.generation.session import Session, Stream

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "LlamaError", "Session", "Stream", "load"]

_HOMES = {"load": "generation.llm", "LLM": "generation.llm", "Completion": "generation.engine", "LlamaError": "errors",
          "Session": "generation.session", "Stream": "generation.session"}


def __getattr__(name: str) -> Any:
    # Names are imported when first used: `import mlx_llama` itself stays in the milliseconds.
    if name in _HOMES:
        return getattr(importlib.import_module(f".core.{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
