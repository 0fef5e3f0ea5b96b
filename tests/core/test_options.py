"""The one table of options: precedence, all errors at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest
from making import refusal

from mlx_llama.core.answers.hooks import NAMES as HOOKS
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import (
    ENDLESS,
    FIELDS,
    Defaults,
    Options,
    from_generation_config,
    resolve,
)


def test_precedence_is_user_then_checkpoint_then_default():
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 77}
    resolved = resolve({"temperature": 0.2, "top_k": None}, config)
    o = resolved.options
    assert (o.temperature, o.top_p, o.max_tokens, o.top_k) == (0.2, 0.9, 77, 0)
    origins = dict(temperature="user", top_p="checkpoint", max_tokens="checkpoint")
    origins |= dict(top_k="default", seed="default")
    assert resolved.origins == resolved.origins | origins
    assert o.seed is not None


def test_a_generation_config_means_the_same_as_in_transformers():
    """do_sample decides between greedy and sampling (GenerationConfig.get_generation_mode)."""
    from transformers import GenerationConfig

    for raw in (
        {"temperature": 0.6, "top_p": 0.9},
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "temperature": 0.6},
        {"do_sample": True, "top_k": 50},
        {},
    ):
        mode = GenerationConfig(**raw).get_generation_mode().value
        sampled = resolve({}, raw).options.temperature > 0
        assert sampled == (mode == "sample"), raw
    assert from_generation_config({"do_sample": True, "top_k": 50})["temperature"] == 1.0


def test_every_option_has_a_description():
    assert all(field.description for field in FIELDS.values())


def test_type_checkers_see_the_one_table():
    """Fields and types; wider for options that take several forms of a value."""
    wider = {
        "stop": str | Sequence[str],
        "dry_sequence_breakers": str | Sequence[str],
        "stop_token_ids": int | Sequence[int],
        "logit_bias": Mapping[int, float] | Sequence[str],
        "schema": type | Mapping[str, Any] | str | bool,
    }
    hints = get_type_hints(Options)
    assert list(hints) == [*FIELDS, *HOOKS] and not Options.__total__
    for name, annotation in list(hints.items())[: len(FIELDS)]:
        assert annotation == (wider.get(name) or FIELDS[name].annotation) | None, name


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("temperature", -1, "at least 0"),
        ("temperature", float("nan"), "finite"),
        ("temperature", "hot", "number"),
        ("top_p", 0, "at least 1e-06"),
        ("top_p", 1e-46, "at least 1e-06"),
        ("temperature", 1e-39, "at least 0.0001"),
        ("top_p", 1.5, "at most 1"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "integer"),
        ("min_p", 2, "at most 1"),
        ("max_tokens", -5, "at least -1"),
        ("seed", -2, "at least -1"),
        ("seed", 2**64, "below"),
        ("repetition_penalty", 0, "at least 0.01"),
        ("temperature", True, "a number"),
        ("stop", [""], "an empty one"),
        ("temperature", np.bool_(True), "a number"),
        ("stop", ["\udcff"], "valid Unicode"),
        ("regex", "\udcff", "valid Unicode"),
        ("grammar", 'root ::= "\udcff"', "valid Unicode"),
        ("logit_bias", 5, "mapping"),
        ("logit_bias", {5: 1e39}, "between"),
        ("logit_bias", ["5"], "TOKEN_ID=BIAS, not '5'"),
        ("logit_bias", ["5=1", "05=2"], "5 has two"),
        ("stop", 5, "a text or a list of texts"),
        ("logit_bias", {-3: 1.0}, "not negative"),
        ("logit_bias", ["x"], "TOKEN_ID=BIAS"),
        ("stop_token_ids", [-1], "not negative"),
        ("stop_token_ids", "x", "integer"),
        ("stop_token_ids", [True], "token ids"),
        ("stop_token_ids", 2.5, "token ids"),
        ("stop", ["a", 5], "stop_token_ids"),
        ("logit_bias", {5: float("inf")}, "finite"),
        ("prefill_step_size", 0, "at least 1"),
    ],
)
def test_a_bad_value_names_option_value_and_range(name, value, allowed):
    refusal(resolve, {name: value}, kind=OptionsError, words=[name, allowed])


@pytest.mark.parametrize("minus_one", [-1, "-1", np.int64(-1)], ids=repr)
def test_minus_one_is_what_llama_cpp_means_by_it(minus_one):
    names = ("max_tokens", "top_k", "repetition_context_size", "seed")
    options = resolve(dict.fromkeys(names, minus_one)).options
    assert options.max_tokens == ENDLESS and options.top_k == 0
    assert options.repetition_context_size == 65536
    others = {resolve({"seed": minus_one}).options.seed for _ in range(3)}
    assert len(others) == 3 and all(seed >= 0 for seed in others)


def test_all_bad_options_are_reported_at_once():
    with pytest.raises(OptionsError) as caught:
        resolve({"temperature": -1, "top_p": 2, "temprature": 1})
    unknown = "there is no option 'temprature' (did you mean 'temperature'?)"
    for part in ("`temperature`: -1", "`top_p`: 2", unknown):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "name, value, meaning",
    [
        ("top_k", -2, "(0 means all)"),
        ("top_p", 0, "(1 means all)"),
        ("repetition_penalty", 0, "(1 means off)"),
        ("temperature", -1, "(0 means greedy)"),
        ("min_p", -1, "(0 means none)"),
        ("max_tokens", -5, "(-1 means unlimited)"),
    ],
)
def test_a_value_below_its_limit_is_told_the_one_that_switches_off(name, value, meaning):
    assert refusal(resolve, {name: value}, kind=OptionsError).endswith(meaning)


def test_a_lifted_limit_is_a_default():
    defaults = Defaults({"max_new_tokens": 7})
    defaults.lift_limit()
    assert defaults.resolve({}).options.max_tokens == 7
    defaults = Defaults({"top_k": 7})
    defaults.lift_limit()
    assert defaults.resolve({}).options.max_tokens == 2**31
    assert defaults.resolve({}).origins["max_tokens"] == "default"
    assert defaults.resolve({"max_tokens": 5}).options.max_tokens == 5


def test_a_bad_generation_config_names_the_file():
    with pytest.raises(OptionsError, match="m/generation_config.json: option top_p"):
        resolve({}, {"do_sample": True, "top_p": 7}, "m/generation_config.json")


def test_numpy_integers_keep_every_bit():
    for seed in (2**53 + 1, 2**63 - 1):
        assert resolve({"seed": np.int64(seed)}).options.seed == seed
    assert resolve({"seed": np.uint64(2**64 - 1), "top_k": np.int32(5)}).options.seed == 2**64 - 1


def test_unsupported_settings_of_a_checkpoint_are_a_notice():
    assert resolve({}, {"stop_strings": ["User:"], "do_sample": True}).options.stop == ("User:",)
    quiet = dict(num_beams=1, min_length=0, bos_token_id=1, typical_p=None)
    quiet["transformers_version"] = "5"
    assert resolve({}, quiet).notices == ()
    (notice,) = resolve({}, {**quiet, "num_beams": 4, "no_repeat_ngram_size": 3}).notices
    assert "num_beams=4" in notice and "no_repeat_ngram_size=3" in notice
