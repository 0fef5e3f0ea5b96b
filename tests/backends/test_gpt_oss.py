"""gpt-oss in the forms of its files: experts in mxfp4 as published, in bfloat16 and in mlx-lm's
stacks. transformers judges, with the experts dequantised by its own function.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from cases.architectures import FIELDS, GPT_OSS_YARN, TOKENS, YARN, run
from making import edit_json, make_tokenizer, refusal, shared_arithmetic
from making_gguf import write_all
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from backends.conftest import mlx_lm_logits, relative_error
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models.rope import inverse_frequencies
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx


@functools.cache
def published(says_truncate: bool = True) -> tuple[Path, np.ndarray]:
    """A folder with mxfp4 experts, and transformers' logits for TOKENS at float32.

    says_truncate: of yarn, in config.json.
    """
    rope = {"rope_theta": 150000.0, **(GPT_OSS_YARN if says_truncate else YARN)}
    fields = FIELDS | {"rope_parameters": rope}
    config = transformers.AutoConfig.for_model("gpt_oss", **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors, state = {}, {}
    for key, value in model.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = value.shape
            blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (count, rows, columns // 32), dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            state[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            spread = 1.0 if "router" in key or "sinks" in key else 0.1
            value = spread * torch.randn(value.shape) + float("norm" in key)
            tensors[key] = value.to(torch.bfloat16)
            state[key] = tensors[key].float()
    model.load_state_dict(state)
    folder = Path(tempfile.mkdtemp(prefix="published"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer(folder)
    config.save_pretrained(folder)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    edit_json(folder / "config.json", dtype="bfloat16", quantization_config=quantization)
    with torch.no_grad():
        return folder, model.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()


def test_yarn_truncates_unless_the_config_says_otherwise(backend):
    folder, wanted = published(says_truncate=False)
    assert relative_error(run(backend, open_checkpoint(folder), (0, 30)), wanted) < 1e-4


@pytest.mark.slow_for("*-False")
@pytest.mark.parametrize("compile", [None, False])
def test_published_experts_have_the_logits_of_transformers(compile, backend):
    folder, wanted = published()
    checkpoint = open_checkpoint(folder)
    experts = [tensor for name, tensor in checkpoint.tensors.items() if ".experts." in name]
    matrices = [tensor for tensor in experts if len(tensor.shape) == 2]
    assert all(isinstance(tensor, AffineWeight) for tensor in matrices)
    assert {tensor.format for tensor in matrices} == {"mxfp4"}
    for cuts in ((0, 30), (0, 20, 29, 30)):
        assert relative_error(run(backend, checkpoint, cuts, compile=compile), wanted) < 1e-4


def test_scales_in_another_file(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder, _ = published()
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors, weight_map = load_file(folder / "model.safetensors"), {}
    for number, is_scale in enumerate((False, True), 1):
        part = {name: x for name, x in tensors.items() if name.endswith("_scales") == is_scale}
        save_file(part, tmp_path / f"model-0000{number}-of-00002.safetensors")
        weight_map |= dict.fromkeys(part, f"model-0000{number}-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, split = open_checkpoint(folder), open_checkpoint(tmp_path)
    for name, tensor in whole.tensors.items():
        np.testing.assert_array_equal(split.tensors[name].float32(), tensor.float32())


@pytest.mark.slow_for("c")
@pytest.mark.parametrize("bits", [None, 8])
def test_folders_that_mlx_lm_converts(bits, backend, tmp_path):
    """Experts stay in mxfp4."""
    pytest.importorskip("mlx.core")
    from mlx_lm import convert

    out = tmp_path / "m"
    how = dict(quantize=True, q_bits=bits, q_group_size=32) if bits else {}
    convert(str(published()[0]), str(out), dtype="float32", **how)
    rope = {"rope_theta": 5.0, "rope_scaling": GPT_OSS_YARN}  # angles that it rounds to ours
    edit_json(out / "config.json", rope_parameters=..., **rope)
    wanted = mlx_lm_logits(out, TOKENS)
    checkpoint = open_checkpoint(out)
    assert "mxfp4" in checkpoint.formats and ("affine" in checkpoint.formats) == bool(bits)
    assert relative_error(run(backend, checkpoint, (0, 29, 30)), wanted) < 1e-3


def test_written_files_have_the_same_weights(tmp_path):
    """The published form, as mlx-lm's stacks and as GGUF."""
    folder, _ = published()
    source = open_checkpoint(folder)
    write_mlx(source, tmp_path / "stacks", None)
    write_gguf(source, tmp_path / "m.gguf", "F32")
    for path in (tmp_path / "stacks", tmp_path / "m.gguf"):
        written = open_checkpoint(path)
        # float32 in GGUF
        config = dataclasses.replace(written.config, rms_norm_eps=source.config.rms_norm_eps)
        assert config.layers == source.config.layers
        assert shared_arithmetic(config) == shared_arithmetic(source.config)
        for name, tensor in source.tensors.items():
            np.testing.assert_array_equal(written.tensors[name].float32(), tensor.float32())
        inverse, factor = inverse_frequencies(written.config)
        np.testing.assert_allclose(inverse, inverse_frequencies(source.config)[0], rtol=1e-12)
        assert factor == pytest.approx(inverse_frequencies(source.config)[1], rel=1e-12)
    write_gguf(source, tmp_path / "narrow.gguf", "MXFP4")
    narrow = open_checkpoint(tmp_path / "narrow.gguf")
    for name, tensor in narrow.tensors.items():
        if ".experts." in name:
            np.testing.assert_array_equal(tensor.float32(), source.tensors[name].float32())
            assert tensor.description == ("MXFP4" if name.endswith("weight") else "float32")


@pytest.mark.parametrize(
    "stored, change, message",
    [
        (
            "gate_up_proj_scales",
            lambda x: x[..., :-1],
            "is U8 [5, 192, 1], expected U8 [5, 192, 2]",
        ),
        ("down_proj_blocks", lambda x: x.view(np.int8), "is I8 [5, 64, 3, 16], expected U8"),
        (
            "gate_up_proj_blocks",
            lambda x: x[:4],
            "has shape [4, 192, 2, 16], config.json calls for",
        ),
        ("gate_up_proj_bias", lambda x: x[:, :-2], "has shape [95], config.json calls for [96]"),
    ],
)
def test_tensors_of_another_model_are_refused(stored, change, message, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder, _ = published()
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors, name = load_file(folder / "model.safetensors"), f"model.layers.1.mlp.experts.{stored}"
    tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, tmp_path / "model.safetensors")
    assert message in refusal(open_checkpoint, tmp_path)


@functools.cache
def in_mxfp4() -> Path:
    """A GGUF file with MXFP4 experts, as llama.cpp's converter makes of the published files."""
    home = Path(tempfile.mkdtemp())
    write_gguf(open_checkpoint(published()[0]), home / "plain.gguf", "F32")
    plain = gguf.GGUFReader(home / "plain.gguf")
    writer = gguf.GGUFWriter(home / "m.gguf", "gpt-oss")
    for key, field in plain.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kinds = (*field.types, None)
            writer.add_key_value(key, field.contents(), kinds[0], kinds[1])
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    for tensor in plain.tensors:
        if tensor.name.endswith("_exps.weight"):
            writer.add_tensor(tensor.name, gguf.quantize(tensor.data, mxfp4), raw_dtype=mxfp4)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    write_all(writer)
    return home / "m.gguf"


@pytest.mark.slow_for("c")
def test_mxfp4_experts_of_gguf_have_the_logits_of_transformers(backend):
    checkpoint = open_checkpoint(in_mxfp4())
    assert "MXFP4" in checkpoint.formats
    got = run(backend, checkpoint, (0, 20, 29, 30))
    assert relative_error(got, published()[1]) < 1e-4


@pytest.mark.slow_for("c")
@pytest.mark.parametrize("bits, bound", [(16, 1e-3), (8, 3e-2)])
def test_narrow_keys_and_values_beside_sinks(bits, bound, backend):
    folder, wanted = published()
    got = run(backend, open_checkpoint(folder), (0, 20, 29, 30), cache_bits=bits)
    # Rounding changes some positions' choice of experts.
    errors = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert 1e-6 < np.median(errors) < bound


def test_activations_are_never_in_float16():
    for path in (published()[0], in_mxfp4()):
        assert open_checkpoint(path).dtype == "bfloat16"
