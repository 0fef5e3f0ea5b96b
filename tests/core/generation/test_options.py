"""The one table of options: precedence, all errors at once, flags made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import numpy as np
import pytest

from mlx_llama.core.errors import OptionsError, spelled_as_flags
from mlx_llama.core.generation import options
from mlx_llama.core.generation.hooks import NAMES as HOOKS
from mlx_llama.core.generation.options import FIELDS, GenerationOptions, Options, from_generation_config, resolve


def flags(*words: str) -> dict:
    parser = options.Parser(allow_abbrev=False)
    options.add_generation_flags(parser)
    return options.given_flags(parser.parse_args(list(words)))


def test_precedence_is_user_then_checkpoint_then_default():
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 77}
    resolved = resolve({"temperature": 0.2, "top_k": None}, config)
    o = resolved.options
    assert (o.temperature, o.top_p, o.max_tokens, o.top_k) == (0.2, 0.9, 77, 0)
    assert {name: resolved.origins[name] for name in ("temperature", "top_p", "max_tokens", "top_k", "seed")} == {
        "temperature": "user", "top_p": "checkpoint", "max_tokens": "checkpoint", "top_k": "default", "seed": "default"}
    assert o.seed is not None


def test_a_generation_config_means_the_same_as_in_transformers():
    """do_sample decides between greedy and sampling (GenerationConfig.get_generation_mode)."""
    from transformers import GenerationConfig

    for raw in ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": False, "temperature": 0.6},
                {"do_sample": True, "temperature": 0.6}, {"do_sample": True, "top_k": 50}, {}):
        mode = GenerationConfig(**raw).get_generation_mode().value
        sampled = resolve({}, raw).options.temperature > 0
        assert sampled == (mode == "sample"), raw
    assert from_generation_config({"do_sample": True, "top_k": 50})["temperature"] == 1.0


def test_flags_are_the_options():
    assert flags() == {}
    given = flags("--temp", "0.5", "-m", "9", "--repeat-penalty", "1.1", "--stop", "a", "--stop", "b", "-s", "3",
                  "--logit-bias", "15=1.5", "--logit-bias", "16-2", "--logit-bias", "17+3", "--logit-bias", "18=-1e2")
    assert given["temperature"] == "0.5"
    o = resolve(given).options
    assert (o.temperature, o.max_tokens, o.repetition_penalty, o.stop, o.seed) == (0.5, 9, 1.1, ("a", "b"), 3)
    assert o.logit_bias == {15: 1.5, 16: -2.0, 17: 3.0, 18: -100.0}
    assert flags("-n", "9", "--predict", "8")["max_tokens"] == "8"


def test_every_option_has_a_flag_and_a_description():
    for name, field in FIELDS.items():
        assert field.description and options.option_flags(name), name


def test_type_checkers_see_the_one_table():
    """Fields and types; wider for options that take several forms of a value."""
    wider = {"stop": str | Sequence[str], "stop_token_ids": int | Sequence[int], "logit_bias": Mapping[int, float] | Sequence[str],
             "schema": type | Mapping[str, Any] | str | bool}
    hints = get_type_hints(Options)
    assert list(hints) == [*FIELDS, *HOOKS] and not Options.__total__
    for name, annotation in list(hints.items())[:len(FIELDS)]:
        assert annotation == (wider.get(name) or FIELDS[name].annotation) | None, name


@pytest.mark.parametrize("name, value, allowed", [
    ("temperature", -1, "at least 0"), ("temperature", float("nan"), "finite"), ("temperature", "hot", "number"),
    ("top_p", 0, "at least 1e-06"), ("top_p", 1e-46, "at least 1e-06"), ("temperature", 1e-39, "at least 0.0001"), ("top_p", 1.5, "at most 1"), ("top_k", -1, "at least 0"), ("top_k", 1.5, "integer"),
    ("min_p", 2, "at most 1"), ("max_tokens", -5, "at least 0"), ("seed", -1, "at least 0"), ("seed", 2**64, "below"),
    ("repetition_penalty", 0, "at least 0.01"), ("temperature", True, "a number"), ("stop", [""], "an empty one"),
    ("temperature", np.bool_(True), "a number"), ("stop", ["\udcff"], "valid Unicode"), ("logit_bias", 5, "mapping"),
    ("logit_bias", {5: 1e39}, "between"), ("logit_bias", ["5"], "TOKEN_ID=BIAS, not '5'"),
    ("logit_bias", ["5=1", "05=2"], "5 has two"), ("stop", 5, "tuple"), ("logit_bias", {-3: 1.0}, "not negative"), ("logit_bias", ["x"], "TOKEN_ID=BIAS"),
    ("stop_token_ids", [-1], "not negative"), ("stop_token_ids", "x", "integer"), ("stop_token_ids", [True], "token ids"),
    ("stop_token_ids", 2.5, "token ids"), ("stop", ["a", 5], "stop_token_ids"),
    ("logit_bias", {5: float("inf")}, "finite"), ("prefill_step_size", 0, "at least 1"),
])
def test_a_bad_value_names_option_value_and_range(name, value, allowed):
    with pytest.raises(OptionsError) as caught:
        resolve({name: value})
    message = str(caught.value)
    assert name in message and allowed in message and "\n" not in message


def test_all_bad_options_are_reported_at_once():
    with pytest.raises(OptionsError) as caught:
        resolve({"temperature": -1, "top_p": 2, "temprature": 1})
    for part in ("temperature: -1", "top_p: 2", "there is no option 'temprature' (did you mean 'temperature'?)"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name, value, meaning", [
    ("top_k", -1, "(0 means all)"), ("top_p", 0, "(1 means all)"), ("repetition_penalty", 0, "(1 means off)"),
    ("temperature", -1, "(0 means greedy)"), ("min_p", -1, "(0 means none)"), ("max_tokens", -5, "at most 2147483648")])
def test_a_value_below_its_limit_is_told_the_one_that_switches_off(name, value, meaning):
    with pytest.raises(OptionsError) as caught:
        resolve({name: value})
    assert str(caught.value).endswith(meaning)


@pytest.mark.parametrize("words, meant", [
    (["--temprature", "1"], "there is no flag --temprature (did you mean --temperature?)"),
    (["--max_tokens=5"], "there is no flag --max_tokens (did you mean --max-tokens?)"),
    (["-ngl", "99", "--model", "x"], "there is no flag -ngl (did you mean --device?)"),
    (["-hf", "org/name"], "there is no flag -hf (did you mean --model?)"),
    (["-t", "4", "--max-model-len", "9"], "there is no flag -t (did you mean --threads?); there is no flag --max-model-len (did "
     "you mean --ctx-size?)"),
    (["--zzz"], "unrecognized arguments: --zzz (see --help)"), (["--seed"], "argument --seed/-s: expected one argument (see --help)"),
    (["-m", "models/llama.gguf"], "-m 'models/llama.gguf': is --max-tokens here, a number: did you mean --model?"),
    (["-m", "llama.gguf"], "did you mean --model?")])
def test_flags_that_were_meant_are_suggested(words, meant):
    parser = options.Parser()
    options.add_load_flags(parser)
    options.add_generation_flags(parser)
    with pytest.raises(OptionsError) as caught:
        options.given_flags(parser.parse_args(words))
    with spelled_as_flags():
        assert meant in str(caught.value)


def test_flags_of_other_tools_lead_to_flags_that_some_door_has():
    from mlx_llama import generate

    known = generate.parser()._option_string_actions
    assert set(options.FOREIGN_FLAGS.values()) <= set(known)
    assert not set(options.FOREIGN_FLAGS) - {"-m"} & set(known)


def test_a_bad_generation_config_names_the_file():
    with pytest.raises(OptionsError, match="m/generation_config.json: option top_p"):
        resolve({}, {"do_sample": True, "top_p": 7}, "m/generation_config.json")


def test_options_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        GenerationOptions().temperature = 1.0


def test_numpy_integers_keep_every_bit():
    for seed in (2**53 + 1, 2**63 - 1):
        assert resolve({"seed": np.int64(seed)}).options.seed == seed
    assert resolve({"seed": np.uint64(2**64 - 1), "top_k": np.int32(5)}).options.seed == 2**64 - 1


def test_unsupported_settings_of_a_checkpoint_are_a_notice():
    assert resolve({}, {"stop_strings": ["User:"], "do_sample": True}).options.stop == ("User:",)
    quiet = {"num_beams": 1, "min_length": 0, "bos_token_id": 1, "transformers_version": "5", "typical_p": None}
    assert resolve({}, quiet).notices == ()
    (notice,) = resolve({}, {**quiet, "num_beams": 4, "no_repeat_ngram_size": 3}).notices
    assert "num_beams=4" in notice and "no_repeat_ngram_size=3" in notice


def test_schema_and_grammar_are_files_on_the_command_line_or_text(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}')
    grammar.write_text('start: "é"\n', encoding="utf-8")
    for words in (["--json-schema", str(schema)], ["-j", '{"type": "integer"}']):
        assert resolve(flags(*words)).options.schema.as_dict() == {"type": "integer"}
    for words in (["--grammar", str(grammar)], ["--grammar", 'start: "é"\n']):
        assert resolve(flags(*words)).options.grammar == 'start: "é"\n'
    assert flags("--grammar", 'root ::= "a"')["grammar"] == 'root ::= "a"'
    assert flags("--regex", "a+")["regex"] == "a+"
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, reason in (("missing", "No such file"), ("latin", "not UTF-8"), (".", "directory")):
        with pytest.raises(OptionsError, match=f"option grammar: the file .* cannot be read .*{reason}"):
            flags("--grammar", str(tmp_path / name))
    # A value from elsewhere (HTTP, Python) is never a file's name.
    with pytest.raises(OptionsError, match="valid JSON"):
        resolve({"schema": str(schema)})


@pytest.mark.parametrize("given, nbytes", [
    ("2GB", 2 * 10**9), ("512MB", 512 * 10**6), ("1.5GiB", 3 << 29), ("1 gib", 1 << 30), ("64k", 64_000), ("3 B", 3),
    (10**9, 10**9), ("1000000", 10**6), ("2T", 2 * 10**12), ("1TiB", 1 << 40), ("7KiB", 7 << 10), ("5M", 5 * 10**6),
    (np.int64(12), 12), (None, None)])
def test_sizes_of_memory(given, nbytes):
    assert options.parse_memory(given) == nbytes


@pytest.mark.parametrize("given", ["", "0", "-2GB", "GB", "2XB", "1e9", "nan", "2GBs", "1.5.5GB", "9" * 99, True, [2], "２GB"])
def test_what_is_no_size(given):
    with pytest.raises(OptionsError, match="^cache_memory .*: must be a size such as 2GB, ") as error:
        options.parse_memory(given)
    assert len(str(error.value)) < 140


def test_rows_of_a_step():
    assert [options.parse_rows(given) for given in (None, 1, "512")] == [32, 1, 512]
    for given in (0, "513", "-1", "many", 2.5, True, "9" * 99):
        with pytest.raises(OptionsError, match="^max_rows .*: must be a whole number, 1 to 512$"):
            options.parse_rows(given)


def test_load_arguments_are_those_of_load():
    """Each door's flags reach `load` by name, and nothing else does."""
    import inspect

    from mlx_llama import load

    parser = options.Parser()
    options.add_load_flags(parser)
    options.add_rows_flag(parser)
    given = options.load_arguments(parser.parse_args(["--kv-bits", "8", "--cache-memory", "2GB", "-np", "4"]))
    assert (given["cache_bits"], given["cache_memory"], given["max_rows"]) == ("8", "2GB", "4")
    assert given.keys() == inspect.signature(load).parameters.keys() - {"on_progress"}
