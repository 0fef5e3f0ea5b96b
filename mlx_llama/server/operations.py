"""Health, readiness, progress of loading, metrics, names of models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from .faults import Refusal, not_found
from .fields import AdapterScales, Body
from .replies import Json, admission_of, check_model, event, pick_adapter
from .schemas import serves

router = APIRouter(tags=["operations"])
POLL_SECONDS = 0.1


@router.get("/live")
async def live() -> Response:
    """Return 200 while the process is alive."""
    return Json({"status": "ok"})


@router.get("/health")
@router.get("/v1/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """Return 200 if the model is ready, else 503 with the reason, like llama-server and vLLM."""
    await ready(request)
    return Json({"status": "ok"})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """The same, with the model's state: ready, or idle until the next request loads it."""
    admission = admission_of(request)
    if admission.is_draining:
        raise Refusal(503, "shutting_down", message="the server is shutting down")
    if admission.holder.state != "idle":  # an idle model is loaded by the next request
        admission.holder.require()
    return Json({"status": "ready", "state": admission.holder.state})


@router.get("/v1/loading/progress")
async def loading_progress(request: Request) -> Response:
    """Stream the progress of loading, until the model is ready or has failed."""
    holder = admission_of(request).holder

    async def events() -> AsyncIterator[bytes]:
        last = None
        while True:
            state = holder.describe()
            if state != last:
                yield event(state, "progress")
                last = state
            if holder.state != "loading":
                yield event(state, "end")
                return
            await asyncio.sleep(POLL_SECONDS)

    return EventSourceResponse(
        events(), sep="\n", send_timeout=admission_of(request).settings.send_timeout
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return metrics for Prometheus."""
    if not admission_of(request).settings.serves_metrics:
        raise not_found("metrics are off: start the server with --metrics")
    return Response(
        generate_latest(admission_of(request).metrics.registry),
        headers={"Content-Type": CONTENT_TYPE_LATEST},
    )


@router.get("/v1/models", tags=["OpenAI"])
@router.get("/models", include_in_schema=False)
async def models(request: Request) -> Response:
    """List the model and its adapters."""
    llm = admission_of(request).holder.llm
    meta = llm and {
        "n_vocab": llm.model.config.vocab_size,
        "n_ctx": llm.engine.context,
        "n_ctx_train": llm.model.config.max_position_embeddings,
    }
    data = [_model(request, name) | {"meta": meta} for name in admission_of(request).listed]
    return Json({"object": "list", "data": data})


@router.get("/lora-adapters", tags=["llama-server"])
async def adapters(request: Request) -> Response:
    """List the adapters, which requests choose by the name of the model or by `lora`."""
    admission, holder = admission_of(request), admission_of(request).holder
    active = holder.adapter or admission.settings.options.get("adapter")
    scales = [scale if name == active else 0.0 for name, scale in holder.adapters.items()]
    named = enumerate(zip(holder.adapters, scales))
    return Json([{"id": i, "path": name, "scale": scale} for i, (name, scale) in named])


class AdaptersRequest(Body):
    """POST /lora-adapters: the list alone, or as an object."""

    list_field: ClassVar[str] = "lora"

    lora: AdapterScales


@serves(router, AdaptersRequest, "/lora-adapters", tags=["llama-server"])
async def choose_adapter(request: Request, body: AdaptersRequest) -> Response:
    """Choose the adapter of requests that name none: the one whose scale is not 0."""
    holder = admission_of(request).holder
    if not holder.name:  # it is not loaded yet
        holder.require()
    holder.adapter = pick_adapter(holder, body.lora)
    return Json({"success": True})


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(request: Request, name: str) -> Response:
    """Return a model by its name."""
    if not admission_of(request).is_name(name):
        raise admission_of(request).refuse_name(name)
    return Json(_model(request, check_model(request, name)))


def _model(request: Request, name: str) -> dict[str, Any]:
    created, tags = int(request.app.state.started), admission_of(request).settings.tags
    fields = {"id": name, "object": "model", "created": created, "owned_by": "mlx_llama"}
    return fields | ({"tags": tags} if tags else {})
