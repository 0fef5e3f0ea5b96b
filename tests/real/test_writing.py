"""Checkpoints written anew: in each format and back, and with an adapter, applied and merged."""

from __future__ import annotations

import numpy as np
import pytest
from backends.conftest import relative_rms

from mlx_llama import load
from mlx_llama.core.files.checkpoint import merge_adapter, open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf
from mlx_llama.quantize.mlx_folder import write_mlx
from real.conftest import fetch, perplexity
from real.golden import Judge, read_golden
from real.texts import LOGITS, make_tokenizer_texts

# The largest ratio of perplexities, of the copy and of the file. The file's 16 levels lie between
# those of the coarser formats: see docs/numerics.md.
FORMATS = {"F32": 1.0001, "F16": 1.001, "BF16": 1.01, "Q8_0": 1.01, "Q6_K": 1.02, "Q5_K_M": 1.05}
FORMATS |= {"Q4_K_M": 1.1, "IQ4_XS": 1.1, "Q4_0": 1.1}


@pytest.fixture(scope="module")
def plain(smollm2, tmp_path_factory):
    """(a copy at full width, the file's perplexity)."""
    path = tmp_path_factory.mktemp("plain") / "F32.gguf"
    write_gguf(open_checkpoint(smollm2), path, "F32")
    return path, perplexity(load(smollm2, backend="cpu"))


@pytest.mark.slow_for("BF16", "F16", "F32", "IQ4", "Q4_K", "Q5", "Q6", "Q8_0")
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format, plain, tmp_path):
    path, wanted = plain
    if format != "F32":
        path = write_gguf(open_checkpoint(path), tmp_path / "copy.gguf", format).path
    assert 0.98 < perplexity(load(path, backend="cpu")) / wanted < FORMATS[format]


@pytest.mark.slow
def test_a_folder_for_mlx_keeps_the_codes_and_a_file_made_of_it_the_values(name, golden, tmp_path):
    """mlx-lm and this package read from it what transformers reads from the file."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    folder = write_mlx(open_checkpoint(fetch(name)), tmp_path / "folder", None, keep=True).path
    encode = open_checkpoint(folder).tokenizer.encode
    for text, ids in zip(make_tokenizer_texts(), golden.tokenized):
        assert encode(text, add_bos=name == "gemma3", parse_special=True) == ids, text
    theirs, _ = load_model(folder)
    theirs.set_dtype(mx.float32)
    path = write_gguf(open_checkpoint(folder), tmp_path / "back.gguf", "F32").path
    back = load(path, backend="cpu", dtype="float32")
    for logits in (np.array(theirs(mx.array([golden.ids[1]]))[0]), back.logits(golden.ids[1])):
        assert logits.argmax(-1).tolist() == golden.argmax[1]
        # scales of 16 bits; Gemma's file has Q6_K, whose groups MLX lacks
        assert golden.distance(logits, 1) < (3e-2 if name == "gemma3" else 1e-3)


@pytest.mark.slow
def test_an_adapter_applied_and_merged(smollm2, tmp_path):
    """PEFT's, on transformers' model."""
    import torch
    from peft import LoraConfig, get_peft_model

    judge = Judge(smollm2)
    targets = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(judge.model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape) * 0.05
    model.save_pretrained(tmp_path / "adapter")
    judge.model = model
    ids = read_golden("smollm2").ids[4]
    wanted, without = judge.logits(ids), load(smollm2, backend="cpu", dtype="float32").logits(ids)
    both = merge_adapter(open_checkpoint(smollm2, None, [tmp_path / "adapter"]))
    merged = write_gguf(both, tmp_path / "merged.gguf", "F32").path
    applied = load(smollm2, backend="cpu", dtype="float32", adapters=tmp_path / "adapter")
    assert relative_rms(without, wanted) > 1e-2
    assert relative_rms(applied.logits(ids), wanted) < 1e-5
    # merged matrices have 16 bits
    assert relative_rms(load(merged, backend="cpu", dtype="float32").logits(ids), wanted) < 1e-3
    done = applied.generate(LOGITS[1], max_tokens=8, temperature=0.0)
    assert done.tokens == judge.answer(judge.tokenizer(LOGITS[1]).input_ids)[:8]
