"""OLMo 3: OLMo 2 with a window in three of four layers; the rope of the others alone is scaled."""

from .family import Family
from .olmo2 import SHARED
from .windows import Windows

FAMILY = Family(
    "Olmo3ForCausalLM",
    "olmo3",
    "olmo2",
    gguf_mark="attention.sliding_window",
    **SHARED,
    windows=Windows(4096, is_free=True, is_required=True, pattern=4),
    theta=5e5,
    local_theta=("rope_theta", None),
)
