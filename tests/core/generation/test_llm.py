"""Prompts of every kind, the size of the context, logits."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from making import make_checkpoint

from mlx_llama import load
from mlx_llama.core.errors import PARAMETERS, BackendError, ContextError


@pytest.fixture(scope="module")
def llm(toy):
    return load(toy, backend="cpu")


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


@pytest.mark.parametrize("prompt, message", [
    ([1] * 256, "the prompt has 256 tokens and the context holds 256"), ([384], "token id 384 is outside"),
    ([-1], "token id -1 is outside"), ([], "a prompt is a text, messages or token ids, not nothing"),
    (b"Once", "not bytes"), (None, "not NoneType"), (5, "not int"), (iter([1]), "not list_iterator"),
])
def test_a_prompt_that_cannot_run_is_refused_before_any_work(prompt, message, llm, monkeypatch):
    monkeypatch.setattr(type(llm.model), "forward", lambda *a, **k: pytest.fail("work was done"))
    with pytest.raises(ContextError, match=message):
        llm.stream(prompt)


def test_an_empty_text_starts_from_bos(llm, tmp_path):
    assert llm.generate("", max_tokens=3).tokens == llm.generate([1], max_tokens=3).tokens
    folder = make_checkpoint(tmp_path / "m", tokenizer="bytelevel", bos_token_id=None)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"bos_token": "<|begin_of_text|>", ', ""))
    if load(folder, backend="cpu").tokenizer.bos_id is None:
        with pytest.raises(ContextError, match="no BOS"):
            load(folder, backend="cpu").generate("")


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


def test_errors_name_the_parameters_of_load(toy):
    assert set(inspect.signature(load).parameters) <= set(PARAMETERS)
    for given, message in (({"threads": 0}, "^threads 0: must be"), ({"dtype": "int8"}, "^dtype 'int8' is not"),
                           ({"activation_bits": 8, "dtype": "float32"}, "^activation_bits 8 and dtype='float32'")):
        with pytest.raises(BackendError, match=message):
            load(toy, backend="cpu", **given)


def test_a_repr_is_one_short_line(llm):
    assert repr(llm).startswith(f"LLM({llm.checkpoint.name!r}, backend='cpu', device='CPU")
    assert "dtype='float32', context=256)" in repr(llm) and "\n" not in repr(llm)
