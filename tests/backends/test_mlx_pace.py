"""Long prompts on MLX: little work waits on the device, so that Ctrl-C is heard, and no value
changes.
"""

from __future__ import annotations

import signal

import mlx.core as mx
import numpy as np
import pytest
from machine import device_of
from making import config_fields

from mlx_llama import load
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.mlx_native.kernels import pace

TOKENS = np.random.default_rng(1).integers(3, 384, (1, 200)).astype(np.int32)


@pytest.fixture(params=[None, 8], ids=["plain", "cache_bits"])
def llm(request, backend, toy):
    if backend.name != "mlx":
        pytest.skip("the other backends are not lazy")
    return load(
        toy, backend="mlx", device=device_of(backend), dtype="float32", cache_bits=request.param
    )


def forward(llm, cache=None):
    """Logits after TOKENS, in chunks of 64."""
    cache = cache or llm.model.make_cache(TOKENS.shape[1])
    for start in range(0, TOKENS.shape[1], 64):
        logits = llm.model.forward(TOKENS[:, start : start + 64], start, cache)
        mx.async_eval(*cache.arrays())
    return np.array(logits)


def test_a_paced_prompt_has_the_same_bits_and_waits_for_each_group(llm, monkeypatch):
    wanted = forward(llm)
    layers = llm.model.config.num_hidden_layers
    waits, wait = [], mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (waits.append(arrays), wait(*arrays))[1])
    forward(llm)
    assert not waits, "a short prompt waits"
    llm.model.pace.limit = 0.0
    np.testing.assert_array_equal(forward(llm), wanted)
    assert len(waits) == 4 * layers - 1  # all but the newest


def test_an_interrupt_ends_a_prompt_at_the_next_group(llm, ctrl_c, monkeypatch):
    wanted = forward(llm)
    llm.model.pace.limit = 0.0
    cache = llm.model.make_cache(TOKENS.shape[1])
    waits, wait = [], mx.eval

    def interrupted(*arrays):
        waits.append(arrays)
        if len(waits) == 3:
            signal.raise_signal(signal.SIGINT)
        wait(*arrays)

    monkeypatch.setattr(mx, "eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(llm, cache)
    assert len(waits) == 3 and cache.length % 64 == 0
    cache.reset()
    np.testing.assert_array_equal(forward(llm, cache), wanted)


def test_the_width_of_a_chunk_follows_the_largest_product(monkeypatch):
    shape = config_fields(hidden_size=2048, intermediate_size=5632, vocab_size=32000)
    config = LlamaConfig.from_dict(shape)
    monkeypatch.setattr(pace.platform, "system", lambda: "Linux")
    cpu = mx.Device(mx.cpu)
    # 2 * 2 * 5632 * 2048 * 10 operations take a quarter of a second
    assert pace.Pace(config, cpu).width == 10
    assert pace.Pace(config, cpu, is_low_bit=True).width == 1
    small = LlamaConfig.from_dict(shape | {"hidden_size": 64, "intermediate_size": 128})
    assert pace.Pace(small, cpu).width > 4096
    assert pace.Pace(config, mx.Device(mx.gpu)).width == pace.UNLIMITED
    monkeypatch.setattr(pace.platform, "system", lambda: "Darwin")
    assert pace.Pace(config, cpu).width == pace.UNLIMITED
