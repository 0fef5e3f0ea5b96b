"""Write a checkpoint of random weights in a real model's shapes, to measure speed without
downloading anything.

    python examples/benchmarks/make_random_checkpoint.py tinyllama /tmp/tinyllama --dtype float32
    python -m mlx_llama.bench --model /tmp/tinyllama --backend cpu -p 128 -n 64

Speed depends on the weights' shapes and width, not on their values. Llama's folders have no
tokenizer: the bench feeds token ids. Those of other families have one of made-up pieces, so that
quantize can write them as GGUF files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.files.tensor import NUMBERS
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import BY_MODEL_TYPE


def describe_blocks(sizes: Iterable[tuple[int, float]]) -> list[dict[str, Any]]:
    """Layers of Nemotron-NAS. sizes: query heads for each key-value head (0: no attention), and the
    MLP's width over two thirds of the stream's, of each layer.
    """
    return [
        {
            "attention": {
                "n_heads_in_group": heads or None,
                "no_op": not heads,
                "replace_with_linear": False,
            },
            "ffn": {"ffn_mult": width, "no_op": False, "replace_with_linear": False},
        }
        for heads, width in sizes
    ]


# Of Llama 3.1, which others took over
LLAMA_3_1 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
SHAPES = {
    # rows of 256 and 768: the smallest that every GGUF type can quantise
    "tiny": dict(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
    ),
    # TinyLlama's depth with small products: shows the cost per token outside them
    "deep": dict(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=22,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=4096,
    ),
    "tinyllama": dict(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    ),
    "llama-3.2-1b": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "llama-3-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    # One of each family, from its published config.json
    "qwen2.5-1.5b": dict(
        model_type="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": dict(
        model_type="qwen3",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "smollm3-3b": dict(
        model_type="smollm3",
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=128256,
        max_position_embeddings=65536,
        rope_theta=5e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    "granite-3.3-2b": dict(
        model_type="granite",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=49159,
        max_position_embeddings=131072,
        rope_theta=1e7,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=8.0,
    ),
    "olmo-2-1b": dict(
        model_type="olmo2",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=100352,
        max_position_embeddings=4096,
        rope_theta=500000.0,
        rms_norm_eps=1e-6,
    ),
    "phi-4-mini": dict(
        model_type="phi3",
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=200064,
        max_position_embeddings=4096,
        # in its trained length
        rope_theta=10000.0,
        partial_rotary_factor=0.75,
        tie_word_embeddings=True,
    ),
    "gemma-2-2b": dict(
        model_type="gemma2",
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        vocab_size=256000,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        tie_word_embeddings=True,
    ),
    "gemma-3-1b": dict(
        model_type="gemma3_text",
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        sliding_window=512,
        tie_word_embeddings=True,
    ),
    "ministral-3-3b": dict(
        model_type="ministral3",
        hidden_size=3072,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=1e6,
            factor=16.0,
            original_max_position_embeddings=16384,
            beta_fast=32.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            llama_4_scaling_beta=0.1,
        ),
    ),
    # fields of Hugging Face's config.json that change shapes or arithmetic
    "seed-oss-36b": dict(
        model_type="seed_oss",
        attention_bias=True,
        attention_out_bias=False,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=155136,
        max_position_embeddings=524288,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
    ),
    "glm-4-9b": dict(
        model_type="glm4",
        rope_theta=10000.0,
        hidden_size=4096,
        intermediate_size=13696,
        num_hidden_layers=40,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=151552,
        max_position_embeddings=32768,
        partial_rotary_factor=0.5,
        attention_bias=True,
    ),
    "ernie-4.5-0.3b": dict(
        model_type="ernie4_5",
        use_bias=False,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=18,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=103424,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "hunyuan-1.8b": dict(
        model_type="hunyuan_v1_dense",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=120818,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "hunyuan-7b": dict(
        model_type="hunyuan_v1_dense",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128167,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "granite-4-micro": dict(
        model_type="granitemoehybrid",
        attention_bias=False,
        intermediate_size=8192,
        hidden_size=2560,
        shared_intermediate_size=8192,
        num_hidden_layers=40,
        layer_types=["attention"] * 40,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=100352,
        max_position_embeddings=131072,
        rope_theta=1e7,
        position_embedding_type="rope",
        num_local_experts=0,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.015625,
        logits_scaling=10.0,
    ),
    "apertus-8b": dict(
        model_type="apertus",
        hidden_act="xielu",
        attention_bias=False,
        mlp_bias=False,
        post_norm=False,
        qk_norm=True,
        hidden_size=4096,
        intermediate_size=21504,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=131072,
        max_position_embeddings=65536,
        rope_theta=1.2e7,
        rope_scaling=LLAMA_3_1,
    ),
    "olmo-3-7b": dict(
        model_type="olmo3",
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        vocab_size=100278,
        max_position_embeddings=65536,
        sliding_window=4096,
        rope_theta=500000.0,
        rms_norm_eps=1e-6,
    ),
    "exaone-4-1.2b": dict(
        model_type="exaone4",
        rope_scaling=None,
        sliding_window_pattern=None,
        hidden_size=2048,
        intermediate_size=4096,
        num_hidden_layers=30,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=102400,
        max_position_embeddings=65536,
        sliding_window=None,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "gpt-oss-20b": dict(
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=24,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        max_position_embeddings=131072,
        sliding_window=128,
        rope_theta=150000.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
    "llama-4-scout": dict(
        model_type="llama4_text",
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        num_hidden_layers=48,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=202048,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=None,
        attention_bias=False,
        attention_chunk_size=8192,
        use_qk_norm=True,
    ),
    # Its kinds of layers, 50 of 80 with attention; in an order of ours, with its 50 billion weights
    "nemotron-super-49b": dict(
        model_type="nemotron-nas",
        attention_bias=False,
        mlp_bias=False,
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        block_configs=describe_blocks(
            10
            * [
                *((8, 2.625), (8, 5.25), (0, 1.0), (8, 5.25)),
                *((8, 5.25), (0, 0.5), (8, 5.25), (0, 5.25)),
            ]
        ),
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=LLAMA_3_1,
    ),
    # 12 of the 42 layers of Gemma 4 E4B, 8 of the 32 of Qwen3.5 4B, and LFM2.5 1.2B
    "gemma-4-e4b-12": dict(
        model_type="gemma4_text",
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=12,
        num_kv_shared_layers=6,  # llama.cpp takes the last two layers before these
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        hidden_size_per_layer_input=256,
        vocab_size=262144,
        vocab_size_per_layer_input=262144,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        sliding_window=512,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    "qwen3.5-4b-8": dict(
        model_type="qwen3_5_text",
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        full_attention_interval=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        vocab_size=248320,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
        tie_word_embeddings=True,
    ),
    "lfm2.5-1.2b": dict(
        model_type="lfm2",
        hidden_size=2048,
        intermediate_size=12288,
        block_auto_adjust_ff_dim=True,
        num_hidden_layers=16,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
        num_attention_heads=32,
        num_key_value_heads=8,
        conv_L_cache=3,
        vocab_size=65536,
        max_position_embeddings=128000,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_embedding=True,
    ),
    # Mixtures of experts: 2 of the 32 layers of Mixtral 8x7B, 6 of the 48 of Qwen3-30B-A3B, and a
    # small one
    "mixtral-8x7b-2": dict(
        model_type="mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=32768,
        rope_theta=1e6,
    ),
    "qwen3-30b-a3b-6": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=8192,
        rope_theta=1e6,
    ),
    "tiny-experts": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=512,
    ),
}
WIDTHS = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, float32 values) of every tensor, one at a time.

    Matrices, and stacks of them, have a standard deviation of 1 / sqrt(row length), which keeps
    activations near 1 through the layers; norms are around 1.
    """
    rng = np.random.default_rng(seed)
    for name, dims in shapes.items():
        values = rng.standard_normal(dims, np.float32)
        yield name, values * dims[-1] ** -0.5 if len(dims) > 1 else 1 + 0.1 * values


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a byte-level tokenizer.json of `size` pieces: specials, 256 bytes, then words of
    letters, each two others joined.
    """
    from tokenizers import pre_tokenizers

    specials, letters = ("<unk>", "<s>", "</s>"), string.ascii_lowercase
    words = (
        "".join(word) for n in itertools.count(2) for word in itertools.product(letters, repeat=n)
    )
    words = list(itertools.islice(words, size - len(specials) - 256))
    pieces = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words]
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
        r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for i, token in enumerate(specials)
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [  # Llama 3's
                {
                    "type": "Split",
                    "pattern": {"Regex": split},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [[word[:-1], word[-1]] for word in words],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def config_fields(shape: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of a config.json. shape: those of one of SHAPES."""
    kind = shape.get("model_type", "llama")
    return {
        "architectures": [BY_MODEL_TYPE[kind].name],
        "model_type": kind,
        "rms_norm_eps": 1e-5,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,  # mlx-lm's default is true, transformers' false
        **({} if "gemma" in kind else {"hidden_act": "silu"}),
        **shape,
    }


def narrow(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The same layers at width 256: what remains of a step is the host's share."""
    fields = dict(hidden_size=256, head_dim=64, vocab_size=2048, num_attention_heads=4)
    if blocks := shape.get("block_configs"):
        sizes = ((0 if block["attention"]["no_op"] else 2, 4.5) for block in blocks)
        return {**shape, **fields, "block_configs": describe_blocks(sizes)}
    groups = min(2, shape["num_attention_heads"] // shape["num_key_value_heads"])
    fields |= {key: 768 for key in shape if "intermediate_size" in key}
    return {**shape, **fields, "num_key_value_heads": 4 // groups}


def publish(
    raw: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Fields and shapes as gpt-oss and Llama 4 come in MLX folders: their experts' matrices in
    stacks, Llama 4's text model within the one with vision."""
    if raw["model_type"] not in ("gpt_oss", "llama4_text"):
        return raw, dict(shapes)
    count, prefix = raw["num_local_experts"], ""
    if raw["model_type"] == "llama4_text":
        prefix = "language_model."
        raw = {
            "architectures": ["Llama4ForConditionalGeneration"],
            "model_type": "llama4",
            "text_config": raw,
        }
    stacked = {}
    for name, dims in shapes.items():
        stack = re.sub(r"experts\.\d+", "experts", name)
        stacked[prefix + stack] = dims if stack == name else (count, *dims)
    return raw, stacked


def write(
    folder: Path, shape: str, dtype: str, seed: int, change: Callable[..., Any] = dict
) -> None:
    """Write config.json and model.safetensors with one tensor in memory at a time. change: of the
    shape's fields."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = config_fields(change(SHAPES[shape]), dtype)
    if raw["model_type"] != "llama":
        write_tokenizer(folder, raw["vocab_size"])
    raw, shapes = publish(raw, LlamaConfig.from_dict(raw, "config.json").stored_shapes())
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    kind, width = WIDTHS[dtype]
    header, offset = {}, 0
    for name, dims in shapes.items():
        end = offset + width * int(np.prod(dims))
        header[name] = {"dtype": kind, "shape": list(dims), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the data, as the safetensors library does
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in random_tensors(shapes, seed):
            file.write(values.astype(NUMBERS[dtype]).tobytes())


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=WIDTHS, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--narrow", action="store_true", help="layers of width 256")
    args = parser.parse_args()
    write(args.folder, args.shape, args.dtype, args.seed, narrow if args.narrow else dict)
    print(f"wrote {args.folder}")


if __name__ == "__main__":
    main()
