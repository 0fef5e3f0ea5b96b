"""Above the engine: models, sessions, tools, jobs, and files of sessions."""

from collections.abc import Callable
from typing import Any

# By a model's folder: f(llm, question) -> texts beside the answer, as Asides. `load` reads it.
ON_QUESTION: dict[str, Callable[[Any, str], list[Any]]] = {}
