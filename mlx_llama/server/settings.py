"""Settings of a server: address, access and limits, and the flags that set them."""

from __future__ import annotations

from argparse import BooleanOptionalAction
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlx_llama.cli.flags import parse_number

KEY_VARIABLE = "MLX_LLAMA_API_KEY"


def setting(
    default: Any,
    help: str,
    flags: str,
    metavar: str = "",
    *,
    limits: tuple[float, float] | None = None,
    action: Any = "store",
) -> Any:
    """A setting with a flag. flags: ours, and those of other tools. limits: of a number, both
    included. action: argparse's.
    """
    names, told = flags.split(), {"action": action} | ({"metavar": metavar} if metavar else {})
    if limits:
        low, high = limits
        is_whole = isinstance(default, int)
        told["type"] = lambda text: parse_number(names[0], text, low, high, is_whole)
    if isinstance(default, str):
        help += f" (default: {default})"
    elif limits and default is not None:
        help += f" (default: {default:g})"
    return field(default=default, metadata={"flags": names, "argparse": told | {"help": help}})


@dataclass(frozen=True)
class Settings:
    """Complete settings; `command.py` makes them from flags. Sizes in bytes, times in seconds."""

    host: str = setting(
        "127.0.0.1",
        "address to listen on, or several, separated by commas; by default this machine only",
        "--host",
        "HOST",
    )
    port: int = setting(8080, "port; 0 picks a free port", "--port", "PORT", limits=(0, 65535))
    # None: the checkpoint's name
    alias: str | None = setting(
        None, "name of the model in requests and answers", "--alias -a", "NAME"
    )
    key_file: str | None = setting(
        None, "private key, for https", "--ssl-key-file --ssl-keyfile", "FILE"
    )
    certificate_file: str | None = setting(
        None, "certificate, for https", "--ssl-cert-file --ssl-certfile", "FILE"
    )
    timeout: float = setting(
        600.0,
        "time limit of a request, including its wait",
        "--timeout -to",
        "SECONDS",
        limits=(0.001, 1e7),
    )
    queue: int = setting(
        64, "requests that may wait for a row; more get 503", "--queue", "N", limits=(0, 1e6)
    )
    # fits macOS's 256 open files of a process
    max_connections: int = setting(
        200, "open connections; more get 503", "--max-connections", "N", limits=(1, 1e5)
    )
    max_body: int = setting(
        8 << 20,
        "maximum size of a request body, such as 8MB (default: 8MiB)",
        "--max-body",
        "SIZE",
    )
    shutdown_seconds: float = setting(
        30.0,
        "time for running requests to finish after SIGTERM",
        "--shutdown-seconds",
        "SECONDS",
        limits=(0, 1e6),
    )
    idle_unload: float | None = setting(
        None,
        "unload the model after this time idle; a request reloads it",
        "--idle-unload",
        "MINUTES",
        limits=(0.001, 1e6),
    )
    slot_folder: str | None = setting(
        None,
        "serve POST /slots/0?action=save and restore, with files in this folder",
        "--slot-save-path",
        "FOLDER",
    )
    api_keys: tuple[str, ...] = setting(
        (),
        "keys that clients must send, separated by commas. Other users of this machine can see "
        f"them: prefer --api-key-file or the variable {KEY_VARIABLE}",
        "--api-key",
        "KEY",
        action="append",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "origin whose pages may send requests, such as https://example.org, or several, separated "
        "by commas; localhost for this machine at any port; * for all; repeatable",
        "--cors-origin --cors-origins",
        "ORIGIN",
        action="append",
    )
    cors_methods: str = setting(
        "GET, POST, DELETE, OPTIONS",
        "methods that these pages may use",
        "--cors-methods",
        "METHODS",
    )
    # None: those that a preflight asks for
    cors_headers: str | None = setting(
        None,
        "headers that they may send (default: those that they ask for)",
        "--cors-headers",
        "HEADERS",
    )
    cors_credentials: bool = setting(
        False,
        "let them send cookies and other credentials",
        "--cors-credentials",
        action=BooleanOptionalAction,
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "further host name to accept besides localhost and the address; repeatable",
        "--allowed-host",
        "NAME",
        action="append",
    )
    serves_slots: bool = setting(
        True, "serve GET /slots (default: yes)", "--slots", action=BooleanOptionalAction
    )
    serves_metrics: bool = setting(
        True, "serve GET /metrics (default: yes)", "--metrics", action=BooleanOptionalAction
    )
    serves_page: bool = setting(
        True,
        "serve the web page at / (default: yes)",
        "--page --webui --ui",
        action=BooleanOptionalAction,
    )
    tags: tuple[str, ...] = setting(
        (), "tags of the model in GET /v1/models, separated by commas", "--tags", "TAGS"
    )
    is_verbose: bool = setting(
        False,
        "show the prompt of each answer in it, as `verbose` of a request does",
        "--verbose -v --log-verbose",
        action="store_true",
    )
    logs_prompts: bool = setting(
        False, "log prompts, and show them in GET /slots", "--log-prompts", action="store_true"
    )
    is_strict: bool = setting(
        False,
        "refuse unknown fields and model names; without it they are ignored and listed in the "
        "header x-mlx-llama-noted",
        "--strict",
        action="store_true",
    )

    # Without flags of their own
    options: Mapping[str, Any] = field(default_factory=dict)  # defaults of an answer's options
    truncates: bool = False  # drop the oldest turns of a conversation that outgrew the context
    receive_timeout: float = 60.0  # until a request has arrived, headers and body
    send_timeout: float = 60.0  # until a client reads the next piece
    max_header: int = 32 << 10
    compile_seconds: float = 2.0  # time limit for compiling a schema, regular expression or grammar
    max_choices: int = 16  # answers per request
    max_jobs: int = 256  # running and ended
    job_seconds: float = 600.0  # until an ended job is forgotten

    @property
    def aliases(self) -> list[str]:
        """Names between the commas of `alias`."""
        return [name for name in (self.alias or "").split(",") if name]
