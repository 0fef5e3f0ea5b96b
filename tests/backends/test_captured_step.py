"""The torch backend's step of few kernels: on a GPU where there is one, captured; else in Triton's interpreter, recorded.

The interpreter must be chosen before triton is imported, so a process of its own runs it (as in test_triton.py).
"""

from __future__ import annotations

import re
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from making import make_checkpoint
from making_gguf import make_gguf

from backends.conftest import relative_error
from mlx_llama.core.generation import options

torch = pytest.importorskip("torch")

from backends.triton_process import DEVICE, HAS_GPU, call, compile_call  # noqa: E402, F401

EVERYTHING = dict(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.1,
                  frequency_penalty=0.1, logit_bias={5: 1.0}, seed=3)
SAMPLING = {"greedy": dict(temperature=0), "noise": dict(temperature=1.0, seed=2**63 + 5), "everything": EVERYTHING}
MODELS = {
    "float32": dict(),
    "float16": dict(dtype="float16"),
    "sliding": dict(architectures=["MistralForCausalLM"], sliding_window=7),
    "biases": dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "heads": dict(hidden_size=72, num_attention_heads=6, num_key_value_heads=2, head_dim=20),
    "low-bit": dict(kinds=lambda name: "Q6_K" if ".v_proj" in name else "Q4_K"),
}


# The kernels


def worst(found, wanted) -> float:
    """Largest difference over the largest wanted value."""
    return float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp(min=1e-9))


def made(*shape: int, dtype=torch.float32, seed: int = 0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).to(DEVICE, dtype)


def rows_and_products(dtype) -> dict[str, float]:
    from cuda_fallback import ops
    from cuda_fallback.kernels import decode as fused

    found = {}
    for E in (7, 64, 1000):
        x, delta, weight = made(3, E, dtype=dtype), made(3, E, dtype=dtype, seed=1), made(E, dtype=dtype, seed=2)
        total, normed = fused.add_rms_norm(x, delta, weight, 1e-5)
        found[f"sum {E}"] = worst(total, x + delta)
        found[f"norm {E}"] = worst(normed, ops.rms_norm(x + delta, weight, 1e-5))
        same, alone = fused.add_rms_norm(x, None, weight, 1e-5)
        assert same is x
        found[f"norm alone {E}"] = worst(alone, ops.rms_norm(x, weight, 1e-5))
    for N, K in ((1, 16), (7, 100), (130, 1024), (6, 2500)):
        x, weight, bias = made(1, K, dtype=dtype), made(N, K, dtype=dtype, seed=1), made(N, dtype=dtype, seed=2)
        found[f"product {N} {K}"] = worst(fused.multiply(x, weight), ops.linear(x.double(), weight.double()))
        found[f"with bias {N} {K}"] = worst(fused.multiply(x, weight, bias),
                                            ops.linear(x.double(), weight.double(), bias.double()))
        both = made(2 * N, K, dtype=dtype, seed=3) * 0.1
        wanted = ops.swiglu(ops.linear(x.double(), both.double(), made(2 * N, seed=4).double()))
        found[f"gated {N} {K}"] = worst(fused.multiply_gated(x, both, made(2 * N, dtype=dtype, seed=4)), wanted)
    for shape in ((1, 2, 6), (2, 3, 2600)):
        found[f"gate {shape}"] = worst(fused.gate(made(*shape, dtype=dtype)), ops.swiglu(made(*shape).to(dtype).double()))
    x = made(2, 5, 3, 24, dtype=dtype).transpose(1, 2)
    table = made(5, 12, seed=1), made(5, 12, seed=2)
    found["rotated"] = worst(fused.rotate(x, *table), ops.rope(x.float(), table))
    return found


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.float16, 2e-3)], ids=["float32", "float16"])
def test_norms_products_gates_and_rotations(dtype, bound, call):
    found = call(rows_and_products, dtype)
    assert len(found) == 24 and max(found.values()) < bound, found


SHAPES = [(4, 4, 16), (6, 2, 20), (8, 1, 64)]  # heads, key heads, width of a head


def attended(dtype, H: int, G: int, D: int) -> list[tuple[str, float]]:
    """Errors of a stored row and of attention over it, at positions at the ends of blocks and pieces."""
    from cuda_fallback import ops
    from cuda_fallback.kernels import decode as fused

    room, found = 4200, []
    cosines, sines = made(2, room, D // 2)
    heads = made(1, (H + 2 * G) * D, dtype=dtype, seed=3)
    for position, window in ((0, None), (1, None), (63, None), (64, None), (130, None), (4095, None), (4096, None),
                             (4199, None), (300, 100), (20, 100), (100, 100)):
        keys, values = made(2, 1, G, room, D, dtype=dtype, seed=4)
        arrays = [torch.zeros(0), torch.zeros(0), keys, values]
        state = torch.tensor([position, 0, 0, 0, room, 0, cosines.data_ptr(), sines.data_ptr(),
                              *(array.data_ptr() for array in arrays)], device=DEVICE)
        before = keys.clone(), values.clone()
        query = fused.store_rotated(state, 1, heads, H, G, D)
        split = heads.view(1, 1, H + 2 * G, D).transpose(1, 2)
        turned = ops.rope(split[:, :H + G].float(), (cosines[position:position + 1], sines[position:position + 1]))
        found.append(("query", worst(query, turned[0, :H, 0])))
        found.append(("key", worst(keys[0, :, position], turned[0, H:, 0])))
        assert torch.equal(values[0, :, position], split[0, H + G:, 0])
        for now, then in zip((keys, values), before):  # nothing else is written
            now = now.clone()
            now[:, :, position] = then[:, :, position]
            assert torch.equal(now, then)
        first = max(0, position + 1 - window) if window else 0
        wanted = ops.attention(query.double()[None, :, None], keys.double()[:, :, first:position + 1],
                               values.double()[:, :, first:position + 1], D**-0.5)
        out = fused.attend(state, 1, query, G, window, D**-0.5)
        found.append((f"attention {position} {window}", worst(out.view(H, D), wanted[0, :, 0])))
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 3e-6), (torch.float16, 3e-3)], ids=["float32", "float16"])
def test_rows_are_stored_and_attended_to(dtype, bound, shape, call):
    found = call(attended, dtype, *shape)
    assert len(found) == 33 and max(error for _, error in found) < bound, found


def noise_and_tokens() -> tuple[list, list, list]:
    from cuda_fallback.kernels import decode as fused
    from mlx_llama.core.generation import rng

    table, noise = torch.tensor(rng.gumbel_table(), device=DEVICE), []
    tokens = torch.arange(100, 200, dtype=torch.int32, device=DEVICE)[None].contiguous()
    for seed, position in ((0, 0), (2**64 - 1, 5), (123456789012345, 2**31 - 2)):
        state = torch.tensor([position, 7, *rng.split_seed(seed), 99, tokens.data_ptr(), 0, 0], device=DEVICE)
        noise.append(fused.add_noise(state, torch.zeros(3000, device=DEVICE), table).cpu().numpy())
    state[0] = 3
    recent = [fused.recent(state, window)[0].tolist() for window in (2, 4, 7)]
    fused.advance(state, torch.tensor([[55]], dtype=torch.int32, device=DEVICE))
    return noise, recent, [state[:2].tolist(), tokens[0, :6].tolist()]


def test_noise_recent_tokens_and_the_next_position(call):
    from mlx_llama.core.generation import rng

    noise, recent, after = call(noise_and_tokens)
    for got, (seed, position) in zip(noise, ((0, 0), (2**64 - 1, 5), (123456789012345, 2**31 - 2))):
        np.testing.assert_array_equal(got, rng.gumbel(seed, position + 1, 3000))
    assert recent == [[102, 103], [100, 101, 102, 103], [-1, -1, -1, 100, 101, 102, 103]]
    assert after == [[4, 55], [100, 101, 102, 103, 55, 105]]


# The step


def checkpoint(name: str) -> Path:
    path = Path(tempfile.mkdtemp()) / name
    if name == "low-bit":
        path = path.with_suffix(".gguf")
        make_gguf(path, tokenizer=None, num_hidden_layers=1, hidden_size=256, intermediate_size=256, num_attention_heads=2,
                  num_key_value_heads=1, head_dim=128, vocab_size=64, max_position_embeddings=2048, **MODELS[name])
        return path
    return make_checkpoint(path, max_position_embeddings=2048, **MODELS[name])


def fewer_programs() -> None:
    """Each costs the interpreter milliseconds."""
    from cuda_fallback.kernels import decode as fused, packed as kernels

    fused._ROWS, fused._PIECES, kernels._ROWS = 64, 4, 64


def loaded(path: Path, compile: bool = True, dtype: str = "auto"):
    """The model with its step of few kernels, recorded in the interpreter where it would be captured on a GPU."""
    from backends.recording import Recording
    from cuda_fallback import model
    from cuda_fallback.kernels import decode as fused, packed as kernels
    from cuda_fallback.kernels.cuda_graph import Steps
    from mlx_llama.core.files.checkpoint import open_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        if not HAS_GPU:
            patch.setattr(model, "find_kernels", lambda device: (kernels, ()))
        llama = model.Llama.load(open_checkpoint(path), dtype, DEVICE, compile=compile if HAS_GPU else None)
    if not HAS_GPU:
        fewer_programs()
        llama._steps = Steps(llama, fused, Recording(llama) if compile else None)
    assert (llama._steps.capture is not None) is compile
    return llama


def sampler(given: dict):
    from cuda_fallback.sampling import Sampler

    return Sampler(options.resolve(given).options, DEVICE)


def decoded(llama, count: int, given: dict, cache=None, prompt: int = 5) -> tuple[list[int], dict]:
    """(tokens, the cache's state) of `count` steps after a prompt."""
    draw, cache = sampler(given), cache or llama.make_cache(1000)
    token, tokens = np.arange(3, 3 + prompt, dtype=np.int32)[None] % 60, []
    for _ in range(count):
        token = llama.step(token, cache.length, cache, draw)
        tokens.append(token.item())
    return tokens, cache.state()


def plain_and_replayed(path: Path, given: dict, count: int) -> tuple:
    plain, replayed = loaded(path, False), loaded(path, True)
    without = loaded(path, False)
    without._steps = None  # as forward does it
    found = [decoded(llama, count, given) for llama in (plain, replayed, without)]
    again = decoded(replayed, 4, given)  # another cache, the same graph
    if not HAS_GPU:
        capture = replayed._steps.capture
        assert (capture.recorded, capture.replays) == (1, count - 2 + 3)
    assert all(kind.is_captured for kind in replayed._steps._known.values())
    return *found, again


@pytest.mark.parametrize("name, case", [*((name, "everything") for name in MODELS), ("float32", "greedy"),
                                        ("float32", "noise")])
def test_replayed_steps_give_the_bits_of_plain_ones_and_the_numbers_of_forward(name, case, call):
    plain, replayed, forward, again = call(plain_and_replayed, checkpoint(name), SAMPLING[case], 9)
    assert (replayed[0], again[0]) == (plain[0], plain[0][:4])
    for part in plain[1]:
        np.testing.assert_array_equal(replayed[1][part], plain[1][part])
    exact = name not in ("float16", "low-bit")
    if exact:
        assert plain[0] == forward[0]
    same = 5 + next((i for i, (one, other) in enumerate(zip(plain[0], forward[0])) if one != other), len(plain[0]) - 1)
    assert same > 5
    for part in ("keys", "values"):
        assert relative_error(plain[1][part][..., :same, :], forward[1][part][..., :same, :]) < (1e-5 if exact else 5e-3)


def in_turns(path: Path) -> tuple:
    """Two conversations alone, and token by token in turn on one model; with another seed, kind and capacity each."""
    one, other = dict(temperature=0.9, seed=1), dict(temperature=0.9, seed=2)
    third = dict(temperature=0)
    alone = [decoded(loaded(path), 5, given, prompt=prompt)[0] for given, prompt in ((one, 5), (other, 3), (third, 7))]
    llama, turns = loaded(path), []
    for given, prompt, capacity in ((one, 5, 50), (other, 3, 900), (third, 7, 16)):
        turns.append([sampler(given), llama.make_cache(capacity), np.arange(3, 3 + prompt, dtype=np.int32)[None] % 60, []])
    for _ in range(5):
        for turn in turns:
            draw, cache, token, tokens = turn
            turn[2] = llama.step(token, cache.length, cache, draw)
            tokens.append(turn[2].item())
    assert len(llama._steps._known) == 2  # a seed is no other kind
    return alone, [turn[3] for turn in turns]


def test_conversations_in_turn_do_not_disturb_each_other(call):
    alone, turns = call(in_turns, checkpoint("float32"))
    assert turns == alone and alone[0] != alone[1]


def on_threads(path: Path) -> tuple[list, list]:
    given = [dict(temperature=0.9, seed=seed) for seed in range(3)]
    alone = [decoded(loaded(path), 5, one)[0] for one in given]
    llama, together = loaded(path), [None] * 3

    def work(i: int) -> None:
        together[i] = decoded(llama, 5, given[i])[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return alone, together


def test_conversations_on_threads_do_not_disturb_each_other(call):
    alone, together = call(on_threads, checkpoint("float32"))
    assert together == alone and len({tuple(tokens) for tokens in alone}) > 1


def life_of_a_cache(path: Path) -> list[tuple]:
    """Tokens with and without the step of few kernels, where the cache grows, is trimmed, written to, saved, filled."""
    found = []
    for few in (True, False):
        llama, draw, tokens = loaded(path), sampler(dict(temperature=0)), []
        if not few:
            llama._steps = None
        cache = llama.make_cache(260)

        def go(count: int, token) -> None:
            for _ in range(count):
                token = llama.step(token, cache.length, cache, draw)
                tokens.append(token.item())

        go(5, np.arange(3, 256, dtype=np.int32)[None] % 60)  # from 253 positions over 256, where storage grows
        cache.trim(250)
        go(2, np.array([[9]], np.int32))
        cache.trim(100)
        llama.forward(np.array([[4, 5, 6]], np.int32), 100, cache)
        go(3, torch.tensor([[7]], dtype=torch.int32, device=DEVICE))
        state = cache.state()
        cache.restore(state)
        go(2, [[8]])
        verified = llama.verify(np.array([[tokens[-1], 11, 12]], np.int32), cache.length, cache, draw)
        cache.trim(cache.length - 2)
        tokens += verified[0].tolist()
        go(2, verified[:, :1])
        cache.trim(20)
        llama.forward(np.arange(20, 257, dtype=np.int32)[None] % 60, 20, cache)
        go(3, np.array([[9]], np.int32))  # to the last position
        found.append((tokens, cache.length, cache.state()["tokens"][0].tolist()))
        with pytest.raises(Exception, match="do not fit the cache's capacity of 260"):
            go(1, np.array([[9]], np.int32))
    return found


def test_growing_trimming_restoring_and_filling_a_cache(call):
    few, many = call(life_of_a_cache, checkpoint("float32"))
    assert few == many and few[1] == 260


def conversations(path: Path) -> list:
    """Two turns each, by steps of few kernels, recorded, and by forward: plain, and with speculation that verifies."""
    from backends.recording import Recording
    from cuda_fallback.kernels import decode as fused
    from cuda_fallback.kernels.cuda_graph import Steps
    from mlx_llama import load

    found = []
    for few in (True, False):
        llm = load(path, backend="cuda", device="gpu" if HAS_GPU else "cpu", dtype="float32", compile=None if HAS_GPU else False)
        if few and not HAS_GPU:
            fewer_programs()
            llm.model._steps = Steps(llm.model, fused, Recording(llm.model))
        elif not few:
            llm.model._steps = None
        for given in (dict(temperature=1.0, seed=1), dict(temperature=0, speculate="prompt", logit_bias={5: 6.0})):
            chat = llm.chat(max_tokens=6, **given)
            done = [chat.send(text) for text in ("one two", "three")]
            found.append([(one.tokens, one.text, one.waits, one.read_bytes, one.drafted) for one in done])
    return found


def test_conversations_are_those_of_forward(call):
    *few, many, spoken = call(conversations, checkpoint("float32"))
    assert few == [many, spoken]
    assert spoken[1][4] > 0  # drafts were verified between the steps


def dynamic_rope(path: Path):
    from cuda_fallback import model
    from cuda_fallback.kernels import packed as kernels
    from mlx_llama.core.files.checkpoint import open_checkpoint

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "find_kernels", lambda device: (kernels, ()))
        return model.Llama.load(open_checkpoint(path), device=DEVICE)._steps


def test_dynamic_rope_is_stepped_by_forward(call, tmp_path):
    folder = make_checkpoint(tmp_path / "d", rope_scaling=dict(rope_type="dynamic", factor=4.0), max_position_embeddings=16)
    assert call(dynamic_rope, folder) is None


def failing(path: Path) -> tuple:
    plain = decoded(loaded(path, False), 6, SAMPLING["noise"])[0]
    llama = loaded(path)

    def refuse(function):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    llama._steps.capture = refuse
    return plain, decoded(llama, 6, SAMPLING["noise"])[0], llama.notices


def test_a_capture_that_fails_leaves_plain_steps_and_a_notice(call):
    plain, tokens, notices = call(failing, checkpoint("float32"))
    assert tokens == plain
    assert notices == ("decoding is not captured: CUDA error: operation not permitted when stream is capturing",)


def broken_off(path: Path) -> list:
    """A step that breaks off at any of its kernels, then goes on: the tokens, and those of an unbroken run."""
    from cuda_fallback.kernels import packed as kernels

    wanted, llama = decoded(loaded(path), 6, SAMPLING["noise"])[0], loaded(path, False)
    found, original = [], kernels.run
    for broken in range(1, 27, 9):
        cache, draw, count = llama.make_cache(50), sampler(SAMPLING["noise"]), 0
        token, tokens = np.arange(3, 8, dtype=np.int32)[None] % 60, []

        def run(*given, **named):
            nonlocal count
            count += 1
            if count == broken + 30:
                raise KeyboardInterrupt
            original(*given, **named)

        kernels.run = run
        try:
            while len(tokens) < 6:
                try:
                    token = llama.step(token, cache.length, cache, draw)
                    tokens.append(token.item())
                except KeyboardInterrupt:
                    pass
        finally:
            kernels.run = original
        assert count > broken + 30
        found.append(tokens)
    return [wanted, *found]


def test_a_step_that_breaks_off_can_be_taken_again(call):
    wanted, *found = call(broken_off, checkpoint("float32"))
    assert all(tokens == wanted for tokens in found) and len(found) == 3


def prompts(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a prompt in two chunks, with the kernels that fuse and without."""
    from cuda_fallback import ops
    from cuda_fallback.kernels import decode as fused

    found = []
    for kernels_run in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "_fused", lambda x: fused if kernels_run else None)
            llama = loaded(path)
            cache = llama.make_cache(20)
            parts = [llama.forward(np.arange(start, start + 6)[None], start, cache, every=True) for start in (0, 6)]
            found.append(torch.cat(parts, 1).float().cpu().numpy())
    return tuple(found)


def test_prompts_by_fused_kernels(call):
    plain, fused = call(prompts, checkpoint("float32"))
    assert 0 < relative_error(fused, plain) < 1e-5


# What the measuring command asks of them on a GPU


def judged(examples: str) -> tuple[list[dict], list[dict], dict]:
    """(found, found with a wrong scale in attention, rates) of examples/benchmarks/gpu_kernels.py, at small sizes."""
    import sys

    from cuda_fallback import quantized
    from cuda_fallback.kernels import decode as fused, packed as kernels

    sys.path.insert(0, examples)
    import gpu_kernels

    with pytest.MonkeyPatch.context() as patch:
        for name, small in dict(DEVICE=DEVICE.type, PRODUCTS={"out": (20, 48), "gate, up": (10, 40)}, HEADS=(4, 2, 16), APART=0,
                                LOW_BIT=(8, 64), POSITIONS=(0, 63, 70), ROOM=80, LENGTH=70, VOCABULARY=500,
                                BOUNDS={name: gpu_kernels.BOUNDS[name] for name in ("float32", "float16")}).items():
            patch.setattr(gpu_kernels, name, small)
        if not HAS_GPU:
            patch.setattr(fused, "_PIECES", 4)
            patch.setattr(quantized, "find_kernels", lambda device: (kernels, ()))
            patch.setattr(gpu_kernels, "_seconds", lambda calls: [call() for call in calls] and 1e-3)
        found, rates = gpu_kernels.check(), gpu_kernels.rates()
        attend = fused.attend
        patch.setattr(fused, "attend", lambda *given: attend(*given[:-1], 1.2 * given[-1]))
        return found, gpu_kernels.check(), rates


def test_the_measuring_command_sees_right_and_wrong_kernels(call):
    found, wrong, rates = call(judged, str(Path(__file__).resolve().parents[2] / "examples/benchmarks"))
    assert len(found) == 2 * (2 + 2 * 2 + 2 + 3 + 6) + 1 and all(one["ok"] for one in found), found
    bad = [one["name"] for one in wrong if not one["ok"]]
    assert bad and all(name.startswith("attention") for name in bad) and len(bad) == 8  # not where only one is seen
    assert rates.keys() == {"out", "gate, up", "affine 4/64", "Q8_0", "attention"}
    assert all(rate > 0 for one in rates.values() for rate in one.values())


# The compiler


def assembled(name: str, element: str, capability: int, fixed: dict, warps: int) -> tuple[str, int]:
    """One of fused's kernels for a GPU of compute capability `capability`: its assembly and bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cuda_fallback.kernels import decode as fused

    kernel = getattr(fused, name)
    floats = {"sums", "tops", "parts", "cosines", "sines", "scores", "table"}
    integers = {"N", "H", "T", "G", "V", "layer", "window", "batch_stride", "head_stride", "row_stride"}
    tokens = {"out"} if name == "_recent" else {"like", "token"}

    def kind(argument: str) -> str:
        if argument == "state":
            return "*i64"
        if argument in tokens | ({"like"} if name == "_recent" else set()):
            return "*i32"
        if argument in ("eps", "scale"):
            return "fp32"
        return "i32" if argument in integers else "*fp32" if argument in floats or name == "_add_noise" else element

    signature = {one: "constexpr" if one in fixed else kind(one) for one in kernel.arg_names}
    constants = {(i,): fixed[one] for i, one in enumerate(kernel.arg_names) if one in fixed}
    aligned = {(i,): [["tt.divisibility", 16]] for i, one in enumerate(signature.values()) if one.startswith("*")}
    source = ASTSource(kernel, signature, constants, aligned)
    found = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": warps})
    return found.asm["ptx"], found.metadata.shared


SHARED = {75: 65536, 80: 101376, 90: 101376}  # bytes that the smallest GPUs of 7.5, 8.x, 9.0 and later give a program
HEADS = {"ALLOCATED": 4, "LAYERS": 8, "R": 4, "D": 128, "ROWS": 16, "WIDTH": 128, "PIECES": 64, "KEYS": 64}
KERNELS = {  # name: (constants, warps, whether it loads 16 bytes at a time)
    "_add_rms_norm": (dict(E=4096, BLOCK=4096), 8, True),
    "_multiply": (dict(bias=None, K=4096, GATED=False, ROWS=2, COLUMNS=1024), 4, True),
    "_multiply gated": (dict(bias=None, K=4096, GATED=True, ROWS=1, COLUMNS=1024), 4, True),
    "_rotate": (dict(HALF=64, BLOCK=64), 1, False),
    "_store_rotated": (dict(HALF=64, BLOCK=64, COSINES=6, ALLOCATED=4, LAYERS=8), 1, False),
    "_attend": (HEADS, 4, True),
    "_join": ({key: HEADS[key] for key in ("D", "WIDTH", "PIECES", "KEYS")}, 4, True),
    "_gate": (dict(F=14336, BLOCK=1024), 4, True),
    "_recent": (dict(WINDOW=20, BLOCK=32, TOKENS=5), 4, False),
    "_add_noise": (dict(SEED=2, PARITY=0x1BD11BDA, SHIFT=12, OFFSET=127 << 11, BLOCK=1024), 4, False),
    "_advance": (dict(TOKENS=5), 1, False),
}


@pytest.mark.parametrize("element, capability", [("*bf16", 90), ("*fp16", 75), ("*fp32", 80)])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_for_a_gpu(name, element, capability, compile_call):
    fixed, warps, is_wide = KERNELS[name]
    if "KEYS" in fixed:
        fixed = dict(fixed, KEYS=32 if element == "*fp32" else 64)
    assembly, shared = compile_call(assembled, name.split()[0], element, capability, fixed, warps)
    assert shared <= SHARED[capability]
    assert f".target sm_{capability}" in assembly
    assert not is_wide or re.search(r"ld\.global\S*\.v4\.b32", assembly)
    assert not re.search(r"\.local\b", assembly)  # no registers spilled by Triton


def keys_at_a_time(D: int, itemsize: int) -> int:
    from cuda_fallback.kernels import decode as fused

    return fused.keys_at_a_time(D, itemsize)


@pytest.mark.parametrize("element, capability", [("*bf16", 90), ("*fp32", 80), ("*fp16", 75), ("*fp32", 75)])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_attention_fits_the_shared_memory_of_small_gpus(D, element, capability, compile_call):
    keys, width = compile_call(keys_at_a_time, D, 4 if element == "*fp32" else 2), 1 << (D - 1).bit_length()
    _, shared = compile_call(assembled, "_attend", element, capability, {**HEADS, "D": D, "WIDTH": width, "KEYS": keys}, 4)
    assert 0 < shared <= SHARED[capability]
