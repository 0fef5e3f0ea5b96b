"""Processes for Triton's kernels: fixtures `call` and `compile_call`, and the choice of kernels.

Triton's interpreter, which runs a kernel on the CPU through NumPy, must be chosen before triton is
imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from machine import required

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DEVICE_NAME = "gpu" if HAS_GPU else "cpu"  # for select and load


@contextlib.contextmanager
def computing(by_kernels: bool):
    """Compute every word of ops by Triton's kernels, as on a GPU, or by torch's own operations
    alone.
    """
    from cuda_fallback import kernels

    with pytest.MonkeyPatch.context() as patch:
        if not by_kernels:
            patch.setattr(kernels, "find_kernels", lambda device: kernels.Kernels())
        elif not HAS_GPU:
            from cuda_fallback.kernels import decode, packed

            patch.setattr(kernels, "find_kernels", lambda device: kernels.Kernels(decode, packed))
        yield


def fewer_programs() -> None:
    """Launch few programs: each costs the interpreter milliseconds. A GPU's are as they are."""
    from cuda_fallback.kernels import attention, packed, products

    if not HAS_GPU:
        products.ROWS, products.PROGRAMS, attention.PIECES, attention.PROGRAMS = 256, 1, 4, 4
        packed.WARPS, packed.PROGRAMS = 16, 1


def patch_once() -> None:
    """Let Triton's interpreter patch the language once for the functions of a module, and not again
    at each call of one in a kernel. It takes two thirds of the time then.
    """
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **named):
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **named)

    interpreter.InterpretedFunction.__call__ = call


def sum_dots_in_float64() -> None:
    """Let the interpreter's tl.dot sum in float64. In float32 some BLAS libraries give a row
    different bits in another column of a tile.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    dot, Handle = interpreter.InterpreterBuilder.create_dot, interpreter.TensorHandle

    def create_dot(self, a, b, total, *more):
        product = dot(self, a, b, Handle(np.zeros(total.data.shape), tl.float64), *more)
        return Handle(product.data.astype(total.data.dtype) + total.data, total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def prepare_interpreter() -> None:
    patch_once()
    sum_dots_in_float64()


def start_process(interpret: bool):
    """call(function, *arguments) in a process of its own; its exceptions are raised here."""
    if importlib.util.find_spec("triton") is None:
        if sys.platform == "linux" and "cuda" in required():
            pytest.fail("triton is required where cuda is: pip install -e '.[test]'")
        pytest.skip("triton is not installed: here torch's own operations are all there is")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1" if interpret else "0")
        context, initializer = (
            multiprocessing.get_context("spawn"),
            prepare_interpreter if interpret else None,
        )
        pool = ProcessPoolExecutor(1, context, initializer)
        assert pool.submit(os.getenv, "TRITON_INTERPRET").result() == ("1" if interpret else "0")
    return pool


@pytest.fixture(scope="module")
def call():
    """call(function, *arguments) where the kernels run."""
    with start_process(interpret=not HAS_GPU) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.fixture(scope="module")
def compile_call(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        with start_process(interpret=False) as pool:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()
