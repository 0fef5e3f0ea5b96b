"""Jinja for chat templates: transformers' additions inside an immutable sandbox, and a server.

Names, filters and blocks are those of transformers' utils/chat_template_utils.py. The sandbox keeps
a template away from Python, but does not bound its time and memory: template_process.py runs this
file in a process for that. So it imports only the standard library and Jinja.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MAX_SOURCE = 1 << 18  # characters of a template; the longest in use have about 20 000
OUT_OF_MEMORY = 77  # exit status of the process


class Refusal(Exception):
    """The template called raise_exception; the text is its message."""


def answer(source: str, values: Mapping[str, Any] | None) -> tuple[str, str]:
    """Render a template, or only compile it (values None).

    Returns ("text", the text), ("refusal", the template's reason), or ("fault", a clause) for a
    template that is invalid, fails, or tries something that the sandbox forbids.
    """
    if len(source) > MAX_SOURCE:
        return "fault", f"the template has {len(source)} characters, expected at most {MAX_SOURCE}"
    try:
        template = _compile(source)
    except jinja2.TemplateSyntaxError as e:
        return "fault", f"the template is not valid Jinja, line {e.lineno}: {e.message}"
    except MemoryError:
        raise
    except Exception as e:  # compiling computes constants, which may raise anything
        return "fault", f"the template cannot be compiled ({type(e).__name__}: {e})"
    try:
        return "text", "" if values is None else "".join(template.generate(**values))
    except Refusal as e:
        return "refusal", str(e)
    except MemoryError:
        raise
    except SecurityError as e:
        return "fault", f"the template tries what the sandbox forbids: {e}"
    except Exception as e:
        return "fault", f"the template failed: {type(e).__name__}: {e}"


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    return SandboxEnvironment().from_string(source)


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates expect."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
        )
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "namespace": SafeNamespace}
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        # Jinja's `dict` is the type, whose methods change other dictionaries.
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")


class GenerationBlock(Extension):
    """{% generation %} marks the assistant's text for training; a plain block here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class SafeNamespace(Namespace):
    """namespace() without names that begin with an underscore, which could reach into CPython."""

    # without parameter names, so that a template may use any name
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# The process. A request is a line of JSON: [source, values, limit in seconds, limit in characters];
# the answer is another.


def serve(memory: int) -> None:
    """Answer requests on standard input until its end. memory: limit of the process in bytes."""
    _limit_process(memory)
    for line in open(0, "rb", buffering=1 << 20, closefd=False):  # as template_process._BUFFER
        try:
            source, values, seconds, longest = json.loads(line)
            _limit_seconds(seconds)
            kind, text = answer(source, values)
            if len(text) > longest:
                stopped = f"the template was stopped: a text of more than {longest} characters"
                kind, text = "fault", stopped
            sys.stdout.buffer.write(json.dumps([kind, text]).encode() + b"\n")
            sys.stdout.buffer.flush()
        except MemoryError:
            os._exit(OUT_OF_MEMORY)


def _limit_process(memory: int) -> None:
    """Set the limits that the system can enforce. The parent always watches time and memory."""
    if resource is None:
        return
    nothing = dict.fromkeys(("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NPROC"), 0)
    for name, limit in {"RLIMIT_AS": memory, **nothing}.items():
        with contextlib.suppress(AttributeError, OSError, ValueError):  # macOS refuses RLIMIT_AS
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _limit_seconds(seconds: float) -> None:
    """Have the system kill the process soon after its time limit, in case the parent is gone."""
    if resource is not None:
        used, (_, hard) = time.process_time(), resource.getrlimit(resource.RLIMIT_CPU)
        soft = math.ceil(used + seconds) + 1
        resource.setrlimit(
            resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
        )
