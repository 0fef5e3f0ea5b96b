"""Toy models for the tests: ordinary Hugging Face folders, made in milliseconds, the same for the
same arguments.

folder = make_checkpoint(tmp_path / "toy", dtype="bfloat16", shards=2, num_key_value_heads=1)
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

SENTENCES = (
    "Once upon a time there was a little llama who lived on a hill.",
    "The llama could speak, and every day she told the children a story.",
    "Hello world, this is a test of the tokenizer; it has numbers 0123456789 and more.",
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful assistant. User: hi! Assistant: hello, how can I help you today?",
    "def add(a, b):\n    return a + b\n",
    "Ein Vogel saß auf dem Dach, così è la vita, ça va très bien.",
)


def refusal(
    call: Callable, *args: Any, kind: type[Exception] | None = None, words: Iterable[str] = ()
) -> str:
    """The one-line message of the error that `call` must raise: a CheckpointError, or `kind`.
    words: it contains each of them.
    """
    from mlx_llama.core.errors import CheckpointError

    with pytest.raises(kind or CheckpointError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    missing = [word for word in words if word not in message]
    assert not missing, message
    return message


def fail_at(number: int, error: type[BaseException] | BaseException) -> Callable:
    """A wrapper of functions: the call of this number, of all that it wraps, raises the error."""
    calls = itertools.count(1)

    def wrap(function: Callable) -> Callable:
        def call(*args: Any, **named: Any) -> Any:
            if next(calls) == number:
                raise error
            return function(*args, **named)

        return call

    return wrap


def edit_json(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file's object; ... removes one."""
    raw = json.loads(path.read_text("utf-8")) | fields
    path.write_text(json.dumps({name: raw[name] for name in raw if raw[name] is not ...}), "utf-8")


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + "
    "message['content'] }}"
    "{{ eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% "
    "endif %}"
)

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/tokenizer.json, the split pattern
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIALS = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
).split()


@functools.cache
def sentencepiece_model(
    vocab_size: int = 384, user_defined: tuple[str, ...] = (), control: tuple[str, ...] = ()
) -> bytes:
    """A tokenizer.model like Llama 2's: BPE, byte fallback, digits split, identity normalisation,
    <s> is 1.
    """
    import sentencepiece

    out = io.BytesIO()
    rules = dict(normalization_rule_name="identity", character_coverage=0.99, split_digits=True)
    rules |= dict(remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)
    sentencepiece.SentencePieceTrainer.train(
        **dict(model_type="bpe", vocab_size=vocab_size, byte_fallback=True, **rules),
        **dict(user_defined_symbols=list(user_defined), control_symbols=list(control)),
        **dict(model_writer=out, num_threads=1, minloglevel=2),
        sentence_iterator=iter(line for text in SENTENCES for line in text.splitlines()),
    )
    return out.getvalue()


def sentencepiece_merges(model: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary, merges) of a sentencepiece BPE model, best merge first."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocab = {sp.id_to_piece(i): i for i in range(sp.get_piece_size())}
    merges = []
    for piece, rank in vocab.items():
        if sp.is_byte(rank) or sp.is_control(rank) or sp.is_unknown(rank):
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(a, b) for a, b in pairs if a in vocab and b in vocab]
        merges += [(rank, vocab[a], vocab[b], a, b) for a, b in pairs]
    return vocab, [(a, b) for *_, a, b in sorted(merges)]


@functools.cache
def llama2_json(metaspace: str | None = None) -> str:
    """A tokenizer.json like Llama 2's: normalizer Prepend and Replace, or pre-tokenizer
    Metaspace(metaspace).
    """
    import tokenizers as hf

    vocab, merges = sentencepiece_merges(sentencepiece_model())
    fast = hf.Tokenizer(
        hf.models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace is None:
        fast.normalizer = hf.normalizers.Sequence(
            [hf.normalizers.Prepend("▁"), hf.normalizers.Replace(" ", "▁")]
        )
    else:
        fast.pre_tokenizer = hf.pre_tokenizers.Metaspace("▁", prepend_scheme=metaspace, split=False)
    fast.decoder = hf.decoders.Sequence(
        [
            hf.decoders.Replace("▁", " "),
            hf.decoders.ByteFallback(),
            hf.decoders.Fuse(),
            hf.decoders.Strip(" ", 1, 0),
        ]
    )
    fast.post_processor = hf.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    fast.add_special_tokens(
        [hf.AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    return fast.to_str()


@functools.cache
def byte_level_json(vocab_size: int = 384) -> str:
    """A tokenizer.json like Llama 3's: byte-level BPE, its split pattern, special tokens above the
    vocabulary.
    """
    import tokenizers as hf

    fast = hf.Tokenizer(hf.models.BPE(ignore_merges=True))
    fast.pre_tokenizer = hf.pre_tokenizers.Sequence(
        [
            hf.pre_tokenizers.Split(hf.Regex(LLAMA3_PATTERN), behavior="isolated"),
            hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = hf.decoders.ByteLevel()
    size = vocab_size - len(LLAMA3_SPECIALS)
    alphabet = hf.pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        SENTENCES,
        hf.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    fast.add_special_tokens(
        [hf.AddedToken(token, normalized=False, special=True) for token in LLAMA3_SPECIALS]
    )
    bos = LLAMA3_SPECIALS[0]
    fast.post_processor = hf.processors.Sequence(
        [
            hf.processors.ByteLevel(trim_offsets=True),
            hf.processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, fast.token_to_id(bos))],
            ),
        ]
    )
    return fast.to_str()


def make_tokenizer(folder: Path, kind: str = "sentencepiece", **settings: Any) -> Path:
    """Write tokenizer files into `folder`; `settings` go into tokenizer_config.json (None leaves
    one out).

    kind: "sentencepiece" (tokenizer.model), "llama2" (the same as tokenizer.json), "bytelevel"
    (Llama 3).
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "LlamaTokenizer"}
    config |= {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config |= {"add_bos_token": True, "legacy": False}
    if kind == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    elif kind == "llama2":
        (folder / "tokenizer.json").write_text(llama2_json(), encoding="utf-8")
    elif kind == "bytelevel":
        (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
        config = {"chat_template": CHAT_TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {"bos_token": LLAMA3_SPECIALS[0], "eos_token": LLAMA3_SPECIALS[4]}
    else:
        raise ValueError(kind)
    config |= settings
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def config_fields(**fields: Any) -> dict[str, Any]:
    """A tiny config.json as a dict: 2 layers, width 64, 4 heads of 16 over 2 key-value heads, 384
    tokens.
    """
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "hidden_act": "silu"}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    config |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    kinds = {"Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3", "Mixtral": "mixtral"}
    kinds = {f"{name}ForCausalLM": kind for name, kind in kinds.items()}
    kinds["Qwen3MoeForCausalLM"] = "qwen3_moe"
    architectures = fields.get("architectures")
    if isinstance(architectures, list) and architectures:
        config["model_type"] = kinds.get(architectures[0], "llama")
    return config | fields


def shared_arithmetic(config: Any) -> tuple:
    """The fields of LlamaConfig that all layers share."""
    layer, names = (
        config.layers[0],
        "heads key_value_heads head_dim eps scale softcap query_norm norms_rotated norms_heads",
    )
    shared = tuple(getattr(layer.mixer, name) for name in names.split())
    others = config.activation, config.hidden_size
    return *shared, layer.residual_multiplier, *others


def few_experts(count: int, used: int, normalises: bool = True, **more: Any) -> Any:
    """parts.Experts of `count` experts without names."""
    from mlx_llama.core.models.parts import Experts, Router

    names, router = ("",) * count, Router("", used, normalises=normalises, **more)
    return Experts(router, names, names, names, ("", "", ""), 1)


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights for a config, by Hugging Face names: std 0.1, norms around 1."""
    from mlx_llama.core.models.config import LlamaConfig

    rng, known = np.random.default_rng(seed), LlamaConfig.from_dict(config)
    # Tests edit the tensors of other models by the names of tensor_shapes.
    shapes = known.stored_shapes() if known.recurrent else known.tensor_shapes()
    tensors = {}
    for name, shape in shapes.items():
        noise = 0.1 * rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = noise + np.float32(1.0) if "norm" in name else noise
    return tensors


def stored_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """`random_tensors` by the names in files of a family that fuses none."""
    from mlx_llama.core.models.config import LlamaConfig

    parts = LlamaConfig.from_dict(config).fused_parts()
    return {parts.get(name, (name,))[0]: x for name, x in random_tensors(config).items()}


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 -> bit patterns of bfloat16 (uint16), rounded to nearest even."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)


Encoded = dict[str, tuple[str, tuple[int, ...], bytes]]  # {name: (dtype code, shape, bytes)}


def put_zeros(name: str, code: str, *shape: int) -> Callable[[Encoded], None]:
    """An edit of encoded tensors: zeros of this dtype code and shape under the name."""
    sizes = {"U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F16": 2, "BF16": 2, "F64": 8, "I64": 8}
    data = bytes(math.prod(shape) * sizes.get(code, 4))
    return lambda tensors: tensors.__setitem__(name, (code, shape, data))


def drop(name: str) -> Callable[[Encoded], Any]:
    """An edit of encoded tensors: without this one."""
    return lambda tensors: tensors.pop(name)


def write_safetensors(path: Path, tensors: Encoded) -> None:
    """Write a safetensors file of encoded tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, (code, shape, data) in tensors.items():
        header[name] = {
            "dtype": code,
            "shape": list(shape),
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)


def write_hole(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of bfloat16 zeros that take no room on the disk."""
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def encode_tensor(x: np.ndarray, dtype: str) -> tuple[str, tuple[int, ...], bytes]:
    if dtype == "bfloat16":
        return "BF16", x.shape, to_bfloat16(x).tobytes()
    code = {"float32": "F32", "float16": "F16"}[dtype]
    return code, x.shape, x.astype(dtype).tobytes()


def make_checkpoint(
    folder: Path,
    *,
    dtype: str = "float32",
    shards: int = 1,
    seed: int = 0,
    tokenizer: bool | str = True,
    tensors: dict[str, np.ndarray] | None = None,
    **fields: Any,
) -> Path:
    """Write a random model as a Hugging Face folder; `fields` replace those of `config_fields`.

    tensors: float32 weights in place of random ones. tokenizer: False for none, True for
    sentencepiece, or a kind of `make_tokenizer`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer == "bytelevel":
        fields = {"bos_token_id": 379, "eos_token_id": [380, 383]} | fields
    config = config_fields(torch_dtype=dtype, **fields)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name: encode_tensor(x, dtype)
        for name, x in (tensors or random_tensors(config, seed)).items()
    }
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        names, weight_map = list(tensors), {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            mine = names[i::shards]
            write_safetensors(folder / file, {name: tensors[name] for name in mine})
            weight_map |= dict.fromkeys(mine, file)
        total = sum(len(data) for _, _, data in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if tokenizer:
        make_tokenizer(folder, "sentencepiece" if tokenizer is True else tokenizer)
    return folder


def config_checkpoint(
    config: Any, folder: Path, tensors: dict[str, np.ndarray], dtype: str = "float32"
) -> Any:
    """The Checkpoint of a LlamaConfig that no config.json gives. tensors: its weights by name,
    float32.
    """
    from mlx_llama.core.files.checkpoint import Checkpoint
    from mlx_llama.core.files.fit import select
    from mlx_llama.core.files.safetensors import find_weights

    encoded = {name: encode_tensor(tensors[name], dtype) for name in config.tensor_shapes()}
    write_safetensors(folder / "model.safetensors", encoded)
    selected = select(find_weights(folder), config, folder)
    return Checkpoint(
        "made", folder, config, selected, {}, sum(tensor.nbytes for tensor in selected.values())
    )


def add_family(base: str = "LlamaForCausalLM", **changes: Any) -> str:
    """Add a family that no published model has, and return its name. changes: to `base`."""
    from mlx_llama.core.models.families import FAMILIES

    name = f"{base} {len(FAMILIES)}"
    FAMILIES[name] = dataclasses.replace(FAMILIES[base], name=name, **changes)
    return name
