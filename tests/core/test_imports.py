"""What works with neither mlx nor torch installed, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx", "mlx_lm", "torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_import_and_generate_without_mlx_torch_or_transformers(toy):
    code = BLOCK + f"""
import mlx_llama, cpu_fallback
import mlx_llama.chat, mlx_llama.generate, mlx_llama.bench, mlx_llama.quantize, mlx_llama.__main__
llm = mlx_llama.load({str(toy)!r}, backend="cpu")
assert len(llm.generate("Once upon", max_tokens=3).tokens) == 3
assert len(llm.chat().send("hi", max_tokens=3).tokens) == 3
assert not {{"mlx", "torch", "transformers"}} & set(sys.modules)
print("fine")
"""
    done = run(code)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("backend, package", [("mlx", "mlx"), ("cuda", "torch")])
def test_a_backend_that_is_not_installed_says_what_to_install(backend, package, toy):
    code = BLOCK + f"""
from mlx_llama.core.backends import selection
selection.importlib.util.find_spec = lambda name: None
from mlx_llama import cli, generate
sys.exit(cli.run(generate.main, ["-p", "hi", "--backend", {backend!r}, "--model", {str(toy)!r}]))
"""
    done = run(code)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert f"needs the package {package!r}" in done.stderr and "pip install" in done.stderr


def test_importing_the_package_imports_nothing_heavy():
    heavy = ("mlx.core", "torch", "numpy", "pydantic", "jinja2", "tokenizers", "sentencepiece", "huggingface_hub",
             "prompt_toolkit", "rich")
    done = run(f"import sys, mlx_llama; print(sorted(set({heavy!r}) & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


def test_core_never_imports_a_framework():
    import ast
    from pathlib import Path

    import mlx_llama.core

    for path in Path(mlx_llama.core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            assert not {name.split(".")[0] for name in names} & {"mlx", "mlx_lm", "torch", "transformers"}, path
