"""Opening a model: tensors against safetensors' own reader; end tokens, tokenizer, template,
paths.
"""

import json

import numpy as np
import pytest
import torch
from launching import run_python
from making import config_fields, make_checkpoint, random_tensors, refusal
from making_adapters import write_random
from safetensors import safe_open
from safetensors.torch import save_file

from mlx_llama.core.errors import LlamaError, TokenizerError
from mlx_llama.core.files.checkpoint import GUIDE_PATH, Checkpoint, open_checkpoint

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_are_what_safetensors_reads(dtype, shards, tmp_path):
    folder = make_checkpoint(
        tmp_path / "m", dtype=dtype, shards=shards, seed=3, attention_bias=True, mlp_bias=True
    )
    opened = open_checkpoint(folder)
    theirs = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            theirs |= {name: f.get_tensor(name) for name in f.keys()}
    assert set(opened.tensors) == set(theirs) == set(opened.config.tensor_shapes())
    for name, tensor in opened.tensors.items():
        expected = theirs[name]
        assert tensor.name == name and tensor.dtype == dtype
        assert tensor.shape == tuple(expected.shape)
        assert tensor.bits.dtype == DTYPES[dtype] and tensor.bits.shape == tensor.shape
        if dtype == "bfloat16":
            np.testing.assert_array_equal(tensor.bits, expected.view(torch.uint16).numpy())
        else:
            np.testing.assert_array_equal(tensor.bits, expected.numpy())
        wide = tensor.float32()
        assert wide.dtype == np.float32 and wide.flags.writeable
        np.testing.assert_array_equal(wide, expected.float().numpy())
    for tensors in (theirs, opened.tensors):
        assert opened.nbytes == sum(x.nbytes for x in tensors.values())
    assert opened.dtype == dtype


def test_a_file_that_torch_wrote(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tie_word_embeddings=True)
    tensors = {
        name: torch.from_numpy(x)
        for name, x in random_tensors(config_fields(tie_word_embeddings=True)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    opened = open_checkpoint(folder)
    assert all(np.array_equal(x.bits, tensors[name].numpy()) for name, x in opened.tensors.items())


# The checkpoint as a whole


def test_a_checkpoint_knows_itself(tmp_path):
    folder = make_checkpoint(tmp_path / "m", eos_token_id=[2, 5])
    text = json.dumps({"eos_token_id": [5, 7], "temperature": 0.6})
    (folder / "generation_config.json").write_text(text)
    opened = open_checkpoint(folder)
    assert isinstance(opened, Checkpoint) and opened.name == str(folder) and opened.path == folder
    assert opened.generation_config["temperature"] == 0.6
    assert opened.eos_token_ids == {2, 5, 7}
    assert opened.bos_token_id == 1
    text = opened.template.render([{"role": "user", "content": "x"}])
    assert text.startswith("<s><|user|>\nx</s>")


def test_the_tokenizers_end_counts_too(tmp_path):
    folder = make_checkpoint(
        tmp_path / "m", tokenizer="bytelevel", eos_token_id=380, bos_token_id=379
    )
    opened = open_checkpoint(folder)
    assert opened.eos_token_ids == {380, opened.tokenizer.special_ids["<|eot_id|>"]}
    assert len(opened.eos_token_ids) == 2


def test_without_generation_config_or_tokenizer(tmp_path):
    opened = open_checkpoint(make_checkpoint(tmp_path / "m", tokenizer=False))
    assert opened.generation_config == {} and opened.eos_token_ids == {2}
    assert opened.bos_token_id == 1
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        _ = opened.tokenizer


def test_opening_loads_no_tokenizer(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "tokenizer.model").write_bytes(b"broken")
    opened = open_checkpoint(folder)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model"):
        _ = opened.tokenizer


def test_opening_imports_only_numpy(tmp_path):
    """Libraries for tokenizers, templates and the hub are imported at their first use, for the
    start-up time.
    """
    folder = make_checkpoint(tmp_path / "m")
    code = f"""
import sys
from mlx_llama.core.models import rope
from mlx_llama.core.text import template, tokenizer
from mlx_llama.core.files.checkpoint import open_checkpoint
open_checkpoint({str(folder)!r})
heavy = "tokenizers sentencepiece jinja2 huggingface_hub safetensors mlx torch transformers"
print(*[name for name in heavy.split() if name in sys.modules])
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_no_template(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    assert open_checkpoint(folder).template is None


@pytest.mark.parametrize("text", ["[]", "{", '{"eos_token_id": 99999}', '{"eos_token_id": "</s>"}'])
def test_a_broken_generation_config(text, tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(LlamaError, match=r"generation_config\.json"):
        open_checkpoint(folder)


def test_a_file_instead_of_a_folder(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    assert "folder" in refusal(open_checkpoint, folder / "model.safetensors")
    assert "a .gguf file" in refusal(open_checkpoint, folder / "config.json")


def test_guide_is_the_models_name_unless_a_folder_is_called_so(tmp_path, monkeypatch):
    packaged = make_checkpoint(tmp_path / "packaged", seed=1)
    monkeypatch.setattr("mlx_llama.core.files.checkpoint.GUIDE_PATH", packaged)
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint().path == open_checkpoint("guide").path == tmp_path / "packaged"
    make_checkpoint(tmp_path / "guide")
    assert open_checkpoint("guide").path.resolve() == tmp_path / "guide"
    assert open_checkpoint().path == tmp_path / "packaged"


def test_the_guide_lies_in_the_package():
    import mlx_llama

    assert GUIDE_PATH.parent.samefile(next(iter(mlx_llama.__path__))) and GUIDE_PATH.name == "guide"


# As in git-lfs's docs/spec.md
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    "file",
    "model.safetensors model-00002-of-00002.safetensors model.safetensors.index.json config.json "
    "tokenizer.json tokenizer.model tekken.json tokenizer_config.json chat_template.jinja "
    "generation_config.json m.gguf adapter_model.safetensors adapter_config.json".split(),
)
def test_a_git_lfs_pointer_is_named_with_its_remedy(file, tmp_path):
    kind = "sentencepiece" if file == "tokenizer.model" else "bytelevel"
    folder = make_checkpoint(
        tmp_path / "m", shards=1 + ("2-of" in file or "index" in file), tokenizer=kind
    )
    name, adapters = folder, []
    if file == "tekken.json":
        (folder / "tokenizer.json").unlink()
    if file.startswith("adapter"):
        folder = write_random(folder, tmp_path / "adapter")
        adapters = [folder]
    if file == "m.gguf":
        name = folder / file
    (folder / file).write_text(POINTER)

    def use():
        checkpoint = open_checkpoint(name, adapters=adapters)
        return checkpoint.tokenizer, checkpoint.template

    message = refusal(use, kind=LlamaError)
    assert message.startswith(f"{folder / file}: is a Git LFS pointer")
    assert "run `git lfs pull`" in message


def test_a_small_file_that_speaks_of_git_lfs_is_no_pointer(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("see " + POINTER)
    assert open_checkpoint(folder).template.render([]) == "see " + POINTER.rstrip("\n")
