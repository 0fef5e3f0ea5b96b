"""Probes of a forward: a view shows its arrays to a listener."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from ..models.spec import LayerSpec

if TYPE_CHECKING:
    from ..ops import Array, Ops

Probe = Callable[[str, Any], None]


class Probed:
    """A view's words for probes (core.ops.View). listener: called with each probe's name and array, or None."""

    listener: Probe | None = None

    def probe(self, name: str, x: Array, layer: int | None = None) -> None:
        """Show x as `name`, in a layer as `layer.name`."""
        if self.listener is not None:
            self.listener(name if layer is None else f"{layer}.{name}", x)

    def probe_sum(self, name: str, x: Array, delta: Array, layer: int, ops: Ops) -> None:
        """Show x + delta."""
        if self.listener is not None:
            self.probe(name, ops.add(x, delta), layer)

    def probe_heads(self, heads: Array, spec: LayerSpec, ops: Ops) -> None:
        """Show query, key and value of heads [B, T, (H + 2 G) D]."""
        if self.listener is not None:
            for name, part in zip(("query", "key", "value"), ops.split_heads(heads, spec)):
                self.probe(name, part, spec.index)

    def probe_rotated(self, query: Array, layer: int) -> None:
        """Show the rotated query and the keys as they were stored."""
        if self.listener is not None:
            self.probe("query_rope", query, layer)
            self.probe("key_rope", self.new_keys(layer), layer)
