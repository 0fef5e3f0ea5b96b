"""Instruction sets of this machine, and machine code: compiled once, cached on disk, verified.

Cached code is loaded without LLVM (image.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import platform
import stat
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import llvmlite

from mlx_llama.core import files
from mlx_llama.core.system.cache_folder import cache_folder, is_private
from mlx_llama.core.system.files import open_file, write_file

from .image import Image

if TYPE_CHECKING:
    import llvmlite.binding as llvm
    from llvmlite import ir

NAMES = ("avx512-vnni", "avx512", "avx2", "neon")
_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "f16c", "fma")
_FEATURES = {  # required by each target, in LLVM's terms
    "avx512-vnni": _VNNI,
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "fma"),
    "avx2": ("avx2", "f16c", "fma"),
    "neon": ("neon", "dotprod"),
}
_BASE = {"avx512-vnni": "x86-64-v4", "avx512": "x86-64-v4", "avx2": "x86-64-v3", "neon": "generic"}
_MAGIC = b"mlx_llama compiled 2\n"
_CODE_LIMIT = 1 << 26  # bytes of a cached file

# Software prefetches of weights for one or two tokens, by processor (LLVM's name), target and
# layout ("any": all others). Results do not depend on them. The command bench writes the best here.
PREFETCHES = Path(__file__).with_name("prefetches.json")
Prefetch = tuple[tuple[int, int], ...]  # (level of the cache, or 0 for a single use; bytes ahead)
# Lines of /proc/cpuinfo that identify a processor, on x86-64 and on ARM
_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
_IDENTITY += tuple(f"CPU {name}" for name in ("implementer", "architecture", "variant", "part"))
_IDENTITY += ("CPU revision", "Features")


@dataclass(frozen=True)
class Host:
    """This machine in LLVM's terms."""

    cpu: str
    features: tuple[str, ...]
    missing: tuple[str, ...]  # features that it lacks
    triple: str

    @property
    def flags(self) -> str:
        """All features, for a target machine."""
        signs = dict.fromkeys(self.features, "+") | dict.fromkeys(self.missing, "-")
        return ",".join(signs[name] + name for name in sorted(signs))


@functools.cache
def find_host() -> Host:
    """Ask LLVM, unless the cache has its answer for a machine with the same /proc/cpuinfo."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read(1 << 16).split("\n\n")[0]
    except (OSError, ValueError):
        return _ask_host()
    facts = [line for line in text.splitlines() if line.split("\t")[0].strip() in _IDENTITY]
    facts = ["host", llvmlite.__version__, platform.machine(), *facts]
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    folder = cache_folder()
    file = folder and folder / f"{digest.hex()[:32]}.o"
    if file and (known := _read(file, digest)):
        cpu, features, missing, triple = json.loads(known)
        return Host(cpu, tuple(features), tuple(missing), triple)
    host = _ask_host()
    if file:
        _write(file, digest, json.dumps(dataclasses.astuple(host)).encode())
    return host


def _ask_host() -> Host:
    import llvmlite.binding as llvm

    try:
        has = llvm.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this system
        has = {}
    features = tuple(sorted(name for name in has if has[name]))
    missing = tuple(sorted(name for name in has if not has[name]))
    return Host(llvm.get_host_cpu_name(), features, missing, llvm.get_default_triple())


def find_prefetches(processor: str, name: str) -> tuple[tuple[tuple[str, Prefetch], ...], bool]:
    """A target's prefetches by layout, and whether they were measured on this processor."""
    table = json.loads(PREFETCHES.read_text())
    measured = name in table.get(processor, {})
    by_layout = table[processor if measured else "any"][name].items()
    return tuple((layout, tuple(map(tuple, part))) for layout, part in by_layout), measured


@dataclass(frozen=True)
class Target:
    """A set of vector instructions."""

    name: str
    triple: str
    cpu: str
    features: str
    # The instruction that sums products of 8-bit codes and activations: "vnni" (vpdpbusd) or "sdot"
    # (NEON), four products each; "madd" (16-bit multiply and pair-add).
    dot: str
    tile: int  # prompt tokens per pass over low-bit weights; the registers limit this
    float_tile: int  # the same over float weights
    # Software prefetches of weights for one or two tokens, by layout ("any": all others); none
    # where the hardware suffices.
    prefetches: tuple[tuple[str, Prefetch], ...] = (("any", ()),)
    # distance for more tokens, into the first level; 0: a full tile prefetches the next panel
    tile_prefetch_bytes: int = 0
    gfni: bool = False  # an instruction shifts bits within bytes
    bf16: bool = False  # an instruction sums two products of bfloat16 numbers into float32

    @property
    def wide(self) -> bool:
        """A register holds 16 numbers, and there are 32."""
        return self.name.startswith("avx512")

    def prefetch(self, layout_name: str) -> Prefetch:
        known = dict(self.prefetches)
        return known.get(layout_name, known["any"])

    def tiles(self, low_bit: bool) -> tuple[int, ...]:
        """Sizes of tiles in tokens: powers of two, smallest first, then a prompt's tile."""
        full = self.tile if low_bit else self.float_tile
        return (*(tokens for tokens in (1, 2, 4, 8) if tokens < full), full)

    def machine(self) -> llvm.TargetMachine:
        import llvmlite.binding as llvm

        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, jit=True
        )


def build_target(name: str, triple: str | None = None, host: bool = True) -> Target:
    """Build a target by name. host: tune for this processor; False: for any processor with these
    instructions, also of another `triple`.
    """
    wide = name.startswith("avx512")
    features = ",".join(f"+{feature}" for feature in _FEATURES[name])
    cpu = _BASE[name]
    if host and name == _best():
        cpu, features = find_host().cpu, find_host().flags
    elif name == "avx512":
        features += ",-avx512vnni"
    dot = {"avx512-vnni": "vnni", "neon": "sdot"}.get(name, "madd")
    tile, float_tile = (8, 16) if wide else (4, 6) if name == "avx2" else (4, 4)
    gfni, bf16 = (wide and f"+{name}" in features.split(",") for name in ("gfni", "avx512bf16"))
    prefetches, _ = find_prefetches(find_host().cpu if host else "any", name)
    return Target(
        name,
        triple or find_host().triple,
        cpu,
        features,
        dot,
        tile,
        float_tile,
        prefetches,
        4096 if dot == "vnni" else 0,
        gfni,
        bf16,
    )


def available() -> list[str]:
    """Names of the targets that this machine executes, best first."""
    has = find_host().features
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return [name for name in NAMES[:3] if set(_FEATURES[name]) <= set(has)]
    if machine in ("arm64", "aarch64"):
        # LLVM lists features on Linux only; every Apple processor has the dot product.
        return ["neon"] if sys.platform == "darwin" or "dotprod" in has or "asimddp" in has else []
    return []


@functools.cache
def _best() -> str | None:
    return next(iter(available()), None)


class Compiled:
    """Loaded machine code."""

    def __init__(self, owner: object, address: dict[str, int]):
        self._owner = owner  # keeps the code's memory alive
        self.address = address  # each public function's, by name

    def function(self, name: str, parameters: int) -> Callable[..., None]:
        """A callable of `parameters` integers; it releases the GIL."""
        call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)(self.address[name])
        call.code = self  # must outlive every call
        return call


def compile_module(
    for_target: Target,
    key: str,
    names: list[str],
    write: Callable[[], ir.Module],
    externals: Mapping[str, int] | None = None,
) -> Compiled:
    """Load the machine code of `write()`, compiled or from the cache on disk.

    key: names all that the code depends on besides this package's sources, the compiler and the
    target. names: of the public functions. externals: addresses of its own external symbols.
    """
    digest = _digest(for_target, key)
    folder = cache_folder()
    file = folder and folder / f"{digest.hex()[:32]}.o"
    code = _read(file, digest) if file else None
    if code is None:
        code = emit_object_code(for_target, write())
        if file:
            _write(file, digest, code)
    yields = ctypes.cast(_yield_function(), ctypes.c_void_p).value
    return _load(for_target, code, names, {"mlx_llama_yield": yields, **(externals or {})})


def _load(
    for_target: Target, code: bytes, names: list[str], externals: Mapping[str, int]
) -> Compiled:
    """Load an object file: as an image on x86-64 Linux, else by LLVM."""
    if sys.platform == "linux":
        with contextlib.suppress(ValueError, OSError, struct.error):
            image = Image(code, externals)
            return Compiled(image, {name: image.address[name] for name in names})
    import llvmlite.binding as llvm

    for name, address in externals.items():
        llvm.add_symbol(name, address)
    empty = llvm.parse_assembly(f'target triple = "{for_target.triple}"')
    engine = llvm.create_mcjit_compiler(empty, for_target.machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Compiled(engine, {name: engine.get_function_address(name) for name in names})


def optimise(for_target: Target, module: ir.Module) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Run LLVM's passes; returns the module and its target machine."""
    import llvmlite.binding as llvm

    module.triple = for_target.triple
    machine = for_target.machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    builder = llvm.create_pass_builder(machine, options)
    if for_target.dot == "madd":
        # The default passes reorder a tile's integer sums token by token, which keeps every code in
        # a register.
        passes, combine = llvm.create_new_module_pass_manager(), "instruction_combine simplify_cfg"
        for name in f"sroa {combine} loop_rotate new_gvn {combine} aggressive_dce".split():
            getattr(passes, f"add_{name}_pass")()
    else:
        passes = builder.getModulePassManager()
    passes.run(parsed, builder)
    return parsed, machine


def emit_object_code(for_target: Target, module: ir.Module) -> bytes:
    parsed, machine = optimise(for_target, module)
    return machine.emit_object(parsed)


@functools.cache
def _hash_sources() -> bytes:
    hashed = hashlib.sha256()
    formats = Path(files.__file__).with_name("quantized.py")
    for path in (*sorted(Path(__file__).parent.glob("*.py")), formats):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.digest()


def _digest(for_target: Target, key: str) -> bytes:
    compiler = f"{llvmlite.__version__} {for_target} {key}"
    return hashlib.sha256(_hash_sources() + compiler.encode()).digest()


def _frame(digest: bytes, code: bytes) -> bytes:
    return _MAGIC + digest + hashlib.sha256(digest + code).digest() + code


def _read(file: Path, digest: bytes) -> bytes | None:
    """Read the code of a cache file; None unless it is whole, private and of this digest."""
    try:
        with open_file(file) as stream:
            status = os.fstat(stream.fileno())
            if not is_private(status) or status.st_size > _CODE_LIMIT:
                return None
            content = stream.read()
    except OSError:
        return None
    code = content[len(_frame(digest, b"")) :]
    return code if content == _frame(digest, code) else None


def _write(file: Path, digest: bytes, code: bytes) -> None:
    """Cache code on disk. After a failure, later processes compile again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.path.lexists(file) and not stat.S_ISREG(os.lstat(file).st_mode):
            file.unlink()  # a pipe or a link
        write_file(file, _frame(digest, code), is_private=True)


@functools.cache
def _yield_function():
    """The function of the system that yields the processor."""
    if os.name == "nt":
        return ctypes.WinDLL("kernel32").SwitchToThread
    return ctypes.CDLL(None).sched_yield
