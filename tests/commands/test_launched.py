"""The doors under a launcher: rank 0 has the terminal and the port, the others are silent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from types import SimpleNamespace

import httpx
import pytest
from launching import end, find_ranks, finish, free_ports, launch

from mlx_llama import generate
from mlx_llama.chat import repl as chat
from mlx_llama.core.backends import selection
from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.slow
ON = "--backend mlx --device cpu --dtype float32"


@pytest.fixture(autouse=True)
def mlx():
    pytest.importorskip("mlx.core")


def test_parity_with_one_process():
    flags = "--backends mlx --device cpu --dtype float32 --tokens 24 --json"
    code, out, error = finish(launch("mlx", 2, "-m", "mlx_llama.parity", *flags.split()))
    (report,) = json.loads(out)["backends"]
    assert report["within"] and report["device"] == "MLX on the CPU, 2 processes"
    assert len(report["probes"]) == 1 + 4 * 10 + 2 and report["decoded"]["first_difference"] is None


@pytest.mark.parametrize(
    "size, flags, said",
    [
        (3, ON, "over 3 processes: it has 2 key-value heads, 512 hidden units; start 2 processes"),
        (2, "--backend cpu", "cpu computes in one process, and mlx.launch started several"),
    ],
)
def test_refusals_are_said_once(size, flags, said):
    command = f"-m mlx_llama.generate -p Hi {flags}".split()
    _, out, error = finish(launch("mlx", size, *command))
    errors = [line for line in error.splitlines() if line.startswith("error:")]
    assert out.strip() == "" and len(errors) == 1 and said in errors[0], error


def test_a_backend_of_another_launcher_is_refused(toy, monkeypatch):
    monkeypatch.setattr(selection, "world", SimpleNamespace(backend="mlx"))
    with pytest.raises(BackendError, match="or start with torchrun"):
        selection.select("cuda", "cpu").load(open_checkpoint(toy))


def test_chat(door):
    talk = "Who are you?\nIs a llama a bird?\n"
    wanted = door(chat.main, *ON.split(), stdin=talk.encode()).out.strip()
    process = launch("mlx", 2, "-m", "mlx_llama.chat", *ON.split(), stdin=subprocess.PIPE)
    process.stdin.write(talk + "/exit\n")  # mlx.launch does not hand the end of its input on
    process.stdin.flush()
    code, out, error = finish(process)
    assert out.strip() == wanted and wanted, error


def test_server(door, tmp_path):
    """Requests together, streams, and an end by SIGTERM."""
    port = free_ports(1)
    with open(tmp_path / "errors", "w+b") as errors:
        command = f"-m mlx_llama.server --port {port} {ON}".split()
        process = launch("mlx", 2, *command, stderr=errors)
        try:
            url, last, status = f"http://127.0.0.1:{port}", time.monotonic() + 180, 0
            while status != 200:
                log = (tmp_path / "errors").read_text()[-3000:]
                assert time.monotonic() < last and process.poll() is None, log
                time.sleep(0.2)
                with contextlib.suppress(httpx.HTTPError):
                    status = httpx.get(f"{url}/ready", timeout=5).status_code
            asked = {"messages": [{"role": "user", "content": "Who are you?"}]}
            asked, url = asked | {"max_tokens": 12, "temperature": 0}, f"{url}/v1/chat/completions"
            answer = httpx.post(url, json={**asked, "n": 3}, timeout=120).json()
            texts = {choice["message"]["content"] for choice in answer["choices"]}
            flags = ("-p", "Who are you?", "--max-tokens", "12")
            assert texts == {door(generate.main, *ON.split(), *flags).out.strip()}
            streamed = httpx.post(url, json={**asked, "stream": True}, timeout=120).text
            assert streamed.strip().endswith("data: [DONE]")
            ranks = find_ranks(process)
            os.kill(ranks[0], signal.SIGTERM)
            assert process.wait(60) is not None
        finally:
            end(process)
