"""Host-side state of a cache: positions filled, positions allocated, columns visible. A cache has
rows, one sequence each. Positions are Python ints, so that reading them never waits for the device.
`Cache` and `View` of each backend derive from these classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Window
from mlx_llama.core.options import CHECKPOINTS

from ..ops import View

# minimum positions to allocate at a time: one copy per 256 tokens instead of one per token
GROWTH = 256
# Recurrent states are kept at multiples of these positions and at ends of prompts.
CHECKPOINT = 256
# Positions that a row can be cut by where layers keep those within their window alone; calls of
# more than PROMPT are prompts, the last KEPT_ENDS of which a row can be cut to as well, and CHUNK
# positions of one fit the counted memory.
SLACK, PROMPT, KEPT_ENDS, CHUNK = 256, 32, 2, 512
CACHE_GROUP = 32  # numbers of a head that share a float16 scale where keys and values have 8 bits


def position_nbytes(config: LlamaConfig, itemsize: int, bits: int | None = None) -> int:
    """Bytes of one position's keys and values in all layers. itemsize: bytes of an activation.
    bits: None for activations, 16 for at most two bytes, 8 for codes with scales.
    """
    return sum(nbytes_by_window(config, itemsize, bits).values())


def nbytes_by_window(
    config: LlamaConfig, itemsize: int, bits: int | None = None
) -> dict[Window | None, int]:
    """As `position_nbytes`, of the layers with each window."""
    number, nbytes = itemsize if bits is None else min(itemsize, 2), dict[Window | None, int]()
    for kind in config.kinds:
        head_nbytes = kind.head_dim * number
        if bits == 8:  # a byte each, and a float16 scale for each group
            head_nbytes = kind.head_dim + 2 * -(-kind.head_dim // CACHE_GROUP)
        kind_nbytes = 2 * len(kind.slots) * kind.heads * head_nbytes
        nbytes[kind.window] = nbytes.get(kind.window, 0) + kind_nbytes
    return nbytes


def windows_nbytes(nbytes: Mapping[Window, int], length: int) -> int:
    """Bytes of a row of `length` positions in layers that keep those within their window, with
    what it can be cut by, a chunk of a prompt, and an end of one. nbytes: of a position.
    """
    total = 0
    for window, each in nbytes.items():
        kept = window.size + SLACK + CHUNK
        ends = window.size if length > kept else 0
        total += each * (min(length, kept) + ends)
    return total


def state_nbytes(config: LlamaConfig) -> int:
    """Bytes of a row's recurrent states at one position."""
    return 4 * sum(math.prod(shape) for mixer in config.recurrent for shape in mixer.states)


def count_states(length: int, checkpoints: int = CHECKPOINTS) -> int:
    """Copies of the states that a row of `length` positions takes: its own, the memory that the
    next call writes, and those at multiples of CHECKPOINT and the end of a prompt.
    """
    return 2 + min(checkpoints, 1 + length // CHECKPOINT) if length else 0


Layers = Sequence[np.ndarray]  # keys or values by slot
# A row's recurrent states by slot, float32 of `mixer.states`: replaced, never changed, unless
# `_freeze` copies them; a tuple, or a backend's type that is indexed like one
States = Any


class Positions:
    """Lengths of a cache's rows, each of which holds one sequence, and the calls that change rows;
    base of the backends' caches, which set `position_nbytes` and store keys, values and tokens.

    A backend that sets `window_nbytes` keeps of layers with a window the positions alone that a
    query sees after `oldest` positions of a row. The row can be cut to `oldest` and beyond, and to
    its checkpoints, which hold what a query sees there; others are cut to 0.
    """

    runtime: ClassVar[Any]  # a backend's
    max_checkpoints = CHECKPOINTS  # of a row
    slide_step = SLACK  # positions to drop at a time
    view_type: ClassVar[Callable[..., CallView]]
    arrays: Callable[[], list[Any]]  # that the next call depends on, to launch after a chunk
    _grow: Callable[[Mapping[int, int]], None]  # to {row: end}; sets `allocated`
    _free: Callable[[Sequence[int], bool], None]  # the storage of rows; True: of all
    _copy: Callable[[int, int, int], None]  # a source to an empty target, and the length
    # (row, length): its tokens, int32, and the keys and the values of each slot, float32 [G, n, D]
    _export: Callable[[int, int], tuple[np.ndarray, Layers, Layers]]
    # (row, tokens, keys, values): the same, to an empty row
    _load: Callable[[int, np.ndarray, Layers, Layers], None]
    # (window, parts): the tokens start .. end - 1 of each (row, start, end)
    _recent: Callable[[int, Sequence[tuple[int, int, int]]], Any]
    # (row, length): drop positions that no query sees after `length` in layers with a window
    _slide: Callable[[int, int], None]
    # (row, length): what a query sees there after `length`, not changed by later calls
    _keep_windows: Callable[[int, int], Any]
    # (row, length, windows): let a row that is longer or empty have these, None for none
    _put_windows: Callable[[int, int, Any], None]
    # float32 arrays on the device: zeros, one from the host, several with a new first axis, and one
    # that is no part of a larger one
    _zeros: Callable[[tuple[int, ...]], Any]
    _send: Callable[[np.ndarray], Any]
    _stack: Callable[[Sequence[Any]], Any]
    _own: Callable[[Any], Any]

    def __init__(
        self,
        config: LlamaConfig,
        capacity: int,
        dtype: Any = None,
        device: Any = "cpu",
        rows: int = 1,
        bits: int | None = None,
    ):
        """capacity: maximum positions of a row. bits: of keys and values, see `position_nbytes`."""
        for count, things in ((capacity, "positions"), (rows, "rows")):
            if count < 1:
                raise ContextError(f"a cache cannot have {count} {things}: ask for at least 1")
        self.config = config
        self.capacity = capacity
        self.dtype, self.device, self.bits = dtype, device, bits
        # keys and values together; of layers with a window that drop what lies before it
        self.position_nbytes, self.window_nbytes = 0, dict[Window, int]()
        self.lengths = [0] * rows  # positions filled
        self.allocated = [0] * rows  # positions that the storage has room for
        self.adapters = [0] * rows  # number of the adapter that computes a row, 0 for none
        self.states: list[States] = [()] * rows  # after `lengths` positions; () at none
        # by row: states after fewer positions, where it can be cut
        self.checkpoints: list[dict[int, States]] = [{} for _ in range(rows)]
        self.state_nbytes = state_nbytes(config)
        self.oldest = [0] * rows  # see above
        self.ends: list[list[int]] = [[] for _ in range(rows)]  # of the last prompts
        self._make_storage()

    def _make_storage(self) -> None:
        """Set `position_nbytes` and make what will hold keys, values and tokens."""

    @property
    def length(self) -> int:
        """Positions filled in row 0, for a cache of one sequence."""
        return self.lengths[0]

    @property
    def rows(self) -> int:
        """Number of rows, empty ones included."""
        return len(self.lengths)

    def select_rows(self, batch: int, rows: Sequence[int] | None) -> list[int]:
        """The rows of a call over `batch` sequences (None: the first). Raises ContextError."""
        chosen = list(range(batch) if rows is None else map(int, rows))
        if batch == len(chosen) == 1 and 0 <= chosen[0] < len(self.lengths):  # most steps
            return chosen
        if len(chosen) != batch:
            raise ContextError(
                f"a batch of {batch} sequences needs {batch} rows, not {len(chosen)}"
            )
        if len(set(chosen)) != batch:
            raise ContextError(f"rows {chosen}: a row occurs twice")
        for row in chosen:
            self.check_row(row)
        return chosen

    def check_row(self, row: int) -> None:
        """Raise ContextError unless the cache has this row."""
        if not 0 <= row < self.rows:
            raise ContextError(
                f"row {row} does not exist: the cache has {self.rows}; make_cache takes the "
                "number of rows"
            )

    def check_continues(self, row: int, index_pos: int, count: int) -> None:
        """Raise ContextError unless `count` positions from `index_pos` continue the row."""
        if index_pos != self.lengths[row]:
            where = "the cache" if self.rows == 1 else f"row {row}"
            raise ContextError(
                f"index_pos is {index_pos} but {where} holds {self.lengths[row]} positions: "
                f"trim({index_pos}) or continue at {self.lengths[row]}"
            )
        if count < 1:
            raise ContextError("forward needs at least one token")
        if index_pos + count > self.capacity:
            raise ContextError(
                f"{index_pos + count} positions do not fit the cache's capacity of {self.capacity}"
            )

    def storage_for(self, end: int) -> int:
        """`end` rounded up to GROWTH or an eighth: long sequences are rarely copied and traced."""
        step = max(GROWTH, 1 << max(0, end.bit_length() - 4))
        return min(-(-end // step) * step, self.capacity)

    def new_positions(self, row: int, end: int) -> int:
        """Positions to allocate to reach `end`: all, where growing makes new arrays."""
        return self.storage_for(end)

    @property
    def lasting_nbytes(self) -> int:
        """Bytes of a position in the layers that drop none."""
        return self.position_nbytes - sum(self.window_nbytes.values())

    def nbytes_for(self, length: int) -> int:
        """Bytes that a row of `length` positions takes."""
        states = count_states(length, self.max_checkpoints) * self.state_nbytes
        states += windows_nbytes(self.window_nbytes, length)
        return self.storage_for(length) * self.lasting_nbytes + states

    def taken(self, row: int) -> int:
        """Bytes that a row takes now."""
        states = len(self.checkpoints[row]) + bool(self.states[row])
        nbytes = self.allocated[row] * self.lasting_nbytes + states * self.state_nbytes
        return nbytes + self._spare(row) + windows_nbytes(self.window_nbytes, self.lengths[row])

    def _spare(self, row: int) -> int:
        """Bytes that a row's next call writes states to."""
        return self.state_nbytes if self.states[row] else 0

    def states_nbytes(self) -> int:
        """Bytes of all rows' recurrent states, each once."""
        kept = {id(s) for c in self.checkpoints for s in c.values()}
        return len(kept.union(id(s) for s in self.states if s)) * self.state_nbytes

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Allocate storage for {row: end of its positions}. Raises ContextError."""
        grown = {row: end for row, end in ends.items() if end > self.allocated[row]}
        if grown:
            self.check_memory(grown)
            self._grow(grown)

    def check_memory(self, ends: Mapping[int, int]) -> None:
        """Raise ContextError if storage for `ends`, as in `reserve`, exceeds free memory."""
        grown = [(row, end) for row, end in ends.items() if end > self.allocated[row]]
        positions = sum(self.new_positions(row, end) for row, end in grown)
        needed = positions * self.lasting_nbytes
        needed += sum(windows_nbytes(self.window_nbytes, end) for _, end in grown)
        free = None if needed < 1 << 20 else self.free_memory()
        if free is not None and needed > free:
            raise ContextError(
                f"keys and values of {positions} positions take {needed / 1e9:.2f} GB, and "
                f"{free / 1e9:.2f} GB of memory are free: shorten the prompt, lower `ctx_size`, or "
                "close other programs"
            )

    def free_memory(self) -> int | None:
        """Bytes of free memory on the device; None: unknown."""
        return self.runtime.free_memory(self.device)

    def view(self, tokens: Any, index_pos: int | Sequence[int], rows: Any = None) -> CallView:
        """The view of a forward over `tokens` [B, T]; see CallView."""
        return self.view_type(self, tokens, index_pos, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of allocated keys, values, tokens and recurrent states."""
        states = sum(array.nbytes for array in self.state_arrays())
        return sum(array.nbytes for array in self.arrays()) - states + self.states_nbytes()

    def state_arrays(self) -> list[Any]:
        """The rows' recurrent states, as of `arrays`."""
        return [array for states in self.states for parts in states for array in parts]

    def recent(
        self, window: int, rows: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> Any:
        """The last `window` of the first `lengths` tokens of each row (None: of all), int32 [B,
        window], -1 in front where there are fewer.
        """
        rows = range(self.rows if lengths is None else len(lengths)) if rows is None else rows
        ends = [self.lengths[row] for row in rows] if lengths is None else lengths
        pairs = zip(rows, ends, strict=True)
        return self._recent(window, [(row, max(0, end - window), end) for row, end in pairs])

    def reset(self, row: int | None = None) -> None:
        """Drop a row's positions, None for all rows', and their storage. Raises ContextError."""
        if row is not None:
            self.check_row(row)
        rows = range(self.rows) if row is None else (row,)
        for each in rows:
            self.lengths[each] = self.allocated[each] = 0
            self.states[each], self.checkpoints[each] = (), {}
            self.oldest[each], self.ends[each] = 0, []
        self._free(rows, row is None)

    def find_cut(self, length: int, row: int = 0) -> int:
        """The most positions, up to `length`, that a row can be cut to: all of them, or those of
        a checkpoint.
        """
        oldest = self.oldest[row]
        if length == self.lengths[row] or (not self.state_nbytes and length >= oldest):
            return length
        first = oldest if self.state_nbytes else 0  # these checkpoints hold no windows
        return max((at for at in self.checkpoints[row] if first <= at <= length), default=0)

    def trim(self, length: int, row: int = 0) -> int:
        """Keep the first `length` positions of a row, or as many as `find_cut` says; returns their
        number. Raises ContextError if there are fewer.
        """
        self.check_trim(length, row)
        cut = self.find_cut(length, row)
        if self.state_nbytes and cut < self.lengths[row]:
            self.states[row] = self._states_at(cut, row)
        if cut < self.oldest[row]:
            if self.window_nbytes:
                self._put_windows(row, cut, self.checkpoints[row].get(cut))
            self.oldest[row] = cut
        self.checkpoints[row] = self._checkpoints_to(cut, row)
        self.ends[row] = [end for end in self.ends[row] if end <= cut]
        self.lengths[row] = cut
        return cut

    def _states_at(self, length: int, row: int) -> States:
        """A row's states at a length of `find_cut`."""
        is_end = length == self.lengths[row]
        return self.states[row] if is_end else self.checkpoints[row].get(length, ())

    def _checkpoints_to(self, length: int, row: int) -> dict[int, States]:
        return {at: states for at, states in self.checkpoints[row].items() if at <= length}

    def _freeze(self, states: States) -> States:
        """States that no later call changes."""
        return states

    def advance(self, span: Span, states: States) -> None:
        """Take over the recurrent states after a call, and keep some as checkpoints."""
        row, end = span.row, span.end
        kept = self.checkpoints[row]
        if span.count > 1 and span.start and span.start not in kept:  # drafts are cut to it
            kept[span.start] = self._freeze(self.states[row])
        if span.count > 1 or end % CHECKPOINT == 0:
            kept[end] = self._freeze(states)
        self.states[row] = states
        while len(kept) > self.max_checkpoints:
            # those within a block go first, but for the latest, which end messages
            within = sorted(at for at in kept if at % CHECKPOINT)
            del kept[within[0] if len(within) > max(2, self.max_checkpoints // 2) else min(kept)]

    def slide(self, span: Span) -> None:
        """After a call, let go of what lies before the windows."""
        row, ends = span.row, self.ends[span.row]
        if span.count > PROMPT:
            if ends and span.start == ends[-1]:  # the next chunk
                ends[-1] = span.end
            elif not ends or span.start - ends[-1] >= SLACK:
                ends[:] = [*ends[1 - KEPT_ENDS :], span.end]
        oldest = span.end - SLACK
        if oldest - self.oldest[row] < self.slide_step:
            return
        kept = {} if self.state_nbytes else self.checkpoints[row]
        for end in ends:
            if self.oldest[row] <= end < oldest and end not in kept:
                kept[end] = self._keep_windows(row, end)
        for at in kept.keys() - set(ends):
            del kept[at]
        self._slide(row, oldest)
        self.oldest[row] = oldest

    def copy_prefix(self, source: int, target: int, length: int) -> int:
        """Copy `length` positions of row `source` to an empty row, or as many as `find_cut` says;
        returns their number. Raises ContextError.
        """
        self.check_copy(source, target, length)
        length = self.find_cut(length, source)
        if length:
            self._copy(source, target, length)
            self.checkpoints[target] = self._checkpoints_to(length, source)
            self.ends[target] = [end for end in self.ends[source] if end <= length]
            self.oldest[target] = min(length, self.oldest[source])
            if length < self.oldest[source] and self.window_nbytes:
                self._put_windows(target, length, self.checkpoints[source][length])
            if self.state_nbytes:
                is_end = length == self.lengths[source]
                self.states[target] = (
                    self._freeze(self.states[source])
                    if is_end
                    else self.checkpoints[target][length]
                )
            self.lengths[target] = length
        return length

    def state(self, row: int = 0, length: int | None = None) -> dict[str, np.ndarray]:
        """A row, or as much of its first `length` positions as `find_cut` says, in NumPy: tokens
        int32 [n]; keys and values float32, as of LlamaConfig.state_shapes; recurrent float32 [m],
        if the model has such states. {}: empty.
        """
        self.check_row(row)
        length = self.find_cut(self.lengths[row] if length is None else length, row)
        if not length:
            return {}
        tokens, *both = self._export(row, length)
        state = {"tokens": tokens}
        parts = ((kind, layers) for kind in self.config.kinds for layers in both)
        for (name, shape), (kind, layers) in zip(self.config.state_shapes(length).items(), parts):
            stacked = np.stack([layers[slot] for slot in kind.slots])
            state[name] = stacked[:, :, stacked.shape[2] - shape[2] :]
        if self.state_nbytes:
            states = self._states_at(length, row)
            arrays = [self.runtime.to_numpy(part) for parts in states for part in parts]
            state["recurrent"] = np.concatenate([array.reshape(-1) for array in arrays])
        return state

    def restore(self, state: Mapping[str, np.ndarray], row: int = 0) -> None:
        """Load the `state` of a row of any backend's cache. Raises ContextError."""
        self.check_state(state, row)
        self.reset(row)
        if state:
            length = len(state["tokens"])
            self.reserve({row: length})
            keys, values = self._split_kinds(state, length)
            self._load(row, state["tokens"], keys, values)
            self.lengths[row], self.ends[row] = length, [length]
            if any(kind.first(length) for kind in self.config.kinds):
                self.oldest[row] = length
            if self.state_nbytes:
                self.states[row] = self._split_states(state["recurrent"])

    def _split_kinds(self, state: Mapping[str, np.ndarray], length: int) -> tuple[Layers, Layers]:
        """Keys and values by slot; of all positions, unless the backend frees some."""
        names = iter(self.config.state_shapes(0))
        layers: tuple[dict[int, np.ndarray], ...] = {}, {}
        for kind in self.config.kinds:
            for part in layers:
                numbers = state[next(names)]
                if not self.window_nbytes and (missing := length - numbers.shape[2]):
                    numbers = np.pad(numbers, ((0, 0), (0, 0), (missing, 0), (0, 0)))
                part |= zip(kind.slots, numbers)
        keys, values = ([part[slot] for slot in sorted(part)] for part in layers)
        return keys, values

    def _split_states(self, numbers: np.ndarray) -> States:
        """States of their numbers, float32, in one array."""
        states, at = [], 0
        for mixer in self.config.recurrent:
            parts = []
            for shape in mixer.states:
                size = math.prod(shape)
                part = np.ascontiguousarray(numbers[at : at + size], np.float32).reshape(shape)
                parts.append(self._send(part))
                at += size
            states.append(tuple(parts))
        return tuple(states)

    def check_trim(self, length: int, row: int) -> None:
        """Raise ContextError unless 0 <= length <= the row's length."""
        self.check_row(row)
        if not 0 <= length <= self.lengths[row]:
            raise ContextError(
                f"cannot trim to {length} positions: the cache holds {self.lengths[row]}"
            )

    def check_copy(self, source: int, target: int, length: int) -> None:
        """Raise ContextError unless row `source` has `length` positions and `target` none."""
        self.check_row(target)
        self.check_trim(length, source)
        if source == target or self.lengths[target]:
            raise ContextError(
                f"row {target} is not empty: reset it before a prefix is copied to it"
            )

    def check_state(self, state: Mapping[str, np.ndarray], row: int) -> None:
        """Raise ContextError unless `state` has this model's shapes and fits the capacity."""
        self.check_row(row)
        if not state:
            return
        c = self.config
        (length,) = np.shape(state["tokens"])
        for name, expected in c.state_shapes(length).items():
            shape = np.shape(state.get(name, 0))
            if shape != expected:
                raise ContextError(
                    f"the saved cache's {name} have the shape {list(shape)}, "
                    f"this model needs {list(expected)}: it was saved by another model"
                )
        wanted = () if not self.state_nbytes else (self.state_nbytes // 4,)
        if np.shape(state.get("recurrent", 0)) != wanted:
            raise ContextError(
                f"the saved cache's recurrent states have the shape "
                f"{list(np.shape(state.get('recurrent', 0)))}, this model needs {list(wanted)}: it "
                "was saved by another model"
            )
        if length > self.capacity:
            raise ContextError(
                f"the saved cache holds {length} positions, this one at most {self.capacity}"
            )


@dataclass(slots=True)
class Span:
    """New positions `start` .. `end` - 1 of one row."""

    row: int
    start: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last new one: the row's length after the call."""
        return self.start + self.count

    def first_visible(self, window: Window | None) -> int:
        """First column that any new query sees: 0 without a window."""
        return max(0, window.first(self.start)) if window else 0

    def visible(self, window: Window | None) -> np.ndarray | None:
        """Columns that each new query sees: bool [count, end - first_visible], True where visible.
        None if every query sees every column (a single token). A query at position p sees the
        columns c <= p, with a window those from its first on.
        """
        if self.count == 1:
            return None
        rows = np.arange(self.start, self.end)[:, None]
        columns = np.arange(self.first_visible(window), self.end)[None, :]
        mask = columns <= rows
        if window:
            mask &= columns >= window.first(rows)
        return mask


class CallView(View):
    """Host-side state of one call on a cache: `count` new positions of each of some rows.

    spans: the new positions, by sequence of the batch. adapters: the rows' numbers of adapters. A
    context manager: the rows' lengths include the new positions once the block succeeds, and are
    unchanged if it raises. A backend's views convert `Span.visible` in `_make_mask`.
    """

    _make_mask: Callable[[Span, Window], Any]

    def __init__(
        self,
        cache: Positions,
        batch: int,
        count: int,
        index_pos: int | Sequence[int],
        rows: Sequence[int] | None = None,
    ):
        """Allocate storage in the cache. index_pos: of the first new position, one for all rows or
        one per row. rows: None for the first `batch`. Raises ContextError.
        """
        chosen = cache.select_rows(batch, rows)
        if type(index_pos) is int:
            starts = [index_pos] * batch
        else:
            starts = list(map(int, index_pos if np.iterable(index_pos) else [index_pos] * batch))
        if len(starts) != batch:
            raise ContextError(
                f"{batch} sequences need {batch} positions or one for all, not {len(starts)}"
            )
        # One loop, since a generator or two cost a decoded token as much as their work
        spans, adapters, grows = [], [], False
        for row, start in zip(chosen, starts):
            cache.check_continues(row, start, count)
            grows = grows or start + count > cache.allocated[row]
            spans.append(Span(row, start, count))
            adapters.append(cache.adapters[row])
        if grows:
            cache.reserve({span.row: span.end for span in spans})
        self.spans, self.adapters = tuple(spans), tuple(adapters)
        self.cache, self.config, self.batch, self.count = cache, cache.config, batch, count
        self._masks: dict[tuple[int, Window], Any] = {}  # by start and window
        self._kept: dict[int, tuple[Any, ...]] = {}  # recurrent states after this call, by slot

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            for i, span in enumerate(self.spans):
                self.cache.lengths[span.row] = span.end
                if self.cache.state_nbytes:
                    self.cache.advance(span, self.states_after(i))
                if self.cache.window_nbytes:
                    self.cache.slide(span)
            if self.listener is not None:
                self._probe_states()

    def _probe_states(self) -> None:
        """Show the last of each layer's states after the call, [B, 1, n]."""
        for slot, mixer in enumerate(self.config.recurrent):
            states = [self.cache.states[span.row][slot][-1] for span in self.spans]
            rows = self.cache._stack([state.reshape(1, -1) for state in states])
            self.probe("state", rows, mixer.index)

    def states_after(self, i: int) -> States:
        """The recurrent states of sequence `i` after this call."""
        kept = (self._kept[slot] for slot in range(len(self.config.recurrent)))
        return tuple(tuple(self.cache._own(part[i]) for part in parts) for parts in kept)

    def recurrent(self, slot: int) -> tuple[Any, ...]:
        """As of ops.View: new rows begin with zeros."""
        cache, shapes = self.cache, self.config.recurrent[slot].states
        rows = [cache.states[span.row] for span in self.spans]
        if len(rows) > 1 or not rows[0]:
            empty = tuple(cache._zeros(shape) for shape in shapes)
            parts = zip(*(states[slot] if states else empty for states in rows))
            return tuple(cache._stack(part) for part in parts)
        return tuple(part[None] for part in rows[0][slot])

    def keep(self, slot: int, states: tuple[Any, ...]) -> None:
        self._kept[slot] = states

    def mask(self, window: Window | None = None) -> list[Any]:
        """Positions that a sequence's queries see: bool [T, columns], "causal", or None for all."""
        return [self._mask(span, window) for span in self.spans]

    def _mask(self, span: Span, window: Window | None) -> Any:
        if span.count == 1:
            return None
        if not window or window.size >= span.end:
            return "causal"
        if (span.start, window) not in self._masks:
            self._masks[span.start, window] = self._make_mask(span, window)
        return self._masks[span.start, window]


def checked_tokens(tokens: Any, vocab_size: int) -> Any:
    """Host token ids as int32 [B, T]; device arrays unchanged. Raises ContextError if invalid."""
    if not isinstance(tokens, (list, tuple, np.ndarray)):
        return tokens
    if isinstance(tokens, np.ndarray) and tokens.shape == (1, 1) and tokens.dtype == np.int32:
        if 0 <= tokens[0, 0] < vocab_size:
            return tokens  # most steps
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise ContextError("all rows of a batch of tokens must have the same length") from None
    if array.ndim != 2 or array.size == 0 or array.dtype.kind not in "iu":
        raise ContextError(
            f"tokens must be integers of shape [batch, length], not {array.dtype} "
            f"{list(array.shape)}"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        raise ContextError(
            f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
    return array.astype(np.int32, copy=False)
