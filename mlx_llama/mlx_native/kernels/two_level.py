"""Matrices with two levels of scales (GGUF's K types) on MLX's GPU.

Kernels read each code once, to multiply a few rows of x or to dequantise. The same in plain
operations tests the kernels, and replaces them on the CPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_llama.core.files.quantized import IQ4_VALUES

SUPER_GROUP = 256  # weights that share a super scale
# rows of x for which `multiply` is faster than dequantising; estimated, not measured on Metal
MAX_ROWS = 16


class Layout(NamedTuple):
    """A format: w = scale * (code - offset) + bias over groups of `group_size` columns."""

    bits: int
    group_size: int
    offset: int
    # width of the unsigned sub scale, the low bits of a number whose high bits are the sub bias; 0:
    # signed, no bias
    sub_bits: int
    has_table: bool = False  # codes are stored as 4-bit indices into IQ4_VALUES

    @property
    def sub_kind(self) -> type[np.integer]:
        """The dtype of Parts.subs."""
        return {0: np.int8, 4: np.uint8, 8: np.uint16}[self.sub_bits]


class Parts(NamedTuple):
    """Arrays of a matrix [N, K]."""

    packed: mx.array  # uint32 [N, K * bits / 32], each row a stream of codes, low bits first
    subs: mx.array  # sub scales and sub biases, int8, uint8 or uint16 [N, K / group_size]
    supers: mx.array  # super scales and super biases, float16 [N, K / 256, 1 or 2]


# Bodies of Metal functions; MLX writes the signatures, with the shapes that a body names. Template
# arguments: T, BITS, GROUP, OFFSET, SUB_BITS, TABLE. A thread takes 32 columns at a time, which are
# BITS words.
_WORDS = """
        uint words[BITS];
        #pragma unroll
        for (int j = 0; j < BITS; j++) words[j] = packed[(n * chunks + chunk) * BITS + j];
"""
# scale of the table's values
_FOURS = [f"{word:#x}u" for word in IQ4_VALUES.astype(np.uint8).view("<u4")]
# A code is masked in place, which multiplies it by a power of two, 1 / `unit`, as in MLX's `qdot`:
# shifts would use the pipe that converts integers to float. Only codes that span two words and
# indices of a table are shifted.
_UNIT = """
                const int at = i * BITS, shift = at % 32;
                const bool is_moved = TABLE || shift + BITS > 32;
                const float unit = is_moved ? 1.0f : 1.0f / float(1u << shift);
"""
_CODE = f"""{_UNIT}
                const uint mask = (1u << BITS) - 1;
                uint code = words[at / 32];
                if (is_moved) {{
                    code >>= shift;
                    if (shift + BITS > 32) code |= words[(at / 32 + 1) % BITS] << (32 - shift);
                    code &= mask;
                }} else code &= mask << shift;
                if (TABLE) {{
                    const uint four = code < 8 ? (code < 4 ? {_FOURS[0]} : {_FOURS[1]}) : (code < 12 ? {_FOURS[2]} : {_FOURS[3]});
                    code = four >> (code % 4 * 8) & 255;
                }}
"""
_SCALING = """
            const int sub = subs[n * chunks * (32 / GROUP) + chunk * (32 / GROUP) + g];
            const int place = (n * (chunks / 8) + chunk / 8) * (SUB_BITS == 0 ? 1 : 2);
            const float scale = float(supers[place]) * (SUB_BITS == 0 ? sub : sub & ((1 << SUB_BITS) - 1));
            const float bias = SUB_BITS == 0 ? 0.0f : float(supers[place + 1]) * (sub >> SUB_BITS);
"""
# A SIMD group computes four neighbouring outputs of a row of x, so that 32 numbers of x are read
# once for four rows of w.
_MULTIPLY = f"""
    const int K = x_shape[1], N = packed_shape[0], chunks = K / 32;
    const int m = threadgroup_position_in_grid.x;
    const int first = (threadgroup_position_in_grid.y * 2 + simdgroup_index_in_threadgroup) * 4;
    float sums[4] = {{0, 0, 0, 0}};
    for (int chunk = thread_index_in_simdgroup; chunk < chunks; chunk += 32) {{
        float values[32], totals[32 / GROUP];
        #pragma unroll
        for (int g = 0; g < 32 / GROUP; g++) totals[g] = 0;
        #pragma unroll
        for (int i = 0; i < 32; i++) {{
            values[i] = float(x[m * K + chunk * 32 + i]);
            totals[i / GROUP] += values[i];
{_UNIT}
            values[i] *= unit;
        }}
        #pragma unroll
        for (int r = 0; r < 4; r++) {{
        const int n = first + r < N ? first + r : N - 1;
{_WORDS}
        #pragma unroll
        for (int g = 0; g < 32 / GROUP; g++) {{
            float dot = 0;
            #pragma unroll
            for (int i = g * GROUP; i < (g + 1) * GROUP; i++) {{
{_CODE}
                dot += float(code) * values[i];
            }}
{_SCALING}
            sums[r] += scale * (dot - OFFSET * totals[g]) + bias * totals[g];
        }}
        }}
    }}
    #pragma unroll
    for (int r = 0; r < 4; r++) {{
        const float sum = simd_sum(sums[r]);
        if (thread_index_in_simdgroup == 0 && first + r < N) out[m * N + first + r] = T(sum);
    }}
"""
_DEQUANTISE = f"""
        const int chunks = packed_shape[1] / BITS, chunk = thread_position_in_grid.x, n = thread_position_in_grid.y;
{_WORDS}
        #pragma unroll
        for (int g = 0; g < 32 / GROUP; g++) {{
{_SCALING}
            #pragma unroll
            for (int i = g * GROUP; i < (g + 1) * GROUP; i++) {{
{_CODE}
                out[(n * chunks + chunk) * 32 + i] = T(scale * (float(code) * unit - OFFSET) + bias);
            }}
        }}
"""


def multiply(layout: Layout, parts: Parts, x: mx.array) -> mx.array:
    """x @ w.T by a kernel for Metal, summed in float32. x: [M, K]; returns [M, N] in x's dtype."""
    M, N = x.shape[0], parts.packed.shape[0]
    kernel = _kernel("two_level_multiply", ("x", *Parts._fields), _MULTIPLY)
    sizes = dict(grid=(32 * M, 2 * -(-N // 8), 1), threadgroup=(32, 2, 1), output_shapes=[(M, N)])
    return _launch(kernel, [x, *parts], layout, x.dtype, **sizes)


def dequantise(layout: Layout, parts: Parts, dtype: mx.Dtype) -> mx.array:
    """w by a kernel for Metal, [N, K] in `dtype`."""
    N, K = parts.packed.shape[0], parts.packed.shape[1] * 32 // layout.bits
    kernel = _kernel("two_level_dequantise", Parts._fields, _DEQUANTISE)
    sizes = dict(grid=(K // 32, N, 1), threadgroup=(8, 8, 1), output_shapes=[(N, K)])
    return _launch(kernel, [*parts], layout, dtype, **sizes)


def dequantise_plainly(layout: Layout, parts: Parts, dtype: mx.Dtype) -> mx.array:
    """w [N, K] by MLX's operations, in float32 with the bits of gguf's dequantiser."""
    N, K = parts.packed.shape[0], parts.packed.shape[1] * 32 // layout.bits
    ones = mx.ones((N, K // 32))
    offset = 0 if layout.has_table else layout.offset
    codes = mx.dequantize(parts.packed, ones, ones * -offset, group_size=32, bits=layout.bits)
    if layout.has_table:
        codes = mx.array(IQ4_VALUES.astype(np.float32) - layout.offset)[codes.astype(mx.uint8)]
    scales, biases = parts.subs, None
    if layout.sub_bits:
        scales, biases = parts.subs & ((1 << layout.sub_bits) - 1), parts.subs >> layout.sub_bits

    def scaling(subs: mx.array, level: int) -> mx.array:
        supers = parts.supers[..., level : level + 1].astype(mx.float32)
        return (subs.astype(mx.float32).reshape(N, K // SUPER_GROUP, -1) * supers).reshape(N, -1, 1)

    values = codes.reshape(N, -1, layout.group_size) * scaling(scales, 0)
    if biases is not None:
        values = values + scaling(biases, 1)
    return values.reshape(N, K).astype(dtype)


@functools.cache
def find_fault(layout: Layout, dtype: mx.Dtype) -> str:
    """Try both kernels of a layout on the default device; returns their fault, or ""."""
    rng, (N, K, M) = np.random.default_rng(0), (11, 1536, 2)
    subs = rng.integers(0, 1 << 16, (N, K // layout.group_size)).astype(layout.sub_kind)
    packed = rng.integers(0, 1 << 32, (N, K * layout.bits // 32), dtype=np.uint32)
    supers = rng.uniform(-1e-4, 1e-4, (N, K // SUPER_GROUP, 2 if layout.sub_bits else 1))
    parts = Parts(mx.array(packed), mx.array(subs), mx.array(supers.astype(np.float16)))
    x = mx.array(rng.standard_normal((M, K)).astype(np.float32)).astype(dtype)
    plain = dequantise_plainly(layout, parts, mx.float32)
    try:
        results = [
            (multiply(layout, parts, x), x.astype(mx.float32) @ plain.T),
            (dequantise(layout, parts, dtype), plain),
        ]
        mx.eval(results)
    except Exception as error:  # from Metal's compiler or a driver; the model must run nevertheless
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    rounding = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    for result, expected in results:
        error = mx.abs(result.astype(mx.float32) - expected).max().item()
        if not error <= rounding * mx.abs(expected).max().item():
            return "their results differ from plain operations"
    return ""


@functools.cache
def _kernel(name: str, inputs: tuple[str, ...], source: str):
    return mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=["out"], source=source
    )


def _launch(kernel, inputs: list[mx.array], layout: Layout, dtype: mx.Dtype, **sizes) -> mx.array:
    names = "T", "BITS", "GROUP", "OFFSET", "SUB_BITS", "TABLE"
    template = list(zip(names, (dtype, *layout)))
    return kernel(inputs=inputs, template=template, output_dtypes=[dtype], **sizes)[0]
