"""The three backends are one house built three times: same files, same public names, same signatures."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from machine import ALL, open_backend

ROOT = Path(__file__).resolve().parents[2]
HOMES = {"mlx": ROOT / "mlx_llama/mlx_native", "cpu": ROOT / "cpu_fallback", "cuda": ROOT / "cuda_fallback"}
FILES = ("runtime", "ops", "layers", "cache", "sampling", "model")


def signature(function: ast.FunctionDef) -> tuple:
    """Names and kinds of the parameters, which have defaults, and the decorators that change how it is called."""
    a = function.args
    kinds = {"staticmethod", "classmethod", "property"}
    decorators = tuple(d.id for d in function.decorator_list if isinstance(d, ast.Name) and d.id in kinds)
    return (tuple(p.arg for p in (*a.posonlyargs, *a.args)), len(a.defaults), tuple(p.arg for p in a.kwonlyargs),
            bool(a.vararg), bool(a.kwarg), decorators)


def public(file: Path) -> dict[str, tuple]:
    """Every public function, class, method, field and constant of a file with its signature."""
    found: dict[str, tuple] = {}

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name in ("__call__", "__init__")):
                found[prefix + node.name] = signature(node)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[prefix + node.name] = ("class",)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and prefix:
                found[prefix + node.target.id] = ("field",)

    visit(ast.parse(file.read_text(encoding="utf-8")).body, "")
    return found


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("other", ["cpu", "cuda"])
def test_same_public_names_and_signatures(file, other):
    wanted, got = public(HOMES["mlx"] / f"{file}.py"), public(HOMES[other] / f"{file}.py")
    # A backend may have helpers for its own arithmetic; what the others see must be in all three.
    helpers = {"ops": {"widen"}, "sampling": {"gumbel"}, "model": {"Llama.notices"}}.get(file, set())
    drop = lambda names: {name: names[name] for name in names if name not in helpers}  # noqa: E731
    assert drop(got) == drop(wanted)
    assert len(wanted) >= 3


def test_every_backend_has_the_six_files():
    for home in HOMES.values():
        assert set(FILES) | {"__init__"} <= {path.stem for path in home.glob("*.py")}


def test_what_the_engine_uses_is_there(backend):
    """The Protocols' names and parameters are those of the classes behind them."""
    from mlx_llama.core.backends import selection as protocols

    for protocol, real in ((protocols.Model, backend.model.Llama), (protocols.Cache, backend.model.Cache),
                           (protocols.Sampler, backend.sampling.Sampler)):
        for name, member in vars(protocol).items():
            if inspect.isfunction(member) and (not name.startswith("_") or name == "__call__"):
                assert list(inspect.signature(member).parameters) == list(
                    inspect.signature(getattr(real, name)).parameters), name


ALLOWED = {"models", "files", "backends.positions", "generation.rng", "generation.options", "errors", "system"}


@pytest.mark.parametrize("name", HOMES)
def test_arrows_point_one_way(name):
    """A backend imports itself, its framework and the neutral core; no other backend, no engine, no door."""
    own = {"mlx": "mlx_llama.mlx_native", "cpu": "cpu_fallback", "cuda": "cuda_fallback"}
    for path in HOMES[name].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else [])
            for module in modules:
                if module.startswith("mlx_llama.core"):
                    found = [module] if module.count(".") > 2 else [f"{module}.{a.name}" for a in node.names]
                    for full in found:
                        room = full.removeprefix("mlx_llama.core.")
                        assert any(room == one or room.startswith(one + ".") for one in ALLOWED), (path, full)
                else:
                    assert not module.startswith(("mlx_llama", *(v for k, v in own.items() if k != name))), (path, module)


@pytest.mark.parametrize("name", ALL)
def test_the_backend_is_here(name):
    """Skips, with the reason, where a backend is missing; fails where this machine must have it."""
    assert open_backend(name).name == name.split("-")[0]
