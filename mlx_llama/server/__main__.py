"""python -m mlx_llama.server: serve a model over HTTP."""

from mlx_llama.__main__ import main as run

if __name__ == "__main__":  # before the import below: interrupted, it would end in a traceback
    import sys

    sys.exit(run(["server", *sys.argv[1:]]))

from .command import main

__all__ = ["main"]
