"""SmolLM2 and structured output: every answer ends as a valid instance of its schema, every forced
call has valid arguments.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import pytest
from cases.schemas import random_schema

from mlx_llama import load
from mlx_llama.core.errors import OptionsError

TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "tool-templates"
CITIES = ("Paris", "Rome", "Lima")


@pytest.fixture(scope="module")
def llm(smollm2):
    return load(smollm2, backend="cpu", ctx_size=4096)


def bound(schema):
    """The same schema with an end: a small model might never close a string or list of its own
    accord.
    """
    if isinstance(schema, bool) or not schema:
        return {"type": "boolean"}
    schema = {
        key: value for key, value in schema.items() if key not in ("pattern", "patternProperties")
    }
    for key in ("properties", "$defs"):
        if key in schema:
            schema[key] = {name: bound(part) for name, part in schema[key].items()}
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if key in schema:
            schema[key] = [bound(part) for part in schema[key]]
    kinds = schema.get("type", ())
    if "string" in kinds and "enum" not in schema:
        schema["maxLength"] = max(schema.get("minLength", 0), 40 if "format" in schema else 12)
    if kinds == "array":
        schema |= {
            "items": bound(schema.get("items", True)),
            "maxItems": max(schema.get("minItems", 0), 3),
        }
    if kinds == "object":
        schema["additionalProperties"] = False
    # ["integer", "null"] too
    if ("number" in kinds or "integer" in kinds) and "enum" not in schema:
        schema |= {"minimum": -1000, "maximum": 1000, "multipleOf": 1}
    return schema


@pytest.mark.parametrize("first, count", [(0, 12), pytest.param(12, 188, marks=pytest.mark.slow)])
def test_schemas(first, count, llm):
    """Sampled answers to random schemas, all of them computed together."""
    asked, seed = [], first * 1000
    while len(asked) < count:
        seed += 1
        schema = bound(random_schema(random.Random(seed), depth=2))
        text = "Answer with a short JSON value that fits this schema:\n" + json.dumps(schema)
        options = dict(schema=schema, max_tokens=1500, temperature=0.7, seed=seed)
        try:
            handle = llm.submit([{"role": "user", "content": text}], **options)
        except OptionsError:  # no instance, or beyond llguidance
            continue
        asked.append((schema, handle))
    for schema, handle in asked:
        done = handle.finish()
        assert done.finish_reason == "eos", (schema, done.text[-300:])
        jsonschema.validate(json.loads(done.text), schema)


@pytest.mark.slow_for("l", "m")
@pytest.mark.parametrize("template", ["qwen2.5", "llama-3.1", "mistral-nemo"])
def test_forced_calls(template, smollm2):
    """SmolLM2's own template has no tools; these have. Arguments fit the parameters."""

    def weather(city: str, days: int = 1) -> str:
        """Tell the weather.

        city: its name
        days: how many days from today
        """
        return f"sunny in {city}"

    llm = load(smollm2, backend="cpu", template=str(TEMPLATES / f"{template}.jinja"), ctx_size=4096)
    for city in CITIES:
        text = f"What will the weather be like in {city} tomorrow?"
        options = dict(tool_choice="required", parallel=False, max_tokens=300, temperature=0.0)
        stream = llm.respond([{"role": "user", "content": text}], [weather], **options)
        stream.finish()
        [call] = stream.calls
        arguments = json.loads(call.arguments)
        assert call.name == "weather" and set(arguments) <= {"city", "days"}
        assert isinstance(arguments["city"], str)
