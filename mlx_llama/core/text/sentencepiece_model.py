"""Serialised sentencepiece models: the fields of sentencepiece_model.proto that the library's Python API does not expose.

A serialised protobuf message is a list of fields. Two concatenated messages are their union: of a field in both, the last
value counts. So appending a field sets it. This file avoids a dependency on protobuf itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

# SentencePiece.Type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_USER_DEFINED_TYPE = b"\x18\x04"  # SentencePiece.type (3) = USER_DEFINED
_pack_float = struct.Struct("<f").pack
_BYTES = [bytes([value]) for value in range(256)]  # looked up: faster than bytes([value])


def set_space_prefix(model: bytes, prefix: bool) -> bytes:
    """Set whether the model puts a space before a text (normalizer_spec.add_dummy_prefix)."""
    return model + _encode_message(3, b"\x18" + _BYTES[prefix])


def user_defined_ids(model: bytes) -> list[int]:
    """Ids of the user-defined symbols.

    model: as the library reads it. It begins with its pieces (field 1), each ending with its type unless that is NORMAL.
    """
    ids: list[int] = []
    if _USER_DEFINED_TYPE not in model:
        return ids
    at = count = 0
    while at < len(model) and model[at] == 0x0A:  # field 1, a message
        length, at = _decode_varint(model, at + 1)
        at += length
        if model[at - 2 : at] == _USER_DEFINED_TYPE:
            ids.append(count)
        count += 1
    return ids


def build_bpe_model(pieces: Iterable[tuple[str, float, int]]) -> bytes:
    """Serialise a BPE model with byte fallback, as sentencepiece's trainer would write it.

    It keeps text as it is: no space before a text, none removed, spaces made visible (U+2581).

    pieces: (text, score, type) by id.
    """
    parts = []
    for text, score, kind in pieces:
        data = text.encode()
        piece = b"\x0a" + _encode_varint(len(data)) + data + b"\x15" + _pack_float(score) + b"\x18" + _BYTES[kind]
        # piece = 1, score = 2, type = 3; the length of nearly all is one byte
        parts.append(b"\x0a" + _BYTES[len(piece)] + piece if len(piece) < 0x80 else _encode_message(1, piece))
    trainer = b"\x18\x02\x98\x02\x01"  # model_type = BPE, byte_fallback = true
    normalizer = b"\x18\x00\x20\x00\x28\x01"  # add_dummy_prefix, remove_extra_whitespaces: no; escape_whitespaces: yes
    return b"".join(parts) + _encode_message(2, trainer) + _encode_message(3, normalizer)


def _encode_message(number: int, body: bytes) -> bytes:
    """A field that is a message."""
    return _BYTES[number << 3 | 2] + _encode_varint(len(body)) + body


def _encode_varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    if value < 0x80:
        return _BYTES[value]
    return _BYTES[value & 0x7F | 0x80] + _encode_varint(value >> 7)


def _decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position behind it)"""
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
