"""Measured importance, against sums of squares that hooks of transformers' modules see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from making import config_fields, make_checkpoint, stored_tensors
from transformers import AutoModelForCausalLM

import mlx_llama
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.quantize.importance import measure_importance, read_docs
from mlx_llama.quantize.writing import stack_experts

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(folder):
    return mlx_llama.load(folder, backend="cpu", compile=False)


def test_sums_are_those_that_transformers_modules_see(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    tokens = np.random.default_rng(0).integers(3, 380, 2 * 24 + 5).tolist()
    steps = []
    importance = measure_importance(
        load(folder), tokens, "a.txt", 24, lambda done, total: steps.append((done, total))
    )
    assert steps == [(1, 2), (2, 2)] and importance.datasets == ("a.txt",)
    assert (importance.chunks, importance.chunk_size) == (2, 24)
    model, seen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
    for i, layer in enumerate(model.model.layers):
        for ours, theirs in NAMES.items():

            def hook(module, inputs, name=f"blk.{i}.{ours}.weight"):
                squares = (inputs[0].double() ** 2).sum((0, 1))
                seen[name] = seen.get(name, 0) + squares

            layer.get_submodule(theirs).register_forward_pre_hook(hook)
    with torch.no_grad():
        for start in (0, 24):
            model(torch.tensor([[1, *tokens[start + 1 : start + 24]]]))  # BOS first
    assert importance.sums.keys() == seen.keys()
    for name, squares in seen.items():
        np.testing.assert_allclose(importance.sums[name][0], squares.numpy(), rtol=1e-4)
        assert importance.counts[name] == [48]


def test_experts_count_the_tokens_that_they_see(tmp_path):
    fields = dict(num_local_experts=4, num_experts_per_tok=2, architectures=["MixtralForCausalLM"])
    llm = load(make_checkpoint(tmp_path / "m", model_type="mixtral", **fields))
    tokens = np.random.default_rng(0).integers(3, 380, 32).tolist()
    before = llm.logits(tokens)
    importance = measure_importance(llm, tokens, "a.txt", 32)
    np.testing.assert_allclose(llm.logits(tokens), before, rtol=1e-5, atol=1e-6)
    router = importance.sums["blk.0.ffn_gate_inp.weight"]
    for name in ("ffn_gate_exps", "ffn_up_exps"):
        sums, counts = (
            part[f"blk.0.{name}.weight"] for part in (importance.sums, importance.counts)
        )
        assert sums.shape == (4, 64) and counts.sum() == 64
        # each token is an input of two experts
        np.testing.assert_allclose(sums.sum(0), 2 * router[0], rtol=1e-5)
    assert importance.sums["blk.1.ffn_down_exps.weight"].shape == (4, 96)


@pytest.mark.parametrize(
    "fields",
    [
        dict(
            architectures=["Llama4ForCausalLM"],
            model_type="llama4_text",
            head_dim=16,
            intermediate_size_mlp=128,
            interleave_moe_layer_step=2,
            num_local_experts=3,
        ),
        dict(
            architectures=["GraniteMoeHybridForCausalLM"],
            model_type="granitemoehybrid",
            layer_types=["attention"] * 2,
            position_embedding_type="rope",
            shared_intermediate_size=96,
        ),
        dict(
            architectures=["Lfm2ForCausalLM"],
            model_type="lfm2",
            layer_types=["conv", "full_attention"],
            tie_word_embeddings=True,
        ),
    ],
    ids=["llama4", "granite4", "lfm2"],
)
def test_matrices_have_the_names_that_the_gguf_file_has(fields, tmp_path):
    config = config_fields(**fields)
    tensors = stored_tensors(config) if config["model_type"] == "lfm2" else None
    llm = load(make_checkpoint(tmp_path / "m", tensors=tensors, **fields))
    tokens = np.random.default_rng(0).integers(3, 380, 8).tolist()
    importance = measure_importance(llm, tokens, "a.txt", 8)
    names = FAMILIES[llm.checkpoint.config.architecture].names
    matrices = {
        names.gguf(name): len(parts)
        for name, parts in stack_experts(llm.checkpoint).items()
        if len(parts[0].shape) == 2 and ".layers." in name
    }
    assert {name: len(sums) for name, sums in importance.sums.items()} == matrices


def test_a_text_below_a_window_is_refused(tmp_path):
    llm = load(make_checkpoint(tmp_path / "m"))
    with pytest.raises(OptionsError, match="has 5 tokens, expected at least 24"):
        measure_importance(llm, [1, 5, 6, 7, 8], "a.txt", 24)


def test_the_docs_of_the_package_are_its_docstrings():
    text = read_docs()
    assert len(text) > 100_000 and "mean squares of the inputs" in text and "import " in text
