"""Continue a text, printing each piece as it is generated.

python examples/continue_text.py "Once upon a time" --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse

from mlx_llama import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("text", nargs="?", default="Once upon a time")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    llm = load(args.model, backend=args.backend)
    stream = llm.stream(args.text, max_tokens=60, temperature=0.7, seed=1)
    print(args.text, end="")
    for piece in stream:
        print(piece, end="", flush=True)
    print(f"\n\n{stream.completion.summary()}")


if __name__ == "__main__":
    main()
