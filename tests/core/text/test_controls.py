"""Control characters of strangers' texts."""

from hypothesis import given, strategies as st

from mlx_llama.core.text.controls import one_line, show_controls


@given(st.text())
def test_no_text_commands_a_terminal(text):
    assert not any(
        char in "\x1b\x07\x08\r\x7f" or "\x80" <= char <= "\x9f" for char in show_controls(text)
    )
    line = one_line(text, 20)
    assert len(line) <= 20 and not set(line) & {"\n", "\t", "\x1b"}


def test_newlines_tabs_and_other_characters_stay():
    assert show_controls("a\n\tb é 🦙") == "a\n\tb é 🦙"


def test_controls_become_their_symbols():
    assert show_controls("\x1b[2J\x00\x7f\x9b") == "␛[2J␀␡\ufffd"
    assert one_line("a\n b\x1b" + "x" * 1000, 10) == "a b␛xx..."
