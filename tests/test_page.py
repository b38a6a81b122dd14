"""The page, in a real browser: what a user types, presses and sees.

The server runs in this process (see test_server), so that a test can slow its engine down enough to
watch it. Without chromium the tests skip; where KILOLM_NEEDS_ALL is set, as in CI, they fail.
"""

import json
import os
import time

import pytest
from conftest import program
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.common.by import By
from serving import CHAT, COMPLETIONS, Broken, Local, until

import server as server_module
from openai_api import Problem

BROWSER, DRIVER = program("chromium"), program("chromedriver")
os.environ["SE_OFFLINE"] = "true"  # nothing may be downloaded

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def local():
    started = Local(num_blocks=100)
    yield started
    started.close()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--no-first-run", "--no-proxy-server", "--window-size=1400,1000",
                 f"--user-data-dir={tmp_path_factory.mktemp('chrome')}"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


class Page:
    """What a user can do and see."""

    def __init__(self, chrome: Chrome, local: Local) -> None:
        self.chrome, self.url = chrome, f"http://127.0.0.1:{local.port}/"
        self.expected = ""  # in the console
        for kind in ("browser", "performance"):
            chrome.get_log(kind)  # of the page before
        chrome.get(self.url)
        until(lambda: self.text("#model") == "shakespeare" or self.text("#state"))

    def all(self, selector: str) -> list:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(x => x.textContent)"
        return self.js(script, selector)

    def styles(self, selector: str, name: str) -> list[str]:
        """Of what is on the page now; elements would be stale where it is drawn anew."""
        script = """return [...document.querySelectorAll(arguments[0])].map(
            x => getComputedStyle(x).getPropertyValue(arguments[1]))"""
        return self.js(script, selector, name)

    def js(self, script: str, *args: object):
        return self.chrome.execute_script(script, *args)

    def type(self, selector: str, text: str) -> None:
        box = self.all(selector)[-1]
        box.clear()
        box.send_keys(text)

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self.type(f"#{name}", str(value))

    def click(self, selector: str) -> None:
        self.all(selector)[0].click()

    def press(self, *keys: str) -> None:
        """Keys held together, whatever has the focus."""
        chain = ActionChains(self.chrome)
        for key in keys[:-1]:
            chain.key_down(key)
        chain.send_keys(keys[-1])
        for key in keys[:-1]:
            chain.key_up(key)
        chain.perform()

    def replies(self) -> list[str]:
        """What the model said, newest first; the prompts stand in spans of their own."""
        return self.texts(".reply pre span:not(.asked)")

    def notes(self) -> list[str]:
        return self.texts(".reply .note")

    def numbers(self) -> dict[str, str]:
        texts = self.texts("#numbers dt, #numbers dd")  # at once, for they change
        return dict(zip(texts[::2], texts[1::2], strict=True))

    def canvas(self) -> str:
        return self.js("return document.getElementById('blocks').toDataURL()")

    def ended(self) -> bool:
        return self.js("return running.size === 0")

    def clean(self) -> None:
        """No request for another host, and nothing in the console."""
        urls = []
        for entry in self.chrome.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                urls.append(event["params"]["request"]["url"])
        assert urls, "the log of requests is empty"
        sent = [url for url in urls if url.startswith(("http", "ws"))]
        ours = [url for url in sent if not url.startswith("chrome-untrusted:")]  # its own first tab
        assert not [url for url in ours if not url.startswith(self.url)]
        log = self.chrome.get_log("browser")
        messages = [entry["message"] for entry in log if entry["level"] in ("WARNING", "SEVERE")]
        assert not [message for message in messages if (self.expected or "?") not in message]
        assert bool(messages) == bool(self.expected)


@pytest.fixture
def page(chrome, local):
    opened = Page(chrome, local)
    yield opened
    opened.clean()
    chrome.get("about:blank")  # leaves: whatever runs is aborted
    local.settle()


@pytest.fixture
def slow(local, monkeypatch):
    """An engine that can be watched."""
    step = local.engine.step
    monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.02) or step())


SETTINGS = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 3}


@pytest.mark.parametrize("how", ["button", pytest.param("keys", marks=pytest.mark.slow)])
def test_run(page, local, slow, how):
    """The text came in one piece; a setting did not reach the server; a space was lost."""
    page.type("textarea", "JULIET:\nO")
    page.set(**SETTINGS, max_tokens=40)
    if how == "button":
        page.click("#run")
    else:
        page.press(Keys.CONTROL, Keys.ENTER)
    lengths = set()
    until(lambda: lengths.add(len("".join(page.replies()))) or (lengths > {0} and page.ended()))
    assert len(lengths) > 5
    assert page.texts(".asked") == ["JULIET:\nO"]
    body = {**SETTINGS, "prompt": "JULIET:\nO", "max_tokens": 40}
    reply = local.post(COMPLETIONS, body).json
    assert page.replies() == [reply["choices"][0]["text"]]
    tokens = reply["usage"]["completion_tokens"]
    assert f"{tokens} tokens at " in page.notes()[0] and "first token after 0." in page.notes()[0]


@pytest.mark.slow
def test_several_prompts(page, local):
    """One prompt's text under another; the n of a prompt all in one."""
    page.type("textarea", "ROMEO:")
    page.click("#add")
    page.press("K")  # the new box has the focus
    page.type("textarea", "KING:")
    page.set(**SETTINGS, max_tokens=20, n=2)
    page.click("#run")
    until(lambda: all(page.replies()) and page.ended())
    body = {**SETTINGS, "prompt": ["ROMEO:", "KING:"], "max_tokens": 20, "n": 2}
    choices = local.post(COMPLETIONS, body).json["choices"]
    assert page.replies() == [choice["text"] for choice in choices]
    assert page.texts(".asked") == ["ROMEO:", "ROMEO:", "KING:", "KING:"]
    assert len({*page.styles(".reply", "border-left-color")}) == 4


@pytest.mark.slow
def test_chat(page, local):
    """The chat went to the completions, or the role was shown as text."""
    page.click("[value=chat]")
    page.type("textarea", "Who goes there?")
    page.set(**SETTINGS, max_tokens=30)
    page.click("#run")
    until(lambda: page.replies() and page.ended())
    body = {
        **SETTINGS,
        "max_tokens": 30,
        "messages": [{"role": "user", "content": "Who goes there?"}],
    }
    (choice,) = local.post(CHAT, body).json["choices"]
    assert page.replies() == [choice["message"]["content"]]


def test_the_engine_is_shown(page, local, slow):
    """Blocks that never change, rows that never come or never go."""
    until(lambda: page.numbers().get("running") == "0")
    free, steps = page.canvas(), int(page.numbers()["steps"])
    page.type("textarea", "ROMEO:\n" * 6)
    page.set(max_tokens=900, seed=1, n=2)
    page.click("#run")
    until(lambda: len(page.all("#running tr")) == 2 and "decode" in page.text("#running"))
    used = page.canvas()
    assert used != free
    until(lambda: page.canvas() != used)  # it grows
    row = page.texts("#running tr:first-child td")
    length, longest = map(int, row[3].split(" / "))
    assert 0 < length < longest <= 1024 and row[1] == "decode 1"
    numbers = page.numbers()
    assert numbers["running"] == "2" and numbers["waiting"] == "0"
    assert int(numbers["steps"]) > steps and numbers["cache used"] not in ("0 %", "–")
    until(lambda: int(page.numbers()["tokens/s"]) > 0)
    assert page.numbers()["guesses accepted"] == "off"
    colours = {*page.styles("#running .swatch", "background-color")}
    borders = {*page.styles(".reply", "border-left-color")}
    assert colours == borders and len(colours) == 2  # a reply and its row have one colour
    page.click("#stop")
    until(lambda: not page.all("#running tr"))
    assert page.numbers()["running"] == "0" and page.numbers()["cache used"] == "0 %"
    assert page.canvas() not in (free, used)  # what is cached is drawn in another way


def test_the_rate_is_never_0_while_tokens_come(page, local, monkeypatch):
    """0 tokens/s while twelve ran: no step had ended since the last snapshot, a tenth of a second
    before."""
    step = local.engine.step
    monkeypatch.setattr(local.engine, "step", lambda: time.sleep(0.3) or step())
    page.set(max_tokens=900, seed=1, n=8)
    page.click("#run")
    until(lambda: page.numbers().get("tokens/s", "0") != "0")
    rates = []
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        rates.append(int(page.numbers()["tokens/s"]))
    assert len(rates) > 5 and min(rates) > 0, rates
    page.click("#stop")
    until(lambda: page.numbers()["running"] == page.numbers()["tokens/s"] == "0")


def test_the_rate_forgets(page):
    """A rate that averages over a pause, or over all that was before; a new server, which counts
    from 0 again, had a rate below 0."""
    script = """const rates = []; samples = [];
        for (const [at, tokens, busy] of arguments[0]) rates.push(rate(at, tokens, busy));
        samples = []; return rates.map(Math.round)"""
    samples = [[0, 0, False], [90_000, 0, False], [90_100, 10, True], [90_200, 10, True],
               [93_300, 330, True], [93_400, 330, False], [99_000, 330, False],
               [99_100, 340, True], [99_200, 5, True], [99_300, 15, True], [109_300, 15, True],
               [109_400, 1015, True], [113_000, 1195, True], [116_100, 1350, True]]  # fmt: skip
    rates = page.js(script, samples)
    assert rates[:4] == [0, 0, 100, 50] and rates[4] == 103, rates  # 320 in 3.1 s
    assert rates[6:10] == [0, 100, 0, 100], rates
    assert rates[-1] == 50, rates  # 155 in 3.1 s: what was before is forgotten


@pytest.mark.parametrize("how", [pytest.param("button", marks=pytest.mark.slow), "Escape"])
def test_stop(page, local, slow, how):
    """The text stood still, and the server went on."""
    page.type("textarea", "ROMEO:")
    page.set(max_tokens=900, seed=2)
    page.click("#run")
    until(lambda: page.replies() and page.replies()[0])
    assert local.engine.running
    if how == "button":
        page.click("#stop")
    else:
        page.press(Keys.ESCAPE)
    until(lambda: page.notes() and page.notes()[0].endswith("; stopped"))
    local.settle(5)
    before = page.replies()
    assert before[0]
    page.set(max_tokens=5)
    page.click("#run")  # and again
    until(lambda: len(page.replies()) == 2 and page.ended())
    assert page.replies()[1:] == before
    assert not page.all(".error")


@pytest.mark.slow
def test_crowd(page, local, slow):
    """Sixteen prompts, of which one ran; or each opened a connection, and six ran."""
    page.set(max_tokens=60, seed=1)
    page.click("#crowd")
    until(lambda: len(page.all("#running tr")) == 8 and page.text("#queue") != "0")  # 8 at once
    assert len(page.all(".reply")) == 16 and int(page.text("#queue")) <= 8
    assert page.text("#waiting").count("tokens") == int(page.text("#queue"))
    until(lambda: page.numbers()["prefix hits"] not in ("0 %", "–"))
    until(lambda: sum(map(bool, page.replies())) >= 8)
    until(lambda: sum(map(bool, page.replies())) == 16, 30)
    page.click("#stop")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": -1}, "temperature must be"), ({"max_tokens": 5000}, "length is 1024")],
)  # fmt: skip
def test_bad_settings(page, settings, message):
    """Nothing happened, and nobody said why."""
    page.expected = "400"
    page.type("textarea", "ROMEO:")
    page.set(**settings)
    page.click("#run")
    note = until(lambda: page.all(".reply .note.error"))[0]
    assert message in note.text and note.is_displayed()


@pytest.mark.slow
def test_error_in_the_middle(page, local, slow, monkeypatch):
    """A stream that broke looked like one that had ended."""
    monkeypatch.setattr(local.engine, "runner", Broken(local.engine.runner, 20))
    page.set(max_tokens=200, seed=1)
    page.click("#run")
    until(lambda: page.all(".reply .note.error"))
    assert "engine failed" in page.notes()[0] and page.replies()[0]
    page.set(max_tokens=5)
    page.click("#run")
    until(lambda: len(page.replies()) == 2 and page.replies()[0] and page.ended())
    assert len(page.all(".error")) == 1


def test_api_key(chrome, local, monkeypatch):
    """The page asked for no key, or sent it with one request and not with the next."""
    monkeypatch.setitem(vars(local.args), "api_key", "secret")
    page = Page(chrome, local)
    page.expected = "401"
    assert "key" in page.text("#state") and page.all("#key")[0].get_attribute("type") == "password"
    page.set(max_tokens=5)
    page.click("#run")
    assert "key" in until(lambda: page.all(".reply .note.error"))[0].text
    page.set(key="secret")
    until(lambda: page.text("#model") == "shakespeare" and not page.text("#state"))
    until(lambda: page.numbers().get("running") == "0")
    page.click("#run")
    until(lambda: len(page.replies()) == 2 and page.replies()[0] and page.ended())
    page.clean()


def test_text_is_text(page):
    """A prompt, or what a model says, was read as HTML."""
    prompt = "<b>bold</b><img src=x onerror=document.title=1>"
    page.type("textarea", prompt)
    page.set(max_tokens=5, seed=1)
    page.click("#run")
    until(lambda: page.replies() and page.ended())
    assert page.texts(".asked") == [prompt]
    assert not page.all(".reply b, .reply img, #running b b, #running img")
    assert page.chrome.title == "kilolm"


@pytest.mark.slow
def test_keyboard(page):
    """Run could be reached by mouse alone, or did not show that it has the focus."""
    script = "const a = document.activeElement; return a.id || a.name || a.ariaLabel || a.tagName"
    assert page.js(script) == "Prompt 1"  # to type at once
    seen = []
    while len(seen) < 20 and "run" not in seen:
        page.press(Keys.TAB)
        seen.append(page.js(script))
    assert seen == ["temperature", "top_p", "top_k", "max_tokens", "n", "seed", "key", "run"]
    width = page.js("return getComputedStyle(document.activeElement).outlineWidth")
    assert float(width.removesuffix("px")) >= 2
    page.set(max_tokens=5)
    page.js("document.getElementById('run').focus()")
    page.press(Keys.ENTER)
    until(lambda: page.replies() and page.replies()[0] and page.ended())
    for control in page.all("textarea, input, button"):
        assert control.accessible_name, control.get_attribute("outerHTML")


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 700, 1000])
def test_no_horizontal_scroll(page, local, slow, width):
    """A phone had to scroll sideways, by the width of a table or of a long word."""
    metrics = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500}
    page.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.type("textarea", "M" * 300)
        page.set(max_tokens=200, n=3, seed=1)
        page.click("#run")
        until(lambda: page.all("#running tr") and any(page.replies()))
        wide = page.js("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0
        assert page.all("#blocks")[0].size["width"] > width / 3
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_the_server_goes_and_comes(page, local, monkeypatch):
    """After a restart of the server the page had to be loaded again."""
    until(lambda: page.numbers().get("running") == "0")
    page.expected = "503"

    def away(*_: object) -> None:
        raise Problem(503, "away")

    monkeypatch.setattr(server_module.Connection, "route", away)
    until(lambda: "away" in page.text("#state"))
    monkeypatch.undo()
    until(lambda: not page.text("#state"))
    page.set(max_tokens=5)
    page.click("#run")
    until(lambda: page.replies() and page.replies()[0] and page.ended())
