"""Programs of compare_peers.py for GGUF files: mlx_llama's cpu backend, llama.cpp through
llama-cpp-python, and llama.cpp's llama-bench. And the logits of a file in float64, which judge
them.

    python examples/benchmarks/compare_peers.py FILE.gguf --llama-bench build/bin/llama-bench
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from peers_checkpoint import CHUNK, Engined, prompt_tokens

LLAMA_BENCH = "llama-bench"
TRIED = 1000  # tokens of depth at which llama-bench's attentions are compared
CACHE_TYPES = {None: "f16", 16: "f16", 8: "q8_0"}  # of llama.cpp's keys and values
CACHE_BITS = {None: 16, 16: 16, 8: 8.5}  # of a number in them, with its block's scale


class Ours(Engined):
    """mlx_llama's cpu backend. setting: [activation bits, bits of keys and values, flash attention
    of llama.cpp], None for the defaults."""

    def __init__(self, path: str, capacity: int, threads: int, setting: list[int | None]):
        from mlx_llama import load

        bits, cache_bits, _ = setting
        self.llm = load(
            path, backend="cpu", threads=threads, activation_bits=bits, cache_bits=cache_bits
        )
        super().__init__(self.llm.backend, self.llm.model, capacity)

    def position_bytes(self) -> int:
        """Bytes of one position's keys and values."""
        return self.model.make_cache(1).position_nbytes

    def logits(self, count: int, file: str) -> None:
        """Save the logits [T, V] after each token of a prompt."""
        np.save(file, self.llm.logits(prompt_tokens(count, self.vocabulary)))


class Peer:
    """llama.cpp through llama-cpp-python's C interface; Python adds microseconds a token. setting:
    as of Ours; gpu_layers: those on the GPU; rows: sequences of `decode_rows` at most, of
    `capacity` tokens together."""

    def __init__(
        self,
        path: str,
        capacity: int,
        threads: int,
        setting: list[int | None],
        gpu_layers: int = 0,
        rows: int = 1,
    ):
        import llama_cpp

        self.api = llama_cpp
        # keep a reference; C has none
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = gpu_layers
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            sys.exit(f"error: {path}: llama.cpp does not load this file")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = capacity, CHUNK, CHUNK
        settings.n_threads = settings.n_threads_batch = threads
        settings.n_seq_max, settings.kv_unified = rows, rows > 1
        if setting[1] is not None:
            settings.type_k = settings.type_v = getattr(
                llama_cpp, f"GGML_TYPE_{CACHE_TYPES[setting[1]].upper()}"
            )
        if setting[2] is not None:
            settings.flash_attn_type = int(setting[2])
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            sys.exit(f"error: {path}: llama.cpp has no room for a context of {capacity}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.greedy = llama_cpp.llama_sampler_init_greedy()
        self.length = 0

    def _trim(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, 0, length, -1)
        self.length = length

    def _append(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            ids = (ctypes.c_int32 * len(part))(*part)  # the batch points to it
            if (
                self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(part)))
                != 0
            ):
                sys.exit("error: llama_decode failed")
            self.length += len(part)

    def _next(self) -> int:
        return self.api.llama_sampler_sample(self.greedy, self.context, -1)

    def prompt(self, count: int) -> float:
        """Seconds for a prompt of `count` tokens and the first token after it."""
        tokens = prompt_tokens(count, self.vocabulary)
        self._trim(0)
        started = time.perf_counter()
        self._append(tokens)
        self._next()
        return time.perf_counter() - started

    def decode(self, depth: int, count: int) -> float:
        """Seconds for `count` tokens decoded after `depth` + 1 others."""
        tokens = prompt_tokens(depth + 1, self.vocabulary)
        self._trim(min(depth, self.length))
        self._append(tokens[self.length :])
        token, started = self._next(), time.perf_counter()
        for _ in range(count):
            self._append([token])
            token = self._next()
        seconds = time.perf_counter() - started
        self._trim(depth)
        return seconds

    def decode_rows(self, depth: int, count: int, rows: int) -> float:
        """Seconds for `count` tokens of each of `rows` sequences that share a prompt of `depth`
        tokens.
        """
        self._trim(0)
        self._append(prompt_tokens(depth, self.vocabulary))
        for row in range(1, rows):
            self.api.llama_memory_seq_cp(self.memory, 0, row, 0, depth)
        batch, tokens = self.api.llama_batch_init(rows, 0, 1), [self._next()] * rows
        batch.n_tokens, started = rows, 0.0
        for n in range(count + 1):
            for row, token in enumerate(tokens):
                (
                    batch.token[row],
                    batch.pos[row],
                    batch.n_seq_id[row],
                    batch.seq_id[row][0],
                    batch.logits[row],
                ) = (token, depth + n, 1, row, 1)
            if self.api.llama_decode(self.context, batch) != 0:
                sys.exit("error: llama_decode failed")
            tokens = [
                self.api.llama_sampler_sample(self.greedy, self.context, row) for row in range(rows)
            ]
            started = started or time.perf_counter()  # after a first step
        seconds = time.perf_counter() - started
        self.api.llama_batch_free(batch)
        for row in range(1, rows):
            self.api.llama_memory_seq_rm(self.memory, row, -1, -1)
        self._trim(0)
        return seconds

    def logits(self, count: int, file: str) -> None:
        """Save the logits [T, V] after each token of a prompt."""
        self._trim(0)
        batch = self.api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(prompt_tokens(count, self.vocabulary)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                token,
                i,
                1,
                0,
                1,
            )
        if self.api.llama_decode(self.context, batch) != 0:
            sys.exit("error: llama_decode failed")
        rows = [self.api.llama_get_logits_ith(self.context, i) for i in range(count)]
        np.save(file, np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows]))
        self.api.llama_batch_free(batch)
        self._trim(0)


class LlamaBench:
    """llama-bench, a new process for each answer, which warms itself up. Takes the place of a
    compare_peers.Program.

    flash: whether it uses flash attention; None: whichever `warm` finds faster, since its own
    choice halves its speed at depth on some processors.
    """

    def __init__(
        self,
        binary: str,
        path: str,
        threads: int,
        cache_bits: int | None,
        flash: bool | None,
        gpu_layers: int = 0,
    ):
        kind = CACHE_TYPES[cache_bits]
        self.path, self.asked = path, {"n_threads": threads, "type_k": kind, "type_v": kind}
        self.command = [binary, "-m", path, "-t", threads, "-ngl", gpu_layers, "-o", "json"]
        if cache_bits is not None:
            self.command += ["-ctk", kind, "-ctv", kind]
        self.attentions = (0, 1) if flash is None else (int(flash),)
        self.attention = self.attentions[-1]  # of all answers: flash attention or not

    def warm(self, method: str, *arguments: int) -> None:
        """Find the faster attention for these requests, at TRIED tokens of depth at most."""
        if method == "decode":
            arguments = min(arguments[0], TRIED), arguments[1]
        times = [
            self._run(method, *arguments, attention=attention, repeat=3)
            for attention in self.attentions
        ]
        self.attention = self.attentions[times.index(min(times))]

    def ask(self, method: str, *arguments: int, repeat: int = 1) -> float:
        """Seconds of "prompt" (count) or "decode" (depth, count), the median of `repeat`. Exits if
        llama-bench fails, or ran something else."""
        return self._run(method, *arguments, attention=self.attention, repeat=repeat)

    def _run(self, method: str, *arguments: int, attention: int, repeat: int) -> float:
        depth, prompt, generate = (
            (0, arguments[0], 0) if method == "prompt" else (arguments[0], 0, arguments[1])
        )
        command = [
            *self.command,
            "-fa",
            attention,
            "-p",
            prompt,
            "-n",
            generate,
            "-d",
            depth,
            "-r",
            repeat,
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
            sys.exit(f"error: {self.command[0]} on {self.path}: {reason[0]}")
        asked = self.asked | {
            "flash_attn": attention,
            "n_prompt": prompt,
            "n_gen": generate,
            "n_depth": depth,
        }
        try:
            (record,) = json.loads(done.stdout)
            wrong = {name: record[name] for name, value in asked.items() if record[name] != value}
            seconds = [nanoseconds / 1e9 for nanoseconds in record["samples_ns"]]
        except (ValueError, KeyError, TypeError):
            sys.exit(
                f"error: {self.command[0]}: its JSON is not understood: use a llama-bench from "
                "May 2025 on"
            )
        if wrong or len(seconds) != repeat:
            sys.exit(
                f"error: {self.command[0]} on {self.path}: ran {wrong or len(seconds)}, not "
                "what was asked for"
            )
        return statistics.median(seconds)

    def __enter__(self) -> LlamaBench:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Busy:
    """Processes that compute without end while the context lasts, or until this process ends."""

    SPIN = (
        "import os, sys\nparent = os.getppid()\nprint(flush=True)\n"
        "while os.getppid() == parent:\n    sum(range(1000000))\n"
    )

    def __init__(self, count: int):
        self.count = count

    def __enter__(self) -> Busy:
        self.processes = [
            subprocess.Popen([sys.executable, "-c", self.SPIN], stdout=subprocess.PIPE)
            for _ in range(self.count)
        ]
        for process in self.processes:
            process.stdout.readline()  # it runs
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def token_bytes(path: str) -> tuple[int, int]:
    """(bytes of the weights that a decoded token reads, numbers in one position's keys and values)
    of a file.
    """
    from mlx_llama.core.files.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    unread = 0 if c.tie_word_embeddings else checkpoint.tensors["model.embed_tokens.weight"].nbytes
    if c.num_experts:
        experts = sum(
            tensor.nbytes for name, tensor in checkpoint.tensors.items() if ".experts." in name
        )
        unread += experts - experts * c.num_experts_per_tok // c.num_experts
    return checkpoint.nbytes - unread, 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim


def reference_logits(path: str | os.PathLike, tokens: list[int]) -> np.ndarray:
    """Logits float64 [T, V] after each of `tokens`: the judge of both programs. Plain Llama files
    only.

    All arithmetic is float64, on weights that gguf dequantises, a block of rows at a time.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    def vector(name: str) -> np.ndarray:
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float64)

    def product(x: np.ndarray, name: str) -> np.ndarray:
        data, kind = tensors[name].data, tensors[name].tensor_type
        blocks = [
            x @ gguf.dequantize(data[i : i + 1024], kind).astype(np.float64).T
            for i in range(0, len(data), 1024)
        ]
        bias = name.removesuffix("weight") + "bias"
        return np.concatenate(blocks, axis=1) + (vector(bias) if bias in tensors else 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (
            x
            / np.sqrt(
                (x * x).mean(axis=1, keepdims=True) + field("attention.layer_norm_rms_epsilon")
            )
            * vector(name)
        )

    # x [T, H, D]; neighbours are a pair, as in llama.cpp's files
    def rotate(x: np.ndarray) -> np.ndarray:
        pairs = x.reshape(*x.shape[:2], -1, 2)
        rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None, :]
        return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)

    embedding, count = tensors["token_embd.weight"], len(tokens)
    heads, groups = field("attention.head_count"), field("attention.head_count_kv")
    head_dim = (
        field("attention.key_length")
        if "llama.attention.key_length" in reader.fields
        else field("embedding_length") // heads
    )
    frequencies = field("rope.freq_base") ** (-np.arange(0, head_dim, 2) / head_dim)
    if "rope_freqs.weight" in tensors:
        frequencies = frequencies / vector("rope_freqs.weight")
    angles = np.arange(count)[:, None] * frequencies  # [T, D / 2]
    x = gguf.dequantize(embedding.data[tokens], embedding.tensor_type).astype(np.float64)
    for i in range(field("block_count")):
        block = f"blk.{i}."
        y = norm(x, f"{block}attn_norm.weight")
        query, key, value = (
            product(y, f"{block}attn_{part}.weight").reshape(count, -1, head_dim) for part in "qkv"
        )
        query, key = rotate(query), rotate(key)
        key, value = (np.repeat(part, heads // groups, axis=1) for part in (key, value))
        scores = np.einsum("thd,shd->hts", query, key) / math.sqrt(head_dim)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + product(
            np.einsum("hts,shd->thd", weights, value).reshape(count, -1),
            f"{block}attn_output.weight",
        )
        y = norm(x, f"{block}ffn_norm.weight")
        gate = product(y, f"{block}ffn_gate.weight")
        x = x + product(
            gate / (1.0 + np.exp(-gate)) * product(y, f"{block}ffn_up.weight"),
            f"{block}ffn_down.weight",
        )
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    return product(norm(x, "output_norm.weight"), head)
