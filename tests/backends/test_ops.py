"""Words of the vocabulary (core.ops) on each backend, against torch's and transformers' functions
in float64.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from making import few_experts
from transformers.activations import XIELUActivation
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from backends import conftest
from mlx_llama.core import llama
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import resolve

RNG = np.random.default_rng(5)
B, H, G, D = 1, 4, 2, 16


def made(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def wide(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).double()


def relative_error(got: np.ndarray, wanted: torch.Tensor | np.ndarray) -> float:
    return conftest.relative_error(np.asarray(got), np.asarray(wanted))


@pytest.fixture
def words(backend):
    """(the plain vocabulary, NumPy to the backend's arrays, back)."""
    convert = {
        "mlx": lambda x: __import__("mlx.core").core.array(x),
        "cpu": lambda x: x,
        "cuda": torch.from_numpy,
    }[backend.name]
    return backend.model.ops, convert, backend.runtime.to_numpy


def attention_of_transformers(query, keys, values, scale, mask, cap) -> np.ndarray:
    """Gemma 2's attention, [B, H, T, D]."""
    module = SimpleNamespace(head_dim=D, num_key_value_groups=H // G, training=False)
    hidden = torch.where(torch.from_numpy(mask), 0.0, -torch.inf).double()[None, None]
    mixed, _ = eager_attention_forward(
        module, wide(query), wide(keys), wide(values), hidden, scaling=scale, softcap=cap
    )
    return mixed.transpose(1, 2).numpy()


@pytest.mark.parametrize("T, L", [(1, 20), (7, 20), (300, 310)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_is_that_of_transformers(T, L, window, cap, words):
    ops, convert, back = words
    query, keys, values = 3 * made(B, H, T, D), made(B, G, L, D), made(B, G, L, D)
    columns, rows = np.arange(L)[None], np.arange(L - T, L)[:, None]
    mask = (columns <= rows) & (columns > rows - (window or L))
    stored = [convert(keys), convert(values)]
    if ops.__name__.startswith("mlx_llama"):
        stored = [(part,) for part in stored]
    got = back(ops.attention(convert(query), *stored, 0.3, convert(mask), cap))
    wanted = attention_of_transformers(query, keys, values, 0.3, mask, cap)
    assert relative_error(got, wanted) < 2e-6


def test_norms_gates_and_caps_are_torchs(words):
    ops, convert, back = words
    x, weight = made(2, 3, 24), made(24)
    normed = back(ops.rms_norm(convert(x), convert(weight), 1e-5))
    assert relative_error(normed, F.rms_norm(wide(x), (24,), wide(weight), 1e-5)) < 1e-6
    total, normed = ops.add_rms_norm(convert(x), convert(2 * x), convert(weight), 1e-5)
    assert relative_error(back(normed), F.rms_norm(3 * wide(x), (24,), wide(weight), 1e-5)) < 1e-6
    assert relative_error(back(total), 3 * x) < 1e-6
    gate, up = wide(x).chunk(2, dim=-1)
    for activation, function in (
        ("silu", F.silu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ):
        assert relative_error(back(ops.gate(convert(x), activation)), function(gate) * up) < 1e-6
    # near 0, too, where a difference of exponentials would cancel
    numbers_near_0 = np.float32([[-1], [1]]) * np.logspace(-7, -0.5, 40, dtype=np.float32)
    judge = XIELUActivation(dtype=torch.float64)
    wanted = judge(wide(numbers_near_0)).detach().numpy()
    numbers = (F.softplus(judge.alpha_p), judge.beta + F.softplus(judge.alpha_n))
    curve = back(ops.xielu(convert(numbers_near_0), *(x.item() for x in numbers), 0.5, -1e-6))
    np.testing.assert_allclose(curve, wanted, rtol=2e-6)
    score = made(*x.shape[:-1], 1)
    gated = back(ops.gate_output(convert(x), convert(score)))
    assert relative_error(gated, torch.sigmoid(wide(score)) * wide(x)) < 1e-6
    capped = back(ops.softcap(convert(x), 0.7))
    assert relative_error(capped, 0.7 * torch.tanh(wide(x) / 0.7)) < 1e-6


@pytest.mark.parametrize("normalises", [True, False])
def test_experts_are_chosen_and_weighed_as_in_mixtral(normalises, words):
    ops, convert, back = words
    scores = made(9, 6)
    spec = few_experts(6, used=2, normalises=normalises)
    chosen, shares = ops.choose_experts(convert(scores), spec.router)
    every = torch.softmax(wide(scores), dim=-1)
    wanted, numbers = torch.topk(every, 2)
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalises else wanted
    got, order = np.asarray(back(shares)), np.argsort(-np.asarray(back(shares)), axis=-1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(back(chosen)), order, -1), numbers.numpy()
    )
    assert relative_error(np.take_along_axis(got, order, -1), wanted.numpy()) < 1e-6


@pytest.mark.parametrize("groups, used_groups", [(1, 1), (4, 2), (3, 3)])
def test_experts_are_chosen_by_a_bias_in_groups_as_in_glm_4_5(groups, used_groups, words):
    ops, convert, back = words
    scores, bias, normalises = made(9, 12), made(12), groups == 4
    config = Glm4MoeConfig(
        hidden_size=12,
        n_routed_experts=12,
        num_experts_per_tok=5,
        n_group=groups,
        topk_group=used_groups,
        norm_topk_prob=normalises,
        routed_scaling_factor=2.5,
    )
    judge = Glm4MoeTopkRouter(config)
    judge.weight.data, judge.e_score_correction_bias.data = torch.eye(12), torch.from_numpy(bias)
    with torch.no_grad():
        _, wanted, numbers = judge(torch.from_numpy(scores))
    settings = dict(scoring="sigmoid", scale=2.5, groups=groups, used_groups=used_groups)
    spec = few_experts(12, 5, normalises, **settings)
    chosen, shares = ops.choose_experts(convert(scores), spec.router, convert(bias))
    spread = np.zeros((2, 9, 12), np.float32)  # shares by expert
    for row, places, values in zip(
        spread, (back(chosen), numbers.numpy()), (back(shares), wanted.numpy())
    ):
        np.put_along_axis(row, np.asarray(places).astype(int), np.asarray(values), -1)
    assert np.count_nonzero(spread[1]) == 9 * 5
    np.testing.assert_allclose(spread[0], spread[1], rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_sigmoid_shares_of_extreme_scores(words):
    """As torch's, for scores whose exponential float32 does not hold."""
    ops, convert, back = words
    scores = np.float32([[-200, 3, -100], [95, -95, -300]])
    spec = few_experts(3, used=3, normalises=False, scoring="sigmoid")
    chosen, shares = (np.asarray(back(x)) for x in ops.choose_experts(convert(scores), spec.router))
    wanted = torch.sigmoid(wide(np.take_along_axis(scores, chosen.astype(int), -1)))
    np.testing.assert_allclose(shares, wanted.numpy(), rtol=1e-5, atol=1e-38)


def test_a_fault_in_the_forward_shows_in_every_path(backend, toy, monkeypatch):
    """Prompts, single tokens and steps, compiled or plain, run the layers of core.llama."""
    tokens = RNG.integers(3, 300, (1, 9)).astype(np.int32)

    def prompt() -> np.ndarray:
        model = backend.load(open_checkpoint(toy), "float32")
        return conftest.in_chunks(model, backend.runtime.to_numpy, tokens, (0, 9))[0]

    sound = prompt()
    norm = llama.RMSNorm.__call__
    monkeypatch.setattr(
        llama.RMSNorm,
        "__call__",
        lambda self, x, delta=None: norm(
            llama.RMSNorm(self.ops, self.weight * np.float32(0.5), self.eps), x, delta
        ),
    )
    wrong = prompt()
    assert relative_error(wrong, sound) > 0.01
    model = backend.load(open_checkpoint(toy), "float32")
    stepped, cache = model.make_cache(20), model.make_cache(20)
    sampling = backend.sampling_batch([resolve({"temperature": 0}).options])
    for i in range(9):
        logits = backend.runtime.to_numpy(model.forward(tokens[:, i : i + 1], i, cache))
        assert relative_error(logits[0], wrong[i]) < 1e-4
        drawn = backend.runtime.to_numpy(model.step(tokens[:, i : i + 1], i, stepped, sampling))
        assert wrong[i, int(drawn[0, 0])] > wrong[i].max() - 1e-4
