"""mlx_llama: Llama-family models from Python, on MLX, NumPy and torch.

    from mlx_llama import load

    llm = load("DIR_OR_HUB_ID")                            # an LLM; help(load) lists the options
    print(llm.ask("Why is the sky blue?"))                 # a question, by the model's chat template
    chat = llm.chat()                                      # a conversation, a Session
    print(chat.send("Hello!"))
    print(llm.generate("Once upon", max_tokens=40))        # a text to continue; the result is a Completion
    for piece in llm.stream("Once upon"):                  # the same as it comes, an Answer
        print(piece, end="")

help(mlx_llama.Session), Answer and Completion describe the results. Errors derive from LlamaError
and are in mlx_llama.errors. All types that signatures name can be imported from here.
"""  # noqa: E501

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from .api import ON_QUESTION

if TYPE_CHECKING:
    from mlx_llama.core.answers.completion import Entry

    from . import errors
    from .api.cache_file import Identity
    from .api.llm import LLM, Prompt, load
    from .api.session import Messages, Session
    from .api.tool_use import Toolbox
    from .core.answers.completion import Aside, Completion, Token
    from .core.answers.hooks import LogitsProcessor, OnPiece, OnProgress
    from .core.answers.schema import Schema
    from .core.backends.logprobs import TokenLogprobs
    from .core.engine.builder import RequestBuilder
    from .core.engine.loop import Loop
    from .core.engine.request import Answer, Answer as Stream, Piece
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
    from .core.options import Defaults, GenerationOptions, LoadOptions, Options, Resolved
    from .core.text.infill import Infill
    from .core.text.template import ChatTemplate
    from .core.text.thoughts import Thought
    from .core.text.tokenizer import Tokenizer
    from .core.text.tools import ToolCall, ToolDelta

__version__ = "0.1.0"
_HOMES = {
    "core.backends.logprobs": "TokenLogprobs", "core.engine.builder": "RequestBuilder",
    "core.engine.loop": "Loop", "core.engine.request": "Answer Piece",
    "core.errors": "LlamaError BackendError CheckpointError ConfigError ContextError "
    "IncompleteAnswerError NumericalError OptionsError OutOfMemoryError SessionError TemplateError "
    "TokenizerError TraceError",
    "api.cache_file": "Identity", "core.answers.completion": "Aside Completion Entry Token",
    "core.answers.hooks": "LogitsProcessor OnPiece OnProgress",
    "api.llm": "LLM Prompt load",
    "core.options": "Defaults GenerationOptions LoadOptions Options Resolved",
    "core.answers.schema": "Schema", "api.session": "Messages Session",
    "api.tool_use": "Toolbox", "core.text.infill": "Infill",
    "core.text.template": "ChatTemplate",
    "core.text.thoughts": "Thought", "core.text.tokenizer": "Tokenizer",
    "core.text.tools": "ToolCall ToolDelta",
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# those that a user starts from, then those that signatures name
__all__ = [
    "load", "LLM", "Session", "Answer", "Stream", "Completion", "errors", "Aside", "BackendError",
    "ChatTemplate", "CheckpointError", "ConfigError", "ContextError", "Defaults", "Entry",
    "GenerationOptions", "Identity", "IncompleteAnswerError", "Infill",
    "LlamaError", "LoadOptions", "LogitsProcessor", "Loop", "Messages", "NumericalError", "OnPiece",
    "OnProgress", "Options", "OptionsError", "OutOfMemoryError", "Piece", "Prompt",
    "RequestBuilder", "Resolved", "Schema", "SessionError", "TemplateError", "Thought", "Token",
    "TokenLogprobs", "Tokenizer", "TokenizerError",
    "ToolCall", "ToolDelta", "Toolbox", "TraceError",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    # Import names at their first use, so that `import mlx_llama` takes milliseconds.
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    name = "Answer" if name == "Stream" else name  # its former name
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    # For help() and Tab: what programs call.
    return ["load", "LLM", "errors", "__version__"]


def _find_passages(llm: LLM, question: str) -> list[Aside]:
    from .guide.guide import find_passages  # imported at the first question

    return find_passages(llm, question)


ON_QUESTION[os.path.join(os.path.dirname(os.path.realpath(__file__)), "guide")] = _find_passages
