"""python -m mlx_llama.bench: speed and memory of a model on a backend."""

from mlx_llama.__main__ import start

if __name__ == "__main__":
    start("bench")
