"""A diagnosis as data: findings, the readable parts of a model, and its fit on each backend."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlx_llama.core.backends.interface import BackendFacts
from mlx_llama.core.backends.positions import (
    count_states,
    nbytes_by_window,
    state_nbytes,
    windows_nbytes,
)
from mlx_llama.core.backends.selection import import_file
from mlx_llama.core.dtypes import ITEMSIZE
from mlx_llama.core.engine.rows import default_budget
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models import rope
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Window
from mlx_llama.core.system.forks import cached_property
from mlx_llama.core.system.machine import format_bytes


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


# The fit

# ratio of memory to the size of a quantised model, so that every backend can load it
LOADING_ROOM = 1.25
# positions; if the automatic choice has fewer, prefer a backend that has as many
USEFUL_CONTEXT = 2048


def fit_backends(
    diagnosis: Diagnosis,
    checkpoint: Checkpoint,
    revision: str | None,
    requested: int | None,
    is_default: bool,
    cache_bits: int | None = None,
) -> None:
    """Add the model's fit on each backend, and the command to run next. requested: positions, None
    for any. is_default: the model is the commands' default.
    """
    longest = rope.max_context(checkpoint.config)
    for facts in diagnosis.backends:
        if not facts.available:
            continue
        module = import_file(facts.name, "facts")
        plan = module.plan_weights(checkpoint, facts)
        nbytes, in_8_bits = (
            nbytes_by_window(checkpoint.config, ITEMSIZE[plan.dtype], bits)
            for bits in (cache_bits, 8)
        )
        per_position = sum(nbytes.values())
        fit = Fit(
            facts.name, plan.dtype, plan.low_bit_operand, plan.nbytes, cache_bits, per_position
        )
        if facts.memory_bytes is not None:
            states = count_states(longest) * state_nbytes(checkpoint.config)
            room = facts.memory_bytes - plan.nbytes - states
            fit.longest_context, fit.longest_with_8_bits = (
                max(0, min(longest, _count_positions(each, room, longest, module.DROPS_POSITIONS)))
                for each in (nbytes, in_8_bits)
            )
            fit.tokens = default_budget(room) // per_position
            fit.fits = fit.longest_context >= (requested or 1)
        diagnosis.fits.append(fit)
    options: dict[str, Any] = {} if is_default else {"model": diagnosis.name}
    _choose(diagnosis, checkpoint, requested, options | {"revision": revision}, cache_bits)


def _count_positions(
    nbytes: Mapping[Window | None, int], room: int, longest: int, drops: bool
) -> int:
    """Positions that fit `room` bytes. nbytes: of one, by window; drops: as DROPS_POSITIONS."""
    # Keys and values count twice: growing storage is copied to a new one.
    whole = room // (2 * sum(nbytes.values()))
    if not drops:
        return whole
    windows = {window: each for window, each in nbytes.items() if window}
    rest, lasting = room - windows_nbytes(windows, longest), 2 * nbytes.get(None, 0)
    if not lasting and rest > 0:
        return longest
    return max(whole, rest // max(1, lasting))


def _choose(
    diagnosis: Diagnosis,
    checkpoint: Checkpoint,
    requested: int | None,
    options: dict[str, Any],
    cache_bits: int | None,
) -> None:
    """Add the command to run next, or the error that prevents it. options: its first ones."""
    facts = {entry.name: entry for entry in diagnosis.backends}
    memory = {entry.name: entry.memory_bytes for entry in diagnosis.backends}
    made_for = checkpoint.config.max_position_embeddings
    note, refuse = (partial(diagnosis.add, level, "memory") for level in ("note", "error"))

    def rank(fit: Fit) -> tuple:
        """Sort by enough memory, then the automatic choice, then those without options."""
        holds = fit.longest_context is None or fit.longest_context >= (
            requested or min(made_for, USEFUL_CONTEXT)
        )
        needs_options, longest = bool(facts[fit.backend].options), fit.longest_context or 0
        return not holds, fit.backend != diagnosis.auto, needs_options, -longest

    order = sorted(diagnosis.fits, key=rank)
    chosen = next((fit for fit in order if fit.fits is not False), None)
    if chosen is None:
        best = max(order, key=lambda fit: fit.longest_context or 0, default=None)
        if best is None:
            diagnosis.add(
                "error", "machine", "no backend can be used here; see the reason beside each"
            )
        elif best.longest_context and requested:
            remedy = f"ask for {best.longest_context} or fewer{_in_8_bits(best, requested)}"
            refuse(
                f"`ctx_size` {requested}: memory has room for {best.longest_context} positions on "
                f"{best.backend}; {remedy}"
            )
        else:
            rooms = (f"{fit.backend} {format_bytes(memory[fit.backend])}" for fit in order)
            remedy = _remedy(diagnosis, checkpoint, max(memory[fit.backend] or 0 for fit in order))
            refuse(
                f"{diagnosis.name}: the weights take {format_bytes(checkpoint.nbytes)}, and "
                f"there is room for {', '.join(rooms)}; {remedy}"
            )
        return
    if chosen.backend != diagnosis.auto:
        note(
            f"`backend='auto'` chooses {diagnosis.auto}, whose memory is too small for it; "
            f"{chosen.backend} has room"
        )
        options |= {"backend": chosen.backend, **dict(facts[chosen.backend].options)}
    longest = chosen.longest_context
    if requested is not None:
        options["ctx_size"] = requested
    elif longest is not None and longest < made_for:
        note(
            f"the model was made for {made_for} positions, and memory has room for {longest} on "
            f"{chosen.backend}; `ctx_size` keeps within it{_in_8_bits(chosen, longest + 1)}"
        )
        options["ctx_size"] = longest
    options["cache_bits"] = cache_bits
    if not diagnosis.template:
        options["prompt"] = "Once upon a time"
    if diagnosis.ok:
        name = "chat" if diagnosis.template else "generate"
        diagnosis.command = Command(name, options=options)


def _in_8_bits(fit: Fit, requested: int) -> str:
    """Suggest keys and values in 8 bits if these have room for `requested` positions; else ""."""
    most = fit.longest_with_8_bits or 0
    return (
        "" if fit.cache_bits == 8 or most < requested else f"; `cache_bits=8` has room for {most}"
    )


def _remedy(diagnosis: Diagnosis, checkpoint: Checkpoint, most: int) -> str:
    """Remedy for a model that is too large: quantize it, if the result fits `most` bytes."""
    config = checkpoint.config
    columns = {shape[1] for shape in config.tensor_shapes().values() if len(shape) == 2}
    sizes = (size for size in (64, 32) if not any(count % size for count in columns))
    group = next(sizes, None)
    four_bit = sum(map(math.prod, config.tensor_shapes().values())) * (4 + 32 / (group or 64)) / 8
    if checkpoint.low_bit or group is None or four_bit * LOADING_ROOM > most:
        return "choose a smaller model, or close other programs"
    name = re.split(r"[/\\:]", diagnosis.name.rstrip("/\\"))[-1].removesuffix(".gguf")
    options = {"bits": 4} | ({} if group == 64 else {"group_size": group})
    diagnosis.command = Command("quantize", (diagnosis.name, f"{name}-4bit"), options)
    return f"quantize it to {format_bytes(int(four_bit))}"
