"""Packing of an MLX checkpoint's matrices, as its config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.errors import ConfigError, show

from .foreign import Float8Quantization, PackedQuantization, read_foreign
from .reader import Reader

# Widths and groups of mx.quantize, mode "affine"
# (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html)
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
QUANTIZED_GROUPS = (32, 64, 128)
_SETTINGS = ("bits", "group_size", "mode")
_REQUANTIZE = (
    "load the unquantised version of this model, or one that mlx_lm.convert -q or llama.cpp has "
    "quantised"
)


@dataclass(frozen=True)
class Quantization:
    """Packing of a safetensors checkpoint's matrices by mx.quantize, mode "affine"."""

    bits: int  # width of a code
    group_size: int  # codes that share a scale and a bias
    # (module, (bits, group_size)) of modules with other settings, (module, None) of modules that
    # are not quantised. Others are quantised if the file has their scales.
    layers: tuple[tuple[str, tuple[int, int] | None], ...] = ()


def read_quantization(
    read: Reader,
) -> Quantization | PackedQuantization | Float8Quantization | None:
    """Read the field that mlx_lm.convert writes: {"group_size", "bits", "mode"}, and settings of
    single modules.

    A module's settings stand under its name: "model.layers.0.mlp.down_proj": {"group_size", "bits"}
    or false. The field is written twice, the second time as "quantization_config" for the hub. As
    in mlx_lm, another quantization_config beside it has no effect. Alone it is another quantiser's.
    """
    raw, other = read.get("quantization", None), read.get("quantization_config", None)
    if other is not None and raw is None:
        return read_foreign(read, other)
    if raw is None:
        return None
    whole = read.inner(raw, "quantization.")
    bits, group_size = _read_packing(whole, whole.get("bits"), whole.get("group_size"))
    layers: list[tuple[str, tuple[int, int] | None]] = []
    for name, value in whole.raw.items():
        shown = show(name)[1:-1]
        if name in _SETTINGS:
            continue
        if isinstance(value, bool):
            layers.append((name, (bits, group_size) if value else None))
        elif isinstance(value, dict):
            layer = read.inner(value, f"quantization.{shown}.")
            # mlx_lm takes mx.quantize's defaults here (4, 64), not the model's settings.
            packing = _read_packing(layer, layer.get("bits", 4), layer.get("group_size", 64))
            layers.append((name, packing))
            known = f"nothing, since only {', '.join(_SETTINGS)} are known"
            for field in (field for field in value if field not in _SETTINGS):
                layer.fail(show(field)[1:-1], value[field], known)
        else:
            expected = (
                "true, false or an object with bits and group_size, for a module of that name"
            )
            whole.fail(shown, value, expected)
    return Quantization(bits, group_size, tuple(layers))


def check_modules(
    quantization: Quantization, shapes: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Check that the modules listed have a matrix, and that their groups divide its rows. shapes:
    of the stored tensors.
    """
    for module, packing in quantization.layers:
        shape = shapes.get(module + ".weight", ())
        if len(shape) != 2:
            raise ConfigError(
                f"{source}: quantization.{show(module)[1:-1]} names a module that has no matrix in "
                "this model; correct the file"
            )
        if packing and shape[1] % packing[1]:
            raise ConfigError(
                f"{source}: quantization.{module}.group_size is {packing[1]}, which does not "
                f"divide the rows of {module}.weight {list(shape)}; correct the file"
            )


def _read_packing(read: Reader, bits: Any, group_size: Any) -> tuple[int, int]:
    """Check mode, bits and group_size; returns (bits, group_size)."""
    mode = read.get("mode", "affine")
    if mode != "affine":
        read.fail(
            "mode",
            mode,
            f"'affine', the only one supported; {_REQUANTIZE} (mlx_lm.convert: --q-mode affine)",
        )
    for name, value, allowed in (
        ("bits", bits, QUANTIZED_BITS),
        ("group_size", group_size, QUANTIZED_GROUPS),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            read.fail(name, value, f"one of {', '.join(map(str, allowed))}")
    return bits, group_size
