"""Machine code of Triton kernels as they are launched, without a GPU: compiled by Triton, disassembled by the tools in its wheel.

`record_launches` runs a function of the kernels' modules on torch's meta device and collects its launches; `compile_launch`
compiles one for a compute capability. In a process without TRITON_INTERPRET (`compile_call` of backends/triton_process.py).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments by name and the options of its compilation."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class MachineCode:
    """registers: of a thread; local: bytes of its stack and spills; loop: instructions of the longest loop, in order."""

    registers: int
    local: int
    loop: tuple[str, ...]

    def count(self, prefix: str) -> int:
        """Instructions of the loop that start with `prefix`."""
        return sum(name.startswith(prefix) for name in self.loop)


def missing_tools() -> str | None:
    """Say which of the tools Triton's package lacks, None if all are there."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    lacking = [name for name in ("ptxas", "nvdisasm", "cuobjdump") if not (folder / name).exists()]
    return f"triton {triton.__version__} comes without {', '.join(lacking)}" if lacking else None


def record_launches(function: Callable, *arguments: Any) -> list[Launch]:
    """Call a function, on meta tensors, whose launches are recorded and not made."""
    from cuda_fallback.kernels import packed

    launches = []

    def record(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        bound = dict(zip(kernel.arg_names, given)) | {name: named.pop(name) for name in kernel.arg_names if name in named}
        launches.append(Launch(kernel, bound, named))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "run", record)
        function(*arguments)
    return launches


def compile_launch(launch: Launch, capability: int) -> MachineCode:
    """Compile as a launch on a GPU would, pointers and multiples of 16 marked as such."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8", torch.uint8: "u8",
             torch.int32: "i32", torch.int64: "i64"}
    signature, constants, attributes = {}, {}, {}
    for i, (name, parameter) in enumerate(zip(launch.kernel.arg_names, launch.kernel.params)):
        value = launch.arguments[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + kinds[value.dtype]
        elif isinstance(value, float) and not parameter.is_constexpr:
            signature[name] = "fp32"
        elif value is None or parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[(i,)] = "constexpr", value
        else:
            signature[name] = "i32"
        is_multiple = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if signature[name].startswith("*") or signature[name] == "i32" and is_multiple:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return _disassemble(triton.compile(source, GPUTarget("cuda", capability, 32), launch.options).asm["cubin"])


def _disassemble(cubin: bytes) -> MachineCode:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (subprocess.run([tools / command[0], *command[1:], file.name], capture_output=True, text=True,
                                      check=True).stdout for command in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c")))
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage).groups()
    labels, names, loop = {}, [], (0, 0)
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(names)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            names.append(found[1])
            target = re.search(r"`\((\.L_\w+)\)", found[2])
            if found[1].startswith("BRA") and target and len(names) - labels.get(target[1], len(names)) > loop[1] - loop[0]:
                loop = labels[target[1]], len(names)
    return MachineCode(int(registers), int(stack) + int(local), tuple(names[slice(*loop)]))
