"""Contents of messages that come as lists of parts, as OpenAI's clients write them."""

from __future__ import annotations

from typing import Any


def join_parts(content: Any) -> Any:
    """The text of a list of {"type": "text", "text": ...}; any other content as it is."""
    if not isinstance(content, (list, tuple)) or not content:
        return content
    are_texts = all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    texts: list[Any] = [part.get("text") for part in content] if are_texts else [None]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content
