"""A preflight: what is wrong with a model, and what this machine can do with it, told from headers and settings alone.

No weight is read and no framework imported, so that the answer comes within a second whatever the model's size.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_llama.core.backends.positions import position_nbytes
from mlx_llama.core.errors import CheckpointError, ConfigError, LlamaError
from mlx_llama.core.files import hub
from mlx_llama.core.files.checkpoint import GUIDE_PATH, Checkpoint, find_local, find_weights, misfits, open_checkpoint
from mlx_llama.core.files.gguf import GGUFFile
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.generation.llm import context_size
from mlx_llama.core.generation.options import resolve
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig, read_json, show
from mlx_llama.core.system import machine
from mlx_llama.core.text.template import ChatTemplate, encode_messages, missing_template
from mlx_llama.core.text.tokenizer import Tokenizer

from .inventory import BackendFacts, Gpus, automatic, take_stock

CPU_PEAK = 1.25  # memory over file size while the cpu backend loads: 1.1 to 1.25 measured (README, Figures)
USEFUL_CONTEXT = 2048  # positions; a first choice that holds fewer gives way to a backend that holds more
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_GROUPS = {"embed_tokens": "embedding", "self_attn": "attention", "mlp": "mlp", "lm_head": "head"}  # else norms


@dataclass(frozen=True)
class Finding:
    """One line for the user: what was found, where, what to do.

    level: "error" (keeps the model from running), "warning" (it runs, and not as one would think) or "note".
    about: "machine", "config", "weights", "tokenizer", "template", "generation" or "memory".
    """

    level: str
    about: str
    message: str


@dataclass(frozen=True)
class Fit:
    """What a backend makes of the model.

    computes_in: dtype of the activations; low_bit: how low-bit weights are multiplied, "" where there are none.
    weights_bytes: that the weights take there; cache_bytes_per_1000: of keys and values of 1000 positions.
    longest_context: positions that fit the memory beside the weights (keys and values count twice: while their storage
    grows, the old one is still there), at most what the model was made for; None: the memory is unknown.
    fits: the weights and the wanted context, or any; None: unknown.
    """

    backend: str
    computes_in: str
    low_bit: str
    weights_bytes: int
    cache_bytes_per_1000: int
    longest_context: int | None
    fits: bool | None


@dataclass
class Diagnosis:
    """All that was found. `model`, `groups`, `tokenizer` and `template` are empty where nothing is known of them."""

    machine: dict[str, Any]
    backends: list[BackendFacts]
    auto: str
    name: str
    path: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    fits: list[Fit] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    command: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the model can be run on some backend here."""
        return not any(finding.level == "error" for finding in self.findings)

    def facts(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"ok": self.ok, **asdict(self)}

    def add(self, level: str, about: str, message: object) -> None:
        """Append a finding, once."""
        finding = Finding(level, about, " ".join(str(message).split("\n")))
        if finding.message not in {one.message for one in self.findings}:
            self.findings.append(finding)


def diagnose(name: str | os.PathLike | None = None, revision: str | None = None,
             ctx_size: int | str | None = None) -> Diagnosis:
    """Look at this machine and at a model, named as in `open_checkpoint`; of a hub id at what the cache holds.

    What is wrong with the model or the machine is a finding. Raises ContextError for a ctx_size that the model was not
    made for.
    """
    gpus = Gpus()  # answers while the model is looked at
    label = "guide" if name is None else os.fspath(name)
    found = Diagnosis({}, [], "", label)
    opened = _open(found, name, revision)
    if opened is not None:
        _describe(found, opened)
        _look_at_text(found, opened.tokenizer_config, opened)
    found.machine = {
        "system": platform.system(), "machine": platform.machine(), "python": platform.python_version(),
        "physical_cores": machine.physical_cores(), "free_memory_bytes": machine.free_memory(),
    }  # fmt: skip
    if gpus.first:
        found.machine["gpu"] = {"name": gpus.first[0], "free_memory_bytes": gpus.first[1]}
    found.backends = take_stock(gpus)
    found.auto = automatic(found.backends)
    for one in found.backends:
        if one.name == "cpu" and not one.available:  # which every machine could have
            found.add("warning", "machine", one.reason)
    if opened is not None and opened.checkpoint is not None:
        wanted = None if ctx_size is None else context_size(opened.checkpoint, ctx_size)
        _fit(found, opened.checkpoint, revision, wanted, name is None)
    return found


# The model


@dataclass
class _Opened:
    """As much of a model as can be read. checkpoint: None where `open_checkpoint` refuses it. tokenizer_config: the
    model's, or a stand-in that lets the tokenizer be looked at where the model's is wrong."""

    path: Path
    checkpoint: Checkpoint | None
    config: LlamaConfig | None
    tokenizer_config: LlamaConfig
    metadata: dict[str, Any] | None = None  # of a GGUF file

    @cached_property
    def files(self) -> Checkpoint:
        """The checkpoint, or its settings, tokenizer and template alone."""
        if self.checkpoint is not None:
            return self.checkpoint
        return Checkpoint(str(self.path), self.path, self.tokenizer_config, {}, {}, 0, self.metadata)


def _open(found: Diagnosis, name: str | os.PathLike | None, revision: str | None) -> _Opened | None:
    try:
        path = _find(name, revision)
    except LlamaError as error:
        found.add("error", "weights", error)
        return None
    found.path = str(path)
    try:
        checkpoint = open_checkpoint(path)
        return _Opened(path, checkpoint, checkpoint.config, checkpoint.config, checkpoint.gguf_metadata)
    except LlamaError as error:
        first = error
    opened = _open_gguf_in_part(found, path) if path.is_file() else _open_folder_in_part(found, path)
    found.add("error", "config" if isinstance(first, ConfigError) else "weights", first)
    return opened


def _find(name: str | os.PathLike | None, revision: str | None) -> Path:
    """The folder or .gguf file on this disk; nothing is downloaded. Raises CheckpointError."""
    label = "guide" if name is None else os.fspath(name)
    if name is None or (label == "guide" and not Path(label).is_dir()):
        return GUIDE_PATH
    if hub.gguf_in_hub(label):
        return hub.fetch_gguf(label, revision, local_only=True)
    if hub.is_hub_id(label):
        folder = hub.fetch(label, revision, local_only=True)
        if not (folder / "config.json").exists():
            raise CheckpointError(f"model {label}: has no config.json in the local cache; fetch it with `hf download "
                                  f"{label}`, or if it holds GGUF files, name one: {label}:FILE.gguf")
        return folder
    if revision is not None:
        raise CheckpointError(f"model {label}: is a path, and only hub ids have a revision; leave it away")
    return find_local(label)


def _open_folder_in_part(found: Diagnosis, folder: Path) -> _Opened:
    config, stand_in = None, _stand_in()
    try:
        raw = read_json(folder / "config.json", ConfigError)
        config, stand_in = _read_config(found, raw, str(folder / "config.json"))
    except ConfigError as error:
        found.add("error", "config", error)
    damaged: list[LlamaError] = []
    try:
        weights = find_weights(folder, damaged.append)
        if config is not None:
            damaged += misfits(weights, config, folder, complete=not damaged)
    except CheckpointError as error:
        damaged.append(error)
    for error in damaged:
        found.add("error", "weights", error)
    return _Opened(folder, None, config, stand_in)


def _open_gguf_in_part(found: Diagnosis, path: Path) -> _Opened | None:
    refused: list[LlamaError] = []
    try:
        file = GGUFFile(path, refused.append)
    except CheckpointError as error:
        refused.append(error)
        file = None
    for error in refused:
        found.add("error", "weights", error)
    if file is None:
        return None
    try:
        config = file.config
    except LlamaError as error:
        found.add("error", "config", error)
        tokens = file.metadata.get("tokenizer.ggml.tokens", ())
        size = 0 if isinstance(tokens, (str, int, float)) else len(tokens)
        return _Opened(path, None, None, _stand_in(size), file.metadata)
    weights = {name: (file, name) for name in file.names}
    for error in misfits(weights, config, path, "its metadata", complete=not refused):
        found.add("error", "weights", error)
    return _Opened(path, None, config, config, file.metadata)


# What takes the place of a field that is wrong, so that the next one can be looked at: large enough for any other field
_REPAIRS: dict[str, dict[str, Any]] = {
    "vocab_size": {"vocab_size": 1 << 24},
    "hidden_size": {"hidden_size": 1 << 20, "head_dim": 128},
    "intermediate_size": {"intermediate_size": 1 << 22},
    "num_hidden_layers": {"num_hidden_layers": 1 << 12, "layer_types": None, "quantization": None,
                          "quantization_config": None},
    "num_attention_heads": {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 128},
}  # fmt: skip


def _stand_in(vocab_size: int = 0) -> LlamaConfig:
    fields = {"model_type": "llama", "num_attention_heads": 1, "hidden_size": 2, "intermediate_size": 1, "head_dim": 2,
              "num_hidden_layers": 1, "vocab_size": vocab_size or 1 << 24, "eos_token_id": None, "bos_token_id": None}
    return LlamaConfig.from_dict(fields)


def _read_config(found: Diagnosis, raw: dict[str, Any], source: str) -> tuple[LlamaConfig | None, LlamaConfig]:
    """(the config or None, the config or one that stands in for it), every bad field a finding.

    `from_dict` stops at the first: the field whose repair makes its message go away is the one it meant, and with that
    repair it goes on to the next.
    """
    def read(fields: dict[str, Any]) -> LlamaConfig | str:
        try:
            return LlamaConfig.from_dict(fields, source)
        except ConfigError as error:
            return str(error)

    result, repaired = read(raw), False
    architecture = {name: raw[name] for name in ("architectures", "model_type") if name in raw}
    minimal = {"vocab_size": 1 << 24, "hidden_size": 2, "num_attention_heads": 1, "num_hidden_layers": 1,
               "intermediate_size": 1, "eos_token_id": None, "bos_token_id": None}
    if isinstance(result, str) and isinstance(read(minimal | architecture), str):
        found.add("error", "config", result)  # another architecture's fields mean what they mean there
        return None, _stand_in()
    while isinstance(result, str):
        found.add("error", "config", result)
        repaired = True
        for name in (*raw, *_REPAIRS):
            changed = {key: value for key, value in raw.items() if key != name} | _REPAIRS.get(name, {})
            after = read(changed)
            if after != result:
                raw, result = changed, after
                break
        else:
            return None, _stand_in()
    return (None if repaired else result), result


# What it is


def _describe(found: Diagnosis, opened: _Opened) -> None:
    config = opened.config
    if config is None:
        return
    shapes = config.tensor_shapes()
    found.model = {
        "architecture": config.architecture, "parameters": sum(map(math.prod, shapes.values())),
        "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "rope_type": config.rope.type, "rope_theta": config.rope.theta, "rope_factor": config.rope.factor,
        "context_length": config.max_position_embeddings, "longest_context": rope.max_context(config),
        "sliding_window": config.sliding_window, "tied_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias,
    }  # fmt: skip
    if opened.checkpoint is None:
        return
    found.model |= {"dtype": opened.checkpoint.dtype, "nbytes": opened.checkpoint.nbytes}
    groups: dict[str, dict[str, Any]] = {}
    for name, tensor in opened.checkpoint.tensors.items():
        part = next((group for key, group in _GROUPS.items() if f".{key}." in f".{name}"), "norms")
        group = groups.setdefault(part, {"group": part, "tensors": 0, "nbytes": 0, "formats": {}})
        kind = _format(tensor)
        group["tensors"] += 1
        group["nbytes"] += tensor.nbytes
        group["formats"][kind] = group["formats"].get(kind, 0) + 1
    found.groups = list(groups.values())


def _format(tensor: Any) -> str:
    if not isinstance(tensor, AffineWeight):
        return tensor.dtype
    return tensor.format if tensor.format != "affine" else f"affine {tensor.bits}-bit, groups of {tensor.group_size}"


# Tokenizer, template, end tokens


def _look_at_text(found: Diagnosis, config: LlamaConfig, opened: _Opened) -> None:
    files, generation = opened.files, _generation_config(found, opened)
    try:
        tokenizer = files.tokenizer
    except LlamaError as error:
        found.add("error", "tokenizer", error)
        return
    kind = "byte-level BPE" if tokenizer.byte_level else "SentencePiece"
    found.tokenizer = {"kind": kind, "file": str(tokenizer.path), "vocab_size": tokenizer.vocab_size}
    if opened.config is not None and tokenizer.vocab_size < config.vocab_size:
        share, rows = tokenizer.vocab_size / config.vocab_size, f"{config.vocab_size} rows"
        padded = f"{tokenizer.path}: knows {tokenizer.vocab_size} tokens, and the model's embedding has {rows}"
        if share < 0.9:  # padding adds a few hundred rows to tens of thousands
            found.add("warning", "tokenizer",
                      f"{padded}: more than padding explains, and what the model says beyond them has "
                      "no text; take tokenizer and model from the same place")
        else:
            found.add("note", "tokenizer", f"{padded}: the others are padding, and have no text")
    ends = _look_at_ends(found, opened, tokenizer, generation)
    try:
        template = files.template
    except LlamaError as error:
        found.add("error", "template", error)
        return
    if template is None:
        found.add("warning", "template", missing_template(found.name))
    else:
        try:
            _look_at_template(found, opened, tokenizer, template, ends)
        except LlamaError as error:
            found.add("error", "template", error)


def _generation_config(found: Diagnosis, opened: _Opened) -> dict[str, Any]:
    path = opened.path / "generation_config.json"
    if opened.metadata is not None or not path.exists():
        return {}
    try:
        generation = read_json(path, ConfigError)
        for notice in resolve({}, generation, str(path)).notices:
            found.add("note", "generation",
                      f"{path}: {notice.removeprefix('generation_config.json ')}; it has no effect")
    except LlamaError as error:
        found.add("error", "generation", error)
        return {}
    return generation


def _quoted(tokenizer: Tokenizer, one: int) -> str:
    piece = tokenizer.piece(one)
    return "no token" if piece is None else show(piece.data.decode("utf-8", "replace"), 40)


def _look_at_ends(found: Diagnosis, opened: _Opened, tokenizer: Tokenizer,
                  generation: dict[str, Any]) -> frozenset[int]:
    """The ids of the end tokens, wherever they come from."""
    source = opened.path if opened.metadata is not None else opened.path / "config.json"
    in_config = () if opened.config is None else opened.config.eos_token_ids
    listed = generation.get("eos_token_id")
    listed = [one for one in (listed if isinstance(listed, list) else [listed]) if isinstance(one, int)]
    ends = frozenset((*in_config, *listed, *tokenizer.eos_ids))
    if opened.checkpoint is not None:
        ends = opened.checkpoint.eos_token_ids
    vocab = max(opened.tokenizer_config.vocab_size, tokenizer.vocab_size)
    found.tokenizer |= {
        "bos": tokenizer.bos_id, "adds_bos": tokenizer.adds_bos, "eos": sorted(ends),
        "eos_of": {"config": list(in_config), "generation_config": listed, "tokenizer": list(tokenizer.eos_ids)},
        "texts": {one: _quoted(tokenizer, one) for one in sorted({*ends, *([] if tokenizer.bos_id is None else
                                                                        [tokenizer.bos_id])}) if 0 <= one < vocab},
    }  # fmt: skip
    special = set(tokenizer.special_ids.values())
    if not ends:
        found.add("warning", "tokenizer",
                  f"{source}: neither it nor the tokenizer names an end token (eos_token_id): every "
                  f"answer goes on until --max-tokens; {_name_end(opened, None)}")
    for one in sorted(ends - special):
        if 0 <= one < vocab and tokenizer.piece(one) is not None:
            named = "eos_token_id" in _raw_config(opened) or opened.metadata is not None or one not in in_config
            where = f"{source}: eos_token_id" if named else f"{source}: has no eos_token_id, and its default"
            found.add("warning", "tokenizer",
                      f"{where} {one} is {_quoted(tokenizer, one)}, not a special token: an answer ends "
                      f"wherever the model writes it; {_name_end(opened, None)}")
        else:
            found.add("note", "tokenizer",
                      f"{source}: end token {one} is no token of {tokenizer.path.name}; it is never written")
    bos = _raw_config(opened).get("bos_token_id")
    if isinstance(bos, int) and tokenizer.bos_id is not None and bos != tokenizer.bos_id:
        found.add("note", "tokenizer", f"{source}: bos_token_id is {bos}, the tokenizer's BOS is {tokenizer.bos_id} "
                  f"({_quoted(tokenizer, tokenizer.bos_id)}); the tokenizer's is used")
    return ends


def _raw_config(opened: _Opened) -> dict[str, Any]:
    try:
        return {} if opened.metadata is not None else read_json(opened.path / "config.json", ConfigError)
    except ConfigError:
        return {}


def _name_end(opened: _Opened, one: int | None) -> str:
    """How to make a token one that ends answers."""
    which = "the id of the token that ends a turn" if one is None else str(one)
    if opened.metadata is None:
        return f"put {which} into eos_token_id of {opened.path / 'generation_config.json'}"
    if "tokenizer.ggml.eos_token_id" in opened.metadata:
        number = "ID" if one is None else one
        return f"set it with: gguf-set-metadata {shlex.quote(str(opened.path))} tokenizer.ggml.eos_token_id {number}"
    return "convert the model again, with tokenizer.ggml.eos_token_id"


_QUESTION, _ANSWER = "Hello", "Fine."


def _look_at_template(found: Diagnosis, opened: _Opened, tokenizer: Tokenizer, template: ChatTemplate,
                      ends: frozenset[int]) -> None:
    """Render one question and one answer, and see how the texts begin and end. Raises TemplateError, TokenizerError."""
    question = {"role": "user", "content": _QUESTION}
    prompt = template.render([question])
    ids = encode_messages(tokenizer, template, [question])
    bos = None if tokenizer.bos_id is None else _quoted(tokenizer, tokenizer.bos_id)
    count = next((i for i, one in enumerate(ids) if one != tokenizer.bos_id), len(ids))
    text = tokenizer.named.get("bos_token", "")
    writes = bool(text) and prompt.lstrip().startswith(text)
    found.template = {"name": template.name, "writes_bos": writes, "bos_tokens": count, "prompt": show(prompt, 200),
                      "turn_end": None}  # fmt: skip
    if count > 1:
        found.add("warning", "template",
                  f"{template.name}: begins a conversation with BOS ({bos}) {count} times, expected once; "
                  "take it out of the template")
    elif writes and tokenizer.adds_bos:
        found.add("note", "template",
                  f"{template.name}: writes BOS ({bos}), which the tokenizer would add too; it stands once")
    elif bos and count == 0:
        found.add("note", "template",
                  f"{template.name}: writes no BOS ({bos}), and the tokenizer adds none: conversations begin "
                  "without it")

    whole = template.render([question, {"role": "assistant", "content": _ANSWER}], add_generation_prompt=False)
    head, separator, tail = whole.rpartition(_ANSWER)
    tail = tail.strip()
    if not separator or not tail:
        return  # nothing ends a turn but what the model itself learned
    before = tokenizer.encode_parts([head + separator])
    [end, *_] = tokenizer.encode_parts([head + separator, tail])[len(before):] or [None]
    if end in tokenizer.added_ids.values():
        found.template["turn_end"] = end
        if end not in ends:
            found.add("warning", "template",
                      f"{template.name}: ends a turn with {_quoted(tokenizer, end)} ({end}), which is not "
                      f"among the end tokens ({', '.join(map(str, sorted(ends))) or 'none'}): answers run on into the "
                      f"next turn; {_name_end(opened, end)}")
    else:
        found.add("warning", "template",
                  f"{template.name}: ends a turn with {show(tail, 40)}, which is text and not a token of "
                  f"this tokenizer: answers may run on into the next turn; stop there with --stop "
                  f"{shlex.quote(tail[:40])}")


# Both together


def _fit(found: Diagnosis, checkpoint: Checkpoint, revision: str | None, wanted: int | None, is_default: bool) -> None:
    tensors = checkpoint.tensors.values()
    low_bit = [tensor for tensor in tensors if isinstance(tensor, AffineWeight)]
    plain = sum(math.prod(tensor.shape) for tensor in tensors if not isinstance(tensor, AffineWeight))
    longest = rope.max_context(checkpoint.config)
    for one in found.backends:
        if not one.available:
            continue
        dtype = checkpoint.dtype
        if one.name == "cpu":
            dtype, weights = "float32", int(checkpoint.nbytes * CPU_PEAK)
            times = "16-bit integers" if one.kernels else "float32"
        else:
            if one.name == "cuda" and dtype == "bfloat16" and not one.has_bfloat16:
                dtype = "float16"
            times, sizes = dtype, [tensor.nbytes for tensor in low_bit]
            if one.name == "mlx":
                # as mlx_native keeps them: codes, and scales and biases in a dtype that holds them exactly
                on_gpu = one.gpu is not False
                products = [dtype if on_gpu and tensor.scale_dtype == dtype and not tensor.two_level else "float32"
                            for tensor in low_bit]
                times = " or ".join(dict.fromkeys(products))
                sizes = [math.prod(tensor.shape) * tensor.bits // 8 + 2 * (math.prod(tensor.shape) // tensor.group_size)
                         * _BYTES[product]
                         for tensor, product in zip(low_bit, products)]
            weights = sum(sizes) + plain * _BYTES[dtype]
        per_position = position_nbytes(checkpoint.config, _BYTES[dtype])
        most = fits = None
        if one.memory_bytes is not None:
            most = max(0, min(longest, (one.memory_bytes - weights) // (2 * per_position)))
            fits = most >= (wanted or 1)
        found.fits.append(Fit(one.name, dtype, times if low_bit else "", weights, 1000 * per_position, most, fits))
    _choose(found, checkpoint, revision, wanted, is_default)


def _choose(found: Diagnosis, checkpoint: Checkpoint, revision: str | None, wanted: int | None,
            is_default: bool) -> None:
    """The command to run next, and what stands in its way."""
    facts = {one.name: one for one in found.backends}
    made_for = checkpoint.config.max_position_embeddings

    def rank(fit: Fit) -> tuple:
        """The automatic choice first, if it holds enough; another framework's CPU device, a slow detour, last."""
        holds = fit.longest_context is None or fit.longest_context >= (wanted or min(made_for, USEFUL_CONTEXT))
        return not holds, fit.backend != found.auto, bool(facts[fit.backend].flags), -(fit.longest_context or 0)

    order = sorted(found.fits, key=rank)
    chosen = next((fit for fit in order if fit.fits is not False), None)
    if chosen is None:
        best = max(order, key=lambda fit: fit.longest_context or 0, default=None)
        room = ", ".join(f"{fit.backend} {gigabytes(facts[fit.backend].memory_bytes)}" for fit in order)
        if best is None:
            found.add("error", "machine", "no backend can be used here; see why beside each")
        elif best.longest_context and wanted:
            found.add("error", "memory",
                      f"--ctx-size {wanted}: memory has room for {best.longest_context} positions on "
                      f"{best.backend}; ask for {best.longest_context} or fewer")
        else:
            found.add("error", "memory",
                      f"{found.name}: the weights take {gigabytes(checkpoint.nbytes)}, and there is room for "
                      f"{room}; {_remedy(found, checkpoint, facts)}")
        return
    if chosen.backend != found.auto:
        found.add("note", "memory",
                  f"--backend auto takes {found.auto}, whose memory is too small for it; {chosen.backend} has "
                  "room")
    arguments = [] if is_default else ["--model", shlex.quote(found.name)]
    arguments += [] if revision is None else ["--revision", shlex.quote(revision)]
    if chosen.backend != found.auto:
        arguments += ["--backend", chosen.backend, *facts[chosen.backend].flags]
    longest = chosen.longest_context
    if wanted is not None:
        arguments += ["--ctx-size", str(wanted)]
    elif longest is not None and longest < made_for:
        found.add("note", "memory",
                  f"the model was made for {made_for} positions, and memory has room for {longest} on "
                  f"{chosen.backend}; --ctx-size keeps within it")
        arguments += ["--ctx-size", str(longest)]
    chats = bool(found.template)
    door = "chat" if chats else "generate"
    prompt = [] if chats else ["-p", '"Once upon a time"']
    if found.ok:
        found.command = " ".join(["python -m mlx_llama." + door, *arguments, *prompt])


def _remedy(found: Diagnosis, checkpoint: Checkpoint, facts: dict[str, BackendFacts]) -> str:
    config, tensors = checkpoint.config, checkpoint.tensors.values()
    most = max((facts[fit.backend].memory_bytes or 0 for fit in found.fits), default=0)
    low_bit = any(isinstance(tensor, AffineWeight) for tensor in tensors)
    group = next((size for size in (64, 32) if not any(len(tensor.shape) == 2 and tensor.shape[1] % size
                                                       for tensor in tensors)), None)
    four_bit = sum(map(math.prod, config.tensor_shapes().values())) * (4 + 32 / (group or 64)) / 8
    if low_bit or group is None or four_bit * CPU_PEAK > most:
        return "choose a smaller model, or close other programs"
    flags = "" if group == 64 else f" --group-size {group}"
    out = re.sub(r"\.gguf$", "", found.name.rstrip("/\\").replace("\\", "/").split("/")[-1].split(":")[-1]) + "-4bit"
    found.command = f"python -m mlx_llama.quantize {shlex.quote(found.name)} {shlex.quote(out)} --bits 4{flags}"
    return f"quantise it to {gigabytes(int(four_bit))}: {found.command}"


def gigabytes(nbytes: int | None) -> str:
    """A size for people."""
    if nbytes is None:
        return "an unknown amount"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
