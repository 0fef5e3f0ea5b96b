"""A folder's weight files: indices, shards, and files that are never read."""

import json

import mlx_lm.utils
import numpy as np
import pytest
from making import make_checkpoint, refusal

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.identity import checkpoint_hash

NORM = "model.layers.1.input_layernorm.weight"


def test_an_index_that_names_a_missing_shard(tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    message = refusal(open_checkpoint, folder)
    assert (
        "model.safetensors.index.json" in message and "model-00002-of-00003.safetensors" in message
    )


@pytest.mark.parametrize(
    "shard",
    [
        "../m/model-00001-of-00002.safetensors",
        "/etc/passwd",
        "..",
        "",
        "a\\b.safetensors",
        "x.bin",
        7,
        None,
        "sub/model-00001-of-00002.safetensors",
        "\0.safetensors",
        "x\n.safetensors",
        "x.safetensors/../x",
    ],
)
def test_a_shard_outside_the_folder(shard, tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    change_index(folder, lambda weight_map: weight_map | {NORM: shard})
    message = refusal(open_checkpoint, folder)
    assert "weight_map" in message and NORM in message and "index.json" in message


@pytest.mark.parametrize("length", [300, 100_000])
def test_a_shard_of_too_long_a_name(length, tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    change_index(folder, lambda weight_map: weight_map | {NORM: "x" * length + ".safetensors"})
    message = refusal(open_checkpoint, folder)
    assert "index.json: lists the shard 'xxx" in message and len(message) < 600


def change_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({"weight_map": change(index["weight_map"])}))


def test_an_index_that_lists_what_is_not_there(tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    change_index(
        folder, lambda weight_map: weight_map | {"model.ghost": "model-00001-of-00002.safetensors"}
    )
    message = refusal(open_checkpoint, folder)
    assert "model.ghost" in message and "model-00001-of-00002.safetensors" in message


def test_a_shard_with_more_than_the_index_lists(tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    change_index(
        folder,
        lambda weight_map: {name: shard for name, shard in weight_map.items() if name != NORM},
    )
    assert NORM in refusal(open_checkpoint, folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_broken_index(text, tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(open_checkpoint, folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"]
)
def test_pickle_is_not_read(name, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(open_checkpoint, folder)
    assert name in message and "pickle" in message and "save_pretrained" in message


def test_no_weights_at_all(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    message = refusal(open_checkpoint, folder)
    assert "model.safetensors" in message and "model.safetensors.index.json" in message


def test_weights_that_are_a_folder(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors" in refusal(open_checkpoint, folder)


def test_a_single_shard_without_its_index(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    before = open_checkpoint(folder)
    file = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(file)
    after = open_checkpoint(folder)
    assert checkpoint_hash(after) == checkpoint_hash(before)
    theirs = mlx_lm.utils.load_model(folder)[0].parameters()["model"]["embed_tokens"]["weight"]
    weight = after.tensors["model.embed_tokens.weight"]
    assert np.array_equal(np.array(theirs), weight.bits.view(np.float32))
    file.rename(folder / "model-00001-of-00002.safetensors")  # the other half is missing
    assert "model.safetensors.index.json" in refusal(open_checkpoint, folder)
