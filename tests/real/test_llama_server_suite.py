"""llama-server's own tests against this server, from llama-cpp-python's source archive.

Their model, stories260K, is not in the package index: the guide's GGUF file takes its place, and
expectations that name its texts or counts of its tokens are mapped (MAPPED). Each file runs twice,
with our names of flags, and with llama-server's own. DIFFERENT lists the tests that do not apply
here, with the reason, and OWN_DIFFERENT those that do not with llama-server's flags.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as tree
from collections import Counter
from pathlib import Path

import pytest

from mlx_llama.core.files.checkpoint import GUIDE_PATH, open_checkpoint
from mlx_llama.quantize.gguf_export import write_gguf
from real.checkpoints import FetchError, download, lock

ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
TESTS = "vendor/llama.cpp/tools/server/tests/"
SIX = ("basic", "completion", "chat_completion", "tokenize", "security", "stream")
OTHERS = ("compat_anthropic", "compat_oai_responses", "tool_call", "template", "infill")
FIM = ("pre", "suf", "mid")
TEMPLATES = "vendor/llama.cpp/models/templates/"
# Expectations of stories260K -> those of any model
MAPPED = {
    r'(\["prompt_n"\]|\["prompt_tokens"\]) == n_prompt': r"\1 > 0",
    r'system_fingerprint(.*?)startswith\("b"\)': r'system_fingerprint\1startswith("mlx_llama")',
    r'(\["system_fingerprint"\])\.startswith\("b"\)': r'\1.startswith("mlx_llama")',
    r'(timings\["cache_n"\]) == n_prompt': r"\1 > 0",
    r'(\["cached_tokens"\]) == n_cache': r"\1 >= 0",
    r'(\["completion_tokens"\]) == n_predicted': r"\1 <= n_predicted",
    r'(choice\["finish_reason"\]) == finish_reason': r'\1 in ("stop", "length")',
    r'"<s> " \+ prompt': "prompt",  # comes back as it was sent
    r'(meaning of life is")\*32': r"\1*64",  # longer than the context
    r"(total_batch_count) == batch_count": r"\1 >= 2",
    r"from unit\.(test_tool_call) ": r"from \1 ",  # all files share a folder
    r'"\[ -3000 \]"': '"."',  # of items, which any JSON value may have
    r'(\["prompt"\]) == "<s> (<\|start_header_id\|>system.*?")': r'\1.endswith("\2)',
    r'(len\(res.body\["content"\]\)) > 10': r"\1 >= 0",  # the guide may end at once
}
# Tests that do not apply, by the beginning of their names
DIFFERENT = {
    "basic::test_server_model_aliases_and_tags": "each alias is listed as a model; no tags",
    "chat_completion::test_chat_template_assistant_prefill[prefill1": "parts of a text are joined "
    "without a break",
    "chat_completion::test_invalid_chat_completion_req[messages7]": "the template decides about "
    "two answers in a row",
    "security::test_access_static_assets": "files of another page",
    "security::test_cors_options[origin-Access-Control-Allow-Credentials": "there are no cookies, "
    "and a proxy's are not for other pages",
    "security::test_cors_options[web.mydomain.fr-Access-Control-Allow-Headers": "the headers asked "
    "for are listed: * would not cover Authorization",
    "security::test_cors_proxy": "there is no proxy",
    "compat_anthropic::test_anthropic_tool_result_with_image": "an image is 400, not 500",
    "compat_anthropic::test_anthropic_vision_format_accepted": "an image is 400, not 500",
    "compat_anthropic::test_anthropic_empty_messages": "there is no question to answer",
    "compat_oai_responses::test_responses_stream_with_llama_telemetry": "Responses have no timings",
    "tool_call::test_completion_without_tool_call_slow[meetkai-functionary-medium-v3.1": "the "
    "prompt is longer than the guide's context",
    "template::test_date_inside_prompt[meta-llama-Llama-3.3": "the same prompt on every day, as in "
    "Python and in transformers; chat_template_kwargs may set the date",
    **dict.fromkeys(
        (
            "template::test_date_inside_prompt[fireworks-ai-llama-3-firefunction-v2-%b %d %Y-"
            + tools
            for tools in ("None", "tools1")
        ),
        "the template refuses a conversation without functions",
    ),
}


_PER_REQUEST = "--ctx-size is the context of each request, not divided among slots"
_OTHER_PAGES = "pages of other sites are refused unless --cors-origins allows them; there: any page"
OWN_DIFFERENT = DIFFERENT | {
    "basic::test_server_props": _PER_REQUEST,
    "basic::test_server_slots": _PER_REQUEST,
    "completion::test_nocache_long_input_prompt": _PER_REQUEST,
    "chat_completion::test_context_size_exceeded": _PER_REQUEST,
    "security::test_cors_options": _OTHER_PAGES,
    "security::test_cors_origins_defaults_to_localhost_with_tools_enabled": "pages of this machine "
    "need --cors-origins localhost or a key, since --tools runs nothing",
}


def fetch_archive() -> Path:
    """The archive's path; skips with the reason where it cannot be had."""
    try:
        with lock(ARCHIVE) as path:
            if not path.exists():
                requirements = ["llama-cpp-python==0.3.36"]
                download(path.parent, requirements, "--no-binary", "llama-cpp-python")
    except FetchError as error:
        pytest.skip(str(error))
    return path


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Path:
    """Their tests with our conftest.py, and the guide as m.gguf."""
    pytest.importorskip("requests")
    folder = tmp_path_factory.mktemp("llama-server")
    wanted = [f"unit/test_{name}.py" for name in (*SIX, *OTHERS)]
    with tarfile.open(fetch_archive()) as archive:
        for member in archive:
            name = member.name.partition(TESTS)[2]
            if TEMPLATES in member.name and member.isfile():
                (folder / Path(member.name).name).write_bytes(archive.extractfile(member).read())
            if name == "utils.py" or name in wanted:
                text = archive.extractfile(member).read().decode()
                for pattern, other in MAPPED.items():
                    text = re.sub(pattern, other, text)
                (folder / Path(name).name).write_text(text)
    here = Path(__file__).parent
    shutil.copy(here / "llama_server_conftest.py", folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    serial\n")
    write_gguf(open_checkpoint(GUIDE_PATH), folder / "guide.gguf", "F16")
    # any tokens will do for fill-in-the-middle
    tokens = [("--special-token-by-id", f"fim_{name}", str(3 + i)) for i, name in enumerate(FIM)]
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", *sum(tokens, ())]
    subprocess.run([*command, folder / "guide.gguf", folder / "m.gguf"], check=True)
    return folder


def run_suite(folder: Path, name: str, has_own_flags: bool) -> dict[str, str]:
    """Outcomes by test: "" for passed, the reason for skipped, the last line for failed."""
    report = folder / f"{name}-{has_own_flags}.xml"
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "MODEL": str(folder / "m.gguf"),
        "CONTEXT": "512",
        "OWN_FLAGS": str(int(has_own_flags)),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "pytest", "-q", f"test_{name}.py", f"--junitxml={report}"]
    options = ["-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", str(folder)]
    subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True)
    outcomes = {}
    for case in tree.parse(report).iter("testcase"):
        bad = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        text = "" if bad is None else f"{bad.tag}: {bad.get('message', '')[:200]}"
        if "Template file" in text:  # of a model that is not here
            text = f"skipped: {text}"
        outcomes[f"{name}::{case.get('name')}"] = text
    return outcomes


@pytest.fixture(scope="module")
def outcomes_of(suite):
    """outcomes_of(name, has_own_flags): of a file, which runs once with each kind of flags."""
    return functools.lru_cache(functools.partial(run_suite, suite))


def check_outcomes(name: str, outcomes: dict[str, str], different: dict[str, str]) -> None:
    """Check that all tests of a file pass but those in `different`, of which none passes by now."""
    assert outcomes
    failed = {
        test: text
        for test, text in outcomes.items()
        if text.startswith(("failure", "error")) and not test.startswith(tuple(different))
    }
    assert not failed, "\n".join(f"{test}: {text}" for test, text in failed.items())
    stale = [
        start
        for start in different
        if start.partition("::")[0] == name
        and not any(text for test, text in outcomes.items() if test.startswith(start))
    ]
    assert not stale


def count_passed(all_outcomes: list[dict[str, str]]) -> int:
    texts = [text for outcomes in all_outcomes for text in outcomes.values()]
    kinds = Counter(text.partition(":")[0] or "passed" for text in texts)
    print(len(texts), dict(kinds))
    return kinds["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SIX, *OTHERS])
def test_llama_servers_tests_pass(name, outcomes_of):
    check_outcomes(name, outcomes_of(name, False), DIFFERENT)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIX)
def test_llama_servers_tests_pass_with_their_own_flags(name, outcomes_of):
    check_outcomes(name, outcomes_of(name, True), OWN_DIFFERENT)


@pytest.mark.slow
def test_most_of_the_six_files_pass(outcomes_of):
    """The others need another model, or are in DIFFERENT."""
    assert count_passed([outcomes_of(name, False) for name in SIX]) >= 116


@pytest.mark.slow
def test_most_of_the_six_files_pass_with_their_own_flags(outcomes_of):
    assert count_passed([outcomes_of(name, True) for name in SIX]) >= 107
