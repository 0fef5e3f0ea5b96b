"""The templates that render without a process of their own."""

import pytest
from cases.texts import TEMPLATES, TOOL_TEMPLATES

from mlx_llama.core.files.checkpoint import GUIDE_PATH
from mlx_llama.core.text.template_process import KNOWN, digest, is_known

SOURCES = {name: TEMPLATES[name] for name in ("llama-2", "llama-3", "zephyr", "smollm2")}
SOURCES |= {name: TOOL_TEMPLATES[name] for name in ("llama-3.1", "qwen2.5", "qwen3.5")}
SOURCES["guide"] = (GUIDE_PATH / "chat_template.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_templates_of_known_families_are_known_by_every_character(source):
    assert is_known(source) and is_known(source.replace("\n", "\r\n") + "\n")
    middle = len(source) // 2
    assert not is_known(source[:middle] + "x" + source[middle:]) and not is_known(source + "x")


def test_digests_are_digests():
    assert all(len(known) == 32 and int(known, 16) >= 0 for known in KNOWN)
    assert digest("") not in KNOWN


def test_no_text_breaks_the_look_up():
    assert not is_known("\ud800") and not is_known("")
