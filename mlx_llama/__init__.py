"""mlx_llama: Llama-family models from Python, on MLX, NumPy and torch.

    from mlx_llama import load

    llm = load("DIR_OR_HUB_ID")                            # an LLM; help(load) lists the options
    print(llm.ask("Why is the sky blue?"))                 # a question, by the model's chat template
    chat = llm.chat()                                      # a conversation, a Session
    print(chat.send("Hello!"))
    print(llm.generate("Once upon", max_tokens=40))        # a text to continue; the result is a Completion
    for piece in llm.stream("Once upon"):                  # the same as it comes, a Stream
        print(piece, end="")

help(mlx_llama.Session), Stream and Completion describe the results. Errors derive from LlamaError
and are in mlx_llama.errors. All types that signatures name can be imported from here.
"""  # noqa: E501

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import errors
    from .core.backends.load_options import LoadOptions
    from .core.backends.logprobs import TokenLogprobs
    from .core.engine.builder import RequestBuilder
    from .core.engine.loop import Loop
    from .core.engine.request import Handle
    from .core.errors import (
        BackendError,
        CheckpointError,
        ConfigError,
        ContextError,
        IncompleteAnswerError,
        LlamaError,
        NumericalError,
        OptionsError,
        OutOfMemoryError,
        SessionError,
        TemplateError,
        TokenizerError,
        TraceError,
    )
    from .core.generation.cache_file import Identity
    from .core.generation.completion import Completion, Token
    from .core.generation.entries import Entry
    from .core.generation.guide import Guide
    from .core.generation.hooks import LogitsProcessor, OnPiece, OnProgress
    from .core.generation.llm import LLM, Prompt, load
    from .core.generation.options import Defaults, GenerationOptions, Options, Resolved
    from .core.generation.schema import Schema
    from .core.generation.session import Messages, Session, Stream
    from .core.generation.tool_use import Toolbox, ToolLoop, ToolStream
    from .core.text.infill import Infill
    from .core.text.template import ChatTemplate
    from .core.text.thoughts import Thought
    from .core.text.tokenizer import Tokenizer
    from .core.text.tools import ToolCall, ToolDelta

__version__ = "0.1.0"
_HOMES = {
    "core.backends.load_options": "LoadOptions", "core.backends.logprobs": "TokenLogprobs",
    "core.engine.builder": "RequestBuilder",
    "core.engine.loop": "Loop", "core.engine.request": "Handle",
    "core.errors": "LlamaError BackendError CheckpointError ConfigError ContextError "
    "IncompleteAnswerError NumericalError OptionsError OutOfMemoryError SessionError TemplateError "
    "TokenizerError TraceError",
    "core.generation.cache_file": "Identity", "core.generation.completion": "Completion Token",
    "core.generation.entries": "Entry", "core.generation.guide": "Guide",
    "core.generation.hooks": "LogitsProcessor OnPiece OnProgress",
    "core.generation.llm": "LLM Prompt load",
    "core.generation.options": "Defaults GenerationOptions Options Resolved",
    "core.generation.schema": "Schema", "core.generation.session": "Messages Session Stream",
    "core.generation.tool_use": "Toolbox ToolLoop ToolStream", "core.text.infill": "Infill",
    "core.text.template": "ChatTemplate",
    "core.text.thoughts": "Thought", "core.text.tokenizer": "Tokenizer",
    "core.text.tools": "ToolCall ToolDelta",
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# those that a user starts from, then those that signatures name
__all__ = [
    "load", "LLM", "Session", "Stream", "Completion", "errors", "BackendError", "ChatTemplate",
    "CheckpointError", "ConfigError", "ContextError", "Defaults", "Entry",
    "GenerationOptions", "Guide", "Handle", "Identity", "IncompleteAnswerError", "Infill",
    "LlamaError", "LoadOptions", "LogitsProcessor", "Loop", "Messages", "NumericalError", "OnPiece",
    "OnProgress", "Options", "OptionsError", "OutOfMemoryError", "Prompt", "RequestBuilder",
    "Resolved", "Schema", "SessionError", "TemplateError", "Thought", "Token", "TokenLogprobs",
    "Tokenizer", "TokenizerError",
    "ToolCall", "ToolDelta", "ToolLoop", "ToolStream", "Toolbox", "TraceError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Import names at their first use, so that `import mlx_llama` takes milliseconds.
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    # For help() and Tab: what programs call.
    return ["load", "LLM", "errors", "__version__"]
