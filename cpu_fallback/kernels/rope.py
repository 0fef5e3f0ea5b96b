"""Rotary position embedding."""

from __future__ import annotations

from llvmlite import ir

from .emit import LANES, Function, Value, f32, f32s, kernel


@kernel
def rotate(f: Function, x, cosine, sine, *, head_dim: int) -> None:
    """Rotate pairs (i, i + D/2) of a head in place. x: float32 [D]; cosine, sine: [D/2]."""
    half = head_dim // 2

    def rotate_pairs(type_: ir.Type, at: Value | int) -> None:
        first, second = f.load(type_, x, at), f.load(type_, x + 4 * half, at)
        c, s = f.load(type_, cosine, at), f.load(type_, sine, at)
        f.store(first * c - second * s, x, at)
        f.store(second * c + first * s, x + 4 * half, at)

    vectorised = half // LANES * LANES
    for i in range(0, vectorised, LANES):
        rotate_pairs(f32s, 4 * i)
    with f.loop(half, vectorised) as i:
        rotate_pairs(f32, i * 4)
