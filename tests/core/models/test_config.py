"""Defaults of config.json, judged by transformers; and everything that must be refused, by name."""

import json
import math

import pytest
from hypothesis import given, strategies
from making import config_fields
from transformers import LlamaConfig as TheirLlama, MistralConfig as TheirMistral

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.models.config import LlamaConfig


def test_defaults_are_those_of_transformers():
    needed = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "vocab_size": 99,
    }
    for kind, theirs in (("llama", TheirLlama), ("mistral", TheirMistral)):
        ours, theirs = LlamaConfig.from_dict({"model_type": kind} | needed), theirs(**needed)
        assert ours.num_key_value_heads == theirs.num_key_value_heads
        assert ours.max_position_embeddings == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
        assert ours.bos_token_id == theirs.bos_token_id
        assert ours.eos_token_ids == (theirs.eos_token_id,)
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings
        assert ours.dtype == "float32"


def test_null_key_value_heads_means_one_per_head():
    assert LlamaConfig.from_dict(config_fields(num_key_value_heads=None)).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, (7,)), ([7, 3, 7], (7, 3)), (None, ()), ([], ()), (-1, ()), (0, (0,))],
)
def test_eos_token_ids(value, expected):
    assert LlamaConfig.from_dict(config_fields(eos_token_id=value)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, ("linear", 10000.0, 2.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}},
            ("linear", 10000.0, 2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 500},
            ("dynamic", 500.0, 2.0),
        ),
        (
            {"rope_theta": 500, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
            ("default", 7e5, None),
        ),
        (
            {"rope_theta": 500, "rope_parameters": {"rope_type": "default"}},
            ("default", 500.0, None),
        ),
        ({"rope_theta": 500, "rope_parameters": {}}, ("default", 500.0, None)),
        # the old key wins where both are there
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "default"},
            },
            ("linear", 10000.0, 4.0),
        ),
    ],
    ids=str,
)
def test_both_spellings_of_rope(fields, expected):
    raw = config_fields(**fields)
    ours = LlamaConfig.from_dict(raw).rope
    theirs = TheirLlama(**json.loads(json.dumps(raw))).rope_parameters
    assert (ours.type, ours.theta, ours.factor) == expected
    assert (theirs["rope_type"], theirs["rope_theta"]) == expected[:2]
    if expected[2] is not None:
        assert theirs["factor"] == expected[2]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "GPT2LMHeadModel"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures",
        "LlamaForSequenceClassification",
    ),
    ({"architectures": "LlamaForCausalLM"}, "architectures", "LlamaForCausalLM"),
    ({"architectures": None, "model_type": "gemma"}, "model_type", "gemma"),
    ({"model_type": "mistral"}, "model_type", "mistral"),
    ({"hidden_act": "gelu"}, "hidden_act", "gelu"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config", "exl2"),
    (
        {"quantization": {"bits": 4, "group_size": 64, "mode": "nf4"}},
        "quantization.mode",
        "nf4",
    ),
    ({"hidden_size": 10**12}, "hidden_size", "1000000000000"),
    ({"hidden_size": 0}, "hidden_size", "0"),
    ({"hidden_size": -64}, "hidden_size", "-64"),
    ({"hidden_size": "64"}, "hidden_size", "'64'"),
    ({"hidden_size": 64.5}, "hidden_size", "64.5"),
    ({"hidden_size": True}, "hidden_size", "True"),
    ({"hidden_size": None}, "hidden_size", "None"),
    ({"hidden_size": 66}, "hidden_size", "66"),
    ({"num_attention_heads": 0}, "num_attention_heads", "0"),
    ({"num_hidden_layers": True}, "num_hidden_layers", "True"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers", "1000000000"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "3"),
    ({"num_key_value_heads": 8}, "num_key_value_heads", "8"),
    ({"head_dim": 15}, "head_dim", "15"),
    ({"vocab_size": 0}, "vocab_size", "0"),
    ({"vocab_size": []}, "vocab_size", "[]"),
    ({"intermediate_size": -1}, "intermediate_size", "-1"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps", "nan"),
    ({"rms_norm_eps": math.inf}, "rms_norm_eps", "inf"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "0"),
    ({"rms_norm_eps": "1e-5x"}, "rms_norm_eps", "1e-5x"),
    ({"rms_norm_eps": "1e999"}, "rms_norm_eps", "1e999"),
    ({"max_position_embeddings": 0}, "max_position_embeddings", "0"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "yes"),
    ({"attention_bias": 1}, "attention_bias", "1"),
    ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, "attention_bias", "True"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window", "0"),
    (
        {
            "architectures": ["MistralForCausalLM"],
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "layer_types[1]",
        "full_attention",
    ),
    (
        {"layer_types": ["sliding_attention", "full_attention"]},
        "layer_types[0]",
        "sliding_attention",
    ),
    ({"layer_types": ["full_attention"]}, "layer_types", "full_attention"),
    ({"torch_dtype": "float64"}, "torch_dtype", "float64"),
    ({"dtype": "float8_e4m3fn"}, "dtype", "float8_e4m3fn"),
    ({"eos_token_id": 384}, "eos_token_id", "384"),
    ({"eos_token_id": "</s>"}, "eos_token_id", "</s>"),
    ({"eos_token_id": [1, True]}, "eos_token_id", "True"),
    ({"bos_token_id": [1]}, "bos_token_id", "[1]"),
    ({"bos_token_id": 10**20}, "bos_token_id", str(10**20)),
    ({"rope_theta": 0}, "rope_theta", "0"),
    ({"rope_theta": -1e4}, "rope_theta", "-10000"),
    ({"rope_theta": math.nan}, "rope_theta", "nan"),
    ({"rope_theta": "1e4x"}, "rope_theta", "1e4x"),
    ({"rope_theta": None}, "rope_theta", "None"),
    ({"rope_scaling": "linear"}, "rope_scaling", "linear"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_scaling.type", "ntk"),
    ({"rope_scaling": {"rope_type": "su", "factor": 2.0}}, "rope_scaling.rope_type", "su"),
    (
        {"rope_parameters": {"rope_type": "proportional"}},
        "rope_parameters.rope_type",
        "proportional",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor",
        "0.5",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention",
        "default",
    ),
    (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}},
        "rope_scaling.mrope_section",
        "[1, 2]",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor", "missing"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor", "0"),
    ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "rope_scaling.factor", "0.5"),
    ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "rope_scaling.factor", "inf"),
    ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "rope_scaling.high_freq_factor", "0.5"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "rope_scaling.low_freq_factor", "None"),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}},
        "rope_scaling.original_max_position_embeddings",
        "0",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": -1}},
        "rope_scaling.beta_fast",
        "-1",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": "no"}},
        "rope_scaling.truncate",
        "no",
    ),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1000}},
        "rope_scaling.factor",
        "0.256",
    ),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "head_dim", "2"),
]


@pytest.mark.parametrize(
    ("fields", "field", "shown"), REFUSED, ids=[str(r[0])[:70] for r in REFUSED]
)
def test_a_bad_field_is_named_with_the_file_and_what_was_found(fields, field, shown):
    raw = config_fields(**fields)
    if fields.get("architectures", 0) is None:
        del raw["architectures"]
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_dict(raw, "some/config.json")
    message = str(caught.value)
    assert message.startswith("some/config.json: ")
    assert field in message and shown in message and "\n" not in message


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"],
)
def test_a_missing_field_is_named(field):
    raw = config_fields()
    del raw[field]
    with pytest.raises(ConfigError, match=f"config.json: field {field} is missing"):
        LlamaConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[]", "list"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "config.json"),
        (b"[" * 200_000, "config.json"),
    ],
    ids=["empty", "half", "list", "bytes", "digits", "deep"],
)
def test_a_file_that_is_not_a_config(data, expected, tmp_path):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_file(tmp_path / "config.json")
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        LlamaConfig.from_file(tmp_path)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_dict(config_fields(hidden_act="x" * 10_000 + "\n"))
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


BAD = {
    "vocab_size": -1,
    "hidden_size": None,
    "num_hidden_layers": "two",
    "num_attention_heads": 0,
    "num_key_value_heads": 0,
    "head_dim": "x",
    "intermediate_size": 1.5,
    "rms_norm_eps": 7,
    "max_position_embeddings": 0,
    "attention_bias": 1,
    "tie_word_embeddings": "yes",
    "hidden_act": "gelu",
    "rope_scaling": {"rope_type": "ntk"},
    "eos_token_id": "end",
    "bos_token_id": [1],
    "torch_dtype": "int8",
    "partial_rotary_factor": 0.5,
    "quantization_config": {"quant_method": "exl2"},
}


def refused(fields):
    with pytest.raises(ConfigError) as caught:
        LlamaConfig.from_dict(fields)
    return str(caught.value)


def collected(fields):
    errors = []
    config = LlamaConfig.from_dict(fields, report=errors.append)
    assert isinstance(config, LlamaConfig)
    return [str(error) for error in errors]


@given(names=strategies.sets(strategies.sampled_from(sorted(BAD)), min_size=1))
def test_every_bad_field_is_reported_once(names):
    """With the error that it alone causes, and without errors that only the others cause."""
    fields = config_fields()
    wanted = {refused(fields | {name: BAD[name]}).split(", expected")[0] for name in names}
    fields |= {name: BAD[name] for name in names}
    assert sorted(error.split(", expected")[0] for error in collected(fields)) == sorted(wanted)
    assert refused(fields).split(", expected")[0] in wanted


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"num_key_value_heads": 3}, ["num_key_value_heads is 3"]),
        (
            {"num_key_value_heads": 3, "hidden_act": "gelu"},
            ["hidden_act", "num_key_value_heads is 3"],
        ),
        (
            {"num_attention_heads": "four"},
            ["num_attention_heads"],
        ),  # and no word about its divisors
        ({"num_hidden_layers": 0, "layer_types": ["full_attention"] * 2}, ["num_hidden_layers"]),
        ({"layer_types": 5, "vocab_size": 0}, ["vocab_size", "layer_types is 5"]),
        ({"vocab_size": 0, "eos_token_id": 70_000}, ["vocab_size"]),
        ({"head_dim": 3, "rms_norm_eps": 0}, ["head_dim is 3", "rms_norm_eps"]),
    ],
)
def test_checks_across_fields_among_bad_ones(fields, expected):
    errors = collected(config_fields() | fields)
    assert len(errors) == len(expected) and all(
        any(part in error for error in errors) for part in expected
    ), errors


def test_another_architecture_ends_the_reading():
    errors = []
    with pytest.raises(ConfigError, match="Gemma"):
        LlamaConfig.from_dict(
            config_fields(architectures=["GemmaForCausalLM"], vocab_size=0), report=errors.append
        )
    assert errors == []


def test_a_good_config_has_nothing_to_report():
    fields = config_fields()
    assert collected(fields) == []
    assert LlamaConfig.from_dict(fields, report=print) == LlamaConfig.from_dict(fields)


def test_numbers_of_another_type_are_read_and_told():
    rope = {"rope_type": "linear", "factor": "2.0"}
    fields = {"max_position_embeddings": 256.0, "rms_norm_eps": "1e-5", "rope_scaling": rope}
    wanted = LlamaConfig.from_dict(
        config_fields(rms_norm_eps=1e-5, rope_scaling=rope | {"factor": 2})
    )
    config = LlamaConfig.from_dict(config_fields(**fields))
    assert config == wanted and not wanted.notices
    assert [type(config.max_position_embeddings), type(config.rms_norm_eps)] == [int, float]
    assert sorted(config.notices) == [
        "config.json: max_position_embeddings is 256.0, read as 256",
        "config.json: rms_norm_eps is '1e-5', read as 1e-05",
        "config.json: rope_scaling.factor is '2.0', read as 2.0",
    ]
