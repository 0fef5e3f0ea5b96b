"""Detect a start by mlx.launch or torchrun from environment variables."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from mlx_llama.core.errors import BackendError


@dataclass(frozen=True)
class Launch:
    """A process of a run in which several compute a model together."""

    backend: str  # "mlx" or "cuda"
    rank: int  # of this process
    host: str  # address of rank 0


def find_launch() -> Launch | None:
    """The launch that started this process; None for a single process. Raises BackendError."""
    env = os.environ
    if "MLX_RANK" in env:
        host = _mlx_host()
        return Launch("mlx", int(env["MLX_RANK"]), host) if host else None
    if (
        all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
        and env["WORLD_SIZE"] != "1"
    ):
        return Launch("cuda", int(env["RANK"]), env["MASTER_ADDR"])
    return None


def _mlx_host() -> str:
    """Address of rank 0 as mlx.launch passes it to its backends; "" for a single process."""
    if path := os.environ.get("MLX_HOSTFILE"):  # ring
        text = Path(path).read_text(encoding="utf-8-sig").strip()
        return json.loads(text)[0][0].rpartition(":")[0] if text else ""
    if address := os.environ.get("MLX_JACCL_COORDINATOR"):
        return address.rpartition(":")[0]
    if os.environ.get("MLX_WORLD_SIZE") == "1":
        return ""
    if address := os.environ.get("NCCL_HOST_IP"):
        return address
    raise BackendError(
        "MLX_RANK is set, but none of mlx.launch's MLX_HOSTFILE, MLX_JACCL_COORDINATOR and "
        "NCCL_HOST_IP: start with mlx.launch --backend ring, jaccl or nccl, or unset MLX_RANK"
    )
