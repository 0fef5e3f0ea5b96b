"""Caches of layers whose keys and values have several shapes (Gemma 4)."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from cases.architectures import TOKENS

from backends.conftest import relative_error
from backends.test_architectures import FAMILIES, made
from backends.test_hybrids import decode
from mlx_llama.api.cache_file import Identity, read_cache, write_cache
from mlx_llama.core.backends.positions import position_nbytes
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.parity.peer import TransformersReference

E4B = "Gemma 4 E4B"
EXPERTS = "Gemma 4 26B-A4B"
COUNT = 200


@functools.cache
def greedy(name: str) -> list[int]:
    """transformers' COUNT greedy tokens after the first row of TOKENS."""
    folder, _ = made(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = torch.from_numpy(TOKENS[:1]).long()
    options = dict(max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    return model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("Gemma 4")])
def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(name, backend):
    model = backend.load(open_checkpoint(made(name)[0]), "float32")
    alone, many = model.make_cache(256), model.make_cache(256, 4)
    model.forward(TOKENS[:1, :-1], 0, alone)
    for row in range(4):
        model.forward(TOKENS[row % 2 : row % 2 + 1, row:-1], 0, many, rows=[row])
    tokens = decode(backend, model, many, TOKENS[[0, 1, 0, 1], -1:], COUNT)
    assert tokens[0].tolist() == greedy(name)
    assert decode(backend, model, alone, TOKENS[:1, -1:], COUNT)[0].tolist() == greedy(name)


@pytest.mark.parametrize("bits", [None, 16, 8])
def test_a_row_continues_from_a_prefix_a_file_and_a_cut(bits, backend, tmp_path):
    folder, wanted = made(E4B)
    checkpoint = open_checkpoint(folder)
    model = backend.load(checkpoint, "float32", cache_bits=bits)
    cache = model.make_cache(40, 3)
    model.forward(TOKENS[:1, :20], 0, cache)
    state = cache.state(0)
    assert {name: array.shape for name, array in state.items()} == {
        "tokens": (20,),
        "keys": (2, 2, 6, 18),  # within the window of 7, for the next token
        "values": (2, 2, 6, 18),
        "keys.1": (2, 2, 20, 40),
        "values.1": (2, 2, 20, 40),
    }
    identity = Identity.of(checkpoint, "float32", bits)
    write_cache(tmp_path / "row.safetensors", state, identity)
    cache.restore(read_cache(tmp_path / "row.safetensors", identity), 1)
    cache.copy_prefix(0, 2, 17)
    cold = model.make_cache(40)
    expected = backend.runtime.to_numpy(model.forward(TOKENS[:1], 0, cold))
    if bits != 8:
        assert relative_error(expected, wanted[:1, -1]) < (1e-4 if bits is None else 2e-2)
    for row, start in ((0, 20), (1, 20), (2, 17)):
        logits = model.forward(TOKENS[:1, start:], start, cache, rows=[row])
        # codes of a file are rounded again to float16
        bound = {None: 1e-5, 16: 1e-3, 8: 0.1}[bits]
        assert relative_error(backend.runtime.to_numpy(logits), expected) < bound, row
    # a file has what the windows see at its end
    assert cache.trim(21, 1) == 21 and cache.trim(19, 1) == 0
    cache.trim(9)
    again = model.forward(TOKENS[:1, 9:], 9, cache, rows=[0])
    assert relative_error(backend.runtime.to_numpy(again), expected) < bound


@pytest.mark.slow_for("16", "E2B", "None-Gemma 4 26B-A4B", "8-Gemma 4 E4B")
@pytest.mark.parametrize("name", [E4B, "Gemma 4 E2B", EXPERTS])
@pytest.mark.parametrize("bits", [None, 16, 8])
def test_compiled_bits_do_not_depend_on_chunks_and_company(name, bits):
    """Cold, in chunks, token by token, from a prefix, after a cut, among other rows."""
    model = select("cpu").load(open_checkpoint(made(name)[0]), "float32", cache_bits=bits)
    assert model.is_batch_invariant
    wanted = model.forward(TOKENS, 0, model.make_cache(40, 2), all_positions=True)
    plain = select("cpu").load(open_checkpoint(made(name)[0]), compile=False, cache_bits=bits)
    expected = plain.forward(TOKENS, 0, plain.make_cache(40, 2), all_positions=True)
    # codes of keys at the border of two differ
    assert relative_error(wanted, expected) < {None: 1e-5, 16: 2e-3, 8: 0.05}[bits]
    cache = model.make_cache(40, 5)
    for start, end in ((0, 7), (7, 23), (23, 30)):
        logits = model.forward(TOKENS[:1, start:end], start, cache, rows=[1])
    np.testing.assert_array_equal(logits, wanted[:1, -1])
    model.forward(TOKENS[1:, :16], 0, cache, rows=[4])
    cache.copy_prefix(1, 3, 16)
    for t in range(16, 30):
        single = model.forward(TOKENS[:, t : t + 1], t, cache, rows=[3, 4])
        np.testing.assert_array_equal(single, wanted[:, t])
    cache.trim(11, 3)
    again = model.forward(TOKENS[:1, 11:], 11, cache, rows=[3], all_positions=True)
    np.testing.assert_array_equal(again, wanted[:1, 11:])


def test_memory_is_counted_by_shape(backend):
    config = open_checkpoint(made(E4B)[0]).config
    # two layers of 2 heads of 18 numbers, and two of 2 of 40; the others read theirs
    assert position_nbytes(config, 4) == 4 * 2 * 2 * 2 * (18 + 40)
    assert position_nbytes(config, 4, 8) == 2 * 2 * 2 * (18 + 2 + 40 + 4)
    model = backend.load(open_checkpoint(made(E4B)[0]), "float32")
    cache = model.make_cache(256)
    model.forward(TOKENS[:1], 0, cache)
    padding = backend.name == "cpu"  # rows of whole vectors of 16
    assert cache.position_nbytes == 4 * 2 * 2 * 2 * ((32 + 48) if padding else (18 + 40))


def test_a_state_of_another_model_is_refused(backend):
    model = backend.load(open_checkpoint(made(E4B)[0]), "float32")
    cache = model.make_cache(40)
    model.forward(TOKENS[:1], 0, cache)
    state = cache.state(0)
    with pytest.raises(ContextError, match="keys.1 have the shape .*by another model"):
        cache.restore({name: state[name] for name in ("tokens", "keys", "values")})
    odd = state | {"values.1": np.zeros((2, 2, 30, 18), np.float32)}
    with pytest.raises(ContextError, match="values.1 have the shape .2, 2, 30, 18."):
        cache.restore(odd)


@pytest.mark.parametrize("name", [E4B, EXPERTS])
def test_infinite_activations_of_one_run_do_not_reach_the_next(name):
    model = select("cpu").load(open_checkpoint(made(name)[0]), "float32")

    def answer():
        return model.forward(TOKENS, 0, model.make_cache(40, 2), all_positions=True)

    wanted, (table, *_) = answer(), model.runner.tables
    broken, kept = np.full_like(table.weight, np.inf), table.weight
    with np.errstate(all="ignore"):
        table.weight = broken
        assert (answer() != wanted).all()
    table.weight = kept
    np.testing.assert_array_equal(answer(), wanted)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("name", [E4B, "Gemma 4 31B", EXPERTS])
def test_probes_are_what_transformers_modules_return(name):
    """Of heads behind their norms, values included, and of the compiled program."""
    checkpoint, seen = open_checkpoint(made(name)[0]), {}
    wanted = TransformersReference(checkpoint).collect(TOKENS[0].tolist(), 2)
    model = select("cpu").load(checkpoint, "float32")
    model.forward(TOKENS[:1], 0, model.make_cache(40), probe=seen.__setitem__)
    assert {"0.value", "3.query", "0.block"} < wanted.keys() < seen.keys()
    for probe in wanted.keys() - {"logits"}:  # their softcap is no module
        values = seen[probe][0]
        values = values.swapaxes(0, 1).reshape(30, -1) if values.ndim == 3 else values
        assert relative_error(values, wanted[probe]) < 2e-5, probe
