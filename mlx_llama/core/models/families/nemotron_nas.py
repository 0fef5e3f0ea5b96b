"""Nemotron-NAS: layers with fewer key-value heads or hidden units, or none (arXiv 2411.19146)."""

from collections.abc import Iterator
from typing import Any

from mlx_llama.core.models.fields import Reader
from mlx_llama.core.models.layers import attention, block, mlp
from mlx_llama.core.models.parts import Layer

from .family import OPTIONAL, Family, size

_GGUF = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
_COUNT = "num_hidden_layers"
_LINEAR = "no matrix in place of attention or MLP, which this package lacks"


def complete(read: Reader, values: dict[str, Any]) -> dict[str, Any]:
    """`layer_sizes`: key-value heads and hidden units of each layer, 0 without attention or MLP."""
    sizes = read.attempt(lambda: _read_sizes(read, values), otherwise=((1, 1),), needs=_COUNT)
    groups, units = (max(column) or 1 for column in zip(*sizes))
    sizes += sizes[-1:] * (values[_COUNT] - len(sizes))  # of a file that failed
    return {"layer_sizes": sizes, "num_key_value_heads": groups, "intermediate_size": units}


def _read_sizes(read: Reader, values: dict[str, Any]) -> tuple[tuple[int, int], ...]:
    count = values[_COUNT]
    if not read.is_gguf:
        blocks = read.get("block_configs")
        if not isinstance(blocks, list) or len(blocks) != count:
            read.fail("block_configs", blocks, f"a list of {count} layers")
        return tuple(_read_block(read, i, block) for i, block in enumerate(blocks))
    lists = []
    for name in _GGUF:
        numbers = read.get(name)
        numbers = numbers if isinstance(numbers, list) else [numbers] * count
        if len(numbers) != count or any(type(x) is not int or x < 0 for x in numbers):
            read.fail(name, numbers, f"a whole number for each of {count} layers")
        lists.append(numbers)
    heads, groups, units = lists
    if [*map(bool, heads)] != [*map(bool, groups)]:
        read.fail(_GGUF[1], groups, _LINEAR)
    if any(group and heads[i] % group for i, group in enumerate(groups)):
        read.fail(_GGUF[1], groups, f"divisors of {_GGUF[0]} ({max(heads)})")
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
        for groups, units in config.own["layer_sizes"]
    ]
    alike = dict.fromkeys(("num_key_value_heads", "intermediate_size"))
    return {"num_attention_heads": heads, "block_configs": blocks, **alike}


def write_gguf(config: Any) -> dict[str, Any]:
    groups, units = map(list, zip(*config.own["layer_sizes"]))
    heads = [config.num_attention_heads if group else 0 for group in groups]
    return dict(zip(_GGUF, (heads, groups, units)))


def layers(config: Any) -> Iterator[Layer]:
    for i, (groups, units) in enumerate(config.own["layer_sizes"]):
        mixer = attention(config, i, key_value_heads=groups) if groups else None
        yield block(config, i, mixer, mlp(config, i, units) if units else None)


_BY_LAYER: dict[str, Any] = {"takes_first": True, "skips_zeros": True}

FAMILIES = (
    Family(
        "DeciLMForCausalLM",
        "nemotron-nas",
        "deci",
        defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
        attention_biases=(None, None),
        mlp_bias=None,
        permuted=True,
        fields=(
            size("num_attention_heads", _GGUF[0], 14, placeholder=1, skips_zeros=True),
            size("num_key_value_heads", _GGUF[1], 14, **OPTIONAL | _BY_LAYER),
            size("intermediate_size", _GGUF[2], 22, **OPTIONAL | _BY_LAYER),
        ),
        complete=complete,
        layers=layers,
        write=write,
        write_gguf=write_gguf,
        theta=500000.0,
    ),
)
