"""Architectures besides Llama from GGUF files and low-bit, against transformers with the same
weights.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from making import make_checkpoint
from making_gguf import make_gguf

from backends.conftest import relative_error, transformers_logits

QWEN2, QWEN3 = dict(architectures=["Qwen2ForCausalLM"]), dict(architectures=["Qwen3ForCausalLM"])
WIDE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
FAMILIES = {
    "qwen2 Q8_0": (dict(**QWEN2, **WIDE, rms_norm_eps=1e-6), "Q8_0"),
    "qwen2 F16 tied": (dict(**QWEN2, tie_word_embeddings=True), "F16"),
    "qwen3 Q4_K": (dict(**QWEN3, **WIDE, head_dim=128), "Q4_K"),
    "qwen3 F32 tied": (dict(**QWEN3, head_dim=24, tie_word_embeddings=True), "F32"),
}
TOKENS = np.random.default_rng(1).integers(0, 384, (2, 30)).astype(np.int32)


@functools.cache
def made(name: str) -> tuple[Path, np.ndarray]:
    """Write a file; returns (path, transformers' logits for its weights dequantised by gguf)."""
    fields, kinds = FAMILIES[name]
    home = Path(tempfile.mkdtemp())
    weights = make_gguf(home / "m.gguf", kinds=kinds, **fields)
    folder = make_checkpoint(home / "m", tensors=weights, **fields)
    return home / "m.gguf", transformers_logits(folder, TOKENS)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gguf_file_of_the_family(name, load):
    path, wanted = made(name)
    model, to_numpy = load(path)
    cache = model.make_cache(30, len(TOKENS))
    got = [
        to_numpy(model.forward(TOKENS[:, a:b], a, cache, all_positions=True))
        for a, b in ((0, 20), (20, 29), (29, 30))
    ]
    assert relative_error(np.concatenate(got, axis=1), wanted) < 1e-4


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(**QWEN2, mlp_bias=True), "mlp_bias is True, expected false, since Qwen2ForCausalLM"),
        (
            dict(**QWEN2, use_sliding_window=True, sliding_window=7, max_window_layers=-1),
            "max_window_layers is -1",
        ),
        (
            dict(**QWEN3, layer_types=["sliding_attention", "full_attention"]),
            r"layer_types\[0\] is 'sliding_attention'",
        ),
    ],
)
def test_features_that_a_family_lacks_are_refused(fields, message):
    from making import config_fields

    from mlx_llama.core.errors import ConfigError
    from mlx_llama.core.models.config import LlamaConfig

    with pytest.raises(ConfigError, match=message):
        LlamaConfig.from_dict(config_fields(**fields))
