"""python -m mlx_llama.bench: speed and memory of a model on a backend."""

import sys

from mlx_llama import cli

from .command import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
