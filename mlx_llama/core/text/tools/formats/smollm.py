"""SmolLM2: <tool_call>[{"name": ..., "arguments": {...}}, ...]</tool_call>. SmolLM3: as Hermes,
with its own variable.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mlx_llama.core.text.tokenizer import Tokenizer

from .hermes import Hermes


class SmolLM2(Hermes):
    name = "smollm"

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return (
            super().matches(source, tokenizer)
            and re.search(r"<tool_call>\s*\[", source) is not None
        )

    def spell_calls(self, mark: Callable[[str], str], many: bool) -> str:
        calls = 'call (", " call)*' if many else "call"
        return f'{mark(self.opens)} "[" {calls} "]" {mark(self.closes)}'


class SmolLM3(Hermes):
    name = "smollm"
    variable = "xml_tools"

    def matches(self, source: str, tokenizer: Tokenizer) -> bool:
        return super().matches(source, tokenizer) and "xml_tools" in source


SMOLLM2, SMOLLM3 = SmolLM2(), SmolLM3()
