"""Messages between ranks, and how a launcher is recognised, without starting processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mlx_llama.core.system.forks import find_launcher
from mlx_llama.distributed.world import FRAME, World


class Threads:
    """Ranks on threads: a broadcast meets at a barrier."""

    def __init__(self, rank: int, size: int, barrier, place):
        self.rank, self.size, self.barrier, self.place = rank, size, barrier, place

    def broadcast(self, data, root):
        if self.rank == root:
            self.place[:] = [data.copy()]
        self.barrier.wait(10)
        got = self.place[0]
        assert got.shape == data.shape  # as the frameworks demand
        self.barrier.wait(10)
        return got


@pytest.mark.parametrize("length", [0, FRAME - 60, FRAME, 5 * FRAME])
def test_messages_of_any_length_arrive(length):
    """With texts and arrays, from rank 0 to the others, and from each to all."""
    arrays = {"words": np.arange(7, dtype=np.int32).reshape(1, 7), "empty": np.zeros((0, 3))}
    barrier, place = threading.Barrier(3), []

    def run(rank: int):
        world = World("mlx", Threads(rank, 3, barrier, place))
        if rank == 0:
            world.dropped.extend([4, 5])
            world.tell("call", arrays, text="\n" + "é" * length)
            received = None
        else:
            received = world.receive()
        return received, world.exchange(arrays, rank=rank, text="x" * length)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3)))
    for message, got in (received for received, _ in results[1:]):
        assert message == {"do": "call", "drop": [4, 5], "text": "\n" + "é" * length}
        assert all(np.array_equal(got[name], arrays[name]) for name in arrays)
    for _, answers in results:
        assert [answer for answer, _ in answers] == [
            {"rank": rank, "text": "x" * length} for rank in range(3)
        ]


@pytest.mark.parametrize(
    "environment, backend",
    [
        ({}, None),
        ({"MLX_RANK": "1", "MLX_HOSTFILE": '[["127.0.0.1:5000"], ["127.0.0.1:5001"]]'}, "mlx"),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "\n\n"}, None),  # mlx.launch -n 1
        ({"MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "a:1"}, "mlx"),
        ({"MLX_RANK": "0", "MLX_WORLD_SIZE": "1", "NCCL_HOST_IP": "127.0.0.1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "cuda"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),  # of another program
    ],
)
def test_a_launcher_is_recognised(environment, backend, monkeypatch, tmp_path):
    for name in ("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        if name == "MLX_HOSTFILE":
            (tmp_path / "hosts").write_text(value)
            value = str(tmp_path / "hosts")
        monkeypatch.setenv(name, value)
    assert find_launcher() == backend
