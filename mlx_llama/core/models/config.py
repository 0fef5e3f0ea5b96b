"""LlamaConfig, and how config.json or GGUF metadata is resolved to it with all fields set.

The schema of config.json is transformers', from Llama 1 to the `rope_parameters` of transformers 5.
Fields and defaults of GGUF are llama.cpp's (src/llama-model.cpp, `load_hparams`). core/families
lists them. Fields that ask for unsupported arithmetic raise ConfigError.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import ConfigError, Report, refuse, show
from mlx_llama.core.families import BY_GGUF, FAMILIES, find_family, find_gguf, unsupported
from mlx_llama.core.families.family import Family
from mlx_llama.core.system.files import read_json
from mlx_llama.core.system.forks import cached_property

from .foreign import Float8Quantization, PackedQuantization
from .quantization import Quantization, check_modules, read_quantization
from .reader import Field, Reader
from .rope_fields import RopeConfig, read_gguf_ropes, read_ropes
from .spec import NORM_NAMES, NUMBERS_OF_XIELU, ExpertsSpec, LayerSpec, Window

# hidden_act: the name here
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
XIELU = "xielu"  # in place of a gate's
DTYPES = ("float32", "float16", "bfloat16")
# checked against each other
_SIZES = {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}

# {GGUF field of unsupported arithmetic: values without it}, unless a family's table has it
_GGUF_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_gating_func": (0, 1),  # softmax
    "rope.dimension_sections": ([0, 0, 0, 0],),  # of images' positions
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "use_parallel_residual": (False,),
}
_GGUF_NEUTRAL |= dict.fromkeys(
    "attention.clamp_kqv attention.max_alibi_bias attention.scale attn_logit_softcapping "
    "expert_count expert_shared_count expert_shared_feed_forward_length final_logit_softcapping "
    "leading_dense_block_count nextn_predict_layers rope.scaling.alpha "
    "rope.scaling.yarn_log_multiplier".split(),
    (0,),
)
_GGUF_NEUTRAL |= dict.fromkeys(
    "embedding_scale expert_group_count expert_weights_scale interleave_moe_layer_step logit_scale "
    "residual_scale".split(),
    (0, 1),
)


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
    attention_bias: bool  # of query, key and value
    mlp_bias: bool
    sliding_window: int | None  # positions that a token sees, itself included; None for all
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # of the checkpoint, as the config names it
    # None for plain matrices and for GGUF, whose tensors name their formats
    quantization: Quantization | PackedQuantization | Float8Quantization | None = None
    output_bias: bool = False  # of the projection after attention
    # RMS norms of query and key, over each "head" or over all heads as a "whole"; "rotated": over
    # each head, after rotation; "without weights": over each head of rotated layers
    query_key_norm: str | None = None
    # numbers of the layers with the window; None for all
    sliding_layers: tuple[int, ...] | None = None
    activation: str = "silu"  # or "gelu_tanh", "clamped_swiglu"; "xielu" in MLPs without a gate
    norm_placement: str = "before"  # attention and MLP, "after" them, or "both"
    unrotated_layers: tuple[int, ...] = ()  # layers without rotary embedding
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # on the output of attention and MLP
    attention_multiplier: float | None = None  # on query times key; None for 1 / sqrt(head_dim)
    logits_multiplier: float = 1.0
    local_rope: RopeConfig | None = None  # of layers with a window, None for `rope`
    norm_offset: float = 0.0  # to add to the stored weights of norms
    attention_softcap: float | None = None  # c of c * tanh(score / c)
    logits_softcap: float | None = None
    # Queries are multiplied by 1 + query_beta * log(1 + n), n the trained lengths
    # (rope.original_max_position_embeddings) before their position.
    query_beta: float = 0.0
    is_text_part: bool = False  # of a checkpoint that has images, too
    # Queries of unrotated layers are multiplied by 1 + temperature_scale * log(1 + n), n the whole
    # temperature_floors of the positions up to theirs.
    temperature_scale: float = 0.0
    temperature_floor: int = 1
    num_experts: int = 0  # MLPs of a layer, 0 for a plain MLP
    num_experts_per_tok: int = 0  # experts that a token uses
    moe_intermediate_size: int = 0  # hidden units of an expert
    norm_topk_prob: bool = True  # the shares of a token's experts add up to 1
    expert_step: int = 1  # every so many layers have experts, others a plain MLP
    attention_sinks: bool = False  # a logit per head in the softmax of attention
    # key-value heads and hidden units of each layer, 0 for a layer without attention or MLP; empty
    # if all layers are alike. The key-value heads of layers that have fewer than
    # `num_key_value_heads` are repeated here.
    layer_sizes: tuple[tuple[int, int], ...] = ()
    # values of the file that were read as something else
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Specs of all layers, in order."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    def _layer(self, i: int) -> LayerSpec:
        layer, family = f"model.layers.{i}.", FAMILIES[self.architecture]
        mlp = f"{layer}{family.mlp}."
        is_gated = self.activation != XIELU
        has_experts = self.num_experts > 0 and (i + 1) % self.expert_step == 0
        has_norms = self.query_key_norm not in (None, "without weights")
        gate_up = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
        numbers = () if is_gated else NUMBERS_OF_XIELU
        before, after = NORM_NAMES[self.norm_placement]
        key_value_heads, units = self._sizes(i)
        window, sliding = None, self.sliding_layers
        if self.sliding_window is not None and (sliding is None or i in sliding):
            window = Window(self.sliding_window, family.windows.is_chunk)
        rotates, rope = i not in self.unrotated_layers, int(bool(window and self.local_rope))
        query_rope = len(self.ropes) if self.query_beta else rope
        if not rotates and self.temperature_scale:  # by angles of 0, and by these times the factor
            rotates, rope, query_rope = True, self.still_rope, self.still_rope + 1
        half = self.rotary_dim // 2
        angles, query_angles = (slice(n * half, (n + 1) * half) for n in (rope, query_rope))
        return LayerSpec(
            config=self,
            index=i,
            attention_norm=before and f"{layer}{before[0]}" if key_value_heads else None,
            qkv=tuple(f"{layer}self_attn.{name}_proj" for name in "qkv" if key_value_heads),
            out=f"{layer}self_attn.o_proj" if key_value_heads else "",
            ffn_norm=before and f"{layer}{before[1]}" if units else None,
            gate_up=tuple(f"{mlp}{name}" for name in gate_up if units and not has_experts),
            down=f"{mlp}down_proj" if units and not has_experts else "",
            query_norm=f"{layer}self_attn.q_norm" if has_norms else None,
            key_norm=f"{layer}self_attn.k_norm" if has_norms else None,
            norms_heads=self.query_key_norm == "without weights" and i not in self.unrotated_layers,
            rotates=rotates,
            angles=angles,
            query_angles=query_angles,
            window=window,
            post_attention_norm=after and f"{layer}{after[0]}",
            post_ffn_norm=after and f"{layer}{after[1]}",
            xielu=tuple(f"{layer}mlp.act_fn.{name}" for name in numbers),
            sinks=f"{layer}self_attn.sinks" if self.attention_sinks else None,
            experts=self._experts(layer) if has_experts else None,
        )

    def _sizes(self, i: int) -> tuple[int, int]:
        """Key-value heads of layer `i`, as files store them, and hidden units of its MLP."""
        alike = self.num_key_value_heads, self.intermediate_size
        return self.layer_sizes[i] if self.layer_sizes else alike

    def _experts(self, layer: str) -> ExpertsSpec:
        family = FAMILIES[self.architecture]
        modules = family.experts
        assert modules is not None  # a family without experts has no `num_experts`
        block = f"{layer}{modules.block or family.mlp}"
        gate, up, down = (
            tuple(f"{block}.experts.{i}.{name}" for i in range(self.num_experts))
            for name in (modules.gate, modules.up, modules.down)
        )
        stacks, shared = (
            (f"{block}.{name}.gate_proj", f"{block}.{name}.up_proj", f"{block}.{name}.down_proj")
            for name in (modules.stack, modules.shared)
        )
        shares = self.norm_topk_prob, modules.scoring, modules.scales_input
        more = shared if modules.shared else None, self.mlp_bias
        router, used = f"{block}.{modules.router}", self.num_experts_per_tok
        return ExpertsSpec(router, gate, up, down, stacks, used, *shares, *more)

    @property
    def exceeds_float16(self) -> bool:
        """True for a family whose activations overflow float16."""
        return FAMILIES[self.architecture].exceeds_float16

    @property
    def mlp_size(self) -> int:
        """Hidden units of an MLP, or of one expert."""
        return self.moe_intermediate_size if self.num_experts else self.intermediate_size

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Hidden units of the layers' MLPs and experts, without duplicates."""
        sizes = (
            self.moe_intermediate_size if spec.experts else self._sizes(spec.index)[1]
            for spec in self.layers
            if spec.experts or spec.down
        )
        return tuple(dict.fromkeys(sizes))

    def stacks(self) -> dict[str, tuple[str, ...]]:
        """{module of all experts' matrices together: their modules, by number}."""
        return {
            stack: names
            for spec in self.layers
            if (experts := spec.experts)
            for stack, names in zip(experts.stacks, (experts.gate, experts.up, experts.down))
        }

    @property
    def attention_scale(self) -> float:
        """Factor on query times key."""
        multiplier = self.attention_multiplier
        return self.head_dim**-0.5 if multiplier is None else multiplier

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated, the leading ones."""
        return self.rope.dim or self.head_dim

    @property
    def table_width(self) -> int:
        """Columns of the tables of angles: of each rope, of the first times the queries' factor, of
        no rotation, and of that times the unrotated queries' factor.
        """
        return (self.still_rope + (2 if self.temperature_scale else 0)) * (self.rotary_dim // 2)

    @property
    def still_rope(self) -> int:
        """Number of the table without rotation."""
        return len(self.ropes) + bool(self.query_beta)

    @property
    def scales_queries(self) -> bool:
        """Queries are multiplied by factors of their positions."""
        return bool(self.query_beta or self.temperature_scale)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Ropes of the tables of angles; the second is of layers with a window."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def head_name(self) -> str:
        """Module that projects to the vocabulary: the embedding if it is tied."""
        return "model.embed_tokens" if self.tie_word_embeddings else "lm_head"

    def stored(self, field: Field) -> Any:
        """The field as files store it; None for none."""
        is_scale = field.name == "attention_multiplier"
        value = self.attention_scale if is_scale else getattr(self, field.name)
        if self.layer_sizes and field.name in ("num_key_value_heads", "intermediate_size"):
            return [sizes[field.name == "intermediate_size"] for sizes in self.layer_sizes]
        if self.layer_sizes and field.name == "num_attention_heads":
            return [value if groups else 0 for groups, _ in self.layer_sizes]
        return field.encode(value)

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
        family, read, is_part = find_family(Reader(raw, source, report=report))
        default = family.defaults
        for name, (neutral, reason) in family.refused.items():
            read.refuse(name, neutral, reason=reason)
        values = _read_table(read, family)
        vocab = values["vocab_size"]
        values |= _choose_layers(read, family, values)
        has_bias = values.pop("attention_bias", False)
        qkv, out = (has_bias if bias is None else bias for bias in family.attention_biases)
        values.setdefault("mlp_bias", bool(family.mlp_bias))
        if "activation" not in values:
            values["activation"] = _read_activation(read, *family.activation)
        config = cls(
            architecture=family.name,
            **values,
            **read_ropes(read, family, values["max_position_embeddings"], values["head_dim"]),
            attention_bias=qkv,
            output_bias=out,
            bos_token_id=read.token("bos_token_id", default.get("bos_token_id", 1), vocab),
            eos_token_ids=read.tokens("eos_token_id", default.get("eos_token_id", 2), vocab),
            dtype=_read_dtype(read),
            quantization=read.attempt(read_quantization, read, otherwise=None),
            norm_offset=family.norm_offset,
            is_text_part=is_part,
            notices=tuple(read.notices),
        )
        _check_norms(read, config)
        if isinstance(config.quantization, Quantization):
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
        family, read = _open_gguf(general)
        tokens = metadata.get("tokenizer.ggml.tokens", ())
        if embedding := shapes.get("model.embed_tokens.weight"):
            read.raw["vocab_size"] = embedding[0]
        elif not isinstance(tokens, (str, int, float)) and tokens:
            read.raw.setdefault("vocab_size", len(tokens))
        values = _read_table(read, family)
        vocab, positions = values["vocab_size"], values["max_position_embeddings"]
        if isinstance(tokens, (str, int, float)) or len(tokens) > vocab:
            expected = f"at most {vocab} tokens, the rows of token_embd.weight"
            general.fail("tokenizer.ggml.tokens", tokens, expected)
        head_dim = values["head_dim"]
        if (length := read.integer("attention.value_length", head_dim)) != head_dim:
            read.fail("attention.value_length", length, f"{head_dim}, the size of a head")
        values |= _choose_layers(read, family, values)
        values.setdefault("activation", ACTIVATIONS.get(family.activation[1], XIELU))
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom")]
        # Some writers store -1 (no token) as an unsigned number.
        bos, *ends = (
            None if metadata.get(key) == 0xFFFFFFFF else general.token(key, None, vocab)
            for key in keys
        )
        config = cls(
            architecture=family.name,
            **values,
            **read_gguf_ropes(read, family, positions, values["head_dim"], divisors),
            tie_word_embeddings="lm_head.weight" not in shapes,
            attention_bias=any(
                name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for name in shapes
            ),
            output_bias=any(name.endswith("o_proj.bias") for name in shapes),
            mlp_bias=any(".mlp." in name and name.endswith(".bias") for name in shapes),
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
            dtype=dtype,
        )
        _check_norms(read, config)
        return config

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors by Hugging Face name; matrices are [out, in], as torch's Linear."""
        d, vocab = self.hidden_size, self.vocab_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, d)}

        def matrices(names: Sequence[str], rows: Sequence[int], width: int, has_bias: bool) -> None:
            for name, count in zip(names, rows, strict=True):
                shapes[f"{name}.weight"] = (count, width)
                if has_bias:
                    shapes[f"{name}.bias"] = (count,)

        for spec in self.layers:
            if spec.qkv:
                matrices(spec.qkv, (q, kv, kv), d, self.attention_bias)
                matrices((spec.out,), (d,), q, self.output_bias)
            if spec.sinks:
                shapes[spec.sinks] = (spec.heads,)
            if spec.query_norm:
                is_whole = self.query_key_norm == "whole"
                shapes[f"{spec.query_norm}.weight"] = (q if is_whole else self.head_dim,)
                shapes[f"{spec.key_norm}.weight"] = (kv if is_whole else self.head_dim,)
            mlps: list[tuple[str, ...]] = [(*spec.gate_up, spec.down)] if spec.down else []
            units = self._sizes(spec.index)[1]
            if experts := spec.experts:
                matrices((experts.router,), (experts.count,), d, self.mlp_bias)
                units = self.moe_intermediate_size
                mlps = [*zip(experts.gate, experts.up, experts.down)]
                mlps += [experts.shared] if experts.shared else []
            for *gate_up, down in mlps:
                matrices(gate_up, [units] * len(gate_up), d, self.mlp_bias)
                matrices((down,), (d,), units, self.mlp_bias)
            shapes |= zip(spec.xielu, ((1,), (1,), (), ()))
            shapes |= {f"{name}.weight": (d,) for name in spec.norms}
        shapes["model.norm.weight"] = (d,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (vocab, d)
        return shapes

    def fused_parts(self) -> dict[str, tuple[str, int, int]]:
        """{tensor of `tensor_shapes`: (stored tensor with its rows, first, one after the last)}."""
        shapes, parts = self.tensor_shapes(), {}
        fused, layers = FAMILIES[self.architecture].fused, range(self.num_hidden_layers)
        for i, whole, kind in itertools.product(layers, fused, ("weight", "bias")):
            first = 0
            for module in fused[whole]:
                name = f"model.layers.{i}.{module}.{kind}"
                if name in shapes:
                    last = first + shapes[name][0]
                    parts[name] = f"model.layers.{i}.{whole}.{kind}", first, last
                    first = last
        return parts

    def row_order(self, module: str, rows: int = 1) -> np.ndarray | None:
        """int64 [rows], by row of a module: its number in the files; None if they agree. Files of
        some families have the two rows of a rotary pair side by side. Here they are half of a
        head's rotated dimensions apart. The key-value heads of layers that have fewer than
        `num_key_value_heads` are repeated.
        """
        if self.layer_sizes and module.endswith(("k_proj", "v_proj")):
            heads = self._sizes(int(module.split(".")[2]))[0]
            order = np.arange(heads * self.head_dim).reshape(heads, -1)
            return np.repeat(order, self.num_key_value_heads // heads, axis=0).reshape(-1)
        if not FAMILIES[self.architecture].interleaved or not module.endswith(("q_proj", "k_proj")):
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
            if name in names or name not in parts:
                if self.layer_sizes and re.search(r"\.[kv]_proj\.", name):
                    rows = self._sizes(int(name.split(".")[2]))[0] * self.head_dim
                    shape = (rows, *shape[1:])
                stored[name] = shape
            else:
                whole, _, last = parts[name]
                stored[whole] = (last, *shape[1:])
        return stored


def _read_table(read: Reader, family: Family) -> dict[str, Any]:
    """The fields of the family's table by LlamaConfig's names, and what follows from them."""
    fields = {field.name: field for field in family.table if read.name(field)}
    layers = _read_layers(read, fields, family.layer_sizes) if family.layer_sizes else {}
    values = {name: read.field(field, family.defaults) for name, field in fields.items()}
    values = {name: value for name, value in values.items() if value is not None}
    named = {name: read.name(field) for name, field in fields.items()}  # as this file spells them
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    # null means one key-value head per query head
    kv_heads = values.setdefault("num_key_value_heads", heads)
    is_whole = "head_dim" in values or hidden % heads == 0
    head_dim = values.setdefault("head_dim", max(hidden // heads, 1))

    def fail(name: str, expected: str) -> None:
        read.fail(named[name], values[name], expected)

    if not read.failed & _SIZES:  # else these follow from a placeholder
        its_heads = f"{read.prefix}{named['num_attention_heads']} ({heads})"
        if heads % kv_heads:
            fail("num_key_value_heads", f"a divisor of {its_heads}")
        if not is_whole:
            explicit = f"an explicit {read.prefix}{named['head_dim']}"
            fail("hidden_size", f"a multiple of {its_heads}, or {explicit}")
        elif head_dim % 2:
            fail("head_dim", "an even number, since rotary embeddings rotate pairs")
    if values.get("num_experts_per_tok", 0) > values.get("num_experts", 0):
        experts = f"{read.prefix}{named['num_experts']} ({values['num_experts']})"
        fail("num_experts_per_tok", f"at most {experts}")
    if family.complete:
        values |= family.complete(read, values)
    return {**family.fixed, **values, **layers}


def _read_layers(
    read: Reader, fields: Mapping[str, Field], sizes_of: Callable[[Reader], tuple]
) -> dict[str, Any]:
    """`layer_sizes`; the fields of the layers get a number for all."""
    sizes = read.attempt(sizes_of, read, otherwise=())
    groups, units = ([size for size in column if size] for column in zip(*sizes or [(1, 1)]))
    alike = {"num_key_value_heads": math.lcm(*groups), "intermediate_size": max(units, default=1)}
    heads = read.raw.get(read.name(fields["num_attention_heads"]))
    if read.is_gguf and isinstance(heads, list):
        alike["num_attention_heads"] = max(heads)
    read.raw = read.raw | {read.name(fields[name]): value for name, value in alike.items()}
    return {"layer_sizes": sizes}


def _choose_layers(read: Reader, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The window, and the fields that list layers."""
    needs = "num_hidden_layers"
    window, sliding = read.attempt(
        family.windows.read, read, values, otherwise=(None, None), needs=needs
    )
    chosen = {"sliding_window": window, "sliding_layers": sliding}
    if family.unrotated:
        chosen["unrotated_layers"] = read.attempt(
            family.unrotated, read, values | chosen, otherwise=(), needs=needs
        )
    return chosen


def _check_norms(read: Reader, config: LlamaConfig) -> None:
    """Refuse ropes whose factor a norm after them would undo; here norms come before."""
    kind, is_after = config.rope.type, config.query_key_norm in ("rotated", "without weights")
    if is_after and kind in ("yarn", "longrope"):
        read.fail("rope_type", kind, f"another type, since {config.architecture} norms after it")


def _read_activation(read: Reader, field: str, default: str) -> str:
    if read.get(field, None) is None and default != "silu":
        field = "hidden_act"  # of Gemma's first files
    name = read.get(field, default)
    if default == XIELU:
        read.refuse(field, XIELU, reason="an MLP without a gate has no other activation")
        return XIELU
    if not isinstance(name, str) or name not in ACTIVATIONS:
        read.fail(field, name, f"one of {', '.join(ACTIVATIONS)}")
        return "silu"
    return ACTIVATIONS[name]


def _read_dtype(read: Reader) -> str:
    name = "dtype" if read.get("dtype", None) is not None else "torch_dtype"
    value = read.get(name, None)
    # torch's default
    dtype = "float32" if value in (None, "auto") else str(value).removeprefix("torch.")
    dtype = "float32" if dtype == "float64" else dtype  # the weights are rounded to it
    if dtype not in DTYPES:
        read.fail(name, value, f"one of {', '.join(DTYPES)}")
    return dtype


def _open_gguf(general: Reader) -> tuple[Family, Reader]:
    """(family, reader of its fields) of a GGUF file. Raises ConfigError if unsupported."""
    kind, name = general.get("general.type", "model"), general.get("general.architecture")
    if kind != "model":
        general.fail("general.type", kind, "'model'")
    family = find_gguf(general.raw)
    if family is None:
        fault = f"{general.source}: general.architecture is {show(name)}"
        raise unsupported(fault, sorted(BY_GGUF), name)
    prefix = f"{name}."
    keys = [key for key in general.raw if key.startswith(prefix)]
    fields = {key.removeprefix(prefix): general.raw[key] for key in keys}
    read = Reader(fields, general.source, prefix, is_gguf=True)
    known = {field.gguf for field in family.table}
    if family.scales_queries:
        known.add("rope.scaling.yarn_log_multiplier")
    for field, neutral in _GGUF_NEUTRAL.items():
        # without experts, llama.cpp ignores the size of a shared one (Granite 4)
        is_unused = field == "expert_shared_feed_forward_length" and family.experts is None
        if field not in known and not is_unused:
            read.refuse(field, *neutral, reason="nothing else is supported")
    return family, read
