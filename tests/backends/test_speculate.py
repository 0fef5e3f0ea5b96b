"""Speculation changes only the speed: tokens, caches, ends and interrupts are those of plain
decoding.
"""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np
import pytest
from machine import device_of
from making import encode_tensor, make_checkpoint, random_tensors, write_safetensors

from backends.evaluations import counted, watch_events
from mlx_llama import load
from mlx_llama.core.engine.request import Sequence
from mlx_llama.core.generation.options import GenerationOptions

REPETITIVE = [5, 6, 7, 8] * 10
PROMPTS = [
    [1, 50, 60, 70],
    [1],
    [7, 7, 7],
    REPETITIVE,
    list(range(3, 60)),
    [1] + [60] * 30,
    *(
        np.random.default_rng(seed).integers(3, 384, size).tolist()
        for seed, size in enumerate((9, 70))
    ),
]
VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "window": {"sliding_window": 12, "architectures": ["MistralForCausalLM"]},
    "sinks": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
    },
}
SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 7},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "repetition_context_size": 6,
        "logit_bias": {60: 0.5},
    },
    "both": {
        "temperature": 0.5,
        "repetition_penalty": 1.1,
        "repetition_context_size": 40,
        "seed": 3,
    },
}


@pytest.fixture(scope="module")
def here(backend):
    return {
        "backend": backend.name,
        "device": device_of(backend),
        "dtype": "float32",
    }


def near(folder, noise, **fields):
    """The toy with noise on its weights: a draft model that is often right."""
    make_checkpoint(folder, **fields)
    config = json.loads((folder / "config.json").read_text())
    shaken = np.random.default_rng(99)
    tensors = {
        name: x + np.float32(noise) * shaken.standard_normal(x.shape, dtype=np.float32)
        for name, x in random_tensors(config).items()
    }
    write_safetensors(
        folder / "model.safetensors",
        {name: encode_tensor(x, "float32") for name, x in tensors.items()},
    )
    return folder


@pytest.fixture(scope="module")
def loaded(here, tmp_path_factory):
    """loaded(variant): (the model, the same with a draft model that is often right)."""
    known = {}

    def loader(variant="plain"):
        if variant not in known:
            folder, fields = tmp_path_factory.mktemp("speculate"), VARIANTS[variant]
            main = make_checkpoint(folder / "main", **fields)
            drafting = load(main, **here, draft_model=near(folder / "draft", 0.005, **fields))
            known[variant] = load(main, **here), drafting
        return known[variant]

    return loader


@pytest.mark.parametrize(
    "variant, sampling",
    [
        *((variant, "greedy") for variant in VARIANTS),
        ("plain", "sampled"),
        ("plain", "penalties"),
        ("window", "both"),
    ],
)
def test_the_tokens_are_those_of_plain_decoding(variant, sampling, loaded):
    plain, drafting = loaded(variant)
    accepted = {"prompt": 0, "model": 0}
    for prompt in PROMPTS if sampling == "greedy" else PROMPTS[:4]:
        options = dict(max_tokens=36, prefill_step_size=32, **SAMPLING[sampling])
        wanted = plain.generate(prompt, **options)
        for kind, llm in (("prompt", plain), ("model", drafting)):
            got = llm.generate(prompt, speculate=kind, **options)
            assert got.tokens == wanted.tokens and got.text == wanted.text
            assert got.finish_reason == wanted.finish_reason
            assert got.options["speculate"] == kind and got.accepted <= got.drafted
            accepted[kind] += got.accepted
    assert accepted["model"] > 30
    if sampling == "greedy":
        assert accepted["prompt"] > 5


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("variant", ["plain", "window"])
def test_verify_is_so_many_steps(variant, sampling, backend, loaded):
    model = loaded(variant)[0].model
    options = GenerationOptions(**{"seed": 0} | SAMPLING[sampling])
    sampler, read = backend.sampling_batch([options]), backend.runtime.read_all
    text = [9, 8, 7, 9, 8, 7, 9, 9, 30, 31, 9, 8, 7]
    single, several = model.make_cache(64), model.make_cache(64)
    for cache in (single, several):
        model.forward([[1, 4, 5, 6, 8, 7]], 0, cache)
    wanted = []
    for token in text:
        step = np.array([[token]], np.int32)
        wanted += read(model.step(step, single.length, single, sampler))
    first, second = (
        model.verify(np.array([part], np.int32), several.length, several, sampler)
        for part in (text[:5], text[5:])
    )
    assert read(first, second) == wanted and read(first) == wanted[:5]
    assert single.length == several.length
    held, again = single.state(), several.state()
    assert (held["tokens"] == again["tokens"]).all()
    assert np.abs(held["keys"] - again["keys"]).max() < 1e-4
    assert np.abs(held["values"] - again["values"]).max() < 1e-4


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_launches_and_waits_are_counted_as_the_framework_sees_them(
    kind, backend, loaded, monkeypatch
):
    if backend.name == "cpu":
        pytest.skip("NumPy computes at once: there is nothing to launch or wait for")
    llm = loaded("tied")[kind == "model"]
    llm.generate([9, *REPETITIVE], max_tokens=4, speculate=kind)  # the first use builds tables
    with counted(backend, monkeypatch) as count:
        # no known prefix, whose copy is a wait
        done = llm.generate([8, *REPETITIVE], max_tokens=40, speculate=kind)
    assert len(done.tokens) == 40 and done.accepted > 15
    assert count["wait"] == done.waits
    if backend.name == "mlx":
        assert count["launch"] == done.launches + (kind == "model")  # the draft model's prompt
    if kind == "prompt":
        assert done.waits == done.launches < 30
    else:  # one wait for all drafts of a verification, one for the verification
        assert done.waits < 40 < done.launches


def test_no_step_runs_ahead_where_a_draft_may_follow(backend, loaded, monkeypatch):
    if not backend.runs_ahead:
        pytest.skip(f"{backend.device_name} computes at once")
    llm, _ = loaded("tied")
    done = llm.generate(REPETITIVE, max_tokens=40, speculate="prompt")
    assert done.launches == done.waits  # no launch without a read
    # The prompt has no repetition to draft from, so its first tokens run ahead as without
    # speculation.
    events = watch_events(backend, monkeypatch)
    loaded()[0].generate([1, 50, 60, 70], max_tokens=4, speculate="prompt")
    assert events[:3] == ["launch", "launch", "read"]


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_every_limit_and_the_edge_of_the_context(kind, loaded):
    llm = loaded("tied")[kind == "model"]
    whole = llm.generate(REPETITIVE, max_tokens=40, speculate="none").tokens
    for limit in range(1, 24):
        done = llm.generate(REPETITIVE, max_tokens=limit, speculate=kind)
        assert done.tokens == whole[:limit] and done.finish_reason == "length"
    assert done.accepted > 10
    for size in range(244, 256):
        prompt = (REPETITIVE * 8)[:size]
        done = llm.generate(prompt, max_tokens=1000, speculate=kind)
        assert done.tokens == llm.generate(prompt, max_tokens=1000, speculate="none").tokens
        assert (len(done.tokens), done.finish_reason) == (256 - size, "context")


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_an_end_token_and_a_stop_string_inside_a_draft_end_there(kind, loaded):
    """Put the end token at every place of a text that repeats one token."""
    llm = loaded("tied")[kind == "model"]
    tokens = llm.generate(REPETITIVE, max_tokens=30, speculate="none").tokens
    inside = 0
    for token in dict.fromkeys(tokens):
        ends = llm.engine.eos
        llm.engine.eos = frozenset({token})
        try:
            wanted = llm.generate(REPETITIVE, max_tokens=30, speculate="none")
            got = llm.generate(REPETITIVE, max_tokens=30, speculate=kind)
        finally:
            llm.engine.eos = ends
        assert (got.tokens, got.text, got.finish_reason) == (wanted.tokens, wanted.text, "eos")
        inside += got.accepted
    text = llm.generate(REPETITIVE, max_tokens=30, speculate="none").text
    for at in range(2, len(text) - 2, 3):
        stop = text[at : at + 2]
        wanted = llm.generate(REPETITIVE, max_tokens=30, stop=stop, speculate="none")
        got = llm.generate(REPETITIVE, max_tokens=30, stop=stop, speculate=kind)
        assert (got.tokens, got.text, got.stop) == (wanted.tokens, wanted.text, stop)
        consistent(llm.chat())


def chatting(llm, kind):
    return llm.chat(max_tokens=14, speculate=kind, system="a b a b a b")


def consistent(session):
    """Compare the host's record of rows with the devices'."""
    loop = session.loop
    assert not loop.scheduler.rows.used
    for row, tokens in loop.scheduler.rows.kept.items():
        length = loop.scheduler.cache.lengths[row]
        assert 0 < length <= len(tokens)
        assert loop.call(loop.scheduler.cache.state, row)["tokens"].tolist() == tokens[:length]
    for drafts in loop.scheduler.drafts:
        loop.call(drafts.trim_guesses)
        known = min(drafts.length, len(drafts.tokens))
        if known:
            assert (
                loop.call(drafts.cache.state, drafts.row)["tokens"][:known].tolist()
                == drafts.tokens[:known]
            )


def rendered(llm, session, question):
    system = [{"role": "system", "content": session.system}] if session.system else []
    return llm.encode([*system, *session.messages, {"role": "user", "content": question}])


def goes_on(llm, session, kind):
    consistent(session)
    prompt = rendered(llm, session, "again a b a b")
    wanted = llm.generate(prompt, max_tokens=14, speculate="none").tokens
    assert session.send("again a b a b").tokens == wanted
    consistent(session)
    return prompt


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_leaving_after_any_token_leaves_a_session_that_goes_on(kind, loaded, monkeypatch):
    """The consumer closes the stream, or taking a token fails, after each token of a short answer.
    No drafts remain.
    """
    llm = loaded("tied")[kind == "model"]
    prompt = rendered(llm, chatting(llm, kind), "hello")
    whole = llm.generate(prompt, max_tokens=14, speculate="none").tokens
    accepted = 0
    for steps in range(len(whole) + 1):
        for how in ("close", "throw"):
            session = chatting(llm, kind)
            stream = session.stream("hello")
            take = Sequence.take

            def watched(sequence, token, now, *rest):
                if len(sequence.writer.completion.tokens) == steps:
                    if how == "throw":
                        raise ZeroDivisionError
                    sequence.is_cancelled = True
                return take(sequence, token, now, *rest)

            with monkeypatch.context() as patch, suppress(ZeroDivisionError):
                patch.setattr(Sequence, "take", watched)
                stream.finish()
            assert stream.completion.tokens == whole[:steps]
            accepted += stream.completion.accepted
            goes_on(llm, session, kind)
    assert accepted > 10


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_a_conversation_reuses_its_prefix_and_regenerates(kind, loaded):
    llm = loaded("tied")[kind == "model"]
    session = chatting(llm, kind)
    for question in ("hello a b a b", "hello a b a b", "and c d c d?"):
        prompt = rendered(llm, session, question)
        done = session.send(question)
        assert done.tokens == llm.generate(prompt, max_tokens=14, speculate="none").tokens
        consistent(session)
    assert done.reused_tokens > 0
    again = session.regenerate().finish()
    assert again.tokens == done.tokens and again.reused_tokens > 0
    other = session.regenerate(temperature=1.0, seed=4, speculate="none").finish()
    assert session.regenerate(temperature=1.0, seed=4).finish().tokens == other.tokens


def test_drafts_that_are_wrong_are_given_up(here, loaded, tmp_path):
    """A draft model of other weights is wrong; random tokens repeat by chance only."""
    main = loaded()[0].checkpoint.path
    llm = load(main, **here, draft_model=make_checkpoint(tmp_path / "other", seed=5))
    done = llm.generate([1, 50, 60], max_tokens=60, temperature=1.5, seed=1)
    assert (
        done.tokens
        == llm.generate(
            [1, 50, 60], max_tokens=60, temperature=1.5, seed=1, speculate="none"
        ).tokens
    )
    assert 24 <= done.drafted < 40 and done.accepted < 0.3 * done.drafted
    assert 10 < done.speculation_ended < len(done.tokens)
    (notice,) = [notice for notice in done.notices if "switched off" in notice]
    assert notice.startswith("speculation was switched off: ")
    assert notice.endswith("drafted tokens were right")
    assert notice in done.summary()
    assert f"switched off after {done.speculation_ended} tokens" in done.summary()
    random = np.random.default_rng(0).integers(3, 9, 150).tolist()
    done = loaded()[0].generate(
        random,
        max_tokens=90,
        speculate="prompt",
        temperature=1.0,
        seed=2,
        logit_bias=dict.fromkeys(range(3, 9), 12.0),
    )
    assert done.speculation_ended and done.accepted < done.drafted / 2


def test_dynamic_rope_is_not_speculated_with_and_says_so(here, tmp_path):
    folder = make_checkpoint(
        tmp_path / "m",
        max_position_embeddings=64,
        rope_scaling={"rope_type": "dynamic", "factor": 4.0},
    )
    llm = load(folder, **here, ctx_size=256)
    wanted = llm.generate(REPETITIVE, max_tokens=60)
    done = llm.generate(REPETITIVE, max_tokens=60, speculate="prompt")
    assert done.tokens == wanted.tokens and done.drafted == 0
    assert done.options["speculate"] == "none"
    assert any("dynamic rope" in notice for notice in done.notices)
    assert not any(
        "dynamic rope turns" in notice and "speculation" in notice for notice in wanted.notices
    )
    # A draft model does not draft past its own maximum positions.
    main = load(make_checkpoint(tmp_path / "main"), **here, draft_model=folder)
    for prompt in (REPETITIVE[:38], REPETITIVE * 2):
        wanted = main.generate(prompt, max_tokens=60, speculate="none").tokens
        assert main.generate(prompt, max_tokens=60).tokens == wanted


def test_a_long_draft_prompt_is_taken_in_chunks_within_its_context(here, loaded, tmp_path):
    folder = near(tmp_path / "short", 0.0, max_position_embeddings=64)
    main = loaded()[0].checkpoint.path
    llm = load(main, **here, draft_model=folder)
    for size in range(50, 70, 3):
        prompt = (REPETITIVE * 2)[:size]
        done = llm.generate(prompt, max_tokens=30, prefill_step_size=16)
        assert done.tokens == llm.generate(prompt, max_tokens=30, speculate="none").tokens
        assert (done.drafted > 0) == (size < 64)
        assert done.accepted == done.drafted  # the draft model has the same weights
