"""Accuracy and read rates of the cuda backend's Triton kernels on a GPU. For measure_gpu.py.

Sizes are those of an 8B Llama's layers. The judge is the same arithmetic in float64. Timing is of a
CUDA graph over several matrices in turn, so that no weights are in the GPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

PRODUCTS = {
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate, up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
HEADS = (32, 8, 128)  # query heads, key heads, width of a head
DELTA = (
    16,
    32,
    128,
    128,
)  # key heads, value heads, and their sizes, of Qwen3-Next's gated delta rule
CONV = (2048, 3)  # channels and positions of LFM2's convolutions
PROMPT = 256  # positions of a recurrence
LOW_BIT = (4096, 14336)
LOW_BIT_KINDS, LOW_BIT_ROWS = ("affine 4/64", "Q8_0", "Q4_K", "Q6_K"), (1, 8, 32)
VOCABULARY = 128256
ROOM, LENGTH = 6000, 4096  # positions of the caches for accuracy and for timing
DEVICE = "cuda"
POSITIONS = (0, 63, 64, 127, 4095, 4096, 5000)
# largest error over the root mean square
BOUNDS = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
APART = 256 << 20  # bytes between two reads of a weight, more than a GPU's cache


def _normal(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    import torch

    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def _error(actual: Any, right: Any) -> float:
    right = right.double()
    error = float((actual.double() - right).abs().max() / right.square().mean().sqrt())
    return error if np.isfinite(error) else 1e300


def check() -> list[dict[str, Any]]:
    """Error and bound of each kernel of a step in each dtype."""
    import torch

    torch.manual_seed(0)
    checks = []
    with torch.no_grad():
        for name, bound in BOUNDS.items():
            errors = _errors(getattr(torch, name))
            checks += [
                {"name": f"{kernel} {name}", "error": error, "bound": bound, "ok": error <= bound}
                for kernel, error in errors.items()
            ]
        checks.append({"name": "noise", "ok": _noise_is_right()})
    return checks


def _errors(dtype: Any) -> dict[str, float]:
    import torch
    import torch.nn.functional as F

    from cuda_fallback.kernels import decode
    from cuda_fallback.kernels.storage import key_places
    from mlx_llama.core.models.parts import Window

    def silu_gated(both: Any) -> Any:
        gate, up = both.double().chunk(2, dim=-1)
        return F.silu(gate) * up

    errors: dict[str, float] = {}
    x, delta, weight = (_normal(shape, dtype) for shape in ((3, 4096), (3, 4096), (4096,)))
    total, normed = decode.add_rms_norm(x, delta, weight, 1e-5)
    exact = total.double()
    errors["sum"] = _error(total, x.double() + delta.double())
    errors["norm"] = _error(
        normed, exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    )
    for name, (N, K) in PRODUCTS.items():
        x, weight = _normal((5, K), dtype), _normal((min(N, 2048), K), dtype, K**-0.5)
        bias = _normal((min(N, 2048),), dtype)
        right = x.double() @ weight.double().T + bias.double()
        product = decode.multiply(x, weight, bias)
        errors[f"product {name}"] = _error(product, right)
        alone = torch.cat([decode.multiply(row, weight, bias) for row in x.split(1)])
        # the same bits
        errors[f"product {name} alone"] = 0.0 if torch.equal(alone, product) else 1e300
        errors[f"gated product {name}"] = _error(
            decode.multiply_gated(x, weight, bias), silu_gated(right)
        )
    both = _normal((5, 2 * 14336), dtype)
    errors["gate"] = _error(decode.gate(both, "silu"), silu_gated(both))
    H, G, D = HEADS
    (place,) = key_places([(G, D)])
    heads, query_weight, key_weight = (
        _normal(shape, dtype) for shape in ((1, (H + 2 * G) * D), (D,), (D,))
    )
    split = heads.double().view(H + 2 * G, D)
    right = split / (split.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    right = torch.cat(
        [right[:H] * query_weight.double(), right[H : H + G] * key_weight.double(), split[H + G :]]
    )
    errors["norm of heads"] = _error(
        decode.norm_heads(heads, query_weight, key_weight, H, G, D, 1e-5).view_as(right), right
    )
    cosines, sines = torch.rand((2, ROOM, D // 2), device=DEVICE) * 2 - 1

    def turned(heads: Any, start: int) -> Any:
        """heads: [..., T, D]."""
        first, second = heads.double().chunk(2, dim=-1)
        cosine, sine = (part[start : start + heads.shape[-2]].double() for part in (cosines, sines))
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    heads = _normal((1, 7, H, D), dtype).transpose(1, 2)
    errors["rotation"] = _error(decode.rotate(heads, cosines[:7], sines[:7]), turned(heads, 0))
    for position in POSITIONS:
        for window in (None, 1000):
            storage, state = _row(_normal((1, 2, G, ROOM, D), dtype), position, (cosines, sines))
            keys, values = storage.numbers[0]
            heads = _normal((1, (H + 2 * G) * D), dtype)
            query = decode.store_rotated(state, place, heads, H, G, D)
            split = heads.view(H + 2 * G, 1, D)
            right = turned(split[: H + G], position)[:, 0]
            stored = torch.cat([query[0, :, 0], keys[:, position], values[:, position]])
            errors[f"row {position}"] = _error(
                stored, torch.cat([right, split[H + G :, 0].double()])
            )
            first = max(0, position + 1 - window) if window else 0
            seen = [
                part[:, first : position + 1].double().repeat_interleave(H // G, 0)
                for part in (keys, values)
            ]
            shares = torch.softmax((seen[0] @ query.double()[0].mT)[..., 0] * D**-0.5, dim=-1)
            right = (shares[:, None] @ seen[1]).reshape(1, 1, -1)
            errors[f"attention {position} {window}"] = _error(
                decode.attend(state, place, query, G, window and Window(window), D**-0.5), right
            )
    return errors | _recurrent_errors(dtype)


class _States:
    """A sequence's states of one mixer. As torch's own words see them, they are in `recurrent`."""

    def __init__(self, spec: Any):
        from types import SimpleNamespace

        import torch

        from cuda_fallback.kernels.storage import LiveStates, state_places

        config: Any = SimpleNamespace(recurrent=(spec,))
        (self.place,) = state_places(config)
        self.live, self.length = LiveStates(config, torch.empty(0, device=DEVICE).device), 0
        self.states = tuple(torch.zeros((1, *shape), device=DEVICE) for shape in spec.states)

    def recurrent(self, slot: int) -> Any:
        return self.states

    def keep(self, slot: int, states: Any) -> None:
        self.states = states

    def describe(self, count: int) -> Any:
        """A state on the device for `count` tokens, which follow each other."""
        import torch

        from cuda_fallback.kernels.state import POSITION, SLOT, STATES, new_state

        state = new_state()
        state[[POSITION, STATES, SLOT], 0] = (
            self.length,
            self.live.numbers.data_ptr(),
            self.live.slot,
        )
        self.length, self.live.slot = self.length + count, 1 - self.live.slot
        return torch.from_numpy(state).to(DEVICE)


def _mixers(dtype: Any) -> dict[str, tuple[Any, ...]]:
    """(mixer, width of its input, word, kernel's and word's arguments) of recurrent layers."""
    from functools import partial

    import torch

    from cuda_fallback import arrays
    from cuda_fallback.kernels import decode
    from mlx_llama.core import ops
    from mlx_llama.core.models.parts import GatedDelta, ShortConv
    from mlx_llama.core.ops import DeltaWeights

    groups, heads, key, value = DELTA
    names = ("", "", "", "")
    delta = GatedDelta(0, 0, names, *names, "", groups, heads, key, value, 1, 4, 1e-6)
    weights = DeltaWeights(
        conv=_normal((delta.channels, 4), dtype),
        rate=-_normal((heads,), torch.float32).exp(),
        bias=_normal((heads,), torch.float32),
        norm=_normal((value,), dtype),
    )
    conv = ShortConv(0, 0, "", "", "", *CONV)
    of_conv, bias = _normal(CONV, dtype), _normal((CONV[0],), dtype)

    def gated_delta(state: Any, place: Any, x: Any) -> Any:
        return decode.gated_delta(state, place, x, delta, weights)

    def short_conv(state: Any, place: Any, x: Any) -> Any:
        return decode.short_conv(state, place, x, of_conv, bias)

    word = partial(ops.gated_delta, arrays, spec=delta, weights=weights)
    width = delta.channels + heads * (value + 2)
    other = partial(ops.short_conv, arrays, spec=conv, weight=of_conv, bias=bias)
    return {
        "gated delta": (delta, width, gated_delta, word),
        "short convolution": (conv, 3 * CONV[0], short_conv, other),
    }


def _recurrent_errors(dtype: Any) -> dict[str, float]:
    """Of a prompt by kernels against torch's own words; in chunks it has the same bits."""
    import torch

    errors: dict[str, float] = {}
    for name, (spec, width, kernel, word) in _mixers(dtype).items():
        x, states, cut, plain = _normal((1, 40, width), dtype), *(_States(spec) for _ in range(3))
        out = kernel(states.describe(40), states.place, x)
        chunks = [kernel(cut.describe(part.shape[1]), cut.place, part) for part in x.split(13, 1)]
        errors[name] = _error(out, word(x.float(), plain))
        errors[f"{name} in chunks"] = 0.0 if torch.equal(torch.cat(chunks, 1), out) else 1e300
    return errors


def _recurrent_rates() -> dict[str, dict[str, float]]:
    """Bytes per second of the states of a decoded token, read and written, and of a prompt's inputs
    and results.
    """
    import torch

    speeds = {}
    for name, (spec, width, kernel, word) in _mixers(torch.bfloat16).items():
        nbytes = 8 * sum(int(np.prod(shape)) for shape in spec.states)
        rows = [_States(spec) for _ in range(min(64, APART // nbytes + 2))]
        x = _normal((1, 1, width), torch.bfloat16)
        described = [(row.place, row.describe(1), row.describe(1)) for row in rows]
        calls = [
            lambda place=place, state=state: kernel(state, place, x)
            for place, _, state in described
        ]
        speeds[name] = {"ours": nbytes / _seconds(calls)}
        x, (place, state, _) = _normal((1, PROMPT, width), torch.bfloat16), described[0]
        seconds = _seconds([lambda: kernel(state, place, x)]), _seconds([lambda: word(x, rows[0])])
        nbytes = 2 * (x.numel() + kernel(state, place, x).numel())
        ours, torchs = (nbytes / part for part in seconds)
        speeds[f"{name}, {PROMPT} positions"] = {"ours": ours, "torch": torchs}
    return speeds


def _noise_is_right() -> bool:
    import torch

    from cuda_fallback.arrays import pack, unpack
    from cuda_fallback.kernels import decode
    from cuda_fallback.kernels.state import MAX_ROWS
    from mlx_llama.core import rng
    from mlx_llama.core.options import resolve
    from mlx_llama.core.sample import SamplingFeatures, arrange

    seed, position = 2**63 + 12345, 77
    options = [resolve({"temperature": 1.0, "seed": seed}).options]
    arrays = arrange(SamplingFeatures.of(options), options)
    zeros = torch.zeros((1, VOCABULARY), device=DEVICE)
    noisy = decode.add_noise(
        zeros,
        torch.tensor([[position]], device=DEVICE),
        unpack(arrays, torch.from_numpy(pack(arrays, MAX_ROWS)).to(DEVICE)),
    )
    return bool(np.array_equal(noisy[0].cpu().numpy(), rng.gumbel(seed, position, VOCABULARY)))


def _row(numbers: Any, position: int, tables: tuple[Any, Any]) -> tuple[Any, Any]:
    """A cache's row of these keys and values, and a state on the device of a token at
    `position`.
    """
    import torch

    from cuda_fallback.kernels.state import new_state, pack_row
    from cuda_fallback.kernels.storage import Storage

    storage = Storage(
        torch.zeros(numbers.shape[3] + 1, dtype=torch.int32, device=DEVICE), numbers, None
    )
    state = new_state()
    pack_row(state, 0, position, storage, tables)
    return storage, torch.from_numpy(state).to(DEVICE)


def rates() -> dict[str, dict[str, float]]:
    """Bytes of weights (or keys and values) per second that each kernel reads, and torch's own
    operation for the same.
    """
    import torch
    import torch.nn.functional as F

    from cuda_fallback.kernels import decode, find_kernels
    from cuda_fallback.kernels.storage import key_places
    from cuda_fallback.quantized import QuantizedMatrix

    speeds: dict[str, dict[str, float]] = {}
    device = torch.empty(0, device=DEVICE).device
    with torch.no_grad():
        for name, (N, K) in PRODUCTS.items():
            nbytes = 2 * N * K
            weights = [_normal((N, K), torch.bfloat16, K**-0.5) for _ in range(APART // nbytes + 2)]
            x = _normal((1, K), torch.bfloat16)
            ours = decode.multiply_gated if name == "gate, up" else decode.multiply
            speeds[name] = {
                "ours": nbytes / _seconds([lambda w=w: ours(x, w) for w in weights]),
                "torch": nbytes / _seconds([lambda w=w: F.linear(x, w) for w in weights]),
            }
            del weights
        from random_weights import random_weight

        for kind in LOW_BIT_KINDS:
            weight = random_weight(kind, *LOW_BIT)
            matrix = QuantizedMatrix.pack(
                [weight], torch.float16, device, find_kernels(device).packed
            )
            copies = [_copied(matrix) for _ in range(APART // matrix.nbytes + 2)]
            for rows in LOW_BIT_ROWS:
                x = _normal((rows, LOW_BIT[1]), torch.float16)
                seconds = _seconds([lambda m=m, x=x: m.matmul(x) for m in copies])
                speeds[f"{kind}, {rows} rows" if rows > 1 else kind] = {
                    "ours": matrix.nbytes / seconds
                }
            del copies
        H, G, D = HEADS
        caches = [
            _normal((1, 2, G, LENGTH, D), torch.bfloat16)
            for _ in range(APART // (4 * G * LENGTH * D) + 2)
        ]
        table, (place,) = torch.zeros((1, D // 2), device=DEVICE), key_places([(G, D)])
        states = [_row(numbers, LENGTH - 1, (table, table))[1] for numbers in caches]
        query = _normal((1, H, 1, D), torch.bfloat16)
        nbytes = 4 * G * LENGTH * D
        ours = [
            lambda state=state: decode.attend(state, place, query, G, None, D**-0.5)
            for state in states
        ]
        torchs = [
            lambda kv=kv: F.scaled_dot_product_attention(query, kv[:, 0], kv[:, 1], enable_gqa=True)
            for kv in caches
        ]
        speeds["attention"] = {"ours": nbytes / _seconds(ours), "torch": nbytes / _seconds(torchs)}
        speeds |= _recurrent_rates()
    return speeds


def _copied(matrix: Any) -> Any:
    import dataclasses

    import torch

    return dataclasses.replace(
        matrix,
        **{
            field.name: value.clone()
            for field in dataclasses.fields(matrix)
            if isinstance(value := getattr(matrix, field.name), torch.Tensor)
        },
    )


def _seconds(calls: list[Callable[[], Any]]) -> float:
    """Seconds per call: the best of six replays of one graph over all calls."""
    import torch

    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(max(1, 24 // len(calls))):
            for call in calls:
                call()
    count = len(calls) * max(1, 24 // len(calls))
    best = float("inf")
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / count)
    return best
