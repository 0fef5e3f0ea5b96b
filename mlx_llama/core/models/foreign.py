"""Formats of other quantisers, from `quantization_config` in config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_llama.core.errors import ConfigError, show

from .reader import Reader

REQUANTIZE = (
    "load the unquantised version of this model, or one that mlx_lm.convert -q or llama.cpp has "
    "quantised"
)
# {AutoRound's packing: PackedQuantization.method}; its native packing is GPTQ's with plain zeros
_PACKINGS = {"awq": "awq", "gptq": "gptq"}
_PACKINGS |= dict.fromkeys(("round", "exllamav2", "triton", "tritonv2"), "gptq_v2")


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


def read_foreign(read: Reader, raw: Any) -> PackedQuantization | Float8Quantization:
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
