"""Batch jobs: what is read, what is written, and what a job that was killed does again."""

from __future__ import annotations

import json
import random

import pytest

from mlx_llama.api.jobs import Job, Results, parse_jobs, run_jobs
from mlx_llama.core.answers.completion import Completion, Token
from mlx_llama.core.errors import ContextError, OptionsError

HELLO = {"role": "user", "content": "b"}


def jobs_of(*lines, **options) -> list[Job]:
    return parse_jobs(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines),
        "in.jsonl",
        options,
        "m",
    )


def test_lines():
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "hi"}]
    jobs = jobs_of(
        {"prompt": "a", "id": "x"},
        "",
        {"messages": messages, "temperature": 0.5, "seed": 3},
        "  ",
        {"prompt": "", "id": 7, "stop": ["\n"], "logit_bias": {"5": 1.5}, "max_tokens": None},
        max_tokens=9,
        seed=1,
    )
    read = [(job.index, job.id, job.prompt) for job in jobs]
    assert read == [(0, "x", "a"), (1, None, messages), (2, 7, "")]
    assert jobs[0].options == {"max_tokens": 9, "seed": 1}
    assert jobs[1].options == {"max_tokens": 9, "seed": 3, "temperature": 0.5}
    assert jobs[2].options == {"max_tokens": 9, "seed": 1, "stop": ["\n"], "logit_bias": {"5": 1.5}}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    [job] = jobs_of({"messages": [messages[0], {"role": "user", "content": parts}]})
    assert job.prompt == messages
    # only \n ends a line
    assert len(parse_jobs('{"prompt": "ä\u2028b"}\r\n{"prompt": "b"}', "in", {}, "m")) == 2


@pytest.mark.parametrize(
    "line, part",
    [
        ("{", "is not JSON ("),
        ("[1]", "is [1], it must be"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "field messages[0].content is [{'type': 'image_url'}], it must be",
        ),
        ("3", "is 3, it must be"),
        ("null", "is None, it must be"),
        ({}, "needs one of the fields prompt and messages"),
        ({"id": 1}, "needs one of the fields prompt and messages"),
        ({"prompt": "a", "messages": [HELLO]}, "prompt and messages, not both"),
        ({"prompt": 3}, "field prompt is 3, it must be a valid string"),
        ({"prompt": ["a"]}, "field prompt is ['a']"),
        ({"messages": []}, "field messages is []"),
        ({"messages": "hi"}, "field messages is 'hi'"),
        ({"messages": [{"role": "user"}]}, "field messages[0].content is missing"),
        ({"messages": [{"role": "user", "content": 1}]}, "field messages[0].content is 1"),
        ({"messages": [HELLO | {"name": "b"}]}, "field messages[0].name is 'b'"),
        ({"prompt": "a", "id": [1]}, "field id is [1]"),
        ({"prompt": "a", "id": True}, "field id is True"),
        ({"prompt": "a", "temperature": -1}, "option temperature: -1 is not allowed"),
        ({"prompt": "a", "temprature": 1}, "'temprature' (did you mean 'temperature'?)"),
        ({"prompt": "a", "max_tokens": 5.5}, "option max_tokens: 5.5"),
        ({"prompt": "a", "seed": True}, "option seed: True"),
        ({"prompt": "a", "id": "first"}, "field id: 'first' is that of line 1 too"),
        ("x" * 10000, "is not JSON"),
        ({"prompt": "a", "y" * 10000: 1}, "there is no option"),
    ],
)
def test_a_bad_line_is_named_with_its_field(line, part):
    with pytest.raises(OptionsError) as error:
        jobs_of({"prompt": "fine", "id": "first"}, "", line)
    text = error.value.args[0]
    assert text.startswith("in.jsonl: line 3: ") and part in text
    assert "\n" not in text and (len(text) < 300 or len(str(line)) > 9999)


def test_no_lines():
    with pytest.raises(OptionsError, match="in.jsonl: has no requests"):
        jobs_of("", "  ")


class Waiting:
    """A handle that is done after some ticks."""

    def __init__(self, job, left, finish):
        self.job, self.left, self.done = job, left, False
        self.finish = lambda: finish(self)


class Served:
    """A stand-in for the scheduler: a handle ends after some ticks. errors: {prompt: raised by the
    handle}.
    """

    def __init__(self, ticks=lambda prompt: 1, errors=None, refused=None):
        self.ticks, self.errors, self.refused = ticks, errors or {}, refused or {}
        self.active, self.most, self.submitted = [], 0, []

    def submit(self, job):
        if job.prompt in self.refused:
            raise self.refused[job.prompt]
        handle = Waiting(job, self.ticks(job.prompt), self.finish)
        self.submitted.append(job.index)
        self.active.append(handle)
        self.most = max(self.most, len(self.active))
        return handle

    def finish(self, handle):
        assert handle.done
        if handle.job.prompt in self.errors:
            raise self.errors[handle.job.prompt]
        tokens, counts = [Token(n) for n in (1, 2, 3)], dict(prompt_tokens=5, reused_tokens=2)
        return Completion(handle.job.prompt.upper(), tokens, "eos", seed=7, **counts)

    def tick(self):
        for handle in self.active:
            handle.left -= 1
            handle.done = handle.left <= 0
        ended = [handle for handle in self.active if handle.done]
        self.active = [handle for handle in self.active if not handle.done]
        return bool(self.active or ended)


def go(path, jobs, served=None, most=4, advance=lambda done: None):
    served = served or Served()
    with Results(path, jobs) as results:
        run_jobs(jobs, results, served.submit, served.tick, most, advance)
    return results


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_results_are_written_as_they_finish(tmp_path):
    jobs = jobs_of(*({"prompt": name, "id": f"id {name}"} for name in "abcdef"), {"prompt": "g"})
    served, seen = Served(lambda prompt: {"a": 5}.get(prompt, 1)), []
    results = go(tmp_path / "out", jobs, served, most=3, advance=seen.append)
    written = lines(tmp_path / "out")
    assert [line["index"] for line in written] == [1, 2, 3, 4, 5, 6, 0] and served.most == 3
    counts = {"prompt_tokens": 5, "reused_tokens": 2, "completion_tokens": 3}
    line = {"index": 1, "id": "id b", "text": "B", "finish_reason": "eos", "seed": 7}
    assert written[0] == line | counts | {"request": jobs[1].digest}
    assert "id" not in written[5] and seen == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (results.failed, results.tokens) == (0, 21)
    assert not served.active


def test_each_line_is_on_disk_before_the_next_tick(tmp_path):
    jobs = jobs_of({"prompt": "a"}, {"prompt": "b"})
    served, counts = Served(lambda prompt: {"a": 1, "b": 3}[prompt]), []
    tick = served.tick

    def count_and_tick():
        counts.append(len((tmp_path / "out").read_bytes().splitlines()))
        return tick()

    served.tick = count_and_tick
    go(tmp_path / "out", jobs, served)
    assert counts == [0, 1, 1]


def test_an_error_is_the_line_of_its_request(tmp_path):
    jobs = jobs_of(*({"prompt": name} for name in "abcd"))
    served = Served(
        errors={"b": RuntimeError("boom")}, refused={"c": ContextError("`ctx_size` 5: too small")}
    )
    results = go(tmp_path / "out", jobs, served)
    written = {line["index"]: line for line in lines(tmp_path / "out")}
    assert written[1] == {"index": 1, "error": "RuntimeError: boom", "request": jobs[1].digest}
    assert written[2] == {"index": 2, "error": "ctx_size 5: too small", "request": jobs[2].digest}
    assert written[0]["text"] == "A" and written[3]["text"] == "D" and results.failed == 2


def test_only_missing_results_are_computed(tmp_path):
    path, jobs = tmp_path / "out", jobs_of(*({"prompt": name} for name in "abcdefgh"))
    go(path, jobs)
    whole = path.read_bytes()
    random.seed(1)
    for cut in [0, 1, len(whole) - 1, len(whole), *random.sample(range(len(whole)), 40)]:
        path.write_bytes(whole[:cut])
        kept = whole[:cut].rpartition(b"\n")[0].count(b"\n") + (b"\n" in whole[:cut])
        served = Served()
        results = go(path, jobs, served)
        assert len(served.submitted) == 8 - kept and len(results.done) == 8
        assert path.read_bytes().startswith(whole[:cut].rpartition(b"\n")[0])
        assert sorted(line["index"] for line in lines(path)) == list(range(8))
    assert go(path, jobs, None).failed == 0


def test_results_of_failed_requests_are_kept(tmp_path):
    path, jobs = tmp_path / "out", jobs_of({"prompt": "a"}, {"prompt": "b"})
    go(path, jobs, Served(errors={"b": RuntimeError("boom")}))
    served = Served()
    assert go(path, jobs, served).failed == 1 and served.submitted == []


@pytest.mark.parametrize(
    "other",
    [
        lambda: jobs_of({"prompt": "a"}, {"prompt": "x"}),
        lambda: jobs_of({"prompt": "a"}),
        lambda: jobs_of({"prompt": "a"}, {"prompt": "b"}, seed=1),
        lambda: jobs_of({"prompt": "b"}, {"prompt": "a"}),
        lambda: parse_jobs('{"prompt": "a"}\n{"prompt": "b"}', "in", {}, "another model"),
    ],
)
def test_results_of_other_requests_are_refused(other, tmp_path):
    path = tmp_path / "out"
    go(path, jobs_of({"prompt": "a"}, {"prompt": "b"}))
    before = path.read_bytes()
    message = "line [12] is not a result of these prompts, options and model"
    with pytest.raises(OptionsError, match=message):
        Results(path, other())
    assert path.read_bytes() == before


FOREIGN = [b"precious", b"\n", b"[1]\n", b"\xff\n", b'{"text": "a"', b"null\n"]
FOREIGN += [b'{"index": 0}\n', b'{"index": -1, "request": "x"}\n', b'{"index": true}\n']


@pytest.mark.parametrize("content", [*FOREIGN, b"[" * 100_000 + b"\n"])
def test_another_file_is_refused_and_stays(content, tmp_path):
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(OptionsError, match="is not a result of these prompts"):
        Results(tmp_path / "out", jobs_of({"prompt": "a"}))
    assert (tmp_path / "out").read_bytes() == content


def test_a_place_that_cannot_be_written(tmp_path):
    jobs = jobs_of({"prompt": "a"})
    for bad, part in (
        (tmp_path, "is not a file"),
        (tmp_path / "no" / "out", "cannot be written: No such"),
        ("nul\0", "cannot be "),
    ):
        with pytest.raises(OptionsError, match=part), Results(bad, jobs):
            pytest.fail("opened")


def test_more_results_are_appended_to_a_line_that_another_program_ended(tmp_path):
    """A file whose last line has no newline: the line counts as torn, and its request runs
    again.
    """
    path, jobs = tmp_path / "out", jobs_of({"prompt": "a"}, {"prompt": "b"})
    go(path, jobs)
    path.write_bytes(path.read_bytes()[:-1])
    go(path, jobs)
    assert sorted(line["index"] for line in lines(path)) == [0, 1]
