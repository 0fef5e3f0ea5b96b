"""A folder's weight files: indices, shards, and files that are never read."""

import json

import mlx_lm.utils
import numpy as np
import pytest
from making import make_checkpoint, refusal

from mlx_llama.core.files.checkpoint import checkpoint_hash, open_checkpoint

NORM = "model.layers.1.input_layernorm.weight"


INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
BESIDE = ("../m/" + FIRST, "/etc/passwd", "..", "", "a\\b.safetensors", "x.bin", 7, None)
BESIDE += ("sub/" + FIRST, "\0.safetensors", "x\n.safetensors", "x.safetensors/../x")


@pytest.mark.parametrize(
    "changes, parts",
    [
        *(({NORM: shard}, (f"{INDEX}: weight_map[{NORM!r}] is ",)) for shard in BESIDE),
        ({NORM: "x" * 300 + ".safetensors"}, (f"{INDEX}: lists the shard 'xxx",)),
        ({NORM: "x" * 100_000 + ".safetensors"}, (f"{INDEX}: lists the shard 'xxx",)),
        ({"model.ghost": FIRST}, ("model.ghost", FIRST)),
        ({NORM: ...}, (NORM,)),  # not listed
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_index_that_does_not_fit_the_files(changes, parts, tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    listed = json.loads((folder / INDEX).read_text())["weight_map"] | changes
    listed = {name: shard for name, shard in listed.items() if shard is not ...}
    (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
    message = refusal(open_checkpoint, folder)
    assert all(part in message for part in parts) and len(message) < 600


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_broken_index(text, tmp_path):
    folder = make_checkpoint(tmp_path / "m", shards=2)
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(open_checkpoint, folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth"]
)
def test_pickle_is_not_read(name, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / name)
    refusal(open_checkpoint, folder, words=[name, "pickle", "save_pretrained"])


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
    assert INDEX in refusal(open_checkpoint, folder)
