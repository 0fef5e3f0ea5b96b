"""All errors that this package raises for users."""

from .core.errors import (
    BackendError as BackendError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    ContextError as ContextError,
    IncompleteAnswerError as IncompleteAnswerError,
    LlamaError as LlamaError,
    NumericalError as NumericalError,
    OptionsError as OptionsError,
    OutOfMemoryError as OutOfMemoryError,
    SessionError as SessionError,
    TemplateError as TemplateError,
    TokenizerError as TokenizerError,
    TraceError as TraceError,
)
