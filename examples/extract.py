"""Extract a pydantic model from a text: the answer always validates.

python examples/extract.py "Ada Lovelace was 36 and lived in London." --model DIR_OR_HUB_ID
"""

from __future__ import annotations

import argparse
from typing import Annotated

from pydantic import BaseModel, Field

from mlx_llama import load


class Person(BaseModel):
    """Fields to extract. Bounds keep a small model from rambling."""

    name: Annotated[str, Field(max_length=40)]
    age: Annotated[int, Field(ge=0, le=150)]
    town: Annotated[str, Field(max_length=40)] | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("text", nargs="?", default="Ada Lovelace was 36 and lived in London.")
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()

    llm = load(args.model, backend=args.backend)
    question = [
        {"role": "user", "content": f"Give name, age and town of the person as JSON. {args.text}"}
    ]
    answer = llm.generate(question, schema=Person, max_tokens=200)
    print(answer.parsed)  # IncompleteAnswerError if 200 tokens did not suffice


if __name__ == "__main__":
    main()
