"""Steps need nothing from the host and no memory but the graph's: run on torch's meta device,
without kernels and numbers.

A CUDA graph cannot contain a wait, a copy from the host or an operation whose result's size depends
on numbers. On the meta device each of them fails, or shows as an operation between devices.
"""

from __future__ import annotations

import pytest
from cases.watch import Watch, torch

from backends.launches import MODELS, build_step, load, recorded
from backends.triton_process import compile_call  # noqa: F401
from mlx_llama.core.sample import SamplingFeatures


def kinds():
    every = dict(is_random=True, top_k=32, has_top_p=True, has_min_p=True, window=64, biases=4)
    return [
        None,
        SamplingFeatures(),
        SamplingFeatures(is_random=True),
        SamplingFeatures(window=64),
        SamplingFeatures(logprobs=0),
        SamplingFeatures(**every),
        SamplingFeatures(**every, logprobs=5, has_masks=True),
        SamplingFeatures(is_random=True, logprobs=5, rates_sampled=True),
    ]


def check(name: str, fault: str = "") -> tuple[int, dict[str, int], int]:
    """(operations, faults, launches) of a model's steps, of one row and of several, with all kinds
    of sampling.
    """
    from cuda_fallback.kernels import ops

    watch, llama = Watch(), load(name)
    with torch.inference_mode(), recorded() as launches, pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(ops, "add", FAULTS[fault])
            patch.setattr(
                ops,
                "attend",
                lambda query, *rest, attend=ops.attend: FAULTS[fault](attend(query, *rest)),
            )
        for rows in (1, 2, 4, 8, 16, 32):  # all buckets
            for kind in kinds():
                step = build_step(llama, rows, kind)
                with watch:
                    for part in step.parts:
                        part()
                assert step.drawn is None if kind is None else step.drawn.shape[0] == rows
    for launch in launches:
        for part in launch.arguments:
            if isinstance(part, torch.Tensor) and part.device.type != "meta":
                watch.faults[f"{launch.kernel.__name__} reads {part.device.type}"] += 1
    return watch.operations, dict(watch.faults), len(launches)


@pytest.mark.slow_for("heads of two sizes")
@pytest.mark.parametrize("name", MODELS)
def test_a_step_can_be_captured(name, compile_call):
    operations, faults, launches = compile_call(check, name)
    assert not faults and operations > 500 and launches > 42 * 8


def from_the_host(x, *rest):
    return x + torch.ones(x.shape[-1]).to(x.device, x.dtype)


def waiting(x, *rest):
    x[0, 0, 0].item()
    return x


FAULTS = {
    "a tensor of the host": from_the_host,
    "item": waiting,
    "nonzero": lambda x, *rest: x[x > 0] if x.nonzero() is None else x,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, compile_call):
    try:
        _, faults, _ = compile_call(check, "dense", fault)
    except (RuntimeError, NotImplementedError) as error:  # torch itself refuses it there
        assert "meta" in str(error).lower()
    else:
        assert faults
