"""Each family: its names are unique, and what its file says is what transformers' class has."""

import pytest
import torch
import transformers

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import BY_MODEL_TYPE, BY_SPELLING, FAMILIES, find_gguf
from mlx_llama.core.models.families.family import Family
from mlx_llama.core.models.fields import REQUIRED
from mlx_llama.core.models.parts import Window

SIZES = dict(hidden_size=64, intermediate_size=80, head_dim=16)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
# Without them, transformers' class has parts that the family refuses.
NEEDED = {
    "GraniteMoeHybridForCausalLM": dict(layer_types=["full_attention"] * 2, num_local_experts=0),
    "Lfm2MoeForCausalLM": dict(layer_types=["full_attention", "conv"], num_dense_layers=1),
    "Gemma4ForCausalLM": dict(enable_moe_block=True, top_k_experts=2, moe_intermediate_size=40),
    "ApertusForCausalLM": dict(rope_parameters=dict(rope_type="default", rope_theta=1e4)),
}
BY_FIRST_NAME = dict(FAMILIES)  # other tests add some that no file has
# mlx-lm judges the other, in tests/backends/test_nemotron_nas.py.
IN_TRANSFORMERS = [name for name in FAMILIES if name != "DeciLMForCausalLM"]


def test_every_family_is_found_by_each_of_its_names():
    for name, family in BY_FIRST_NAME.items():
        assert BY_SPELLING[name] is BY_MODEL_TYPE[family.model_type] is family
        assert all(BY_SPELLING[alias] is family for alias in family.aliases)
        marks = {f"{family.gguf}.{family.gguf_mark}": 3} if family.gguf_mark else {}
        names = find_gguf({"general.architecture": family.gguf} | marks).names
        assert vars(names) == vars(family.names)
    # of two families under one name, the first
    assert find_gguf({"general.architecture": "llama"}).name == "LlamaForCausalLM"


def split_experts(shapes: dict[str, tuple[int, ...]], family: Family) -> dict[str, tuple[int, ...]]:
    """transformers' tensors in memory, where experts are stacks, gates on ups, as it saves them."""
    tensors, block, experts, mlp = {}, family.expert_block, family.experts, family.mlp
    for key, shape in shapes.items():
        layer, _, part = key.replace(".block_sparse_moe.", f".{mlp}.").partition(f"{mlp}.")
        if not block:  # beside an MLP
            layer, found, part = key.partition("experts.")
            part = found + part
        part = experts.aliases.get(f"{mlp}.{part}", part)
        part = part.removeprefix(f"{mlp}.").removeprefix(block)
        if part.startswith("experts."):
            count, *sizes = shape
            if experts.transposes:
                sizes.reverse()
            kind = "bias" if part.endswith("_bias") else "weight"
            modules = (experts.gate, experts.up) if "gate_up" in part else (experts.down,)
            tensors |= {
                f"{layer}{block}experts.{i}.{module}.{kind}": (
                    sizes[0] // len(modules),
                    *sizes[1:],
                )
                for i in range(count)
                for module in modules
            }
        else:
            module = f"{block}{part}"
            tensors[f"{layer}{experts.aliases.get(module, module)}" if part else key] = shape
    return tensors


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_the_tensors_of_a_family_are_those_of_transformers_class(name):
    """Biases, norms and shapes, by names, from a config with nothing but sizes."""
    sizes = SIZES | {"vocab_size": 1 << 18, "num_hidden_layers": 2} | NEEDED.get(name, {})
    family = FAMILIES[name]
    if family.experts:
        counts = [field.json for field in family.fields if field.name == "num_experts"]
        sizes |= {**dict.fromkeys(counts, 3), "num_experts_per_tok": 2}
    theirs = transformers.AutoConfig.for_model(family.model_type, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    wanted = {
        key: tuple(value.shape)
        for key, value in model.state_dict().items()
        if key != "lm_head.weight" or not theirs.tie_word_embeddings
    }
    if family.experts:
        wanted = split_experts(wanted, family)
    ours = LlamaConfig.from_dict(sizes | {"architectures": [name], "model_type": family.model_type})
    assert ours.stored_shapes() == wanted
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    assert ours.eos_token_ids == tuple(ends)


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_defaults_are_those_of_transformers_config(name):
    family = FAMILIES[name]
    theirs = transformers.AutoConfig.for_model(family.model_type)
    theirs.allow_global_per_layer_attribute_access = True
    if "Gemma4" in name:
        theirs.global_head_dim = theirs.per_layer_config["full_attention"].head_dim
    defaults = {field.json: field.default for field in family.fields if field.json}
    defaults = {field: value for field, value in defaults.items() if value is not REQUIRED}
    aliases = {field.json: field.alias for field in family.fields if field.alias}
    for field, value in (defaults | family.defaults).items():
        is_of_rope, alias = field == "partial_rotary_factor", aliases.get(field, field)
        expected = getattr(theirs, field, getattr(theirs, alias, None))
        expected = theirs.rope_parameters[field] if is_of_rope else expected
        assert value == expected or (value is None and field == "num_key_value_heads"), field


WINDOWED = {name: family for name, family in FAMILIES.items() if family.window}


@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_are_those_of_transformers_config(name, size):
    """By default, and of 5 tokens."""
    family, fields = WINDOWED[name], SIZES | {"vocab_size": 96, "num_hidden_layers": 9}
    fields |= {family.window: size} if size else {}
    fields |= {"use_sliding_window": True, "max_window_layers": 4}
    theirs = transformers.AutoConfig.for_model(family.model_type, **fields)
    size = getattr(theirs, family.window)
    usual = "sliding_attention" if size else "full_attention"
    kinds = getattr(theirs, "layer_types", None) or [usual] * 9
    ours = LlamaConfig.from_dict(fields | {"model_type": family.model_type})
    windows = {
        "sliding_attention": Window(size or 0),
        "chunked_attention": Window(size or 0, is_chunk=True),
    }
    assert list(ours.layer_types) == kinds
    assert [layer.mixer.window for layer in ours.layers] == [windows.get(kind) for kind in kinds]
