"""HTTP replies of all APIs: whole answers as JSON, and streams of events."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_llama import __version__
from mlx_llama.api.llm import LLM
from mlx_llama.core.answers.completion import Completion, Token
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.files.adapters import BASE
from mlx_llama.core.text.thoughts import Thought

from .admission import Admission, Answers, Failure, PromptRequest, prepare, until_gone
from .faults import (
    Refusal,
    bad_field,
    rename_fault,
    write_anthropic,
    write_ollama,
    write_openai,
)
from .fields import NOT_AS_SENT, AdapterScales, note
from .model_holder import ModelHolder
from .slots import Task

Result = TypeVar("Result")
Events = Iterator[Any]  # JSON values
PING_SECONDS = 15
NEVER = 1 << 20  # seconds, longer than any request lasts


def dump(value: Any) -> bytes:
    """Write JSON on a line, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def event(value: Any, name: str | None = None, number: int | str | None = None) -> bytes:
    """Write a server-sent event with JSON."""
    return (
        (b"" if name is None else b"event: %s\n" % name.encode())
        + (b"" if number is None else b"id: %s\n" % str(number).encode())
        + b"data: %s\n\n" % dump(value)
    )


DONE = b"data: [DONE]\n\n"


def admission_of(request: Request) -> Admission:
    return request.app.state.admission


def rename_faults(request: Request, refusal: Refusal) -> None:
    """Name the fields of faults as the request does."""
    names = request.scope.get("names", {})
    refusal.faults = [rename_fault(fault, names) for fault in refusal.faults]


def reply_refusal(request: Request, refusal: Refusal) -> Response:
    """Reply with a refusal in the envelope of the path's API."""
    rename_faults(request, refusal)
    request.scope["refusal"] = refusal  # for the log
    apis = {"/api/": write_ollama, "/v1/messages": write_anthropic, "": write_openai}
    write = next(apis[start] for start in apis if request.url.path.startswith(start))
    return Json(write(refusal), refusal.status, headers=refusal.headers)


async def submit(request: Request, asks: Sequence[PromptRequest]) -> Answers:
    """Queue the asks; cancel them if the client leaves meanwhile. Raises Refusal."""
    asks = [with_notes(request, _with_adapter(request, ask)) for ask in asks]
    answers = await until_gone(request, admission_of(request).answer(asks))
    request.scope["answers"] = answers  # for the log
    return answers


def _with_adapter(request: Request, ask: PromptRequest) -> PromptRequest:
    """Choose the adapter by the option, the model's name, `lora`, or POST /lora-adapters."""
    holder = admission_of(request).holder
    adapter = ask.options.get("adapter") or request.scope.get("adapter")
    if ask.lora is not None:
        chosen = pick_adapter(holder, ask.lora)
        if adapter not in (None, chosen):
            note(request, "lora")
        adapter = adapter or chosen
    adapter = adapter or holder.adapter
    return replace(ask, options={**ask.options, "adapter": adapter}) if adapter else ask


def pick_adapter(holder: ModelHolder, lora: AdapterScales) -> str:
    """Return the adapter whose scale is not 0. Raises Refusal for several, and for another scale
    than it was loaded with.
    """
    numbered = dict(enumerate(holder.adapters.items()))
    scales = {item.id: item.scale for item in lora if item.scale or item.id not in numbered}
    name, loaded = numbered.get(next(iter(scales), -1), (BASE, 0.0))
    if list(scales.values()) == [loaded] * (name != BASE):
        return name
    listed = ", ".join(f"{i}: {name} ({scale:g})" for i, (name, scale) in numbered.items())
    text = "no adapter is loaded: start the server with --adapters FOLDER"
    if numbered:
        text = f"turn on one adapter at most, with its scale (--adapters FOLDER=SCALE): {listed}"
    raise bad_field("lora", "ids and scales of GET /lora-adapters", text)


def with_notes(request: Request, ask: PromptRequest) -> PromptRequest:
    """Let an ask report ignored places by their names in the request."""
    names = request.scope.get("names", {})

    def report(place: str) -> None:
        named = names.get(place, place)
        is_field = place.startswith(("chat_template_kwargs", "messages[].content[]"))
        if is_field and admission_of(request).settings.is_strict:
            raise bad_field(named, "unsupported", NOT_AS_SENT)
        note(request, named)

    return replace(ask, note=report)


class Writer:
    """Writes the answers to a request in an API's format, whole or as events of a stream.

    Its methods for events yield JSON values; `encode` turns them into bytes.
    """

    media_type = "text/event-stream"
    last = b""  # after the last event
    prefix = ""  # begins the answer's id
    ping = PING_SECONDS  # seconds of silence before a comment; 0 or less: no comments
    shows_progress = False  # call `progress` while prompts are processed

    def __init__(self, request: Request, body: Any):
        self.body = body
        self.name = check_model(request, body.model)
        # as in the log line and headers
        self.identity, self.created = self.prefix + request.scope["request_id"], int(time.time())

    def whole(self, tasks: Sequence[Task]) -> Any:
        """Write completed answers."""
        raise NotImplementedError

    def begin(self, tasks: Sequence[Task]) -> Events:
        """Write events before the first token."""
        yield from ()

    def part(self, task: Task) -> dict[str, Any]:
        """Write an event without text."""
        raise NotImplementedError

    def progress(self, task: Task) -> Events:
        """Write llama-server's prompt_progress: first of the cached tokens, then of all."""
        completion = task.completion
        for count in (completion.reused_tokens, task.answer.progress[0]):
            if count > task.reported:
                task.reported = count
                progress = {
                    "total": completion.prompt_tokens,
                    "cache": completion.reused_tokens,
                    "processed": count,
                    "time_ms": round(completion.prefill_seconds * 1e3),
                }
                yield self.part(task) | {"prompt_progress": progress}

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        """Write a token, None at the end, and the pieces that it completes."""
        yield from ()

    def end(self, task: Task) -> Events:
        yield from ()

    def finish(self, tasks: Sequence[Task]) -> Events:
        """Write events after all answers."""
        yield from ()

    def encode(self, value: Any) -> bytes:
        return event(value)

    def fail(self, refusal: Refusal) -> bytes:
        """Write an error within a stream."""
        return self.encode(write_openai(refusal))

    def drive(self, task: Task, count: int, is_last: bool) -> Events:
        """Write the tokens of an answer up to number `count`."""
        for token, pieces in task.answer.steps(count, is_last):
            yield from self.write(task, token, pieces)
        if is_last:
            yield from self.end(task)

    async def stream(self, answers: Answers) -> AsyncIterator[bytes]:
        """Write the events of all answers as they come. Raises Failure."""
        for value in self.begin(answers.tasks):
            yield self.encode(value)
        async for task, count, is_last in answers.news(self.shows_progress):
            done = self.progress(task) if self.shows_progress else ()
            for value in itertools.chain(done, self.drive(task, count, is_last)):
                yield self.encode(value)
        for value in self.finish(answers.tasks):
            yield self.encode(value)
        if self.last:
            yield self.last


async def reply(
    request: Request, asks: Sequence[PromptRequest], writer: Writer, is_stream: bool
) -> Response:
    """Answer with a stream, or wait for all answers and write them. Raises Refusal before."""
    answers = await submit(request, asks)
    if is_stream:
        return Stream(request, answers, writer)
    outcome = "gone"
    try:
        await until_gone(request, answers.finish())
        outcome = "done"
        return Json(writer.whole(answers.tasks))
    except Failure as failure:
        outcome = failure.code
        raise
    finally:
        answers.close(outcome)


class Stream(EventSourceResponse):
    """A stream of events that stops its answers when the connection ends."""

    def __init__(self, request: Request, answers: Answers, writer: Writer):
        self._request, self._answers, self._writer = request, answers, writer
        self._outcome = "gone"
        super().__init__(
            self._run(),
            media_type=writer.media_type,
            ping=writer.ping if writer.ping > 0 else NEVER,
            sep="\n",
            send_timeout=answers.settings.send_timeout,
            ping_message_factory=lambda: ServerSentEvent(comment="waiting", sep="\n"),
        )

    async def _run(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._writer.stream(self._answers):
                yield data
                # Sending may not wait: let other tasks run and notice a closed connection.
                await asyncio.sleep(0)
            self._outcome = "done"
        except Failure as failure:
            self._outcome = failure.code
            rename_faults(self._request, failure)
            yield self._writer.fail(failure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._outcome = "slow"
        finally:
            self._answers.close(self._outcome)


# Parts of answers that several APIs share

FINGERPRINT = f"mlx_llama-{__version__}"


def check_model(request: Request, name: str | None) -> str:
    """Return the name of the model or adapter for the answer. Raises Refusal for another model's.

    Sets `adapter` in the request's scope if the name is an adapter's.
    """
    admission = admission_of(request)
    chosen = admission.choose_name(name)
    if name and not admission.is_name(name):
        note(request, "model")
    if chosen in admission.holder.adapters and chosen not in admission.names:
        request.scope["adapter"] = chosen
    return chosen


async def count_prompt(
    request: Request, model: str | None, ask: PromptRequest, **more: Any
) -> Response:
    """Count the tokens of a prompt, as the model sees it. more: of the reply. Raises Refusal."""
    check_model(request, model)
    admission, ask = admission_of(request), with_notes(request, ask)
    made = await admission.run(lambda llm: prepare(llm, ask, admission.settings, fits=False)[0])
    return Json({**more, "input_tokens": len(made.prompt)})


def write_usage(tasks: Sequence[Task]) -> dict[str, Any]:
    """Write OpenAI's usage of all answers; choices of the same prompt count it once."""
    completions = [task.completion for task in tasks]
    prompts: dict[tuple[int, ...], Completion] = {}
    for task in tasks:  # later choices reuse the first one's prefix
        prompts.setdefault(tuple(task.prompt), task.completion)
    read = sum(completion.prompt_tokens for completion in prompts.values())
    written = sum(len(completion.tokens) for completion in completions)
    reused = sum(completion.reused_tokens for completion in prompts.values())
    thought = sum(completion.reasoning_tokens for completion in completions)
    dropped = tasks[0].dropped
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {
            "cached_tokens": reused,
            **({"dropped_messages": dropped} if dropped else {}),
        },
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def write_timings(completion: Completion) -> dict[str, Any]:
    """Write llama-server's timings."""
    read, written = completion.prompt_tokens - completion.reused_tokens, len(completion.tokens)
    prompt_ms, decode_ms = completion.prefill_seconds * 1e3, completion.decode_seconds * 1e3
    return {
        "cache_n": completion.reused_tokens,
        "prompt_n": read,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": _divide(prompt_ms, read),
        "prompt_per_second": round(completion.prompt_tps, 3),
        "predicted_n": written,
        "predicted_ms": round(decode_ms, 3),
        "predicted_per_token_ms": _divide(decode_ms, written),
        "predicted_per_second": round(completion.decode_tps, 3),
    }


def _divide(amount: float, count: int) -> float:
    return round(amount / count, 3) if count else 0.0


def choices_of(ask: PromptRequest, prompts: Sequence[Any], count: int) -> list[PromptRequest]:
    """Return `count` asks per prompt. With a seed, choice i of a prompt uses seed + i."""
    seed = ask.options.get("seed")
    seeds = [{} if seed is None else {"seed": (seed + i) % 2**64} for i in range(count)]
    return [
        replace(ask, prompt=prompt, options={**ask.options, **seed})
        for prompt in prompts
        for seed in seeds
    ]


LEAST_LOGPROB = -9999.0  # OpenAI's number for minus infinity


def text_of(piece: str | Thought) -> str:
    return piece.text if isinstance(piece, Thought) else piece


# Log-probabilities; or probabilities after the samplers, by llama-server's names


def write_rate(data: bytes, logprob: float, are_probs: bool) -> dict[str, Any]:
    """Write the text of a token and its log-probability, or its probability."""
    name, value = "logprob", max(logprob, LEAST_LOGPROB)
    if are_probs:
        name, value = "prob", math.exp(logprob)
    return {"token": data.decode("utf-8", "replace"), name: value, "bytes": list(data)}


def write_likeliest(
    llm: LLM, logprobs: TokenLogprobs, are_probs: bool = False
) -> list[dict[str, Any]]:
    """Write the most likely tokens of a position, with ids."""
    pieces = [(token, llm.tokenizer.piece(token), value) for token, value in logprobs.top]
    return [
        {"id": token, **write_rate(piece.data if piece else b"", value, are_probs)}
        for token, piece, value in pieces
    ]


def list_logprobs(task: Task, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Write OpenAI's entries of the text that `tokens` completed."""
    entries = list_entries(task, tokens)
    for entry in [] if task.are_probs else entries:
        for token in (entry, *entry["top_logprobs"]):
            del token["id"]
    return entries


def list_entries(task: Task, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Return the entries of `list_logprobs` with token ids."""
    are_probs, top = task.are_probs, "top_probs" if task.are_probs else "top_logprobs"
    return [
        {
            "id": entry.id,
            **write_rate(entry.data, entry.logprobs.logprob, are_probs),
            top: write_likeliest(task.llm, entry.logprobs, are_probs),
        }
        for token in tokens
        for entry in token.entries
        if entry.logprobs
    ]
