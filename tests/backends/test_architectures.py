"""Every architecture that is Llama with differences, from folders, GGUF files and MLX's low-bit
folders.

transformers makes a random model of the family and judges it at float32; llama.cpp and mlx-lm judge
the other two forms.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from cases.architectures import (
    GPT_OSS,
    GPT_OSS_YARN,
    SIZES,
    TOKENS,
    YARN,
    check_steps,
    llama_cpp_logits,
    run,
)
from making import edit_json, make_tokenizer, refusal
from making_gguf import write_all
from safetensors.numpy import load_file, save_file

from backends.conftest import in_chunks, mlx_lm_logits, relative_error, transformers_logits
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.families import FAMILIES as ENTRIES
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx

WIDE = dict(hidden_size=256, intermediate_size=192)
GRANITE = dict(
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.11,
    logits_scaling=8.0,
)
LLAMA4 = dict(
    head_dim=18,
    intermediate_size=48,
    intermediate_size_mlp=92,
    num_local_experts=5,
    num_experts_per_tok=2,
)
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0)  # with factors by the size of a head
MINISTRAL_YARN = YARN | dict(rope_theta=1e4, mscale=1.0, mscale_all_dim=1.0)
PLAIN_ROPE = dict(rope_type="default", rope_theta=1e4)
ALTERNATING = ["sliding_attention", "full_attention"] * 2
DELTA = dict(
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=10,
    linear_value_head_dim=10,
)
NEXT = dict(moe_intermediate_size=44, shared_expert_intermediate_size=60)
GEMMA4 = dict(
    head_dim=18,
    global_head_dim=40,
    sliding_window=7,
    final_logit_softcapping=3.0,
    vocab_size_per_layer_input=384,
)
HEADS_18 = dict(head_dim=18, query_pre_attn_scalar=18)
# name: model type, fields of transformers' config
FAMILIES: dict[str, dict] = {
    "Qwen2": dict(kind="qwen2"),
    "Qwen2 with windows, tied": dict(
        kind="qwen2",
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    "Qwen3": dict(kind="qwen3", head_dim=20),
    "Qwen3 with biases": dict(kind="qwen3", head_dim=18, attention_bias=True),
    "SmolLM3": dict(kind="smollm3"),
    "SmolLM3, other layers without rotation": dict(
        kind="smollm3", no_rope_layers=[0, 1, 1, 0], tie_word_embeddings=False
    ),
    "SmolLM3 with windows": dict(
        kind="smollm3", use_sliding_window=True, sliding_window=7, no_rope_layer_interval=2
    ),
    "Granite 3": dict(kind="granite", **GRANITE),
    "OLMo 2": dict(kind="olmo2", num_key_value_heads=4),
    "OLMo 2, grouped": dict(kind="olmo2"),
    "OLMo 3": dict(kind="olmo3", num_key_value_heads=4, sliding_window=7),
    "OLMo 3, long": dict(
        kind="olmo3",
        sliding_window=7,
        num_hidden_layers=5,
        rope_parameters={
            "full_attention": YARN
            | dict(rope_theta=1e4, factor=8.0, original_max_position_embeddings=32),
            "sliding_attention": PLAIN_ROPE,
        },
    ),
    "EXAONE 4": dict(kind="exaone4", sliding_window=None, layer_types=["full_attention"] * 4),
    "EXAONE 4, hybrid": dict(kind="exaone4", sliding_window=7),
    "Phi-3": dict(kind="phi3"),
    "Phi-3 with windows": dict(kind="phi3", sliding_window=7),
    "Phi-3 in a short context": dict(
        kind="phi3",
        rope_parameters=LONGROPE,
        original_max_position_embeddings=256,
        max_position_embeddings=1024,
    ),
    "Phi-4-mini in a long context": dict(
        kind="phi3",
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.67},
        original_max_position_embeddings=16,
        tie_word_embeddings=True,
    ),
    "Ministral with windows": dict(
        kind="ministral", head_dim=18, sliding_window=7, layer_types=ALTERNATING
    ),
    "Ministral 3": dict(
        kind="ministral3",
        head_dim=18,
        rope_parameters=MINISTRAL_YARN
        | dict(original_max_position_embeddings=8, llama_4_scaling_beta=0.3),
    ),
    "Gemma 2": dict(
        kind="gemma2",
        **HEADS_18,
        sliding_window=7,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "Gemma 2, windows as long as the text": dict(kind="gemma2", **HEADS_18),
    "Gemma 2 without softcaps": dict(
        kind="gemma2",
        head_dim=18,
        query_pre_attn_scalar=30,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
    ),
    "Gemma 3": dict(kind="gemma3_text", **HEADS_18, sliding_window=7, num_hidden_layers=6),
    "Gemma 3, stretched": dict(
        kind="gemma3_text",
        **HEADS_18,
        sliding_window=7,
        final_logit_softcapping=3.0,
        layer_types=ALTERNATING,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": PLAIN_ROPE,
        },
    ),
    # Layers that read others' keys, inputs of layers
    "Gemma 4 E4B": dict(
        kind="gemma4_text",
        **GEMMA4,
        num_hidden_layers=6,
        num_kv_shared_layers=2,
        layer_types=ALTERNATING + ALTERNATING[:2],
        hidden_size_per_layer_input=32,
    ),
    "Gemma 4 E2B": dict(
        kind="gemma4_text",
        **GEMMA4,
        num_kv_shared_layers=1,
        use_double_wide_mlp=True,
        layer_types=["full_attention", *ALTERNATING[:2], "full_attention"],
        hidden_size_per_layer_input=64,
    ),
    # Values that are keys
    "Gemma 4 31B": dict(
        kind="gemma4_text",
        **GEMMA4,
        num_hidden_layers=6,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    # Experts beside an MLP
    "Gemma 4 26B-A4B": dict(
        kind="gemma4_text",
        **GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=ALTERNATING,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=7,
        top_k_experts=3,
        moe_intermediate_size=44,
    ),
    "Gemma 4 12B": dict(
        kind="gemma4_unified_text",
        **GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        layer_types=ALTERNATING,
    ),
    "Seed-OSS": dict(kind="seed_oss", head_dim=18),
    "GLM-4": dict(kind="glm4", head_dim=20),
    "GLM-4, rotated as a whole": dict(
        kind="glm4", head_dim=18, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=1.0)
    ),
    "ERNIE 4.5": dict(kind="ernie4_5", head_dim=18),
    "Granite 4": dict(
        kind="granitemoehybrid",
        **GRANITE,
        mamba_n_heads=8,  # transformers checks it
        num_local_experts=0,
        position_embedding_type="rope",
        layer_types=["attention"] * 4,
    ),
    "Hunyuan": dict(
        kind="hunyuan_v1_dense",
        head_dim=20,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, alpha=50.0, factor=1.0),
    ),
    "Apertus": dict(
        kind="apertus",
        hidden_act="xielu",
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=8.0,
            original_max_position_embeddings=32,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
    ),
    "Apertus, rotated plainly": dict(
        kind="apertus", hidden_act="xielu", rope_parameters=PLAIN_ROPE
    ),
    "LFM2": dict(kind="lfm2", full_attn_idxs=[1, 3], block_multiple_of=16),
    "LFM2 with biases": dict(
        kind="lfm2",
        conv_bias=True,
        conv_L_cache=4,
        num_hidden_layers=5,
        layer_types=["full_attention", "conv", "conv", "full_attention", "conv"],
        block_ff_dim=100,
        block_ffn_dim_multiplier=1.3,
        block_multiple_of=24,
    ),
    "LFM2 with attention alone, not tied": dict(
        kind="lfm2", block_auto_adjust_ff_dim=False, tie_word_embeddings=False
    ),
    "LFM2-MoE": dict(
        kind="lfm2_moe",
        layer_types=["conv", "full_attention"] * 2,
        num_dense_layers=1,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=44,
    ),
    "LFM2-MoE with shares as they are": dict(
        kind="lfm2_moe",
        layer_types=["full_attention", *["conv"] * 3],
        num_dense_layers=2,
        num_experts=5,
        moe_intermediate_size=40,
        use_expert_bias=False,
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
    ),
    "Mixtral": dict(kind="mixtral", num_local_experts=5),
    "Mixtral with windows": dict(
        kind="mixtral", num_local_experts=3, num_experts_per_tok=3, sliding_window=7
    ),
    "Llama 4": dict(kind="llama4_text", **LLAMA4 | dict(num_experts_per_tok=1)),
    "Llama 4 with chunks": dict(
        kind="llama4_text",
        **LLAMA4,
        interleave_moe_layer_step=2,
        attention_chunk_size=7,
        floor_scale=4,
        attn_scale=0.3,
    ),
    "Llama 4 without norms, tied": dict(
        kind="llama4_text",
        **LLAMA4,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        tie_word_embeddings=True,
        no_rope_layers=[0, 1, 1, 1],
        attention_chunk_size=7,
    ),
    "Qwen3-MoE": dict(
        kind="qwen3_moe",
        head_dim=18,
        num_experts=11,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    ),
    "Qwen3-MoE with shares as they are": dict(
        kind="qwen3_moe",
        head_dim=18,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=44,
        norm_topk_prob=False,
    ),
    "Qwen2-MoE": dict(
        kind="qwen2_moe",
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=32,
    ),
    "Qwen2-MoE with windows": dict(
        kind="qwen2_moe",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=60,
        shared_expert_intermediate_size=60,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=3,
    ),
    "OLMoE": dict(kind="olmoe", num_experts=7, num_experts_per_tok=3),
    "OLMoE with shares that add up": dict(
        kind="olmoe", num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    ),
    "Granite-MoE": dict(kind="granitemoe", **GRANITE, num_local_experts=7, num_experts_per_tok=3),
    "Granite-MoE, tied": dict(
        kind="granitemoe",
        num_local_experts=5,
        attention_multiplier=0.2,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "GLM-4.5": dict(
        kind="glm4_moe",
        head_dim=20,
        n_routed_experts=11,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        attention_bias=True,
        routed_scaling_factor=2.5,
    ),
    "GLM-4.5, larger": dict(
        kind="glm4_moe",
        head_dim=20,
        n_routed_experts=12,
        n_shared_experts=2,
        num_experts_per_tok=3,
        moe_intermediate_size=36,
        first_k_dense_replace=2,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        use_qk_norm=True,
    ),
    "Qwen3.5": dict(kind="qwen3_5_text", **DELTA),
    "Qwen3.5, tied": dict(
        kind="qwen3_5_text",
        **DELTA | dict(linear_num_value_heads=2),
        layer_types=["full_attention", "linear_attention"] * 2,
        tie_word_embeddings=True,
    ),
    "Qwen3.5 with biases": dict(kind="qwen3_5_text", **DELTA, attention_bias=True),
    "Qwen3.5-MoE": dict(
        kind="qwen3_5_moe_text", **DELTA, **NEXT | dict(num_experts=5, num_experts_per_tok=2)
    ),
    "Qwen3-Next": dict(
        kind="qwen3_next", **DELTA, **NEXT | dict(num_experts=5, num_experts_per_tok=2)
    ),
    # Angles that llama.cpp computes like the others, though it rounds the range of pairs.
    "gpt-oss": dict(kind="gpt_oss", **GPT_OSS, rope_parameters=GPT_OSS_YARN | {"rope_theta": 5.0}),
    "gpt-oss with yarn as published": dict(
        kind="gpt_oss",
        **GPT_OSS,
        rope_parameters=GPT_OSS_YARN | {"rope_theta": 150000.0},
        layer_types=ALTERNATING[::-1],
        num_key_value_heads=1,
    ),
}


@functools.cache
def made(name: str, wide: bool = False) -> tuple[Path, np.ndarray]:
    """Save a random model of the family; returns (folder, transformers' logits for TOKENS)."""
    fields = SIZES | (WIDE if wide else {}) | FAMILIES[name]
    kind = fields.pop("kind")
    if kind == "exaone4":  # llama.cpp's matrix after attention is square; mlx_lm needs the field
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    if kind == "granitemoehybrid":
        fields["shared_intermediate_size"] = fields["intermediate_size"]
    if (rope := fields.get("rope_parameters", {})).get("rope_type") == "longrope":
        pairs = int(fields["hidden_size"] // 4 * rope.get("partial_rotary_factor", 1)) // 2
        factors = {
            "short_factor": np.linspace(1, 2, pairs).tolist(),
            "long_factor": np.linspace(2, 9, pairs).tolist(),
        }
        fields["rope_parameters"] = rope | factors
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            # Gemma 2, Gemma 3 and Qwen3.5 store weights less one
            is_less = kind.startswith(("gemma2", "gemma3")) or (
                DELTA.keys() <= fields.keys() and "linear_attn" not in key
            )
            offset = 0.0 if "norm" not in key or is_less else 1.0
            scales = "layer_scalar", "router.scale", "per_expert_scale"
            offset = 1.0 if key.endswith(scales) else offset
            # Decided choices of experts, for judges that round inputs.
            routers = "mlp.gate.weight", "router.weight", "router.proj.weight"
            spread = 1.0 if key.endswith(routers) else 0.1
            if key.endswith("e_score_correction_bias"):
                spread = 0.5
            value.copy_(spread * torch.randn(value.shape) + offset)
        logits = model(torch.from_numpy(TOKENS).long()).logits.numpy()
    folder = Path(tempfile.mkdtemp(prefix="model"))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    fields = json.loads((folder / "config.json").read_text())
    # mlx-lm reads the rope where older transformers wrote it.
    rope = fields["rope_parameters"]
    fields |= {"rope_theta": rope.get("full_attention", rope)["rope_theta"]}
    if kind == "lfm2":  # as in Liquid's files
        fields["block_dim"] = fields["hidden_size"]
    if kind == "granitemoehybrid":
        fields["layer_types"] = ["attention"] * len(fields["layer_types"])
    if kind == "apertus":
        fields |= {"rope_scaling": rope, "mlp_bias": False, "post_norm": False, "qk_norm": True}
    if kind == "hunyuan_v1_dense":
        fields["rope_scaling"] = {"type": "dynamic"} | {name: rope[name] for name in rope}
    if kind in ("glm4", "glm4_moe"):
        fields |= {"partial_rotary_factor": rope["partial_rotary_factor"], "rope_scaling": None}
    if rope.get("rope_type") == "longrope":
        fields["rope_scaling"] = {"type": "longrope"} | {
            name: rope[name] for name in ("short_factor", "long_factor")
        }
        fields["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    if kind == "exaone4":  # mlx-lm has no defaults here, and letters for the pattern
        fields |= {
            "rope_scaling": None,
            "sliding_window_pattern": "LLLG" if fields["sliding_window"] else None,
        }
    if kind == "gpt_oss":
        fields["rope_scaling"] = rope
    if kind.startswith("qwen3_5"):
        fields["model_type"] = kind.removesuffix("_text")
    if kind == "qwen3_next":
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if kind.startswith("gemma4"):  # as published; mlx-lm knows no `per_layer_config`
        (first, *_) = fields.pop("per_layer_config").values()
        fields["global_head_dim"] = first["head_dim"]
        fields["num_global_key_value_heads"] = first.get("num_key_value_heads")
    if kind == "qwen3_moe":
        fields["num_experts"] = fields.pop("num_local_experts")  # as Qwen's own files spell it
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, logits


@functools.cache
def exported(name: str, format: str) -> Path:
    """The model as a GGUF file that we write."""
    path = Path(tempfile.mkdtemp()) / "model.gguf"
    write_gguf(open_checkpoint(made(name, format != "F32")[0]), path, format)
    return path


@pytest.mark.slow_for(
    "c* with", "c*, ", "c*-False", "cpu-Granite 4", "cpu-Phi-4", "cpu-Seed", "cpu-SmolLM3"
)
@pytest.mark.parametrize("compile", [None, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, compile, backend):
    folder, wanted = made(name)
    for cuts in ((0, 30), (0, 20, 28, 29, 30)):
        logits = run(backend, open_checkpoint(folder), cuts, compile=compile)
        assert relative_error(logits, wanted) < 1e-4


@pytest.mark.slow_for(
    "c* with",
    "c*, ",
    "cuda-A",
    "cuda-ERNIE",
    "cuda-GLM",
    "cuda-Gemma",
    "cuda-Granite 4",
    "cuda-Hunyuan",
    "cuda-Mi",
    "cuda-Ph",
    "cuda-Seed",
    "cuda-g",
    "mlx-A",
    "mlx-E",
    "mlx-G",
    "mlx-H",
    "mlx-L",
    "mlx-O",
    "mlx-Qwen3",
    "mlx-Seed",
)
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_rows_choose_the_likeliest(name, backend):
    seen = {}
    config = check_steps(backend, *made(name), seen.__setitem__)
    # of attention those of heads, of a convolution its state
    counts = [10 if layer.attention else 6 for layer in config.layers]
    mixers = [layer.attention for layer in config.layers if layer.attention]
    shared = sum(mixer.keys_of is not None for mixer in mixers)
    assert len(seen) == 3 + sum(counts) - 3 * shared


IN_GGUF = [
    name
    for name in FAMILIES
    if not any(word in name for word in ("other layers", "with", "stretched", "hybrid"))
]
# mlx-lm has no Ministral with layer_types, no windows of Phi-3 and Gemma 2, of longrope the long
# factors alone, softcaps that no model leaves out, and no ropes of two kinds of layers in one
# field.
_NOT_IN_MLX = (
    "Qwen2 with windows, tied",
    "Qwen3 with biases",
    "Ministral with windows",
    "Gemma 2",
    "Gemma 2 without softcaps",
    "Gemma 3, stretched",
    "OLMo 3, long",
    "Mixtral with windows",
    "Qwen3-MoE with shares as they are",
    "Qwen3.5, tied",  # it takes each so-manyth layer for attention
    "Qwen3.5 with biases",
    "Qwen2-MoE with windows",
    "GLM-4.5, larger",  # it ranks experts of other groups as 0
    # mlx-lm has it in models with images alone: see below
    "Llama 4",
    "Llama 4 with chunks",
    "Llama 4 without norms, tied",
    "Gemma 4 12B",
    "gpt-oss with yarn as published",  # it rounds the range of pairs
    "LFM2 with attention alone, not tied",  # its head is always tied
)
IN_MLX = [name for name in FAMILIES if not name.startswith("Phi-3 ") and name not in _NOT_IN_MLX]


@pytest.mark.slow_for("cuda")
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_has_the_same_logits(name, backend):
    checkpoint = open_checkpoint(exported(name, "F32"))
    entry = ENTRIES[checkpoint.config.architecture]
    assert checkpoint.gguf_metadata["general.architecture"] == entry.gguf
    assert relative_error(run(backend, checkpoint, (0, 20, 29, 30)), made(name)[1]) < 1e-4


@pytest.mark.slow_for("A", "G", "H", "S")
@pytest.mark.parametrize(
    "name",
    [
        "Granite 3",
        "Seed-OSS",
        "GLM-4",
        "ERNIE 4.5",
        "Gemma 4 E2B",
        "Gemma 4 31B",
        "Hunyuan",
        "LFM2",
        "Apertus, rotated plainly",
    ],
)
def test_a_gguf_file_becomes_a_folder_that_transformers_reads(name, tmp_path):
    write_mlx(open_checkpoint(exported(name, "F32")), tmp_path / "out", None)
    logits = transformers_logits(tmp_path / "out", TOKENS, pad_token_id=0)
    assert relative_error(logits, made(name)[1]) < 1e-5


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next"])
def test_a_gguf_file_becomes_a_folder_that_mlx_lm_reads(name, tmp_path):
    pytest.importorskip("mlx.core")
    write_mlx(open_checkpoint(exported(name, "F32")), tmp_path / "out", None)
    assert relative_error(mlx_lm_logits(tmp_path / "out", TOKENS), made(name)[1]) < 1e-4
    again = run(select("cpu"), open_checkpoint(tmp_path / "out"), (0, 30))
    assert relative_error(again, made(name)[1]) < 1e-4


@pytest.mark.slow_for(
    "Apertus-Q8_0",
    "ERNIE 4.5-Q8_0",
    "GLM-4-Q8_0",
    "Granite 4-Q8_0",
    "Hunyuan-Q8_0",
    "Seed-OSS-Q8_0",
)
@pytest.mark.parametrize("format", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", IN_GGUF)
def test_llama_cpp_reads_the_file(name, format):
    # llama.cpp multiplies low-bit weights with 8-bit activations, and looks gelu up in a table of
    # float16, in Gemma 4 twice a layer.
    wide = 2e-3 if "Gemma" in name else 1e-5
    tolerance = {"Qwen3.5-MoE": 0.2}.get(name, 0.1) if format == "Q8_0" else wide
    path = exported(name, format)
    wanted = llama_cpp_logits(path)
    checkpoint = open_checkpoint(path)
    logits = run(select("cpu"), checkpoint, (0, 29, 30))[0]
    if format == "Q8_0" and checkpoint.config.num_experts:
        # Its rounding changes the choice between experts with nearly the same score, and then that
        # position's logits.
        errors = np.linalg.norm(logits - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
        assert np.median(errors) < tolerance
    else:
        assert np.linalg.norm(logits - wanted) < tolerance * np.linalg.norm(wanted)


WITH_EXPERTS = "Mixtral", "Qwen3-MoE", "Qwen2-MoE", "OLMoE", "Granite-MoE", "GLM-4.5"
WITH_EXPERTS += ("Gemma 4 26B-A4B",)


def check_same_tensors(path: Path, name: str) -> None:
    """The tensors of `path` are those of the family's folder, bit for bit."""
    tensors, wanted = open_checkpoint(path).tensors, open_checkpoint(made(name)[0]).tensors
    assert tensors.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_array_equal(tensors[key].float32(), tensor.float32(), key)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_stacks_of_experts_as_transformers_5_has_them(name, tmp_path):
    """Gates on ups in one tensor, under the names of its classes."""
    folder = made(name)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path, save_original_format=False)
    shutil.copy(folder / "tokenizer.model", tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert any(".experts.gate_up_proj" in key for key in tensors_of(tmp_path))
    check_same_tensors(tmp_path, name)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_layers_of_multi_token_prediction_are_left_out(tmp_path):
    folder, name = made("GLM-4.5")[0], "model.layers.4"
    tensors = tensors_of(folder)
    tensors |= {
        key.replace("model.layers.3", name): value.clone()
        for key, value in tensors.items()
        if "layers.3." in key
    }
    tensors |= {f"{name}.enorm.weight": torch.ones(72), f"{name}.eh_proj.weight": torch.ones(72, 9)}
    shutil.copytree(folder, tmp_path / "next")
    safetensors.torch.save_file(tensors, tmp_path / "next" / "model.safetensors")
    check_same_tensors(tmp_path / "next", "GLM-4.5")
    notices = open_checkpoint(tmp_path / "next").config.notices
    assert notices[0].endswith("config.json: 1 layer of multi-token prediction left out")
    edit_json(tmp_path / "next" / "config.json", num_nextn_predict_layers=0)
    message = refusal(open_checkpoint, tmp_path / "next")
    assert f"tensor '{name}." in message and "is not part of the model" in message


def copy_gguf(path: Path, out: Path, fields: dict, change) -> None:
    """Copy a GGUF file with other fields, and with the tensors that change(name, values) gives."""
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            value = fields.pop(key.removeprefix(f"{architecture}."), field.contents())
            writer.add_key_value(key, value, field.types[0], *field.types[1:2])
    assert not fields
    for tensor in reader.tensors:
        for name, values in change(tensor.name, tensor.data):
            kind = tensor.tensor_type if values.dtype == np.uint8 else None
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)
    write_all(writer)


def test_a_gguf_file_with_a_layer_of_multi_token_prediction(tmp_path):
    """llama.cpp's converter counts it, and names its own tensors "nextn"."""

    def change(name, values):
        yield name, values
        if name.startswith("blk.3."):
            yield name.replace("blk.3.", "blk.4."), values
        if name == "blk.3.attn_norm.weight":
            yield "blk.4.nextn.enorm.weight", values

    out, fields = tmp_path / "next.gguf", {"block_count": 5, "nextn_predict_layers": 1}
    copy_gguf(exported("GLM-4.5", "F32"), out, fields, change)
    check_same_tensors(out, "GLM-4.5")
    assert open_checkpoint(out).config.num_hidden_layers == 4
    assert "1 layer of multi-token prediction" in open_checkpoint(out).config.notices[0]


def test_gates_and_ups_of_gemma_4_together_in_gguf_files(tmp_path):
    """As llama.cpp's converter stores them, in full and in low-bit blocks."""
    name, tables = "Gemma 4 26B-A4B", {}

    def change(name, values):
        if "ffn_gate_exps" in name or "ffn_up_exps" in name:
            tables[name] = values
            gate, up = (
                tables.get(name.replace("gate", x).replace("up", x)) for x in ("gate", "up")
            )
            if gate is not None and up is not None:
                name = name.replace("ffn_up", "ffn_gate_up").replace("ffn_gate_e", "ffn_gate_up_e")
                yield name, np.concatenate([gate, up], axis=1)
        else:
            yield name, values

    copy_gguf(exported(name, "F32"), tmp_path / "f32.gguf", {}, change)
    assert len(tables) == 8
    check_same_tensors(tmp_path / "f32.gguf", name)
    tables.clear()
    path = exported(name, "Q8_0")
    copy_gguf(path, tmp_path / "q8.gguf", {}, change)
    ours, wanted = (open_checkpoint(x).tensors for x in (tmp_path / "q8.gguf", path))
    for key in (
        "model.layers.1.experts.3.gate_proj.weight",
        "model.layers.1.experts.3.up_proj.weight",
    ):
        assert ours[key].description == wanted[key].description == "Q8_0"
        np.testing.assert_array_equal(ours[key].float32(), wanted[key].float32())


def test_the_shared_experts_gate_is_a_vector_in_gguf_files(tmp_path):
    out, seen = tmp_path / "vector.gguf", []

    def change(name, values):
        if name.endswith("ffn_gate_inp_shexp.weight"):
            seen.append(values.shape)
            values = values.reshape(-1)
        yield name, values

    copy_gguf(exported("Qwen2-MoE", "F32"), out, {}, change)
    assert seen == [(1, 72)] * 4
    check_same_tensors(out, "Qwen2-MoE")


def quantized(folder: Path) -> tuple[Path, np.ndarray]:
    """(the model in 4 bits by mlx-lm, mlx-lm's logits for TOKENS)."""
    from mlx_lm import convert

    out = Path(tempfile.mkdtemp()) / "quantized"
    convert(str(folder), str(out), quantize=True, q_bits=4, q_group_size=32, dtype="float32")
    return out, mlx_lm_logits(out, TOKENS)


@functools.cache
def quantized_family(name: str) -> tuple[Path, np.ndarray]:
    folder = made(name, wide=True)[0]
    if name.startswith(("gpt-oss", "Qwen3.5-MoE")):  # of the plain matrices it reads stacks alone
        write_mlx(open_checkpoint(folder), (folder := Path(tempfile.mkdtemp()) / "stacks"), None)
    return quantized(folder)


@pytest.mark.slow_for("c*-A", "c*-E", "c*-G", "c*-H", "c*-M", "c*-O", "c*-P", "c*-S", "c*-g")
@pytest.mark.parametrize("name", IN_MLX)
def test_a_low_bit_folder_has_the_logits_of_mlx_lm(name, backend):
    pytest.importorskip("mlx.core")
    out, wanted = quantized_family(name)
    checkpoint = open_checkpoint(out)
    assert checkpoint.formats.startswith("affine 4-bit, groups of 32")
    # On cpu each width of a head and activation compiles for seconds; see the first test.
    compile = False if backend.name == "cpu" and name not in ("SmolLM3", "Qwen3-MoE") else None
    assert relative_error(run(backend, checkpoint, (0, 29, 30), compile=compile), wanted) < 1e-4


@pytest.mark.slow_for("Qwen2", "OLMoE", "Granite")
@pytest.mark.parametrize("name", ["Qwen2-MoE", "OLMoE", "Granite-MoE", "GLM-4.5"])
def test_mlx_lm_reads_the_low_bit_folder(name, tmp_path):
    """Of routers with a bias, its matrix cannot be quantised."""
    pytest.importorskip("mlx.core")
    source = open_checkpoint(made(name, wide=True)[0])
    written = write_mlx(source, tmp_path / "out", 4, 32)
    kept = (notice for notice in written.notices if "kept at" in notice)
    heads = "4 matrices (such as model.layers.0.self_attn.o_proj"  # rows of 80
    assert all(notice.startswith(heads) for notice in kept)
    checkpoint, wanted = open_checkpoint(tmp_path / "out"), mlx_lm_logits(tmp_path / "out", TOKENS)
    router = checkpoint.tensors[f"{checkpoint.config.layers[3].experts.router.module}.weight"]
    assert router.description == ("float32" if name == "GLM-4.5" else router.description)
    logits = run(select("cpu"), checkpoint, (0, 29, 30), compile=False)
    assert relative_error(logits, wanted) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["LFM2", "LFM2-MoE"])
def test_mlx_lm_reads_the_folder_that_we_write(name, bits, tmp_path):
    """Of transformers' folder, whose leading MLPs and convolutions mlx-lm has by other names and
    shapes, and of a GGUF file.
    """
    write_mlx(open_checkpoint(made(name, wide=True)[0]), tmp_path / "out", bits, 32)
    logits = run(select("cpu"), open_checkpoint(tmp_path / "out"), (0, 29, 30), compile=False)
    assert relative_error(logits, mlx_lm_logits(tmp_path / "out", TOKENS)) < 1e-5
    write_mlx(open_checkpoint(exported(name, "F32")), tmp_path / "again", None)
    assert relative_error(mlx_lm_logits(tmp_path / "again", TOKENS), made(name)[1]) < 1e-5


def with_images(name: str):
    """transformers' model of images and text, tiny: Gemma 3 from 4B on, Llama 4, Mistral Small 3.1,
    Ministral 3.
    """
    vision = dict(hidden_size=16, intermediate_size=16, image_size=28, patch_size=14)
    vision |= dict(num_hidden_layers=1, num_attention_heads=2)
    if name == "gemma3":
        text = dict(SIZES, **HEADS_18, sliding_window=7)
        return transformers.Gemma3ForConditionalGeneration(
            transformers.Gemma3Config(
                text_config=text,
                vision_config=vision,
                mm_tokens_per_image=4,
                image_token_index=5,
                boi_token_index=6,
                eoi_token_index=7,
            )
        )
    if name == "gemma4":
        # its vision has an axial rope of at least four numbers a head
        text = SIZES | FAMILIES["Gemma 4 E4B"]
        text["model_type"] = text.pop("kind")
        vision |= dict(head_dim=8, num_key_value_heads=2, num_hidden_layers=1)
        return transformers.Gemma4ForConditionalGeneration(
            transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
        )
    if name == "lfm2":
        text = SIZES | dict(model_type=name, tie_word_embeddings=True, norm_eps=1e-6)
        text |= dict(block_auto_adjust_ff_dim=False, hidden_size=96, num_attention_heads=6)
        text |= dict(layer_types=["conv", "full_attention"] * (SIZES["num_hidden_layers"] // 2))
        images = dict(vision, model_type="siglip2_vision_model")
        return transformers.Lfm2VlForConditionalGeneration(
            transformers.Lfm2VlConfig(text_config=text, vision_config=images, image_token_id=5)
        )
    if name == "llama4":
        text = SIZES | WIDE | LLAMA4 | dict(head_dim=32, num_experts_per_tok=1, rms_norm_eps=1e-6)
        text |= dict(interleave_moe_layer_step=2, attention_chunk_size=7, floor_scale=4)
        text |= dict(intermediate_size=64, intermediate_size_mlp=96)
        vision |= dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)
        return transformers.Llama4ForConditionalGeneration(
            transformers.Llama4Config(text_config=text, vision_config=vision)
        )
    is_tied = name == "ministral3"  # as Ministral 3 3B is; Mistral Small 3.1 is not
    text = dict(SIZES, head_dim=18, model_type=name, tie_word_embeddings=is_tied)
    if name == "ministral3":
        text["rope_parameters"] = MINISTRAL_YARN | dict(
            original_max_position_embeddings=16, llama_4_scaling_beta=0.1
        )
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(
            text_config=text,
            vision_config=dict(vision, model_type="pixtral", head_dim=8),
            image_token_index=5,
            spatial_merge_size=1,
            tie_word_embeddings=is_tied,
        )
    )


@pytest.mark.parametrize(
    "name, architecture",
    [
        ("gemma3", "Gemma3ForCausalLM"),
        ("gemma4", "Gemma4ForCausalLM"),
        ("lfm2", "Lfm2ForCausalLM"),
        ("llama4", "Llama4ForCausalLM"),
        ("mistral", "MistralForCausalLM"),
        ("ministral3", "Ministral3ForCausalLM"),
    ],
)
def test_the_text_part_of_a_model_with_images(name, architecture, tmp_path):
    """Other prefixes of names, and tensors of the other parts; as a folder and as what `quantize`
    writes of it.
    """
    torch.manual_seed(0)
    model = with_images(name).eval()
    with torch.no_grad():
        images = {"token_type_ids": torch.zeros(2, 30).long()} if name == "gemma3" else {}
        images = {"mm_token_type_ids": torch.zeros(2, 30).long()} if name == "gemma4" else images
        # transformers 5.24's class with images fails without them
        judge = model.language_model if name == "llama4" else model
        wanted = judge(input_ids=torch.from_numpy(TOKENS).clamp(min=8).long(), **images).logits
    model.save_pretrained(tmp_path / "in")
    if name == "gemma4":  # a layer that reads another's keys has some of its own in published files
        (file,) = (tmp_path / "in").glob("*.safetensors")
        more = {f"model.language_model.layers.5.self_attn.{x}_proj.weight" for x in "kv"}
        save_file(load_file(file) | dict.fromkeys(more, np.ones((80, 72), np.float32)), file)
    write_mlx(open_checkpoint(tmp_path / "in"), tmp_path / "out", None)
    for folder in (tmp_path / "in", tmp_path / "out"):
        checkpoint = open_checkpoint(folder)
        assert checkpoint.config.is_text_part and checkpoint.config.architecture == architecture
        notices = " ".join(checkpoint.config.notices)
        assert ("parts for images and sound are left out" in notices) == (folder.name == "in")
        loaded = select("cpu").load(checkpoint, "float32")
        logits = in_chunks(loaded, np.asarray, np.maximum(TOKENS, 8), (0, 30))
        assert relative_error(logits, wanted.numpy()) < 1e-4


def test_llama_4_in_low_bits_has_the_logits_of_mlx_lm(tmp_path):
    """mlx-lm has its text part in models of images and text alone, and converts the experts'
    transposed matrices.
    """
    pytest.importorskip("mlx.core")
    torch.manual_seed(0)
    model = with_images("llama4")
    with torch.no_grad():
        for key, value in model.state_dict().items():
            spread = 1.0 if key.endswith("router.weight") else 0.1
            value.copy_(spread * torch.randn(value.shape) + ("norm" in key))
    model.save_pretrained(tmp_path / "in")
    make_tokenizer(tmp_path / "in")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    # mlx-lm reads the rope where older transformers wrote it.
    config["text_config"] |= {"rope_theta": 5e5, "rope_scaling": None}
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    out, wanted = quantized(tmp_path / "in")
    checkpoint = open_checkpoint(out)
    assert checkpoint.formats == "affine 4-bit, groups of 32"
    for name, compile in (("cpu", False), ("cpu", None), ("mlx", False), ("cuda", False)):
        backend = select(name, device=None if name == "cpu" else "cpu")
        logits = run(backend, checkpoint, (0, 20, 29, 30), compile=compile)
        assert relative_error(logits, wanted) < 1e-4, (name, compile)
