"""Qwen3.5 and Qwen3-Next beyond test_architectures.py: long answers, rows that are cut, files of
other writers, and the model of images and text.
"""

import functools
import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from cases.architectures import SIZES, TOKENS, run
from making import make_tokenizer
from safetensors.numpy import load_file, save_file

from backends.conftest import relative_error
from mlx_llama.api.llm import load
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.importance import measure_importance
from mlx_llama.quantize.mlx_folder import write_mlx

HEADS = dict(
    hidden_size=96,  # three blocks of Q8_0
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
EXPERTS = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=44,
    shared_expert_intermediate_size=60,
)
KINDS = {"qwen3_5_text": {}, "qwen3_5_moe_text": EXPERTS, "qwen3_next": EXPERTS}


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(0.1 * torch.randn(value.shape) + name.endswith("linear_attn.norm.weight"))
    return model.eval()


@functools.cache
def made(kind: str) -> tuple[Path, transformers.PreTrainedModel]:
    config = transformers.AutoConfig.for_model(kind, **SIZES | HEADS | KINDS[kind])
    model = randomise(transformers.AutoModelForCausalLM.from_config(config))
    folder = Path(tempfile.mkdtemp(prefix="model"))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder, model


def logits_of(model: transformers.PreTrainedModel, tokens: np.ndarray = TOKENS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_200_greedy_tokens_are_those_of_transformers(kind):
    folder, judge = made(kind)
    prompt = TOKENS[:1]
    with torch.no_grad():
        wanted = judge.generate(
            torch.from_numpy(prompt).long(), max_new_tokens=200, do_sample=False, eos_token_id=None
        )
    model = select("cpu").load(open_checkpoint(folder), "float32")
    cache, tokens = model.make_cache(256), prompt
    for _ in range(200):
        logits = np.asarray(model.forward(tokens[:, cache.lengths[0] :], cache.lengths[0], cache))
        best = logits.reshape(1, -1).argmax(-1)
        tokens = np.concatenate([tokens, best[:, None].astype(np.int32)], axis=1)
    assert tokens.tolist() == wanted.tolist()


def test_a_row_that_is_cut_and_resumed_has_the_same_logits(backend):
    folder, judge = made("qwen3_5_text")
    model, to_numpy = backend.load(open_checkpoint(folder), "float32"), backend.runtime.to_numpy
    cache = model.make_cache(64, rows=2)
    for first, last in ((0, 16), (16, 24), (24, 30)):
        model.forward(TOKENS[:, first:last], first, cache)
    reached = cache.trim(20)
    assert reached in (0, 16) and list(cache.lengths) == [reached, 30]
    rest = np.concatenate([TOKENS[:1, reached:20], TOKENS[1:, : 30 - 20]], axis=1)
    logits = to_numpy(model.forward(rest, reached, cache, all_positions=True, rows=[0]))
    wanted = logits_of(judge, np.concatenate([TOKENS[:1, :reached], rest], axis=1))
    assert relative_error(logits, wanted[:, reached:]) < 1e-4
    saved, other = cache.state(1), model.make_cache(64)
    other.restore(saved)
    step = to_numpy(model.forward(TOKENS[:1, :1], 30, other, all_positions=True))
    wanted = logits_of(judge, np.concatenate([TOKENS[1:], TOKENS[:1, :1]], axis=1))
    assert relative_error(step, wanted[:, 30:]) < 1e-4


def test_the_text_part_of_a_model_with_images_and_multi_token_prediction(tmp_path):
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4)
    vision |= dict(out_hidden_size=96, num_position_embeddings=16)
    config = transformers.Qwen3_5Config(
        text_config=SIZES | HEADS,
        vision_config=vision,
        image_token_id=380,
        video_token_id=381,
        vision_start_token_id=382,
        vision_end_token_id=383,
    )
    model = randomise(transformers.Qwen3_5ForConditionalGeneration(config))
    model.save_pretrained(tmp_path / "in")
    make_tokenizer(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    assert any(name.startswith("model.visual.") for name in tensors)
    save_file(tensors | {"mtp.fc.weight": np.ones((4, 4), np.float32)}, file)
    wanted = logits_of(model)
    write_mlx(open_checkpoint(tmp_path / "in"), tmp_path / "out", None)
    write_gguf(open_checkpoint(tmp_path / "in"), tmp_path / "out.gguf", "F32")
    for name in ("in", "out", "out.gguf"):
        checkpoint = open_checkpoint(tmp_path / name)
        assert checkpoint.config.architecture == "Qwen3_5ForCausalLM"
        notices = [x for x in checkpoint.config.notices if "multi-token prediction (mtp)" in x]
        assert len(notices) == (name == "in")
        assert relative_error(run(select("cpu"), checkpoint, (0, 30)), wanted) < 1e-4


def test_experts_of_a_layer_in_one_tensor(tmp_path):
    """As Qwen3.5's files have them."""
    folder, judge = made("qwen3_5_moe_text")
    tensors, count = load_file(folder / "model.safetensors"), EXPERTS["num_experts"]
    for i in range(SIZES["num_hidden_layers"]):
        block = f"model.layers.{i}.mlp.experts"
        gates, ups, downs = (
            np.stack([tensors.pop(f"{block}.{n}.{part}_proj.weight") for n in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{block}.gate_up_proj"] = np.concatenate([gates, ups], axis=1)
        tensors[f"{block}.down_proj"] = downs
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    logits = run(select("cpu"), open_checkpoint(tmp_path), (0, 30))
    assert relative_error(logits, logits_of(judge)) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_low_bit_rows_of_a_gguf_file_are_those_of_the_folder(kind, tmp_path):
    """llama.cpp's order of value heads and the scattered rows, matrix by matrix."""
    folder, _ = made(kind)
    write_gguf(source := open_checkpoint(folder), tmp_path / "m.gguf", "Q8_0")
    opened = open_checkpoint(tmp_path / "m.gguf")
    swaps = {}
    if kind != "qwen3_next":
        swaps = {key: x for mixer in source.config.recurrent for key, x in mixer.swaps().items()}
        assert all(mixer.tiled for mixer in opened.config.recurrent)
    assert len(opened.low_bit) >= 7 * SIZES["num_hidden_layers"]
    for name, tensor in opened.tensors.items():
        wanted = source.tensors[name].float32()
        rows, columns = swaps.get(name, (None, None))
        wanted = wanted if rows is None else wanted[rows]
        wanted = wanted if columns is None else wanted[:, columns]
        if source.config.is_shifted(name):
            wanted = wanted + 1
        tolerance = 1e-6 if len(wanted.shape) != 2 else 5e-3
        error = np.abs(tensor.float32() - wanted).max()
        assert error <= tolerance * max(1, np.abs(wanted).max()), name


def test_qwen3_next_with_the_matrices_that_llama_cpp_now_writes(tmp_path):
    """Its converter splits in_proj_qkvz; ours writes the joint matrix, which it reads too."""
    folder, judge = made("qwen3_next")
    write_gguf(open_checkpoint(folder), tmp_path / "joint.gguf", "F32")
    read = gguf.GGUFReader(tmp_path / "joint.gguf")
    writer = gguf.GGUFWriter(tmp_path / "split.gguf", "qwen3next")
    for key, field in read.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kinds = field.types
        writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if kinds[1:] else None)
    for tensor in read.tensors:
        data = np.array(tensor.data)
        if "ssm_in" not in tensor.name:
            writer.add_tensor(tensor.name, data)
            continue
        parts = np.split(data.reshape(2, -1, data.shape[1]), [16, 32, 80], axis=1)
        query, key, value, gate = (part.reshape(-1, data.shape[1]) for part in parts)
        joint = np.concatenate([query, key, value])
        writer.add_tensor(tensor.name.replace("ssm_in", "attn_qkv"), joint)
        writer.add_tensor(tensor.name.replace("ssm_in", "attn_gate"), gate)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for name in ("joint", "split"):
        logits = run(select("cpu"), open_checkpoint(tmp_path / f"{name}.gguf"), (0, 30))
        assert relative_error(logits, logits_of(judge)) < 1e-4


def test_a_value_is_of_another_size_than_a_key(tmp_path):
    """A folder holds it, a GGUF file does not."""
    sizes = SIZES | HEADS | dict(linear_value_head_dim=20)
    config = transformers.AutoConfig.for_model("qwen3_5_text", **sizes)
    model = randomise(transformers.AutoModelForCausalLM.from_config(config))
    model.save_pretrained(tmp_path)
    make_tokenizer(tmp_path)
    opened = open_checkpoint(tmp_path)
    assert relative_error(run(select("cpu"), opened, (0, 7, 30)), logits_of(model)) < 1e-4
    with pytest.raises(Exception, match="ssm.inner_size is 120, expected 6 heads of 16.*MLX form"):
        write_gguf(opened, tmp_path / "m.gguf", "F32")


def test_a_convolution_of_another_width_is_refused(tmp_path):
    folder, _ = made("qwen3_5_text")
    fields = json.loads((folder / "config.json").read_text()) | {"linear_conv_kernel_dim": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"conv1d.weight has shape \[160, 1, 4\], config.js"):
        open_checkpoint(tmp_path)


def test_the_importance_of_inputs_is_that_of_the_gguf_file(tmp_path):
    """In llama.cpp's order of value heads."""
    folder, _ = made("qwen3_5_text")
    write_gguf(open_checkpoint(folder), tmp_path / "m.gguf", "F32")
    folder_sums, file_sums = (
        measure_importance(load(str(path), backend="cpu", compile=False), TOKENS[0], "a", 15).sums
        for path in (folder, tmp_path / "m.gguf")
    )
    assert folder_sums.keys() == file_sums.keys() >= {"blk.0.ssm_out.weight", "blk.3.attn_q.weight"}
    for name, sums in folder_sums.items():
        np.testing.assert_allclose(sums, file_sums[name], rtol=1e-3, err_msg=name)
