"""Wired memory: a share of memory that stays resident while models are loaded."""

from __future__ import annotations

import weakref

import mlx.core as mx

_wired = {"models": 0, "before": 0}


def wire(model: object, device: mx.Device) -> None:
    """Keep the GPU's memory resident until `model` is dropped, on Metal from macOS 15 on.

    Otherwise the system may page a large model out between tokens (mlx-lm's `wired_limit`). Half of
    a small Mac's memory stays free; with all of it wired, a Mac froze.
    """
    if device.type != mx.gpu or not mx.metal.is_available():
        return
    info = mx.device_info()
    total, recommended = info["memory_size"], info["max_recommended_working_set_size"]
    limit = min(recommended, max(total // 2, total - (8 << 30)))
    try:
        before = mx.set_wired_limit(limit)
    except (RuntimeError, ValueError):  # before macOS 15
        return
    if _wired["models"] == 0:
        _wired["before"] = before
    _wired["models"] += 1
    weakref.finalize(model, _unwire)


def _unwire() -> None:
    _wired["models"] -= 1
    if _wired["models"] == 0:
        mx.set_wired_limit(_wired["before"])
