"""Random LoRA adapters, written by PEFT and by mlx_lm, and the logits of the models that they
adapt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write_peft(base: Path, folder: Path, seed: int = 0, **settings: Any) -> Path:
    """A random adapter of the model in `base`, saved by PEFT. settings: of LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**settings)
    )
    numbers = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=numbers) * 0.2
    model.save_pretrained(folder)
    return folder


def peft_logits(
    base: Path, folder: Path | None, tokens: np.ndarray, merged: bool = False
) -> np.ndarray:
    """Logits float32 [B, T, V] of transformers' model with PEFT's adapter, None for none."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if folder is not None:
        model = PeftModel.from_pretrained(model, folder)
        model = model.merge_and_unload() if merged else model
    with torch.inference_mode():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def write_mlx(
    base: Path,
    folder: Path,
    seed: int = 0,
    layers: int = 2,
    keys: tuple[str, ...] = ("self_attn.q_proj", "mlp.down_proj"),
    rank: int = 4,
    scale: float = 3.0,
) -> Path:
    """A random adapter of the last layers of the model in `base`, as mlx_lm.lora saves it."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(keys)}
    model, _ = load_model(base)
    model.freeze()
    linear_to_lora_layers(model, layers, parameters)
    numbers = np.random.default_rng(seed)
    random = {
        name: mx.array(numbers.normal(size=value.shape, scale=0.2).astype(np.float32))
        for name, value in tree_flatten(model.trainable_parameters())
    }
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), random)
    config = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_random(
    base: Path | Any,
    folder: Path,
    seed: int = 0,
    rank: int = 8,
    alpha: float = 4,
    scale: float = 0.2,
) -> Path:
    """A random adapter of all projections of a model, in PEFT's form, without PEFT. base: its
    folder or config.
    """
    from safetensors.numpy import save_file

    from mlx_llama.core.files.checkpoint import open_checkpoint

    numbers, tensors = np.random.default_rng(seed), {}
    config = open_checkpoint(base).config if isinstance(base, Path) else base
    for name, shape in config.tensor_shapes().items():
        if ".layers." in name and len(shape) == 2:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            for letter, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                matrix = numbers.normal(size=size, scale=scale).astype(np.float32)
                tensors[f"{module}.lora_{letter}.weight"] = matrix
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def mlx_logits(base: Path, folder: Path, tokens: np.ndarray) -> np.ndarray:
    """Logits float32 [B, T, V] of mlx_lm's model with its adapter."""
    import mlx.core as mx
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    with mx.stream(mx.cpu):
        model, _ = load_model(base)
        return np.array(load_adapters(model, str(folder))(mx.array(tokens)).astype(mx.float32))
