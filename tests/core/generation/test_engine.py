"""Stop conditions, finish reasons, and greedy decoding against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from making import make_checkpoint

from mlx_llama import load
from mlx_llama.core.errors import ContextError, OptionsError
from mlx_llama.core.generation.engine import Stops


@pytest.fixture(scope="module")
def llm(toy):
    return load(toy, backend="cpu")


text = st.text("ab<|", max_size=30)


@given(st.lists(text, max_size=8), st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=3))
@settings(max_examples=500, deadline=None)
def test_stops_cut_before_the_earliest_stop_string_however_the_text_is_split(pieces, stops):
    matcher, shown = Stops(tuple(stops)), ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert not any(stop in shown for stop in stops)
        if matcher.matched:
            break
    else:
        shown += matcher.finish()
    whole = "".join(pieces)
    cuts = [whole.find(stop) for stop in stops if stop in whole]
    if matcher.matched:
        assert matcher.matched in stops and whole.startswith(shown + matcher.matched)
    else:
        assert shown == whole and not cuts
    if len(pieces) == 1:
        assert shown == whole[:min(cuts, default=len(whole))]


def test_text_is_held_back_no_longer_than_needed():
    matcher = Stops(("<|end|>",))
    assert matcher.push("hello <") == "hello "
    assert matcher.push("|e") == ""
    assert matcher.push("x") == "<|ex"
    assert matcher.push("<|end") + matcher.finish() == "<|end"


def test_greedy_tokens_are_those_of_transformers(toy, backend):
    import torch
    from transformers import AutoModelForCausalLM

    ours = load(toy, backend=backend.name, device="gpu" if "gpu" in str(backend.device) else "cpu", dtype="float32")
    peer = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)
    for prompt in ([1, 50, 60, 70], [1], [7, 7, 7], list(range(3, 90))):
        with torch.no_grad():
            wanted = peer.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0,
                                   eos_token_id=2)[0, len(prompt):].tolist()
        got = ours.generate(prompt, max_tokens=40, prefill_step_size=32)
        assert got.tokens == wanted
        assert got.finish_reason == ("eos" if wanted[-1] == 2 else "length")


def test_numpy_prompts(llm):
    wanted = llm.generate([1, 50, 60], max_tokens=4).tokens
    assert llm.generate(np.array([1, 50, 60]), max_tokens=4).tokens == wanted
    assert llm.generate([np.int64(1), 50, np.int32(60)], max_tokens=4).tokens == wanted
    assert llm.generate((1, 50, 60), max_tokens=4).tokens == wanted


def test_the_context_may_be_smaller_and_stretched_rope_larger(tmp_path, toy):
    assert len(load(toy, backend="cpu", ctx_size=10).generate([1] * 7, max_tokens=99).tokens) == 3
    for bad in (0, 257, 4.7, True, "x", -5, None):
        if bad is not None:
            with pytest.raises(ContextError, match="1 to 256"):
                load(toy, backend="cpu", ctx_size=bad)
    folder = make_checkpoint(tmp_path / "m", rope_scaling={"type": "linear", "factor": 4.0})
    assert load(folder, backend="cpu").engine.context == 256
    assert load(folder, backend="cpu", ctx_size=1024).engine.context == 1024


def test_time_away_from_the_engine_is_not_decoding(llm):
    import time

    for piece in (stream := llm.stream("Once", max_tokens=6)):
        time.sleep(0.05)
    assert stream.completion.decode_seconds < 0.2


def test_sampled_text_has_the_same_bits_in_every_run(backend, toy):
    ours = load(toy, backend=backend.name, device="gpu" if "gpu" in str(backend.device) else "cpu")
    options = dict(max_tokens=60, temperature=1.1, top_p=0.95, top_k=100, repetition_penalty=1.1, seed=11)
    runs = [ours.generate("Once upon", **options).tokens for _ in range(4)]
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_length(llm):
    done = llm.generate("Once", max_tokens=5)
    assert (len(done.tokens), done.finish_reason) == (5, "length")
    done = llm.generate("Once", max_tokens=0)
    assert (done.tokens, done.text, done.finish_reason) == ([], "", "length")


def test_context(backend, toy):
    llm = load(toy, backend=backend.name, device="gpu" if "gpu" in str(backend.device) else "cpu", dtype="float32")
    prompt = [1] + [60] * 249
    done = llm.generate(prompt, max_tokens=1000)
    assert (len(done.tokens), done.finish_reason) == (256 - 250, "context")


def test_eos_of_the_model_ends_and_is_not_text(backend, toy):
    llm = load(toy, backend=backend.name, device="gpu" if "gpu" in str(backend.device) else "cpu", dtype="float32")
    first = llm.generate("Once", max_tokens=8).tokens
    always = llm.generate("Once", max_tokens=8, logit_bias={2: 1000.0})
    assert (always.tokens, always.text, always.finish_reason) == ([2], "", "eos")
    assert len(first) == 8


def test_every_eos_id_ends(tmp_path):
    folder = make_checkpoint(tmp_path / "m", eos_token_id=[2, 77])
    (folder / "generation_config.json").write_text('{"eos_token_id": [88]}')
    llm = load(folder, backend="cpu")
    for token in (2, 77, 88):
        done = llm.generate("Once", max_tokens=8, logit_bias={token: 1000.0})
        assert (done.tokens, done.finish_reason) == ([token], "eos")


def test_stop_strings_are_never_shown(llm):
    whole = llm.generate("Once upon", max_tokens=60, temperature=1.0, seed=5).text
    stop = whole[20:23]
    stream = llm.stream("Once upon", max_tokens=60, temperature=1.0, seed=5, stop=stop)
    shown = "".join(stream)
    done = stream.completion
    assert shown == done.text == whole[:whole.find(stop)]
    assert (done.finish_reason, done.stop) == ("stop", stop)
    assert len(done.tokens) < 60


def test_pieces_are_the_text(llm):
    stream = llm.stream("Once upon", max_tokens=50, temperature=1.0, seed=9)
    assert "".join(stream) == stream.completion.text
    assert stream.completion.text == llm.tokenizer.decode(stream.completion.tokens)
    # A continued text keeps its spaces; an answer begins without the one that sentencepiece puts before a text.
    space = llm.tokenizer.encode("a llama")[1]
    assert llm.tokenizer.decode([5, space]) != llm.tokenizer.decode([5]) + llm.tokenizer.decode([space])
    for prompt, text in (("Once", " llama"), ([1, 60], " llama"), ([{"role": "user", "content": "x"}], "llama"), ("", "llama")):
        assert llm.generate(prompt, max_tokens=1, logit_bias={space: 1e4}).text == text


@pytest.mark.parametrize("prompt, message", [
    ([1] * 256, "the prompt has 256 tokens and the context holds 256"), ([384], "token id 384 is outside"),
    ([-1], "token id -1 is outside"), ([], "a prompt is a text, messages or token ids, not nothing"),
    (b"Once", "not bytes"), (None, "not NoneType"), (5, "not int"), (iter([1]), "not list_iterator"),
])
def test_a_prompt_that_cannot_run_is_refused_before_any_work(prompt, message, llm, monkeypatch):
    monkeypatch.setattr(type(llm.model), "forward", lambda *a, **k: pytest.fail("work was done"))
    with pytest.raises(ContextError, match=message):
        llm.stream(prompt)


def test_a_bias_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(OptionsError, match="token id 384 is outside the vocabulary of 384"):
        llm.stream("x", logit_bias={384: 1.0})


def test_an_empty_text_starts_from_bos(llm, tmp_path):
    assert llm.generate("", max_tokens=3).tokens == llm.generate([1], max_tokens=3).tokens
    folder = make_checkpoint(tmp_path / "m", tokenizer="bytelevel", bos_token_id=None)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"bos_token": "<|begin_of_text|>", ', ""))
    if load(folder, backend="cpu").tokenizer.bos_id is None:
        with pytest.raises(ContextError, match="no BOS"):
            load(folder, backend="cpu").generate("")


def test_prefill_is_one_launch_per_chunk(llm, monkeypatch):
    launches, calls = [], []
    forward, launch = type(llm.model).forward, llm.backend.runtime.launch
    monkeypatch.setattr(type(llm.model), "forward", lambda self, tokens, *a, **k: (
        calls.append(len(tokens[0])), forward(self, tokens, *a, **k))[1])
    monkeypatch.setattr(llm.backend.runtime, "launch", lambda *a: (launches.append(len(calls)), launch(*a))[1])
    llm.generate([1] * 50, max_tokens=3, prefill_step_size=16)
    assert calls == [16, 16, 16, 2, 1, 1] and launches == [1, 2, 3, 4, 5, 6]


def test_prefill_in_chunks_gives_the_same_tokens(llm):
    prompt = np.random.default_rng(0).integers(3, 384, 100).tolist()
    runs = [llm.generate(prompt, max_tokens=20, prefill_step_size=size).tokens for size in (1, 7, 99, 100, 512)]
    assert all(run == runs[0] for run in runs)


def test_the_receipt_names_seed_options_and_origins(llm):
    done = llm.generate("Once", max_tokens=3, temperature=0.5)
    again = llm.generate("Once", max_tokens=3, temperature=0.5, seed=done.seed)
    assert again.tokens == done.tokens
    receipt = done.receipt()
    assert receipt["origins"]["temperature"] == "user" and receipt["origins"]["top_p"] == "default"
    assert receipt["options"]["max_tokens"] == 3 and receipt["evaluations_per_token"] == 1.0
    assert receipt["backend"] == "cpu" and "text" not in receipt


def test_logits_are_those_of_transformers(toy, llm):
    import torch
    from transformers import AutoModelForCausalLM

    ids = [1, 40, 50, 60]
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(toy, dtype=torch.float32)(torch.tensor([ids])).logits[0].numpy()
    got = llm.logits(ids)
    assert got.dtype == np.float32 and got.shape == (4, 384)
    assert np.abs(got - wanted).max() / np.abs(wanted).max() < 1e-4
    for bad in ([], [384], [1] * 257):
        with pytest.raises(ContextError):
            llm.logits(bad)
