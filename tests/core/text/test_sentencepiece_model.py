"""Serialised sentencepiece models, read and written by protobuf and by the library itself."""

import pytest
import sentencepiece
from making import sentencepiece_model
from sentencepiece import sentencepiece_model_pb2 as proto

from mlx_llama.core.text.sentencepiece_model import (
    BYTE,
    build_bpe_model,
    set_space_prefix,
    user_defined_ids,
)

TEXTS = ["Hello world", "  two  spaces ", "çà 🦙\n", "x"]


@pytest.mark.parametrize(
    "symbols", [(), ("<|user|>", "<|end|>"), tuple(f"<{'x' * n}>" for n in range(120, 135))]
)
def test_user_defined_ids_are_protobufs(symbols):
    model = sentencepiece_model(512, user_defined=symbols)
    pieces = proto.ModelProto.FromString(model).pieces
    wanted = [
        i
        for i, piece in enumerate(pieces)
        if piece.type == proto.ModelProto.SentencePiece.USER_DEFINED
    ]
    assert user_defined_ids(model) == wanted and len(wanted) == len(symbols)


@pytest.mark.parametrize("prefix", [True, False])
def test_the_space_prefix_is_the_last_one_set(prefix):
    model = set_space_prefix(set_space_prefix(sentencepiece_model(), not prefix), prefix)
    read = proto.ModelProto.FromString(model)
    assert read.normalizer_spec.add_dummy_prefix is prefix
    assert read.trainer_spec.model_type == proto.TrainerSpec.BPE  # other fields stay
    assert (
        sentencepiece.SentencePieceProcessor(model_proto=model)
        .encode("x", out_type=str)[0]
        .startswith("▁")
        is prefix
    )


def test_a_built_model_is_the_trained_one_without_prefix():
    # a piece of 128 bytes
    trained = proto.ModelProto.FromString(sentencepiece_model(user_defined=("y" * 119,)))
    pieces = [(piece.piece, piece.score, piece.type) for piece in trained.pieces]
    model = build_bpe_model(pieces)
    built = proto.ModelProto.FromString(model)
    assert [(piece.piece, piece.score, piece.type) for piece in built.pieces] == pieces
    assert sum(piece.type == BYTE for piece in built.pieces) == 256
    trained.normalizer_spec.add_dummy_prefix = False
    ours = sentencepiece.SentencePieceProcessor(model_proto=model)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.SerializeToString())
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
