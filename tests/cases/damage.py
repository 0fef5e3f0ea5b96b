"""Damaged models."""

from __future__ import annotations

import json

from making import edit_json, make_checkpoint


def write(name, content):
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def config(**fields):
    """Change fields of config.json; ... leaves one out."""
    return lambda folder: edit_json(folder / "config.json", **fields)


def tensors(change):
    """Change the header of model.safetensors, not its data."""

    def damage(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])

    return damage


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def missing_shard(folder):
    make_checkpoint(folder, shards=2)
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def rename_norm(header):
    header["other"] = header.pop("model.norm.weight")


def template(text):
    return write("chat_template.jinja", text), "chat_template.jinja"


AXIAL = {"rope_type": "axial", "factor": 2.0}


DAMAGE = {
    "truncated weights": (truncate, "model.safetensors"),
    "empty weights": (write("model.safetensors", b""), "model.safetensors"),
    "corrupt header": (
        write("model.safetensors", b"\x08" + b"\0" * 7 + b"not json"),
        ".safetensors",
    ),
    "huge header": (write("model.safetensors", b"\xff" * 64), "model.safetensors"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "missing shard": (missing_shard, "model-00002-of-00002.safetensors"),
    "missing tensor": (tensors(rename_norm), "model.norm.weight"),
    "wrong shape": (config(intermediate_size=95), "mlp"),
    "config not JSON": (write("config.json", "{"), "config.json"),
    "config missing": (lambda f: (f / "config.json").unlink(), "config.json"),
    "field missing": (config(hidden_size=...), "hidden_size"),
    "field absurd": (config(num_hidden_layers=-3), "num_hidden_layers"),
    "field huge": (config(vocab_size=10**15), "vocab_size"),
    "unknown architecture": (config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "unknown rope": (config(rope_scaling=AXIAL), "axial"),
    "quantised": (config(quantization={"bits": 4, "group_size": 64}), "quanti"),
    "tokenizer gone": (lambda f: (f / "tokenizer.model").unlink(), "tokenizer"),
    "tokenizer corrupt": (write("tokenizer.model", b"\x0a\xff\xff\xff\xff"), "tokenizer.model"),
    "tokenizer too large": (lambda f: make_checkpoint(f, tokenizer=True, vocab_size=300), "300"),
    "template loops": template("{% for a in range(99999999) %}" * 2 + "{% endfor %}" * 2),
    "template commands the terminal": (
        template("{{ raise_exception('\x1b[2J\x9b' ~ 'x' * 100000) }}")[0],
        "␛[2J\ufffdxxx",
    ),
    "template escapes": template("{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    "template malformed": template("{% for %}"),
    "generation config": (
        write("generation_config.json", '{"do_sample": true, "temperature": "hot"}'),
        "temperature",
    ),
    "only pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle"),
}
