"""The page in a real Chromium: a chat, stop, regenerate, edit, branches, reload, session files,
narrow screen, hostile text.

MLX_LLAMA_SCREENSHOTS names a folder for pictures to look at.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from html import escape
from pathlib import Path
from unittest.mock import Mock

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="pages are tested with selenium")
from cases.thinker import ANSWER, TEXT, THOUGHT, make_thinker  # noqa: E402
from selenium.common.exceptions import (  # noqa: E402
    NoAlertPresentException,
    NoSuchElementException,
    StaleElementReferenceException,
)
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from mlx_llama.server import page as pages  # noqa: E402
from mlx_llama.server.page import render_markdown  # noqa: E402

from .conftest import QUESTION  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
# the conversation, if there is one
STORED = "localStorage[Object.keys(localStorage).find((key) => / conversation /.test(key))]"


class Page:
    """A tab of Chromium with the page of a server. downloads: the folder of saved files."""

    def __init__(self, driver, url: str, downloads: Path, is_locked: bool = False):
        self.driver, self.url, self.run = driver, url, driver.execute_script
        driver.set_window_size(1100, 900)
        for command, more in (
            ("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"}),
            ("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}),
        ):
            driver.execute_cdp_cmd(command, more)
        driver.get(url + "/")
        if is_locked:
            self.wait(lambda: self.find("#key-dialog").is_displayed())
        else:
            self.wait(lambda: "/" in self.find("#context-text").text)

    def find(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        code = "return [...document.querySelectorAll(arguments[0])].map((node) => node.textContent)"
        return self.run(code, selector)

    @property
    def answers(self) -> list[str]:
        """The paragraphs of all answers."""
        return self.texts(".assistant .text p")

    @property
    def focused(self):
        return self.driver.switch_to.active_element

    def wait(self, condition, seconds: float = 20):
        end = time.monotonic() + seconds
        while True:
            try:
                if result := condition():
                    return result
            except (StaleElementReferenceException, NoSuchElementException):
                pass
            assert time.monotonic() < end, self.driver.page_source[-3000:]
            time.sleep(0.05)

    def ask(self, text: str, wait: bool = True) -> None:
        self.find("#question").send_keys(text + Keys.ENTER)
        if wait:
            self.wait_answer()

    def wait_answer(self) -> None:
        ends = ("Answered.", "Stopped.", "The answer failed.")
        self.wait(lambda: self.find("#status").text in ends and not self.all(".running"))

    def wait_text(self, length: int = 20) -> None:
        """Wait until the last answer is longer than that."""
        self.wait(lambda: len(self.texts(".assistant .text")[-1]) > length)

    def set(self, name: str, value: str) -> None:
        """Set an option in the dialog of settings; "" is the default."""
        self.find("#open-settings").click()
        self.find(f"[name={name}]").clear()
        self.find(f"[name={name}]").send_keys(value)
        self.find("#settings-close").click()

    def load(self, path: Path, field: str = "#import-file") -> None:
        self.find(field).send_keys(str(path))

    def wait_alert(self):
        """The dialog of the browser: confirm or prompt."""

        def find():
            try:
                return self.driver.switch_to.alert
            except NoAlertPresentException:
                return None

        return self.wait(find)

    def press(self, label: str, which: int = -1) -> None:
        def enabled() -> list:
            buttons = self.all(f"[aria-label='{label}']")
            return [button for button in buttons if button.is_enabled()]

        self.wait(enabled)[which].click()

    def stored(self) -> list[dict]:
        """The answers of the conversation, as the browser keeps them."""
        nodes = json.loads(self.run(f"return {STORED}"))["nodes"].values()
        return [node for node in nodes if node["role"] == "assistant"]

    def picture(self, name: str) -> None:
        if folder := os.environ.get("MLX_LLAMA_SCREENSHOTS"):
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        """Check that nothing was asked of another machine, and that the console has no error."""
        messages = [json.loads(entry["message"]) for entry in self.driver.get_log("performance")]
        requested = [
            message["message"]["params"]["request"]["url"]
            for message in messages
            if message["message"]["method"] == "Network.requestWillBeSent"
        ]
        # A server's refusals appear in the console, too, and what a test provokes.
        errors = [
            entry
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
            and not re.search("Failed to load resource|TrustedHTML", entry["message"])
        ]
        old = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        self.driver.switch_to.window(old)
        self.driver.close()
        self.driver.switch_to.window(new)
        known = (self.url, "blob:", "data:", "chrome")
        others = [url for url in requested if not url.startswith(known)]
        assert requested and not others and not errors, (others, errors)


@pytest.fixture(scope="module")
def driver():
    """A Chromium that reaches this machine alone."""
    if not (CHROMIUM and DRIVER):
        pytest.skip("no chromium and chromedriver here (apt install chromium-driver)")
    options = webdriver.ChromeOptions()
    for argument in "--headless=new --no-sandbox --disable-dev-shm-usage".split():
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browse(driver, tmp_path):
    """browse(url, is_locked=False): the page of a server, closed with the test."""
    with contextlib.ExitStack() as opened:

        def browse(url: str, is_locked: bool = False) -> Page:
            page = Page(driver, url, tmp_path, is_locked)
            opened.callback(page.close)
            return page

        yield browse


@pytest.fixture
def page(guide, browse):
    return browse(guide.url)


def test_a_chat_in_the_browser(page, llm):
    first = llm.generate(QUESTION).text
    page.ask("Who are you?")
    assert page.answers == [first]
    assert page.find("#title").text == "Who are you?"
    assert "tokens/s" in page.find(".note").text
    assert page.find("#context-text").text.endswith("/ 512")
    page.picture("chat")
    page.ask("Tell me a story.")
    session = llm.chat()
    session.send("Who are you?")
    assert page.answers[-1] == session.send("Tell me a story.").text

    page.driver.refresh()
    page.wait(lambda: len(page.answers) == 2)
    page.press("Answer again")
    page.wait_answer()
    page.wait(lambda: "2/2" in page.texts(".tools span"))
    assert "the same words as before: raise the temperature" in page.texts(".note")[-1]  # greedy
    assert "the same words" not in page.texts(".note")[0]
    page.press("Previous branch")
    page.wait(lambda: "1/2" in page.texts(".tools span"))

    page.press("Edit this question", 0)
    area = page.find(".edit textarea")
    area.clear()
    area.send_keys("What is a llama?" + Keys.ENTER)
    page.wait_answer()
    assert page.texts(".user .text") == ["What is a llama?"]
    assert "2/2" in page.texts(".user .tools span")
    page.press("Previous branch", 0)
    page.wait(lambda: page.texts(".user .text") == ["Who are you?", "Tell me a story."])
    page.picture("branches")


QUESTIONS = (
    "Who are you?",
    "Tell me a story about a fox.",
    "Which backends are there?",
    "Tell me a story about a bear.",
    "What is a LoRA adapter?",
    "Tell me a story about a llama.",
)


def test_six_questions_outgrow_the_context_as_in_the_repl(page, llm):
    session = llm.chat(max_tokens=4096)
    for number, question in enumerate(QUESTIONS, 1):
        page.ask(question)
        answer = session.send(question).text.replace("`", "")
        assert page.texts(".assistant .text")[-1].split() == answer.split(), question
        assert not page.all(".message .error")
        used = int(page.find("#context-meter").get_attribute("value"))
        assert page.find("#context-text").text == f"{used} / 512" and 0 < used <= 512
        # The mark stands before the first question that the model still sees.
        after = page.texts(".memory + .message .text")
        first = session.dropped // 2
        assert after == ([QUESTIONS[first]] if first else []), number
        page.picture(f"memory-{number}")
    assert session.dropped and not any("cut" in note for note in page.texts(".note"))
    page.driver.refresh()
    page.wait(lambda: page.texts(".memory + .message .text") == [QUESTIONS[session.dropped // 2]])


@pytest.mark.slow
def test_a_cut_answer_can_be_continued(page, tmp_path, llm):
    page.set("max_tokens", "9")
    page.ask("Who are you?")
    assert page.answers == [llm.generate(QUESTION, max_tokens=9).text.strip()]
    page.find("#export").click()
    page.wait((tmp_path / "Who are you.json").exists)
    page.load(tmp_path / "Who are you.json")
    page.wait(lambda: "Imported" in page.find("#status").text)
    page.picture("continue")
    for limit, wanted in (
        ("9", llm.generate(QUESTION, max_tokens=18)),
        ("", llm.generate(QUESTION)),
    ):
        page.set("max_tokens", limit)
        page.press("Continue this answer")
        page.wait(lambda: page.answers == [wanted.text.strip()])
        page.wait_answer()
    assert not page.all("[aria-label='Continue this answer']")


@pytest.mark.slow
def test_a_reload_takes_the_answer_up_again(endless, browse):
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6000}
    made = endless.ask("/v1/chat/completions", **asked)
    page = browse(endless.url)
    page.set("max_tokens", "6000")
    page.set("repetition_limit", "0")
    page.ask("hello", wait=False)
    # An observer, since a fast machine may end the answer between two polls.
    watch = "new MutationObserver(() => window.ran ||= document.querySelector('.running'))"
    watch += ".observe(document, {subtree: true, childList: true, attributes: true})"
    page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": watch})
    page.wait_text(40)
    page.driver.refresh()
    page.wait(lambda: page.run("return Boolean(window.ran)"))
    page.wait_answer()
    (answer,) = page.stored()
    assert answer["text"] == made["choices"][0]["message"]["content"]
    assert answer["usage"] == made["usage"]["total_tokens"]
    assert "6000 tokens" in page.find(".note").text  # the note of the answer's only job

    # A job that the server has forgotten: the answer continues from its text.
    forget = """'"job":"01234567-0123456789abcdef","isCut":true'"""
    page.run(f"{STORED} = {STORED}.replace('\"isCut\":true', {forget})")
    page.driver.refresh()
    page.set("max_tokens", "")  # else it may end before it is stopped
    page.press("Continue this answer")
    page.wait(lambda: page.stored()[0]["text"] > answer["text"])
    page.find("#stop").click()
    page.wait_answer()
    page.driver.refresh()  # of an answer that was stopped: it stays so
    page.wait(lambda: page.all("[aria-label='Continue this answer']"))
    time.sleep(0.3)
    assert not page.all(".running")
    endless.wait_idle(3)


@pytest.mark.slow
def test_the_first_screen_names_the_model_and_has_questions_to_click(page, llm):
    page.wait(lambda: page.all(".welcome"))
    assert page.find(".welcome h2").text == "guide"
    assert "--model smollm2" in page.find(".welcome").text
    page.picture("welcome")
    ideas = page.texts(".ideas button")
    assert len(ideas) == 4
    page.all(".ideas button")[0].click()
    page.wait_answer()
    answer = llm.generate([{"role": "user", "content": ideas[0]}]).text
    assert page.texts(".user .text") == ideas[:1] and not page.all(".welcome")
    assert page.answers == [answer.strip()]


def test_a_passage_of_the_pages_stands_below_the_guides_answer(page):
    page.ask("error: cannot listen there (Address already in use)")
    assert page.find(".passage").text.startswith("See docs/troubleshooting.md, The server: cannot")
    page.picture("passage")
    page.driver.refresh()
    page.wait(lambda: page.all(".passage"))
    page.ask("Hello!")
    assert len(page.all(".passage")) == 1
    page.ask("does it speak polish")  # the guide does not know: the passages lead
    parts = page.all("article:last-of-type .passage, article:last-of-type .text")
    assert [part.get_attribute("class").split()[0] for part in parts] == ["passage", "text"]


def test_formulas_are_drawn(tmp_path, browse):
    text = r"\[ x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]" + "\n\n" + r"with $a \ne 0$, for $5."
    with make_thinker("qwen3", tmp_path / "m") as thinker:
        page = browse(thinker.url)
        with thinker.script("<think>\n\n</think>\n\n" + text):
            page.ask("Roots?")
        page.wait(lambda: len(page.all(".assistant math")) == 2)
        assert page.find("math mfrac").rect["height"] > 30  # a fraction, not a line of text
        assert "for $5." in page.find(".assistant .text").text
        page.picture("formulas")


@pytest.mark.slow
def test_attached_files_become_part_of_the_question(page, tmp_path, llm):
    file = tmp_path / "animals.txt"
    file.write_text("A llama.\n```\ncode\n```\n")
    binary = tmp_path / "data.bin"
    binary.write_bytes(b"\x00\xff" * 9)
    page.load(file, "#attach-file")
    count = len(llm.tokenizer.encode(file.read_text(), add_bos=False))
    page.wait(lambda: f"animals.txt · {count} tokens" in page.find("#attached").text)
    page.picture("attached")
    page.load(binary, "#attach-file")
    page.wait(lambda: "data.bin: only text files" in page.find("#status").text)
    assert len(page.all("#attached li")) == 1
    page.run(
        "const dataTransfer = new DataTransfer();"
        "dataTransfer.items.add(new File(['A duck.'], 'dropped.txt'));"
        "document.body.dispatchEvent(new DragEvent('drop', { dataTransfer, bubbles: true }))"
    )
    page.wait(lambda: "dropped.txt · " in page.find("#attached").text)
    page.find("[aria-label='Remove dropped.txt']").click()
    page.ask("Which animal?")
    wanted = f"animals.txt:\n````\n{file.read_text()}\n````\n\nWhich animal?"
    assert page.texts(".user .text") == [wanted] and not page.all("#attached li")
    assert page.find("#title").text == "Which animal?"


@pytest.mark.slow
def test_conversations_are_renamed_searched_and_exported_with_branches(page, tmp_path):
    page.ask("Who are you?")
    page.press("Answer again")
    page.wait_answer()
    page.wait(lambda: "2/2" in page.texts(".tools span"))
    page.find("[aria-label='Rename Who are you?']").click()
    prompt = page.wait_alert()
    prompt.send_keys("The guide")
    prompt.accept()
    page.wait(lambda: page.find("#title").text == "The guide")
    page.find("#new").click()
    page.ask("Tell me a story about a fox.")
    search = page.find("#search")
    for words, titles in (
        ("guide", ["The guide"]),
        ("FOX", ["Tell me a story about a fox."]),
        ("who are", ["The guide"]),
        ("quagga", []),
    ):
        search.clear()
        search.send_keys(words)
        page.wait(lambda titles=titles: page.texts("#conversations .pick") == titles)
    search.clear()
    search.send_keys("guide")
    page.wait(lambda: len(page.all("#conversations .pick")) == 1)
    page.find("#conversations .pick").click()
    page.find("#export-all").click()
    file = tmp_path / "The guide.branches.json"
    page.wait(file.exists)
    page.find("[aria-label='Delete The guide']").click()
    page.wait_alert().accept()
    page.wait(lambda: page.all(".welcome"))
    assert page.find("#status").text == ""
    page.load(file)
    page.wait(lambda: "2/2" in page.texts(".tools span"))
    assert page.find("#title").text == "The guide"
    broken = json.loads(file.read_text())
    broken["nodes"][0]["parent"] = broken["nodes"][-1]["id"]  # a circle
    node = {"id": "1", "parent": None, "role": "user", "text": "x" * 6_000_000}
    for saved, words in (
        (broken, "is damaged"),
        (broken | {"nodes": [node], "leaf": "1"}, "storage is full"),
        ({**SAVED, "messages": [node]}, "a larger --max-body"),
    ):
        file.write_text(json.dumps(saved))
        page.load(file)
        page.wait(lambda words=words: words in page.find("#status").text)


@pytest.mark.slow
def test_a_bad_setting_is_shown_at_its_field_and_escape_asks(page):
    page.find("#open-settings").click()
    field = page.find("[name=top_k]")
    field.send_keys("many" + Keys.ENTER)
    error = page.wait(lambda: page.find("[name=top_k] + #settings-error"))
    assert error.text.startswith("top_k: a whole number")
    assert page.focused == field
    assert field.get_attribute("aria-invalid") == "true"
    page.picture("settings-error")
    field.send_keys(Keys.ESCAPE)
    page.wait_alert().dismiss()
    assert page.find("#settings").is_displayed() and field.get_attribute("value") == "many"
    field.clear()
    field.send_keys("5" + Keys.ENTER)
    page.wait(lambda: not page.find("#settings").is_displayed())
    assert page.focused.get_attribute("id") == "open-settings"
    page.find("#open-settings").click()
    page.focused.send_keys(Keys.ESCAPE)  # nothing changed
    page.wait(lambda: not page.find("#settings").is_displayed())
    page.ask("Who are you?")
    page.press("Edit this question")
    page.find(".edit textarea").send_keys(" Really?" + Keys.ESCAPE)
    page.wait_alert().accept()
    page.wait(lambda: not page.all(".edit"))
    focused = page.focused
    assert focused.get_attribute("aria-label") == "Edit this question"


@pytest.mark.slow
def test_settings_are_those_of_the_table_and_reach_the_model(page, llm):
    page.find("#open-settings").click()
    names = page.run(
        "return [...document.querySelectorAll('#options [name]')].map((field) => field.name)"
    )
    from mlx_llama.core.options import FIELDS

    assert not page.find("#think").is_displayed()  # the guide does not think
    assert names == [name for name in FIELDS if name != "logprobs"]
    assert page.find("[name=max_tokens]").get_attribute("placeholder") == "until the end"
    page.find("#system").send_keys("Be kind.")
    page.find("[name=top_p]").send_keys("7")
    page.find("#settings-close").click()
    assert "top_p: a number from 0.000001 to 1" in page.find("#settings-error").text
    page.find("[name=top_p]").clear()
    page.find("[name=max_tokens]").send_keys("9")
    page.picture("settings")
    page.find("#settings-close").click()
    page.ask("Who are you?")
    asked = [{"role": "system", "content": "Be kind."}, *QUESTION]
    assert page.answers == [llm.generate(asked, max_tokens=9).text.strip()]
    assert "cut at the limit" in page.find(".note").text


def test_an_answer_that_repeats_itself_is_ended_and_goes_on(page):
    page.find("#open-settings").click()
    assert page.find("[name=repetition_limit]").get_attribute("placeholder") == "200"
    page.find("[name=logit_bias]").send_keys('{"300": 99}')
    page.find("#settings-close").click()
    page.ask("Who are you?")
    note = page.find(".note").text
    assert "200 tokens" in note and "ended because it repeats itself: Continue goes on" in note
    [text] = page.answers
    page.press("Continue this answer")
    page.wait(lambda: len(page.answers[0]) > len(text) and page.all(".note"))


@pytest.mark.slow
def test_session_files_go_to_the_repl_and_back(page, tmp_path, llm):
    page.ask("Who are you?")
    page.find("#export").click()
    file = tmp_path / "Who are you.json"
    page.wait(file.exists)
    session = llm.chat()
    assert session.load(file) == []
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    session.system = "Be kind."
    session.send("Tell me a story.", max_tokens=12)
    session.save(tmp_path / "longer.json")
    page.load(tmp_path / "longer.json")
    page.wait(lambda: page.texts(".user .text") == ["Who are you?", "Tell me a story."])
    assert page.answers[-1] == session.messages[-1]["content"].strip()
    assert page.all("[aria-label='Continue this answer']")
    assert page.find("#title").text == "longer"
    page.find("#open-settings").click()
    assert page.find("#system").get_attribute("value") == "Be kind."
    page.find("#settings-close").click()
    (tmp_path / "broken.json").write_text('{"format": "mlx_llama session", "version": 2}')
    page.load(tmp_path / "broken.json")
    page.wait(lambda: re.match("broken.json: .*(version is 2|missing)", page.find("#status").text))
    assert page.find("#title").text == "longer"


@pytest.mark.slow
def test_a_narrow_screen_and_the_keyboard(page):
    screen = {"width": 390, "height": 760, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    assert page.run("return document.documentElement.scrollWidth") <= 390
    page.ask("Who are you?")
    page.picture("narrow")
    assert not page.find("#sidebar").is_displayed()
    page.find("#open-sidebar").click()
    page.wait(page.find("#sidebar").is_displayed)
    page.wait(lambda: page.focused.get_attribute("id") == "new")
    page.picture("narrow-list")
    page.focused.send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.find("#sidebar").is_displayed())
    page.find("#question").send_keys(Keys.ARROW_UP)  # the last question again
    assert page.focused.get_attribute("value") == "Who are you?"
    page.focused.send_keys(Keys.ESCAPE)
    page.find("body").send_keys(Keys.CONTROL, Keys.SHIFT, "o")
    page.wait(lambda: page.texts(".message") == [])
    assert page.focused.get_attribute("id") == "question"
    # Everything that can be clicked can be reached by Tab and has a name.
    for kinds, fault in (
        ("button, input, textarea, a", "node.tabIndex < 0"),
        ("button", "!(node.textContent.trim() || node.ariaLabel)"),
    ):
        nodes = f"[...document.querySelectorAll('{kinds}')]"
        assert page.run(f"return {nodes}.filter((node) => {fault}).length") == 0, fault


def test_a_long_name_of_a_model_leaves_room_for_the_settings(page):
    name = "A-Long-Name-135M-Instruct.Q4_1.gguf · cpu"
    page.run(f"document.getElementById('model').textContent = '{name}'")
    box = "document.getElementById('open-settings').getBoundingClientRect()"
    for width in (768, 900, 1280):
        page.driver.set_window_size(width, 800)
        assert page.run(f"return {box}.right") <= page.run("return innerWidth"), width


@pytest.mark.slow
def test_light_and_dark_and_the_meter(page):
    """And the meter is amber at three quarters, and red at the end."""
    meter = page.find("#context-meter")
    low, optimum, high, most = (
        float(meter.get_attribute(name)) for name in ("low", "optimum", "high", "max")
    )
    assert (low, optimum) == (384, 0) and 480 < high < 512 == most
    back = "return getComputedStyle(document.body).backgroundColor"
    first = page.run(back)
    page.find("#theme").click()
    second = page.run(back)
    assert {first, second} == {"rgb(255, 255, 255)", "rgb(22, 24, 28)"}
    page.driver.refresh()
    page.wait(lambda: page.run(back) == second)


# A session file without messages
SAVED = {
    **{"format": "mlx_llama session", "version": 1, "model": "<b>m</b>"},
    **{"system": None, "options": {}, "dropped": 0},
}
HOSTILE = """<script>window.broken = 1</script> <img src=x onerror="window.broken = 1">

[link](javascript:window.broken=1) ![picture](http://192.0.2.1/spy.png) <b>bold</b>

```html
<script>window.broken = 1</script>
```

| a | b |
|---|---|
| `<i>` | **c** |
"""


def test_hostile_text_is_shown_and_never_run(page, tmp_path):
    messages = [{"role": role, "content": HOSTILE} for role in ("user", "assistant")]
    file = tmp_path / "<img src=x onerror=window.broken=1>.json"
    file.write_text(json.dumps({**SAVED, "messages": messages}))
    page.load(file)
    page.wait(lambda: page.all(".assistant table"))
    time.sleep(0.3)
    page.picture("hostile")
    assert page.run("return window.broken") is None
    text = page.texts(".assistant .text")[0]
    assert "<script>window.broken = 1</script>" in text and "<b>bold</b>" in text and "<i>" in text
    assert not page.all("#log script, #log img, #log b, #log [onerror], #log [href^='javascript']")
    assert page.all(".assistant pre .nt") and page.texts(".user .text") == [HOSTILE]
    # A script that were inserted all the same: the policy stops it.
    page.run(
        "const one = document.createElement('p'); try { one.innerHTML = '<img src=x onerror=1>' } "
        "catch (error) { window.stopped = error.name }"
    )
    assert page.run("return window.stopped") == "TypeError"


@pytest.mark.slow
def test_stop_and_errors_in_the_browser(endless, browse):
    page = browse(endless.url)
    page.set("max_tokens", "90000")
    page.set("repetition_limit", "0")
    page.ask("hello", wait=False)
    page.wait_text()
    assert page.find("#stop").is_displayed() and endless.metric("rows_running") == 1
    page.find("body").send_keys(Keys.ESCAPE)
    page.wait_answer()
    endless.wait_idle(3)
    assert page.find(".note").text == "stopped" and page.find("#send").is_displayed()
    assert int(page.find("#context-meter").get_attribute("value")) > 20
    kept = page.texts(".assistant .text")
    page.driver.refresh()
    page.wait(lambda: list(map(len, page.texts(".assistant .text"))) == list(map(len, kept)))
    # A question that does not fit: the error stands where the answer would.
    page.run("arguments[0].value = 'word '.repeat(120000)", page.find("#question"))
    page.ask("")
    error = page.find(".message .error")
    assert "tokens and the context holds 100000" in error.text
    box = "const box = arguments[0].getBoundingClientRect();"
    page.wait(lambda: page.run(f"{box} return box.top >= 0 && box.bottom <= innerHeight", error))
    # The next question is asked without the one that failed.
    page.ask("hi", wait=False)
    page.wait_text(5)
    page.find("#stop").click()
    page.wait_answer()
    assert len(page.texts(".message .error")) == 1
    page.picture("error")


@pytest.mark.slow
def test_a_server_that_dies_is_named_as_the_cause(serve, roomy, browse):
    server = serve("--model", roomy)
    page = browse(server.url)
    page.set("max_tokens", "90000")
    page.set("repetition_limit", "0")
    page.ask("hello", wait=False)
    page.wait_text()
    server.process.kill()
    page.wait_answer()
    error = page.find(".message .error").text
    assert error.startswith("The connection ended before the answer did.")


@pytest.mark.slow
def test_a_key_is_asked_for_and_the_log_has_a_line_for_an_answer(serve, browse):
    server = serve("--api-key", "sesame")
    page = browse(server.url, is_locked=True)
    page.find("#key").send_keys("sesame" + Keys.ENTER)
    page.wait(lambda: page.find("#context-text").text == "0 / 512")
    page.ask("Who are you?")
    assert page.answers
    lines = [line for line in server.text().splitlines() if re.search(" POST |job", line)]
    begun, ended = (line for line in lines if "/page/" not in line)
    assert "POST /v1/jobs 201" in begun and " EOS prompt=" in ended


# Without a browser


def test_a_session_file_with_tool_calls_is_refused_with_the_reason(guide):
    function = {"name": "add", "arguments": "{}"}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    ]
    answer = {"role": "assistant", "content": "3"}
    text = json.dumps(SAVED | {"messages": [*QUESTION, answer]})
    assert guide.ask("/page/session", text=text)["messages"] == [*QUESTION, answer]
    text = json.dumps(SAVED | {"messages": [*QUESTION, *calls, answer]})
    done = guide.post("/page/session", text=text)
    assert done.status_code == 400
    assert "has tool calls, which the page cannot show" in done.json()["error"]["message"]


def test_headers_of_the_page(guide):
    kinds = {"/": "text/html", "/docs": "text/html", "/page/app.js": "text/javascript"}
    kinds |= {"/page/style.css": "text/css", "/page/code.css": "text/css"}
    for path, kind in (kinds | {"/page/icon.svg": "image/svg+xml"}).items():
        done = guide.http.get(path)
        assert done.status_code == 200 and done.headers["content-type"].startswith(kind), path
        policy = done.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy, path
        assert "unsafe" not in policy, path
        assert done.headers["x-content-type-options"] == "nosniff"
    html = guide.http.get("/").text
    assert "http://" not in html and "https://" not in html and "onclick" not in html
    assert "<style" not in html


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("**a**", "<p><strong>a</strong></p>\n"),
        ("<b>", "<p>&lt;b&gt;</p>\n"),
        ("[a](javascript:x)", "<p>[a](javascript:x)</p>\n"),
        ("[a](DATA:text/html,x)", "<p>[a](DATA:text/html,x)</p>\n"),
        (
            "[a](https://b)",
            '<p><a href="https://b" rel="noopener noreferrer" target="_blank">a</a></p>\n',
        ),
        (
            "```nope\n<&\n```",
            '<pre class="code" data-language="nope"><code>&lt;&amp;\n</code></pre>\n',
        ),
        (
            '```"><script>\nx\n```',
            '<pre class="code" data-language="&quot;&gt;&lt;script&gt;"><code>x\n</code></pre>\n',
        ),
        (
            "|a|\n|-:|",
            '<table>\n<thead>\n<tr>\n<th class="right">a</th>\n</tr>\n</thead>\n</table>\n',
        ),
    ],
)
def test_markdown(text, wanted):
    assert render_markdown(text) == wanted


@pytest.mark.parametrize(
    "text, wanted",
    [
        (r"so $x^2$.", "so <math><msup><mi>x</mi><mn>2</mn></msup></math>."),
        (r"\(y\) and $$z$$", "<math><mi>y</mi></math> and <math><mi>z</mi></math>"),
        ("\\[\nx\n\\]", "<math><mi>x</mi></math>"),
        (r"$\alpha < 1$", "<math><mi>α</mi><mo>&lt;</mo><mn>1</mn></math>"),
        (r"$a\pm b$", "<math><mi>a</mi><mo>±</mo><mi>b</mi></math>"),
        (r"Costs $5 and $10, or \$7.", "Costs $5 and $10, or $7."),
        (r"`$x$` $\frac{$ $$", r"<code>$x$</code> $\frac{$ $$"),
        (r"$\text{<b onload=x>}$", "<math><mtext>&lt;b onload=x&gt;</mtext></math>"),
        (
            r"$\href{javascript:x}{y}\style{color:red}{z}\class{k}{w}$",
            "<math><mi>y</mi><mi>z</mi><mi>w</mi></math>",
        ),
        (
            "$$\n\\begin{aligned}\na &= b \\\\\n&= c\n\\end{aligned}\n$$",
            "<math><mtable><mtr><mtd><mi>a</mi></mtd><mtd><mo>=</mo><mi>b</mi></mtd></mtr><mtr>"
            "<mtd></mtd><mtd><mo>=</mo><mi>c</mi></mtd></mtr></mtable></math>",
        ),
    ],
)
def test_formulas(text, wanted):
    """Without attributes and groups, of which any number may stand in MathML."""
    html = re.sub(r"(<m\w+)[^>]*>", r"\1>", render_markdown(text))
    assert re.sub(r"</?mrow>", "", html).strip().replace("\xa0", " ") == f"<p>{wanted}</p>"


def test_rendering_hostile_markdown_ends():
    for part in ("$", "\\[\n", "[", "`", "|", "<"):
        assert render_markdown(part * 20_000)
    for text in ("$" + "{" * 2000 + "$", r"$\sqrt" * 2000 + "$", "> " * 5000, "* " * 5000):
        assert render_markdown(text)
    for text in ("```c\n" + '"' * 40_000, "```python\n" + "'" * 30_000):
        assert render_markdown(text)


@pytest.mark.parametrize(
    "part", ["so $x_{%d}$, ", "$$\nx_{%d}\n$$\n\n", "[%d", "|a|\n|-|\n|$x$|%d\n\n"]
)
def test_a_text_with_too_much_markup_is_shown_as_it_is(part, monkeypatch):
    """A formula takes half a millisecond: no more than a bounded number is written."""
    written = Mock(side_effect=pages.write_formula)
    monkeypatch.setattr(pages, "write_formula", written)
    monkeypatch.setattr(pages, "MOST_STEPS", 2000)
    few, many = ("".join(part.replace("%d", str(i)) for i in range(n)) for n in (50, 2000))
    assert not render_markdown(few).startswith("<pre") and written.call_count <= 50
    written.reset_mock()
    assert render_markdown(many) == f'<pre class="long">{escape(many)}</pre>\n'
    assert written.call_count == 0


def test_a_very_long_text_is_shown_as_it_is():
    text = "*a* <b>\n" * 30_000
    assert render_markdown(text) == f'<pre class="long">{escape(text)}</pre>\n'


@pytest.mark.slow
def test_a_thought_is_folded_and_can_be_turned_off(tmp_path, browse):
    with make_thinker("qwen3", tmp_path / "m") as thinker:
        page = browse(thinker.url)
        with thinker.script(ANSWER, "Hi.") as script:
            page.ask("Hello?")
            assert page.texts(".thought div") == [THOUGHT]
            assert page.answers == [TEXT]
            summary = page.find(".thought summary")
            assert re.fullmatch(r"Thought for \d+\.\d s", summary.text)
            assert not page.find(".thought div").is_displayed()
            assert "of a thought)" in page.find(".note").text
            page.picture("thought-folded")
            summary.click()
            assert page.find(".thought div").is_displayed()
            page.picture("thought")
            page.driver.refresh()
            page.wait(lambda: page.texts(".thought div") == [THOUGHT])
            page.wait(lambda: page.find("#think").is_displayed())
            page.find("#think-switch").click()
            page.ask("Again?")
            assert page.answers == [TEXT, "Hi."]
        first, second = script.prompts
        assert first.endswith("assistant\n")
        assert second.endswith("<think>\n\n</think>\n\n") and THOUGHT not in second
