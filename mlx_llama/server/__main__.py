"""python -m mlx_llama.server: serve a model over HTTP."""

import sys

from mlx_llama import cli

from .command import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
