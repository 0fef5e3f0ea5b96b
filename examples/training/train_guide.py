"""Train the guide: the small Llama that ships in `mlx_llama/guide`.

    python examples/training/train_guide.py                     # text -> vocabulary -> network -> folder with a model card
    python examples/training/train_guide.py --evaluate          # the score on questions held out of training
    python examples/training/train_guide.py --ask "which backends are there?"
    python examples/training/train_guide.py --judge examples/training/evaluation/questions.jsonl
    python examples/training/train_guide.py --card              # the card again, after the answers were judged

Needs `pip install -e ".[train]"` (torch, transformers, sentencepiece) and no downloads: `guide_data/` contains the facts
and the questions for them, and asks the package's parsers for its flags; a seeded generator draws an endless stream of
conversations from them. The same seed, steps and thread count give the same text and vocabulary on all machines, and the
same weights on the same machine. A run that was stopped goes on from its last checkpoint (`--work`) with the same result.

The result is an ordinary Hugging Face folder. To change the guide's facts, edit `guide_data/*.txt` and run this again.
"""

import argparse
import copy
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package beside this script tells its own flags

from guide_data import talk
from guide_data.facts import Fact
from guide_data.fresh import FRESH

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).resolve().parent
GUIDE = HERE.parents[1] / "mlx_llama" / "guide"

CONTEXT = 512
VOCABULARY = 4096
LATE = 100_000  # pools from this number on have the rows of the training's second part, from twice it on those of its third
DECAY = 0.65  # share of the steps after which the learning rate falls, linearly
LATE_RATE = 0.4  # share of the highest rate at which the last part begins
POOL = 6000  # rows that are sorted by length together
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, intermediate_size=704, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
    initializer_range=0.04,
)

# The chat format puts a mark before and after each text, without spaces or newlines. Marks are control symbols, which
# sentencepiece never encodes from a user's text.
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- text -> tokens


def train_vocabulary(out: Path, seed: int) -> None:
    """Learn the sentencepiece vocabulary from a sample of the training text."""
    import sentencepiece

    rng = random.Random(f"{seed} vocabulary")
    sample = [text for _ in range(6000) for _, text in talk.conversation(rng)]
    sample += [talk.one_question(rng)[0][1] for _ in range(30000)]
    sample += [fact.answer for fact in talk.FACTS.values() for _ in range(5)]
    sample += [talk.raw_text(rng) for _ in range(1000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in sample for line in text.split("\n") if line),
        model_prefix=str(out / "tokenizer"), model_type="bpe", vocab_size=VOCABULARY, byte_fallback=True,
        control_symbols=MARKS, character_coverage=1.0, num_threads=1, minloglevel=2,
        # Keep the text byte for byte, and make pieces independent of the text before them.
        normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
    )
    (out / "tokenizer.vocab").unlink()


class Tokens:
    """Conversations as token ids, each with a flag: True if it is learned."""

    def __init__(self, folder: Path):
        import sentencepiece

        self.pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.bos, self.eos = self.pieces.bos_id(), self.pieces.eos_id()
        self.mark = {mark: self.pieces.piece_to_id(mark) for mark in MARKS}

    def chat(self, messages: list[tuple[str, str]], cut: random.Random | None = None) -> tuple[list[int], list[bool]]:
        """Encode a conversation. Only the assistant's tokens are learned; users' texts contain deliberate noise.

        cut: users' texts are cut at random places before they are encoded, so that words are known by their parts.
        """
        ids, learn = [self.bos], [False]
        for role, text in messages:
            if role == "user" and cut:
                places = [0, *(at for at in range(1, len(text)) if cut.random() < 0.1), len(text)]
                pieces = [i for first, last in zip(places, places[1:]) for i in self.pieces.encode(text[first:last])]
            else:
                pieces = self.pieces.encode(text)
            said = [*pieces, self.mark["<|end|>"]]
            ids += [self.mark[f"<|{role}|>"], *said]
            learn += [False] + [role == "assistant"] * len(said)
        return ids, learn

    def raw(self, text: str) -> tuple[list[int], list[bool]]:
        ids = [self.bos, *self.pieces.encode(text), self.eos]
        return ids, [False] + [True] * (len(ids) - 1)

    def blurred(self, ids: list[int], learn: list[bool], rng: random.Random) -> list[int]:
        """Replace 6 % of the pieces that are not learned by others, so that no single word decides the meaning."""
        fixed = {self.bos, *self.mark.values()}
        first = max(fixed) + 1
        return [
            (self.pieces.unk_id() if rng.random() < 0.5 else rng.randrange(first, VOCABULARY))
            if not on and i not in fixed and rng.random() < 0.06 else i
            for i, on in zip(ids, learn)
        ]


def draw_row(tokens: Tokens, rng: random.Random, unsure: list[int] | None = None, copying: bool = False) -> tuple[
        list[int], list[bool]]:
    """One row. unsure: lines of `talk.LATER` that are answered with "I do not know", in the second part of the training.

    The second part has many long questions, things to remember, and lines that were kept for it. copying: the third part,
    half of which is names, words and numbers to repeat.
    """
    if copying and rng.random() < 0.5:
        kind = rng.random()
        if kind < 0.4:
            text, answer, _ = talk.introduction(rng)
            return tokens.chat([("user", text), ("assistant", answer)])
        return tokens.chat(talk.echo(rng) if kind < 0.7 else talk.memory(rng))
    if unsure is not None and rng.random() < 0.6:
        kind = rng.random()
        if kind < 0.45:
            ids, learn = tokens.chat(talk.doubtful(rng, unsure))
            end = learn.index(True) + rng.randint(3, 7)
            return tokens.blurred(ids[:end], learn[:end], rng), learn[:end]
        if kind < 0.58:
            return tokens.chat(talk.memory(rng) if rng.random() < 0.6 else talk.echo(rng))
        ids, learn = tokens.chat(talk.long_question(rng))
        end = learn.index(True) + rng.randint(3, 7)
        return tokens.blurred(ids[:end], learn[:end], rng), learn[:end]
    kind = rng.random()
    if kind < 0.01:
        return tokens.raw(talk.raw_text(rng))
    if kind < 0.03:
        return tokens.chat(talk.echo(rng))
    if kind < 0.05:
        text, answer, _ = talk.introduction(rng)
        return tokens.chat([("user", text), ("assistant", answer)])
    if kind < 0.08:
        ids, learn = tokens.chat(talk.conversation(rng))
        return tokens.blurred(ids, learn, rng), learn
    # Answers are memorised soon; choosing the right one takes longer. Most rows are therefore one question
    # and the start of its answer, which is many times cheaper.
    ids, learn = tokens.chat(talk.one_question(rng), rng if rng.random() < 0.2 else None)
    end = len(ids) if rng.random() < 0.06 else learn.index(True) + rng.randint(3, 7)
    ids, learn = ids[:end], learn[:end]
    return tokens.blurred(ids, learn, rng), learn


def batches(tokens: Tokens, seed: int, size: int, pool: int = 0, begin: int = 0, unsure: list[int] | None = None) -> Iterator[
        tuple["torch.Tensor", "torch.Tensor", tuple[int, int]]]:
    """Yield batches of about `size` tokens without end: ids [B, T] and targets [B, T], -100 for tokens not learned.

    A row is one conversation. Rows of similar length of a pool share a batch, which keeps padding small. pool, begin: first
    pool and first batch in it; the last part of each batch says where to go on. unsure: as in `draw_row`.
    """
    import torch

    while True:
        rng = random.Random(f"{seed} text {pool}")
        rows = [row for row in (draw_row(tokens, rng, unsure, pool >= 2 * LATE) for _ in range(POOL)) if len(row[0]) <= CONTEXT]
        rows.sort(key=lambda row: len(row[0]))
        groups, group = [], []
        for row in rows:
            if group and len(row[0]) * (len(group) + 1) > size:
                groups.append(group)
                group = []
            group.append(row)
        rng.shuffle(groups)  # without the last, incomplete group
        for number, group in list(enumerate(groups, 1))[begin:]:
            length = max(len(ids) for ids, _ in group)
            inputs = torch.zeros(len(group), length, dtype=torch.long)
            targets = torch.full((len(group), length), -100)
            for row, (ids, learn) in enumerate(group):
                inputs[row, : len(ids)] = torch.tensor(ids)
                targets[row, : len(ids) - 1] = torch.tensor([i if on else -100 for i, on in zip(ids[1:], learn[1:])])
            yield inputs, targets, (pool, number)
        pool, begin = pool + 1, 0


# ---- tokens -> network


def loss_of(model, inputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    """Cross-entropy at learned positions; only those are projected to the vocabulary."""
    import torch

    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, H]
    at = targets >= 0
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[at]).float(), targets[at])


def foreseen(model, tokens: Tokens, device: str, questions: list[tuple[str, str]]) -> list[tuple[bool, bool]]:
    """Of (question, answer) pairs: are the first 12 tokens of the answer predicted greedily, and is "I do not know" begun?"""
    import torch

    rows, doubt = [], tokens.pieces.encode(talk.FACTS["unknown"].answer)
    for number, (question, answer) in enumerate(questions):
        ids, learn = tokens.chat([("user", question), ("assistant", answer)])
        end = learn.index(True) + 12
        rows.append((number, ids[:end], learn[:end]))
    rows.sort(key=lambda row: len(row[1]))
    found = {}
    with torch.inference_mode():
        for at in range(0, len(rows), 64):
            part = rows[at : at + 64]
            inputs = torch.zeros(len(part), max(len(ids) for _, ids, _ in part), dtype=torch.long, device=device)
            for row, (_, ids, _) in enumerate(part):
                inputs[row, : len(ids)] = torch.tensor(ids)
            best = model(input_ids=inputs, use_cache=False).logits.argmax(-1).tolist()
            for mine, (number, ids, learn) in zip(best, part):
                first = learn.index(True) - 1
                found[number] = (all(b == i for b, i, on in zip(mine, ids[1:], learn[1:]) if on), mine[first] == doubt[0])
    return [found[number] for number in range(len(rows))]


def held_out_score(model, tokens: Tokens, device: str) -> str:
    """Shares of held-out questions that are answered rightly, wrongly and with "I do not know"."""
    known = [(question, fact.answer) for fact, question in talk.HELD_OUT.values() if fact]
    found = foreseen(model, tokens, device, known)
    right, doubt = (sum(one) / len(found) for one in ([r for r, _ in found], [d and not r for r, d in found]))
    scope = foreseen(model, tokens, device, [(question, talk.SCOPE_ANSWER) for fact, question in talk.HELD_OUT.values() if not fact])
    return (f"right {right:.1%}, wrong {1 - right - doubt:.1%}, does not know {doubt:.1%}; "
            f"beyond its knowledge {sum(d for _, d in scope) / len(scope):.1%}")


def train(out: Path, args: argparse.Namespace) -> dict:
    """Train from random weights, or from the checkpoint in `--work`; returns the averaged network, and figures for the card."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(args.threads)
    tokens = Tokens(out)
    config = LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=tokens.bos,
        eos_token_id=[tokens.eos, tokens.mark["<|end|>"]], pad_token_id=tokens.eos,
    )
    model = LlamaForCausalLM(config).to(args.device)
    average = copy.deepcopy(model).eval()  # averages of late weights vary less than the last step's
    weights, averages = list(model.parameters()), list(average.parameters())
    # Muon for the blocks' matrices needs half the steps of AdamW, which trains embedding and norms.
    blocks = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim == 1 or "embed" in name]
    optimizers = (
        torch.optim.Muon(blocks, lr=args.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98)),
    )
    done, seen, spent, place, unsure = 0, 0, 0.0, (0, 0), None
    kept = args.work / "checkpoint.pt"
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        # The rate is constant until the decay begins, so that until then the number of steps may still change.
        if (state["seed"], state["batch"], state["lr"]) != (args.seed, args.batch, args.lr) or state["steps"] != args.steps and (
                state["done"] > DECAY * min(state["steps"], args.steps)):
            raise SystemExit(f"error: {kept} is of another run (seed, batch, lr or steps): remove it, or give its values")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        done, seen, spent, place = state["done"], state["seen"], state["spent"], tuple(state["place"])
        unsure = state["unsure"]
        say(f"goes on after step {done}")
    say(f"{sum(w.numel() for w in weights):,} parameters, {args.steps} steps of {args.batch} tokens")

    def save(step: int) -> None:
        args.work.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_suffix(".new")
        torch.save({
            "seed": args.seed, "batch": args.batch, "lr": args.lr, "steps": args.steps, "done": step, "seen": seen, "place": place,
            "unsure": unsure,
            "spent": spent + time.monotonic() - begin, "model": model.state_dict(), "average": average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }, fresh)
        fresh.replace(kept)

    if done >= args.steps and place[0] < LATE:
        place = (LATE, 0)
    stream = batches(tokens, args.seed, args.batch, *place, unsure)
    begin, seen_before, told = time.monotonic(), seen, 0.0
    second = args.steps + args.late_steps
    for step in range(done, second + args.last_steps):
        if step >= args.steps and unsure is None:
            lines = [(talk.expand(line, random.Random(line)), fact.answer) for fact, line in talk.LATER]
            found = foreseen(average, tokens, args.device, lines)
            unsure = [number for number, (right, _) in enumerate(found) if not right and number % 2]
            say(f"{sum(right for right, _ in found)} of {len(lines)} lines that were kept for the last part are understood")
            stream = batches(tokens, args.seed, args.batch, LATE, unsure=unsure)
        if step >= second and place[0] < 2 * LATE:
            stream = batches(tokens, args.seed, args.batch, 2 * LATE, unsure=unsure)
        if step < args.steps:
            rate = min(1.0, (step + 1) / 100) * max(0.01, min(1.0, (1 - step / args.steps) / (1 - DECAY)))
        elif step < second:
            rate = LATE_RATE * max(0.01, 1 - (step - args.steps) / args.late_steps)
        else:
            rate = LATE_RATE * max(0.01, 1 - (step - second) / args.last_steps)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * rate
        inputs, targets, place = next(stream)
        inputs, targets = inputs.to(args.device), targets.to(args.device)
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, max(0.01, 1 / (step + 1)))
        seen += inputs.numel()
        told += loss.item()
        if (step + 1) % 25 == 0:
            pace = (seen - seen_before) / (time.monotonic() - begin)
            say(f"step {step + 1:5} loss {told / 25:.3f} {seen / 1e6:.2f}M tokens {pace:,.0f} tokens/s")
            told = 0.0
        if (step + 1) % 50 == 0:
            save(step + 1)
        if (step + 1) % 200 == 0:
            say(f"step {step + 1:5} held out: {held_out_score(average, tokens, args.device)}")
    minutes = (spent + time.monotonic() - begin) / 60
    parameters = sum(w.numel() for w in weights)
    return {"model": average, "tokens": tokens, "seen": seen, "minutes": minutes, "parameters": parameters}


def write_folder(out: Path, model, tokens: Tokens) -> None:
    """Write a Hugging Face folder: weights in bfloat16, config, tokenizer settings and template."""
    import torch

    ends = [tokens.mark["<|end|>"], tokens.eos]
    model.config.eos_token_id = ends
    model.to(torch.bfloat16).save_pretrained(out)
    marks = {index: tokens.pieces.id_to_piece(index) for index in range(3 + len(MARKS))}
    settings = {
        "tokenizer_class": "LlamaTokenizer", "legacy": False, "add_prefix_space": False,
        "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
        "bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>", "pad_token": "</s>",
        "model_max_length": CONTEXT,
        "added_tokens_decoder": {
            str(index): {"content": mark, "special": True, "normalized": False, "lstrip": False, "rstrip": False,
                         "single_word": False}
            for index, mark in marks.items()
        },
    }
    generation = {"bos_token_id": tokens.bos, "eos_token_id": ends, "pad_token_id": tokens.eos, "do_sample": False}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)


# ---- network -> score


def answerer(folder: Path, backend: str) -> Callable[..., str]:
    """Make a function from a question, and earlier messages of the user, to the greedy answer of mlx_llama."""
    from mlx_llama import load

    llm = load(folder, backend=backend)

    def answer(question: str, *before: str) -> str:
        chat = llm.chat(max_tokens=200, temperature=0)
        for text in before:
            chat.send(text)
        return chat.send(question).text

    return answer


def score(answer: Callable[[str], str], name: str, questions: list[tuple[Fact | None, str]]) -> tuple[str, list[str]]:
    """Ask each question once. The answer of its fact is right, word by word; for other subjects any "I do not know" is.

    Returns (score, answers that are not right).
    """
    wrong, unknown = [], 0
    for fact, question in questions:
        reply = answer(question)
        doubts = reply.startswith("I do not know")
        if reply.strip() != fact.answer if fact else not doubts:
            wrong.append(f"  {fact.name if fact else 'scope'}: {question}\n    -> {reply}")
            unknown += doubts
    right = len(questions) - len(wrong)
    return (f"{name}: {right} of {len(questions)} right ({right / len(questions):.1%}), "
            f"{len(wrong) - unknown} wrong, {unknown} times it does not know"), wrong


def evaluate(folder: Path, backend: str) -> str:
    """Returns the lines of the model card; prints wrong answers to stderr."""
    answer = answerer(folder, backend)
    held_out = list(talk.HELD_OUT.values())
    fresh = [(None if name == "scope" else talk.FACTS[name], question) for name, question in FRESH]
    told = []
    for name, questions in (
        ("held-out questions about mlx_llama", [one for one in held_out if one[0]]),
        ("held-out questions about anything else", [one for one in held_out if not one[0]]),
        ("fresh questions", fresh),
    ):
        line, wrong = score(answer, name, questions)
        say("\n".join(wrong))
        told.append(line)
    return "\n".join(told)


def judge(folder: Path, backend: str, questions: Path) -> None:
    """Write the answers to a file of questions, a JSON object a line, beside it as answers.jsonl.

    before: earlier messages of the same conversation, where a question has them.
    """
    answer = answerer(folder, backend)
    asked = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines() if line.strip()]
    with open(questions.with_name("answers.jsonl"), "w", encoding="utf-8") as file:
        for one in asked:
            file.write(json.dumps(one | {"answer": answer(one["question"], *one.get("before", ()))}, ensure_ascii=False) + "\n")


def judged() -> str:
    """The judgement of the 200 questions in one line, counted in answers.jsonl."""
    path = HERE / "evaluation" / "answers.jsonl"
    verdicts = [json.loads(line).get("verdict") for line in path.read_text(encoding="utf-8").splitlines()]
    count = {name: verdicts.count(name) for name in ("right", "half", "wrong", "unknown")}
    return "{right} right, {half} half right, {wrong} wrong, {unknown} times it did not know what it should".format(**count)


def write_card(out: Path, args: argparse.Namespace, result: dict, told: str) -> None:
    """Write the model card from `guide_data/card.md` and the measured figures."""
    shape = (
        f"{SHAPE['num_hidden_layers']} layers of width {SHAPE['hidden_size']}, {SHAPE['num_attention_heads']} query heads "
        f"and {SHAPE['num_key_value_heads']} key-value heads, feed-forward width {SHAPE['intermediate_size']}, "
        f"rope theta 10000, tied embeddings, context {CONTEXT}"
    )
    lines = [line for fact in talk.FACTS.values() for line in (*fact.ask, *fact.newcomers, *fact.later)]
    questions = sum(talk.ways(line) for line in lines)
    written = (HERE / "guide_data" / "newcomers.txt").read_text(encoding="utf-8").splitlines()
    newcomers = sum(bool(line) and not line.startswith("## ") for line in written)
    card = (HERE / "guide_data" / "card.md").read_text(encoding="utf-8").format(
        parameters=f"{result['parameters']:,}", shape=shape, megabytes=f"{(out / 'model.safetensors').stat().st_size / 1e6:.1f}",
        vocabulary=VOCABULARY, facts=len(talk.FACTS), marked=len(talk.HELD_OUT) - len(talk.SCOPE_HELD_OUT),
        questions=f"{questions:,}", newcomers=f"{newcomers:,}", later=f"{len(talk.LATER):,}",
        steps=args.steps, late=args.late_steps, last=args.last_steps, late_rate=LATE_RATE, batch=args.batch, judged=judged(),
        seen=f"{result['seen'] / 1e6:.1f}", lr=args.lr, minutes=f"{result['minutes']:.0f}",
        machine=f"{args.threads} CPU core{'s' if args.threads > 1 else ''}" if args.device == "cpu" else args.device,
        command=f"python examples/training/train_guide.py --seed {args.seed} --steps {args.steps} --late-steps {args.late_steps} --last-steps {args.last_steps} "
                f"--batch {args.batch} --lr {args.lr} --threads {args.threads}",
        scope=len(talk.SCOPE_HELD_OUT), score=told, fresh=len(FRESH),
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="print the score of a trained guide and its wrong answers")
    parser.add_argument("--card", action="store_true", help="write the score into the card of a trained guide again")
    parser.add_argument("--ask", metavar="TEXT", help="ask a trained guide one question")
    parser.add_argument("--judge", type=Path, metavar="FILE", help="answer the questions of a .jsonl file, into answers.jsonl beside it")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder of the checkpoint that a stopped run goes on from")
    parser.add_argument("--no-score", action="store_true", help="leave out the evaluation and the card after training")
    parser.add_argument("--model", type=Path, default=GUIDE, help="folder of the guide to evaluate or ask")
    parser.add_argument("--backend", default="auto", help="backend of mlx_llama for --evaluate and --ask")
    parser.add_argument("--out", type=Path, default=GUIDE, help="folder to write the trained guide to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3700)
    parser.add_argument("--late-steps", type=int, default=900, help="steps after them, with long questions and doubt")
    parser.add_argument("--last-steps", type=int, default=450, help="steps after those, half of them for repeating names and numbers")
    parser.add_argument("--batch", type=int, default=3072, help="tokens in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; a run is repeatable with the same number only")
    args = parser.parse_args()
    if args.evaluate:
        print(evaluate(args.model, args.backend))
        return
    if args.card:
        import torch

        state = torch.load(args.work / "checkpoint.pt", weights_only=True)
        result = {"seen": state["seen"], "minutes": state["spent"] / 60, "parameters": sum(
            w.numel() for name, w in state["model"].items() if name != "lm_head.weight")}
        write_card(args.model, args, result, evaluate(args.model, args.backend))
        return
    if args.judge:
        judge(args.model, args.backend, args.judge)
        return
    if args.ask:
        print(answerer(args.model, args.backend)(args.ask))
        return
    # Set before torch is imported: spinning threads make a shared machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.work / "checkpoint.pt").exists():
        train_vocabulary(args.out, args.seed)
    result = train(args.out, args)
    write_folder(args.out, result["model"], result["tokens"])
    say(f"{result['seen'] / 1e6:.1f}M tokens in {result['minutes']:.0f} minutes")
    if args.no_score:
        return
    told = evaluate(args.out, args.backend)
    write_card(args.out, args, result, told)
    print(told)


if __name__ == "__main__":
    main()
