"""The fields of LlamaConfig, read from config.json or GGUF metadata.

The schema of config.json is transformers', from Llama 1 to the `rope_parameters` of transformers 5.
Fields and defaults of GGUF are llama.cpp's (src/llama-model.cpp, `load_hparams`). families/ lists
them. Fields that ask for unsupported arithmetic raise ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_llama.core.dtypes import ITEMSIZE
from mlx_llama.core.errors import show

from .families import BY_GGUF, find_family, find_gguf, unsupported
from .families.family import Family
from .fields import Reader
from .layers import FULL
from .quantization import read_quantization
from .rope_fields import read_gguf_ropes, read_ropes

# hidden_act: the name here
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
XIELU = "xielu"  # in place of a gate's
# checked against each other
_SIZES = {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}

# {GGUF field of unsupported arithmetic: values without it}, unless a family's table has it
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # softmax
    "rope.dimension_sections": ([0, 0, 0, 0],),  # positions of images
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "use_parallel_residual": (False,),
}
_GGUF_NEUTRAL |= dict.fromkeys(
    "attention.clamp_kqv attention.max_alibi_bias attention.scale attn_logit_softcapping "
    "expert_count expert_shared_count expert_shared_feed_forward_length final_logit_softcapping "
    "leading_dense_block_count nextn_predict_layers rope.scaling.alpha "
    "rope.scaling.yarn_log_multiplier".split(),
    (0,),
)
_GGUF_NEUTRAL |= dict.fromkeys(
    "embedding_scale expert_group_count expert_weights_scale interleave_moe_layer_step logit_scale "
    "residual_scale".split(),
    (0, 1),
)


def read_config(read: Reader) -> dict[str, Any]:
    """All fields, from config.json. Raises ConfigError."""
    family, read, is_part = find_family(read)
    for name, (neutral, reason) in family.refused.items():
        read.refuse(name, [neutral], reason)
    values = _read_table(read, family)
    default, vocab = family.defaults, values["vocab_size"]
    has_bias = values.pop("attention_bias", False)
    qkv, out = (has_bias if bias is None else bias for bias in family.attention_biases)
    values.setdefault("mlp_bias", bool(family.mlp_bias))
    if "activation" not in values:
        values["activation"] = _read_activation(read, family)
    head_dims = values["head_dim"], values.get("global_head_dim", values["head_dim"])
    values |= read_ropes(read, family, values["max_position_embeddings"], head_dims)
    _check_norms(read, family, values)
    return values | {
        "attention_bias": qkv,
        "output_bias": out,
        "bos_token_id": read.token("bos_token_id", default.get("bos_token_id", 1), vocab),
        "eos_token_ids": read.tokens("eos_token_id", default.get("eos_token_id", 2), vocab),
        "dtype": _read_dtype(read),
        "quantization": read.attempt(lambda: read_quantization(read), otherwise=None),
        "norm_offset": family.norm_offset,
        "is_text_part": is_part,
        "notices": tuple(read.notices),
    }


def read_metadata(
    general: Reader,
    shapes: Mapping[str, tuple[int, ...]],
    divisors: Mapping[str, tuple[float, ...]],
) -> dict[str, Any]:
    """All fields but `dtype`, from GGUF metadata; parameters as in LlamaConfig.from_gguf. Raises
    ConfigError.
    """
    family, read = _open_gguf(general)
    read.shapes = shapes
    tokens = general.raw.get("tokenizer.ggml.tokens", ())
    if embedding := shapes.get("model.embed_tokens.weight"):
        read.raw["vocab_size"] = embedding[0]
    elif not isinstance(tokens, (str, int, float)) and tokens:
        read.raw.setdefault("vocab_size", len(tokens))
    values = _read_table(read, family)
    vocab, head_dim = values["vocab_size"], values["head_dim"]
    if isinstance(tokens, (str, int, float)) or len(tokens) > vocab:
        expected = f"at most {vocab} tokens, the rows of token_embd.weight"
        general.fail("tokenizer.ggml.tokens", tokens, expected)
    key_length = read.integer("attention.key_length", head_dim)
    if (length := read.integer("attention.value_length", key_length)) != key_length:
        read.fail("attention.value_length", length, f"{key_length}, the size of a head")
    values.setdefault("activation", ACTIVATIONS.get(family.activation[1], XIELU))
    positions, global_dim = (
        values["max_position_embeddings"],
        values.get("global_head_dim", head_dim),
    )
    values |= read_gguf_ropes(read, family, positions, (head_dim, global_dim), divisors)
    _check_norms(read, family, values)
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
    # Some writers store -1 (no token) as an unsigned number.
    bos, *ends = (
        None if general.raw.get(key) == 0xFFFFFFFF else general.token(key, None, vocab)
        for key in keys
    )
    return values | {
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": any(
            name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in shapes
        ),
        "output_bias": any(name.endswith("o_proj.bias") for name in shapes),
        "mlp_bias": any(".mlp." in name and name.endswith(".bias") for name in shapes),
        "bos_token_id": bos,
        "eos_token_ids": tuple(dict.fromkeys(token for token in ends if token is not None)),
        "notices": tuple(read.notices),
    }


def _read_table(read: Reader, family: Family) -> dict[str, Any]:
    """The family's name, the fields of its table, and those that follow from them."""
    fields = {field.name: field for field in family.table if read.name(field)}
    values = {name: read.field(field, family.defaults) for name, field in fields.items()}
    values = {name: value for name, value in values.items() if value is not None}
    named = {name: read.name(field) for name, field in fields.items()}  # as this file spells them
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    # null means one key-value head per query head
    kv_heads = values.setdefault("num_key_value_heads", heads)
    is_whole = "head_dim" in values or hidden % heads == 0
    head_dim = values.setdefault("head_dim", max(hidden // heads, 1))

    def fail(name: str, expected: str) -> None:
        read.fail(named[name], values[name], expected)

    if not read.failed & _SIZES:  # else these follow from a placeholder
        its_heads = f"{read.prefix}{named['num_attention_heads']} ({heads})"
        if heads % kv_heads:
            fail("num_key_value_heads", f"a divisor of {its_heads}")
        if not is_whole:
            explicit = f"an explicit {read.prefix}{named['head_dim']}"
            fail("hidden_size", f"a multiple of {its_heads}, or {explicit}")
        elif head_dim % 2:
            fail("head_dim", "an even number, since rotary embeddings rotate pairs")
    if values.get("num_experts_per_tok", 0) > values.get("num_experts", 0):
        experts = f"{read.prefix}{named['num_experts']} ({values['num_experts']})"
        fail("num_experts_per_tok", f"at most {experts}")
    values = {"architecture": family.name, **family.fixed, **values}
    if family.complete:
        values |= family.complete(read, values)
    alike = {"sliding_window": None, "layer_types": (FULL,) * values["num_hidden_layers"]}
    return values | read.attempt(
        lambda: family.types(read, values), otherwise=alike, needs="num_hidden_layers"
    )


def _check_norms(read: Reader, family: Family, values: Mapping[str, Any]) -> None:
    """Refuse ropes whose factor a norm after them would undo; here norms come before."""
    kind, norm = values["rope"].type, values.get("query_key_norm", family.query_key_norm)
    if norm in ("rotated", "without weights") and kind in ("yarn", "longrope"):
        read.fail("rope_type", kind, f"another type, since {family.name} norms after it")


def _read_activation(read: Reader, family: Family) -> str:
    field, default = family.activation
    if read.get(field, None) is None and default != "silu":
        field = "hidden_act"  # in Gemma's first files
    name = read.get(field, default)
    if default == XIELU:
        read.refuse(field, [XIELU], reason="an MLP without a gate has no other activation")
        return XIELU
    if not isinstance(name, str) or name not in ACTIVATIONS:
        read.fail(field, name, f"one of {', '.join(ACTIVATIONS)}")
        return "silu"
    return ACTIVATIONS[name]


def _read_dtype(read: Reader) -> str:
    name = "dtype" if read.get("dtype", None) is not None else "torch_dtype"
    value = read.get(name, None)
    # torch's default
    dtype = "float32" if value in (None, "auto") else str(value).removeprefix("torch.")
    dtype = "float32" if dtype == "float64" else dtype  # the weights are rounded to it
    if dtype not in ITEMSIZE:
        read.fail(name, value, f"one of {', '.join(ITEMSIZE)}")
    return dtype


def _open_gguf(general: Reader) -> tuple[Family, Reader]:
    """(family, reader of its fields) of a GGUF file. Raises ConfigError if unsupported."""
    kind, name = general.get("general.type", "model"), general.get("general.architecture")
    if kind != "model":
        general.fail("general.type", kind, "'model'")
    family = find_gguf(general.raw)
    if family is None:
        fault = f"{general.source}: general.architecture is {show(name)}"
        raise unsupported(fault, sorted(BY_GGUF), general.raw, name)
    prefix = f"{name}."
    fields = {
        key.removeprefix(prefix): value
        for key, value in general.raw.items()
        if key.startswith(prefix)
    }
    read = Reader(fields, general.source, prefix, is_gguf=True)
    known = {field.gguf for field in family.table}
    if family.scales_queries:
        known.add("rope.scaling.yarn_log_multiplier")
    if family.has_sections:
        known.add("rope.dimension_sections")
    scoring = family.experts.router.scoring if family.experts else ""
    for field, neutral in _GGUF_NEUTRAL.items():
        # without experts, llama.cpp ignores the size of a shared one (Granite 4)
        if field == "expert_gating_func" and scoring == "sigmoid":
            neutral = 0, 2
        is_unused = field == "expert_shared_feed_forward_length" and family.experts is None
        if field not in known and not is_unused:
            read.refuse(field, neutral, reason="nothing else is supported")
    return family, read
