"""Settings of one server: where it listens, who may ask, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Settings:
    """Complete settings; `command.py` makes them from flags. Sizes in bytes, times in seconds.

    options: generation options in force where a request does not set them, by name.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    alias: str | None = None  # name of the model in answers; None: the checkpoint's
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # names beside localhost, `host` and IP addresses
    options: Mapping[str, Any] = field(default_factory=dict)

    queue: int = 64  # requests beyond the rows; more are told to come again
    timeout: float = 600.0  # per request, queue included
    receive_timeout: float = 60.0  # until a request has arrived, headers and body
    send_timeout: float = 60.0  # until a client takes the next piece
    shutdown_seconds: float = 30.0  # that running requests have after SIGTERM
    # seconds without a request until the model's memory is given back
    idle_unload: float | None = None

    max_connections: int = 200  # fits macOS's 256 open files of a process
    max_header: int = 32 << 10
    max_body: int = 8 << 20
    max_messages: int = 2048
    compile_seconds: float = 2.0  # of a schema, regular expression or grammar
    max_stops: int = 16
    max_stop_length: int = 1024  # characters
    max_choices: int = 16  # answers of one request
    max_jobs: int = 256  # kept, running and ended
    job_seconds: float = 600.0  # that an ended job is kept

    serves_slots: bool = True
    slot_folder: str | None = None  # of saved caches
    serves_metrics: bool = True
    serves_page: bool = True
    logs_prompts: bool = False
    # thoughts: split off; not asked for; left in the text
    reasoning: Literal["auto", "off", "raw"] = "auto"
    is_strict: bool = False  # refuse what would be passed over
