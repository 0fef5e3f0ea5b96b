"""A diagnosis as data: findings, the readable parts of a model, and its fit on each backend."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.system.forks import cached_property


@dataclass(frozen=True)
class Finding:
    """A line for the user, with the file and the remedy."""

    level: str  # "error": the model cannot run; "warning": it may not run as expected; "note"
    about: str  # "machine", "config", "weights", "tokenizer", "template", "generation" or "memory"
    message: str


@dataclass
class Fit:
    """A model on a backend of this machine. None: the memory is unknown."""

    backend: str
    computes_in: str  # dtype of the activations
    low_bit: str  # dtype that low-bit weights are multiplied in, "" for a model without
    weights_bytes: int
    cache_bits: int | None  # width of keys and values, None for that of the activations
    cache_bytes_per_token: int
    # positions of a conversation that fit beside the weights, up to the model's limit
    longest_context: int | None = None
    longest_with_8_bits: int | None = None  # the same with `cache_bits` 8
    tokens: int | None = None  # positions of all conversations within the default `cache_memory`
    fits: bool | None = None  # weights and context fit


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
        """True if the model runs on a backend of this machine."""
        return not any(finding.level == "error" for finding in self.findings)

    def facts(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return {"ok": self.ok, **asdict(self)}

    def add(self, level: str, about: str, message: object) -> None:
        """Append a finding unless it is there."""
        finding = Finding(level, about, " ".join(str(message).split("\n")))
        if finding.message not in {other.message for other in self.findings}:
            self.findings.append(finding)


@dataclass
class OpenedModel:
    """The readable parts of a model."""

    path: Path
    checkpoint: Checkpoint | None  # None if `open_checkpoint` refuses the model
    config: LlamaConfig | None  # None if it is invalid
    tokenizer_config: LlamaConfig  # the config, or a stand-in that suffices to read the tokenizer
    metadata: dict[str, Any] | None = None  # a GGUF file's

    @cached_property
    def files(self) -> Checkpoint:
        """The checkpoint, or only its settings, tokenizer and template."""
        if self.checkpoint is not None:
            return self.checkpoint
        return Checkpoint(
            str(self.path), self.path, self.tokenizer_config, {}, {}, 0, self.metadata
        )
