"""Requests with adapters of their own: the option, prefixes, saved caches, a draft model, many in
one step.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from making import make_checkpoint
from making_adapters import write_random

from mlx_llama import load
from mlx_llama.core.errors import CheckpointError, OptionsError, SessionError

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = make_checkpoint(folder / "base", max_position_embeddings=512)
    return base, [
        write_random(base, folder / name, seed) for seed, name in enumerate(("sea", "sky"))
    ]


@pytest.fixture(scope="module")
def llm(folders):
    base, adapters = folders
    return load(base, backend="cpu", dtype="float32", adapters=adapters)


def answer(llm, **options):
    return list(llm.generate(PROMPT, max_tokens=8, logit_bias={1: -100, 2: -100}, **options).tokens)


@pytest.fixture(scope="module")
def wanted(folders):
    """Tokens of a model without adapters, and of models with one."""
    base, adapters = folders
    return [
        answer(load(base, backend="cpu", dtype="float32", adapters=adapter))
        for adapter in (None, *adapters)
    ]


def test_the_option_names_the_adapter_and_the_first_is_the_default(llm, wanted):
    assert len({tuple(tokens) for tokens in wanted}) == 3
    assert answer(llm) == wanted[1]
    assert [answer(llm, adapter=name) for name in ("base", "sea", "sky")] == wanted
    done = llm.generate(PROMPT, max_tokens=1, adapter="sky")
    assert done.receipt()["options"]["adapter"] == "sky"
    with pytest.raises(OptionsError, match="there are sea, sky, base"):
        llm.generate(PROMPT, adapter="land")


def test_without_adapters_a_name_is_refused(folders):
    plain = load(folders[0], backend="cpu")
    with pytest.raises(OptionsError, match="none was loaded: load it with `adapters`"):
        plain.generate(PROMPT, adapter="sea")
    assert answer(plain, adapter="base") == answer(plain)


def test_requests_of_one_step_have_adapters_of_their_own(llm, wanted, monkeypatch):
    handles = [
        llm.submit(PROMPT, max_tokens=8, logit_bias={1: -100, 2: -100}, adapter=name)
        for name in ("sky", "base", "sea", "sky")
    ]
    step = Mock(wraps=llm.loop.engine.model.step)
    monkeypatch.setattr(llm.loop.engine.model, "step", step)
    answers = [list(handle.finish().tokens) for handle in handles]
    assert answers == [wanted[2], wanted[0], wanted[1], wanted[2]]
    assert max(len(call.kwargs["rows"]) for call in step.call_args_list) == 4


def test_a_prefix_is_reused_by_the_same_adapter_alone(folders):
    base, adapters = folders
    llm = load(base, backend="cpu", adapters=adapters)
    reused = [
        llm.generate(PROMPT, max_tokens=3, adapter=name).reused_tokens
        for name in ("sea", "base", "sky", "sky", "sea")
    ]
    assert reused[:3] == [0, 0, 0] and min(reused[3:]) >= len(PROMPT) - 1
    # copies a part of a kept row
    again = llm.generate([*PROMPT[:20], 7, 8], max_tokens=3, adapter="sky")
    assert again.reused_tokens == 20
    alone = load(base, backend="cpu", adapters=adapters[1])
    assert again.tokens == alone.generate([*PROMPT[:20], 7, 8], max_tokens=3).tokens


def test_saved_keys_and_values_belong_to_their_adapter(folders, tmp_path):
    base, adapters = folders
    llm = load(base, backend="cpu", adapters=adapters[0])
    llm.generate(PROMPT, max_tokens=3)
    llm.save_cache(tmp_path / "cache")
    for other in (None, adapters[1], f"{adapters[0]}=0.5"):
        with pytest.raises(SessionError, match="base with the adapter sea"):
            load(base, backend="cpu", adapters=other).load_cache(tmp_path / "cache")
    fresh = load(base, backend="cpu", adapters=adapters[0])
    assert fresh.load_cache(tmp_path / "cache") >= len(PROMPT)
    assert fresh.generate(PROMPT, max_tokens=3).reused_tokens == len(PROMPT) - 1


def test_a_conversation_keeps_its_adapter(llm, folders):
    base, adapters = folders
    alone = load(base, backend="cpu", dtype="float32", adapters=adapters[1])
    chat, judge = llm.chat(adapter="sky"), alone.chat()
    for question in ("hello", "and now?"):
        assert chat.send(question, max_tokens=6).text == judge.send(question, max_tokens=6).text
    assert chat.adapter == 2 and len(chat.cached_tokens) == len(judge.cached_tokens) > 0


def test_a_draft_model_guesses_without_the_adapter(folders, wanted):
    base, adapters = folders
    llm = load(base, backend="cpu", dtype="float32", adapters=adapters, draft_model=base)
    done = llm.generate(PROMPT, max_tokens=8, logit_bias={1: -100, 2: -100}, adapter="sky")
    assert list(done.tokens) == wanted[2]


def test_one_folder_or_several(folders):
    base, adapters = folders
    assert load(base, backend="cpu", adapters=str(adapters[0])).model.adapters == ("sea",)
    with pytest.raises(CheckpointError, match="choose an adapter's folder$"):
        load(base, backend="cpu", adapters=[base])
