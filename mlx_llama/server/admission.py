"""The scheduler's answers for the event loop: admit, stream, cancel and count them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import anyio
from starlette.requests import Request as HttpRequest

from mlx_llama.api.llm import LLM
from mlx_llama.api.tool_use import Conversation, Toolbox, ToolPrompt, fit_turns
from mlx_llama.core.answers.completion import Completion
from mlx_llama.core.answers.grammar import Rule
from mlx_llama.core.answers.schema import Schema
from mlx_llama.core.engine.builder import PromptTooLong, RequestBuilder
from mlx_llama.core.engine.request import Request
from mlx_llama.core.errors import (
    CheckpointError,
    ContextError,
    LlamaError,
    OptionsError,
    TokenizerError,
    plain,
)
from mlx_llama.core.files.adapters import BASE
from mlx_llama.core.options import FIELDS, GenerationOptions, Resolved, validate
from mlx_llama.core.text.adapting import join_parts
from mlx_llama.core.text.infill import Infill
from mlx_llama.core.text.template import ChatTemplate, load_builtin_template
from mlx_llama.core.text.thoughts import find_thoughts

from .faults import Fault, Refusal, bad_field, client_gone, fault_of, shutting_down, unavailable
from .fields import MAX_BIAS, RULES, AdapterScales, Note
from .metrics import Metrics
from .model_holder import ModelHolder
from .settings import Settings
from .slots import Task

Result = TypeVar("Result")

# A text whose tokens are counted may have so many contexts, or so many tokens if those are more
COUNTED_CONTEXTS, COUNTED_TOKENS = 4, 100_000
PREPARING, COMPILING = 8, 2  # threads for requests without a rule, and for those that compile one


@dataclass(frozen=True)
class PromptRequest:
    """A prompt and its options, from any API."""

    prompt: Any  # a text to continue, messages for the template, token ids, or an Infill
    field: str  # the body's, with the prompt
    # by their names in the table; defaults come from the server, the checkpoint and the table
    options: dict[str, Any]
    toolbox: Toolbox = Toolbox()
    reuses: bool = True  # see Request
    decode_seconds: float | None = None  # see Request
    ignores_eos: bool = False  # continue after end tokens
    prompt_logprobs: int | None = None  # see Request
    note: Note = lambda place: None
    # drop the oldest turns of messages that outgrew the context; None: as the server does
    truncates: bool | None = None
    lora: AdapterScales | None = None  # chooses the adapter; None: it was not sent
    # for the chat template, such as enable_thinking
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Failure(Refusal):
    """The end of an answer: a failed step, a timeout, shutdown, a rule that grew too complex."""


class Answers:
    """Answers to an HTTP request, one per prompt, computed together. `close` cancels the rest."""

    def __init__(self, admission: Admission, llm: LLM, seconds: float):
        self._admission, self.llm, self.settings = admission, llm, admission.settings
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._is_notified = False
        self._failure: Failure | None = None
        self.began = time.monotonic()
        text = f"the request took longer than {seconds:g} seconds (--timeout)"
        timeout = Failure(504, "timeout", message=text)
        self._timer = self._loop.call_later(seconds, self.stop, timeout)
        self.asks: Sequence[PromptRequest] = ()
        self.tasks: list[Task] = []  # those that are queued
        self.is_closed = False

    @property
    def completions(self) -> list[Completion]:
        return [task.completion for task in self.tasks]

    def submit(self, asks: Sequence[PromptRequest]) -> None:
        """Encode the prompts and queue the requests, outside the event loop. Raises Refusal."""
        self.asks = asks
        prepared = [prepare(self.llm, ask, self.settings) for ask in asks]
        for index, (request, dropped) in enumerate(prepared):
            if self.is_closed:
                return
            task = Task(
                self._admission.holder.slots,
                request,
                llm=self.llm,
                ask=asks[index],
                index=index,
                dropped=dropped,
                began=self.began,
            )
            request = replace(request, notify=self._notify, on_admit=task.admit)
            try:
                task.answer = self.llm.loop.submit(request)
            except LlamaError as error:
                ask = asks[0]
                values = {ask.field: ask.prompt} if isinstance(error, ContextError) else {}
                raise refuse(error, ask.field, self.llm, values) from None
            self.tasks.append(task)
            if self.is_closed:  # closed in between
                task.answer.close()

    def _notify(self) -> None:
        # In the scheduler's thread. A pending wake-up covers all tokens until it runs.
        if not self._is_notified:
            self._is_notified = True
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._is_notified = False
        self._news.set()

    def stop(self, failure: Failure) -> None:
        """Cancel the answers; the reader gets `failure`."""
        if self._failure is None:
            self._failure = failure
        for task in self.tasks:
            task.answer.close()
        self._news.set()

    async def news(self, with_progress: bool = False) -> AsyncIterator[tuple[Task, int, bool]]:
        """Tasks whose answers have new tokens, the number of tokens, and whether these are all.
        Raises Failure.

        with_progress: also those whose prompts were processed further.
        """
        count, metrics = len(self.tasks), self._admission.metrics
        processed, sent, last = [0] * count, [0] * count, [self.began] * count
        unfinished = set(range(count))
        while unfinished:
            self._news.clear()
            for i in sorted(unfinished):
                task, answer = self.tasks[i], self.tasks[i].answer
                is_last = answer.done  # read before the tokens, so that none is missed
                completion = answer.completion
                new = len(completion.tokens) - sent[i]
                if self._failure is not None:
                    raise self._failure
                if is_last and completion.finish_reason in ("error", "interrupted"):
                    error = answer.error  # OptionsError: a rule grew too complex
                    if isinstance(error, OptionsError) and _has_rule(self.asks[i]):
                        raise Failure(400, "invalid_value", [_describe(error, "", self.llm, {})])
                    if isinstance(error, CheckpointError):  # its file has changed
                        raise Failure(503, "model_changed", message=str(error))
                    text = completion.error or "the answer was interrupted"
                    raise Failure(500, "generation_failed", message=text)
                if new or is_last:
                    now = time.monotonic()
                    metrics.observe_tokens(new, now - last[i], is_first=not sent[i])
                    sent[i] += new
                    last[i] = now
                    if is_last:
                        unfinished.discard(i)
                    yield task, sent[i], is_last
                elif with_progress and answer.progress[0] > processed[i]:
                    processed[i] = answer.progress[0]
                    yield task, sent[i], False
            if unfinished and not any(self.tasks[i].answer.done for i in unfinished):
                await self._news.wait()

    async def finish(self) -> list[Completion]:
        """Wait for all answers. Raises Failure."""
        async for _ in self.news():
            pass
        return self.completions

    def close(self, outcome: str) -> None:
        """Cancel unfinished answers and free their places; idempotent. outcome: for the metrics."""
        if self.is_closed:
            return
        self.is_closed = True
        self._timer.cancel()
        for task in self.tasks:
            task.answer.close()
        self._admission.release(self, outcome)


class Admission:
    """Admits a limited number of requests, and none during shutdown."""

    def __init__(self, settings: Settings, holder: ModelHolder, metrics: Metrics):
        self.settings, self.holder, self.metrics = settings, holder, metrics
        self._open: dict[Answers, int] = {}  # and their number of requests
        self._entering = 0  # requests that wait for the model to reload
        self._rows = 0  # the last loaded model's
        self._durations: deque[float] = deque(maxlen=32)
        # Compiling a schema may take seconds: do not delay requests without one.
        self._plain = anyio.CapacityLimiter(PREPARING)
        self._ruled = anyio.CapacityLimiter(COMPILING)
        self.loop = asyncio.get_running_loop()
        self.is_draining = False  # True: refuse new requests

    @property
    def active(self) -> int:
        """Number of running and waiting requests."""
        return sum(self._open.values()) + self._entering

    async def answer(self, asks: Sequence[PromptRequest]) -> Answers:
        """Admit and submit. Raises Refusal."""
        self._check_room(asks)
        self._entering += len(asks)
        try:
            llm = await self.holder.enter()
        finally:
            self._entering -= len(asks)
        answers = Answers(self, llm, self.settings.timeout)
        self._open[answers] = len(asks)
        limiter = self._ruled if any(map(_has_rule, asks)) else self._plain
        try:
            await anyio.to_thread.run_sync(answers.submit, asks, limiter=limiter)
        except BaseException as error:
            answers.close("refused" if isinstance(error, Refusal) else "gone")
            raise
        for task in answers.tasks:
            self.metrics.prompt_tokens.inc(len(task.prompt))
        return answers

    def _check_room(self, asks: Sequence[PromptRequest]) -> None:
        if self.is_draining:
            raise shutting_down()
        self._rows = rows = self.holder.llm.loop.max_rows if self.holder.llm else self._rows
        limit = rows + self.settings.queue
        if rows and len(asks) > limit:
            field = "n" if all(ask.prompt is asks[0].prompt for ask in asks) else asks[0].field
            text = (
                f"asks for {len(asks)} answers, the maximum is {rows} at once and "
                f"{self.settings.queue} in the queue (--max-rows, --queue)"
            )
            raise bad_field(field, f"at most {limit} answers", text)
        if rows and self.active + len(asks) > limit:
            mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
            wait = min(60, max(1, math.ceil(mean * self.settings.queue / rows / 2)))
            self.metrics.requests.labels("busy").inc()
            text = (
                f"{self.active} requests are running or waiting, the maximum is {limit}: "
                f"retry in {wait} seconds"
            )
            raise unavailable("queue_full", text, wait)

    # Checks of requests

    @property
    def names(self) -> list[str]:
        """Names of the model, the preferred name first."""
        names = (*self.settings.aliases, self.holder.name)
        return list(dict.fromkeys(name for name in names if name)) or ["default"]

    @property
    def listed(self) -> list[str]:
        """Names to list: aliases stand for the model's own name."""
        return [*(self.settings.aliases or self.names), *self.holder.adapters]

    def choose_name(self, name: str | None) -> str:
        """Return the model's or adapter's name for the answer. Raises Refusal for others."""
        if not self.holder.name:
            self.holder.require()  # its name is not known yet
        names = self.names
        if name is None or name == "default" or name in names:
            return name if name in names else names[0]
        if name in self.holder.adapters:
            return name
        if not self.settings.is_strict and not self.holder.adapters:
            return names[0]
        raise self.refuse_name(name)

    def refuse_name(self, name: str) -> Refusal:
        """Refuse a request for another model."""
        served = ", ".join(self.listed)
        text = f"there is no model {name!r:.100} here: this server has {served}"
        return bad_field("model", f"one of {served}, default", text, name, 404, "model_not_found")

    def is_name(self, name: str) -> bool:
        """True for a name of the model or of an adapter, ignoring case and the ending .gguf."""
        names = ("default", *self.names, *self.holder.adapters)
        return _plain_name(name) in map(_plain_name, names)

    async def find_faults(self, name: Any, values: Mapping[str, Any]) -> list[Fault]:
        """Return faults that only the model reveals: its name, and valid options."""
        faults: list[Fault] = []
        if isinstance(name, str) and self.holder.name:
            try:
                self.choose_name(name)
            except Refusal as refusal:
                faults += refusal.faults
        checked = (*RULES, "logit_bias", "speculate", "adapter")
        names = [name for name in checked if values.get(name) is not None]

        def work(llm: LLM) -> None:
            for name in names:
                with contextlib.suppress(OptionsError):
                    options = validate({name: values[name]})
                    faults.extend(check_options(llm, options, values, self.settings))

        if names and self.holder.llm is not None:
            await self.run(work, limiter=self._ruled)
        return faults

    async def run(
        self,
        work: Callable[[LLM], Result],
        field: str = "",
        limiter: anyio.CapacityLimiter | None = None,
    ) -> Result:
        """Run `work` with the model, outside the event loop. Raises Refusal, of `field` if the
        error names none.
        """
        llm = await self.holder.enter()
        try:
            return await anyio.to_thread.run_sync(work, llm, limiter=limiter)
        except LlamaError as error:
            raise refuse(error, field, llm) from None
        finally:
            self.holder.leave()

    def release(self, answers: Answers, outcome: str) -> None:
        """Forget closed answers."""
        count = self._open.pop(answers, None)
        if count is None:
            return
        self.holder.leave()
        self.metrics.requests.labels(outcome).inc(count)
        for completion in answers.completions:
            self.metrics.prefix_hits.inc(completion.reused_tokens > 0)
            self.metrics.reused_tokens.inc(completion.reused_tokens)
        if outcome != "refused":  # timed-out and abandoned requests take rows too
            self._durations.append(time.monotonic() - answers.began)

    def stop_all(self) -> None:
        """Cancel all answers and notify their clients."""
        for answers in list(self._open):
            answers.stop(Failure(503, "shutting_down", message="the server is shutting down"))


def make_counter(engine: RequestBuilder) -> Callable[..., None]:
    """A check of a text whose tokens are counted: it may be several times as long as the context,
    since clients cut a conversation by its count.
    """
    most = max(COUNTED_CONTEXTS * engine.context, COUNTED_TOKENS)
    return functools.partial(engine.check_count, room=engine.context - most)


def prepare(
    llm: LLM, ask: PromptRequest, settings: Settings, fits: bool = True
) -> tuple[Request, int]:
    """Encode an ask's prompt and resolve its options for the scheduler. Returns the request and the
    number of messages dropped from its prompt. Raises Refusal with every fault; tools' schemas are
    not compiled for a prompt that is too long.

    fits: check that the prompt leaves room for an answer; a text that cannot is never encoded.
    False: its tokens are counted.
    """
    resolved, merged = _resolve(llm, ask, settings)
    is_chat, seconds, context = _is_chat(ask.prompt), settings.compile_seconds, llm.engine.context
    faults = check_options(llm, resolved.options, merged, settings, is_chat, ask.note)
    prompt, dropped, eos = ToolPrompt([]), 0, None
    if isinstance(ask.prompt, Infill):
        eos = llm.engine.eos | ask.prompt.find_ends(llm.tokenizer)
    check_count = llm.engine.count_checker(resolved.options)
    if not fits:
        check_count = make_counter(llm.engine)
    try:
        ask.toolbox.check(resolved.options)
        truncates = fits and (settings.truncates if ask.truncates is None else ask.truncates)
        prompt, dropped = _encode(llm, ask, resolved.options, check_count, truncates)
        if fits:
            check_count(len(prompt.tokens), "")
        if prompt.rule and settings.is_strict:
            prompt = replace(prompt, rule=replace(prompt.rule, is_lenient=False))
        # prompt.rule includes the schema
        if prompt.rule and not any(fault.field in RULES for fault in faults):
            constraint = llm.engine.grammars.compile(
                prompt.rule, starts_text=is_chat, seconds=seconds
            )
            if constraint.relaxed:
                ask.note(f"tools: {constraint.relaxed}")
    except PromptTooLong as error:
        fault = Fault(ask.field, f"< {context} tokens", plain(str(error)))
        if not faults or not prompt.tokens:  # a long prompt is not encoded
            sizes: Any = {"n_prompt_tokens": error.count, "n_ctx": context}
            raise Refusal(400, "context_length_exceeded", [fault], **sizes) from None
        faults.append(fault)
    except LlamaError as error:
        fault = _describe(error, ask.field, llm, {**merged, ask.field: ask.prompt})
        faults += [fault] * (fault.field not in {fault.field for fault in faults})
    if faults:
        raise Refusal(400, "invalid_value", faults)
    if dropped:
        ask.note(f"truncation: {dropped} messages")
    for notice in prompt.notices:
        ask.note(f"{ask.field}: {notice}")
    request = prompt.request(
        resolved,
        starts_text=is_chat,
        eos=eos,
        compile_seconds=seconds,
        reuses=ask.reuses and ask.prompt_logprobs is None,
        prompt_logprobs=ask.prompt_logprobs,
        decode_seconds=ask.decode_seconds,
    )
    return request, dropped


def _resolve(llm: LLM, ask: PromptRequest, settings: Settings) -> tuple[Resolved, dict[str, Any]]:
    """Merge the options of the server, the model and the ask. Returns also those that were set, for
    faults. Raises Refusal.
    """
    is_forced = bool(ask.toolbox.forced)
    # A rule of the request replaces the server's, and a null lifts it.
    replaced = set(ask.options) | set(RULES if _has_rule(ask) else ())
    ours = {name: value for name, value in settings.options.items() if name not in replaced}
    theirs = {name: value for name, value in ask.options.items() if value is not None}
    merged: dict[str, Any] = {"adapter": BASE, **ours, **theirs}
    if ask.variables.get("enable_thinking") is False:
        merged.setdefault("reasoning", "off")  # for templates without this switch
    if is_forced:
        merged["stop"] = ()  # a stop string would cut the required call
    if biases := merged.get("logit_bias"):
        merged["logit_bias"] = _bias_tokens(llm, biases)
    if ask.ignores_eos:
        is_gap = isinstance(ask.prompt, Infill)
        ends = ask.prompt.find_ends(llm.tokenizer) if is_gap else ()
        biases = dict.fromkeys((*llm.engine.eos, *ends), -1e6)
        merged["logit_bias"] = biases | merged.get("logit_bias", {})
    if llm.template is None and _is_chat(ask.prompt):
        merged["stop"] = (*merged.get("stop", ()), "<|im_end|>")
    checked = dict(merged)
    if isinstance(schema := merged.get("schema"), (dict, bool)):
        checked["schema"] = Schema.of(schema, is_lenient=not settings.is_strict)
    try:
        return llm.defaults.resolve(checked), merged
    except OptionsError as error:
        raise refuse(error, ask.field, llm, merged) from None


def _bias_tokens(llm: LLM, biases: Mapping[int | str, float]) -> dict[int, float]:
    """Map token ids to biases: a text biases each of its tokens; biases of a token add up."""
    totals: dict[int, float] = {}
    for key, bias in biases.items():
        for token in [key] if isinstance(key, int) else llm.tokenizer.encode(key, add_bos=False):
            totals[token] = max(-MAX_BIAS, min(MAX_BIAS, totals.get(token, 0.0) + bias))
    return totals


def _encode(
    llm: LLM,
    ask: PromptRequest,
    options: GenerationOptions,
    check_count: Callable[[int], None],
    truncates: bool,
) -> tuple[ToolPrompt, int]:
    """Encode a prompt of any kind. Returns the number of dropped messages, too.

    check_count: called with lower bounds of the tokens before encoding. truncates: drop the oldest
    turns until the prompt leaves room for an answer. Raises LlamaError.
    """
    is_chat = _is_chat(ask.prompt)
    for name in () if is_chat else ask.variables:
        ask.note(f"chat_template_kwargs.{name}")
    if isinstance(ask.prompt, Infill):
        try:
            ask.prompt.check(llm.tokenizer)
        except TokenizerError as error:
            # OpenAI's clients would repeat a request that gets 501
            status = 501 if ask.field == "input_prefix" else 400
            fault = fault_of(ask.field, "a model with such tokens", str(error))
            raise Refusal(status, "not_supported", [fault]) from None
        tokens = ask.prompt.encode(llm.tokenizer, llm.engine.context, options.max_tokens)
        return ToolPrompt(tokens), 0
    if isinstance(ask.prompt, str):
        check_count(llm.tokenizer.count_at_least(ask.prompt))
        # with special tokens and a single BOS, so that it may be a rendered template
        tokens = llm.tokenizer.encode(ask.prompt, add_bos=True, parse_special=True)
        is_double = tokens[:2] == [llm.tokenizer.bos_id] * 2
        return ToolPrompt(tokens[1:] if is_double else tokens), 0
    if not is_chat:
        return ToolPrompt(llm.encode(ask.prompt, check_count)), 0
    talk, beginning = _read_chat(llm, ask, options)
    begun = llm.tokenizer.encode(beginning, add_bos=False) if beginning else []
    if truncates:
        prompt, _, dropped = fit_turns(talk, llm.engine, begun=len(begun))
    else:
        prompt, dropped = talk.encode(check_count), 0
    if not beginning:
        return prompt, dropped
    thinking = prompt.thinking and prompt.thinking.follow(beginning)
    return replace(prompt, tokens=[*prompt.tokens, *begun], thinking=thinking), dropped


def _read_chat(
    llm: LLM, ask: PromptRequest, options: GenerationOptions
) -> tuple[Conversation, str]:
    """Return a conversation and the beginning of its answer."""
    template = choose_template(llm, ask)
    messages, beginning = _split_beginning(_pick_fields(template.source, ask))
    if llm.template is None:
        ask.note("chat_template: chatml")
    variables = _pick_variables(template.source, ask)
    talk = Conversation(llm.tokenizer, template, messages, ask.toolbox, options, variables)
    return talk, beginning


def choose_template(llm: LLM, ask: PromptRequest) -> ChatTemplate:
    """Return the template of a conversation; ChatML for a model without one, as llama-server."""
    template = llm.template or load_builtin_template("chatml", llm.tokenizer)
    return template.choose(bool(ask.toolbox.offered), bool(ask.variables.get("documents")))


def render_chat(llm: LLM, ask: PromptRequest, settings: Settings, adds_prompt: bool) -> str:
    """Render a conversation as `prepare` encodes it. adds_prompt: end with the header of the
    answer. Raises LlamaError and Refusal.
    """
    talk, beginning = _read_chat(llm, ask, _resolve(llm, ask, settings)[0].options)
    return talk.render(adds_prompt) + beginning


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 0 and isinstance(prompt[0], dict)


_RENDERING = (  # arguments of the renderer
    "messages tools add_generation_prompt check_count tokenizer template bos_token eos_token"
).split()


def _pick_variables(source: str, ask: PromptRequest) -> dict[str, Any]:
    """Pick the variables that the template's source mentions; report the others."""
    wanted = dict(ask.variables)
    if "enable_thinking" in wanted:  # the name in Granite's and DeepSeek's templates
        wanted.setdefault("thinking", wanted["enable_thinking"])
    known = {
        name: value for name, value in wanted.items() if name in source and name not in _RENDERING
    }
    for name in ask.variables:
        if name not in known and not (name == "enable_thinking" and find_thoughts(source)):
            ask.note(f"chat_template_kwargs.{name}")
    return known


def _pick_fields(source: str, ask: PromptRequest) -> list[Mapping[str, Any]]:
    """Return the messages, with the fields of parts that the template's source mentions; report the
    others.
    """
    messages = []
    for message in ask.prompt:
        if not isinstance(message["content"], str):
            names = {name for part in message["content"] for name in part} - {"type", "text"}
            for name in sorted(dropped := {name for name in names if name not in source}):
                ask.note(f"{ask.field}[].content[].{name:.40}")
            parts = [
                {name: value for name, value in part.items() if name not in dropped}
                for part in message["content"]
            ]
            message = {**message, "content": parts if names - dropped else join_parts(parts)}
        messages.append(message)
    return messages


def _split_beginning(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Split a conversation from the start of its answer, the text of a last assistant message.
    Join leading system messages, since many templates allow only one.
    """
    systems = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    rest = list(messages[len(systems) :])
    if len(systems) > 1:
        systems = [
            {
                "role": "system",
                "content": "\n\n".join(join_parts(message["content"]) for message in systems),
            }
        ]
    continues = len(rest) > 1 and rest[-1]["role"] == "assistant" and not rest[-1].get("tool_calls")
    return [*systems, *(rest[:-1] if continues else rest)], join_parts(
        rest[-1]["content"]
    ) if continues else ""


def check_options(
    llm: LLM,
    options: GenerationOptions,
    values: Mapping[str, Any],
    settings: Settings,
    starts_text: bool = True,
    note: Note = lambda place: None,
) -> list[Fault]:
    """Return faults of options that only the model reveals.

    values: of the request, for the faults. note: reports relaxed keywords.
    """
    errors: list[LlamaError] = []
    llm.engine.check_options(options, errors.append)
    try:
        if rule := Rule.of(options):
            # Compile within a time limit; later calls hit the cache.
            constraint = llm.engine.grammars.compile(
                rule, starts_text=starts_text, seconds=settings.compile_seconds
            )
            if constraint.relaxed:
                note(f"schema: {constraint.relaxed}")
    except LlamaError as error:
        errors.append(error)
    return [_describe(error, "", llm, values) for error in errors]


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".gguf")


def _has_rule(ask: PromptRequest) -> bool:
    return bool(ask.toolbox.forced) or any(ask.options.get(name) is not None for name in RULES)


def refuse(
    error: LlamaError, field: str, llm: LLM | None = None, values: Mapping[str, Any] | None = None
) -> Refusal:
    """Turn an error of core into a 400, or a 503 if the model's file has changed. field: used if
    the error names none. values: by field.
    """
    if isinstance(error, CheckpointError):
        return Refusal(503, "model_changed", message=str(error))
    return Refusal(400, "invalid_value", [_describe(error, field, llm, values or {})])


_CONSTRAINTS = {
    "schema": "a schema that can be enforced",
    "regex": "a regular expression that can be enforced",
    "grammar": "a grammar that can be enforced",
    "logit_bias": "token ids of the vocabulary",
    "stop_token_ids": "token ids of the vocabulary",
    "speculate": "a draft model that is loaded",
    "tools": "tools that the model can call",
    "tool_choice": "auto, none, required or a tool's name",
}
_KINDS = {
    "TemplateError": "a conversation that the chat template accepts",
    "TokenizerError": "a text that can be encoded",
    "ContextError": "a prompt that fits the model",
    "PromptTooLong": "a prompt that fits the model",
    "SessionError": "a saved cache of this model",
}


def _describe(error: LlamaError, field: str, llm: LLM | None, values: Mapping[str, Any]) -> Fault:
    """Turn an error of core into a fault."""
    text = str(error)
    if llm and llm.template:
        text = text.replace(f"{llm.template.name}: ", "")  # may be a path
    text = plain(text)
    for path in {llm.checkpoint.name, str(llm.checkpoint.path)} if llm else ():
        if os.path.exists(path):  # do not reveal the model's folder to clients
            text = text.replace(path, os.path.basename(path.rstrip("/\\")))
    match = re.match(r"(?:option )?(\w+): ", text)
    is_option = match and (match[1] in FIELDS or match[1] in _CONSTRAINTS)
    if match and is_option and isinstance(error, OptionsError):
        field, text = match[1], f"{match[1]}: {text[match.end() :]}"
    elif field != "messages":
        text = re.sub(r"^messages\[\d+\]", field, text)
    constraint = _CONSTRAINTS.get(field) or _KINDS.get(type(error).__name__, "a valid value")
    return Fault(field, constraint, text, values.get(field))


async def until_gone(request: HttpRequest, work: Awaitable[Result]) -> Result:
    """Await `work`, and cancel it if the client leaves. Raises Refusal 499 then, for the log."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise client_gone()
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _wait_gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
