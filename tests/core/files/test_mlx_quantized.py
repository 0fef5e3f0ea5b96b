"""Safetensors that mx.quantize packed: settings, tensors bit for bit as mx.dequantize has them, and
bad files.
"""

import json

import mlx_lm.utils
import numpy as np
import pytest
from making import (
    config_fields,
    drop,
    encode_tensor,
    make_checkpoint,
    put_zeros,
    random_tensors,
    refusal,
    write_safetensors,
)
from safetensors.numpy import load_file, save_file

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import Tensor, open_checkpoint
from mlx_llama.core.files.quantized import FloatWeight, MLXWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.quantization import (
    FLOAT_MODES,
    QUANTIZED_BITS,
    QUANTIZED_GROUPS,
    Packing,
    Quantization,
)

WIDE = dict(hidden_size=128, intermediate_size=256)
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
GOOD = {"bits": 4, "group_size": 64}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def packings(field: dict) -> dict[str, tuple[int, int, str] | None]:
    """{module: (bits, group size, mode) or None} by mlx-lm's rules, for a field `quantization`."""

    def pair(value):
        defaults = {"bits": 4, "group_size": 64, "mode": "affine"}
        return tuple((defaults | value).values()) if isinstance(value, dict) else value

    return {name: pair(value) for name, value in field.items() if name not in GOOD | {"mode": ""}}


def make_quantised(
    folder, field, *, dtype="float16", change=None, config=None, unlisted=True, **fields
):
    """A random model as mlx_lm.convert would save it.

    field: config.json's `quantization`. change: edits the tensors, {name: (dtype code, shape,
    bytes)}. unlisted: quantise modules that `field` does not name.
    """
    fields = WIDE | fields
    make_checkpoint(folder, dtype=dtype, **fields)
    raw = config_fields(torch_dtype=dtype, quantization=field, quantization_config=field, **fields)
    (folder / "config.json").write_text(json.dumps(raw | (config or {})))
    listed, rng, tensors = packings(field), np.random.default_rng(0), {}
    for name, values in random_tensors(config_fields(**fields)).items():
        module = name.removesuffix(".weight")
        packing = listed.get(module, unlisted)
        if values.ndim == 1 or not packing:
            tensors[name] = encode_tensor(values, dtype)
            continue
        whole = field["bits"], field["group_size"], field.get("mode", "affine")
        bits, group, mode = whole if packing is True else packing
        rows, columns = values.shape
        words = rng.integers(0, 1 << 32, (rows, columns * bits // 32), dtype=np.uint32)
        tensors[name] = "U32", words.shape, words.tobytes()
        if mode != "affine":
            scales = rng.integers(110, 122, (rows, columns // group), dtype=np.uint8)
            tensors[f"{module}.scales"] = "U8", scales.shape, scales.tobytes()
            continue
        for part in ("scales", "biases"):
            scaling = rng.standard_normal((rows, columns // group), np.float32)
            tensors[f"{module}.{part}"] = encode_tensor(scaling, dtype)
    if change:
        change(tensors)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("group_size", QUANTIZED_GROUPS)
@pytest.mark.parametrize("bits", QUANTIZED_BITS)
def test_matrices_are_what_mx_dequantize_gives(bits, group_size, tmp_path):
    mx = pytest.importorskip("mlx.core")
    folder = make_quantised(
        tmp_path / "m", {"bits": bits, "group_size": group_size}, dtype="float32"
    )
    opened, stored = open_checkpoint(folder), mx.load(str(folder / "model.safetensors"))
    assert opened.config.quantization == Quantization(Packing(bits, group_size))
    hash(opened.config)
    assert set(opened.tensors) == set(opened.config.tensor_shapes())
    for name, weight in opened.tensors.items():
        if weight.shape == (128,):
            assert isinstance(weight, Tensor)
            continue
        module = name.removesuffix(".weight")
        parts = [stored[f"{module}.{part}"] for part in ("weight", "scales", "biases")]
        with mx.stream(mx.cpu):
            wanted = np.array(mx.dequantize(*parts, group_size=group_size, bits=bits))
        assert isinstance(weight, MLXWeight) and weight.name == name
        assert weight.shape == opened.config.tensor_shapes()[name] == wanted.shape
        np.testing.assert_array_equal(weight.float32(), wanted)
    assert opened.nbytes == sum(array.nbytes for array in stored.values())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_scales_keep_their_width_and_say_the_activations(dtype, tmp_path):
    opened = open_checkpoint(make_quantised(tmp_path / "m", GOOD, dtype=dtype))
    weight = opened.tensors[QUERY + ".weight"]
    assert opened.dtype == weight.dtype == weight.scale_dtype == dtype
    assert weight.nbytes == 128 * 128 // 2 + 2 * 128 * 2 * {"float32": 4}.get(dtype, 2)


def test_nothing_is_copied(tmp_path):
    weight = open_checkpoint(make_quantised(tmp_path / "m", GOOD)).tensors[DOWN + ".weight"]
    for array in (weight.packed, weight.scales, weight.biases):
        assert not array.flags.owndata and not array.flags.writeable
    before = weight.float32()
    weight.release()
    np.testing.assert_array_equal(weight.float32(), before)


def test_settings_of_single_layers(tmp_path):
    up = "model.layers.1.mlp.up_proj"
    field = GOOD | {"mode": "affine", QUERY: {"bits": 8, "group_size": 32}, HEAD: False, DOWN: True}
    field |= {EMBEDDING: {"bits": 6, "group_size": 128, "mode": "affine"}, up: {"bits": 3}}
    opened = open_checkpoint(make_quantised(tmp_path / "m", field))
    packings_read = {
        name.removesuffix(".weight"): (weight.bits, weight.group_size)
        for name, weight in opened.tensors.items()
        if isinstance(weight, MLXWeight)
    }
    wanted = {QUERY: (8, 32), EMBEDDING: (6, 128), DOWN: (4, 64), up: (3, 64)}
    assert packings_read == packings_read | wanted
    assert packings_read["model.layers.0.mlp.up_proj"] == (4, 64)
    assert HEAD not in packings_read and isinstance(opened.tensors[HEAD + ".weight"], Tensor)


@pytest.mark.parametrize("mode", FLOAT_MODES)
def test_floating_point_modes(mode, tmp_path):
    """Also those of single layers, whose defaults are the mode's."""
    bits, group = FLOAT_MODES[mode]
    other = "nvfp4" if mode == "mxfp4" else "mxfp4"
    field = {"bits": bits, "group_size": group, "mode": mode, QUERY: {"bits": 8, "group_size": 64}}
    field[DOWN] = {"bits": 4, "group_size": FLOAT_MODES[other][1], "mode": other}
    folder = make_quantised(tmp_path / "m", field)
    opened = open_checkpoint(folder)
    theirs = dict(mlx_lm.utils.load_model(folder)[0].named_modules())
    for name, weight in opened.tensors.items():
        if len(weight.shape) == 2:
            module = theirs[name.removesuffix(".weight")]
            assert weight.mode == module.mode and isinstance(weight, (MLXWeight, FloatWeight))
    modes = [opened.tensors[f"{name}.weight"].mode for name in (EMBEDDING, QUERY, DOWN)]
    assert modes == [mode, "affine", other]
    assert opened.tensors[f"{EMBEDDING}.weight"].shape == (opened.config.vocab_size, 128)
    assert not opened.tensors[f"{EMBEDDING}.weight"].packed.flags.owndata
    assert opened.dtype == "bfloat16"  # as mlx_lm's embedding


def test_defaults_of_a_layers_mode():
    raw = config_fields(quantization=GOOD | {QUERY: {"mode": "nvfp4"}}, **WIDE)
    assert LlamaConfig.from_dict(raw).quantization.layers == ((QUERY, Packing(4, 16, "nvfp4")),)


def test_a_matrix_without_scales_that_no_setting_names_is_not_quantised(tmp_path):
    field = {"bits": 4, "group_size": 64, QUERY: {"bits": 5, "group_size": 32}}
    opened = open_checkpoint(make_quantised(tmp_path / "m", field, unlisted=False))
    assert [name for name, weight in opened.tensors.items() if isinstance(weight, MLXWeight)] == [
        QUERY + ".weight"
    ]


@pytest.mark.parametrize("saved", ["embedding", "head", "both"])
def test_a_tied_matrix_under_either_name(saved, tmp_path):
    def rename(tensors):
        for part in ("weight", "scales", "biases"):
            entry = tensors[f"{EMBEDDING}.{part}"]
            if saved != "embedding":
                tensors[f"{HEAD}.{part}"] = entry
            if saved == "head":
                del tensors[f"{EMBEDDING}.{part}"]

    folder = make_quantised(
        tmp_path / "m", {"bits": 4, "group_size": 32}, change=rename, tie_word_embeddings=True
    )
    opened = open_checkpoint(folder)
    assert isinstance(opened.tensors[EMBEDDING + ".weight"], MLXWeight)
    assert HEAD + ".weight" not in opened.tensors


def test_shards(tmp_path):
    folder = make_quantised(tmp_path / "m", {"bits": 4, "group_size": 32})
    whole = open_checkpoint(folder).tensors[QUERY + ".weight"].float32()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    # codes and scales of one matrix lie in different files
    for i, name in enumerate(sorted(tensors)):
        weight_map.setdefault(f"model-{i % 3}.safetensors", []).append(name)
    for file, names in weight_map.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in weight_map.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(
        open_checkpoint(folder).tensors[QUERY + ".weight"].float32(), whole
    )


# Bad settings


PLACE = f"quantization.{QUERY}"
OUTSIDE = "model.layers.2.self_attn.q_proj"
MXFP8 = {"bits": 4, "group_size": 32, "mode": "mxfp8"}
BAD_FIELDS = {
    "a text": ("x", ["quantization is 'x'", "an object"]),
    "bits 7": (GOOD | {"bits": 7}, ["quantization.bits", "7", "2, 3, 4, 5, 6, 8"]),
    "bits 1": (GOOD | {"bits": 1}, ["quantization.bits", "1"]),
    "bits text": (GOOD | {"bits": "4"}, ["quantization.bits", "'4'"]),
    "bits true": (GOOD | {"bits": True}, ["quantization.bits", "True"]),
    "bits missing": ({"group_size": 64}, ["quantization.bits", "missing"]),
    "group 16": (GOOD | {"group_size": 16}, ["quantization.group_size", "16", "32, 64, 128"]),
    "group null": (GOOD | {"group_size": None}, ["quantization.group_size", "None"]),
    "group missing": ({"bits": 4}, ["quantization.group_size", "missing"]),
    "mode": (GOOD | {"mode": "nf4"}, ["mode", "nf4", "affine, mxfp4, nvfp4, mxfp8", "mlx_lm.conv"]),
    "group of mxfp4": (GOOD | {"mode": "mxfp4"}, ["quantization.group_size", "64", "32 for mxfp4"]),
    "bits of mxfp8": (MXFP8, ["quantization.bits", "4", "8 for mxfp8"]),
    "mode of a layer": (GOOD | {QUERY: MXFP8 | {"mode": "q4"}}, [f"{PLACE}.mode", "q4"]),
    "bits of a layer": (GOOD | {QUERY: {"bits": 9}}, [f"{PLACE}.bits", "9"]),
    "group of a layer": (GOOD | {QUERY: GOOD | {"group_size": 0}}, [f"{PLACE}.group_size", "0"]),
    "unknown field of a layer": (GOOD | {QUERY: GOOD | {"odd": True}}, [QUERY, "odd"]),
    "layer a number": (GOOD | {QUERY: 4}, [PLACE, "4", "true, false"]),
    "unknown field": (GOOD | {"linear_class": "x"}, ["quantization.linear_class", "'x'"]),
    "no such layer": (GOOD | {OUTSIDE: {"bits": 4}}, [OUTSIDE, "no matrix"]),
    "a norm": (GOOD | {"model.norm": {"bits": 4}}, ["model.norm", "no matrix"]),
    "a line break": (GOOD | {"a\nb": {"bits": 4}}, ["a\\nb"]),
    "text": ("4bit", ["quantization", "4bit"]),
    "list": ([4, 64], ["quantization", "[4, 64]"]),
}


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_bad_setting_is_named(case):
    field, words = BAD_FIELDS[case]
    raw = config_fields(quantization=field, **WIDE)
    message = refusal(LlamaConfig.from_dict, raw, "m/config.json", kind=ConfigError, words=words)
    assert message.startswith("m/config.json: ")


@pytest.mark.parametrize("other", ["aqlm", "hqq", "bitsandbytes", "quark"])
def test_other_quantisers_are_refused_by_name(other):
    raw = config_fields(quantization_config={"quant_method": other, "bits": 2}, **WIDE)
    message = refusal(LlamaConfig.from_dict, raw, kind=ConfigError)
    assert "quantization_config" in message and repr(other) in message
    assert "mlx_lm.convert" in message


def test_another_quantiser_beside_mlx_lms_field_has_no_effect(tmp_path):
    """As in mlx_lm's load_model; AutoRound's exports for MLX have both."""
    other = {"quant_method": "auto-round", "bits": 8, f"model.{QUERY}": {"bits": 2}}
    field = GOOD | {QUERY: {"bits": 8, "group_size": 32}}
    folder = make_quantised(tmp_path / "m", field, config={"quantization_config": other})
    ours = open_checkpoint(folder)
    theirs = mlx_lm.utils.load_model(folder)[0].model.layers[0].self_attn
    packed = ours.tensors[f"{QUERY}.weight"]
    assert (packed.bits, packed.group_size) == (theirs.q_proj.bits, theirs.q_proj.group_size)
    key = ours.tensors[QUERY.replace("q_proj", "k_proj") + ".weight"]
    assert (key.bits, key.group_size) == (theirs.k_proj.bits, theirs.k_proj.group_size)
    assert packed.bits != key.bits


def test_mixed_widths_under_the_names_of_a_model_with_images(tmp_path):
    """Keys have the prefix of the text part, in both fields, and only the first counts."""
    prefix = "language_model."
    field = GOOD | {QUERY: {"bits": 8, "group_size": 32}, DOWN: {"bits": 3}, HEAD: False}
    folder = make_quantised(tmp_path / "m", field, change=lambda tensors: rename(tensors, prefix))
    text = json.loads((folder / "config.json").read_text())
    for name in ("quantization", "quantization_config", "architectures"):
        del text[name]
    named = {name if name in GOOD else prefix + name: value for name, value in field.items()}
    other = {"quant_method": "auto-round", "bits": 2, f"model.{prefix}{QUERY}": {"bits": 2}}
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text | {"model_type": "mistral"},
        "quantization": named,
        "quantization_config": other,
    }
    (folder / "config.json").write_text(json.dumps(outer))
    ours, model = open_checkpoint(folder).tensors, mlx_lm.utils.load_model(folder)[0]
    text_part = model.language_model
    for module in (QUERY, DOWN, QUERY.replace("q_proj", "k_proj")):
        theirs = text_part
        for step in module.split("."):
            theirs = theirs[int(step)] if step.isdigit() else getattr(theirs, step)
        mine = ours[f"{module}.weight"]
        assert (mine.bits, mine.group_size) == (theirs.bits, theirs.group_size)
    assert isinstance(ours[f"{HEAD}.weight"], Tensor) and not hasattr(text_part.lm_head, "bits")
    assert {ours[f"{module}.weight"].bits for module in (QUERY, DOWN)} == {8, 3}


def rename(tensors, prefix):
    for name in list(tensors):
        tensors[prefix + name] = tensors.pop(name)


def test_groups_that_do_not_divide_a_row_of_a_named_layer():
    field = {"bits": 4, "group_size": 32, DOWN: {"bits": 4, "group_size": 128}}
    raw = config_fields(quantization=field, hidden_size=64, intermediate_size=96)
    message = refusal(LlamaConfig.from_dict, raw, kind=ConfigError)
    assert f"quantization.{DOWN}.group_size is 128" in message and "[64, 96]" in message


# Tensors that do not fit the settings


CODES, SCALES, BIASES = (f"{QUERY}.{part}" for part in ("weight", "scales", "biases"))
ELSEWHERE = "model.layers.9.mlp.up_proj.scales"
GROUPS = "4 bits, groups of 64"
BAD_TENSORS = {
    "no scales": (drop(SCALES), [SCALES, "[128, 2]", "missing"]),
    "no biases": (drop(BIASES), [BIASES, "[128, 2]", "missing"]),
    "no codes": (drop(CODES), [CODES, "[128, 16]", "missing"]),
    "other scales": (put_zeros(SCALES, "F16", 128, 4), [SCALES, "[128, 4]", "[128, 2]", GROUPS]),
    "other biases": (put_zeros(BIASES, "F16", 128, 1), [BIASES, "[128, 1]", "[128, 2]"]),
    "other bits": (put_zeros(CODES, "U32", 128, 32), [CODES, "[128, 32]", "[128, 16]", "4 bits"]),
    "other rows": (put_zeros(CODES, "U32", 64, 16), [CODES, "[64, 16]", "[128, 16]"]),
    "codes unpacked": (put_zeros(CODES, "F16", 128, 128), [CODES, "[128, 128]", "[128, 16]"]),
    "codes as floats": (put_zeros(CODES, "F32", 128, 16), [CODES, "F32", "U32"]),
    "codes as signed": (put_zeros(CODES, "I32", 128, 16), [CODES, "I32", "U32"]),
    "scales as bytes": (put_zeros(SCALES, "U8", 128, 2), [SCALES, "U8", "F32, F16 or BF16"]),
    "scales in double": (put_zeros(SCALES, "F64", 128, 2), [BIASES, "F16", "F32"]),
    "biases of another dtype": (put_zeros(BIASES, "BF16", 128, 2), [BIASES, "BF16", "F16"]),
    "scales of nothing": (put_zeros(ELSEWHERE, "F16", 128, 2), [ELSEWHERE, "not part"]),
    "of a norm": (put_zeros("model.norm.scales", "F16", 2), ["model.norm.scales", "not part"]),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_named(case, tmp_path):
    change, words = BAD_TENSORS[case]
    folder = make_quantised(tmp_path / "m", GOOD, change=change)
    refusal(open_checkpoint, folder, words=[str(folder), *words])


WITHOUT = {"quantization": None, "quantization_config": None}
NARROW = {"hidden_size": 64, "intermediate_size": 96}


def write_narrow(tensors):
    put_zeros(DOWN + ".weight", "U32", 64, 12)(tensors)
    put_zeros(DOWN + ".scales", "F16", 64, 1)(tensors)


@pytest.mark.parametrize(
    "how, words",
    [
        (
            {"config": WITHOUT | {"quantization": GOOD | {QUERY: False}}},
            [QUERY + ".scales", "quantization says so"],
        ),
        (
            {"unlisted": False, "change": write_narrow} | NARROW,
            ["group_size is 64", DOWN, "[64, 96]"],
        ),
        ({"unlisted": False}, ["quantization", "no matrix has scales"]),
        ({"config": WITHOUT}, [".scales", "not part of the model", "no field quantization"]),
    ],
    ids=["left as it is", "rows that groups do not divide", "no scales", "no settings"],
)
def test_settings_that_do_not_fit_the_tensors(how, words, tmp_path):
    refusal(open_checkpoint, make_quantised(tmp_path / "m", GOOD, **how), words=words)
