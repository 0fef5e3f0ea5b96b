"""All chat routes: conversations that outgrow the context."""

from __future__ import annotations

import json

import pytest

from .conftest import text_of

LONG = "Tell me a story about llamas that cross the mountains. " * 6
SYSTEM = "Be kind."


@pytest.fixture(scope="module")
def session(llm):
    """A conversation that lost turns: the REPL's is the judge."""
    session = llm.chat(system=SYSTEM, max_tokens=4, temperature=0)
    for number in range(8):
        session.send(f"{number} {LONG}")
    assert session.dropped
    return session


def ask_all(path: str, messages: list[dict], **fields) -> dict:
    """A body for the chat route `path` with these messages."""
    options = {"temperature": 0, "stream": False, **fields}
    system, *rest = messages
    return {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": rest, "instructions": system["content"], "max_output_tokens": 4},
        "/v1/messages": {"messages": rest, "system": system["content"], "max_tokens": 4},
        "/api/chat": {"messages": messages, "max_tokens": 4},
    }[path] | options


@pytest.fixture(scope="module")
def talk(session):
    """All messages of the session but the newest answer."""
    return [{"role": "system", "content": SYSTEM}, *session.messages[:-1]]


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat")


@pytest.mark.parametrize("path", PATHS)
def test_the_oldest_turns_are_dropped_on_request(path, guide, talk, llm):
    refused = guide.post(path, **ask_all(path, talk))
    assert refused.status_code == 400 and "the context holds 512" in refused.text
    done = guide.post(path, **ask_all(path, talk, truncation="auto"))
    noted = done.headers["x-mlx-llama-noted"]
    dropped = int(noted.removeprefix("truncation: ").removesuffix(" messages"))
    assert noted == f"truncation: {dropped} messages" and dropped % 2 == 0 < dropped
    # The same answer as without these messages: whole turns left, the system message stayed.
    kept = [talk[0], *talk[1 + dropped :]]
    again = guide.post(path, **ask_all(path, kept))
    assert again.status_code == 200 and "x-mlx-llama-noted" not in again.headers
    assert text_of(done.json()) == text_of(again.json())
    assert text_of(again.json()) == llm.generate(kept, max_tokens=4).text


def usages(done) -> list[dict | None]:
    """The usage so far in each event of a stream."""
    *data, end = [line[6:] for line in done.text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    return [json.loads(text)["usage"] for text in data]


def test_a_stream_counts_what_was_dropped(guide, talk):
    body = ask_all(PATHS[0], talk, truncation="auto", stream=True)
    done = guide.post(PATHS[0], **body, stream_options={"include_usage": True})
    dropped = usages(done)[-1]["prompt_tokens_details"]["dropped_messages"]
    assert f"{dropped} messages" in done.headers["x-mlx-llama-noted"]


def test_every_event_of_a_stream_can_have_the_usage_so_far(guide, talk):
    body = ask_all(PATHS[0], talk[:2], stream=True)
    options = {"include_usage": True, "continuous_usage_stats": True}
    seen = usages(guide.post(PATHS[0], **body, stream_options=options))
    counts = [usage["completion_tokens"] for usage in seen]
    assert counts == sorted(counts) and counts[-1] == 4
    assert len({usage["prompt_tokens"] for usage in seen}) == 1
    *seen, last = usages(guide.post(PATHS[0], **body, stream_options={"include_usage": True}))
    assert last and not any(seen)


def test_a_conversation_that_fits_keeps_all(guide, talk):
    for messages in (talk[:2], talk[:4]):
        body = ask_all(PATHS[0], messages)
        first = guide.post(PATHS[0], **body)
        second = guide.post(PATHS[0], **body, truncation="auto")
        assert "x-mlx-llama-noted" not in second.headers
        assert text_of(first.json()) == text_of(second.json())
        assert "dropped_messages" not in second.json()["usage"]["prompt_tokens_details"]


def test_a_last_question_that_does_not_fit_is_refused_with_its_length(guide, talk):
    for text in (LONG * 10, LONG * 2000):
        answer = {"role": "assistant", "content": "Yes."}
        messages = [*talk, answer, {"role": "user", "content": text}]
        done = guide.post(PATHS[0], **ask_all(PATHS[0], messages, truncation="auto"))
        error = done.json()["error"]
        assert done.status_code == 400 and error["code"] == "context_length_exceeded"
        assert "the context holds 512" in error["message"] and error["n_prompt_tokens"] > 512


def test_the_flag_is_the_default_and_the_field_wins(serve, talk):
    server = serve("--truncation", "auto")
    done = server.post(PATHS[0], **ask_all(PATHS[0], talk))
    assert done.headers["x-mlx-llama-noted"].startswith("truncation: ")
    done = server.post(PATHS[0], **ask_all(PATHS[0], talk, truncation="disabled"))
    assert done.status_code == 400
    done = server.post(PATHS[1], **ask_all(PATHS[1], talk))
    assert done.json()["truncation"] == "auto"
    done = server.post("/api/chat", **ask_all("/api/chat", talk, truncate=False))
    assert done.status_code == 400  # Ollama's name


def test_an_answer_that_goes_on_drops_no_more_than_it_must(guide, talk):
    """A last message of the assistant may fill the context that its question left."""
    begun = [*talk[:2], {"role": "assistant", "content": LONG * 3}]
    done = guide.post(PATHS[0], **ask_all(PATHS[0], begun, truncation="auto"))
    assert done.status_code == 200 and "x-mlx-llama-noted" not in done.headers
    assert done.json()["usage"]["prompt_tokens"] > 256
    begun = [*talk[:4], {"role": "assistant", "content": LONG * 4}]
    done = guide.post(PATHS[0], **ask_all(PATHS[0], begun, truncation="auto"))
    assert done.status_code == 200, done.text


ROUNDS = 12
PAGE = "The page says that llamas hum, walk in herds and cross mountains in snow. " * 2


def loop_of(path: str, first: int) -> list[dict]:
    """A question whose answer called a tool many times, as each API writes it, from a round on."""
    messages: list[dict] = [{"role": "user", "content": "What do llamas do?"}]
    for i in range(first, ROUNDS):
        arguments, name, result = {"page": i}, "read", f"{i}: {PAGE}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        called: list[dict] = {
            "/v1/responses": [
                {"type": "function_call", "call_id": f"c{i}", **function},
                {"type": "function_call_output", "call_id": f"c{i}", "output": result},
            ],
            "/v1/messages": [
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": f"c{i}", "name": name, "input": arguments}
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": f"c{i}", "content": result}],
                },
            ],
        }.get(
            path,
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": f"c{i}", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": f"c{i}", "content": result},
            ],
        )
        messages += called
    return messages


@pytest.mark.parametrize("before", (0, 2))
@pytest.mark.parametrize("path", PATHS)
def test_the_oldest_rounds_of_a_long_loop_of_calls_are_dropped(path, before, guide, talk):
    """Whole calls with their results, after the turns before the question."""
    earlier = [talk[0], *talk[1 : 1 + before]]
    body = ask_all(path, [*earlier, *loop_of(path, 0)])
    assert guide.post(path, **body).status_code == 400
    done = guide.post(path, **body | {"truncation": "auto"})
    assert done.status_code == 200, done.text
    dropped = int(done.headers["x-mlx-llama-noted"].split()[1]) - before
    assert dropped % 2 == 0 and 0 < dropped < 2 * ROUNDS
    kept = ask_all(path, [talk[0], *loop_of(path, dropped // 2)])
    again = guide.post(path, **kept)
    assert again.status_code == 200 and "x-mlx-llama-noted" not in again.headers
    assert text_of(done.json()) == text_of(again.json())
    assert count_prompt(done.json()) == count_prompt(again.json()) > 128


def count_prompt(answer: dict) -> int:
    """The number of tokens of the prompt, in any API."""
    usage = answer.get("usage", answer)
    names = "prompt_tokens input_tokens cache_read_input_tokens prompt_eval_count".split()
    return sum(usage.get(name, 0) for name in names)


def test_a_round_that_does_not_fit_alone_is_refused_with_its_length(guide, talk):
    messages = [*talk, *loop_of(PATHS[0], 0)]
    messages[-1] = messages[-1] | {"content": PAGE * 40}
    done = guide.post(PATHS[0], **ask_all(PATHS[0], messages, truncation="auto"))
    assert done.status_code == 400 and done.json()["error"]["n_prompt_tokens"] > 512
