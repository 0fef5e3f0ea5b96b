"""Describe the backends of this machine, their devices and memory, without importing a framework.

Each backend has a file `facts`, which asks the system's tools and the installed packages. Facts
that need a framework are unknown.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform

from mlx_llama.core.backends import selection
from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.system.gpus import Gpus


def take_stock(gpus: Gpus) -> list[BackendFacts]:
    """All backends: mlx, cpu, cuda."""
    return [_describe(name, gpus) for name in selection.PACKAGES]


def _describe(name: str, gpus: Gpus) -> BackendFacts:
    facts = selection.import_facts(name)
    packages = _versions(facts.DISTRIBUTIONS)
    if reason := selection.missing(name):
        return BackendFacts(name, False, reason, packages)
    return facts.describe(packages, gpus)


def _versions(distributions: tuple[str, ...]) -> dict[str, str]:
    versions = {}
    for package in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def predict_auto(backends: list[BackendFacts]) -> str:
    """Predict the choice of selection.auto(), which imports torch. backends: as `take_stock`
    returns them.
    """
    mlx, _, cuda = backends
    if platform.system() == "Darwin" and platform.machine() == "arm64" and mlx.available:
        return "mlx"
    return "cuda" if cuda.available and cuda.gpu is not False else "cpu"
