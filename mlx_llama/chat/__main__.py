"""python -m mlx_llama.chat: the REPL."""

from mlx_llama.__main__ import start

if __name__ == "__main__":
    start("chat")
