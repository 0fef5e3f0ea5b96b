"""Answers of a model by every way through the scheduler: run by a test in one process, and under a
launcher in several.

python rank_cases.py OUT.json BACKEND MODEL ...: the answers of each model, and facts of this
process, as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from backends.conftest import EVERYTHING, matrices_of

FIRST = "Once upon a time there was a little llama"
CASES = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 7},
    "filtered": EVERYTHING,
    "penalised": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "speculated": {"speculate": "prompt"},
    "DRY": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "temperature": 0.8, "seed": 3},
    "log-probabilities": {"logprobs": 2},
    "grammar": {"regex": "[a-z ]{3,9}[0-9]{2}"},
}


FEW = ("sampled", "filtered")


def forbid_even(tokens, logits):
    """A logits processor: odd tokens alone."""
    logits[:, ::2] = -1e9
    return logits


def run_cases(llm, is_thorough: bool) -> dict:
    """Tokens by case, of requests in steps of several rows and alone. is_thorough: all cases,
    prefixes and files.
    """
    results = {}
    cases = {name: options for name, options in CASES.items() if is_thorough or name in FEW}
    handles = {name: llm.submit(FIRST, max_tokens=6, **options) for name, options in cases.items()}
    results["together"] = {name: handle.finish().tokens for name, handle in handles.items()}
    results["alone"] = llm.generate(FIRST, max_tokens=6).tokens
    results["logits"] = [
        round(float(value), 4) for value in llm.logits(llm.encode(FIRST))[:, ::50].flatten()
    ]
    if not is_thorough:
        return results
    longer = llm.generate(FIRST + " who lived on a hill", max_tokens=6)
    results["from a prefix"] = [longer.tokens, longer.reused_tokens]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.safetensors"
        llm.save_cache(path)
        results["saved"] = path.stat().st_size
        llm.loop.close()  # forgets its rows
        results["loaded"] = llm.load_cache(path)
    results["processed"] = llm.generate(FIRST, max_tokens=5, logits_processor=forbid_even).tokens
    again = llm.generate(FIRST + " who lived on a hill", max_tokens=6)
    results["from a file"] = [again.tokens, again.reused_tokens]
    return results


def load_case(name: str, backend: str):
    """A model at float32. name: a path, perhaps "|" and a draft model's."""
    import mlx_llama

    path, _, draft = name.partition("|")
    return mlx_llama.load(
        path, backend=backend, device="cpu", dtype="float32", draft_model=draft or None
    )


def count_weights(model) -> int:
    """Bytes of all matrices of a model, of this process."""
    matrices = [*matrices_of(model), model.decoder.embedding.weight]
    return sum({id(part): part.nbytes for part in matrices}.values())


def count_sent(ranks) -> int:
    """Bytes that this process has sent over TCP to other ranks, as the kernel counts them."""
    import os
    import socket
    import struct

    if stream := getattr(ranks, "stream", None):  # rank 0 does not wait for its messages
        import mlx.core as mx

        mx.synchronize(stream)
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                # tcpi_bytes_sent, tcpi_bytes_retrans
                sent, again = struct.unpack_from("QQ", info, 200)
                total += sent - again
    return total


def measure_traffic(llm) -> list[int]:
    """(bytes given to collective operations, bytes sent, bytes of messages) of 4 greedy tokens,
    after those of a prompt.
    """
    from mlx_llama.core.backends import selection
    from mlx_llama.parity.probes import greedy

    ranks, told = selection.world.ranks, []
    broadcast = ranks.broadcast
    ranks.broadcast = lambda data, root: (told.append(data.nbytes), broadcast(data, root))[1]
    prompt, counts = llm.encode(FIRST), []
    for count in (4, 8):
        earlier, sent = ranks.sent, count_sent(ranks)
        told.clear()
        greedy(llm, prompt, count)
        counts.append((ranks.sent - earlier, count_sent(ranks) - sent, sum(told)))
    return [after - before for before, after in zip(*counts)]


def main(out: str, backend: str, *models: str) -> None:
    from mlx_llama.core.backends import selection

    results = {}
    for name in models:
        llm = load_case(name, backend)
        results[name] = run_cases(llm, not results) | {
            "weights": count_weights(llm.model),
            "size": selection.world.size,
        }
        if len(results) == 1:
            results[name]["traffic"] = measure_traffic(llm)
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
