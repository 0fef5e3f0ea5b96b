"""Train the guide: the small Llama that ships in `mlx_llama/guide`.

    python examples/training/train_guide.py                     # text -> vocabulary -> teacher -> network -> folder with a card
    python examples/training/train_guide.py --device cuda --bfloat16 --drawers 6
    python examples/training/train_guide.py --evaluate          # the score on questions held out of training
    python examples/training/train_guide.py --quick             # shares of flags, question lengths, later turns, memory: a minute
    python examples/training/train_guide.py --ask "which backends are there?"
    python examples/training/train_guide.py --judge examples/training/texts/evaluation/questions.jsonl
    python examples/training/train_guide.py --read-questions    # after a change of mlx_llama/guide/questions.txt
    python examples/training/train_guide.py --card              # the card again, after the answers were judged

Needs `pip install -e ".[train]"` (torch, transformers, sentencepiece) and no downloads:
`guide_data/` and `texts.zip` contain the facts and the questions for them, and asks the package's parsers for its
flags; a seeded generator draws an endless stream of conversations from them. The same seed, steps
and thread count give the same text and vocabulary on all machines, and the same weights on the same
machine (on GPUs nearly). A run that was stopped goes on from its last checkpoint (`--work`) with
the same result.

The result is an ordinary Hugging Face folder. To change the guide's facts, edit the texts (see guide_data/__init__.py)
and run this again.
"""

import argparse
import copy
import functools
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# the package beside this script tells its own flags
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Set before torch is imported: spinning threads make a shared machine ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# cuBLAS gives the same bits again with this alone.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import concurrent.futures
import itertools
import multiprocessing
from collections import deque

import torch
from guide_data import facts, read_lines, read_text, talk
from guide_data.facts import Fact
from guide_data.fresh import FRESH
from guide_data.teacher import ANSWERS, CLASSES, Teacher, class_of, train as train_teacher

HERE = Path(__file__).resolve().parent
GUIDE = HERE.parents[1] / "mlx_llama" / "guide"

CONTEXT = 512
VOCABULARY = 8192
# shares of the steps after which the training's parts begin, each with the rows of its own shares
PARTS = (0.0, 0.4, 0.7, 0.93)
# pools from this number on have the rows of the second part, from twice it on those of the third,
# and so on
PART = 100_000
EMBEDDING_RATE = 1.5  # rate of embedding and norms, relative to the matrices'
DECAY = 0.5  # share of the steps after which the learning rate falls, linearly
SAVED = 50  # steps between checkpoints
POOL = 6000  # rows that are sorted by length together
AHEAD = 6  # pools that are drawn before they are needed, where other processes draw them
# Shares of the rows in the parts of the training: names, words and numbers to repeat; of the rest,
# mixtures of two questions, questions with a situation, and rows after turns on other subjects; and
# of what a question teaches, doubt.
COPIES, MIXED = (0.06, 0.06, 0.20, 0.12), (0.0, 0.4, 0.4, 0.4)
LONG, TURNS = (0.08, 0.08, 0.12, 0.12), (0.15, 0.20, 0.25, 0.25)
DOUBTED = (0.0, 0.0, 0.25, 0.18)
# Share of the rows: questions that the README, the pages and the examples show, which are tried
# first.
SHOWN = (0.0, 0.0, 0.0, 0.02)
TEACHER_WEIGHT = (
    0.5  # share of the teacher's probabilities in the targets; the rest is the right answer
)
INSTRUCTED = 0.1  # share of the rows of one question that have a system prompt
BEGIN = 4  # tokens that choose the answer
ASKED = 600  # held-out questions that the score asks
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=512,
    max_position_embeddings=CONTEXT,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    initializer_range=0.04,
)

# The chat format puts a mark before and after each text, without spaces or newlines. Marks are
# control symbols, which sentencepiece never encodes from a user's text.
MARKS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% "
    "endfor %}"
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
    sample += [text for _ in range(6000) for _, text in talk.copy_chat(rng)[0]]
    sample += [talk.long_question(rng)[0][1] for _ in range(6000)]
    sample += [fact.answer for fact in talk.FACTS.values() for _ in range(30)]
    sample += [talk.raw_text(rng) for _ in range(1000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in sample for line in text.split("\n") if line),
        model_prefix=str(out / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        control_symbols=MARKS,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
        split_digits=True,
        # Keep the text byte for byte, and make pieces independent of the text before them.
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
    )
    (out / "tokenizer.vocab").unlink()


class Tokens:
    """Conversations as token ids, each with a flag: True if it is learned."""

    def __init__(self, folder: Path):
        import sentencepiece

        self.pieces = sentencepiece.SentencePieceProcessor(
            model_file=str(folder / "tokenizer.model")
        )
        self.bos, self.eos = self.pieces.bos_id(), self.pieces.eos_id()
        self.mark = {mark: self.pieces.piece_to_id(mark) for mark in MARKS}
        # answers come again and again
        self.encode = functools.lru_cache(4096)(lambda text: tuple(self.pieces.encode(text)))
        self.doubt = self.encode(talk.DOUBT)[0]

    def chat(
        self, messages: list[tuple[str, str]], cut: random.Random | None = None, alike: str = ""
    ) -> tuple[list[int], list[bool]]:
        """Encode a conversation. Only the assistant's tokens are learned; users' texts contain
        deliberate noise.

        cut: users' texts are cut at random places before they are encoded, so that words are known
        by their parts. With `alike`, that text is cut instead, at the same places wherever it
        stands, so that it is repeated piece by piece.
        """
        ids, learn = [self.bos], [False]
        shared = (
            [at for at in range(len(alike)) if cut.random() < (0.3 if at else 0.5)]
            if alike and cut
            else []
        )
        for role, text in messages:
            places = {0, len(text)}
            if shared:
                places |= {
                    match.start() + at
                    for match in re.finditer(re.escape(alike), text)
                    for at in shared
                }
            elif role == "user" and cut:
                places |= {at for at in range(1, len(text)) if cut.random() < 0.1}
            ordered = sorted(places)
            said = (
                [
                    i
                    for first, last in itertools.pairwise(ordered)
                    for i in self.pieces.encode(text[first:last])
                ]
                if len(places) > 2
                else list(self.encode(text))
            )
            said.append(self.mark["<|end|>"])
            ids += [self.mark[f"<|{role}|>"], *said]
            learn += [False] + [role == "assistant"] * len(said)
        return ids, learn

    def raw(self, text: str) -> tuple[list[int], list[bool]]:
        ids = [self.bos, *self.pieces.encode(text), self.eos]
        return ids, [False] + [True] * (len(ids) - 1)

    def blurred(self, ids: list[int], learn: list[bool], rng: random.Random) -> list[int]:
        """Replace 6 % of the pieces that are not learned by others, so that no single word decides
        the meaning.
        """
        fixed = {self.bos, *self.mark.values()}
        first = max(fixed) + 1
        return [
            (self.pieces.unk_id() if rng.random() < 0.5 else rng.randrange(first, VOCABULARY))
            if not on and i not in fixed and rng.random() < 0.06
            else i
            for i, on in zip(ids, learn)
        ]


class Asked(NamedTuple):
    """A question whose answer the teacher helps to choose.

    first: place in the ids where the answer begins; fact: number of the right answer, -1 where the
    teacher alone decides.
    """

    first: int
    fact: int
    question: str


class Row(NamedTuple):
    """ids and learn as of `Tokens`."""

    ids: list[int]
    learn: list[bool]
    asked: tuple[Asked, ...] = ()


def cut_short(answer: str, rng: random.Random) -> str:
    """Cut half of the longer answers after their first sentence, as if they had been stopped: fewer
    tokens for each question.
    """
    sentence = re.split(r"(?<=[.:]) ", answer, maxsplit=1)[0]
    return sentence if len(sentence) > 40 and rng.random() < 0.5 else answer


def draw_row(tokens: Tokens, rng: random.Random, part: int, teacher: Teacher) -> Row:
    """One row of one of the parts."""
    if rng.random() < COPIES[part]:
        messages, alike = talk.copy_chat(rng)
        return Row(*tokens.chat(messages, rng if alike and rng.random() < 0.5 else None, alike))
    kind = rng.random()
    if kind < 0.01:
        return Row(*tokens.raw(talk.raw_text(rng)))
    if kind < 0.025:
        ids, learn = tokens.chat(talk.conversation(rng))
        return Row(tokens.blurred(ids, learn, rng), learn)
    # Answers are memorised soon; choosing the right one takes longer. Most rows are therefore one
    # question and the start of its answer, which is many times cheaper.
    mixed = rng.random() < MIXED[part]
    if mixed:  # ambiguous to the teacher too, so that its uncertainty is distilled
        question = talk.mixed_question(rng)
        chat = pair(question, ANSWERS[int(teacher.probabilities([question]).argmax())])
    elif SHOWN[part] and rng.random() < SHOWN[part]:
        chat = talk.shown_question(rng)
    else:
        chat = talk.long_question(rng) if rng.random() < LONG[part] else talk.one_question(rng)
    cut = rng if rng.random() < 0.1 else None
    # Turns on other subjects and system prompts, with which the question must be answered as if it
    # was asked alone.
    if rng.random() < TURNS[part]:
        chat = [*talk.earlier(rng, rng.choice((1, 1, 1, 2, 2, 3))), *chat]
    known = [class_of(text) for role, text in chat if role == "assistant"]
    asked = [text for role, text in chat if role == "user"]
    chat = [
        (role, cut_short(text, rng) if role == "assistant" else text) for role, text in chat[:-1]
    ] + chat[-1:]
    if rng.random() < INSTRUCTED:
        chat = [("system", rng.choice(talk.SYSTEM)), *chat]
    ids, said = tokens.chat(chat, cut)
    begin = [
        at for at in range(1, len(ids)) if said[at] and not said[at - 1]
    ]  # where an answer begins
    ends = [first + rng.randint(2, BEGIN) for first in begin]
    if rng.random() < 0.03:
        ends[-1] = len(ids)
    last = len(begin) - 1
    # The teacher helps with all answers but small talk, which is learned in the last turn alone.
    helped = tuple(
        Asked(*turn)
        for turn in zip(begin, [*known[:last], -1] if mixed else known, asked)
        if turn[1] != CLASSES["small talk"]
    )
    taught = {begin[last], *(other.first for other in helped)}
    learn = [
        any(first <= at < end and first in taught for first, end in zip(begin, ends))
        for at in range(ends[last])
    ]
    return Row(tokens.blurred(ids[: ends[last]], learn, rng), learn, helped)


class Batch(NamedTuple):
    """ids [B, T]; targets [B, T], -100 for tokens not learned; rows; and `target_probabilities` of
    all their questions [N, A].
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    rows: list[Row]
    wanted: torch.Tensor


def draw_pool(
    tokens: Tokens, teacher: Teacher, seed: int, size: int, number: int, begin: int = 0
) -> list[Batch]:
    """The batches of a pool from batch `begin` on, each of about `size` tokens.

    A row is one conversation. Rows of similar length of a pool share a batch, which keeps padding
    small.
    """
    rng, part = random.Random(f"{seed} text {number}"), number // PART
    rows = [
        row
        for row in (draw_row(tokens, rng, part, teacher) for _ in range(POOL))
        if len(row.ids) <= CONTEXT
    ]
    rows.sort(key=lambda row: len(row.ids))
    groups, group = [], []
    for row in rows:
        if group and len(row.ids) * (len(group) + 1) > size:
            groups.append(group)
            group = []
        group.append(row)
    rng.shuffle(groups)  # without the last, incomplete group
    drawn = []
    for group in groups[begin:]:
        length = max(len(row.ids) for row in group)
        inputs = torch.zeros(len(group), length, dtype=torch.long)
        targets = torch.full((len(group), length), -100)
        for row, (ids, learn, _) in enumerate(group):
            inputs[row, : len(ids)] = torch.tensor(ids)
            targets[row, : len(ids) - 1] = torch.tensor(
                [i if on else -100 for i, on in zip(ids[1:], learn[1:])]
            )
        asked = [turn for row in group for turn in row.asked]
        wanted = target_probabilities(asked, teacher, DOUBTED[part])
        drawn.append(Batch(inputs, targets, group, wanted))
    return drawn


# Tokens and teacher of a process that draws pools, read once.
_drawer: tuple[Tokens, Teacher] | None = None


def start_drawer(folder: Path, teacher: Path) -> None:
    global _drawer
    torch.set_num_threads(1)
    _drawer = Tokens(folder), Teacher(**torch.load(teacher, weights_only=True))


def draw_elsewhere(*place: int) -> list[tuple]:
    """The batches of `draw_pool` as arrays, which pickle copies, where tensors would each take a
    file descriptor.
    """
    return [
        (batch.inputs.numpy(), batch.targets.numpy(), batch.rows, batch.wanted.numpy())
        for batch in draw_pool(*_drawer, *place)
    ]


def batches(
    tokens: Tokens,
    teacher: Teacher,
    seed: int,
    size: int,
    pool: int = 0,
    begin: int = 0,
    drawers: concurrent.futures.Executor | None = None,
) -> Iterator[tuple[Batch, tuple[int, int]]]:
    """Yield batches without end, each with the place where to go on.

    pool, begin: first pool and first batch in it. drawers: processes after `start_drawer`, which
    draw the next pools meanwhile; the batches are the same.
    """
    coming: deque[concurrent.futures.Future] = deque()
    try:
        for number in itertools.count(pool):
            first = begin if number == pool else 0
            if drawers is None:
                drawn = draw_pool(tokens, teacher, seed, size, number, first)
            else:
                for later in range(number + len(coming), number + AHEAD):
                    start = begin if later == pool else 0
                    coming.append(drawers.submit(draw_elsewhere, seed, size, later, start))
                drawn = [
                    Batch(
                        *map(torch.from_numpy, arrays[:2]), arrays[2], torch.from_numpy(arrays[3])
                    )
                    for arrays in coming.popleft().result()
                ]
            for at, batch in enumerate(drawn, first + 1):
                yield batch, (number, at)
    finally:
        for future in coming:
            future.cancel()


# ---- tokens -> network


class Muon(torch.optim.Optimizer):
    """The Muon optimizer (Keller Jordan, 2024), with torch's constants, in float32 or bfloat16.

    torch's own computes in bfloat16 alone, which took 60 times as long on a processor without
    bfloat16 products (AMD Zen 3).
    """

    def __init__(self, weights, lr: float, dtype: torch.dtype):
        super().__init__(weights, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                momentum = self.state[w].setdefault("momentum", torch.zeros_like(w))
                momentum.lerp_(w.grad, 0.05)
                x = w.grad.lerp(momentum, 0.95)
                x = x.T if w.shape[0] > w.shape[1] else x
                x = (x / x.norm().clamp(min=1e-7)).to(self.dtype)
                for _ in range(5):
                    gram = x @ x.T
                    x = torch.addmm(
                        x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445
                    )
                x = x.T if w.shape[0] > w.shape[1] else x
                # 0.2 sqrt(longest side): updates as large as AdamW's (Liu et al., arXiv
                # 2502.16982).
                w.mul_(1 - 0.1 * group["lr"]).add_(
                    x, alpha=-0.2 * group["lr"] * max(w.shape) ** 0.5
                )


def target_probabilities(asked: list[Asked], teacher: Teacher, doubted: float) -> torch.Tensor:
    """Target probabilities [N, A] of `ANSWERS` for the questions.

    The right answer is mixed with the teacher's probabilities; mixed questions have these alone.
    `doubted` of the sum is doubt, which becomes the likeliest answer where the network is unsure of
    all others.
    """
    if not asked:
        return torch.zeros(0, len(ANSWERS))
    shares = teacher.probabilities([question.question for question in asked])
    known = [number for number, question in enumerate(asked) if question.fact >= 0]
    shares[known] *= TEACHER_WEIGHT
    shares[known, [asked[number].fact for number in known]] += 1 - TEACHER_WEIGHT
    shares *= 1 - doubted
    shares[:, CLASSES["unknown"]] += doubted
    return shares


def loss_of(
    model,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    rows: list[Row],
    shares: torch.Tensor,
    begins: torch.Tensor,
) -> torch.Tensor:
    """Cross-entropy at learned positions; only those are projected to the vocabulary.

    begins int64 [A, BEGIN]: first tokens of all answers. Where an answer begins, its tokens have as
    targets the `shares` [N, A], those of `target_probabilities` for all questions of the rows.
    """
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, H]
    at = targets >= 0
    chances = model.lm_head(hidden[at]).float().log_softmax(-1)  # [P, V]
    loss = -chances.gather(1, targets[at][:, None])[:, 0]
    asked = [(number, turn.first) for number, row in enumerate(rows) for turn in row.asked]
    if asked:
        place = (at.flatten().cumsum(0) - 1).view(
            at.shape
        )  # row of a learned position in `chances`
        line, first = torch.tensor(asked, device=inputs.device).T
        logits, wanted = [], []
        for step in range(BEGIN):
            column = first - 1 + step
            there = column < targets.shape[1]
            there &= targets[line, column.clamp(max=targets.shape[1] - 1)] >= 0
            line, first, shares, column = line[there], first[there], shares[there], column[there]
            logits.append(place[line, column])
            wanted.append(
                torch.zeros(len(line), chances.shape[1], device=inputs.device).index_add_(
                    1, begins[:, step], shares / shares.sum(1, keepdim=True)
                )
            )
            # the answers that are left
            shares = shares * (begins[None, :, step] == targets[line, column][:, None])
        logits = torch.cat(logits)
        loss = loss.index_put((logits,), -(torch.cat(wanted) * chances[logits]).sum(1))
    return loss.mean()


def foreseen(
    model, tokens: Tokens, device: str, chats: list[list[tuple[str, str]]], most: int = 12
) -> list[tuple[bool, bool]]:
    """Of chats: are the first tokens of the last answer predicted greedily, and is doubt begun
    instead?
    """
    rows = []
    for number, chat in enumerate(chats):
        ids, _ = tokens.chat(chat)
        first = len(ids) - len(tokens.encode(chat[-1][1])) - 1
        rows.append((number, ids[: first + most], first))
    hits = {}
    for part, inputs in padded(rows, device):
        asked = torch.zeros_like(inputs, dtype=torch.bool)
        for row, (_, ids, first) in enumerate(part):
            asked[row, first - 1 : len(ids) - 1] = True
        best = torch.zeros_like(inputs)
        with torch.inference_mode():
            hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, H]
            best[asked] = model.lm_head(hidden[asked]).argmax(-1)
        for mine, (number, ids, first) in zip(best.tolist(), part):
            hits[number] = (
                mine[first - 1 : len(ids) - 1] == ids[first:],
                mine[first - 1] == tokens.doubt,
            )
    return [hits[number] for number in range(len(rows))]


def padded(rows: list[tuple], device: str) -> Iterator[tuple[list[tuple], torch.Tensor]]:
    """Rows, whose second field is token ids, in batches of similar length, and their ids [B, T]."""
    rows = sorted(rows, key=lambda row: len(row[1]))
    for at in range(0, len(rows), 64):
        part = rows[at : at + 64]
        inputs = torch.zeros(len(part), len(part[-1][1]), dtype=torch.long, device=device)
        for row, (_, ids, *_) in enumerate(part):
            inputs[row, : len(ids)] = torch.tensor(ids)
        yield part, inputs


def begun(
    model, tokens: Tokens, device: str, chats: list[list[tuple[str, str]]], doubt: bool = True
) -> list[tuple[list[int], float]]:
    """Of chats that end with a question: the first tokens of the greedy answer, and their
    probability. doubt: may it doubt?
    """
    rows = []
    for number, chat in enumerate(chats):
        rows.append((number, [*tokens.chat(chat)[0], tokens.mark["<|assistant|>"]]))
    beginnings = {}
    for part, inputs in padded(rows, device):
        ends = torch.tensor([len(ids) for _, ids in part], device=device)  # [B]
        line, sure = torch.arange(len(part), device=device), torch.ones(len(part), device=device)
        inputs = torch.nn.functional.pad(inputs, (0, BEGIN))
        with torch.inference_mode():
            for step in range(BEGIN):
                # [B, H]
                hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[
                    line, ends + step - 1
                ]
                likely = model.lm_head(hidden).float().softmax(-1)
                if step == 0 and not doubt:
                    likely[:, tokens.doubt] = 0.0
                chance, best = likely.max(-1)
                inputs[line, ends + step], sure = best, sure * chance
        for row, (number, ids) in enumerate(part):
            beginnings[number] = inputs[row, len(ids) : len(ids) + BEGIN].tolist(), sure[row].item()
    return [beginnings[number] for number in range(len(rows))]


def pair(question: str, answer: str) -> list[tuple[str, str]]:
    return [("user", question), ("assistant", answer)]


def shares(verdicts: list[tuple[bool, bool]]) -> str:
    right, doubt = sum(r for r, _ in verdicts), sum(d and not r for r, d in verdicts)
    count = max(1, len(verdicts))
    return (
        f"right {right / count:.1%}, wrong {1 - (right + doubt) / count:.1%}, does not know "
        f"{doubt / count:.1%} of {len(verdicts)}"
    )


def sampled(questions: list, most: int) -> list:
    return random.Random(1).sample(questions, min(most, len(questions)))


def held_out_score(model, tokens: Tokens, device: str) -> str:
    """Shares of some held-out questions that are answered rightly, wrongly and with doubt."""
    known = sampled(
        [pair(question, fact.answer) for fact, question in talk.HELD_OUT.values() if fact], 600
    )
    scope = [
        pair(question, talk.SCOPE_ANSWER) for fact, question in talk.HELD_OUT.values() if not fact
    ]
    beyond = sum(doubt for _, doubt in foreseen(model, tokens, device, scope)) / len(scope)
    return f"{shares(foreseen(model, tokens, device, known))}; beyond its knowledge {beyond:.1%}"


def quick_score(model, tokens: Tokens, device: str) -> str:
    """Shares by kind of question, after other turns, and of texts to repeat."""
    told, rng = [], random.Random(1)
    covers = {flag: fact for fact in talk.FACTS.values() for flag in (fact.name, *fact.covers)}
    flags = [pair(f"What does {flag} do?", covers[flag].answer) for flag in facts.flags()]
    told.append(f"flags by name: {shares(foreseen(model, tokens, device, flags))}")
    known = [(question, fact) for fact, question in talk.HELD_OUT.values() if fact]
    for name, low, high in (("2 to 8", 0, 8), ("9 to 18", 9, 18), ("19 and more", 19, 999)):
        chats = [
            pair(question, fact.answer)
            for question, fact in known
            if low <= len(question.split()) <= high
        ]
        told.append(
            f"held out, {name} words: "
            f"{shares(foreseen(model, tokens, device, sampled(chats, 600)))}"
        )
    some = [[("user", question)] for question, _ in sampled(known, 200)]
    alone = begun(model, tokens, device, some)
    for turn in (2, 3):
        later = begun(
            model, tokens, device, [[*talk.earlier(rng, turn - 1), *chat] for chat in some]
        )
        told.append(
            f"turn {turn} answers as alone: "
            f"{sum(a[0] == b[0] for a, b in zip(alone, later)) / len(some):.1%} of {len(some)}"
        )
    copies = [chat for chat, alike in (talk.copy_chat(rng) for _ in range(300)) if alike]
    copied = foreseen(model, tokens, device, copies, CONTEXT)
    told.append(f"names, words and numbers repeated: {shares(copied)}")
    return "\n".join(told)


def load_teacher(args: argparse.Namespace) -> Teacher:
    """Load the teacher of the folder of work; train it if there is none."""
    path = args.work / "teacher.pt"
    if not path.exists():
        torch.save(
            train_teacher(args.questions, SHAPE["hidden_size"], args.seed, say).state(), path
        )
    teacher = Teacher(**torch.load(path, weights_only=True))
    if len(teacher.bias) != len(CLASSES):
        raise SystemExit(f"error: {path} knows other facts: remove it")
    return teacher


def init_embedding(embedding: torch.Tensor, tokens: Tokens, teacher: Teacher) -> None:
    """Initialise pieces that the teacher knows from its embeddings, with mean 0 and the standard
    deviation of the others.
    """
    words = [tokens.pieces.id_to_piece(number).strip("\u2581") for number in range(VOCABULARY)]
    vectors = {
        number: vector
        for number, word in enumerate(words)
        if word and (vector := teacher.embed_piece(word)) is not None
    }
    known = torch.stack([*vectors.values()])
    known -= known.mean(0)
    with torch.no_grad():
        embedding[[*vectors]] = known * (SHAPE["initializer_range"] / known.std())


def attend_in_float32() -> str:
    """Register torch's attention in float32 for transformers' models, and return its name.

    On CPUs its gradient takes four times as long in bfloat16 (torch 2.13, AMD Zen 4).
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module, query, key, value, *rest, **named):
        with torch.autocast(query.device.type, enabled=False):
            return sdpa_attention_forward(
                module, query.float(), key.float(), value.float(), *rest, **named
            )

    AttentionInterface.register("sdpa-float32", attend)
    AttentionMaskInterface.register("sdpa-float32", sdpa_mask)
    return "sdpa-float32"


def train(out: Path, args: argparse.Namespace) -> dict:
    """Train from random weights, or from the checkpoint in `--work`; returns the averaged network,
    and figures for the card.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(args.seed)
    # on GPUs some gradients have no deterministic kernel
    torch.use_deterministic_algorithms(True, warn_only=args.device != "cpu")
    torch.set_num_threads(args.threads)
    tokens = Tokens(out)
    config = LlamaConfig(
        **SHAPE,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokens.bos,
        eos_token_id=[tokens.eos, tokens.mark["<|end|>"]],
        pad_token_id=tokens.eos,
    )
    begins = torch.tensor([tokens.encode(answer)[:BEGIN] for answer in ANSWERS], device=args.device)
    clash = [
        fact.name
        for fact in talk.FACTS.values()
        if tokens.encode(fact.answer)[0] == tokens.doubt and not fact.answer.startswith(talk.DOUBT)
    ]
    if clash:
        raise SystemExit(
            f"error: the answers of {', '.join(clash)} begin with the piece of {talk.DOUBT!r}, "
            "which must tell doubt alone"
        )
    if args.bfloat16 and args.device == "cpu":
        config._attn_implementation = attend_in_float32()
    model = LlamaForCausalLM(config)
    kept = args.work / "checkpoint.pt"
    args.work.mkdir(parents=True, exist_ok=True)
    teacher = load_teacher(args)
    if not kept.exists():
        init_embedding(model.model.embed_tokens.weight, tokens, teacher)
    model.to(args.device)
    average = copy.deepcopy(model).eval()  # averages of late weights vary less than the last step's
    weights, averages = list(model.parameters()), list(average.parameters())
    # Muon for the blocks' matrices needs half the steps of AdamW, which trains embedding and norms.
    blocks = [w for name, w in model.named_parameters() if w.ndim == 2 and "embed" not in name]
    others = [w for name, w in model.named_parameters() if w.ndim == 1 or "embed" in name]
    optimizers = (
        Muon(blocks, args.lr, torch.bfloat16 if args.bfloat16 else torch.float32),
        torch.optim.AdamW(others, lr=args.lr * EMBEDDING_RATE, weight_decay=0.0, betas=(0.9, 0.98)),
    )
    highest = [args.lr, args.lr * EMBEDDING_RATE]
    done, seen, spent, place = 0, 0, 0.0, (0, 0)
    if kept.exists():
        state = torch.load(kept, map_location=args.device, weights_only=True)
        # The rate is constant until the decay begins, so that until then the number of steps may
        # still change.
        if (state["seed"], state["batch"], state["lr"]) != (args.seed, args.batch, args.lr) or (
            state["steps"] != args.steps
            and (state["done"] > DECAY * min(state["steps"], args.steps))
        ):
            raise SystemExit(
                f"error: {kept} is of another run (seed, batch, lr or steps): remove it, or "
                "give its values"
            )
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimizer, saved in zip(optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        done, seen, spent = state["done"], state["seen"], state["spent"]
        place = tuple(state["place"])
        say(f"goes on after step {done}")
    say(
        f"{sum(w.numel() for w in weights):,} parameters, {args.steps} steps of {args.batch} tokens"
    )

    def save(step: int) -> None:
        fresh = kept.with_suffix(".new")
        torch.save(
            {
                "seed": args.seed,
                "batch": args.batch,
                "lr": args.lr,
                "steps": args.steps,
                "done": step,
                "seen": seen,
                "place": place,
                "spent": spent + time.monotonic() - begin,
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            },
            fresh,
        )
        fresh.replace(kept)

    drawers = None
    if args.drawers:
        drawers = concurrent.futures.ProcessPoolExecutor(
            args.drawers,
            multiprocessing.get_context("spawn"),
            start_drawer,
            (out, args.work / "teacher.pt"),
        )
    stream = batches(tokens, teacher, args.seed, args.batch, *place, drawers)
    begin, seen_before, told = time.monotonic(), seen, 0.0
    for step in range(done, args.steps):
        part = sum(step >= share * args.steps for share in PARTS) - 1
        if place[0] < part * PART:
            place = (part * PART, 0)
            stream.close()
            stream = batches(tokens, teacher, args.seed, args.batch, *place, drawers)
        rate = min(1.0, (step + 1) / 100) * max(
            0.01, min(1.0, (1 - step / args.steps) / (1 - DECAY))
        )
        for optimizer, most in zip(optimizers, highest):
            optimizer.param_groups[0]["lr"] = most * rate
        batch, place = next(stream)
        inputs, targets = batch.inputs.to(args.device), batch.targets.to(args.device)
        wanted = batch.wanted.to(args.device)
        with torch.autocast(args.device.split(":")[0], dtype=torch.bfloat16, enabled=args.bfloat16):
            loss = loss_of(model, inputs, targets, batch.rows, wanted, begins)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, max(0.005, 1 / (step + 1)))
        seen += inputs.numel()
        told += loss.item()
        if (step + 1) % 25 == 0:
            pace = (seen - seen_before) / (time.monotonic() - begin)
            say(
                f"step {step + 1:5} loss {told / 25:.3f} {seen / 1e6:.2f}M tokens {pace:,.0f} "
                "tokens/s"
            )
            told = 0.0
        if (step + 1) % SAVED == 0:
            save(step + 1)
        if (step + 1) % 250 == 0:
            say(f"step {step + 1:5} held out: {held_out_score(average, tokens, args.device)}")
    stream.close()
    if drawers:
        drawers.shutdown(cancel_futures=True)
    minutes = (spent + time.monotonic() - begin) / 60
    parameters = sum(w.numel() for w in weights)
    return {
        "model": average,
        "tokens": tokens,
        "seen": seen,
        "minutes": minutes,
        "parameters": parameters,
    }


def write_folder(out: Path, model, tokens: Tokens) -> None:
    """Write a Hugging Face folder: weights in bfloat16, config, tokenizer settings and template."""
    ends = [tokens.mark["<|end|>"], tokens.eos]
    model.config.eos_token_id = ends
    model.to(torch.bfloat16).save_pretrained(out)
    marks = {index: tokens.pieces.id_to_piece(index) for index in range(3 + len(MARKS))}
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_prefix_space": False,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": "<s>",
        "eos_token": "<|end|>",
        "unk_token": "<unk>",
        "pad_token": "</s>",
        "model_max_length": CONTEXT,
        "added_tokens_decoder": {
            str(index): {
                "content": mark,
                "special": True,
                "normalized": False,
                "lstrip": False,
                "rstrip": False,
                "single_word": False,
            }
            for index, mark in marks.items()
        },
    }
    generation = {
        "bos_token_id": tokens.bos,
        "eos_token_id": ends,
        "pad_token_id": tokens.eos,
        "do_sample": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(TEMPLATE)


# ---- network -> score


def answerer(folder: Path, backend: str) -> Callable[..., str]:
    """Make a function from a question, and earlier messages of the user, to the greedy answer of
    mlx_llama.
    """
    from mlx_llama import load

    llm = load(folder, backend=backend)

    def answer(question: str, *before: str) -> str:
        chat = llm.chat(max_tokens=256, temperature=0)
        for text in before:
            chat.send(text)
        return chat.send(question).text

    return answer


def score(
    answer: Callable[[str], str], name: str, questions: list[tuple[Fact | None, str]]
) -> tuple[str, list[str]]:
    """Ask each question once. The answer of its fact is right, word by word; for other subjects any
    doubt is.

    Returns (score, answers that are not right).
    """
    wrong, unknown = [], 0
    for fact, question in questions:
        reply = answer(question)
        doubts = reply.startswith(talk.DOUBT)
        if reply.strip() != fact.answer if fact else not doubts:
            wrong.append(f"  {fact.name if fact else 'scope'}: {question}\n    -> {reply}")
            unknown += doubts
    right = len(questions) - len(wrong)
    return (
        f"{name}: {right} of {len(questions)} right ({right / len(questions):.1%}), "
        f"{len(wrong) - unknown} wrong, {unknown} times it does not know"
    ), wrong


def evaluate(folder: Path, backend: str) -> str:
    """Returns the lines of the model card; prints wrong answers to stderr."""
    answer = answerer(folder, backend)
    held_out = list(talk.HELD_OUT.values())
    fresh = [(None if name == "scope" else talk.FACTS[name], question) for name, question in FRESH]
    told = []
    for name, questions in (
        (
            "held-out questions about mlx_llama",
            sampled([item for item in held_out if item[0]], ASKED),
        ),
        ("held-out questions about anything else", [item for item in held_out if not item[0]]),
        ("fresh questions", fresh),
    ):
        line, wrong = score(answer, name, questions)
        say("\n".join(wrong))
        told.append(line)
    return "\n".join(told)


def read_questions(folder: Path, backend: str) -> None:
    """Write the subjects of guide/questions.txt, by which a question finds passages."""
    import numpy as np

    from mlx_llama import load
    from mlx_llama.guide.guide import read_subject
    from mlx_llama.guide.manual import LIKELIEST, QUESTIONS, ROOTS
    from mlx_llama.guide.questions import Questions

    llm = load(folder, backend=backend)
    lines = []
    for text in Questions(QUESTIONS.read_text(encoding="utf-8")).texts:
        likely = read_subject(llm, text).likely
        best = sorted(likely, key=likely.get, reverse=True)[:LIKELIEST]
        lines.append([(token, round(likely[token] * ROOTS)) for token in best])
    np.save(QUESTIONS.with_suffix(".npy"), np.array(lines, np.uint16))


def judge(folder: Path, backend: str, questions: Path) -> None:
    """Write the answers to a file of questions, a JSON object a line, beside it: of questions.jsonl
    to answers.jsonl.

    before: earlier messages of the same conversation, where a question has them.
    """
    answer = answerer(folder, backend)
    asked = [
        json.loads(line)
        for line in questions.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    with open(
        questions.with_name(f"answers{questions.stem.removeprefix('questions')}.jsonl"),
        "w",
        encoding="utf-8",
    ) as file:
        for item in asked:
            file.write(
                json.dumps(
                    item | {"answer": answer(item["question"], *item.get("before", ()))},
                    ensure_ascii=False,
                )
                + "\n"
            )


def judged() -> str:
    """The judgement of the questions in one line, counted in answers*.jsonl."""
    verdicts = [
        json.loads(line).get("verdict")
        for name in ("answers", "answers2")
        for line in read_lines(f"evaluation/{name}.jsonl")
    ]
    count = {name: verdicts.count(name) for name in ("right", "half", "wrong", "unknown")}
    return (
        "{right} right, {half} half right, {wrong} wrong, {unknown} times it did not know what it "
        "should".format(**count)
    )


def write_card(out: Path, args: argparse.Namespace, result: dict, told: str) -> None:
    """Write the model card from `guide_data/card.md` and the measured figures."""
    shape = (
        f"{SHAPE['num_hidden_layers']} layers of width {SHAPE['hidden_size']}, "
        f"{SHAPE['num_attention_heads']} query heads "
        f"and {SHAPE['num_key_value_heads']} key-value heads, feed-forward width "
        f"{SHAPE['intermediate_size']}, "
        f"rope theta 10000, tied embeddings, context {CONTEXT}"
    )
    lines = [line for fact in talk.FACTS.values() for line in (*fact.ask, *fact.newcomers)]
    questions = sum(talk.ways(line) for line in lines)
    written = [
        line for name in facts.NEWCOMERS for line in read_text(f"guide_data/{name}").splitlines()
    ]
    newcomers = sum(bool(line) and not line.startswith("## ") for line in written)
    card = (
        (HERE / "guide_data" / "card.md")
        .read_text(encoding="utf-8")
        .format(
            parameters=f"{result['parameters']:,}",
            shape=shape,
            megabytes=f"{(out / 'model.safetensors').stat().st_size / 1e6:.1f}",
            vocabulary=VOCABULARY,
            facts=len(talk.FACTS),
            marked=len(talk.HELD_OUT) - len(talk.SCOPE_HELD_OUT),
            questions=f"{questions:,}",
            newcomers=f"{newcomers:,}",
            doubted=f"{DOUBTED[2]:.0%}",
            doubted_last=f"{DOUBTED[3]:.0%}",
            asked=ASKED,
            situations=len(talk.SITUATIONS),
            copies=f"{COPIES[2]:.0%}",
            turns=f"{TURNS[2]:.0%}",
            instructed=f"{INSTRUCTED:.0%}",
            read=f"{args.questions:,}",
            steps=args.steps,
            mixed=f"{MIXED[1]:.0%}",
            second=f"{PARTS[1]:.0%}",
            third=f"{PARTS[2]:.0%}",
            last=f"{PARTS[3]:.0%}",
            batch=args.batch,
            judged=judged(),
            seen=f"{result['seen'] / 1e6:.1f}",
            lr=args.lr,
            minutes=f"{result['minutes']:.0f}",
            machine=f"{args.threads} CPU core{'s' if args.threads > 1 else ''}"
            if args.device == "cpu"
            else args.device,
            command=f"python examples/training/train_guide.py --seed {args.seed} --steps "
            f"{args.steps} "
            f"--batch {args.batch} --lr {args.lr} --threads "
            f"{args.threads}{' --bfloat16' * args.bfloat16}"
            + f" --device {args.device} --drawers {args.drawers}"
            * (args.device != "cpu"),
            products="bfloat16" if args.bfloat16 else "float32",
            scope=len(talk.SCOPE_HELD_OUT),
            score=told,
            fresh=len(FRESH),
        )
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="print the score of a trained guide and its wrong answers",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="print shares of right answers by kind of question, in about a minute",
    )
    parser.add_argument(
        "--card", action="store_true", help="write the score into the card of a trained guide again"
    )
    parser.add_argument("--ask", metavar="TEXT", help="ask a trained guide one question")
    parser.add_argument(
        "--judge",
        type=Path,
        metavar="FILE",
        help="answer the questions of a file questions*.jsonl, into answers*.jsonl beside it",
    )
    parser.add_argument(
        "--read-questions",
        action="store_true",
        help="write guide/questions.npy, after a training or a change of questions.txt",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=HERE / "work",
        help="folder of the teacher, and of the checkpoint that a stopped run goes on from; where it "
        "has these, --out has their vocabulary",
    )
    parser.add_argument(
        "--no-score",
        action="store_true",
        help="leave out the evaluation and the card after training",
    )
    parser.add_argument(
        "--model", type=Path, default=GUIDE, help="folder of the guide to evaluate or ask"
    )
    parser.add_argument(
        "--backend", default="auto", help="backend of mlx_llama for --evaluate and --ask"
    )
    parser.add_argument(
        "--out", type=Path, default=GUIDE, help="folder to write the trained guide to"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument(
        "--questions", type=int, default=400_000, help="questions that the teacher learns from"
    )
    parser.add_argument("--batch", type=int, default=3072, help="tokens in a batch")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--drawers",
        type=int,
        default=0,
        metavar="N",
        help="processes that draw the batches meanwhile, for a GPU, which takes one in less time "
        "than a core draws it; the batches are the same",
    )
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="multiply in bfloat16: faster on GPUs, and on CPUs with instructions for it "
        "(avx512_bf16, amx_bf16)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=2,
        help="CPU threads; a run is repeatable with the same number only",
    )
    args = parser.parse_args()
    if args.evaluate:
        print(evaluate(args.model, args.backend))
        return
    if args.quick:
        from transformers import LlamaForCausalLM

        print(
            quick_score(
                LlamaForCausalLM.from_pretrained(args.model).float().eval(),
                Tokens(args.model),
                "cpu",
            )
        )
        return
    if args.card:
        state = torch.load(args.work / "checkpoint.pt", map_location="cpu", weights_only=True)
        result = {
            "seen": state["seen"],
            "minutes": state["spent"] / 60,
            "parameters": sum(
                w.numel() for name, w in state["model"].items() if name != "lm_head.weight"
            ),
        }
        write_card(args.model, args, result, evaluate(args.model, args.backend))
        return
    if args.read_questions:
        read_questions(args.model, args.backend)
        return
    if args.judge:
        judge(args.model, args.backend, args.judge)
        return
    if args.ask:
        print(answerer(args.model, args.backend)(args.ask))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    # a teacher comes after the vocabulary
    if not any((args.work / name).exists() for name in ("checkpoint.pt", "teacher.pt")):
        train_vocabulary(args.out, args.seed)
    result = train(args.out, args)
    told = "" if args.no_score else quick_score(result["model"], result["tokens"], args.device)
    write_folder(args.out, result["model"], result["tokens"])
    say(f"{result['seen'] / 1e6:.1f}M tokens in {result['minutes']:.0f} minutes")
    if args.no_score:
        return
    say(told)
    told = evaluate(args.out, args.backend)
    write_card(args.out, args, result, told)
    print(told)


if __name__ == "__main__":
    main()
