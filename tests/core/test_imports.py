"""Imports: without mlx and torch installed, their cost, and their direction between files."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
from pathlib import Path

import pytest
from launching import run_python

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx", "mlx_lm", "torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> subprocess.CompletedProcess:
    return run_python("-c", code)


def test_import_and_generate_without_mlx_torch_or_transformers(toy):
    code = (
        BLOCK
        + f"""
import mlx_llama, cpu_fallback
import mlx_llama.chat, mlx_llama.generate, mlx_llama.bench, mlx_llama.quantize, mlx_llama.__main__
llm = mlx_llama.load({str(toy)!r}, backend="cpu")
assert len(llm.generate("Once upon", max_tokens=3).tokens) == 3
assert len(llm.chat().send("hi", max_tokens=3).tokens) == 3
assert not {{"mlx", "torch", "transformers"}} & set(sys.modules)
print("fine")
"""
    )
    done = run(code)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("backend, package", [("mlx", "mlx"), ("cuda", "torch")])
def test_a_backend_that_is_not_installed_says_what_to_install(backend, package, toy):
    code = (
        BLOCK
        + f"""
from mlx_llama.core.backends import selection
selection.importlib.util.find_spec = lambda name: None
from mlx_llama import cli, generate
sys.exit(cli.run(generate.main, ["-p", "hi", "--backend", {backend!r}, "--model", {str(toy)!r}]))
"""
    )
    done = run(code)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"needs the package {package!r}" in done.stderr and "pip install" in done.stderr


def test_importing_the_package_imports_nothing_heavy():
    heavy = "mlx.core torch numpy pydantic jinja2 tokenizers sentencepiece huggingface_hub".split()
    heavy += ["prompt_toolkit", "rich"]
    done = run(f"import sys, mlx_llama; print(sorted(set({heavy!r}) & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


# Arrows between files


def import_graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Each module's imports among the modules of `packages`, also in functions and under
    TYPE_CHECKING.

    Frameworks and other packages are there by their first name.
    """
    files = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        home = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), home)
                names |= {
                    name if (name := f"{base}.{alias.name}") in files else base
                    for alias in node.names
                }
        graph[module] = {name if name in files else name.split(".")[0] for name in names} - {module}
    return graph


def circles(graph: dict[str, set[str]]) -> set[tuple[str, ...]]:
    """Modules that import each other, directly or through others: the groups, sorted."""

    def reachable(start: str) -> set[str]:
        seen, waiting = set(), [start]
        while waiting:
            for name in graph.get(waiting.pop(), ()):
                if name not in seen:
                    seen.add(name)
                    waiting.append(name)
        return seen

    reach = {module: reachable(module) for module in graph}
    return {
        tuple(sorted(other for other in reach[module] if module in reach.get(other, ())))
        for module in graph
    } - {()}


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mlx_llama", "cpu_fallback", "cuda_fallback")
BACKENDS = ("mlx_llama.mlx_native", "cpu_fallback", "cuda_fallback")
# Modules of core that a backend may import: no scheduler, no session
NEUTRAL = tuple(
    f"mlx_llama.core.{module}"
    for module in (
        "llama ops dtypes models files backends.interface "
        "backends.logprobs backends.model backends.positions backends.profile backends.shards "
        "backends.weights options rng sample errors system"
    ).split()
)


def is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.fixture(scope="module")
def graph():
    return import_graph(ROOT, PACKAGES)


def test_no_two_files_import_each_other(graph):
    assert circles(graph) == set()


def test_core_imports_no_framework_no_backend_and_no_door(graph):
    core = {module: names for module, names in graph.items() if is_in(module, ("mlx_llama.core",))}
    assert len(core) > 20
    forbidden = ("mlx", "mlx_lm", "torch", "transformers", *PACKAGES)
    for module, names in core.items():
        outside = [name for name in names if not is_in(name, ("mlx_llama.core",))]
        assert not [name for name in outside if is_in(name, forbidden)], (module, outside)


def test_core_and_api_do_not_know_the_guide(graph):
    for module, names in graph.items():
        if is_in(module, ("mlx_llama.core", "mlx_llama.api")):
            assert not [name for name in names if is_in(name, ("mlx_llama.guide",))], module


def test_backends_import_neutral_core_and_no_other_backend(graph):
    for module, names in graph.items():
        home = tuple(backend for backend in BACKENDS if is_in(module, (backend,)))
        for name in names if home else ():
            is_allowed = not is_in(name, PACKAGES) or is_in(name, (*home, *NEUTRAL))
            assert is_allowed, (module, name)


def test_circles_are_seen_wherever_they_hide(tmp_path):
    """Two files under TYPE_CHECKING and in a function, three in a ring; a file that imports its
    package's is no circle.
    """
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import B",
        "b": "def f():\n    from p import a",
        "c": "import p.d",
        "d": "from . import e",
        "e": "from p.c import x",
        "f": "import torch.nn\nfrom . import a",
        "g": "from p.f import a",
    }.items():
        (package / f"{name}.py").write_text(text)
    graph = import_graph(tmp_path, ("p",))
    assert circles(graph) == {("p.a", "p.b"), ("p.c", "p.d", "p.e")}
    assert graph["p.f"] == {"torch", "p.a"}
