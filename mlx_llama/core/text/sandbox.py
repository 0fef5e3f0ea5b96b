"""Jinja for templates from strangers: transformers' additions, inside an immutable sandbox with limits.

Names, filters and blocks are those of transformers' utils/chat_template_utils.py. The limits are meter.py's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from . import meter

MAX_SOURCE = 1 << 18  # characters of a template; the longest in use have some 20 000


class TemplateFault(Exception):
    """The template is invalid, failed, or was stopped; the text is a clause that says so."""


class Refusal(Exception):
    """The template called raise_exception; the text is its own message."""


def compile_template(source: str) -> jinja2.Template:
    """Compile Jinja text.

    Raises:
        TemplateFault: too long, or not valid Jinja.
    """
    if len(source) > MAX_SOURCE:
        raise TemplateFault(f"the template has {len(source)} characters, expected at most {MAX_SOURCE}")
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as e:
        raise TemplateFault(f"the template is not valid Jinja, line {e.lineno}: {_one_line(e.message)}") from None
    except (RecursionError, MemoryError, OverflowError, ValueError, SyntaxError, jinja2.TemplateError) as e:
        raise TemplateFault(f"the template cannot be compiled ({_one_line(e)})") from None


def render(template: jinja2.Template, values: Mapping[str, Any], characters: int) -> str:
    """Run a compiled template.

    Args:
        values: the variables that it sees.
        characters: the length of conversation and template together; the output may grow in proportion to it.

    Raises:
        Refusal: the template called raise_exception.
        TemplateFault: it failed, tried what the sandbox forbids, or reached a limit.
    """
    try:
        with meter.start_meter(characters) as limits:
            return limits.join(template.generate(**values))
    except Refusal as e:
        raise Refusal(_one_line(e)) from None
    except meter.LimitError as e:
        raise TemplateFault(f"the template was stopped: {e}") from None
    except SecurityError as e:
        raise TemplateFault(f"the template tried what the sandbox forbids: {_one_line(e)}") from None
    except Exception as e:  # a stranger's program may raise anything
        raise TemplateFault(f"the template failed: {type(e).__name__}: {_one_line(e)}") from None


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


@functools.cache
def _environment() -> SandboxEnvironment:
    return SandboxEnvironment()


class SandboxEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are written for, with every operation reported to the meter."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))
    concat = staticmethod(meter.concatenate)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, "jinja2.ext.loopcontrols"],
            finalize=meter.check_value,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: meter.limit_filter(name, function) for name, function in self.filters.items()}
        self.filters |= InsertChecks.FILTERS
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"dict": SafeDict(), "namespace": SafeNamespace}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = InsertChecks().visit(super()._parse(source, name, filename))
        return tree

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__}")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter.check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        meter.current_meter().count_step()
        method = getattr(function, "__wrapped__", function)  # Jinja wraps str.format in its own sandboxed one
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int, float)):
            if name in ("translate", "maketrans"):
                raise SecurityError(f"a call of {name}()")
            args = meter.check_method(name, owner, args, kwargs)
        return super().call(context, function, *args, **kwargs)


class InsertChecks(NodeTransformer):
    """Compile the meter into loops, `~` and literals, where Jinja has no hook."""

    FILTERS = {"_steps": meter.count_steps, "_value": meter.check_value, "_concat": meter.concatenate}

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _apply("_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _apply("_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _apply("_value", node) if node.items else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _apply("_value", node) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _apply("_value", node) if node.ctx == "load" and node.items else node


def _apply(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class GenerationBlock(Extension):
    """{% generation %}, which marks the assistant's text for training; a plain block here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class SafeDict:
    """dict() without access to the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        made: dict[Any, Any] = meter.check_value(dict(*args, **kwargs))
        return made


class SafeNamespace(Namespace):
    """namespace() without underscored names, which could reach into CPython."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no parameter names, so that a template may use any
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # Jinja's own prints nested values, unmeasured


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 1000 or re.search(r"\d{3}", form):
        raise meter.LimitError("a date format that is too long")
    return datetime.now().strftime(form)
