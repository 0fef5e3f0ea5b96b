"""The safetensors container: zero-copy, and damaged or lying headers."""

import json
import mmap
import os
import struct

import numpy as np
import pytest
from hypothesis import given, strategies as st
from launching import run_python
from making import refusal, write_safetensors
from safetensors import SafetensorError, safe_open

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.safetensors import SafetensorsFile


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(
    not os.path.exists("/proc/self/statm"), reason="counts resident pages through Linux's /proc"
)
def test_opening_reads_no_weights_and_release_gives_pages_back(tmp_path):
    size = 64 << 20
    path = tmp_path / "big.safetensors"
    write_safetensors(
        path, {"small": ("F32", (2,), bytes(8)), "w": ("F32", (size // 4,), bytes(size))}
    )
    before = resident()
    tensor = SafetensorsFile(path).tensor("w")
    opened = resident()
    assert tensor.bits.sum() == 0
    touched = resident()
    tensor.release()
    released = resident()
    assert opened - before < size // 8
    assert touched - opened > size // 2
    assert released - before < size // 8
    assert tensor.bits[-1] == 0  # still readable


@pytest.mark.parametrize("lead", [0, 1, 2, 3, 4, 5])
def test_an_unaligned_file_reads_the_same(lead, tmp_path):
    x = np.arange(12, dtype=np.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
    header += b" " * (-len(header) % 8) + b" " * lead
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + x.tobytes())
    tensor = SafetensorsFile(path).tensor("w")
    np.testing.assert_array_equal(tensor.bits, x.reshape(3, 4))
    assert tensor.bits.flags.aligned and not tensor.bits.flags.writeable
    tensor.release()


def file_with(header, data=b"", path=None, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LYING = {
    "empty file": lambda p: p.write_bytes(b""),
    "seven bytes": lambda p: p.write_bytes(b"\0" * 7),
    "only a length": lambda p: p.write_bytes(struct.pack("<Q", 0)),
    "length beyond the file": lambda p: file_with(b"{}", path=p, length=3),
    "length beyond memory": lambda p: file_with(b"{}", path=p, length=2**63),
    "length all ones": lambda p: file_with(b"{}", path=p, length=2**64 - 1),
    "not JSON": lambda p: file_with(b"{nonsense}", path=p),
    "not UTF-8": lambda p: file_with(b'{"\xff": 1}', path=p),
    "not an object": lambda p: file_with(b"[1, 2]", path=p),
    "spaces first": lambda p: file_with(b" {}", path=p),
    "deep": lambda p: file_with(b'{"a":' * 100_000, path=p),
    "a name twice": lambda p: file_with(b'{"w": {}, "w": {}}', path=p),
    "entry is a number": lambda p: file_with({"w": 3}, path=p),
    "no dtype": lambda p: file_with({"w": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), p),
    "unknown dtype": lambda p: file_with({"w": entry("F128")}, bytes(8), p),
    "dtype is a list": lambda p: file_with({"w": entry(["F32"])}, bytes(8), p),
    "negative size": lambda p: file_with({"w": entry(shape=(-2,))}, bytes(8), p),
    "size is a float": lambda p: file_with({"w": entry(shape=(2.0,))}, bytes(8), p),
    "size is true": lambda p: file_with({"w": entry(shape=(True, 2))}, bytes(8), p),
    "shape is a string": lambda p: file_with({"w": {**entry(), "shape": "22"}}, bytes(8), p),
    "sizes overflow": lambda p: file_with({"w": entry(shape=(2**32, 2**32))}, bytes(8), p),
    "size of a huge number": lambda p: file_with({"w": entry(shape=(10**30,))}, bytes(8), p),
    "too many dimensions": lambda p: file_with({"w": entry(shape=(1,) * 1000 + (2,))}, bytes(8), p),
    "offsets beyond the file": lambda p: file_with(
        {"w": entry(offsets=(0, 16), shape=(4,))}, bytes(8), p
    ),
    "offsets backwards": lambda p: file_with({"w": entry(offsets=(8, 0))}, bytes(8), p),
    "offsets negative": lambda p: file_with({"w": entry(offsets=(-8, 0))}, bytes(8), p),
    "one offset": lambda p: file_with({"w": entry(offsets=(0,))}, bytes(8), p),
    "span and shape differ": lambda p: file_with({"w": entry(offsets=(0, 4))}, bytes(8), p),
    "overlap": lambda p: file_with({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12), p),
    "same place twice": lambda p: file_with({"a": entry(), "b": entry()}, bytes(8), p),
    "hole": lambda p: file_with({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20), p),
    "hole at the start": lambda p: file_with({"a": entry(offsets=(4, 12))}, bytes(12), p),
    "data after the end": lambda p: file_with({"w": entry()}, bytes(9), p),
    "data missing": lambda p: file_with({"w": entry()}, bytes(7), p),
}


def test_a_long_header_is_refused_before_it_is_read(tmp_path):
    path = file_with(b"{", path=tmp_path / "model.safetensors", length=95_000_000)
    os.truncate(path, 96_000_000)  # a sparse file: its header would be zeros
    assert "header length is 95000000, expected at most 5000000" in refusal(SafetensorsFile, path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":[' + b"[]," * 1_600_000 + b"[]]}",
        b"{" + b",".join(b'"%06d":""' % i for i in range(400_000)) + b"}",
    ],
)
def test_the_longest_header_takes_little_memory(header, tmp_path):
    path = file_with(header, path=tmp_path / "model.safetensors")
    script = (
        "import sys\nfrom mlx_llama.core.errors import CheckpointError\nfrom "
        "mlx_llama.core.files.safetensors import SafetensorsFile\nfrom "
        "mlx_llama.core.system.machine import peak_memory\nbefore = peak_memory()\ntry:\n    "
        "SafetensorsFile(sys.argv[1])\nexcept CheckpointError:\n    print(peak_memory() - before)\n"
    )
    done = run_python("-c", script, path)
    assert int(done.stdout) < 200e6, done.stderr


@pytest.mark.parametrize("name", LYING)
def test_a_lying_header_is_refused(name, tmp_path):
    path = tmp_path / "model.safetensors"
    LYING[name](path)
    message = refusal(SafetensorsFile, path)
    assert str(path) in message and "fetch it again" in message
    if name == "spaces first":
        return  # against the format's text, but its library lets it pass
    with (
        pytest.raises((SafetensorError, OSError, TypeError, ValueError)),
        safe_open(path, "np") as f,
    ):
        [f.get_tensor(n) for n in f.keys()]


def test_scalars_and_empty_tensors(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(
        path,
        {
            "none": ("F32", (0, 3), b""),
            "one": ("F32", (), struct.pack("<f", 2.5)),
            "end": ("F16", (0,), b""),
        },
    )
    file = SafetensorsFile(path)
    assert file.tensor("one").bits.shape == () and file.tensor("one").bits == 2.5
    assert file.tensor("none").bits.shape == (0, 3) and file.tensor("end").bits.shape == (0,)
    for name in file.names:
        file.tensor(name).release()
        assert file.tensor(name).float32().dtype == np.float32


def test_an_empty_list_of_tensors(tmp_path):
    assert (
        SafetensorsFile(file_with(b'{"__metadata__": {"a": "b"}}', path=tmp_path / "x")).names == ()
    )


@given(data=st.data())
def test_a_damaged_file_is_read_right_or_refused(data, tmp_path):
    """Cut or flipped anywhere: a CheckpointError or arrays of the promised shape; never another
    error.
    """
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": ("F32", (2, 3), bytes(24)), "b": ("BF16", (5,), bytes(10))})
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = SafetensorsFile(path)
        arrays = {name: file.tensor(name).bits for name in file.names}
    except CheckpointError as e:
        assert "\n" not in str(e)
    else:
        assert sum(x.nbytes for x in arrays.values()) == 34
