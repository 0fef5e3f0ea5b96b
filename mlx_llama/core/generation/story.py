"""Stories by the guide, the model in the package: each begins with the hero that was asked for.

Left to itself the guide tells of any hero that it knows.
"""

from __future__ import annotations

import re
from itertools import takewhile

LONGEST = 200  # characters of a request
DECLINE = "Sorry, I do not know"
# Requests have an imperative or are short. Questions about stories do not count.
_REQUEST = re.compile(
    r"(?!(?:how|wh[a-z']+|is|does|did)\b|.*(?:n't|\bnot|\bfix|\bfunction|\bcode)\b)"
    r"(?:.*\b(?:tell|write|make up|invent|read|give|want|like|hear|need|know)\b.*"
    r"|(?:[\w']+ ){0,3})\b(?:story|tale)\b(?P<after>.*)",
    re.IGNORECASE,
)
_SUBJECT = re.compile(
    r"(?P<word>^:|\b(?:about|of|with|starring|featuring|where)\b) *(?P<phrase>[\w' -]+)",
    re.IGNORECASE,
)
_ANIMALS = (
    "ant|badger|bat|bear|beaver|bee|beetle|bird|bunny|butterfly|camel|cat|chicken|cow|crab|crocodile|"
    "crow|deer|dinosaur|dog|dolphin|donkey|dragon|duck|eagle|elephant|fish|fox|frog|giraffe|goat|"
    "goose|hamster|hedgehog|hen|hippo|horse|kangaroo|kitten|koala|lamb|lion|lizard|llama|mole|monkey|"
    "mouse|otter|owl|panda|parrot|penguin|pig|pony|puppy|rabbit|seal|shark|sheep|snail|snake|spider|"
    "squirrel|swan|tiger|turtle|unicorn|whale|wolf|zebra"
)
_ANIMAL = re.compile(rf"\b(?:{_ANIMALS})\b", re.IGNORECASE)
_KIND = re.compile(rf"\b({_ANIMALS}) (?:story|tale)\b", re.IGNORECASE)
_DETERMINERS = frozenset("a an the my our your his her their one of few this that".split())
_NUMBERS = frozenset("two three four five six seven eight nine ten some many several".split())
_VERBS = frozenset("is are was were has have does".split())
# what a story may have beside a hero, and subjects that leave the choice open
_OTHERS = frozenset(
    "word words sentence sentences line lines paragraph paragraphs page pages minutes chapters"
    " ending end moral lesson twist something anything whatever everything".split()
)
_END = re.compile(
    r" +(?:please|now|who|which|that|or|for|from|on|at|in|by|to|near|with|if|as)\b.*", re.IGNORECASE
)
_PLURAL = re.compile(
    r"(?!christmas)[a-z'-]*(?:(?!s|is|us)[a-z]s|mice|geese|sheep|fish|deer|men|children)|people"
)
_THERE = "Once upon a time there"
_PLAIN = re.compile(r"[A-Za-z][a-z]+(?:['-][a-z]+)*")


def begin_story(question: str) -> str:
    """The beginning of the story that a text asks for, or of a refusal for a hero that cannot be
    made out. "" for other questions, and for a story about anything.
    """
    text = " ".join(question.split())
    request = _REQUEST.match(text) if len(text) <= LONGEST else None
    if request is None:
        return ""
    after = request["after"].lower() if text.isupper() else request["after"]
    subject = _SUBJECT.search(after)
    if subject is None:
        kind = _KIND.search(text)
        return _begin(["a", kind[1]]) if kind else ""
    words = _END.sub("", subject["phrase"]).split()
    if not words or {word.lower() for word in words} & (_VERBS | _OTHERS):
        return ""
    before = subject["word"].lower()
    if before != "where" and (story := _begin(words)):
        return story
    if animal := _ANIMAL.search(after):
        return _begin(["a", animal[0]])
    return DECLINE if before in ("about", "starring", "featuring") else ""


def _begin(words: list[str]) -> str:
    """The beginning of a story about a noun phrase; "" if it is none or too long."""
    first, _, second = " ".join(words).partition(" and ")
    determiners, noun, name = _read_phrase(first.split())
    if not 1 <= len(noun) <= 4 or not all(map(_PLAIN.fullmatch, noun)):
        return ""
    hero, kind, last = " ".join(noun).lower(), noun[-1].lower(), "".join(determiners[-1:])
    is_plural = bool(_PLURAL.fullmatch(kind))
    if last in _NUMBERS or last.isdigit():
        return f"{_THERE} were {last} {hero}, and the smallest was named" if is_plural else ""
    if is_plural and last not in ("a", "an", "one"):
        return f"{_THERE} was a family of {hero}, and the smallest was named"
    if not (determiners or name or _ANIMAL.fullmatch(kind)):
        return ""
    article = last if last in ("a", "an") else "an" if hero[0] in "aeiou" else "a"
    hero = f"{article} {hero}" if len(noun) > 1 else f"a little {hero}"
    if name:
        return f"{_THERE} was {hero} named {name}"
    if _ANIMAL.search(second):
        return f"{_THERE} were {hero} and {second}, and the {kind} was named"
    return f"{_THERE} was {hero}"


def _read_phrase(words: list[str]) -> tuple[list[str], list[str], str]:
    """(determiners, noun with its adjectives, name or "") of a noun phrase."""
    determiners = list(takewhile(_is_determiner, words))
    noun = words[len(determiners) :]
    determiners = [word.lower() for word in determiners]
    match noun:
        case [name, "the", *kind] if name.istitle():
            return ["the"], kind, name
        case [*kind, "named" | "called", name]:
            return determiners, kind, name
        case [*_, kind, name] if kind.islower() and name.istitle() and not _ANIMAL.fullmatch(name):
            return determiners, noun[:-1], name
    return determiners, noun, ""


def _is_determiner(word: str) -> bool:
    return word.lower() in _DETERMINERS | _NUMBERS or word.isdigit()
