"""The Llama in torch (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mlx_llama.core.backends.interface import Masks, Probe
from mlx_llama.core.backends.model import BaseLlama
from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.backends.profile import Profile, clock_ops
from mlx_llama.core.errors import BackendError, ContextError, OutOfMemoryError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.options import LoadOptions

from . import kernels, ops, runtime
from .arrays import SamplingBatch
from .cache import Cache, Call
from .kernels.cuda_graph import Capture, Runner
from .kernels.state import StateView
from .ranks import Ranks
from .weights import Weights


class Llama(BaseLlama):
    """The model over torch's tensors, and by kernels (kernels/cuda_graph.py)."""

    ops, cache_type = ops, Cache
    _batch_invariant = False  # True: the runner takes prompts, too

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        options: LoadOptions = LoadOptions(),
        device: torch.device = torch.device("cpu"),
        ranks: Ranks | None = None,
    ) -> Llama:
        """Build the model. ranks: as of BaseWeights. Raises BackendError for an option that it
        cannot honour, OutOfMemoryError.
        """
        cache_bits, batch_invariant = options.cache_bits, bool(options.batch_invariant)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        weights = Weights(checkpoint, options.dtype, device, ranks)
        config = weights.config
        decoding = kernels.plan_decoding(
            config, weights.dtype, device, options.compile, cache_bits, batch_invariant
        )
        notices = decoding.notices + weights.notices
        if batch_invariant:
            notices += (
                "prompts use the kernels of decoded tokens: slower, but bit-identical however they "
                "are cut into chunks",
            )
        states = cache_bits, options.checkpoints, options.swa_full
        model = cls(config, weights, weights.dtype, device, notices, *states)
        if decoding.kernels:
            from .kernels import ops as words

            model._batch_invariant = batch_invariant
            build_view = partial(
                StateView, config, model.dtype, device, decoding.kernels, cache_bits
            )
            capture = Capture(device) if decoding.is_captured else None
            forward = model.decoder.over(words)
            model.runner = Runner(forward, build_view, device, capture, model.vocabulary)
        return model

    @property
    def prefill_chunk(self) -> int:
        # A GPU waits for the host, which launches as many operations for a small chunk.
        return 512 if self.device.type == "cpu" else 2048

    @property
    def notices(self) -> tuple[str, ...]:
        return self._notices + (self.runner.notices if self.runner else ())

    @property
    def is_batch_invariant(self) -> bool:
        # A prompt's products are torch's, whose sums depend on the number of tokens.
        return self._batch_invariant

    def profile(self) -> contextlib.AbstractContextManager[Profile]:
        """Clock the operations of all calls until the context ends. On a GPU waits after each.

        Raises BackendError for captured steps, whose operations cannot be told apart.
        """
        if self.runner and self.runner.capture:
            raise BackendError(
                "a captured step cannot be profiled by operation: load the model with "
                "`compile=False`"
            )
        if self.device.type == "cpu":
            note = "torch's own operations, with a clock around each"
            return clock_ops(self, (ops,), lambda results: None, note)
        words = [ops]
        if self.runner:
            from .kernels import ops as kernel_ops

            words.append(kernel_ops)  # for decoded tokens
        note = "no CUDA graph, and a wait after each operation: shares count, not sums"
        return clock_ops(self, words, lambda results: torch.cuda.synchronize(self.device), note)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Compute without gradients, on the model's device. Raises OutOfMemoryError."""
        on_gpu = self.device.type == "cuda"
        try:
            with (
                torch.inference_mode(),
                torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext(),
            ):
                yield
        except RuntimeError as error:
            if not runtime.is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the failed call's tensors
            if on_gpu:
                with contextlib.suppress(RuntimeError):  # after a capture that failed
                    torch.cuda.empty_cache()
            reason = str(error).split(". ")[0]
            raise OutOfMemoryError(
                f"{runtime.device_name(self.device)} is out of memory ({reason}); the conversation "
                "is kept: shorten the prompt, lower `prefill_step_size` or `ctx_size`, or close "
                "other programs"
            ) from None

    def _send(self, array: Tensor | np.ndarray) -> Tensor:
        if not isinstance(array, Tensor) or array.device != self.device:
            return runtime.send(array, self.device)
        return array

    def step(
        self,
        tokens: Tensor | np.ndarray,
        index_pos: int | Sequence[int],
        cache: Cache,
        sampling: SamplingBatch,
        *,
        rows: Sequence[int] | None = None,
        masks: Masks | None = None,
    ) -> Tensor:
        """As BaseLlama.step. Several rows of more than one token are computed one by one, unless
        all are batch-invariant anyway. masks are called when the forward is queued. Raises
        ContextError unless there are options for each row, too.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        B, T = tokens.shape
        call = Call(cache, B, T, index_pos, rows)
        if len(sampling.options) != B:
            raise ContextError(
                f"a batch of {B} sequences needs {B} options of sampling, not "
                f"{len(sampling.options)}"
            )
        if self.runner and T == 1:
            with self.scope():
                return self.runner.step(tokens, call, sampling, masks)
        chosen = [span.row for span in call.spans]
        if B == 1 or T == 1 or self._batch_invariant:
            return super().step(tokens, index_pos, cache, sampling, rows=chosen, masks=masks)
        lengths, states, logits = list(cache.lengths), list(cache.states), []
        checkpoints = [dict(kept) for kept in cache.checkpoints]
        try:
            with self.scope():
                for i, span in enumerate(call.spans):
                    logits.append(self._logits(tokens[i : i + 1], span.start, cache, [span.row]))
                joined = torch.cat(logits)
                return self._sample(joined, cache, sampling, chosen, masks, self.vocabulary)
        except BaseException:
            cache.lengths[:], cache.states[:] = lengths, states
            cache.checkpoints[:] = checkpoints
            raise

    def _logits(
        self,
        tokens: Tensor | np.ndarray,
        index_pos: int | Sequence[int],
        cache: Cache,
        rows: Sequence[int] | None,
        all_positions: bool = False,
        probe: Probe | None = None,
    ) -> Tensor:
        tokens = checked_tokens(tokens, self.config.vocab_size)
        if self.runner and (self._batch_invariant or tokens.shape[1] == 1):
            if probe and self.vocabulary:
                probe = self.vocabulary.gather_probes(probe)
            logits = self.runner.forward(tokens, index_pos, cache, rows, all_positions, probe)
            return logits if all_positions else logits[:, -1]
        if isinstance(tokens, Tensor):
            # a step runs ahead of -1, which the host has not read yet
            tokens = tokens.clamp(min=0)
        return super()._logits(tokens, index_pos, cache, rows, all_positions, probe)
