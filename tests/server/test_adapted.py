"""Conversations that a template would refuse are served over every API, and the header says how."""

from __future__ import annotations

import pytest
from cases.texts import TOOL_TEMPLATES

from .conftest import Scripted

SYSTEM, FIRST, SECOND = "Be brief.", "Who are you?", "And how old?"
TALK = [{"role": "user", "content": FIRST}, {"role": "user", "content": SECOND}]
WHOLE = [{"role": "system", "content": SYSTEM}, *TALK]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "time", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    with Scripted(TOOL_TEMPLATES["gemma-2"], tmp_path_factory.mktemp("gemma") / "m") as server:
        yield server


@pytest.fixture(scope="module")
def nemo(tmp_path_factory):
    with Scripted(TOOL_TEMPLATES["mistral-nemo"], tmp_path_factory.mktemp("nemo") / "m") as server:
        yield server


BODIES = {
    "/v1/chat/completions": ("messages", {"messages": WHOLE, "max_tokens": 9}),
    "/v1/responses": ("input", {"input": TALK, "instructions": SYSTEM, "max_output_tokens": 9}),
    "/v1/messages": ("messages", {"messages": TALK, "system": SYSTEM, "max_tokens": 9}),
    "/api/chat": ("messages", {"messages": WHOLE, "stream": False}),
}


@pytest.mark.parametrize("path", BODIES)
def test_a_system_message_and_two_questions_with_gemma_2(path, gemma):
    field, body = BODIES[path]
    with gemma.script("I am.") as script:
        done = gemma.post(path, **body)
    assert done.status_code == 200, done.text
    question = f"<start_of_turn>user\n{SYSTEM}\n\n{FIRST}\n\n{SECOND}<end_of_turn>"
    assert question in script.prompts[0] and script.prompts[0].count("<start_of_turn>") == 2
    noted = done.headers["x-mlx-llama-noted"].split(", ")
    assert noted == [
        f"{field}: the chat template has no system role: the system message precedes the first "
        "question",
        f"{field}: the chat template takes questions and answers in turn: consecutive questions "
        "were joined",
    ]


def test_a_template_that_takes_the_conversation_notes_nothing(gemma):
    with gemma.script("I am."):
        done = gemma.post("/v1/chat/completions", messages=TALK[:1], max_tokens=9)
    assert done.status_code == 200 and "x-mlx-llama-noted" not in done.headers


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_question_after_a_result_with_mistral(nemo, tools):
    talk = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "noon"},
        TALK[1],
    ]
    with nemo.script("Old.") as script:
        done = nemo.post("/v1/chat/completions", messages=talk, tools=tools, max_tokens=9)
    assert done.status_code == 200, done.text
    assert f"noon\n\n{SECOND}" in script.prompts[0]
    assert "a question after a tool's result was added" in done.headers["x-mlx-llama-noted"]


def test_apply_template_shows_what_is_answered(gemma):
    shown = gemma.ask("/apply-template", messages=WHOLE)["prompt"]
    with gemma.script("I am.") as script:
        gemma.post("/v1/chat/completions", messages=WHOLE, max_tokens=9)
    assert f"{SYSTEM}\n\n{FIRST}\n\n{SECOND}" in shown and script.prompts == [shown]


PARTS = (
    "{{ bos_token }}{% for m in messages %}{% if 'lang' not in m.content[0] %}"
    "{{ raise_exception('content must be one part with lang') }}{% endif %}"
    "[{{ m.role }}, {{ m.content[0].lang }}] {{ m.content[0].text }}{% endfor %}"
)


def test_a_template_that_reads_its_variables_in_parts(tmp_path):
    """As TranslateGemma's, whose clients send them as they do to llama-server."""
    with Scripted(PARTS, tmp_path / "m") as server:
        refused = server.post("/v1/chat/completions", messages=TALK[:1])
        assert refused.status_code == 400 and "one part with lang" in refused.text
        with server.script("Je suis.") as script:
            done = server.post(
                "/v1/chat/completions",
                messages=TALK[:1],
                chat_template_kwargs={"lang": "fr"},
                max_tokens=20,
            )
        assert done.status_code == 200 and "x-mlx-llama-noted" not in done.headers
        assert script.prompts == [f"<s>[user, fr] {FIRST}"]


def test_a_template_that_shows_no_text_is_refused(tmp_path):
    with Scripted(
        "{{ bos_token }}{% for m in messages %}{{ m.text }}{% endfor %}", tmp_path
    ) as mute:
        refused = mute.post("/v1/chat/completions", messages=TALK[:1])
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "neither from a string nor from a list of parts" in message and "\n" not in message
