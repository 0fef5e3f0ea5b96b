"""The Llama in MLX (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint, Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import progress

from . import runtime
from .cache import Cache
from .kernels.trace import Steps
from .layers import MLP, Attention, Block, Embedding, Linear, RMSNorm
from .quantized import QuantizedMatrix, alike
from .sampling import Sampler


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable once loaded."""

    def __init__(self, config: LlamaConfig, embedding: Embedding, blocks: tuple[Block, ...], norm: RMSNorm,
                 head: Linear, dtype: mx.Dtype, device: mx.Device = mx.Device(mx.cpu),
                 notices: tuple[str, ...] = ()):
        self.config = config
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.dtype = dtype
        self.device = device
        self.notices = notices
        self._steps: Steps | None = None  # decode steps of fixed shapes; None: as forward does it

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: mx.Device = mx.Device(mx.cpu),
             threads: int | None = None, activation_bits: int | None = None, compile: bool | None = None) -> Llama:
        """Build the model; weights keep their stored width. compile: decode by a traced graph, or not (None: on a GPU only).

        Raises BackendError for what it cannot honour: threads, activation_bits.
        """
        for flag, value in (("--threads", threads), ("--activation-bits", activation_bits)):
            if value is not None:
                raise BackendError(f"{flag} {value}: is for the cpu backend, and this is mlx: leave it out, or choose "
                                   "--backend cpu")
        config, tensors = checkpoint.config, checkpoint.tensors
        activations = runtime.pick_dtype(dtype, checkpoint.dtype, device)
        advance = progress.meter(checkpoint.nbytes)

        def array(parts: Sequence[Tensor]) -> mx.array:
            kinds = {part.dtype for part in parts}
            bits = [part.bits if len(kinds) == 1 else part.float32() for part in parts]
            array = mx.array(bits[0] if len(bits) == 1 else np.concatenate(bits))
            if kinds == {"bfloat16"}:
                array = array.view(mx.bfloat16)
            array = array.astype(activations)
            mx.eval(array)
            for part in parts:
                part.release()
            return array

        def matrix(*names: str) -> mx.array | QuantizedMatrix | tuple[mx.array | QuantizedMatrix, ...]:
            """Rows on rows, as few blocks as the formats allow: one tensor or block at a time is in memory twice."""
            runs: list[list[Tensor | AffineWeight]] = []
            for weight in map(tensors.__getitem__, names):
                if runs and alike(runs[-1][0], weight):
                    runs[-1].append(weight)
                else:
                    runs.append([weight])
            blocks = []
            for run in runs:
                is_low_bit = isinstance(run[0], AffineWeight)
                blocks.append(QuantizedMatrix.pack(run, activations, device) if is_low_bit else array(run))
                advance(sum(weight.nbytes for weight in run))
            return blocks[0] if len(blocks) == 1 else tuple(blocks)

        def linear(prefix: str, *names: str) -> Linear:
            biases = [key for name in names if (key := f"{prefix}{name}.bias") in tensors]
            return projection(by_columns(matrix(*(f"{prefix}{name}.weight" for name in names))),
                              matrix(*biases) if biases else None)

        def projection(*parts: object) -> Linear:
            made = Linear(*parts)
            if made._columns is not None:
                mx.eval(made._columns)
            return made

        def by_columns(weight: mx.array | QuantizedMatrix | tuple) -> mx.array | QuantizedMatrix | tuple:
            """The same matrix, for MLX's float32 products on the CPU, which are about twice as fast where it lies so."""
            if device.type != mx.cpu or activations != mx.float32 or not isinstance(weight, mx.array):
                return weight
            columns = mx.contiguous(weight.T)
            weight = columns.T
            mx.eval(columns, weight)
            return weight

        def norm(name: str) -> RMSNorm:
            return RMSNorm(matrix(f"{name}.weight"), config.rms_norm_eps)

        with mx.stream(device):
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
            tied = config.tie_word_embeddings
            embedded = matrix("model.embed_tokens.weight")
            embedding = Embedding(by_columns(embedded) if tied else embedded)
            head = projection(embedding.weight) if tied else linear("", "lm_head")
            compile, reason = _compiles(config, device, compile)
            model = cls(config, embedding, tuple(blocks), norm("model.norm"), head, activations, device,
                        (f"decoding is not compiled: {reason}",) if reason else ())
            if not rope.length_dependent(config):
                model._steps = Steps(model, compile)
            return model

    @property
    def verify_width(self) -> int:
        """Positions that `verify` takes for little more than a step costs."""
        return 16  # all read the weights once; an estimate, not measured on Metal

    def make_cache(self, capacity: int) -> Cache:
        """A fresh cache for at most `capacity` positions. Raises ContextError below 1."""
        return Cache(self.config, capacity, self.dtype, self.device)

    def forward(self, tokens: mx.array, index_pos: int, cache: Cache, *, every: bool = False, probe=None) -> mx.array:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: the position of the first, equal to
        cache.length. Returns logits [B, V] of the last position, with `every` [B, T, V]. probe(name, array) is called at
        every checkpoint of the model. Raises ContextError when the call does not continue the cache or does not fit.
        """
        with mx.stream(self.device):
            tokens = mx.array(checked_tokens(tokens, self.config.vocab_size))
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

    def step(self, token: mx.array, index_pos: int, cache: Cache, sampler: Sampler) -> mx.array:
        """The next token, int32 [1, 1], still on the device: forward over `token` [1, T] and sampling as one unit.

        Raises ContextError as `forward`, and for a batch of more than one sequence.
        """
        if len(token) != 1:
            raise ContextError(f"step decodes one sequence, not a batch of {len(token)}")
        if self._steps and len(token[0]) == 1:
            with mx.stream(self.device):
                if not isinstance(token, mx.array):
                    token = mx.array(checked_tokens(token, self.config.vocab_size))
                return self._steps(token, index_pos, cache, sampler)
        logits = self.forward(token, index_pos, cache)
        with mx.stream(self.device):
            recent = cache.recent(sampler.window) if sampler.window else None
        return sampler(logits, cache.length, recent)

    def verify(self, tokens: mx.array, index_pos: int, cache: Cache, sampler: Sampler) -> mx.array:
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
            with mx.stream(self.device):
                recent = cache.recent(sampler.window, position) if sampler.window else None
            drawn.append(sampler(logits[:, i], position, recent))
        with mx.stream(self.device):
            return mx.concatenate(drawn, axis=1)


def _compiles(config: LlamaConfig, device: mx.Device, wanted: bool | None) -> tuple[bool, str]:
    """Whether steps are traced, and why not. Raises BackendError where that is wanted and cannot be."""
    if rope.length_dependent(config):
        reason = "dynamic rope turns by angles that depend on the length"
        if wanted:
            raise BackendError(f"--compile: {reason}, leave it out")
        return False, reason
    if wanted is False:
        return False, "--no-compile asks for it"
    if device.type == mx.cpu and wanted and shutil.which("g++") is None:
        raise BackendError("--compile: for its CPU device MLX calls g++, which is not installed: install it, or leave "
                           "--compile out")
    if device.type == mx.cpu and not wanted:
        return False, "for its CPU device MLX calls a C++ compiler at the first token, which --compile asks for"
    return True, ""
