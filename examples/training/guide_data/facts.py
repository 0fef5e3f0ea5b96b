"""Facts that the guide knows: hand-written ones in the *.txt of texts.zip, and what the package says
of itself.

The answer for a flag, its default, limits, aliases and commands comes from the argparse parsers and
the table of generation options; supported models and formats come from core. A new flag or command
has a fact without anything written here.

The text files hold sections:

    ## name        the fact's name; a flag's own name if the answer is generated from its parser
    = text         the answer; for a flag one sentence before the generated text
    + text         the answer to "tell me more"
    t a ; b        topics, noun phrases that go through general questions ("what is ...")
    d a ; b        deeds, verb phrases that go through general questions ("how do i ...")
    f --x --y      flags that this answer covers
    ! question     a question kept out of training, in any variation, for the score
    @ fact         the section's questions belong to that other fact, whose answer covers them
    <- fact fact   the reverse: the questions of those facts belong to this one, and flags among them are covered
    question       one a line

`newcomers*.txt` have questions alone, by people who had seen the answers but few or none of the
questions above; those of `newcomers7.txt` were written from the README, `docs/` and `--help`,
before any answer was read; those of `newcomers8.txt` are error messages, as users paste them, and
questions on newer facts.

`subjects.txt` joins neighbouring facts to subjects with one answer. In answers `{--top-k}` is a
flag's default, `{usage:--top-k}` the flag with its argument.

"[a|b]" is a choice, "[a|]" an option. A name may have several sections: the last answer counts, the questions add up.
"""

import argparse
import importlib
import re
from dataclasses import dataclass, field
from functools import cache

from mlx_llama.__main__ import COMMANDS as DOORS, HOMES
from mlx_llama.chat.commands import COMMANDS as REPL, OTHER_NAMES
from mlx_llama.cli.flags import flags_of
from mlx_llama.core.files.quantized import GGUF_FORMATS
from mlx_llama.core.models.families import BY_GGUF, BY_MODEL_TYPE, FAMILIES as ARCHITECTURES
from mlx_llama.core.models.rope_fields import ROPE_TYPES
from mlx_llama.core.options import FIELDS
from mlx_llama.quantize.gguf_types import FORMATS

from . import read_text

# Sizes of train_guide.SHAPE, as the guide tells them
GUIDE_FIGURES = {"parameters": "four", "layers": "4", "megabytes": "9"}
SOURCES = (
    "concepts.txt",
    "server.txt",
    "options.txt",
    "commands.txt",
    "topics.txt",
    "more.txt",
    "different.txt",
    "subjects.txt",
    "newer.txt",
    "trouble.txt",
)
# File of question lines -> times that each line counts. Lines of newcomers7 were written before
# their facts were chosen, so they are most like users'; those of newcomers8 are few, on facts that
# have no others.
NEWCOMERS = {
    "newcomers.txt": 1,
    "newcomers2.txt": 1,
    "newcomers3.txt": 1,
    "newcomers4.txt": 1,
    "newcomers5.txt": 1,
    "newcomers6.txt": 1,
    "newcomers7.txt": 4,
    "newcomers8.txt": 12,
}
# Architecture -> how people call its models; one that is not here is called by its own name.
FAMILIES = {
    "LlamaForCausalLM": "Llama 1 to 3.3, TinyLlama, Yi, SmolLM2",
    "MistralForCausalLM": "Mistral",
    "MinistralForCausalLM": "Ministral",
    "Ministral3ForCausalLM": "",
    "MixtralForCausalLM": "Mixtral (mixture of experts)",
    "Llama4ForCausalLM": "Llama 4 (text)",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen2MoeForCausalLM": "Qwen2-MoE",
    "Qwen3ForCausalLM": "Qwen3",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Qwen3NextForCausalLM": "Qwen3-Next",
    "Qwen3_5ForCausalLM": "Qwen3.5 (experts too)",
    "Qwen3_5MoeForCausalLM": "",
    "SmolLM3ForCausalLM": "SmolLM3",
    "GraniteForCausalLM": "Granite 3 (experts too)",
    "GraniteMoeForCausalLM": "",
    "GraniteMoeHybridForCausalLM": "Granite 4 (without Mamba)",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "OlmoeForCausalLM": "OLMoE",
    "Phi3ForCausalLM": "Phi-3, Phi-4-mini",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3 (text)",
    "Gemma4ForCausalLM": "Gemma 4 (text)",
    "Gemma4UnifiedForCausalLM": "",
    "Exaone4ForCausalLM": "EXAONE 4",
    "SeedOssForCausalLM": "Seed-OSS",
    "Glm4ForCausalLM": "GLM-4",
    "Glm4MoeForCausalLM": "GLM-4.5, GLM-4.6",
    "Ernie4_5ForCausalLM": "ERNIE 4.5",
    "HunYuanDenseV1ForCausalLM": "Hunyuan",
    "ApertusForCausalLM": "Apertus",
    "Lfm2ForCausalLM": "LFM2, LFM2.5",
    "Lfm2MoeForCausalLM": "",
    "GptOssForCausalLM": "gpt-oss",
    "DeciLMForCausalLM": "Nemotron-NAS",
}
# model_type -> how people call what they ask for in vain.
MISSING = {
    "deepseek_v3": "DeepSeek V3",
    "gemma3n": "Gemma 3n",
    "falcon": "Falcon",
    "cohere": "Command R",
    "mamba": "Mamba",
}
GENERIC_MORE = "That is all I know of it; `--help` and the README tell more."


@dataclass
class Fact:
    """One thing that a user may ask about.

    ask: question lines; newcomers: those of newcomers.txt; topics, deeds: phrases for general
    questions. joins: the fact whose answer covers this one. members: those that this one's answer
    covers.
    """

    name: str
    answer: str = ""
    more: str = GENERIC_MORE
    joins: str = ""
    members: list[str] = field(default_factory=list)
    ask: list[str] = field(default_factory=list)
    newcomers: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    deeds: list[str] = field(default_factory=list)
    covers: list[str] = field(default_factory=list)


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def phrases() -> dict[str, list[str]]:
    """The lines of phrases.txt by section."""
    sections = read_text("guide_data/phrases.txt").split("\n## ")[1:]
    return {section[0]: section[1:] for section in map(lines, sections)}


PHRASES = phrases()


def read(facts: dict[str, Fact], text: str, newcomers: bool = False) -> None:
    """Add the sections of a text to `facts`. newcomers: its questions are those of
    newcomers.txt.
    """
    fact = None
    for line in lines(text):
        mark, _, rest = line.partition(" ")
        rest = rest.strip()
        if mark == "##":
            fact = facts.setdefault(rest, Fact(rest))
        elif mark == "=":
            fact.answer = rest.replace(r"\n", "\n")
        elif mark == "+":
            fact.more = rest.replace(r"\n", "\n")
        elif mark == "t":
            fact.topics = rest.split(" ; ")
        elif mark == "d":
            fact.deeds = rest.split(" ; ")
        elif mark == "f":
            fact.covers = rest.split()
        elif mark == "@":
            fact.joins = rest
        elif mark == "<-":
            fact.members = rest.split()
        elif mark == "!":
            fact.held_out.append(rest)
        else:
            (fact.newcomers if newcomers else fact.ask).append(line)


def join_facts(facts: dict[str, Fact]) -> None:
    """Give the questions of facts that another answer covers to that one."""
    every = dict(facts)
    for fact in every.values():
        for name in fact.members:  # an unknown name is a KeyError
            every[name].joins = fact.name
    for fact in every.values():
        if not fact.joins:
            continue
        whole = fact
        while whole.joins:
            whole = every[whole.joins]
        for kind in ("ask", "newcomers", "held_out", "topics", "deeds", "covers"):
            getattr(whole, kind).extend(getattr(fact, kind))
        whole.covers += [fact.name] * fact.name.startswith("--")
        whole.more = fact.more if whole.more == GENERIC_MORE else whole.more
        del facts[fact.name]


# ---- what the parsers say


@dataclass
class Flag:
    """A flag as one or several doors have it. others: doors where it means something else, with
    their action.
    """

    name: str
    action: argparse.Action
    doors: list[str]
    others: list[tuple[str, argparse.Action]] = field(default_factory=list)


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    return {
        door: importlib.import_module(f"mlx_llama.{HOMES.get(door, door)}").parser()
        for door in DOORS
    }


@cache
def flags() -> dict[str, Flag]:
    """Every flag of every door by its first name, without --help."""
    known: dict[str, Flag] = {}
    for door, parser in parsers().items():
        for action in parser._actions:
            if (
                not action.option_strings
                or action.dest == "help"
                or action.help == argparse.SUPPRESS
            ):
                continue
            name = next(spelling for spelling in action.option_strings if spelling.startswith("--"))
            if name not in known:
                known[name] = Flag(name, action, [door])
            elif (action.nargs == 0) == (known[name].action.nargs == 0) and str(action.metavar)[
                :1
            ] == str(known[name].action.metavar)[:1]:
                known[name].doors.append(door)
            else:
                known[name].others.append((door, action))
    return known


def join(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return text[:1].upper() + text[1:] + "."


def usage(name: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return name
    shown = action.metavar or (
        f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()
    )
    return f"{name} [{shown}]" if action.nargs == "?" else f"{name} {shown}"


def fill_flags(text: str) -> str:
    """The text with defaults and usages of flags in place of `{--flag}` and `{usage:--flag}`;
    unknown ones are errors.
    """

    def value(match: re.Match) -> str:
        action = flags()[match[2]].action
        if match[1]:
            return usage(match[2], action)
        default = re.search(
            r"\bdefault: ([^;,)]+)", (action.help or "").replace("%(default)s", str(action.default))
        )
        if not default:
            raise ValueError(f"the help of {match[2]} names no default, which {text!r} asks for")
        return default[1]

    return re.sub(r"\{(usage:)?(--[a-z-]+)\}", value, text)


def describe(flag: Flag, gist: str) -> str:
    """The answer for a flag, from its parsers."""
    action = flag.action
    help = (action.help or "").replace("%%", "%").replace("%(default)s", str(action.default))
    also = [f"`{spelling}`" for spelling in action.option_strings if spelling != flag.name][:3]
    told = [
        f"`{usage(flag.name, action)}`" + (f" (or {join(also, 'or')})" if also else "") + ":",
        *([sentence(gist)] if gist else []),
        sentence(help),
        f"In {join([f'`{door}`' for door in flag.doors])}.",
    ]
    told += [
        f"In `{door}` `{usage(flag.name, other)}`: {sentence(other.help or '')}"
        for door, other in flag.others
    ]
    option = next((name for name in FIELDS if flag.name in flags_of(name)), None)
    if option:
        told.append(f"In the REPL `/set {option}`; `{option}` in Python and HTTP.")
    return " ".join(told)


def describe_models() -> dict[str, str]:
    """Answers about models and formats, from core."""
    called = FAMILIES | {name: f"`{name}`" for name in ARCHITECTURES if name not in FAMILIES}
    names = join([called[name] for name in called if name in ARCHITECTURES and called[name]])
    missing = [
        name for kind, name in MISSING.items() if kind not in BY_MODEL_TYPE and kind not in BY_GGUF
    ]
    types = join(["F32", "F16", "BF16", *GGUF_FORMATS])
    return {
        "supported": f"These architectures load: {names}, as safetensors, MLX folders or GGUF. "
        f"Others do not: {join(missing)}, for example. `doctor NAME` tells of any model on this "
        "machine.",
        "rope_types": "Rope types that it knows: "
        f"{join([f'`{kind}`' for kind in ROPE_TYPES])}; any other "
        "is "
        "refused by name.",
        "gguf_types": f"GGUF types that it reads: {types}, and mixes "
        "such as Q4_K_M. Others, such as "
        "IQ2_XXS "
        "or IQ3_S, are "
        f"named in an error. `quantize --format gguf:TYPE` writes {join(list(FORMATS))}.",
    }


def flag_phrases(flag: Flag) -> list[str]:
    """How a flag is called: its names with and without dashes. Short names that mean other things
    elsewhere are left out.
    """
    names = [name for name in flag.action.option_strings if name.startswith("--")]
    short = [name for name in flag.action.option_strings if not name.startswith("--")]
    elsewhere = [
        spelling
        for other in flags().values()
        if other.name != flag.name
        for spelling in other.action.option_strings
    ]
    names += [name for name in short if name not in elsewhere]
    return names + [
        name[2:].replace("-", " ") for name in names if name.startswith("--") and "-" in name[2:]
    ]


def help_phrases(flag: Flag) -> list[str]:
    """Parts of a flag's help, as someone who has read it may put them."""
    told = " ; ".join(
        (action.help or "") for action in (flag.action, *(other for _, other in flag.others))
    )
    parts = [part.strip().lower() for part in re.split(r"[;:()]", told.replace("%%", "%"))]
    return [
        part
        for part in parts
        if len(part.split()) > 2 and not re.match(r"or |and |repeat |- |more get|default", part)
    ]


@cache
def every() -> dict[str, Fact]:
    """All facts by name."""
    facts: dict[str, Fact] = {}
    for source in SOURCES:
        read(facts, read_text(f"guide_data/{source}"))
    for source, times in NEWCOMERS.items():
        for _ in range(times):
            read(facts, read_text(f"guide_data/{source}"), newcomers=True)
    join_facts(facts)
    covered = {flag for fact in facts.values() for flag in fact.covers}
    for name, flag in flags().items():
        if name not in covered:
            fact = facts.setdefault(name, Fact(name))
            gist = fact.answer
            fact.answer = describe(flag, gist)
            if fact.more == GENERIC_MORE:
                fact.more = (
                    f"`python -m mlx_llama.{flag.doors[0]} --help` lists the flags beside it."
                )
    for name, command in REPL.items():
        usage_of = f"/{name} {command.argument}".strip()
        names = [name, *(other for other, meant in OTHER_NAMES.items() if meant == name)]
        written = any(f"`/{verb}" in fact.answer for fact in facts.values() for verb in names)
        if not written:
            facts[f"/{name}"] = Fact(
                f"/{name}",
                f"`{usage_of}` in the REPL: {sentence(command.help)}",
                topics=[f"/{name}"],
            )
    for name, purpose in DOORS.items():
        if not any(f"mlx_llama.{name}" in fact.answer for fact in facts.values()):
            facts[name] = Fact(
                name,
                f"`python -m mlx_llama.{name}`: {sentence(purpose)}",
                topics=[name, f"mlx_llama.{name}"],
            )
    for name, answer in describe_models().items():
        facts.setdefault(name, Fact(name)).answer = answer
    for fact in facts.values():
        for blank, value in GUIDE_FIGURES.items():
            fact.answer = fact.answer.replace(f"{{{blank}}}", value)
        fact.answer, fact.more = fill_flags(fact.answer), fill_flags(fact.more)
    return {name: fact for name, fact in facts.items() if fact.answer}


def known_flags() -> set[str]:
    """Every spelling of every flag, and --help."""
    return {"--help", "-h"} | {
        spelling
        for parser in parsers().values()
        for action in parser._actions
        for spelling in action.option_strings
    }
