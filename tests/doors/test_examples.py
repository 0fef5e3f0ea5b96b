"""Every example runs; what they print is what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_ELSEWHERE = {"train_guide.py"}  # tests/doors/test_guide.py


def run(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_continue_text():
    out = run("continue_text.py", "Once upon a time", "--backend", "cpu")
    assert out.startswith("Once upon a time") and "evaluations per token: 1 " in out


def test_conversation():
    out = run("conversation.py", "--backend", "cpu")
    assert out.count("prompt tokens reused)") == 3 and "mlx_llama" in out


def test_next_token():
    out = run("next_token.py", "--backend", "cpu")
    shares = [float(line.split("%")[0]) for line in out.splitlines()[:5]]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5
    assert float(out.split()[-1]) >= 1


def test_same_on_every_backend():
    lines = run("same_on_every_backend.py").splitlines()
    answers = {line[6:] for line in lines if "not here" not in line}
    assert len(lines) == 3 and len(answers) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_make_random_checkpoint(dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    run("make_random_checkpoint.py", "tiny", str(tmp_path / "m"), "--dtype", dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"


def test_every_example_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert path.name in RUN_ELSEWHERE or f'"{path.name}"' in source, path.name
