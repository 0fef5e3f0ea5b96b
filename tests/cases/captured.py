"""Models whose steps are captured in CUDA graphs, or recorded by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from backends.triton_process import (
    DEVICE,
    HAS_GPU,
    computing,
    fewer_programs,
)

from cuda_fallback.model import Llama
from mlx_llama.core.backends.load_options import LoadOptions
from mlx_llama.core.files.checkpoint import open_checkpoint


def loaded(source, compile: bool = True, dtype: str = "auto", by_kernels: bool = True, **options):
    """The model of a path or checkpoint. In the interpreter, steps by kernels are recorded instead
    of captured. options: of LoadOptions.
    """
    from backends.recording import Recording

    with computing(by_kernels):
        llama = Llama.load(
            open_checkpoint(source) if isinstance(source, Path) else source,
            LoadOptions(
                dtype=dtype, compile=compile if HAS_GPU and by_kernels else None, **options
            ),
            DEVICE,
        )
    assert (llama.runner is not None) is by_kernels
    if by_kernels and not HAS_GPU:
        fewer_programs()
        llama.runner.capture = Recording(llama) if compile else None
    assert not by_kernels or (llama.runner.capture is not None) is compile
    return llama
