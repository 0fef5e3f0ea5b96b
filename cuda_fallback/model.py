"""The Llama in torch (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.spec import LayerSpec

from . import kernels, ops, runtime
from .cache import Cache, View
from .kernels.cuda_graph import Capture, Runner
from .kernels.state import StateView
from .layers import MLP, Attention, Block, Unnormed
from .sampling import Sampler
from .weights import Weights, is_out_of_memory


def _on_device(method: Callable) -> Callable:
    """Run a method without gradients, on the model's device. Out of memory is a BackendError; the cache is as it was."""

    @functools.wraps(method)
    def guarded(self: Llama, *given: Any, **named: Any) -> Any:
        on_gpu = self.device.type == "cuda"
        try:
            with torch.inference_mode(), torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                return method(self, *given, **named)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).split(". ")[0]
        # Out here no frame refers to the failed call's tensors.
        if on_gpu:
            with contextlib.suppress(RuntimeError):  # after a capture that failed
                torch.cuda.empty_cache()
        raise BackendError(f"{runtime.device_name(self.device)} is out of memory ({reason}); the conversation is kept: "
                           "shorten the prompt, lower --prefill-step-size or --ctx-size, or close other programs")

    return guarded


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable once loaded."""

    def __init__(self, config: LlamaConfig, weights: Weights, dtype: torch.dtype, device: torch.device = torch.device("cpu"),
                 notices: tuple[str, ...] = ()):
        """Take all weights from `weights`."""
        self.config, self.dtype, self.device, self._notices = config, dtype, device, notices
        self.embedding = weights.embedding("model.embed_tokens")
        self.blocks = tuple(_build_block(spec, weights) for spec in config.layers)
        self.norm = weights.norm("model.norm")
        self.head = weights.linear(config.head_name)
        self._runner: Runner | None = None  # runs single tokens by kernels; None: torch's own operations

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: torch.device = torch.device("cpu"),
             compile: bool | None = None) -> Llama:
        """Build the model; weights keep their stored width.

        compile: capture decoded tokens as a CUDA graph, or not (None: where that can be). Raises BackendError
        where `dtype` or `compile` cannot be honoured, OutOfMemoryError.
        """
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        config, weights = checkpoint.config, Weights(checkpoint, dtype, device)
        decoding = kernels.plan_decoding(config, weights.dtype, device, compile)
        model = cls(config, weights, weights.dtype, device, decoding.notices + weights.notices)
        if decoding.kernels:
            view = StateView(config, model.dtype, device, decoding.kernels)
            model._runner = Runner(model._compute, view, Capture(device) if decoding.is_captured else None)
        return model

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about precision and captured steps, a line each."""
        return self._notices + (self._runner.notices if self._runner else ())

    @property
    def is_batch_invariant(self) -> bool:
        """True if a row has the same bits in any company and with any chunks: kernels, not torch's operations."""
        return self._runner is not None

    @property
    def verify_width(self) -> int:
        """Positions that `verify` takes for little more than a step costs."""
        return 16  # as many rows as the kernels for low-bit weights are meant for

    def make_cache(self, capacity: int) -> Cache:
        """A fresh cache for at most `capacity` positions. Raises ContextError below 1."""
        return Cache(self.config, capacity, self.dtype, self.device)

    @_on_device
    def forward(self, tokens: torch.Tensor, index_pos: int, cache: Cache, *, all_positions: bool = False,
                probe=None) -> torch.Tensor:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: the position of the first, equal to
        cache.length. Returns logits [B, V] of the last position, with `all_positions` [B, T, V]. probe(name, array) is
        called at every checkpoint of the model, with all positions. Raises ContextError when the call does not continue
        the cache or does not fit; the cache is then as it was.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        if self._runner and tokens.shape == (1, 1):
            logits = self._runner.forward(tokens, index_pos, cache, probe)
        else:
            if not isinstance(tokens, torch.Tensor) or tokens.device != self.device:
                tokens = runtime._sent(tokens, self.device)
            with cache.view(tokens, index_pos) as view:
                logits = self._compute(tokens, view, all_positions, probe)
        return logits if all_positions else logits[:, -1]

    def _compute(self, tokens: torch.Tensor, view: View | StateView, all_positions: bool, probe=None) -> torch.Tensor:
        """Logits [B, T, V], or [B, 1, V] where only the last position is asked for."""
        c = self.config
        x, delta = self.embedding(tokens), None
        if c.embedding_multiplier != 1:
            x = ops.scale(x, c.embedding_multiplier)
        if probe:
            probe("embedding", x)
        # The last layer stores all keys and values, but computes the output of the positions that are asked for alone.
        narrow = view.count > 1 and not all_positions and not probe
        for block in self.blocks:
            x, delta = block(x, delta, view, probe, last_only=narrow and block is self.blocks[-1])
        x, normed = self.norm(x, delta)
        if probe:
            probe(f"{len(self.blocks) - 1}.block", x)
        logits = self.head(normed)
        if c.logits_multiplier != 1:
            logits = ops.scale(logits, c.logits_multiplier)
        if probe:
            probe("norm", normed)
            probe("logits", logits)
        return logits

    @_on_device
    def step(self, token: torch.Tensor, index_pos: int, cache: Cache, sampler: Sampler) -> torch.Tensor:
        """The next token, int32 [1, 1], still on the device: forward over `token` [1, T] and sampling as one unit.

        Raises ContextError as `forward`, and for a batch of more than one sequence.
        """
        if len(token) != 1:
            raise ContextError(f"step decodes one sequence, not a batch of {len(token)}")
        if self._runner and len(token[0]) == 1:
            return self._runner.step(token, index_pos, cache, sampler)
        logits = self.forward(token, index_pos, cache)
        return sampler(logits, cache.length, cache.recent(sampler.window) if sampler.window else None)

    @_on_device
    def verify(self, tokens: torch.Tensor, index_pos: int, cache: Cache, sampler: Sampler) -> torch.Tensor:
        """The token after each of `tokens` [1, T], int32 [1, T], still on the device: forward and T samplings as one unit.

        Each is drawn as `step` would draw it there, with its position's noise and the recent tokens up to it. The
        products are those of a prompt: they may round otherwise than a single token's.
        Raises ContextError as `step`.
        """
        if len(tokens) != 1:
            raise ContextError(f"verify continues one sequence, not a batch of {len(tokens)}")
        logits = self.forward(tokens, index_pos, cache, all_positions=True)
        drawn = []
        for i, position in enumerate(range(index_pos + 1, cache.length + 1)):
            recent = cache.recent(sampler.window, position) if sampler.window else None
            drawn.append(sampler(logits[:, i], position, recent))
        return torch.cat(drawn, dim=1)


def _build_block(spec: LayerSpec, weights: Weights) -> Block:
    attention = Attention(spec, weights.linear(*spec.qkv), weights.linear(spec.out), weights.norm(spec.query_norm),
                          weights.norm(spec.key_norm))
    mlp = MLP(weights.linear(*spec.gate_up), weights.linear(spec.down), spec.activation)
    return Block(weights.norm(spec.attention_norm) or Unnormed(), attention, weights.norm(spec.ffn_norm) or Unnormed(), mlp,
                 weights.norm(spec.post_attention_norm), weights.norm(spec.post_ffn_norm))
