"""Grammars: which tokens keep an answer within a JSON schema, a regular expression or a grammar
(llguidance).

`Grammars` belongs to a model and compiles; a `Constraint` belongs to one answer and yields a mask
per token. An answer that ends by itself is complete: it parses, and validates against its schema.
JSON has json.dumps's layout, one line with ", " and ": ": free white space would cost tokens, and
small models get lost in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.system.forks import make_lock
from mlx_llama.core.text.json_schema import rewrite_schema
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import JSON_OPTIONS

from .options import GenerationOptions

if TYPE_CHECKING:
    import llguidance

KEPT = 32  # compiled grammars; each takes up to a few megabytes

# Limits of llguidance: lexer states (up to 2 kB each) and work per mask (0.2 s at worst).
_LIMITS = {"max_lexer_states": 20_000, "step_lexer_fuel": 100_000, "verbose_errors": False}


@dataclass(frozen=True)
class Rule:
    """A constraint on an answer."""

    option: Literal["schema", "regex", "grammar", "tools"]  # its source, for errors
    # JSON, a regular expression in Rust's syntax, Lark as llguidance reads it, or GBNF; of tools:
    # Lark
    text: str
    is_lenient: bool = False  # see Schema

    @classmethod
    def of(cls, options: GenerationOptions) -> Rule | None:
        """The rule that these options set; None: any text."""
        if options.schema is not None:
            return cls("schema", options.schema.text, options.schema.is_lenient)
        if options.regex is not None:
            return cls("regex", options.regex)
        return None if options.grammar is None else cls("grammar", options.grammar)


def choice(texts: Sequence[str]) -> str:
    """A grammar that allows exactly these texts. Raises OptionsError for an empty list."""
    if not texts:
        raise OptionsError(
            "option `grammar`: a choice of no texts allows no answer: list at least one"
        )
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


@dataclass(eq=False)
class Constraint:
    """The state of one constrained answer: masks before each token, advanced by `accept`."""

    matcher: llguidance.LLMatcher
    rule: Rule
    size: int  # of the vocabulary
    keeps_space: bool  # the answer may begin with a space, which the decoder must not drop
    not_first: Collection[int]  # tokens that may not begin it
    relaxed: str = ""  # keywords of a lenient schema that are not enforced
    accepted: int = 0  # tokens
    free: ClassVar[float] = 0  # number of next tokens without a constraint

    def copy(self) -> Constraint:
        return replace(self, matcher=self.matcher.deep_copy())

    def mask(self) -> npt.NDArray[np.int32]:
        """Allowed tokens, a new int32 [ceil(V / 32)]: bit i % 32 of word i // 32 is set where token
        i may come next. Raises OptionsError if the grammar needs more work than the limits allow.
        """
        bits = np.empty(-(-self.size // 32), np.int32)
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)  # without the GIL
        self._check()
        if not self.accepted:
            for token in self.not_first:
                bits[token // 32] &= ~(1 << token % 32)
        return bits

    def accept(self, token: int) -> None:
        """Advance by a token. Raises ValueError unless `mask` allowed it, and as `mask`."""
        if not self.matcher.consume_token(token):
            if "satisfy the grammar" in self.matcher.get_error():
                raise ValueError(
                    f"token {token} after {self.accepted} others does not match the "
                    f"{self.rule.option}"
                )
            self._check()
        self.accepted += 1

    def forced(self) -> list[int]:
        """The next tokens as far as the grammar leaves no choice; not accepted yet."""
        tokens: list[int] = self.matcher.compute_ff_tokens()
        self._check()
        return tokens

    @property
    def is_complete(self) -> bool:
        """True if the answer so far matches."""
        return not self.matcher.is_error() and self.matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """True if nothing may follow but an end token, or one was accepted."""
        return self.matcher.is_stopped()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise OptionsError(
                f"option `{self.rule.option}`: became too complex after {self.accepted} tokens "
                f"({_first_line(self.matcher.get_error())}): simplify it"
            )


class Grammars:
    """Compiles rules for one tokenizer. Thread-safe.

    eos: end tokens, which are allowed where an answer is complete. vocab_size: of the logits. The
    vocabulary is passed to llguidance at the first use: 0.2 s for 32,000 tokens, 1 s for 128,000.
    """

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int], vocab_size: int):
        self.tokenizer, self.eos, self.vocab_size = tokenizer, tuple(eos), vocab_size
        self._lock = make_lock()
        self._vocabulary: _Vocabulary | None = None
        self._library: llguidance.LLTokenizer
        self.compiled: OrderedDict[tuple[Rule, bool], tuple[llguidance.LLMatcher, bool, str]] = (
            OrderedDict()
        )

    def compile(
        self, rule: Rule, *, starts_text: bool = True, seconds: float | None = None
    ) -> Constraint:
        """Compile a rule for one answer. Raises OptionsError for a rule that is rejected or exceeds
        a limit.

        starts_text: the answer starts a text, whose first space the decoder drops. seconds: refuse
        a rule that takes longer to compile; None: wait for it. Keywords of a lenient rule that
        llguidance cannot enforce are dropped (`Constraint.relaxed`).
        """
        drops = starts_text and self.tokenizer.dropped_space is not None
        vocabulary = self._load()
        with self._lock:
            compiled = self.compiled.get((rule, drops))
        if compiled is None:
            body, relaxed = _describe(rule), ""
            if seconds is not None:
                _check_time(rule, body, seconds)
            try:
                matcher, keeps_space = self._build(rule, body, drops, vocabulary)
            except OptionsError:
                keywords: set[str] = set()
                if rule.is_lenient:
                    body = {"json_schema": _relax(body["json_schema"], keywords)}
                if not keywords:
                    raise
                matcher, keeps_space = self._build(rule, body, drops, vocabulary)
                relaxed = ", ".join(sorted(keywords))
            compiled = matcher, keeps_space, relaxed
        with self._lock:
            self.compiled[rule, drops] = compiled
            self.compiled.move_to_end((rule, drops))
            if len(self.compiled) > KEPT:
                self.compiled.popitem(last=False)
        matcher, keeps_space, relaxed = compiled
        not_first = vocabulary.space_bytes if drops and not keeps_space else ()
        return Constraint(
            matcher.deep_copy(), rule, self.vocab_size, keeps_space, not_first, relaxed
        )

    def _load(self) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                if not self.eos:
                    raise OptionsError(
                        "options schema, regex and grammar need a model with an end token; "
                        "this has none"
                    )
                import llguidance

                vocabulary = _Vocabulary(self.tokenizer, self.eos[0], self.vocab_size)
                wrapper = llguidance.TokenizerWrapper(vocabulary)
                self._library = llguidance.LLTokenizer(wrapper, self.vocab_size, list(self.eos))
                self._vocabulary = vocabulary
            return self._vocabulary

    def _build(
        self, rule: Rule, body: dict[str, Any], drops: bool, vocabulary: _Vocabulary
    ) -> tuple[Any, bool]:
        """The matcher of a rule before the first token; True if answers keep their first space."""
        matcher = self._match(rule, [body])
        if not drops:
            return matcher, False
        allowed = Constraint(matcher.deep_copy(), rule, self.vocab_size, False, ()).mask()
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: self.vocab_size]
        if any(vocabulary.tokens[token].startswith(b" ") for token in np.flatnonzero(bits)):
            return matcher, True
        # The model may write the space that the decoder drops.
        return self._match(
            rule, [{"lark_grammar": 'start: " "? @answer'}, {**body, "name": "answer"}]
        ), False

    def _match(self, rule: Rule, grammars: list[dict[str, Any]]) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        matcher = llguidance.LLMatcher(
            self._library, json.dumps({"grammars": grammars}), log_level=0, limits=limits
        )
        first = matcher.deep_copy()
        first.compute_bitmask()  # some limits are reached at the first mask
        if first.is_error():
            reason = first.get_error()
            raise _refusal(rule, "no text matches" if reason.startswith("NoExtension") else reason)
        return matcher


class _Vocabulary:
    """A tokenizer as llguidance.TokenizerWrapper expects it."""

    def __init__(self, tokenizer: Tokenizer, eos: int, vocab_size: int):
        self.eos_token_id, self.bos_token_id = eos, tokenizer.bos_id
        texts = tokenizer.token_bytes()[:vocab_size]
        names = {i: text.encode("utf-8", "replace") for text, i in tokenizer.special_ids.items()}
        # that a grammar can name and no text contains
        self.special_token_ids = [i for i, text in enumerate(texts) if text is None and i in names]
        known = [names.get(i, b"") if text is None else text for i, text in enumerate(texts)]
        self.tokens = known + [b""] * (vocab_size - len(texts))  # bytes by id, b"" for padding
        spaces = (token for token, text in enumerate(texts) if text == b" ")
        pieces = ((token, tokenizer.piece(token)) for token in spaces)
        # byte tokens of a space, which the decoder keeps even before the first word
        self.space_bytes = tuple(token for token, piece in pieces if piece and piece.is_byte)
        self._tokenizer = tokenizer
        self._newline = [] if tokenizer.byte_level else tokenizer.encode("\n")
        self._ids: dict[bytes, int] | None = None

    def __call__(self, data: bytes) -> list[int]:
        """Token ids of a text that continues another, special tokens as text."""
        try:
            text = data.decode()
            # Without a space before the first word, which a text after a newline does not get.
            ids = self._tokenizer.encode(text if self._tokenizer.byte_level else "\n" + text)
        except Exception:  # llguidance would panic
            return self._spell(data)
        start = len(self._newline)
        text_ids, is_kept = ids[start:], ids[:start] == self._newline
        is_exact = is_kept and b"".join(self.tokens[token] for token in text_ids) == data
        return text_ids if is_exact else self._spell(data)

    def _spell(self, data: bytes) -> list[int]:
        """Split bytes into the longest tokens, where the tokenizer would change them."""
        if self._ids is None:
            special, pairs = set(self.special_token_ids), enumerate(self.tokens)
            self._ids = {text: i for i, text in pairs if text and i not in special}
            self._longest = max(map(len, self._ids))
        ids: list[int] = []
        at = 0
        while at < len(data):
            lengths = range(self._longest, 0, -1)
            length = next((n for n in lengths if data[at : at + n] in self._ids), 0)
            if not length:  # a vocabulary without this byte; llguidance then forces nothing
                return []
            ids.append(self._ids[data[at : at + length]])
            at += length
        return ids


def _describe(rule: Rule) -> dict[str, Any]:
    """The rule as an entry of llguidance's list of grammars."""
    if rule.option == "schema":
        return {"json_schema": {**json.loads(rule.text), "x-guidance": JSON_OPTIONS}}
    import llguidance

    if rule.option == "regex":
        return {"lark_grammar": "start: /" + llguidance.regex_to_lark(rule.text, "") + "/"}
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(rule.text)}  # converts GBNF
    except Exception as e:  # the converter raises bare Exception, RecursionError, IndexError
        raise _refusal(rule, str(e) or type(e).__name__) from None


# formats that llguidance enforces
_FORMATS = "date time date-time duration email hostname ipv4 ipv6 uuid uri".split()


def _relax(schema: Any, keywords: set[str]) -> Any:
    """The schema without keywords that llguidance cannot enforce: unknown formats, uniqueItems,
    look-around in patterns, the exclusion of oneOf. Adds their names to `keywords`.
    """

    def is_lost(name: str, value: Any) -> bool:
        if not isinstance(value, str):
            return name == "uniqueItems" and value is True
        is_unknown = name == "format" and value not in _FORMATS
        return is_unknown or (name == "pattern" and re.search(r"\(\?<?[=!]", value) is not None)

    def relax(inner: dict[str, Any]) -> dict[str, Any]:
        lost = {name for name, value in inner.items() if is_lost(name, value)}
        keywords.update(lost, {"oneOf"} & inner.keys())
        kept = {name: value for name, value in inner.items() if name not in lost}
        return {"anyOf" if name == "oneOf" else name: value for name, value in kept.items()}

    return rewrite_schema(schema, relax)


def _refusal(rule: Rule, reason: str) -> OptionsError:
    remedy = {
        "schema": "leave that out, or describe it with other keywords",
        "regex": "write it in Rust's syntax, without look-around",
        "grammar": "write it in Lark's syntax with a rule start, or in "
        "llama.cpp's GBNF with a rule root",
        "tools": "describe the parameters with other keywords",
    }[rule.option]
    return OptionsError(
        f"option `{rule.option}`: cannot be enforced: {_first_line(reason)}: {remedy}"
    )


def _first_line(text: str) -> str:
    text = re.split(r"\n\s*\d+ \|", text)[0]  # without the source and its caret
    return " ".join(text.replace("<non-verbose/>", " ").split())[:200]


# llguidance does not limit the time of a conjunction of patterns. A process can be killed.
_CHILD = """
import sys, llguidance
for line in sys.stdin:
    limits = llguidance.LLParserLimits(verbose_errors=False)
    llguidance.LLMatcher.validate_grammar(line, None, limits=limits)
    print(flush=True)
"""
_child: subprocess.Popen[bytes] | None = None
_child_lock = make_lock()
_CHILD_START = 10.0  # seconds; Python starts slowly on a busy machine


def _check_time(rule: Rule, body: dict[str, Any], seconds: float) -> None:
    """Compile a rule in another process. Raises OptionsError if that exceeds `seconds`."""
    global _child
    with _child_lock:
        if _child is None or _child.poll() is not None:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            command = [sys.executable, "-c", _CHILD]
            # Ctrl-C reaches it too
            _child = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
            _ask(_child, {"lark_grammar": "start: /a/"}, _CHILD_START)
        if not _ask(_child, body, seconds):
            _child.kill()
            _child.wait()
            _child = None
            raise _refusal(rule, f"it cannot be compiled within {seconds:g} s")


def _ask(child: subprocess.Popen[bytes], body: dict[str, Any], seconds: float) -> bool:
    """Compile in the child process; True if it finished in time."""
    assert child.stdin and child.stdout
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        child.stdin.write(json.dumps({"grammars": [body]}).encode() + b"\n")
        child.stdin.flush()
        return bool(child.stdout.readline())
    except OSError:
        return False
    finally:
        timer.cancel()
