"""Log-probabilities beside the text that an answer returns."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from mlx_llama.core.backends.logprobs import TokenLogprobs
from mlx_llama.core.text.thoughts import ThoughtParser
from mlx_llama.core.text.tokenizer import Tokenizer


class Entry(NamedTuple):
    """A token whose text is part of the returned text, and its log-probabilities."""

    id: int
    logprobs: TokenLogprobs | None  # None for the first token of a prompt
    data: bytes  # its part of the text; of the last token before a stop string, cut there
    start: int  # characters of the text before it


class Entries:
    """Pairs tokens with the returned text, which has no thoughts and marks and may end within a
    token at a stop string.

    A token waits until it is known to be text, and then until its text is returned: it may begin a
    mark, a stop string or a character. So the data of all entries joins to the text, but for bytes
    that are not UTF-8.
    """

    def __init__(self, length: int = 0):
        """length: characters of the text before the first token."""
        self._length = length
        # tokens that may be of a thought or a mark, with the characters that they completed
        self._unsure: list[tuple[int, TokenLogprobs | None, bytes, str]] = []
        self._left = ""  # the text that is left of them so far
        self._waiting: list[tuple[Entry, str]] = []  # to be returned

    def push(self, token: int, logprobs: TokenLogprobs | None, data: bytes, text: str) -> None:
        """Add a token. data: its bytes in the vocabulary; text: characters that it completed."""
        self._unsure.append((token, logprobs, data, text))

    def pair(self, left: str, thoughts: ThoughtParser | None = None, is_cut: bool = False) -> None:
        """Note the text that is left of the newest tokens without thoughts and marks. thoughts: the
        parser that split them off. is_cut: the text ends here, at a stop string.
        """
        self._length += len(left)
        if not self._unsure:
            return
        tokens, left = self._unsure, self._left + left
        self._unsure, self._left = [], ""
        if thoughts and thoughts.is_thinking:
            return
        if thoughts and (thoughts.state == "before" or thoughts.waiting) and not is_cut:
            self._unsure, self._left = tokens, left  # a thought or a mark may begin
            return
        whole = "".join(text for *_, text in tokens)
        if not whole.endswith(left):  # a mark within it was dropped: all is the last token's
            token, logprobs, *_ = tokens[-1]
            tokens, whole = [(token, logprobs, left.encode(), left)], left
        dropped, start = len(whole) - len(left), self._length - len(left)
        for token, logprobs, data, text in tokens:
            mark, text = text[:dropped], text[dropped:]
            is_mark, dropped = dropped > len(mark), dropped - len(mark)
            begun = mark.encode()
            data = data.removeprefix(begun) if data.startswith(begun) else text.encode()
            if is_mark or (mark and not data):
                continue
            try:
                decoded = data.decode()
            except UnicodeDecodeError:  # it begins or ends within a character
                decoded = text
            if decoded != text and decoded.endswith(text):  # a dropped space, or a hidden token
                data = text.encode()
            self._waiting.append((Entry(token, logprobs, data, start), text))
            start += len(text)

    def take(self, length: int, is_last: bool, is_cut: bool) -> tuple[Entry, ...]:
        """Entries of tokens that the text shows now. length: its characters. is_last: the text ends
        here; is_cut: at a stop string.
        """
        waiting, count = self._waiting, 0
        for number, (entry, text) in enumerate(waiting, 1):
            if entry.start >= length if is_cut else entry.start + len(text) > length:
                break
            is_within = _count_begun(entry.data) or (entry.data and not text)  # a character
            if is_last or not is_within:
                count = number
        taken, self._waiting = waiting[:count], waiting[count:]
        if is_cut and taken:
            entry, text = taken[-1]
            rest = text[length - entry.start :].encode()
            if rest and (at := entry.data.rfind(rest)) >= 0:
                taken[-1] = entry._replace(data=entry.data[:at]), text
            elif not rest:
                data = entry.data[: len(entry.data) - _count_begun(entry.data)]
                taken[-1] = entry._replace(data=data), text
        return tuple(entry for entry, _ in taken)


def _count_begun(data: bytes) -> int:
    """Number of bytes at the end that begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def pair_prompt(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> tuple[Entry, ...]:
    """Entries of a prompt's tokens, whose data joins to its text without special tokens."""
    decoder, entries, length = tokenizer.stream(starts_text=True), Entries(), 0
    for token, rate in zip(tokens, logprobs, strict=True):
        text = decoder.push(token)
        entries.push(token, rate, decoder.data(token), text)
        entries.pair(text)
        length += len(text)
    return entries.take(length, is_last=True, is_cut=False)
