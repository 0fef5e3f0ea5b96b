"""A Llama as compiled programs: one for a decoded token, one for a part of a prompt, and the threads that walk them."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mlx_llama.core.errors import CheckpointError, ContextError
from mlx_llama.core.files.checkpoint import Tensor
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system import progress

from . import panels
from .layouts import GROUP, ROWS, SPAN, Form
from .panels import Arena, Panels, Plan
from .program import CONTEXT, Code, Program, Recipe, float_bits, pack_kind, product_kind, tile
from .target import Target

CHUNK = 288  # prompt tokens per run: what the workspace holds; whole tiles on every target
HEAD_CHUNK = 48  # tokens whose logits are computed at once; whole tiles too
WIDTH = SPAN * GROUP  # rows of floats are filled up to this, so that every layout's blocks are whole
NO_WINDOW = 1 << 60


class Buffer:
    """Zeros that begin on a cache line. address: of the first byte."""

    def __init__(self, *shape: int, dtype: type = np.float32):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.zeros(nbytes + 64, np.uint8)
        skip = -raw.ctypes.data % 64
        self.array = raw[skip:skip + nbytes].view(dtype).reshape(shape)
        self.address = self.array.ctypes.data

    @property
    def row_bytes(self) -> int:
        return self.array.strides[0]


class Team:
    """Threads that walk programs together, asleep in between. One run at a time; others wait for their turn.

    The caller's thread does not take part: an interrupt (Ctrl-C) only ever reaches the main thread of Python, and a run
    that one of its threads has left could not end.
    """

    def __init__(self, threads: int):
        self.threads = threads
        self._job: _Job | None = None
        if threads > 1:
            self._jobs: queue.SimpleQueue = queue.SimpleQueue()
            others = [queue.SimpleQueue() for _ in range(threads - 1)]
            done: queue.SimpleQueue = queue.SimpleQueue()
            threading.Thread(target=_lead, args=(self._jobs, others, done), daemon=True).start()
            for number, jobs in enumerate(others, 1):
                threading.Thread(target=_follow, args=(jobs, done, number), daemon=True).start()
            weakref.finalize(self, self._jobs.put, None)

    def run(self, program: Program, context: np.ndarray, *keep: object) -> None:
        """Walk the program; returns when it is done, also when interrupted (then the interrupt is raised).

        keep: what owns the memory that the context points to.
        """
        program.prepare(context)
        if self.threads == 1:
            program.walk(context, 0)
            return
        job = self._job = _Job(program, context, keep)
        interrupt: BaseException | None = None
        while not job.finished:
            try:
                self._jobs.put(job)  # again after an interrupt, which may have come before the first time: it is begun once
                job.wake.get()
            except BaseException as caught:
                interrupt = caught
        self._job = None
        if interrupt is not None:
            raise interrupt

    def settle(self) -> None:
        """Wait for a run that several interrupts in a row have left, before anything that it works on is used again."""
        while (job := self._job) is not None and not job.finished and not job.begin.acquire(blocking=False):
            job.wake.get()
        self._job = None


class _Job:
    """A run. begin: locked once, by whoever begins it or makes sure that nobody does. wake: gets an item at its end."""

    def __init__(self, program: Program, context: np.ndarray, keep: tuple[object, ...]):
        self.program, self.context, self.keep = program, context, keep
        self.begin = threading.Lock()
        self.finished = False
        self.wake: queue.SimpleQueue = queue.SimpleQueue()


def _lead(jobs: queue.SimpleQueue, others: list[queue.SimpleQueue], done: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        if job.begin.acquire(blocking=False):
            for other in others:
                other.put(job)
            job.program.walk(job.context, 0)
            for _ in others:
                done.get()
            job.finished = True
            job.wake.put(None)
        del job  # asleep, nothing is kept alive
    for other in others:
        other.put(None)


def _follow(jobs: queue.SimpleQueue, done: queue.SimpleQueue, number: int) -> None:
    while (job := jobs.get()) is not None:
        job.program.walk(job.context, number)
        del job
        done.put(None)


class CompiledLlama:
    """All matrices of a model in panels, and the programs that run it. Safe to share by threads: runs take turns.

    tensors: the checkpoint's. threads: that walk the programs. activation_bits: 8, 16 or 32, against low-bit weights;
    float weights are always multiplied with float32.

    Raises CheckpointError where memory does not suffice.
    """

    def __init__(self, config: LlamaConfig, tensors: Mapping[str, Tensor | AffineWeight], threads: int,
                 activation_bits: int, target: Target):
        self.config, self.target = config, target
        self.team = Team(threads)
        self._lock = threading.Lock()  # around the workspace
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        names = [name for name in tensors if len(tensors[name].shape) == 2
                 and (name != "model.embed_tokens.weight" or name == head)]
        plans = {name: Plan(tensors[name], panels.layout_of(tensors[name])) for name in names}
        sources = sorted({(plan.layout, plan.source) for plan in plans.values()}, key=lambda one: (one[0].name, one[1]))
        self.code = Code(Recipe(target, tuple(sources), activation_bits, config.head_dim))
        self.panels = self._fill(plans, threads)
        self.head = self.panels[head]
        self.nbytes = sum(plan.nbytes for plan in plans.values())
        self._vectors: list[Buffer] = []  # norms and biases, which the programs point to
        self._workspace(tensors)
        # A token is embedded, goes through all layers and is projected to the vocabulary. Of a prompt's last layer all tokens
        # need keys and values, but only those whose logits are asked for need what follows.
        layers, last = range(config.num_hidden_layers), config.num_hidden_layers - 1
        whole = [(part, i) for i in layers for part in (self._attention, self._feed_forward)]
        self.decode = self._program(tensors, True, [*whole, (self._head, last)])
        self.prompt = self._program(tensors, False, whole[:-1])
        self.last = self._program(tensors, True, [whole[-1], (self._head, last)])
        self.rest = self._program(tensors, False, whole[-1:])
        self.every = self._program(tensors, False, [(self._head, last)])

    def _fill(self, plans: dict[str, Plan], threads: int) -> dict[str, Panels]:
        size = sum(-(-plan.nbytes // Arena.ALIGN) * Arena.ALIGN for plan in plans.values())
        try:
            arena = Arena(size)
        except (OSError, MemoryError, OverflowError, ValueError):
            raise CheckpointError(f"the weights take {size / 1e9:.1f} GB of memory, which this machine does not give: "
                                  f"close other programs, or load a smaller or lower-bit model") from None
        found = {name: Panels(plan, arena, arena.take(plan.nbytes)) for name, plan in plans.items()}
        advance = progress.meter(sum(plan.tensor.nbytes for plan in plans.values()))
        with ThreadPoolExecutor(threads) as pool:
            waiting: list[tuple[Plan, list]] = []

            def collect(keep: int) -> None:
                while len(waiting) > keep:
                    plan, jobs = waiting.pop(0)
                    for job in jobs:
                        job.result()
                    plan.tensor.release()  # its panels are made: the file's pages may go
                    advance(plan.tensor.nbytes)

            for name, matrix in found.items():
                waiting.append((matrix.plan, panels.fill(
                    matrix, self.code.fill[matrix.plan.layout, matrix.plan.source], pool.submit)))
                collect(2)
            collect(0)
        return found

    def _workspace(self, tensors: Mapping[str, Tensor | AffineWeight]) -> None:
        c, threads = self.config, self.team.threads
        up = lambda width: -(-width // WIDTH) * WIDTH  # noqa: E731
        heads, key_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        filled = lambda width: -(-width // ROWS) * ROWS  # noqa: E731
        self.hidden = Buffer(CHUNK, up(c.hidden_size))
        self.keys_at, self.values_at = filled(heads), filled(heads) + filled(key_heads)
        self.qkv = Buffer(CHUNK, self.values_at + filled(key_heads))
        self.mixed = Buffer(CHUNK, up(heads))
        self.gate, self.up = Buffer(CHUNK, up(c.intermediate_size)), Buffer(CHUNK, up(c.intermediate_size))
        self.logits = Buffer(HEAD_CHUNK, filled(c.vocab_size))
        widest = max(up(width) for width in (c.hidden_size, heads, c.intermediate_size))
        self.activations = {form: Buffer(CHUNK * widest // WIDTH * form.record(1), dtype=np.uint8)
                            for form in self.code.recipe.forms}
        self.scratch = Buffer(threads, 16)
        self.sync = Buffer(16, dtype=np.int64)
        self.scores: np.ndarray | None = None
        self.context = np.zeros(len(CONTEXT), np.int64)
        self._set("window", c.sliding_window or NO_WINDOW)
        self._set("sync", self.sync.address)

    def _set(self, name: str, value: int) -> None:
        self.context[CONTEXT[name]] = value

    # ---- programs

    def _vector(self, values: np.ndarray) -> Buffer:
        """A norm's weight or a bias, filled up with zeros."""
        buffer = Buffer(-(-len(values) // WIDTH) * WIDTH)
        buffer.array[:len(values)] = values
        self._vectors.append(buffer)
        return buffer

    def _form(self, name: str) -> Form:
        return self.code.recipe.form_of(self.panels[name].plan.layout)

    def _pack(self, program: Program, source: str, consumers: list[str], a: Buffer, decode: bool, b: Buffer | None = None,
              b_per_token: bool = False, width: int = 1) -> None:
        """Make `a` into the form, or the forms, that the consuming matrices are multiplied with."""
        groups = a.array.shape[1] // GROUP
        if a.array.shape[1] % WIDTH or b is not None and b.array.shape[-1] < a.array.shape[1]:
            raise ValueError(f"rows of {a.array.shape} and {b and b.array.shape} are not whole spans of {WIDTH}")
        part = max(8, -(-groups // 64) * 8)  # a norm's sum is made for every part again, so at most eight of them
        forms = list(dict.fromkeys(self._form(name) for name in consumers))
        for form in forms:
            program.add(
                pack_kind(form, source, decode), -(-groups // part), per_token=True, wait=form is forms[-1],
                a=a.address, a_bytes=a.row_bytes, b=b.address if b else a.address,
                b_bytes=b.row_bytes if b and b_per_token else 0, groups=groups, part=part,
                x=self.activations[form].address, x_bytes=groups // SPAN * form.record(tile(self.target, form, decode)),
                width=float_bits(width), eps=float_bits(self.config.rms_norm_eps), scratch=self.scratch.address)

    def _product(self, program: Program, name: str, packed: Buffer, out: Buffer, decode: bool, at: int = 0,
                 accumulate: bool = False, bias: np.ndarray | None = None, wait: bool = True) -> None:
        """out[:, at:] = matrix `name` times what was packed last, from `packed`."""
        matrix = self.panels[name]
        plan, form = matrix.plan, self._form(name)
        columns = packed.array.shape[1]
        if plan.columns > columns or at + ROWS * plan.panels > out.array.shape[1] or bias is not None and len(bias) != plan.rows:
            raise ValueError(f"{name} {plan.tensor.shape} does not fit inputs of {columns}, outputs {out.array.shape} from {at} "
                             f"on, or its bias")
        portion = max(1, (1 << 16 if decode else 1 << 17) // plan.panel_bytes)
        portion = min(portion, max(1, plan.panels // (2 * self.team.threads)))
        if form.name == "float" and decode:
            portion = -(-portion // 4) * 4
        program.add(
            product_kind(plan.layout, decode), plan.panels, portion, wait=wait, weights=matrix.address,
            panel_bytes=plan.panel_bytes, blocks=plan.blocks, x=self.activations[form].address,
            x_bytes=columns // WIDTH * form.record(tile(self.target, form, decode)), out=out.address + 4 * at,
            out_bytes=out.row_bytes, bias=self._vector(bias).address if bias is not None else 0, accumulate=int(accumulate))

    def _program(self, tensors: Mapping[str, Tensor | AffineWeight], decode: bool, parts: list[tuple[Callable, int]]) -> Program:
        """The parts (function, layer), one after the other."""
        program = Program(self.code, self.team.threads)

        def vector(name: str) -> np.ndarray | None:
            return tensors[name].float32() if name in tensors else None

        for write, layer in parts:
            write(program, vector, decode, layer)
        return program.finish()

    def _attention(self, program: Program, vector: Callable, decode: bool, i: int) -> None:
        """hidden -> mixed, up to the output projection; keys and values go to the cache."""
        c, attention = self.config, f"model.layers.{i}.self_attn."
        projections = [(f"{attention}{name}_proj", at) for name, at in (("q", 0), ("k", self.keys_at), ("v", self.values_at))]
        norm = self._vector(vector(f"model.layers.{i}.input_layernorm.weight"))
        self._pack(program, "norm", [f"{name}.weight" for name, _ in projections], self.hidden, decode, norm, width=c.hidden_size)
        for name, at in projections:
            self._product(program, f"{name}.weight", self.hidden, self.qkv, decode, at, bias=vector(f"{name}.bias"),
                          wait=name.endswith("v_proj"))
        place = dict(qkv=self.qkv.address, qkv_bytes=self.qkv.row_bytes, key_heads=c.num_key_value_heads, layer=i)
        program.add("rotate", 1, per_token=True, heads=c.num_attention_heads, keys_at=4 * self.keys_at,
                    values_at=4 * self.values_at, **place)
        program.add("attend", c.num_key_value_heads, per_token=True, shared=c.num_attention_heads // c.num_key_value_heads,
                    out=self.mixed.address, out_bytes=self.mixed.row_bytes, **place)

    def _feed_forward(self, program: Program, vector: Callable, decode: bool, i: int) -> None:
        """mixed and hidden -> hidden: the output projection of the attention and the MLP."""
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        self._pack(program, "plain", [f"{attention}o_proj.weight"], self.mixed, decode)
        self._product(program, f"{attention}o_proj.weight", self.mixed, self.hidden, decode, accumulate=True,
                      bias=vector(f"{attention}o_proj.bias"))
        norm = self._vector(vector(f"model.layers.{i}.post_attention_layernorm.weight"))
        self._pack(program, "norm", [f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"], self.hidden, decode, norm,
                   width=self.config.hidden_size)
        for name, out in (("gate_proj", self.gate), ("up_proj", self.up)):
            self._product(program, f"{mlp}{name}.weight", self.hidden, out, decode, bias=vector(f"{mlp}{name}.bias"),
                          wait=out is self.up)
        self._pack(program, "silu", [f"{mlp}down_proj.weight"], self.gate, decode, self.up, b_per_token=True)
        self._product(program, f"{mlp}down_proj.weight", self.gate, self.hidden, decode, accumulate=True,
                      bias=vector(f"{mlp}down_proj.bias"))

    def _head(self, program: Program, vector: Callable, decode: bool, _: int) -> None:
        """hidden, from the context's first row on -> logits."""
        name = next(name for name, matrix in self.panels.items() if matrix is self.head)
        self._pack(program, "norm", [name], self.hidden, decode, self._vector(vector("model.norm.weight")),
                   width=self.config.hidden_size)
        self._product(program, name, self.hidden, self.logits, decode)

    # ---- running

    def forward(self, embed: Callable[[slice], np.ndarray], cache, every: bool) -> np.ndarray:
        """Logits after the tokens of the cache's current call, whose keys and values are stored in it.

        embed(part of the call's tokens) -> float32 [B, that many, E]. cache: after `begin`. Returns float32 [B, V] of the
        last position, or with `every` [B, T, V].
        """
        c = self.config
        if cache.config is not c and cache.config != c:
            raise ContextError("the cache was made by another model: use this model's make_cache")
        # Held here: what another thread does to the cache meanwhile may spoil an answer, but no memory.
        cosine, sine = cache.rope
        keys, values, addresses, position = cache.keys, cache.values, cache.addresses, cache.length
        count, batch = len(cosine), len(addresses)
        rooms = {array.shape[2] for array in (keys[0], values[0], keys[-1], values[-1])}
        if addresses.shape != (batch, c.num_hidden_layers, 2) or position + count > min(rooms):
            raise ValueError(f"{count} positions from {position} on do not fit a cache of {min(rooms)}, {addresses.shape}")
        for table in (cosine, sine):
            if table.shape != (count, c.head_dim // 2) or table.dtype != np.float32 or not table.flags.c_contiguous:
                raise ValueError(f"a rope table {table.dtype} {table.shape}, not float32 {(count, c.head_dim // 2)} in C order")
        results = np.empty((batch, count, c.vocab_size) if every else (batch, c.vocab_size), np.float32)
        with self._lock:
            self.team.settle()
            _, head_bytes, row_bytes, _ = keys[0].strides
            self._set("head_bytes", head_bytes)
            self._set("row_bytes", row_bytes)
            self._room_for_scores(max(rooms))
            for begin in range(0, count, CHUNK):
                end = min(begin + CHUNK, count)
                rows = embed(slice(begin, end))
                if rows.shape != (batch, end - begin, c.hidden_size):
                    raise ValueError(f"embeddings {rows.shape}, not {(batch, end - begin, c.hidden_size)}")
                self._set("cosine", cosine[begin:].ctypes.data)
                self._set("sine", sine[begin:].ctypes.data)
                for b, sequence in enumerate(rows):
                    self._set("caches", addresses[b].ctypes.data)
                    out = (results[b, begin:end] if every else results[b:b + 1]) if every or end == count else None
                    self._chunk(sequence, position + begin, out, every, (self, keys, values, addresses, cosine, sine))
        return results

    def _chunk(self, rows: np.ndarray, position: int, out: np.ndarray | None, every: bool, keep: tuple[object, ...]) -> None:
        """One run over at most CHUNK tokens. rows: their embeddings; out: where logits go, or None; keep: see Team.run."""
        tokens = len(rows)
        self._set("tokens", tokens)
        self._set("position", position)
        self._set("first_row", 0)
        self.hidden.array[:tokens, :rows.shape[1]] = rows
        self.hidden.array[:tokens, rows.shape[1]:] = 0  # an infinity of an earlier run may have left NaN there
        vocab = self.config.vocab_size
        if tokens == 1 and out is not None:
            self.team.run(self.decode, self.context, keep)
            out[0] = self.logits.array[0, :vocab]
            return
        self.team.run(self.prompt, self.context, keep)
        if out is None:
            return
        if not every:
            for buffer in (self.hidden, self.mixed):
                buffer.array[0] = buffer.array[tokens - 1]
            self._set("tokens", 1)
            self.team.run(self.last, self.context, keep)
            out[0] = self.logits.array[0, :vocab]
            return
        self.team.run(self.rest, self.context, keep)
        for first in range(0, tokens, HEAD_CHUNK):
            some = min(HEAD_CHUNK, tokens - first)
            self._set("tokens", some)
            self._set("first_row", first)
            self.team.run(self.every, self.context, keep)
            out[first:first + some] = self.logits.array[:some, :vocab]

    def _room_for_scores(self, positions: int) -> None:
        """Scratch for the scores of all heads that share a key head, for each thread."""
        c = self.config
        head_bytes = 4 * (-(-positions // 16) * 16 + 32)
        thread_bytes = head_bytes * (c.num_attention_heads // c.num_key_value_heads) + 64
        needed = thread_bytes * self.team.threads
        if self.scores is None or self.scores.nbytes < needed:
            self.scores = np.empty(needed, np.uint8)
        self._set("scores", self.scores.ctypes.data)
        self._set("scores_bytes", thread_bytes)
        self._set("scores_head_bytes", head_bytes)
