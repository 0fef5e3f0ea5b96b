"""Settings of a GGUF file as files of a folder: config.json, tokenizer, template, end tokens."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama.core.errors import ConfigError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models.config import LlamaConfig, RopeConfig
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.models.families.family import Family
from mlx_llama.core.models.rope import inverse_frequencies, plain_frequencies
from mlx_llama.core.text.gguf_tokenizer import ByteLevelVocabulary, SentencePieceVocabulary
from mlx_llama.core.text.sentencepiece_model import set_space_prefix
from mlx_llama.core.text.template import NAMED_FILE


def make_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of the same model. Raises ConfigError: config.json has no fields for the file's
    rope, or no architecture with its window and biases.
    """
    config = checkpoint.config
    families = (FAMILIES[config.architecture], *FAMILIES.values())
    family = next((family for family in families if _can_express(family, config)), None)
    if family is None:
        raise ConfigError(
            f"{checkpoint.path}: no architecture of config.json has its sliding window and biases; "
            "write a GGUF file"
        )
    result = {field.json: config.stored(field) for field in family.table if field.json}
    result |= {name: value for name, (value, _) in family.neutral.items()}
    result |= {
        "architectures": [family.name],
        "model_type": family.model_type,
        "torch_dtype": checkpoint.dtype,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(checkpoint.eos_token_ids),
        family.activation[0]: family.activation[1],
    }
    if family.window:
        is_on = config.sliding_window is not None
        result |= {family.window: config.sliding_window, "use_sliding_window": is_on}
        # mlx_lm fails on a Mistral that names its layers
        if len({*config.layer_types}) > 1 or "max_window_layers" in family.defaults:
            result["layer_types"] = list(config.layer_types)
    if family.partial_rotation:
        result["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    if family.write:
        result |= family.write(config)
    if "rope_parameters" in result:
        return result
    if config.local_rope is not None and family.local_theta:
        result[family.local_theta[0]] = config.local_rope.theta
    theta, scaling = {"rope_theta": config.rope.theta}, _rope_scaling(config, checkpoint.path)
    result |= theta
    if family.scales_queries:
        beta = {"llama_4_scaling_beta": config.own["query_beta"]}
        return result | {"rope_parameters": (scaling or {}) | theta | beta}
    return result | {"rope_scaling": scaling}


def _can_express(family: Family, config: LlamaConfig) -> bool:
    """The family has the config's biases, norms and window, which transformers' classes fix."""
    qkv, out = family.attention_biases
    biases = (
        (qkv, config.attention_bias),
        (family.mlp_bias, config.mlp_bias),
        (config.attention_bias if out is None else out, config.output_bias),
    )
    # the same but for biases and windows
    plain = "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"
    return (
        all(decided in (None, has_bias) for decided, has_bias in biases)
        and (family.window or config.sliding_window is None)
        and (family.name == config.architecture or {family.name, config.architecture} <= set(plain))
    )


def _rope_scaling(config: LlamaConfig, source: Path) -> dict[str, Any] | None:
    rope = config.rope
    if rope.divisors is not None and any(divisor != 1 for divisor in rope.divisors):
        fitted = _fit_llama3(config)
        if fitted is None:
            raise ConfigError(
                f"{source}: rope_freqs.weight holds factors that are not Llama 3's, which "
                "config.json cannot express; write a GGUF file"
            )
        rope = fitted
    if rope.type == "default":
        return None
    return {"rope_type": rope.type} | {
        name: value
        for name, value in dataclasses.asdict(rope).items()
        if value is not None and name not in ("type", "divisors", "theta", "dim")
    }


def _fit_llama3(config: LlamaConfig) -> RopeConfig | None:
    """Parameters of type "llama3" that give the file's frequencies, or None.

    Llama 3 divides low frequencies by `factor` and keeps high ones; between, the kept share grows
    linearly with the frequency. Only two of the three other parameters are free: low_freq_factor is
    1, as in every known model.
    """
    rope, wanted = config.rope, inverse_frequencies(config)[0]
    if rope.type != "default" or rope.divisors is None:
        return None
    kept, factor = 1 / np.array(rope.divisors), max(rope.divisors)
    between = (kept > kept.min() * (1 + 1e-6)) & (kept < 1 - 1e-6)
    plain = plain_frequencies(rope.theta, config.rotary_dim)
    if between.sum() >= 2:
        share, unit = (kept[between] - 1 / factor) / (1 - 1 / factor), plain[between].max()
        slope, start = np.polyfit(plain[between] / unit, share, 1)
        if slope <= 0 or start >= 0:
            return None
        high = 1 - 1 / start
        original = slope / unit * 2 * math.pi * (high - 1)
    else:
        high, original = 4.0, 8192.0  # too few points to fit: take Llama 3's
        is_kept = kept >= 1 - 1e-6
        if not between.any() and is_kept.any():  # Llama 4 Scout's, where none are blended
            edge = math.sqrt(plain[is_kept].min() * plain[~is_kept].max())
            high, original = 1.0, 2 * math.pi / edge
    if not 1 <= original < 1 << 30:
        return None
    fitted = dataclasses.replace(rope, type="llama3", divisors=None, factor=factor)
    fitted = dataclasses.replace(fitted, low_freq_factor=1.0, high_freq_factor=round(high, 4))
    fitted = dataclasses.replace(fitted, original_max_position_embeddings=round(original))
    frequencies = inverse_frequencies(dataclasses.replace(config, rope=fitted))[0]
    return fitted if np.allclose(frequencies, wanted, rtol=1e-4, atol=0) else None


def make_companions(checkpoint: Checkpoint) -> dict[str, bytes]:
    """{file name: content} of the tokenizer, the template and the end tokens. Raises
    TokenizerError, TemplateError: the file's own are missing or malformed.
    """
    eos = sorted(checkpoint.eos_token_ids)
    ends = {"bos_token_id": checkpoint.bos_token_id, "eos_token_id": eos or None}
    ends = {name: value for name, value in ends.items() if value is not None}
    files = {"generation_config.json": _json(ends)}
    if "tokenizer.ggml.model" not in (checkpoint.gguf_metadata or {}):
        return files
    tokenizer = checkpoint.tokenizer
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    settings: dict[str, Any] = {
        "add_bos_token": tokenizer.adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(token): {"content": text, "special": text in tokenizer.special_ids, **flags}
            for text, token in sorted(tokenizer.added_ids.items(), key=lambda item: item[1])
        },
        **tokenizer.named,
    }
    if isinstance(tokenizer, ByteLevelVocabulary):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        files["tokenizer.json"] = _byte_level_json(tokenizer).encode()
    else:
        assert isinstance(tokenizer, SentencePieceVocabulary)
        prefix = tokenizer.space_prefix
        settings["tokenizer_class"] = "LlamaTokenizer"
        settings |= {"legacy": prefix, "add_prefix_space": prefix}
        model = tokenizer.library.serialized_model_proto()
        files["tokenizer.model"] = set_space_prefix(model, prefix)
    files["tokenizer_config.json"] = _json(settings)
    if (template := checkpoint.template) is not None:
        files["chat_template.jinja"] = template.source.encode()
        for name, other in template.named.items():
            files[NAMED_FILE.format(name)] = other.source.encode()
    return files


def _byte_level_json(tokenizer: ByteLevelVocabulary) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, processors

    library = Tokenizer.from_str(tokenizer.library.to_str())
    for text, _ in sorted(tokenizer.added_ids.items(), key=lambda item: item[1]):
        token = AddedToken(text, normalized=False, special=text in tokenizer.special_ids)
        (library.add_special_tokens if token.special else library.add_tokens)([token])
    library.decoder = decoders.ByteLevel()
    if tokenizer.adds_bos:
        bos = tokenizer.named["bos_token"]
        single, pair, ids = f"{bos} $A", f"{bos} $A {bos}:1 $B:1", [(bos, tokenizer.bos_id)]
        library.post_processor = processors.TemplateProcessing(single, pair, ids)
    return library.to_str()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
