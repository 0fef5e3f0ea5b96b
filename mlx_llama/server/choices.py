"""Fields and answers that OpenAI's chat completions and completions share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request

from .conversations import AnswerFields
from .fields import Body, Count, Noted, Notes
from .replies import DONE, FINGERPRINT, Events, Writer, admission_of, write_timings, write_usage
from .slots import Task


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(
        default=False, description="the usage so far in every event, as in vLLM; with include_usage"
    )


class CommonFields(AnswerFields):
    """Fields of both kinds of completion."""

    stream_options: Noted[StreamOptions] = StreamOptions()
    n: Count = 1
    return_progress: bool = Field(
        False, description="report in a stream how much of the prompt is processed"
    )
    verbose: bool = Field(
        False, description="report the prompt with its template, as __verbose.prompt"
    )

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        super().adapt(values, notes)
        if values.get("stream", False) is False and values.pop("stream_options", None):
            notes.note("stream_options")


class OpenAIWriter(Writer):
    """Writes both kinds of completion."""

    last = DONE
    kind = chunk_kind = "text_completion"
    empty: Mapping[str, Any] = {"text": ""}  # a part of an answer without text

    def __init__(self, request: Request, body: Any):
        super().__init__(request, body)
        self.shows_progress = body.return_progress
        is_asked = "verbose" in body.model_fields_set
        self.shows_prompt = body.verbose if is_asked else admission_of(request).settings.is_verbose

    def head(self, kind: str) -> dict[str, Any]:
        """Write the fields that every object has."""
        return {
            "id": self.identity,
            "object": kind,
            "created": self.created,
            "model": self.name,
            "system_fingerprint": FINGERPRINT,
        }

    def choice(self, task: Task) -> dict[str, Any]:
        """Write a completed answer, without index and finish_reason."""
        raise NotImplementedError

    def whole(self, tasks: Sequence[Task]) -> dict[str, Any]:
        choices = []
        for task in tasks:
            task.answer.finish()
            fields = {"index": task.index, "finish_reason": finish_reason(task)}
            choices.append({**fields, **self.choice(task)})
        fields = {**self.statistics(tasks), **self.verbose(tasks[0])}
        return {**self.head(self.kind), "choices": choices, **fields}

    def statistics(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Write usage and timings."""
        timings = write_timings(tasks[0].completion)
        return {"usage": write_usage(tasks), "timings": timings}

    def verbose(self, task: Task) -> dict[str, Any]:
        """Write the prompt as the model saw it, if the body or --verbose asks for it."""
        if not self.shows_prompt:
            return {}
        prompt = task.llm.tokenizer.decode(task.prompt, skip_special=False)
        return {"__verbose": {"prompt": prompt}}

    def chunk(self, *choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Write an event."""
        usage = {"usage": None} if self.body.stream_options.include_usage else {}
        return {**self.head(self.chunk_kind), **usage, "choices": choices, **more}

    def part(
        self, task: Task, content: Any = None, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        """Write an event with a part of an answer. content: None for no text."""
        fields = {"logprobs": logprobs, "finish_reason": reason}
        options = self.body.stream_options
        is_counted = options.include_usage and options.continuous_usage_stats
        usage = {"usage": write_usage([task])} if is_counted else {}
        return self.chunk({"index": task.index, **(content or self.empty), **fields}, **usage)

    def end(self, task: Task) -> Events:
        yield self.part(task, None, finish_reason(task)) | self.verbose(task)

    def finish(self, tasks: Sequence[Task]) -> Events:
        if self.body.stream_options.include_usage:
            yield self.chunk(**self.statistics(tasks))


def finish_reason(task: Task) -> str:
    """Return OpenAI's finish_reason."""
    return "length" if task.is_cut else "tool_calls" if task.has_called else "stop"
