"""Train the guide: the three-million-parameter Llama that ships in `mlx_llama/guide`.

    python examples/training/train_guide.py                     # text -> vocabulary -> network -> folder with a model card
    python examples/training/train_guide.py --evaluate          # the score on questions held out of training
    python examples/training/train_guide.py --ask "which backends are there?"

Needs `pip install -e ".[test]"` (torch, transformers, sentencepiece) and no downloads: `guide_data/` contains the facts
and the questions for them, from which a seeded generator draws an endless stream of conversations. The same seed, steps and
thread count give the same text and vocabulary on all machines, and the same weights on the same machine.

The result is an ordinary Hugging Face folder. To change the guide's facts, edit `guide_data/facts.py` and run this again.
"""

import argparse
import copy
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from guide_data import facts, talk
from guide_data.facts import FACTS, Fact
from guide_data.fresh import FRESH

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).resolve().parent
GUIDE = HERE.parents[1] / "mlx_llama" / "guide"

CONTEXT = 512
VOCABULARY = 3072
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=192, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
    head_dim=32, intermediate_size=512, max_position_embeddings=CONTEXT, rms_norm_eps=1e-5, tie_word_embeddings=True,
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
    sample = [text for _ in range(12000) for _, text in talk.conversation(rng)]
    sample += [talk.raw_text(rng) for _ in range(2000)]
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

    def chat(self, messages: list[tuple[str, str]]) -> tuple[list[int], list[bool]]:
        """Encode a conversation. Only the assistant's tokens are learned; users' texts contain deliberate noise."""
        ids, learn = [self.bos], [False]
        for role, text in messages:
            said = [*self.pieces.encode(text), self.mark["<|end|>"]]
            ids += [self.mark[f"<|{role}|>"], *said]
            learn += [False] + [role == "assistant"] * len(said)
        return ids, learn

    def raw(self, text: str) -> tuple[list[int], list[bool]]:
        ids = [self.bos, *self.pieces.encode(text), self.eos]
        return ids, [False] + [True] * (len(ids) - 1)

    def blurred(self, ids: list[int], learn: list[bool], rng: random.Random) -> list[int]:
        """Replace 7 % of the pieces that are not learned by unknown, so that no single word decides the meaning."""
        fixed = {self.bos, *self.mark.values()}
        return [
            self.pieces.unk_id() if not on and i not in fixed and rng.random() < 0.07 else i for i, on in zip(ids, learn)
        ]


def batches(tokens: Tokens, rng: random.Random, size: int) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """Yield batches of about `size` tokens without end: ids [B, T] and targets [B, T], -100 for tokens not learned.

    A row is one conversation. Rows of similar length share a batch, which keeps padding small.
    """
    import torch

    while True:
        pool = []
        while len(pool) < 3000:
            kind = rng.random()
            if kind < 0.03:
                ids, learn = tokens.raw(talk.raw_text(rng))
            elif kind < 0.05:
                ids, learn = tokens.chat(talk.echo(rng))
            elif kind < 0.18:
                ids, learn = tokens.chat(talk.conversation(rng))
            else:
                # Answers are memorised soon; choosing the right one takes longer. Most rows are therefore one question
                # and the start of its answer, which is many times cheaper.
                ids, learn = tokens.chat(talk.one_question(rng))
                end = learn.index(True) + rng.randint(7, 14)
                ids, learn = ids[:end], learn[:end]
            if len(ids) <= CONTEXT:
                pool.append((tokens.blurred(ids, learn, rng), learn))
        pool.sort(key=lambda row: len(row[0]))
        groups, group = [], []
        for row in pool:
            if group and len(row[0]) * (len(group) + 1) > size:
                groups.append(group)
                group = []
            group.append(row)
        rng.shuffle(groups)  # without the last, incomplete group
        for group in groups:
            length = max(len(ids) for ids, _ in group)
            inputs = torch.zeros(len(group), length, dtype=torch.long)
            targets = torch.full((len(group), length), -100)
            for row, (ids, learn) in enumerate(group):
                inputs[row, : len(ids)] = torch.tensor(ids)
                targets[row, : len(ids) - 1] = torch.tensor([i if on else -100 for i, on in zip(ids[1:], learn[1:])])
            yield inputs, targets


# ---- tokens -> network


def loss_of(model, inputs: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    """Cross-entropy at learned positions; only those are projected to the vocabulary."""
    import torch

    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, H]
    at = targets >= 0
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[at]).float(), targets[at])


def foreseen(model, tokens: Tokens, device: str) -> float:
    """Share of held-out questions whose whole answer is predicted greedily. One forward per answer, so it is cheap."""
    import torch

    right = 0
    held_out = list(talk.HELD_OUT.values())
    with torch.inference_mode():
        for fact, question in held_out:
            for answer in (fact.answer,) if fact else facts.SCOPE_ANSWERS:
                ids, learn = tokens.chat([("user", question), ("assistant", answer)])
                best = model(input_ids=torch.tensor([ids], device=device)).logits[0].argmax(-1).tolist()
                right += all(b == i for b, i, on in zip(best, ids[1:], learn[1:]) if on)
    return right / len(held_out)


def train(out: Path, args: argparse.Namespace) -> dict:
    """Train from random weights; returns the network with averaged weights, and figures for the card."""
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
    say(f"{sum(w.numel() for w in weights):,} parameters, {args.steps} steps of {args.batch} tokens")

    stream = batches(tokens, random.Random(f"{args.seed} text"), args.batch)
    begin, seen, told = time.monotonic(), 0, 0.0
    for step in range(args.steps):
        warm, left = min(1.0, (step + 1) / 100), 1 - step / args.steps
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * warm * (0.02 + 0.98 * (0.5 - 0.5 * math.cos(math.pi * left)))
        inputs, targets = (x.to(args.device) for x in next(stream))
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
        if (step + 1) % 50 == 0:
            pace = seen / (time.monotonic() - begin)
            say(f"step {step + 1:5} loss {told / 50:.3f} {seen / 1e6:.2f}M tokens {pace:,.0f} tokens/s")
            told = 0.0
        if (step + 1) % 500 == 0:
            say(f"step {step + 1:5} foresees {foreseen(average, tokens, args.device):.1%} of the held-out answers")
            write_folder(out, copy.deepcopy(average), tokens)  # a checkpoint to try during training
    minutes = (time.monotonic() - begin) / 60
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


def answerer(folder: Path, backend: str) -> Callable[[str], str]:
    """Make a function from a question to the greedy answer of mlx_llama."""
    from mlx_llama import load

    llm = load(folder, backend=backend)

    def answer(question: str) -> str:
        return llm.generate([{"role": "user", "content": question}], max_tokens=200, temperature=0).text

    return answer


def score(answer: Callable[[str], str], name: str, questions: list[tuple[Fact | None, str]]) -> tuple[str, list[str]]:
    """Ask each question once. An answer is right if it contains all keys of its fact. Returns (score, wrong answers)."""
    wrong = []
    for fact, question in questions:
        reply = answer(question)
        if not all(key in reply.lower() for key in (fact.keys if fact else facts.SCOPE_KEYS)):
            wrong.append(f"  {fact.name if fact else 'scope'}: {question}\n    -> {reply}")
    right = len(questions) - len(wrong)
    return f"{name}: {right} of {len(questions)} right ({right / len(questions):.1%})", wrong


def evaluate(folder: Path, backend: str) -> str:
    """Returns the two lines of the model card; prints wrong answers to stderr."""
    answer = answerer(folder, backend)
    named = {fact.name: fact for fact in FACTS}
    fresh = [(named.get(name), question) for name, question in FRESH]
    told = []
    for name, questions in (("held-out questions", list(talk.HELD_OUT.values())), ("fresh questions", fresh)):
        line, wrong = score(answer, name, questions)
        say("\n".join(wrong))
        told.append(line)
    return "\n".join(told)


def write_card(out: Path, args: argparse.Namespace, result: dict, told: str) -> None:
    """Write the model card from `guide_data/card.md` and the measured figures."""
    shape = (
        f"{SHAPE['num_hidden_layers']} layers of width {SHAPE['hidden_size']}, {SHAPE['num_attention_heads']} query heads "
        f"and {SHAPE['num_key_value_heads']} key-value heads, feed-forward width {SHAPE['intermediate_size']}, "
        f"rope theta 10000, tied embeddings, context {CONTEXT}"
    )
    card = (HERE / "guide_data" / "card.md").read_text(encoding="utf-8").format(
        parameters=f"{result['parameters']:,}", shape=shape, megabytes=f"{(out / 'model.safetensors').stat().st_size / 1e6:.1f}",
        vocabulary=VOCABULARY, facts=len(FACTS), questions=f"{sum(talk.ways(line) for f in FACTS for line in talk.ASK[f.name]):,}",
        steps=args.steps, batch=args.batch, seen=f"{result['seen'] / 1e6:.1f}", lr=args.lr, minutes=f"{result['minutes']:.0f}",
        machine=f"{args.threads} CPU core{'s' if args.threads > 1 else ''}" if args.device == "cpu" else args.device,
        command=f"python examples/training/train_guide.py --seed {args.seed} --steps {args.steps} --batch {args.batch} --lr {args.lr} --threads {args.threads}",
        scope=len(talk.lines(talk.SCOPE_HELD_OUT)), score=told, fresh=len(FRESH),
    )
    (out / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluate", action="store_true", help="print the score of a trained guide and its wrong answers")
    parser.add_argument("--ask", metavar="TEXT", help="ask a trained guide one question")
    parser.add_argument("--model", type=Path, default=GUIDE, help="folder of the guide to evaluate or ask")
    parser.add_argument("--backend", default="auto", help="backend of mlx_llama for --evaluate and --ask")
    parser.add_argument("--out", type=Path, default=GUIDE, help="folder to write the trained guide to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2800)
    parser.add_argument("--batch", type=int, default=2048, help="tokens in a batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; a run is repeatable with the same number only")
    args = parser.parse_args()
    if args.evaluate:
        print(evaluate(args.model, args.backend))
        return
    if args.ask:
        print(answerer(args.model, args.backend)(args.ask))
        return
    # Set before torch is imported: spinning threads make a shared machine ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args.out.mkdir(parents=True, exist_ok=True)
    train_vocabulary(args.out, args.seed)
    result = train(args.out, args)
    write_folder(args.out, result["model"], result["tokens"])
    say(f"{result['seen'] / 1e6:.1f}M tokens in {result['minutes']:.0f} minutes")
    told = evaluate(args.out, args.backend)
    write_card(args.out, args, result, told)
    print(told)


if __name__ == "__main__":
    main()
