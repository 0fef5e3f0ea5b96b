"""Names, words and numbers to repeat, at once or later. Most are made up, so that copying is learned and not a list."""

import random
import re
from functools import cache
from pathlib import Path

from . import stories
from .facts import lines

Message = tuple[str, str]

ONSETS = """b c d f g h j k l m n p r s t v w z b d f g k l m n p r s t v bl br ch cl cr dr dw fl fr gl gn gr kh kj kl kn kr kw lh ll mb
ng nd ph pl pr ps qu rh sc sch sh shr sk sl sm sn sp spr st str sv sw sz th thr tr ts tsch tw vl vr wh wr x xh y zb zd zh zw""".split()
VOWELS = "a e i o u a e i o u a e i o u y aa ae ai ao au ay ea ee ei eo eu ey ia ie io iu oa oe oi oo ou oy ua ue ui uo yo".split()
CODAS = ["", "", "", "", *"b ck d f g h k l ld ll lt m mp n nd ng nk nn nt p r rd rg rk rm rn rs rt s sh ss st t th tt v w x z tz".split()]
ACCENTS = {"a": "áàâäåã", "e": "éèêë", "i": "íî", "o": "óöôø", "u": "úüû", "c": "çć", "n": "ñń", "s": "šś", "z": "žż", "l": "ł"}

SAY = lines("""
say {}
please say {}
can you say {}
could you say {} for me
i want you to say {}
say the following: {}
say after me: {}
say exactly this: {}
now say {}
just say {}
say {} please
say {}, nothing else
let me hear you say {}
repeat {}
repeat after me: {}
please repeat: {}
repeat this: {}
repeat this word: {}
repeat the following text: {}
repeat what i type: {}
can you repeat {}
would you repeat {} for me
i say {}, you repeat it
echo {}
echo this back: {}
echo back {}
write {}
write down {}
write this: {}
please write {} for me
write nothing but {}
type {}
type this for me: {}
copy this: {}
copy the text {}
copy out {}
make a copy of {}
print {}
print this line: {}
output {}
output only {}
answer with {}
answer just with {}
reply with {}
your whole reply should be {}
respond with the text {}
give me back {}
give {} back to me
send me {} back
return {}
parrot this: {}
be a parrot: {}
can you spell out {}
show me the text {}
display {}
put {} in your next message
tell me {} again
read this aloud: {}
read out {}
mirror my words: {}
the text to repeat is {}
here is a text, send it back: {}
this is a test of copying: {}
i will write something and you write it too: {}
do as i do: {}
same again please: {}
{}. now you say it
{} - please repeat that
""")
NAMED = lines("""
my name is {}
my name is {}
i am {}
i'm {}
call me {}
you can call me {}
please call me {}
people call me {}
everybody calls me {}
my friends call me {}
they call me {}
i am called {}
i go by {}
i go by the name of {}
hello, i am {}
hello, i'm {}
hello my name is {}
hi, my name is {}
hi i'm {}
hi, it's {}
hey, {} here
hey, i am {}
{} here
{} is my name
{} is what they call me
good morning, i am {}
good evening, my name is {}
my name's {}
the name is {}
the name's {}
name: {}
my first name is {}
this is {}
this is {} speaking
it is me, {}
may i introduce myself, i am {}
let me introduce myself: {}
i was born as {}
my parents named me {}
you are talking to {}
you are speaking with {}
for you i am {}
just call me {}
nice to meet you, i am {}
nice to meet you too, my name is {}
remember my name, it is {}
please remember that my name is {}
""")
WHO = lines("""
what is my name
what's my name
whats my name
what was my name
what was my name again
what's my name again
do you know my name
do you still know my name
do you remember my name
can you remember my name
can you tell me my name
could you repeat my name
tell me my name
say my name
please say my name
write my name
what am i called
how am i called
who am i
do you know who i am
do you remember who i am
which name did i tell you
what name did i give
how did i introduce myself
who are you talking to
whom are you talking to
did i tell you my name
my name, please
""")
# {k}: what it is, such as "word" or "lucky number"; {x}: the thing.
TOLD = lines("""
please remember the {k} {x}
remember the {k} {x}
remember this {k}: {x}
try to remember the {k} {x}
remember: the {k} is {x}
remember that my {k} is {x}
remember {x}, that is my {k}
can you remember a {k}? it is {x}
my {k} is {x}
my {k}: {x}
the {k} is {x}
the {k} is {x}, do not forget it
the {k} for today is {x}
our {k} is {x}
keep the {k} {x} in mind
keep in mind that the {k} is {x}
keep this {k} for me: {x}
do not forget the {k} {x}
don't forget my {k}, {x}
note the {k} {x}
take a note: {k} {x}
make a note of my {k}: {x}
i tell you my {k}: {x}
i give you a {k}, {x}
here is a {k} for you: {x}
here is my {k}: {x}
i chose {x} as {k}
i am thinking of the {k} {x}
{x} is my {k}
{x} is the {k}
let {x} be the {k}
let us say that the {k} is {x}
for later: the {k} is {x}
learn this {k} by heart: {x}
store the {k} {x} in your head
i will ask you later for my {k}, which is {x}
""")
ASKED = lines("""
which {k} did i tell you
which {k} did i say
which {k} did i give you
which {k} should you keep in mind
what {k} was it
what {k} did i mention
what is the {k}
what is my {k}
what was the {k}
what was my {k}
what was my {k} again
what's the {k} again
what's my {k}
whats my {k}
do you remember the {k}
do you remember my {k}
do you still know the {k}
do you still have my {k}
can you tell me my {k}
could you tell me the {k} once more
tell me the {k} again
tell me my {k}
give me the {k}
give me back my {k}
now say the {k}
and the {k} was
so what is my {k}
i forgot my {k}, what is it
what did i tell you about my {k}
repeat the {k} please
the {k}, please
name the {k}
""")
# (statements about the user, questions for them, kind of {x}): each has questions of its own, unlike TOLD and ASKED.
FREE = [tuple(part.split(" ; ") for part in line.split(" => ")) for line in lines("""
i live in {x} ; my home is in {x} ; i am from {x} ; i come from {x} ; we live in {x} ; home for me is {x} => where do i live ; in which city do i live ; which town am i from ; where am i from ; where is my home => word
i have a dog. his name is {x} ; i have a dog. her name is {x} ; i have a dog called {x} ; my dog is called {x} ; our dog is {x} ; my dog's name is {x} ; this is my dog {x} => what is my dog's name ; what is my dog called ; what was the dog's name again ; how is my dog called => name
i have a cat. her name is {x} ; i have a cat named {x} ; my cat is called {x} ; our cat is {x} ; my cat's name is {x} => what is my cat's name ; what is my cat called ; what's the name of my cat ; what do i call my cat => name
my sister is called {x} ; my sister's name is {x} ; i have a sister, {x} ; {x} is my sister => what is my sister's name ; what is my sister called ; who is my sister => name
my brother is called {x} ; my brother's name is {x} ; i have a brother, {x} ; {x} is my brother => what is my brother's name ; what is my brother called ; who is my brother => name
my wife is called {x} ; my wife's name is {x} ; {x} is my wife => what is my wife's name ; what is my wife called ; who is my wife => name
my husband is called {x} ; my husband's name is {x} ; {x} is my husband => what is my husband's name ; what is my husband called => name
my son is called {x} ; my son's name is {x} ; we have a son, {x} => what is my son's name ; what is my son called => name
my daughter is called {x} ; my daughter's name is {x} ; our daughter is {x} => what is my daughter's name ; what is my daughter called => name
my boss is called {x} ; my boss's name is {x} ; i work for {x} => what is my boss's name ; what is my boss called ; for whom do i work => name
my friend is called {x} ; my best friend is {x} ; i have a friend, {x} => what is my friend's name ; who is my best friend ; what is my friend called => name
my horse is called {x} ; i have a horse named {x} => what is my horse's name ; what is my horse called => name
our project is called {x} ; we call our project {x} ; i work on a project named {x} ; the project's name is {x} => what is our project called ; what was the name of our project ; what is the project's name ; which project do i work on => word
our team is called {x} ; our company is called {x} ; i work at {x} ; i work for a company called {x} => where do i work ; what is our company called ; what is our team called => word
my computer is called {x} ; my laptop is named {x} ; the host name is {x} ; our server is called {x} => what is my computer called ; what is my laptop's name ; what is the host name => word
my machine has {x} GB of memory ; i have {x} GB of RAM ; there are {x} gigabytes in my laptop ; my laptop has {x} gb of memory => how much memory does my machine have ; how much memory did i say my machine has ; how much RAM do i have, as i told you ; how many gigabytes did i say i have => number
my processor has {x} cores ; my machine has {x} cores ; i told you that i have {x} cores => how many cores did i say i have ; how many cores does my machine have, as i told you => number
i am {x} years old ; i'm {x} years old ; my age is {x} ; i turn {x} today => how old am i ; what is my age ; how many years old did i say i am => number
i was born in {x} ; my birth year is {x} => when was i born ; in which year was i born => number
i have {x} children ; i have {x} books ; i own {x} chickens => how many did i say i have ; what number did i say => number
my door has the number {x} ; i live at number {x} ; my house is number {x} => at which number do i live ; what is my door's number ; which house is mine => number
the meeting is at {x} ; our meeting begins at {x} => when is the meeting ; at what time is our meeting => number
my favourite number is {x} ; i like the number {x} best => which number do i like best ; what is my favourite number ; which number do i like => number
i like {x} ; my favourite colour is {x} ; i like the colour {x} ; {x} is the colour i like => what colour do i like ; which colour do i like ; what is my favourite colour ; which colour did i say i like => word
i like to eat {x} ; my favourite food is {x} ; i love {x} for dinner => what do i like to eat ; what is my favourite food ; which food did i say i like => word
i play the {x} ; my instrument is the {x} => which instrument do i play ; what do i play => word
i study {x} ; my subject is {x} ; i am a student of {x} => what do i study ; which subject is mine => word
i drive a {x} ; my car is a {x} ; i bought a {x} => what do i drive ; which car do i have ; what did i buy => word
i work as a {x} ; i am a {x} by trade ; my job is {x} => what is my job ; what do i work as ; what do i do for a living => word
i speak {x} ; my language is {x} => which language do i speak ; what language did i say i speak => word
my street is {x} ; i live in {x} street => in which street do i live ; what is my street called => word
the word of the day is {x} ; today's word is {x} => what is the word of the day ; what is today's word => word
the password is {x} ; the secret is {x} => what is the password ; what was the secret => code
my ticket is {x} ; my booking is {x} => what is my ticket ; which booking is mine => code
""")]
WORDS = """word secret word code word magic word password|colour|city|town|street|animal|dog's name|cat's name|team|project's name
favourite word|favourite colour|favourite food|favourite animal|favourite city|village|hero|nickname|keyword|term|term of the day|user name
boat's name|friend's name|planet""".replace("\n", "|").replace("word secret word code word magic word", "word|word|word|secret word|code word|magic word")
NUMBERS = "number|number|number|lucky number|room number|code|secret number|pin|age|year|score|house number|order number|favourite number|amount"
CODES = "code|order code|key|ticket|number plate|reference|serial number"


@cache
def english() -> list[str]:
    """Words of the users' questions."""
    folder = Path(__file__).parent
    text = " ".join((folder / name).read_text(encoding="utf-8") for name in ("newcomers.txt", "newcomers2.txt", "offtopic.txt"))
    return sorted(set(re.findall(r"(?<![\w{/`-])[a-z]{3,11}(?![\w}/`-])", text)))


def made_up(rng: random.Random, most: int = 3) -> str:
    kind = rng.random()
    if kind < 0.6:
        return "".join(rng.choice(ONSETS + [""]) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(rng.randint(1, most)))
    if kind < 0.85:  # halves of two words
        one, two = rng.choice(english()), rng.choice(english())
        return one[: rng.randint(1, 4)] + two[-rng.randint(2, 5):]
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))


def any_name(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(stories.NAMES)
    name = made_up(rng).capitalize() + rng.choice(("", "", "", "n", "s", "l", "r", "a", "o"))
    if rng.random() < 0.06:
        name = "".join(rng.choice(ACCENTS[letter]) if letter in ACCENTS and rng.random() < 0.5 else letter for letter in name)
    if rng.random() < 0.1:
        name += rng.choice((" ", " ", "-")) + made_up(rng, 2).capitalize()
    return name if rng.random() < 0.9 else name.lower()


def any_number(rng: random.Random) -> str:
    digits = "".join(rng.choice("0123456789") for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8))))
    if rng.random() < 0.1 and len(digits) > 2:
        at = rng.randrange(1, len(digits))
        return digits[:at] + rng.choice(".,:-/ ") + digits[at:]
    return digits if rng.random() < 0.1 else digits.lstrip("0") or "0"


def any_word(rng: random.Random) -> str:
    word = rng.choice(english()) if rng.random() < 0.45 else made_up(rng)
    return word.capitalize() if rng.random() < 0.15 else word.upper() if rng.random() < 0.05 else word


def any_code(rng: random.Random) -> str:
    text = "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") for _ in range(rng.randint(2, 7)))
    at = rng.randrange(1, len(text))
    return text if rng.random() < 0.6 else text[:at] + "-" + text[at:]


def any_text(rng: random.Random) -> str:
    """One to six things."""
    kinds = (any_word, any_word, any_word, any_name, any_number, any_code)
    return " ".join(rng.choice(kinds)(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4, 6))))


def written(text: str, thing: str, rng: random.Random, ends: tuple[str, ...] = ("", "", ".", "!")) -> str:
    """The text with or without a capital and an end; the thing stays."""
    if rng.random() < 0.6 and not text.startswith(thing):
        text = text[:1].upper() + text[1:]
    return text.replace(" i ", rng.choice((" i ", " I "))) + rng.choice(ends)


def introduction(rng: random.Random) -> tuple[str, str, str]:
    """The user tells a name: (text, answer, name)."""
    name = any_name(rng)
    return (written(rng.choice(NAMED).format(name), name, rng, ("", ".", ".", "!")),
            f"Nice to meet you, {name}! What would you like to know?", name)


def echo(rng: random.Random) -> tuple[list[Message], str]:
    """(messages, text to repeat). The answer has the text after a space, as questions do: the same pieces stand for it."""
    said = any_text(rng)
    if rng.random() < 0.3:
        quotes = rng.choice(('""', '""', "''", "``", "()"))
        said = quotes[0] + said + quotes[1]
    return [("user", written(rng.choice(SAY).format(said), said, rng, ("",))), ("assistant", f"Here you go: {said}")], said


def told(rng: random.Random) -> tuple[str, str, str, str, str]:
    """Something to remember: (statement, reply to it, question for it, reply to that, thing)."""
    kind = rng.random()
    if kind < 0.4:
        text, answer, name = introduction(rng)
        return text, answer, rng.choice(WHO), f"Your name is {name}.", name
    if rng.random() < 0.45:
        statements, questions, (what,) = rng.choice(FREE)
        thing = {"word": rng.choice((any_word, any_word, any_name)), "name": any_name, "number": any_number, "code": any_code}[what](rng)
        text = written(rng.choice(statements).replace("{x}", thing), thing, rng)
        return text, f"I will remember it: {thing}.", rng.choice(questions), f"It was {thing}.", thing
    names, make = ((WORDS, rng.choice((any_word, any_word, any_name))) if kind < 0.68 else (NUMBERS, any_number) if kind < 0.93
                   else (CODES, any_code))
    what, thing = rng.choice(names.split("|")), make(rng)
    text = written(rng.choice(TOLD).format(k=what, x=thing), thing, rng)
    return text, f"I will remember it: {thing}.", rng.choice(ASKED).format(k=what), f"It was {thing}.", thing


def memory(rng: random.Random, between: list[Message]) -> tuple[list[Message], str]:
    """The user tells one or two things and asks for one, at once or some turns later: (messages, that thing)."""
    one, two = told(rng), told(rng)
    if rng.random() < 0.05:  # told nothing
        ask, said = one[2], one[3]
        answer = "You have not told me your name yet." if said.startswith("Your") else "You have not told me that yet."
        return [*between, ("user", written(ask, "\n", rng, ("?", "")))] + [("assistant", answer)], ""
    several = rng.random() < 0.3 and one[3].split(" is ")[0] != two[3].split(" is ")[0] and one[1].split(":")[0] != two[1].split(":")[0]
    statements = [one, two] if several else [one]
    statement, _, ask, recalled, thing = rng.choice(statements)
    ask = written(ask, "\n", rng, ("?", "?", "?", "", "."))
    if rng.random() < 0.2:
        texts = [text.rstrip(".!") for text, *_ in statements]
        text = f"{' and '.join(texts)}." if rng.random() < 0.4 else " ".join(f"{text}." for text in texts)
        return [("user", f"{text} {ask}"), ("assistant", recalled)], thing
    messages = [message for text, reply, *_ in statements for message in (("user", text), ("assistant", reply))]
    return [*messages, *between, ("user", ask), ("assistant", recalled)], thing
