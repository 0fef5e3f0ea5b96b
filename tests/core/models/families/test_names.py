"""GGUF's tensor names: those of the gguf library's own map, both ways, for every family."""

import re

import gguf
import pytest

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import BY_GGUF, FAMILIES, find_gguf

LIBRARY = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=13,
    num_attention_heads=4,
    num_experts=3,
    num_experts_per_tok=2,
)
GGUF_NAMES = {name: family.names for name, family in BY_GGUF.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_the_librarys_both_ways(name):
    family = FAMILIES[name]
    names, theirs = family.names, gguf.get_tensor_name_map(LIBRARY[family.gguf], 13)
    is_tied = theirs.get_name("lm_head") is None  # always, in this architecture
    config = LlamaConfig.from_dict(
        SIZES
        | {"rope_scaling": {"rope_type": "default"}}
        | {"layer_types": ["full_attention"] * 13 if family.splits else None}
        | {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1}}] * 13}
        | {"model_type": family.model_type, "tie_word_embeddings": is_tied}
        | {"num_key_value_heads": 2, "full_attn_idxs": [1, 2]}
    )
    shapes = config.tensor_shapes() if family.splits else config.stored_shapes()
    as_converted = {".sinks": ".sinks.weight", "correction_bias": "correction.bias"}
    for suffix, converted in as_converted.items():
        for bare in (name for name in shapes if name.endswith(suffix)):
            wanted = theirs.get_name(bare.replace(suffix, converted), (".weight", ".bias"))
            assert names.gguf(bare) == wanted
            assert names.hugging_face(names.gguf(bare)) == bare
    suffixed = (name for name in shapes if name.endswith((".weight", ".bias")))
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in suffixed))
    stack_of = {module: stack for stack, modules in config.stacks().items() for module in modules}
    for module in modules:
        for suffix in (".weight", ".bias"):
            stored = names.gguf(module + suffix)
            wanted = re.sub(r"experts\.\d+", "experts", module) + suffix
            spellings = wanted, wanted.removeprefix("model.")  # LFM2-MoE's stacks
            known = (theirs.get_name(name, (".weight", ".bias")) for name in spellings)
            assert stored == next(filter(None, known))
            assert names.hugging_face(stored) == stack_of.get(module, module) + suffix
    assert len({names.gguf(module + ".weight") for module in modules}) == len(
        {stack_of.get(module, module) for module in modules}
    )


def test_experts_of_the_first_files_have_a_tensor_each():
    experts = "model.layers.3.block_sparse_moe.experts"
    for stored, wanted in (
        ("ffn_gate.7", f"{experts}.7.w1.weight"),
        ("ffn_down.0", f"{experts}.0.w2.weight"),
        ("ffn_gate", None),
        ("attn_q.1", None),
    ):
        names = FAMILIES["MixtralForCausalLM"].names
        assert names.hugging_face(f"blk.3.{stored}.weight") == wanted


def test_a_name_that_llama_has_not_is_none():
    for name in (
        "rope_freqs.weight blk.0.attn_q blk.00.attn_q.weight blk.-1.attn_q.weight "
        "blk.0.attn_q.scale attn_q.weight blk.0.output.weight blk.0.ffn_gate_exps.weight "
        "blk.0.attn_q_norm.weight blk.٣.attn_q.weight blk.0.ffn_gate.0.weight"
    ).split() + ["", "x blk.0.attn_q.weight"]:
        assert GGUF_NAMES["llama"].hugging_face(name) is None, name


def test_a_tensor_without_a_name_is_a_key_error():
    with pytest.raises(KeyError):
        GGUF_NAMES["qwen2"].gguf("model.layers.0.self_attn.q_norm.weight")


def test_rows_are_permuted_for_llama_alone():
    q, k, v = (f"model.layers.7.self_attn.{module}_proj" for module in "qkv")
    llama = GGUF_NAMES["llama"]
    for suffix in (".weight", ".bias"):
        assert llama.is_permuted(q + suffix) and llama.is_permuted(k + suffix)
        assert not llama.is_permuted(v + suffix)
    assert not any(
        GGUF_NAMES[other].is_permuted(module + ".weight")
        for other in ("qwen2", "qwen3")
        for module in (q, k, v)
    )


def test_an_architecture_is_found_by_the_files_name():
    def find(name, **fields):
        family = find_gguf(
            {"general.architecture": name}
            | {f"{name}.{field}": value for field, value in fields.items()}
        )
        return family and family.name

    assert find("llama", expert_count=8) == "MixtralForCausalLM"
    assert find("llama", expert_count=0) == "LlamaForCausalLM"
    assert find("mamba") is find(3) is find([]) is find_gguf({}) is None
