"""Lowering of the forward: segments, probes of the program that runs, and buffers."""

from __future__ import annotations

import numpy as np
import pytest

from backends.conftest import relative_error
from backends.kernels.models import MODELS, answer, model, plain
from cpu_fallback.kernels import ops as words, workspace
from cpu_fallback.kernels.lowering import Columns, Normed, Trace
from cpu_fallback.kernels.program import Program
from cpu_fallback.model import Llama

# ---- probes and segments


def probed(
    llama: Llama, cuts: tuple[int, ...] = (), all_positions: bool = True
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logits, values of every probe over all tokens)."""
    seen: dict[str, list[np.ndarray]] = {}
    logits, _ = answer(
        llama,
        cuts=cuts,
        all_positions=all_positions,
        probe=lambda name, array: seen.setdefault(name, []).append(array),
    )
    return logits, {
        name: np.concatenate(parts, axis=parts[0].ndim - 2) for name, parts in seen.items()
    }


@pytest.mark.parametrize("cuts", [(), (30, 31, 32)], ids=["prompt", "decoded"])
@pytest.mark.parametrize("case", MODELS)
def test_probes_read_the_program_that_runs(case, cuts):
    """Values equal NumPy's within rounding, and the logits have the bits of a run without
    probes.
    """
    llama = model(case)
    logits, probes = probed(llama, cuts)
    np.testing.assert_array_equal(logits, answer(llama, cuts=cuts)[0])
    np.testing.assert_array_equal(probes["logits"], logits)
    _, wanted = probed(plain(case), cuts)
    assert list(probes) and probes.keys() == wanted.keys()
    assert len(probes) == 3 + 10 * llama.config.num_hidden_layers
    for name in wanted:
        assert relative_error(probes[name], wanted[name]) < 1e-5, name
    last, _ = probed(llama, cuts, all_positions=False)
    np.testing.assert_array_equal(last[:, -1], logits[:, -1])


def test_probes_of_fixed_point_activations_show_their_rounding():
    _, exact = probed(plain("Q4_K_M"))
    for bits, low, high in ((16, 1e-7, 1e-3), (8, 1e-3, 0.2)):
        _, probes = probed(model("Q4_K_M", activation_bits=bits))
        assert low < relative_error(probes["0.attention_norm"], exact["0.attention_norm"]) < high


def test_probes_of_a_prompt_of_several_chunks():
    llama, seen = model("many formats", 2, 16), {}
    tokens = np.random.default_rng(2).integers(0, 384, (2, workspace.CHUNK + 50)).astype(np.int32)
    logits, _ = answer(llama, tokens, probe=seen.__setitem__)
    np.testing.assert_array_equal(logits, answer(llama, tokens)[0])
    for cut in (1, 60):
        parts: dict[str, list[np.ndarray]] = {}
        answer(
            llama,
            tokens,
            (cut,),
            probe=lambda name, array: parts.setdefault(name, []).append(array),
        )
        for name, array in seen.items():
            np.testing.assert_array_equal(np.concatenate(parts[name], axis=array.ndim - 2), array)


# ---- checks of operations and buffers


def test_a_program_refuses_incomplete_operations():
    core = model("odd widths").runner
    program = Program(core.code, 1)
    names = (
        "qkv qkv_bytes heads key_heads keys_at values_at page_kind page_step page_keys page_values "
        "key_scales value_scales rotates table_at query_table_at"
    )
    operands = dict.fromkeys(names.split(), 1)
    kind = f"rotate {core.config.head_dim}"
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add(kind, 1, **{name: operands[name] for name in operands if name != "page_keys"})
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add(kind, 1, **operands, more=1)
    with pytest.raises(ValueError, match="not among the compiled operations"):
        names = (
            "qkv qkv_bytes shared key_heads out out_bytes page_kind page_step page_keys "
            "page_values key_scales value_scales window is_chunk scale sinks"
        )
        program.add("attend nothing", 1, **dict.fromkeys(names.split(), 1))
    for bad in (-1, 1.5, None):
        with pytest.raises(ValueError, match="integers from 0 on"):
            program.add(kind, 1, **operands | {"page_keys": bad})
    with pytest.raises(ValueError, match="finished program"):
        program.prepare(core.context)
    with pytest.raises(ValueError, match="finished program"):
        core.decode.program.prepare(core.context[:-1])
    with pytest.raises(ValueError, match="finished program"):
        core.decode.program.prepare(core.context.astype(np.int32))


def test_matrices_must_fit_the_buffers_they_read_and_write():
    llama = model("odd widths")
    core = llama.runner

    def trace() -> Trace:
        return Trace(llama.config, core.code, core.workspace, 1, True)

    down = llama.decoder.blocks[0].mlp.down.weight
    qkv = llama.decoder.blocks[0].mixer.qkv.weight
    narrow, lowered = workspace.Buffer(1, 0), trace()
    with pytest.raises(ValueError, match="does not fit inputs of 0"):
        lowered.multiply(Columns(lowered, narrow, 0, 0), (down,), None)
    with pytest.raises(ValueError, match="a bias of 3"):
        lowered.multiply(
            Columns(lowered, core.workspace.hidden, 0, 40), (down,), np.zeros(3, np.float32)
        )
    for buffer in (narrow, core.workspace.scratch):
        product = lowered.multiply(Columns(lowered, core.workspace.hidden, 0, 40), (down,), None)
        with pytest.raises(ValueError, match="do not fit a buffer"):
            product.place(buffer)
    product.place(core.workspace.hidden)
    with pytest.raises(ValueError, match="has a buffer already"):
        product.place(core.workspace.hidden)
    with pytest.raises(ValueError, match="layer 0: query, key and value have"):
        spec = llama.config.layers[0].mixer
        words.split_heads(lowered.multiply(lowered.stream, qkv[:2], None), spec)
    with pytest.raises(ValueError, match="not multiples of 256"):
        lowered.pack(
            Normed(lowered, workspace.Buffer(40), 1e-5), list(core.code.recipe.activations)
        )
    with pytest.raises(ValueError, match="no output buffer"):
        lowered.program.finish()
