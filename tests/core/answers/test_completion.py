"""Rates, receipt, summary and repr of a completion."""

from __future__ import annotations

import json

import pytest

from mlx_llama.core.answers.completion import Completion, Token, Writer
from mlx_llama.core.answers.schema import Schema
from mlx_llama.core.answers.stops import Stops
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import IncompleteAnswerError


def test_the_receipt_names_seed_options_and_origins(llm):
    done = llm.generate("Once", max_tokens=3, temperature=0.5)
    again = llm.generate("Once", max_tokens=3, temperature=0.5, seed=done.seed)
    assert again.tokens == done.tokens
    receipt = done.receipt()
    assert receipt["origins"]["temperature"] == "user" and receipt["origins"]["top_p"] == "default"
    assert receipt["options"]["max_tokens"] == 3 and receipt["evaluations_per_token"] == 1.0
    assert receipt["backend"] == "cpu" and "text" not in receipt
    assert json.loads(json.dumps(receipt))["tokens"] == done.tokens


def test_the_finish_reason_is_none_until_the_end(llm):
    stream = llm.stream("Once", max_tokens=9)
    assert stream.completion.finish_reason is None
    next(stream)
    assert stream.completion.finish_reason is None
    stream.close()
    assert stream.completion.finish_reason == "interrupted"
    done = llm.stream("Once", max_tokens=2)
    assert done.finish().finish_reason == "length"
    done.close()
    assert done.completion.finish_reason == "length"


def test_rates():
    counts = dict(prompt_tokens=30, reused_tokens=10, waits=11, read_bytes=44)
    done = Completion(tokens=[1] * 11, prefill_seconds=0.5, decode_seconds=2.0, **counts)
    assert done.prompt_tps == 40.0 and done.decode_tps == 5.0 and done.evaluations_per_token == 1.0
    assert done.bytes_per_token == 4.0
    empty = Completion()
    assert empty.prompt_tps == empty.decode_tps == 0.0
    assert empty.evaluations_per_token == empty.bytes_per_token == 0.0


def test_a_summary_has_speculation_and_notices_where_there_are_any():
    counts = dict(drafted=9, accepted=4, speculation_ended=7, notices=["a word"])
    done = Completion(tokens=[1], options={"speculate": "prompt"}, **counts)
    said = "speculation (prompt): 4 of 9 drafted tokens accepted, switched off after 7 tokens\n"
    assert said in done.summary()
    assert done.summary().endswith("\nnote: a word")
    assert "speculation" not in Completion(options={"speculate": "none"}).summary()


def test_a_repr_is_one_short_line():
    shown = repr(Completion("Hi\nyou", [1, 2], "eos"))
    assert shown == r"Completion('Hi\nyou', tokens=2, finish_reason='eos')"
    shown = repr(Completion("word " * 100, [1] * 200, "length"))
    assert len(shown) < 100 and "..." in shown and str(Completion("text")) == "text"


def test_an_answer_is_late_only_with_a_line_break(llm):
    """As llama.cpp's t_max_predict_ms: counted from the first token."""
    for text, wanted in (("a\nbcdef", "length"), ("abcdef", None)):
        decoder = llm.tokenizer.stream(starts_text=True)
        writer = Writer(Completion(), decoder=decoder, decode_seconds=3.5)
        for i, token in enumerate(llm.tokenizer.encode(text)):
            if writer.is_finished:
                break
            writer.push(token, 100.0 + i)
        assert writer.completion.finish_reason == wanted
        count = 5 if wanted == "length" else len(llm.tokenizer.encode(text))
        assert len(writer.completion.tokens) == count


@pytest.mark.parametrize("starts_text", [True, False])
def test_entries_join_to_the_text_before_any_stop_string(starts_text, llm):
    """The text without the stop string, cut by Python."""
    tokens = llm.tokenizer.encode("A café, naïve 日本: a tale of 🙂 tails", add_bos=False)
    text = llm.tokenizer.stream(starts_text=starts_text)
    text = "".join([*map(text.push, tokens)])
    stops = {text[at : at + n] for at in range(len(text)) for n in (1, 2, 3, 7)}
    for stop in ["never", *sorted(stops)]:
        decoder = llm.tokenizer.stream(starts_text=starts_text)
        writer = Writer(Completion(), decoder=decoder, stops=Stops((stop,)))
        for number, token in enumerate(tokens, 1):
            if not writer.is_finished:
                writer.push(token, 1.0, number == len(tokens), TokenLogprobs(-0.5))
        done = writer.completion
        entries = [entry for token in done.tokens for entry in token.entries]
        assert done.text == text.split(stop)[0]
        assert b"".join(entry.data for entry in entries).decode() == done.text, stop
        assert [entry.id for entry in entries] == tokens[: len(entries)]
        shown = 0
        for token in done.tokens:  # a stream has no entry before its text
            shown += len(token.text)
            assert all(entry.start <= shown for entry in token.entries)


def test_html_is_the_text_escaped():
    done = Completion('<script>alert(1)</script>\n& "é"', [1, 2], "eos<b>")
    shown = done._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\n&amp; &quot;é&quot;</div>" in shown
    assert "eos&lt;b&gt;" in shown
    assert "<script" not in shown and "<b>" not in shown and "pre-wrap" in shown


@pytest.mark.parametrize(
    "reason, said",
    [
        ("length", "reached `max_tokens` after 2 tokens"),
        ("context", "filled the context"),
        ("stop", "reached a stop string or token"),
        ("interrupted", "was interrupted"),
        ("error", "ended with an error"),
        ("repetition", r"was ended \(repetition\)"),
    ],
)
def test_a_cut_answer_is_not_parsed(reason, said):
    """Even if its text is JSON: 12 may be the beginning of 123."""
    cut = Completion(text="12", tokens=[Token(1), Token(2)], finish_reason=reason)
    assert cut.parsed is None  # without a schema
    cut.schema = Schema.of({"type": "integer"})
    with pytest.raises(IncompleteAnswerError, match=f"^parsed: the answer {said}"):
        print(cut.parsed)
    cut.finish_reason = None
    assert cut.parsed is None
    cut.finish_reason = "eos"
    assert cut.parsed == 12
