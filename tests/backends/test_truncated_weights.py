"""A weight file that becomes shorter after it was opened: an error, where touching its missing
pages kills the process.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys

import pytest
from making import make_checkpoint
from making_gguf import make_gguf

from cpu_fallback import facts as cpu_facts
from mlx_llama import load
from mlx_llama.core.backends import selection
from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files import tensor
from mlx_llama.core.files.checkpoint import open_checkpoint

SCRIPT = """
import os, sys
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx

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


@pytest.mark.slow_for("cuda-folder", "cuda-gguf")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_loading(kind, backend, tmp_path):
    assert "its file was truncated after it was opened" in truncated(backend.name, kind, tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("what", ["numpy", "mlx form", "gguf form"])
def test_plain_numpy_and_writing(what, kind, tmp_path):
    assert "its file was truncated after it was opened" in truncated(what, kind, tmp_path)


AFTER = """
import os, sys
from mlx_llama import load
from mlx_llama.core.errors import CheckpointError

backend, model, weights, compiles = sys.argv[1:]
llm = load(model, backend=backend, device="cpu", dtype="float32", compile=eval(compiles))
stream = iter(llm.stream("Once upon", max_tokens=200, temperature=0))
next(stream)
os.truncate(weights, 0)
for call in (
    lambda: list(stream),
    lambda: llm.generate("Once upon", max_tokens=3),
    lambda: llm.batch(["a", "b"], max_tokens=3),
    lambda: llm.logits([5, 6]),
    lambda: llm.save_cache("never"),
):
    try:
        call()
    except CheckpointError as error:
        print(error)
"""
CHANGED = "the model's file changed: {} was {} after it was loaded: load the model again"


@pytest.mark.slow_for("cuda", "mlx-False")
@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("compiles", [None, False])
def test_truncated_while_it_answers(compiles, kind, backend, tmp_path):
    """An error in the answer that runs and in all later ones, where SIGBUS killed the process."""
    if kind == "folder":
        model, weights = make_checkpoint(tmp_path / "in"), tmp_path / "in" / "model.safetensors"
    else:
        model = weights = tmp_path / "in.gguf"
        make_gguf(model, kinds="Q8_0")
    words = [backend.name, str(model), str(weights), str(compiles)]
    done = subprocess.run(
        [sys.executable, "-c", AFTER, *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == 5 * [CHANGED.format(weights.name, "truncated")]


def batch(llm):
    completions = llm.batch([[5, 6, 7], [5, 6]])
    assert not any(completion.tokens for completion in completions)
    raise CheckpointError(" ".join({completion.error for completion in completions}))


seen: list = []  # pieces of answers, and logits
CALLS = {
    "generate": lambda llm: llm.generate([5, 6], on_piece=lambda text, kind: seen.append(text)),
    "batch": batch,
    "logits": lambda llm: llm.logits([5, 6]),
    "prompt_logprobs": lambda llm: llm.prompt_logprobs([5, 6]),
    "logits_processor": lambda llm: llm.generate(
        [5, 6], logits_processor=lambda tokens, logits: seen.append(logits)
    ),
}


@pytest.mark.skipif(not selection.find_guard(), reason="the signal would end the tests")
@pytest.mark.parametrize("kept", [0, 5000, -1])  # -1: all but a byte, so that no page is missing
@pytest.mark.parametrize("compiles", [None, False])
def test_truncated_within_a_step(compiles, kept, backend, tmp_path, monkeypatch):
    """The process lives, nothing that was computed with missing weights is given out, and another
    model goes on.
    """
    if compiles is False and backend.name != "cpu":
        pytest.skip("as with None")
    monkeypatch.setattr(cpu_facts, "SMALL_TABLE", 0)  # it stays mapped, as one over 64 MB does
    how = {"backend": backend.name, "device": "cpu", "dtype": "float32", "compile": compiles}
    folder = make_checkpoint(tmp_path / "m", tie_word_embeddings=False)
    other = load(folder, **how)
    expected = other.generate([5, 6], max_tokens=5, temperature=0).tokens
    for name, call in CALLS.items():
        path = tmp_path / name / "model.safetensors"
        llm = load(shutil.copytree(folder, path.parent), **how)

        def within(function, path=path, size=path.stat().st_size):
            def compute(*arguments, **options):  # the file was whole when this step began
                os.truncate(path, size + kept if kept < 0 else kept)
                return function(*arguments, **options)

            return compute

        monkeypatch.setattr(llm.model, "forward", within(llm.model.forward))
        monkeypatch.setattr(llm.model, "step", within(llm.model.step))
        with pytest.raises(CheckpointError) as caught:
            call(llm)
        assert str(caught.value) == CHANGED.format(path.name, "truncated") and not seen
    assert other.generate([5, 6], max_tokens=5, temperature=0).tokens == expected


UNWATCHED = """
import os, sys
from mlx_llama import load
from mlx_llama.core.files.tensor import FileWatch

FileWatch.check = lambda self: None
model, weights = sys.argv[1:]
llm = load(model, backend="cpu")
expected = llm.generate("Once upon", max_tokens=9, temperature=0).tokens
os.truncate(weights, 0)
llm.loop.erase([])
for prompt in ("Once upon", "A quick brown fox", [*range(3, 200)]):
    answer = llm.generate(prompt, max_tokens=9, temperature=0)
    assert prompt != "Once upon" or answer.tokens == expected
print(llm.backend.device_name)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot truncate a mapped file")
@pytest.mark.parametrize("kind", [None, "F16", "Q8_0", "Q4_K"])
def test_the_compiled_path_touches_no_page_of_a_file_with_a_small_vocabulary(kind, tmp_path):
    """So that no moment between two looks at the file is fatal."""
    model, weights = make_checkpoint(tmp_path / "in"), tmp_path / "in" / "model.safetensors"
    if kind:
        model = weights = tmp_path / "in.gguf"
        make_gguf(model, kinds=kind, hidden_size=256, intermediate_size=256, head_dim=64)
    command = [sys.executable, "-c", UNWATCHED, str(model), str(weights)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr)
    if "compiled" not in done.stdout:
        pytest.skip("this machine has no compiled path")


@pytest.fixture
def copied(backend, tmp_path, monkeypatch):
    """(a loaded model whose file is looked at without pauses, the file)"""
    monkeypatch.setattr(tensor, "LOOK_SECONDS", 0.0)
    folder = make_checkpoint(tmp_path / "m")
    how = {"backend": backend.name, "device": "cpu", "dtype": "float32"}
    return load(folder, **how), folder / "model.safetensors"


def overwrite(path):
    """Change a byte, as a tool that writes in place does."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def test_overwritten_while_it_answers(copied):
    llm, path = copied
    stream = iter(llm.stream("Once upon", max_tokens=200, temperature=0))
    next(stream)
    overwrite(path)
    for call in (lambda: list(stream), lambda: llm.generate("Once upon")):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert str(caught.value) == CHANGED.format(path.name, "overwritten")


def test_a_file_that_another_replaces_stays_loaded(copied, tmp_path):
    """As downloads and git do, which rename; the mapped file keeps its content."""
    llm, path = copied
    expected = llm.generate("Once upon", max_tokens=8, temperature=0).tokens
    os.replace(shutil.copy(make_checkpoint(tmp_path / "n", seed=1) / path.name, tmp_path), path)
    for change in (lambda: None, lambda: path.unlink(), lambda: path.touch()):
        change()
        assert llm.generate("Once upon", max_tokens=8, temperature=0).tokens == expected


def test_times_are_looked_at_once_a_second(tmp_path, monkeypatch):
    tensors, looks = open_checkpoint(make_checkpoint(tmp_path / "m")).tensors, []
    clock = itertools.count(100.0, 0.25)
    monkeypatch.setattr(tensor.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        tensor.machine.FileMap, "is_overwritten", lambda mapped: looks.append(mapped)
    )
    files = tensor.FileWatch([tensors])
    for _ in range(9):  # 0 to 2 seconds
        files.check()
    assert len(looks) == 3
