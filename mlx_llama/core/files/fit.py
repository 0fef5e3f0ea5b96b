"""Compare the tensors in files with those that the config requires, and select these."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mlx_llama.core.errors import CheckpointError, show
from mlx_llama.core.families import strip_wrapper
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.foreign import Float8Quantization, PackedQuantization
from mlx_llama.core.models.quantization import Packing, Quantization
from mlx_llama.core.system.machine import FileMap

from .float8 import take_float8
from .folder import LEFTOVER
from .fused_experts import FusedPart, split_fused
from .gguf import GGUFFile
from .packed import take_packed
from .quantized import AffineWeight, FloatWeight, MLXWeight
from .safetensors import SafetensorsFile
from .tensor import Tensor

# (file, name there)
_Place = tuple["SafetensorsFile | GGUFFile | StackPart | FusedPart", str]
Weights = Mapping[str, _Place]  # by tensor name

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_PARTS = (".weight", ".scales", ".biases")
_LAYER = re.compile(r"\.\d+\.")
_SCALES = ("F32", "F16", "BF16")


def resolve_tied(weights: Weights, config: LlamaConfig) -> Weights:
    """`weights` of the text model, with a tied matrix under the embedding's name.

    Some writers store a tied matrix under both names, some only under the head's.
    """
    if config.is_text_part:
        weights = {
            named: place
            for name, place in weights.items()
            if (named := strip_wrapper(name)) is not None
        }
    if not config.tie_word_embeddings:
        return weights
    head = {_EMBEDDING + part: weights[_HEAD + part] for part in _PARTS if _HEAD + part in weights}
    kept = {
        name: place
        for name, place in weights.items()
        if name not in [_HEAD + part for part in _PARTS]
    }
    return kept if _EMBEDDING + ".weight" in kept else kept | head


class StackPart:
    """A file seen through a stack's matrix: a stack [count, N, K] reads as its matrix `i`, called
    `name`; biases [count, N] as a vector.
    """

    def __init__(self, file: SafetensorsFile | GGUFFile, name: str, i: int, count: int):
        self.file, self.name, self.i, self.count, self.path = file, name, i, count, file.path

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the matrix, or of a stored tensor that is not such a stack."""
        first, *rest = self.file.shape(name)
        is_stack = first == self.count and len(rest) == (1 if self.name.endswith(".bias") else 2)
        return tuple(rest) if is_stack else (first, *rest)

    def dtype(self, name: str) -> str:
        """As SafetensorsFile.dtype."""
        assert isinstance(self.file, SafetensorsFile)
        return self.file.dtype(name)

    def tensor(self, name: str) -> Tensor | AffineWeight:
        """The matrix, zero-copy. Raises CheckpointError."""
        whole, rows = self.file.tensor(name), self.shape(name)[0]
        return (whole.flat() if isinstance(whole, Tensor) else whole).part(
            self.name, self.i * rows, (self.i + 1) * rows
        )

    def array(self, name: str) -> tuple[np.ndarray, tuple[FileMap, int, int] | None]:
        """As SafetensorsFile.array."""
        assert isinstance(self.file, SafetensorsFile)
        whole, page = self.file.array(name)
        nbytes = whole.nbytes // self.count
        return whole[self.i], page and (page[0], page[1] + self.i * nbytes, nbytes)


def unstack(weights: Weights, config: LlamaConfig) -> Weights:
    """Name each expert's matrix, however the files store them."""
    weights = split_fused(weights, config)
    stacks = {
        stack + part: (names, part)
        for stack, names in config.stacks().items()
        for part in (*_PARTS, ".bias")
    }
    single = {name: place for name, place in weights.items() if name not in stacks}
    for name in weights.keys() & stacks.keys():
        (file, stored), (names, part) = weights[name], stacks[name]
        assert not isinstance(file, (StackPart, FusedPart))
        if names[0] + part in single:
            raise CheckpointError(
                f"{file.path}: holds {show(name)} and {show(names[0] + part)}, which are the same "
                "matrix; fetch it again"
            )
        single |= {
            each + part: (StackPart(file, each + part, i, len(names)), stored)
            for i, each in enumerate(names)
        }
    return single


def _arrange(weights: Weights, config: LlamaConfig) -> Weights:
    """`weights` by the names of `config.stored_shapes()`, other quantisers' modules as matrices."""
    weights = unstack(resolve_tied(weights, config), config)
    if isinstance(config.quantization, PackedQuantization):
        return take_packed(weights, config, config.quantization)
    if any(isinstance(file, GGUFFile) for file, _ in weights.values()):
        return weights
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
        file, stored = weights[extra[0]]
        hint = ""
        if extra[0].endswith((".scales", ".biases")):
            says = "its field quantization says so" if config.quantization else None
            hint = f" ({says or 'it has no field quantization'})"
        errors.append(
            f"{file.path}: tensor {show(extra[0])} {show(list(file.shape(stored)))} is not part of "
            f"the model that {source} describes{hint}{_more(extra)}; {apart}"
        )
    # a tensor that differs in all layers is a single kind
    kinds: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name in filter(weights.__contains__, expected):
        file, stored = weights[name]
        actual, number = file.shape(stored), ((), (1,))  # which mlx_lm stores without an axis
        if actual != expected[name] and not (actual in number and expected[name] in number):
            kinds.setdefault((_LAYER.sub(".", name), actual, expected[name]), []).append(name)
    for (_, actual, shape), names in kinds.items():
        packing = packed.get(names[0].rpartition(".")[0] + ".weight")
        hint = f" (quantization: {packing})" if packing else ""
        errors.append(
            f"{weights[names[0]][0].path}: tensor {names[0]} has shape {list(actual)}, {source} "
            f"calls for {list(shape)}{hint}{_more(names)}; {apart}"
        )
    return [CheckpointError(error) for error in errors]


def select(
    weights: Weights, config: LlamaConfig, folder: Path, source: str = "config.json"
) -> dict[str, Tensor | AffineWeight]:
    """Select the tensors of `config.stored_shapes()`, in its order, as the files store them.

    Raises CheckpointError: the first of `misfits`; an unsupported dtype.
    """
    for error in misfits(weights, config, folder, source):
        raise error
    weights = _arrange(weights, config)
    packed = _packing(weights, config, folder)
    tensors: dict[str, Tensor | AffineWeight] = {}
    for name in config.stored_shapes(weights):
        if name in packed:
            parts = name, *_scaling(name, packed[name].mode)
            places = [_packable(weights[part]) for part in parts]
            tensors[name] = _quantized(name, packed[name], *places)
            continue
        file, stored = weights[name]
        tensor = file.tensor(stored)
        if tensor.name != name:
            assert isinstance(tensor, Tensor)  # GGUF tensors have the names of Hugging Face
            tensor = dataclasses.replace(tensor, name=name)
        tensors[name] = tensor
    return tensors


def split(
    stored: Mapping[str, Tensor | AffineWeight], config: LlamaConfig
) -> dict[str, Tensor | AffineWeight]:
    """Split fused tensors into those of `config.tensor_shapes()`, in its order, and give rows
    their order.
    """
    tensors, parts = {}, config.fused_parts()
    for name, shape in config.tensor_shapes().items():
        if name in stored:
            tensor = stored[name]
        else:
            whole, first, last = parts[name]
            tensor = stored[whole].part(name, first, last)
        order = config.row_order(name.rpartition(".")[0], *shape[:1])
        tensors[name] = tensor if order is None else tensor.reorder(order)
    return tensors


def _scaling(name: str, mode: str = "affine") -> tuple[str, ...]:
    """Names of a quantised matrix's scales and, in mode "affine", biases."""
    module = name.removesuffix(".weight")
    return (module + ".scales", module + ".biases")[: 1 + (mode == "affine")]


def _is_packed(name: str, weights: Weights) -> bool:
    if name not in weights:
        return False
    file, stored = _packable(weights[name])
    return file.dtype(stored) == "U32"


def _packable(place: _Place) -> tuple[SafetensorsFile | StackPart | FusedPart, str]:
    """A place in a file that config.json's `quantization` may describe; GGUF has none."""
    file, stored = place
    assert not isinstance(file, GGUFFile)
    return file, stored


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
        if name not in listed and (
            _is_packed(name, weights) or any(part in weights for part in _scaling(name))
        ):
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
            "matrix has scales; the weights do not match config.json, fetch both "
            "again"
        )
    return packed


def _quantized(
    name: str, packing: Packing, *parts: tuple[SafetensorsFile | StackPart | FusedPart, str]
) -> MLXWeight | FloatWeight:
    """Make a matrix of its stored tensors: codes, scales and, in mode "affine", biases."""
    (file, stored), *scaling = parts
    if file.dtype(stored) != "U32":
        raise CheckpointError(
            f"{file.path}: tensor {name} has dtype {file.dtype(stored)}, expected U32, since "
            "config.json says that it is quantised; the weights do not match config.json"
        )
    kinds = [file.dtype(stored) for file, stored in scaling]
    allowed = _SCALES if packing.mode == "affine" else ("U8",)
    for (file, stored), kind in zip(scaling, kinds):
        if kind not in allowed or kind != kinds[0]:
            wanted = kinds[0]
            if kind not in allowed:
                wanted = "F32, F16 or BF16" if packing.mode == "affine" else "U8"
            raise CheckpointError(
                f"{file.path}: tensor {stored} has dtype {kind}, expected {wanted} for the scales "
                "of a quantised matrix; quantise the model again with mlx_lm.convert"
            )
    arrays, all_pages = zip(*(file.array(stored) for file, stored in parts))
    pages = [page for page in all_pages if page]
    if packing.mode != "affine":
        codes, scales = arrays
        return FloatWeight(name, packing.mode, codes, scales, pages=pages)
    codes, scales, biases = arrays
    return MLXWeight(name, packing.bits, packing.group_size, codes, scales, biases, pages)


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""
