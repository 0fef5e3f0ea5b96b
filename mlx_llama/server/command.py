"""python -m mlx_llama.server: one model over HTTP, for clients of OpenAI, Anthropic, llama-server,
and a browser.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from mlx_llama import cli
from mlx_llama.cli import flags
from mlx_llama.cli.flags import parse_number
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import parse_memory, validate

from .settings import Settings

if TYPE_CHECKING:
    from mlx_llama.api.llm import LLM

KEY_VARIABLE = "MLX_LLAMA_API_KEY"

_DEFAULT = Settings()
COMMON = f"""
--host HOST: address to listen on, or several, separated by commas; by default this machine only
  (default: {_DEFAULT.host})
--port PORT: port; 0 picks a free port (default: {_DEFAULT.port})
"""
FLAGS = f"""
--alias -a NAME: name of the model in requests and answers
--api-key-file FILE: file of keys, one per line
--ssl-key-file --ssl-keyfile FILE: private key, for https
--ssl-cert-file --ssl-certfile FILE: certificate, for https
--timeout -to SECONDS: time limit of a request, including its wait (default: {_DEFAULT.timeout:g})
--queue N: requests that may wait for a row; more get 503 (default: {_DEFAULT.queue})
--max-connections N: open connections; more get 503 (default: {_DEFAULT.max_connections})
--max-body SIZE: maximum size of a request body, such as 8MB (default: 8MiB)
--shutdown-seconds SECONDS: time for running requests to finish after SIGTERM
  (default: {_DEFAULT.shutdown_seconds:g})
--idle-unload MINUTES: unload the model after this time idle; a request reloads it
--slot-save-path FOLDER: serve POST /slots/0?action=save and restore, with files in this folder
--api-key KEY ...: keys that clients must send, separated by commas. Other users of this machine can
  see them: prefer --api-key-file or the variable {KEY_VARIABLE}
--cors-origin --cors-origins ORIGIN ...: origin whose pages may send requests, such as
  https://example.org, or several, separated by commas; localhost for this machine at any port;
  * for all; repeatable
--cors-methods METHODS: methods that these pages may use (default: {_DEFAULT.cors_methods})
--cors-headers HEADERS: headers that they may send (default: those that they ask for)
--cors-credentials: let them send cookies and other credentials
--allowed-host NAME ...: further host name to accept besides localhost and the address; repeatable
--slots: serve GET /slots (default: yes)
--metrics: serve GET /metrics (default: yes)
--page --webui --ui: serve the web page at / (default: yes)
--tags TAGS: tags of the model in GET /v1/models, separated by commas
--verbose -v --log-verbose: show the prompt of each answer in it, as `verbose` of a request does
--log-prompts: log prompts, and show them in GET /slots
--strict: refuse unknown fields and model names; without it they are ignored and listed in the
  header x-mlx-llama-noted
--quiet: log warnings only
--truncation {{auto,disabled}}: for conversations that outgrow the context: auto drops the oldest
  turns, disabled refuses them; a request's truncation wins (default: disabled)
"""
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
    (("--swa-full", "--no-cache-idle-slots"), 0, "the cache keeps what later requests can use"),
)
EXAMPLES = """
--model ~/models/Llama-3.2-1B-Instruct-Q4_K_M.gguf --port 8081
--model HuggingFaceTB/SmolLM2-360M-Instruct --host 0.0.0.0 --api-key-file keys.txt
"""


def parser() -> flags.Parser:
    """Build the command line. Names follow llama-server's."""
    result = flags.Parser("server", __doc__, EXAMPLES)
    numbers = "host port timeout queue max_connections shutdown_seconds".split()
    settings: dict[str, dict[str, Any]] = {
        **{name: {"default": str(getattr(_DEFAULT, name))} for name in numbers},
        **{name: {"default": []} for name in ("api_key", "cors_origin", "allowed_host")},
    }
    settings["cors_credentials"] = {"action": argparse.BooleanOptionalAction, "default": False}
    for name in ("slots", "metrics", "page"):
        settings[name] = {"action": argparse.BooleanOptionalAction, "default": True}
    settings["truncation"] = {"choices": ("auto", "disabled"), "default": "disabled"}
    result.add_flags(COMMON, result.common, **settings)
    result.add_flags(FLAGS, result.add_argument_group("server"), **settings)
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
    from mlx_llama.api.llm import check_load, load_model

    from .serving import bind_all, serve

    options = flags.load_options(parsed)
    check_load(options)

    def load_checked() -> LLM:
        llm = load_model(options)
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
    origins = _split_list(parsed.cors_origin)
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
    idle = parsed.idle_unload
    if idle is not None:
        idle = 60 * parse_number("--idle-unload", idle, 0.001, 1e6, False)
    if parsed.slot_save_path is not None and not os.path.isdir(parsed.slot_save_path):
        raise OptionsError(f"--slot-save-path {parsed.slot_save_path}: is not a folder")
    if (parsed.ssl_key_file is None) != (parsed.ssl_cert_file is None):
        raise OptionsError("https needs both --ssl-key-file and --ssl-cert-file")
    return Settings(
        host=parsed.host,
        port=parse_number("--port", parsed.port, 0, 65535),
        alias=parsed.alias,
        api_keys=_read_keys(parsed),
        cors_origins=tuple(origin.rstrip("/") for origin in origins),
        cors_methods=parsed.cors_methods or _DEFAULT.cors_methods,
        cors_headers=parsed.cors_headers,
        cors_credentials=parsed.cors_credentials,
        allowed_hosts=tuple(parsed.allowed_host),
        key_file=parsed.ssl_key_file,
        certificate_file=parsed.ssl_cert_file,
        tags=tuple(_split_list([parsed.tags or ""])),
        options={name: getattr(checked, name) for name in wanted},
        truncates=parsed.truncation == "auto",
        queue=parse_number("--queue", parsed.queue, 0, 1e6),
        timeout=parse_number("--timeout", parsed.timeout, 0.001, 1e7, False),
        max_connections=parse_number("--max-connections", parsed.max_connections, 1, 1e5),
        max_body=parse_memory(parsed.max_body, "max_body") or _DEFAULT.max_body,
        shutdown_seconds=parse_number("--shutdown-seconds", parsed.shutdown_seconds, 0, 1e6, False),
        idle_unload=idle,
        serves_slots=parsed.slots,
        slot_folder=parsed.slot_save_path,
        serves_metrics=parsed.metrics,
        serves_page=parsed.page,
        logs_prompts=parsed.log_prompts,
        is_verbose=parsed.verbose,
        is_strict=parsed.strict,
    )


def _split_list(values: list[str]) -> list[str]:
    """Split at commas, and drop what is empty."""
    return [part.strip() for part in ",".join(values).split(",") if part.strip()]


def _read_keys(parsed: argparse.Namespace) -> tuple[str, ...]:
    keys = _split_list([*parsed.api_key, os.environ.get(KEY_VARIABLE, "")])
    if parsed.api_key_file is not None:
        lines = cli.read_text(parsed.api_key_file).split("\n")
        keys += [line for line in lines if not line.lstrip().startswith("#")]
        if not any(line.strip() for line in lines):
            raise OptionsError(f"--api-key-file {parsed.api_key_file}: has no key")
    keys = [key.strip() for key in keys if key.strip()]
    if any(not key.isascii() for key in keys):
        raise OptionsError("--api-key: keys must be ASCII, as HTTP headers are")
    return tuple(dict.fromkeys(keys))
