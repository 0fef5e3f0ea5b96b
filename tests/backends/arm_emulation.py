"""Run the tests of the compiled path with NEON's machine code under qemu-aarch64 (Linux):

    PYTHONPATH=tests:. pytest -n 0 -p backends.arm_emulation tests/backends/kernels/test_products.py

This process compiles the kernels for Arm and links them into a program that qemu runs. All memory
of NumPy's arrays is shared with that program, at the same addresses, and a call of a kernel is a
message to one of its threads. Everything else is as on any machine: the tests, the lowering, the
team of threads.

MLX_LLAMA_TEST_ARM: qemu's processor and LLVM's, such as "max apple-m1". By default the code uses no
instructions but those that the target requires, and the processor is one with few others (Armv8.2
with the dot product).
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import queue
import socket
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from llvmlite import ir

from cpu_fallback import pages
from cpu_fallback.kernels import target
from mlx_llama.core.system import machine

TRIPLE = "aarch64-unknown-linux-gnu"
EMULATOR, COMPILER = "qemu-aarch64", "aarch64-linux-gnu-gcc"
ADDRESS, SIZE = 1 << 36, 8 << 30  # of the shared memory; far from both processes' own
CALLERS = 8  # threads that may call at the same time
SOURCE = Path(__file__).with_suffix(".c")
PROCESSOR, _, TUNE = os.environ.get("MLX_LLAMA_TEST_ARM", "cortex-a76").partition(" ")


class _Handler(ctypes.Structure):
    """NumPy's PyDataMem_Handler."""

    _fields_ = [
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("malloc", "calloc", "realloc", "free")),
    ]


def share_arrays(folder: Path) -> int:
    """Let NumPy allocate all further arrays in shared memory; returns its descriptor."""
    library = folder / "allocator.so"
    subprocess.run(["cc", "-O1", "-w", "-shared", "-fPIC", SOURCE, "-o", library], check=True)
    allocator = ctypes.CDLL(library)
    memory = os.memfd_create("arrays")
    os.truncate(memory, SIZE)
    # Change NumPy's default handler in place: another one would serve this thread alone.
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    interface = (ctypes.c_void_p * 307).from_address(pointer(np._core.multiarray._ARRAY_API, None))
    default = ctypes.py_object.from_address(interface[306]).value  # PyDataMem_DefaultHandler
    handler = _Handler.from_address(pointer(default, b"mem_handler"))
    if handler.name != b"default_allocator" or handler.version != 1:
        raise RuntimeError(f"NumPy's default allocator is {handler.name} {handler.version}")
    if not allocator.start(
        memory,
        ctypes.c_void_p(ADDRESS),
        ctypes.c_size_t(SIZE),
        ctypes.c_void_p(handler.realloc),
        ctypes.c_void_p(handler.free),
    ):
        raise OSError(f"no shared memory at {ADDRESS:#x}")
    for name, function in (
        ("free", "give"),
        ("realloc", "resize"),
        ("calloc", "take_zeros"),
        ("malloc", "take"),
    ):
        setattr(handler, name, ctypes.cast(getattr(allocator, function), ctypes.c_void_p).value)
    return memory


class FileCopy(np.ndarray):
    """A file's bytes in shared memory, in place of a machine.FileMap. stamp: as there, of this copy
    alone.
    """

    stamp: tuple[int, ...]

    @classmethod
    def of(cls, file: BinaryIO) -> FileCopy:
        size = os.fstat(file.fileno()).st_size
        copy = np.frombuffer(os.pread(file.fileno(), size, 0), np.uint8).copy().view(cls)
        copy.flags.writeable = False
        copy.stamp = (copy.ctypes.data,)
        return copy

    def __getitem__(self, part: slice) -> bytes:
        return bytes(memoryview(self)[part])

    def madvise(self, *_: int) -> None:
        """Keep the pages."""

    def size(self) -> int:
        """Bytes, a method as of mmap.mmap."""
        return self.nbytes


class Emulated:
    """target.Compiled in another process: a program of the kernels, run by qemu. calls: of all
    programs' kernels.
    """

    calls = 0

    def __init__(self, code: bytes, names: list[str]):
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "kernels.o").write_bytes(code)
        table = "".join(f'.quad "{name}"\n' for name in names)
        (folder / "table.s").write_text(
            f".section .rodata\n.balign 8\n.globl functions\nfunctions:\n{table}"
        )
        program = folder / "program"
        subprocess.run(
            [
                COMPILER,
                "-O1",
                "-static",
                "-pthread",
                SOURCE,
                folder / "table.s",
                folder / "kernels.o",
                "-o",
                program,
            ],
            check=True,
        )
        pairs = [socket.socketpair() for _ in range(CALLERS)]
        passed = [_memory, *(theirs.fileno() for _, theirs in pairs)]
        self._process = subprocess.Popen(
            [
                EMULATOR,
                "-cpu",
                PROCESSOR,
                program,
                *map(str, (_memory, ADDRESS, SIZE, *passed[1:])),
            ],
            pass_fds=passed,
        )
        self._channels: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for ours, theirs in pairs:
            theirs.close()
            self._channels.put(ours)
        self._numbers = {name: number for number, name in enumerate(names)}
        self.address = {name: self._ask(-1 - number) for name, number in self._numbers.items()}

    def __del__(self) -> None:
        self._process.kill()
        self._process.wait()

    def function(self, name: str, parameters: int) -> Callable[..., None]:
        """As Compiled.function; the callable also takes one float among its integers."""
        number = self._numbers[name]

        def call(*arguments: int | float) -> None:
            integers = [argument for argument in arguments if not isinstance(argument, float)]
            floats = [argument for argument in arguments if isinstance(argument, float)] or [0.0]
            if len(arguments) != parameters or len(integers) > 18 or len(floats) > 1:
                raise TypeError(
                    f"{name} takes {parameters} arguments, at most 18 integers and a float, "
                    f"not {arguments}"
                )
            Emulated.calls += 1
            if self._ask(number, integers, floats[0]) is None:
                raise RuntimeError(
                    f"{name}{arguments} ended its process with status {self._process.wait()}"
                )

        return call

    def _ask(self, number: int, integers: Sequence[int] = (), real: float = 0.0) -> int | None:
        """Call function `number`, or with -1 - number ask for its address there; None: the process
        ended.
        """
        channel = self._channels.get()
        try:
            channel.sendall(
                struct.pack("<19qfi", number, *integers, *[0] * (18 - len(integers)), real, 0)
            )
            answer = channel.recv(8, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        finally:
            self._channels.put(channel)
        return struct.unpack("<q", answer)[0] if len(answer) == 8 else None


def compile_module(
    for_target: target.Target, key: str, names: list[str], write: Callable[[], ir.Module]
) -> Emulated:
    """As target.compile_module."""
    return Emulated(target.emit_object_code(for_target, write()), names)


def build_target(name: str, triple: str | None = None, host: bool = True) -> target.Target:
    """As target.build_target; the host's processor is the emulated one."""
    host_target = _build_target(name, triple or TRIPLE, host=False)
    return dataclasses.replace(host_target, cpu=TUNE, features="") if TUNE and host else host_target


# Before any module of the compiled path takes these functions by name
_folder = tempfile.TemporaryDirectory()
_memory = share_arrays(Path(_folder.name))
_build_target = target.build_target
target.available, target.build_target = (lambda: ["neon"]), build_target
target.compile_module = compile_module
pages.map_huge = lambda nbytes: np.zeros(nbytes, np.uint8)
machine.map_file = FileCopy.of

from backends.kernels import calls
from cpu_fallback.kernels import bus_errors

bus_errors.find_guard = lambda: None  # its code would be the host's
calls.Library._call = lambda library, function: library._compiled.function(
    function.ir.name, len(function.parameters)
)


def pytest_terminal_summary(terminalreporter) -> None:
    terminalreporter.write_line(
        f"{Emulated.calls} calls of NEON kernels on qemu's {PROCESSOR}{' ' if TUNE else ''}{TUNE}"
    )
