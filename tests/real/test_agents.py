"""Coding agents from npm against a server of SmolLM2: a whole turn with a tool call.

A model of this size calls no tools by itself, so a grammar forces what it writes: first a call
that reads a file, then an answer with the code that the prompt shows. The code gets there only if
the agent reads the streamed call, runs it and sends its output back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from scripting import Script
from server.conftest import Inside

from mlx_llama import load
from real.checkpoints import lock

PACKAGES = ("@openai/codex@0.169.0", "opencode-ai@1.18.33", "cline@3.0.65")
QUESTION = "What is the code in code.txt?"
SECONDS = 240  # of a program
INSTRUCTIONS = "You are a coding agent."  # their own are too long for 8192 positions
# Their tools that run a command, and its arguments
CALLS = {
    "codex": ("exec_command", {"cmd": "cat code.txt"}),
    "opencode": ("bash", {"command": "cat code.txt", "description": "Read the file"}),
    "cline": ("run_commands", {"commands": ["cat code.txt"]}),
}


@pytest.fixture(scope="session")
def programs() -> Path:
    """Folder of the agents' programs; skips with the reason where npm cannot install them."""
    if not (npm := shutil.which("npm")):
        pytest.skip("there is no npm")
    with lock("agents") as folder:
        programs = folder / "node_modules" / ".bin"
        if not all((programs / name).exists() for name in CALLS):
            command = [npm, "install", "--prefix", str(folder), *PACKAGES]
            options = ["--no-audit", "--no-fund", "--fetch-retries=0", "--loglevel=error"]
            try:
                done = subprocess.run(
                    [*command, *options], capture_output=True, text=True, timeout=900
                )
            except subprocess.TimeoutExpired:
                pytest.skip("npm install: not done after 900 s")
            if done.returncode:
                pytest.skip(f"npm install: {done.stderr.strip()[-300:]}")
    return programs


@pytest.fixture(scope="module")
def server(smollm2):
    llm = load(smollm2, backend="cpu")
    server = Inside(lambda: llm, alias="smollm2").ready()
    server.llm = llm
    yield server
    server.close()


class Turn(Script):
    """A call of the agent's tool, then an answer with the code that the prompt shows."""

    def __init__(self, llm, agent: str):
        super().__init__(llm)
        name, arguments = CALLS[agent]
        call = json.dumps({"name": name, "arguments": arguments})
        self.call = f"<tool_call>{call}</tool_call>"

    def prepare(self, request):
        prompt = self.llm.tokenizer.decode(list(request.prompt), skip_special=False)
        code = re.search("PELICAN-[0-9a-f]{8}", prompt)
        text = f"The code is {code[0]}." if code else "There is no code."
        # a call that did not work is not made again: some agents would go on for ever
        self.left = [self.call if not code and not self.prompts else text]
        return super().prepare(request)


def run(command: list[str | Path], home: Path) -> list[dict]:
    """The JSON lines that a program prints, with everything that it keeps in `home`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    work = home / "work"
    # opencode works in $PWD, not in its working directory
    homes = {"HOME": str(home), "PWD": str(work)}
    done = subprocess.run(
        command,
        cwd=work,
        env=kept | homes | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run_codex(program: Path, url: str, home: Path) -> tuple[str, str]:
    """The tool's output and the answer, as the agent reports them."""
    (home / "instructions.md").write_text(INSTRUCTIONS)
    (home / ".codex").mkdir()
    (home / ".codex/config.toml").write_text(f"""
model = "smollm2"
model_provider = "here"
model_context_window = 8192
model_instructions_file = "{home}/instructions.md"
features = {{multi_agent = false, goals = false}}
analytics = {{enabled = false}}
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = 1200000
""")
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    lines = run([program, "exec", "--json", *options, QUESTION], home)
    items = {line["item"]["type"]: line["item"] for line in lines if "item" in line}
    assert items["command_execution"]["exit_code"] == 0
    return items["command_execution"]["aggregated_output"], items["agent_message"]["text"]


def run_opencode(program: Path, url: str, home: Path) -> tuple[str, str]:
    """The tool's output and the answer, as the agent reports them."""
    config = {
        "autoupdate": False,
        "share": "disabled",
        "tools": {"*": False, "bash": True},
        "agent": {"build": {"prompt": INSTRUCTIONS}, "title": {"disable": True}},
        "provider": {
            "here": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {"smollm2": {"limit": {"context": 8192, "output": 1024}}},
            }
        },
    }
    (home / ".config/opencode").mkdir(parents=True)
    (home / ".config/opencode/opencode.json").write_text(json.dumps(config))
    options = ["--format", "json", "--title", "code", "--model", "here/smollm2"]
    parts = {line["type"]: line["part"] for line in run([program, "run", *options, QUESTION], home)}
    assert parts["step_finish"]["reason"] == "stop"
    return parts["tool_use"]["state"]["output"], parts["text"]["text"]


def run_cline(program: Path, url: str, home: Path) -> tuple[str, str]:
    """The tool's output and the answer, as the agent reports them."""
    provider = ["-p", "openai", "-b", f"{url}/v1", "-k", "none", "-m", "smollm2"]
    run([program, "auth", *provider], home)
    try:
        lines = run([program, "--json", "--system", INSTRUCTIONS, QUESTION], home)
    finally:
        run([program, "hub", "stop"], home)
    [result] = [line for line in lines if line["type"] == "run_result"]
    assert (result["finishReason"], result["iterations"]) == ("completed", 2)
    events = [line["event"] for line in lines if line["type"] == "agent_event"]
    [tool] = [
        event
        for event in events
        if event["type"] == "content_end" and event["contentType"] == "tool"
    ]
    return json.dumps(tool), result["text"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", CALLS)
def test_a_turn_with_a_tool_call(agent, programs, server, tmp_path):
    code = f"PELICAN-{os.urandom(4).hex()}"
    (tmp_path / "work").mkdir()
    (tmp_path / "work/code.txt").write_text(f"{code}\n")
    url = f"http://127.0.0.1:{server.port}"
    drive = {"codex": run_codex, "opencode": run_opencode, "cline": run_cline}[agent]
    with Turn(server.llm, agent) as turn:
        printed, answer = drive(programs / agent, url, tmp_path)
    assert code in printed and answer == f"The code is {code}."
    question, result = turn.prompts
    assert QUESTION in question and code not in question and code in result
