"""mlx_llama: Llama-family models from Python, on MLX, NumPy and torch.

    from mlx_llama import load

    llm = load("DIR_OR_HUB_ID")                            # an LLM; help(load) lists the options
    print(llm.ask("Why is the sky blue?"))                 # a question, by the model's chat template
    chat = llm.chat()                                      # a conversation, a Session
    print(chat.send("Hello!"))
    print(llm.generate("Once upon", max_tokens=40))        # a text to continue; the result is a Completion
    for piece in llm.stream("Once upon"):                  # the same as it comes, a Stream
        print(piece, end="")

Errors derive from LlamaError and are in mlx_llama.errors. All types that signatures name can be
imported from here.
"""  # noqa: E501

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import errors as errors
    from .core.backends.load_options import LoadOptions as LoadOptions
    from .core.backends.logprobs import TokenLogprobs as TokenLogprobs
    from .core.engine.engine import Engine as Engine
    from .core.engine.loop import Loop as Loop
    from .core.engine.request import Handle as Handle
    from .core.errors import (
        BackendError as BackendError,
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        ContextError as ContextError,
        LlamaError as LlamaError,
        NumericalError as NumericalError,
        OptionsError as OptionsError,
        OutOfMemoryError as OutOfMemoryError,
        SessionError as SessionError,
        TemplateError as TemplateError,
        TokenizerError as TokenizerError,
        TraceError as TraceError,
    )
    from .core.generation.cache_file import Identity as Identity
    from .core.generation.completion import Completion as Completion, Token as Token
    from .core.generation.entries import Entry as Entry
    from .core.generation.hooks import LogitsProcessor as LogitsProcessor, OnProgress as OnProgress
    from .core.generation.llm import LLM as LLM, Prompt as Prompt, load as load
    from .core.generation.options import (
        Defaults as Defaults,
        GenerationOptions as GenerationOptions,
        Options as Options,
        Resolved as Resolved,
    )
    from .core.generation.schema import Schema as Schema
    from .core.generation.session import Session as Session, Stream as Stream
    from .core.generation.tool_use import ToolStream as ToolStream
    from .core.text.template import ChatTemplate as ChatTemplate
    from .core.text.thoughts import Thought as Thought
    from .core.text.tokenizer import Tokenizer as Tokenizer
    from .core.text.tools import ToolCall as ToolCall, ToolDelta as ToolDelta

__version__ = "0.1.0"
_FIRST = ["load", "LLM", "Session", "Stream", "Completion", "errors"]
_HOMES = {
    "backends.load_options": "LoadOptions",
    "backends.logprobs": "TokenLogprobs",
    "engine.engine": "Engine",
    "engine.loop": "Loop",
    "engine.request": "Handle",
    "errors": "errors LlamaError BackendError CheckpointError ConfigError ContextError "
    "NumericalError OptionsError OutOfMemoryError SessionError TemplateError TokenizerError "
    "TraceError",
    "generation.cache_file": "Identity",
    "generation.completion": "Completion Token",
    "generation.entries": "Entry",
    "generation.hooks": "LogitsProcessor OnProgress",
    "generation.llm": "LLM Prompt load",
    "generation.options": "Defaults GenerationOptions Options Resolved",
    "generation.schema": "Schema",
    "generation.session": "Session Stream",
    "generation.tool_use": "ToolStream",
    "text.template": "ChatTemplate",
    "text.thoughts": "Thought",
    "text.tokenizer": "Tokenizer",
    "text.tools": "ToolCall ToolDelta",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
# those that a user starts from, then those that signatures name
__all__ = [*_FIRST, *sorted(_HOME_OF.keys() - _FIRST)]


def __getattr__(name: str) -> Any:
    # Import names at their first use, so that `import mlx_llama` takes milliseconds.
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".core.{_HOME_OF[name]}", __name__)
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    # For help() and Tab.
    return [*_FIRST, "__version__"]
