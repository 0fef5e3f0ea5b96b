"""python -m mlx_llama: lists the commands."""

from __future__ import annotations

COMMANDS = {
    "chat": "talk with a model in the terminal",
    "generate": "one prompt, one answer on stdout",
    "bench": "speed and memory of a model on a backend",
    "quantize": "write a model anew with low-bit weights",
    "doctor": "what this machine can run, and what is wrong with a model",
    "parity": "prove that backends compute the same, and find where they do not",
}


def main() -> None:
    """Print what can be run."""
    print("mlx_llama runs Llama-family models. Commands:\n")
    for name, purpose in COMMANDS.items():
        print(f"  python -m mlx_llama.{name:<10}{purpose}")
    print("\nEach takes --help. Without --model they use the small guide model in this package.")


if __name__ == "__main__":
    main()
