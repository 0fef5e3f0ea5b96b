"""`load` and its result: one model with its tokenizer and template, ready to generate."""

from __future__ import annotations

import os
import re
from collections import abc
from typing import Any

import numpy as np
from typing_extensions import Unpack

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.backends.interface import Model
from mlx_llama.core.errors import ContextError, OptionsError, TemplateError
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.models import rope
from mlx_llama.core.text.template import ChatTemplate, encode_messages, load_builtin_template, missing_template

from .completion import Completion
from .engine import Engine
from .options import Options, resolve
from .session import Sequence, Session, Stream
from .speculate import compare_vocabularies

# A text, messages or token ids.
Prompt = str | abc.Sequence[abc.Mapping[str, str]] | abc.Sequence[int] | np.ndarray


class LLM:
    """A loaded model: `generate` and `stream` one answer, `chat` for a conversation, `logits` and `encode`."""

    def __init__(self, checkpoint: Checkpoint, backend: backends.Backend, model: Model,
                 template: ChatTemplate | None, context: int, draft: Model | None = None):
        self.checkpoint = checkpoint
        self.backend = backend
        self.model = model
        self.template = template
        self.tokenizer = checkpoint.tokenizer
        self.engine = Engine(backend, model, self.tokenizer, checkpoint.eos_token_ids, context, draft)

    def __repr__(self) -> str:
        width = self.backend.runtime.dtype_name(self.model.dtype)
        return (f"LLM({self.checkpoint.name!r}, backend={self.backend.name!r}, device={self.backend.device_name!r}, "
                f"dtype={width!r}, context={self.engine.context})")

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer to `prompt`; `print` shows its text. Arguments and errors as for `stream`."""
        return self.stream(prompt, **options).finish()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """The answer to `prompt` in pieces of text.

        prompt: a text to continue (an empty one starts from BOS), messages for the chat template, or token ids.
        options: see GenerationOptions. Each call starts with an empty cache.

        Raises OptionsError, ContextError, TemplateError, TokenizerError, before any computing.
        """
        resolved = resolve(options, self.checkpoint.generation_config,
                           str(self.checkpoint.path / "generation_config.json"))
        self.engine.check_options(resolved.options)
        tokens = self.encode(prompt)
        self.engine.check_prompt(tokens)
        completion = Completion(notices=[*resolved.notices, *self.engine.choose_speculation(resolved.options)[1]])
        continues = len(prompt) > 0 and not isinstance(prompt[0], dict)
        return Stream(Sequence(self.engine).pieces(tokens, resolved, completion, not continues), completion)

    def chat(self, system: str | None = None, **options: Unpack[Options]) -> Session:
        """A conversation: `send` or `stream` each question. Raises OptionsError, and TemplateError without a template."""
        return Session(self.engine, self.require_template(), self.checkpoint.generation_config, self.checkpoint.name,
                       system, options)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after each of `tokens`: float32 [T, V]. Raises ContextError."""
        if len(tokens) == 0:
            raise ContextError("logits needs at least one token")
        if len(tokens) > self.engine.context:
            raise ContextError(f"{len(tokens)} tokens do not fit the context of {self.engine.context}")
        cache = self.model.make_cache(len(tokens))
        return self.backend.runtime.to_numpy(self.model.forward([list(tokens)], 0, cache, all_positions=True))[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of `prompt`, which is as for `stream`. Raises ContextError, TemplateError, TokenizerError."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_bos=True)
        items: Any = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if not isinstance(items, (list, tuple)) or len(items) == 0:
            raise ContextError(f"a prompt is a text, messages or token ids, not "
                               f"{'nothing' if items == [] or items == () else type(items).__name__}")
        if all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in items):
            return [int(token) for token in items]
        return encode_messages(self.tokenizer, self.require_template(), items)

    def require_template(self) -> ChatTemplate:
        """The chat template. Raises TemplateError with the remedy if there is none."""
        if self.template is None:
            raise TemplateError(missing_template(self.checkpoint.name))
        return self.template


def load(model: str | os.PathLike | None = None, backend: str = "auto", device: str | None = None, dtype: str = "auto",
         *, revision: str | None = None, ctx_size: int | str | None = None, template: str | None = None,
         threads: int | None = None, activation_bits: int | None = None, compile: bool | None = None,
         draft_model: str | os.PathLike | None = None) -> LLM:
    """Load a model.

    model: a folder, a .gguf file or a Hugging Face hub id; None is the small guide model in this package. backend:
    "auto" (MLX on Apple silicon, CUDA where torch sees a GPU, else the CPU), "mlx", "cpu" or "cuda". device: None, "gpu"
    or "cpu". dtype: "auto" (as stored), "float32", "float16" or "bfloat16". revision: of a hub id. ctx_size: positions
    of the context, None: as many as the model was trained for. template: a name or a .jinja file, instead of the
    checkpoint's. threads: of the cpu backend; None is one per physical core. activation_bits: of the cpu backend,
    against low-bit weights: 16 (None), 8 (faster and coarser) or 32 (exact and slower). compile: run a step as one
    traced graph (mlx) or as compiled kernels (cpu), with the same tokens; None is True except for mlx on the CPU.
    draft_model: a smaller model with the same vocabulary, on the same backend, to guess tokens that `model` verifies,
    unless the option speculate says otherwise.

    Raises CheckpointError, ConfigError, TokenizerError, TemplateError, BackendError, ContextError, OptionsError.
    """
    chosen = backends.select(backend, device)
    how = chosen.load_options(dtype, threads, activation_bits, compile)
    checkpoint = open_checkpoint(model, revision)
    context = context_size(checkpoint, ctx_size)
    chat_template = load_builtin_template(template, checkpoint.tokenizer) if template else checkpoint.template
    smaller = None if draft_model is None else open_checkpoint(draft_model)
    if smaller and (difference := compare_vocabularies(smaller, checkpoint)):
        raise OptionsError(f"--draft-model {smaller.name}: its vocabulary is not that of {checkpoint.name}, {difference}: "
                           f"choose a smaller model of the same family")
    loaded = chosen.load(checkpoint, dtype, **how)
    draft = chosen.load(smaller, dtype, **how) if smaller else None
    return LLM(checkpoint, chosen, loaded, chat_template, context, draft)


def context_size(checkpoint: Checkpoint, ctx_size: int | str | None) -> int:
    """Positions of a context; ctx_size None: as many as the model was trained for. Raises ContextError above its maximum."""
    if ctx_size is None:
        return checkpoint.config.max_position_embeddings
    maximum = rope.max_context(checkpoint.config)
    context = int(ctx_size) if re.fullmatch(r"\d{1,12}", str(ctx_size)) else 0
    if not 1 <= context <= maximum:
        raise ContextError(f"--ctx-size {ctx_size}: {checkpoint.name} takes 1 to {maximum} positions")
    return context
