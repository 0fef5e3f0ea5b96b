"""Digests of reviewed, harmless chat templates, which render without a separate process.

The templates are those of llama.cpp (models/templates, tests/test-chat-template.cpp) and of this
project's tests. Their time and output grow linearly with the conversation and its tools. Those of
Mistral v3 and Nemo are missing: with tools, they grow with the product of both.
"""

from __future__ import annotations

import hashlib


def is_known(source: str) -> bool:
    """True if a template is in `KNOWN`, whatever the white space around it and the kind of its
    newlines.
    """
    return digest(source) in KNOWN


def digest(source: str) -> str:
    """SHA-256 of a template, as hexadecimal digits."""
    text = source.strip().replace("\r\n", "\n")
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


KNOWN = frozenset(
    {
        "fcf7a096fe99a48fd9ad2b250bf9237e96e8f48bffec1c7ea4d3f225176cd40e",  # ChatML
        "e8d5b5a546d3f19df16a5320c614fab05bdc4edd50e850f1afd947b503ea41cf",  # Llama 2
        "54a8053732278a178a2da21b905c03e6f35fdfad8f5d46a291555c36f2d86307",  # Vigogne 2
        "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122",  # Llama 3
        # Llama 3, generation prompt always
        "b48c47f6443892716176eb200bf4ef108f64e06ca26ed0fa8ebc0a4b3992fcb2",
        "93c0e9aa3629bbd77e68dbc0f5621f6e6b23aa8d74b932595cdb8d64684526d7",  # Llama 3.1; Llama 3.3
        "d82792f95932f1c9cef5c4bd992f171225e3bf8c7b609b4557c9e1ec96be819f",  # Llama 3.2
        # Mistral 7B Instruct 0.2
        "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7",
        "bbc58aad99454df60138be9530c9601a0adfe3d8932cda975e1f10b2410ddc51",  # Mistral v1
        "3c4ad5fa60dd8c7ccdf82fa4225864c903e107728fcaf859fa6052cb80c92ee9",  # Mistral v7
        # Devstral Small 2507, Unsloth
        "039a4710e2aabaa79e85a233fa3daa4fbc030a4a8dc218cb7f34fb0c4b8c13b1",
        "66291cf0045c2425a3a667cf3cbb7af2b11f09e025c02f97245323ab79119362",  # Zephyr, TinyLlama
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # SmolLM2
        "cbc1d50f777ec029b33f53b23d7a224cceb65bcc8c7fac54946dbb56514e4d1e",  # SmolLM3
        "55b2f4a26ac9ee719330a61a0c39d9e538b0e9322212f048326318cff4f8674a",  # Qwen2.5
        "94c6035b4f0eb905c95e2b7d8dace8547abca03f7fe3e441ba8a6388b1941272",  # QwQ
        "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",  # Qwen3
        # Hermes 2 Pro, Llama 3; Hermes 3, Llama 3.1
        "ce62e308475b364e1fc76699dccbddeb9ac08344f90d59719dba86a9922834d9",
        # DeepSeek R1 Distill Llama
        "dd2675619a64a449cdcdd2b93e605a0a50764cee41e344f244752bc93643936c",
        # DeepSeek R1 Distill Qwen
        "bbe594884b44d740667ee65a70bc8d333a565eab3d63ea59f291ea73ada84ba6",
        # DeepSeek R1, llama.cpp's
        "e0d5e227f0aedba8bc36d9173d4f814b6b9bc8bafa3e50d53fa0071567f90102",
        "993c0af704bad76aeba4263a5318f7873a06420a8eb7d40b72a49c39599c0a66",  # DeepSeek Coder
        "2fc9dbfaea552f864b4b8cdf9d17401e9a49cbda199498531f137eb0ec5ae1d8",  # Functionary 3.1
        "5c7c96c27cfecf3418411d1ebd0d11d691ab6bd2155bb38dacc62250fe47c3c8",  # Functionary 3.2
        "a30b8c4531dda19196f35fb95ab84110dd8357acbd75eea3776c5543a70db5a9",  # Bielik 11B 3.0
        "396b7b76d04a4cdfd45a5a8e73e041ae66b070cda30f24c607e9b872b4a13826",  # AlphaMonarch
        "b58913fce67fc69834213fd446f9d85f30e0ddd8f88f482e65fdfcb6f9d77f15",  # Megrez 3B
        "01658a71df742ed33e28c787ab916834da7cb3d932e25d8f7e916a6f3b9694d4",  # YandexGPT 5 Lite
        # the guide in this package
        "633e8dfbc1ec9a086e11cb721f96bc4a386cb5a4b821272d1697740b97af869b",
    }
)
