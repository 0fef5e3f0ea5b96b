"""Low-rank adapters beside the weights, row by row, against PEFT and mlx_lm."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from machine import open_backend, to_run
from making import make_checkpoint, make_tokenizer
from making_adapters import mlx_logits, peft_logits, write_mlx, write_peft, write_random
from transformers import MixtralConfig, MixtralForCausalLM

from backends.conftest import in_chunks, relative_error
from mlx_llama.core import options
from mlx_llama.core.backends import selection
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.mlx_folder import write_mlx as quantize

SIZES = dict(
    hidden_size=72,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    vocab_size=203,
    max_position_embeddings=128,
)
TOKENS = np.random.default_rng(0).integers(3, 203, (3, 11))
ORDERS = ([0, 1, 2], [1, 1, 1], [2, 0, 2])  # adapters of the rows
every_way = pytest.mark.parametrize(
    "name, compile",
    [
        pytest.param(name, compile, id=f"{name}-{compile}")
        for name in to_run()
        for compile in ((False, True) if name != "cuda" else (None,))
        if (name, compile) != ("mlx", True)  # which test_traced_steps has
    ],
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder} of a base and of two adapters by PEFT, with the logits of each over TOKENS."""
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", tokenizer=True, **SIZES)
    some = write_peft(
        base,
        folder / "some",
        1,
        r=4,
        lora_alpha=9,
        target_modules=["q_proj", "v_proj", "down_proj"],
    )
    every = write_peft(
        base,
        folder / "every",
        2,
        r=9,
        lora_alpha=5,
        use_rslora=True,
        target_modules="all-linear",
        alpha_pattern={"layers.1.mlp.up_proj": 11},
    )
    wanted = [peft_logits(base, adapter, TOKENS) for adapter in (None, some, every)]
    return {"base": base, "adapters": [some, every], "wanted": wanted}


def load(name, compile, folders, **how):
    backend = open_backend(name)
    checkpoint = open_checkpoint(folders["base"], adapters=folders["adapters"])
    return backend, backend.load(checkpoint, "float32", compile=compile, **how)


@every_way
def test_attention_beside_experts(name, compile, tmp_path):
    torch.manual_seed(0)
    base = MixtralForCausalLM(
        MixtralConfig(
            **SIZES, num_local_experts=4, num_experts_per_tok=2, bos_token_id=1, eos_token_id=2
        )
    )
    for weight in base.parameters():
        weight.data = 0.1 * torch.randn(weight.shape)
    base.save_pretrained(tmp_path / "base")
    make_tokenizer(tmp_path / "base")
    sea = write_peft(
        tmp_path / "base", tmp_path / "sea", r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"]
    )
    backend, model = load(name, compile, {"base": tmp_path / "base", "adapters": [sea]})
    logits = in_chunks(model, backend.runtime.to_numpy, TOKENS[:1], (0, 11))
    assert relative_error(logits, peft_logits(tmp_path / "base", sea, TOKENS[:1])) < 1e-4


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """(a base whose matrices have whole groups, the same in 4 bits)."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = SIZES | dict(hidden_size=128, intermediate_size=192, head_dim=32, num_attention_heads=4)
    base = make_checkpoint(folder / "wide", tokenizer=True, **sizes)
    quantize(open_checkpoint(base), folder / "low", 4, 64)
    return base, folder / "low"


def greedy(backend, count):
    return backend.sampling_batch([options.resolve({"temperature": 0.0}).options] * count)


@every_way
def test_rows_of_one_batch_have_adapters_of_their_own(name, compile, folders):
    backend, model = load(name, compile, folders)
    assert model.adapters == ("some", "every") and model.make_cache(8, 2).adapters == [1, 1]
    to_numpy = backend.runtime.to_numpy
    for order in ORDERS:
        cache = model.make_cache(64, 3)
        cache.adapters[:] = order
        wanted = np.stack([folders["wanted"][adapter][row] for row, adapter in enumerate(order)])
        logits = to_numpy(model.forward(TOKENS, 0, cache, all_positions=True))
        assert relative_error(logits, wanted) < 1e-4
        for row in range(3):
            cache.trim(6, row)
        for t in range(6, 11):
            logits = to_numpy(model.forward(TOKENS[:, t : t + 1], t, cache))
            assert relative_error(logits, wanted[:, t]) < 1e-4
        for row in range(3):
            cache.trim(10, row)
        drawn = to_numpy(model.step(TOKENS[:, 10:], 10, cache, greedy(backend, 3)))
        assert drawn[:, 0].tolist() == wanted[:, 10].argmax(axis=1).tolist()
        # goes on where the last step ended
        following = to_numpy(model.step(drawn, 11, cache, greedy(backend, 3)))
        alone = []
        for row, adapter in enumerate(order):
            single = model.make_cache(64)
            single.adapters[0] = adapter
            text = [[*TOKENS[row].tolist(), int(drawn[row, 0])]]
            alone.append(int(to_numpy(model.forward(text, 0, single)).argmax()))
        assert following[:, 0].tolist() == alone


@pytest.mark.slow
def test_traced_steps_take_the_rows_adapters_as_arrays(folders):
    """MLX's CPU device calls a C++ compiler for a trace: one of three rows serves all orders of
    adapters.
    """
    backend, model = load("mlx", True, folders)
    for order in ORDERS:
        cache = model.make_cache(64, 3)
        cache.adapters[:] = order
        model.forward(TOKENS[:, :10], 0, cache)
        drawn = backend.runtime.to_numpy(model.step(TOKENS[:, 10:], 10, cache, greedy(backend, 3)))
        assert drawn[:, 0].tolist() == [
            int(folders["wanted"][adapter][row, 10].argmax()) for row, adapter in enumerate(order)
        ]
    assert len(model.runner.functions) == 1


@every_way
def test_rows_without_an_adapter_have_the_bits_of_a_model_without(name, compile, folders):
    backend, model = load(name, compile, folders)
    plain = backend.load(open_checkpoint(folders["base"]), "float32", compile=compile)
    assert plain.adapters == ()
    logits = []
    for llama in (plain, model):
        cache = llama.make_cache(64, 3)
        cache.adapters[:] = [0, 0, 0]
        logits.append(
            [
                backend.runtime.to_numpy(llama.forward(TOKENS[:, :10], 0, cache)),
                backend.runtime.to_numpy(llama.forward(TOKENS[:, 10:], 10, cache)),
            ]
        )
    for got, wanted in zip(*logits):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", [name for name in to_run() if name != "cpu"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(name, dtype, folders):
    """The additions have the activations' width, as in PEFT."""
    backend = open_backend(name)
    model = backend.load(open_checkpoint(folders["base"], adapters=folders["adapters"]), dtype)
    cache = model.make_cache(16, 3)
    cache.adapters[:] = [0, 1, 2]
    logits = backend.runtime.to_numpy(model.forward(TOKENS, 0, cache, all_positions=True))
    wanted = np.stack([folders["wanted"][row][row] for row in range(3)])
    assert relative_error(logits, wanted) < {"float16": 0.01, "bfloat16": 0.08}[dtype]


def test_several_processes_are_refused(folders, monkeypatch):
    backend = open_backend("cuda")
    monkeypatch.setattr(selection, "world", SimpleNamespace(backend="cuda", size=2))
    with pytest.raises(BackendError, match="adapters are not split over several processes"):
        backend.load(open_checkpoint(folders["base"], adapters=folders["adapters"]))


@pytest.mark.parametrize("bits", [8, 16])
def test_other_rows_do_not_change_a_row_s_bits(bits, wide, tmp_path):
    """Of compiled programs, on low-bit weights: alone, among rows with the same adapter, with
    another, and without.
    """
    _, low = wide
    adapters = [
        write_random(low, tmp_path / name, seed) for seed, name in enumerate(("one", "two"))
    ]
    model = open_backend("cpu").load(
        open_checkpoint(low, adapters=adapters), activation_bits=bits, compile=True
    )
    alone = {}
    for adapter in (0, 1, 2):
        cache = model.make_cache(64)
        cache.adapters[0] = adapter
        alone[adapter] = [
            model.forward(TOKENS[:1, :10], 0, cache)[0],
            model.forward(TOKENS[:1, 10:], 10, cache)[0],
        ]
    assert not np.array_equal(alone[1][1], alone[2][1])
    assert not np.array_equal(alone[0][1], alone[1][1])
    for order in ([0, 1, 2], [2, 2, 1, 0, 1], [1, 1], [1, 0]):
        cache = model.make_cache(64, len(order))
        cache.adapters[:] = order
        rows = np.repeat(TOKENS[:1], len(order), axis=0)
        for part, logits in enumerate(
            (model.forward(rows[:, :10], 0, cache), model.forward(rows[:, 10:], 10, cache))
        ):
            for row, adapter in enumerate(order):
                np.testing.assert_array_equal(logits[row], alone[adapter][part])


@pytest.mark.parametrize("low_bit", [False, True], ids=["full width", "4 bits"])
def test_mlx_lm_s_adapters(low_bit, wide, tmp_path, backend):
    base = wide[low_bit]
    folder = write_mlx(base, tmp_path / "adapter")
    wanted = mlx_logits(base, folder, TOKENS)
    model = backend.load(
        open_checkpoint(base, adapters=[folder]),
        "float32",
        compile=False if backend.name == "cpu" else None,
    )
    to_numpy, cache = backend.runtime.to_numpy, model.make_cache(16, 3)
    assert relative_error(in_chunks(model, to_numpy, TOKENS, (0, 11)), wanted) < 1e-4
    cache.adapters[:] = [0, 0, 0]
    plain = to_numpy(model.forward(TOKENS, 0, cache, all_positions=True))
    assert np.abs(plain - wanted).max() > 1e-2
