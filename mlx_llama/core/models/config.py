"""LlamaConfig: a model as data, all fields set and checked."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import ConfigError, Report, refuse
from mlx_llama.core.system.files import read_json
from mlx_llama.core.system.forks import cached_property

from .families import FAMILIES, Family
from .fields import Field, Reader
from .parts import (
    Angles,
    Attention,
    GatedDelta,
    KeyValues,
    Layer,
    LayerInputs,
    Recurrent,
    ShortConv,
    Window,
)
from .quantization import Float8Quantization, PackedQuantization, Quantization, check_modules
from .reading import read_config, read_metadata
from .rope_fields import RopeConfig


@dataclass(frozen=True)
class LlamaConfig:
    """Architecture and sizes of a model, resolved and checked; names are transformers'."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # biases of query, key and value
    mlp_bias: bool
    # transformers' kinds of layers: "full_attention", "sliding_attention", "conv", ...
    layer_types: tuple[str, ...]
    sliding_window: int | None  # positions that a token sees, itself included; None for all
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # the checkpoint's, as the config names it
    # None for plain matrices and for GGUF, whose tensors name their formats
    quantization: Quantization | PackedQuantization | Float8Quantization | None = None
    output_bias: bool = False  # bias of the projection after attention
    activation: str = "silu"  # or "gelu_tanh", "clamped_swiglu"; "xielu" in MLPs without a gate
    embedding_multiplier: float = 1.0
    logits_multiplier: float = 1.0
    local_rope: RopeConfig | None = None  # in layers with a window, None for `rope`
    norm_offset: float = 0.0  # to add to the stored weights of norms
    logits_softcap: float | None = None  # c of c * tanh(logit / c)
    is_text_part: bool = False  # the checkpoint has a part for images, too
    num_experts: int = 0  # MLPs of a layer, 0 for a plain MLP
    num_experts_per_tok: int = 0  # experts that a token uses
    moe_intermediate_size: int = 0  # hidden units of an expert
    # the family's own fields, by name
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    # values of the file that were read as something else
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def family(self) -> Family:
        """The family: names, rules and layers of its models."""
        return FAMILIES[self.architecture]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers as data, in order."""
        layers: list[Layer] = []
        slots = {True: 0, False: 0}  # attention or not
        for layer in self.family.layers(self):
            mixer = layer.mixer
            if layer.attention and layer.attention.keys_of is not None:
                source = layers[layer.attention.keys_of].attention
                assert source  # of the same shape
                mixer = dataclasses.replace(layer.attention, slot=source.slot)
            elif mixer:
                kind = bool(layer.attention)
                mixer = dataclasses.replace(mixer, slot=slots[kind])
                slots[kind] += 1
            layers.append(dataclasses.replace(layer, mixer=mixer))
        return tuple(layers)

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers that keep keys and values, by slot."""
        mixers = (layer.attention for layer in self.layers)
        return tuple(mixer for mixer in mixers if mixer and mixer.new_heads)

    @cached_property
    def kinds(self) -> tuple[KeyValues, ...]:
        """The shapes and windows of keys and values, in order of their first slots."""
        slots: dict[tuple[int, int, Window | None], list[int]] = {}
        for mixer in self.attentions:
            kind = mixer.key_value_heads, mixer.head_dim, mixer.window
            slots.setdefault(kind, []).append(mixer.slot)
        return tuple(
            KeyValues(heads, head_dim, tuple(numbers), window)
            for (heads, head_dim, window), numbers in slots.items()
        )

    def state_shapes(self, length: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a row's keys and values, [layers, G, n, D], by their names in states and files:
        "keys" and "values" of the first of `kinds`, "keys.1" and "values.1" of the next. n: the
        positions that a query after `length` sees.
        """
        return {
            f"{name}.{i}" if i else name: (len(kind.slots), kind.heads, count, kind.head_dim)
            for i, kind in enumerate(self.kinds)
            for count in (length - kind.first(length),)
            for name in ("keys", "values")
        }

    @property
    def key_value_layers(self) -> int:
        """Number of layers that keep keys and values."""
        return len(self.attentions)

    @cached_property
    def last_state(self) -> int:
        """The last layer but those at the end that read another's keys and values."""
        shared = [bool(x.attention and x.attention.keys_of is not None) for x in self.layers]
        return shared.index(True) - 1 if shared[-1] else len(shared) - 1

    @cached_property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """The mixers with a recurrent state, by slot."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, Recurrent))

    @property
    def exceeds_float16(self) -> bool:
        """True for a family whose activations overflow float16."""
        return self.family.exceeds_float16

    @property
    def mlp_size(self) -> int:
        """Hidden units of an MLP, or of one expert."""
        return self.moe_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Hidden units of the layers' MLPs and experts, without duplicates."""
        parts = (part for layer in self.layers for part in (layer.ffn, layer.mlp) if part)
        return tuple(dict.fromkeys(part.size for part in parts))

    def stacks(self) -> dict[str, tuple[str, ...]]:
        """{module of all experts' matrices together: their modules, by number}."""
        return {
            stack: names
            for layer in self.layers
            if (experts := layer.experts)
            for stack, names in zip(experts.stacks, (experts.gate, experts.up, experts.down))
        }

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, the leading ones."""
        return self.rope.dim or self.head_dim

    @cached_property
    def angles(self) -> tuple[Angles, ...]:
        """The tables of angles; the second is of layers with a window, where `local_rope` is."""
        ropes = (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)
        more = self.family.angles(self) if self.family.angles else ()
        return (*map(Angles, ropes), *more)

    @cached_property
    def tables(self) -> tuple[slice, ...]:
        """Columns of the tables of `angles`, side by side."""
        halves = [(table.rope.dim or self.head_dim) // 2 for table in self.angles]
        return tuple(
            itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(halves)]))
        )

    @property
    def table_width(self) -> int:
        """Columns of all tables of angles."""
        return self.tables[-1].stop

    @property
    def scales_queries(self) -> bool:
        """Queries are multiplied by factors of their positions."""
        return any(table.scale for table in self.angles)

    @cached_property
    def inputs(self) -> LayerInputs | None:
        """The inputs that layers have beside the stream."""
        return self.family.inputs(self) if self.family.inputs else None

    @property
    def final_norm(self) -> str:
        """Module of the norm before the head."""
        return self.family.norm[0]

    @property
    def head_name(self) -> str:
        """Module that projects to the vocabulary: the embedding if it is tied."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"

    def stored(self, field: Field) -> Any:
        """The field as files store it; None for none."""
        has = self.own if field.name in self.own else vars(self)
        return field.encode(has.get(field.name))

    @classmethod
    def _of(cls, values: dict[str, Any]) -> LlamaConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        own = {name: value for name, value in values.items() if name not in known}
        return cls(**{name: values[name] for name in values.keys() & known}, own=own)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> LlamaConfig:
        """Read a config.json, or that of a folder. Raises ConfigError."""
        path = Path(path)
        if path.is_dir():
            if not (path / "config.json").exists() and (path / "params.json").exists():
                raise ConfigError(
                    f"{path}: holds params.json, Mistral's own settings, but no config.json; fetch "
                    "config.json of the same repository"
                )
            path = path / "config.json"
        return cls.from_dict(read_json(path, ConfigError), str(path))

    @classmethod
    def from_dict(
        cls, raw: dict[str, Any], source: str = "config.json", report: Report = refuse
    ) -> LlamaConfig:
        """Resolve a parsed config.json. source: its name in errors; report: see Reader. Raises
        ConfigError.
        """
        read = Reader(raw, source, report=report)
        config = cls._of(read_config(read))
        if not isinstance(config.quantization, Quantization):
            return config
        stacks = config.stacks()
        layers = (  # experts have the settings that stand under the name of their stack
            (module, settings)
            for name, settings in config.quantization.layers
            for module in stacks.get(name, (name,))
        )
        packing = dataclasses.replace(config.quantization, layers=tuple(layers))
        config = dataclasses.replace(config, quantization=packing)
        if not read.failed:
            check_modules(packing, config.tensor_shapes() | config.stored_shapes(), source)
        return config

    @classmethod
    def from_gguf(
        cls,
        metadata: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        divisors: Mapping[str, tuple[float, ...]],
        dtype: str,
        source: str,
    ) -> LlamaConfig:
        """Resolve the metadata and tensor shapes of a GGUF file. Raises ConfigError.

        metadata: {key: value}, arrays of numbers as lists (their first 4097 are enough). shapes: by
        Hugging Face name; they give the vocabulary's size, and whether the model has an output head
        and biases. divisors: values of the tensors rope_freqs.weight (""),
        rope_factors_short.weight ("short") and rope_factors_long.weight ("long"), as far as there
        are. dtype: of the embedding. source: file to name in errors.
        """
        general = Reader(metadata, source, is_gguf=True)
        return cls._of(read_metadata(general, shapes, divisors) | {"dtype": dtype})

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by Hugging Face name; matrices are [out, in], as torch's Linear."""
        d, vocab = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d)}

        def matrices(names: Sequence[str], rows: Sequence[int], width: int, has_bias: bool) -> None:
            for name, count in zip(names, rows, strict=True):
                shapes[f"{name}.weight"] = (count, width)
                if has_bias:
                    shapes[f"{name}.bias"] = (count,)

        for layer in self.layers:
            if isinstance(layer.mixer, Recurrent):
                for name, shape in layer.mixer.shapes().items():
                    shapes[f"{name}.weight"] = shape
                    if isinstance(layer.mixer, ShortConv) and layer.mixer.has_bias:
                        shapes[f"{name}.bias"] = shape[:1]
                if isinstance(layer.mixer, GatedDelta):
                    names = layer.mixer.decay, layer.mixer.decay_bias
                    shapes |= dict.fromkeys(names, (layer.mixer.value_heads,))
            elif mixer := layer.attention:
                q, *keys = mixer.rows()
                matrices(mixer.qkv, (q, *keys), d, self.attention_bias)
                if mixer.gate:
                    matrices((mixer.gate,), (q,), d, self.attention_bias)
                matrices((mixer.out,), (d,), q, self.output_bias)
                if mixer.sinks:
                    shapes[mixer.sinks] = (mixer.heads,)
                for norm, width in zip((mixer.query_norm, mixer.key_norm), (q, *keys)):
                    if norm:
                        is_whole = self.family.query_key_norm == "whole"
                        shapes[f"{norm}.weight"] = (width if is_whole else mixer.head_dim,)
            if experts := layer.experts:
                router = experts.router
                matrices((router.module,), (experts.count,), d, self.mlp_bias)
                vectors = {router.bias: experts.count, router.expert_scale: experts.count}
                vectors |= {router.norm: d}
                shapes |= {name: (count,) for name, count in vectors.items() if name}
                if experts.shared_gate:
                    shapes[f"{experts.shared_gate}.weight"] = (1, d)
                for gate, up, down in zip(experts.gate, experts.up, experts.down):
                    matrices((gate, up), [experts.size] * 2, d, self.mlp_bias)
                    matrices((down,), (d,), experts.size, self.mlp_bias)
            if mlp := layer.mlp:
                matrices(mlp.gate_up, [mlp.size] * len(mlp.gate_up), d, self.mlp_bias)
                matrices((mlp.down,), (d,), mlp.size, self.mlp_bias)
                shapes |= zip(mlp.xielu, ((1,), (1,), (), ()))
            if part := layer.input:
                matrices((part.gate,), (part.size,), d, has_bias=False)
                matrices((part.projection,), (d,), part.size, has_bias=False)
            shapes |= {f"{name}.weight": (d,) for name in layer.norms}
            shapes |= {layer.scalar: (1,)} if layer.scalar else {}
        if inputs := self.inputs:
            width = inputs.layers * inputs.size
            matrices((inputs.embedding,), (inputs.tokens,), width, has_bias=False)
            matrices((inputs.projection,), (width,), d, has_bias=False)
            shapes[f"{inputs.norm}.weight"] = (inputs.size,)
        shapes[f"{self.final_norm}.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocab, d)
        return shapes

    def fused_parts(self) -> dict[str, tuple[str, slice | np.ndarray]]:
        """{tensor of `tensor_shapes`: (stored tensor with its rows, these rows)}. A stored tensor
        with scattered rows may have the name of one of its parts.
        """
        shapes, family = self.tensor_shapes(), self.family
        parts: dict[str, tuple[str, slice | np.ndarray]] = {}
        fused, layers = family.fused, range(self.num_hidden_layers)
        for i, whole, kind in itertools.product(layers, fused, ("weight", "bias")):
            first = 0
            for module in fused[whole]:
                name = f"model.layers.{i}.{module}.{kind}"
                if name in shapes:
                    last = first + shapes[name][0]
                    parts[name] = f"model.layers.{i}.{whole}.{kind}", slice(first, last)
                    first = last
        for layer in self.layers:
            scattered = family.scattered(layer.mixer) if family.scattered else {}
            for (module, (whole, rows)), kind in itertools.product(
                scattered.items(), ("weight", "bias")
            ):
                if f"{module}.{kind}" in shapes:
                    parts[f"{module}.{kind}"] = f"{whole}.{kind}", rows
        return parts

    def row_order(self, module: str, rows: int = 1) -> np.ndarray | None:
        """int64 [rows], by row of a module: its number in the files; None if they agree. Files of
        some families have the two rows of a rotary pair side by side. Here they are half of a
        head's rotated dimensions apart.
        """
        if not self.family.interleaved or not module.endswith(("q_proj", "k_proj")):
            return None
        order = np.arange(rows).reshape(-1, self.head_dim)
        pairs = order[:, : self.rotary_dim].reshape(len(order), -1, 2)
        order[:, : self.rotary_dim] = pairs.swapaxes(1, 2).reshape(len(order), -1)
        return order.reshape(-1)

    def stored_shapes(self, names: Container[str] = ()) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors as files store them: some have the rows of several of
        `tensor_shapes`. names: of tensors that the files have as in `tensor_shapes`.
        """
        parts, stored = self.fused_parts(), {}
        for name, shape in self.tensor_shapes().items():
            if name not in parts or (name in names and parts[name][0] != name):
                stored[name] = shape
            else:
                whole, span = parts[name]
                last = span.stop if isinstance(span, slice) else int(span.max()) + 1
                stored[whole] = (max(last, *stored.get(whole, (0,))[:1]), *shape[1:])
        return stored

    def is_shifted(self, name: str) -> bool:
        """True for a norm's tensor that is stored without `norm_offset`."""
        gated = (mixer.norm for mixer in self.recurrent if isinstance(mixer, GatedDelta))
        return name.endswith("norm.weight") and name.rpartition(".")[0] not in gated
