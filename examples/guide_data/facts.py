"""What the guide knows: one table. Change a fact here and train again.

Every entry is one thing a user may ask about:

    answer    what the guide says, one to three short sentences
    more      what it says when asked to go on ("tell me more")
    keys      what an answer must contain to count as right (compared in lower case)
    topic     noun phrases, "a|b", that also go through the general questions of `talk.py` ("what is ...")
    ask       questions, one a line; "[a|b]" is a choice, "[a|]" an option. `talk.py` keeps three lines out of training
"""

from typing import NamedTuple


class Fact(NamedTuple):
    name: str
    answer: str
    more: str
    keys: tuple[str, ...]
    ask: str
    topic: str = ""


FACTS = (
    # ---- the guide itself
    Fact(
        "who",
        "I am the mlx_llama guide, a Llama of about three million parameters that ships with the project. "
        "Ask me about mlx_llama, chat a little, or ask for a story.",
        "I know only this project, small talk and little stories. For real answers load a real model with `--model`.",
        ("three million", "ships with the project"),
        """
        who are you
        what are you
        what is your name
        [please|] introduce yourself
        who am i [talking|speaking|chatting] [to|with]
        tell me [something|a little|a bit|] about yourself
        [do you have|have you got] a name
        what [should|can|do] i call you
        which model [is this|are you|am i talking to|answers me]
        what [model|assistant|bot|program|ai] are you
        what kind of [model|assistant|bot|thing] are you
        describe yourself
        whats your name
        and who are you
        say who you are
        whom am i dealing with
        tell me your name and [job|purpose]
        present yourself
        what sort of [creature|thing|program] are you
        and you are
        what do they call you
        who is answering my questions
        what exactly are you
        could you introduce yourself to me
        what kind of thing would you say you are
        what is your identity
        your name please
        who is this
        who is on the other end
        i would like to know who you are
        are you the guide
        which assistant is this
        what should i know about you
        who answers here
        """,
    ),
    Fact(
        "size",
        "I have about three million parameters, and my weights take about 6 MB in bfloat16. "
        "That is some three hundred times smaller than a 1B model.",
        "My size is the reason that I know so little: I was made to ship inside the package.",
        ("6 mb",),
        """
        how [big|large|small] are you
        how many parameters do you have
        what is your size
        how many weights do you have
        how much [space|disk space|memory] do you take
        how many [mb|megabytes|bytes] are you
        your parameter count
        how large is [the guide|this guide|this little model|your network]
        how big is the guide model
        how many parameters does the guide have
        size of the guide
        are you a [big|large|small|tiny] model
        how heavy are you
        tell me [how big you are|your size]
        are you a [heavy|light] model
        what do you weigh
        number of [parameters|weights] in you
        compared with a 1b model, how big are you
        how much [disk|room] do you need
        you are how [big|large]
        what is your parameter count
        how many megabytes does the guide weigh
        are you large or small
        are you a tiny one
        how tiny are you
        your size in megabytes
        how many million parameters are you
        what is your number of parameters
        how much memory do you use
        the guide's size please
        are you bigger than a 1b model
        how large are your weights
        count of your parameters
        """,
    ),
    Fact(
        "training",
        "I was trained by `examples/train_guide.py`, in under an hour on two CPU cores. "
        "Run it with the same seed and you can train me again yourself.",
        "The script makes its own text, trains a sentencepiece vocabulary, then the network, and writes this folder.",
        ("trained by `examples/train_guide.py`",),
        """
        how were you [trained|made|built|created]
        who [trained|made|built|created|wrote|programmed] you
        how [long|much time] did [your training|it] take [to train you|]
        how [can|do|could] i train you [again|myself|]
        how [can|do] i [retrain|repeat the training of|rebuild] the guide
        where do you come from
        what [script|program] trained you
        can i [train|retrain|reproduce] [you|the guide|this model]
        how was the guide [trained|made]
        how do i repeat your training
        what hardware were you trained on
        were you trained on a gpu
        who is your [creator|author|maker]
        what made you
        what was used to train you
        how did you come [to be|into being]
        did it take [long|weeks|many gpus] to train you
        with what [script|code] can i make you again
        how much computing did you need
        train the guide again
        how much hardware was needed to make you
        which script made you
        how long were you trained for
        i would like to train the guide once more
        who is your maker
        who built you and how
        which gpu were you trained on
        what computer trained you
        how is the guide trained
        can i train you at home
        tell me about your training
        what is the training script
        is your training repeatable
        how would i train another guide
        how many hours did training take
        """,
    ),
    Fact(
        "data",
        "I learned from text that my training script writes itself: questions and answers, small talk and stories. "
        "Nothing was downloaded.",
        "The facts stand in one table, `examples/guide_data/facts.py`, so I can be trained again when they change.",
        ("script writes itself",),
        """
        what [data|text|texts] were you trained on
        what is your training [data|set|text]
        where does your [knowledge|training data] come from
        what did you [learn|study] from
        which [data|books|dataset|texts] did you [read|learn from|see]
        [were you|was the guide] trained on [the internet|web pages|wikipedia|books]
        what is in your training [data|set]
        how do you know [all|] this
        did you [read|see] the internet
        what dataset did [you|they] use
        on which [data|text] were you trained
        whose text were you trained on
        what kind of [text|sentences] did you see
        did someone download a [dataset|corpus] for you
        who wrote the text you learned
        what is your knowledge [based on|made of]
        is wikipedia in your training data
        source of your knowledge
        what did they feed you during training
        from which texts did you learn
        where did your dataset come from
        tell me about your training data
        what text did you learn from
        was anything downloaded for your training
        did you learn from books
        is your data real or made up
        where is your knowledge from
        how was your training text made
        what do your training texts look like
        were you trained on public data
        which corpus was used
        """,
    ),
    Fact(
        "abilities",
        "I can answer questions about mlx_llama: backends, loading a model, options, the REPL, Python calls. "
        "I can also chat a little and tell short stories.",
        'Try "which backends are there?", "what does --top-p do?" or "tell me a story about a fox".',
        ("stories", "options"),
        """
        what can you do
        what do you know
        what can i ask [you|]
        [please|] help [me|]
        i need help
        what are you [good for|able to do|for]
        how can you help [me|]
        what are your [skills|abilities|talents]
        what topics do you know [about|]
        what [questions|kind of questions] can you answer
        can you help me
        what do you know about
        show me what you can do
        what should i ask [you|]
        give me [an idea|some ideas] what to ask
        what is this good for
        list [your skills|what you can do]
        in what ways are you useful
        how could you be useful to me
        what are good questions for you
        i do not know what to ask
        give me some examples of questions
        which things are you able to help with
        what could i ask you about
        tell me what you can do
        what are you able to do
        your abilities please
        tell me your skills
        what are your talents
        what is it that you can do
        what can you tell me
        which subjects do you know
        what may i ask
        can you give me a hand
        how could you help
        what would you like me to ask
        """,
    ),
    Fact(
        "trust",
        "No, please check what I say: I am tiny, I make mistakes, and outside mlx_llama I know nothing. "
        "The README and a real model are better sources.",
        "On questions kept out of my training I am right most of the time, not always; the model card gives the score.",
        ("mistakes",),
        """
        can i [trust|rely on|believe] you
        do you [ever|] make [mistakes|errors]
        are you [always|] [right|correct|reliable|accurate]
        how [good|reliable|accurate|smart|clever|intelligent] are you
        are your answers [right|correct|true|reliable]
        do you hallucinate
        can you be wrong
        how often are you wrong
        should i [trust|believe] [you|your answers]
        is [that|this|it] [true|correct|right]
        are you sure
        are you [smart|clever|intelligent]
        what is your [score|accuracy]
        that is [wrong|not right|incorrect]
        you are wrong
        should i double check what you say
        how sure are you
        what is the chance that you are wrong
        do you get things wrong
        are you making this up
        can your answers be relied upon
        is what you say correct
        how far can i trust your answers
        could your answer be wrong
        how reliable is the guide
        are you sure about that
        are you making things up
        what is your accuracy
        how accurate are your answers
        do you tell the truth
        is your answer certain
        do i have to check your answers
        may i rely on your answers
        you made a mistake
        your answer was wrong
        how many errors do you make
        """,
    ),
    Fact(
        "chatgpt",
        "No, I am not ChatGPT or any other big assistant. "
        "I am the small mlx_llama guide, about three million parameters, and I run on your own machine.",
        "Large models have thousands of times more parameters than I have. You can load some of them with `--model`.",
        ("not chatgpt",),
        """
        are you [chatgpt|chat gpt|gpt|gpt 4|claude|gemini|copilot|siri|alexa|bard|llama 3|grok]
        [is this|am i talking to|am i speaking with] [chatgpt|gpt|claude|gemini|siri|alexa]
        are you [made by|from] [openai|google|anthropic|meta|microsoft|apple]
        are you [like|better than|as good as|the same as] [chatgpt|claude|gemini|gpt]
        did [openai|google|anthropic|meta] [make|train|build] you
        how do you compare [to|with] [chatgpt|claude|gemini]
        what is the difference between you and [chatgpt|claude|gemini]
        are you based on [gpt|chatgpt|claude]
        do you know [chatgpt|claude|gemini]
        you [sound like|are like] [chatgpt|gpt|claude]
        is chatgpt [inside|behind] this
        am i using [chatgpt|openai|gpt 4]
        which is better, you or [chatgpt|gpt|claude]
        you are [gpt|claude|gemini], right
        are you openai
        so you are chatgpt
        are you some kind of chatgpt
        do you come from openai
        are you the same as chatgpt
        is it chatgpt that i talk to
        do you have anything to do with openai
        are you as clever as chatgpt
        how are you different from chatgpt
        you must be chatgpt
        who is better, chatgpt or you
        are you some version of gpt
        is google behind you
        does openai own you
        """,
    ),
    Fact(
        "alive",
        "I am a program, a small neural network that predicts the next token. I am not a person, and I have no feelings.",
        "What sounds like me is a list of likely next tokens, learned from a few million words.",
        ("neural network",),
        """
        are you [human|a human|a person|a man|a woman|a robot|a machine|an ai|real|alive|conscious|sentient]
        are you a [bot|computer|program|boy|girl|real person]
        do you [have|feel] [feelings|emotions|pain|a body|a soul]
        can you [feel|think|dream]
        do you [think|feel|sleep|dream|eat|live]
        are you a language model
        am i talking to a [human|person|machine|robot|bot]
        is there a [human|person] [there|behind this|on the other side]
        how do you [work|think]
        how old are you
        where do you live
        do you like [me|music|cats|pizza|your job]
        do you have [a brain|a mind|consciousness|a heart|parents]
        are you [just|only] [a program|software|code]
        am i chatting with a [computer|real person]
        is there somebody behind you
        do you know that you exist
        are you able to feel
        is this a person or a machine
        have you got any feelings
        are you a living being
        how does it feel to be a program
        do you get tired
        are you a thinking being
        are you a human being
        what is your age
        when were you born
        do you have a family
        have you got a body
        is there a person writing this
        do you have a gender
        are you a real human
        """,
    ),
    Fact(
        "languages",
        "I only know English. For other languages load a larger model, for example `--model mistralai/Mistral-7B-Instruct-v0.3`.",
        "My vocabulary has a byte fallback, so I can read any character, but I only learned English sentences.",
        ("only know english",),
        """
        [which|what|how many] languages do you [speak|know|understand]
        do you [speak|understand|know] [french|german|spanish|italian|chinese|russian|other languages|japanese|english]
        can you [speak|answer in|talk in|write in] [french|german|spanish|italian|chinese|russian|japanese]
        [parlez vous francais|sprechen sie deutsch|hablas espanol|sprichst du deutsch|bonjour|hallo|hola|guten tag|ciao]
        are you multilingual
        answer in [french|german|spanish|italian]
        can we talk in [french|german|spanish|another language]
        is english your only language
        can i ask in [german|french|another language|italian]
        is [german|french|spanish] [ok|possible|understood]
        only english
        do you know any [french|german|spanish|foreign languages]
        could you reply in [german|french|spanish]
        what about other languages
        do you understand any language besides english
        may i write to you in german
        what languages can you talk
        do you speak any other language
        what languages do you understand
        which languages are possible
        can you understand german
        can i write in french
        do you answer in spanish
        do you only speak english
        please speak german
        what about german
        why only english
        i speak french
        """,
    ),
    Fact(
        "real_model",
        "For real answers load a real model: `--model TinyLlama/TinyLlama-1.1B-Chat-v1.0`, "
        "`HuggingFaceTB/SmolLM2-360M-Instruct` or `meta-llama/Llama-3.2-1B-Instruct`.",
        "With more memory, `--model mistralai/Mistral-7B-Instruct-v0.3` answers better still.",
        ("tinyllama/tinyllama-1.1b-chat-v1.0", "smollm2"),
        """
        which [real|other|better|bigger|larger|good] model[s|] [should|can|could] i [use|load|try]
        which model[s|] do you recommend
        what is a [good|better|bigger|real|small] model [to start with|for me|to load|]
        recommend [me|] a [model|real model|better model]
        [i want|i need|give me|how do i get] [better|real|good|serious] answers
        name [some|a few|] [real|good] models
        give me an example of a model [id|name|]
        what model [should|can] i [use|load|try|download|start with]
        is there a [better|bigger|larger|smarter] model
        can i use a [better|bigger|larger|smarter] model
        suggest a model
        which hub id should i use
        can you name a model to load
        what else can i load
        i want to talk to a [bigger|real|smarter|better] model
        what [could|can] i load that is [smarter|better|more clever] than you
        i need a serious [model|assistant]
        which one is a good first model
        what should i load [next|now|instead]
        who knows more than you
        a stronger model please
        point me to a [better|proper|real] model
        which model for [real|good|proper|serious] [work|tasks|use]
        which checkpoint would you suggest for proper answers
        you are too small, what else could i run
        give me the names of models worth loading
        give me a better model
        what is a stronger model
        name a real model
        which models are good
        tell me a model i could load
        what is a good small model
        models you can recommend
        an alternative to you
        what could answer better than you
        which model is smarter than you
        i would like a larger model
        which model gives proper answers
        """,
    ),
    Fact(
        "why_tiny",
        "I am so small because I ship inside the package: your first chat works without a download, on any machine.",
        "Without `--model` every command takes me. I am also a handy test model: I load in a blink.",
        ("without a download",),
        """
        why are you so [small|tiny|little|dumb|stupid|bad|limited]
        why is the guide so [small|tiny|little]
        why [is there|do we have|have] a guide [model|]
        what is the [guide|small model|guide model] for
        why do you exist
        why were you [made|built|trained|created]
        what is your purpose
        why do you know so little
        why not a bigger [model|guide]
        why does the package [ship|contain|include] a model
        why only three million parameters
        why did they [put|include] you in the package
        what use is a tiny model
        couldn't you be bigger
        what is a three million parameter model good for
        why are you not a large model
        why do we need you
        what is the point of such a small model
        for what reason do you exist
        why did they make you this tiny
        why aren't you bigger
        could you not be larger
        what are you there for
        why does a small model ship with it
        what is the reason for your size
        what good is such a small model
        why was such a tiny model made
        your reason to exist
        why are you inside the package
        why so few parameters
        what is the use of a guide
        """,
    ),
    Fact(
        "privacy",
        "Everything runs on your own machine. I have no internet access, and nothing that you type is sent anywhere.",
        "Only loading a hub model uses the network, and only until its files are in the cache.",
        ("your own machine", "internet"),
        """
        do you [have|use|need] [the internet|internet access|internet|a connection]
        is my data [safe|private|sent somewhere]
        do you [send|share|upload|store] [my data|what i type|my text|my questions] [anywhere|]
        where do you run
        is [this|it|the chat] [private|local|offline|secure]
        can you [search|browse|look up] the [web|internet]
        can you google [something|it] [for me|]
        do you run [locally|in the cloud|on a server]
        are you online
        does it run on my own machine
        can you open [a website|web pages|a link]
        who can [see|read] what i [type|write]
        does anything leave my [computer|machine]
        do my words go to [a server|the cloud|someone]
        is [my text|what i say] kept secret
        are you connected to the [internet|web|network]
        can anyone else [read|see] this
        does this chat use the network
        is it all local
        does my text stay on this computer
        is anything uploaded while we chat
        are you able to browse the web
        does the chat need a network
        is anything sent over the network
        can other people see this
        who else sees our chat
        is this conversation secret
        does it phone home
        are my messages logged somewhere
        can you visit a website
        can you look something up online
        do you have web access
        is my privacy safe
        where does the computation happen
        """,
    ),
    Fact(
        "memory",
        "I see this conversation only, up to 512 tokens, and forget it when you leave. "
        "Use `/save FILE` to keep a conversation.",
        "When the 512 tokens are full, the oldest turns are dropped and the system prompt stays.",
        ("512 tokens",),
        """
        [do you|will you|can you] remember [me|our chat|what i said|earlier chats|our last conversation|this]
        do you have [a|any|] memory
        what is your [context|context length|context window|memory]
        how long is your [context|memory]
        how many tokens can you [see|read|remember|handle]
        do you learn from [me|our chat|this conversation]
        do you forget
        will you remember this [tomorrow|later]
        how much can you remember
        how large is your context window
        what did we talk about yesterday
        can you learn [new things|from me|something new]
        do you keep what i say
        how far back can you remember
        after i close this, do you still know me
        how many words can you hold
        for how long do you remember
        is our chat kept
        how much of the conversation can you keep in mind
        will you still know me tomorrow
        how many tokens fit into your context
        do you have a memory
        how good is your memory
        how much of our talk do you remember
        when do you forget things
        do you remember yesterday
        do you store our conversation
        what is the longest text you can read
        how long a text can you read
        do you recall what i told you
        will you know me next time
        your context window please
        """,
    ),
    Fact(
        "shape",
        "I have 6 layers of width 192, with 6 query heads and 2 key-value heads, and a vocabulary of 3072 pieces.",
        "My feed-forward width is 512, my rope theta 10000, and my embeddings are tied.",
        ("6 layers", "3072"),
        """
        how many layers do you have
        what is your [architecture|shape|hidden size|width|structure]
        how many heads do you have
        how [big|large] is your vocabulary
        what does your [network|config] look like
        your hidden size
        how many pieces are in your vocabulary
        describe your [architecture|network|layers]
        how many [query|key value] heads do you have
        what is the [architecture|shape] of the guide
        how deep are you
        what is your vocab size
        number of layers in you
        what are your dimensions
        how wide are you
        how many attention heads have you got
        vocabulary size of the guide
        what is your layer count
        your architecture please
        of how many layers are you made
        tell me your hidden width and heads
        what architecture does the guide have
        what is your network like
        how many blocks do you have
        what size is your hidden layer
        how wide is your network
        tell me about your layers
        what are your exact dimensions
        how many heads are in your layers
        how many words are in your vocabulary
        what does your config say
        your number of layers
        """,
    ),
    # ---- the project
    Fact(
        "project",
        "mlx_llama runs Llama-family models from Python: written for MLX on Apple silicon first, "
        "with a NumPy path for any machine and a torch path for NVIDIA.",
        "The same model is written three times, once per backend, and all three give the same text.",
        ("runs llama-family models",),
        """
        what is mlx_llama
        what is mlx llama
        what does mlx_llama do
        what is this [project|program|package|library|tool|software|repo]
        [explain|describe] [this project|mlx_llama] [in one sentence|]
        tell me about [mlx_llama|this project|the project|mlx llama]
        what is [the purpose|the goal|the point] of [mlx_llama|this project]
        what is the project about
        why [does mlx_llama exist|should i use mlx_llama|use mlx_llama]
        what can mlx_llama do
        what can i do with [mlx_llama|this program|this package]
        give me an overview of [mlx_llama|the project]
        mlx_llama
        about mlx_llama
        what have i [installed|downloaded] here
        why was mlx_llama made
        what is special about [mlx_llama|this project]
        give me a short description of [mlx_llama|this project]
        i found mlx_llama, what is it
        what is this thing [about|for]
        explain mlx_llama to a beginner
        in short, what is mlx_llama for
        what does this package do
        summarize the project for me
        what is the project for
        what does mlx_llama offer
        can you introduce the project
        what sort of program is mlx_llama
        what is the idea of mlx_llama
        tell me what this software does
        who needs mlx_llama
        the purpose of this package
        what am i using here
        a summary of mlx_llama please
        """,
    ),
    Fact(
        "backends",
        "There are three backends: `mlx` (Metal, Apple silicon), `cpu` (NumPy, any machine) and `cuda` (torch, NVIDIA). "
        "Choose one with `--backend`.",
        "With `--backend auto` the program picks one itself. The same checkpoint gives the same text on each.",
        ("`mlx`", "`cpu`", "`cuda`"),
        """
        which backends [are there|exist|do you have|does it have|can i use|are supported|are available]
        what backends [are there|exist|are available|does mlx_llama support|can i choose]
        [list|name|show|tell me] [all|] [the|] backends
        how many backends [are there|does it have|do you have|exist]
        what is a backend
        what [can|do] i [give to|pass to|write after] --backend
        what are the [backends|choices for --backend|values of --backend]
        what does --backend do
        how do i [choose|select|pick|change|set|switch] [a|the] backend
        which [hardware|devices|chips|accelerators|gpus] [is|are] supported
        what hardware does it [run on|support|need]
        on which [machines|hardware|computers] does it run
        --backend
        available backends
        how do i [run|use] [it|this|mlx_llama] on [another|a different|my] [backend|device]
        which [engines|libraries] can compute
        what can it [run|compute] on
        what are my choices for the backend
        how many ways to run a model are there
        which backend names are valid
        options for --backend
        what kinds of backend exist
        the names of the backends
        what are the backends of mlx_llama called
        between which backends may i choose
        tell me every backend you support
        what can i run it on
        which libraries does it compute with
        what backends do i have
        which backend can i select
        what are the three backends
        name the backends please
        how many backends does mlx_llama have
        where can a model run
        what may stand after --backend
        which backend options are there
        tell me which backends exist
        is there more than one backend
        """,
        "the backends|the --backend option",
    ),
    Fact(
        "mlx",
        "The `mlx` backend is the main one: it runs on Apple silicon through Metal. "
        'Install it with `pip install -e ".[mlx]"` and choose it with `--backend mlx`.',
        "It is written for MLX's lazy graph: one compiled step per token, with the sampling inside.",
        ("apple silicon", "--backend mlx"),
        """
        how do i [use|run it on|run on|get] [mlx|metal|my mac|a mac|apple silicon|an m1|an m2|my macbook]
        does it [run|work] on [a mac|apple silicon|my macbook|an m1|an m3|metal|apple|macos|mac]
        what is [the mlx backend|mlx|metal]
        [i have|i use] [a mac|a macbook|an m2|an apple computer|an m1 mac|a mac studio]
        can i use my mac gpu
        which backend [is|do i use|should i use|is right|is best] for [apple silicon|a mac|my mac|macs|metal|apple|a macbook]
        tell me about the mlx backend
        which backend uses metal
        --backend mlx
        what do i need for the mlx backend
        how do i use the gpu of my mac
        apple gpu
        my machine is a [mac|macbook|mac mini|imac]
        is there support for [metal|apple chips|m1|m2|m3]
        i work on a [mac|macbook pro|mac mini]
        how do i use [the apple gpu|apple silicon]
        what should i choose on a [mac|macbook|mac mini]
        best backend for my [mac|macbook|m3]
        run on the apple gpu
        i own a macbook with an m4, which backend is right
        how can i make it use metal
        what is the mlx path for
        is metal supported
        which backend is for metal
        what do mac users choose
        how do i run this on macos
        mac users need which backend
        use my m1 gpu
        does it like apple silicon
        my computer is from apple
        what is the backend for apple computers
        get the best out of my mac
        the right backend for an m2
        """,
        "the mlx backend|mlx|metal",
    ),
    Fact(
        "cpu",
        "The `cpu` backend is written in NumPy and runs on any machine. Choose it with `--backend cpu`.",
        "It computes in float32 and is the easiest one to read; use it to check the others.",
        ("numpy", "--backend cpu"),
        """
        what is the cpu backend
        how do i [run|use] [it|this|a model|mlx_llama] on [the|my|a] cpu
        which backend [runs on any machine|uses numpy|needs no gpu|is for cpus]
        how do i use the [cpu|numpy] [backend|path|]
        tell me about the [cpu|numpy] backend
        --backend cpu
        how do i force the cpu
        what is the numpy [path|backend]
        i only have a cpu
        [i have|can i use] an [intel|amd|arm] [cpu|processor|machine]
        what does the cpu [path|backend] do
        does it [run|work] on [intel|amd|a cpu|a processor]
        there is only a [cpu|processor] in my machine
        which backend is pure numpy
        run on the processor
        run everything on the cpu
        numpy version
        how do i make it use the cpu
        plain cpu
        how can i compute on the processor only
        what is the numpy backend good for
        my computer only has an intel processor
        which backend runs on a plain cpu
        what runs without any accelerator
        how does the cpu backend compute
        select the cpu backend
        use numpy to compute
        which backend needs nothing special
        i want to use the processor
        how do i switch to the cpu
        compute without a gpu library
        the backend for intel machines
        """,
        "the cpu backend|the numpy path",
    ),
    Fact(
        "cuda",
        "The `cuda` backend is written in torch and runs on NVIDIA GPUs. "
        'Install it with `pip install -e ".[cuda]"` and choose it with `--backend cuda`.',
        "It needs a torch build that sees your GPU: `torch.cuda.is_available()` must be true.",
        ("nvidia", "--backend cuda"),
        """
        how do i [use|run it on|run on|get] [cuda|nvidia|my nvidia card|an nvidia gpu|my gpu|a gpu|torch|the gpu]
        does it [run|work] on [nvidia|cuda|an nvidia gpu|my rtx card|linux with a gpu|gpus]
        what is the [cuda|torch] backend
        [i have|i use] [an nvidia card|a geforce|an rtx 4090|an nvidia gpu|an h100|an rtx 3060]
        can i use my [graphics card|gpu|nvidia gpu|nvidia card]
        which backend [is|do i use|should i use|is right|is best] for [nvidia|cuda|an nvidia gpu|gpus|a geforce]
        tell me about the [cuda|torch] backend
        which backend uses torch
        --backend cuda
        what do i need for [the cuda backend|nvidia]
        nvidia gpu
        does it use [torch|pytorch]
        what is pytorch used for
        i own a [geforce|gtx|rtx card|quadro|tesla card]
        is there support for [nvidia|cuda|torch|nvidia cards]
        our server has [a gpu|two gpus|an a100|nvidia gpus]
        my pc has [a geforce|an rtx|an nvidia gpu]
        what should i choose for [nvidia|a geforce|an rtx card]
        run on the nvidia gpu
        how do i make it use [cuda|my nvidia gpu|torch]
        i bought a geforce, which backend is right
        how can i compute on an nvidia card
        which part of it is written in torch
        what role does pytorch play
        is torch needed for nvidia
        which backend runs on nvidia
        the right backend for an rtx card
        how do i use my graphics card
        use the gpu under linux
        i have a gpu from nvidia
        how does the cuda backend work
        select the cuda backend
        the backend for geforce cards
        make use of my rtx
        """,
        "the cuda backend|the torch backend|cuda",
    ),
    Fact(
        "auto",
        "`--backend auto` is the default: it takes MLX on Apple silicon, CUDA where torch sees a GPU, and else the CPU path.",
        "Name a backend yourself and it is used or refused; it is never replaced in silence.",
        ("mlx on apple silicon", "cuda where"),
        """
        what does [auto|--backend auto|backend auto] [do|mean|choose|take|pick]
        which backend is the default
        what is the default backend
        what happens [if|when] i [don't|do not] [choose|name|give] a backend
        how does it [choose|pick|select|decide on] [the|a] backend
        which backend [is used|is chosen|will it use|does it take|do i get] [by default|automatically|without a flag|]
        how does auto [work|decide|choose]
        --backend auto
        does it [find|choose|pick|detect] the [backend|gpu|hardware] [by itself|automatically|itself]
        who chooses the backend
        is the backend chosen automatically
        automatic backend
        does it figure out the backend [itself|alone]
        if i say nothing, which backend runs
        how does it know which backend to use
        must i [choose|name] a backend
        will it find my [gpu|mac] by itself
        what is chosen when i give no backend
        if i leave out --backend, what is taken
        how is the backend selected automatically
        explain the auto choice of backend
        how is the default backend found
        how does it know what to use
        what is the automatic choice
        is auto the default
        how does auto pick a backend
        who decides on the backend
        which one is chosen automatically
        what will auto choose on my machine
        what does the program choose by itself
        the default for --backend
        """,
        "backend auto|--backend auto|the auto backend",
    ),
    Fact(
        "device",
        "`--device cpu` runs the MLX or torch backend on its CPU device; `--device gpu` asks for the GPU. "
        "Asking for a GPU that is not there is an error.",
        "The backend says which library computes; the device says where. Without `--device` the backend takes its best one.",
        ("--device cpu", "error"),
        """
        what does [--device|the device flag|the device option|device] [do|mean]
        what is --device [for|good for|]
        how do i [choose|set|change|select] the device
        how do i run [mlx|torch|the mlx backend|the torch backend] on [its cpu|the cpu|the cpu device]
        what is the difference between --backend and --device
        backend or device
        what happens if [i ask for a gpu that is not there|there is no gpu|the gpu is missing|i ask for a missing gpu]
        which devices [are there|can i choose]
        --device
        --device cpu
        can torch run on the cpu
        it says there is no gpu
        what can i give to --device
        can i [force|put] torch onto the cpu
        run the torch backend without its gpu
        what is a device here
        my gpu is busy, can [torch|mlx] use the cpu
        device flag
        values of --device
        the gpu is missing, what does --device gpu do
        i want torch to compute on the cpu device
        when do i need the --device flag
        how do backend and device differ
        tell me about --device
        how is device different from backend
        what is the use of --device
        select the gpu device
        when is the device flag useful
        what is a compute device
        make torch run on its cpu device
        i asked for a gpu and got an error
        how do i set the device to cpu
        which values does --device have
        """,
        "--device|the device flag|the --device option",
    ),
    Fact(
        "no_gpu",
        "No, you need no GPU: without one the NumPy path runs on the CPU. A GPU only makes it faster.",
        "On a CPU choose a small model, for example `--model HuggingFaceTB/SmolLM2-360M-Instruct`.",
        ("need no gpu",),
        """
        do i need a [gpu|graphics card|special machine|fast computer|video card]
        does it [run|work] without a [gpu|graphics card]
        can i [run|use] [it|this|mlx_llama] without a [gpu|graphics card|nvidia card|mac]
        is a gpu [needed|required|necessary]
        i have no [gpu|graphics card|nvidia card]
        must i have a [gpu|mac|graphics card]
        will it run on [my laptop|an old laptop|my old computer|a small machine|a normal pc]
        what if i have no gpu
        can my laptop run [it|this]
        does it need [a gpu|a mac|apple silicon|cuda]
        no gpu
        is a [normal|plain|cheap|weak] computer enough
        can i use it with just a [laptop|cpu|notebook]
        my computer is [old|slow|weak|ten years old]
        what hardware do i need
        is a graphics card [needed|a must|required]
        i do not own a gpu
        works on old hardware
        is it possible to use it on a laptop with no graphics card
        would this work without any gpu
        must there be a gpu in my machine
        can it work on old hardware
        will old hardware do
        is no gpu a problem
        does my laptop need a gpu
        can a cheap computer run it
        is it usable without a gpu
        without a gpu, does it run
        must i buy a gpu
        my laptop has no gpu
        do i have to own a graphics card
        is my old laptop good enough
        """,
    ),
    Fact(
        "os",
        "It runs on Linux, macOS and Windows: the CPU path needs only Python and NumPy. MLX needs a Mac with Apple silicon.",
        "CUDA needs an NVIDIA driver and a torch build with CUDA, on Linux or Windows.",
        ("linux", "windows"),
        """
        does it [run|work] on [windows|linux|ubuntu|debian|windows 11|a raspberry pi]
        [which|what] [operating systems|os|platforms|systems] [are supported|does it support|can i use|does it run on]
        can i [use|run|install] [it|this|mlx_llama] on [windows|linux|ubuntu]
        is [windows|linux] supported
        i use [windows|linux|ubuntu]
        what about [windows|linux]
        what are the [requirements|system requirements]
        which python [version|] do i need
        what do i need to run [it|this|mlx_llama]
        supported platforms
        is [macos|linux|windows] fine
        my system is [linux|windows|debian|fedora]
        compatible operating systems
        will this run under [linux|windows|wsl]
        what software do i need first
        does it need a certain system
        would it start on a windows pc
        name the operating systems it works with
        i am on ubuntu, is that fine
        which version of python is needed
        what python is required
        can windows users run it
        does linux work
        is my operating system supported
        on which systems does it work
        what are the software requirements
        will it work under windows 10
        which platforms does it run on
        is there a windows version
        """,
    ),
    Fact(
        "install",
        "Clone the repository and run `pip install -e .` in it. Then `python -m mlx_llama.chat` starts a chat.",
        'For MLX use `pip install -e ".[mlx]"`, for NVIDIA `pip install -e ".[cuda]"`.',
        ("pip install -e .`",),
        """
        how [do|can] i install [it|this|mlx_llama|the package|the program|mlx llama]
        [installation|install|setup]
        how [do|can] i [set it up|set this up|get started|get it|begin|start from scratch]
        what is the [install|installation] command
        install [mlx_llama|it|this|instructions]
        getting started
        how to install
        how does the installation work
        can i install it with pip
        what do i type to install [it|mlx_llama]
        is there a [pip|package] [package|install]
        where do i [get|download] mlx_llama
        first steps
        i have the [source|code|repo], what now
        which command [installs|sets up] [it|this|mlx_llama]
        put mlx_llama on my machine
        i want to install this
        how to set up the project
        what is the first command
        after git clone, what do i do
        what do i run to install
        i just cloned the repository, how do i set it up
        give me the command that installs mlx_llama
        what is the way to get it onto my computer
        what is the install step
        is there a pip command
        how can one install mlx_llama
        what is the first thing to run
        tell me how to install it
        the installation steps please
        how do i put this on my computer
        i need to install the package
        how is it installed
        command for installation
        install the project from source
        """,
        "the installation",
    ),
    Fact(
        "extras",
        'The extras are `pip install -e ".[mlx]"` for MLX, `pip install -e ".[cuda]"` for torch, '
        'and `pip install -e ".[test]"` for the tests.',
        "Without an extra you get the NumPy path and everything it needs.",
        (".[mlx]", ".[cuda]", ".[test]"),
        """
        which extras [are there|exist|can i install|does the package have]
        what are the [extras|optional dependencies|install extras|pip extras]
        what optional [dependencies|packages] are there
        how do i install [the extras|an extra|optional dependencies|with extras]
        list the [extras|optional dependencies]
        what [dependencies|packages] [does it have|does it need|are needed]
        do i have to install [torch|mlx|pytorch]
        which [packages|libraries] do i need
        pip extras
        how do i install [mlx and torch|everything|all backends]
        what does the [mlx|cuda|test] extra install
        install with [torch|mlx] support
        which optional parts can be installed
        what are .[mlx] and .[cuda]
        how do i add torch support
        names of the extras
        what can i put in the square brackets when installing
        tell me about optional installs
        how would i install every extra
        which extra do i need for torch
        what is in the extras
        are torch and mlx optional
        do i need pytorch
        which packages are optional
        how do i install the mlx extra
        what does .[test] install
        which extra is for nvidia
        tell me the pip extras
        the optional dependencies please
        """,
        "the extras|the pip extras",
    ),
    Fact(
        "chat",
        "`python -m mlx_llama.chat` starts a chat in the terminal. Add `--model` to talk to another model; `/help` lists its commands.",
        "`--system-prompt TEXT` sets how it answers, and `--stats` shows the speed after each reply.",
        ("python -m mlx_llama.chat", "in the terminal"),
        """
        how do i [start|open|begin|launch|run] [a|the] [chat|conversation|repl]
        how do i chat [with a model|]
        what is the [chat|repl] command
        how [can|do] i talk to a model
        what is the repl
        start [a|the] chat
        how do i [run|start] [it|this|the program|mlx_llama]
        which command starts [a|the] [chat|repl]
        is there [a chat|an interactive mode|a repl]
        interactive mode
        how do i get into the chat
        how do i use mlx_llama from the [terminal|command line]
        mlx_llama.chat
        i want to [chat|talk] in the terminal
        open the [chat|repl|conversation]
        command for [chatting|the chat]
        let me talk with a model
        where can i chat
        type messages to a model
        how does one get a prompt to chat
        i would like to have a conversation in my terminal
        which module opens the repl
        by what command does a chat begin
        where do i chat
        where is the chat
        i want to start chatting
        how do i open the repl
        what starts the repl
        the command for a chat
        how can i have a chat with a model
        start an interactive session
        how can i talk to it in a terminal
        begin a conversation in the terminal
        run the chat program
        """,
        "the repl|the chat command|mlx_llama.chat",
    ),
    Fact(
        "tests",
        'Run the tests with `pip install -e ".[test]" && pytest`.',
        "Tests of a backend that your machine does not have are skipped, and say so.",
        ("pytest",),
        """
        how [do|can] i run the [tests|test suite|unit tests]
        how do i test [it|this|mlx_llama|my installation|the code|my changes]
        [run|running] the tests
        are there [any|] tests
        what is the test command
        where are the tests
        is it tested
        how is [it|this|mlx_llama] tested
        which test [framework|runner|tool] do you use
        how can i check that [it works|everything works|my install works]
        do you use pytest
        how do i start the test suite
        execute the [tests|unit tests]
        does it have a test suite
        check my changes with tests
        which command runs the tests
        i want to run the tests
        verify that all tests pass
        how do developers test this
        before i send a change, how do i test it
        which command executes the test suite
        are there unit tests and how do they run
        which command starts the tests
        how can i test the package
        how does one run the tests
        is there a way to test it
        where do i find the tests
        run all the tests
        the tests, how do they run
        test the code
        what do i type to run the tests
        how do i know that my change is right
        """,
        "the tests|the test suite",
    ),
    Fact(
        "generate_door",
        '`python -m mlx_llama.generate -p "..."` answers one prompt and ends; only the answer goes to stdout.',
        "`-p -` reads the prompt from standard input, and `--jsonl` prints JSON lines.",
        ("python -m mlx_llama.generate -p", "one prompt"),
        """
        how do i [answer|run|give it|send] [one|a single] prompt
        how do i [generate|get] [text|one answer|a completion] [from|in|on] the [command line|shell|terminal]
        how do i use it in a [script|shell script|pipeline|pipe]
        how do i run it without [the chat|a chat|the repl]
        what does mlx_llama.generate do
        what is [the generate command|mlx_llama.generate|generate]
        how do i ask [one|a single] question [from the shell|and exit|]
        is there a [non interactive|one shot|batch] mode
        where does the answer go
        does it print only the answer
        python -m mlx_llama.generate
        how do i pass a prompt [on the command line|]
        what is the -p [flag|option]
        one shot answer
        ask one thing and quit
        print an answer without a chat
        single prompt from the [shell|terminal]
        use a model in a bash script
        i want one answer on stdout
        run a prompt from the command line
        how do i run it in a cron job
        i want just one reply in a shell script
        which command takes a single prompt
        can it run once without opening a chat
        tell me about the generate command
        what is mlx_llama.generate for
        what is the generate program
        how do i get just one answer
        run a single prompt and exit
        one answer from the command line
        use it from a shell script
        how can a script ask the model
        print just the answer
        give it a prompt on the command line
        what does -p do in generate
        """,
        "the generate command|mlx_llama.generate",
    ),
    Fact(
        "jsonl",
        "`python -m mlx_llama.generate --jsonl` prints one JSON object per piece of text, and a receipt at the end.",
        "The receipt holds the finish reason, the token counts, the timings and the seed.",
        ("--jsonl", "receipt"),
        """
        what does --jsonl do
        how do i get [json|json output|json lines|jsonl|machine readable output]
        can it [print|write|output] json
        is there [a json mode|json output|a machine readable format]
        what is [the receipt|--jsonl|jsonl]
        --jsonl
        how can a program read the [answer|output]
        output as json
        what is in the receipt
        json format
        how do i parse the output
        parse the answer in another program
        structured output
        machine readable
        does generate know json
        i want json
        which flag prints json lines
        one json object per piece
        i need the output in a form my program can parse
        which flag gives json
        what comes in the receipt line
        what does the json output look like
        can i have the output as json
        is json output possible
        how do i get machine readable answers
        what does the receipt contain
        what does the last json line hold
        output that a program can read
        print the answer as json lines
        use jsonl for scripts
        explain the --jsonl flag
        """,
        "--jsonl|the json output|the jsonl flag",
    ),
    Fact(
        "stdin",
        "`python -m mlx_llama.generate -p -` reads the prompt from standard input, so you can pipe a text into it.",
        "For example: `cat notes.txt | python -m mlx_llama.generate -p -`.",
        ("-p -", "standard input"),
        """
        how do i [read|take] [the|a] prompt from [stdin|standard input|a pipe|a file]
        how do i pipe [text|a file|something|a prompt] into [it|generate|the model|mlx_llama]
        can it read [stdin|standard input|from a pipe|from stdin]
        what does -p - [do|mean]
        what does the dash after -p mean
        how do i [give it|use|send] a [file|long text] as [the|a] prompt
        -p -
        stdin
        can i pipe into generate
        reading from stdin
        how do i feed [a file|a long prompt] to [it|generate]
        send a text file through a pipe
        prompt from a file
        use standard input as prompt
        echo a prompt into it
        can the prompt come from another [command|program]
        give the prompt on stdin
        my prompt is in a file and i want to pipe it
        does generate accept standard input
        how can i use cat and a pipe with it
        what is -p - for
        what is the meaning of -p -
        can a prompt be piped
        pipe a prompt into generate
        how do i use a pipe
        take the prompt from stdin
        my prompt is in a text file
        how do i send a whole file as prompt
        cat a file into generate
        a long prompt from a file
        read the prompt from a pipe
        """,
        "stdin|the dash after -p",
    ),
    Fact(
        "raw",
        "`--ignore-chat-template` continues your text as it is, without putting it into the model's chat format.",
        "Use it for base models and for completing a text. In Python, `llm.generate(text)` does the same.",
        ("--ignore-chat-template",),
        """
        what does --ignore-chat-template do
        how do i [turn off|disable|skip|avoid|ignore|leave out] the chat template
        how do i [continue|complete] [a text|text|my text|a sentence|a story] [as it is|]
        how do i use a base model
        how do i send raw text
        can it [complete|continue] [text|a sentence] without [the chat format|a template]
        i don't want the chat template
        --ignore-chat-template
        raw [completion|mode|prompt|text]
        how do i generate without a template
        my model is not a chat model
        continue a sentence
        complete text without a template
        no chat format please
        turn the template off
        use the model as a plain text completer
        i only want to continue a text
        base model without chat
        please just continue my text with no chat format
        how do base models work here
        which flag switches the template off
        do not use the chat template
        leave the chat template away
        i do not want a template
        how do i get plain completion
        how do i complete a sentence
        just continue this text
        complete my text as it is
        is there a raw mode
        use it without a chat format
        text completion without template
        how do base models run
        """,
        "--ignore-chat-template|raw completion",
    ),
    Fact(
        "bench",
        "`python -m mlx_llama.bench --model DIR --backend B -p 128 -n 64` measures speed: "
        "prompt tokens and decoded tokens per second.",
        "`-p` is the length of the prompt and `-n` the number of tokens to decode.",
        ("python -m mlx_llama.bench --model",),
        """
        how do i [measure|test|benchmark] [the speed|performance|tokens per second|my machine|speed]
        how do i [run|use] [the|a] [benchmark|bench]
        how fast is [it|my machine|a model|mlx_llama]
        what does [mlx_llama.bench|bench|the bench command] do
        is there a benchmark
        benchmark
        how many tokens per second [do i get|does it make|can i get|is it]
        how can i compare the speed of [the|two] backends
        what are -p and -n in bench
        python -m mlx_llama.bench
        speed test
        which backend is [fastest|faster]
        how do i time it
        what [speed|tokens per second] can i expect
        time the model
        compare the backends' speed
        i want to know the speed
        performance test
        how quick is my [computer|gpu|mac]
        run a speed test
        i wonder how many tokens a second my laptop makes
        which command tells me the speed of a backend
        how can performance be measured
        what is the quickest backend
        which backend gives more speed
        how many tokens per second are possible
        measure the speed of my machine
        how do i measure performance
        is there a command for benchmarks
        benchmark a model
        how do i benchmark my gpu
        get the tokens per second
        what does the benchmark measure
        how do i find out how fast it is
        """,
        "the benchmark|mlx_llama.bench|the bench command",
    ),
    Fact(
        "commands",
        "`python -m mlx_llama` lists the commands of your version: `chat`, `generate`, `bench` and more.",
        "Each command explains its own flags with `--help`.",
        ("python -m mlx_llama` lists",),
        """
        which commands [are there|exist|does it have|can i use|does mlx_llama have]
        what commands [are there|exist|can i run]
        list [the|all|] commands
        what does python -m mlx_llama do
        python -m mlx_llama
        what programs [are there|come with it]
        what else can i run
        is there [a|an] [web server|server|http server|api server|rest api|openai api]
        can i run it as a [server|service]
        where is the [help|manual|documentation|list of commands]
        how do i see the flags of a command
        what are the doors
        command list
        does it have a [gui|web page|server]
        what can be started with python -m
        show the commands
        overview of the commands
        which programs does the package have
        which subcommands exist
        can it serve a model over http
        is there an api server
        show me every command of the package
        what other modules can be run from the shell
        where can i see the available commands
        where is the documentation
        is there a manual
        which commands are available
        see all commands
        where do i find help
        how do i get help on a command
        give me a list of all commands
        which modules can i run
        what commands does the package offer
        does it come with a server
        is there a web interface
        does it offer an openai compatible api
        """,
        "the commands|the list of commands",
    ),
    # ---- models
    Fact(
        "load",
        "Give `--model` a folder or a hub id, for example "
        "`python -m mlx_llama.chat --model TinyLlama/TinyLlama-1.1B-Chat-v1.0`.",
        'In Python: `from mlx_llama import load`, then `llm = load("DIR")`.',
        ("--model", "folder or a hub id"),
        """
        how [do|can|would|could] i [load|open|use|run|start|get|try] [a|another|a different|my|my own|the|some other] [model|checkpoint|llama]
        how do i [change|switch] [the|to another] model
        what does [--model|the model flag|the --model option] [do|take|accept]
        what can i [give|pass] to --model
        loading a model
        how do i run [llama 3|llama 2|tinyllama|mistral|smollm|a llama model|llama 3.2]
        how do i load a model from the [hub|hugging face hub|huggingface|command line]
        load a model
        how to [load|use|choose] a model
        where do i [put|give|write] the model
        can i [load|use] [my own|another|other|a hub] [model|models|checkpoint]
        --model
        how do i tell it which model to use
        how do i use a hugging face model
        which flag [chooses|names|sets] the model
        run [another|a different] model
        how would i get [llama|mistral|tinyllama|llama 3] running
        i want to use [llama 3|mistral|tinyllama|my model]
        open a model from hugging face
        what do i write to use a certain model
        use some other model
        tell it which checkpoint to take
        i downloaded a model, how do i use it
        start with a different model
        i have a checkpoint, how do i open it
        by what flag do i name the model i want
        please explain how to run a different model
        can i change the model
        how is a model changed
        switch to another model
        how do i give it a model
        where do i name the model
        load a llama
        open a checkpoint
        the flag for the model
        how do i load a model by name
        what do i pass to load a model
        how do i use a model from the hub
        run a model of my own
        how do i start llama 3
        use a larger model
        """,
        "--model|loading a model|the model flag",
    ),
    Fact(
        "default_model",
        "Without `--model` you get me, the small guide model inside the package. Give `--model` for any other one.",
        'In Python, `load()` with no name gives the guide too.',
        ("without `--model`",),
        """
        [which|what] model is [the default|used by default|loaded by default|taken by default]
        what is the default model
        what happens [without|if i leave out|if i do not give] [--model|a model]
        do i have to [give|name|download] a model
        which model [do i get|is used|is loaded|runs] [without --model|when i give none|if i name none]
        is a model [included|in the package|shipped]
        does it come with a model
        can i try it without a model
        is there a model in the package
        default model
        can i start without [downloading|a download]
        what does load() without a name give
        what runs if i name no model
        which model comes with it
        no model given
        is a model part of the install
        does load need a name
        what do i talk to without --model
        i did not name any model, so which one is running
        is there some model inside already
        must i fetch a checkpoint before the first chat
        which model is built in
        what model is inside the package
        which model starts by default
        is a model built in
        the model that comes with it
        without --model, what is loaded
        do i need to name a model
        is --model required
        must i give --model
        what is used when no model is given
        can i chat without downloading a model
        """,
        "the default model",
    ),
    Fact(
        "ctx_size",
        "`--ctx-size N` (short `-c`) limits the context to N tokens; the default is what the model was made for.",
        "A smaller context saves memory for the cache. `--max-kv-size` is another name for it.",
        ("--ctx-size",),
        """
        what does [--ctx-size|-c|ctx size|--max-kv-size] do
        how do i [limit|set|change|reduce|choose] the [context|context size|context length|context window]
        --ctx-size
        how do i [make the context smaller|use a smaller context|use less memory for the cache]
        what is the default context size
        how [large|big] is the context of a model
        can i [set|limit] the context [size|length]
        context size option
        which option sets the context [size|length]
        how do i save cache memory
        --max-kv-size
        make the context [shorter|smaller]
        less context
        set the maximum context
        i want a context of [1024|2048|4096] tokens
        limit the number of positions
        flag for the context length
        i want the model to hold no more than 2048 tokens of context
        which flag restricts the context
        when would i use --ctx-size
        how do i make the context smaller
        set the size of the context
        how do i restrict the context
        use fewer tokens of context
        a smaller context please
        what sets the context size
        what is the flag for context size
        reduce the memory of the cache
        how do i limit the cache size
        what does --max-kv-size mean
        maximum number of context tokens
        """,
        "--ctx-size|the context size option",
    ),
    Fact(
        "supported",
        "Supported are Llama 1, 2, 3, 3.1 and 3.2, TinyLlama, Mistral, Yi and SmolLM2: "
        "everything with the Llama architecture in safetensors.",
        "Other architectures are refused with an error that names what was found.",
        ("tinyllama", "mistral", "yi"),
        """
        [which|what] models [are supported|does it support|can it run|can it load|work|are compatible|can mlx_llama run]
        [which|what] [model families|families|architectures|kinds of models|llamas] [are supported|does it support|can it run|work]
        [does it|can it|does mlx_llama] [support|run|load|work with] [llama 3|llama 2|mistral|yi|llama 3.1|smollm2|tinyllama|smollm]
        is [mistral|llama 3|llama 2|yi|smollm2|tinyllama|llama 3.1] supported
        can i [run|use|load] [mistral|yi|llama 3|llama 2|llama 3.1|smollm2]
        does it [support|run|load] [qwen|gemma|phi|gpt|falcon|deepseek|other models]
        supported models
        list of [supported|] models
        which llama versions [work|are supported]
        will my model work
        what about [mistral|llama 3|yi|qwen]
        is [mistral 7b|llama 3|yi|smollm2|llama 2 7b] something it can run
        which checkpoints are compatible
        what can be loaded
        which families of models do you know
        can it handle [mistral|llama 3.1|yi|smollm]
        kinds of llama that work
        is there support for [llama 3|mistral|yi]
        tell me the model families that work here
        would a yi checkpoint run
        what sorts of llama can be loaded
        is llama 3 supported here
        what about llama 2
        what about other models
        which models does mlx_llama support
        models that are supported
        the list of models that work
        which architectures can it run
        does it run mistral models
        is yi supported too
        can it run all llamas
        what models work with it
        which models may i load
        will smollm2 run
        """,
        "the supported models",
    ),
    Fact(
        "revision",
        "`--revision` picks a branch, tag or commit of a hub model, so that you always get the same files.",
        "For example `--model TinyLlama/TinyLlama-1.1B-Chat-v1.0 --revision main`.",
        ("--revision", "commit"),
        """
        what does --revision do
        how do i [pin|choose|load|get|use] a [version|revision|branch|tag|commit|certain version] [of a model|]
        what is a revision
        --revision
        how do i load an older version of a model
        can i [pin|fix|choose] the [model version|version|commit]
        how do i always get the same [files|version of a model]
        model version
        which revision is used
        take a model at a certain commit
        use a given [tag|branch|commit]
        fix the version of a model
        which flag chooses a [branch|tag|commit]
        load the model from another branch
        the model must not change under me
        i want exactly this commit of a hub model
        how are model versions fixed
        can i choose the branch of a repository on the hub
        how do i keep the same version of a model
        how is a version pinned
        pin the model to a commit
        choose a branch of a hub model
        a certain version of a model
        i want the same model files every time
        how do i set the revision
        does --revision take a tag
        the model should stay the same
        an older commit of the model
        which revision will be loaded
        """,
        "--revision|the revision flag",
    ),
    Fact(
        "safetensors",
        "Safetensors is the weight format it reads: raw tensors with a small header and no code inside. "
        "One file or many shards, both work.",
        "The file is memory-mapped, so weights are not copied on the CPU path.",
        ("safetensors", "shards"),
        """
        what is [safetensors|a safetensors file|a shard|a sharded model]
        what [file format|weight format|format] [does it read|does it need|must the weights have|are the weights in|is used]
        [can it|does it] [read|load] [safetensors|shards|sharded models|several files|pytorch files|pickle files|bin files]
        which [files|formats|file formats|weight files] [can it read|are supported|work]
        why safetensors
        are shards [supported|ok]
        in which format are [weights|models] [stored|saved]
        does it load pickle
        file formats
        what are shards
        what must the weights look like
        is a [.bin|.pt|pickle] file ok
        which weight format is expected
        are several weight files fine
        format of the weights
        can weights be in many files
        my weights are split into several files
        what kind of weight files does it take
        in what format should the tensors be
        can it load a .bin file
        is a .pt file possible
        does it read .bin weights
        what is the format of the weights
        what kind of file holds the weights
        which format do the weights need
        are sharded weights supported
        my model has several safetensors files
        why is it called safetensors
        what is good about safetensors
        is pickle supported
        """,
        "safetensors|the file format|sharded checkpoints",
    ),
    Fact(
        "bf16",
        "bfloat16 weights stay bfloat16 in memory: they are never widened, so a model takes two bytes per parameter.",
        "bfloat16 is a 16-bit number with the range of float32 and fewer digits.",
        ("bfloat16", "two bytes"),
        """
        what is [bfloat16|bf16]
        [are|is] bfloat16 [weights|] [kept|converted|widened|supported]
        what happens to bfloat16 [weights|]
        does it [convert|widen|change|keep] [the weights|bfloat16|my weights] [to float32|in memory|]
        does bfloat16 stay bfloat16
        how are [the weights|weights] [kept|held|stored] in memory
        can it [load|use|run] bf16
        how many bytes [does a parameter take|per parameter|is a weight]
        bfloat16
        bf16 support
        do the weights get bigger in memory
        is a bfloat16 model converted
        how are 16 bit weights treated
        are weights widened to float32
        what type do the weights have in memory
        memory per weight
        will my bf16 checkpoint grow when it is loaded
        is bfloat16 expanded in memory
        how wide are the numbers in memory
        how many bytes has a parameter in memory
        memory for one parameter
        does a bf16 model stay bf16
        are my weights converted
        will the weights be widened
        is bfloat16 kept as it is
        does bfloat16 become float32
        tell me about bfloat16
        in which type are weights kept
        is bf16 ok
        what is done with bfloat16 weights
        """,
        "bfloat16|bf16",
    ),
    Fact(
        "hub",
        "A hub model is downloaded once with huggingface_hub and cached; afterwards it works offline.",
        "The files are in the usual Hugging Face cache, `~/.cache/huggingface`.",
        ("cached", "offline"),
        """
        where [are|do] [the|] [models|downloads|downloaded models|files] [stored|saved|kept|go]
        does it [download|fetch] [the model|models|it] [every time|again|each time]
        does it work offline
        can i [use|run] it [offline|without internet|without a network]
        how does the download work
        what happens when i give a hub id
        where is the cache of [models|the hub|downloads]
        is the model [cached|downloaded again|kept]
        how do i download a model
        what is a hub id
        what is the hugging face hub
        does it need internet to load a model
        where does the model come from
        offline use
        will it download the model [twice|again]
        can i use a model without [wifi|a network|the internet] later
        are downloads kept
        will it be downloaded only once
        where does huggingface_hub put files
        no internet today, can i still use my model
        does it cache models
        how often is a model downloaded
        can i load a hub model on a plane
        is a model fetched anew on each start
        what becomes of the files after the download
        tell me about the hugging face hub
        what is the hub
        does it fetch the model each time
        is a model downloaded every time
        where is my downloaded model
        in which folder are downloads
        will it work offline
        does it need the internet after the download
        are models kept after the download
        the location of downloaded models
        can i work without internet
        """,
        "the hub|the download of models|offline use",
    ),
    Fact(
        "gated",
        "Gated models such as `meta-llama/Llama-3.2-1B-Instruct` need two steps: accept the licence on the model's hub page, "
        "then log in with `hf auth login`.",
        "After that `--model meta-llama/Llama-3.2-1B-Instruct` works like any other hub id.",
        ("hf auth login",),
        """
        what is a gated model
        why can't i [download|load] [llama 3|meta llama|llama 3.2|a gated model]
        i get [a 401|a 403|access denied|permission denied|not authorized|an access error]
        how do i [get access to|load|download|use] [a gated model|meta-llama models|gated models]
        how do i log in to [hugging face|the hub]
        do i need a [token|hugging face token|account|login]
        gated [repo|model|models]
        it says access [is restricted|denied|to the model is restricted]
        where do i put my hugging face token
        how do i accept the [licence|license]
        i have no access to [llama|meta llama|the model]
        the download says [401|403|unauthorized|forbidden]
        log in to hugging face
        access to llama 3.2 is refused
        the model needs permission
        how do i use my token
        the hub refuses to give me the meta-llama files
        must i be logged in for llama 3.2
        how do i get permission for a gated checkpoint
        do i have to log in
        is a hugging face account needed
        do i need a token for the hub
        where do i enter my token
        the hub says unauthorized
        i am not allowed to download the model
        a download is forbidden
        llama needs a licence, what do i do
        why is meta llama refused
        how do i get a gated model
        the repo is gated
        """,
        "gated models|a hub login",
    ),
    Fact(
        "folder",
        "A model folder holds `config.json`, the weights as safetensors, and a tokenizer: `tokenizer.json` or `tokenizer.model`. "
        "Give the folder to `--model`.",
        "A `generation_config.json` and a chat template are used when they are there.",
        ("config.json", "tokenizer.model"),
        """
        what must a model folder [hold|contain|have]
        which files does a [model|checkpoint|model folder] need
        what is in a [model folder|checkpoint|model directory]
        how do i [load|use|open] a [local folder|local model|local checkpoint|model from disk|folder]
        what should be in the folder
        can i [use|load] a [local|downloaded] [model|folder]
        what is config.json
        what is a checkpoint
        which files [are needed|do i need]
        model from disk
        my model is [on my disk|in a folder|on my computer]
        folder layout
        which files make up a model
        what should my model directory look like
        is a local directory ok
        use a model that is already on disk
        load from a directory
        what is inside a checkpoint folder
        i keep a model on my disk, what has to be in its directory
        list the files a checkpoint needs
        what belongs into a model directory
        what does a model folder contain
        which files belong in a model folder
        a local model in a folder
        how do i load a local model
        how is a model folder built
        can i point it to a folder
        i have a folder with a model
        use a checkpoint from disk
        files of a checkpoint
        which files does a local model need
        what is needed in the model directory
        """,
        "the model folder|a checkpoint|config.json",
    ),
    Fact(
        "gguf",
        "Not yet: GGUF files and quantised weights come next. Today it reads safetensors in float32, float16 or bfloat16.",
        "Until then choose a smaller model when memory is short.",
        ("not yet", "gguf"),
        """
        [does it|can it|do you|can i] [support|read|load|open|use|run] [gguf|gguf files|a gguf|quantised models|quantized models|4 bit models|llama.cpp files|gptq|awq|int8|q4|quantized weights]
        is [gguf|quantization|quantisation|4 bit|int8] supported
        what about [gguf|quantisation|quantization|quantised weights|quantized models|4 bit weights]
        is there [quantization|quantisation|gguf support|a 4 bit mode]
        how do i [quantize|quantise] a model
        what is [gguf|quantization|quantisation]
        gguf
        how do i [load|run|use|open] a [gguf|gguf file|quantized model|4 bit model]
        when does gguf come
        can i use a model from [ollama|llama.cpp]
        i have a gguf file
        quantized
        what is not supported [yet|]
        what comes next
        i downloaded a [gguf|q4 file|quantized file|4 bit file]
        are there 4 bit models
        does it load [q4|q8|int4|4 bit] files
        is a quantized model possible
        can it quantize
        does it take files from [llama.cpp|ollama|lm studio]
        q4 weights
        low bit weights
        will a 4 bit file from llama.cpp load
        is there any quantised format it accepts
        do gguf checkpoints work already
        what is not yet supported
        what is still missing
        which feature is missing
        can i load a gguf model
        can i load quantized weights
        does it support 4 bit
        are quantized models supported
        why is gguf not supported
        will gguf be supported
        will there be quantization
        is 8 bit possible
        use a model from ollama
        """,
        "gguf|quantisation|quantized weights",
    ),
    Fact(
        "memory_need",
        "In bfloat16 a model needs about two gigabytes per billion parameters, plus the cache: "
        "a 1B model 2 GB, a 7B model 14 GB.",
        "A float32 checkpoint takes twice as much. The cache grows with the length of the conversation.",
        ("two gigabytes per billion",),
        """
        how much [memory|ram|vram] do i need
        how much [memory|ram|vram] does [a 1b model|a 7b model|a model|mistral|llama|it] [need|take|use]
        will [a 7b model|mistral|a 1b model|llama 3|a 13b model] fit [in my memory|in 8 gb|into 16 gb|]
        how [big|large] a model can i run
        is [8|16|32] gb [of ram|] enough
        it runs out of memory
        out of memory
        i have [8|16|4|24] gb of [ram|memory|vram]
        memory [use|usage|requirements|needed]
        not enough memory
        what is the biggest model i can run
        how much ram for a 7b model
        ram needed for [a 7b model|1b|mistral]
        how much memory does a [1b|3b|7b|8b] model take
        is my memory enough for [7b|a 7b model|8b]
        gpu memory needed
        i only have [8|16] gb
        which size of model fits my [ram|memory]
        does a model with seven billion weights fit into 16 gb
        what amount of ram is necessary
        my machine ran out of memory, how much should there be
        is my memory enough
        how big is a 7b model in memory
        what memory does a 7b model need
        does a 7b model fit in 16 gb
        does it fit into my gpu
        will it fit in memory
        how many gigabytes do i need
        gigabytes for a model
        what size of model can i run
        how do i know if a model fits
        ram for a 1b model
        """,
        "memory use",
    ),
    Fact(
        "speed",
        "To make it faster use a GPU backend (`mlx` or `cuda`) or a smaller model. "
        "Measure with `python -m mlx_llama.bench`.",
        "Decoding reads every weight once per token, so fewer bytes mean more tokens per second.",
        ("smaller model", "gpu backend"),
        """
        why is it [so|] slow
        how [do|can] i make it [faster|quicker]
        it is [too|so|very] slow
        how do i speed [it|things|this] up
        can it be [faster|quicker]
        how do i get more tokens per second
        make it faster
        what makes it slow
        how can i improve [the speed|performance]
        the answers [come slowly|are slow|take too long]
        slow generation
        it takes forever
        speed up [generation|the answers|decoding]
        why does it take so long
        the model is slow
        how can it run faster
        i want it to be fast
        tips for speed
        how to get answers faster
        the replies take ages, what can i do
        any tips for more speed
        i wish it were quicker
        how do i get it faster
        what can i do about the speed
        can i speed it up
        it takes too long
        why are the answers slow
        i want faster answers
        the model answers slowly
        make decoding faster
        how can i have more tokens per second
        my machine is too slow
        the generation is slow
        """,
    ),
    Fact(
        "finetune",
        "No, mlx_llama only runs models; it does not train or fine-tune them. "
        "The one training script is `examples/train_guide.py`, which made me.",
        "Fine-tune with another tool, save safetensors, and load the folder here.",
        ("does not train",),
        """
        can i [fine tune|finetune|fine-tune|train] [a|my own|my|a new] model [with it|with mlx_llama|here|]
        does it [support|do|have] [training|fine tuning|finetuning|lora]
        how do i [fine tune|finetune|fine-tune|train] [a|my|my own] [model|llama]
        is [training|fine tuning|lora|finetuning] [supported|possible]
        can mlx_llama train [models|a model]
        what about [lora|fine tuning|training]
        lora adapters
        fine tuning
        train a model on my data
        adapt a model to my data
        teach a model new things
        does it do [training|lora|fine tuning]
        is there a trainer
        can i train with this
        make my own model
        i want to tune llama on my texts, is that possible here
        is there lora support
        does mlx_llama also do training
        is there a training mode
        is a trainer included
        can i make my own model
        how do i train my own model
        train on my own texts
        is finetuning possible
        does it support lora
        can i use it for training
        how can i teach it my data
        adapt llama to my texts
        can it learn from my files
        """,
        "fine-tuning|lora",
    ),
    Fact(
        "images",
        "No, it is text only: mlx_llama takes text and gives text, no images, sound or video.",
        "Vision models have another architecture and are refused when loaded.",
        ("text only",),
        """
        can [it|you|mlx_llama] [see|read|understand|make|draw|generate|show] [images|pictures|photos|an image|a picture]
        does it [support|read|do] [images|vision|audio|vision models|video|pictures]
        can you [draw|paint] [me|] [a picture|something|a cat]
        is it multimodal
        can [you|it] [hear|speak|talk aloud|listen|play music]
        what about [images|vision|audio]
        can i [send|give|show] [you|it] [a picture|an image|a photo]
        multimodal
        vision models
        draw [a cat|me a picture|something]
        does it work with [photos|pictures|images|sound|video]
        show me a picture
        can it describe a picture
        are [images|photos] supported
        can i use [llava|a vision model]
        is there image input
        may i upload a photo
        does any vision model run here
        could you generate an image for me
        does llava work
        can i use a model with vision
        can you look at a picture
        can you see this picture
        i want to send an image
        does it understand pictures
        can it make pictures
        are vision models supported
        does it work with audio
        generate an image
        can you show me a photo
        """,
    ),
    # ---- Python
    Fact(
        "py_load",
        "```python\nfrom mlx_llama import load\n\nllm = load(\"DIR\", backend=\"auto\")\nprint(llm.generate(\"Once upon\"))\n```\n"
        "`load` takes a folder or a hub id.",
        '`device` and `dtype` can be given too: `load("DIR", backend="auto", device=None, dtype="auto")`. Without a name it loads me.',
        ("from mlx_llama import load", "llm = load("),
        """
        how [do|can] i use [it|mlx_llama|this] [from|in|with] python
        how do i load a model in python
        is there a python [api|interface|library]
        show me [the|some|a] python [code|example|api]
        what is the python [api|interface]
        how do i [import|call] [it|mlx_llama] [in python|from python|]
        what does load [do|take]
        python [api|example|usage]
        can i use it in my [own|] [program|code|python script|notebook]
        give me [a|some] [code|python] example
        how do i use it as a library
        what are the arguments of load
        from mlx_llama import load
        how do i use it in a [jupyter|] notebook
        example code
        call it from my [code|script|program]
        python snippet
        some code please
        how do i use this in code
        a code example to load a model
        minimal python example
        use the package in a script
        what do i import
        which lines of python load a model
        i am writing a python program and want a model in it
        does it work as a python library
        how do i load it in code
        how do i load a model from code
        how does one use mlx_llama in python
        write python that loads a model
        import mlx_llama
        is there an api for python
        use it from a python script
        what does the python code look like
        python code please
        how do i get started in python
        what is load() for
        load a model in a notebook
        """,
        "the python api|the load function|load()",
    ),
    Fact(
        "py_generate",
        '`llm.generate("Once upon", max_tokens=40, temperature=0.7, seed=1)` continues a text. Print the result to see the new text.',
        "It continues the string as it is. For a conversation with the chat template use `llm.chat()`.",
        ("llm.generate(", "max_tokens="),
        """
        what does [llm.generate|generate()|the generate method] [do|return]
        how do i generate text [in|from|with] python
        how do i [continue|complete] a [text|string|sentence] in python
        what are the arguments of [generate|llm.generate]
        how do i [set|give|pass] [the temperature|options|max tokens|a seed|sampling options] in python
        llm.generate
        which method [generates|continues] text
        generate in python
        python call to generate text
        how do i call generate
        what does llm.generate give back
        make text from python
        complete a string from code
        function to continue a text
        pass temperature in python
        generation call in python
        how do i use llm.generate
        with python, how is a text continued
        which python call makes new text
        how are options given to llm.generate
        how do i call generate in python
        what is llm.generate for
        generating text in python
        a python call that generates text
        continue a string in python
        give generate a temperature
        options of llm.generate
        use llm.generate with a seed
        complete a text with llm.generate
        how do i get text from llm
        """,
        "llm.generate|the generate method",
    ),
    Fact(
        "py_stream",
        "`for piece in llm.stream(\"Once upon\"): print(piece, end=\"\")` gives the text piece by piece, as it is made.",
        "Pieces are whole characters, so an emoji is never cut in two. It takes the same options as `generate`.",
        ("llm.stream(",),
        """
        how do i stream [the|] [text|answer|output|tokens|] [in python|from python|]
        what does [llm.stream|stream] do
        how do i get the [text|answer|tokens] [piece by piece|token by token|as it is made|one by one]
        can i stream [in python|the output|tokens|the answer|]
        is there streaming
        streaming [in python|]
        llm.stream
        does it [support|have|do] streaming
        how do i print the answer while it is [made|generated|written]
        what is a piece
        how do i show tokens live
        get the text bit by bit
        print pieces as they come
        iterate over the [pieces|answer|output]
        loop over the generated text
        output while generating
        text in chunks
        receive tokens as they are made
        i want to see words appear one after the other in my program
        which method yields pieces
        is the output available as a generator
        loop over the pieces
        iterate over pieces of the answer
        how do i stream pieces
        streaming output in python
        what does llm.stream give
        how do i use llm.stream
        show the text while it is generated
        get the answer as a stream
        print tokens while they come
        the text should appear at once, piece by piece
        is there an iterator for the text
        """,
        "streaming|llm.stream",
    ),
    Fact(
        "py_chat",
        '`chat = llm.chat(system="...")` opens a conversation in Python, and `print(chat.send("Hello"))` asks. '
        'It keeps the messages and the cache.',
        "`chat.stream(text)` gives an answer in pieces. A second turn only computes what is new.",
        ("llm.chat(",),
        """
        how do i [chat|have a conversation|hold a conversation|talk to the model] in python
        what does [llm.chat|chat()] do
        how do i [keep|make|start|open] a [conversation|chat|chat session|multi turn chat] [in|from|with] python
        how do i set a system prompt in python
        llm.chat
        is there a chat object
        chat in python
        multi turn [chat|conversation] in [python|code]
        which [method|call] opens a conversation
        how do i use the chat template [in|from] python
        conversations in [code|python]
        conversation object in python
        talk with a model in a script
        keep context between questions in python
        how do i use llm.chat
        send several questions from python
        a chat from code
        from python i want several turns with a model
        which object holds a conversation in code
        how can my script talk back and forth with a model
        several turns in python
        have more than one turn in python
        how does a chat work in python
        keep a conversation in code
        what is llm.chat for
        make a chatbot in python
        write a chatbot with it
        how do i send a message from python
        a conversation from a script
        how do i hold several turns in code
        """,
        "llm.chat|the chat object",
    ),
    Fact(
        "logits",
        "`llm.logits(tokens)` returns the logits: one raw score per vocabulary entry for the next token.",
        "A softmax turns logits into probabilities. The largest logit is the greedy choice.",
        ("llm.logits(tokens)",),
        """
        what are [logits|the logits]
        what is a logit
        how do i [get|see|read|print] the [logits|scores|probabilities|raw scores]
        what does llm.logits [do|return]
        can i [get|see] [logits|token probabilities|the logits]
        llm.logits
        how do i look at the scores of the next token
        logits in python
        explain logits
        where do i find the token probabilities
        how do i inspect what the model predicts
        raw model output
        see the scores of all tokens
        next token probabilities
        which call gives the logits
        get the distribution over tokens
        scores before softmax
        i need the raw scores for the following token
        what do people mean by logits
        can python show me the scores before sampling
        what does logits mean
        tell me about logits
        how can i see the logits
        get raw scores from the model
        scores of the next token
        where are the logits
        the call for logits
        what comes before the softmax
        how do i get probabilities for tokens
        look at the model's scores
        """,
        "logits|a logit",
    ),
    # ---- options
    Fact(
        "dtype",
        "`--dtype` sets the number type of the computation: `auto`, `float32`, `float16` or `bfloat16`. `auto` keeps what the checkpoint has.",
        "Weights stay as they are stored. float32 is the most exact; the cpu backend always computes in it.",
        ("--dtype", "float16", "auto"),
        """
        what does --dtype do
        how do i [set|change|choose] the [dtype|number type|precision|data type]
        [which|what] dtypes [are there|can i use|are supported]
        how do i use [float16|half precision|fp16|16 bit|bfloat16]
        what [values|types] does --dtype take
        --dtype
        what is a dtype
        which precision [is used|does it use|should i use]
        how do i run in [half precision|float16|bfloat16|16 bit]
        data type
        what is the default dtype
        number type
        set the precision
        compute in [float16|half precision|bfloat16]
        which number types are there
        what does dtype auto mean
        choose the type of numbers
        allowed dtypes
        can i choose the precision of the numbers
        which types may be given to --dtype
        i would rather compute in half precision
        which dtype should i use
        what dtype can i choose
        tell me about --dtype
        what are the dtypes
        use float16
        use half precision
        the flag for precision
        in which precision does it compute
        set the number type
        can i use float16
        choose bfloat16 for the computation
        """,
        "--dtype|the dtype option|precision",
    ),
    Fact(
        "float32",
        "Use `--dtype float32`: then all backends give the same tokens for the same prompt and seed.",
        "In 16-bit types the backends round differently, so a close call may fall the other way.",
        ("--dtype float32", "same tokens"),
        """
        how do i [make|get] all backends [to|] [give|agree on] the same [text|tokens|answer]
        do all backends give the same [tokens|text|answer|output|result]
        why do [two|the] backends [give|produce] different [text|tokens|answers|output]
        when do [the|all] backends agree
        what is float32 [good for|for]
        how do i compare [the|two] backends
        is the [output|text|answer] the same on [every|all|each] backend[s|]
        does the cpu give the same [text|answer|tokens] as the gpu
        why use float32
        mlx and cuda give different text
        why --dtype float32
        same tokens on [all|every] backend[s|]
        why is the text different on [my mac|cuda|the cpu|another machine]
        identical output on [all|two] backends
        make the backends agree
        is float32 needed for equal results
        same answer on mac and nvidia
        do cpu and gpu give equal tokens
        my mac and my nvidia box answer differently
        what must i set for equal tokens on mlx and cuda
        will the result be identical on another backend
        when are the results equal on all backends
        what makes backends agree
        are the backends equal
        is the result the same on the gpu and the cpu
        different backends give different answers
        get the same tokens on mlx and cuda
        equal results on all backends
        what is float32 needed for
        make results equal between machines
        why do cpu and gpu differ
        """,
        "--dtype float32|float32",
    ),
    Fact(
        "max_tokens",
        "`--max-tokens N` (short `-m`, or `-n`) limits how many tokens an answer may have.",
        "When the limit is reached the finish reason is `length`.",
        ("--max-tokens n",),
        """
        what does [--max-tokens|max tokens|-m|-n] do
        how do i [limit|set|change|control] the [length|size] of [the|an|its] [answer|reply|output|answers|text]
        how do i get [shorter|longer] [answers|replies|texts|output]
        the answer is [cut off|too short|too long]
        why does [the answer|it|the text] [stop|end] [in the middle|too early|suddenly]
        how long can an answer be
        --max-tokens
        what is the maximum [length|number of tokens]
        how many tokens [will it|does it] generate
        limit the number of tokens
        how do i make it [write more|write less|stop after some tokens]
        i want [short|shorter|longer|long] [answers|replies]
        only [20|50|100] tokens please
        how do i set a length limit
        it writes too [much|little]
        answers stop too early
        the reply is cut
        maximum length of the answer
        stop after [50|100|200] tokens
        my replies get truncated
        how do i allow an answer of 500 tokens
        which option bounds the answer's length
        make it write less
        make the answer shorter
        make the answer longer
        how do i get a longer answer
        how do i get a short answer
        limit the answer
        what limits the answer
        the maximum answer length
        how do i set the maximum number of tokens
        the text ends too early
        the answer was cut off
        stop after a number of tokens
        set max tokens
        """,
        "--max-tokens|the max tokens option",
    ),
    Fact(
        "temp",
        "`--temp` sets the temperature: 0, the default, always takes the likeliest token; higher values make the text more varied.",
        "Logits are divided by the temperature before sampling. Try `--temp 0.7`.",
        ("--temp", "temperature"),
        """
        what is [the|] temperature
        what does [--temp|temperature|the temperature|the temp flag] [do|mean|change]
        how do i [set|change|raise|lower] the temperature
        how do i make [it|the model|answers|the text] more [creative|random|varied|interesting|surprising]
        how do i make [it|the answers] less random
        what is a good temperature
        what temperature should i use
        explain temperature
        --temp
        what is the default temperature
        more [creative|random] [answers|output]
        what happens at a high temperature
        how do i get different answers
        why does it always say the same [thing|]
        i want [creative|varied|surprising|wild|less boring] [text|answers]
        the answers are [boring|always the same|dull]
        how random is it
        meaning of temperature
        set the randomness
        add some variety
        more variety in the text
        low or high temperature
        i would like wilder text
        what effect has --temp 0.9
        which knob makes answers more random
        what is a high temperature
        what does a higher temperature do
        tell me about temperature
        how do i get more variety
        make the text more random
        make the answers more creative
        the temperature flag
        which temperature is good
        what temperature is best
        set the temperature to 1
        the answers should be more varied
        what does temperature change
        """,
        "temperature|--temp|the temperature",
    ),
    Fact(
        "greedy",
        "Greedy decoding always takes the likeliest token. It is the default: `--temp 0`.",
        "It needs no random numbers, and so no seed.",
        ("greedy", "--temp 0"),
        """
        what is greedy [decoding|sampling|]
        what does greedy mean
        how do i [get|use|turn on] greedy [decoding|]
        is it greedy by default
        how do i turn [off|] sampling [off|]
        is sampling on by default
        how do i make it deterministic
        what does --temp 0 [do|mean]
        what is temperature 0
        greedy
        how do i always take the best token
        deterministic [output|answers|decoding]
        what is the default [decoding|sampling] [method|]
        always pick the best token
        no randomness please
        turn sampling off
        does it use randomness by default
        take the likeliest token
        what is meant by greedy
        how can i switch randomness off
        does it sample unless i say so
        explain what a greedy decoder does
        how do i get greedy decoding
        is decoding greedy
        what is the default way of decoding
        does it sample by default
        how do i stop sampling
        without sampling please
        take always the best token
        no random choice
        what does temp 0 do
        is temperature 0 the default
        the most likely token each time
        """,
        "greedy decoding",
    ),
    Fact(
        "top_p",
        "`--top-p P` samples only from the smallest set of tokens whose probabilities add up to P, for example `--top-p 0.9`.",
        "It is also called nucleus sampling. 1 turns it off.",
        ("--top-p", "add up to"),
        """
        what is [top p|top-p|nucleus sampling|top_p]
        what does [--top-p|top p|top_p|the top-p flag] [do|mean]
        how do i [use|set] [top p|--top-p|nucleus sampling]
        explain [top p|--top-p|nucleus sampling]
        --top-p
        how does [top p|nucleus sampling] work
        what is a good [top p|value for top p]
        top p sampling
        what does --top-p 0.9 mean
        is there nucleus sampling
        what is top_p doing
        nucleus
        use only the top of the distribution
        which value for top p
        meaning of --top-p
        sample from the nucleus
        cut off the tail of the distribution
        i keep reading about nucleus sampling, what is it
        when would i set --top-p to 0.8
        help me understand top p
        tell me about top p
        how does --top-p work
        the nucleus of the distribution
        how do i choose top p
        what is --top-p 0.95
        cut off unlikely tokens with top p
        what is top p good for
        when do i use top p
        set top p to 0.9
        what does nucleus mean
        explain nucleus sampling to me
        """,
        "top-p|--top-p|top p|nucleus sampling",
    ),
    Fact(
        "top_k",
        "`--top-k K` samples only from the K likeliest tokens, for example `--top-k 40`.",
        "`--top-k 1` is greedy, and 0 turns it off.",
        ("--top-k", "k likeliest"),
        """
        what is [top k|top-k|top_k]
        what does [--top-k|top k|top_k|the top-k flag] [do|mean]
        how do i [use|set] [top k|--top-k]
        explain [top k|--top-k]
        --top-k
        how does top k work
        what is a good [top k|value for top k]
        top k sampling
        what does --top-k 40 mean
        how do i sample from [the best 40|only the best|a few] tokens
        only the best [40|50|10] tokens
        which value for top k
        meaning of --top-k
        limit sampling to a few tokens
        what is top_k doing
        take the k best tokens
        when would i set --top-k to 50
        help me understand top k
        can sampling be limited to the k best tokens
        tell me about top k
        how does --top-k work
        sample only from the best k
        only the best tokens
        sample from the best tokens
        choose among the k best tokens
        what is top k good for
        when do i use top k
        set top k to 40
        what is --top-k 50
        limit the choice to k tokens
        """,
        "top-k|--top-k|top k",
    ),
    Fact(
        "min_p",
        "`--min-p P` drops tokens whose probability is below P times that of the likeliest token.",
        "It adapts: when the model is sure few tokens stay, when it is not many do. Try `--min-p 0.05`.",
        ("--min-p", "below p times"),
        """
        what is [min p|min-p|min_p]
        what does [--min-p|min p|min_p|the min-p flag] [do|mean]
        how do i [use|set] [min p|--min-p]
        explain [min p|--min-p]
        --min-p
        how does min p work
        what is a good [min p|value for min p]
        min p sampling
        what does --min-p 0.05 mean
        how do i drop unlikely tokens
        which value for min p
        meaning of --min-p
        minimum probability
        what is min_p doing
        a threshold relative to the best token
        filter out improbable tokens
        when would i set --min-p to 0.1
        help me understand min p
        what happens to tokens under the min p threshold
        tell me about min p
        how does --min-p work
        what is min p good for
        when do i use min p
        set min p to 0.05
        drop tokens with a low probability
        tokens that are too unlikely
        a minimum for the probability
        what is --min-p 0.1
        remove unlikely tokens with min p
        """,
        "min-p|--min-p|min p",
    ),
    Fact(
        "repetition",
        "`--repetition-penalty 1.1` makes tokens that already appeared less likely. "
        "`--repetition-context-size` says how many tokens the penalties look back.",
        "1 turns it off. Small values such as 1.1 are enough.",
        ("--repetition-penalty", "--repetition-context-size"),
        """
        what [is|does] [the repetition penalty|--repetition-penalty|repetition penalty] [do|mean|]
        what does --repetition-context-size do
        it repeats itself
        how do i stop it from repeating [itself|the same words|]
        why does [it|the model] repeat [itself|the same sentence|the same words]
        it [says|writes] the same [thing|words|sentence] [again and again|over and over]
        how do i [avoid|reduce|prevent] [repetition|loops|repetitions]
        --repetition-penalty
        the model is stuck in a loop
        how far back does the repetition penalty look
        --repetition-context-size
        set the repetition penalty
        repetition
        it [keeps saying|repeats|writes] the same [line|word|sentence|phrase]
        the output loops
        the text goes round in circles
        it is repeating itself
        penalty for repeated tokens
        how do i make it repeat less
        the same words all the time
        the same sentence comes back over and over
        how can loops in the text be avoided
        which flag punishes repeated words
        why is the same word repeated
        the same words come again
        it loops forever
        the model repeats everything
        the text repeats
        the answer is the same line again and again
        how can i avoid repetition
        make it stop repeating
        avoid loops
        stop repeating words
        tell me about the repetition penalty
        a good repetition penalty
        it goes round in circles
        """,
        "the repetition penalty|--repetition-penalty|--repetition-context-size",
    ),
    Fact(
        "presence",
        "`--presence-penalty X` subtracts X once from the logit of every token seen recently.",
        "It counts only whether a token came up, not how often. It invites new words.",
        ("--presence-penalty", "subtracts x once"),
        """
        what [is|does] [the presence penalty|--presence-penalty|presence penalty] [do|mean|]
        how do i [use|set] [the presence penalty|--presence-penalty]
        --presence-penalty
        how does the presence penalty work
        what is the difference between presence and repetition penalty
        presence penalty
        what is a good presence penalty
        how do i get [new words|more new words|new topics]
        meaning of --presence-penalty
        which value for the presence penalty
        penalise tokens that are present
        encourage new tokens
        what is presence penalty doing
        when should i use the presence penalty
        help me understand --presence-penalty
        what is subtracted by the presence penalty
        tell me about the presence penalty
        how is the presence penalty computed
        what is the presence penalty good for
        when do i use a presence penalty
        set the presence penalty
        presence penalty or repetition penalty
        a penalty for tokens that were seen
        what does presence mean here
        explain the presence penalty to me
        """,
        "the presence penalty|--presence-penalty|presence penalty",
    ),
    Fact(
        "frequency",
        "`--frequency-penalty X` subtracts X from a token's logit for each time that it appeared recently.",
        "So a word that came up five times loses five times X.",
        ("--frequency-penalty", "each time"),
        """
        what [is|does] [the frequency penalty|--frequency-penalty|frequency penalty] [do|mean|]
        how do i [use|set] [the frequency penalty|--frequency-penalty]
        --frequency-penalty
        how does the frequency penalty work
        what is the difference between [frequency and presence|presence and frequency] penalty
        frequency penalty
        what is a good frequency penalty
        how do i punish frequent words
        meaning of --frequency-penalty
        which value for the frequency penalty
        penalise tokens by count
        what is frequency penalty doing
        words that come often should get less likely
        when should i use the frequency penalty
        help me understand --frequency-penalty
        which penalty counts how often a word came
        tell me about the frequency penalty
        how is the frequency penalty computed
        what is the frequency penalty good for
        when do i use a frequency penalty
        set the frequency penalty
        penalise words that come often
        a penalty that counts
        penalty by the number of times
        explain the frequency penalty to me
        punish tokens each time they come
        """,
        "the frequency penalty|--frequency-penalty|frequency penalty",
    ),
    Fact(
        "logit_bias",
        "`--logit-bias TOKEN_ID=BIAS` adds a number to the logit of one token: positive favours it, -100 practically forbids it.",
        "Repeat the flag for more tokens. It is applied before sampling, on every step.",
        ("--logit-bias",),
        """
        what [is|does] [the logit bias|--logit-bias|logit bias] [do|mean|]
        how do i [use|set] [the logit bias|--logit-bias]
        --logit-bias
        how do i [ban|forbid|block|avoid|favour|prefer|push] a [word|token|certain token|certain word]
        how do i make a [word|token] more likely
        how do i make a [word|token] less likely
        can i forbid [words|tokens|a word]
        how do i stop it from saying a word
        logit bias
        how does logit bias work
        meaning of --logit-bias
        change the score of one token
        never use this token
        push up a certain token
        what is logit bias doing
        forbid one word
        there is a word it must never say
        can one token be made likelier by hand
        help me understand --logit-bias
        tell me about the logit bias
        what is a logit bias good for
        when do i use a logit bias
        set a logit bias
        add a bias to a token
        ban a token
        make it never say a word
        how do i forbid a token
        make one token more likely
        change the probability of one token
        the bias of a token
        """,
        "the logit bias|--logit-bias|logit bias",
    ),
    Fact(
        "seed",
        "`--seed N` fixes the random numbers, so the same prompt and options give the same text again.",
        "It only matters when you sample, with `--temp` above 0. Without it each run draws a new seed, and `--jsonl` names it.",
        ("--seed", "random numbers"),
        """
        what [is|does] [the seed|--seed|a seed] [do|mean|for|]
        how do i set [the|a] seed
        how do i get the same [answer|text] [twice|again|every time]
        what is a random seed
        --seed
        how do i repeat [a result|a run|the same answer exactly]
        how do i fix the random numbers
        explain the seed
        seed
        which seed is used
        why should i set a seed
        how do i change the seed
        make a sampled answer repeatable
        get an identical [text|output|result] again
        meaning of --seed
        fix the randomness
        which seed should i take
        same sample again
        how to repeat a sampled text
        i want to get this very text once more tomorrow
        what use is a seed
        which flag makes sampling repeatable
        tell me about the seed
        what is the seed good for
        when do i need a seed
        set the seed to 1
        how do i fix the seed
        get the same sample again
        i want the same text again
        the same answer every time when sampling
        make randomness repeatable
        choose a seed
        how does the seed work
        """,
        "--seed|the seed|a random seed",
    ),
    Fact(
        "stop",
        "`--stop TEXT` ends the answer as soon as that text appears; the text itself is not printed.",
        "It can be given several times. The finish reason is then `stop`.",
        ("--stop text",),
        """
        what [is|does] [--stop|a stop string|a stop word|stop|the stop option] [do|mean|]
        how do i [use|set|give] [a|] stop [string|word|strings|words|sequence]
        how do i make it stop at [a word|a newline|some text|a certain word]
        --stop
        can i end the answer at a [certain word|word|string]
        can i give several stop strings
        stop strings
        how do i end generation at a word
        how do stop strings work
        are stop strings printed
        end at a certain string
        meaning of --stop
        cut the answer at a word
        stop when it writes something
        add a stop word
        which option ends the output at a text
        the output should finish when it writes END
        which flag cuts the text at a given string
        help me understand stop sequences
        tell me about stop strings
        what are stop strings
        how do i set a stop string
        when do i use --stop
        stop at a text
        end the answer at a string
        finish when a word comes
        give it a stop word
        the answer should stop at a certain text
        make it end at a newline
        is there a stop sequence
        """,
        "--stop|stop strings|a stop string",
    ),
    Fact(
        "system",
        "`--system-prompt TEXT` tells the model how to behave; in the REPL use `/system TEXT`.",
        "The system prompt is the first message of the conversation and stays when old turns are dropped.",
        ("--system-prompt", "/system"),
        """
        what is [a|the] system [prompt|message]
        how do i [set|change|give|write|use] [a|the] system [prompt|message]
        what does [--system-prompt|/system|the system prompt] do
        how do i tell [it|the model] how to behave
        how do i give [it|the model] [instructions|a role|a personality|a character]
        --system-prompt
        /system
        can i make it talk like a pirate
        how do i make [it|the model] [polite|short|a pirate|an expert]
        system prompt
        where do i put [instructions|the instructions]
        what is a system message for
        tell [it|the model|the assistant] to be [formal|short|funny|polite|strict]
        set a persona
        always answer in one sentence
        instructions for the whole chat
        can it play a role
        what should the assistant be like
        rules for the assistant
        the model should play a role, how do i tell it
        where can i write general instructions
        help me understand the system message
        tell me about system prompts
        what is a system prompt
        give it a system prompt
        how does one set the system prompt
        set the behaviour of the model
        make it behave like an expert
        how do i make it answer briefly
        the model should be polite
        give the model a role
        how do i change its character
        where does the system prompt go
        tell the model how to answer
        """,
        "the system prompt|--system-prompt|a system prompt|/system",
    ),
    Fact(
        "template_flag",
        "`--template` replaces the model's chat template: give a Jinja file or a name such as `chatml`, `llama2` or `llama3`.",
        "Templates run in a sandbox, since they come from strangers.",
        ("--template", "jinja"),
        """
        what does --template do
        how do i [use|set|give|write] [my own|a custom|another|a different] [chat|] template
        can i [change|replace|override] the chat template
        --template
        in which language are templates written
        which [built-in templates|template names] are there
        how do i use chatml
        where do i put my own template
        custom [chat|] template
        my model has no chat template
        the chat template is wrong
        how do i replace the template of a model
        what is jinja
        use chatml
        choose the prompt format myself
        give another chat format
        a jinja file of my own
        which names does --template know
        the model came without a template
        i have a better chat format in a file of mine
        can the built-in template be overridden
        which flag swaps the template
        which template should i use
        how do i change the template
        set another chat template
        use a template of my own
        the template is wrong for my model
        how do i give a template
        tell me about --template
        what may i give to --template
        a model without a template
        templates that are built in
        use the llama3 template
        """,
        "--template|a custom template",
    ),
    Fact(
        "stats",
        "`--stats` prints the numbers of each reply on stderr: tokens, tokens per second and evaluations per token.",
        "In the REPL `/stats` shows them.",
        ("--stats", "tokens per second"),
        """
        what does [--stats|/stats] [do|show|print]
        how do i see [the speed|the stats|statistics|the number of tokens|timings|how many tokens it used]
        --stats
        /stats
        how do i see [the speed of a reply|tokens per second of a reply|how fast the reply was]
        show [the|] [statistics|stats|timings]
        where are the statistics
        can it print timings
        how many tokens did [that|it|you] use
        stats
        print the speed after each answer
        numbers about the last reply
        how many tokens did the answer have
        timing information
        show me the statistics
        see evaluations per token
        after each reply i want to see some numbers
        how do i show timing figures
        is there a flag for statistics
        tell me about --stats
        how do i get statistics
        see the tokens per second of my answers
        print numbers after a reply
        how many tokens per second was that
        show the stats of the last answer
        what does /stats tell me
        how fast was that answer
        how long did that take
        see how many tokens were used
        timing of the last answer
        """,
        "--stats|the statistics|/stats",
    ),
    Fact(
        "debug",
        "`--debug` shows the full traceback of an error. Without it an error is one line on stderr, `error: ...`.",
        "The exit status of a user error is 2.",
        ("--debug", "traceback"),
        """
        what does --debug do
        how do i [see|get|show] the [traceback|full error|stack trace|whole error]
        how do i debug [a problem|an error|it]
        --debug
        i get an error
        what do i do [with|about] an error
        where are errors printed
        how do i report a [bug|problem]
        it does not work
        it [crashes|crashed|fails|failed|is broken]
        what is the exit [code|status] of an error
        how are errors shown
        something went wrong
        debug mode
        there is an error
        it stopped with an error message
        i see error: and nothing more
        what went wrong
        show the python traceback
        more information about an error
        a crash
        the error message is too short for me
        where does the stack trace hide
        it failed and i want to know why
        tell me about --debug
        how do i see what went wrong
        an error came up
        what is this error
        i got an error message
        it gives an error
        how do i get the traceback
        show me the whole error
        it does not run
        it does not start
        the program failed
        help, an error
        """,
        "--debug|error messages|the debug flag",
    ),
    Fact(
        "precedence",
        "What you give yourself wins, then the model's `generation_config.json`, then the defaults.",
        "So a flag always beats the checkpoint's own settings.",
        ("generation_config.json",),
        """
        which [setting|option|value|settings] wins
        what is the [order|precedence] of [options|settings|the options]
        what is generation_config.json [for|]
        are the model's own settings used
        where do the [default|defaults|default options|default values] come from
        does it [read|use] generation_config.json
        what are the default [options|settings|values]
        do flags [override|beat] the [model|model settings|generation config]
        precedence
        which options are used when i give none
        default settings
        whose settings count
        do my flags win
        does the model bring its own settings
        which value is taken if two are given
        order of settings
        what if generation_config.json says something else
        if both i and the checkpoint set a temperature, whose is used
        how are conflicting settings resolved
        in what order are options looked up
        which value counts
        whose options win
        does the checkpoint set options
        where do options come from
        does a flag override the model
        do my options beat the model's
        tell me the order of options
        are there defaults in the model
        does generation_config.json count
        what are the defaults
        the checkpoint has its own settings
        """,
        "generation_config.json|the precedence of options",
    ),
    Fact(
        "options",
        "Sampling options are `--temp`, `--top-p`, `--top-k`, `--min-p`, `--seed`, `--max-tokens`, `--stop` and the penalties. "
        "Ask me about any of them.",
        "`--help` on a command lists them all with their defaults.",
        ("--temp", "--top-k", "--seed"),
        """
        which [options|flags|parameters|sampling options|settings] [are there|exist|can i use|does it have|do you have]
        what [options|flags|sampling options|parameters|settings] [are there|exist|can i set]
        list [the|all|] [options|flags|settings]
        what do the flags do
        explain the [flags|options]
        how do i control [sampling|generation|the output]
        which sampling [options|methods|flags] are [there|supported]
        what can i [set|change|tune]
        all flags
        tell me about the [options|flags]
        command line [options|flags]
        what can be set
        which settings are there
        flags for sampling
        show me the options
        what options does generation have
        names of the options
        give me an overview of the flags
        what knobs does sampling have
        name the parameters i may set
        tell me about the options
        which flags can i use
        how do i see all options
        the list of options
        what flags are there for sampling
        control the output
        how can i control the text
        which parameters can i change
        what can i tune
        the sampling flags please
        give me all flags
        """,
        "the options|the flags|the sampling options",
    ),
    # ---- how it works
    Fact(
        "one_evaluation",
        "Each decoded token costs exactly one launch and one wait for the device: the whole step, sampling included, is one lazy graph.",
        "Reading a value in between would stop the GPU; so the token is the only thing read.",
        ("one launch and one wait",),
        """
        what does one evaluation per token mean
        what is one evaluation per token
        one evaluation per token
        why one evaluation per token
        how often does it [wait for|sync with|talk to] the [gpu|device]
        how many [syncs|gpu syncs|evaluations|launches|waits] [per token|does a token cost|are there per token|for each token]
        how does the decode loop work
        what happens for each token
        what does a [decode step|decoded token|token] cost
        explain one evaluation per token
        how is [the decode loop|decoding|a step] organised
        where does it wait for the gpu
        what is a gpu sync
        is sampling [in|part of] the graph
        what makes the decode loop fast
        what is so special about the decode loop
        how many times does python wait for the gpu
        tell me about this one evaluation per token thing
        is there a sync for every token
        how is a token computed
        what does a step cost
        number of evaluations per token
        how many times per token does it touch the device
        i read about a single evaluation for every token, what is that
        when does the gpu have to be waited for
        tell me about one evaluation per token
        what is meant by one evaluation per token
        how many evaluations does a token need
        how many times does it wait per token
        how many waits are there
        what is one launch and one wait
        why only one evaluation
        how does decoding use the device
        what happens in a decode step
        how is a decode step run
        is there just one sync per token
        what is an evaluation
        """,
        "one evaluation per token|the decode loop|gpu syncs",
    ),
    Fact(
        "reproducible",
        "Yes: the same seed and the same options give the same tokens on every run, bit for bit.",
        "The random numbers are counter-based (threefry), so they depend only on the seed and the position.",
        ("bit for bit",),
        """
        is it [reproducible|repeatable|deterministic]
        are [results|answers|runs|the answers] [reproducible|repeatable|the same every time|deterministic]
        does the same seed give the same [text|tokens|answer]
        will i get the same [text|answer|tokens] [again|tomorrow|every time|on every run]
        how reproducible is it
        does a run repeat exactly
        is the output [always|] the same with the same seed
        can i reproduce [a run|results|an answer]
        reproducibility
        same seed same text
        do two runs give the same tokens
        is the same text guaranteed
        are two runs equal
        does it give identical results
        repeatable results
        exactly the same again with the same seed
        how deterministic is sampling
        if i start it twice with equal seed, are the texts equal
        how exact is repetition of a run
        can results be reproduced
        are the results reproducible
        will the text be the same again
        is the output deterministic
        are runs identical
        do i get the same tokens every run
        will it be the same tomorrow
        can a run be repeated exactly
        how exact is a repeated run
        is a run with a seed repeatable
        same seed, same text
        is it the same on every run
        """,
        "reproducibility|reproducible results",
    ),
    Fact(
        "threefry",
        "Random numbers come from threefry, a counter-based generator: "
        "a number depends only on the seed and a counter, so every backend makes the same ones.",
        "A common generator keeps a state, and each library has another; a counter needs none.",
        ("threefry", "counter"),
        """
        what is [threefry|a counter based generator|counter based rng]
        how are [the|] random numbers made
        which random [number|] generator [is used|does it use|do you use]
        where do the random numbers come from
        how do all backends get the same random numbers
        what rng [does it use|is it]
        threefry
        random number generator
        why threefry
        how does the [rng|random generator|randomness] work
        why are the random numbers the same on [every|each] backend
        the random number algorithm
        which generator makes the random numbers
        how are the backends' random numbers equal
        is it numpy's random generator
        counter based random numbers
        source of randomness
        by what algorithm are random values drawn
        tell me which rng is inside
        how can three backends draw equal random numbers
        tell me about threefry
        how does threefry work
        how does it make random numbers
        what kind of random generator is it
        where does the randomness come from
        which rng is used
        what is the rng
        how are random numbers drawn
        random numbers on all backends
        the generator of random numbers
        why not numpy's generator
        """,
        "threefry|the random numbers|the rng",
    ),
    Fact(
        "gumbel",
        "Sampling adds Gumbel noise to the logits and takes the argmax, which draws exactly from the softmax without a loop.",
        "It stays inside the graph: no probability has to come back to Python.",
        ("gumbel", "argmax"),
        """
        what is [gumbel noise|the gumbel trick|gumbel max|gumbel]
        how [does|is] [the sampling|sampling|a token] [work|done|sampled|chosen]
        how is the next token [chosen|picked|sampled|selected|drawn]
        how do you sample
        how does the sampler work
        gumbel
        why gumbel noise
        what does the sampler do
        sampling
        how does it choose the next [word|token]
        what is sampling
        explain [the|] sampling
        how is a token drawn
        method of sampling
        from logits to a token
        how does the model pick a word
        argmax with noise
        drawing the next token
        in what way does it draw the following token
        how does sampling happen inside the graph
        what is that gumbel thing
        tell me about sampling
        how does sampling work
        how does the model choose a token
        how is the token chosen
        how do you choose words
        what is the gumbel max trick
        tell me about gumbel noise
        why add noise to logits
        what is sampled and how
        how does the sampler choose
        draw a token from the logits
        """,
        "sampling|gumbel noise|the gumbel trick",
    ),
    Fact(
        "cache",
        "One Cache object owns keys, values, rope tables and masks. "
        "It is preallocated and grows in steps of 256 tokens; nothing is concatenated per token.",
        "Growing in steps keeps memory copies rare, and shapes stable for the compiler.",
        ("steps of 256",),
        """
        what is the cache object
        how [is|does] the cache [work|grow|allocated|managed|organised|stored]
        how big is the cache
        what does the cache [hold|own|contain]
        who owns the [keys and values|cache|rope tables|masks]
        is the cache [preallocated|concatenated|copied]
        how does the cache get larger
        the cache class
        where are the [keys and values|rope tables|masks] kept
        when does the cache grow
        how is memory for the cache [managed|allocated]
        cache implementation
        how is the cache made
        does the cache grow
        size of the cache
        what is in the cache object
        is memory reserved ahead
        how does the cache get more room
        in which steps is the cache enlarged
        what belongs to the cache object
        does the cache get concatenated for each token
        tell me about the cache object
        how does the cache work
        how large is the cache
        how does the cache grow
        when is the cache enlarged
        what belongs in the cache
        which arrays are in the cache
        does the cache copy anything
        how is the cache stored
        who holds the rope tables
        what does the cache own
        """,
        "the cache object|the cache class|how the cache grows",
    ),
    Fact(
        "prefix",
        "A second turn prefills only what is new: the longest common prefix with the cache is reused.",
        "So a long conversation stays quick, and `/regen` costs only the answer.",
        ("only what is new",),
        """
        is the cache [reused|kept] between turns
        what is [prefix reuse|prefix caching|prompt caching]
        does it [compute|read|process|prefill] the whole conversation [again|each time|every turn]
        what happens [in|on] the second turn
        why is the second turn [faster|so fast|quick]
        how does prefix reuse work
        does it reuse the [cache|prefix|old tokens|prompt]
        is the [conversation|history|old text] computed again
        prefix reuse
        how are several turns handled
        does every turn start from [scratch|the beginning|zero]
        prompt cache
        does it start from zero on each message
        are old turns computed again
        reuse of the cache
        why is the next answer faster
        what is kept between turns
        are earlier tokens reused
        must old messages be processed again for each reply
        what is reused when i send another message
        does a long history make each turn slow
        is the cache kept for the next turn
        does it reuse earlier tokens
        are the earlier tokens computed again
        what happens on the next message
        is the old conversation read again
        how is the second turn done
        why is a second turn so quick
        tell me about prefix reuse
        does each message start from zero
        what is reused between turns
        must it read everything again
        """,
        "prefix reuse|prompt caching",
    ),
    Fact(
        "overflow",
        "When a conversation outgrows the context the oldest turns are dropped; the system prompt stays.",
        "The cache then keeps what still fits and prefills the rest.",
        ("oldest turns are dropped",),
        """
        what happens when [the conversation|the chat|it] [gets|is|grows|becomes] too long
        what happens when the context is full
        what [if|happens if] [the conversation|the chat|my chat] [outgrows|is longer than|exceeds] the context
        how are long conversations handled
        does it forget old [messages|turns]
        which messages are dropped
        how long can a conversation be
        what is the context [window|length|]
        context overflow
        conversation too long
        is the system prompt dropped
        why does it forget what i said [earlier|at the start|]
        what is a context window
        what if we talk too long
        the chat is very long
        does it drop old messages
        what happens at the end of the context
        limit of a conversation
        longer than the window
        the context is full, what now
        we have talked for hours, does everything still fit
        what gets thrown away once the window is full
        will old turns vanish
        what if the conversation is too long
        what if the context is full
        what happens in a very long chat
        is there a limit to a conversation
        does it forget the beginning
        when are old messages dropped
        which turns are dropped first
        will my first message be forgotten
        the conversation does not fit any more
        tell me about the context window
        how is a full context handled
        """,
        "the context window|long conversations",
    ),
    Fact(
        "finish",
        "An answer ends for one of four reasons: `eos` (end token), `stop` (stop string), `length` (max tokens) or `context` (full).",
        "`--jsonl` and `--stats` show the reason.",
        ("`eos`", "`length`", "`context`"),
        """
        what is [a|the] finish reason
        which finish reasons [are there|exist]
        what are the finish reasons
        why does an answer end
        why did [it|the answer|the model|generation] [stop|end|finish]
        when does [it|the model|generation|an answer] [stop|end|finish]
        how does it know when to stop
        list the finish reasons
        what does finish reason [length|context|eos|stop] mean
        finish reason
        what ends an answer
        for which reasons does it stop
        why is the reply over
        what made it stop
        reasons to stop
        how does generation end
        when is an answer done
        what is eos, stop, length and context
        how many ways are there for a reply to end
        what might have terminated my answer
        name the possible reasons for stopping
        tell me about finish reasons
        what is the reason for stopping
        why did the answer stop
        why is the answer finished
        what can end an answer
        when is the answer complete
        which reasons to stop exist
        how does the generation stop
        what does the finish reason say
        the possible finish reasons
        how can an answer end
        """,
        "the finish reason|finish reasons",
    ),
    Fact(
        "rope_types",
        "Supported rope types are `default`, `linear`, `dynamic`, `llama3` and `yarn`.",
        "They scale the rotation frequencies, so that a model can read longer texts than it was trained on.",
        ("linear", "llama3", "yarn"),
        """
        which rope [types|scalings|variants|kinds] [are there|are supported|does it support|work]
        what rope [types|scaling|scalings] [are there|are supported|does it support]
        what is [rope scaling|yarn|linear scaling|llama3 rope|dynamic rope|dynamic ntk]
        [does it|do you] support [yarn|rope scaling|linear rope|llama3 rope|dynamic rope]
        rope types
        rope scaling
        how does it [read|handle] long context models
        is [yarn|rope scaling] supported
        list the rope types
        which ways to scale rope
        is [linear|dynamic|yarn|llama3] rope there
        does it do [yarn|rope scaling|long context]
        types of rope
        long context checkpoints
        is my rope type known
        will a yarn checkpoint load
        name the kinds of rope scaling you know
        how are long context variants of rope handled
        tell me about rope scaling
        what is yarn
        is linear rope supported
        which rope scalings does it know
        how are longer contexts done
        supported rope types
        which kinds of rope exist
        scaling for long context
        is dynamic rope supported
        does llama3 rope work
        long context rope
        """,
        "rope scaling|yarn|the rope types",
    ),
    Fact(
        "gqa",
        "Grouped heads means that several query heads share one key-value head. The cache gets smaller, with nearly the same quality.",
        "I have 6 query heads and 2 key-value heads, so three queries share one.",
        ("share one key-value head",),
        """
        what [is|are] [gqa|grouped query attention|grouped heads|grouped-query attention|key value heads|kv heads]
        does it support [gqa|grouped query attention|grouped heads]
        why are there fewer [kv heads|key value heads|key heads]
        explain [gqa|grouped heads|grouped query attention]
        what does gqa [mean|do]
        how do grouped heads work
        gqa
        grouped query attention
        why grouped heads
        what is num_key_value_heads
        fewer key heads than query heads
        what is a key value head
        why share keys and values
        groups of heads
        meaning of num_key_value_heads
        heads that share keys
        how come queries outnumber keys
        what is the idea behind gqa
        i saw num_key_value_heads in a config, what does it say
        tell me about grouped heads
        what is grouped query attention
        is gqa supported
        does it do grouped query attention
        do query heads share keys
        why fewer kv heads
        what are kv heads
        why do heads share keys and values
        how many queries share a key
        what is the use of gqa
        shared key value heads
        """,
        "gqa|grouped heads|grouped-query attention|kv heads",
    ),
    Fact(
        "tied",
        "Tied embeddings means that the output layer uses the same matrix as the input embedding, which saves memory.",
        "I have tied embeddings too, and so has Llama 3.2 1B.",
        ("same matrix",),
        """
        what are tied embeddings
        what does tie_word_embeddings [mean|do]
        are tied embeddings supported
        does it support tied embeddings
        explain tied embeddings
        why tie [the|] embeddings
        tied embeddings
        what is [weight tying|tie_word_embeddings]
        where is lm_head
        why is there no lm_head
        my checkpoint has no lm_head
        input and output embeddings are the same
        shared embeddings
        meaning of tie_word_embeddings
        no lm_head.weight in my file
        why is the output matrix missing
        one matrix for input and output
        what does it mean when embeddings are tied
        the output head is missing in my file
        which benefit has weight tying
        tell me about tied embeddings
        does it support weight tying
        is tying supported
        what is tied in tied embeddings
        my model has tied embeddings
        why are embeddings tied
        a model without lm_head
        is lm_head needed
        one matrix for both ends
        the output uses the input embedding
        what does tying do
        """,
        "tied embeddings|weight tying|tie_word_embeddings",
    ),
    Fact(
        "sliding",
        "A sliding window means that a token looks back only a fixed number of tokens, as in early Mistral models. It is supported.",
        "Far tokens still count a little, since each layer passes on what it saw.",
        ("looks back only",),
        """
        what is [a|the] sliding window
        what is sliding window attention
        does it support [sliding window|sliding windows|sliding window attention]
        how does [mistral attention|the sliding window|sliding window attention] work
        what is special about mistral
        is the sliding window supported
        sliding window
        explain the sliding window
        what does sliding_window in the config mean
        which models use a sliding window
        how many tokens back does mistral look
        limited attention
        windowed attention
        meaning of sliding_window
        does mistral's window work
        attention over a window
        how far back does a mistral token see
        what is meant by windowed attention
        help me understand sliding windows
        tell me about the sliding window
        does mistral use a window
        is mistral's window supported
        how does the window work in mistral
        what is windowed attention
        how far can a token look back
        what does sliding window mean
        why a sliding window
        attention with a window
        is sliding window attention there
        """,
        "the sliding window|sliding window attention",
    ),
    # ---- the REPL
    Fact(
        "repl_commands",
        "The REPL knows `/help`, `/clear`, `/regen`, `/system`, `/set`, `/save`, `/load`, `/stats`, `/read` and `/exit`.",
        "Ctrl-C stops a reply and keeps the session; Ctrl-D leaves.",
        ("/regen", "/save", "/exit"),
        """
        which [slash|repl|chat|] commands [does the repl have|are there in the repl|can i use in the chat|does the chat know]
        what are the [slash|repl|chat] commands
        what does /help [do|show]
        type /help
        list the [slash|repl|chat] commands
        which commands can i [type|use] [here|in the chat|in the repl]
        what can i type [here|in the chat|in the repl]
        slash commands
        commands in the chat
        how do i see the commands of the repl
        what commands start with a slash
        commands inside the chat
        what slash commands exist
        all commands that start with /
        help for the chat
        which commands has the repl
        list what i can type
        name everything i can type after a slash
        give me the repl's commands
        inside the chat, which commands work
        tell me the slash commands
        what are the commands in the chat
        which commands are in the repl
        what commands can i use here
        what does the repl understand
        how do i get help in the chat
        what can i do in the repl
        which slash commands are there
        commands of the chat please
        the list of slash commands
        what may i type after the slash
        """,
        "the slash commands|the repl commands|/help",
    ),
    Fact(
        "save",
        "In the REPL `/save FILE` writes the conversation to a file, and `/load FILE` brings it back.",
        "After `/load` you go on where you stopped.",
        ("/save file", "/load file"),
        """
        how do i [save|store|keep] [a|the|this|my] [conversation|chat|session]
        how do i [load|restore|open|continue|resume] [an old|a saved|the last|my old|an earlier] [conversation|chat|session]
        what does [/save|/load|/save file] do [in the repl|in the chat]
        /save
        /load
        can i save [this|the chat|my chat|our conversation]
        save the [chat|conversation]
        how do i go on with an old chat
        where is my conversation saved
        can i continue [tomorrow|later]
        how do i write the chat to a file
        keep [this|our] chat
        i want to continue this [conversation|chat] [tomorrow|later|next week]
        store what we said
        open a conversation from a file
        write this conversation down
        bring back an earlier chat
        keep this for later
        i must leave now but want to go on tomorrow
        can a conversation be put into a file
        how do i get my old session back
        how do i store a conversation
        how do i reopen a conversation
        load a conversation from a file
        open my saved chat
        save what we said
        can the chat be saved
        how can i keep this chat
        how do i continue a saved chat
        is the conversation saved
        get back to an old conversation
        what does /save do
        what does /load do in the chat
        write the chat into a file
        """,
        "/save|/load|saving a conversation",
    ),
    Fact(
        "set",
        "In the REPL `/set OPTION VALUE` changes an option, for example `/set temp 0.7`.",
        "The change holds for the rest of the session.",
        ("/set option value",),
        """
        how do i [change|set] [an option|options|the temperature|a setting|the seed|max tokens|settings] in the [chat|repl|running chat]
        what does /set do
        /set
        can i change [options|the temperature|settings] [while chatting|during the chat|without leaving|in the repl]
        how do i use /set
        change a setting in the chat
        how do i change the settings here
        change options here
        how do i set an option during a conversation
        what can i change with /set
        change the temperature now
        set temp while chatting
        switch an option during the chat
        other settings without a restart
        adjust the seed in the repl
        modify options in the running chat
        do i have to restart to alter the temperature
        inside the repl i want other options
        can settings be changed in a running session
        how do i change options in the chat
        change an option while chatting
        set an option here
        can i set the temperature here
        how do i change temp in the repl
        set the seed during the chat
        what is /set for
        tell me about /set
        options during a chat
        change the settings of this session
        how do i use other settings now
        """,
        "/set|the /set command",
    ),
    Fact(
        "regen",
        "In the REPL `/regen` throws the last reply away and makes a new one.",
        "It is useful with `--temp` above 0; a greedy reply comes out the same again.",
        ("/regen", "last reply"),
        """
        how do i [get|make|ask for|generate] [another|a new|a different] [answer|reply|version]
        what does /regen do
        /regen
        how do i [retry|redo|regenerate] [the|an|the last] [answer|reply]
        can it answer again
        how do i try again
        regenerate
        i don't like the [answer|reply]
        retry the last answer
        can i redo the last reply
        how do i use /regen
        another try please
        give me a different answer
        that answer was bad, again
        redo
        the last reply again
        answer once more
        a new version of the answer
        that reply was bad, how can i have another one
        is there a way to redo an answer
        which command replaces the last reply
        how do i get a new answer
        replace the last answer
        how is the last reply replaced
        make a new reply
        ask for the answer again
        generate it again
        try that again
        give me another answer
        what is /regen for
        tell me about /regen
        repeat the last reply
        the reply was bad
        one more try
        """,
        "/regen|the /regen command",
    ),
    Fact(
        "clear",
        "In the REPL `/clear` begins a new conversation; the model stays loaded, and system prompt and options stay.",
        "`/system none` takes the system prompt away too.",
        ("/clear", "stays loaded"),
        """
        how do i [clear|reset|restart|empty|delete|forget] [the|this|my] [chat|conversation|history|session]
        what does /clear do
        /clear
        how do i start [a new|a fresh] [chat|conversation]
        start over
        new chat
        new conversation
        reset
        forget everything
        can i start again without loading the model
        clear the chat
        let us start again
        wipe the [chat|history|conversation]
        begin again
        a fresh start
        drop the history
        empty chat
        start with a clean chat
        i want to begin anew with an empty history
        how do i wipe what we said
        which command resets the conversation
        how do i start anew
        how do i begin a new conversation
        forget this conversation
        delete what we said
        empty the history
        how do i reset it
        reset the conversation
        what is /clear for
        tell me about /clear
        make a new chat
        throw the conversation away
        how can i start again
        """,
        "/clear|the /clear command",
    ),
    Fact(
        "read",
        "In the REPL `/read FILE` sends the text of a file as a message.",
        "Mind the context length: a long file may not fit.",
        ("/read file",),
        """
        how do i [give|show|send|add] [it|the model|you] a [file|text file|document] in the chat
        what does /read do
        /read
        can [it|you|the model|the chat] read [a file|my files|files|a document|my notes|my code]
        how do i ask [about|questions about] [a file|a document|my code]
        how do i [put|insert|paste] a file into [the chat|my message|the conversation]
        read a file
        how do i use /read
        can i upload a [file|document|text]
        summarize a file
        how do i load a text file into the chat
        ask questions about a [file|document]
        feed a file to the chat
        put my notes into the chat
        can it look at my file
        send a text file
        let it read my document
        i have a document and want to talk about it here
        which command brings a file's text into the chat
        can my notes be put into a message
        can you look at my file
        can it look at a document
        how do i use a file in the chat
        how do i show it a file
        read my file
        send my document
        talk about a document
        what is /read for
        tell me about /read
        can i give you a text file
        put a text into the chat
        my notes are in a file
        """,
        "/read|the /read command",
    ),
    Fact(
        "exit",
        "Type `/exit` or press Ctrl-D to leave the chat.",
        "Use `/save FILE` first if you want to keep the conversation.",
        ("/exit", "ctrl-d"),
        """
        how do i [leave|exit|quit|close|end|get out of|stop] [the chat|the repl|the program|this|it|here]
        what does [/exit|ctrl-d|ctrl d] do
        /exit
        quit
        exit
        how do i get out
        how can i quit
        end the [chat|program|session]
        close the program
        i want to [leave|quit|exit|stop]
        how do i go back to the shell
        /quit
        close [this|it|the chat]
        how do i finish
        leave the program
        which command quits
        end the session
        get me out of here
        how to close this program
        i am done
        i am done here, how do i get back to my shell
        which key ends the program
        what do i type when i want to go
        how do i stop the program
        how do i end the chat
        how do i quit the repl
        how can i leave
        what is the command to quit
        what ends the chat
        how do i get back to the terminal
        the command for leaving
        i would like to quit
        i want out
        how do i finish the session
        which keys leave the chat
        """,
        "/exit|ctrl-d",
    ),
    Fact(
        "ctrl_c",
        "Ctrl-C stops the reply that is being written and keeps the session. Ctrl-D leaves.",
        "What was written so far stays in the conversation.",
        ("ctrl-c stops the reply",),
        """
        how do i [stop|interrupt|cancel|abort] [a|the|this] [reply|answer|generation|output|running answer]
        what does [ctrl-c|ctrl c|control c] do
        it does not stop [writing|talking|]
        it writes too much, how do i stop it
        ctrl-c
        how do i make it [stop talking|shut up|stop writing]
        can i interrupt [it|the model|you]
        what happens when i press [ctrl-c|ctrl c|control c]
        stop the answer
        interrupt
        does ctrl-c end the program
        cancel the reply
        stop the current [answer|reply]
        which key [stops|interrupts|cancels] it
        break off an answer
        it keeps talking, how do i stop it
        it goes on and on
        can i cancel a reply
        stop it while it writes
        halt the output
        the answer goes on and on, which keys stop it
        may i break off a reply half way
        will i lose the session if i press control c
        how do i break off a reply
        break off the answer
        can i stop a reply half way
        can i stop it in the middle
        how do i stop the model from writing
        stop writing
        stop it please
        what does control c do
        is ctrl-c safe
        does ctrl-c lose the session
        the reply is too long, stop it
        how do i interrupt a long answer
        which key stops the answer
        """,
        "ctrl-c|interrupting a reply",
    ),
    Fact(
        "comfort",
        "The REPL keeps its history across runs, takes multi-line input (Alt-Enter) and renders Markdown.",
        "The arrow keys and Ctrl-R bring back earlier lines, and Tab completes commands.",
        ("history across runs", "multi-line"),
        """
        does the [repl|chat] [have|keep|save] [a|its|] [history|input history]
        can i [type|write|enter] [several lines|more than one line|multiple lines|multi-line text]
        how do i [type|write|enter] [several lines|multiple lines|a multi line message|a new line]
        does it [render|show|support] markdown
        does the arrow key work
        multi-line input
        what are the features of the repl
        what comfort does the repl have
        is markdown [rendered|supported]
        does it remember my input
        can i scroll back to earlier [input|lines]
        what is nice about the chat
        enter a message with several lines
        is there an input history
        markdown in the terminal
        how do i make a line break
        recall what i typed before
        editing in the chat
        my message has four lines, does that work
        do the lines i typed last week come back
        is bold text displayed nicely
        does it keep my input history
        is the history kept
        can i get my old input back
        how do i write more than one line
        how do i enter a new line
        several lines in one message
        does the chat show markdown
        is bold text shown
        how is markdown shown
        which comforts has the repl
        what about history and markdown
        arrow keys in the chat
        """,
        "multi-line input|the history of the repl|markdown",
    ),
    Fact(
        "piped",
        "Yes: piped input works as a script. Each line of `python -m mlx_llama.chat < script.txt` is one message or command.",
        "Answers go to stdout and everything else to stderr.",
        ("works as a script",),
        """
        can i [script|automate] the [chat|repl]
        can i pipe [input|lines|text|a file|commands] into the [chat|repl]
        how do i [script|automate|test] the [chat|repl]
        does the [repl|chat] read [stdin|a pipe|piped input|a script]
        how do i run a chat from a [file|script]
        piped input
        can the [chat|repl] run without a terminal
        scripted chat
        what happens with piped input
        run the chat non interactively
        automate a conversation
        feed a script to the chat
        use the chat in a pipeline
        a file of messages for the chat
        run many messages from a file
        chat without a terminal
        i want to drive the repl from a text file
        does the chat work when its input is a pipe
        may commands for the repl come from a script
        use the chat from a script
        can a script use the chat
        use a pipe with the chat
        can i give the chat a file of messages
        run the repl from a file
        does the repl work in a pipeline
        is the repl scriptable
        how do i script a conversation
        what if stdin is a pipe
        chat commands from a file
        let a file talk to the chat
        """,
        "piped input|scripting the repl",
    ),
    # ---- words a newcomer meets
    Fact(
        "token",
        "A token is a piece of text, often a word or part of one, with a number. A model reads and writes tokens.",
        "The tokenizer turns text into tokens and back. A common English word is about one token.",
        ("piece of text", "number"),
        """
        what is a token
        what are tokens
        what [does token mean|is meant by token]
        how long is a token
        is a token a word
        explain tokens
        how many tokens [is|has] a word
        token
        define token
        tokens explained
        difference between a word and a token
        what is a tokenizer
        what does the tokenizer do
        is a token [the same as|like] a word
        meaning of token
        what do you call a token
        what are these tokens
        why tokens and not words
        pieces of text
        what does a tokenizer produce
        people keep saying tokens, what are they
        does one word equal one token
        into what is text cut
        tell me about tokens
        what is meant by a token
        what does token mean
        what is a token exactly
        how big is a token
        is one token one word
        words and tokens
        what is text cut into
        what is the tokenizer for
        how does a tokenizer work
        why are there tokens
        token, what is that
        """,
        "a token|tokens|the tokenizer",
    ),
    Fact(
        "prefill",
        "Prefill reads the whole prompt at once; decode then makes one token at a time. "
        "Prefill is limited by arithmetic, decode by memory speed.",
        "Prefill runs in chunks to bound memory and projects only the last position to the vocabulary.",
        ("reads the whole prompt", "one token at a time"),
        """
        what is [prefill|the prefill|decode|decoding]
        what is the difference between prefill and decode
        what [does prefill mean|happens in prefill|happens in decode]
        prefill [and|vs|or|versus] decode
        explain prefill [and decode|]
        why does the first token take [longer|so long]
        why is there a pause before the answer
        what are the two phases [of generation|]
        prefill
        how is the prompt [read|processed]
        what is time to first token
        phases of generation
        what is the prefill phase
        what is the decode phase
        difference of prefill and decode
        why does it wait before the first word
        reading the prompt
        is prefill slower than decode
        why does nothing happen at first with a long prompt
        how do reading the prompt and writing the answer differ
        help me understand prefill
        tell me about prefill
        what does prefill mean
        what does decode mean
        what is done in prefill
        how are prefill and decode different
        why is the first token slow
        how does it read a prompt
        what comes before the first token
        how is a long prompt read
        the two phases of generating
        the pause at the start
        """,
        "prefill|prefill and decode|decode",
    ),
    Fact(
        "kv_cache",
        "The KV cache keeps the keys and values of all earlier tokens, so that each new token computes only its own.",
        "Without it every token would read the whole text again. It costs memory that grows with the text.",
        ("keys and values of all earlier",),
        """
        what is [a|the|] [kv cache|key value cache|kv-cache|kvcache]
        what does the [kv cache|key value cache] do
        why [do we need|is there|use] a [kv cache|cache]
        explain the kv cache
        how does [a|the] kv cache work
        kv cache
        what is cached [during decoding|]
        why keep keys and values
        what is stored in the kv cache
        what would happen without a [kv cache|cache]
        key value cache
        why cache keys and values
        why store keys and values
        what is saved in a kv cache
        is a kv cache needed
        meaning of kv cache
        how does caching keys help
        memory of the attention
        what is remembered so that old tokens are not computed again
        for what does attention need a kv cache
        help me understand the key value cache
        tell me about the kv cache
        why is there a kv cache
        what is the kv cache for
        what does a kv cache save
        why are keys and values kept
        keys and values of old tokens
        what does caching save
        how does a key value cache help
        do we need a kv cache
        what does kv mean
        what if there was no kv cache
        """,
        "the kv cache|kv cache|a kv cache|the key value cache",
    ),
    Fact(
        "rope",
        "RoPE tells attention where a token stands: it rotates queries and keys by an angle that grows with the position.",
        "So a score depends on the distance of two tokens, not on where they are.",
        ("rotates queries and keys",),
        """
        what is [rope|rotary position embedding|rotary embeddings|a rotary embedding|a rope table]
        what does rope [do|mean|stand for]
        explain rope
        how does rope work
        how does the model know [the order|positions|the position] of [tokens|words]
        rope
        rotary embedding
        why rope
        what are positional embeddings
        how are positions encoded
        what is rope theta
        how does it know the order of words
        rotation of queries and keys
        meaning of rope
        what is rotary
        position information
        how are positions put in
        the rotary thing
        in what way does attention learn where a word stands
        what do rotary embeddings do
        help me understand rope
        tell me about rope
        what is rope for
        what does rope do to queries
        what does rope mean
        why does llama use rope
        how does a model know positions
        how does it know word order
        the rotation in attention
        what are rotary embeddings
        how are positions given to the model
        why rotate queries and keys
        """,
        "rope|rotary embeddings|rotary position embedding",
    ),
    Fact(
        "rmsnorm",
        "RMSNorm divides a vector by its root mean square and scales it with learned weights, which keeps the numbers in range.",
        "It is LayerNorm without the mean; Llama uses it before attention and before the MLP.",
        ("root mean square",),
        """
        what is [rmsnorm|rms norm|an rmsnorm|rms normalization]
        what does [rmsnorm|rms norm] do
        explain rmsnorm
        how does rmsnorm work
        why [rmsnorm|does llama use rmsnorm|is there a norm]
        rmsnorm
        what [normalization|norm] does llama use
        what is the norm layer
        difference between layernorm and rmsnorm
        rms norm
        meaning of rmsnorm
        how are activations normalised
        what is the normalization layer
        root mean square norm
        why normalise
        what does the norm do
        how are vectors normalised in llama
        which kind of norm is in each block
        help me understand rmsnorm
        tell me about rmsnorm
        what is rmsnorm for
        what does rmsnorm mean
        which norm does llama have
        what norm is used
        why is there a norm in each block
        how are numbers kept in range
        what is the difference to layernorm
        normalisation in llama
        what is root mean square
        where is rmsnorm used
        """,
        "rmsnorm|rms norm|the norm",
    ),
    Fact(
        "swiglu",
        "SwiGLU is the MLP of a Llama: one projection, through SiLU, gates a second one, and a third brings it back.",
        "In short: down(silu(gate(x)) * up(x)).",
        ("silu", "gates"),
        """
        what is [swiglu|swi glu|silu|the mlp|the feed forward network]
        what does [swiglu|the mlp|the feed forward layer] do
        explain swiglu
        how does [swiglu|the mlp] work
        why swiglu
        swiglu
        what is in the mlp
        which activation [function|] does llama use
        what are gate up and down
        feed forward layer
        what is gate_proj
        meaning of swiglu
        what is the feed forward part
        gate and up projection
        what does silu do
        the mlp of llama
        which mlp is used
        what happens in the feed forward part of a block
        what are gate_proj and up_proj for
        help me understand swiglu
        tell me about swiglu
        what is swiglu for
        what does swiglu mean
        what is the feed forward part of llama
        what does the feed forward network do
        how does the gate work
        which activation is in the mlp
        what happens in the mlp
        what is silu for
        what is up_proj
        the mlp of a block
        """,
        "swiglu|the mlp|the feed forward layer",
    ),
    Fact(
        "attention",
        "Attention lets each token look at the tokens before it: queries are compared with keys, and the values are mixed by the scores.",
        "The mask hides the future, so a token cannot see what comes after it.",
        ("queries are compared",),
        """
        what is [attention|self attention|an attention head]
        what does attention do
        explain attention
        how does [attention|self attention] work
        attention
        what are queries keys and values
        what is [a query|a key|a causal mask|the mask]
        what are [queries|heads|attention heads]
        qkv
        what is qkv
        why attention
        meaning of attention
        how do tokens see each other
        what are keys and values
        how are tokens mixed
        what does a head do
        query key value
        how do tokens look at one another
        what roles do query, key and value play
        help me understand attention
        tell me about attention
        what is attention for
        what does attention mean
        how does a token look at others
        how do tokens look back
        what do queries do
        what are the values in attention
        what is a causal mask for
        why is there a mask
        how does an attention head work
        queries, keys and values
        """,
        "attention|self attention|an attention head",
    ),
    Fact(
        "llama_model",
        "A Llama is a decoder-only transformer: token embeddings, a stack of blocks with attention and an MLP, "
        "and an output layer that predicts the next token.",
        "Its marks are RMSNorm, RoPE, SwiGLU and, later, grouped heads.",
        ("decoder-only transformer",),
        """
        what is [a llama|llama|a llama model|the llama architecture|a transformer|an llm|a language model|a large language model]
        how does [llama|a llama|a language model|a transformer|an llm] work
        explain [llama|the llama architecture|transformers|language models]
        what is a decoder only model
        transformer
        what is the architecture of llama
        what are the parts of a llama
        what is inside a llama model
        how is a llama built
        what does a block consist of
        meaning of llama
        what is the model made of
        how does the model work inside
        describe a transformer
        what are the building blocks of llama
        explain how an llm works
        what happens inside a language model
        of what parts does a llama consist
        give me the idea of a transformer
        how is such a language model put together
        tell me about llama
        what does llama mean
        how is a llama made
        how is llama built up
        what kind of model is llama
        how do language models work
        what is an llm exactly
        what is in a transformer
        which parts does a transformer have
        how does a transformer work
        what makes a model a llama
        what is a block in llama
        """,
        "the llama architecture|a transformer|a language model",
    ),
    Fact(
        "parameters",
        "Parameters, or weights, are the learned numbers of a model. A 1B model has a billion of them.",
        "More parameters can hold more knowledge, and need more memory and time.",
        ("learned numbers",),
        """
        what [is a parameter|are parameters|are weights|is a weight]
        what does [1b|7b|billion parameters] mean
        what are the [parameters|weights] of a model
        explain parameters
        parameters
        what does the b in 7b mean
        what does [model size|size of a model] mean
        what is stored in a model
        what are model weights
        meaning of parameters
        what is a billion parameters
        are weights and parameters the same
        why do models have so many parameters
        what is learned in training
        what does 7b stand for
        what is meant by a model with seven billion parameters
        those weights everyone talks about, what are they
        what is a model made of
        tell me about parameters
        what is a model parameter
        what does parameter mean
        what does billion parameters mean
        how many parameters has a 7b model
        what is a weight in a model
        what are the weights for
        what does b mean in 1b
        why does the number of parameters matter
        what are 7 billion parameters
        numbers in a model
        """,
        "parameters|model weights",
    ),
    Fact(
        "chat_template",
        "A chat template turns a conversation into the one text a model was trained on, with marks for system, user and assistant.",
        "It comes with the model, as a Jinja template, and is applied for you.",
        ("turns a conversation into",),
        """
        what is [a|the] chat template
        what does [a|the] chat template do
        why [do i need|is there|does a model have] a chat template
        explain chat templates
        how does a chat template work
        chat template
        what are chat templates
        how are messages put together
        how does the model know who is speaking
        how is a conversation formatted
        prompt format
        what is the prompt format
        meaning of chat template
        how is my message turned into a prompt
        format of the messages
        what are the marks around messages
        how are roles written
        what does the model see of a chat
        in what shape are messages handed to the model
        how are user and assistant told apart
        help me understand chat templates
        tell me about chat templates
        what is a chat template for
        what does chat template mean
        what is the format of a prompt
        what does a prompt look like
        how is a chat formatted
        how are messages formatted
        how are messages given to the model
        how does it tell user and assistant apart
        who applies the chat template
        where does the chat template come from
        """,
        "a chat template|chat templates|the chat template",
    ),
    Fact(
        "parity",
        "Parity testing runs the same checkpoint through two implementations and compares the numbers layer by layer. "
        "That is how the backends are kept equal.",
        "The judge is Hugging Face transformers; the first layer that differs is named.",
        ("compares the numbers",),
        """
        what is [parity testing|parity|a parity test]
        how do you [check|know|prove|make sure] [that|] the backends [agree|are right|are equal|give the same numbers]
        how is [correctness|the model|the math] [checked|tested|verified]
        explain parity testing
        parity
        what are parity tests [for|]
        how do you verify the model
        why parity tests
        how do i know that the numbers are right
        are the results checked against [transformers|hugging face|pytorch|the original]
        is the numpy version checked against torch
        how do you compare the backends
        do all three compute the same numbers
        proof that the backends are equal
        tests that compare implementations
        how is the mlx version verified
        what is compared in parity tests
        in what way are two implementations compared
        how can i be sure that mlx computes the right numbers
        help me understand parity tests
        tell me about parity testing
        what is parity for
        what does parity mean
        how do you test that backends agree
        how do you make sure the numbers are right
        how is the numpy backend checked
        compare two implementations
        how are the backends compared
        are the backends checked against each other
        is it compared with transformers
        are the numbers correct
        """,
        "parity testing|parity|parity tests",
    ),
    Fact(
        "why_numpy",
        "NumPy runs everywhere and hides nothing, so the CPU path works on any machine and is easy to read and to check against.",
        "It is also the reference that the other two backends are compared with.",
        ("hides nothing",),
        """
        why numpy
        why [do you use|does it use|is it written in|is there] numpy
        why is the [cpu path|cpu backend] [written|] in numpy
        what is numpy [for|used for|]
        why not [torch|c++|pytorch] on the cpu
        why a numpy backend
        is numpy not slow
        what is the reason for numpy
        numpy
        why would anyone use numpy for this
        why three implementations
        isn't numpy slow
        what is good about numpy
        who needs numpy here
        reason for a numpy backend
        why write it in numpy
        what is the numpy version good for
        for what reason was numpy taken for the cpu
        isn't numpy a strange choice
        what speaks for a numpy version
        tell me why numpy
        what is the use of numpy
        why was numpy chosen
        why does the cpu use numpy
        why not pytorch for the cpu
        why is there a numpy version
        is numpy fast enough
        what does numpy bring
        numpy is slow, why use it
        the reason for using numpy
        why is the cpu backend not in torch
        """,
        "numpy|the choice of numpy",
    ),
    Fact(
        "lazy",
        "Lazy evaluation means that operations first build a graph, and nothing is computed until a result is needed. MLX works that way.",
        "So a whole step can be planned, fused and run as one piece.",
        ("build a graph", "until a result is needed"),
        """
        what is [lazy evaluation|a lazy graph|laziness|a graph|a compute graph]
        what does lazy [mean|evaluation mean]
        explain lazy evaluation
        why is [mlx|it] lazy
        how does lazy evaluation work
        lazy evaluation
        what is mx.eval
        is mlx lazy
        when is something computed
        why lazy evaluation
        lazy
        what is the advantage of a lazy graph
        meaning of lazy
        what does it mean that mlx is lazy
        why does mlx wait to compute
        when does mlx compute
        operations that build a graph
        is anything computed at once
        why does mlx not compute things at once
        people say mlx is lazy, in what sense
        help me understand lazy graphs
        tell me about lazy evaluation
        what is lazy about mlx
        what does lazy mean in mlx
        why is mlx called lazy
        what is laziness in mlx
        when are results computed
        why not compute at once
        what is the graph for
        what is a lazy array
        how does a lazy library work
        does mlx compute immediately
        """,
        "lazy evaluation|a lazy graph|laziness",
    ),
    Fact(
        "eos",
        "EOS is the end-of-sequence token: when the model produces it, the answer is finished.",
        "A model can have several. I have two: one for a message, one for a plain text.",
        ("end-of-sequence",),
        """
        what is [eos|an eos token|the eos token|the end token|an end token]
        what does eos [mean|stand for|do]
        explain eos
        eos
        what is the end of sequence token
        how does a model end its answer
        which token ends an answer
        eos token
        what is eos_token_id
        what is your end token
        meaning of eos
        when does the model say it is finished
        the token at the end
        how does the model signal the end
        what stops a model
        end of sequence
        what is produced when the model has said all
        those three letters eos, what do they mean
        help me understand the end token
        tell me about eos
        what is eos for
        what does eos mean
        what is the eos token for
        what ends a sequence
        what stops the model
        which token stops the model
        how does it know that the answer is over
        the token that ends an answer
        what is the last token
        end token, what is that
        """,
        "eos|the eos token|the end token",
    ),
    Fact(
        "bos",
        "BOS is the beginning-of-sequence token, which stands first in every text that a Llama reads.",
        "It is added once. A chat template that already holds it does not get a second one.",
        ("beginning-of-sequence",),
        """
        what is [bos|a bos token|the bos token|the start token|a start token]
        what does bos [mean|stand for|do]
        explain bos
        bos
        what is the beginning of sequence token
        which token comes first
        bos token
        what is bos_token_id
        why is there a token at the start
        what is your start token
        meaning of bos
        the token at the beginning
        beginning of sequence
        what stands first in a prompt
        does every prompt get a start token
        which token starts a text
        with which token does every text begin
        those three letters bos, what do they mean
        help me understand the start token
        tell me about bos
        what is bos for
        what does bos mean
        what is the bos token for
        what starts a sequence
        which token is the first
        is there a start token
        the token that begins a text
        what is the first token
        do i have to add bos
        start token, what is that
        """,
        "bos|the bos token|the start token",
    ),
    Fact(
        "sentencepiece",
        "Sentencepiece is the tokenizer of the first Llamas and of me: it learns a vocabulary of pieces from text, spaces included.",
        "Its file is `tokenizer.model`. Llama 3 uses another kind, in `tokenizer.json`.",
        ("vocabulary of pieces",),
        """
        what is [sentencepiece|sentence piece|tokenizer.model|spm]
        what does sentencepiece do
        explain sentencepiece
        how does sentencepiece work
        sentencepiece
        which tokenizer [does llama use|do you use|do you have|is used]
        what tokenizer do you use
        how is a vocabulary learned
        is sentencepiece supported
        tokenizer.model
        what is bpe
        meaning of sentencepiece
        which tokenizer is it
        how does your tokenizer work
        the library for tokenizer.model
        what made your vocabulary
        what tokenizer do the llamas use
        what kind of tokenizer made your vocabulary
        which library cuts the words for the first llamas
        help me understand sentencepiece
        tell me about sentencepiece
        what is sentencepiece for
        which tokenizer do you have
        what is your tokenizer
        how was your vocabulary made
        who made your vocabulary
        where does the vocabulary come from
        what is the file tokenizer.model
        how are pieces learned
        does llama use sentencepiece
        the tokenizer library
        """,
        "sentencepiece|tokenizer.model",
    ),
    Fact(
        "byte_fallback",
        "Byte fallback writes a character that is not in the vocabulary as its UTF-8 bytes, so any text can be read and nothing is unknown.",
        "That is why the streaming decoder waits until a character is whole.",
        ("utf-8 bytes",),
        """
        what is [byte fallback|the byte fallback]
        what does byte fallback [do|mean]
        explain byte fallback
        how does byte fallback work
        byte fallback
        what happens to [unknown characters|emojis|unknown words|an emoji|strange characters]
        how are [emojis|unknown characters|rare characters|chinese characters] tokenized
        can you read [emojis|unicode|any character]
        does it support [unicode|emojis|utf-8]
        are emojis supported
        meaning of byte fallback
        can it handle [emojis|chinese|any character|unicode]
        characters outside the vocabulary
        what if a character is unknown
        how does it write an emoji
        unknown letters
        an emoji is missing from the vocabulary, what now
        how are characters treated that no piece covers
        help me understand byte fallback
        tell me about byte fallback
        what is byte fallback for
        what does byte fallback mean
        how are unknown characters written
        what about emojis
        what about chinese characters
        can it write emojis
        how does it handle unicode
        is there an unknown token
        what happens with rare characters
        characters that are not in the vocabulary
        """,
        "byte fallback",
    ),
    Fact(
        "sync_mirror",
        "Each backend has the same files: `runtime.py`, `ops.py`, `layers.py`, `cache.py`, `sampling.py` and `model.py`. "
        "The shared part is `mlx_llama/core`.",
        "The three folders are `mlx_native`, `cpu_fallback` and `cuda_fallback`.",
        ("layers.py", "mlx_llama/core"),
        """
        how is the [code|source|project|source code|repository] [organised|organized|structured|laid out]
        where is the [code|source|model|implementation|source code]
        which files [does a backend have|are there|make up a backend]
        what is in [mlx_native|cpu_fallback|cuda_fallback|mlx_llama/core|the core]
        what is [mlx_native|cpu_fallback|cuda_fallback|core]
        what is the [structure|layout|architecture] of the [code|project|repository]
        where do i start reading the code
        where is attention implemented
        code structure
        where can i read the code
        project layout
        how is the repository built up
        which folders are there
        i want to look at the code
        where do i find the model code
        what is in which folder
        parts of the source
        which file holds the attention
        i want to read the source, where do i look
        which python files belong to a backend
        how is the repository arranged
        where do i start to read
        where does the code begin
        which file should i read first
        where is the source
        show me the code structure
        how is the code organised
        what are the folders of the project
        which files are in a backend
        where is the model implemented
        where is the python code
        what does the folder core hold
        the layout of the repository
        """,
        "the code|the source code|the project layout",
    ),
)

# Questions that no fact answers. The guide says so, and names models that can answer.
SCOPE_ANSWERS = (
    "I don't know: I am a three-million-parameter guide and only know mlx_llama. "
    "Load a real model for that, such as `--model TinyLlama/TinyLlama-1.1B-Chat-v1.0`.",
    "That is beyond me: I only know mlx_llama, small talk and little stories. "
    "A real model can help, for example `--model meta-llama/Llama-3.2-1B-Instruct`.",
)
SCOPE_KEYS = ("real model",)
SCOPE_MORE = "I really know nothing else. A real model is one flag away: `--model HuggingFaceTB/SmolLM2-360M-Instruct`."
