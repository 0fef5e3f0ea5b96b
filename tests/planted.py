"""Plant faults in a copy of this tree, one at a time, and list those that the tests miss.

    python tests/planted.py                   # all faults, the tests of each touched area
    python tests/planted.py --all --jobs 4    # the slow tests too
    python tests/planted.py --area sampling   # or --only 3,17; --list prints the numbers
    python tests/planted.py --only 11 tests/backends/test_cache.py    # these tests instead
    python tests/planted.py --check           # the texts of the faults alone; runs no tests

The tests must pass without a fault. Exits with 1 if a fault is unseen, or if a run of the tests
broke.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from platformdirs import user_cache_path

ROOT = Path(__file__).resolve().parents[1]
AREAS = (
    "forward, cache and rows, scheduler, sampling, files and formats, text, server, "
    "commands and REPL"
).split(", ")
PER_AREA = 10
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class Fault(NamedTuple):
    """A wrong change of a file."""

    area: str
    file: str
    old: str  # occurs once in `file`, whatever the layout of its lines
    new: str
    says: str  # the effect

    @property
    def pattern(self) -> re.Pattern[str]:
        """`old` with any white space between its tokens, and with the trailing commas of a
        formatter.
        """
        text = self.old.strip()
        before, after = self.old.split(text)
        tokens = re.findall(r"\w+|[^\w\s]", text)
        spaced = [re.escape(tokens[0])]
        for last, token in itertools.pairwise(tokens):
            are_names = last.isidentifier() and token.isidentifier()
            gap = r"\s+" if are_names else r",?\s*" if token in ")]}" else r"\s*"
            spaced.append(gap + re.escape(token))
        return re.compile(re.escape(before) + "".join(spaced) + re.escape(after))

    def plant(self, text: str) -> str:
        return self.pattern.sub(lambda _: self.new, text)


def read_faults() -> list[Fault]:
    """The faults in planted.txt, in order."""
    faults, area, texts = [], "", {}
    for line in (ROOT / "tests/planted.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            area = line[1:-1]
        elif line.startswith("- "):
            texts["old"].append(line[2:])
        elif line.startswith("+ "):
            texts["new"].append(line[2:])
        elif line and not line.startswith("#"):
            file, _, says = line.partition(": ")
            texts = {"old": [], "new": []}
            faults.append((area, file, says, texts))
    return [
        Fault(area, file, *("\n".join(texts[kind]) for kind in ("old", "new")), says)
        for area, file, says, texts in faults
    ]


FAULTS = read_faults()

# Tests that run first, as patterns below tests/ without their ending, by the beginning of the
# touched file's name, after the test of the file's own name
NEAR = {
    "cpu_fallback/kernels/": "backends/kernels/test_*",
    "cpu_fallback/": "backends/test_cache backends/kernels/test_rows backends/test_sampling "
    "backends/test_parity",
    "cuda_fallback/": "backends/test_captured_step backends/test_triton backends/test_cuda_* "
    "backends/test_sampling",
    "mlx_llama/mlx_native/": "backends/test_compiled_step backends/test_mlx_* "
    "backends/test_sampling",
    "mlx_llama/core/backends/": "backends/test_cache backends/test_sampling "
    "backends/test_speculate",
    "mlx_llama/core/engine/": "core/engine/test_scheduler core/engine/test_* api/test_adapters",
    "mlx_llama/core/models/": "core/models/test_* core/models/families/test_*",
    "mlx_llama/core/answers/": "core/answers/test_* api/test_*",
    "mlx_llama/api/": "api/test_*",
    "mlx_llama/core/sample": "core/test_sample backends/test_sampling",
    "mlx_llama/core/files/": "core/files/test_*",
    "mlx_llama/core/text/": "core/text/**/test_*",
    "mlx_llama/server/": "server/test_*",
}
REAL, BACKENDS = "real/**/test_*", "backends/**/test_*"
ENGINE, ANSWERS = "core/engine/test_*", "core/test_* core/answers/test_* api/test_*"
HOST, FAMILIES = "core/backends/test_*", "core/models/test_* core/models/families/test_*"
# Those that run after them, by area
FAR = {
    "forward": f"{HOST} {FAMILIES} {BACKENDS} {REAL}",
    "cache and rows": f"{HOST} {BACKENDS} {ENGINE} {ANSWERS} {REAL}",
    "scheduler": f"{ENGINE} {ANSWERS} {BACKENDS} {REAL}",
    "sampling": f"{HOST} {BACKENDS} {ENGINE} {ANSWERS} {REAL}",
    "files and formats": f"core/files/test_* quantize/test_* {FAMILIES} backends/test_quantized "
    f"{REAL}",
    "text": f"core/text/**/test_* {ANSWERS} {REAL}",
    "server": "server/test_*",
    "commands and REPL": "commands/test_* guide/test_*",
}
# Compiled kernels are cached by their own sources alone; a fault in one of these folders may change
# them too.
COMPILED = (
    "cpu_fallback/",
    *(f"mlx_llama/core/{name}/" for name in ("files", "backends", "models")),
)


def choose_tests(fault: Fault, tree: Path) -> list[list[str]]:
    """Names of test files by run: the nearest ones, then the others of the area, each once."""

    def expand(patterns: str) -> list[str]:
        # Files, since pytest would take those of a folder in its own order.
        files = (
            path for name in patterns.split() for path in sorted(tree.glob(f"tests/{name}.py"))
        )
        return list(dict.fromkeys(str(path.relative_to(tree)) for path in files))

    path = Path(fault.file)
    # mlx_llama/core/files/x.py -> tests/core/files/test_x.py; mlx_llama/chat/x.py -> test_chat.py
    below = "/".join(path.parts[1:-1] + (f"test_{path.stem}",))
    mirrors = f"{below} backends/test_{path.stem} commands/test_{Path(path.parts[1]).stem}*"
    near = next((names for prefix, names in NEAR.items() if fault.file.startswith(prefix)), "")
    first = expand(f"{mirrors} {near}")
    rest = [name for name in expand(FAR[fault.area]) if name not in first]
    return [names for names in (first, rest) if names]


def check(faults: Sequence[Fault]) -> list[str]:
    """Errors in the texts of the faults: a count per area, a text that does not occur once, a file
    that does not compile.
    """
    wrong = [
        f"area {area!r} has {count} faults, not {PER_AREA}"
        for area in AREAS
        if (count := sum(fault.area == area for fault in faults)) != PER_AREA
    ]
    wrong += [f"area {area!r} is not known" for area in {fault.area for fault in faults} - {*AREAS}]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "patched.py")
        for number, fault in enumerate(faults, 1):
            text = (ROOT / fault.file).read_text(encoding="utf-8")
            if (count := len(fault.pattern.findall(text))) != 1 or fault.old == fault.new:
                wrong.append(f"{number}: {fault.file} has {count} times {fault.old!r}")
                continue
            target.write_text(fault.plant(text), encoding="utf-8")
            try:
                if fault.file.endswith(".py"):
                    py_compile.compile(str(target), doraise=True)
            except py_compile.PyCompileError as error:
                wrong.append(f"{number}: {fault.file} does not compile: {error}")
    return wrong


class Copy:
    """A copy of the tree in a folder of its own, with caches of its own."""

    def __init__(self, folder: Path):
        self.tree, self.caches = folder / "tree", folder / "cache"
        listing = "ls-files -z --cached --others --exclude-standard".split()
        command = ["git", "-C", str(ROOT), *listing]
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():  # not removed
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        self.process: subprocess.Popen | None = None
        self.is_stopped = False

    def try_out(
        self, fault: Fault, runs: Iterable[Sequence[str]], flags: Sequence[str], limit: float
    ) -> tuple[str, str]:
        """("seen", "UNSEEN" or "error", the test that saw it or the reason)."""
        path = self.tree / fault.file
        text = path.read_text(encoding="utf-8")
        is_compiled = fault.file.startswith(COMPILED)
        caches = Path(tempfile.mkdtemp(dir=self.caches.parent)) if is_compiled else self.caches
        self._write(path, fault.plant(text))
        has_run = False
        try:
            for run in runs:
                status, detail = self._run([*flags, *run], caches, limit)
                if status in ("seen", "error"):
                    return status, detail
                has_run |= status != "no tests"  # those of one run may all be slow ones
            return ("UNSEEN", "") if has_run else ("error", "there are no tests")
        finally:
            self._write(path, text)
            # no fault has the examples of another
            shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
            if is_compiled:
                shutil.rmtree(caches, ignore_errors=True)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()  # it would be used if it had the same second and size

    def _run(self, arguments: Sequence[str], caches: Path, limit: float) -> tuple[str, str]:
        models = user_cache_path("mlx_llama", appauthor=False) / "test-models"
        paths = os.pathsep.join(filter(None, [str(self.tree), os.environ.get("PYTHONPATH")]))
        env = {"MLX_LLAMA_TEST_MODELS": str(models), **os.environ}
        env |= {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(caches)}
        flags = "-n 0 -x -q -rfE -p no:cacheprovider".split()
        command = [sys.executable, "-m", "pytest", *flags, *arguments]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(
                command, cwd=self.tree, env=env, start_new_session=True, **pipes
            )
            size, changed = 0, time.monotonic()
            while (code := self.process.poll()) is None and time.monotonic() - changed < limit:
                time.sleep(0.2)
                # pytest writes a dot for each test
                if (now := os.fstat(log.fileno()).st_size) != size:
                    size, changed = now, time.monotonic()
            self.stop(for_good=False)
            log.seek(0)
            output = log.read()
        if code is None:
            return "seen", "hung"
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "no tests" if code else "UNSEEN", ""
        if -code in CRASHES:
            return "seen", f"crashed by {signal.Signals(-code).name}"
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.M)
        if code == pytest.ExitCode.TESTS_FAILED and failed:
            return "seen", failed[1][:120]
        last = (output.strip().splitlines() or ["no output"])[-1]
        return "error", f"pytest ended with {code}: {last}"

    def stop(self, for_good: bool = True) -> None:
        """Kill the run and what it started. for_good: there is no next one."""
        self.is_stopped |= for_good
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(
    numbers: Sequence[int], jobs: int, flags: Sequence[str], limit: float, tests: Sequence[str]
) -> list[str]:
    """Try faults of these numbers; prints a line for each. tests: in place of the table's. Returns
    lines of the unseen.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in numbers:
        todo.put(number)
    missed: dict[int, str] = {}
    printing = threading.Lock()

    def work(copy: Copy) -> None:
        while not copy.is_stopped:
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            fault, started = FAULTS[number - 1], time.monotonic()
            status, detail = copy.try_out(
                fault, [tests] if tests else choose_tests(fault, copy.tree), flags, limit
            )
            if copy.is_stopped:
                return
            with printing:
                seconds = time.monotonic() - started
                head = f"{number:3} {fault.area}: {status} {seconds:.0f} s"
                print(f"{head} {detail or '-'} | {fault.says}", flush=True)
                if status != "seen":
                    missed[number] = f"{number:3} {status} {fault.area}, {fault.file}: {fault.says}"

    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copies = [Copy(Path(folder, str(job))) for job in range(min(jobs, len(numbers)))]
        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C too
            for copy in copies:
                copy.stop()
            for thread in threads:
                if thread.ident:
                    thread.join()
    return [missed[number] for number in sorted(missed)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="run the slow tests too")
    parser.add_argument("--area", choices=AREAS, help="the faults of one area")
    parser.add_argument("--only", metavar="N,N", help="the faults of these numbers")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="J", help="copies at once (default: 2)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, metavar="S", help="a longer test hangs (default: 600)"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the faults and their first tests"
    )
    parser.add_argument("--check", action="store_true", help="check the texts of the faults")
    parser.add_argument("tests", nargs="*", help="tests to run in place of the area's")
    args = parser.parse_args()
    numbers = [*range(1, len(FAULTS) + 1)]
    if args.only:
        numbers = [int(chosen) for chosen in args.only.split(",")]
    if not all(1 <= number <= len(FAULTS) for number in numbers):
        parser.error(f"the faults have the numbers 1 to {len(FAULTS)}")
    numbers = [number for number in numbers if args.area in (None, FAULTS[number - 1].area)]
    if args.check:
        wrong = check(FAULTS)
        print("\n".join(wrong or [f"{len(FAULTS)} faults are in order"]))
        return int(bool(wrong))
    if args.list:
        for number in numbers:
            fault = FAULTS[number - 1]
            nearest = choose_tests(fault, ROOT)[0][0]
            print(f"{number:3} {fault.area}, {fault.file}: {fault.says} | {nearest}")
        return 0
    missed = run(numbers, args.jobs, ["--all"] if args.all else [], args.seconds, args.tests)
    print("\n".join([f"seen {len(numbers) - len(missed)} of {len(numbers)}", *missed]))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
