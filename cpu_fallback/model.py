"""The Llama in NumPy (Touvron et al. 2023, arXiv 2302.13971; Llama 2, arXiv 2307.09288)."""

from __future__ import annotations

import numpy as np

from mlx_llama.core.checkpoint import Checkpoint
from mlx_llama.core.config import LlamaConfig
from mlx_llama.core.errors import ContextError
from mlx_llama.core.positions import checked_tokens

from . import runtime
from .cache import Cache
from .layers import MLP, Attention, Block, Embedding, Linear, RMSNorm
from .sampling import Sampler


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

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str = "auto", device: str = "cpu") -> Llama:
        """Build the model; weights keep their stored width. Raises BackendError for a dtype it cannot honour."""
        config, tensors = checkpoint.config, checkpoint.tensors
        activations = runtime.pick_dtype(dtype, checkpoint.dtype, device)

        def matrix(*names: str) -> np.ndarray:
            parts = [tensors[name] for name in names]
            if len(parts) == 1:
                return np.require(parts[0].bits, requirements="A")  # mapped; copied only from an unaligned file
            kinds = {part.dtype for part in parts}
            bits = [part.bits if len(kinds) == 1 else part.float32() for part in parts]
            fused = np.empty((sum(map(len, bits)), bits[0].shape[1]), bits[0].dtype)
            np.concatenate(bits, out=fused)
            for part in parts:
                part.release()
            return fused

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
        return cls(config, embedding, tuple(blocks), norm("model.norm"), head, activations, device)

    def make_cache(self, capacity: int) -> Cache:
        """A fresh cache for at most `capacity` positions. Raises ContextError below 1."""
        return Cache(self.config, capacity, self.dtype, self.device)

    def forward(self, tokens: np.ndarray, index_pos: int, cache: Cache, *, every: bool = False, probe=None) -> np.ndarray:
        """Logits after `tokens`, whose keys and values are appended to the cache.

        tokens: ids [B, T] (list, NumPy or this backend's array); index_pos: the position of the first, equal to
        cache.length. Returns logits [B, V] of the last position, with `every` [B, T, V]. probe(name, array) is called at
        every checkpoint of the model. Raises ContextError when the call does not continue the cache or does not fit.
        """
        tokens = checked_tokens(tokens, self.config.vocab_size)
        cache.begin(tokens, index_pos)
        x = self.embedding(tokens)
        if probe:
            probe("embedding", x)
        for block in self.blocks:
            x = block(x, cache, probe)
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
