"""conftest.py of llama-server's own tests when they run against this server: the copy stands beside
their utils.py. MODEL and CONTEXT: of the GGUF file; several tests share a server. OWN_FLAGS=1:
start it with llama-server's flags, all but the model's and the port; else with ours.
"""

from __future__ import annotations

import atexit
import os
import re
import subprocess
import sys
import time
import types
from collections import OrderedDict

sys.modules["wget"] = types.ModuleType("wget")  # only for downloads of models

import pytest  # noqa: E402
import requests  # noqa: E402
import utils  # noqa: E402

MODEL, CONTEXT = os.environ["MODEL"], int(os.environ["CONTEXT"])
HAS_OWN_FLAGS = os.environ.get("OWN_FLAGS") == "1"
KEPT = 2  # servers that wait for the next test with the same flags
# Patterns that do not name what stories260K writes
STRICT = ('"42"', '"foooooo"', "a{5,5}", "[ -3000 ]")
_servers: OrderedDict[tuple[str, ...], tuple[subprocess.Popen, int]] = OrderedDict()


class Started(Exception):
    """Carries the command line with which ServerProcess.start would start llama-server."""


def list_own_flags(server) -> tuple[str, ...]:
    """llama-server's flags for a ServerProcess, with our model."""
    try:
        _start(server)
    except Started as started:
        [command] = started.args
    pairs = iter(command[1:])
    flags = ["--model", MODEL, "--backend", "cpu"]
    for name in pairs:
        if name in ("--port", "--hf-repo", "--hf-file"):
            next(pairs)
        elif name == "--chat-template-file":
            flags += [name, os.path.basename(next(pairs))]
        elif name != "--offline":
            flags.append(name)
    return tuple(flags)


def raise_command(command, **_) -> None:
    """subprocess.Popen of utils.py."""
    raise Started(command)


def list_flags(server) -> tuple[str, ...]:
    """Our flags for a ServerProcess; skips the test where there is none."""
    # a router without a model, in tests of origins that send it no prompt
    is_router = server.model_hf_repo is None and (server.cors_origins or server.server_tools)
    if not is_router and "stories260K" not in (server.model_hf_repo or ""):
        pytest.skip(f"needs {server.model_hf_repo or 'several models'}")
    if HAS_OWN_FLAGS:
        return list_own_flags(server)
    slots = server.n_slots or 4
    unified = slots if server.kv_unified else 1
    context = min(CONTEXT, (server.n_ctx or 4096) * unified // slots)
    flags = ["--model", MODEL, "--backend", "cpu", "--max-rows", slots, "--ctx-size", context]
    flags += ["--temp", server.temperature, "--seed", server.seed]
    # llama-server's default is any origin, and with tools pages of the same machine
    default = "localhost" if server.server_tools else "*"
    flags += ["--cors-origin", server.cors_origins or default]
    flags += ["--host", server.server_host]
    flags += ["--slots" if server.server_slots else "--no-slots"]
    named = {
        "--alias": server.model_alias,
        "--max-tokens": server.n_predict,
        "--api-key": server.api_key,
        "--slot-save-path": server.slot_save_path,
        "--template": server.chat_template or find_template(server),
        "--ubatch-size": server.n_batch,
        "--reasoning": server.reasoning,
    }
    for name, value in named.items():
        flags += [name, value] if value else []
    return tuple(map(str, [*flags, *(["--no-page"] if server.no_ui else [])]))


def find_template(server) -> str | None:
    """The template's file beside this one."""
    name = os.path.basename(server.chat_template_file or "")
    return name if name and os.path.exists(name) else None


def ask(server, method, path, data=None, *rest, **more):
    """ServerProcess.make_request; --verbose is the body's field here."""
    if server.debug and data and path.endswith("/chat/completions"):
        data = {"verbose": True, **data}
    return with_any_case(server, method, path, data, *rest, **more)


def with_any_case(server, *request, **more):
    """ServerProcess.make_request, with headers as HTTP has them: in any case."""
    answer = _ask(server, *request, **more)
    answer.headers = requests.structures.CaseInsensitiveDict(answer.headers)
    return answer


def start(server, timeout_seconds: int = 120) -> None:
    """ServerProcess.start: take a running server with the same flags, or start one."""
    flags, port = list_flags(server), 0
    if server.process:  # started before: its address stays
        port = server.server_port
        for known in [
            known for known, (process, _) in _servers.items() if process is server.process
        ]:
            del _servers[known]
        server.process.kill()
        server.process.wait()
    if flags not in _servers:
        while len(_servers) >= KEPT:
            _servers.popitem(last=False)[1][0].kill()
        command = [sys.executable, "-m", "mlx_llama.server", "--port", str(port), *flags]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        lines = []
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"http://[^:/]+:(\d+)", line):
                break
        else:
            raise RuntimeError("the server ended: " + "".join(lines)[-500:])
        os.set_blocking(process.stderr.fileno(), False)
        _servers[flags] = process, int(match[1])
    _servers.move_to_end(flags)
    server.process, server.server_port = _servers[flags]
    last = time.monotonic() + timeout_seconds
    while time.monotonic() < last:
        try:
            if requests.get(f"http://127.0.0.1:{server.server_port}/health").status_code == 200:
                return
        except requests.ConnectionError:
            pass
        time.sleep(0.05)
    raise TimeoutError("the server does not answer")


def match_regex(pattern: str, text: str) -> bool:
    """utils.match_regex; a pattern with words of stories260K matches any text."""
    strict = pattern in STRICT
    return bool(re.search(pattern, text, re.I | re.M | re.S)) if strict else len(text) > 0


_ask, _start = utils.ServerProcess.make_request, utils.ServerProcess.start
utils.subprocess = types.SimpleNamespace(Popen=raise_command)
utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda server: None
utils.ServerProcess.make_request = with_any_case if HAS_OWN_FLAGS else ask
utils.match_regex = match_regex


@atexit.register
def kill_all() -> None:
    for process, _ in _servers.values():
        process.kill()
