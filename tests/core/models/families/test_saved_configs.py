"""config.json of the newest families as transformers saves it today."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import pytest
import transformers

from mlx_llama.core.models.config import LlamaConfig

FILE = Path(__file__).parents[3] / "data" / "configs.json"
MODELS = {
    name: raw
    for name, raw in json.loads(FILE.read_text(encoding="utf-8")).items()
    if re.search("gemma-4|LFM2|Qwen3.5|Qwen3.8|Next|Ornith", name)
    and "quantization" not in str(raw)
}


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_of_a_config_means_the_same(name):
    """With all its fields, without those of no effect, and of the text part alone."""
    ours = LlamaConfig.from_dict(MODELS[name])
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(MODELS[name]))
    theirs.architectures = MODELS[name].get("architectures")
    for part in {id(x): x for x in (theirs, theirs.get_text_config())}.values():
        for is_short in (True, False):
            saved = json.loads(part.to_json_string(use_diff=is_short))
            if part is not theirs:
                saved["architectures"] = None
            again = LlamaConfig.from_dict(saved)
            own = {"dtype": ours.dtype, "is_text_part": ours.is_text_part}
            if ours.eos_token_ids != again.eos_token_ids and part is not theirs:
                own["eos_token_ids"] = ours.eos_token_ids  # which the wrapper alone has
            assert dataclasses.replace(again, **own) == ours
