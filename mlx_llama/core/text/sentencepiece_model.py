"""Serialised sentencepiece models: read and set fields of sentencepiece_model.proto that the
library's Python API lacks.

A protobuf message is a list of fields. Concatenating two messages merges them, and the last value
of a field wins, so appending a field sets it. protobuf would be a dependency and 40 ms of a start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

# Token types of llama.cpp (llama.h, llama_token_type). Sentencepiece (SentencePiece.Type) has the
# same but UNDEFINED.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)

PIECES, TRAINER, NORMALIZER = 1, 2, 3  # fields of ModelProto: pieces, trainer_spec, normalizer_spec

_USER_DEFINED_TYPE = b"\x18\x04"  # SentencePiece.type (3) = USER_DEFINED
_pack_float = struct.Struct("<f").pack
_BYTES = [bytes([value]) for value in range(256)]  # a lookup is faster than bytes([value])


def set_space_prefix(model: bytes, prefix: bool) -> bytes:
    """Set whether the model puts a space before a text (normalizer_spec.add_dummy_prefix)."""
    return model + _encode_message(NORMALIZER, b"\x18" + _BYTES[prefix])


def user_defined_ids(model: bytes) -> list[int]:
    """Ids of the user-defined symbols."""
    if _USER_DEFINED_TYPE not in model:
        return []
    pieces = (value for number, value in read_fields(model) if number == PIECES)
    return [
        token
        for token, piece in enumerate(pieces)
        if _USER_DEFINED_TYPE in piece and dict(read_fields(piece)).get(3) == USER_DEFINED
    ]


def read_pieces(model: bytes) -> Iterator[tuple[str, float, int]]:
    """Yield (text, score, type) of the pieces, by id."""
    for number, piece in read_fields(model):
        if number == PIECES:
            fields = dict(read_fields(piece))
            (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
            yield fields.get(1, b"").decode(), score, fields.get(3, NORMAL)


def read_settings(model: bytes, number: int) -> dict[int, Any]:
    """{field number: value} of `TRAINER` or `NORMALIZER`; see `read_fields`."""
    messages = (message for key, message in read_fields(model) if key == number)
    return {name: value for message in messages for name, value in read_fields(message)}


def read_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the (field number, value) pairs of a message; a value is an int, or the bytes of a
    text, message or float.

    The message must be valid: the library has parsed it before.
    """
    at = 0

    def read_varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = read_varint()
        if key & 7 == 0:
            yield key >> 3, read_varint()
        else:
            size = {1: 8, 5: 4}.get(key & 7) or read_varint()
            at += size
            yield key >> 3, message[at - size : at]


def build_bpe_model(pieces: Iterable[tuple[str, float, int]]) -> bytes:
    """Serialise a BPE model with byte fallback, as sentencepiece's trainer would write it.

    The model keeps text unchanged: it adds and removes no spaces, and shows them as U+2581.

    pieces: (text, score, type) by id.
    """
    parts = []
    for text, score, kind in pieces:
        data = text.encode()
        piece = b"\x0a" + _encode_varint(len(data)) + data
        piece += b"\x15" + _pack_float(score) + b"\x18" + _BYTES[kind]
        # piece = 1, score = 2, type = 3. Most sizes take one byte, and then a lookup is faster.
        size = _BYTES[len(piece)] if len(piece) < 0x80 else _encode_varint(len(piece))
        parts.append(b"\x0a" + size + piece)
    trainer = b"\x18\x02\x98\x02\x01"  # model_type = BPE, byte_fallback = true
    # add_dummy_prefix, remove_extra_whitespaces: no; escape_whitespaces: yes
    normalizer = b"\x18\x00\x20\x00\x28\x01"
    parts += [_encode_message(TRAINER, trainer), _encode_message(NORMALIZER, normalizer)]
    return b"".join(parts)


def _encode_message(number: int, body: bytes) -> bytes:
    """Encode a field that is a message."""
    return _BYTES[number << 3 | 2] + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    """Encode seven bits per byte, the lowest first."""
    if value < 0x80:
        return _BYTES[value]
    return _BYTES[value & 0x7F | 0x80] + _encode_varint(value >> 7)
