"""The machine code of decoded attention, compiled for GPUs without one: nothing in memory but keys
and values, short loops.
"""

from __future__ import annotations

import math

import pytest
from machine import EVERY_SIZE

torch = pytest.importorskip("torch")

from backends.launches import (
    CAPABILITIES,
    META,
    compile_launch,
    machine_code,
    recorded,
)
from backends.triton_process import compile_call  # noqa: F401
from cuda_fallback.kernels.state import MAX_ROWS
from cuda_fallback.kernels.storage import key_places

SHARED = 101376  # bytes that the smallest GPUs of 8.0 and newer give a program


def attention(bits: int, D: int, dtype: str, cap: float | None, capability: int) -> dict:
    """Machine code of `attend`'s kernels, by name."""
    from cuda_fallback.kernels import decode

    with recorded() as launches:
        query = torch.empty((2, 8, 1, D), dtype=getattr(torch, dtype), device=META)
        decode.attend(
            torch.empty((16, MAX_ROWS), dtype=torch.int64, device=META),
            key_places([(2, D)])[0],
            query,
            2,
            None,
            D**-0.5,
            bits,
            cap,
        )
    return {launch.kernel.__name__: machine_code(launch, capability) for launch in launches}


# Instructions of a loop of 64 keys, or of 32 float32, for numbers and for codes of 8 bits, by the
# width of a head.
BUDGET = {
    ("float16", 16): {64: 230, 80: 370, 128: 330},
    ("bfloat16", 16): {64: 230, 128: 330},
    ("float16", 8): {64: 600, 80: 603, 96: 603, 128: 600},
    ("bfloat16", 8): {64: 600, 128: 600},
}


@pytest.mark.slow_for("bfloat16-16", "float16")
@pytest.mark.parametrize(
    "dtype, bits, D, capability",
    [
        (*kind, D, capability)
        for kind, widths in BUDGET.items()
        for D in widths
        for capability in CAPABILITIES
    ]
    if EVERY_SIZE
    else [
        ("bfloat16", 8, 128, 90),
        ("bfloat16", 16, 64, 89),
        ("bfloat16", 16, 128, 80),
        ("float16", 16, 80, 90),
        ("float16", 8, 64, 80),
        ("float16", 16, 128, 90),
    ],
)
def test_attention_is_short_and_keeps_its_registers(dtype, bits, D, capability, compile_call):
    code = compile_call(attention, bits, D, dtype, None, capability)
    first = "_attend" if bits == 16 else "_attend_codes"
    assert list(code) == [first, "_join"]
    for part in code.values():
        assert part.stack == part.local == 0 and part.shared <= SHARED
    loop = code[first].loop
    assert len(loop) <= BUDGET[dtype, bits][D] and sum(".128" in line for line in loop) >= 4
    assert any("HMMA" in line for line in loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, bits, D, cap",
    [
        ("float32", None, 256, None),
        ("float32", 8, 256, None),
        ("bfloat16", 16, 256, 50.0),
        ("bfloat16", 8, 256, None),
    ],
)
def test_attention_fits_the_shared_memory_of_small_gpus(dtype, bits, D, cap, compile_call):
    code = compile_call(attention, bits, D, dtype, cap, 80)
    assert max(part.shared for part in code.values()) <= SHARED


def programs_of_a_row(G: int) -> int:
    from cuda_fallback.kernels import decode

    with recorded() as launches:
        state = torch.empty((16, MAX_ROWS), dtype=torch.int64, device=META)
        query = torch.empty((1, 8, 1, 64), dtype=torch.float16, device=META)
        decode.attend(state, key_places([(G, 64)])[0], query, G, None, 0.1)
    return math.prod(launches[0].grid)


@pytest.mark.parametrize("G", [1, 2, 8])
def test_a_row_fills_a_large_gpu(G, compile_call):
    assert compile_call(programs_of_a_row, G) >= 256  # an H100 has 132 multiprocessors


def store_narrow() -> str:
    from cuda_fallback.kernels import decode

    with recorded() as launches:
        state = torch.empty((16, MAX_ROWS), dtype=torch.int64, device=META)
        heads, (place,) = torch.empty((1, 1, 12 * 64), device=META), key_places([(2, 64)])
        decode.store_rotated(state, place, heads, 8, 2, 64, bits=16)
    return compile_launch(launches[0], 80).asm["ptx"]


def test_float32_activations_are_stored_as_float16(compile_call):
    """The interpreter accepts a variable that has two types; the compiler does not."""
    assert "st.global" in compile_call(store_narrow)
