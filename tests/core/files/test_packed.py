"""GPTQ and AWQ checkpoints: tensors as the formats' own definitions have them, and bad files;
refused packings of every method.

The matrices are packed and dequantised here, code by code, from the definitions: GPTQ (AutoGPTQ's
QuantLinear.pack), AWQ (AutoAWQ's WQLinear_GEMM.from_linear).
"""

import mlx_lm.utils
import numpy as np
import pytest
from making import (
    config_fields,
    edit_json,
    encode_tensor,
    make_checkpoint,
    refusal,
    write_safetensors,
)

import mlx_llama
from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import Tensor, open_checkpoint
from mlx_llama.core.files.packed import PackedWeight
from mlx_llama.core.files.tensor import DecodedTensor
from mlx_llama.core.models.config import LlamaConfig

SIZES = dict(hidden_size=128, intermediate_size=256, num_key_value_heads=1)
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def pack_stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """int [n, k] -> int32 [n, k bits / 32], low bits first, by Python's integers."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        rows.append(np.frombuffer(number.to_bytes(len(row) * bits // 8, "little"), "<i4"))
    return np.array(rows)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """int [k, n] -> int32 [k, n / 8]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = codes.reshape(len(codes), -1, 8)[:, :, order].astype(np.uint64)
    return (words << (4 * np.arange(8, dtype=np.uint64))).sum(-1).astype(np.uint32).view(np.int32)


class Toy:
    """Packed modules of a toy model, and their weights."""

    def __init__(self, method: str, bits=4, group=32, symmetric=False, order=None, seed=0):
        """order: of a module's columns by group, of (K, group, rng) -> int [K]; None for none."""
        self.method, self.bits, self.group, self.symmetric = method, bits, group, symmetric
        self.order, self.rng = order, np.random.default_rng(seed)
        self.weights: dict[str, np.ndarray] = {}

    def pack(self, module: str, n: int, k: int) -> dict[str, tuple]:
        rng, size = self.rng, self.group if self.group > 0 else k
        groups, top = -(-k // size), (1 << self.bits) - 1
        codes = rng.integers(0, top + 1, (n, k))
        zeros = rng.integers(1, top + 1, (groups, n))
        if self.symmetric:
            zeros[:] = 1 << (self.bits - 1)
        scales = (rng.standard_normal((groups, n)) * 0.02).astype(np.float16)
        of = np.arange(k) // size if self.order is None else self.order(k, size, rng)
        self.weights[f"{module}.weight"] = scales.astype(np.float32)[of].T * (
            codes - zeros[of].T
        ).astype(np.float32)
        if self.method == "awq":
            parts = {"qweight": pack_awq(codes.T), "qzeros": pack_awq(zeros)}
        else:
            stored = zeros - (self.method == "gptq")
            parts = {
                "qweight": np.ascontiguousarray(pack_stream(codes, self.bits).T),
                "qzeros": pack_stream(stored, self.bits),
            }
            if self.order is not None:
                parts["g_idx"] = of.astype(np.int32)
        tensors = {
            f"{module}.{part}": ("I32", array.shape, array.tobytes())
            for part, array in parts.items()
        }
        return tensors | {f"{module}.scales": ("F16", scales.shape, scales.tobytes())}

    def write(self, folder, config=None, change=None, **fields):
        """A model whose layers' matrices are packed. config: `quantization_config`."""
        fields = SIZES | fields
        make_checkpoint(folder, dtype="float16", **fields)
        settings = {
            "quant_method": "awq" if self.method == "awq" else "gptq",
            "bits": self.bits,
            "group_size": self.group,
            "desc_act": self.order is not None,
        }
        if self.method == "gptq_v2":
            settings["checkpoint_format"] = "gptq_v2"
        settings = settings if config is None else config
        edit_json(folder / "config.json", quantization_config=settings)
        tensors = {}
        for name, shape in LlamaConfig.from_dict(config_fields(**fields)).stored_shapes().items():
            is_router = name.endswith("moe.gate.weight")
            if len(shape) == 2 and ".layers." in name and not is_router:
                tensors |= self.pack(name.removesuffix(".weight"), *shape)
            else:
                values = self.rng.standard_normal(shape).astype(np.float32) * 0.1
                tensors[name] = encode_tensor(values, "float16")
        if change:
            change(tensors)
        write_safetensors(folder / "model.safetensors", tensors)
        return folder


def shuffle(k, size, rng):
    """Act-order: a column belongs to any group."""
    return rng.permutation(np.arange(k) // size)


def shuffle_runs(k, size, rng):
    """Groups in another order, each of consecutive columns."""
    return np.repeat(rng.permutation(k // size), size)


KINDS = {
    "gptq": Toy("gptq"),
    "gptq, symmetric": Toy("gptq", symmetric=True),
    "gptq, groups of 128": Toy("gptq", group=128, symmetric=True),
    "gptq, one group": Toy("gptq", group=-1),
    "gptq v2": Toy("gptq_v2"),
    "gptq, 2 bits": Toy("gptq", bits=2, group=64),
    "gptq, 3 bits": Toy("gptq", bits=3),
    "gptq, 8 bits": Toy("gptq", bits=8, symmetric=True),
    "gptq, groups in another order": Toy("gptq", order=shuffle_runs),
    "gptq, plain order": Toy("gptq", group=64, order=lambda k, size, _: np.arange(k) // size),
    "awq": Toy("awq"),
    "awq, groups of 64": Toy("awq", group=64),
    "awq, symmetric": Toy("awq", group=128, symmetric=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_exactly_those_of_the_format(kind, tmp_path):
    toy = KINDS[kind]
    opened = open_checkpoint(toy.write(tmp_path / "m"))
    assert set(opened.tensors) == set(opened.config.tensor_shapes())
    for name, wanted in toy.weights.items():
        weight = opened.tensors[name]
        assert isinstance(weight, PackedWeight) and weight.name == name
        np.testing.assert_array_equal(weight.float32(), wanted)
        assert weight.has_biases != toy.symmetric and weight.dtype == "float16"
        np.testing.assert_array_equal(weight.take(np.array([5, 2, 5])), wanted[[5, 2, 5]])
        part = weight.part("a", 3, 30).columns(128, 256) if wanted.shape[1] > 128 else None
        if part is not None:
            np.testing.assert_array_equal(part.float32(), wanted[3:30, 128:256])
    assert isinstance(opened.tensors["lm_head.weight"], Tensor)
    assert opened.dtype == "float16"


@pytest.mark.parametrize("symmetric", [False, True])
def test_act_order_is_decoded_to_the_scales_width_with_a_notice(symmetric, tmp_path):
    toy = Toy("gptq", symmetric=symmetric, order=shuffle)
    opened = open_checkpoint(toy.write(tmp_path / "m"))
    for name, wanted in toy.weights.items():
        weight = opened.tensors[name]
        assert isinstance(weight, DecodedTensor)
        np.testing.assert_array_equal(weight.array, wanted.astype(np.float16))
        part = weight.part("a", 3, 30)
        np.testing.assert_array_equal(part.array, wanted.astype(np.float16)[3:30])
        weight.release()
        np.testing.assert_array_equal(weight.columns(32, 64).array, weight.array[:, 32:64])
    (notice,) = opened.config.notices
    assert "14 matrices" in notice and "act-order" in notice and "loaded as float16" in notice


@pytest.mark.parametrize("backend", ["cpu", "mlx", "cuda"])
@pytest.mark.parametrize("kind", ["gptq", "gptq, symmetric", "gptq, 3 bits", "awq", "act-order"])
def test_logits_are_those_of_the_plain_matrices(kind, backend, tmp_path):
    toy = Toy("gptq", order=shuffle) if kind == "act-order" else KINDS[kind]
    packed = toy.write(tmp_path / "packed")
    stored = open_checkpoint(packed).tensors
    plain = {name: tensor.float32() for name, tensor in stored.items()}
    folder = make_checkpoint(tmp_path / "plain", tensors=plain, **SIZES)
    tokens, options = [1, 5, 9, 200, 7], dict(backend=backend, dtype="float32")
    if backend == "cuda":
        options["device"] = "cpu"
    logits = [mlx_llama.load(path, **options).logits(tokens) for path in (packed, folder)]
    np.testing.assert_allclose(*logits, atol=1e-4 * np.abs(logits[1]).max())


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_is_what_mlx_lm_loads(symmetric, tmp_path):
    toy = Toy("awq", group=64, symmetric=symmetric)
    folder = toy.write(tmp_path / "m")
    layers = mlx_lm.utils.load_model(folder)[0].model.layers
    import mlx.core as mx

    tensors = open_checkpoint(folder).tensors
    for module, theirs in ((QUERY, layers[0].self_attn.q_proj), (DOWN, layers[1].mlp.down_proj)):
        parts = [part.astype(mx.float32) for part in (theirs.scales, theirs.biases)]
        values = mx.dequantize(theirs.weight, *parts, group_size=64, bits=4)
        ours = tensors[f"{module}.weight"].float32()
        # mlx-lm rounds the biases to float16.
        atol = 0 if symmetric else np.abs(np.array(parts[1])).max() * 2**-11
        np.testing.assert_allclose(ours, np.array(values), rtol=0, atol=atol)


AUTO_ROUND = {
    "gptq": ("auto_round:auto_gptq", "gptq"),
    "old gptq": ("auto_round:gptq:exllamav2", "gptq"),
    "awq": ("auto_round:auto_awq", "awq"),
    "its own": ("auto_round:exllamav2", "gptq_v2"),
}


@pytest.mark.parametrize("kind", AUTO_ROUND)
def test_exports_of_auto_round(kind, tmp_path):
    packing, method = AUTO_ROUND[kind]
    name = "intel/auto-round" if kind == "old gptq" else "auto-round"
    field = "backend" if kind == "old gptq" else "packing_format"
    config = {"quant_method": name, "bits": 4, "group_size": 32, "data_type": "int", field: packing}
    toy = Toy(method)
    opened = open_checkpoint(toy.write(tmp_path / "m", config))
    for name, wanted in toy.weights.items():
        np.testing.assert_array_equal(opened.tensors[name].float32(), wanted)


def test_experts_and_fused_matrices(tmp_path):
    fields = dict(num_local_experts=2, num_experts_per_tok=1, architectures=["MixtralForCausalLM"])
    phi = dict(architectures=["Phi3ForCausalLM"], model_type="phi3", bos_token_id=1)
    for folder, more in (
        (tmp_path / "a", fields | {"model_type": "mixtral"}),
        (tmp_path / "b", phi),
    ):
        toy = Toy("awq")
        opened = open_checkpoint(toy.write(folder, **more))
        for name, (whole, rows) in opened.config.fused_parts().items():
            values = toy.weights[whole][rows]
            np.testing.assert_array_equal(opened.tensors[name].float32(), values)
        assert len(opened.low_bit) >= 14


def test_a_bias_of_zeros_that_the_model_lacks_is_dropped(tmp_path):
    def add(value):
        bias = np.full(128, value, np.float16)
        return lambda tensors: tensors.__setitem__(
            f"{QUERY}.bias", ("F16", bias.shape, bias.tobytes())
        )

    open_checkpoint(Toy("gptq").write(tmp_path / "a", change=add(0)))
    message = refusal(open_checkpoint, Toy("gptq").write(tmp_path / "b", change=add(0.5)))
    assert f"{QUERY}.bias" in message and "not part of the model" in message


# Refusals

FOUR_BITS = {"format": "float-quantized"}
FOUR_BITS |= {"config_groups": {"g": {"weights": {"type": "float", "num_bits": 4}}}}
REFUSED = {
    "no method": ({"bits": 4}, ["bits"]),
    "exl2": ({"quant_method": "exl2"}, ["'exl2'"]),
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ["'marlin'", "gptq_v2"]),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, ["'gemv'", "gemm"]),
    "mx": ({"quant_method": "auto-round", "data_type": "mx_fp"}, ["data_type", "'mx_fp'"]),
    "activations": ({"quant_method": "auto-round", "act_bits": 8}, ["act_bits", "8"]),
    "compressor": (
        {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
        ["packing_format", "llm_compressor"],
    ),
    "group": ({"quant_method": "gptq", "group_size": "128"}, ["group_size", "'128'"]),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt", "'e5m2'", "e4m3"]),
    "blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size", "[128]"]),
    "integers": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        ["format", "'int-quantized'", "float-quantized"],
    ),
    "floats of 4 bits": (
        {"quant_method": "compressed-tensors"} | FOUR_BITS,
        ["config_groups.g.weights.num_bits", "4", "8"],
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quant_algo", "'NVFP4'"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_packings_are_refused_by_name(case):
    field, words = REFUSED[case]
    raw = config_fields(quantization_config=field, **SIZES)
    words = ["quantization_config", *words]
    refusal(LlamaConfig.from_dict, raw, kind=ConfigError, words=words)


def change_part(part, shape=None, code="I32", value=0):
    def change(tensors):
        name = f"{QUERY}.{part}"
        if shape is None:
            del tensors[name]
        else:
            size = {"I32": 4, "F16": 2, "I64": 8}[code]
            data = np.full(shape, value, f"i{size}").tobytes()
            tensors[name] = code, shape, data

    return change


BAD = {
    "no zeros": (change_part("qzeros"), ["qzeros", "missing"]),
    "no scales": (change_part("scales"), ["scales", "missing"]),
    "codes of 5 bits": (change_part("qweight", (20, 128)), ["qweight", "[20, 128]", "2, 3, 4, 8"]),
    "codes as AWQ's": (change_part("qweight", (128, 16)), ["qweight", "[128, 16]", "[16, 128]"]),
    "zeros of other groups": (change_part("qzeros", (2, 16)), ["qzeros", "[2, 16]", "[4, 16]"]),
    "scales as integers": (change_part("scales", (4, 128)), ["scales", "I32", "F16"]),
    "wide codes": (change_part("qweight", (16, 128), "I64"), ["qweight", "I64", "I32"]),
    "index beyond the groups": (change_part("g_idx", (128,), value=4), ["g_idx", "4 that have"]),
    "index of other columns": (change_part("g_idx", (64,)), ["g_idx", "[64]", "[128]"]),
    "no index": (change_part("g_idx"), ["g_idx", "missing", "desc_act", "without act-order"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_tensor_is_named(case, tmp_path):
    change, words = BAD[case]
    folder = Toy("gptq", order=shuffle_runs).write(tmp_path / "m", change=change)
    refusal(open_checkpoint, folder, words=[QUERY, *words])
