"""The web page: files, rendered Markdown, checked session files, GET /docs. Nothing comes from
elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import re
from html import escape, unescape
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import anyio
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from mlx_llama.api.session_file import parse_session
from mlx_llama.core.errors import LlamaError

from .admission import refuse
from .faults import bad_field, not_found
from .fields import Body
from .replies import Json, admission_of
from .schemas import serves

router = APIRouter(tags=["page"], include_in_schema=False)

FOLDER = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
MAX_TEXT = 1 << 20  # characters rendered at once
MOST_DRAWN = 200_000  # as Markdown: a table takes 3 seconds
MOST_CODE = 50_000  # characters of a highlighted block

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; "
    "style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types page",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


def _reply(content: str | bytes, kind: str) -> Response:
    return Response(content, headers=HEADERS | {"Content-Type": KINDS[kind]})


@functools.cache
def _files() -> dict[str, str | bytes]:
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in KINDS}
    return {**files, "code.css": _write_code_colors()}


@router.get("/")
@router.get("/favicon.ico")
@router.get("/sw.js")
@router.get("/page/{name}")
async def page_file(request: Request) -> Response:
    """Return a file of the page."""
    if not admission_of(request).settings.serves_page:
        raise not_found("the page is off: start the server with --page")
    names = {"/": "index.html", "/favicon.ico": "icon.svg", "/sw.js": "sw.js"}
    name = request.path_params.get("name") or names[request.url.path]
    if name not in _files():
        raise not_found("the page has no such file")
    return _reply(_files()[name], Path(name).suffix)


def _write_code_colors() -> str:
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs("[data-theme=dark] .code")
    return f"{light}\n{dark}\n"


# Markdown


class RenderRequest(Body):
    """POST /page/render."""

    text: str = Field(max_length=MAX_TEXT)


@serves(router, RenderRequest, "/page/render")
async def render(request: Request, body: RenderRequest) -> Response:
    """Render Markdown as HTML."""
    return Json({"html": await anyio.to_thread.run_sync(render_markdown, body.text)})


class SeeAlsoRequest(Body):
    """POST /page/see-also."""

    question: str = Field(max_length=MAX_TEXT)


@serves(router, SeeAlsoRequest, "/page/see-also")
async def see_also(request: Request, body: SeeAlsoRequest) -> Response:
    """Find the texts beside the answer to a question, in Markdown."""
    asides = await admission_of(request).run(lambda llm: llm.look_up(body.question))
    return Json({"asides": [aside._asdict() for aside in asides]})


@functools.cache
def _markdown() -> Any:
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False, "highlight": highlight}).enable(
        ["table", "strikethrough"]
    )
    # The browser would fetch an image from any address that the model writes.
    markdown.disable("image")

    def open_link(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
        tokens[i].attrSet("rel", "noopener noreferrer")
        tokens[i].attrSet("target", "_blank")
        return self.renderToken(tokens, i, options, env)

    def open_cell(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
        # The policy forbids style attributes: text-align:right becomes the class right.
        if style := tokens[i].attrs.pop("style", ""):
            tokens[i].attrSet("class", style.rpartition(":")[2])
        return self.renderToken(tokens, i, options, env)

    markdown.add_render_rule("link_open", open_link)
    for name in ("th_open", "td_open"):
        markdown.add_render_rule(name, open_cell)
    add_formulas(markdown)
    return markdown


def render_markdown(text: str) -> str:
    """Render Markdown as HTML, formulas as MathML; HTML in it is shown as text. A text that would
    take many seconds, for its length or its markup, is shown as it is.
    """
    with contextlib.suppress(TooIntricate):
        if len(text) <= MOST_DRAWN:
            return str(_markdown().render(text, {}))
    return f'<pre class="long">{escape(text)}</pre>\n'


def highlight(code: str, language: str, attributes: str) -> str:
    """Render a block of code as HTML, with Pygments' classes if it knows the language."""
    from pygments import highlight as color  # type: ignore[import-untyped]
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
    from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
    from pygments.util import ClassNotFound  # type: ignore[import-untyped]

    shown = escape(code)
    if language and len(code) <= MOST_CODE:
        with contextlib.suppress(ClassNotFound):
            shown = color(
                code, get_lexer_by_name(language, stripnl=False), HtmlFormatter(nowrap=True)
            )
    return f'<pre class="code" data-language="{escape(language[:40])}"><code>{shown}</code></pre>'


# Session files


class SessionRequest(Body):
    """POST /page/session. name: of the file, for errors."""

    text: str
    name: str = "the file"


@serves(router, SessionRequest, "/page/session")
async def check_session(request: Request, body: SessionRequest) -> Response:
    """Check a session file as the REPL does, and return its content."""
    try:
        saved = await anyio.to_thread.run_sync(
            lambda: parse_session(body.text.encode("utf-8", "replace"), body.name)
        )
    except LlamaError as error:
        raise refuse(error, "text") from None
    if any(message.role == "tool" for message in saved.messages):
        text = (
            "this conversation has tool calls, which the page cannot show: load it in the REPL "
            "(/load FILE) or from Python"
        )
        raise bad_field("text", "a conversation without tools", text)
    return Json(saved.model_dump(mode="json"))


# The OpenAPI document as a page without scripts

_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Show the routes and their fields."""
    return _reply(write_docs(request.app.openapi()), ".html")


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


# TeX formulas in Markdown, as MathML, which browsers draw without a library: `$x$`, `\(x\)`,
# `$$x$$` and `\[x\]`; anything else stays text

CLOSINGS = {"$$": "$$", "$": "$", r"\[": r"\]", r"\(": r"\)"}
BLOCKS = ("$$", r"\[")
MAX_CHARACTERS = 3000  # characters of a formula
MOST_STEPS = 100_000  # places of a text where markup is looked for; each takes some 30 microseconds
FORMULA_STEPS = 10  # as long as a formula takes, besides a step for each of these characters
STEP_CHARACTERS = 4
# MathML without elements that load, link or style.
TAGS = frozenset(
    "math menclose mfrac mi mmultiscripts mn mo mover mpadded mphantom mprescripts mroot mrow ms "
    "mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr munder munderover none".split()
)
ATTRIBUTES = frozenset(
    "accent accentunder columnalign columnlines depth display displaystyle fence form height "
    "linethickness lspace mathcolor mathvariant maxsize minsize notation rowlines rspace "
    "scriptlevel separator stretchy width".split()
)
# Environments of amsmath that latex2mathml does not align; arrays replace them.
ALIGNED = re.compile(r"\\(begin|end)\{(?:aligned|align|alignat|split|eqnarray)\*?\}")
GATHERED = re.compile(r"\\(begin|end)\{(?:gathered|gather|equation|multline)\*?\}")


class TooIntricate(Exception):
    """A text has too much markup to be drawn at once."""


def count_steps(state: Any, steps: int = 1) -> None:
    """Count steps of a text. Raises TooIntricate."""
    state.env["steps"] = state.env.get("steps", 0) + steps
    if state.env["steps"] > MOST_STEPS:
        raise TooIntricate


def push_formula(state: Any, tex: str, mark: str) -> Any:
    """Add a formula to a parser's tokens. Raises TooIntricate."""
    count_steps(state, FORMULA_STEPS + len(tex) // STEP_CHARACTERS)
    token = state.push("formula", "math", 0)
    token.content, token.markup = tex, mark
    return token


def add_formulas(markdown: Any) -> None:
    """Add the rules for formulas to a Markdown parser."""
    markdown.inline.ruler.before("escape", "formula", read_inline)
    options = {"alt": ["paragraph", "blockquote", "list"]}
    markdown.block.ruler.before("fence", "formula_block", read_block, options)

    def render(self: Any, tokens: Any, i: int, options: Any, env: Any) -> str:
        tex, mark = tokens[i].content, tokens[i].markup
        shown = write_formula(tex, mark in BLOCKS) or escape(f"{mark}{tex}{CLOSINGS[mark]}")
        return f"<p>{shown}</p>\n" if tokens[i].block else shown

    markdown.add_render_rule("formula", render)


def read_inline(state: Any, silent: bool) -> bool:
    """Read a formula within a paragraph. Raises TooIntricate."""
    count_steps(state)
    text, start = state.src, state.pos
    mark = next((mark for mark in CLOSINGS if text.startswith(mark, start)), None)
    if mark is None:
        return False
    begin, closing = start + len(mark), CLOSINGS[mark]
    end = text.find(closing, begin, begin + MAX_CHARACTERS)
    while mark == "$" and end > 0 and text[end - 1] == "\\":  # an escaped dollar
        end = text.find(closing, end + 1, begin + MAX_CHARACTERS)
    tex = text[begin : max(begin, end)]
    # pandoc's rule, so that sums of money are not formulas
    is_money = mark == "$" and (tex != tex.strip() or text[end + 1 : end + 2].isdecimal())
    if not tex.strip() or is_money:
        return False
    if not silent:
        push_formula(state, tex, mark)
    state.pos = end + len(closing)
    return True


def read_block(state: Any, start: int, end: int, silent: bool) -> bool:
    """Read a formula that begins a line and ends another. Raises TooIntricate."""
    begin = state.bMarks[start] + state.tShift[start]
    mark = next((mark for mark in BLOCKS if state.src.startswith(mark, begin)), None)
    if mark is None or state.is_code_block(start):
        return False
    begin, closing = begin + len(mark), CLOSINGS[mark]
    stop = state.src.find(closing, begin, begin + MAX_CHARACTERS)
    last = start
    while last + 1 < end and state.eMarks[last] < stop:
        last += 1
    tex = state.src[begin : max(begin, stop)]
    if not tex.strip() or state.src[stop + len(closing) : state.eMarks[last]].strip():
        return False
    if not silent:
        token = push_formula(state, tex, mark)
        token.block, token.map = True, [start, last + 1]
        state.line = last + 1
    return True


@functools.lru_cache(maxsize=1024)
def write_formula(tex: str, is_block: bool) -> str | None:
    """Write TeX as MathML; None if it cannot be parsed."""
    from latex2mathml.converter import convert_to_element

    tex = ALIGNED.sub(lambda match: rf"\{match[1]}{{array}}" + "{rl}" * (match[1] == "begin"), tex)
    tex = GATHERED.sub(lambda match: rf"\{match[1]}{{matrix}}", tex)
    try:
        return write_element(convert_to_element(tex, display="block" if is_block else "inline"))
    except Exception:  # many kinds: the library's, the tree's, recursion that is too deep
        return None


def write_element(element: Element) -> str:
    """Write an element of MathML as HTML. Raises ValueError if it is not allowed."""
    if element.tag not in TAGS:
        raise ValueError(element.tag)
    names = {name: value for name, value in element.attrib.items() if name in ATTRIBUTES}
    attributes = "".join(f' {name}="{escape(value)}"' for name, value in names.items())
    text = escape(unescape(element.text or ""))  # the library writes entities
    tag = "mo" if text in ("±", "∓") else element.tag  # the library makes them identifiers
    return f"<{tag}{attributes}>{text}{''.join(map(write_element, element))}</{tag}>"
