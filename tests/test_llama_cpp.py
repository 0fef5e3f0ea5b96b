"""Every backend against llama.cpp: the same GGUF file gives the same logits and the same greedy
tokens.

llama.cpp's own quantiser writes the files. llama.cpp rounds activations to 8 bits for low-bit
weights (to the weights' type for float16 and bfloat16), so its tolerances are wide. A second
comparison, with float64 products of the weights that gguf dequantises, is tight.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
from making_gguf import llama_cpp_model

from mlx_llama.core.answers.dry import Breakers, Dry
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import GUIDE_PATH, open_checkpoint
from mlx_llama.core.options import resolve
from mlx_llama.quantize.gguf_export import write_gguf

llama_cpp = pytest.importorskip(
    "llama_cpp", reason='llama.cpp is the judge here: pip install -e ".[peers]"'
)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples/benchmarks"))

import compare_peers  # noqa: E402
import make_random_gguf  # noqa: E402

# Relative RMS distance from llama.cpp's logits: about 1.5 times the distance of llama.cpp from the
# float64 product.
TOLERANCES = {
    **{"F32": 1e-5, "F16": 2e-3, "BF16": 1e-2},
    **dict.fromkeys(("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"), 0.03),
    **dict.fromkeys(("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS"), 0.04),
}
FIELDS = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
FIELDS |= {"bos_token_id": 1, "eos_token_id": 2, **make_random_gguf.SHAPES["tiny"]}
VARIANTS = {
    "one key-value head": dict(num_key_value_heads=1),
    "as many key-value heads": dict(num_key_value_heads=4),
    "tied head": dict(tie_word_embeddings=True),
    "head size of its own": dict(head_dim=32, num_attention_heads=6, num_key_value_heads=3),
    "odd sizes": dict(hidden_size=120, intermediate_size=172, head_dim=24, vocab_size=317)
    | dict(num_attention_heads=5, num_key_value_heads=5),
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


def judge_logits(path: Path) -> np.ndarray:
    """llama.cpp's logits float32 [T, V] after each of TOKENS."""
    model = llama_cpp_model(path)
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


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    assert actual.shape == expected.shape
    square = (expected.astype(np.float64) ** 2).mean()
    return float(np.sqrt(((actual - expected) ** 2).mean() / square))


@pytest.mark.parametrize("kind", TOLERANCES)
def test_logits(backend, files, kind):
    path = files(kind)
    ours = logits(backend, path, "float32")
    assert distance(ours, judge_logits(path)) < TOLERANCES[kind]
    assert distance(ours, compare_peers.reference_logits(path, TOKENS)) < 1e-5


@pytest.mark.parametrize("kind", TOLERANCES)
def test_logits_at_the_default_width(files, kind):
    wanted = compare_peers.reference_logits(files(kind), TOKENS)
    assert distance(logits(select("cpu"), files(kind), "auto"), wanted) < 5e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(backend, tmp_path, variant):
    path = tmp_path / "model.gguf"
    factors = np.linspace(1, 8, 32, dtype=np.float32) if variant == "frequency factors" else None
    make_random_gguf.write(path, FIELDS | VARIANTS[variant], "F32", 1, factors)
    assert distance(logits(backend, path, "float32"), judge_logits(path)) < 1e-5


# Samplers


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """The guide's vocabulary in llama.cpp and its tokenizer here."""
    path = tmp_path_factory.mktemp("vocabulary") / "guide.gguf"
    checkpoint = open_checkpoint(GUIDE_PATH)
    write_gguf(checkpoint, path, "F16")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return model, checkpoint.tokenizer


def apply(sampler, scores: np.ndarray, tokens=()) -> np.ndarray:
    """Scores float32 [V] after one of llama.cpp's samplers, which has seen `tokens`; -inf where it
    dropped one.
    """
    for token in tokens:
        llama_cpp.llama_sampler_accept(sampler, token)
    data = (llama_cpp.llama_token_data * len(scores))()
    for token, score in enumerate(scores):
        data[token].id, data[token].logit = token, score
    array = llama_cpp.llama_token_data_array(data, len(scores), -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    kept = np.full(len(scores), -np.inf, np.float32)
    for place in range(array.size):
        kept[array.data[place].id] = array.data[place].logit
    llama_cpp.llama_sampler_free(sampler)
    return kept


@pytest.mark.parametrize("breakers", [["\n", ":", '"', "*"], [" the", "User:", ". "], []], ids=str)
@pytest.mark.parametrize("chosen", [{}, {"dry_base": 1.1, "dry_allowed_length": 4}], ids=str)
@pytest.mark.parametrize("window", [7, 64, 1000])
def test_penalties_of_dry(breakers, chosen, window, vocabulary):
    model, tokenizer = vocabulary
    fields = {"dry_penalty_last_n": window, "dry_sequence_breakers": breakers}
    o = resolve({"dry_multiplier": 0.8, **fields, **chosen}).options
    heads = Breakers(tokenizer).find(breakers)
    texts = [
        "The llama sang. The llama sang. The llama",
        "User: hello\nBot: hello\nUser: hello\nBot: hello",
        'She said "the end" and he said "the end" and she said "the',
        "a b a b a b a b a b a b a b a b a b",
    ]
    random = np.random.default_rng(window)
    count = 0
    for text in texts:
        tokens = tokenizer.encode(text, add_bos=True)
        for end in range(1, len(tokens) + 1):
            scores = random.standard_normal(model.n_vocab()).astype(np.float32)
            names = [word.encode() for word in breakers]
            sampler = llama_cpp.llama_sampler_init_dry(
                llama_cpp.llama_model_get_vocab(model.model),
                *(o.dry_multiplier, o.dry_base, o.dry_allowed_length, window),
                (ctypes.c_char_p * len(names))(*names),
                len(names),
            )
            wanted = apply(sampler, scores, tokens[:end])
            for token, penalty in Dry(o, heads, tokens[:end]).penalties().items():
                scores[token] -= penalty
                count += 1
            assert scores == pytest.approx(wanted, rel=1e-6, abs=1e-6), (text, end)
    assert count > 10


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.1, 0.3, 0.5, 0.6])
@pytest.mark.parametrize("name", ["cpu", "mlx", "cuda"])
def test_what_xtc_drops(name, threshold):
    """With probability 1: what llama.cpp keeps is what can be drawn, at any temperature."""
    backend = select(name, "cpu" if name == "cuda" else None)
    for seed in range(6):
        scores = 2 * np.random.default_rng(seed).standard_normal(12).astype(np.float32)
        kept = apply(llama_cpp.llama_sampler_init_xtc(1.0, threshold, 0, 1), scores) > -np.inf
        rows = [
            dict(temperature=0.5 + 3 * (i % 2), seed=i, xtc_probability=1, xtc_threshold=threshold)
            for i in range(100)
        ]
        batch = backend.sampling_batch([resolve(row).options for row in rows])
        drawn = batch(as_arrays(backend, np.stack([scores] * len(rows))), [seed] * len(rows))
        drawn_tokens = set(backend.runtime.read([drawn]))
        assert drawn_tokens <= set(np.flatnonzero(kept).tolist()), (seed, threshold)
        assert int(np.where(kept, scores, -np.inf).argmax()) in drawn_tokens


def as_arrays(backend, array: np.ndarray):
    if backend.name == "mlx":
        import mlx.core as mx

        return mx.array(array)
    if backend.name == "cuda":
        import torch

        return torch.from_numpy(array)
    return array
