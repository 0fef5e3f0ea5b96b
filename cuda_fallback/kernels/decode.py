"""Triton kernels of decoded tokens, and of a prompt's rotations, gates, experts and recurrences,
from attention.py, elements.py, products.py, recurrent.py and tokens.py. Importing it requires the
package triton.

Values that change from token to token are read from device memory (state.py), so a captured step
needs nothing from the host. Each row of a batch has separate programs. The tests compare each
function with torch's operations:

    add_rms_norm   ops.add_rms_norm                 multiply, multiply_gated   ops.linear, ops.gated_linear
    norm_heads     ops.norm_heads                   rotate, gate               ops.rope, ops.gate
    store_rotated  ops.rope_and_store               attend                     ops.attend
    recent         Cache.recent                     add_noise                  arrays.add_noise
    read_keys      View.new_keys                    adapt                      ops.adapt
    xielu          ops.xielu                        gate_output                ops.gate_output
    short_conv     ops.short_conv                   gated_delta                ops.gated_delta
    layer_inputs   ops.layer_inputs                 gate_input                 ops.gate_input

Sums are float32, in an order that depends on the sizes and the row's position alone: bit-identical
in every run, whatever else is in the batch, at every capacity of the cache.
"""  # noqa: E501

from __future__ import annotations

from types import SimpleNamespace

import torch

from .. import arrays
from .attention import attend, read_keys, store_rotated, try_heads  # noqa: F401
from .elements import (  # noqa: F401
    add_rms_norm,
    gate,
    gate_input,
    gate_output,
    layer_inputs,
    norm_heads,
    rotate,
    xielu,
)
from .products import adapt, combine, experts, multiply, multiply_chosen, multiply_gated  # noqa: F401
from .recurrent import gated_delta, short_conv  # noqa: F401
from .tokens import add_noise, advance, note, recent  # noqa: F401

# words of sampling (core/sample.py) for captured steps: torch's, and noise by Triton's kernel
words = SimpleNamespace(**vars(arrays) | {"add_noise": add_noise})


def try_out(device: torch.device) -> None:
    """Compile and launch a small `multiply`. Raises Triton's errors."""
    x = torch.zeros((1, 32), dtype=torch.float16, device=device)
    multiply(x, x)
