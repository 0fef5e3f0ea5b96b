"""Low-bit weights on every backend, against gguf's dequantiser, transformers and mlx-lm."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases.mixed import MIXED, SHAPE
from making import make_checkpoint
from making_gguf import LOW_BIT, make_gguf

from backends import conftest
from backends.conftest import in_chunks, probes, relative_error
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.quantization import FLOAT_MODES

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


# On cpu the kernels' own tests compile every format, which takes seconds each. Here these mixes are
# compiled, and the others are computed by NumPy.
COMPILED = ("Q4_K_M", "widths", "tied", "biases", "modes")


@pytest.fixture
def load_case(backend):
    """load_case(path, case) -> (model at float32, function from its arrays to NumPy)."""

    def loader(path, case):
        compile = False if backend.name == "cpu" and case not in COMPILED else None
        model = backend.load(open_checkpoint(path), "float32", compile=compile)
        return model, backend.runtime.to_numpy

    return loader


@functools.cache
def gguf_model(
    kind: str, layers: int = 1, tied: bool = False
) -> tuple[Path, dict[str, np.ndarray]]:
    """(file, its weights dequantised by gguf, in Hugging Face order)."""
    path = Path(tempfile.mkdtemp()) / f"{kind}.gguf"
    factors: dict[str, float] = {}
    if kind == "NVFP4 with factors":  # as llama.cpp's converter writes NVIDIA's files
        factors = {"attn_q": 0.7, "ffn_down": 1.3, "attn_v": 1.1}

    def edit(writer) -> None:
        for layer, (name, factor) in itertools.product(range(layers), factors.items()):
            for part, value in ((".scale", factor), (".input_scale", 9.0)):
                writer.add_tensor(f"blk.{layer}.{name}{part}", np.array([value], np.float32))

    judge = make_gguf(
        path,
        kinds=MIXED.get(kind, kind),
        num_hidden_layers=layers,
        tie_word_embeddings=tied,
        edit=edit,
        **SHAPE,
    )
    for name in judge:
        for part, factor in factors.items():
            if name.endswith(f"{part[-1]}_proj.weight" if "attn" in part else "down_proj.weight"):
                judge[name] = judge[name] * np.float32(factor)
    return path, judge


@pytest.mark.slow_for("*-7]", "cpu-widths")
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("kind", [*LOW_BIT, *MIXED])
def test_every_product_is_that_of_the_dequantised_matrix(kind, length, load_case):
    path, judge = gguf_model(kind)
    model, to_numpy = load_case(path, kind)
    tokens = np.random.default_rng(length).integers(0, 384, (2, length)).astype(np.int32)
    seen = probes(model, to_numpy, tokens)

    rows = judge["model.embed_tokens.weight"][tokens]
    if kind == "Q8_K":  # a float32 scale times an 8-bit code needs 32 bits
        np.testing.assert_allclose(seen["embedding"], rows, rtol=0, atol=1e-6 * np.abs(rows).max())
    else:
        np.testing.assert_array_equal(seen["embedding"], rows)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x.astype(np.float64) @ judge[name].T.astype(np.float64)

    layer = "model.layers.0."
    for name, heads in (("query", HEADS), ("key", KV_HEADS), ("value", KV_HEADS)):
        wanted = product(seen["0.attention_norm"], f"{layer}self_attn.{name[0]}_proj.weight")
        wanted = wanted.reshape(2, length, heads, HEAD_DIM).transpose(0, 2, 1, 3)
        assert relative_error(seen[f"0.{name}"], wanted) < 5e-6
    if length == 1:  # with one position each query head returns the value of its group
        mixed = np.repeat(seen["0.value"], HEADS // KV_HEADS, axis=1)
        wanted = product(mixed.reshape(2, 1, -1), f"{layer}self_attn.o_proj.weight")
        assert relative_error(seen["0.attention"], wanted) < 5e-6
    gate, up = (
        product(seen["0.ffn_norm"], f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")
    )
    wanted = product(gate / (1 + np.exp(-gate)) * up, f"{layer}mlp.down_proj.weight")
    assert relative_error(seen["0.ffn"], wanted) < 5e-6
    assert relative_error(seen["logits"], product(seen["norm"], "lm_head.weight")) < 5e-6


TOKENS = np.random.default_rng(1).integers(3, 384, (2, 24)).astype(np.int32)


@functools.cache
def transformers_logits(kind: str, tied: bool, dtype: str = "float32") -> np.ndarray:
    _, judge = gguf_model(kind, 2, tied)
    folder = Path(tempfile.mkdtemp()) / "judge"
    make_checkpoint(folder, tensors=judge, tie_word_embeddings=tied, **SHAPE)
    return conftest.transformers_logits(folder, TOKENS, dtype)


def prompt_and_steps(model, to_numpy) -> np.ndarray:
    """Logits of TOKENS, the last four decoded one by one."""
    return in_chunks(model, to_numpy, TOKENS, (0, *range(20, TOKENS.shape[1] + 1)))


@pytest.mark.slow_for("cuda")
@pytest.mark.parametrize(
    "kind, tied",
    [*((kind, False) for kind in ("Q4_0", "Q8_0", *MIXED)), ("Q8_0", True), ("Q4_K_M", True)],
)
def test_a_gguf_models_logits_are_those_of_transformers(kind, tied, load_case):
    got = prompt_and_steps(*load_case(gguf_model(kind, 2, tied)[0], kind))
    # random codes with large biases make softmax sharp: rounding grows from layer to layer
    assert relative_error(got, transformers_logits(kind, tied)) < 1e-3


@pytest.mark.slow_for("cpu-Q4_0")
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K_M"])
def test_at_its_own_dtype_a_gguf_model_rounds_but_its_results(kind, backend):
    path, judge = gguf_model(kind, 2)
    model = backend.load(open_checkpoint(path), "auto")
    seen = probes(model, backend.runtime.to_numpy, TOKENS)
    exact, dtype = transformers_logits(kind, False), model.dtype_name
    # A sharp softmax magnifies rounding: transformers itself is off by 0.4 in Q4_K_M and bfloat16.
    rounding = relative_error(transformers_logits(kind, False, dtype), exact)
    assert relative_error(seen["logits"], exact) < max(0.1, 1.5 * rounding)
    wanted = seen["norm"].astype(np.float64) @ judge["lm_head.weight"].T.astype(np.float64)
    bounds = {"float32": 1e-3, "float16": 1e-3, "bfloat16": 2**-8}  # 3e-3 with sums in float16
    assert relative_error(seen["logits"], wanted) < bounds[dtype]


# Checkpoints of mlx_lm.convert


def per_layer(path: str, module, *_) -> bool | dict:
    """Different settings inside fused matrices, and matrices that are not quantised."""
    name = path.split(".")[-1]
    if name in ("k_proj", "lm_head") or path == "model.layers.1.mlp.up_proj":
        return False
    bits = {"q_proj": 8, "v_proj": 6, "embed_tokens": 5, "gate_proj": 3}.get(name, 2)
    return {"group_size": 32 if name == "v_proj" else 64, "bits": bits, "mode": "affine"}


def per_layer_modes(path: str, module, *_) -> bool | dict:
    """Different modes inside fused matrices."""
    modes = {"q_proj": "mxfp4", "v_proj": "nvfp4", "gate_proj": "mxfp8", "lm_head": "mxfp4"}
    mode = modes.get(path.split(".")[-1], "affine")
    bits, group = FLOAT_MODES.get(mode, (4, 64))
    return {"group_size": group, "bits": bits, "mode": mode}


EXPERTS = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    tie_word_embeddings=False,
)
CONVERSIONS = {
    "4 bits": dict(q_bits=4, q_group_size=64),
    "5 bits": dict(q_bits=5, q_group_size=128),
    "8 bits": dict(q_bits=8, q_group_size=128),
    "mixed_3_6": dict(quant_predicate="mixed_3_6", q_group_size=64),
    "per layer": dict(quant_predicate=per_layer),
    "tied": dict(q_bits=4, q_group_size=32, fields=dict(tie_word_embeddings=True)),
    "biases": dict(q_bits=4, q_group_size=64, fields=dict(attention_bias=True, mlp_bias=True)),
    "mxfp4": dict(q_mode="mxfp4"),
    "nvfp4": dict(q_mode="nvfp4", dtype="bfloat16"),
    "mxfp8": dict(q_mode="mxfp8"),
    "mxfp4 experts": dict(q_mode="mxfp4", fields=EXPERTS),
    "modes": dict(quant_predicate=per_layer_modes),
    "bfloat16": dict(q_bits=4, q_group_size=64, dtype="bfloat16"),
    "float16": dict(q_bits=8, q_group_size=64, dtype="float16"),
}


@functools.cache
def converted(case: str) -> Path:
    from mlx_lm.convert import convert

    settings = dict(CONVERSIONS[case])
    fields = dict(hidden_size=128, intermediate_size=256) | settings.pop("fields", {})
    dtype = settings.pop("dtype", "float32")
    home = Path(tempfile.mkdtemp())
    source = make_checkpoint(home / "source", dtype=dtype, tokenizer="llama2", **fields)
    convert(str(source), str(home / "quantised"), quantize=True, **settings)
    return home / "quantised"


@functools.cache
def mlx_lm_logits(case: str) -> np.ndarray:
    return conftest.mlx_lm_logits(converted(case), TOKENS)


@pytest.mark.parametrize("case", CONVERSIONS)
def test_a_converted_models_logits_are_those_of_mlx_lm(case, load_case):
    pytest.importorskip("mlx.core")
    got = prompt_and_steps(*load_case(converted(case), case))
    assert relative_error(got, mlx_lm_logits(case)) < 1e-4


@pytest.mark.slow_for("cpu-bfloat16")
@pytest.mark.parametrize(("case", "rounding"), [("bfloat16", 2**-8), ("float16", 2**-11)])
def test_at_its_own_dtype_a_converted_model_rounds_but_its_results(case, rounding, backend):
    mx = pytest.importorskip("mlx.core")
    model = backend.load(open_checkpoint(converted(case)), "auto")
    seen = probes(model, backend.runtime.to_numpy, TOKENS)
    assert relative_error(seen["logits"], mlx_lm_logits(case)) < 40 * rounding
    head = conftest.mlx_lm_model(converted(case)).lm_head
    weights = mx.dequantize(head.weight, head.scales, head.biases, head.group_size, head.bits)
    wanted = seen["norm"].astype(np.float64) @ np.array(weights).T.astype(np.float64)
    assert relative_error(seen["logits"], wanted) < 2 * rounding
