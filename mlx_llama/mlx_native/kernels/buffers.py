"""Storage of a cache's rows.

Three nouns. A *row* holds the tokens, keys and values of one sequence. A *buffer* is a set of
arrays that one graph updates. It has *slots*, each for a row. A row alone has a buffer of one slot;
rows that decode together share a buffer. A row joins by a copy into a slot and leaves by a copy out
of it, while other slots stay in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CACHE_GROUP, Positions, States
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Attention

Parts = tuple[mx.array, ...]  # keys or values of a layer: (numbers,), or (codes, scales, biases)
# recurrent states of several rows, float32 [S, *shape], by slot of the mixer
SharedStates = Sequence[tuple[mx.array, ...]]
SLOTS = (1, 2, 4, 8, 16, 32)  # sizes of buffers, and so of a traced step's batches
# a buffer has at most this many times the positions that its rows need, unless it is small
SPARE = 4
SMALL = 1 << 27  # bytes of keys and values up to which a buffer may have more
PATIENCE = 4  # steps with at most a quarter of the slots in use, after which a buffer shrinks


@dataclass(frozen=True)
class Packing:
    """Numbers [S, G, L, D]; or codes uint32 [S, G, L, D' / 4], scales and biases [S, G, L, D' /
    32], where D' is D rounded up to a multiple of CACHE_GROUP, 32.
    """

    # 8: codes, with scale and bias for every CACHE_GROUP; 16: two bytes; None: as `dtype`
    bits: int | None
    dtype: mx.Dtype  # the activations'
    scale_dtype: mx.Dtype

    @property
    def number_dtype(self) -> mx.Dtype:
        """The dtype of stored numbers: with 16 bits, float16 for float32."""
        return mx.float16 if self.bits == 16 and self.dtype == mx.float32 else self.dtype

    def parts(self, head_dim: int) -> list[tuple[int, mx.Dtype]]:
        """Last axis and dtype of each part. head_dim: D."""
        if self.bits != 8:
            return [(head_dim, self.number_dtype)]
        groups = -(-head_dim // CACHE_GROUP)
        return [
            (groups * CACHE_GROUP // 4, mx.uint32),
            (groups, self.scale_dtype),
            (groups, self.scale_dtype),
        ]

    def nbytes(self, head_dim: int) -> int:
        """Bytes of a head's keys or values at one position."""
        return sum(size * dtype.size for size, dtype in self.parts(head_dim))

    def pack(self, x: mx.array) -> Parts:
        """Convert keys or values [..., D] to stored parts [..., *]."""
        if self.bits != 8:
            return (x.astype(self.number_dtype),)
        if padding := -x.shape[-1] % CACHE_GROUP:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        return tuple(mx.quantize(x.astype(self.scale_dtype), group_size=CACHE_GROUP, bits=8))

    def unpack(self, parts: Parts, head_dim: int) -> mx.array:
        """Convert stored parts to numbers [..., D]. head_dim: D."""
        if self.bits != 8:
            return parts[0].astype(self.dtype)
        numbers = mx.dequantize(
            parts[0], parts[1], parts[2], group_size=CACHE_GROUP, bits=self.bits
        )
        return numbers[..., :head_dim].astype(self.dtype)


class RowStates(Sequence[tuple[mx.array, ...]]):
    """A row of shared states, as of Positions.states; sliced when they are read."""

    def __init__(self, shared: SharedStates, number: int):
        self.shared, self.number = shared, number

    def __len__(self) -> int:
        return len(self.shared)

    def __getitem__(self, slot):
        return tuple(part[self.number] for part in self.shared[slot])

    @property
    def rows(self) -> int:
        """Number of rows that share the arrays."""
        return len(self.shared[0][0])


class Buffer:
    """Arrays of some rows."""

    def __init__(
        self, keys: list[Parts], values: list[Parts], tokens: mx.array, rows: list[int | None]
    ):
        self.keys, self.values = keys, values  # by layer, Parts of [S, G, L, *]
        self.tokens = tokens  # int32 [S, L]
        self.states: SharedStates = ()  # of the last step
        self.rows = rows  # the row in each slot, None in a free one
        self.wide_steps = 0  # consecutive steps that used at most a quarter of the slots

    @property
    def length(self) -> int:
        """L: positions of a slot."""
        return self.tokens.shape[1]

    @property
    def slots(self) -> int:
        """S: number of slots."""
        return len(self.rows)

    @property
    def used(self) -> int:
        return len(self.rows) - self.rows.count(None)

    def arrays(self) -> list[mx.array]:
        """All arrays, layer by layer."""
        return [*(part for parts in (*self.keys, *self.values) for part in parts), self.tokens]

    def copy(self, number: int, source: Slot, length: int) -> None:
        """Copy the first `length` positions of `source` to slot `number`, lazily."""
        if length == 0:
            return
        to, at = slice(number, number + 1), slice(source.number, source.number + 1)
        for target, array in zip(self.arrays(), source.buffer.arrays()):
            if target.ndim == 2:
                target[to, :length] = array[at, :length]
            else:
                target[to, :, :length] = array[at, :, :length]


class Slot(NamedTuple):
    """Place of a row."""

    buffer: Buffer
    number: int


class Share(NamedTuple):
    """Rows of a step that will share a buffer."""

    buffer: Buffer | None  # None: a new one
    staying: list[int]  # rows that it has already
    joining: list[int]
    slots: int
    length: int

    @property
    def is_kept(self) -> bool:
        """True if the present buffer is large enough."""
        sizes = self.slots, self.length
        return self.buffer is not None and sizes == (self.buffer.slots, self.buffer.length)


class StepBuffers:
    """The buffers of a decode step over `rows`."""

    def __init__(self, rows: tuple[int, ...], buffers: list[Buffer]):
        index = {row: i for i, row in enumerate(rows)}
        self.rows, self.buffers = rows, buffers
        # The sequence in each slot, -1 for none.
        self.orders = [tuple(index.get(row, -1) for row in buffer.rows) for buffer in buffers]
        sequences = [i for order in self.orders for i in order]
        positions = [sequences.index(i) for i in range(len(rows))]
        self._is_ordered = positions == list(range(len(rows)))
        self._is_full = len(sequences) == len(rows)
        self._positions = mx.array(positions, mx.int32)
        self.result: mx.array | None = None  # the last step's
        self.drawn: list[mx.array] = []  # its tokens, by buffer

    def collect(self, outputs: list[mx.array]) -> mx.array:
        """Select the sequences' outputs [B, *]. outputs: [S, *] of all slots, by buffer."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        if not self._is_ordered:
            return mx.take(joined, self._positions, axis=0)
        return joined if self._is_full else joined[: len(self.rows)]


class Buffers(Positions):
    """A cache's rows and the buffers where they lie."""

    def _make_storage(self) -> None:
        config, dtype, on_cpu = self.config, self.dtype, self.device.type == mx.cpu
        # On the CPU MLX sums products of 16-bit scales in 16 bits.
        self.packing = Packing(self.bits, dtype, mx.float32 if on_cpu else dtype)
        self.position_nbytes = sum(
            2 * len(kind.slots) * kind.heads * self.packing.nbytes(kind.head_dim)
            for kind in config.kinds
        )
        # mx.fast.rope computes its angles in float32, 1e-3 off at position 100,000. That suffices
        # for 16-bit activations, but float32 promises the other backends' tokens. The kernel has no
        # factor that depends on the position either. MLX's CPU device has no such kernel; tables
        # take fewer primitives there at every width.
        self.tabulated = dtype == mx.float32 or on_cpu or config.scales_queries
        self.slots: list[Slot | None] = [None] * self.rows  # by row
        self._tables: dict[int, tuple] = {}  # by length of a buffer
        self.steps: dict[tuple[int, ...], StepBuffers] = {}  # by rows; no two share a buffer

    def buffers(self) -> list[Buffer]:
        return list({id(slot.buffer): slot.buffer for slot in self.slots if slot}.values())

    def buffer_of(self, row: int, end: int) -> Buffer:
        """The buffer of a row alone, for `end` positions; it leaves a shared buffer."""
        buffer = self.slots[row].buffer
        if buffer.slots > 1:
            self._isolate(row, end)
            self.isolate_last(buffer)
            buffer = self.slots[row].buffer
        return buffer

    def step_buffers(self, rows: Sequence[int]) -> StepBuffers:
        """The buffers of a step over `rows`; rows without a shared buffer join one."""
        rows = tuple(rows)
        if rows not in self.steps:
            step = self._assign(rows)
            for buffer in step.buffers:
                self._forget(buffer)
                for row in buffer.rows:  # idle ones would hold the arrays of their last step
                    if row is not None and row not in rows:
                        self.states[row] = self._freeze(self.states[row])
            self.steps[rows] = step
        step = self.steps[rows]
        for buffer, order in zip(step.buffers, step.orders):
            is_wide = 1 < len(order) >= 4 * (len(order) - order.count(-1))
            buffer.wide_steps = buffer.wide_steps + 1 if is_wide else 0
            if buffer.wide_steps > PATIENCE:
                self._shrink(buffer, rows)
                return self.step_buffers(rows)
        return step

    def gather_states(self, rows: Sequence[int | None]) -> SharedStates:
        """The recurrent states of `rows`, zeros for an empty row and anything for None: the arrays
        that they share in this order, or else new ones.
        """
        mixers = self.config.recurrent
        if not mixers:
            return ()
        states: list[Any] = [() if row is None else self.states[row] for row in rows]
        shared = next((each.shared for each in states if each), ())
        if shared and len(shared[0][0]) == len(rows):
            moved = [
                row
                for i, (row, each) in enumerate(zip(rows, states))
                if row is not None and not (each and each.shared is shared and each.number == i)
            ]
            if not moved:
                return shared
        gathered = []
        for slot, mixer in enumerate(mixers):
            empty = tuple(mx.zeros(shape) for shape in mixer.states)
            parts = zip(*(each[slot] if each else empty for each in states))
            gathered.append(tuple(mx.stack(part) for part in parts))
        return gathered

    def tables(self, length: int) -> tuple:
        """Tables of the first `length` positions, as ops.rope takes them."""
        if length not in self._tables and self.tabulated:
            self._tables[length] = make_angles(self.config, 0, length, self.capacity)
        elif length not in self._tables:
            self._tables[length] = make_periods(self.config, self.capacity)
        return self._tables[length]

    def release(self, row: int) -> Buffer | None:
        """Free a row's slot; returns its buffer, None for a row that has no slot."""
        if self.slots[row] is None:
            return None
        buffer, number = self.slots[row]
        buffer.rows[number] = None
        self.slots[row] = None
        self._forget(buffer)
        return buffer

    def isolate_last(self, buffer: Buffer) -> None:
        """If few rows of a buffer are left, give each its own, so that each frees its memory."""
        if buffer.used <= max(1, buffer.slots // 4):
            self._isolate_idle(buffer, ())

    def drop_tables(self) -> None:
        """Drop tables of lengths that no buffer has."""
        lengths = {buffer.length for buffer in self.buffers()} & set(self._tables)
        self._tables = {length: self._tables[length] for length in lengths}

    def _freeze(self, states: States) -> States:
        """A row's states in arrays of its own, so that it holds those of no other row."""
        if not isinstance(states, RowStates) or states.rows == 1:
            return states
        at = slice(states.number, states.number + 1)
        with mx.stream(self.device):
            copies = [tuple(mx.contiguous(part[at]) for part in parts) for parts in states.shared]
            mx.async_eval(copies)
        return RowStates(copies, 0)

    def _split_states(self, numbers: np.ndarray) -> States:
        with mx.stream(self.device):
            split = super()._split_states(numbers)
            return RowStates([tuple(part[None] for part in parts) for parts in split], 0)

    def states_nbytes(self) -> int:
        """As of Positions, with the idle slots of shared arrays."""
        every = [*self.states, *(states for kept in self.checkpoints for states in kept.values())]
        shared = {id(states.shared): states.shared for states in every if states}
        return sum(part.nbytes for parts in shared.values() for each in parts for part in each)

    def state_arrays(self) -> list[mx.array]:
        shared = [states.shared for states in self.states if isinstance(states, RowStates)]
        return [array for states in shared for parts in states for array in parts]

    def _grow(self, ends: Mapping[int, int]) -> None:
        grown = {row: self._copy_rows([row], 1, self.storage_for(end)) for row, end in ends.items()}
        # Assign at the end: an interrupt before this line changes nothing.
        for row, buffer in grown.items():
            self._place(row, buffer, 0)
        self.drop_tables()

    def _copy_rows(self, rows: list[int], slots: int, length: int) -> Buffer:
        """Copy rows to a new buffer, in order; the other positions are zeros."""
        self.tables(length)

        def parts(mixer: Attention) -> Parts:
            return tuple(
                mx.zeros((slots, mixer.key_value_heads, length, size), dtype)
                for size, dtype in self.packing.parts(mixer.head_dim)
            )

        with mx.stream(self.device):
            keys, values = ([*map(parts, self.config.attentions)] for _ in range(2))
            buffer = Buffer(keys, values, mx.zeros((slots, length), mx.int32), [None] * slots)
            self._fill(buffer, [(row, i) for i, row in enumerate(rows) if self.slots[row]])
        return buffer

    def _fill(self, buffer: Buffer, places: list[tuple[int, int]]) -> None:
        """Copy rows to slots of a buffer. places: (row, number of the slot)."""
        for row, number in places:
            buffer.copy(number, self.slots[row], self.lengths[row])
        shared = [
            row for row, _ in places if self.lengths[row] and self.slots[row].buffer.slots > 1
        ]
        if shared:
            # A pending slice would hold shared arrays, and their next step would copy them.
            mx.eval(buffer.arrays())
        for row in shared:
            self.states[row] = self._freeze(self.states[row])

    def _place(self, row: int, buffer: Buffer, number: int) -> None:
        """Let a row have a slot that its contents were copied to."""
        self.release(row)
        self._forget(buffer)
        buffer.rows[number] = row
        self.slots[row] = Slot(buffer, number)
        self.allocated[row] = buffer.length

    def _forget(self, buffer: Buffer) -> None:
        """Drop the steps that have this buffer."""
        self.steps = {key: step for key, step in self.steps.items() if buffer not in step.buffers}

    def _isolate(self, row: int, end: int = 1) -> None:
        """Move a row to its own buffer for its positions, and those up to `end`."""
        self._move([row], 1, self.storage_for(max(self.lengths[row], end)))

    def _assign(self, rows: tuple[int, ...]) -> StepBuffers:
        """Give `rows` shared buffers; those that share one already stay there."""
        full, shares = self._plan(rows)
        for row in full:
            self._isolate(row)
        for share in shares:
            if share.joining and (share.buffer or len(share.joining) > 1):
                self._join(share)
        self.drop_tables()
        buffers = {id(buffer): buffer for buffer in (self.slots[row].buffer for row in rows)}
        return StepBuffers(rows, list(buffers.values()))

    def _plan(self, rows: tuple[int, ...]) -> tuple[list[int], list[Share]]:
        """Idle rows to isolate, and the shares of a step over `rows`. Changes nothing."""
        active, buffers = set(rows), [self.slots[row].buffer for row in rows]
        joining = [row for row, buffer in zip(rows, buffers) if buffer.slots == 1]
        shared = list({id(buffer): buffer for buffer in buffers if buffer.slots > 1}.values())
        shared.sort(key=lambda buffer: len(active.intersection(buffer.rows)), reverse=True)
        if len(shared) > 1 and len(rows) <= SLOTS[-1] * 3 // 4:  # few enough for one graph again
            moved = [row for buffer in shared[1:] for row in buffer.rows if row in active]
            if self._fits(self._share(shared[0], moved, active)):
                joining, shared = joining + moved, shared[:1]
        # Idle rows whose slot is full have no position that a step may overwrite.
        full = [
            row
            for buffer in shared
            for row in buffer.rows
            if row is not None and row not in active and self.lengths[row] >= buffer.length
        ]
        taken = sum(self.storage_for(max(self.lengths[row], 1)) for row in full)
        shares = [self._share(buffer, [], active) for buffer in shared]
        for row in joining:
            for i, share in enumerate(shares):
                larger = self._share(share.buffer, [*share.joining, row], active)
                if self._fits(larger, taken * self.position_nbytes):
                    shares[i] = larger
                    break
            else:
                shares.append(self._share(None, [row], active))
        return full, shares

    def _share(self, buffer: Buffer | None, joining: list[int], active: set[int]) -> Share:
        """The share of a buffer's active rows and those that join them."""
        staying = [row for row in (buffer.rows if buffer else ()) if row in active]
        count = len(staying) + len(joining)
        slots = next((size for size in SLOTS if size >= count), count)
        length = max(self._needs([*staying, *joining]), default=0)
        if buffer:
            slots, length = max(slots, buffer.slots), max(length, buffer.length)
        return Share(buffer, staying, joining, slots, length)

    def _needs(self, rows: list[int]) -> list[int]:
        """Positions that each row needs for a step."""
        return [self.storage_for(self.lengths[row] + 1) for row in rows]

    def _fits(self, share: Share, taken: int = 0) -> bool:
        """True if a buffer can hold a share: it has few enough rows, wastes little memory on short
        ones, and fits free memory, less the bytes `taken` before, if it becomes larger."""
        if share.slots > SLOTS[-1]:
            return False
        positions, rows = share.slots * share.length, [*share.staying, *share.joining]
        nbytes = positions * self.position_nbytes
        if positions > SPARE * sum(self._needs(rows)) and nbytes > SMALL:
            return False
        is_new = len(rows) > 1 and not share.is_kept
        free = self.free_memory() if is_new and nbytes >= 1 << 20 else None
        return free is None or nbytes <= free - taken

    def _join(self, share: Share) -> None:
        """Copy rows into free slots, of a new and larger buffer if need be."""
        buffer, staying, joining, slots, length = share
        if not share.is_kept:
            if buffer:
                self._isolate_idle(buffer, staying)
            self._move([*staying, *joining], slots, length)
            return
        free = [number for number, row in enumerate(buffer.rows) if row is None]
        idle = [row for row in buffer.rows if row is not None and row not in staying]
        for row in idle[: max(0, len(joining) - len(free))]:
            free.append(self.slots[row].number)
            self._isolate(row)
        with mx.stream(self.device):
            self._fill(buffer, list(zip(joining, free)))
        for row, number in zip(joining, free):
            self._place(row, buffer, number)

    def _isolate_idle(self, buffer: Buffer, active: Collection[int]) -> None:
        """Give each row of a buffer that is not active a buffer of its own."""
        for row in [row for row in buffer.rows if row is not None and row not in active]:
            self._isolate(row)

    def _shrink(self, buffer: Buffer, rows: tuple[int, ...]) -> None:
        """Move the rows of a step to a buffer of half as many slots; isolate the others."""
        active = [row for row in buffer.rows if row in rows]
        self._isolate_idle(buffer, rows)
        self._move(active, max(buffer.slots // 2, 2), max(self._needs(active)))

    def _move(self, rows: list[int], slots: int, length: int) -> None:
        buffer = self._copy_rows(rows, slots, length)
        for number, row in enumerate(rows):
            self._place(row, buffer, number)


def make_angles(
    config: LlamaConfig, start: int, count: int, seq_len: int | None = None
) -> tuple[mx.array, mx.array]:
    """Cosines [count, 1, R/2] and sines [count, 2, R/2] of all tables, as ops.rope takes them."""
    cosine, sine = rope.tables(config, start, count, seq_len)
    return mx.array(cosine[:, None]), mx.array(np.stack([-sine, sine], axis=1))


def make_periods(config: LlamaConfig, seq_len: int | None = None) -> tuple[mx.array, float]:
    """Tokens per radian, float32 [R/2] of each table, and the factor on cosine and sine."""
    numbers = range(len(config.angles))
    tables = [rope.inverse_frequencies(config, seq_len, table) for table in numbers]
    with np.errstate(divide="ignore"):  # a pair that is not rotated has an infinite period
        periods = np.concatenate([1 / frequencies for frequencies, _ in tables])
    return mx.array(periods.astype(np.float32)), tables[0][1]
