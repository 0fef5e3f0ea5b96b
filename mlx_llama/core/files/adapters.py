"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) in the folders of PEFT and mlx_lm.

PEFT writes adapter_config.json with peft_type, and adapter_model.safetensors; mlx_lm
adapter_config.json with lora_parameters, and adapters.safetensors. Both become pairs of matrices by
the name of the module that they change.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, show
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import strip_wrapper
from mlx_llama.core.system.files import read_json

from .quantized import AffineWeight
from .safetensors import open_safetensors
from .tensor import NUMBERS, Tensor, as_bits

BASE = "base"  # name of the model without adapters
MOST_ADAPTERS = 64
MOST_RANK = 4096
_LARGEST = 1e12  # alpha or scale; above all real ones, and its products fit float32

CONFIG = "adapter_config.json"
PEFT_WEIGHTS, MLX_WEIGHTS = "adapter_model.safetensors", "adapters.safetensors"
_FETCH, _MERGE = "fetch the adapter again", "merge the adapter with PEFT"
_PEFT_PREFIX = "base_model.model."
_PEFT_PART = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_MLX_PART = re.compile(r"(.+)\.lora_([ab])")
_CHAR = r"(?:\\[.dw]|\[\^?[\w-]+\]|[\w.])"
_ITEM = re.compile(rf"(?:({_CHAR})|\((?:\?:)?((?:{_CHAR}|\|)+)\))([*+?]?)")  # alpha_pattern's
Scale = Callable[[str, int], float]
# Unsupported fields of PEFT's config that change the arithmetic, and values for "off"
_PEFT_REFUSED = (
    "use_dora lora_bias fan_in_fan_out use_qalora bias modules_to_save layer_replication "
    "trainable_token_indices target_parameters alora_invocation_tokens arrow_config use_bdlora "
    "megatron_config"
).split()
_OFF: tuple[object, ...] = (None, False, "none", [], {})
# Initialisations that change the base, which the pair no longer fits as it is stored
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Pair:
    """An addition to a matrix [N, K]: (x @ a.T) @ b.T * scale."""

    stored_a: Tensor  # [r, K]
    stored_b: Tensor  # [N, r]
    scale: float
    # as in `Mapped`, for modules whose rows the model has in another order than its files
    order: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return self.stored_a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored_b.shape[0], self.stored_a.shape[1]

    def a(self) -> np.ndarray:
        """float32 [r, K]."""
        self.stored_a.check_file()
        return self.stored_a.float32()

    def b(self) -> np.ndarray:
        """float32 [N, r], times the scale."""
        self.stored_b.check_file()
        return self.stored_b.float32() * np.float32(self.scale)


@dataclass(frozen=True)
class Adapter:
    name: str  # its folder's; requests select it by this name
    path: Path
    pairs: Mapping[str, Pair] = field(repr=False)  # by module
    digest: str = ""  # hash of its settings, scale and weights
    scale: float = 1.0  # SCALE in FOLDER=SCALE; the pairs include it

    def fuse(
        self, modules: Sequence[str], rows: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Fuse the pairs of modules with the same input, rows on rows: float32 [R, K], [N, R].
        rows: of each module's matrix. b is zero where a column belongs to another module. None: no
        pair for these modules.
        """
        pairs = [
            (self.pairs[name], sum(rows[:i]))
            for i, name in enumerate(modules)
            if name in self.pairs
        ]
        if not pairs:
            return None
        a = np.concatenate([pair.a() for pair, _ in pairs])
        b, column = np.zeros((sum(rows), len(a)), np.float32), 0
        for pair, row in pairs:
            rows_of_b = pair.b() if pair.order is None else pair.b()[pair.order]
            b[row : row + pair.shape[0], column : column + pair.rank] = rows_of_b
            column += pair.rank
        return a, b


def _add(base: Tensor | AffineWeight, additions: Sequence[tuple[Any, Pair]]) -> Tensor:
    """A matrix plus additions (rows, pair), rounded to its dtype, computed at each access."""

    def compute() -> np.ndarray:
        base.check_file()
        values = base.float32()
        for rows, pair in additions:
            values[rows] += pair.b() @ pair.a()
        with np.errstate(over="ignore"):  # writers refuse values that are not finite
            return as_bits(values.astype(NUMBERS[base.dtype], copy=False))

    return Tensor(base.name, base.dtype, base.shape, compute, base.pages, file_bytes=base.nbytes)


def merge(
    adapter: Adapter, config: LlamaConfig, stored: Mapping[str, Tensor | AffineWeight]
) -> dict[str, Tensor | AffineWeight]:
    """Add an adapter to the matrices of `stored` tensors (config.stored_shapes)."""
    places = config.fused_parts()
    additions: dict[str, list[tuple[Any, Pair]]] = {}
    for module, pair in adapter.pairs.items():
        name = f"{module}.weight"
        whole, rows = places.get(name, (name, slice(None)))
        if name in stored and whole != name:
            whole, rows = name, slice(None)
        additions.setdefault(whole, []).append((rows, pair))
    return {**stored, **{name: _add(stored[name], parts) for name, parts in additions.items()}}


def stack(
    adapters: Sequence[Adapter], modules: Sequence[str], rows: Sequence[int], columns: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Stack zeros for the base and all adapters' pairs: float32 [1 + adapters, R, K], [.., N, R].
    Padded with zeros to the largest R, rounded up to a multiple of 8. None: there are no pairs.
    """
    fused = [adapter.fuse(modules, rows) for adapter in adapters]
    rank = max((len(pair[0]) for pair in fused if pair), default=0)
    if rank == 0:
        return None
    rank = _round_up(rank)
    a = np.zeros((1 + len(adapters), rank, columns), np.float32)
    b = np.zeros((1 + len(adapters), sum(rows), rank), np.float32)
    for number, pair in enumerate(fused, 1):
        if pair:
            a[number, : len(pair[0])], b[number, :, : len(pair[0])] = pair
    return a, b


def stacked_nbytes(adapters: Sequence[Adapter], config: LlamaConfig, itemsize: int) -> int:
    """Bytes of the `stack`s of all layers."""
    total, known = 0, config.tensor_shapes() if adapters else {}
    for modules in _groups(config) if adapters else ():
        ranks = (sum(x.pairs[name].rank for name in modules if name in x.pairs) for x in adapters)
        shapes = [known[f"{name}.weight"] for name in modules]
        width = shapes[0][1] + sum(rows for rows, _ in shapes)
        total += (1 + len(adapters)) * _round_up(max(ranks)) * width
    return total * itemsize


def _round_up(rank: int) -> int:
    return -(-rank // 8) * 8


def _groups(config: LlamaConfig) -> list[tuple[str, ...]]:
    """Modules that adapters may change, grouped by input: no MLP's in a layer with experts."""
    return [group for layer in config.layers for group in layer.linears()]


def parse(spec: str | os.PathLike) -> tuple[Path, float]:
    """(folder, scale) of FOLDER or FOLDER=SCALE. Raises CheckpointError."""
    text = os.fspath(spec)
    folder, sign, number = text.rpartition("=")
    if not sign or os.path.isdir(os.path.expanduser(text)):
        return Path(os.path.expanduser(text)), 1.0
    try:
        scale = float(number)
    except ValueError:
        scale = math.nan
    if not abs(scale) <= _LARGEST:  # also of NaN
        raise CheckpointError(
            f"adapter {show(text)}: {show(number)} after = does not fit, expected a scale up to "
            f"{_LARGEST:g}"
        )
    return Path(os.path.expanduser(folder)), scale


def open_adapters(
    specs: Sequence[str | os.PathLike],
    config: LlamaConfig,
    tensors: Mapping[str, Tensor | AffineWeight],
) -> tuple[Adapter, ...]:
    """Open adapters of a model. specs: FOLDER or FOLDER=SCALE. tensors: the model's. Raises
    CheckpointError: no such folder; duplicate names; damaged, of another model, or unsupported.
    """
    if len(specs) > MOST_ADAPTERS:
        raise CheckpointError(f"{len(specs)} adapters: at most {MOST_ADAPTERS} can be loaded")
    adapters: dict[str, Adapter] = {}
    for spec in specs:
        folder, scale = parse(spec)
        adapter = _open(folder, scale, config, tensors)
        if adapter.name in adapters or adapter.name == BASE:
            other = "that is the name of the model without adapters"
            if adapter.name in adapters:
                other = f"{adapters[adapter.name].path} has the same name"
            raise CheckpointError(
                f"adapter {adapter.path}: requests would call it {show(adapter.name)}, and "
                f"{other}: rename the folder"
            )
        adapters[adapter.name] = adapter
    return tuple(adapters.values())


def _open(
    path: Path, scale: float, config: LlamaConfig, tensors: Mapping[str, Tensor | AffineWeight]
) -> Adapter:
    if not os.path.lexists(path / CONFIG):
        fault = f"holds no {CONFIG}" if os.path.isdir(path) else "no such folder"
        raise CheckpointError(f"adapter {show(str(path))}: {fault}; choose an adapter's folder")
    settings, file = read_json(path / CONFIG, CheckpointError), path / CONFIG
    if "peft_type" in settings:
        weights, part, scale_of = path / PEFT_WEIGHTS, _PEFT_PART, _read_peft(settings, file)
    elif "lora_parameters" in settings or "fine_tune_type" in settings:
        weights, part, scale_of = path / MLX_WEIGHTS, _MLX_PART, _read_mlx(settings, file)
    else:
        raise CheckpointError(
            f"{file}: has neither peft_type (PEFT) nor lora_parameters (mlx_lm): choose an "
            "adapter's folder"
        )
    pairs = _expand(_pair(weights, part, scale_of), config)
    modules = {module for group in _groups(config) for module in group}
    for module, pair in pairs.items():
        if fault := _misfit(module, pair, module in modules, tensors.get(f"{module}.weight")):
            parts = (f"{x.name} {list(x.shape)}" for x in (pair.stored_a, pair.stored_b))
            raise CheckpointError(f"{weights}: {' and '.join(parts)}{fault}")
        order = config.row_order(module, pair.shape[0])
        pairs[module] = replace(pair, scale=pair.scale * scale, order=order)
    name = path.name or path.resolve().name
    return Adapter(name, path, pairs, _digest(settings, scale, weights), scale)


def _digest(settings: Mapping[str, Any], scale: float, weights: Path) -> str:
    """Identify an adapter in saved caches by settings, scale and the bytes of its weights."""
    digest = hashlib.sha256(json.dumps([settings, scale], sort_keys=True).encode())
    with open(weights, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()[:16]


def _read_peft(settings: Mapping[str, Any], config: Path) -> Scale:
    """The factor of a module's pair, by its name in the file and its rank."""
    if (kind := settings["peft_type"]) != "LORA":
        raise _fault(config, "peft_type", kind, f"and only LORA is supported: {_MERGE}")
    for name in _PEFT_REFUSED:
        if (value := settings.get(name)) not in _OFF:
            raise _fault(config, name, value, f"which is not supported: {_MERGE}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        remedy = "convert the adapter with PEFT's path_initial_model_for_weight_conversion"
        raise _fault(config, "init_lora_weights", start, f"which also changes the base: {remedy}")
    alpha = _number(settings, "lora_alpha", 8, config)
    alphas = _patterns(settings, "alpha_pattern", config)
    expected = None
    if "r" in settings and not settings.get("rank_pattern"):
        expected = _number(settings, "r", 8, config)
    is_stabilised = settings.get("use_rslora") is True

    def scale(module: str, rank: int) -> float:
        if expected not in (None, rank):
            raise _fault(
                config, "r", settings["r"], f"but {show(module)} has rank {rank}; {_FETCH}"
            )
        name = module.removeprefix(_PEFT_PREFIX)
        found = (value for matches, value in alphas if matches(name))
        return next(found, alpha) / (math.sqrt(rank) if is_stabilised else rank)

    return scale


def _read_mlx(settings: Mapping[str, Any], config: Path) -> Scale:
    kind = settings.get("fine_tune_type", "lora")
    if kind != "lora":
        remedy = "fuse the adapter with mlx_lm.fuse"
        raise _fault(config, "fine_tune_type", kind, f"and only lora is supported: {remedy}")
    parameters = settings.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise _fault(config, "lora_parameters", parameters, f"expected an object; {_FETCH}")
    factor = _number(parameters, "scale", 20.0, config)
    return lambda module, rank: factor


def _number(settings: Mapping[str, Any], name: str, default: float, config: Path) -> float:
    value = settings.get(name, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= _LARGEST:  # also of NaN
        raise _fault(config, name, value, f"expected a number up to {_LARGEST:g}; {_FETCH}")
    return float(value)


def _fault(config: Path, name: str, value: object, text: str) -> CheckpointError:
    return CheckpointError(f"{config}: {name} is {show(value)}, {text}")


def _match(pattern: str) -> Callable[[str], bool]:
    """A function that matches a module's name, or its last parts, with a pattern of PEFT's
    (`get_pattern_key` in peft/utils/other.py). It keeps the set of positions reached, so that no
    pattern of an untrusted file takes long. Raises ValueError for other forms than `_ITEM`'s.
    """
    body = pattern.removeprefix("^").removesuffix("$")
    if len(body) > 1000 or _ITEM.sub("", body):
        raise ValueError(pattern)
    items = [
        ([re.compile(part) for part in (group.split("|") if group else [char])], repeat)
        for char, group, repeat in _ITEM.findall(body)
    ]

    def matches(name: str) -> bool:
        dots = [] if pattern.startswith("^") else re.finditer(r"\.", name)
        ends = {0, *(dot.end() for dot in dots)}
        for choices, repeat in items:
            reached, new = ends if repeat in ("*", "?") else set(), ends
            while new:
                new = {m.end() for i in new for part in choices if (m := part.match(name, i))}
                new, reached = new - reached, reached | new
                if repeat in ("", "?"):
                    break
            ends = reached
        return len(name) in ends

    return matches


def _patterns(
    settings: Mapping[str, Any], name: str, config: Path
) -> list[tuple[Callable[[str], bool], float]]:
    """Values by patterns of modules' names."""
    patterns = settings.get(name) or {}
    try:
        return [(_match(key), _number(patterns, key, 0.0, config)) for key in dict(patterns)]
    except (TypeError, ValueError, re.error):
        expected = "expected numbers by names of modules, which may have ., \\d, [0-9], (a|b), *, +"
        raise _fault(config, name, patterns, f"{expected} and ?: write the names") from None


def _pair(path: Path, part: re.Pattern[str], scale_of: Scale) -> dict[str, Pair]:
    """Pair a file's tensors, by the module's name in it."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, stored in open_safetensors(path).items():
        match = part.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{path}: tensor {show(name)} is not part of a LoRA pair, and others are not "
                "supported: merge the adapter with the tool that wrote it"
            )
        tensor = replace(stored, decode=None).tensor(name)  # small: float64 is rounded at once
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise CheckpointError(
                f"{path}: tensor {show(name)} has shape {list(tensor.shape)}, expected a matrix; "
                f"{_FETCH}"
            )
        modules.setdefault(match[1], {})[match[2].lower()] = tensor
    if not modules:
        raise CheckpointError(f"{path}: has no tensors; {_FETCH}")
    pairs = {}
    for module, parts in modules.items():
        if len(parts) != 2:
            raise CheckpointError(
                f"{path}: {show(module)} has lora_{next(iter(parts))} without its partner; {_FETCH}"
            )
        a, b = parts["a"], parts["b"]
        if part is _MLX_PART:  # which has the transposes
            a, b = (replace(x, shape=x.shape[::-1], values=x.stored.T) for x in (a, b))
        ranks = a.shape[0], b.shape[1]
        if ranks[0] != ranks[1] or ranks[0] > MOST_RANK:
            raise CheckpointError(
                f"{path}: {a.name} {list(a.shape)} and {b.name} {list(b.shape)} have ranks "
                f"{ranks[0]} and {ranks[1]}, expected the same, at most {MOST_RANK}; {_FETCH}"
            )
        pairs[module] = Pair(a, b, scale_of(module, ranks[0]))
    return pairs


def _expand(pairs: Mapping[str, Pair], config: LlamaConfig) -> dict[str, Pair]:
    """Pairs by modules of `config`, without the writer's prefix; those of fused matrices split."""
    fused: dict[str, dict[str, Any]] = {}  # {module: {part: its rows}}
    for part, (whole, rows) in config.fused_parts().items():
        spans = fused.setdefault(whole.removesuffix(".weight"), {})
        spans[part.removesuffix(".weight")] = rows
    stored = config.stored_shapes()
    expanded = {}
    for written, pair in pairs.items():
        module = written.removeprefix(_PEFT_PREFIX)
        if config.is_text_part:
            module = strip_wrapper(module) or module
        spans = fused.get(module, {})
        if spans and pair.shape[0] == stored[f"{module}.weight"][0]:
            for part, span in spans.items():
                rows = pair.stored_b.stored[span]
                b = replace(pair.stored_b, shape=rows.shape, values=rows)
                expanded[part] = replace(pair, stored_b=b)
        else:
            expanded[module] = pair
    return expanded


def _misfit(
    module: str, pair: Pair, is_projection: bool, matrix: Tensor | AffineWeight | None
) -> str:
    """The fault of a pair for a module that it does not fit; "" for none. matrix: the module's."""
    if matrix is None:
        return f": the model has no {show(module)}; the adapter was made for another model"
    if not is_projection:
        return (
            f": adapters change projections of layers, and {module} is none: train the adapter "
            "without it, or merge it with the tool that wrote it"
        )
    if pair.shape != tuple(matrix.shape):
        return (
            f" are for a matrix {list(pair.shape)}, and {module}.weight is {list(matrix.shape)}; "
            "the adapter was made for another model"
        )
    return ""
