"""Checks before a route: host, origin, key and size. After it: a line in the log."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import itertools
import logging
import re
import secrets
import time
from collections.abc import Iterable
from urllib.parse import SplitResult, urlsplit

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_llama.core.system import machine

from .admission import Answers
from .connections import CROWDED
from .faults import Fault, Refusal, unavailable
from .metrics import Metrics
from .replies import reply_refusal
from .settings import Settings

log = logging.getLogger("mlx_llama.server")

# need no key: they reveal nothing about the model
PUBLIC = {"/", "/health", "/v1/health", "/live", "/ready", "/favicon.ico", "/sw.js"}
PUBLIC_FOLDERS = ("/page/",)
BODIES = 8  # bodies of --max-body bytes in memory at a time, or more of fewer bytes
SMALL_SHARE = 64  # bodies below this fraction of --max-body are always taken
LARGE_BODY = 1 << 20
TRIM_SECONDS = 1.0
MAX_WARNED = 10_000  # pairs of a client and a field
MAX_NAMED, MAX_NOTE = 100, 1024  # ignored fields in a header, and its characters
_STREAM = r"/v1/jobs/[^/]+/stream"


class Guard:
    """ASGI middleware around the whole app."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics):
        self.app, self.settings, self.metrics = app, settings, metrics
        self._bodies = 0  # bytes of the bodies of running requests
        self._trim: asyncio.TimerHandle | None = None
        self._keys = [_digest(key) for key in settings.api_keys]
        self._warned: set[tuple[str, str]] = set()  # clients and ignored fields that the log names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, headers = time.monotonic(), Headers(scope=scope)
        identity = scope["request_id"] = secrets.token_hex(8)
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if is_start := message["type"] == "http.response.start":
                marked = MutableHeaders(scope=message)
                # OpenAI's name and Anthropic's
                marked["X-Request-Id"] = marked["Request-Id"] = identity
                marked["X-Content-Type-Options"] = "nosniff"
                if places := scope.get("noted"):
                    marked["X-Mlx-Llama-Noted"] = _join_places(places)
                for name, value in self._cors(headers, "origin_refused" in scope).items():
                    marked[name] = value
                # Raise for illegal headers here: uvicorn could not send the 500 afterwards.
                h11.Response(status_code=message["status"], headers=message["headers"])
            await send(message)
            if is_start:
                status = message["status"]

        try:
            self._check_room(scope)
            self._check_host(headers)
            self._check_origin(scope, headers)
            if scope["method"] == "OPTIONS":
                allowed = Response(headers=self._answer_preflight(headers))
                await allowed(scope, receive, send_marked)
                return
            self._check_key(scope, headers)
            if scope["method"] == "POST":
                self._check_type(headers)
            # GET's answer to HEAD; uvicorn, which has the scope itself, leaves out the body.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(inner, self._limit(scope, headers, receive), send_marked)
        except Refusal as refusal:
            if scope["method"] == "OPTIONS" and scope.pop("origin_refused", False):
                # without CORS headers, so that the browser's console says that the origin is not
                # allowed rather than that the preflight failed
                refusal.status = 200
            if status == 0:
                await reply_refusal(Request(scope), refusal)(scope, receive, send_marked)
        except Exception:
            log.exception("%s failed", identity)
            if status == 0:
                text = f"internal error, request {identity}"
                failure = Refusal(500, "internal_error", message=text)
                await reply_refusal(Request(scope), failure)(scope, receive, send_marked)
        finally:
            self._forget_body(scope, status)
            self.metrics.http.labels(str(status or 499)).inc()
            self._write_line(scope, identity, status or 499, time.monotonic() - began)

    def _check_room(self, scope: Scope) -> None:
        if scope.get("state", {}).get(CROWDED):
            limit = self.settings.max_connections
            text = f"the maximum of {limit} connections are open (--max-connections): retry later"
            refusal = unavailable("too_many_connections", text, 1)
            refusal.headers["Connection"] = "close"
            raise refusal

    # Access

    def _check_host(self, headers: Headers) -> None:
        """Refuse foreign host names: a page may point its domain here (DNS rebinding)."""
        sent = headers.get("host")
        if sent is None:
            return  # a probe over HTTP/1.0; browsers always name the host
        host = _host_name(sent)
        names = (*self.settings.host.split(","), *self.settings.allowed_hosts)
        allowed = {"localhost", "host.docker.internal", *(name.strip().lower() for name in names)}
        if host and (host in allowed or host.endswith(".local") or _is_address(host)):
            return
        text = (
            f"this server does not answer to the host {sent!r:.100}: use localhost or its "
            "address, or start it with --allowed-host"
        )
        raise Refusal(403, "host_not_allowed", message=text)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Refuse pages of other sites, which a browser names in Origin."""
        origin = headers.get("origin")
        if origin is None:
            is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
            if is_foreign and scope["path"] not in PUBLIC:
                raise Refusal(403, "origin_not_allowed", message="pages of other sites are refused")
            return
        is_same = _split(origin).netloc.lower() == headers.get("host", "").lower()
        if is_same or self._is_allowed(origin):
            return
        scope["origin_refused"] = True
        text = (
            f"pages of {origin!r:.100} are refused: start the server with --cors-origin ORIGIN, "
            "or with --api-key if a program on this machine opens the page"
        )
        raise Refusal(403, "origin_not_allowed", message=text)

    def _is_allowed(self, origin: str) -> bool:
        """True for an origin of --cors-origin, and for a local program if keys keep out others."""
        listed = self.settings.cors_origins
        if "*" in listed or origin in listed:
            return True
        parts = _split(origin)
        is_local = parts.hostname in ("localhost", "127.0.0.1", "::1")  # at any port
        is_app = is_local or parts.scheme in _APP_SCHEMES
        return (is_local and "localhost" in listed) or (is_app and bool(self._keys))

    def _cors(self, headers: Headers, is_refused: bool) -> dict[str, str]:
        origin = headers.get("origin")
        # Let any page read a refusal: the browser's console shows the remedy.
        if origin is None or not (is_refused or self._is_allowed(origin)):
            return {}
        shares = self.settings.cors_credentials and not is_refused
        return {
            "Access-Control-Allow-Origin": origin,
            "Vary": "Origin",
            "Access-Control-Expose-Headers": "X-Request-Id, X-Mlx-Llama-Noted, Retry-After",
            **({"Access-Control-Allow-Credentials": "true"} if shares else {}),
        }

    def _answer_preflight(self, headers: Headers) -> dict[str, str]:
        """Write headers that allow a page's request; its origin was checked."""
        asked = headers.get("access-control-request-headers", "")
        is_list = re.fullmatch(r"[\w, -]{1,4096}", asked, re.ASCII)
        return {
            "Access-Control-Allow-Methods": self.settings.cors_methods,
            "Access-Control-Max-Age": "600",
            "Access-Control-Allow-Headers": self.settings.cors_headers
            or (asked if is_list else _USUAL_HEADERS),
        }

    def _check_key(self, scope: Scope, headers: Headers) -> None:
        path, is_read = scope["path"], scope["method"] in ("GET", "HEAD")
        if not self._keys or (is_read and (path in PUBLIC or path.startswith(PUBLIC_FOLDERS))):
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer"
        digest = _digest(token.strip() if is_bearer else headers.get("x-api-key", ""))
        # Compare with all keys: the time must not reveal which is close.
        if not max([hmac.compare_digest(digest, key) for key in self._keys]):
            text = "an API key is needed: send the header Authorization: Bearer KEY"
            wanted = {"WWW-Authenticate": "Bearer"}
            raise Refusal(401, "invalid_api_key", message=text, headers=wanted)

    # Bodies

    def _check_type(self, headers: Headers) -> None:
        """Refuse a body declared as anything but JSON. Accept undeclared bodies,
        and forms, as curl -d declares them.
        """
        kind, _, rest = headers.get("content-type", "").lower().partition(";")
        charset = rest.partition("charset=")[2].strip(' "')
        is_json = kind.strip() in _JSON_TYPES or kind.strip().endswith("+json")
        text = ""
        if not is_json or charset not in ("", "utf-8", "utf8", "us-ascii"):
            sent = headers["content-type"]
            text = f"unsupported body type {sent!r:.100}: send application/json in UTF-8"
        elif headers.get("content-encoding", "identity").lower() != "identity":
            text = "compressed bodies are not supported: leave out Content-Encoding"
        if text:
            raise Refusal(415, "unsupported_media_type", message=text)

    def _limit(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        """Refuse a body beyond the limit, whether its length is declared or not, and a large one
        while others fill the memory for bodies.
        """
        limit = self.settings.max_body
        text = f"the body is larger than {limit} bytes: start the server with a larger --max-body"
        fault = Fault("", f"at most {limit} bytes", text)
        refusal = Refusal(413, "body_too_large", [fault])
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise refusal

        async def receive_limited() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            scope["body_size"] = taken = scope.get("body_size", 0) + size
            self._bodies += size
            if taken > limit:
                raise refusal
            if taken > limit // SMALL_SHARE and self._bodies > BODIES * limit:
                text = f"the bodies of running requests take {self._bodies} bytes: retry later"
                raise unavailable("too_many_bodies", text, 1)
            return message

        return receive_limited

    def _forget_body(self, scope: Scope, status: int) -> None:
        """Count a request's body no longer. Soon after a large or refused one, return the freed
        memory to the system, of which the C library keeps fragments.
        """
        size = scope.pop("body_size", 0)
        self._bodies -= size
        if (size > LARGE_BODY or status >= 400) and self._trim is None:
            self._trim = asyncio.get_running_loop().call_later(TRIM_SECONDS, self._trim_memory)

    def _trim_memory(self) -> None:
        self._trim = None
        asyncio.get_running_loop().run_in_executor(None, machine.trim_memory)

    # The log

    def _write_line(self, scope: Scope, identity: str, status: int, seconds: float) -> None:
        # an idle connection keeps its scope, which must not keep the model alive
        answers = scope.pop("answers", None)
        receipt = write_receipt(answers, self.settings) if answers else ""
        path = scope["path"].encode("unicode_escape").decode()[:200]
        is_part = path in ("/page/render", "/page/see-also") or re.fullmatch(_STREAM, path)
        if is_part and status == 200:
            return  # an answer has its own line
        if refusal := scope.pop("refusal", None):
            fields = ",".join(dict.fromkeys(fault.field for fault in refusal.faults if fault.field))
            receipt += f" {refusal.code} {fields}".rstrip().encode("unicode_escape").decode()
        if places := scope.pop("noted", None):
            receipt += f" noted={_join_places(places)}"
            self._warn_once(scope, places)
        log.info(
            "%s %s %s %d %.0fms%s", identity, scope["method"], path, status, seconds * 1e3, receipt
        )

    def _warn_once(self, scope: Scope, places: Iterable[str]) -> None:
        """Name ignored fields in the log, once for each client: address and user agent."""
        agent = Headers(scope=scope).get("user-agent", "")[:100]
        client = _join_places([(scope.get("client") or ["a socket"])[0], agent])
        if new := [place for place in places if (client, place) not in self._warned]:
            suggest = scope.get("suggest", str)  # set with the ignored fields
            log.warning("ignored in requests of %s: %s", client, _join_places(map(suggest, new)))
        if len(self._warned) > MAX_WARNED:
            self._warned.clear()
        self._warned.update((client, place) for place in new)


def _join_places(places: Iterable[str]) -> str:
    """Places of a body as a header's value: printable ASCII without spaces around it."""
    text = ", ".join(itertools.islice(places, MAX_NAMED)).encode("ascii", "backslashreplace")
    return re.sub(r"[^ -~]", "?", text.decode())[:MAX_NOTE].strip()


def write_receipt(answers: Answers, settings: Settings) -> str:
    """Write the part of a log line that describes answers."""
    receipt = ""
    for completion in answers.completions:
        rate = completion.decode_tps  # 0 for forced tokens that all came with the first
        receipt += (
            f" prompt={completion.prompt_tokens} reused={completion.reused_tokens} "
            f"tokens={len(completion.tokens)} {f'tps={rate:.1f} ' if rate else ''}"
            f"end={completion.finish_reason}"
        )
    if settings.logs_prompts:
        decode = answers.llm.tokenizer.decode
        receipt += f" prompts={[decode(task.prompt) for task in answers.tasks]!r}"
    return receipt


_APP_SCHEMES = tuple(
    "app tauri vscode-webview file chrome-extension moz-extension safari-web-extension".split()
)
_JSON_TYPES = {"", "text/json", "text/plain"} | {
    f"application/{kind}" for kind in ("json", "x-www-form-urlencoded", "octet-stream")
}
_USUAL_HEADERS = "Authorization, Content-Type, X-Api-Key, Last-Event-Id"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


# RFC 9110's Host: an IPv6 address in brackets, or a name, and a port
_HOST = re.compile(
    r"(?:(\[[0-9a-f:.]+(?:%[\w.~%-]+)?\])|([\w-]+(?:\.[\w-]+)*)\.?)(?::\d{0,5})?", re.A
)


def _host_name(host: str) -> str:
    """Return the name or the address, in brackets, of a Host header; "" for a malformed one."""
    match = _HOST.fullmatch(host.lower())
    return (match[1] or match[2]) if match else ""


def _is_address(host: str) -> bool:
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        else:
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _split(origin: str) -> SplitResult:
    """Split an origin; a malformed one, such as http://[, has no parts."""
    try:
        return urlsplit(origin)
    except ValueError:
        return urlsplit("")
