"""Errors name an option as its user writes it: a parameter in Python, a flag in a command."""

from __future__ import annotations

import pickle

import pytest

from mlx_llama.core.errors import BackendError, LlamaError, OptionsError, spelled_as_flags


@pytest.mark.parametrize("flags, python", [
    ("--ctx-size 0: toy takes 1 to 256", "ctx_size 0: toy takes 1 to 256"),
    ("use --device cpu, or leave it out", "use device='cpu', or leave it out"),
    ("--backend mlx or --backend cuda", "backend='mlx' or backend='cuda'"),
    ("--no-compile asks for it", "compile=False asks for it"),
    ("--compile: leave it out", "compile: leave it out"),
    ("name it (--template NAME_OR_FILE)", "name it (template NAME_OR_FILE)"),
    ("--cache-bits 4 or --cache-memory x or --max-rows 0", "cache_bits 4 or cache_memory x or max_rows 0"),
    ("lower --prefill-step-size or --ctx-size.", "lower prefill_step_size or ctx_size."),
    # Other flags and file names are not parameters.
    ("python -m mlx_llama.generate --ignore-chat-template", "python -m mlx_llama.generate --ignore-chat-template"),
    ("a--model: no such folder", "a--model: no such folder"), ("--model-x", "--model-x"), ("---model", "---model"),
])
def test_spelling(flags, python):
    error = BackendError(flags)
    assert str(error) == python and str(pickle.loads(pickle.dumps(error))) == python
    with spelled_as_flags():
        assert str(error) == flags
        with spelled_as_flags():
            wrapped = OptionsError(f"file: {error}")
        assert str(wrapped) == f"file: {flags}"
    assert str(wrapped) == f"file: {python}" and f"{error}" == python


def test_the_spelling_ends_with_the_command():
    with pytest.raises(ValueError), spelled_as_flags():
        raise ValueError
    assert str(LlamaError("--threads 2")) == "threads 2"
