"""Checkpoints of 8-bit floats: matrices as torch and transformers decode them, and bad files."""

import numpy as np
import pytest
import torch
from making import (
    config_fields,
    drop,
    edit_json,
    encode_tensor,
    make_checkpoint,
    put_zeros,
    refusal,
    write_safetensors,
)
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import mlx_llama
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.tensor import DecodedTensor
from mlx_llama.core.models.config import LlamaConfig

SIZES = dict(hidden_size=128, intermediate_size=256, num_key_value_heads=1)
QUERY = "model.layers.0.self_attn.q_proj"

COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
WEIGHTS = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}
COMPRESSED |= {"config_groups": {"group_0": WEIGHTS}}
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SMALL_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 64]}
STATIC = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def blocks(height: int, width: int):
    return lambda n, k: (-(-n // height), -(-k // width))


# {kind: (quantization_config, name of the scales, their shape for a matrix [n, k], their dtype)}
KINDS = {
    "blocks": (DEEPSEEK, "weight_scale_inv", blocks(128, 128), "F32"),
    "small blocks": (SMALL_BLOCKS, "weight_scale_inv", blocks(32, 64), "BF16"),
    "blocks, powers of two": (
        DEEPSEEK | {"scale_fmt": "ue8m0"},
        "weight_scale_inv",
        blocks(128, 128),
        "F8_E8M0",
    ),
    "Mistral": (STATIC, "weight_scale_inv", lambda n, k: (), "BF16"),
    "compressed, rows": (COMPRESSED, "weight_scale", lambda n, k: (n, 1), "BF16"),
    "compressed, whole": (COMPRESSED, "weight_scale", lambda n, k: (1,), "F32"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "weight_scale", lambda n, k: (n, 1), "F32"),
    "modelopt": (MODELOPT, "weight_scale", lambda n, k: (), "F32"),
    "hf_quant_config.json": (None, "weight_scale", lambda n, k: (), "F32"),
}
TORCH = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def make_float8(folder, kind, change=None, **fields):
    """(a folder, {name: (codes, scales) as torch's tensors}) of a model with packed layers."""
    config, part, shape_of, code = KINDS[kind]
    fields = SIZES | fields
    make_checkpoint(folder, dtype="bfloat16", **fields)
    edit_json(folder / "config.json", quantization_config=config)
    rng, tensors, packed = np.random.default_rng(0), {}, {}
    for name, shape in LlamaConfig.from_dict(config_fields(**fields)).stored_shapes().items():
        values = rng.standard_normal(shape).astype(np.float32) * 0.1
        if len(shape) != 2 or ".layers." not in name:
            tensors[name] = encode_tensor(values, "bfloat16")
            continue
        codes = torch.from_numpy(values * 400).to(torch.float8_e4m3fn)
        scales = torch.as_tensor(np.exp2(rng.uniform(-9, -7, shape_of(*shape))))
        scales = scales.to(torch.float32).to(TORCH[code])
        packed[name] = codes, scales
        module = name.removesuffix(".weight")
        tensors[name] = "F8_E4M3", shape, raw_bytes(codes)
        tensors[f"{module}.{part}"] = code, tuple(scales.shape), raw_bytes(scales)
        if kind == "Mistral":
            scale = torch.tensor([1.0], dtype=torch.bfloat16)
            tensors[f"{module}.activation_scale"] = "BF16", (), raw_bytes(scale)
        if kind == "modelopt" and module.endswith("k_proj"):
            tensors[f"{module}.k_scale"] = "F32", (), raw_bytes(torch.ones(1))
    if change:
        change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder, packed


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_those_of_torch_and_transformers(kind, tmp_path):
    folder, packed = make_float8(tmp_path / "m", kind)
    opened = open_checkpoint(folder)
    assert set(opened.tensors) == set(opened.config.tensor_shapes())
    for name, (codes, scales) in packed.items():
        tensor = opened.tensors[name]
        assert isinstance(tensor, DecodedTensor) and tensor.dtype == "bfloat16"
        n, k = codes.shape
        height, width = (KINDS[kind][0] or {}).get("weight_block_size") or (128, 128)
        grid = scales.float()
        if grid.numel() > 1 and len(grid) != n:
            grid = grid.repeat_interleave(height, 0).repeat_interleave(width, 1)[:n, :k]
        wanted = (codes.float() * grid).bfloat16().float()
        np.testing.assert_array_equal(tensor.float32(), wanted.numpy())
        rows, columns = scales.shape if scales.ndim == 2 else (1, 1)
        if n % rows == 0 and k % columns == 0 and n // rows in (height, n, 1):
            theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
            np.testing.assert_array_equal(tensor.float32(), theirs.float().numpy())
    (notice,) = opened.config.notices
    assert "14 matrices (fp8) are loaded as bfloat16" in notice
    assert opened.nbytes < 0.8 * sum(tensor.bits.nbytes for tensor in opened.tensors.values())


def test_rows_in_another_order_are_decoded_when_they_are_read(tmp_path):
    fields = dict(architectures=["Ernie4_5ForCausalLM"], model_type="ernie4_5", head_dim=16)
    folder, packed = make_float8(tmp_path / "m", "compressed, rows", **fields)
    opened = open_checkpoint(folder)
    for name in (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"):
        (codes, scales), tensor = packed[name], opened.tensors[name]
        order = opened.config.row_order(name.removesuffix(".weight"), len(codes))
        wanted = (codes.float() * scales.float()).bfloat16().float().numpy()[order]
        assert isinstance(tensor, DecodedTensor) and tensor._kept is None
        np.testing.assert_array_equal(tensor.part("some", 4, 12).float32(), wanted[4:12])
        np.testing.assert_array_equal(tensor.float32(), wanted)


@pytest.mark.parametrize("backend", ["cpu", "mlx", "cuda"])
def test_logits_are_those_of_transformers(backend, tmp_path):
    folder, _ = make_float8(tmp_path / "m", "blocks", hidden_size=256, intermediate_size=512)
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32
    )
    tokens = [1, 5, 9, 200, 7]
    options = {"device": "cpu"} if backend == "cuda" else {}
    ours = mlx_llama.load(folder, backend=backend, dtype="float32", **options).logits(tokens)
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens])).logits[0, -1].numpy()
    ours = np.asarray(ours).reshape(-1, wanted.shape[-1])[-1]
    np.testing.assert_allclose(ours, wanted, atol=3e-3 * np.abs(wanted).max())


BAD = {
    "no scales": (
        drop(f"{QUERY}.weight_scale_inv"),
        [f"{QUERY}.weight_scale", "missing", "F8_E4M3"],
    ),
    "scales of other blocks": (
        put_zeros(f"{QUERY}.weight_scale_inv", "F32", 2, 1),
        [f"{QUERY}.weight_scale_inv", "[2, 1]", "[1, 1]", "128 x 128"],
    ),
    "scales as integers": (
        put_zeros(f"{QUERY}.weight_scale_inv", "I32", 1, 1),
        [f"{QUERY}.weight_scale_inv", "I32", "F32"],
    ),
    "another float": (put_zeros(f"{QUERY}.weight", "F8_E5M2", 128, 128), [QUERY, "weight_scale"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tensor_is_named(case, tmp_path):
    change, words = BAD[case]
    refusal(open_checkpoint, make_float8(tmp_path / "m", "blocks", change)[0], words=words)
