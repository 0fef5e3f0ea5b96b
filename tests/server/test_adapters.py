"""The field model names an adapter; requests to several are computed together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from mlx_llama import load
from mlx_llama.core.errors import OptionsError
from mlx_llama.server import command

from .conftest import text_of


@pytest.mark.slow
def test_the_model_s_name_chooses_the_adapter(folders, serve):
    base, adapters = folders
    flags = (f"--adapter={adapter}" for adapter in adapters)
    server, names = serve("--model", base, *flags, "--parallel", "4"), ["toy", "sea", "sky"]
    models = server.openai.models
    assert [model.id for model in models.list()] == names and models.retrieve("sky").id == "sky"
    listed = server.http.get("/lora-adapters").json()
    assert [(each["id"], each["path"]) for each in listed] == [(0, "sea"), (1, "sky")]
    llm = load(base, backend="cpu", adapters=adapters)
    asked = {"max_tokens": 12, "logit_bias": {1: -100, 2: -100}}
    text, messages = "Once upon a time", [{"role": "user", "content": "hi"}]
    wanted, talked = (
        {name: llm.generate(prompt, adapter=name, **asked).text for name in ("base", "sea", "sky")}
        for prompt in (text, messages)
    )
    for answers in (wanted, talked):
        answers["toy"] = answers.pop("base")
        assert len(set(answers.values())) == 3
    asked |= {"prompt": text, "temperature": 0}

    def complete(name: str) -> tuple[str, str]:
        done = server.openai.completions.create(model=name, **asked)
        return done.model, done.choices[0].text

    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(complete, names * 3)) == [(name, wanted[name]) for name in names * 3]
    route = "/v1/completions"
    assert text_of(server.ask(route, **asked)) == wanted["toy"]  # without a name
    assert text_of(server.ask(route, **asked, adapter="sky")) == wanted["sky"]
    assert text_of(server.ask("/completion", **asked, model="sea")) == wanted["sea"]
    del asked["prompt"]
    asked["messages"] = messages
    for name in names:
        answer = server.ask("/v1/chat/completions", **asked, model=name)
        assert text_of(answer) == talked[name]
    refused = server.post("/v1/chat/completions", **asked, model="land")
    assert refused.status_code == 404
    assert "this server has toy, sea, sky" in refused.json()["error"]["message"]
    assert server.refuse("/v1/chat/completions", **asked, adapter="land") == ["adapter"]


def test_llama_servers_lists_choose_the_adapter(folders, inside):
    """GET and POST /lora-adapters, and `lora` of a request: ids and scales."""
    base, (sea, sky) = folders
    llm = load(base, backend="cpu", adapters=[f"{sea}=0.5", sky])
    asked = {"max_tokens": 12, "logit_bias": {1: -100, 2: -100}}
    wanted = {
        name: llm.generate("Once upon", adapter=name, **asked).text
        for name in ("base", "sea", "sky")
    }
    asked |= {"prompt": "Once upon", "temperature": 0}
    server, path = inside(lambda: llm, alias="toy").ready(), "/lora-adapters"

    def answer(**more) -> str:
        texts = {
            text_of(server.ask(path, **asked, **more))
            for path in ("/completion", "/v1/completions")
        }
        [name] = [name for name, text in wanted.items() if {text} == texts]
        return name

    def scales() -> list[float]:
        return [adapter["scale"] for adapter in server.http.get(path).json()]

    assert scales() == [0, 0] and answer() == "base"
    for sent, name, listed in (
        ([{"id": 0, "scale": 0.5}, {"id": 1}], "sea", [0.5, 0]),
        ([{"id": 1, "scale": 1}], "sky", [0, 1]),
    ):
        assert answer(lora=sent) == name
        server.http.post(path, json=sent).raise_for_status()
        assert scales() == listed and answer() == answer(model="toy") == name
        assert (
            answer(lora=[]) == answer(adapter="base") == answer(adapter="base", lora=[]) == "base"
        )
        assert answer(model="sea") == "sea"
    both = server.post("/completion", **asked, model="sea", lora=[])
    assert both.headers["x-mlx-llama-noted"] == "lora"
    sent = [{"id": 0, "scale": 0.5}]
    settings = server.ask("/completion", **asked, lora=sent)["generation_settings"]
    assert (settings["adapter"], settings["lora"]) == ("sea", sent)
    for sent, reason in (
        ([{"id": 2, "scale": 1}], "(--adapters FOLDER=SCALE): 0: sea (0.5), 1: sky (1)"),
        ([{"id": 2}], "turn on one adapter at most, with its scale"),
        ([{"id": 0, "scale": 1}], "0: sea (0.5)"),
        ([{"id": 0, "scale": 0.5}, {"id": 1, "scale": 1}], "one adapter at most"),
        ([{"id": -1}], "id: must be >= 0"),
        ([5], "lora[0]: must be an object"),
        (5, "must be a JSON object"),
    ):
        refused = server.http.post(path, json=sent)
        assert refused.status_code == 400 and reason in refused.text, refused.text
        if isinstance(sent, list):
            refused = server.post("/completion", **asked, lora=sent)
            assert refused.status_code == 400 and reason in refused.text, refused.text
    assert server.http.post(path, json=[]).json() == {"success": True} and answer() == "base"


def test_an_alias_that_is_an_adapter_s_name_is_refused(folders, monkeypatch):
    base, adapters = folders
    monkeypatch.setattr(
        "mlx_llama.server.app.serve", lambda settings, load_checked, *rest: load_checked()
    )
    with pytest.raises(OptionsError, match="is the name of an adapter"):
        flags = f"--model {base} --backend cpu --port 0 --adapter {adapters[0]} --alias sea"
        command.main(flags.split())
