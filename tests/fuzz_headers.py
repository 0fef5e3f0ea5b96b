"""Damage the headers of small GGUF and safetensors models at random and open them.

    python tests/fuzz_headers.py --count 100000
    python tests/fuzz_headers.py --format gguf --first 4711 --count 1 --keep /tmp/case    # one case again

Opening a file, its tensors, its tokenizer and its template must succeed or raise a LlamaError,
within 5 s of processor time and 200 MB of memory. (format, i) seeds case i, so a case is the same
on every machine. gguf's own writer and `making` build the seed corpus. Exits with 1 after the first
case that breaks a rule.
"""  # noqa: E501

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from making import make_checkpoint
from making_gguf import make_gguf
from tokenizers.pre_tokenizers import ByteLevel

from mlx_llama.core.errors import LlamaError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.system.machine import peak_memory

Fields = list[tuple[int, int]]

FORMATS = ("gguf", "safetensors")
SECONDS = 5.0  # of processor time for one case; a case takes some milliseconds
MEMORY = 200 << 20  # bytes beyond what the imports take
TINY = {"vocab_size": 280, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
NUMBERS = [*range(10), 31, 32, 33, 127, 128, 255, 256]
POWERS = [1 << bits for bits in (15, 16, 31, 32, 40, 60, 61, 63)]
NUMBERS += [power + more for power in POWERS for more in (-1, 0, 1)]
NUMBERS += [(1 << 64) - 32, (1 << 64) - 1]
VALUES = [None, True, False, 0, 1, -1, 2, 3, 32, 64, 1 << 31, 1 << 53, 1 << 60, 1 << 64, -(1 << 63)]
VALUES += [10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "\ud800", "x" * 5000]
VALUES += "F32 F16 BF16 U32 I8 F64 llama yarn linear dynamic llama3".split()
VALUES += ["model.safetensors", "../x.safetensors", "/etc/passwd"]
VALUES += [[], [0], [0, 0], [1, 2, 3], [[]], {}, {"a": 1}]


class Seed(NamedTuple):
    """A model to damage."""

    files: dict[str, bytes]
    entry: str  # the file or folder to open
    headers: dict[str, int]  # bytes of each file's header
    fields: dict[str, Fields]  # (offset, bytes) of all fields of a GGUF file
    values: dict[str, Fields]  # and of its metadata's values


def read_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.iterdir())}


def gguf_fields(path: Path) -> tuple[int, Fields, Fields]:
    """(offset of the data, all fields, the metadata's values), by gguf's own reader."""
    reader = gguf.GGUFReader(path)
    counts, values = [(0, 4), (4, 4), (8, 8), (16, 8)], []
    for field in (*reader.fields.values(), *(tensor.field for tensor in reader.tensors)):
        at = field.offset
        if field.name.startswith("GGUF."):
            continue
        for i, part in enumerate(field.parts):
            # only the ends of a vocabulary; otherwise it takes most of the damage
            if i < 12 or i > len(field.parts) - 5:
                counts.append((at, part.nbytes))
            at += part.nbytes
        values += counts[-1:] if field.types else []  # fields of tensors have no types
    counts, values = ([place for place in fields if place[1]] for fields in (counts, values))
    return int(reader.data_offset), counts, values


def small_vocabulary(kind: str):
    def edit(writer: gguf.GGUFWriter) -> None:
        words = [*"▁abcdefghx", *"ab ▁a cd ef gh abcd efgh ▁ab é 🦙".split(), "h" * 300]
        if kind == "llama":
            bytes_ = [f"<0x{i:02X}>" for i in range(256)]
        else:
            words = ["ab", "cd", "ef", "gh", "abcd", "efgh", *(f"{i}é" for i in range(15))]
            bytes_ = ByteLevel.alphabet()
        ordinary = gguf.TokenType.BYTE if kind == "llama" else gguf.TokenType.NORMAL
        types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2]
        types += [gguf.TokenType.NORMAL] * 21 + [ordinary] * 256
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre("default" if kind == "llama" else "llama-bpe")
        writer.add_token_list(["<unk>", "<s>", "</s>", *words, *bytes_])
        writer.add_token_types(types)
        if kind == "llama":
            writer.add_token_scores([float(-i) for i in range(280)])
        else:
            writer.add_token_merges(["a b", "c d", "e f", "g h", "ab cd", "ef gh"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        writer.add_rope_scaling_type(
            gguf.RopeScalingType.YARN if kind == "llama" else gguf.RopeScalingType.LINEAR
        )
        writer.add_rope_scaling_factor(2.0)
        writer.add_sliding_window(16)
        writer.add_bool("llama.attention.causal", True)
        writer.add_array("x.bools", [True, False])
        writer.add_float64("x.double", 0.5)
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))

    return edit


def gguf_seeds(folder: Path) -> Iterator[Seed]:
    tied = {"attention_bias": True, "tie_word_embeddings": True}
    scaled = {"edit": lambda writer: writer.add_float32("llama.rope.scale_linear", 2.0)}
    made = [{"kinds": "Q8_0", "edit": small_vocabulary("llama")}]
    made.append({"kinds": "F16", "edit": small_vocabulary("gpt2"), **tied})
    for i, settings in enumerate([*made, {"kinds": "Q4_0", "split": 6, **scaled}]):
        root = folder / f"gguf{i}"
        root.mkdir()
        make_gguf(root / "m.gguf", tokenizer=None, **{**TINY, **settings})
        paths = sorted(root.iterdir())
        described = {path.name: gguf_fields(path) for path in paths}
        headers, fields, values = (
            {name: all_[i] for name, all_ in described.items()} for i in range(3)
        )
        yield Seed(read_files(root), paths[0].name, headers, fields, values)


def safetensors_seeds(folder: Path) -> Iterator[Seed]:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parts = {"dtype": "bfloat16", "shards": 2, "attention_bias": True, "rope_scaling": rope}
    for i, settings in enumerate(({}, parts, {"tie_word_embeddings": True})):
        root = make_checkpoint(folder / f"safetensors{i}", tokenizer=False, **{**TINY, **settings})
        if i == 2:
            pack(root)
        (root / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.5}')
        headers = {path.name: path.stat().st_size for path in root.glob("*.json")}
        for path in root.glob("*.safetensors"):
            headers[path.name] = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        yield Seed(read_files(root), "", headers, {}, {})


def pack(root: Path) -> None:
    """Replace one matrix by mx.quantize's form, with arbitrary codes."""
    from making import write_safetensors

    from mlx_llama.core.files.safetensors import open_safetensors

    file = open_safetensors(root / "model.safetensors")
    tensors = {
        name: ("F32", stored.shape, stored.tensor(name).bits.tobytes())
        for name, stored in file.items()
    }
    name = "model.layers.0.mlp.up_proj"
    tensors[name + ".weight"] = ("U32", (32, 4), bytes(32 * 4 * 4))
    tensors |= {f"{name}.{part}": ("F32", (32, 1), bytes(32 * 4)) for part in ("scales", "biases")}
    write_safetensors(root / "model.safetensors", tensors)
    config = json.loads((root / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 32, name: {"bits": 4, "group_size": 32}}
    (root / "config.json").write_text(json.dumps(config))


def damage_field(raw: bytearray, fields: Fields, rng: random.Random) -> None:
    """Change the number, or a character, of one field."""
    # an earlier change may have truncated the file
    fields = [(at, size) for at, size in fields if at + size <= len(raw)]
    if not fields:
        return
    at, size = rng.choice(fields)
    if size in (1, 2, 4, 8):
        old = int.from_bytes(raw[at : at + size], "little")
        new = rng.choice(
            (*NUMBERS, old + 1, old - 1, old * 2, old ^ 1 << rng.randrange(8 * size), len(raw) - at)
        )
        raw[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    else:
        raw[at + rng.randrange(size)] = rng.randrange(256)


def damage_bytes(raw: bytearray, header: int, fields: Fields, rng: random.Random) -> None:
    """Change the first `header` bytes in one place, or truncate the file."""
    if not raw:
        return
    header = min(header, len(raw))
    kind, at = rng.randrange(12), rng.randrange(header)
    if kind < 2:
        raw[at] = rng.randrange(256)
    elif kind < 7 and fields:
        damage_field(raw, fields, rng)
    elif kind == 7:
        raw[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
    elif kind == 8:
        del raw[at : at + rng.choice((1, 2, 4, 8, 16, 100))]
    elif kind == 9:
        raw[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 16, 100)))
    elif kind == 10:  # copy a piece to another place
        size = rng.choice((4, 8, 12, 40, 200))
        to = rng.randrange(header)
        raw[to:to] = raw[at : at + size]
    else:
        del raw[rng.randrange(len(raw) + 1) if rng.random() < 0.5 else at :]


def damage_json(raw: bytes, rng: random.Random) -> bytes:
    """Change one value, name or the order in a JSON text."""
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):  # an earlier change has broken it
        return raw
    places = []

    def visit(node) -> None:
        keys = (
            node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        )
        for key in keys:
            places.append((node, key))
            visit(node[key])

    visit(tree)
    if not places:
        return raw
    node, key = rng.choice(places)
    kind = rng.randrange(8)
    if kind == 0 and isinstance(node, dict):
        names = ("", "x", "lm_head.weight", "__metadata__", "\ud800", str(key) + "x")
        node[rng.choice(names)] = node.pop(key)
    elif kind == 1:
        del node[key]
    elif kind == 2:
        other, there = rng.choice(places)
        other[there], node[key] = node[key], other[there]
    elif kind == 3 and isinstance(node[key], (int, float)):
        node[key] = node[key] * rng.choice((-1, 2, 1 << 40)) + rng.choice((-1, 0, 1))
    elif kind == 4:
        strange = ("[" * 900 + "]" * 900, "1e999", "-" * 50, '{"a":1,"a":2}', "9" * 5000)
        deep = "[" * 100_000 if rng.random() < 0.1 else rng.choice(strange)
        node[key] = "\0"
        return json.dumps(tree).replace('"\\u0000"', deep).encode()
    else:
        node[key] = rng.choice(VALUES)
    try:
        return json.dumps(tree).encode()
    except (ValueError, RecursionError):  # the swap above can nest a node in itself
        return raw


def damage(seed: Seed, rng: random.Random) -> dict[str, bytes]:
    """The files that differ from the seed's."""
    changed: dict[str, bytearray] = {}
    # only the metadata's values, so that the header is read to its end
    values_only = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5))):
        name = rng.choice(sorted(seed.headers))
        raw = changed.get(name, bytearray(seed.files[name]))
        if values_only and name.endswith(".gguf"):
            damage_field(raw, seed.values[name], rng)
        elif name.endswith(".gguf") or rng.random() < 0.3:
            damage_bytes(raw, seed.headers[name], seed.fields.get(name, []), rng)
        elif name.endswith(".json"):
            raw = bytearray(damage_json(bytes(raw), rng))
        else:  # safetensors: the JSON of its header, mostly with a length that fits
            length = min(int.from_bytes(raw[:8], "little"), len(raw))
            text = damage_json(bytes(raw[8 : 8 + length]), rng)
            size = len(text) if rng.random() < 0.95 else rng.choice(NUMBERS)
            raw = bytearray(struct.pack("<Q", size) + text + raw[8 + length :])
        changed[name] = raw
    return {name: bytes(raw) for name, raw in changed.items()}


def open_all(path: Path) -> None:
    """Read the config, tokenizer, template and all bytes of the tensors."""
    opened = open_checkpoint(path)
    for tensor in opened.tensors.values():
        tensor.float32()
        tensor.release()
    if opened.gguf_metadata is not None:
        for value in opened.gguf_metadata.values():
            if isinstance(value, Sequence):
                list(value)
        if opened.eos_token_ids and "tokenizer.ggml.model" in opened.gguf_metadata:
            opened.tokenizer.decode(opened.tokenizer.encode("abcd efgh"))
            if opened.template is not None:
                opened.template.render([{"role": "user", "content": "hi"}])


def limit_memory() -> None:
    """Make large allocations fail at once, even untouched ones. Linux only; elsewhere the peak
    shows them.
    """
    if sys.platform == "linux":
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))


def run(kind: str, first: int, count: int, keep: Path | None) -> collections.Counter:
    """Run cases first .. first + count - 1. Raises SystemExit for a broken rule."""
    outcomes: collections.Counter = collections.Counter()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seeds = list((gguf_seeds if kind == "gguf" else safetensors_seeds)(folder))
        places = []
        for i, seed in enumerate(seeds):
            place = folder / f"case{i}"
            place.mkdir()
            for file, raw in seed.files.items():
                (place / file).write_bytes(raw)
            open_all(place / seed.entry)  # undamaged
            places.append(place)
        limit_memory()
        before = peak_memory()
        for i in range(first, first + count):
            rng = random.Random(f"{kind} {i}")
            which = rng.randrange(len(seeds))
            seed, place = seeds[which], places[which]
            changed = damage(seed, rng)
            for file, raw in changed.items():
                (place / file).write_bytes(raw)
            if keep is not None:
                shutil.copytree(place, keep, dirs_exist_ok=True)
            faulthandler.dump_traceback_later(20 * SECONDS, exit=True)
            started = time.process_time()
            try:
                open_all(place / seed.entry)
                outcome = "opened"
            except LlamaError as e:
                outcome = type(e).__name__
                if "\n" in str(e) or len(str(e)) > 2000:
                    said = f"{kind} case {i}: the message is not one line: {e!r}"
                    raise SystemExit(said[:3000]) from None
            except BaseException:
                traceback.print_exc()
                raise SystemExit(f"{kind} case {i}: not a LlamaError") from None
            took = time.process_time() - started
            faulthandler.cancel_dump_traceback_later()
            slowest = max(slowest, took)
            outcomes[outcome] += 1
            if took > SECONDS:
                raise SystemExit(f"{kind} case {i}: took {took:.1f} s, expected at most {SECONDS}")
            if (grown := peak_memory() - before) > MEMORY:
                raise SystemExit(f"{kind} case {i}: took {grown >> 20} MB, not {MEMORY >> 20}")
            for file in changed:
                (place / file).write_bytes(seed.files[file])
    counts = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    grown = (peak_memory() - before) >> 20
    print(f"{kind}: {count} cases: {counts}; slowest {slowest:.2f} s, memory +{grown} MB")
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    number = dict(type=int, metavar="N")
    parser.add_argument("--count", default=2000, help="cases of each format (2000)", **number)
    parser.add_argument("--first", default=0, help="number of the first case (0)", **number)
    parser.add_argument("--format", choices=FORMATS, help="one format only")
    parser.add_argument("--keep", type=Path, help="a folder to leave the last case's files in")
    args = parser.parse_args()
    for kind in (args.format,) if args.format else FORMATS:
        run(kind, args.first, args.count, args.keep)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
