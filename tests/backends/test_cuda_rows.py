"""The torch backend's rows: on torch's CPU device by its own operations, and by kernels (see
test_captured_step.py).
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from making import config_fields, make_checkpoint
from making_gguf import LOW_BIT_MODEL, make_gguf

from backends.conftest import EVERYTHING
from mlx_llama.core.backends.positions import Span
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import BackendError, ContextError
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.options import LoadOptions, resolve
from mlx_llama.core.sample import SamplingFeatures

torch = pytest.importorskip("torch")

from cases.captured import loaded
from cases.gemma4 import make_gemma4

from backends.triton_process import (
    DEVICE,
    HAS_GPU,
    call,  # noqa: F401
    compile_call,  # noqa: F401
    computing,
)
from cuda_fallback.arrays import SamplingBatch
from cuda_fallback.cache import Cache
from cuda_fallback.kernels.state import NUMBERS, TOKENS, StateView
from cuda_fallback.kernels.storage import dequantize, quantize
from cuda_fallback.model import Llama

MIXED = [
    dict(temperature=0),
    dict(temperature=1.0, seed=2**63 + 5),
    dict(temperature=0.7, top_k=3, seed=1),
    dict(temperature=1.3, top_p=0.7, seed=2),
]
ALONE = [[3, 4, 5, 6], [7], [11, 12, 13, 14, 15, 16, 17, 18, 19], [9, 3], [21, 22, 23]]  # prompts


def batch(*chosen: dict):
    return SamplingBatch([resolve({"seed": 1, **settings}).options for settings in chosen], DEVICE)


def to_float32(logits) -> np.ndarray:
    """Logits as float32."""
    return logits.float().numpy()


def fill(model, cache, rows) -> None:
    for row, prompt in zip(rows, ALONE):
        model.forward([prompt], 0, cache, rows=[row])


# The cache


@pytest.mark.parametrize("bits", [None, 8])
def test_a_row_that_grows_moves_no_other(bits, tmp_path):
    """Also where another row has the positions already. test_cache.py has the contents of rows."""
    folder = make_checkpoint(tmp_path / "m", tokenizer=False, max_position_embeddings=1024)
    model = select("cuda", "cpu").load(open_checkpoint(folder), "float32", cache_bits=bits)
    cache = model.make_cache(600, rows=300)
    fill(model, cache, (7, 3, 299))
    assert cache.nbytes == 3 * 256 * (cache.position_nbytes + 4)
    addresses = [array.data_ptr() for row in (7, 299) for array in cache.row_storage[row].arrays()]
    model.forward([list(range(3, 303))], 1, cache, rows=[3])
    assert addresses == [
        array.data_ptr() for row in (7, 299) for array in cache.row_storage[row].arrays()
    ]
    version, tables = cache.versions[7], cache.tables
    cache.reserve({7: 300})
    # or a captured step would go on in the old storage
    assert cache.tables is tables and cache.versions[7] > version
    cache.reset()
    assert cache.nbytes == 0 and not any(cache.lengths) and not any(cache.allocated)


# Sampling


def test_options_for_another_number_of_rows_are_refused(toy):
    model = select("cuda", "cpu").load(open_checkpoint(toy), "float32")
    with pytest.raises(ContextError, match="a batch of 2 sequences needs 2 options"):
        model.step([[1], [2]], 0, model.make_cache(8, rows=2), batch({}))


# By kernels


@functools.cache
def kernel_checkpoint(name: str) -> Path | Checkpoint:
    home, small = Path(tempfile.mkdtemp()), dict(vocab_size=67, num_key_value_heads=1)
    small |= dict(hidden_size=36, intermediate_size=50, max_position_embeddings=512)
    if name == "low-bit":
        make_gguf(home / "m.gguf", max_position_embeddings=512, **LOW_BIT_MODEL)
        return home / "m.gguf"
    if name == "gemma4":
        return make_gemma4()
    if name == "sliding":
        small |= dict(architectures=["MistralForCausalLM"], sliding_window=11, num_hidden_layers=1)
        small |= dict(num_attention_heads=2, head_dim=12)
    else:
        small |= dict(architectures=["Qwen3ForCausalLM"], num_attention_heads=3, head_dim=20)
    return make_checkpoint(home / "m", tokenizer=False, **small)


@functools.cache
def kernel_model(name: str):
    model = loaded(kernel_checkpoint(name), compile=False)
    if not HAS_GPU:
        from cuda_fallback.kernels import attention

        attention.TILE = 1  # 16 positions at a time
    return model


COUNT = 2  # steps of a conversation


def prompt(i: int) -> list[int]:
    """Lengths of one to three of attention's pieces, as kernel_model sets them."""
    return np.random.default_rng(i).integers(3, 60, (40, 1, 20, 3, 9)[i % 5]).tolist()


def conversation(i: int, count: int) -> list[int]:
    return np.random.default_rng(100 + i).integers(3, 60, count).tolist()


@functools.cache
def logits_alone(name: str, i: int) -> list[bytes]:
    """Logits of single tokens after a prompt, one row in its own cache."""
    model = kernel_model(name)
    cache = model.make_cache(100)
    model.forward([prompt(i)], 0, cache)
    return [
        to_float32(model.forward([[token]], cache.length, cache)).tobytes()
        for token in conversation(i, COUNT)
    ]


def check_batch(name: str, joins: list[int], order: int) -> int:
    """Compare the bits of conversations in one cache with each alone. joins: the step before which
    each one joins.
    """
    with computing(True):
        model, compared, rng = kernel_model(name), 0, np.random.default_rng(order)
        cache, done = model.make_cache(100, rows=len(joins) + 1), [0] * len(joins)
        for step in range(max(joins) + COUNT):
            now = [i for i, join in enumerate(joins) if join <= step < join + COUNT]
            for i in now:
                if done[i] == 0:
                    model.forward([prompt(i)], 0, cache, rows=[i + 1])
            if not now:
                continue
            rng.shuffle(now)
            tokens = [[conversation(i, COUNT)[done[i]]] for i in now]
            rows = [i + 1 for i in now]
            got = model.forward(tokens, [cache.lengths[row] for row in rows], cache, rows=rows)
            for i, logits in zip(now, to_float32(got)):
                assert logits.tobytes() == logits_alone(name, i)[done[i]], (name, order, i, step)
                compared += 1
                done[i] += 1
                if done[i] == COUNT:
                    cache.reset(i + 1)
        return compared


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "low-bit", "gemma4"])
def test_logits_have_the_same_bits_in_any_batch(name, call):
    assert call(check_batch, name, [0, 1, 0, 2, 0], 1) == COUNT * 5


def dense_products(dtype: torch.dtype) -> list[float]:
    """Largest errors of products of 33 rows, relative to sums of absolute values, once rows
    of a batch have the bits of fewer.
    """
    from cuda_fallback.kernels import decode, packed, products

    made, sums, launch = torch.Generator().manual_seed(3), [], packed.run
    x, w, bias = (
        torch.randn(shape, generator=made).to(DEVICE, dtype)
        for shape in ((33, 1, 100), (36, 100), (36,))
    )

    def run(kernel, grid, *arguments, **named):
        launch(kernel, grid, *arguments, **named)
        if kernel is products.multiply_tile:
            sums.append(arguments[kernel.arg_names.index("out")])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "run", run)
        product, gated = decode.multiply(x, w, bias), decode.multiply_gated(x, w, bias)
        for rows in (1, 2, 3, 8, 17, 32):
            assert torch.equal(decode.multiply(x[-rows:], w, bias), product[-rows:]), rows
            # in float32, where another order shows
            assert torch.equal(sums[-1], sums[0][:, -rows:]), rows
    x, w, bias = x.double(), w.double(), bias.double()
    wanted, bound = x @ w.T + bias, x.abs() @ w.abs().T + bias.abs()
    gate, up = wanted.chunk(2, dim=-1)
    errors = [
        (product - wanted).abs() / bound,
        (gated - torch.nn.functional.silu(gate) * up).abs() / (bound[..., :18] * bound[..., 18:]),
    ]
    return [float(error.max()) for error in errors]


@pytest.mark.parametrize(
    "dtype, error", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)], ids=["float16", "bfloat16"]
)
def test_dense_products_have_the_same_bits_in_any_batch(dtype, error, call):
    assert max(call(dense_products, dtype)) < error


# Prompts by the kernels of decoded tokens

TEXT = np.random.default_rng(5).integers(3, 60, 20).tolist()
BATCH_INVARIANT = [("low-bit", None), ("sliding", 8), ("gemma4", 8)]


@functools.cache
def plain_and_invariant(name: str, bits: int | None) -> tuple:
    """The model as it is by default, and one that promises bits. In the interpreter the latter is
    recorded, or not.
    """
    path = kernel_checkpoint(name)
    plain = loaded(path, compile=False, cache_bits=bits)
    invariant = loaded(path, compile=bits is None, cache_bits=bits, batch_invariant=True)
    assert (plain.is_batch_invariant, invariant.is_batch_invariant) == (False, True)
    return plain, invariant


@functools.cache
def decoded_text(name: str, bits: int | None) -> tuple[list[bytes], list[dict]]:
    """Logits of each token of TEXT, decoded one by one in a cache of its own, and the cache's
    state after each.
    """
    model, _ = plain_and_invariant(name, bits)
    cache, logits, states = model.make_cache(len(TEXT)), [], []
    for token in TEXT:
        logits.append(to_float32(model.forward([[token]], cache.length, cache)).tobytes())
        states.append(cache.state())
    return logits, states


def check_chunks(name: str, bits: int | None, events: list[tuple]) -> int:
    """Rows of a cache read TEXT in chunks; compare each position's bits with the decoded ones.
    Returns how many.
    """
    from cuda_fallback.kernels import attention, cuda_graph

    _, model = plain_and_invariant(name, bits)
    with computing(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graph, "MAX_ROWS", 16)  # the longest chunk takes two steps
        if not HAS_GPU:
            patch.setattr(attention, "TILE", 1)  # 16 positions at a time
        (wanted, states), compared = decoded_text(name, bits), 0
        cache = model.make_cache(len(TEXT), rows=3)
        for kind, *arguments in events:
            if kind == "read":
                rows, count = arguments
                count = min(count, *(len(TEXT) - cache.lengths[row] for row in rows))
                if not count:
                    continue
                starts = [cache.lengths[row] for row in rows]
                tokens = [TEXT[start : start + count] for start in starts]
                every = count % 2 == 0
                got = to_float32(
                    model.forward(tokens, starts, cache, rows=rows, all_positions=every)
                )
                for start, logits in zip(starts, got.reshape(len(rows), -1, got.shape[-1])):
                    first = start if every else start + count - 1
                    for at, row_logits in enumerate(logits, first):
                        assert row_logits.tobytes() == wanted[at], (name, bits, events, at)
                        compared += 1
            elif kind == "trim":
                row, share = arguments
                cache.trim(int(share * cache.lengths[row]), row)
            else:
                source, target, share = arguments
                if source != target:
                    cache.reset(target)
                    cache.copy_prefix(source, target, int(share * cache.lengths[source]))
        for row, length in enumerate(cache.lengths):
            for part, array in cache.state(row).items() if length else ():
                np.testing.assert_array_equal(array, states[length - 1][part])
        return compared


@pytest.mark.slow
@pytest.mark.parametrize("name, bits", BATCH_INVARIANT)
@pytest.mark.parametrize(
    "events",
    [
        [("read", [1], 18), ("copy", 1, 0, 0.64), ("read", [0, 1], 2)],
        [("read", [2, 0], 7), ("read", [0], 1), ("trim", 2, 0.3), ("read", [2, 0], 4)],
    ],
    ids=["copy", "trim"],
)
def test_prompts_in_any_chunks_have_the_bits_of_decoded_tokens(name, bits, events, call):
    assert call(check_chunks, name, bits, events) > 9


def steps_over_prompts(name: str) -> dict:
    """Tokens of prompts in a step, alone and in a batch, and of a verification; probes of a prompt
    and of single tokens.
    """
    _, model = plain_and_invariant(name, None)
    with computing(True):
        cache, prompts = model.make_cache(40, rows=4), [TEXT[:5], TEXT[7:12]]
        draws = [batch(MIXED[1]), batch(EVERYTHING)]
        together = model.step(
            prompts, [0, 0], cache, batch(MIXED[1], EVERYTHING), rows=[3, 1]
        ).tolist()
        alone, verified, stepped = [], [], []
        for prompt, draw in zip(prompts, draws):
            cache.reset(0)
            for token in prompt:
                sampled = model.step([[token]], cache.length, cache, draw)
                stepped.append(int(sampled))
            alone.append([stepped[-1]])
            cache.reset(0)
            verified += model.verify([prompt], 0, cache, draw)[0].tolist()
        batched, single = {}, {}
        for probes, chunk in ((batched, 5), (single, 1)):
            cache.reset(0)
            for at in range(0, 5, chunk):
                note = lambda probe, array: probes.setdefault(probe, []).append(array.numpy())  # noqa: E731
                model.forward([TEXT[at : at + chunk]], at, cache, probe=note)
    with computing(False):
        plain = loaded(kernel_checkpoint(name), by_kernels=False)
        shapes = {}
        note = lambda probe, array: shapes.setdefault(probe, array.shape)  # noqa: E731
        plain.forward([TEXT[:5]], 0, plain.make_cache(5), probe=note)
    for probe, shape in shapes.items():
        (array,), parts = batched.pop(probe), single[probe]
        assert array.shape == shape, probe
        np.testing.assert_array_equal(array, np.concatenate(parts, axis=-2), err_msg=probe)
    assert not batched
    return dict(together=together, alone=alone, verified=verified, stepped=stepped)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["odd", "gemma4"])
def test_a_prompts_step_its_verification_and_its_probes_are_those_of_decoded_tokens(name, call):
    facts = call(steps_over_prompts, name)
    assert facts["together"] == facts["alone"] and facts["verified"] == facts["stepped"]
    assert len(facts["stepped"]) == 10


def refuse_dynamic_rope(folder: Path) -> None:
    options = LoadOptions(batch_invariant=True)
    with computing(True), pytest.raises(BackendError, match="`batch_invariant`: dynamic rope"):
        Llama.load(open_checkpoint(folder), options, DEVICE)


@pytest.mark.skipif(HAS_GPU, reason="its kernels run here")
def test_bits_are_not_promised_without_kernels(call, toy, tmp_path):
    said = "^`batch_invariant`: its kernels are for a GPU, and this is torch's CPU device: "
    with pytest.raises(BackendError, match=said + "leave it out, or choose `backend='cpu'`$"):
        select("cuda", "cpu").load(open_checkpoint(toy), batch_invariant=True)
    fields = dict(rope_scaling=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=16)
    call(refuse_dynamic_rope, make_checkpoint(tmp_path / "d", **fields))


# The conversations of each step
PLAN = [[0, 1]] * 3 + [[0, 1, 2], [2, 1, 0], [2], [2], [2, 3]] + [[3]] * 4
PLACES = [5, 1, 4, 0]  # their rows


def replayed_rows(path: Path) -> dict:
    """Conversations that join and leave, by recorded steps, against each alone."""
    model, alone = loaded(path), []
    point, points, drawn = StateView.point, [], {}
    with computing(True), pytest.MonkeyPatch.context() as patch:
        for i, settings in enumerate(MIXED):
            cache, token, draw, tokens = model.make_cache(300), [[30 + i]], batch(settings), []
            model.forward([ALONE[i]], 0, cache)
            for _ in range(5):
                token = model.step(token, cache.length, cache, draw)
                tokens.append(int(token))
            alone.append((tokens, cache.state()))
        patch.setattr(
            StateView,
            "point",
            # with sampling: a step's
            lambda *args: (len(args) == 5 and points.append(1), point(*args)),
        )
        cache, before = model.make_cache(300, rows=6), None
        for now in PLAN:
            rows = [PLACES[i] for i in now]
            for i, row in zip(now, rows):
                if i not in drawn:
                    model.forward([ALONE[i]], 0, cache, rows=[row])
                    drawn[i] = []
            if now != before:
                draw = batch(*(MIXED[i] for i in now))
                tokens = [[drawn[i][-1] if drawn[i] else 30 + i] for i in now]
            before = now
            lengths = [cache.lengths[row] for row in rows]
            tokens = model.step(tokens, lengths, cache, draw, rows=rows)
            for i, token in zip(now, tokens[:, 0].tolist()):
                drawn[i].append(token)
        for i, (tokens, state) in enumerate(alone):
            assert drawn[i] == tokens
            for part, array in state.items():
                np.testing.assert_array_equal(cache.state(PLACES[i])[part], array)
        # Other values of the same kind, and other rows, need no capture.
        count, kinds = model.runner.capture.recorded, set(model.runner._steps)
        settings = dict(temperature=0.5, top_k=4, seed=9), MIXED[0], MIXED[0]
        model.step([[5], [6], [7]], 0, model.make_cache(20, rows=3), batch(*settings))
    steps = model.runner._steps
    return {
        "points": len(points) - 1,
        "captured": {rows for (rows, _), step in steps.items() if step.is_captured},
        "more": (model.runner.capture.recorded - count, set(steps) - kinds),
    }


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPU, reason="a CUDA graph does not tell how often it was captured")
def test_rows_join_and_leave_replayed_steps(call, tmp_path):
    fields = dict(num_hidden_layers=1, vocab_size=67, max_position_embeddings=512)
    facts = call(replayed_rows, make_checkpoint(tmp_path / "m", tokenizer=False, **fields))
    # a step that goes on needs nothing from the host
    assert facts["points"] == sum(now != before for now, before in zip(PLAN, [None, *PLAN]))
    assert facts["captured"] == {1, 2, 4} and facts["more"] == (0, set())


def test_rows_that_pad_a_batch_store_no_tokens():
    """Kernels tell them by the address 0; their storage has room for a single token."""
    config, cpu = LlamaConfig.from_dict(config_fields()), torch.device("cpu")
    kernels = SimpleNamespace(note=lambda state, rows: None)
    view = StateView(config, torch.float32, cpu, kernels, None, 4, SamplingFeatures())
    cache = Cache(config, 16, torch.float32, cpu, 3)
    cache.reserve(dict.fromkeys(range(3), 1))
    view.point(cache, [[5], [6], [7]], [Span(row, 0, 1) for row in range(3)])
    assert (view.state[[TOKENS, NUMBERS], :4] != 0).tolist() == [[True] * 3 + [False], [True] * 4]


# Keys and values in 8 bits


@pytest.mark.parametrize("D", [8, 20, 32, 80])
def test_codes_are_within_half_a_step(D):
    values = torch.from_numpy(np.random.default_rng(D).standard_normal((3, 5, D), np.float32))
    values[0], values[1, 0] = 0, 1e-9
    codes, scales = quantize(values)
    assert codes.dtype == torch.int8 and codes.shape == values.shape
    assert scales.shape == (3, 5, -(-D // 32))
    for start in range(0, D, 32):
        part = slice(start, start + 32)
        step = values[..., part].abs().amax(-1, keepdim=True) / 127
        errors = dequantize(codes, scales, torch.float32)[..., part] - values[..., part]
        assert (errors.abs() <= 0.57 * step + 1e-9).all()
