"""Chats with a model whose template has no system role: adapted, told once, and the prefix is used
again.
"""

import pytest
from cases.texts import TOOL_TEMPLATES
from scripting import Script, make_scripted_checkpoint

from mlx_llama import load
from mlx_llama.core.text.adapting import AFTER_RESULT, NO_SYSTEM, QUESTIONS

PARTS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% for c in m.content %}{{ c.text }} "
    "{{ c.lang }}{% endfor %}{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = make_scripted_checkpoint(tmp_path_factory.mktemp("g"), TOOL_TEMPLATES["gemma-2"])
    return load(folder, backend="cpu")


def test_a_session_says_it_once_and_uses_its_prefix_again(gemma):
    chat = gemma.chat(system="Be brief.", max_tokens=20)
    with Script(gemma, "Fine.", "Eight.", "Yes.") as script:
        first, second = chat.send("How are you?"), chat.send("And how old?")
        assert NO_SYSTEM in first.notices and NO_SYSTEM not in second.notices
        assert chat.regenerate().finish().text == "Yes."
    assert all("user\nBe brief.\n\nHow are you?<end_of_turn>" in text for text in script.prompts)
    assert second.reused_tokens >= first.prompt_tokens


def test_python_is_told_with_each_answer(gemma):
    talk = [{"role": "user", "content": text} for text in ("a", "b")]
    with Script(gemma, "one", "two", "three"):
        done = gemma.ask("Hi", system="Be brief.")
        assert done.text == "one" and NO_SYSTEM in done.notices
        assert QUESTIONS in gemma.generate(talk).notices
        assert not {QUESTIONS, NO_SYSTEM} & set(gemma.generate(talk[:1]).notices)
    assert gemma.encode(talk) == gemma.encode([{"role": "user", "content": "a\n\nb"}])


def test_tools_of_a_template_without_them_stay_told_by_their_own_rule(gemma):
    """Their description is put in front of the first question, as before: nobody sent a system
    message.
    """
    tool = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    results = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [tool | {"id": "abcdefghi"}]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"},
        {"role": "user", "content": "Sure?"},
    ]
    with Script(gemma, "Noon.") as script:
        done = gemma.respond(results, [tool]).finish()
    assert "<tool_response>noon</tool_response>\n\nSure?" in script.prompts[0]
    assert not {QUESTIONS, NO_SYSTEM, AFTER_RESULT} & set(done.notices)


def test_parts_of_a_message_reach_a_template_that_takes_them(tmp_path):
    llm = load(make_scripted_checkpoint(tmp_path / "m", PARTS), backend="cpu")
    parts = [{"type": "text", "text": "Hallo", "lang": "de"}, {"type": "text", "text": "Welt"}]
    with Script(llm, "Hello.", "Hello.") as script:
        llm.generate([{"role": "user", "content": parts}])
        llm.ask("Hallo")
    assert script.prompts == ["<s>[user]Hallo deWelt [assistant]", "<s>[user]Hallo [assistant]"]
