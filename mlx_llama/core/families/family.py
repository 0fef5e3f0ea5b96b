"""A family of models: Llama with differences, and the table of the fields that all have.

The table is read in four directions: config.json and GGUF metadata to LlamaConfig
(core/models/config.py), and back (core/files/gguf_folder.py, quantize/gguf_export.py). Defaults
of config.json and the meaning of each difference are those of transformers 5 (models/NAME); keys
and conventions of GGUF are llama.cpp's (src/llama-arch.cpp, src/models/NAME.cpp,
conversion/NAME.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_llama.core.models.reader import Field, Reader
from mlx_llama.core.system.forks import cached_property

from .names import Experts, GGUFNames
from .windows import Rule, Windows


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


_EPS = "rms_norm_eps"
_OPTIONAL: dict[str, Any] = {"default": None, "gguf_default": None, "nullable": True}
SHARED = (
    # LlamaConfig's and config.json's name, GGUF's
    size("vocab_size", "vocab_size", 24),
    size("hidden_size", "embedding_length", 20),
    size("intermediate_size", "feed_forward_length", 22),
    size("num_hidden_layers", "block_count", 12),
    size("num_attention_heads", "attention.head_count", 14, placeholder=1),
    size("num_key_value_heads", "attention.head_count_kv", 14, **_OPTIONAL),
    size("head_dim", "attention.key_length", 14, **_OPTIONAL),
    size("max_position_embeddings", "context_length", 30),
    Field(_EPS, _EPS, "attention.layer_norm_rms_epsilon", float, 0, 1, default=1e-6),
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
    (alias,) = {"num_experts", "num_local_experts"} - {count}
    return (
        size("num_experts", "expert_count", 12, count, default=default, alias=alias),
        size("num_experts_per_tok", "expert_used_count", 12, default=used, placeholder=1),
        size("moe_intermediate_size", gguf_width, 22, width),
    )


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
    # of config.json's fields, before those of the table
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # {unsupported field: (value without it, reason)}
    neutral: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    # (file, LlamaConfig's fields) -> more of them
    complete: Callable[[Reader, dict[str, Any]], dict[str, Any]] | None = None
    # LlamaConfig -> more fields of config.json
    write: Callable[[Any], dict[str, Any]] | None = None

    # None: config.json's `attention_bias` or `mlp_bias` decides
    attention_biases: tuple[bool | None, bool | None] = (False, False)  # of qkv; of the output
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
    # {stored module: modules whose rows it has}; of a single module, its name in the family
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: bool = False  # files of llama.cpp and mlx_lm have the modules of `fused` each
    permuted: bool = False  # llama.cpp's converter reorders rows of query and key
    # All files have the two rows of a rotary pair side by side, as Meta's do.
    interleaved: bool = False
    # its activations do, so that dtype "auto" is never float16 (transformers' issue 36822)
    exceeds_float16: bool = False

    # key-value heads and hidden units of each layer, where layers differ
    layer_sizes: Callable[[Reader], tuple[tuple[int, int], ...]] | None = None
    windows: Windows = Windows(is_absent=True)
    # layers without rotary embedding
    unrotated: Rule | None = None
    theta: float = 10000.0  # default of `rope_theta`
    # Rope of layers with a window: its base's field in config.json, and default; None: the rest's
    local_theta: tuple[str, float | None] | None = None
    partial_rotation: bool = False  # `partial_rotary_factor`
    # default of yarn's `truncate`, and its value in GGUF files, which do not store it
    truncates_yarn: bool = True
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

    @cached_property
    def names(self) -> GGUFNames:
        """Tensor names in GGUF files."""
        return GGUFNames(self)
