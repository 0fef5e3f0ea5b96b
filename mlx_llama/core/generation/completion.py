"""The result of one generation: text, tokens, timings, counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

RATES = ("prompt_tps", "decode_tps", "evaluations_per_token", "bytes_per_token")
SHOWN_CHARACTERS = 40  # of the text, in a repr


@dataclass(repr=False)
class Completion:
    """An answer and its receipt. Times in seconds.

    finish_reason: "eos" (an end token), "stop" (a stop string), "length" (max_tokens), "context" (the context is
    full), "interrupted" (the consumer left).
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)  # generated ids, the end token included
    finish_reason: str = "interrupted"
    stop: str | None = None  # the stop string that matched
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, already in the cache
    prefill_seconds: float = 0.0  # until the first token was read
    decode_seconds: float = 0.0  # from the first token to the last, without the consumer's time
    launches: int = 0  # steps launched; one more than tokens where a step ran ahead of an end token
    waits: int = 0  # reads from the device, each of one token or of a verified run
    read_bytes: int = 0  # bytes of these reads
    drafted: int = 0  # tokens that speculation guessed and the model verified
    accepted: int = 0  # correct ones among them
    speculation_ended: int | None = None  # tokens generated when speculation was switched off; None: it was not
    backend: str = ""
    device: str = ""
    dtype: str = ""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # per option: "user", "checkpoint" or "default"
    notices: list[str] = field(default_factory=list)

    @property
    def prompt_tps(self) -> float:
        """Prompt tokens processed (not reused) per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tps(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds and len(self.tokens) > 1 else 0.0

    @property
    def evaluations_per_token(self) -> float:
        """Reads from the device per generated token: 1 without speculation, less with it."""
        return self.waits / len(self.tokens) if self.tokens else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes read from the device per generated token: 4, the size of a token id."""
        return self.read_bytes / len(self.tokens) if self.tokens else 0.0

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN_CHARACTERS else self.text[:SHOWN_CHARACTERS - 3] + "..."
        return f"Completion({text!r}, tokens={len(self.tokens)}, finish_reason={self.finish_reason!r})"

    def receipt(self) -> dict[str, Any]:
        """All fields but the text, and the rates, for `--jsonl`."""
        fields = {name: value for name, value in asdict(self).items() if name != "text"}
        return fields | {name: round(getattr(self, name), 3) for name in RATES}

    def summary(self) -> str:
        """Speed, counts and notices in a few lines."""
        return (
            f"prompt: {self.prompt_tokens} tokens, {self.reused_tokens} reused, {self.prompt_tps:.1f} tokens/s, "
            f"first token after {self.prefill_seconds:.3f} s\n"
            f"decode: {len(self.tokens)} tokens, {self.decode_tps:.1f} tokens/s, finish reason {self.finish_reason}\n"
            f"evaluations per token: {round(self.evaluations_per_token, 3):g} ({self.launches} launched, {self.waits} read, "
            f"{round(self.bytes_per_token, 2):g} bytes per token)\n"
            f"{self._summarize_speculation()}backend: {self.backend} ({self.device}, {self.dtype}), seed {self.seed}"
            + "".join(f"\nnote: {notice}" for notice in self.notices)
        )

    def _summarize_speculation(self) -> str:
        kind = self.options.get("speculate")
        if kind in (None, "none"):
            return ""
        ended = "" if self.speculation_ended is None else f", switched off after {self.speculation_ended} tokens"
        return f"speculation ({kind}): {self.accepted} of {self.drafted} drafted tokens accepted{ended}\n"
