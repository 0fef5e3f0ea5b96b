"""A mixture of experts: which weights a token touches, bits in a batch, files that store experts
one by one, refusals.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from making import (
    config_fields,
    edit_json,
    encode_tensor,
    few_experts,
    make_checkpoint,
    random_tensors,
    refusal,
    write_safetensors,
)
from making_gguf import add_config, add_sentencepiece, write_all
from torch.utils._python_dispatch import TorchDispatchMode

from backends.conftest import in_chunks, probes, relative_error, transformers_logits
from backends.triton_process import (
    DEVICE,
    DEVICE_NAME,
    call,  # noqa: F401
    computing,
    fewer_programs,
)
from cuda_fallback import ops
from mlx_llama.bench.measure import bytes_per_token
from mlx_llama.core.backends.selection import select
from mlx_llama.core.backends.shards import take_share
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.ops import ExpertStacks
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx

MIXTRAL = dict(architectures=["MixtralForCausalLM"], num_local_experts=6, num_experts_per_tok=2)
TOKENS = np.random.default_rng(1).integers(3, 384, (3, 26)).astype(np.int32)


@functools.cache
def weights() -> dict[str, np.ndarray]:
    return random_tensors(config_fields(**MIXTRAL))


@functools.cache
def folder() -> Path:
    return make_checkpoint(Path(tempfile.mkdtemp()) / "mixtral", tensors=weights(), **MIXTRAL)


def in_4_bits(source: Path) -> Path:
    out = Path(tempfile.mkdtemp()) / "low-bit"
    write_mlx(open_checkpoint(source), out, 4, 32)
    return out


@functools.cache
def low_bit() -> Path:
    return in_4_bits(folder())


@functools.cache
def scaled() -> Path:
    """Low-bit experts of Llama 4: shares multiply their inputs, and an MLP is shared."""
    config = dict(
        architectures=["Llama4ForCausalLM"],
        model_type="llama4_text",
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=6,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        attention_chunk_size=5,
    )
    return in_4_bits(make_checkpoint(Path(tempfile.mkdtemp()) / "llama4", **config))


@functools.cache
def biased() -> Path:
    """Low-bit experts of GLM-4.5: a bias and groups choose them after a dense layer."""
    config = dict(
        architectures=["Glm4MoeForCausalLM"],
        model_type="glm4_moe",
        head_dim=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=3,
        topk_group=2,
        num_nextn_predict_layers=0,
    )
    return in_4_bits(make_checkpoint(Path(tempfile.mkdtemp()) / "glm", **config))


@functools.cache
def gated() -> Path:
    """Low-bit experts of Qwen2-MoE, and a shared one behind a gate."""
    config = dict(
        architectures=["Qwen2MoeForCausalLM"],
        model_type="qwen2_moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
    )
    return in_4_bits(make_checkpoint(Path(tempfile.mkdtemp()) / "qwen2", **config))


def unused_experts(backend, path: Path, token: int) -> dict[int, list[int]]:
    """{layer: experts that a text of this one token does not use}, by the router's weights in
    float64.
    """
    model = backend.load(open_checkpoint(path), "float32")
    inputs, unused = probes(model, backend.runtime.to_numpy, np.array([[token]])), {}
    for layer in model.config.layers:
        router = weights()[f"{layer.experts.router.module}.weight"].astype(np.float64)
        scores = router @ inputs[f"{layer.index}.ffn_norm"].reshape(-1)
        unused[layer.index] = np.argsort(-scores)[layer.experts.router.used :].tolist()
    return unused


PATHS = [folder, low_bit, scaled, biased, gated]
NAMES = ["float32", "low-bit", "scaled", "biased", "gated"]


@pytest.mark.parametrize("compile", [None, False])
def test_only_the_chosen_experts_weights_take_part(compile, backend, tmp_path):
    """All others are NaN, which any product with them would show."""
    unused = unused_experts(backend, folder(), 7)
    poisoned = {name: values.copy() for name, values in weights().items()}
    for layer, experts in unused.items():
        assert len(experts) == 4
        for expert, module in itertools.product(experts, ("w1", "w2", "w3")):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{module}.weight"
            poisoned[name][:] = np.nan
    results = []
    for path in (folder(), make_checkpoint(tmp_path / "poisoned", tensors=poisoned, **MIXTRAL)):
        model = backend.load(open_checkpoint(path), "float32", compile=compile)
        results.append(backend.runtime.to_numpy(model.forward([[7]], 0, model.make_cache(1))))
    assert np.isfinite(results[0]).all() and results[0].tobytes() == results[1].tobytes()


@pytest.mark.slow_for("low-bit", "biased", "gated")
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_compiled_rows_have_the_same_bits_in_any_batch(path):
    backend = select("cpu")
    model = backend.load(open_checkpoint(path()))
    assert model.is_batch_invariant
    whole = model.forward(TOKENS, 0, model.make_cache(26, 3), all_positions=True)
    for row in range(3):
        parts = in_chunks(model, np.asarray, TOKENS[row : row + 1], (0, 1, 2, 13, 26))
        assert parts.tobytes() == whole[row : row + 1].tobytes()
    cache = model.make_cache(26, 3)
    for at in range(26):
        stepped = model.forward(TOKENS[:, at : at + 1], at, cache)
    assert stepped.tobytes() == whole[:, -1].tobytes()


def test_gguf_files_of_2023(tmp_path):
    """Each expert has a tensor of its own."""
    config, tensors = config_fields(**MIXTRAL), weights()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_config(writer, config)
    add_sentencepiece(writer)
    writer.add_expert_count(6)
    writer.add_expert_used_count(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    parts = {"w1": "gate", "w2": "down", "w3": "up"}
    heads = {"q_proj": 4, "k_proj": 2}
    for name, values in tensors.items():
        if ".experts." in name:
            _, _, layer, _, _, expert, part, _ = name.split(".")
            writer.add_tensor(f"blk.{layer}.ffn_{parts[part]}.{expert}.weight", values)
            continue
        if count := heads.get(name.split(".")[-2]):
            values = values.reshape(count, 2, -1, 64).swapaxes(1, 2).reshape(values.shape)
        base, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", np.ascontiguousarray(values))
    write_all(writer)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.config.architecture == "MixtralForCausalLM"
    for name, values in tensors.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), values)


QWEN = dict(
    architectures=["Qwen3MoeForCausalLM"],
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    head_dim=64,
    hidden_size=256,
    moe_intermediate_size=256,
    vocab_size=384,
)


@functools.cache
def written(format: str) -> tuple[Path, np.ndarray]:
    """A GGUF file with stacks of low-bit experts, and transformers' logits for its weights
    dequantised by gguf.
    """
    home = Path(tempfile.mkdtemp())
    write_gguf(open_checkpoint(make_checkpoint(home / "m", **QWEN)), home / "m.gguf", format)
    exported = open_checkpoint(home / "m.gguf")
    config = LlamaConfig.from_dict(config_fields(**QWEN))
    dequantised = {name: tensor.float32() for name, tensor in exported.tensors.items()}
    stacks = {tensor.name: tensor for tensor in gguf.GGUFReader(home / "m.gguf").tensors}
    for layer in range(2):
        spec = config.layers[layer].experts
        for part, names in (("gate", spec.gate), ("up", spec.up), ("down", spec.down)):
            stack = stacks[f"blk.{layer}.ffn_{part}_exps.weight"]
            whole = gguf.dequantize(stack.data, stack.tensor_type)
            for module, wanted in zip(names, whole, strict=True):
                np.testing.assert_array_equal(dequantised[f"{module}.weight"], wanted)
    judge = make_checkpoint(home / "judge", tensors=dequantised, **QWEN)
    return home / "m.gguf", transformers_logits(judge, TOKENS)


@pytest.mark.slow_for("c*-Q4_K_M")
@pytest.mark.parametrize("format", ["Q8_0", "Q4_K_M"])
def test_low_bit_stacks_of_gguf_files(format, load):
    path, wanted = written(format)
    assert relative_error(in_chunks(*load(path), TOKENS, (0, 20, 25, 26)), wanted) < 1e-4


@pytest.mark.slow_for("cpu")
def test_experts_of_different_formats_are_refused(backend, tmp_path):
    mx = pytest.importorskip("mlx.core")
    out = shutil.copytree(folder(), tmp_path / "mixed")
    arrays, odd = {}, "model.layers.1.block_sparse_moe.experts.2.w1"
    for name, values in weights().items():
        arrays[name] = encode_tensor(values, "float32")
        if ".experts." in name:
            with mx.stream(mx.cpu):
                bits = 8 if name == f"{odd}.weight" else 4
                parts = [np.array(array) for array in mx.quantize(mx.array(values), 32, bits)]
            arrays[name] = ("U32", parts[0].shape, parts[0].tobytes())
            for kind, part in zip(("scales", "biases"), parts[1:]):
                arrays[name.replace("weight", kind)] = encode_tensor(part, "float32")
    write_safetensors(out / "model.safetensors", arrays)
    quantization = {"bits": 4, "group_size": 32, odd: {"bits": 8, "group_size": 32}}
    edit_json(out / "config.json", quantization=quantization)
    message = refusal(backend.load, open_checkpoint(out), "float32")
    assert message.startswith(f"{odd}.weight: differs in format")


def test_a_stack_beside_its_experts_is_refused(tmp_path):
    tensors, stack = dict(weights()), "model.layers.0.block_sparse_moe.switch_mlp.gate_proj.weight"
    tensors[stack] = np.zeros((6, 96, 64), np.float32)
    path = make_checkpoint(tmp_path / "both", tensors=tensors, **MIXTRAL)
    first = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    assert f"holds {stack!r} and {first!r}, which are the same" in refusal(open_checkpoint, path)


def test_a_stack_of_another_number_of_experts_is_misshaped(tmp_path):
    tensors = {
        name: values for name, values in weights().items() if not name.endswith(".w1.weight")
    }
    for layer in (0, 1):
        stack = f"model.layers.{layer}.block_sparse_moe.switch_mlp.gate_proj.weight"
        tensors[stack] = np.zeros((5, 96, 64), np.float32)
    path = make_checkpoint(tmp_path / "five", tensors=tensors, **MIXTRAL)
    assert "has shape [5, 96, 64], config.json calls for [96, 64]" in refusal(open_checkpoint, path)


def test_experts_are_not_split_over_processes():
    said = "with experts or without a gate are not split over several processes"
    with pytest.raises(BackendError, match=said):
        take_share(open_checkpoint(folder()), 0, 2)


def test_a_token_reads_the_experts_that_it_uses():
    model = select("cpu").load(open_checkpoint(folder()), "float32")
    experts = 2 * 6 * 3 * 96 * 64  # numbers of 2 layers
    every = sum(values.size for values in weights().values())
    read = every - 383 * 64 - experts * 4 // 6
    assert bytes_per_token(open_checkpoint(folder()), model, 0) == 4 * read


def test_the_profile_names_the_experts(backend):
    model = backend.load(
        open_checkpoint(low_bit()), "float32", compile=None if backend.name == "cpu" else False
    )
    cache = model.make_cache(8)
    with model.profile() as profile:
        model.forward([[3, 4, 5, 6]], 0, cache)
        backend.runtime.to_numpy(model.forward([[7]], 4, cache))
    assert {"router", "experts"} <= profile.operations.keys()
    assert "gate, up" not in profile.operations


# Triton's kernels


def by_kernels(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """[(by kernels, by torch's own operations)] of a layer's experts, for one row and for three,
    whose first has its bits.
    """
    backend, pairs = select("cuda", DEVICE_NAME), []
    fewer_programs()
    plain = backend.load(open_checkpoint(path), "float32", compile=False).decoder.blocks[1].mlp
    with computing(by_kernels=True):
        from cuda_fallback.kernels import ops as words

        decoder = backend.load(open_checkpoint(path), "float32", compile=False).decoder
        mlp = decoder.over(words).blocks[1].mlp
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 1, 64), np.float32)).to(
        DEVICE
    )
    with torch.inference_mode():
        for count in (1, 3):
            with computing(by_kernels=True):
                ours = mlp(x[:count], None)
                assert torch.equal(ours[:1], mlp(x[:1], None))
            with computing(by_kernels=False):
                other = plain(x[:count], None)
            pairs.append((ours.cpu().numpy(), other.cpu().numpy()))
    return pairs


@pytest.mark.slow_for("low-bit", "scaled", "biased", "gated")
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_experts_by_tritons_kernels_are_torchs(path, call):
    for got, wanted in call(by_kernels, path()):
        assert relative_error(got, wanted) < 1e-5


def grouped(path: Path, dtype: str) -> tuple[np.ndarray, ...]:
    """Experts of a prompt by grouped products, by kernels row by row, and by torch's own
    operations.
    """
    from cuda_fallback.kernels import decode, packed

    fewer_programs()
    packed._LEAST_TILE = packed._MOST_TILE  # NumPy's sums depend on the width of a product
    backend, results = select("cuda", DEVICE_NAME), []
    experts, asked = decode.experts, []
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, 40, 64), np.float32)).to(
        DEVICE, getattr(torch, dtype)
    )
    for by_kernels, is_grouped in ((True, True), (True, False), (False, False)):
        with pytest.MonkeyPatch.context() as patch, computing(by_kernels):
            patch.setattr(
                decode,
                "experts",
                lambda *arguments, **named: (
                    asked.append(named) or experts(*arguments, is_grouped=is_grouped)
                ),
            )
            layer = backend.load(open_checkpoint(path), dtype, compile=False).decoder.blocks[1].mlp
            with torch.inference_mode():
                results.append(layer(x, None).float().cpu().numpy())
    assert asked[-2:] == [{"is_grouped": True}] * 2  # a GPU's kernels are tried out first
    return tuple(results)


@pytest.mark.slow_for("low_bit", "scaled")
@pytest.mark.parametrize(
    "path, dtype", [(low_bit, "bfloat16"), (folder, "float16"), (scaled, "float32")]
)
def test_a_prompts_experts_are_grouped(path, dtype, call):
    prompt, rows, wanted = call(grouped, path(), dtype)
    bound = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    assert relative_error(prompt, wanted) < bound
    if path is not folder:  # a dense step takes another kernel
        np.testing.assert_array_equal(prompt, rows)


def test_a_prompts_experts_by_torch_copy_nothing_from_the_host():
    """A tensor of a number would be a copy, and a wait, for each expert."""
    seen = set()

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.add(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    stack = torch.ones((4, 8, 8))
    with computing(by_kernels=False), Names():
        spec = few_experts(4, used=2)
        stacks = ExpertStacks(stack, torch.ones((4, 8, 8)), stack, spec)
        mixed = ops.experts(torch.ones((1, 5, 8)), torch.eye(5, 4)[None], stacks)
        assert mixed.shape == (1, 5, 8) and "lift_fresh" not in seen
        torch.tensor([1])
    assert "lift_fresh" in seen
