"""Prompt cache files: the tokens, keys and values of one row, for another process to continue.

A safetensors file in one layout for all backends: `tokens` int32 [n], `keys` and `values` [layers,
G, n, D], keys after rope, in the cache's width (float16 where it has 8 bits); `keys.1` and so on
for layers of another shape; and `recurrent` float32 [m], the states after n tokens of a model that
has such. The metadata names the format, its version, the width, the checkpoint with its hash, and a
checksum of the arrays: with other weights, another width or damage the answer would differ from a
cold start's. Files of earlier releases have no checksum; they are read as before.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mlx_llama.core.backends.positions import state_nbytes
from mlx_llama.core.errors import CheckpointError, SessionError, show
from mlx_llama.core.files.checkpoint import Checkpoint, checkpoint_hash
from mlx_llama.core.files.tensor import CODES, encode
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.files import open_file, replace_when_done, writing

from .session_file import expand_path

FORMAT = "mlx_llama cache"
VERSION = "1"
EIGHT_BITS = "8 bits"
_MAX_HEADER = 1 << 16  # bytes; ours have a few hundred
_REMEDY = "remove it, or name another file"


@dataclass(frozen=True)
class Identity:
    """The model and the width that a cache file belongs to."""

    model: str  # the checkpoint's name, for messages
    hash: str  # the checkpoint's, with the adapter's if there is one
    width: str  # the KV cache's: "float32", "float16", "bfloat16" or "8 bits"
    config: LlamaConfig  # for the shapes
    factors: str = ""  # rope type "longrope": "short" or "long", by the context

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        dtype: str,
        cache_bits: int | None,
        context: int = 0,
        adapter: int = 0,
    ) -> Identity:
        """dtype: of the activations, by name. context: positions. adapter: its number, or 0."""
        # a path of this machine means nothing elsewhere
        name = Path(checkpoint.name).name if os.path.exists(checkpoint.name) else checkpoint.name
        width = "float16" if cache_bits == 16 and dtype == "float32" else dtype
        width = EIGHT_BITS if cache_bits == 8 else width
        rope, factors = checkpoint.config.rope, ""
        if rope.type == "longrope":
            trained = rope.original_max_position_embeddings
            assert trained is not None  # type "longrope" has it
            factors = "long" if context > trained else "short"
        digest = checkpoint_hash(checkpoint)
        if adapter:
            used = checkpoint.adapters[adapter - 1]
            name, digest = f"{name} with the adapter {used.name}", f"{digest}-{used.digest}"
        return cls(name, digest, width, checkpoint.config, factors)


def check_folder(path: str | os.PathLike) -> None:
    """Raise SessionError if there is no folder for a file to write."""
    path = expand_path(path)
    if not path.absolute().parent.is_dir():
        raise SessionError(f"{path}: there is no folder {path.parent}: make it, or choose another")


def write_cache(
    path: str | os.PathLike, state: Mapping[str, np.ndarray], identity: Identity
) -> Path:
    """Write the state of a row atomically, over a prompt cache only. Raises SessionError."""
    path = expand_path(path)
    if not state or not len(state["tokens"]):
        raise SessionError(f"{path}: there is nothing to save yet: generate an answer first")
    if os.path.lexists(path) and not _is_cache(path):
        raise SessionError(f"{path}: exists already and is not a prompt cache: choose another name")
    check_folder(path)
    number = "float16" if identity.width == EIGHT_BITS else identity.width
    tensors = {"tokens": np.ascontiguousarray(state["tokens"], np.int32)}
    for name in identity.config.state_shapes(0):
        tensors[name] = np.ascontiguousarray(encode(np.asarray(state[name]), number))
    if "recurrent" in state:
        tensors["recurrent"] = np.ascontiguousarray(state["recurrent"], np.float32)
    nbytes = sum(array.nbytes for array in tensors.values())
    metadata = {"format": FORMAT, "version": VERSION, "model": identity.model}
    metadata |= {"hash": identity.hash, "width": identity.width}
    metadata |= {"factors": identity.factors} if identity.factors else {}
    digest = hashlib.blake2b(digest_size=16)
    for array in tensors.values():
        _add(digest, array)
    metadata["checksum"] = digest.hexdigest()
    try:
        with replace_when_done(path, nbytes, folder=False, overwrites=True) as partial:
            # conversations are private
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            save_file(tensors, partial, metadata)
    except SafetensorError as error:
        raise SessionError(
            f"{path}: cannot be written ({error}); check the free space and the permissions"
        ) from None
    except CheckpointError as error:
        raise SessionError(error.args[0]) from None
    return path


def read_cache(path: str | os.PathLike, identity: Identity) -> dict[str, np.ndarray]:
    """The state of a row, for Cache.restore. Raises SessionError for an unusable file."""
    path = expand_path(path)
    metadata = _read_metadata(path)
    if metadata.get("format") != FORMAT:
        raise SessionError(f'{path}: is not a prompt cache (no "format": {FORMAT!r}): {_REMEDY}')
    if (version := metadata.get("version")) != VERSION:
        text = f"has version {show(version)}, this program reads {VERSION}: {_REMEDY}"
        raise SessionError(f"{path}: {text}")
    if metadata.get("hash") != identity.hash:
        raise SessionError(
            f"{path}: was made by the model {show(metadata.get('model'))}, and this is "
            f"{identity.model}, with other weights or settings, or read by an earlier release: "
            "choose that model with `model`, or name another file"
        )
    width = metadata.get("width")
    if width != identity.width:
        raise SessionError(
            f"{path}: holds keys and values in {show(width)}, and this run has {identity.width}: "
            f"{_match_width(width)}, or name another file"
        )
    if (factors := metadata.get("factors", "")) != identity.factors:
        trained = identity.config.rope.original_max_position_embeddings
        raise SessionError(
            f"{path}: holds keys rotated by longrope's {show(factors)} factors, and this context "
            f"uses the {identity.factors} ones: load with `ctx_size` "
            f"{'above' if factors == 'long' else 'of at most'} {trained}, or name another file"
        )
    try:
        with safe_open(path, framework="np") as file:
            state = _read_tensors(path, file, identity, metadata.get("checksum"))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error)) from None
    return state


def cache_path(session: str | os.PathLike) -> Path:
    """The prompt cache beside a saved session."""
    path = expand_path(session)
    return path.with_name(path.name + ".safetensors")


def _read_metadata(path: Path) -> dict[str, str]:
    """The file's metadata. Raises SessionError."""
    # safetensors reports missing and locked files less clearly
    with writing(path, SessionError, "read"), open_file(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER:  # the library accepts up to 100 MB
            raise _damaged(path, f"its header has {length} bytes")
        try:
            with safe_open(path, framework="np") as tensors:
                return tensors.metadata() or {}
        except SafetensorError as error:
            raise _damaged(path, str(error)) from None


def _is_cache(path: Path) -> bool:
    try:
        return _read_metadata(path).get("format") == FORMAT
    except SessionError:
        return False


def _read_tensors(
    path: Path, file, identity: Identity, checksum: str | None
) -> dict[str, np.ndarray]:
    parts = {name: file.get_slice(name) for name in file.keys()}
    actual = {name: (part.get_dtype(), part.get_shape()) for name, part in parts.items()}
    _, [*length] = actual.get("tokens", ("", []))
    c, code = identity.config, CODES.get(identity.width, "F16")
    shapes = c.state_shapes(length[0]) if len(length) == 1 else {}
    expected = {"tokens": ("I32", length)}
    expected |= {name: (code, list(shape)) for name, shape in shapes.items()}
    if size := state_nbytes(c) // 4:
        expected["recurrent"] = "F32", [size]
    if actual != expected or len(length) != 1 or length == [0]:
        raise _damaged(path, f"holds {show(actual)}, expected {show(expected)}")
    tokens, digest = file.get_tensor("tokens"), hashlib.blake2b(digest_size=16)
    if tokens.min() < 0 or tokens.max() >= c.vocab_size:
        raise _damaged(path, f"has token ids outside the vocabulary of {c.vocab_size}")
    _add(digest, tokens)
    state = {"tokens": tokens}
    names = [name for name in expected if name != "tokens"]
    for name in names:
        array = file.get_tensor(name)
        _add(digest, array)
        state[name] = array.astype(np.float32)
    if not all(np.isfinite(layer).all() for name in names for layer in state[name]):
        raise _damaged(path, "has keys, values or states that are not finite")
    if checksum not in (None, digest.hexdigest()):
        raise _damaged(path, "its checksum is another: the file was changed or damaged")
    return state


def _add(digest: Any, array: np.ndarray) -> None:
    """Add an array's bytes to a digest, about a second per GB."""
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _match_width(width: str | None) -> str:
    if width == EIGHT_BITS:
        return "load with `cache_bits` 8"
    in_float32 = ", or with `dtype='float32'` and `cache_bits` 16" if width == "float16" else ""
    return f"load with `dtype={width!r}` and without `cache_bits`{in_float32}"


def _damaged(path: Path, reason: str) -> SessionError:
    return SessionError(
        f"{path}: is not a complete prompt cache ({' '.join(reason.split())}): {_REMEDY}"
    )
