"""A notebook, run headless: streaming, bars and completions look right in Jupyter."""

from __future__ import annotations

import html
import sys

import pytest

from mlx_llama import load

nbformat = pytest.importorskip("nbformat", reason="notebooks need nbformat, nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = """
from mlx_llama import load
llm = load({model!r}, backend="cpu")
--
for piece in llm.stream("Once upon a time", max_tokens=9): print(piece, end="", flush=True)
--
async for piece in llm.astream("Once upon a time", max_tokens=9): print(piece, end="", flush=True)
--
llm.generate("Once upon a time", max_tokens=9)
--
done = llm.batch(["Once upon a time"] * 3, max_tokens=40)
--
import threading, time
from mlx_llama.core.system import progress
with progress.show_bytes("loading <model>", patience=0):
    advance = progress.meter(100)
    threads = [threading.Thread(target=lambda: (time.sleep(0.12), advance(50))) for _ in range(2)]
    for thread in threads: thread.start(); thread.join()
--
!{python} -m mlx_llama.generate --model {model!r} --backend cpu -p "Once upon a time" --ignore-chat-template -m 9
"""  # noqa: E501


@pytest.fixture(scope="module")
def cells(toy):
    """The outputs of each cell, and all messages that the kernel published."""
    sources = CELLS.format(model=str(toy), python=sys.executable).strip().split("\n--\n")
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    messages = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg, cell, cell_index):
            messages.append(msg)
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=120).execute()
    return [cell.outputs for cell in notebook.cells], messages


def printed(outputs):
    assert {(output.output_type, output.name) for output in outputs} == {("stream", "stdout")}
    return "".join(output.text for output in outputs)


@pytest.mark.slow
def test_streams_are_the_text_and_nothing_else(cells, toy):
    outputs, _ = cells
    wanted = load(toy, backend="cpu").generate("Once upon a time", max_tokens=9).text
    assert outputs[0] == []
    assert printed(outputs[1]) == printed(outputs[2]) == wanted
    # a pseudo-terminal ends it with a line break
    assert printed(outputs[6]).replace("\r\n", "\n").strip() == wanted.strip()


@pytest.mark.slow
def test_a_completion_is_its_text_and_a_line_of_figures(cells, toy):
    (output,) = cells[0][3]
    wanted = load(toy, backend="cpu").generate("Once upon a time", max_tokens=9)
    assert f">{html.escape(wanted.text)}</div>" in output.data["text/html"]
    assert "9 tokens" in output.data["text/html"]
    assert output.data["text/plain"] == repr(wanted)


@pytest.mark.slow
def test_bars_are_drawn_in_the_cell_and_removed(cells):
    outputs, messages = cells
    for cell in (4, 5):
        (output,) = outputs[cell]
        assert output.output_type == "display_data" and output.data["text/html"] == ""
    drawn = [message["content"].get("data", {}).get("text/html", "") for message in messages]
    assert any('generating <progress value="' in text and 'max="3"' in text for text in drawn)
    whole = 'loading &lt;model&gt; <progress value="100" max="100"></progress> 100%'
    assert any(whole in text for text in drawn)


@pytest.mark.slow
def test_no_output_has_escape_sequences(cells):
    assert "\x1b" not in str(cells[0]) and "\\x1b" not in str(cells[0])
