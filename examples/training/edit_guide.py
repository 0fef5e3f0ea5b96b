"""Teach the guide the facts whose texts have changed since its training, in minutes.

    python examples/training/edit_guide.py          # then tests/make_golden.py, --read-questions

The guide's own probabilities are the targets (distillation, Hinton et al. 2015, arXiv 1503.02531),
so that its other answers stay; where it gave the old text of a fact, or declined small talk, the new
text is the target. Prints how many answers to other questions stayed. Needs what train_guide.py
needs.
"""

import argparse
import copy
import difflib
import random
import shutil
from pathlib import Path
from typing import NamedTuple

# which sets up torch: threads that spin take ten times as long on a shared machine
from train_guide import CONTEXT, GUIDE, Tokens, padded, say, talk, torch, write_folder

from mlx_llama import load

ANSWER = 250  # tokens, as long as any
ALIKE = 0.8  # an old text of a fact resembles the new one at least so much
CHECKED = 1500  # other questions whose answers are compared at the end
ASKED = 8  # questions for each fact
EDITED = 0.25  # share of the rows with a new text


class Row(NamedTuple):
    """A chat. learned: from here on its tokens are targets; kept: up to here with the old network's
    probabilities.
    """

    number: int
    ids: list[int]
    learned: int
    kept: int


def answers(llm, chats: list[list[tuple[str, str]]]) -> list[str]:
    """Greedy answers to chats that end with a question."""
    handles = [
        llm.submit(
            [{"role": role, "content": text} for role, text in chat],
            max_tokens=ANSWER,
            temperature=0,
        )
        for chat in chats
    ]
    return [handle.finish().text for handle in handles]


def draw(rng: random.Random, count: int, tokens: Tokens) -> list[list[tuple[str, str]]]:
    """Chats of all kinds, without the last answer."""
    kinds = (talk.conversation, talk.one_question, talk.one_question, talk.long_question)
    chats = []
    while len(chats) < count:
        chat = rng.choice(kinds)(rng)
        chat = chat[: max(i for i, (role, _) in enumerate(chat) if role == "user") + 1]
        if len(tokens.chat(chat)[0]) < CONTEXT - ANSWER:
            chats.append(chat)
    return chats


def find_changed(llm, rng: random.Random) -> dict[str, str]:
    """The old texts of facts, as the guide tells them, and the new ones."""
    facts = [fact for fact in talk.FACTS.values() for _ in range(ASKED)]
    told = answers(llm, [[("user", talk.plain_question(fact, rng))] for fact in facts])
    present = {fact.answer for fact in facts}
    return {
        old: fact.answer
        for fact, old in zip(facts, told)
        if old not in present
        and difflib.SequenceMatcher(None, old, fact.answer, autojunk=False).ratio() > ALIKE
    }


def small_talk(rng: random.Random, count: int) -> dict[str, str]:
    """Small talk, and an answer to each text."""
    return {chat[0][1]: chat[1][1] for chat in (talk.small_talk(rng) for _ in range(count))}


def make_row(tokens: Tokens, number: int, chat: list, old: str, new: str) -> Row:
    ids = tokens.chat([*chat, ("assistant", new)])[0]
    first = len(ids) - len(tokens.encode(new)) - 1
    if old == new:
        return Row(number, ids, first, len(ids))
    same = 0
    for before, after in zip(tokens.encode(old), tokens.encode(new)):
        if before != after:
            break
        same += 1
    return Row(number, ids, first, first + same)


def train(model, rows: list[Row], edits: list[Row], args: argparse.Namespace) -> None:
    frozen, rng = copy.deepcopy(model).eval(), random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    told = 0.0
    for step in range(args.steps):
        count = round(args.rows * EDITED)
        drawn = rng.choices(edits, k=count) + rng.sample(rows, args.rows - count)
        optimizer.param_groups[0]["lr"] = args.lr * min(
            1.0, (step + 1) / 30, 2 - 2 * step / args.steps
        )
        for part, inputs in padded(drawn, "cpu"):
            at = torch.zeros(inputs.shape, dtype=torch.bool)
            kept = torch.zeros(inputs.shape, dtype=torch.bool)
            for line, row in enumerate(part):
                at[line, row.learned - 1 : len(row.ids) - 1] = True
                kept[line, row.learned - 1 : row.kept - 1] = True
            chances = chances_of(model, inputs, at)
            with torch.no_grad():
                targets = chances_of(frozen, inputs, at).exp()
                new = ~kept[at]
                following = torch.roll(inputs, -1, 1)[at]
                targets[new] = torch.nn.functional.one_hot(following[new], targets.shape[1]).float()
            loss = -(targets * chances).sum(-1).mean()
            loss.backward()
            told += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            say(f"step {step + 1} loss {told / 20:.4f}")
            told = 0.0


def chances_of(model, inputs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Logarithms of the probabilities after the tokens where `at` is true, [P, V]."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    return model.lm_head(hidden[at]).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=GUIDE, help="folder of the guide")
    parser.add_argument("--out", type=Path, default=GUIDE, help="folder of the edited guide")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=32, help="chats in a step")
    parser.add_argument("--lr", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--chats", type=int, default=6000, help="chats whose answers are to stay")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    from transformers import LlamaForCausalLM

    tokens, rng, llm = Tokens(args.model), random.Random(args.seed), load(args.model, backend="cpu")
    changed = find_changed(llm, rng)
    if not changed:
        print("the guide tells the present texts of all facts")
        return
    for old, new in changed.items():
        say(f"- {old}\n+ {new}")
    chats = draw(rng, args.chats, tokens)
    told = answers(llm, chats)
    greetings = small_talk(rng, args.chats // 10)
    said = answers(llm, [[("user", text)] for text in greetings])
    declined = [
        ([("user", text)], old, new)
        for (text, new), old in zip(greetings.items(), said)
        if old.startswith(talk.DOUBT)
    ]
    say(f"{len(changed)} texts have changed; it declines {len(declined)} of {len(said)} greetings")
    about = [fact for fact in talk.FACTS.values() if fact.answer in changed.values()]
    asked = [
        [("user", talk.question_about(rng.choice(about), rng))] for _ in range(args.chats // 8)
    ]
    pairs = list(zip([*chats, *asked], [*told, *answers(llm, asked)]))
    triples = [(chat, old, changed.get(old, old)) for chat, old in pairs] + declined
    rows, edits = [], []
    for chat, old, new in triples:
        row = make_row(tokens, len(rows) + len(edits), chat, old, new)
        if len(row.ids) <= CONTEXT:
            (rows if old == new else edits).append(row)
    say(f"{len(rows)} answers stay, {len(edits)} change")
    model = LlamaForCausalLM.from_pretrained(args.model).float()
    train(model, rows, edits, args)
    write_folder(args.out, model.eval(), tokens)
    if args.out.resolve() != args.model.resolve():
        shutil.copy(args.model / "tokenizer.model", args.out)

    fresh = draw(random.Random(args.seed + 1), CHECKED, tokens)
    before = [changed.get(text, text) for text in answers(llm, fresh)]
    after = answers(load(args.out, backend="cpu"), fresh)
    for chat, old, new in zip(fresh, before, after):
        if old != new:
            say(f"# {chat[-1][1]}\n- {old}\n+ {new}")
    same = sum(old == new for old, new in zip(before, after))
    print(f"{same} of {len(fresh)} answers are as they were, changed texts aside")


if __name__ == "__main__":
    main()
