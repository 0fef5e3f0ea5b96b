"""The table of architectures: one entry for each family that is Llama with differences.

Defaults of config.json's fields and the meaning of each difference are those of transformers 5 (models/NAME); names and
conventions of GGUF files are llama.cpp's (src/llama-arch.cpp, src/llama-model.cpp, convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import gguf_names
from .gguf_names import GGUFNames


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each layer's MLP.

    block: its module in a layer; gate, up, down: modules of an expert. fields: of config.json: the number of experts, in
    either spelling, then the width of one. normalises: the chosen experts' shares add up to 1; None for the config's
    `norm_topk_prob`.
    """

    block: str
    gate: str
    up: str
    down: str
    fields: tuple[str, str, str]
    normalises: bool | None = True


@dataclass(frozen=True)
class Architecture:
    """Differences of a family from LlamaForCausalLM.

    name: in config.json's `architectures`; aliases: other spellings of it. model_type: in config.json. gguf:
    `general.architecture` of its GGUF files, names: of their tensors. defaults: of config.json's fields that
    transformers fills in.
    qkv_bias: True if query, key and value have biases; None for the config's `attention_bias`. out_bias, mlp_bias: the
    same for the output projection (None: `attention_bias`) and the MLP (None: `mlp_bias`).
    query_key_norm, norms: `query_key_norm` and `norm_placement` of LlamaConfig.
    window: layers with a sliding window: "none", "all" (`sliding_window`), "switched" (the same with
    `use_sliding_window`), "from" (`use_sliding_window`, from layer
    `max_window_layers` on), "unrotated" (`use_sliding_window`, those without rotary embedding) or "every" (all but each
    `window_every`-th, the default of `sliding_window_pattern`) or "types" (those of `layer_types`, by default all).
    scales_queries: by their position, `llama_4_scaling_beta` (Ministral 3). local_theta: default of `rope_local_base_freq`, of layers
    with a window; None for one rope in all. activation: (its field, default). scales_embedding: by the root of its width.
    softcaps: {field: default}, with `query_pre_attn_scalar`; None for a family without. gguf_scale_layers: of the size whose
    attention llama.cpp scales by the width per head, not by the head's size (its loaders gemma2.cpp, gemma3.cpp). theta: default of
    `rope_theta`. unrotated_every: default of `no_rope_layer_interval`; 0 for a family that rotates in all layers.
    norm_offset: to add to the stored weights of norms. partial_rotation: `partial_rotary_factor`. fused: {module of a layer:
    modules whose rows it has}. multipliers: factors on embedding, residual, attention and logits (Granite). gguf_fields: of a GGUF file's fields,
    without the family's prefix, those that only this family takes. experts: in place of the MLP, None for a family without.
    exceeds_float16: its activations do, so that "auto" never computes in float16 (transformers' issue 36822).
    """

    name: str
    model_type: str
    gguf: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    qkv_bias: bool | None = False
    out_bias: bool | None = False
    mlp_bias: bool | None = False
    query_key_norm: str | None = None
    norms: str = "before"
    names: GGUFNames = gguf_names.PLAIN
    window: str = "none"
    theta: float = 10000.0
    unrotated_every: int = 0
    multipliers: bool = False
    norm_offset: float = 0.0
    partial_rotation: bool = False
    window_every: int = 0
    local_theta: float | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    scales_embedding: bool = False
    scales_queries: bool = False
    softcaps: Mapping[str, float | None] | None = None
    gguf_scale_layers: int = 0
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_fields: tuple[str, ...] = ()
    experts: Experts | None = None
    exceeds_float16: bool = False


_GEMMA = {"num_key_value_heads": 4, "head_dim": 256, "bos_token_id": 2, "eos_token_id": 1, "sliding_window": 4096,
          "tie_word_embeddings": True}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 32, "bos_token_id": None,
         "eos_token_id": None, "max_window_layers": 28}
_TABLE = (
    Architecture(
        "LlamaForCausalLM", "llama", "llama", aliases=("LLaMAForCausalLM",),  # in the first conversions of Llama 1
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
        qkv_bias=None, out_bias=None, mlp_bias=None, names=gguf_names.LLAMA,
    ),
    Architecture(
        "MistralForCausalLM", "mistral", "llama", window="all", names=gguf_names.LLAMA,
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    Architecture(
        "MinistralForCausalLM", "ministral", "llama", window="types", names=gguf_names.LLAMA,
        defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    ),
    Architecture(
        "Ministral3ForCausalLM", "ministral3", "mistral3", window="all", names=gguf_names.LLAMA, scales_queries=True, theta=1e6,
        gguf_fields=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
        defaults={"max_position_embeddings": 262144, "sliding_window": None, "num_key_value_heads": 8, "head_dim": 128,
                  "rms_norm_eps": 1e-5},
    ),
    Architecture(
        "MixtralForCausalLM", "mixtral", "llama", window="all", names=gguf_names.MIXTRAL, theta=1e6,
        gguf_fields=("expert_count",),
        experts=Experts("block_sparse_moe", "w1", "w3", "w2", ("num_local_experts", "num_experts", "intermediate_size")),
        defaults={"max_position_embeddings": 131072, "sliding_window": None, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                  "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    Architecture("Qwen2ForCausalLM", "qwen2", "qwen2", defaults=_QWEN, qkv_bias=True, window="from"),
    Architecture("Qwen3ForCausalLM", "qwen3", "qwen3", defaults={**_QWEN, "head_dim": 128}, qkv_bias=None, out_bias=None,
                 query_key_norm="head", names=gguf_names.HEAD_NORMS, window="from"),
    Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe", qkv_bias=None, out_bias=None, query_key_norm="head",
        names=gguf_names.QWEN3_EXPERTS, window="switched",
        gguf_fields=("expert_count",),
        experts=Experts("mlp", "gate_proj", "up_proj", "down_proj",
                        ("num_experts", "num_local_experts", "moe_intermediate_size"), normalises=None),
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "num_key_value_heads": 4, "bos_token_id": None,
                  "eos_token_id": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    ),
    Architecture(
        "SmolLM3ForCausalLM", "smollm3", "smollm3", qkv_bias=None, out_bias=None, mlp_bias=None, names=gguf_names.LLAMA,
        window="unrotated", theta=2e6, unrotated_every=4,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
                  "bos_token_id": 128000, "eos_token_id": 128001, "sliding_window": None},
    ),
    Architecture(
        "GraniteForCausalLM", "granite", "granite", qkv_bias=None, out_bias=None, mlp_bias=None, names=gguf_names.LLAMA,
        multipliers=True, gguf_fields=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None},
    ),
    Architecture(
        "Olmo2ForCausalLM", "olmo2", "olmo2", qkv_bias=None, out_bias=None, names=gguf_names.NORMS_AFTER,
        query_key_norm="whole", norms="after",
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": None, "bos_token_id": None, "eos_token_id": 50279,
                  "rms_norm_eps": 1e-5},
    ),
    Architecture(
        "Phi3ForCausalLM", "phi3", "phi3", window="all", names=gguf_names.FUSED, partial_rotation=True,
        fused={"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
               "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")},
        defaults={"max_position_embeddings": 4096, "num_key_value_heads": None, "eos_token_id": 32000, "rms_norm_eps": 1e-5,
                  "sliding_window": None},
    ),
    Architecture(
        "Gemma2ForCausalLM", "gemma2", "gemma2", qkv_bias=None, out_bias=None, names=gguf_names.NORMS_BOTH, norms="both",
        norm_offset=1.0, window="every", window_every=2, activation=("hidden_activation", "gelu_pytorch_tanh"),
        scales_embedding=True, softcaps={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        exceeds_float16=True, gguf_scale_layers=46, gguf_fields=("attn_logit_softcapping", "final_logit_softcapping"),
        defaults={"max_position_embeddings": 8192, **_GEMMA},
    ),
    Architecture(
        "Gemma3ForCausalLM", "gemma3_text", "gemma3", qkv_bias=None, out_bias=None, names=gguf_names.NORMS_BOTH, norms="both",
        query_key_norm="head", norm_offset=1.0, window="every", window_every=6, theta=1e6, local_theta=1e4,
        activation=("hidden_activation", "gelu_pytorch_tanh"), scales_embedding=True,
        softcaps={"attn_logit_softcapping": None, "final_logit_softcapping": None}, gguf_scale_layers=62,
        exceeds_float16=True,
        gguf_fields=("final_logit_softcapping",),
        defaults={"max_position_embeddings": 131072, **_GEMMA, "vocab_size": 262208, "num_attention_heads": 8},
    ),
)

# Models of images and text: {name: model_type}. Their text part is loaded, an architecture of the table.
WRAPPERS = {"Gemma3ForConditionalGeneration": "gemma3", "Mistral3ForConditionalGeneration": "mistral3"}
ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in _TABLE}
BY_SPELLING = ARCHITECTURES | {alias: one for one in _TABLE for alias in one.aliases}
BY_MODEL_TYPE = {one.model_type: one for one in _TABLE}
BY_GGUF = {one.gguf: one for one in reversed(_TABLE)}  # "llama" is Llama, not Mistral


def find_gguf(name: object, experts: object = 0) -> Architecture | None:
    """The architecture of a GGUF file's `general.architecture`; None for an unsupported one. experts: its `expert_count`,
    which tells Mixtral from Llama."""
    if not isinstance(name, str):
        return None
    with_experts = (one for one in _TABLE if one.gguf == name and one.experts)
    return experts and next(with_experts, None) or BY_GGUF.get(name)
