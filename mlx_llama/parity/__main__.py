"""python -m mlx_llama.parity: backend against backend."""

from mlx_llama.__main__ import start

if __name__ == "__main__":  # before the import below: interrupted, it would end in a traceback
    start("parity")

from .command import main as main
