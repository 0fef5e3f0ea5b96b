"""Raw sockets: connections beyond the limit, requests that never end, headers and bodies that are
too large or no JSON.
"""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest
from starlette.responses import Response

from mlx_llama import load
from mlx_llama.server import connections, guard
from mlx_llama.server.connections import SPARE

LATEST = 20.0  # seconds in which a limit of less than one must act
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n"
BODY = b'{"prompt": "hello", "max_tokens": 2}'
CHUNKED = POST % (b"/v1/completions", b"Transfer-Encoding: chunked")


def complete(body: bytes, *headers: bytes) -> bytes:
    """A whole request for a completion."""
    head = b"\r\n".join([b"Content-Length: %d" % len(body), *headers])
    return POST % (b"/v1/completions", head) + body


def open_inside(inside, model, **settings):
    """A server without connections."""
    server = inside(lambda: load(model, backend="cpu"), **settings).ready()
    server.http.close()
    server.open = server.server.server_state.connections
    server.wait(lambda: not server.open)
    return server


@pytest.fixture
def strict(inside, roomy):
    """A server with tight limits."""
    limits = {"max_connections": 4, "max_header": 4000, "max_body": 20_000}
    return open_inside(inside, roomy, receive_timeout=0.5, send_timeout=0.3, **limits)


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=LATEST)


def read_all(sock) -> bytes:
    """Bytes until the server closes."""
    received = b""
    try:
        while piece := sock.recv(1 << 16):
            received += piece
    except ConnectionError:
        pass
    return received


def read_answer(sock) -> tuple[int, dict]:
    """Status and body of one answer."""
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    return answer.status, json.load(answer)


def ask(server, data: bytes) -> tuple[int, dict]:
    with connect(server) as sock:
        sock.sendall(data)
        return read_answer(sock)


def dribble(sock, start: bytes, piece: bytes) -> bytes:
    """Send `start`, then `piece` again and again until the server closes; returns what it said."""
    sock.sendall(start)
    end, received = time.monotonic() + LATEST, b""
    sock.settimeout(0.05)
    while time.monotonic() < end:
        try:
            sock.sendall(piece)
            got = sock.recv(1 << 16)
            if not got:
                return received
            received += got
        except TimeoutError:
            pass
        except ConnectionError:
            return received
    raise AssertionError(f"the server still waits, after {received!r}")


# Their number


def test_connections_beyond_the_limit_are_answered(strict):
    held = [connect(strict) for _ in range(4)]
    strict.wait(lambda: len(strict.open) == 4)
    with connect(strict) as more:
        more.sendall(GET)
        answer = read_all(more)  # it is closed, though the request would keep it
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer.lower()
        assert b"too_many_connections" in answer
    strict.wait(lambda: len(strict.open) == 4)
    held.pop().close()
    strict.wait(lambda: len(strict.open) == 3)
    assert ask(strict, GET) == (200, {"status": "ok"})
    for sock in held:
        sock.close()


@pytest.mark.slow
def test_the_commands_limit(serve):
    server = serve("--max-connections", "1")
    assert server.http.get("/health").status_code == 200  # and keeps its connection
    assert ask(server, GET)[0] == 503


def test_far_more_connections_are_closed_at_once(inside, toy):
    server = open_inside(inside, toy, max_connections=2, receive_timeout=60)
    held = [connect(server) for _ in range(2 + SPARE)]
    server.wait(lambda: len(server.open) == 2 + SPARE)
    with connect(server) as more:
        assert read_all(more) == b""
    assert len(server.open) == 2 + SPARE
    for sock in held:
        sock.close()


# Requests that never end


def test_a_connection_without_a_request_is_closed(strict):
    with connect(strict) as sock:
        assert read_all(sock) == b""


@pytest.mark.slow_for("method", "second")
@pytest.mark.parametrize(
    "start",
    [b"G", GET[:-2] + b"X-A: ", GET + b"GET /health HTTP/1.1\r\nX-A: "],
    ids=["method", "header", "second request"],
)
def test_headers_that_never_end(start, strict):
    with connect(strict) as sock:
        received = dribble(sock, start, b"a")
    assert b"HTTP/1.1 408 " in received and b"request_too_slow" in received
    assert received.count(b"HTTP/1.1 200") == start.count(GET)


@pytest.mark.slow
def test_headers_that_never_end_on_a_connection_that_was_idle(strict):
    with connect(strict) as sock:
        sock.sendall(GET)
        assert read_answer(sock)[0] == 200
        time.sleep(0.2)
        assert dribble(sock, b"GET /health", b"a").startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_an_answer_may_take_longer_than_its_request(strict):
    body = b'{"prompt": "hello", "max_tokens": 2000, "n": 6, "logit_bias": {"2": -1000}}'
    began = time.monotonic()
    status, answer = ask(strict, complete(body))
    assert status == 200 and answer["usage"]["completion_tokens"] == 12000
    assert time.monotonic() - began > strict.settings.receive_timeout


@pytest.mark.slow_for("Content")
@pytest.mark.parametrize(
    "head, piece", [(b"Content-Length: 9000", b" "), (b"Transfer-Encoding: chunked", b"1\r\n \r\n")]
)
def test_a_body_that_never_ends(head, piece, strict):
    with connect(strict) as sock:
        assert dribble(sock, POST % (b"/v1/completions", head), piece).startswith(b"HTTP/1.1 408 ")
    strict.wait(strict.is_idle)
    with connect(strict) as sock:  # answered before its body has come
        assert dribble(sock, POST % (b"/nowhere", head), piece).startswith(b"HTTP/1.1 404 ")
    strict.wait(lambda: not strict.open)


def test_a_request_that_arrives_in_pieces_is_served(strict):
    whole = complete(BODY)
    with connect(strict) as sock:
        for _ in range(2):
            for start in range(0, len(whole), 40):
                sock.sendall(whole[start : start + 40])
                time.sleep(0.02)
            assert read_answer(sock)[0] == 200
            time.sleep(0.7)  # longer than a request may take: the connection is kept


@pytest.mark.slow
def test_an_answer_that_nobody_reads(strict):
    """64 documents, of a few hundred kilobytes each, at once."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", strict.port))
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 64)
        strict.wait(lambda: len(strict.open) == 1)
        strict.wait(lambda: not strict.open, LATEST)


# Clients that send nothing more (RFC 9112, 9.6: half a connection may be closed)


def finish(server, data: bytes) -> bytes:
    """Send `data`, end the sending side as `nc -N` does, and return all that the server says."""
    with connect(server) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


def test_a_client_that_ends_its_side_gets_its_answer(strict):
    stream = BODY.replace(b"}", b', "stream": true}')
    old = complete(BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
    for request, end in (
        (complete(BODY), b"}"),
        (old, b"}"),
        (complete(stream), b"data: [DONE]\n\n\r\n0\r\n\r\n"),
        (GET + complete(BODY) + GET, b'{"status":"ok"}'),
    ):
        answer = finish(strict, request)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(end), answer
        assert answer.count(b"HTTP/1.1 200 ") == request.count(b" HTTP/1.")
    assert finish(strict, complete(BODY)[:-1]) == b""  # half a request
    strict.wait(lambda: not strict.open)


def test_a_long_answer_reaches_a_client_that_ended_its_side(strict, monkeypatch):
    """http.client skips the interim responses, with which the server probes the connection."""
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.01)
    body = b'{"prompt": "hello", "max_tokens": 1000, "logit_bias": {"2": -1000}}'
    assert finish(strict, complete(body)).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 ")
    with connect(strict) as sock:
        sock.sendall(complete(body))
        sock.shutdown(socket.SHUT_WR)
        status, answer = read_answer(sock)
    assert status == 200 and answer["usage"]["completion_tokens"] == 1000


@pytest.mark.parametrize("field", [b"", b', "stream": true'])
def test_a_client_that_leaves_after_its_side_ended_is_noticed(field, strict):
    body = b'{"prompt": "hello", "max_tokens": 90000, "logit_bias": {"2": -1000}%s}' % field
    with connect(strict) as sock:
        sock.sendall(complete(body))
        sock.shutdown(socket.SHUT_WR)
        strict.wait(lambda: strict.admission.active == 1)
    strict.wait(strict.is_idle, LATEST)
    assert b'outcome="gone"' in finish(strict, GET.replace(b"health", b"metrics"))


# Answers of the application that are not HTTP


@pytest.mark.parametrize("value", ["a ", "a\nb", "\0", " a"])
def test_a_header_that_is_illegal_is_a_500(value, strict):
    @strict.app.get("/illegal")
    async def answer() -> Response:
        return Response(headers={"X-A": value})

    for _ in range(2):
        status, body = ask(strict, GET.replace(b"health", b"illegal"))
        assert status == 500 and body["error"]["code"] == "internal_error"


# Sizes and kinds


def test_large_headers_and_what_is_no_http(strict):
    with connect(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 5000)
        assert read_answer(sock)[0] == 431
    status, body = ask(strict, b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert status == 400 and body["error"]["code"] == "invalid_http"
    assert ask(strict, GET.replace(b"\r\n\r\n", b"\r\nX-A: %s\r\n\r\n" % (b"a" * 3000)))[0] == 200


def test_large_bodies_announced_or_not(strict):
    chunks = b"".join(b"%x\r\n%s\r\n" % (5000, b" " * 5000) for _ in range(5))
    announced = POST % (b"/v1/completions", b"Content-Length: 20001")
    for request in (announced, CHUNKED + chunks + b"0\r\n\r\n"):
        status, body = ask(strict, request)
        assert status == 413 and body["error"]["code"] == "body_too_large"
    assert ask(strict, CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))[0] == 200


def test_depth_and_kinds_of_bodies(strict):
    def post(body: bytes, *headers: bytes) -> tuple[int, str]:
        status, answer = ask(strict, complete(body, *headers))
        return status, answer["error"]["code"] if "error" in answer else ""

    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        body = b'{"prompt": "x", "logit_bias": %s1%s}' % (opening * 3000, closing * 3000)
        assert post(body) == (400, "invalid_json")
    refused = (415, "unsupported_media_type")
    for kind, wanted in (
        (b"application/json", (200, "")),
        (b"application/json; charset=utf-8", (200, "")),
        (b'application/json;charset="UTF-8"', (200, "")),
        (b"text/plain", (200, "")),
        (b"application/x-www-form-urlencoded", (200, "")),
        (b"application/vnd.api+json", (200, "")),
        (b"multipart/form-data; boundary=x", refused),
        (b"application/xml", refused),
        (b"image/png", refused),
        (b"application/json; charset=utf-16", refused),
        (b"json", refused),
    ):
        assert post(BODY, b"Content-Type: " + kind) == wanted, kind
    assert post(BODY) == (200, "")
    assert post(BODY, b"Content-Encoding: gzip") == refused


# Bodies of all requests


def post(body: bytes, length: int | None = None) -> bytes:
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def test_the_bodies_in_memory_are_bounded(inside, toy, monkeypatch):
    """Eight of the largest; small ones are always taken, and an ended request leaves none."""
    trims = []
    monkeypatch.setattr(guard, "TRIM_SECONDS", 0)
    monkeypatch.setattr(guard.machine, "trim_memory", lambda: trims.append(1))
    server = open_inside(inside, toy, max_body=10_000, receive_timeout=60)
    whole = json.dumps({"content": "a" * 9000}).encode()
    held = [connect(server) for _ in range(8)]
    for sock in held:
        sock.sendall(post(b" " * 9990, 10_000))

    def is_refused() -> bool:
        with connect(server) as more:
            more.sendall(post(whole))
            answer = http.client.HTTPResponse(more)
            answer.begin()
            is_over = answer.status == 503 and answer.headers["Retry-After"] == "1"
            return is_over and json.load(answer)["error"]["code"] == "too_many_bodies"

    server.wait(is_refused, LATEST)
    assert ask(server, post(b'{"content": "a"}'))[0] == 200
    for sock in held:
        sock.close()
    server.wait(lambda: ask(server, post(whole))[0] != 503, LATEST)
    server.wait(lambda: trims, LATEST)  # after a refusal
