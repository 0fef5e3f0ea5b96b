"""Texts that judge real checkpoints: eight for logits, 200 of all scripts for tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

LOGITS = (
    "Hi",
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, "
    "a + b\n    return a\n\n\nclass Stack:\n",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1; -- "
    '{"key": [1, 2.5e-3, null]}',
    "Zażółć gęślą jaźń — «Ünïcödé» 日本語のテキスト, текст, नमस्ते, שלום, 🦙👩‍👩‍👧 and e\u0301\u200d.",  # noqa: E501
    "\n\n\t  leading space, 1234567890 3.14159 -42 0x1F, ALL CAPS, camelCase, snake_case, "
    "don't, I'LL",
    "Once upon a time there was a little llama who lived on a hill. "
    + "Every day she walked down to the river, drank, looked at "
    "the clouds in the water, and walked up again, thinking of what the old alpaca had said. " * 8,
    " ".join(f"{number}: {number * number} is the square of {number}." for number in range(1, 33)),
)
GREEDY = (
    "Once upon a time",
    "The three primary colours are",
    "import numpy as np\n\ndef softmax(x):\n",
    "Liste de courses :",
)
CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Give me three tips for learning to cook.",
)


def make_tokenizer_texts() -> list[str]:
    """200 texts: each sentence, pairs of different scripts, and sentences cut, joined and spaced in
    other ways.
    """
    sentences = json.loads((Path(__file__).parent / "sentences.json").read_text("utf-8"))
    count, texts = len(sentences), list(sentences)
    for i in range(count):
        first, second = sentences[i], sentences[(7 * i + 13) % count]
        texts.append(first[: len(first) // 2] + second[len(second) // 3 :])
        texts.append(
            ("  ", "\n\n", "\t", " 12", "—", "")[i % 6].join((first, second, first[:5].upper()))
        )
    return texts[:200]
