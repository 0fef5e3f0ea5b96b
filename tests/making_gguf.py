"""Toy GGUF files for the tests, written by gguf's own writer and quantiser.

judge = make_gguf(tmp_path / "toy.gguf", kinds="Q8_0", num_key_value_heads=1)   # {Hugging Face name: float32}
"""  # noqa: E501

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type, TokenType
from making import (
    CHAT_TEMPLATE,
    byte_level_json,
    config_fields,
    random_tensors,
    sentencepiece_model,
)


def llama_cpp_model(path: Path) -> Any:
    """The model in llama.cpp, its cache and attention in float32."""
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason='llama.cpp is the judge here: pip install -e ".[peers]"'
    )
    cache = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
    options = dict(n_ctx=256, n_threads=1, n_threads_batch=1, flash_attn=False, **cache)
    return llama_cpp.Llama(str(path), logits_all=True, verbose=False, **options)


def write_all(writer: gguf.GGUFWriter) -> None:
    """Write the file of what a writer has."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PLAIN = ("F32", "F16", "BF16")
# by gguf.quants; other types get random blocks
QUANTISABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
LOW_BIT = (*QUANTISABLE, *"Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ4_NL IQ4_XS MXFP4 NVFP4".split())
# A model of 4 and 6 bits, small enough for Triton's interpreter: fields of make_gguf
LOW_BIT_MODEL: dict[str, Any] = dict(num_hidden_layers=1, vocab_size=64, tokenizer=None)
LOW_BIT_MODEL |= dict(hidden_size=256, intermediate_size=256, head_dim=128)
LOW_BIT_MODEL |= dict(num_attention_heads=2, num_key_value_heads=1)
LOW_BIT_MODEL |= dict(kinds=lambda name: "Q6_K" if ".v_proj" in name else "Q4_K")
# offsets of the blocks' float16 scales (ggml/src/ggml-common.h); Q8_K's is a float32 at byte 0
HALVES = dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,))
HALVES |= dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))
HALVES |= {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
# Scales for weights of about 0.1
_SCALE = {"Q2_K": 0.008, "Q3_K": 0.004, "Q4_K": 3e-4, "Q5_K": 1.5e-4, "Q6_K": 7e-5}
_SCALE |= {"Q8_K": 0.0014, "IQ4_NL": 0.0015, "IQ4_XS": 8e-5}


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row bytes] with random codes and scales, weights around 0.1."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = rng.integers(0, 256, (rows * columns // weights, nbytes), dtype=np.uint8)
    scales = (_SCALE.get(kind, 0.02) * rng.uniform(0.5, 1.5, len(blocks))).astype(np.float32)
    if kind == "Q8_K":
        blocks[:, :4] = scales[:, None].view(np.uint8)
    if kind == "MXFP4":  # 2**-7 to 2**-4
        blocks[:, 0] = rng.integers(120, 124, len(blocks))
    if kind == "NVFP4":  # 0.03 to 0.16
        blocks[:, :4] = rng.integers(20, 40, (len(blocks), 4))
    for at in HALVES.get(kind, ()):
        blocks[:, at : at + 2] = scales.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantise(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Dequantise to float32 [rows, columns] by gguf's reference; Q8_K, which it lacks, by its
    published struct.
    """
    if kind != "Q8_K":
        return gguf.quants.dequantize(blocks, Type[kind])
    # ggml/src/ggml-quants.c, dequantize_row_q8_K: struct { float d; int8_t qs[256]; int16_t
    # bsums[16]; }
    block = np.dtype([("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)])
    fields = np.ascontiguousarray(blocks).view(block)
    return (fields["d"][..., None] * fields["qs"].astype(np.float32)).reshape(len(blocks), -1)


def encode(values: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    """The stored form of a tensor, for GGUFWriter.add_tensor."""
    if kind == "F64":
        return values.astype(np.float64)
    if kind in PLAIN or kind in QUANTISABLE:
        return gguf.quants.quantize(values, Type[kind])
    return random_blocks(kind, *values.shape, rng)


def decode(stored: np.ndarray, kind: str) -> np.ndarray:
    return stored.astype(np.float32) if kind in ("F32", "F64") else dequantise(stored, kind)


def permute(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in llama.cpp's order: conversion/llama.py,
    LlamaModel.permute.
    """
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def unpermute(x: np.ndarray, heads: int) -> np.ndarray:
    """The inverse: transformers' modeling_gguf_pytorch_utils.py, LlamaTensorProcessor."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(2, 1).reshape(x.shape)


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The fields that convert_hf_to_gguf.py writes for Llama."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim)


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    special = {sp.is_byte: TokenType.BYTE, sp.is_unknown: TokenType.UNKNOWN}
    special |= {sp.is_control: TokenType.CONTROL}
    kinds = [
        next((kind for is_kind, kind in special.items() if is_kind(i)), TokenType.NORMAL)
        for i in range(sp.get_piece_size())
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([sp.id_to_piece(i) for i in range(sp.get_piece_size())])
    writer.add_token_scores([sp.get_score(i) for i in range(sp.get_piece_size())])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)


def add_byte_level(writer: gguf.GGUFWriter) -> None:
    raw = json.loads(byte_level_json())
    vocab = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    added = {token["id"] for token in raw["added_tokens"]}
    tokens = sorted(vocab, key=vocab.get)
    merges = [
        " ".join(merge) if isinstance(merge, list) else merge for merge in raw["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL if i in added else TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(379)
    writer.add_eos_token_id(383)
    writer.add_chat_template(CHAT_TEMPLATE)


def make_gguf(
    path: Path,
    *,
    kinds: str | Callable[[str], str] = "F32",
    seed: int = 0,
    tokenizer: str | None = "sentencepiece",
    split: int = 0,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **fields: Any,
) -> dict[str, np.ndarray]:
    """Write a random model; returns its weights dequantised from the file, in Hugging Face order.

    kinds: the type of every matrix, or a function of its Hugging Face name; other tensors are F32.
    tokenizer: "sentencepiece", "bytelevel" or None. split: tensors per part, 0 for one file. edit:
    may add to the metadata. tensors: Hugging Face weights in place of random ones. fields: replace
    those of `config_fields`.
    """
    config = config_fields(**fields)
    rng = np.random.default_rng(seed + 1)
    architecture = config["model_type"] if config["model_type"] in ("qwen2", "qwen3") else "llama"
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"]
    )
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    add_config(writer, config)
    if tokenizer:
        {"sentencepiece": add_sentencepiece, "bytelevel": add_byte_level}[tokenizer](writer)
    if edit:
        edit(writer)
    judge = {}
    for name, values in (tensors or random_tensors(config, seed)).items():
        kind = "F32" if values.ndim == 1 else kinds if isinstance(kinds, str) else kinds(name)
        permuted = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        heads = architecture == "llama" and permuted.get(name.split(".")[-2])
        order = (lambda x: permute(x, config[heads])) if heads else (lambda x: x)
        back = (lambda x: unpermute(x, config[heads])) if heads else (lambda x: x)
        stored = encode(np.ascontiguousarray(order(values)), kind, rng)
        judge[name] = back(decode(stored, kind)).reshape(values.shape)
        base, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", stored, raw_dtype=Type[kind])
    write_all(writer)
    return judge
