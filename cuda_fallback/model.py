"""The Llama in torch (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import progress

from . import runtime
from .cache import Cache
from .kernels.cuda_graph import Capture, Steps
from .layers import MLP, Attention, Block, Embedding, Linear, RMSNorm
from .loading import Upload, check_memory
from .quantized import QuantizedMatrix, alike, find_kernels
from .sampling import Sampler


def _on_device(method: Callable) -> Callable:
    """Without gradients, on the model's device. Out of memory is a BackendError, which leaves the cache as it was."""

    @functools.wraps(method)
    def guarded(self: Llama, *given: Any, **named: Any) -> Any:
        on_gpu = self.device.type == "cuda"
        try:
            with torch.inference_mode(), torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
                return method(self, *given, **named)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            reason = str(error).split(". ")[0]
        # Out here nothing refers to the failed call's tensors any more.
        if on_gpu:
            with contextlib.suppress(RuntimeError):  # after a capture that failed
                torch.cuda.empty_cache()
        raise BackendError(f"{runtime.device_name(self.device)} is out of memory ({reason}); the conversation is kept: shorten "
                           "the prompt, lower --prefill-step-size or --ctx-size, or close other programs")

    return guarded


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable once loaded."""

    def __init__(self, config: LlamaConfig, embedding: Embedding, blocks: tuple[Block, ...], norm: RMSNorm,
                 head: Linear, dtype: torch.dtype, device: torch.device = torch.device("cpu"),
                 notices: tuple[str, ...] = ()):
        self.config = config
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.dtype = dtype
        self.device = device
        self.notices = notices
        self._steps: Steps | None = None  # decode steps of few kernels; None: as forward does it

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: torch.device = torch.device("cpu"),
             threads: int | None = None, activation_bits: int | None = None, compile: bool | None = None) -> Llama:
        """Build the model; weights keep their stored width. compile: capture decoded tokens as a CUDA graph, or not (None:
        where that can be).

        Raises BackendError for what it cannot honour (a dtype, threads, activation_bits, compile), and for weights that
        do not fit the GPU's memory.
        """
        for flag, value in (("--threads", threads), ("--activation-bits", activation_bits)):
            if value is not None:
                raise BackendError(f"{flag} {value}: is for the cpu backend, and this is cuda: leave it out, or choose "
                                   "--backend cpu")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        config, tensors = checkpoint.config, checkpoint.tensors
        activations = runtime.pick_dtype(dtype, checkpoint.dtype, device)
        check_memory(tensors.values(), activations, device)
        kernels, notices = find_kernels(device)
        steps_by_kernels = kernels is not None and not rope.length_dependent(config)
        if steps_by_kernels:
            from .kernels import decode as fused

            try:  # at this model's sizes, for which a GPU may have too little shared memory
                fused.try_heads(config.num_attention_heads, config.num_key_value_heads, config.head_dim, activations, device)
            except Exception as error:  # noqa: BLE001: Triton's, which derive from Exception alone
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                steps_by_kernels, notices = False, (f"decoding is not captured: attention's kernel does not run here ({reason})",)
        captures, reason = _captures(config, device, compile, notices)
        if reason and not notices:
            notices = (f"decoding is not captured: {reason}",)
        if dtype == "auto" and activations != getattr(torch, checkpoint.dtype):
            notices += (f"{runtime.device_name(device)} has no {checkpoint.dtype}: computing in "
                        f"{str(activations).removeprefix('torch.')}",)
        advance = progress.meter(checkpoint.nbytes)
        upload = Upload(device) if device.type != "cpu" else torch.Tensor.copy_

        def tensor(stored: Tensor) -> torch.Tensor:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to weights
                bits = torch.from_numpy(np.require(stored.bits, requirements="A"))
            return bits.view(torch.bfloat16) if stored.dtype == "bfloat16" else bits

        def array(parts: Sequence[Tensor]) -> torch.Tensor:
            if len(parts) == 1 and device.type == "cpu" and parts[0].dtype == str(activations).removeprefix("torch."):
                return tensor(parts[0])  # mapped, not copied
            rows = [part.shape[0] for part in parts]
            fused = torch.empty((sum(rows), *parts[0].shape[1:]), dtype=activations, device=device)
            for target, part in zip(fused.split(rows), parts):
                upload(target, tensor(part))
                part.release()
            return fused

        def matrix(*names: str) -> torch.Tensor | QuantizedMatrix | tuple[torch.Tensor | QuantizedMatrix, ...]:
            """Rows on rows, as few blocks as the formats allow."""
            runs: list[list[Tensor | AffineWeight]] = []
            for weight in map(tensors.__getitem__, names):
                if runs and alike(runs[-1][0], weight):
                    runs[-1].append(weight)
                else:
                    runs.append([weight])
            blocks = []
            for run in runs:
                is_low_bit = isinstance(run[0], AffineWeight)
                blocks.append(QuantizedMatrix.pack(run, activations, device, kernels) if is_low_bit else array(run))
                advance(sum(weight.nbytes for weight in run))
            return blocks[0] if len(blocks) == 1 else tuple(blocks)

        def linear(prefix: str, *names: str) -> Linear:
            biases = [key for name in names if (key := f"{prefix}{name}.bias") in tensors]
            return Linear(matrix(*(f"{prefix}{name}.weight" for name in names)), matrix(*biases) if biases else None)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(matrix(f"{name}.weight"), config.rms_norm_eps)

        blocks = []
        for i in range(config.num_hidden_layers):
            layer = f"model.layers.{i}."
            blocks.append(Block(
                norm(f"{layer}input_layernorm"),
                Attention(config, i, linear(f"{layer}self_attn.", "q_proj", "k_proj", "v_proj"),
                          linear(f"{layer}self_attn.", "o_proj")),
                norm(f"{layer}post_attention_layernorm"),
                MLP(linear(f"{layer}mlp.", "gate_proj", "up_proj"), linear(f"{layer}mlp.", "down_proj")),
            ))
        embedding = Embedding(matrix("model.embed_tokens.weight"))
        head = Linear(embedding.weight) if config.tie_word_embeddings else linear("", "lm_head")
        model = cls(config, embedding, tuple(blocks), norm("model.norm"), head, activations, device, notices)
        if steps_by_kernels:
            model._steps = Steps(model, fused, Capture(device) if captures else None)
        return model

    @property
    def verify_width(self) -> int:
        """Positions that `verify` takes for little more than a step costs."""
        return 16  # as many rows as the kernels for low-bit weights are meant for

    def make_cache(self, capacity: int) -> Cache:
        """A fresh cache for at most `capacity` positions. Raises ContextError below 1."""
        return Cache(self.config, capacity, self.dtype, self.device)

    @_on_device
    def forward(self, tokens: torch.Tensor, index_pos: int, cache: Cache, *, every: bool = False, probe=None) -> torch.Tensor:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: the position of the first, equal to
        cache.length. Returns logits [B, V] of the last position, with `every` [B, T, V]. probe(name, array) is called at
        every checkpoint of the model. Raises ContextError when the call does not continue the cache or does not fit.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        if not isinstance(tokens, torch.Tensor) or tokens.device != self.device:
            tokens = runtime._sent(tokens, self.device)
        cache.begin(tokens, index_pos)
        x = self.embedding(tokens)
        if probe:
            probe("embedding", x)
        # Of the last layer only what is asked for: all keys and values, but one position's output.
        narrow = x.shape[1] > 1 and not every and not probe
        for block in self.blocks:
            x = block(x, cache, probe, last=narrow and block is self.blocks[-1])
        cache.end()
        if not every:
            x = x[:, -1:]
        x = self.norm(x)
        logits = self.head(x)
        if probe:
            probe("norm", x)
            probe("logits", logits)
        return logits if every else logits[:, -1]

    @_on_device
    def step(self, token: torch.Tensor, index_pos: int, cache: Cache, sampler: Sampler) -> torch.Tensor:
        """The next token, int32 [1, 1], still on the device: forward over `token` [1, T] and sampling as one unit.

        Raises ContextError as `forward`, and for a batch of more than one sequence.
        """
        if len(token) != 1:
            raise ContextError(f"step decodes one sequence, not a batch of {len(token)}")
        if self._steps and len(token[0]) == 1:
            return self._steps(token, index_pos, cache, sampler)
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
        logits = self.forward(tokens, index_pos, cache, every=True)
        drawn = []
        for i, position in enumerate(range(index_pos + 1, cache.length + 1)):
            recent = cache.recent(sampler.window, position) if sampler.window else None
            drawn.append(sampler(logits[:, i], position, recent))
        return torch.cat(drawn, dim=1)


def _captures(config: LlamaConfig, device: torch.device, wanted: bool | None,
              notices: tuple[str, ...]) -> tuple[bool, str]:
    """Whether steps are captured, and on a GPU why not. Raises BackendError where that is wanted and cannot be.

    notices: why there are no kernels, empty where they run.
    """
    if wanted is False:
        return False, "--no-compile asks for it" if device.type != "cpu" else ""
    if device.type == "cpu":
        reason = "CUDA graphs are for a GPU, and this is torch's CPU device"
    elif rope.length_dependent(config):
        reason = "dynamic rope turns by angles that depend on the length"
    else:
        reason = notices[0] if notices else ""
    if wanted and reason:
        raise BackendError(f"--compile: {reason}: leave it out")
    return not reason, reason if device.type != "cpu" else ""
