"""A conversation: its messages, and the cache that makes each turn prefill only what is new."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_llama.core.backends.interface import Cache
from mlx_llama.core.errors import ContextError, OptionsError, SessionError
from mlx_llama.core.models.rope import length_dependent
from mlx_llama.core.text.template import ChatTemplate, encode_messages

from . import speculate
from .engine import Completion, Engine
from .options import GenerationOptions, Resolved, resolve, validated

FORMAT = "mlx_llama session"
VERSION = 1


class Stream:
    """Pieces of text as they are generated; `completion` fills up while they come, and is final after the last."""

    def __init__(self, pieces: Iterator[str], completion: Completion):
        self._pieces = pieces
        self.completion = completion

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Stop generating; what was shown stays."""
        self._pieces.close()

    def finish(self) -> Completion:
        """Generate to the end and return the completion."""
        for _ in self:
            pass
        return self.completion


class Sequence:
    """One cache and the tokens it holds: continues any prompt from the longest common prefix. A draft model's cache is
    kept beside it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.cache: Cache = engine.model.make_cache(engine.context)
        self.held: list[int] = []
        self.drafts = speculate.ModelDrafts(engine.draft, engine.context) if engine.draft else None

    def pieces(self, prompt: list[int], resolved: Resolved, completion: Completion,
               starts_text: bool = True) -> Iterator[str]:
        """Text that follows `prompt` (see Engine.pieces). However it ends, cache and `held` agree afterwards."""
        self.engine.check_prompt(prompt)
        reused = self._reusable(prompt)
        self.cache.trim(reused)
        self.held = self.held[:reused]
        completion.prompt_tokens, completion.reused_tokens = len(prompt), reused
        drafter = self._drafter(prompt, resolved.options)
        try:
            yield from self.engine.pieces(prompt[reused:], self.cache, resolved, completion, starts_text, drafter)
        finally:
            # A step may have run ahead of the last token shown, or have been cut short: keep what is known.
            known = prompt + completion.tokens
            self.cache.trim(min(self.cache.length, len(known)))
            self.held = known[:self.cache.length]

    def _drafter(self, prompt: list[int], options: GenerationOptions) -> speculate.Drafter | None:
        kind, _ = self.engine.speculation(options)
        if kind == "none":
            return None
        if kind == "prompt":
            return speculate.PromptLookup(prompt)
        self.drafts.begin(prompt, self.engine.backend.sampler(options), options.prefill_step_size)
        return self.drafts

    def _reusable(self, prompt: list[int]) -> int:
        common = 0
        for held, wanted in zip(self.held, prompt):
            if held != wanted:
                break
            common += 1
        config = self.engine.model.config
        longest = max(len(prompt), len(self.held))
        if length_dependent(config) and longest > config.max_position_embeddings:
            return 0  # keys were rotated for a sequence of another length
        return min(common, len(prompt) - 1)  # the last token must run again to give logits


class Session:
    """A chat with one model. `messages` is the whole conversation; old turns leave the context, never this list."""

    def __init__(self, engine: Engine, template: ChatTemplate, generation_config: dict[str, Any], model: str,
                 system: str | None = None, options: dict[str, Any] | None = None):
        self.engine = engine
        self.template = template
        self.generation_config = generation_config
        self.model = model
        self.system = system
        # What the user gave; each call may add to it. None means not given.
        self.options = {name: value for name, value in (options or {}).items() if value is not None}
        self.messages: list[dict[str, str]] = []
        self.dropped = 0  # messages at the front that no longer fit the context
        self.last: Completion | None = None
        self.sequence = Sequence(engine)
        self._turn = 0  # counts what changes the conversation
        self._open: Stream | None = None  # the newest stream
        self._begun = False  # whether it is giving an answer now
        self._speculate: str | None = None  # as the newest answer's options had it
        self.resolved()  # bad options are an error now, not at the first question

    def resolved(self, **options: Any) -> Resolved:
        """The options in force. Raises OptionsError."""
        resolved = resolve({**self.options, **options}, self.generation_config)
        self.engine.check_options(resolved.options)
        return resolved

    def send(self, text: str, **options: Any) -> Completion:
        """Ask and wait for the whole answer. Raises as `stream`."""
        return self.stream(text, **options).finish()

    def stream(self, text: str, **options: Any) -> Stream:
        """Ask; the answer comes in pieces. The turn joins `messages` when the stream ends or is left.

        A session gives one answer at a time: one that is still coming ends here, and what it showed stays; one that
        was never begun raises SessionError when it is. Raises OptionsError, TemplateError or ContextError before
        anything is computed.
        """
        resolved = self.resolved(**options)
        self._settle()
        return self._ask(self.messages, text, resolved)

    def regenerate(self, **options: Any) -> Stream:
        """Answer the last question again, in place of its answer, which stays until the new one has begun.

        Raises SessionError when there is none, and what `stream` raises.
        """
        resolved = self.resolved(**options)
        self._settle()
        if not self.messages:
            raise SessionError("there is no answer to generate again: ask something first")
        return self._ask(self.messages[:-2], self.messages[-2]["content"], resolved)

    def _ask(self, before: list[dict[str, str]], text: str, resolved: Resolved) -> Stream:
        question = {"role": "user", "content": text}
        prompt, dropped = self._fit([*before, question], resolved)
        completion = Completion(notices=[] if self.last else list(resolved.notices))
        if not self.last or self._speculate != resolved.options.speculate:
            completion.notices += self.engine.speculation(resolved.options)[1]
        self._speculate = resolved.options.speculate
        if dropped > self.dropped:
            completion.notices.append(
                f"the conversation outgrew the context of {self.engine.context} tokens: the oldest "
                f"{dropped} messages are no longer seen by the model" + (", the system prompt stays" if self.system else ""))
        self._open = Stream(self._run(self._turn, [*before, question], prompt, dropped, resolved, completion), completion)
        return self._open

    def _run(self, turn: int, asked: list[dict[str, str]], prompt: list[int], dropped: int, resolved: Resolved,
             completion: Completion) -> Iterator[str]:
        if turn != self._turn:
            raise SessionError("the conversation went on before this answer was begun: ask again")
        self._begun = True
        try:
            yield from self.sequence.pieces(prompt, resolved, completion)
        finally:
            self._begun = False
            self._turn += 1
            # An answer cut off before its first character leaves the conversation as it was.
            if completion.text or completion.finish_reason != "interrupted":
                self.messages = [*asked, {"role": "assistant", "content": completion.text}]
                self.dropped = dropped
            self.last = completion

    def _settle(self) -> None:
        """End the answer that is still coming, and outdate those that were never begun."""
        if self._begun:
            self._open.close()
        self._turn += 1

    def clear(self) -> None:
        """Forget the conversation; the system prompt and the options stay."""
        self._settle()
        self.messages, self.dropped, self.last = [], 0, None

    def save(self, path: str | os.PathLike) -> None:
        """Write the conversation as JSON, whole or not at all. Raises SessionError."""
        path = _path(path)
        content = {"format": FORMAT, "version": VERSION, "model": self.model, "system": self.system,
                   "options": _plain(self.options), "dropped": self.dropped, "messages": self.messages}
        try:
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    json.dump(content, file, ensure_ascii=False, indent=1)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL, text that is not Unicode
            raise SessionError(f"{path}: cannot be written: {error}") from None

    def load(self, path: str | os.PathLike) -> list[str]:
        """Take over a saved conversation; returns notices for the user. Raises SessionError, and then nothing of the
        current conversation has changed."""
        content = _read(_path(path))
        options = content["options"]
        try:
            self.engine.check_options(resolve(options, self.generation_config).options)
        except OptionsError as error:
            raise SessionError(f"{path}: {error}") from None
        notices = []
        if content["model"] != self.model:
            notices.append(f"this conversation was held with {content['model']!r}, it goes on with {self.model!r}")
        self._settle()
        self.messages, self.dropped = content["messages"], content["dropped"]
        self.system, self.options, self.last = content["system"], options, None
        return notices

    def _fit(self, messages: list[dict[str, str]], resolved: Resolved) -> tuple[list[int], int]:
        """The prompt's tokens and how many of the oldest messages had to be left out of it."""
        # A quarter of the context stays free for the answer, less if a shorter answer was asked for.
        room = self.engine.context - max(1, min(resolved.options.max_tokens, self.engine.context // 4))
        first = self.dropped if self.dropped < len(messages) else 0
        system = [{"role": "system", "content": self.system}] if self.system else []
        for dropped in range(first, len(messages), 2):
            prompt = encode_messages(self.engine.tokenizer, self.template, system + messages[dropped:])
            # When turns must go, some more go with them: each time, all that stays is processed anew.
            if len(prompt) <= (room if dropped == first else room * 3 // 4):
                return prompt, dropped
        # The newest question alone may use the room kept for the answer, as long as one token is left.
        if len(prompt) >= self.engine.context:
            raise ContextError(f"this message makes a prompt of {len(prompt)} tokens and the context holds "
                               f"{self.engine.context}, answer included: shorten it{self.engine.more_context()}")
        return prompt, dropped


def _path(path: str | os.PathLike) -> Path:
    return Path(os.path.expanduser(path))  # Path.expanduser raises where there is no such user


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON can hold them."""
    return json.loads(validated(options).model_dump_json(include=set(options)))


def _read(path: Path) -> dict[str, Any]:
    """The content of a saved session, every field checked. Raises SessionError."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        raise SessionError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None
    try:
        content = json.loads(raw.decode("utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # lone surrogates are no text: no tokenizer takes them
    except (ValueError, RecursionError) as error:
        raise SessionError(f"{path}: is not a saved session (not JSON in UTF-8: {error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SessionError(f"{path}: is not a saved session (no \"format\": {FORMAT!r})")
    if content.get("version") != VERSION:
        raise SessionError(f"{path}: version is {content.get('version')!r}, this program reads {VERSION}")
    messages = content.get("messages")
    if not isinstance(messages, list) or len(messages) % 2:
        raise SessionError(f"{path}: messages must be a list of questions and answers in turn")
    for i, message in enumerate(messages):
        role = ("user", "assistant")[i % 2]
        if not isinstance(message, dict) or message.get("role") != role or not isinstance(message.get("content"), str):
            raise SessionError(f"{path}: messages[{i}] must have the role {role!r} and a text as content")
    dropped = content.get("dropped", 0)
    if type(dropped) is not int or not 0 <= dropped <= max(0, len(messages) - 2) or dropped % 2:
        raise SessionError(f"{path}: dropped is {dropped!r}, it must be even and leave the last turn of the "
                           f"{len(messages)} messages")
    for name, kind in (("system", (str, type(None))), ("model", str), ("options", dict)):
        if not isinstance(content.get(name), kind):
            raise SessionError(f"{path}: {name} is {content.get(name)!r:.40}, which is not a "
                               f"{'text' if name != 'options' else 'table'}")
    try:
        validated(content["options"], str(path))
    except OptionsError as error:
        raise SessionError(str(error)) from None
    messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    return {**content, "messages": messages, "dropped": dropped}
