"""Compare mlx_llama and its peers in alternating runs over the same files: the cpu backend and llama.cpp over a GGUF
file, the mlx backend and mlx-lm, the cuda backend and transformers over a checkpoint folder.

    pip install -e ".[peers]"
    python examples/benchmarks/make_random_gguf.py tinyllama /tmp/models Q4_0
    python examples/benchmarks/compare_peers.py /tmp/models/tinyllama-Q4_0.gguf --depth 4000 --accuracy
    pip install -e ".[test]"
    python examples/benchmarks/compare_peers.py                        # a random checkpoint of 22 layers, made for the run
    python examples/benchmarks/compare_peers.py FOLDER --device gpu

Decoding is bound by memory bandwidth, which varies between minutes on a shared machine. So each program stays loaded in a
process of its own, and the two answer in turn, one asleep while the other works. A probe measures the bandwidth before
and after each answer. Ratios are of neighbouring answers, by state of the memory where it has two. Both programs run
greedily from the same tokens; llama.cpp, torch and the cpu backend on the same number of threads; peers with their
defaults. llama.cpp's logits stay in its memory. peers_checkpoint.py has the programs for folders.
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
from peers_checkpoint import CHUNK, PAIRS, PROGRAMS, Engined, agreement, pairs_here, prompt_tokens
from peers_rows import MlxLmRows, OursRows

NAMES = {"ours": "mlx_llama", "peer": "llama.cpp"}
STEADY = 1.25  # largest ratio of bandwidths within one state of the memory


class Ours(Engined):
    """mlx_llama's cpu backend. threads, bits: None for the defaults."""

    def __init__(self, path: str, capacity: int, threads: int, bits: int | None):
        from mlx_llama import load

        self.llm = load(path, backend="cpu", threads=threads, activation_bits=bits)
        super().__init__(self.llm.backend, self.llm.model, capacity)

    def logits(self, count: int, file: str) -> None:
        """Save the logits [T, V] after each token of a prompt."""
        np.save(file, self.llm.logits(prompt_tokens(count, self.vocabulary)))


class Peer:
    """llama.cpp through llama-cpp-python's C interface; Python adds microseconds to a token."""

    def __init__(self, path: str, capacity: int, threads: int, bits: int | None):
        import llama_cpp

        self.api = llama_cpp
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # keep a reference; C has none
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
            ids = (ctypes.c_int32 * len(part))(*part)  # the batch points to it
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
    """Logits float64 [T, V] after each of `tokens`: the judge of both programs. Plain Llama files only.

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
    """Peak resident bytes of this process since exec."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux's ru_maxrss includes the parent's peak
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    from mlx_llama.core.system import machine

    return machine.peak_memory()


def serve(program: str, path: str, capacity: int, threads: int, setting: Any) -> int:
    """Run a program's process: load the model, print "loaded", answer each request [method, arguments] by one JSON line."""
    programs = {"ours": Ours, "peer": Peer, "mlx-rows ours": OursRows, "mlx-rows peer": MlxLmRows} | PROGRAMS
    answers = programs[program](path, capacity, threads, setting)
    print(json.dumps("loaded"), flush=True)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        value = peak_memory() if method == "peak" else getattr(answers, method)(*arguments)
        print(json.dumps(value), flush=True)
    return 0


class Program:
    """Handle of a program's process, asleep between requests. setting: the last argument of the program's class."""

    def __init__(self, name: str, path: str, capacity: int, threads: int, setting: Any):
        settings = json.dumps([name, path, capacity, threads, setting])
        self.process = subprocess.Popen([sys.executable, __file__, "--serve", settings], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.label = f"{name} on {path}"
        self._answer()  # loaded

    def ask(self, method: str, *arguments: Any) -> Any:
        """The answer to one request. Exits if the process has ended."""
        self.process.stdin.write(json.dumps([method, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        code = self.process.wait()
        # A process that exits has printed its reason on stderr, which both share.
        sys.exit(code if code > 0 else f"error: {self.label} was ended by signal {-code}")

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stdin.close()
        if error[0]:
            self.process.kill()
        self.process.wait()


class Comparison:
    """Asks two programs in turn; for each figure, keeps pairs of answers with the bandwidths around them."""

    def __init__(self) -> None:
        from mlx_llama.bench.measure import HostMemory

        self.memory = HostMemory()
        self.bandwidths: list[float] = []  # every probe of the run
        self.probe()

    def probe(self) -> float:
        """Memory bandwidth now, in bytes per second."""
        bandwidth = self.memory.bandwidth()
        time.sleep(0.05)  # let the probe's threads stop spinning
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
        """{name of the memory's state in this run: (lowest, highest bandwidth)}: one state, or fast and slow."""
        low, high = np.percentile(self.bandwidths, [10, 90])
        if high / low < STEADY:
            return {"steady": (0.0, math.inf)}
        middle = math.sqrt(low * high)
        return {"fast": (middle, math.inf), "slow": (0.0, middle)}


def measure(path: str, given: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """All pairs of one file, by figure: rates in tokens per second, start in seconds, peak in bytes per byte of file."""
    size = os.path.getsize(path)
    capacity = max(given.depth, given.prompt) + given.generate + 2
    figures: dict[str, Any] = {"file": os.path.basename(path), "bytes": size}

    def programs(capacity: int) -> dict[str, Program]:
        return {name: Program(name, path, capacity, given.threads, given.activation_bits if name == "ours" else None)
                for name in NAMES}

    both = programs(capacity)
    with both["ours"], both["peer"]:
        figures["prompt"] = rates(both, given.rounds, comparison, given.prompt, "prompt", given.prompt)
        decoded = (given.rounds, comparison, given.generate, "decode")
        figures["decode"] = rates(both, *decoded, given.prompt, given.generate)
        if given.depth:
            figures["deep"] = rates(both, *decoded, given.depth, given.generate)
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


def rates(asked: dict[str, Program], rounds: int, comparison: Comparison, count: int, method: str,
          *arguments: int) -> list[dict[str, Any]]:
    """Pairs of rates: `count` divided by a method's seconds."""
    for program in asked.values():  # untimed: page faults, cold caches
        program.ask(method, *arguments)
    return comparison.alternate({name: lambda program=program: count / program.ask(method, *arguments)
                                 for name, program in asked.items()}, rounds)


def measure_folder(path: str, framework: str, given: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """All pairs of one checkpoint and framework, by figure, as `measure`; build and host in microseconds."""
    capacity = max(given.depth, given.prompt) + given.generate + 3
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    name = os.path.basename(os.path.abspath(path))
    figures: dict[str, Any] = {"file": name, "bytes": size, "names": PAIRS[framework][0]}
    setting = [given.device, given.compile if framework == "mlx" else None]
    both = {name: Program(f"{framework} {name}", path, capacity, given.threads, setting) for name in NAMES}
    with both["ours"], both["peer"]:
        figures["about"] = both["ours"].ask("about")
        figures["prompt"] = rates(both, given.rounds, comparison, given.prompt, "prompt", given.prompt)
        decoded = (given.rounds, comparison, given.generate, "decode")
        figures["decode"] = rates(both, *decoded, given.prompt, given.generate)
        if given.depth:
            figures["deep"] = rates(both, *decoded, given.depth, given.generate)
        figures["same_tokens"] = agreement(*(program.ask("tokens", given.prompt, given.generate)
                                             for program in both.values()))
        if framework == "mlx":
            pairs = comparison.alternate({name: lambda program=program: program.ask("host")
                                          for name, program in both.items()}, min(given.rounds, 3))
            for key in ("build", "host", "primitives"):
                figures[key] = [{name: pair[name][key] for name in NAMES} for pair in pairs]
    return figures


def measure_rows(path: str, framework: str, given: argparse.Namespace, comparison: Comparison) -> dict[str, Any]:
    """As `measure_folder`, of `given.rows` sequences in each step: tokens per second of all, host figures per step."""
    capacity = given.prompt + given.generate + 64  # a step ahead, and the steps of `host`
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    figures: dict[str, Any] = {"file": os.path.basename(os.path.abspath(path)), "bytes": size, "names": PAIRS[framework][0]}
    setting = [given.device, given.compile, given.rows]
    both = {name: Program(f"{framework} {name}", path, capacity, given.threads, setting) for name in NAMES}
    with both["ours"], both["peer"]:
        figures["about"] = both["ours"].ask("about")
        figures["decode"] = rates(both, given.rounds, comparison, given.generate * given.rows, "decode", given.prompt,
                                  given.generate)
        answers = [program.ask("tokens", given.prompt, given.generate) for program in both.values()]
        figures["same_tokens"] = min(agreement(*rows) for rows in zip(*answers))
        pairs = comparison.alternate({name: lambda program=program: program.ask("host") for name, program in both.items()},
                                     min(given.rounds, 3))
        for key in ("build", "host", "primitives"):
            figures[key] = [{name: pair[name][key] for name in NAMES} for pair in pairs]
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
    """Medians over pairs whose probes lie between two bandwidths: ours, peer, paired ratio, bytes per second, count."""
    pairs = [pair for pair in pairs if all(low <= bandwidth <= high for bandwidth in pair.get("bandwidth", ()))]
    if not pairs:
        return None
    result = {name: statistics.median(pair[name] for pair in pairs) for name in NAMES}
    result["ratio"] = statistics.median(pair["ours"] / pair["peer"] for pair in pairs)
    probes = [bandwidth for pair in pairs for bandwidth in pair.get("bandwidth", ())]
    return result | {"bandwidth": statistics.median(probes) if probes else 0.0, "pairs": len(pairs)}


def report(figures: dict[str, Any], given: argparse.Namespace, states: dict[str, tuple[float, float]]) -> str:
    """One file's figures as a table."""
    rows = {"decode": f"decode after {given.prompt}, tokens/s", "prompt": f"prompt of {given.prompt}, tokens/s",
            "deep": f"decode after {given.depth}, tokens/s", "start": f"start to 1st token of {given.prompt}, s",
            "peak": "peak memory / file", "error": "relative error of logits", "build": "build a step, us",
            "host": "build and launch, CPU us", "primitives": "primitives per step"}
    names = figures.get("names", NAMES)
    bits = "" if given.activation_bits is None else f", activations of {given.activation_bits} bits"
    how = figures.get("about") or f"{given.threads} threads each{bits}"
    wide = max(10, *(len(name) + 2 for name in names.values()))
    lines = [f"{figures['file']}: {figures['bytes'] / 1e9:.2f} GB, {how}",
             f"{'':30}{names['ours']:>{wide}}{names['peer']:>{wide}}{'ratio':>9}{'GB/s':>6}{'pairs':>6}"]

    def line(title: str, found: dict[str, float]) -> str:
        digits = ".1e" if title == rows["error"] else ".2f" if found["peer"] < 20 else ".1f"
        bandwidth = f"{found['bandwidth'] / 1e9:6.0f}" if found["bandwidth"] else " " * 6
        both = "".join(f"{found[name]:{wide}{digits}}" for name in NAMES)
        return f"{title:30}{both}{found['ratio']:8.3g}x{bandwidth}{found['pairs']:6}"

    for key, title in rows.items():
        if key not in figures:
            continue
        lines.append(line(title, summary(figures[key])))
        if len(states) > 1 and key in ("decode", "prompt", "deep"):
            for state, between in states.items():
                if found := summary(figures[key], *between):
                    lines.append(line(f"  memory {state}", found))
    if "same_tokens" in figures:
        lines.append(f"the first {figures['same_tokens']} of {given.generate + 1} decoded tokens are the same")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_argument("files", nargs="*", metavar="FILE.gguf or FOLDER",
                        help="default: a random checkpoint of 22 layers, made for the run")
    result.add_argument("--threads", type=int, default=cores,
                        help=f"of each program; MLX chooses its own (default here: {cores})")
    result.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS), metavar="BACKEND",
                        help="for folders: mlx (against mlx-lm), cuda (against transformers), mlx-rows (several sequences in "
                        "each step, against mlx-lm's batched generator); default: all")
    result.add_argument("--rows", type=int, default=8, help="sequences of mlx-rows, 1 to 32 (default: 8)")
    result.add_argument("--device", choices=("cpu", "gpu"), default=None,
                        help="for folders (default: a GPU if there is one)")
    result.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None,
                        help="for folders: trace mlx_llama's step on mlx as one graph, or do not")
    result.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
                        help="of the random checkpoint (default: float32; bfloat16 rounds so much that tokens differ)")
    result.add_argument("--rounds", type=int, default=None,
                        help="pairs per figure (default: 7, and 3 of the random checkpoint)")
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
    if given.rounds is None:
        given.rounds = 7 if given.files else 3
    if not 1 <= given.rows <= 32:
        arguments_parser.error("--rows must be between 1 and 32")
    if min(given.threads, given.rounds, given.prompt, given.generate) < 1 or min(given.depth, given.starts) < 0:
        arguments_parser.error("--threads, --rounds, --prompt and --generate must be at least 1, no number negative")
    folders = [path for path in given.files if os.path.isdir(path)]
    files = [path for path in given.files if path not in folders]
    for package in ("llama_cpp", "gguf") if files else ():
        if importlib.util.find_spec(package) is None:
            sys.exit(f'error: {package} is not installed: pip install -e ".[peers]"')
    for path in files:
        if not os.path.isfile(path):
            sys.exit(f"error: {path}: there is no such file")
    frameworks: list[str] = []
    if folders or not files:
        frameworks, reasons = pairs_here(given.pairs)
        for reason in reasons:
            print(reason, file=sys.stderr, flush=True)
        if not frameworks:
            sys.exit("error: no peer is installed: pip install mlx-lm transformers")
    comparison, results = Comparison(), []
    with tempfile.TemporaryDirectory() as made:
        if not given.files:
            from make_random_checkpoint import write

            folders = [os.path.join(made, "deep")]
            write(Path(folders[0]), "deep", given.dtype, 0)
        for path in files:
            results.append(measure(path, given, comparison))
            print(f"{path}: measured", file=sys.stderr, flush=True)
        for path in folders:
            for framework in frameworks:
                measured = measure_rows if framework == "mlx-rows" else measure_folder
                results.append(measured(path, framework, given, comparison))
                print(f"{path}: measured on {framework}", file=sys.stderr, flush=True)
    # States need the probes of the whole run.
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
    # Print mlx_llama's errors in one line, as its commands do.
    from mlx_llama import cli

    sys.exit(cli.run(main))
