"""python -m mlx_llama.server: one model over HTTP, for clients of OpenAI, Anthropic, llama-server,
and a browser.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mlx_llama import cli
from mlx_llama.cli import flags
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import parse_memory, validate

from .settings import KEY_VARIABLE, Settings

if TYPE_CHECKING:
    from mlx_llama.api.llm import LLM

# Flags of llama-server that change nothing
_TOOLS = "the server runs no tools: clients send theirs with a request, and run the calls"
_ONE_MODEL = "a server serves one model"
NEEDLESS: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--backend-sampling", "--backend_sampling", "-bs"), 0, "tokens are sampled on the device"),
    (("--media-path",), 1, "this package reads text only"),
    (("--no-mmproj", "--no-mmproj-offload"), 0, "this package reads text only"),
    (("--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json"), 1, _TOOLS),
    (("--ui-mcp-proxy", "--webui-mcp-proxy", "--no-ui-mcp-proxy"), 0, _TOOLS),
    (("--models-max",), 1, _ONE_MODEL),
    (("--models-autoload", "--no-models-autoload"), 0, _ONE_MODEL),
    (("--no-cache-idle-slots",), 0, "the cache keeps what later requests can use"),
)
EXAMPLES = """
--model ~/models/Llama-3.2-1B-Instruct-Q4_K_M.gguf --port 8081
--model HuggingFaceTB/SmolLM2-360M-Instruct --host 0.0.0.0 --api-key-file keys.txt
"""


def parser() -> flags.Parser:
    """Build the command line. Names follow llama-server's."""
    result = flags.Parser("server", __doc__, EXAMPLES)
    group = result.add_argument_group("server")
    add = group.add_argument
    add("--api-key-file", metavar="FILE", help="file of keys, one per line")
    for entry in dataclasses.fields(Settings):
        if entry.metadata:
            names, told = entry.metadata["flags"], entry.metadata["argparse"]
            home = result.common if entry.name in ("host", "port") else group
            home.add_argument(*names, dest=entry.name, **told)
    add("--quiet", action="store_true", help="log warnings only")
    add(
        "--truncation",
        choices=("auto", "disabled"),
        default="disabled",
        help="for conversations that outgrow the context: auto drops the oldest turns, disabled "
        "refuses them; a request's truncation wins (default: disabled)",
    )
    flags.add_load_flags(result, without=())
    flags.add_generation_flags(result)
    flags.add_needless_flags(result, NEEDLESS)
    return result


def main(arguments: list[str]) -> int:
    """Run the server until a signal stops it; return the exit code. Raises LlamaError."""
    parsed = parser().parse_args(arguments)
    settings = make_settings(parsed)
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        level=logging.WARNING if parsed.quiet else logging.INFO,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    from mlx_llama.api.llm import check_load, load

    from .app import bind_all, serve

    options = flags.load_options(parsed)
    check_load(options)

    def load_checked() -> LLM:
        llm = load(**vars(options))
        if settings.alias in llm.model.adapters:
            raise OptionsError(
                f"--alias {settings.alias}: is the name of an adapter: choose another"
            )
        checked = validate(settings.options)
        llm.engine.check_options(checked)
        llm.engine.check_rule(checked)
        for notice in llm.engine.notices:
            cli.say(f"({notice})")
        return llm

    return serve(settings, load_checked, bind_all(settings))


def make_settings(parsed: argparse.Namespace) -> Settings:
    """Turn flags into checked settings. Raises OptionsError."""
    wanted = flags.generation_options(parsed)
    checked = validate(wanted)  # before loading the model
    for name in {"logprobs", "post_sampling_probs"} & wanted.keys():
        raise OptionsError(
            f"option `{name}`: is set by each request (logprobs, top_logprobs, n_probs): leave it "
            "out"
        )
    values = {
        entry.name: getattr(parsed, entry.name, None) for entry in dataclasses.fields(Settings)
    }
    given = {name: value for name, value in values.items() if value is not None}
    origins = _split_list(given.get("cors_origins", ()))
    for origin in origins:
        if origin not in ("*", "localhost") and not re.fullmatch(
            r"[a-z][a-z0-9+.-]*://[^/?#@\s]+/?", origin, re.ASCII
        ):
            raise OptionsError(
                f"--cors-origin {origin!r:.100}: must be an origin as browsers send it, such as "
                "https://example.org, or localhost or *"
            )
    for flag, names in ("methods", parsed.cors_methods), ("headers", parsed.cors_headers):
        if names is not None and not re.fullmatch(r"\*|[\w-]+(?:, *[\w-]+)*", names, re.ASCII):
            raise OptionsError(f"--cors-{flag} {names!r:.100}: must be names between commas, or *")
    if parsed.slot_folder is not None and not os.path.isdir(parsed.slot_folder):
        raise OptionsError(f"--slot-save-path {parsed.slot_folder}: is not a folder")
    if (parsed.key_file is None) != (parsed.certificate_file is None):
        raise OptionsError("https needs both --ssl-key-file and --ssl-cert-file")
    if "idle_unload" in given:
        given["idle_unload"] *= 60
    if "max_body" in given:
        given["max_body"] = parse_memory(given["max_body"], "max_body")
    given |= {
        "api_keys": _read_keys(parsed),
        "cors_origins": tuple(origin.rstrip("/") for origin in origins),
        "allowed_hosts": tuple(parsed.allowed_hosts or ()),
        "tags": tuple(_split_list([parsed.tags or ""])),
        "options": {name: getattr(checked, name) for name in wanted},
        "truncates": parsed.truncation == "auto",
    }
    return Settings(**given)


def _split_list(values: Iterable[str]) -> list[str]:
    """Split at commas, and drop what is empty."""
    return [part.strip() for part in ",".join(values).split(",") if part.strip()]


def _read_keys(parsed: argparse.Namespace) -> tuple[str, ...]:
    keys = _split_list([*(parsed.api_keys or ()), os.environ.get(KEY_VARIABLE, "")])
    if parsed.api_key_file is not None:
        lines = cli.read_text(parsed.api_key_file).split("\n")
        keys += [line for line in lines if not line.lstrip().startswith("#")]
        if not any(line.strip() for line in lines):
            raise OptionsError(f"--api-key-file {parsed.api_key_file}: has no key")
    keys = [key.strip() for key in keys if key.strip()]
    if any(not key.isascii() for key in keys):
        raise OptionsError("--api-key: keys must be ASCII, as HTTP headers are")
    return tuple(dict.fromkeys(keys))
