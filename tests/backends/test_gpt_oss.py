"""gpt-oss in the forms of its files: experts in mxfp4 as published, in bfloat16 and in mlx-lm's
stacks. transformers judges, with the experts dequantised by its own function.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from making import make_tokenizer

from backends.conftest import relative_error
from backends.test_architectures import GPT_OSS, SIZES, TOKENS, YARN, run
from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.core.files.quantized import AffineWeight

FIELDS = SIZES | GPT_OSS | dict(hidden_size=64, intermediate_size=96, rope_parameters=YARN)


@functools.cache
def published() -> tuple[Path, np.ndarray]:
    """A folder with mxfp4 experts, and transformers' logits for TOKENS at float32."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = transformers.AutoConfig.for_model("gpt_oss", **FIELDS, rope_theta=150000.0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors, state = {}, {}
    for key, value in model.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            count, columns, rows = value.shape
            blocks = torch.randint(256, (count, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 125, (count, rows, columns // 32), dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            state[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            spread = 1.0 if "router" in key or "sinks" in key else 0.1
            value = spread * torch.randn(value.shape) + float("norm" in key)
            tensors[key] = value.to(torch.bfloat16)
            state[key] = tensors[key].float()
    model.load_state_dict(state)
    folder = Path(tempfile.mkdtemp(prefix="published"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer(folder)
    config.save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    (folder / "config.json").write_text(json.dumps(fields))
    with torch.no_grad():
        return folder, model.eval()(torch.from_numpy(TOKENS).long()).logits.numpy()


@pytest.mark.parametrize("compile", [None, False])
def test_published_experts_have_the_logits_of_transformers(compile, backend):
    folder, wanted = published()
    checkpoint = open_checkpoint(folder)
    experts = [tensor for name, tensor in checkpoint.tensors.items() if ".experts." in name]
    matrices = [tensor for tensor in experts if len(tensor.shape) == 2]
    assert all(isinstance(tensor, AffineWeight) for tensor in matrices)
    assert {tensor.format for tensor in matrices} == {"mxfp4"}
    for cuts in ((0, 30), (0, 20, 29, 30)):
        assert relative_error(run(backend, checkpoint, cuts, compile=compile), wanted) < 1e-4
