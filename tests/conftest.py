"""Fixtures of all tests. A test with the fixture `backend` runs once per backend; machine.py
decides which may skip.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

# Set before the imports below: tests do not use the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# The processes of xdist take all cores. More threads of torch spin while they wait for each other:
# beside other work its tests took 20 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# MLX reads this once per process: do not round float32 products to TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import pytest
from hypothesis import HealthCheck, settings
from machine import ALL, missing, open_backend, required, to_run
from making import make_checkpoint

from mlx_llama.core.backends.selection import Backend

pytest.register_assert_rewrite("cases")
pytest_plugins = ["cases.fixtures"]
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
ALWAYS = dict(deadline=None, derandomize=True, print_blob=True, suppress_health_check=CHECKS)
for profile, examples in (("quick", 20), ("full", 300)):
    settings.register_profile(profile, max_examples=examples, **ALWAYS)


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="also run the tests marked slow, and more examples of property tests",
    )
    parser.addoption("--reverse", action="store_true", help="run the tests in reverse order")


def pytest_configure(config):
    settings.load_profile("full" if config.getoption("--all") else "quick")
    if not hasattr(config, "workerinput"):
        # Remove temporary files of the tests and their child processes; tmp_path stays.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.TemporaryDirectory(prefix="mlx-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        # MLX looks here for kernels that it has compiled: let g++ build them once, not in each run.
        compiled = Path(tempfile.gettempdir(), "mlx")
        with suppress(OSError):
            compiled.mkdir(exist_ok=True)
            if os.access(compiled, os.W_OK):
                Path(folder.name, "mlx").symlink_to(compiled)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


def is_slow(item: pytest.Item) -> bool:
    """Marked `slow`, or `slow_for` the beginning of its parameters; * stands for anything."""
    beginnings = "|".join(
        re.escape(text).replace(r"\*", ".*")
        for mark in item.iter_markers("slow_for")
        for text in mark.args
    )
    parameters = item.nodeid.partition("[")[2]
    return bool(beginnings and re.match(beginnings, parameters))


def pytest_collection_modifyitems(config, items):
    runs_all = config.getoption("--all")
    for item in items:
        has_more_examples = runs_all and getattr(
            getattr(item, "obj", None), "is_hypothesis_test", False
        )
        if has_more_examples or is_slow(item):
            item.add_marker(pytest.mark.slow)
    if not runs_all:
        left_out = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    # Published checkpoints take longest and have few tests: last, they would leave a process idle.
    items.sort(key=lambda item: not item.nodeid.startswith("tests/real/"))
    if config.getoption("--reverse"):
        items.reverse()


@pytest.fixture(scope="session", params=to_run())
def backend(request) -> Backend:
    return open_backend(request.param)


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """A random checkpoint, float32, with a tokenizer and a template."""
    return make_checkpoint(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def llm(toy):
    """The toy model on the cpu backend, with a cache for each file of tests."""
    from mlx_llama import load

    return load(toy, backend="cpu")


@pytest.fixture(scope="session")
def guide_q8(tmp_path_factory) -> Path:
    """The guide as a GGUF file of 8 bits per weight."""
    from mlx_llama.core.files.checkpoint import open_checkpoint
    from mlx_llama.quantize.gguf_export import write_gguf

    return write_gguf(
        open_checkpoint(), tmp_path_factory.mktemp("guide") / "guide-q8_0.gguf", "Q8_0"
    ).path


@pytest.fixture
def full_disk():
    """full_disk(nbytes): a context in which writing a file beyond `nbytes` fails, as on a full
    disk.
    """
    resource = pytest.importorskip("resource", reason="this system limits no file sizes")

    @contextmanager
    def limit(nbytes: int):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))  # Python ignores the signal
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limit


@pytest.fixture
def ctrl_c():
    """Python's handler of SIGINT, which background jobs start without."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"backends required here: {', '.join(sorted(required()))} (python {sys.version.split()[0]})"
    )
    for name in ALL:
        if missing(name):
            terminalreporter.write_line(f"not run here: {name} ({missing(name)})")
