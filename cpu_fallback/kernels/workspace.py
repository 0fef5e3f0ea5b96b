"""Buffers for the activations of one run, shared by all runs of a model."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Attention, GatedDelta, Layer, Mixer, ShortConv

from ..pages import PageLayout, allocate
from ..states import find_places
from .layouts import GROUP, ROWS, SPAN, ActivationLayout
from .records import PLACE, STATES
from .routing import TILE, max_rows

CHUNK = 288  # prompt tokens per run; whole tiles on every target
HEAD_CHUNK = 48  # tokens whose logits are computed at once; whole tiles on every target
# rows of floats are padded to a multiple of this, hence to whole blocks of every layout
WIDTH = SPAN * GROUP


def pad(width: int, to: int) -> int:
    """Round `width` up to a multiple of `to`."""
    return -(-width // to) * to


class Buffer:
    """Zeros aligned to a cache line. address: of the first byte."""

    def __init__(self, *shape: int, dtype: type = np.float32):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.array = allocate(nbytes).view(dtype).reshape(shape)
        self.address = self.array.ctypes.data

    @property
    def row_bytes(self) -> int:
        return self.array.strides[0]

    def columns(self, first: int) -> Buffer:
        """The columns from `first` on, of the same memory."""
        part = Buffer(0)
        part.array, part.address = self.array[:, first:], self.address + 4 * first
        return part


class Routing:
    """Buffers of a mixture of experts for CHUNK tokens (routing.py)."""

    def __init__(self, config: LlamaConfig, full: int):
        """full: rows of a full tile."""
        experts, assignments = config.num_experts, CHUNK * config.num_experts_per_tok
        self.rows = max_rows(assignments, experts, full)  # rows in tiles
        self.scores = Buffer(CHUNK, pad(experts, WIDTH))  # the router's
        self.ranks = Buffer(pad(experts, WIDTH) + experts)  # of a token's experts and groups
        self.shared_scores = Buffer(CHUNK, WIDTH)  # of the shared expert's gate
        self.shared = Buffer(CHUNK, pad(config.hidden_size, WIDTH))  # its output
        self.chosen, self.row_of, self.counts, self.order = (
            Buffer(size, dtype=np.int64) for size in (assignments, assignments, experts, self.rows)
        )
        self.shares, self.ones = Buffer(assignments), Buffer(assignments)
        self.ones.array[:] = 1
        self.tiles = Buffer(1 + assignments, len(TILE), dtype=np.int64)
        self.outputs = Buffer(self.rows, pad(config.hidden_size, WIDTH))  # the experts'


class Recurrence:
    """Buffers of mixers with a recurrent state (recurrent.py)."""

    def __init__(self, config: LlamaConfig):
        mixers = config.recurrent
        inputs = (3 * m.size if isinstance(m, ShortConv) else m.channels for m in mixers)
        heads = max((m.value_heads for m in mixers if isinstance(m, GatedDelta)), default=0)
        self.states = Buffer(CHUNK, STATES, dtype=np.int64)
        self.channels = Buffer(CHUNK, pad(max(inputs), ROWS))  # inputs of convolutions
        self.strengths, self.decays = (Buffer(CHUNK, pad(heads, ROWS)) for _ in range(2))
        self.places, _ = find_places(mixers)


class Workspace:
    """Buffers for CHUNK tokens of one model."""

    def __init__(
        self,
        config: LlamaConfig,
        layouts: tuple[ActivationLayout, ...],
        threads: int,
        cache_bits: int | None = None,
        expert_rows: int = 1,
        rank: int = 0,
    ):
        """expert_rows: of an expert's full tile. rank: of adapters at most, 0 without any."""
        c = config
        self.routing = Routing(config, expert_rows) if c.num_experts else None
        rows = self.routing.rows if self.routing else CHUNK
        self.pages = PageLayout.of(config, cache_bits)  # the cache's
        self.places = Buffer(CHUNK, len(PLACE), dtype=np.int64)  # where the cache has each token
        attentions = [layer.attention for layer in c.layers if layer.attention]
        self.hidden = Buffer(CHUNK, pad(c.hidden_size, WIDTH))  # the stream
        # queries, keys and values
        widths = (sum(pad(rows, ROWS) for rows in _head_rows(mixer)) for mixer in attentions)
        self.qkv = Buffer(CHUNK, max(widths, default=0))
        # outputs of mixers before their projection, and gates of them, by width
        outputs = {_output(layer.mixer) for layer in c.layers if layer.mixer}
        self.mixed, self.gates = (
            {width: Buffer(CHUNK, pad(width, WIDTH)) for width in dict(chosen)}
            for chosen in (outputs, [output for output in outputs if output[1]])
        )
        self.recurrence = Recurrence(config) if c.recurrent else None
        # gate and up by the MLP's hidden units, since the columns that pad them stay zero
        self.hidden_units = {
            units: (Buffer(rows, pad(units, WIDTH)), Buffer(rows, pad(units, WIDTH)))
            for units in c.mlp_sizes
        }
        self.logits = Buffer(HEAD_CHUNK, pad(c.vocab_size, GROUP))
        # an adapter's inner products
        self.low_rank = Buffer(CHUNK if rank else 0, pad(rank, WIDTH))
        # inputs of layers, their projection, and a layer's gate of them
        size, tokens = (c.inputs.size, CHUNK) if c.inputs else (0, 0)
        inputs = pad(size * c.num_hidden_layers, ROWS)
        self.inputs = Buffer(tokens, inputs + WIDTH)  # packing a gate may read behind its columns
        self.projected = Buffer(tokens, inputs)
        self.input_gate = Buffer(tokens, pad(size, WIDTH))
        packed = c.hidden_size, *self.mixed, *c.mlp_sizes, size, rank
        widest = max(pad(width, WIDTH) for width in packed)
        spans = max(rows, CHUNK) * widest // WIDTH
        # Packed inputs of the next product.
        self.activations = {x: Buffer(spans * x.record(1), dtype=np.uint8) for x in layouts}
        # Outputs of attention and MLP before they are added to the stream, if the model norms,
        # scales or sums them.
        adjusted = CHUNK if any(map(_is_adjusted, c.layers)) else 0
        self.delta = Buffer(adjusted, pad(c.hidden_size, WIDTH))
        self.scratch = Buffer(threads, 16)
        self.sync = Buffer(16, dtype=np.int64)
        self._scores: np.ndarray | None = None
        shared = (mixer.heads // mixer.key_value_heads for mixer in attentions)
        self._shared, self._threads = max(shared, default=1), threads

    def reserve_scores(self, positions: int) -> tuple[int, int, int]:
        """Allocate attention scores: (address, bytes per thread, bytes per query head)."""
        head_bytes = 4 * (pad(positions, 16) + 32)
        thread_bytes = head_bytes * self._shared + 64
        if self._scores is None or self._scores.nbytes < thread_bytes * self._threads:
            self._scores = np.empty(thread_bytes * self._threads, np.uint8)
            self._scores_address = self._scores.ctypes.data
        return self._scores_address, thread_bytes, head_bytes


def _head_rows(mixer: Attention) -> tuple[int, ...]:
    """Numbers of queries, keys and values of a position."""
    counts = mixer.heads, mixer.new_heads, mixer.new_heads
    return tuple(heads * mixer.head_dim for heads in counts)


def _output(mixer: Mixer) -> tuple[int, bool]:
    """Columns of a mixer's output before its projection, and whether a gate multiplies it."""
    if isinstance(mixer, ShortConv):
        return mixer.size, False
    if isinstance(mixer, GatedDelta):
        return mixer.value_heads * mixer.value_size, True
    return mixer.heads * mixer.head_dim, mixer.gate is not None


def _is_adjusted(layer: Layer) -> bool:
    """True if the layer norms, scales or sums its additions to the stream."""
    is_normed = layer.post_attention_norm or layer.post_ffn_norm
    is_summed = layer.experts and layer.mlp
    return bool(is_normed or is_summed or layer.residual_multiplier != 1)
