"""Functions that compute items lo .. hi - 1 of a record, by kind of operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..pages import PAGE
from . import attention, layouts, norms, packing, paging, products, recurrent, routing, unpacked
from .emit import Function, Module, Value, Variable, f32, i64
from .layouts import GROUP, ActivationLayout, Layout
from .recipe import Recipe, expert_tiles, tiles
from .records import Operation, kind_of
from .target import Target

Writer = Callable[[Module, str], Function]  # writes an operation's function of this name


def operations(recipe: Recipe) -> dict[str, Writer]:
    """The functions that write a recipe's operations, by kind."""
    target, sources = recipe.target, ("norm", "plain", recipe.activation)
    layouts_of = [(layout, recipe.activation_layout(layout)) for layout in recipe.layouts]
    packed = [(x_layout, source) for x_layout in recipe.activations for source in sources]
    tile_sizes, bits = expert_tiles(target), recipe.cache_bits
    writers: dict[str, tuple] = {}
    for layout, x_layout in layouts_of:
        writers[kind_of("product", layout)] = _product, target, layout, x_layout
    gates = [(x_layout, source) for x_layout in recipe.activations for source in recipe.gates]
    for x_layout, source in packed + gates:
        sizes = tiles(target, x_layout)
        writers[kind_of("pack", source, x_layout)] = _pack, x_layout, source, sizes
    if recipe.has_experts:
        for layout, x_layout in layouts_of:
            writers[kind_of("experts", layout)] = _experts, target, layout, x_layout, tile_sizes
        for x_layout, source in packed:
            writers[kind_of("gather", source, x_layout)] = _gather, x_layout, source
        writers |= {"route": (routing.route, tile_sizes), "combine": (routing.combine,)}
        writers["gate_output"] = (routing.gate_output,)
    simple = norms.adjust, norms.softcap, norms.select, norms.norm_heads, norms.scale_heads
    writers |= {write.__name__: (write,) for write in simple}
    others: dict[str, tuple] = {
        "adjust scaled": (norms.adjust, True),
        "norm_values": (norms.norm_values,),
        "layer_inputs": (norms.layer_inputs,),
        "route scaled": (routing.route, tile_sizes, True),
    }
    for size, rotated in recipe.heads:
        writers[f"rotate {size}"] = _rotate, size, bits, rotated
        writers[f"attend {size}"] = _attend, size, bits, recipe.softcap, recipe.has_sinks
        others[f"rotate_queries {size}"] = _rotate_queries, size, rotated
    writers |= {kind: others[kind] for kind in recipe.others}
    if recipe.has_short_conv:
        writers["convolve gated"] = recurrent.convolve, True
    if recipe.has_gated_delta:
        writers["convolve silu"] = recurrent.convolve, False
        writers["gated_delta"] = (recurrent.gated_delta,)
    return {
        kind: partial(_build, write, constants) for kind, (write, *constants) in writers.items()
    }


def _build(write: Callable[..., None], constants: list, module: Module, name: str) -> Function:
    """The function that write(f, *constants) writes."""
    f = Operation(module, name)
    write(f, *constants)
    return f.finish()


def _product_kernels(
    f: Function, target: Target, layout: Layout, x_layout: ActivationLayout, sizes: tuple[int, ...]
) -> dict[int, dict[int, Function]]:
    """By tile: kernels by the number of panels that each takes at once, most panels first."""
    return {
        size: {
            count: products.product(f.module, target, layout, x_layout, size, count)
            for count in dict.fromkeys((products.panels_at_once(target, layout, size), 1))
        }
        for size in sizes
    }


def _call_for_panels(
    f: Function,
    kernels: dict[int, Function],
    start: Value,
    end: Value,
    call: Callable[[Function, Value], object],
) -> None:
    """Call a tile's kernels for the panels start .. end - 1, by call(kernel, panel)."""
    for at_once, kernel in kernels.items():
        last = start + (end - start) // at_once * at_once
        with f.loop(last, start, at_once) as p:
            call(kernel, p)
        start = last


def _product(f: Operation, target: Target, layout: Layout, x_layout: ActivationLayout) -> None:
    sizes = tiles(target, x_layout)
    kernels = _product_kernels(f, target, layout, x_layout, sizes)
    weights, panel_bytes, blocks = f.weights, f.panel_bytes, f.blocks
    out, out_bytes, x, x_bytes = f.out, f.out_bytes, f.x, f.x_bytes
    bias, accumulate = f.bias, f.accumulate
    has_bias = bias.compare("!=", 0)

    def multiply(size: int, token: Value, start: Value) -> None:
        """Multiply the panels start .. hi - 1 with the tile that starts at `token`."""

        def call(kernel: Function, p: Value) -> None:
            panel, record, at = (
                weights + p * panel_bytes,
                x + token * x_bytes,
                p * (4 * layouts.ROWS),
            )
            result, biases = out + at + token * out_bytes, has_bias.select(bias + at, 0)
            f.call(kernel, panel, record, result, out_bytes, blocks, biases, accumulate)

        _call_for_panels(f, kernels[size], start, f.hi, call)

    tokens = f.load_context("tokens")
    *smaller, full = sizes
    largest = smaller[-1] if smaller else 0
    # the rest takes a full tile only if no smaller one holds it
    count = (tokens + (full - 1 - largest)) // full
    first = Variable(f, f.lo)  # panel to multiply tile by tile
    if unpacked.applies(target, layout, x_layout):
        kernel = unpacked.product(f.module, target, layout, x_layout)
        with f.if_then(count.compare(">=", unpacked.MIN_TILES)):
            first.set(f.lo + (f.hi - f.lo) // unpacked.PANELS * unpacked.PANELS)
            with f.loop(first.get(), f.lo, unpacked.PANELS) as p:
                panel, at = weights + p * panel_bytes, p * (4 * layouts.ROWS)
                result, biases, tile_bytes = out + at, has_bias.select(bias + at, 0), x_bytes * full
                f.call(
                    kernel,
                    panel,
                    panel_bytes,
                    blocks,
                    x,
                    tile_bytes,
                    count,
                    result,
                    out_bytes,
                    biases,
                    accumulate,
                )
    with f.loop(count) as tile:
        multiply(full, tile * full, first.get())
    rest = tokens - count * full
    for below, size in zip((0, *smaller), smaller):
        with f.if_then(rest.compare(">", below) & rest.compare("<=", size)):
            multiply(size, count * full, f.lo)


def _pack(f: Operation, x_layout: ActivationLayout, source: str, sizes: tuple[int, ...]) -> None:
    part, groups = f.part, f.groups
    parts = (groups + part - 1) // part
    tokens, full = f.load_context("tokens"), sizes[-1]
    with f.loop(f.hi, f.lo) as item:
        # Tokens of a tile share cache lines. Threads take different parts of tokens, mostly the
        # parts that they computed.
        first = item // (parts * full) * full  # the tile's first token
        rest = tokens - first
        inside, count = item - first * parts, rest.minimum(full)
        token, start = first + inside % count, inside // count * part
        row = token + f.load_context("first_row")
        a, b = f.a + row * f.a_bytes, f.b + row * f.b_bytes
        factor = _factor(f, source, a, groups)
        size = f.constant(i64, full)
        for smaller in reversed(sizes[:-1]):
            size = rest.compare("<=", smaller).select(f.constant(i64, smaller), size)
        count = (groups - start).minimum(part)
        _call_pack(f, x_layout, source, (a, b, factor), (start, count), first, token - first, size)


def _factor(f: Operation, source: str, a: Value, groups: Value) -> Value:
    """1 / RMS of a row, 1 unless the source is a norm."""
    factor = f.constant(f32, 1.0)
    return factor / norms.root_mean_square(f, a, groups) if source == "norm" else factor


def _call_pack(
    f: Operation, x_layout: ActivationLayout, source: str, numbers: tuple, groups: tuple, *tile
) -> None:
    """Call packing.pack for a tile of one token, or for larger tiles.

    numbers: addresses of rows of a and b, and the factor; groups: first group and their count;
    tile: its first row, the token's index in it and its size.
    """
    (a, b, factor), (start, count), (first, index, size) = numbers, groups, tile
    at = start * (4 * GROUP)
    b = b if source == "xielu" else b + at
    out = f.x + first * f.x_bytes + start // layouts.SPAN * (size * x_layout.record(1))
    with f.if_else(size.compare("==", 1)) as branches:
        for branch, single in zip(branches, (True, False)):
            with branch:
                pack = packing.pack(f.module, x_layout, source, single)
                f.call(pack, a + at, b, factor, count, out, index, size)


class _Tile:
    """A tile's record. number: from 0."""

    def __init__(self, f: Operation, number: Value):
        self._f, self._record = f, f.tiles + (number + 1) * (8 * len(routing.TILE))

    def __getattr__(self, name: str) -> Value:
        return self._f.load_word(self._record, routing.TILE[name])


def _gather(f: Operation, x_layout: ActivationLayout, source: str) -> None:
    part, groups = f.part, f.groups
    parts = (groups + part - 1) // part
    tiles, is_sorted = f.load_word(f.tiles, 0), f.is_sorted.compare("!=", 0)
    shares = f.shares
    with f.loop(f.hi.minimum(tiles * parts), f.lo) as item:
        tile, start = _Tile(f, item // parts), item % parts * part
        first, size = tile.row, tile.size
        with f.loop(tile.count) as index:
            assignment = f.load_word(f.order + (first + index) * 8, 0)
            row = is_sorted.select(first + index, assignment // f.used)
            a, b = f.a + row * f.a_bytes, f.b + row * f.b_bytes
            factor = Variable(f, _factor(f, source, a, groups))
            with f.if_then(shares.compare("!=", 0)):
                factor.set(factor.get() * f.load(f32, shares, assignment * 4))
            numbers, count = (a, b, factor.get()), (groups - start).minimum(part)
            _call_pack(f, x_layout, source, numbers, (start, count), first, index, size)


def _experts(
    f: Operation, target: Target, layout: Layout, x_layout: ActivationLayout, sizes: tuple[int, ...]
) -> None:
    kernels = _product_kernels(f, target, layout, x_layout, sizes)
    panels, part, panel_bytes = f.panels, f.part, f.panel_bytes
    blocks, out_bytes = f.blocks, f.out_bytes
    biases, bias_bytes = f.biases, f.bias_bytes
    has_biases = biases.compare("!=", 0)
    parts = (panels + part - 1) // part
    tiles = f.load_word(f.tiles, 0)
    with f.loop(f.hi.minimum(tiles * parts), f.lo) as item:
        tile, start = _Tile(f, item // parts), item % parts * part
        end = (start + part).minimum(panels)
        tile_size, row = tile.size, tile.row
        weights = f.load_word(f.weights + tile.expert * 8, 0)
        x, out = f.x + row * f.x_bytes, f.out + row * out_bytes
        bias = biases + tile.expert * bias_bytes

        def call(kernel: Function, p: Value) -> None:
            panel, at = weights + p * panel_bytes, p * (4 * layouts.ROWS)
            result, chosen = out + at, has_biases.select(bias + at, 0)
            f.call(kernel, panel, x, result, out_bytes, blocks, chosen, 0)

        for size in sizes:
            with f.if_then(tile_size.compare("==", size)):
                _call_for_panels(f, kernels[size], start, end, call)


def _rotate(f: Operation, head_dim: int, cache_bits: int | None, rotary_dim: int) -> None:
    layout = paging.page_layout(head_dim, cache_bits)
    rotate, store = norms.rotate(f.module, rotary_dim), paging.store(f.module, head_dim, cache_bits)
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
                c, s = cosine + query_table_at, sine + query_table_at
                f.call(rotate, row + (h * shared + query) * (4 * head_dim), c, s)
            f.call(rotate, key, cosine + table_at, sine + table_at)
        page = f.load(i64, place["pages"] + f.page_kind, position // PAGE * f.page_step)
        at = h * PAGE + position % PAGE
        numbers, scales = at * layout.row_bytes, at * (2 * layout.groups)
        f.call(store, key, page + f.page_keys + numbers, page + f.key_scales + scales)
        f.call(store, value, page + f.page_values + numbers, page + f.value_scales + scales)


def _rotate_queries(f: Operation, size: int, rotated: int) -> None:
    rotate, table_at = norms.rotate(f.module, rotated), f.query_table_at
    key_heads, shared = f.key_heads, f.heads // f.key_heads
    with f.loop(f.hi, f.lo) as item:
        token, h = item // key_heads, item % key_heads
        row, place = f.qkv + token * f.qkv_bytes, f.place(token)
        c, s = place["cosine"] + table_at, place["sine"] + table_at
        with f.loop(shared) as query:
            f.call(rotate, row + (h * shared + query) * (4 * size), c, s)


def _attend(
    f: Operation, head_dim: int, cache_bits: int | None, cap: float | None, has_sinks: bool
) -> None:
    layout = paging.page_layout(head_dim, cache_bits)
    attend = attention.attend(f.module, head_dim, cache_bits, cap=cap, has_sinks=has_sinks)
    key_heads, shared, window = f.key_heads, f.shared, f.window
    is_chunk = f.is_chunk.compare("!=", 0)
    keys, values = f.page_keys, f.page_values
    key_scales, value_scales = f.key_scales, f.value_scales
    scores = f.load_context("scores") + f.thread * f.load_context("scores_bytes")
    scale, sinks = f.load_float("scale"), f.sinks
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
        position, end = place["position"], place["position"] + 1
        first = end.compare(">", window).select(end - window, 0)
        first = is_chunk.select(position // window * window, first)
        return token, h, place["pages"] + f.page_kind, first, end

    with f.loop(f.hi, f.lo) as item:
        token, h, pages, first, end = locate(item)
        _, next_h, next_pages, next_first, next_end = locate((item + 1).minimum(last))
        at, scales_at = h * (PAGE * layout.row_bytes), h * (PAGE * 2 * layout.groups)
        query, out = f.qkv + token * f.qkv_bytes + h * head, f.out + token * f.out_bytes + h * head
        key, value = keys + at, values + at
        key_scale, value_scale = key_scales + scales_at, value_scales + scales_at
        scores_bytes = f.load_context("scores_head_bytes")
        next_keys = keys + next_h * (PAGE * layout.row_bytes)
        next_pages, sink = several_rows.select(next_pages, 0), sinks + h * (shared * 4)
        f.call(
            attend,
            query,
            pages,
            f.page_step,
            key,
            value,
            key_scale,
            value_scale,
            out,
            first,
            end,
            shared,
            scores,
            scores_bytes,
            scale,
            next_pages,
            next_keys,
            next_first,
            next_end,
            sink,
        )
