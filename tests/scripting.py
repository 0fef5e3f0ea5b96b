"""A model that says what a test wants: each answer is forced by a grammar of one text, special
tokens included.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from mlx_llama.core.answers.grammar import Rule

SPECIALS = (
    "[TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [INST] "
    "[/INST] <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|> <|im_start|> "
    "<|im_end|> [ARGS] [CALL_ID] <|tool_call|>"
).split()


def make_scripted_checkpoint(folder, template: str, specials=SPECIALS, **fields):
    """A random model with `template` and the special tokens of all formats of tool calls but
    harmony, or others.
    """
    from making import make_checkpoint, make_tokenizer

    flags = dict.fromkeys("lstrip rstrip normalized single_word".split(), False)
    flags["special"] = True
    added = {str(384 + i): {"content": text, **flags} for i, text in enumerate(specials)}
    make_checkpoint(
        folder, tokenizer=False, **{"vocab_size": 400, "max_position_embeddings": 8192} | fields
    )
    make_tokenizer(folder, "sentencepiece", added_tokens_decoder=added)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


class Script:
    """Answers of `llm` from now on, in the order of its requests. prompts: what they were, as
    text.
    """

    def __init__(self, llm, *answers: str):
        self.llm, self.left, self.prompts = llm, list(answers), []
        self._prepare = llm.loop.prepare
        llm.loop.prepare = self.prepare

    def prepare(self, request):
        """A handle whose answer is the next text of the script."""
        tokenizer = self.llm.tokenizer
        self.prompts.append(tokenizer.decode(list(request.prompt), skip_special=False))
        specials = "|".join(
            re.escape(text) for text in sorted(tokenizer.special_ids, key=len, reverse=True)
        )
        parts = [part for part in re.split(f"({specials})", self.left.pop(0)) if part]
        spelled = [
            f"<[{tokenizer.special_ids[part]}]>"
            if part in tokenizer.special_ids
            else json.dumps(part, ensure_ascii=False)
            for part in parts
        ]
        # the rule is that of thought and answer
        thinking = request.thinking and replace(request.thinking, precedes_rule=False)
        rule = Rule("tools", "start: " + " ".join(spelled or ['""']))
        return self._prepare(replace(request, rule=rule, thinking=thinking))

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_) -> None:
        del self.llm.loop.prepare


def tool_formats() -> dict[str, tuple[str, str]]:
    """Templates of four families, and how their models write the calls add(a=1, b=2) and then
    time().
    """
    from cases.texts import TEMPLATES, TOOL_TEMPLATES

    add = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    time = '{"name": "time", "arguments": {}}'
    calls = {
        "llama-3.1": f"{add}; {time}".replace("arguments", "parameters"),
        "mistral-nemo": f"[TOOL_CALLS][{add}, {time}]",
        "qwen2.5": f"<tool_call>\n{add}\n</tool_call>\n<tool_call>\n{time}\n</tool_call>",
        "smollm2": f"<tool_call>[{add}, {time}]</tool_call>",
    }
    return {name: ((TEMPLATES | TOOL_TEMPLATES)[name], text) for name, text in calls.items()}
