"""Render untrusted chat templates in a process with limited time and memory, and without secrets.

A template can compute for hours, or take all memory, inside a single call of Python. The
interpreter cannot stop that, but a process can be killed. It starts with the first untrusted
template, serves all later ones, and is replaced after a template exceeds a limit. It gets two
pipes, no other files and no environment, and imports nothing but Jinja (sandbox.py).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_llama.core.system.forks import make_lock

MAX_SECONDS = 5.0  # processor time per rendering; real templates take milliseconds
MAX_MEMORY = 512 << 20  # bytes; Python and Jinja take about 20 MB
_BUFFER = 1 << 20  # bytes that pass through a pipe at once; both processes wait in between
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, missing in Python 3.10's fcntl on some systems
MAX_GROWTH = 1 << 20  # characters of output beyond 16 times the input
_PATIENCE, _PERIOD = 0.1, 0.02  # seconds before the first check of a busy process, and between them
_OUT_OF_MEMORY = 77  # sandbox.OUT_OF_MEMORY; importing it would import Jinja
# Imports sandbox.py without its package, which would import NumPy. Arguments: the file, bytes of
# memory, Jinja's folders.
_PROGRAM = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
sys.path += sys.argv[3:]
spec = spec_from_file_location("sandbox", sys.argv[1])
sandbox = module_from_spec(spec)
spec.loader.exec_module(sandbox)
sandbox.serve(int(sys.argv[2]))
"""
# Variables for the process: the time zone, and the paths that Python needs to find its libraries
_ENVIRONMENT = ("TZ", "SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class Stopped(Exception):
    """A rendering reached a limit, or its process failed. The message is the reason."""


class TemplateProcess:
    """At most one process, started when needed. Threads take turns."""

    def __init__(self) -> None:
        self._lock = make_lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def request(self, source: str, values: Mapping[str, Any] | None) -> tuple[str, str]:
        """Render a template, or only compile it (values None); returns as `sandbox.answer`.

        Raises Stopped, and TypeError or ValueError for values that JSON cannot express.
        """
        variables = json.dumps(values)
        longest = MAX_GROWTH + 16 * (len(source) + len(variables))
        line = f"[{json.dumps(source)}, {variables}, {MAX_SECONDS}, {longest}]\n".encode()
        with self._lock:
            try:
                # 12: "\ud83d\ude42"
                kind, text = json.loads(self._exchange(line, 100 + 12 * longest))
            except BaseException:  # else the next request after Ctrl-C would get this answer
                self.stop()
                raise
        return kind, text

    def start(self) -> None:
        """Start the process in the background unless it runs. A request reports the error."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                with contextlib.suppress(Stopped):
                    self._process = _start()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _forget(self) -> None:
        """Leave the process to the parent, after a fork."""
        self._process = None

    def _exchange(self, line: bytes, longest: int) -> bytes:
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        process, done = self._process, threading.Event()
        excess: list[str] = []
        assert process.stdin and process.stdout
        watch = threading.Thread(target=_watch, args=(process, done, excess), daemon=True)
        watch.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(longest)
        except OSError:  # it has ended
            answer = b""
        finally:
            done.set()
        watch.join()
        if excess:
            raise Stopped(excess[0])
        if not answer.endswith(b"\n"):
            raise Stopped(_name_end(process))
        return answer


def _start() -> subprocess.Popen[bytes]:
    """Start the process, isolated from the user's Python settings and the terminal's Ctrl-C."""
    specs = filter(None, map(importlib.util.find_spec, ("jinja2", "markupsafe")))
    folders = {str(Path(spec.origin).parents[1]) for spec in specs if spec.origin}
    file = str(Path(__file__).with_name("sandbox.py"))
    command = [sys.executable, "-I", "-S", "-B", "-c", _PROGRAM, file, str(MAX_MEMORY), *folders]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    session: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        session = {
            "creationflags": subprocess.CREATE_NO_WINDOW | subprocess.CREATE_NEW_PROCESS_GROUP
        }
    session |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        process = subprocess.Popen(command, env=environment, bufsize=_BUFFER, **session)
    except (OSError, TypeError, ValueError) as e:  # sys.executable may be None
        raise Stopped(f"the process that renders it cannot be started ({e})") from None
    if sys.platform == "linux":
        import fcntl

        for pipe in filter(None, (process.stdin, process.stdout)):
            with contextlib.suppress(OSError):  # above the limit of the user
                fcntl.fcntl(pipe, _SET_PIPE_SIZE, _BUFFER)
    return process


def _watch(process: subprocess.Popen[bytes], done: threading.Event, excess: list[str]) -> None:
    """Kill the process when it exceeds a limit, and put the reason into `excess`."""
    start: float | None = None
    pause = _PATIENCE
    while not done.wait(pause):
        import psutil  # takes 15 ms; most renderings end before

        pause = _PERIOD
        try:
            watched = psutil.Process(process.pid)
            times, memory = watched.cpu_times(), watched.memory_info().rss
        except psutil.Error:  # ended
            continue
        seconds = times.user + times.system
        start = seconds if start is None else start
        if seconds - start > MAX_SECONDS:
            excess.append(_too_slow())
        elif memory > MAX_MEMORY:
            excess.append(_too_large())
        else:
            continue
        process.kill()
        return


def _name_end(process: subprocess.Popen[bytes]) -> str:
    """The reason why the process ended, or why its answer was too long."""
    process.kill()
    status = process.wait()
    if status == _OUT_OF_MEMORY:
        return _too_large()
    if sys.platform != "win32" and status == -signal.SIGXCPU:
        return _too_slow()
    return f"its process ended with the status {status}"


def _too_slow() -> str:
    return f"more than {MAX_SECONDS:g} seconds"


def _too_large() -> str:
    return f"more than {MAX_MEMORY >> 20} MB of memory"


PROCESS = TemplateProcess()


# Known templates


def is_known(source: str) -> bool:
    """True if a template is in `KNOWN`, whatever its newlines and outer white space."""
    return digest(source) in KNOWN


def digest(source: str) -> str:
    """The first 128 bits of the SHA-256 of a template, in hexadecimal digits."""
    text = source.strip().replace("\r\n", "\n")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# Digests of reviewed, harmless chat templates, which render without the process, at a sixth of the
# time or less. They are those of llama.cpp (models/templates, tests/test-chat-template.cpp) and of
# this project's tests. Their time and output grow linearly with the conversation and its tools.
# Those of Mistral v3 and Nemo are missing: with tools, they grow with the product of both. Gemma
# 4's grows with the square of the messages, LFM2's with that of the tools.
KNOWN = {
    "fcf7a096fe99a48fd9ad2b250bf9237e",  # ChatML
    "e8d5b5a546d3f19df16a5320c614fab0",  # Llama 2
    "54a8053732278a178a2da21b905c03e6",  # Vigogne 2
    "ba03a121d097859c7b5b9cd03af99aaf",  # Llama 3
    "b48c47f6443892716176eb200bf4ef10",  # Llama 3, generation prompt always
    "93c0e9aa3629bbd77e68dbc0f5621f6e",  # Llama 3.1; Llama 3.3
    "d82792f95932f1c9cef5c4bd992f1712",  # Llama 3.2
    "26a59556925c987317ce5291811ba3b7",  # Mistral 7B Instruct 0.2
    "bbc58aad99454df60138be9530c9601a",  # Mistral v1
    "3c4ad5fa60dd8c7ccdf82fa4225864c9",  # Mistral v7
    "039a4710e2aabaa79e85a233fa3daa4f",  # Devstral Small 2507, Unsloth
    "66291cf0045c2425a3a667cf3cbb7af2",  # Zephyr, TinyLlama
    "872be49dbb638044ad01b60388f48d46",  # SmolLM2
    "cbc1d50f777ec029b33f53b23d7a224c",  # SmolLM3
    "55b2f4a26ac9ee719330a61a0c39d9e5",  # Qwen2.5
    "94c6035b4f0eb905c95e2b7d8dace854",  # QwQ
    "87a2728cb8dc9fe424d624542f6060ec",  # Qwen3
    "eae48a3307931acb10a6fce475a36b71",  # Qwen3-Coder
    "a4aee8afcf2e0711942cf848899be660",  # Qwen3.5
    "ce62e308475b364e1fc76699dccbddeb",  # Hermes 2 Pro, Llama 3; Hermes 3, Llama 3.1
    "dd2675619a64a449cdcdd2b93e605a0a",  # DeepSeek R1 Distill Llama
    "bbe594884b44d740667ee65a70bc8d33",  # DeepSeek R1 Distill Qwen
    "e0d5e227f0aedba8bc36d9173d4f814b",  # DeepSeek R1, llama.cpp's
    "993c0af704bad76aeba4263a5318f787",  # DeepSeek Coder
    "2fc9dbfaea552f864b4b8cdf9d17401e",  # Functionary 3.1
    "5c7c96c27cfecf3418411d1ebd0d11d6",  # Functionary 3.2
    "a30b8c4531dda19196f35fb95ab84110",  # Bielik 11B 3.0
    "396b7b76d04a4cdfd45a5a8e73e041ae",  # AlphaMonarch
    "b58913fce67fc69834213fd446f9d85f",  # Megrez 3B
    "01658a71df742ed33e28c787ab916834",  # YandexGPT 5 Lite
    "633e8dfbc1ec9a086e11cb721f96bc4a",  # the model in this package
}
