"""A conversation: its messages, and a cache from which each turn reuses the common prefix."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from typing_extensions import Unpack

from mlx_llama.core.backends.interface import Cache
from mlx_llama.core.errors import ContextError, OptionsError, SessionError
from mlx_llama.core.models.rope import length_dependent
from mlx_llama.core.text.template import ChatTemplate, encode_messages

from .completion import Completion
from .engine import Engine
from .options import GenerationOptions, Options, Resolved, resolve, validate
from .prefixes import common_prefix
from .session_file import expand_path, read_session, write_session
from .speculate import Drafter, ModelDrafts, PromptLookup


class Stream:
    """Pieces of text as they are generated; `completion` grows with them and is final after the last."""

    def __init__(self, pieces: Generator[str, None, None], completion: Completion):
        self._pieces = pieces
        self.completion = completion

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating; the text so far stays in the conversation."""
        self._pieces.close()

    def finish(self) -> Completion:
        """Generate to the end and return the completion."""
        for _ in self:
            pass
        return self.completion


class Sequence:
    """One cache and the ids of its tokens; continues any prompt from the longest common prefix.

    A draft model has a cache of its own beside it.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.cache: Cache = engine.model.make_cache(engine.context)
        self.cached_tokens: list[int] = []
        self.drafts = ModelDrafts(engine.draft, engine.context) if engine.draft else None

    def pieces(self, prompt: list[int], resolved: Resolved, completion: Completion,
               starts_text: bool = True) -> Generator[str, None, None]:
        """Text after `prompt`, as Engine.pieces. `cached_tokens` matches the cache on every exit."""
        self.engine.check_prompt(prompt)
        reused = self._count_reusable(prompt)
        self.cache.trim(reused)
        self.cached_tokens = self.cached_tokens[:reused]
        completion.prompt_tokens, completion.reused_tokens = len(prompt), reused
        drafter = self._make_drafter(prompt, resolved.options)
        try:
            yield from self.engine.pieces(prompt[reused:], self.cache, resolved, completion, starts_text, drafter)
        finally:
            # A step may have run ahead of the last token, or prefill may have been cut short.
            tokens = prompt + completion.tokens
            self.cache.trim(min(self.cache.length, len(tokens)))
            self.cached_tokens = tokens[:self.cache.length]

    def _make_drafter(self, prompt: list[int], options: GenerationOptions) -> Drafter | None:
        kind, _ = self.engine.choose_speculation(options)
        if kind == "none":
            return None
        if kind == "prompt":
            return PromptLookup(prompt)
        self.drafts.begin(prompt, self.engine.backend.sampler(options), options.prefill_step_size)
        return self.drafts

    def _count_reusable(self, prompt: list[int]) -> int:
        config = self.engine.model.config
        longest = max(len(prompt), len(self.cached_tokens))
        if length_dependent(config) and longest > config.max_position_embeddings:
            return 0  # the cached keys were rotated for another length
        return min(common_prefix(self.cached_tokens, prompt), len(prompt) - 1)  # the last token must give logits


class Session:
    """A chat with one model.

    messages: the whole conversation; old turns leave the context, never this list. options: the user's, by name.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, generation_config: dict[str, Any], model: str,
                 system: str | None = None, options: Mapping[str, Any] | None = None):
        self.engine = engine
        self.template = template
        self.generation_config = generation_config
        self.model = model
        self.system = system
        self.options = {name: value for name, value in (options or {}).items() if value is not None}
        self.messages: list[dict[str, str]] = []
        self.dropped = 0  # messages at the front that no longer fit the context
        self.last: Completion | None = None
        self.sequence = Sequence(engine)
        self._turn = 0  # counts changes of the conversation
        self._open: Stream | None = None  # the newest stream
        self._is_answering = False  # the newest stream has begun and not ended
        self._speculate: str | None = None  # the option of the newest answer
        self.resolve()  # report bad options now, not at the first question

    def __repr__(self) -> str:
        used = f"{self.sequence.cache.length} of {self.engine.context} positions"
        return f"Session({self.model!r}, {len(self.messages)} messages, {used})"

    def resolve(self, **options: Any) -> Resolved:
        """The options in force, `options` added. Raises OptionsError."""
        resolved = resolve({**self.options, **options}, self.generation_config)
        self.engine.check_options(resolved.options)
        return resolved

    def send(self, text: str, **options: Unpack[Options]) -> Completion:
        """Ask and wait for the whole answer. Raises as `stream`."""
        return self.stream(text, **options).finish()

    def stream(self, text: str, **options: Unpack[Options]) -> Stream:
        """Ask; the answer comes in pieces. The turn joins `messages` when the stream ends or is closed.

        A session gives one answer at a time. A new question ends an unfinished answer, whose text stays; a stream that
        was not begun by then raises SessionError later. Raises OptionsError, TemplateError or ContextError before
        any computing.
        """
        resolved = self.resolve(**options)
        self._settle()
        return self._ask(self.messages, text, resolved)

    def regenerate(self, **options: Unpack[Options]) -> Stream:
        """Answer the last question again. The old answer stays until the new one has begun.

        Raises SessionError without a question, and as `stream`.
        """
        resolved = self.resolve(**options)
        self._settle()
        if not self.messages:
            raise SessionError("there is no answer to generate again: ask something first")
        return self._ask(self.messages[:-2], self.messages[-2]["content"], resolved)

    def _ask(self, before: list[dict[str, str]], text: str, resolved: Resolved) -> Stream:
        question = {"role": "user", "content": text}
        prompt, dropped = self._fit([*before, question], resolved)
        completion = Completion(notices=[] if self.last else list(resolved.notices))
        if not self.last or self._speculate != resolved.options.speculate:
            completion.notices += self.engine.choose_speculation(resolved.options)[1]
        self._speculate = resolved.options.speculate
        if dropped > self.dropped:
            completion.notices.append(
                f"the conversation outgrew the context of {self.engine.context} tokens: the oldest "
                f"{dropped} messages are no longer seen by the model" + (", the system prompt stays" if self.system else ""))
        self._open = Stream(self._run(self._turn, [*before, question], prompt, dropped, resolved, completion), completion)
        return self._open

    def _run(self, turn: int, asked: list[dict[str, str]], prompt: list[int], dropped: int, resolved: Resolved,
             completion: Completion) -> Generator[str, None, None]:
        if turn != self._turn:
            raise SessionError("the conversation went on before this answer was begun: ask again")
        self._is_answering = True
        try:
            yield from self.sequence.pieces(prompt, resolved, completion)
        finally:
            self._is_answering = False
            self._turn += 1
            # An answer interrupted before its first character does not change the conversation.
            if completion.text or completion.finish_reason != "interrupted":
                self.messages = [*asked, {"role": "assistant", "content": completion.text}]
                self.dropped = dropped
            self.last = completion

    def _settle(self) -> None:
        """End an unfinished answer and invalidate streams that were not begun."""
        if self._is_answering:
            self._open.close()
        self._turn += 1

    def clear(self) -> None:
        """Forget the conversation; the system prompt and the options stay."""
        self._settle()
        self.messages, self.dropped, self.last = [], 0, None

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation as JSON, whole or not at all. Raises SessionError."""
        options = json.loads(validate(self.options).model_dump_json(include=set(self.options)))
        write_session(expand_path(path), model=self.model, system=self.system, options=options, messages=self.messages,
                      dropped=self.dropped)

    def load(self, path: str | os.PathLike) -> list[str]:
        """Continue a saved conversation; returns notices. Raises SessionError, and then changes nothing."""
        saved = read_session(expand_path(path))
        try:
            self.engine.check_options(resolve(saved.options, self.generation_config).options)
        except OptionsError as error:
            raise SessionError(f"{path}: {error}") from None
        notices = []
        if saved.model != self.model:
            notices.append(f"this conversation was held with {saved.model!r}, it goes on with {self.model!r}")
        self._settle()
        self.messages, self.dropped = [message.model_dump() for message in saved.messages], saved.dropped
        self.system, self.options, self.last = saved.system, saved.options, None
        return notices

    def _fit(self, messages: list[dict[str, str]], resolved: Resolved) -> tuple[list[int], int]:
        """Drop the oldest turns until the prompt fits; returns its tokens and the number of dropped messages."""
        # Keep a quarter of the context free for the answer, or max_tokens if that is less.
        room = self.engine.context - max(1, min(resolved.options.max_tokens, self.engine.context // 4))
        first = self.dropped if self.dropped < len(messages) else 0
        system = [{"role": "system", "content": self.system}] if self.system else []
        for dropped in range(first, len(messages), 2):
            prompt = encode_messages(self.engine.tokenizer, self.template, system + messages[dropped:])
            # Drop to three quarters at once: after each drop, all remaining turns are prefilled again.
            if len(prompt) <= (room if dropped == first else room * 3 // 4):
                return prompt, dropped
        # The newest question alone may use the answer's room but for one token.
        if len(prompt) >= self.engine.context:
            raise ContextError(f"this message makes a prompt of {len(prompt)} tokens and the context holds "
                               f"{self.engine.context}, answer included: shorten it{self.engine.suggest_context()}")
        return prompt, dropped

