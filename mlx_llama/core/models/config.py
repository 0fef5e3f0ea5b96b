"""Resolve config.json or GGUF metadata to one frozen LlamaConfig with all fields set.

The schema of config.json is transformers', from Llama 1 to the `rope_parameters` of transformers 5. Defaults are those of
its config classes (architectures.py). Fields and defaults of GGUF are llama.cpp's (src/llama-model.cpp, `load_hparams`).
Fields that ask for unsupported arithmetic raise ConfigError.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_llama.core.errors import ConfigError, LlamaError, Report, refuse

from .architectures import ARCHITECTURES, BY_GGUF, BY_MODEL_TYPE, BY_SPELLING, Architecture, find_gguf
from .spec import LayerSpec

# norm_placement: (norms before attention and MLP, norms after them). Modules are named as in transformers: Llama; OLMo 2 and
# EXAONE 4; Gemma 2.
NORM_NAMES: dict[str, tuple[tuple[str, str] | None, tuple[str, str] | None]] = {
    "before": (("input_layernorm", "post_attention_layernorm"), None),
    "after": (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # hidden_act: the name here
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
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
}
_JSON_LIMIT = 64 << 20  # bytes; a larger tokenizer.json is read by its own library
_MISSING = object()


def show(value: object, limit: int = 80) -> str:
    """The repr of a value for a one-line error, cut to `limit` characters."""
    text = ascii(value) if isinstance(value, (str, bytes)) else repr(value).replace("\n", " ")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def read_json(path: str | os.PathLike, error: type[LlamaError]) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        error: the file is missing, unreadable, too large, not UTF-8, not JSON, or not an object.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _JSON_LIMIT:
            raise error(f"{path}: {size} bytes long, expected at most {_JSON_LIMIT}; this is not a settings file")
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise error(f"{path}: no such file; fetch the model's folder again, with this file in it") from None
    except OSError as e:
        raise error(f"{path}: cannot be read ({e.strerror or e}); check its permissions") from None
    except UnicodeDecodeError as e:
        raise error(f"{path}: not UTF-8 at byte {e.start}, expected JSON text; fetch the file again") from None
    except (ValueError, RecursionError) as e:
        reason = "nested too deeply" if isinstance(e, RecursionError) else e
        raise error(f"{path}: not JSON ({reason}); fetch the file again") from None
    if not isinstance(value, dict):
        raise error(f"{path}: found a JSON {type(value).__name__}, expected an object with named fields")
    return value


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

    sliding_window: positions that a token sees, itself included; None for all. sliding_layers: number of layers with that
    window, counted from the last; None for all. attention_bias: of query, key and value. output_bias: of the projection
    after attention. query_key_norm: RMS norms over each head of query and key. norm_placement: "before" attention and MLP,
    "after" them, or "both". unrotated_layers: layers without rotary embedding. embedding_multiplier, logits_multiplier:
    factors on the embedding and the logits. residual_multiplier: on the output of attention and MLP.
    attention_multiplier: on query times key; None for 1 / sqrt(head_dim). activation: "silu" or "gelu_tanh". dtype: of the
    checkpoint, as the config names it. quantization: None for plain matrices and for GGUF, whose tensors name their formats.
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
    query_key_norm: bool = False
    sliding_layers: int | None = None
    activation: str = "silu"
    norm_placement: str = "before"
    unrotated_layers: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_multiplier: float = 1.0

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Specs of all layers, in order."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    def _layer(self, i: int) -> LayerSpec:
        layer = f"model.layers.{i}."
        norms = self.query_key_norm
        before, after = NORM_NAMES[self.norm_placement]
        slides = self.sliding_layers is None or i >= self.num_hidden_layers - self.sliding_layers
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
            gate_up=(f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj"),
            down=f"{layer}mlp.down_proj",
            query_norm=f"{layer}self_attn.q_norm" if norms else None,
            key_norm=f"{layer}self_attn.k_norm" if norms else None,
            rotates=i not in self.unrotated_layers,
            window=self.sliding_window if slides else None,
            post_attention_norm=after and f"{layer}{after[0]}",
            post_ffn_norm=after and f"{layer}{after[1]}",
            attention_multiplier=self.attention_multiplier,
            residual_multiplier=self.residual_multiplier,
            activation=self.activation,
        )

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
        architecture = _architecture(read)
        default = architecture.defaults
        _refuse_partial(read)

        hidden = read.integer("hidden_size")
        layers = read.integer("num_hidden_layers")
        heads = read.integer("num_attention_heads")
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
        vocab = read.integer("vocab_size")
        biases = {name: read.boolean(name, False) for name in ("attention_bias", "mlp_bias")}
        if architecture.mlp_bias is False and biases["mlp_bias"]:
            read.fail("mlp_bias", True, f"false, since {architecture.name} has no such biases")
        if architecture.qkv_bias is False and biases["attention_bias"]:
            # transformers' class ignores the field; a config that sets it is of another model.
            read.fail("attention_bias", True, f"false, since {architecture.name} has no such biases")
        window, sliding_layers = _sliding_window(read, architecture, layers)
        config = cls(
            architecture=architecture.name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6, low=0.0, high=1.0),
            max_position_embeddings=positions,
            rope=_rope(read, positions, head_dim),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
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
            activation=_activation(read),
        )
        if not read.failed:
            _check_quantized_modules(config, source)
        return config

    @classmethod
    def from_gguf(
        cls,
        metadata: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        divisors: tuple[float, ...] | None,
        dtype: str,
        source: str,
    ) -> LlamaConfig:
        """Resolve the metadata and tensor shapes of a GGUF file.

        Args:
            metadata: {key: value}, arrays of numbers as lists (their first 4097 are enough), of text as any sequence.
            shapes: of the tensors, by Hugging Face name. They give the vocabulary's size, and whether the model has an
                output head and biases.
            divisors: values of the tensor rope_freqs.weight; None if there is none.
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
        for name in ("attention.value_length", "rope.dimension_count"):
            if read.gguf(name, "head_dim", head_dim) != head_dim:
                read.fail(f"{family}.{name}", metadata[f"{family}.{name}"], f"{head_dim}, the size of a head")
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        embedding = shapes.get("model.embed_tokens.weight")
        vocab = embedding[0] if embedding else read.gguf("vocab_size", "vocab_size", len(tokens) or None)
        if isinstance(tokens, (str, int, float)) or len(tokens) > vocab or not 1 <= vocab <= _LIMITS["vocab_size"]:
            read.fail("tokenizer.ggml.tokens", tokens, f"at most {vocab} tokens, the rows of token_embd.weight")
        positions = read.gguf("context_length", "max_position_embeddings")
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
        # Some writers store -1 (no token) as an unsigned number.
        bos, *ends = (None if metadata.get(key) == 0xFFFFFFFF else read.token(key, None, vocab) for key in keys)
        return cls(
            architecture=architecture.name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=read.gguf("feed_forward_length", "intermediate_size"),
            num_hidden_layers=read.gguf("block_count", "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=read.number(f"{family}.attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
            max_position_embeddings=positions,
            rope=_gguf_rope(read, positions, head_dim, divisors),
            tie_word_embeddings="lm_head.weight" not in shapes,
            attention_bias=any(name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in shapes),
            mlp_bias=any(".mlp." in name and name.endswith(".bias") for name in shapes),
            sliding_window=_gguf_window(read, architecture, positions),
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
            dtype=dtype,
            output_bias=any(name.endswith("o_proj.bias") for name in shapes),
            query_key_norm=architecture.query_key_norm,
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors of the checkpoint, by Hugging Face name. Matrices are [out, in], as in torch.nn.Linear."""
        d, ffn, vocab = self.hidden_size, self.intermediate_size, self.vocab_size
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
            for name in filter(None, (spec.query_norm, spec.key_norm)):
                shapes[f"{name}.weight"] = (self.head_dim,)
            matrices(spec.gate_up, (ffn, ffn), d, self.mlp_bias)
            matrices((spec.down,), (d,), ffn, self.mlp_bias)
            for name in filter(None, (spec.attention_norm, spec.ffn_norm, spec.post_attention_norm, spec.post_ffn_norm)):
                shapes[f"{name}.weight"] = (d,)
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocab, d)
        return shapes


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


def _activation(read: _Reader) -> str:
    name = read.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        read.fail("hidden_act", name, f"one of {', '.join(ACTIVATIONS)}")
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
    shapes = config.tensor_shapes()
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
    architecture = find_gguf(name)
    if architecture is None:
        raise ConfigError(
            f"{read.source}: general.architecture is {show(name)}, supported are {', '.join(map(repr, sorted(BY_GGUF)))}; "
            "load another model"
        )
    for field, neutral in _GGUF_NEUTRAL.items():
        value = read.get(f"{name}.{field}", neutral[0])
        if not isinstance(value, (bool, int, float)) or value not in neutral:
            read.fail(f"{name}.{field}", value, f"{' or '.join(map(str, neutral))}, since nothing else is supported")
    return architecture


def _gguf_window(read: _Reader, architecture: Architecture, positions: int) -> int | None:
    window = read.gguf("attention.sliding_window", "sliding_window", None, low=0) or None  # 0 means none
    if window and architecture.window == "from":
        if window < positions:  # llama.cpp ignores the window here, and the file does not list its layers
            read.fail(f"{read.family}.attention.sliding_window", window, f"0 or at least {positions}, the context's length")
        return None
    return window


def _gguf_rope(read: _Reader, positions: int, head_dim: int, divisors: tuple[float, ...] | None) -> RopeConfig:
    prefix = f"{read.family}.rope.scaling."
    if divisors is not None and (len(divisors) != head_dim // 2 or not all(0 < one < math.inf for one in divisors)):
        read.fail("rope_freqs.weight", divisors, f"{head_dim // 2} numbers above 0, one for each pair of a head")
    values: dict[str, Any] = {
        "theta": read.number(f"{read.family}.rope.freq_base", 10000.0, low=1.0, high=1e15),
        "divisors": divisors,
    }
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
        attention = 0.1 * math.log(factor) + 1.0
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


@_collects((None, None), needs=frozenset({"num_hidden_layers"}))
def _sliding_window(read: _Reader, architecture: Architecture, layers: int) -> tuple[int | None, int | None]:
    """Read (window or None, number of layers with it, counted from the last; None for all)."""
    window, sliding = None, None
    if architecture.window == "all" or architecture.window == "from" and read.boolean("use_sliding_window", False):
        window = read.integer("sliding_window", architecture.defaults["sliding_window"], nullable=True)
    if window and architecture.window == "from":
        full = read.get("max_window_layers", architecture.defaults["max_window_layers"])
        if isinstance(full, bool) or not isinstance(full, int) or full < 0:
            read.fail("max_window_layers", full, "a whole number from 0")
        sliding = max(0, layers - full)
        if not sliding:
            window = sliding = None
    kinds = read.get("layer_types", None)
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            read.fail("layer_types", kinds, f"a list of {layers} names, one per layer")
        first = layers if not window else 0 if sliding is None else layers - sliding
        expected = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
        other = next((i for i, kind in enumerate(kinds) if kind != expected[i]), None)
        if other is not None:
            read.fail(
                f"layer_types[{other}]",
                kinds[other],
                f"{expected[other]!r}, since {architecture.name} has sliding_window {window or 'null'}"
                + (f" in its last {sliding} layers" if sliding is not None else ""),
            )
    return window, sliding


# Fields of unsupported rope variants
_ROPE_FOREIGN = ("short_factor", "long_factor", "mrope_section", "mrope_interleaved", "llama_4_scaling_beta")


@_collects(RopeConfig())
def _rope(read: _Reader, positions: int, head_dim: int) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters`, which contains both.

    Precedence as in transformers' convert_rope_params_to_dict: rope_scaling before rope_parameters, and the inner
    rope_theta before the outer.
    """
    spelling = "rope_scaling" if read.get("rope_scaling", None) else "rope_parameters"
    found = read.get(spelling, None)
    rope = _Reader({} if found is None else found, read.source, spelling + ".")
    _refuse_partial(rope)
    for name, value in rope.raw.items():
        if isinstance(value, dict):
            rope.fail(name, value, "a plain value, since angles that differ between layers are not supported")
        if name in _ROPE_FOREIGN and value is not None:
            rope.fail(name, value, "nothing, since this rope variant is not supported")
    kind = rope.get("rope_type", None) or rope.get("type", "default")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        name = "rope_type" if rope.get("rope_type", None) else "type"
        rope.fail(name, kind, f"one of {', '.join(ROPE_TYPES)}")

    reader = rope if rope.get("rope_theta", None) is not None else read
    # A theta of 1 would rotate all pairs by the same angle.
    values: dict[str, Any] = {"type": kind, "theta": reader.number("rope_theta", 10000.0, low=1.0, high=1e15)}
    if kind == "default":
        return RopeConfig(**values)
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
