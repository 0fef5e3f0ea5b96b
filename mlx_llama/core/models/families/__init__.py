"""The families of models that load, a file for each or for a few alike, and how to find the one of
a model's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from mlx_llama.core.errors import ConfigError, show
from mlx_llama.core.models.fields import Reader

from .family import Family

# Files of this folder. Of families with the same name in GGUF, the first is the usual one.
_FILES = (
    "llama mistral llama4 qwen smollm3 granite olmo phi3 gemma gemma4 exaone4 plain apertus "
    "gpt_oss nemotron_nas lfm2 glm4_moe qwen3_next"
).split()
_ALL: tuple[Family, ...] = tuple(
    family for file in _FILES for family in import_module(f".{file}", __name__).FAMILIES
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
BY_SPELLING = FAMILIES | {alias: family for family in _ALL for alias in family.aliases}
BY_MODEL_TYPE = {family.model_type: family for family in _ALL}
BY_GGUF = {family.gguf: family for family in reversed(_ALL)}  # "llama" is Llama, not Mistral
# {name: model_type} of models of images and text
WRAPPERS = dict(family.wrapper for family in _ALL if family.wrapper)


# Parts that this package lacks: (a pattern of the names or fields of models with them, the part,
# models that run in their place)
_ABSENT = (
    ("gemma3n", "AltUp and laurel", "Gemma 4"),
    ("lfm3", "a gate of each head of attention", "LFM2.5"),
    ("kv_lora_rank", "latent attention (MLA)", "GLM-4.5 or Qwen3.5"),
    (r"mamba|\bssm[._]|\bstate_size", "state spaces (Mamba)", "Qwen3.5 or LFM2.5"),
    ("rwkv|wkv", "RWKV's mixing of positions", "Qwen3.5 or LFM2.5"),
    ("vision|image|vl_?(moe)?$", "a tower for images", "Gemma 4 or Qwen3.5, for their text"),
)


def unsupported(fault: str, known: Iterable[str], raw: Mapping[str, Any], name: Any) -> ConfigError:
    """The error for an architecture: what it needs, or those that are supported (`known`). raw: the
    file's fields.
    """
    short = ", ".join(name.removesuffix("ForCausalLM") for name in known)
    reason = f"supported are {short}; load another model"
    marks = [str(mark).lower() for mark in (name, raw.get("model_type"), *raw)]
    for pattern, needed, instead in _ABSENT:
        if any(re.search(pattern, mark) for mark in marks):
            reason = f"it needs {needed}, which this package lacks: load {instead}"
            break
    return ConfigError(f"{fault}: {reason}")


def find_gguf(metadata: Mapping[str, Any]) -> Family | None:
    """The family of a GGUF file, None for an unsupported one."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        return None
    special = (family for family in _ALL if family.gguf == name and family.gguf_mark)
    marked = (family for family in special if metadata.get(f"{name}.{family.gguf_mark}"))
    return next(marked, BY_GGUF.get(name))


def find_family(read: Reader) -> tuple[Family, Reader, bool]:
    """(family, reader of its fields, True with images) of a config.json. Raises ConfigError."""
    names, kind = read.get("architectures", None), read.get("model_type", None)
    is_single = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
    name = names[0] if is_single else None
    flat = BY_SPELLING.get(name or "")
    if flat and flat.wrapper and kind == flat.wrapper[1]:  # mlx_lm takes a text model so
        text = read.raw | {"model_type": flat.model_type}
        read, name = read.inner(read.raw | {"text_config": text}), flat.wrapper[0]
    wrappers = (
        wrapper
        for wrapper, model_type in WRAPPERS.items()
        if name == wrapper or (name is None and kind == model_type)
    )
    if (wrapper := next(wrappers, None)) is not None:
        read = read.inner(_text_part(read, wrapper))
        return BY_MODEL_TYPE[read.raw["model_type"]], read, True
    if isinstance(names, list) and names:
        if name not in BY_SPELLING:
            fault = f"{read.source}: architectures is {show(names)}"
            raise unsupported(fault, FAMILIES, read.raw, name)
        family = BY_SPELLING[name]
        if kind is not None and (not isinstance(kind, str) or BY_MODEL_TYPE.get(kind) != family):
            raise ConfigError(
                f"{read.source}: model_type is {show(kind)}, expected {family.model_type!r} for "
                f"{family.name}; correct one of them"
            )
        return family, read, False
    if names is not None and names != []:
        read.fail("architectures", names, "a list with one name")
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        fault = f"{read.source}: names no architecture (model_type is {show(kind)})"
        raise unsupported(fault, FAMILIES, read.raw, kind)
    return BY_MODEL_TYPE[kind], read, False


def _text_part(read: Reader, wrapper: str) -> dict[str, Any]:
    """The fields of the text model, which the outer ones complete."""
    if read.get("model_type", WRAPPERS[wrapper]) != WRAPPERS[wrapper]:
        raise ConfigError(
            f"{read.source}: model_type is {show(read.raw['model_type'])}, expected "
            f"{WRAPPERS[wrapper]!r} for {wrapper}; correct one of them"
        )
    text = read.get("text_config", None)
    kind = text.get("model_type") if isinstance(text, dict) else text
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        fault = f"{read.source}: text_config.model_type is {show(kind)}"
        raise unsupported(fault, BY_MODEL_TYPE, text if isinstance(text, dict) else {}, kind)
    outer = (
        "quantization quantization_config torch_dtype dtype bos_token_id eos_token_id "
        "tie_word_embeddings"
    ).split()
    parts = {name: read.raw[name] for name in outer if read.raw.get(name) is not None}
    parts |= {name: value for name, value in text.items() if value is not None or name not in parts}
    if isinstance(packing := parts.get("quantization"), dict):
        parts["quantization"] = {
            strip_wrapper(name): value for name, value in packing.items() if strip_wrapper(name)
        }
    return parts


def strip_wrapper(name: str) -> str | None:
    """A tensor's or module's name in the text model; None for one of the other parts."""
    for prefix, replacement in (("language_model.", ""), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    others = (
        "vision_tower.",
        "vision_model.",
        "vision_embedder.",
        "visual.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "multi_modal_projector.",
    )
    return None if name.removeprefix("model.").startswith(others) else name
