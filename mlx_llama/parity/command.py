"""python -m mlx_llama.parity: check that the backends agree, and find where they differ.

The same tokens run through several backends, most as a prompt, the last ones one by one, and are
compared with a float32 NumPy run at every probe of the model. The exit code is 0 within the dtype's
tolerance and 1 outside.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_llama.cli import flags
from mlx_llama.core.backends.load_options import full_dtype
from mlx_llama.core.errors import OptionsError
from mlx_llama.parity.batches import SIZES

from .modes import MODES, TOKENS, WINDOW, Job

EXAMPLES = """
--check
--model HuggingFaceTB/SmolLM2-360M-Instruct --backends cpu,mlx
"""
GUIDE_TRACE = str(Path(__file__).parent.parent / "guide" / "trace.json")
MODE_FLAGS = """
--record FILE: write a golden trace of a float32 NumPy run
--check [FILE]: check the backends against a golden trace (default: the guide model's)
--verify-cache: compare every way of filling the cache with a cold run
--batch [ROWS]: compare rows computed alone with the same rows in batches of these sizes (default:
  {sizes})
--repeat N: run the same request N times in this process and N times in fresh ones, and compare the
  bits
--perplexity FILE: measure the perplexity of a text (- reads standard input) on each backend
"""
FLAGS = f"""
--prompt -p PROMPT: text to run (default: two sentences)
--tokens -n N: number of tokens to run (default: {TOKENS})
--reference {{numpy,transformers}}: reference: NumPy at float32 (the default) or transformers at
  float32
--html FILE: write the comparison as an HTML page with plots
--json: print everything as one JSON object
--ctx-size -c TOKENS: window of a perplexity (default: the context, at most {WINDOW})
--stride TOKENS: distance between windows (default: half a window)
--digest: for --repeat
--backends LIST: backends to run, of mlx,cpu,cuda (default: all that are installed)
"""


def parser() -> flags.Parser:
    result = flags.Parser("parity", __doc__.split("\n\n")[0], EXAMPLES)
    group = result.add_argument_group("mode (at most one; default: compare backends)")
    sizes = ",".join(map(str, SIZES))
    modes = {"check": {"const": GUIDE_TRACE}, "batch": {"const": sizes}}
    result.add_flags(MODE_FLAGS.format(sizes=sizes), group.add_mutually_exclusive_group(), **modes)
    references = {"choices": ("numpy", "transformers")}
    result.add_flags(FLAGS, reference=references, digest={"help": argparse.SUPPRESS})
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
