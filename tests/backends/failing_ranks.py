"""The command `generate` under a launcher, in which rank 1 fails in a call of rank 0.

python failing_ranks.py WAY ARGUMENTS ...: "leaves" ends the process with code 0, which no launcher
minds; "raises" raises an error; "cannot load" refuses the model.
"""

from __future__ import annotations

import os
import sys

from mlx_llama import __main__ as commands
from mlx_llama.core.errors import CheckpointError
from mlx_llama.distributed import following, leading


def fail(self, message, arrays) -> None:
    """Rank 1's part of a call, if it is the fifth."""
    calls.append(message)
    if len(calls) == 5 and sys.argv[1] == "leaves":
        os._exit(0)
    if len(calls) == 5:
        raise ValueError("planted")
    make_call(self, message, arrays)


def refuse(*arguments) -> None:
    raise CheckpointError("the disk of this machine is gone")


if __name__ == "__main__":
    leading.PATIENCE = 20
    calls: list = []
    make_call = following.Follower._call
    if sys.argv[1] == "cannot load":
        following.open_checkpoint = refuse
    else:
        following.Follower._call = fail
    sys.exit(commands.main(["generate", *sys.argv[2:]]))
