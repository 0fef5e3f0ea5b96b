"""python -m mlx_llama.bench: speed and memory of a model on a backend."""

from mlx_llama.__main__ import start

if __name__ == "__main__":  # before the import below: interrupted, it would end in a traceback
    start("bench")

from .command import main as main
