"""llama-server's own routes. Names and shapes are those of llama.cpp, tools/server/README.md."""

from __future__ import annotations

import itertools
import json

import pytest

from mlx_llama import load

from .conftest import events


def test_completion(guide, llm):
    wanted = llm.generate("Once upon", max_tokens=8)
    done = guide.post("/completion", prompt="Once upon", n_predict=8, return_tokens=True).json()
    assert done["content"] == wanted.text and done["tokens"] == wanted.tokens
    assert done["stop"] is True
    assert done["stop_type"] == "limit" and done["tokens_predicted"] == 8
    assert done["tokens_evaluated"] == 3
    assert set(done["timings"]) >= {
        "prompt_n",
        "prompt_ms",
        "predicted_n",
        "predicted_per_second",
        "cache_n",
    }
    assert done["generation_settings"]["n_predict"] == 8
    stopped = guide.post("/completion", prompt="Once upon", stop=["time"]).json()
    assert stopped["stop_type"] == "word" and stopped["stopping_word"] == "time"
    assert stopped["content"] == " a "


def test_completion_streams_and_ends_with_the_whole_receipt(guide, llm):
    text = guide.post(
        "/completion", prompt="Once upon", n_predict=6, stream=True, timings_per_token=True
    ).text
    *pieces, last = [json.loads(data) for _, data in events(text)]
    assert (
        "".join(piece["content"] for piece in pieces)
        == llm.generate("Once upon", max_tokens=6).text
    )
    assert [piece["stop"] for piece in pieces] == [False] * 6 and last["stop"] is True
    assert last["tokens_predicted"] == 6
    assert pieces[-1]["tokens_predicted"] == 6 and "timings" in pieces[0]


def test_prompts_of_ids_mixed_and_several(guide, llm):
    ids = llm.encode("Once upon")
    wanted = llm.generate("Once upon", max_tokens=5).text
    assert guide.post("/completion", prompt=ids, n_predict=5).json()["content"] == wanted
    assert (
        guide.post("/completion", prompt=[*ids[:-1], ids[-1]], n_predict=5).json()["content"]
        == wanted
    )
    mixed = guide.post(
        "/completion", prompt=["Once upon", *llm.tokenizer.encode(" a"), " a"], n_predict=5
    ).json()
    assert mixed["tokens_evaluated"] == 3 + 2 * len(llm.tokenizer.encode(" a"))
    several = guide.post("/completion", prompt=["Once upon", ids], n_predict=5).json()
    assert [answer["content"] for answer in several] == [wanted, wanted]
    assert [answer["index"] for answer in several] == [0, 1]


def test_response_fields_seeds_and_endless(guide):
    done = guide.post(
        "/completion",
        prompt="hi",
        n_predict=3,
        response_fields=["content", "timings/predicted_n", "nope"],
    ).json()
    assert set(done) == {"content", "timings/predicted_n"} and done["timings/predicted_n"] == 3
    drawn = [
        guide.post("/completion", prompt="The", n_predict=12, temperature=2, seed=-1).json()[
            "content"
        ]
        for _ in range(3)
    ]
    assert len(set(drawn)) > 1
    full = guide.post("/completion", prompt="The", n_predict=-1, ignore_eos=True).json()
    assert full["stop_type"] == "limit"
    assert full["tokens_predicted"] + full["tokens_evaluated"] >= 512


def test_biases_as_pairs(guide, llm):
    first = int(llm.generate("Once upon", max_tokens=1).tokens[0])
    wanted = llm.generate("Once upon", max_tokens=4, logit_bias={first: -1e6}).text
    for biases in ([[first, False]], {str(first): -1e6}):
        assert (
            guide.post("/completion", prompt="Once upon", n_predict=4, logit_bias=biases).json()[
                "content"
            ]
            == wanted
        )


def test_biases_of_texts_are_those_of_their_tokens(guide, llm):
    tokens = llm.tokenizer.encode("Hello, World!")
    wanted = llm.generate(
        "Once upon",
        max_tokens=6,
        logit_bias={token: 20.0 * tokens.count(token) for token in tokens},
    ).text
    assert wanted != llm.generate("Once upon", max_tokens=6).text
    for biases in ([["Hello, World!", 20]], {"Hello, World!": 20}):
        done = guide.post("/completion", prompt="Once upon", n_predict=6, logit_bias=biases)
        assert done.json()["content"] == wanted, done.text


@pytest.mark.parametrize(
    "field, value",
    [
        ("mirostat", 2),
        ("typical_p", 0.5),
        ("xtc_probability", 1.5),
        ("dry_multiplier", -0.8),
        ("dynatemp_range", 1.0),
        ("id_slot", 99),
        ("n_keep", -2),
        ("lora", [{"id": 0, "scale": 1.0}]),
        ("samplers", ["top_k"]),
        ("min_keep", 2),
        ("t_max_predict_ms", -1),
        ("post_sampling_probs", True),
        ("n_indent", 4),
        ("n_cmpl", 0),
        ("top_n_sigma", 1.0),
        ("adaptive_target", 0.5),
        ("reasoning_format", "deepseek"),
        ("n_cache_reuse", 256),
        ("prompt", {"prompt_string": "x", "multimodal_data": ["AA=="]}),
    ],
)
def test_a_field_that_makes_no_sense_here_is_refused_by_name(field, value, guide):
    done = guide.post("/completion", **{"prompt": "hi", field: value})
    fields = [fault["field"] for fault in done.json()["errors"]]
    assert done.status_code == 400 and {name.split(".")[0] for name in fields} == {field}, done.text


# Of the README: its defaults, and the values that it names as off or as -1 for automatic.
OFF = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "n_indent": 0,
    "n_keep": -1,
    "n_discard": 0,
    "stream": False,
    "stop": [],
    "typical_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "grammar": "",
    "seed": -1,
    "ignore_eos": False,
    "logit_bias": [],
    "n_probs": 0,
    "min_keep": 0,
    "t_max_predict_ms": 0,
    "image_data": [],
    "id_slot": 0,
    "cache_prompt": True,
    "return_tokens": False,
    "timings_per_token": False,
    "return_progress": False,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "post_sampling_probs": False,
    "response_fields": [],
    "lora": [],
    "n_cache_reuse": 0,
    "sse_ping_interval": 30,
    "top_n_sigma": -1.0,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "reasoning_format": "none",
    "repeat_last_n": -1,
    "n_cmpl": 1,
}


def test_documented_values_that_switch_a_field_off_change_nothing(guide, llm):
    wanted = llm.generate("Once upon", max_tokens=6).text
    done = guide.post("/completion", prompt={"prompt_string": "Once upon"}, n_predict=6, **OFF)
    assert done.status_code == 200 and done.json()["content"] == wanted, done.text
    newer = "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature".split()
    done = guide.post(
        "/completion",
        prompt=["Once upon", {"prompt_string": "Once upon"}],
        n_predict=6,
        samplers=newer,
    )
    assert [answer["content"] for answer in done.json()] == [wanted, wanted]


def test_penalties_over_the_whole_context(guide, llm):
    asked = {"presence_penalty": 20.0, "max_tokens": 60}
    far, near = (
        llm.generate("Once upon a time", repetition_context_size=size, **asked).text
        for size in (512, 20)
    )
    assert (
        guide.post("/completion", prompt="Once upon a time", repeat_last_n=-1, **asked).json()[
            "content"
        ]
        == far
        != near
    )


def test_a_cold_prompt_is_computed_whole(guide):
    asked = {
        "prompt": "The stone bridge over the river is very old, and a llama guards it all night.",
        "n_predict": 2,
    }
    first = guide.post("/completion", **asked).json()
    again = guide.post("/completion", **asked).json()
    cold = guide.post("/completion", **asked, cache_prompt=False).json()
    assert again["timings"]["cache_n"] > 0 == cold["timings"]["cache_n"]
    assert cold["timings"]["prompt_n"] == first["tokens_evaluated"]
    assert cold["content"] == first["content"]


def test_progress_of_a_long_prompt(endless):
    asked = {
        "prompt": list(range(5, 200)) * 8,
        "n_predict": 3,
        "stream": True,
        "return_progress": True,
        "prefill_step_size": 64,
    }
    total = len(asked["prompt"])
    for reused in (0, total - 1):
        pieces = [json.loads(data) for _, data in events(endless.post("/completion", **asked).text)]
        progress = [piece["prompt_progress"] for piece in pieces if "prompt_progress" in piece]
        # before any token
        assert pieces[: len(progress)] == [piece for piece in pieces if "prompt_progress" in piece]
        assert len(progress) >= (1 if reused else 2) and progress[-1]["processed"] == total
        assert all(piece["total"] == total and piece["cache"] == reused for piece in progress)
        for before, after in itertools.pairwise(progress):
            assert before["processed"] < after["processed"]
            assert before["time_ms"] <= after["time_ms"]
    plain = [
        json.loads(data)
        for _, data in events(
            endless.post("/completion", **asked | {"return_progress": False}).text
        )
    ]
    assert not any("prompt_progress" in piece for piece in plain)


def test_an_answer_with_a_line_break_ends_after_its_time(endless):
    asked = {"prompt": "x", "t_max_predict_ms": 1}
    answer = endless.post(
        "/completion", **asked, grammar='root ::= "\\n" [a-z]+', n_predict=90_000
    ).json()
    assert answer["stop_type"] == "limit" and 1 < answer["tokens_predicted"] < 90_000
    assert answer["content"].startswith("\n")
    answer = endless.post("/completion", **asked, grammar="root ::= [a-z]+", n_predict=300).json()
    assert answer["stop_type"] == "limit" and answer["tokens_predicted"] == 300


def test_several_answers_to_each_prompt(guide, llm):
    wanted = [
        llm.generate(prompt, max_tokens=9, temperature=1.2, seed=seed).text
        for prompt in ("Once upon", "The river")
        for seed in (3, 4)
    ]
    asked = {
        "prompt": ["Once upon", "The river"],
        "n_predict": 9,
        "temperature": 1.2,
        "seed": 3,
        "n_cmpl": 2,
    }
    answers = guide.post("/completion", **asked).json()
    assert [answer["content"] for answer in answers] == wanted
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    texts = [""] * 4
    for _, data in events(guide.post("/completion", **asked, stream=True).text):
        texts[json.loads(data)["index"]] += json.loads(data)["content"]
    assert texts == wanted
    assert (
        guide.post("/completion", prompt=["x"] * 9, n_cmpl=2).json()["errors"][0]["field"]
        == "n_cmpl"
    )


def test_the_end_of_a_stream_does_not_repeat_its_tokens(guide):
    asked = {"prompt": "Once upon", "n_predict": 4, "n_probs": 2, "return_tokens": True}
    whole = guide.post("/completion", **asked).json()
    *pieces, last = [
        json.loads(data) for _, data in events(guide.post("/completion", **asked, stream=True).text)
    ]
    assert last["tokens"] == [] and last["content"] == "" and "completion_probabilities" not in last
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    entries = [entry for piece in pieces for entry in piece["completion_probabilities"]]
    assert entries == whole["completion_probabilities"] and len(entries) == 4
    for entry in entries:  # the README's keys
        assert set(entry) == {"id", "token", "logprob", "bytes", "top_logprobs"}
        assert [set(other) for other in entry["top_logprobs"]] == [
            {"id", "token", "logprob", "bytes"}
        ] * 2
        assert entry["id"] == entry["top_logprobs"][0]["id"]  # greedy


def test_comments_in_a_silent_stream_come_as_often_as_asked(serve, roomy):
    server = serve("--model", roomy, "--parallel", "1")
    for seconds, status in ((0, 200), (-1, 200), (-2, 400)):
        assert (
            server.post(
                "/completion", prompt="x", n_predict=1, stream=True, sse_ping_interval=seconds
            ).status_code
            == status
        )
    asked = {"prompt": "x", "n_predict": -1, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/completion", json=asked) as first:
        lines = first.iter_lines()
        assert next(lines).startswith("data:")
        waiting = server.http.stream(
            "POST", "/completion", json=asked | {"sse_ping_interval": 1}, timeout=8
        )
        with waiting as second:  # the only row is taken
            more = second.iter_lines()
            assert next(more).startswith(":")


def test_the_default_settings_have_the_fields_of_an_answers(guide):
    """llama.cpp: default_generation_settings has the same fields as generation_settings."""
    params = guide.http.get("/props").json()["default_generation_settings"]["params"]
    settings = guide.post("/completion", prompt="x", n_predict=1).json()["generation_settings"]
    assert set(params) == set(settings)
    assert set(params) >= {  # the README's example
        "n_predict",
        "seed",
        "temperature",
        "dynatemp_range",
        "dynatemp_exponent",
        "top_k",
        "top_p",
        "min_p",
        "xtc_probability",
        "xtc_threshold",
        "typical_p",
        "repeat_last_n",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "stop",
        "max_tokens",
        "n_keep",
        "n_discard",
        "ignore_eos",
        "stream",
        "n_probs",
        "min_keep",
        "grammar",
        "samplers",
        "timings_per_token",
    }
    assert params["n_predict"] == -1 and params["logit_bias"] == [] and params["grammar"] == ""
    assert params["n_probs"] == 0
    assert (settings["n_predict"], settings["stream"]) == (1, False)
    # An answer's settings may be sent back.
    again = {
        name: value
        for name, value in settings.items()
        if value is not None and name not in ("n_predict", "speculate")
    }
    assert guide.post("/completion", **again | {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_tokenize_and_back(guide, llm):
    ids = guide.post("/tokenize", content="Hello ü").json()["tokens"]
    assert ids == llm.tokenizer.encode("Hello ü", parse_special=True)
    assert (
        guide.post("/tokenize", content="Hello", add_special=True).json()["tokens"][0]
        == llm.tokenizer.bos_id
    )
    pieces = guide.post("/tokenize", content="学", with_pieces=True).json()["tokens"]
    assert (
        bytes(sum((piece["piece"] for piece in pieces if isinstance(piece["piece"], list)), []))
        == "学".encode()
    )
    assert guide.post("/detokenize", tokens=ids).json()["content"] == "Hello ü"
    done = guide.post("/detokenize", tokens=[10**6])
    assert done.status_code == 400 and done.json()["errors"][0]["field"] == "tokens"


def test_template_props_and_slots(guide, llm):
    messages = [{"role": "user", "content": "hi"}]
    assert guide.post("/apply-template", messages=messages).json()["prompt"] == llm.template.render(
        messages
    )
    props = guide.http.get("/props").json()
    assert props["chat_template"] == llm.template.source and props["total_slots"] == 32
    assert props["default_generation_settings"]["n_ctx"] == 512
    slots = guide.http.get("/slots").json()
    assert len(slots) == 32 and {slot["id"] for slot in slots} == set(range(32))


STORIES = [
    "Once upon a time there was a llama who lived on a hill.",
    "A long time ago there was a sheep that could not",
    "The third is short, but it is long enough to be told from others.",
]


def complete(server, story: str) -> dict:
    return server.post("/completion", prompt=story, n_predict=5).json()


def test_slots_are_saved_restored_and_erased(serve, tmp_path):
    folder = tmp_path / "slots"
    folder.mkdir()
    server = serve("--parallel", "2", "--slot-save-path", folder)
    assert [slot["n_tokens"] for slot in server.http.get("/slots").json()] == [0, 0]
    # nothing yet
    assert server.post("/slots/1?action=save", filename="a").json()["errors"][0]["field"] == "slot"
    answers = [complete(server, story) for story in STORIES]
    # the third takes the one that was unused for longest
    assert [answer["id_slot"] for answer in answers] == [0, 1, 0]
    more = complete(server, STORIES[1] + answers[1]["content"])
    assert more["id_slot"] == 1 and more["timings"]["cache_n"] >= answers[1]["tokens_evaluated"]
    # An answer is sent before its row is free.
    server.wait(lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json()))
    slots = server.http.get("/slots").json()
    assert [slot["n_tokens"] for slot in slots] == [
        answer["tokens_evaluated"] + answer["tokens_predicted"] for answer in (answers[2], more)
    ]
    assert "llama" not in json.dumps(slots)
    for slot, answer in ((0, answers[2]), (1, more)):
        saved = server.post(f"/slots/{slot}?action=save", filename=f"{slot}.bin").json()
        assert saved["id_slot"] == slot
        assert saved["n_written"] == (folder / f"{slot}.bin").stat().st_size
        # the last was not computed
        assert saved["n_saved"] == slots[slot]["n_tokens"] - 1 and saved["timings"]["save_ms"] > 0
    erased = server.http.post("/slots/1?action=erase").json()  # without a body
    assert (
        erased
        == {"id_slot": 1, "n_erased": slots[1]["n_tokens"] - 1}
        != server.post("/slots/1?action=erase").json()
    )
    assert complete(server, STORIES[1])["timings"]["cache_n"] <= 1

    again = serve("--parallel", "3", "--slot-save-path", folder)
    restored = again.post("/slots/2?action=restore", filename="0.bin").json()
    assert restored["n_restored"] == slots[0]["n_tokens"] - 1
    assert restored["n_read"] == (folder / "0.bin").stat().st_size
    assert [slot["n_tokens"] for slot in again.http.get("/slots").json()] == [
        0,
        0,
        restored["n_restored"],
    ]
    answer_again = complete(again, STORIES[2])
    assert answer_again["content"] == answers[2]["content"] and answer_again["id_slot"] == 2
    assert answer_again["timings"]["cache_n"] == answers[2]["tokens_evaluated"] - 1


def test_bad_slots_and_files(serve, tmp_path):
    folder = tmp_path / "slots"
    folder.mkdir()
    server = serve("--parallel", "1", "--slot-save-path", folder)
    complete(server, STORIES[0])
    assert server.post("/slots/0?action=save", filename="it").status_code == 200
    (folder / "it").rename(tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    for path, name, field in (
        ("/slots/0", "it", "action"),
        ("/slots/0?action=drop", "it", "action"),
        ("/slots/1?action=save", "it", "slot"),
        ("/slots/-1?action=save", "it", "slot"),
        ("/slots/x?action=erase", "it", "slot"),
        ("/slots/%C2%B2?action=erase", "it", "slot"),
        *(
            ("/slots/0?action=restore", name, "filename")
            for name in (
                "../outside",
                "link",
                "none",
                "..",
                ".hidden",
                "a/b",
                "/etc/passwd",
                "a\x00b",
                "..\\outside",
                "",
                "a" * 200,
            )
        ),
        *(
            ("/slots/0?action=save", name, "filename")
            for name in ("../new", "link", ".new", "..", "a/b", "C:new")
        ),
    ):
        done = server.post(path, filename=name)
        assert done.status_code == 400 and done.json()["errors"][0]["field"] == field, (
            path,
            name,
            done.text,
        )
    assert server.http.post("/slots/0?action=save").status_code == 400  # no body
    assert sorted(tmp_path.rglob("*")) == before
    assert server.post("/completion", prompt="x", n_predict=1).status_code == 200


def test_slots_of_running_requests(inside, roomy, tmp_path):
    server = inside(
        lambda: load(roomy, backend="cpu", max_rows=2), slot_folder=str(tmp_path)
    ).ready()
    assert server.post("/completion", prompt=STORIES[0], n_predict=2).json()["id_slot"] == 0
    assert server.post("/slots/0?action=save", filename="it").status_code == 200
    with server.http.stream(
        "POST", "/completion", json={"prompt": STORIES[0], "n_predict": 90_000, "stream": True}
    ) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        busy, idle = server.http.get("/slots").json()
        assert first["id_slot"] == 0 and busy["is_processing"] and not idle["is_processing"]
        assert "params" not in idle
        assert (
            busy["n_prompt_tokens"]
            == first["tokens_evaluated"]
            == busy["n_prompt_tokens_cache"] + 1
        )
        assert busy["params"]["max_tokens"] == 90_000 and busy["next_token"][0]["n_decoded"] >= 1
        assert "prompt" not in busy and "llama" not in json.dumps(busy)
        refused = server.post("/slots/0?action=restore", filename="it")
        assert refused.status_code == 400 and "slot 0 is running a request" in refused.text
        assert server.http.get("/slots?fail_on_no_slot=1").status_code == 200
        with server.http.stream(
            "POST", "/completion", json={"prompt": "x", "n_predict": 90_000, "stream": True}
        ) as second:
            more = second.iter_lines()
            assert json.loads(next(more).removeprefix("data: "))["id_slot"] == 1
            assert server.http.get("/slots?fail_on_no_slot=1").status_code == 503
    server.wait(server.is_idle)


def test_texts_of_slots_are_shown_where_the_owner_asks(inside, roomy):
    server = inside(lambda: load(roomy, backend="cpu", max_rows=2), logs_prompts=True).ready()
    with server.http.stream(
        "POST", "/completion", json={"prompt": STORIES[0], "n_predict": 90_000, "stream": True}
    ) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        busy, idle = server.http.get("/slots").json()
        assert STORIES[0] in busy["prompt"]
        assert busy["generated"].strip().startswith(first["content"].strip())
        assert "prompt" not in idle
    server.wait(server.is_idle)


def test_slots_of_a_server_without_a_folder(guide, serve):
    assert guide.post("/slots/0?action=save", filename="a").status_code == 501
    assert guide.post("/slots/0?action=erase").status_code == 200
    assert serve("--no-slots").post("/slots/0?action=erase").status_code == 501
