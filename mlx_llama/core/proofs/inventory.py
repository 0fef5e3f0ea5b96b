"""The backends of this machine, their devices and memory, described without importing a framework.

Each backend describes itself in its file `facts`, from the system's own tools and the installed packages. What only a
framework could tell stays unknown.
"""

from __future__ import annotations

import importlib.metadata
import platform

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.system.gpus import Gpus


def take_stock(gpus: Gpus) -> list[BackendFacts]:
    """All backends: mlx, cpu, cuda."""
    return [_describe(name, gpus) for name in backends.PACKAGES]


def _describe(name: str, gpus: Gpus) -> BackendFacts:
    facts = backends.import_facts(name)
    packages = _versions(facts.DISTRIBUTIONS)
    if reason := backends.missing(name):
        return BackendFacts(name, False, reason, packages)
    return facts.describe(packages, gpus)


def _versions(distributions: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in distributions:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def predict_auto(found: list[BackendFacts]) -> str:
    """The backend that selection.auto() would choose, which imports torch to find out."""
    mlx, _, cuda = found
    if platform.system() == "Darwin" and platform.machine() == "arm64" and mlx.available:
        return "mlx"
    return "cuda" if cuda.available and cuda.gpu is not False else "cpu"
