"""A stand-in for a backend: rows of any lengths; keys, values and logits are a hash of a row's tokens alone.

Tests of doors and proofs plant faults in it: subclass ToyModel and change `mix` or `leak`.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from mlx_llama.core.backends.positions import CallView, Positions
from mlx_llama.core.models.config import LlamaConfig

LAYERS, HEADS, SIZE, VOCABULARY = 2, 1, 4, 384
CONFIG = LlamaConfig.from_dict({
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": HEADS, "head_dim": SIZE, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "eos_token_id": None, "bos_token_id": None})


class ToyCache(Positions):
    def __init__(self, capacity: int, rows: int):
        super().__init__(CONFIG, capacity, 2 * LAYERS * HEADS * SIZE * 4, rows)
        self.ids: list[list[int]] = [[] for _ in range(rows)]
        self.features: list[list[np.ndarray]] = [[] for _ in range(rows)]  # float32 [2, LAYERS, HEADS, SIZE] by position

    @property
    def nbytes(self):
        return sum(self.allocated) * self.position_nbytes

    def free_memory(self):
        return 1 << 30

    def _grow(self, ends):
        for row, end in ends.items():
            self.allocated[row] = self.storage_for(end)

    def arrays(self):
        return []

    def trim(self, length, row=0):
        self.check_trim(length, row)
        self.lengths[row] = length
        del self.ids[row][length:], self.features[row][length:]

    def reset(self, row=None):
        for one in range(self.rows) if row is None else [row]:
            self.lengths[one] = self.allocated[one] = 0
            self.ids[one], self.features[one] = [], []

    def restore(self, state, row=0):
        self.reset(row)
        self.check_state(state, row)
        if state:
            self.reserve({row: len(state["tokens"])})
            self.ids[row] = state["tokens"].tolist()
            self.features[row] = list(np.moveaxis(np.stack([state["keys"], state["values"]]), 3, 0))
            self.lengths[row] = len(self.ids[row])

    def copy_prefix(self, source, target, length):
        self.check_copy(source, target, length)
        self.ids[target], self.features[target] = self.ids[source][:length], self.features[source][:length]
        self.reserve({target: length})
        self.lengths[target] = length

    def state(self, row=0):
        if not self.ids[row]:
            return {}
        keys, values = np.moveaxis(np.stack(self.features[row], 3), 0, 0)
        return {"tokens": np.array(self.ids[row], np.int32), "keys": keys, "values": values}


class ToyModel:
    config, dtype, cache_bits, notices, verify_width, prefill_width, adapters = CONFIG, "float32", None, (), 16, 1 << 16, ()
    is_batch_invariant = False

    def __init__(self):
        self.calls: list[tuple] = []  # (shape of the tokens, first positions, rows)

    def make_cache(self, capacity, rows=1):
        return ToyCache(capacity, rows)

    def mix(self, ids: list[int], batch: int, count: int) -> np.random.Generator:
        """The source of a position's numbers. batch, count: shape of the call, on which nothing may depend."""
        return np.random.default_rng(ids)

    def forward(self, tokens, index_pos, cache, *, rows=None, all_positions=False, probe=None):
        tokens = np.asarray(tokens)
        batch, count = tokens.shape
        view = CallView(cache, batch, count, index_pos, rows)
        self.calls.append((tokens.shape, [span.start for span in view.spans], [span.row for span in view.spans]))
        logits = np.zeros((batch, count, VOCABULARY), np.float32)
        with view:
            for b, span in enumerate(view.spans):
                for t in range(count):
                    cache.ids[span.row].append(int(tokens[b, t]))
                    source = self.mix(cache.ids[span.row], batch, count)
                    cache.features[span.row].append(source.standard_normal((2, LAYERS, HEADS, SIZE)).astype(np.float32))
                    logits[b, t] = source.standard_normal(VOCABULARY) + sum(part[0, 0, 0, 0] for part in cache.features[span.row])
        return logits if all_positions else logits[:, -1]

    def step(self, tokens, index_pos, cache, sampling, *, rows=None):
        logits = self.forward(tokens, index_pos, cache, rows=rows)
        return logits.argmax(1).astype(np.int32)[:, None]


class ToyBackend:
    """Counts launches and reads. runs_ahead: as a device that works by itself."""

    name, device, device_name = "cpu", "cpu", "a toy"

    def __init__(self, runs_ahead: bool = False):
        self.runs_ahead = runs_ahead
        self.events: list[str] = []
        self.runtime = SimpleNamespace(
            to_numpy=np.array, dtype_name=str, peak_memory=lambda device: 0, primitives=lambda *arrays: None,
            free_memory=lambda device: 1 << 30, is_out_of_memory=lambda error: False)

    def sampling_batch(self, options):
        return SimpleNamespace(options=tuple(options), window=0)

    def launch(self, *arrays):
        self.events.append("launch")

    def read(self, token):
        return self.read_all(token)[0]

    def read_all(self, *tokens):
        self.events.append("read")
        return [int(token) for array in tokens for token in array.reshape(-1)]
