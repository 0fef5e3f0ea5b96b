"""Templates that never end or grow without bound are stopped, in a process of their own; long
conversations are not.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from cases.texts import TEMPLATES, USER, conversation, plain, run_hostile
from cases.threads import on_threads
from making import CHAT_TEMPLATE

from mlx_llama.core.errors import TemplateError
from mlx_llama.core.text import template_process
from mlx_llama.core.text.template import ChatTemplate
from mlx_llama.core.text.template_process import PROCESS

# A case for each way to take time or memory: Python's loops, single calls that are deaf to Ctrl-C,
# recursion, constants while compiling, one allocation, growth, the output
ENDLESS = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}"
    "{% endfor %}",
    "comparing": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = "
    "[ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ [ns.a] | "
    "map('default', 1) | list == [ns.b] | map('default', 1) | list }}",
    "hashing": "{% set ns = namespace(s=(1,)) %}{% for i in range(60) %}{% set ns.s = (ns.s, ns.s) "
    "%}{% endfor %}{{ {ns.s: 1} }}",
    "wordwrap": "{{ ('x' * 9000000) | wordwrap(1) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "power of float": "{{ 2.0 ** 100000 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "constant": "{{ ('a' * 100000000000)|length }}",
    "multiply": "{{ 'a' * 10**10 }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "tojson indent": "{{ range(90000)|list|tojson(indent=100000) }}",
    "join": "{% set s = 'x' * 500000 %}{{ range(90000)|join(s) }}",
    "string": "{% set s = ['x' * 500000] * 500000 %}{{ s|string|length }}",
    "bytes percent": "{{ 'x%*d'.encode() % (3000000000, 1) }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s "
    "%}{% endfor %}",
    "nesting": "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] "
    "%}{% endfor %}{{ ns.s }}",
    "namespaces": "{% set ns = namespace(s=namespace(s=1)) %}{% for i in range(60) %}{% set ns.s = "
    "namespace(a=ns.s, b=ns.s) %}{% endfor %}{{ ns }}{{ ns.s }}{{ 1 // 0 }}",
    "encode and decode": "{% set ns = namespace(s='é' * 1000000, l=[]) %}{% for i in range(9999) "
    "%}{% set ns.l = [ns.l, ns.s.encode('utf-16')] %}{% endfor %}",
    "many variables": "".join(f"{{% set v{i} = 'x' * (4000000 + {i}) %}}" for i in range(400)),
    "groupby": "{{ (['x' * 1000000] * 9999) | map('upper') | groupby('x') }}",
    "copies": "{% set s = ['x' * 500000] * 50000 %}{{ s }}",
    "copies in a block": "{% set s = 'x' * 500000 %}{% set t %}{% for i in range(90000) %}{{ s "
    "}}{% endfor %}{% endset %}",
    "printing": "{% set s = 'x' * 100000 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
}


def helper():
    """The process as psutil sees it, started."""
    assert plain(source="{{ messages[0].content }}").render(USER) == "Hi"
    return psutil.Process(PROCESS._process.pid)


@pytest.mark.slow_for("*e")
@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_is_stopped(name, monkeypatch):
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.2)
    error = run_hostile(ENDLESS[name])
    assert "more than" in error or "failed: " in error
    assert "status" not in error and "MemoryError" not in error
    assert helper().is_running()  # the successor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hashing", "many variables"])
def test_the_limits_are_five_seconds_and_half_a_gigabyte(name):
    """Here without shortening: a rendering takes no more than them, and says so."""
    process, most, seconds, done = helper(), 0, 0.0, threading.Event()

    def watch():
        nonlocal most, seconds
        while not done.wait(0.01):
            try:
                most, seconds = max(most, process.memory_info().rss), sum(process.cpu_times()[:2])
            except psutil.Error:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    source = ENDLESS[name] if name == "hashing" else ENDLESS[name] * 9
    error = run_hostile(source)
    done.set()
    watcher.join()
    assert ("more than 5 seconds" if name == "hashing" else "more than 512 MB") in error
    assert "template" in error
    assert most <= 600 << 20 and seconds < 7


def test_memory_is_watched_where_the_system_does_not_limit_it(monkeypatch):
    PROCESS.stop()
    monkeypatch.setattr(
        template_process,
        "_PROGRAM",
        template_process._PROGRAM.replace("int(sys.argv[2])", "4 << 30"),
    )
    assert "more than 512 MB" in run_hostile(
        "{% set ns = namespace(l=[]) %}{% for i in range(3000) %}"
        "{% set ns.l = [ns.l, 'x' * 1000000 ~ i] %}{% endfor %}"
    )
    PROCESS.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_the_system_limits_time_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(template_process, "_watch", lambda *_: None)
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.2)
    assert "more than 0.2 seconds" in run_hostile(ENDLESS["hashing"])


def test_one_process_serves_all_templates_and_is_replaced_when_it_ends():
    first = helper()
    assert helper() == first
    first.kill()
    first.wait()
    assert helper() != first


def test_a_process_that_ends_within_a_request_is_named(monkeypatch):
    PROCESS.stop()
    monkeypatch.setattr(
        template_process, "_PROGRAM", "import sys; sys.stdin.readline(); sys.exit(9)"
    )
    assert "ended with the status 9" in run_hostile("x")


def test_an_answer_without_end_is_cut(monkeypatch):
    PROCESS.stop()
    monkeypatch.setattr(template_process, "_PROGRAM", "while True: print('x' * 1000, end='')")
    monkeypatch.setattr(template_process, "MAX_SECONDS", 60)
    assert "status" in run_hostile("x")


def test_a_python_that_cannot_be_started_is_named(monkeypatch):
    PROCESS.stop()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert "cannot be started" in run_hostile("x")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_process_gets_no_secrets_and_no_files(monkeypatch, tmp_path):
    PROCESS.stop()
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("TZ", "UTC")
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        process = helper()
        assert process.environ() == {"TZ": "UTC"} or "SECRET" not in process.environ()
        assert process.num_fds() == 3 and process.open_files() == []
    assert os.getsid(process.pid) != os.getsid(0)


def test_what_the_process_imports_is_small():
    """Neither this package nor NumPy."""
    assert helper().memory_info().rss < 64 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_works_during_a_rendering():
    """And leaves no process behind."""
    program = (
        "from mlx_llama.core.text.template import ChatTemplate\nfrom "
        "mlx_llama.core.text.template_process import PROCESS\ntemplate = "
        "ChatTemplate(open(0).read(), 't')\nprint(PROCESS._process.pid, flush=True)\ntry:\n    "
        "template.render([{'role': 'user', 'content': 'x'}])\nexcept KeyboardInterrupt:\n    "
        "print('interrupted', PROCESS._process)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # a shell's job may ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    run.stdin.write(ENDLESS["comparing"])
    run.stdin.close()
    process = psutil.Process(int(run.stdout.readline()))
    first, deadline = sum(process.cpu_times()[:2]), time.monotonic() + 20
    # it renders, after its start
    while sum(process.cpu_times()[:2]) < first + 0.5 and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(2)
    assert run.stdout.read() == "interrupted None\n"
    assert run.wait() == 0 and not process.is_running()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_starts_its_own():
    first = helper()
    with PROCESS._lock:  # as if another thread were rendering
        pid = os.fork()
        if pid == 0:
            os._exit(0 if helper() != first else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert helper() == first


def test_threads_take_turns():
    def render(i):
        template = ChatTemplate("{{ messages[0].content }}" + " " * i, "t")
        talk = conversation([("user", f"text {i}")])
        return [template.render(talk).strip() for _ in range(20)]

    assert on_threads(8, render) == [[f"text {i}"] * 20 for i in range(8)]


def test_known_templates_start_no_process():
    PROCESS.stop()
    for name in ("llama-3", "zephyr", "smollm2"):
        assert "Hi" in ChatTemplate(
            TEMPLATES[name], name, {"bos_token": "", "eos_token": ""}
        ).render(USER)
    assert PROCESS._process is None


def test_values_that_json_cannot_express_are_named():
    with pytest.raises(TemplateError, match="JSON"):
        plain(source="{{ x }}").render(USER, x=object())


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


@pytest.mark.parametrize("comment", ["", "{# mine #}"], ids=["known", "unknown"])
def test_a_long_conversation_is_not_endless(comment):
    talk = conversation([("user", "word " * 200), ("assistant", "word " * 200)] * 1000)
    for name, source in TEMPLATES.items():
        if name != "macro":
            assert len(plain(source=source + comment).render(talk)) > 1000
    big = conversation([("user", "x" * 5_000_000)])
    assert len(plain(source=CHAT_TEMPLATE + comment).render(big)) > 5_000_000
