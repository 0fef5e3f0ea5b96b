"""Rotary position embedding."""

from __future__ import annotations

from llvmlite import ir

from .emit import LANES, Function, Module, Value, f32, f32s, i64, kernel


@kernel
def rotate(module: Module, head_dim: int, public: bool = False) -> Function:
    """Rotary embedding of one head in place, pairs (i, i + D/2). x: float32 [D]; cosine, sine:
    [D/2].
    """
    f = Function(
        module, f"rotate_{head_dim}", {"x": i64, "cosine": i64, "sine": i64}, public=public
    )
    half = head_dim // 2

    def rotate_pairs(type_: ir.Type, at: Value | int) -> None:
        first, second = f.load(type_, f.x, at, 4), f.load(type_, f.x + 4 * half, at, 4)
        cosine, sine = f.load(type_, f.cosine, at, 4), f.load(type_, f.sine, at, 4)
        f.store(first * cosine - second * sine, f.x, at, 4)
        f.store(second * cosine + first * sine, f.x + 4 * half, at, 4)

    vectorised = half // LANES * LANES
    for i in range(0, vectorised, LANES):
        rotate_pairs(f32s, 4 * i)
    with f.loop(half, vectorised) as i:
        rotate_pairs(f32, i * 4)
    return f.finish()
