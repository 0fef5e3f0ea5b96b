"""uvicorn around the application: signals, and time for running requests to finish."""

from __future__ import annotations

import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import uvicorn
from fastapi import FastAPI

from mlx_llama import cli
from mlx_llama.api.llm import LLM
from mlx_llama.core.errors import LlamaError

from .app import make_app
from .connections import Connection
from .settings import Settings

BACKLOG = 2048  # connections
SPARE_SECONDS = 5  # after --shutdown-seconds, to notify clients


class Server(uvicorn.Server):
    """uvicorn that refuses new requests at the first signal and stops running ones `grace` seconds
    later. A second signal, but SIGHUP, stops at once.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, grace: float):
        super().__init__(config)
        self._app, self._grace = app, grace

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take SIGHUP, sent when a terminal closes, as SIGTERM; under nohup it stays ignored."""
        with super().capture_signals():
            hangup = getattr(signal, "SIGHUP", None)  # not on Windows
            is_main = threading.current_thread() is threading.main_thread()
            if hangup is None or not is_main or signal.getsignal(hangup) is signal.SIG_IGN:
                yield
                return
            before = signal.signal(hangup, self.handle_exit)
            try:
                yield
            finally:
                # uvicorn raises the signal again, for the exit code
                signal.signal(hangup, signal.SIG_DFL if before is None else before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_first = not self.should_exit
        super().handle_exit(sig, frame)
        if is_first:
            admission = self._app.state.admission
            admission.is_draining = True
            # A signal may interrupt any code: leave the rest to the event loop.
            admission.loop.call_soon_threadsafe(
                admission.loop.call_later, self._grace, admission.stop_all
            )
        elif sig != getattr(signal, "SIGHUP", None):  # a closing terminal may send several
            self.force_exit = True
            logging.getLogger("uvicorn.error").disabled = True  # cancelled tasks are no errors


def serve(settings: Settings, load: Callable[[], LLM], listening: Sequence[socket.socket]) -> int:
    """Serve until a signal; returns the exit code. Raises LlamaError for a failed load."""
    servers: list[Server] = []

    def end() -> None:
        servers[0].should_exit = True

    app = make_app(settings, load, end)
    try:
        config = make_config(app, settings)
        config.load()
    except OSError as error:
        files = f"--ssl-key-file {settings.key_file}, --ssl-cert-file {settings.certificate_file}"
        raise LlamaError(f"{files}: cannot be used ({error})") from None
    servers.append(Server(config, app, settings.shutdown_seconds))
    cli.say(describe(settings, listening[0].getsockname()[1]))
    addresses = [each.getsockname()[0] for each in listening]
    is_local = all(address.startswith(("127.", "::1")) for address in addresses)
    if not settings.api_keys and not is_local:
        cli.say(
            "warning: other machines can reach this server without a key: "
            "set keys with --api-key-file"
        )
    servers[0].run(sockets=list(listening))
    logging.getLogger("uvicorn.error").disabled = False
    if (failure := app.state.holder.error) is not None:
        raise failure
    return 0


def make_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Build uvicorn's settings."""
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        h11_max_incomplete_event_size=settings.max_header,
        timeout_graceful_shutdown=int(settings.shutdown_seconds + SPARE_SECONDS),
        ssl_keyfile=settings.key_file,
        ssl_certfile=settings.certificate_file,
    )


def bind_all(settings: Settings) -> list[socket.socket]:
    """Open a socket for each address of --host, all at the first one's port. Raises LlamaError."""
    sockets: list[socket.socket] = []
    for host in settings.host.split(","):
        port = sockets[0].getsockname()[1] if sockets else settings.port
        sockets.append(bind(replace(settings, host=host.strip(), port=port)))
    return sockets


def bind(settings: Settings) -> socket.socket:
    """Open a listening socket. Raises LlamaError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        # reuse the port of a killed server at once
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # early connections wait
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        is_taken = getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES)
        remedy = (
            "choose another --port, or 0 for a free port"
            if is_taken
            else "use --host 127.0.0.1 for this machine, or 0.0.0.0 for all its addresses"
        )
        raise LlamaError(
            f"--host {settings.host} --port {settings.port}: cannot listen there ({reason}): "
            f"{remedy}"
        ) from None
    return listening


def describe(settings: Settings, port: int) -> str:
    """Write the line with the server's first address."""
    host = settings.host.split(",")[0]
    host = f"[{host}]" if ":" in host else host
    key = "; clients need an API key" if settings.api_keys else ""
    return f"listening on http{'s' if settings.certificate_file else ''}://{host}:{port}{key}"
