"""The state of decoded tokens in device memory, and the view of a cache's rows through it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlx_llama.core.backends.positions import Span
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Attention
from mlx_llama.core.ops import View
from mlx_llama.core.sample import SamplingFeatures, arrange

from .. import runtime
from ..arrays import SamplingBatch, pack, unpack
from .storage import Storage, key_places, key_shapes, state_places

MAX_ROWS = 32  # in one step

# Fields of the state, each int64 [MAX_ROWS]: the token's position, the next position, the token,
# allocated positions of the row's storage; addresses of its tokens (0: a padding row), keys and
# values, their scales, and the tables; the number of its adapter or 0. Then of recurrent states:
# the address of both slots (0: a padding row, which keeps none), the slot to read, and the numbers
# of rows before and after this one that are other tokens of the same sequence. Words of sampling
# follow.
POSITION, NEXT, TOKEN, ALLOCATED, TOKENS, NUMBERS, SCALES, COSINES, SINES, ADAPTER = range(10)
STATES, SLOT, BEFORE, AFTER, WORDS = range(10, 15)


def new_state() -> np.ndarray:
    """A state on the host, for `pack_row`, without sampling's words."""
    return np.zeros((WORDS, MAX_ROWS), np.int64)


def pack_row(
    state: np.ndarray,
    i: int,
    position: int,
    storage: Storage,
    tables: tuple[Tensor, Tensor],
    token: int = 0,
    adapter: int = 0,
) -> None:
    """Set row i of a state on the host to `token` at `position` of a storage, and to an adapter."""
    parts = storage.tokens, storage.numbers, storage.scales, *tables
    addresses = (0 if part is None else part.data_ptr() for part in parts)
    allocated = len(storage.tokens) - 1
    state[:STATES, i] = position, position + 1, token, allocated, *addresses, adapter


def pack_states(state: np.ndarray, cache: Any, spans: Sequence[Span]) -> None:
    """Set the fields of recurrent states of a state on the host. Spans of one row stand together,
    in order.
    """
    rows = [span.row for span in spans]
    for i, row in enumerate(rows):
        live = cache.live_states(row)
        state[[STATES, SLOT], i] = live.numbers.data_ptr(), live.slot
        state[BEFORE, i] = i - rows.index(row)
        state[AFTER, i] = rows.count(row) - 1 - state[BEFORE, i]


def describe(cache: Any, spans: Sequence[Span]) -> list[Tensor]:
    """States of a prompt's rows for the kernels of recurrent states, MAX_ROWS in each."""
    states = []
    for at in range(0, len(spans), MAX_ROWS):
        state, part = new_state(), spans[at : at + MAX_ROWS]
        state[POSITION, : len(part)] = [span.start for span in part]
        pack_states(state, cache, part)
        states.append(runtime.send(state, cache.device))
    return states


class StateView(View):
    """The view of decoded tokens, one per row, which kernels read from `state`.

    It has no reference to a cache, so a CUDA graph of its operations serves any rows of any cache.
    rows: of the batch, with padding. features: of the sampling whose options follow the state.
    kernels: decode.py.
    """

    count = 1

    def __init__(
        self,
        config: LlamaConfig,
        dtype: torch.dtype,
        device: torch.device,
        kernels: ModuleType,
        bits: int | None,
        rows: int,
        features: SamplingFeatures,
    ):
        self.config, self.dtype, self.kernels = config, dtype, kernels
        self.rows, self.bits, self.features = rows, bits, features
        layout = arrange(features, ())
        size = WORDS + len(pack(layout, MAX_ROWS)), MAX_ROWS
        self.state = torch.zeros(size, dtype=torch.int64, device=device)
        self.table_width = config.table_width  # cosines for a position
        self.places = state_places(config)
        self.key_places = key_places(key_shapes(config))
        self.tokens = self.state[TOKEN, :rows].view(rows, 1)  # [B, 1], a view, as are the next two
        self.next_positions = self.state[NEXT, :rows]  # [B]
        self.values = unpack(layout, self.state[WORDS:, :rows])  # options of sampling
        words = -(-config.vocab_size // 32)
        # the grammars' masks, and DRY's penalties
        self.masks: Tensor | None = None
        if features.has_masks:
            width = words + features.has_dry * config.vocab_size
            self.masks = torch.zeros((rows, width), dtype=torch.int32, device=device)
            self.masks[:, :words] = -1
        # written to by rows that pad the batch
        self._scratch = Storage.allocate(config, 1, dtype, bits, device)

    def point(
        self,
        cache: Any,
        tokens: Sequence[Sequence[int]] | Tensor,
        spans: Sequence[Span],
        sampling: SamplingBatch | None = None,
    ) -> None:
        """Make `tokens` [B, 1], checked ids, the next ones, stored at the spans' positions."""
        on_device = isinstance(tokens, Tensor)
        state = new_state()
        for i, span in enumerate(spans):
            token, adapter = 0 if on_device else int(tokens[i][0]), cache.adapters[span.row]
            storage = cache.row_storage[span.row]
            pack_row(state, i, span.start, storage, cache.tables, token, adapter=adapter)
        for i in range(len(spans), self.rows):
            pack_row(state, i, 0, self._scratch, cache.tables)
            state[TOKENS, i] = 0
        if self.places:
            pack_states(state, cache, spans)
        options = arrange(self.features, sampling.options if sampling else ())
        _upload(np.concatenate([state, pack(options, MAX_ROWS)]), self.state)
        if on_device:
            self.tokens[: len(spans)].copy_(tokens.clamp(min=0))  # see `advance`
        self.kernels.note(self.state, self.rows)

    def allow(self, masks: np.ndarray) -> None:
        """Set the masks of the first rows, see Masks."""
        _upload(masks, self.masks[: len(masks)])

    def advance(self, tokens: Tensor) -> None:
        """Make `tokens`, int32 [B, 1], the next ones, stored at the next positions."""
        self.kernels.advance(self.state, tokens)

    def recent(self, window: int) -> Tensor:
        """Each row's last `window` tokens up to its position: int32 [B, window], -1 in front."""
        return self.kernels.recent(self.state, self.rows, window)

    def new_keys(self, spec: Attention) -> Tensor:
        G, D = spec.key_value_heads, spec.head_dim
        place = self.key_places[spec.slot]
        return self.kernels.read_keys(self.state, place, self.rows, G, D, self.dtype, self.bits)


def _upload(values: np.ndarray, into: Tensor) -> None:
    """Copy from the host; to a GPU from pinned memory, without a wait for queued kernels."""
    host = torch.from_numpy(values)
    into.copy_(host.pin_memory() if into.is_cuda else host, non_blocking=True)
