"""Lowering of the forward: segments, probes of the program that runs, and buffers."""

from __future__ import annotations

import numpy as np
import pytest

from backends.conftest import relative_error
from backends.kernels.models import LENGTH, MODELS, answer, load, model, plain
from cpu_fallback.kernels import ops as words, workspace
from cpu_fallback.kernels.lowering import Normed, Rows, Trace
from cpu_fallback.kernels.program import Program
from cpu_fallback.model import Llama

# ---- probes and segments


def probed(llama: Llama, cuts: tuple[int, ...] = (), all_positions: bool = True) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(logits, values of every probe over all tokens)."""
    seen: dict[str, list[np.ndarray]] = {}
    logits, _ = answer(llama, cuts=cuts, all_positions=all_positions,
                       probe=lambda name, array: seen.setdefault(name, []).append(array))
    return logits, {name: np.concatenate(parts, axis=parts[0].ndim - 2) for name, parts in seen.items()}


def test_segments_and_their_marks():
    """Programs of the three traces: a decoded token, a prompt up to its last position, all positions of a prompt."""
    core = model("head 36")._runner
    for segment in (core.decode, core.prompt, core.last, core.body, core.head):
        assert segment.program.records is not None and len(segment.program)
        assert [mark.last for mark in segment.marks] == sorted(mark.last for mark in segment.marks)
        assert all(0 <= mark.first <= mark.last <= len(segment.program) for mark in segment.marks)
    names = {mark.name for mark in core.decode.marks}
    assert len(core.decode.marks) == len(names) == 3 + 10 * core.config.num_hidden_layers
    assert {mark.name for mark in (*core.body.marks, *core.head.marks)} == names
    assert {mark.name for mark in core.head.marks} == {"norm", "logits"}
    assert core.prompt.marks == core.last.marks == ()
    # The last layer continues with the last position's query and stream.
    assert set(core.last.moves) == {core.workspace.qkv, core.workspace.hidden}
    assert core.decode.moves == core.prompt.moves == core.body.moves == core.head.moves == ()
    # A prompt and its last position make the operations of a decoded token.
    assert len(core.prompt.program) + len(core.last.program) == len(core.decode.program)
    assert len(core.body.program) + len(core.head.program) == len(core.decode.program)


def test_a_split_trace_shifts_later_marks():
    llama = model("odd widths")
    core, spec = llama._runner, llama.config.layers[0]
    trace = Trace(llama.config, core.code, core.workspace, 1, True)
    for at in (0, 0, 1):
        if at:
            trace.split()
        trace.head_rows(spec)
        words.rope_and_store(trace.stream, None, spec)
        trace.probe(f"{at}", trace.stream)
    trace.split()
    assert [(len(one.program), [(mark.name, mark.last) for mark in one.marks]) for one in trace.segments] == [
        (2, [("0", 1), ("0", 2)]), (1, [("1", 1)])]


@pytest.mark.parametrize("cuts", [(), (30, 31, 32)], ids=["prompt", "decoded"])
@pytest.mark.parametrize("case", MODELS)
def test_probes_read_the_program_that_runs(case, cuts):
    """Values equal NumPy's within rounding, and the logits have the bits of a run without probes."""
    llama = model(case)
    logits, found = probed(llama, cuts)
    np.testing.assert_array_equal(logits, answer(llama, cuts=cuts)[0])
    np.testing.assert_array_equal(found["logits"], logits)
    _, wanted = probed(plain(case), cuts)
    assert list(found) and found.keys() == wanted.keys()
    assert len(found) == 3 + 10 * llama.config.num_hidden_layers
    for name in wanted:
        assert relative_error(found[name], wanted[name]) < 1e-5, name
    last, _ = probed(llama, cuts, all_positions=False)
    np.testing.assert_array_equal(last[:, -1], logits[:, -1])


def test_probes_of_fixed_point_activations_show_their_rounding():
    _, exact = probed(plain("Q4_K_M"))
    for bits, low, high in ((16, 1e-7, 1e-3), (8, 1e-3, 0.2)):
        _, found = probed(model("Q4_K_M", activation_bits=bits))
        assert low < relative_error(found["0.attention_norm"], exact["0.attention_norm"]) < high


def test_probes_of_a_prompt_of_several_chunks():
    llama, seen = model("many formats", 2, 16), {}
    tokens = np.random.default_rng(2).integers(0, 384, (2, workspace.CHUNK + 50)).astype(np.int32)
    logits, _ = answer(llama, tokens, probe=seen.__setitem__)
    np.testing.assert_array_equal(logits, answer(llama, tokens)[0])
    for cut in (1, 60):
        parts: dict[str, list[np.ndarray]] = {}
        answer(llama, tokens, (cut,), probe=lambda name, array: parts.setdefault(name, []).append(array))
        for name, array in seen.items():
            np.testing.assert_array_equal(np.concatenate(parts[name], axis=array.ndim - 2), array)


FAULTS = ("no scale", "swapped heads", "half norm")


def plant(fault: str, patch) -> None:
    """Patch a fault into the layers or the data that they read."""
    from mlx_llama.core import llama
    from mlx_llama.core.models.spec import LayerSpec

    if fault == "no scale":
        patch.setattr(LayerSpec, "scale", 1.0)
    elif fault == "swapped heads":  # values for keys, keys for values
        linear = llama.Linear.__call__

        def swapped(self, x, view):
            q, k, v = self.weight if isinstance(self.weight, tuple) and len(self.weight) == 3 else (None,) * 3
            return linear(self, x, view) if q is None else self.ops.linear(x, (q, v, k), self.bias)

        patch.setattr(llama.Linear, "__call__", swapped)
    else:
        patch.setattr(llama.RMSNorm, "__call__", lambda self, x, delta=None: self.ops.add_rms_norm(
            x, delta, np.float32(0.5) * self.weight, self.eps))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_layers_shows_in_every_path(fault, monkeypatch):
    """In prompts and decoded tokens, compiled and plain, first at the faulty operation's probe."""
    case, first = "head 36", {"no scale": "0.attention", "swapped heads": "0.key", "half norm": "0.attention_norm"}[fault]
    sound, sound_probes = answer(model(case))[0], probed(model(case))[1]
    plant(fault, monkeypatch)
    wrong = load(case, threads=1, activation_bits=32)
    assert wrong._runner
    wanted, _ = answer(load(case, compile=False))
    assert relative_error(wanted, sound) > 0.01
    for cuts in ((), tuple(range(1, LENGTH))):
        assert relative_error(answer(wrong, cuts=cuts)[0], wanted) < 1e-5
    _, found = probed(wrong)
    off = [name for name in sound_probes if relative_error(found[name], sound_probes[name]) > 1e-3]
    order = ("attention_norm", "query", "key", "value", "query_rope", "key_rope", "attention", "ffn_norm", "ffn", "block")
    assert min((name for name in off if name.startswith("0.")), key=lambda name: order.index(name[2:])) == first


# ---- checks of operations and buffers


def test_a_program_refuses_incomplete_operations():
    core = model("odd widths")._runner
    program = Program(core.code, 1)
    operands = dict(qkv=1, qkv_bytes=1, heads=1, key_heads=1, keys_at=0, values_at=0, page_keys=0, page_values=0, key_scales=0,
                    value_scales=0, rotates=1, table_at=0, query_table_at=0)
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add("rotate", 1, **{name: operands[name] for name in operands if name != "page_keys"})
    with pytest.raises(TypeError, match="operands of rotate"):
        program.add("rotate", 1, **operands, more=1)
    with pytest.raises(ValueError, match="not among the compiled operations"):
        program.add("attend nothing", 1, qkv=1, qkv_bytes=1, shared=1, key_heads=1, out=1, out_bytes=1, page_keys=0,
                    page_values=0, key_scales=0, value_scales=0, window=1, scale=0)
    for bad in (-1, 1.5, None):
        with pytest.raises(ValueError, match="integers from 0 on"):
            program.add("rotate", 1, **operands | {"page_keys": bad})
    with pytest.raises(ValueError, match="finished program"):
        program.prepare(core.context)
    with pytest.raises(ValueError, match="finished program"):
        core.decode.program.prepare(core.context[:-1])
    with pytest.raises(ValueError, match="finished program"):
        core.decode.program.prepare(core.context.astype(np.int32))


def test_matrices_must_fit_the_buffers_they_read_and_write():
    llama = model("odd widths")
    core = llama._runner

    def trace() -> Trace:
        return Trace(llama.config, core.code, core.workspace, 1, True)

    down, qkv = llama.decoder.blocks[0].mlp.down.weight, llama.decoder.blocks[0].attention.qkv.weight
    narrow, one = workspace.Buffer(1, 0), trace()
    with pytest.raises(ValueError, match="does not fit inputs of 0"):
        one.multiply(Rows(one, narrow, 0, 0), (down,), None)
    with pytest.raises(ValueError, match="a bias of 3"):
        one.multiply(Rows(one, core.workspace.hidden, 0, 40), (down,), np.zeros(3, np.float32))
    for buffer in (narrow, core.workspace.scratch):
        product = one.multiply(Rows(one, core.workspace.hidden, 0, 40), (down,), None)
        with pytest.raises(ValueError, match="do not fit a buffer"):
            product.place(buffer)
    product.place(core.workspace.hidden)
    with pytest.raises(ValueError, match="has a buffer already"):
        product.place(core.workspace.hidden)
    with pytest.raises(ValueError, match="layer 0: query, key and value have"):
        words.split_heads(one.multiply(one.stream, qkv[:2], None), llama.config.layers[0])
    with pytest.raises(ValueError, match="not multiples of 256"):
        one.pack(Normed(one, workspace.Buffer(40), 1e-5), list(core.code.recipe.activations))
    with pytest.raises(ValueError, match="no output buffer"):
        one.program.finish()


def test_outputs_that_no_buffer_is_for_are_refused():
    """No layer of this model scales what it adds to the stream, and its gate is as wide as its MLP."""
    llama, ops = model("odd widths"), words
    core, block = llama._runner, llama.decoder.blocks[0]
    trace = Trace(llama.config, core.code, core.workspace, 1, True)
    head = llama.decoder.head.weight  # 1003 rows: wider than the gate
    with pytest.raises(ValueError, match="a product of 1003 columns does not fit"):
        ops.gated_linear(trace.stream, (head, head))
    scaled = ops.scale(ops.linear(trace.stream, block.attention.out.weight), 0.5)
    with pytest.raises(ValueError, match="no buffer for outputs that are normed or scaled"):
        ops.add(trace.stream, scaled)
    with pytest.raises(ValueError, match="only the embedding is scaled"):
        ops.scale(trace.stream, 2.0)
