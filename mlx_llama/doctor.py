"""python -m mlx_llama.doctor: the backends of this machine, and the faults of a model, without
loading it.

Exit codes: 0 the model runs here, 1 an error prevents it, 2 the command line is wrong.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: interrupted, they would end in a traceback
    import sys

    from mlx_llama.__main__ import main as run

    sys.exit(run(["doctor", *sys.argv[1:]]))

import json
import sys
from typing import TYPE_CHECKING, Any

from .cli import flags
from .cli.spelling import spell_command, spell_flags, spell_options
from .core.backends.load_options import Limits, default_threads
from .core.errors import OptionsError

if TYPE_CHECKING:
    from .core.backends.interface import BackendFacts
    from .core.proofs.diagnosis import Diagnosis, Fit

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def parser() -> flags.Parser:
    """The command line."""
    result = flags.Parser("doctor", __doc__.split("\n\n")[0])
    model = result.add_mutually_exclusive_group()
    model.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=None,
        help="a folder, a .gguf file, or the cached files of a Hugging Face hub id or hub "
        "id:file.gguf (default: the small guide model in this package)",
    )
    model.add_argument(
        "--model",
        metavar="MODEL",
        dest="named",
        default=None,
        help="the same, spelled as in the other commands",
    )
    result.add_argument("--revision", default=None, help="branch, tag or commit of a hub id")
    result.add_argument(
        "--ctx-size",
        "-c",
        default=None,
        metavar="TOKENS",
        help="positions that the context must hold (default: the model's limit, or as many as fit)",
    )
    flags.add_load_flags(result, only=("cache_bits",))
    result.add_argument("--json", action="store_true", help="print everything as one JSON object")
    result.add_argument(
        "--clear-cache",
        action="store_true",
        help="remove compiled code and packed weights from the cache folder, then exit",
    )
    return result


def main(arguments: list[str]) -> int:
    """Run the door; returns the exit code. Raises LlamaError for a bad command line."""
    given = parser().parse_args(arguments)
    name = given.model if given.named is None else given.named
    if given.ctx_size is not None and not (given.ctx_size.isascii() and given.ctx_size.isdigit()):
        raise OptionsError(f"--ctx-size {given.ctx_size!r:.40}: must be a whole number")
    if given.clear_cache:
        if name is not None:
            raise OptionsError("--clear-cache: removes all models' files; leave the model out")
        from .core.proofs.diagnosis import format_bytes
        from .core.system import cache_folder

        print(f"removed {format_bytes(cache_folder.clear())} from {cache_folder.cache_folder()}")
        return 0
    cache_bits = Limits("").check(flags.load_options(given)).cache_bits

    from .core.proofs.doctor import diagnose

    found = diagnose(name, given.revision, given.ctx_size, cache_bits)
    if given.json:
        print(json.dumps(as_json(found), indent=2))
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False)
        for line, style in report(found):
            console.print(Text(line, style=style), soft_wrap=True)
    else:
        for line, _ in report(found):
            print(line)
    return 0 if found.ok else 1


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Everything as JSON values, with options as flags."""
    facts = found.facts() | {"command": next_command(found)}
    for backend in facts["backends"]:
        backend["flags"] = [
            " ".join(spell_options({name: value})) for name, value in backend.pop("options")
        ]
    for finding in facts["findings"]:
        finding["message"] = spell_flags(finding["message"])
    return facts


def next_command(found: Diagnosis) -> str | None:
    """The command line to run next, None without one."""
    command = found.command
    return command and spell_command(command.name, command.words, command.options)


def report(found: Diagnosis) -> list[tuple[str, str]]:
    """Lines of text, each with its style for rich."""
    from .core.proofs.diagnosis import format_bytes

    lines: list[tuple[str, str]] = []

    def title(text: str) -> None:
        lines.extend([("", ""), (text, "bold")] if lines else [(text, "bold")])

    here = found.machine
    title("machine")
    gpu = f", {here['gpu']['name']}" if "gpu" in here else ""
    lines.append(
        (
            f"  {here['system']} {here['machine']}, Python {here['python']}, "
            f"{here['physical_cores']} physical "
            f"cores, {format_bytes(here['free_memory_bytes'])} of free memory{gpu}",
            "",
        )
    )
    if "cache" in here:
        cache = here["cache"]
        lines.append(
            (
                f"  cache {cache['folder']}: {format_bytes(cache['nbytes'])} in "
                f"{cache['files']} files, at most "
                f"{format_bytes(cache['limit_bytes'])}",
                "",
            )
        )
    title("backends")
    for one in found.backends:
        lines.append((_backend(one, one.name == found.auto), "" if one.available else "dim"))
    title(f"model {found.name}")
    if found.path:
        lines.append((f"  {found.path}", ""))
    lines += [(f"  {line}", "") for line in [*_model(found), *_text(found)]]
    if found.fits:
        title("runs")
        lines += [(f"  {_fit(fit, _threads(found, fit))}", "") for fit in found.fits]
    if found.findings:
        title("findings")
        for level in _STYLES:
            lines += [
                (f"  {level}: {spell_flags(one.message)}", _STYLES[level])
                for one in found.findings
                if one.level == level
            ]
    title("next")
    lines.append(
        (
            f"  {next_command(found) or 'correct the errors, then run this again'}",
            "" if found.ok else "bold",
        )
    )
    return lines


def _backend(one: BackendFacts, is_auto: bool) -> str:
    from .core.proofs.diagnosis import format_bytes

    packages = ", ".join(f"{name} {version}" for name, version in one.packages.items())
    if not one.available:
        return f"  {one.name:<5} no   {one.reason}" + (f" ({packages})" if packages else "")
    memory = (
        "memory unknown"
        if one.memory_bytes is None
        else f"{format_bytes(one.memory_bytes)} {one.memory_is}"
    )
    needed = f" with {' '.join(spell_options(dict(one.options)))}" if one.options else ""
    said = f"  {one.name:<5} yes  on {one.device}{needed}, {memory} ({packages})"
    return (
        said
        + (f"; {one.reason}" if one.reason else "")
        + ("; the choice of --backend auto" if is_auto else "")
    )


def _model(found: Diagnosis) -> list[str]:
    from .core.proofs.diagnosis import format_bytes

    if not found.model:
        return []
    m = found.model
    lines = [
        f"{m['architecture']}, {_count(m['parameters'])} parameters: {m['layers']} layers, "
        f"width {m['hidden_size']}, "
        f"{m['heads']} heads and {m['key_value_heads']} key-value heads of {m['head_dim']}, "
        "feed-forward "
        f"{m['intermediate_size']}"
        + (
            f" of {m['experts']} experts, {m['experts_per_token']} for a token"
            if m["experts"]
            else ""
        )
        + f", vocabulary {m['vocab_size']}",
        f"context {m['context_length']}"
        + (
            f", stretched to {m['longest_context']}"
            if m["longest_context"] > m["context_length"]
            else ""
        )
        + (f", sliding window {m['sliding_window']}" if m["sliding_window"] else "")
        + f"; rope {m['rope_type']}, theta {m['rope_theta']:g}"
        + (f", factor {m['rope_factor']:g}" if m["rope_factor"] else "")
        + f"; embedding and head are {'one matrix' if m['tied_embeddings'] else 'two matrices'}",
    ]
    nbytes = {
        name.replace("_", " "): format_bytes(size)
        for name, size in m["cache_bytes_per_token"].items()
    }
    lines.append(
        f"keys and values of a token: {nbytes['32 bits']} in 32 bits, {nbytes['16 bits']} in "
        "16 (--cache-bits 16), "
        f"{nbytes['8 bits']} in 8 (--cache-bits 8)"
    )
    if found.groups:
        lines.append(f"weights {format_bytes(m['nbytes'])}")
    for group in found.groups:
        kinds = ", ".join(f"{count} {kind}" for kind, count in group["formats"].items())
        lines.append(
            f"  {group['group']:<10}{group['tensors']:>5} tensors "
            f"{format_bytes(group['nbytes']):>9}  {kinds}"
        )
    return lines


def _text(found: Diagnosis) -> list[str]:
    t, lines = found.tokenizer, []
    if t:

        def named(one: int) -> str:
            return f"{one} {t['texts'].get(one, '')}".strip()

        added = "added" if t["adds_bos"] else "not added"
        starts = "none" if t["bos"] is None else f"{named(t['bos'])}, {added} to texts"
        lines.append(
            f"tokenizer {t['kind']}, {t['vocab_size']} tokens; BOS {starts}; ends with "
            f"{', '.join(map(named, t['eos'])) or 'nothing'}"
        )
    if found.template:
        lines.append(f"template {found.template['name']}")
    return lines


def _threads(found: Diagnosis, fit: Fit) -> str:
    """The threads that the cpu backend would run, in words; "" for other backends and without
    compiled kernels.
    """
    if fit.backend != "cpu" or not any(one.name == "cpu" and one.kernels for one in found.backends):
        return ""
    threads = default_threads(found.model["nbytes"], found.machine["physical_cores"])
    return f" on {threads} thread{'s' if threads > 1 else ''}"


def _fit(fit: Fit, threads: str) -> str:
    from .core.proofs.diagnosis import format_bytes

    how = f", low-bit weights times {fit.low_bit}" if fit.low_bit else ""
    held = (
        "longest context unknown"
        if fit.longest_context is None
        else (f"room for {fit.longest_context} positions of one conversation, {fit.tokens} of many")
    )
    fits = {True: "fits", False: "does not fit", None: "fits if memory suffices"}[fit.fits]
    return (
        f"{fit.backend:<5} {fits}: computes in {fit.computes_in}{how}{threads}; weights "
        f"{format_bytes(fit.weights_bytes)}, "
        f"cache {format_bytes(fit.cache_bytes_per_token)} per token"
        f"{f' in {fit.cache_bits} bits' if fit.cache_bits else ''}, {held}"
    )


def _count(number: int) -> str:
    for word, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:.2f} {word}"
    return str(number)
