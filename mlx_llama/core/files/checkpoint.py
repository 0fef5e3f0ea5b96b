"""A folder, a .gguf file or a hub id -> config, tokenizer, template and named tensors, nothing copied.

`open_checkpoint` checks all that needs no weights: the config, the headers of all weight files, and that the tensors are
those of the config, with their shapes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_llama.core.errors import CheckpointError, ConfigError
from mlx_llama.core.models.config import LlamaConfig, read_json, show

from . import hub
from .adapters import Adapter, merge, open_adapters
from .fit import select, split
from .folder import INDEX, SINGLE, find_weights
from .gguf import GGUFFile, part_names
from .quantized import AffineWeight
from .tensor import Tensor

if TYPE_CHECKING:
    from mlx_llama.core.text.template import ChatTemplate
    from mlx_llama.core.text.tokenizer import Tokenizer

__all__ = ["GUIDE_PATH", "Checkpoint", "Tensor", "find_local", "open_checkpoint"]

GUIDE_PATH = Path(__file__).resolve().parents[2] / "guide"  # the model that ships in the package


@dataclass(frozen=True)
class Checkpoint:
    """An opened model: all that a backend needs to load it. Opening reads headers only.

    name: as the user gave it. path: the folder, or the .gguf file. tensors: exactly those of `config.tensor_shapes()`.
    stored: those of `config.stored_shapes()`, of which some have the rows of several `tensors`; None for the same.
    generation_config: the parsed generation_config.json, {} without one. nbytes: of all tensors. gguf_metadata: of a
    GGUF file, else None. adapters: what is added to the matrices for requests that ask for it; its number is its index + 1.
    """

    name: str
    path: Path
    config: LlamaConfig
    tensors: Mapping[str, Tensor | AffineWeight] = field(repr=False)
    generation_config: dict[str, Any] = field(repr=False)
    nbytes: int
    gguf_metadata: dict[str, Any] | None = field(default=None, repr=False)
    stored: Mapping[str, Tensor | AffineWeight] | None = field(default=None, repr=False)
    adapters: tuple[Adapter, ...] = ()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at the first use.

        Raises:
            TokenizerError: missing, malformed, or larger than the model's vocabulary.
        """
        if self.gguf_metadata is not None:
            from mlx_llama.core.text.gguf_tokenizer import load_gguf_tokenizer

            return load_gguf_tokenizer(self.gguf_metadata, self.config, str(self.path))
        from mlx_llama.core.text.hf_tokenizer import load_tokenizer

        return load_tokenizer(self.path, self.config)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template, loaded at the first use; None for a model without one.

        Raises:
            TemplateError: malformed.
        """
        from mlx_llama.core.text.template import ChatTemplate, read_gguf_template, read_template, start_early

        found = (read_template(self.path) if self.gguf_metadata is None
                 else read_gguf_template(self.gguf_metadata, str(self.path)))
        if found is None:
            return None
        start_early(found)
        return ChatTemplate(*found, self.tokenizer.named)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """All tokens that end an answer: the config's, generation_config.json's and the tokenizer's."""
        ids = set(self.config.eos_token_ids)
        ids.update(_read_eos_ids(self.generation_config, self.path, self.config.vocab_size))
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
        """Dtype for activations: a low-bit matrix's `dtype`, else the width of the stored embedding; bfloat16 instead of
        float16 for a family that exceeds it."""
        low_bit = (tensor.dtype for tensor in self.tensors.values() if isinstance(tensor, AffineWeight))
        stored = next(low_bit, self.tensors["model.embed_tokens.weight"].dtype)
        return "bfloat16" if stored == "float16" and self.config.exceeds_float16 else stored


def check_name(name: str | os.PathLike | None) -> None:
    """Raises CheckpointError for a path that is not there; asks no hub."""
    label = "guide" if name is None else os.fspath(name)
    if label != "guide" and not hub.gguf_in_hub(label) and not hub.is_hub_id(label):
        find_local(label)


def open_checkpoint(name: str | os.PathLike | None = None, revision: str | None = None,
                    adapters: Sequence[str | os.PathLike] = ()) -> Checkpoint:
    """Open a model.

    Args:
        name: a folder, a .gguf file (any part of a split one), a hub id ("org/name", or "org/name:file.gguf" for one
            file of it), or "guide" or None for the model that ships in this package. An existing path wins over a hub
            id.
        revision: branch, tag or commit; hub ids only.
        adapters: folders of LoRA adapters as PEFT and mlx_lm write them, FOLDER or FOLDER=SCALE each.

    Raises:
        CheckpointError: not found; no weights; weights truncated, corrupt, or of another model than the config; adapters
            of another model or of a kind that is not done.
        ConfigError: config.json is missing, malformed or unsupported.
    """
    checkpoint = _open(name, revision)
    if not adapters:
        return checkpoint
    return dataclasses.replace(checkpoint, adapters=open_adapters(adapters, checkpoint.config, checkpoint.tensors))


def merge_adapter(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its one adapter in its matrices, which are computed when they are read."""
    (adapter,) = checkpoint.adapters
    stored = merge(adapter, checkpoint.config, checkpoint.stored or checkpoint.tensors)
    return dataclasses.replace(checkpoint, tensors=split(stored, checkpoint.config), stored=stored, adapters=())


def _open(name: str | os.PathLike | None, revision: str | None) -> Checkpoint:
    label = "guide" if name is None else os.fspath(name)
    if name is None or (label == "guide" and not Path(label).is_dir()):
        folder, config = GUIDE_PATH, None
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: the model that ships is missing; install mlx_llama again, or name a model"
            )
    elif hub.gguf_in_hub(label):
        return _open_gguf(label, hub.fetch_gguf(label, revision))
    elif hub.is_hub_id(label):
        # Settings first: refuse an unsupported model before downloading gigabytes.
        folder = hub.fetch(label, revision, hub.SETTINGS)
        if not (folder / "config.json").exists():
            raise CheckpointError(
                f"model {label}: has no config.json; if it holds GGUF files, name one: {label}:FILE.gguf"
            )
        config = LlamaConfig.from_file(folder)
        folder = hub.fetch(label, revision, hub.SETTINGS + hub.WEIGHTS)
    else:
        if revision is not None:
            raise CheckpointError(f"model {label}: is a path, and only hub ids have a revision; leave it out")
        folder, config = find_local(label), None
        if folder.is_file():
            return _open_gguf(label, folder)
    config = config or LlamaConfig.from_file(folder)
    stored = select(find_weights(folder), config, folder)
    tensors = split(stored, config)
    path = folder / "generation_config.json"
    generation = read_json(path, ConfigError) if path.exists() else {}
    _read_eos_ids(generation, folder, config.vocab_size)  # report a bad one now, not after the first answer
    return Checkpoint(
        name=label,
        path=folder,
        config=config,
        tensors=tensors,
        generation_config=generation,
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        stored=stored,
    )


def _open_gguf(name: str, path: Path) -> Checkpoint:
    file = GGUFFile(path)
    stored = select({tensor: (file, tensor) for tensor in file.names}, file.config, path, "its metadata")
    tensors = split(stored, file.config)
    return Checkpoint(
        name=name,
        path=path,
        config=file.config,
        tensors=tensors,
        generation_config={},
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        gguf_metadata=file.metadata,
        stored=stored,
    )


def find_local(name: str) -> Path:
    """The existing folder or .gguf file of a path; the .gguf file of a folder whose only weights are one GGUF model.

    Raises:
        CheckpointError: no such path, or several GGUF models.
    """
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # unlike pathlib, os.path does not raise for long names, NUL and ~nobody
        files = sorted(file.name for file in path.glob("*.gguf"))
        if not files or (path / SINGLE).exists() or (path / INDEX).exists():
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
    if meant := hub.read_address(name):
        raise CheckpointError(f"model {show(name)}: is an address; did you mean {meant}?")
    if path.suffix == ".gguf":
        raise CheckpointError(f"{show(name)}: no such file; check the path (a file on the hub is org/name:file.gguf)")
    raise CheckpointError(
        f"model {show(name)}: no such folder, and not a hub id (which look like org/name); check the path, or use guide, "
        "the model that ships"
    )


def _read_eos_ids(raw: dict[str, Any], folder: Path, vocab: int) -> list[int]:
    value = raw.get("eos_token_id")
    values = [] if value is None else value if isinstance(value, list) else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < vocab:
            raise ConfigError(
                f"{folder / 'generation_config.json'}: eos_token_id is {show(value)}, expected token ids from 0 to "
                f"{vocab - 1}; correct the file"
            )
    return values
