"""The file of a conversation: a round trip, and one line for each fault."""

from __future__ import annotations

import json
import os
import re

import pytest
from cases.sessions import GOOD, TURN
from making import refusal

from mlx_llama.api import session_file
from mlx_llama.api.session_file import read_session, write_session
from mlx_llama.core.errors import SessionError

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLS = [
    TURN[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi", "name": "add"},
    TURN[1],
]


@pytest.mark.parametrize("messages, dropped", [(TURN * 3, 4), ([*TURN, *CALLS, *CALLS], 6)])
def test_a_written_session_is_read_again(messages, dropped, tmp_path):
    fields = {"model": "m", "system": "Sei nett \U0001f999", "options": {"temperature": 0.5}}
    fields |= {"messages": messages, "dropped": dropped, "is_cut": True}
    write_session(tmp_path / "s.json", **fields)
    assert read_session(tmp_path / "s.json").model_dump(exclude={"format", "version"}) == fields
    assert json.loads((tmp_path / "s.json").read_bytes()) == GOOD | fields
    assert [path.name for path in tmp_path.iterdir()] == ["s.json"]
    assert os.name == "nt" or (tmp_path / "s.json").stat().st_mode & 0o777 == 0o600


def test_fields_that_may_be_missing(tmp_path):
    fields = {name: GOOD[name] for name in GOOD if name != "dropped"}
    (tmp_path / "s.json").write_text(json.dumps(fields))
    assert read_session(tmp_path / "s.json").dropped == 0


@pytest.mark.parametrize(
    "damage, message",
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not"),
        (b"[]", "not a saved session"),
        (b"[" * 100000, "not JSON"),
        ({"format": "other"}, "not a saved session"),
        ({"version": 2}, "version is 2"),
        ({"version": None}, "version"),
        ({"messages": "x"}, "messages is 'x'"),
        ({"messages": [1, 2]}, r"messages\[0\]"),
        ({"messages": [{"role": "user", "content": "a"}]}, "questions and answers"),
        ({"messages": [TURN[0] | {"role": "system"}, TURN[1]]}, "'user', 'assistant' or 'tool'"),
        ({"messages": [TURN[0] | {"content": 3}, TURN[1]]}, r"messages\[0\].content is 3"),
        ({"dropped": 1}, "dropped is 1"),
        ({"dropped": 99}, "dropped"),
        ({"dropped": "x"}, "dropped"),
        ({"system": 5}, "system is 5"),
        ({"options": []}, "options"),
        ({"options": {"top_p": 9}}, "top_p"),
        ({"options": {"nope": 9}}, "no option 'nope'"),
        ({"model": None}, "model is None"),
        ({"system": "\ud800"}, "not JSON"),
        ({"messages": TURN[::-1]}, "needs the role 'user'"),
        ({"dropped": True}, "dropped is True"),
        *(
            ({name: ...}, f'no "{name}"|{name} is missing')
            for name in ("format", "version", "model", "system", "options", "messages")
        ),
        ({"messages": CALLS[:2]}, "ending with an answer"),
        ({"messages": CALLS[:3]}, "ending with an answer"),
        ({"messages": [CALLS[0], *CALLS[2:]]}, r"messages\[1\] needs the role 'assistant'"),
        ({"messages": [*CALLS[:2], CALLS[3]]}, r"messages\[2\] needs the role 'tool'"),
        (
            {"messages": [CALLS[0], CALLS[1] | {"tool_calls": [{"id": "x"}]}, *CALLS[2:]]},
            r"messages\[1\].tool_calls\[0\]",
        ),
        (
            {"messages": [CALLS[0] | {"tool_calls": [CALL]}, *CALLS[2:]]},
            r"messages\[0\] needs the role 'user'",
        ),
        ({"messages": CALLS * 2, "dropped": 2}, "dropped is 2, it must be the place of a question"),
    ],
)
def test_a_fault_is_named_in_one_line(damage, message, tmp_path):
    file = tmp_path / "bad.json"
    if isinstance(damage, dict):
        fields = {name: value for name, value in (GOOD | damage).items() if value is not ...}
        damage = json.dumps(fields).encode()
    file.write_bytes(damage)
    said = refusal(read_session, file, kind=SessionError)
    assert said.startswith(f"{file}: ") and re.search(message, said)
    assert said.isprintable() and len(said) < 250 + len(str(file))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_pipes_devices_and_long_files_are_refused(tmp_path, monkeypatch):
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("zero", "pipe"):
        with pytest.raises(SessionError, match=f"{name}: cannot be read: is not a regular file"):
            read_session(tmp_path / name)
        with pytest.raises(SessionError, match=f"{name}: cannot be written: is not a regular file"):
            write_session(tmp_path / name, model="m", system=None, options={}, messages=TURN)
    write_session(tmp_path / "s.json", model="m", system=None, options={}, messages=TURN)
    monkeypatch.setattr(session_file, "MOST_BYTES", 100)
    with pytest.raises(SessionError, match="bytes or more, expected at most 100"):
        read_session(tmp_path / "s.json")


@pytest.mark.parametrize(
    "fields", [{"messages": TURN[:1]}, {"messages": [object(), object()]}, {"system": "\ud800"}]
)
def test_a_failed_write_leaves_the_old_file(fields, tmp_path):
    file = tmp_path / "s.json"
    kept = {name: GOOD[name] for name in ("model", "system", "options", "messages", "dropped")}
    write_session(file, **kept)
    old = file.read_bytes()
    call = lambda: write_session(file, **kept | fields)  # noqa: E731
    assert "cannot be written" in refusal(call, kind=SessionError)
    assert file.read_bytes() == old and list(tmp_path.iterdir()) == [file]
