"""`load` and its result: a model with its tokenizer and template, ready to generate."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import textwrap
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, overload

import numpy as np
from typing_extensions import Unpack

from mlx_llama.core.answers.completion import Aside, Completion
from mlx_llama.core.answers.hooks import Hooks, split_hooks
from mlx_llama.core.backends import selection as backends
from mlx_llama.core.backends.interface import Model
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.engine.builder import RequestBuilder
from mlx_llama.core.engine.drafts import compare_vocabularies
from mlx_llama.core.engine.loop import Loop, Worker
from mlx_llama.core.engine.request import Answer, Request, Sequence
from mlx_llama.core.errors import ContextError, OptionsError, TemplateError, TokenizerError
from mlx_llama.core.files.checkpoint import Checkpoint, check_name, open_checkpoint
from mlx_llama.core.files.tensor import FileWatch
from mlx_llama.core.models import rope
from mlx_llama.core.options import (
    ALIASES,
    LOAD_FIELDS,
    Defaults,
    LoadOptions,
    Options,
    Resolved,
    about,
    list_adapters,
)
from mlx_llama.core.system import progress
from mlx_llama.core.system.forks import cached_property, find_launcher
from mlx_llama.core.text.controls import find_notices
from mlx_llama.core.text.infill import Infill
from mlx_llama.core.text.template import (
    ChatTemplate,
    encode_messages,
    load_builtin_template,
    missing_template,
)
from mlx_llama.core.text.tools import ToolDelta, read_tools

from . import ON_QUESTION
from .cache_file import Identity, read_cache, write_cache
from .session import Messages, Session
from .tool_use import ROUNDS, Conversation, Rounds, Toolbox

Fields = ParamSpec("Fields")
PLAIN = (
    "a text is continued as it is, without the model's chat template: for an answer to a question "
    "use ask, chat, or messages"
)
# A text, messages, token ids, or a gap between texts.
Prompt = str | Infill | abc.Sequence[abc.Mapping[str, str]] | abc.Sequence[int] | np.ndarray


class LLM:
    """A loaded model: `ask` a question, `chat` for a conversation; `generate`, `stream`, `astream`
    and `batch` continue texts or answer messages; `logits`, `encode`.

    Any thread may call any method. All answers are computed together by `loop`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        backend: backends.Backend,
        model: Model,
        template: ChatTemplate | None,
        context: int,
        **limits: Any,
    ):
        """limits: see Loop."""
        self.checkpoint = checkpoint
        self.backend = backend
        self.model = model
        self.template = template
        self.tokenizer = checkpoint.tokenizer
        eos = checkpoint.eos_token_ids
        self.loop = Loop(backend, model, self.tokenizer, eos, context, **limits)
        chosen = (template.notice,) if template and template.notice else ()
        self.engine.notices = (*self.tokenizer.notices, *chosen)
        # the first continued text gets the notice PLAIN
        self.tells_plain = template is not None
        self.on_question: abc.Callable[[LLM, str], list[Aside]] | None = None

    @property
    def engine(self) -> RequestBuilder:
        """The model and the checks of its requests."""
        return self.loop.engine

    def close(self) -> None:
        """End running answers and free keys and values. The weights go with the last reference.
        Raises SessionError in a callback of a request.
        """
        self.loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        width = self.model.dtype_name
        return (
            f"LLM({self.checkpoint.name!r}, backend={self.backend.name!r}, "
            f"device={self.backend.device_name!r}, dtype={width!r}, context={self.engine.context})"
        )

    @overload
    def ask(
        self, question: str, system: str | None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    def ask(
        self,
        question: list[str] | tuple[str, ...],
        system: str | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    def ask(
        self,
        question: str | list[str] | tuple[str, ...],
        system: str | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """The whole answer to a question, by the model's chat template; `print` shows its text. For
        a list of questions, those to each in a conversation of its own, computed together.

        system: instructions before it. options: see GenerationOptions. `chat` remembers questions
        and answers, and its `stream` yields pieces of text. Raises TemplateError for a model
        without a template, and as `stream`, for a list as `batch`.
        """
        if isinstance(question, (list, tuple)):
            return self._finish_all(self._ask_all(question, system, options), question)
        completion = self.generate(self._ask(question, system), **options)
        completion.asides = self.look_up(question)
        return completion

    @overload
    async def aask(
        self, question: str, system: str | None = None, **options: Unpack[Options]
    ) -> Completion: ...

    @overload
    async def aask(
        self,
        question: list[str] | tuple[str, ...],
        system: str | None = None,
        **options: Unpack[Options],
    ) -> list[Completion]: ...

    async def aask(
        self,
        question: str | list[str] | tuple[str, ...],
        system: str | None = None,
        **options: Unpack[Options],
    ) -> Completion | list[Completion]:
        """`ask` for asyncio. Cancelling the task ends the answers."""
        import asyncio  # takes 30 ms

        if isinstance(question, (list, tuple)):
            self.loop.refuse_callback("wait for an answer")
            answers = self._ask_all(question, system, options)
            try:
                return await asyncio.to_thread(self._finish_all, answers, question)
            finally:
                for answer in answers:
                    answer.close()
        completion = await self.agenerate(self._ask(question, system), **options)
        completion.asides = await asyncio.to_thread(self.look_up, question)
        return completion

    def look_up(self, question: str) -> list[Aside]:
        """The texts to show beside the answer to a question; none without `on_question`."""
        return self.on_question(self, question) if self.on_question else []

    def _ask_all(
        self, questions: abc.Sequence[str], system: str | None, options: Any
    ) -> list[Answer[str]]:
        talks = [self._ask(text, system, f"[{i}]") for i, text in enumerate(questions)]
        return self._prepare_all(talks, options)

    def _ask(self, question: Any, system: str | None, place: str = "") -> list[dict[str, str]]:
        self.require_template()
        if not isinstance(question, str):
            name = f"questions{place}: a question" if place else "a question"
            raise ContextError(
                f"{name} is a text, not {type(question).__name__}: generate takes messages and "
                "token ids"
            )
        before = [] if system is None else [{"role": "system", "content": system}]
        return [*before, {"role": "user", "content": question}]

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole continuation of a text, without the chat template, or the answer to messages;
        `print` shows its text. For a question see `ask`. Arguments and errors as for `stream`.
        """
        return self.stream(prompt, **options).finish()

    def infill(
        self,
        prefix: str,
        suffix: str,
        files: abc.Sequence[tuple[str, str]] = (),
        **options: Unpack[Options],
    ) -> Completion:
        """The text between two parts of a file, by a model that has fill-in-the-middle tokens.

        files: (name, text) of other files to consider, the most relevant last. Raises
        TokenizerError for a model without such tokens, and as `stream`.
        """
        return self.generate(Infill(prefix, suffix, files), **options)

    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """`generate` for asyncio. Cancelling the task ends the answer."""
        import asyncio  # takes 30 ms

        self.loop.refuse_callback("wait for an answer")
        answer = self.stream(prompt, **options)
        try:
            return await asyncio.to_thread(answer.finish)
        finally:
            answer.close()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Answer[str]:
        """The answer to `prompt` in pieces of text.

        prompt: a text to continue (an empty one starts from BOS), messages for the chat template,
        or token ids. options: see GenerationOptions. logits_processor: a function or several,
        f(tokens int32 [T], logits float32 [1, V]) -> logits in NumPy, called before each token with
        prompt and answer so far, as in mlx-lm; it costs one more wait for the device per token of
        this request. on_progress: f(done, total), tokens of the prompt, called after each chunk.
        on_piece: f(text, kind), called with each piece of the answer; kind: "text" or "thought".

        Raises OptionsError, ContextError, TemplateError, TokenizerError, before any computing;
        NumericalError later.
        """
        return Answer[str](self._prepare(prompt, options), self.loop)

    def batch(self, prompts: abc.Iterable[Prompt], **options: Unpack[Options]) -> list[Completion]:
        """The answers to several prompts in their order, computed together; a bar on a terminal
        shows the progress.

        Each is what `generate` gives; for questions see `ask`. One that fails while others go on
        has the finish reason "error" and the message in `error`. Raises ContextError without
        prompts, for a text in their place, and as `stream`, naming the prompt, before any
        computing.
        """
        if isinstance(prompts, str):
            raise ContextError("batch takes a list of prompts, not a text: put it into a list")
        if not isinstance(prompts, abc.Iterable):
            raise ContextError(f"batch takes a list of prompts, not {type(prompts).__name__}")
        return self._finish_all(self._prepare_all(prompts, options))

    def _prepare_all(self, prompts: abc.Iterable[Prompt], options: Any) -> list[Answer[str]]:
        answers: list[Answer[str]] = []
        for number, prompt in enumerate(prompts):
            try:
                answers.append(self.stream(prompt, **options))
            except (ContextError, TemplateError, TokenizerError) as error:
                raise type(error)(f"prompts[{number}]: {error}") from None
        if not answers:
            raise ContextError("batch needs at least one prompt")
        return answers

    def _finish_all(
        self, answers: list[Answer[str]], questions: abc.Sequence[str] = ()
    ) -> list[Completion]:
        """Compute answers together. questions: those that they answer, if they answer any."""
        try:
            for answer in answers:
                answer.begin()
            with progress.show_count("generating", len(answers)) as show:
                for answer in answers:
                    try:
                        for count, _ in enumerate(answer.pieces()):
                            if count % 16 == 0:
                                show(sum(other.done for other in answers))
                    except Exception:
                        if answer.error is None:  # not the request's
                            raise
        finally:
            for answer in answers:
                answer.close()
        for answer, question in zip(answers, questions):
            answer.completion.asides = self.look_up(question)
        return [answer.completion for answer in answers]

    def submit(self, prompt: Prompt, **options: Unpack[Options]) -> Answer[str]:
        """Queue `prompt` for `loop`, whose ticks compute it. Arguments and errors: see `stream`."""
        return self.stream(prompt, **options).begin()

    async def astream(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> abc.AsyncGenerator[str, None]:
        """`stream` for asyncio: `async for piece in ...`. Leaving the loop ends the answer."""
        import asyncio  # takes 30 ms

        self.loop.refuse_callback("wait for an answer")
        answer = self.stream(prompt, **options)
        try:
            while (piece := await asyncio.to_thread(next, answer, None)) is not None:
                yield piece
        finally:
            answer.close()

    def respond(
        self,
        messages: Messages,
        tools: abc.Sequence[Any],
        tool_choice: str = "auto",
        parallel: bool = True,
        **options: Unpack[Options],
    ) -> Answer[str | ToolDelta]:
        """The answer to messages, in pieces of text and of tool calls.

        tools: Python functions with type hints, or OpenAI's descriptions. tool_choice: "auto",
        "none", "required" or a tool's name. parallel: an enforced answer may have several calls.
        Raises as `stream`.
        """
        box = Toolbox(tuple(read_tools(tools)), tool_choice, parallel)
        return Answer[str | ToolDelta](self._ask_with(messages, box, options), self.loop)

    def run_tools(
        self,
        messages: str | Messages,
        tools: abc.Sequence[abc.Callable[..., Any]],
        tool_choice: str = "auto",
        parallel: bool = True,
        rounds: int = ROUNDS,
        **options: Unpack[Options],
    ) -> tuple[Completion, list[dict[str, Any]]]:
        """Answer a question or messages, calling Python functions, until an answer calls none or
        after `rounds` answers.

        tool_choice: of the first answer; later ones are free. A call that fails has its error for a
        result. Returns the last completion and all messages, calls and results included.
        `chat(tools=...)` does the same in a conversation. Raises as `respond`.
        """
        box = Toolbox(tuple(read_tools(tools)), tool_choice, parallel)
        box.check_functions()
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        turn = _Calls(self, messages, box, rounds, options)
        completion = Answer[str](turn.begin(), self.loop, turn).finish()
        return completion, turn.messages

    def _ask_with(
        self, messages: Messages, box: Toolbox, options: abc.Mapping[str, Any]
    ) -> Sequence:
        """Prepare an answer to messages with tools. Raises as `stream`."""
        resolved, hooks = self._resolve(options)
        box.check(resolved.options)
        template = self.require_template()
        talk = Conversation(
            self.tokenizer, template, messages=messages, box=box, options=resolved.options
        )
        prompt = talk.encode(self.engine.count_checker(resolved.options))
        sequence = self.loop.prepare(prompt.request(resolved, hooks=hooks))
        sequence.writer.completion.notices += find_notices(messages)
        return sequence

    @cached_property
    def defaults(self) -> Defaults:
        """The checkpoint's options. Raises OptionsError."""
        path = self.checkpoint.path / "generation_config.json"
        return Defaults(self.checkpoint.generation_config, str(path))

    def _resolve(self, options: abc.Mapping[str, Any]) -> tuple[Resolved, Hooks]:
        rest, hooks = split_hooks(options)
        return self.defaults.resolve(rest), hooks

    def _prepare(self, prompt: Prompt, options: abc.Mapping[str, Any]) -> Sequence:
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            return self._ask_with(prompt, Toolbox(), options)
        resolved, hooks = self._resolve(options)
        if isinstance(prompt, Infill):
            tokens = prompt.encode(self.tokenizer, self.engine.context, resolved.options.max_tokens)
            eos = self.engine.eos | prompt.find_ends(self.tokenizer)
            request = Request(tokens, resolved, starts_text=False, eos=eos, hooks=hooks)
            return self.loop.prepare(request)
        tokens = self.encode(prompt, self.engine.count_checker(resolved.options))
        starts_text = len(prompt) == 0
        request = Request(tokens, resolved, starts_text=starts_text, hooks=hooks)
        sequence = self.loop.prepare(request)
        notices = sequence.writer.completion.notices
        notices += find_notices(prompt) if isinstance(prompt, str) else []
        if isinstance(prompt, str) and prompt and self.tells_plain:
            self.tells_plain = False
            notices.insert(0, PLAIN)
        return sequence

    def save_cache(self, path: str | os.PathLike) -> None:
        """Write tokens, keys and values of the latest prompt and answer (of the first adapter), for
        another process. Raises SessionError.
        """
        adapter = self.engine.default_adapter
        write_cache(path, self.loop.export(None, adapter), self.identify_cache(adapter))

    def load_cache(self, path: str | os.PathLike) -> int:
        """Read what `save_cache` wrote; prompts that begin with its tokens start from there.
        Returns their number. Raises SessionError for a damaged or foreign file, ContextError
        without room.
        """
        adapter = self.engine.default_adapter
        state = read_cache(path, self.identify_cache(adapter))
        self.loop.install(state, adapter)
        return len(state["tokens"])

    def identify_cache(self, adapter: int = 0) -> Identity:
        """The model, width and adapter (number, 0: none) that a prompt cache file must match.
        Raises CheckpointError if the model's file has changed.
        """
        self.engine.files.check()  # its hash reads some rows
        dtype, bits = self.model.dtype_name, self.model.cache_bits
        return Identity.of(self.checkpoint, dtype, bits, self.engine.context, adapter)

    def chat(
        self,
        system: str | None = None,
        tools: abc.Sequence[abc.Callable[..., Any]] = (),
        tool_choice: str = "auto",
        parallel: bool = True,
        rounds: int = ROUNDS,
        messages: Messages = (),
        **options: Unpack[Options],
    ) -> Session:
        """A conversation: `send` or `stream` each question.

        messages: earlier questions and answers in turn, perhaps after a system message. tools:
        Python functions with type hints, which the model may call; it answers again with their
        results. tool_choice, parallel, rounds: of each question, as for `run_tools`. Raises
        OptionsError, and TemplateError without a template.
        """
        box = Toolbox(tuple(read_tools(tools)), tool_choice, parallel)
        checked: Any = messages  # by Session
        return Session(
            loop=self.loop,
            template=self.require_template(),
            defaults=self.defaults,
            model=self.checkpoint.name,
            system=system,
            options={**options},
            identify_cache=self.identify_cache,
            toolbox=box,
            rounds=rounds,
            messages=checked,
            look_up=self.look_up,
        )

    def prompt_logprobs(
        self, prompt: Prompt, top: int = 0, adapter: str | None = None
    ) -> list[TokenLogprobs | None]:
        """The log-probability of each token of a prompt after those before it, None for the first,
        and of the `top` most likely ones. Computed in chunks. Raises as `stream`.
        """
        resolved = self.defaults.resolve({"max_tokens": 0, "logprobs": top, "adapter": adapter})
        tokens = self.encode(prompt, self.engine.count_checker(resolved.options))
        request = Request(tokens, resolved, reuses=False, prompt_logprobs=top)
        return self.loop.submit(request).finish().prompt_logprobs

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Logits after each of `tokens`: float32 [T, V]. Raises ContextError, CheckpointError if
        the model's file has changed, and BackendError in a forked process that cannot compute.
        """
        if isinstance(tokens, (str, bytes)) or not isinstance(tokens, abc.Sized):
            kind = type(tokens).__name__
            raise ContextError(
                f"logits takes token ids, not {kind}: llm.encode makes them of a text"
            )
        if len(tokens) == 0:
            raise ContextError("logits needs at least one token")
        if len(tokens) > (context := self.engine.context):
            raise ContextError(f"{len(tokens)} tokens do not fit the context of {context}")
        self.engine.files.check()

        def compute() -> np.ndarray:
            cache = self.model.make_cache(len(tokens))
            return self.backend.runtime.to_numpy(
                self.model.forward([list(tokens)], 0, cache, all_positions=True)
            )[0]

        logits = self.loop.compute(compute)
        self.engine.files.check()
        return logits

    def encode(
        self, prompt: Prompt, check_count: abc.Callable[[int], None] | None = None, **variables: Any
    ) -> list[int]:
        """Token ids of a prompt (as for `stream`). check_count: called with a lower bound of their
        number before a text is encoded; may raise. variables: of the chat template, such as
        enable_thinking. Raises ContextError, TemplateError, TokenizerError.
        """
        if isinstance(prompt, Infill):
            return prompt.encode(self.tokenizer, self.engine.context, 0)
        if isinstance(prompt, str):
            if check_count is not None:
                check_count(self.tokenizer.count_at_least(prompt))
            return self.tokenizer.encode(prompt, add_bos=True)
        items: Any = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
        if not isinstance(items, (list, tuple)) or len(items) == 0:
            kind = "nothing" if items == [] or items == () else type(items).__name__
            raise ContextError(f"a prompt is a text, messages or token ids, not {kind}")
        kinds = {type(item) for item in items}
        if all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            return [int(token) for token in items]
        return encode_messages(
            self.tokenizer, self.require_template(), items, check_count=check_count, **variables
        )

    def require_template(self) -> ChatTemplate:
        """The chat template. Raises TemplateError with the remedy if there is none."""
        if self.template is None:
            raise TemplateError(missing_template(self.checkpoint.name))
        return self.template


class _Calls(Rounds):
    """The answers of `run_tools`."""

    def __init__(
        self,
        llm: LLM,
        messages: Messages,
        box: Toolbox,
        rounds: int,
        options: abc.Mapping[str, Any],
    ):
        super().__init__(messages, box, rounds)
        self._llm, self._options = llm, options

    def ask(self, messages: Messages, box: Toolbox) -> Sequence:
        return self._llm._ask_with(messages, box, self._options)


def with_parameters(
    options: Callable[Fields, LoadOptions],
) -> Callable[[Callable[[LoadOptions], LLM]], Callable[Fields, LLM]]:
    """Give a function the fields of its options as parameters, for help() and type checkers."""

    def decorate(function: Callable[[LoadOptions], LLM]) -> Callable[Fields, LLM]:
        @functools.wraps(function)
        def load(*args: Fields.args, **values: Fields.kwargs) -> LLM:
            for name in values:
                check_option(name)
            return function(options(*args, **values))

        signature = inspect.signature(options, eval_str=True)
        load.__signature__ = signature.replace(return_annotation=LLM)  # type: ignore[attr-defined]
        fill = textwrap.TextWrapper(120, "    ", "        ").fill
        for name, entry in LOAD_FIELDS.items():
            choices = about(entry)["choices"]
            listed = "" if isinstance(choices, range) else ", ".join(map(repr, choices))
            text = f"{name}: {entry.description}{listed and f'. One of {listed}'}"
            load.__doc__ = f"{load.__doc__}\n{fill(text)}"
        return load

    return decorate


def check_option(name: str) -> None:
    """Raise OptionsError for an option that `load` lacks."""
    if name in LOAD_FIELDS:
        return
    names = {
        alias: known for known in LOAD_FIELDS for alias in about(LOAD_FIELDS[known])["aliases"]
    }
    names |= dict.fromkeys(("ctx", "n_ctx", "context", "context_length"), "ctx_size")
    if name in ALIASES and name not in names:
        raise OptionsError(f"{name!r} is an option of ask, chat, generate and stream, not of load")
    near = difflib.get_close_matches(name, [*LOAD_FIELDS, *names], 1)
    known = names.get(near[0], near[0]) if near else ""
    remedy = f" (did you mean {known!r}?)" if near else ": help(mlx_llama.load) lists them"
    raise OptionsError(f"there is no option {name!r}{remedy}")


@with_parameters(LoadOptions)
def load(options: LoadOptions) -> LLM:
    """Load a model. In a script under mlx.launch or torchrun each process loads a share; only rank
    0 returns, the others follow it and exit.

    Raises CheckpointError, ConfigError, TokenizerError, TemplateError, BackendError, ContextError,
    OptionsError.
    """
    if launcher := find_launcher():
        from mlx_llama.distributed.following import follow_leader

        if follow_leader(launcher):
            raise SystemExit(0)
    backend = backends.select(options.backend, options.device)
    options = backend.check(options)
    # The check has replaced texts and defaults.
    assert isinstance(options.adapters, tuple)
    assert not isinstance(options.cache_memory, str) and options.max_rows is not None
    checkpoint = open_checkpoint(options.model, options.revision, options.adapters)
    notices: list[str] = []
    context = context_size(checkpoint, options.ctx_size, notices.append)
    template = checkpoint.template
    if options.template:
        template = load_builtin_template(os.fspath(options.template), checkpoint.tokenizer)
    smaller = None if options.draft_model is None else open_checkpoint(options.draft_model)
    if smaller and (difference := compare_vocabularies(smaller, checkpoint)):
        raise OptionsError(
            f"`draft_model` {smaller.name}: its vocabulary is not that of {checkpoint.name}, "
            f"{difference}: choose a smaller model of the same family"
        )

    def load_both() -> tuple[Model, Model | None]:
        report = options.on_progress
        with progress.show_bytes("loading") if report is None else progress.reported(report):
            loaded = backend.build(checkpoint, options)
            # Drafts are verified, so they need no invariance.
            variant = replace(options, batch_invariant=False)
            return loaded, backend.build(smaller, variant) if smaller else None

    models = [checkpoint, smaller] if smaller else [checkpoint]
    files = FileWatch([model.tensors for model in models], backends.find_guard())
    worker = Worker() if backend.runtime.HAS_ONE_THREAD else None
    try:
        loaded, draft = worker.call_until_interrupt(load_both) if worker else load_both()
        limits: Any = {"cache_memory": options.cache_memory, "max_rows": options.max_rows}
        limits |= {"draft": draft, "worker": worker}
        llm = LLM(checkpoint, backend, loaded, template, context, **limits)
        llm.engine.files = files
        llm.engine.notices = (*llm.engine.notices, *notices)
        llm.on_question = ON_QUESTION.get(str(checkpoint.path))
        return llm
    except BaseException:
        if worker:
            worker.close()
        raise


def single_adapter(options: LoadOptions) -> tuple[str | os.PathLike, ...]:
    """The adapter of a command that takes one; () for none. Raises OptionsError for several."""
    adapters = list_adapters(options.adapters)
    if len(adapters) > 1:
        raise OptionsError(
            f"`adapters`: there are {len(adapters)}, and this command takes one: choose one"
        )
    return adapters


def check_load(options: LoadOptions) -> None:
    """Make the quick checks of options before `load`. Raises as `load`."""
    backends.select(options.backend, options.device).check(options)
    check_name(options.model)
    if options.draft_model is not None:
        check_name(options.draft_model)
    if options.template:
        load_builtin_template(options.template)


def context_size(
    checkpoint: Checkpoint, ctx_size: int | str | None, notify: abc.Callable[[str], object]
) -> int:
    """Positions of a context; None: as many as the model was trained for. A larger number than it
    takes is lowered, and `notify` gets a notice. Raises ContextError for no positive number.
    """
    if ctx_size is None:
        return checkpoint.config.max_position_embeddings
    maximum = rope.max_context(checkpoint.config)
    context = int(ctx_size) if re.fullmatch(r"\d{1,12}", str(ctx_size)) else 0
    text = f"`ctx_size` {ctx_size}: {checkpoint.name} takes 1 to {maximum} positions"
    if context < 1:
        raise ContextError(text)
    if context > maximum:
        notify(f"{text}; the context has {maximum}")
    return min(context, maximum)
