"""Tensor parallelism on this machine: several processes compute what one does."""

from __future__ import annotations

import json
import sys

import pytest
from launching import finish, launch
from machine import missing
from making import make_checkpoint
from making_gguf import make_gguf

from backends.rank_cases import count_weights, load_case, run_cases
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.mlx_folder import write_mlx

SIZES = {
    "vocab_size": 385,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1024,
}


def make_models(folder) -> dict[str, str]:
    """{description: path} of toy models that two processes can share; "four ..." can be shared by
    four.
    """
    plain = make_checkpoint(folder / "plain")
    make_checkpoint(folder / "four tied", tie_word_embeddings=True, **SIZES)
    make_checkpoint(folder / "qwen3", architectures=["Qwen3ForCausalLM"], **SIZES)
    make_checkpoint(
        folder / "biased", attention_bias=True, mlp_bias=True, intermediate_size=90, vocab_size=401
    )
    make_gguf(folder / "q4_0.gguf", kinds="Q4_0")
    make_gguf(folder / "four q4_k.gguf", kinds="Q4_K", head_dim=128, **SIZES)
    write_mlx(open_checkpoint(plain), folder / "affine", bits=4, group_size=32)
    return {path.stem: str(path) for path in folder.iterdir()} | {"drafted": f"{plain}|{plain}"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def run(backend, size, models, tmp_path) -> dict:
    out = tmp_path / "out.json"
    code, stdout, stderr = finish(
        launch(backend, size, "tests/backends/rank_cases.py", str(out), backend, *models.values()),
        400,
    )
    assert code == 0 and out.exists(), stderr[-3000:]
    assert stdout == ""
    results = json.loads(out.read_text(encoding="utf-8"))
    return {name: results[path] for name, path in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize("backend, size", [("mlx", 2), ("cuda", 2), ("mlx", 4)])
def test_the_same_tokens_as_one_process(backend, size, models, tmp_path):
    """Greedy, sampled, filtered, drafted, constrained, in batches, from prefixes and files; plain,
    tied, low-bit, Qwen3.
    """
    if reason := missing(backend):
        pytest.skip(reason)
    chosen = {name: path for name, path in models.items() if size == 2 or "four" in name}
    results = run(backend, size, chosen, tmp_path)
    for number, (name, path) in enumerate(chosen.items()):
        llm = load_case(path, backend)
        wanted = json.loads(json.dumps(run_cases(llm, number == 0)))
        got = results[name]
        assert got.pop("size") == size
        assert got.pop("weights") <= (0.55 if size == 2 else 0.28) * count_weights(llm.model), name
        if number == 0:
            check_traffic(*got.pop("traffic"), llm.model.config, backend, size)
        assert got.pop("logits") == pytest.approx(wanted.pop("logits"), abs=2e-3)
        assert got == wanted, name


def check_traffic(received, sent, told, config, backend, size) -> None:
    """The formula of docs/more-than-one-machine.md, for 4 tokens; sent bytes as the kernel counts
    them.
    """
    sums = 4 * (2 * config.num_hidden_layers + 1) * config.hidden_size * 4
    assert received == sums + 4 * 8
    assert told == 4 * 512  # a frame each
    if backend == "mlx" and sys.platform == "linux":
        assert sent == (sums + told) * 2 * (size - 1) // size + 4 * 8 * (size - 1)
