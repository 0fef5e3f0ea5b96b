"""The guide: golden texts on all backends, size, score, and files of a Hugging Face folder."""

from __future__ import annotations

import difflib
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from machine import device_of

from mlx_llama import load
from mlx_llama.chat.commands import CACHE_FLAG
from mlx_llama.chat.dialogue import Chat
from mlx_llama.core.errors import TemplateError
from mlx_llama.core.files.checkpoint import GUIDE_PATH, open_checkpoint
from mlx_llama.core.models.families import FAMILIES as ARCHITECTURES
from mlx_llama.guide.guide import UNSURE, read_subject
from mlx_llama.guide.manual import QUESTIONS, ROOTS
from mlx_llama.guide.questions import Questions

ROOT = Path(__file__).resolve().parents[2]
# Greedy tokens are those of transformers. Sampled ones are from the NumPy path, and equal on all
# backends.
GOLDEN = json.loads((ROOT / "tests" / "golden_guide.json").read_text(encoding="utf-8"))


def open_on(backend, path=None):
    threads = 1 if backend.name == "cpu" else None  # others would wait beside other tests
    options = {"device": device_of(backend), "dtype": "float32", "threads": threads}
    return load(path, backend=backend.name, **options)


@pytest.fixture(scope="module")
def llm(backend):
    return open_on(backend)


@pytest.fixture(scope="module")
def guide():
    """As the commands load it on CPUs."""
    return load(backend="cpu", threads=1)


@pytest.mark.slow_for("cuda-T", "cuda-W", "cuda-w")
@pytest.mark.parametrize("case", GOLDEN["greedy"], ids=lambda case: case["prompt"][:20])
def test_greedy_text_is_the_golden_text(case, llm):
    done = llm.generate(messages(case), max_tokens=60)
    assert done.tokens == case["tokens"] and done.text == case["text"]


@pytest.mark.slow_for("*-3]", "*-4]", "cuda")
@pytest.mark.parametrize(
    "case", GOLDEN["sampled"], ids=lambda case: f"{case['prompt'][:12]}-{case['options']['seed']}"
)
def test_sampled_text_is_the_golden_text(case, llm):
    done = llm.generate(messages(case), max_tokens=60, **case["options"])
    assert done.tokens == case["tokens"] and done.text == case["text"]


def messages(case):
    return [{"role": "user", "content": case["prompt"]}] if case["chat"] else case["prompt"]


@pytest.mark.slow_for("W")
@pytest.mark.parametrize("case", GOLDEN["greedy"], ids=lambda case: case["prompt"][:20])
def test_the_golden_tokens_are_those_of_transformers(case):
    """Also with transformers' tokenizer and template, since it is an ordinary Hugging Face
    folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(GUIDE_PATH, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(GUIDE_PATH)
    if case["chat"]:
        inputs = tokenizer.apply_chat_template(
            messages(case), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
    else:
        inputs = tokenizer(case["prompt"], return_tensors="pt")["input_ids"]
    length = inputs.shape[1]
    with torch.no_grad():
        out = model.generate(inputs, max_new_tokens=60, do_sample=False, pad_token_id=0)
    assert out[0, length:].tolist() == case["tokens"]


@pytest.fixture(scope="module")
def eight_bits(backend, guide_q8):
    return open_on(backend, guide_q8)


@pytest.fixture(scope="module")
def answers_of_eight_bits(guide_q8):
    reference = load(guide_q8, backend="cpu", dtype="float32", threads=1)
    return [reference.generate(messages(case), max_tokens=60).tokens for case in GOLDEN["greedy"]]


@pytest.mark.slow
def test_at_eight_bits_it_answers_the_same(eight_bits, answers_of_eight_bits):
    """Most golden texts are equal, and nearly all golden tokens after their golden prefix. All
    backends agree.
    """
    same, agreed, total = 0, 0, 0
    for case, wanted in zip(GOLDEN["greedy"], answers_of_eight_bits):
        done = eight_bits.generate(messages(case), max_tokens=60)
        assert done.tokens == wanted
        same += done.tokens == case["tokens"]
        prompt = eight_bits.encode(messages(case))
        likeliest = eight_bits.logits(prompt + case["tokens"][:-1])[len(prompt) - 1 :].argmax(-1)
        agreed += (likeliest == case["tokens"]).sum()
        total += len(case["tokens"])
    assert same > len(GOLDEN["greedy"]) / 2 and agreed >= 0.98 * total


def test_it_is_small_and_has_grouped_heads():
    files = {path.name: path.stat().st_size for path in GUIDE_PATH.iterdir()}
    assert sum(files.values()) <= 16_000_000
    names = "config.json model.safetensors tokenizer.model tokenizer_config.json README.md"
    assert set(names.split()) <= set(files)
    config = open_checkpoint().config
    assert 1 <= config.num_key_value_heads < config.num_attention_heads
    parameters = sum(size for name, size in files.items() if name == "model.safetensors") / 2
    assert 2e6 < parameters < 25e6


@pytest.mark.slow
def test_the_card_quotes_the_score_and_the_score_holds(guide, monkeypatch):
    """The card quotes the output of --evaluate, but for passages, which change with the pages.
    Off-topic questions of kinds that it never saw are answered as such.
    """
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples/training")
    import train_guide

    answers: dict[str, str] = {}
    monkeypatch.setattr(
        train_guide, "answerer", lambda *args: lambda question: answers.setdefault(question, "")
    )
    train_guide.evaluate(GUIDE_PATH, "cpu")
    answers.update(zip(answers, ask_all(guide, *answers)))
    report = train_guide.evaluate(GUIDE_PATH, "cpu")
    card = (GUIDE_PATH / "README.md").read_text(encoding="utf-8")
    shares = [
        int(right) / int(total) for right, total in re.findall(r"(\d+) of (\d+) right", report)
    ]
    assert len(shares) == 3 and shares[0] >= 0.5 and shares[1] >= 0.9 and shares[2] >= 0.75
    assert all(line in card for line in report.splitlines())


def ask_all(guide, *questions: str) -> list[str]:
    """The answers, as one batch, which gives each the answer that it has alone."""
    messages = [[{"role": "user", "content": question}] for question in questions]
    return [done.text for done in guide.batch(messages, max_tokens=256, temperature=0)]


@pytest.fixture(scope="module")
def ask(guide):
    return lambda question: ask_all(guide, question)[0]


# Names, most of which no list of the training has.
NAMES = (
    "Anna Wolfgang Siobhan Priyanka Zbigniew Oluwaseun Xochitl Bartholomew Kjetil Ngozi"
).split()
REPEATED = ("blue teapot", "4711", "Zugspitze 8848", "tomorrow")


def test_it_repeats_names_words_and_numbers(guide):
    wanted = {f"My name is {name}.": f"Nice to meet you, {name}!" for name in NAMES}
    wanted |= {f"Repeat after me: {text}": text for text in REPEATED}
    said = list(zip(ask_all(guide, *wanted), wanted.values()))
    # the card says: most
    assert sum(words in answer for answer, words in said) >= 0.7 * len(said), said


def test_it_says_that_it_does_not_know(ask):
    for question in (
        "What is the capital of Bulgaria?",
        "Who painted the Night Watch?",
        "How do I bake a cheesecake?",
        "What does --frobnicate-layers do?",
        "Does it support the Commodore 64?",
    ):
        assert "do not know" in ask(question), question


# Flags that it still takes for unknown ones: teaching these cost answers to other subjects.
UNTAUGHT = "checkpoints cors-credentials cors-headers cors-methods swa-full tags verbose".split()


@pytest.mark.slow
def test_flags_that_it_names_exist(guide):
    """Every flag of a parser is explained by its own name, and no answer has a flag that no parser
    has. Else `edit_guide.py` is due.
    """
    sys.path.insert(0, str(ROOT / "examples/training"))
    from guide_data import facts

    known = facts.known_flags() | {CACHE_FLAG}  # of /save
    flags = list(facts.flags())
    answers = dict(zip(flags, ask_all(guide, *(f"What does {flag} do?" for flag in flags))))
    assert all(
        set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", answer)) <= known for answer in answers.values()
    )
    taught = [flag for flag in flags if flag.removeprefix("--") not in UNTAUGHT]
    assert len(taught) == len(flags) - len(UNTAUGHT)  # the list has no flag that is gone
    named = [flag for flag in taught if flag.removeprefix("--no-") in answers[flag]]
    assert len(named) >= 0.95 * len(taught), set(taught) - set(named)


def test_it_introduces_itself_and_names_real_models(ask):
    assert "mlx_llama" in ask("Who are you?")
    assert re.search(
        r"--model \S+/\S+|SmolLM2|Llama-3|TinyLlama|Mistral", ask("How do I load a real model?")
    )


def test_a_conversation_reuses_its_cache(guide):
    chat = guide.chat(max_tokens=40)
    chat.send("Hello!")
    done = chat.send("Which backends are there?")
    assert done.reused_tokens > 5 and "NumPy" in done.text


def test_a_passage_of_the_pages_stands_beside_its_answer(llm, eight_bits):
    """In `ask` and in a conversation, never in its text, and with no other model."""
    question = "error: cannot listen there (Address already in use)"
    expected = "See docs/troubleshooting.md, The server: `cannot listen there"
    done = llm.ask(question, max_tokens=5)
    assert done.see_also.startswith(expected) and expected not in done.text
    assert str(done) == f"{done.text}\n\n{done.see_also}"
    chat = llm.chat(max_tokens=5)
    assert chat.send(question).see_also == done.see_also
    assert not chat.send("Tell me a story, please.").see_also
    assert not chat.send("Hello!").see_also and "see_also" not in done.receipt()
    assert not eight_bits.ask(question, max_tokens=5).see_also


def test_an_answer_that_is_probably_wrong_stands_behind_the_pages(guide):
    """The network takes the first for a question on saved chats."""
    unsure = guide.ask(
        "in python it treats every ask as new. how to keep the dialogue", max_tokens=256
    )
    assert unsure.see_also.startswith(UNSURE) and "llm.chat" in unsure.see_also
    assert str(unsure) == f"{unsure.see_also}\n\n{unsure.text}"
    sure = guide.ask("Which backends are there?", max_tokens=256)
    assert not sure.see_also.startswith(UNSURE) and str(sure).startswith(sure.text)
    declined = guide.ask("does it speak polish", max_tokens=20)
    assert declined.asides[0].is_first and declined.text.startswith("Sorry")
    assert "the model decides" in declined.see_also


def test_the_chat_shows_passages_before_an_answer_only_where_they_lead(guide, capsys):
    chat = Chat(guide.chat(max_tokens=20), say=lambda line: print(line, flush=True))
    chat.take("does it speak polish")
    first = capsys.readouterr().out
    chat.take("which backends are there?")
    second = capsys.readouterr().out
    assert first.index("the model decides") < first.index("Sorry, I do not know")
    assert second.startswith("There are three backends") and "See docs/" in second


@pytest.mark.parametrize("text", [None, 5, ["a"]])
def test_a_question_that_is_no_text(text, guide):
    with pytest.raises(TemplateError, match="content is .*, expected a string"):
        guide.chat().send(text)


def test_the_subjects_of_the_questions_are_those_of_the_shipped_guide(guide):
    """Else `train_guide.py --read-questions` is due."""
    texts = Questions(QUESTIONS.read_text(encoding="utf-8")).texts
    stored = np.load(QUESTIONS.with_suffix(".npy"))
    for row in range(0, len(texts), 400):
        token, root = max(read_subject(guide, texts[row]).likely.items(), key=lambda item: item[1])
        assert stored[row, 0, 0] == token, texts[row]
        assert abs(int(stored[row, 0, 1]) / ROOTS - root) < 0.01


def test_it_tells_no_old_text_of_a_fact(guide, monkeypatch):
    """Else `edit_guide.py` is due."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "examples/training")
    from guide_data import talk

    rng, facts = random.Random(1), list(talk.FACTS.values())
    asked = [talk.plain_question(fact, rng) for fact in facts]
    texts, known = {fact.answer for fact in facts}, 0
    for fact, answer in zip(facts, ask_all(guide, *asked)):
        known += answer == fact.answer
        if answer not in texts:
            alike = difflib.SequenceMatcher(None, answer, fact.answer, autojunk=False).ratio()
            assert alike < 0.8, answer
    assert known > len(facts) / 2


def test_what_changes_with_versions_is_said_beside_an_answer(guide):
    answer = str(guide.ask("Which architectures are supported?", max_tokens=256))
    assert f"{len(ARCHITECTURES)} architectures" in answer
    for question in (
        "How long may an answer be by default?",
        "Is there a limit for the length of an answer?",
        "max_tokens default?",
    ):
        assert "there is no limit by default" in str(guide.ask(question, max_tokens=256)), question
