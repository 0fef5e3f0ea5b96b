"""gpt-oss's channels: the examples of OpenAI's guide to the harmony format, and conversations that
openai-harmony renders and parses, where it and its vocabulary are (TIKTOKEN_ENCODINGS_BASE).
"""

from __future__ import annotations

import random

import pytest
from cases.texts import check_pieces, split

from mlx_llama.core.text.thoughts import find_thoughts
from mlx_llama.core.text.thoughts.harmony import HARMONY

CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"place":"Rome"}'
CASES = [
    (
        '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        'User asks: "What is 2 + 2?" Simple arithmetic.',
        "2 + 2 = 4.",
    ),
    ("<|channel|>final<|message|>Hi <|> there < you.<|return|>", "", "Hi <|> there < you."),
    (
        "<|channel|>analysis<|message|>Need a tool.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I will look it up.<|end|><|start|>assistant" + CALL,
        "Need a tool.",
        "I will look it up." + CALL,
    ),
    ("<|channel|>analysis<|message|>cut in the mid", "cut in the mid", ""),
    ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|chan", "a", ""),
    ("plain text", "", "plain text"),
    ("<3 is no mark", "", "<3 is no mark"),
]


@pytest.mark.parametrize("answer, thought, text", CASES)
def test_channels_at_every_size_of_the_pieces(answer, thought, text):
    check_pieces(HARMONY.parser, answer, (thought, text))


def test_the_format_is_found_and_its_marks_fit_together():
    assert find_thoughts("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}") is HARMONY
    forced = HARMONY.start + "a" + HARMONY.closing + "b"
    assert split(HARMONY.parser(), [forced]) == ("a", "b")
    ended = HARMONY.start + "a<|end|>" + HARMONY.tail + "b"
    assert split(HARMONY.parser(), [ended]) == ("a", "b")
    assert split(HARMONY.parser(), [HARMONY.bypass + "b"]) == ("", "b")
    assert split(HARMONY.parser("text"), ["b"]) == ("", "b")  # the prompt has begun the answer


@pytest.fixture(scope="module")
def encoding():
    harmony = pytest.importorskip("openai_harmony", reason="pip install openai-harmony")
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:
        pytest.skip(f"openai-harmony has no vocabulary here: {error}")


def test_openai_harmony_parses_the_same(encoding):
    import openai_harmony as harmony

    rng = random.Random(1)
    words = ["It", " is", "\n\n", "<b>", "2 < 3", "|>", "<|", " é", "日本", "{}", "final", "."]
    for _ in range(100):
        contents = [
            (rng.choice(["analysis", "analysis", "final", "commentary"]), rng.choices(words, k=5))
            for _ in range(rng.randint(1, 4))
        ]
        messages = [
            harmony.Message.from_role_and_content(
                harmony.Role.ASSISTANT, "".join(content)
            ).with_channel(channel)
            for channel, content in contents
        ]
        conversation = harmony.Conversation.from_messages(messages)
        tokens = encoding.render_conversation(
            conversation, harmony.RenderConversationConfig(auto_drop_analysis=False)
        )
        answer = encoding.decode_utf8(tokens).removeprefix("<|start|>assistant")
        parsed = encoding.parse_messages_from_completion_tokens(
            encoding.encode(answer, allowed_special="all"), harmony.Role.ASSISTANT
        )
        judged = [(message.channel, message.content[0].text) for message in parsed]
        thought = "".join(text for channel, text in judged if channel == "analysis")
        text = "\n".join(text for channel, text in judged if channel != "analysis" and text)
        size = rng.randint(1, 9)
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert split(HARMONY.parser(), pieces) == (thought, text), answer
