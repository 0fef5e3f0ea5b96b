"""Small models of many architectures, and their judges."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from backends.conftest import in_chunks
from making_gguf import llama_cpp_model

from mlx_llama.core import options
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig

SIZES = dict(
    vocab_size=384,
    hidden_size=72,
    intermediate_size=92,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


YARN = dict(rope_type="yarn", factor=4.0, beta_fast=32.0, beta_slow=1.0)


GPT_OSS_YARN = YARN | dict(original_max_position_embeddings=200, truncate=False)


GPT_OSS = dict(head_dim=18, num_local_experts=5, num_experts_per_tok=3, sliding_window=7)


TOKENS = np.random.default_rng(1).integers(3, 384, (2, 30)).astype(np.int32)


def run(backend, checkpoint, cuts, **settings) -> np.ndarray:
    """Logits of TOKENS, in chunks, of two rows together."""
    model = backend.load(checkpoint, "float32", **settings)
    return in_chunks(model, backend.runtime.to_numpy, TOKENS, cuts)


def check_steps(backend, folder: Path, wanted: np.ndarray, probe=None) -> LlamaConfig:
    """Check the greedy steps of two rows after TOKENS, whose logits are `wanted`; returns the
    model's config. probe: of the prompt.
    """
    checkpoint = open_checkpoint(folder)
    # Traced on MLX, too, where its CPU device asks for it.
    model = backend.load(checkpoint, "float32", compile=True if backend.name == "mlx" else None)
    cache = model.make_cache(40, 2)
    model.forward(TOKENS[:, :-1], 0, cache, probe=probe)
    token = TOKENS[:, -1:]
    sampler = backend.sampling_batch([options.resolve({"temperature": 0}).options] * 2)
    for _ in range(5):
        token = model.step(token, list(cache.lengths), cache, sampler)
    tokens = np.stack([cache.state(row)["tokens"] for row in (0, 1)])
    assert tokens[:, 30].tolist() == wanted[:, -1].argmax(-1).tolist()
    logits = in_chunks(model, backend.runtime.to_numpy, tokens, (0, tokens.shape[1]))[:, 29:33]
    chosen = np.take_along_axis(logits, tokens[:, 30:34, None], -1)[..., 0]
    assert (logits.max(-1) - chosen < 1e-3 * np.abs(logits).max(-1)).all()
    return model.config


def llama_cpp_logits(path: Path) -> np.ndarray:
    """llama.cpp's logits for the first row of TOKENS."""
    judge = llama_cpp_model(path)
    judge.eval(TOKENS[0].tolist())
    return judge.scores[:30]


FIELDS = (
    SIZES | GPT_OSS | dict(hidden_size=64, intermediate_size=96, rope_parameters=dict(GPT_OSS_YARN))
)
