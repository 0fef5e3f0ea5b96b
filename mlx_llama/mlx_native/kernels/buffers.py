"""Storage of a cache's rows: arrays of their own, or slots of a room that one graph serves.

A row alone has arrays of its own. Rows that decode together share a *room*, whose arrays have a slot for each of them. A row
joins by a copy into its slot and leaves by a copy out of it; other slots stay in place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import CACHE_GROUP, Positions
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig

SLOTS = (1, 2, 4, 8, 16, 32)  # sizes of rooms; a traced step has one of these batches
SPARE = 4  # a room has at most this many times the positions that its rows need, unless it is small
SMALL = 1 << 27  # bytes of keys and values up to which a room may have more
PATIENCE = 4  # steps with at most a quarter of the slots in use, after which a room shrinks

Parts = tuple[mx.array, ...]  # keys or values of a layer: (numbers,), or (codes, scales, biases)


@dataclass(frozen=True)
class Packing:
    """How keys and values are stored. bits: None for numbers of `dtype`; 16 for numbers of two bytes, float16 for a float32
    `dtype`; 8 for codes of a byte, with a scale and a bias of `scale_dtype` for every CACHE_GROUP of a head. size: D.
    """

    bits: int | None
    size: int
    dtype: mx.Dtype
    scale_dtype: mx.Dtype

    @property
    def number_dtype(self) -> mx.Dtype:
        """Of stored numbers."""
        return mx.float16 if self.bits == 16 and self.dtype == mx.float32 else self.dtype

    @property
    def parts(self) -> list[tuple[int, mx.Dtype]]:
        """Last axis and dtype of each part."""
        if self.bits != 8:
            return [(self.size, self.number_dtype)]
        groups = -(-self.size // CACHE_GROUP)
        return [(groups * CACHE_GROUP // 4, mx.uint32), (groups, self.scale_dtype), (groups, self.scale_dtype)]

    @property
    def nbytes(self) -> int:
        """Bytes of a head's keys or values at one position."""
        return sum(size * dtype.size for size, dtype in self.parts)

    def pack(self, x: mx.array) -> Parts:
        """Keys or values [..., D] as they are stored: Parts of [..., *]."""
        if self.bits != 8:
            return (x.astype(self.number_dtype),)
        if spare := -self.size % CACHE_GROUP:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, spare)])
        return tuple(mx.quantize(x.astype(self.scale_dtype), group_size=CACHE_GROUP, bits=self.bits))

    def unpack(self, parts: Parts) -> mx.array:
        """The numbers [..., D] of stored parts."""
        if self.bits != 8:
            return parts[0].astype(self.dtype)
        return mx.dequantize(*parts, group_size=CACHE_GROUP, bits=self.bits)[..., :self.size].astype(self.dtype)


class Room:
    """Arrays of some rows, a slot for each. keys, values: `Parts` per layer, [S, G, L, *] each; tokens: int32 [S, L].

    members: the row in each slot, None for a free one. wide_steps: consecutive steps that used at most a quarter of them.
    """

    def __init__(self, keys: list[Parts], values: list[Parts], tokens: mx.array, members: list[int | None]):
        self.keys, self.values, self.tokens, self.members = keys, values, tokens, members
        self.wide_steps = 0

    @property
    def length(self) -> int:
        """L: positions of a slot."""
        return self.tokens.shape[1]

    @property
    def count(self) -> int:
        """Slots that rows have."""
        return len(self.members) - self.members.count(None)

    def arrays(self) -> list[mx.array]:
        """All arrays, layer by layer."""
        return [*(part for parts in (*self.keys, *self.values) for part in parts), self.tokens]

    def copy(self, slot: int, source: Room, own: int, length: int) -> None:
        """Copy the first `length` positions of `source`'s slot `own` to `slot`, lazily."""
        if length == 0:
            return
        for target, array in zip(self.arrays(), source.arrays()):
            if target.ndim == 2:
                target[slot:slot + 1, :length] = array[own:own + 1, :length]
            else:
                target[slot:slot + 1, :, :length] = array[own:own + 1, :, :length]


class Group(NamedTuple):
    """Rows of a step that share a room. order: the sequence in each slot, -1 where there is none."""

    room: Room
    order: tuple[int, ...]


class Layout:
    """The groups of a step over `rows`. returned: what the last step returned; following: its tokens, by group."""

    def __init__(self, rows: tuple[int, ...], groups: list[Group]):
        self.rows, self.groups = rows, groups
        slots = [i for group in groups for i in group.order]
        taken = [slots.index(i) for i in range(len(rows))]
        self._is_ordered, self._is_full = taken == list(range(len(rows))), len(slots) == len(rows)
        self._taken = mx.array(taken, mx.int32)
        self.returned: mx.array | None = None
        self.following: list[mx.array] = []

    def collect(self, outputs: list[mx.array]) -> mx.array:
        """Select the drawn tokens [B, *] of each row from outputs [S, *] of all slots, by group."""
        joined = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        if not self._is_ordered:
            return mx.take(joined, self._taken, axis=0)
        return joined if self._is_full else joined[:len(self.rows)]


class Rooms(Positions):
    """A cache's rows and where they are stored. bits: as in Packing.

    A room's arrays: numbers [S, G, L, D]; or codes uint32 [S, G, L, D' / 4], scales and biases [S, G, L, D' / 32], where D'
    is D rounded up to groups of 32.
    """

    def __init__(self, config: LlamaConfig, capacity: int, dtype: mx.Dtype = mx.float32,
                 device: mx.Device = mx.Device(mx.cpu), rows: int = 1, bits: int | None = None):
        # On the CPU MLX sums products of 16-bit scales in 16 bits.
        self.packing = Packing(bits, config.head_dim, dtype, mx.float32 if device.type == mx.cpu else dtype)
        super().__init__(config, capacity, 2 * config.num_hidden_layers * config.num_key_value_heads * self.packing.nbytes, rows)
        self.dtype, self.device = dtype, device
        # mx.fast.rope forms its angles in float32, 1e-3 off at position 100 000. That is exact enough for 16-bit
        # activations, but float32 promises the other backends' tokens. MLX's CPU device has no such kernel: tables take
        # fewer primitives there at every width. The kernel has no factor that depends on the position.
        self.tabulated = dtype == mx.float32 or device.type == mx.cpu or bool(config.query_beta)
        self._places: list[tuple[Room, int] | None] = [None] * rows  # each row's room and slot
        self._tables: dict[int, tuple] = {}  # by positions of a room
        self._layouts: dict[tuple[int, ...], Layout] = {}  # by rows; no two share a room

    def room_of(self, row: int, end: int) -> Room:
        """The room of a row alone, with storage for `end` positions; takes the row out of a shared one."""
        room, _ = self._places[row]
        if len(room.members) > 1:
            self._take_out(row, self.storage_for(end))
            self._empty_if_wide(room)
            room, _ = self._places[row]
        return room

    def layout(self, rows: Sequence[int]) -> Layout:
        """The groups of a step over `rows`, which have storage for it and join rooms where they are in none."""
        rows = tuple(rows)
        if rows not in self._layouts:
            layout = self._arrange(rows)
            for room, _ in layout.groups:
                self._forget(room)
            self._layouts[rows] = layout
        layout = self._layouts[rows]
        for room, order in layout.groups:
            is_wide = 1 < len(order) >= 4 * (len(order) - order.count(-1))
            room.wide_steps = room.wide_steps + 1 if is_wide else 0
            if room.wide_steps > PATIENCE:
                self._shrink(room, rows)
                return self.layout(rows)
        return layout

    def tables(self, length: int) -> tuple:
        """Cosines and sines of the first `length` positions, or periods and a factor: see ops.rope."""
        if length not in self._tables:
            self._tables[length] = (make_angles(self.config, 0, length, self.capacity) if self.tabulated
                                    else make_periods(self.config, self.capacity))
        return self._tables[length]

    def _grow(self, ends: Mapping[int, int]) -> None:
        with mx.stream(self.device):
            grown = {}
            for row, end in ends.items():
                room = self._make_room([row], self.storage_for(end))
                if self._places[row] is not None and self.lengths[row]:
                    room.copy(0, *self._places[row], self.lengths[row])
                    if len(self._places[row][0].members) > 1:
                        mx.eval(room.arrays())
                grown[row] = room
        # Assign at the end: an interrupt before this line changes nothing.
        for row, room in grown.items():
            self._place(row, room, 0)
        self._drop_tables()

    def _make_room(self, members: Sequence[int | None], length: int) -> Room:
        """A room of zeros for the rows in `members`."""
        layers, count = self.config.num_hidden_layers, len(members)
        self.tables(length)

        def parts() -> Parts:
            return tuple(mx.zeros((count, self.config.num_key_value_heads, length, size), dtype)
                         for size, dtype in self.packing.parts)

        return Room([parts() for _ in range(layers)], [parts() for _ in range(layers)], mx.zeros((count, length), mx.int32),
                    list(members))

    def _place(self, row: int, room: Room, slot: int) -> None:
        """Move a row to a slot of a room that has its contents."""
        self._vacate(row)
        self._forget(room)
        room.members[slot] = row
        self._places[row] = (room, slot)
        self.allocated[row] = room.length

    def _vacate(self, row: int) -> Room | None:
        """Free a row's slot of the room that is returned, and its arrays with the last slot."""
        if self._places[row] is None:
            return None
        room, slot = self._places[row]
        room.members[slot] = None
        self._places[row] = None
        self._forget(room)
        return room

    def _forget(self, room: Room) -> None:
        """Drop the layouts that have this room."""
        self._layouts = {rows: layout for rows, layout in self._layouts.items()
                         if all(group.room is not room for group in layout.groups)}

    def _drop_tables(self) -> None:
        lengths = {place[0].length for place in self._places if place}
        self._tables = {length: table for length, table in self._tables.items() if length in lengths}

    def _take_out(self, row: int, length: int) -> None:
        """Copy a row's slot to arrays of its own for `length` positions, and free the slot."""
        with mx.stream(self.device):
            room = self._make_room([row], length)
            room.copy(0, *self._places[row], self.lengths[row])
            # A pending slice would hold the shared arrays, and their next step would copy them.
            mx.eval(room.arrays())
        self._place(row, room, 0)

    def _empty_if_wide(self, room: Room) -> None:
        """Give the last rows of a room arrays of their own, so that each frees what it takes."""
        if room.count <= max(1, len(room.members) // 4):
            for row in [row for row in room.members if row is not None]:
                self._take_out(row, self.storage_for(max(self.lengths[row], 1)))

    def _arrange(self, rows: tuple[int, ...]) -> Layout:
        """Put `rows` into rooms, those that are in one already in the same one."""
        wanted = set(rows)
        rooms: list[Room] = []
        newcomers = []
        for row in rows:
            room, _ = self._places[row]
            if len(room.members) == 1:
                newcomers.append(row)
            elif room not in rooms:
                rooms.append(room)
        rooms.sort(key=lambda room: len(wanted.intersection(room.members)), reverse=True)
        if len(rooms) > 1 and len(rows) <= SLOTS[-1] * 3 // 4:  # few enough for one graph again
            moved = [row for room in rooms[1:] for row in room.members if row in wanted]
            if self._fits(rooms[0], moved, wanted):
                newcomers, rooms = newcomers + moved, rooms[:1]
        # Idle rows whose slot is full have no position that a step may overwrite.
        for room in rooms:
            for row in room.members:
                if row is not None and row not in wanted and self.lengths[row] >= room.length:
                    self._take_out(row, self.storage_for(self.lengths[row]))
        joins: list[tuple[Room | None, list[int]]] = [(room, []) for room in rooms]
        for row in newcomers:
            target = next((new for room, new in joins if self._fits(room, [*new, row], wanted)), None)
            if target is None:
                joins.append((None, [row]))
            else:
                target.append(row)
        for room, new in joins:
            if new and (room or len(new) > 1):
                self._join(room, new, wanted)
        self._drop_tables()
        index = {row: i for i, row in enumerate(rows)}
        rooms = list({id(self._places[row][0]): self._places[row][0] for row in rows}.values())
        return Layout(rows, [Group(room, tuple(index.get(row, -1) for row in room.members)) for room in rooms])

    def _fits(self, room: Room | None, new: list[int], wanted: set[int]) -> bool:
        """True if the rows `new` may join a room, None for a new one: it has few enough of them, wastes little memory on
        short ones, and its larger arrays fit free memory."""
        active = [row for row in (room.members if room else ()) if row in wanted] + new
        if len(active) > SLOTS[-1]:
            return False
        needs = [self.storage_for(self.lengths[row] + 1) for row in active]
        slots = max(len(room.members) if room else 1, _bucket(len(active)))
        length = max(*needs, room.length if room else 0)
        nbytes = slots * length * self.position_nbytes
        if slots * length > SPARE * sum(needs) and nbytes > SMALL:
            return False
        is_new = len(active) > 1 and (room is None or slots > len(room.members) or length > room.length)
        free = self.free_memory() if is_new and nbytes >= 1 << 20 else None
        return free is None or nbytes <= free

    def _join(self, room: Room | None, new: list[int], wanted: set[int]) -> None:
        """Copy rows into free slots, of a new and larger room if need be."""
        staying = [row for row in (room.members if room else ()) if row in wanted]
        length = max([self.storage_for(self.lengths[row] + 1) for row in new] + ([room.length] if room else []))
        slots = _bucket(len(staying) + len(new))
        if room and slots <= len(room.members) and length == room.length:
            free = [slot for slot, row in enumerate(room.members) if row is None]
            for row in [row for row in room.members if row is not None and row not in wanted]:
                if len(free) < len(new):
                    free.append(self._places[row][1])
                    self._take_out(row, self.storage_for(self.lengths[row]))
            with mx.stream(self.device):
                for row, slot in zip(new, free):
                    source, own = self._places[row]
                    room.copy(slot, source, own, self.lengths[row])
                    if len(source.members) > 1:
                        mx.eval(room.arrays())
                    self._place(row, room, slot)
            return
        slots = max(slots, len(room.members) if room else 0)
        self._free_idle(room, wanted)
        self._move([*staying, *new], slots, length)

    def _free_idle(self, room: Room | None, wanted: Collection[int]) -> None:
        """Give the rows of a room that are not in a step arrays of their own."""
        for row in [row for row in (room.members if room else ()) if row is not None and row not in wanted]:
            self._take_out(row, self.storage_for(max(self.lengths[row], 1)))

    def _shrink(self, room: Room, rows: tuple[int, ...]) -> None:
        """Move the rows of a step to a room of half as many slots; others get arrays of their own."""
        active = [row for row in room.members if row in rows]
        self._free_idle(room, rows)
        needed = max(self.storage_for(self.lengths[row] + 1) for row in active)
        self._move(active, max(len(room.members) // 2, 2), needed)

    def _move(self, rows: list[int], slots: int, length: int) -> None:
        """Move rows to a new room."""
        with mx.stream(self.device):
            room = self._make_room([None] * slots, length)
            for slot, row in enumerate(rows):
                room.copy(slot, *self._places[row], self.lengths[row])
            if any(len(self._places[row][0].members) > 1 for row in rows):
                mx.eval(room.arrays())
        for slot, row in enumerate(rows):
            self._place(row, room, slot)


def _bucket(count: int) -> int:
    """The smallest size of a room with `count` slots."""
    return next(size for size in SLOTS if size >= count)


def make_angles(config: LlamaConfig, start: int, count: int, seq_len: int | None = None) -> tuple[mx.array, mx.array]:
    """Cosines float32 [count, 1, R/2] and sines [count, 2, R/2], as ops.rope takes them; several tables side by side."""
    cosine, sine = rope.tables(config, start, count, seq_len)
    return mx.array(cosine[:, None]), mx.array(np.stack([-sine, sine], axis=1))


def make_periods(config: LlamaConfig, seq_len: int | None = None) -> tuple[mx.array, float]:
    """Tokens per radian, float32 [R/2], of several tables one after the other, and the factor on cosine and sine."""
    found = [rope.inverse_frequencies(config, seq_len, table) for table in range(len(config.ropes))]
    return mx.array(np.concatenate([1 / frequencies for frequencies, _ in found]).astype(np.float32)), found[0][1]
