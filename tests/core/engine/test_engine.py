"""From tokens to text: end tokens, stop strings, pieces; options that a model refuses."""

from __future__ import annotations

from making import make_checkpoint

from mlx_llama import load


def test_eos_of_the_model_ends_and_is_not_text(where, toy):
    llm = load(toy, **where)
    first = llm.generate("Once", max_tokens=8).tokens
    always = llm.generate("Once", max_tokens=8, logit_bias={2: 1000.0})
    assert (always.tokens, always.text, always.finish_reason) == ([2], "", "eos")
    assert len(first) == 8


def test_every_eos_id_ends(tmp_path):
    folder = make_checkpoint(tmp_path / "m", eos_token_id=[2, 77])
    (folder / "generation_config.json").write_text('{"eos_token_id": [88]}')
    llm = load(folder, backend="cpu")
    for token in (2, 77, 88):
        done = llm.generate("Once", max_tokens=8, logit_bias={token: 1000.0})
        assert (done.tokens, done.finish_reason) == ([token], "eos")


def test_pieces_are_the_text(llm):
    stream = llm.stream("Once upon", max_tokens=50, temperature=1.0, seed=9)
    assert "".join(stream) == stream.completion.text
    assert stream.completion.text == llm.tokenizer.decode(stream.completion.tokens)
    # A continued text keeps its spaces; an answer begins without the one that sentencepiece puts
    # before a text.
    space = llm.tokenizer.encode("a llama")[1]
    assert llm.tokenizer.decode([5, space]) != llm.tokenizer.decode([5]) + llm.tokenizer.decode(
        [space]
    )
    for prompt, text in (
        ("Once", " llama"),
        ([1, 60], " llama"),
        ([{"role": "user", "content": "x"}], "llama"),
        ("", "llama"),
    ):
        assert llm.generate(prompt, max_tokens=1, logit_bias={space: 1e4}).text == text
