"""Responses kept for `previous_response_id` and item references, within limits."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .faults import bad_field
from .items import as_input
from .replies import Json

router = APIRouter(tags=["OpenAI"])

MOST_RESPONSES, MOST_CHARACTERS, SECONDS = 256, 16 << 20, 3600.0


@dataclass(frozen=True)
class Kept:
    """A response and its conversation."""

    response: dict[str, Any]
    items: Sequence[dict[str, Any]]  # the conversation as an input, the output at its end
    ends: float  # time.monotonic()
    characters: int  # size of both as JSON


class KeptResponses:
    """The latest responses by id."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def put(self, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Keep a response. items: its input."""
        items = [*items, *filter(None, map(as_input, response["output"]))]
        characters = len(json.dumps([response, items]))
        self._kept[response["id"]] = Kept(response, items, time.monotonic() + SECONDS, characters)
        self._clean()

    def get(self, name: str, field: str) -> Kept:
        """Return a response. Raises Refusal if it is not kept, or no longer."""
        self._clean()
        if name not in self._kept:
            text = (
                f"{name!r:.100} is not kept here: only the latest {MOST_RESPONSES} are, for an "
                "hour; send the conversation as input"
            )
            how = 404 if field == "response_id" else 400, "previous_response_not_found"
            raise bad_field(field, "a response that is kept", text, name, *how)
        return self._kept[name]

    def find_item(self, name: str) -> dict[str, Any]:
        """Return an item of a kept response. Raises Refusal."""
        self._clean()
        for kept in reversed(self._kept.values()):
            for item in kept.items:
                if item.get("id") == name:
                    return item
        text = f"the item {name!r:.100} is not kept here: send the whole item"
        raise bad_field("input", "an item that is kept", text, name)

    def drop(self, name: str) -> None:
        """Forget a response."""
        self._kept.pop(name, None)

    def _clean(self) -> None:
        now = time.monotonic()
        while self._kept and (
            len(self._kept) > MOST_RESPONSES
            or next(iter(self._kept.values())).ends < now
            or sum(kept.characters for kept in self._kept.values()) > MOST_CHARACTERS
        ):
            self._kept.popitem(last=False)


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> Response:
    """Return a kept response."""
    return Json(request.app.state.kept_responses.get(response_id, "response_id").response)


@router.delete("/v1/responses/{response_id}")
async def forget(request: Request, response_id: str) -> Response:
    """Forget a response."""
    request.app.state.kept_responses.get(response_id, "response_id")
    request.app.state.kept_responses.drop(response_id)
    return Json({"id": response_id, "object": "response", "deleted": True})
