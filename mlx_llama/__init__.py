"""mlx_llama: Llama-family models from Python, on MLX, NumPy and torch.

    from mlx_llama import load

    llm = load("DIR_OR_HUB_ID")
    print(llm.ask("Why is the sky blue?"))                 # a question, by the model's chat template
    chat = llm.chat()                                      # a conversation
    print(chat.send("Hello!"))
    print(llm.generate("Once upon", max_tokens=40))        # a text to continue
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.engine.request import Handle
    from .core.errors import (
        BackendError,
        CheckpointError,
        ConfigError,
        ContextError,
        LlamaError,
        NumericalError,
        OptionsError,
        OutOfMemoryError,
        SessionError,
        TemplateError,
        TokenizerError,
        TraceError,
    )
    from .core.generation.completion import Completion
    from .core.generation.llm import LLM, load
    from .core.generation.options import GenerationOptions
    from .core.generation.session import Session, Stream
    from .core.generation.tool_use import ToolStream

__version__ = "0.1.0"
__all__ = ["load", "LLM", "Session", "Stream", "ToolStream", "Handle", "Completion", "GenerationOptions", "LlamaError",
           "BackendError", "CheckpointError", "ConfigError", "ContextError", "NumericalError", "OptionsError", "OutOfMemoryError", "SessionError", "TemplateError", "TokenizerError", "TraceError"]

_HOMES = {"load": "generation.llm", "LLM": "generation.llm", "Completion": "generation.completion",
          "GenerationOptions": "generation.options", "Handle": "engine.request", "Session": "generation.session",
          "Stream": "generation.session", "ToolStream": "generation.tool_use"}


def __getattr__(name: str) -> Any:
    # Import names at their first use, so that `import mlx_llama` takes milliseconds.
    if name in __all__:
        return getattr(importlib.import_module(f".core.{_HOMES.get(name, 'errors')}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
