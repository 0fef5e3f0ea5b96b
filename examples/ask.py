"""Ask one question; the model's chat template makes the prompt.

python examples/ask.py "Why is the sky blue?" --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse

from mlx_llama import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("question", nargs="?", default="Hello, who are you?")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    llm = load(args.model, backend=args.backend)
    print(llm.ask(args.question, system="You are a helpful assistant.", max_tokens=120))


if __name__ == "__main__":
    main()
