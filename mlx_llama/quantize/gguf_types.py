"""Types of the tensors of each `format` gguf:..., as llama.cpp's (src/llama-quant.cpp)."""

from __future__ import annotations

from mlx_llama.core.models.config import LlamaConfig

# {format: type of most matrices}. MXFP4 is llama-quantize's MXFP4_MOE.
_NAMES = "Q3_K_S Q3_K_M Q4_0 IQ4_XS Q4_K_M Q5_K_M Q6_K Q8_0 MXFP4 F16 BF16 F32".split()
FORMATS = {name: name.removesuffix("_S").removesuffix("_M") for name in _NAMES}
PLAIN = ("F16", "BF16", "F32")
# {type with blocks of 256 weights: type with blocks of 32} (tensor_type_fallback)
_FALLBACKS = {"Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def choose_type(
    name: str,
    shape: tuple[int, ...],
    format: str,
    config: LlamaConfig,
    architecture: str,
    is_weighed: bool = False,
) -> str:
    """The GGUF type of a tensor, "F32" for vectors and convolutions. name, architecture: as in the
    file. is_weighed: by an importance matrix. As llama-quantize, except that the projection to the
    vocabulary of Q4_0 is Q8_0, not Q6_K.
    """
    # vectors, convolutions, the router of experts, the shared one's gate
    is_filter = name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight"))
    if len(shape) != 2 or is_filter or ".ffn_gate_inp" in name:
        return "F32"
    kind = FORMATS[format]
    if kind in PLAIN:
        return kind
    if name == "per_layer_model_proj.weight":  # llama.cpp leaves it as it is
        return "BF16"
    wanted = _wanted_type(name, format, config, architecture, is_weighed)
    for candidate in (wanted, _FALLBACKS.get(wanted, wanted)):
        if shape[1] % (256 if candidate in _FALLBACKS else 32) == 0:
            return candidate
    return "F16"


def is_fallback(kind: str, format: str) -> bool:
    """True for a type with blocks of 32 weights that replaces a type with blocks of 256."""
    return FORMATS[format] in _FALLBACKS and kind in _FALLBACKS.values()


def _wanted_type(
    name: str, format: str, config: LlamaConfig, architecture: str, is_weighed: bool
) -> str:
    """The type for rows of any length (llama_tensor_get_type_impl)."""
    kind, layers = FORMATS[format], config.num_hidden_layers
    tables = ("token_embd.weight", "per_layer_token_embd.weight")
    if name in (tables if config.tie_word_embeddings else ("output.weight",)):
        return "Q6_K" if kind in _FALLBACKS else "Q8_0"
    if format == "MXFP4":
        return kind if "_exps." in name else "Q8_0"
    if config.num_experts == 8 and name.endswith(("attn_k.weight", "attn_v.weight")):  # few weights
        return "Q8_0"
    if not name.startswith("blk.") or format in ("Q6_K", "Q8_0"):
        return kind
    _, number, module, *_ = name.split(".")
    layer, queries_per_key = int(number), config.num_attention_heads // config.num_key_value_heads
    is_70b = layers == 80 and queries_per_key > 1 and architecture in ("llama", "qwen2")
    if module in ("attn_v", "attn_qkv") and (attention := config.layers[layer].attention):
        layer, layers = attention.slot, config.key_value_layers
    is_sensitive = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    if module == "attn_output":
        if config.num_experts == 8:
            return kind if format in ("Q4_0", "Q5_K_M") else "Q5_K"
        return "Q4_K" if format == "Q3_K_M" else kind
    if module in ("attn_v", "attn_qkv"):
        if format == "IQ4_XS":
            return "Q5_K" if queries_per_key >= 4 else kind
        if format in ("Q4_K_M", "Q5_K_M") and is_sensitive:
            return "Q6_K"
        if format == "Q3_K_M":
            kind = "Q5_K" if layer < 2 else "Q4_K"
        # Heads of a 70B model share values: few weights, used often
        return "Q5_K" if is_70b and kind in ("Q3_K", "Q4_K") else kind
    if module in ("ffn_down", "ffn_down_exps"):
        if format == "IQ4_XS":
            return "Q5_K" if layer < layers // 8 and not is_weighed else kind
        if format == "Q4_0":
            return "Q4_1" if layer < layers // 8 and is_weighed else kind
        if format == "Q3_K_M":
            return "Q5_K" if layer < layers // 16 else "Q4_K"
        return "Q6_K" if is_sensitive and format in ("Q4_K_M", "Q5_K_M") else kind
    return kind
