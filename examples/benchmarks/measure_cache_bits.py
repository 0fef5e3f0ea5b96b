"""Measure what keys and values in 16 and 8 bits cost in accuracy, against the same model at full width.

    python examples/benchmarks/measure_cache_bits.py [--backend cpu] [--held-out] [FILE ...]

FILE ...: checkpoints, by default the guide. Printed: relative RMS of the logits of the last 32 of 96 random tokens;
--held-out: the guide's perplexity of 300 questions kept out of its training, each with its answer, at all widths.
llama.cpp's q8_0 cache is measured on the same tokens, against its f16 one, for GGUF files where llama-cpp-python is installed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import numpy as np

import mlx_llama
from mlx_llama.core.proofs.perplexity import measure_perplexity

TOKENS, SCORED = 96, 32
BITS = (16, 8)
GGML_F16, GGML_Q8_0 = 1, 8  # ggml's types


def relative_rms(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - right).mean() / np.square(right).mean()))


def draw_tokens(vocabulary: int) -> list[int]:
    return np.random.default_rng(0).integers(vocabulary // 8, vocabulary, TOKENS).tolist()


def load(path: str | None, backend: str, bits: int | None) -> mlx_llama.LLM:
    width = {"cache_bits": bits} if bits else {}
    return mlx_llama.load(path, backend=backend, **width) if path else mlx_llama.load(backend=backend, **width)


def measure_peer(path: str) -> float | None:
    """Relative RMS of llama.cpp's q8_0 cache against its f16 cache; None without llama-cpp-python."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return None
    logits = []
    for kind in (GGML_F16, GGML_Q8_0):
        peer = Llama(path, n_ctx=4 * TOKENS, n_batch=TOKENS, logits_all=True, verbose=False, type_k=kind, type_v=kind, flash_attn=True)
        peer.eval(draw_tokens(peer.n_vocab()))
        logits.append(np.array(peer.scores[TOKENS - SCORED:TOKENS]))
        peer.close()
    return relative_rms(logits[1], logits[0])


def measure_held_out(backend: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
    from guide_data import talk

    nll: dict[int | None, float] = {}
    for bits in (None, *BITS):
        llm, total, count = load(None, backend, bits), 0.0, 0
        for fact, question in random.Random(1).sample(list(talk.HELD_OUT.values()), 300):
            answer = fact.answer if fact else talk.SCOPE_ANSWER
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            tokens = llm.encode(messages)[:-1]  # without the token that opens another answer
            part = measure_perplexity(llm, tokens, max(2, len(tokens)), 1)
            total, count = total + part.nll * part.count, count + part.count
        nll[bits] = total / count
        print(f"held-out text, {bits or 'full'} bits: perplexity {math.exp(nll[bits]):.4f} of {count} tokens")
    for bits in BITS:
        print(f"difference in {bits} bits {100 * (math.exp(nll[bits] - nll[None]) - 1):+.4f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args()
    for path in args.files or [None]:
        logits = {}
        for bits in (None, *BITS):
            llm = load(path, args.backend, bits)
            logits[bits] = llm.logits(draw_tokens(llm.model.config.vocab_size))[-SCORED:]
            del llm
        found = {bits: relative_rms(logits[bits], logits[None]) for bits in BITS}
        peer = measure_peer(path) if path and path.endswith(".gguf") else None
        beside = f"; llama.cpp's q8_0 cache {peer:.2e}" if peer is not None else ""
        errors = ", ".join(f"{bits} bits {error:.2e}" for bits, error in found.items())
        print(f"{path or 'guide'}: relative RMS {errors}{beside}", flush=True)
    if args.held_out:
        measure_held_out(args.backend)


if __name__ == "__main__":
    main()
