"""Nemotron-NAS, whose layers differ. transformers has no class of it: mlx-lm judges, and llama.cpp
its GGUF files.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases.architectures import TOKENS, check_steps, llama_cpp_logits, run
from making import make_tokenizer, random_tensors, refusal
from safetensors.numpy import save_file

from backends.conftest import mlx_lm_logits, relative_error
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx

# query heads for each key-value head, and the MLP's width; 0 for none
LAYERS = ((0, 2.0), (4, 5.2), (2, 0), (0, 0), (8, 2.5), (1, 4.0), (0, 3.0))
# llama.cpp 0.3.36 takes the heads' size from the first layer, and without an MLP drops what
# attention adds.
IN_LLAMA_CPP = (*LAYERS[1:2], LAYERS[0], *LAYERS[3:])


def describe(heads: int, width: float) -> dict:
    return {
        "attention": {
            "n_heads_in_group": heads or None,
            "no_op": not heads,
            "replace_with_linear": False,
        },
        "ffn": {"ffn_mult": width or None, "no_op": not width, "replace_with_linear": False},
    }


CONFIG = dict(
    architectures=["DeciLMForCausalLM"],
    model_type="nemotron-nas",
    hidden_size=192,
    num_hidden_layers=len(LAYERS),
    num_attention_heads=8,
    num_key_value_heads=None,
    intermediate_size=None,
    vocab_size=384,
    max_position_embeddings=256,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    attention_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
    torch_dtype="float32",
    bos_token_id=1,
    eos_token_id=2,
    block_configs=[describe(*layer) for layer in LAYERS],
)


@functools.cache
def made(layers=LAYERS) -> tuple[Path, np.ndarray]:
    """A folder of random weights, and mlx-lm's logits for TOKENS."""
    folder = Path(tempfile.mkdtemp(prefix="nemotron"))
    blocks = [describe(*layer) for layer in layers]
    config = CONFIG | dict(num_hidden_layers=len(layers), block_configs=blocks)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = LlamaConfig.from_dict(config).stored_shapes()
    tensors = {name: values[: shapes[name][0]] for name, values in random_tensors(config).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    make_tokenizer(folder)
    return folder, mlx_lm_logits(folder, TOKENS)


@functools.cache
def exported(format: str, layers=LAYERS) -> Path:
    path = Path(tempfile.mkdtemp()) / "model.gguf"
    write_gguf(open_checkpoint(made(layers)[0]), path, format)
    return path


@pytest.mark.parametrize("compile", [None, False])
def test_logits_are_those_of_mlx_lm(compile, backend):
    folder, wanted = made()
    for cuts in ((0, 30), (0, 20, 29, 30)):
        logits = run(backend, open_checkpoint(folder), cuts, compile=compile)
        assert relative_error(logits, wanted) < 1e-5


def test_a_step_of_rows_chooses_the_likeliest(backend):
    check_steps(backend, *made())


def test_a_gguf_file_has_the_same_logits(backend):
    checkpoint = open_checkpoint(exported("F32"))
    assert checkpoint.gguf_metadata["deci.attention.head_count_kv"].tolist() == [
        heads and 8 // heads for heads, _ in LAYERS
    ]
    assert relative_error(run(backend, checkpoint, (0, 20, 29, 30)), made()[1]) < 1e-5


@pytest.mark.parametrize("format", ["F32", "Q8_0"])
def test_llama_cpp_reads_the_file(format):
    path = exported(format, IN_LLAMA_CPP)
    logits = run(select("cpu"), open_checkpoint(path), (0, 29, 30))[0]
    assert relative_error(logits, llama_cpp_logits(path)) < (0.1 if format == "Q8_0" else 1e-5)


def test_a_low_bit_folder_has_the_logits_of_mlx_lm(backend, tmp_path):
    write_mlx(open_checkpoint(exported("F32")), tmp_path / "out", 4, 32)
    logits = run(backend, open_checkpoint(tmp_path / "out"), (0, 29, 30))
    assert relative_error(logits, mlx_lm_logits(tmp_path / "out", TOKENS)) < 1e-4


@pytest.mark.parametrize(
    "at, value, message",
    [
        ("attention", {"replace_with_linear": True}, "block_configs[1].attention.replace_with_lin"),
        ("attention", {"n_heads_in_group": 3}, "a divisor of num_attention_heads (8)"),
        ("attention", {"n_heads_in_group": 4, "window_length": 8}, "window_length is 8"),
        ("ffn", {"replace_with_linear": True, "ffn_mult": 1.0}, "which this package lacks"),
        ("ffn", {}, "block_configs[1].ffn.ffn_mult is missing"),
        ("ffn", None, "block_configs[1].ffn is None, expected an object"),
    ],
)
def test_a_layer_that_does_not_run_is_named(at, value, message):
    blocks = [describe(4, 2.0), describe(4, 2.0) | {at: value}, *CONFIG["block_configs"][2:]]
    assert message in refusal(
        LlamaConfig.from_dict, CONFIG | {"block_configs": blocks}, kind=ConfigError
    )


@pytest.mark.parametrize("heads", [[], ["8", 8], None])
def test_malformed_heads_are_reported_and_reading_goes_on(heads):
    errors = []
    LlamaConfig.from_dict(CONFIG | {"num_attention_heads": heads}, report=errors.append)
    assert errors and all("num_attention_heads" in str(error) for error in errors)


def test_a_list_of_layers_fits_their_number():
    fields = CONFIG | {"block_configs": CONFIG["block_configs"][1:]}
    assert "expected a list of 7 layers" in refusal(LlamaConfig.from_dict, fields, kind=ConfigError)
