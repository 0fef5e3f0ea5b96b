"""GPUs through nvidia-smi, for which a shell script stands in."""

from __future__ import annotations

import os

import pytest
import torch

from mlx_llama.core.system.machine import Gpus, has_gpu_driver

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell script stands in for nvidia-smi")
T4 = 'echo "Tesla T4, 14913, 7.5"'


def test_a_gpu_that_torch_sees_has_a_driver():
    assert has_gpu_driver() or not torch.cuda.is_available() or torch.version.hip


@pytest.mark.parametrize(
    "script, expected",
    [
        (T4, ("Tesla T4", 14913 << 20, 7.5)),
        ('echo "NVIDIA H100, 80000, 9.0\nTesla T4, 14913, 7.5"', ("NVIDIA H100", 80000 << 20, 9.0)),
        ("sleep 30", None),
        ("exit 9", None),
        (T4 + "; exit 9", None),
        ("echo nonsense", None),
        ('echo "Tesla T4, [N/A], 7.5"', None),
    ],
)
def test_the_first_gpu_is_told_or_unknown(script, expected, smi):
    smi(script)
    gpus = Gpus()
    assert gpus.first == expected and gpus.seen is (True if expected else None)


def test_no_driver_is_no_gpu(smi, monkeypatch):
    smi(T4)
    monkeypatch.setattr("mlx_llama.core.system.machine.has_gpu_driver", lambda: False)
    gpus = Gpus()
    assert gpus.seen is False and gpus.first is None and "no GPU driver" in gpus.absence


@pytest.mark.parametrize(
    "visible, asked", [("", None), ("-1", None), ("1", "-i 1"), ("GPU-abc,2", "-i GPU-abc")]
)
def test_which_gpu_is_visible(visible, asked, smi, tmp_path, monkeypatch):
    smi(f'echo "$@" > {tmp_path}/asked\n{T4}')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = Gpus()
    if asked is None:
        assert gpus.seen is False and gpus.first is None and not (tmp_path / "asked").exists()
    else:
        assert gpus.first[0] == "Tesla T4" and asked in (tmp_path / "asked").read_text()
