"""Instruction sets of this machine, and machine code for them: compiled once, cached on disk, verified before use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from llvmlite import ir
from platformdirs import user_cache_path

NAMES = ("avx512-vnni", "avx512", "avx2", "neon")
_VNNI = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni", "f16c", "fma")
_FEATURES = {  # required by each target, in LLVM's terms
    "avx512-vnni": _VNNI,
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "f16c", "fma"),
    "avx2": ("avx2", "f16c", "fma"),
    "neon": ("neon", "dotprod"),
}
_BASE = {"avx512-vnni": "x86-64-v4", "avx512": "x86-64-v4", "avx2": "x86-64-v3", "neon": "generic"}
_MAGIC = b"mlx_llama compiled 1\n"


@dataclass(frozen=True)
class Target:
    """A set of vector instructions.

    dot: instruction that sums four products of 8-bit codes and activations into 32 bits: "vnni" (vpdpbusd), "sdot" (NEON),
    "madd" (16-bit multiply and pair-add). tile: prompt tokens per pass over low-bit weights; float_tile: per pass over float
    weights; both are limited by the registers. prefetch_bytes: distance of the software prefetch of low-bit weights for one
    or two tokens, 0 where the hardware prefetcher suffices; tile_prefetch_bytes: for more, into the first level, 0: a full
    tile prefetches the next panel. gfni: one instruction shifts bits within bytes.
    """

    name: str
    triple: str
    cpu: str
    features: str
    dot: str
    tile: int
    float_tile: int
    prefetch_bytes: int = 0
    tile_prefetch_bytes: int = 0
    gfni: bool = False

    @property
    def wide(self) -> bool:
        """A register holds 16 numbers, and there are 32."""
        return self.name.startswith("avx512")

    def tiles(self, low_bit: bool) -> tuple[int, ...]:
        """Tokens per pass over low-bit or float weights, smallest first: powers of two, then a prompt's tile."""
        full = self.tile if low_bit else self.float_tile
        return (*(tokens for tokens in (1, 2, 4, 8) if tokens < full), full)

    def machine(self) -> llvm.TargetMachine:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, jit=True)


def build_target(name: str, triple: str | None = None, host: bool = True) -> Target:
    """Build a target by name. host: tune for this processor; False: for any with these instructions, also of another
    `triple`."""
    wide = name.startswith("avx512")
    features = ",".join(f"+{feature}" for feature in _FEATURES[name])
    cpu = _BASE[name]
    if host and name == _best():
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    elif name == "avx512":
        features += ",-avx512vnni"
    dot = {"avx512-vnni": "vnni", "neon": "sdot"}.get(name, "madd")
    tile, float_tile = (8, 16) if wide else (4, 6) if name == "avx2" else (4, 4)
    gfni = wide and "+gfni" in features.split(",")
    return Target(name, triple or llvm.get_default_triple(), cpu, features, dot, tile, float_tile,
                  4096 if dot == "madd" else 0, 4096 if dot == "vnni" else 0, gfni)


def available() -> list[str]:
    """Names of the targets that this machine can execute, best first."""
    has = llvm.get_host_cpu_features()
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return [name for name in NAMES[:3] if all(has.get(feature) for feature in _FEATURES[name])]
    if machine in ("arm64", "aarch64"):
        # LLVM lists the features on Linux alone; every Apple processor has the dot product.
        return ["neon"] if sys.platform == "darwin" or has.get("dotprod") or has.get("asimddp") else []
    return []


@functools.cache
def _best() -> str | None:
    return next(iter(available()), None)


class Compiled:
    """Loaded machine code. address: of each public function by name. Must outlive every call."""

    def __init__(self, engine: llvm.ExecutionEngine, names: list[str]):
        self._engine = engine
        self.address = {name: engine.get_function_address(name) for name in names}

    def function(self, name: str, parameters: int) -> Callable[..., None]:
        """A callable of `parameters` integers; it releases the GIL."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * parameters)(self.address[name])


def compile_module(for_target: Target, key: str, names: list[str], write: Callable[[], ir.Module]) -> Compiled:
    """Load the machine code of `write()`, compiled or from the cache on disk.

    key: all that the code depends on besides this package's sources, the compiler and the target. names: the public
    functions.
    """
    digest = _digest(for_target, key)
    folder = _cache_folder()
    file = folder and folder / f"{digest.hex()[:32]}.o"
    code = _read(file, digest) if file else None
    if code is None:
        code = emit_object_code(for_target, write())
        if file:
            _write(file, digest, code)
    llvm.add_symbol("mlx_llama_yield", ctypes.cast(_yield_function(), ctypes.c_void_p).value)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(f'target triple = "{for_target.triple}"'),
                                        for_target.machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return Compiled(engine, names)


def optimise(for_target: Target, module: ir.Module) -> tuple[llvm.ModuleRef, llvm.TargetMachine]:
    """Run LLVM's passes; returns the module and the machine to emit it for. Inlining and vectorising are done by hand."""
    module.triple = for_target.triple
    machine = for_target.machine()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    builder = llvm.create_pass_builder(machine, options)
    if for_target.dot == "madd":
        # The default passes reorder a tile's integer sums token by token, which keeps every code in a register.
        passes = llvm.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.add_loop_rotate_pass()
        passes.add_new_gvn_pass()
        passes.add_instruction_combine_pass()
        passes.add_simplify_cfg_pass()
        passes.add_aggressive_dce_pass()
    else:
        passes = builder.getModulePassManager()
    passes.run(parsed, builder)
    return parsed, machine


def emit_object_code(for_target: Target, module: ir.Module) -> bytes:
    """Compile to an object file."""
    parsed, machine = optimise(for_target, module)
    return machine.emit_object(parsed)


def emit_assembly(for_target: Target, module: ir.Module) -> str:
    """Compile to assembly, for people and tests."""
    parsed, machine = optimise(for_target, module)
    return machine.emit_assembly(parsed)


@functools.cache
def _hash_sources() -> bytes:
    hashed = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hashed.update(path.name.encode() + b"\0" + path.read_bytes())
    return hashed.digest()


def _digest(for_target: Target, key: str) -> bytes:
    compiler = f"{llvmlite.__version__} {llvm.llvm_version_info} {for_target} {key}"
    return hashlib.sha256(_hash_sources() + compiler.encode()).digest()


def _cache_folder() -> Path | None:
    """MLX_LLAMA_CACHE, else the system's folder for caches; None if there is neither."""
    if given := os.environ.get("MLX_LLAMA_CACHE"):
        return Path(given)
    try:
        return user_cache_path("mlx_llama", appauthor=False)
    except RuntimeError:
        return None


def _read(file: Path, digest: bytes) -> bytes | None:
    """The code in a cache file, or None unless it is complete, owned by this user and of this digest."""
    try:
        with open(file, "rb") as stream:
            owner = os.fstat(stream.fileno())
            content = stream.read()
    except OSError:
        return None
    if hasattr(os, "getuid") and (owner.st_uid != os.getuid() or owner.st_mode & 0o022):
        return None  # another user may have written it
    head = len(_MAGIC) + 32 + 32 + 8
    if len(content) < head or not content.startswith(_MAGIC):
        return None
    at = len(_MAGIC)
    made_for, check, length = content[at:at + 32], content[at + 32:at + 64], struct.unpack("<Q", content[at + 64:head])[0]
    code = content[head:]
    if made_for != digest or len(code) != length or hashlib.sha256(digest + code).digest() != check:
        return None
    return code


def _write(file: Path, digest: bytes, code: bytes) -> None:
    """Cache the code on disk. A failure costs a later process another compilation."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".new-")  # readable and writable by this user only
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(_MAGIC + digest + hashlib.sha256(digest + code).digest() + struct.pack("<Q", len(code)) + code)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        pass


@functools.cache
def _yield_function():
    """The system call that yields the processor."""
    if os.name == "nt":
        return ctypes.WinDLL("kernel32").SwitchToThread
    return ctypes.CDLL(None).sched_yield
