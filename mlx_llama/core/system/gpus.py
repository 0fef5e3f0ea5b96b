"""Find GPUs without a framework: torch takes a second to import."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from typing import Any

from mlx_llama.core.system.forks import cached_property

SMI_SECONDS = 0.8  # limit for nvidia-smi, which takes several seconds without its daemon


def has_gpu_driver() -> bool:
    """True if NVIDIA's driver is installed; AMD's GPUs are untested and need `backend='cuda'`."""
    if os.name == "nt":
        return os.path.exists(os.path.expandvars(r"%SystemRoot%\System32\nvcuda.dll"))
    # NVIDIA, NVIDIA inside WSL, NVIDIA Jetson
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu")))


class Gpus:
    """GPUs that nvidia-smi reports. It starts at once; its answer is read within `SMI_SECONDS`."""

    def __init__(self) -> None:
        self.driver = has_gpu_driver()
        self._due, self._process = time.monotonic() + SMI_SECONDS, None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._hidden = visible is not None and visible.split(",")[0].strip() in ("", "-1")
        tool = shutil.which("nvidia-smi") if self.driver and not self._hidden else None
        if tool:
            which = ["-i", visible.split(",")[0].strip()] if visible else []
            query = ["--query-gpu=name,memory.free,compute_cap", "--format=csv,noheader,nounits"]
            pipes: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            with contextlib.suppress(OSError):
                self._process = subprocess.Popen(
                    [tool, *which, *query], stdout=subprocess.PIPE, text=True, **pipes
                )

    @cached_property
    def first(self) -> tuple[str, int, float] | None:
        """(name, free bytes, compute capability) of the GPU that CUDA uses; None if unknown."""
        if self._process is None:
            return None
        try:
            answer, _ = self._process.communicate(timeout=max(0.01, self._due - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()  # without waiting: a process inside a hanging driver does not end
            assert self._process.stdout is not None  # a pipe
            self._process.stdout.close()
            return None
        row = re.match(r"(.+), *(\d+), *(\d+\.\d+)\s*$", answer.split("\n")[0])
        if row is None or self._process.returncode:
            return None
        return row[1], int(row[2]) << 20, float(row[3])

    @property
    def seen(self) -> bool | None:
        """True if CUDA will find a GPU; None if unknown."""
        if not self.driver or self._hidden:
            return False
        return True if self.first else None

    @property
    def absence(self) -> str:
        """The reason why CUDA finds no GPU."""
        is_hidden = self._hidden and self.driver
        return "CUDA_VISIBLE_DEVICES hides the GPUs" if is_hidden else "no GPU driver is installed"
