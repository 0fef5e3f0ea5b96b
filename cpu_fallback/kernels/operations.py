"""Operations of the interpreter: each writes the function that computes items lo .. hi - 1 of a
record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..pages import PAGE
from . import attention, layouts, norms, packing, paging, products, rope, routing, unpacked
from .emit import LANES, Function, Module, Value, Variable, f32, f32s, i64
from .layouts import GROUP, ActivationLayout, Layout
from .recipe import Recipe, expert_tiles, tiles
from .records import CONTEXT, FIELDS, PLACE, experts_kind, gather_kind, pack_kind, product_kind
from .target import Target

_OPERATION = {"op": i64, "lo": i64, "hi": i64, "thread": i64, "context": i64}
Writer = Callable[[Module, str], Function]  # writes an operation's function of this name


class _Operation(Function):
    """An operation's function under construction. Operands are attributes, like parameters."""

    def __init__(self, module: Module, name: str):
        self.fields = FIELDS[name.split()[0]]
        super().__init__(module, "op " + name, _OPERATION)

    def __getattr__(self, name: str) -> Value:
        if name in self.__dict__["fields"]:
            return self.load_word(self.op, self.fields[name])
        return super().__getattr__(name)

    def load_float(self, name: str) -> Value:
        """A float32 operand, in the low half of its word."""
        return self.load(f32, self.op, 8 * self.fields[name], 4)

    def load_context(self, name: str) -> Value:
        """A word of the context."""
        return self.load_word(self.context, CONTEXT[name])

    def place(self, token: Value) -> dict[str, Value]:
        """A token's record of PLACE."""
        record = self.load_context("places") + token * (8 * len(PLACE))
        return {name: self.load_word(record, index) for name, index in PLACE.items()}


def operations(recipe: Recipe) -> dict[str, Writer]:
    """The functions that write a recipe's operations, by kind."""
    target, sources, tile_sizes = (
        recipe.target,
        ("norm", "plain", recipe.activation),
        expert_tiles(recipe.target),
    )
    layouts_of = {layout: recipe.activation_layout(layout) for layout in recipe.layouts}
    writers: dict[str, Writer] = {}
    for layout, x_layout in layouts_of.items():
        writers[product_kind(layout)] = partial(
            _write_product, target=target, layout=layout, x_layout=x_layout
        )
    for x_layout in recipe.activations:
        for source in sources:
            writers[pack_kind(x_layout, source)] = partial(
                _write_pack, x_layout=x_layout, source=source, sizes=tiles(target, x_layout)
            )
    if recipe.has_experts:
        for layout, x_layout in layouts_of.items():
            writers[experts_kind(layout)] = partial(
                _write_experts, target=target, layout=layout, x_layout=x_layout, sizes=tile_sizes
            )
        for x_layout in recipe.activations:
            for source in sources:
                writers[gather_kind(x_layout, source)] = partial(
                    _write_gather, x_layout=x_layout, source=source
                )
        writers |= {"route": partial(_write_route, sizes=tile_sizes), "combine": _write_combine}
    return writers | {
        "adjust": _write_adjust,
        "softcap": _write_softcap,
        "select": _write_select,
        "norm_heads": _write_norm_heads,
        "rotate": partial(
            _write_rotate,
            head_dim=recipe.head_dim,
            cache_bits=recipe.cache_bits,
            rotary_dim=recipe.rotary_dim or recipe.head_dim,
        ),
        "attend": partial(
            _write_attend,
            head_dim=recipe.head_dim,
            cache_bits=recipe.cache_bits,
            cap=recipe.softcap,
        ),
    }


def _write_product(
    module: Module, name: str, target: Target, layout: Layout, x_layout: ActivationLayout
) -> Function:
    sizes = tiles(target, x_layout)
    kernels = {}  # by tile: {panels at once: kernel}, most panels first
    for size in sizes:
        counts = dict.fromkeys((products.panels_at_once(target, layout, size), 1))
        kernels[size] = {
            count: products.product(module, target, layout, x_layout, size, count)
            for count in counts
        }
    f = _Operation(module, name)
    weights, panel_bytes, blocks, out, out_bytes = (
        f.weights,
        f.panel_bytes,
        f.blocks,
        f.out,
        f.out_bytes,
    )
    x, x_bytes, bias, accumulate = f.x, f.x_bytes, f.bias, f.accumulate
    has_bias = bias.compare("!=", 0)

    def multiply(size: int, token: Value, start: Value) -> None:
        """Multiply the panels start .. hi - 1 with the tile that starts at `token`."""
        for at_once, kernel in kernels[size].items():
            end = start + (f.hi - start) // at_once * at_once
            with f.loop(end, start, at_once) as p:
                f.call(
                    kernel,
                    weights + p * panel_bytes,
                    x + token * x_bytes,
                    out + p * (4 * layouts.ROWS) + token * out_bytes,
                    out_bytes,
                    blocks,
                    has_bias.select(bias + p * (4 * layouts.ROWS), 0),
                    accumulate,
                )
            start = end

    tokens = f.load_context("tokens")
    *smaller, full = sizes
    largest = smaller[-1] if smaller else 0
    # the rest takes a full tile only if no smaller one holds it
    count = (tokens + (full - 1 - largest)) // full
    first = Variable(f, f.lo)  # panel to multiply tile by tile
    if unpacked.applies(target, layout, x_layout):
        kernel = unpacked.product(module, target, layout, x_layout, unpacked.PANELS)
        with f.if_then(count.compare(">=", unpacked.MIN_TILES)):
            first.set(f.lo + (f.hi - f.lo) // unpacked.PANELS * unpacked.PANELS)
            with f.loop(first.get(), f.lo, unpacked.PANELS) as p:
                f.call(
                    kernel,
                    weights + p * panel_bytes,
                    panel_bytes,
                    blocks,
                    x,
                    x_bytes * full,
                    count,
                    out + p * (4 * layouts.ROWS),
                    out_bytes,
                    has_bias.select(bias + p * (4 * layouts.ROWS), 0),
                    accumulate,
                )
    with f.loop(count) as tile:
        multiply(full, tile * full, first.get())
    rest = tokens - count * full
    for below, size in zip((0, *smaller), smaller):
        with f.if_then(rest.compare(">", below) & rest.compare("<=", size)):
            multiply(size, count * full, f.lo)
    return f.finish()


def _write_pack(
    module: Module, name: str, x_layout: ActivationLayout, source: str, sizes: tuple[int, ...]
) -> Function:
    packs = [packing.pack(module, x_layout, source, single) for single in (True, False)]
    squares = norms.sum_of_squares(module)
    f = _Operation(module, name)
    part, groups = f.part, f.groups
    parts = (groups + part - 1) // part
    tokens, full = f.load_context("tokens"), sizes[-1]
    with f.loop(f.hi, f.lo) as item:
        # Tokens of a tile share cache lines. Threads take different parts of tokens, mostly the
        # parts that they computed.
        first = item // (parts * full) * full  # of the tile
        rest = tokens - first
        inside, count = item - first * parts, rest.minimum(full)
        token, start = first + inside % count, inside // count * part
        row = token + f.load_context("first_row")
        a, b = f.a + row * f.a_bytes, f.b + row * f.b_bytes
        factor = _norm_factor(f, squares, a, groups) if source == "norm" else f.constant(f32, 1.0)
        size = f.constant(i64, full)
        for smaller in reversed(sizes[:-1]):
            size = rest.compare("<=", smaller).select(f.constant(i64, smaller), size)
        at = start * (4 * GROUP)
        out = f.x + first * f.x_bytes + start // layouts.SPAN * (size * x_layout.record(1))
        _call_pack(
            f,
            packs,
            size,
            lambda: (
                a + at,
                b + at,
                factor,
                (groups - start).minimum(part),
                out,
                token - first,
                size,
            ),
        )
    return f.finish()


def _norm_factor(f: _Operation, squares: Function, a: Value, groups: Value) -> Value:
    """1 / RMS of a row."""
    scratch = f.scratch + f.thread * 64
    f.call(squares, a, groups, scratch)
    width, eps = f.load_float("width"), f.load_float("eps")
    return f.constant(f32, 1.0) / f.math("sqrt", f.load(f32, scratch, 0, 4) / width + eps)


def _call_pack(
    f: Function,
    packs: list[Function],
    size: Value,
    write_arguments: Callable[[], tuple[Value, ...]],
) -> None:
    """Call the first of `packs` for a tile of one token, the second for larger tiles."""
    with f.if_else(size.compare("==", 1)) as branches:
        for branch, pack in zip(branches, packs):
            with branch:
                f.call(pack, *write_arguments())


def _write_route(module: Module, name: str, sizes: tuple[int, ...]) -> Function:
    choose, sort = routing.choose(module), routing.sort(module, sizes)
    f = _Operation(module, name)
    tokens = f.load_context("tokens")
    with f.loop(f.hi, f.lo):
        f.call(
            choose,
            f.scores,
            f.scores_bytes,
            tokens,
            f.experts,
            f.used,
            f.normalises,
            f.chosen,
            f.shares,
        )
        f.call(sort, f.chosen, tokens * f.used, f.experts, f.counts, f.tiles, f.order, f.rows)
    return f.finish()


class _Tile:
    """A tile's record. number: from 0."""

    def __init__(self, f: _Operation, number: Value):
        self._f, self._record = f, f.tiles + (number + 1) * (8 * len(routing.TILE))

    def __getattr__(self, name: str) -> Value:
        return self._f.load_word(self._record, routing.TILE[name])


def _write_gather(module: Module, name: str, x_layout: ActivationLayout, source: str) -> Function:
    packs = [packing.pack(module, x_layout, source, single) for single in (True, False)]
    squares = norms.sum_of_squares(module)
    f = _Operation(module, name)
    part, groups = f.part, f.groups
    parts = (groups + part - 1) // part
    tiles, is_sorted = f.load_word(f.tiles, 0), f.is_sorted.compare("!=", 0)
    with f.loop(f.hi.minimum(tiles * parts), f.lo) as item:
        tile, start = _Tile(f, item // parts), item % parts * part
        first, size = tile.row, tile.size
        at = start * (4 * GROUP)
        out = f.x + first * f.x_bytes + start // layouts.SPAN * (size * x_layout.record(1))
        with f.loop(tile.count) as index:
            row = is_sorted.select(
                first + index, f.load_word(f.order + (first + index) * 8, 0) // f.used
            )
            a, b = f.a + row * f.a_bytes, f.b + row * f.b_bytes
            factor = (
                _norm_factor(f, squares, a, groups) if source == "norm" else f.constant(f32, 1.0)
            )
            _call_pack(
                f,
                packs,
                size,
                lambda: (a + at, b + at, factor, (groups - start).minimum(part), out, index, size),
            )
    return f.finish()


def _write_experts(
    module: Module,
    name: str,
    target: Target,
    layout: Layout,
    x_layout: ActivationLayout,
    sizes: tuple[int, ...],
) -> Function:
    counts = {
        size: dict.fromkeys((products.panels_at_once(target, layout, size), 1)) for size in sizes
    }
    kernels = {
        size: {
            count: products.product(module, target, layout, x_layout, size, count)
            for count in counts[size]
        }
        for size in sizes
    }
    f = _Operation(module, name)
    panels, part, panel_bytes, blocks, out_bytes = (
        f.panels,
        f.part,
        f.panel_bytes,
        f.blocks,
        f.out_bytes,
    )
    parts = (panels + part - 1) // part
    tiles, zero = f.load_word(f.tiles, 0), f.constant(i64, 0)
    with f.loop(f.hi.minimum(tiles * parts), f.lo) as item:
        tile, start = _Tile(f, item // parts), item % parts * part
        end = (start + part).minimum(panels)
        tile_size, row = tile.size, tile.row
        weights = f.load_word(f.weights + tile.expert * 8, 0)
        x, out = f.x + row * f.x_bytes, f.out + row * out_bytes
        for size in sizes:
            with f.if_then(tile_size.compare("==", size)):
                first = start
                for at_once, kernel in kernels[size].items():
                    last = first + (end - first) // at_once * at_once
                    with f.loop(last, first, at_once) as p:
                        f.call(
                            kernel,
                            weights + p * panel_bytes,
                            x,
                            out + p * (4 * layouts.ROWS),
                            out_bytes,
                            blocks,
                            zero,
                            0,
                        )
                    first = last
    return f.finish()


def _write_combine(module: Module, name: str) -> Function:
    combine = routing.combine(module)
    f = _Operation(module, name)
    outputs, outputs_bytes, used, vectors, accumulate = (
        f.outputs,
        f.outputs_bytes,
        f.used,
        f.vectors,
        f.accumulate,
    )
    with f.loop(f.hi, f.lo) as token:
        at = token * used
        f.call(
            combine,
            outputs,
            outputs_bytes,
            f.rows + at * 8,
            f.shares + at * 4,
            used,
            vectors,
            f.out + token * f.out_bytes,
            accumulate,
        )
    return f.finish()


def _write_adjust(module: Module, name: str) -> Function:
    adjust, squares = norms.adjust(module), norms.sum_of_squares(module)
    f = _Operation(module, name)
    weight, groups = f.weight, f.groups
    with f.loop(f.hi, f.lo) as token:
        delta = f.delta + token * f.delta_bytes
        factor = Variable(f, f.load_float("factor"))
        with f.if_then(weight.compare("!=", 0)):
            scratch = f.scratch + f.thread * 64
            f.call(squares, delta, groups, scratch)
            mean = f.load(f32, scratch, 0, 4) / f.load_float("width")
            factor.set(factor.get() / f.math("sqrt", mean + f.load_float("eps")))
        f.call(
            adjust,
            delta,
            weight,
            factor.get(),
            f.target + token * f.target_bytes,
            f.accumulate,
            groups,
        )
    return f.finish()


def _write_softcap(module: Module, name: str) -> Function:
    softcap = norms.softcap(module)
    f = _Operation(module, name)
    target, target_bytes, groups, cap = f.target, f.target_bytes, f.groups, f.load_float("cap")
    with f.loop(f.hi, f.lo) as token:
        f.call(softcap, target + token * target_bytes, groups, cap)
    return f.finish()


def _write_select(module: Module, name: str) -> Function:
    f = _Operation(module, name)
    target, target_bytes, groups, adapter = f.target, f.target_bytes, f.groups, f.adapter
    with f.loop(f.hi, f.lo) as token:
        with f.if_then(f.place(token)["adapter"].compare("!=", adapter)):
            with f.loop(groups * (GROUP // LANES)) as i:
                f.store(f.zero(f32s), target + token * target_bytes, i * (4 * LANES), 4)
    return f.finish()


def _write_norm_heads(module: Module, name: str) -> Function:
    norm = norms.norm_head(module)
    f = _Operation(module, name)
    eps = f.load_float("eps")
    queries, keys = (
        (f.heads, f.query_width, f.query_weight),
        (f.key_heads, f.key_width, f.key_weight),
    )
    keys_at = f.keys_at
    with f.loop(f.hi, f.lo) as token:
        row = f.qkv + token * f.qkv_bytes
        for first, (count, width, weight) in ((row, queries), (row + keys_at, keys)):
            with f.loop(count) as h:
                f.call(norm, first + h * width * 4, weight, width, eps)
    return f.finish()


def _write_rotate(
    module: Module, name: str, head_dim: int, cache_bits: int | None, rotary_dim: int
) -> Function:
    layout = paging.page_layout(head_dim, cache_bits)
    rotate, store = rope.rotate(module, rotary_dim), paging.store(module, head_dim, cache_bits)
    f = _Operation(module, name)
    table_at, query_table_at = f.table_at, f.query_table_at
    heads, key_heads, rotates = f.heads, f.key_heads, f.rotates.compare("!=", 0)
    shared = heads // key_heads
    with f.loop(f.hi, f.lo) as item:
        token, h = item // key_heads, item % key_heads
        row, place = f.qkv + token * f.qkv_bytes, f.place(token)
        cosine, sine, position = place["cosine"], place["sine"], place["position"]
        key, value = (row + start + h * (4 * head_dim) for start in (f.keys_at, f.values_at))
        with f.if_then(rotates):
            with f.loop(shared) as query:
                f.call(
                    rotate,
                    row + (h * shared + query) * (4 * head_dim),
                    cosine + query_table_at,
                    sine + query_table_at,
                )
            f.call(rotate, key, cosine + table_at, sine + table_at)
        page, at = f.load(i64, place["pages"], position // PAGE * 8, 8), h * PAGE + position % PAGE
        for source, numbers, scales in (
            (key, f.page_keys, f.key_scales),
            (value, f.page_values, f.value_scales),
        ):
            f.call(
                store,
                source,
                page + numbers + at * layout.row_bytes,
                page + scales + at * (2 * layout.groups),
            )
    return f.finish()


def _write_attend(
    module: Module, name: str, head_dim: int, cache_bits: int | None, cap: float | None
) -> Function:
    layout = paging.page_layout(head_dim, cache_bits)
    attend = attention.attend(module, head_dim, cache_bits, cap=cap)
    f = _Operation(module, name)
    key_heads, shared, window = f.key_heads, f.shared, f.window
    keys, values, key_scales, value_scales = (
        f.page_keys,
        f.page_values,
        f.key_scales,
        f.value_scales,
    )
    scores = f.load_context("scores") + f.thread * f.load_context("scores_bytes")
    scale = f.load_float("scale")
    head, tokens = shared * (4 * head_dim), f.load_context("tokens")
    last = tokens * key_heads - 1
    # Keys are in the processor's cache for tokens of one prompt, after the first; for tokens of
    # several rows they are not.
    several_rows = tokens.compare("==", 1) | f.place(f.zero(i64))["pages"].compare(
        "!=", f.place(tokens - 1)["pages"]
    )

    def locate(item: Value) -> tuple[Value, ...]:
        token, h = item // key_heads, item % key_heads
        place = f.place(token)
        end = place["position"] + 1
        return token, h, place["pages"], end.compare(">", window).select(end - window, 0), end

    with f.loop(f.hi, f.lo) as item:
        token, h, pages, first, end = locate(item)
        _, next_h, next_pages, next_first, next_end = locate((item + 1).minimum(last))
        at, scales_at = h * (PAGE * layout.row_bytes), h * (PAGE * 2 * layout.groups)
        f.call(
            attend,
            f.qkv + token * f.qkv_bytes + h * head,
            pages,
            keys + at,
            values + at,
            key_scales + scales_at,
            value_scales + scales_at,
            f.out + token * f.out_bytes + h * head,
            first,
            end,
            shared,
            scores,
            f.load_context("scores_head_bytes"),
            scale,
            several_rows.select(next_pages, 0),
            keys + next_h * (PAGE * layout.row_bytes),
            next_first,
            next_end,
        )
    return f.finish()
