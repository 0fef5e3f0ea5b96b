"""The Llama in torch (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlx_llama.core.backends.interface import Masks
from mlx_llama.core.backends.load_options import LoadOptions
from mlx_llama.core.backends.positions import CallView, checked_tokens
from mlx_llama.core.backends.profile import Profile, clock_ops
from mlx_llama.core.errors import BackendError, ContextError, OutOfMemoryError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.llama import Decoder
from mlx_llama.core.models.config import LlamaConfig

from . import kernels, ops, runtime
from .cache import Cache
from .kernels.cuda_graph import Capture, Runner
from .kernels.draw import Kind
from .kernels.state import StateView
from .ranks import Ranks, Vocabulary
from .sampling import SamplingBatch
from .weights import Weights


def _on_device(method: Callable) -> Callable:
    """Run a method without gradients, on the model's device. Out of memory is an OutOfMemoryError; the cache is as it was."""

    @functools.wraps(method)
    def guarded(self: Llama, *given: Any, **named: Any) -> Any:
        on_gpu = self.device.type == "cuda"
        try:
            with torch.inference_mode(), torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                return method(self, *given, **named)
        except RuntimeError as error:
            if not runtime.is_out_of_memory(error):
                raise
            reason = str(error).split(". ")[0]
        # Out here no frame refers to the failed call's tensors.
        if on_gpu:
            with contextlib.suppress(RuntimeError):  # after a capture that failed
                torch.cuda.empty_cache()
        raise OutOfMemoryError(f"{runtime.device_name(self.device)} is out of memory ({reason}); the conversation is kept: "
                               "shorten the prompt, lower `prefill_step_size` or `ctx_size`, or close other programs")

    return guarded


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable once loaded."""

    def __init__(self, config: LlamaConfig, weights: Weights, dtype: torch.dtype, device: torch.device = torch.device("cpu"),
                 notices: tuple[str, ...] = (), cache_bits: int | None = None):
        """Take all weights from `weights`."""
        self.config, self.dtype, self.device, self._notices = config, dtype, device, notices
        self.cache_bits = cache_bits
        self._vocabulary = weights.vocabulary  # None: the head computes all logits
        self.adapters = tuple(adapter.name for adapter in weights.adapters)
        self.decoder = Decoder.build(ops, weights)
        self._runner: Runner | None = None  # runs single tokens by kernels; None: torch's own operations
        self._batch_invariant = False  # True: the runner takes prompts, too

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: LoadOptions = LoadOptions(), device: torch.device = torch.device("cpu"),
             ranks: Ranks | None = None) -> Llama:
        """Build the model; weights keep their stored width.

        `compile`: capture decoded tokens as a CUDA graph, or not (None: if possible). `batch_invariant`: compute prompts, too,
        by the kernels of decoded tokens, which is slower. ranks: processes that each load a share of the weights and make the
        same calls; None for a model in this process alone. Raises BackendError for an option that it cannot honour,
        OutOfMemoryError.
        """
        cache_bits, batch_invariant = options.cache_bits, bool(options.batch_invariant)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        weights = Weights(checkpoint, options.dtype, device, ranks)
        config = weights.config
        decoding = kernels.plan_decoding(config, weights.dtype, device, options.compile, cache_bits, batch_invariant)
        notices = decoding.notices + weights.notices
        if batch_invariant:
            notices += ("prompts are computed by the kernels of decoded tokens: the same bits with any chunks, and slower",)
        model = cls(config, weights, weights.dtype, device, notices, cache_bits)
        if decoding.kernels:
            model._batch_invariant = batch_invariant

            def build_view(rows: int, kind: Kind) -> StateView:
                return StateView(config, model.dtype, device, decoding.kernels, rows, cache_bits, kind)

            from .kernels import ops as words

            model._runner = Runner(model.decoder.over(words), build_view, device, Capture(device) if decoding.is_captured else None,
                                   model._vocabulary)
        return model

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices about precision and captured steps, a line each."""
        return self._notices + (self._runner.notices if self._runner else ())

    @property
    def is_batch_invariant(self) -> bool:
        """True if a row is bit-identical whatever else is in the batch, and with any chunks. Steps are, by kernels, but a prompt's products
        are torch's, whose sums depend on the number of tokens, unless the model was loaded with `batch_invariant`."""
        return self._batch_invariant

    @property
    def verify_width(self) -> int:
        """Positions that `verify` takes for little more than a step costs."""
        return 16  # for more, low-bit products take longer than reading their weights (docs/backends.md)

    @property
    def prefill_width(self) -> int:
        """Most prompt tokens of a call that Ctrl-C does not wait long for: any number, since it is computed in parts."""
        return 1 << 16

    def profile(self) -> contextlib.AbstractContextManager[Profile]:
        """Clock the operations of all calls until the context ends. On a GPU waits after each.

        Raises BackendError for captured steps, whose operations cannot be told apart.
        """
        if self._runner and self._runner.capture:
            raise BackendError("a captured step cannot be profiled by operation: load the model with `compile=False`")
        if self.device.type == "cpu":
            return clock_ops(self, ops, lambda results: None, "torch's own operations, with a clock around each")
        return clock_ops(self, ops, lambda results: torch.cuda.synchronize(self.device),
                         "no CUDA graph, and a wait after each operation: shares count, not sums")

    def make_cache(self, capacity: int, rows: int = 1) -> Cache:
        """A fresh cache of `rows` sequences of at most `capacity` positions each. Raises ContextError below 1."""
        cache = Cache(self.config, capacity, self.dtype, self.device, rows, self.cache_bits)
        cache.adapters = [min(1, len(self.adapters))] * rows
        return cache

    @_on_device
    def forward(self, tokens: torch.Tensor, index_pos: int | Sequence[int], cache: Cache, *,
                rows: Sequence[int] | None = None, all_positions: bool = False, probe=None) -> torch.Tensor:
        """Logits after `tokens`, whose keys and values are appended to rows of the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: the position of the first, one for all rows or
        one per row, equal to their lengths; rows: None for the first B. Returns logits [B, V] of the last position, with
        `all_positions` [B, T, V]. probe(name, array) is called at every checkpoint of the model, with all positions. Raises
        ContextError when the call does not continue the rows or does not fit; the cache is then as it was.
        """
        logits = self._forward(tokens, index_pos, cache, rows, all_positions, probe)
        return self._vocabulary.gather(logits) if self._vocabulary else logits

    def _forward(self, tokens: torch.Tensor, index_pos: int | Sequence[int], cache: Cache, rows: Sequence[int] | None,
                 all_positions: bool, probe) -> torch.Tensor:
        """As `forward`; of several processes each has the logits of its share of the vocabulary."""
        if probe and self._vocabulary:
            probe = self._vocabulary.gather_probes(probe)
        tokens = checked_tokens(tokens, self.config.vocab_size)
        if self._runner and (self._batch_invariant or tokens.shape[1] == 1):
            logits = self._runner.forward(tokens, index_pos, cache, rows, all_positions, probe)
        else:
            if not isinstance(tokens, torch.Tensor) or tokens.device != self.device:
                tokens = runtime._sent(tokens, self.device)
            else:
                tokens = tokens.clamp(min=0)  # a step runs ahead of -1, which the host has not read yet
            with cache.view(tokens, index_pos, rows) as view:
                view.listener = probe
                logits = self.decoder(tokens, view, all_positions or probe is not None)
        return logits if all_positions else logits[:, -1]

    @_on_device
    def step(self, tokens: torch.Tensor, index_pos: int | Sequence[int], cache: Cache, sampling: SamplingBatch, *,
             rows: Sequence[int] | None = None, masks: Masks | None = None) -> torch.Tensor:
        """The next token of each row, int32 [B, 1], still on the device: forward over `tokens` [B, T] and sampling as one
        unit.

        Several rows of more than one token are computed one by one, unless none depends on its company anyway. masks: gives
        the tokens that grammars allow, and is called when the forward is queued. Log-probabilities stand beside the tokens
        if `sampling` has them. Raises ContextError as `forward`, and unless there are options for each row.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        B, T = tokens.shape
        call = CallView(cache, B, T, index_pos, rows)
        if len(sampling.options) != B:
            raise ContextError(f"a batch of {B} sequences needs {B} options of sampling, not {len(sampling.options)}")
        if self._runner and T == 1:
            return self._runner.step(tokens, call, sampling, masks)
        chosen = [span.row for span in call.spans]
        if B == 1 or T == 1 or self._batch_invariant:
            logits = self._forward(tokens, index_pos, cache, chosen, False, None)
        else:
            lengths = list(cache.lengths)
            try:
                logits = torch.cat([self._forward(tokens[i:i + 1], span.start, cache, [span.row], False, None)
                                    for i, span in enumerate(call.spans)])
            except BaseException:
                cache.lengths[:] = lengths
                raise
        return self._draw(logits, cache, sampling, chosen, masks, self._vocabulary)

    @_on_device
    def sample(self, logits: torch.Tensor, cache: Cache, sampling: SamplingBatch, *, rows: Sequence[int] | None = None,
               masks: Masks | None = None) -> torch.Tensor:
        """The next token of each row as `step` returns it. logits: [B, V] after the rows' last positions, also NumPy's."""
        if isinstance(logits, np.ndarray):
            logits = runtime._sent(logits, self.device)
        return self._draw(logits, cache, sampling, rows, masks, None)

    def _draw(self, logits: torch.Tensor, cache: Cache, sampling: SamplingBatch, rows: Sequence[int] | None,
              masks: Masks | None, vocabulary: Vocabulary | None) -> torch.Tensor:
        """As `sample`. vocabulary: of which the logits are this process's share, None for all."""
        chosen = cache.select_rows(len(logits), rows)
        recent = cache.recent(sampling.window, chosen) if sampling.window else None
        draw_rows = functools.partial(vocabulary.draw_rows, sampling) if vocabulary else sampling
        return draw_rows(logits, [cache.lengths[row] for row in chosen], recent, masks)

    @_on_device
    def verify(self, tokens: torch.Tensor, index_pos: int, cache: Cache, sampling: SamplingBatch, *,
               rows: Sequence[int] | None = None) -> torch.Tensor:
        """The token after each of `tokens` [1, T], int32 [1, T], still on the device: forward and T samplings as one unit.

        Each is drawn as `step` would draw it there, with its position's noise and the recent tokens up to it. The
        products are those of a prompt: without `batch_invariant` they may round otherwise than a single token's.
        Raises ContextError as `step`, and for more than one sequence.
        """
        if len(tokens) != 1:
            raise ContextError(f"verify continues one sequence, not a batch of {len(tokens)}")
        (row,) = cache.select_rows(1, rows)
        logits = self.forward(tokens, index_pos, cache, rows=[row], all_positions=True)[0]
        lengths = range(cache.lengths[row] - len(logits) + 1, cache.lengths[row] + 1)
        each = SamplingBatch(sampling.options * len(lengths), self.device)
        recent = cache.recent(each.window, [row] * len(lengths), lengths) if each.window else None
        return each(logits, lengths, recent).view(1, -1)
