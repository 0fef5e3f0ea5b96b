"""Write a GGUF file that llama.cpp opens, with its tensor names and row order. Contents follow
llama.cpp's converter (convert_hf_to_gguf.py, conversion/llama.py) and loader; the gguf library
writes the file. Refuse a model that the format cannot express.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import CheckpointError, ConfigError, OptionsError, TokenizerError, show
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.gguf import row_order
from mlx_llama.core.files.quantized import GGUF_FORMATS, AffineWeight, GGUFWeight
from mlx_llama.core.files.tensor import Tensor, encode
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.models.layer_types import all_but_each
from mlx_llama.core.models.parts import NUMBERS_OF_XIELU
from mlx_llama.core.models.rope import inverse_frequencies, plain_frequencies
from mlx_llama.core.models.rope_fields import UNROTATED
from mlx_llama.core.system import progress
from mlx_llama.core.system.files import read_file, read_json, replace_when_done
from mlx_llama.core.text import sentencepiece_model as spm
from mlx_llama.core.text.gguf_tokenizer import SHOWN_SPECIALS
from mlx_llama.core.text.pre_tokenizers import CONTRACTION, GPT2, IGNORE_MERGES, PRE_TOKENIZERS
from mlx_llama.core.text.tekken import read_tekken
from mlx_llama.core.text.tokenizer import Tokenizer

from . import writing
from .gguf_quantize import Search, quantize
from .gguf_types import FORMATS, PLAIN, choose_type, is_fallback
from .importance import Importance

TYPES = tuple(FORMATS)
_SPACE = "▁"
# Normalizers that make sentencepiece's visible spaces
_SPACE_STEPS = (
    {"type": "Prepend", "prepend": _SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
)
_MODEL_LIMIT = 1 << 28  # bytes of tokenizer.model

# {(split patterns, ignore_merges of tokenizer.json): llama.cpp's usual name for them}
_SPLITS = {
    (PRE_TOKENIZERS[name], name in IGNORE_MERGES): name
    for name in (
        "llama-bpe smaug-bpe qwen2 qwen35 tekken gpt-4o smollm gpt-2 falcon deepseek-llm "
        "deepseek-coder deepseek-v3 seed-coder"
    ).split()
}


def write_gguf(
    checkpoint: Checkpoint,
    out: str | os.PathLike,
    format: str = "Q8_0",
    importance: Importance | None = None,
    search: Search | None = None,
) -> writing.Written:
    """Write a GGUF file with matrices of `format`, a type or llama.cpp's mixture, of TYPES.

    Vectors are F32. Matrices whose rows blocks of 256 do not divide have llama.cpp's substitute
    with blocks of 32; where those do not either, F16. The projection to the vocabulary is Q8_0 or
    Q6_K: llama.cpp too keeps it wider than the rest. Matrices of a GGUF file that have the type
    already keep their blocks. importance: weighs the errors of the layers' matrices. search:
    compiled (search.find_search); None for NumPy's.

    Raises OptionsError: an unknown format; MXFP4 of a model without experts; `out` does not end in
    .gguf. ConfigError, TokenizerError: a GGUF file cannot express the model's rope or tokenizer.
    CheckpointError: `out` exists, cannot be written or does not fit the disk; a weight is not
    finite, or too large for the format; `importance` is of another model.
    """
    import gguf

    if format not in TYPES:
        raise OptionsError(f"`format` gguf:{format}: there are gguf:{', gguf:'.join(TYPES)}")
    if format == "MXFP4" and not checkpoint.config.num_experts:
        raise OptionsError(
            f"`format` gguf:MXFP4: is for the matrices of experts, as in llama.cpp, and "
            f"{checkpoint.name} has none; choose gguf:Q4_K_M, or mlx:mxfp4 for a folder"
        )
    if Path(out).suffix != ".gguf":
        raise OptionsError(f"{out}: the name of a GGUF file ends in .gguf")
    notices: list[str] = []
    config = checkpoint.config
    family = FAMILIES[config.architecture]
    names, writer = family.names, gguf.GGUFWriter(None, family.gguf)
    _write_settings(writer, checkpoint, format, notices)
    _check_settings(writer, checkpoint)
    _write_vocabulary(writer, checkpoint, notices)

    plan = {}
    numbers = {name for layer in config.layers if layer.mlp for name in layer.mlp.xielu}
    convolutions = {f"{mixer.conv}.weight" for mixer in config.recurrent}
    swaps = writing.swap_heads(config, family.tiles)
    for name, parts in writing.stack_experts(checkpoint).items():
        if name in numbers:
            continue
        if name in convolutions and isinstance(parts[0], Tensor):
            parts = (parts[0].reshape(parts[0].shape[::2]),)
        rows, columns = swaps.get(name, (None, None))
        parts = parts if rows is None else (parts[0].reorder(rows),)
        tensor, order = parts[0], None
        try:
            stored_name = names.gguf(tensor.name)
        except KeyError:
            raise CheckpointError(
                f"{checkpoint.name}: {family.name} has no tensor {show(tensor.name)} in GGUF, "
                "but a larger one that contains it; take the folder as transformers saves it"
            ) from None
        if names.is_permuted(tensor.name):
            order = np.argsort(row_order(tensor.shape[0], config.head_dim))  # its inverse
        kind = choose_type(stored_name, tensor.shape, format, config, family.gguf, bool(importance))
        weights = None
        if importance and len(tensor.shape) == 2:
            weights = importance.find(names.gguf(name), len(parts), tensor.shape[1])
        offset = config.norm_offset if config.is_shifted(tensor.name) else 0.0
        plan[name] = _TensorPlan(
            parts,
            name != tensor.name,
            kind,
            order,
            offset,
            names.is_logarithm(name),
            columns,
            weights,
        )
    if importance:
        _write_importance(writer, importance)
        if not any(item.importance is not None for item in plan.values()):
            raise CheckpointError(
                f"{checkpoint.name}: the importance matrix has none of its matrices, but "
                f"{show(', '.join(sorted(importance.sums)[:2]))}: it was measured on another model"
            )
    for name, item in plan.items():
        stored = gguf.GGMLQuantizationType[item.kind]
        writer.add_tensor_info(names.gguf(name), item.shape, item.written, item.nbytes, stored)
    factors = _frequency_factors(config)
    for name, values in factors.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    kept: dict[tuple[str, str], list[str]] = {}  # {(type, blocks that do not divide rows): names}
    for name, item in plan.items():
        if format not in PLAIN and item.kind == "F16":
            kept.setdefault(("float16", "blocks of 32"), []).append(name)
        elif is_fallback(item.kind, format) and item.tensor.shape[1] % 256:
            kept.setdefault((item.kind, "blocks of 256"), []).append(name)
    for kind, blocks in sorted(kept, key=lambda key: (key[0] != "float16", key)):
        notices += writing.notice_unquantised(kept[kind, blocks], checkpoint, kind, blocks)

    kept_blocks = {name for name, item in plan.items() if all(map(item.keeps_blocks, item.parts))}
    notices = writing.notice_requantised(checkpoint, kept_blocks) + notices

    nbytes = sum(item.nbytes for item in plan.values())
    with replace_when_done(Path(out), nbytes, folder=False) as path:
        try:
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            advance = progress.meter(checkpoint.nbytes)
            for item in plan.values():
                writer.write_tensor_data(item.values(advance, search))
                item.release()
            for values in factors.values():
                writer.write_tensor_data(values)
        finally:
            writer.close()
    return writing.Written(Path(out), nbytes, writing.count_weights(checkpoint), tuple(notices))


@dataclass(frozen=True)
class _TensorPlan(writing.TensorPlan):
    """A tensor and its form in the file."""

    kind: str  # a GGUF type
    order: np.ndarray | None  # as of `convert_slabs`
    offset: float = 0.0  # to add to the values
    is_logarithm: bool = False  # of what is stored with the sign changed
    columns: np.ndarray | None = None  # the source's column for each, None for the same
    importance: np.ndarray | None = None  # float32 [parts, K], of columns

    @property
    def written(self) -> np.dtype:
        """NumPy's dtype of the values to write: bytes for block formats, the bits of bfloat16."""
        dtypes = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
        return np.dtype(dtypes.get(self.kind, np.uint8))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape for add_tensor_info: bytes per row for block formats."""
        from gguf.quants import GGMLQuantizationType, quant_shape_to_byte_shape

        # [C, W] of a convolution's [C, 1, W]
        shape = self.whole((*self.tensor.shape[:1], *self.tensor.shape[1:][-1:]))
        if self.written != np.uint8:
            return shape
        return quant_shape_to_byte_shape(shape, GGMLQuantizationType[self.kind])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.written.itemsize

    def keeps_blocks(self, tensor: Tensor | AffineWeight) -> bool:
        """True for blocks of a GGUF file that have the type already, which are copied."""
        if not isinstance(tensor, GGUFWeight) or tensor.factors is not None:
            return False
        if self.columns is not None:
            return False
        return tensor.format == self.kind

    def values(self, advance: Callable[[int], None], search: Search | None) -> np.ndarray:
        """The values to write, of `written`. Raises CheckpointError."""
        result = np.empty(self.shape, self.written)
        for i, rows in enumerate(result if self.is_stack else (result,)):
            self._fill(rows, i, advance, search)
        return result

    def _fill(
        self, result: np.ndarray, i: int, advance: Callable[[int], None], search: Search | None
    ) -> None:
        tensor, importance = self.parts[i], None if self.importance is None else self.importance[i]
        if isinstance(tensor, GGUFWeight) and self.keeps_blocks(tensor):
            writing.convert_slabs(tensor, lambda *_: None, advance)  # raises if not finite
            order = tensor.order if self.order is None else self.order
            if tensor.order is not None and self.order is not None:
                order = tensor.order[self.order]
            result[:] = tensor.blocks if order is None else tensor.blocks[order]
            return
        dtype = {"F16": "float16", "BF16": "bfloat16"}.get(self.kind, "float32")

        def convert(start: int, rows: np.ndarray) -> None:
            rows = rows if self.columns is None else rows[:, self.columns]
            rows = -np.exp(rows) if self.is_logarithm else rows
            if self.kind == "BF16":
                rows = encode(rows, dtype).view(np.uint16)
            elif self.written == np.uint8:
                rows = quantize(rows, self.kind, importance, search)
                layout = GGUF_FORMATS[self.kind]
                with np.errstate(all="ignore"):
                    scaling = layout.scaling(rows.reshape(-1, layout.nbytes))
                if not all(np.isfinite(values).all() for values in scaling.values()):
                    raise CheckpointError(
                        f"tensor {tensor.name}: holds weights too large for {self.kind}, whose "
                        f"scales are float16; write the MLX form, whose scales can be wider"
                    )
            rows = rows + np.float32(self.offset) if self.offset else rows
            result[start : start + len(rows)] = rows.reshape(-1, *result.shape[1:])

        writing.convert_slabs(tensor, convert, advance, self.order, dtype)


def _frequency_factors(config: LlamaConfig) -> dict[str, np.ndarray]:
    """{tensor: float32 [rotary_dim / 2], the divisors of each pair's frequency}; none for ones."""
    rope = config.rope
    if rope.type == "longrope":
        return {
            "rope_factors_long.weight": np.array(rope.long_factor, np.float32),
            "rope_factors_short.weight": np.array(rope.short_factor, np.float32),
        }
    if rope.type == "proportional":
        is_turned = inverse_frequencies(config)[0] > 0
        return {"rope_freqs.weight": np.where(is_turned, 1, UNROTATED).astype(np.float32)}
    if rope.divisors is not None:
        return {"rope_freqs.weight": np.array(rope.divisors, np.float32)}
    if rope.type != "llama3":
        return {}
    plain = plain_frequencies(rope.theta, config.rotary_dim)
    return {"rope_freqs.weight": (plain / inverse_frequencies(config)[0]).astype(np.float32)}


def _write_settings(writer: Any, checkpoint: Checkpoint, format: str, notices: list[str]) -> None:
    import gguf

    config = checkpoint.config
    # The name is a setting too: by it llama.cpp recognises Phi-3's white space.
    name = (checkpoint.gguf_metadata or {}).get("general.name", Path(checkpoint.name).name)
    writer.add_name(str(name))
    kind = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}.get(format, f"MOSTLY_{format}")
    writer.add_file_type(gguf.LlamaFileType[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    family = FAMILIES[config.architecture]
    fields = family.write_gguf(config) if family.write_gguf else {}
    fields = {"attention.value_length": config.head_dim} | fields
    for key, value in fields.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{family.gguf}.{key}", value)
    for key, entry in {entry.gguf: entry for entry in family.table if entry.gguf}.items():
        if key in fields:
            continue
        value = config.stored(entry)
        if entry.skips_zeros:
            value = [value if layer.attention else 0 for layer in config.layers]
        if isinstance(value, list):
            writer.add_array(f"{family.gguf}.{key}", value)
        elif value is not None or entry.gguf_default is not None:
            adders = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
            adders[entry.kind](f"{family.gguf}.{key}", entry.kind(value or 0))
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope.theta)
    if config.local_rope is not None and family.local_theta and family.local_theta[1]:
        writer.add_float32(f"{family.gguf}.rope.freq_base_swa", config.local_rope.theta)
    xielu = (layer.mlp.xielu for layer in config.layers if layer.mlp)
    for name, tensors in zip(NUMBERS_OF_XIELU, zip(*xielu)):
        numbers = [checkpoint.tensors[tensor].float32().item() for tensor in tensors]
        writer.add_array(f"xielu.{name}", numbers)
    _write_rope_scaling(writer, checkpoint)
    _write_windows(writer, config, notices)


def _write_importance(writer: Any, importance: Importance) -> None:
    writer.add_string("quantize.imatrix.dataset", (importance.datasets or ("text",))[-1])
    writer.add_int32("quantize.imatrix.entries_count", len(importance.sums))
    writer.add_int32("quantize.imatrix.chunks_count", importance.chunks)


def _write_windows(writer: Any, config: LlamaConfig, notices: list[str]) -> None:
    every, layers = config.family.gguf_pattern, config.num_hidden_layers
    window, positions = config.sliding_window, config.max_position_embeddings
    if every:
        writer.add_sliding_window(window or 0)
        slides = [kind != "full_attention" for kind in config.layer_types]
        # the family may write the pattern, too
        if window and not config.family.write_gguf and slides != all_but_each(every, layers):
            writer.add_sliding_window_pattern(slides)
    elif window is not None and window < positions:
        writer.add_sliding_window(window)
        notices.append(
            f"the model looks back {window} tokens at most; the file says so, but llama.cpp "
            "ignores it for this architecture: keep contexts below that"
        )


def _check_settings(writer: Any, checkpoint: Checkpoint) -> None:
    """Check that the settings mean the same model to their reader. Raises ConfigError."""
    config = checkpoint.config
    metadata = {key: entry.value for key, entry in writer.kv_data[0].items()}
    try:
        shapes = config.tensor_shapes()
        again = LlamaConfig.from_gguf(metadata, shapes, {}, config.dtype, checkpoint.name)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rpartition(';')[0]}; write the MLX form") from None
    ours, theirs = _describe(config), _describe(again)
    for name, value in ours.items():
        if value != theirs.get(name):
            raise ConfigError(
                f"{checkpoint.name}: {name} is {show(value)}, where a GGUF file means "
                f"{show(theirs.get(name))} to llama.cpp; write the MLX form"
            )


def _describe(config: LlamaConfig) -> dict[str, Any]:
    """The arithmetic that no field of the table names; a list by layer where layers differ."""
    positions = config.max_position_embeddings
    values = {
        name: getattr(config, name) for name in ("activation", "local_rope", "logits_softcap")
    }
    fields = {entry.name for entry in config.family.table if not entry.gguf}
    values |= {name: config.own.get(name) for name in sorted(fields & {*config.own})}
    mixers = [layer.attention for layer in config.layers if layer.attention]
    for name in ("window", "rotates", "scale", "softcap"):
        layers = [getattr(mixer, name) for mixer in mixers]
        if name == "window":
            layers = [
                None if window is None or window.size >= positions else window.size
                for window in layers
            ]
        values[name] = layers if len(set(layers)) > 1 else layers[0]
    values["states"] = [(mixer.index, mixer.states) for mixer in config.recurrent]
    return values


def _write_rope_scaling(writer: Any, checkpoint: Checkpoint) -> None:
    import gguf

    rope = checkpoint.config.rope
    if rope.type == "dynamic":
        raise ConfigError(
            f"{checkpoint.name}: rope type dynamic depends on the context's length, which a GGUF "
            "file cannot express; write the MLX form"
        )
    if rope.type == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope.attention_factor)
    if rope.type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    if rope.type == "yarn":
        # llama.cpp reads no others here, and rounds the range of pairs for every family.
        truncates = FAMILIES[checkpoint.config.architecture].truncates_yarn
        if (rope.beta_fast, rope.beta_slow, rope.truncate) != (32.0, 1.0, truncates):
            raise ConfigError(
                f"{checkpoint.name}: rope type yarn with beta_fast {rope.beta_fast:g}, beta_slow "
                f"{rope.beta_slow:g} and truncate {rope.truncate}: a GGUF file has only 32, 1 and "
                f"{truncates} for them; write the MLX form"
            )
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_position_embeddings)
        assert rope.factor is not None
        usual = 0.1 * math.log(rope.factor) + 1.0  # llama.cpp's own factor
        if FAMILIES[checkpoint.config.architecture].scales_queries:
            writer.add_rope_scaling_yarn_log_mul(1.0)
            usual = 1.0
        factor = inverse_frequencies(checkpoint.config)[1]
        if not math.isclose(factor, usual, rel_tol=1e-7):
            writer.add_rope_scaling_attn_factors(factor / usual)


def _write_vocabulary(writer: Any, checkpoint: Checkpoint, notices: list[str]) -> None:
    """Write tokenizer.*, llama.cpp's vocabulary. Raises TokenizerError, TemplateError."""
    if checkpoint.gguf_metadata is not None:
        _copy_vocabulary(writer, checkpoint, notices)
        return
    tokenizer, size = checkpoint.tokenizer, checkpoint.config.vocab_size
    vocabulary = _read_vocabulary(checkpoint, notices)
    shown = SHOWN_SPECIALS if vocabulary.model == "gemma4" else ()
    for text, token in tokenizer.added_ids.items():
        if vocabulary.types.get(token) not in (spm.UNKNOWN, spm.BYTE):
            special = text in tokenizer.special_ids and text not in shown
            # llama.cpp finds these in a text before it replaces spaces.
            text = text if special else text.replace(_SPACE, " ")
            kind = spm.CONTROL if special else spm.USER_DEFINED
            vocabulary.set(token, text, kind, -1000.0)
    taken = Counter(vocabulary.texts.values())
    if len(taken) != len(vocabulary.texts):
        [(twice, _)] = taken.most_common(1)
        raise TokenizerError(
            f"{tokenizer.path}: has {show(twice)} twice, which llama.cpp refuses; write the "
            "MLX form"
        )
    for token in range(size):  # the embedding may have more rows than the tokenizer has tokens
        if token not in vocabulary.texts:
            text = f"[PAD{token}]"
            text += "_" if text in taken else ""
            vocabulary.set(token, text, spm.UNUSED, -10000.0)

    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list([vocabulary.texts[token] for token in range(size)])
    if vocabulary.model == "llama":
        writer.add_token_scores([vocabulary.scores[token] for token in range(size)])
    writer.add_token_types([vocabulary.types[token] for token in range(size)])
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    _write_special_ids(writer, checkpoint, notices)
    adds_bos = tokenizer.adds_bos or vocabulary.model == "gemma4"
    if adds_bos and not tokenizer.adds_bos:
        notices.append(
            "programs that read this kind of tokenizer in GGUF files put BOS before each text; "
            "the folder's tokenizer does not"
        )
    writer.add_add_bos_token(adds_bos)
    writer.add_add_eos_token(False)
    if vocabulary.model != "gpt2":
        _write_space_prefix(writer, checkpoint, vocabulary, notices)
    if (template := checkpoint.template) is not None:
        writer.add_chat_template(template.source)
        for name, other in template.named.items():
            writer.add_string(f"tokenizer.chat_template.{name}", other.source)
        if template.named:
            writer.add_array("tokenizer.chat_templates", list(template.named))


def _copy_vocabulary(writer: Any, checkpoint: Checkpoint, notices: list[str]) -> None:
    """Copy tokenizer.* of a GGUF source. Raises TokenizerError for a missing or malformed one."""
    from gguf import GGUFValueType as Type

    assert checkpoint.gguf_metadata is not None
    _ = checkpoint.tokenizer  # raises
    for key, value in checkpoint.gguf_metadata.items():
        if not key.startswith("tokenizer."):
            continue
        if isinstance(value, (str, bool, int, float)):
            writer.add_key_value(key, value, Type[_scalar_type(value)])
        elif not len(value):
            notices.append(
                f"{show(key)} is an empty array, which the gguf library does not write: it is "
                "left out"
            )
        elif isinstance(value, np.ndarray):
            writer.add_key_value(key, value.tolist(), Type.ARRAY, Type[value.dtype.name.upper()])
        else:
            writer.add_key_value(key, list(value), Type.ARRAY, Type.STRING)


def _scalar_type(value: str | bool | int | float) -> str:
    """The GGUF type that holds the value exactly: uint32 and float32 where they suffice."""
    if isinstance(value, bool):
        return "BOOL"
    if isinstance(value, int):
        return "INT64" if value < 0 else "UINT32" if value < 1 << 32 else "UINT64"
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            return "FLOAT64" if float(np.float32(value)) != value == value else "FLOAT32"
    return "STRING"


def _write_special_ids(writer: Any, checkpoint: Checkpoint, notices: list[str]) -> None:
    tokenizer = checkpoint.tokenizer
    if checkpoint.bos_token_id is not None:
        writer.add_bos_token_id(checkpoint.bos_token_id)
    ends = list(dict.fromkeys([*tokenizer.eos_ids, *sorted(checkpoint.eos_token_ids)]))
    for token, add in zip(
        ends, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    ):
        add(token)
    if ends[3:]:
        notices.append(
            f"the model has {len(ends)} end tokens, a GGUF file holds three: {show(ends[3:])} "
            f"{'is' if len(ends) == 4 else 'are'} left out"
        )
    ids = {**tokenizer.added_ids, **tokenizer.special_ids}
    for name in ("unk", "pad"):
        if (text := tokenizer.named.get(f"{name}_token")) in ids:
            getattr(writer, f"add_{name}_token_id")(ids[text])


def _write_space_prefix(
    writer: Any, checkpoint: Checkpoint, vocabulary: _Vocabulary, notices: list[str]
) -> None:
    """Write add_space_prefix, by encoding samples: before texts and after special tokens."""
    tokenizer = checkpoint.tokenizer

    def spell(text: str) -> str:
        return "".join(
            vocabulary.texts[token] for token in tokenizer.encode(text, parse_special=True)
        )

    prefix = spell("a").startswith(_SPACE)
    writer.add_add_space_prefix(prefix)
    specials = tokenizer.special_ids.items()
    special = next((text for text, i in specials if vocabulary.types[i] == spm.CONTROL), "")
    missing = [
        where
        for text, spelled, where in (
            (f"{special}a", f"{special}{_SPACE}a", "after special tokens"),
            (" a", f"{_SPACE * 2}a", "before a text that begins with one"),
        )
        if prefix and spell(text) != spelled
    ]
    if missing:
        notices.append(
            "llama.cpp puts a space before a text and after each special token; this tokenizer "
            f"does not {' or '.join(missing)}, which a GGUF file cannot express"
        )


@dataclass
class _Vocabulary:
    """llama.cpp's vocabulary. model: "llama" (sentencepiece), "gpt2" or "gemma4"; pre: the
    pre-tokenizer.
    """

    model: str
    pre: str
    texts: dict[int, str] = field(default_factory=dict)
    types: dict[int, int] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    merges: list[str] = field(default_factory=list)

    def set(self, token: int, text: str, kind: int, score: float = 0.0) -> None:
        self.texts[token], self.types[token] = text, kind
        self.scores.setdefault(token, score)


def _read_vocabulary(checkpoint: Checkpoint, notices: list[str]) -> _Vocabulary:
    path = checkpoint.path / "tokenizer.model"
    if path.exists():
        return _from_sentencepiece(path)
    path = checkpoint.path / "tokenizer.json"
    if not path.exists() and (tekken := checkpoint.path / "tekken.json").exists():
        raw = json.loads(read_tekken(tekken).to_str())
    else:
        raw = read_json(path, TokenizerError)
    model = raw.get("model", {})
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(
            f"{path}: model is {show(model.get('type'))}, and a GGUF file for llama.cpp takes BPE "
            f"here; write the MLX form"
        )
    listed = (x.split(" ", 1) if isinstance(x, str) else x for x in model["merges"])
    merges: list[tuple[str, ...]] = [tuple(pair) for pair in listed]
    is_byte_level = "ByteLevel" in json.dumps([raw.get("pre_tokenizer"), raw.get("decoder")])
    normalizers = _flatten(raw.get("normalizer"), "normalizers")
    if any(step["type"] == "NFC" for step in normalizers):
        notices.append(
            f"{path.name} composes the characters of a text (NFC), and programs that read GGUF "
            "files do not: a text that is not in NFC has other tokens there"
        )
    for step in normalizers:
        if step["type"] != "NFC" and (is_byte_level or step not in _SPACE_STEPS):
            raise _unnamed(path, f"normalizer {show(step)}")
    pre_tokenizers = _flatten(raw.get("pre_tokenizer"), "pretokenizers")
    if is_byte_level:
        pairs = [" ".join(pair) for pair in merges]
        pre = _pre_tokenizer(pre_tokenizers, model, path, notices)
        result = _Vocabulary("gpt2", pre, merges=pairs)
        for text, token in model["vocab"].items():
            result.set(token, text, spm.NORMAL)
        return result
    for step in pre_tokenizers:
        if step["type"] != "Metaspace" and step.get("pattern") != {"String": " "}:
            raise _unnamed(path, f"pre_tokenizer {show(step)}")
    return _from_merges(model["vocab"], merges, checkpoint.tokenizer, path)


def _flatten(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which sequences hold as `name`."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[name] for inner in _flatten(part, name)]


def _unnamed(path: Path, what: str) -> TokenizerError:
    return TokenizerError(f"{path}: {what} has no name in llama.cpp; write the MLX form")


def _pre_tokenizer(
    pre_tokenizers: Iterable[Mapping[str, Any]],
    model: Mapping[str, Any],
    path: Path,
    notices: list[str],
) -> str:
    """llama.cpp's name for the pre-tokenizer of tokenizer.json. Raises TokenizerError for none."""
    steps: list[str] = []
    for step in pre_tokenizers:
        kind = step.get("type")
        pattern = step["pattern"].get("Regex", "?") if kind == "Split" else ""
        split = step.get("behavior"), bool(step.get("invert"))
        # "Removed" is the text between matches, of which a pattern that takes any text leaves none.
        keeps_text = split == ("Isolated", False) or (
            split == ("Removed", True) and pattern.endswith(r"|\s+")
        )
        if kind == "Split" and keeps_text:
            steps.append(pattern.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", CONTRACTION))
        elif kind == "Digits" and step.get("individual_digits"):
            steps.append(r"\p{N}")
        elif kind == "ByteLevel" and not step.get("add_prefix_space"):
            steps += GPT2 if step.get("use_regex", True) else ()
        else:
            steps.append(f"{kind}?")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise _unnamed(path, f"model.{name}")
    ignores_merges = bool(model.get("ignore_merges"))
    pre = _SPLITS.get((tuple(steps), ignores_merges))
    if pre is None:
        pre = _SPLITS.get((tuple(steps), not ignores_merges))
        if pre is None:
            raise _unnamed(path, f"pre_tokenizer {show(pre_tokenizers)}")
        notices.append(
            f"{path.name} has ignore_merges {ignores_merges}, and llama.cpp's {pre} the opposite: "
            "a word that is a token, but not by its merges, has other tokens there"
        )
    return pre


def _from_sentencepiece(path: Path) -> _Vocabulary:
    """Read tokenizer.model. Raises TokenizerError for settings that llama.cpp ignores."""
    import sentencepiece

    blob = read_file(path, _MODEL_LIMIT)
    sentencepiece.SentencePieceProcessor(model_proto=blob)  # raises for a damaged model
    trainer, normalizer = (spm.read_settings(blob, n) for n in (spm.TRAINER, spm.NORMALIZER))
    if trainer.get(3, 1) != 2:
        raise TokenizerError(
            f"{path}: is a sentencepiece model of type {trainer.get(3, 1)}, and llama.cpp takes "
            "BPE, which is 2, for this architecture; write the MLX form"
        )
    if normalizer.get(2) or normalizer.get(4, 1):
        what = "changes characters" if normalizer.get(2) else "removes extra spaces"
        raise TokenizerError(
            f"{path}: its normalizer {what}, which a GGUF file of this kind cannot express; write "
            "the MLX form"
        )
    result = _Vocabulary("llama", "default")
    for token, (text, score, kind) in enumerate(spm.read_pieces(blob)):
        text = text.replace(_SPACE, " ") if kind == spm.USER_DEFINED else text
        result.set(token, text, kind, score)
    return result


def _from_merges(
    vocab: Mapping[str, int], merges: list[tuple[str, ...]], tokenizer: Tokenizer, path: Path
) -> _Vocabulary:
    """A sentencepiece vocabulary of tokenizer.json with byte fallback; scores are merges' ranks.
    llama.cpp joins any two neighbours whose union is a token, best score first. That equals the
    list of merges only if the list has every such pair, and the pairs of one token are consecutive.

    A file of Gemma 4's kind has the list itself: for a tokenizer with BOS that puts no space before
    a text, and without tokens that continue at a line break, where llama.cpp splits a text.
    """
    result, added = _Vocabulary("llama", "default"), tokenizer.added_ids
    ranks: dict[str, list[int]] = {}
    for rank, (a, b) in enumerate(merges):
        ranks.setdefault(a + b, []).append(rank)
    for text in vocab.keys() - added:
        places = ranks.get(text, [])
        pairs = sum(text[:cut] in vocab and text[cut:] in vocab for cut in range(1, len(text)))
        if len(places) == pairs and (not places or places[-1] - places[0] == len(places) - 1):
            continue
        adds_space = tokenizer.encode("a") != [vocab.get("a")]
        if tokenizer.bos_id is None or adds_space or any({"\n"} < set(x) for x in vocab):
            raise TokenizerError(
                f"{path}: the merges that make {show(text)} are incomplete or not consecutive, "
                "which llama.cpp's scores cannot express; write the MLX form"
            )
        result = _Vocabulary("gemma4", "gemma4", merges=[" ".join(pair) for pair in merges])
        break
    for text, token in vocab.items():
        is_byte, score = re.fullmatch(r"<0x..>", text, re.DOTALL), 0.0
        kind = spm.UNKNOWN if text == "<unk>" else spm.BYTE if is_byte else spm.NORMAL
        if text in ranks:
            score = -float(ranks[text][0] + 1)
        elif len(text) > 1 and kind != spm.BYTE:
            score = -1e6
        result.set(token, text, kind, score)
    return result
