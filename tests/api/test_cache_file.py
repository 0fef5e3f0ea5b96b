"""Prompt cache files: read by safetensors' own reader, refused in one line where they belong
elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from making import make_checkpoint, refusal

from mlx_llama.api import cache_file
from mlx_llama.api.cache_file import Identity, read_cache, write_cache
from mlx_llama.core.errors import SessionError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.system import files

WIDTHS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def make_state(config, length=5, seed=0):
    rng = np.random.default_rng(seed)
    shape = (config.num_hidden_layers, config.num_key_value_heads, length, config.head_dim)
    return {
        "tokens": rng.integers(0, config.vocab_size, length).astype(np.int32),
        "keys": rng.standard_normal(shape).astype(np.float32),
        "values": rng.standard_normal(shape).astype(np.float32),
    }


@pytest.fixture(scope="module")
def checkpoint(toy):
    return open_checkpoint(toy)


@pytest.fixture
def saved(checkpoint, tmp_path):
    """(path, identity, state) of a file at float32."""
    identity, state = Identity.of(checkpoint, "float32", None), make_state(checkpoint.config)
    return write_cache(tmp_path / "it.safetensors", state, identity), identity, state


def header(path) -> dict:
    """The header by the format's definition: eight bytes of length, then JSON."""
    with open(path, "rb") as file:
        [length] = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(length))


@pytest.mark.parametrize("width", [*WIDTHS, "8 bits"])
def test_the_file_is_what_safetensors_reads(width, checkpoint, tmp_path):
    how = ("float32", 8) if width == "8 bits" else (width, None)
    identity = Identity.of(checkpoint, *how)
    state = make_state(checkpoint.config)
    path = write_cache(tmp_path / "it.safetensors", state, identity)
    number = WIDTHS.get(width, np.float16)
    theirs = safetensors.numpy.load_file(path)
    assert theirs.keys() == {"tokens", "keys", "values"} and theirs["tokens"].dtype == np.int32
    assert theirs["tokens"].tolist() == state["tokens"].tolist()
    fields = header(path)
    names = {"format": "mlx_llama cache", "version": "1", "model": "toy"}
    names |= {"hash": identity.hash, "width": width}
    digest = hashlib.blake2b(digest_size=16)
    for name in ("tokens", "keys", "values"):
        digest.update(np.ascontiguousarray(theirs[name]).tobytes())
    assert fields["__metadata__"] == names | {"checksum": digest.hexdigest()}
    assert fields["keys"]["dtype"] == {"float32": "F32", "bfloat16": "BF16"}.get(width, "F16")
    back = read_cache(path, identity)
    for name in ("keys", "values"):
        rounded = state[name].astype(number)
        assert theirs[name].dtype == number and theirs[name].tobytes() == rounded.tobytes()
        assert back[name].dtype == np.float32
        assert back[name].tobytes() == rounded.astype(np.float32).tobytes()
    assert back["tokens"].dtype == np.int32 and back["tokens"].tolist() == state["tokens"].tolist()


def test_only_the_owner_reads_it_and_nothing_is_left_beside_it(saved):
    path, _, _ = saved
    assert os.listdir(path.parent) == [path.name]
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_replaces_a_cache_and_no_other_file(saved, checkpoint):
    path, identity, _ = saved
    write_cache(path, make_state(checkpoint.config, 9), identity)
    assert len(read_cache(path, identity)["tokens"]) == 9
    other = path.read_bytes().replace(b"mlx_llama cache", b"mlx_llama othes")
    for content in (b"", b"precious", other):
        path.write_bytes(content)
        with pytest.raises(SessionError, match="exists already and is not a prompt cache"):
            write_cache(path, make_state(checkpoint.config), identity)
        assert path.read_bytes() == content
    with pytest.raises(SessionError, match="exists already and is not a prompt cache"):
        write_cache(path.parent, make_state(checkpoint.config), identity)


def test_a_failure_keeps_the_old_file(saved, checkpoint, monkeypatch):
    path, identity, state = saved

    def fail(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise cache_file.SafetensorError("disk full")

    monkeypatch.setattr(cache_file, "save_file", fail)
    with pytest.raises(SessionError, match="cannot be written .disk full"):
        write_cache(path, make_state(checkpoint.config, 9), identity)
    assert os.listdir(path.parent) == [path.name]
    assert read_cache(path, identity)["keys"].tobytes() == state["keys"].tobytes()
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=9))
    with pytest.raises(SessionError, match="the disk has 0.00 GB free"):
        write_cache(path, state, identity)


@pytest.mark.parametrize("state", [{}, {"tokens": np.zeros(0, np.int32)}])
def test_nothing_to_save(state, checkpoint, tmp_path):
    with pytest.raises(SessionError, match="there is nothing to save yet"):
        write_cache(tmp_path / "it", state, Identity.of(checkpoint, "float32", None))
    assert not list(tmp_path.iterdir())


def refused(path, identity) -> str:
    text = refusal(read_cache, path, identity, kind=SessionError)
    assert text.startswith(f"{path}: ")
    return text


@pytest.mark.parametrize("fields", [dict(seed=1), dict(rope_theta=12345.0), dict(dtype="bfloat16")])
def test_another_model_is_refused(fields, saved, tmp_path):
    path, identity, _ = saved
    folder = make_checkpoint(tmp_path / "other", **fields)
    other = Identity.of(open_checkpoint(folder), "float32", None)
    text = refused(path, other)
    assert "was made by the model 'toy', and this is other" in text and "`model`" in text
    assert read_cache(path, identity)["tokens"].size


PLAIN = "load with `dtype='{}'` and without `cache_bits`"
EITHER = PLAIN.format("float16") + ", or with `dtype='float32'` and `cache_bits` 16"


@pytest.mark.parametrize(
    "made, run, remedy",
    [
        (("float32", None), ("float16", None), PLAIN.format("float32")),
        (("bfloat16", None), ("float32", None), "load with `dtype='bfloat16'`"),
        (("float32", 8), ("float32", None), "load with `cache_bits` 8"),
        (("float16", None), ("float16", 8), PLAIN.format("float16")),
        (("float32", 16), ("float32", None), EITHER),
        (("float32", None), ("float32", 16), PLAIN.format("float32")),
        (("bfloat16", 16), ("float32", 16), "load with `dtype='bfloat16'`"),
    ],
)
def test_another_width_is_refused_with_the_remedy(made, run, remedy, checkpoint, tmp_path):
    state = make_state(checkpoint.config)
    path = write_cache(tmp_path / "it", state, Identity.of(checkpoint, *made))
    assert remedy in refused(path, Identity.of(checkpoint, *run))


def test_longrope_turns_keys_by_the_contexts_length(tmp_path):
    """Factors as in Phi-3: the same file is right in contexts on the same side of the trained
    length.
    """
    from mlx_llama import load

    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    fields = dict(max_position_embeddings=128, original_max_position_embeddings=64)
    fields["rope_scaling"] = {"rope_type": "longrope", **factors}
    folder = make_checkpoint(tmp_path / "phi", head_dim=16, **fields)
    made = {size: load(folder, backend="cpu", ctx_size=size) for size in (48, 64, 65, 128)}
    for context, llm in made.items():
        llm.generate("hello", max_tokens=2, temperature=0)
        path = tmp_path / str(context)
        llm.save_cache(path)
        for size, other in made.items():
            if (size > 64) == (context > 64):
                assert other.load_cache(path)
            else:
                side = "above" if context > 64 else "of at most"
                assert f"`ctx_size` {side} 64" in refused(path, other.identify_cache())


def rewrite(path, metadata=None, **tensors):
    """Write the file again with other metadata or tensors (None: without), by the library."""
    arrays, old = safetensors.numpy.load_file(path), header(path)["__metadata__"]
    arrays = {name: array for name, array in (arrays | tensors).items() if array is not None}
    safetensors.numpy.save_file(arrays, path, old | (metadata or {}))


def test_another_version_is_refused(saved):
    path, identity, _ = saved
    rewrite(path, {"version": "2"})
    assert "has version '2', this program reads 1" in refused(path, identity)


DAMAGES = [
    (lambda s: {"keys": None}, "holds"),
    (lambda s: {"tokens": None}, "holds"),
    (lambda s: {"more": np.zeros(2)}, "holds"),
    (lambda s: {"tokens": s["tokens"][:0]}, "holds"),
    (lambda s: {"tokens": s["tokens"][:4]}, "holds"),
    (lambda s: {"keys": s["keys"][:1]}, "holds"),
    (lambda s: {"values": s["values"].astype(np.float64)}, "holds"),
    (lambda s: {"tokens": s["tokens"].astype(np.int64)}, "holds"),
    (lambda s: {"tokens": s["tokens"][:, None]}, "holds"),
    (lambda s: {"tokens": s["tokens"] - 1000}, "outside the vocabulary of 384"),
    (lambda s: {"tokens": np.full_like(s["tokens"], 384)}, "outside the vocabulary of 384"),
    (lambda s: {"keys": s["keys"] * np.inf}, "not finite"),
    (lambda s: {"values": np.where(s["values"] > 1, np.nan, s["values"])}, "not finite"),
]


@pytest.mark.parametrize("damage, part", DAMAGES)
def test_a_crafted_file_is_refused(damage, part, saved):
    path, identity, state = saved
    rewrite(path, **damage(state))
    text = refused(path, identity)
    assert "is not a complete prompt cache" in text and part in text


def flip(path, name):
    """Change a bit in the middle of a tensor's bytes."""
    raw, fields = bytearray(path.read_bytes()), header(path)
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + sum(fields[name]["data_offsets"]) // 2 // 4 * 4] ^= 1
    path.write_bytes(raw)


CHANGES = {
    "keys zeroed": lambda path, s: rewrite(path, keys=0 * s["keys"]),
    "keys and values swapped": lambda path, s: rewrite(path, keys=s["values"], values=s["keys"]),
    "other tokens": lambda path, s: rewrite(path, tokens=s["tokens"][::-1].copy()),
    "another checksum": lambda path, s: rewrite(path, {"checksum": "00" * 16}),
    **{f"a bit of {x}": lambda path, s, x=x: flip(path, x) for x in ("tokens", "keys", "values")},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("width", [*WIDTHS, "8 bits"])
def test_damage_that_leaves_good_numbers_is_refused(width, change, checkpoint, tmp_path):
    how = ("float32", 8) if width == "8 bits" else (width, None)
    identity, state = Identity.of(checkpoint, *how), make_state(checkpoint.config)
    path = write_cache(tmp_path / "it.safetensors", state, identity)
    CHANGES[change](path, safetensors.numpy.load_file(path))
    text = refused(path, identity)
    assert "is not a complete prompt cache (its checksum is another" in text
    assert "remove it, or name another file" in text


def test_damage_of_a_models_own_cache_is_refused(toy, where, tmp_path):
    from mlx_llama import load

    llm, path = load(toy, **where), tmp_path / "it"
    llm.generate("Once upon", max_tokens=4, temperature=0)
    llm.save_cache(path)
    assert llm.load_cache(path) == len(safetensors.numpy.load_file(path)["tokens"])
    flip(path, "keys")
    with pytest.raises(SessionError, match="its checksum is another"):
        llm.load_cache(path)


def test_a_file_of_an_earlier_release_has_no_checksum_and_is_read(saved):
    path, identity, state = saved
    metadata = header(path)["__metadata__"]
    metadata.pop("checksum")
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, metadata)
    assert read_cache(path, identity)["keys"].tobytes() == state["keys"].tobytes()


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 300, -1, -1000])
def test_a_truncated_file_is_refused(cut, saved):
    path, identity, _ = saved
    path.write_bytes(path.read_bytes()[:cut])
    assert "is not a complete prompt cache" in refused(path, identity)


def test_a_foreign_file_is_refused(saved, toy, tmp_path):
    _, identity, _ = saved
    assert "is not a prompt cache" in refused(toy / "model.safetensors", identity)
    assert "is not a complete prompt cache" in refused(toy / "config.json", identity)
    assert "cannot be read: No such file" in refused(tmp_path / "none", identity)
    assert "cannot be read: Is a directory" in refused(tmp_path, identity)
    (tmp_path / "long").write_bytes((95_000_000).to_bytes(8, "little"))
    text = refused(tmp_path / "long", identity)
    assert "is not a complete prompt cache (its header has 95000000 bytes)" in text
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "cannot be read: is not a regular file" in refused(tmp_path / "pipe", identity)
    assert cache_file.cache_path(tmp_path / "a.json") == tmp_path / "a.json.safetensors"


def test_a_path_that_cannot_be_written(saved, checkpoint):
    path, identity, state = saved
    for bad in (path / "below", "nul\0", "/proc/nope/it", path.parent / "none" / "it"):
        with pytest.raises(SessionError, match="cannot be |there is no folder"):
            write_cache(bad, state, identity)
    assert not (path.parent / "none").exists()
