"""Thoughts in Python: split off, switched, bounded; the rule of the answer applies after them.

A forced end is judged by generation without thoughts from the tokens that it should leave.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from scripting import Script, make_scripted_checkpoint
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_llama import load
from mlx_llama.core.answers.completion import Completion, Writer
from mlx_llama.core.answers.stops import Stops
from mlx_llama.core.answers.thinking import has_switch, set_switches
from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.text.thoughts import Thought, find_thoughts

TEMPLATES = Path(__file__).resolve().parents[2] / "data/thought-templates"
QUESTION = [{"role": "user", "content": "Hello?"}]
THOUGHT, TEXT = "They greet me.\nI greet them.", "Hello, and <think> well.</think>"
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{TEXT}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_switches_of_templates():
    sources = {path.stem: path.read_text() for path in TEMPLATES.glob("*.jinja")}
    granite = "{%- if thinking %}write <think></think> and <response></response>{%- endif %}"
    deepseek = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}<think>"
    switched = {name for name, source in sources.items() if has_switch(source)}
    assert switched == {"qwen3"} and has_switch(granite) and has_switch(deepseek)
    assert not has_switch("{% if thinking %}")  # without thoughts
    assert not has_switch("<think>{% if message.thinking is defined %}")  # no switch but a field


def test_templates_that_expect_their_switch_to_be_set_think(qwen):
    """llama.cpp's copies of R1's and QwQ's templates end the thought where it is not."""
    bare = "<think>{% if not enable_thinking %}</think>{% endif %}"
    guarded = "{% if not enable_thinking is defined %}{% set enable_thinking = 1 %}{% endif %}"
    for source, reasoning, wanted in (
        (bare, "auto", True),
        (bare, "off", False),
        (guarded + bare, "auto", None),
        (qwen.template.source, "auto", None),
    ):
        options = GenerationOptions(reasoning=reasoning)
        assert set_switches(source, options, {}).get("enable_thinking") is wanted
        chosen = set_switches(source, options, {"enable_thinking": "by the request"})
        assert chosen["enable_thinking"] == "by the request"


def make(folder, template: str, **load_options):
    folder = make_scripted_checkpoint(folder, (TEMPLATES / f"{template}.jinja").read_text())
    return load(folder, **{"backend": "cpu"} | load_options)


def render(llm, messages, **variables) -> str:
    """The prompt by transformers."""
    how = dict(chat_template=llm.template.source, add_generation_prompt=True, **variables)
    return render_jinja_template(conversations=[[*messages]], **how)[0][0]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make(tmp_path_factory.mktemp("qwen") / "m", "qwen3")


@pytest.fixture(scope="module")
def r1(tmp_path_factory, where):
    """Its template opens a thought, which a random model never ends."""
    return make(tmp_path_factory.mktemp("r1") / "m", "r1", **where)


def closing(llm) -> list[int]:
    """Judged by the template: the tokens that end an empty thought, as Qwen3's template does."""
    start = len(llm.tokenizer.encode_parts(["<think>"]))
    return llm.tokenizer.encode_parts(["<think>", "\n</think>\n\n"])[start:]


def test_a_completion_has_its_thought_apart(qwen):
    with Script(qwen, ANSWER):
        completion = qwen.ask("Hello?")
    assert (completion.text, completion.reasoning) == (TEXT, THOUGHT)
    thoughts = [token for token in completion.tokens if token.thought]
    assert 0 < len(thoughts) <= completion.reasoning_tokens < len(completion.tokens)
    assert "".join(token.thought for token in completion.tokens) == THOUGHT
    assert "".join(token.text for token in completion.tokens) == TEXT
    assert completion.receipt()["reasoning_tokens"] == completion.reasoning_tokens
    assert "reasoning" not in completion.receipt()
    assert f"({completion.reasoning_tokens} of a thought)" in completion.summary()


def test_pieces_tell_their_kind_and_the_old_iterator_has_the_text(qwen):
    with Script(qwen, ANSWER, ANSWER):
        assert "".join(qwen.stream(QUESTION)) == TEXT
        pieces = list(qwen.stream(QUESTION).pieces())
    kinds = [isinstance(piece, Thought) for piece in pieces]
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) == 2
    calls: list[tuple[str, str]] = []
    with Script(qwen, ANSWER, ANSWER):
        qwen.generate(QUESTION, on_piece=lambda *call: calls.append(call))
        qwen.chat(on_piece=lambda *call: calls.append(call)).send("Hello?")
    shown = [(str(getattr(piece, "text", piece)), kind) for piece, kind in zip(pieces, kinds)]
    assert calls == [(text, "thought" if kind else "text") for text, kind in shown] * 2
    assert "".join(piece.text for piece in pieces if isinstance(piece, Thought)) == THOUGHT
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == TEXT


def test_batches_and_stop_strings_concern_the_answer(qwen):
    with Script(qwen, ANSWER, "Hi."):
        first, second = qwen.batch([QUESTION, QUESTION], stop="greet")  # a word of the thought
    assert (first.text, first.reasoning) == (TEXT, THOUGHT)
    assert (second.text, second.reasoning, second.reasoning_tokens) == ("Hi.", "", 0)
    with Script(qwen, ANSWER):
        cut = qwen.generate(QUESTION, stop="well")
    assert (cut.text, cut.reasoning, cut.stop) == ("Hello, and <think> ", THOUGHT, "well")


def test_raw_leaves_them_in_the_text_and_off_uses_the_templates_switch(qwen):
    with Script(qwen, ANSWER, "Hi.", "Hi.", "Hi.") as script:
        raw = qwen.ask("Hello?", reasoning="raw")
        assert (raw.text, raw.reasoning) == (ANSWER, "")
        for options in ({"reasoning": "off"}, {"reasoning_budget": 0}, {"reasoning": "on"}):
            assert qwen.ask("Hello?", **options).text == "Hi."
    on = qwen.encode(QUESTION)
    off = qwen.encode(QUESTION, enable_thinking=False)
    texts = [qwen.tokenizer.decode(tokens, skip_special=False) for tokens in (on, off, off, on)]
    assert script.prompts == texts and texts[1].endswith("<think>\n\n</think>\n\n")
    assert texts[1].endswith(render(qwen, QUESTION, enable_thinking=False))
    with pytest.raises(OptionsError, match="reasoning"):
        qwen.ask("Hello?", reasoning="loud")
    with pytest.raises(OptionsError, match="at least -1"):
        qwen.ask("Hello?", reasoning_budget=-2)


def test_a_session_gives_its_thoughts_to_the_template_and_reuses_the_prefix(qwen):
    chat = qwen.chat(max_tokens=200)
    with Script(qwen, ANSWER, "Good.") as script:
        first = chat.send("Hello?")
        answer = {"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT}
        assert chat.messages[-1] == answer
        second = chat.send("How are you?")
    asked = [*chat.messages[:2], {"role": "user", "content": "How are you?"}]
    assert script.prompts[1].endswith(render(qwen, asked))
    assert THOUGHT not in script.prompts[1] and TEXT[:6] in script.prompts[1]  # Qwen3 drops it
    assert second.reused_tokens == first.prompt_tokens


def test_a_session_keeps_a_thought_that_was_cut_and_resumes_it(r1, tmp_path):
    options = {"max_tokens": 32, "reasoning_budget": 9}
    whole = r1.chat().send("Hello?", **options)
    chat = r1.chat()
    first = chat.send("Hello?", max_tokens=7, reasoning_budget=9)
    assert first.text == "" and first.reasoning and first.finish_reason == "length"
    second = chat.resume(max_tokens=25, reasoning_budget=9).finish()
    assert [*first.tokens, *second.tokens] == whole.tokens
    assert (second.text, second.reasoning) == (whole.text, whole.reasoning)
    chat.save(tmp_path / "session.json")
    again = r1.chat()
    again.load(tmp_path / "session.json")
    assert again.messages == chat.messages and again.messages[-1]["reasoning_content"]
    resumed = again.resume(max_tokens=3).finish()  # after a thought that was ended
    assert resumed.text.startswith(whole.text.strip()) and not resumed.reasoning


@pytest.mark.parametrize("budget", [1, 7])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}, {"logprobs": 2}])
def test_the_end_of_a_thought_is_forced_when_its_budget_is_spent(r1, budget, options):
    prompt = r1.encode(QUESTION)
    free = r1.generate(QUESTION, max_tokens=32, **options)
    assert free.text == "" and free.reasoning_tokens == 32
    bounded = r1.generate(QUESTION, max_tokens=32, reasoning_budget=budget, **options)
    decoder = r1.tokenizer.stream()
    thought = "".join(map(decoder.push, free.tokens[:budget]))
    while decoder.is_within_character:
        thought += decoder.push(free.tokens[budget])
        budget += 1
    left = [*free.tokens[:budget], *closing(r1)]
    assert bounded.tokens[: len(left)] == left
    assert bounded.reasoning == thought.strip()
    if not options.get("temperature"):  # what follows is what the model makes of these tokens
        rest = r1.generate([*prompt, *left], max_tokens=32 - len(left))
        assert bounded.tokens[len(left) :] == rest.tokens
    assert bounded.text


@pytest.mark.parametrize("speculate", ["prompt", "model"])
def test_a_budget_beside_speculation_gives_the_same_tokens(r1, where, speculate, tmp_path):
    draft = {"draft_model": r1.checkpoint.path} if speculate == "model" else {}
    llm = make(tmp_path / "m", "r1", **where, **draft)
    options = {"max_tokens": 24, "speculate": speculate}
    for budget in (1, 5, 9, 100):
        bounded = llm.generate(QUESTION, reasoning_budget=budget, **options)
        plain = r1.generate(QUESTION, max_tokens=24, reasoning_budget=budget)
        assert (bounded.tokens, bounded.reasoning) == (plain.tokens, plain.reasoning)
        assert not any("speculation" in notice for notice in bounded.notices)
        assert bounded.drafted > 0 or speculate == "prompt"


def test_a_budget_that_is_not_spent_changes_nothing(r1):
    free = r1.generate(QUESTION, max_tokens=16)
    bounded = r1.generate(QUESTION, max_tokens=16, reasoning_budget=16)
    assert bounded.tokens == free.tokens and bounded.reasoning == free.reasoning
    if r1.backend.runs_ahead:  # and costs no waiting
        assert bounded.launches == free.launches


def test_no_thought_where_the_template_opens_it_and_has_no_switch(r1):
    prompt = [*r1.encode(QUESTION), *closing(r1)]
    judge = r1.generate(prompt, max_tokens=8)
    for options in ({"reasoning": "off"}, {"reasoning_budget": 0}):
        completion = r1.generate(QUESTION, max_tokens=8, **options)
        assert completion.tokens == judge.tokens and completion.prompt_tokens == len(prompt)
        assert completion.text.strip() and not completion.reasoning


def test_a_schema_applies_after_the_thought(r1):
    free = r1.generate(QUESTION, max_tokens=5)
    completion = r1.generate(QUESTION, max_tokens=200, reasoning_budget=5, schema=SCHEMA)
    assert completion.finish_reason == "eos" and completion.reasoning
    assert json.loads(completion.text) == completion.parsed
    left = [*free.tokens, *closing(r1)]
    assert completion.tokens[: len(left)] == left
    judge = r1.generate([*r1.encode(QUESTION), *left], max_tokens=200, schema=SCHEMA)
    assert judge.text == completion.text


def begin_thought(llm):
    """Makes the model write the mark first, and its end after five tokens."""
    start = llm.tokenizer.encode("<think>", parse_special=True)
    end = find_thoughts(llm.template.source).encode(llm.tokenizer, "</think>")
    prompt = len(llm.encode(QUESTION))

    def process(tokens, logits):
        at = len(tokens) - prompt
        script = {**dict(enumerate(start)), **dict(enumerate(end, len(start) + 5))}
        if at in script:
            chosen = np.full_like(logits, -50)
            chosen[0, script[at]] = 50
            return np.where(np.isfinite(logits), chosen, logits)
        return logits

    return process


def test_a_model_that_begins_to_think_has_its_schema_afterwards(qwen):
    """The mark is several tokens here, the first of which may begin a JSON text too."""
    begin = begin_thought(qwen)
    completion = qwen.ask("Hello?", max_tokens=200, schema=SCHEMA, logits_processor=begin)
    assert completion.finish_reason == "eos" and completion.parsed and completion.reasoning
    plain = qwen.ask("Hello?", max_tokens=200, schema=SCHEMA)  # it need not think
    assert plain.parsed and not plain.reasoning
    regex = qwen.ask("Hello?", max_tokens=50, regex="<t[a-c]{3}")  # begins as the mark does
    assert len(regex.text) == 5 and regex.text.startswith("<t") and not regex.reasoning


def test_a_forced_tool_is_called_after_the_thought(qwen):
    def count(a: int) -> int:
        """Count."""
        return a

    options = dict(max_tokens=400, temperature=1.0, seed=1, reasoning_budget=4)
    stream = qwen.respond(QUESTION, [count], "count", **options)
    stream.finish()
    assert stream.calls[0].name == "count" and stream.calls[0].is_complete


def _with_objects(messages):
    """Messages with the arguments of calls as templates take them."""
    checked = json.loads(json.dumps(messages))
    for call in (call for message in checked for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return checked


def test_a_thought_between_calls_is_what_the_template_makes_of_it(qwen):
    """Qwen3's template shows the thoughts of a turn's calls, and drops those of earlier turns."""

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    first = f"<think>\nI need a sum.\n</think>\n\n{call}"
    second = "<think>\nIt is 3.\n</think>\n\nThree."
    chat = qwen.chat(tools=[add], max_tokens=300)
    with Script(qwen, first, second, "Bye.") as script:
        stream = chat.stream("1 + 2?")
        pieces = list(stream.pieces())
        chat.send("Thanks.")
    assert "".join(piece for piece in pieces if isinstance(piece, str)) == "Three."
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    assert thoughts == "I need a sum.It is 3."
    thoughts = [message.get("reasoning_content") for message in chat.messages]
    assert thoughts == [None, "I need a sum.", None, "It is 3.", None, None]
    tools = [tool.as_dict() for tool in chat.toolbox.tools]
    assert script.prompts[1].endswith(render(qwen, _with_objects(chat.messages[:3]), tools=tools))
    assert f"<think>\nI need a sum.\n</think>\n\n{call}" in script.prompts[1]
    assert "I need a sum." not in script.prompts[2] and "Three." in script.prompts[2]


def test_thoughts_beside_other_requests_keep_their_bits(r1):
    """Rows with budgets, schemas and neither in one batch."""
    requests = [
        {"reasoning_budget": 5, "max_tokens": 24},
        {"max_tokens": 24},
        {"reasoning_budget": 3, "schema": SCHEMA, "max_tokens": 200},
        {"reasoning": "off", "max_tokens": 12},
    ]
    alone = [r1.generate(QUESTION, **options) for options in requests]
    handles = [r1.submit(QUESTION, **options) for options in requests]
    together = [handle.finish() for handle in handles]
    for single, other in zip(alone, together, strict=True):
        assert (single.text, single.reasoning) == (other.text, other.reasoning)
        assert single.tokens == other.tokens


ANSWERS = {  # what a model may write, by template
    "qwen3": [
        ANSWER,
        "<b>is no thought</b>: a < b, 日本 🙂",
        "\n\n <thin",
        "<think>日本 🙂</think>\n\n日本 🙂 ends",
    ],
    "harmony": [
        "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant<|channel|>final<|message|>"
        "if(a<b) < 🙂 <|",
        "if(a<b)",
    ],
    "granite": ["<think>Hm</think>\n<response>a <b <resp 🙂 and<", "no marks <respond"],
}


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_entries_join_to_the_text_of_an_answer_without_its_thought(qwen, name):
    """Tokens of random pieces; the text is split off as a whole and cut by Python."""
    source = {
        "qwen3": qwen.template.source,
        "harmony": "<|channel|>analysis",
        "granite": "<think><response></response>",
    }[name]
    form, tokenizer = find_thoughts(source), qwen.tokenizer
    for seed in range(60):
        draw = random.Random(seed)
        answer = ANSWERS[name][seed % len(ANSWERS[name])]
        places = sorted(draw.sample(range(1, len(answer)), min(len(answer) - 1, seed % 9)))
        pieces = [answer[a:b] for a, b in zip([0, *places], [*places, None])]
        tokens = tokenizer.encode_parts(pieces)
        decoder = tokenizer.stream(starts_text=True)
        parts = form.parser().push("".join(map(decoder.push, tokens)), is_last=True)
        text = "".join(part for part in parts if isinstance(part, str))
        assert text
        at = draw.randrange(len(text))
        for stop in ("never", text[at : at + draw.choice([1, 2, 7])]):
            decoder = tokenizer.stream(starts_text=True)
            writer = Writer(
                Completion(), decoder=decoder, stops=Stops((stop,)), thoughts=form.parser()
            )
            for number, token in enumerate(tokens, 1):
                if not writer.is_finished:
                    is_last = number == len(tokens)
                    writer.push(token, 1.0, is_last, TokenLogprobs(-0.5))
            done = writer.completion
            entries = [entry for token in done.tokens for entry in token.entries]
            assert done.text == text.split(stop)[0], (seed, stop)
            assert b"".join(entry.data for entry in entries).decode() == done.text, (seed, stop)
            assert [entry.start for entry in entries] == sorted(entry.start for entry in entries)
