"""Commands, files and flags in the README exist; its script runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_the_first_two_commands():
    assert blocks("sh")[:2] == ["pip install -e . && python -m mlx_llama.chat\n", 'pip install -e ".[test]" && pytest\n']
    assert blocks("sh")[1].strip() in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_script_runs_as_it_stands(capsys):
    """With the guide in place of the hub id, which needs a network."""
    script = blocks("python")[0].replace('load("HuggingFaceTB/SmolLM2-360M-Instruct")', "load()")
    names: dict = {}
    exec(script, names)
    assert names["logits"].shape[0] == 2
    assert int(capsys.readouterr().out.split()[-1]) > 0  # the second turn reused tokens


def test_the_script_for_many_runs_as_it_stands(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(blocks("python")[1], {})
    assert [file.name for file in tmp_path.iterdir()] == ["story.safetensors"]
    assert int(capsys.readouterr().out.split()[-1]) > 10  # tokens of the prompt and the answer


def test_files_and_flags_it_names_exist():
    for name in re.findall(r"`([\w/]+\.py)`", TEXT):
        assert any((ROOT / folder / name).exists() for folder in ("", "examples", "mlx_llama", "cpu_fallback")), name
    import subprocess
    import sys

    from mlx_llama.__main__ import COMMANDS as DOORS

    known = "".join(subprocess.run([sys.executable, "-m", f"mlx_llama.{door}", "--help"], capture_output=True, text=True,
                                   timeout=60).stdout for door in DOORS)
    for flag in set(re.findall(r"--[a-z][a-z-]+", " ".join(blocks("sh")))):
        assert flag in known, flag
