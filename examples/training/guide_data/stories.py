"""Little stories, from a grammar: a hero, a place, a wish or a trouble, and a good end."""

import random

CREATURES = """fox bear cat dog mouse rabbit owl frog duck turtle squirrel hedgehog dragon robot princess prince wizard
knight pirate boy girl bird horse pony sheep goat pig cow hen wolf lion tiger elephant monkey giraffe zebra whale
dolphin fish crab snail bee ant butterfly ladybug spider bat beaver otter penguin seal polar-bear kitten puppy lamb
ghost giant fairy elf witch mermaid unicorn dinosaur monster snowman baker farmer sailor painter teacher queen king
child gardener llama camel donkey parrot crow swan goose snake lizard mole badger deer kangaroo koala panda""".split()
THINGS = """train boat car plane rocket star moon cloud tree flower leaf river teapot clock book lamp shoe hat computer
toaster kite balloon pumpkin apple potato cookie spoon button doll bicycle lighthouse cactus mushroom raindrop
snowflake""".split()
HEROES = CREATURES + THINGS
SHE_HEROES = "princess girl hen cow fairy witch mermaid queen".split()
HE_HEROES = "prince boy wizard king snowman".split()

ADJECTIVES = """little small brave shy curious clever kind sleepy happy tiny lonely gentle merry quiet young old
proud hungry grumpy friendly cheerful silly""".split()

SHE_NAMES = """Mia Lily Anna Ella Nina Rosa Ida Luna Ruby Clara Daisy Greta Nora Tilly Emma Sophie Zoe Alice Maya Eva
Kate Julia Laura Sara Lena Amy Iris Olga Maria Ana Carla Elena Yuki Mei Fatima Leila Priya Astrid Freya Ingrid Chloe
Hannah Molly Bella Martha Vera""".split()
HE_NAMES = """Tom Ben Max Sam Leo Finn Otto Pip Milo Oscar Theo Hugo Felix Jack Paul Oliver Noah Lucas Henry Jonas Adam
Simon Peter Mark David Daniel Karl Bruno Ivan Pedro Luis Marco Kenji Chen Ali Omar Ravi Arjun Sven Lars Erik Pierre
Bob George Walter Frank""".split()
NAMES = SHE_NAMES + HE_NAMES

PLACES = (
    "at the edge of a dark forest",
    "in a village by the sea",
    "on a green hill",
    "near a quiet lake",
    "in an old house with a red door",
    "in a small town",
    "under a big oak tree",
    "by a wide river",
    "in a garden full of roses",
    "high in the mountains",
    "on a tiny island",
    "beside a windmill",
)
TREASURES = (
    "red ball",
    "silver bell",
    "blue scarf",
    "golden key",
    "little drum",
    "paper boat",
    "wooden flute",
    "shiny stone",
    "warm hat",
    "round mirror",
    "striped umbrella",
    "music box",
)
HIDING_PLACES = (
    "under the bridge",
    "behind the old well",
    "in an empty nest",
    "between the roots of a tree",
    "in the tall grass",
    "on top of a haystack",
    "at the bottom of a basket",
    "beside the sleepy river",
)
FOODS = (
    "apple pie",
    "honey cake",
    "loaf of bread",
    "pot of soup",
    "bowl of berries",
    "pancake",
    "plum",
    "cookie",
)
SOUNDS = (
    "a soft tapping",
    "a strange humming",
    "a tiny bell",
    "someone crying",
    "a gentle song",
    "a funny whistle",
)
FEARS = ("the dark", "deep water", "thunder", "high places", "loud noises", "being alone")
WISHES = (
    "see the sea",
    "touch a cloud",
    "learn to sing",
    "find a rainbow",
    "fly just once",
    "climb the highest hill",
    "count all the stars",
    "dance in the snow",
)
MORALS = (
    "And from that day on they were the best of friends.",
    "That night the stars shone brighter than ever.",
    "And everyone in the village still tells the story.",
    "From then on, nobody there was ever lonely again.",
    "And they all went home happy, just in time for supper.",
    "Sometimes a little kindness is the greatest treasure of all.",
)


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" and not word.startswith("uni") else "a ") + word


def noun(word: str) -> str:
    return word.replace("-", " ")


def names_for(hero: str) -> list[str]:
    return SHE_NAMES if hero in SHE_HEROES else HE_NAMES if hero in HE_HEROES else NAMES


class Cast:
    """Who is in a story; whatever the asker named is kept."""

    def __init__(
        self,
        rng: random.Random,
        hero: str = "",
        adjective: str = "",
        name: str = "",
        friend: str = "",
    ):
        self.rng = rng
        self.hero = noun(hero or rng.choice(HEROES))
        self.adjective = adjective or rng.choice(ADJECTIVES)
        female = (
            name in SHE_NAMES
            if name
            else self.hero in SHE_HEROES or (self.hero not in HE_HEROES and rng.random() < 0.5)
        )
        self.name = name or rng.choice(SHE_NAMES if female else HE_NAMES)
        self.friend = noun(
            friend or rng.choice([other for other in CREATURES if noun(other) != self.hero])
        )
        self.friend_name = rng.choice(
            [other for other in names_for(self.friend) if other != self.name]
        )
        self.she, self.her = ("she", "her") if female else ("he", "his")

    def pick(self, *choices: str) -> str:
        return self.rng.choice(choices)


def opening(c: Cast, raw: bool) -> str:
    who = f"{article(c.adjective)} {c.hero}"
    place = c.rng.choice(PLACES)
    if raw and c.rng.random() < 0.4:  # a text to continue begins in many ways, an answer in few
        return c.pick(
            f"One day {who} named {c.name} woke up early. {c.she.capitalize()} lived {place}.",
            f"The {c.adjective} {c.hero} lived {place}. {c.her.capitalize()} name was {c.name}.",
            f"{place.capitalize()} there lived {who} named {c.name}.",
            f"{c.name} was {who} who lived {place}.",
            f"This is the story of {who} named {c.name}, who lived {place}.",
        )
    start = c.pick(
        *["Once upon a time there was"] * 5,
        *["Once upon a time, there was"] * 2,
        "There once was",
        "Long ago there was",
        "A long time ago there was",
    )
    return c.pick(
        f"{start} {who} named {c.name}, who lived {place}.",
        f"{start} {who} named {c.name}. {c.she.capitalize()} lived {place}.",
        f"{start} {who} {place}. {c.her.capitalize()} name was {c.name}.",
    )


def lost(c: Cast) -> str:
    thing, spot = c.rng.choice(TREASURES), c.rng.choice(HIDING_PLACES)
    return " ".join(
        (
            f"{c.name} had a {thing}, and {c.she} loved it more than anything.",
            c.pick(
                f"One morning the {thing} was gone.",
                f"One day the wind carried the {thing} away.",
                f"But one windy day {c.she} lost it.",
            ),
            c.pick(
                f"{c.name} looked everywhere, but {c.she} could not find it.",
                f"{c.name} searched all day and began to cry.",
            ),
            f"Then {article(c.friend)} named {c.friend_name} came by and said, "
            f'"{c.pick("Do not be sad", "Let me help you", "We will look together")}."',
            c.pick(
                "Together they searched until the sun went down.",
                "They walked and walked, side by side.",
            ),
            f"At last they found the {thing} {spot}.",
            c.pick(
                f"{c.name} laughed and danced with joy.",
                f'"Thank you!" said {c.name}, and gave {c.friend_name} a big hug.',
            ),
        )
    )


def fear(c: Cast) -> str:
    what = c.rng.choice(FEARS)
    return " ".join(
        (
            f"{c.name} was afraid of only one thing: {what}.",
            c.pick(
                "One evening a storm came up, and the path was hard to see.",
                "One night there was a knock at the door.",
                "One day a cry for help came from far away.",
            ),
            f"It was {article(c.friend)} named {c.friend_name}, who had lost the way home.",
            f"{c.pick('Nobody else was there to help', 'Everyone else was asleep', 'There was no time to lose')}, "
            f"so {c.name} took a lantern and went out.",
            c.pick(
                f"{c.her.capitalize()} heart beat fast, but {c.she} took one step, and then "
                "another.",
                f"{c.she.capitalize()} was scared, but {c.she} thought of {c.friend_name} and "
                "kept going.",
            ),
            f"When they were safe at home, {c.friend_name} said, "
            f'"{c.pick("You are the bravest friend I know", "How brave you are")}."',
            f"And {c.name} found that {c.she} was not afraid of {what} any more.",
        )
    )


def wish(c: Cast) -> str:
    what = c.rng.choice(WISHES)
    return " ".join(
        (
            f"{c.name} had one great wish: {c.she} wanted to {what}.",
            c.pick(
                "Everyone said that it could not be done.",
                "But nobody knew how to do it.",
                "Every night it was the last thought before sleep.",
            ),
            f"One day {c.she} met {article(c.friend)} named {c.friend_name}, who was "
            f"{c.pick('stuck in the mud', 'very tired', 'caught in a thorn bush', 'far from home')}.",
            c.pick(
                f"{c.name} stopped and helped at once.",
                f"{c.name} could not walk past, so {c.she} helped.",
            ),
            f'"You were kind to me," said {c.friend_name}. "Now let me help you too."',
            c.pick(
                "They set out together the next morning.",
                "They packed a small bag and left at sunrise.",
            ),
            f"It took {c.pick('three days', 'a whole week', 'a long time')}, but in the end "
            f"{c.name}'s wish came true.",
        )
    )


def share(c: Cast) -> str:
    food = c.rng.choice(FOODS)
    return " ".join(
        (
            f"One {c.pick('cold', 'rainy', 'snowy', 'sunny')} day {c.name} had {article(food)} "
            "for lunch.",
            f"Just then {article(c.friend)} named {c.friend_name} came along and said, "
            f'"{c.pick("I am so hungry", "I have not eaten all day", "That smells so good")}."',
            c.pick(
                f"{c.name} thought about it for a moment.",
                f"There was not much, and {c.name} was hungry too.",
            ),
            f'"We can share," said {c.name}, and cut it in two.',
            c.pick(
                "It was only half, but it tasted twice as good.",
                "They sat in the sun and ate every crumb.",
                "They talked and laughed until it grew dark.",
            ),
            f"The next day {c.friend_name} came back with a {c.rng.choice(TREASURES)} as a gift.",
        )
    )


def sound(c: Cast) -> str:
    noise = c.rng.choice(SOUNDS)
    return " ".join(
        (
            f"One night {c.name} heard {noise} outside.",
            c.pick(
                f'"Who could that be?" {c.she} wondered.',
                f"{c.she.capitalize()} could not sleep, so {c.she} went to look.",
            ),
            f"{c.she.capitalize()} followed it "
            f"{c.pick('through the garden', 'down the hill', 'along the path', 'past the mill')} and came to {c.pick('an old well', 'a little bridge', 'a hollow tree', 'a small hut')}.",
            f"There sat {article(c.friend)} named {c.friend_name}, "
            f"{c.pick('all alone', 'with a sad face', 'holding a tiny light')}.",
            f'"I {c.pick("just moved here", "have lost my way", "have nobody to play with")}," '
            f"said {c.friend_name}.",
            f'"Then come with me," said {c.name}. '
            f'"{c.pick("There is room for two", "I will make some tea", "We can play until morning")}."',
        )
    )


def slow(c: Cast) -> str:
    return " ".join(
        (
            f"Every year there was a great race, and {c.name} wanted to win.",
            f'A fast {c.friend} named {c.friend_name} laughed and said, "You are much too slow."',
            f"But {c.name} practised every {c.pick('morning', 'evening', 'day')}, a little "
            "more each time.",
            f"On the day of the race {c.friend_name} ran ahead and then "
            f"{c.pick('stopped to nap', 'fell into a ditch', 'took the wrong path')}.",
            c.pick(
                f"{c.name} could have run past, but {c.she} stopped to help.",
                f'{c.name} came by and said, "Come, we will finish together."',
            ),
            "So they crossed the line at the same moment, and both of them won.",
        )
    )


PLOTS = (lost, fear, wish, share, sound, slow)


def story(rng: random.Random, raw: bool = False, **named: str) -> str:
    cast = Cast(rng, **named)
    return " ".join((opening(cast, raw), rng.choice(PLOTS)(cast), rng.choice(MORALS)))


REQUESTS = (
    "tell me a story{about}",
    "a story{about} please",
    "write a story{about}",
    "write me a short story{about}",
    "can you tell me a story{about}",
    "i want a story{about}",
    "tell a story{about}",
    "another story{about}",
    "give me a story{about}",
    "make up a story{about}",
    "story{about}",
    "please tell me a little story{about}",
    "i would like to hear a story{about}",
    "do you know a story{about}",
    "a bedtime story{about}",
    "tell me a fairy tale{about}",
    "can i have a story{about}",
    "invent a short story{about}",
    "read me a story{about}",
)


def request(rng: random.Random) -> tuple[str, str]:
    """A question and a story that keeps what the question named."""
    named: dict[str, str] = {}
    if rng.random() < 0.85:
        named["hero"] = rng.choice(HEROES)
        words = noun(named["hero"])
        if rng.random() < 0.25:
            named["adjective"] = rng.choice(ADJECTIVES)
            words = f"{named['adjective']} {words}"
        about = f" about {article(words)}" if rng.random() < 0.85 else f" about {words}"
        kind = rng.random()
        if kind < 0.12:
            named["name"] = rng.choice(names_for(named["hero"]))
            about += f" {rng.choice(('named', 'called'))} {named['name']}"
        elif kind < 0.24:
            named["friend"] = rng.choice([other for other in HEROES if other != named["hero"]])
            about += f" and {article(noun(named['friend']))}"
    else:
        about = ""
    return rng.choice(REQUESTS).format(about=about), story(rng, **named)
