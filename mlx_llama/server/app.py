"""The application: its parts put together."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama import __version__
from mlx_llama.api.llm import LLM

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
