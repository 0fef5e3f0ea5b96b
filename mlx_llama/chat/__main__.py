"""python -m mlx_llama.chat: the REPL."""

from mlx_llama.__main__ import main as run

if __name__ == "__main__":  # before the import below: interrupted, it would end in a traceback
    import sys

    sys.exit(run(["chat", *sys.argv[1:]]))

from .repl import main

__all__ = ["main"]
