"""python -m mlx_llama.chat: the REPL."""

import sys

from mlx_llama import cli

from .repl import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
