"""python -m mlx_llama.server: serve a model over HTTP."""

from mlx_llama.__main__ import start

if __name__ == "__main__":  # before the import below: interrupted, it would end in a traceback
    start("server")

from .command import main as main
