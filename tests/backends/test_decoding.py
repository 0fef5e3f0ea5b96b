"""The torch backend's decode path: by kernels or not, captured or not, and its notices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from making import config_fields

from mlx_llama.core.errors import BackendError
from mlx_llama.core.models.config import LlamaConfig

torch = pytest.importorskip("torch")

from cuda_fallback import kernels

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
DYNAMIC = dict(rope_scaling=dict(rope_type="dynamic", factor=2.0))
WITHOUT = kernels.Kernels(
    notices=("decoding is not captured, and low-bit weights are slow: no triton",)
)


def plan(
    patch, device=GPU, compile=None, available=None, fails: str = "", **fields
) -> kernels.Decoding:
    def try_heads(*args) -> None:
        assert args == (config, torch.float16, device, None)
        if fails:
            raise Exception(fails)

    decode = SimpleNamespace(try_heads=try_heads)
    patch.setattr(
        kernels,
        "find_kernels",
        lambda device: available or kernels.Kernels(decode, SimpleNamespace()),
    )
    config = LlamaConfig.from_dict(config_fields(**fields))
    decoding = kernels.plan_decoding(config, torch.float16, device, compile)
    assert decoding.kernels in (None, decode)
    return decoding


@pytest.mark.parametrize(
    "settings, by_kernels, is_captured, notice",
    [
        (dict(), True, True, ""),
        (dict(compile=True), True, True, ""),
        (dict(compile=False), True, False, "decoding is not captured: `compile=False` asks for it"),
        (
            DYNAMIC,
            False,
            False,
            "decoding is not captured: dynamic rope turns by angles that depend on the length",
        ),
        (
            dict(fails="out of shared memory\nmore"),
            False,
            False,
            "decoding is not captured: attention's kernel does not run here (out of shared memory)",
        ),
        (dict(available=WITHOUT), False, False, WITHOUT.notices[0]),
        (dict(available=WITHOUT, compile=False), False, False, WITHOUT.notices[0]),
        (DYNAMIC | dict(available=WITHOUT), False, False, WITHOUT.notices[0]),
        (dict(device=CPU), True, False, ""),
        (dict(device=CPU, available=kernels.Kernels()), False, False, ""),
        (dict(device=CPU, available=kernels.Kernels(), compile=False), False, False, ""),
    ],
    ids=str,
)
def test_how_tokens_are_decoded(settings, by_kernels, is_captured, notice, monkeypatch):
    decoding = plan(monkeypatch, **settings)
    assert (decoding.kernels is not None, decoding.is_captured) == (by_kernels, is_captured)
    assert decoding.notices == ((notice,) if notice else ())


@pytest.mark.parametrize(
    "settings, reason",
    [
        (dict(device=CPU), "CUDA graphs are for a GPU"),
        (DYNAMIC, "dynamic rope"),
        (dict(available=WITHOUT), "no triton"),
        (dict(fails="out of shared memory"), "out of shared memory"),
    ],
    ids=str,
)
def test_a_graph_that_is_asked_for_and_cannot_be_is_refused(settings, reason, monkeypatch):
    with pytest.raises(BackendError, match=f"^`compile`: .*{reason}.*: leave it out$"):
        plan(monkeypatch, compile=True, **settings)
