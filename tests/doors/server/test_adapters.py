"""The field model names an adapter; requests to several are computed together."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from making import make_checkpoint
from making_adapters import write_random

from mlx_llama import load
from mlx_llama.core.errors import OptionsError
from mlx_llama.server import command

BIASES = {"1": -100, "2": -100}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "toy", max_position_embeddings=512)
    return base, [
        write_random(base, folder / name, seed) for seed, name in enumerate(("sea", "sky"))
    ]


def test_the_model_s_name_chooses_the_adapter(folders, serve):
    base, adapters = folders
    server = serve(
        "--model", base, *(f"--adapter={adapter}" for adapter in adapters), "--parallel", "4"
    )
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    names = ["toy", "sea", "sky"]
    assert [model.id for model in client.models.list()] == names
    assert client.models.retrieve("sky").id == "sky"
    listed = server.http.get("/lora-adapters").json()
    assert [(each["id"], each["path"]) for each in listed] == [(0, "sea"), (1, "sky")]
    llm = load(base, backend="cpu", adapters=adapters)
    ask = dict(max_tokens=12, logit_bias={1: -100, 2: -100})
    wanted = {
        name: llm.generate(
            "Once upon a time", adapter="base" if name == "toy" else name, **ask
        ).text
        for name in names
    }
    assert len(set(wanted.values())) == 3

    def complete(name: str) -> tuple[str, str]:
        done = client.completions.create(
            model=name, prompt="Once upon a time", max_tokens=12, logit_bias=BIASES, temperature=0
        )
        return done.model, done.choices[0].text

    asked = names * 3
    with ThreadPoolExecutor(9) as pool:
        for name, (model, text) in zip(asked, pool.map(complete, asked)):
            assert (model, text) == (name, wanted[name])
    body = dict(prompt="Once upon a time", max_tokens=12, logit_bias=BIASES, temperature=0)
    # none: the model alone
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == wanted["toy"]
    assert (
        server.post("/v1/completions", **body, adapter="sky").json()["choices"][0]["text"]
        == wanted["sky"]
    )
    assert (
        server.post(
            "/completion",
            model="sea",
            prompt="Once upon a time",
            n_predict=12,
            logit_bias=BIASES,
            temperature=0,
        ).json()["content"]
        == wanted["sea"]
    )
    messages = [{"role": "user", "content": "hi"}]
    texts = {
        name: server.post(
            "/v1/chat/completions",
            model=name,
            messages=messages,
            **{key: value for key, value in body.items() if key != "prompt"},
        ).json()["choices"][0]["message"]["content"]
        for name in names
    }
    assert texts["sky"] == llm.generate(messages, adapter="sky", **ask).text
    assert len(set(texts.values())) == 3
    refused = server.post("/v1/completions", **body, model="land")
    assert refused.status_code == 404
    assert "this server has toy, sea, sky" in refused.json()["error"]["message"]
    refused = server.post("/v1/completions", **body, adapter="land")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "adapter"


def test_an_alias_that_is_an_adapter_s_name_is_refused(folders, monkeypatch):
    base, adapters = folders
    monkeypatch.setattr(
        "mlx_llama.server.serving.serve", lambda settings, load_checked, *rest: load_checked()
    )
    with pytest.raises(OptionsError, match="is the name of an adapter"):
        command.main(
            [
                *f"--model {base} --backend cpu --port 0".split(),
                "--adapter",
                str(adapters[0]),
                "--alias",
                "sea",
            ]
        )
