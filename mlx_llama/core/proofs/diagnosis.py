"""A diagnosis as data: findings, the model as far as it can be read, and its fit on each backend."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models.config import LlamaConfig


@dataclass(frozen=True)
class Finding:
    """One line for the user, with the file and the remedy.

    level: "error" (the model cannot run), "warning" (it runs otherwise than expected) or "note".
    about: "machine", "config", "weights", "tokenizer", "template", "generation" or "memory".
    """

    level: str
    about: str
    message: str


@dataclass(frozen=True)
class Fit:
    """A model on one backend of this machine.

    computes_in: dtype of the activations. low_bit: dtype that low-bit weights are multiplied in, "" for a model without.
    weights_bytes: of the weights there. cache_bits: width of keys and values, None for that of the activations.
    cache_bytes_per_token: of keys and values. longest_context: positions of one conversation that fit beside the weights,
    at most the model's own limit; longest_with_8_bits: the same with `cache_bits` 8. tokens: positions of many
    conversations together within the default `cache_memory`. None: the memory is unknown. fits: whether weights and
    context fit; None: unknown.
    """

    backend: str
    computes_in: str
    low_bit: str
    weights_bytes: int
    cache_bits: int | None
    cache_bytes_per_token: int
    longest_context: int | None
    longest_with_8_bits: int | None
    tokens: int | None
    fits: bool | None


@dataclass(frozen=True)
class Command:
    """A command to run next. options: by their names in the tables; None is left out."""

    name: str
    words: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Diagnosis:
    """All findings. `model`, `groups`, `tokenizer` and `template` are empty if unknown."""

    machine: dict[str, Any]
    backends: list[BackendFacts]
    auto: str
    name: str
    path: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    template: dict[str, Any] = field(default_factory=dict)
    fits: list[Fit] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    command: Command | None = None

    @property
    def ok(self) -> bool:
        """True if the model runs on some backend here."""
        return not any(finding.level == "error" for finding in self.findings)

    def facts(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {"ok": self.ok, **asdict(self)}

    def add(self, level: str, about: str, message: object) -> None:
        """Append a finding, once."""
        finding = Finding(level, about, " ".join(str(message).split("\n")))
        if finding.message not in {one.message for one in self.findings}:
            self.findings.append(finding)


@dataclass
class OpenedModel:
    """A model, as much of it as can be read.

    checkpoint: None if `open_checkpoint` refuses the model; config: None if it is bad. tokenizer_config: the config, or a
    stand-in with which the tokenizer can be read. metadata: of a GGUF file.
    """

    path: Path
    checkpoint: Checkpoint | None
    config: LlamaConfig | None
    tokenizer_config: LlamaConfig
    metadata: dict[str, Any] | None = None

    @cached_property
    def files(self) -> Checkpoint:
        """The checkpoint, or its settings, tokenizer and template alone."""
        if self.checkpoint is not None:
            return self.checkpoint
        return Checkpoint(str(self.path), self.path, self.tokenizer_config, {}, {}, 0, self.metadata)


def format_bytes(nbytes: int | None) -> str:
    """A size in kB, MB or GB."""
    if nbytes is None:
        return "an unknown amount"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
