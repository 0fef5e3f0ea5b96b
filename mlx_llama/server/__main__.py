"""python -m mlx_llama.server: serve a model over HTTP."""

from mlx_llama.__main__ import start

if __name__ == "__main__":
    start("server")
