"""What `mlx_llama.load` returns: one model with its tokenizer and template, ready to generate."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from mlx_llama.core.backends import selection as backends
from mlx_llama.core.errors import ContextError, OptionsError, TemplateError
from mlx_llama.core.files.checkpoint import Checkpoint, open_checkpoint
from mlx_llama.core.models import rope
from mlx_llama.core.text.template import ChatTemplate, encode_messages, load_builtin_template, missing_template

from .engine import Completion, Engine
from .options import resolve
from .session import Sequence, Session, Stream
from .speculate import difference

Prompt = str | list[dict[str, str]] | list[int]


class LLM:
    """A loaded model. `generate`, `stream`, `chat` and `logits` are what scripts need."""

    def __init__(self, checkpoint: Checkpoint, backend: backends.Backend, model: backends.Model,
                 template: ChatTemplate | None, context: int, draft: backends.Model | None = None):
        self.checkpoint = checkpoint
        self.backend = backend
        self.model = model
        self.template = template
        self.tokenizer = checkpoint.tokenizer
        self.engine = Engine(backend, model, self.tokenizer, checkpoint.eos_token_ids, context, draft)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer to `prompt`; `print` shows its text. Takes and raises what `stream` does."""
        return self.stream(prompt, **options).finish()

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """The answer to `prompt` in pieces of text.

        prompt: a text is continued as it is (an empty one starts from BOS), messages go through the chat template, a
        list of ints is taken as token ids. options: see core.options.GenerationOptions. Each call starts cold.

        Raises OptionsError, ContextError, TemplateError, TokenizerError, before anything is computed.
        """
        resolved = resolve(options, self.checkpoint.generation_config,
                           str(self.checkpoint.path / "generation_config.json"))
        self.engine.check_options(resolved.options)
        tokens = self.encode(prompt)
        self.engine.check_prompt(tokens)
        completion = Completion(notices=[*resolved.notices, *self.engine.speculation(resolved.options)[1]])
        continues = len(prompt) > 0 and not isinstance(prompt[0], dict)
        return Stream(Sequence(self.engine).pieces(tokens, resolved, completion, not continues), completion)

    def chat(self, system: str | None = None, **options: Any) -> Session:
        """A conversation: `send` or `stream` each question. Raises TemplateError for a model without a template."""
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
        """Token ids of a prompt as `stream` understands it. Raises as `stream`."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_bos=True)
        if isinstance(prompt, np.ndarray):
            prompt = prompt.tolist()
        if not isinstance(prompt, (list, tuple)) or len(prompt) == 0:
            raise ContextError(f"a prompt is a text, messages or token ids, not "
                               f"{'nothing' if prompt == [] or prompt == () else type(prompt).__name__}")
        if all(isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt):
            return [int(token) for token in prompt]
        return encode_messages(self.tokenizer, self.require_template(), prompt)

    def require_template(self) -> ChatTemplate:
        """The chat template. Raises TemplateError that says how to give one."""
        if self.template is None:
            raise TemplateError(missing_template(self.checkpoint.name))
        return self.template


def load(model: str | os.PathLike | None = None, backend: str = "auto", device: str | None = None, dtype: str = "auto",
         *, revision: str | None = None, ctx_size: int | str | None = None, template: str | None = None,
         threads: int | None = None, activation_bits: int | None = None, compile: bool | None = None,
         draft_model: str | os.PathLike | None = None) -> LLM:
    """Load a model.

    model: a folder or a Hugging Face hub id; None is the small guide model in this package. backend: "auto" (MLX on
    Apple silicon, CUDA where torch sees a GPU, else the CPU), "mlx", "cpu" or "cuda". device: None, "gpu" or "cpu".
    dtype: "auto" (as stored), "float32", "float16" or "bfloat16". revision: of a hub id. ctx_size: positions the context
    may hold. template: a name or a .jinja file, instead of the checkpoint's. threads: of the cpu backend; None is one
    per physical core. activation_bits: of the cpu backend, against low-bit weights: 16 (None), 8 is faster and coarser,
    32 exact and slower. compile: a token as one traced graph (mlx) or by
    compiled kernels (cpu), or not, with the same tokens; None is yes, but for mlx on the CPU. draft_model: a smaller
    model with the same vocabulary, on the same backend; it guesses tokens ahead, which `model` verifies, unless the
    option speculate says otherwise.

    Raises CheckpointError, ConfigError, TokenizerError, TemplateError, BackendError, ContextError, OptionsError.
    """
    chosen = backends.select(backend, device)
    how = chosen.load_options(dtype, threads, activation_bits, compile)
    checkpoint = open_checkpoint(model, revision)
    context = context_size(checkpoint, ctx_size)
    chat_template = load_builtin_template(template, checkpoint.tokenizer) if template else checkpoint.template
    draft = None
    if draft_model is not None:
        draft = open_checkpoint(draft_model)
        if found := difference(draft, checkpoint):
            raise OptionsError(f"--draft-model {draft.name}: its vocabulary is not that of {checkpoint.name}, {found}: "
                               f"choose a smaller model of the same family")
    loaded = chosen.load(checkpoint, dtype, **how)
    return LLM(checkpoint, chosen, loaded, chat_template, context, draft and chosen.load(draft, dtype, **how))


def context_size(checkpoint: Checkpoint, ctx_size: int | str | None) -> int:
    """Positions of a context: what was asked for, or what the model was made for. Raises ContextError beyond that."""
    if ctx_size is None:
        return checkpoint.config.max_position_embeddings
    made_for = rope.longest(checkpoint.config)
    context = int(ctx_size) if re.fullmatch(r"\d{1,12}", str(ctx_size)) else 0
    if not 1 <= context <= made_for:
        raise ContextError(f"--ctx-size {ctx_size}: {checkpoint.name} was made for 1 to {made_for} positions")
    return context
