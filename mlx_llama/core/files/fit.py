"""Compare the tensors in files with those that the config requires, and select these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES, strip_wrapper
from mlx_llama.core.models.parts import GatedDelta
from mlx_llama.core.models.quantization import (
    Float8Quantization,
    PackedQuantization,
    Packing,
    Quantization,
)
from mlx_llama.core.system.machine import FileMap

from .packed import take_float8, take_packed
from .quantized import AffineWeight, FloatWeight, MLXWeight
from .safetensors import LEFTOVER
from .tensor import DTYPES, Stored, Tensor

Weights = Mapping[str, Stored]  # by tensor name

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_PARTS = (".weight", ".scales", ".biases")
_LAYER = re.compile(r"\.\d+\.")
PREDICTION = re.compile(r"(model\.)?mtp\.")


def resolve_tied(weights: Weights, config: LlamaConfig) -> Weights:
    """`weights` of the text model, with a tied matrix under the embedding's name. Some writers
    store a tied matrix under both names, some only under the head's.
    """
    if config.is_text_part:
        named = ((strip_wrapper(name), stored) for name, stored in weights.items())
        weights = {name: stored for name, stored in named if name is not None}
    if not config.tie_word_embeddings:
        return weights
    head = {_EMBEDDING + part: weights[_HEAD + part] for part in _PARTS if _HEAD + part in weights}
    tied = [_HEAD + part for part in _PARTS]
    kept = {name: stored for name, stored in weights.items() if name not in tied}
    return kept if _EMBEDDING + ".weight" in kept else kept | head


def skip_layers(weights: Weights, config: LlamaConfig) -> Weights:
    """Leave out the layers of multi-token prediction."""
    last = config.num_hidden_layers
    numbers = range(last, last + config.own.get("num_nextn_predict_layers", 0))
    skipped = tuple(f"{name}.{i}." for i in numbers for name in ("model.layers", "blk"))
    return {name: stored for name, stored in weights.items() if not name.startswith(skipped)}


def skip_prediction(weights: Weights) -> Weights:
    """Leave out Qwen's module of multi-token prediction."""
    return {name: x for name, x in weights.items() if not PREDICTION.match(name)}


def describe_form(weights: Weights, config: LlamaConfig) -> LlamaConfig:
    """The config of these `weights`: mlx_lm's converter adds `norm_offset` to the norms of models
    with the delta rule, whose convolutions it turns; a notice of tensors that are not used.
    """
    notices = config.notices
    if any(map(PREDICTION.match, weights)):
        notices += ("the module of multi-token prediction (mtp) is left out",)
    if config.is_text_part and any(strip_wrapper(name) is None for name in weights):
        notices += ("the parts for images and sound are left out",)
    weights = resolve_tied(weights, config)
    convs = (f"{mixer.conv}.weight" for mixer in config.recurrent if isinstance(mixer, GatedDelta))
    shapes = [weights[name].shape for name in convs if name in weights]
    is_turned = any(len(shape) == 3 and shape[1] > shape[2] == 1 for shape in shapes)
    return replace(config, notices=notices, norm_offset=0.0 if is_turned else config.norm_offset)


def shape_convolutions(weights: Weights, config: LlamaConfig) -> Weights:
    """Give convolutions Hugging Face's shape [C, 1, W]: mlx_lm's [C, W, 1] and llama.cpp's [C, W]
    have the same order.
    """

    def shaped(stored: Stored, shape: tuple[int, ...]) -> Stored:
        def decode(name: str) -> Tensor:
            return stored.tensor(name).reshape(shape)

        return replace(stored, shape=shape, decode=decode)

    result = dict(weights)
    for mixer in config.recurrent:
        channels, _, width = shape = mixer.shapes()[mixer.conv]
        stored = weights.get(name := f"{mixer.conv}.weight")
        if stored and stored.shape in ((channels, width), (channels, width, 1)):
            result[name] = shaped(stored, shape)
    return result


def _take_part(whole: Stored, i: int, count: int, axes: int) -> Stored:
    """Part `i` of a stack [count, ...] of parts with so many axes; any other tensor unchanged."""
    first, *shape = whole.shape
    if first != count or len(shape) != axes:
        return whole

    def decode(name: str) -> Tensor | AffineWeight:
        stack = whole.tensor(name)
        rows = stack.flat() if isinstance(stack, Tensor) else stack
        return rows.part(name, i * shape[0], (i + 1) * shape[0])

    array = partial(whole.take, i, count)
    return replace(whole, shape=tuple(shape), array=array, decode=decode)


def unstack(weights: Weights, config: LlamaConfig) -> Weights:
    """Name each expert's matrix, however the files store them."""
    weights = split_fused(weights, config)
    stacks = {
        stack + part: (names, part)
        for stack, names in config.stacks().items()
        for part in (*_PARTS, ".bias")
    }
    single = {name: stored for name, stored in weights.items() if name not in stacks}
    for name in weights.keys() & stacks.keys():
        stored, (names, part) = weights[name], stacks[name]
        if names[0] + part in single:
            raise CheckpointError(
                f"{stored.path}: holds {show(name)} and {show(names[0] + part)}, which are the "
                "same matrix; fetch it again"
            )
        axes = 1 if part == ".bias" else 2
        single |= {
            each + part: _take_part(stored, i, len(names), axes) for i, each in enumerate(names)
        }
    return single


def _arrange(weights: Weights, config: LlamaConfig) -> Weights:
    """`weights` by the names of `config.stored_shapes()`, other quantisers' modules as matrices."""
    weights = skip_prediction(skip_layers(resolve_tied(weights, config), config))
    weights = shape_convolutions(unstack(weights, config), config)
    # Published files hold these of layers that read another's keys and values.
    unused = {
        mixer.qkv[0].replace("q_proj", part)
        for layer in config.layers
        if (mixer := layer.attention) and not mixer.new_heads
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    weights = {
        name: stored for name, stored in weights.items() if name.rpartition(".")[0] not in unused
    }
    if isinstance(config.quantization, PackedQuantization):
        return take_packed(weights, config, config.quantization)
    if isinstance(config.quantization, Float8Quantization):
        return take_float8(weights, config, config.quantization.block)
    # NVIDIA's files may describe themselves in hf_quant_config.json instead of config.json.
    return take_float8(weights, config, None) if config.quantization is None else weights


def misfits(
    weights: Weights,
    config: LlamaConfig,
    folder: Path,
    source: str = "config.json",
    complete: bool = True,
) -> list[CheckpointError]:
    """Differences between `weights` and the config in names and shapes, an error for each kind.
    source: name of the config, for errors. complete: False if damaged files were left out, to
    tolerate missing tensors.
    """
    try:
        weights = _arrange(weights, config)
    except CheckpointError as error:
        return [error]
    try:
        packed = _packing(weights, config, folder)
    except CheckpointError as error:
        return [error] if complete else []
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in config.stored_shapes(weights).items():
        expected[name] = shape
        if name in packed:
            bits, group_size, mode = packed[name]
            expected[name] = (shape[0], shape[1] * bits // 32)
            expected |= dict.fromkeys(_scaling(name, mode), (shape[0], shape[1] // group_size))
    errors, apart = [], f"the weights do not match {source}"
    missing = [name for name in expected if name not in weights] if complete else []
    if missing:
        hint = ""
        if missing[0] == _HEAD + ".weight":
            hint = " (config.json says tie_word_embeddings false)"
        elif missing[0].endswith(".bias"):
            hint = f" ({config.architecture}, attention_bias or mlp_bias requires it)"
        elif missing[0].endswith((".scales", ".biases")):
            hint = " (the matrix beside it is quantised)"
        errors.append(
            f"{folder}: tensor {missing[0]} {list(expected[missing[0]])} is missing"
            f"{hint}{_more(missing)}; {apart}, fetch both again"
        )
    extra = [name for name in weights if name not in expected and not LEFTOVER.fullmatch(name)]
    if extra:
        stored = weights[extra[0]]
        hint = ""
        if extra[0].endswith((".scales", ".biases")):
            says = "its field quantization says so" if config.quantization else None
            hint = f" ({says or 'it has no field quantization'})"
        errors.append(
            f"{stored.path}: tensor {show(extra[0])} {show(list(stored.shape))} is not part of "
            f"the model that {source} describes{hint}{_more(extra)}; {apart}"
        )
    # a tensor that differs in all layers is a single kind
    kinds: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name in filter(weights.__contains__, expected):
        actual, number = weights[name].shape, ((), (1,))  # which mlx_lm stores without an axis
        if actual != expected[name] and not (actual in number and expected[name] in number):
            kinds.setdefault((_LAYER.sub(".", name), actual, expected[name]), []).append(name)
    for (_, actual, shape), names in kinds.items():
        packing = packed.get(names[0].rpartition(".")[0] + ".weight")
        hint = f" (quantization: {packing})" if packing else ""
        errors.append(
            f"{weights[names[0]].path}: tensor {names[0]} has shape {list(actual)}, {source} "
            f"calls for {list(shape)}{hint}{_more(names)}; {apart}"
        )
    return [CheckpointError(error) for error in errors]


def select(
    weights: Weights, config: LlamaConfig, folder: Path, source: str = "config.json"
) -> dict[str, Tensor | AffineWeight]:
    """Select the tensors of `config.stored_shapes()`, in its order, as the files store them. Raises
    CheckpointError: the first of `misfits`; an unsupported dtype.
    """
    for error in misfits(weights, config, folder, source):
        raise error
    weights = _arrange(weights, config)
    packed = _packing(weights, config, folder)
    tensors: dict[str, Tensor | AffineWeight] = {}
    for name in config.stored_shapes(weights):
        if name in packed:
            parts = [weights[part] for part in (name, *_scaling(name, packed[name].mode))]
            tensors[name] = _quantized(name, packed[name], parts)
        else:
            tensors[name] = weights[name].tensor(name)
    return tensors


def split(
    stored: Mapping[str, Tensor | AffineWeight], config: LlamaConfig
) -> dict[str, Tensor | AffineWeight]:
    """Split fused tensors into those of `config.tensor_shapes()`, and give rows their order."""
    tensors, parts = {}, config.fused_parts()
    for name, shape in config.tensor_shapes().items():
        whole, rows = parts.get(name, (name, slice(None)))
        if name not in parts or (name in stored and whole != name):
            tensor = stored[name]
        elif isinstance(rows, slice):
            tensor = stored[whole].part(name, rows.start, rows.stop)
        else:
            tensor = stored[whole].part(name, 0, stored[whole].shape[0]).reorder(rows)
        order = config.row_order(name.rpartition(".")[0], shape[0] if shape else 1)
        tensors[name] = tensor if order is None else tensor.reorder(order)
    return tensors


def _scaling(name: str, mode: str = "affine") -> tuple[str, ...]:
    """Names of a quantised matrix's scales and, in mode "affine", biases."""
    module = name.removesuffix(".weight")
    return (module + ".scales", module + ".biases")[: 1 + (mode == "affine")]


def _packing(weights: Weights, config: LlamaConfig, folder: Path) -> dict[str, Packing]:
    """{name of a quantised matrix: packing}, by config.json and the matrices that have scales."""
    settings = config.quantization
    if not isinstance(settings, Quantization):
        return {}
    listed = {module + ".weight": packing for module, packing in settings.layers}
    packed = {}
    for name, shape in config.stored_shapes(weights).items():
        if len(shape) != 2:
            continue
        packing = listed.get(name)
        is_packed = name in weights and weights[name].dtype == "U32"
        if name not in listed and (is_packed or any(x in weights for x in _scaling(name))):
            packing = settings.packing
        if packing is None:
            continue
        if shape[1] % packing.group_size:
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization.group_size is {packing.group_size}, which "
                f"does not divide the rows of {name} {list(shape)}; the weights do not match "
                "config.json"
            )
        packed[name] = packing
    if not packed:
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization says that the weights are quantised, but no "
            "matrix has scales; the weights do not match config.json, fetch both again"
        )
    return packed


def _quantized(name: str, packing: Packing, parts: Sequence[Stored]) -> MLXWeight | FloatWeight:
    """Make a matrix of its stored tensors: codes, scales and, in mode "affine", biases."""
    codes, *scaling = parts
    if codes.dtype != "U32":
        raise CheckpointError(
            f"{codes.path}: tensor {name} has dtype {codes.dtype}, expected U32, since "
            "config.json says that it is quantised; the weights do not match config.json"
        )
    allowed = tuple(DTYPES) if packing.mode == "affine" else ("U8",)
    for stored in scaling:
        kind, wanted = stored.dtype, scaling[0].dtype
        if kind not in allowed or kind != wanted:
            if kind not in allowed:
                wanted = "F32, F16 or BF16" if packing.mode == "affine" else "U8"
            raise CheckpointError(
                f"{stored.path}: tensor {stored.name} has dtype {kind}, expected {wanted} for the "
                "scales of a quantised matrix; quantise the model again with mlx_lm.convert"
            )
    arrays, all_pages = zip(*(stored.array() for stored in parts))
    pages: Any = [page for pages in all_pages for page in pages]
    if packing.mode != "affine":
        return FloatWeight(name, packing.mode, arrays[0], arrays[1], pages=pages)
    return MLXWeight(name, packing.bits, packing.group_size, arrays[0], arrays[1], arrays[2], pages)


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


# Experts as transformers 5 and Granite's files store them: all in one tensor, `gate_up_proj` [X,
# 2 F, E] and `down_proj` [X, E, F]. Those of gpt-oss and Llama 4 are transposed, [X, E, 2 F] and
# [X, F, E]. Gates and ups are halves, in gpt-oss interleaved. Its published files have mxfp4:
# `NAME_blocks` uint8 [X, N, K / 32, 16] and `NAME_scales` uint8 [X, N, K / 32]. Biases are
# `NAME_bias` [X, N].

_ALL = slice(None)
_BLOCK = 32  # weights that share a scale


class _Part(Tensor):
    """A part of a stored tensor with scattered rows: reading a few touches the pages of all."""

    @property
    def bits(self) -> np.ndarray:
        return np.ascontiguousarray(super().bits)

    def pages_of(self, first: int, last: int) -> Iterator[tuple[FileMap, int, int]]:
        yield from self.pages


def _take_expert(
    whole: Stored, i: int, count: int, rows: slice, axes: int, transposes: bool, scales: Any
) -> Stored:
    """The tensor of expert `i`, with so many axes: those rows of a stored one of all. scales: of
    mxfp4, or None.
    """
    shape = list(whole.shape[1:])
    if whole.shape[:1] != (count,) or len(shape) != (3 if scales else axes):
        return whole
    if scales:
        shape = [shape[0], shape[1] * _BLOCK]
    elif transposes:
        shape.reverse()
    shape[0] = len(range(*rows.indices(shape[0])))

    def decode(name: str) -> Tensor | AffineWeight:
        if scales is None:
            number = whole.tensor(name)  # raises for another dtype
            if isinstance(number, AffineWeight):
                numbers = range(i * whole.shape[1], (i + 1) * whole.shape[1])[rows]
                return number.part(name, numbers.start, numbers.stop)
            view, pages = whole.take(i, count)
            view = (view.T if transposes else view)[rows]
            return _Part(name, number.dtype, view.shape, view, pages)
        groups = whole.shape[:-1]
        for stored, wanted in ((whole, (*groups, _BLOCK // 2)), (scales, groups)):
            if (stored.dtype, stored.shape) != ("U8", wanted):
                raise CheckpointError(
                    f"{stored.path}: tensor {stored.name} is {stored.dtype} {list(stored.shape)}, "
                    f"expected U8 {list(wanted)} for mxfp4; fetch it again"
                )
        (blocks, first), (codes, second) = whole.take(i, count), scales.take(i, count)
        order = None if rows == _ALL else np.arange(len(blocks))[rows]
        packed = blocks.reshape(len(blocks), -1).view(np.uint32)  # neighbours in a byte each
        return FloatWeight(name, "mxfp4", packed, codes, order, [*first, *second])

    # no dtype: these are no parts of quantised matrices
    return replace(whole, dtype="", shape=tuple(shape), decode=decode)


def split_fused(weights: Mapping[str, Stored], config: LlamaConfig) -> Mapping[str, Stored]:
    """Name each expert's tensors where the file has those of all experts in one."""
    modules = FAMILIES[config.architecture].experts
    if modules is None:
        return weights
    units = config.moe_intermediate_size
    gates, ups = slice(0, units), slice(units, None)
    if modules.fused_rows == "in turn":
        gates, ups = slice(0, None, 2), slice(1, None, 2)
    prefixes = [f"model.layers.{layer.index}." for layer in config.layers if layer.experts]
    usual = {
        f"model.layers.{layer.index}.{name}": f"model.layers.{layer.index}.{ours}"
        for layer in config.layers
        for name, ours in modules.aliases.items()
    }
    weights = {usual.get(name, name): stored for name, stored in weights.items()}
    result = dict(weights)
    for prefix, experts in zip(prefixes, filter(None, (layer.experts for layer in config.layers))):
        gate_up, down = (prefix + name for name in modules.fused)
        for names, whole, rows in (
            (experts.gate, gate_up, gates),
            (experts.up, gate_up, ups),
            (experts.down, down, _ALL),
        ):
            blocks, packed = f"{whole}_blocks", None
            if blocks in weights and f"{whole}_scales" in weights:
                packed = result.pop(f"{whole}_scales", weights[f"{whole}_scales"])
            weight = whole if packed is None else blocks
            for kind, stored, scales in (
                ("weight", weight, packed),
                ("bias", f"{whole}_bias", None),
            ):
                result.pop(stored, None)
                axes = 1 if kind == "bias" else 2
                for i, name in enumerate(names if stored in weights else ()):
                    result[f"{name}.{kind}"] = _take_expert(
                        weights[stored],
                        i,
                        len(names),
                        rows,
                        axes,
                        transposes=modules.transposes and axes == 2,
                        scales=scales,
                    )
    return result
