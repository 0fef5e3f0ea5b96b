"""Every example runs; what they print is what they promise."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_ELSEWHERE = {"train_guide.py"}  # tests/doors/test_guide.py


HAS_LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


def start(name: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=300)


def run(name: str, *arguments: str) -> str:
    done = start(name, *arguments)
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


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_K_M"])
def test_make_random_gguf(kind, tmp_path):
    import gguf

    done = start("make_random_gguf.py", "tiny", str(tmp_path), kind)
    if kind == "Q4_K_M" and not HAS_LLAMA_CPP:
        assert done.returncode == 1 and done.stderr == 'error: llama_cpp is not installed: pip install -e ".[peers]"\n'
        return
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.iterdir()
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert path.name == f"tiny-{kind}.gguf" and kinds == ({"F32", "Q4_K", "Q6_K"} if "K" in kind else {"F32", kind})


def test_compare_peers(tmp_path):
    if not HAS_LLAMA_CPP:
        done = start("compare_peers.py", "model.gguf")
        assert done.returncode == 1 and done.stderr == 'error: llama_cpp is not installed: pip install -e ".[peers]"\n'
        return
    run("make_random_gguf.py", "tiny", str(tmp_path), "F16")
    asked = [str(tmp_path / "tiny-F16.gguf"), "--rounds", "2", "--prompt", "8", "--generate", "4", "--starts", "1",
             "--depth", "40", "--accuracy", "4", "--threads", "1"]
    figures = json.loads(run("compare_peers.py", *asked, "--json"))
    [result] = figures["results"]
    assert figures["threads"] == 1 and result["bytes"] == (tmp_path / "tiny-F16.gguf").stat().st_size
    for key, pairs in {"decode": 2, "prompt": 2, "deep": 2, "start": 1, "peak": 1, "error": 1}.items():
        found = result[key]["all"]
        assert found["pairs"] == pairs == len(result[key]["pairs"]) and found["ours"] > 0 and found["peer"] > 0, key
    error = result["error"]["all"]
    assert error["ours"] < 1e-5 < error["peer"] < 3e-3  # llama.cpp rounds activations to float16
    assert "relative error of logits" in run("compare_peers.py", *asked[:-2])


def test_the_comparison_keeps_to_one_state_of_the_memory(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import compare_peers

    comparison = compare_peers.Comparison.__new__(compare_peers.Comparison)
    comparison.bandwidths = [60e9, 40e9, 61e9, 39e9]
    pairs = [dict(ours=2.0, peer=1.0, bandwidth=[60e9, 61e9, 59e9]), dict(ours=9.0, peer=1.0, bandwidth=[60e9, 38e9, 41e9]),
             dict(ours=6.0, peer=4.0, bandwidth=[38e9, 40e9, 39e9])]
    states = comparison.states()
    assert {name: compare_peers.summary(pairs, *between)["ratio"] for name, between in states.items()} == {
        "fast": 2.0, "slow": 1.5}
    assert compare_peers.summary(pairs) == dict(ours=6.0, peer=1.0, ratio=2.0, bandwidth=41e9, pairs=3)
    comparison.bandwidths = [50e9, 55e9, 52e9]
    assert compare_peers.summary(pairs, *comparison.states()["steady"])["pairs"] == 3


def test_every_example_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert path.name in RUN_ELSEWHERE or f'"{path.name}"' in source, path.name
