"""Fill-in-the-middle prompts: the ids of llama-server's POST /infill, recorded; asked again where
it is installed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from data.make_infill import CONTEXT, LONG, REQUESTS, ask_llama_server, make_models
from making import edit_json, make_checkpoint, refusal

from mlx_llama import load
from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.text.infill import FIM_NAMES, Infill

RECORDED = json.loads((Path(__file__).parents[2] / "data/infill.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("infill")
    return make_models(folder) | {"folder": folder / "named"}


def read(body: dict) -> Infill:
    files = [(file.get("filename", ""), file["text"]) for file in body.get("input_extra", ())]
    return Infill(body["input_prefix"], body["input_suffix"], files, body.get("prompt", ""))


@pytest.mark.parametrize("model", ["keys", "named", "folder"])
def test_prompts_are_llama_servers(model, models):
    tokenizer = open_checkpoint(models[model]).tokenizer
    for name, body in REQUESTS.items():
        wanted = RECORDED["named" if model == "folder" else model][name]
        assert read(body).encode(tokenizer, CONTEXT, 0) == wanted, name


@pytest.mark.skipif(not shutil.which("llama-server"), reason="llama-server is not installed")
def test_the_recorded_ids(models):
    for model, wanted in RECORDED.items():
        assert ask_llama_server("llama-server", models[model]) == wanted


def test_a_prompt_leaves_room_for_the_answer(models):
    """Less of all parts than llama-server takes where its prompt would not fit."""
    tokenizer = open_checkpoint(models["named"]).tokenizer
    files = [("old", "x" * 9000), ("new", "yyyyy\n")]
    infill = Infill(LONG, LONG, files, "c = ")
    fim = tokenizer.fim_ids
    for context in (256, 1024, CONTEXT):
        window, limit = min(2048, context // 2), context // 16
        tokens = infill.encode(tokenizer, context, limit)
        assert context - limit - 10 <= len(tokens) <= context - limit
        middle = tokens[tokens.index(fim["pre"]) :]
        assert middle.index(fim["suf"]) == 1 + window // 4 * 3 + len(tokenizer.encode("c = "))
        text = tokenizer.decode(tokens, skip_special=False)
        assert "yyyyy" in text and "x" * 9000 not in text  # the last files stay
        prefix, _, suffix = text.partition("<|fim_prefix|>")[2].partition("<|fim_suffix|>")
        assert LONG.endswith(prefix.removesuffix("c = "))
        assert LONG.startswith(suffix.removesuffix("<|fim_middle|>"))


def test_names_of_code_llamas_tokens(tmp_path):
    """Its end token counts, too; see llama.cpp's convert_hf_to_gguf.py for the ids' order."""
    folder = make_checkpoint(tmp_path / "m", tokenizer="llama2", vocab_size=388)
    names = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    added = {str(384 + i): {"content": text, "special": True} for i, text in enumerate(names)}
    edit_json(folder / "tokenizer_config.json", added_tokens_decoder=added)
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer.fim_ids == {"pre": 384, "suf": 385, "mid": 386, "eot": 387}
    assert Infill("", "").find_ends(tokenizer) == {387}
    assert 387 not in tokenizer.eos_ids
    assert set(names[:3]) <= {text for texts in FIM_NAMES.values() for text in texts}


def test_python(models, tmp_path):
    """The answer ends at the name of a file; any method takes an Infill."""
    llm = load(models["folder"], backend="cpu")
    tokens = RECORDED["named"]["code"]
    infill = read(REQUESTS["code"])
    asked = {"max_tokens": 12, "temperature": 2.0, "seed": 4}
    plain = llm.generate(tokens, **asked)
    answer = llm.infill(infill.prefix, infill.suffix, **asked)
    assert answer.tokens == plain.tokens[: len(answer.tokens)]
    assert answer.prompt_tokens == len(tokens)
    assert "".join(llm.stream(infill, **asked)) == answer.text
    end = llm.tokenizer.fim_ids["sep"]
    ended = llm.infill(infill.prefix, infill.suffix, logit_bias={end: 1e6})
    assert (ended.finish_reason, ended.text) == ("eos", "")
    assert llm.generate(tokens, max_tokens=3, logit_bias={end: 1e6}).finish_reason == "length"
    without = load(make_checkpoint(tmp_path / "m"), backend="cpu")
    message = refusal(lambda: without.infill("a", "b"), kind=TokenizerError)
    assert "fill-in-the-middle" in message and "Qwen2.5-Coder" in message
