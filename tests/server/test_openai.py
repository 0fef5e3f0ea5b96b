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

from .conftest import QUESTION, join

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def complete(guide):
    """complete(**asked): a completion of text by the client."""
    return lambda **asked: guide.openai.completions.create(model="guide", **asked)


def say(text: str, role: str = "user") -> dict:
    return {"role": role, "content": text}


def test_a_chat_answer_is_the_one_of_generate(guide, llm):
    wanted = llm.generate(QUESTION, max_tokens=40)
    completion = guide.create(model="guide", max_tokens=40)
    [choice], usage = completion.choices, completion.usage
    assert (choice.message.content, choice.finish_reason) == (wanted.text, "length")
    assert (usage.prompt_tokens, usage.completion_tokens) == (wanted.prompt_tokens, 40)
    assert guide.chat().finish_reason == "stop"


def test_a_stream_is_the_same_text_in_pieces(guide, llm):
    asked = {"messages": [say("Which backends are there?")], "temperature": 0.9, "seed": 7}
    wanted = llm.generate(asked["messages"], max_tokens=40, temperature=0.9, seed=7)
    options = {"include_usage": True}
    *chunks, last = guide.create(
        **asked, max_completion_tokens=40, stream=True, stream_options=options
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert join(choices) == wanted.text
    assert choices[0].delta.role == "assistant" and len(chunks) > 30
    assert [choice.finish_reason for choice in choices] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == [] and last.usage.total_tokens == wanted.prompt_tokens + 40


def test_parts_developer_messages_and_system_prompts(guide, llm):
    wanted = llm.generate([say("Be kind.", "system"), *QUESTION], max_tokens=12).text
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    choice = guide.chat(messages=[say(parts, "developer"), *QUESTION], max_tokens=12)
    assert choice.message.content == wanted


def test_cached_tokens_of_several_choices_are_those_of_the_prompt(guide):
    """The second choice reuses what the first has just computed; nothing was cached before."""
    messages = [say("Seventeen purple umbrellas were left at the station: whose are they?")]
    completion = guide.ask(CHAT, messages=messages, max_tokens=2, n=2)
    cached = completion["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == completion["timings"]["cache_n"] < completion["usage"]["prompt_tokens"] - 10
    again = guide.create(messages=messages, max_tokens=2, n=2).usage
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1


def test_several_choices_draw_with_the_seeds_after_the_first(guide, llm):
    asked = {"max_tokens": 9, "temperature": 1.2}
    wanted = [llm.generate(QUESTION, **asked, seed=seed).text for seed in (5, 6, 7)]
    completion = guide.create(**asked, seed=5, n=3)
    assert [choice.message.content for choice in completion.choices] == wanted
    assert len(set(wanted)) > 1 and completion.usage.completion_tokens == 27
    texts = ["", "", ""]
    for choice in guide.chat(**asked, seed=5, n=3, stream=True):
        texts[choice.index] += choice.delta.content or ""
    assert texts == wanted


def judge_prompt(ids):
    """Natural logarithms of probabilities by transformers, float64 [T - 1, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(GUIDE_PATH, dtype=torch.float32)
    logits = model(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits, -1)[:-1].detach().numpy()


@pytest.mark.parametrize("count", [0, 1])
def test_log_probabilities_of_the_prompt(count, guide, complete, llm):
    """As lm-eval asks for them, against transformers."""
    ids = llm.encode("Once upon a time there was a llama, who could not sleep. \n\nThe end?")
    wanted = judge_prompt(ids)
    asked = {"max_tokens": count, "logprobs": 3, "echo": True, "temperature": 0}
    done = complete(prompt=ids, **asked).choices[0]
    rates = done.logprobs
    assert len(rates.tokens) == len(ids) + count and rates.token_logprobs[0] is None
    assert rates.top_logprobs[0] is None and "".join(rates.tokens) == done.text
    assert rates.token_logprobs[1 : len(ids)] == pytest.approx(
        [row[token] for row, token in zip(wanted, ids[1:])], abs=2e-3
    )
    entries = zip(wanted, ids[1:], rates.token_logprobs[1:], rates.top_logprobs[1:])
    for row, token, rate, top in entries:
        assert sorted(top.values()) == pytest.approx(np.sort(row)[-3:], abs=2e-3)
        assert (rate == max(top.values())) == (row.argmax() == token)  # lm-eval's is_greedy
    for at, text in zip(rates.text_offset, rates.tokens):
        assert done.text[at : at + len(text)] == text
    # other prompts in the same request, streamed, and after a prefix that is cached
    both = complete(prompt=[ids[:9], ids], **asked).choices
    assert both[1].logprobs == rates
    assert both[0].logprobs.token_logprobs[:9] == pytest.approx(rates.token_logprobs[:9], abs=1e-5)
    chunks = [chunk.choices[0] for chunk in complete(prompt=ids, **asked, stream=True)]
    streamed = sum((chunk.logprobs.token_logprobs for chunk in chunks if chunk.logprobs), [])
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert streamed == rates.token_logprobs
    # vLLM's field
    body = {"prompt": ids, "prompt_logprobs": 2, "max_tokens": count}
    named = guide.ask("/v1/completions", **body)["choices"][0]
    assert named["logprobs"] is None and named["prompt_logprobs"][0] is None
    for token, known, rate in zip(ids[1:], named["prompt_logprobs"][1:], rates.token_logprobs[1:]):
        assert known[str(token)]["logprob"] == rate and len(known) in (2, 3)
        assert {entry["rank"] for entry in known.values()} >= {1, 2}


def test_an_end_token_after_an_echo_has_an_entry(complete, llm):
    """lm-eval drops the last entry, whatever token that is."""
    asked = {"prompt": [1, 320, 321], "max_tokens": 1, "logprobs": 0, "echo": True}
    done = complete(**asked, logit_bias={str(min(llm.engine.eos)): 100}).choices[0]
    assert done.logprobs.tokens[-1] == "" and len(done.logprobs.tokens) == 4


@pytest.mark.parametrize("is_stream", [False, True])
def test_offsets_of_characters_that_are_several_tokens(is_stream, complete):
    characters = "日本語🙂é"
    asked = {"prompt": "hi", "max_tokens": 60, "logprobs": 4, "extra_body": {"regex": characters}}
    done = complete(**asked, stream=is_stream)
    parts = [answer.choices[0].logprobs for answer in (done if is_stream else [done])]
    tokens, offsets, tops = (
        sum((getattr(part, name) for part in parts if part), [])
        for name in ("tokens", "text_offset", "top_logprobs")
    )
    data = [
        bytes.fromhex(token[6:].replace("\\x", ""))
        if token.startswith("bytes:")
        else token.encode()
        for token in tokens
    ]
    assert b"".join(data).decode() == characters and len(tokens) > len(characters)
    # A token stands where the text had come to before it.
    wanted = [len(b"".join(data[:i]).decode(errors="ignore")) for i in range(len(data))]
    assert offsets == wanted and [len(top) for top in tops] == [4] * len(tokens)


def test_nulls_and_names_that_clients_send_back(guide):
    def ask(**body) -> int:
        body = {"messages": QUESTION, "max_tokens": 3} | body
        return guide.ask(CHAT, **body)["usage"]["prompt_tokens"]

    schema = {"name": "a", "schema": {"enum": ["yes"]}, "description": None, "strict": None}
    ask(response_format={"type": "json_schema", "json_schema": schema, "schema": None})
    nameless = {"name": "f", "description": None, "parameters": None, "strict": None}
    counts = {
        ask(tools=[{"type": "function", "function": function}])
        for function in ({"name": "f"}, nameless)
    }
    assert len(counts) == 1
    # As the client's own stream helper puts a call together.
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"content": None, "reasoning_content": "I think.", "tool_calls": [call], "audio": None}
    result = {"role": "tool", "tool_call_id": "a", "name": "f", "content": "x"}
    ask(messages=[{**QUESTION[0], "name": "Ada"}, {"role": "assistant", **answer}, result])
    messages = [{**QUESTION[0], "reasoning_content": "x"}]
    assert guide.refuse(CHAT, messages=messages) == ["messages[0]"]


def test_completions(complete, llm):
    prompts = ["Once upon", "The river"]
    first, second = (llm.generate(prompt, max_tokens=9).text for prompt in prompts)
    completion = complete(prompt=prompts, max_tokens=9)
    assert [choice.text for choice in completion.choices] == [first, second]
    assert completion.usage.completion_tokens == 18
    assert complete(prompt=llm.encode("Once upon"), max_tokens=9).choices[0].text == first
    echoed = complete(prompt=prompts, n=2, max_tokens=9, echo=True).choices
    wanted = [text for text in ("Once upon" + first, "The river" + second) for _ in range(2)]
    assert [choice.text for choice in echoed] == wanted
    stream = complete(prompt="Once upon", max_tokens=9, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == first


def test_models_and_names(guide):
    assert [model.id for model in guide.openai.models.list()] == ["guide"]
    assert guide.openai.models.retrieve("guide").owned_by == "mlx_llama"
    assert guide.ask(CHAT, messages=QUESTION, max_tokens=1)["model"] == "guide"
    with pytest.raises(openai.NotFoundError) as caught:
        guide.create(model="gpt-5")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_prompt_that_does_not_fit_is_refused_with_both_counts(guide, llm):
    long = [say("word " * 2000)]
    with pytest.raises(openai.BadRequestError) as caught:
        guide.create(messages=long)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert str(len(llm.encode(long))) in caught.value.message and "512" in caught.value.message
    assert caught.value.type == "exceed_context_size_error"  # llama-server's


def test_llama_server_s_fields_of_a_conversation(guide, llm):
    asked = {"messages": QUESTION, "max_tokens": 3}
    rendered = llm.tokenizer.decode(llm.encode(QUESTION), skip_special=False)
    whole = guide.ask(CHAT, **asked, verbose=True)
    assert whole["__verbose"] == {"prompt": rendered}
    assert "__verbose" not in guide.ask(CHAT, **asked)
    counted = guide.ask(f"{CHAT}/input_tokens", **asked)
    assert counted == {"input_tokens": whole["usage"]["prompt_tokens"]}
    chunks = guide.stream(CHAT, **asked, return_progress=True, verbose=True)
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[0]["processed"] == progress[0]["cache"]
    assert progress[-1]["processed"] == progress[-1]["total"] == counted["input_tokens"]
    assert chunks[-1]["__verbose"] == {"prompt": rendered}


def test_a_continuation_cannot_begin_a_turn(endless):
    begun = [*QUESTION, say("I am", "assistant")]
    asked = {"messages": begun, "max_tokens": 1, "continue_final_message": True}
    done = endless.post(CHAT, **asked, add_generation_prompt=False)
    assert done.status_code == 200 and "x-mlx-llama-noted" not in done.headers
    refused = endless.refuse(CHAT, **asked, add_generation_prompt=True)
    assert refused == ["continue_final_message"]


def test_completions_without_a_version_have_both_forms(guide):
    asked = {"prompt": "Once upon", "max_tokens": 6, "temperature": 0}
    wanted, completion = guide.ask("/completion", **asked), guide.ask("/completions", **asked)
    assert completion["choices"][0]["text"] == wanted["content"]
    for name in ("content", "stop", "tokens_predicted", "tokens_evaluated"):
        assert completion[name] == wanted[name]
    assert "content" not in guide.ask("/v1/completions", **asked)
    chunks = guide.stream("/completions", **asked)
    assert "".join(chunk["content"] for chunk in chunks) == wanted["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_limits_of_the_input_of_responses(guide):
    say = {"role": "user", "content": "a"}
    for given, fault in (("", "at least 1"), ([], "at least 1 item"), ([say] * 2049, "2048 items")):
        assert fault in guide.post("/v1/responses", input=given).json()["error"]["message"]


def test_responses(guide, llm):
    wanted = llm.generate(QUESTION).text
    response = guide.respond(input="Who are you?")
    assert response.output_text == wanted and response.status == "completed"
    streamed = guide.respond(max_output_tokens=10, stream=True)
    kinds, last = (
        [event.type.removeprefix("response.") for event in streamed],
        streamed[-1].response,
    )
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == [
        *("output_text.done", "content_part.done", "output_item.done", "incomplete")
    ]
    assert last.output_text == llm.generate(QUESTION, max_tokens=10).text
    assert last.incomplete_details.reason == "max_output_tokens"
    assert last.usage.output_tokens == 10
    turns = [*QUESTION, *[item.model_dump() for item in response.output], say("A story?")]
    talk = [say("Be kind.", "system"), *QUESTION, say(wanted, "assistant"), say("A story?")]
    done = guide.respond(input=turns, instructions="Be kind.", max_output_tokens=9)
    assert done.output_text == llm.generate(talk, max_tokens=9).text


def test_defaults_of_responses_are_accepted_and_repeated(guide):
    defaults = {"background": False, "reasoning": {}, "text": {"verbosity": "medium"}}
    response = guide.respond(max_output_tokens=2, **defaults)
    assert response.text.to_dict() == {"format": {"type": "text"}, "verbosity": "medium"}
    form = {"type": "json_schema", "name": "a", "schema": {"enum": ["yes"]}}
    response = guide.respond(text={"format": form})
    assert response.output_text == '"yes"'
    assert response.text.format.to_dict() == {**form, "description": None, "strict": None}
    refused = guide.refuse("/v1/responses", input="hi", text={"verbosity": "low"})
    assert refused == ["text.verbosity"]
    assert guide.refuse("/v1/responses", input="hi", reasoning={"effort": "high"}) == ["reasoning"]


def test_responses_go_on_from_kept_ones(guide, llm):
    responses, question = guide.openai.responses, say("Are you fast?")
    first = guide.respond(temperature=0)
    assert responses.retrieve(first.id).output_text == first.output_text
    second = guide.respond(input="Are you fast?", previous_response_id=first.id, temperature=0)
    talk = [*QUESTION, say(first.output_text, "assistant"), question]
    assert second.output_text == llm.generate(talk, temperature=0).text
    assert second.previous_response_id == first.id
    reference = {"type": "item_reference", "id": first.output[0].id}
    talked = guide.respond(input=[*QUESTION, reference, question], temperature=0, store=False)
    assert talked.output_text == second.output_text
    assert "deleted" in guide.http.delete(f"/v1/responses/{first.id}").text
    for gone in (talked.id, first.id):
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(gone)
    missing = {"type": "item_reference", "id": "msg_1"}
    for asked in ({"input": "x", "previous_response_id": first.id}, {"input": [missing]}):
        with pytest.raises(openai.BadRequestError, match="is not kept here"):
            guide.respond(**asked)


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


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/v1/jobs"])
def test_answers_have_no_limit_but_the_context(path, lenient):
    field = "input" if "responses" in path else "messages"
    done = lenient.post(path, **{field: QUESTION}, ignore_eos=True, stream=False).json()
    if "job_id" in done:
        done = json.loads(lenient.http.get(done["jsonl_url"]).text.splitlines()[-1])
    usage = done.get("usage", done)
    written = ("completion_tokens", "output_tokens", "eval_count", "tokens_out")
    assert 400 < next(usage[name] for name in written if name in usage) < 512


def test_a_model_without_a_template_has_chatml(roomy, tmp_path, inside):
    folder = shutil.copytree(roomy, tmp_path / "m")
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
    tool = {"type": "function", "function": {"name": "f"}}
    for choice in ("auto", "required"):
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert server.ask(CHAT, **asked, tools=[tool], tool_choice=choice)


def test_aliases(roomy, inside):
    server = inside(lambda: load(roomy, backend="cpu"), alias="a,b").ready()
    listed = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["a", "b"]
    for model, answered in (("b", "b"), ("B.gguf", "a"), ("other", "a"), (None, "a")):
        done = server.post(CHAT, messages=QUESTION, model=model, max_tokens=2)
        assert done.json()["model"] == answered
        assert ("model" in done.headers.get("x-mlx-llama-noted", "")) == (model == "other")


def test_an_echo_of_exactly_the_context_is_served(complete, guide, llm):
    """With max_tokens 0 there is no answer that needs room, as for lm-eval's rolling windows."""
    ids = [1 + i % 300 for i in range(llm.engine.context)]
    done = complete(prompt=ids, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert done.finish_reason == "length" and len(done.logprobs.tokens) == len(ids)
    for more in ({"prompt": ids, "max_tokens": 1}, {"prompt": [*ids, 5], "max_tokens": 0}):
        assert guide.refuse("/v1/completions", **more) == ["prompt"]
