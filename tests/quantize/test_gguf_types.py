"""Types of the tensors in the GGUF files that we write, against those that llama.cpp's
llama-quantize chooses.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGUFReader
from making import config_fields, make_checkpoint, random_tensors

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf

FILE_TYPES = {"MXFP4": "MXFP4_MOE"}
MIXES = ("Q3_K_S", "Q3_K_M", "IQ4_XS", "Q4_K_M", "Q5_K_M", "Q6_K")
PHI = dict(architectures=["Phi3ForCausalLM"], model_type="phi3")
SMALL = dict(hidden_size=256, intermediate_size=256, tokenizer="bytelevel", head_dim=32)
SMALL |= dict(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=9)
NARROW = dict(hidden_size=48, head_dim=64, intermediate_size=256, tokenizer="bytelevel")
MIXTRAL = dict(architectures=["MixtralForCausalLM"], num_local_experts=8)
QWEN_MOE = dict(architectures=["Qwen3MoeForCausalLM"], num_experts=3, num_experts_per_tok=2)
MODELS = {
    "llama, 9 layers": SMALL | dict(intermediate_size=512),
    "tied, 4 layers": SMALL | dict(num_hidden_layers=4, tie_word_embeddings=True),
    "multi-head, 16 layers": SMALL | dict(num_hidden_layers=16, num_key_value_heads=8),
    "80 layers": SMALL | dict(num_hidden_layers=80, head_dim=8),
    "rows of 96 and 64": dict(num_hidden_layers=8, tokenizer="bytelevel"),
    "rows of 48 and 256": NARROW,
    "qwen3": SMALL | dict(architectures=["Qwen3ForCausalLM"]),
    "phi3": SMALL | PHI,
    "mixtral": SMALL | MIXTRAL,
    "qwen3 with experts": SMALL | QWEN_MOE | dict(moe_intermediate_size=256, norm_topk_prob=True),
}


def make_model(folder: Path, **fields) -> Path:
    """As make_checkpoint, with Phi-3's fused projections."""
    if fields.get("model_type") != "phi3":
        return make_checkpoint(folder, **fields)
    tensors = random_tensors(config_fields(**fields))
    for layer in range(fields.get("num_hidden_layers", 2)):
        for fused, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            names = [f"model.layers.{layer}.{part}.weight" for part in (fused, *parts)]
            tensors[names[0]] = np.concatenate([tensors.pop(name) for name in names[1:]])
    return make_checkpoint(folder, tensors=tensors, **fields)


def quantize_by_llama_cpp(source: Path, out: Path, format: str) -> None:
    llama_cpp = pytest.importorskip(
        "llama_cpp", reason='llama.cpp is the judge here: pip install -e ".[peers]"'
    )
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = gguf.LlamaFileType[f"MOSTLY_{FILE_TYPES.get(format, format)}"]
    settings.nthread = 1
    paths = str(source).encode(), str(out).encode()
    assert llama_cpp.llama_model_quantize(*paths, ctypes.byref(settings)) == 0


def read_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    return {
        tensor.name: (tensor.tensor_type.name, tensor.data) for tensor in GGUFReader(path).tensors
    }


@pytest.mark.parametrize(
    "model, format",
    [
        (model, format)
        for model in MODELS
        for format in MIXES
        if model != "80 layers" or format == "Q4_K_M"
    ]
    + [(model, "MXFP4") for model in ("mixtral", "qwen3 with experts")],
)
def test_llama_cpp_writes_the_same_file(model, format, tmp_path):
    checkpoint = open_checkpoint(make_model(tmp_path / "in", **MODELS[model]))
    write_gguf(checkpoint, tmp_path / "source.gguf", "F32")
    quantize_by_llama_cpp(tmp_path / "source.gguf", tmp_path / "theirs.gguf", format)
    write_gguf(checkpoint, tmp_path / "ours.gguf", format)
    ours, theirs = read_tensors(tmp_path / "ours.gguf"), read_tensors(tmp_path / "theirs.gguf")
    kinds = [{name: kind for name, (kind, _) in file.items()} for file in (ours, theirs)]
    assert kinds[0] == kinds[1]
    equal = [np.mean(data == theirs[name][1]) for name, (_, data) in ours.items()]
    # 1 where its compiler fused no multiply-adds
    assert min(equal) > 0.9, dict(zip(ours, equal, strict=True))
    fields = [GGUFReader(tmp_path / f"{name}.gguf").fields for name in ("ours", "theirs")]
    assert len({header["general.file_type"].contents() for header in fields}) == 1


def test_rows_that_blocks_do_not_divide_are_named(tmp_path):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "in", **MODELS["rows of 48 and 256"]))
    notices = write_gguf(checkpoint, tmp_path / "out.gguf", "Q4_K_M").notices
    assert len(notices) == 1
    assert "kept at float16: blocks of 32 do not divide rows of 48" in notices[0]
    checkpoint = open_checkpoint(make_model(tmp_path / "phi3", **PHI, tokenizer="bytelevel"))
    notices = write_gguf(checkpoint, tmp_path / "phi3.gguf", "Q4_K_M").notices
    kept = [notice.partition("kept at ")[2].partition(":")[0] for notice in notices]
    assert kept == ["Q5_0", "Q8_0"]


def test_bfloat16_keeps_a_bfloat16_model_as_it_is(tmp_path):
    checkpoint = open_checkpoint(
        make_checkpoint(tmp_path / "in", dtype="bfloat16", tokenizer="bytelevel")
    )
    written = write_gguf(checkpoint, tmp_path / "out.gguf", "BF16")
    kinds = {kind for kind, _ in read_tensors(tmp_path / "out.gguf").values()}
    assert kinds == {"BF16", "F32"} and written.notices == ()
    after = open_checkpoint(tmp_path / "out.gguf").tensors
    for name, tensor in checkpoint.tensors.items():
        assert np.array_equal(after[name].float32(), tensor.float32()), name
