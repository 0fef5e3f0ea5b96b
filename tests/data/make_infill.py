"""Writes infill.json anew: {model: {request: ids of the prompt}}, by llama-server's POST /infill.

PYTHONPATH=tests python tests/data/make_infill.py llama-server
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from making import make_checkpoint
from making_gguf import make_gguf

from mlx_llama.core.files.checkpoint import open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf

CONTEXT = 4096
QWEN = ("prefix", "suffix", "middle", "pad")
QWEN = (*(f"<|fim_{name}|>" for name in QWEN), "<|repo_name|>", "<|file_sep|>")
CODE = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n    return c\n"}
FILES = [{"filename": "a.py", "text": "b = 1\n"}, {"text": "<|fim_prefix|> <s>"}]
LONG = "the quick brown fox jumps over the lazy dog\n" * 400
REQUESTS = {
    "code": CODE,
    "beginning": {**CODE, "prompt": "c = a <s>"},
    "files": {**CODE, "input_extra": FILES, "prompt": " "},
    "nothing": {"input_prefix": "", "input_suffix": ""},
    "long": {"input_prefix": LONG, "input_suffix": LONG, "prompt": "fox"},
}


def make_models(folder: Path) -> dict[str, Path]:
    """GGUF files with tokens for fill-in-the-middle: named by old and new keys, and by their
    texts.
    """

    def edit(writer) -> None:
        for key in ("prefix", "suffix", "fim_mid"):
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 300 + len(key))

    make_gguf(folder / "keys.gguf", edit=edit, max_position_embeddings=CONTEXT)
    size = 384 + len(QWEN)
    named = make_checkpoint(
        folder / "named", tokenizer="bytelevel", vocab_size=size, max_position_embeddings=CONTEXT
    )
    settings = json.loads((named / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {
        str(384 + i): {"content": text, "special": True} for i, text in enumerate(QWEN)
    }
    (named / "tokenizer_config.json").write_text(json.dumps(settings))
    write_gguf(open_checkpoint(named), folder / "named.gguf", "F16")
    return {name: folder / f"{name}.gguf" for name in ("keys", "named")}


def ask_llama_server(binary: str, model: Path) -> dict[str, list[int]]:
    """Token ids of the prompts, from the files of saved slots: six numbers, the last of them the
    count, and the ids.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = model.parent
    flags = ["--model", model, "--port", port, "--ctx-size", CONTEXT, "--parallel", 1]
    command = [binary, *flags, "--slot-save-path", folder, "--threads", 1, "--no-webui"]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL, stdout=-3)
    ids = {}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            for _ in range(600):
                try:
                    if http.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            for name, body in REQUESTS.items():
                done = http.post("/infill", json={**body, "n_predict": 0})
                done.raise_for_status()
                http.post("/slots/0?action=save", json={"filename": "slot"}).raise_for_status()
                saved = np.frombuffer((folder / "slot").read_bytes()[: 1 << 16], np.int32)
                assert saved[5] == done.json()["tokens_evaluated"]
                ids[name] = saved[6 : 6 + saved[5]].tolist()
    finally:
        process.kill()
        process.wait()
    return ids


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        models = make_models(Path(made))
        answers = {name: ask_llama_server(sys.argv[1], path) for name, path in models.items()}
    text = json.dumps(answers, separators=(",", ":"))
    (Path(__file__).parent / "infill.json").write_text(text.replace(']},"', ']},\n"') + "\n")
