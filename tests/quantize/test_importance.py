"""Importance matrices: both file formats, against the gguf library and llama.cpp's description."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from making import make_checkpoint, refusal

from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.gguf_quantize import quantize
from mlx_llama.quantize.importance import Importance, read_importance, write_importance

DOWN, GATE = "blk.0.ffn_down.weight", "blk.1.ffn_gate_exps.weight"


@pytest.fixture
def importance() -> Importance:
    rng = np.random.default_rng(0)
    sums = {
        DOWN: (rng.random((1, 96)) * 1000).astype(np.float32),
        GATE: (rng.random((3, 64)) * 1000).astype(np.float32),
    }
    counts = {DOWN: np.array([1024], np.float32), GATE: np.array([700, 0, 324], np.float32)}
    return Importance(sums, counts, ("a.txt", "b.txt"), 2, 512)


def test_a_gguf_file_has_llama_cpp_s_tensors_and_fields(importance, tmp_path):
    write_importance(importance, tmp_path / "i.gguf")
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if "." in name}
    assert fields["general.type"] == "imatrix" and "general.architecture" not in fields
    assert fields["imatrix.datasets"] == ["a.txt", "b.txt"]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (2, 512)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert {name.rpartition(".")[2] for name in tensors} == {"in_sum2", "counts"}
    assert list(tensors[f"{GATE}.in_sum2"].shape) == [64, 3]  # ne, the fastest first
    assert list(tensors[f"{GATE}.counts"].shape) == [1, 3]
    for name, sums in importance.sums.items():
        np.testing.assert_array_equal(tensors[f"{name}.in_sum2"].data, sums)
    again = read_importance(tmp_path / "i.gguf")
    assert (again.datasets, again.chunks, again.chunk_size) == (("a.txt", "b.txt"), 2, 512)
    for name in importance.sums:
        np.testing.assert_array_equal(again.sums[name], importance.sums[name])
        np.testing.assert_array_equal(again.counts[name], importance.counts[name])


def test_the_older_format_is_read_as_its_description_says(tmp_path):
    values = np.arange(1, 65, dtype="<f4")
    content = struct.pack("<ii", 1, len(DOWN)) + DOWN.encode()
    content += struct.pack("<ii", 4, 64) + (values * 4).tobytes()  # means times the calls
    content += struct.pack("<ii", 4, 5) + b"c.txt"
    (tmp_path / "i.dat").write_bytes(content)
    importance = read_importance(tmp_path / "i.dat")
    np.testing.assert_array_equal(importance.find(DOWN, 1, 64)[0], values)
    assert importance.datasets == ("c.txt",) and importance.chunks == 4
    (tmp_path / "short.dat").write_bytes(content[: -4 - 4 - 5])  # the end is optional
    assert read_importance(tmp_path / "short.dat").find(DOWN, 1, 64) is not None


def test_both_formats_give_the_same_means(importance, tmp_path):
    read = []
    for name in ("i.gguf", "i.dat"):
        write_importance(importance, tmp_path / name)
        read.append(read_importance(tmp_path / name))
    for name, (count, columns) in ((DOWN, (1, 96)), (GATE, (3, 64))):
        ours = importance.find(name, count, columns)
        assert ours.shape == (count, columns)
        for other in read:
            np.testing.assert_allclose(other.find(name, count, columns), ours, rtol=1e-6)
    assert (importance.find(GATE, 3, 64)[1] == 1).all()  # an expert that no token used
    expected = importance.sums[GATE][2] / np.float32(324)
    np.testing.assert_allclose(importance.find(GATE, 3, 64)[2], expected)
    assert importance.find("blk.9.ffn_up.weight", 1, 96) is None


def test_another_model_s_matrix_is_refused(importance, tmp_path):
    assert DOWN in refusal(importance.find, DOWN, 1, 64)
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m", tokenizer="bytelevel"))
    other = Importance({"blk.7.x": importance.sums[DOWN]}, {"blk.7.x": importance.counts[DOWN]})
    message = refusal(write_gguf, checkpoint, tmp_path / "a.gguf", "Q4_0", other)
    assert "another model" in message and "blk.7.x" in message
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("cut", [0, 3, 10, 40, 200])
@pytest.mark.parametrize("name", ["i.gguf", "i.dat"])
def test_a_damaged_file_is_refused(name, cut, importance, tmp_path):
    write_importance(importance, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:cut])
    refusal(read_importance, tmp_path / name, words=[str(tmp_path / name)])
    refusal(read_importance, tmp_path / "missing", kind=CheckpointError, words=["`calibrate`"])


def test_the_matrices_of_a_file_are_weighed(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "m", tokenizer="bytelevel"))
    weights = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"].float32()
    rng = np.random.default_rng(0)
    sums = np.exp(2 * rng.standard_normal((1, weights.shape[1]))).astype(np.float32)
    importance = Importance({DOWN: sums}, {DOWN: np.array([2], np.float32)}, ("a.txt",))
    write_gguf(checkpoint, tmp_path / "a.gguf", "IQ4_XS", importance)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    (stored,) = [tensor for tensor in reader.tensors if tensor.name == DOWN]
    wanted = quantize(weights, stored.tensor_type.name, sums[0] / 2)
    np.testing.assert_array_equal(stored.data, wanted)
    assert (stored.data != quantize(weights, stored.tensor_type.name)).any()
    assert reader.fields["quantize.imatrix.dataset"].contents() == "a.txt"
    assert reader.fields["quantize.imatrix.entries_count"].contents() == 1
