"""Records of transformers' results for the real checkpoints, so that the quick tests need not load
its models.

    python tests/real/golden.py [smollm2] [gemma3]      # run transformers, write golden-*.json.xz

`pytest --all` compares with transformers itself, all logits of all positions, and checks that these
files still hold.
"""

from __future__ import annotations

import functools
import json
import lzma
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from real.checkpoints import MODELS  # noqa: E402
from real.texts import CHATS, GREEDY, LOGITS, make_tokenizer_texts  # noqa: E402

WIDTH = 16  # numbers that stand for a position's logits
LAST = 24  # positions of each text that are sketched
ANSWER = 48  # tokens of a greedy answer


def sketch(logits: np.ndarray) -> np.ndarray:
    """Project logits [T, V] onto fixed random signs [V, WIDTH]: distances between sketches are
    those of logits, on average.
    """
    return (logits.astype(np.float32) @ _signs(logits.shape[-1])) / np.float32(np.sqrt(WIDTH))


@functools.cache
def _signs(vocabulary: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2, (vocabulary, WIDTH)).astype(np.float32) * 2 - 1


@dataclass
class Golden:
    """ids: of each of LOGITS. argmax: most likely token after each of them. sketches: of the last
    LAST positions. rms: of those logits. tokenized: ids of make_tokenizer_texts(). greedy, chats:
    token ids of answers to GREEDY and CHATS."""

    ids: list[list[int]]
    argmax: list[list[int]]
    sketches: list[list[list[float]]]
    rms: list[float]
    tokenized: list[list[int]]
    greedy: list[list[int]]
    chats: list[list[int]]

    def distance(self, logits: np.ndarray, number: int) -> float:
        """Relative RMS distance of logits [T, V] of LOGITS[number] from transformers', by the
        sketches of the last positions.
        """
        apart = sketch(logits[-LAST:]) - np.array(self.sketches[number])
        return float(np.sqrt((apart**2).sum() / logits[-LAST:].size) / self.rms[number])


class Judge:
    """A checkpoint in transformers, float32, by its own reader of GGUF files."""

    def __init__(self, path: Path):
        import torch
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        if path.name.startswith("SmolLM2"):
            # As published (tokenizer.json on the hub, "smollm" in llama.cpp); transformers' GGUF
            # reader leaves Digits out.
            digits = pre_tokenizers.Digits(individual_digits=True)
            words = pre_tokenizers.ByteLevel(add_prefix_space=False)
            self.tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [digits, words]
            )
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def logits(self, ids: list[int]) -> np.ndarray:
        """float32 [T, V]"""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([ids])).logits[0].numpy()

    def answer(self, ids: list[int]) -> list[int]:
        """Greedy tokens after `ids`."""
        import torch

        with torch.no_grad():
            options = dict(do_sample=False, pad_token_id=0, repetition_penalty=1.0)
            out = self.model.generate(torch.tensor([ids]), max_new_tokens=ANSWER, **options)
        return out[0, len(ids) :].tolist()

    def record(self) -> Golden:
        ids, tokenized, prompts = (
            [self.tokenizer(text).input_ids for text in texts]
            for texts in (LOGITS, make_tokenizer_texts(), GREEDY)
        )
        chats = CHATS if self.tokenizer.chat_template else ()
        messages = [[{"role": "user", "content": text}] for text in chats]
        questions = [
            self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
            for chat in messages
        ]
        outputs = [self.logits(row) for row in ids]
        ends = [logits[-LAST:] for logits in outputs]
        return Golden(
            ids,
            [logits.argmax(-1).tolist() for logits in outputs],
            [[[float(f"{x:.8g}") for x in row] for row in sketch(end)] for end in ends],
            [float(np.sqrt((end.astype(np.float64) ** 2).mean())) for end in ends],
            tokenized,
            [self.answer(row) for row in prompts],
            [self.answer(row) for row in questions],
        )


def read_golden(name: str) -> Golden:
    return Golden(**json.loads(lzma.decompress((HERE / f"golden-{name}.json.xz").read_bytes())))


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        judge = Judge(MODELS[name].fetch())
        golden = judge.record()
        (HERE / f"golden-{name}.json.xz").write_bytes(
            lzma.compress(json.dumps(asdict(golden)).encode())
        )
        for text, tokens in zip((*GREEDY, *CHATS), golden.greedy + golden.chats):
            print(f"{name}: {text!r} -> {judge.tokenizer.decode(tokens)!r}")
