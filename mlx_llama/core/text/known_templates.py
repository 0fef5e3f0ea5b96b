"""Digests of reviewed, harmless chat templates, which render without a separate process.

The templates are those of llama.cpp (models/templates, tests/test-chat-template.cpp) and of this
project's tests. Their time and output grow linearly with the conversation and its tools. Those of
Mistral v3 and Nemo are missing: with tools, they grow with the product of both. Gemma 4's grows
with the square of the messages, LFM2's with that of the tools.
"""

from __future__ import annotations

import hashlib


def is_known(source: str) -> bool:
    """True if a template is in `KNOWN`, whatever its newlines and outer white space."""
    return digest(source) in KNOWN


def digest(source: str) -> str:
    """The first 128 bits of the SHA-256 of a template, in hexadecimal digits."""
    text = source.strip().replace("\r\n", "\n")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


KNOWN = {
    "fcf7a096fe99a48fd9ad2b250bf9237e",  # ChatML
    "e8d5b5a546d3f19df16a5320c614fab0",  # Llama 2
    "54a8053732278a178a2da21b905c03e6",  # Vigogne 2
    "ba03a121d097859c7b5b9cd03af99aaf",  # Llama 3
    "b48c47f6443892716176eb200bf4ef10",  # Llama 3, generation prompt always
    "93c0e9aa3629bbd77e68dbc0f5621f6e",  # Llama 3.1; Llama 3.3
    "d82792f95932f1c9cef5c4bd992f1712",  # Llama 3.2
    "26a59556925c987317ce5291811ba3b7",  # Mistral 7B Instruct 0.2
    "bbc58aad99454df60138be9530c9601a",  # Mistral v1
    "3c4ad5fa60dd8c7ccdf82fa4225864c9",  # Mistral v7
    "039a4710e2aabaa79e85a233fa3daa4f",  # Devstral Small 2507, Unsloth
    "66291cf0045c2425a3a667cf3cbb7af2",  # Zephyr, TinyLlama
    "872be49dbb638044ad01b60388f48d46",  # SmolLM2
    "cbc1d50f777ec029b33f53b23d7a224c",  # SmolLM3
    "55b2f4a26ac9ee719330a61a0c39d9e5",  # Qwen2.5
    "94c6035b4f0eb905c95e2b7d8dace854",  # QwQ
    "87a2728cb8dc9fe424d624542f6060ec",  # Qwen3
    "eae48a3307931acb10a6fce475a36b71",  # Qwen3-Coder
    "a4aee8afcf2e0711942cf848899be660",  # Qwen3.5
    "ce62e308475b364e1fc76699dccbddeb",  # Hermes 2 Pro, Llama 3; Hermes 3, Llama 3.1
    "dd2675619a64a449cdcdd2b93e605a0a",  # DeepSeek R1 Distill Llama
    "bbe594884b44d740667ee65a70bc8d33",  # DeepSeek R1 Distill Qwen
    "e0d5e227f0aedba8bc36d9173d4f814b",  # DeepSeek R1, llama.cpp's
    "993c0af704bad76aeba4263a5318f787",  # DeepSeek Coder
    "2fc9dbfaea552f864b4b8cdf9d17401e",  # Functionary 3.1
    "5c7c96c27cfecf3418411d1ebd0d11d6",  # Functionary 3.2
    "a30b8c4531dda19196f35fb95ab84110",  # Bielik 11B 3.0
    "396b7b76d04a4cdfd45a5a8e73e041ae",  # AlphaMonarch
    "b58913fce67fc69834213fd446f9d85f",  # Megrez 3B
    "01658a71df742ed33e28c787ab916834",  # YandexGPT 5 Lite
    "633e8dfbc1ec9a086e11cb721f96bc4a",  # the model in this package
}
