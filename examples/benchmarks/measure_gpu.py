"""Check and measure this package on a machine with a GPU: one command, no downloads, one Markdown
table.

    python examples/benchmarks/measure_gpu.py                    (NVIDIA with torch; MLX with CUDA or Metal)
    python examples/benchmarks/measure_gpu.py --backends mlx     (a Mac)
    python examples/benchmarks/measure_gpu.py --device cpu --shapes tiny --minutes 4    (all parts on CPUs, to try it)

First checks: kernels, low-bit products and a small model's logits and steps against float32; the
same bits in every run; the same tokens compiled and not. Then speed at real models' shapes with
random weights, in bfloat16, MLX's 4 bits, Q8_0 and Q4_K_M: this package and the peers that are
installed, each in a process of its own, one after the other: transformers with a static cache,
eager and compiled; vLLM; mlx-lm's way; llama.cpp, by its llama-bench and llama-batched-bench where
they are on the search path, else by llama-cpp-python. All decode greedily after the same number of
tokens. Decoding reads every weight once per token: its rate is a share of the bytes per second that
a copy on the device reads and writes. A prompt takes 2 operations per weight and token: its rate is
a share of a large bfloat16 product's. Rows are sequences that are decoded together: their rate is
that of all tokens. "ours invariant" computes prompts by the kernels of decoded tokens
(batch_invariant): the same bits with any chunks, and slower. Of 8b, 4 layers are measured where it
does not fit the device. Where there are two GPUs, torchrun splits a model over them, which must
give the tokens of one process (on CPUs with --processes 2). A part that fails prints its reason in
one line, the others go on, and the exit code is 1. Ctrl-C shows the results so far.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

if importlib.util.find_spec("mlx_llama") is None:  # run from a repository that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import random_weights
from make_random_checkpoint import write
from peers_checkpoint import prompt_tokens
from peers_gguf import LLAMA_BENCH
from peers_gpu import BATCH_COUNT, BATCHES, DEPTH, MLXLM, VLLM, LlamaCpp, Program, Transformers
from random_weights import FORMATS, MODELS, make_config, random_checkpoint, random_weight

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.files.quantized import AffineWeight

PACKAGES = {"cuda": "torch", "mlx": "mlx"}
# {(backend, format): peers}
PEERS = {
    ("cuda", "bf16"): ("transformers static", "transformers compiled", "vllm"),
    ("mlx", "bf16"): ("mlx-lm",),
    ("mlx", "4-bit"): ("mlx-lm",),
    **{(name, form): ("llama.cpp",) for name in PACKAGES for form in ("q8_0", "q4_k_m")},
}
PEER_PACKAGES = {
    "transformers": "transformers",
    "vllm": "vllm",
    "mlx-lm": "mlx_lm",
    "llama.cpp": "llama_cpp",
}
ROUNDS = 5  # repetitions at most
PEER_LIMIT = 300  # seconds for a peer to load, or to compile
# Bounds of errors. Of a product: largest difference over the root mean square of the right results.
# A result of 4 times that, rounded to bfloat16, is off by 0.016, and a library may round partial
# sums too. Of a model: norm of all differences over norm of the logits; 16-bit activations are
# rounded some ten times per layer.
PRODUCT_BOUNDS = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
LOGIT_BOUNDS = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
# largest difference of a peer's logits, both in 16 bits; above it, the peer runs another model
SAME_MODEL = 0.2

# Workers: one process per program; requests are lines of JSON


class Clocked:
    """A model, and its `backend` for the loop, with the seconds of each step, launch and read."""

    def __init__(self, backend: Any, model: Any):
        self._model = model
        self.seconds: dict[str, list[float]] = {name: [] for name in ("step", "launch", "read")}
        watched = {
            name: self._timed(name, getattr(backend.runtime, name)) for name in ("launch", "read")
        }
        self.backend = dataclasses.replace(
            backend, runtime=SimpleNamespace(**vars(backend.runtime) | watched)
        )
        self.step = self._timed("step", model.step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _timed(self, name: str, call: Callable) -> Callable:
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **named)
            self.seconds[name].append(time.perf_counter() - started)
            return result

        return timed

    def waits(self) -> int:
        """Number of reads, at which the host waits for the device."""
        return len(self.seconds["read"])

    def host_seconds(self) -> float:
        """Median seconds of host time per decoded token, without the prompt's launches."""
        steps, launches = self.seconds["step"][::-1], self.seconds["launch"][::-1]
        tokens = [step + launch for step, launch in zip(steps, launches)][:-1]
        return statistics.median(tokens or [0.0])


def bounded_check(what: str, name: str, error: float, bound: float) -> dict[str, Any]:
    """A check for the results. Infinity and NaN become the largest float: valid JSON, and above
    every bound.
    """
    error = float(error) if math.isfinite(error) else sys.float_info.max
    return {"what": what, "name": name, "error": error, "bound": bound, "ok": error <= bound}


def relative(values: np.ndarray, right: np.ndarray) -> float:
    """Norm of the differences over the norm of `right`."""
    return float(np.linalg.norm(values - right) / np.linalg.norm(right))


class Ours(Program):
    """This package's backend behind the scheduler of all commands."""

    def __init__(self, name: str, device: str):
        super().__init__(name, device)
        from mlx_llama.core.backends.selection import select

        self.backend = select(name, device)
        self.device, self.to_numpy = self.backend.device, self.backend.runtime.to_numpy
        if name == "mlx":
            import mlx.core as mx

            mx.set_default_device(self.device)

    def op_hello(self) -> dict[str, Any]:
        """Names and versions; the reason for missing low-bit kernels, or ""."""
        versions = {
            "python": platform.python_version(),
            PACKAGES[self.name]: find_version(PACKAGES[self.name]),
        }
        notice = ""
        if self.name == "cuda":
            from cuda_fallback.kernels import find_kernels

            kernels = find_kernels(self.device)
            versions["triton"] = find_version("triton")
            notice = (
                ""
                if kernels.packed
                else (kernels.notices or ("torch's own operations on the CPU device",))[0]
            )
        return {"device": self.backend.device_name, "versions": versions, "no_kernels": notice}

    def op_free_bytes(self) -> dict[str, Any]:
        return {"bytes": self.backend.runtime.free_memory(self.device)}

    def op_bounds(self) -> dict[str, float]:
        """Bytes per second that a copy on the device reads and writes; operations per second of a
        bfloat16 product.
        """
        nbytes, size = (
            (1 << 29, 8192 if self.name == "cuda" else 4096) if self.on_gpu else (1 << 26, 512)
        )
        if self.name == "cuda":
            import torch

            source = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            left = torch.full((size, size), 0.5, dtype=torch.bfloat16, device=self.device)
            wait = torch.cuda.synchronize if self.on_gpu else lambda: None
            copy, product = lambda: target.copy_(source), lambda: left @ left.T
        else:
            import mlx.core as mx

            source = mx.zeros(nbytes // 4, mx.float32)
            left = mx.full((size, size), 0.5, mx.bfloat16)
            mx.eval(source, left)
            wait, copy, product = (
                mx.synchronize,
                lambda: mx.async_eval(source + 1),
                lambda: mx.async_eval(left @ left.T),
            )

        def best(call: Callable, times: int = 5 if self.on_gpu else 1) -> float:
            seconds = []
            for _ in range(4):
                wait()
                started = time.perf_counter()
                for _ in range(times):
                    call()
                wait()
                seconds.append((time.perf_counter() - started) / times)
            return min(seconds[1:])

        bounds = {"copy": 2 * nbytes / best(copy), "product": 2 * size**3 / best(product)}
        source = left = target = None
        self.op_unload()
        return bounds

    # Proofs

    def product_error(
        self, judge: AffineWeight, weight: AffineWeight | None = None, dtype: str = ""
    ) -> float:
        """Largest error of this backend's products with `weight` (None: `judge` itself) against
        judge.float32().

        Relative to the root mean square of the right results; of one token, a few, a prompt's, and
        of single rows. dtype: of the activations; "" for the format's own.
        """
        dtype = self.backend.runtime.pick_dtype(
            dtype or judge.dtype, dtype or judge.dtype, self.device
        )
        quantized = importlib.import_module(self.backend.model.__package__ + ".quantized")
        if self.name == "cuda":
            import torch

            from cuda_fallback.kernels import find_kernels

            matrix = quantized.QuantizedMatrix.pack(
                [weight or judge], dtype, self.device, find_kernels(self.device).packed
            )

            def array(values: np.ndarray, dtype: Any = None) -> Any:
                return torch.from_numpy(values).to(self.device, dtype)
        else:
            import mlx.core as mx

            matrix, array = quantized.pack([weight or judge], dtype, self.device), mx.array

        def error(values: Any, right: np.ndarray) -> float:
            return np.abs(self.to_numpy(values) - right).max() / np.sqrt((right * right).mean())

        dense, rng, errors = judge.float32().astype(np.float64), np.random.default_rng(2), []
        for count in (1, 5, 40):
            x = array(rng.standard_normal((count, dense.shape[1]), np.float32), dtype)
            errors.append(error(matrix.matmul(x), self.to_numpy(x).astype(np.float64) @ dense.T))
        ids = np.array([[0, len(dense) - 1, 7]], np.int32)
        return float(max(*errors, error(matrix.rows(array(ids))[0], dense[ids[0]])))

    def op_check_products(self, seconds: float) -> dict[str, Any]:
        """Check every low-bit format; list those skipped for lack of time."""
        until, checks, skipped = time.perf_counter() + seconds, [], []
        # 264 rows are few enough for a kernel to split K; common formats are also checked with more
        # rows.
        jobs = [(kind, 264) for kind in random_weights.low_bit_kinds()]
        jobs[3:3] = [(kind, 2056) for kind, _ in jobs[:3]]
        for kind, rows in jobs:
            if time.perf_counter() > until:
                skipped.append(kind)
                continue
            weight = random_weight(kind, rows, 7168 if self.on_gpu else 512)
            checks.append(
                bounded_check(
                    "low-bit products",
                    f"{kind} x{rows}",
                    self.product_error(weight),
                    PRODUCT_BOUNDS[weight.dtype],
                )
            )
        return {
            "checks": checks,
            "left_out": f"no time left for {', '.join(skipped)}" if skipped else "",
        }

    def logits(self, model: Any, tokens: Sequence[int]) -> np.ndarray:
        """Logits float32 [T, V]: all but 8 tokens as a prompt, the rest one by one, as in
        decoding.
        """
        cache, start = model.make_cache(len(tokens)), len(tokens) - 8
        parts = [
            np.array([part], np.int32)
            for part in (tokens[:start], *([token] for token in tokens[start:]))
        ]
        return np.concatenate(
            [
                self.to_numpy(model.forward(part, cache.length, cache, all_positions=True))[0]
                for part in parts
            ]
        )

    def logit_error(
        self, checkpoint: Checkpoint, dtype: str, judge: Checkpoint | None = None
    ) -> tuple[float, bool, float]:
        """(relative error of the logits, True if a second run gives the same bits, the error that
        the dtype allows).

        The judge is the cpu backend at float32, of the checkpoint `judge` (None: the same).
        """
        from mlx_llama.core.backends.selection import select

        tokens = prompt_tokens(48, checkpoint.config.vocab_size)
        exact = select("cpu").load(judge or checkpoint, "float32", compile=False)
        right = exact.forward(
            np.array([tokens], np.int32), 0, exact.make_cache(len(tokens)), all_positions=True
        )[0]
        model = self.backend.load(checkpoint, dtype)
        first, second = self.logits(model, tokens), self.logits(model, tokens)
        bound = LOGIT_BOUNDS[model.dtype_name]
        return relative(first, right.astype(np.float64)), first.tobytes() == second.tobytes(), bound

    def op_check_logits(self, form: str) -> dict[str, Any]:
        """Check the tiny model at float32 and at its stored width."""
        checkpoint, checks = random_checkpoint("tiny", form), []
        for dtype in ("float32", "auto"):
            error, same, bound = self.logit_error(checkpoint, dtype)
            checks += [
                bounded_check("logits", f"{form} {dtype}", error, bound),
                {"what": "same bits", "name": f"{form} {dtype}", "ok": same},
            ]
        return {"checks": checks}

    def op_check_kernels(self) -> dict[str, Any]:
        """Check the cuda backend's kernels of a step, and measure their read rates."""
        import gpu_kernels

        return {
            "checks": [{"what": "kernels", **check} for check in gpu_kernels.check()],
            "rates": gpu_kernels.rates(),
        }

    def op_check_tokens(self, form: str, dtype: str) -> dict[str, Any]:
        """Sample tokens of the tiny model in two runs, and compiled: `left_out` is the reason on a
        backend that does not compile. And compare the cached keys and values with the cpu backend's
        at float32 for the same tokens."""
        from mlx_llama.core.backends.selection import select

        def sample(model: Any) -> tuple[list[int], dict[str, np.ndarray]]:
            completion, cache, _ = self._run(
                model, prompt_tokens(20, model.config.vocab_size), 24, temperature=0.8
            )
            return list(completion.tokens), cache.state()

        checkpoint, label, refused = random_checkpoint("tiny", form), f"{form} {dtype}", ""
        models = [self.backend.load(checkpoint, dtype, compile=False) for _ in range(2)]
        (plain, state), (again, _) = map(sample, models)
        checks = [{"what": "same tokens", "name": f"{label} twice", "ok": plain == again}]
        try:
            model = self.backend.load(checkpoint, dtype, compile=True)
            is_same = sample(model)[0] == plain
            refused = self._uncaptured(model)
            checks.append(
                {"what": "same tokens", "name": f"{label} compiled", "ok": is_same and not refused}
            )
        except BackendError as error:
            refused = str(error)
        exact = select("cpu").load(checkpoint, "float32", compile=False)
        cache = exact.make_cache(len(state["tokens"]))
        exact.forward(state["tokens"][None], 0, cache)
        right = cache.state()
        error = max(relative(state[part], right[part]) for part in ("keys", "values"))
        checks.append(
            bounded_check(
                "steps",
                label,
                error,
                LOGIT_BOUNDS[models[0].dtype_name],
            )
        )
        return {"checks": checks, "left_out": refused}

    def _uncaptured(self, model: Any) -> str:
        """The reason that a model does not decode by a captured graph as asked, or ""."""
        if self.name != "cuda" or any(
            "captured as a CUDA graph" in notice for notice in model.notices
        ):
            return ""
        return "; ".join(model.notices) or "no step was captured"

    # Speed

    def op_load(
        self, shape: str, form: str, compile: bool, batch_invariant: bool = False
    ) -> dict[str, Any]:
        """Load a model. Returns the bytes of its weights (read: of those that a token reads) and
        some logits after a short prompt; or the reason in `refused`."""
        started = time.perf_counter()
        checkpoint, self.compile = random_checkpoint(shape, form), compile
        self._reset_peak()
        try:
            self.model = self.backend.load(
                checkpoint, "auto", compile=compile, batch_invariant=batch_invariant
            )
        except BackendError as error:
            return {"refused": str(error)}
        self.nbytes = checkpoint.nbytes
        peak = self._peak(0)
        tokens = prompt_tokens(16, checkpoint.config.vocab_size)
        logits = self.to_numpy(
            self.model.forward(np.array([tokens], np.int32), 0, self.model.make_cache(16))
        )[0]
        if not np.isfinite(logits).all():
            raise ArithmeticError(
                f"{int((~np.isfinite(logits)).sum())} of {logits.size} logits are not finite"
            )
        return {
            "nbytes": self.nbytes,
            "seconds": time.perf_counter() - started,
            "logits": logits[:1000].tolist(),
            "peak": peak,
            "read": self.nbytes - checkpoint.tensors["model.embed_tokens.weight"].nbytes,
        }

    def op_unload(self) -> dict[str, Any]:
        """Release the model's memory."""
        self.model = None
        gc.collect()
        if self.name == "mlx":
            import mlx.core as mx

            mx.clear_cache()
        elif self.on_gpu:
            import torch

            torch.cuda.empty_cache()
        return {}

    def _run(
        self, model: Any, tokens: list[int], count: int, **asked: Any
    ) -> tuple[Any, Any, Clocked]:
        """(completion of `count` tokens, cache, clocks)."""
        from mlx_llama.core import options
        from mlx_llama.core.engine.loop import Loop
        from mlx_llama.core.engine.request import Request

        clocked = Clocked(self.backend, model)
        loop = Loop(clocked.backend, clocked, None, frozenset(), len(tokens) + count, max_rows=1)
        resolved = options.resolve({"max_tokens": count, "temperature": 0.0, "seed": 7, **asked})
        return (
            loop.submit(Request(tokens, resolved, wants_text=False)).finish(),
            loop.scheduler.cache,
            clocked,
        )

    def _require_captured(self) -> None:
        if self.compile and (reason := self._uncaptured(self.model)):
            raise RuntimeError(f"what was to be captured ran step by step: {reason}")

    def op_decode(self, depth: int, count: int) -> dict[str, Any]:
        self._reset_peak()
        completion, cache, clocked = self._run(
            self.model, prompt_tokens(depth, self.model.config.vocab_size), count + 1
        )
        if count > 2:
            self._require_captured()
        return {
            "rate": completion.decode_tps,
            "host": clocked.host_seconds(),
            "waits": clocked.waits() / len(completion.tokens),
            "peak": self._peak(cache.nbytes),
        }

    def op_prefill(self, count: int) -> dict[str, Any]:
        self._reset_peak()
        completion, cache, _ = self._run(
            self.model, prompt_tokens(count, self.model.config.vocab_size), 1
        )
        return {"rate": completion.prompt_tps, "peak": self._peak(cache.nbytes)}

    def op_rows(self, depth: int, count: int, batch: int) -> dict[str, Any]:
        from mlx_llama.core.backends import decoding

        cache = self.model.make_cache(depth + count + 4, batch)
        tokens = decoding.prefill(
            self.backend, self.model, cache, {0: prompt_tokens(depth, self.model.config.vocab_size)}
        )
        for row in range(1, batch):
            cache.copy_prefix(0, row, depth)
        steps = decoding.decode(self.backend, self.model, cache, tokens * batch, count + 3)
        for _ in range(3):  # compile, capture, replay
            next(steps)
        self._require_captured()
        started = time.perf_counter()
        for _ in steps:
            pass
        return {"rate": batch * count / (time.perf_counter() - started)}

    def op_operations(self) -> dict[str, int]:
        """Primitives in MLX's graph of one step."""
        import mlx.core as mx

        from mlx_llama.core.backends.decoding import GREEDY

        draw, cache = self.backend.sampling_batch([GREEDY]), self.model.make_cache(64)
        token = self.model.step(np.array([[1, 2, 3]], np.int32), 0, cache, draw)
        mx.eval(token, cache.arrays())
        return {
            "count": self.backend.runtime.primitives(
                [self.model.step(token, 3, cache, draw), *cache.arrays()]
            )
        }

    def _reset_peak(self) -> None:
        if self.name == "mlx":
            import mlx.core as mx

            mx.reset_peak_memory()
        elif self.on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self, cache_bytes: int) -> float | None:
        """Peak bytes allocated per byte of weights and cache; None on torch's CPU device, which has
        no counter.
        """
        if self.name == "cuda" and not self.on_gpu:
            return None
        return self.backend.runtime.peak_memory(self.device) / (self.nbytes + cache_bytes)


PROGRAMS = {
    "ours": Ours,
    "transformers": Transformers,
    "vllm": VLLM,
    "mlx-lm": MLXLM,
    "llama.cpp": LlamaCpp,
}


def find_version(package: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version({"llama_cpp": "llama_cpp_python"}.get(package, package))
    return "none"


def one_line(error: BaseException) -> str:
    """An exception's message in one line."""
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {text}"[:300]
        if not isinstance(error, BackendError)
        else text[:300]
    )


def serve(name: str, side: str, device: str) -> None:
    """Answer requests [op, arguments] on stdin by one line of JSON each, until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries' output is no answer
    program = None
    for line in sys.stdin:
        op, arguments = json.loads(line)
        try:
            program = program or PROGRAMS[side](name, device)
            answer = getattr(program, "op_" + op)(**arguments)
        except Exception as error:  # noqa: BLE001: any error is this part's reason
            answer = {"error": one_line(error), "trace": traceback.format_exc()[-3000:]}
        print(json.dumps(answer), file=out, flush=True)


# The command: asks the workers, keeps to the time, shows the results


def serve_processes(folder: str, name: str, device: str, count: str) -> None:
    """Decode `count` greedy tokens with the model in `folder`, in one process or in each of a
    launcher's, and print a JSON object: tokens at float32, and tokens per second at the stored
    width."""
    from mlx_llama.core.backends.selection import select
    from mlx_llama.core.system.forks import find_launcher
    from mlx_llama.distributed.following import follow_leader

    if (launcher := find_launcher()) and follow_leader(launcher):
        return
    from mlx_llama.core.engine.loop import Loop
    from mlx_llama.core.engine.request import Request
    from mlx_llama.core.files.checkpoint import open_checkpoint
    from mlx_llama.core.options import resolve

    backend, checkpoint, answer = select(name, device), open_checkpoint(folder), {}
    options = resolve({"temperature": 0.0, "max_tokens": int(count), "seed": 0})
    for dtype in ("float32", "auto"):
        loop = Loop(backend, backend.load(checkpoint, dtype), None, frozenset(), 512)
        for _ in range(3):  # compile, capture, replay
            request = Request(
                prompt_tokens(64, checkpoint.config.vocab_size), options, wants_text=False
            )
            completion = loop.submit(request).finish()
        answer |= (
            {"tokens": list(map(int, completion.tokens))}
            if dtype == "float32"
            else {"rate": completion.decode_tps}
        )
        del loop
        gc.collect()
    print(json.dumps(answer))


class PartError(Exception):
    """A part that failed: its reason in one line, and the worker's traceback if there is one."""

    def __init__(self, reason: str, trace: str = ""):
        super().__init__(reason)
        self.trace = trace


class NoTime(PartError):
    """The command's time ended before a part."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Worker:
    """A process that runs one Program."""

    def __init__(self, name: str, side: str, device: str):
        self.log, self.is_late = tempfile.TemporaryFile(), False
        # On shared cores, threads of one operation wait longer than they work. MLX reads the other
        # at its first product.
        settings = {"MLX_ENABLE_TF32": "0", **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {})}
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", name, side, device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            encoding="utf-8",
            start_new_session=True,
            env=os.environ | settings,
        )

    def ask(self, op: str, arguments: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer. Raises PartError and ends the process: an error may leave a GPU's context
        unusable.
        """

        def stop() -> None:
            self.is_late = True
            self.close()

        timer = threading.Timer(max(seconds, 0.1), stop)
        # else Python waits for it at exit where Ctrl-C comes before the finally
        timer.daemon = True
        try:
            timer.start()
            print(json.dumps([op, arguments]), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:  # it died
            line = ""
        finally:
            timer.cancel()
        answer = json.loads(line or "{}")
        if line and "error" not in answer:
            return answer
        self.close()
        if line:
            raise PartError(answer["error"], answer["trace"])
        if self.is_late:
            raise PartError(f"did not end within {seconds:.0f} s")
        self.log.seek(0)
        last = self.log.read().decode(errors="replace").strip().splitlines()[-1:] or [""]
        raise PartError(f"its process ended with code {self.process.wait()}: {last[0][:200]}")

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(OSError):
                if os.name == "posix":
                    os.killpg(self.process.pid, signal.SIGKILL)  # with its compilers
                else:
                    self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may delay its end
                self.process.wait(5)


class Slot(NamedTuple):
    """A part's time: starts nothing new after `soft`, is killed at `hard` (time.perf_counter's
    seconds).
    """

    soft: float
    hard: float


class Side(NamedTuple):
    """A line of the table ("ours compiled", "mlx-lm" ...), the program that runs it, and its
    options.
    """

    variant: str
    program: str
    compile: bool
    options: dict[str, bool] = {}  # of Backend.load besides


@dataclasses.dataclass
class Shared:
    """State that the sides of one model share.

    count, prompt: tokens to decode and of the prompt; is_fitted: they fit the time. bounds: of
    op_bounds. read: bytes of weights that a token reads, 0 if unknown. logits: some, by program.
    """

    model: tuple[str, str, str]  # backend, shape, form
    count: int
    prompt: int
    bounds: dict[str, float]
    read: int = 0
    is_fitted: bool = False
    logits: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Measurement:
    """Runs all parts in turn; `result` is printed by --json."""

    def __init__(self, args: argparse.Namespace, backends: list[str], explicit: bool):
        self.args, self.explicit, self.backends = args, explicit, backends
        self.on_gpu = args.device == "gpu"
        self.started = time.perf_counter()
        self.end = self.started + 60 * args.minutes - min(3, 6 * args.minutes)
        self.weights = 0.0  # of the remaining parts, which share the time
        self.workers: dict[tuple[str, str], Worker] = {}
        self.result: dict[str, Any] = {
            "device": args.device,
            "shapes": args.shapes,
            "depth": DEPTH,
            "machine": {},
            "bounds": {},
            "checks": [],
            "kernel_rates": {},
            "rows": [],
            "processes": [],
            "left_out": [],
            "failed": [],
            "interrupted": False,
            "seconds": 0.0,
        }

    def run(self) -> None:
        plan = [(name, self.parts(name)) for name in self.backends]
        self.weights = sum(weight for _, parts in plan for weight, _, _ in parts)
        for name, parts in plan:
            for number, (weight, label, call) in enumerate(parts):
                try:
                    call(self.slot(weight))
                except NoTime as error:
                    self.leave_out(label, str(error))
                except Exception as error:  # noqa: BLE001: a fault in this file must not end the other parts
                    is_known = isinstance(error, PartError)
                    reason, trace = (
                        (str(error), error.trace)
                        if is_known
                        else (one_line(error), traceback.format_exc())
                    )
                    if number or self.explicit:
                        self.fail(label, reason, trace)
                    else:
                        self.leave_out(label, reason)
                else:
                    continue
                if number == 0:  # it does not even start
                    self.weights -= sum(weight for weight, _, _ in parts[1:])
                    break
            self.close()
        if not self.result["machine"] and not self.result["failed"]:
            self.fail("all", "there is no backend to measure here")

    def slot(self, weight: float) -> Slot:
        """A part's share of the time. Raises NoTime."""
        now, share = time.perf_counter(), weight / self.weights
        self.weights -= weight
        left = self.end - now
        if left < 1:
            raise NoTime("no time left")
        # leave time for others after a part that hangs
        return Slot(now + left * share, now + left * min(1, max(3 * share, 0.15)))

    def parts(self, name: str) -> list[tuple[float, str, Callable[[Slot], Any]]]:
        """(weight, label, call) of a backend's parts; the first opens the backend."""
        tokens = [("bf16", "float32"), ("bf16", "auto"), ("4-bit", "auto"), ("q8_0", "auto")]
        if name == "mlx" and not self.on_gpu:
            tokens = tokens[:2]  # MLX's CPU device calls a C++ compiler for every kernel
        parts: list[tuple[float, str, Callable[[Slot], Any]]] = [
            (1, name, lambda slot: self.open(name, slot))
        ]
        if name == "cuda" and self.on_gpu:
            parts.append((2, f"{name} kernels", lambda slot: self.kernels(name, slot)))
        parts += [
            (
                4 if self.on_gpu else 2,
                f"{name} low-bit products",
                lambda slot: self.prove(
                    name, "products", slot, seconds=slot.soft - time.perf_counter()
                ),
            ),
            (
                1,
                f"{name} logits",
                lambda slot: [self.prove(name, "logits", slot, form=form) for form in FORMATS],
            ),
            (
                1,
                f"{name} tokens",
                lambda slot: [
                    self.prove(name, "tokens", slot, form=form, dtype=dtype)
                    for form, dtype in tokens
                ],
            ),
        ]
        if name == "cuda" and self.args.processes != 1:
            parts.append((2, f"{name} processes", lambda slot: self.processes(name, slot)))
        for shape in self.args.shapes:
            for form in FORMATS:
                weight = {"tiny": 1, "1.1b": 2, "8b-4": 2, "8b": 4}[shape] * (
                    2 if form == "bf16" else 1
                )
                parts.append(
                    (
                        weight,
                        f"{name} {shape} {form}",
                        lambda slot, shape=shape, form=form: self.measure(name, shape, form, slot),
                    )
                )
        return parts

    def fail(self, part: str, reason: str, trace: str = "") -> None:
        say(f"{part}: FAILED: {reason}\n{trace}".rstrip())
        self.result["failed"].append({"part": part, "reason": reason, "trace": trace})

    def leave_out(self, part: str, reason: str) -> None:
        if {"part": part, "reason": reason} not in self.result["left_out"]:
            say(f"{part}: left out: {reason}")
            self.result["left_out"].append({"part": part, "reason": reason})

    def ask(
        self, name: str, side: str, slot: Slot, op: str, limit: float = math.inf, **arguments: Any
    ) -> dict[str, Any]:
        """Raises PartError."""
        if time.perf_counter() > self.end:
            raise NoTime("no time left")
        worker = self.workers.get((name, side))
        if worker is None or worker.process.poll() is not None:
            worker = self.workers[name, side] = Worker(name, side, self.args.device)
        try:
            return worker.ask(op, arguments, min(slot.hard - time.perf_counter(), limit))
        except PartError as error:
            now = time.perf_counter()
            # Give CPUs more time; a silent GPU hangs.
            if now > self.end or (not self.on_gpu and now >= slot.hard):
                raise NoTime(f"no time left ({error})") from None
            raise

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    # Proofs

    def open(self, name: str, slot: Slot) -> None:
        """Start the backend, and report peers that are missing."""
        machine = self.result["machine"][name] = self.ask(name, "ours", slot, "hello")
        peers = [peer for (backend, _), some in PEERS.items() if backend == name for peer in some]
        for peer in dict.fromkeys(peer.split()[0] for peer in peers):
            if reason := self.find_missing(peer):
                self.leave_out(f"{name} beside {peer}", reason)
            else:
                has_bench = peer == "llama.cpp" and shutil.which(LLAMA_BENCH)
                machine["versions"][peer] = (
                    LLAMA_BENCH if has_bench else find_version(PEER_PACKAGES[peer])
                )
        say(
            f"{name}: {machine['device']}, "
            f"{', '.join(f'{key} {value}' for key, value in machine['versions'].items())}"
        )
        if machine["no_kernels"] and self.on_gpu:
            (self.fail if self.explicit else self.leave_out)(
                f"{name} kernels", machine["no_kernels"]
            )

    def find_missing(self, peer: str) -> str:
        """Reason why a peer cannot run here, or ""."""
        if peer == "vllm" and not self.on_gpu:
            return "it is measured on GPUs only"
        package = PEER_PACKAGES[peer]
        if importlib.util.find_spec(package) or (peer == "llama.cpp" and shutil.which(LLAMA_BENCH)):
            return ""
        return f"the package {package} is not installed" + (
            f", nor {LLAMA_BENCH}" if peer == "llama.cpp" else ""
        )

    def check(self, name: str, checks: list[dict[str, Any]]) -> None:
        """Add checks to the results; those that fail make the part fail."""
        for what in dict.fromkeys(check["what"] for check in checks):
            some = [check for check in checks if check["what"] == what]
            self.result["checks"] += [{"backend": name, **check} for check in some]
            bad = [
                check["name"]
                + (
                    f": {check['error']:.2g}, allowed {check['bound']:.2g}"
                    if "error" in check
                    else ""
                )
                for check in some
                if not check["ok"]
            ]
            if bad:
                self.fail(f"{name} {what}", "; ".join(bad))
            say(f"{name} {what}: {len(some) - len(bad)} of {len(some)} as they should be")

    def prove(self, name: str, part: str, slot: Slot, **arguments: Any) -> dict[str, Any]:
        """Add a worker's checks to the results, and what it left out."""
        answer = self.ask(name, "ours", slot, f"check_{part}", **arguments)
        self.check(name, answer["checks"])
        if answer.get("left_out"):
            self.leave_out(
                f"{name} {'compiled step' if part == 'tokens' else part}", answer["left_out"]
            )
        return answer

    def kernels(self, name: str, slot: Slot) -> None:
        if not self.result["machine"][name]["no_kernels"]:  # else `open` has said why
            self.result["kernel_rates"][name] = self.prove(name, "kernels", slot)["rates"]

    def processes(self, name: str, slot: Slot) -> None:
        """A model over several processes, a GPU each: the same tokens as in one, and the rate of
        both.
        """
        size = self.args.processes or 2
        if self.on_gpu:
            import torch

            if (there := torch.cuda.device_count()) < size:
                return self.leave_out(
                    f"{name} processes", f"there is {there} GPU, and each process needs one"
                )
        shape = next((shape for shape in ("1.1b", "tiny") if shape in self.args.shapes), "tiny")
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), {"1.1b": "tinyllama"}.get(shape, shape), "float32", 0)
            run = [
                os.path.abspath(__file__),
                "--processes-worker",
                folder,
                name,
                self.args.device,
                str(self.args.generate),
            ]
            starter = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(size),
            ]
            alone, together = (
                self.run_processes([*prefix, *run], slot) for prefix in ([sys.executable], starter)
            )
        self.check(
            name,
            [
                {
                    "what": "same tokens",
                    "name": f"{size} processes",
                    "ok": alone["tokens"] == together["tokens"],
                }
            ],
        )
        self.result["processes"].append(
            {
                "backend": name,
                "shape": shape,
                "size": size,
                "rate": together["rate"],
                "alone": alone["rate"],
            }
        )

    def run_processes(self, command: list[str], slot: Slot) -> dict[str, Any]:
        """The JSON object that a command prints. Raises PartError."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            out, errors = process.communicate(timeout=max(1, slot.hard - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its processes
            process.wait(30)
            raise NoTime("no time left") from None
        if process.returncode:
            raise PartError((errors.strip().splitlines() or ["no reason given"])[-1], errors)
        return json.loads(out.strip().splitlines()[-1])

    # Speed

    def measure(self, name: str, shape: str, form: str, slot: Slot) -> None:
        """Measure one model: ours compiled and not, then its peers."""
        config, label = make_config(shape), f"{name} {shape} {form}"
        prompt = min(self.args.prompt, config.max_position_embeddings - 1)
        need = random_weights.needed_bytes(shape, form, prompt)
        free = self.ask(name, "ours", slot, "free_bytes")["bytes"]
        if free is not None and need > free:
            self.leave_out(label, f"it takes {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
            if shape == "8b" and "8b-4" not in self.args.shapes:
                self.measure(name, "8b-4", form, slot)
            return
        bounds = self.ask(name, "ours", slot, "bounds")
        self.result["bounds"].setdefault(name, []).append(bounds)
        count = min(self.args.generate, config.max_position_embeddings - DEPTH - 1)
        shared = Shared((name, shape, form), count, prompt, bounds)
        sides = self.sides(name, shape, form)
        for number, side in enumerate(sides):
            now = time.perf_counter()
            if number and slot.soft - now < 1:
                self.leave_out(f"{label} {side.variant}", "no time left")
                continue
            is_ours = side.program == "ours"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    self.measure_side(
                        side, shared, now + (slot.soft - now) / (len(sides) - number), slot, folder
                    )
                except PartError as error:  # of a peer, no fault of this package
                    if is_ours and not isinstance(error, NoTime):
                        self.fail(f"{label} {side.variant}", str(error), error.trace)
                    else:
                        self.leave_out(f"{label} {side.variant}", str(error))
                if not is_ours and (worker := self.workers.pop((name, side.program), None)):
                    worker.close()
        ours = shared.logits.pop("ours", None)
        if ours is not None:  # a peer may compute another model
            self.check(
                name,
                [
                    bounded_check(
                        "peers' logits", f"{label} {program}", relative(logits, ours), SAME_MODEL
                    )
                    for program, logits in shared.logits.items()
                ],
            )

    def sides(self, name: str, shape: str, form: str) -> list[Side]:
        """The lines of a model in the table."""
        sides = [Side("ours compiled", "ours", True), Side("ours eager", "ours", False)]
        if not self.on_gpu and name == "mlx" and (shape, form) != ("tiny", "bf16"):
            sides = sides[1:]  # as the tokens in `parts`
        if name == "cuda":
            sides.append(Side("ours invariant", "ours", True, {"batch_invariant": True}))
        peers = [
            Side(peer, peer.split()[0], "compiled" in peer) for peer in PEERS.get((name, form), ())
        ]
        if not self.on_gpu:  # where torch.compile takes a minute, and so does mlx-lm in 4 bits
            peers = [
                peer
                for peer in peers
                if not peer.compile and (peer.program, form) != ("mlx-lm", "4-bit")
            ]
        return sides + [peer for peer in peers if not self.find_missing(peer.program)]

    def measure_side(
        self, side: Side, shared: Shared, until: float, slot: Slot, folder: str
    ) -> None:
        """Add a line to the table: a few runs of each kind until `until`, one run in any case."""
        (name, shape, form), label = shared.model, " ".join((*shared.model, side.variant))
        began, is_ours = time.perf_counter(), side.program == "ours"
        limit = math.inf if is_ours else PEER_LIMIT

        def ask(op: str, limit: float = math.inf, **arguments: Any) -> dict[str, Any]:
            return self.ask(name, side.program, slot, op, limit, **arguments)

        more = side.options if is_ours else {"folder": folder}
        loaded = ask("load", limit, shape=shape, form=form, compile=side.compile, **more)
        if "refused" in loaded:
            return say(f"{label}: not there: {loaded['refused']}")
        say(f"{label}: {loaded['nbytes'] / 1e9:.2f} GB, loaded in {loaded['seconds']:.1f} s")
        if "logits" in loaded:
            shared.logits.setdefault(side.program, np.array(loaded["logits"]))
        shared.read = loaded.get("read", shared.read)
        row: dict[str, Any] = {
            "backend": name,
            "shape": shape,
            "form": form,
            "side": side.variant,
            **dict.fromkeys(key for key, _ in COLUMNS.values()),
        }
        self.result["rows"].append(row)
        if name == "mlx" and side.program != "llama.cpp":
            row["operations"] = ask("operations")["count"]
        if is_ours and not shared.is_fitted:  # a slow machine gets fewer tokens, not none
            ask("decode", count=2, depth=8)
            rate, share = ask("decode", count=8, depth=8)["rate"], (until - began) / 12
            shared.count = max(8, min(shared.count, int(rate * share)))
            least = min(256, shared.prompt)
            shared.prompt = max(
                least, min(shared.prompt, int(ask("prefill", count=least)["rate"] * share))
            )
            shared.is_fitted = True
        answers: list[dict[str, Any]] = [loaded]
        for op, part, arguments in (
            ("decode", 0.5, {"depth": DEPTH, "count": shared.count}),
            ("prefill", 0.8, {"count": shared.prompt}),
        ):
            ask(op, limit, **arguments)  # warm
            rates = row[op + "_all"] = []
            while not rates or (
                len(rates) < ROUNDS and time.perf_counter() < began + part * (until - began)
            ):
                answers.append(ask(op, **arguments))
                rates.append(answers[-1]["rate"])
            row[op] = statistics.median(rates)
        row["decode_share"] = (
            row["decode"] * shared.read / shared.bounds["copy"] if shared.read else None
        )
        operations = 2 * random_weights.prompt_weights(make_config(shape))
        row["prefill_share"] = row["prefill"] * operations / shared.bounds["product"]
        for key in ("host", "waits"):
            row[key] = statistics.median(values) if (values := present(answers, key)) else None
        row["peak"] = max(present(answers, "peak"), default=None)
        # which would compile anew for each number of rows
        if not (side.program == "transformers" and side.compile):
            for batch in BATCHES:
                row[f"{batch} rows"] = ask(
                    "rows", depth=DEPTH, count=min(BATCH_COUNT, shared.count), batch=batch
                )["rate"]
        if is_ours:
            ask("unload")
        say(markdown_row(row, {}))


def present(answers: list[dict[str, Any]], key: str) -> list[float]:
    return [answer[key] for answer in answers if answer.get(key) is not None]


# {title: (key in a row, format)}
COLUMNS = {
    "decode, tokens/s": ("decode", ".1f"),
    "of a copy": ("decode_share", ".0%"),
    **{f"{batch} rows": (f"{batch} rows", ".1f") for batch in BATCHES},
    "prompt, tokens/s": ("prefill", ".1f"),
    "of a product": ("prefill_share", ".0%"),
    "host us": ("host", ".0f"),
    "waits": ("waits", ".4g"),
    "peak": ("peak", ".2f"),
    "operations": ("operations", "d"),
}
RATES = ("decode", *(f"{batch} rows" for batch in BATCHES), "prefill")
HEADER = ("model", "program", *COLUMNS)


def markdown_row(row: dict[str, Any], best: dict[str, float]) -> str:
    """Format a row as a line under HEADER, rates with their ratio to `best`."""
    cells = [f"{row['backend']} {row['shape']} {row['form']}", row["side"]]
    for key, form in COLUMNS.values():
        value = row[key]
        if value is not None:
            value = format(1e6 * value if key == "host" else value, form)
            value += f" ({row[key] / best[key]:.2f})" if key in best else ""
        cells.append(value or "")
    return f"| {' | '.join(cells)} |"


def table(result: dict[str, Any]) -> str:
    """The results in Markdown: devices and checks, one table, and the parts that are not in it."""
    lines = [
        f"{name}: {machine['device']}; "
        + ", ".join(f"{key} {value}" for key, value in machine["versions"].items())
        for name, machine in result["machine"].items()
    ]
    for name, bounds in result["bounds"].items():
        copy, product = (statistics.median(present(bounds, key)) for key in ("copy", "product"))
        lines.append(
            f"{name}: a copy reads and writes {copy / 1e9:.0f} GB/s, a bfloat16 product does "
            f"{product / 1e12:.3g} TFLOP/s"
        )
    for name, kernels in result["kernel_rates"].items():
        rates = (
            f"{kernel} {rate['ours'] / 1e9:.0f}"
            + (f" ({rate['torch'] / 1e9:.0f})" if "torch" in rate else "")
            for kernel, rate in kernels.items()
        )
        lines.append(f"{name} kernels read, GB/s (torch's own): " + ", ".join(rates))
    groups: dict[str, list[dict[str, Any]]] = {}
    for check in result["checks"]:
        groups.setdefault(f"{check['backend']} {check['what']}", []).append(check)
    for title, checks in groups.items():
        line = f"{title}: {sum(check['ok'] for check in checks)} of {len(checks)} right"
        if judged := [check for check in checks if "error" in check]:
            worst = max(judged, key=lambda check: check["error"] / check["bound"])
            line += (
                f"; nearest to its bound: {worst['name']}, {worst['error']:.2g} of "
                f"{worst['bound']:.2g}"
            )
        lines.append(line)
    lines += [
        f"{run['backend']} {run['shape']} float32 weights: {run['size']} processes decode "
        f"{run['rate']:.1f} tokens/s, "
        f"one {run['alone']:.1f}"
        for run in result["processes"]
    ]
    lines += [
        f"{title} {entry['part']}: {entry['reason']}"
        for title, key in (("FAILED", "failed"), ("left out:", "left_out"))
        for entry in result[key]
    ]
    lines.append(
        f"{result['seconds']:.0f} s"
        + (", interrupted" if result["interrupted"] else "")
        + "; in parentheses: ratios to the fastest peer of the same model"
    )
    lines = [f"- {line}" for line in lines]
    if result["rows"]:
        lines += ["", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
    for row in result["rows"]:
        peers = [
            peer
            for peer in result["rows"]
            if not peer["side"].startswith("ours")
            and row["side"].startswith("ours")
            and all(peer[key] == row[key] for key in ("backend", "shape", "form"))
        ]
        lines.append(
            markdown_row(row, {key: max(rates) for key in RATES if (rates := present(peers, key))})
        )
    return "\n".join(lines)


def listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Make a parser of comma-separated names."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names or not set(names) <= set(known):
            raise argparse.ArgumentTypeError(
                f"{text!r}: some of {','.join(known)}, separated by commas"
            )
        return list(dict.fromkeys(names))

    return parse


def main() -> int:
    """Parse the command line, measure, show. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--shapes",
        type=listed(list(MODELS)),
        default=["1.1b", "8b"],
        help="some of tiny, 1.1b, 8b-4 (4 layers of 8b) and 8b (default: 1.1b,8b)",
    )
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument(
        "--backends",
        type=listed(list(PACKAGES)),
        help="some of cuda, mlx; a named one must be installed (default: all that are)",
    )
    parser.add_argument(
        "--prompt", type=int, help="tokens of the long prompt (default: 2048, on CPUs 128)"
    )
    parser.add_argument("--generate", type=int, help="tokens to decode (default: 128, on CPUs 32)")
    parser.add_argument(
        "--processes",
        type=int,
        help="torch processes of one model, a GPU each; 1: none of it (default: 2 where there are "
        "2 "
        "GPUs)",
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="for the whole command (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print all results as one JSON object")
    args = parser.parse_args()
    numbers = (args.prompt, args.generate, args.processes, args.minutes)
    if not all(0 < number < 1e6 for number in numbers if number is not None):
        parser.error("--prompt, --generate, --processes and --minutes must be above 0")
    on_gpu = args.device == "gpu"
    args.processes = args.processes or (None if on_gpu else 1)
    args.prompt = max(2, args.prompt or (2048 if on_gpu else 128))
    args.generate = args.generate or (128 if on_gpu else 32)
    measurement = Measurement(args, args.backends or list(PACKAGES), args.backends is not None)
    result = measurement.result

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        measurement.run()
    except KeyboardInterrupt:
        result["interrupted"] = True
    finally:
        measurement.close()
        signal.signal(signal.SIGTERM, before)
    result["seconds"] = round(time.perf_counter() - measurement.started, 1)
    print(json.dumps(result) if args.json else table(result))
    return 130 if result["interrupted"] else 1 if result["failed"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["--processes-worker"]:
        serve_processes(*sys.argv[2:])
    else:
        sys.exit(main())
