"""Choice of a target, NEON's code as assembly and in emulation, and the cache of machine code."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import struct
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from launching import run_python

from backends.kernels.weights import random_matrix
from cpu_fallback import kernels
from cpu_fallback.kernels import emit, layouts, panels, products, target as targets
from cpu_fallback.kernels.emit import Module
from cpu_fallback.kernels.image import Image
from cpu_fallback.kernels.interpreter import write_module
from cpu_fallback.kernels.recipe import Head, Recipe
from cpu_fallback.kernels.target import available, build_target, compile_module
from mlx_llama.core.errors import BackendError

ARM = ("aarch64-unknown-linux-gnu", "arm64-apple-macosx")


def layout_of(kind: str):
    return panels.weight_layout(random_matrix(kind, 1, np.random.default_rng(0), 512).tensor)


# ---- choice of a target


def test_the_variable_chooses(monkeypatch):
    for name in available():
        monkeypatch.setenv(kernels.VARIABLE, name)
        target, reason = kernels.find_target()
        assert target.name == name and reason == ""
    monkeypatch.setenv(kernels.VARIABLE, "numpy")
    assert kernels.find_target() == (None, "MLX_LLAMA_CPU_TARGET asks for it")
    monkeypatch.delenv(kernels.VARIABLE)
    assert kernels.find_target()[0].name == available()[0]
    monkeypatch.setenv(kernels.VARIABLE, "avx1024")
    with pytest.raises(BackendError, match="MLX_LLAMA_CPU_TARGET=avx1024.*choose.*numpy"):
        kernels.find_target()


def test_a_target_needs_llvmlite(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setenv(kernels.VARIABLE, "avx2")
    with pytest.raises(
        BackendError, match="MLX_LLAMA_CPU_TARGET=avx2 needs the package 'llvmlite'"
    ):
        kernels.find_target()


def test_another_processor_has_no_kernels(monkeypatch):
    monkeypatch.setattr(targets.platform, "machine", lambda: "riscv64")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert available() == []
    assert kernels.find_target() == (None, "there are no kernels for this processor (riscv64)")


def host(features) -> targets.Host:
    return targets.Host("generic", tuple(features), (), "")


@pytest.mark.parametrize(
    "system,features,wanted",
    [
        ("darwin", {}, ["neon"]),
        ("linux", {"asimddp": True}, ["neon"]),
        ("linux", {"dotprod": True}, ["neon"]),
        ("linux", {"neon": True}, []),
    ],
)
def test_arm_needs_the_dot_product(system, features, wanted, monkeypatch):
    monkeypatch.setattr(targets.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(targets.sys, "platform", system)
    monkeypatch.setattr(
        targets, "find_host", lambda: host([name for name, has in features.items() if has])
    )
    assert available() == wanted


@pytest.mark.parametrize(
    "missing,wanted",
    [("avx512vnni", ["avx512", "avx2"]), ("avx512bw", ["avx2"]), ("f16c", []), ("avx2", [])],
)
def test_intel_targets_need_all_their_instructions(missing, wanted, monkeypatch):
    monkeypatch.setattr(targets.platform, "machine", lambda: "x86_64")
    every = {feature for name in targets.NAMES[:3] for feature in targets._FEATURES[name]}
    monkeypatch.setattr(targets, "find_host", lambda: host(every - {missing}))
    # a processor with the wider instructions has the narrower ones
    assert [name for name in available() if missing != "avx2" or name == "avx2"] == wanted


# ---- NEON, on any machine


@pytest.mark.slow_for("aarch64")
@pytest.mark.parametrize("triple", ARM)
def test_a_program_for_neon_calls_no_library(triple):
    arm = build_target("neon", triple, host=False)
    sources = tuple((layout_of(kind), "") for kind in ("float16", "Q6_K"))
    mixers = dict(has_gates=True, has_short_conv=True, has_gated_delta=True)
    module = write_module(Recipe(arm, sources, 16, (Head(72, 72), Head(512, 512)), **mixers))
    optimised, machine = targets.optimise(arm, module)
    text = machine.emit_assembly(optimised)
    assert all(re.search(rf"\b{name}", text) for name in ("sdot", "fmla", "fcvtl"))
    assert not re.search(r"\bfmul.*\bfadd", text)
    defined = {name for name in module.globals if not name.startswith(("llvm.", "mlx_llama_yield"))}
    called = {name.strip('"_') for name in re.findall(r'\bbl\s+("?[\w .]+"?)', text)}
    assert called - {name.strip("_") for name in defined} <= {"mlx_llama_yield"}
    assert machine.emit_object(optimised)[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")
    assert "llvm.aarch64.hint" in module.globals and "llvm.x86.sse2.pause" not in module.globals


def test_products_refuse_activations_for_another_offset():
    arm, layout = build_target(available()[0]), layout_of("Q4_0")
    with pytest.raises(ValueError, match="offset 8, not 0"):
        products.product(Module(), arm, layout, layouts.activation_layout(16, arm.dot, 0), 1)


# ---- the cache of machine code


def make_writer(number: int, calls: list):
    """A write() for compile_module: one function that stores a number."""

    def write() -> Module:
        calls.append(number)
        module = Module()
        f = emit.Function(module, "store", {"out": emit.i64}, public=True)
        f.store(f.constant(emit.i64, number), f.out)
        f.finish()
        return module

    return write


def compile_number(key: str, number: int, calls: list) -> int:
    out = np.zeros(1, np.int64)
    made = compile_module(build_target(available()[-1]), key, ["store"], make_writer(number, calls))
    made.function("store", 1)(out.ctypes.data)
    return int(out[0])


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MLX_LLAMA_CACHE", str(tmp_path / "a" / "cache"))
    return tmp_path / "a" / "cache"


def test_machine_code_is_compiled_once(folder):
    calls = []
    assert compile_number("one", 1, calls) == 1
    assert compile_number("one", 2, calls) == 1  # the cached code, not a new module
    assert compile_number("two", 3, calls) == 3
    assert calls == [1, 3]
    files = list(folder.iterdir())
    assert len(files) == 2 and all(file.suffix == ".o" for file in files)
    if os.name == "posix":
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)


def flip(content: bytes, at: int) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "magic": lambda content: flip(content, 3),
    "key": lambda content: flip(content, 30),
    "code": lambda content: flip(content, len(content) // 2),
    "last byte": lambda content: flip(content, -1),
}


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


FOREIGN = {  # on POSIX
    "a pipe": make_pipe,
    "group may write": lambda file: file.chmod(0o620),
    "all may write": lambda file: file.chmod(0o602),
    "another user's": lambda file: os.chown(file, 12345, -1),
}


@pytest.mark.parametrize("how", [*DAMAGE, *(FOREIGN if os.name == "posix" else ())])
def test_a_damaged_or_foreign_file_is_replaced(how, folder):
    calls = []
    compile_number("one", 1, calls)
    [file] = folder.iterdir()
    if how in DAMAGE:
        file.write_bytes(DAMAGE[how](file.read_bytes()))
    elif how == "another user's" and os.getuid():
        pytest.skip("root alone can give a file to another user")
    else:
        FOREIGN[how](file)
    assert compile_number("one", 2, calls) == 2 and calls == [1, 2]
    assert compile_number("one", 3, calls) == 2 and calls == [1, 2]  # the new file is good
    assert list(folder.iterdir()) == [file]
    assert os.name != "posix" or file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("where", ["below a file", "a file"])
def test_a_folder_without_write_access_costs_only_time(where, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv(
        "MLX_LLAMA_CACHE",
        str(tmp_path / "file" / "cache" if where == "below a file" else tmp_path / "file"),
    )
    calls = []
    assert compile_number("one", 1, calls) == 1 and compile_number("one", 2, calls) == 2
    assert (tmp_path / "file").read_text() == "x"


def test_no_home_costs_only_time(monkeypatch):
    monkeypatch.delenv("MLX_LLAMA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without a home
    calls = []
    assert compile_number("one", 1, calls) == 1 and compile_number("one", 2, calls) == 2


def test_a_failed_write_leaves_no_file(folder, monkeypatch):
    full = Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(targets.os, "replace", full)
    assert compile_number("one", 1, []) == 1
    assert list(folder.iterdir()) == []


def test_the_key_depends_on_sources_compiler_target_and_parameters(tmp_path, monkeypatch):
    here = build_target(available()[0])
    digests = {
        targets._digest(here, "a"),
        targets._digest(here, "b"),
        targets._digest(build_target(available()[-1]), "a"),
        targets._digest(dataclasses.replace(here, features=here.features + ",+x"), "a"),
    }
    monkeypatch.setattr(targets.llvmlite, "__version__", "0")
    digests.add(targets._digest(here, "a"))
    monkeypatch.undo()
    # a copy of the package with one more byte in a file
    home = Path(targets.__file__).parent
    for path in home.glob("*.py"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(targets, "__file__", str(tmp_path / "target.py"))
    targets._hash_sources.cache_clear()
    assert targets._digest(here, "a") in digests
    with open(tmp_path / "layouts.py", "a") as file:
        file.write("\n")
    targets._hash_sources.cache_clear()
    digests.add(targets._digest(here, "a"))
    monkeypatch.undo()
    targets._hash_sources.cache_clear()
    assert len(digests) == 4 + 1 + (len(available()) > 1) and targets._digest(here, "a") in digests


PROGRAM = """
import sys
from cpu_fallback.kernels import target
count = 0
original = target.emit_object_code
def counting(*arguments):
    global count
    count += 1
    return original(*arguments)
target.emit_object_code = counting
from mlx_llama.core.files.checkpoint import open_checkpoint
from cpu_fallback.model import Llama
model = Llama.load(open_checkpoint(sys.argv[1]))
print(count, model.forward([[1, 2, 3]], 0, model.make_cache(4)).sum(), "llvmlite.binding" in sys.modules)
"""  # noqa: E501


@pytest.mark.slow
def test_a_second_process_compiles_nothing(toy, folder):
    runs = [
        run_python(
            "-c", PROGRAM, toy, check=True, env=os.environ | {"MLX_LLAMA_CACHE": str(folder)}
        ).stdout.split()
        for _ in range(2)
    ]
    assert [run[0] for run in runs] == ["1", "0"] and runs[0][1] == runs[1][1]
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert [run[2] for run in runs] == ["True", "False"]  # LLVM's library is 55 MB


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="elsewhere LLVM loads machine code",
)
def test_functions_lie_where_llvm_puts_them():
    """All functions of a model's recipe, relative to the first."""
    import llvmlite.binding as llvm

    host_target = build_target(available()[0])
    sources = tuple((layout_of(kind), kind) for kind in ("Q4_0", "Q6_K"))
    recipe = Recipe(host_target, sources, 16, (Head(64, 64),))
    code = targets.emit_object_code(host_target, write_module(recipe))
    mine = Image(code, {"mlx_llama_yield": 1})
    llvm.add_symbol("mlx_llama_yield", 1)
    engine = llvm.create_mcjit_compiler(
        llvm.parse_assembly(f'target triple = "{host_target.triple}"'), host_target.machine()
    )
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    public = {name for name in mine.address if engine.get_function_address(name)}
    assert {"start", "serve", "barrier"} <= public, public
    ours, other = (
        sorted((address(name), name) for name in public)
        for address in (mine.address.__getitem__, engine.get_function_address)
    )
    for (begin, name), (begin_there, name_there) in zip(ours, other):
        assert name == name_there and begin - ours[0][0] == begin_there - other[0][0], name


@pytest.mark.parametrize("damage", [b"", b"\x7fELF\x02\x01\x01", b"MZ" + bytes(200)])
def test_what_is_no_object_file_is_left_to_llvm(damage, folder, monkeypatch):
    with pytest.raises((ValueError, struct.error)):
        Image(damage, {})


def test_without_executable_memory_llvm_loads_the_code(folder, monkeypatch):
    assert compile_number("one", 1, []) == 1
    refused = Mock(side_effect=OSError("no executable memory"))
    monkeypatch.setattr(targets, "Image", refused)
    assert compile_number("one", 2, []) == 1


def test_what_llvm_says_of_the_processor_is_remembered(folder, monkeypatch):
    import llvmlite.binding as llvm

    targets.find_host.cache_clear()
    try:
        first = targets.find_host()
        assert first.cpu == llvm.get_host_cpu_name()
        assert first.flags == llvm.get_host_cpu_features().flatten()
        if sys.platform == "linux":
            monkeypatch.setattr(targets, "_ask_host", lambda: 1 / 0)
            targets.find_host.cache_clear()
        assert targets.find_host() == first
    finally:
        targets.find_host.cache_clear()
