"""The Llama in NumPy (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import machine

from . import kernels as compiled, ops, runtime
from .cache import Cache
from .layers import MLP, Attention, Block, Embedding, Linear, RMSNorm
from .quantized import QuantizedMatrix
from .sampling import Sampler

if TYPE_CHECKING:
    from .kernels.runner import CompiledLlama

BYTES_PER_THREAD = 4 << 20  # of weights: below, waking another thread for every token costs more than it gains


class Llama:
    """Embedding, blocks, final norm and projection to the vocabulary. Immutable once loaded."""

    def __init__(self, config: LlamaConfig, embedding: Embedding, blocks: tuple[Block, ...], norm: RMSNorm,
                 head: Linear, dtype: np.dtype, device: str = "cpu",
                 notices: tuple[str, ...] = ()):
        self.config = config
        self.embedding = embedding
        self.blocks = blocks
        self.norm = norm
        self.head = head
        self.dtype = dtype
        self.device = device
        self.notices = notices
        self.compiled: CompiledLlama | None = None  # the same model as machine code; None: NumPy only
        self._tile: int | None = None  # its tokens that share a pass over the weights: of more, every tile costs as much

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: str = "cpu", threads: int | None = None,
             activation_bits: int | None = None, compile: bool | None = None) -> Llama:
        """Build the model; weights keep their stored width.

        compile: False is plain NumPy. threads: of the compiled path (None: one per physical core, fewer for a small model). activation_bits: 8, 16 or
        32, what it multiplies low-bit weights with (None: 16, with dtype "float32" 32). Raises BackendError for what it
        cannot honour, CheckpointError where memory does not suffice.
        """
        config, tensors = checkpoint.config, checkpoint.tensors
        activations = runtime.pick_dtype(dtype, checkpoint.dtype, device)
        target, reason = (None, "--no-compile asks for it") if compile is False else compiled.find_target()
        if target is None and compile:
            raise BackendError(f"--compile: there are no compiled kernels here ({reason}): leave it out")
        if target is None and (threads is not None or activation_bits is not None):
            flag = "--threads" if threads is not None else "--activation-bits"
            raise BackendError(f"{flag} is for the compiled path, which is not to be had here ({reason}): leave it out")

        def matrix(*names: str) -> ops.Matrix | tuple[ops.Matrix, ...]:
            """As it lies in the file, mapped; copied only from an unaligned one."""
            parts = [QuantizedMatrix(part) if isinstance(part, AffineWeight) else np.require(part.bits, requirements="A")
                     for part in map(tensors.__getitem__, names)]
            return parts[0] if len(parts) == 1 else tuple(parts)

        def linear(prefix: str, *names: str) -> Linear:
            biases = [tensors[key].float32() for name in names if (key := f"{prefix}{name}.bias") in tensors]
            return Linear(matrix(*(f"{prefix}{name}.weight" for name in names)),
                          np.concatenate(biases) if biases else None)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(tensors[f"{name}.weight"].float32(), config.rms_norm_eps)

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
        model = cls(config, embedding, tuple(blocks), norm("model.norm"), head, activations, device)
        if target is None:
            model.notices = (f"plain NumPy: {reason}",)
            return model
        cores = machine.physical_cores()
        if threads is None:
            threads = max(1, min(cores, checkpoint.nbytes // BYTES_PER_THREAD))
        bits = activation_bits or (32 if dtype == "float32" else 16)
        said = [f"{threads} thread{'s' if threads > 1 else ''}"]
        low_bit = any(isinstance(tensor, AffineWeight) for tensor in tensors.values())
        model._tile = target.tile if low_bit else target.float_tile
        if low_bit:
            said.append(f"low-bit weights times {bits}-bit activations")
        model.notices = (", ".join(said),)
        if threads > cores:
            model.notices += (f"{threads} threads wait for each other on {cores} cores: --threads {cores} is faster",)
        model.compiled = compiled.build(config, tensors, threads, bits, target)
        return model

    @property
    def verify_width(self) -> int:
        """Positions that `verify` takes for little more than a step costs."""
        return self._tile or 16

    def make_cache(self, capacity: int) -> Cache:
        """A fresh cache for at most `capacity` positions. Raises ContextError below 1."""
        return Cache(self.config, capacity, self.dtype, self.device)

    def forward(self, tokens: np.ndarray, index_pos: int, cache: Cache, *, every: bool = False, probe=None) -> np.ndarray:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: the position of the first, equal to
        cache.length. Returns logits [B, V] of the last position, with `every` [B, T, V]. probe(name, array) is called at
        every checkpoint of the model, which only the NumPy code below has. Raises ContextError when the call does not
        continue the cache or does not fit.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        cache.begin(tokens, index_pos)
        if self.compiled and not probe:
            logits = self.compiled.forward(lambda part: self.embedding(tokens[:, part]), cache, every)
            cache.end()
            return logits
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

    def step(self, token: np.ndarray, index_pos: int, cache: Cache, sampler: Sampler) -> np.ndarray:
        """The next token, int32 [1, 1], still on the device: forward over `token` [1, T] and sampling as one unit.

        Raises ContextError as `forward`, and for a batch of more than one sequence.
        """
        if len(token) != 1:
            raise ContextError(f"step decodes one sequence, not a batch of {len(token)}")
        logits = self.forward(token, index_pos, cache)
        return sampler(logits, cache.length, cache.recent(sampler.window) if sampler.window else None)

    def verify(self, tokens: np.ndarray, index_pos: int, cache: Cache, sampler: Sampler) -> np.ndarray:
        """The token after each of `tokens` [1, T], int32 [1, T], still on the device: forward and T samplings as one unit.

        Each is drawn as `step` would draw it there, with its position's noise and the recent tokens up to it. The
        products are those of a prompt: they may round otherwise than a single token's (compiled: the same bits).
        Raises ContextError as `step`.
        """
        if len(tokens) != 1:
            raise ContextError(f"verify continues one sequence, not a batch of {len(tokens)}")
        logits = self.forward(tokens, index_pos, cache, every=True)
        drawn = []
        for i, position in enumerate(range(index_pos + 1, cache.length + 1)):
            recent = cache.recent(sampler.window, position) if sampler.window else None
            drawn.append(sampler(logits[:, i], position, recent))
        return np.concatenate(drawn, axis=1)
