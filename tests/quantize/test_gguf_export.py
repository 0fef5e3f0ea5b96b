"""GGUF files that we write, against gguf's own reader, transformers and llama.cpp."""

from __future__ import annotations

import io
import json
import lzma
import unicodedata
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
from cases.gguf_files import ROPES, YARN, gguf_fields, gguf_tensors
from gguf import GGUFReader, GGUFValueType as T
from gguf.quants import dequantize, quantize
from making import (
    LLAMA3_SPECIALS,
    SENTENCES,
    byte_level_json,
    config_fields,
    make_checkpoint,
    random_tensors,
    sentencepiece_model,
    shared_arithmetic,
)
from making_gguf import llama_cpp_model, make_gguf, permute
from transformers import GemmaTokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from mlx_llama.core.errors import CheckpointError, ConfigError, TokenizerError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.gguf import GGUFFile
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Window
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx


@pytest.mark.parametrize(
    "format, kinds", [("Q8_0", {"Q8_0", "F32"}), ("Q4_0", {"Q4_0", "Q8_0", "F32"})]
)
@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(tie_word_embeddings=True, dtype="bfloat16"),
        dict(attention_bias=True, mlp_bias=True, head_dim=32, num_key_value_heads=1),
    ],
)
def test_ggufs_own_reader_finds_every_tensor(format, kinds, fields, tmp_path):
    source = make_checkpoint(tmp_path / "in", **fields)
    checkpoint = open_checkpoint(source)
    write_gguf(checkpoint, tmp_path / "out.gguf", format)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "out.gguf").tensors}
    assert {tensor.tensor_type.name for tensor in tensors.values()} == kinds
    names = [("embed_tokens", "token_embd"), ("lm_head", "output"), ("model.norm", "output_norm")]
    names += [("model.layers.", "blk."), ("model.", ""), ("input_layernorm", "attn_norm")]
    names += [("post_attention_layernorm", "ffn_norm"), ("self_attn.o_", "attn_output_")]
    names += [("self_attn.", "attn_"), ("mlp.", "ffn_"), ("_proj", "")]
    assert len(tensors) == len(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        values, mapped = tensor.float32(), name
        for theirs, gguf_part in names:
            mapped = mapped.replace(theirs, gguf_part)
        for part, heads in (("q_proj", 4), ("k_proj", checkpoint.config.num_key_value_heads)):
            values = permute(values, heads) if part in name else values
        kind = tensors[mapped].tensor_type
        assert (kind == gguf.GGMLQuantizationType.F32) == (values.ndim == 1)
        wanted = dequantize(quantize(values, kind), kind)
        assert np.array_equal(dequantize(tensors[mapped].data, kind), wanted), name


def test_our_own_reader_gives_the_same_model(tmp_path):
    """Config, rows in Hugging Face order, tokenizer, template, end tokens."""
    source = make_checkpoint(
        tmp_path / "in", dtype="float16", rms_norm_eps=2.0**-17, eos_token_id=[2, 7]
    )
    before = open_checkpoint(source)
    write_gguf(before, tmp_path / "out.gguf", "Q8_0")
    after = open_checkpoint(tmp_path / "out.gguf")
    for field in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim rms_norm_eps max_position_embeddings rope attention_bias "
        "tie_word_embeddings"
    ).split():
        assert getattr(after.config, field) == getattr(before.config, field), field
    assert set(after.tensors) == set(before.tensors)
    for name, tensor in before.tensors.items():
        values, written = tensor.float32(), after.tensors[name].float32()
        width = 32 if values.ndim == 2 else 1
        groups = np.abs(values).reshape(len(values), -1, width).max(-1, keepdims=True)
        error = np.abs(written - values).reshape(*groups.shape[:2], -1)
        # half a step, and the scale as float16
        assert (error <= groups / 127 * 0.51 + groups * 2**-11).all(), name
    assert after.eos_token_ids == before.eos_token_ids and after.bos_token_id == before.bos_token_id
    assert after.template.source == before.template.source


@pytest.mark.parametrize("name", ROPES)
def test_rope_survives(name, tmp_path):
    from mlx_llama.core.models.rope import inverse_frequencies

    source = make_checkpoint(tmp_path / "in", head_dim=64, **ROPES[name])
    before = open_checkpoint(source)
    write_gguf(before, tmp_path / "out.gguf")
    (wanted, factor), (frequencies, again) = (
        inverse_frequencies(checkpoint.config)
        for checkpoint in (before, open_checkpoint(tmp_path / "out.gguf"))
    )
    np.testing.assert_allclose(frequencies, wanted, rtol=1e-6)
    assert again == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("family, dim", [("Llama", 64), ("Glm4", 48)])
def test_llama3_factors_are_those_of_transformers(family, dim, tmp_path):
    """rope_freqs.weight divides the plain frequencies, and gives transformers' own
    (modeling_rope_utils.py).
    """
    from transformers import AutoConfig, modeling_rope_utils as rope_utils

    fields = dict(architectures=[f"{family}ForCausalLM"], model_type=family.lower(), head_dim=64)
    fields |= ROPES["llama3"] | ({"partial_rotary_factor": dim / 64} if dim < 64 else {})
    shapes = LlamaConfig.from_dict(config_fields(**fields)).stored_shapes()
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    source = make_checkpoint(tmp_path / "in", tensors=tensors, **fields)
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf", "F32")
    factors = gguf_tensors(tmp_path / "out.gguf")["rope_freqs.weight"]
    wanted, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(source), "cpu")
    plain = 10000.0 ** -(np.arange(0, dim, 2) / dim)
    np.testing.assert_allclose(plain / factors, wanted.numpy(), rtol=1e-6)
    assert factors.min() == 1 and factors.max() == 8 and ((factors > 1) & (factors < 8)).any()
    # and back, where the tensor's divisors become parameters
    write_mlx(open_checkpoint(tmp_path / "out.gguf"), tmp_path / "back", None)
    config = AutoConfig.from_pretrained(tmp_path / "back")
    again, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    np.testing.assert_allclose(again.numpy(), wanted.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    "rope, message",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type dynamic"),
        (YARN | {"beta_fast": 16.0}, "beta_fast 16"),
    ],
)
def test_a_rope_that_gguf_cannot_express(rope, message, tmp_path):
    source = make_checkpoint(tmp_path / "in", rope_scaling=rope)
    with pytest.raises(ConfigError, match=message):
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [source]


def test_a_window_is_written_and_named_if_llama_cpp_takes_it_for_all_layers(tmp_path):
    fields = dict(architectures=["MistralForCausalLM"], sliding_window=100)
    source = open_checkpoint(make_checkpoint(tmp_path / "in", **fields))
    written = write_gguf(source, tmp_path / "out.gguf")
    assert gguf_fields(tmp_path / "out.gguf")["llama.attention.sliding_window"] == 100
    assert "looks back 100 tokens" in written.notices[0]
    fields = dict(architectures=["MinistralForCausalLM"], model_type="ministral", sliding_window=7)
    fields["layer_types"] = ["sliding_attention", "full_attention"]
    source = open_checkpoint(make_checkpoint(tmp_path / "some", **fields))
    message = r"window is \[7, None\], where a GGUF file means 7 to llama.cpp; write the MLX form"
    with pytest.raises(ConfigError, match=message):
        write_gguf(source, tmp_path / "out.gguf")


def test_windows_that_llama_cpp_has_in_one_size_alone(tmp_path):
    fields = dict(architectures=["Exaone4ForCausalLM"], model_type="exaone4", sliding_window=32)
    fields |= dict(hidden_size=16, intermediate_size=16, head_dim=4, rms_norm_eps=2.0**-17)
    fields["max_position_embeddings"] = 64
    source = open_checkpoint(make_checkpoint(tmp_path / "64", num_hidden_layers=64, **fields))
    write_gguf(source, tmp_path / "out.gguf", "F32")
    config = open_checkpoint(tmp_path / "out.gguf").config
    assert config.layers == source.config.layers
    assert shared_arithmetic(config) == shared_arithmetic(source.config)
    assert {(layer.mixer.window, layer.mixer.rotates) for layer in config.layers} == {
        (Window(32), True),
        (None, False),
    }
    other = open_checkpoint(make_checkpoint(tmp_path / "4", num_hidden_layers=4, **fields))
    message = "sliding_window is 32, expected 0, since .* 64 layers alone; write the MLX form"
    with pytest.raises(ConfigError, match=message):
        write_gguf(other, tmp_path / "4.gguf", "F32")


def test_metadata_of_a_gguf_source_is_copied_with_its_types(tmp_path):
    arrays = {T.BOOL: [True, False], T.FLOAT32: [0.5, float("inf")], T.FLOAT64: [0.1, -1e300]}
    arrays |= {T.INT8: [-128, 127], T.UINT8: [0, 255], T.INT16: [-5], T.UINT16: [65535]}
    arrays |= {T.INT32: [-(2**31)], T.UINT32: [2**32 - 1], T.STRING: ["a", ""]}
    arrays |= {T.INT64: [-(2**63), 2**63 - 1], T.UINT64: [2**64 - 1]}
    scalars = {T.BOOL: True, T.INT64: -1, T.UINT32: 7, T.UINT64: 2**63, T.STRING: "ä"}
    scalars |= {T.FLOAT32: 0.25, T.FLOAT64: 0.1}

    def edit(writer):
        for kind, values in arrays.items():
            writer.add_key_value(f"tokenizer.array.{kind.name}", values, T.ARRAY, kind)
        for kind, value in scalars.items():
            writer.add_key_value(f"tokenizer.scalar.{kind.name}", value, kind)

    make_gguf(tmp_path / "in.gguf", edit=edit)
    assert write_gguf(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "out.gguf").notices == ()
    before, after = (GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("in", "out"))
    odd = [name for name in before if name.startswith("tokenizer.")]
    assert len(odd) > len(arrays) + len(scalars)
    for name in odd:
        assert after[name].types == before[name].types, name
        assert after[name].contents() == before[name].contents(), name
    write_mlx(open_checkpoint(tmp_path / "in.gguf"), tmp_path / "folder", 4, 32)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_matrices_that_have_the_type_keep_their_blocks(kind, tmp_path):
    """As llama-quantize does, also those whose rows are permuted in the file."""
    make_gguf(tmp_path / "in.gguf", kinds=kind, hidden_size=256, intermediate_size=512)
    source, form = open_checkpoint(tmp_path / "in.gguf"), {"Q4_K": "Q4_K_M"}.get(kind, kind)
    written = write_gguf(source, tmp_path / "out.gguf", form)
    before, after = (
        {tensor.name: tensor for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors}
        for name in ("in", "out")
    )
    changed = {n for n, tensor in after.items() if tensor.tensor_type != before[n].tensor_type}
    assert "output.weight" in changed and "blk.0.attn_q.weight" not in changed
    for name in before.keys() - changed:
        np.testing.assert_array_equal(after[name].data, before[name].data, err_msg=name)
    assert f"quantised already ({kind})" in written.notices[0]


def test_an_empty_array_is_left_out_with_a_notice(tmp_path):
    edit = lambda writer: writer.add_key_value("tokenizer.none", [7], T.ARRAY, T.INT32)  # noqa: E731
    make_gguf(tmp_path / "in.gguf", edit=edit)
    checkpoint = open_checkpoint(tmp_path / "in.gguf")
    checkpoint.gguf_metadata["tokenizer.none"] = checkpoint.gguf_metadata["tokenizer.none"][:0]
    notices = write_gguf(checkpoint, tmp_path / "out.gguf").notices
    assert "'tokenizer.none' is an empty array" in " ".join(notices)


def test_rows_that_blocks_do_not_divide_stay_float16(tmp_path):
    source = make_checkpoint(tmp_path / "in", hidden_size=48, head_dim=16)
    written = write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert any("kept at float16" in notice and "rows of 48" in notice for notice in written.notices)
    wanted = open_checkpoint(source).tensors["model.layers.1.mlp.up_proj.weight"].float32()
    written = gguf_tensors(tmp_path / "out.gguf")["blk.1.ffn_up.weight"]
    assert np.array_equal(written, wanted.astype(np.float16))


def texts(kind: str) -> list[str]:
    """A tokenizer.json of Llama 2's kind puts no space before a text that begins with one: none of
    these for it.
    """
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
    assert ("after special tokens or before a text that begins with one" in said) == (
        kind != "bytelevel"
    )


def test_a_tokenizer_that_puts_no_space_before_a_text(guide_q8):
    before, after = (open_checkpoint(path).tokenizer for path in (None, guide_q8))
    for text in ("Hello", " Hello", "  two", *SENTENCES, "<|end|>a"):
        for special in (False, True):
            wanted = before.encode(text, parse_special=special)
            assert after.encode(text, parse_special=special) == wanted, text


def test_a_padded_embedding_is_padded_in_the_vocabulary(tmp_path):
    source = make_checkpoint(tmp_path / "in", vocab_size=400)
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    fields = gguf_fields(tmp_path / "out.gguf")
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.scores"]) == 400
    assert fields["tokenizer.ggml.tokens"][399] == "[PAD399]"
    assert fields["tokenizer.ggml.token_type"][399] == 5


def test_scores_out_of_merges_put_tokens_in_sentencepieces_order(tmp_path):
    source = make_checkpoint(tmp_path / "in", tokenizer="llama2")
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    fields = gguf_fields(tmp_path / "out.gguf")
    sp = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    merged = [
        token
        for token in range(384)
        if len(sp.id_to_piece(token)) > 1
        and not (sp.is_byte(token) or sp.is_control(token) or sp.is_unknown(token))
    ]
    assert len(merged) > 20
    scores = fields["tokenizer.ggml.scores"]
    assert sorted(merged, key=sp.get_score) == sorted(merged, key=lambda token: scores[token])


@pytest.mark.parametrize(
    "split, ignore_merges, name",
    [
        ("llama", True, "llama-bpe"),
        ("llama", False, "smaug-bpe"),
        ("digits", False, "smollm"),
        ("gpt2", False, "gpt-2"),
        ("qwen", False, "qwen2"),
        ("llama, as written from a GGUF file", True, "llama-bpe"),
        ("llama, as tiktoken's patterns are converted", True, "llama-bpe"),
        ("llama, within sequences", True, "llama-bpe"),
    ],
)
def test_how_text_is_split_gets_llama_cpps_name(split, ignore_merges, name, tmp_path):
    def change(raw):
        raw["model"]["ignore_merges"] = ignore_merges
        plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        plain["use_regex"] = True
        if split == "gpt2":
            raw["pre_tokenizer"] = plain
        elif split == "digits":
            steps = [{"type": "Digits", "individual_digits": True}, plain]
            raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        elif split == "llama, as tiktoken's patterns are converted":
            raw["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
        elif split == "llama, within sequences":
            raw["normalizer"] = {"type": "Sequence", "normalizers": []}
            raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [raw["pre_tokenizer"]]}
        elif split != "llama":
            pattern = raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]
            before, after = r"\p{N}{1,3}", r"\p{N}"
            if split != "qwen":
                before = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
                after = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
            assert before in pattern["Regex"]
            pattern["Regex"] = pattern["Regex"].replace(before, after)

    source = edited_tokenizer(tmp_path / "in", "bytelevel", change)
    write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert gguf_fields(tmp_path / "out.gguf")["tokenizer.ggml.pre"] == name


def test_a_text_in_nfc_has_the_ids_of_transformers_classes(tmp_path):
    """Qwen's and OLMoE's compose characters, and programs that read GGUF files do not."""
    raw = json.loads(byte_level_json())["model"]
    special = dict(eos_token=LLAMA3_SPECIALS[4], pad_token=LLAMA3_SPECIALS[4])
    for judge, name in [
        (Qwen2Tokenizer, "qwen2"),
        (Qwen3_5Tokenizer, "qwen35"),
        (GPTNeoXTokenizer, "gpt-2"),
    ]:
        merges = [tuple(pair) for pair in raw["merges"]]
        theirs = judge(vocab=raw["vocab"], merges=merges, unk_token="!", **special)
        source = make_checkpoint(tmp_path / name, tokenizer=False, vocab_size=400)
        theirs.save_pretrained(source)
        written = write_gguf(open_checkpoint(source), tmp_path / f"{name}.gguf")
        assert gguf_fields(tmp_path / f"{name}.gguf")["tokenizer.ggml.pre"] == name
        (notice,) = [text for text in written.notices if "NFC" in text]
        assert "a text that is not in NFC has other tokens" in notice
        ours = open_checkpoint(tmp_path / f"{name}.gguf").tokenizer
        for text in [*texts("bytelevel"), "नमस्ते", "\u00e9\u00e0 \u1ec7 ﬁ ½"]:
            assert unicodedata.is_normalized("NFC", text)
            assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        decomposed = "e\u0301"
        assert ours.encode(decomposed) != theirs.encode(decomposed, add_special_tokens=False)
        assert ours.decode(ours.encode(decomposed)) == decomposed


def test_merges_of_words_that_are_tokens_are_a_notice(tmp_path):
    def change(raw):
        raw["model"]["ignore_merges"] = True
        pattern = raw["pre_tokenizer"]["pretokenizers"][0]["pattern"]
        pattern["Regex"] = pattern["Regex"].replace(r"\p{N}{1,3}", r"\p{N}")

    source = edited_tokenizer(tmp_path / "in", "bytelevel", change)
    written = write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert "ignore_merges True, and llama.cpp's qwen2 the opposite" in " ".join(written.notices)


def gemma4_tokenizer(folder: Path, **settings) -> tuple[GemmaTokenizer, dict]:
    """(transformers' tokenizer of Gemma 4's vocabulary, saved in a checkpoint; the fields of
    llama.cpp's file that has this vocabulary)
    """
    data = Path(__file__).resolve().parents[1] / "data/ggml-vocab-gemma-4.gguf.xz"
    folder.mkdir()
    (folder / "theirs").write_bytes(lzma.decompress(data.read_bytes()))
    fields = GGUFFile(folder / "theirs").metadata  # gguf's own reader takes seconds
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    judge = GemmaTokenizer(
        vocab={text: i for i, text in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]],
        extra_special_tokens=[text for text, kind in zip(tokens, types) if kind in (3, 4)],
        **settings,
    )
    make_checkpoint(folder, tokenizer=False, vocab_size=len(tokens))
    judge.save_pretrained(folder)
    return judge, fields


TURN = '<|turn>user\nHi<turn|><|tool_call>call:f{a:<|"|>b<|"|>}<tool_call|></s>'


@pytest.mark.parametrize("adds_bos", [False, True])
def test_gemma_4s_tokenizer_is_written_as_llama_cpps_converter_writes_it(adds_bos, tmp_path):
    judge, fields = gemma4_tokenizer(tmp_path / "in", add_bos_token=adds_bos)
    notices = write_gguf(open_checkpoint(tmp_path / "in"), tmp_path / "out.gguf").notices
    assert ("put BOS before each text" in " ".join(notices)) != adds_bos
    written = GGUFFile(tmp_path / "out.gguf").metadata
    types = [read["tokenizer.ggml.token_type"].tolist() for read in (written, fields)]
    assert types[0] == types[1][:3] + [2] + types[1][4:]  # <unk>, to them a control token
    names = "model tokens merges add_bos_token add_space_prefix bos_token_id eos_token_id"
    for name in [*names.split(), "unknown_token_id", "padding_token_id"]:
        mine, wanted = (read[f"tokenizer.ggml.{name}"] for read in (written, fields))
        assert mine == wanted or list(mine) == list(wanted), name
    before, after = (open_checkpoint(tmp_path / name).tokenizer for name in ("in", "out.gguf"))
    for text in [*texts("bytelevel"), TURN]:
        ids = after.encode(text, parse_special=True)
        assert ids == judge.encode(text, add_special_tokens=False), text
        assert after.decode(ids, skip_special=False) == text
        assert after.encode(text) == before.encode(text), text


def edited_tokenizer(folder: Path, kind: str, change) -> Path:
    make_checkpoint(folder, tokenizer=kind)
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text("utf-8"))
    change(raw)
    path.write_text(json.dumps(raw), "utf-8")
    return folder


def put_last(raw) -> None:
    """Move the first merge whose token the next merge makes as well."""
    merges = raw["model"]["merges"]
    made = ["".join(pair) for pair in merges]
    merges.append(merges.pop(next(i for i in range(len(made)) if made[i] == made[i + 1])))


def set_in(*path_and_value):
    *path, last, value = path_and_value

    def change(raw):
        for key in path:
            raw = raw[key]
        raw[last] = value

    return change


STEPS = ("pre_tokenizer", "pretokenizers")


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("bytelevel", set_in("normalizer", {"type": "Lowercase"}), "normalizer"),
        ("llama2", set_in("normalizer", {"type": "NFKC"}), "normalizer"),
        ("llama2", set_in("pre_tokenizer", {"type": "Whitespace"}), "pre_tokenizer"),
        ("bytelevel", set_in(*STEPS, 0, "behavior", "Removed"), "pre_tokenizer"),
        ("bytelevel", set_in(*STEPS, 0, "pattern", {"Regex": r"\w+"}), "pre_tokenizer"),
        ("bytelevel", set_in(*STEPS, 1, "add_prefix_space", True), "pre_tokenizer"),
        ("llama2", lambda raw: raw["model"]["merges"].pop(), "incomplete or not consecutive"),
        ("llama2", put_last, "not consecutive"),
    ],
)
def test_a_tokenizer_that_gguf_cannot_express(kind, change, message, tmp_path):
    source = edited_tokenizer(tmp_path / "in", kind, change)
    with pytest.raises(TokenizerError, match=message) as error:
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")
    assert "tokenizer.json" in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(model_type="unigram", vocab_size=400), "type 1"),
        (dict(normalization_rule_name="nmt_nfkc"), "changes characters"),
        (dict(remove_extra_whitespaces=True), "removes extra spaces"),
    ],
)
def test_a_sentencepiece_model_that_llama_cpp_reads_otherwise(settings, message, tmp_path):
    out = io.BytesIO()
    options = dict(model_type="bpe", vocab_size=384, normalization_rule_name="identity")
    options |= dict(byte_fallback=True, hard_vocab_limit=False, minloglevel=2, num_threads=1)
    options |= dict(remove_extra_whitespaces=False) | settings
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES), model_writer=out, **options
    )
    source = make_checkpoint(tmp_path / "in", vocab_size=512)
    (source / "tokenizer.model").write_bytes(out.getvalue())
    with pytest.raises(TokenizerError, match=message):
        write_gguf(open_checkpoint(source), tmp_path / "out.gguf")


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1),
        dict(mlp_bias=True, head_dim=32, hidden_size=48, num_attention_heads=6),
        *(dict(head_dim=64, **rope) for rope in ROPES.values()),
    ],
    ids=str,
)
def test_llama_cpp_computes_the_same_logits(format, fields, tmp_path):
    """Up to what rounding activations to 8 bits costs there."""
    from mlx_llama import load

    source = open_checkpoint(make_checkpoint(tmp_path / "in", **fields))
    write_gguf(source, tmp_path / "out.gguf", format)
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
        assert theirs.tokenize(text.encode(), add_bos=True, special=False) == ours.encode(
            text, add_bos=True
        ), text
    assert {theirs.token_eos(), theirs.token_bos()} <= {ours.bos_id, *ours.eos_ids}


def test_llama_cpp_gives_the_same_ids_of_gemma_4s_vocabulary(tmp_path):
    judge, _ = gemma4_tokenizer(tmp_path / "in")
    write_gguf(open_checkpoint(tmp_path / "in"), tmp_path / "out.gguf")
    theirs = llama_cpp_model(tmp_path / "out.gguf")
    for text in [*texts("bytelevel"), TURN]:
        ids = theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ids == judge.encode(text, add_special_tokens=False), text


def test_llama_cpp_answers_as_the_guide(guide_q8):
    """Through its own template engine, tokenizer, sampler and stop condition."""
    from mlx_llama import load

    messages = [{"role": "user", "content": "Who are you?"}]
    done = llama_cpp_model(guide_q8).create_chat_completion(messages, temperature=0, max_tokens=60)
    ours = load(guide_q8, backend="cpu").generate(messages, max_tokens=60)
    (choice,) = done["choices"]
    assert choice["message"]["content"].strip() == ours.text.strip()
    assert choice["finish_reason"] == "stop"


def test_parts_of_a_tensor_that_gguf_has_whole_are_named(tmp_path):
    fields = dict(architectures=["Glm4ForCausalLM"], model_type="glm4")
    apart = random_tensors(config_fields(**fields))  # gate and up are a tensor each
    source = open_checkpoint(make_checkpoint(tmp_path / "apart", tensors=apart, **fields))
    message = "no tensor 'model.layers.0.mlp.gate_proj.weight' in GGUF"
    with pytest.raises(CheckpointError, match=message):
        write_gguf(source, tmp_path / "out.gguf", "F32")
