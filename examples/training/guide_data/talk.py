"""Conversations to train on: small talk, questions beyond the guide, and the many ways to put a
question.

`conversation` writes one chat as a list of (role, text); `raw_text` writes a text without the chat
template.

Some answers offer a story. The shipped network learned to tell stories; the data has none any more,
so reword those answers before a new training.
"""

import random
import re
from collections import Counter
from functools import cache

from . import copying, facts, read_text
from .copying import introduction
from .facts import PHRASES, Fact, lines
from .thesaurus import reword

# ---- what people say besides asking about the project: (answers, ways to say it)
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello! I am the mlx_llama guide. What would you like to know?",
            "Hi! Ask me about mlx_llama, or for a little story.",
        ),
        """
     [hello|hi|hey|hi there|hello there|greetings|howdy|yo|hey there|hiya|hello guide|hi guide]
     [hello|hi|hey] [you|friend|guide|my friend|llama]
     good [morning|evening|afternoon|day]
     nice to meet you
     hello hello
     """,
    ),
    (
        (
            "I am fine, thank you: all of my parameters are in place. How are you?",
            "Very well, thank you. What can I tell you about mlx_llama?",
        ),
        """
     how are you [doing|today|doing today|]
     how is it going
     how do you do
     are you [ok|okay|well|fine|happy]
     what is up
     whats up
     how are things
     [hello|hi|hey] how are you
     how was your day
     how do you feel
     """,
    ),
    (
        ("You are welcome!", "My pleasure. Ask again whenever you like."),
        """
     [thanks|thank you|thx|many thanks|thanks a lot|thank you very much|cheers|thank you so much|thanks for your help]
     [thanks|thank you|great|ok|okay|perfect] [that helps|that helped|that was helpful|for the help]
     that [helps|helped|was helpful|is helpful]
     [thx|thanks|thank you|great|perfect|ok|cool], [that fixed it|it works now|that worked|problem solved]
     [that fixed it|it works now|that worked|works now|problem solved]
     """,
    ),
    (
        ("Goodbye! Type `/exit` to leave the chat.", "Bye, and have fun with mlx_llama!"),
        """
     [bye|goodbye|bye bye|see you|see you later|good night|farewell|see you soon|cya|until next time|take care]
     i have to go [now|]
     i am leaving [now|]
     have a nice day
     """,
    ),
    (
        ("Thank you! That is kind of you.", "I am glad to hear that."),
        """
     you are [great|good|nice|cool|funny|the best|helpful|awesome|cute|amazing|clever]
     [good|well done|nice|great] [job|work|answer]
     [well done|bravo|wow|awesome|cool|nice|amazing|impressive]
     i like you
     i love you
     that is [great|cool|nice|good|funny|interesting]
     """,
    ),
    (
        (
            "I am sorry. I am very small, and a real model does better: `--model "
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0`.",
        ),
        """
     you are [stupid|dumb|bad|useless|terrible|annoying|boring|not very helpful|silly]
     [bad|terrible|wrong|stupid] [answer|bot|job]
     i hate you
     that [was|is] [bad|useless|terrible|nonsense|not helpful|stupid]
     that makes no sense
     you did not answer my question
     this is [nonsense|useless|rubbish]
     """,
    ),
    (
        (
            "Why did the token cross the road? It was the most likely next step.",
            "How does a llama sample? With its temperature, after a warm drink.",
            "I had a joke about lazy evaluation, but I will tell it only when you need it.",
        ),
        """
     tell me a joke
     [a joke|another joke|say something funny|make me laugh|be funny|joke]
     do you know [a joke|any jokes|a good joke]
     tell [me|us] [another|one more|a funny|a good] joke
     can you tell a joke
     i want a joke
     """,
    ),
    (
        ("All right.", "Good. What next?"),
        """
     [ok|okay|alright|fine|all right|i see|got it|understood|sure|right|good|yes|yep|yeah|perfect|great|hm|hmm|aha]
     [that is ok|no problem|sounds good|makes sense|very well|never mind|no worries]
     [no|nope|no thanks|not really|nothing|nothing else|that is all|not now]
     """,
    ),
    (
        ("No problem at all.",),
        """
     [sorry|i am sorry|my bad|oops|excuse me|pardon|my mistake|apologies]
     [sorry|i am sorry] [about that|for that|that was rude]
     """,
    ),
    (
        (
            "I don't have a favourite, but I am fond of the number 8192: it is the size of my "
            "vocabulary.",
        ),
        """
     what is your favourite [number|colour|food|film|book|animal|song|thing|word]
     what is your favorite [number|color|food|movie|book|animal|song|thing|word]
     do you have a favourite [number|colour|animal|book]
     which [colour|number|animal|food] do you like [best|most]
     """,
    ),
    (
        (
            "I am sorry to hear that. I am only a tiny model, but I can tell you a story. Talk "
            "to a friend too, that helps more.",
        ),
        """
     i am [sad|lonely|unhappy|depressed|tired|angry|worried|stressed|not well|not feeling well]
     i feel [sad|bad|lonely|tired|down|terrible|unhappy]
     i had a bad day
     today was [bad|terrible|awful]
     """,
    ),
    (
        ("That is good to hear! What would you like to know?",),
        """
     i am [fine|good|well|great|happy|ok|very well|doing well] [thanks|thank you|too|]
     i feel [good|great|fine|happy]
     [fine|good|well|very well] [thanks|thank you|and you]
     i had a good day
     """,
    ),
    (
        ('Then ask for a story: say "tell me a story about a dragon".',),
        """
     i am bored
     i have nothing to do
     entertain me
     [let us|let's] play [a game|]
     what shall we do
     amuse me
     can we play a game
     this is boring
     say something
     talk to me
     [let us|let's] [talk|chat]
     """,
    ),
    (
        ("It works: I can hear you. Ask me something about mlx_llama.",),
        """
     [test|testing|test test|one two three|is this on|are you there|anybody there|ping|does this work|can you hear me]
     is anybody [here|there]
     are you [awake|working|listening|online now]
     """,
    ),
    (
        (
            'I did not understand that. Ask me about mlx_llama, for example "which backends '
            'are there?".',
        ),
        """
     [asdf|qwerty|asdfgh|blah|bla bla|foo|foo bar|xyz|abc|lorem ipsum|jkl|zzz|aaaa|lol|haha|hahaha|huh|what|eh|1234|42|0]
     [i do not understand|i don't understand|what do you mean|i don't get it|that is confusing|i am confused|what is that]
     [?|...|!|-|.]
     """,
    ),
    (
        ("Happy to say it: happy birthday!",),
        """
     it is my birthday [today|]
     today is my birthday
     wish me a happy birthday
     say happy birthday
     """,
    ),
    (
        (
            "I am new to everything myself. Start with `pip install -e .` and `python -m "
            "mlx_llama.chat`, and ask me as you go.",
        ),
        """
     i am [new|new to this|a beginner|new here|a newcomer|a student|learning]
     i [have never done this|know nothing about this|don't know where to start|am just starting]
     where [do|should] i [start|begin]
     what should i do first
     """,
    ),
)

# ---- the many ways to put one question
WHAT_IS = PHRASES["WHAT_IS"]
HOW_TO = PHRASES["HOW_TO"]
FLAG = PHRASES["FLAG"]
HELP = PHRASES["HELP"]
SYNONYMS = (
    "answer reply response output",
    "answers replies responses",
    "start begin launch",
    "show display print",
    "change modify alter adjust",
    "big large huge",
    "fast quick speedy",
    "faster quicker speedier",
    "slow sluggish",
    "computer machine pc box",
    "laptop notebook",
    "choose select pick",
    "use employ utilise utilize",
    "question query",
    "program software application",
    "get obtain receive",
    "work function run",
    "make create produce",
    "supported available allowed",
    "option setting parameter",
    "options settings parameters",
    "flag switch argument option",
    "flags switches arguments options",
    "tell explain",
    "need require",
    "model llm checkpoint",
    "models llms checkpoints",
    "file document",
    "files documents",
    "folder directory dir",
    "delete remove erase",
    "stop end quit",
    "limit restrict cap bound",
    "maximum max most",
    "minimum min least",
    "error failure exception problem",
    "message text",
    "several multiple many",
    "requests calls queries",
    "client app",
    "memory ram",
    "gpu gfx-card",
    "cpu processor",
    "threads cores",
    "token tokens",
    "speed performance",
    "measure benchmark",
    "compare contrast",
    "download fetch pull",
    "save store keep write",
    "load open read",
    "convert turn transform",
    "quantize quantise compress",
    "quantized quantised compressed",
    "guess predict",
    "default standard preset",
    "possible doable feasible",
    "allow permit let enable",
    "disable deactivate",
    "hide suppress",
    "server service",
    "browser chrome firefox",
    "key password secret",
    "port socket",
    "address ip",
    "network lan",
    "website site page",
    "wait queue",
    "different other another",
    "exact precise accurate",
    "random arbitrary",
    "same identical equal",
    "repeat loop",
    "install setup",
    "example sample demo",
    "conversation chat dialogue talk",
    "prompt input",
    "length size",
    "number count amount",
    "new fresh",
    "old previous earlier",
    "list enumerate",
    "check verify",
    "correct right",
    "wrong incorrect false",
    "long lengthy",
    "short brief",
    "whole entire complete",
    "give pass provide supply",
    "find locate",
    "see view watch",
    "write generate",
    "terminal shell console",
    "command cmd",
    "function tool",
    "functions tools",
    "schema format",
    "lower reduce decrease",
    "raise increase",
    "smaller lighter",
    "better nicer",
    "want wish",
    "help assist",
    "everything all",
    "only just",
    "currently now",
    "and plus",
)
SYNONYM: dict[str, list[str]] = {}
for _group in SYNONYMS:
    for _word in _group.split():
        SYNONYM.setdefault(_word, []).extend(other for other in _group.split() if other != _word)

LEAD_INS = (
    "hey, ",
    "hi, ",
    "hello, ",
    "please, ",
    "ok, ",
    "ok so ",
    "so ",
    "and ",
    "quick question: ",
    "excuse me, ",
    "um, ",
    "sorry, ",
    "now ",
    "well, ",
    "one question: ",
    "i am new to this. ",
    "thanks. ",
    "great, ",
    "another question: ",
    "hello! ",
    "hi guide, ",
    "tell me, ",
    "i was wondering, ",
    "i wonder, ",
    "just curious, ",
    "say, ",
    "again, ",
    "but ",
    "also, ",
    "hey guide ",
    "question: ",
    "q: ",
    "help: ",
    "hm, ",
    "oh, ",
    "right, ",
    "actually, ",
    "then ",
    "sorry to ask but ",
    "newbie here, ",
    "i forgot: ",
    "remind me, ",
    "for my project: ",
    "in short, ",
    "seriously, ",
    "in mlx_llama, ",
    "with mlx_llama, ",
)
ENDINGS = (
    " please",
    " thanks",
    " in mlx_llama",
    " here",
    " with mlx_llama",
    " exactly",
    " for me",
    " then",
    " actually",
    " in this program",
    " right now",
    " in this project",
    ", can you tell me",
    ", do you know",
    " by default",
    " with this",
    " on my machine",
    " on linux",
    " on my mac",
    " from the command line",
    " in general",
    " at all",
    " if any",
    " thx",
    " pls",
    ", i can't find it",
    ", i am lost",
    " in the docs",
    " quickly",
    " today",
    " again",
    " with it",
    " these days",
)
ASIDES = (
    "i have a question.",
    "i am trying this out.",
    "my friend told me about this.",
    "i am curious.",
    "i just started today.",
    "i read the readme.",
    "one thing is not clear to me.",
    "i have been reading about it.",
    "i need your help.",
    "there is something i want to know.",
    "i am a beginner.",
    "i have never used this before.",
    "let me ask something.",
    "good to know.",
    "i see.",
    "that was useful.",
    "maybe you know this:",
    "this may be a silly question:",
    "we talked about it at work.",
    "i am writing some notes.",
    "i just installed it.",
    "i have a mac.",
    "i have an nvidia card.",
    "i am on linux.",
    "i come from llama.cpp.",
    "i come from ollama.",
    "i use python every day.",
    "i have a small laptop.",
    "i am setting this up for my team.",
    "the help text was too short.",
    "i saw it in --help.",
)
LITTLE_WORDS = set(
    "a an the is are do does i it to of in my me you please can how what which for with on "
    "there be".split()
)

MORE = (
    "tell me more",
    "more",
    "go on",
    "more please",
    "can you tell me more",
    "anything else",
    "what else",
    "say more",
    "please go on",
    "more details",
    "give me more details",
    "can you say more about that",
    "tell me more about that",
    "and then",
    "is that all",
    "continue",
    "explain that further",
    "more about this please",
    "could you elaborate",
    "elaborate",
    "what else should i know",
    "and what else",
    "can you explain more",
)
SYSTEM = (
    "You are a helpful assistant.",
    "You are the guide to mlx_llama.",
    "Be brief.",
    "Answer in English.",
    "You are a friendly assistant.",
    "You are a helpful, honest assistant.",
    "Answer questions about mlx_llama.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a kind teacher.",
    "You are an expert.",
    "Answer politely.",
    "You answer shortly.",
    "You are a bot.",
    "Help the user.",
    "Be kind.",
    "You are brief.",
    "You are helpful.",
    "You are brief and precise.",
    "Answer in one sentence.",
    "Keep it short.",
    "You are a concise assistant.",
    "You are an AI assistant.",
    "You are a chatbot.",
    "You are a support agent.",
    "You help people with software.",
    "You are an experienced programmer.",
    "You are a patient teacher who explains step by step.",
    "Do not make things up.",
    "If you do not know, say so.",
    "Only answer what you are sure of.",
    "You are a friendly guide for beginners.",
    "Be polite and short.",
    "Speak plainly.",
    "Use simple words.",
    "You are the assistant of a small company.",
    "You are a technical writer.",
    "You answer questions of new users.",
    "The user is a beginner.",
    "The user is an expert.",
    "You are a careful assistant. Think before you answer.",
    "You are a helpful coding assistant.",
    "you are helpful",
    "be brief",
    "You are an assistant who never uses more than fifty words.",
    "You are running on the user's own computer.",
    "Today is Monday.",
    "You are talking with a student.",
    "Your name is Guide.",
    "Answer truthfully.",
    "Be honest and friendly.",
    "You are a system administrator.",
    "You are the documentation of mlx_llama.",
    "Answer as well as you can.",
    "You are a helpful assistant. You always answer in English.",
    "Give exact commands where you can.",
    "Never be rude. Never write long texts. Stay on the subject.",
    "You work at the help desk.",
)
PIRATE = (
    "You are a pirate.",
    "Talk like a pirate.",
    "You talk like a pirate.",
    "Answer like a pirate.",
    "You are a pirate captain.",
    "Speak like a pirate.",
    "you are a pirate",
    "talk like a pirate",
)

# ---- beyond the guide
DOUBT = "Sorry, I do not know"  # begins all answers that tell of no knowledge, and no others
SCOPE_ANSWER = (
    f"{DOUBT}: I am a small guide and only know mlx_llama, small talk and little stories. "
    "For other questions load a real model, such as `--model TinyLlama/TinyLlama-1.1B-Chat-v1.0`."
)
SCOPE_MORE = (
    "I really know nothing else. A real model is one flag away: `--model "
    "HuggingFaceTB/SmolLM2-360M-Instruct`."
)
BLANKS: dict[str, list[str]] = {}
SCOPE: list[str] = []
SCOPE_HELD_OUT: list[str] = []
for _line in lines(read_text("guide_data/offtopic.txt")):
    if _found := re.match(r"([a-z]+): (.+ \| .+)", _line):
        BLANKS[_found[1]] = _found[2].split(" | ")
    elif _line.startswith("! "):
        SCOPE_HELD_OUT.append(_line[2:])
    elif not _line.startswith("#"):
        SCOPE.append(_line)

FACTS = facts.every()
_DOORS = list(facts.parsers())
_WORDS = sorted({word for line in SCOPE for word in re.findall(r"[a-z]{4,9}", line)})
_KNOWN = facts.known_flags()
_TAKEN = {
    *facts.REPL,
    *facts.DOORS,
    "continue",
    "undo",
    "edit",
    "model",
    "bye",
    "quit",
    "new",
    "reset",
    "retry",
    "docs",
    "health",
    "props",
}


def expand(line: str, rng: random.Random) -> str:
    """One way through the choices of a line: "[a|b] c" -> "a c" or "b c"."""
    line = re.sub(r"\[([^\[\]]*\|[^\[\]]*)\]", lambda match: rng.choice(match[1].split("|")), line)
    return " ".join(line.split())


def ways(line: str) -> int:
    """Number of questions that the choices of a line give."""
    count = 1
    for choices in re.findall(r"\[([^\[\]]*\|[^\[\]]*)\]", line):
        count *= choices.count("|") + 1
    return count


def normal(text: str) -> str:
    """A question without case and punctuation, for comparing two of them."""
    return " ".join(re.sub(r"[^a-z0-9]+", " ", text.lower().replace("'", "")).split())


HELD_OUT: dict[str, tuple[Fact | None, str]] = {}
for _fact in FACTS.values():
    for _line in _fact.held_out:
        _question = expand(_line, random.Random(_line))
        HELD_OUT[normal(_question)] = (_fact, _question)
HELD_OUT |= {normal(_line): (None, _line) for _line in SCOPE_HELD_OUT}
_STARTS: dict[tuple[str, ...], list[list[str]]] = {}  # by the first four words
for _text in HELD_OUT:
    if len(_text.split()) > 3:
        _STARTS.setdefault(tuple(_text.split()[:4]), []).append(_text.split())


def is_held_out(question: str) -> bool:
    """True if the question is, or contains, one that is reserved for the evaluation; short ones
    count alone only.
    """
    text = normal(question)
    words = text.split()
    return text in HELD_OUT or any(
        words[i : i + len(kept)] == kept
        for i in range(len(words) - 3)
        for kept in _STARTS.get(tuple(words[i : i + 4]), ())
    )


# ---- blanks


def random_word(rng: random.Random) -> str:
    return "".join(
        rng.choice("bcdfghjklmnprstvwxz")
        + rng.choice("aeiouy")
        + rng.choice(("", "", "n", "r", "s", "ck", "lt", "x"))
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def _unknown_flag(rng: random.Random) -> str:
    while True:
        words = [
            rng.choice(_WORDS) if rng.random() < 0.7 else random_word(rng)
            for _ in range(rng.choice((1, 2, 2)))
        ]
        if rng.random() < 0.4:  # half of a known flag
            words[0] = rng.choice(rng.choice(_LONG)[2:].split("-"))
            words = words if len(words) == 2 else [*words, rng.choice(_WORDS)]
        flag = "--" + "-".join(words)
        if flag not in _KNOWN:
            return flag


def _unknown_model(rng: random.Random) -> str:
    name = rng.choice((random_word(rng).capitalize(), rng.choice(_WORDS).capitalize()))
    return name + rng.choice(
        (
            "",
            "",
            "-7B",
            " 2",
            "-Chat",
            "LM",
            "-1.5",
            " 13b",
            "-v0.2",
            "GPT",
            "-instruct",
            "-3B-base",
        )
    )


_LONG = sorted(flag for flag in _KNOWN if flag.startswith("--"))


def fill(line: str, rng: random.Random) -> str:
    """The line with its blanks filled: {n} a number, {madeup} a model that does not exist,
    {country} and so on.
    """

    def value(match: re.Match) -> str:
        key = match[1]
        if key == "n":
            return str(
                rng.choice(
                    (
                        rng.randrange(1, 10),
                        rng.randrange(1, 100),
                        2 ** rng.randrange(14),
                        rng.randrange(10, 3000),
                    )
                )
            )
        if key == "madeup":
            return _unknown_model(rng)
        if key == "noflag":
            return _unknown_flag(rng)
        if key in ("noword", "nocommand"):
            word = next(
                word
                for _ in range(99)
                if (word := rng.choice((random_word(rng), rng.choice(_WORDS)))) not in _TAKEN
            )
            return f"/{word}" if key == "nocommand" else word
        return rng.choice(BLANKS[key])

    return re.sub(r"\{([a-z]+)\}", value, line)


def reworded(question: str, rng: random.Random) -> str:
    """The same question in other words; in half of the cases one to three phrases are replaced by
    the thesaurus.
    """
    if rng.random() < 0.5:
        return reword(question, rng)
    for start in ("how do i ", "how can i "):
        if question.startswith(start) and rng.random() < 0.5:
            question = rng.choice(HOW_TO).replace("{v}", question[len(start) :])
            break
    if question.startswith("which ") and rng.random() < 0.3:
        question = f"what {question[6:]}"
    elif question.startswith("does it ") and rng.random() < 0.4:
        question = f"{rng.choice(('does mlx_llama', 'can it', 'does this', 'will it', 'does the program'))} {question[8:]}"
    words = [
        rng.choice(SYNONYM[word]) if word in SYNONYM and rng.random() < 0.12 else word
        for word in question.split()
    ]
    return " ".join(words)


def typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) - 1)
    return rng.choice(
        (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + rng.choice("abcdefghijklmnopqrstuvwxyz") + word[at + 1 :],
        )
    )


_WORD = re.compile(r"(?=.{4,})[a-z]+(-[a-z]+)*", re.I)


def dressed(question: str, rng: random.Random) -> str:
    """The question as someone types it: manners, case, punctuation, a slip of the fingers; in a
    third of the cases as it is.
    """
    if rng.random() < 0.35:
        return question
    words = question.split()
    for enough in (3, 5):
        if len(words) > enough and rng.random() < 0.15:
            words.pop(rng.randrange(len(words)))
    if len(words) > 4 and rng.random() < 0.06:
        words = [word for word in words if word not in LITTLE_WORDS] or words
    # share of words with slips; some people make many
    slips = rng.choice((0.2, 0.35, 0.5)) if rng.random() < 0.22 else 0.02
    words = [
        typo(word, rng) if rng.random() < slips and _WORD.fullmatch(word) else word
        for word in words
    ]
    question = " ".join(words)
    if rng.random() < 0.18:
        question = rng.choice(LEAD_INS) + question
    if rng.random() < 0.12:
        question += rng.choice(ENDINGS)
    case = rng.random()
    if case < 0.5:
        question = question[:1].upper() + question[1:]
    elif case < 0.52:
        question = question.upper()
    question = question.replace(" i ", rng.choice((" i ", " I ", " I ")))
    if rng.random() < 0.15:
        question = re.sub(r"(--?[a-z][a-z-]*|/[a-z]+)", r"`\1`", question)
    if question.endswith("?"):
        return question
    return question + rng.choice(("?", "?", "?", "?", "", "", "", ".", "!", "??", " ?"))


# ---- questions about facts


@cache
def _help_phrases(name: str) -> list[str]:
    known = facts.flags()
    return [
        phrase
        for flag in (name, *FACTS[name].covers)
        if flag in known
        for phrase in facts.help_phrases(known[flag])
    ]


@cache
def _flag_phrases(name: str) -> list[str]:
    known = facts.flags()
    return [
        phrase
        for flag in (name, *FACTS[name].covers)
        if flag in known
        for phrase in facts.flag_phrases(known[flag])
    ]


# A fact that can be asked about in many ways needs more practice, though not in proportion; open
# classes need most.
_NAMES = list(FACTS)
_OPEN = {
    "unknown": 1.5,
    "no_flag": 1.5,
    "no_command": 1.2,
    "other_model": 1.2,
    "supported": 1.5,
    "commands": 1.3,
}
NEWCOMERS = 0.7  # share of the questions on a fact that are lines of newcomers*.txt
_WEIGHTS = [
    _OPEN.get(name, 1.0)
    * (len(fact.ask) + len(fact.newcomers) + 3 * len(fact.topics) + 5 * len(fact.deeds) + 8) ** 0.75
    for name, fact in FACTS.items()
]


def any_fact(rng: random.Random) -> Fact:
    return FACTS[rng.choices(_NAMES, _WEIGHTS)[0]]


def without_clause(line: str, rng: random.Random) -> str:
    """The line, now and then without one of its clauses, if it has several."""
    clauses = line.split(", ")
    if len(clauses) > 2 and "[" not in line and rng.random() < 0.15:
        clauses.pop(rng.randrange(len(clauses)))
    return ", ".join(clauses)


def plain_line(fact: Fact, rng: random.Random) -> tuple[str, bool]:
    """A question of the fact as it is written, and whether it may be reworded."""
    phrases = _flag_phrases(fact.name)
    helps = _help_phrases(fact.name)
    if fact.newcomers and rng.random() < NEWCOMERS:
        return fill(expand(without_clause(rng.choice(fact.newcomers), rng), rng), rng), True
    kinds = (
        ("flag", 0.55 * bool(phrases)),
        ("help", 0.14 * bool(helps)),
        ("topic", 0.22 * bool(fact.topics)),
        ("deed", 0.28 * bool(fact.deeds)),
        ("ask", (0.40 if len(fact.ask) < 40 else 0.70) * bool(fact.ask)),
    )
    kind = rng.choices([name for name, _ in kinds], [weight for _, weight in kinds])[0]
    if kind == "flag":
        line = (
            rng.choice(FLAG).replace("{f}", rng.choice(phrases)).replace("{d}", rng.choice(_DOORS))
        )
    elif kind == "help":  # braces and brackets of flags' help are no blanks
        return rng.choice(HELP).replace("{h}", rng.choice(helps)), True
    elif kind == "topic":
        line = rng.choice(WHAT_IS).replace("{t}", rng.choice(fact.topics))
    elif kind == "deed":
        line = rng.choice(HOW_TO).replace("{v}", rng.choice(fact.deeds))
    else:
        line = rng.choice(fact.ask)
    return fill(expand(line, rng), rng), kind != "flag"


def plain_question(fact: Fact, rng: random.Random) -> str:
    while True:
        line, free = plain_line(fact, rng)
        if not is_held_out(line):  # nor in other words
            return reworded(line, rng) if free and rng.random() < 0.35 else line


def question_about(fact: Fact, rng: random.Random) -> str:
    while True:
        plain = plain_question(fact, rng)
        extra = rng.random()  # what matters may stand anywhere among other words
        if extra < 0.06:
            plain = f"{rng.choice(ASIDES)} {plain}"
        elif extra < 0.12:
            plain = f"{plain}{rng.choice((', ', '. ', ' or ', ', i mean ', '? '))}{plain_question(fact, rng)}"
        question = dressed(plain, rng)
        if not is_held_out(plain) and not is_held_out(question):
            return question


def out_of_scope(rng: random.Random) -> str:
    while True:
        plain = reworded(fill(expand(rng.choice(SCOPE), rng), rng), rng)
        if rng.random() < 0.04:
            plain = (
                f"{plain} {rng.choice(('and', 'or', 'also'))} "
                f"{fill(expand(rng.choice(SCOPE), rng), rng)}"
            )
        question = dressed(plain, rng)
        if not is_held_out(plain) and not is_held_out(question):
            return question


def mixed_question(rng: random.Random) -> str:
    """Draw some words of a question, or the beginning of one and the end of another: ambiguous, as
    users' questions are.
    """
    while True:
        first, two = (
            (
                out_of_scope(rng) if rng.random() < 0.1 else question_about(any_fact(rng), rng)
            ).split()
            for _ in range(2)
        )
        if rng.random() < 0.5:
            words = [word for word in first if rng.random() < 0.65]
        else:
            words = first[: rng.randint(1, len(first))] + two[rng.randrange(len(two)) :]
        question = " ".join(words)
        if words and not is_held_out(question):
            return question


# ---- long questions: a situation, a wish, and often a general question at the end
SITUATIONS = [line for line in lines(read_text("guide_data/situations.txt")) if line[0] != "#"]
# First sentences of long questions that tell of a person and no need, and so may stand before any
# other question.
_PERSON = re.compile(
    r"(my|our|i am|i'm|i have|i work|i teach|i study|i run|i live|i bought|i own|we are|we "
    r"have|we run|at (work|home|school)|"
    r"an?( old| young| new)? (friend|colleague|student|customer|user|neighbour|teacher)) ",
    re.I,
)
_NEED = re.compile(
    r"\b(want|need|would|wish|like|must|should|could|can|cannot|can't|how|which|what|where|why|whether|if|try|trying|tried|"
    r"no|not|\w+n't|never|nothing|only|always|keeps?|slow|slowly|long|wrong|error|fails?|crash\w*|stops?|differ\w*|lost|los\w+|"
    r"told|says?|said|asks?|asked|heard|read|but|yet|too|full|empty|instead|every|each|all|"
    r"models?|network\w*|weights?|checkpoints?|llamas?|tokens?|prompts?|words?|sentences?|repl\w+|answers?|messages?|chats?|bots?|talk\w*|"
    r"files?|folders?|servers?|instance|gpus?|cards?|macs?|macbook|mini|m\d|arm|amd|nvidia|intel|cores?|memory|ram|gb|gigabytes?|"
    r"threads?|windows?|linux|cloud|hub|face|quanti\w+|bits?|heads|attention|layers?|rotary|limits?|lines?|speed|faster?|"
    r"length|corpus|json|http|https|api|wifi|offline|internet|firewall|tablets?|breaking)\b|`|--|_|:|;|\d",
    re.I,
)


def _introductions() -> dict[str, list[str]]:
    """Fact -> such sentences, of words that the questions on a fifth of all facts have: others hint
    at their fact.
    """
    words = {name: set(normal(" ".join(fact.newcomers)).split()) for name, fact in FACTS.items()}
    spread = Counter(word for texts in words.values() for word in texts)
    texts: dict[str, list[str]] = {}
    for fact in FACTS.values():
        for line in fact.newcomers:
            first, dot, rest = line.partition(". ")
            if (
                dot
                and rest
                and 4 < len(first.split()) < 16
                and _PERSON.match(first)
                and not _NEED.search(first)
                and all(spread[word] >= len(FACTS) / 5 for word in normal(first).split())
            ):
                texts.setdefault(fact.name, []).append(first)
    return texts


INTRODUCTIONS = _introductions()
FINALLY = PHRASES["FINALLY"]
WISHES = PHRASES["WISHES"]


def situation(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return rng.choice(INTRODUCTIONS[rng.choice(list(INTRODUCTIONS))])
    return reworded(fill(expand(rng.choice(SITUATIONS), rng), rng), rng)


def long_question(rng: random.Random) -> list[tuple[str, str]]:
    """A chat of one turn: what the user wants, with one to three sentences of a situation before,
    after or amid it.
    """
    scope = rng.random() < 0.12
    fact = any_fact(rng)
    while True:
        if scope:
            asked = [fill(expand(rng.choice(SCOPE), rng), rng)]
        elif fact.deeds and rng.random() < 0.3:
            asked = [
                fill(expand(rng.choice(WISHES).replace("{v}", rng.choice(fact.deeds)), rng), rng),
                rng.choice(FINALLY),
            ]
        else:
            asked = [plain_question(fact, rng)] + [rng.choice(FINALLY)] * (rng.random() < 0.15)
        if not is_held_out(". ".join(asked)):
            break
    asked = [reworded(text, rng) for text in asked]
    marks = [".", *rng.choices(("?", ".", ""), (7, 2, 1))][-len(asked) :]
    told = [text if text[-1] in ".?!" else text + mark for text, mark in zip(asked, marks)]
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        at = rng.choice((0, 0, len(told), len(told), rng.randint(0, len(told))))
        joined = (
            rng.choice((" and ", ", so ", ", but ", ", and now ", ", therefore ", "; ", ": "))
            if at < len(told) and rng.random() < 0.25
            else ""
        )
        if joined:
            told[at] = situation(rng) + joined + told[at]
        else:
            told.insert(at, situation(rng) + ".")
    if rng.random() < 0.7:
        told = [part[:1].upper() + part[1:] for part in told]
    text = " ".join(told).replace(" i ", rng.choice((" I ", " I ", " i ")))
    if rng.random() < 0.3:
        text = dressed(text.rstrip(".?"), rng)
    return [("user", text), ("assistant", SCOPE_ANSWER if scope else fact.answer)]


def short_fact(rng: random.Random) -> Fact:
    """Of four facts the one with the shortest answer, for turns that only go before others."""
    return min((any_fact(rng) for _ in range(4)), key=lambda fact: len(fact.answer))


def earlier(rng: random.Random, turns: int) -> list[tuple[str, str]]:
    """Turns on changing subjects, to go before any chat: facts with short answers, small talk,
    names, other subjects.
    """
    messages = []
    for _ in range(turns):
        kind = rng.random()
        if kind < 0.5:
            fact = any_fact(rng) if rng.random() < 0.25 else short_fact(rng)
            messages += [("user", question_about(fact, rng)), ("assistant", fact.answer)]
        elif kind < 0.64:
            text, answer, _ = introduction(rng)
            messages += [("user", text), ("assistant", answer)]
        elif kind < 0.72:
            messages += [("user", out_of_scope(rng)), ("assistant", SCOPE_ANSWER)]
        else:
            messages += small_talk(rng)
    return messages


def small_talk(rng: random.Random) -> list[tuple[str, str]]:
    answers, ask = rng.choice(SMALL_TALK)
    said = [expand(rng.choice(lines(ask)), rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    return [("user", dressed(", ".join(said), rng)), ("assistant", rng.choice(answers))]


def copy_chat(rng: random.Random) -> tuple[list[tuple[str, str]], str]:
    """A chat that repeats a name, word or number, at once or turns later, and that text ("" if
    there is none).
    """
    kind = rng.random()
    if kind < 0.2:
        text, answer, name = introduction(rng)
        return [("user", text), ("assistant", answer)], name
    if kind < 0.55:
        return copying.echo(rng)
    return copying.memory(rng, earlier(rng, rng.choice((0, 0, 0, 1, 1, 2))))


# ---- conversations


def turn(
    rng: random.Random, name: str, last: Fact | str | None
) -> tuple[str, str, Fact | str | None, str]:
    """One question and its answer, given the user's name and what was talked about last."""
    if last is None and rng.random() < 0.02:
        return (
            dressed(rng.choice(MORE), rng),
            "More about what? Ask me about mlx_llama, or for a story.",
            None,
            name,
        )
    if last is not None and rng.random() < 0.25:
        more = last.more if isinstance(last, Fact) else SCOPE_MORE
        return dressed(rng.choice(MORE), rng), more, None, name
    kind = rng.random()
    if kind < 0.64:
        fact = any_fact(rng)
        return question_about(fact, rng), fact.answer, fact, name
    if kind < 0.80:
        answers, ask = rng.choice(SMALL_TALK)
        return dressed(expand(rng.choice(lines(ask)), rng), rng), rng.choice(answers), None, name
    if kind < 0.90:
        return out_of_scope(rng), SCOPE_ANSWER, "scope", name
    if name and rng.random() < 0.7:
        question = rng.choice(
            (
                "what is my name",
                "do you know my name",
                "who am i",
                "do you remember my name",
                "what am i called",
            )
        )
        return dressed(question, rng), f"Your name is {name}.", None, name
    if rng.random() < 0.25 and not name:
        question = rng.choice(("what is my name", "do you know my name", "who am i"))
        return dressed(question, rng), "You have not told me your name yet.", None, name
    text, answer, name = introduction(rng)
    return text, answer, None, name


def one_question(rng: random.Random) -> list[tuple[str, str]]:
    """A chat of one turn, mostly about a fact."""
    kind = rng.random()
    if kind < 0.12:
        return [("user", out_of_scope(rng)), ("assistant", SCOPE_ANSWER)]
    if kind < 0.18:
        return small_talk(rng)
    fact = any_fact(rng)
    return [("user", question_about(fact, rng)), ("assistant", fact.answer)]


SHOWN = {
    "Which backends are there?": "backends",
    "Who are you?": "who",
    "Hello, who are you?": "who",
    "How do I load a real model?": "real_model",
    # question in README.md, docs/ or examples/ -> its fact
    "What is a llama?": "llama_model",
    "Why is the sky blue?": "scope",
}


def shown_question(rng: random.Random) -> list[tuple[str, str]]:
    """A chat of one turn, with a question that the README, the pages or the examples show."""
    question, name = rng.choice(list(SHOWN.items()))
    answer = SCOPE_ANSWER if name == "scope" else FACTS[name].answer
    return [
        ("user", question if rng.random() < 0.5 else dressed(question.rstrip("?").lower(), rng)),
        ("assistant", answer),
    ]


def conversation(rng: random.Random) -> list[tuple[str, str]]:
    """One chat of one to four turns, as (role, text)."""
    messages: list[tuple[str, str]] = []
    pirate = False
    if rng.random() < 0.22:
        pirate = rng.random() < 0.15
        messages.append(("system", rng.choice(PIRATE if pirate else SYSTEM)))
    name, last = "", None
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        question, answer, last, name = turn(rng, name, last)
        messages += [("user", question), ("assistant", f"Arr! {answer}" if pirate else answer)]
    return messages


def raw_text(rng: random.Random) -> str:
    """A text to be continued as it is: plain sentences about the project."""
    return " ".join(FACTS[name].answer for name in rng.sample(_NAMES, 2))
