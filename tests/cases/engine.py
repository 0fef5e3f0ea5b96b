"""A backend of a few lines of NumPy, exact: the next token depends on every token of its row and on
each one's position.

Keys are a hash chain over the row's tokens, stored per row as a backend stores them. Logits are a
hash of all keys that a position sees. A mix-up of rows, positions or prefixes changes the answer.
Arrays are opaque to the host until they are read, and every launch and read is counted. Failures
can be planted.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from cpu_fallback import arrays as words
from mlx_llama.core import rng
from mlx_llama.core.backends.positions import CallView, Positions, checked_tokens
from mlx_llama.core.engine.loop import Loop
from mlx_llama.core.engine.request import NO_ROW, Request, Status
from mlx_llama.core.errors import ContextError
from mlx_llama.core.models.parts import KeyValues, Window
from mlx_llama.core.options import resolve
from mlx_llama.core.sample import SamplingFeatures, pack_logprobs

VOCABULARY = 50
POSITION_NBYTES = 1000
_MASK = (1 << 61) - 1


class ToyError(RuntimeError):
    """A planted failure."""


class ToyArray:
    """Tokens on the device, int32 [B, T]."""

    def __init__(self, values):
        self._values = np.asarray(values, np.int32)
        self.shape, self.nbytes = self._values.shape, self._values.nbytes

    def __getitem__(self, index):
        return ToyArray(self._values[index])

    def __array__(self, *_, **__):
        raise AssertionError("the host may look at tokens of the device only by reading them")


class RowCache(Positions):
    """Rows of tokens, int32 [allocated], and of a model's numbers for each, `keys`, of a dtype and
    shape [allocated, ...].
    """

    def __init__(self, config, capacity, position_nbytes, rows, dtype, *shape):
        super().__init__(config, capacity, rows=rows)
        self.runtime = SimpleNamespace(to_numpy=np.asarray)
        self.position_nbytes = position_nbytes
        self.keys = [np.zeros((0, *shape), dtype) for _ in range(rows)]
        self.tokens = [np.zeros(0, np.int32) for _ in range(rows)]
        self.copied = 0  # positions that copy_prefix copied

    @property
    def nbytes(self):
        return sum(self.allocated) * self.position_nbytes + self.states_nbytes()

    def _grow(self, ends):
        for row, end in ends.items():
            size = self.storage_for(end)
            for arrays in (self.keys, self.tokens):
                larger = np.zeros((size, *arrays[row].shape[1:]), arrays[row].dtype)
                larger[: self.lengths[row]] = arrays[row][: self.lengths[row]]
                arrays[row] = larger
            self.allocated[row] = size

    def arrays(self):
        return []

    def _free(self, rows, is_all):
        for row in rows:
            self.keys[row], self.tokens[row] = self.keys[row][:0], self.tokens[row][:0]

    def _copy(self, source, target, length):
        self.reserve({target: length})
        self.keys[target][:length] = self.keys[source][:length]
        self.tokens[target][:length] = self.tokens[source][:length]
        self.copied += length

    def _export(self, row, length):
        return self.tokens[row][:length].copy(), *self.pack(self.keys[row][:length])

    def _load(self, row, tokens, keys, values):
        count = len(tokens)
        self.tokens[row][:count], self.keys[row][:count] = tokens, self.unpack(keys, values)

    def _zeros(self, shape):
        return np.zeros(shape, np.float32)

    _send, _stack, _own = map(staticmethod, (np.asarray, np.stack, np.copy))


class ToyCache(RowCache):
    """Keys are int64; the toy's memory is limited as its backend says."""

    def __init__(self, model, capacity, rows=1):
        super().__init__(model.config, capacity, POSITION_NBYTES, rows, np.int64)
        self.model = model
        if window := model.config.kinds[0].window:  # a share of a position's bytes
            self.window_nbytes = {window: 8}

    def free_memory(self):
        return self.model.backend.free

    def check_memory(self, ends):
        sizes = ((self.storage_for(end), self.allocated[row]) for row, end in ends.items())
        grown = sum(max(0, size - allocated) for size, allocated in sizes)
        limit = self.model.backend.memory
        if limit is not None and self.nbytes + grown * POSITION_NBYTES > limit:
            raise ContextError(f"toy memory: {grown} positions do not fit")

    def view(self, tokens, index_pos, rows=None):
        return CallView(self, *np.shape(tokens), index_pos, rows)

    def recent(self, window, rows=None, lengths=None):
        rows = range(self.rows) if rows is None else rows
        lengths = [self.lengths[row] for row in rows] if lengths is None else lengths
        out = np.full((len(rows), window), -1, np.int32)
        for i, (row, length) in enumerate(zip(rows, lengths)):
            last = self.tokens[row][max(0, length - window) : length]
            out[i, window - len(last) :] = last
        return out

    def _first(self, length):
        return self.config.kinds[0].first(length)

    def _slide(self, row, length):
        self.keys[row][: self._first(length)] = -1

    def _keep_windows(self, row, length):
        return self.keys[row][self._first(length) : length].copy()

    def _put_windows(self, row, length, windows):
        if windows is not None:
            self.keys[row][self._first(length) : length] = windows

    def _export(self, row, length):
        tokens, keys = self.tokens[row][:length].copy(), self.keys[row][:length].copy()
        if length < self.oldest[row]:
            keys[self._first(length) :] = self.checkpoints[row][length]
        return tokens, *self.pack(keys)

    def _load(self, row, tokens, keys, values):
        count, numbers = len(tokens), self.unpack(keys, values)
        self.tokens[row][:count] = tokens
        self.keys[row][count - len(numbers) : count] = numbers

    def pack(self, keys):
        keys = keys.view(np.float32).reshape(1, 1, len(keys), 2).copy()
        return keys, keys

    def unpack(self, keys, values):
        return np.ascontiguousarray(keys).view(np.int64).reshape(-1)


class ToySampling:
    """Bias, presence penalty, temperature and Gumbel noise of each row."""

    def __init__(self, options):
        self.options = tuple(options)
        self.windows = [
            o.repetition_context_size if o.presence_penalty else 0 for o in self.options
        ]
        self.window = max(self.windows)
        self.logprobs = SamplingFeatures.of(self.options).logprobs

    def draw(self, row, logits, position, recent, mask=None):
        options, scores = self.options[row], logits.astype(np.float64)
        if mask is not None:
            allowed = [mask[token // 32] >> token % 32 & 1 for token in range(VOCABULARY)]
            scores[np.flatnonzero(np.equal(allowed, 0))] = -np.inf
        for token, bias in options.logit_bias.items():
            scores[token] += bias
        if self.windows[row]:
            seen = recent[recent >= 0][-self.windows[row] :]
            scores[np.unique(seen)] -= options.presence_penalty
        if options.temperature:
            scores = scores / options.temperature + rng.gumbel(options.seed, position, len(scores))
        return int(scores.argmax())


class ToyModel:
    """logits(position) = hash(all keys up to it); key(position) = hash(key before, token,
    position).
    """

    dtype = dtype_name = "float32"
    cache_bits, notices, adapters = None, (), ()
    prefill_width, prefill_chunk, is_batch_invariant = 1 << 16, 512, False

    def __init__(
        self,
        backend,
        salt=0,
        context=1000,
        verify_width=16,
        rope="default",
        period=0,
        is_recurrent=False,
        window=0,
    ):
        """is_recurrent: the last key is a recurrent state, which alone decides on the logits.
        window: keys that decide on the logits, 0 for all.
        """
        self.window = Window(window) if window else None
        self.backend, self.salt, self.is_recurrent = backend, salt, is_recurrent
        self.verify_width = verify_width
        # the next token repeats the one so many positions before; 0: a hash of the text
        self.period = period
        self.config = SimpleNamespace(
            rope=SimpleNamespace(type=rope, factor=4.0),
            max_position_embeddings=context,
            vocab_size=VOCABULARY,
            kinds=(kind := KeyValues(heads=1, head_dim=2, slots=(0,), window=self.window),),
            state_shapes=lambda length: dict.fromkeys(
                ("keys", "values"), (1, 1, length - kind.first(length), 2)
            ),
            recurrent=(SimpleNamespace(states=((2,),)),) if is_recurrent else (),
        )

    def make_cache(self, capacity, rows=1):
        return ToyCache(self, capacity, rows)

    def forward(self, tokens, index_pos, cache, *, rows=None, all_positions=False, probe=None):
        return self._compute(tokens, index_pos, cache, rows)

    def step(self, tokens, index_pos, cache, sampling, *, rows=None, masks=None):
        logits = self._compute(tokens, index_pos, cache, rows)
        return self._sample(logits, cache, sampling, rows, masks)

    def sample(self, logits, cache, sampling, *, rows=None, masks=None):
        assert isinstance(logits, np.ndarray) and logits.dtype == np.float32
        logits = [[row.astype(np.float64)] for row in logits]
        return self._sample(logits, cache, sampling, rows, masks)

    def _sample(self, logits, cache, sampling, rows, masks):
        rows = range(len(logits)) if rows is None else rows
        assert len(rows) == len(sampling.options)
        recent = cache.recent(max(1, sampling.window), rows)
        self.backend.check_late_fault(cache, rows)
        masks = masks() if masks else [None] * len(logits)
        drawn = [
            [sampling.draw(i, logits[i][-1], cache.lengths[row], recent[i], masks[i])]
            for i, row in enumerate(rows)
        ]
        if sampling.logprobs is not None:
            last = np.array([scores[-1] for scores in logits], np.float32)
            drawn = pack_logprobs(words, np.array(drawn, np.int32), last, sampling.logprobs)
        return ToyArray(drawn)

    def verify(self, tokens, index_pos, cache, sampling, *, rows=None):
        logits = self._compute(tokens, index_pos, cache, rows)[0]
        row, drawn = 0 if rows is None else rows[0], []
        self.backend.check_late_fault(cache, [row])
        for i, scores in enumerate(logits):
            position = index_pos + i + 1
            recent = cache.recent(max(1, sampling.window), [row], [position])
            drawn.append(sampling.draw(0, scores, position, recent[0]))
        return ToyArray([drawn])

    def _compute(self, tokens, index_pos, cache, rows):
        is_array, backend = isinstance(tokens, ToyArray), self.backend
        tokens = tokens._values if is_array else checked_tokens(tokens, VOCABULARY)
        with cache.view(tokens, index_pos, rows) as view:
            backend.positions += view.batch * view.count
            backend.calls.append((view.batch, view.count))
            backend.check_fault(self, tokens, view)
            starts = [
                int(cache.keys[span.row][span.start - 1]) if span.start else 12345 + self.salt
                for span in view.spans
            ]
            if self.is_recurrent:
                (states,) = view.recurrent(0)
                numbers = states.view(np.int64)[:, 0].tolist()
                starts = [number or 12345 + self.salt for number in numbers]
            logits = [
                self._run_row(row_tokens, span, cache, start)
                for row_tokens, span, start in zip(tokens, view.spans, starts)
            ]
            if self.is_recurrent:
                keys = [[cache.keys[span.row][span.end - 1]] for span in view.spans]
                view.keep(0, (np.array(keys, np.int64).view(np.float32),))
            return logits

    def _run_row(self, tokens, span, cache, key):
        keys = cache.keys[span.row]
        logits = []
        trained, dynamic = self.config.max_position_embeddings, self.config.rope.type == "dynamic"
        # dynamic rope: keys depend on the length at their time
        turn = span.end if dynamic and span.end > trained else 0
        for position, token in zip(range(span.start, span.end), tokens.tolist()):
            key = (
                key * 6364136223846793005
                + token * 1442695040888963407
                + position * 7046029254386353131
                + turn
            ) & _MASK
            keys[position], cache.tokens[span.row][position] = key, token
            first = position if self.is_recurrent else 0
            if self.window:
                first = max(0, self.window.first(position))
            seen = slice(first, position + 1)
            logits.append(self._logits(keys[seen], cache.tokens[span.row][: position + 1]))
        return logits

    def _logits(self, keys, tokens):
        if self.period:
            scores = np.zeros(VOCABULARY)
            scores[tokens[max(0, len(tokens) - self.period)]] = 5
            return scores
        weights = np.arange(1, len(keys) + 1, dtype=np.int64) * 2654435761 + 97
        state = int((keys * weights).sum()) & 0xFFFFFFFF
        mixed = (np.arange(VOCABULARY, dtype=np.uint64) + 1) * np.uint64(
            0x9E3779B97F4A7C15
        ) ^ np.uint64(state * 0x2545F4914F6CDD1D & 0xFFFFFFFFFFFFFFFF)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        return (mixed >> np.uint64(40)).astype(np.float64) / (1 << 22)  # [0, 4)


class ToyBackend:
    """Counts launches, reads, calls and positions; fails where it is told to.

    memory: bytes that all rows may take. fault: called as fault(model, tokens [B, T], view) inside
    every call; may raise. late_fault: called as late_fault(cache, rows) once a step has stored its
    tokens, before it samples. read_fault: called with the arrays to read.
    """

    name, device, device_name = "toy", "toy", "a toy"

    def __init__(self, runs_ahead=False):
        self.runs_ahead, self.step_seconds = runs_ahead, 0.0
        self.memory = self.free = self.fault = self.late_fault = self.read_fault = None
        self.runtime = SimpleNamespace(
            free_memory=lambda device: self.free,
            to_numpy=self.wait_for_logits,
            launch=lambda arrays: self.launch(arrays),
            read=lambda tokens: self.read(tokens),
            is_out_of_memory=lambda error: isinstance(error, MemoryError),
        )
        self.clear()

    def clear(self):
        self.events, self.calls, self.positions, self.read_sizes, self.batches = [], [], 0, [], 0

    def check_fault(self, model, tokens, view):
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if self.fault:
            self.fault(model, tokens, view)

    def check_late_fault(self, cache, rows):
        if self.late_fault:
            self.late_fault(cache, rows)

    def sampling_batch(self, options):
        self.batches += 1
        return ToySampling(options)

    def launch(self, arrays):
        self.events.append("launch")

    def wait_for_logits(self, logits):
        self.events.append("logits")
        return np.array([row[-1] for row in logits], np.float32)

    def read(self, tokens):
        self.events.append("read")
        if self.read_fault:
            self.read_fault(tokens)
        self.read_sizes.append(sum(token.nbytes for token in tokens))
        return [token for array in tokens for token in array._values.flatten().tolist()]


class ToyTokenizer:
    """Token n is the letter n, with a comma now and then; decodes as a stream. The last letter is
    special.
    """

    byte_level, dropped_space, bos_id, special_ids, notices = True, None, None, {"X": 49}, ()

    def stream(self, *, skip_special=True, starts_text=True, shown=frozenset()):
        return ToyDecoder()

    def token_bytes(self):
        return [letter(token).encode() for token in range(VOCABULARY - 1)] + [None]

    def piece(self, token):
        return SimpleNamespace(data=letter(token).encode(), is_byte=False)

    def encode(self, text, add_bos=False):
        return [LETTERS.index(character) for character in text]

    def count_at_least(self, text):
        return 0

    def decode(self, tokens):
        return "".join(map(letter, tokens))


class ToyDecoder:
    def push(self, token):
        return letter(token)

    def data(self, token):
        return letter(token).encode()

    def finish(self):
        return ""


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"


def letter(token):
    return LETTERS[token]


CONTEXT, EOS = 1000, 49


def make(
    runs_ahead=False,
    *,
    eos=(EOS,),
    context=CONTEXT,
    draft=None,
    text=True,
    model=None,
    memory=None,
    **limits,
):
    """A backend and a loop on it. model, draft: keyword arguments of ToyModel. limits: of Loop."""
    backend = ToyBackend(runs_ahead)
    model = ToyModel(backend, **(model or {}))
    limits["draft"] = None if draft is None else ToyModel(backend, **draft)
    tokenizer = ToyTokenizer() if text else None
    return backend, Loop(
        backend, model, tokenizer, frozenset(eos), context, cache_memory=memory, **limits
    )


def request(prompt, text=True, **options):
    """A request with options, seed 0 unless given."""
    fields = {
        name: options.pop(name)
        for name in ("eos", "notify", "notices", "rule", "compile_seconds", "hooks")
        if name in options
    }
    return Request(prompt, resolve({"seed": 0, **options}), wants_text=text, **fields)


def alone(prompt, *, model=None, eos=(EOS,), context=CONTEXT, **options):
    """The completion of a request in a loop of its own: the judge of all batches."""
    options.pop("notify", None)
    _, loop = make(model=model, eos=eos, context=context)
    return loop.submit(request(prompt, **options)).finish()


def alone_tokens(prompts, **options):
    """The tokens of each prompt's own loop."""
    return [alone(prompt, **options).tokens for prompt in prompts]


def make_prompts(count, seed=0, longest=300):
    """Prompts of random lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, EOS, random.integers(1, longest)).tolist() for _ in range(count)]


def check_rows(loop):
    """Compare the host's knowledge of every row with the cache, count the rows, and compare each
    request's status with its queue."""
    scheduler = loop.scheduler
    rows, cache = scheduler.rows, scheduler.cache
    assert all(
        (sequence.status, sequence.row) == (Status.WAITING, NO_ROW)
        for sequence in scheduler.waiting
    )
    assert all(sequence.status is Status.RUNNING for sequence in scheduler.running)
    assert scheduler.prefilling is None or scheduler.prefilling.status is Status.PREFILLING
    alive = {sequence.row for sequence in scheduler.admitted}
    assert len(alive) == len(scheduler.admitted)
    assert alive == set(rows.used) and not alive & set(rows.kept)
    assert sorted([*rows.free, *rows.used, *rows.kept]) == list(range(cache.rows))
    for row in rows.free:
        assert cache.lengths[row] == cache.allocated[row] == 0
    for row, tokens in [*rows.used.items(), *rows.kept.items()]:
        length = min(len(tokens), cache.lengths[row])
        assert cache.tokens[row][:length].tolist() == tokens[:length]
        assert row in rows.used or 0 < cache.lengths[row] <= len(tokens)
    assert rows.budget is None or rows.nbytes <= rows.budget
    for drafts in loop.scheduler.drafts:
        drafts.trim_guesses()
        known = list(drafts.tokens[: drafts.length])
        assert drafts.cache.tokens[drafts.row][: len(known)].tolist() == known


def serve(loop, prompts, **options):
    return [loop.submit(request(prompt, **options)) for prompt in prompts]
