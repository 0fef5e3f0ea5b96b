"""python -m mlx_llama.doctor, see command.py."""

from mlx_llama.__main__ import start

if __name__ == "__main__":
    start("doctor")
