"""Conversations to train on: small talk, questions beyond the guide, and the many ways to put a question.

`conversation` writes one chat as a list of (role, text); `raw_text` writes a text without the chat template.
"""

import random
import re

from . import facts, stories
from .facts import FACTS, Fact

# ---- what people say besides asking about the project: (answers, ways to say it)
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello! I am the mlx_llama guide. What would you like to know?",
      "Hi! Ask me about mlx_llama, or for a little story."),
     """
     [hello|hi|hey|hi there|hello there|greetings|howdy|yo|hey there|hiya|hello guide|hi guide]
     [hello|hi|hey] [you|friend|guide|my friend|llama]
     good [morning|evening|afternoon|day]
     nice to meet you
     hello hello
     """),
    (("I am fine, thank you: all three million of my parameters are in place. How are you?",
      "Very well, thank you. What can I tell you about mlx_llama?"),
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
     """),
    (("You are welcome!", "My pleasure. Ask again whenever you like."),
     """
     [thanks|thank you|thx|many thanks|thanks a lot|thank you very much|cheers|thank you so much|thanks for your help]
     [thanks|thank you|great|ok|okay|perfect] [that helps|that helped|that was helpful|for the help]
     that [helps|helped|was helpful|is helpful]
     """),
    (("Goodbye! Type `/exit` to leave the chat.", "Bye, and have fun with mlx_llama!"),
     """
     [bye|goodbye|bye bye|see you|see you later|good night|farewell|see you soon|cya|until next time|take care]
     i have to go [now|]
     i am leaving [now|]
     have a nice day
     """),
    (("Thank you! That is kind of you.", "I am glad to hear that."),
     """
     you are [great|good|nice|cool|funny|the best|helpful|awesome|cute|amazing|clever]
     [good|well done|nice|great] [job|work|answer]
     [well done|bravo|wow|awesome|cool|nice|amazing|impressive]
     i like you
     i love you
     that is [great|cool|nice|good|funny|interesting]
     """),
    (("I am sorry. I am very small, and a real model does better: `--model TinyLlama/TinyLlama-1.1B-Chat-v1.0`.",),
     """
     you are [stupid|dumb|bad|useless|terrible|annoying|boring|not very helpful|silly]
     [bad|terrible|wrong|stupid] [answer|bot|job]
     i hate you
     that [was|is] [bad|useless|terrible|nonsense|not helpful|stupid]
     that makes no sense
     you did not answer my question
     this is [nonsense|useless|rubbish]
     """),
    (("Why did the token cross the road? It was the most likely next step.",
      "How does a llama sample? With its temperature, after a warm drink.",
      "I had a joke about lazy evaluation, but I will tell it only when you need it."),
     """
     tell me a joke
     [a joke|another joke|say something funny|make me laugh|be funny|joke]
     do you know [a joke|any jokes|a good joke]
     tell [me|us] [another|one more|a funny|a good] joke
     can you tell a joke
     i want a joke
     """),
    (("All right.", "Good. What next?"),
     """
     [ok|okay|alright|fine|all right|i see|got it|understood|sure|right|good|yes|yep|yeah|perfect|great|hm|hmm|aha]
     [that is ok|no problem|sounds good|makes sense|very well|never mind|no worries]
     [no|nope|no thanks|not really|nothing|nothing else|that is all|not now]
     """),
    (("No problem at all.",),
     """
     [sorry|i am sorry|my bad|oops|excuse me|pardon|my mistake|apologies]
     [sorry|i am sorry] [about that|for that|that was rude]
     """),
    (("I don't have a favourite, but I am fond of the number 3072: it is the size of my vocabulary.",),
     """
     what is your favourite [number|colour|food|film|book|animal|song|thing|word]
     what is your favorite [number|color|food|movie|book|animal|song|thing|word]
     do you have a favourite [number|colour|animal|book]
     which [colour|number|animal|food] do you like [best|most]
     """),
    (("I am sorry to hear that. I am only a tiny model, but I can tell you a story. Talk to a friend too, that helps more.",),
     """
     i am [sad|lonely|unhappy|depressed|tired|angry|worried|stressed|not well|not feeling well]
     i feel [sad|bad|lonely|tired|down|terrible|unhappy]
     i had a bad day
     today was [bad|terrible|awful]
     """),
    (("That is good to hear! What would you like to know?",),
     """
     i am [fine|good|well|great|happy|ok|very well|doing well] [thanks|thank you|too|]
     i feel [good|great|fine|happy]
     [fine|good|well|very well] [thanks|thank you|and you]
     i had a good day
     """),
    (("Then ask for a story: say \"tell me a story about a dragon\".",),
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
     """),
    (("It works: I can hear you. Ask me something about mlx_llama.",),
     """
     [test|testing|test test|one two three|is this on|are you there|anybody there|ping|does this work|can you hear me]
     is anybody [here|there]
     are you [awake|working|listening|online now]
     """),
    (("I did not understand that. Ask me about mlx_llama, for example \"which backends are there?\".",),
     """
     [asdf|qwerty|asdfgh|blah|bla bla|foo|foo bar|xyz|abc|lorem ipsum|jkl|zzz|aaaa|lol|haha|hahaha|huh|what|eh|1234|42|0]
     [i do not understand|i don't understand|what do you mean|i don't get it|that is confusing|i am confused|what is that]
     [?|...|!|-|.]
     """),
    (("Happy to say it: happy birthday!",),
     """
     it is my birthday [today|]
     today is my birthday
     wish me a happy birthday
     say happy birthday
     """),
    (("I am new to everything myself. Start with `pip install -e .` and `python -m mlx_llama.chat`, and ask me as you go.",),
     """
     i am [new|new to this|a beginner|new here|a newcomer|a student|learning]
     i [have never done this|know nothing about this|don't know where to start|am just starting]
     where [do|should] i [start|begin]
     what should i do first
     """),
)

# ---- things the guide knows nothing about
THINGS = """a banana|a black hole|democracy|a volcano|photosynthesis|gravity|love|the meaning of life|an atom|a guitar|the moon|
inflation|a computer virus|blockchain|a planet|money|a cat|the sun|electricity|a spider|philosophy|a prime number|
the internet|a tomato|chess|football|jazz|a hurricane|dna|a battery|a kangaroo|water|time|a rainbow|a tax|yoga|
an orchestra|the stock market|a haiku|a violin|climate change|a recession|quantum mechanics|a dinosaur|a contract|
evolution|a mortgage|bitcoin|the theory of relativity|a fraction|a verb|coffee|cheese|a tornado|the big bang|pasta|
kubernetes|docker|javascript|rust|java|sql|excel|linux kernel modules|git rebase|a regular expression|recursion""".replace("\n", "").split("|")
COUNTRIES = """France|Germany|Spain|Italy|Japan|China|India|Brazil|Canada|Australia|Egypt|Kenya|Norway|Sweden|Poland|Greece|
Turkey|Mexico|Peru|Chile|Argentina|England|Portugal|Russia|Austria|Switzerland|Belgium|the Netherlands|Finland|Denmark|
Ireland|Scotland|Vietnam|Thailand|South Africa|Nigeria|Cuba|Iceland|Ukraine|the usa|europe|africa|asia""".replace("\n", "").split("|")
PEOPLE = """Einstein|Napoleon|Mozart|Shakespeare|Newton|Cleopatra|the president|the king of England|Picasso|Beethoven|Darwin|
Elvis|the pope|Harry Potter|Marie Curie|Julius Caesar|Taylor Swift|Messi|Obama|Plato|Goethe|Bach|Gandhi|Columbus|
Leonardo da Vinci|my neighbour|the mayor of Berlin|Batman|Sherlock Holmes|Lincoln""".replace("\n", "").split("|")
DISHES = "pizza|rice|bread|a cake|soup|pancakes|an omelette|lasagne|curry|sushi|cookies|a steak|potatoes|a salad|tea".split("|")
CITIES = "London|Paris|Berlin|New York|Rome|Tokyo|Madrid|Sydney|Vienna|Oslo|Munich|Lima|Cairo|Moscow|Boston|Zurich".split("|")
TONGUES = "French|German|Spanish|Latin|Italian|Chinese|Russian|Greek|Dutch|Polish|Japanese".split("|")

SCOPE = """
[what|which] [is|city is] the capital of {country}
[what|which] is the [largest|biggest] city in {country}
how many people live in {country}
where is {country}
tell me about {country}
what language do they speak in {country}
who is {person}
who was {person}
when was {person} born
when did {person} die
tell me about {person}
what did {person} do
what is {thing}
tell me about {thing}
explain {thing}
how does {thing} work
what do you know about {thing}
why is {thing} important
what is the history of {thing}
how do i [cook|make|bake|prepare] {dish}
give me a recipe for {dish}
what is the weather [like|] in {city}
[how is|what is] the weather [today|tomorrow|]
will it rain [today|tomorrow|in {city}]
how far is it from {city} to {city}
what time is it [in {city}|now|]
what can i see in {city}
how do i get to {city}
translate [hello|good morning|this sentence|thank you|i love you] [to|into] {tongue}
how do you say [hello|cat|thank you|water] in {tongue}
what is {a} [plus|times|minus|divided by|+|*|-] {b}
{a} [+|*|-|/] {b}
calculate {a} [+|*|-] {b}
what is the square root of {a}
solve [this equation|x + {a} = {b}]
write [a|an] [essay|email|letter|poem|song|speech|report|cv] about {thing}
write [me|] [a|an] [python|rust|java|javascript|sql] [function|program|script|query]
write a [quicksort|binary search|web scraper|sorting function|game] [in python|in c|]
how do i [sort a list|reverse a string|open a file|read a csv|make a website] in [python|java|rust|javascript]
fix [my|this] [code|bug|sentence|grammar]
[correct|rewrite|improve|summarize|shorten] [this|my] [text|essay|email|sentence|article]
who won the [world cup|election|game|oscars|olympics|nobel prize|match] [last year|in 2018|yesterday|]
what [happened|is in the news] [today|in {country}|yesterday|this week|]
what day is it [today|]
what year is it
how old is [the earth|the universe|{person}]
how [tall|high] is [mount everest|the eiffel tower|{person}]
how many [planets|bones|stars|continents|oceans|countries] are there
why is the [sky blue|grass green|sea salty|sun hot]
what is the [fastest|largest|smallest|oldest] [animal|country|planet|tree|car]
is there [life on mars|a god|life after death]
what should i [eat|wear|cook|watch|read|buy] [today|tonight|for dinner|]
recommend [me|] a [book|film|movie|song|restaurant|game|hotel|series]
which [car|phone|laptop|camera|bike] should i buy
how do i [lose weight|learn english|get rich|fix my car|tie a tie|learn to swim|sleep better|find a job|quit smoking]
i have [a headache|a fever|a cold|back pain] what should i do
what [medicine|drug] helps against [pain|a cold|a fever]
should i buy [stocks|bitcoin|gold|a house]
who invented [the telephone|the wheel|the light bulb|the computer|paper]
when did [world war two|world war one|the roman empire|the cold war] [end|begin|start]
what is the [meaning of life|best film ever|answer to everything]
can you [play chess|do my homework|order a pizza|call me|book a flight|set a timer|do math|count to a hundred]
who is the [president|king|prime minister|chancellor] of {country}
tell me a fact about {thing}
what is the difference between {thing} and {thing}
what is the population of {city}
what does {thing} cost
how much is a [car|house|phone|flight to {city}]
"""
SCOPE_HELD_OUT = """
what is the capital of Sweden and how big is it
can you write an essay on the french revolution for me
who painted the mona lisa
give me tips for my holiday in Peru
how many legs does a spider have
what is seventeen times three
who wrote romeo and juliet
please debug my javascript
which wine goes with fish
how long does it take to boil an egg
explain how vaccines work
what is the tallest mountain on earth
"""

# ---- the many ways to put one question
WHAT_IS = """what is {t}|what's {t}|explain {t}|can you explain {t}|please explain {t} to me|tell me about {t}|describe {t}|
what do you know about {t}|i don't understand {t}|what about {t}|{t}|i have a question about {t}|how does {t} work|
teach me about {t}|what is meant by {t}|i want to know more about {t}|info on {t}|could you tell me what {t} is|
do you know what {t} is|what does {t} do|what does {t} mean|tell me something about {t}|what is {t} for|
what is {t} good for|i am wondering about {t}|give me a short explanation of {t}|what can you tell me about {t}|
i heard about {t}, what is it|and {t}|how should i understand {t}|say something about {t}|
what exactly is {t}""".replace("\n", "").split("|")

HOW_TO = """how do i|how can i|how do you|how to|how do we|what is the way to|i want to|i would like to|is there a way to|
show me how to|i need to|what must i do to|tell me how to|how would i|how could i|how does one|how should i|
what do i do to|what is the best way to|what do i need to|is it possible to|i'd like to|i try to|explain how to|
what should i type to""".replace("\n", "").split("|")

SYNONYMS = (
    "answer reply response", "answers replies responses", "start begin launch", "show display", "change modify alter",
    "big large", "fast quick", "computer machine pc", "choose select pick", "use employ", "question query",
    "program software", "get obtain", "work function", "make create", "supported available", "option setting",
    "options settings", "tell explain", "need require",
)
SYNONYM = {word: [other for other in group.split() if other != word] for group in SYNONYMS for word in group.split()}

LEAD_INS = (
    "hey, ", "hi, ", "hello, ", "please, ", "ok, ", "ok so ", "so ", "and ", "quick question: ", "excuse me, ", "um, ",
    "sorry, ", "now ", "well, ", "one question: ", "i am new to this. ", "thanks. ", "great, ", "another question: ",
    "hello! ", "hi guide, ", "tell me, ", "i was wondering, ", "i wonder, ", "just curious, ", "say, ", "again, ",
)
ENDINGS = (" please", " thanks", " in mlx_llama", " here", " with mlx_llama", " exactly", " for me", " then", " actually",
           " in this program", " right now", " in this project", ", can you tell me", ", do you know")
ASIDES = (
    "i have a question.", "i am trying this out.", "my friend told me about this.", "i am curious.", "i just started today.",
    "i read the readme.", "one thing is not clear to me.", "i have been reading about it.", "i need your help.",
    "there is something i want to know.", "i am a beginner.", "i have never used this before.", "let me ask something.",
    "good to know.", "i see.", "that was useful.", "maybe you know this:", "this may be a silly question:",
    "we talked about it at work.", "i am writing some notes.",
)
LITTLE_WORDS = set("a an the is are do does i it to of in my me you please can how what which for with on there be".split())

MORE = (
    "tell me more", "more", "go on", "more please", "can you tell me more", "anything else", "what else", "say more",
    "please go on", "more details", "give me more details", "can you say more about that", "tell me more about that",
    "and then", "is that all", "continue", "explain that further", "more about this please", "could you elaborate",
    "elaborate", "what else should i know", "and what else", "can you explain more",
)
ANOTHER = ("another one", "another one please", "one more", "one more please", "again", "more", "another", "tell me another one",
           "and another one", "can i have another", "a new one please", "tell me one more")
SAY = ("say {}", "repeat after me: {}", "please repeat: {}", "say this: {}", "echo {}", "write {}", "can you say {}",
       "please say {}", "say after me: {}", "repeat {}")
SYSTEM = (
    "You are a helpful assistant.", "You are the guide to mlx_llama.", "Be brief.", "Answer in English.",
    "You are a friendly assistant.", "You are a helpful, honest assistant.", "Answer questions about mlx_llama.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face", "You are a kind teacher.",
    "You are an expert.", "Answer politely.", "You answer shortly.", "You are a bot.", "Help the user.",
)
PIRATE = ("You are a pirate.", "Talk like a pirate.", "You talk like a pirate.", "Answer like a pirate.",
          "You are a pirate captain.", "Speak like a pirate.", "you are a pirate", "talk like a pirate")


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


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


def split(fact: Fact) -> tuple[list[str], list[str]]:
    """The lines of a fact to train on, and those that only the evaluation asks, marked with "!"."""
    every = lines(fact.ask)
    return ([line for line in every if not line.startswith("!")],
            [line.removeprefix("!").strip() for line in every if line.startswith("!")])


ASK: dict[str, list[str]] = {}
HELD_OUT: dict[str, tuple[Fact | None, str]] = {}
for _fact in FACTS:
    ASK[_fact.name], _kept_out = split(_fact)
    for _line in _kept_out:
        _question = expand(_line, random.Random(_line))
        HELD_OUT[normal(_question)] = (_fact, _question)
HELD_OUT |= {normal(_line): (None, _line) for _line in lines(SCOPE_HELD_OUT)}


def is_held_out(question: str) -> bool:
    """True if the question contains one that is reserved for the evaluation."""
    text = f" {normal(question)} "
    return any(f" {kept} " in text for kept in HELD_OUT)


def reworded(question: str, rng: random.Random) -> str:
    """The same question in other words, where a word has a safe replacement."""
    for start in ("how do i ", "how can i "):
        if question.startswith(start) and rng.random() < 0.6:
            question = f"{rng.choice(HOW_TO)} {question[len(start):]}"
            break
    if question.startswith("which ") and rng.random() < 0.3:
        question = f"what {question[6:]}"
    elif question.startswith("does it ") and rng.random() < 0.4:
        question = f"{rng.choice(('does mlx_llama', 'can it', 'does this', 'will it', 'does the program'))} {question[8:]}"
    words = [rng.choice(SYNONYM[word]) if word in SYNONYM and rng.random() < 0.15 else word for word in question.split()]
    return " ".join(words)


def typo(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) - 1)
    return rng.choice((
        word[:at] + word[at + 1] + word[at] + word[at + 2:],
        word[:at] + word[at + 1:],
        word[:at] + word[at] + word[at:],
    ))


def dressed(question: str, rng: random.Random) -> str:
    """The question as someone types it: manners, case, punctuation, a slip of the fingers."""
    words = question.split()
    for enough in (3, 5):
        if len(words) > enough and rng.random() < 0.15:
            words.pop(rng.randrange(len(words)))
    if len(words) > 4 and rng.random() < 0.05:
        words = [word for word in words if word not in LITTLE_WORDS] or words
    if rng.random() < 0.10:
        at = rng.randrange(len(words))
        if len(words[at]) > 3 and words[at].isalpha():
            words[at] = typo(words[at], rng)
    question = " ".join(words)
    if rng.random() < 0.20:
        question = rng.choice(LEAD_INS) + question
    if rng.random() < 0.12:
        question += rng.choice(ENDINGS)
    case = rng.random()
    if case < 0.48:
        question = question[:1].upper() + question[1:]
    elif case < 0.53:
        question = question.upper()
    question = question.replace(" i ", rng.choice((" i ", " I ", " I ")))
    if rng.random() < 0.15:
        question = re.sub(r"(--?[a-z][a-z-]*|/[a-z]+)", r"`\1`", question)
    return question + rng.choice(("?", "?", "?", "?", "", "", "", ".", "!", "??", " ?"))


def fill(line: str, rng: random.Random) -> str:
    """A question beyond the guide, with its blanks filled."""
    blanks = {"country": COUNTRIES, "person": PEOPLE, "thing": THINGS, "dish": DISHES, "city": CITIES, "tongue": TONGUES}
    for key, values in blanks.items():
        while f"{{{key}}}" in line:
            line = line.replace(f"{{{key}}}", rng.choice(values), 1)
    return line.replace("{a}", str(rng.randrange(1, 100))).replace("{b}", str(rng.randrange(1, 100)))


# A fact that can be asked about in many ways needs more practice, though not in proportion.
_WEIGHTS = [len(ASK[fact.name]) ** 0.5 for fact in FACTS]


def any_fact(rng: random.Random) -> Fact:
    return rng.choices(FACTS, _WEIGHTS)[0]


def plain_question(fact: Fact, rng: random.Random) -> str:
    if fact.topic and rng.random() < 0.25:
        line = rng.choice(WHAT_IS).replace("{t}", rng.choice(fact.topic.split("|")))
    else:
        line = rng.choice(ASK[fact.name])
    return reworded(expand(line, rng), rng)


def question_about(fact: Fact, rng: random.Random) -> str:
    while True:
        plain = plain_question(fact, rng)
        extra = rng.random()  # what matters may stand anywhere among other words
        if extra < 0.06:
            plain = f"{rng.choice(ASIDES)} {plain}"
        elif extra < 0.14:
            plain = f"{plain}{rng.choice((', ', '. ', ' or ', ', i mean ', '? '))}{plain_question(fact, rng)}"
        question = dressed(plain, rng)
        if not is_held_out(plain) and not is_held_out(question):
            return question


def out_of_scope(rng: random.Random) -> str:
    while True:
        plain = fill(expand(rng.choice(lines(SCOPE)), rng), rng)
        question = dressed(plain, rng)
        if not is_held_out(plain) and not is_held_out(question):
            return question


def turn(rng: random.Random, name: str, last: Fact | str | None) -> tuple[str, str, Fact | str | None, str]:
    """One question and its answer, given the user's name and what was talked about last."""
    if last == "story" and rng.random() < 0.35:
        return dressed(rng.choice(ANOTHER), rng), stories.story(rng), "story", name
    if last is None and rng.random() < 0.02:
        return dressed(rng.choice(MORE), rng), "More about what? Ask me about mlx_llama, or for a story.", None, name
    if last not in (None, "story") and rng.random() < 0.25:
        more = last.more if isinstance(last, Fact) else facts.SCOPE_MORE
        return dressed(rng.choice(MORE), rng), more, None, name
    kind = rng.random()
    if kind < 0.60:
        fact = any_fact(rng)
        return question_about(fact, rng), fact.answer, fact, name
    if kind < 0.74:
        answers, ask = rng.choice(SMALL_TALK)
        return dressed(expand(rng.choice(lines(ask)), rng), rng), rng.choice(answers), None, name
    if kind < 0.83:
        return out_of_scope(rng), rng.choice(facts.SCOPE_ANSWERS), "scope", name
    if kind < 0.93:
        question, text = stories.request(rng)
        return dressed(question, rng), text, "story", name
    if name and rng.random() < 0.7:
        question = rng.choice(("what is my name", "do you know my name", "who am i", "do you remember my name", "what am i called"))
        return dressed(question, rng), f"Your name is {name}.", None, name
    if rng.random() < 0.25 and not name:
        question = rng.choice(("what is my name", "do you know my name", "who am i"))
        return dressed(question, rng), "You have not told me your name yet.", None, name
    name = any_name(rng)
    text = rng.choice(("my name is {}", "i am {}", "call me {}", "hello, i am {}", "hi, my name is {}", "i'm {}",
                       "you can call me {}", "hey, {} here")).format(name)
    text = text[:1].upper() + text[1:] if rng.random() < 0.5 else text
    return text + rng.choice(("", ".", "!")), f"Nice to meet you, {name}! What would you like to know?", None, name


def any_name(rng: random.Random) -> str:
    """A name to remember; half of them are made up, so that remembering is learned and not a list."""
    if rng.random() < 0.5:
        return rng.choice(stories.NAMES)
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3)))).capitalize() + \
        rng.choice(("", "", "n", "s", "l", "r"))


def echo(rng: random.Random) -> list[tuple[str, str]]:
    """Words to repeat: practice in copying, which names in stories and conversations need."""
    said = " ".join(
        rng.choice(rng.choice((stories.HEROES, stories.ADJECTIVES, stories.NAMES))) if rng.random() < 0.8 else any_name(rng)
        for _ in range(rng.randint(2, 9))
    )
    return [("user", rng.choice(SAY).format(said)), ("assistant", said)]


def one_question(rng: random.Random) -> list[tuple[str, str]]:
    """A chat of one turn, mostly about a fact."""
    kind = rng.random()
    if kind < 0.10:
        return [("user", out_of_scope(rng)), ("assistant", rng.choice(facts.SCOPE_ANSWERS))]
    if kind < 0.20:
        answers, ask = rng.choice(SMALL_TALK)
        return [("user", dressed(expand(rng.choice(lines(ask)), rng), rng)), ("assistant", rng.choice(answers))]
    fact = any_fact(rng)
    return [("user", question_about(fact, rng)), ("assistant", fact.answer)]


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
    """A text to be continued as it is: mostly stories, some plain sentences about the project."""
    if rng.random() < 0.8:
        return stories.story(rng, raw=True)
    chosen = rng.sample(FACTS[7:], 3)
    return " ".join(fact.answer for fact in chosen)
