"""The page in a real Chromium: a chat, stop, regenerate, edit, branches, reload, session files,
narrow screen, hostile text.

MLX_LLAMA_SCREENSHOTS names a folder for pictures to look at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="pages are tested with selenium")
from selenium.common.exceptions import NoAlertPresentException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from mlx_llama.server.page import render_markdown  # noqa: E402

from .test_thoughts import ANSWER, TEXT, THOUGHT, Thinker  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="no chromium and chromedriver here (apt install chromium-driver)",
)
# the conversation, if there is one
STORED = "localStorage[Object.keys(localStorage).find((key) => / conversation /.test(key))]"


class Page:
    """A tab of Chromium with the page of a server."""

    def __init__(self, url: str, downloads: Path, is_locked: bool = False):
        options = webdriver.ChromeOptions()
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--window-size=1100,900",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ):
            options.add_argument(argument)
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.url, self.downloads = url, downloads
        self.requested: list[str] = []
        self.driver.get(url + "/")
        self.wait(
            lambda: (
                self.find("#key-dialog").is_displayed()
                if is_locked
                else "/" in self.find("#context-text").text
            )
        )

    def find(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )

    def wait(self, condition, seconds: float = 20):
        end = time.monotonic() + seconds
        while True:
            try:
                if result := condition():
                    return result
            except Exception as error:
                if type(error).__name__ not in (
                    "StaleElementReferenceException",
                    "NoSuchElementException",
                ):
                    raise
            assert time.monotonic() < end, self.driver.page_source[-3000:]
            time.sleep(0.05)

    def ask(self, text: str, wait: bool = True) -> None:
        self.find("#question").send_keys(text + Keys.ENTER)
        if wait:
            self.wait_answer()

    def wait_answer(self) -> None:
        self.wait(
            lambda: (
                self.find("#status").text in ("Answered.", "Stopped.", "The answer failed.")
                and not self.all(".running")
            )
        )

    def wait_alert(self):
        """The dialog of the browser: confirm or prompt."""

        def find():
            try:
                return self.driver.switch_to.alert
            except NoAlertPresentException:
                return None

        return self.wait(find)

    def press(self, label: str, which: int = -1) -> None:
        self.wait(
            lambda: [
                button for button in self.all(f"[aria-label='{label}']") if button.is_enabled()
            ]
        )[which].click()

    def narrow(self, width: int = 390, height: int = 760) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True},
        )

    def stored(self) -> list[dict]:
        """The answers of the conversation, as the browser keeps them."""
        nodes = json.loads(self.driver.execute_script(f"return {STORED}"))["nodes"].values()
        return [node for node in nodes if node["role"] == "assistant"]

    def picture(self, name: str) -> None:
        if folder := os.environ.get("MLX_LLAMA_SCREENSHOTS"):
            self.driver.save_screenshot(str(Path(folder) / f"{name}.png"))

    def close(self) -> None:
        """Check that nothing was asked of another machine, and that the console has no error."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])
        # A server's refusals appear in the console, too, and what a test provokes.
        errors = [
            entry
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
            and "Failed to load resource" not in entry["message"]
            and "TrustedHTML" not in entry["message"]
        ]
        self.driver.quit()
        others = [
            url
            for url in self.requested
            if not url.startswith((self.url, "blob:", "data:", "chrome"))
        ]
        assert self.requested and not others and not errors, (others, errors)


@pytest.fixture
def page(guide, tmp_path):
    opened = Page(guide.url, tmp_path)
    yield opened
    opened.close()


@in_browser
def test_a_chat_in_the_browser(page, llm):
    question = [{"role": "user", "content": "Who are you?"}]
    first = llm.generate(question).text
    page.ask("Who are you?")
    assert page.texts(".assistant .text p") == [first]
    assert page.find("#title").text == "Who are you?"
    assert "tokens/s" in page.find(".note").text
    assert page.find("#context-text").text.endswith("/ 512")
    page.picture("chat")
    page.ask("Tell me a story.")
    asked = [
        *question,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Tell me a story."},
    ]
    assert page.texts(".assistant .text p")[-1] == llm.generate(asked).text

    page.driver.refresh()
    page.wait(lambda: len(page.texts(".assistant .text p")) == 2)
    page.press("Answer again")
    page.wait_answer()
    page.wait(lambda: "2/2" in page.texts(".tools span"))
    assert "the same words as before: raise the temperature" in page.texts(".note")[-1]  # greedy
    assert "the same words" not in page.texts(".note")[0]
    page.press("Branch before")
    page.wait(lambda: "1/2" in page.texts(".tools span"))

    page.press("Edit this question", 0)
    area = page.find(".edit textarea")
    area.clear()
    area.send_keys("What is a llama?" + Keys.ENTER)
    page.wait_answer()
    assert page.texts(".user .text") == ["What is a llama?"]
    assert "2/2" in page.texts(".user .tools span")
    page.press("Branch before", 0)
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


@in_browser
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


@in_browser
def test_the_meter_is_amber_at_three_quarters_and_red_at_the_end(page):
    meter = "const meter = document.getElementById('context-meter'); return meter."
    read = page.driver.execute_script
    assert (read(meter + "low"), read(meter + "optimum")) == (384, 0)
    assert 480 < read(meter + "high") < 512 == read(meter + "max")


@in_browser
def test_a_cut_answer_can_be_continued(page, llm):
    page.find("#open-settings").click()
    page.find("[name=max_tokens]").send_keys("9")
    page.find("#settings-close").click()
    page.ask("Who are you?")
    question = [{"role": "user", "content": "Who are you?"}]
    assert page.texts(".assistant .text p") == [llm.generate(question, max_tokens=9).text.strip()]
    page.picture("continue")
    page.press("Continue this answer")
    wanted = llm.generate(question, max_tokens=18).text.strip()
    page.wait(lambda: page.texts(".assistant .text p") == [wanted])
    page.wait_answer()
    page.find("#open-settings").click()
    page.find("[name=max_tokens]").clear()
    page.find("#settings-close").click()
    page.press("Continue this answer")
    page.wait(lambda: page.texts(".assistant .text p") == [llm.generate(question).text.strip()])
    page.wait_answer()
    assert not page.all("[aria-label='Continue this answer']")


@in_browser
def test_a_reload_takes_the_answer_up_again(endless, tmp_path):
    asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2000}
    made = endless.post("/v1/chat/completions", **asked).json()
    page = Page(endless.url, tmp_path)
    try:
        page.find("#open-settings").click()
        page.find("[name=max_tokens]").send_keys("2000")
        page.find("#settings-close").click()
        page.ask("hello", wait=False)
        page.wait(lambda: len(page.texts(".assistant .text")[0]) > 40)
        page.driver.refresh()
        page.wait(lambda: page.all(".running"))
        page.wait_answer()
        (answer,) = page.stored()
        assert answer["text"] == made["choices"][0]["message"]["content"]
        assert answer["usage"] == made["usage"]["total_tokens"]
        assert "2000 tokens" in page.find(".note").text  # the note of the answer's only job

        # A job that the server has forgotten: the answer continues from its text.
        forget = """'"job":"01234567-0123456789abcdef","isCut":true'"""
        page.driver.execute_script(f"{STORED} = {STORED}.replace('\"isCut\":true', {forget})")
        page.driver.refresh()
        page.press("Continue this answer")
        page.wait(lambda: page.stored()[0]["text"] > answer["text"])
        page.find("#stop").click()
        page.wait_answer()
        page.driver.refresh()  # of an answer that was stopped: it stays so
        page.wait(lambda: page.all("[aria-label='Continue this answer']"))
        time.sleep(0.3)
        assert not page.all(".running")
        endless.wait_idle(3)
    finally:
        page.close()


@in_browser
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
    assert page.texts(".assistant .text p") == [answer.strip()]


@in_browser
def test_a_passage_of_the_pages_stands_below_the_guides_answer(page):
    page.ask("error: cannot listen there (Address already in use)")
    assert page.find(".passage").text.startswith("See docs/troubleshooting.md, The server: cannot")
    page.picture("passage")
    page.driver.refresh()
    page.wait(lambda: page.all(".passage"))
    page.ask("Hello!")
    assert len(page.all(".passage")) == 1


@in_browser
def test_formulas_are_drawn(tmp_path):
    thinker = Thinker("qwen3.jinja", tmp_path / "m")
    page = Page(thinker.url, tmp_path)
    try:
        text = r"\[ x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a} \]" + "\n\n" + r"with $a \ne 0$, for $5."
        with thinker.script("<think>\n\n</think>\n\n" + text):
            page.ask("Roots?")
            page.wait(lambda: len(page.all(".assistant math")) == 2)
            assert page.find("math mfrac").rect["height"] > 30  # a fraction, not a line of text
            assert "for $5." in page.find(".assistant .text").text
            page.picture("formulas")
    finally:
        page.close()
        thinker.server.close()


@in_browser
def test_attached_files_become_part_of_the_question(page, tmp_path, llm):
    file = tmp_path / "animals.txt"
    file.write_text("A llama.\n```\ncode\n```\n")
    binary = tmp_path / "data.bin"
    binary.write_bytes(b"\x00\xff" * 9)
    attach = page.find("#attach-file")
    attach.send_keys(str(file))
    count = len(llm.tokenizer.encode(file.read_text(), add_bos=False))
    page.wait(lambda: f"animals.txt · {count} tokens" in page.find("#attached").text)
    page.picture("attached")
    attach.send_keys(str(binary))
    page.wait(lambda: "data.bin: only text files" in page.find("#status").text)
    assert len(page.all("#attached li")) == 1
    page.driver.execute_script(
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


@in_browser
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
    page.find("#import-file").send_keys(str(file))
    page.wait(lambda: "2/2" in page.texts(".tools span"))
    assert page.find("#title").text == "The guide"
    broken = json.loads(file.read_text())
    broken["nodes"][0]["parent"] = broken["nodes"][-1]["id"]  # a circle
    file.write_text(json.dumps(broken))
    page.find("#import-file").send_keys(str(file))
    page.wait(lambda: "is damaged" in page.find("#status").text)


@in_browser
def test_a_bad_setting_is_shown_at_its_field_and_escape_asks(page):
    page.find("#open-settings").click()
    field = page.find("[name=top_k]")
    field.send_keys("many" + Keys.ENTER)
    error = page.wait(lambda: page.find("[name=top_k] + #settings-error"))
    assert error.text.startswith("top_k: a whole number")
    assert page.driver.switch_to.active_element == field
    assert field.get_attribute("aria-invalid") == "true"
    page.picture("settings-error")
    field.send_keys(Keys.ESCAPE)
    page.wait_alert().dismiss()
    assert page.find("#settings").is_displayed() and field.get_attribute("value") == "many"
    field.clear()
    field.send_keys("5" + Keys.ENTER)
    page.wait(lambda: not page.find("#settings").is_displayed())
    assert page.driver.switch_to.active_element.get_attribute("id") == "open-settings"
    page.find("#open-settings").click()
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)  # nothing changed
    page.wait(lambda: not page.find("#settings").is_displayed())
    page.ask("Who are you?")
    page.press("Edit this question")
    page.find(".edit textarea").send_keys(" Really?" + Keys.ESCAPE)
    page.wait_alert().accept()
    page.wait(lambda: not page.all(".edit"))
    focused = page.driver.switch_to.active_element
    assert focused.get_attribute("aria-label") == "Edit this question"


@in_browser
def test_the_log_has_a_line_for_an_answer(serve, tmp_path):
    server = serve()
    page = Page(server.url, tmp_path)
    try:
        page.ask("Who are you?")
        assert page.texts(".assistant .text p")
    finally:
        page.close()
    lines = [line for line in server.text().splitlines() if re.search(" POST |job", line)]
    begun, ended = (line for line in lines if "/page/" not in line)
    assert "POST /v1/jobs 201" in begun and " EOS prompt=" in ended


@in_browser
def test_settings_are_those_of_the_table_and_reach_the_model(page, llm):
    page.find("#open-settings").click()
    names = page.driver.execute_script(
        "return [...document.querySelectorAll('#options [name]')].map((one) => one.name)"
    )
    from mlx_llama.core.generation.options import FIELDS

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
    wanted = llm.generate(
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who are you?"}],
        max_tokens=9,
    ).text
    assert page.texts(".assistant .text p") == [wanted.strip()]
    assert "cut at the limit" in page.find(".note").text


@in_browser
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
    page.find("#import-file").send_keys(str(tmp_path / "longer.json"))
    page.wait(lambda: page.texts(".user .text") == ["Who are you?", "Tell me a story."])
    assert page.texts(".assistant .text p")[-1] == session.messages[-1]["content"].strip()
    assert page.find("#title").text == "longer"
    page.find("#open-settings").click()
    assert page.find("#system").get_attribute("value") == "Be kind."
    page.find("#settings-close").click()
    (tmp_path / "broken.json").write_text('{"format": "mlx_llama session", "version": 2}')
    page.find("#import-file").send_keys(str(tmp_path / "broken.json"))
    page.wait(
        lambda: (
            "version is 2" in page.find("#status").text or "missing" in page.find("#status").text
        )
    )
    assert page.find("#title").text == "longer"


@in_browser
def test_a_narrow_screen_and_the_keyboard(page):
    page.narrow()
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390
    page.ask("Who are you?")
    page.picture("narrow")
    assert not page.find("#sidebar").is_displayed()
    page.find("#open-sidebar").click()
    page.wait(
        lambda: (
            page.find("#sidebar").is_displayed()
            and page.driver.switch_to.active_element.get_attribute("id") == "new"
        )
    )
    page.picture("narrow-list")
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.wait(lambda: not page.find("#sidebar").is_displayed())
    page.find("#question").send_keys(Keys.ARROW_UP)  # the last question again
    assert page.driver.switch_to.active_element.get_attribute("value") == "Who are you?"
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.CONTROL, Keys.SHIFT, "o")
    page.wait(lambda: page.texts(".message") == [])
    assert page.driver.switch_to.active_element.get_attribute("id") == "question"
    # Everything that can be clicked can be reached by Tab.
    unreachable = page.driver.execute_script(
        "return [...document.querySelectorAll('button, input, textarea, a')].filter((one) => "
        "one.tabIndex < 0).length"
    )
    assert unreachable == 0
    unnamed = page.driver.execute_script(
        "return [...document.querySelectorAll('button')].filter((one) => "
        "!(one.textContent.trim() || one.ariaLabel)).length"
    )
    assert unnamed == 0


@in_browser
def test_a_long_name_of_a_model_leaves_room_for_the_settings(page):
    run = page.driver.execute_script
    run(
        "document.getElementById('model').textContent = 'A-Long-Name-135M-Instruct.Q4_1.gguf · cpu'"
    )
    for width in (768, 900, 1280):
        page.driver.set_window_size(width, 800)
        right = run("return document.getElementById('open-settings').getBoundingClientRect().right")
        assert right <= run("return innerWidth"), width


@in_browser
def test_light_and_dark(page):
    back = "return getComputedStyle(document.body).backgroundColor"
    first = page.driver.execute_script(back)
    page.find("#theme").click()
    second = page.driver.execute_script(back)
    assert {first, second} == {"rgb(255, 255, 255)", "rgb(22, 24, 28)"}
    page.driver.refresh()
    page.wait(lambda: page.driver.execute_script(back) == second)


HOSTILE = """<script>window.broken = 1</script> <img src=x onerror="window.broken = 1">

[link](javascript:window.broken=1) ![picture](http://192.0.2.1/spy.png) <b>bold</b>

```html
<script>window.broken = 1</script>
```

| a | b |
|---|---|
| `<i>` | **c** |
"""


@in_browser
def test_hostile_text_is_shown_and_never_run(page, tmp_path):
    session = {
        "format": "mlx_llama session",
        "version": 1,
        "model": "<b>m</b>",
        "system": None,
        "options": {},
        "dropped": 0,
        "messages": [
            {"role": "user", "content": HOSTILE},
            {"role": "assistant", "content": HOSTILE},
        ],
    }
    file = tmp_path / "<img src=x onerror=window.broken=1>.json"
    file.write_text(json.dumps(session))
    page.find("#import-file").send_keys(str(file))
    page.wait(lambda: page.all(".assistant table"))
    time.sleep(0.3)
    page.picture("hostile")
    assert page.driver.execute_script("return window.broken") is None
    text = page.texts(".assistant .text")[0]
    assert "<script>window.broken = 1</script>" in text and "<b>bold</b>" in text and "<i>" in text
    assert not page.all("#log script, #log img, #log b, #log [onerror], #log [href^='javascript']")
    assert page.all(".assistant pre .nt") and page.texts(".user .text") == [HOSTILE]
    # A script that were inserted all the same: the policy stops it.
    page.driver.execute_script(
        "const one = document.createElement('p'); try { one.innerHTML = '<img src=x onerror=1>' } "
        "catch (error) { window.stopped = error.name }"
    )
    assert page.driver.execute_script("return window.stopped") == "TypeError"


@in_browser
def test_stop_and_errors_in_the_browser(endless, tmp_path):
    page = Page(endless.url, tmp_path)
    try:
        page.find("#open-settings").click()
        page.find("[name=max_tokens]").send_keys("90000")
        page.find("#settings-close").click()
        page.ask("hello", wait=False)
        page.wait(lambda: len(page.texts(".assistant .text")[0]) > 20)
        assert page.find("#stop").is_displayed() and endless.metric("rows_running") == 1
        page.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
        page.wait_answer()
        endless.wait_idle(3)
        assert page.find(".note").text == "stopped" and page.find("#send").is_displayed()
        assert int(page.find("#context-meter").get_attribute("value")) > 20
        kept = page.texts(".assistant .text")[0]
        page.driver.refresh()
        page.wait(
            lambda: (
                page.texts(".assistant .text")
                and len(page.texts(".assistant .text")[0]) == len(kept)
            )
        )
        # A question that does not fit: the error stands where the answer would.
        page.driver.execute_script(
            "arguments[0].value = 'word '.repeat(120000)", page.find("#question")
        )
        page.ask("")
        error = page.find(".message .error")
        assert "tokens and the context holds 100000" in error.text
        shown = (
            "const box = arguments[0].getBoundingClientRect(); return box.top >= 0 && box.bottom "
            "<= innerHeight"
        )
        page.wait(lambda: page.driver.execute_script(shown, error))
        # The next question is asked without the one that failed.
        page.ask("hi", wait=False)
        page.wait(lambda: len(page.texts(".assistant .text")[-1]) > 5)
        page.find("#stop").click()
        page.wait_answer()
        assert len(page.texts(".message .error")) == 1
        page.picture("error")
    finally:
        page.close()


@in_browser
def test_a_server_that_dies_is_named_as_the_cause(serve, roomy, tmp_path):
    server = serve("--model", roomy)
    page = Page(server.url, tmp_path)
    try:
        page.find("#open-settings").click()
        page.find("[name=max_tokens]").send_keys("90000")
        page.find("#settings-close").click()
        page.ask("hello", wait=False)
        page.wait(lambda: len(page.texts(".assistant .text")[0]) > 20)
        server.process.kill()
        page.wait_answer()
        assert page.find(".message .error").text.startswith(
            "The connection ended before the answer did."
        )
    finally:
        page.close()


@in_browser
def test_a_key_is_asked_for(serve, tmp_path):
    server = serve("--api-key", "sesame")
    page = Page(server.url, tmp_path, is_locked=True)
    try:
        page.find("#key").send_keys("sesame" + Keys.ENTER)
        page.wait(lambda: page.find("#context-text").text == "0 / 512")
        page.ask("Who are you?")
        assert page.texts(".assistant .text p")
    finally:
        page.close()


# Without a browser


def test_a_session_file_with_tool_calls_is_refused_with_the_reason(guide):
    messages = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]
    saved = {
        "format": "mlx_llama session",
        "version": 1,
        "model": "m",
        "system": None,
        "options": {},
        "dropped": 0,
    }
    done = guide.post("/page/session", text=json.dumps(saved | {"messages": messages}))
    assert done.status_code == 200 and done.json()["messages"] == messages
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    calls = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    ]
    done = guide.post(
        "/page/session", text=json.dumps(saved | {"messages": [messages[0], *calls, messages[1]]})
    )
    assert done.status_code == 400
    assert "has tool calls, which the page cannot show" in done.json()["error"]["message"]


def test_headers_of_the_page(guide):
    for path, kind in (
        ("/", "text/html"),
        ("/page/app.js", "text/javascript"),
        ("/page/style.css", "text/css"),
        ("/page/code.css", "text/css"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/docs", "text/html"),
    ):
        done = guide.http.get(path)
        assert done.status_code == 200 and done.headers["content-type"].startswith(kind), path
        policy = done.headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "unsafe" not in policy
            and "script-src 'self';" in policy
        ), path
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
    for text in (
        "$" * 20_000,
        "\\[\n" * 20_000,
        "$" + "{" * 2000 + "$",
        r"$\sqrt" * 2000 + "$",
        "[" * 20_000,
        "`" * 20_000,
        "> " * 5000,
        "* " * 5000,
        "|" * 20_000,
        "```c\n" + '"' * 40_000,
        "<" * 20_000,
        "```python\n" + "'''" * 10_000,
    ):
        assert render_markdown(text)


@in_browser
def test_a_thought_is_folded_and_can_be_turned_off(tmp_path):
    thinker = Thinker("qwen3.jinja", tmp_path / "m")
    page = Page(thinker.url, tmp_path)
    try:
        with thinker.script(ANSWER, "Hi.") as script:
            page.ask("Hello?")
            assert page.texts(".thought div") == [THOUGHT]
            assert page.texts(".assistant .text p") == [TEXT]
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
            assert page.texts(".assistant .text p") == [TEXT, "Hi."]
        first, second = script.prompts
        assert first.endswith("assistant\n")
        assert second.endswith("<think>\n\n</think>\n\n") and THOUGHT not in second
    finally:
        page.close()
        thinker.server.close()
