"""Files with the byte order mark that editors put in front of UTF-8 mean what they mean without."""

from __future__ import annotations

import codecs
import json
import shutil
from pathlib import Path

import pytest
from making import make_checkpoint
from making_adapters import write_random

from mlx_llama import generate
from mlx_llama.api.session_file import read_session
from mlx_llama.cli import flags
from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.files.checkpoint import GUIDE_PATH, open_checkpoint
from mlx_llama.core.text import template
from mlx_llama.parity import trace
from mlx_llama.server import command as server

MESSAGES = [{"role": "user", "content": "Why?"}]


def put_mark(path: Path) -> Path:
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    return path


@pytest.mark.parametrize("kind", ["sentencepiece", "llama2", "bytelevel"])
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_folder(kind, place, tmp_path):
    folder = make_checkpoint(tmp_path / "plain", shards=2, tokenizer=kind)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    if place.endswith(".jinja"):
        fields = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / place).write_text(fields.pop("chat_template"), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    adapter = write_random(folder, tmp_path / "adapter", 0)
    marked = shutil.copytree(folder, tmp_path / "marked")
    for path in (*marked.glob("*.json"), *marked.glob("*.jinja")):
        put_mark(path)
    shutil.copytree(adapter, tmp_path / "other" / "adapter")
    put_mark(tmp_path / "other" / "adapter" / "adapter_config.json")
    plain = open_checkpoint(folder, adapters=[adapter])
    other = open_checkpoint(marked, adapters=[tmp_path / "other" / "adapter"])
    assert other.config == plain.config and other.tensors.keys() == plain.tensors.keys()
    assert other.eos_token_ids == plain.eos_token_ids and 5 in other.eos_token_ids
    assert other.adapters[0].digest == plain.adapters[0].digest
    assert other.tokenizer.encode("<s>Why not?") == plain.tokenizer.encode("<s>Why not?")
    assert other.template.source == plain.template.source
    assert other.template.render(MESSAGES) == plain.template.render(MESSAGES)


def test_a_template_as_text_or_in_a_file(tmp_path):
    text = "{{ messages[0].content }}"
    (tmp_path / "a.jinja").write_text(text, encoding="utf-8-sig")
    for given in ("\ufeff" + text, str(tmp_path / "a.jinja")):
        assert template.load_builtin_template(given).render(MESSAGES) == "Why?"
    field = template.read_gguf_template({"tokenizer.chat_template": "\ufeff" + text}, "x.gguf")
    assert field.compile({}).render(MESSAGES) == "Why?"


def test_files_of_flags(tmp_path, door):
    schema, grammar, keys, prompts = (tmp_path / name for name in ("s", "g", "k", "p"))
    schema.write_text('{"type": "integer"}', encoding="utf-8-sig")
    grammar.write_text('start: "é"\n', encoding="utf-8-sig")
    keys.write_text("first\nsecond\n", encoding="utf-8-sig")
    prompts.write_text('{"prompt": "hi"}\n', encoding="utf-8-sig")
    parser = flags.Parser()
    flags.add_generation_flags(parser)
    words = ["--json-schema", str(schema), "--grammar", str(grammar)]
    options = flags.generation_options(parser.parse_args(words))
    assert options == {"schema": '{"type": "integer"}', "grammar": 'start: "é"\n'}
    parsed = server.parser().parse_args(["--api-key-file", str(keys)])
    assert server.make_settings(parsed).api_keys == ("first", "second")


def test_prompts_and_texts(tmp_path, toy, door):
    prompts, prompt, out = (tmp_path / name for name in ("p.jsonl", "p.txt", "out.jsonl"))
    prompts.write_text('{"prompt": "hi"}\n', encoding="utf-8-sig")
    prompt.write_text("hi", encoding="utf-8-sig")
    common = ["--model", toy, "--backend", "cpu", "-m", "4", "--seed", "1", "--temp", "0"]
    expected = door(generate.main, *common, "-p", "hi").out
    assert door(generate.main, *common, "-f", prompt).out == expected
    for _ in range(2):  # the second continues a file that an editor saved
        done = door(generate.main, *common, "--prompts", prompts, "--output", out)
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in out.read_text("utf-8-sig").splitlines()]
        assert [line["text"] + "\n" for line in lines] == [expected]
        put_mark(out)


def test_saved_sessions_and_traces(tmp_path, llm):
    chat = llm.chat(max_tokens=3, temperature=0)
    chat.send("hi")
    chat.save(tmp_path / "s.json")
    plain = read_session(tmp_path / "s.json")
    assert read_session(put_mark(tmp_path / "s.json")) == plain
    copied = shutil.copy(GUIDE_PATH / "trace.json", tmp_path / "t.json")
    assert trace.load(put_mark(copied)).tokens == trace.load(GUIDE_PATH / "trace.json").tokens


def test_bytes_that_are_no_text_are_told_as_before(tmp_path):
    folder = make_checkpoint(tmp_path / "m", tokenizer="bytelevel")
    (folder / "tokenizer.json").write_bytes(codecs.BOM_UTF8 + b"\xff")
    with pytest.raises(TokenizerError, match="not UTF-8 at byte"):
        open_checkpoint(folder).tokenizer.encode("x")
