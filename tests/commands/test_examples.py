"""Each example runs and prints plausible results."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launching import run_python

from mlx_llama.core.files.checkpoint import open_checkpoint

pytestmark = pytest.mark.usefixtures("known_memory")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BENCHMARKS = EXAMPLES / "benchmarks"
# by test_guide.py, compare_peers.py, server/test_scripts.py, test_measure_gpu.py and
# tests/backends/test_captured_step.py
RUN_ELSEWHERE = (
    "train_guide.py peers_checkpoint.py peers_rows.py peers_gguf.py openai_client.py load.py "
    "measure_gpu.py gpu_kernels.py peers_gpu.py random_weights.py"
).split()
HAS_LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture
def start(monkeypatch, capsys):
    """start(name, *arguments): an example's run in this process; returns .code, .out and .err."""

    def start(name: str, *arguments: object) -> SimpleNamespace:
        file = next(EXAMPLES.rglob(name))
        monkeypatch.syspath_prepend(file.parent)
        monkeypatch.setattr(sys, "argv", [str(file), *map(str, arguments)])
        capsys.readouterr()
        code = None
        try:
            runpy.run_path(str(file), run_name="__main__")
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        if isinstance(code, str):  # as Python does
            code, err = 1, f"{err}{code}\n"
        return SimpleNamespace(code=code or 0, out=out, err=err)

    return start


@pytest.fixture
def run(start):
    """run(name, *arguments): what an example prints."""

    def run(name: str, *arguments: object) -> str:
        done = start(name, *arguments)
        assert done.code == 0, done.err
        return done.out

    return run


@pytest.fixture
def compare(run):
    """compare(name, *arguments): the JSON of a comparison."""
    return lambda *arguments: json.loads(run(*arguments, "--json"))


def check_pairs(result: dict, counts: dict[str, int]) -> None:
    """Each comparison has as many pairs of figures, all positive."""
    for key, count in counts.items():
        summary = result[key]["all"]
        assert summary["pairs"] == count == len(result[key]["pairs"]), key
        assert summary["ours"] > 0 and summary["peer"] > 0, key


def keys_of_pairs(result: dict) -> set[str]:
    return {key for key, value in result.items() if isinstance(value, dict) and "pairs" in value}


@pytest.mark.slow
def test_continue_text(run):
    out = run("continue_text.py", "Once upon a time", "--backend", "cpu")
    assert out.startswith("Once upon a time") and "evaluations per token: 1 " in out


def test_ask():
    done = run_python(EXAMPLES / "ask.py", "Hello, who are you?", "--backend", "cpu")
    assert done.returncode == 0 and len(done.stdout.split()) > 2, done.stderr


@pytest.mark.slow
def test_logits_processor(run):
    words = run("logits_processor.py", "--backend", "cpu", "--letter", "t").split()
    assert words and all(word.lower().startswith("t") for word in words)


@pytest.mark.slow
def test_conversation(run):
    out = run("conversation.py", "--backend", "cpu")
    assert out.count("prompt tokens reused)") == 3 and "mlx_llama" in out


@pytest.mark.slow
def test_extract(run):
    out = run("extract.py", "--backend", "cpu")
    assert out.startswith("name='") and " age=" in out and " town=" in out


@pytest.mark.slow
def test_tools(run):
    lines = run("tools.py", "--backend", "cpu").splitlines()
    [call, *_] = [line for line in lines if line.startswith("call: multiply({")]
    arguments = json.loads(call.removeprefix("call: multiply(")[:-1])
    assert f"tool: {arguments['a'] * arguments['b']}" in lines


@pytest.mark.slow
def test_next_token(run):
    out = run("next_token.py", "--backend", "cpu")
    shares = [float(line.split("%")[0]) for line in out.splitlines()[:5]]
    assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.5
    assert float(out.split()[-1]) >= 1


@pytest.mark.slow
def test_same_on_every_backend(run):
    lines = run("same_on_every_backend.py").splitlines()
    answers = {line[6:] for line in lines if "unavailable here" not in line}
    assert len(lines) == 3 and len(answers) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_make_random_checkpoint(dtype, tmp_path, run):
    from transformers import AutoModelForCausalLM

    run("make_random_checkpoint.py", "tiny", str(tmp_path / "m"), "--dtype", dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    assert str(model.dtype) == f"torch.{dtype}"


FAMILIES = (
    "qwen2.5-1.5b qwen3-1.7b smollm3-3b granite-3.3-2b olmo-2-1b phi-4-mini gemma-2-2b gemma-3-1b "
    "ministral-3-3b"
).split()


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_random_checkpoint_of_a_family(shape, tmp_path, monkeypatch):
    """transformers finds each of its tensors, in a smaller size of the same config; llama.cpp's
    reader the GGUF file's fields.
    """
    import gguf
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    import make_random_checkpoint
    import make_random_gguf

    fields = make_random_checkpoint.SHAPES[shape]
    small = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    small |= dict(num_key_value_heads=2, vocab_size=1000, pad_token_id=0)
    monkeypatch.setitem(make_random_checkpoint.SHAPES, shape, fields | small)
    make_random_checkpoint.write(tmp_path / "m", shape, "float32", 0)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.config.model_type == fields["model_type"]
    file = str(tmp_path / "m" / "tokenizer.json")
    assert len(PreTrainedTokenizerFast(tokenizer_file=file)) == 1000
    make_random_gguf.write_family(tmp_path / "m.gguf", shape, "F16", 0)
    names = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert len(names["tokenizer.ggml.tokens"].data) == 1000


OF_2026 = (
    "seed-oss-36b glm-4-9b ernie-4.5-0.3b hunyuan-1.8b hunyuan-7b granite-4-micro apertus-8b "
    "olmo-3-7b exaone-4-1.2b gpt-oss-20b llama-4-scout nemotron-super-49b"
).split()


@pytest.mark.parametrize("shape", OF_2026)
def test_a_random_gguf_file_of_a_family(shape, tmp_path, monkeypatch):
    """Of few layers, with llama.cpp's fields, all tensors and the types of the format."""
    monkeypatch.syspath_prepend(EXAMPLES / "benchmarks")
    import make_random_checkpoint
    import make_random_gguf

    fields = make_random_checkpoint.SHAPES[shape]
    small = dict.fromkeys(fields.keys() & {"hidden_size", "intermediate_size"}, 256)
    small |= {"shared_intermediate_size": 256} if "shared_intermediate_size" in fields else {}
    small |= {"head_dim": 64} if "head_dim" in fields else {}
    small |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
    if "block_configs" in fields:
        small = make_random_checkpoint.narrow(fields)
    monkeypatch.setitem(make_random_checkpoint.SHAPES, shape, fields | small)
    kind = "MXFP4" if shape.startswith("gpt-oss") else "Q4_K_M"
    monkeypatch.setattr(sys, "argv", ["", shape, str(tmp_path), kind, "--layers", "4"])
    make_random_gguf.main()
    checkpoint = open_checkpoint(tmp_path / f"{shape}-4-{kind}.gguf")
    assert checkpoint.config.num_hidden_layers == 4
    assert checkpoint.config.architecture == make_random_checkpoint.BY_MODEL_TYPE[
        fields["model_type"]
    ].name.replace("GraniteMoeHybrid", "Granite")
    assert kind.removesuffix("_M") in checkpoint.formats
    assert all(np.isfinite(tensor.float32()).all() for tensor in checkpoint.tensors.values())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_K_M"])
def test_make_random_gguf(kind, tmp_path, start):
    import gguf

    done = start("make_random_gguf.py", "tiny", str(tmp_path), kind)
    if kind == "Q4_K_M" and not HAS_LLAMA_CPP:
        assert done.code == 1
        assert done.err == 'error: llama_cpp is not installed: pip install -e ".[peers]"\n'
        return
    assert done.code == 0, done.err
    [path] = tmp_path.iterdir()
    kinds = {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert path.name == f"tiny-{kind}.gguf"
    assert kinds == ({"F32", "Q4_K", "Q6_K"} if "K" in kind else {"F32", kind})


@pytest.mark.slow
@pytest.mark.slow
def test_compare_peers(tmp_path, start, run, compare):
    if not HAS_LLAMA_CPP:
        done = start("compare_peers.py", "model.gguf", "--llama-bench", "none")
        assert done.code == 1
        assert done.err == 'error: llama_cpp is not installed: pip install -e ".[peers]"\n'
        return
    run("make_random_gguf.py", "tiny", str(tmp_path), "F16")
    asked = (
        f"{tmp_path}/tiny-F16.gguf --rounds 2 --prompt 8 --generate 4 --starts 1 --depth 40 60 "
        "--accuracy 4 --threads 1 --llama-bench none"
    ).split()
    figures = compare("compare_peers.py", *asked)
    [result] = figures["results"]
    assert figures["threads"] == 1
    assert result["bytes"] == (tmp_path / "tiny-F16.gguf").stat().st_size
    twice = dict.fromkeys(("decode", "prompt", "deep 40", "deep 60"), 2)
    check_pairs(result, twice | dict.fromkeys(("start", "peak", "error"), 1))
    error = result["error"]["all"]
    assert error["ours"] < 1e-5 < error["peer"] < 3e-3  # llama.cpp rounds activations to float16
    out = run("compare_peers.py", *asked, "--accuracy", "16", "--cache-bits", "8")
    assert "keys and values of 8 bits" in out
    lines = [line.split() for line in out.splitlines()]
    [line] = [line for line in lines if line[:4] == "relative error of logits".split()]
    # both programs round keys and values to 8 bits
    assert all(3e-4 < float(error) < 0.1 for error in line[4:6])


BENCH = """#!{python}
import json, sys
def flag(name, default=0): return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default
prompt, generate, depth, repeat = (int(flag(name)) for name in ("-p", "-n", "-d", "-r"))
assert flag("-m").endswith("tiny-F16.gguf") and flag("-o") == "json" and flag("-ngl") == "0", sys.argv
flash, kind = int(flag("-fa")), flag("-ctk", "f16")
assert kind == flag("-ctv", "f16") and (flash or kind == "f16"), sys.argv
print("a word on stderr", file=sys.stderr)
if depth > 50: sys.exit(print("no room", file=sys.stderr) or 1)
speed = 1000 + (prompt or 10 * depth) + 100 * (not flash)
print(json.dumps([dict(n_threads=int(flag("-t")) + (depth == 45), type_k=kind, type_v=kind, flash_attn=flash,
    n_prompt=prompt, n_gen=generate, n_depth=depth, samples_ns=[1e9 * (prompt + generate) / speed * (1 + i) / (1 + repeat // 2) for i in range(repeat)])]))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows does not run a script by its first line")
def test_compare_peers_with_a_llama_bench_of_known_speed(tmp_path, start, run, compare):
    run("make_random_gguf.py", "tiny", str(tmp_path), "F16")
    file, program = tmp_path / "tiny-F16.gguf", tmp_path / "bench"
    program.write_text(BENCH.format(python=sys.executable))
    program.chmod(0o755)
    flags = "--rounds 2 --prompt 8 --generate 4 --threads 1 --starts 0"
    asked = [str(file), "--llama-bench", str(program), *flags.split()]
    figures = compare("compare_peers.py", *asked, *"--depth 40 --cache-bits 8 --busy 1".split())
    assert (figures["cache_bits"], figures["busy"]) == (8, 1)
    [result] = figures["results"]
    for key, speed in {"prompt": 1008, "decode": 1080, "deep 40": 1400}.items():
        assert [pair["peer"] for pair in result[key]["pairs"]] == pytest.approx([speed] * 2), key
    # The tiny shapes in F16: all weights but the embedding, and keys and values of 8.5 bits.
    import gguf

    tensors = gguf.GGUFReader(file).tensors
    layers = sum(tensor.name.endswith("attn_k.weight") for tensor in tensors)
    width = next(tensor.shape[1] for tensor in tensors if tensor.name.endswith("attn_k.weight"))
    weights = sum(tensor.n_bytes for tensor in tensors if tensor.name != "token_embd.weight")
    for pair in result["deep 40"]["pairs"]:
        nbytes = weights + 42 * 2 * layers * int(width) * 8.5 / 8
        _, between, after = pair["bandwidth"]
        assert pair["peer_share"] == pytest.approx(1400 * nbytes * (1 / between + 1 / after) / 2)
    [result] = compare("compare_peers.py", *asked)["results"]
    assert result["decode"]["pairs"][0]["peer"] == pytest.approx(1180)  # flash attention is slower
    out = run("compare_peers.py", *asked)
    assert "llama-bench" in out and "share of GB/s" in out
    assert re.search(r"^decode after 8, .*% / +\d+%$", out, re.M)
    for depth, reason in (
        ("60", "no room"),
        ("45", "ran {'n_threads': 2}, not what was asked for"),
    ):
        done = start("compare_peers.py", *asked, "--depth", depth)
        assert done.code == 1
        assert done.err.splitlines()[-1] == f"error: {program} on {file}: {reason}"
    done = start("compare_peers.py", str(file), "--llama-bench", str(tmp_path / "none"))
    assert done.code == 1 and "there is no such program: build llama-bench" in done.err


def test_busy_processes_end_with_their_measurement(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from peers_gguf import Busy

    with Busy(2) as busy:
        assert [process.poll() for process in busy.processes] == [None, None]
    assert all(process.poll() is not None for process in busy.processes)


BATCHES = "--rows 1 3 --rounds 2 --prompt 8 --generate 4 --threads 1".split()


PROGRAM = """#!{python}
import json, sys
def flag(name): return int(sys.argv[sys.argv.index(name) + 1])
assert flag("-c") == flag("-npl") * 256 and flag("-t") == flag("-tb") == 1 and flag("-npp") == 8, sys.argv
print("a line of text")
if flag("-npl") > 3: sys.exit(print("no room", file=sys.stderr) or 1)
print(json.dumps({{"pl": flag("-npl"), "tg": flag("-ntg"), "speed_tg": flag("-npl") * 1000.0}}))
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows does not run a script by its first line")
def test_compare_batches_with_a_program_of_known_speed(tmp_path, start, run, compare):
    run("make_random_gguf.py", "tiny", str(tmp_path), "F16")
    file, program = str(tmp_path / "tiny-F16.gguf"), tmp_path / "bench"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    asked = [file, *BATCHES, "--llama-batched-bench", str(program)]
    for record in compare("compare_batches.py", *asked)["results"]:
        assert record["runs"]["peer"] == [1000.0 * record["rows"]] * 2
        assert record["ratio"] == pytest.approx(sum(record["runs"]["ours"]) / 2 / record["peer"])
    lines = run("compare_batches.py", *asked).splitlines()
    assert len(lines) == 4 and lines[-1].split()[:2] == ["tiny-F16.gguf", "3"]
    assert lines[-1].split()[3] == "3000.0"
    done = start("compare_batches.py", *asked, "--rows", "4")
    assert done.code == 1
    assert done.err == f"error: {program} on {file} with 4 rows: no room\n"
    done = start("compare_batches.py", file, "--llama-batched-bench", str(tmp_path / "none"))
    assert done.code == 1
    assert "there is no such program: build llama-batched-bench" in done.err


PEERS = [
    pytest.param(
        backend,
        marks=pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"no {package}"),
    )
    for backend, package in (("mlx", "mlx_lm"), ("cuda", "transformers"))
]


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("backend", PEERS)
def test_compare_peers_on_a_checkpoint(backend, tmp_path, run, compare):
    folder = tmp_path / "tiny"
    run("make_random_checkpoint.py", "tiny", str(folder))
    asked = (
        f"{folder} --pairs {backend} --device cpu --threads 1 --rounds 2 --prompt 8 --generate 6 "
        "--depth 40"
    ).split()
    [result] = compare("compare_peers.py", *asked)["results"]
    assert result["bytes"] == (folder / "model.safetensors").stat().st_size
    assert "float32" in result["about"]
    assert result["same_tokens"] == 7
    keys = {"decode", "prompt", "deep 40"}
    keys |= {"build", "host", "primitives"} if backend == "mlx" else set()
    assert keys == keys_of_pairs(result)
    check_pairs(result, dict.fromkeys(keys, 2))
    if backend == "mlx":
        assert {pair["peer"] for pair in result["primitives"]["pairs"]} == {graph_of_mlx_lm(folder)}


@pytest.mark.slow
@pytest.mark.slow
def test_compare_peers_on_several_rows(tmp_path, run, compare):
    pytest.importorskip("mlx_lm")
    folder = tmp_path / "tiny"
    run("make_random_checkpoint.py", "tiny", str(folder))
    flags = "--pairs mlx-rows --rows 3 --device cpu --rounds 1 --prompt 12 --generate 6"
    [result] = compare("compare_peers.py", str(folder), *flags.split())["results"]
    assert result["same_tokens"] == 7 and "3 rows" in result["about"]
    assert keys_of_pairs(result) == {"decode", "build", "host", "primitives"}
    assert 0 < result["primitives"]["all"]["ratio"] < 0.55


def graph_of_mlx_lm(folder: Path) -> int:
    """Number of operations of a decoded token: one per array of the graph."""
    import io

    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    text, device = io.StringIO(), mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        model, _ = load_model(folder)
        cache = make_prompt_cache(model)
        mx.eval(model(mx.array([[3, 4]]), cache=cache), [layer.state for layer in cache])
        logits = model(mx.array([5], mx.uint32)[None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        mx.export_to_dot(text, mx.argmax(logprobs, axis=-1), logprobs.squeeze(0))
    finally:
        mx.set_default_device(device)
    return len(re.findall(r'^\d+ -> "', text.getvalue(), re.M))


def test_a_peer_that_is_not_installed_is_left_out(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import compare_peers
    import peers_checkpoint

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlx_lm" else find(name)
    )
    here, reasons = peers_checkpoint.pairs_here(["mlx"])
    assert here == [] and len(reasons) == 1
    assert "mlx_lm is not installed: pip install mlx-lm" in reasons[0]
    with pytest.raises(SystemExit, match="no peer is installed"):
        compare_peers.main([str(EXAMPLES), "--pairs", "mlx"])
    words = "left out: mlx_llama/mlx against mlx-lm (mlx_lm is not installed"
    assert capsys.readouterr().err.startswith(words)
    for tokens in ([1, 2, 3], [1, 2]):
        assert peers_checkpoint.agreement(tokens, [1, 2, 4]) == 2


def test_the_comparison_keeps_to_one_state_of_the_memory(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import compare_peers

    comparison = compare_peers.Comparison.__new__(compare_peers.Comparison)
    comparison.bandwidths = [60e9, 40e9, 61e9, 39e9]
    pairs = [
        dict(ours=2.0, peer=1.0, bandwidth=[60e9, 61e9, 59e9]),
        dict(ours=9.0, peer=1.0, bandwidth=[60e9, 38e9, 41e9]),
        dict(ours=6.0, peer=4.0, bandwidth=[38e9, 40e9, 39e9]),
    ]
    summary, states = compare_peers.summary, comparison.states()
    ratios = {name: summary(pairs, *between)["ratio"] for name, between in states.items()}
    assert ratios == {"fast": 2.0, "slow": 1.5}
    assert summary(pairs) == dict(ours=6.0, peer=1.0, ratio=2.0, bandwidth=41e9, pairs=3)
    comparison.bandwidths = [50e9, 55e9, 52e9]
    assert compare_peers.summary(pairs, *comparison.states()["steady"])["pairs"] == 3


def test_the_cost_of_ticks_is_measured(compare):
    rows = compare("measure_ticks.py", "--rows", "1,3", "--ticks", "20")
    assert [row["rows"] for row in rows] == [1] * 4 + [3] * 4
    assert all(0 < row["median"] <= row["90%"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["schema", "regex"])
def test_the_cost_of_grammars_is_measured(kind, compare):
    flags = f"--kind {kind} --rows 3 --tokens 6 --pairs 1"
    figures = compare("measure_grammar.py", *flags.split())
    assert (figures["kind"], figures["rows"]) == (kind, 3)
    assert figures["share"] == figures["bound"] / figures["free"] - 1 > -1


@pytest.mark.slow
def test_prefixes_and_memory_are_measured(run):
    flags = "--prefix 100 --requests 20 --rounds 2"
    first, ten, last = run("measure_prefix.py", *flags.split()).splitlines()
    words = "first token after a known prefix of 100: N ms, after a prompt of 1: N ms, ratio N"
    assert re.fullmatch(words.replace("N", r"[\d.]+"), first)
    assert ten.startswith("after 10 requests: ") and last.startswith("after 20 requests: ")


@pytest.mark.slow
def test_starts_are_measured(tmp_path, run):
    """With a peer of this test's own, since llama-bench is not everywhere."""
    run("make_random_gguf.py", "tiny", str(tmp_path), "F16")
    (file,) = tmp_path.glob("*.gguf")
    peer = tmp_path / "peer.py"
    peer.write_text(
        f"import sys; assert sys.argv[1:] == ['-m', {str(file)!r}, '-p', '9', '-n', '0', '-r', "
        "'1', '--no-warmup', '-t', '1']"
    )
    flags = [
        *f"{file} --prompt 9 --rounds 2 --threads 1 --peer".split(),
        f"{sys.executable} {peer}",
    ]
    _, name, ours, theirs, ratio = run("measure_start.py", *flags).splitlines()
    assert name == f"{file.name}, warm" and ours.split()[0] == "mlx_llama"
    assert theirs.split()[0] == "llama-bench"
    assert float(re.search(r"neighbours ([\d.]+) ", ratio)[1]) > 1


@pytest.mark.slow
def test_the_perplexity_of_widths_and_formats_is_measured(guide_q8, monkeypatch, run):
    """The guide's, of text that it was not taught. The score is torch's cross entropy."""
    flags = f"{guide_q8} --tokens 400 --window 128 --formats Q4_0,mlx-8 --widths".split()
    out = run("measure_perplexity.py", *flags, "float32,8-bit keys and values")
    first, full, eight, *formats = out.splitlines()
    assert first == f"{guide_q8.name}: 384 tokens in windows of 128"
    changes = [
        float(re.fullmatch(r"[^:]+: [\d.]+ \(([+-][\d.]+) %\)(, \d+ MB)?", line)[1])
        for line in (full, eight, *formats)
    ]
    assert changes[0] == 0 < abs(changes[1]) < 0.5
    assert any(line.startswith("Q4_0, mlx_llama") for line in formats)

    import torch

    monkeypatch.syspath_prepend(BENCHMARKS)
    from measure_perplexity import score

    logits = np.random.default_rng(0).normal(size=(9, 50)).astype(np.float32) * 5
    tokens = list(range(3, 12))
    wanted = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits[:-1]), torch.tensor(tokens[1:]), reduction="sum"
    )
    assert score(logits, tokens) == pytest.approx(float(wanted), rel=1e-6)


def test_every_example_is_run_here():
    source = Path(__file__).read_text(encoding="utf-8")
    for path in (*EXAMPLES.glob("*.py"), *BENCHMARKS.glob("*.py")):
        assert path.name in RUN_ELSEWHERE or f'"{path.name}"' in source, path.name
