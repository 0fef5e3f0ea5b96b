"""The three backends have the same files, public names, signatures and errors."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from machine import ALL, missing, open_backend

from mlx_llama.core.errors import LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.generation import options

ROOT = Path(__file__).resolve().parents[2]
HOMES = {"mlx": ROOT / "mlx_llama/mlx_native", "cpu": ROOT / "cpu_fallback", "cuda": ROOT / "cuda_fallback"}
FILES = ("facts", "runtime", "ops", "cache", "weights", "sampling", "model")


def signature(function: ast.FunctionDef) -> tuple:
    """Names, kinds and defaults of the parameters, and decorators that change the call."""
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


# Packing, uploading and sharing differ by backend; layers call only `linear`, `norm` and `embedding`.
PRIVATE_WEIGHTS = {"Weights.__init__", "Weights.vocabulary", "Upload", "Upload.__init__", "Upload.__call__"}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("other", ["cpu", "cuda"])
def test_same_public_names_and_signatures(file, other):
    wanted, got = public(HOMES["mlx"] / f"{file}.py"), public(HOMES[other] / f"{file}.py")
    # Helpers of a backend's own arithmetic may differ; all other names must be in all three.
    helpers = {"runtime": {"count_each"}, "facts": {"product_dtype", "keeps_levels", "tensor_nbytes"}, "ops": {"widen"},
               "sampling": {"gumbel"}, "weights": PRIVATE_WEIGHTS,
               "cache": {"Cache.storage_for", "Cache.nbytes_for", "Cache.new_positions", "Cache.read", "Cache.write", "Cache.store_tokens"},
               "model": {"Llama.notices", "Llama.load"}}.get(file, set())
    drop = lambda names: {name: names[name] for name in names if name not in helpers}  # noqa: E731
    assert drop(got) == drop(wanted)
    assert len(wanted) >= 3


VOCABULARIES = ["mlx_llama/mlx_native/ops.py", "cpu_fallback/ops.py", "cpu_fallback/kernels/ops.py", "cuda_fallback/ops.py",
                "cuda_fallback/kernels/ops.py"]


@pytest.mark.parametrize("file", VOCABULARIES)
def test_a_vocabulary_has_the_words_of_the_forward(file):
    """With the parameters of core.ops; some are imported from the plain vocabulary."""
    words = {name.removeprefix("Ops."): wanted for name, wanted in public(ROOT / "mlx_llama/core/ops.py").items()
             if name.startswith("Ops.")}
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "ops" for alias in node.names}
    spoken = public(ROOT / file)
    for word, (parameters, *rest) in words.items():
        assert word in imported or len(spoken[word][0]) == len(parameters) - 1 and spoken[word][1:] == tuple(rest), word


def test_every_backend_has_the_same_files():
    for home in HOMES.values():
        assert set(FILES) | {"__init__"} <= {path.stem for path in home.glob("*.py")}


def test_the_protocols_are_implemented(backend):
    """Classes have the names and parameters of their Protocols."""
    from mlx_llama.core.backends import interface as protocols

    for protocol, real in ((protocols.Model, backend.model.Llama), (protocols.Cache, backend.model.Cache),
                           (protocols.SamplingBatch, backend.sampling.SamplingBatch)):
        for name, member in vars(protocol).items():
            if inspect.isfunction(member) and (not name.startswith("_") or name == "__call__"):
                assert list(inspect.signature(member).parameters) == list(
                    inspect.signature(getattr(real, name)).parameters), name


ALLOWED = {"llama", "ops", "models", "files", "backends.interface", "backends.load_options", "backends.logprobs", "backends.positions", "backends.profile", "backends.shards", "backends.weights", "generation.rng", "generation.options", "errors", "system"}


@pytest.mark.parametrize("name", HOMES)
def test_arrows_point_one_way(name):
    """A backend imports itself, its framework and neutral core; no other backend, scheduler or door."""
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
    """Skip with the reason if a backend is missing; fail if it is required."""
    assert open_backend(name).name == name.split("-")[0]


# ---- the same behaviour


def refused(call) -> str:
    """The kind and text of the error that a call must raise."""
    with pytest.raises(LlamaError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def misuse(name: str, folder: Path) -> dict[str, str]:
    """A backend's errors, by kind of misuse."""
    backend = open_backend(name)
    checkpoint = open_checkpoint(folder)
    model = backend.load(checkpoint, "float32")
    sampling, cache = backend.sampling_batch([options.resolve({}).options] * 2), model.make_cache(8)
    several = model.make_cache(8, 3)
    model.forward([[1, 2, 3]], 0, cache)
    state = cache.state()
    other = {part: array[..., :8] if part != "tokens" else array for part, array in state.items()}
    calls = {
        "empty": lambda: model.forward([[]], 3, cache),
        "ragged": lambda: model.forward([[1], [2, 3]], 3, cache),
        "fractions": lambda: model.forward([[0.5]], 3, cache),
        "foreign": lambda: model.forward([[10**6]], 3, cache),
        "negative": lambda: model.forward([[-1]], 3, cache),
        "elsewhere": lambda: model.forward([[1]], 1, cache),
        "too long": lambda: model.forward([[1] * 6], 3, cache),
        "another batch": lambda: model.forward([[1], [2]], 3, cache),
        "no capacity": lambda: model.make_cache(0),
        "trim": lambda: cache.trim(4),
        "restore another": lambda: cache.restore(other),
        "restore more": lambda: model.make_cache(2).restore(state),
        "step of a batch": lambda: model.step([[1], [2]], 3, cache, sampling),
        "step elsewhere": lambda: model.step([[1]], 2, cache, sampling),
        "step foreign": lambda: model.step([[10**6]], 3, cache, sampling),
        "verify a batch": lambda: model.verify([[1], [2]], 3, cache, sampling),
        "verify too many": lambda: model.verify([[1] * 6], 3, cache, sampling),
        "no rows": lambda: model.make_cache(8, 0),
        "row beyond": lambda: model.forward([[1]], 0, several, rows=[3]),
        "row twice": lambda: model.forward([[1], [2]], 0, several, rows=[1, 1]),
        "rows and batch": lambda: model.step([[1], [2]], 0, several, sampling, rows=[1]),
        "positions and batch": lambda: model.step([[1], [2]], [0], several, sampling, rows=[1, 2]),
        "row elsewhere": lambda: model.step([[1], [2]], [0, 1], several, sampling, rows=[1, 2]),
        "trim a row": lambda: several.trim(1, 2),
        "copy too much": lambda: several.copy_prefix(0, 1, 1),
        "copy to itself": lambda: several.copy_prefix(1, 1, 0),
        "copy to nowhere": lambda: several.copy_prefix(1, 7, 0),
        "dtype": lambda: backend.load(checkpoint, "float8"),
        "threads": lambda: backend.load(checkpoint, threads="many" if name == "cpu" else None, dtype="int4"),
    }
    found = {case: refused(call) for case, call in calls.items()}
    assert cache.length == 3 and several.lengths == [0, 0, 0]  # unchanged
    return found


def test_the_same_misuse_has_the_same_error(toy):
    mine, *others = [misuse(name, toy) for name in HOMES if not missing(name)]
    for other in others:
        assert other == mine


def test_the_same_choice_has_the_same_notice(toy):
    for name in HOMES:
        if missing(name):
            continue
        backend = open_backend(name)
        said = " ".join(backend.load(open_checkpoint(toy), compile=False).notices)
        assert "--no-compile asks for it" in said or backend.device_name.startswith("torch on the CPU")
