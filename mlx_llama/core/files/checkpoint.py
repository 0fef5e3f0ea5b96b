"""A folder, a .gguf file or a hub id -> config, tokenizer, template and named tensors, zero-copy.
`open_checkpoint` checks everything but the weights: the config, the headers of all weight files,
and the names and shapes of all tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, ConfigError, show
from mlx_llama.core.models.config import LlamaConfig, RopeConfig
from mlx_llama.core.models.fields import Reader
from mlx_llama.core.models.quantization import Packing, Quantization
from mlx_llama.core.system.files import read_json
from mlx_llama.core.system.forks import cached_property

from . import hub
from .adapters import Adapter, merge, open_adapters
from .fit import describe_form, select, split
from .gguf import GGUFFile, is_gguf, list_models, part_names, pick_type
from .quantized import AffineWeight
from .safetensors import INDEX, find_single, find_weights
from .tensor import Tensor, notice_decoded

if TYPE_CHECKING:
    from mlx_llama.core.text.template import ChatTemplate
    from mlx_llama.core.text.tokenizer import Tokenizer

GUIDE_PATH = Path(__file__).resolve().parents[2] / "guide"  # the model that ships in the package


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: everything that a backend needs to load it. Opening reads only headers."""

    name: str  # as the user wrote it
    path: Path  # the folder, or the .gguf file
    config: LlamaConfig
    # exactly those of `config.tensor_shapes()`
    tensors: Mapping[str, Tensor | AffineWeight] = field(repr=False)
    # parsed generation_config.json, {} if there is none
    generation_config: dict[str, Any] = field(repr=False)
    nbytes: int  # size of all tensors
    gguf_metadata: dict[str, Any] | None = field(default=None, repr=False)  # None for folders
    # those of `config.stored_shapes()`, with the rows of several `tensors`; None: the same
    stored: Mapping[str, Tensor | AffineWeight] | None = field(default=None, repr=False)
    # for requests that ask for them; an adapter's number is its index + 1
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at first use. Raises TokenizerError if it is missing, malformed, or
        larger than the model's vocabulary.
        """
        if self.gguf_metadata is not None:
            from mlx_llama.core.text.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(self.gguf_metadata, self.config, str(self.path))
        from mlx_llama.core.text.hf_tokenizer import load_tokenizer

        return load_tokenizer(self.path, self.config)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template or None, loaded at first use. Raises TemplateError if malformed."""
        from mlx_llama.core.text import template

        if self.gguf_metadata is None:
            text = template.read_template(self.path)
        else:
            text = template.read_gguf_template(self.gguf_metadata, str(self.path))
        if text is None:
            return None
        template.start_early(text)
        return text.compile(self.tokenizer.named)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end an answer, of config.json, generation_config.json and the tokenizer."""
        ids = set(self.config.eos_token_ids)
        ids.update(_read_eos_ids(self.generation_config, self.path, self.config.vocab_size))
        if self._has_tokenizer:
            ids.update(self.tokenizer.eos_ids)
        return frozenset(ids)

    @cached_property
    def bos_token_id(self) -> int | None:
        """The token that begins a text: of the tokenizer, else of the config."""
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
    def low_bit(self) -> list[AffineWeight]:
        return [tensor for tensor in self.tensors.values() if isinstance(tensor, AffineWeight)]

    @property
    def formats(self) -> str:
        """Formats of the matrices, by descending number of weights: "Q4_K, Q6_K"."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if len(tensor.shape) == 2:
                sizes[tensor.description] += math.prod(tensor.shape)
        return ", ".join(name for name, _ in sizes.most_common())

    @property
    def dtype(self) -> str:
        """Dtype for activations: the weights', or bfloat16 where the family overflows float16."""
        low_bit = self.low_bit
        stored = (low_bit[0] if low_bit else self.tensors["model.embed_tokens.weight"]).dtype
        return "bfloat16" if stored == "float16" and self.config.exceeds_float16 else stored


def check_name(name: str | os.PathLike | None) -> None:
    """Raise CheckpointError for a missing path, without asking a hub."""
    label = "guide" if name is None else os.fspath(name)
    if label != "guide" and hub.hub_name(label) is None:
        find_local(label)


def open_checkpoint(
    name: str | os.PathLike | None = None,
    revision: str | None = None,
    adapters: Sequence[str | os.PathLike] = (),
) -> Checkpoint:
    """Open a model.

    Args:
        name: a folder, a GGUF file (any part of a split file), a hub id ("org/name"; with
            ":file.gguf" or ":Q4_K_M" for a GGUF file in it, as with a folder), its address, a name
            of `hub.SHORT_NAMES`, or "guide" or None for the model in this package. An existing path
            takes precedence.
        revision: branch, tag or commit of a hub id.
        adapters: folders of LoRA adapters of PEFT or mlx_lm, as FOLDER or FOLDER=SCALE.

    Raises CheckpointError: not found; no weights; weights truncated, corrupt, or of another model
    than the config; adapters of another model, or unsupported. ConfigError: config.json is missing,
    malformed or unsupported.
    """
    checkpoint = _open(name, revision)
    opened = open_adapters(adapters, checkpoint.config, checkpoint.tensors)
    return dataclasses.replace(checkpoint, adapters=opened) if opened else checkpoint


def merge_adapter(checkpoint: Checkpoint) -> Checkpoint:
    """Merge a checkpoint's single adapter into its matrices, which are computed when read."""
    (adapter,) = checkpoint.adapters
    stored = merge(adapter, checkpoint.config, checkpoint.stored or checkpoint.tensors)
    tensors = split(stored, checkpoint.config)
    return dataclasses.replace(checkpoint, tensors=tensors, stored=stored, adapters=())


def find_model(
    name: str | os.PathLike | None = None, revision: str | None = None, local_only: bool = False
) -> tuple[str, Path]:
    """The full name of a model, and its folder or .gguf file; of a hub id in the cache, downloaded
    if it is missing there. name: as for `open_checkpoint`. local_only: download nothing. Raises
    CheckpointError, and ConfigError for an unsupported model before its weights are fetched.
    """
    label = "guide" if name is None else os.fspath(name)
    if name is None or (label == "guide" and not Path(label).is_dir()):
        if not GUIDE_PATH.is_dir():
            raise CheckpointError(
                f"{GUIDE_PATH}: the model of this package is missing; install mlx_llama again, or "
                "choose a model"
            )
        return label, GUIDE_PATH
    if (named := hub.hub_name(label)) is None:
        if revision is not None:
            raise CheckpointError(
                f"model {label}: is a path, and only hub ids have a revision; leave it out"
            )
        path = find_local(label)
        return (label if os.path.exists(os.path.expanduser(label)) else str(path)), path
    if ":" not in named:
        folder = hub.fetch(named, revision, hub.SETTINGS, local_only=local_only)
        if (folder / "config.json").exists():
            if not local_only:
                LlamaConfig.from_file(folder)
            return named, hub.fetch(named, revision, local_only=local_only)
    if not named.endswith(".gguf"):
        named = hub.find_gguf(named, revision, local_only)
    return named, hub.fetch_gguf(named, revision, local_only)


def _open(name: str | os.PathLike | None, revision: str | None) -> Checkpoint:
    label, path = find_model(name, revision)
    generation, metadata, source = dict[str, Any](), None, "config.json"
    if path.is_file():
        gguf = GGUFFile(path)
        config, weights, metadata, source = gguf.config, gguf.weights, gguf.metadata, "its metadata"
    else:
        config, file = LlamaConfig.from_file(path), path / "generation_config.json"
        generation = read_json(file, ConfigError) if file.exists() else {}
        # report a bad id now, not after the first answer
        _read_eos_ids(generation, path, config.vocab_size)
        weights = find_weights(path)
        config = describe_form(weights, config)
    stored = select(weights, config, path, source)
    if notice := notice_decoded(stored.values()):
        config = dataclasses.replace(config, notices=(*config.notices, notice))
    tensors = split(stored, config)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Checkpoint(label, path, config, tensors, generation, nbytes, metadata, stored)


def find_local(name: str) -> Path:
    """Find the folder or .gguf file at a path, the only GGUF model in a folder, or by FOLDER:Q8_0
    that of a type. Raises CheckpointError: no such path, no model in the folder, or several GGUF
    models.
    """
    path = Path(os.path.expanduser(name))
    # unlike pathlib, os.path does not raise for long names, NUL and ~nobody
    if name and os.path.isdir(path):
        files = sorted(list_models(file.name for file in path.glob("*.gguf")))
        names = (INDEX,) if files else (INDEX, "config.json", "params.json")
        if find_single(path) or any((path / name).exists() for name in names):
            return path
        if not files:
            raise CheckpointError(
                f"{path}: holds no model, neither config.json nor a .gguf file; choose the folder "
                "or the file of a model"
            )
        if files != [part for part in part_names(files[0]) if part in files]:
            raise CheckpointError(
                f"{path}: holds {len(files)} GGUF files ({show(', '.join(files))}); name one "
                f"of them, or its type, as in {path}:Q8_0"
            )
        return path / files[0]
    if name and os.path.exists(path):
        if path.suffix != ".gguf" and not is_gguf(path):
            raise CheckpointError(
                f"{path}: is a file, expected a folder with config.json and weights, or a "
                ".gguf file; choose the folder"
            )
        return path
    folder, colon, kind = name.rpartition(":")
    if colon and folder and os.path.isdir(os.path.expanduser(folder)):
        return _find_type(Path(os.path.expanduser(folder)), kind)
    if path.suffix == ".gguf":
        raise CheckpointError(
            f"{show(name)}: no such file; check the path (a file on the hub is org/name:file.gguf)"
        )
    raise CheckpointError(
        f"model {show(name)}: no such folder, and not a hub id (those look like org/name); check "
        f"the path, or use guide, the model in the package, or one of {', '.join(hub.SHORT_NAMES)}"
    )


def _find_type(folder: Path, kind: str) -> Path:
    """The file of FOLDER:TYPE or FOLDER:FILE.gguf, also one folder deeper, as on the hub."""
    files = [*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]
    names = [file.relative_to(folder).as_posix() for file in files]
    if file := kind if kind in names else pick_type(names, kind):
        return folder / file
    models = show(", ".join(list_models(names)) or "none")
    raise CheckpointError(
        f"{folder}: has no GGUF file of the type {show(kind)}, only {models}; choose another"
    )


def _read_eos_ids(raw: dict[str, Any], folder: Path, vocab: int) -> tuple[int, ...]:
    read = Reader(raw, str(folder / "generation_config.json"))
    return read.tokens("eos_token_id", None, vocab)


# Identity of a checkpoint, for files that belong to it: golden traces and prompt caches

_SAMPLED = 64  # rows of each tensor


def checkpoint_hash(checkpoint: Checkpoint) -> str:
    """SHA-256 of the config and of all tensors' names, shapes, formats and up to 64 rows. Sampling
    takes a moment for a checkpoint of any size, and other weights differ in all rows.
    """
    facts = json.dumps(_hashed_fields(checkpoint.config), sort_keys=True, default=str)
    digest = hashlib.sha256(facts.encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        count = tensor.shape[0]
        rows = np.unique(np.linspace(0, count - 1, min(_SAMPLED, count)).astype(np.int64))
        if isinstance(tensor, Tensor):
            kind, values = tensor.dtype, tensor.bits[rows]
        else:
            kind, values = tensor.format, tensor.take(rows)
        digest.update(f"{name} {list(tensor.shape)} {kind}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def _hashed_fields(config: LlamaConfig) -> dict[str, Any]:
    """The config's fields. Later ones count only if set: hashes of the first traces stay valid."""
    compared = (field for field in fields(config) if field.compare)
    values = {field.name: (getattr(config, field.name), field.default) for field in compared}
    values["own"] = config.own, {}
    alike = (config.layer_types[0],) * config.num_hidden_layers
    values["layer_types"] = config.layer_types, alike
    values["rope"] = _describe_rope(config.rope), MISSING
    if isinstance(config.quantization, Quantization):
        values["quantization"] = _describe_quantization(config.quantization), MISSING
    return {
        name: value
        for name, (value, default) in values.items()
        if default is MISSING or name == "quantization" or value != default
    }


def _describe_quantization(quantization: Quantization) -> str:
    """As the first traces have it, with the modes that they lack."""

    def describe(packing: Packing) -> tuple[Any, ...]:
        return packing[:2] if packing.mode == "affine" else tuple(packing)

    bits, group_size, *mode = describe(quantization.packing)
    layers = tuple(
        (module, packing and describe(packing)) for module, packing in quantization.layers
    )
    also = f", mode={mode[0]!r}" if mode else ""
    return f"Quantization(bits={bits}, group_size={group_size}, layers={layers!r}{also})"


def _describe_rope(rope: RopeConfig) -> str:
    """The fields that the first traces have, and later fields that are set."""
    later = ("short_factor", "long_factor", "dim", "share")
    values = {field.name: getattr(rope, field.name) for field in fields(rope)}
    shown = (f"{n}={x!r}" for n, x in values.items() if n not in later or x is not None)
    return f"RopeConfig({', '.join(shown)})"
