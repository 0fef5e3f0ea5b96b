"""Detect a start by mlx.launch or torchrun from environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def find_launcher() -> str | None:
    """The backend that the launcher of this process connects with others, "mlx" or "cuda"; None for
    a single process.
    """
    env = os.environ
    if "MLX_RANK" in env:
        hosts = env.get("MLX_HOSTFILE")  # empty for one process
        is_alone = hosts and not Path(hosts).read_text(encoding="utf-8-sig").strip()
        return None if is_alone or env.get("MLX_WORLD_SIZE") == "1" else "mlx"
    is_cuda = all(name in env for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return "cuda" if is_cuda and env.get("WORLD_SIZE", "1") != "1" else None
