"""Prompts to continue: texts, token ids, both mixed, or several of them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mlx_llama.core.generation.llm import LLM

from .faults import bad_field
from .fields import Body


class PromptObject(Body):
    """A prompt as an object; images and audio are refused."""

    prompt_string: str
    multimodal_data: list[Any] = Field([], max_length=0)


def split_prompts(prompt: Any, limit: int, count: int, field: str) -> list[Any]:
    """Split a field into prompts. A list with token ids is a single prompt, a list of texts and
    lists several. Raises Refusal.

    limit: maximum number of answers, `count` per prompt. field: the name of the count.
    """
    parts = prompt if isinstance(prompt, list) else [prompt]
    parts = [part.prompt_string if isinstance(part, PromptObject) else part for part in parts]
    has_ids = any(isinstance(part, int) for part in parts)
    if has_ids and any(isinstance(part, list) for part in parts):
        raise bad_field("prompt", "one prompt or several", "mixes token ids and lists", prompt)
    prompts = [parts] if has_ids or not parts else parts
    many = len(prompts)
    if many > limit:
        text = f"has {many} prompts, the maximum is {limit}"
        raise bad_field("prompt", f"at most {limit} prompts", text)
    if many * count > limit:
        text = f"{many} prompts of {count} answers each, the maximum is {limit}"
        raise bad_field(field, f"at most {limit} answers", text, count)
    if any(isinstance(item, list) and not item for item in prompts):
        raise bad_field("prompt", "at least 1 token", "has no tokens")
    return prompts


def join_mixed(llm: LLM, prompt: Any) -> Any:
    """Encode a prompt that mixes ids and texts; return other prompts unchanged."""
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        return prompt
    ids: list[int] = []
    for part in prompt:
        is_text, encode = isinstance(part, str), llm.tokenizer.encode
        ids += encode(part, add_bos=not ids, parse_special=True) if is_text else [part]
    return ids
