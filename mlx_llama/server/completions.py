"""OpenAI's completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.core.generation.completion import Token

from .answers import Ask
from .faults import bad_field
from .fields import Note, OptionFields, TokenIds
from .openai import CommonFields, OpenAIWriter, finish_reason
from .replies import Events, choices_of, desk_of, reply
from .schemas import serves
from .tooling import Piece, Reader, list_logprobs

router = APIRouter(tags=["OpenAI"])


class CompletionRequest(CommonFields):
    """POST /v1/completions."""

    renamed: ClassVar = OptionFields.renames(n_probs="logprobs", json_schema="schema")
    refused: ClassVar = {"suffix": "the model continues a text: POST /infill fills a gap"}

    prompt: str | list[str] | TokenIds | list[TokenIds]
    echo: bool = Field(False, description="put the prompt before the answer")

    @classmethod
    def adapt(cls, values: dict[str, Any], note: Note) -> None:
        super().adapt(values, note)
        if values.get("suffix") == "":
            del values["suffix"]

    @model_validator(mode="after")
    def _check_echo(self):
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not with logprobs, which are not computed for the prompt")
        return self


def split_prompts(prompt: Any, limit: int, count: int, field: str) -> list[Any]:
    """Return the prompts of a field that holds a prompt or several. Raises Refusal.

    limit: of answers, `count` per prompt. field: the name of the count.
    """
    are_many = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts = prompt if are_many else [prompt]
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


class CompletionWriter(OpenAIWriter):
    """Writes completions."""

    prefix = "cmpl-"
    splits = False

    def begin(self, readers: Sequence[Reader]) -> Events:
        self.offsets = [len(self.opening(reader)) for reader in readers]  # of the next tokens
        for reader in readers:
            if text := self.opening(reader):
                yield self.part(reader, {"text": text})

    def opening(self, reader: Reader) -> str:
        """Return the prompt to repeat before an answer."""
        if not self.body.echo:
            return ""
        prompt = reader.answers.asks[reader.index].prompt
        return prompt if isinstance(prompt, str) else reader.llm.tokenizer.decode(prompt)

    def choice(self, reader: Reader) -> dict[str, Any]:
        opening, tokens = self.opening(reader), reader.completion.tokens
        logprobs = self.logprobs(reader, tokens, len(opening))
        return {"text": opening + reader.completion.text, "logprobs": logprobs}

    def logprobs(
        self, reader: Reader, tokens: Sequence[Token], offset: int
    ) -> dict[str, Any] | None:
        """Write the older format: parallel lists, and top logprobs as an object."""
        if self.body.logprobs is None:
            return None
        entries, offsets = list_logprobs(reader.llm, tokens), []
        for token in tokens:
            if token.logprobs is not None and token not in reader.llm.engine.eos:
                offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [spell_token(entry) for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {spell_token(other): other["logprob"] for other in entry["top_logprobs"]}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def write(self, reader: Reader, token: Token | None, pieces: list[Piece]) -> Events:
        if token is None:
            return
        logprobs = self.logprobs(reader, [token], self.offsets[reader.index])
        self.offsets[reader.index] += len(token.text)
        if token.text or (logprobs and logprobs["tokens"]):
            yield self.part(reader, {"text": token.text}, None, logprobs)

    def end(self, reader: Reader) -> Events:
        yield self.part(reader, {"text": ""}, finish_reason(reader))


def spell_token(entry: Mapping[str, Any]) -> str:
    """Write a token's text; invalid UTF-8 as bytes:\\xe2\\x82, so that keys differ."""
    data = bytes(entry["bytes"])
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@serves(router, CompletionRequest, "/v1/completions", "/completions")
async def complete(request: Request, body: CompletionRequest) -> Response:
    """Continue a text."""
    writer = CompletionWriter(request, body)
    limit = desk_of(request).settings.max_choices
    prompts = split_prompts(body.prompt, limit, body.n, "n")
    ask = body.apply(Ask(body.prompt, "prompt", body.requested_options()))
    return await reply(request, choices_of(ask, prompts, body.n), writer, body.stream)
