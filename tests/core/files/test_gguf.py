"""GGUF files written by gguf, against the readers of transformers and gguf; damaged, lying and
strange files.
"""

import itertools
import math
import os
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type, RopeScalingType as Scaling
from making import config_fields, make_checkpoint, random_tensors, refusal
from making_gguf import LOW_BIT, PLAIN, make_gguf, write_all
from transformers import LlamaConfig as TheirConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cpu_fallback.model import Llama
from mlx_llama.core.backends.load_options import LoadOptions
from mlx_llama.core.errors import CheckpointError, ConfigError, TemplateError
from mlx_llama.core.files import gguf as gguf_module
from mlx_llama.core.files.checkpoint import Tensor, open_checkpoint
from mlx_llama.core.files.gguf import GGUFFile, part_names
from mlx_llama.core.files.quantized import GGUFWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.rope import inverse_frequencies

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # rows that a k-quant's blocks of 256 divide
TOKENS = np.array([[1, 5, 9, 200, 17, 383]])


V = gguf.GGUFValueType


def put(key, value, kind):
    def edit(writer):
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    return edit


def drop(key):
    return lambda writer: writer.kv_data[0].pop(key)


def put_tensor(name, values, kind=None):
    return lambda writer: writer.add_tensor(name, values, raw_dtype=kind)


def theirs(path, **fields) -> LlamaForCausalLM:
    """transformers' model with the weights that its own GGUF reader finds: names, row order,
    dequantised.
    """
    model = LlamaForCausalLM(TheirConfig(**config_fields(**fields))).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


@pytest.mark.parametrize("kind", [*PLAIN, *LOW_BIT])
def test_tensors_are_what_the_reference_dequantises(kind, tmp_path):
    judge = make_gguf(tmp_path / "m.gguf", kinds=kind, num_key_value_heads=1, **WIDE)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert set(opened.tensors) == set(judge) == set(opened.config.tensor_shapes())
    for name, tensor in opened.tensors.items():
        assert tensor.name == name and tensor.shape == judge[name].shape
        np.testing.assert_array_equal(tensor.float32(), judge[name])
        low_bit = kind in LOW_BIT and len(tensor.shape) == 2
        assert isinstance(tensor, GGUFWeight if low_bit else Tensor)
        assert not low_bit or tensor.format == kind
    assert opened.nbytes == sum(tensor.nbytes for tensor in opened.tensors.values())
    expected = {"F32": "float32", "BF16": "bfloat16"}.get(kind, "float16")
    assert opened.dtype == expected == opened.config.dtype


@pytest.mark.slow_for("Q8_0-{'num")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 24},
        {"tie_word_embeddings": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_logits_are_transformers(kind, fields, tmp_path):
    make_gguf(tmp_path / "m.gguf", kinds=kind, **fields)
    with torch.no_grad():
        expected = theirs(tmp_path / "m.gguf", **fields)(torch.tensor(TOKENS)).logits.numpy()
    model = Llama.load(open_checkpoint(tmp_path / "m.gguf"), LoadOptions(dtype="float32"))
    logits = model.forward(TOKENS, 0, model.make_cache(16), all_positions=True)
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert np.abs(expected).max() > 0.5


def test_factors_of_nvfp4_matrices(tmp_path):
    """Of an expert each in a stack; of another type, and of a wrong shape, they are refused."""

    def write(kind: str, *values: float) -> Path:
        edit = put_tensor("blk.0.ffn_up.scale", np.array(values, np.float32))
        make_gguf(tmp_path / "m.gguf", kinds=kind, edit=edit, **WIDE)
        return tmp_path / "m.gguf"

    plain = make_gguf(tmp_path / "m.gguf", kinds="NVFP4", **WIDE)
    tensor = open_checkpoint(write("NVFP4", 0.7)).tensors["model.layers.0.mlp.up_proj.weight"]
    expected = plain[tensor.name] * np.float32(0.7)
    np.testing.assert_allclose(tensor.float32(), expected, rtol=1e-6)
    np.testing.assert_allclose(tensor.part("a", 5, 9).float32(), expected[5:9], rtol=1e-6)
    np.testing.assert_allclose(tensor.take(np.array([7, 1])), expected[[7, 1]], rtol=1e-6)
    with pytest.raises(CheckpointError, match="ffn_up.scale.*expected a number for each matrix"):
        open_checkpoint(write("NVFP4", 0.7, 0.8))
    with pytest.raises(CheckpointError, match="'blk.0.ffn_up.scale'.*is not part of the model"):
        open_checkpoint(write("Q8_0", 0.7))


def test_a_bias_that_only_some_projections_have_is_zero_in_the_others(tmp_path):
    fields = config_fields(attention_bias=True)
    present = {name: x for name, x in random_tensors(fields).items() if "o_proj.bias" not in name}
    judge = make_gguf(tmp_path / "m.gguf", tensors=present, **fields)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert opened.config.attention_bias and not opened.config.mlp_bias
    for name, tensor in opened.tensors.items():
        np.testing.assert_array_equal(tensor.float32(), judge.get(name, np.zeros(64, np.float32)))


def test_reordered_rows_are_read_only_copies_and_can_be_released(tmp_path):
    judge = make_gguf(tmp_path / "m.gguf", kinds="F16")
    tensor = open_checkpoint(tmp_path / "m.gguf").tensors["model.layers.1.self_attn.q_proj.weight"]
    assert tensor.bits.dtype == np.float16 and not tensor.bits.flags.writeable
    assert tensor.nbytes == 64 * 64 * 2
    tensor.release()
    np.testing.assert_array_equal(tensor.float32(), judge[tensor.name])


def test_a_file_without_tokenizer_or_template(tmp_path):
    make_gguf(tmp_path / "m.gguf", tokenizer=None)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert opened.eos_token_ids == frozenset() and opened.bos_token_id is None
    make_gguf(tmp_path / "n.gguf", edit=drop("tokenizer.chat_template"))
    assert open_checkpoint(tmp_path / "n.gguf").template is None


@pytest.mark.parametrize("value", [[1, 2], ["a", "b"]])
def test_a_template_that_is_no_text(value, tmp_path):
    make_gguf(tmp_path / "m.gguf", edit=put("tokenizer.chat_template", value, V.ARRAY))
    message = refusal(lambda: open_checkpoint(tmp_path / "m.gguf").template, kind=TemplateError)
    assert "m.gguf: tokenizer.chat_template is" in message and "expected Jinja text" in message


# config and rope


def config_of(tmp_path, edit=None, **fields) -> LlamaConfig:
    make_gguf(tmp_path / "m.gguf", tokenizer=None, edit=edit, **fields)
    return open_checkpoint(tmp_path / "m.gguf").config


def test_config_is_the_originals(tmp_path):
    fields = dict(num_key_value_heads=1, head_dim=24, tie_word_embeddings=True, rope_theta=5e5)
    ours = config_of(tmp_path, **fields)
    original = LlamaConfig.from_dict(config_fields(**fields))
    for name in (
        "architecture vocab_size hidden_size intermediate_size num_hidden_layers "
        "num_attention_heads num_key_value_heads head_dim max_position_embeddings rope "
        "tie_word_embeddings attention_bias mlp_bias sliding_window dtype"
    ).split():
        assert getattr(ours, name) == getattr(original, name), name
    assert np.float32(ours.rms_norm_eps) == np.float32(original.rms_norm_eps)


def test_one_number_per_layer_when_they_agree(tmp_path):
    def edit(writer):
        for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
            writer.kv_data[0].pop(f"llama.{name}")
        writer.add_array("llama.attention.head_count", [4, 4])
        writer.add_array("llama.attention.head_count_kv", [2, 2])
        writer.add_array("llama.feed_forward_length", [96, 96])

    config = config_of(tmp_path, edit)
    assert config.num_attention_heads == 4 and config.num_key_value_heads == 2
    assert config.intermediate_size == 96


def test_a_sliding_window(tmp_path):
    assert config_of(tmp_path, lambda writer: writer.add_sliding_window(32)).sliding_window == 32
    assert config_of(tmp_path, lambda writer: writer.add_sliding_window(0)).sliding_window is None


def their_frequencies(kind: str, parameters: dict, **fields) -> tuple[np.ndarray, float]:
    raw = config_fields(**fields, rope_scaling={"rope_type": kind, **parameters})
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](TheirConfig(**raw), torch.device("cpu"))
    return frequencies.numpy(), float(factor)


def scale(kind: gguf.RopeScalingType, **fields: float):
    """An edit that adds a scaled rope of factor 4. fields: further ones by the writer's methods."""

    def edit(writer):  # as conversion/base.py writes it
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        for name, value in fields.items():
            getattr(writer, f"add_rope_scaling_{name}")(value)

    return edit


def test_linear_scaling_under_both_names(tmp_path):
    expected, _ = their_frequencies("linear", {"factor": 4.0})
    old = lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0)  # noqa: E731
    for edit in (scale(Scaling.LINEAR), old):
        frequencies, _ = inverse_frequencies(config_of(tmp_path, edit))
        np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    for edit in (lambda writer: writer.add_rope_scaling_factor(0.0), scale(Scaling.NONE)):
        assert config_of(tmp_path, edit).rope.type == "default"


@pytest.mark.parametrize(
    "more",
    [{}, {"attention_factor": 0.75}, {"beta_fast": 16.0, "beta_slow": 2.0}],
    ids=["plain", "factor", "betas"],
)
def test_yarn(more, tmp_path):
    names = {"attention_factor": "yarn_attn_factor"}
    fields = {names.get(name, f"yarn_{name}"): value for name, value in more.items()}
    edit = scale(Scaling.YARN, orig_ctx_len=64, **fields)
    frequencies, factor = inverse_frequencies(config_of(tmp_path, edit, head_dim=64))
    parameters = {"factor": 4.0, "original_max_position_embeddings": 64, **more}
    expected, expected_factor = their_frequencies("yarn", parameters, head_dim=64)
    np.testing.assert_allclose(frequencies, expected, rtol=2e-6)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


def test_yarn_attn_factor_multiplies(tmp_path):
    edit = scale(Scaling.YARN, attn_factors=0.5)
    _, factor = inverse_frequencies(config_of(tmp_path, edit))
    assert factor == pytest.approx(0.5 * (0.1 * math.log(4) + 1))  # src/llama-context.cpp


HEADS, WINDOW = "llama.attention.head_count", "llama.attention.sliding_window"
EPS, EOS = "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.eos_token_id"
SAME = "the same number for all layers"
# (key, value, its type, message); "" for "is VALUE"; without a value the key is missing
WRONG = [
    ("general.architecture", "gemma", V.STRING, "is 'gemma': supported are"),
    ("general.architecture", [1, 2], V.ARRAY, ""),
    ("general.type", [1, 2], V.ARRAY, ""),
    ("general.type", "adapter", V.STRING, "is 'adapter', expected 'model'"),
    ("llama.rope.scaling.type", [1, 2], V.ARRAY, ""),
    ("llama.rope.scaling.type", "longrope", V.STRING, ""),
    ("llama.rope.scaling.factor", 0.5, V.FLOAT32, "is 0.5, expected at least 1"),
    ("llama.rope.freq_base", -1.0, V.FLOAT32, ""),
    ("llama.rope.dimension_count", 8, V.UINT32, "is 8, expected 16"),
    (WINDOW, [1, 2], V.ARRAY, SAME),
    (WINDOW, "x", V.STRING, ""),
    ("llama.attention.causal", [True, False], V.ARRAY, ""),
    ("llama.attention.causal", False, V.BOOL, ""),
    ("llama.attention.value_length", 32, V.UINT32, "is 32, expected 16"),
    ("llama.attention.key_length", 15, V.UINT32, "is 15, expected an even number"),
    (HEADS, [4, 2], V.ARRAY, SAME),
    (HEADS, 6, V.UINT32, "llama.embedding_length is 64, expected a multiple"),
    (HEADS + "_kv", 3, V.UINT32, "is 3, expected a divisor"),
    (EPS, None, None, "is missing"),
    (EPS, float("nan"), V.FLOAT32, ""),
    ("llama.expert_count", 8, V.UINT32, "llama.expert_used_count is missing"),
    ("llama.expert_shared_count", 1, V.UINT32, "is 1, expected 0"),
    ("llama.logit_scale", 0.5, V.FLOAT32, ""),
    ("llama.embedding_length", None, None, "is missing"),
    ("llama.block_count", -1, V.INT32, "is -1, expected a whole number from 1"),
    ("llama.block_count", 1 << 31, V.UINT32, ""),
    ("llama.block_count", "two", V.STRING, ""),
    ("llama.block_count", 2.0, V.FLOAT32, ""),
    (EOS, [1, 999], V.ARRAY, ""),
    (EOS, 9999, V.UINT32, ""),
    ("tokenizer.ggml.bos_token_id", [1, 2], V.ARRAY, ""),
    ("tokenizer.ggml.tokens", ["a"] * 400, V.ARRAY, "is 400 texts, expected at most 384"),
    ("tokenizer.ggml.tokens", 7, V.UINT32, ""),
]


@pytest.mark.parametrize(("key", "value", "kind", "message"), WRONG, ids=lambda x: repr(x)[:40])
def test_metadata_that_is_wrong_is_named(key, value, kind, message, tmp_path):
    make_gguf(tmp_path / "m.gguf", edit=drop(key) if kind is None else put(key, value, kind))
    text = refusal(open_checkpoint, tmp_path / "m.gguf", kind=ConfigError)
    message = message or f"is {value!r}"
    assert (f"{key} {message}" if message.startswith("is ") else message) in text
    assert str(tmp_path / "m.gguf") in text


@pytest.mark.parametrize(
    "factors", [np.ones(7), np.zeros(8), np.full(8, np.nan), np.ones((2, 8))], ids=str
)
def test_rope_factors_that_are_wrong(factors, tmp_path):
    edit = put_tensor("rope_freqs.weight", factors.astype(np.float32))
    make_gguf(tmp_path / "m.gguf", edit=edit)
    message = refusal(open_checkpoint, tmp_path / "m.gguf", kind=ConfigError)
    assert "rope_freqs.weight" in message and "expected 8 numbers" in message


def test_minus_one_stands_for_no_token(tmp_path):
    make_gguf(tmp_path / "m.gguf", edit=put("tokenizer.ggml.eot_token_id", 0xFFFFFFFF, V.UINT32))
    assert open_checkpoint(tmp_path / "m.gguf").config.eos_token_ids == (2,)


# tensors that do not fit


LAYER_2, KEY = "model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "up_proj.weight [96, 64] is missing"),
        ("model.embed_tokens.weight", None, "embed_tokens.weight [384, 64] is missing"),
        (LAYER_2, 64, "is not part of the model"),
        ("model.norm.weight", 32, "has shape [32], its metadata calls for [64]"),
        (KEY, (64, 64), "has shape [64, 64], its metadata calls for [32, 64]"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata(name, shape, expected, tmp_path):
    config = {"num_hidden_layers": 3}  # so that gguf's table knows a third layer's names
    tensors = random_tensors(config_fields())
    if shape is None:
        del tensors[name]
    else:
        tensors[name] = np.ones(shape, np.float32)
    make_gguf(
        tmp_path / "m.gguf", tensors=tensors, edit=put("llama.block_count", 2, V.UINT32), **config
    )
    refusal(open_checkpoint, tmp_path / "m.gguf", words=[expected, "m.gguf"])


def test_an_unknown_tensor_is_named_and_left_over_frequencies_are_not(tmp_path):
    name = "blk.0.attn_q_norm.weight"
    for tensor_name, size in ((name, 16), ("blk.0.attn_rot_embd", 8)):  # early conversions left it
        edit = put_tensor(tensor_name, np.ones(size, np.float32))
        make_gguf(tmp_path / f"{size}.gguf", edit=edit)
    message = refusal(open_checkpoint, tmp_path / "16.gguf")
    assert f"tensor '{name}' [16] is not part of the model" in message
    assert len(open_checkpoint(tmp_path / "8.gguf").tensors) == 21


def without(part):
    tensors = random_tensors(config_fields())
    return {name: x for name, x in tensors.items() if part not in name}


@pytest.mark.parametrize(
    "kind", sorted({kind.name for kind in gguf.GGML_QUANT_SIZES} - {"F64", *PLAIN, *LOW_BIT})
)
def test_other_types_are_named_with_the_tensor(kind, tmp_path):
    block, nbytes = gguf.GGML_QUANT_SIZES[Type[kind]]
    edit = put_tensor("blk.0.ffn_up.weight", np.zeros((4, nbytes), np.uint8), Type[kind])
    make_gguf(tmp_path / "m.gguf", tensors=without("0.mlp.up_proj"), edit=edit)
    message = refusal(open_checkpoint, tmp_path / "m.gguf")
    assert (
        f"'blk.0.ffn_up.weight' has type {kind}, expected one of F64, F32, F16, BF16, Q4_0"
        in message
    )


def test_a_norm_in_low_bits(tmp_path):
    edit = put_tensor("output_norm.weight", np.zeros(68, np.uint8), Type.Q8_0)
    make_gguf(tmp_path / "m.gguf", tensors=without("model.norm."), edit=edit)
    message = refusal(open_checkpoint, tmp_path / "m.gguf")
    assert "output_norm.weight has type Q8_0 and shape [64]" in message


# the container


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def info(name: str, shape=(8,), kind: int = 0, offset: int = 0) -> bytes:
    """shape: innermost first, as the file has it."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def container(entries=(), tensors=(), data=b"", version=3, counts=None, magic=b"GGUF") -> bytes:
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries))))
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def test_every_value_type_is_read_as_gguf_wrote_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    scalars = dict(
        zip(
            (V.UINT8, V.INT8, V.UINT16, V.INT16, V.UINT32, V.INT32, V.UINT64, V.INT64),
            (200, -100, 60000, -30000, 4_000_000_000, -2_000_000_000, 1 << 63, -(1 << 62)),
        )
    )
    scalars |= {V.FLOAT32: 0.15625, V.FLOAT64: 0.1, V.BOOL: True, V.STRING: "ça va ▁ 🦙"}
    arrays = {
        "ints": [1, 2, 300],
        "floats": [0.5, -1.5],
        "bools": [True, False, True],
        "texts": ["a", "", "🦙" * 100, "é"],
    }
    for kind, value in scalars.items():
        writer.add_key_value(f"x.{kind.name}", value, kind)
    for name, value in arrays.items():
        writer.add_array(f"x.{name}", value)
    write_all(writer)
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    for kind, value in scalars.items():
        assert metadata[f"x.{kind.name}"] == value
        assert type(metadata[f"x.{kind.name}"]) is type(value)
    for name, value in arrays.items():
        assert list(metadata[f"x.{name}"]) == value and len(metadata[f"x.{name}"]) == len(value)
    texts = metadata["x.texts"]
    assert texts[-1] == "é" and texts[1:3] == ["", "🦙" * 100] and "é" in texts
    assert texts.index("é") == 3
    with pytest.raises(IndexError):
        texts[4]


def test_a_large_vocabulary_is_read_whole(tmp_path):
    """Long and empty strings between short ones take both paths of the walk."""
    rng = np.random.default_rng(0)
    tokens = [
        "".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(1, 13, 60_000)
    ]
    for i, odd in enumerate(["", "x" * 255, "x" * 256, "x" * 70_000, "\0" * 20, "", "é🦙"]):
        tokens[1000 * i + 5] = odd
    merges = [f"{a} {b}" for a, b in itertools.pairwise(tokens)]

    def edit(writer):
        writer.add_token_list(tokens)
        writer.add_token_merges(merges)

    make_gguf(tmp_path / "m.gguf", tokenizer=None, edit=edit, vocab_size=60_000)
    metadata = GGUFFile(tmp_path / "m.gguf").metadata
    assert list(metadata["tokenizer.ggml.tokens"]) == tokens
    assert list(metadata["tokenizer.ggml.merges"]) == merges
    assert metadata["tokenizer.ggml.merges"][59_998] == merges[-1]


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
@pytest.mark.parametrize("length", [12, 13, 14, 15])
def test_alignment(length, alignment, tmp_path):
    def edit(writer):
        writer.add_custom_alignment(alignment)
        writer.add_string("general.name", "x" * length)

    judge = make_gguf(tmp_path / "m.gguf", kinds="Q4_0", edit=edit)
    for name, tensor in open_checkpoint(tmp_path / "m.gguf").tensors.items():
        np.testing.assert_array_equal(tensor.float32(), judge[name])
        assert isinstance(tensor, GGUFWeight) or tensor.bits.flags.aligned


def test_version_2(tmp_path):
    judge = make_gguf(tmp_path / "m.gguf")
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    raw[4:8] = struct.pack("<I", 2)
    (tmp_path / "m.gguf").write_bytes(raw)
    tensors = open_checkpoint(tmp_path / "m.gguf").tensors
    assert all(np.array_equal(tensors[name].float32(), x) for name, x in judge.items())


HUGE = 1 << 60
U32, F32 = struct.pack("<I", 1), bytes(32)


def length(number: int) -> bytes:
    return struct.pack("<Q", number)


def array(kind: int, count: int, values: bytes = b"", data: bytes = b"") -> bytes:
    return container([entry("a", 9, struct.pack("<IQ", kind, count) + values)], data=data)


def alignment(number: int) -> bytes:
    return container([entry("general.alignment", 4, struct.pack("<I", number))])


def tensor(*shape: int, data: bytes = F32, **fields: int) -> bytes:
    return container((), [info("a", shape, **fields)], data)


PART = [entry("split.count", 2, struct.pack("<H", 3)), entry("split.no", 2, struct.pack("<H", 1))]
DAMAGED = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF", "4 bytes long"),
    "not gguf": (b"PK\x03\x04" * 10, "not GGUF"),
    "ggml": (b"lmgg" + bytes(40), "not GGUF"),
    "version 1": (container(version=1), "GGUF version 1, expected 2 or 3"),
    "version 4": (container(version=4), "GGUF version 4, expected 2 or 3"),
    "big-endian": (container(version=3 << 24), "big-endian"),
    "tensor count": (container(counts=(HUGE, 0)), f"the number of tensors is {HUGE}"),
    "entry count": (container(counts=(0, HUGE)), f"the number of metadata entries is {HUGE}"),
    "more entries than there are": (container([entry("a", 4, U32)], counts=(0, 9)), "is empty"),
    "more tensors than there are": (container(counts=(9, 0)), "tensor"),
    "key length": (container([length(HUGE) + b"abc"]), "the length of key of metadata entry 0"),
    "key beyond the end": (container([length(500) + b"abc"]), "takes 500 bytes"),
    "key not UTF-8": (container([entry("a", 4, U32).replace(b"a", b"\xff")]), "expected UTF-8"),
    "empty key": (container([entry("", 4, U32)]), "is empty"),
    "key twice": (container([entry("a", 4, U32)] * 2), "metadata key 'a' occurs twice"),
    "value type": (container([entry("a", 13, U32)]), "metadata 'a' has value type 13"),
    "text length": (container([entry("a", 8, length(HUGE))]), "the length of metadata 'a' is"),
    "text beyond the end": (container([entry("a", 8, length(9999))]), "'a' takes 9999 bytes"),
    "text not UTF-8": (container([entry("a", 8, text(b"\xc3("))]), "expected UTF-8"),
    "array of numbers": (array(4, 1000), "metadata 'a' takes"),
    "array of texts": (array(8, 1000), "metadata 'a' has 1000 strings"),
    "array of texts that lie": (
        array(8, 2, text("x") + length(HUGE), data=bytes(64)),
        "metadata 'a'[2] is text beyond the end",
    ),
    "array of arrays": (array(9, 1), "array of value type 9"),
    "array of nothing known": (array(77, 1), "array of value type 77"),
    "alignment 0": (alignment(0), "general.alignment is 0"),
    "alignment 24": (alignment(24), "general.alignment is 24"),
    "alignment text": (container([entry("general.alignment", 8, text("32"))]), "is '32'"),
    "tensor twice": (
        container((), [info("a"), info("a", offset=32)], bytes(64)),
        "'a' (F32 [8]) occurs twice",
    ),
    "dimensions": (tensor(*(1,) * 5), "tensor 'a' has 5 dimensions"),
    "no dimensions": (tensor(), "tensor 'a' has 0 dimensions"),
    "dimension 0": (tensor(8, 0), "tensor 'a' has shape [0, 8]"),
    "dimension huge": (tensor(HUGE), f"tensor 'a' (F32 [{HUGE}]) takes"),
    "dimensions whose product wraps": (tensor(*(1 << 32,) * 4), "takes"),
    "row not whole blocks": (tensor(40, 2, kind=2), "rows of a multiple of 32 for Q4_0"),
    "type": (tensor(8, kind=99), "tensor 'a' has type number 99, expected one of F64"),
    "type that is no more": (tensor(8, kind=4), "tensor 'a' has type number 4"),
    "offset": (tensor(8, offset=1 << 40), "tensor 'a' (F32 [8]) takes 32 bytes from byte"),
    "offset misaligned": (tensor(8, offset=4), "begins at byte 4 of the data, expected a mul"),
    "truncated": (
        container((), [info("a"), info("b", offset=32)], bytes(63)),
        "tensor 'b' (F32 [8]) takes 32 bytes",
    ),
    "overlap": (
        container((), [info("a", (16,)), info("b", offset=32)], bytes(96)),
        "'b' (F32 [8]) begins at byte 32",
    ),
    "split.count": (container([entry("split.count", 8, text("2"))]), "metadata split.count is '2'"),
    "part's name": (container(PART), "expected a name that ends in -00002-of-00003.gguf"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_containers(case, tmp_path):
    raw, expected = DAMAGED[case]
    (tmp_path / "m.gguf").write_bytes(raw)
    refusal(GGUFFile, tmp_path / "m.gguf", words=[expected, str(tmp_path / "m.gguf")])


def test_metadata_beyond_all_models_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """Sparse files of gigabytes, which take no room on the disk."""
    monkeypatch.setattr(gguf_module._Part, "_walk_strings", lambda *_: pytest.fail("read"))
    path = tmp_path / "m.gguf"
    for kind, nbytes in ((8, 8), (7, 1), (0, 1), (6, 4)):  # strings, booleans, bytes, float32
        count = 3_000_000_000 // nbytes
        path.write_bytes(container([entry("words", 9, struct.pack("<IQ", kind, count))]))
        os.truncate(path, 3_000_001_000)
        said = f"metadata 'words' is an array of {count} items, and all arrays may have"
        assert said in refusal(GGUFFile, path)
    path.write_bytes(container([entry("words", 8, struct.pack("<Q", 1 << 24))]))
    os.truncate(path, 3_000_000_000)
    said = "keys, names and strings up to metadata 'words' take more than 16777216 bytes"
    assert said in refusal(GGUFFile, path)


def test_limits_hold_for_all_metadata_together(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_module, "_ITEM_LIMIT", 6)
    monkeypatch.setattr(gguf_module, "_TEXT_LIMIT", 20)
    words, path = struct.pack("<IQ", 8, 3) + text("a") * 3, tmp_path / "m.gguf"
    entries = [entry(f"k{i}", 9, words) for i in range(3)]
    path.write_bytes(container(entries[:2]))
    assert len(GGUFFile(path).metadata["k1"]) == 3
    path.write_bytes(container(entries))
    assert "metadata 'k2' is an array of 3 items" in refusal(GGUFFile, path)
    path.write_bytes(container([entry("a", 8, text("x" * 9)), entry("b", 8, text("y" * 10))]))
    assert "up to metadata 'b' take more than 20 bytes" in refusal(GGUFFile, path)


def test_the_smallest_container_opens(tmp_path):
    (tmp_path / "m.gguf").write_bytes(
        container([entry("a", 4, U32)], [info("a"), info("b", offset=32)], bytes(64))
    )
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.metadata == {"a": 1} and [*file.weights] == ["a", "b"]
    assert file.weights["b"].shape == (8,)


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.6, 0.9, 0.9999])
def test_truncated_files(keep, tmp_path):
    make_gguf(tmp_path / "m.gguf", kinds="Q8_0")
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[: int(len(raw) * keep)])
    assert "truncated" in refusal(open_checkpoint, tmp_path / "m.gguf")


def test_missing_unreadable_and_folders(tmp_path):
    assert "no such file" in refusal(GGUFFile, tmp_path / "none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "cannot be read" in refusal(GGUFFile, tmp_path / "folder.gguf")


def test_text_that_is_not_utf8_in_an_array_is_named_when_it_is_read(tmp_path):
    value = struct.pack("<IQ", 8, 3) + text("a") + text("b") + text(b"\xff")
    (tmp_path / "m.gguf").write_bytes(container([entry("words", 9, value)]))
    words = GGUFFile(tmp_path / "m.gguf").metadata["words"]
    assert words[0] == "a" and "metadata 'words'[2] is b'\\xff'" in refusal(lambda: words[2])
    assert "metadata 'words'[2] is b'\\xff'" in refusal(lambda: list(words))


# files and their places


def test_names_of_parts():
    assert part_names("m-00002-of-00003.gguf") == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert part_names("m.gguf") == ["m.gguf"]
    assert part_names("m-00001-of-00000.gguf") == ["m-00001-of-00000.gguf"]


def test_split_files(tmp_path):
    judge = make_gguf(tmp_path / "m.gguf", kinds="Q8_0", split=6)
    parts = sorted(tmp_path.iterdir())
    assert [path.name for path in parts] == part_names("m-00001-of-00004.gguf")
    for named in (*parts, tmp_path):
        opened = open_checkpoint(named)
        for name, tensor in opened.tensors.items():
            np.testing.assert_array_equal(tensor.float32(), judge[name])
        assert opened.gguf_metadata["general.architecture"] == "llama"
    parts[2].rename(tmp_path / "elsewhere")
    assert "m-00003-of-00004.gguf cannot be found beside it" in refusal(open_checkpoint, parts[0])
    parts[1].rename(parts[2])
    (tmp_path / "elsewhere").rename(parts[1])
    assert "split.no is" in refusal(open_checkpoint, parts[0])


def test_split_files_of_two_models(tmp_path):
    make_gguf(tmp_path / "a.gguf", split=11)
    make_gguf(tmp_path / "b.gguf", split=11)
    (tmp_path / "b-00001-of-00002.gguf").replace(tmp_path / "a-00002-of-00002.gguf")
    assert "split.no is 0 and split.count 2, expected 1 and 2" in refusal(
        open_checkpoint, tmp_path / "a-00001-of-00002.gguf"
    )


def test_split_files_that_hold_too_few_tensors(tmp_path):
    make_gguf(tmp_path / "m.gguf", split=11)
    path = tmp_path / "m-00001-of-00002.gguf"
    raw, count = path.read_bytes(), b"split.tensors.count" + struct.pack("<I", 5)
    assert raw.count(count + struct.pack("<i", 21)) == 1
    path.write_bytes(raw.replace(count + struct.pack("<i", 21), count + struct.pack("<i", 22)))
    message = refusal(open_checkpoint, path)
    assert "split.tensors.count is 22, but the 2 parts hold 21 tensors" in message


def test_a_folder_with_one_gguf_model(tmp_path):
    make_gguf(tmp_path / "m.gguf")
    assert open_checkpoint(tmp_path).path == tmp_path / "m.gguf"
    make_gguf(tmp_path / "n.gguf")
    refusal(open_checkpoint, tmp_path, words=["holds 2 GGUF files", "m.gguf, n.gguf"])
    make_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path).path == tmp_path


@pytest.mark.parametrize("split", [None, 11])
def test_files_beside_a_gguf_model_that_are_none(split, tmp_path):
    """As on the hub: projectors of images and importance matrices."""
    make_gguf(tmp_path / "m.gguf", **({"split": split} if split else {}))
    for name in ("mmproj-m-F16.gguf", "m.MMPROJ.gguf", "imatrix_m.gguf"):
        (tmp_path / name).write_bytes(b"GGUF, of an image tower")
    model = tmp_path / ("m-00001-of-00002.gguf" if split else "m.gguf")
    assert open_checkpoint(tmp_path).path == model
    for path in tmp_path.glob("m*0*.gguf" if split else "m.gguf"):
        path.unlink()
    refusal(open_checkpoint, tmp_path, words=["holds no model"])


def test_a_type_picks_a_file_of_a_folder(tmp_path, monkeypatch):
    for name in ("m-Q8_0", "m-UD-Q8_0", "m-Q4_K_M", "sub/m-F16", "mmproj-Q8_0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_gguf(tmp_path / f"{name}.gguf")
    make_gguf(tmp_path / "m-Q6_K.gguf", split=11)
    for kind, file in (
        *(("Q8_0", "m-Q8_0"), ("q8_0", "m-Q8_0"), ("UD-Q8_0", "m-UD-Q8_0"), ("F16", "sub/m-F16")),
        *(("Q6_K", "m-Q6_K-00001-of-00002"), ("m-Q4_K_M.gguf", "m-Q4_K_M")),
    ):
        opened = open_checkpoint(f"{tmp_path}:{kind}")
        assert opened.path == tmp_path / f"{file}.gguf" and opened.name == str(opened.path)
    refusal(open_checkpoint, tmp_path, words=["name one of them, or its type", ":Q8_0"])
    words = ["has no GGUF file of the type 'Q5_K'", "m-Q4_K_M.gguf"]
    message = refusal(open_checkpoint, f"{tmp_path}:Q5_K", words=words)
    assert "mmproj" not in message
    (tmp_path / "org" / "name").mkdir(parents=True)
    shutil.copy(tmp_path / "m-Q8_0.gguf", tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)  # like a hub id
    assert open_checkpoint("org/name:Q8_0").path == Path("org/name/m-Q8_0.gguf")
