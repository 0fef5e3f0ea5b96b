"""Time and memory from the start of a process to the first token after a prompt, beside llama.cpp's
llama-bench.

    python examples/benchmarks/make_random_gguf.py tinyllama /tmp/models Q4_0 python
    examples/benchmarks/measure_start.py /tmp/models/tinyllama-Q4_0.gguf --peer "$(which
    llama-bench)" [--cold]

Processes run in turn and begin from nothing: imports, the file's header, the tokenizer, the
weights, the prompt. Times end with the process. mlx_llama's generates one token from a prompt of
ids; llama-bench reads a prompt of as many tokens without a warm-up. A first run of each, not
counted, fills caches: mlx_llama's machine code and packed weights (MLX_LLAMA_CACHE_SIZE=0 keeps
none of these), and the libraries' pages. --cold evicts the file and all packed weights from the
page cache before each run (a hypervisor may still have them). Peaks are divided by the file's size:
"resident" counts mapped pages of files, which are the page cache's; "anonymous" leaves them out and
is sampled every 20 ms.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from mlx_llama.core.system import cache_folder

OURS = """
import sys
from mlx_llama import load
path, prompt, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) or None
llm = load(path, backend="cpu", threads=threads)
ids = [(7 * i + 3) % llm.model.config.vocab_size for i in range(prompt)]
llm.generate(ids, max_tokens=1, temperature=0.0)
"""


def evict(path: Path) -> None:
    """Drop the file, and all cached weights, from the page cache."""
    for name in (path, *(file for file, _, _ in cache_folder.files(".panels"))):
        with open(name, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path) -> None:
    """Read the file into the page cache."""
    with open(path, "rb", buffering=0) as file:
        block = bytearray(1 << 20)
        while file.readinto(block):
            pass


class Sampler(threading.Thread):
    """Peak of a process's anonymous memory, sampled every 20 ms. Linux only."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.status, self.peak, self.ended = Path(f"/proc/{pid}/status"), 0, threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.02):
            try:
                self.peak = max(
                    self.peak, 1024 * int(self.status.read_text().split("RssAnon:")[1].split()[0])
                )
            except (OSError, IndexError):  # it just ended
                pass


def run(command: list[str]) -> tuple[float, int, int]:
    """(seconds, peak resident bytes, peak anonymous bytes) of a process. Exits if it fails."""
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=output)
        sampler = Sampler(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        sampler.ended.set()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            sys.exit(
                f"error: {shlex.join(command[:3])} ... ended with "
                f"{process.returncode}:\n{output.read().decode()}"
            )
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), sampler.peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".gguf files")
    parser.add_argument(
        "--peer", default=None, metavar="COMMAND", help="llama-bench, with options if needed"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=None, help="of both programs (each program's default)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each program, in turn (%(default)s)"
    )
    parser.add_argument("--cold", action="store_true", help="evict the file before each run")
    args = parser.parse_args()
    if args.cold and not hasattr(os, "posix_fadvise"):
        parser.error("--cold needs posix_fadvise, which this system lacks")
    print(f"{'':24}{'seconds':>16}{'resident / file':>18}{'anonymous / file':>18}")
    for path in args.files:
        commands = {
            "mlx_llama": [
                sys.executable,
                "-c",
                OURS,
                str(path),
                str(args.prompt),
                str(args.threads or 0),
            ]
        }
        if args.peer:
            threads = ["-t", str(args.threads)] if args.threads else []
            options = ["-p", str(args.prompt), "-n", "0", "-r", "1", "--no-warmup", *threads]
            commands["llama-bench"] = [*shlex.split(args.peer), "-m", str(path), *options]
        results: dict[str, list[tuple[float, int, int]]] = {name: [] for name in commands}
        for round in range(args.rounds + 1):
            for name, command in commands.items():
                (evict if args.cold else warm)(path)
                measured = run(command)
                if round:
                    results[name].append(measured)
        print(f"{path.name}, {'cold' if args.cold else 'warm'}")
        size, medians = path.stat().st_size, {}
        for name, rows in results.items():
            seconds, resident, anonymous = zip(*rows)
            medians[name] = statistics.median(seconds)
            print(
                f"  {name:14}{medians[name]:8.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
                f"{max(resident) / size:16.2f}{max(anonymous) / size:18.2f}",
                flush=True,
            )
        if args.peer:
            ratios = [
                ours[0] / peer[0]
                for ours, peer in zip(results["mlx_llama"], results["llama-bench"])
            ]
            print(
                f"  ratio of neighbours {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
                f"{max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
