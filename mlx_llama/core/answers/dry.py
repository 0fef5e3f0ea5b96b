"""DRY ("don't repeat yourself"): penalties for tokens that would continue a repetition.

By p-e-w (oobabooga/text-generation-webui, pull request 5677); windows, breakers and limits are
llama.cpp's (`llama_sampler_dry`), so the same options give the same penalties. The repetition that
a token continues depends on the token before it, so the host computes them once that is known.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.text.tokenizer import Tokenizer

MAX_BREAKER = 40  # bytes of a breaker that count
KEPT = 256  # breakers of requests whose tokens are kept
MAX_TAIL = 20  # tokens of a breaker after its first one
MAX_LOG = 88.7228391  # logarithm of float32's maximum
Heads = dict[int, set[tuple[int, ...]]]


class Breakers:
    """Token sequences that contain a text which no repetition crosses."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._find_text = functools.lru_cache(KEPT)(self._search)

    def find(self, texts: Sequence[str]) -> Heads:
        """First tokens of such sequences, and the tokens that may follow each."""
        heads: Heads = {}
        for text in texts:
            for head, tails in self._find_text(text.encode()[:MAX_BREAKER]).items():
                heads.setdefault(head, set()).update(tails)
        return heads

    def _search(self, text: bytes) -> Heads:
        heads: Heads = {}
        if self._tokenizer is None:
            return heads
        for token in range(self._tokenizer.vocab_size):
            piece = self._tokenizer.piece(token)
            data = piece.data if piece else b""
            if text in data:
                heads[token] = {()}
                continue
            for length in range(1, min(len(data) + 1, len(text))):
                if data.endswith(text[:length]):
                    rest = text[length:].decode("utf-8", "ignore")
                    tail = self._tokenizer.encode(rest, add_bos=False)[:MAX_TAIL]
                    heads.setdefault(token, set()).add(tuple(tail))
        return heads


class Dry:
    """The penalties of a text that grows. tokens: prompt and answer, as known on the host."""

    def __init__(self, options: GenerationOptions, heads: Heads, tokens: Sequence[int]):
        self.options, self.heads, self.tokens = options, heads, tokens

    def penalties(self) -> dict[int, np.float32]:
        """Penalties to subtract from the logits of the next token, by token."""
        o = self.options
        allowed = o.dry_allowed_length
        # the latest token first
        count = len(self.tokens) if o.dry_penalty_last_n < 0 else o.dry_penalty_last_n
        recent = np.array(self.tokens[-count:][::-1], np.int64)
        longest = self._count_since_break(recent)
        if len(recent) <= allowed or longest < allowed:
            return {}
        most = math.floor(MAX_LOG / math.log(o.dry_base)) if o.dry_base > 1.000001 else len(recent)
        lengths = _measure_repeats(recent, min(longest, allowed + most))
        repeats: dict[int, int] = {}
        for place in np.flatnonzero(lengths[1:] >= allowed).tolist():
            token = int(recent[place])  # it followed the repeated tokens
            repeats[token] = max(repeats.get(token, 0), int(lengths[place + 1]))
        return {
            token: np.float32(o.dry_multiplier) * np.float32(o.dry_base) ** (length - allowed)
            for token, length in repeats.items()
            if () not in self.heads.get(token, ())
        }

    def _count_since_break(self, recent: npt.NDArray[np.int64]) -> int:
        """Number of tokens after the last breaker; all without one. recent: the latest first."""
        if not self.heads:
            return len(recent)
        tokens = recent.tolist()
        for place, token in enumerate(tokens):
            tails = self.heads.get(token, ())
            matches = [
                len(tail)
                for tail in tails
                if len(tail) <= place and tuple(tokens[place - len(tail) : place][::-1]) == tail
            ]
            if matches:
                return place - max(matches)
        return len(recent)


def _measure_repeats(recent: npt.NDArray[np.int64], longest: int) -> npt.NDArray[np.int64]:
    """By place, how many tokens repeat the first ones, at most `longest`; 0 for place 0."""
    lengths = np.zeros(len(recent), np.int64)
    places = np.arange(1, len(recent))
    for length in range(longest):
        places = places[: np.searchsorted(places, len(recent) - length)]
        places = places[recent[places + length] == recent[length]]
        if not len(places):
            break
        lengths[places] = length + 1
    return lengths


def write_columns(sequences: Sequence[Dry | None], vocabulary: int) -> npt.NDArray[np.int32]:
    """The penalties of a batch as bits of float32, [B, V], to stand beside the words of masks."""
    columns = np.zeros((len(sequences), vocabulary), np.float32)
    for row, dry in enumerate(sequences):
        for token, penalty in dry.penalties().items() if dry else ():
            columns[row, token] = penalty
    return columns.view(np.int32)
