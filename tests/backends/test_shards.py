"""Shares of a checkpoint: complete, disjoint, even; and refusals of what cannot be split."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from cases.gemma4 import make_gemma4
from making import make_checkpoint, refusal
from making_gguf import make_gguf

from mlx_llama.core.backends.shards import Share, take_share, working_sizes
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint

WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
}
# The axis along which each module's matrix is split
SPLIT = dict.fromkeys(
    "q_proj k_proj v_proj gate_proj up_proj embed_tokens embed_tokens_per_layer lm_head".split(), 0
) | dict(o_proj=1, down_proj=1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True, "vocab_size": 401},
        {"attention_bias": True, "mlp_bias": True},
        {"architectures": ["Qwen3ForCausalLM"]},
    ],
    ids=["plain", "tied", "biases", "qwen3"],
)
def test_shares_are_the_whole(fields, size, tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "toy", **WIDE | fields))
    for share in check_shares(checkpoint, size):
        assert share.checkpoint.nbytes <= 1.1 / size * checkpoint.nbytes


def test_heads_of_several_kinds_are_split_each(tmp_path):
    heads = dict(num_attention_heads=8, num_key_value_heads=4, num_global_key_value_heads=2)
    checkpoint = make_gemma4(**heads)
    assert working_sizes(checkpoint) == [1, 2]
    for share in check_shares(checkpoint, 2):
        shapes = [(kind.heads, kind.head_dim) for kind in share.checkpoint.config.kinds]
        assert shapes == [(2, 20), (1, 40)]
    message = refusal(take_share, checkpoint, 0, 4, kind=BackendError)
    assert "it has 4 or 2 key-value heads" in message and "start 2 processes" in message


def check_shares(checkpoint: Checkpoint, size: int) -> list[Share]:
    """The shares of all ranks, which are the whole together."""
    shares = [take_share(checkpoint, rank, size) for rank in range(size)]
    for name, whole in checkpoint.tensors.items():
        module, part = name.split(".")[-2:]
        module = part if part == "layer_scalar" else module
        parts = [
            share.checkpoint.tensors[name].float32()
            for share in shares
            if name in share.checkpoint.tensors
        ]
        if module not in SPLIT:
            assert len(parts) == size
            assert all(np.array_equal(copy, whole.float32()) for copy in parts)
        elif part == "bias" and SPLIT[module]:
            assert len(parts) == 1 and name in shares[0].checkpoint.tensors  # added once
        else:
            assert np.array_equal(np.concatenate(parts, axis=SPLIT[module]), whole.float32()), name
    for share in shares:
        assert share.checkpoint.nbytes == sum(
            tensor.nbytes for tensor in share.checkpoint.tensors.values()
        )
        assert share.vocabulary == shares[0].vocabulary
        assert share.vocabulary[-1][1] == checkpoint.config.vocab_size
        c = share.checkpoint.config
        assert {
            name: t.shape
            for name, t in share.checkpoint.tensors.items()
            if "layers" in name and "bias" not in name
        } == {
            name: shape
            for name, shape in c.tensor_shapes().items()
            if "layers" in name and "bias" not in name
        }
    return shares


def test_blocks_stay_whole(tmp_path):
    """96 columns of Q4_0 are three blocks: one process has one, the other two."""
    make_gguf(tmp_path / "toy.gguf", kinds="Q4_0")
    shares = [
        take_share(open_checkpoint(tmp_path / "toy.gguf"), rank, 2).checkpoint for rank in (0, 1)
    ]
    assert [share.config.intermediate_size for share in shares] == [32, 64]


def test_the_numbers_that_work_are_named(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "toy", **WIDE))
    assert working_sizes(checkpoint) == [1, 2, 4]
    message = refusal(take_share, checkpoint, 0, 3, kind=BackendError)
    assert "3 processes" in message and "4 key-value heads" in message
    assert "2 or 4 processes" in message
    # the guide's two heads
    assert "2 processes" in refusal(take_share, open_checkpoint(), 0, 4, kind=BackendError)
    alone = open_checkpoint(make_checkpoint(tmp_path / "alone", num_key_value_heads=1))
    assert "start one process" in refusal(take_share, alone, 0, 2, kind=BackendError)


def test_heads_must_be_whole_blocks(tmp_path):
    """Two heads of 16 are no block of 256."""
    make_gguf(
        tmp_path / "toy.gguf",
        kinds=lambda name: "Q4_K" if "o_proj" in name else "F32",
        hidden_size=256,
        num_attention_heads=16,
        num_key_value_heads=2,
    )
    message = refusal(take_share, open_checkpoint(tmp_path / "toy.gguf"), 0, 2, kind=BackendError)
    assert "blocks of 256 weights" in message and "start one process" in message


def test_unknown_matrices_are_refused(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "toy"))
    other = dict(checkpoint.tensors) | {
        "model.layers.0.mlp.router.weight": checkpoint.tensors["model.norm.weight"]
    }
    changed = dataclasses.replace(checkpoint, tensors=other)
    assert "router" in refusal(take_share, changed, 0, 2, kind=BackendError)
