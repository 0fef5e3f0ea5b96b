"""llama-server's own routes. Names and shapes are those of llama.cpp, tools/server/README.md."""

from __future__ import annotations

import json

import pytest

from .conftest import events


def test_completion(guide, llm):
    wanted = llm.generate("Once upon", max_tokens=8)
    found = guide.post("/completion", prompt="Once upon", n_predict=8, return_tokens=True).json()
    assert found["content"] == wanted.text and found["tokens"] == wanted.tokens and found["stop"] is True
    assert found["stop_type"] == "limit" and found["tokens_predicted"] == 8 and found["tokens_evaluated"] == 3
    assert set(found["timings"]) >= {"prompt_n", "prompt_ms", "predicted_n", "predicted_per_second", "cache_n"}
    assert found["generation_settings"]["n_predict"] == 8
    stopped = guide.post("/completion", prompt="Once upon", stop=["time"]).json()
    assert (stopped["stop_type"], stopped["stopping_word"], stopped["content"]) == ("word", "time", " a ")


def test_completion_streams_and_ends_with_the_whole_receipt(guide, llm):
    text = guide.post("/completion", prompt="Once upon", n_predict=6, stream=True, timings_per_token=True).text
    *pieces, last = [json.loads(data) for _, data in events(text)]
    assert "".join(piece["content"] for piece in pieces) == llm.generate("Once upon", max_tokens=6).text
    assert [piece["stop"] for piece in pieces] == [False] * 6 and last["stop"] is True and last["tokens_predicted"] == 6
    assert pieces[-1]["tokens_predicted"] == 6 and "timings" in pieces[0]


def test_prompts_of_ids_mixed_and_several(guide, llm):
    ids = llm.encode("Once upon")
    wanted = llm.generate("Once upon", max_tokens=5).text
    assert guide.post("/completion", prompt=ids, n_predict=5).json()["content"] == wanted
    assert guide.post("/completion", prompt=[*ids[:-1], ids[-1]], n_predict=5).json()["content"] == wanted
    mixed = guide.post("/completion", prompt=["Once upon", *llm.tokenizer.encode(" a")], n_predict=5).json()
    assert mixed["tokens_evaluated"] == 3 + len(llm.tokenizer.encode(" a"))
    several = guide.post("/completion", prompt=["Once upon", ids], n_predict=5).json()
    assert [one["content"] for one in several] == [wanted, wanted] and [one["index"] for one in several] == [0, 1]


def test_response_fields_seeds_and_endless(guide):
    found = guide.post(
        "/completion", prompt="hi", n_predict=3, response_fields=["content", "timings/predicted_n", "nope"]
    ).json()
    assert set(found) == {"content", "predicted_n"} and found["predicted_n"] == 3
    drawn = [
        guide.post("/completion", prompt="The", n_predict=12, temperature=2, seed=-1).json()["content"] for _ in range(3)
    ]
    assert len(set(drawn)) > 1
    full = guide.post("/completion", prompt="The", n_predict=-1, ignore_eos=True).json()
    assert full["stop_type"] == "limit" and full["tokens_predicted"] + full["tokens_evaluated"] >= 512


def test_biases_as_pairs(guide, llm):
    first = int(llm.generate("Once upon", max_tokens=1).tokens[0])
    wanted = llm.generate("Once upon", max_tokens=4, logit_bias={first: -1e6}).text
    for biases in ([[first, False]], {str(first): -1e6}):
        assert guide.post("/completion", prompt="Once upon", n_predict=4, logit_bias=biases).json()["content"] == wanted


@pytest.mark.parametrize("field, value", [
    ("mirostat", 2), ("typical_p", 0.5), ("xtc_probability", 0.5), ("dry_multiplier", 0.8), ("dynatemp_range", 1.0),
    ("id_slot", 3), ("n_keep", 5), ("lora", []), ("samplers", ["top_k"]), ("cache_prompt", False), ("min_keep", 2),
])
def test_a_field_that_makes_no_sense_here_is_refused_by_name(field, value, guide):
    done = guide.post("/completion", prompt="hi", **{field: value})
    assert done.status_code == 400 and [fault["field"] for fault in done.json()["errors"]] == [field], done.text


def test_tokenize_and_back(guide, llm):
    ids = guide.post("/tokenize", content="Hello ü").json()["tokens"]
    assert ids == llm.tokenizer.encode("Hello ü", parse_special=True)
    assert guide.post("/tokenize", content="Hello", add_special=True).json()["tokens"][0] == llm.tokenizer.bos_id
    pieces = guide.post("/tokenize", content="ü", with_pieces=True).json()["tokens"]
    assert bytes(sum((piece["piece"] for piece in pieces if isinstance(piece["piece"], list)), [])) == "ü".encode()
    assert guide.post("/detokenize", tokens=ids).json()["content"] == "Hello ü"
    done = guide.post("/detokenize", tokens=[10**6])
    assert done.status_code == 400 and done.json()["errors"][0]["field"] == "tokens"


def test_template_props_and_slots(guide, llm):
    messages = [{"role": "user", "content": "hi"}]
    assert guide.post("/apply-template", messages=messages).json()["prompt"] == llm.template.render(messages)
    props = guide.http.get("/props").json()
    assert props["chat_template"] == llm.template.source and props["total_slots"] == 32
    assert props["default_generation_settings"]["n_ctx"] == 512
    slots = guide.http.get("/slots").json()
    assert len(slots) == 32 and {slot["id"] for slot in slots} == set(range(32))


def test_a_cache_is_saved_and_restored(serve, tmp_path):
    folder = tmp_path / "slots"
    folder.mkdir()
    prompt = "Once upon a time there was a llama who lived on a hill."
    server = serve("--parallel", "1", "--slot-save-path", folder)
    wanted = server.post("/completion", prompt=prompt, n_predict=5).json()
    saved = server.post("/slots/0?action=save", filename="story.bin").json()
    assert (folder / "story.bin").stat().st_size == saved["n_written"]
    again = serve("--parallel", "1", "--slot-save-path", folder)
    assert again.post("/slots/0?action=restore", filename="story.bin").json()["n_restored"] >= wanted["tokens_evaluated"]
    found = again.post("/completion", prompt=prompt, n_predict=5).json()
    assert found["content"] == wanted["content"] and found["timings"]["cache_n"] == wanted["tokens_evaluated"] - 1
    for path, body in (
        ("/slots/0?action=erase", {"filename": "story.bin"}),
        ("/slots/1?action=save", {"filename": "a"}),
        ("/slots/0?action=restore", {"filename": "../story.bin"}),
        ("/slots/0?action=restore", {"filename": "none"}),
        ("/slots/0?action=save", {"filename": ".hidden"}),
        ("/slots/0", {}),
    ):
        assert again.post(path, **body).status_code == 400, path
    assert server.post("/completion", prompt="x", n_predict=1).status_code == 200


def test_slots_of_a_server_without_a_folder(guide):
    assert guide.post("/slots/0?action=save", filename="a").status_code == 404
