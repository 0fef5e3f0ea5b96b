"""The doctor's findings on tokenizers, end tokens and templates; its remedies work."""

from __future__ import annotations

import json
import re

import pytest
from cases.diagnosis import messages_of
from launching import run_python
from making import CHAT_TEMPLATE, edit_json, make_checkpoint, make_tokenizer
from making_gguf import make_gguf

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.text.template import encode_messages
from mlx_llama.doctor.diagnose import diagnose


def chatty(folder, template=CHAT_TEMPLATE, kind="sentencepiece", generation=None, **fields):
    settings = fields.pop("settings", {})
    make_checkpoint(folder, tokenizer=False, **fields)
    make_tokenizer(folder, kind, chat_template=template, **settings)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


TURN = "{% for message in messages %}{{ message['content'] }}END{% endfor %}"
BOS = "{{ bos_token }}"
LLAMA3 = {"kind": "bytelevel", "bos_token_id": 379}


def test_end_tokens_come_from_three_places(tmp_path):
    fields = LLAMA3 | {"generation": {"eos_token_id": [380]}, "eos_token_id": 381}
    folder = chatty(tmp_path / "m", TURN.replace("END", "<|eot_id|>"), **fields)
    diagnosis = diagnose(folder)
    ends = {"config": [381], "generation_config": [380], "tokenizer": [383]}
    assert diagnosis.tokenizer["eos_of"] == ends
    assert sorted(open_checkpoint(folder).eos_token_ids) == [380, 381, 383]
    assert diagnosis.tokenizer["eos"] == [380, 381, 383]
    assert diagnosis.tokenizer["texts"][383] == "'<|eot_id|>'"
    assert diagnosis.template["turn_end"] == 383 and messages_of(diagnosis, "warning") == []


def test_a_turn_that_ends_with_another_token_is_told_and_the_remedy_works(tmp_path):
    fields = LLAMA3 | {"eos_token_id": 380, "settings": {"eos_token": "<|end_of_text|>"}}
    folder = chatty(tmp_path / "m", TURN.replace("END", "<|eot_id|>\n"), **fields)
    [warning] = messages_of(diagnose(folder), "warning")
    assert "ends a turn with '<|eot_id|>' (383)" in warning and "end tokens (380)" in warning
    path = re.search(r"put 383 into eos_token_id of (\S+)$", warning)[1]
    with open(path, "w") as file:
        json.dump({"eos_token_id": [380, 383]}, file)
    assert messages_of(diagnose(folder), "warning") == []


def test_a_gguf_files_turn_end_is_mended_by_the_command_that_is_named(tmp_path):
    path, template = tmp_path / "m.gguf", TURN.replace("END", "<s>")
    make_gguf(path, edit=lambda writer: writer.add_chat_template(template))
    [warning] = messages_of(diagnose(path), "warning")
    command = re.search(r"gguf-set-metadata (\S+) (\S+) (\d+)$", warning)
    assert command.groups() == (str(path), "tokenizer.ggml.eos_token_id", "1")
    done = run_python("-m", "gguf.scripts.gguf_set_metadata", *command.groups(), "--force")
    assert done.returncode == 0, done.stderr
    assert messages_of(diagnose(path), "warning") == []


def test_a_turn_that_ends_with_plain_text(tmp_path):
    folder = chatty(tmp_path / "m", TURN.replace("END", "<|im_end|>"))
    [warning] = messages_of(diagnose(folder), "warning")
    assert "'<|im_end|>', which is text, not a token" in warning
    assert "`stop` '<|im_end|>'" in warning


def test_no_end_token_at_all(tmp_path):
    fields = LLAMA3 | {"eos_token_id": None, "settings": {"eos_token": None}}
    folder = chatty(tmp_path / "m", TURN.replace("END", "\n"), **fields)
    diagnosis = diagnose(folder)
    assert diagnosis.ok
    assert diagnosis.tokenizer["eos"] == sorted(open_checkpoint(folder).eos_token_ids) == []
    assert "has an end token" in messages_of(diagnosis, "warning")[0]


def test_an_end_token_that_is_ordinary_text(tmp_path):
    """config.json without eos_token_id means 2 to transformers; in a byte-level vocabulary that is
    a sign.
    """
    folder = chatty(tmp_path / "m", TURN.replace("END", "<|eot_id|>"), **LLAMA3)
    edit_json(folder / "config.json", eos_token_id=...)
    [warning] = messages_of(diagnose(folder), "warning")
    assert "no eos_token_id, and its default 2 is '#', not a special token" in warning


@pytest.mark.parametrize(
    "template, settings, expected",
    [
        (BOS + TURN, {}, "writes BOS ('<s>'), which the tokenizer would add, too; it is added"),
        (BOS * 2 + TURN, {}, "begins a conversation with BOS ('<s>') 2 times"),
        (BOS + TURN, {"add_bos_token": False}, None),
        (TURN, {}, None),
        (TURN, {"add_bos_token": False}, "writes no BOS ('<s>'), and the tokenizer adds none"),
    ],
)
def test_where_bos_comes_from(template, settings, expected, tmp_path):
    folder = chatty(tmp_path / "m", template.replace("END", "</s>"), settings=settings)
    diagnosis = diagnose(folder)
    said = messages_of(diagnosis, "note") + messages_of(diagnosis, "warning")
    assert len(said) == (expected is not None) and (expected is None or expected in said[0])
    opened = open_checkpoint(folder)
    ids = encode_messages(opened.tokenizer, opened.template, [{"role": "user", "content": "Hello"}])
    assert diagnosis.template["bos_tokens"] == (2 if ids[1] == 1 else 1 if ids[0] == 1 else 0)


def test_a_bos_that_the_config_has_otherwise(tmp_path):
    said = messages_of(diagnose(chatty(tmp_path / "m", bos_token_id=5)), "note")
    expected = "bos_token_id is 5, the tokenizer's BOS is 1 ('<s>'); the tokenizer's is used"
    assert any(expected in message for message in said)


def test_fields_of_the_generation_config_without_effect(tmp_path):
    said = messages_of(diagnose(chatty(tmp_path / "m", generation={"num_beams": 4})), "note")
    assert any("num_beams=4" in message for message in said)
