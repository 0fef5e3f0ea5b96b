"""llama-server's own routes. Names and shapes are those of llama.cpp, tools/server/README.md."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from data.make_infill import REQUESTS, make_models

from mlx_llama import load

from .conftest import Inside, events, text_of

ROUTE = "/completion"
DATA = Path(__file__).parents[1] / "data"


def test_completion(guide, llm):
    wanted = llm.generate("Once upon", max_tokens=8)
    done = guide.ask(ROUTE, prompt="Once upon", n_predict=8, return_tokens=True)
    assert done["content"] == wanted.text and done["tokens"] == wanted.tokens
    assert done["stop"] is True
    assert done["stop_type"] == "limit" and done["tokens_predicted"] == 8
    assert done["tokens_evaluated"] == 3 and done["generation_settings"]["n_predict"] == 8
    timings = "prompt_n prompt_ms predicted_n predicted_per_second cache_n".split()
    assert set(done["timings"]) >= set(timings)
    stopped = guide.ask(ROUTE, prompt="Once upon", stop=["time"])
    assert stopped["stop_type"] == "word" and stopped["stopping_word"] == "time"
    assert stopped["content"] == " a "


def test_completion_streams_and_ends_with_the_whole_receipt(guide, llm):
    asked = {"prompt": "Once upon", "n_predict": 6, "timings_per_token": True}
    *pieces, last = guide.stream(ROUTE, **asked)
    text = "".join(piece["content"] for piece in pieces)
    assert text == llm.generate("Once upon", max_tokens=6).text
    assert [piece["stop"] for piece in pieces] == [False] * 6 and last["stop"] is True
    assert last["tokens_predicted"] == pieces[-1]["tokens_predicted"] == 6
    assert "timings" in pieces[0]


def test_prompts_of_ids_mixed_and_several(guide, llm):
    ids, more = llm.encode("Once upon"), llm.tokenizer.encode(" a")
    wanted = llm.generate("Once upon", max_tokens=5).text
    assert guide.ask(ROUTE, prompt=ids, n_predict=5)["content"] == wanted
    mixed = guide.ask(ROUTE, prompt=["Once upon", *more, " a"], n_predict=5)
    assert mixed["tokens_evaluated"] == 3 + 2 * len(more)
    several = guide.ask(ROUTE, prompt=["Once upon", ids], n_predict=5)
    answers = [(answer["content"], answer["index"]) for answer in several]
    assert answers == [(wanted, 0), (wanted, 1)]


@pytest.mark.slow
def test_response_fields_seeds_and_endless(guide):
    names = ["content", "timings/predicted_n", "nope"]
    done = guide.ask(ROUTE, prompt="hi", n_predict=3, response_fields=names)
    assert set(done) == {"content", "timings/predicted_n"} and done["timings/predicted_n"] == 3
    asked = {"prompt": "The", "n_predict": 12, "temperature": 2, "seed": -1}
    assert len({guide.ask(ROUTE, **asked)["content"] for _ in range(3)}) > 1
    full = guide.ask(ROUTE, prompt="The", n_predict=-1, ignore_eos=True)
    assert full["stop_type"] == "limit"
    assert full["tokens_predicted"] + full["tokens_evaluated"] >= 512


def test_biases_are_pairs_and_those_of_a_text_are_those_of_its_tokens(guide, llm):
    def answer(biases) -> str:
        return guide.ask(ROUTE, prompt="Once upon", n_predict=6, logit_bias=biases)["content"]

    first = int(llm.generate("Once upon", max_tokens=1).tokens[0])
    wanted = llm.generate("Once upon", max_tokens=6, logit_bias={first: -1e6}).text
    assert answer([[first, False]]) == answer({str(first): -1e6}) == wanted
    tokens = llm.tokenizer.encode("Hello, World!")
    biases = {token: 20.0 * tokens.count(token) for token in tokens}
    wanted = llm.generate("Once upon", max_tokens=6, logit_bias=biases).text
    assert answer([["Hello, World!", 20]]) == answer({"Hello, World!": 20}) == wanted != answer({})


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A server of a toy with tokens for fill-in-the-middle, and the toy."""
    folder = tmp_path_factory.mktemp("coder")
    make_models(folder)
    llm = load(folder / "named", backend="cpu")
    with Inside(lambda: llm, alias="toy") as server:
        yield server.ready(), llm


def test_infill(coder, guide):
    """The prompt's ids are llama-server's: see core/text/test_infill.py."""
    server, llm = coder
    for name, body in REQUESTS.items():
        done = server.ask("/infill", **body, n_predict=0)
        wanted = json.loads((DATA / "infill.json").read_text())["named"][name]
        assert done["prompt"] == llm.tokenizer.decode(wanted, skip_special=False)
        assert done["tokens_evaluated"] == len(wanted)
    code = {**REQUESTS["code"], "temperature": 2.0, "seed": 3}
    wanted = llm.infill(code["input_prefix"], code["input_suffix"], seed=3, temperature=2.0)
    assert server.ask("/infill", **code)["content"] == wanted.text
    # as llama.vim warms the cache
    fields = {"samplers": [], "n_indent": 4, "t_max_prompt_ms": 1, "response_fields": [""]}
    assert server.ask("/infill", **REQUESTS["files"], n_predict=0, **fields) == {}
    assert server.refuse("/infill", input_prefix="a") == ["input_suffix"]
    for extra in ({}, {"filename": "ok"}, {"filename": 123, "text": "abc"}):
        assert server.post("/infill", **code, input_extra=[extra]).status_code == 400
    refused = guide.post("/infill", **REQUESTS["code"])
    assert refused.status_code == 501 and "fill-in-the-middle" in refused.json()["error"]["message"]


def test_a_suffix_in_other_apis(coder, guide):
    server, llm = coder
    wanted = llm.infill("def f(", "return", max_tokens=5).text
    asked = {"prompt": "def f(", "suffix": "return"}
    assert text_of(server.ask("/v1/completions", **asked, max_tokens=5)) == wanted
    options = {"options": {"num_predict": 5}, "stream": False}
    assert server.ask("/api/generate", **asked, **options)["response"] == wanted
    for path in ("/v1/completions", "/api/generate"):
        refused = guide.post(path, **asked)
        assert refused.status_code == 400 and "fill-in-the-middle" in refused.text
    assert server.refuse("/v1/completions", prompt=[1, 2], suffix="a") == ["prompt"]


# Of the README: its defaults, and the values that it names as off or as -1 for automatic.
OFF = json.loads(r"""{
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "n_indent": 0, "n_keep": -1, "n_discard": 0,
    "stream": false, "stop": [], "typical_p": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
    "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":", "\"", "*"],
    "xtc_probability": 0.0, "xtc_threshold": 0.1, "mirostat": 0, "mirostat_tau": 5.0,
    "mirostat_eta": 0.1, "grammar": "", "seed": -1, "ignore_eos": false, "logit_bias": [],
    "n_probs": 0, "min_keep": 0, "t_max_predict_ms": 0, "image_data": [], "id_slot": 0,
    "cache_prompt": true, "return_tokens": false, "timings_per_token": false,
    "return_progress": false,
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "post_sampling_probs": false, "response_fields": [], "lora": [], "n_cache_reuse": 0,
    "sse_ping_interval": 30, "top_n_sigma": -1.0, "adaptive_target": -1.0, "adaptive_decay": 0.9,
    "reasoning_format": "none", "repeat_last_n": -1, "n_cmpl": 1}""")


def test_documented_values_that_switch_a_field_off_change_nothing(guide, llm):
    wanted = llm.generate("Once upon", max_tokens=6).text
    prompt = {"prompt_string": "Once upon"}
    assert guide.ask(ROUTE, prompt=prompt, n_predict=6, **OFF)["content"] == wanted
    chosen = guide.post(ROUTE, prompt=prompt, n_predict=6, id_slot=3)  # the server chooses
    assert chosen.json()["content"] == wanted
    assert chosen.headers["x-mlx-llama-noted"] == "id_slot"
    newer = "penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature".split()
    done = guide.ask(ROUTE, prompt=["Once upon", prompt], n_predict=6, samplers=newer)
    assert [answer["content"] for answer in done] == [wanted, wanted]


def test_penalties_over_the_whole_context(guide, llm):
    asked = {"presence_penalty": 20.0, "max_tokens": 60}
    far, near = (
        llm.generate("Once upon a time", repetition_context_size=size, **asked).text
        for size in (512, 20)
    )
    answer = guide.ask(ROUTE, prompt="Once upon a time", repeat_last_n=-1, **asked)
    assert answer["content"] == far != near


def test_a_cold_prompt_is_computed_whole(guide):
    prompt = "The stone bridge over the river is very old, and a llama guards it all night."
    asked = {"prompt": prompt, "n_predict": 2}
    first, again = guide.ask(ROUTE, **asked), guide.ask(ROUTE, **asked)
    cold = guide.ask(ROUTE, **asked, cache_prompt=False)
    assert again["timings"]["cache_n"] > 0 == cold["timings"]["cache_n"]
    assert cold["timings"]["prompt_n"] == first["tokens_evaluated"]
    assert cold["content"] == first["content"]


def test_progress_of_a_long_prompt(endless):
    asked = {"prompt": list(range(5, 200)) * 8, "n_predict": 3, "prefill_step_size": 64}
    total = len(asked["prompt"])
    for reused in (0, total - 1):
        pieces = endless.stream(ROUTE, **asked, return_progress=True)
        progress = [piece["prompt_progress"] for piece in pieces if "prompt_progress" in piece]
        # before any token
        assert all("prompt_progress" in piece for piece in pieces[: len(progress)])
        assert len(progress) >= (1 if reused else 2) and progress[-1]["processed"] == total
        assert all(piece["total"] == total and piece["cache"] == reused for piece in progress)
        for before, after in itertools.pairwise(progress):
            assert before["processed"] < after["processed"]
            assert before["time_ms"] <= after["time_ms"]
    assert not any("prompt_progress" in piece for piece in endless.stream(ROUTE, **asked))


def test_an_answer_with_a_line_break_ends_after_its_time(endless):
    asked = {"prompt": "x", "t_max_predict_ms": 1}
    answer = endless.ask(ROUTE, **asked, grammar='root ::= "\\n" [a-z]+', n_predict=90_000)
    assert answer["stop_type"] == "limit" and 1 < answer["tokens_predicted"] < 90_000
    assert answer["content"].startswith("\n")
    answer = endless.ask(ROUTE, **asked, grammar="root ::= [a-z]+", n_predict=300)
    assert answer["stop_type"] == "limit" and answer["tokens_predicted"] == 300


def test_several_answers_to_each_prompt(guide, llm):
    prompts, drawn = ["Once upon", "The river"], {"temperature": 1.2}
    wanted = [
        llm.generate(prompt, max_tokens=9, **drawn, seed=seed).text
        for prompt in prompts
        for seed in (3, 4)
    ]
    asked = {"prompt": prompts, "n_predict": 9, "seed": 3, "n_cmpl": 2, **drawn}
    answers = guide.ask(ROUTE, **asked)
    assert [answer["content"] for answer in answers] == wanted
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    texts = [""] * 4
    for piece in guide.stream(ROUTE, **asked):
        texts[piece["index"]] += piece["content"]
    assert texts == wanted
    assert guide.refuse(ROUTE, prompt=["x"] * 9, n_cmpl=2) == ["n_cmpl"]


def test_the_end_of_a_stream_does_not_repeat_its_tokens(guide):
    asked = {"prompt": "Once upon", "n_predict": 4, "n_probs": 2, "return_tokens": True}
    whole, [*pieces, last] = guide.ask(ROUTE, **asked), guide.stream(ROUTE, **asked)
    assert last["tokens"] == [] and last["content"] == "" and "completion_probabilities" not in last
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    entries = [entry for piece in pieces for entry in piece["completion_probabilities"]]
    assert entries == whole["completion_probabilities"] and len(entries) == 4
    keys = {"id", "token", "logprob", "bytes"}  # the README's
    for entry in entries:
        assert set(entry) == keys | {"top_logprobs"}
        assert [set(other) for other in entry["top_logprobs"]] == [keys] * 2
        assert entry["id"] == entry["top_logprobs"][0]["id"]  # greedy


def begin(server, **body):
    """A context in which an answer streams that lasts until it is left."""
    body = {"n_predict": 90_000, "stream": True} | body
    return server.http.stream("POST", ROUTE, json=body, timeout=8)


@pytest.mark.slow
def test_comments_in_a_silent_stream_come_as_often_as_asked(inside, roomy):
    server = inside(lambda: load(roomy, backend="cpu", max_rows=1)).ready()
    for seconds in (0, -1):
        assert server.stream(ROUTE, prompt="x", n_predict=1, sse_ping_interval=seconds)
    with begin(server, prompt="x") as first:
        lines = first.iter_lines()
        assert next(lines).startswith("data:")
        with begin(server, prompt="x", sse_ping_interval=1) as second:  # the only row is taken
            more = second.iter_lines()
            assert next(more).startswith(":")


def test_the_default_settings_have_the_fields_of_an_answers(guide):
    """llama.cpp: default_generation_settings has the same fields as generation_settings."""
    params = guide.http.get("/props").json()["default_generation_settings"]["params"]
    settings = guide.ask(ROUTE, prompt="x", n_predict=1)["generation_settings"]
    # the README's example
    names = (
        "n_predict seed temperature dynatemp_range dynatemp_exponent top_k top_p min_p "
        "xtc_probability xtc_threshold typical_p repeat_last_n repeat_penalty presence_penalty "
        "frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers mirostat mirostat_tau mirostat_eta stop max_tokens n_keep n_discard "
        "ignore_eos stream n_probs min_keep grammar samplers timings_per_token"
    ).split()
    assert set(params) == set(settings) >= set(names)
    assert params["n_predict"] == -1 and params["logit_bias"] == [] and params["grammar"] == ""
    assert params["n_probs"] == 0
    assert (settings["n_predict"], settings["stream"]) == (1, False)
    # An answer's settings may be sent back.
    again = {
        name: value
        for name, value in settings.items()
        if value is not None and name not in ("n_predict", "speculate")
    }
    assert guide.ask(ROUTE, **again | {"prompt": "x", "max_tokens": 1})


def test_tokenize_and_back(guide, llm):
    def tokens(content: str, **more) -> list:
        return guide.ask("/tokenize", content=content, **more)["tokens"]

    ids = tokens("Hello ü")
    assert ids == llm.tokenizer.encode("Hello ü", parse_special=True)
    assert tokens("Hello", add_special=True)[0] == llm.tokenizer.bos_id
    pieces = [piece["piece"] for piece in tokens("学", with_pieces=True)]
    data = bytes(sum((piece for piece in pieces if isinstance(piece, list)), []))
    assert data == "学".encode()
    assert guide.ask("/detokenize", tokens=ids)["content"] == "Hello ü"
    assert guide.refuse("/detokenize", tokens=[10**6]) == ["tokens"]


def test_template_props_and_slots(guide, llm):
    messages = [{"role": "user", "content": "hi"}]
    rendered = guide.ask("/apply-template", messages=messages)["prompt"]
    assert rendered == llm.template.render(messages)
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
    return server.ask(ROUTE, prompt=story, n_predict=5)


@pytest.fixture
def keep(inside, tmp_path):
    """keep(rows): a server of the guide that keeps slots in tmp_path/slots."""
    (tmp_path / "slots").mkdir()
    return lambda rows: inside(
        lambda: load(backend="cpu", max_rows=rows), slot_folder=str(tmp_path / "slots")
    ).ready()


def counts(server) -> list[int]:
    return [slot["n_tokens"] for slot in server.http.get("/slots").json()]


def test_slots_are_saved_restored_and_erased(keep, tmp_path):
    folder, server = tmp_path / "slots", keep(2)
    assert counts(server) == [0, 0]
    assert server.refuse("/slots/1?action=save", filename="a") == ["slot"]  # nothing yet
    answers = [complete(server, story) for story in STORIES]
    # the third takes the one that was unused for longest
    assert [answer["id_slot"] for answer in answers] == [0, 1, 0]
    more = complete(server, STORIES[1] + answers[1]["content"])
    assert more["id_slot"] == 1 and more["timings"]["cache_n"] >= answers[1]["tokens_evaluated"]
    server.wait(server.is_idle)  # an answer is sent before its row is free
    wanted = [
        answer["tokens_evaluated"] + answer["tokens_predicted"] for answer in (answers[2], more)
    ]
    assert counts(server) == wanted and "llama" not in server.http.get("/slots").text
    for slot in (0, 1):
        saved = server.ask(f"/slots/{slot}?action=save", filename=f"{slot}.bin")
        assert saved["id_slot"] == slot
        assert saved["n_written"] == (folder / f"{slot}.bin").stat().st_size
        # the last was not computed
        assert saved["n_saved"] == wanted[slot] - 1 and saved["timings"]["save_ms"] > 0
    erased = server.http.post("/slots/1?action=erase").json()  # without a body
    assert erased == {"id_slot": 1, "n_erased": wanted[1] - 1}
    assert erased != server.ask("/slots/1?action=erase")
    assert complete(server, STORIES[1])["timings"]["cache_n"] <= 1

    again = keep(3)
    restored = again.ask("/slots/2?action=restore", filename="0.bin")
    assert restored["n_restored"] == wanted[0] - 1
    assert restored["n_read"] == (folder / "0.bin").stat().st_size
    assert counts(again) == [0, 0, wanted[0] - 1]
    answer = complete(again, STORIES[2])
    assert answer["content"] == answers[2]["content"] and answer["id_slot"] == 2
    assert answer["timings"]["cache_n"] == answers[2]["tokens_evaluated"] - 1


def test_bad_slots_and_files(keep, tmp_path):
    folder, server = tmp_path / "slots", keep(1)
    complete(server, STORIES[0])
    assert server.ask("/slots/0?action=save", filename="it")
    (folder / "it").rename(tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    before = sorted(tmp_path.rglob("*"))
    for path, field in (
        ("0", "action"),
        ("0?action=drop", "action"),
        ("1?action=save", "slot"),
        ("-1?action=save", "slot"),
        ("x?action=erase", "slot"),
        ("%C2%B2?action=erase", "slot"),
    ):
        assert server.refuse(f"/slots/{path}", filename="it") == [field], path
    bad = ["../outside", "link", "..", ".hidden", "a/b", "C:new"]
    absent = ["none", "/etc/passwd", "a\x00b", "..\\outside", "", "a" * 200]
    for action, names in (("restore", [*bad, *absent]), ("save", bad)):
        for name in names:
            refused = server.refuse(f"/slots/0?action={action}", filename=name)
            assert refused == ["filename"], (action, name)
    assert server.http.post("/slots/0?action=save").status_code == 400  # no body
    assert sorted(tmp_path.rglob("*")) == before
    assert complete(server, "x")


def test_slots_of_running_requests(inside, roomy, tmp_path):
    server = inside(lambda: load(roomy, backend="cpu", max_rows=2), slot_folder=str(tmp_path))
    server.ready()
    assert complete(server, STORIES[0])["id_slot"] == 0
    assert server.ask("/slots/0?action=save", filename="it")
    with begin(server, prompt=STORIES[0]) as response:
        lines = response.iter_lines()
        [(_, data)] = events(next(lines))
        first, (busy, idle) = json.loads(data), server.http.get("/slots").json()
        assert first["id_slot"] == 0 and busy["is_processing"] and not idle["is_processing"]
        assert "params" not in idle
        assert busy["n_prompt_tokens"] == first["tokens_evaluated"]
        assert busy["n_prompt_tokens_cache"] == first["tokens_evaluated"] - 1
        assert busy["params"]["max_tokens"] == 90_000 and busy["next_token"][0]["n_decoded"] >= 1
        assert "prompt" not in busy and "llama" not in json.dumps(busy)
        refused = server.post("/slots/0?action=restore", filename="it")
        assert refused.status_code == 400 and "slot 0 is running a request" in refused.text
        assert server.http.get("/slots?fail_on_no_slot=1").status_code == 200
        with begin(server, prompt="x") as second:
            more = second.iter_lines()
            assert '"id_slot":1' in next(more)
            assert server.http.get("/slots?fail_on_no_slot=1").status_code == 503
    server.wait(server.is_idle)


def test_texts_of_slots_are_shown_where_the_owner_asks(inside, roomy):
    server = inside(lambda: load(roomy, backend="cpu", max_rows=2), logs_prompts=True).ready()
    with begin(server, prompt=STORIES[0]) as response:
        lines = response.iter_lines()
        [(_, data)] = events(next(lines))
        busy, idle = server.http.get("/slots").json()
        assert STORIES[0] in busy["prompt"] and "prompt" not in idle
        assert busy["generated"].strip().startswith(json.loads(data)["content"].strip())
    server.wait(server.is_idle)


@pytest.mark.slow
def test_slots_of_a_server_without_a_folder(guide, inside, toy):
    assert guide.post("/slots/0?action=save", filename="a").status_code == 501
    assert guide.post("/slots/0?action=erase").status_code == 200
    server = inside(lambda: load(toy, backend="cpu"), serves_slots=False).ready()
    assert server.post("/slots/0?action=erase").status_code == 501
