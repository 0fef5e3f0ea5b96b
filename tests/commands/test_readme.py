"""README.md, CONTRIBUTING.md and docs/: commands, files, flags and links exist; scripts run; the
transcript is a real one.
"""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path

import pytest
from launching import run_python
from real.conftest import fetch

from mlx_llama.__main__ import COMMANDS as DOORS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAG = r"(?<![\w-])--[a-z][a-z-]+"
HUB_ID = 'load("HuggingFaceTB/SmolLM2-360M-Instruct")'
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


CODE = "".join(
    read(file)
    for folder in ("mlx_llama", "cpu_fallback", "cuda_fallback")
    for file in (ROOT / folder).rglob("*.py")
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", read(page), re.S)


def commands() -> list[list[str]]:
    """The words of each command line of all pages."""
    lines = [
        line
        for page in PAGES
        for block in blocks(page, "sh")
        for line in block.replace("\\\n", "").splitlines()
    ]
    return [
        shlex.split(part, comments=True)
        for line in lines
        for part in re.split(r" && | \| ", line)
        if part.strip()
    ]


@functools.cache
def help_of(door: str) -> str:
    return run_python("-m", f"mlx_llama.{door}", "--help").stdout


def source(name: str) -> str:
    return next(ROOT.joinpath("examples").rglob(name)).read_text(encoding="utf-8")


def test_the_readme_is_short_and_begins_with_the_first_chat():
    assert len(read(PAGES[0]).splitlines()) < 175
    assert blocks(PAGES[0], "sh")[0].endswith("\npip install -e . && python -m mlx_llama.chat\n")
    assert blocks(PAGES[0], "sh")[-1].strip() == 'pip install -e ".[test]" && pytest'
    assert blocks(PAGES[0], "sh")[-1].strip() in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("number", [0, 1], ids=["guide", "SmolLM2"])
def test_the_transcript_is_what_the_chat_answers(number):
    """But for the terminal's line breaks and Markdown. After a new training of the guide, record
    the transcript anew.
    """
    _, *turns = re.split(r"^>>> ", blocks(PAGES[0], "text")[number], flags=re.M)
    asked, wanted = zip(*(turn.split("\n", 1) for turn in turns))
    model = ["--model", str(fetch("smollm2"))] if number else []
    done = run_python("-m", "mlx_llama.chat", "--backend", "cpu", *model, input="\n".join(asked))
    assert done.stdout.replace("`", "").split() == " ".join(wanted).split(), done.stderr


@pytest.mark.parametrize(
    "page, number",
    [
        pytest.param(page, number, id=f"{page.name} {number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, "python"))
        if "http://" not in block
    ],
)  # those are run by tests/server/test_scripts.py
def test_scripts_run_as_they_stand(page, number, capsys, tmp_path, monkeypatch):
    """With the guide in place of the hub id, which needs a network."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(blocks(page, "python")[number].replace(HUB_ID, "load()"), names)
    out = capsys.readouterr().out
    if "logits" in names:
        assert names["logits"].shape[0] == 2 and names["chat"].send("And now?").reused_tokens > 0
    if "save_cache" in blocks(page, "python")[number]:
        assert [file.name for file in tmp_path.iterdir()] == ["story.safetensors"]
        assert int(out.split()[-1]) > 10  # tokens of the prompt and the answer
    assert out.strip()


def test_commands_exist_and_take_their_flags():
    doors_named = set()
    for words in commands():
        module = words[2] if words[0] == "python" and words[1] == "-m" else ""
        flags = [
            word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)
        ]
        if module.startswith("mlx_llama."):
            door = module.split(".")[1]
            doors_named.add(door)
            for flag in flags[1:]:
                assert re.search(rf"(?<![\w-]){flag}\b", help_of(door)), words
        elif words[0] == "python" and words[1].startswith("examples/"):
            code = source(Path(words[1]).name)
            assert not [flag for flag in flags if f'"{flag}"' not in code], words
        else:
            known = "pip pytest curl cat python git ruff brew python3 . echo"
            assert words[0] in known.split(), words
    assert doors_named == set(DOORS)


@each_page
def test_files_flags_and_variables_that_it_names_exist(page):
    text = read(page)
    if page.name == "coming-from.md":  # its first column has other programs' flags
        text = re.sub(r"^\| [^|]* \|", "", text, flags=re.M)
    for name in re.findall(r"`(?:\w+ )?([\w/]+\.py)\b", text):
        assert any(
            (ROOT / folder / name).exists()
            for folder in (
                ". examples examples/benchmarks mlx_llama cpu_fallback tests mlx_llama/core"
            ).split()
        ), name
    known = (
        "".join(map(help_of, DOORS))
        + "".join(map(read, (ROOT / "examples").rglob("*.py")))
        + read(ROOT / "pyproject.toml")
        + read(ROOT / "mlx_llama" / "cli" / "flags.py")
    )
    for flag in set(re.findall(FLAG, " ".join(re.findall(r"`([^`\n]+)`", text)))):
        assert flag in known, flag
    for name in set(re.findall(r"MLX_LLAMA_[A-Z_]+", text)):
        tests = read(ROOT / "tests/machine.py") + read(ROOT / "tests/real/conftest.py")
        assert f'"{name}"' in CODE + tests, name


@each_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", read(page), flags=re.S)):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        titles = [
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", read(target), re.M)
        ]
        assert not anchor or anchor in titles, link


def test_every_page_is_linked_from_the_readme():
    for page in PAGES[1:]:
        assert f"]({page.relative_to(ROOT).as_posix()})" in read(PAGES[0]), page


def test_what_is_supported_is_listed():
    from making_gguf import LOW_BIT, PLAIN

    from mlx_llama.core.models.families import FAMILIES
    from mlx_llama.core.models.rope_fields import ROPE_TYPES

    models, backends = read(ROOT / "docs" / "models.md"), read(ROOT / "docs" / "backends.md")
    assert f"counted in the sources | {len(FAMILIES)} |" in read(PAGES[0])
    for name in (*FAMILIES, *ROPE_TYPES, *LOW_BIT, *PLAIN):
        assert re.search(rf"\b{name}\b", models), name
    for name in set(re.findall(r'"(MLX_LLAMA_[A-Z_]+)"', CODE)):
        assert f"`{name}`" in backends, name


def rows(page: Path, title: str) -> list[list[str]]:
    """Cells of the first table after `title`, without its header."""
    table = re.search(r"^\|.*?(?=^[^|]|\Z)", read(page).split(title)[1], re.M | re.S)[0]
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in table.splitlines()[2:]
    ]


def test_the_tables_of_sizes_and_speeds_agree():
    sizes = {}
    for name, billions, four, eight, mlx, *_ in rows(ROOT / "docs" / "models.md", "## Sizes"):
        sizes[re.sub(r"\(.*\)|\W", "", name).lower()] = float(four)
        # Q8_0: 34 bytes for 32 weights
        assert float(eight) == pytest.approx(float(billions) * 34 / 32, rel=0.01)
        # 4 bits, and two 16-bit numbers for 64 weights
        assert float(mlx) == pytest.approx(float(billions) * 4.5 / 8, rel=0.01)
    table = rows(PAGES[0], "## Models by memory")
    assert len(table) == 8
    for _, file, gigabytes, *speeds in table:
        name = re.sub(r"meta|instruct|\.gguf|q4_k_m|2501|\W|_", "", file.split(":")[1].lower())
        assert float(gigabytes) == pytest.approx(sizes[name], abs=0.06)
        for bandwidth, speed in zip((50, 120, 400, 1000), speeds):
            assert int(speed) == pytest.approx(bandwidth / sizes[name], abs=0.75)


def test_the_messages_of_the_troubleshooting_page_are_messages_of_the_package():
    others = set(  # of pip, Python and the system
        "zsh: command not found: python|zsh: no matches found: .[mlx]|"
        "externally-managed-environment|ensurepip is not available|mlx_llama: command not found|"
        "No module named mlx_llama|No module named 'mlx'|Killed|No matching distribution found for "
        "mlx-llama|Package 'mlx-llama' requires a different Python".split("|")
    )
    rows = re.findall(r"^\| (`.*?) \| ", read(ROOT / "docs" / "troubleshooting.md"), re.M)
    messages = {text for row in rows for text in re.findall(r"`([^`]+)`", row)}
    assert len(messages - others) >= 18 and others <= messages
    code = re.sub(r"""["']\s*\n\s*f?["']|\{[^{}]*\}""", "", CODE)
    missing = [
        text
        for text in messages - others
        if not all(part in code for part in re.split(r"'[^']*'|\([^)]*\)", text))
    ]
    assert not missing
