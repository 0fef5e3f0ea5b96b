"""Nemotron-NAS: layers with fewer key-value heads or hidden units, or none (arXiv 2411.19146)."""

from typing import Any

from mlx_llama.core.models.fields import Reader

from .family import Family

_GGUF = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
_LINEAR = "no matrix in place of attention or MLP, which this package lacks"


def read_layers(read: Reader) -> tuple[tuple[int, int], ...]:
    """(key-value heads, hidden units) of each layer."""
    count = read.integer("block_count" if read.is_gguf else "num_hidden_layers")
    if not read.is_gguf:
        blocks = read.get("block_configs")
        if not isinstance(blocks, list) or len(blocks) != count:
            read.fail("block_configs", blocks, f"a list of {count} layers")
        return tuple(_read_block(read, i, block) for i, block in enumerate(blocks))
    lists = []
    for name in _GGUF:
        values = read.get(name)
        values = values if isinstance(values, list) else [values] * count
        if len(values) != count or any(type(value) is not int or value < 0 for value in values):
            read.fail(name, values, f"a whole number for each of {count} layers")
        lists.append(values)
    heads, groups, units = lists
    if {*heads} - {0, max(heads)}:
        read.fail(_GGUF[0], heads, "the same number in all layers with attention")
    if [*map(bool, heads)] != [*map(bool, groups)]:
        read.fail(_GGUF[1], groups, _LINEAR)
    return tuple(zip(groups, units))


def _read_block(read: Reader, i: int, block: Any) -> tuple[int, int]:
    inner = read.inner(block, f"block_configs[{i}].")
    attention, ffn = inner.part("attention"), inner.part("ffn")
    for part in (attention, ffn):
        part.refuse("replace_with_linear", [False], reason=_LINEAR)
    for name in ("window_length", "num_sink_tokens", "sparsify"):
        attention.refuse(name, [], reason="attention sees all positions here")
    heads, groups, units = read.integer("num_attention_heads"), 0, 0
    if not attention.boolean("no_op", False):
        size = attention.integer("n_heads_in_group")
        if heads % size:
            attention.fail("n_heads_in_group", size, f"a divisor of num_attention_heads ({heads})")
        groups = heads // size
    if not ffn.boolean("no_op", False):
        width = int(2 * ffn.number("ffn_mult") * read.integer("hidden_size") / 3)
        units = -(-width // 256) * 256  # rounded up to a multiple
    return groups, units


def write(config: Any) -> dict[str, Any]:
    """`block_configs`, in place of the numbers that other families have for all layers."""
    heads, absent = config.num_attention_heads, {"no_op": True}
    blocks = [
        {
            "attention": {"n_heads_in_group": heads // groups} if groups else absent,
            "ffn": {"ffn_mult": 1.5 * units / config.hidden_size} if units else absent,
        }
        for groups, units in config.layer_sizes
    ]
    alike = dict.fromkeys(("num_key_value_heads", "intermediate_size"))
    return {"num_attention_heads": heads, "block_configs": blocks, **alike}


FAMILIES = (
    Family(
        "DeciLMForCausalLM",
        "nemotron-nas",
        "deci",
        defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        attention_biases=(None, None),
        mlp_bias=None,
        permuted=True,
        layer_sizes=read_layers,
        write=write,
        theta=500000.0,
    ),
)
