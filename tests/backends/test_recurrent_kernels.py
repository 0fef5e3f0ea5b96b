"""Layers with a recurrent state by Triton's kernels: alone, in captured steps, and their machine
code.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from backends.conftest import relative_error, same_state
from mlx_llama.core.models.parts import GatedDelta, ShortConv
from mlx_llama.core.ops import DeltaWeights
from mlx_llama.core.options import resolve

torch = pytest.importorskip("torch")

from cases.captured import loaded
from cases.recurrent import conv, delta, make_hybrid

from backends.launches import META, compile_launch, machine_code, recorded
from backends.triton_process import (
    DEVICE,
    call,  # noqa: F401
    compile_call,  # noqa: F401
    computing,
)
from cuda_fallback import ops, runtime
from cuda_fallback.arrays import SamplingBatch
from cuda_fallback.cache import Cache
from cuda_fallback.kernels.state import (
    AFTER,
    BEFORE,
    MAX_ROWS,
    POSITION,
    SLOT,
    STATES,
    StateView,
    new_state,
)
from cuda_fallback.kernels.storage import LiveStates, state_places
from cuda_fallback.model import Llama


def made(*shape: int, dtype=torch.float32, seed: int = 0):
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return torch.from_numpy(numbers).to(DEVICE, dtype)


# The kernels


class States:
    """Rows' states of one mixer, and the two forms in which kernels see tokens of them."""

    def __init__(self, spec, rows: int):
        self.config = type("Config", (), {"recurrent": (spec,)})
        (self.place,) = state_places(self.config)
        self.rows = [LiveStates(self.config, DEVICE) for _ in range(rows)]
        for row in self.rows:
            row.numbers.fill_(float("nan"))  # a sequence begins with zeros whatever is there
        self.lengths = [0] * rows

    def _describe(self, tokens: list[tuple[int, int, int]]):
        """A state of rows, each (sequence, tokens before, tokens after)."""
        state = new_state()
        for i, (row, before, after) in enumerate(tokens):
            live = self.rows[row]
            state[[STATES, SLOT], i] = live.numbers.data_ptr(), live.slot
            state[[POSITION, BEFORE, AFTER], i] = self.lengths[row] + before, before, after
        return torch.from_numpy(state).to(DEVICE)

    def _advance(self, chosen: list[int], count: int) -> None:
        for row in chosen:
            self.rows[row].slot ^= 1
            self.lengths[row] += count

    def prompt(self, kernel, x, chosen: list[int], *weights):
        """kernel(x [B, T, ..]) for the chosen sequences."""
        out = kernel(self._describe([(row, 0, 0) for row in chosen]), self.place, x, *weights)
        self._advance(chosen, x.shape[1])
        return out

    def tokens(self, kernel, x, chosen: list[int], *weights):
        """The same, with each token as a row, and two rows of padding."""
        B, T = x.shape[:2]
        rows = [(row, t, T - 1 - t) for row in chosen for t in range(T)]
        padded = torch.cat([x.reshape(B * T, 1, -1), made(2, 1, x.shape[-1], dtype=x.dtype)])
        out = kernel(self._describe(rows), self.place, padded, *weights)
        assert torch.isfinite(out).all()
        self._advance(chosen, T)
        return out[: B * T].reshape(B, T, -1)


class PlainView:
    def __init__(self, spec, batch: int):
        self.states = tuple(torch.zeros((batch, *shape), device=DEVICE) for shape in spec.states)

    def recurrent(self, slot: int):
        return self.states

    def keep(self, slot: int, states) -> None:
        self.states = states


def checked(kernel, word, spec, x, *weights) -> float:
    """Largest error of a kernel's results and states, relative to the largest value of torch's own
    operations in float32; raises unless a sequence has the same bits in any chunks and company.
    kernel, word: (x, view or state .., *weights) of two sequences [2, T, ..].
    """
    T, view = x.shape[1], PlainView(spec, 2)
    with computing(by_kernels=False):
        wanted = word(x.float(), view, spec, *_widened(weights))
    whole = States(spec, 2)
    out = whole.prompt(kernel, x, [0, 1], *weights)
    assert out.dtype == x.dtype and out.shape == wanted.shape
    cut, alone = States(spec, 2), States(spec, 1)
    for start, end in itertools.pairwise((0, 1, 3, T)):
        part = cut.tokens if end - start == 2 else cut.prompt
        got = part(kernel, x[[1, 0], start:end], [1, 0], *weights)
        assert torch.equal(got, out[[1, 0], start:end]), (start, end)
    for start, end in itertools.pairwise((0, 2, T)):
        got = alone.tokens(kernel, x[:1, start:end], [0], *weights)
        assert torch.equal(got, out[:1, start:end]), (start, end)
    errors = [worst(out, wanted)]
    for row in range(2):
        for part, states in zip(_slot(whole, row), view.states):
            errors.append(worst(part, states[row]))
        assert all(map(torch.equal, _slot(whole, row), _slot(cut, row)))
    assert all(map(torch.equal, _slot(whole, 0), _slot(alone, 0)))
    return max(errors)


def _slot(states: States, row: int):
    return states.rows[row].slots[states.rows[row].slot][0]


def _widened(weights: tuple):
    return [
        DeltaWeights(*(part.float() for part in weight))
        if isinstance(weight, DeltaWeights)
        else weight
        if weight is None
        else weight.float()
        for weight in weights
        if not isinstance(weight, GatedDelta)
    ]


def worst(got, wanted) -> float:
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


def delta_weights(spec, dtype):
    return DeltaWeights(
        conv=made(spec.channels, spec.width, dtype=dtype, seed=1),
        rate=-made(spec.value_heads, seed=2).exp(),
        bias=made(spec.value_heads, seed=3) * 3 - 3,
        norm=made(spec.value_size, dtype=dtype, seed=4),
    )


def delta_error(sizes: tuple[int, ...], dtype, tiled: bool = False) -> float:
    from cuda_fallback.kernels import decode

    spec = dataclasses.replace(delta(*sizes), tiled=tiled)
    width = spec.channels + spec.value_heads * (spec.value_size + 2)
    x, weights = made(2, 4, width, dtype=dtype), delta_weights(spec, dtype)
    return checked(decode.gated_delta, ops.gated_delta, spec, x, spec, weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 2e-6), (torch.float16, 2e-3)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("sizes", [(1, 1, 5, 3), (2, 4, 8, 11, 2)], ids=str)
def test_gated_delta_is_that_of_plain_words(sizes, dtype, bound, call):
    assert call(delta_error, sizes, dtype) < bound


@pytest.mark.slow
def test_neighbours_of_a_value_head_may_have_other_key_heads(call):
    assert call(delta_error, (2, 6, 5, 3, 2), torch.float32, True) < 2e-6


def conv_error(size: int, width: int, has_bias: bool, dtype) -> float:
    from cuda_fallback.kernels import decode

    spec = conv(size, width)
    weight, bias = made(size, width, dtype=dtype, seed=1), made(size, dtype=dtype, seed=2)
    x = made(2, 4, 3 * size, dtype=dtype)
    return checked(decode.short_conv, ops.short_conv, spec, x, weight, bias if has_bias else None)


@pytest.mark.slow_for("*float16", "300")
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 1e-6), (torch.float16, 2e-3)], ids=["float32", "float16"]
)
@pytest.mark.parametrize("size, width, has_bias", [(7, 3, True), (300, 4, False)])
def test_short_conv_is_that_of_plain_words(size, width, has_bias, dtype, bound, call):
    assert call(conv_error, size, width, has_bias, dtype) < bound


def by_kernels(x: np.ndarray, spec, weights: list[np.ndarray]) -> np.ndarray:
    """A mixer's results for x [B, T, ..] before its last product, by kernels in two chunks."""
    from cuda_fallback.kernels import decode

    states, rows = States(spec, len(x)), list(range(len(x)))
    kernel, arguments = decode.short_conv, [torch.from_numpy(part).to(DEVICE) for part in weights]
    if isinstance(spec, GatedDelta):
        kernel, arguments = decode.gated_delta, [spec, DeltaWeights(*arguments)]
    parts = torch.from_numpy(x).to(DEVICE).split(4, 1)
    outs = [states.prompt(kernel, part, rows, *arguments) for part in parts]
    return torch.cat(outs, dim=1).cpu().numpy()


def randomise(module) -> dict:
    """Random parameters; returns them by name."""
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            numbers = 0.3 * torch.randn(parameter.shape, generator=made)
            parameter.copy_(numbers + ("norm" in name))
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


@pytest.mark.slow
def test_gated_delta_is_that_of_transformers(call):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    spec, sizes = delta(1, 3, 6, 10), dict(num_key_heads=1, num_value_heads=3)
    sizes |= dict(key_head_dim=6, value_head_dim=10, conv_kernel_dim=4)
    config = modeling.Qwen3_5TextConfig(
        hidden_size=36, **{f"linear_{name}": size for name, size in sizes.items()}
    )
    judge = modeling.Qwen3_5GatedDeltaNet(config, 0).float()
    named, x = randomise(judge), torch.randn((2, 7, 36), generator=torch.Generator().manual_seed(1))
    into = torch.cat([named[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")])
    parts = named["conv1d.weight"][:, 0], -named["A_log"].exp(), named["dt_bias"]
    weights = [part.numpy() for part in (*parts, named["norm.weight"])]
    spec = dataclasses.replace(spec, eps=config.rms_norm_eps)
    got = call(by_kernels, (x @ into.T).numpy(), spec, weights) @ named["out_proj.weight"].numpy().T
    assert relative_error(got, judge(x).detach().numpy()) < 2e-6


@pytest.mark.slow
def test_short_conv_is_that_of_transformers(call):
    modeling = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    config = modeling.Lfm2Config(hidden_size=20, conv_bias=True, conv_L_cache=3)
    judge = modeling.Lfm2ShortConv(config, 0).float()
    named, x = randomise(judge), torch.randn((2, 7, 20), generator=torch.Generator().manual_seed(1))
    weights = [named["conv.weight"][:, 0].numpy(), named["conv.bias"].numpy()]
    inputs = x @ named["in_proj.weight"].T + named["in_proj.bias"]
    got = call(by_kernels, inputs.numpy(), conv(20), weights) @ named["out_proj.weight"].numpy().T
    wanted = judge(x).detach().numpy()
    assert relative_error(got + named["out_proj.bias"].numpy(), wanted) < 2e-6


# Models


def sampler(*seeds: int):
    return SamplingBatch([resolve(dict(temperature=1.0, seed=s)).options for s in seeds], DEVICE)


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 60, count).tolist()


def life_of_states() -> list[tuple]:
    """Tokens and states by kernels, replayed, and by torch's own operations, while a cache is cut,
    copied, saved and restored.
    """
    runs, checkpoint = [], make_hybrid()
    for by_kernels in (True, False):
        model, draw, tokens = loaded(checkpoint, by_kernels=by_kernels), sampler(1), []
        cache = model.make_cache(300, rows=3)

        def go(count: int, token, row: int = 0) -> None:
            for _ in range(count):
                token = model.step(token, cache.lengths[row], cache, draw, rows=[row])
                tokens.append(token.item())

        with computing(by_kernels):
            go(4, [ids(5)])
            cuts = [cache.trim(7)]
            go(3, [[9]])
            cuts += [cache.copy_prefix(0, 1, cache.length), cache.copy_prefix(0, 2, 6)]
            go(2, [[4]])  # does not change the copy
            go(2, [[4]], row=1)
            model.forward([[4, 5, 6]], cache.lengths[1], cache, rows=[1])  # a prompt after steps
            model.forward([[7], [8]], cache.lengths[:2], cache)
            go(2, [[5]], row=1)
            cuts.append(cache.trim(cache.lengths[1] - 3, 1))
            go(2, [[5]], row=1)
            state = cache.state(1)
            cache.reset(0)
            cache.restore(state)
            go(3, [[8]])
            verified = model.verify([[8, 11, 12]], cache.length, cache, draw)[0].tolist()
            cuts.append(cache.trim(cache.length - 1))
            go(2, [[5]])
        if by_kernels:
            check_memory(cache)
        runs.append((tokens + verified, cuts, [cache.state(row) for row in range(3)]))
    return runs


def check_memory(cache) -> None:
    """Compare the counted bytes with those of the tensors."""
    every = [*cache.state_arrays(), *(row.numbers for row in cache.live if row)]
    every += [
        part
        for kept in cache.checkpoints
        for states in kept.values()
        for parts in states
        for part in parts
    ]
    sizes = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in every}
    keys = sum(array.nbytes for row in cache.row_storage for array in row.arrays())
    rows = sum(map(cache.taken, range(cache.rows)))
    places = state_places(cache.config)
    share = cache.state_nbytes / (4 * places[0][-1])  # parts of states stand at multiples of 16
    assert cache.nbytes == keys + round(sum(sizes.values()) * share) <= rows + 4 * 3 * 256


@pytest.mark.slow
def test_states_by_kernels_are_cut_copied_and_restored_as_others(call):
    (tokens, cuts, states), (wanted, others, judges) = call(life_of_states)
    assert (tokens, cuts) == (wanted, others) and cuts == [5, 8, 5, 13, 18]
    for state, judge in zip(states, judges):
        assert state.keys() == judge.keys() and "recurrent" in state
        for part in state:
            assert relative_error(state[part], judge[part]) < 1e-5, part


def bits_of_rows() -> None:
    """Compare the bits of each position: decoded in a cache of its own, in chunks of prompts beside
    other rows, after calls that failed.
    """
    from cuda_fallback.kernels import cuda_graph

    model, text = loaded(make_hybrid(), compile=False, batch_invariant=True), ids(11)
    with computing(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "MAX_ROWS", 4)  # six positions take two steps
        single = model.make_cache(30)
        alone = [model.forward([[token]], single.length, single) for token in text]
        cache, draw = model.make_cache(30, rows=3), sampler(1)

        def read(rows: list[int], count: int) -> None:
            starts = [cache.lengths[row] for row in rows]
            chunks = [text[start : start + count] for start in starts]
            logits = model.forward(chunks, starts, cache, rows=rows, all_positions=True)
            for start, row in zip(starts, logits):
                assert torch.equal(row, torch.cat(alone[start : start + count])), (start, rows)

        def fail(before: int) -> None:
            """Fail at the end of the call after `before` steps of four rows."""
            kept, state, steps = list(cache.lengths), cache.state(1), []

            def point(*arguments) -> None:
                steps.append(1)
                if len(steps) > before:
                    raise KeyboardInterrupt
                original(*arguments)

            original = StateView.point
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(StateView, "point", point)
                read([1], 6)
            assert cache.lengths == kept and same_state(cache.state(1), state)

        fail(1)  # of an empty row
        read([1], 2)
        fail(1)
        read([1, 2], 1)
        read([2], 2)
        with pytest.raises(KeyboardInterrupt):
            model.step([[5]], 3, cache, draw, rows=[1], masks=Mock(side_effect=KeyboardInterrupt))
        read([2, 1, 0], 1)
        fail(1)
        read([1], 6)
        cache.trim(4, 1)  # to where that prompt began
        read([1, 2], 3)
        for row in (1, 2):
            single.trim(0)
            model.forward([text[: cache.lengths[row]]], 0, single)
            assert same_state(cache.state(row), single.state())


@pytest.mark.slow
def test_states_have_the_same_bits_in_any_chunks_and_company(call):
    call(bits_of_rows)


def many_rows() -> float:
    """Error of a prompt of more rows than a state has."""
    config, outs = make_hybrid().config, []
    x, weight = made(MAX_ROWS + 1, 2, 108), made(36, 3, seed=1)
    tokens = torch.zeros(x.shape[:2], dtype=torch.int32, device=DEVICE)
    for by_kernels in (True, False):
        with computing(by_kernels), torch.inference_mode():
            cache = Cache(config, 4, torch.float32, DEVICE, len(x))
            nbytes = cache.nbytes_for(1) - 4 * cache.position_nbytes
            assert nbytes == 3 * cache.state_nbytes  # its own, the next, and a checkpoint
            with cache.view(tokens, 0) as view:
                outs.append(ops.short_conv(x, view, config.recurrent[1], weight))
                view.keep(0, view.recurrent(0))
    return worst(*outs)


@pytest.mark.slow
def test_a_prompt_of_many_rows(call):
    assert call(many_rows) < 1e-6


def probes_of_a_step(by_kernels: bool) -> dict[str, np.ndarray]:
    model, seen = loaded(make_hybrid(), compile=False, by_kernels=by_kernels), {}
    with computing(by_kernels):
        cache = model.make_cache(9)
        model.forward([ids(5)], 0, cache)
        note = lambda name, array: seen.__setitem__(name, runtime.to_numpy(array))  # noqa: E731
        model.forward([[7]], 5, cache, probe=note)
    return seen


@pytest.mark.slow
def test_states_are_probed_after_a_step(call):
    seen, wanted = (call(probes_of_a_step, by_kernels) for by_kernels in (True, False))
    assert seen.keys() == wanted.keys() >= {"0.state", "1.state"}
    for name, array in wanted.items():
        assert relative_error(seen[name], array) < 1e-5, name


def logits_by_kernels(folder: Path, tokens: list[int]) -> np.ndarray:
    """Logits after each token, half of them read as a prompt, float32 [T, V]."""
    model, half = loaded(folder, dtype="float32"), len(tokens) // 2
    with computing(True):
        cache = model.make_cache(len(tokens))
        logits = [*model.forward([tokens[:half]], 0, cache, all_positions=True)[0]]
        for token in tokens[half:]:
            logits.append(model.forward([[token]], cache.length, cache)[0])
    return torch.stack(logits).float().cpu().numpy()


FAMILIES = {
    "lfm2": dict(conv_bias=True, layer_types=["conv", "full_attention", "conv"]),
    "qwen3_5_text": dict(
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=24,
        linear_num_key_heads=1,
        linear_num_value_heads=3,
        linear_key_head_dim=6,
        linear_value_head_dim=10,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_families_are_those_of_transformers(kind, call, tmp_path):
    transformers = pytest.importorskip("transformers")
    fields = dict(vocab_size=67, hidden_size=36, intermediate_size=48, num_hidden_layers=3)
    fields |= dict(num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=64)
    config = transformers.AutoConfig.for_model(kind, **fields, **FAMILIES[kind])
    judge, tokens = transformers.AutoModelForCausalLM.from_config(config).eval(), ids(8)
    randomise(judge)
    judge.save_pretrained(tmp_path)
    wanted = judge(torch.tensor([tokens])).logits[0].detach().numpy()
    assert relative_error(call(logits_by_kernels, tmp_path, tokens), wanted) < 1e-5


# The compiler


def launched(spec, rows: int, T: int, dtype, slot: int = 0) -> list:
    """Launches of a mixer's kernels for T tokens of each row."""
    from cuda_fallback.kernels import decode

    def made(*shape: int, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device=META)

    config = type("Config", (), {"recurrent": (conv(33), spec, spec)[slot:]})
    state, place = made(16, MAX_ROWS, dtype=torch.int64), state_places(config)[1]
    with recorded() as launches:
        if isinstance(spec, ShortConv):
            x, weight = made(rows, T, 3 * spec.size), made(spec.size, spec.width)
            decode.short_conv(state, place, x, weight, None)
        else:
            heads = spec.value_heads
            x = made(rows, T, spec.channels + heads * (spec.value_size + 2))
            numbers, norm = made(heads, dtype=torch.float32), made(spec.value_size)
            weights = DeltaWeights(made(spec.channels, spec.width), numbers, numbers, norm)
            decode.gated_delta(state, place, x, spec, weights)
    return launches


def codes(spec, dtype: str, capability: int) -> dict:
    launches = launched(spec, 1, 1, getattr(torch, dtype))
    return {launch.kernel.__name__: machine_code(launch, capability) for launch in launches}


# registers of a thread of the recurrence, and instructions of a position
BUDGETS = {(16, 32, 128, 128): (128, 320), (4, 4, 256, 256): (224, 470)}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("sizes", BUDGETS, ids=str)
def test_the_recurrence_keeps_its_registers_and_waits_for_no_load(sizes, capability, compile_call):
    code = compile_call(codes, delta(*sizes), "bfloat16", capability)
    for name, part in code.items():
        print(f"{name} {sizes} {capability}: {part.registers} registers, {part.length} in all")
        assert part.stack == part.local == 0 and part.shared <= 1024, name
        assert part.wide and (part.registers <= 64 or name == "_delta"), name
    part, (registers, length) = code["_delta"], BUDGETS[sizes]
    assert part.registers <= registers and len(part.loop) <= length
    # a position's numbers are loaded 16 bytes at a time, and those of the next one
    assert sum(line.startswith("LDG.E.128") for line in part.loop) == sizes[2] * 2 // 128 + 3
    assert not any(line.startswith("R2UR") for line in part.loop)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_convolutions_keep_their_registers(capability, compile_call):
    (part,) = compile_call(codes, conv(2048), "bfloat16", capability).values()
    assert part.stack == part.local == 0 and part.registers <= 64 and part.wide


def share_code() -> list[bool]:
    found = []
    for spec in (delta(2, 4, 16, 16), conv(64)):
        pairs = zip(
            launched(spec, 1, 1, torch.bfloat16), launched(spec, 3, 32, torch.bfloat16, slot=1)
        )
        found += [compile_launch(one, 90) is compile_launch(other, 90) for one, other in pairs]
    return found


@pytest.mark.slow
def test_prompts_share_machine_code_with_decoded_tokens(compile_call):
    """Another compilation might sum in another order."""
    assert compile_call(share_code) == [True] * 4


# torch's CPU device


def test_a_batch_of_prompts_that_fails_leaves_the_states(monkeypatch):
    """Rows are computed one by one: those before the one that fails, too."""
    with computing(by_kernels=False):
        model = Llama.load(make_hybrid(), device=torch.device("cpu"))
        cache = model.make_cache(30, rows=2)
        model.forward([ids(4), ids(4, seed=1)], 0, cache)
        states, logits = [cache.state(row) for row in range(2)], model._logits
        fails = Mock(
            side_effect=lambda tokens, at, *rest: (
                1 / 0 if rest[1] == [1] else logits(tokens, at, *rest)
            )
        )
        monkeypatch.setattr(model, "_logits", fails)
        with pytest.raises(ZeroDivisionError):
            model.step([[5, 6], [7, 8]], 4, cache, sampler(1, 2))
        assert fails.call_count == 2 and cache.lengths == [4, 4]
        assert [*cache.checkpoints[0]] == [4]
        assert all(same_state(cache.state(row), state) for row, state in enumerate(states))
