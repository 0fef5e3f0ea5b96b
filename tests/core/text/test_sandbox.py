"""Templates that try to escape, and templates that fail: each ends in one line."""

import pytest
from cases.texts import USER, run_hostile

from mlx_llama.core.text import sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ messages.__class__ }}",
        "{{ (messages|attr('__class__')).x }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ dict.__class__ }}",
        "{{ dict.fromkeys('ab') }}",
        "{{ namespace.__init__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{% set ns = namespace() %}{% set ns._Namespace__attrs = 1 %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '%s'|format(messages).__class__ }}",
        "{{ ''.join.__self__.__class__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_escapes_are_refused(source):
    """By the sandbox itself, which known templates render in without a process."""
    run_hostile(source)
    kind, _ = sandbox.answer(source, {"messages": USER})
    assert kind == "fault"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{% for %}", "line 1"),
        ("\n\n{{ x", "line 3"),
        ("{{ x | nofilter }}", "nofilter"),
        ("{% unknown %}", "unknown"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ missing() }}", "missing"),
        ("{{ raise_exception('No system\nhere') }}", "refuses this conversation: No system here"),
        ("{{ '" + "(" * 3 + "' }}{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", ""),
        ("x" * (1 << 19), "characters"),
        ("{{ {[]: 1} }}", "unhashable"),
        ("{{ raise_exception('\x1b[2J\x9b\x07' ~ 'x' * 1000000) }}", "␛[2J\ufffd␇xxx"),
        ("{{ messages['\x1b]0;x\x07' ~ 'y' * 1000000].z }}", "attribute '\\x1b]0;x\\x07yyy"),
        ("{{ \x1b[2J }}", "char '\\x1b'"),
    ],
    ids=range(14),
)
def test_a_failure_names_its_cause(source, word):
    assert word in run_hostile(source)
