"""Every backend against llama.cpp: the same GGUF file gives the same logits and the same greedy
tokens.

llama.cpp's own quantiser writes the files. llama.cpp rounds activations to 8 bits for low-bit
weights (to the weights' type for float16 and bfloat16), so its tolerances are wide. A second
comparison, with float64 products of the weights that gguf dequantises, is tight.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from mlx_llama.core.files.checkpoint import open_checkpoint

llama_cpp = pytest.importorskip(
    "llama_cpp", reason='llama.cpp is the judge here: pip install -e ".[peers]"'
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/benchmarks"))

import compare_peers  # noqa: E402
import make_random_gguf  # noqa: E402

# Relative RMS distance from llama.cpp's logits: about 1.5 times the distance of llama.cpp from the
# float64 product.
TOLERANCES = {
    "F32": 1e-5,
    "F16": 2e-3,
    "BF16": 1e-2,
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"), 0.03),
    **dict.fromkeys(("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"), 0.04),
}
FIELDS = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **make_random_gguf.SHAPES["tiny"],
}
VARIANTS = {
    "one key-value head": dict(num_key_value_heads=1),
    "as many key-value heads": dict(num_key_value_heads=4),
    "tied head": dict(tie_word_embeddings=True),
    "head size of its own": dict(head_dim=32, num_attention_heads=6, num_key_value_heads=3),
    "odd sizes": dict(
        hidden_size=120,
        intermediate_size=172,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=24,
        vocab_size=317,
    ),
    "other rope base": dict(rope_theta=500000.0),
    "biases": dict(attention_bias=True),
    "frequency factors": dict(),
}
TOKENS = compare_peers.prompt_tokens(24, 300)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """files(kind): a tiny random model in a GGUF file of that type."""
    folder = tmp_path_factory.mktemp("gguf")

    def make(kind: str) -> Path:
        path = folder / f"tiny-{kind}.gguf"
        if not path.exists() and kind in make_random_gguf.PLAIN:
            make_random_gguf.write(path, FIELDS, kind, seed=0)
        elif not path.exists():
            make_random_gguf.quantise(make("F16"), path, kind, threads=1)
        return path

    return make


def judge(path: Path) -> llama_cpp.Llama:
    """The model in llama.cpp, its cache and attention in float32."""
    return llama_cpp.Llama(
        str(path),
        n_ctx=256,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        verbose=False,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        flash_attn=False,
    )


def judge_logits(path: Path) -> np.ndarray:
    """llama.cpp's logits float32 [T, V] after each of TOKENS."""
    model = judge(path)
    model.eval(TOKENS)
    return model.scores[: len(TOKENS)].copy()


def logits(backend, path: Path, dtype: str) -> np.ndarray:
    """Our logits float32 [T, V] after each of TOKENS: a prompt, then the rest one by one."""
    model = backend.load(open_checkpoint(path), dtype)
    cache, first = model.make_cache(len(TOKENS)), len(TOKENS) - 4
    parts = [model.forward([TOKENS[:first]], 0, cache, all_positions=True)]
    parts += [
        model.forward([[token]], first + i, cache, all_positions=True)
        for i, token in enumerate(TOKENS[first:])
    ]
    return np.concatenate([backend.runtime.to_numpy(part)[0] for part in parts])


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(
        np.sqrt(((found - expected) ** 2).mean() / (expected.astype(np.float64) ** 2).mean())
    )


@pytest.mark.parametrize("kind", TOLERANCES)
def test_logits(backend, files, kind):
    path = files(kind)
    found = logits(backend, path, "float32")
    assert distance(found, judge_logits(path)) < TOLERANCES[kind]
    assert distance(found, compare_peers.reference_logits(path, TOKENS)) < 1e-5


@pytest.mark.parametrize("kind", TOLERANCES)
def test_logits_at_the_default_width(files, kind):
    from mlx_llama.core.backends.selection import select

    assert (
        distance(
            logits(select("cpu"), files(kind), "auto"),
            compare_peers.reference_logits(files(kind), TOKENS),
        )
        < 5e-4
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(backend, tmp_path, variant):
    path = tmp_path / "model.gguf"
    factors = np.linspace(1, 8, 32, dtype=np.float32) if variant == "frequency factors" else None
    make_random_gguf.write(path, FIELDS | VARIANTS[variant], "F32", 1, factors)
    assert distance(logits(backend, path, "float32"), judge_logits(path)) < 1e-5
