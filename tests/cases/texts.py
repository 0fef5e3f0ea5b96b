"""Texts, templates and conversations that several test files use."""

from pathlib import Path

from hypothesis import strategies as st
from making import CHAT_TEMPLATE, config_fields, refusal

from mlx_llama.core.errors import TemplateError
from mlx_llama.core.models.config import LlamaConfig
from mlx_llama.core.text.gguf_tokenizer import load_gguf_tokenizer
from mlx_llama.core.text.hf_tokenizer import load_tokenizer
from mlx_llama.core.text.template import ChatTemplate, read_template
from mlx_llama.core.text.thoughts import Thought, ThoughtParser

# Tokenizers

VOCABULARIES = (
    "llama-spm",
    "llama-bpe",
    "deepseek-coder",
    "gemma-4",
)  # llama.cpp's own, in tests/data
KINDS = ("sentencepiece", "llama2", "bytelevel")
TEXTS = [
    "Hello world",
    " leading space",
    "  two leading",
    "trailing ",
    "a  b   c",
    "Once upon a time\nthere was\n\n\ta llama.\r\n",
    "çà ñandú Straße 你好世界 สวัสดี 🦙🤖 👩‍👩‍👧‍👦 e\u0301",
    "numbers 1234567 3.14 and symbols <|>[]{}~^",
    "\u2581 the visible space \u2581\u2581 itself",
    "\x00 \x7f \ufeff \u200d \ufffd",
    "def f(x):\n    return x + 1\n",
    " ",
    "\n",
    "don't I'LL we've",
]


def any_text(*pieces):
    """Texts that a user may type, rich in characters that break tokenizers."""
    rich = [*" \n\t🦙é你<>|_/s", "  ", "Hello", " world", "<0x41>", *pieces]
    return st.lists(
        st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(rich)), max_size=30
    ).map("".join)


def load_folder(folder, **fields):
    """The tokenizer of a folder, for a config.json with these fields."""
    return load_tokenizer(folder, LlamaConfig.from_dict(config_fields(**fields)))


def load_vocabulary(metadata, rows=128256, **fields):
    """A tokenizer from GGUF metadata, `fields` of tokenizer.ggml.* replaced (None: left out).
    rows: of the model's embedding.
    """
    metadata = metadata | {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    return load_gguf_tokenizer(
        metadata, LlamaConfig.from_dict(config_fields(vocab_size=rows)), "toy.gguf"
    )


def has_wide_space(text):
    """True if llama.cpp and deepseek's own tokenizer.json split a text differently: see
    core/text/pre_tokenizers.py.
    """
    return any(char.isspace() and char >= "\u0800" for char in text)


# Templates

DATA = Path(__file__).resolve().parents[1] / "data"


def read_templates(folder: str) -> dict[str, str]:
    """{name: source} of a folder of tests/data."""
    paths = sorted((DATA / folder).glob("*.jinja"))
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


TOOL_TEMPLATES = read_templates("tool-templates")
THOUGHT_TEMPLATES = read_templates("thought-templates")
TEMPLATES = {"toy": CHAT_TEMPLATE, "llama-3.1": TOOL_TEMPLATES["llama-3.1"]}
TEMPLATES |= read_templates("chat-templates")


def conversation(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


USER = conversation([("user", "Hi")])


def plain(name="t", source=CHAT_TEMPLATE, **variables):
    return ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>", **variables})


def load_template(folder, tokenizer):
    """A folder's template, or None."""
    template = read_template(folder)
    return template and ChatTemplate(template.source, template.name, tokenizer.named)


def run_hostile(source, messages=USER, **variables) -> str:
    """Render a template that must fail, in one line; returns that line."""
    render = lambda: ChatTemplate(source, "evil.jinja", variables).render(messages)  # noqa: E731
    message = refusal(render, kind=TemplateError)
    assert message.startswith("evil.jinja: ") and message.isprintable() and len(message) < 600
    return message


def split(parser: ThoughtParser, pieces) -> tuple[str, str]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.push("", is_last=True)
    assert all(parts)
    thoughts = [part.text for part in parts if isinstance(part, Thought)]
    return "".join(thoughts), "".join(part for part in parts if isinstance(part, str))


def check_pieces(make_parser, answer, wanted):
    """Split an answer that arrives in pieces of each size."""
    for size in range(1, len(answer) + 1):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert split(make_parser(), pieces) == wanted, size
