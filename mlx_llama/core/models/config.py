"""Resolve config.json or GGUF metadata to one frozen LlamaConfig with all fields set.

The schema of config.json is transformers', from Llama 1 to the `rope_parameters` of transformers 5. Defaults are those of
its config classes (architectures.py). Fields and defaults of GGUF are llama.cpp's (src/llama-model.cpp, `load_hparams`).
Fields that ask for unsupported arithmetic raise ConfigError.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_llama.core.errors import ConfigError, Report, refuse, show
from mlx_llama.core.system.files import read_json

from .architectures import ARCHITECTURES, BY_GGUF, BY_MODEL_TYPE, BY_SPELLING, WRAPPERS, Architecture, find_gguf
from .spec import ExpertsSpec, LayerSpec

# norm_placement: (norms before attention and MLP, norms after them). Modules are named as in transformers: Llama; OLMo 2 and
# EXAONE 4; Gemma 2.
NORM_NAMES: dict[str, tuple[tuple[str, str] | None, tuple[str, str] | None]] = {
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "after": (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # hidden_act: the name here
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DTYPES = ("float32", "float16", "bfloat16")

# Above all existing models; the size of a tensor in bytes still fits 64 bits.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "num_experts_per_tok": 1 << 12,
    "moe_intermediate_size": 1 << 22,
}
_MISSING = object()


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: the type of its formula (core/models/rope.py), and its parameters.

    theta: base of the frequencies. original_max_position_embeddings: trained positions before scaling. Parameters that
    the type does not use are None.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    divisors: tuple[float, ...] | None = None  # of the frequencies, one per pair (GGUF's rope_freqs.weight)
    short_factor: tuple[float, ...] | None = None  # divisors of type "longrope" up to the trained positions
    long_factor: tuple[float, ...] | None = None  # beyond them
    dim: int | None = None  # leading dimensions of a head that are rotated, None for all


@dataclass(frozen=True)
class Quantization:
    """Packing of a safetensors checkpoint's matrices by mx.quantize, mode "affine".

    bits: width of a code. group_size: codes that share a scale and a bias. layers: (module, (bits, group_size)) of
    modules with other settings, (module, None) of modules that are not quantised. Modules that are not listed are
    quantised if the file has their scales.
    """

    bits: int
    group_size: int
    layers: tuple[tuple[str, tuple[int, int] | None], ...] = ()


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture and sizes of a model, resolved and checked. Names and meanings are those of transformers' config.json.

    sliding_window: positions that a token sees, itself included; None for all. sliding_layers: numbers of the layers with
    that window; None for all. attention_bias: of query, key and value. output_bias: of the projection after attention.
    query_key_norm: RMS norms of query and key, over each "head" or over all heads as a "whole"; None for none.
    norm_placement: "before" attention and MLP,
    "after" them, or "both". unrotated_layers: layers without rotary embedding. embedding_multiplier, logits_multiplier:
    factors on the embedding and the logits. residual_multiplier: on the output of attention and MLP.
    attention_multiplier: on query times key; None for 1 / sqrt(head_dim). activation: "silu" or "gelu_tanh". dtype: of the
    checkpoint, as the config names it. local_rope: of layers with a window, None for `rope`. norm_offset: to add to the stored
    weights of norms. attention_softcap, logits_softcap: c of c * tanh(x / c), or None. query_beta: queries are multiplied by 1 + query_beta * log(1 + n), n the trained lengths
    (rope.original_max_position_embeddings) before their position. is_text_part: of a checkpoint that has images, too.
    quantization: None for plain matrices and for GGUF, whose tensors name their formats. num_experts: MLPs of a layer, of
    which a token uses num_experts_per_tok, 0 for a plain MLP; moe_intermediate_size: hidden units of each. norm_topk_prob:
    the shares of a token's experts add up to 1.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None
    output_bias: bool = False
    query_key_norm: str | None = None
    sliding_layers: tuple[int, ...] | None = None
    activation: str = "silu"
    norm_placement: str = "before"
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_multiplier: float = 1.0
    local_rope: RopeConfig | None = None
    norm_offset: float = 0.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    query_beta: float = 0.0
    is_text_part: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Specs of all layers, in order."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    def _layer(self, i: int) -> LayerSpec:
        layer = f"model.layers.{i}."
        norms = self.query_key_norm
        before, after = NORM_NAMES[self.norm_placement]
        slides = self.sliding_window is not None and (self.sliding_layers is None or i in self.sliding_layers)
        return LayerSpec(
            index=i,
            heads=self.num_attention_heads,
            key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            eps=self.rms_norm_eps,
            attention_norm=before and f"{layer}{before[0]}",
            qkv=tuple(f"{layer}self_attn.{name}_proj" for name in "qkv"),
            out=f"{layer}self_attn.o_proj",
            ffn_norm=before and f"{layer}{before[1]}",
            gate_up=() if self.num_experts else (f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
            down="" if self.num_experts else f"{layer}mlp.down_proj",
            experts=self._experts(layer) if self.num_experts else None,
            query_norm=f"{layer}self_attn.q_norm" if norms else None,
            key_norm=f"{layer}self_attn.k_norm" if norms else None,
            rotates=i not in self.unrotated_layers,
            window=self.sliding_window if slides else None,
            post_attention_norm=after and f"{layer}{after[0]}",
            post_ffn_norm=after and f"{layer}{after[1]}",
            attention_multiplier=self.attention_multiplier,
            residual_multiplier=self.residual_multiplier,
            activation=self.activation,
            rotary_dim=self.rope.dim,
            rope=int(slides and self.local_rope is not None),
            softcap=self.attention_softcap,
            query_rope=len(self.ropes) if self.query_beta else None,
        )

    def _experts(self, layer: str) -> ExpertsSpec:
        found = ARCHITECTURES[self.architecture].experts
        block = f"{layer}{found.block}"
        gate, up, down = (tuple(f"{block}.experts.{i}.{name}" for i in range(self.num_experts))
                          for name in (found.gate, found.up, found.down))
        stacks = tuple(f"{block}.switch_mlp.{name}_proj" for name in ("gate", "up", "down"))  # mlx_lm's names
        return ExpertsSpec(f"{block}.gate", gate, up, down, stacks, self.num_experts_per_tok, self.norm_topk_prob)

    @property
    def exceeds_float16(self) -> bool:
        """True for a family whose activations overflow float16."""
        return ARCHITECTURES[self.architecture].exceeds_float16

    @property
    def mlp_size(self) -> int:
        """Hidden units of an MLP, or of one expert."""
        return self.moe_intermediate_size if self.num_experts else self.intermediate_size

    def stacks(self) -> dict[str, tuple[str, ...]]:
        """{module of all experts' matrices together: their modules, by number}."""
        return {stack: names for spec in self.layers if (one := spec.experts)
                for stack, names in zip(one.stacks, (one.gate, one.up, one.down))}

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, the leading ones."""
        return self.rope.dim or self.head_dim

    @property
    def table_width(self) -> int:
        """Columns of the tables of angles: of each rope, then of the first times the queries' factor."""
        return (len(self.ropes) + bool(self.query_beta)) * (self.rotary_dim // 2)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Tables of angles, by LayerSpec.rope."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def head_name(self) -> str:
        """Module that projects to the vocabulary: the embedding if it is tied."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> LlamaConfig:
        """Read a config.json. path: the file, or its folder.

        Raises:
            ConfigError: as `from_dict`; or the file is missing or not a JSON object.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_dict(read_json(path, ConfigError), str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config.json", report: Report = refuse) -> LlamaConfig:
        """Resolve a parsed config.json. source: file to name in errors.

        report: called with the error of each bad field. If it returns, the field gets a placeholder and reading goes on.

        Raises:
            ConfigError: a field is missing, of the wrong type, out of range or at odds with another; the
                architecture, rope type, activation or quantisation is not supported; what `report` raises.
        """
        read = _Reader(raw, source, report=report)
        is_part = (wrapper := _wrapper(read)) is not None
        if is_part:
            read = _Reader(_text_part(read, wrapper), source, report=report)
        architecture = _architecture(read)
        default = architecture.defaults
        if not architecture.partial_rotation:
            _refuse_partial(read)

        hidden = read.integer("hidden_size")
        layers = read.integer("num_hidden_layers")
        heads = read.integer("num_attention_heads", default.get("num_attention_heads", _MISSING))
        # In transformers a missing field takes the class's default; null means one key-value head per query head.
        kv_heads = read.integer("num_key_value_heads", default["num_key_value_heads"], nullable=True) or heads
        if heads % kv_heads:
            read.fail("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
        head_dim = read.integer("head_dim", default.get("head_dim"), nullable=True)
        if head_dim is None:
            if hidden % heads:
                read.fail(
                    "hidden_size", hidden, f"a multiple of num_attention_heads ({heads}), or an explicit head_dim"
                )
            head_dim = hidden // heads
        if head_dim % 2:
            read.fail("head_dim", head_dim, "an even number, since rotary embeddings rotate pairs")
        positions = read.integer("max_position_embeddings", default["max_position_embeddings"])
        vocab = read.integer("vocab_size", default.get("vocab_size", _MISSING))
        biases = {name: read.boolean(name, False) for name in ("attention_bias", "mlp_bias")}
        if architecture.mlp_bias is False and biases["mlp_bias"]:
            read.fail("mlp_bias", True, f"false, since {architecture.name} has no such biases")
        if architecture.qkv_bias is False and biases["attention_bias"]:
            # transformers' class ignores the field; a config that sets it is of another model.
            read.fail("attention_bias", True, f"false, since {architecture.name} has no such biases")
        unrotated = _unrotated_layers(read, architecture, layers)
        window, sliding_layers = _sliding_window(read, architecture, layers, unrotated)
        config = cls(
            architecture=architecture.name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number("rms_norm_eps", default.get("rms_norm_eps", 1e-6), low=0.0, high=1.0),
            max_position_embeddings=positions,
            **_ropes(read, positions, head_dim, architecture),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default.get("tie_word_embeddings", False)),
            attention_bias=biases["attention_bias"] if architecture.qkv_bias is None else architecture.qkv_bias,
            mlp_bias=biases["mlp_bias"],
            sliding_window=window,
            bos_token_id=read.token("bos_token_id", default.get("bos_token_id", 1), vocab),
            eos_token_ids=read.tokens("eos_token_id", default.get("eos_token_id", 2), vocab),
            dtype=_dtype(read),
            quantization=_quantization(read),
            output_bias=biases["attention_bias"] if architecture.out_bias is None else architecture.out_bias,
            query_key_norm=architecture.query_key_norm,
            sliding_layers=sliding_layers,
            activation=_activation(read, *architecture.activation),
            norm_placement=architecture.norms,
            norm_offset=architecture.norm_offset,
            is_text_part=is_part,
            unrotated_layers=unrotated,
            **_multipliers(read, architecture, hidden),
            **_experts(read, architecture),
        )
        config = _name_each_expert(config)
        if not read.failed:
            _check_quantized_modules(config, source)
        return config

    @classmethod
    def from_gguf(
        cls,
        metadata: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        divisors: Mapping[str, tuple[float, ...]],
        dtype: str,
        source: str,
    ) -> LlamaConfig:
        """Resolve the metadata and tensor shapes of a GGUF file.

        Args:
            metadata: {key: value}, arrays of numbers as lists (their first 4097 are enough), of text as any sequence.
            shapes: of the tensors, by Hugging Face name. They give the vocabulary's size, and whether the model has an
                output head and biases.
            divisors: values of the tensors rope_freqs.weight (""), rope_factors_short.weight ("short") and
                rope_factors_long.weight ("long"), as far as there are.
            dtype: of the embedding.
            source: file to name in errors.

        Raises:
            ConfigError: a field is missing, of the wrong type, out of range, at odds with another or with the tensors;
                the architecture or its arithmetic is not supported.
        """
        read = _Reader(metadata, source)
        architecture = _refuse_gguf(read)
        read.family = family = architecture.gguf
        hidden = read.gguf("embedding_length", "hidden_size")
        heads = read.gguf("attention.head_count", "num_attention_heads")
        kv_heads = read.gguf("attention.head_count_kv", "num_key_value_heads", heads)
        if heads % kv_heads:
            read.fail(f"{family}.attention.head_count_kv", kv_heads, f"a divisor of {family}.attention.head_count ({heads})")
        head_dim = read.gguf("attention.key_length", "head_dim", None if hidden % heads else hidden // heads)
        if head_dim is None:
            read.fail(f"{family}.embedding_length", hidden, f"a multiple of {family}.attention.head_count ({heads})")
        if head_dim % 2:
            read.fail(f"{family}.attention.key_length", head_dim, "an even number, since rotary embeddings rotate pairs")
        rotary = read.gguf("rope.dimension_count", "head_dim", head_dim)
        if rotary != head_dim and not (architecture.partial_rotation and rotary < head_dim and rotary % 2 == 0):
            read.fail(f"{family}.rope.dimension_count", rotary, f"{head_dim}, the size of a head")
        if read.gguf("attention.value_length", "head_dim", head_dim) != head_dim:
            read.fail(f"{family}.attention.value_length", metadata[f"{family}.attention.value_length"],
                      f"{head_dim}, the size of a head")
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        embedding = shapes.get("model.embed_tokens.weight")
        vocab = embedding[0] if embedding else read.gguf("vocab_size", "vocab_size", len(tokens) or None)
        if isinstance(tokens, (str, int, float)) or len(tokens) > vocab or not 1 <= vocab <= _LIMITS["vocab_size"]:
            read.fail("tokenizer.ggml.tokens", tokens, f"at most {vocab} tokens, the rows of token_embd.weight")
        positions = read.gguf("context_length", "max_position_embeddings")
        layers = read.gguf("block_count", "num_hidden_layers")
        window, sliding = _gguf_window(read, architecture, positions, layers)
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
        # Some writers store -1 (no token) as an unsigned number.
        bos, *ends = (None if metadata.get(key) == 0xFFFFFFFF else read.token(key, None, vocab) for key in keys)
        return cls(
            architecture=architecture.name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=read.gguf("feed_forward_length", "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number(f"{family}.attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
            max_position_embeddings=positions,
            rope=dataclasses.replace(_gguf_rope(read, positions, rotary, divisors), dim=rotary if rotary < head_dim else None),
            tie_word_embeddings="lm_head.weight" not in shapes,
            attention_bias=any(name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in shapes),
            mlp_bias=any(".mlp." in name and name.endswith(".bias") for name in shapes),
            sliding_window=window,
            sliding_layers=sliding,
            local_rope=_gguf_local_rope(read, architecture),
            query_beta=(read.number(f"{family}.attention.temperature_scale", 0.0, low=-1e-9) or 0.0
                        if architecture.scales_queries else 0.0),
            activation=ACTIVATIONS[architecture.activation[1]],
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
            dtype=dtype,
            output_bias=any(name.endswith("o_proj.bias") for name in shapes),
            query_key_norm=architecture.query_key_norm,
            norm_placement=architecture.norms,
            unrotated_layers=default_unrotated(architecture, layers),
            **_gguf_multipliers(read, architecture, hidden, heads, head_dim, layers),
            **_gguf_experts(read, architecture),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the checkpoint, by Hugging Face name. Matrices are [out, in], as in torch.nn.Linear."""
        d, ffn, vocab = self.hidden_size, self.mlp_size, self.vocab_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d)}

        def matrices(names: tuple[str, ...], rows: tuple[int, ...], columns: int, has_bias: bool) -> None:
            for name, count in zip(names, rows, strict=True):
                shapes[f"{name}.weight"] = (count, columns)
                if has_bias:
                    shapes[f"{name}.bias"] = (count,)

        for spec in self.layers:
            matrices(spec.qkv, (q, kv, kv), d, self.attention_bias)
            matrices((spec.out,), (d,), q, self.output_bias)
            if self.query_key_norm:
                widths = (q, kv) if self.query_key_norm == "whole" else (self.head_dim, self.head_dim)
                shapes |= {f"{spec.query_norm}.weight": (widths[0],), f"{spec.key_norm}.weight": (widths[1],)}
            if experts := spec.experts:
                matrices((experts.router,), (experts.count,), d, False)
                for one in zip(experts.gate, experts.up, experts.down):
                    matrices(one[:2], (ffn, ffn), d, False)
                    matrices(one[2:], (d,), ffn, False)
            else:
                matrices(spec.gate_up, (ffn, ffn), d, self.mlp_bias)
                matrices((spec.down,), (d,), ffn, self.mlp_bias)
            for name in filter(None, (spec.attention_norm, spec.ffn_norm, spec.post_attention_norm, spec.post_ffn_norm)):
                shapes[f"{name}.weight"] = (d,)
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocab, d)
        return shapes

    def fused_tensors(self) -> dict[str, tuple[str, ...]]:
        """{stored tensor: the tensors of `tensor_shapes` whose rows it has, in order}."""
        shapes = self.tensor_shapes()
        found = {}
        for i in range(self.num_hidden_layers):
            for whole, parts in ARCHITECTURES[self.architecture].fused.items():
                for kind in ("weight", "bias"):
                    names = tuple(f"model.layers.{i}.{part}.{kind}" for part in parts)
                    if names[0] in shapes:
                        found[f"model.layers.{i}.{whole}.{kind}"] = names
        return found

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors as files store them: some have the rows of several of `tensor_shapes`."""
        shapes = self.tensor_shapes()
        if not (fused := self.fused_tensors()):
            return shapes
        whole_of = {part: whole for whole, parts in fused.items() for part in parts}
        stored: dict[str, tuple[int, ...]] = {}
        for name, (rows, *rest) in shapes.items():
            whole = whole_of.get(name, name)
            stored[whole] = (stored[whole][0] + rows if whole in stored else rows, *rest)
        return stored


# Fields that are checked against each other.
_SIZES = {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}


def _collects(otherwise: Any, needs: frozenset[str] = frozenset()) -> Callable[[Callable], Callable]:
    """Decorate a function of a reader to report its ConfigError and return `otherwise`.

    otherwise: a value, or {field: value}. needs: the function is not called if one of these fields has failed.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(read: _Reader, *given: Any, **named: Any) -> Any:
            value = otherwise.get(given[0], 1) if isinstance(otherwise, dict) else otherwise
            if read.failed & needs:
                return value
            report, read.report = read.report, refuse
            try:
                return function(read, *given, **named)
            except ConfigError as error:
                failure = error
            finally:
                read.report = report
            read.report(failure)
            read.failed.update(one for one in given[:1] if isinstance(one, str))
            return value

        return run

    return decorate


class _Reader:
    """Typed access to raw fields. Errors name the file, the field, the value found and the value expected.

    report: called with the error of a bad field (see from_dict). failed: fields with placeholders.
    """

    def __init__(self, raw: dict[str, Any], source: str, prefix: str = "", report: Report = refuse):
        if not isinstance(raw, dict):
            raise ConfigError(f"{source}: {prefix or 'config'} is {show(raw)}, expected an object with named fields")
        self.raw, self.source, self.prefix = raw, source, prefix
        self.family = ""  # prefix of GGUF fields, such as "llama" of llama.block_count
        is_gguf = source.endswith(".gguf")
        self.remedy = "take another conversion of the model" if is_gguf else "correct the file, or take the model's own"
        self.report, self.failed = report, set()

    def fail(self, name: str, found: object, expected: str) -> None:
        if self.report is not refuse and name in _SIZES and self.failed & _SIZES:
            return  # follows from the placeholder of another size
        self.report(ConfigError(f"{self.source}: {self.prefix}{name} is {show(found)}, expected {expected}; {self.remedy}"))

    def get(self, name: str, default: Any = _MISSING) -> Any:
        value = self.raw.get(name, default)
        if value is _MISSING:
            raise ConfigError(f"{self.source}: field {self.prefix}{name} is missing; {self.remedy}")
        return value

    @_collects(_LIMITS | {"num_attention_heads": 1})
    def integer(self, name: str, default: Any = _MISSING, *, nullable: bool = False) -> Any:
        value, high = self.get(name, default), _LIMITS.get(name, 1 << 30)
        if value is None and nullable:
            return None
        # bool is a subclass of int
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            self.fail(name, value, f"a whole number from 1 to {high}" + (" or null" if nullable else ""))
        return value

    def gguf(self, name: str, field: str, default: Any = _MISSING, *, low: int = 1) -> Any:
        """Read the whole number FAMILY.NAME within the limits of LlamaConfig's `field`. Accepts a list of equal numbers."""
        value, name = self.get(f"{self.family}.{name}", default), f"{self.family}.{name}"
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                self.fail(name, value, "the same number for all layers")
            value = value[0]
        high = _LIMITS[field]
        if value is None and name not in self.raw:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, value, f"a whole number from {low} to {high}")
        return value

    @_collects(1.0)
    def number(self, name: str, default: Any = _MISSING, *, low: float, high: float = 1e12) -> float:
        """Read a finite number with low < value <= high."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            self.fail(name, value, f"a number above {low:g}, up to {high:g}")
        return float(value)

    def optional(self, name: str, *, low: float, high: float = 1e12) -> float | None:
        return None if self.get(name, None) is None else self.number(name, low=low, high=high)

    @_collects(False)
    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, value, "true or false")
        return value

    @_collects(())
    def tokens(self, name: str, default: Any, vocab: int) -> tuple[int, ...]:
        """Read token ids from an int, a list or null; in order, without duplicates."""
        value = self.get(name, default)
        values = [] if value is None else value if isinstance(value, list) else [value]
        for one in values:
            if isinstance(one, bool) or not isinstance(one, int) or (not 0 <= one < vocab and name in self.raw):
                # -1 means no token in some early conversions.
                if one == -1 and not isinstance(one, bool):
                    continue
                self.fail(name, value, f"token ids from 0 to {vocab - 1} (vocab_size - 1), or null")
        return tuple(dict.fromkeys(one for one in values if 0 <= one < vocab))

    @_collects(None)
    def token(self, name: str, default: Any, vocab: int) -> int | None:
        value = self.get(name, default)
        if isinstance(value, list):
            self.fail(name, value, "one token id or null")
        ids = self.tokens(name, default, vocab)
        return ids[0] if ids else None


def _experts(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """Read the fields of a mixture of experts. Raises ConfigError for layers that are plain MLPs."""
    if (one := architecture.experts) is None:
        return {}
    *spellings, width = one.fields
    name = next((name for name in spellings if name in read.raw), spellings[0])
    count = read.integer(name, architecture.defaults[spellings[0]])
    used = read.integer("num_experts_per_tok", architecture.defaults["num_experts_per_tok"])
    if used > count:
        read.fail("num_experts_per_tok", used, f"at most {name} ({count})")
    for field, neutral in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        found = read.get(field, None)
        if found is not None and (isinstance(found, bool) or found != neutral):
            read.fail(field, found, f"{neutral}, since every layer is a mixture of experts here")
    return {"num_experts": count, "num_experts_per_tok": used,
            "moe_intermediate_size": read.integer(width, architecture.defaults.get(width, _MISSING)),
            "norm_topk_prob": read.boolean("norm_topk_prob", False) if one.normalises is None else one.normalises}


def _gguf_experts(read: _Reader, architecture: Architecture) -> dict[str, Any]:
    """The same of a GGUF file; llama.cpp always divides the shares by their sum."""
    if (one := architecture.experts) is None:
        return {}
    count, used = read.gguf("expert_count", "num_experts"), read.gguf("expert_used_count", "num_experts_per_tok")
    if used > count:
        read.fail(f"{read.family}.expert_used_count", used, f"at most {read.family}.expert_count ({count})")
    width = "feed_forward_length" if one.fields[-1] == "intermediate_size" else "expert_feed_forward_length"
    return {"num_experts": count, "num_experts_per_tok": used,
            "moe_intermediate_size": read.gguf(width, "moe_intermediate_size")}


def _name_each_expert(config: LlamaConfig) -> LlamaConfig:
    """Give each expert the settings of quantisation that stand under the name of its stack."""
    if config.quantization is None or not config.num_experts:
        return config
    stacks = config.stacks()
    layers = tuple((one, packing) for name, packing in config.quantization.layers for one in stacks.get(name, (name,)))
    return dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, layers=layers))


def _wrapper(read: _Reader) -> str | None:
    """The name in WRAPPERS of a model of images and text; None for a model of text."""
    names, kind = read.get("architectures", None), read.get("model_type", None)
    named = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    return next((name for name, one in WRAPPERS.items() if named == name or named is None and kind == one), None)


def _text_part(read: _Reader, wrapper: str) -> dict[str, Any]:
    """The fields of the text model, which the outer ones complete."""
    if read.get("model_type", WRAPPERS[wrapper]) != WRAPPERS[wrapper]:
        raise ConfigError(f"{read.source}: model_type is {show(read.raw['model_type'])}, expected {WRAPPERS[wrapper]!r} for "
                          f"{wrapper}; correct one of them")
    text = read.get("text_config", None)
    if not isinstance(text, dict) or text.get("model_type") not in BY_MODEL_TYPE:
        found = text.get("model_type") if isinstance(text, dict) else text
        raise ConfigError(f"{read.source}: text_config.model_type is {show(found)}, supported are "
                          f"{', '.join(BY_MODEL_TYPE)}; load another model")
    outer = ("quantization", "quantization_config", "torch_dtype", "dtype", "bos_token_id", "eos_token_id",
             "tie_word_embeddings")
    parts: dict[str, Any] = {name: read.raw[name] for name in outer if read.raw.get(name) is not None}
    parts |= {name: value for name, value in text.items() if value is not None or name not in parts}
    if isinstance(packing := parts.get("quantization"), dict):
        parts["quantization"] = packing = {strip_wrapper(name): value for name, value in packing.items()
                                           if strip_wrapper(name) is not None}
        if parts.get("quantization_config") is not None:
            parts["quantization_config"] = packing
    return parts | {"architectures": [BY_MODEL_TYPE[text["model_type"]].name]}


def strip_wrapper(name: str) -> str | None:
    """A tensor's or module's name in the text model; None for one of the other parts."""
    for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    others = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    return None if name.startswith(others) else name


def _architecture(read: _Reader) -> Architecture:
    names, kind = read.get("architectures", None), read.get("model_type", None)
    known = ", ".join(ARCHITECTURES)
    if isinstance(names, list) and names:
        if len(names) != 1 or not isinstance(names[0], str) or names[0] not in BY_SPELLING:
            raise ConfigError(
                f"{read.source}: architectures is {show(names)}, supported are {known}; load another model"
            )
        architecture = BY_SPELLING[names[0]]
        if kind is not None and (not isinstance(kind, str) or BY_MODEL_TYPE.get(kind) != architecture):
            raise ConfigError(
                f"{read.source}: model_type is {show(kind)}, expected {architecture.model_type!r} for {architecture.name}; "
                "correct one of them"
            )
        return architecture
    if names is not None and names != []:
        read.fail("architectures", names, "a list with one name")
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        raise ConfigError(
            f"{read.source}: names no architecture (model_type is {show(kind)}), supported are {known}; load another model"
        )
    return BY_MODEL_TYPE[kind]


def _activation(read: _Reader, field: str, default: str) -> str:
    if read.get(field, None) is None and default != "silu":
        field = "hidden_act"  # of Gemma's first files
    name = read.get(field, default)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        read.fail(field, name, f"one of {', '.join(ACTIVATIONS)}")
        return "silu"
    return ACTIVATIONS[name]


def _refuse_partial(read: _Reader) -> None:
    partial = read.get("partial_rotary_factor", None)
    if partial is not None and (isinstance(partial, bool) or partial != 1):
        read.fail("partial_rotary_factor", partial, "1, since only whole heads are rotated")


# Widths and groups of mx.quantize, mode "affine"
# (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html)
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
QUANTIZED_GROUPS = (32, 64, 128)
_REQUANTIZE = "load the unquantised version of this model, or one that mlx_lm.convert -q or llama.cpp has quantised"


@_collects(None)
def _quantization(read: _Reader) -> Quantization | None:
    """Read the field that mlx_lm.convert writes: {"group_size", "bits", "mode"}, and settings of single modules.

    A module's settings stand under its name: "model.layers.0.mlp.down_proj": {"group_size", "bits"} or false. The field is
    written twice, the second time as "quantization_config" for the hub.
    """
    raw, other = read.get("quantization", None), read.get("quantization_config", None)
    if other is not None and other != raw:
        method = other.get("quant_method", other) if isinstance(other, dict) else other
        raise ConfigError(
            f"{read.source}: quantization_config names a quantisation that is not supported ({show(method)}); "
            f"{_REQUANTIZE}"
        )
    if raw is None:
        return None
    found = _Reader(raw, read.source, "quantization.")
    bits, group_size = _packing(found, found.get("bits"), found.get("group_size"))
    layers: list[tuple[str, tuple[int, int] | None]] = []
    for name, value in found.raw.items():
        if name in ("bits", "group_size", "mode"):
            continue
        if isinstance(value, bool):
            layers.append((name, (bits, group_size) if value else None))
        elif isinstance(value, dict):
            layer = _Reader(value, read.source, f"quantization.{show(name)[1:-1]}.")
            # mlx_lm takes mx.quantize's defaults here (4, 64), not the model's settings.
            layers.append((name, _packing(layer, layer.get("bits", 4), layer.get("group_size", 64))))
            for field in value:
                if field not in ("bits", "group_size", "mode"):
                    expected = "nothing, since only bits, group_size and mode are known"
                    layer.fail(show(field)[1:-1], value[field], expected)
        else:
            expected = "true, false or an object with bits and group_size, for a module of that name"
            found.fail(show(name)[1:-1], value, expected)
    return Quantization(bits, group_size, tuple(layers))


def _packing(read: _Reader, bits: object, group_size: object) -> tuple[int, int]:
    """Check mode, bits and group_size; returns (bits, group_size)."""
    mode = read.get("mode", "affine")
    if mode != "affine":
        read.fail("mode", mode, f"'affine', the only one supported; {_REQUANTIZE} (mlx_lm.convert: --q-mode affine)")
    for name, value, allowed in (("bits", bits, QUANTIZED_BITS), ("group_size", group_size, QUANTIZED_GROUPS)):
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            read.fail(name, value, f"one of {', '.join(map(str, allowed))}")
    return bits, group_size


def _check_quantized_modules(config: LlamaConfig, source: str) -> None:
    """Check that modules named by `config.quantization` have a matrix and that their groups divide its rows."""
    if config.quantization is None:
        return
    shapes = config.stored_shapes()
    for module, packing in config.quantization.layers:
        shape = shapes.get(module + ".weight", ())
        if len(shape) != 2:
            raise ConfigError(
                f"{source}: quantization.{show(module)[1:-1]} names a module that has no matrix in this model; "
                "correct the file"
            )
        if packing and shape[1] % packing[1]:
            raise ConfigError(
                f"{source}: quantization.{module}.group_size is {packing[1]}, which does not divide the rows of "
                f"{module}.weight {list(shape)}; correct the file"
            )


# GGUF fields of unsupported arithmetic, and the values that leave it out
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # softmax
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_weights_scale": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}


def _refuse_gguf(read: _Reader) -> Architecture:
    """Find the architecture of a GGUF file. Raises ConfigError for unsupported arithmetic."""
    kind, name = read.get("general.type", "model"), read.get("general.architecture")
    if kind != "model":
        read.fail("general.type", kind, "'model'")
    architecture = find_gguf(name, read.get(f"{name}.expert_count", 0))
    if architecture is None:
        raise ConfigError(
            f"{read.source}: general.architecture is {show(name)}, supported are {', '.join(map(repr, sorted(BY_GGUF)))}; "
            "load another model"
        )
    for field, neutral in _GGUF_NEUTRAL.items():
        if field in architecture.gguf_fields:
            continue
        value = read.get(f"{name}.{field}", neutral[0])
        if not isinstance(value, (bool, int, float)) or value not in neutral:
            read.fail(f"{name}.{field}", value, f"{' or '.join(map(str, neutral))}, since nothing else is supported")
    return architecture


def _gguf_window(read: _Reader, architecture: Architecture, positions: int,
                 layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(window or None, numbers of the layers with it; None for all)."""
    default = architecture.defaults["sliding_window"] if architecture.name == "Gemma2ForCausalLM" else None  # as llama.cpp
    window = read.gguf("attention.sliding_window", "sliding_window", default, low=0) or None  # 0 means none
    if window and architecture.window == "every":
        name = f"{read.family}.attention.sliding_window_pattern"
        pattern = read.get(name, architecture.window_every)
        if isinstance(pattern, list) and len(pattern) == layers:
            return window, tuple(i for i in range(layers) if pattern[i])
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0:
            read.fail(name, pattern, f"a whole number from 0, or a list of {layers}")
        return window, default_sliding(layers, pattern)
    if window and architecture.window in ("from", "switched"):
        if window < positions:  # llama.cpp ignores the window here, and the file does not list its layers
            read.fail(f"{read.family}.attention.sliding_window", window, f"0 or at least {positions}, the context's length")
        return None, None
    return window, None


def default_sliding(layers: int, every: int) -> tuple[int, ...]:
    """All layers but each `every`-th; all of them for 0."""
    return tuple(i for i in range(layers) if not every or (i + 1) % every)


def _gguf_local_rope(read: _Reader, architecture: Architecture) -> RopeConfig | None:
    if architecture.local_theta is None:
        return None
    return RopeConfig(theta=read.number(f"{read.family}.rope.freq_base_swa", architecture.local_theta, low=1.0, high=1e15))


def _gguf_rope(read: _Reader, positions: int, head_dim: int,
               divisors: Mapping[str, tuple[float, ...]]) -> RopeConfig:
    prefix = f"{read.family}.rope.scaling."
    for key, values in divisors.items():
        if len(values) != head_dim // 2 or not all(0 < one < math.inf for one in values):
            read.fail(f"rope_factors_{key}.weight" if key else "rope_freqs.weight", values,
                      f"{head_dim // 2} numbers above 0, one for each pair of a head")
    values: dict[str, Any] = {
        "theta": read.number(f"{read.family}.rope.freq_base", 10000.0, low=1.0, high=1e15),
        "divisors": divisors.get(""),
    }
    if "short" in divisors and "long" in divisors:
        original = read.integer(prefix + "original_context_length", positions)
        return RopeConfig(type="longrope", original_max_position_embeddings=original, short_factor=divisors["short"],
                          long_factor=divisors["long"], attention_factor=read.number(prefix + "attn_factor", 1.0, low=0.0),
                          **values)
    if "short" in divisors or "long" in divisors:
        read.fail(prefix + "type", "longrope", "both tensors rope_factors_short.weight and rope_factors_long.weight")
    kind = read.get(prefix + "type", "linear")
    if kind not in ("none", "linear", "yarn"):
        read.fail(prefix + "type", kind, "none, linear or yarn")
    # 0 means no scaling. The first GGUF files name it scale_linear.
    name = prefix + "factor" if prefix + "factor" in read.raw else f"{read.family}.rope.scale_linear"
    factor = read.number(name, 1.0, low=-1e-9) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return RopeConfig(**values)
    if factor < 1:
        read.fail(name, factor, "at least 1, the ratio of the new context to the old")
    if kind == "linear":
        return RopeConfig(type="linear", factor=factor, **values)
    # yarn_attn_factor, written by convert_hf_to_gguf.py, replaces the formula's factor; attn_factor multiplies it.
    attention = read.optional(prefix + "yarn_attn_factor", low=0.0)
    if attention is None:
        multiplier = read.number(prefix + "yarn_log_multiplier", 0.0, low=-1e-9)
        attention = (0.1 * math.log(factor) + 1.0) / (0.1 * max(multiplier, 0.0) * math.log(factor) + 1.0)
    return RopeConfig(
        type="yarn",
        factor=factor,
        original_max_position_embeddings=read.integer(prefix + "original_context_length", positions),
        attention_factor=attention * read.number(prefix + "attn_factor", 1.0, low=0.0),
        beta_fast=read.number(prefix + "yarn_beta_fast", 32.0, low=0.0),
        beta_slow=read.number(prefix + "yarn_beta_slow", 1.0, low=0.0),
        truncate=True,
        **values,
    )


def _dtype(read: _Reader) -> str:
    name = "dtype" if read.get("dtype", None) is not None else "torch_dtype"
    value = read.get(name, None)
    if value is None or value == "auto":
        return "float32"  # torch's default
    found = value.removeprefix("torch.") if isinstance(value, str) else value
    if found not in DTYPES:
        read.fail(name, value, f"one of {', '.join(DTYPES)}")
    return found


@_collects((), needs=frozenset({"num_hidden_layers"}))
def _unrotated_layers(read: _Reader, architecture: Architecture, layers: int) -> tuple[int, ...]:
    """Layers without rotary embedding: zeros of `no_rope_layers`, else every `no_rope_layer_interval`-th."""
    if not architecture.unrotated_every:
        return ()
    flags = read.get("no_rope_layers", None)
    if flags is None:
        return default_unrotated(architecture, layers, read.integer("no_rope_layer_interval", architecture.unrotated_every))
    if not isinstance(flags, list) or len(flags) < layers or any(flag not in (0, 1) for flag in flags):
        read.fail("no_rope_layers", flags, f"a list of {layers} numbers, 0 for a layer without rotary embedding, else 1")
    return tuple(i for i in range(layers) if not flags[i])


def default_unrotated(architecture: Architecture, layers: int, every: int | None = None) -> tuple[int, ...]:
    """Layers without rotary embedding where no field names them: those of the GGUF format."""
    every = every or architecture.unrotated_every
    return tuple(range(every - 1, layers, every)) if every else ()


def _multipliers(read: _Reader, architecture: Architecture, hidden: int) -> dict[str, float | None]:
    """Granite's and Gemma's factors as fields of LlamaConfig."""
    found: dict[str, float | None] = {"embedding_multiplier": hidden**0.5} if architecture.scales_embedding else {}
    if architecture.softcaps is not None:
        if read.get("use_bidirectional_attention", None):
            read.fail("use_bidirectional_attention", True, "false, since tokens see those before them alone")
        caps = [read.optional(name, low=0.0) if name in read.raw else default
                for name, default in architecture.softcaps.items()]
        found |= {"attention_softcap": caps[0], "logits_softcap": caps[1],
                  "attention_multiplier": read.number("query_pre_attn_scalar", 256, low=0.0) ** -0.5}
    if not architecture.multipliers:
        return found
    found = {name: read.number(name, 1.0, low=0.0)
             for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier")}
    return found | {"logits_multiplier": 1 / read.number("logits_scaling", 1.0, low=0.0)}


def gguf_attention_multiplier(architecture: Architecture, hidden: int, heads: int, head_dim: int, layers: int) -> float:
    """llama.cpp's factor on query times key where the file names none."""
    return (hidden // heads if layers == architecture.gguf_scale_layers else head_dim) ** -0.5


def _gguf_multipliers(read: _Reader, architecture: Architecture, hidden: int, heads: int, head_dim: int,
                      layers: int) -> dict[str, float | None]:
    """The same of a GGUF file, where 0 means none."""
    found: dict[str, float | None] = {"embedding_multiplier": hidden**0.5} if architecture.scales_embedding else {}
    if architecture.softcaps is not None:
        found["attention_multiplier"] = gguf_attention_multiplier(architecture, hidden, heads, head_dim, layers)
        for name, field in (("attention_softcap", "attn_logit_softcapping"), ("logits_softcap", "final_logit_softcapping")):
            default = architecture.softcaps[field] or 0.0
            found[name] = read.number(f"{read.family}.{field}", default, low=-1e-9) or None
    if not architecture.multipliers:
        return found
    factors = {name: read.number(f"{read.family}.{name}", 0.0, low=-1e-9) or None
               for name in ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")}
    return {"embedding_multiplier": factors["embedding_scale"] or 1.0, "residual_multiplier": factors["residual_scale"] or 1.0,
            "attention_multiplier": factors["attention.scale"], "logits_multiplier": 1 / (factors["logit_scale"] or 1.0)}


@_collects((None, None), needs=frozenset({"num_hidden_layers"}))
def _sliding_window(read: _Reader, architecture: Architecture, layers: int,
                    unrotated: tuple[int, ...]) -> tuple[int | None, tuple[int, ...] | None]:
    """Read (window or None, numbers of the layers with it; None for all)."""
    window, sliding, kind = None, None, architecture.window
    if kind == "every" and read.get("sliding_window", 1) is None:
        read.fail("sliding_window", None, "a whole number from 1")
    if kind not in ("none", "from", "unrotated", "switched") or kind != "none" and read.boolean("use_sliding_window", False):
        window = read.integer("sliding_window", architecture.defaults["sliding_window"], nullable=True)
    if window and kind == "from":
        full = read.get("max_window_layers", architecture.defaults["max_window_layers"])
        if isinstance(full, bool) or not isinstance(full, int) or full < 0:
            read.fail("max_window_layers", full, "a whole number from 0")
        sliding = tuple(range(min(full, layers), layers))
    if window and kind == "unrotated":
        sliding = unrotated
    if window and kind == "every":
        every = read.get("sliding_window_pattern", architecture.window_every)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            read.fail("sliding_window_pattern", every, "a whole number from 1")
        sliding = default_sliding(layers, every)
    kinds = read.get("layer_types", None)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            read.fail("layer_types", kinds, f"a list of {layers} names, one per layer")
        if window and kind in _FREE_WINDOWS:
            for i, one in enumerate(kinds):
                if one not in ("full_attention", "sliding_attention"):
                    read.fail(f"layer_types[{i}]", one, "'full_attention' or 'sliding_attention'")
            sliding = tuple(i for i, one in enumerate(kinds) if one == "sliding_attention")
            sliding = None if kind == "types" and len(sliding) == layers else sliding
        slides = range(layers) if window and sliding is None else sliding or ()
        expected = ["sliding_attention" if i in slides else "full_attention" for i in range(layers)]
        other = next((i for i, one in enumerate(kinds) if one != expected[i]), None)
        if other is not None:
            read.fail(
                f"layer_types[{other}]",
                kinds[other],
                f"{expected[other]!r}, since {architecture.name} has sliding_window {window or 'null'}"
                + (f" in its last {len(sliding)} layers" if kind == "from" and sliding else ""),
            )
    return (None, None) if sliding == () else (window, sliding)


_FREE_WINDOWS = ("unrotated", "every", "types")  # kinds of Architecture.window that `layer_types` may change


def _longrope(read: _Reader, rope: _Reader, positions: int, pairs: int) -> dict[str, Any]:
    """Parameters of type "longrope" (Ding et al. 2024, arXiv 2402.13753), as transformers' _compute_longrope_parameters."""
    values: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        if not isinstance(factors, list) or len(factors) != pairs or not all(
                isinstance(one, (int, float)) and not isinstance(one, bool) and 0 < one < math.inf for one in factors):
            rope.fail(name, factors, f"{pairs} numbers above 0, one for each rotated pair of a head")
        values[name] = tuple(map(float, factors))
    reader = read if read.get("original_max_position_embeddings", None) is not None else rope
    original = reader.integer("original_max_position_embeddings", positions)
    factor = rope.optional("factor", low=0.0) or positions / original
    attention = rope.optional("attention_factor", low=0.0)
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return values | {"original_max_position_embeddings": original, "attention_factor": attention}


# Fields of unsupported rope variants
_ROPE_FOREIGN = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta")


def _query_beta(read: _Reader, rope: RopeConfig) -> float:
    fields = _Reader(read.get("rope_parameters", None) or {}, read.source, "rope_parameters.", read.report)
    beta = fields.optional("llama_4_scaling_beta", low=-1e-9) or 0.0
    if beta and rope.original_max_position_embeddings is None:
        fields.fail("llama_4_scaling_beta", beta, "nothing, since rope_type names no trained length")
    return beta


def _ropes(read: _Reader, positions: int, head_dim: int, architecture: Architecture) -> dict[str, Any]:
    """The fields `rope`, `local_rope` and `query_beta` of LlamaConfig. Gemma 3 has two ropes, in one of two spellings."""
    if architecture.local_theta is None:
        found = {"rope": _rope(read, positions, head_dim, architecture)}
        return found | {"query_beta": _query_beta(read, found["rope"])} if architecture.scales_queries else found
    spellings = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")
    others = {name: value for name, value in read.raw.items() if name not in spellings}
    both = read.get("rope_parameters", None)
    if isinstance(both, dict) and any(isinstance(value, dict) for value in both.values()):
        for name in both:
            if name not in ("full_attention", "sliding_attention"):
                read.fail(f"rope_parameters.{name}", both[name], "nothing beside full_attention and sliding_attention")
        whole = {"rope_parameters": both.get("full_attention"), "rope_scaling": read.get("rope_scaling", None)}
        local = {"rope_parameters": both.get("sliding_attention")}
    else:
        whole = {name: read.raw[name] for name in spellings[:3] if name in read.raw}
        local = {"rope_theta": read.raw["rope_local_base_freq"]} if "rope_local_base_freq" in read.raw else {}
    reader = _Reader(others | whole, read.source, report=read.report)
    local_reader = _Reader(others | local, read.source, report=read.report)
    return {"rope": _rope(reader, positions, head_dim, architecture),
            "local_rope": _rope(local_reader, positions, head_dim,
                                dataclasses.replace(architecture, theta=architecture.local_theta))}


@_collects(RopeConfig())
def _rope(read: _Reader, positions: int, head_dim: int, architecture: Architecture) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, which contains both.

    Precedence as in transformers' convert_rope_params_to_dict: rope_scaling before rope_parameters, and the inner
    rope_theta before the outer.
    """
    spelling = "rope_scaling" if read.get("rope_scaling", None) else "rope_parameters"
    found = read.get(spelling, None)
    rope = _Reader({} if found is None else found, read.source, spelling + ".")
    dim = None
    if architecture.partial_rotation:
        reader = rope if rope.get("partial_rotary_factor", None) is not None else read
        dim = int(head_dim * reader.number("partial_rotary_factor", 1.0, low=0.0, high=1.0))
        if dim < 2 or dim % 2:
            reader.fail("partial_rotary_factor", reader.get("partial_rotary_factor"), f"an even part of {head_dim}")
    else:
        _refuse_partial(rope)
    for name, value in rope.raw.items():
        if isinstance(value, dict):
            rope.fail(name, value, "a plain value, since angles that differ between layers are not supported")
        if name == "llama_4_scaling_beta" and architecture.scales_queries:
            continue
        if name in _ROPE_FOREIGN and value is not None:
            rope.fail(name, value, "nothing, since this rope variant is not supported")
    kind = rope.get("rope_type", None) or rope.get("type", "default")
    if kind in ("su", "yarn") and rope.get("long_factor", None) is not None:
        kind = "longrope"  # its names in Phi-3's first files
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        name = "rope_type" if rope.get("rope_type", None) else "type"
        rope.fail(name, kind, f"one of {', '.join(ROPE_TYPES)}")

    reader = rope if rope.get("rope_theta", None) is not None else read
    # A theta of 1 would rotate all pairs by the same angle.
    values: dict[str, Any] = {"type": kind, "theta": reader.number("rope_theta", architecture.theta, low=1.0, high=1e15),
                              "dim": None if dim == head_dim else dim}
    if kind == "default":
        return RopeConfig(**values)
    if kind == "longrope":
        return RopeConfig(**values, **_longrope(read, rope, positions, (dim or head_dim) // 2))
    if kind in ("llama3", "yarn"):
        # The outer field has precedence in transformers.
        reader = read if read.get("original_max_position_embeddings", None) is not None else rope
        values["original_max_position_embeddings"] = reader.integer("original_max_position_embeddings", positions)
    if kind == "yarn" and rope.get("factor", None) is None:  # DeepSeek's files omit it
        values["factor"] = positions / values["original_max_position_embeddings"]
    else:
        values["factor"] = rope.number("factor", low=0.0)
    if values["factor"] < 1:
        rope.fail("factor", values["factor"], "at least 1, the ratio of the new context to the old")
    if kind == "dynamic" and head_dim < 4:
        read.fail("head_dim", head_dim, "at least 4 for rope type dynamic")
    if kind == "llama3":
        low, high = rope.number("low_freq_factor", low=0.0), rope.number("high_freq_factor", low=0.0)
        if high <= low:
            rope.fail("high_freq_factor", high, f"above low_freq_factor ({low:g})")
        values |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            values[name] = None if rope.get(name, None) in (None, 0) else rope.optional(name, low=0.0)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            values[name] = default if rope.get(name, None) in (None, 0) else rope.optional(name, low=0.0)
        values["truncate"] = rope.boolean("truncate", True)
    return RopeConfig(**values)
