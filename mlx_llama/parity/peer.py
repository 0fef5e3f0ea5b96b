"""transformers as the reference: another library's arithmetic over the same weights."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from mlx_llama.core.errors import BackendError
from mlx_llama.core.files.checkpoint import Checkpoint


class TransformersReference:
    """transformers' model at float32 on the CPU, with the functions of parity.probes."""

    def __init__(self, checkpoint: Checkpoint):
        """Raises BackendError if transformers is not installed or cannot read the checkpoint."""
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                raise BackendError(
                    f"--reference transformers needs the package {package}, which is not "
                    f"installed: pip install {package}, or leave it out"
                )
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        folder = {"gguf_file": checkpoint.path.name} if checkpoint.path.suffix == ".gguf" else {}
        path = checkpoint.path.parent if folder else checkpoint.path
        try:
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, local_files_only=True, **folder
            ).eval()
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise BackendError(
                f"--reference transformers: it cannot read {checkpoint.path}: {reason}"
            ) from None
        self.config = checkpoint.config
        self.name = f"transformers {transformers.__version__}"

    def collect(self, tokens: list[int], decoded: int) -> dict[str, np.ndarray]:
        """As parity.collect, without rotated queries and keys, which no module returns."""
        import torch

        parts: dict[str, list[np.ndarray]] = {}

        def keep(name: str) -> Any:
            def hook(module: Any, inputs: Any, out: Any) -> None:
                out = out[0] if isinstance(out, tuple) else out
                values = out.detach().float().numpy()[0]
                parts.setdefault(name, []).append(values.reshape(len(values), -1))

            return hook

        inner, hooks = self.model.model, []
        watched = {
            "embedding": inner.embed_tokens,
            "norm": inner.norm,
            "logits": self.model.lm_head,
        }
        for i, layer in enumerate(inner.layers):
            # queries and keys before rotation, after their norms if the layer has any
            attention = layer.self_attn
            watched |= {
                f"{i}.attention_norm": layer.input_layernorm,
                f"{i}.query": getattr(attention, "q_norm", attention.q_proj),
                f"{i}.key": getattr(attention, "k_norm", attention.k_proj),
                f"{i}.value": layer.self_attn.v_proj,
                f"{i}.attention": layer.self_attn,
                f"{i}.ffn_norm": layer.post_attention_layernorm,
                f"{i}.ffn": layer.mlp,
                f"{i}.block": layer,
            }
        try:
            hooks = [module.register_forward_hook(keep(name)) for name, module in watched.items()]
            cache, start = None, len(tokens) - decoded
            with torch.no_grad():
                for at, end in ((0, start), *((i, i + 1) for i in range(start, len(tokens)))):
                    cache = self.model(
                        torch.tensor([tokens[at:end]]), past_key_values=cache, use_cache=True
                    ).past_key_values
        finally:
            for hook in hooks:
                hook.remove()
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`, ignoring end tokens."""
        import torch

        tokens, cache, last = [], None, prompt
        with torch.no_grad():
            for _ in range(count):
                out = self.model(torch.tensor([last]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                tokens.append(int(out.logits[0, -1].argmax()))
                last = tokens[-1:]
        return tokens

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after the last of `tokens`: float32 [V]."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([tokens])).logits[0, -1].numpy()
