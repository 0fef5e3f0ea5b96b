"""The bench's flags and tables."""

from __future__ import annotations

import numpy as np
from machine import device_of


def flags(backend) -> list[str]:
    device = [] if backend.name == "cpu" else ["--device", device_of(backend)]
    return ["--backend", backend.name, *device]


def parse_table(markdown: str) -> list[list[str]]:
    """The cells of a table."""
    lines = [line.strip("|").split("|") for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def check_curve(picture) -> None:
    """An image of the plot has its size, and pixels in the color of the curve."""
    assert picture.size == (1200, 750)
    shades = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    assert (shades == (0x2A, 0x6F, 0x97)).all(axis=1).sum() > 300
