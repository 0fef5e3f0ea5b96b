"""Models with a recurrent state in some layers: the same tokens cold, from a prefix, in a batch and
after a cut; transformers judges.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from backends.conftest import relative_error
from mlx_llama.bench.measure import bytes_per_token
from mlx_llama.core import options
from mlx_llama.core.backends.positions import CHECKPOINT
from mlx_llama.core.backends.selection import select
from mlx_llama.core.errors import ContextError
from mlx_llama.core.files.checkpoint import open_checkpoint

SIZES = dict(
    vocab_size=384,
    hidden_size=72,
    intermediate_size=92,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
KINDS = ["conv", "conv", "full_attention", "conv", "full_attention"]
HYBRIDS = {
    "lfm2": dict(layer_types=KINDS, block_multiple_of=16),
    "lfm2_moe": dict(
        layer_types=KINDS,
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
    ),
}
PROMPTS = np.random.default_rng(1).integers(3, 384, (8, 40)).astype(np.int32)
COUNT = 200


@functools.cache
def made(kind: str) -> tuple[Path, np.ndarray]:
    """A folder of random weights, and transformers' COUNT greedy tokens after the first prompt."""
    torch.manual_seed(0)
    fields = SIZES | HYBRIDS[kind] | dict(eos_token_id=None)
    config = transformers.AutoConfig.for_model(kind, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            value.copy_((1.0 if key.endswith("gate.weight") else 0.2) * torch.randn(value.shape))
            value.add_("norm" in key)
        prompt = torch.from_numpy(PROMPTS[:1]).long()
        chosen = model.generate(prompt, max_new_tokens=COUNT, do_sample=False)[0, prompt.shape[1] :]
    folder = Path(tempfile.mkdtemp(prefix="hybrid"))
    model.save_pretrained(folder)
    return folder, chosen.numpy()


@functools.cache
def loaded(backend, kind):
    return backend.load(open_checkpoint(made(kind)[0]), "float32")


def decode(backend, model, cache, token, count: int) -> np.ndarray:
    """The greedy tokens [rows, count] after `token` [rows, 1] in all rows of the cache."""
    sampler = backend.sampling_batch(
        [options.resolve({"temperature": 0}).options] * len(cache.lengths)
    )
    for _ in range(count):
        token = model.step(token, list(cache.lengths), cache, sampler)
    tokens = [cache.state(row)["tokens"][-count + 1 :] for row in range(cache.rows)]
    return np.concatenate([tokens, backend.runtime.to_numpy(token)], axis=1)


@pytest.mark.slow_for("mlx", "cuda", "cpu-lfm2_moe")
@pytest.mark.parametrize("kind", HYBRIDS)
def test_greedy_tokens_are_those_of_transformers_alone_and_in_a_batch(kind, backend):
    """Eight rows, whose prompts have different lengths, and the first of them alone."""
    model, wanted = loaded(backend, kind), made(kind)[1]
    alone, many = model.make_cache(512), model.make_cache(512, 8)
    model.forward(PROMPTS[:1, :-1], 0, alone)
    for row, prompt in enumerate(PROMPTS):
        model.forward(prompt[None, 3 * row : -1], 0, many, rows=[row])
    tokens = decode(backend, model, many, PROMPTS[:, -1:], COUNT)
    assert tokens[0].tolist() == wanted.tolist()
    assert decode(backend, model, alone, PROMPTS[:1, -1:], COUNT)[0].tolist() == wanted.tolist()
    assert len(set(map(tuple, tokens.tolist()))) > 1


TEXT = np.random.default_rng(2).integers(3, 384, (1, 400)).astype(np.int32)


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_row_that_was_cut_goes_on_as_a_cold_one(kind, backend):
    model, to_numpy = loaded(backend, kind), backend.runtime.to_numpy
    cold = to_numpy(model.forward(TEXT, 0, model.make_cache(512), all_positions=True))
    cache = model.make_cache(512, 2)
    for start, end in ((0, 150), (150, 300), (300, 400)):
        model.forward(TEXT[:, start:end], start, cache, rows=[0])
    assert cache.trim(400) == 400
    for length, cut in ((399, 300), (299, 150)):  # the ends of chunks
        assert cache.trim(length) == cut == cache.length
        logits = model.forward(TEXT[:, cut:], cut, cache, rows=[0], all_positions=True)
        assert relative_error(to_numpy(logits), cold[:, cut:]) < 1e-5
    # a prefix in another row, and the state in another cache
    assert cache.copy_prefix(0, 1, 200) == 150
    other = model.make_cache(512)
    other.restore(cache.state(0, 200))
    assert other.length == 150
    for holder, row in ((cache, 1), (other, 0)):
        logits = model.forward(TEXT[:, 150:], 150, holder, rows=[row], all_positions=True)
        assert relative_error(to_numpy(logits), cold[:, 150:]) < 1e-5
    assert cache.trim(100) == 0 == cache.length


@pytest.mark.parametrize("most", [2, 8])
def test_checkpoints_are_few_and_counted(most, backend):
    checkpoint = open_checkpoint(made("lfm2")[0])
    model = backend.load(checkpoint, "float32", checkpoints=most)
    cache = model.make_cache(1024)
    state = 4 * 3 * 2 * 72  # three layers' last two inputs
    for start in range(0, 400, 10):
        model.forward(TEXT[:, start : start + 10], start, cache)
    assert list(cache.checkpoints[0]) == list(range(410 - 10 * most, 401, 10))
    positions = cache.allocated[0] * cache.position_nbytes
    # and the row's own, and the memory of the next
    assert cache.taken(0) == positions + (most + 2) * state
    assert cache.nbytes_for(400) - cache.nbytes_for(0) >= positions + 4 * state
    # decoded tokens leave one at multiples alone
    decode(backend, model, cache, TEXT[:, :1], 2 * CHECKPOINT - 400)
    assert max(cache.checkpoints[0]) == 2 * CHECKPOINT and 401 not in cache.checkpoints[0]
    if backend.name == "cpu":  # whose kernels write states to memory that is used again
        decode(backend, model, cache, TEXT[:, :1], 2)
        assert cache.states_nbytes() == (most + 2) * state


def test_the_state_of_another_model_is_refused(backend):
    cache = loaded(backend, "lfm2").make_cache(64)
    loaded(backend, "lfm2").forward(TEXT[:, :20], 0, cache)
    state = cache.state()
    with pytest.raises(ContextError, match=r"recurrent states have the shape \[5\], this model"):
        cache.restore(state | {"recurrent": state["recurrent"][:5]})
    del state["recurrent"]
    with pytest.raises(ContextError, match=r"saved by another model"):
        cache.restore(state)
    assert cache.length == 20


def test_a_token_reads_its_states():
    """Of the layers' states, beside all weights and keys and values of two layers."""
    backend = select("cpu")
    model, checkpoint = loaded(backend, "lfm2"), open_checkpoint(made("lfm2")[0])
    positions, state = 7 * model.make_cache(1).position_nbytes, 4 * 3 * 2 * 72
    assert bytes_per_token(checkpoint, model, 7) == checkpoint.nbytes + positions + state
