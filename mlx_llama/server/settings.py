"""Settings of a server: address, access and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Complete settings; `command.py` makes them from flags. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"  # or several, separated by commas
    port: int = 8080
    alias: str | None = None  # name of the model in answers; None: the checkpoint's
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str | None = None  # None: those that a preflight asks for
    cors_credentials: bool = False
    allowed_hosts: tuple[str, ...] = ()  # names besides localhost, `host` and IP addresses
    key_file: str | None = None  # for https
    certificate_file: str | None = None
    tags: tuple[str, ...] = ()  # describe the model to clients
    options: Mapping[str, Any] = field(default_factory=dict)  # default generation options by name

    truncates: bool = False  # drop the oldest turns of a conversation that outgrew the context
    queue: int = 64  # requests that wait for a row; more get 503
    timeout: float = 600.0  # per request, queue included
    receive_timeout: float = 60.0  # until a request has arrived, headers and body
    send_timeout: float = 60.0  # until a client reads the next piece
    shutdown_seconds: float = 30.0  # for running requests after SIGTERM
    # without a request until the model is unloaded
    idle_unload: float | None = None

    max_connections: int = 200  # fits macOS's 256 open files of a process
    max_header: int = 32 << 10
    max_body: int = 8 << 20
    compile_seconds: float = 2.0  # for a schema, regular expression or grammar
    max_choices: int = 16  # answers per request
    max_jobs: int = 256  # running and ended
    job_seconds: float = 600.0  # until an ended job is forgotten

    serves_slots: bool = True
    slot_folder: str | None = None  # for saved caches
    serves_metrics: bool = True
    serves_page: bool = True
    logs_prompts: bool = False
    is_verbose: bool = False  # show prompts in answers to clients that do not say otherwise
    is_strict: bool = False  # refuse fields that would be ignored

    @property
    def aliases(self) -> list[str]:
        """Names between the commas of `alias`."""
        return [name for name in (self.alias or "").split(",") if name]
