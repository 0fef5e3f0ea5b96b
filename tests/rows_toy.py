"""A stand-in for a backend: rows of any lengths; keys, values and logits are a hash of a row's
tokens alone.

Tests of commands and proofs plant faults in it: subclass ToyModel and change `mix` or `leak`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
from cases.engine import RowCache

from mlx_llama.core.backends.positions import CallView
from mlx_llama.core.models.config import LlamaConfig

LAYERS, HEADS, SIZE, VOCABULARY = 2, 1, 4, 384
_FIELDS = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "head_dim": SIZE}
_FIELDS |= {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": HEADS}
_FIELDS |= {"vocab_size": VOCABULARY, "max_position_embeddings": 256}
_FIELDS |= {"eos_token_id": None, "bos_token_id": None}
CONFIG = LlamaConfig.from_dict(_FIELDS)


class ToyCache(RowCache):
    """Keys and values are float32 [2, LAYERS, HEADS, SIZE] for each position."""

    def __init__(self, capacity: int, rows: int):
        shape = 2, LAYERS, HEADS, SIZE
        super().__init__(CONFIG, capacity, 4 * math.prod(shape), rows, np.float32, *shape)

    def free_memory(self):
        return 1 << 30

    def pack(self, keys):
        keys, values = np.moveaxis(keys, 0, 3)
        return keys.copy(), values.copy()

    def unpack(self, keys, values):
        return np.moveaxis(np.stack([keys, values]), 3, 0)


class ToyModel:
    dtype = dtype_name = "float32"
    config, cache_bits, notices, adapters = CONFIG, None, (), ()
    verify_width, prefill_width, prefill_chunk, is_batch_invariant = 16, 1 << 16, 512, False

    def __init__(self):
        self.calls: list[tuple] = []  # (shape of the tokens, first positions, rows)

    def make_cache(self, capacity, rows=1):
        return ToyCache(capacity, rows)

    def mix(self, ids: list[int], batch: int, count: int) -> np.random.Generator:
        """The source of a position's numbers. batch, count: shape of the call, on which nothing may
        depend.
        """
        return np.random.default_rng(ids)

    def forward(self, tokens, index_pos, cache, *, rows=None, all_positions=False, probe=None):
        tokens = np.asarray(tokens)
        batch, count = tokens.shape
        view = CallView(cache, batch, count, index_pos, rows)
        self.calls.append(
            (tokens.shape, [span.start for span in view.spans], [span.row for span in view.spans])
        )
        logits = np.zeros((batch, count, VOCABULARY), np.float32)
        with view:
            for b, span in enumerate(view.spans):
                for t in range(count):
                    end, keys = span.start + t + 1, cache.keys[span.row]
                    cache.tokens[span.row][end - 1] = tokens[b, t]
                    source = self.mix(cache.tokens[span.row][:end].tolist(), batch, count)
                    keys[end - 1] = source.standard_normal((2, LAYERS, HEADS, SIZE))
                    logits[b, t] = source.standard_normal(VOCABULARY) + keys[:end, 0, 0, 0, 0].sum()
        return logits if all_positions else logits[:, -1]

    def step(self, tokens, index_pos, cache, sampling, *, rows=None, masks=None):
        logits = self.forward(tokens, index_pos, cache, rows=rows)
        return logits.argmax(1).astype(np.int32)[:, None]


class ToyBackend:
    """Counts launches and reads. runs_ahead: as a device that works by itself."""

    name, device, device_name = "cpu", "cpu", "a toy"

    def __init__(self, runs_ahead: bool = False):
        self.runs_ahead = runs_ahead
        self.events: list[str] = []
        self.runtime = SimpleNamespace(
            to_numpy=np.array,
            launch=self.launch,
            read=self.read,
            peak_memory=lambda device: 0,
            primitives=lambda arrays: None,
            free_memory=lambda device: 1 << 30,
            is_out_of_memory=lambda error: False,
        )

    def sampling_batch(self, options):
        return SimpleNamespace(options=tuple(options), window=0)

    def launch(self, arrays):
        self.events.append("launch")

    def read(self, tokens):
        self.events.append("read")
        return [int(token) for array in tokens for token in array.reshape(-1)]
