"""The state of a decoded token in the device's memory, and the view of a cache through it."""

from __future__ import annotations

from types import ModuleType

import torch

from mlx_llama.core.backends.positions import checked_tokens
from mlx_llama.core.generation import rng
from mlx_llama.core.models.config import LlamaConfig

from .. import runtime
from ..cache import Cache

# Fields of the state, int64: the token's position and the one after it, the token, the seed's words, positions that the
# cache's storage has room for, and addresses: of its tokens, of the tables, and of each layer's keys and values.
POSITION, NEXT, TOKEN, SEED_LOW, SEED_HIGH, ALLOCATED, TOKENS, COSINES, SINES, LAYERS = range(10)


def pack_state(position: int, token: int = 0, seed: int = 0, allocated: int = 0, tokens: torch.Tensor | None = None,
               tables: tuple[torch.Tensor, ...] = (), layers: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
    """A state on the host. tables: cosines and sines; layers: keys and values in turn; arrays left out are not read."""
    addresses = [0 if array is None else array.data_ptr() for array in (tokens, *(tables or (None, None)), *layers)]
    return torch.tensor([position, position + 1, token, *rng.split_seed(seed), allocated, *addresses])


class StateView:
    """A decoded token's view of a cache by kernels, which find position, token and cache through `state`.

    It holds nothing of a cache, so that a CUDA graph of what was done with it serves any cache. state: int64, on the
    device. tokens: int64 [1, 1]; next_position: int64 []; seed: int64 [2]; all three are views of the state. kernels:
    decode.py.
    """

    count = 1

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, device: torch.device, kernels: ModuleType):
        self.config, self.dtype, self.kernels = config, dtype, kernels
        self.state = torch.zeros(LAYERS + 2 * config.num_hidden_layers, dtype=torch.int64, device=device)
        self.tokens = self.state[TOKEN].view(1, 1)
        self.next_position = self.state[NEXT]
        self.seed = self.state[SEED_LOW:SEED_HIGH + 1]

    def point(self, cache: Cache, token: torch.Tensor, index_pos: int, seed: int) -> None:
        """Make `token` [1, 1] at `index_pos` of the cache the next to be decoded, and note it in the cache."""
        on_device = isinstance(token, torch.Tensor)
        known = 0 if on_device else int(checked_tokens(token, self.config.vocab_size)[0, 0])
        layers = tuple(part for layer in zip(cache.keys, cache.values) for part in layer)
        state = pack_state(index_pos, known, seed, cache.allocated, cache.tokens, cache.tables, layers)
        self.state.copy_(runtime._sent(state, self.state.device))
        if on_device:
            self.state[TOKEN].copy_(token[0, 0])
        cache.tokens[0, index_pos].copy_(self.state[TOKEN])

    def advance(self, token: torch.Tensor) -> None:
        """Make `token`, int32 [1, 1], the next to be decoded, one position further, and note it in the cache."""
        self.kernels.advance(self.state, token)

    def recent(self, window: int) -> torch.Tensor:
        """The last `window` tokens, this one included: int32 [1, window], -1 in front where there are fewer."""
        return self.kernels.recent(self.state, window)

    def new_keys(self, layer: int) -> torch.Tensor:
        """Keys that this call stored in a layer, [1, G, 1, D]."""
        spec = self.config.layers[layer]
        return self.kernels.read_keys(self.state, layer, spec.key_value_heads, spec.head_dim, self.dtype)
