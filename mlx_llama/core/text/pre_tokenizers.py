"""Pre-tokenizers of byte-level BPE, by names of GGUF's tokenizer.ggml.pre (llama-vocab.cpp).

A pre-tokenizer splits a text into words before BPE merges bytes within each. It is a sequence of
regular expressions. Each expression splits the words of those before it: matches become words, and
so does the text between them.

Patterns that C++'s regular expressions cannot express come from the models' tokenizer.json.
"tekken" and "gpt-4o" split words by Unicode's letter cases and keep combining marks (llama.cpp
splits ÉCOLE into É, COLE). The "deepseek" ones have ideographic and wide spaces in their character
ranges.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
# As deepseek-llm's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_DIGITS_GPT2 = (r"\p{N}", *GPT2)
_LLAMA3 = (rf"{CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}",)
_QWEN2 = (rf"{CONTRACTION}|{_WORD}|\p{{N}}|{_OTHER}",)
_QWEN35 = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_TEKKEN = (rf"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*|\p{{N}}|{_OTHER_SLASH}",)
_GPT4O = (
    rf"{_CASED}{_UPPER}*{_LOWER}+{CONTRACTION}?|{_CASED}{_UPPER}+{_LOWER}*{CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}|{_OTHER_SLASH}",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| "
    r"?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# {name: patterns}
PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, r"[0-9][0-9][0-9]"),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK_V3),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "smaug-bpe", "dbrx",
         "chatglm-bpe", "glm4"), _LLAMA3,
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"), _QWEN2
    ),
    "qwen35": _QWEN35,
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_OTHER}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{CONTRACTION}|{_WORD}|\p{{N}}+|{_OTHER}"),
    "seed-coder": (
        rf"{CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "trillion", "granite-docling", "exaone4", "a.x-4.0",
         "mellum"), GPT2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _DIGITS_GPT2
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_BLOOM,)),
    "viking": (_BLOOM, r"\p{N}"),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
}  # fmt: skip
# The first 16 digits of the SHA-256 of a vocabulary's merges, joined by line breaks, of llama.cpp's
# ggml-vocab-*.gguf and of SmolLM2
BY_MERGES = {
    "04e3597d7996f292": "gpt-2", "0a1f07b1d32153dc": "mpt", "0cd100e0ab7dbd83": "llama-bpe",
    "1101bfa1f9e8faaa": "command-r", "26a620e10c7991c8": "falcon",
    "3c86e94c54c92cfe": "deepseek-coder", "8715d8d6d92d1b0c": "starcoder",
    "aea6ed50becdb3be": "smollm", "bbeef245f0b03a96": "qwen2", "cb5bed793622288a": "deepseek-llm",
    "da302fc35c8c3284": "refact",
}  # fmt: skip
# Pre-tokenizers that put BOS before a text unless add_bos_token says otherwise
ADD_BOS = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split()
)
# A word in the vocabulary is one token, regardless of merges.
IGNORE_MERGES = ADD_BOS | {"minicpm5", "glm4"}


def build_pre_tokenizer(patterns: Iterable[str]) -> Any:
    """Build a pre-tokenizer that splits at each pattern in turn and maps bytes to GPT-2's alphabet."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, letters])
