"""Gemma 4's text model: layers with a window and layers without differ in their heads, late layers
read the keys and values of earlier ones, and in small models each layer has an input of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import (
    Types,
    all_but_each,
    read_pattern,
    read_types,
    read_window,
)
from mlx_llama.core.models.layers import FULL, SLIDING, attention, block, experts, mlp
from mlx_llama.core.models.parts import Layer, LayerInputs, PerLayerInput, Router

from .family import Experts, Family, size
from .gemma import softcap

_ROPES = {
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
_SIZES = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "top_k_experts",
    "moe_intermediate_size": "moe_intermediate_size",
}
# of the norms of experts and MLP beside each other: of inputs and of outputs
_BESIDE = ("pre", "_2"), ("pre", ""), ("post", "_2"), ("post", "_1")


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of global layers, and those that GGUF has by layer."""
    more: dict[str, Any] = {"embedding_multiplier": values["hidden_size"] ** 0.5}
    if not read.is_gguf:
        more |= {} if values.get("enable_moe_block") else {"num_experts": 0}
        return more | _complete_json(read, values)
    more["enable_moe_block"] = values.get("num_experts", 0) > 0
    key = "model.layers.{}.self_attn.{}_proj.weight"
    layers = range(values["num_hidden_layers"])
    names = [[key.format(i, part) in read.shapes for part in "kv"] for i in layers]
    groups = read.raw.get("attention.head_count_kv")
    slides = read.raw.get("attention.sliding_window_pattern")
    more["global_key_value_heads"] = values["num_key_value_heads"]
    if isinstance(groups, list) and isinstance(slides, list) and len(groups) == len(slides):
        for name, kind in (("num_key_value_heads", True), ("global_key_value_heads", False)):
            numbers = {group for group, slide in zip(groups, slides) if bool(slide) == kind}
            if len(numbers) > 1:
                read.fail("attention.head_count_kv", groups, "a number for each kind of layer")
            more[name] = numbers.pop() if numbers else values["num_key_value_heads"]
    units = read.raw.get("feed_forward_length")
    shared = values["shared_layers"]
    if is_wide := isinstance(units, list) and shared > 0 and units[-1] != units[0]:
        kept = len(units) - shared
        if units != [units[0]] * kept + [2 * units[0]] * shared:
            expected = f"{kept} times {units[0]}, and twice it in the last {shared}"
            read.fail("feed_forward_length", units, expected)
    return more | {
        "widens_shared": is_wide,
        "values_are_keys": [True, False] in names,
        "input_tokens": values["vocab_size"],
    }


def _complete_json(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    groups = values["num_key_value_heads"]
    more = {"input_size": 0, "input_tokens": values["vocab_size"]}
    more |= {name: values[name] for name in more if name in values}
    its_groups = values.get("global_key_value_heads")
    if not values["values_are_keys"] and read.get("model_type", "") == "gemma4_text":
        its_groups = None  # as in transformers, which had the field for these models
    by_layer = read.get("per_layer_config", None)  # transformers 5.24 writes this in their place
    if isinstance(by_layer, Mapping) and by_layer:
        first = next(iter(by_layer.values()))
        known = isinstance(first, Mapping) and not {*first} - {"head_dim", "num_key_value_heads"}
        if not known or any(other != first for other in by_layer.values()):
            expected = "the same head_dim and num_key_value_heads for all global layers"
            read.fail("per_layer_config", by_layer, expected)
        inner = read.inner(first, "per_layer_config.")
        more["global_head_dim"] = inner.integer("head_dim", values["head_dim"])
        its_groups = inner.integer("num_key_value_heads", groups)
    return more | {"global_key_value_heads": its_groups or groups}


def types_for(window: int) -> Callable[[Reader, dict[str, Any]], Types]:
    """Make `types`. window: its default."""

    def types(read: Reader, values: dict[str, Any]) -> Types:
        """By default five of six layers have a window, but not the last."""
        count = values["num_hidden_layers"]
        slides = read_pattern(read, count, 6) if read.is_gguf else all_but_each(6, count)
        slides[-1] &= read.is_gguf
        found = read_types(read, read_window(read, window, nullable=False), slides)
        _check(read, values, found["layer_types"])
        return found

    return types


def _check(read: Reader, values: dict[str, Any], kinds: tuple[str, ...]) -> None:
    """Report sizes that do not fit each other."""
    heads, count, shared = (
        values[name] for name in ("num_attention_heads", "num_hidden_layers", "shared_layers")
    )
    if values["global_head_dim"] % 2 or heads % values["global_key_value_heads"]:
        found = values["global_head_dim"], values["global_key_value_heads"]
        expected = f"an even number, and a divisor of {heads} heads"
        read.fail("global_head_dim, num_global_key_value_heads", list(found), expected)
    if values.get("enable_moe_block"):
        for name, field in _SIZES.items():
            if not values.get(name):
                read.fail(field, None, "a number, since enable_moe_block is true")
    if values["input_size"] and values["input_tokens"] < values["vocab_size"]:
        expected = f"at least vocab_size, {values['vocab_size']}"
        read.fail("vocab_size_per_layer_input", values["input_tokens"], expected)
    if kinds[-1] != FULL and not read.is_gguf:
        read.fail("layer_types[-1]", kinds[-1], repr(FULL))
    if shared and not {*kinds[count - shared :]} <= {*kinds[: max(count - shared, 0)]}:
        name = "attention.shared_kv_layers" if read.is_gguf else "num_kv_shared_layers"
        expected = "fewer, so that layers of each kind before them have keys and values"
        read.fail(name, shared, expected)


def layers(config: Any) -> Iterator[Layer]:
    own, kinds = config.own, config.layer_types
    kept = config.num_hidden_layers - own["shared_layers"]
    for i, kind in enumerate(kinds):
        mixer = attention(config, i, scale=1.0, norms_values=True)
        query, key, _ = mixer.qkv
        if kind == FULL:
            groups = own["global_key_value_heads"]
            mixer = replace(mixer, head_dim=own["global_head_dim"], key_value_heads=groups)
        if i >= kept:
            source = max(j for j in range(kept) if kinds[j] == kind)
            mixer = replace(mixer, qkv=(query,), key_norm=None, keys_of=source)
        elif kind == FULL and own["values_are_keys"]:
            mixer = replace(mixer, qkv=(query, key, key))
        is_wide, name, part = i >= kept and own["widens_shared"], f"model.layers.{i}.", None
        if width := own["input_size"]:
            part = PerLayerInput(
                index=i,
                gate=f"{name}per_layer_input_gate",
                projection=f"{name}per_layer_projection",
                norm=f"{name}post_per_layer_input_norm",
                size=width,
                activation=config.activation,
            )
        more: dict[str, Any] = dict(input=part, scalar=f"{name}layer_scalar")
        ffn: Any = mlp(config, i, config.intermediate_size << is_wide)
        if config.num_experts:  # beside the MLP
            scale = f"{name}router.per_expert_scale"
            beside = experts(config, i, norm=f"{name}router.scale", expert_scale=scale)
            norms = tuple(f"{name}{place}_feedforward_layernorm{which}" for place, which in _BESIDE)
            ffn, more["ffn_norm"] = replace(beside, shared=ffn, norms=norms), None
        yield block(config, i, mixer, ffn, **more)


def inputs(config: Any) -> LayerInputs | None:
    if not config.own["input_size"]:
        return None
    return LayerInputs(
        embedding="model.embed_tokens_per_layer",
        projection="model.per_layer_model_projection",
        norm="model.per_layer_projection_norm",
        tokens=config.own["input_tokens"],
        size=config.own["input_size"],
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        eps=config.rms_norm_eps,
    )


def write(config: Any) -> dict[str, Any]:
    whole, local = (
        {
            "rope_type": rope.type,
            "partial_rotary_factor": rope.share,
            "rope_theta": rope.theta,
            "factor": rope.factor,
        }
        for rope in (config.rope, config.local_rope)
    )
    ropes = {FULL: whole, SLIDING: local}
    return {
        "rope_parameters": {
            kind: {name: value for name, value in rope.items() if value is not None}
            for kind, rope in ropes.items()
        }
    }


def write_gguf(config: Any) -> dict[str, Any]:
    own, mixers = config.own, [layer.attention for layer in config.layers]
    fields: dict[str, Any] = {
        "attention.value_length": own["global_head_dim"],
        "attention.value_length_swa": config.head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "embedding_length_per_layer_input": own["input_size"],
        "attention.head_count_kv": [mixer.key_value_heads for mixer in mixers],
        "feed_forward_length": [layer.mlp.size for layer in config.layers],
        "attention.sliding_window_pattern": [mixer.window is not None for mixer in mixers],
    }
    return fields


def _fields(has_inputs: bool) -> tuple[Field, ...]:
    groups, none = {"default": None, "nullable": True}, dict(gguf_default=0, low=0)
    inputs = (
        size(
            "input_size",
            "embedding_length_per_layer_input",
            14,
            "hidden_size_per_layer_input",
            default=256,
            nullable=True,
            **none,
        ),
        size("input_tokens", "", 24, "vocab_size_per_layer_input", default=262144),
    )
    absent: dict[str, Any] = {"default": None, "nullable": True, "gguf_default": 0, "low": 0}
    experts = (
        Field("enable_moe_block", "enable_moe_block", kind=bool, default=False),
        size("num_experts", "expert_count", 12, **absent),
        size("num_experts_per_tok", "expert_used_count", 12, "top_k_experts", **absent),
        size("moe_intermediate_size", "expert_feed_forward_length", 22, **absent),
    )
    return (
        size("head_dim", "attention.key_length_swa", 14, default=256),
        size("global_head_dim", "attention.key_length", 14, default=512),
        size("num_key_value_heads", "attention.head_count_kv", 14, takes_first=True, default=4),
        size("intermediate_size", "feed_forward_length", 22, takes_first=True),
        size("global_key_value_heads", "", 14, "num_global_key_value_heads", **groups),
        size(
            "shared_layers",
            "attention.shared_kv_layers",
            12,
            "num_kv_shared_layers",
            default=0,
            **none,
        ),
        Field("values_are_keys", "attention_k_eq_v", kind=bool, default=False),
        Field("widens_shared", "use_double_wide_mlp", kind=bool, default=False),
        softcap("logits_softcap", "final_logit_softcapping", "final_logit_softcapping", None),
        *(inputs + experts if has_inputs else ()),
    )


def _family(name: str, kind: str, wrapper: tuple[str, str], has_inputs: bool) -> Family:
    return Family(
        name,
        kind,
        "gemma4",
        wrapper=wrapper,
        fields=_fields(has_inputs),
        defaults={
            "max_position_embeddings": 131072 if has_inputs else 262144,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
            "vocab_size": 262144,
            "final_logit_softcapping": None,
            "rope_parameters": _ROPES,
        },
        neutral={
            "use_bidirectional_attention": ("vision", "tokens see those before them alone"),
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        exceeds_float16=True,
        norm_placement="both",
        query_key_norm="head",
        types=types_for(512 if has_inputs else 1024),
        window="sliding_window",
        gguf_pattern=6,
        complete=complete,
        write=write,
        write_gguf=write_gguf,
        layers=layers,
        inputs=inputs,
        theta=1e6,
        local_theta=("rope_local_base_freq", 1e4),
        experts=Experts(
            block="",
            router=Router("router.proj"),
            stack="experts.switch_glu",
            fused=("experts.gate_up_proj", "experts.down_proj"),
            # llama.cpp's converter keeps gates and ups together
            aliases={"experts.gate_up_proj.weight": "experts.gate_up_proj"},
        ),
        renamed={
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps": "experts.gate_up_proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale": "layer_scalar",
        },
        model_names={
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    )


FAMILIES = (
    _family("Gemma4ForCausalLM", "gemma4_text", ("Gemma4ForConditionalGeneration", "gemma4"), True),
    _family(
        "Gemma4UnifiedForCausalLM",
        "gemma4_unified_text",
        ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified"),
        False,
    ),
)
