"""Fill-in-the-middle (FIM) prompts: a model writes the text between a prefix and a suffix.

Names of tokens, the format and its limits are llama.cpp's (src/llama-vocab.cpp;
tools/server/server-common.cpp, format_prompt_infill): editors' plugins are made for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_llama.core.errors import TokenizerError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Texts of the tokens by llama.cpp's names: prefix, suffix, middle, padding, repository, file
FIM_NAMES = {
    "pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
    "<|prefix|>".split(),
    "suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> "
    "<|suffix|>".split(),
    "mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> "
    "<|middle|>".split(),
    "pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]".split(),
    "rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>".split(),
    "sep": ["<|file_sep|>"],
}
# These end an answer; eot: CodeLlama's, in GGUF files under eot_token_id
FIM_ENDS = ("pad", "rep", "sep", "eot")
WINDOW = 2048  # most tokens of prefix, suffix and beginning; three quarters are the prefix
LONGEST = 32  # characters of a token, to encode no more of long texts than is kept


@dataclass(frozen=True)
class Infill:
    """The text between `prefix` and `suffix`.

    files: (name, text) of other files, the most relevant last. beginning: of the answer, which is
    continued.
    """

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    beginning: str = ""

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise TokenizerError for a vocabulary without FIM tokens."""
        if not tokenizer.fim_ids.keys() >= {"pre", "suf", "mid"}:
            raise TokenizerError(
                "the model has no tokens for fill-in-the-middle (prefix, suffix, middle): use a "
                "model for code that has them, such as Qwen2.5-Coder"
            )

    def find_ends(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Tokens that end the answer besides the model's."""
        return frozenset(tokenizer.fim_ids[name] for name in FIM_ENDS if name in tokenizer.fim_ids)

    def encode(self, tokenizer: Tokenizer, context: int, max_tokens: int) -> list[int]:
        """Encode a prompt that leaves room in a context of so many tokens: for max_tokens, though
        no more than 512 or an eighth of the context where there are many files. The start of a long
        prefix, the end of a long suffix and the first of many files are cut.

        Raises TokenizerError: as `check`.
        """
        self.check(tokenizer)
        fim, encode = tokenizer.fim_ids, tokenizer.encode
        window = min(WINDOW, context // 2)
        begun = encode(self.beginning, parse_special=True)
        prefix = encode(self.prefix[-LONGEST * window :])
        prefix = prefix[max(0, len(prefix) - window // 4 * 3) :]
        suffix = encode(self.suffix[: LONGEST * window])[: max(0, window // 4 - 2 - len(begun))]
        others = [fim["rep"], *encode("myproject\n")] if "rep" in fim else []
        for name, text in self.files:
            is_named = "sep" in fim
            others += [fim["sep"]] if is_named else []
            others += encode(f"{name or 'tmp'}\n" if is_named else "\n\n--- snippet ---\n\n")
            others += encode(text[: LONGEST * context])
        if "sep" in fim:
            others += [fim["sep"], *encode("filename\n")]
        room = context - window - min(max_tokens + 8, window // 4)
        bos = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        start = [*others[max(0, len(others) - room) :], *bos, fim["pre"], *prefix, *begun]
        return [*start, fim["suf"], *suffix, fim["mid"]]
