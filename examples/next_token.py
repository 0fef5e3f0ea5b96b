"""Read the logits: the likeliest next tokens of a text, and its perplexity.

python examples/next_token.py "The capital of France is" --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse

import numpy as np

from mlx_llama import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("text", nargs="?", default="Once upon a time")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    llm = load(args.model, backend=args.backend, dtype="float32")
    tokens = llm.encode(args.text)
    logits = llm.logits(tokens)  # float32 [T, V]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    for token in np.argsort(-log_probabilities[-1])[:5]:
        print(
            f"{np.exp(log_probabilities[-1, token]):6.1%}  {llm.tokenizer.decode([int(token)])!r}"
        )
    surprise = -log_probabilities[np.arange(len(tokens) - 1), tokens[1:]].mean()
    print(f"perplexity of the text: {np.exp(surprise):.2f}")


if __name__ == "__main__":
    main()
