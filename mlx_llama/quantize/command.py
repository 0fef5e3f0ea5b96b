"""python -m mlx_llama.quantize: quantize a model, for MLX or as a GGUF file."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mlx_llama import cli
from mlx_llama.cli.flags import Parser
from mlx_llama.core.errors import OptionsError

if TYPE_CHECKING:
    from .importance import Importance

GGUF = "gguf:"
EXAMPLES = """
HuggingFaceTB/SmolLM2-360M-Instruct ~/models/smol-4bit --bits 4
~/models/smol ~/models/smol-Q4_K_M.gguf --format gguf:Q4_K_M
"""
FLAGS = """
source IN: a folder, a .gguf file, a Hugging Face hub id, or guide
out OUT: the folder, or with --format gguf:... the .gguf file, to write
--bits --q-bits {2,3,4,5,6,8}: bits per weight (default: 4; a quantized GGUF file keeps its own)
--group-size --q-group-size {32,64,128}: weights that share a scale (default: 64; a quantized GGUF
  file keeps its own)
--format {mlx,mlx:MODE,gguf:TYPE}: mlx: a folder, for mlx_lm too, optionally of MODE mxfp4, nvfp4 or
  mxfp8; gguf: a file, for llama.cpp too, of TYPE Q3_K_S, Q3_K_M, Q4_0, IQ4_XS, Q4_K_M, Q5_K_M,
  Q6_K, Q8_0, F16, BF16 or F32, or MXFP4 for models with experts (default: mlx)
--merge FOLDER[=SCALE]: merge a LoRA adapter, in the format of PEFT or mlx_lm, optionally with a
  scale; without --bits and --format a full-width model keeps its width
--calibrate {TEXT,docs}: weigh errors by the model's activations on a text file, or on this
  package's documentation: better GGUF files of few bits
--imatrix FILE: weigh errors by an importance matrix of llama.cpp (GGUF or .dat); with --calibrate:
  the file to write it to
--revision REVISION: branch, tag or commit of a hub id
"""


def parser() -> Parser:
    """The command line. Names follow mlx_lm.convert's."""
    result = Parser("quantize", __doc__, EXAMPLES, "IN OUT")
    result.add_flags(FLAGS, format={"default": "mlx"})
    return result


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError."""
    args = parser().parse_args(arguments)
    scheme = parse_scheme(args.format, args.bits, args.group_size)
    is_folder = not args.format.startswith(GGUF)
    if is_folder and args.out.endswith(".gguf"):
        raise OptionsError(
            f"{args.out}: --format {args.format} writes a folder; for a GGUF file add --format "
            "gguf:Q4_K_M or gguf:Q8_0"
        )

    check_calibration(args)
    from mlx_llama.core.files.checkpoint import merge_adapter, open_checkpoint

    from . import gguf_export, mlx_folder
    from .search import find_search

    adapters = () if args.merge is None else [args.merge]
    checkpoint = open_checkpoint(args.source, args.revision, adapters)
    is_low_bit = bool(checkpoint.low_bit)
    if checkpoint.adapters:
        (adapter,) = checkpoint.adapters
        checkpoint = merge_adapter(checkpoint)
        again = ", which were dequantized and are rounded again" if is_low_bit else ""
        cli.say(f"(merging {adapter.name} into {len(adapter.pairs)} matrices{again})")
        if args.format == "mlx" and args.bits is args.group_size is None and not is_low_bit:
            scheme = None, 64  # the base's width
    keeps = (
        args.bits is args.group_size is None
        and args.format == "mlx"
        and is_low_bit
        and checkpoint.gguf_metadata is not None
    )
    importance = find_importance(args)
    with cli.clean_up_when_terminated(), cli.Bar("quantizing"):
        if is_folder:
            written = mlx_folder.write_mlx(checkpoint, args.out, *scheme, keep=keeps)
        else:
            search = find_search()
            written = gguf_export.write_gguf(checkpoint, args.out, *scheme, importance, search)
    for notice in written.notices:
        cli.say(f"({notice})")
    ratio = checkpoint.nbytes / written.nbytes
    change = f"{ratio:.1f} times smaller" if ratio >= 1 else f"{1 / ratio:.1f} times larger"
    cli.say(
        f"{written.path}: {written.nbytes / 1e6:,.1f} MB of weights, {written.bits_per_weight:.2f} "
        f"bits each ({change} than {checkpoint.name})"
    )
    return 0


def check_calibration(args: argparse.Namespace) -> None:
    """Raise OptionsError for options that contradict --calibrate and --imatrix."""
    flag = "--calibrate" if args.calibrate is not None else "--imatrix"
    if args.calibrate is args.imatrix is None:
        return
    kind = args.format.removeprefix(GGUF)
    if not args.format.startswith(GGUF) or kind in ("F16", "BF16", "F32", "Q8_0", "MXFP4"):
        raise OptionsError(
            f"{flag}: is for GGUF types of 3 to 6 bits, and --format is "
            f"{args.format}: leave it out, or add --format gguf:IQ4_XS or gguf:Q4_K_M"
        )
    if args.merge is not None and args.calibrate is not None:
        raise OptionsError("--calibrate and --merge: merge first, then calibrate the merged copy")


def find_importance(args: argparse.Namespace) -> Importance | None:
    """Read or measure the importance of columns; None without --calibrate and --imatrix."""
    from .importance import read_importance, write_importance

    if args.calibrate is None:
        return None if args.imatrix is None else read_importance(args.imatrix)
    from mlx_llama.api.llm import load_model
    from mlx_llama.core.backends.load_options import LoadOptions
    from mlx_llama.core.errors import CheckpointError
    from mlx_llama.core.system import progress
    from mlx_llama.core.system.files import read_text, reading

    from .importance import WINDOW, WINDOWS, measure_importance, read_docs

    is_docs = args.calibrate == "docs"
    if is_docs:
        text = read_docs()
    else:
        with reading(args.calibrate, CheckpointError, "choose a text file, or docs"):
            text = read_text(args.calibrate, 1 << 28)
    options = LoadOptions(args.source, "cpu", compile=False, revision=args.revision)
    llm = load_model(options)
    tokens = llm.tokenizer.encode(text)[: WINDOW * WINDOWS if is_docs else None]
    windows = max(1, len(tokens) // WINDOW)
    with progress.show_count("calibrating", windows) as show:
        importance = measure_importance(
            llm, tokens, args.calibrate, progress=lambda done, total: show(done)
        )
    llm.close()
    if args.imatrix is not None:
        write_importance(importance, args.imatrix)
    return importance


def parse_scheme(
    format: str, bits: str | None, group_size: str | None
) -> tuple[int, int] | tuple[int, int, str] | tuple[str]:
    """Arguments of write_mlx (bits, group size, mode) or write_gguf. Raises OptionsError."""
    from . import gguf_export, mlx_folder

    modes = {f"mlx:{mode}": (*packing, mode) for mode, packing in mlx_folder.FLOAT_MODES.items()}
    kinds = ["mlx", *modes, *(GGUF + name for name in gguf_export.TYPES)]
    if format not in kinds:
        *others, last = kinds
        raise OptionsError(f"--format {format!r:.60}: choose {', '.join(others)} or {last}")
    if format != "mlx":
        for flag, value in (("--bits", bits), ("--group-size", group_size)):
            if value is not None:
                raise OptionsError(
                    f"{flag} {value}: is for --format mlx, and {format} fixes it: leave it out"
                )
        return modes.get(format) or (format.removeprefix(GGUF),)
    chosen = []
    for flag, value, default, allowed in (
        ("--bits", bits, 4, mlx_folder.BITS),
        ("--group-size", group_size, 64, mlx_folder.GROUP_SIZES),
    ):
        if value is not None and value not in map(str, allowed):
            raise OptionsError(f"{flag} {value!r:.40}: MLX has {', '.join(map(str, allowed))}")
        chosen.append(default if value is None else int(value))
    return tuple(chosen)
