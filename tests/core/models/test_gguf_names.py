"""GGUF's tensor names: those of the gguf library's own map, both ways, for every architecture in the table."""

import gguf
import pytest

from mlx_llama.core.models.architectures import ARCHITECTURES, find_gguf

LIBRARY = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
MODULES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
           "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
GGUF_NAMES = {one.gguf: one.names for one in ARCHITECTURES.values()}
EXTRA = {"qwen3": ("self_attn.q_norm", "self_attn.k_norm")}


@pytest.mark.parametrize("architecture", GGUF_NAMES)
def test_names_are_the_librarys_both_ways(architecture):
    names, theirs = GGUF_NAMES[architecture], gguf.get_tensor_name_map(LIBRARY[architecture], 13)
    layers = [f"model.layers.{i}.{module}" for i in (0, 12) for module in (*MODULES, *EXTRA.get(architecture, ()))]
    modules = ["model.embed_tokens", "model.norm", "lm_head", *layers]
    for module in modules:
        for suffix in (".weight", ".bias"):
            stored = names.gguf(module + suffix)
            assert stored == theirs.get_name(module + suffix, (".weight", ".bias"))
            assert names.hugging_face(stored) == module + suffix
    assert len({names.gguf(module + ".weight") for module in modules}) == len(modules)


@pytest.mark.parametrize("name", [
    "rope_freqs.weight", "blk.0.attn_q", "blk.00.attn_q.weight", "blk.-1.attn_q.weight", "blk.0.attn_q.scale",
    "attn_q.weight", "blk.0.output.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q_norm.weight", "x blk.0.attn_q.weight",
    "blk.٣.attn_q.weight", "",
])  # fmt: skip
def test_a_name_that_llama_has_not_is_none(name):
    assert GGUF_NAMES["llama"].hugging_face(name) is None


def test_a_tensor_without_a_name_is_a_key_error():
    with pytest.raises(KeyError):
        GGUF_NAMES["qwen2"].gguf("model.layers.0.self_attn.q_norm.weight")


def test_rows_are_permuted_for_llama_alone():
    q, k, v = (f"model.layers.7.self_attn.{one}_proj" for one in "qkv")
    llama = GGUF_NAMES["llama"]
    for suffix in (".weight", ".bias"):
        assert llama.is_permuted(q + suffix) and llama.is_permuted(k + suffix) and not llama.is_permuted(v + suffix)
    assert not any(GGUF_NAMES[other].is_permuted(one + ".weight") for other in ("qwen2", "qwen3") for one in (q, k, v))


def test_an_architecture_is_found_by_the_files_name():
    assert [find_gguf(name).name for name in ("llama", "qwen2", "qwen3")] == ["LlamaForCausalLM", "Qwen2ForCausalLM",
                                                                             "Qwen3ForCausalLM"]
    assert find_gguf("mamba") is find_gguf(3) is find_gguf([]) is None
