"""The guide's facts are complete, true to the package, consistent with themselves, and kept apart
from the evaluated questions.
"""

import argparse
import itertools
import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

from mlx_llama import load
from mlx_llama.__main__ import COMMANDS as DOORS
from mlx_llama.chat.commands import COMMANDS as REPL, OTHER_NAMES
from mlx_llama.cli.flags import flags_of
from mlx_llama.core.models.families import FAMILIES
from mlx_llama.core.options import FIELDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/training"))

from guide_data import facts, fresh, read_lines, talk  # noqa: E402

GUIDE = ROOT / "mlx_llama" / "guide"


def every_way(line: str) -> set[str]:
    parts = re.split(r"(\[[^\[\]]*\|[^\[\]]*\])", line)
    choices = [
        part[1:-1].split("|") if re.fullmatch(r"\[.*\|.*\]", part) else [part] for part in parts
    ]
    return {" ".join("".join(way).split()) for way in itertools.product(*choices)}


def fact_of(flag: str) -> facts.Fact:
    return next(fact for fact in talk.FACTS.values() if fact.name == flag or flag in fact.covers)


# ---- nothing is missing


@pytest.mark.parametrize("door", DOORS)
def test_every_flag_has_a_fact_that_names_it_and_its_commands(door):
    for action in facts.parsers()[door]._actions:
        if not action.option_strings or action.dest == "help" or action.help == argparse.SUPPRESS:
            continue
        name = next(flag for flag in action.option_strings if flag.startswith("--"))
        fact = fact_of(name)
        assert any(flag in fact.answer for flag in action.option_strings)
        if name not in fact.covers:
            assert f"`{door}`" in fact.answer
        rng = random.Random(1)
        assert any(name in talk.question_about(fact, rng) for _ in range(2000)), (
            f"no question names {name}"
        )


def test_defaults_and_limits_are_those_of_the_options_table():
    assert "`--logprobs LOGPROBS`" in talk.FACTS["--logprobs"].answer
    assert "(default 0.0: greedy" in fact_of("--temp").answer
    assert "`--top-k K` (default 0: all)" in fact_of("--top-k").answer
    for name, option in FIELDS.items():
        fact = fact_of(flags_of(name)[0])
        if fact.covers:  # written by hand
            continue
        answer = fact.answer
        assert option.description.split("(")[0].strip().lower()[:40] in answer.lower()
        if isinstance(option.default, (int, float)):
            assert f"(default: {option.default})" in answer


def test_every_command_of_the_shell_and_of_the_repl_has_a_fact():
    answers = " ".join(fact.answer for fact in talk.FACTS.values())
    for door in DOORS:
        assert f"mlx_llama.{door}" in answers
    for command in REPL:
        names = [command, *(other for other, meant in OTHER_NAMES.items() if meant == command)]
        names = filter(str.isalpha, names)
        assert any(re.search(rf"`/{name}[ `]", answers) for name in names), command


def test_a_new_flag_a_new_command_and_a_new_architecture_are_told_without_anything_written(
    monkeypatch,
):
    parsers = facts.parsers()
    parser = argparse.ArgumentParser()
    parser.add_argument("--frobnicate", metavar="N", help="twists of the flange (default: 3)")
    monkeypatch.setattr(facts, "parsers", lambda: parsers | {"chat": parser})
    monkeypatch.setattr(facts, "flags", facts.flags.__wrapped__)
    monkeypatch.setitem(facts.REPL, "twist", REPL["stats"])
    monkeypatch.setitem(facts.ARCHITECTURES, "GemmaForCausalLM", FAMILIES["LlamaForCausalLM"])
    monkeypatch.setitem(facts.BY_MODEL_TYPE, "gemma", FAMILIES["LlamaForCausalLM"])
    known = facts.every.__wrapped__()
    answer = "`--frobnicate N`: Twists of the flange (default: 3). In `chat`."
    assert known["--frobnicate"].answer == answer
    assert known["/twist"].answer.startswith("`/twist` in the REPL: ")
    assert "`GemmaForCausalLM`" in known["supported"].answer


def test_models_that_do_not_load_are_those_of_no_architecture(monkeypatch):
    loads, fails = facts.describe_models()["supported"].split("Others do not")
    assert "Falcon" in fails and "Llama" in loads
    monkeypatch.setitem(facts.BY_MODEL_TYPE, "falcon", FAMILIES["LlamaForCausalLM"])
    assert "Falcon" not in facts.describe_models()["supported"]


def test_blanks_for_flags_are_filled_and_unknown_ones_are_errors():
    assert facts.fill_flags("`{usage:--top-k}`: {--top-k} {--port}") == "`--top-k K`: 0 8080"
    for blank, error in (
        ("{--frobnicate}", KeyError),
        ("{--host-name}", KeyError),
        ("{--logit-bias}", ValueError),
    ):
        with pytest.raises(error):
            facts.fill_flags(blank)
    assert not any(
        re.search(r"\{(usage:)?--", fact.answer + fact.more) for fact in talk.FACTS.values()
    )


def test_a_subject_takes_its_members_with_what_joins_them():
    known = {
        "--x": facts.Fact("--x", ask=["a"], more="m"),
        "y": facts.Fact("y", joins="--x", ask=["b"]),
        "whole": facts.Fact("whole", members=["--x"]),
    }
    facts.join_facts(known)
    assert list(known) == ["whole"]
    assert known["whole"].ask == ["a", "b"] and known["whole"].covers == ["--x"]
    assert known["whole"].more == "m"
    with pytest.raises(KeyError):
        facts.join_facts({"whole": facts.Fact("whole", members=["missing"])})


# ---- nothing is stale


def test_flags_commands_and_scripts_in_the_answers_exist():
    foreign = {"--hosts", "--nproc-per-node", "--all"}  # flags of other programs
    known = facts.known_flags() | foreign | {"--cache"}
    short = {"-m", "-e", "-U"}  # python's and pip's
    for fact in talk.FACTS.values():
        for text in (fact.answer, fact.more):
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known, fact.name
            named = set(re.findall(r"(?<![\w-])-[a-z]{1,3}(?![\w-])", text))
            assert named <= known | short, fact.name
            assert set(re.findall(r"mlx_llama\.([a-z]+)\b", text)) <= {*DOORS, "load"}, fact.name
            for path in re.findall(r"`((?:examples|mlx_llama|tests)/[\w./]+)`", text):
                assert (ROOT / path).exists(), f"{fact.name}: {path}"


def test_repl_commands_in_the_answers_exist():
    routes = "completion tokenize detokenize props slots docs health live ready metrics".split()
    for fact in talk.FACTS.values():
        for text in (fact.answer, fact.more):
            named = set(re.findall(r"`/([a-z]+)[ `]", text))
            assert named <= {*REPL, *OTHER_NAMES, *routes}, fact.name


def test_figures_of_itself_are_those_of_the_shipped_model():
    config = json.loads((GUIDE / "config.json").read_text())
    size = (GUIDE / "model.safetensors").stat().st_size
    assert {
        "parameters": {3: "three", 4: "four"}[round(size / 2e6)],
        "layers": str(config["num_hidden_layers"]),
        "megabytes": f"{size / 1e6:.0f}",
    } == facts.GUIDE_FIGURES
    assert f"number {config['vocab_size']}:" in str(talk.SMALL_TALK)


# ---- questions


def test_a_question_leads_to_one_fact():
    leads: dict[str, str] = {}
    for fact in talk.FACTS.values():
        for line in fact.ask + fact.newcomers + fact.held_out:
            for question in every_way(line):
                assert leads.setdefault(talk.normal(question), fact.name) == fact.name, question


def test_held_out_lines_are_not_trained_in_any_variation():
    for fact in talk.FACTS.values():
        trained, held_out = (
            {talk.normal(way) for line in lines for way in every_way(line)}
            for lines in (fact.ask + fact.newcomers, fact.held_out)
        )
        assert not trained & held_out, fact.name
    assert len(talk.SCOPE_HELD_OUT) >= 50 and len(talk.HELD_OUT) >= 500


def test_held_out_and_fresh_questions_are_never_drawn():
    rng = random.Random(7)
    kept_out = set(talk.HELD_OUT) | {talk.normal(question) for _, question in fresh.FRESH}
    drawn = {
        talk.normal(text)
        for _ in range(3000)
        for role, text in talk.conversation(rng)
        if role == "user"
    }
    drawn |= {talk.normal(talk.one_question(rng)[0][1]) for _ in range(4000)}
    drawn |= {talk.normal(talk.long_question(rng)[0][1]) for _ in range(2000)}
    assert len(drawn) > 6000
    assert not drawn & kept_out


@pytest.mark.parametrize("disguise", ["{}", "Hey, {}?", "ok so {} here", "I have a question. {}!!"])
def test_a_held_out_question_is_seen_in_disguise(disguise):
    question = next(question for question in talk.HELD_OUT if len(question.split()) > 3)
    assert talk.is_held_out(disguise.format(question.upper()))


# ---- what is shipped


@pytest.mark.parametrize("part", ["", "2"])
def test_the_judged_questions_were_not_trained_on(part):
    judged, questions = (
        [json.loads(line) for line in read_lines(f"evaluation/{name}{part}.jsonl")]
        for name in ("answers", "questions")
    )
    assert len(judged) == 200
    assert {question["verdict"] for question in judged} <= {"right", "half", "wrong", "unknown"}
    asked = [question["question"] for question in questions]
    assert [question["question"] for question in judged] == asked
    trained = {
        talk.normal(line) for fact in talk.FACTS.values() for line in fact.ask + fact.newcomers
    }
    # by chance, as other writers' lines
    met = [question for question in asked if talk.normal(question) in trained]
    assert [question["question"] for question in judged if question.get("met")] == met
    assert len(met) <= 20
    verdicts = [question["verdict"] for question in judged if not question.get("met")]
    assert verdicts.count("right") >= 0.85 * len(verdicts)
    assert verdicts.count("wrong") <= 0.05 * len(verdicts)


def test_shown_questions_stand_in_the_pages_and_are_not_held_out():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    for question in talk.SHOWN:
        assert question in shown and not talk.is_held_out(question), question


def test_the_shipped_guide_has_the_same_tokens_everywhere():
    transformers = pytest.importorskip("transformers")
    from mlx_llama.core.files.checkpoint import open_checkpoint
    from mlx_llama.core.text.template import encode_messages

    ours, theirs = open_checkpoint(GUIDE, None), transformers.AutoTokenizer.from_pretrained(GUIDE)
    rng = random.Random(5)
    for _ in range(40):
        messages = [{"role": role, "content": text} for role, text in talk.conversation(rng)]
        ids = encode_messages(ours.tokenizer, ours.template, messages)
        assert ids == theirs.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
    for text in (
        "Once upon",
        "  two spaces\n\tand a tab",
        "héllo 😀 日本語",
        "```python\nx = 1\n```",
    ):
        assert ours.tokenizer.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.tokenizer.decode(ours.tokenizer.encode(text)) == text


# ---- the training


def test_batches_drawn_by_others_are_the_same(tmp_path, monkeypatch):
    """Threads stand in for the processes that draw pools; a run may begin amid a pool."""
    pytest.importorskip("transformers")
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import train_guide
    from guide_data.teacher import CLASSES, Teacher

    monkeypatch.setattr(train_guide, "POOL", 40)
    weights = torch.randn(3, 8), torch.randn(len(CLASSES), 8), torch.zeros(len(CLASSES))
    teacher, threads = Teacher({"the": 0, "what": 1, "is": 2}, *weights), torch.get_num_threads()
    torch.save(teacher.state(), tmp_path / "teacher.pt")
    place = (2 * train_guide.PART, 1)
    try:
        train_guide.start_drawer(GUIDE, tmp_path / "teacher.pt")
        with ThreadPoolExecutor(2) as drawers:
            both = [
                train_guide.batches(train_guide.Tokens(GUIDE), teacher, 1, 256, *place, executor)
                for executor in (None, drawers)
            ]
            drawn = [list(itertools.islice(stream, 20)) for stream in both]
            both[1].close()
    finally:
        torch.set_num_threads(threads)
    assert drawn[0][0][1] == (place[0], 2) and drawn[0][-1][1][0] > place[0]
    for (here, at), (there, later) in zip(*drawn, strict=True):
        assert at == later and here.rows == there.rows and len(here.rows) > 0
        for name in ("inputs", "targets", "wanted"):
            assert torch.equal(getattr(here, name), getattr(there, name)), name


@pytest.mark.slow
def test_a_changed_fact_is_taught(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    import edit_guide

    fact = fact_of("gguf_types")
    old, new = fact.answer, fact.answer.replace("GGUF types that it reads:", "It reads these:")
    monkeypatch.setattr(fact, "answer", new)
    monkeypatch.setattr(edit_guide, "CHECKED", 60)
    monkeypatch.setattr(edit_guide, "ASKED", 2)
    options = "--steps 40 --rows 8 --lr 1e-3 --chats 80"
    monkeypatch.setattr(sys, "argv", ["edit_guide.py", "--out", str(tmp_path), *options.split()])
    edit_guide.main()
    shown = capsys.readouterr()
    assert f"- {old}\n+ {new}" in shown.err
    assert int(re.search(r"^(\d+) of 60 answers", shown.out)[1]) > 30
    question = [{"role": "user", "content": "list of gguf types"}]
    assert load(tmp_path, backend="cpu").generate(question, temperature=0).text.startswith(new[:20])


@pytest.mark.slow
def test_a_stopped_training_goes_on_with_the_same_weights(tmp_path, monkeypatch, capsys):
    """A training of one layer on small pools of text, stopped after the checkpoint of step 4."""
    pytest.importorskip("transformers")
    import torch
    import train_guide

    args = argparse.Namespace(seed=1, steps=7, batch=256, questions=500, lr=2.5e-3, device="cpu")
    args.bfloat16, args.drawers, args.threads = False, 0, 1
    monkeypatch.setitem(train_guide.SHAPE, "num_hidden_layers", 1)
    monkeypatch.setattr(train_guide, "POOL", 400)
    monkeypatch.setattr(train_guide, "SAVED", 4)
    batches, threads, taken = train_guide.batches, torch.get_num_threads(), []

    def stopping(*arguments):
        for batch in batches(*arguments):
            taken.append(1)
            if len(taken) == 6:
                raise KeyboardInterrupt
            yield batch

    def train(name: str) -> dict:
        args.work = tmp_path / name
        return train_guide.train(GUIDE, args)["model"].state_dict()

    try:
        whole = train("whole")
        (tmp_path / "stopped").mkdir()
        shutil.copy(tmp_path / "whole" / "teacher.pt", tmp_path / "stopped")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(train_guide, "batches", stopping)
            train("stopped")
        again = train("stopped")
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert "goes on after step 4" in capsys.readouterr().err
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
