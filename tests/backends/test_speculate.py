"""Speculation changes only the speed: tokens and caches are those of plain decoding. Limits, ends
and interrupts: core/engine/test_scheduler.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from cases.sessions import check_consistency, rendered
from machine import device_of
from making import config_fields, make_checkpoint, random_tensors

from backends.evaluations import counted
from mlx_llama import load
from mlx_llama.core.options import GenerationOptions

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
    shaken = np.random.default_rng(99)
    tensors = {
        name: x + np.float32(noise) * shaken.standard_normal(x.shape, dtype=np.float32)
        for name, x in random_tensors(config_fields(**fields)).items()
    }
    return make_checkpoint(folder, tensors=tensors, **fields)


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


@pytest.mark.slow_for(
    "cuda",
    "mlx-plain-greedy",
    "mlx-plain-penalties",
    "mlx-plain-s",
    "mlx-sinks",
    "mlx-tied",
    "mlx-window",
)
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


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_drafts_end_with_the_context(kind, loaded):
    llm = loaded("tied")[kind == "model"]
    for size in range(244, 256, 3):
        prompt = (REPETITIVE * 8)[:size]
        plain = llm.generate(prompt, max_tokens=1000, speculate="none")
        done = llm.generate(prompt, max_tokens=1000, speculate=kind)
        assert (done.tokens, done.finish_reason) == (plain.tokens, "context")
        assert len(done.tokens) == 256 - size


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("variant", ["plain", "window"])
def test_verify_is_so_many_steps(variant, sampling, backend, loaded):
    model = loaded(variant)[0].model
    options = GenerationOptions(**{"seed": 0} | SAMPLING[sampling])
    sampler, read = backend.sampling_batch([options]), backend.runtime.read
    text = [9, 8, 7, 9, 8, 7, 9, 9, 30, 31, 9, 8, 7]
    single, several = model.make_cache(64), model.make_cache(64)
    for cache in (single, several):
        model.forward([[1, 4, 5, 6, 8, 7]], 0, cache)
    wanted = []
    for token in text:
        step = np.array([[token]], np.int32)
        wanted += read([model.step(step, single.length, single, sampler)])
    first, second = (
        model.verify(np.array([part], np.int32), several.length, several, sampler)
        for part in (text[:5], text[5:])
    )
    assert read([first, second]) == wanted and read([first]) == wanted[:5]
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


@pytest.mark.parametrize("kind", ["prompt", "model"])
def test_a_conversation_reuses_its_prefix_and_regenerates(kind, loaded):
    llm = loaded("tied")[kind == "model"]
    session = llm.chat(max_tokens=14, speculate=kind, system="a b a b a b")
    for question in ("hello a b a b", "hello a b a b", "and c d c d?"):
        prompt = rendered(llm, session, question)
        done = session.send(question)
        assert done.tokens == llm.generate(prompt, max_tokens=14, speculate="none").tokens
        check_consistency(session)
    assert done.reused_tokens > 0
    again = session.regenerate().finish()
    assert again.tokens == done.tokens and again.reused_tokens > 0
    other = session.regenerate(temperature=1.0, seed=4, speculate="none").finish()
    assert session.regenerate(temperature=1.0, seed=4).finish().tokens == other.tokens
