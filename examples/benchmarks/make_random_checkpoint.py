"""Write a checkpoint of random weights in a real model's shapes, to measure speed without downloading anything.

    python examples/benchmarks/make_random_checkpoint.py tinyllama /tmp/tinyllama --dtype float32
    python -m mlx_llama.bench --model /tmp/tinyllama --backend cpu -p 128 -n 64

Speed depends on the weights' shapes and width, not on their values. The folder has no tokenizer: the bench feeds token
ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlx_llama.core.files.tensor import NUMBERS
from mlx_llama.core.models.config import LlamaConfig

SHAPES = {
    # rows of 256 and 768: the smallest that every GGUF type can quantise
    "tiny": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=512, max_position_embeddings=512),
    # TinyLlama's depth with small products: shows the cost per token outside them
    "deep": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=22, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=2048, max_position_embeddings=4096),
    "tinyllama": dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                      num_key_value_heads=4, vocab_size=32000, max_position_embeddings=2048),
    "llama-3.2-1b": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                         num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=8192,
                         rope_theta=500000.0, tie_word_embeddings=True),
    "llama-3-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                       num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0),
}
WIDTHS = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}


def random_tensors(config: LlamaConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (Hugging Face name, float32 values) of every tensor of `config`, one at a time.

    Matrices have a standard deviation of 1 / sqrt(row length), which keeps activations near 1 through the layers; norms
    are around 1.
    """
    rng = np.random.default_rng(seed)
    for name, dims in config.tensor_shapes().items():
        values = rng.standard_normal(dims, np.float32)
        yield name, values * dims[1] ** -0.5 if len(dims) == 2 else 1 + 0.1 * values


def write(folder: Path, shape: str, dtype: str, seed: int) -> None:
    """Write config.json and model.safetensors with one tensor in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
           "torch_dtype": dtype, "bos_token_id": 1, "eos_token_id": 2,
           "tie_word_embeddings": False,  # mlx-lm's default is true, transformers' false
           **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(raw, indent=1))
    config = LlamaConfig.from_dict(raw, "config.json")
    kind, width = WIDTHS[dtype]
    header, offset = {}, 0
    for name, dims in config.tensor_shapes().items():
        end = offset + width * int(np.prod(dims))
        header[name] = {"dtype": kind, "shape": list(dims), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # align the data, as the safetensors library does
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, values in random_tensors(config, seed):
            file.write(values.astype(NUMBERS[dtype]).tobytes())


def main() -> None:
    """Parse the command line and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=WIDTHS, default="float32")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.folder, given.shape, given.dtype, given.seed)
    print(f"wrote {given.folder}")


if __name__ == "__main__":
    main()
