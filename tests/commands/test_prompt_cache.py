"""Saved keys and values at work: an answer goes on from them as from a cold start, in Python, a
session and the doors.
"""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
from machine import device_of
from rows_toy import CONFIG, ToyBackend, ToyModel

from mlx_llama import generate, load
from mlx_llama.api import llm as loading
from mlx_llama.api.llm import LLM
from mlx_llama.chat import repl as chat
from mlx_llama.core.errors import SessionError
from mlx_llama.core.files.checkpoint import open_checkpoint


@pytest.fixture
def make_llm(toy):
    """make_llm(cls): the toy's tokenizer and template on a stand-in for its model."""

    def make(cls=ToyModel) -> LLM:
        checkpoint = dataclasses.replace(open_checkpoint(toy), config=CONFIG)
        return LLM(checkpoint, ToyBackend(), cls(), checkpoint.template, 200)

    return make


class Wide(ToyModel):
    dtype = dtype_name = "bfloat16"


def test_a_conversation_is_saved_with_its_cache(make_llm, tmp_path):
    path, first = tmp_path / "talk", make_llm()
    talk = first.chat(system="be kind", max_tokens=12)
    talk.send("hello there")
    first.generate("in between", max_tokens=3)  # the latest row is not the conversation's
    talk.save(path, cache=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["talk", "talk.safetensors"]
    cold, warm = make_llm().chat(), make_llm().chat()
    talk.save(tmp_path / "plain")
    assert cold.load(tmp_path / "plain") == [] == warm.load(path)
    recomputed, other = cold.send("and then?"), warm.send("and then?")
    assert recomputed.tokens == other.tokens and recomputed.reused_tokens == 0
    assert other.reused_tokens >= talk.last.prompt_tokens - 5
    # It can be saved again, before another turn too.
    again = make_llm().chat()
    again.load(path)
    again.save(path, cache=True)
    assert make_llm().chat().load(path) == []


def test_a_cache_that_does_not_belong_is_a_notice(make_llm, tmp_path):
    path, talk = tmp_path / "talk", make_llm().chat(max_tokens=5)
    with pytest.raises(SessionError, match="there is nothing to save yet"):
        talk.save(path, cache=True)
    assert not list(tmp_path.iterdir())
    talk.send("hello there")
    talk.save(path, cache=True)
    other = make_llm(Wide).chat()
    [notice] = other.load(path)
    words = f"without its cache: {path}.safetensors: holds keys and values in 'float32'"
    assert notice.startswith(words)
    assert other.messages == talk.messages
    assert other.send("and then?", max_tokens=3).reused_tokens == 0
    (tmp_path / "talk.safetensors").write_bytes(b"oops")
    assert "is not a complete prompt cache" in make_llm().chat().load(path)[0]
    before = path.read_bytes()
    with pytest.raises(SessionError, match="exists already and is not a prompt cache"):
        talk.save(path, cache=True)
    assert path.read_bytes() == before


# The doors


@pytest.fixture
def loaded(make_llm, monkeypatch):
    """The models that doors loaded."""
    made = []
    monkeypatch.setattr(loading, "load", lambda **options: made.append(make_llm()) or made[-1])
    return made


def test_generate_reads_and_writes_a_prompt_cache(door, loaded, make_llm, tmp_path):
    path = tmp_path / "cache"
    asked = ("--ignore-chat-template", "-m", "10", "--prompt-cache", path)
    first = door(generate.main, "-p", "Once upon a time", *asked)
    second = door(generate.main, "-p", "Once upon a time there was", *asked, "--jsonl")
    assert first.code == second.code == 0, second.err
    *pieces, last = map(json.loads, second.out.splitlines())
    cold = make_llm().generate("Once upon a time there was", max_tokens=10)
    assert "".join(piece["text"] for piece in pieces) == cold.text
    assert last["receipt"]["reused_tokens"] >= len(loaded[0].encode("Once upon a time")) - 1
    # from what the second one saved
    third = door(generate.main, "-p", "Once upon a time there was", *asked, "--jsonl")
    receipt = json.loads(third.out.splitlines()[-1])["receipt"]
    assert receipt["reused_tokens"] == cold.prompt_tokens - 1
    path.write_bytes(b"precious")
    done = door(generate.main, "-p", "x", *asked)
    assert done.code == 2 and "is not a complete prompt cache" in done.err
    assert done.err.count("\n") == 1
    assert path.read_bytes() == b"precious" and done.out == ""


def test_chat_reads_and_writes_a_prompt_cache(door, loaded, make_llm, tmp_path):
    path = tmp_path / "cache"
    done = door(chat.main, "-m", "8", "--prompt-cache", path, stdin=b"hello there\n")
    assert done.code == 0 and path.exists() and "tokens from" not in done.err
    done = door(chat.main, "-m", "8", "--prompt-cache", path, "--stats", stdin=b"hello there\n")
    assert f"tokens from {path})" in done.err
    count = len(loaded[0].encode([{"role": "user", "content": "hello there"}]))
    assert f"prompt: {count} tokens, {count - 1} reused" in done.err
    before = path.read_bytes()
    # nothing was said: nothing is saved
    assert door(chat.main, "--prompt-cache", path, stdin=b"/set\n").code == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", [(generate.main, "-p", "x"), (chat.main,)])
def test_a_folder_that_is_missing_is_told_before_loading(command, door, loaded, tmp_path):
    done = door(*command, "--prompt-cache", tmp_path / "none" / "cache")
    assert done.code == 2 and "there is no folder" in done.err and not loaded


def test_the_repl_saves_and_loads_a_cache(door, loaded, tmp_path):
    path = tmp_path / "a talk"
    script = f"/save {path} --cache\nhello there\n/save {path} --cache\n"
    done = door(chat.main, "-m", "8", stdin=script.encode())
    assert done.code == 2 and "there is nothing to save yet" in done.err  # the first line
    assert f"(saved 2 messages to {path}, their cache to {path}.safetensors)" in done.err
    script = f"/load '{path}'\nand then?\n/save '{path}' --cache\n/save {path}\n"
    done = door(chat.main, "--stats", stdin=script.encode())
    assert done.code == 0, done.err
    [reused] = re.findall(r"^prompt: \d+ tokens, (\d+)", done.err, re.M)
    assert int(reused) > 10 and f"(saved 4 messages to {path})" in done.err
    assert "/save FILE [--cache]" in door(chat.main, stdin=b"/help\n").err


# On the backends


@pytest.fixture(scope="module")
def open_llm(toy):
    return lambda backend, **how: load(toy, backend=backend.name, device=device_of(backend), **how)


@pytest.mark.parametrize("cache_bits", [None, 8, 16])
def test_every_backend_goes_on_from_its_own_file(backend, cache_bits, open_llm, tmp_path):
    text = "Once upon a time there was a little llama"
    made = open_llm(backend, dtype="float32", cache_bits=cache_bits)
    made.generate(text, max_tokens=10)
    made.save_cache(tmp_path / "it")
    cold, other = (open_llm(backend, dtype="float32", cache_bits=cache_bits) for _ in range(2))
    other.load_cache(tmp_path / "it")
    text += " who lived on a hill"
    recomputed, warm = cold.generate(text, max_tokens=12), other.generate(text, max_tokens=12)
    assert warm.tokens == recomputed.tokens and warm.reused_tokens > 8
    assert recomputed.reused_tokens == 0
