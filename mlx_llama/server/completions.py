"""OpenAI's completions; prompts to continue: texts, token ids, both mixed, or several of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.api.llm import LLM
from mlx_llama.core.answers.completion import Entry, Token, pair_prompt
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.engine.request import Piece
from mlx_llama.core.text.infill import Infill

from .admission import PromptRequest
from .conversations import AnswerFields
from .faults import bad_field
from .fields import Body, Count, Likeliest, Noted, Notes, Text, TokenIds, name_type, spell
from .replies import (
    DONE,
    FINGERPRINT,
    LEAST_LOGPROB,
    Events,
    Writer,
    admission_of,
    choices_of,
    list_entries,
    reply,
    write_likeliest,
    write_timings,
    write_usage,
)
from .schemas import serves
from .slots import Task

router = APIRouter(tags=["OpenAI"])

# Fields and bodies of both kinds of completion


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


# Texts to continue


class PromptObject(Body):
    """A prompt as an object; images and audio are refused."""

    prompt_string: str
    multimodal_data: list[Any] = Field([], max_length=0)


def split_prompts(prompt: Any, limit: int, count: int, field: str) -> list[Any]:
    """Split a field into prompts. A list with token ids is a single prompt, a list of texts and
    lists several. Raises Refusal.

    limit: maximum number of answers, `count` per prompt. field: the name of the count.
    """
    parts = prompt if isinstance(prompt, list) else [prompt]
    parts = [part.prompt_string if isinstance(part, PromptObject) else part for part in parts]
    has_ids = any(isinstance(part, int) for part in parts)
    if has_ids and any(isinstance(part, list) for part in parts):
        raise bad_field("prompt", "one prompt or several", "mixes token ids and lists", prompt)
    prompts = [parts] if has_ids or not parts else parts
    many = len(prompts)
    if many > limit:
        text = f"has {many} prompts, the maximum is {limit}"
        raise bad_field("prompt", f"at most {limit} prompts", text)
    if many * count > limit:
        text = f"{many} prompts of {count} answers each, the maximum is {limit}"
        raise bad_field(field, f"at most {limit} answers", text, count)
    if any(isinstance(item, list) and not item for item in prompts):
        raise bad_field("prompt", "at least 1 token", "has no tokens")
    return prompts


def join_mixed(llm: LLM, prompt: Any) -> Any:
    """Encode a prompt that mixes ids and texts; return other prompts unchanged."""
    if isinstance(prompt, str) or all(isinstance(part, int) for part in prompt):
        return prompt
    ids: list[int] = []
    for part in prompt:
        is_text, encode = isinstance(part, str), llm.tokenizer.encode
        ids += encode(part, add_bos=not ids, parse_special=True) if is_text else [part]
    return ids


def _name_prompt(value: Any) -> str:
    """Return the tag of a prompt's branch: a text, ids, texts, or lists of ids."""
    first = name_type(value[0]) if isinstance(value, list) and value else ""
    return f"{first} list" if first in ("as:integer", "as:array") else name_type(value)


Prompt = Annotated[
    Text
    | Annotated[list[str], Tag("as:array")]
    | Annotated[TokenIds, Tag("as:integer list")]
    | Annotated[list[TokenIds], Tag("as:array list")],
    Discriminator(_name_prompt),
]


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    model_config = spell(logprobs="n_probs")

    prompt: Prompt
    suffix: str = Field("", description="text after the answer, for models that can fill gaps")
    echo: bool = Field(
        False, description="put the prompt before the answer, with its logprobs if there are any"
    )
    prompt_logprobs: Likeliest = None

    @classmethod
    def adapt(cls, values: dict[str, Any], notes: Notes) -> None:
        super().adapt(values, notes)
        if values.get("echo") is True and values.pop("post_sampling_probs", False):
            notes.note("post_sampling_probs")  # no sampler chose the prompt

    def ask(self, prompt: Any, **more: Any) -> PromptRequest:
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return super().ask(prompt, prompt_logprobs=max(counts, default=None), **more)


class CompletionWriter(OpenAIWriter):
    prefix = "cmpl-"

    def begin(self, tasks: Sequence[Task]) -> Events:
        # log-probabilities of a prompt come with the first token of its answer
        is_late = self.body.echo and self.body.logprobs is not None
        self.waiting = set(tasks if is_late else ())
        for task in tasks:
            if (text := self.opening(task)) and not is_late:
                yield self.part(task, {"text": text})

    def opening(self, task: Task) -> str:
        """Return the prompt to repeat before an answer."""
        if not self.body.echo:
            return ""
        prompt = task.ask.prompt
        prompt = prompt.prefix if isinstance(prompt, Infill) else prompt
        return prompt if isinstance(prompt, str) else task.llm.tokenizer.decode(task.prompt)

    def choice(self, task: Task) -> dict[str, Any]:
        text = self.opening(task) + task.completion.text
        logprobs = self.logprobs(task, task.completion.tokens, has_prompt=True)
        return {"text": text, "logprobs": logprobs, **self.prompt_logprobs(task)}

    def logprobs(
        self, task: Task, tokens: Sequence[Token], has_prompt: bool = False
    ) -> dict[str, Any] | None:
        """Write the log-probabilities of an answer's tokens; has_prompt: after those of an echoed
        prompt.
        """
        if self.body.logprobs is None:
            return None
        if task.are_probs:  # in llama-server's format
            return {"content": list_entries(task, tokens)}
        llm, completion, offset = task.llm, task.completion, len(self.opening(task))
        listed = [entry for token in tokens for entry in token.entries]
        entries = [entry._replace(start=offset + entry.start) for entry in listed]
        if self.body.echo:
            if has_prompt:
                rates = completion.prompt_logprobs
                entries[:0] = pair_prompt(llm.tokenizer, task.prompt, rates)
            # As in vLLM, an end token has an entry too: lm-eval drops the last one.
            end, ends = offset + len(completion.text), llm.engine.eos
            entries += [Entry(int(t), t.logprobs, b"", end) for t in tokens if t in ends]
        return write_old_logprobs(llm, entries, self.body.logprobs)

    def prompt_logprobs(self, task: Task) -> dict[str, Any]:
        """Write vLLM's field prompt_logprobs, if the body asks for it."""
        if (count := self.body.prompt_logprobs) is None:
            return {}
        rates = task.completion.prompt_logprobs
        return {"prompt_logprobs": write_prompt_logprobs(task.llm, task.prompt, rates, count)}

    def write(self, task: Task, token: Token | None, pieces: list[Piece]) -> Events:
        if task in self.waiting:
            self.waiting.remove(task)
            logprobs = self.logprobs(task, (), has_prompt=True)
            yield self.part(task, {"text": self.opening(task)}, None, logprobs)
        if token is None:
            return
        logprobs = self.logprobs(task, [token])
        if token.text or (logprobs and any(logprobs.values())):
            yield self.part(task, {"text": token.text}, None, logprobs)


class DoubleWriter(CompletionWriter):
    """Writes OpenAI's completions with llama-server's fields beside them."""

    def whole(self, tasks: Sequence[Task]) -> dict[str, Any]:
        full, done = super().whole(tasks), tasks[0].completion
        counts = {"tokens_predicted": len(done.tokens), "tokens_evaluated": done.prompt_tokens}
        return {**full, "content": full["choices"][0]["text"], "stop": True, **counts}

    def part(
        self, task: Task, content: Any = None, reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        text = content["text"] if content else ""
        fields = {"index": task.index, "content": text, "stop": bool(reason)}
        return super().part(task, content, reason, logprobs) | fields


def spell_token(data: bytes) -> str:
    """Write a token's text; invalid UTF-8 as bytes:\\xe2\\x82, so that keys differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def write_old_logprobs(llm: LLM, entries: Sequence[Entry], count: int) -> dict[str, Any]:
    """Write the older format: parallel lists, and the `count` most likely tokens as an object.

    The first token of a prompt has null.
    """

    def likeliest(rate: TokenLogprobs | None) -> dict[str, float] | None:
        if rate is None:
            return None
        others = write_likeliest(llm, rate)[:count]
        return {spell_token(bytes(other["bytes"])): other["logprob"] for other in others}

    rates = [entry.logprobs for entry in entries]
    return {
        "tokens": [spell_token(entry.data) for entry in entries],
        "token_logprobs": [rate and max(rate.logprob, LEAST_LOGPROB) for rate in rates],
        "top_logprobs": list(map(likeliest, rates)),
        "text_offset": [entry.start for entry in entries],
    }


def write_prompt_logprobs(
    llm: LLM, prompt: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int
) -> list[Any]:
    """Write vLLM's prompt_logprobs: per token an object by token id, the token's rank null if it is
    not among the `count` most likely.
    """

    def write(token: int, rates: TokenLogprobs) -> dict[str, Any]:
        ranked: dict[int, tuple[float, int | None]] = {token: (rates.logprob, None)}
        ranked |= {other: (rate, rank) for rank, (other, rate) in enumerate(rates.top[:count], 1)}
        return {
            str(other): {
                "logprob": max(rate, LEAST_LOGPROB),
                "rank": rank,
                "decoded_token": llm.tokenizer.decode([other], skip_special=False),
            }
            for other, (rate, rank) in ranked.items()
        }

    return [rates and write(token, rates) for token, rates in zip(prompt, logprobs)]


@serves(router, CompletionRequest, "/v1/completions", "/completions")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue a text."""
    # llama-server's clients expect its fields at the path without a version, OpenAI's theirs
    is_bare = request.url.path == "/completions"
    writer = (DoubleWriter if is_bare else CompletionWriter)(request, body)
    limit = admission_of(request).settings.max_choices
    prompts = split_prompts(body.prompt, limit, body.n, "n")
    ask = body.ask(None, field="suffix" if body.suffix else "prompt")
    if body.suffix:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise bad_field("prompt", "a text", "must be a text where suffix is one")
        prompts = [Infill(prompt, body.suffix) for prompt in prompts]
    return await reply(request, choices_of(ask, prompts, body.n), writer, body.stream)
