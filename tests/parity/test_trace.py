"""Golden traces: what is written is read again, damage is named, and faults are found from sketches
alone.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from cases.fixtures import SMALL
from making import config_fields, make_checkpoint, refusal

import mlx_llama
from mlx_llama.core.errors import TraceError
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.parity import probes as parity, trace

GUIDE = Path(mlx_llama.__file__).parent / "guide" / "trace.json"
TOKENS = [1, *range(300, 311)]


@pytest.fixture(scope="module")
def run(open_llm):
    """(probes, greedy tokens) of the small model."""
    llm = open_llm(compile=False)
    return parity.collect(llm.backend, llm.model, TOKENS, 4), parity.greedy(llm, TOKENS[:-4], 6)


@pytest.fixture(scope="module")
def golden(run, small):
    return trace.record(open_checkpoint(small), TOKENS, 4, *run)


# Files


def test_a_file_is_read_as_it_was_written(golden, tmp_path):
    golden.save(tmp_path / "t.json")
    again = trace.load(tmp_path / "t.json")
    assert again.model == "small" and again.hash == golden.hash and again.tokens == TOKENS
    assert again.decoded == 4 and again.greedy == golden.greedy
    for name, array in golden.sketches.items():
        assert again.sketches[name].tobytes() == array.tobytes()
        assert again.sketches[name].dtype == np.float32
    assert again.top_ids == golden.top_ids
    assert again.top_values.tobytes() == golden.top_values.tobytes()
    assert again.logsumexp.tobytes() == golden.logsumexp.tobytes()


def test_the_guides_trace_is_of_the_guide_and_keeps_its_bytes(tmp_path):
    """The hash holds although the config has got more fields since."""
    golden_guide = trace.load(GUIDE)
    trace.require_same(golden_guide, open_checkpoint(), GUIDE)
    golden_guide.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == GUIDE.read_bytes()


def damaged(text: str):
    """(a damaged file, a part of the line that it gets)."""
    right = json.loads(text)

    def but(**fields):
        return json.dumps({**right, **fields})

    def without(name):
        return json.dumps({key: value for key, value in right.items() if key != name})

    def packed(*numbers):
        return base64.b64encode(np.array(numbers, "<f4").tobytes()).decode()

    norm = np.frombuffer(base64.b64decode(right["sketches"]["norm"]), "<f4")
    short = right["sketches"] | {"norm": packed(*norm[:-1])}
    yield "", "JSON"
    yield text[: len(text) // 2], "JSON"
    yield b"\xff\xfe{}", "JSON"
    yield "[1, 2]", "object"
    yield "[" * 100_000, "recursion"
    yield but(format="other"), "field format: Input should be 'mlx_llama trace', found 'other'"
    yield without("format"), "field format: Field required"
    yield but(version=2), "field version: Input should be 1, found 2"
    yield but(tokens=[1]), "field tokens: List should have at least 2 items"
    yield but(tokens=[1, "2"]), "field tokens.1: "
    yield but(tokens=[1, True]), "field tokens.1: "
    yield but(tokens=[1, -1, 2, 3, 4]), "field tokens.1: "
    yield but(decoded=0), "field decoded: "
    yield but(decoded=len(right["tokens"])), "decoded is 12, must be 1 to 11"
    yield but(greedy=None), "field greedy: "
    yield but(hash=5), "field hash: "
    yield but(model="x" * 100_000, hash=["y" * 100_000]), "field hash: "
    yield but(widths={}), "sketches and widths"
    yield but(widths=dict(right["widths"], norm=0)), "field widths.norm: "
    yield but(widths=dict(right["widths"], norm=1 << 40)), "field widths.norm: "
    yield but(sketches=short), "sketches.norm must hold 108 numbers, not 107"
    for norm in ("!!!", 7):
        expected = "field sketches.norm: must be float32 numbers in base64"
        yield but(sketches=dict(right["sketches"], norm=norm)), expected
    yield but(logsumexp=packed(*[math.nan] * 12)), "field logsumexp: must hold finite numbers"
    yield but(top_ids=[[1]]), "top_ids must have 12 lists of 8 ids"
    yield but(top_ids=[[10**6] * 8] * 12), "top_ids must have 12 lists of 8 ids"
    yield but(logsumexp=right["logsumexp"][:16]), "logsumexp must hold 12 numbers, not 3"
    yield without("top_values"), "field top_values: Field required"


def test_damage_is_named_in_one_line(golden, tmp_path):
    file = tmp_path / "t.json"
    golden.save(file)
    for text, expected in damaged(file.read_text()):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        message = refusal(trace.load, file, kind=TraceError)
        assert message.startswith(f"{file}: ") and len(message) < 400
        assert expected in message and "record it again" in message, message


@pytest.mark.parametrize("name", ["none.json", "folder", "a\0b", "~nobody-of-that-name/t.json"])
def test_files_that_cannot_be_read_or_written(name, golden, tmp_path):
    (tmp_path / "folder").mkdir()
    path = name if name.startswith("~") else str(tmp_path / name)
    with pytest.raises(TraceError, match=r"cannot be read|no such file"):
        trace.load(path)
    if name != "none.json":
        with pytest.raises(TraceError, match="cannot be written"):
            golden.save(path)


def test_a_file_that_is_too_large_is_not_read(golden, tmp_path, monkeypatch):
    golden.save(tmp_path / "t.json")
    monkeypatch.setattr(trace, "MOST_BYTES", 100)
    with pytest.raises(TraceError, match="bytes"):
        trace.load(tmp_path / "t.json")


# Checkpoints


def test_other_weights_are_another_checkpoint(small, golden, tmp_path):
    for _ in range(2):
        assert trace.checkpoint_hash(open_checkpoint(small)) == golden.hash
    seen = {golden.hash}
    for changes in (dict(dtype="bfloat16"), dict(rope_theta=5000.0), dict(seed=1)):
        other = open_checkpoint(make_checkpoint(tmp_path / str(len(seen)), **SMALL, **changes))
        seen.add(trace.checkpoint_hash(other))
        message = r"was recorded from small \(hash .*, and this is .*: choose that model"
        with pytest.raises(TraceError, match=message):
            trace.require_same(golden, other, "t.json")
    assert len(seen) == 4


def test_a_cached_property_is_no_part_of_the_hash(small, golden):
    """A cached property lies in the object's __dict__, as fields do."""
    checkpoint = open_checkpoint(small)
    object.__setattr__(checkpoint.config, "remembered", 1)
    assert trace.checkpoint_hash(checkpoint) == golden.hash


@dataclass(frozen=True)
class LaterConfig(LlamaConfig):
    """A config with a field that this package gets later."""

    scaling: float = 1.0


@pytest.mark.parametrize("scaling, is_same", [(1.0, True), (2.0, False)])
def test_a_later_field_counts_once_it_is_set(scaling, is_same, small, golden):
    checkpoint = open_checkpoint(small)
    config = checkpoint.config
    later = LaterConfig(*(getattr(config, field.name) for field in fields(config)), scaling)
    assert (trace.checkpoint_hash(replace(checkpoint, config=later)) == golden.hash) is is_same


# Checks


def check(golden, probes, greedy, tolerance=1e-4):
    return trace.check(golden, probes, greedy, tolerance, list(probes))


def test_the_same_run_has_no_error(golden, run):
    probes, greedy = run
    checked = check(golden, probes, greedy)
    assert checked.first_bad is None and checked.first_greedy is None and checked.missing == []
    assert all(values.max() < 1e-6 for values in checked.errors.values())


def test_a_sketch_estimates_the_norm_of_a_difference():
    """Within a factor of 2 for nearly all directions, and on average without bias (Johnson and
    Lindenstrauss).
    """
    rng = np.random.default_rng(0)
    values = rng.standard_normal((400, 256)).astype(np.float32)
    squares = np.mean(trace.sketch(values)[:, :-1].astype(np.float64) ** 2, axis=1)
    estimates = np.sqrt(squares) / np.linalg.norm(values, axis=1)
    assert np.mean(estimates**2) == pytest.approx(1, abs=0.1)
    assert np.mean((estimates > 0.5) & (estimates < 2)) > 0.98
    assert set(np.unique(trace.signs(256))) == {-1.0, 1.0}


@pytest.mark.parametrize("name", ["0.query_rope", "1.ffn", "norm"])
@pytest.mark.parametrize("error", [1e-3, math.nan])
def test_a_fault_is_found_where_it_is(name, error, golden, run):
    probes = {probe: array.copy() for probe, array in run[0].items()}
    probes[name][5] *= 1 + error
    checked = check(golden, probes, run[1])
    assert checked.first_bad == name and int(checked.errors[name].argmax()) == 5
    assert all(np.delete(values, 5).max() < 1e-6 for values in checked.errors.values())


def test_one_wrong_logit_of_a_likely_token_is_found(golden, run):
    """Also where the sketch of all logits would hide it in the tolerance."""
    probes = {probe: array.copy() for probe, array in run[0].items()}
    likeliest = int(probes["logits"][3].argmax())
    probes["logits"][3, likeliest] += np.float32(0.5 * np.sqrt(np.mean(probes["logits"][3] ** 2)))
    assert check(golden, probes, run[1], tolerance=5e-2).first_bad == "logits"


def test_other_widths_and_missing_probes(golden, run):
    probes = dict(run[0], norm=run[0]["norm"][:, :-1])
    del probes["0.ffn"]
    names = parity.probe_names(LlamaConfig.from_dict(config_fields(num_hidden_layers=3)))
    checked = trace.check(golden, probes, run[1], 1e-4, names)
    assert checked.first_bad == "norm" and math.isinf(checked.errors["norm"].min())
    assert checked.missing == ["0.ffn"]


def test_the_first_greedy_token_that_differs(golden, run):
    greedy = list(run[1])
    greedy[3] += 1
    assert check(golden, run[0], greedy).first_greedy == 3
