"""python -m mlx_llama.generate --prompts: results, their order, what a job that was killed does
again; bad input.
"""

from __future__ import annotations

import json

import pytest
from cases.engine import VOCABULARY, ToyBackend, ToyModel, ToyTokenizer
from making import fail_at

from mlx_llama import generate
from mlx_llama.api import llm as loading
from mlx_llama.core import options
from mlx_llama.core.backends.load_options import LoadOptions, parse_rows
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import ContextError


class ToyLLM:
    """The toy backend behind the door; the prompt of a request is its JSON."""

    template = "a template"

    def __init__(self, load_options=LoadOptions()):
        self.load_options = load_options
        self.defaults = options.Defaults()
        self.backend, rows = ToyBackend(), parse_rows(load_options.max_rows)
        parts = (self.backend, ToyModel(self.backend), ToyTokenizer(), frozenset(), 200)
        self.loop = Loop(*parts, max_rows=rows)
        self.prompts = []

    def require_template(self):
        return self.template

    def submit(self, prompt, **chosen):
        self.prompts.append(prompt)
        if prompt == "refused" or prompt == [{"role": "user", "content": "refused"}]:
            raise ContextError("`ctx_size` 1: refused")
        tokens = [ord(character) % VOCABULARY for character in json.dumps(prompt)]
        return self.loop.submit(Request(tokens, options.resolve(chosen)))

    def alone(self, prompt, **chosen):
        return ToyLLM().submit([{"role": "user", "content": prompt}], **chosen).finish()


@pytest.fixture
def toy_llm(monkeypatch):
    """The models that the door loaded."""
    made = []
    load = lambda options: made.append(ToyLLM(options)) or made[-1]  # noqa: E731
    monkeypatch.setattr(loading, "load_model", load)
    return made


@pytest.fixture
def run(door):
    """run(*flags): the command."""
    return lambda *flags, **more: door(generate.main, *flags, **more)


def write(path, *lines):
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return path


def results(path):
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["index"]: line for line in lines}


def test_a_batch_gives_what_each_request_gives_alone(run, toy_llm, tmp_path):
    lines = [
        {"prompt": "one", "id": "a"},
        {"prompt": "two", "max_tokens": 3},
        {"prompt": "three", "temperature": 0.9, "seed": 5},
        {"messages": [{"role": "user", "content": "four"}]},
    ]
    flags = f"-o {tmp_path}/out -m 20 --max-rows 3 --cache-memory 1GB --stats".split()
    done = run("--prompts", write(tmp_path / "in", *lines), *flags)
    assert done.code == 0 and done.out == "" and "4 requests, 63 tokens in " in done.err
    [llm], written = toy_llm, results(tmp_path / "out")
    assert llm.load_options.max_rows == "3" and llm.load_options.cache_memory == "1GB"
    assert llm.loop.max_rows == 3
    wanted = [
        llm.alone("one", max_tokens=20),
        llm.alone("two", max_tokens=3),
        llm.alone("three", max_tokens=20, temperature=0.9, seed=5),
        llm.alone("four", max_tokens=20),
    ]
    for i, answer in enumerate(wanted):
        assert written[i]["text"] == answer.text
        assert written[i]["completion_tokens"] == len(answer.tokens)
        assert written[i]["finish_reason"] == "length"
        assert written[i]["prompt_tokens"] == answer.prompt_tokens
    assert written[0]["id"] == "a" and written[2]["seed"] == 5 and "id" not in written[1]
    assert (3, 1) in llm.backend.calls and max(batch for batch, _ in llm.backend.calls) == 3
    # the shortest answer
    assert next(iter(map(json.loads, (tmp_path / "out").read_text().splitlines())))["index"] == 1


def test_the_rest_of_a_batch(run, toy_llm, tmp_path):
    source = write(tmp_path / "in", *({"prompt": f"prompt {i}"} for i in range(10)))
    asked = ("--prompts", source, "--output", tmp_path / "out", "-m", "5")
    assert run(*asked).code == 0
    whole = (tmp_path / "out").read_bytes()
    kept = whole.split(b"\n")[:4]
    (tmp_path / "out").write_bytes(b"\n".join(kept) + b"\n" + whole.split(b"\n")[4][:30])
    done = run(*asked)
    assert done.code == 0 and "has the results of 4 of 10 requests already" in done.err
    assert len(toy_llm[1].prompts) == 6 and (tmp_path / "out").read_bytes().split(b"\n")[:4] == kept
    assert {i: line["text"] for i, line in results(tmp_path / "out").items()} == {
        line["index"]: line["text"] for line in map(json.loads, whole.splitlines())
    }
    done = run(*asked)
    # nothing is loaded
    assert done.code == 0 and "the results of all 10 requests already" in done.err
    assert len(toy_llm) == 2
    done = run(*asked, "--seed", "1")
    assert done.code == 2
    assert "line 1 is not a result of these prompts, options and model" in done.err


def test_an_error_of_one_request_is_its_line(run, toy_llm, tmp_path):
    texts = ("fine", "refused", "x" * 300, "too")
    source = write(tmp_path / "in", *({"prompt": text} for text in texts))
    done = run("--prompts", source, "-o", tmp_path / "out", "-m", "4")
    lines = results(tmp_path / "out")
    assert done.code == 1 and "error: 2 requests failed: see the field error in" in done.err
    assert lines[1]["error"] == "--ctx-size 1: refused"
    assert "the context holds 200" in lines[2]["error"]
    assert lines[0]["text"] and lines[3]["text"]
    # and nothing is loaded
    assert run("--prompts", source, "-o", tmp_path / "out", "-m", "4").code == 1
    assert len(toy_llm) == 1


def test_ctrl_c_keeps_what_is_finished(run, toy_llm, tmp_path, monkeypatch):
    lines = {"prompt": "short", "max_tokens": 2}, {"prompt": "long", "max_tokens": 50}
    source = write(tmp_path / "in", *lines)
    monkeypatch.setattr(Loop, "tick", fail_at(12, KeyboardInterrupt)(Loop.tick))
    done = run("--prompts", source, "-o", tmp_path / "out")
    assert done.code == 130
    assert "(stopped after 1 of 2 requests; run the same command again for the rest)" in done.err
    assert list(results(tmp_path / "out")) == [0]
    assert run("--prompts", source, "-o", tmp_path / "out").code == 0
    assert list(results(tmp_path / "out")) == [0, 1]


def test_prompts_from_standard_input_and_a_system_prompt(run, toy_llm, tmp_path):
    system, a, b, c = (
        {"role": role, "content": text}
        for role, text in (("system", "be brief"), ("user", "a"), ("user", "b"), ("user", "c"))
    )
    theirs = {"role": "system", "content": "theirs"}
    lines = [{"prompt": "a"}, {"messages": [theirs, b]}, {"messages": [c]}]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    flags = f"--prompts - -o {tmp_path}/out -m 2".split()
    done = run(*flags, "-sys", "be brief", stdin=stdin)
    assert done.code == 0 and len(results(tmp_path / "out")) == 3
    assert toy_llm[0].prompts == [[system, a], [theirs, b], [system, c]]
    flags = f"--prompts - -o {tmp_path}/plain -m 2 --ignore-chat-template".split()
    run(*flags, stdin=b'{"prompt": "a"}')
    assert toy_llm[1].prompts == ["a"]


FINE = '{"prompt": "a"}'
MESSAGES = '{"messages": [{"role": "user", "content": "a"}]}'


@pytest.mark.parametrize(
    "line, flags, part",
    [
        ('{"prompt": "a", "top_p": 2}', "", "in: line 2: option top_p: 2 is not allowed"),
        ('{"prompt": 1}', "", "in: line 2: field prompt is 1"),
        ("{", "", "in: line 2: is not JSON"),
        (FINE, "--jsonl", "--jsonl is for --prompt"),
        (FINE, "--temp -1", "option --temp"),
        (FINE, "--prompt-cache x", "--prompt-cache is for --prompt"),
        (FINE, "-p x", "not allowed"),
        (FINE, "-sys x --ignore-chat-template", "--system-prompt needs a chat template"),
        (MESSAGES, "--ignore-chat-template", "has messages, which need a chat template"),
    ],
)
def test_a_bad_line_or_flag_is_one_line_before_any_computing(
    line, flags, part, run, toy_llm, tmp_path
):
    source = write(tmp_path / "in", {"prompt": "fine"}, line)
    done = run("--prompts", source, "-o", tmp_path / "out", *flags.split())
    assert done.code == 2 and done.out == "" and part in done.err and done.err.count("\n") == 1
    assert toy_llm == [] and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_bar_on_a_terminal(roomy, terminal, tmp_path):
    source = write(
        tmp_path / "in", *({"prompt": f"number {i}", "max_tokens": 60} for i in range(40))
    )
    flags = f"--model {roomy} --backend cpu --prompts {source} -o {tmp_path}/out"
    child = terminal("-m", "mlx_llama.generate", *flags.split())
    child.expect("generating")
    child.expect("/40")
    child.wait()
    assert child.exitstatus == 0
    assert results(tmp_path / "out")[39]["completion_tokens"] == 60
