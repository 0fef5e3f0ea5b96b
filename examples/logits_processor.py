"""Change the logits before each token: here only tokens that begin with one letter, by a function
in NumPy.

    python examples/logits_processor.py "Once upon a time" --letter s --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse

import numpy as np

from mlx_llama import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("text", nargs="?", default="Once upon a time")
    parser.add_argument("--letter", default="s", help="that every token begins with")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    llm = load(args.model, backend=args.backend)
    texts = [llm.tokenizer.piece(token) for token in range(llm.model.config.vocab_size)]
    words = [piece.data.decode("utf-8", "replace") if piece else "" for piece in texts]
    is_forbidden = np.array([not word.strip().lower().startswith(args.letter) for word in words])

    def keep_letter(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """tokens: int32 [T], prompt and answer so far; logits: float32 [1, V]."""
        return np.where(is_forbidden, -np.inf, logits)

    print(llm.generate(args.text, max_tokens=20, logits_processor=keep_letter))


if __name__ == "__main__":
    main()
