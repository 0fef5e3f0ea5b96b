"""Let a model call Python functions, and go on with their results.

python examples/tools.py "What is 12 times 34?" --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import Field

from mlx_llama import load

Number = Annotated[int, Field(ge=-9999, le=9999)]


def multiply(a: Number, b: Number) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("question", nargs="?", default="What is 12 times 34?")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    llm = load(args.model, backend=args.backend)
    # The first answer must be a call, so that a small model makes one too; a trained one calls by
    # itself ("auto").
    chat = llm.chat(
        tools=[multiply], tool_choice="required", parallel=False, rounds=2, max_tokens=100
    )
    chat.send(args.question)
    for message in chat.messages:
        for call in message.get("tool_calls", ()):
            print(f"call: {call['function']['name']}({call['function']['arguments']})")
        if message["content"]:
            print(f"{message['role']}: {message['content']}")


if __name__ == "__main__":
    main()
