"""Ask a server of mlx_llama through OpenAI's own client, streaming and not.

python -m mlx_llama.server                                  # in another terminal
pip install openai
python examples/openai_client.py --url http://127.0.0.1:8080/v1
"""

from __future__ import annotations

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--key", default="none", help="the server's --api-key, if it has one")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key=args.key)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60)
    print(answer.choices[0].message.content)

    messages += [
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "Tell me a story."},
    ]
    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=60, stream=True
    ):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
