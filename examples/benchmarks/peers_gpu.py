"""Peers that measure_gpu.py measures beside this package: transformers, vLLM, llama.cpp and
mlx-lm.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import compare_batches
import numpy as np
from peers_checkpoint import prompt_tokens
from peers_gguf import LLAMA_BENCH, LlamaBench, Peer
from random_weights import (
    MLXWeight,
    config_fields,
    make_config,
    needed_bytes,
    random_checkpoint,
    write_gguf,
)

DEPTH = 128  # tokens of the prompt before decoding
BATCHES = (8, 32)  # rows decoded together
BATCH_COUNT = 64  # tokens of each at most


class Program:
    """Base of the programs that workers run. Operations are methods named op_*; results return as
    JSON.

    A program has op_load, op_prefill(count), and op_rows(depth, count, batch), the rate of decoding
    `batch` rows together.
    """

    def __init__(self, name: str, device: str):
        self.name, self.on_gpu, self.model = name, device == "gpu", None

    def op_decode(self, depth: int, count: int) -> dict[str, Any]:
        """Rate of decoding `count` tokens after `depth` tokens and a first one."""
        return self.op_rows(depth, count, 1)


class Transformers(Program):
    """transformers' generate with a static cache, the forward of one token eager, or compiled as on
    a GPU.
    """

    last: tuple = ()

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        started, self.compile = time.perf_counter(), compile
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if self.on_gpu
            else torch.device("cpu")
        )
        config = transformers.LlamaConfig(**config_fields(shape) | {"eos_token_id": None})
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        model.to_empty(device=self.device)
        # Buffers outside the checkpoint; to_empty does not initialise them.
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(self.device)
        tensors = random_checkpoint(shape, form).tensors
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # copied: torch warns of read-only arrays
                parameter.copy_(torch.from_numpy(tensors[name].bits.copy()).view(torch.bfloat16))
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self.model = model.eval()
        ids = torch.tensor([prompt_tokens(16, config.vocab_size)], device=self.device)
        with torch.inference_mode():
            logits = self.model(ids).logits[0, -1].float().cpu().numpy()
        return {
            "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
            "seconds": time.perf_counter() - started,
            "logits": logits[:1000].tolist(),
        }

    def _generate(
        self, kind: tuple, prompt: int, count: int, compile: bool, batch: int = 1
    ) -> tuple[float, float]:
        """(seconds to the first token, seconds from it to the last). kind: of runs that may share a
        cache.
        """
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        # a longer cache of an earlier run would be reused, and attended to in full
        if self.last != kind:
            for name in ("_previous_max_cache_length", "_cache"):
                self.model.__dict__.pop(name, None)
        self.last = kind
        wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        first: list[float] = []

        class Clock(StoppingCriteria):
            def __call__(self, input_ids, scores, **others):
                if not first:
                    wait()
                    first.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        ids = torch.tensor(
            [prompt_tokens(prompt, self.model.config.vocab_size)] * batch, device=self.device
        )
        wait()
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
            stopping_criteria=StoppingCriteriaList([Clock()]),
            disable_compile=not compile,
        )
        wait()
        ended = time.perf_counter()
        if out.shape[1] != prompt + count:
            raise ArithmeticError(f"transformers gave {out.shape[1] - prompt} tokens of {count}")
        return first[0] - started, ended - first[0]

    def op_decode(self, depth: int, count: int) -> dict[str, Any]:
        return {
            "rate": count
            / self._generate(("decode", depth + count), depth, count + 1, self.compile)[1]
        }

    def op_prefill(self, count: int) -> dict[str, Any]:
        return {"rate": count / self._generate(("prefill", count), count, 1, False)[0]}

    def op_rows(self, depth: int, count: int, batch: int) -> dict[str, Any]:
        kind = ("rows", batch)
        self._generate(kind, depth, 2, self.compile, batch)
        return {
            "rate": batch * count / self._generate(kind, depth, count + 1, self.compile, batch)[1]
        }


class VLLM(Program):
    """vLLM with a model's config and random weights of its own."""

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        import torch
        from vllm import LLM

        started, config = time.perf_counter(), make_config(shape)
        (Path(folder) / "config.json").write_text(json.dumps(config_fields(shape)))
        length = config.max_position_embeddings
        share = needed_bytes(shape, form, length) / torch.cuda.get_device_properties(0).total_memory
        self.vocabulary = config.vocab_size
        self.model = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=length,
            max_num_seqs=max(BATCHES),
            enable_prefix_caching=False,
            gpu_memory_utilization=min(0.9, 1.3 * share),
            dtype="bfloat16"
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else "float16",
        )
        return {
            "nbytes": int(2 * sum(math.prod(dims) for dims in config.tensor_shapes().values())),
            "seconds": time.perf_counter() - started,
        }

    def _seconds(self, depth: int, count: int, batch: int = 1) -> float:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt_tokens(depth, self.vocabulary)}] * batch
        options = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        outputs = self.model.generate(prompts, options, use_tqdm=False)
        seconds = time.perf_counter() - started
        if any(len(output.outputs[0].token_ids) != count for output in outputs):
            raise ArithmeticError(f"vLLM gave other numbers of tokens than {count}")
        return seconds

    def op_prefill(self, count: int) -> dict[str, Any]:
        return {"rate": count / self._seconds(count, 1)}

    def op_rows(self, depth: int, count: int, batch: int) -> dict[str, Any]:
        return {
            "rate": batch
            * count
            / (self._seconds(depth, count + 1, batch) - self._seconds(depth, 1, batch))
        }


class LlamaCpp(Program):
    """llama.cpp on a GGUF file of the same weights: its own benchmarks if they are on the search
    path, else its library.
    """

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        self.path, self.layers = str(Path(folder) / f"{form}.gguf"), 99 if self.on_gpu else 0
        write_gguf(Path(self.path), shape, form)
        started, nbytes = time.perf_counter(), os.path.getsize(self.path)
        if binary := shutil.which(LLAMA_BENCH):
            self.ask = LlamaBench(binary, self.path, 1, None, self.on_gpu, self.layers).ask
            return {"nbytes": nbytes, "seconds": 0.0}
        import llama_cpp

        if self.layers and not llama_cpp.llama_supports_gpu_offload():
            raise RuntimeError("this llama-cpp-python was built without a GPU")
        room = max(
            make_config(shape).max_position_embeddings, DEPTH + (BATCH_COUNT + 2) * max(BATCHES)
        )
        self.model = Peer(self.path, room, 1, [None] * 3, self.layers, max(BATCHES))
        self.ask = lambda method, *arguments: getattr(self.model, method)(*arguments)
        self.model.logits(16, f"{self.path}.npy")
        logits = np.load(f"{self.path}.npy")[-1]
        return {
            "nbytes": nbytes,
            "seconds": time.perf_counter() - started,
            "logits": logits[:1000].tolist(),
        }

    def op_decode(self, depth: int, count: int) -> dict[str, Any]:
        return {"rate": count / self.ask("decode", depth, count)}

    def op_prefill(self, count: int) -> dict[str, Any]:
        return {"rate": count / self.ask("prompt", count)}

    def op_rows(self, depth: int, count: int, batch: int) -> dict[str, Any]:
        if self.model:
            return {"rate": batch * count / self.model.decode_rows(depth, count, batch)}
        binary = shutil.which(compare_batches.BINARY)
        options = ("-ngl", self.layers, "-pps")  # the rows share their prompt
        return {
            "rate": binary
            and compare_batches.peer_rate(binary, self.path, 1, batch, depth, count, *options)
        }


class MLXLM(Program):
    """mlx-lm's model, driven as in its generate_step: step n + 1 is launched before token n is
    read.
    """

    def op_load(self, shape: str, form: str, compile: bool, folder: str) -> dict[str, Any]:
        import mlx.core as mx

        # importing mlx_lm makes a stream on this device
        mx.set_default_device(mx.gpu if self.on_gpu else mx.cpu)
        import mlx.nn as nn
        from mlx_lm.models.llama import Model, ModelArgs

        started, self.vocabulary = time.perf_counter(), make_config(shape).vocab_size
        self.model = Model(ModelArgs.from_dict(config_fields(shape)))
        if form == "4-bit":
            nn.quantize(self.model, group_size=64, bits=4)
        arrays = {}
        for name, weight in random_checkpoint(shape, form).tensors.items():
            parts = (
                {"weight": weight.packed, "scales": weight.scales, "biases": weight.biases}
                if isinstance(weight, MLXWeight)
                else {"weight": weight.bits}
            )
            for part, values in parts.items():
                array = mx.array(values)
                arrays[name.removesuffix("weight") + part] = (
                    array.view(mx.bfloat16) if array.dtype == mx.uint16 else array
                )
                mx.eval(arrays)
        self.model.load_weights(list(arrays.items()), strict=True)
        self.model.eval()
        logits = self.model(mx.array([prompt_tokens(16, self.vocabulary)]))[0, -1].astype(
            mx.float32
        )
        return {
            "nbytes": sum(array.nbytes for array in arrays.values()),
            "seconds": time.perf_counter() - started,
            "logits": np.array(logits)[:1000].tolist(),
        }

    def _step(self, tokens: Any, cache: Any) -> tuple[Any, Any]:
        import mlx.core as mx

        logits = self.model(tokens, cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.argmax(logprobs, axis=-1), logprobs

    def _prompt(self, count: int, batch: int = 1) -> tuple[Any, Any]:
        """(cache, the first tokens [B], launched)."""
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache

        tokens = mx.array([prompt_tokens(count, self.vocabulary)] * batch)
        cache = make_prompt_cache(self.model)
        for start in range(0, count - 1, 2048):
            self.model(tokens[:, start : min(start + 2048, count - 1)], cache=cache)
            mx.eval([layer.state for layer in cache])
            mx.clear_cache()
        token, logprobs = self._step(tokens[:, -1:], cache)
        mx.async_eval(token, logprobs)
        return cache, token

    def op_rows(self, depth: int, count: int, batch: int) -> dict[str, Any]:
        import mlx.core as mx

        cache, token = self._prompt(depth, batch)
        host, started = [], 0.0
        for n in range(count + 1):
            if n < count:
                before = time.perf_counter()
                following, logprobs = self._step(token[:, None], cache)
                mx.async_eval(following, logprobs)
                host.append(time.perf_counter() - before)
            token.tolist()
            started = started or time.perf_counter()
            token = following
        return {
            "rate": batch * count / (time.perf_counter() - started),
            "host": statistics.median(host),
            "waits": 1.0,
        }

    def op_prefill(self, count: int) -> dict[str, Any]:
        started = time.perf_counter()
        self._prompt(count)[1].tolist()
        return {"rate": count / (time.perf_counter() - started)}

    def op_operations(self) -> dict[str, int]:
        import mlx.core as mx

        from mlx_llama.mlx_native.runtime import primitives

        cache, token = self._prompt(3)
        mx.eval(token)
        return {"count": primitives([self._step(token[:, None], cache)[0]])}
