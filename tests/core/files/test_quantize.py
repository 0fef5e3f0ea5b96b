"""Writing low-bit models: mx.quantize's bits, mlx_lm.convert's folders, files that gguf's own reader understands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from making import SENTENCES, encode_tensor, make_checkpoint, random_tensors, write_safetensors

from mlx_llama.core.errors import CheckpointError, ConfigError, OptionsError, TokenizerError
from mlx_llama.core.files import quantize
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.gguf_export import write_gguf
from mlx_llama.core.files.quantize import write_mlx
from mlx_llama.core.files.quantized import pack_stream
from mlx_llama.core.system import progress

SCHEMES = [(bits, group) for bits in quantize.BITS for group in quantize.GROUP_SIZES]


def groups(kind: str) -> np.ndarray:
    """float32 [7, 256]: ordinary groups, and those where a formula may divide by zero or round the other way."""
    x = np.random.default_rng(5).standard_normal((7, 256)).astype(np.float32)
    return {"normal": x, "constant": np.repeat(x[:, :1], 256, 1), "positive": np.abs(x), "negative": -np.abs(x),
            "zero": x * 0, "tiny": x * np.float32(1e-7), "huge": x * np.float32(1e4),
            "one outlier": x * np.float32(1e-3) + 100 * np.eye(7, 256, dtype=np.float32),
            "steps": np.round(x * 4) / 4}[kind]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["normal", "constant", "positive", "negative", "zero", "tiny", "huge", "one outlier",
                                  "steps"])
def test_codes_scales_and_biases_are_those_of_mx_quantize(kind, dtype):
    mx = pytest.importorskip("mlx.core", reason="the judge is mx.quantize")
    with mx.stream(mx.cpu):
        weights = mx.array(groups(kind)).astype(getattr(mx, dtype))
        mine = np.array(weights.astype(mx.float32))
        for bits, group in SCHEMES:
            packed, scales, biases = mx.quantize(weights, group, bits)
            codes, *scaling = quantize.affine(mine, bits, group)
            assert np.array_equal(pack_stream(codes, bits), np.array(packed)), (bits, group)
            for values, wanted in zip(scaling, (scales, biases)):
                assert mx.array_equal(mx.array(values).astype(wanted.dtype), wanted), (bits, group)


def test_rounding_to_16_bits_is_torchs():
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(1).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = np.concatenate([bits[np.isfinite(bits) & (np.abs(bits) < 3e38)], [0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]])
    values = values.astype(np.float32)
    for dtype in ("float16", "bfloat16"):
        wanted = torch.tensor(values).to(getattr(torch, dtype))
        assert np.array_equal(quantize.encode(values, dtype).view(np.int16), wanted.view(torch.int16).numpy())
        finite = torch.isfinite(wanted).numpy()
        assert np.array_equal(quantize.decode(quantize.encode(values, dtype))[finite], wanted.float().numpy()[finite])


MODELS = {
    "float32": dict(dtype="float32"),
    "bfloat16, tied": dict(dtype="bfloat16", tie_word_embeddings=True),
    "float16, biases": dict(dtype="float16", attention_bias=True, mlp_bias=True),
    "another width asked for": dict(dtype="float32", torch_dtype="bfloat16"),
}


@pytest.mark.parametrize("bits, group", [(4, 64), (3, 32), (8, 32), (6, 64)])
@pytest.mark.parametrize("model", MODELS)
def test_the_folder_is_mlx_lms(model, bits, group, tmp_path):
    """The same arrays, bit for bit, and the same config as mlx_lm.convert; mlx_lm opens both."""
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx_lm")
    import mlx_lm

    fields = dict(MODELS[model])
    torch_dtype = fields.pop("torch_dtype", None)
    source = make_checkpoint(tmp_path / "in", tokenizer="llama2", **fields)
    if torch_dtype:
        edit_config(source, torch_dtype=torch_dtype)
    mlx_lm.convert(str(source), str(tmp_path / "judge"), quantize=True, q_bits=bits, q_group_size=group)
    written = write_mlx(open_checkpoint(source), tmp_path / "out", bits, group)

    mine, judge = (mx.load(str(tmp_path / name / "model.safetensors")) for name in ("out", "judge"))
    assert set(mine) == set(judge)
    for name, wanted in judge.items():
        assert mine[name].dtype == wanted.dtype and mx.array_equal(mine[name], wanted), name
    mine, judge = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "judge"))
    assert mine == judge
    index = "model.safetensors.index.json"
    mine, judge = (json.loads((tmp_path / name / index).read_text()) for name in ("out", "judge"))
    assert mine == judge and written.nbytes == judge["metadata"]["total_size"]
    assert all("rows of 96" in notice for notice in written.notices) and len(written.notices) == (group == 64)

    llama, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    assert mlx_lm.generate(llama, tokenizer, "Once upon", max_tokens=3) is not None


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("bits, group", SCHEMES)
def test_what_is_written_is_read_as_mlx_reads_it(bits, group, tmp_path):
    mx = pytest.importorskip("mlx.core", reason="the judge is mx.dequantize")
    source = make_checkpoint(tmp_path / "in", dtype="float32", hidden_size=128, intermediate_size=256)
    write_mlx(open_checkpoint(source), tmp_path / "out", bits, group)
    before, after = open_checkpoint(source).tensors, open_checkpoint(tmp_path / "out").tensors
    assert set(before) == set(after)
    for name, tensor in before.items():
        if len(tensor.shape) == 1:
            assert np.array_equal(tensor.bits, after[name].bits)
            continue
        assert (after[name].bits, after[name].group_size) == (bits, group)
        with mx.stream(mx.cpu):
            wanted = mx.dequantize(*mx.quantize(mx.array(tensor.float32()), group, bits), group, bits)
            assert np.array_equal(after[name].float32(), np.array(wanted)), name


def test_tokenizer_and_settings_come_along(toy, tmp_path):
    (toy / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    write_mlx(open_checkpoint(toy), tmp_path / "out", 4, 32)
    opened = open_checkpoint(tmp_path / "out")
    (toy / "generation_config.json").unlink()
    assert opened.generation_config == {"temperature": 0.5, "do_sample": True}
    assert opened.template.source == open_checkpoint(toy).template.source
    assert opened.tokenizer.encode(SENTENCES[0]) == open_checkpoint(toy).tokenizer.encode(SENTENCES[0])


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
    assert config["quantization"] == config["quantization_config"] == {"bits": 4, "group_size": 32, "mode": "affine"}
    name = "model.layers.0.mlp.up_proj.weight"
    codes, scales, biases = quantize.affine(open_checkpoint(tmp_path / "8").tensors[name].float32(), 4, 32)
    rows = open_checkpoint(tmp_path / "4").tensors[name].rows(0, 96)
    assert np.array_equal(rows.codes, codes) and np.array_equal(rows.scales, scales)


# GGUF


def gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    """{name: float32} through gguf's own reader and dequantiser, rows in the file's order."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    return {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}


def gguf_fields(path: Path) -> dict:
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(path).fields.items() if field.data}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp, conversion/llama.py, LlamaModel.permute."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("format, kinds", [("Q8_0", {"Q8_0", "F32"}), ("Q4_0", {"Q4_0", "Q8_0", "F32"})])
@pytest.mark.parametrize("fields", [dict(), dict(tie_word_embeddings=True, dtype="bfloat16"),
                                    dict(attention_bias=True, mlp_bias=True, head_dim=32, num_key_value_heads=1)])
def test_ggufs_own_reader_finds_every_tensor(format, kinds, fields, tmp_path):
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import dequantize, quantize

    source = make_checkpoint(tmp_path / "in", **fields)
    checkpoint = open_checkpoint(source)
    write_gguf(checkpoint, tmp_path / "out.gguf", format)
    found = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out.gguf").tensors}
    assert {tensor.tensor_type.name for tensor in found.values()} == kinds
    names = {"embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "model.layers.": "blk.",
             "model.": "", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
             "self_attn.o_": "attn_output_", "self_attn.": "attn_", "mlp.": "ffn_", "_proj": ""}
    assert len(found) == len(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        values, mapped = tensor.float32(), name
        for theirs, gguf_part in names.items():
            mapped = mapped.replace(theirs, gguf_part)
        for part, heads in (("q_proj", 4), ("k_proj", checkpoint.config.num_key_value_heads)):
            values = permuted(values, heads) if part in name else values
        kind = found[mapped].tensor_type
        assert kind == GGMLQuantizationType.F32 if values.ndim == 1 else kind != GGMLQuantizationType.F32
        wanted = dequantize(quantize(values, kind), kind)
        assert np.array_equal(dequantize(found[mapped].data, kind), wanted), name


def test_our_own_reader_gives_the_same_model(tmp_path):
    """Config, rows in Hugging Face order, tokenizer, template, end tokens."""
    source = make_checkpoint(tmp_path / "in", dtype="float16", rms_norm_eps=2.0**-17, eos_token_id=[2, 7])
    before = open_checkpoint(source)
    write_gguf(before, tmp_path / "out.gguf", "Q8_0")
    after = open_checkpoint(tmp_path / "out.gguf")
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                  "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "rope",
                  "attention_bias", "tie_word_embeddings"):
        assert getattr(after.config, field) == getattr(before.config, field), field
    assert set(after.tensors) == set(before.tensors)
    for name, tensor in before.tensors.items():
        values, found = tensor.float32(), after.tensors[name].float32()
        groups = np.abs(values).reshape(len(values), -1, 32 if values.ndim == 2 else 1).max(-1, keepdims=True)
        error = np.abs(found - values).reshape(*groups.shape[:2], -1)
        assert (error <= groups / 127 * 0.51 + groups * 2**-11).all(), name  # half a step, and the scale as float16
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id
    assert after.template.source == before.template.source


ROPES = {
    "default": dict(rope_theta=500000.0),
    "linear": dict(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama3": dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64}),
    "yarn": dict(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "yarn, attention factor": dict(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25,
                                                 "original_max_position_embeddings": 64}),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_survives(name, tmp_path):
    from mlx_llama.core.models.rope import inverse_frequencies

    source = make_checkpoint(tmp_path / "in", head_dim=64, **ROPES[name])
    before = open_checkpoint(source)
    write_gguf(before, tmp_path / "out.gguf")
    (wanted, factor), (found, again) = (inverse_frequencies(one.config)
                                        for one in (before, open_checkpoint(tmp_path / "out.gguf")))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert again == pytest.approx(factor, rel=1e-6)


def test_llama3_factors_are_those_of_transformers(tmp_path):
    """rope_freqs.weight divides the plain frequencies, and gives transformers' own (modeling_rope_utils.py)."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils", reason="the judge is transformers")
    from transformers import LlamaConfig

    source = make_checkpoint(tmp_path / "in", head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    factors = gguf_tensors(tmp_path / "out.gguf")["rope_freqs.weight"]
    config = LlamaConfig.from_pretrained(source)
    wanted, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(plain / factors, wanted.numpy(), rtol=1e-6)
    assert factors.min() == 1 and factors.max() == 8 and ((1 < factors) & (factors < 8)).any()


@pytest.mark.parametrize("fields, message", [
    (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope type dynamic"),
    (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "original_max_position_embeddings": 64}),
     "beta_fast 16"),
])
def test_a_rope_that_gguf_cannot_express(fields, message, tmp_path):
    source = make_checkpoint(tmp_path / "in", **fields)
    with pytest.raises(ConfigError, match=message):
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_a_window_is_written_and_named(tmp_path):
    source = make_checkpoint(tmp_path / "in", architectures=["MistralForCausalLM"], sliding_window=100)
    written = write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert gguf_fields(tmp_path / "out.gguf")["llama.attention.sliding_window"] == 100
    assert "looks back 100 tokens" in written.notices[0]


def test_rows_that_blocks_do_not_divide_stay_float16(tmp_path):
    source = make_checkpoint(tmp_path / "in", hidden_size=48, head_dim=16)
    written = write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert any("kept at float16" in notice and "rows of 48" in notice for notice in written.notices)
    wanted = open_checkpoint(source).tensors["model.layers.1.mlp.up_proj.weight"].float32().astype(np.float16)
    assert np.array_equal(gguf_tensors(tmp_path / "out.gguf")["blk.1.ffn_up.weight"], wanted)


# GGUF files as the source


@pytest.fixture(scope="module", params=["sentencepiece", "bytelevel"])
def gguf_source(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    source = make_checkpoint(folder / "in", tokenizer=request.param, head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), folder / "in.gguf")
    return folder / "in.gguf"


def test_a_gguf_file_becomes_a_folder(gguf_source, tmp_path):
    """One that our reader, transformers' tokenizers and mlx_lm read as the same model."""
    from transformers import AutoTokenizer

    before = open_checkpoint(gguf_source)
    written = write_mlx(before, tmp_path / "out", 8, 32)
    assert "quantised already (Q8_0)" in written.notices[0]
    after = open_checkpoint(tmp_path / "out")
    assert after.config.rope.type == "llama3" and after.config.rope.original_max_position_embeddings == 64
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in [*SENTENCES, "a\n\n b  c ", "Ünïcödé 🦙 12345"]:
        ids = before.tokenizer.encode(text, add_bos=True)
        assert after.tokenizer.encode(text, add_bos=True) == ids == theirs(text)["input_ids"], text
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id
    assert after.template.source == before.template.source
    for name, tensor in before.tensors.items():
        if len(tensor.shape) == 2:
            assert after.tensors[name].bits == 8 and after.tensors[name].scale_dtype == "float16"
            weights = tensor.float32()
            assert np.abs(after.tensors[name].float32() - weights).max() < np.abs(weights).max() / 100
    # and back
    write_gguf(after, tmp_path / "again.gguf")
    first, again = gguf_fields(gguf_source), gguf_fields(tmp_path / "again.gguf")
    assert {name for name in first | again if first.get(name) != again.get(name)} <= {"general.name"}


def test_mlx_lm_opens_what_came_from_a_gguf_file(gguf_source, tmp_path):
    mx = pytest.importorskip("mlx.core", reason="the judge is mlx_lm")
    import mlx_lm

    write_mlx(open_checkpoint(gguf_source), tmp_path / "out", 8, 32)
    llama, _ = mlx_lm.load(str(tmp_path / "out"))
    tokens = list(range(10, 30))
    with mx.stream(mx.cpu):
        theirs = np.array(llama(mx.array([tokens])).astype(mx.float32))[0]
    from mlx_llama import load

    ours = load(gguf_source, backend="cpu", dtype="float32").logits(tokens)
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9995  # two quantisations of 8 bits apart


def test_a_gguf_file_becomes_another(gguf_source, tmp_path):
    write_gguf(open_checkpoint(gguf_source), tmp_path / "out.gguf", "Q4_0")
    before, after = gguf_fields(gguf_source), gguf_fields(tmp_path / "out.gguf")
    assert {name for name in before | after if before.get(name) != after.get(name)} == {"general.file_type"}
    before, after = open_checkpoint(gguf_source), open_checkpoint(tmp_path / "out.gguf")
    assert before.config == after.config and before.eos_token_ids == after.eos_token_ids
    assert after.tensors["model.layers.0.mlp.up_proj.weight"].format == "Q4_0"


def test_factors_that_config_json_cannot_express(tmp_path):
    from gguf import GGUFReader

    source = make_checkpoint(tmp_path / "in", head_dim=64, **ROPES["llama3"])
    write_gguf(open_checkpoint(source), tmp_path / "in.gguf")
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "in.gguf", "r+").tensors}
    tensors["rope_freqs.weight"][:] = np.linspace(1, 3, 32)
    with pytest.raises(ConfigError, match="rope_freqs.weight holds factors that are not Llama 3's"):
        write_mlx(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out", 4, 32)
    written = write_gguf(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out.gguf")
    assert np.array_equal(gguf_tensors(written.path)["rope_freqs.weight"], np.linspace(1, 3, 32).astype(np.float32))


# vocabularies


def texts(kind: str) -> list[str]:
    """A tokenizer.json of Llama 2's kind puts no space before a text that begins with one: none of these for it."""
    spaced = [" ", "  two"] if kind != "llama2" else []
    return [*SENTENCES, "a\n\n b  c ", "Ünïcödé 🦙 12345", "I'm he'll", *spaced]


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2", "bytelevel"])
def test_the_tokenizer_gives_the_same_ids(kind, tmp_path):
    source = make_checkpoint(tmp_path / "in", tokenizer=kind, vocab_size=400)
    written = write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    before, after = (open_checkpoint(path).tokenizer for path in (source, tmp_path / "out.gguf"))
    for text in ["", *texts(kind)]:
        assert after.encode(text, add_bos=True) == before.encode(text, add_bos=True), text
        assert after.decode(before.encode(text)) == before.decode(before.encode(text)), text
    assert after.bos_id == before.bos_id
    assert set(after.eos_ids) == {*before.eos_ids, *open_checkpoint(source).config.eos_token_ids}
    said = " ".join(written.notices)
    assert ("after special tokens or before a text that begins with one" in said) == (kind != "bytelevel")


def test_a_tokenizer_that_puts_no_space_before_a_text(guide_q8):
    before, after = (open_checkpoint(path).tokenizer for path in (None, guide_q8))
    for text in ("Hello", " Hello", "  two", *SENTENCES):
        for special in (False, True):
            assert after.encode(text, parse_special=special) == before.encode(text, parse_special=special), text
    assert after.encode("<|end|>a", parse_special=True) == before.encode("<|end|>a", parse_special=True)


def test_a_padded_embedding_is_padded_in_the_vocabulary(tmp_path):
    source = make_checkpoint(tmp_path / "in", vocab_size=400)
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    fields = gguf_fields(tmp_path / "out.gguf")
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.scores"]) == 400
    assert fields["tokenizer.ggml.tokens"][399] == "[PAD399]" and fields["tokenizer.ggml.token_type"][399] == 5


def test_scores_out_of_merges_put_tokens_in_sentencepieces_order(tmp_path):
    import sentencepiece
    from making import sentencepiece_model

    source = make_checkpoint(tmp_path / "in", tokenizer="llama2")
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    fields = gguf_fields(tmp_path / "out.gguf")
    sp = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    merged = [one for one in range(384) if len(sp.id_to_piece(one)) > 1
              and not (sp.is_byte(one) or sp.is_control(one) or sp.is_unknown(one))]
    assert len(merged) > 20
    scores = fields["tokenizer.ggml.scores"]
    assert sorted(merged, key=sp.get_score) == sorted(merged, key=lambda one: scores[one])


@pytest.mark.parametrize("split, ignore_merges, name", [
    ("llama", True, "llama-bpe"), ("llama", False, "smaug-bpe"), ("digits", False, "smollm"), ("gpt2", False, "gpt-2"),
    ("qwen", False, "qwen2"), ("llama, as written from a GGUF file", True, "llama-bpe"),
])
def test_how_text_is_split_gets_llama_cpps_name(split, ignore_merges, name, tmp_path):
    def change(raw):
        raw["model"]["ignore_merges"] = ignore_merges
        plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        if split in ("digits", "gpt2"):
            raw["pre_tokenizer"] = plain if split == "gpt2" else {
                "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, plain]}
        elif split != "llama":
            pattern = raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]
            before, after = (r"\p{N}{1,3}", r"\p{N}") if split == "qwen" else (
                "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")
            assert before in pattern["Regex"]
            pattern["Regex"] = pattern["Regex"].replace(before, after)

    source = edited_tokenizer(tmp_path / "in", "bytelevel", change)
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert gguf_fields(tmp_path / "out.gguf")["tokenizer.ggml.pre"] == name


def edited_tokenizer(folder: Path, kind: str, change) -> Path:
    make_checkpoint(folder, tokenizer=kind)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), "utf-8")
    return folder


def several_ways(raw) -> int:
    """Where the first merge stands whose token the next one makes too."""
    made = ["".join(pair) for pair in raw["model"]["merges"]]
    return next(i for i in range(len(made)) if made[i] == made[i + 1])


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(raw):
        for key in path:
            raw = raw[key]
        raw[last] = value

    return change


@pytest.mark.parametrize("kind, change, message", [
    ("bytelevel", set_in("normalizer", {"type": "NFC"}), "normalizer"),
    ("bytelevel", set_in("pre_tokenizer", "pretokenizers", 0, "pattern", {"Regex": r"\w+"}), "pre_tokenizer"),
    ("bytelevel", set_in("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", True), "pre_tokenizer"),
    ("llama2", lambda raw: raw["model"]["merges"].pop(), "not all there"),
    ("llama2", lambda raw: raw["model"]["merges"].append(raw["model"]["merges"].pop(several_ways(raw))), "one after"),
])
def test_a_tokenizer_that_gguf_cannot_express(kind, change, message, tmp_path):
    source = edited_tokenizer(tmp_path / "in", kind, change)
    with pytest.raises(TokenizerError, match=message) as error:
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("settings, message", [
    (dict(model_type="unigram", vocab_size=400), "type 1"),
    (dict(model_type="bpe", vocab_size=384, normalization_rule_name="nmt_nfkc"), "changes characters"),
    (dict(model_type="bpe", vocab_size=384, remove_extra_whitespaces=True), "removes extra spaces"),
])
def test_a_sentencepiece_model_that_llama_cpp_reads_otherwise(settings, message, tmp_path):
    import io

    import sentencepiece

    out = io.BytesIO()
    options = dict(normalization_rule_name="identity", remove_extra_whitespaces=False, byte_fallback=True,
                   hard_vocab_limit=False, minloglevel=2, num_threads=1) | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES), model_writer=out, **options)
    source = make_checkpoint(tmp_path / "in", vocab_size=512)
    (source / "tokenizer.model").write_bytes(out.getvalue())
    with pytest.raises(TokenizerError, match=message):
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")


# llama.cpp itself


def llama_cpp_model(path: Path):
    llama_cpp = pytest.importorskip("llama_cpp", reason='llama.cpp is the judge here: pip install -e ".[peers]"')
    return llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
                           type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32, flash_attn=False)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("fields", [dict(), dict(tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1),
                                    dict(mlp_bias=True, head_dim=32, hidden_size=48, num_attention_heads=6),
                                    *(dict(head_dim=64, **one) for one in ROPES.values())], ids=str)
def test_llama_cpp_computes_the_same_logits(format, fields, tmp_path):
    """Up to what rounding activations to 8 bits costs there."""
    from mlx_llama import load

    write_gguf(open_checkpoint(make_checkpoint(tmp_path / "in", **fields)), tmp_path / "out.gguf", format)
    theirs = llama_cpp_model(tmp_path / "out.gguf")
    tokens = np.random.default_rng(3).integers(3, 384, 100).tolist()
    theirs.eval(tokens)
    ours = load(tmp_path / "out.gguf", backend="cpu", dtype="float32").logits(tokens)
    distance = lambda mine: np.sqrt(((mine - theirs.scores[:100]) ** 2).mean() / (mine**2).mean())  # noqa: E731
    assert distance(ours) < 0.03
    # the file may be wrong for both readers: it must also be near the model that it was made from
    exact = load(tmp_path / "in", backend="cpu", dtype="float32").logits(tokens)
    assert distance(exact) < (0.03 if format == "Q8_0" else 0.3)


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2", "bytelevel"])
def test_llama_cpp_gives_the_same_ids(kind, tmp_path):
    source = make_checkpoint(tmp_path / "in", tokenizer=kind, vocab_size=400)
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    theirs, ours = llama_cpp_model(tmp_path / "out.gguf"), open_checkpoint(source).tokenizer
    for text in texts(kind):
        assert theirs.tokenize(text.encode(), add_bos=True, special=False) == ours.encode(text, add_bos=True), text
    assert {theirs.token_eos(), theirs.token_bos()} <= {ours.bos_id, *ours.eos_ids}


def test_llama_cpp_answers_as_the_guide(guide_q8):
    """Through its own template engine, tokenizer, sampler and stop condition."""
    from mlx_llama import load

    messages = [{"role": "user", "content": "Who are you?"}]
    done = llama_cpp_model(guide_q8).create_chat_completion(messages, temperature=0, max_tokens=60)
    assert done["choices"][0]["message"]["content"].strip() == load(guide_q8, backend="cpu").generate(
        messages, max_tokens=60).text.strip()
    assert done["choices"][0]["finish_reason"] == "stop"


# what goes wrong


def both(checkpoint, folder: Path):
    """The two forms, as (what writes, where to)."""
    return ((lambda: write_mlx(checkpoint, folder / "out", 4, 32), folder / "out"),
            (lambda: write_gguf(checkpoint, folder / "out.gguf"), folder / "out.gguf"))


def test_what_is_there_is_never_overwritten(toy, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    (tmp_path / "out.gguf").write_text("precious")
    for write, out in both(open_checkpoint(toy), tmp_path):
        with pytest.raises(CheckpointError, match="is there already"):
            write()
    assert (tmp_path / "out.gguf").read_text() == (tmp_path / "out" / "mine").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_may_be_there(toy, tmp_path):
    (tmp_path / "out").mkdir()
    write_mlx(open_checkpoint(toy), tmp_path / "out", 4, 32)
    assert open_checkpoint(tmp_path / "out").tensors


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_leaves_nothing_behind(value, tmp_path):
    source = make_checkpoint(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = value
    write_safetensors(source / "model.safetensors", {name: encode_tensor(x, "float32") for name, x in tensors.items()})
    for write, out in both(open_checkpoint(source), tmp_path):
        with pytest.raises(CheckpointError, match="model.layers.1.mlp.down_proj.weight holds a value that is not fin"):
            write()
    assert list(tmp_path.iterdir()) == [source]


def test_weights_too_large_for_float16_scales(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    tensors = random_tensors(config)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e7
    write_safetensors(source / "model.safetensors", {name: encode_tensor(x, "float32") for name, x in tensors.items()})
    with pytest.raises(CheckpointError, match="model.layers.0.mlp.up_proj.weight: holds weights too large for Q8_0"):
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    edit_config(source, torch_dtype="float16")
    with pytest.raises(CheckpointError, match="not finite at float16"):
        write_mlx(open_checkpoint(source), tmp_path / "out", 4, 32)


def test_an_interruption_leaves_nothing_behind(toy, tmp_path):
    def interrupt(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    for write, out in both(open_checkpoint(toy), tmp_path):
        with progress.reported(interrupt), pytest.raises(KeyboardInterrupt):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_said_before_anything_is_written(toy, tmp_path, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    for write, out in both(open_checkpoint(toy), tmp_path):
        with pytest.raises(CheckpointError, match="GB and the disk has 0.00 GB free"):
            write()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(toy, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file/out", "file/out.gguf"):
        write = write_gguf if name.endswith("gguf") else write_mlx
        with pytest.raises(CheckpointError, match="cannot be written"):
            write(open_checkpoint(toy), tmp_path / name)


def test_groups_that_divide_nothing(tmp_path):
    source = make_checkpoint(tmp_path / "in")
    with pytest.raises(OptionsError, match="group_size 128: divides the rows of no matrix"):
        write_mlx(open_checkpoint(source), tmp_path / "out", 4, 128)


def test_slabs_change_nothing_and_progress_ends_at_its_total(toy, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(toy)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        for write, out in both(checkpoint, tmp_path / name):
            seen = []
            with progress.reported(lambda done, total: seen.append((done, total))):
                write()
            assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes) and seen == sorted(seen)
            assert len(seen) >= len(checkpoint.tensors) * (1 if name == "whole" else 5)
        monkeypatch.setattr(quantize, "_SLAB", 1000)
    for file in ("out/model.safetensors", "out.gguf"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def test_nobody_watches(toy):
    progress.meter(10)(5)  # nothing to tell, nobody to tell it to


@pytest.mark.parametrize("form", ["mlx", "gguf"])
def test_the_peak_of_memory_is_a_tensor_and_not_the_model(form, tmp_path):
    """A model of 400 MB, whose largest tensors are 16 MB, takes less than 60 MB more than a small one."""
    if not Path("/proc/self/status").exists():
        pytest.skip("only Linux says how much memory a process has had since a given moment")
    fields = dict(hidden_size=1024, intermediate_size=8192, num_attention_heads=8, num_key_value_heads=4)
    source = make_checkpoint(tmp_path / "in", dtype="bfloat16", num_hidden_layers=1, **fields)
    edit_config(source, num_hidden_layers=7)
    from mlx_llama.core.models.config import LlamaConfig

    header, at = {}, 0
    for name, shape in LlamaConfig.from_file(source).tensor_shapes().items():
        nbytes = int(np.prod(shape)) * 2
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with open(source / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # zeros that take no room on the disk
    small = make_checkpoint(tmp_path / "small")
    code = """
import sys
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantize import write_mlx
from mlx_llama.core.files.gguf_export import write_gguf
field = lambda name: int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024
form, small, large, out = sys.argv[1:]
write = (lambda source, out: write_gguf(open_checkpoint(source), out + ".gguf")) if form == "gguf" else (
    lambda source, out: write_mlx(open_checkpoint(source), out, 4, 32))
write(small, out + "1")
before = field("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
write(large, out + "2")
print(field("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code, form, str(small), str(source), str(tmp_path / "out")],
                          capture_output=True, text=True, timeout=300)
    assert at > 370e6 and done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 60e6
