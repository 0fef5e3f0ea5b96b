"""A weight file that becomes shorter after it was opened: an error, where touching its missing
pages kills the process.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from making import make_checkpoint
from making_gguf import make_gguf

SCRIPT = """
import os, sys
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.gguf_export import write_gguf
from mlx_llama.core.files.quantize import write_mlx

what, model, weights, out = sys.argv[1:]
checkpoint = open_checkpoint(model)
os.truncate(weights, os.path.getsize(weights) * 3 // 4)  # behind the vocabulary of a GGUF file
try:
    if what == "mlx form":
        write_mlx(checkpoint, out, 4, 32)
    elif what == "gguf form":
        write_gguf(checkpoint, out + ".gguf")
    elif what == "numpy":
        select("cpu").load(checkpoint, compile=False)
    else:
        select(what, "cpu").load(checkpoint)
except CheckpointError as error:
    print(error)
"""


def truncated(what: str, kind: str, tmp_path) -> str:
    if kind == "folder":
        model, weights = make_checkpoint(tmp_path / "in"), tmp_path / "in" / "model.safetensors"
    else:
        model = weights = tmp_path / "in.gguf"
        make_gguf(model, kinds="Q8_0")
    command = [sys.executable, "-c", SCRIPT, what, str(model), str(weights), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert {path.name for path in tmp_path.iterdir()} == {model.name}
    return done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_loading(kind, backend, tmp_path):
    assert "its file was truncated after it was opened" in truncated(backend.name, kind, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("what", ["numpy", "mlx form", "gguf form"])
def test_plain_numpy_and_writing(what, kind, tmp_path):
    assert "its file was truncated after it was opened" in truncated(what, kind, tmp_path)
