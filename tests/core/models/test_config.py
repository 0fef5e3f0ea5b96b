"""Defaults of config.json, judged by transformers; and everything that must be refused, by name."""

import json
import math

import pytest
from hypothesis import given, strategies
from making import config_fields, refusal
from transformers import LlamaConfig as TheirLlama, MistralConfig as TheirMistral

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.models.config import LlamaConfig


def test_defaults_are_those_of_transformers():
    needed = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=99)
    needed["num_attention_heads"] = 16
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


LINEAR, DEFAULT = {"rope_type": "linear"}, {"rope_type": "default"}
TWICE, SMALL = {"factor": 2}, {"rope_theta": 500}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_scaling": {"type": "linear"} | TWICE}, ("linear", 10000.0, 2.0)),
        ({"rope_scaling": LINEAR | {"type": "yarn"} | TWICE}, ("linear", 10000.0, 2.0)),
        ({"rope_scaling": {"rope_type": "dynamic"} | TWICE} | SMALL, ("dynamic", 500.0, 2.0)),
        ({"rope_parameters": DEFAULT | {"rope_theta": 7e5}} | SMALL, ("default", 7e5, None)),
        ({"rope_parameters": DEFAULT} | SMALL, ("default", 500.0, None)),
        ({"rope_parameters": {}} | SMALL, ("default", 500.0, None)),
        # the old key wins where both are there
        ({"rope_scaling": LINEAR | TWICE, "rope_parameters": DEFAULT}, ("linear", 10000.0, 2.0)),
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
BAD_VALUES = {
    "architectures": [["GPT2LMHeadModel"], ["LlamaForSequenceClassification"], "LlamaForCausalLM"],
    "model_type": ["mistral"],
    "hidden_act": ["gelu"],
    "partial_rotary_factor": [0.5],
    "hidden_size": [10**12, 0, -64, "64", 64.5, True, None, 66],
    "num_attention_heads": [0],
    "num_hidden_layers": [True, 10**9],
    "num_key_value_heads": [3, 8],
    "head_dim": [15],
    "vocab_size": [0, []],
    "intermediate_size": [-1],
    "rms_norm_eps": [math.nan, math.inf, 0, "1e-5x", "1e999"],
    "max_position_embeddings": [0],
    "tie_word_embeddings": ["yes"],
    "attention_bias": [1],
    "layer_types": [["full_attention"]],
    "torch_dtype": ["float8"],
    "dtype": ["float8_e4m3fn"],
    "eos_token_id": [384, "</s>"],
    "bos_token_id": [[1], 10**20],
    "rope_theta": [0, -1e4, math.nan, "1e4x", None],
    "rope_scaling": ["linear"],
}
# (rope_scaling, its bad or missing field)
BAD_ROPES = [
    (dict(type="ntk", factor=2.0), "type"),
    (dict(rope_type="su", factor=2.0), "rope_type"),
    (dict(rope_type="default", mrope_section=[1, 2]), "mrope_section"),
    (dict(type="linear"), "factor"),
    (dict(type="linear", factor=0), "factor"),
    (dict(type="dynamic", factor=0.5), "factor"),
    (dict(type="linear", factor=math.inf), "factor"),
    (LLAMA3 | {"high_freq_factor": 0.5}, "high_freq_factor"),
    (LLAMA3 | {"low_freq_factor": None}, "low_freq_factor"),
    (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    (dict(type="yarn", factor=4.0, beta_fast=-1), "beta_fast"),
    (dict(type="yarn", factor=4.0, truncate="no"), "truncate"),
]
MISTRAL = {"architectures": ["MistralForCausalLM"]}
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
REFUSED = [
    *(
        ({name: value}, name, repr(value))
        for name, values in BAD_VALUES.items()
        for value in values
    ),
    *(
        ({"rope_scaling": rope}, f"rope_scaling.{name}", repr(rope.get(name, "missing")).strip("'"))
        for rope, name in BAD_ROPES
    ),
    ({"architectures": None, "model_type": "gemma"}, "model_type", "gemma"),
    ({"quantization_config": {"quant_method": "exl2"}}, "quantization_config", "exl2"),
    ({"quantization": {"bits": 4, "group_size": 64, "mode": "nf4"}}, "quantization.mode", "nf4"),
    (MISTRAL | {"attention_bias": True}, "attention_bias", "True"),
    (MISTRAL | {"sliding_window": 0}, "sliding_window", "0"),
    (MISTRAL | TWO_KINDS, "layer_types[1]", "full_attention"),
    (TWO_KINDS, "layer_types[0]", "sliding_attention"),
    (
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1000}},
        "rope_scaling.factor",
        "0.256",
    ),
    *(
        ({"rope_parameters": rope}, f"rope_parameters.{name}", shown)
        for rope, name, shown in (
            ({"rope_type": "axial"}, "rope_type", "proportional"),
            (
                {"rope_type": "default", "partial_rotary_factor": 0.5},
                "partial_rotary_factor",
                "0.5",
            ),
            ({"full_attention": {"rope_type": "default"}}, "full_attention", "default"),
        )
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
    message = refusal(LlamaConfig.from_dict, raw, "some/config.json", kind=ConfigError)
    assert message.startswith("some/config.json: ") and field in message and shown in message


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
    message = refusal(LlamaConfig.from_file, tmp_path / "config.json", kind=ConfigError)
    assert expected in message and str(tmp_path / "config.json") in message


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        LlamaConfig.from_file(tmp_path)


def test_a_long_value_is_cut_in_the_message():
    raw = config_fields(hidden_act="x" * 10_000 + "\n")
    assert len(refusal(LlamaConfig.from_dict, raw, kind=ConfigError)) < 300


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
    return refusal(LlamaConfig.from_dict, fields, kind=ConfigError)


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
        ({"num_key_value_heads": 3, "hidden_act": "gelu"}, ["hidden_act", "key_value_heads is 3"]),
        # and no word about its divisors
        ({"num_attention_heads": "four"}, ["num_attention_heads"]),
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
