"""Write GGUF files of random weights in a real model's shapes, quantised by llama.cpp's own
quantiser.

    pip install -e ".[peers]"
    python examples/benchmarks/make_random_gguf.py tinyllama /tmp/models F16 Q8_0 Q4_0 Q4_K_M
    python examples/benchmarks/make_random_gguf.py gpt-oss-20b /tmp/models MXFP4 --layers 4
    python -m mlx_llama.bench --model /tmp/models/tinyllama-Q4_0.gguf --backend cpu -p 128 -n 64

Speed depends on the weights' shapes and width, not on their values. The SentencePiece vocabulary
has made-up pieces: any text encodes, no answer means anything. llama.cpp permutes query and key
rows; random rows need no permutation. Other families than Llama get random blocks of the types
that quantize writes, without a quantiser, and a byte-level vocabulary.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import string
import sys
import tempfile
from pathlib import Path
from typing import Any

import make_random_checkpoint
import numpy as np
import random_weights
from make_random_checkpoint import SHAPES, random_tensors

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.quantize.gguf_export import TYPES, write_gguf

PLAIN = ("F32", "F16", "BF16")
QUANTISED = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K_M",
    "Q4_K_M",
    "Q5_K_M",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
# types of other families' files that need no quantiser
OF_FAMILIES = tuple(kind for kind in TYPES if kind not in PLAIN)
CONTEXT = 8192  # default of the smallest context length, for measurements at depth


def vocabulary(size: int) -> tuple[list[str], list[float], list[int]]:
    """(pieces, scores, types) of a SentencePiece vocabulary: specials, 256 bytes, then all strings
    over an alphabet.

    Short strings come first, so each piece can be merged from two others.
    """
    from gguf import TokenType

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    alphabet = (
        "\u2581"
        + string.ascii_lowercase
        + string.ascii_uppercase
        + string.digits
        + string.punctuation
    )
    strings = (
        "".join(letters)
        for n in itertools.count(1)
        for letters in itertools.product(alphabet, repeat=n)
    )
    pieces += itertools.islice(strings, size - len(pieces))
    types += [TokenType.NORMAL] * (size - len(types))
    scores = [0.0 if kind != TokenType.NORMAL else 259.0 - i for i, kind in enumerate(types)]
    return pieces, scores, [int(kind) for kind in types]


def start_file(path: Path, raw: dict[str, Any], file_type: int) -> Any:
    """A gguf.GGUFWriter with the metadata of a Llama model. raw: fields of a config.json;
    file_type: llama.cpp's ftype.
    """
    import gguf

    config = LlamaConfig.from_dict(raw, "config.json")
    file = gguf.GGUFWriter(path, "llama")
    file.add_name(path.stem)
    file.add_file_type(file_type)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_block_count(config.num_hidden_layers)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_key_length(config.head_dim)
    file.add_value_length(config.head_dim)
    file.add_rope_dimension_count(config.head_dim)
    file.add_rope_freq_base(float(raw.get("rope_theta", 10000.0)))
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(config.vocab_size)
    pieces, scores, types = vocabulary(config.vocab_size)
    file.add_tokenizer_model("llama")
    file.add_tokenizer_pre("default")
    file.add_token_list(pieces)
    file.add_token_scores(scores)
    file.add_token_types(types)
    file.add_unk_token_id(0)
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    return file


def write(
    path: Path,
    raw: dict[str, Any],
    kind: str,
    seed: int,
    frequency_factors: np.ndarray | None = None,
) -> None:
    """Write a model of random weights as F32, F16 or BF16, one tensor at a time; vectors are F32 in
    each.

    raw: fields of a config.json. frequency_factors: float32 [head_dim / 2] for rope_freqs.weight.
    """
    import gguf

    config = LlamaConfig.from_dict(raw, "config.json")
    file = start_file(path, raw, {"F32": 0, "F16": 1, "BF16": 32}[kind])
    matrix = gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, dims in config.tensor_shapes().items():
        stored = matrix if len(dims) == 2 else gguf.GGMLQuantizationType.F32
        nbytes = int(np.prod(dims)) * gguf.GGML_QUANT_SIZES[stored][1]
        file.add_tensor_info(
            names.get_name(name, (".weight", ".bias")), dims, np.float32, nbytes, stored
        )
    if frequency_factors is not None:
        file.add_tensor_info(
            "rope_freqs.weight", frequency_factors.shape, np.float32, frequency_factors.nbytes
        )
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_ti_data_to_file()
    for _, values in random_tensors(config.tensor_shapes(), seed):
        file.write_tensor_data(gguf.quantize(values, matrix) if values.ndim == 2 else values)
    if frequency_factors is not None:
        file.write_tensor_data(frequency_factors)
    file.close()


def write_family(path: Path, shape: str, kind: str, seed: int) -> None:
    """Write a model of another family than Llama as F32, F16 or BF16, by way of a folder, which
    takes as much again.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        make_random_checkpoint.write(
            Path(folder),
            shape,
            {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind],
            seed,
        )
        path.unlink(missing_ok=True)
        write_gguf(open_checkpoint(folder), path, kind)


def quantise(source: Path, target: Path, kind: str, threads: int = 0) -> None:
    """Quantise the F32, F16 or BF16 file `source` to `target` by llama.cpp; k-quant mixtures choose
    types per tensor.
    """
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.nthread = threads
    status = llama_cpp.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(settings)
    )
    llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), None)
    if status != 0:
        raise SystemExit(f"error: llama.cpp could not quantise {source} to {kind}")


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "types",
        nargs="*",
        default=["F16"],
        metavar="type",
        help=f"{', '.join(PLAIN + QUANTISED)} or all (default: F16)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--context",
        type=int,
        default=CONTEXT,
        metavar="TOKENS",
        help=f"least context length in the file, for measurements at depth (default: {CONTEXT})",
    )
    parser.add_argument("--layers", type=int, help="in place of the model's number")
    args = parser.parse_args()
    if not 1 <= args.context < 1 << 31:
        parser.error(f"--context {args.context}: must be 1 to {(1 << 31) - 1}")
    kinds = list(PLAIN + QUANTISED) if args.types == ["all"] else args.types
    is_family = "model_type" in SHAPES[args.shape]
    known = dict.fromkeys(PLAIN + QUANTISED + (OF_FAMILIES if is_family else ()))
    unknown = [kind for kind in kinds if kind not in known]
    if unknown:
        parser.error(f"unknown type {unknown[0]}: use {', '.join(known)} or all")
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers {args.layers}: must be at least 1")
    in_memory = [kind for kind in kinds if is_family and kind in OF_FAMILIES]
    try:
        import gguf  # noqa: F401

        if set(kinds) - set(PLAIN) - set(in_memory):
            import llama_cpp  # noqa: F401
    except ImportError as error:
        sys.exit(f'error: {error.name} is not installed: pip install -e ".[peers]"')

    args.folder.mkdir(parents=True, exist_ok=True)
    name = args.shape
    if args.layers:
        fields = SHAPES[args.shape]
        fields["num_hidden_layers"] = args.layers
        for key in fields.keys() & {"layer_types", "block_configs"}:
            fields[key] = fields[key][: args.layers]
        name += f"-{args.layers}"
    raw = {
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[args.shape],
    }
    raw["max_position_embeddings"] = max(args.context, raw["max_position_embeddings"])
    paths = {kind: args.folder / f"{name}-{kind}.gguf" for kind in kinds}

    def write_plain(path: Path, kind: str) -> None:
        if is_family:
            write_family(path, args.shape, kind, args.seed)
        else:
            write(path, raw, kind, args.seed)

    for kind in set(kinds) & set(PLAIN):
        write_plain(paths[kind], kind)
        print(f"wrote {paths[kind]}", flush=True)
    for kind in in_memory:
        random_weights.write_gguf(paths[kind], args.shape, kind.lower(), args.seed)
        print(f"wrote {paths[kind]}", flush=True)
    quantised = [kind for kind in kinds if kind not in (*PLAIN, *in_memory)]
    if quantised:
        source = args.folder / f"{name}-F16.gguf"
        if "F16" not in kinds:
            source = source.with_suffix(".source.gguf")
            write_plain(source, "F16")
        for kind in quantised:
            quantise(source, paths[kind], kind)
            print(f"wrote {paths[kind]}", flush=True)
        if "F16" not in kinds:
            source.unlink()


if __name__ == "__main__":
    main()
