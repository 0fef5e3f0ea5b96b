"""python -m mlx_llama.parity: check that the backends agree, and find where they differ.

The same tokens run through several backends, most as a prompt, the last ones one by one, and are
compared with a float32 NumPy run at every probe of the model. The exit code is 0 within the dtype's
tolerance and 1 outside.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_llama.cli import flags
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import full_dtype
from mlx_llama.parity.batches import SIZES

from .modes import MODES, TOKENS, WINDOW, Job

EXAMPLES = """
--check
--model HuggingFaceTB/SmolLM2-360M-Instruct --backends cpu,mlx
"""
GUIDE_TRACE = str(Path(__file__).parent.parent / "guide" / "trace.json")


def parser() -> flags.Parser:
    result = flags.Parser("parity", __doc__.split("\n\n")[0], EXAMPLES)
    modes = result.add_argument_group("mode (at most one; default: compare backends)")
    mode, add = modes.add_mutually_exclusive_group(), result.add_argument
    sizes = ",".join(map(str, SIZES))
    mode.add_argument(
        "--record", metavar="FILE", help="write a golden trace of a float32 NumPy run"
    )
    mode.add_argument(
        "--check",
        metavar="FILE",
        nargs="?",
        const=GUIDE_TRACE,
        help="check the backends against a golden trace (default: the guide model's)",
    )
    mode.add_argument(
        "--verify-cache",
        action="store_true",
        help="compare every way of filling the cache with a cold run",
    )
    mode.add_argument(
        "--batch",
        metavar="ROWS",
        nargs="?",
        const=sizes,
        help="compare rows computed alone with the same rows in batches of these sizes (default: "
        f"{sizes})",
    )
    mode.add_argument(
        "--repeat",
        metavar="N",
        help="run the same request N times in this process and N times in fresh ones, and compare "
        "the bits",
    )
    mode.add_argument(
        "--perplexity",
        metavar="FILE",
        help="measure the perplexity of a text (- reads standard input) on each backend",
    )
    add("--prompt", "-p", metavar="PROMPT", help="text to run (default: two sentences)")
    add("--tokens", "-n", metavar="N", help=f"number of tokens to run (default: {TOKENS})")
    add(
        "--reference",
        choices=("numpy", "transformers"),
        help="reference: NumPy at float32 (the default) or transformers at float32",
    )
    add("--html", metavar="FILE", help="write the comparison as an HTML page with plots")
    add("--json", action="store_true", help="print everything as one JSON object")
    add(
        "--ctx-size",
        "-c",
        metavar="TOKENS",
        help=f"window of a perplexity (default: the context, at most {WINDOW})",
    )
    add("--stride", metavar="TOKENS", help="distance between windows (default: half a window)")
    add("--digest", action="store_true", help=argparse.SUPPRESS)
    add(
        "--backends",
        metavar="LIST",
        help="backends to run, of mlx,cpu,cuda (default: all that are installed)",
    )
    shared = "model revision device dtype compile cache_bits batch_invariant adapters"
    flags.add_load_flags(result, only=shared.split())
    return result


# the modes that accept a flag
_OF_A_TEXT = ("compare", "verify_cache", "batch", "repeat", "digest")
_ON_BACKENDS = (*_OF_A_TEXT, "check", "perplexity")
ONLY_FOR = {
    **dict.fromkeys(("html", "reference"), ("compare",)),
    **dict.fromkeys(("ctx_size", "stride"), ("perplexity",)),
    **dict.fromkeys(("prompt", "tokens"), (*_OF_A_TEXT, "record")),
    **dict.fromkeys(("backends", "compile", "cache_bits", "batch_invariant"), _ON_BACKENDS),
    "adapters": (*_OF_A_TEXT, "perplexity"),
    "json": ("compare", "check", "verify_cache", "batch", "repeat", "perplexity"),
}


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    mode = next(
        (name for name in MODES if name != "compare" and getattr(args, name) not in (None, False)),
        "compare",
    )
    for name, modes in ONLY_FOR.items():
        if getattr(args, name) not in (None, False) and mode not in modes:
            raise OptionsError(
                f"`{name}` has no meaning with `{mode}`: leave it out"
                if mode != "compare"
                else f"`{name}` is for `perplexity`: leave it out"
            )
    if mode == "record" and full_dtype(args.dtype) not in ("auto", "float32"):
        raise OptionsError(f"--dtype {args.dtype}: a trace is recorded at float32: leave it out")
    if mode == "record":
        args.backends = "cpu"
    return MODES[mode](Job(args))
