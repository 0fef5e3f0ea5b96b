"""The guide's facts are complete, true to the package, consistent with themselves, and kept apart from the evaluated questions."""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_llama.__main__ import COMMANDS as DOORS
from mlx_llama.chat.commands import COMMANDS as REPL
from mlx_llama.core.generation.options import FIELDS, option_flags
from mlx_llama.core.models.architectures import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/training"))

from guide_data import copying, facts, fresh, stories, talk, thesaurus  # noqa: E402

GUIDE = ROOT / "mlx_llama" / "guide"
EVALUATION = ROOT / "examples" / "training" / "evaluation"


def every_way(line: str) -> set[str]:
    parts = re.split(r"(\[[^\[\]]*\|[^\[\]]*\])", line)
    choices = [part[1:-1].split("|") if re.fullmatch(r"\[.*\|.*\]", part) else [part] for part in parts]
    return {" ".join("".join(way).split()) for way in itertools.product(*choices)}


def fact_of(flag: str) -> facts.Fact:
    return next(fact for fact in talk.FACTS.values() if fact.name == flag or flag in fact.covers)


# ---- nothing is missing


@pytest.mark.parametrize("door", DOORS)
def test_every_flag_has_a_fact_that_names_it_and_its_commands(door):
    for action in facts.parsers()[door]._actions:
        if not action.option_strings or action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        name = next(one for one in action.option_strings if one.startswith("--"))
        fact = fact_of(name)
        assert any(one in fact.answer for one in action.option_strings)
        if name not in fact.covers:
            assert f"`{door}`" in fact.answer
        rng = random.Random(1)
        assert any(name in talk.question_about(fact, rng) for _ in range(2000)), f"no question names {name}"


def test_defaults_and_limits_are_those_of_the_options_table():
    assert "`--logprobs LOGPROBS`" in talk.FACTS["--logprobs"].answer
    assert "(default 0.0: greedy" in fact_of("--temp").answer and "`--top-k K` (default 0: all)" in fact_of("--top-k").answer
    for name, option in FIELDS.items():
        fact = fact_of(option_flags(name)[0])
        if fact.covers:  # written by hand
            continue
        answer = fact.answer
        assert option.description.split("(")[0].strip().lower()[:40] in answer.lower()
        if isinstance(option.default, (int, float)):
            assert f"(default: {option.default})" in answer


def test_every_command_of_the_shell_and_of_the_repl_has_a_fact():
    told = " ".join(fact.answer for fact in talk.FACTS.values())
    for door in DOORS:
        assert f"mlx_llama.{door}" in told
    for command in REPL:
        assert re.search(rf"`/{command}[ `]", told), command


def test_a_new_flag_a_new_command_and_a_new_architecture_are_told_without_anything_written(monkeypatch):
    parsers = facts.parsers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--frobnicate", metavar="N", help="twists of the flange (default: 3)")
    monkeypatch.setattr(facts, "parsers", lambda: parsers | {"chat": parser})
    monkeypatch.setattr(facts, "flags", facts.flags.__wrapped__)
    monkeypatch.setitem(facts.REPL, "twist", REPL["stats"])
    monkeypatch.setitem(facts.ARCHITECTURES, "GemmaForCausalLM", ARCHITECTURES["LlamaForCausalLM"])
    monkeypatch.setitem(facts.BY_MODEL_TYPE, "gemma", ARCHITECTURES["LlamaForCausalLM"])
    found = facts.every.__wrapped__()
    assert found["--frobnicate"].answer == "`--frobnicate N`: Twists of the flange (default: 3). In `chat`."
    assert found["/twist"].answer.startswith("`/twist` in the REPL: ")
    assert "`GemmaForCausalLM`" in found["supported"].answer


def test_models_that_do_not_load_are_those_of_no_architecture(monkeypatch):
    loads, fails = facts.describe_models()["supported"].split("Others do not")
    assert "Falcon" in fails and "Llama" in loads
    monkeypatch.setitem(facts.BY_MODEL_TYPE, "falcon", ARCHITECTURES["LlamaForCausalLM"])
    assert "Falcon" not in facts.describe_models()["supported"]


def test_blanks_for_flags_are_filled_and_unknown_ones_are_errors():
    assert facts.fill_flags("`{usage:--top-k}`: {--top-k} {--port}") == "`--top-k K`: 0 8080"
    for blank, error in (("{--frobnicate}", KeyError), ("{--host-name}", KeyError), ("{--logit-bias}", ValueError)):
        with pytest.raises(error):
            facts.fill_flags(blank)
    assert not any(re.search(r"\{(usage:)?--", fact.answer + fact.more) for fact in talk.FACTS.values())


def test_questions_of_a_fact_that_another_covers_lead_to_that_one():
    found = {"part": facts.Fact("part", joins="whole", ask=["a"], newcomers=["b"], topics=["t"]), "whole": facts.Fact("whole", ask=["c"])}
    facts.join_facts(found)
    assert list(found) == ["whole"]
    assert (found["whole"].ask, found["whole"].newcomers, found["whole"].topics) == (["c", "a"], ["b"], ["t"])


def test_a_subject_takes_its_members_with_what_joins_them():
    found = {"--x": facts.Fact("--x", ask=["a"], more="m"), "y": facts.Fact("y", joins="--x", ask=["b"]),
             "whole": facts.Fact("whole", members=["--x"])}
    facts.join_facts(found)
    assert list(found) == ["whole"]
    assert (found["whole"].ask, found["whole"].covers, found["whole"].more) == (["a", "b"], ["--x"], "m")
    with pytest.raises(KeyError):
        facts.join_facts({"whole": facts.Fact("whole", members=["missing"])})


# ---- nothing is stale


def test_flags_commands_and_scripts_in_the_answers_exist():
    foreign = {"--hosts", "--nproc-per-node"}  # flags of other programs
    known = facts.known_flags() | foreign | {"--cache"}
    short = {"-m", "-e", "-U"}  # python's and pip's
    for fact in talk.FACTS.values():
        for text in (fact.answer, fact.more):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known, fact.name
            assert set(re.findall(r"(?<![\w-])-[a-z]{1,3}(?![\w-])", text)) <= known | short, fact.name
            assert set(re.findall(r"mlx_llama\.([a-z]+)\b", text)) <= {*DOORS, "load"}, fact.name
            for path in re.findall(r"`((?:examples|mlx_llama|tests)/[\w./]+)`", text):
                assert (ROOT / path).exists(), f"{fact.name}: {path}"


def test_repl_commands_in_the_answers_exist():
    routes = {"completion", "tokenize", "detokenize", "props", "slots", "docs", "health", "ready", "metrics"}
    for fact in talk.FACTS.values():
        for text in (fact.answer, fact.more):
            assert set(re.findall(r"`/([a-z]+)[ `]", text)) <= {*REPL, *routes}, fact.name


def test_figures_of_itself_are_those_of_the_shipped_model():
    config = json.loads((GUIDE / "config.json").read_text())
    size = (GUIDE / "model.safetensors").stat().st_size
    assert facts.GUIDE_FIGURES == {"parameters": {3: "three", 4: "four"}[round(size / 2e6)],
                                   "layers": str(config["num_hidden_layers"]), "megabytes": f"{size / 1e6:.0f}"}
    assert f"number {config['vocab_size']}:" in str(talk.SMALL_TALK)


# ---- questions


def test_answers_differ_and_fit():
    answers = [fact.answer for fact in talk.FACTS.values()]
    assert len(set(answers)) == len(answers)
    assert all(len(answer) < 720 and len(answer.split()) <= 110 for answer in answers)
    starts = [tuple(answer.split()[:4]) for answer in answers if not answer.startswith("Sorry")]
    assert len(set(starts)) == len(starts)


def test_a_question_leads_to_one_fact():
    leads: dict[str, str] = {}
    for fact in talk.FACTS.values():
        for line in fact.ask + fact.newcomers + fact.held_out:
            for question in every_way(line):
                assert leads.setdefault(talk.normal(question), fact.name) == fact.name, question


def test_every_fact_can_be_asked_about_in_many_ways():
    rng = random.Random(2)
    for fact in talk.FACTS.values():
        assert len({talk.normal(talk.question_about(fact, rng)) for _ in range(150)}) > 60, fact.name


def test_held_out_lines_are_not_trained_in_any_variation():
    for fact in talk.FACTS.values():
        trained = {talk.normal(way) for line in fact.ask + fact.newcomers for way in every_way(line)}
        assert not trained & {talk.normal(way) for line in fact.held_out for way in every_way(line)}, fact.name
    assert len(talk.SCOPE_HELD_OUT) >= 50 and len(talk.HELD_OUT) >= 500


def test_held_out_and_fresh_questions_are_never_drawn():
    rng = random.Random(7)
    kept_out = set(talk.HELD_OUT) | {talk.normal(question) for _, question in fresh.FRESH}
    drawn = {talk.normal(text) for _ in range(3000) for role, text in talk.conversation(rng) if role == "user"}
    drawn |= {talk.normal(talk.one_question(rng)[0][1]) for _ in range(4000)}
    drawn |= {talk.normal(talk.long_question(rng)[0][1]) for _ in range(2000)}
    assert len(drawn) > 6000
    assert not drawn & kept_out


@pytest.mark.parametrize("disguise", ["{}", "Hey, {}?", "ok so {} here", "I have a question. {}!!"])
def test_a_held_out_question_is_seen_in_disguise(disguise):
    question = next(question for question in talk.HELD_OUT if len(question.split()) > 3)
    assert talk.is_held_out(disguise.format(question.upper()))


def test_unknown_flags_commands_and_models_are_unknown():
    rng = random.Random(4)
    for _ in range(300):
        assert talk.fill("{noflag}", rng) not in facts.known_flags()
        assert talk.fill("{nocommand}", rng).removeprefix("/") not in REPL


def test_the_same_seed_writes_the_same_text():
    one, two = random.Random(3), random.Random(3)
    assert [talk.conversation(one) for _ in range(50)] == [talk.conversation(two) for _ in range(50)]
    assert talk.raw_text(one) == talk.raw_text(two)


def test_names_words_and_numbers_are_answered_with_themselves():
    rng = random.Random(6)
    for _ in range(200):
        text, answer, name = talk.introduction(rng)
        assert name in text and name in answer
        (_, asked), (_, answer) = copying.echo(rng)[0]
        assert answer.removeprefix("Here you go: ") in asked
        messages, thing = copying.memory(rng, talk.earlier(rng, 1))
        assert thing in messages[-1][1] and any(thing in text for role, text in messages if role == "user")


def test_doubt_has_words_of_its_own():
    doubts = {name for name, fact in talk.FACTS.items() if fact.answer.startswith("Sorry")}
    assert {"unknown", "no_flag", "no_command"} <= doubts
    assert all(text.startswith(talk.DOUBT) for text in (talk.SCOPE_ANSWER, *(talk.FACTS[name].answer for name in doubts)))
    assert not any(text.startswith("Sorry") for answers, _ in talk.SMALL_TALK for text in answers)


def test_turns_on_other_subjects_go_before_a_question():
    rng = random.Random(9)
    for _ in range(50):
        assert [role for role, _ in talk.earlier(rng, 2)] == ["user", "assistant"] * 2


def test_situations_ask_nothing():
    told = [*talk.SITUATIONS, *(text for texts in talk.INTRODUCTIONS.values() for text in texts)]
    assert len(set(talk.SITUATIONS)) == len(talk.SITUATIONS) >= 400 and not any("?" in text for text in told)


def test_the_thesaurus_leaves_flags_and_quoted_code():
    rng = random.Random(10)
    text = "How do I `save the chat` with --stop or /load?"
    drawn = [thesaurus.reword(text, rng) for _ in range(100)]
    assert all("`save the chat`" in one and "--stop" in one and one.endswith("/load?") for one in drawn)
    assert "I stored three answers" in {thesaurus.reword("I saved three answers", rng) for _ in range(300)}
    assert thesaurus.inflect("stop")["ing"] == "stopping" and thesaurus.inflect("carry on")["s"] == "carries on"


def test_a_story_keeps_its_request():
    text = stories.story(random.Random(1), hero="fox", adjective="brave", name="Tom", friend="polar-bear")
    assert "a brave fox" in text and "Tom" in text and "a polar bear" in text


# ---- what is shipped


@pytest.mark.parametrize("part", ["", "2"])
def test_the_judged_questions_were_not_trained_on(part):
    judged = [json.loads(line) for line in (EVALUATION / f"answers{part}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(judged) == 200 and {one["verdict"] for one in judged} <= {"right", "half", "wrong", "unknown"}
    questions = [json.loads(line) for line in (EVALUATION / f"questions{part}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [one["question"] for one in judged] == [one["question"] for one in questions]
    trained = {talk.normal(line) for fact in talk.FACTS.values() for line in fact.ask + fact.newcomers}
    met = [one["question"] for one in questions if talk.normal(one["question"]) in trained]  # by chance, as other writers' lines
    assert [one["question"] for one in judged if one.get("met")] == met and len(met) <= 20
    verdicts = [one["verdict"] for one in judged if not one.get("met")]
    assert verdicts.count("right") >= 0.85 * len(verdicts) and verdicts.count("wrong") <= 0.05 * len(verdicts)


def test_shown_questions_stand_in_the_pages_and_are_not_held_out():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    for question in talk.SHOWN:
        assert question in shown and not talk.is_held_out(question), question


def test_the_shipped_guide_is_small_and_complete():
    files = {path.name for path in GUIDE.iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.model",
                     "tokenizer_config.json", "chat_template.jinja", "README.md"}
    assert sum(path.stat().st_size for path in GUIDE.iterdir()) < 16e6


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


# ---- the training


@pytest.mark.parametrize("doubted", [0.0, 0.2])
def test_the_beginnings_of_answers_are_learned_with_the_teachers_shares(doubted, monkeypatch):
    """The loss is torch's cross-entropy: of tokens, and of the shares that the answers give the next token where one begins."""
    pytest.importorskip("transformers")
    import torch
    import train_guide
    from guide_data import teacher
    from torch.nn.functional import cross_entropy
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokens = train_guide.Tokens(GUIDE)
    model = LlamaForCausalLM(LlamaConfig(**{**train_guide.SHAPE, "num_hidden_layers": 1, "initializer_range": 0.2})).eval()
    known = {name: row for row, name in enumerate({"".join(pair): None for pair in ("th", "to", "server", "model", "token", "speed")})}
    one = teacher.Teacher(known, torch.randn(len(known), 8), 2 * torch.randn(len(teacher.CLASSES), 8), torch.zeros(len(teacher.CLASSES)))
    begins = torch.tensor([tokens.encode(answer)[:train_guide.BEGIN] for answer in train_guide.ANSWERS])
    for inputs, targets, rows, _ in train_guide.batches(tokens, one, 1, 2048, train_guide.PART):
        if any(not row.asked for row in rows) and any(len(row.asked) > 1 for row in rows):
            break
    taught = [question for row in rows for question in row.asked]
    for row in rows:
        for first, fact, _ in row.asked:
            assert row.learn[first] and not row.learn[first - 1]
            assert fact < 0 or row.ids[first : first + 2] == begins[fact, :2].tolist()
    with torch.no_grad():
        logits = model(inputs).logits
        shares = train_guide.target_probabilities(taught, one, doubted)
        got = train_guide.loss_of(model, inputs, targets, rows, shares, begins)
        found, of_answers = [], iter(shares)
        for number, row in enumerate(rows):
            firsts, first, left = [question.first for question in row.asked], -1, {}
            for at in range(len(row.ids) - 1):
                if at + 1 in firsts:
                    first, left = at + 1, dict(enumerate(next(of_answers)))
                step, token = at + 1 - first, int(targets[number, at])
                if token < 0:
                    continue
                if first > 0 and step < train_guide.BEGIN:
                    wanted = torch.zeros(logits.shape[-1])
                    for answer, share in left.items():
                        wanted[begins[answer, step]] += share / sum(left.values())
                    left = {answer: share for answer, share in left.items() if begins[answer, step] == token}
                    found.append(cross_entropy(logits[number, at], wanted))
                else:
                    found.append(cross_entropy(logits[number, at], torch.tensor(token)))
        torch.testing.assert_close(got, torch.stack(found).mean(), rtol=1e-5, atol=1e-6)
        rows = [row._replace(asked=tuple(question for question in row.asked if question.fact >= 0)) for row in rows]
        monkeypatch.setattr(train_guide, "TEACHER_WEIGHT", 0.0)
        right = train_guide.target_probabilities([question for row in rows for question in row.asked], one, 0.0)
        plain = train_guide.loss_of(model, inputs, targets, rows, right, begins)
        torch.testing.assert_close(plain, cross_entropy(logits.flatten(0, 1), targets.flatten()), rtol=1e-5, atol=1e-6)
        nothing = train_guide.target_probabilities([], one, doubted)
        alone = train_guide.loss_of(model, inputs, targets, [row._replace(asked=()) for row in rows], nothing, begins)
        torch.testing.assert_close(alone, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_teacher_knows_words_by_their_parts():
    """Some thousand questions are enough for misspelt words that none of them has."""
    pytest.importorskip("torch")
    from guide_data import teacher

    one = teacher.train(8000, 32, 1, lambda text: None, epochs=24)
    asked = {"speculation": "speculatoin", "adapters": "adaptters", "cuda": "nvidai", "quantize": "quantzie"}
    names = list(teacher.CLASSES)
    for name, word in asked.items():
        assert word not in one.known
        assert names[one.probabilities([word])[0].argmax()] == name


@pytest.mark.slow
def test_a_stopped_training_goes_on_with_the_same_weights(tmp_path):
    pytest.importorskip("transformers")

    def command(name: str) -> list[str]:
        return [sys.executable, "examples/training/train_guide.py", "--steps", "60", "--batch", "256",
                "--questions", "2000", "--threads", "1", "--no-score",
                "--out", str(tmp_path / name), "--work", str(tmp_path / name / "work")]

    subprocess.run(command("whole"), cwd=ROOT, check=True, capture_output=True, timeout=600)
    with subprocess.Popen(command("stopped"), cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if (tmp_path / "stopped" / "work" / "checkpoint.pt").exists():
                break
        process.kill()
    done = subprocess.run(command("stopped"), cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    assert "goes on after step 50" in done.stderr
    whole, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == again
