"""Rows of one cache: each gets the bits that it gets alone and cold, whatever the others do."""

from __future__ import annotations

import functools
import mmap

import gguf
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from backends.conftest import relative_rms
from backends.kernels.models import load
from cpu_fallback import pages
from cpu_fallback.arrays import SamplingBatch
from cpu_fallback.kernels.workspace import CHUNK
from cpu_fallback.model import Llama
from cpu_fallback.pages import PAGE, SPARE_BYTES, dequantise, quantise
from mlx_llama.core.options import resolve

ROWS, CAPACITY = 32, 400
CASES = [
    ("odd widths", 32, None),
    ("head 80, a window", 32, None),
    ("head 20", 32, 8),
    ("Q4_K_M", 16, None),
    ("many formats", 16, 8),
    ("head 36", 32, 16),
    ("many formats", 8, None),
    ("head 128, dynamic rope", 32, None),
    ("short convolutions", 32, None),
    ("gated delta rules", 16, 8),
]


@functools.cache
def model(case: str, activation_bits: int, cache_bits: int | None) -> Llama:
    dtype = "float32" if activation_bits == 32 else "auto"
    return load(case, dtype, threads=2, activation_bits=activation_bits, cache_bits=cache_bits)


@functools.lru_cache(maxsize=4096)
def alone(llama: Llama, history: tuple) -> np.ndarray:
    """Logits after a row's history, computed in a cache of its own. history: its token ids; for a
    rope that depends on the length, its chunks of them and lengths that it was trimmed to."""
    cache = llama.make_cache(CAPACITY)
    if isinstance(history[0], int):
        return llama.forward([list(history)], 0, cache)[0]
    for event in history:
        if isinstance(event, int):
            cache.trim(event)
        else:
            logits = llama.forward([list(event)], cache.length, cache)[0]
    return logits


class Batch:
    """A cache under a schedule, and what each row's history is."""

    def __init__(self, llama: Llama):
        self.llama, self.cache = llama, llama.make_cache(CAPACITY, ROWS)
        self.tokens: list[tuple[int, ...]] = [()] * ROWS
        self.events: list[tuple] = [()] * ROWS
        self.random = np.random.default_rng(0)

    def forward(self, rows: list[int], count: int) -> None:
        rows = [row for row in rows if len(self.tokens[row]) + count <= CAPACITY]
        if not rows:
            return
        new = self.random.integers(0, 384, (len(rows), count)).astype(np.int32)
        logits = self.llama.forward(
            new, [len(self.tokens[row]) for row in rows], self.cache, rows=rows
        )
        assert logits.shape == (len(rows), self.llama.config.vocab_size)
        for row, ids, got in zip(rows, new.tolist(), logits):
            self.tokens[row] += tuple(ids)
            self.events[row] += (tuple(ids),)
            self.check(row, got)

    def check(self, row: int, got: np.ndarray) -> None:
        dynamic = self.llama.config.rope.type == "dynamic"
        wanted = alone(self.llama, self.events[row] if dynamic else self.tokens[row])
        np.testing.assert_array_equal(got, wanted)

    def fail(self, row: int, count: int) -> None:
        """A call that fails in its last layer."""

        def probe(name: str, array: np.ndarray) -> None:
            if name == "logits":
                raise RuntimeError("a probe fails")

        if len(self.tokens[row]) + count <= CAPACITY:
            with pytest.raises(RuntimeError):
                self.llama.forward(
                    [[7] * count], len(self.tokens[row]), self.cache, rows=[row], probe=probe
                )

    def trim(self, row: int, share: float) -> None:
        length = self.cache.trim(int(share * len(self.tokens[row])), row)
        self.tokens[row] = self.tokens[row][:length]
        self.events[row] = (*self.events[row], length) if length else ()

    def copy(self, source: int, target: int, share: float) -> None:
        if source != target:
            self.reset(target)
            length = int(share * len(self.tokens[source]))
            length = self.cache.copy_prefix(source, target, length)
            self.tokens[target] = self.tokens[source][:length]
            self.events[target] = (*self.events[source], length) if length else ()

    def move(self, row: int, target: int) -> None:
        """Save a row and load it as another. Codes of 8 bits come back as they were."""
        if row != target:
            self.cache.restore(self.cache.state(row), target)
            self.tokens[target], self.events[target] = self.tokens[row], self.events[row]

    def reset(self, row: int) -> None:
        self.cache.reset(row)
        self.tokens[row], self.events[row] = (), ()


FEW = st.integers(0, 3)  # rows that meet often
SHARE = st.sampled_from([0.9, 0.3, 0.64, 1.0, 0.0])
EVENTS = st.one_of(
    st.tuples(
        st.just("forward"),
        FEW.map(lambda row: [row]),
        st.sampled_from([1, 2, 3, 17, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5, CHUNK + 3]),
    ),
    st.tuples(
        st.just("forward"),
        st.lists(FEW, min_size=1, max_size=3, unique=True),
        st.sampled_from([1, 2, 5]),
    ),
    st.tuples(
        st.just("forward"),
        st.sampled_from([2, 3, 8, 32]).flatmap(
            lambda count: st.permutations(range(ROWS)).map(lambda rows: rows[:count])
        ),
        st.just(1),
    ),
    st.tuples(st.just("fail"), FEW, st.sampled_from([1, 5])),
    st.tuples(st.just("trim"), FEW, SHARE),
    st.tuples(st.just("copy"), FEW, FEW, SHARE),
    st.tuples(st.just("move"), FEW, FEW),
    st.tuples(st.just("reset"), FEW),
)


@pytest.mark.slow_for(
    "('Q4_K_M', 16",
    "('gated",
    "('short",
    "('head 128",
    "('head 20",
    "('head 36",
    "('head 80",
    "('many formats', 8",
    "('odd widths",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    events=st.lists(EVENTS, min_size=8, max_size=16),
    copies=st.lists(st.tuples(FEW, FEW, SHARE, SHARE), max_size=3),
)
def test_a_row_has_the_bits_that_it_has_alone(case, events, copies):
    batch = Batch(model(*case))
    for row, length in enumerate((PAGE + 5, 2 * PAGE, 9)):
        batch.forward([row], length)
    for source, target, share, rest in copies:
        batch.copy(source, target, share)
        batch.trim(target, rest)
        batch.forward([target], 3)
    for kind, *given_ in events:
        getattr(batch, kind)(*given_)
        assert batch.cache.lengths == [len(tokens) for tokens in batch.tokens]
    for row, tokens in enumerate(batch.tokens):  # every row goes on
        assert batch.cache.state(row).get("tokens", np.zeros(0)).tolist() == list(tokens)
    batch.forward(list(range(ROWS)), 1)
    batch.forward(list(range(ROWS))[::-1], 1)


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_probes_of_rows_show_what_each_has_alone(case):
    llama, lengths = model(*case), (5, 70, 1)
    cache, together = llama.make_cache(100, 3), {}
    prompts = [np.arange(length)[None] % 300 for length in lengths]
    for row, prompt in enumerate(prompts):
        llama.forward(prompt, 0, cache, rows=[row])
    logits = llama.forward([[9], [8], [7]], lengths, cache, probe=together.__setitem__)
    for row, (prompt, token) in enumerate(zip(prompts, (9, 8, 7))):
        single, probes_alone = llama.make_cache(100), {}
        llama.forward(prompt, 0, single)
        np.testing.assert_array_equal(
            llama.forward([[token]], lengths[row], single, probe=probes_alone.__setitem__)[0],
            logits[row],
        )
        assert list(probes_alone) == list(together)
        for name, array in probes_alone.items():
            np.testing.assert_array_equal(together[name][row : row + 1], array, err_msg=name)


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_a_step_draws_for_each_row_as_alone(rows):
    llama = model(*CASES[3])
    options = [
        resolve(
            {
                "temperature": i % 3 / 2,
                "seed": i,
                "top_k": i % 2 * 5,
                "repetition_penalty": 1 + i % 4 / 4,
            }
        ).options
        for i in range(rows)
    ]
    cache, order = llama.make_cache(20, rows), list(range(rows))[::-1]
    tokens, sampling = np.arange(rows, dtype=np.int32)[:, None] % 384, SamplingBatch(options)
    for step in range(3):
        tokens = llama.step(tokens, step, cache, sampling, rows=order)
        assert tokens.shape == (rows, 1) and tokens.dtype == np.int32
    for i in {0, rows // 2, rows - 1}:
        single, token = llama.make_cache(20), np.array([[i % 384]], np.int32)
        for step in range(3):
            token = llama.step(token, step, single, SamplingBatch([options[i]]))
        assert token[0, 0] == tokens[i, 0]


# ---- keys and values of 8 bits


def test_codes_are_as_exact_as_those_of_llama_cpps_cache():
    x = np.random.default_rng(1).standard_normal((50, 64), np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    wanted = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    error = relative_rms(dequantise(*quantise(x)), x)
    assert error == pytest.approx(relative_rms(wanted, x), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[4], CASES[5]], ids=str)
def test_probes_and_verification_read_few_bits(case):
    llama = model(*case)
    ids, seen = np.random.default_rng(2).integers(0, 384, (1, 70)).astype(np.int32), {}
    cache, sampling = llama.make_cache(100), SamplingBatch([resolve({}).options])
    logits = llama.forward(ids, 0, cache, all_positions=True, probe=seen.__setitem__)
    np.testing.assert_array_equal(
        logits, llama.forward(ids, 0, llama.make_cache(100), all_positions=True)
    )
    np.testing.assert_array_equal(seen["logits"], logits)
    drafts = llama.verify(ids[:, :4], 70, cache, sampling)
    cache.trim(70)
    for i in range(4):
        assert llama.step(ids[:, i : i + 1], 70 + i, cache, sampling)[0, 0] == drafts[0, i]


# ---- pages


def test_rows_share_the_pages_of_a_prefix_until_they_write():
    llama = model(*CASES[0])
    cache, page = llama.make_cache(CAPACITY, 5), llama.make_cache(1).nbytes_for(1)
    llama.forward([[3] * (2 * PAGE + 10)], 0, cache, rows=[2])
    assert cache.nbytes == 3 * page == cache.nbytes_for(2 * PAGE + 1) and cache.nbytes_for(0) == 0
    before = cache.state(2)
    cache.copy_prefix(2, 0, 2 * PAGE)
    cache.copy_prefix(2, 4, 2 * PAGE + 9)
    assert cache.nbytes == 4 * page  # of row 4's last page alone
    cache.trim(PAGE + 5, 0)
    llama.forward([[5]], PAGE + 5, cache, rows=[0])  # in a page that three rows share
    assert cache.nbytes == 5 * page
    for name, array in cache.state(2).items():
        np.testing.assert_array_equal(array, before[name])
    for row in (2, 0):
        cache.reset(row)
    assert cache.nbytes == 3 * page and cache.lengths == [0, 0, 0, 0, 2 * PAGE + 9]
    cache.reset(4)
    assert cache.nbytes == 0


@pytest.mark.slow
def test_a_thousand_requests_take_the_memory_of_a_few(monkeypatch):
    made = []
    init = pages.Page.__init__
    monkeypatch.setattr(
        pages.Page,
        "__init__",
        lambda self, layout: (made.append(layout.nbytes), init(self, layout))[1],
    )
    llama, after_a_few = model(*CASES[0]), 0
    cache = llama.make_cache(CAPACITY, 4)
    for number in range(1000):
        llama.forward([[number % 384] * (40 + 7 * number % 70)], 0, cache, rows=[number % 4])
        cache.reset((number + 1) % 4)
        if number == 20:
            after_a_few = sum(made)
    assert sum(made) == after_a_few < SPARE_BYTES
    cache.reset()
    assert cache.nbytes == 0 and len(cache.arrays()) == 0


def test_large_pages_are_mapped_and_hold_the_same(monkeypatch):
    llama, ids, results = model(*CASES[4]), np.arange(3 * PAGE + 7)[None] % 300, []
    for size in (pages.HUGE_PAGE, 1):
        monkeypatch.setattr(pages, "HUGE_PAGE", size)
        cache = llama.make_cache(CAPACITY, 2)
        llama.forward(ids, 0, cache, rows=[1])
        cache.copy_prefix(1, 0, PAGE + 3)
        logits = llama.forward([[1], [2]], [PAGE + 3, ids.shape[1]], cache)
        results.append((logits, *cache.state(0).values(), *cache.state(1).values()))
        assert [row.pages[0][0].address % mmap.PAGESIZE for row in cache.page_rows] == [
            0,
            0,
        ] or size > 1
    for small, mapped in zip(*results, strict=True):
        np.testing.assert_array_equal(small, mapped)
