"""How config.json describes quantised matrices: by mx.quantize or by other quantisers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_llama.core.errors import ConfigError, show

from .fields import Reader

# Widths and groups of mx.quantize, mode "affine"
# (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html)
QUANTIZED_BITS = (2, 3, 4, 5, 6, 8)
QUANTIZED_GROUPS = (32, 64, 128)
# {mode: (bits, group size)} of its other modes, whose codes are floating-point numbers
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
_MODES = ("affine", *FLOAT_MODES)
_SETTINGS = ("bits", "group_size", "mode")
REQUANTIZE = (
    "load the unquantised version of this model, or one that mlx_lm.convert -q or llama.cpp has "
    "quantised"
)
# {AutoRound's packing: PackedQuantization.method}; its native packing is GPTQ's with plain zeros
_PACKINGS = {"awq": "awq", "gptq": "gptq"}
_PACKINGS |= dict.fromkeys(("round", "exllamav2", "triton", "tritonv2"), "gptq_v2")


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


@dataclass(frozen=True)
class PackedQuantization:
    """GPTQ's or AWQ's packing. The bits of a code follow from the tensors' shapes."""

    method: str  # "gptq" (stored zeros are one less), "gptq_v2" or "awq"
    group_size: int = -1  # columns of a group, -1 for all; the default for modules
    has_order: bool = False  # columns belong to groups in the order of `g_idx` ("desc_act")


@dataclass(frozen=True)
class Float8Quantization:
    """Matrices of 8-bit floats, with a scale for each block, each row or the whole matrix."""

    # rows and columns; None for 128 x 128, if there are blocks
    block: tuple[int, int] | None = None


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
        return _read_foreign(read, other)
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


def _read_foreign(read: Reader, raw: Any) -> PackedQuantization | Float8Quantization:
    """Read `quantization_config`. Raises ConfigError for formats that are not supported."""
    method = raw.get("quant_method", raw) if isinstance(raw, dict) else raw
    if not isinstance(method, str) or method.removeprefix("intel/") not in _READERS:
        raise ConfigError(
            f"{read.source}: quantization_config names a quantisation that is not supported "
            f"({show(method)}); {REQUANTIZE}"
        )
    return _READERS[method.removeprefix("intel/")](read.inner(raw, "quantization_config."))


def _read_gptq(read: Reader) -> PackedQuantization:
    """Fields of AutoGPTQ and GPTQModel."""
    name = "checkpoint_format" if "checkpoint_format" in read.raw else "format"
    version = read.get(name, "") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        _refuse(read, name, version, "gptq or gptq_v2")
    return PackedQuantization(version, _read_group(read), read.boolean("desc_act", False))


def _read_awq(read: Reader) -> PackedQuantization:
    """Fields of AutoAWQ; its other versions order the codes for a specific kernel."""
    name = "version" if "version" in read.raw else "format"
    version = read.get(name, "") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        _refuse(read, name, version, "gemm")
    return PackedQuantization("awq", _read_group(read))


def _read_auto_round(read: Reader) -> PackedQuantization:
    """Fields of AutoRound, which packs like AutoAWQ or AutoGPTQ; natively as "gptq_v2"."""
    kind, width = read.get("data_type", "int"), read.get("act_bits", None)
    if kind != "int":
        _refuse(read, "data_type", kind, "int")
    if isinstance(width, int) and width < 16:
        _refuse(read, "act_bits", width, "16")
    name = "packing_format" if "packing_format" in read.raw else "backend"
    packing = read.get(name, "") or "auto_round:gptq"
    parts = packing.split(":") if isinstance(packing, str) else [""]
    kind = parts[min(1, len(parts) - 1)].removeprefix("auto_")
    if kind not in _PACKINGS:
        _refuse(read, name, packing, "auto_round:auto_gptq or auto_round:auto_awq")
    return PackedQuantization(_PACKINGS[kind], _read_group(read))


def _read_group(read: Reader) -> int:
    name = "group_size" if "group_size" in read.raw else "q_group_size"
    return read.integer(name, 128, low=-1)


def _read_fp8(read: Reader) -> Float8Quantization:
    """Fields of transformers' FineGrainedFP8Config, as DeepSeek's and Mistral's files have them."""
    if (kind := read.get("fmt", None) or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        _refuse(read, "fmt", kind, "e4m3")
    return Float8Quantization(_read_block(read, "weight_block_size"))


def _read_compressed(read: Reader) -> Float8Quantization:
    """Fields of compressed-tensors, as llm-compressor writes them."""
    if (kind := read.get("format", None)) not in ("float-quantized", "naive-quantized"):
        _refuse(read, "format", kind, "float-quantized")
    groups = read.get("config_groups", None)
    blocks = []
    for name, group in groups.items() if isinstance(groups, dict) else ():
        inner = read.inner(group, f"{read.prefix}config_groups.{show(name)[1:-1]}.")
        weights = inner.part("weights")
        for field, wanted in (("type", "float"), ("num_bits", 8)):
            if (value := weights.get(field)) != wanted:
                _refuse(weights, field, value, str(wanted))
        blocks.append(_read_block(weights, "block_structure"))
    return Float8Quantization(blocks[0] if blocks else None)


def _read_modelopt(read: Reader) -> Float8Quantization:
    """Fields of NVIDIA's ModelOpt."""
    kind = read.get("quant_algo", None)
    if not isinstance(kind, str) or not kind.startswith("FP8"):
        _refuse(read, "quant_algo", kind, "FP8")
    return Float8Quantization()


def _read_block(read: Reader, name: str) -> tuple[int, int] | None:
    block = read.get(name, None)
    if block is None:
        return None
    is_pair = isinstance(block, list) and len(block) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= 1 << 20 for size in block):
        _refuse(read, name, block, "two sizes, or null")
    return block[0], block[1]


def _refuse(read: Reader, name: str, value: object, expected: str) -> None:
    raise ConfigError(
        f"{read.source}: {read.prefix}{name} is {show(value)}, expected {expected}; {REQUANTIZE}"
    )


_READERS: dict[str, Callable[[Reader], PackedQuantization | Float8Quantization]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "auto-round": _read_auto_round,
    "fp8": _read_fp8,
    "fbgemm_fp8": lambda read: Float8Quantization(),
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
}
