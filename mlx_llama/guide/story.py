"""Stories by the guide, the model in the package: each begins with the hero that was asked for.

Left to itself the guide tells of any hero that it knows.
"""

from __future__ import annotations

import re
from itertools import takewhile

LONGEST = 200  # characters of a request
DECLINE = "Sorry, I do not know"
# A request has one of these verbs, or is short; it asks for a new story.
_REQUEST = re.compile(
    r"(?!(?:how(?! about)|wh[a-z']+|is|does|did)\b)"
    r"(?!.*(?:n['’]t|\bdont|\bnot|\bfix|\bfunction|\bcode)\b)"
    r"(?:.*?\b(?:tell|write|make up|invent|read (?:me|us)|give|wants?|have|like|need|you know) )?"
    r"(?:[\w'-]+ ){0,4}?(?<!\bsame )(?<!\blong )(?<!\buser )(?<!\btoy )"
    r"(?:(?<!\bthe )|(?<=\bme the )|(?<=\bus the ))(?:stor(?:y|ies)|tales?)\b(?P<after>.*)",
    re.IGNORECASE,
)
_KNOWN = re.compile(r"\bthe (?:story|tale)", re.IGNORECASE)
_SUBJECT = re.compile(
    r"(?P<word>^:|\b(?:about|of|with|starring|featuring|where|in which)\b) *(?P<phrase>[\w' -]+)",
    re.IGNORECASE,
)
_ANIMALS = (
    "ant|badger|bat|bear|beaver|bee|beetle|bird|bunny|butterfly|camel|cat|chicken|cow|crab|crocodile|"
    "crow|deer|dinosaur|dog|dolphin|donkey|dragon|duck|eagle|elephant|fish|fox|frog|giraffe|goat|"
    "goose|hamster|hedgehog|hen|hippo|horse|kangaroo|kitten|koala|lamb|lion|lizard|llama|mole|monkey|"
    "mouse|otter|owl|panda|parrot|penguin|pig|pony|puppy|rabbit|seal|shark|sheep|snail|snake|spider|"
    "squirrel|swan|tiger|turtle|unicorn|whale|wolf|zebra"
)
_ANIMAL = re.compile(rf"\b({_ANIMALS})s?\b", re.IGNORECASE)
# a comma between adjectives
_COMMA = re.compile(rf",(?= (?!an? )(?:\w+ )?(?:{_ANIMALS})\b)", re.IGNORECASE)
# a comma between heroes
_LIST = re.compile(
    rf",(?: and)? (?=(?:(?:an?|the|my|our|two|three) (?:[\w-]+ ){{0,2}})?(?:{_ANIMALS})s?"
    r"(?:,| and |[.!]?$))|, and (?=an? [\w-]+[.!]?$)",
    re.IGNORECASE,
)
_KIND = re.compile(rf"(?<!\bthe )\b({_ANIMALS}) (?:story|tale)\b", re.IGNORECASE)
_DETERMINERS = frozenset(
    "a an the my our your his her its their one of few this that these those all another every"
    " each".split()
)
_NUMBERS = frozenset("two three four five six seven eight nine ten some many several".split())
_VERBS = frozenset("is are was were has have does".split())
# other parts of a story, and subjects that leave the choice open
_NOT_HEROES = frozenset(
    "word words sentence sentences line lines paragraph paragraphs page pages minutes chapters"
    " ending end moral lesson twist something anything whatever everything".split()
)
_CLAUSE = re.compile(
    r" +(?:please|now|who|which|that|whose|or|for|from|on|at|in|by|to|near|with|if|as)\b.*",
    re.IGNORECASE,
)
_PLURAL = re.compile(
    r"(?!christmas)[a-z'-]*(?:(?!s|is|us)[a-z]s|mice|geese|sheep|fish|deer|men|children)|people"
)
_OPENING = "Once upon a time there"
_PLAIN = re.compile(r"[A-Za-z][a-z]+(?:-[a-z]+)*")
# words after an animal
_REST = re.compile(rf"(?<=\w )((?i:{_ANIMALS})) (?!named\b|called\b|and\b)[a-z].*")


def begin_story(question: str) -> str:
    """The beginning of the story that a text asks for, or of a refusal for an unknown hero. "" for
    other questions, and for a story about anything.
    """
    text = " ".join(question.split())
    request = _REQUEST.match(text) if len(text) <= LONGEST else None
    if request is None:
        return ""
    after = request["after"].lower() if text.isupper() else request["after"]
    subject = _SUBJECT.search(_COMMA.sub("", _LIST.sub(" and ", after)))
    if subject is None:
        kind = _KIND.search(text)
        return _begin(["a", kind[1]]) if kind else ""
    phrase = _CLAUSE.sub("", subject["phrase"])
    if not phrase or {*phrase.lower().split()} & (_VERBS | _NOT_HEROES):
        return ""
    words = _REST.sub(r"\1", phrase).split()
    before = subject["word"].lower()
    is_told = before in ("about", "starring", "featuring", ":") and not _KNOWN.search(text)
    if before not in ("where", "in which") and (is_told or _ANIMAL.search(phrase)):
        if story := _begin(words):
            return story
    if animal := _ANIMAL.search(after):
        return _begin(["a", animal[1]])
    return DECLINE if is_told and before != ":" else ""


def _begin(words: list[str]) -> str:
    """The beginning of a story about a noun phrase; "" if it names no hero."""
    first, *rest = " ".join(words).split(" and ")
    determiners, noun, name = _read_phrase(first.split())
    if (
        not 1 <= len(noun) <= 4
        or not all(map(_PLAIN.fullmatch, noun))
        or any(map(_is_determiner, noun))
    ):
        return ""
    hero, kind, last = " ".join(noun).lower(), noun[-1].lower(), "".join(determiners[-1:])
    is_many = bool(_PLURAL.fullmatch(noun[-1])) and last not in ("a", "an", "one")
    if last in _NUMBERS or last.isdigit():
        if not is_many:
            return ""
        hero = f"{last} {hero}"
    elif is_many:
        hero = f"a family of {hero}"
    elif not (determiners or name or _ANIMAL.fullmatch(kind)):
        return ""
    elif last in ("a", "an") and len(noun) > 1:
        hero = f"{last} {hero}"
    else:
        hero = f"a little {hero.replace('little ', '')}"
    if name and not is_many:
        hero = f"{hero} named {name}"
    if others := list(filter(None, map(_read_other, rest))):
        hero = f"{', '.join([hero, *others[:-1]])} and {others[-1]}"
    if not is_many and (name or not others):
        return f"{_OPENING} {'were' if others else 'was'} {hero}"
    were = "was" if hero.startswith("a family") else "were"
    return f"{_OPENING} {were} {hero}, and the {'smallest' if is_many else kind} was named"


def _read_other(phrase: str) -> str:
    """A further hero of a story with its article; "" for none."""
    determiners, noun, _ = _read_phrase(phrase.split())
    if not 1 <= len(noun) <= 3 or not all(map(_PLAIN.fullmatch, noun)):
        return ""
    if determiners or (len(noun) == 1 and _PLURAL.fullmatch(phrase)):
        return phrase
    return f"a {phrase}" if len(noun) == 1 and _ANIMAL.fullmatch(phrase) else ""


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
