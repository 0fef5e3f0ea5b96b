"""python -m mlx_llama.chat: the REPL."""

from mlx_llama.__main__ import start

if __name__ == "__main__":  # before the import below: interrupted, it would end in a traceback
    start("chat")

from .repl import main as main
