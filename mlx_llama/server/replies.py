"""HTTP replies of all APIs: whole answers as JSON, and streams of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_llama import __version__
from mlx_llama.core.generation.completion import Completion
from mlx_llama.core.generation.tool_use import Toolbox

from .answers import Answers, Ask, Desk, Failure, prepare, until_gone
from .faults import Refusal, rename_fault, write_anthropic, write_ollama, write_openai
from .fields import note

Errors = Callable[[Refusal], dict[str, Any]]
PING_SECONDS = 15
NEVER = 1 << 20  # seconds, longer than any request lasts


def dump(value: Any) -> bytes:
    """Write JSON on a line, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "replace"
    )


class Json(Response):
    """A JSON body."""

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


def desk_of(request: Request) -> Desk:
    """Return the server's desk."""
    return request.app.state.desk


def errors_for(path: str) -> Errors:
    """Return the function that writes errors of this path's API."""
    if path.startswith("/api/"):
        return write_ollama
    return write_anthropic if path.startswith("/v1/messages") else write_openai


def reply_refusal(request: Request, refusal: Refusal) -> Response:
    """Reply with a refusal in the envelope of the path's API."""
    request.scope["refusal"] = refusal  # for the log
    return Json(errors_for(request.url.path)(refusal), refusal.status, headers=refusal.headers)


async def submit(request: Request, asks: Sequence[Ask]) -> Answers:
    """Queue the asks; cancel them if the client leaves meanwhile. Raises Refusal."""
    if adapter := request.scope.get("adapter"):
        asks = [replace(ask, options={"adapter": adapter} | ask.options) for ask in asks]
    asks = [_with_notes(request, ask) for ask in asks]
    try:
        answers = await until_gone(request, desk_of(request).answer(asks))
    except Refusal as refusal:
        refusal.faults = [
            rename_fault(fault, request.scope.get("names", {})) for fault in refusal.faults
        ]
        raise
    request.scope["answers"] = answers  # for the log
    return answers


def _with_notes(request: Request, ask: Ask) -> Ask:
    names = request.scope.get("names", {})
    return replace(ask, note=lambda place: note(request, names.get(place, place)))


async def reply_whole(
    request: Request, asks: Sequence[Ask], write: Callable[[Answers], Any]
) -> Response:
    """Wait for all answers and write them. Raises Refusal."""
    answers = await submit(request, asks)
    outcome = "gone"
    try:
        await until_gone(request, answers.finish())
        outcome = "done"
        return Json(write(answers))
    except Failure as failure:
        outcome = failure.refusal.code
        raise failure.refusal from None
    finally:
        answers.close(outcome)


async def reply_stream(
    request: Request,
    asks: Sequence[Ask],
    write: Callable[[Answers], AsyncIterator[bytes]],
    write_failure: Callable[[Refusal], bytes],
    ping: int = PING_SECONDS,
    media_type: str = "text/event-stream",
) -> Response:
    """Stream the events of `write`, which reads `answers.batches()`. Raises Refusal before the
    first event.

    ping: seconds of silence before a comment; 0 or less: no comments.
    """
    answers = await submit(request, asks)
    return Stream(request, answers, write(answers), write_failure, ping, media_type)


class Stream(EventSourceResponse):
    """A stream of events that stops its answers when the connection ends."""

    def __init__(
        self,
        request: Request,
        answers: Answers,
        events: AsyncIterator[bytes],
        write_failure: Callable[[Refusal], bytes],
        ping: int,
        media_type: str,
    ):
        settings = desk_of(request).settings
        self._answers, self._events, self._write_failure = answers, events, write_failure
        self._outcome = "gone"
        super().__init__(
            self._run(),
            media_type=media_type,
            ping=ping if ping > 0 else NEVER,
            sep="\n",
            send_timeout=settings.send_timeout,
            ping_message_factory=lambda: ServerSentEvent(comment="waiting", sep="\n"),
        )

    async def _run(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._events:
                yield data
                # Sending may not wait: let other tasks run and notice a closed connection.
                await asyncio.sleep(0)
            self._outcome = "done"
        except Failure as failure:
            self._outcome = failure.refusal.code
            yield self._write_failure(failure.refusal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            self._outcome = "slow"
        finally:
            self._answers.close(self._outcome)


# Parts of answers that several APIs share

FINGERPRINT = f"mlx_llama-{__version__}"


def served_names(request: Request) -> list[str]:
    """Names of the model, the preferred one first."""
    return desk_of(request).names


def served_adapters(request: Request) -> tuple[str, ...]:
    """Names of the model's adapters."""
    return desk_of(request).keeper.adapters


def check_model(request: Request, name: str | None) -> str:
    """Return the name of the model or adapter for the answer. Raises Refusal for another model's.

    Sets `adapter` in the request's scope if the name is an adapter's.
    """
    desk = desk_of(request)
    chosen = desk.choose_name(name)
    if name and not desk.is_name(name):
        note(request, "model")
    if chosen in desk.keeper.adapters and chosen not in desk.names:
        request.scope["adapter"] = chosen
    return chosen


async def count_prompt(request: Request, ask: Ask) -> int:
    """Count the tokens of a prompt, as the model sees it. Raises Refusal."""
    desk, ask = desk_of(request), _with_notes(request, ask)
    llm = await desk.keeper.enter()
    try:
        return await anyio.to_thread.run_sync(
            lambda: len(prepare(llm, ask, desk.settings, fits=False).prompt)
        )
    finally:
        desk.keeper.leave()


def write_usage(answers: Answers, thought_tokens: int = 0) -> dict[str, Any]:
    """Write OpenAI's usage of all answers; choices of the same prompt count it once."""
    completions = answers.completions
    prompts: dict[tuple[int, ...], Completion] = {}
    for prompt, completion in zip(answers.prompts, completions, strict=True):
        # later choices reuse the first one's prefix
        prompts.setdefault(tuple(prompt), completion)
    read = sum(completion.prompt_tokens for completion in prompts.values())
    written = sum(len(completion.tokens) for completion in completions)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(completion.reused_tokens for completion in prompts.values())
        },
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
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


def choices_of(
    options: Mapping[str, Any],
    prompts: Sequence[Any],
    field: str,
    count: int,
    toolbox: Toolbox = Toolbox(),
) -> list[Ask]:
    """Return `count` asks per prompt. With a seed, choice i of a prompt uses seed + i."""
    seed = options.get("seed")
    seeds = [{} if seed is None else {"seed": (seed + i) % 2**64} for i in range(count)]
    return [Ask(prompt, field, {**options, **s}, toolbox) for prompt in prompts for s in seeds]
