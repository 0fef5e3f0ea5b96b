"""Packing of an MLX checkpoint's matrices, as its config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_llama.core.errors import ConfigError, show

from .foreign import REQUANTIZE, Float8Quantization, PackedQuantization, read_foreign
from .reader import Reader

# Widths and groups of mx.quantize, mode "affine"
# (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html)
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
QUANTIZED_GROUPS = (32, 64, 128)
# {mode: (bits, group size)} of its other modes, whose codes are floating-point numbers
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
_MODES = ("affine", *FLOAT_MODES)
_SETTINGS = ("bits", "group_size", "mode")


class Packing(NamedTuple):
    """Settings of mx.quantize."""

    bits: int  # width of a code
    group_size: int  # codes that share a scale and, in mode "affine", a bias
    mode: str = "affine"

    def __str__(self) -> str:
        if self.mode != "affine":
            return self.mode
        return f"{self.bits} bits, groups of {self.group_size}"


@dataclass(frozen=True)
class Quantization:
    """Packing of a safetensors checkpoint's matrices by mx.quantize."""

    packing: Packing
    # (module, packing) of modules with other settings, (module, None) of modules that are not
    # quantised. Others are quantised if the file has their scales.
    layers: tuple[tuple[str, Packing | None], ...] = ()


def read_quantization(
    read: Reader,
) -> Quantization | PackedQuantization | Float8Quantization | None:
    """Read mlx_lm.convert's {"group_size", "bits", "mode"}, and settings of single modules.

    A module's settings stand under its name: "model.layers.0.mlp.down_proj": {"group_size", "bits"}
    or false. The field is written twice, the second time as "quantization_config" for the hub. As
    in mlx_lm, another quantization_config beside it has no effect. Alone it is another quantiser's.
    """
    raw, other = read.get("quantization", None), read.get("quantization_config", None)
    method = other.get("quant_method", other) if isinstance(other, dict) else other
    if method == "mxfp4" and raw is None:  # gpt-oss as published: the tensors' names say so
        return None
    if other is not None and raw is None:
        return read_foreign(read, other)
    if raw is None:
        return None
    whole = read.inner(raw, "quantization.")
    packing = _read_packing(whole, whole.get("bits"), whole.get("group_size"))
    layers: list[tuple[str, Packing | None]] = []
    for name, value in whole.raw.items():
        shown = show(name)[1:-1]
        if name in _SETTINGS:
            continue
        if isinstance(value, bool):
            layers.append((name, packing if value else None))
        elif isinstance(value, dict):
            layer = read.inner(value, f"quantization.{shown}.")
            # mlx_lm takes mx.quantize's defaults here, not the model's settings.
            default = FLOAT_MODES.get(str(layer.get("mode", "affine")), (4, 64))
            bits, group_size = layer.get("bits", default[0]), layer.get("group_size", default[1])
            layers.append((name, _read_packing(layer, bits, group_size)))
            known = f"nothing, since only {', '.join(_SETTINGS)} are known"
            for field in (field for field in value if field not in _SETTINGS):
                layer.fail(show(field)[1:-1], value[field], known)
        else:
            expected = (
                "true, false or an object with bits and group_size, for a module of that name"
            )
            whole.fail(shown, value, expected)
    return Quantization(packing, tuple(layers))


def check_modules(
    quantization: Quantization, shapes: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Check that listed modules have a matrix whose rows their groups divide. shapes: stored."""
    for module, packing in quantization.layers:
        shape = shapes.get(module + ".weight", ())
        if len(shape) != 2:
            raise ConfigError(
                f"{source}: quantization.{show(module)[1:-1]} names a module that has no matrix in "
                "this model; correct the file"
            )
        if packing and shape[1] % packing.group_size:
            raise ConfigError(
                f"{source}: quantization.{module}.group_size is {packing.group_size}, which does "
                f"not divide the rows of {module}.weight {list(shape)}; correct the file"
            )


def _read_packing(read: Reader, bits: Any, group_size: Any) -> Packing:
    """Check mode, bits and group_size."""
    mode = read.get("mode", "affine")
    if mode not in _MODES:
        read.fail("mode", mode, f"one of {', '.join(_MODES)}; {REQUANTIZE}")
        mode = "affine"
    allowed: tuple[tuple[int, ...], ...] = QUANTIZED_BITS, QUANTIZED_GROUPS
    if mode in FLOAT_MODES:
        allowed = tuple((value,) for value in FLOAT_MODES[mode])
    for name, value, choices in zip(("bits", "group_size"), (bits, group_size), allowed):
        if isinstance(value, bool) or not isinstance(value, int) or value not in choices:
            listed = f"one of {', '.join(map(str, choices))}"
            read.fail(name, value, listed if len(choices) > 1 else f"{choices[0]} for {mode}")
    return Packing(bits, group_size, mode)
