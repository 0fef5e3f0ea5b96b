"""LlamaConfig.layers: what a config resolves to, layer by layer. The arithmetic is
tests/backends/test_architectures.py's.
"""

from making import config_fields

from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.models.parts import Window


def windows(**fields):
    config = LlamaConfig.from_dict(config_fields(num_hidden_layers=4, **fields))
    return [layer.mixer.window for layer in config.layers]


def test_windows_of_the_last_layers_alone():
    qwen = dict(architectures=["Qwen2ForCausalLM"], use_sliding_window=True, sliding_window=7)
    assert windows(**qwen, max_window_layers=3) == [
        None,
        None,
        None,
        Window(7),
    ]
    assert windows(**qwen, max_window_layers=9) == [None] * 4
    none = LlamaConfig.from_dict(config_fields(num_hidden_layers=4, **qwen, max_window_layers=4))
    assert none.sliding_window is None
    assert windows(**qwen, max_window_layers=0) == [Window(7)] * 4
    assert windows(**(qwen | dict(use_sliding_window=False))) == [None] * 4
    assert windows(architectures=["MistralForCausalLM"], sliding_window=5) == [Window(5)] * 4
