"""The guide's table of facts is consistent with itself, the package and the evaluated questions."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest

from mlx_llama import generate
from mlx_llama.bench import command as bench
from mlx_llama.chat import repl as chat
from mlx_llama.chat.commands import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/training"))

from guide_data import facts, fresh, stories, talk  # noqa: E402

GUIDE = ROOT / "mlx_llama" / "guide"


def every_way(line: str) -> set[str]:
    parts = re.split(r"(\[[^\[\]]*\|[^\[\]]*\])", line)
    choices = [part[1:-1].split("|") if re.fullmatch(r"\[.*\|.*\]", part) else [part] for part in parts]
    return {" ".join("".join(way).split()) for way in itertools.product(*choices)}


def test_answers_hold_their_keys_and_no_other_fact_counts_for_them():
    for fact in facts.FACTS:
        holders = [other.name for other in facts.FACTS if all(key in other.answer.lower() for key in fact.keys)]
        assert holders == [fact.name]
    assert all(key in answer for answer in facts.SCOPE_ANSWERS for key in facts.SCOPE_KEYS)


def test_a_question_leads_to_one_fact():
    leads: dict[str, str] = {}
    for fact in facts.FACTS:
        for line in talk.lines(fact.ask):
            for question in every_way(line.lstrip("! ")):
                assert leads.setdefault(talk.normal(question), fact.name) == fact.name, question


def test_questions_of_each_fact_are_held_out_in_every_variation():
    kept = 0
    for fact in facts.FACTS:
        trained, held_out = talk.split(fact)
        assert len(held_out) >= 3 and trained == talk.ASK[fact.name], fact.name
        ways = {talk.normal(way) for line in trained for way in every_way(line)}
        assert not ways & {talk.normal(way) for line in held_out for way in every_way(line)}, fact.name
        kept += len(held_out)
    assert len(talk.HELD_OUT) == kept + len(talk.lines(talk.SCOPE_HELD_OUT))


def test_held_out_and_fresh_questions_are_never_drawn():
    rng = random.Random(7)
    kept_out = set(talk.HELD_OUT) | {talk.normal(question) for _, question in fresh.FRESH}
    drawn = {talk.normal(text) for _ in range(4000) for role, text in talk.conversation(rng) if role == "user"}
    drawn |= {talk.normal(talk.one_question(rng)[0][1]) for _ in range(4000)}
    assert len(drawn) > 6000
    assert not drawn & kept_out


@pytest.mark.parametrize("disguise", ["{}", "Hey, {}?", "ok so {} here", "I have a question. {}!!"])
def test_a_held_out_question_is_seen_in_disguise(disguise):
    question = next(iter(talk.HELD_OUT))
    assert talk.is_held_out(disguise.format(question.upper()))


def test_flags_and_commands_in_the_answers_exist():
    known = {"--help", "-m", "-n", "-e"}
    for door in (bench, chat, generate):
        known |= {flag for action in door.parser()._actions for flag in action.option_strings}
    for fact in facts.FACTS:
        for text in (fact.answer, fact.more):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known, fact.name
            slashed = set(re.findall(r"`/([a-z]+)[ `]", text))
            assert slashed <= set(COMMANDS), fact.name


def test_the_same_seed_writes_the_same_text():
    one, two = random.Random(3), random.Random(3)
    assert [talk.conversation(one) for _ in range(50)] == [talk.conversation(two) for _ in range(50)]
    assert talk.raw_text(one) == talk.raw_text(two)


def test_a_story_keeps_its_request():
    text = stories.story(random.Random(1), hero="fox", adjective="brave", name="Tom", friend="polar-bear")
    assert "a brave fox" in text and "Tom" in text and "a polar bear" in text


def test_the_shipped_guide_is_small_and_complete():
    files = {path.name for path in GUIDE.iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.model",
                     "tokenizer_config.json", "chat_template.jinja", "README.md"}
    assert sum(path.stat().st_size for path in GUIDE.iterdir()) < 8e6


def test_the_shipped_guide_has_the_same_tokens_everywhere():
    transformers = pytest.importorskip("transformers")
    from mlx_llama.core.files.checkpoint import open_checkpoint
    from mlx_llama.core.text.template import encode_messages

    ours, theirs = open_checkpoint(GUIDE, None), transformers.AutoTokenizer.from_pretrained(GUIDE)
    rng = random.Random(5)
    for _ in range(40):
        messages = [{"role": role, "content": text} for role, text in talk.conversation(rng)]
        ids = encode_messages(ours.tokenizer, ours.template, messages)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    for text in ("Once upon", "  two spaces\n\tand a tab", "héllo 😀 日本語", "```python\nx = 1\n```"):
        assert ours.tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text
