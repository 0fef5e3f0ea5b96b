"""Requests of every API with values that no client sends: 2xx or 4xx, and no traceback."""

from __future__ import annotations

import collections
import copy
import json
import os
import random
from pathlib import Path

import mlx_llama.server.app  # noqa: F401  defines all kinds of requests
from mlx_llama.server.fields import Body, spellings

COUNT = int(os.environ.get("MLX_LLAMA_MUTATED", "150"))
SHAPES = json.loads((Path(__file__).parents[1] / "data/client_shapes.json").read_text())
QUESTION = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
TURNS = [*QUESTION, CALL, {"role": "tool", "content": "3", "tool_name": "f"}, *QUESTION]
OPTIONS = {"temperature": 0.5, "seed": 3, "num_predict": 4, "stop": ["a"], "num_ctx": 100}
BIASED = {"logit_bias": [[5, False], ["a", 1.5]], "dry_multiplier": 0.5, "xtc_probability": 0.5}
OTHERS = [
    ("/api/chat", {"messages": TURNS, "options": OPTIONS, "tools": TOOLS, "think": True}),
    ("/api/chat", {"messages": QUESTION, "format": FUNCTION["parameters"], "truncate": True}),
    ("/api/generate", {"prompt": "hi", "system": "s", "options": OPTIONS, "raw": False}),
    ("/api/show", {"model": "guide", "verbose": True}),
    ("/v1/jobs", {"prompt": "Once", "max_tokens": 4, "logprobs": 2, "reasoning_effort": "low"}),
    ("/v1/jobs", {"messages": QUESTION, "regex": "[ab]+", "chat_template_kwargs": {"a": 1}}),
    ("/completion", {"prompt": ["hi", [5, "x"]], "n_predict": 4, "n_probs": 2, **BIASED}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]}),
    ("/completion", {"prompt": {"prompt_string": "hi"}, "grammar": "root ::= [a-z]+", "n_cmpl": 2}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "logprobs": 2}),
    ("/v1/chat/completions", {"messages": TURNS, "tools": TOOLS, "continue_final_message": True}),
    ("/v1/chat/completions", {"messages": QUESTION, "documents": [{"title": "a", "text": "b"}]}),
    ("/v1/messages/count_tokens", {"messages": QUESTION, "system": [{"type": "text", "text": ""}]}),
    ("/tokenize", {"content": "hi", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 300]}),
    ("/apply-template", {"messages": TURNS, "tools": TOOLS, "add_generation_prompt": False}),
    ("/page/session", {"text": "{}"}),
]
SENT = [(shape["path"], shape["body"]) for shape in SHAPES if "body" in shape] + 8 * OTHERS
WORDS = ["", "\0", "\ud800", "😀" * 50, "a" * 5000]
WORDS += ["auto", "required", "tool", "(a+)+$", "root ::= ("]
NUMBERS = [0, -1, 1, 2**31, 2**53, 2**64, -(2**63), 10**40, 1.5, 1e308, float("nan")]
OBJECTS = [{}, {"": ""}, {"type": None}, {"type": ["a"]}, {"role": 5}]
OBJECTS += [{"$ref": "#"}, {"function": 5}]
DEEP = json.loads('[{"a":' * 90 + "1" + "}]" * 90)
STRANGE = [None, True, False, *NUMBERS, *WORDS, *OBJECTS, [], [[]], [None] * 30, ["x", 5], DEEP]


def subclasses(kind):
    return [kind, *(below for inner in kind.__subclasses__() for below in subclasses(inner))]


def places(value):
    """Every (container, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from places(inner)


def mutate(body, rng, names, values):
    """Replace, drop, wrap or add a value, in place."""
    owner, key = rng.choice([*places(body), (body, None)])
    if key is None or (isinstance(owner, dict) and rng.random() < 0.3):
        owner[rng.choice(names)] = copy.deepcopy(rng.choice(values))
    elif (chance := rng.random()) < 0.2:
        del owner[key]
    elif chance < 0.4:
        owner[key] = rng.choice([[owner[key]], {"type": owner[key]}, str(owner[key])])
    else:
        owner[key] = copy.deepcopy(rng.choice(values))


def test_mutated_requests(serve):
    rng, statuses = random.Random(COUNT), collections.Counter()
    inner = [owner[key] for _, body in SENT for owner, key in places(body)]
    fields = (spellings(kind) for kind in subclasses(Body))
    names = sorted(set().union(*fields, *(body for _, body in SENT)))
    server = serve("--ctx-size", "512", "--max-tokens", "8", "--timeout", "60")
    for _ in range(COUNT):
        path, body = copy.deepcopy(rng.choice(SENT))
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            mutate(body, rng, names, STRANGE if rng.random() < 0.6 else inner)
        data = json.dumps(body).encode()
        done = server.http.post(path, content=data, headers={"Content-Type": "application/json"})
        assert done.status_code < 500 or done.status_code == 501, (path, data, done.text)
        assert "internal error" not in done.text, (path, data, done.text)  # within a stream
        statuses[done.status_code // 100] += 1
    print(dict(statuses))  # pytest -s shows it
    assert min(statuses[2], statuses[4]) > COUNT / 10
