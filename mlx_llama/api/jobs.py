"""Batch jobs: requests from a JSON Lines file, results into another one as they finish.

A line is {"prompt": ...} or {"messages": [...]}, options by name, and optionally an "id". A result
is one line, written whole and flushed, so that the same command resumes a killed job. Each result
has a digest of its request, so that results of other prompts, options or models are never mixed in.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mlx_llama.core.answers.completion import Completion
from mlx_llama.core.engine.request import Answer
from mlx_llama.core.errors import LlamaError, OptionsError, plain, show
from mlx_llama.core.options import split_fault, validate
from mlx_llama.core.system.files import writing
from mlx_llama.core.text.adapting import join_parts

_RESULT = b'{"index": '  # the beginning of every result
QUEUED = 2  # requests in the scheduler per row, so that no row waits for its next one


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: str
    content: Annotated[str, BeforeValidator(join_parts)]


class _Line(BaseModel):
    """A line of the file; all other fields are options."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | int | None = None
    prompt: str | None = None
    messages: list[_Message] | None = Field(None, min_length=1)


@dataclass(frozen=True)
class Job:
    index: int  # in the file, from 0
    id: str | int | None
    prompt: str | list[dict[str, str]]  # a text, or messages
    options: dict[str, Any] = field(default_factory=dict)  # by name
    model: str = ""  # and other conditions of all requests

    @property
    def digest(self) -> str:
        """Identifies the request in its result."""
        request = json.dumps([self.model, self.prompt, self.options], sort_keys=True, default=str)
        return hashlib.sha256(request.encode()).hexdigest()[:16]

    def result(self, completion: Completion) -> dict[str, Any]:
        names = ["reasoning", "reasoning_tokens"] if completion.reasoning_tokens else []
        names = ["text", *names, "finish_reason", "prompt_tokens", "reused_tokens"]
        fields = {name: getattr(completion, name) for name in names}
        fields |= {"completion_tokens": len(completion.tokens), "seed": completion.seed}
        return self._line(**fields, **completion.tell_logprobs())

    def failure(self, error: Exception, spell: Callable[[str], str]) -> dict[str, Any]:
        """The result of a failed request. spell: spells option names in the error."""
        if isinstance(error, LlamaError):
            return self._line(error=spell(str(error)))
        return self._line(error=f"{type(error).__name__}: {error}")

    def _line(self, **fields: Any) -> dict[str, Any]:
        named = {} if self.id is None else {"id": self.id}
        return {"index": self.index, **named, **fields, "request": self.digest}


def parse_jobs(text: str, name: str, options: Mapping[str, Any], model: str) -> list[Job]:
    """The requests in `text`. name: of the file, for messages. options: of all requests; those of a
    line win. model: its name and other conditions of all requests. Raises OptionsError.
    """
    jobs: list[Job] = []
    seen: dict[str | int, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name}: line {number}"
        try:
            parsed = _Line.model_validate_json(line)
        except ValidationError as error:
            raise OptionsError(f"{place}: {_describe_fault(error.errors()[0])}") from None
        if (parsed.prompt is None) == (parsed.messages is None):
            both = "" if parsed.messages is None else ", not both"
            raise OptionsError(f"{place}: needs one of the fields prompt and messages{both}")
        extra = parsed.model_extra or {}
        line_options = {key: value for key, value in extra.items() if value is not None}
        validate(line_options, place)
        if parsed.id is not None and seen.setdefault(parsed.id, number) != number:
            raise OptionsError(
                f"{place}: field id: {show(parsed.id)} is that of line {seen[parsed.id]} too: "
                "give each request another id"
            )
        messages = [message.model_dump() for message in parsed.messages or ()]
        prompt = messages if parsed.prompt is None else parsed.prompt
        jobs.append(Job(len(jobs), parsed.id, prompt, {**options, **line_options}, model))
    if not jobs:
        remedy = 'write one JSON object per line, such as {"prompt": "Hello"}'
        raise OptionsError(f"{name}: has no requests: {remedy}")
    return jobs


def _describe_fault(fault: Mapping[str, Any]) -> str:
    place, message = split_fault(fault)
    if fault["type"] == "json_invalid":
        return f"is not JSON ({message.removeprefix('Invalid JSON: ')})"
    if not place:
        return f"is {show(fault['input'])}, it must be a JSON object"
    if fault["type"] == "missing":
        return f"field {place} is missing"
    return f"field {place} is {show(fault['input'])}, it must be {message}"


class Results:
    """The file of results. Raises OptionsError for a file of other results, before any change."""

    def __init__(self, path: str | os.PathLike, jobs: Sequence[Job]):
        self.path = Path(os.path.expanduser(path))
        self.done: set[int] = set()  # indices of the requests that have a result
        self.failed = 0  # errors among them
        self.tokens = 0  # generated for results of this run
        digests = [job.digest for job in jobs]
        self._whole = 0  # bytes of whole lines
        with writing(f"`output` {path}", OptionsError, "read"):
            content = self.path.read_bytes() if self.path.is_file() else b""
            if not content and self.path.exists() and not self.path.is_file():
                raise OptionsError(f"`output` {path}: is not a file: choose another one")
        *lines, torn = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            index, is_failed = _read_result(line, digests)
            if index is None:
                raise self._refuse(f"line {number}")
            self.failed += is_failed and index not in self.done
            self.done.add(index)
            self._whole += len(line) + 1
        if not torn.startswith(_RESULT[: len(torn)]):
            raise self._refuse("its last line")
        self._file: BinaryIO | None = None

    def _refuse(self, line: str) -> OptionsError:
        return OptionsError(
            f"`output` {self.path}: {line} is not a result of these prompts, options and model: "
            "choose another file or delete this one"
        )

    def __enter__(self) -> Results:
        """Open the file for more results; drops an incomplete last line. Raises OptionsError."""
        with writing(f"`output` {self.path}", OptionsError):
            self._file = open(self.path, "ab")
            self._file.truncate(self._whole)
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, result: dict[str, Any]) -> None:
        """Append a result and flush it."""
        assert self._file is not None  # open within the block
        self._file.write(json.dumps(result).encode() + b"\n")
        self._file.flush()
        self.done.add(result["index"])
        self.failed += "error" in result
        self.tokens += result.get("completion_tokens", 0)


def _read_result(line: bytes, digests: list[str]) -> tuple[int | None, bool]:
    """(index of the request, whether it failed); None for a line of other requests."""
    try:
        result = json.loads(line)
    except (ValueError, RecursionError):
        return None, False
    index = result.get("index") if isinstance(result, dict) else None
    if not isinstance(index, int) or not 0 <= index < len(digests):
        return None, False
    is_ours = result.get("request") == digests[index]
    return (index, "error" in result) if is_ours else (None, False)


def run_jobs(
    jobs: Sequence[Job],
    results: Results,
    submit: Callable[[Job], Answer[str]],
    tick: Callable[[], bool],
    max_active: int,
    advance: Callable[[int], None] = lambda done: None,
    spell: Callable[[str], str] = plain,
) -> None:
    """Run the jobs that have no result yet, and write each result as it finishes.

    submit: queues a job, or raises its error. tick: runs a tick of the scheduler. max_active: jobs
    in the scheduler at once. advance: called with the number of results so far. spell: as for
    Job.failure. A failed request gets a line with its error; the others continue.
    """
    advance(len(results.done))
    waiting = deque(job for job in jobs if job.index not in results.done)
    active: dict[Answer[str], Job] = {}

    def write(result: dict[str, Any]) -> None:
        results.write(result)
        advance(len(results.done))

    while waiting or active:
        while waiting and len(active) < max_active:
            job = waiting.popleft()
            try:
                active[submit(job)] = job
            except Exception as error:
                write(job.failure(error, spell))
        is_idle = not tick()
        for answer in [answer for answer in active if answer.done or is_idle]:
            job = active.pop(answer)
            try:
                completion = answer.finish()
            except Exception as error:
                write(job.failure(error, spell))
            else:
                write(job.result(completion))
