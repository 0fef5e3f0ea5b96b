"""Connections: limits of their number, header size and the time to receive a request."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from .faults import Refusal, write_openai
from .replies import dump

# set in a request's state when there are too many connections: the guard refuses it
CROWDED = "is_crowded"
PROBE_SECONDS = 0.25  # until a client that sends nothing more is probed
SPARE = 32  # connections beyond the limit that get a 503; any more are closed at once


class Connection(H11Protocol):
    """uvicorn's connection with a time limit for receiving each request."""

    def __init__(self, config: Config, **named: Any):
        super().__init__(config, **named)
        self.settings = config.app.state.settings  # type: ignore[union-attr]
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self.settings.max_connections
        if excess > SPARE:
            transport.abort()
            return
        if excess > 0:
            self.app_state = {**self.app_state, CROWDED: True}
        self._receiving = self.loop.call_later(self.settings.receive_timeout, self._end_receiving)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._sending, self._probing):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    # Requests

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self._probing and self.cycle.response_complete:  # no further request is buffered
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that closed its sending side only (RFC 9112, 9.6) until
        its request is answered. asyncio's TLS has no such connections.
        """
        cycle = self.cycle
        is_answering = cycle is not None and not (cycle.more_body or cycle.response_complete)
        if not is_answering or self.scheme == "https":
            return False
        if self._probing is None:
            self._probing = self.loop.call_later(PROBE_SECONDS, self._probe, 2 * PROBE_SECONDS)
        return True

    def _probe(self, seconds: float) -> None:
        """Find out whether the client has left altogether: it then resets the connection when
        something is sent. Before an answer, this is an interim response, which clients skip.
        """
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.scope["http_version"] == "1.1":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self._probing = self.loop.call_later(seconds, self._probe, 2 * seconds)

    def _watch(self) -> None:
        """Run the timer while a request is incomplete. uvicorn's timer covers idle connections."""
        state = self.conn.their_state
        has_begun = state is h11.IDLE and bool(self.conn.trailing_data[0])
        is_partial = state is h11.SEND_BODY or has_begun
        if is_partial and self._receiving is None:
            seconds = self.settings.receive_timeout
            self._receiving = self.loop.call_later(seconds, self._end_receiving)
        elif not is_partial and self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _end_receiving(self) -> None:
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # it sent no request
            return
        limit = self.settings.receive_timeout
        text = f"the request took longer than {limit:g} seconds to arrive"
        self._refuse(Refusal(408, "request_too_slow", message=text))

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP."""
        limit = self.settings.max_header
        if len(self.conn.trailing_data[0]) > limit:
            text = f"the headers are larger than {limit} bytes"
            self._refuse(Refusal(431, "headers_too_large", message=text))
        else:
            self._refuse(Refusal(400, "invalid_http", message="this is not an HTTP request"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer in place of the application, unless it has begun to answer, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = dump(write_openai(refusal))
            headers = {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "Connection": "close",
            }
            start = h11.Response(
                status_code=refusal.status,
                headers=list(headers.items()),
                reason=HTTPStatus(refusal.status).phrase.encode(),
            )
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # the application sends nothing more
        self.transport.close()

    # Answers

    def pause_writing(self) -> None:
        super().pause_writing()
        # For all answers but streams, which have a limit that reports the reason.
        self._sending = self.loop.call_later(2 * self.settings.send_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sending:
            self._sending.cancel()
