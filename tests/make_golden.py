"""Write tests/golden_guide.json after training the guide:

    python tests/make_golden.py

The NumPy path writes the tokens. tests/guide/test_guide.py compares the greedy ones with
transformers, and all of them with each backend. Read the texts before committing them.
"""

from __future__ import annotations

import json
from pathlib import Path

from mlx_llama import load

CHATS = (
    "Hello!|Who are you?|Which backends are there?|Tell me a story.|what is temperature?"
).split("|")
TEXTS = ("Once upon a time", "")
PENALTIES = dict(presence_penalty=0.5, frequency_penalty=0.3, logit_bias={"300": 1.5})
SAMPLED = [
    dict(seed=1, temperature=0.8),
    dict(seed=2, temperature=1.0, top_p=0.9),
    dict(seed=3, temperature=1.2, top_k=40),
    dict(seed=2**63 + 5, temperature=0.9, min_p=0.05, repetition_penalty=1.2),
    dict(seed=4, temperature=0.7, **PENALTIES),
]


def main() -> None:
    llm = load(backend="cpu")
    prompts = [(text, True) for text in CHATS] + [(text, False) for text in TEXTS]

    def run(text: str, chat: bool, **options) -> dict:
        done = llm.generate(
            [{"role": "user", "content": text}] if chat else text, max_tokens=60, **options
        )
        return {"prompt": text, "chat": chat, "tokens": done.tokens, "text": done.text}

    greedy = [run(text, chat) for text, chat in prompts]
    sampled = [
        run(text, chat, **options) | {"options": options}
        for options in SAMPLED
        for text, chat in prompts[3:6]
    ]
    text = json.dumps({"greedy": greedy, "sampled": sampled}, indent=1, ensure_ascii=False)
    Path(__file__).with_name("golden_guide.json").write_text(text + "\n", "utf-8")
    for case in greedy + sampled:
        print(f"{case['prompt']!r} -> {case['text']!r}")


if __name__ == "__main__":
    main()
