"""A folder, a .gguf file or a hub id -> config, tokenizer, template and named tensors, nothing copied.

`open_checkpoint` checks everything that can be checked without reading weights: the config, the headers of all weight
files, and that every tensor the config calls for is there with its shape, and no other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_llama.core.errors import CheckpointError, ConfigError, Report, refuse
from mlx_llama.core.models.config import LlamaConfig, read_json, show

from . import hub
from .gguf import GGUFFile, part_names
from .quantized import AffineWeight, MLXWeight
from .safetensors import SafetensorsFile, Tensor

if TYPE_CHECKING:
    from mlx_llama.core.text.template import ChatTemplate
    from mlx_llama.core.text.tokenizer import Tokenizer

__all__ = ["GUIDE_PATH", "Checkpoint", "Tensor", "find_local", "find_weights", "misfits", "open_checkpoint"]

GUIDE_PATH = Path(__file__).resolve().parents[2] / "guide"  # the model that ships in the package

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Left over in early conversions: frequencies that the config defines anyway
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_LAYER = re.compile(r"\.\d+\.")
_CONVERT = (
    'convert it once where you trust it: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('DIR').save_pretrained('NEW_DIR')\""
)


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: everything a backend needs to load it. Opening reads headers only.

    name: as the user gave it. path: the folder, or the .gguf file. tensors: every tensor of `config.tensor_shapes()`,
    and no other. generation_config: generation_config.json as it is, {} where there is none. nbytes: of all tensors
    together. gguf_metadata: of a GGUF file, else None.
    """

    name: str
    path: Path
    config: LlamaConfig
    tensors: Mapping[str, Tensor | AffineWeight] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)
    nbytes: int
    gguf_metadata: dict[str, Any] | None = field(default=None, repr=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at the first use.

        Raises:
            TokenizerError: none there, malformed, or larger than the model's vocabulary.
        """
        if self.gguf_metadata is not None:
            from mlx_llama.core.text.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(self.gguf_metadata, self.config, str(self.path))
        from mlx_llama.core.text.hf_tokenizer import load_tokenizer

        return load_tokenizer(self.path, self.config)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, or None where the model has none; loaded at the first use.

        Raises:
            TemplateError: there is one, but it is not a template.
        """
        if self.gguf_metadata is not None:
            from mlx_llama.core.text.template import load_gguf_template

            return load_gguf_template(self.gguf_metadata, str(self.path), self.tokenizer)
        from mlx_llama.core.text.template import load_template

        return load_template(self.path, self.tokenizer)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer: of the config, generation_config.json and the tokenizer together."""
        ids = set(self.config.eos_token_ids)
        ids.update(_generation_eos(self.generation_config, self.path, self.config.vocab_size))
        if self._has_tokenizer:
            ids.update(self.tokenizer.eos_ids)
        return frozenset(ids)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token that begins a text: the tokenizer's, else the config's."""
        if self._has_tokenizer and self.tokenizer.bos_id is not None:
            return self.tokenizer.bos_id
        return self.config.bos_token_id

    @property
    def _has_tokenizer(self) -> bool:
        if self.gguf_metadata is not None:
            return "tokenizer.ggml.model" in self.gguf_metadata
        from mlx_llama.core.text.hf_tokenizer import has_tokenizer

        return has_tokenizer(self.path)

    @property
    def dtype(self) -> str:
        """What activations should be: the width the embedding is stored in, or what a low-bit matrix asks for."""
        low_bit = (tensor.dtype for tensor in self.tensors.values() if isinstance(tensor, AffineWeight))
        return next(low_bit, self.tensors["model.embed_tokens.weight"].dtype)


def open_checkpoint(name: str | os.PathLike | None = None, revision: str | None = None) -> Checkpoint:
    """Opens a model.

    Args:
        name: a folder, a .gguf file (of a split one, any part), a hub id ("org/name", or "org/name:file.gguf" for one
            file of it), or "guide" or None for the model that ships in this package. What exists on the disk wins over
            a hub id.
        revision: branch, tag or commit; hub ids only.

    Raises:
        CheckpointError: not found, no weights, weights truncated, corrupt, or not what the config describes.
        ConfigError: config.json is missing, malformed or not supported.
    """
    label = "guide" if name is None else os.fspath(name)
    if name is None or (label == "guide" and not Path(label).is_dir()):
        folder, config = GUIDE_PATH, None
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: the model that ships is not there; install mlx_llama again, or name a model"
            )
    elif hub.gguf_in_hub(label):
        return _open_gguf(label, hub.fetch_gguf(label, revision))
    elif hub.is_hub_id(label):
        # settings first: a model that cannot be run is refused before gigabytes travel
        folder = hub.fetch(label, revision, hub.SETTINGS)
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"model {label}: has no config.json; if it holds GGUF files, name one: {label}:FILE.gguf"
            )
        config = LlamaConfig.from_file(folder)
        folder = hub.fetch(label, revision, hub.SETTINGS + hub.WEIGHTS)
    else:
        if revision is not None:
            raise CheckpointError(f"model {label}: is a path, and only hub ids have a revision; leave it away")
        folder, config = find_local(label), None
        if folder.is_file():
            return _open_gguf(label, folder)
    config = config or LlamaConfig.from_file(folder)
    tensors = _select(find_weights(folder), config, folder)
    path = folder / "generation_config.json"
    generation = read_json(path, ConfigError) if path.exists() else {}
    _generation_eos(generation, folder, config.vocab_size)  # a bad one is told now, not after the first answer
    return Checkpoint(
        name=label,
        path=folder,
        config=config,
        tensors=tensors,
        generation_config=generation,
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
    )


def _open_gguf(name: str, path: Path) -> Checkpoint:
    file = GGUFFile(path)
    tensors = _select({tensor: (file, tensor) for tensor in file.names}, file.config, path, "its metadata")
    return Checkpoint(
        name=name,
        path=path,
        config=file.config,
        tensors=tensors,
        generation_config={},
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        gguf_metadata=file.metadata,
    )


def find_local(name: str) -> Path:
    """The folder, or the .gguf file, that a path names; a folder whose only weights are one GGUF model names that.

    Raises:
        CheckpointError: there is none, or several GGUF models.
    """
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # os.path answers False where pathlib raises: names too long, NUL, ~nobody
        files = sorted(file.name for file in path.glob("*.gguf"))
        if not files or (path / _SINGLE).exists() or (path / _INDEX).exists():
            return path
        if files != [one for one in part_names(files[0]) if one in files]:
            raise CheckpointError(f"{path}: holds {len(files)} GGUF files ({show(', '.join(files))}); name one of them")
        return path / files[0]
    if name and os.path.exists(path):
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path}: is a file, expected a folder with config.json and weights, or a .gguf file; name the folder"
            )
        return path
    if path.suffix == ".gguf":
        raise CheckpointError(f"{show(name)}: no such file; check the path (a file on the hub is org/name:file.gguf)")
    raise CheckpointError(
        f"model {show(name)}: no such folder, and not a hub id (which look like org/name); check the path, or use `guide`, "
        "the model that ships"
    )


def find_weights(folder: Path, report: Report = refuse) -> dict[str, tuple[SafetensorsFile, str]]:
    """{tensor name: (its file, its name there)} from one file or from the shards of an index.

    report: hears of a shard or an entry that is wrong; where it returns, the others are looked at all the same.

    Raises:
        CheckpointError: no weights, a single file or an index that is damaged; what `report` raises.
    """
    single, index = folder / _SINGLE, folder / _INDEX
    if single.exists():
        file = SafetensorsFile(single)
        return {name: (file, name) for name in file.names}
    if not index.exists():
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles or (folder / "pytorch_model.bin.index.json").exists():
            found = pickles[0] if pickles else "pytorch_model.bin.index.json"
            raise CheckpointError(
                f"{folder}: holds {found} but no {_SINGLE}; pickle is never read, since it can run code: {_CONVERT}"
            )
        raise CheckpointError(
            f"{folder}: holds neither {_SINGLE} nor {_INDEX}; fetch the model again, weights included"
        )

    weight_map = read_json(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {show(weight_map)}, expected {{tensor: file}}; fetch it again")
    files: dict[str, SafetensorsFile | None] = {}  # None: a shard that cannot be read
    found: dict[str, tuple[SafetensorsFile, str]] = {}
    for name, shard in weight_map.items():
        # a shard lies beside its index and nowhere else: no separators, no parent, no drive
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
            report(CheckpointError(
                f"{index}: weight_map[{show(name)}] is {show(shard)}, expected the plain name of a .safetensors file "
                "in the same folder; fetch the index again"
            ))  # fmt: skip
            continue
        if shard not in files:
            files[shard] = None
            try:
                if not (folder / shard).exists():
                    raise CheckpointError(
                        f"{index}: names the shard {shard}, which is not in {folder}; fetch the missing file"
                    )
                files[shard] = SafetensorsFile(folder / shard)
            except CheckpointError as error:
                report(error)
        file = files[shard]
        if file is None:
            continue
        if name not in file.names:
            report(CheckpointError(
                f"{index}: says that {shard} holds {show(name)}, which it does not; fetch both again"
            ))  # fmt: skip
            continue
        found[name] = (file, name)
    for shard, file in files.items():
        for name in file.names if file is not None else ():
            if name not in weight_map and not _HARMLESS.fullmatch(name):
                report(CheckpointError(
                    f"{folder / shard}: holds {show(name)}, which {_INDEX} does not list; fetch both again"
                ))  # fmt: skip
    return found


def _select(
    weights: dict[str, tuple[SafetensorsFile | GGUFFile, str]],
    config: LlamaConfig,
    folder: Path,
    source: str = "config.json",
) -> dict[str, Tensor | AffineWeight]:
    """The tensors the config calls for; `source` names the config in errors. Raises the first of `misfits`."""
    for error in misfits(weights, config, folder, source):
        raise error
    packed = _packed(weights, config, folder)
    tensors: dict[str, Tensor | AffineWeight] = {}
    for name in config.tensor_shapes():
        if name in packed:
            tensors[name] = _quantized(name, packed[name], *(weights[part] for part in (name, *_scaling(name))))
            continue
        file, stored = weights[name]
        tensor = file.tensor(stored)
        tensors[name] = tensor if stored == name else Tensor(name, *_rest(tensor))
    return tensors


def misfits(
    weights: dict[str, tuple[SafetensorsFile | GGUFFile, str]],
    config: LlamaConfig,
    folder: Path,
    source: str = "config.json",
    complete: bool = True,
) -> Iterator[CheckpointError]:
    """What names and shapes of the tensors in `weights` have at odds with the config, each kind once. A tied head's second
    name is taken out of `weights`.

    complete: False where `weights` lacks what was in damaged files, of which nothing is said then.
    """
    embedding, head = "model.embed_tokens", "lm_head"
    if config.tie_word_embeddings:
        # tied: one matrix, which some writers save under both names and some under the head's alone
        spare = {part: weights.pop(head + part) for part in (".weight", ".scales", ".biases") if head + part in weights}
        if embedding + ".weight" not in weights:
            weights |= {embedding + part: found for part, found in spare.items()}
    try:
        packed = _packed(weights, config, folder)
    except CheckpointError as error:
        if complete:
            yield error
        return
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in config.tensor_shapes().items():
        if name in packed:
            (rows, columns), (bits, group_size) = shape, packed[name]
            expected[name] = (rows, columns * bits // 32)
            expected |= dict.fromkeys(_scaling(name), (rows, columns // group_size))
        else:
            expected[name] = shape
    missing = [name for name in expected if name not in weights] if complete else []
    if missing:
        hint = ""
        if missing[0] == head + ".weight":
            hint = " (config.json says tie_word_embeddings false)"
        elif missing[0].endswith(".bias"):
            hint = " (config.json asks for it with attention_bias or mlp_bias)"
        elif missing[0].endswith((".scales", ".biases")):
            hint = " (the matrix beside it is quantised)"
        yield CheckpointError(
            f"{folder}: tensor {missing[0]} {list(expected[missing[0]])} is missing{hint}{_more(missing)}; "
            f"the weights and {source} do not belong together, fetch both again"
        )
    extra = [name for name in weights if name not in expected and not _HARMLESS.fullmatch(name)]
    if extra:
        file, name = weights[extra[0]]
        hint = ""
        if extra[0].endswith((".scales", ".biases")):
            hint = " (its field quantization says so)" if config.quantization else " (it has no field quantization)"
        yield CheckpointError(
            f"{file.path}: tensor {show(extra[0])} {show(list(file.shape(name)))} is not part of the model that {source} "
            f"describes{hint}{_more(extra)}; the weights and {source} do not belong together"
        )
    misshaped: dict[tuple[object, ...], list[str]] = {}
    for name, shape in expected.items():
        if name in weights and (found := weights[name][0].shape(weights[name][1])) != shape:
            misshaped.setdefault((_LAYER.sub(".", name), found, shape), []).append(name)
    for (_, found, shape), names in misshaped.items():
        packing = packed.get(names[0].rpartition(".")[0] + ".weight")
        hint = f" (quantization: {packing[0]} bits, groups of {packing[1]})" if packing else ""
        yield CheckpointError(
            f"{weights[names[0]][0].path}: tensor {names[0]} has shape {list(found)}, {source} calls for {list(shape)}"
            f"{hint}{_more(names)}; the weights and {source} do not belong together"
        )


def _scaling(name: str) -> tuple[str, str]:
    """The names of the scales and the biases of a quantised matrix."""
    module = name.removesuffix(".weight")
    return module + ".scales", module + ".biases"


def _is_packed(name: str, weights: dict[str, tuple[SafetensorsFile, str]]) -> bool:
    return name in weights and weights[name][0].dtype(weights[name][1]) == "U32"


def _packed(
    weights: dict[str, tuple[SafetensorsFile, str]], config: LlamaConfig, folder: Path
) -> dict[str, tuple[int, int]]:
    """{name of a quantised matrix: (bits, group_size)}, by config.json and by which matrices have scales."""
    settings = config.quantization
    if settings is None:
        return {}
    own = {module + ".weight": packing for module, packing in settings.layers}
    packed = {}
    for name, shape in config.tensor_shapes().items():
        if len(shape) != 2:
            continue
        packing = own.get(name)
        if name not in own and (_is_packed(name, weights) or any(part in weights for part in _scaling(name))):
            packing = settings.bits, settings.group_size
        if packing is None:
            continue
        if shape[1] % packing[1]:
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization.group_size is {packing[1]}, which does not divide the rows of "
                f"{name} {list(shape)}; the weights and config.json do not belong together"
            )
        packed[name] = packing
    if not packed:
        raise CheckpointError(
            f"{folder / 'config.json'}: quantization says that the weights are quantised, but no matrix has scales; "
            "the weights and config.json do not belong together, fetch both again"
        )
    return packed


def _quantized(name: str, packing: tuple[int, int], *parts: tuple[SafetensorsFile, str]) -> MLXWeight:
    """A matrix of its codes, scales and biases."""
    (file, stored), *scaling = parts
    if file.dtype(stored) != "U32":
        raise CheckpointError(
            f"{file.path}: tensor {name} has dtype {file.dtype(stored)}, expected U32, since config.json says that it "
            "is quantised; the weights and config.json do not belong together"
        )
    kinds = [file.dtype(stored) for file, stored in scaling]
    for (file, stored), kind in zip(scaling, kinds):
        if kind not in ("F32", "F16", "BF16") or kind != kinds[0]:
            wanted = kinds[0] if kind in ("F32", "F16", "BF16") else "F32, F16 or BF16"
            raise CheckpointError(
                f"{file.path}: tensor {stored} has dtype {kind}, expected {wanted}, as the scales of a quantised matrix "
                "have; quantise the model again with mlx_lm.convert"
            )
    arrays, pages = zip(*(file.array(stored) for file, stored in parts))
    return MLXWeight(name, *packing, *arrays, [page for page in pages if page])


def _rest(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.bits, tensor._map, tensor._offset


def _more(names: list[str]) -> str:
    return f", and {len(names) - 1} more" if len(names) > 1 else ""


def _generation_eos(raw: dict[str, Any], folder: Path, vocab: int) -> list[int]:
    value = raw.get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab:
            raise ConfigError(
                f"{folder / 'generation_config.json'}: eos_token_id is {show(value)}, expected token ids from 0 to "
                f"{vocab - 1}; correct the file"
            )
    return values
