"""Reword questions with `thesaurus.txt`, whose first lines tell its format."""

import random
import re
from functools import cache

from . import read_text

# Verbs with one irregular form for past and participle; those of NO_PAST have two, which are left
# alone.
PAST = dict(
    pair.split()
    for pair in """
keep kept;hold held;lose lost;leave left;send sent;make made;build built;bring brought;think thought;buy bought;get got;
have had;tell told;say said;find found;read read;set set;put put;cut cut;hit hit;let let;shut shut;quit quit;split split;
spend spent;mean meant;understand understood;feel felt;meet met;sit sat;stand stood;win won;pay paid;feed fed;deal dealt;
teach taught;learn learned;catch caught;lead led;spin spun;hang hung;shoot shot;cost cost;spread spread;stick stuck
""".replace("\n", "").split(";")
)
NO_PAST = set(
    """be begin write rewrite break take give go come become do undo redo see know show speak choose forget throw fall run
shrink grow draw drive overcome hide rise freeze blow override""".split()
)
DOUBLED = set("begin submit forget commit transmit permit occur prefer refer".split())
LONGEST = 5  # words of a phrase


def inflect(phrase: str) -> dict[str, str]:
    """The forms of a verb phrase, whose first word is the verb: as it is, -s, -ing, -ed."""
    verb, _, rest = phrase.partition(" ")
    if not verb.isalpha() or verb in ("be", "not", "can"):
        return {"": phrase}
    rest = f" {rest}" if rest else ""
    double = verb in DOUBLED or re.fullmatch(r"[^aeiou]*[aeiou][bdgklmnprt]", verb)
    stem = verb + verb[-1] if double else verb
    third = (
        "has"
        if verb == "have"
        else verb[:-1] + "ies"
        if re.search(r"[^aeiou]y$", verb)
        else (verb + "es" if re.search(r"(s|x|z|ch|sh|o)$", verb) else verb + "s")
    )
    gerund = (
        verb[:-2] + "ying"
        if verb.endswith("ie")
        else verb[:-1] + "ing"
        if re.search(r"[^e]e$", verb)
        else stem + "ing"
    )
    forms = {"": phrase, "s": third + rest, "ing": gerund + rest}
    if verb not in NO_PAST:
        regular = (
            verb + "d"
            if verb.endswith("e")
            else verb[:-1] + "ied"
            if re.search(r"[^aeiou]y$", verb)
            else stem + "ed"
        )
        forms["ed"] = PAST.get(verb, regular) + rest
    return forms


def plural(phrase: str) -> str:
    if phrase.endswith("s"):
        return phrase
    if re.search(r"[^aeiou]y$", phrase):
        return phrase[:-1] + "ies"
    return phrase + ("es" if re.search(r"(x|z|ch|sh)$", phrase) else "s")


@cache
def synonyms() -> dict[str, tuple[list[str], ...]]:
    """Phrase -> for each of its groups the phrases that may stand in its place."""
    entries: dict[str, tuple[list[str], ...]] = {}
    for line in read_text("guide_data/thesaurus.txt").splitlines():
        kind, _, rest = line.partition(" ")
        if kind not in ("v", "n", "="):
            continue
        forms: dict[str, list[tuple[str, bool]]] = {}  # form -> (phrase, may be replaced)
        for phrase in rest.split(" | "):
            only_target, phrase = phrase.startswith("~"), phrase.lstrip("~").strip()
            each = (
                inflect(phrase)
                if kind == "v"
                else {"": phrase, "s": plural(phrase)}
                if kind == "n"
                else {"": phrase}
            )
            for form, text in each.items():
                forms.setdefault(form, []).append((text, not only_target))
        for group in forms.values():
            for text, replaceable in group:
                others = [other for other, _ in group if other != text]
                if replaceable and others:
                    entries[text.lower()] = (*entries.get(text.lower(), ()), others)
    return entries


def reword(text: str, rng: random.Random) -> str:
    """The text with one to three phrases replaced; flags, commands and texts in backticks stay."""
    known, words = synonyms(), text.split()
    bare = [word.strip("\"'(),.;:?!").lower() for word in words]
    ticks, free, places = 0, 0, []
    for at, word in enumerate(words):
        if at >= free and not ticks % 2 and "`" not in word:
            for count in range(min(LONGEST, len(words) - at), 0, -1):
                # Punctuation within a phrase ends it.
                if (
                    " ".join(bare[at : at + count]) in known
                    and words[at].lower().startswith(bare[at])
                    and all(words[i].lower() == bare[i] for i in range(at, at + count - 1))
                ):
                    places.append((at, count))
                    free = at + count
                    break
        ticks += word.count("`")
    most = min(3, 1 + len(words) // 8)
    for at, count in sorted(
        rng.sample(places, min(len(places), rng.randint(1, most))), reverse=True
    ):
        first, tail = words[at], words[at + count - 1][len(bare[at + count - 1]) :]
        new = rng.choice(rng.choice(known[" ".join(bare[at : at + count])]))
        new = new[:1].upper() + new[1:] if first[0].isupper() and len(first) > 1 else new
        words[at : at + count] = [new + tail]
    return " ".join(words)
