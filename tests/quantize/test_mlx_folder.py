"""Writing folders with low-bit weights: mx.quantize's bits, mlx_lm.convert's files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from making import SENTENCES, edit_json, make_checkpoint
from making_gguf import make_gguf

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import pack_stream
from mlx_llama.core.models.quantization import FLOAT_MODES
from mlx_llama.quantize import mlx_folder as quantize
from mlx_llama.quantize.mlx_folder import floating_point, write_mlx

SCHEMES = [(bits, group) for bits in quantize.BITS for group in quantize.GROUP_SIZES]


# float32 [7, 256]: ordinary groups, and those where a formula may divide by zero or round the other
# way
X = np.random.default_rng(5).standard_normal((7, 256)).astype(np.float32)
GROUPS = {
    "normal": X,
    "constant": np.repeat(X[:, :1], 256, 1),
    "positive": np.abs(X),
    "negative": -np.abs(X),
    "zero": X * 0,
    "tiny": X * np.float32(1e-7),
    "huge": X * np.float32(1e4),
    "one outlier": X * np.float32(1e-3) + 100 * np.eye(7, 256, dtype=np.float32),
    "steps": np.round(X * 4) / 4,
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", GROUPS)
def test_codes_scales_and_biases_are_those_of_mx_quantize(kind, dtype):
    mx = pytest.importorskip("mlx.core", reason="the judge is mx.quantize")
    with mx.stream(mx.cpu):
        weights = mx.array(GROUPS[kind]).astype(getattr(mx, dtype))
        mine = np.array(weights.astype(mx.float32))
        for bits, group in SCHEMES:
            packed, scales, biases = mx.quantize(weights, group, bits)
            codes, *scaling = quantize.affine(mine, bits, group)
            assert np.array_equal(pack_stream(codes, bits), np.array(packed)), (bits, group)
            for values, wanted in zip(scaling, (scales, biases)):
                assert mx.array_equal(mx.array(values).astype(wanted.dtype), wanted), (bits, group)


MODELS = {
    "float32": dict(dtype="float32"),
    "bfloat16, tied": dict(dtype="bfloat16", tie_word_embeddings=True),
    "float16, biases": dict(dtype="float16", attention_bias=True, mlp_bias=True),
    "another width asked for": dict(dtype="float32", torch_dtype="bfloat16"),
}


@pytest.mark.parametrize("mode", FLOAT_MODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floating_point_codes_are_those_of_mx_quantize(mode, dtype):
    """Also ties, and magnitudes that float16 holds as subnormal numbers."""
    mx = pytest.importorskip("mlx.core", reason="the judge is mx.quantize")
    rng = np.random.default_rng(3)
    values = rng.standard_normal((500, 256), np.float32)
    values *= rng.choice(np.array([1e-3, 0.05, 1, 30], np.float32), (500, 1))
    ties = rng.choice([0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, -3.5, 5, 6], (2, 256))
    values = np.concatenate([values, ties, *GROUPS.values()]).astype(np.float32)
    with mx.stream(mx.cpu):
        array = mx.array(values).astype(getattr(mx, dtype))
        packed, scales = (np.array(part) for part in mx.quantize(array, mode=mode)[:2])
        values = np.array(array.astype(mx.float32))
    codes, ours = floating_point(values, mode, dtype)
    np.testing.assert_array_equal(ours, scales)
    np.testing.assert_array_equal(pack_stream(codes, FLOAT_MODES[mode][0]), packed)


@pytest.mark.slow_for("*-mxfp8", "*-nvfp4")
@pytest.mark.parametrize(
    "bits, group, mode",
    [
        *((*packing, "affine") for packing in ((4, 64), (3, 32), (8, 32), (6, 64))),
        *((*packing, mode) for mode, packing in FLOAT_MODES.items()),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_folder_is_mlx_lms(model, bits, group, mode, tmp_path):
    """The same arrays, bit for bit, and the same config as mlx_lm.convert; mlx_lm opens both."""
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx_lm")
    import mlx_lm

    fields = dict(MODELS[model])
    torch_dtype = fields.pop("torch_dtype", None)
    source = make_checkpoint(tmp_path / "in", tokenizer="llama2", **fields)
    if torch_dtype:
        edit_json(source / "config.json", torch_dtype=torch_dtype)
    how = dict(quantize=True, q_bits=bits, q_group_size=group, q_mode=mode)
    mlx_lm.convert(str(source), str(tmp_path / "judge"), **how)
    written = write_mlx(open_checkpoint(source), tmp_path / "out", bits, group, mode)

    mine, judge = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("out", "judge"))
    assert set(mine) == set(judge)
    for name, wanted in judge.items():
        assert mine[name].dtype == wanted.dtype and mx.array_equal(mine[name], wanted), name
    for file in ("config.json", "model.safetensors.index.json"):
        mine, judge = (
            json.loads((tmp_path / name / file).read_text()) for name in ("out", "judge")
        )
        assert mine == judge
    assert written.nbytes == judge["metadata"]["total_size"]
    assert all("rows of 96" in notice for notice in written.notices)
    assert len(written.notices) == (group == 64)

    llama, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    assert mlx_lm.generate(llama, tokenizer, "Once upon", max_tokens=3) is not None


def test_tokenizer_and_settings_come_along(toy, tmp_path):
    (toy / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    write_mlx(open_checkpoint(toy), tmp_path / "out", 4, 32)
    opened = open_checkpoint(tmp_path / "out")
    (toy / "generation_config.json").unlink()
    assert opened.generation_config == {"temperature": 0.5, "do_sample": True}
    assert opened.template.source == open_checkpoint(toy).template.source
    ids = open_checkpoint(toy).tokenizer.encode(SENTENCES[0])
    assert opened.tokenizer.encode(SENTENCES[0]) == ids


def test_large_models_are_sharded(toy, tmp_path, monkeypatch):
    write_mlx(open_checkpoint(toy), tmp_path / "whole", 4, 32)
    monkeypatch.setattr(quantize, "SHARD_BYTES", 20_000)
    write_mlx(open_checkpoint(toy), tmp_path / "out", 4, 32)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) >= 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 25_000 for file in files)
    whole, parts = (open_checkpoint(tmp_path / name).tensors for name in ("whole", "out"))
    assert all(np.array_equal(whole[name].float32(), parts[name].float32()) for name in whole)


def test_a_quantised_model_is_quantised_anew_and_that_is_said(toy, tmp_path):
    write_mlx(open_checkpoint(toy), tmp_path / "8", 8, 32)
    written = write_mlx(open_checkpoint(tmp_path / "8"), tmp_path / "4", 4, 32)
    assert "quantised already (affine 8-bit, groups of 32)" in written.notices[0]
    config = json.loads((tmp_path / "4" / "config.json").read_text())
    wanted = {"bits": 4, "group_size": 32, "mode": "affine"}
    assert config["quantization"] == config["quantization_config"] == wanted
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scales, biases = quantize.affine(
        open_checkpoint(tmp_path / "8").tensors[name].float32(), 4, 32
    )
    rows = open_checkpoint(tmp_path / "4").tensors[name].rows(0, 96)
    assert np.array_equal(rows.codes, codes) and np.array_equal(rows.scales, scales)


def test_groups_that_divide_nothing(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    said = "`group_size` 128: does not divide the rows of any matrix"
    with pytest.raises(OptionsError, match=said):
        write_mlx(open_checkpoint(source), tmp_path / "out", 4, 128)


@pytest.mark.parametrize(
    "kind, bits", [("Q4_0", 4), ("Q4_1", 4), ("Q5_0", 5), ("Q5_1", 5), ("Q8_0", 8), ("IQ4_NL", 8)]
)
def test_a_gguf_source_of_the_same_bits_is_kept_exactly(kind, bits, tmp_path):
    judge = make_gguf(tmp_path / "in.gguf", kinds=kind)
    checkpoint = open_checkpoint(tmp_path / "in.gguf")
    notices = write_mlx(checkpoint, tmp_path / "out", bits, 32).notices
    assert not any("quantised already" in notice for notice in notices)
    after = open_checkpoint(tmp_path / "out").tensors
    for name, tensor in after.items():
        if len(tensor.shape) == 2:
            np.testing.assert_allclose(
                tensor.float32(), judge[name], rtol=1e-6, atol=1e-7, err_msg=name
            )
    other = write_mlx(checkpoint, tmp_path / "other", bits, 64).notices
    assert any(f"quantised already ({kind})" in notice for notice in other)


@pytest.mark.parametrize("keep", [False, True])
def test_mxfp4_is_kept_exactly(keep, tmp_path):
    """From GGUF, where other matrices are affine, and again from the folder."""
    kinds = lambda name: "MXFP4" if ".mlp." in name else "Q8_0"  # noqa: E731
    judge = make_gguf(tmp_path / "in.gguf", kinds=kinds)
    checkpoint = open_checkpoint(tmp_path / "in.gguf")
    write_mlx(checkpoint, tmp_path / "out", 4, 32, "mxfp4", keep=keep)
    write_mlx(open_checkpoint(tmp_path / "out"), tmp_path / "again", 4, 32, "mxfp4")
    for folder in ("out", "again"):
        opened = open_checkpoint(tmp_path / folder).tensors
        for name, tensor in opened.items():
            if ".mlp." in name:
                assert tensor.format == "mxfp4"
                np.testing.assert_array_equal(tensor.float32(), judge[name])
        query = opened["model.layers.0.self_attn.q_proj.weight"].format
        assert query == ("affine" if keep and folder == "out" else "mxfp4")


def test_an_affine_source_of_the_same_bits_is_copied(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    for out, start in (("one", source), ("two", tmp_path / "one")):
        write_mlx(open_checkpoint(start), tmp_path / out, 4, 32)
    first, two = (open_checkpoint(tmp_path / out).tensors for out in ("one", "two"))
    assert all(np.array_equal(first[name].float32(), two[name].float32()) for name in first)
