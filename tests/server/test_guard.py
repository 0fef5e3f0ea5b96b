"""Access: hosts, origins, keys, flags."""

from __future__ import annotations

import http.client
import socket

import pytest

from mlx_llama.server import command

QUESTION = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


HOSTS = (
    "localhost:{port} 127.0.0.1 [::1]:{port} LOCALHOST 192.168.1.5 host.docker.internal:8080 "
    "my-pc.local localhost. localhost: [fe80::1%25eth0]:80 [::ffff:127.0.0.1]"
).split()
FOREIGN = (
    "evil.example local localhost.evil.example 127.0.0.1.evil.example evil@localhost "
    "localhost:x@evil localhost:80@evil localhost:80:80 localhost:-1 localhost:123456 "
    "localhost/evil localhost,evil localhost;evil localhost#evil localhost%2eevil .local "
    "evil..local evil@x.local localhost.. [::1 [::1]evil [::1]:x ::1 [127.0.0.1] [localhost] "
    "[[::1]] 127.1 0x7f.0.0.1 2130706433 lo\u00e7alhost"
).split()


@pytest.mark.parametrize(
    "host, status", [*((host, 200) for host in HOSTS), *((host, 403) for host in ("", *FOREIGN))]
)
def test_a_name_of_another_is_refused(host, status, guide):
    """DNS rebinding: a page's own name that suddenly points here."""
    sent = host.format(port=guide.port).encode("latin-1")
    done = guide.http.get("/v1/models", headers={"Host": sent})
    assert done.status_code == status, done.text


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/metrics", "/v1/models"])
def test_a_probe_over_http_1_0_names_no_host(path, guide):
    """As HAProxy's and other checks; HTTP/1.1 demands the header (RFC 9112, 3.2)."""
    for version, status in (("1.0", 200), ("1.1", 400)):
        with socket.create_connection(("127.0.0.1", guide.port)) as sock:
            sock.sendall(f"GET {path} HTTP/{version}\r\n\r\n".encode())
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert answer.status == status


OTHERS = (
    "https://evil.example null http://127.0.0.1:1 http://localhost:{port} file:// http://[".split()
)


@pytest.mark.parametrize(
    "origin, status",
    [(None, 200), ("http://127.0.0.1:{port}", 200), *((other, 403) for other in ("", *OTHERS))],
)
def test_a_page_of_another_site_is_refused(origin, status, guide):
    headers = {} if origin is None else {"Origin": origin.format(port=guide.port)}
    done = guide.http.post("/v1/chat/completions", json=QUESTION, headers=headers)
    assert done.status_code == status, done.text
    # The page may read why it is refused, and nothing else.
    assert ("access-control-allow-origin" in done.headers) == (status == 403)
    plain = headers | {"Content-Type": "text/plain"}  # pages may send it without a preflight
    done = guide.http.post("/v1/jobs", content=b'{"prompt": "x", "max_tokens": 1}', headers=plain)
    assert done.status_code == (201 if status == 200 else 403)


def test_a_request_that_a_browser_marks_as_cross_site_is_refused(guide):
    assert guide.http.get("/slots", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    assert guide.http.get("/slots", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_an_allowed_origin(serve):
    chat, origin = "/v1/chat/completions", "https://app.example"
    allowed = ("--cors-origin", f"{origin}/", "--cors-origin", "localhost")
    server = serve(*allowed, "--allowed-host", "llama.home")
    assert server.http.get("/v1/models", headers={"Host": "llama.home:80"}).status_code == 200
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for names in (
        "authorization,content-type",
        "x-stainless-os, openai-organization, idempotency-key",
    ):
        headers = asked | {"Access-Control-Request-Headers": names}
        preflight = server.http.options(chat, headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == names
    done = server.http.post(chat, json=QUESTION, headers={"Origin": origin})
    assert done.status_code == 200 and done.headers["access-control-allow-origin"] == origin
    other = {"Origin": "https://other.example"}
    refused = server.http.options(chat, headers=headers | other)
    # a browser sends nothing more after a preflight without the header
    assert not any(name.startswith("access-control") for name in refused.headers)
    assert "--cors-origin" in refused.json()["error"]["message"]
    refused = server.http.post(chat, json=QUESTION, headers=other)
    assert refused.status_code == 403 and "--cors-origin" in refused.json()["error"]["message"]
    # localhost stands for any port of this machine
    for origin in ("http://localhost", "https://localhost:3000", "http://[::1]:80"):
        done = server.http.get("/v1/models", headers={"Origin": origin})
        assert done.status_code == 200 and done.headers["access-control-allow-origin"] == origin
    for origin in ("http://localhost.evil.example", "http://notlocalhost", "null", "file://"):
        assert server.http.get("/v1/models", headers={"Origin": origin}).status_code == 403


def test_flags_of_llama_server_for_other_origins(serve):
    """Its --cors-... flags, --tags, --verbose and its names of templates; a larger context."""
    flags = "--cors-origins * --cors-methods GET,POST --cors-headers * --cors-credentials"
    flags += " --tags chat,small --verbose --chat-template command-r --ctx-size 4096 --tools all"
    server = serve(*flags.split())
    origin = {"Origin": "https://web.mydomain.fr"}
    asked = origin | {"Access-Control-Request-Method": "POST"}
    preflight = server.http.options("/completions", headers=asked)
    assert preflight.status_code == 200
    for name, value in (
        ("Origin", "https://web.mydomain.fr"),
        ("Methods", "GET,POST"),
        ("Headers", "*"),
        ("Credentials", "true"),
    ):
        assert preflight.headers[f"access-control-allow-{name}"] == value
    listed = server.http.get("/v1/models", headers=origin)
    assert listed.headers["access-control-allow-credentials"] == "true"  # for the page to read
    [model] = listed.json()["data"]
    assert model["tags"] == ["chat", "small"] and model["meta"]["n_ctx"] == 512
    shown = server.ask("/v1/chat/completions", **QUESTION)["__verbose"]["prompt"]
    assert shown.endswith("hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>")
    hidden = server.ask("/v1/chat/completions", **QUESTION, verbose=False)
    assert "__verbose" not in hidden
    log = server.text()
    assert "(--tools is not needed: " in log and "the context has 512)" in log


def test_programs_of_this_machine_written_as_pages_are_served_with_a_key(serve, guide):
    server = serve("--api-key", "key")
    for origin in (
        "http://localhost:3000 http://127.0.0.1:5173 app://obsidian.md tauri://localhost "
        "vscode-webview://1a2b chrome-extension://abcdef file://"
    ).split():
        headers = {"Origin": origin, "Authorization": "Bearer key"}
        done = server.http.get("/v1/models", headers=headers)
        assert done.status_code == 200 and done.headers["access-control-allow-origin"] == origin
        assert guide.http.get("/v1/models", headers={"Origin": origin}).status_code == 403
    stranger = {"Origin": "https://localhost.evil.example", "Authorization": "Bearer key"}
    assert server.http.get("/v1/models", headers=stranger).status_code == 403


def test_keys(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# two keys\nfirst-key\n\nsecond-key\n")
    server = serve("--api-key-file", keys, MLX_LLAMA_API_KEY="third-key")
    for path in ("/health", "/live", "/ready", "/", "/page/app.js", "/sw.js"):
        assert server.http.get(path).status_code == 200, path
    for path in (
        "/v1/models /metrics /props /slots /openapi.json /docs /v1/loading/progress /page"
    ).split():
        assert server.http.get(path).status_code == 401, path
    assert server.http.post("/page/render", json={"text": "x"}).status_code == 401
    for header, value, status in (
        ("Authorization", "Bearer first-key", 200),
        ("Authorization", "bearer second-key", 200),
        ("x-api-key", "third-key", 200),
        ("Authorization", "Bearer first", 401),
        ("Authorization", "first-key", 401),
        ("Authorization", "Bearer", 401),
        ("x-api-key", "# two keys", 401),
        ("x-api-key", "", 401),
    ):
        done = server.http.post("/v1/chat/completions", json=QUESTION, headers={header: value})
        assert done.status_code == status, value
        assert status == 200 or done.json()["error"]["code"] == "invalid_api_key"
    assert "first-key" not in server.text() and "third-key" not in server.text()


def test_a_header_that_is_no_text(guide):
    connection = http.client.HTTPConnection("127.0.0.1", guide.port)
    connection.putrequest("GET", "/v1/models")
    connection.putheader("Authorization", b"Bearer \xff\xfe")
    connection.endheaders()
    assert connection.getresponse().status == 200


def test_every_answer_has_its_id_and_the_log_no_prompt(serve):
    server = serve()
    done = server.post("/v1/completions", prompt="a-secret-word", max_tokens=3)
    identity = done.headers["x-request-id"]
    line = server.wait(
        lambda: next((line for line in server.text().splitlines() if identity in line), None)
    )
    assert "POST /v1/completions 200" in line and "tokens=3 " in line
    assert "secret" not in server.text()
    server.http.get("/no%0aINFO%20forged")
    assert "forged" not in [line[:12] for line in server.text().splitlines()]
    asked = serve("--log-prompts")
    asked.post("/v1/completions", prompt="a-secret-word", max_tokens=3)
    asked.wait(lambda: "a-secret-word" in asked.text())


def test_a_port_that_is_taken(guide, door):
    done = door(command.main, "--port", guide.port)
    assert done.code == 2 and "cannot listen there" in done.err and done.err.count("\n") == 1


def test_head_is_get_without_a_body(guide):
    for path in ("/", "/health", "/ready", "/v1/models"):
        done, full = guide.http.head(path), guide.http.get(path)
        assert done.status_code == full.status_code == 200 and done.content == b"", path
        assert done.headers["content-type"] == full.headers["content-type"]


@pytest.mark.slow
def test_paths_of_the_machine_are_not_revealed(serve, tmp_path):
    (tmp_path / "refuses.jinja").write_text("{{ raise_exception('no such talk') }}")
    server = serve("--template", tmp_path / "refuses.jinja")
    done = server.post("/v1/chat/completions", **QUESTION)
    assert done.status_code == 400 and "no such talk" in done.text
    assert str(tmp_path) not in done.text
