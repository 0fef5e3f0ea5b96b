"""Hold a conversation; each turn reuses the common prefix.

python examples/conversation.py --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse

from mlx_llama import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    chat = load(args.model, backend=args.backend).chat(max_tokens=80)
    for question in (
        "Hello, who are you?",
        "Which backends are there?",
        "How do I load a real model?",
    ):
        answer = chat.send(question)
        print(
            f"> {question}\n{answer}\n({answer.reused_tokens} of {answer.prompt_tokens} prompt "
            "tokens reused)\n"
        )


if __name__ == "__main__":
    main()
