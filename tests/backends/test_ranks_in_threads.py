"""Shares of a model on threads of one process, whose sums and gathers meet at a barrier: the layers
and the sampling of tensor parallelism without launchers, by Triton's kernels too."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cases.gemma4 import make_gemma4
from machine import open_backend
from making import make_checkpoint
from making_gguf import make_gguf

from backends.conftest import EVERYTHING
from mlx_llama.core import options
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.options import LoadOptions

torch = pytest.importorskip("torch")

from backends.triton_process import call, computing, fewer_programs  # noqa: F401

PROMPT = [1, 17, 300, 45, 9]
GEMMA4 = dict(num_key_value_heads=2, num_global_key_value_heads=2, vocab_size=385)
GEMMA4["vocab_size_per_layer_input"] = 385
SAMPLING = {
    "greedy": {},
    "noise": {"temperature": 1.0, "seed": 2**63 + 5},
    "everything": {**EVERYTHING, "logprobs": 2},
}


class Meeting:
    """The place where `size` threads exchange arrays, one running at a time."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size, timeout=60)
        self.turn, self.values_of_ranks = threading.Lock(), {}

    def exchange(self, rank: int, value):
        """The values of all threads, in the order of ranks."""
        self.values_of_ranks[rank] = value
        self._wait()
        values = [self.values_of_ranks[sender] for sender in range(self.size)]
        self._wait()
        return values

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class ThreadRanks:
    """Sums and gathers of a thread's `Ranks`; the rest is the backend's."""

    def __init__(self, meeting: Meeting, rank: int, stack, settle):
        self.meeting, self.rank, self.size, self.stack = meeting, rank, meeting.size, stack
        self.settle = settle

    def sum(self, x):
        return sum(self.meeting.exchange(self.rank, self.settle(x)))

    def gather(self, x):
        return self.stack(self.meeting.exchange(self.rank, self.settle(x)))


def answers(backend, model) -> dict:
    """Tokens of rows decoded together, by kind of sampling, and logits."""
    drawn_by_name = {}
    for name, chosen in SAMPLING.items():
        both = [
            options.resolve(chosen).options,
            options.resolve({"seed": 1, "temperature": 0.5} if name == "noise" else {}).options,
        ]
        sampling, cache, drawn = backend.sampling_batch(both), model.make_cache(64, 2), []
        for row in (0, 1):
            model.forward([PROMPT[row:]], 0, cache, rows=[row])
        tokens = np.array([[3], [4]], np.int32)
        for _ in range(4):
            tokens = model.step(tokens, list(cache.lengths), cache, sampling)
            drawn.append(backend.runtime.to_numpy(tokens)[:, 0].tolist())
            tokens = tokens if tokens.shape[1] == 1 else tokens[:, :1]
        drawn_by_name[name] = drawn
    cache = model.make_cache(64)
    drawn_by_name["logits"] = backend.runtime.to_numpy(
        model.forward([PROMPT], 0, cache, all_positions=True)
    )
    drawn_by_name["one more"] = backend.runtime.to_numpy(model.forward([[5]], len(PROMPT), cache))
    return drawn_by_name


def compare(name: str, path, size: int = 2) -> None:
    """Every thread's answers against those of the whole model. Raises AssertionError."""
    backend, meeting = open_backend(name), Meeting(size)
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    if name == "mlx":
        import mlx.core as mx

        from mlx_llama.mlx_native import ranks

        stack, settle = mx.stack, lambda x: (mx.eval(x), x)[1]
    else:
        from cuda_fallback import ranks

        stack, settle = torch.stack, lambda x: x

    class Joined(ThreadRanks, ranks.Ranks):
        pass

    def run(rank: int) -> dict:
        with meeting.turn:
            model = backend.model.Llama.load(
                checkpoint,
                LoadOptions(dtype="float32"),
                backend.device,
                ranks=Joined(meeting, rank, stack, settle),
            )
            return answers(backend, model)

    with ThreadPoolExecutor(size) as pool:
        by_rank = list(pool.map(run, range(size)))
    wanted = answers(backend, backend.load(checkpoint, "float32"))
    for results in by_rank:
        for logits in ("logits", "one more"):
            assert np.abs(results[logits] - wanted[logits]).max() < 1e-4
        assert {name: results[name] for name in SAMPLING} == {
            name: wanted[name] for name in SAMPLING
        }


def compare_by_kernels(path: Path | None) -> None:
    """path: None for Gemma 4, since a checkpoint's files are not sent to another process."""
    fewer_programs()
    with computing(by_kernels=True):
        compare("cuda", path or make_gemma4(**GEMMA4))


@pytest.fixture(scope="module", params=["tied", "biases", "qwen3", "low-bit", "gemma4"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "low-bit":
        make_gguf(folder / "toy.gguf", kinds="Q4_0")
        return folder / "toy.gguf"
    if request.param == "gemma4":
        return make_gemma4(**GEMMA4)
    fields = {
        "tied": {"tie_word_embeddings": True, "vocab_size": 385},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    }
    return make_checkpoint(folder / "toy", **fields[request.param])


@pytest.mark.parametrize("name", ["mlx", "cuda"])
def test_shares_give_what_the_whole_gives(name, model):
    compare(name, model)


@pytest.mark.slow
def test_shares_by_kernels(tmp_path, call):
    fields = dict(tie_word_embeddings=True, num_hidden_layers=1, vocab_size=385)
    call(compare_by_kernels, make_checkpoint(tmp_path / "toy", **fields))


@pytest.mark.slow
def test_shares_of_heads_of_several_kinds_by_kernels(call):
    call(compare_by_kernels, None)
