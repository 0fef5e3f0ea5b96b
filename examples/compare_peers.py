"""mlx_llama's CPU backend and llama.cpp in one alternating run over the same GGUF files.

    pip install -e ".[peers]"
    python examples/make_random_gguf.py tinyllama /tmp/models Q4_0
    python examples/compare_peers.py /tmp/models/tinyllama-Q4_0.gguf --depth 4000 --accuracy

Decoding is bound by the memory, and a shared machine's memory has faster and slower minutes. So each program has a
process of its own that stays loaded and is asked in turn, with the other one asleep; the memory is probed before and
after each answer; and what is compared is a pair of neighbouring answers, within one state of the memory where it has
two. Both run greedily on the same number of threads, llama.cpp with its defaults and its own sampler; logits never
leave it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"ours": "mlx_llama", "peer": "llama.cpp"}
CHUNK = 512  # prompt tokens per evaluation, llama.cpp's n_batch and n_ubatch
STEADY = 1.25  # bandwidths that differ by less are one state of the memory


def prompt_tokens(count: int, vocabulary: int) -> list[int]:
    """The same ids for every program; a shorter list is the beginning of a longer one."""
    return np.random.default_rng(0).integers(3, vocabulary, count).tolist()


class Ours:
    """mlx_llama's cpu backend, through the engine that every door uses. `threads` and `bits` None are its defaults."""

    def __init__(self, path: str, capacity: int, threads: int, bits: int | None):
        from mlx_llama import load
        from mlx_llama.core.engine import Engine

        llm = load(path, backend="cpu", threads=threads, activation_bits=bits)
        self.llm, self.model, self.vocabulary = llm, llm.model, llm.model.config.vocab_size
        self.engine = Engine(llm.backend, llm.model, None, frozenset(), capacity)  # no end tokens: every run is full
        self.cache = self.model.make_cache(capacity)

    def _run(self, tokens: list[int], count: int) -> Any:
        from mlx_llama.core import options
        from mlx_llama.core.engine import Completion

        resolved = options.resolve({"max_tokens": count, "temperature": 0.0, "prefill_step_size": CHUNK})
        completion = Completion(prompt_tokens=len(tokens))
        for _ in self.engine.tokens(tokens, self.cache, resolved, completion):
            pass
        return completion

    def prompt(self, count: int) -> float:
        """Seconds for a prompt of `count` tokens and the first token after it."""
        self.cache.trim(0)
        return self._run(prompt_tokens(count, self.vocabulary), 1).prefill_seconds

    def decode(self, depth: int, count: int) -> float:
        """Seconds for `count` tokens decoded after `depth` + 1 others."""
        tokens = prompt_tokens(depth + 1, self.vocabulary)
        self.cache.trim(min(depth, self.cache.length))
        self.engine.prefill(tokens[self.cache.length:depth], self.cache, CHUNK)
        seconds = self._run(tokens[depth:], count + 1).decode_seconds
        self.cache.trim(depth)
        return seconds

    def logits(self, count: int, file: str) -> None:
        """Save the logits [T, V] after each token of a prompt."""
        np.save(file, self.llm.logits(prompt_tokens(count, self.vocabulary)))


class Peer:
    """llama.cpp through llama-cpp-python's C interface, so that Python adds microseconds to a token."""

    def __init__(self, path: str, capacity: int, threads: int, bits: int | None):
        import llama_cpp

        self.api = llama_cpp
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C holds no reference
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        if not self.model:
            sys.exit(f"error: {path}: llama.cpp does not load this file")
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = capacity, CHUNK, CHUNK
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            sys.exit(f"error: {path}: llama.cpp has no room for a context of {capacity}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.greedy = llama_cpp.llama_sampler_init_greedy()
        self.length = 0

    def _trim(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, 0, length, -1)
        self.length = length

    def _append(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), CHUNK):
            part = tokens[start:start + CHUNK]
            ids = (ctypes.c_int32 * len(part))(*part)  # the batch only points to it
            if self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(part))) != 0:
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
        self._append(tokens[self.length:])
        token, started = self._next(), time.perf_counter()
        for _ in range(count):
            self._append([token])
            token = self._next()
        seconds = time.perf_counter() - started
        self._trim(depth)
        return seconds

    def logits(self, count: int, file: str) -> None:
        """Save the logits [T, V] after each token of a prompt."""
        self._trim(0)
        batch = self.api.llama_batch_init(count, 0, 1)
        batch.n_tokens = count
        for i, token in enumerate(prompt_tokens(count, self.vocabulary)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
        if self.api.llama_decode(self.context, batch) != 0:
            sys.exit("error: llama_decode failed")
        rows = [self.api.llama_get_logits_ith(self.context, i) for i in range(count)]
        np.save(file, np.stack([np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows]))
        self.api.llama_batch_free(batch)
        self._trim(0)


def reference_logits(path: str | os.PathLike, tokens: list[int]) -> np.ndarray:
    """Logits float64 [T, V] after each of `tokens`, of the whole model, computed in float64 from the weights as gguf's
    own dequantiser gives them, a block of rows at a time: what both programs approximate. Plain Llama files only.
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
        blocks = [x @ gguf.dequantize(data[i:i + 1024], kind).astype(np.float64).T for i in range(0, len(data), 1024)]
        bias = name.removesuffix("weight") + "bias"
        return np.concatenate(blocks, axis=1) + (vector(bias) if bias in tensors else 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + field("attention.layer_norm_rms_epsilon")) * vector(name)

    def rotate(x: np.ndarray) -> np.ndarray:  # x [T, H, D]; neighbours are a pair, as in llama.cpp's files
        pairs = x.reshape(*x.shape[:2], -1, 2)
        rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)[:, None, :]
        return np.stack([rotated.real, rotated.imag], axis=-1).reshape(x.shape)

    embedding, count = tensors["token_embd.weight"], len(tokens)
    heads, groups = field("attention.head_count"), field("attention.head_count_kv")
    head_dim = field("attention.key_length") if "llama.attention.key_length" in reader.fields \
        else field("embedding_length") // heads
    frequencies = field("rope.freq_base") ** (-np.arange(0, head_dim, 2) / head_dim)
    if "rope_freqs.weight" in tensors:
        frequencies = frequencies / vector("rope_freqs.weight")
    angles = np.arange(count)[:, None] * frequencies  # [T, D / 2]
    x = gguf.dequantize(embedding.data[tokens], embedding.tensor_type).astype(np.float64)
    for i in range(field("block_count")):
        block = f"blk.{i}."
        y = norm(x, f"{block}attn_norm.weight")
        query, key, value = (product(y, f"{block}attn_{part}.weight").reshape(count, -1, head_dim) for part in "qkv")
        query, key = rotate(query), rotate(key)
        key, value = (np.repeat(part, heads // groups, axis=1) for part in (key, value))
        scores = np.einsum("thd,shd->hts", query, key) / math.sqrt(head_dim)
        scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + product(np.einsum("hts,shd->thd", weights, value).reshape(count, -1), f"{block}attn_output.weight")
        y = norm(x, f"{block}ffn_norm.weight")
        gate = product(y, f"{block}ffn_gate.weight")
        x = x + product(gate / (1.0 + np.exp(-gate)) * product(y, f"{block}ffn_up.weight"), f"{block}ffn_down.weight")
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    return product(norm(x, "output_norm.weight"), head)


def peak_memory() -> int:
    """Most bytes this process has had in memory since its program was loaded."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss begins at what the parent process had
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    from mlx_llama.core import machine

    return machine.peak_memory()


def serve(program: str, path: str, capacity: int, threads: int, bits: int | None) -> int:
    """A program's process: load the model, say so, answer requests [method, arguments] with one line of JSON each."""
    answers = {"ours": Ours, "peer": Peer}[program](path, capacity, threads, bits)
    print(json.dumps("loaded"), flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        value = peak_memory() if method == "peak" else getattr(answers, method)(*arguments)
        print(json.dumps(value), flush=True)
    return 0


class Program:
    """A program's process, asleep until it is asked."""

    def __init__(self, name: str, path: str, capacity: int, threads: int, bits: int | None):
        settings = json.dumps([name, path, capacity, threads, bits])
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", settings], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.label = f"{NAMES[name]} on {path}"
        self._answer()  # loaded

    def ask(self, method: str, *arguments: Any) -> Any:
        """The answer to one request. Exits when the process has ended."""
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        # A process that ends by itself has said why on stderr, which it shares with this one.
        sys.exit(code if code > 0 else f"error: {self.label} was ended by signal {-code}")

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        if error[0]:
            self.process.kill()
        self.process.wait()


class Comparison:
    """Asks two programs in turn and keeps, for each figure, the pairs of answers with the bandwidths around them."""

    def __init__(self) -> None:
        from mlx_llama.bench_measure import HostMemory

        self.memory = HostMemory()
        self.bandwidths: list[float] = []  # every probe of the run
        self.probe()

    def probe(self) -> float:
        """Bytes per second now."""
        bandwidth = self.memory.bandwidth()
        time.sleep(0.05)  # the probe's own threads may spin for a while
        self.bandwidths.append(bandwidth)
        return bandwidth

    def alternate(self, asks: dict[str, Any], rounds: int) -> list[dict[str, Any]]:
        """[{"ours": value, "peer": value, "bandwidth": [before, between, after]}, ...], one per round."""
        pairs, before = [], self.probe()
        for _ in range(rounds):
            pair: dict[str, Any] = {"bandwidth": [before]}
            for name, ask in asks.items():
                pair[name] = ask()
                pair["bandwidth"].append(self.probe())
            before = pair["bandwidth"][-1]
            pairs.append(pair)
        return pairs

    def states(self) -> dict[str, tuple[float, float]]:
        """The memory's states in this run: name -> bandwidths it lies between. One, unless the probes fall apart."""
        low, high = np.percentile(self.bandwidths, [10, 90])
        if high / low < STEADY:
            return {"steady": (0.0, math.inf)}
        middle = math.sqrt(low * high)
        return {"fast": (middle, math.inf), "slow": (0.0, middle)}


def measure(path: str, given: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """Every pair of one file, by figure: rates in tokens per second, start in seconds, peak in bytes per byte of file."""
    size = os.path.getsize(path)
    capacity = max(given.depth, given.prompt) + given.generate + 2
    figures: dict[str, Any] = {"file": os.path.basename(path), "bytes": size}

    def programs(capacity: int) -> dict[str, Program]:
        return {name: Program(name, path, capacity, given.threads, given.activation_bits if name == "ours" else None)
                for name in NAMES}

    def rates(asked: dict[str, Program], count: int, method: str, *arguments: int) -> list[dict[str, Any]]:
        for program in asked.values():  # untimed: page faults, caches to fill
            program.ask(method, *arguments)
        return comparison.alternate({name: lambda program=program: count / program.ask(method, *arguments)
                                     for name, program in asked.items()}, given.rounds)

    both = programs(capacity)
    with both["ours"], both["peer"]:
        figures["prompt"] = rates(both, given.prompt, "prompt", given.prompt)
        figures["decode"] = rates(both, given.generate, "decode", given.prompt, given.generate)
        if given.depth:
            figures["deep"] = rates(both, given.generate, "decode", given.depth, given.generate)
        if given.accuracy:
            figures["error"] = [errors(path, both, given.accuracy)]
    if given.starts:
        peaks: dict[str, list[float]] = {name: [] for name in NAMES}

        def start(name: str) -> float:
            started = time.perf_counter()
            with Program(name, path, given.prompt + given.generate + 2, given.threads,
                         given.activation_bits if name == "ours" else None) as program:
                program.ask("prompt", given.prompt)
                seconds = time.perf_counter() - started
                program.ask("decode", given.prompt, given.generate)
                peaks[name].append(program.ask("peak") / size)
            return seconds

        figures["start"] = comparison.alternate({name: lambda name=name: start(name) for name in NAMES}, given.starts)
        figures["peak"] = [dict(zip(NAMES, pair)) for pair in zip(*peaks.values())]
    return figures


def errors(path: str, both: dict[str, Program], count: int) -> dict[str, float]:
    """Relative RMS error of each program's logits over a prompt of `count` tokens, against the float64 reference."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, program in both.items():
            file = os.path.join(folder, f"{name}.npy")
            program.ask("logits", count, file)
            found[name] = np.load(file)
    expected = reference_logits(path, prompt_tokens(count, found["peer"].shape[1]))
    return {name: float(np.sqrt(((logits - expected) ** 2).mean() / (expected ** 2).mean()))
            for name, logits in found.items()}


def summary(pairs: list[dict[str, Any]], low: float = 0.0, high: float = math.inf) -> dict[str, float] | None:
    """Medians of the pairs measured with the memory between two bandwidths: ours, peer, paired ratio, bytes/s, count."""
    pairs = [pair for pair in pairs if all(low <= bandwidth <= high for bandwidth in pair.get("bandwidth", ()))]
    if not pairs:
        return None
    result = {name: statistics.median(pair[name] for pair in pairs) for name in NAMES}
    result["ratio"] = statistics.median(pair["ours"] / pair["peer"] for pair in pairs)
    probes = [bandwidth for pair in pairs for bandwidth in pair.get("bandwidth", ())]
    return result | {"bandwidth": statistics.median(probes) if probes else 0.0, "pairs": len(pairs)}


def report(figures: dict[str, Any], given: argparse.Namespace, states: dict[str, tuple[float, float]]) -> str:
    """One file's figures for people."""
    rows = {"decode": f"decode after {given.prompt}, tokens/s", "prompt": f"prompt of {given.prompt}, tokens/s",
            "deep": f"decode after {given.depth}, tokens/s", "start": f"start to 1st token of {given.prompt}, s",
            "peak": "peak memory / file", "error": "relative error of logits"}
    bits = "" if given.activation_bits is None else f", activations of {given.activation_bits} bits"
    lines = [f"{figures['file']}: {figures['bytes'] / 1e9:.2f} GB, {given.threads} threads each{bits}",
             f"{'':30}{NAMES['ours']:>10}{NAMES['peer']:>10}{'ratio':>9}{'GB/s':>6}{'pairs':>6}"]

    def line(title: str, found: dict[str, float]) -> str:
        digits = ".1e" if title == rows["error"] else ".2f" if found["peer"] < 20 else ".1f"
        bandwidth = f"{found['bandwidth'] / 1e9:6.0f}" if found["bandwidth"] else " " * 6
        return (f"{title:30}{found['ours']:10{digits}}{found['peer']:10{digits}}{found['ratio']:8.3g}x{bandwidth}"
                f"{found['pairs']:6}")

    for key, title in rows.items():
        if key not in figures:
            continue
        lines.append(line(title, summary(figures[key])))
        if len(states) > 1 and key in ("decode", "prompt", "deep"):
            for state, between in states.items():
                if found := summary(figures[key], *between):
                    lines.append(line(f"  memory {state}", found))
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_argument("files", nargs="*", metavar="FILE.gguf")
    result.add_argument("--threads", type=int, default=cores, help=f"of each program (default here: {cores})")
    result.add_argument("--rounds", type=int, default=7, help="pairs per figure (default: 7)")
    result.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: 128)")
    result.add_argument("--generate", type=int, default=32, help="tokens decoded per answer (default: 32)")
    result.add_argument("--depth", type=int, default=0, help="decode at this depth too, such as 4000")
    result.add_argument("--starts", type=int, default=3, metavar="N",
                        help="pairs of fresh processes for start and peak memory; 0 leaves them out (default: 3)")
    result.add_argument("--accuracy", type=int, nargs="?", const=16, default=0, metavar="TOKENS",
                        help="compare the logits of a prompt (of 16 tokens) with the float64 product")
    result.add_argument("--activation-bits", type=int, choices=(8, 16, 32), default=None, help="of mlx_llama")
    result.add_argument("--json", action="store_true", help="print every pair as JSON")
    result.add_argument("--serve", help=argparse.SUPPRESS)
    return result


def main(arguments: list[str]) -> int:
    """Run the comparison; returns the exit code."""
    arguments_parser = parser()
    given = arguments_parser.parse_args(arguments)
    if given.serve:
        return serve(*json.loads(given.serve))
    if not given.files:
        arguments_parser.error("name at least one GGUF file")
    if min(given.threads, given.rounds, given.prompt, given.generate) < 1 or min(given.depth, given.starts) < 0:
        arguments_parser.error("--threads, --rounds, --prompt and --generate must be at least 1, no number negative")
    for package in ("llama_cpp", "gguf"):
        if importlib.util.find_spec(package) is None:
            sys.exit(f'error: {package} is not installed: pip install -e ".[peers]"')
    for path in given.files:
        if not os.path.isfile(path):
            sys.exit(f"error: {path}: there is no such file")
    comparison, results = Comparison(), []
    for path in given.files:
        results.append(measure(path, given, comparison))
        print(f"{path}: measured", file=sys.stderr, flush=True)
    # The memory's states are known only now, from all the probes of the run.
    states = comparison.states()
    if given.json:
        for result in results:
            for key, pairs in list(result.items()):
                if isinstance(pairs, list):
                    found = {state: summary(pairs, *between) for state, between in states.items()}
                    result[key] = {"all": summary(pairs), "states": found, "pairs": pairs}
        print(json.dumps({"threads": given.threads, "activation_bits": given.activation_bits, "prompt": given.prompt,
                          "generate": given.generate, "depth": given.depth, "results": results}, indent=1))
    else:
        print("\n\n".join(report(result, given, states) for result in results))
    return 0


if __name__ == "__main__":
    # mlx_llama's errors end in one line, as at its doors.
    from mlx_llama import cli

    sys.exit(cli.run(main))
