"""Examples and benchmarks that need a server; the command's help."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from launching import run_python

from mlx_llama.server import command

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*arguments: object) -> str:
    done = run_python(*map(str, arguments), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_openai_client(guide, llm):
    out = run(EXAMPLES / "openai_client.py", "--url", f"{guide.url}/v1").splitlines()
    assert out[0] == llm.generate([{"role": "user", "content": "Who are you?"}], max_tokens=60).text
    assert len(out) == 2 and len(out[1]) > 50


def written_blocks(language: str) -> list[str]:
    """Code of the README and of the server's page."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/server.md")]
    return [
        block for page in pages for block in re.findall(rf"```{language}\n(.*?)```", page, re.S)
    ]


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("sh")), reason="no curl here")
def test_curl_lines_of_the_readme_and_docs_work_as_they_stand(guide, llm):
    """But for the port."""
    lines = [
        line
        for block in written_blocks("sh")
        for line in block.replace("\\\n", "").splitlines()
        if line.startswith("curl ")
    ]
    assert len(lines) > 4
    for line in lines:
        assert "http://127.0.0.1:8080" in line
        command = line.replace("http://127.0.0.1:8080", guide.url).split("   #")[0]
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout, done.stderr
        bodies = [
            line.removeprefix("data: ")
            for line in done.stdout.splitlines()
            if line.startswith("data: ")
        ] or [done.stdout]
        assert all(body == "[DONE]" or "error" not in json.loads(body) for body in bodies), (
            done.stdout
        )
        if "chat/completions" in line and "Who are you?" in line and bodies[0] == done.stdout:
            wanted = llm.generate([{"role": "user", "content": "Who are you?"}]).text
            assert json.loads(done.stdout)["choices"][0]["message"]["content"] == wanted


def test_clients_of_the_docs_run_as_they_stand(guide, capsys):
    """But for the port."""
    clients = [block for block in written_blocks("python") if "http://127.0.0.1:8080" in block]
    assert clients
    for block in clients:
        exec(block.replace("http://127.0.0.1:8080", guide.url), {})
        assert capsys.readouterr().out


@pytest.mark.slow
def test_load(toy):
    asked = [*"--clients 1 3 --rounds 2 --words 12 --tokens 8 --threads 1 --json".split()]
    figures = json.loads(
        run(EXAMPLES / "benchmarks" / "load.py", toy, "--servers", "ours", "in-process", *asked)
    )
    for clients in ("1", "3"):
        servers = figures["clients"][clients]
        assert set(servers) == {"mlx_llama (cpu)", "in process"}
        for rounds in servers.values():
            assert len(rounds) == 2
            for line in rounds:
                assert line["tokens"] == 8 * int(clients) and line["rate"] > 0
                assert 0 < line["first"] <= line["first_95"]
                assert 0 < line["between"] <= line["between_95"]


@pytest.mark.slow
def test_load_of_a_server_that_runs(guide):
    out = run(
        EXAMPLES / "benchmarks" / "load.py",
        *f"--url {guide.url} --clients 2 --rounds 1 --tokens 6".split(),
    )
    assert out.startswith("  2 clients") and "tokens/s" in out


def test_help_names_llama_servers_flags(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    out = capsys.readouterr().out
    for flag in (
        "host port alias ctx-size parallel batch-size threads api-key api-key-file timeout temp "
        "seed n-predict chat-template chat-template-file model-draft slots slot-save-path metrics "
        "cors-origin idle-unload shutdown-seconds cache-memory cache-bits"
    ).split():
        assert f"--{flag}" in out, flag
