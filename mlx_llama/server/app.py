"""The application: its parts put together, and uvicorn around it: signals, and time for running
requests to finish.
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama import __version__, cli
from mlx_llama.api.llm import LLM
from mlx_llama.core.errors import LlamaError

from . import (
    anthropic,
    completions,
    items,
    jobs,
    llama_completion,
    llama_cpp,
    ollama,
    openai,
    operations,
    page,
    responses,
)
from .admission import Admission
from .connections import Connection
from .faults import Refusal
from .guard import Guard
from .metrics import Metrics
from .model_holder import ModelHolder
from .replies import reply_refusal
from .schemas import write_openapi
from .settings import Settings

ABOUT = (
    "A Llama-family model over HTTP. Generation options are those of the commands and of Python."
)


def make_app(
    settings: Settings, load: Callable[[], LLM], on_failure: Callable[[], None] = lambda: None
) -> FastAPI:
    """Build the application.

    load: called in a thread at startup, returns the model. on_failure: called if `load` raises.
    `app.state` holds the settings, the admission and the start time.
    """
    metrics = Metrics()

    @asynccontextmanager
    async def live(app: FastAPI) -> AsyncIterator[None]:
        # Let streams finish: Admission.stop_all stops those that run too long after SIGTERM.
        AppStatus.disable_automatic_graceful_drain()
        app.state.started = time.time()
        app.state.holder = ModelHolder(
            load,
            settings.idle_unload,
            on_failure,
            lambda llm: llama_cpp.describe_model(llm, settings),
        )
        app.state.admission = Admission(settings, app.state.holder, metrics)
        app.state.jobs = jobs.Jobs(settings)
        app.state.kept_responses = items.KeptResponses()
        metrics.watch(app.state.admission)
        app.state.holder.start()
        yield
        app.state.admission.stop_all()
        app.state.holder.close()

    app = FastAPI(
        title="mlx_llama",
        version=__version__,
        description=ABOUT,
        lifespan=live,
        redoc_url=None,
        docs_url=None,
    )
    app.state.settings = settings
    apis = (openai, completions, responses, items, anthropic, llama_completion, llama_cpp, ollama)
    for part in (*apis, jobs, operations, page):
        app.include_router(part.router)
    app.openapi = lambda: write_openapi(app)  # type: ignore[method-assign]

    @app.exception_handler(Refusal)
    async def refuse(request: Request, refusal: Refusal) -> Response:
        return reply_refusal(request, refusal)

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
        text = {
            404: f"there is no route {request.url.path:.200}: GET /docs lists the routes",
            405: f"{request.url.path:.200} does not support {request.method:.20}",
        }.get(error.status_code, str(error.detail))
        refusal = Refusal(error.status_code, code, message=text, headers=error.headers)
        return reply_refusal(request, refusal)

    app.add_middleware(Guard, settings=settings, metrics=metrics)
    return app


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
