"""Compare backends: the same checkpoint, options and seed give the same tokens at float32.

python examples/same_on_every_backend.py --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse

from mlx_llama import LlamaError, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=None)
    args = parser.parse_args()

    for backend in ("mlx", "cpu", "cuda"):
        try:
            llm = load(args.model, backend=backend, device="cpu", dtype="float32")
        except LlamaError as error:
            print(f"{backend:5} unavailable here: {error}")
            continue
        answer = llm.generate("Once upon a time", max_tokens=30, temperature=0.8, seed=7)
        print(f"{backend:5} {answer.tokens[:8]}... {answer.text!r}")


if __name__ == "__main__":
    main()
