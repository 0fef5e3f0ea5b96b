"""Public names in dir(), help() and type checkers."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc
import re
from pathlib import Path

import pytest
from launching import run_python

import mlx_llama
from mlx_llama.core import errors

ROOT = Path(mlx_llama.__file__).resolve().parents[1]
FIRST = {"load", "LLM", "errors"}
# Classes that programs call or read; the engine and other parts are not among them.
CALLED = set(
    "load LLM Session Answer ToolCall Completion Token Options "
    "GenerationOptions LoadOptions".split()
)
ERRORS = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.LlamaError)
}


def test_public_names_are_listed_and_there():
    """dir() has those that a user starts from."""
    assert set(dir(mlx_llama)) == FIRST | {"__version__"}
    assert set(mlx_llama.__all__) >= FIRST | ERRORS
    assert len(set(mlx_llama.__all__)) == len(mlx_llama.__all__)
    for name in set(mlx_llama.__all__) - {
        *("Prompt", "errors", "LogitsProcessor", "OnPiece", "OnProgress", "Messages", "Piece"),
        "Stream",
    }:
        assert getattr(mlx_llama, name).__name__ == name
    assert (ROOT / "mlx_llama" / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        mlx_llama.lod


def test_errors_are_a_module_that_can_be_imported():
    code = (
        "import mlx_llama.errors as imported; from mlx_llama.errors import LlamaError; import "
        "mlx_llama; assert mlx_llama.errors is imported and mlx_llama.LlamaError is LlamaError; "
        "print(sorted(n for n in dir(imported) if n[0].isupper()))"
    )
    done = run_python("-c", code)
    assert done.stdout.strip() == str(sorted(ERRORS)), done.stderr
    assert {getattr(mlx_llama.errors, name) for name in ERRORS} == {
        getattr(errors, name) for name in ERRORS
    }


def annotations(thing: object) -> list[str]:
    """Annotations of the public methods, properties and fields of a class, or of a function.
    Results of the package are not built by users, so __init__ does not count."""
    if not isinstance(thing, type):
        signature = inspect.signature(thing)
        parts = [parameter.annotation for parameter in signature.parameters.values()]
        return [inspect.formatannotation(part) for part in (signature.return_annotation, *parts)]
    members = [
        getattr(member, "fget", getattr(member, "func", member))
        for name, member in vars(thing).items()
        if not name.startswith("_") or name in ("__iter__", "__next__", "__enter__")
    ]
    fields = [
        str(text)
        for name, text in vars(thing).get("__annotations__", {}).items()
        if not name.startswith("_")
    ]
    return fields + [
        text for member in members if inspect.isfunction(member) for text in annotations(member)
    ]


def test_what_a_signature_names_is_importable_from_the_package():
    ours = {
        name
        for room in ("core", "api")
        for file in (ROOT / "mlx_llama" / room).rglob("*.py")
        for name in re.findall(
            r"^class (\w+)|^([A-Z]\w+) = \w+(?: \||\[)", file.read_text(encoding="utf-8"), re.M
        )
    }
    # here that of collections.abc
    ours = {name for pair in ours for name in pair if name} - {"Sequence"}
    named = {
        word
        for name in CALLED
        for text in annotations(getattr(mlx_llama, name))
        for word in re.findall(r"\w+", text)
    }
    assert {"Answer", "Piece", "Options", "Token"} <= named & ours <= set(mlx_llama.__all__)


def test_dir_and_completion_import_nothing():
    code = (
        "import sys, mlx_llama, rlcompleter; dir(mlx_llama); print(sorted(n for n in sys.modules "
        "if n.startswith('mlx_llama')))"
    )
    assert run_python("-c", code).stdout == "['mlx_llama', 'mlx_llama.api']\n"


def test_help_opens_with_load_and_llm():
    shown = pydoc.plain(pydoc.render_doc(mlx_llama))
    assert shown.count("\n    class ") == 1 and "\n    class LLM" in shown
    assert len(shown.splitlines()) < 250
    assert "\n    load(model:" in shown and "Load a model." in shown
    assert "generate(self, prompt:" in shown
    assert shown.index("llm.ask(") < shown.index("llm.generate(")
    assert shown.index("ask(self, question") < shown.index("generate(self, prompt")
    assert shown.index("load(") < 400 and not any(f"class {name}" in shown for name in ERRORS)


SNIPPET = """
from collections.abc import Sequence

from mlx_llama import ContextError, load

llm = load("x", threads=2)
text: str = llm.generate("Once", max_tokens=3, stop=["a"], temperature=0.5, logit_bias={5: 1.0}, seed=None).text
chat = llm.chat(system="x", max_tokens=3)
tokens: Sequence[int] = chat.send("hi", top_p=0.5).tokens
for piece in llm.stream("Once", speculate="prompt"):
    print(piece + "!")
done: list[str] = [answer.text for answer in llm.batch(["a", [1, 2]], max_tokens=3)]
seconds: float = llm.generate("x").tokens[0].seconds
answer: str = llm.ask("Why?", system="Be brief.", stop_token_ids=[5], on_progress=lambda done, total: print(done / total)).text
llm.generate("x", logits_processor=lambda tokens, logits: logits * 0.5)


async def show() -> None:
    async for piece in llm.astream("Once", max_tokens=3):
        print(piece + "!")
"""  # noqa: E501
SLIPS = (
    'llm.generate("x", max_tokenz=3)|llm.stream("x", temperature="hot")|llm.chat(sytem="x")|'
    'chat.send("x", speculate="maybe")|load("x", ctx=5)|llm.ask(5)|llm.ask("x", logits_processor=5)'
).split("|")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_a_type_checker_sees_slips_and_only_these(tmp_path):
    (tmp_path / "snippet.py").write_text(SNIPPET + "\n".join(SLIPS) + "\n")
    flags = "-m mypy --config-file= --follow-imports=silent --no-error-summary --cache-dir"
    done = run_python(*flags.split(), tmp_path, tmp_path / "snippet.py", cwd=ROOT, timeout=300)
    errors = [
        line.split("snippet.py:")[1] for line in done.stdout.splitlines() if ": error: " in line
    ]
    first = SNIPPET.count("\n") + 1
    lines = [int(line.split(":")[0]) for line in errors]
    assert lines == list(range(first, first + len(SLIPS))), done.stdout + done.stderr
    assert 'Unexpected keyword argument "max_tokenz"' in errors[0]
    assert 'did you mean "max_tokens"' in errors[0]
