"""Fit a model to the memory of each backend, and choose the command to run next."""

from __future__ import annotations

import math
import re
from typing import Any

from mlx_llama.core.backends.interface import ITEMSIZE, BackendFacts
from mlx_llama.core.backends.positions import position_nbytes
from mlx_llama.core.backends.selection import import_facts
from mlx_llama.core.engine.memory import default_budget
from mlx_llama.core.files.checkpoint import Checkpoint
from mlx_llama.core.models import rope

from .diagnosis import Command, Diagnosis, Fit, format_bytes

# ratio of memory to the size of a quantised model, so that every backend can load it
LOADING_ROOM = 1.25
# positions; if the automatic choice has fewer, prefer a backend that has as many
USEFUL_CONTEXT = 2048


def fit_backends(
    diagnosis: Diagnosis,
    checkpoint: Checkpoint,
    revision: str | None,
    wanted: int | None,
    is_default: bool,
    cache_bits: int | None = None,
) -> None:
    """Add the model's fit on each backend, and the command to run next.

    wanted: requested positions, None for any. is_default: the model is the commands' default.
    cache_bits: a load option.
    """
    longest = rope.max_context(checkpoint.config)
    for facts in diagnosis.backends:
        if not facts.available:
            continue
        plan = import_facts(facts.name).plan_weights(
            checkpoint.tensors.values(), checkpoint.dtype, facts, checkpoint.config.exceeds_float16
        )
        per_position, in_8_bits = (
            position_nbytes(checkpoint.config, ITEMSIZE[plan.dtype], bits)
            for bits in (cache_bits, 8)
        )
        most = most_in_8_bits = tokens = fits = None
        if facts.memory_bytes is not None:
            room = facts.memory_bytes - plan.nbytes
            # Keys and values count twice: while their storage grows, the old storage is still
            # allocated.
            most, most_in_8_bits = (
                max(0, min(longest, room // (2 * nbytes))) for nbytes in (per_position, in_8_bits)
            )
            tokens = default_budget(room) // per_position
            fits = most >= (wanted or 1)
        diagnosis.fits.append(
            Fit(
                facts.name,
                plan.dtype,
                plan.low_bit_operand,
                plan.nbytes,
                cache_bits,
                per_position,
                most,
                most_in_8_bits,
                tokens,
                fits,
            )
        )
    _choose(diagnosis, checkpoint, revision, wanted, is_default, cache_bits)


def _choose(
    diagnosis: Diagnosis,
    checkpoint: Checkpoint,
    revision: str | None,
    wanted: int | None,
    is_default: bool,
    cache_bits: int | None,
) -> None:
    """Add the command to run next, or the error that prevents it."""
    facts = {entry.name: entry for entry in diagnosis.backends}
    made_for = checkpoint.config.max_position_embeddings

    def rank(fit: Fit) -> tuple:
        """Sort key: prefer backends with enough memory, then the automatic choice, then those
        without options.
        """
        holds = fit.longest_context is None or fit.longest_context >= (
            wanted or min(made_for, USEFUL_CONTEXT)
        )
        return (
            not holds,
            fit.backend != diagnosis.auto,
            bool(facts[fit.backend].options),
            -(fit.longest_context or 0),
        )

    order = sorted(diagnosis.fits, key=rank)
    chosen = next((fit for fit in order if fit.fits is not False), None)
    if chosen is None:
        best = max(order, key=lambda fit: fit.longest_context or 0, default=None)
        room = ", ".join(
            f"{fit.backend} {format_bytes(facts[fit.backend].memory_bytes)}" for fit in order
        )
        if best is None:
            diagnosis.add(
                "error", "machine", "no backend can be used here; see the reason beside each"
            )
        elif best.longest_context and wanted:
            diagnosis.add(
                "error",
                "memory",
                f"`ctx_size` {wanted}: memory has room for {best.longest_context} positions on "
                f"{best.backend}; ask for {best.longest_context} or "
                f"fewer{_in_8_bits(best, wanted)}",
            )
        else:
            diagnosis.add(
                "error",
                "memory",
                f"{diagnosis.name}: the weights take {format_bytes(checkpoint.nbytes)}, and "
                "there is room for "
                f"{room}; {_remedy(diagnosis, checkpoint, facts)}",
            )
        return
    options: dict[str, Any] = {} if is_default else {"model": diagnosis.name}
    options["revision"] = revision
    if chosen.backend != diagnosis.auto:
        diagnosis.add(
            "note",
            "memory",
            f"`backend='auto'` chooses {diagnosis.auto}, whose memory is too small for it; "
            f"{chosen.backend} has "
            "room",
        )
        options |= {"backend": chosen.backend, **dict(facts[chosen.backend].options)}
    longest = chosen.longest_context
    if wanted is not None:
        options["ctx_size"] = wanted
    elif longest is not None and longest < made_for:
        diagnosis.add(
            "note",
            "memory",
            f"the model was made for {made_for} positions, and memory has room for {longest} on "
            f"{chosen.backend}; `ctx_size` keeps within it{_in_8_bits(chosen, longest + 1)}",
        )
        options["ctx_size"] = longest
    options["cache_bits"] = cache_bits
    if diagnosis.ok:
        diagnosis.command = (
            Command("chat", options=options)
            if diagnosis.template
            else Command("generate", options=options | {"prompt": "Once upon a time"})
        )


def _in_8_bits(fit: Fit, wanted: int) -> str:
    """Suggest keys and values in 8 bits if these have room for `wanted` positions; else ""."""
    most = fit.longest_with_8_bits or 0
    return "" if fit.cache_bits == 8 or most < wanted else f"; `cache_bits=8` has room for {most}"


def _remedy(diagnosis: Diagnosis, checkpoint: Checkpoint, facts: dict[str, BackendFacts]) -> str:
    """Remedy for a model that is too large: a command that quantizes it, if the result fits."""
    config, tensors = checkpoint.config, checkpoint.tensors.values()
    most = max((facts[fit.backend].memory_bytes or 0 for fit in diagnosis.fits), default=0)
    group = next(
        (
            size
            for size in (64, 32)
            if not any(len(tensor.shape) == 2 and tensor.shape[1] % size for tensor in tensors)
        ),
        None,
    )
    four_bit = sum(map(math.prod, config.tensor_shapes().values())) * (4 + 32 / (group or 64)) / 8
    if checkpoint.low_bit or group is None or four_bit * LOADING_ROOM > most:
        return "choose a smaller model, or close other programs"
    out = (
        re.sub(
            r"\.gguf$",
            "",
            diagnosis.name.rstrip("/\\").replace("\\", "/").split("/")[-1].split(":")[-1],
        )
        + "-4bit"
    )
    diagnosis.command = Command(
        "quantize",
        (diagnosis.name, out),
        {"bits": 4} | ({} if group == 64 else {"group_size": group}),
    )
    return f"quantize it to {format_bytes(int(four_bit))}"
