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
        """As parity.collect, without rotated queries, rotated keys and states, which no module
        returns.
        """
        import torch

        parts: dict[str, list[np.ndarray]] = {}
        stored, fused = self.config.stored_shapes(), self.config.fused_parts()
        shapes = self.config.tensor_shapes()
        hooks = []

        def watch(name: str, module: str | None, is_parent: bool = False) -> None:
            """Keep the output of a module of ours, or of the one that contains it."""
            if module is None:
                return
            key = f"{module}.weight"
            whole, rows = fused.get(key, (key, slice(None)))
            is_share = not is_parent and key in shapes and shapes[key][0] < stored[whole][0]
            columns, path = rows if is_share else slice(None), whole[: -len(".weight")]

            def hook(_: Any, inputs: Any, out: Any) -> None:
                out = out[0] if isinstance(out, tuple) else out
                values = out.detach().float().numpy()[0]
                parts.setdefault(name, []).append(values.reshape(len(values), -1)[:, columns])

            watched = self.model.get_submodule(path.rpartition(".")[0] if is_parent else path)
            hooks.append(watched.register_forward_hook(hook))

        try:
            watch("embedding", "model.embed_tokens")
            watch("norm", self.config.final_norm)
            watch("logits", "lm_head")
            for layer in self.config.layers:
                i = layer.index
                watch(f"{i}.attention_norm", layer.attention_norm)
                watch(f"{i}.ffn_norm", layer.ffn_norm)
                if attention := layer.attention:
                    # queries and keys before rotation, after their norms if the layer has any
                    value_norm = attention.out.replace("o_proj", "v_norm")
                    norms = attention.query_norm, attention.key_norm
                    norms += (value_norm if attention.norms_values else None,)
                    for name, module, norm in zip(("query", "key", "value"), attention.qkv, norms):
                        watch(f"{i}.{name}", norm or module)
                if layer.mixer:
                    watch(f"{i}.attention", layer.mixer.out, is_parent=True)
                # no module returns the sum of experts and an MLP with norms of their own
                if layer.ffn and not (layer.experts and layer.experts.norms):
                    inside = layer.experts.router.module if layer.experts else layer.ffn.down
                    watch(f"{i}.ffn", inside, is_parent=True)
                watch(f"{i}.block", f"model.layers.{i}")
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
