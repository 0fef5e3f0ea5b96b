"""A decoded token as one CUDA graph: captured once for each kind of sampling, replayed for every token of any cache.

The graph knows no address of a cache: its kernels find keys, values, tokens and tables through `state` in the device's
memory, with the position, the token and the seed, and the graph's last kernel advances them. So a step that goes on
where the last one ended needs nothing from the host, a cache may grow without another capture, and the sessions of one
model, on several threads, share its graphs in turn: who steps after somebody else sets the state first. The first
step of a kind runs as it is, which compiles its kernels; the second is captured.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from cuda_fallback import runtime
from cuda_fallback.cache import Cache
from cuda_fallback.layers import Linear
from cuda_fallback.sampling import Sampler
from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.generation import rng
from mlx_llama.core.generation.options import sampling_key

if TYPE_CHECKING:
    from cuda_fallback.model import Llama

KEPT = 8  # graphs per model, one for each kind of sampling


class Capture:
    """CUDA graphs of functions that take and return nothing. They share the memory of what lives within one of them."""

    _one_at_a_time = threading.Lock()  # of all models: what begins a capture waits for the device, which ends another one

    def __init__(self, device: torch.device):
        self.device = device
        self._pool = self._stream = None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture what `function` does, without doing it; the replay."""
        with self._one_at_a_time:
            if self._pool is None:
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            gc.collect()
            collects = gc.isenabled()
            gc.disable()  # a dead model's graphs must not be destroyed in the middle
            try:
                # thread_local: what other threads do meanwhile is not this capture's business
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    function()
            finally:
                torch.cuda.set_stream(current)  # which torch leaves as it was when a capture ends with an error
                if collects:
                    gc.enable()
            return graph.replay


@dataclass
class _Kind:
    """A step for one kind of sampling."""

    written: Callable[[], None]  # holds what a graph of it reads
    run: Callable[[], None]  # this or its graph's replay
    is_tried: bool = False
    is_captured: bool = False


@dataclass(frozen=True)
class _Held:
    """Where the state stands: ready for `token` at `index_pos` of a cache that nobody else has written to since."""

    cache: weakref.ref[Cache]
    changes: int
    index_pos: int
    token: torch.Tensor
    seed: int


class Steps:
    """A model's decode steps by kind of sampling. capture: None to run every step as it is.

    fused: the module of kernels (fused.py).
    """

    def __init__(self, model: Llama, fused: ModuleType, capture: Callable[[Callable], Callable] | None):
        self.model, self.fused, self.capture = model, fused, capture
        self._notices = model.notices
        self._known: OrderedDict[tuple, _Kind] = OrderedDict()
        self._lock = threading.Lock()
        self._held: _Held | None = None
        self._stream: object = None
        count = fused.LAYERS + 2 * model.config.num_hidden_layers
        self._state = torch.zeros(count, dtype=torch.int64, device=model.device)
        self._table: torch.Tensor | None = None  # of the noise

    def __call__(self, token: torch.Tensor, index_pos: int, cache: Cache, sampler: Sampler) -> torch.Tensor:
        """The next token, int32 [1, 1]: a view of the cache's tokens. Raises ContextError."""
        with self._lock:
            self._follow_streams()
            cache.reserve(1, index_pos, 1)
            held, self._held = self._held, None  # what is interrupted here is set anew
            seed = sampler.options.seed
            if not (held and held.cache() is cache and held.changes == cache._changes and held.index_pos == index_pos
                    and held.token is token and held.seed == seed):
                self._set(token, index_pos, cache, seed)
            kind = self._step(sampler)
            kind.run()
            kind.is_tried = True
            cache.length = index_pos + 1
            cache._changes += 1
            following = cache._token_after(index_pos)
            self._held = _Held(weakref.ref(cache), cache._changes, index_pos + 1, following, seed)
            return following

    def _follow_streams(self) -> None:
        """Put this step behind the last one where a thread works on a stream of its own."""
        if self.model.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.model.device)
        if self._stream is not None and current != self._stream:
            current.wait_stream(self._stream)
        self._stream = current

    def _set(self, token: torch.Tensor, index_pos: int, cache: Cache, seed: int) -> None:
        on_device = isinstance(token, torch.Tensor)
        known = 0 if on_device else int(checked_tokens(token, self.model.config.vocab_size)[0, 0])
        arrays = [part for layer in zip(cache.keys, cache.values) for part in layer]
        state = torch.tensor([index_pos, known, *rng.split_seed(seed), cache.allocated, cache.tokens.data_ptr(),
                              *(table.data_ptr() for table in cache.tables), *(array.data_ptr() for array in arrays)])
        self._state.copy_(runtime._sent(state, self._state.device))
        if on_device:
            self._state[self.fused.TOKEN].copy_(token[0, 0])
        cache.tokens[0, index_pos].copy_(self._state[self.fused.TOKEN])

    def _step(self, sampler: Sampler) -> _Kind:
        key = sampling_key(sampler.options)
        kind = self._known.pop(key, None)
        if kind is None:
            kind = self._written(sampler)
        elif self.capture and not kind.is_captured and kind.is_tried:
            self._captured(kind)
        self._known[key] = kind
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return kind

    def _captured(self, kind: _Kind) -> None:
        started = time.perf_counter()
        try:
            kind.run = self.capture(kind.written)
            kind.is_captured = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # a driver or an operation that captures nothing: the step runs as it is
            self.capture = None
            while isinstance(error.__context__, Exception):  # what torch says last is that something was said before
                error = error.__context__
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._note(f"decoding is not captured: {reason}")
            return
        self._note(f"a decoded token was captured as a CUDA graph in {time.perf_counter() - started:.2f} s")

    def _note(self, notice: str) -> None:
        self.model.notices = (*self._notices, notice)

    def _written(self, sampler: Sampler) -> _Kind:
        model, fused, state = self.model, self.fused, self._state
        c = model.config
        H, G, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        following = torch.zeros((1, 1), dtype=torch.int32, device=model.device)
        if sampler.options.temperature > 0 and self._table is None:
            self._table = runtime._sent(rng.gumbel_table(), model.device)

        def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
            weight = linear.weight
            if isinstance(weight, torch.Tensor):
                return fused.multiply(x, weight, linear.bias)
            return linear(x)  # packed

        def gated(x: torch.Tensor, linear: Linear) -> torch.Tensor:
            if isinstance(linear.weight, torch.Tensor):
                return fused.multiply_gated(x, linear.weight, linear.bias)
            return fused.gate(linear(x))

        def run() -> None:
            x, delta = model.embedding(state[fused.TOKEN:fused.TOKEN + 1]), None  # [1, E]
            for i, block in enumerate(model.blocks):
                x, normed = fused.add_rms_norm(x, delta, block.attention_norm.weight, block.attention_norm.eps)
                heads = product(normed, block.attention.qkv)  # [1, (H + 2 G) D]
                query = fused.store_rotated(state, i, heads, H, G, D)
                mixed = fused.attend(state, i, query, G, c.sliding_window, D**-0.5)
                delta = product(mixed, block.attention.out)
                x, normed = fused.add_rms_norm(x, delta, block.ffn_norm.weight, block.ffn_norm.eps)
                delta = product(gated(normed, block.mlp.gate_up), block.mlp.down)
            x, normed = fused.add_rms_norm(x, delta, model.norm.weight, model.norm.eps)
            logits = product(normed, model.head)
            seen = fused.recent(state, sampler.window) if sampler.window else None
            scores = sampler.processed(logits[0].float(), seen)
            if sampler.options.temperature > 0:
                scores = fused.add_noise(state, scores, self._table)
            following.copy_(torch.argmax(scores))
            fused.advance(state, following)

        return _Kind(run, run)
