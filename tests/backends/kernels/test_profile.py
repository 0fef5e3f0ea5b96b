"""The profile of compiled programs: the same bits, the file's own bytes, and sums that are the
run's.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from making import make_checkpoint

from backends.kernels.models import LENGTH, TOKENS, answer, files, model
from cpu_fallback.kernels import profile as compiled, runner
from mlx_llama.core.backends.profile import ATTENTION, ROPE, Profile
from mlx_llama.core.backends.selection import select
from mlx_llama.core.files.checkpoint import open_checkpoint

PRODUCTS = {
    "query, key, value": ("q_proj", "k_proj", "v_proj"),
    "attention output": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("lm_head",),
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("case", ["odd widths", "Q4_K_M", "head 20"])
def test_a_profile_does_not_change_the_bits(case, threads):
    llama = model(case, threads, 16)
    team = llama.runner.team
    wanted, _ = answer(llama, cuts=(12, 13, 14))
    with llama.profile() as profile:
        got, _ = answer(llama, cuts=(12, 13, 14))
    np.testing.assert_array_equal(got, wanted)
    assert llama.runner.team is team and profile.operations
    with pytest.raises(ZeroDivisionError), llama.profile():
        1 / 0
    assert llama.runner.team is team


@pytest.mark.parametrize("case,padded", [("qwen3, head 64", 1), ("odd widths", 2.3)])
def test_products_read_and_multiply_the_weights_of_the_file(case, padded):
    """Bytes count the padding to whole panels and blocks, flops do not."""
    llama, tensors = model(case, 2), open_checkpoint(files(case)).tensors
    cache = llama.make_cache(LENGTH)
    llama.forward(TOKENS[:1, :5], 0, cache)
    with llama.profile() as profile:
        for at in (5, 6):
            llama.forward(TOKENS[:1, at : at + 1], at, cache)
    for name, modules in PRODUCTS.items():
        endings = tuple(f"{module}.weight" for module in modules)
        matrices = [tensor for key, tensor in tensors.items() if key.endswith(endings)]
        spent = profile.operations[name]
        assert spent.calls == 2 * len(matrices)
        assert spent.flops == 4 * sum(np.prod(matrix.shape) for matrix in matrices)
        assert 1 <= spent.nbytes / 2 / sum(matrix.nbytes for matrix in matrices) <= padded
    assert profile.operations[ROPE].calls == profile.operations[ATTENTION].calls == 4
    names = list(profile.operations)
    assert names[0] == "norm, packing for query, key, value"
    assert names[-2:] == ["norm, packing for head", "head"]
    assert "silu, packing for down" in names and "packing for attention output" in names


def test_every_operation_has_a_name(tmp_path):
    """Also one with no product after it: the softcap of the logits."""
    fields = dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2", head_dim=16)
    fields |= dict(hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh")
    folder = make_checkpoint(tmp_path / "m", tie_word_embeddings=True, **fields)
    llama = select("cpu").load(open_checkpoint(folder), "float32")
    with llama.profile() as profile:
        llama.forward(np.array([[3, 9]]), 0, llama.make_cache(8))
    assert {"softcap", "norm or scale after a product"} <= profile.operations.keys()


def test_a_prompt_that_runs_in_parts_is_profiled_whole(monkeypatch):
    """A large model's prompt is run in parts, for the sake of Ctrl-C."""
    llama = model("Q4_K_M", 2, 16)
    with llama.profile() as whole:
        llama.forward(TOKENS[:1], 0, llama.make_cache(LENGTH))
    monkeypatch.setattr(runner, "PART_WORK", 1.0)
    with llama.profile() as parts:
        llama.forward(TOKENS[:1], 0, llama.make_cache(LENGTH))
    assert {
        name: (part.calls, part.nbytes, part.flops) for name, part in parts.operations.items()
    } == {name: (part.calls, part.nbytes, part.flops) for name, part in whole.operations.items()}


def test_shares_of_known_ticks():
    """Two threads, three operations, 100 ticks a second; the second operation has no barrier."""
    described = [
        ("pack norm q", {"wait": 1}),
        ("rotate", {"wait": 0}),
        ("product q", {"wait": 1, "weights": 7}),
    ]
    #        start, work, barrier, ...
    ticks = [[100, 110, 150, 160, 160, 260, 270], [120, 140, 150, 190, 190, 210, 270]]
    program = SimpleNamespace(operations=described)
    profile, matrices = Profile(slower=0.0), {7: ("down", SimpleNamespace(nbytes=60, shape=(4, 5)))}
    compiled._add(profile, compiled.Run(program, 3, np.array(ticks), 2.0), matrices, 100)
    packed, rope, down = (
        profile.operations[name] for name in ("norm, packing for down", ROPE, "down")
    )
    assert (packed.seconds, packed.waiting) == pytest.approx((0.4, 0.25))
    assert (rope.seconds, rope.waiting) == pytest.approx((0.25, 0))
    assert (down.seconds, down.waiting, down.nbytes, down.flops) == pytest.approx(
        (0.95, 0.35, 60, 120)
    )
    assert profile.slower == pytest.approx(0.15 + 0.25)
    assert profile.lost == {compiled.WAKING: pytest.approx(2.0 - 1.6)}
