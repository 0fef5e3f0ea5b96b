"""Read tekken.json, the tokenizer of Mistral's checkpoints (tokens/tokenizers/tekken.py of
mistral-common), into the tokenizers library.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from mlx_llama.core.errors import TokenizerError
from mlx_llama.core.system.files import read_json

from .pre_tokenizers import build_pre_tokenizer
from .tokenizer import byte_alphabet, library_faults

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# The first special tokens, for files that list none
_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()
_LONGEST = 1024  # bytes of a token


def read_tekken(path: Path) -> Any:
    """Build the tokenizer, which prepends BOS. Raises TokenizerError for a malformed file."""
    raw = read_json(path, TokenizerError)
    with library_faults(path, "not a tekken.json", "fetch the file again"):
        return _build(raw)


def _build(raw: dict[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from tokenizers.processors import TemplateProcessing

    config = raw["config"]
    listed = sorted(raw.get("special_tokens") or (), key=lambda token: token["rank"])
    special = [str(token["token_str"]) for token in listed] or list(_SPECIAL)
    count = config.get("default_num_special_tokens") or len(special)
    special += [f"<SPECIAL_{i}>" for i in range(len(special), count)]
    ranks = [token["rank"] for token in listed]
    if ranks != list(range(len(ranks))) or not len(special) == count == len(set(special)):
        raise ValueError(f"{len(special)} special tokens, expected ranks 0 to {count - 1} once")
    # Files list more words than their models have.
    words = [base64.b64decode(word["token_bytes"], validate=True) for word in raw["vocab"]]
    if config.get("default_vocab_size") is not None:
        words = words[: config["default_vocab_size"] - count]
    if max(map(len, words), default=0) > _LONGEST:
        raise ValueError(f"a token has more than {_LONGEST} bytes")
    if not {bytes([byte]) for byte in range(256)} <= {*words}:
        raise ValueError("not every byte is a token")
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    ids = {word: i for i, word in enumerate(words)}
    spelled = {word: "".join([letters[byte] for byte in word]) for word in ids}
    # Merges by the rank of the word they make; for the same word, lowest ranks first
    merges = []
    for word in ids:
        splits = ((word[:i], word[i:]) for i in range(1, len(word)))
        pairs = ((a, b) for a, b in splits if a in ids and b in ids)
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    vocabulary = {spelled[word]: count + i for word, i in ids.items()}
    vocabulary |= {text: i for i, text in enumerate(special)}
    library = Tokenizer(
        models.BPE(vocabulary, [(spelled[a], spelled[b]) for a, b in merges], ignore_merges=True)
    )
    library.pre_tokenizer = build_pre_tokenizer([config["pattern"]])
    library.decoder = decoders.ByteLevel()
    tokens = [AddedToken(text, normalized=False, special=True) for text in special]
    library.add_special_tokens(tokens)
    bos = NAMED["bos_token"]
    library.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
    )
    return library
