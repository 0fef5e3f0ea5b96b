"""The OpenAPI document. Its bodies come from the pydantic models that check requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from .faults import Fault
from .fields import Body, read_body, spellings

_REFS = "#/components/schemas/{model}"
_BODIES: list[type[Body]] = []


def takes(body: type[Body]) -> dict[str, Any]:
    """Return arguments of a route whose JSON body is `body`; fields.read_body reads it."""
    if body not in _BODIES:
        _BODIES.append(body)
    content = {"application/json": {"schema": {"$ref": _REFS.format(model=body.__name__)}}}
    return {"openapi_extra": {"requestBody": {"required": True, "content": content}}}


Handler = Callable[[Request, Any], Awaitable[Response]]


def serves(
    router: APIRouter, body: type[Body], *paths: str, **options: Any
) -> Callable[[Handler], Handler]:
    """Serve a handler of a checked `body` at these paths; the document has the first."""

    def register(handler: Handler) -> Handler:
        async def route(request: Request) -> Response:
            return await handler(request, await read_body(request, body))

        route.__name__, route.__doc__ = handler.__name__, handler.__doc__
        for path in paths:
            router.post(path, include_in_schema=path == paths[0], **takes(body), **options)(route)
        return handler

    return register


_FAULT = TypeAdapter(Fault).json_schema()
_REFUSAL = {
    "type": "object",
    "required": ["error", "errors"],
    "properties": {
        "error": {"type": "object", "required": ["message", "type"]},
        "errors": {"type": "array", "items": {"$ref": "#/components/schemas/Fault"}},
    },
}


def _add_names(schema: dict[str, Any], body: type[Body]) -> None:
    """Add the other names of fields to a body's schema. An option has `aliases` once, at its name
    in core's table, where the page's settings look for it.
    """
    properties, known = schema["properties"], dict(schema["properties"])
    for name, field in spellings(body).items():
        first = next(other for other, same in spellings(body).items() if same == field)
        if first in known and name != first:
            text = f"{known[first].get('description', '')} (also: {first})".strip()
            properties[name] = {**known[first], "title": name, "description": text}
        if first in known and name != field:
            properties[name] = {k: v for k, v in properties[name].items() if k != "aliases"}


def write_openapi(app: FastAPI) -> dict[str, Any]:
    """Build the document, once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, definitions = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=_REFS
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions.get("$defs", {}), Fault=_FAULT, Refusal=_REFUSAL)
        for body in _BODIES:
            _add_names(schemas[body.__name__], body)
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        refused = {
            "description": "refused: every fault of the request",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}},
        }
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
                operation["responses"]["4XX"] = refused
        app.openapi_schema = document
    return app.openapi_schema
