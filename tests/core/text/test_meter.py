"""Templates that never end or grow without bound are stopped; long conversations are not."""

import threading

import pytest

from mlx_llama.core.text import meter

from .cases import TEMPLATES, USER, conversation, plain, run_hostile

ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "silent": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
    "filtered": "{% for i in range(99999) if range(99999)|list|length < 0 %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "wide loop": "{% set a = range(99999)|list %}{% for x in a recursive %}{{ loop(a) }}{% endfor %}",
    "multiply": "{{ 'a' * 10**10 }}",
    "multiply list": "{{ ([0] * 10**10)|length }}",
    "multiply twice": "{{ 'a' * 1000000 * 1000000 }}",
    "constant": "{{ ('a' * 100000000000)|length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of float": "{{ 2.0 ** 100000 }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "adding": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "adding lists": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "squaring": "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}{% endfor %}",
    "blocks": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "nesting": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "nesting views": "{% set ns = namespace(s={}) %}{% for i in range(60) %}"
    "{% set ns.s = {'a': ns.s.items(), 'b': ns.s.values()} %}{% endfor %}{{ ns.s }}",
    "pretty": "{% set ns = namespace(s=[1]) %}{% for i in range(17) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}"
    "{{ ns.s | pprint | length }}",
    "nesting dicts": "{% set ns = namespace(s={}) %}{% for i in range(60) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}{{ ns.s }}",
    "nesting tuples": "{% set ns = namespace(s=()) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) %}{% endfor %}{{ ns.s == 1 }}",
    "nesting calls": "{% set ns = namespace(s=1) %}{% for i in range(60) %}{% set ns.s = dict(a=ns.s, b=ns.s) %}{% endfor %}{{ ns.s }}",
    "printing": "{% set s = 'x' * 100000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "join": "{% set s = 'x' * 500000 %}{{ range(90000)|join(s) }}",
    "join method": "{% set s = 'x' * 500000 %}{{ s.join('y' * 500000) }}",
    "replace": "{% set s = 'x' * 500000 %}{{ s|replace('x', s) }}",
    "replace method": "{% set s = 'x' * 500000 %}{{ s.replace('', s) }}",
    "center": "{{ 'x'.center(10**10) }}",
    "center filter": "{{ 'x'|center(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "expandtabs": "{{ ('\t' * 500000).expandtabs(100000) }}",
    "indent": "{{ ('\n' * 500000)|indent(100000) }}",
    "indent text": "{% set s = 'x' * 500000 %}{{ ('\n' * 500000)|indent(s) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format computed": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format many": "{% set s = 'x' * 500000 %}{{ ('{0}' * 100000).format(s) }}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent computed": "{{ '%*d' % (10000000000, 1) }}",
    "percent many": "{% set s = 'x' * 500000 %}{{ ('%(a)s' * 100000) % {'a': s} }}",
    "format filter": "{{ '%10000000000d'|format(1) }}",
    "tojson indent": "{{ range(90000)|list|tojson(indent=100000) }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list|length }}",
    "slice": "{% for x in [1]|slice(10**10) %}{% endfor %}",
    "sum": "{{ ([range(99999)|list] * 9)|sum(start=[])|length }}{{ ([range(99999)|list] * 99999)|sum(start=[])|length }}",
    "lipsum": "{{ lipsum(n=1000000) }}",
    "date": "{{ strftime_now('%1000000000d') }}",
    "string": "{% set s = ['x' * 500000] * 500000 %}{{ s|string|length }}",
    "copies": "{% set s = ['x' * 500000] * 50000 %}{{ s }}",
    "namespaces": "{% set ns = namespace(s=namespace(s=1)) %}{% for i in range(60) %}{% set ns.s = namespace(a=ns.s, b=ns.s) %}"
    "{% endfor %}{{ ns }}{{ ns.s }}{{ 1 // 0 }}",
    "copies by a filter": "{% set s = 'x' * 500000 %}{{ ([''] * 90000) | map('default', s, true) | list }}",
    "copies in a tilde": "{% set s = 'x' * 500000 %}{{ 'a' ~ ([''] * 90000) | map('default', s, true) | list }}",
    "copies in a block": "{% set s = 'x' * 500000 %}{% set t %}{% for i in range(90000) %}{{ s }}{% endfor %}{% endset %}",
    "tilde": "{% set s = ['x' * 500000] * 50000 %}{{ '' ~ s }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_is_stopped(name, monkeypatch):
    monkeypatch.setattr(meter, "MAX_SECONDS", 0.2)
    assert "MemoryError" not in run_hostile(ENDLESS[name])  # before the machine suffers


def test_the_clock_stops_a_template_within_its_steps(monkeypatch):
    monkeypatch.setattr(meter, "MAX_STEPS", 10**12)
    monkeypatch.setattr(meter, "MAX_SECONDS", 0.2)
    assert "seconds" in run_hostile(ENDLESS["silent"])


def test_the_meter_works_on_any_thread():
    found = []
    threads = [threading.Thread(target=lambda: found.append(run_hostile(ENDLESS["nested"]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and all("steps" in message for message in found)


@pytest.mark.parametrize(
    ("source", "length"),
    [
        ("{{ 'x'.center(100000) }}", 100_000),
        ("{{ 'x' | center(1000) | replace(' ', 'abc') }}", 2998),
        ("{{ 'x' * 100000 }}", 100_000),
        ("{{ 2 ** 2000 }}", 603),
        ("{{ (['a'] * 1000) | join(', ') }}", 2998),
        ("{{ '%1000d' % 7 }}{{ '{:>1000}'.format(7) }}", 2000),
        ("{{ 'a\nb' | indent(100) }}", 103),
        ("{% for i in range(99999) %}x{% endfor %}", 99_999),
    ],
)
def test_work_within_the_limits_is_done(source, length):
    assert len(plain(source=source).render(USER)) == length


def test_a_long_conversation_is_not_endless():
    talk = conversation([("user", "word " * 200), ("assistant", "word " * 200)] * 1000)
    for name, source in TEMPLATES.items():
        if name != "macro":
            assert len(plain(source=source).render(talk)) > 1000
    big = conversation([("user", "x" * 5_000_000)])
    assert len(plain().render(big)) > 5_000_000
