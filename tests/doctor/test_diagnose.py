"""The doctor's findings on a model, against transformers, safetensors and gguf; of a machine,
against the backends.
"""

from __future__ import annotations

import json
import os
import sys
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
from cases.diagnosis import fit, messages_of
from cases.gguf_files import ROPES
from cases.hub import cache, put_in_cache  # noqa: F401
from launching import run_python
from making import config_fields, edit_json, make_checkpoint, make_tokenizer, write_hole
from making_gguf import add_config, add_sentencepiece, make_gguf
from safetensors import safe_open
from transformers import DynamicCache, LlamaConfig as TheirConfig, LlamaForCausalLM

from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.doctor.diagnose import diagnose
from mlx_llama.doctor.diagnosis import Command
from mlx_llama.quantize.mlx_folder import write_mlx

LLAMA_70B = dict(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    max_position_embeddings=131072,
    bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009],
    num_key_value_heads=8,
    rope_scaling=ROPES["llama3"]["rope_scaling"] | {"original_max_position_embeddings": 8192},
)


def sparse_checkpoint(folder, **fields):
    """A model's folder whose weights are a header and a hole."""
    folder.mkdir()
    config = config_fields(torch_dtype="bfloat16", **fields)
    (folder / "config.json").write_text(json.dumps(config))
    make_tokenizer(folder)
    shapes = LlamaConfig.from_dict(config).tensor_shapes()
    write_hole(folder / "model.safetensors", shapes)
    return folder


def sparse_gguf(path, **fields):
    """A GGUF file of Q4_0 matrices, a header and a hole."""
    config = config_fields(**fields)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, "llama")
    add_config(writer, config)
    add_sentencepiece(writer)
    size = 0
    for name, shape in LlamaConfig.from_dict(config).tensor_shapes().items():
        kind = gguf.GGMLQuantizationType.Q4_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
        tensor_nbytes = int(torch.Size(shape).numel()) // weights * nbytes
        # the writer wants the shape in bytes where blocks are given
        stored = (*shape[:-1], shape[-1] // weights * nbytes) if len(shape) == 2 else shape
        base, suffix = name.rsplit(".", 1)
        dtype = np.dtype(np.uint8 if len(shape) == 2 else np.float32)
        writer.add_tensor_info(
            f"{names.get_name(base)}.{suffix}", stored, dtype, tensor_nbytes, raw_dtype=kind
        )
        size += -(-tensor_nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as file:
        file.truncate(-(-path.stat().st_size // 32) * 32 + size)
    return path


# The model

# {part of a tensor's name: its group}, the first that matches
GROUPS = [("self_attn", "attention"), (".mlp.", "mlp"), ("norm", "norms"), ("lm_head", "head")]
GROUPS += [("embed_tokens", "embedding"), ("attn_", "attention"), ("ffn_", "mlp")]
GROUPS += [("output.", "head"), ("token_embd", "embedding")]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
        LLAMA_70B,
    ],
    ids=["toy", "tied", "biased", "70B"],
)
def test_sizes_are_those_of_transformers(fields, tmp_path):
    """Parameters and the bytes of keys and values, counted in transformers' own model on the meta
    device.
    """
    diagnosis = diagnose(sparse_checkpoint(tmp_path / "m", **fields))
    theirs = TheirConfig(**config_fields(**fields))
    with torch.device("meta"):
        model = LlamaForCausalLM(theirs).to(torch.bfloat16)
        cache = DynamicCache(config=theirs)
        model(torch.zeros((1, 1000), dtype=torch.int32), past_key_values=cache, logits_to_keep=1)
    assert diagnosis.model["parameters"] == model.num_parameters()
    cache_nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 1000 * fit(diagnosis, "cpu").cache_bytes_per_token == 2 * cache_nbytes  # float32
    assert 1000 * fit(diagnosis, "mlx").cache_bytes_per_token == cache_nbytes
    keys = cache.layers[0].keys
    size, count = keys.shape[-1], 2 * len(cache.layers) * keys[..., 0].numel()
    # a byte each, and a float16 for up to 32 of a head
    in_8_bits = cache_nbytes // 2 + 2 * count * len(range(0, size, 32))
    sizes = {name: 1000 * n for name, n in diagnosis.model["cache_bytes_per_token"].items()}
    assert sizes == {"32_bits": 2 * cache_nbytes, "16_bits": cache_nbytes, "8_bits": in_8_bits}
    for bits, wanted in ((16, cache_nbytes), (8, in_8_bits)):
        diagnosis = diagnose(tmp_path / "m", cache_bits=bits)
        for name in ("cpu", "mlx"):  # float16 on the CPU, the activations' 16 bits on MLX
            assert 1000 * fit(diagnosis, name).cache_bytes_per_token == wanted


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "dtype, code", [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")]
)
def test_groups_hold_what_the_headers_hold(dtype, code, shards, tmp_path):
    folder = make_checkpoint(tmp_path / "m", dtype=dtype, shards=shards)
    expected = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                kind = next(kind for mark, kind in GROUPS if mark in name)
                part, tensor = expected.setdefault(kind, [0, 0]), file.get_slice(name)
                assert tensor.get_dtype() == code
                part[0] += 1
                part[1] += file.get_tensor(name).nbytes
    diagnosis = diagnose(folder)
    counted = {group["group"]: [group["tensors"], group["nbytes"]] for group in diagnosis.groups}
    assert counted == expected
    assert all(group["formats"] == {dtype: group["tensors"]} for group in diagnosis.groups)
    assert diagnosis.model["dtype"] == dtype
    assert diagnosis.model["nbytes"] == sum(size for _, size in expected.values())


def test_groups_of_other_mlps(tmp_path):
    """Mixtral's experts, and Apertus's numbers without an axis."""
    experts = dict(num_local_experts=4, architectures=["MixtralForCausalLM"])
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    alone = dict(architectures=["ApertusForCausalLM"], hidden_act="xielu", rope_parameters=rope)
    for fields, count in ((experts, 2 * 13), (alone | {"model_type": "apertus"}, 2 * 6)):
        make_checkpoint(folder := tmp_path / f"m{count}", **fields)
        groups = {group["group"]: group["tensors"] for group in diagnose(folder).groups}
        assert groups["mlp"] == count and groups["norms"] == 5


def test_groups_of_a_gguf_file_are_those_of_its_reader(tmp_path):
    path = tmp_path / "m.gguf"
    kinds = {"v_proj": "Q6_K", "lm_head": "Q6_K", "embed_tokens": "F16"}
    sizes = dict(hidden_size=256, intermediate_size=256, head_dim=64, vocab_size=512)
    make_gguf(path, kinds=lambda name: kinds.get(name.split(".")[-2], "Q4_K"), **sizes)
    expected = {}
    for tensor in gguf.GGUFReader(path).tensors:
        kind = next(group for part, group in GROUPS if part in tensor.name)
        formats = expected.setdefault(kind, {})
        name = tensor.tensor_type.name
        name = {"F32": "float32", "F16": "float16"}.get(name, name)
        count, size = formats.get(name, (0, 0))
        formats[name] = count + 1, size + tensor.n_bytes
    diagnosis = diagnose(path)
    assert {group["group"] for group in diagnosis.groups} == set(expected)
    for group in diagnosis.groups:
        formats = expected[group["group"]]
        assert group["formats"] == {name: count for name, (count, _) in formats.items()}
        assert group["nbytes"] == sum(size for _, size in formats.values())
    assert fit(diagnosis, "mlx").computes_in == "float16"
    assert fit(diagnosis, "cuda").computes_in == "bfloat16"
    assert fit(diagnosis, "cpu").computes_in == "float32"


def test_quantised_matrices_of_mlx_lm_are_named_with_their_groups(tmp_path):
    source = make_checkpoint(tmp_path / "in", dtype="bfloat16")
    write_mlx(open_checkpoint(source), tmp_path / "out", 4, 32)
    formats = {group["group"]: group["formats"] for group in diagnose(tmp_path / "out").groups}
    assert formats["attention"] == {"affine 4-bit, groups of 32": 8}
    assert formats["norms"] == {"bfloat16": 5}


@pytest.mark.skipif(
    sys.platform != "linux", reason="files with holes, and resident pages through /proc"
)
@pytest.mark.parametrize("make", [sparse_checkpoint, sparse_gguf])
def test_weights_are_not_read_and_no_framework_is_imported(make, tmp_path):
    """A 70-billion-parameter model that is a header and a hole: described, and nothing of the hole
    was looked at.
    """
    path = make(tmp_path / "m.gguf" if make is sparse_gguf else tmp_path / "m", **LLAMA_70B)
    file = path if path.is_file() else path / "model.safetensors"
    assert file.stat().st_size > 35e9 and file.stat().st_blocks * 512 < 10e6
    code = f"""
import json, sys
from mlx_llama.doctor.diagnose import diagnose
from mlx_llama.core.system.machine import peak_memory
diagnosis = diagnose({str(path)!r})
frameworks = {{"mlx", "mlx.core", "torch", "triton", "transformers", "mlx_lm"}} & set(sys.modules)
print(json.dumps([diagnosis.facts(), peak_memory(), sorted(frameworks)]))
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    facts, peak, frameworks = json.loads(done.stdout)
    assert frameworks == [] and peak < 400e6
    assert facts["model"]["parameters"] == 70_553_706_496
    errors = [finding for finding in facts["findings"] if finding["level"] == "error"]
    assert {finding["about"] for finding in errors} <= {"memory"}


def test_rope_window_and_stretched_context(tmp_path):
    folder = make_checkpoint(
        tmp_path / "m",
        architectures=["MistralForCausalLM"],
        sliding_window=64,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    )
    model = diagnose(folder).model
    assert model["architecture"] == "MistralForCausalLM" and model["sliding_window"] == 64
    assert model["rope_type"] == "dynamic"
    assert model["context_length"] == 256 and model["longest_context"] == 1024
    assert model["rope_factor"] == 4.0
    assert diagnose(folder, ctx_size=1024).ok
    larger = diagnose(folder, ctx_size=1025)
    [warning] = [finding for finding in larger.findings if "1 to 1024" in finding.message]
    assert larger.ok and warning.level == "warning"
    with pytest.raises(ContextError, match="1 to 1024"):
        diagnose(folder, ctx_size=0)


def test_a_hub_model_is_looked_for_in_the_cache_alone(cache, monkeypatch):
    import huggingface_hub

    download = Mock(wraps=huggingface_hub.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    snapshot = put_in_cache(cache)
    diagnosis = diagnose("toy/llama", "main")
    assert diagnosis.ok
    options = {"model": "toy/llama", "revision": "main", "cache_bits": None}
    assert diagnosis.command == Command("chat", options=options)
    (snapshot / "model.safetensors").unlink()
    diagnosis = diagnose("toy/llama")
    assert "holds neither model.safetensors" in messages_of(diagnosis, "error")[0]
    assert diagnosis.model["layers"] == 2
    (snapshot / "config.json").unlink()
    message = "no config.json and no GGUF file in the local cache"
    assert message in messages_of(diagnose("toy/llama"), "error")[0]
    asked = download.call_args_list
    assert asked and all(call.kwargs["local_files_only"] for call in asked)


# The machine


@pytest.mark.parametrize(
    "wanted, available, expected",
    [("numpy", True, "MLX_LLAMA_CPU_TARGET asks for it"), ("z80", False, "choose")],
)
def test_compiled_kernels_or_why_not(wanted, available, expected, toy, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA_CPU_TARGET", wanted)
    diagnosis = diagnose(toy)
    [cpu] = [facts for facts in diagnosis.backends if facts.name == "cpu"]
    assert cpu.available is available and expected in cpu.reason and cpu.kernels is None
    assert (cpu.reason in messages_of(diagnosis, "warning")) is not available
    if not available:
        assert diagnosis.command.options["backend"] != "cpu"


T4 = 'echo "Tesla T4, 14913, 7.5"'
no_windows = pytest.mark.skipif(os.name == "nt", reason="a shell script stands in for nvidia-smi")


@no_windows
def test_a_gpu_is_asked_for_through_its_own_tool(smi, tmp_path):
    smi(T4)
    diagnosis = diagnose(make_checkpoint(tmp_path / "m", dtype="bfloat16"))
    [cuda] = [facts for facts in diagnosis.backends if facts.name == "cuda"]
    facts = (cuda.gpu, cuda.device, cuda.memory_bytes, cuda.options)
    assert facts == (True, "Tesla T4", 14913 << 20, ())
    # a T4 has no bfloat16
    assert diagnosis.auto == "cuda" and fit(diagnosis, "cuda").computes_in == "float16"
    assert diagnosis.machine["gpu"]["name"] == "Tesla T4"
    assert "backend" not in diagnosis.command.options


@no_windows
def test_a_gpu_that_does_not_answer_is_unknown(smi, toy, tmp_path):
    smi("sleep 30; touch $0.ended")
    diagnosis = diagnose(toy)
    assert not (tmp_path / "bin" / "nvidia-smi.ended").exists()  # it was not waited for
    [cuda] = [facts for facts in diagnosis.backends if facts.name == "cuda"]
    assert cuda.gpu is None and cuda.memory_bytes is None
    assert fit(diagnosis, "cuda").longest_context is None
    assert diagnosis.ok and diagnosis.auto == "cuda"


def test_choices_about_files_are_findings(tmp_path):
    folder = make_checkpoint(tmp_path / "m", max_position_embeddings=256.0)
    named = [{"name": "rag", "template": "{{ messages[0]['content'] }}"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    findings = [(line.about, line.message) for line in diagnose(folder).findings]
    assert any(about == "config" and "read as 256" in text for about, text in findings)
    assert any(about == "template" and "using 'rag'" in text for about, text in findings)
