"""Grammars: which tokens keep an answer within a JSON schema, a regular expression or a grammar
(llguidance).

`Grammars` belongs to a model and compiles; a `Constraint` belongs to one answer and yields a mask
per token. An answer that ends by itself is complete: it parses, and validates against its schema.
JSON has json.dumps's layout, one line with ", " and ": ": free white space would cost tokens, and
small models get lost in it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from mlx_llama.core.errors import OptionsError
from mlx_llama.core.options import GenerationOptions
from mlx_llama.core.system.forks import make_lock
from mlx_llama.core.text.json_schema import DEFINITIONS, follow, list_parts
from mlx_llama.core.text.tokenizer import Tokenizer
from mlx_llama.core.text.tools import JSON_OPTIONS, UNENFORCED

from .compiler_process import CompilerFault, check_rule
from .enforceable import SchemaRules, check_lark, check_pattern, make_enforceable, relax

if TYPE_CHECKING:
    import llguidance

# Compiled rules are kept up to this sum. llguidance does not tell their size; of eleven kinds of
# rules, none took more than 64 kB and 60 bytes per character.
KEPT_BYTES = 16 << 20
_BASE_BYTES, _CHARACTER_BYTES = 64 << 10, 64

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
    size: int  # tokens in the vocabulary
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
            compiled = self._compile(rule, drops, vocabulary, seconds)
        with self._lock:
            self.compiled[rule, drops] = compiled
            self.compiled.move_to_end((rule, drops))
            while len(self.compiled) > 1 and self.compiled_bytes > KEPT_BYTES:
                self.compiled.popitem(last=False)
        matcher, keeps_space, relaxed = compiled
        not_first = vocabulary.space_bytes if drops and not keeps_space else ()
        return Constraint(
            matcher.deep_copy(), rule, self.vocab_size, keeps_space, not_first, relaxed
        )

    def _compile(
        self, rule: Rule, drops: bool, vocabulary: _Vocabulary, seconds: float | None
    ) -> tuple[llguidance.LLMatcher, bool, str]:
        for is_relaxed in (False, True):
            form = _describe(rule, is_relaxed)
            try:
                if seconds is not None:
                    check_rule(form.body, seconds)
                built = self._build(rule, form.body, drops, vocabulary)
                return *built, ", ".join(sorted(form.changed))
            except CompilerFault as error:
                raise _refusal(rule, str(error)) from None
            except _Rejection as error:
                if is_relaxed or not rule.is_lenient:
                    raise _refusal(rule, _explain(form.schemas) or str(error)) from None
        raise AssertionError

    @property
    def compiled_bytes(self) -> int:
        """The memory of compiled rules, estimated."""
        return sum(_BASE_BYTES + _CHARACTER_BYTES * len(rule.text) for rule, _ in self.compiled)

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
        matcher = self._match([body])
        if not drops:
            return matcher, False
        allowed = Constraint(matcher.deep_copy(), rule, self.vocab_size, False, ()).mask()
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: self.vocab_size]
        if any(vocabulary.tokens[token].startswith(b" ") for token in np.flatnonzero(bits)):
            return matcher, True
        # The model may write the space that the decoder drops.
        spaced = [{"lark_grammar": 'start: " "? @answer'}, {**body, "name": "answer"}]
        return self._match(spaced), False

    def _match(self, grammars: list[dict[str, Any]]) -> Any:
        import llguidance

        limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
        matcher = llguidance.LLMatcher(
            self._library, json.dumps({"grammars": grammars}), log_level=0, limits=limits
        )
        first = matcher.deep_copy()
        first.compute_bitmask()  # some limits are reached at the first mask
        if first.is_error():
            reason = first.get_error()
            raise _Rejection("no text matches" if reason.startswith("NoExtension") else reason)
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


class _Rejection(Exception):
    """llguidance does not compile a grammar."""


@dataclass(frozen=True)
class _Description:
    """A rule as llguidance reads it."""

    body: dict[str, Any]  # an entry of its list of grammars
    schemas: list[dict[str, Any]]  # in it
    changed: set[str]  # keywords that are not enforced as they are written


def _describe(rule: Rule, is_relaxed: bool) -> _Description:
    """is_relaxed: without the keywords that llguidance lacks. Raises OptionsError."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    schemas: list[dict[str, Any]] = []
    changed: set[str] = set()
    numbers = itertools.count()  # numbers the schemas

    def adapt(schema: dict[str, Any], options: dict[str, Any]) -> tuple[str, list[str]]:
        """The schema in Lark, and the rules that it needs."""
        place = schema.get("$comment", "") if rule.option == "tools" else ""
        adapted = make_enforceable(schema, changed, place)
        adapted = relax(adapted, changed) if is_relaxed else adapted
        if lark := SchemaRules.of(adapted, f"schema_{next(numbers)}", options, place):
            return lark
        schemas.append({**adapted, "x-guidance": options})
        return f"%json {json.dumps(schemas[-1])}", []

    try:
        if rule.option == "schema":
            start, rules = adapt(json.loads(rule.text), JSON_OPTIONS)
            body = {"lark_grammar": "\n".join([f"start: {start}", *rules])}
            return _Description({"json_schema": schemas[0]} if schemas else body, schemas, changed)
        if rule.option == "regex":
            check_pattern(rule.text)
            body = {"lark_grammar": "start: /" + llguidance.regex_to_lark(rule.text, "") + "/"}
            return _Description(body, schemas, changed)
        lark = rule.text if rule.option == "tools" else any_to_lark(rule.text)  # converts GBNF
        if rule.option == "tools":
            for line in re.findall(rf"^{UNENFORCED}(.*)", lark, re.MULTILINE):
                changed.update(line.split(", "))
        check_lark(lark)
        return _Description({"lark_grammar": _map_schemas(lark, adapt)}, schemas, changed)
    except Exception as e:  # the converter raises bare Exception, RecursionError, IndexError
        raise _refusal(rule, str(e) or type(e).__name__) from None


# A text, a regular expression, a comment, or the mark of a schema
_LARK_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/|%json\s*(?=\{)')


def _map_schemas(
    lark: str, adapt: Callable[[dict[str, Any], dict[str, Any]], tuple[str, list[str]]]
) -> str:
    """Replace the schemas in a Lark grammar. Raises ValueError for one that is not JSON."""
    pieces, rules, at = list[str](), list[str](), 0
    while match := _LARK_PARTS.search(lark, at):
        pieces.append(lark[at : match.start()])
        text, at = match[0], match.end()
        if text.startswith("%json"):
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            text, more = adapt(schema, schema.get("x-guidance", {}))
            rules += more
        pieces.append(text)
    return "\n".join(["".join([*pieces, lark[at:]]), *rules])


_PROBES = 200  # parts of schemas that are compiled to find the one that is refused


def _explain(schemas: Sequence[dict[str, Any]]) -> str | None:
    """The place of the smallest refused part of the first refused schema, with the reason."""
    import llguidance

    limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    probes = itertools.count()

    def reject(schema: dict[str, Any]) -> str:
        if next(probes) > _PROBES:
            return ""
        text = json.dumps({"grammars": [{"json_schema": schema}]})
        return llguidance.LLMatcher.validate_grammar(text, None, limits=limits)

    def find_part(part: Mapping[str, Any], root: dict[str, Any]) -> tuple[str, Any, str] | None:
        frame = {name: root[name] for name in (*DEFINITIONS, "x-guidance") if name in root}
        for name, inner in list_parts(part):
            if not name.startswith(DEFINITIONS) and (reason := reject({**frame, **inner})):
                return name, follow(inner, root), reason
        return None

    for root in schemas:
        if reason := reject(root):
            place, part = [root["$comment"]] if "$comment" in root else [], root
            while found := find_part(part, root):
                name, part, reason = found
                place.append(name)
            return f"{'.'.join(place)}: {reason}" if place else reason
    return None


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
