"""Steps on torch's meta device, which has shapes and no numbers, and the machine code of the
kernels that they launch.

Neither needs a GPU. Triton compiles as for a launch: by its own rules from the arguments to a
kernel's types and constants.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from making import add_family, config_checkpoint, config_fields, make_checkpoint
from making_gguf import LOW_BIT_MODEL, make_gguf

from cuda_fallback import kernels
from cuda_fallback.kernels.cuda_graph import Step
from cuda_fallback.kernels.state import MAX_ROWS, StateView
from cuda_fallback.kernels.storage import key_places
from cuda_fallback.model import Llama
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.layers import decoder
from mlx_llama.core.models.parts import Window
from mlx_llama.core.ops import DeltaWeights
from mlx_llama.core.options import LoadOptions
from mlx_llama.core.sample import SamplingFeatures

META = torch.device("meta")
# sizes of the whole matrix of machine code
COLUMNS, ROWS, CAPABILITIES = (2048, 4096, 14336), (1, 2, 8, 32), (80, 89, 90)


class Launch(NamedTuple):
    """A launch of a Triton kernel."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The argument of this name."""
        return (dict(zip(self.kernel.arg_names, self.arguments)) | self.options)[name]


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches of the package's kernels, which run nothing; all kernels are taken to run on any
    device.
    """
    from cuda_fallback.kernels import decode, packed, tokens

    launches: list[Launch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            packed,
            "run",
            lambda kernel, grid, *arguments, **options: launches.append(
                Launch(kernel, grid, arguments, options)
            ),
        )
        patch.setattr(kernels, "find_kernels", lambda device: kernels.Kernels(decode, packed))
        patch.setattr(tokens, "gumbel_table", lambda device: torch.empty(1 << 13, device=device))
        yield launches


def on_meta(value: Any, tensors: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Weights in nested dataclasses and tuples, moved to the meta device. tensors: those before and
    after, by their id.
    """
    if isinstance(value, torch.Tensor):
        return tensors.setdefault(id(value), (value, torch.empty_like(value, device=META)))[1]
    if isinstance(value, tuple):
        parts = [on_meta(part, tensors) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        moved = {
            field.name: on_meta(getattr(value, field.name), tensors)
            for field in dataclasses.fields(value)
        }
        changed = {name: part for name, part in moved.items() if part is not getattr(value, name)}
        return dataclasses.replace(value, **changed) if changed else value
    return value


MODELS = {  # fields of a config.json
    "dense": dict(dtype="float16", attention_bias=True, mlp_bias=True),
    "low-bit": LOW_BIT_MODEL,
    "experts": dict(
        dtype="bfloat16",
        architectures=["MixtralForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "sinks": dict(
        dtype="bfloat16",
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        attention_bias=True,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
    ),
    "windows and softcaps": dict(dtype="bfloat16"),
    "recurrent": {},  # as make_hybrid makes it
    "heads of two sizes": {},  # as make_gemma4 makes it
    "8 bits": dict(dtype="bfloat16", architectures=["Qwen3ForCausalLM"], head_dim=128),
}
FAMILY = dict(
    norm_placement="both",
    query_key_norm="head",
    layers=decoder(lambda config, i: {"softcap": 50.0}),
)
GEMMA = dict(
    activation="gelu_tanh",
    norm_offset=1.0,
    embedding_multiplier=8.0,
    sliding_window=4,
    layer_types=("sliding_attention", "full_attention"),
    logits_softcap=30.0,
)


def load(name: str):
    """One of MODELS on the meta device."""
    from cases.gemma4 import make_gemma4
    from cases.recurrent import make_hybrid

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if name == "recurrent":
            checkpoint = make_hybrid("bfloat16")
        elif name == "heads of two sizes":
            checkpoint = make_gemma4("bfloat16")
        elif name == "low-bit":
            make_gguf(folder / "m.gguf", **MODELS[name])
            checkpoint = open_checkpoint(folder / "m.gguf")
        elif name == "windows and softcaps":
            config = LlamaConfig.from_dict(config_fields())
            config = dataclasses.replace(config, architecture=add_family(**FAMILY), **GEMMA)
            zeros = {
                key: np.zeros(shape, np.float32) for key, shape in config.tensor_shapes().items()
            }
            checkpoint = config_checkpoint(config, folder, zeros, "bfloat16")
        else:
            checkpoint = open_checkpoint(
                make_checkpoint(folder / "m", tokenizer=False, **MODELS[name])
            )
        with recorded():  # weights have the kernels' layouts
            llama = Llama.load(checkpoint, LoadOptions(cache_bits=8 if name == "8 bits" else None))
        llama.decoder = on_meta(llama.decoder, {})
    return llama


def build_step(llama, rows: int, kind):
    """The step of a bucket of rows as a Runner builds it. kind: None for the forward alone."""
    from cuda_fallback.kernels import decode, ops

    view = StateView(
        llama.config, llama.dtype, META, decode, llama.cache_bits, rows, kind or SamplingFeatures()
    )
    return Step(llama.decoder.over(ops), view, kind is not None)


def extra_launches() -> None:
    """Launch what no step of MODELS does: kernels of prompts, adapters, notes and narrow
    numbers.
    """
    from cases.machine_code import low_bit
    from cases.recurrent import delta

    from cuda_fallback.kernels import decode, packed

    state, (place,) = (
        torch.empty((16, MAX_ROWS), dtype=torch.int64, device=META),
        key_places([(2, 64)]),
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float32):

        def made(*shape: int, dtype=dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        decode.rotate(
            made(1, 8, 3, 64), made(3, 32, dtype=torch.float32), made(3, 32, dtype=torch.float32)
        )
        decode.adapt(state, made(2, 1, 96), made(2, 1, 64), made(3, 16, 64), made(3, 96, 16))
        decode.gate(made(2, 3, 64), "gelu_tanh")
        decode.xielu(made(2, 3, 64), 0.8, 0.8, 0.5, -1e-6)
        decode.gate_output(made(2, 3, 64), made(2, 3, 64))
        decode.short_conv(state, (0, 128), made(2, 3, 3 * 64), made(64, 3), made(64))
        rates = made(4, dtype=torch.float32)
        weights = DeltaWeights(made(256, 4), rates, rates, made(32))
        x = made(2, 3, 256 + 4 * 32 + 8)
        decode.gated_delta(state, (0, 768, 4864), x, delta(2, 4, 32, 32), weights)
        for bits in (None, 8, 16):
            decode.read_keys(state, place, 2, 2, 64, dtype, bits)
            query = decode.store_rotated(state, place, made(2, 1, 12 * 64), 8, 2, 64, bits=bits)
            decode.attend(state, place, query, 2, Window(100), 0.1, bits, 30.0)
    decode.note(state, 2)
    packed.multiply(
        low_bit("Q4_0", 16, 32768), torch.empty((1, 32768), dtype=torch.float16, device=META)
    )


def launch_columns(K: int, rows: int, dtype: torch.dtype) -> None:
    """Launch the kernels of a step of `rows` tokens that read rows of K numbers."""
    from cases.machine_code import low_bit

    from cuda_fallback.kernels import decode, packed

    def made(*shape: int, dtype=dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    x, stack, experts = made(rows, 1, K), made(4, 64, K), low_bit("Q4_K", 4 * 64, K, dtype)
    decode.add_rms_norm(x, x, made(K), 1e-5)
    decode.gate(made(rows, 1, 2 * K), "silu")
    decode.multiply(x, made(4096, K))
    decode.multiply_gated(x, made(8192, K))
    decode.multiply(x.float(), made(4096, K, dtype=torch.float32))
    decode.combine(made(2 * rows, K), made(rows, 2, dtype=torch.float32))
    state = made(16, MAX_ROWS, dtype=torch.int64)
    decode.adapt(state, made(rows, 1, 4096), x, made(3, 16, K), made(3, 4096, 16))
    chosen = made(rows, 2, dtype=torch.int64)
    for groups in (None, packed.group_rows(chosen, 4)):
        decode.multiply_chosen(x[:, 0], stack, chosen, groups)
        packed.multiply_chosen(experts, x[:, 0], chosen, 4, groups)


class _Driver:
    """A GPU of a compute capability, for the compiler alone."""

    def __init__(self, capability: int):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(launch: Launch, capability: int):
    """Compile a launch as Triton does on a GPU of this capability, 80 for 8.0."""
    import triton

    triton.runtime.driver.set_active(_Driver(capability))
    arguments = [
        torch.empty(0, dtype=part.dtype, device=META) if isinstance(part, torch.Tensor) else part
        for part in launch.arguments
    ]
    return launch.kernel.warmup(*arguments, grid=launch.grid, **launch.options)


@functools.cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin"


def machine_code(launch: Launch, capability: int) -> SimpleNamespace:
    """Registers of a thread; bytes that it keeps in memory (stack, local) and of shared memory; all
    instructions (length), those of the longest loop, and loads of 16 bytes (wide). Skips the test
    if Triton came without NVIDIA's assembler and disassembler.
    """
    tools = ("ptxas", "nvdisasm", "cuobjdump")
    if sys.platform != "linux" or not all((_tools() / name).exists() for name in tools):
        pytest.skip(f"this Triton lacks one of {', '.join(tools)}")
    compiled = compile_launch(launch, capability)
    return _disassemble(compiled.asm["cubin"], compiled.metadata.shared)


@functools.cache
def _disassemble(cubin: bytes, shared: int) -> SimpleNamespace:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        texts = [
            subprocess.run(
                [_tools() / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        ]
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", texts[0])[1]) for name in ("REG", "STACK", "LOCAL")
    )
    labels, instructions, loops = {}, [], [[]]
    for line in texts[1].splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif match := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            instructions.append(match[1].strip())
            target = re.search(r"^BRA.*`\((\.L_\w+)\)", match[1])
            if target and target[1] in labels:
                loops.append(instructions[labels[target[1]] :])
    return SimpleNamespace(
        registers=registers,
        stack=stack,
        local=local,
        loop=max(loops, key=len),
        shared=shared,
        wide=sum(re.match(r"LDG\S*\.128", line) is not None for line in instructions),
        length=sum(not line.startswith("NOP") for line in instructions),
    )
