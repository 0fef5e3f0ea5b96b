"""python -m mlx_llama.parity: backend against backend."""

from mlx_llama.__main__ import start

if __name__ == "__main__":
    start("parity")
