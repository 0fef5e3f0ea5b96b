"""Each difference of LayerSpec and LlamaConfig, against transformers' model of a family that has
it.

These families have no config reader, so the resolved configs are written here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from making import config_checkpoint, config_fields

from backends.conftest import relative_error
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.generation import options
from mlx_llama.core.models.config import LlamaConfig

SIZES = dict(
    vocab_size=384,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)
# (transformers' model and its config's fields, fields of LlamaConfig besides a Llama's)
FAMILIES = {
    "multipliers": (
        "Granite",
        dict(
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.11,
            logits_scaling=8.0,
        ),
        dict(
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.11,
            logits_multiplier=1 / 8,
        ),
    ),
    "layers without rotation": (
        "SmolLM3",
        dict(no_rope_layers=[1, 0, 1, 0], tie_word_embeddings=False, pad_token_id=0),
        dict(unrotated_layers=(1, 3)),
    ),
    "norms after": (
        "Exaone4",
        dict(sliding_window=None, layer_types=["full_attention"] * 4),
        dict(norm_placement="after", query_key_norm="head"),
    ),
    "norms before and after, gelu": (
        "Gemma3",
        dict(
            head_dim=24,
            query_pre_attn_scalar=30,
            sliding_window=4096,
            layer_types=["full_attention"] * 4,
            tie_word_embeddings=True,
            rope_parameters=dict.fromkeys(
                ("full_attention", "sliding_attention"),
                dict(rope_type="default", rope_theta=10000.0),
            ),
        ),
        dict(
            norm_placement="both",
            query_key_norm="head",
            activation="gelu_tanh",
            head_dim=24,
            attention_multiplier=30**-0.5,
            embedding_multiplier=8.0,
            tie_word_embeddings=True,
        ),
    ),
}
TOKENS = np.random.default_rng(1).integers(3, 384, (2, 30)).astype(np.int32)


@functools.cache
def made(name: str) -> tuple[Checkpoint, np.ndarray]:
    """Make a random model of the family; returns (checkpoint, transformers' logits for TOKENS)."""
    import torch
    import transformers

    family, theirs, ours = FAMILIES[name]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(
        **SIZES,
        **({} if "rope_parameters" in theirs else {"rope_theta": 10000.0}),
        attn_implementation="eager",
        **theirs,
    )
    resolved = dataclasses.replace(LlamaConfig.from_dict(config_fields(**SIZES)), **ours)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    tensors = {}
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key == "lm_head.weight" and resolved.tie_word_embeddings:
                continue
            value.copy_(0.1 * torch.randn(value.shape) + ("norm" in key))
            offset = float(family == "Gemma3" and "norm" in key)  # Gemma stores weights less one
            value -= offset
            tensors[key] = (value + offset).numpy()
        logits = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    return config_checkpoint(resolved, Path(tempfile.mkdtemp()), tensors), logits


@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, compile, backend):
    checkpoint, wanted = made(name)
    model = backend.load(checkpoint, "float32", compile=compile)
    for cuts in ((0, 30), (0, 20, 28, 29, 30)):
        cache = model.make_cache(30, len(TOKENS))
        got = [
            backend.runtime.to_numpy(model.forward(TOKENS[:, a:b], a, cache, all_positions=True))
            for a, b in itertools.pairwise(cuts)
        ]
        assert relative_error(np.concatenate(got, axis=1), wanted) < 1e-4
    cache = model.make_cache(30, len(TOKENS))
    last = backend.runtime.to_numpy(model.forward(TOKENS, 0, cache))
    assert relative_error(last, wanted[:, -1]) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_probes_change_nothing_and_steps_choose_the_likeliest(name, backend):
    checkpoint, wanted = made(name)
    # Traced on MLX, too, where its CPU device asks for it.
    model = backend.load(checkpoint, "float32", compile=True if backend.name == "mlx" else None)
    seen = {}
    probed = model.forward(
        TOKENS, 0, model.make_cache(30, len(TOKENS)), all_positions=True, probe=seen.__setitem__
    )
    assert len(seen) == 3 + 10 * 4
    assert relative_error(backend.runtime.to_numpy(seen["logits"]), wanted) < 1e-4
    assert relative_error(backend.runtime.to_numpy(probed), wanted) < 1e-4
    cache = model.make_cache(40)
    sampler = backend.sampling_batch([options.resolve({"temperature": 0}).options])
    token = TOKENS[:1]
    for _ in range(5):
        token = model.step(token, cache.length, cache, sampler)
    tokens = [int(token_id) for token_id in cache.state()["tokens"]]
    logits = backend.runtime.to_numpy(
        model.forward([tokens], 0, model.make_cache(40), all_positions=True)
    )[0]
    assert tokens[30] == wanted[0, -1].argmax()
    for at in range(29, 33):
        assert logits[at].max() - logits[at, tokens[at + 1]] < 1e-3 * np.abs(logits[at]).max()
