"""Probes, runs and reports of parity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from making import config_fields
from transformers import AutoModelForCausalLM

from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.parity import probes as core
from mlx_llama.parity.differences import Agreement, measure_difference

TOKENS = [1, *range(300, 311)]


def test_probes_have_the_names_and_shapes_of_the_model(backend, open_llm, small):
    llm = open_llm(backend)
    probes = core.collect(backend, llm.model, TOKENS, 4)
    config = LlamaConfig.from_file(small)
    assert set(probes) == set(core.probe_names(config))
    assert len(probes) == 1 + 3 * (len(core.IN_LAYER) - 1) + len(core.LAST)
    queries, keys = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    widths = {"query": queries, "query_rope": queries, "key": keys, "key_rope": keys, "value": keys}
    for name, array in probes.items():
        kind = name.split(".")[-1]
        width = config.vocab_size if "logits" in kind else widths.get(kind, config.hidden_size)
        assert array.shape == (len(TOKENS), width) and array.dtype == np.float32, name


def test_logits_and_greedy_tokens_are_those_of_transformers(backend, open_llm, small):
    llm = open_llm(backend)
    peer = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    with torch.no_grad():
        wanted = peer(torch.tensor([TOKENS])).logits[0].numpy()
        greedy = peer.generate(
            torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False, eos_token_id=None
        )[0, len(TOKENS) :]
    probes = core.collect(backend, llm.model, TOKENS, 4)
    assert measure_difference("logits", probes["logits"], wanted).peak < 1e-5
    assert core.greedy(llm, TOKENS, 6) == greedy.tolist()


@pytest.mark.parametrize("decoded", [0, 3, -1])
def test_a_run_has_a_prompt_and_a_decoded_token(decoded):
    with pytest.raises(ContextError, match="the prompt needs at least one"):
        core.split_calls([1, 2, 3], decoded)
    assert core.split_calls([1, 2, 3], 2) == [[1], [2], [3]]
    assert core.split_calls([1, 2, 3], 1) == [[1, 2], [3]]


def test_a_run_beyond_the_context_is_refused(open_llm):
    llm = open_llm()
    with pytest.raises(ContextError):
        core.run_logits(llm.backend, llm.model, [1] * 300, llm.model.make_cache(256))


# Reports


def report(**errors):
    """A report of one layer whose probes are off by the relative errors of these names, at position
    1.
    """
    config = LlamaConfig.from_dict(config_fields(num_hidden_layers=1))
    wanted = {name: np.ones((3, 2), np.float32) for name in core.probe_names(config)}
    probes = {name: array.copy() for name, array in wanted.items()}
    for name, error in errors.items():
        probes[name.replace("_0_", "0.")][1] += np.float32(error)
    return core.compare("mlx", "a GPU", "float32", 1e-4, probes, wanted, config)


def test_a_report_within_the_tolerance():
    comparison = report(logits=5e-5)
    assert comparison.is_within and comparison.first_bad is None
    assert comparison.verdict() == "within 0.0001" and comparison.missing == []


def test_the_first_probe_that_is_off_is_named():
    comparison = report(logits=1.0, _0_key=0.5, _0_ffn=0.1)
    assert not comparison.is_within and comparison.first_bad.name == "0.key"
    said = "OUTSIDE: first at probe 0.key, position 1: relative error 0.5, allowed 0.0001"
    assert comparison.verdict() == said
    assert comparison.report()["first_bad"] == "0.key" and comparison.report()["within"] is False


def test_decoded_tokens_that_differ_are_outside_unless_they_are_a_tie():
    comparison = report()
    comparison.decoded = core.Decoded([1, 2], 1, (0.5, 0.4), near_tie=False)
    assert not comparison.is_within
    assert "the decode step computes something else" in comparison.verdict()
    comparison.decoded = core.Decoded([1, 2], 1, (1e-6, 1e-6), near_tie=True)
    assert comparison.is_within


def test_probes_that_the_reference_lacks_are_listed():
    config = LlamaConfig.from_dict(config_fields(num_hidden_layers=1))
    probes = {name: np.ones((2, 2), np.float32) for name in core.probe_names(config)}
    wanted = {name: probes[name] for name in probes if "rope" not in name}
    comparison = core.compare("cpu", "NumPy", "float32", 1e-4, probes, wanted, config)
    assert comparison.missing == ["0.query_rope", "0.key_rope"] and comparison.is_within
    assert isinstance(comparison.agreement, Agreement)


def test_a_near_tie_is_told_from_a_bug():
    class Twin:
        """An engine whose greedy tokens differ at one place."""

        def __init__(self, logits):
            self.row = np.array(logits, np.float32)

        def logits(self, tokens):
            return np.stack([self.row] * len(tokens))

    reference = np.array([1.0, 5.0, 4.9999, -3.0], np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "greedy", lambda llm, prompt, count: [1, 2, 0][:count])
        near, far = (
            core.compare_decoded(
                Twin([1, 4.9999, 5, -3]), [7], [1, 1, 0], tolerance, lambda tokens: reference
            )
            for tolerance in (1e-4, 1e-6)
        )
    assert near.first_difference == far.first_difference == 1 and near.near_tie and not far.near_tie
    assert near.margins == pytest.approx((1e-4, 1e-4), rel=0.02)


# Determinism


def test_digests_tell_the_first_operation_that_differs(open_llm):
    llm = open_llm()
    first, second = core.digest(llm, TOKENS, 3), core.digest(llm, TOKENS, 3)
    assert first == second
    assert list(first) == [*core.probe_names(llm.model.config), "decoded tokens"]
    assert core.first_difference([first, second]) is None
    third = first | {"0.ffn": "x", "norm": "x"}
    assert core.first_difference([first, second, third]) == (2, "0.ffn")
    assert core.digest(llm, TOKENS[:-1] + [7], 3)["logits"] != first["logits"]
