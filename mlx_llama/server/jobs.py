"""Jobs: answers that continue without their client, with streams that can be resumed."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.text.thoughts import Thought
from mlx_llama.core.text.tools import ToolDelta

from .admission import Answers, Failure
from .conversations import Message
from .faults import bad_field, unavailable
from .fields import Notes, TextOr, TokenIds
from .guard import log, write_receipt
from .openai import ChatFields, write_piece
from .replies import (
    DONE,
    NEVER,
    PING_SECONDS,
    Json,
    admission_of,
    check_model,
    dump,
    event,
    list_logprobs,
    submit,
)
from .schemas import serves
from .settings import Settings

router = APIRouter(tags=["jobs"])

# In all jobs together; an event takes some 300 bytes, and so does each of its top logprobs
MOST_EVENTS = 500_000
_REASONS = {"eos": "EOS", "stop": "STOP_SEQUENCE", "length": "MAX_TOKENS", "context": "MAX_TOKENS"}


class JobRequest(ChatFields):
    """POST /v1/jobs: a prompt or messages, and options."""

    prompt: TextOr[TokenIds] | None = None
    messages: list[Message] = Field([], min_length=1, max_length=2048)
    abandon_seconds: float | None = Field(
        None, gt=0, description="cancel the job after this many seconds without a reader"
    )

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        count = values.get("logprobs")
        if isinstance(count, int) and not isinstance(count, bool):  # as in completions
            values |= {"logprobs": True, "top_logprobs": count}
            values.pop("n_probs", None)
        super().adapt(values, notes)

    @classmethod
    def check_together(cls, values: Mapping[str, Any], notes: Notes) -> None:
        super().check_together(values, notes)
        has_messages = "messages" in values
        if ("prompt" in values) == has_messages or ("tools" in values and not has_messages):
            text = "send either prompt or messages, and tools with messages only"
            notes.refuse("prompt", "prompt or messages", text)


@dataclass
class Job:
    """An answer and its events so far. Readers choose the first event that they want."""

    identity: str
    answers: Answers | None  # None once the job is over: it would keep the model in memory
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    size: int = 0  # in events
    ended: float = 0.0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    abandon_seconds: float | None = None  # without a reader until it is cancelled
    readers: int = 0
    timer: asyncio.TimerHandle | None = None  # while there is no reader

    def count_readers(self, change: int) -> None:
        """Count a reader who came or left; start the time without readers."""
        self.readers += change
        if self.timer:
            self.timer.cancel()
        if self.abandon_seconds and not self.readers:
            loop = asyncio.get_running_loop()
            self.timer = loop.call_later(self.abandon_seconds, self.cancel, "nobody read the job")

    def cancel(self, reason: str) -> None:
        """Cancel the answer, if it is not over."""
        if self.answers:
            self.answers.stop(Failure(409, "cancelled", message=reason))

    def add(self, name: str, **fields: Any) -> None:
        """Append an event and wake the readers."""
        self.events.append((name, fields))
        self.size += 1 + len(fields.get("top_logprobs") or fields.get("top_probs") or ())
        self.news.set()
        self.news = asyncio.Event()

    async def run(self, answers: Answers) -> None:
        """Collect the answer's events until its end."""
        outcome, reason, error, count = "done", "ERROR", dict[str, str](), 0
        task = answers.tasks[0]
        completion = task.completion
        self.add("started", job_id=self.identity, prompt_tokens=completion.prompt_tokens)
        try:
            async for _, length, is_last in answers.news():
                for token, pieces in task.answer.steps(length, is_last):
                    for piece in pieces:
                        if isinstance(piece, Thought):
                            self.add("thought", t=piece.text, i=count)
                        elif isinstance(piece, ToolDelta):
                            self.add("call", i=count, **write_piece(piece))
                    text = "".join(piece for piece in pieces if isinstance(piece, str))
                    *earlier, last = list_logprobs(task, [token] if token else []) or [{}]
                    for logprobs in earlier:
                        self.add("token", t="", i=count, **logprobs)
                    if text or last:
                        self.add("token", t=text, i=count, **last)
                    count += token is not None
            reason = _REASONS.get(completion.finish_reason or "", "ERROR")
        except Failure as failure:
            outcome = failure.code
            error = {} if outcome == "cancelled" else {"error": failure.message}
            reason = "CANCELLED" if outcome in ("cancelled", "shutting_down") else "ERROR"
        except Exception as defect:
            outcome, error = "failed", {"error": type(defect).__name__}
            raise
        finally:
            answers.close(outcome)
            self.answers = self.task = None
            decode = completion.decode_seconds or time.monotonic() - answers.began
            self.ended = time.monotonic()
            fields = {"decode_time_ms": round(decode * 1e3, 3), "stop_reason": reason, **error}
            fields |= {"reasoning_tokens": completion.reasoning_tokens}
            if completion.repeated:
                fields["repeated"] = completion.repeated
            self.add("end", tokens_out=len(completion.tokens), **fields)
            log.info("job %s %s%s", self.identity, reason, write_receipt(answers, answers.settings))

    async def follow(self, first: int) -> AsyncIterator[tuple[int, str, dict[str, Any]]]:
        """Yield events from number `first` to the last."""
        number = first
        self.count_readers(1)
        try:
            while True:
                news = self.news
                while number < len(self.events):
                    yield (number, *self.events[number])
                    number += 1
                if self.answers is None and number >= len(self.events):
                    return
                await news.wait()
        finally:
            self.count_readers(-1)


class Jobs:
    """The jobs of a server. Ended jobs are forgotten after a time, or when there are too many."""

    def __init__(self, settings: Settings):
        self._settings = settings
        # part of each id: a restarted server recognizes ids of an earlier run
        self._start = secrets.token_hex(4)
        self._jobs: dict[str, Job] = {}

    def make_room(self) -> None:
        """Forget ended jobs if there are many. Raises Refusal if there is still no room."""
        jobs, limit = self._jobs, self._settings.max_jobs
        ended = [job for job in jobs.values() if job.answers is None]
        for job in sorted(ended, key=lambda job: job.ended):
            size = sum(job.size for job in jobs.values())
            if size > MOST_EVENTS or len(jobs) >= limit:
                del jobs[job.identity]
        if len(jobs) >= limit:
            raise unavailable("too_many_jobs", f"{len(jobs)} jobs are running: retry later", 5)

    def add(self, answers: Answers, identity: str, abandon_seconds: float | None) -> Job:
        job = Job(f"{self._start}-{identity}", answers, abandon_seconds=abandon_seconds)
        job.count_readers(0)
        self._jobs[job.identity] = job
        job.task = asyncio.create_task(job.run(answers))
        job.task.add_done_callback(lambda _: self._forget_later(job))
        return job

    def _forget_later(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._settings.job_seconds, self._jobs.pop, job.identity, None)

    def find(self, identity: str) -> Job:
        """Return a job by its id. Raises Refusal with the reason if there is none."""
        if identity in self._jobs:
            return self._jobs[identity]
        if identity.startswith(f"{self._start}-"):
            seconds = self._settings.job_seconds
            reason = f"it ended more than {seconds:g} s ago and was forgotten, or never existed"
        elif re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{16}", identity):
            reason = "another server made it; a restart of the server ends its jobs"
        else:
            reason = "it is not a job id"
        text = f"there is no job {identity:.100}: {reason}"
        raise bad_field("job_id", "a job of this server", text, identity, 404, "job_not_found")


@serves(router, JobRequest, "/v1/jobs", status_code=201)
async def make_job(request: Request, body: JobRequest) -> Response:
    """Start an answer that continues without its client."""
    check_model(request, body.model)
    jobs: Jobs = request.app.state.jobs
    jobs.make_room()
    ask = body.messages_ask() if body.messages else body.ask(body.prompt, field="prompt")
    answers = await submit(request, [ask])
    del request.scope["answers"]  # the log has the receipt when the job ends
    job = jobs.add(answers, request.scope["request_id"], body.abandon_seconds)
    url = f"/v1/jobs/{job.identity}/stream"
    return Json({"job_id": job.identity, "sse_url": url, "jsonl_url": f"{url}?format=jsonl"}, 201)


@router.get("/v1/jobs/{job_id}/stream")
async def stream_job(request: Request, job_id: str) -> Response:
    """Stream a job's events: server-sent, or as JSON lines for Accept: application/x-ndjson or
    ?format=jsonl.

    The header Last-Event-ID, or ?last_event_id=, resumes after that event.
    """
    job = request.app.state.jobs.find(job_id)
    last = request.headers.get("last-event-id") or request.query_params.get("last_event_id") or "-1"
    if not last.lstrip("-").isdecimal() or not last.isascii() or len(last) > 12 or int(last) < -1:
        raise bad_field("Last-Event-ID", "a number", "must be an event's number", last)
    first = int(last) + 1
    lines, accepted = "application/x-ndjson", request.headers.get("accept", "")
    as_lines = request.query_params.get("format") == "jsonl" or lines in accepted
    how: Any = {"media_type": lines, "ping": NEVER} if as_lines else {"ping": PING_SECONDS}
    seconds, events = admission_of(request).settings.send_timeout, _write(job, first, as_lines)
    return EventSourceResponse(events, sep="\n", send_timeout=seconds, **how)


async def _write(job: Job, first: int, as_lines: bool) -> AsyncIterator[bytes]:
    async for number, name, fields in job.follow(first):
        line = {"event": name, "id": number, **fields}
        yield dump(line) + b"\n" if as_lines else event(fields, name, number)
    if not as_lines:
        yield DONE


@router.delete("/v1/jobs/{job_id}")
async def cancel_job(request: Request, job_id: str) -> Response:
    """Cancel a job; its readers get the end event with CANCELLED."""
    job: Job = request.app.state.jobs.find(job_id)
    job.cancel("the job was cancelled")
    if job.task:
        await asyncio.wait({job.task})
    return Json({"job_id": job.identity, "stop_reason": job.events[-1][1]["stop_reason"]})
