"""GET /docs: the OpenAPI document as a page without scripts."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .page import HEADERS, KINDS

router = APIRouter(include_in_schema=False)

_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Show the routes and their fields."""
    return Response(
        write_docs(request.app.openapi()), headers=HEADERS | {"Content-Type": KINDS[".html"]}
    )


def write_docs(document: dict[str, Any]) -> str:
    """Render an OpenAPI document as HTML."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport "
        f"content='width=device-width'><title>{escape(document['info']['title'])}: "
        "routes</title><link rel=stylesheet href=/page/style.css><body "
        f"class=docs><main><h1>Routes</h1><p>{escape(document['info']['description'])} <a "
        "href=/openapi.json>openapi.json</a></p>"
    ]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"<h2>{method.upper()} <code>{escape(path)}</code></h2>"
                f"<p>{escape(operation.get('description', ''))}</p>"
            )
            body = operation.get("requestBody")
            if body:
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_write_fields(schemas[name]))
    return "".join(parts)


def _write_fields(schema: dict[str, Any]) -> str:
    rows = []
    for name, field in schema.get("properties", {}).items():
        limits = [f"{sign} {field[key]}" for key, sign in _SIGNS.items() if key in field]
        default = repr(field["default"]) if "default" in field else ""
        default = "required" if name in schema.get("required", ()) else default
        rows.append(
            f"<tr><td><code>{escape(name)}</code><td>{escape(_write_type(field))}<td>{escape(', '.join(limits))}"  # noqa: E501
            f"<td>{escape(default)}<td>{escape(field.get('description', ''))}"
        )
    return f"<table><tr><th>field<th>type<th>limits<th>default<th>{''.join(rows)}</table>"


def _write_type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(map(_write_type, field["anyOf"])))
    if "$ref" in field:
        return field["$ref"].rpartition("/")[2]
    if "const" in field or "enum" in field:
        return " | ".join(map(repr, field.get("enum", [field.get("const")])))
    if field.get("type") == "array":
        return f"array of {_write_type(field.get('items', {}))}"
    return str(field.get("type", "any"))
