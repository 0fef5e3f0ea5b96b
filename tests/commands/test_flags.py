"""Flags that doors share: llama.cpp's values, templates as text, log-probabilities."""

from __future__ import annotations

import json

import pytest

from mlx_llama import generate, load
from mlx_llama.chat import repl as chat
from mlx_llama.core.errors import OptionsError
from mlx_llama.server import command as server
from mlx_llama.server.settings import Settings

PROMPT = ("-p", "Once upon a time", "--ignore-chat-template")


@pytest.fixture
def run(door, toy):
    """run(*flags, main, **more): a command with the toy on the CPU."""

    def run(*flags, main=generate.main, **more):
        return door(main, "--model", toy, "--backend", "cpu", *flags, **more)

    return run


def check_logprobs(lines: list[str], completion) -> None:
    """The lines of tokens tell their probabilities."""
    rates = [float(line.split("  of ")[0].rsplit(" ", 1)[1]) for line in lines if "  of " in line]
    wanted = [token.logprobs.logprob for token in completion.tokens]
    assert rates == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "flags", [("--seed", "-1"), ("--threads", "-1"), ("--ctx-size", "0"), ("--repeat-last-n", "-1")]
)
def test_default_values_of_llama_cpp_change_nothing(flags, run):
    plain, done = run(*PROMPT, "-m", "5"), run(*PROMPT, "-m", "5", *flags)
    assert (done.code, done.out) == (0, plain.out), done.err


def test_a_template_may_be_text(run, toy):
    text = "{% for message in messages %}Q {{ message.content }} A{% endfor %}"
    done = run("-p", "hello", "-m", "5", "--chat-template", text)
    llm = load(toy, backend="cpu", template=text)
    wanted = llm.generate([{"role": "user", "content": "hello"}], max_tokens=5).text
    assert (done.code, done.out) == (0, wanted + "\n"), done.err


def test_logprobs_of_an_answer_are_printed_beside_it(run, llm):
    wanted = llm.generate("Once upon a time", max_tokens=5, logprobs=2)
    done = run(*PROMPT, "-m", "5", "--logprobs", "2")
    assert done.out == wanted.text + "\n"
    check_logprobs(done.err.splitlines(), wanted)
    assert all(", " in line for line in done.err.splitlines() if "  of " in line)
    assert "  of " not in run(*PROMPT, "-m", "5").err


def test_logprobs_of_a_batch_are_in_its_lines(run, llm, tmp_path):
    (tmp_path / "in").write_text('{"prompt": "Once upon a time", "max_tokens": 4}\n')
    asked = f"--ignore-chat-template --prompts {tmp_path}/in --output {tmp_path}/out"
    for flags in ((), ("--logprobs", "2")):
        done = run(*f"{asked}{len(flags)}".split(), *flags)
        assert done.code == 0, done.err
    wanted = llm.generate("Once upon a time", max_tokens=4, logprobs=2).tokens
    assert "logprobs" not in json.loads((tmp_path / "out0").read_text())
    line = json.loads((tmp_path / "out2").read_text())
    assert line["tokens"] == list(wanted)
    tops = [[list(entry) for entry in token.logprobs.top] for token in wanted]
    rates = [token.logprobs.logprob for token in wanted]
    assert line["logprobs"] == list(map(list, zip(rates, tops)))


@pytest.mark.parametrize(
    "flags, script", [(("--logprobs", "2"), b"hi\n"), ((), b"/set logprobs 2\nhi\n")]
)
def test_logprobs_of_a_conversation_follow_its_answer(run, llm, flags, script):
    wanted = llm.chat().send("hi", max_tokens=5, logprobs=2)
    done = run("-m", "5", *flags, main=chat.main, stdin=script)
    assert done.code == 0 and done.out.rstrip("\n") == wanted.text.rstrip("\n")
    check_logprobs(done.err.splitlines(), wanted)


def test_logprobs_of_a_server_are_asked_for_by_its_clients():
    for flags in (["--logprobs", "2"], ["--post-sampling-probs"]):
        with pytest.raises(OptionsError, match="is set by each request"):
            server.make_settings(server.parser().parse_args(flags))


def test_keys_stand_between_commas_and_slots_in_a_folder(tmp_path):
    flags = ["--api-key", "a,b", "--api-key", "c", "--slot-save-path", str(tmp_path)]
    settings = server.make_settings(server.parser().parse_args(flags))
    assert settings.api_keys == ("a", "b", "c") and settings.slot_folder == str(tmp_path)


def test_a_setting_without_its_flag_has_its_default(monkeypatch):
    monkeypatch.delenv("MLX_LLAMA_API_KEY", raising=False)
    assert server.make_settings(server.parser().parse_args([])) == Settings()
    words = (
        "--port 0 --timeout 2.5 --queue 3 --idle-unload 2 --max-body 1MB --allowed-host a --strict"
    )
    settings = server.make_settings(server.parser().parse_args(words.split()))
    assert (settings.port, settings.timeout, settings.queue) == (0, 2.5, 3)
    assert (settings.idle_unload, settings.max_body) == (120.0, 10**6)
    assert settings.allowed_hosts == ("a",) and settings.is_strict


LLAMA_SERVER = """
--cors-origins https://a.example,localhost --cors-origins * --cors-methods GET,POST
--cors-headers * --cors-credentials --tags chat,small --verbose --no-ui --no-slots --no-jinja
"""
NEEDLESS = """
--no-jinja | the model's chat template is always used
--backend-sampling | tokens are sampled on the device
--backend_sampling | tokens are sampled on the device
--media-path tools | this package reads text only
--no-mmproj | this package reads text only
--tools all | the server runs no tools: clients send theirs with a request, and run the calls
--ui-mcp-proxy | the server runs no tools: clients send theirs with a request, and run the calls
--no-cache-idle-slots | the cache keeps what later requests can use
--no-models-autoload | a server serves one model
"""


def test_flags_of_llama_server():
    settings = server.make_settings(server.parser().parse_args(LLAMA_SERVER.split()))
    assert settings.cors_origins == ("https://a.example", "localhost", "*")
    assert (settings.cors_methods, settings.cors_headers) == ("GET,POST", "*")
    assert settings.cors_credentials and settings.is_verbose and settings.tags == ("chat", "small")
    assert not settings.serves_page and not settings.serves_slots
    plain = server.make_settings(server.parser().parse_args([]))
    assert plain.cors_methods == "GET, POST, DELETE, OPTIONS" and plain.cors_headers is None
    assert not (plain.cors_credentials or plain.is_verbose or plain.tags)


@pytest.mark.parametrize("line", NEEDLESS.strip().splitlines())
def test_flags_of_llama_server_that_are_not_needed(line, capsys):
    words, _, reason = line.partition(" | ")
    server.make_settings(server.parser().parse_args(words.split()))
    assert capsys.readouterr().err == f"({words.split()[0]} is not needed: {reason})\n"


@pytest.mark.parametrize("flag", ["--cors-methods", "--cors-headers"])
@pytest.mark.parametrize("value", ["a\nb", "GET POST", "", "ü", "*, a"])
def test_names_that_no_header_takes_are_refused(flag, value):
    with pytest.raises(OptionsError, match=f"{flag} .*names between commas"):
        server.make_settings(server.parser().parse_args([flag, value]))


@pytest.mark.parametrize(
    "origin, is_good",
    [
        *((good, True) for good in ("https://example.org", "http://localhost:3000/", "*")),
        *((bad, False) for bad in ("example.org", "https://example.org/page", "https://")),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin, is_good):
    args = server.parser().parse_args(["--cors-origin", origin])
    if is_good:
        assert server.make_settings(args).cors_origins == (origin.rstrip("/"),)
    else:
        with pytest.raises(OptionsError, match="as browsers send it"):
            server.make_settings(args)
