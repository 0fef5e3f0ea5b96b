"""The doctor's command: reports on sound and damaged models, and errors of the command line."""

from __future__ import annotations

import json
import re
import shlex

import gguf
import pytest
from cases.damage import AXIAL, DAMAGE, config
from making import make_checkpoint, make_tokenizer
from making_gguf import make_gguf

from mlx_llama import generate
from mlx_llama.chat import repl as chat
from mlx_llama.core.system import machine
from mlx_llama.doctor import command as doctor
from mlx_llama.quantize import command as quantize


@pytest.fixture
def examined(door):
    """examined(*arguments): (exit code, the JSON object)."""

    def run(*arguments):
        done = door(doctor.main, *arguments, "--json")
        assert done.err == ""
        return done.code, json.loads(done.out)

    return run


def messages(facts, level="error"):
    return [finding["message"] for finding in facts["findings"] if finding["level"] == level]


def test_without_a_model_it_describes_the_machine_and_the_guide(door, examined):
    code, facts = examined()
    assert code == 0 and facts["ok"] is True and facts["name"] == "guide"
    assert [backend["name"] for backend in facts["backends"]] == ["mlx", "cpu", "cuda"]
    assert facts["command"] == "python -m mlx_llama.chat"
    text = door(doctor.main)
    assert text.code == 0 and text.err == "" and "\x1b" not in text.out
    lines = {"machine", "backends", "model guide", "runs", "next", "  python -m mlx_llama.chat"}
    assert lines <= set(text.out.splitlines())


def test_text_and_json_say_the_same(toy, door, examined):
    _, facts = examined(toy)
    text = door(doctor.main, toy).out
    for finding in facts["findings"]:
        assert f"  {finding['level']}: {finding['message']}\n" in text
    assert f"  {facts['command']}\n" in text
    assert "  keys and values of a token: " in text and "in 8 (--cache-bits 8)\n" in text
    rows = [line.split()[:2] for line in text.splitlines()]
    for group in facts["groups"]:
        assert [group["group"], str(group["tensors"])] in rows


@pytest.mark.parametrize("tokenizer", [True, "bytelevel"])
def test_the_command_it_gives_runs(tokenizer, tmp_path, door, examined):
    """Even with a space in the path; the other doors accept its flags."""
    folder = make_checkpoint(tmp_path / "my model", tokenizer=tokenizer)
    code, facts = examined(folder)
    assert code == 0, facts["findings"]
    words = shlex.split(facts["command"])
    assert words[:3] == ["python", "-m", "mlx_llama.chat"]
    done = door(chat.main, *words[3:], "--max-tokens", "2", stdin=b"hi\n")
    assert done.code == 0, done.err


def test_a_model_without_a_template_is_continued(tmp_path, door, examined):
    folder = make_checkpoint(tmp_path / "m", tokenizer=False)
    make_tokenizer(folder, chat_template=None)
    code, facts = examined(folder)
    assert code == 0
    assert any("has no chat template" in message for message in messages(facts, "warning"))
    words = shlex.split(facts["command"])
    assert words[2] == "mlx_llama.generate"
    assert door(generate.main, *words[3:], "--max-tokens", "2").code == 0


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_that_other_doors_refuse_is_found_without_loading(case, tmp_path, door, examined):
    """The doors refuse a damaged model in one line, which the doctor reports; it gives no
    command.
    """
    damage, name = DAMAGE[case]
    folder = make_checkpoint(tmp_path / "m")
    damage(folder)
    refused = door(generate.main, "--model", folder, "-p", "hi", "-m", "2", "--backend", "cpu")
    code, facts = examined(folder)
    assert refused.code == 2 and code == 1 and facts["ok"] is False and facts["command"] is None
    error = refused.err
    assert refused.out == "" and error.startswith("error: ") and error.count("\n") == 1
    assert name in error and error.removeprefix("error: ").strip() in messages(facts)
    assert all("\n" not in message["message"] for message in facts["findings"])


def test_it_goes_on_after_the_first(tmp_path, examined):
    """Two bad fields, a missing shard, a truncated one and no tokenizer are five findings."""
    folder = make_checkpoint(tmp_path / "m", shards=3, tokenizer=False)
    config(rms_norm_eps="tiny", rope_scaling=AXIAL)(folder)
    shards = sorted(folder.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-4])
    _, facts = examined(folder)
    said = messages(facts)
    assert len(said) == 5, said
    for part in (
        "rms_norm_eps is 'tiny'",
        "rope_type is 'axial'",
        shards[0].name,
        f"{shards[1].name}: tensor",
        "no tokenizer.json, tekken.json or tokenizer.model",
    ):
        assert sum(part in message for message in said) == 1, part


def test_a_config_of_another_model_names_each_kind_of_tensor_once(tmp_path, examined):
    folder = make_checkpoint(tmp_path / "m")
    config(intermediate_size=95, num_hidden_layers=1, num_key_value_heads=4)(folder)
    _, facts = examined(folder)
    said = messages(facts)
    assert sum("has shape" in message for message in said) == 5  # down, gate, up; k, v
    assert sum("is not part of the model" in message for message in said) == 1
    # facts are still reported
    assert facts["model"]["layers"] == 1 and facts["tokenizer"]["vocab_size"] == 384


@pytest.mark.parametrize(
    "name, reason",
    [
        ("nowhere", "no such folder"),
        ("nowhere.gguf", "no such file"),
        ("toy/never-fetched", "not in the local cache"),
        ("toy/never-fetched:m.gguf", "not in the local cache"),
        ("", "no such folder"),
        (".", "holds no model"),
    ],
)
def test_a_model_that_is_not_there(name, reason, examined, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    code, facts = examined(name)
    assert code == 1 and len(facts["findings"]) == 1 and reason in messages(facts)[0]
    assert facts["backends"], "the machine is described all the same"


def test_a_damaged_gguf_file(tmp_path, examined):
    path = tmp_path / "m.gguf"
    make_gguf(path)
    data = path.read_bytes()
    for damaged, expected in (
        (data[:-100], "the file ends at byte"),
        (b"GGML" + data[4:], "not GGUF"),
        (b"", "is empty"),
        (data[:60], "truncated or corrupt"),
    ):
        path.write_bytes(damaged)
        code, facts = examined(path)
        [message] = messages(facts)
        assert code == 1 and expected in message and str(path) in message


def retype(path, kinds):
    """Change types of tensors in the header of a GGUF file. kinds: {GGUF's name:
    GGMLQuantizationType}.
    """
    data = bytearray(path.read_bytes())
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name in kinds:
            field = tensor.field
            at = field.offset + sum(int(part.nbytes) for part in field.parts[:4])
            assert int.from_bytes(data[at : at + 4], "little") == tensor.tensor_type
            data[at : at + 4] = int(kinds[tensor.name]).to_bytes(4, "little")
    path.write_bytes(data)


def test_types_that_are_not_read_are_named_once_each_and_the_rest_described(tmp_path, examined):
    path = tmp_path / "m.gguf"
    make_gguf(path, kinds="Q8_0", intermediate_size=256, hidden_size=256, head_dim=16)
    kinds = gguf.GGMLQuantizationType
    ups = dict.fromkeys(("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"), kinds.IQ2_XXS)
    retype(path, ups | {"blk.1.ffn_gate.weight": kinds.TQ1_0})
    code, facts = examined(path)
    assert code == 1 and len(messages(facts)) == 2
    assert "'blk.0.ffn_up.weight' has type IQ2_XXS" in messages(facts)[0]
    assert "'blk.1.ffn_gate.weight' has type TQ1_0" in messages(facts)[1]
    assert facts["model"]["hidden_size"] == 256 and facts["tokenizer"]["vocab_size"] == 384


def test_a_gguf_field_that_is_wrong_hides_no_other(tmp_path, examined):
    path = tmp_path / "m.gguf"
    make_gguf(path, tokenizer=None, edit=lambda writer: writer.add_expert_shared_count(8))
    code, facts = examined(path)
    assert code == 1 and len(messages(facts)) == 2
    assert "llama.expert_shared_count is 8" in messages(facts)[0]
    assert "tokenizer.ggml.model is missing" in messages(facts)[1]


def test_a_tokenizer_much_smaller_than_the_model_is_a_warning(tmp_path, examined):
    code, facts = examined(make_checkpoint(tmp_path / "small", vocab_size=1000))
    assert code == 0
    assert re.search("384 tokens.*1000 rows|1000 rows.*384 tokens", str(messages(facts, "warning")))
    code, facts = examined(make_checkpoint(tmp_path / "padded", vocab_size=400))
    assert code == 0 and messages(facts, "warning") == []
    assert any("padding" in message for message in messages(facts, "note"))


def test_a_model_that_does_not_fit_gets_the_command_that_makes_it_smaller(
    tmp_path, door, examined, monkeypatch
):
    folder = make_checkpoint(tmp_path / "m", hidden_size=256, intermediate_size=512)
    nbytes = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(machine, "free_memory", lambda: nbytes // 3)
    monkeypatch.chdir(tmp_path)
    code, facts = examined(folder)
    assert code == 1 and any("the weights take" in message for message in messages(facts))
    words = shlex.split(facts["command"])
    assert words[2] == "mlx_llama.quantize"
    assert door(quantize.main, *words[3:]).code == 0
    code, facts = examined(words[4])
    assert code == 0, facts["findings"]  # the quantised model fits
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    code, facts = examined(words[4])
    assert code == 1 and "smaller model" in messages(facts)[0] and facts["command"] is None


def test_a_context_that_does_not_fit_is_asked_for_shorter(toy, examined, monkeypatch):
    code, facts = examined(toy)
    [cpu] = [fit for fit in facts["fits"] if fit["backend"] == "cpu"]
    assert cpu["longest_context"] == 256 and "--ctx-size" not in facts["command"]
    room = cpu["weights_bytes"] + 2 * 100 * cpu["cache_bytes_per_token"]
    monkeypatch.setattr(machine, "free_memory", lambda: room)
    code, facts = examined(toy)
    assert code == 0 and facts["command"].endswith(" --ctx-size 100")
    # 32 + 2 bytes for 128 of a head: a float16 for 16 numbers, of which a group has 32
    more = 100 * 64 // 18
    assert messages(facts, "note")[-1].endswith(f"; --cache-bits 8 has room for {min(256, more)}")
    code, facts = examined(toy, "--cache-bits", "8")
    assert code == 0 and facts["command"].endswith(" --cache-bits 8")
    assert facts["fits"][1]["cache_bits"] == 8
    assert "--cache-bits 8 has room" not in str(facts["findings"])
    code, facts = examined(toy, "--cache-bits", "16")
    assert code == 0 and facts["fits"][1]["cache_bits"] == 16
    assert 2 * facts["fits"][1]["cache_bytes_per_token"] == cpu["cache_bytes_per_token"]
    assert facts["command"].endswith(" --ctx-size 200 --cache-bits 16")
    assert "--cache-bits 8 has room" in str(facts["findings"])
    code, facts = examined(toy, "--ctx-size", "80")
    assert code == 0 and facts["command"].endswith(" --ctx-size 80")
    assert examined(toy, "--ctx-size", "250")[0] == 1


def test_a_terminal_gets_colours_and_whole_lines(tmp_path, terminal):
    broken = make_checkpoint(tmp_path / "m")
    DAMAGE["missing tensor"][0](broken)
    child = terminal("-m", "mlx_llama.doctor", broken)
    child.expect("correct the errors")
    child.wait()
    seen = child.logfile_read.getvalue()
    assert "\x1b[" in seen and "error: " in seen and child.exitstatus == 1
    assert f"{broken}: tensor model.norm.weight [64] is missing" in seen  # not wrapped


def test_its_model_may_be_named_as_in_the_other_commands(toy, door):
    named, placed = (door(doctor.main, *words) for words in (("--model", toy), (toy,)))
    assert named.code == placed.code == 0 and str(toy) in named.out

    def steady(out):
        return [line for line in out.splitlines() if "free" not in line and "cache" not in line]

    assert steady(named.out)[:3] == steady(placed.out)[:3]


def test_the_cache_folder_is_shown_and_cleared(door, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA_CACHE", str(tmp_path))
    monkeypatch.setenv("MLX_LLAMA_CACHE_SIZE", "3GB")
    (tmp_path / "a.panels").write_bytes(bytes(5_000_000))
    (tmp_path / "notes.txt").write_bytes(b"")
    line = f"  cache {tmp_path}: 5.0 MB in 2 files, at most 3.0 GB"
    assert line in door(doctor.main).out.splitlines()
    done = door(doctor.main, "--clear-cache")
    assert done.out.strip() == f"removed 5.0 MB from {tmp_path}"
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    for words in (["guide"], ["--model", "guide"]):
        refused = door(doctor.main, *words, "--clear-cache")
        assert refused.code == 2
        assert "--clear-cache: removes all models' files; leave the model out" in refused.err
    monkeypatch.setenv("MLX_LLAMA_CACHE_SIZE", "much")
    assert "MLX_LLAMA_CACHE_SIZE='much': must be a size such as 20GB" in door(doctor.main).out
