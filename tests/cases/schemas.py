"""Random JSON schemas for the tests of grammars: every keyword that llguidance enforces, nested,
with noise.
"""

from __future__ import annotations

import functools
import lzma
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cases.texts import load_vocabulary
from mlx_llama.core.answers.grammar import Constraint, Grammars, Rule
from mlx_llama.core.files.gguf import GGUFFile

FORMATS = "date time date-time email uuid ipv4 ipv6 hostname duration uri".split()
PATTERNS = r"^[a-z]+$ ^[A-Z]{2}-\d{3}$ b ^(foo|bar)$ ^a?b*$ \.txt$ ^[^\s]{1,5}$ ^é+$ ^x|y$".split()
TEXTS = ["", "a", "yes", 'with "quotes"', "back\\slash", "é🦙", "new\nline", "null", "1", " "]
TEXTS += ["<tag>", "</s>"]
NOISE: dict[str, Any] = {
    "title": "T",
    "description": 'a "word"\n',
    "default": None,
    "examples": [1],
    "deprecated": False,
}


def random_schema(source: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of up to `depth` levels; some have no instance, and some are beyond llguidance."""
    defs: dict[str, Any] = {}
    schema = _schema(source, depth, defs)
    return {**schema, "$defs": defs} if defs else schema


def _schema(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    kinds = [_string, _string, _number, _integer, _integer, _constant, _simple]
    if depth:
        kinds += [_object, _object, _object, _array, _array, _any_of, _all_of, _reference]
    schema = r.choice(kinds)(r, depth - 1, defs)
    for name in NOISE:
        if r.random() < 0.05:
            schema[name] = NOISE[name]
    return schema


def _maybe(r: random.Random, chance: float, **fields: Any) -> dict[str, Any]:
    return fields if r.random() < chance else {}


def _string(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = r.random()
    if kind < 0.25:
        schema["pattern"] = r.choice(PATTERNS)
    elif kind < 0.4:
        schema["format"] = r.choice(FORMATS)
    else:
        low = r.randint(0, 4)
        schema |= _maybe(r, 0.4, minLength=low) | _maybe(r, 0.6, maxLength=low + r.randint(0, 8))
    return schema


def _limits(r: random.Random, number: Any) -> dict[str, Any]:
    low = number(r)
    high = low + abs(number(r))
    return (
        _maybe(r, 0.4, minimum=low)
        | _maybe(r, 0.4, maximum=high)
        | _maybe(r, 0.15, exclusiveMinimum=low)
        | _maybe(r, 0.15, exclusiveMaximum=high)
    )


def _integer(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "integer",
        **_limits(r, lambda r: r.randint(-200, 2000)),
        **_maybe(r, 0.15, multipleOf=r.choice((2, 3, 5, 10))),
    }


def _number(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    return {"type": "number", **_limits(r, lambda r: round(r.uniform(-50, 500), r.randint(0, 3)))}


def _constant(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    values = [*TEXTS, 0, -1, 2.5, True, False, None, [], {}, [1, "a"], {"k": [None]}]
    if r.random() < 0.3:
        return {"const": r.choice(values)}
    return {
        "enum": r.sample(values, r.randint(1, 5)),
        **_maybe(r, 0.2, type=["string", "number", "null"]),
    }


def _simple(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    return r.choice(
        (
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["integer", "null"]},
            {"type": ["string", "boolean"]},
            {},
        )
    )


def _object(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    names = r.sample(
        ("name", "age", "é", "a b", 'q"', "items", "type", "x-y", "0", "back\\"), r.randint(0, 4)
    )
    schema: dict[str, Any] = {"type": "object"}
    if names:
        schema["properties"] = {name: _schema(r, depth, defs) for name in names}
        schema |= _maybe(r, 0.7, required=r.sample(names, r.randint(0, len(names))))
    if r.random() < 0.15:
        schema["patternProperties"] = {r.choice(("^p_", "^[0-9]$", "_id$")): _schema(r, 0, defs)}
    if r.random() < 0.7:
        schema["additionalProperties"] = r.random() < 0.2 or (
            False if r.random() < 0.8 else _schema(r, 0, defs)
        )
    return (
        schema
        | _maybe(r, 0.1, minProperties=r.randint(0, 2))
        | _maybe(r, 0.1, maxProperties=r.randint(2, 5))
    )


def _array(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    low = r.randint(0, 2)
    schema: dict[str, Any] = (
        {"type": "array"}
        | _maybe(r, 0.4, minItems=low)
        | _maybe(r, 0.8, maxItems=low + r.randint(0, 3))
    )
    if r.random() < 0.25:
        schema["prefixItems"] = [_schema(r, depth, defs) for _ in range(r.randint(1, 3))]
    if r.random() < 0.8:
        schema["items"] = _schema(r, depth, defs) if r.random() < 0.9 else False
    return schema


def _any_of(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    options = [_schema(r, depth, defs) for _ in range(r.randint(1, 3))]
    return {"oneOf" if r.random() < 0.25 else "anyOf": options}


def _all_of(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    kind = r.choice((_object, _integer, _string))
    return {"allOf": [kind(r, depth, defs) for _ in range(2)]}


def _reference(r: random.Random, depth: int, defs: dict[str, Any]) -> dict[str, Any]:
    name = f"d{r.randint(0, 2)}"
    if name not in defs:
        defs[name] = True  # taken, so that a reference inside may point back
        defs[name] = _schema(r, depth, defs)
    return {"$ref": f"#/$defs/{name}"}


DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Llama 2's vocabulary of 32,000 tokens."""
    path = tmp_path_factory.mktemp("vocabulary") / "llama-spm.gguf"
    path.write_bytes(lzma.decompress((DATA / "ggml-vocab-llama-spm.gguf.xz").read_bytes()))
    tokenizer = load_vocabulary(GGUFFile(path).metadata)
    return Grammars(tokenizer, tokenizer.eos_ids, 32000)


def allowed(constraint: Constraint, grammars: Grammars) -> np.ndarray:
    """Allowed token ids."""
    mask = constraint.mask()
    assert mask.dtype == np.int32 and mask.shape == (-(-grammars.vocab_size // 32),)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[grammars.vocab_size :].any()
    return np.flatnonzero(bits)


@functools.cache
def closing_tokens(grammars: Grammars) -> np.ndarray:
    texts, closing = grammars.tokenizer.token_bytes(), (b'"', b"}", b"]", b'"}', b'"]')
    return np.array([token for token, text in enumerate(texts) if text in closing])


def walk(
    grammars: Grammars,
    wanted: Rule,
    source: random.Random,
    *,
    starts_text=True,
    longest=400,
    forces=True,
) -> str | None:
    """The text of random allowed tokens, with a taste for closing quotes and brackets; None if it
    does not end.
    """
    constraint = grammars.compile(wanted, starts_text=starts_text)
    stream = grammars.tokenizer.stream(starts_text=starts_text and not constraint.keeps_space)
    closing = closing_tokens(grammars)
    text, count = "", 0
    while count < longest:
        if constraint.is_finished:
            return text + stream.finish()
        tokens = constraint.forced() if forces else []
        if not tokens:
            ids = allowed(constraint, grammars)
            ends = np.isin(ids, grammars.eos)
            assert len(ids) and ends.any() == constraint.is_complete
            if constraint.is_complete and (ends.all() or source.random() < 0.5):
                constraint.accept(int(ids[ends][0]))
                assert constraint.is_finished and constraint.is_complete
                continue
            ids = ids[~ends]
            closings = ids[np.isin(ids, closing)]
            closes = len(closings) and source.random() < 0.5
            tokens = [int(source.choice(closings if closes else ids))]
        for token in tokens:
            constraint.accept(token)
            text += stream.push(token)
        count += len(tokens)
    return None
