"""python -m mlx_llama.doctor: show what this machine can run, and what is wrong with a model.

Exit codes: 0 the model runs here, 1 an error prevents it, 2 the command line is wrong.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mlx_llama.cli import flags
from mlx_llama.cli.running import spell_command, spell_flags, spell_options
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import default_threads
from mlx_llama.core.system.machine import format_bytes

if TYPE_CHECKING:
    from mlx_llama.core.backends.interface import BackendFacts

    from .diagnosis import Diagnosis, Fit

EXAMPLES = """
~/models/Llama-3.2-1B-Instruct-Q4_K_M.gguf
HuggingFaceTB/SmolLM2-360M-Instruct --ctx-size 4096
"""
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def parser() -> flags.Parser:
    """The command line."""
    result = flags.Parser("doctor", __doc__.split("\n\n")[0], EXAMPLES, "[MODEL]")
    names, add = result.common.add_mutually_exclusive_group(), result.add_argument
    names.add_argument(
        "name",
        metavar="MODEL",
        nargs="?",
        help="a folder, a .gguf file, or the cached files of a Hugging Face hub id or hub "
        "id:file.gguf (default: the small guide model in this package)",
    )
    names.add_argument(
        "--model", metavar="MODEL", help="the same, spelled as in the other commands"
    )
    add(
        "--ctx-size",
        "-c",
        metavar="TOKENS",
        help="positions that the context must hold (default: the model's limit, or as many as fit)",
    )
    flags.add_load_flags(result, only=("revision", "cache_bits"))
    add("--json", action="store_true", help="print everything as one JSON object")
    add(
        "--clear-cache",
        action="store_true",
        help="remove compiled code and packed weights from the cache folder, then exit",
    )
    return result


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises LlamaError for a bad command line."""
    args = parser().parse_args(arguments)
    name = args.name if args.model is None else args.model
    if args.ctx_size is not None and not (args.ctx_size.isascii() and args.ctx_size.isdigit()):
        raise OptionsError(f"--ctx-size {args.ctx_size!r:.40}: must be a whole number")
    if args.clear_cache:
        if name is not None:
            raise OptionsError("--clear-cache: removes all models' files; leave the model out")
        from mlx_llama.core.system import cache_folder

        print(f"removed {format_bytes(cache_folder.clear())} from {cache_folder.cache_folder()}")
        return 0
    cache_bits = flags.load_options(args).check("cpu").cache_bits

    from .diagnose import diagnose

    diagnosis = diagnose(name, args.revision, args.ctx_size, cache_bits)
    if args.json:
        print(json.dumps(as_json(diagnosis), indent=2))
    else:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for line, style in report(diagnosis):
            console.print(Text(line, style=style), soft_wrap=True)
    return 0 if diagnosis.ok else 1


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as JSON values, with options as flags."""
    facts = diagnosis.facts() | {"command": next_command(diagnosis)}
    for backend in facts["backends"]:
        backend["flags"] = [
            " ".join(spell_options({name: value})) for name, value in backend.pop("options")
        ]
    for finding in facts["findings"]:
        finding["message"] = spell_flags(finding["message"])
    return facts


def next_command(diagnosis: Diagnosis) -> str | None:
    """The command line to run next, None without one."""
    command = diagnosis.command
    return command and spell_command(command.name, command.words, command.options)


def report(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """Lines of text, each with its style for rich."""
    lines: list[tuple[str, str]] = []

    def add(text: str, style: str = "") -> None:
        lines.append((f"  {text}", style))

    def title(text: str) -> None:
        lines.extend([("", ""), (text, "bold")] if lines else [(text, "bold")])

    machine = diagnosis.machine
    title("machine")
    gpu = f", {machine['gpu']['name']}" if "gpu" in machine else ""
    add(
        f"{machine['system']} {machine['machine']}, Python {machine['python']}, "
        f"{machine['physical_cores']} physical cores, "
        f"{format_bytes(machine['free_memory_bytes'])} of free memory{gpu}"
    )
    if "cache" in machine:
        cache = machine["cache"]
        add(
            f"cache {cache['folder']}: {format_bytes(cache['nbytes'])} in {cache['files']} files, "
            f"at most {format_bytes(cache['limit_bytes'])}"
        )
    title("backends")
    for backend in diagnosis.backends:
        text = _backend(backend, backend.name == diagnosis.auto)
        add(text, "" if backend.available else "dim")
    title(f"model {diagnosis.name}")
    if diagnosis.path:
        add(diagnosis.path)
    for text in (*_model(diagnosis), *_text(diagnosis)):
        add(text)
    if diagnosis.fits:
        title("runs")
        for fit in diagnosis.fits:
            add(_fit(fit, _threads(diagnosis, fit)))
    if diagnosis.findings:
        title("findings")
        levels = list(_STYLES)
        for finding in sorted(diagnosis.findings, key=lambda finding: levels.index(finding.level)):
            add(f"{finding.level}: {spell_flags(finding.message)}", _STYLES[finding.level])
    title("next")
    command = next_command(diagnosis) or "correct the errors, then run this again"
    add(command, "" if diagnosis.ok else "bold")
    return lines


def _backend(backend: BackendFacts, is_auto: bool) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in backend.packages.items())
    if not backend.available:
        return f"{backend.name:<5} no   {backend.reason}" + (f" ({packages})" if packages else "")
    memory = "memory unknown"
    if backend.memory_bytes is not None:
        memory = f"{format_bytes(backend.memory_bytes)} {backend.memory_is}"
    needed = f" with {' '.join(spell_options(dict(backend.options)))}" if backend.options else ""
    parts = [
        f"{backend.name:<5} yes  on {backend.device}{needed}, {memory} ({packages})",
        backend.reason,
        "the choice of --backend auto" if is_auto else "",
    ]
    return "; ".join(filter(None, parts))


def _model(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.model:
        return []
    m = diagnosis.model
    experts = f" of {m['experts']} experts, {m['experts_per_token']} for a token"
    stretched = f", stretched to {m['longest_context']}"
    factor = f", factor {m['rope_factor']:g}" if m["rope_factor"] else ""
    in_8, in_16, in_32 = map(format_bytes, m["cache_bytes_per_token"].values())
    lines = [
        f"{m['architecture']}, {_count(m['parameters'])} parameters: {m['layers']} layers, width "
        f"{m['hidden_size']}, {m['heads']} heads and {m['key_value_heads']} key-value heads of "
        f"{m['head_dim']}, feed-forward {m['intermediate_size']}{experts if m['experts'] else ''}"
        f", vocabulary {m['vocab_size']}",
        f"context {m['context_length']}"
        f"{stretched if m['longest_context'] > m['context_length'] else ''}"
        + (f", sliding window {m['sliding_window']}" if m["sliding_window"] else "")
        + f"; rope {m['rope_type']}, theta {m['rope_theta']:g}{factor}"
        f"; embedding and head are {'one matrix' if m['tied_embeddings'] else 'two matrices'}",
        f"keys and values of a token: {in_32} in 32 bits, {in_16} in 16 "
        f"(--cache-bits 16), {in_8} in 8 (--cache-bits 8)"
        + (f"; recurrent states {format_bytes(m['state_bytes'])}" if m["state_bytes"] else ""),
    ]
    if diagnosis.groups:
        lines.append(f"weights {format_bytes(m['nbytes'])}")
    for group in diagnosis.groups:
        kinds = ", ".join(f"{count} {kind}" for kind, count in group["formats"].items())
        lines.append(
            f"  {group['group']:<10}{group['tensors']:>5} tensors "
            f"{format_bytes(group['nbytes']):>9}  {kinds}"
        )
    return lines


def _text(diagnosis: Diagnosis) -> list[str]:
    t, lines = diagnosis.tokenizer, []
    if t:

        def describe(token: int) -> str:
            return f"{token} {t['texts'].get(token, '')}".strip()

        added = "added" if t["adds_bos"] else "not added"
        starts = "none" if t["bos"] is None else f"{describe(t['bos'])}, {added} to texts"
        lines.append(
            f"tokenizer {t['kind']}, {t['vocab_size']} tokens; BOS {starts}; ends with "
            f"{', '.join(map(describe, t['eos'])) or 'nothing'}"
        )
    if diagnosis.template:
        lines.append(f"template {diagnosis.template['name']}")
    return lines


def _threads(diagnosis: Diagnosis, fit: Fit) -> str:
    """Threads of the cpu backend, in words; "" for others and without compiled kernels."""
    if fit.backend != "cpu" or not any(
        backend.name == "cpu" and backend.kernels for backend in diagnosis.backends
    ):
        return ""
    threads = default_threads(diagnosis.model["nbytes"], diagnosis.machine["physical_cores"])
    return f" on {threads} thread{'s' if threads > 1 else ''}"


def _fit(fit: Fit, threads: str) -> str:
    low_bit = f", low-bit weights times {fit.low_bit}" if fit.low_bit else ""
    bits = f" in {fit.cache_bits} bits" if fit.cache_bits else ""
    room = "longest context unknown"
    if fit.longest_context is not None:
        room = f"room for {fit.longest_context} positions of one conversation, {fit.tokens} of many"
    fits = {True: "fits", False: "does not fit", None: "fits if memory suffices"}[fit.fits]
    return (
        f"{fit.backend:<5} {fits}: computes in {fit.computes_in}{low_bit}{threads}; weights "
        f"{format_bytes(fit.weights_bytes)}, cache {format_bytes(fit.cache_bytes_per_token)} per "
        f"token{bits}, {room}"
    )


def _count(number: int) -> str:
    for word, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)
