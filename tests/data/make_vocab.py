"""Writes this folder's files anew, from an unpacked source distribution of llama-cpp-python and its
built package:

    PYTHONPATH=. python tests/data/make_vocab.py llama_cpp_python-0.3.36/vendor/llama.cpp/models

vocab-llama-cpp.json.xz: {"texts": [text], "vocabularies": {name: what llama.cpp says about it},
"pre": {pre-tokenizer: [[id]] of every text}}, the last with deepseek-coder's vocabulary, its
tokenizer.ggml.pre overridden. Of gemma-4's vocabulary, the tokens of its first merges are here.
"""

from __future__ import annotations

import json
import lzma
import random
import shutil
import sys
import tempfile
import unicodedata
from pathlib import Path

import gguf

NAMES = ("llama-spm", "llama-bpe", "deepseek-coder", "gemma-4")
MERGES = {"gemma-4": 15_000}  # to keep
WORDS = (
    "Hello world the quick BROWN fox don't I'LL we've it'S They'Re o'clock École ÉCOLE ÉTÉ "
    "Straße naïve नमस्ते สวัสดี 你好世界 "
    "こんにちは 안녕하세요 مرحبا Привет ПРИВЕТ iPhone x=1; f(x) -> {} [] <s> </s> <unk> <|eot_id|> "
    "<|im_end|> <0x41> 🦙 👩‍👩‍👧 1234567 "
    "3.14159 ½ ² ٣٤ Ⅷ <|end_of_text|> <｜fim▁begin｜> <｜end▁of▁sentence｜>"
).split()
SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    " \n",
    "\r\n",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\x0b",
    "\x85",
    " \t ",
]


def texts(count: int) -> list[str]:
    """Words, spaces, digits, punctuation and letters of every Unicode category that has any."""
    rng = random.Random(7)
    groups: dict[str, list[str]] = {}
    for char in map(chr, range(1, 0x1F000)):
        if unicodedata.category(char) not in ("Cn", "Cs", "Co"):
            groups.setdefault(unicodedata.category(char), []).append(char)
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 12)):
            kind = rng.random()
            if kind < 0.45:
                parts.append(rng.choice(WORDS))
            elif kind < 0.6:
                parts.append(rng.choice(SPACES))
            elif kind < 0.7:
                parts.append("".join(rng.choices("0123456789", k=rng.randint(1, 9))))
            elif kind < 0.8:
                parts.append(
                    "".join(rng.choices("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", k=rng.randint(1, 5)))
                )
            else:
                parts.append(
                    "".join(rng.choices(groups[rng.choice(sorted(groups))], k=rng.randint(1, 4)))
                )
            parts.append(" " * rng.randint(0, 1))
        lines.append("".join(parts))
    return lines


def shrink(path: Path, count: int, out: Path) -> None:
    """Write a vocabulary of its first merges: their tokens, special ones and bytes."""
    fields = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in gguf.GGUFReader(path).fields.items()
        if name.startswith("tokenizer.ggml.")
    }
    texts, types = fields["ggml.tokens"], fields["ggml.token_type"]
    merges = fields["ggml.merges"][:count]
    kept = {part for merge in merges for part in (*merge.split(" "), merge.replace(" ", ""))}
    kept |= {chr(byte) for byte in range(128)} | {"</s>", "<b>"}
    ids = [i for i, text in enumerate(texts) if text in kept or types[i] != gguf.TokenType.NORMAL]
    writer = gguf.GGUFWriter(out, "gemma4")
    writer.add_tokenizer_model(fields["ggml.model"])
    writer.add_token_list([texts[i] for i in ids])
    writer.add_token_scores([fields["ggml.scores"][i] for i in ids])
    writer.add_token_types([types[i] for i in ids])
    writer.add_token_merges(merges)
    for name, value in fields.items():
        if name.endswith("_token_id"):
            writer.add_uint32(f"tokenizer.{name}", ids.index(value))
    writer.add_add_space_prefix(fields["ggml.add_space_prefix"])
    writer.add_add_bos_token(fields["ggml.add_bos_token"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(models: Path) -> None:
    import llama_cpp
    from llama_cpp import Llama

    from mlx_llama.core.text.pre_tokenizers import PRE_TOKENIZERS

    here = Path(__file__).parent
    result = {"texts": texts(200), "vocabularies": {}, "pre": {}}

    def ids(llama: Llama, special: bool) -> list[list[int]]:
        return [
            llama.tokenize(text.encode(), add_bos=False, special=special)
            for text in result["texts"]
        ]

    folder = Path(tempfile.mkdtemp())
    for name in NAMES:
        path = models / f"ggml-vocab-{name}.gguf"
        if name in MERGES:
            shrink(path, MERGES[name], folder / path.name)
            shutil.copyfile(f"{path}.inp", folder / f"{path.name}.inp")
            path = folder / path.name
        (here / f"{path.name}.xz").write_bytes(
            lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        )
        llama = Llama(str(path), vocab_only=True, verbose=False)
        if name in MERGES:
            cases = Path(f"{path}.inp").read_text().split("\n__ggml_vocab_test__\n")
            lines = [llama.tokenize(case.encode(), add_bos=False) for case in cases]
            Path(f"{path}.out").write_text("".join(" ".join(map(str, x)) + "\n" for x in lines))
        for suffix in (".inp", ".out"):
            shutil.copyfile(f"{path}{suffix}", here / (path.name + suffix))
        vocab = llama._model.vocab
        every = range(llama_cpp.llama_vocab_n_tokens(vocab))
        result["vocabularies"][name] = {
            "plain": ids(llama, False),
            "special": ids(llama, True),
            "ends": [token for token in every if llama_cpp.llama_vocab_is_eog(vocab, token)],
            "control": [token for token in every if llama_cpp.llama_vocab_is_control(vocab, token)],
            "bos": llama_cpp.llama_vocab_bos(vocab),
            "adds_bos": bool(llama_cpp.llama_vocab_get_add_bos(vocab)),
        }
    for pre in PRE_TOKENIZERS:
        overrides = {"tokenizer.ggml.pre": pre}
        llama = Llama(
            str(models / "ggml-vocab-deepseek-coder.gguf"),
            vocab_only=True,
            verbose=False,
            kv_overrides=overrides,
        )
        result["pre"][pre] = ids(llama, False)
    data = json.dumps(result, separators=(",", ":")).encode()
    (here / "vocab-llama-cpp.json.xz").write_bytes(
        lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
