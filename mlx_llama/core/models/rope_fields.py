"""RopeConfig, and its fields in config.json and in GGUF metadata. The formulas are in rope.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_llama.core.models.families.family import Family

from .fields import Reader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
UNROTATED = 1e30  # divisor of the frequencies of pairs that are not rotated, in GGUF files
_MAX_THETA = 1e15
_LAYER_KINDS = ("full_attention", "sliding_attention")
# fields of unsupported variants
_FOREIGN = ("mrope_section", "mrope_interleaved", "llama_4_scaling_beta")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: its type, and the parameters, None where the type has none."""

    type: str = "default"
    theta: float = 10000.0  # base of the frequencies
    factor: float | None = None
    original_max_position_embeddings: int | None = None  # trained positions before scaling
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    # divide the frequencies, one per pair (GGUF's rope_freqs.weight)
    divisors: tuple[float, ...] | None = None
    # divisors of type "longrope" up to the trained positions
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None  # beyond them
    # leading dimensions of a head that are rotated, or a global head's where it differs; None: all
    dim: int | None = None
    share: float | None = None  # type "proportional": of the pairs, those that are rotated


def read_ropes(
    read: Reader, family: Family, positions: int, head_dims: tuple[int, int]
) -> dict[str, Any]:
    """The fields `rope`, `local_rope` and Ministral 3's `query_beta`, from config.json. Two ropes
    are `rope_parameters.full_attention` and `.sliding_attention`, or one and the other's base.
    head_dims: of layers with a window, and of the others.
    """
    local_dim, head_dim = head_dims

    def attempt(reader: Reader, theta: float, head_dim: int = head_dim) -> RopeConfig:
        rope = reader.attempt(
            lambda: _read_rope(reader, family, theta, positions, head_dim), otherwise=RopeConfig()
        )
        return rope if head_dim == local_dim else replace(rope, dim=rope.dim or head_dim)

    if family.local_theta is None:
        rope = attempt(read, family.theta)
        more = {"query_beta": _read_query_beta(read, rope)} if family.scales_queries else {}
        return {"rope": rope} | more
    local_name, local_theta = family.local_theta
    spellings = ("rope_parameters", "rope_scaling", "rope_theta", local_name)
    others = {name: value for name, value in read.raw.items() if name not in spellings}
    both = read.get("rope_parameters", None) or family.defaults.get("rope_parameters")
    if isinstance(both, dict) and any(isinstance(value, dict) for value in both.values()):
        expected = f"nothing beside {' and '.join(_LAYER_KINDS)}"
        for name in (name for name in both if name not in _LAYER_KINDS):
            read.fail(f"rope_parameters.{name}", both[name], expected)
        whole = {
            "rope_parameters": both.get("full_attention"),
            "rope_scaling": read.get("rope_scaling", None),
        }
        local = {"rope_parameters": both.get("sliding_attention")}
    else:
        whole = {name: read.raw[name] for name in spellings[:3] if name in read.raw}
        local = {"rope_theta": read.raw[local_name]} if local_name in read.raw else {}
    return {
        "rope": attempt(read.inner(others | whole), family.theta),
        "local_rope": attempt(read.inner(others | local), local_theta or family.theta, local_dim),
    }


def _read_query_beta(read: Reader, rope: RopeConfig) -> float:
    name, raw = "llama_4_scaling_beta", read.get("rope_parameters", None) or {}
    fields = read.inner(raw, "rope_parameters.")
    beta = fields.number(name) if fields.get(name, None) not in (None, 0) else 0.0
    if beta and rope.original_max_position_embeddings is None:
        fields.fail(name, beta, "nothing, since rope_type names no trained length")
    return beta


def _read_rope(
    read: Reader, family: Family, theta: float, positions: int, head_dim: int
) -> RopeConfig:
    """Read `rope_theta` and `rope_scaling`, or `rope_parameters` for both. theta: default.
    Precedence as in transformers' convert_rope_params_to_dict: rope_scaling before rope_parameters,
    and the inner rope_theta before the outer.
    """
    spelling = "rope_scaling" if read.get("rope_scaling", None) else "rope_parameters"
    raw = read.get(spelling, None)
    if raw is None and (usual := family.defaults.get(spelling)):
        raw = usual | {"rope_theta": read.get("rope_theta", None) or theta}
    rope = read.inner({} if raw is None else raw, spelling + ".")

    def holder(name: str, first: Reader) -> Reader:
        """The reader that has the field: `first` unless the field is missing or null there."""
        return first if first.get(name, None) is not None else rope if first is read else read

    dim = head_dim
    if family.partial_rotation:
        reader = holder("partial_rotary_factor", rope)
        default = family.defaults.get("partial_rotary_factor", 1.0)
        dim = int(head_dim * reader.number("partial_rotary_factor", default, high=1.0))
        if dim < 2 or dim % 2:
            factor = reader.get("partial_rotary_factor")
            reader.fail("partial_rotary_factor", factor, f"an even part of {head_dim}")
    elif rope.get("rope_type", None) != "proportional":
        rope.refuse("partial_rotary_factor", [1], reason="only whole heads are rotated")
    foreign: Sequence[str] = _FOREIGN[:-1] if family.scales_queries else _FOREIGN
    foreign = foreign[2:] if family.has_sections else foreign
    for name, value in rope.raw.items():
        if isinstance(value, dict):
            expected = "a plain value, since angles that differ between layers are not supported"
            rope.fail(name, value, expected)
        if name in foreign and value is not None:
            rope.fail(name, value, "nothing, since this rope variant is not supported")
    kind = rope.get("rope_type", None) or rope.get("type", "default")
    if kind in ("su", "yarn") and rope.get("long_factor", None) is not None:
        kind = "longrope"  # its names in Phi-3's first files
    if kind not in ROPE_TYPES:
        name = "rope_type" if rope.get("rope_type", None) else "type"
        rope.fail(name, kind, f"one of {', '.join(ROPE_TYPES)}")

    # A theta of 1 would rotate all pairs by the same angle.
    values: dict[str, Any] = {
        "type": kind,
        "dim": None if dim == head_dim else dim,
        "theta": holder("rope_theta", rope).number("rope_theta", theta, 1.0, _MAX_THETA),
    }
    if kind == "dynamic" and family.stretches_theta and rope.get("alpha", None):
        # a fixed base, whatever the length (ntk_alpha of transformers' class)
        stretch = rope.number("alpha") ** (head_dim / (head_dim - 2))
        kind, values["type"] = "default", "default"
        values["theta"] *= stretch
    if kind == "default":
        return RopeConfig(**values)
    if kind == "proportional":
        share = rope.number("partial_rotary_factor", 1.0, high=1.0)
        return RopeConfig(**values, share=share, factor=rope.number("factor", None))
    if kind in ("llama3", "yarn", "longrope"):
        # The outer field has precedence in transformers.
        trained = holder("original_max_position_embeddings", read).integer(
            "original_max_position_embeddings", positions
        )
        values["original_max_position_embeddings"] = trained
    if kind == "longrope":
        return RopeConfig(**values, **_read_longrope(rope, positions, trained, dim // 2))
    if kind == "yarn" and rope.get("factor", None) is None:  # DeepSeek's files omit it
        values["factor"] = positions / trained
    else:
        values["factor"] = rope.number("factor")
    if values["factor"] < 1:
        rope.fail("factor", values["factor"], "at least 1, the ratio of the new context to the old")
    if kind == "dynamic" and head_dim < 4:
        read.fail("head_dim", head_dim, "at least 4 for rope type dynamic")
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high < low:
            rope.fail("high_freq_factor", high, f"at least low_freq_factor ({low:g})")
        values |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0}
        for name in ("attention_factor", "mscale", "mscale_all_dim", *defaults):
            is_set = rope.get(name, None) not in (None, 0)
            values[name] = rope.number(name) if is_set else defaults.get(name)
        values["truncate"] = rope.boolean("truncate", True)
    return RopeConfig(**values)


def _read_longrope(rope: Reader, positions: int, trained: int, pairs: int) -> dict[str, Any]:
    """Parameters of "longrope" (arXiv 2402.13753; transformers' _compute_longrope_parameters)."""
    values: dict[str, Any] = {}
    for name in ("short_factor", "long_factor"):
        factors = rope.get(name)
        is_list = isinstance(factors, list) and {*map(type, factors)} <= {int, float}
        if not is_list or len(factors) != pairs or not all(0 < x < math.inf for x in factors):
            expected = f"{pairs} numbers above 0, one for each rotated pair of a head"
            rope.fail(name, factors, expected)
        values[name] = tuple(map(float, factors))
    factor = rope.number("factor", None) or positions / trained
    attention = rope.number("attention_factor", None)
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return values | {"attention_factor": attention}


def read_gguf_ropes(
    read: Reader,
    family: Family,
    positions: int,
    head_dims: tuple[int, int],
    divisors: Mapping[str, tuple[float, ...]],
) -> dict[str, Any]:
    """The fields `rope` and `local_rope` of LlamaConfig. head_dims: as of read_ropes. divisors: as
    of LlamaConfig.from_gguf.
    """
    local_dim, head_dim = head_dims
    if (dim := read.integer("rope.dimension_count_swa", local_dim)) != local_dim:
        read.fail("rope.dimension_count_swa", dim, f"{local_dim}, the size of a head")
    dim = read.integer("rope.dimension_count", head_dim)
    if dim != head_dim and not (family.partial_rotation and dim < head_dim and dim % 2 == 0):
        read.fail("rope.dimension_count", dim, f"{head_dim}, the size of a head")
    for key, factors in divisors.items():
        if len(factors) != dim // 2 or not all(0 < factor < math.inf for factor in factors):
            name = f"rope_factors_{key}.weight" if key else "rope_freqs.weight"
            read.fail(name, factors, f"{dim // 2} numbers above 0, one for each pair of a head")
    values: dict[str, Any] = {
        "theta": read.number("rope.freq_base", 10000.0, 1.0, _MAX_THETA),
        "divisors": divisors.get(""),
        "dim": dim if dim != local_dim else None,
    }
    factors = divisors.get("", ())
    kept = factors.count(1.0)
    if kept < len(factors) and min(factors[kept:]) > 0.99 * UNROTATED:
        values |= {"type": "proportional", "share": 2 * kept / dim, "divisors": None}
    local = None
    if family.local_theta is not None:
        theta = family.local_theta[1] or values["theta"]
        local = RopeConfig(theta=read.number("rope.freq_base_swa", theta, 1.0, _MAX_THETA))
    return {
        "rope": RopeConfig(**values | _read_gguf_scaling(read, family, positions, divisors)),
        "local_rope": local,
    }


def _read_gguf_scaling(
    read: Reader, family: Family, positions: int, divisors: Mapping[str, tuple[float, ...]]
) -> dict[str, Any]:
    prefix = "rope.scaling."

    def read_trained() -> int:
        return read.integer(prefix + "original_context_length", positions)

    if "short" in divisors and "long" in divisors:
        return {
            "type": "longrope",
            "short_factor": divisors["short"],
            "long_factor": divisors["long"],
            "original_max_position_embeddings": read_trained(),
            "attention_factor": read.number(prefix + "attn_factor", 1.0),
        }
    if "short" in divisors or "long" in divisors:
        both = "both tensors rope_factors_short.weight and rope_factors_long.weight"
        read.fail(prefix + "type", "longrope", both)
    kind = read.get(prefix + "type", "linear")
    if kind not in ("none", "linear", "yarn"):
        read.fail(prefix + "type", kind, "none, linear or yarn")
    # 0 means no scaling. The first GGUF files name it scale_linear.
    name = prefix + "factor" if prefix + "factor" in read.raw else "rope.scale_linear"
    factor = read.number(name, 1.0, low=-1e-9) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if factor < 1:
        read.fail(name, factor, "at least 1, the ratio of the new context to the old")
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    # yarn_attn_factor replaces the formula's factor; attn_factor multiplies it.
    attention = read.number(prefix + "yarn_attn_factor", None)
    if attention is None:
        multiplier = max(read.number(prefix + "yarn_log_multiplier", 0.0, low=-1e-9), 0.0)
        growth = math.log(factor)
        attention = (0.1 * growth + 1.0) / (0.1 * multiplier * growth + 1.0)
    return {
        "type": "yarn",
        "factor": factor,
        "truncate": family.truncates_yarn,
        "original_max_position_embeddings": read_trained(),
        "attention_factor": attention * read.number(prefix + "attn_factor", 1.0),
        "beta_fast": read.number(prefix + "yarn_beta_fast", 32.0),
        "beta_slow": read.number(prefix + "yarn_beta_slow", 1.0),
    }
