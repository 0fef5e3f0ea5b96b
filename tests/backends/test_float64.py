"""Checkpoints in float64 run in float32: transformers in float64 judges their logits."""

from __future__ import annotations

import shutil
import warnings

import numpy as np
import pytest
import torch
from cases.architectures import FIELDS
from making import make_checkpoint
from making_adapters import write_random
from making_gguf import make_gguf
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from backends.conftest import in_chunks, relative_error
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import GGUFWeight
from mlx_llama.quantize.gguf_export import write_gguf

MIXTRAL = dict(num_local_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=96)
MIXTRAL |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=384)
NAME = "adapter_model.safetensors"
TOKENS = np.random.default_rng(0).integers(3, 384, (1, 9))


def judge(folder) -> np.ndarray:
    """Logits of transformers in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.inference_mode():
        return model.eval()(torch.tensor(TOKENS)).logits.numpy()


@pytest.fixture(scope="module")
def doubles(tmp_path_factory):
    """A folder that transformers saved in float64, with weights that float32 rounds."""
    folder = tmp_path_factory.mktemp("doubles")
    base = make_checkpoint(folder / "base", attention_bias=True)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1 + 1e-9 * torch.rand(weight.shape, dtype=torch.float64)
    model.save_pretrained(folder / "doubles")
    shutil.copy(base / "tokenizer.model", folder / "doubles")
    return folder / "doubles"


def run(backend, checkpoint, **how) -> np.ndarray:
    model = backend.load(checkpoint, "float32", **how)
    return in_chunks(model, backend.runtime.to_numpy, TOKENS, (0, 4, 9))


def test_a_folder_that_transformers_saved(backend, doubles):
    checkpoint = open_checkpoint(doubles)
    assert {x.dtype for x in checkpoint.tensors.values()} == {
        "float32"
    } and checkpoint.dtype == "float32"
    stored = load_file(doubles / "model.safetensors")
    assert {x.dtype for x in stored.values()} == {np.dtype(np.float64)}
    assert checkpoint.nbytes == sum(
        x.nbytes if x.ndim == 2 else x.nbytes // 2 for x in stored.values()
    )
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.float32(), stored[name].astype(np.float32))
    assert any("(F64) are loaded as float32" in notice for notice in checkpoint.config.notices)
    assert relative_error(run(backend, checkpoint), judge(doubles)) < 2e-5


def test_a_gguf_file(backend, tmp_path):
    weights = make_gguf(tmp_path / "f64.gguf", kinds="F64")
    make_gguf(tmp_path / "f32.gguf", kinds="F32")
    checkpoint = open_checkpoint(tmp_path / "f64.gguf")
    for name, tensor in checkpoint.tensors.items():
        np.testing.assert_array_equal(tensor.float32(), weights[name])
    expected = run(backend, open_checkpoint(tmp_path / "f32.gguf"))
    np.testing.assert_array_equal(run(backend, checkpoint), expected)


def test_an_adapter_and_a_copy_in_other_types(toy, tmp_path):
    plain = write_random(toy, tmp_path / "plain")
    wide = write_random(toy, tmp_path / "wide")
    weights = {x: y.astype(np.float64) for x, y in load_file(plain / NAME).items()}
    save_file(weights, wide / NAME)
    first, second = open_checkpoint(toy, adapters=[plain, wide]).adapters
    for module, pair in first.pairs.items():
        np.testing.assert_array_equal(pair.a(), second.pairs[module].a())
        np.testing.assert_array_equal(pair.b(), second.pairs[module].b())


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral"])
def test_experts_in_one_tensor_or_in_many(kind, backend, tmp_path):
    fields = FIELDS if kind == "gpt_oss" else MIXTRAL
    config = AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for dtype in (torch.float32, torch.float64):
        model.to(dtype).save_pretrained(tmp_path / str(dtype))
    narrow, wide = (open_checkpoint(tmp_path / f"torch.float{bits}") for bits in (32, 64))
    for name, tensor in narrow.tensors.items():
        np.testing.assert_array_equal(wide.tensors[name].float32(), tensor.float32(), name)
    expected = run(backend, narrow, compile=False)
    np.testing.assert_array_equal(run(backend, wide, compile=False), expected)


def test_a_copy_in_another_type(doubles, tmp_path):
    write_gguf(open_checkpoint(doubles), tmp_path / "out.gguf", "Q8_0")
    head = open_checkpoint(tmp_path / "out.gguf").tensors["lm_head.weight"]
    assert isinstance(head, GGUFWeight) and head.format == "Q8_0"


def test_a_number_beyond_float32_is_infinite_without_a_warning(tmp_path):
    folder = make_checkpoint(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = np.full((384, 64), 1e300)
    stored["model.norm.weight"] = np.full(64, -1e300)
    save_file(stored, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensors = open_checkpoint(folder).tensors
        assert (tensors["lm_head.weight"].float32() == np.inf).all()
        assert (tensors["model.norm.weight"].float32() == -np.inf).all()
