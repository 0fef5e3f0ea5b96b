"""A process that compiles rules of strangers first: llguidance bounds neither the time of a
conjunction of patterns nor its stack, and a process can be killed.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any

from mlx_llama.core.system.forks import make_lock

_CODE = """
import sys, llguidance
for line in sys.stdin:
    limits = llguidance.LLParserLimits(verbose_errors=False)
    llguidance.LLMatcher.validate_grammar(line, None, limits=limits)
    print(flush=True)
"""
_START = 10.0  # seconds; Python starts slowly on a busy machine
_child: subprocess.Popen[bytes] | None = None
_lock = make_lock()


class CompilerFault(Exception):
    """A rule was not compiled in time, or ended the process that compiled it."""


def check_rule(body: dict[str, Any], seconds: float) -> None:
    """Compile a rule in another process. Raises CompilerFault."""
    global _child
    with _lock:
        try:
            if _child is None or _child.poll() is not None:
                _child = None
                _child = _start()
            _ask(_child, body, seconds)
        except CompilerFault:
            _child = None
            raise


def _start() -> subprocess.Popen[bytes]:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # Ctrl-C reaches it too
    command = [sys.executable, "-c", _CODE]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
    _ask(child, {"lark_grammar": "start: /a/"}, _START)
    return child


def _ask(child: subprocess.Popen[bytes], body: dict[str, Any], seconds: float) -> None:
    """Compile in the child process. Raises CompilerFault after the end of the process."""
    assert child.stdin and child.stdout
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        child.kill()

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        child.stdin.write(json.dumps({"grammars": [body]}).encode() + b"\n")
        child.stdin.flush()
        answer = child.stdout.readline()
    except OSError:
        answer = b""
    finally:
        timer.cancel()
    if answer:
        return
    code = child.wait()
    if is_late.is_set():
        raise CompilerFault(f"it cannot be compiled within {seconds:g} s")
    cause = next((known.name for known in signal.Signals if known == -code), f"exit code {code}")
    raise CompilerFault(f"it ended the process that compiled it ({cause})")
