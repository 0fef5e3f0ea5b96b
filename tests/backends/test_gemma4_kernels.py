"""Gemma 4 by the torch backend's kernels: heads of two sizes, keys and values of another layer,
values that are keys, inputs of layers.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases.architectures import TOKENS
from cases.captured import loaded
from cases.gemma4 import make_gemma4

from backends.conftest import relative_error
from backends.launches import META, machine_code, recorded
from backends.test_architectures import made
from backends.triton_process import DEVICE, HAS_GPU, call, compile_call, computing  # noqa: F401
from cuda_fallback.arrays import SamplingBatch
from cuda_fallback.kernels.state import MAX_ROWS
from cuda_fallback.kernels.storage import Storage, key_places, key_shapes
from mlx_llama.core import options
from mlx_llama.core.models.parts import LayerInputs, PerLayerInput

FAMILIES = "Gemma 4 E4B", "Gemma 4 E2B", "Gemma 4 31B", "Gemma 4 12B"


@pytest.mark.parametrize("bits", [None, 8])
def test_kernels_find_the_layers_of_a_row(bits):
    for sizes in (dict(), dict(num_kv_shared_layers=0, head_dim=18, global_head_dim=42)):
        config = make_gemma4(**sizes).config
        storage = Storage.allocate(config, 7, torch.float16, bits, torch.device("cpu"))
        places = key_places(key_shapes(config))
        assert len(places) == len(storage.layers) and len(config.kinds) == 2
        for slot, (place, (keys, values)) in enumerate(zip(places, storage.layers)):
            assert keys.storage_offset() == 7 * place.base * place.unit
            assert keys.shape[-1] % place.unit == 0
            if bits:
                scales = storage.layer_scales[slot]
                assert scales.storage_offset() == 7 * place.scale_base * place.scale_unit


def read(source, by_kernels: bool, bits: int | None, cuts: tuple[int, ...]) -> tuple:
    """Logits of tokens in pieces from a cut to the next, and the cache's state."""
    model = loaded(source, by_kernels, "float32", by_kernels, cache_bits=bits)
    tokens, logits = TOKENS[:1] % model.config.vocab_size, []
    with computing(by_kernels):
        cache = model.make_cache(16)
        for start, end in itertools.pairwise(cuts):
            part = model.forward(tokens[:, start:end], start, cache, all_positions=True)
            logits.append(part[0].float().cpu().numpy())
        return np.concatenate(logits), cache.state()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name, call):
    """A prompt, and three tokens of which the last is replayed."""
    folder, wanted = made(name)
    logits, _ = call(read, folder, True, None, (0, 9, 10, 11, 12))
    assert relative_error(logits, wanted[0, :12]) < 1e-5


def by_each_path(bits: int | None) -> list[tuple]:
    checkpoint, cuts = make_gemma4(), (0, 12, 13, 14, 15)  # the window begins within the prompt
    return [read(checkpoint, by_kernels, bits, cuts) for by_kernels in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("bits, bound", [(8, 2e-2), (16, 1e-3)])
def test_narrow_caches_are_those_of_torchs_operations(bits, bound, call):
    (logits, state), (wanted, plain) = call(by_each_path, bits)
    assert relative_error(logits, wanted) < bound
    assert state.keys() == {"tokens", "keys", "values", "keys.1", "values.1"}
    for part, array in state.items():
        assert relative_error(array, plain[part]) < bound, part


LAYER = "_add_rms_norm _multiply _norm_heads _store_rotated _attend _join _multiply _add_rms_norm"
LAYER += " _add_rms_norm _multiply _multiply _add_rms_norm _multiply _gate_input _multiply"
LAYER += " _add_rms_norm"


def launches() -> list[str]:
    model = loaded(make_gemma4(), dtype="float32")
    draw = SamplingBatch([options.resolve(dict(temperature=0)).options], model.device)
    with computing(True):
        cache = model.make_cache(16)
        for position in range(3):
            model.step([[5]], position, cache, draw)
    return model.runner.capture.launched


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="a CUDA graph does not tell")
def test_a_step_launches_no_more_kernels_than_it_needs(call):
    wanted = ["_multiply", "_layer_inputs", *3 * LAYER.split(), "_add_rms_norm", "_multiply"]
    assert call(launches) == [*wanted, "_advance"]


# The kernels


def input_errors(dtype: torch.dtype) -> list[float]:
    from cuda_fallback import arrays
    from cuda_fallback.kernels import decode
    from mlx_llama.core import ops as plain

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    class Words:
        rms_norm = staticmethod(
            lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
        )

    generator, errors = torch.Generator().manual_seed(0), []
    for P, layers in ((12, 3), (1030, 2)):
        whole = LayerInputs("", "", "", tokens=9, size=P, hidden=50, layers=layers, eps=1e-5)
        x = random(2, 3, layers * P), random(2, 3, layers * P), random(P)
        exact = plain.layer_inputs(Words, *(part.double() for part in x), whole)
        errors.append((decode.layer_inputs(*x, whole) - exact).abs().max() / exact.abs().max())
        for index, activation, T in ((0, "silu", 3), (layers - 1, "gelu_tanh", 1)):
            part = PerLayerInput(index, "", "", "", P, activation)
            gate = random(2, T, P)
            exact = plain.gate_input(arrays, gate.double(), x[0].double(), part)
            got = decode.gate_input(gate, x[0], part)
            errors.append((got - exact).abs().max() / exact.abs().max())
    return [float(error) for error in errors]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)], ids=str)
def test_inputs_of_layers_are_those_of_plain_words(dtype, bound, call):
    assert max(call(input_errors, dtype)) < bound


# The compiler

SHARED = 101376  # bytes that the smallest GPUs of 8.0 and newer give a program
# (query heads, key heads, width) of E4B and 31B
GLOBAL, LOCAL = (8, 2, 512), (32, 16, 256)
# instructions of a loop of 16 or 32 keys
BUDGET = {
    (GLOBAL, "bfloat16", None): 310,
    (GLOBAL, "bfloat16", 8): 460,
    (GLOBAL, "float32", None): 1600,
    (GLOBAL, "float32", 8): 1700,
    (LOCAL, "bfloat16", 8): 620,
}


def layer_code(heads: tuple[int, int, int], dtype: str, bits: int | None, capability: int) -> dict:
    """Machine code of a layer's kernels between its products, by name."""
    from cuda_fallback.kernels import decode

    def array(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=META)

    (H, G, D), place = heads, key_places([(16, 256), heads[1:]])[1]
    state = torch.empty((16, MAX_ROWS), dtype=torch.int64, device=META)
    with recorded() as found:
        for new, key_weight in ((G, array(D)), (0, None)):  # 0: it reads another layer's keys
            x = array(2, 1, (H + 2 * new) * D)
            x = decode.norm_heads(x, array(D), key_weight, H, new, D, 1e-6, True)
            decode.store_rotated(state, place, x, H, new, D, bits=bits, stride=384)
        decode.attend(state, place, array(2, H, 1, D), G, None, 1.0, bits)
        whole = LayerInputs("", "", "", tokens=9, size=256, hidden=2560, layers=42, eps=1e-6)
        inputs = decode.layer_inputs(*array(2, 2, 1, 42 * 256), array(256), whole)
        part = PerLayerInput(3, "", "", "", 256, "gelu_tanh")
        decode.gate_input(array(2, 1, 256), inputs, part)
    codes = {}
    for launch in found:
        codes.setdefault(launch.kernel.__name__, []).append(machine_code(launch, capability))
    return codes


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("heads, dtype, bits", BUDGET, ids=str)
def test_wide_heads_keep_their_registers(heads, dtype, bits, capability, compile_call):
    codes = compile_call(layer_code, heads, dtype, bits, capability)
    for name, parts in codes.items():
        for part in parts:
            assert part.stack == part.local == 0 and part.shared <= SHARED, name
    (code,) = codes["_attend_codes" if bits else "_attend"]
    assert len(code.loop) <= BUDGET[heads, dtype, bits] and code.wide


def shared_code() -> list[bool]:
    """Whether layers of one shape share machine code."""
    from backends.launches import compile_launch
    from cuda_fallback.kernels import decode

    state = torch.empty((16, MAX_ROWS), dtype=torch.int64, device=META)
    places, found = key_places([(16, 256), (16, 256), (4, 512), (16, 256)]), []
    for place in (places[0], places[1], places[3]):
        with recorded() as launches:
            heads = torch.empty((1, 1, 64 * 256), dtype=torch.bfloat16, device=META)
            query = decode.store_rotated(state, place, heads, 32, 16, 256, bits=8)
            decode.attend(state, place, query, 16, None, 1.0, 8)
        found.append([compile_launch(launch, 90) for launch in launches])
    return [part is first for codes in found for part, first in zip(codes, found[0])]


@pytest.mark.slow
def test_layers_share_machine_code(compile_call):
    assert all(compile_call(shared_code))
