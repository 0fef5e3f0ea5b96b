"""OpenAI's API, driven by its own client."""

from __future__ import annotations

import json
import shutil

import numpy as np
import openai
import pytest
import torch

from mlx_llama import load
from mlx_llama.core.files.checkpoint import GUIDE_PATH
from mlx_llama.server import items
from mlx_llama.server.faults import Refusal

from .conftest import events

QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def client(guide):
    return openai.OpenAI(base_url=f"{guide.url}/v1", api_key="none", max_retries=0)


def test_a_chat_answer_is_the_one_of_generate(client, llm):
    wanted = llm.generate(QUESTION, max_tokens=40)
    completion = client.chat.completions.create(model="guide", messages=QUESTION, max_tokens=40)
    assert completion.choices[0].message.content == wanted.text
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.prompt_tokens == wanted.prompt_tokens
    assert completion.usage.completion_tokens == len(wanted.tokens)
    assert (
        client.chat.completions.create(model="guide", messages=QUESTION).choices[0].finish_reason
        == "stop"
    )


def test_a_stream_is_the_same_text_in_pieces(client, llm):
    question = [{"role": "user", "content": "Which backends are there?"}]
    wanted = llm.generate(question, max_tokens=40, temperature=0.9, seed=7)
    stream = client.chat.completions.create(
        model="guide",
        messages=question,
        max_completion_tokens=40,
        temperature=0.9,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 30
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == [] and last.usage.total_tokens == wanted.prompt_tokens + 40


def test_parts_developer_messages_and_system_prompts(client, llm):
    wanted = llm.generate(
        [{"role": "system", "content": "Be kind."}, *QUESTION], max_tokens=12
    ).text
    parts = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}],
        },
        *QUESTION,
    ]
    assert (
        client.chat.completions.create(model="guide", messages=parts, max_tokens=12)
        .choices[0]
        .message.content
        == wanted
    )


def test_an_answer_comes_back_as_a_message(client):
    first = client.chat.completions.create(model="guide", messages=QUESTION, max_tokens=20)
    again = [
        *QUESTION,
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "Tell me a story."},
    ]
    completion = client.chat.completions.create(model="guide", messages=again, max_tokens=5)
    assert completion.usage.prompt_tokens_details.cached_tokens >= 20  # the first turn


def test_cached_tokens_of_several_choices_are_those_of_the_prompt(client, guide):
    """The second choice reuses what the first has just computed; nothing was cached before."""
    asked = [
        {
            "role": "user",
            "content": "Seventeen purple umbrellas were left at the station: whose are they?",
        }
    ]
    completion = guide.post("/v1/chat/completions", messages=asked, max_tokens=2, n=2).json()
    cached = completion["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == completion["timings"]["cache_n"] < completion["usage"]["prompt_tokens"] - 10
    again = client.chat.completions.create(model="guide", messages=asked, max_tokens=2, n=2).usage
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1


def test_several_choices_draw_with_the_seeds_after_the_first(client, llm):
    done = [llm.generate(QUESTION, max_tokens=15, temperature=1.2, seed=seed) for seed in (5, 6, 7)]
    wanted = [answer.text for answer in done]
    asked = {
        "model": "guide",
        "messages": QUESTION,
        "max_tokens": 15,
        "temperature": 1.2,
        "seed": 5,
        "n": 3,
    }
    completion = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in completion.choices] == wanted
    assert len(set(wanted)) > 1
    assert completion.usage.completion_tokens == sum(len(answer.tokens) for answer in done)
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == wanted


def test_stop_strings_and_biases(client, llm):
    completion = client.chat.completions.create(
        model="guide", messages=QUESTION, stop=["small", "person"]
    )
    assert completion.choices[0].message.content == "I am the mlx_llama guide: a "
    assert completion.choices[0].finish_reason == "stop"
    first = llm.generate(QUESTION, max_tokens=1).tokens[0]
    banned = client.chat.completions.create(
        model="guide", messages=QUESTION, max_tokens=5, logit_bias={str(int(first)): -100}
    )
    wanted = llm.generate(QUESTION, max_tokens=5, logit_bias={int(first): -100}).text
    assert (
        banned.choices[0].message.content
        == wanted
        != completion.choices[0].message.content[: len(wanted)]
    )


def judge_prompt(ids):
    """Natural logarithms of probabilities by transformers, float64 [T - 1, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(GUIDE_PATH, dtype=torch.float32)
    logits = model(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits, -1)[:-1].detach().numpy()


@pytest.mark.parametrize("count", [0, 1])
def test_log_probabilities_of_the_prompt(count, client, guide, llm):
    """As lm-eval asks for them, against transformers."""
    ids = llm.encode("Once upon a time there was a llama, who could not sleep. \n\nThe end?")
    wanted = judge_prompt(ids)
    asked = {"model": "guide", "max_tokens": count, "logprobs": 3, "echo": True, "temperature": 0}
    done = client.completions.create(prompt=ids, **asked).choices[0]
    rates = done.logprobs
    assert len(rates.tokens) == len(ids) + count and rates.token_logprobs[0] is None
    assert rates.top_logprobs[0] is None and "".join(rates.tokens) == done.text
    assert rates.token_logprobs[1 : len(ids)] == pytest.approx(
        [row[token] for row, token in zip(wanted, ids[1:])], abs=2e-3
    )
    for row, token, rate, top in zip(
        wanted, ids[1:], rates.token_logprobs[1:], rates.top_logprobs[1:]
    ):
        assert sorted(top.values()) == pytest.approx(np.sort(row)[-3:], abs=2e-3)
        assert (rate == max(top.values())) == (row.argmax() == token)  # lm-eval's is_greedy
    for at, text in zip(rates.text_offset, rates.tokens):
        assert done.text[at : at + len(text)] == text
    # other prompts in the same request, streamed, and after a prefix that is cached
    both = client.completions.create(prompt=[ids[:9], ids], **asked).choices
    assert both[1].logprobs == rates
    assert both[0].logprobs.token_logprobs[:9] == pytest.approx(rates.token_logprobs[:9], abs=1e-5)
    stream = client.completions.create(prompt=ids, **asked, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    streamed = sum((chunk.logprobs.token_logprobs for chunk in chunks if chunk.logprobs), [])
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert streamed == rates.token_logprobs
    # vLLM's field
    body = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": count}
    named = guide.post("/v1/completions", **body).json()["choices"][0]
    assert named["logprobs"] is None and named["prompt_logprobs"][0] is None
    for token, known, rate in zip(ids[1:], named["prompt_logprobs"][1:], rates.token_logprobs[1:]):
        assert known[str(token)]["logprob"] == rate and len(known) in (2, 3)
        assert {entry["rank"] for entry in known.values()} >= {1, 2}


def test_an_end_token_after_an_echo_has_an_entry(client, llm):
    """lm-eval drops the last entry, whatever token that is."""
    end = min(llm.engine.eos)
    done = client.completions.create(
        model="guide", prompt=[1, 320, 321], max_tokens=1, logprobs=0, echo=True,
        logit_bias={str(end): 100},
    ).choices[0]  # fmt: skip
    assert done.logprobs.tokens[-1] == "" and len(done.logprobs.tokens) == 4


CHARACTERS = "日本語🙂é"


@pytest.mark.parametrize("is_stream", [False, True])
def test_offsets_of_characters_that_are_several_tokens(is_stream, client):
    asked = {
        "model": "guide",
        "prompt": "hi",
        "max_tokens": 60,
        "logprobs": 4,
        "extra_body": {"regex": CHARACTERS},
    }
    if is_stream:
        parts = [
            chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)
        ]
        columns = [
            sum((getattr(part, name) for part in parts if part), [])
            for name in ("tokens", "text_offset", "top_logprobs")
        ]
    else:
        logprobs = client.completions.create(**asked).choices[0].logprobs
        columns = [logprobs.tokens, logprobs.text_offset, logprobs.top_logprobs]
    tokens, offsets, tops = columns
    data = [
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    ]
    assert b"".join(data).decode() == CHARACTERS and len(tokens) > len(CHARACTERS)
    # A token stands where the text had come to before it.
    wanted = [len(b"".join(data[:i]).decode(errors="ignore")) for i in range(len(data))]
    assert offsets == wanted and [len(top) for top in tops] == [4] * len(tokens)


def test_nulls_and_names_that_clients_send_back(client, guide):
    def ask(**body) -> dict:
        done = guide.post("/v1/chat/completions", **{"messages": QUESTION, "max_tokens": 3} | body)
        assert done.status_code == 200, done.text
        return done.json()

    schema = {"name": "a", "schema": {"enum": ["yes"]}, "description": None, "strict": None}
    ask(response_format={"type": "json_schema", "json_schema": schema, "schema": None})
    nameless = {"name": "f", "description": None, "parameters": None, "strict": None}
    wanted = ask(tools=[{"type": "function", "function": {"name": "f"}}])
    assert (
        ask(tools=[{"type": "function", "function": nameless}])["usage"]["prompt_tokens"]
        == wanted["usage"]["prompt_tokens"]
    )
    # As the client's own stream helper puts a call together.
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {**QUESTION[0], "name": "Ada"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I think.",
            "tool_calls": [call],
            "audio": None,
        },
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "x"},
    ]
    ask(messages=history)
    done = guide.post("/v1/chat/completions", messages=[{**QUESTION[0], "reasoning_content": "x"}])
    assert done.status_code == 400 and done.json()["errors"][0]["field"] == "messages[0]"


def test_completions(client, llm):
    wanted = [llm.generate(prompt, max_tokens=9).text for prompt in ("Once upon", "The river")]
    completion = client.completions.create(
        model="guide", prompt=["Once upon", "The river"], max_tokens=9
    )
    assert [choice.text for choice in completion.choices] == wanted
    assert completion.usage.completion_tokens == 18
    ids = llm.encode("Once upon")
    assert (
        client.completions.create(model="guide", prompt=ids, max_tokens=9).choices[0].text
        == wanted[0]
    )
    echoed = client.completions.create(
        model="guide", prompt=["Once upon", "The river"], n=2, max_tokens=9, echo=True
    ).choices
    assert [choice.text for choice in echoed] == ["Once upon" + wanted[0]] * 2 + [
        "The river" + wanted[1]
    ] * 2
    stream = client.completions.create(model="guide", prompt="Once upon", max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted[0]


def test_models_and_names(guide, client):
    assert [model.id for model in client.models.list()] == ["guide"]
    assert client.models.retrieve("guide").owned_by == "mlx_llama"
    # without a name
    assert (
        guide.post("/v1/chat/completions", messages=QUESTION, max_tokens=1).json()["model"]
        == "guide"
    )
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=QUESTION)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_prompt_that_does_not_fit_is_refused_with_both_counts(client, llm):
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="guide", messages=long)
    count = len(llm.encode(long))
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert str(count) in caught.value.message and "512" in caught.value.message
    assert caught.value.type == "exceed_context_size_error"  # llama-server's


def test_llama_server_s_fields_of_a_conversation(guide, llm):
    ask = {"messages": QUESTION, "max_tokens": 3}
    rendered = llm.tokenizer.decode(llm.encode(QUESTION), skip_special=False)
    path = "/v1/chat/completions"
    whole = guide.post(path, **ask, verbose=True).json()
    assert whole["__verbose"] == {"prompt": rendered}
    assert "__verbose" not in guide.post(path, **ask).json()
    counted = guide.post(f"{path}/input_tokens", **ask).json()
    assert counted == {"input_tokens": whole["usage"]["prompt_tokens"]}
    text = guide.post(path, **ask, stream=True, return_progress=True, verbose=True).text
    chunks = [json.loads(data) for _, data in events(text) if data != "[DONE]"]
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[0]["processed"] == progress[0]["cache"]
    assert progress[-1]["processed"] == progress[-1]["total"] == counted["input_tokens"]
    assert chunks[-1]["__verbose"] == {"prompt": rendered}


def test_a_continuation_cannot_begin_a_turn(endless):
    begun = [*QUESTION, {"role": "assistant", "content": "I am"}]
    ask = {"messages": begun, "max_tokens": 1, "continue_final_message": True}
    done = endless.post("/v1/chat/completions", **ask, add_generation_prompt=False)
    assert done.status_code == 200 and "x-mlx-llama-noted" not in done.headers
    done = endless.post("/v1/chat/completions", **ask, add_generation_prompt=True)
    assert done.status_code == 400
    assert [fault["field"] for fault in done.json()["errors"]] == ["continue_final_message"]


def test_completions_without_a_version_have_both_forms(guide):
    ask = {"prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    wanted = guide.post("/completion", **ask).json()
    completion = guide.post("/completions", **ask).json()
    assert completion["choices"][0]["text"] == wanted["content"]
    for name in ("content", "stop", "tokens_predicted", "tokens_evaluated"):
        assert completion[name] == wanted[name]
    assert "content" not in guide.post("/v1/completions", **ask).json()
    text = guide.post("/completions", **ask, stream=True).text
    chunks = [json.loads(data) for _, data in events(text) if data != "[DONE]"]
    assert "".join(chunk["content"] for chunk in chunks) == wanted["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_responses(client, llm):
    wanted = llm.generate(QUESTION).text
    response = client.responses.create(model="guide", input="Who are you?")
    assert response.output_text == wanted and response.status == "completed"
    with client.responses.stream(model="guide", input=QUESTION, max_output_tokens=10) as stream:
        streamed = list(stream)
    kinds, last = [event.type for event in streamed], streamed[-1].response
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert last.output_text == llm.generate(QUESTION, max_tokens=10).text
    assert last.incomplete_details.reason == "max_output_tokens"
    assert last.usage.output_tokens == 10
    turns = [
        *QUESTION,
        *[item.model_dump() for item in response.output],
        {"role": "user", "content": "A story?"},
    ]
    wanted = llm.generate(
        [
            {"role": "system", "content": "Be kind."},
            *QUESTION,
            {"role": "assistant", "content": wanted},
            {"role": "user", "content": "A story?"},
        ],
        max_tokens=9,
    ).text
    assert (
        client.responses.create(
            model="guide", input=turns, instructions="Be kind.", max_output_tokens=9
        ).output_text
        == wanted
    )


def test_defaults_of_responses_are_accepted_and_repeated(client, guide):
    response = client.responses.create(
        model="guide",
        input="hi",
        max_output_tokens=2,
        background=False,
        reasoning={},
        text={"verbosity": "medium"},
    )
    assert response.text.to_dict() == {"format": {"type": "text"}, "verbosity": "medium"}
    form = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes"]}}
    response = client.responses.create(model="guide", input="hi", text={"format": form})
    assert response.output_text == '"yes"'
    assert response.text.format.to_dict() == {**form, "description": None, "strict": None}
    for name, value, field in (
        ("text", {"verbosity": "low"}, "text.verbosity"),
        ("reasoning", {"effort": "high"}, "reasoning"),
    ):
        done = guide.post("/v1/responses", input="hi", **{name: value})
        assert done.status_code == 400
        assert done.json()["errors"][0]["field"] == field


@pytest.mark.parametrize(
    "path, field, value",
    [
        ("/v1/chat/completions", "audio", {"voice": "x"}),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
        ("/v1/chat/completions", "store", True),
        ("/v1/chat/completions", "service_tier", "flex"),
        ("/v1/chat/completions", "functions", 5),
        ("/v1/completions", "suffix", "x"),
        ("/v1/completions", "best_of", 2),
        ("/v1/responses", "background", True),
        ("/v1/responses", "truncation", "middle"),
    ],
)
def test_a_field_that_is_not_done_is_refused_by_name(path, field, value, guide):
    body = (
        {"messages": QUESTION}
        if "chat" in path
        else {"input": "hi"}
        if "responses" in path
        else {"prompt": "hi"}
    )
    done = guide.post(path, **body, **{field: value})
    assert done.status_code == 400 and done.json()["error"]["param"].startswith(field), done.text
    assert field in done.json()["error"]["message"]


def test_responses_go_on_from_kept_ones(client, guide, llm):
    first = client.responses.create(model="guide", input="Who are you?", temperature=0)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model="guide", input="Are you fast?", previous_response_id=first.id, temperature=0
    )
    talk = [
        *QUESTION,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Are you fast?"},
    ]
    assert second.output_text == llm.generate(talk, temperature=0).text
    assert second.previous_response_id == first.id
    reference = {"type": "item_reference", "id": first.output[0].id}
    talked = client.responses.create(
        model="guide",
        temperature=0,
        store=False,
        input=[*QUESTION, reference, {"role": "user", "content": "Are you fast?"}],
    )
    assert talked.output_text == second.output_text
    assert "deleted" in guide.http.delete(f"/v1/responses/{first.id}").text
    for made in (
        lambda: client.responses.retrieve(talked.id),
        lambda: client.responses.retrieve(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            made()
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        client.responses.create(model="guide", input="x", previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError, match="is not kept here"):
        client.responses.create(model="guide", input=[{"type": "item_reference", "id": "msg_1"}])


def test_responses_are_kept_within_limits(monkeypatch):
    kept, now = items.KeptResponses(), 0.0
    monkeypatch.setattr(items.time, "monotonic", lambda: now)
    for number in range(items.MOST_RESPONSES + 1):
        kept.put({"id": f"r{number}", "output": []}, [{"role": "user", "content": "x"}])
    assert kept.get("r1", "previous_response_id").items
    with pytest.raises(Refusal, match="is not kept here"):
        kept.get("r0", "previous_response_id")
    kept.put({"id": "long", "output": []}, [{"content": "x" * (items.MOST_CHARACTERS - 100)}])
    with pytest.raises(Refusal):
        kept.get("r1", "previous_response_id")
    assert kept.get("long", "previous_response_id").items
    now = items.SECONDS + 1
    with pytest.raises(Refusal):
        kept.get("long", "previous_response_id")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/api/chat", "/v1/jobs"])
def test_answers_have_no_limit_but_the_context(path, lenient):
    field = "input" if "responses" in path else "messages"
    done = lenient.post(path, **{field: QUESTION}, ignore_eos=True, stream=False).json()
    if "job_id" in done:
        done = json.loads(lenient.http.get(done["jsonl_url"]).text.splitlines()[-1])
    usage = done.get("usage", done)
    written = ("output_tokens", "eval_count", "tokens_out")
    assert 400 < next(usage[name] for name in written if name in usage) < 512


def test_a_model_without_a_template_has_chatml(toy, tmp_path, inside):
    folder = shutil.copytree(toy, tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config.pop("chat_template", None) or (folder / "chat_template.jinja").exists()
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    server = inside(lambda: load(folder, backend="cpu")).ready()
    done = server.post("/v1/chat/completions", messages=QUESTION, max_tokens=2)
    assert done.headers["x-mlx-llama-noted"] == "chat_template: chatml"
    shown = server.post("/apply-template", messages=QUESTION).json()["prompt"]
    turn = f"<|im_start|>user\n{QUESTION[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert shown.endswith(turn)


def test_aliases_and_a_named_tool(roomy, inside):
    server = inside(lambda: load(roomy, backend="cpu"), alias="a,b").ready()
    listed = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["a", "b"]
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in "fg"
    ]
    named = {"type": "function", "function": {"name": "g"}}
    for model, answered in (("b", "b"), ("B.gguf", "a"), ("other", "a"), (None, "a")):
        asked = {"messages": QUESTION, "tools": tools, "tool_choice": named, "model": model}
        done = server.post("/v1/chat/completions", **asked, max_tokens=200)
        assert done.json()["model"] == answered
        assert ("model" in done.headers.get("x-mlx-llama-noted", "")) == (model == "other")
        [call] = done.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "g"
