"""The torch backend's step by kernels: captured on a GPU if there is one, else recorded in Triton's
interpreter.

The interpreter must be chosen before triton is imported, so it runs in a process of its own (as in
test_triton.py).
"""

from __future__ import annotations

import dataclasses
import os.path
import re
import sys
import tempfile
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from making import add_family, config_checkpoint, config_fields, make_checkpoint
from making_gguf import LOW_BIT_MODEL, make_gguf

from backends.conftest import EVERYTHING, relative_error
from mlx_llama.core import options, rng
from mlx_llama.core.models.config import LlamaConfig, RopeConfig
from mlx_llama.core.models.layers import decoder
from mlx_llama.core.models.parts import Window
from mlx_llama.core.sample import arrange

torch = pytest.importorskip("torch")

from cases.captured import loaded
from torch.nn import functional as F

from backends.launches import META, compile_launch, recorded
from backends.triton_process import (
    DEVICE,
    HAS_GPU,
    call,  # noqa: F401
    compile_call,  # noqa: F401
    computing,
    fewer_programs,
)
from cuda_fallback import ops, runtime
from cuda_fallback.arrays import SamplingBatch, pack, unpack
from cuda_fallback.kernels import cuda_graph
from cuda_fallback.kernels.state import (
    MAX_ROWS,
    NEXT,
    POSITION,
    TOKEN,
    TOKENS,
    StateView,
    new_state,
    pack_row,
)
from cuda_fallback.kernels.storage import Storage, key_places, quantize

SAMPLING = {
    "greedy": dict(temperature=0),
    "noise": dict(temperature=1.0, seed=2**63 + 5),
    "everything": EVERYTHING,
}
MODELS = {
    "float32": dict(),
    "one layer": dict(num_hidden_layers=1, vocab_size=67, tokenizer=False),
    "float16": dict(dtype="float16"),
    "qwen3": dict(
        architectures=["Qwen3ForCausalLM"],
        head_dim=20,
        num_attention_heads=6,
        num_key_value_heads=2,
    ),
    "low-bit": {},
}


SHAPES = [(4, 4, 16), (6, 2, 20), (8, 1, 64)]  # heads, key heads, width of a head


# The kernels


def worst(errors, wanted) -> float:
    """Largest difference over the largest wanted value."""
    return float(
        (errors.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-9)
    )


def made(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(
        DEVICE, dtype
    )


def rms_normed(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rows_and_products(dtype) -> dict[str, float]:
    from cuda_fallback.kernels import decode

    def gated(both):
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up

    errors = {}
    for E in (7, 64, 1000):
        x, delta = made(3, E, dtype=dtype), made(3, E, dtype=dtype, seed=1)
        weight = made(E, dtype=dtype, seed=2)
        total, normed = decode.add_rms_norm(x, delta, weight, 1e-5)
        errors[f"sum {E}"] = worst(total, x + delta)
        errors[f"norm {E}"] = worst(normed, rms_normed((x + delta).double(), weight.double()))
        same, alone = decode.add_rms_norm(x, None, weight, 1e-5)
        assert same is x
        errors[f"norm alone {E}"] = worst(alone, rms_normed(x.double(), weight.double()))
    for N, K in ((1, 16), (7, 100), (34, 1024), (6, 2500)):
        x, weight = made(3, K, dtype=dtype), made(N, K, dtype=dtype, seed=1)
        bias = made(N, dtype=dtype, seed=2)
        errors[f"product {N} {K}"] = worst(
            decode.multiply(x, weight), F.linear(x.double(), weight.double())
        )
        errors[f"with bias {N} {K}"] = worst(
            decode.multiply(x, weight, bias), F.linear(x.double(), weight.double(), bias.double())
        )
        both = made(2 * N, K, dtype=dtype, seed=3) * 0.1
        wanted = gated(F.linear(x.double(), both.double(), made(2 * N, seed=4).double()))
        errors[f"gated {N} {K}"] = worst(
            decode.multiply_gated(x, both, made(2 * N, dtype=dtype, seed=4)), wanted
        )
        gate, up = F.linear(x.double(), both.double()).chunk(2, dim=-1)
        errors[f"gelu {N} {K}"] = worst(
            decode.multiply_gated(x, both, None, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up
        )
    for shape in ((1, 2, 6), (2, 3, 2600)):
        errors[f"gate {shape}"] = worst(
            decode.gate(made(*shape, dtype=dtype), "silu"), gated(made(*shape).to(dtype).double())
        )
    x, numbers = made(2, 3, 30, dtype=dtype), (0.8, 0.7, 0.5, -1e-6)
    errors["xielu"] = worst(decode.xielu(x, *numbers), ops.xielu(x.double(), *numbers))
    gate = made(2, 3, 30, dtype=dtype, seed=1)
    errors["gate of output"] = worst(
        decode.gate_output(x, gate), x.double() * gate.double().sigmoid()
    )
    x = made(2, 5, 3, 24, dtype=dtype).transpose(1, 2)
    table = made(5, 12, seed=1), made(5, 12, seed=2)
    with computing(by_kernels=False):
        errors["rotated"] = worst(decode.rotate(x, *table), ops.rope(x.float(), table))
    for H, G, D in SHAPES:
        heads = made(2, 3, (H + 2 * G) * D, dtype=dtype)
        query, key = made(D, dtype=dtype, seed=1), made(D, dtype=dtype, seed=2)
        parts = heads.double().unflatten(-1, (H + 2 * G, D))
        wanted = torch.cat(
            [
                rms_normed(parts[:, :, :H], query.double()),
                rms_normed(parts[:, :, H : H + G], key.double()),
                parts[:, :, H + G :],
            ],
            dim=2,
        )
        errors[f"heads {D}"] = worst(
            decode.norm_heads(heads, query, key, H, G, D, 1e-5), wanted.flatten(2)
        )
    return errors


@pytest.mark.slow_for("float16")
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float32, 2e-6), (torch.float16, 2e-3)], ids=["float32", "float16"]
)
def test_norms_products_gates_and_rotations(dtype, bound, call):
    errors = call(rows_and_products, dtype)
    assert len(errors) == 33 and max(errors.values()) < bound, errors


def device_state(*rows: tuple):
    """A state of rows, each (position, storage, tables) and perhaps the token."""
    state = new_state()
    for i, row in enumerate(rows):
        pack_row(state, i, *row)
    return torch.from_numpy(state).to(DEVICE)


def attended(dtype, H: int, G: int, D: int, bits: int | None) -> list[tuple[str, float]]:
    """Errors of stored rows and of attention over them, at positions at the ends of blocks and
    pieces. bits: 8 for codes.
    """
    from cuda_fallback.kernels import decode

    room, errors, place = 320, [], key_places(((G, D),) * 2)[1]
    tables = cosines, sines = tuple(made(2, room, D // 2))
    heads = made(2, 1, (H + 2 * G) * D, dtype=dtype, seed=3)
    if bits:
        heads[0, :, (H + G) * D :] = 0  # values without a scale
    splits = heads.view(2, 1, H + 2 * G, D).transpose(1, 2)
    pairs = [((0, 1), None), ((63, 64), None), ((300, 20), Window(100))]
    if D == 16:
        fewer_programs()
        pairs += [((255, 256), None), ((100, 99), Window(100))]
        pairs += [((100, 99), Window(100, is_chunk=True)), ((307, 20), Window(7, is_chunk=True))]
    for positions, window in pairs:
        tokens = torch.zeros(room + 1, dtype=torch.int32, device=DEVICE)
        numbers = [made(2, 2, G, room, D, dtype=dtype, seed=4 + i) for i in range(2)]
        stored = [quantize(part) if bits else (part, None) for part in numbers]
        rows = [
            Storage(tokens, part.contiguous(), scales, ((G, D),) * 2) for part, scales in stored
        ]
        state = device_state(*((position, row, tables) for position, row in zip(positions, rows)))
        before = [row.numbers.clone() for row in rows]
        queries = decode.store_rotated(state, place, heads, H, G, D, bits=bits)
        outs = decode.attend(state, place, queries, G, window, D**-0.5, bits)
        assert outs.shape == (2, 1, H * D)
        keys = decode.read_keys(state, place, 2, G, D, dtype, bits)
        for i, (position, row) in enumerate(zip(positions, rows)):
            split, query, here = splits[i], queries[i], slice(position, position + 1)
            with computing(by_kernels=False):
                turned = ops.rope(split[None, : H + G].float(), (cosines[here], sines[here]))[0]
            errors.append(("query", worst(query, turned[:H])))
            new = row.numbers[1, :, :, here]  # [2, G, 1, D]
            if bits:
                codes, scales = quantize(torch.stack([turned[H:].to(dtype), split[H + G :]]))
                # Sums of two products may round otherwise, and so a code at the edge between two.
                assert (new.int() - codes.int()).abs().max() <= 1
                assert (new != codes).float().mean() < 0.02
                assert worst(row.scales[1, :, :, here], scales) < 2e-3
            else:
                errors.append(("key", worst(new[0], turned[H:])))
                assert torch.equal(new[1], split[H + G :])
            assert torch.equal(keys[i], row.read(1, 0, position, position + 1, dtype))
            now = row.numbers.clone()
            now[1, :, :, position] = before[i][1, :, :, position]
            assert torch.equal(now, before[i])  # all else is unchanged
            first = 0
            if window:
                first = max(position + 1 - window.size, 0)
                if window.is_chunk:
                    first = position - position % window.size
            both = [row.read(1, part, first, position + 1, torch.float64) for part in (0, 1)]
            seen = torch.stack(both)[:, None]
            wanted = ops.attention(query.double()[None], *seen, D**-0.5)
            name = f"attention {position} {window}"
            errors.append((name, worst(outs[i].view(1, H, 1, D), wanted)))
        as_it_is = decode.store_rotated(state, place, heads, H, G, D, rotates=False, bits=bits)
        for split, query, row, position in zip(splits, as_it_is, rows, positions):
            assert torch.equal(query, split[:H])
            key = row.read(1, 0, position, position + 1, dtype)
            assert worst(key, split[H : H + G]) <= (1e-2 if bits else 0)
    return errors


@pytest.mark.slow_for("*(4", "*(8")
@pytest.mark.parametrize(
    "dtype, bound, shape, bits, count",
    [
        (torch.float32, 3e-6, SHAPES[0], None, 42),
        (torch.float32, 3e-6, SHAPES[1], None, 18),
        (torch.float16, 3e-3, SHAPES[2], None, 18),
        (torch.float32, 3e-6, (2, 1, 20), 8, 12),
        (torch.float32, 3e-6, (2, 1, 80), 8, 12),
        (torch.float16, 3e-3, (4, 2, 64), 8, 12),
    ],
    ids=str,
)
def test_rows_are_stored_and_attended_to(dtype, bound, shape, bits, count, call):
    errors = call(attended, dtype, *shape, bits)
    assert len(errors) == count and max(error for _, error in errors) < bound, errors


NOISY = ((0, 0), (2**64 - 1, 5), (123456789012345, 2**31 - 2))  # seeds and positions


def noise_and_tokens() -> tuple:
    from cuda_fallback.kernels import decode

    batch = SamplingBatch(
        [
            options.resolve(dict(temperature=temperature, seed=seed)).options
            for temperature in (1.0, 0.0)
            for seed, _ in NOISY
        ],
        DEVICE,
    )
    arrays = arrange(batch.features, batch.options)
    values = unpack(arrays, torch.from_numpy(pack(arrays, MAX_ROWS)).to(DEVICE))
    positions = torch.tensor([position + 1 for _, position in NOISY] * 2, device=DEVICE)
    scores = torch.zeros((6, 3000), device=DEVICE)
    noise = decode.add_noise(scores, positions[:, None], values).cpu().numpy()
    table = made(1, 1)
    rows = [
        Storage(torch.arange(start, start + 99, dtype=torch.int32, device=DEVICE), table, None)
        for start in (100, 300)
    ]
    scratch = 0, Storage(table, table, None), (table, table)
    state = device_state((3, rows[0], (table, table), 7), scratch, (1, rows[1], (table, table), 8))
    state[TOKENS, 1] = 0  # pads the batch
    recent = [decode.recent(state, 3, window).tolist() for window in (2, 4, 7)]
    decode.note(state, 3)
    noted = [row.tokens[:5].tolist() for row in rows]
    decode.advance(state, torch.tensor([[55], [66], [77]], dtype=torch.int32, device=DEVICE))
    return (
        noise,
        recent,
        noted,
        state[[POSITION, NEXT, TOKEN], :3].tolist(),
        [row.tokens[:6].tolist() for row in rows],
    )


def test_noise_recent_tokens_and_the_next_position(call):
    noise, recent, noted, state, tokens = call(noise_and_tokens)
    for got, (seed, position) in zip(noise[:3], NOISY):
        np.testing.assert_array_equal(got, rng.gumbel(seed, position + 1, 3000))
    assert not noise[3:].any()  # greedy rows
    assert recent[1] == [[100, 101, 102, 103], [-1, -1, -1, -1], [-1, -1, 300, 301]]
    assert [part[0] for part in recent] == [
        [102, 103],
        [100, 101, 102, 103],
        [-1, -1, -1, 100, 101, 102, 103],
    ]
    assert noted == [[100, 101, 102, 7, 104], [300, 8, 302, 303, 304]]
    assert state == [[4, 0, 2], [5, 1, 3], [55, 0, 77]]
    assert tokens == [[100, 101, 102, 7, 55, 105], [300, 8, 77, 303, 304, 305]]


# The step


def checkpoint(name: str) -> Path:
    path = Path(tempfile.mkdtemp()) / name
    if name == "low-bit":
        path = path.with_suffix(".gguf")
        make_gguf(path, max_position_embeddings=2048, **LOW_BIT_MODEL)
        return path
    return make_checkpoint(path, max_position_embeddings=2048, **MODELS[name])


def sampler(settings: dict):
    return SamplingBatch([options.resolve(settings).options], DEVICE)


def decoded(
    llama, count: int, settings: dict, cache=None, prompt: int = 5
) -> tuple[list[int], dict]:
    """(tokens, the cache's state) of `count` steps after a prompt."""
    draw, cache = sampler(settings), cache or llama.make_cache(1000)
    token, tokens = np.arange(3, 3 + prompt, dtype=np.int32)[None] % 60, []
    with computing(by_kernels=llama.runner is not None):
        for _ in range(count):
            token = llama.step(token, cache.length, cache, draw)
            tokens.append(token.item())
    return tokens, cache.state()


def plain_and_replayed(path: Path, settings: dict, count: int) -> tuple:
    plain, replayed, forward = loaded(path, False), loaded(path), loaded(path, by_kernels=False)
    runs = [decoded(llama, count, settings) for llama in (plain, replayed, forward)]
    again = decoded(replayed, 3, settings)  # another cache, the same graph
    if not HAS_GPU:
        capture = replayed.runner.capture
        assert (capture.recorded, capture.replays) == (1, count - 2 + 2)
    assert all(step.is_captured for step in replayed.runner._steps.values())
    return *runs, again


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, case",
    [
        *((name, "noise") for name in ("float32", "float16", "low-bit")),
        ("float32", "everything"),
    ],
)
def test_replayed_steps_give_the_bits_of_plain_ones_and_the_numbers_of_forward(name, case, call):
    plain, replayed, forward, again = call(plain_and_replayed, checkpoint(name), SAMPLING[case], 4)
    assert (replayed[0], again[0]) == (plain[0], plain[0][:3])
    for part in plain[1]:
        np.testing.assert_array_equal(replayed[1][part], plain[1][part])
    exact = "float16" not in name and name != "low-bit"
    if exact:
        assert plain[0] == forward[0]
    same = 5 + len(os.path.commonprefix([plain[0][:-1], forward[0][:-1]]))
    assert same > 5
    bound = 1e-5 if exact else 2e-2 if name == "low-bit" else 5e-3  # bfloat16, float16
    for part in ("keys", "values"):
        got, wanted = (run[1][part][..., :same, :] for run in (plain, forward))
        assert relative_error(got, wanted) < bound


def shared_steps(path: Path) -> tuple:
    """Tokens of three conversations alone, then on one model in turn and on threads. They differ
    in seed, kind and capacity.
    """
    from cuda_fallback.kernels import packed

    requests = [
        (dict(temperature=0.9, seed=1), 5, 50),
        (dict(temperature=0.9, seed=2), 3, 900),
        (dict(temperature=0), 7, 16),
    ]
    launch, lock, turns, together = packed.run, threading.Lock(), [], [None] * 3

    def work(i: int) -> None:
        settings, prompt, capacity = requests[i]
        together[i] = decoded(llama, 3, settings, llama.make_cache(capacity), prompt)[0]

    def run_locked(*arguments, **named) -> None:
        with lock:
            launch(*arguments, **named)

    with computing(by_kernels=True), pytest.MonkeyPatch.context() as patch:  # until all threads end
        if not HAS_GPU:
            patch.setattr(packed, "run", run_locked)  # Triton's interpreter runs one grid at a time
        llama = loaded(path)
        alone = [decoded(llama, 3, settings, prompt=prompt)[0] for settings, prompt, _ in requests]
        assert len(llama.runner._steps) == 2  # seeds share a graph
        for settings, prompt, capacity in requests:
            tokens = np.arange(3, 3 + prompt, dtype=np.int32)[None] % 60
            turns.append([sampler(settings), llama.make_cache(capacity), tokens, []])
        for _ in range(3):
            for turn in turns:
                draw, cache, token, tokens = turn
                turn[2] = llama.step(token, cache.length, cache, draw)
                tokens.append(turn[2].item())
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return alone, [turn[3] for turn in turns], together


@pytest.mark.slow
def test_conversations_do_not_disturb_each_other(call):
    alone, turns, together = call(shared_steps, checkpoint("one layer"))
    assert turns == together == alone and alone[0] != alone[1]


def life_of_a_cache(path: Path) -> list[tuple]:
    """Tokens by kernels and by torch's own operations, while the cache grows, is trimmed, written,
    saved and filled.
    """
    states = []
    for by_kernels in (True, False):
        llama, draw, tokens = loaded(path, by_kernels=by_kernels), sampler(dict(temperature=0)), []
        cache = llama.make_cache(260)

        def go(count: int, token) -> None:
            for _ in range(count):
                token = llama.step(token, cache.length, cache, draw)
                tokens.append(token.item())

        with computing(by_kernels):
            # from 253 positions over 256, where storage grows
            go(5, np.arange(3, 256, dtype=np.int32)[None] % 60)
            cache.trim(250)
            go(2, np.array([[9]], np.int32))
            cache.trim(100)
            llama.forward(np.array([[4, 5, 6]], np.int32), 100, cache)
            go(3, torch.tensor([[7]], dtype=torch.int32, device=DEVICE))
            state = cache.state()
            cache.restore(state)
            go(2, [[8]])
            verified = llama.verify(
                np.array([[tokens[-1], 11, 12]], np.int32), cache.length, cache, draw
            )
            cache.trim(cache.length - 2)
            tokens += verified[0].tolist()
            go(2, verified[:, :1])
            cache.trim(20)
            llama.forward(np.arange(20, 257, dtype=np.int32)[None] % 60, 20, cache)
            go(3, np.array([[9]], np.int32))  # to the last position
            states.append((tokens, cache.length, cache.state()["tokens"].tolist()))
            with pytest.raises(Exception, match="do not fit the cache's capacity of 260"):
                go(1, np.array([[9]], np.int32))
    return states


@pytest.mark.slow
def test_growing_trimming_restoring_and_filling_a_cache(call):
    few, many = call(life_of_a_cache, checkpoint("one layer"))
    assert few == many and few[1] == 260


# Grammars and log-probabilities

ROWS = [
    dict(temperature=0, logprobs=2),
    dict(temperature=1.0, seed=5),
    dict(EVERYTHING, logprobs=3, dry_multiplier=1.0, post_sampling_probs=True),
]
PLAIN = [{name: value for name, value in item.items() if name != "logprobs"} for item in ROWS]


def allowed(step: int, V: int) -> np.ndarray:
    """Masks of three rows: a few tokens, any, half of them; penalties of DRY in the last."""
    words, rng = np.full((3, -(-V // 32)), -1, np.int32), np.random.default_rng(step)
    for row, share in ((0, 0.02), (2, 0.5)):
        bits = np.zeros(words.shape[1] * 32, np.uint8)
        bits[:V] = rng.random(V) < share
        bits[[3, V - 1]] = 1
        words[row] = np.packbits(bits, bitorder="little").view(np.int32)
    penalties = np.zeros((3, V), np.float32)
    penalties[2] = rng.random(V) * (rng.random(V) < 0.1)
    return np.concatenate([words, penalties.view(np.int32)], axis=1)


def masked_steps(path: Path, requests: list[dict], has_masks: bool, most_rows: int) -> dict:
    """Steps of three rows, replayed, beside forward and sampling apart. most_rows: of one step."""
    llama, judge = loaded(path), loaded(path, False)
    batch = SamplingBatch([options.resolve(settings).options for settings in requests], DEVICE)
    V, capture, facts = llama.config.vocab_size, llama.runner.capture, {"calls": [], "points": 0}
    pairs = []
    point = StateView.point

    def counted(self, *requests):
        facts["points"] += len(requests) == 4  # with sampling: a step's
        point(self, *requests)

    with computing(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "MAX_ROWS", most_rows)
        patch.setattr(StateView, "point", counted)
        caches = [llama.make_cache(40, rows=3), judge.make_cache(40, rows=3)]
        for model, cache in zip((llama, judge), caches):
            for row, prompt in enumerate(([3, 4, 5, 6], [7, 8], [9, 10, 11])):
                model.forward([prompt], 0, cache, rows=[row])
        tokens = np.array([[20], [21], [22]], np.int32)
        for step in range(5):

            def masks():
                facts["calls"].append((step, capture.replays if not HAS_GPU else 0))
                return allowed(step, V)

            lengths = list(caches[0].lengths)
            kept = np.asarray(tokens.cpu() if step else tokens).copy()
            if has_masks and step == 3:
                broken = Mock(side_effect=KeyboardInterrupt)
                with pytest.raises(KeyboardInterrupt):
                    llama.step(tokens, lengths, caches[0], batch, masks=broken)
                assert caches[0].lengths == lengths
            drawn = llama.step(
                tokens, lengths, caches[0], batch, masks=masks if has_masks else None
            )
            logits = judge.forward(kept, lengths, caches[1])
            wanted = batch(
                logits,
                [length + 1 for length in lengths],
                caches[1].recent(batch.window),
                (lambda: allowed(step, V)) if has_masks else None,
            )
            assert drawn.dtype == torch.int32
            pairs.append((drawn, wanted))
            tokens = drawn[:, :1]
    # later replays change no earlier result
    facts["same"] = [torch.equal(drawn, wanted) for drawn, wanted in pairs]
    facts["captures"] = [
        len(step.parts) for key, step in llama.runner._steps.items() if key[1] and step.is_captured
    ]
    return facts


@pytest.mark.slow
@pytest.mark.parametrize(
    "requests, has_masks, most_rows",
    [(PLAIN, True, 2), (ROWS, True, 32)],
    ids=["masks, in groups", "both"],
)
def test_masks_and_log_probabilities_in_replayed_steps(requests, has_masks, most_rows, call):
    """The same bits as from the logits and the sampling apart. Masks are asked for once a step,
    behind the forward.
    """
    facts = call(masked_steps, checkpoint("one layer"), requests, has_masks, most_rows)
    groups = 1 if most_rows == 32 else 2
    assert facts["same"] == [True] * 5
    assert facts["captures"] == groups * [2 if has_masks else 1]
    # once, and again after the failure: a step that goes on needs nothing from the host but masks
    if groups == 1:
        assert facts["points"] == (2 if has_masks else 1)
    if has_masks:
        assert [step for step, _ in facts["calls"]] == list(range(5))
    # one graph of each replayed step runs before, and one after
    if has_masks and groups == 1 and not HAS_GPU:
        assert [replays for _, replays in facts["calls"]] == [0, 1, 3, 6, 8]


REFUSAL = "CUDA error: operation not permitted when stream is capturing"


def failing(path: Path) -> tuple:
    plain = decoded(loaded(path, False), 6, SAMPLING["noise"])[0]
    llama = loaded(path)
    llama.runner.capture = Mock(side_effect=RuntimeError(f"{REFUSAL}\nmore lines"))
    before = llama.notices
    return plain, decoded(llama, 6, SAMPLING["noise"])[0], before, llama.notices


@pytest.mark.slow
def test_a_capture_that_fails_leaves_plain_steps_and_a_notice(call):
    plain, tokens, before, notices = call(failing, checkpoint("one layer"))
    assert tokens == plain and before == ()
    assert notices == (f"decoding is not captured: {REFUSAL}",)


# One forward


def inside(path: Path, by_kernels: bool) -> tuple[dict, dict]:
    """Every probe of one decoded token after a prompt, as arrays, and the cache's state."""

    def fail(name, array):
        if name == "1.query_rope":
            raise ZeroDivisionError

    llama, seen = loaded(path, False, by_kernels=by_kernels), {}
    cache = llama.make_cache(300)
    with computing(by_kernels):
        llama.forward(np.arange(3, 12)[None], 0, cache)
        with pytest.raises(ZeroDivisionError):  # the cache is unchanged
            llama.forward([[8]], 9, cache, probe=fail)
        note = lambda name, array: seen.__setitem__(name, runtime.to_numpy(array))  # noqa: E731
        logits = llama.forward([[7]], 9, cache, probe=note)
    assert logits.shape == (1, llama.config.vocab_size) and cache.length == 10
    return seen, cache.state()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "qwen3"])
def test_probes_of_a_step_by_kernels_are_those_of_forward(name, call):
    (seen, state), (wanted, plain) = (
        call(inside, checkpoint(name), by_kernels) for by_kernels in (True, False)
    )
    assert list(seen) == list(wanted) and len(seen) == 1 + 2 * 10 + 2
    for probe, array in wanted.items():
        assert relative_error(seen[probe], array) < 1e-5, probe
    np.testing.assert_array_equal(state["keys"][1, :, 9:], seen["1.key_rope"][0])
    assert relative_error(state["keys"], plain["keys"]) < 1e-5
    assert relative_error(state["values"], plain["values"]) < 1e-5


SLIDING, FULL = "sliding_attention", "full_attention"
TURNED = dict(
    rope=RopeConfig(dim=10),
    local_rope=RopeConfig(theta=50.0, dim=10),
    sliding_window=4,
    layer_types=(SLIDING, FULL),
)
LLAMA_4 = dict(no_rope_layers=[1, 0], temperature_scale=0.0, temperature_floor=3, expert_step=9)
ODD = {  # fields of LlamaConfig; "family": changes to Llama's
    "multipliers, a layer without rotation, norms after rotation": dict(
        embedding_multiplier=3.0,
        logits_multiplier=0.5,
        family=dict(
            query_key_norm="rotated",
            layers=decoder(
                lambda config, i: {"scale": 0.2, "rotates": i != 1},
                adds=lambda config, i: {"residual_multiplier": 0.4},
            ),
        ),
    ),
    "norms before and after, gelu": dict(
        family=dict(norm_placement="both", query_key_norm="head"),
        activation="gelu_tanh",
    ),
    "norms after": dict(family=dict(norm_placement="after", query_key_norm="whole")),
    "softcaps, partial rotation, a rope of windows": dict(
        family=dict(layers=decoder(lambda config, i: {"softcap": 1.5})),
        logits_softcap=2.0,
        norm_offset=0.5,
        **TURNED,
    ),
    "partial rotation, codes of 8 bits": TURNED | dict(cache_bits=8),
    "chunks, norms without weights, scaled queries of layers without rotation": dict(
        architecture="Llama4ForCausalLM",
        sliding_window=4,
        layer_types=("chunked_attention", FULL),
        own=LLAMA_4 | dict(query_key_norm="without weights", temperature_scale=0.7),
    ),
    "experts with scaled inputs and a shared one": dict(
        architecture="Llama4ForCausalLM",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        own=LLAMA_4 | dict(query_key_norm=None, no_rope_layers=[1, 1], expert_step=2),
    ),
    "sinks, experts with biases": dict(
        architecture="GptOssForCausalLM",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="clamped_swiglu",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        sliding_window=4,
        layer_types=(SLIDING, FULL),
    ),
    "scaled queries": dict(
        architecture="Ministral3ForCausalLM",
        rope=RopeConfig(original_max_position_embeddings=3),
        own=dict(query_beta=0.7),
    ),
    "xielu, norms of heads": dict(architecture="ApertusForCausalLM", activation="xielu"),
    "a layer without attention, another without an MLP": dict(
        architecture="DeciLMForCausalLM",
        num_hidden_layers=3,
        layer_types=(FULL,) * 3,
        own=dict(layer_sizes=((2, 96), (0, 64), (2, 0))),
    ),
}


def by_each_path(name: str) -> list[tuple]:
    """(tokens, the cache's state) of steps, replayed and by torch's own operations, of a model of
    ODD.
    """
    fields = dict(ODD[name])
    bits, family = fields.pop("cache_bits", None), fields.pop("family", None)
    if family:
        fields["architecture"] = add_family(**family)
    config = dataclasses.replace(LlamaConfig.from_dict(config_fields()), **fields)
    rng, runs = np.random.default_rng(0), []
    tensors = {
        name: (0.1 * rng.standard_normal(shape) + ("norm" in name)).astype(np.float32)
        for name, shape in config.tensor_shapes().items()
    }
    odd = config_checkpoint(config, Path(tempfile.mkdtemp()), tensors)
    for by_kernels in (True, False):
        llama = loaded(odd, dtype="float32", by_kernels=by_kernels, cache_bits=bits)
        runs.append(decoded(llama, 5, SAMPLING["noise"]))
        assert not by_kernels or all(step.is_captured for step in llama.runner._steps.values())
    return runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_differences_of_other_families_are_in_the_replayed_step(name, call):
    (tokens, replayed), (wanted, forward) = call(by_each_path, name)
    assert tokens == wanted
    for part in ("keys", "values"):
        assert relative_error(replayed[part], forward[part]) < 1e-5


LAYER = (
    "_add_rms_norm _multiply _store_rotated _attend _join _multiply _add_rms_norm _multiply "
    "_multiply"
).split()
END = ["_add_rms_norm", "_multiply"]


def launches(path: Path, settings: dict) -> list[str]:
    llama = loaded(path)
    decoded(llama, 3, settings)
    return llama.runner.capture.launched


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="a CUDA graph does not tell")
@pytest.mark.parametrize(
    "name, case, wanted",
    [
        ("float32", "greedy", 2 * LAYER + END + ["_advance"]),
        ("float32", "everything", 2 * LAYER + END + ["_recent", "_add_noise", "_advance"]),
        ("qwen3", "greedy", 2 * [*LAYER[:2], "_norm_heads", *LAYER[2:]] + END + ["_advance"]),
    ],
)
def test_a_step_launches_no_more_kernels_than_it_needs(name, case, wanted, call):
    assert call(launches, checkpoint(name), SAMPLING[case]) == wanted


# The benchmark of kernels


def judged(examples: str) -> tuple[list[dict], list[dict], dict]:
    """(found, found with a wrong scale in attention, rates) of examples/benchmarks/gpu_kernels.py,
    at small sizes.
    """
    from cuda_fallback.kernels import attention, decode

    sys.path.insert(0, examples)
    import gpu_kernels

    with pytest.MonkeyPatch.context() as patch, computing(by_kernels=True):
        for name, small in dict(
            DEVICE=DEVICE.type,
            PRODUCTS={"out": (20, 48), "gate, up": (10, 40)},
            HEADS=(4, 2, 16),
            APART=0,
            LOW_BIT=(2, 256),
            LOW_BIT_KINDS=("Q4_K",),
            LOW_BIT_ROWS=(1, 8),
            POSITIONS=(0, 63, 70),
            ROOM=80,
            LENGTH=70,
            VOCABULARY=500,
            DELTA=(1, 2, 8, 12),
            CONV=(20, 3),
            PROMPT=3,
            BOUNDS={name: gpu_kernels.BOUNDS[name] for name in ("float32", "float16")},
        ).items():
            patch.setattr(gpu_kernels, name, small)
        if not HAS_GPU:
            patch.setattr(attention, "PIECES", 4)
            patch.setattr(attention, "PROGRAMS", 4)
            patch.setattr(
                gpu_kernels, "_seconds", lambda calls: [call() for call in calls] and 1e-3
            )
        right, rates = gpu_kernels.check(), gpu_kernels.rates()
        attend = decode.attend
        patch.setattr(decode, "attend", lambda *args: attend(*args[:-1], 1.2 * args[-1]))
        return right, gpu_kernels.check(), rates


@pytest.mark.slow
def test_the_measuring_command_sees_right_and_wrong_kernels(call):
    examples = Path(__file__).resolve().parents[2] / "examples/benchmarks"
    right, wrong, rates = call(judged, str(examples))
    assert len(right) == 2 * (2 + 3 * 2 + 3 + 3 + 6 + 4) + 1
    assert all(check["ok"] for check in right), right
    bad = [check["name"] for check in wrong if not check["ok"]]
    # a single position hides the fault
    assert bad and all(name.startswith("attention") for name in bad) and len(bad) == 8
    recurrent = {"gated delta", "short convolution"}
    assert rates.keys() == {"out", "gate, up", "Q4_K", "Q4_K, 8 rows", "attention"} | recurrent | {
        f"{name}, 3 positions" for name in recurrent
    }
    assert all(rate > 0 for check in rates.values() for rate in check.values())


# The compiler


SHARED = 101376  # bytes that the smallest GPUs of 8.0 and newer give a program


def compiled(dtype, capability: int) -> list[tuple[str, int, bool, bool]]:
    """(kernel, bytes of shared memory, True if registers spill, True if it loads 16 bytes at a
    time) of the kernels of decoded tokens at the sizes of an 8B model.
    """
    from cuda_fallback.kernels import decode

    def made(*shape: int, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device=META)

    state, (place,) = made(16, MAX_ROWS, dtype=torch.int64), key_places([(1, 128)])
    with recorded() as launches:
        decode.add_rms_norm(made(1, 1, 4096), made(1, 1, 4096), made(4096), 1e-5)
        decode.norm_heads(made(1, 1, 6 * 128), made(128), made(128), 4, 1, 128, 1e-5)
        for rows in (1, 8):
            decode.multiply(made(rows, 1, 4096), made(4096, 4096))
            for activation in ("silu", "gelu_tanh"):
                decode.multiply_gated(made(rows, 1, 4096), made(8192, 4096), None, activation)
        chosen = made(1, 2, dtype=torch.int64)
        decode.multiply_chosen(made(1, 4096), made(4, 4096, 4096), chosen)
        decode.rotate(made(1, 8, 3, 128), *(made(3, 64, dtype=torch.float32) for _ in range(2)))
        for bits, rotates in ((None, True), (None, False), (8, True)):
            decode.store_rotated(state, place, made(1, 1, 6 * 128), 4, 1, 128, rotates, bits)
            decode.read_keys(state, place, 1, 1, 128, dtype, bits)
        decode.gate(made(1, 1, 28672), "silu")
        decode.xielu(made(1, 1, 14336), 0.8, 0.7, 0.5, -1e-6)
        decode.recent(state, 1, 20)
        words = made(3, MAX_ROWS, dtype=torch.int64)
        scores, positions = made(1, 50000, dtype=torch.float32), made(1, 1, dtype=torch.int64)
        decode.add_noise(scores, positions, {"seed_low": words[0]})
        decode.note(state, 1)
        decode.advance(state, made(1, 1, dtype=torch.int32))
    facts = []
    for launch in launches:
        code = compile_launch(launch, capability)
        ptx = code.asm["ptx"]
        assert f".target sm_{capability}" in ptx
        is_wide = bool(re.search(r"ld\.global\S*\.v4\.b32", ptx))
        spills = bool(re.search(r"\.local\b", ptx))
        facts.append((launch.kernel.__name__, code.metadata.shared, spills, is_wide))
    return facts


@pytest.mark.slow_for("torch.float")
@pytest.mark.parametrize(
    "dtype, capability", [(torch.bfloat16, 90), (torch.float16, 80), (torch.float32, 80)], ids=str
)
def test_compiled_for_a_gpu(dtype, capability, compile_call):
    for name, shared, spills, is_wide in compile_call(compiled, dtype, capability):
        assert shared <= SHARED and not spills, name
        assert is_wide or name not in ("_add_rms_norm", "_multiply", "_gate"), name


def column_layouts(activation: str) -> list[set]:
    """Layouts of products over threads, for 1, 2 and 4 rows of float32."""
    from cuda_fallback.kernels import decode

    weight = torch.empty((8192, 4096), device=META)
    with recorded() as launches:
        for rows in (1, 2, 4):
            x = torch.empty((rows, 1, 4096), device=META)
            multiply = decode.multiply_gated if activation else decode.multiply
            multiply(x, weight)
    texts = [compile_launch(launch, 90).asm["ttgir"] for launch in launches]
    layouts = [re.findall(r"#blocked\d* = (.*order = \[2, 1, 0\].*)", text) for text in texts]
    return [re.findall(r"= \[[\d, ]*?(\d+)\]", product) for (product,) in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["", "silu"])
def test_threads_share_the_columns_of_a_product_in_the_same_way_for_any_number_of_rows(
    activation, compile_call
):
    """The order of a sum is that of its columns over threads."""
    shared = compile_call(column_layouts, activation)
    assert shared[0] == shared[1] == shared[2]
    assert [int(number) for number in shared[0][1:3]] == [32, 4]
