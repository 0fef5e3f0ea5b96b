"""The recurrence of the gated delta rule (Yang et al. 2024, arXiv 2412.06464), as core.ops has it:
a kernel for Metal, one position, and blocks of positions by plain operations.

Each takes mixed, float32 [B, T, C], the convolved queries, keys and values of all heads; gates [B,
T, 2 Hv], strengths and decays before their functions, of which the kernel takes any array whose
last columns they are; state, float32 [B, Hv, Dk, Dv]. Returns the
outputs times Dk, float32 [B, T, Hv, Dv], and the state after them. Queries and keys have the length
sqrt(Dk) here, as RMS norms make them, and a key is divided by it in the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_llama.core.models.parts import GatedDelta, ShortConv
from mlx_llama.core.ops import DeltaWeights

BLOCK = 64  # positions that are computed at once; blocks begin at its multiples
EPS = 1e-6  # of the lengths of queries and keys, as in transformers


class Sizes(NamedTuple):
    """Those of a mixer that the recurrence needs."""

    key_heads: int  # Hk
    value_heads: int  # Hv
    key_size: int  # Dk
    value_size: int  # Dv
    tiled: bool  # value head i belongs to key head i % Hk, and not to i // (Hv / Hk)

    @property
    def heads(self) -> tuple[int, int]:
        """Hv as two axes, of which key heads have one; the other is 1 for them."""
        shared = self.value_heads // self.key_heads
        return (shared, self.key_heads) if self.tiled else (self.key_heads, shared)

    @property
    def groups(self) -> tuple[int, int]:
        """Hk as two axes."""
        return (1, self.key_heads) if self.tiled else (self.key_heads, 1)

    @classmethod
    def of(cls, spec: GatedDelta) -> Sizes:
        return cls(spec.key_heads, spec.value_heads, spec.key_size, spec.value_size, spec.tiled)


# Body of the Metal function. Eight lanes share a column of a head's state and have every eighth row,
# so that a SIMD group reads four columns, and only shuffles join the lanes' sums. Products with the
# state before a position give its output too, by `qk`; so all sums of a position are joined at once.
_LANES = 8
_COLUMNS = 32 // _LANES
_ADVANCE = """
    constexpr float LEAST = 1e-6f;
    constexpr int ROWS = (DK + LANES - 1) / LANES;
    const int count = mixed_shape[1], channels = mixed_shape[2], width = gates_shape[2];
    const int lane = thread_index_in_simdgroup, first = lane % LANES;
    const int column = thread_position_in_grid.y * (32 / LANES) + lane / LANES;
    const int n = thread_position_in_grid.z, head = n % HV, batch = n / HV;
    const bool is_inside = column < DV;
    const float slope = rate[head], shift = bias[head];
    float rows[ROWS], keys[ROWS];
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = i * LANES + first;
        rows[i] = is_inside && row < DK ? state[(n * DK + row) * DV + column] : 0.0f;
    }
    for (int t = 0; t < count; t++) {
        const int place = batch * count + t;
        const int query = place * channels + (TILED ? head % HK : head / (HV / HK)) * DK, key = query + HK * DK;
        float sums[5] = {0, 0, 0, 0, 0};  // k k, q q, q k, k S, q S
        #pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int row = i * LANES + first;
            const float k = row < DK ? mixed[key + row] : 0.0f, q = row < DK ? mixed[query + row] : 0.0f;
            keys[i] = k;
            sums[0] += k * k;
            sums[1] += q * q;
            sums[2] += q * k;
            sums[3] += k * rows[i];
            sums[4] += q * rows[i];
        }
        #pragma unroll
        for (int far = 1; far < LANES; far *= 2) {
            #pragma unroll
            for (int i = 0; i < 5; i++) sums[i] += simd_shuffle_xor(sums[i], far);
        }
        const float opened = float(gates[(place + 1) * width - 2 * HV + head]);
        const float unit = float(gates[(place + 1) * width - HV + head]) + shift;
        const float decay = metal::exp(slope * (metal::max(unit, 0.0f) + metal::log(1.0f + metal::exp(-metal::abs(unit)))));
        const float key_scale = metal::rsqrt(sums[0] + LEAST), query_scale = metal::rsqrt((sums[1] + LEAST) / DK);
        const float value = is_inside ? mixed[place * channels + 2 * HK * DK + head * DV + column] : 0.0f;
        const float delta = (value - decay * key_scale * sums[3]) * key_scale / (1.0f + metal::exp(-opened));
        if (first == 0 && is_inside) out[(place * HV + head) * DV + column] = query_scale * (decay * sums[4] + sums[2] * delta);
        #pragma unroll
        for (int i = 0; i < ROWS; i++) rows[i] = decay * rows[i] + keys[i] * delta;
    }
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = i * LANES + first;
        if (is_inside && row < DK) after[(n * DK + row) * DV + column] = rows[i];
    }
"""
_INPUTS = ["mixed", "gates", "state", "rate", "bias"]


def advance_by_kernel(
    mixed: mx.array, gates: mx.array, state: mx.array, sizes: Sizes, weights: DeltaWeights
) -> tuple[mx.array, mx.array]:
    """Of T positions, one after the other, by a kernel for Metal."""
    batch, count, heads = *mixed.shape[:2], sizes.value_heads
    columns = -(-sizes.value_size // _COLUMNS)
    outputs, state = _kernel()(
        inputs=[mixed, gates, state, weights.rate, weights.bias],
        template=list(zip(("HK", "HV", "DK", "DV", "TILED", "LANES"), (*sizes, _LANES))),
        grid=(32, columns, batch * heads),
        threadgroup=(32, min(columns, 8), 1),
        output_shapes=[(batch, count, heads, sizes.value_size), state.shape],
        output_dtypes=[mx.float32, mx.float32],
    )
    return outputs, state


@functools.cache
def _kernel():
    return mx.fast.metal_kernel(
        name="gated_delta",
        input_names=_INPUTS,
        output_names=["out", "after"],
        source=_ADVANCE,
    )


def is_for_metal(device: mx.Device) -> bool:
    """True if the kernel is tried. Tests force it on the CPU."""
    return device.type == mx.gpu and mx.metal.is_available()


def find_faults(
    mixers: Iterable[ShortConv | GatedDelta], dtype: mx.Dtype, device: mx.Device
) -> set[str]:
    """Try the kernel for a model's mixers; returns its faults."""
    if not is_for_metal(device):
        return set()
    sizes = {Sizes.of(mixer) for mixer in mixers if isinstance(mixer, GatedDelta)}
    with mx.stream(device):
        return {find_fault(each, dtype) for each in sizes} - {""}


@functools.cache
def find_fault(sizes: Sizes, dtype: mx.Dtype) -> str:
    """Try the kernel on the default device; returns its fault, or ""."""
    heads, size = sizes.value_heads, sizes.key_size
    rng = np.random.default_rng(0)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    channels = 2 * sizes.key_heads * size + heads * sizes.value_size
    mixed, gates = random(2, 3, channels), random(2, 3, 5 + 2 * heads).astype(dtype)
    state = random(2, heads, size, sizes.value_size)
    weights = DeltaWeights(None, -mx.exp(random(heads)), random(heads), None)
    expected, after = [], state
    for t in range(3):
        at = slice(t, t + 1)
        outputs, after = advance(mixed[:, at], gates[:, at, 5:], after, sizes, weights)
        expected.append(outputs)
    try:
        results = advance_by_kernel(mixed, gates, state, sizes, weights)
        mx.eval(results)
    except Exception as error:  # from Metal's compiler or a driver; the model must run nevertheless
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    for result, plain in zip(results, (mx.concatenate(expected, axis=1), after)):
        error = mx.abs(result - plain).max().item()
        if not error <= 1e-4 * mx.abs(plain).max().item():
            return "its results differ from plain operations"
    return ""


def open_gates(gates: mx.array, weights: DeltaWeights) -> tuple[mx.array, mx.array]:
    """(strengths, logarithms of the decays), float32 [B, T, Hv] each."""
    strength, decay = mx.split(gates.astype(mx.float32), 2, axis=-1)
    return mx.sigmoid(strength), weights.rate * mx.logaddexp(decay + weights.bias, 0)


def advance(
    mixed: mx.array, gates: mx.array, state: mx.array, sizes: Sizes, weights: DeltaWeights
) -> tuple[mx.array, mx.array]:
    """Of one position, T = 1."""
    batch, size, heads, groups = len(mixed), sizes.key_size, sizes.heads, sizes.groups
    units, value = mx.split(mixed, [2 * sizes.key_heads * size], axis=-1)
    units = mx.fast.rms_norm(units.reshape(batch, 2, *groups, 1, size), None, EPS / size)
    query, key = mx.split(units, 2, axis=1)
    strength, decay = (gate.reshape(batch, 1, *heads, 1, 1) for gate in open_gates(gates, weights))
    decay, scale = mx.exp(decay), size**-0.5
    value = value.reshape(batch, 1, *heads, 1, sizes.value_size)
    before = state.reshape(batch, 1, *heads, size, sizes.value_size)
    delta = (value - key @ before * (decay * scale)) * (strength * scale)
    after = before * decay + key.reshape(batch, 1, *groups, size, 1) * delta
    outputs = (query @ after).reshape(batch, 1, sizes.value_heads, sizes.value_size)
    return outputs, after.reshape(state.shape)


def advance_blocks(
    mixed: mx.array,
    gates: mx.array,
    state: mx.array,
    sizes: Sizes,
    weights: DeltaWeights,
    starts: Sequence[int],
) -> tuple[mx.array, mx.array]:
    """Of T positions from `starts` on. Each block's changes to the state are solved for at once."""
    batch, count = mixed.shape[:2]
    heads, groups, size, values = sizes.heads, sizes.groups, sizes.key_size, sizes.value_size
    strength, decay = open_gates(gates, weights)
    # Positions before and after that change nothing fill the blocks.
    before = [start % BLOCK for start in starts]
    length = -(-(max(before) + count) // BLOCK) * BLOCK

    def split(x: mx.array, heads: tuple[int, int], width: int) -> mx.array:
        """[B, T, all heads' width] as [B, *heads, blocks, BLOCK, width]."""
        rows = [
            mx.pad(x[i : i + 1], ((0, 0), (first, length - first - count), (0, 0)))
            for i, first in enumerate(before)
        ]
        x = mx.concatenate(rows) if batch > 1 else rows[0]
        x = x.reshape(batch, -1, BLOCK, *heads, width)
        return x.transpose(0, 3, 4, 1, 2, 5)

    ends = [sizes.key_heads * size, 2 * sizes.key_heads * size]
    query, key, value = mx.split(mixed, ends, axis=-1)
    query, key = (
        mx.fast.rms_norm(split(part, groups, size), None, EPS / size) for part in (query, key)
    )
    key = key * size**-0.5
    value, strength, decay = (
        split(part, heads, width) for part, width in ((value, values), (strength, 1), (decay, 1))
    )
    decay = mx.cumsum(decay, axis=-2)  # since the block's start
    shown = mx.exp(decay)
    # [.., i, j]: what is left at position i of position j
    steps = mx.arange(BLOCK)
    left = mx.exp(mx.where(steps <= steps[:, None], decay - decay.swapaxes(-1, -2), -mx.inf))
    keys = key.swapaxes(-1, -2)
    changes = _invert(mx.where(steps < steps[:, None], strength * (key @ keys) * left, 0))
    # Each position stores its value less what the state at the block's start gives for its key.
    stored = changes @ (value * strength)
    seen = changes @ (key * (strength * shown))
    scores, query = query @ keys * left, query * shown
    last = decay[..., -1:, :]
    keys, last = (key * mx.exp(last - decay)).swapaxes(-1, -2), mx.exp(last)

    state = state.reshape(batch, *heads, size, values)
    outputs = []
    for i in range(length // BLOCK):
        delta = stored[..., i, :, :] - seen[..., i, :, :] @ state
        outputs.append(query[..., i, :, :] @ state + scores[..., i, :, :] @ delta)
        state = state * last[..., i, :, :] + keys[..., i, :, :] @ delta
    joined = mx.concatenate(outputs, axis=-2).reshape(batch, sizes.value_heads, length, values)
    joined = joined.swapaxes(1, 2)
    rows = [joined[i : i + 1, first : first + count] for i, first in enumerate(before)]
    joined = mx.concatenate(rows) if batch > 1 else rows[0]
    return joined, state.reshape(batch, sizes.value_heads, size, values)


def _invert(lower: mx.array) -> mx.array:
    """(1 + lower)^-1 of strictly lower triangular matrices [.., BLOCK, BLOCK].

    Blocks on the diagonal are inverted, then those of twice their size: powers of `lower`, which
    take fewer products, would grow like binomial coefficients where keys repeat.
    """
    steps, size = mx.arange(BLOCK), 1
    inverse = mx.eye(BLOCK)
    while size < BLOCK:
        both = steps // size
        is_below = (both // 2 == both[:, None] // 2) & (both < both[:, None])
        inverse = inverse - inverse @ mx.where(is_below, lower, 0) @ inverse
        size *= 2
    return inverse
