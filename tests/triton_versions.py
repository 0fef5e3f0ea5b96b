"""Compile every kernel of the package with other versions of Triton, without a GPU.

    python tests/triton_versions.py 3.2.0 3.5.1     # each installed in a temporary folder
    python tests/triton_versions.py                 # the version that is imported

A kernel is compiled for each set of its types and constants that models of all kinds launch, for
8.0, 8.9 and 9.0 in turn, and with --all for each of them. Prints a line for each that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent


def compile_all(every_capability: bool) -> int:
    """Returns the number of failures."""
    import torch
    import triton
    from backends.launches import (
        CAPABILITIES,
        META,
        MODELS,
        build_step,
        compile_launch,
        extra_launches,
        launch_columns,
        load,
        recorded,
    )
    from cases.machine_code import LOW_BIT, low_bit

    from cuda_fallback.kernels import packed
    from mlx_llama.core.sample import SamplingFeatures

    models = [load(name) for name in MODELS]
    with torch.inference_mode(), recorded() as launches:
        for llama in models:
            for rows, kind in (
                (1, SamplingFeatures()),
                (4, SamplingFeatures(True, 32, True, True, 64, 4, 5, True)),
            ):
                for part in build_step(llama, rows, kind).parts:
                    part()
        extra_launches()
        for rows in (1, 32):
            launch_columns(4096, rows, torch.bfloat16)
        for name in LOW_BIT:
            for dtype, rows in (
                (torch.float16, 1),
                (torch.bfloat16, 1),
                (torch.bfloat16, packed.MOST_ROWS),
                (torch.float32, 1),
            ):
                packed.multiply(
                    low_bit(name, 4096, 4096, dtype),
                    torch.empty((rows, 4096), dtype=dtype, device=META),
                )
            packed.dequantize(low_bit(name, 4096, 4096), slice(0, 8), torch.bfloat16)
    different = {
        (
            launch.kernel.__name__,
            *(
                str(part.dtype) if isinstance(part, torch.Tensor) else part
                for part in launch.arguments
            ),
            *launch.options.items(),
        ): launch
        for launch in launches
    }
    failures = 0
    for number, launch in enumerate(different.values()):
        for capability in CAPABILITIES if every_capability else CAPABILITIES[number % 3 :][:1]:
            try:
                compile_launch(launch, capability)
            except Exception as error:  # whatever a version of Triton raises
                failures += 1
                while error.__cause__:  # the reason
                    error = error.__cause__
                print(
                    f"{triton.__version__}: {launch.kernel.__name__} for {capability}: "
                    f"{str(error).strip()[-300:]}",
                    flush=True,
                )
    names = {key[0] for key in different}
    print(
        f"triton {triton.__version__}: {len(names)} kernels, {len(different)} variants, "
        f"{failures} failures",
        flush=True,
    )
    return failures


def main(arguments: list[str]) -> int:
    options = [option for option in arguments if option == "--all"]
    versions = arguments[len(options) :]
    if not versions:
        return int(compile_all(bool(options)) > 0)
    failed = 0
    for version in versions:
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
            subprocess.run([*pip, f"triton=={version}"], check=True)
            paths = os.pathsep.join([folder, str(TESTS), str(TESTS.parent)])
            environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": f"{folder}/cache"}
            failed |= subprocess.run(
                [sys.executable, __file__, *options], env=environment
            ).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
