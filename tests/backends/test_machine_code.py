"""Budgets of the kernels' machine code, compiled for GPUs without one: registers, spills, loads,
instructions per weight.

The counts bound the time: a multiprocessor issues 128 instructions of threads per cycle, and a
weight must not take more of them than fit into the time that its bytes take (docs/backends.md).
`pytest` runs a few cases, `pytest --all` a cut, and `MLX_LLAMA_MACHINE_CODE=all pytest --all` every
format, number of columns, bucket of rows and capability, in half an hour.
"""

from __future__ import annotations

import itertools

import pytest
from cases.machine_code import EXPONENTS, LOW_BIT, low_bit, torch
from machine import EVERY_SIZE

from backends.launches import (
    CAPABILITIES,
    COLUMNS,
    META,
    MODELS,
    ROWS,
    build_step,
    compile_launch,
    extra_launches,
    launch_columns,
    load,
    machine_code,
    recorded,
)
from backends.triton_process import compile_call  # noqa: F401
from cuda_fallback.quantized import PLANES
from mlx_llama.core.sample import SamplingFeatures

EIGHT_BITS_IN_BFLOAT16 = (5.1, 5.8, 7.1)  # two numbers to a code
TILES = (8, 16, 32)  # rows of x per program
# (format, columns, rows, capability, dtype)
CASES = [
    pytest.param("Q4_K", 4096, 1, 90, torch.bfloat16, id="Q4_K"),
    *(
        pytest.param(name, *case, marks=pytest.mark.slow)
        for name, case in (
            *zip(
                LOW_BIT,
                itertools.cycle(
                    [
                        (4096, 1, 80, torch.float16),
                        (14336, 16, 89, torch.bfloat16),
                        (4096, 32, 90, torch.bfloat16),
                    ]
                ),
            ),
            ("Q2_K", (4096, 1, 90, torch.bfloat16)),
            ("Q3_K", (4096, 1, 90, torch.float16)),
            ("Q4_K", (2048, 32, 80, torch.bfloat16)),
            ("Q6_K", (14336, 1, 90, torch.float16)),
        )
    ),
]
if EVERY_SIZE:
    CASES = [
        *itertools.product(LOW_BIT, COLUMNS, ROWS, CAPABILITIES, [torch.bfloat16]),
        *itertools.product(LOW_BIT, [4096], ROWS, CAPABILITIES, [torch.float16]),
    ]


def product(name: str, K: int, rows: int, capability: int, dtype=torch.float16):
    """(machine code of `multiply`, rows of x of a program)."""
    from cuda_fallback.kernels import packed

    with recorded() as launches:
        packed.multiply(
            low_bit(name, 28672, K, dtype), torch.empty((rows, K), dtype=dtype, device="meta")
        )
    return machine_code(launches[0], capability), launches[0]["TILE"]


def count(code, name: str) -> int:
    """Instructions of the loop that begin with `name`."""
    return sum(line.startswith(name) for line in code.loop)


@pytest.mark.parametrize("name, K, rows, capability, dtype", CASES)
def test_products_keep_to_their_budgets(name, K, rows, capability, dtype, compile_call):
    code, tile = compile_call(product, name, K, rows, capability, dtype)
    assert code.local == 0 and code.stack <= 16, code  # outside of the loop
    assert count(code, "LDL") == count(code, "STL") == 0
    # The same instruction for any number of rows, each of 8 of them and 8 weights of a thread: all,
    # half or a third of them with codes.
    is_split = dtype == torch.bfloat16 and name == "Q8_0"
    assert count(code, "HMMA.16816.F32") == count(code, "HMMA") > 0 == count(code, "HGMMA")
    shares = 1 if name in EXPONENTS else 3 if is_split else 2
    weights = count(code, "HMMA") * 8 * 8 // tile // shares
    most = (EIGHT_BITS_IN_BFLOAT16 if is_split else LOW_BIT[name][1])[TILES.index(tile)]
    # of each thread's bytes, sixteen at a time, and first out of the cache
    assert count(code, "LDG.E.EF.128") >= weights * LOW_BIT[name][0][0] // 128
    per_weight = len(code.loop) / weights
    print(
        f"{name} K={K} rows={rows} {capability} {dtype}: {code.registers} registers, "
        f"{per_weight:.2f} per weight"
    )
    assert code.registers <= 255 and per_weight <= most, (code.registers, per_weight)


def dense_product(K: int, rows: int, capability: int, dtype=torch.float16):
    """As `product`, of multiply_gated for weights of 16 bits."""
    from cuda_fallback.kernels import decode

    with recorded() as launches:
        decode.multiply_gated(
            *(torch.empty((n, K), dtype=dtype, device="meta") for n in (rows, 28672))
        )
    code, _ = (machine_code(launch, capability) for launch in launches)
    return code, launches[0]["TILE"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "K, rows, capability",
    [*itertools.product(COLUMNS, ROWS, CAPABILITIES)]
    if EVERY_SIZE
    else [(4096, 1, 80), (14336, 16, 89), (4096, 32, 90)],
)
def test_dense_products_keep_to_their_budgets(K, rows, capability, compile_call):
    code, tile = compile_call(dense_product, K, rows, capability)
    assert code.registers <= 128 and code.local == 0
    assert code.stack <= 8 and count(code, "LDL") == count(code, "STL") == 0  # none in the loop
    assert count(code, "HMMA.16816.F32") == count(code, "HMMA") > 0 == count(code, "HGMMA")
    assert count(code, "LDGSTS.E.BYPASS.128")
    per_weight = len(code.loop) / (count(code, "HMMA") * 8 * 8 // tile)
    print(f"{K=} {rows=} {capability}: {code.registers} registers, {per_weight:.2f} per weight")
    assert per_weight <= (3.0 if rows > 16 else 2.5)


def dequantising(name: str, K: int, capability: int, dtype=torch.bfloat16):
    """(machine code of `dequantize`, weights of a thread)."""
    from cuda_fallback.kernels import packed

    with recorded() as launches:
        packed.dequantize(low_bit(name, 4096, K), slice(0, 8), dtype)
    (launch,) = launches
    return machine_code(launch, capability), launch["PASSES"] * 32 // PLANES[LOW_BIT[name][0][0]][0]


@pytest.mark.parametrize(
    "name, K, capability",
    [
        ("Q6_K", 4096, 90),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                itertools.product(LOW_BIT, COLUMNS, CAPABILITIES)
                if EVERY_SIZE
                else itertools.product(("Q5_K", "Q3_K", "nvfp4", "mlx"), [14336], [80])
            )
        ),
    ],
)
def test_dequantising_takes_few_instructions(name, K, capability, compile_call):
    code, weights = compile_call(dequantising, name, K, capability)
    print(
        f"{name} K={K} {capability}: {code.registers} registers, {code.length / weights:.2f} "
        "per weight"
    )
    assert code.stack == code.local == 0 and code.registers <= 40 and code.length / weights <= 12


def of_columns(K: int, rows: int, capability: int) -> list[tuple]:
    """(kernel's name, machine code) of all kernels that read rows of K numbers."""
    with recorded() as launches:
        launch_columns(K, rows, torch.bfloat16)
    return _compiled(launches, capability)


def of_experts(rows: int, capability: int) -> list[tuple]:
    """(kernel's name, machine code) of a prompt's experts in all formats."""
    from cuda_fallback.kernels import packed

    with recorded() as launches:
        for name, dtype in itertools.product(LOW_BIT, (torch.float16, torch.bfloat16)):
            matrix, x = low_bit(name, 4 * 64, 4096, dtype), torch.empty((rows, 4096), dtype=dtype)
            chosen = torch.empty((rows, 2), dtype=torch.int64, device=META)
            groups = packed.group_rows(chosen, 4)
            packed.multiply_chosen(matrix, x.to(META), chosen, 4, groups)
    return _compiled(launches, capability)


def of_steps(rows: int, capability: int) -> list[tuple]:
    """(kernel's name, machine code) of the steps of all kinds of models, and of prompts."""
    models = [load(name) for name in MODELS]
    with torch.inference_mode(), recorded() as launches:
        for llama in models:
            for part in build_step(
                llama, rows, SamplingFeatures(True, 32, True, True, 64, 4)
            ).parts:
                part()
        extra_launches()
    return _compiled(launches, capability)


def _compiled(launches, capability: int) -> list[tuple]:
    codes = [(launch.kernel.__name__, machine_code(launch, capability)) for launch in launches]
    return [*{id(code): (name, code) for name, code in codes}.values()]  # the same code once


# (function above, its first arguments)
KERNELS = [(of_columns, 14336, 1)]
if EVERY_SIZE:
    KERNELS = [(of_columns, K, rows) for K in COLUMNS for rows in ROWS]
    KERNELS += [(of_experts, 32), *((of_steps, rows) for rows in ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES if EVERY_SIZE else [80])
@pytest.mark.parametrize(
    "which", KERNELS, ids=lambda which: "-".join((which[0].__name__, *map(str, which[1:])))
)
def test_no_kernel_spills(which, capability, compile_call):
    for name, code in compile_call(*which, capability):
        print(f"{name} {which[1:]} {capability}: {code.registers} registers, {code.length} in all")
        assert code.local == 0 and code.stack <= 8 and code.registers <= 255, name
        assert count(code, "LDL") == count(code, "STL") == 0, name
        if which[0] is of_columns and name in ("_multiply", "multiply_tile", "_shrink"):
            assert code.wide, name


def codes_of_rows() -> list[bool]:
    """For each kernel of two products, whether 17 rows and 32 share its machine code."""
    from cuda_fallback.kernels import decode, packed

    with recorded() as launches:
        for rows in (17, 32):
            x = torch.empty((rows, 1024), dtype=torch.bfloat16, device=META)
            decode.multiply(x, torch.empty((64, 1024), dtype=torch.bfloat16, device=META))
            packed.multiply(low_bit("Q8_0", 64, 1024, torch.bfloat16), x)
    codes = [compile_launch(launch, 90) for launch in launches]
    return [first is second for first, second in zip(codes[: len(codes) // 2], codes[4:])]


def test_numbers_of_rows_share_machine_code(compile_call):
    """A kernel is compiled for a bucket of rows, and not again for multiples of 16."""
    assert compile_call(codes_of_rows) == [True] * 4


def scalings_compiled() -> set[tuple[str, int]]:
    """(type of the scales, scales per word) of the products that compile: those that are tried out
    on a GPU at first, and of each format with few and with odd numbers of scales.
    """
    from cuda_fallback.kernels import decode, packed

    with recorded() as launches:
        packed.try_out(META)
        decode.try_out(META)
        for name in LOW_BIT:
            for K in (1280, 2048):
                x = torch.empty((1, K), dtype=torch.float16, device=META)
                packed.multiply(low_bit(name, 64, K), x)
    for launch in launches:
        compile_launch(launch, 90)
    return {(launch["SCALES"], launch["EACH"]) for launch in launches if "SCALES" in launch.options}


@pytest.mark.slow
def test_products_compile_for_any_scales(compile_call):
    """The interpreter takes shifts of a float16, which are errors of the compiler."""
    assert compile_call(scalings_compiled) >= {
        ("float16", 1),
        ("float16", 2),
        ("bfloat16", 2),
        ("int8", 4),
    }
