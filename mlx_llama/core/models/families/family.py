"""A family of models: Llama with differences, and the table of the fields that all have.

The table is read in four directions: config.json and GGUF metadata to LlamaConfig
(core/models/config.py), and back (quantize/gguf_folder.py, quantize/gguf_export.py). Defaults
of config.json and the meaning of each difference are those of transformers 5 (models/NAME); keys
and conventions of GGUF are llama.cpp's (src/llama-arch.cpp, src/models/NAME.cpp,
conversion/NAME.py), and its names of tensors those of the gguf library's tensor name map
(gguf.get_tensor_name_map).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_llama.core.models.fields import Field, Reader
from mlx_llama.core.models.layer_types import Types, all_alike
from mlx_llama.core.models.layers import decoder
from mlx_llama.core.models.parts import NORM_NAMES, Angles, Layer, LayerInputs, Router
from mlx_llama.core.system.forks import cached_property

_NAME = re.compile(
    r"(?:blk\.(0|[1-9]\d{0,4})\.)?(\w+(?:\.(?!(?:weight|bias)$)\w{1,16})?)(?:\.(weight|bias))?",
    re.ASCII,
)
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)", re.ASCII)
_EXPERT = re.compile(r"\bexperts\.\d+\.", re.ASCII)

# {GGUF's name: Hugging Face's}
_MODEL = {"token_embd": "model.embed_tokens", "output": "lm_head"}
_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QUERY_KEY_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
# {tensor that is no module's: the suffix of its name in GGUF}
_BARE = {
    "self_attn.sinks": "weight",
    "e_score_correction_bias": "bias",
    "expert_bias": "bias",
    "linear_attn.dt_bias": "bias",
    "linear_attn.A_log": "",
    "layer_scalar": "weight",
    "router.scale": "",
    "router.per_expert_scale": "",
}
_PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")


def size(name: str, gguf: str, bits: int, json: str = "", **more: Any) -> Field:
    """A whole number up to 2**bits. json: its name in config.json, unless it is `name`."""
    return Field(name, json or name, gguf, high=1 << bits, **more)


def factor(name: str, json: str, gguf: str, default: float = 1.0, **more: Any) -> Field:
    """A number above 0; `default` is config.json's, and LlamaConfig's holds in GGUF."""
    more |= {"default": default, "gguf_default": None, "zero": True}
    return Field(name, json, gguf, float, 0, 1e12, **more)


def flag(name: str, json: str, value: Any, default: bool) -> Field:
    """A flag of config.json, which stands for `value` or None."""
    return Field(name, json, kind=bool, default=default, decode={True: value}.get, encode=bool)


EPS = "rms_norm_eps"
OPTIONAL: dict[str, Any] = {"default": None, "gguf_default": None, "nullable": True}
SHARED = (
    # LlamaConfig's and config.json's name, GGUF's
    size("vocab_size", "vocab_size", 24),
    size("hidden_size", "embedding_length", 20),
    size("intermediate_size", "feed_forward_length", 22),
    size("num_hidden_layers", "block_count", 12),
    size("num_attention_heads", "attention.head_count", 14, placeholder=1),
    size("num_key_value_heads", "attention.head_count_kv", 14, **OPTIONAL),
    size("head_dim", "attention.key_length", 14, **OPTIONAL),
    size("max_position_embeddings", "context_length", 30),
    Field(EPS, EPS, "attention.layer_norm_rms_epsilon", float, 0, 1, default=1e-6),
    Field("tie_word_embeddings", "tie_word_embeddings", kind=bool, default=False),
)
_ATTENTION_BIAS = Field("attention_bias", "attention_bias", kind=bool, default=False)
_MLP_BIAS = Field("mlp_bias", "mlp_bias", kind=bool, default=False)


def expert_fields(
    count: str, default: int, used: int, width: str, gguf_width: str = "expert_feed_forward_length"
) -> tuple[Field, ...]:
    """Fields of a mixture of experts. count, width: names in config.json; `count` has an alias.
    default, used: defaults of the experts, and of those of a token.
    """
    alias = "num_experts" if count == "num_local_experts" else "num_local_experts"
    return (
        size("num_experts", "expert_count", 12, count, default=default, alias=alias),
        size("num_experts_per_tok", "expert_used_count", 12, default=used, placeholder=1),
        size("moe_intermediate_size", gguf_width, 22, width),
    )


def skip_next_layers(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """Leave out the layers of multi-token prediction, which GGUF counts too."""
    skipped, count = values["num_nextn_predict_layers"], values["num_hidden_layers"]
    if skipped:
        layers = "1 layer" if skipped == 1 else f"{skipped} layers"
        read.notices.append(f"{read.source}: {layers} of multi-token prediction left out")
    if not read.is_gguf:
        return {}
    if skipped >= count:
        read.fail("nextn_predict_layers", skipped, f"less than {count}")
    return {"num_hidden_layers": count - skipped}


@dataclass(frozen=True)
class Experts:
    """Modules of a mixture of experts, in place of each layer's MLP."""

    block: str | None = None  # in a layer, if it is not the MLP's; "" for the layer itself
    gate: str = "gate_proj"  # in each expert
    up: str = "up_proj"
    down: str = "down_proj"
    # names of the module and the bias in the block; LlamaConfig has the numbers
    router: Router = Router("gate")
    stack: str = "switch_mlp"  # module of the stacks of all experts
    # tensors of all experts' gates and ups, and of all downs, of a layer (core/files/fit.py)
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    fused_rows: str = "halves"  # gates before ups, or "in turn"
    transposes: bool = False  # these matrices are transposed
    aliases: Mapping[str, str] = field(default_factory=dict)  # {other name in a layer: name}
    shared: str = ""  # an MLP for all tokens
    shared_gate: str = ""  # the score of its output


def fused_experts(rows: str, block: str = "mlp", **more: Any) -> Experts:
    """Experts of files with transposed stacks alone, in transformers' names."""
    fused = f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"
    more = {"router": Router("router")} | more
    return Experts(stack="experts", fused=fused, fused_rows=rows, transposes=True, **more)


@dataclass(frozen=True)
class Family:
    """Names of a family, and its differences from Llama. Each other file of this folder has one."""

    name: str  # in config.json's `architectures`
    model_type: str  # in config.json
    gguf: str  # `general.architecture` of its GGUF files
    aliases: tuple[str, ...] = ()  # other spellings of `name`
    # name and model type of models of images and text that contain the family
    wrapper: tuple[str, str] | None = None
    # GGUF field that tells it from another family with the same `gguf`, unless 0
    gguf_mark: str = ""
    fields: tuple[Field, ...] = ()  # beside the table's
    # defaults of config.json's fields, before those of the table
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # {unsupported field: (value without it, reason)}
    neutral: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    # (file, LlamaConfig's fields) -> more of them
    complete: Callable[[Reader, dict[str, Any]], dict[str, Any]] | None = None
    # LlamaConfig -> more fields of config.json
    write: Callable[[Any], dict[str, Any]] | None = None
    # LlamaConfig -> more fields of GGUF metadata, some in place of the table's: numbers, and lists
    write_gguf: Callable[[Any], dict[str, Any]] | None = None

    # None: config.json's `attention_bias` or `mlp_bias` decides
    attention_biases: tuple[bool | None, bool | None] = (False, False)  # qkv, output
    mlp_bias: bool | None = False
    # {LlamaConfig's field: its value in the family}, unless `complete` decides otherwise
    fixed: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0  # to add to the stored weights of norms
    # its field in config.json, and the default
    activation: tuple[str, str] = ("hidden_act", "silu")
    experts: Experts | None = None
    mlp: str = "mlp"  # a layer's module with the MLP
    # {GGUF's name: module} where llama.cpp has another name for the module
    renamed: Mapping[str, str] = field(default_factory=dict)
    model_names: Mapping[str, str] = field(default_factory=dict)  # the same, outside of layers
    # {stored module: modules whose rows it has}; of a single module, its name in the family
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # a layer's mixer -> {module: (stored module, its rows there, int64)}
    scattered: Callable[[Any], dict[str, tuple[str, Any]]] | None = None
    tiles: bool = False  # llama.cpp's converter reorders value heads, as parts.GatedDelta.tiled
    splits: bool = False  # files of llama.cpp and mlx_lm have the modules of `fused` each
    permuted: bool = False  # llama.cpp's converter reorders rows of query and key
    # All files have the two rows of a rotary pair side by side, as Meta's do.
    interleaved: bool = False
    # its activations do, so that dtype "auto" is never float16 (transformers' issue 36822)
    exceeds_float16: bool = False

    norm: tuple[str, str] = "model.norm", "output_norm"  # before the head: its module, GGUF's name
    # Modules of norms: a key of parts.NORM_NAMES.
    norm_placement: str = "before"
    # RMS norms of query and key, over each "head" or over all heads as a "whole"; "rotated": over
    # each head, after rotation
    query_key_norm: str | None = None

    # (file, LlamaConfig's fields) -> the fields `sliding_window` and `layer_types`, and its own
    types: Callable[[Reader, dict[str, Any]], Types] = all_alike
    layers: Callable[[Any], Iterable[Layer]] = decoder()  # of a LlamaConfig
    inputs: Callable[[Any], LayerInputs | None] | None = None  # of all layers
    # the tables of angles beside that of `rope` and, where there is one, of `local_rope`
    angles: Callable[[Any], tuple[Angles, ...]] | None = None
    window: str = ""  # config.json's field of the window, "" for none
    # llama.cpp's rule: all layers but each n-th have the window; 0: it ignores windows
    gguf_pattern: int = 0
    theta: float = 10000.0  # default of `rope_theta`
    # Rope of layers with a window: its base's field in config.json, and default; None: the rest's
    local_theta: tuple[str, float | None] | None = None
    partial_rotation: bool = False  # `partial_rotary_factor`
    # yarn's `truncate` for GGUF files, which do not store it
    truncates_yarn: bool = True
    # `mrope_section` is of positions in images: for text it is plain rope
    has_sections: bool = False
    stretches_theta: bool = False  # by `alpha` of a rope of type "dynamic"
    scales_queries: bool = False  # by their position, `llama_4_scaling_beta`

    @cached_property
    def table(self) -> tuple[Field, ...]:
        """All fields of the family."""
        biases = ((self.attention_biases[0], _ATTENTION_BIAS), (self.mlp_bias, _MLP_BIAS))
        return (*SHARED, *(bias for decided, bias in biases if decided is None), *self.fields)

    @cached_property
    def refused(self) -> dict[str, tuple[Any, str]]:
        """Fields of config.json that the family refuses, as `neutral`."""
        reason = f"{self.name} has no such biases"
        # transformers' class ignores the field; a config that sets it is of another model.
        biases = {"attention_bias": self.attention_biases[0], "mlp_bias": self.mlp_bias}
        absent = [name for name, decided in biases.items() if decided is False]
        refused: dict[str, tuple[Any, str]] = dict.fromkeys(absent, (False, reason))
        if not self.partial_rotation:
            refused["partial_rotary_factor"] = (1, "only whole heads are rotated")
        return refused | dict(self.neutral)

    @property
    def expert_block(self) -> str:
        """Start of the names of a layer's modules with experts."""
        block = self.experts.block if self.experts else None
        return f"{block}." if block else "" if block == "" else f"{self.mlp}."

    @cached_property
    def names(self) -> GGUFNames:
        """Tensor names in GGUF files."""
        return GGUFNames(self)


class GGUFNames:
    """Tensor names of a family, translated both ways.

    layers: {GGUF's name: Hugging Face's} of a layer's modules, without "blk.N.", "model.layers.N."
    and the suffixes. permuted: modules whose rows llama.cpp's converter reorders, so that the two
    rows of a rotary pair are neighbours; Hugging Face keeps them half a head apart. experts:
    {GGUF's name: Hugging Face's} of the modules of one expert, whose number replaces "#". Files
    have stacks "NAME_exps" of them; until 2024 they had "NAME.0" and so on.
    """

    def __init__(self, family: Family):
        experts, fused = family.experts, {} if family.splits else family.fused
        single = {parts[0]: whole for whole, parts in fused.items() if len(parts) == 1}
        joined = {part for parts in fused.values() for part in parts} - single.keys()
        layers = {
            name: module.replace("mlp.", f"{family.mlp}.")
            for name, module in _LAYERS.items()
            if module not in joined
        }
        layers |= {_FUSED[whole]: whole for whole, parts in fused.items() if len(parts) > 1}
        before, after = NORM_NAMES[family.norm_placement]
        layers |= dict(zip(("attn_norm", "ffn_norm"), before or ()))
        layers |= dict(zip(("post_attention_norm", "post_ffw_norm"), after or ()))
        fields = {field.name for field in family.fields}
        if family.query_key_norm or "query_key_norm" in fields:
            layers |= _QUERY_KEY_NORMS
        layers = {name: single.get(module, module) for name, module in layers.items()}
        self.layers, self.experts = layers, {}
        self.permuted = _PERMUTED if family.permuted else ()
        if experts:
            block = family.expert_block
            if block and not fields & {"expert_step", "first_k_dense_replace"}:  # no plain MLPs
                layers = {name: module for name, module in layers.items() if "mlp." not in module}
            self.layers = layers | {"ffn_gate_inp": f"{block}{experts.router.module}"}
            if experts.router.bias:
                self.layers["exp_probs_b"] = f"{block}{experts.router.bias}"
            if experts.shared_gate:
                self.layers["ffn_gate_inp_shexp"] = f"{block}{experts.shared_gate}"
            for part in ("gate", "up", "down"):
                if experts.shared:
                    self.layers[f"ffn_{part}_shexp"] = f"{block}{experts.shared}.{part}_proj"
                self.layers[f"ffn_{part}_exps"] = f"{block}{experts.stack}.{part}_proj"
                self.experts[f"ffn_{part}"] = f"{block}experts.#.{getattr(experts, part)}"
        kept = {k: v for k, v in self.layers.items() if v not in family.renamed.values()}
        self.layers = kept | dict(family.renamed)
        stacks = ((f"{name}_exps", module) for name, module in self.experts.items())
        self.model = _MODEL | {family.norm[1]: family.norm[0]} | dict(family.model_names)
        pairs = (*self.layers.items(), *self.model.items(), *stacks)
        self._inverse = {module: name for name, module in pairs}

    def hugging_face(self, name: str) -> str | None:
        """ "blk.3.ffn_up.weight" -> "model.layers.3.mlp.up_proj.weight"; None for unknown names."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        layer, module, suffix = match.groups()
        if layer is None:
            return f"{self.model[module]}.{suffix}" if suffix and module in self.model else None
        part, _, expert = module.partition(".")
        theirs = self.layers.get(module) or (expert.isdecimal() and self.experts.get(part))
        if theirs and theirs.endswith(tuple(_BARE)):
            return f"model.layers.{layer}.{theirs}"
        if not (theirs and suffix):
            return None
        return f"model.layers.{layer}.{theirs.replace('#', expert)}.{suffix}"

    def gguf(self, name: str) -> str:
        """The inverse of `hugging_face`; an expert's stack. Raises KeyError for unknown names."""
        bare = (f"{name}.{suffix}" for tensor, suffix in _BARE.items() if name.endswith(tensor))
        module, _, suffix = next(bare, name).rpartition(".")
        match = _LAYER.fullmatch(module)
        prefix = f"blk.{match[1]}." if match else ""
        ours = self._inverse[_EXPERT.sub("experts.#.", match[2]) if match else module]
        return f"{prefix}{ours}.{suffix}".removesuffix(".")

    def is_logarithm(self, name: str) -> bool:
        """True if llama.cpp's converter stores -exp of the tensor. name: Hugging Face's."""
        return name.endswith(".A_log")

    def is_permuted(self, name: str) -> bool:
        """True if llama.cpp's converter reorders the tensor's rows. name: Hugging Face's."""
        return name.rpartition(".")[0].endswith(self.permuted)
