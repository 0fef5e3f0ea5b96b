"""Which backends this machine has, and on which devices with how much memory, told without importing a framework.

torch takes a second to import. What only a framework could say (a GPU's memory, whether a package that is there also
imports) is asked of the system's own tools, or stays unknown.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import BackendError
from mlx_llama.core.system import machine

SMI_SECONDS = 0.8  # how long nvidia-smi may take; without its daemon it may take several seconds
_PARTS = {
    "mlx": ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda", "mlx-cuda-12", "mlx-cuda-13"),
    "cpu": ("numpy", "llvmlite"),
    "cuda": ("torch", "triton"),
}


@dataclass(frozen=True)
class BackendFacts:
    """One backend on this machine.

    available: it can be chosen; reason: why not, with what to do, or what it lacks. packages: {name: version}.
    gpu: whether it would run on a GPU; None: unknown. device: in words. flags: what the command line needs besides
    --backend. memory_bytes: that a model may take of the device, None: unknown; memory_is: "free" or "an estimate".
    has_bfloat16: False on GPUs without its instructions. kernels: the cpu backend's compiled target, None for NumPy.
    """

    name: str
    available: bool
    reason: str
    packages: dict[str, str]
    gpu: bool | None = False
    device: str = ""
    flags: tuple[str, ...] = ()
    memory_bytes: int | None = None
    memory_is: str = ""
    has_bfloat16: bool = True
    kernels: str | None = None


class Gpus:
    """NVIDIA's own tool, started at once and asked when everything else is done; it gets `SMI_SECONDS`."""

    def __init__(self) -> None:
        self.driver = backends._gpu_driver()
        self._due, self._process = time.monotonic() + SMI_SECONDS, None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
        tool = shutil.which("nvidia-smi") if self.driver and not self._hidden else None
        if tool:
            which = ["-i", visible.split(",")[0].strip()] if visible else []
            query = [tool, *which, "--query-gpu=name,memory.free,compute_cap", "--format=csv,noheader,nounits"]
            try:
                self._process = subprocess.Popen(query, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                 stderr=subprocess.DEVNULL, text=True)
            except OSError:
                pass

    @cached_property
    def first(self) -> tuple[str, int, float] | None:
        """(name, bytes free, compute capability) of the GPU that CUDA takes; None: unknown."""
        if self._process is None:
            return None
        try:
            answer, _ = self._process.communicate(timeout=max(0.01, self._due - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()  # not waited for: a hanging driver lets nobody go
            self._process.stdout.close()
            return None
        row = re.match(r"(.+), *(\d+), *(\d+\.\d+)\s*$", answer.split("\n")[0])
        return (row[1], int(row[2]) << 20, float(row[3])) if row and self._process.returncode == 0 else None

    @property
    def seen(self) -> bool | None:
        """Whether CUDA will find a GPU; None: unknown."""
        if not self.driver or self._hidden:
            return False
        return True if self.first else None

    @property
    def absence(self) -> str:
        """Why there is none."""
        return "CUDA_VISIBLE_DEVICES hides the GPUs" if self._hidden and self.driver else "no GPU driver is in sight"


def take_stock(gpus: Gpus) -> list[BackendFacts]:
    """All backends: mlx, cpu, cuda."""
    return [_mlx(gpus), _cpu(), _cuda(gpus)]


def _versions(name: str) -> dict[str, str]:
    found = {}
    for package in _PARTS[name]:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _mlx(gpus: Gpus) -> BackendFacts:
    packages = _versions("mlx")
    if reason := backends.missing("mlx"):
        return BackendFacts("mlx", False, reason, packages)
    free = machine.free_memory()
    if platform.system() == "Darwin":
        if platform.machine() == "arm64":
            memory = _metal_memory()
            return BackendFacts("mlx", True, "", packages, True, "the GPU, through Metal", (), memory, "an estimate")
        return BackendFacts("mlx", True, "Metal needs Apple silicon", packages, False, "the CPU", (), free, "free")
    if not any(name.startswith("mlx-") for name in packages) and not _holds_library("mlx", "lib/libmlx*"):
        return BackendFacts("mlx", False, "backend 'mlx' lacks its library, which the package 'mlx' alone does not "
                            "bring here: pip install 'mlx[cpu]' (or 'mlx[cuda13]' for NVIDIA GPUs)", packages)
    if any(name.startswith("mlx-cuda") for name in packages):
        if gpus.seen is False:
            return BackendFacts("mlx", True, gpus.absence, packages, False, "the CPU", (), free, "free")
        name, memory = gpus.first[:2] if gpus.first else ("a GPU", None)
        return BackendFacts("mlx", True, "", packages, gpus.seen, name, (), memory, "free" if memory else "")
    return BackendFacts("mlx", True, "no GPU: Metal needs Apple silicon, CUDA the package mlx[cuda13]", packages, False,
                        "the CPU", (), free, "free")


def _holds_library(package: str, pattern: str) -> bool:
    spec = importlib.util.find_spec(package)
    return any(any(Path(folder).glob(pattern)) for folder in spec.submodule_search_locations or ())


def _metal_memory() -> int | None:
    """Bytes that Metal recommends a process to take at most: what the user set, else about two thirds of a small Mac's
    memory and three quarters of a large one's."""
    total = machine.free_memory()
    answer = subprocess.run(["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True).stdout.strip()
    if answer.isdigit() and int(answer) > 0:
        return int(answer) << 20
    return None if total is None else total * 3 // 4 if total >= 36 << 30 else total * 2 // 3


def _cpu() -> BackendFacts:
    packages, memory = _versions("cpu"), machine.free_memory()
    try:
        target, reason = backends.select("cpu").runtime.compiled.find_target()
    except BackendError as error:
        return BackendFacts("cpu", False, str(error), packages)
    if target is None:
        reason = f"no compiled kernels, which are several times faster: {reason}"
        return BackendFacts("cpu", True, reason, packages, False, "NumPy", (), memory, "free")
    return BackendFacts("cpu", True, "", packages, False, f"compiled kernels for {target.name}", (), memory, "free",
                        kernels=target.name)


def _cuda(gpus: Gpus) -> BackendFacts:
    packages = _versions("cuda")
    if reason := backends.missing("cuda"):
        return BackendFacts("cuda", False, f"{reason}{', for the GPU that is here' if gpus.seen else ''}", packages)
    reason = ""
    if gpus.seen is False:
        reason = gpus.absence
    elif not _torch_has_gpus():
        reason = "torch is built without CUDA: install the build for GPUs (https://pytorch.org/get-started)"
    if reason:
        return BackendFacts("cuda", True, f"no GPU: {reason}", packages, False, "torch's CPU device", ("--device cpu",),
                            machine.free_memory(), "free")
    if gpus.first is None:
        return BackendFacts("cuda", True, "nvidia-smi does not say which GPU there is", packages, None,
                            "a GPU, if torch sees one")
    name, memory, capability = gpus.first
    reason = "" if "triton" in packages else "without the package triton decoding is slow: pip install triton"
    return BackendFacts("cuda", True, reason, packages, True, name, (), memory, "free", capability >= 8.0)


def _torch_has_gpus() -> bool:
    """Whether torch was built for GPUs, by its version.py; True where that does not say."""
    spec = importlib.util.find_spec("torch")
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError):
        return True
    values = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+)$", text, re.M)
    return not values or any(value.strip() != "None" for value in values)


def automatic(found: list[BackendFacts]) -> str:
    """What backends.auto() would choose; that imports torch to find out."""
    mlx, _, cuda = found
    if platform.system() == "Darwin" and platform.machine() == "arm64" and mlx.available:
        return "mlx"
    return "cuda" if cuda.available and cuda.gpu is not False else "cpu"
