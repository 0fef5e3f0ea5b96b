"""Folders of adapters: both forms, their checks, and merging."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from making import config_fields, edit_json, make_checkpoint, make_tokenizer, refusal
from making_adapters import peft_logits, write_mlx, write_peft, write_random
from peft.utils.other import get_pattern_key
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import CheckpointError
from mlx_llama.core.files import adapters
from mlx_llama.core.files.checkpoint import merge_adapter, open_checkpoint
from mlx_llama.quantize.mlx_folder import write_mlx as write_folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("base") / "m", tokenizer=True)


def change(base, folder, settings=None, tensors=None):
    """A random adapter of `base` with other settings, and with its tensors as `tensors` changes
    them.
    """
    write_random(base, folder)
    weights = folder / "adapter_model.safetensors"
    edit_json(folder / "adapter_config.json", **settings or {})
    if tensors:
        save_file(tensors(load_file(weights)), weights)
    return folder


def refused(base, *folders) -> str:
    return refusal(lambda: open_checkpoint(base, adapters=[*folders]), kind=CheckpointError)


def test_scales_of_both_forms(base, tmp_path):
    plain = write_random(base, tmp_path / "peft", rank=8, alpha=4)
    other = write_mlx(base, tmp_path / "mlx", scale=3.0)
    first, two = open_checkpoint(base, adapters=[plain, f"{other}=0.5"]).adapters
    (three,) = open_checkpoint(base, adapters=[f"{plain}=-2"]).adapters
    assert (first.name, two.name) == ("peft", "mlx")
    assert len({first.digest, two.digest, three.digest}) == 3
    stored = load_file(plain / "adapter_model.safetensors")
    module = "model.layers.0.self_attn.q_proj"
    pair = first.pairs[module]
    np.testing.assert_array_equal(pair.a(), stored[f"base_model.model.{module}.lora_A.weight"])
    b = stored[f"base_model.model.{module}.lora_B.weight"]
    np.testing.assert_array_equal(pair.b(), b * np.float32(0.5))
    np.testing.assert_array_equal(three.pairs[module].b(), pair.b() * np.float32(-2))
    assert {module for module in two.pairs} == {
        f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    pair = next(iter(two.pairs.values()))
    assert pair.scale == 1.5 and pair.rank == 4 and pair.a().shape[0] == pair.b().shape[1] == 4


def test_the_bytes_of_stacks_are_foretold(base, tmp_path):
    first = write_random(base, tmp_path / "first", 1, rank=3)

    def some(tensors):
        return {name: x for name, x in tensors.items() if "k_proj" in name or "q_proj" in name}

    second = change(base, tmp_path / "second", tensors=some)
    checkpoint, total = open_checkpoint(base, adapters=[first, second]), 0
    for layer in checkpoint.config.layers:
        for modules in layer.linears():
            shapes = [checkpoint.tensors[f"{name}.weight"].shape for name in modules]
            rows = [rows for rows, _ in shapes]
            stacked = adapters.stack(checkpoint.adapters, modules, rows, shapes[0][1])
            total += sum(part.nbytes for part in stacked)
    assert adapters.stacked_nbytes(checkpoint.adapters, checkpoint.config, 4) == total
    assert adapters.stacked_nbytes((), checkpoint.config, 4) == 0


@pytest.mark.parametrize(
    "settings, wanted",
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"lora_alpha": "high"}, "lora_alpha is 'high'"),
        ({"r": 10**400}, "r is 1000000000"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000000000"),
        ({"lora_alpha": -(10**400)}, "lora_alpha is -1000000000"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e+300, expected a number up to 1e+12"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, expected a number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "q_proj is 1000000000"),
        ({"r": 5}, "r is 5, but "),
        ({"alpha_pattern": {"(a+)+b": 3}}, "alpha_pattern is"),
        ({"alpha_pattern": {"[z-a]": 3}}, "alpha_pattern is"),
        ({"alpha_pattern": {"a{2}": 3}}, "alpha_pattern is"),
        ({"alpha_pattern": 7}, "alpha_pattern is"),
        ({"alpha_pattern": {"q_proj": "x"}}, "q_proj is 'x'"),
    ],
)
def test_settings_that_are_not_done_are_named(settings, wanted, base, tmp_path):
    assert wanted in refused(base, change(base, tmp_path / "a", settings))


PATTERNS = [".*q_proj", "^model.layers.0.self_attn.q_proj$", "^q_proj", "proj", "a*b*", "(.)*"]
PATTERNS += [r"layers\.\d+\.self_attn\.(q|k)_proj", "(?:mlp|self_attn).[a-z_]+", "layers.[^0].*"]
PATTERNS += ["model.*(down|up)_pro?j", "(q_|q_p|)roj", "q_x?y*proj"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_the_modules_that_peft_matches(pattern, base, tmp_path):
    patterns = {"layers.1.mlp.up_proj": 5, pattern: 3}
    folder = change(base, tmp_path / "a", {"alpha_pattern": patterns})
    stored = json.loads((folder / "adapter_config.json").read_text())
    (adapter,) = open_checkpoint(base, adapters=[folder]).adapters
    for module, pair in adapter.pairs.items():
        key = get_pattern_key(stored["alpha_pattern"], module)
        assert pair.scale * pair.rank == stored["alpha_pattern"].get(key, stored["lora_alpha"])


def test_a_pattern_of_an_untrusted_file_ends(base, tmp_path):
    settings = {"alpha_pattern": {"(a|a)*" * 100 + "b": 3, ".*" * 400 + "b": 3}}
    assert open_checkpoint(base, adapters=[change(base, tmp_path / "a", settings)]).adapters


def test_tensors_that_do_not_fit_are_named(base, tmp_path):
    module = "base_model.model.model.layers.1.mlp.down_proj"
    a, b = f"{module}.lora_A.weight", f"{module}.lora_B.weight"

    def rename(old, new):
        return lambda tensors: {name.replace(old, new): part for name, part in tensors.items()}

    def without_a(tensors):
        return {name: part for name, part in tensors.items() if name != a}

    embedding = rename("layers.1.mlp.down_proj", "embed_tokens")
    magnitude = {f"{module}.lora_magnitude_vector": np.ones(4, np.float32)}
    for number, (tensors, message) in enumerate(
        (
            (lambda t: t | {b: t[b][:-1]}, "model.layers.1.mlp.down_proj.weight is"),
            (without_a, "lora_b without its partner"),
            (lambda t: t | {a: t[a][:-1]}, "have ranks 7 and 8"),
            (rename("layers.1.", "layers.7."), "the model has no 'model.layers.7."),
            (embedding, "adapters change projections of layers"),
            (lambda t: t | magnitude, "lora_magnitude_vector' is not part of a LoRA pair"),
        )
    ):
        text = refused(base, change(base, tmp_path / str(number), tensors=tensors))
        assert message in text and (number or b in text)


def test_folders_that_are_no_adapters(base, tmp_path):
    assert "no such folder" in refused(base, tmp_path / "none")
    (tmp_path / "empty").mkdir()
    empty = "holds no adapter_config.json; choose an adapter's folder"
    assert empty in refused(base, tmp_path / "empty")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "neither peft_type" in refused(base, tmp_path / "empty")
    good = write_random(base, tmp_path / "good")
    for scale in ("much", "1e300", "nan", "-inf"):
        assert "expected a scale up to 1e+12" in refused(base, f"{good}={scale}")
    (tmp_path / "again").mkdir()
    shutil.copytree(good, tmp_path / "again" / "good")
    assert "rename the folder" in refused(base, good, tmp_path / "again" / "good")
    other = good.rename(tmp_path / "base")
    assert "that is the name of the model without adapters" in refused(base, other)
    pipe = write_random(base, tmp_path / "pipe")
    (pipe / "adapter_model.safetensors").unlink()
    os.mkfifo(pipe / "adapter_model.safetensors")
    assert "cannot be read" in refused(base, pipe)


def test_a_folder_with_an_equals_sign(base, tmp_path):
    folder = write_random(base, tmp_path / "a=3")
    (adapter,) = open_checkpoint(base, adapters=[folder]).adapters
    assert adapter.name == "a=3" and adapter.pairs["model.layers.0.mlp.up_proj"].scale == 0.5
    (adapter,) = open_checkpoint(base, adapters=[f"{folder}=2"]).adapters
    assert adapter.pairs["model.layers.0.mlp.up_proj"].scale == 1.0


def test_a_merged_folder_is_what_peft_merges(base, tmp_path):
    folder = write_peft(base, tmp_path / "adapter", r=4, lora_alpha=9, target_modules="all-linear")
    write_folder(merge_adapter(open_checkpoint(base, adapters=[folder])), tmp_path / "merged", None)
    tokens = np.random.default_rng(0).integers(3, 100, (1, 9))
    wanted = peft_logits(base, folder, tokens, merged=True)
    np.testing.assert_allclose(
        peft_logits(tmp_path / "merged", None, tokens), wanted, atol=1e-4 * np.abs(wanted).max()
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.num_hidden_layers > 0
    assert np.abs(peft_logits(base, None, tokens) - wanted).max() > 1e-2


QWEN = dict(head_dim=16, layer_types=["full_attention", "linear_attention"])


@pytest.mark.parametrize(
    "kind, fields, modules",
    [
        ("phi3", {}, ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("glm4", dict(head_dim=20), ["q_proj", "k_proj", "v_proj", "gate_up_proj"]),
        ("qwen3_5_text", QWEN, ["q_proj", "in_proj_qkv", "in_proj_z", "o_proj"]),
    ],
)
def test_fused_projections_and_rows_in_another_order(kind, fields, modules, tmp_path):
    """Phi-3 stores query, key and value as one matrix, and gate and up; PEFT adapts those. GLM-4
    has the rows of rotary pairs side by side, Qwen3.5 those of a head's query and gate.
    """
    torch.manual_seed(0)
    sizes = config_fields(pad_token_id=0, **fields)
    for name in ("architectures", "model_type", "hidden_act", "tie_word_embeddings"):
        del sizes[name]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for weight in model.parameters():
        weight.data = 0.1 * torch.randn(weight.shape)
    model.save_pretrained(base := tmp_path / "m")
    make_tokenizer(base)
    folder = write_peft(base, tmp_path / "adapter", r=4, lora_alpha=9, target_modules=modules)
    checkpoint = open_checkpoint(base, adapters=[folder])
    tokens = np.random.default_rng(0).integers(3, 100, (1, 9))
    wanted = peft_logits(base, folder, tokens)
    merged = merge_adapter(checkpoint)
    for name in ("q_proj", "k_proj"):
        tensor = merged.tensors[f"model.layers.0.self_attn.{name}.weight"]
        np.testing.assert_array_equal(tensor.part("some", 3, 9).bits, tensor.bits[3:9])
    for opened in (checkpoint, merged):
        model = select("cpu").load(opened, "float32", compile=False)
        logits = model.forward(tokens, 0, model.make_cache(16), all_positions=True)
        np.testing.assert_allclose(logits, wanted, atol=1e-4 * np.abs(wanted).max())
