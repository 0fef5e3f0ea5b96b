"""Caches of layers whose keys and values have several shapes (Gemma 4)."""

from __future__ import annotations

import numpy as np
import pytest
from cases.architectures import TOKENS

from backends.conftest import relative_error
from backends.test_architectures import made
from mlx_llama.api.cache_file import Identity, read_cache, write_cache
from mlx_llama.core.backends.positions import position_nbytes
from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint

E4B = "Gemma 4 E4B"


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
