"""Flags that doors share: llama.cpp's values, templates as text, log-probabilities."""

from __future__ import annotations

import json

import pytest

from mlx_llama import generate, load
from mlx_llama.chat import repl as chat
from mlx_llama.core.errors import OptionsError
from mlx_llama.server import command as server

PROMPT = ("--backend", "cpu", "-p", "Once upon a time", "--ignore-chat-template")


@pytest.mark.parametrize(
    "flags", [("--seed", "-1"), ("--threads", "-1"), ("--ctx-size", "0"), ("--repeat-last-n", "-1")]
)
def test_default_values_of_llama_cpp_change_nothing(flags, door, toy):
    plain = door(generate.main, "--model", toy, *PROMPT, "-m", "5")
    done = door(generate.main, "--model", toy, *PROMPT, "-m", "5", *flags)
    assert (done.code, done.out) == (0, plain.out), done.err


def test_no_limit_of_tokens_goes_to_the_end_of_the_context(door, toy):
    done = door(
        generate.main,
        "--model",
        toy,
        *PROMPT,
        *"-n -1 --ctx-size 40 --jsonl --logit-bias 1=-100 --logit-bias 2=-100".split(),
    )
    receipt = json.loads(done.out.splitlines()[-1])["receipt"]
    assert receipt["finish_reason"] == "context"
    assert receipt["prompt_tokens"] + len(receipt["tokens"]) == 40


def test_a_template_may_be_text(door, toy):
    text = "{% for message in messages %}Q {{ message.content }} A{% endfor %}"
    done = door(
        generate.main,
        *f"--model {toy} --backend cpu -p hello -m 5".split(),
        "--chat-template",
        text,
    )
    wanted = load(toy, backend="cpu", template=text).generate(
        [{"role": "user", "content": "hello"}], max_tokens=5
    )
    assert (done.code, done.out) == (0, wanted.text + "\n"), done.err
    done = door(
        generate.main,
        *f"--model {toy} --backend cpu -p hello".split(),
        "--chat-template",
        "{% for %}",
    )
    assert done.code == 2 and done.err.count("\n") == 1


def test_logprobs_of_an_answer_are_printed_beside_it(door, toy):
    llm = load(toy, backend="cpu")
    wanted = llm.generate("Once upon a time", max_tokens=5, logprobs=2)
    done = door(generate.main, "--model", toy, *PROMPT, "-m", "5", "--logprobs", "2")
    assert done.out == wanted.text + "\n"
    lines = [line for line in done.err.splitlines() if "  of " in line]
    assert [float(line.split("  of ")[0].rsplit(" ", 1)[1]) for line in lines] == [
        pytest.approx(token.logprobs.logprob, abs=1e-4) for token in wanted.tokens
    ]
    assert all(line.count(", ") >= 1 for line in lines)
    assert "  of " not in door(generate.main, "--model", toy, *PROMPT, "-m", "5").err


def test_logprobs_of_a_batch_are_in_its_lines(door, toy, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "Once upon a time", "max_tokens": 4}\n')
    for flags in ((), ("--logprobs", "2")):
        done = door(
            generate.main,
            *f"--model {toy} --backend cpu --ignore-chat-template --prompts {tmp_path}/in".split(),
            "--output",
            tmp_path / f"out{len(flags)}",
            *flags,
        )
        assert done.code == 0, done.err
    wanted = load(toy, backend="cpu").generate("Once upon a time", max_tokens=4, logprobs=2)
    assert "logprobs" not in json.loads((tmp_path / "out0").read_text())
    line = json.loads((tmp_path / "out2").read_text())
    assert line["tokens"] == list(wanted.tokens)
    assert line["logprobs"] == [
        [token.logprobs.logprob, [list(entry) for entry in token.logprobs.top]]
        for token in wanted.tokens
    ]


@pytest.mark.parametrize("asked", ["flag", "command"])
def test_logprobs_of_a_conversation_follow_its_answer(door, toy, asked):
    llm = load(toy, backend="cpu")
    wanted = llm.chat().send("hi", max_tokens=5, logprobs=2)
    flags, script = (
        (("--logprobs", "2"), b"hi\n") if asked == "flag" else ((), b"/set logprobs 2\nhi\n")
    )
    done = door(chat.main, "--model", toy, "--backend", "cpu", "-m", "5", *flags, stdin=script)
    assert done.code == 0 and done.out.rstrip("\n") == wanted.text.rstrip("\n")
    lines = [line for line in done.err.splitlines() if "  of " in line]
    assert [float(line.split("  of ")[0].rsplit(" ", 1)[1]) for line in lines] == [
        pytest.approx(token.logprobs.logprob, abs=1e-4) for token in wanted.tokens
    ]


def test_logprobs_of_a_server_are_asked_for_by_its_clients():
    for flags in (["--logprobs", "2"], ["--post-sampling-probs"]):
        with pytest.raises(OptionsError, match="is set by each request"):
            server.make_settings(server.parser().parse_args(flags))


def test_keys_stand_between_commas():
    assert server.make_settings(
        server.parser().parse_args(["--api-key", "a,b", "--api-key", "c"])
    ).api_keys == ("a", "b", "c")


@pytest.mark.parametrize(
    "origin, is_good",
    [
        ("https://example.org", True),
        ("http://localhost:3000/", True),
        ("*", True),
        ("example.org", False),
        ("https://example.org/page", False),
        ("https://", False),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin, is_good):
    args = server.parser().parse_args(["--cors-origin", origin])
    if is_good:
        assert server.make_settings(args).cors_origins == (origin.rstrip("/"),)
    else:
        with pytest.raises(OptionsError, match="as browsers send it"):
            server.make_settings(args)
