"""--adapter in the doors, and quantize --merge."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlx_llama import generate, load
from mlx_llama.bench import command as bench
from mlx_llama.chat import repl as chat
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import AffineWeight
from mlx_llama.parity import command as parity
from mlx_llama.quantize import command as quantize

BIASED = {"max_tokens": 8, "logit_bias": {1: -100, 2: -100}}
FLAGS = "--backend cpu --ignore-chat-template -m 8 --logit-bias 1=-100 --logit-bias 2=-100 -p"
ASK = (*FLAGS.split(), "Once upon a time")


def text(base, adapters):
    llm = load(base, backend="cpu", adapters=adapters)
    return llm.generate("Once upon a time", **BIASED).text


def test_generate_with_an_adapter_and_a_scale(door, folders):
    base, (sea, sky) = folders
    runs = [
        door(generate.main, "--model", base, *ASK, *flags)
        for flags in (
            (),
            ("--adapter", sea),
            ("--adapter-path", f"{sea}=0.25"),
            ("--lora", sea, "--lora", sky, "--use-adapter", "sky"),
            ("--adapter", sea, "--use-adapter", "base"),
        )
    ]
    assert [done.code for done in runs] == [0] * 5, [done.err for done in runs]
    wanted = [text(base, adapters) for adapters in (None, sea, f"{sea}=0.25", sky, None)]
    assert [done.out for done in runs] == [f"{text}\n" for text in wanted] and len(set(wanted)) == 4


def test_lines_of_a_batch_name_their_adapters(door, folders, tmp_path):
    base, adapters = folders
    asked = {"prompt": "Once upon a time", **BIASED}
    lines = [json.dumps({**asked, "adapter": name}) for name in ("sky", "base", "sea")]
    (tmp_path / "in").write_text("\n".join(lines))
    flags = f"--backend cpu --ignore-chat-template --prompts {tmp_path}/in --output {tmp_path}/out"
    named = (f"--adapter={adapter}" for adapter in adapters)
    done = door(generate.main, "--model", base, *flags.split(), *named)
    assert done.code == 0, done.err
    lines = map(json.loads, (tmp_path / "out").read_text().splitlines())
    texts = {line["index"]: line["text"] for line in lines}
    sea, sky = adapters
    assert [texts[i] for i in range(3)] == [text(base, wanted) for wanted in (sky, None, sea)]


def test_chat_sets_the_adapter(door, folders):
    base, (sea, sky) = folders
    flags = ("--model", base, "--backend", "cpu", "-m", "6", "--adapter", sea, "--adapter", sky)
    done = door(chat.main, *flags, stdin=b"/set adapter sky\nhi\n")
    assert done.code == 0, done.err
    chosen = load(base, backend="cpu", adapters=sky).chat()
    assert done.out.rstrip("\n") == chosen.send("hi", max_tokens=6).text.rstrip("\n")


def test_errors_are_one_line(door, folders):
    base, (sea, sky) = folders
    for main, flags, wanted in (
        (generate.main, (*ASK, "--adapter", "nowhere"), "no such folder"),
        (generate.main, (*ASK, "--use-adapter", "sea"), "none was loaded: load it with --adapters"),
        (bench.main, f"--backend cpu --adapter={sea} --adapter={sky}".split(), "there are 2"),
        (parity.main, ("--check", "--adapter", sea), "--adapters has no meaning with --check"),
    ):
        done = door(main, "--model", base, *flags)
        assert done.code == 2 and done.err.count("\n") == 1 and wanted in done.err, done.err


@pytest.mark.slow
def test_bench_and_parity_run_the_adapted_model(door, folders):
    base, (sea, _) = folders
    for main, flags in (
        (bench.main, "--backend cpu -p 8 -n 4 -r 1 --json"),
        (bench.main, "--backend cpu -n 4 -r 1 --profile"),
        (parity.main, "--backends cpu --tokens 12"),
    ):
        done = door(main, "--model", base, "--adapter", sea, *flags.split())
        assert done.code == 0, done.out + done.err
        assert "--profile" not in flags or "adapters" in done.out


@pytest.mark.parametrize(
    "flags, is_low_bit", [((), False), (("--bits", "8", "--group-size", "32"), True)]
)
def test_a_merged_folder_answers_as_the_adapter(flags, is_low_bit, door, folders, tmp_path):
    base, (sea, _) = folders
    done = door(quantize.main, base, tmp_path / "merged", "--merge", f"{sea}=0.5", *flags)
    assert done.code == 0 and "merging sea into" in done.err, done.err
    tensors = open_checkpoint(tmp_path / "merged").tensors
    assert any(isinstance(tensor, AffineWeight) for tensor in tensors.values()) is is_low_bit
    tokens = list(range(3, 20))
    adapted = load(base, backend="cpu", dtype="float32", adapters=f"{sea}=0.5")
    cache = adapted.model.make_cache(32)
    wanted = np.array(adapted.model.forward([tokens], 0, cache, all_positions=True))[0]
    logits = load(tmp_path / "merged", backend="cpu", dtype="float32").logits(tokens)
    assert np.abs(logits - wanted).max() < (0.1 if is_low_bit else 1e-4) * np.abs(wanted).max()


def test_merging_into_gguf_and_from_a_low_bit_model(door, folders, tmp_path):
    base, (sea, _) = folders
    done = door(quantize.main, base, tmp_path / "m.gguf", "--merge", sea, "--format", "gguf:F32")
    assert done.code == 0, done.err
    tokens = list(range(3, 20))
    wanted = load(base, backend="cpu", dtype="float32", adapters=sea).logits(tokens)
    logits = load(tmp_path / "m.gguf", backend="cpu", dtype="float32").logits(tokens)
    np.testing.assert_allclose(logits, wanted, atol=1e-4 * np.abs(wanted).max())
    assert door(quantize.main, base, tmp_path / "base.gguf", "--format", "gguf:F32").code == 0
    # its rows are permuted
    adapted = load(tmp_path / "base.gguf", backend="cpu", dtype="float32", adapters=sea)
    logits = adapted.logits(tokens)
    np.testing.assert_allclose(logits, wanted, atol=1e-4 * np.abs(wanted).max())
    low = door(quantize.main, base, tmp_path / "low", "--bits", "8", "--group-size", "32")
    assert low.code == 0, low.err
    flags = f"{tmp_path}/low {tmp_path}/again --merge {sea} --bits 8 --group-size 32"
    done = door(quantize.main, *flags.split())
    assert done.code == 0 and "dequantized and are rounded again" in done.err, done.err
