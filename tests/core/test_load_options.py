"""Options of a model's load, and the one line for each that a backend does not take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mlx_llama import generate, load
from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError, OptionsError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.options import (
    MAX_ROWS,
    LoadOptions,
    default_threads,
    parse_memory,
)
from mlx_llama.core.system import machine
from mlx_llama.doctor import command as doctor


def check(backend, **options):
    """Check load options for a backend."""
    return backend.check(LoadOptions(**options))


@pytest.mark.parametrize(
    "name, value",
    [("threads", 2), ("threads", "2"), ("activation_bits", 8), ("activation_bits", "16")],
)
def test_options_of_the_cpu_backend(name, value, backend):
    """Numbers there; on the others one line that is the same but for the backend's name."""
    if backend.name == "cpu":
        assert getattr(check(backend, **{name: value}), name) == int(value)
        return
    said = f"^`{name}` {value}: is for the cpu backend, and this is {backend.name}: leave"
    with pytest.raises(BackendError, match=said):
        check(backend, **{name: value})


WHOLE = "must be a whole number, "
REFUSED = [
    ("threads", WHOLE + "1 to 1024$", (0, -1, 1025, "1.5", True, "٣", 2.0, "", "9" * 5000, [2])),
    ("activation_bits", WHOLE + "one of 8, 16, 32$", (4, "", "all", 0, 64, False)),
    (
        "dtype",
        "is not one of auto, float32, float16, bfloat16$",
        ("int8", "", None, "float64", "Float32", "x" * 5000),
    ),
    (
        "cache_bits",
        "must be 8 or 16; without it, ",
        (4, 32, 0, "", "eight", True, 8.5, "８", "8" * 5000),
    ),
]


@pytest.mark.parametrize(
    "name, reason, value",
    [(name, reason, value) for name, reason, values in REFUSED for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_outside_the_limits_is_a_short_line(name, reason, value, backend):
    if name in ("threads", "activation_bits") and backend.name != "cpu":
        reason = "is for the cpu backend"
    with pytest.raises(BackendError, match=f"^`{name}` .*{reason}") as error:
        check(backend, **{name: value})
    assert len(str(error.value)) < 150


NAMES = {
    "float32": ("auto", "float32", "fp32", "f32", "float"),
    "float16": ("float16", "fp16", "f16", "half"),
    "bfloat16": ("bfloat16", "bf16"),
}


@pytest.mark.parametrize("name, dtype", [(name, dtype) for dtype in NAMES for name in NAMES[dtype]])
def test_names_of_dtypes(name, dtype, backend, toy):
    import torch

    # where torch has the name too
    assert getattr(torch, dtype) == getattr(torch, name, getattr(torch, dtype))
    if backend.name == "cpu" and dtype != "float32":
        said = f"dtype.*{dtype}.*: the cpu backend computes in float32, .*mlx.*` or cuda$"
        with pytest.raises(BackendError, match=said):
            backend.load(open_checkpoint(toy), name)
        return
    assert backend.load(open_checkpoint(toy), name).dtype_name == dtype


def test_what_is_not_given_keeps_its_default(backend):
    plain = LoadOptions(
        batch_invariant=False, swa_full=False, checkpoints=8, max_rows=MAX_ROWS, adapters=()
    )
    assert check(backend) == plain and check(backend, compile=True) == replace(plain, compile=True)
    wanted = replace(plain, dtype="float32", compile=False)
    assert check(backend, dtype="fp32", compile=False) == wanted
    wanted = replace(plain, max_rows=4, cache_memory=2 * 10**9)
    assert backend.check(check(backend, max_rows="4", cache_memory="2GB")) == wanted


@pytest.mark.parametrize("bits", [8, "8", 16, "16"])
def test_keys_and_values_in_8_or_16_bits_on_every_backend(bits, backend):
    assert check(backend, cache_bits=bits).cache_bits == int(bits)
    assert check(backend, dtype="float32", compile=False, cache_bits=bits).cache_bits == int(bits)


def test_bits_that_do_not_depend_on_the_rest_of_the_batch(backend, toy):
    """Refused on mlx before anything is opened; true on the cpu backend unless it runs plain
    NumPy.
    """
    for value in (None, False):
        assert check(backend, batch_invariant=value) == check(backend)
    if backend.name == "mlx":
        said = "^`batch_invariant`: the mlx backend's products depend .* `backend='cpu'` or cuda$"
        with pytest.raises(BackendError, match=said):
            check(backend, batch_invariant=True)
        return
    assert check(backend, batch_invariant=True).batch_invariant
    if backend.name == "cpu":
        from cpu_fallback import kernels

        said = "^`batch_invariant`: plain NumPy's .*`compile=False` asks for it.*: leave it out$"
        with pytest.raises(BackendError, match=said):
            backend.load(open_checkpoint(toy), compile=False, batch_invariant=True)
        if kernels.find_target()[0]:
            assert backend.load(open_checkpoint(toy), batch_invariant=True).is_batch_invariant


def test_contradictions():
    cpu = backends.select("cpu")
    with pytest.raises(BackendError, match="8 and .*float32.*, which asks for 32, contradict"):
        check(cpu, dtype="float32", activation_bits=8)
    assert check(cpu, dtype="float32", activation_bits="32").activation_bits == 32
    for options in ({"threads": 1}, {"activation_bits": 8}):
        with pytest.raises(BackendError, match="are for compiled kernels: leave out "):
            check(cpu, compile=False, **options)


def test_threads_by_default():
    MiB = 1 << 20
    assert [default_threads(n * MiB, 8) for n in (0, 5, 8, 31, 1024)] == [1, 1, 2, 7, 8]
    assert default_threads(1024 * MiB, 1) == 1


def test_load_help_and_doctor_name_the_same_threads(toy, monkeypatch, capsys):
    monkeypatch.setattr(machine, "physical_cores", lambda: 6)
    llm = load(toy, backend="cpu")
    if not llm.model.is_batch_invariant:
        pytest.skip("no compiled kernels here")
    assert llm.model.notices[0].startswith("1 thread on 6 cores, for a small model")
    doctor.main([str(toy)])
    assert "cpu   fits: computes in float32 on 1 thread;" in capsys.readouterr().out
    for text in (generate.parser().format_help(), load.__doc__):
        assert "one per physical core, fewer for a small model" in " ".join(text.split())


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("1.5GiB", 3 << 29),
        (10**9, 10**9),
        ("1000000", 10**6),
        (np.int64(12), 12),
        (None, None),
    ],
)
def test_sizes_of_memory(text, nbytes):
    assert parse_memory(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-2GB", "9" * 99, True, [2]])
def test_what_is_no_size(text):
    with pytest.raises(
        OptionsError, match="^`cache_memory` .*: must be a size such as 2GB, "
    ) as error:
        parse_memory(text)
    assert len(str(error.value)) < 140


def test_rows_of_a_step():
    for value, rows in ((None, 32), (1, 1), ("512", 512)):
        assert LoadOptions(max_rows=value).check("cpu").max_rows == rows
    for value in (0, "513", "-1", "many", 2.5, True, "9" * 99):
        with pytest.raises(OptionsError, match="^`max_rows` .*: must be a whole number, 1 to 512$"):
            LoadOptions(max_rows=value).check("cpu")


def test_checkpoints_of_a_row():
    for value, count in ((None, 8), (2, 2), ("256", 256)):
        assert LoadOptions(checkpoints=value).check("cpu").checkpoints == count
    wanted = "^`checkpoints` .*: must be a whole number, 2 to 256$"
    for value in (0, "1", "257", -1, "many"):
        with pytest.raises(OptionsError, match=wanted):
            LoadOptions(checkpoints=value).check("cpu")
