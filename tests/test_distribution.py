"""The source archive and the wheel: built, checked, installed in an empty environment, and asked a
question there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from launching import run_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mlx_llama", "cpu_fallback", "cuda_fallback")
QUESTION = "Which backends are there?"

pytestmark = pytest.mark.slow


def run(*command: object, **more) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=600, **more
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of the repository, as paths from its root."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("not a checkout: git does not know which files belong to the package")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory) -> tuple[Path, Path]:
    """(archive, wheel), built from a copy of the tracked files: the wheel from the archive, as
    installers do.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    flags = ("-m", "build", "--no-isolation", "--outdir", out, source)
    done = run_python(*flags, timeout=600, env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""})
    output = done.stdout + done.stderr
    # MANIFEST.in leaves out compiled files, of which this copy has none.
    lines = [line for line in output.splitlines() if "'*.py[cod]'" not in line]
    assert done.returncode == 0 and "warning" not in "\n".join(lines).lower(), output
    [archive], [wheel] = out.glob("*.tar.gz"), out.glob("*.whl")
    return archive, wheel


def test_the_archive_holds_the_repository(tracked, built):
    with tarfile.open(built[0]) as archive:
        files = {
            member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
        }
    made = {name for name in files if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    unwanted = {name for name in tracked if name.startswith((".git", ".github/"))}
    assert files - made == set(tracked) - unwanted


def test_the_wheel_holds_the_packages_and_their_data(tracked, built):
    with zipfile.ZipFile(built[1]) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
        [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        fields = Parser().parsestr(wheel.read(name).decode())
        assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    documents = {name for name in tracked if name == "README.md" or name.startswith("docs/")}
    pages = {f"mlx_llama/guide/pages/{name}" for name in documents if name.endswith(".md")}
    assert len(pages) > 10
    assert files == {name for name in tracked if name.split("/")[0] in PACKAGES} | pages
    assert fields["License-Expression"] == "MIT" and fields["Requires-Python"] == ">=3.10"
    assert fields.get_payload().startswith("# mlx_llama")


def test_their_metadata_are_valid(built):
    # twine wraps its lines, so a long path takes the space before the verdict.
    words = "-m twine --no-color check --strict".split()
    assert run(sys.executable, *words, *built).count("PASSED") == 2


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> dict:
    """A folder and variables in which Python and pip do not see this checkout."""
    folder = tmp_path_factory.mktemp("outside")
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "MLX_LLAMA_", "HF_"))
    }
    return {
        "cwd": folder,
        "env": env | {"MLX_LLAMA_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"},
    }


@pytest.fixture(scope="module")
def python(built, outside) -> Path:
    """The interpreter of an empty environment with the wheel and its dependencies."""
    folder = outside["cwd"] / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, **outside)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    probe = [*pip, *"download --quiet --no-deps --dest probe wheel".split()]
    if subprocess.run(probe, capture_output=True, timeout=600, **outside).returncode:
        pytest.skip("no package index can be reached, so the dependencies cannot be installed")
    run(*pip, "install", "--no-compile", built[1], **outside)
    run(*pip, "check", **outside)
    return python


@pytest.mark.skipif(os.name == "nt", reason="folders of an environment have other names on Windows")
def test_the_wheel_answers_in_an_empty_environment(python, outside):
    from mlx_llama import load

    code = "import mlx_llama, cpu_fallback as cpu; print(mlx_llama.__file__); print(cpu.__file__)"
    places = run(python, "-c", code, **outside)
    assert all(place.startswith(str(python.parents[1])) for place in places.splitlines())
    code = (
        "from mlx_llama.guide.manual import load_manual, write_pointers; "
        "matches = load_manual().find('externally-managed-environment'); "
        "print(write_pointers([match.passage for match in matches]))"
    )
    assert run(python, "-c", code, **outside).startswith(
        "See docs/troubleshooting.md, Installing: `externally"
    )
    wanted = load(backend="cpu").generate([{"role": "user", "content": QUESTION}]).text
    for command in (
        [python, "-m", "mlx_llama.generate"],
        [python.with_name("mlx_llama"), "generate"],
    ):
        assert run(*command, "-p", QUESTION, "--backend", "cpu", **outside).strip() == wanted
    run(python, "-m", "mlx_llama.parity", "--check", "--backends", "cpu", **outside)
